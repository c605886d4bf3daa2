// The filter bank's feeders: inputs to shared memory, stage by stage, 16 bytes of channels of a place side by side.
#pragma once

#include "device/barrier.cuh"
#include "filter_bank_product.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// `bytes` of neighbouring channels, as words.
template <int kBytes>
struct FilterBankAccess {
  using type =
      std::conditional_t<kBytes == 16, uint4,
                         std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
};

template <class Traits>
class FilterBankFeeder {
  using T = typename Traits::Element;
  using Raw = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  static constexpr int kVector = Traits::kVector, kFeeders = Traits::kFeeders;
  static constexpr int kGranules = kFilterBankChunks * 2;  // vectors of a place in a stage

  const FilterBankParams& p;
  const FilterBankBlock& block;
  const int thread;
  const Raw* const input;
  const uint32_t positions;  // channels_last: those of all places, in shared memory

 public:
  __device__ FilterBankFeeder(const FilterBankParams& p, const FilterBankBlock& block, int thread, uint32_t positions)
      : p(p),
        block(block),
        thread(thread),
        input(static_cast<const Raw*>(p.input) + static_cast<int64_t>(block.group) * p.group_in * p.in.channel),
        positions(positions) {}

  __device__ void run(FilterBankBarriers barriers, uint32_t stages) const {
    if (p.input_bytes > 1) list_positions();
    int slot = 0, parity = 1;
#pragma unroll 1
    for (int stage = block.first_stage; stage < block.end_stage; ++stage) {
      mbarrier_wait(barriers.empty(slot), parity);
      const uint32_t to = stages + slot * p.stage_bytes;
      switch (p.input_bytes) {
        case 0:
          copy_positions<1>(stage, to);
          break;
        case 1:
          copy_positions<2>(stage, to);
          break;
        case 16:
          copy_channels<16>(stage, to);
          break;
        case 8:
          copy_channels<8>(stage, to);
          break;
        case 4:
          copy_channels<4>(stage, to);
          break;
        default:
          copy_channels<sizeof(T)>(stage, to);
      }
      fence_shared_writes();
      mbarrier_arrive(barriers.full(slot));
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
  }

 private:
  // The item and the position of a place; whether there is an input.
  __device__ __forceinline__ bool find_input(int place, int& item, int& position) const {
    const FilterBankPlace at(p, block.column + place);
    item = at.item, position = at.base + p.first_input;
    return item < p.batch && static_cast<unsigned>(position) < static_cast<unsigned>(p.length);
  }

  // Contiguous: a thread takes one or two neighbouring positions, of some vectors of channels.
  template <int kPositions>
  __device__ __forceinline__ void copy_positions(int stage, uint32_t to) const {
    const int group = thread / p.feed_lanes, channel = stage * kGranules * kVector;
    if (group >= p.feed_groups) return;
#pragma unroll 1
    for (int place = (thread - group * p.feed_lanes) * kPositions; place < p.held; place += p.feed_lanes * kPositions) {
      int item, position;
      const bool exists = find_input(place, item, position);
      const Raw* const from = input + (exists ? item * p.in.batch + position : 0) + channel * p.in.channel;
      const int channels = exists ? p.group_in - channel : 0;
      if (channel + kGranules * kVector <= p.group_in) {
        copy_vectors<kPositions, true>(from, channels, to + place * 16, group);
      } else {
        copy_vectors<kPositions, false>(from, channels, to + place * 16, group);
      }
    }
  }
  template <int kPositions, bool kWhole>
  __device__ __forceinline__ void copy_vectors(const Raw* from, int channels, uint32_t to, int first) const {
    using Access = typename FilterBankAccess<sizeof(T) * kPositions>::type;
    constexpr int kBatch = !kWhole           ? 1
                           : kPositions == 2 ? (Traits::kThree ? 3 : 6)
                           : sizeof(T) == 4  ? 4
                                             : 3;  // vectors in flight
    // Lanes store their two vectors in orders that keep banks apart.
    const int swap = (thread ^ thread >> 2) & 1;
    const int64_t pitch = p.in.channel;
    const Raw* at = from + first * kVector * pitch;
#pragma unroll 1
    for (int g = first; g < kGranules; g += p.feed_groups * kBatch) {
      Access raw[kBatch][kVector];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int left = g + b * p.feed_groups < kGranules ? channels - (g + b * p.feed_groups) * kVector : 0;
        const Raw* next = at;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          raw[b][c] = Access{};
          if (kWhole ? left > 0 : left > c) raw[b][c] = __ldg(reinterpret_cast<const Access*>(next));
          next += pitch;
          asm("" : "+l"(next));  // one address at a time: registers are short
        }
        at += p.feed_groups * kVector * pitch;
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (g + b * p.feed_groups >= kGranules) break;
        uint32_t word[2][4];
        gather(raw[b], word);
        const uint32_t place = to + (g + b * p.feed_groups) * p.pitch;
        if constexpr (kPositions == 1) {
          store(place, word[0]);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t other = swap ? word[0][w] : word[1][w];
            word[0][w] = swap ? word[1][w] : word[0][w], word[1][w] = other;
          }
          store(place + swap * 16, word[0]);
          store(place + (swap ^ 1) * 16, word[1]);
        }
      }
    }
  }
  // The words of each position.
  template <typename Access>
  __device__ __forceinline__ static void gather(const Access (&raw)[kVector], uint32_t (&word)[2][4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4 && sizeof(Access) == 4) {
        word[0][w] = raw[w];
      } else if constexpr (sizeof(T) == 4) {
        word[0][w] = raw[w].x, word[1][w] = raw[w].y;
      } else {
        word[0][w] = __byte_perm(raw[2 * w], raw[2 * w + 1], 0x5410);
        word[1][w] = __byte_perm(raw[2 * w], raw[2 * w + 1], 0x7632);
      }
    }
  }

  // channels_last: the positions of all places, counted through the items; -1: none.
  __device__ __forceinline__ void list_positions() const {
    for (int place = thread; place < p.held; place += kFeeders) {
      int item, position;
      const bool exists = find_input(place, item, position);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(positions + place * 4), "r"(exists ? item * p.length + position : -1)
                   : "memory");
    }
    asm volatile("bar.sync 2, %0;" ::"n"(kFeeders) : "memory");
  }
  // channels_last: a thread takes a vector, by accesses of kBytes, of some places.
  template <int kBytes>
  __device__ __forceinline__ void copy_channels(int stage, uint32_t to) const {
    using Access = typename FilterBankAccess<kBytes>::type;
    constexpr int kAccesses = 16 / kBytes, kBatch = kAccesses == 1 ? 5 : kAccesses == 8 ? 2 : 3;
    constexpr int kStep = kFeeders / kGranules;
    const int granule = thread % kGranules, channel = (stage * kGranules + granule) * kVector;
    const int left = (p.group_in - channel) * static_cast<int>(sizeof(T));  // bytes
    to += granule * p.pitch;
#pragma unroll 1
    for (int i = thread / kGranules; i < p.held; i += kStep * kBatch) {
      Access raw[kBatch][kAccesses];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int position = -1;
        if (i + b * kStep < p.held) {
          asm volatile("ld.shared.b32 %0, [%1];" : "=r"(position) : "r"(positions + (i + b * kStep) * 4) : "memory");
        }
        const Access* const at =
            reinterpret_cast<const Access*>(input + static_cast<int64_t>(position) * p.in.axis[2] + channel);
#pragma unroll
        for (int c = 0; c < kAccesses; ++c) {
          raw[b][c] = Access{};
          if (position >= 0 && c * kBytes < left) raw[b][c] = __ldg(at + c);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (i + b * kStep >= p.held) break;
        uint32_t word[4];
        if constexpr (kBytes == 16) {
          word[0] = raw[b][0].x, word[1] = raw[b][0].y, word[2] = raw[b][0].z, word[3] = raw[b][0].w;
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            if constexpr (kBytes == 8) {
              word[w] = w % 2 == 0 ? raw[b][w / 2].x : raw[b][w / 2].y;
            } else if constexpr (kBytes == 4) {
              word[w] = raw[b][w];
            } else {
              word[w] = raw[b][2 * w] | static_cast<uint32_t>(raw[b][2 * w + 1]) << 16;
            }
          }
        }
        store(to + (i + b * kStep) * 16, word);
      }
    }
  }

  // A vector; float32: the rests stand behind all of them.
  __device__ __forceinline__ void store(uint32_t to, const uint32_t (&word)[4]) const {
    if constexpr (Traits::kThree) {
      uint32_t high[4], rest[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        high[w] = filter_bank_split(word[w], rest[w]);
        rest[w] = filter_bank_round(rest[w]);
      }
      store_vector(to, high);
      store_vector(to + kGranules * p.pitch, rest);
    } else if constexpr (Traits::kRounds) {
      uint32_t rounded[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) rounded[w] = filter_bank_round(word[w]);
      store_vector(to, rounded);
    } else {
      store_vector(to, word);
    }
  }
  __device__ __forceinline__ static void store_vector(uint32_t to, const uint32_t (&word)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  }
};

#endif

}  // namespace fastconvt::cuda
