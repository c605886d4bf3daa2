// The overlap-add family's way from global to shared memory: tables of a block, and stages of inputs and weights.
//
// A step of inputs is two halves of four words of 32 bits by position: 16 bytes a position, so that ldmatrix reads
// eight neighbours without conflicts, whatever the offset. A step of weights is fragments: lane l = 4 * g + t holds
// words t and t + 4 of column g, in float32 with
// the rests of both.
#pragma once

#include "device/copy_groups.cuh"
#include "device/shared_address.cuh"
#include "overlap_add_params.cuh"
#include "overlap_add_words.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// What a warp does for one offset: where its inputs begin, and the fragments of its column tiles; -1: none. In bytes.
struct alignas(16) OverlapAddEntry {
  int input;
  int fragment[kOverlapAddMaxTiles];
};

// kThree: positions are three bfloat16 terms of eight float32 channels, one after the other.
template <typename T, OverlapAddPrecision kPrecision, int kTiles, bool kThree = false>
class OverlapAddStage {
  static constexpr bool kStrict = kPrecision == OverlapAddPrecision::kFloat32;
  static constexpr int kFragmentBytes = overlap_add_fragment_bytes(kStrict);
  static constexpr bool kRounds = kPrecision == OverlapAddPrecision::kTf32;  // to TF32, on the way
  static constexpr int kHalves = 4 / sizeof(T);                              // channels of a word
  static constexpr int kBatch = sizeof(T) == 4 ? 2 : 1;                      // positions in flight
  static constexpr int kWeightBatch = 2;                                     // pairs of words in flight

  const OverlapAddParams& p;
  unsigned char* const shared;
  const T* input;   // the group's first channel at the first position that the box reaches
  const T* weight;  // the group's

 public:
  // Makes the tables, too, which are there after a barrier.
  __device__ OverlapAddStage(const OverlapAddParams& p, unsigned char* shared) : p(p), shared(shared) {
    const OverlapAddBlock block(p, p.column_warps * kTiles);
    const T* input = static_cast<const T*>(p.input) + block.cell[0] * p.in.batch +
                     static_cast<int64_t>(block.group) * p.group_in * p.in.channel;
#pragma unroll
    for (int a = 0; a < 3; ++a) input += min(max(first_input(block, a), 0), p.axis[a].in - 1) * p.in.axis[a];
    // In shared memory, since registers are short.
    if (threadIdx.x == 0) {
      const T** const pointers = reinterpret_cast<const T**>(shared + p.pointers);
      pointers[0] = input;
      pointers[1] = static_cast<const T*>(p.weight) + static_cast<int64_t>(block.group) * p.group_in * p.weight_channel;
    }
    make_entries(block);
    make_weight_offsets(block);
    make_positions(block);
  }

  // Copies step `step` to `target`, by a team; it is there after the team's copies have arrived and its next barrier.
  __device__ __forceinline__ void copy_step(int step, unsigned char* target, int thread, int threads) {
    input = static_cast<const T* const volatile*>(static_cast<void*>(shared + p.pointers))[0];
    weight = static_cast<const T* const volatile*>(static_cast<void*>(shared + p.pointers))[1];
    const uint32_t to = shared_address(target), to_weights = to + p.step_weights;
    // The first weights are on their way while inputs are.
    Raw raw[kWeightBatch][2];
    load_weights(step, thread, threads, raw);
    const bool whole = (step + 1) * kOverlapAddWords * kHalves <= p.group_in;
    if (p.granules) {
      copy_granules(step, to, thread, threads);
    } else if (!p.pairs) {
      copy_inputs(step, to, thread, threads);
    } else if (!whole) {
      copy_pairs<false, 1>(step, to, thread, threads);
    } else if (kHalves == 1 && p.held_positions > 2 * threads) {
      copy_pairs<true, 2>(step, to, thread, threads);
    } else {
      copy_pairs<true, 1>(step, to, thread, threads);
    }
    store_weights(to_weights, thread, threads, raw);
    for (int i = thread + kWeightBatch * threads; i < p.fragments * 32; i += kWeightBatch * threads) {
      load_weights(step, i, threads, raw);
      store_weights(to_weights, i, threads, raw);
    }
  }

  // A word of channels, or zeros, on its way: one register a channel. channels: how many exist.
  using Raw = uint32_t[kHalves];
  static __device__ __forceinline__ void load(Raw& raw, const T* at, int64_t stride, int channels) {
    if constexpr (kHalves == 1) {
      raw[0] = channels > 0 ? __ldg(reinterpret_cast<const uint32_t*>(at)) : 0u;
    } else {
      raw[0] = overlap_add_load_half(at, channels > 0), raw[1] = overlap_add_load_half(at + stride, channels > 1);
    }
  }
  static __device__ __forceinline__ uint32_t join(const Raw& raw) {
    return raw[0] | raw[kHalves - 1] << 16 * (kHalves - 1);
  }

 private:
  __device__ int first_input(const OverlapAddBlock& block, int a) const {
    return p.axis[a].first_base + block.cell[a + 1] * p.axis[a].bases + p.axis[a].low - (a == 2 ? p.lead : 0);
  }

  // Offsets of positions, from the first one that exists; -1: it does not.
  __device__ void make_positions(const OverlapAddBlock& block) const {
    int* const positions = reinterpret_cast<int*>(shared + p.positions);
    for (int i = threadIdx.x; i < p.held_positions; i += blockDim.x) {
      int at[4];
      overlap_add_split(i, p.by_held, at);
      bool exists = block.cell[0] + at[0] < p.batch;
      int64_t offset = at[0] * p.in.batch;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int first = first_input(block, a), x = first + at[a + 1];
        exists = exists && x >= 0 && x < p.axis[a].in;
        offset += (x - max(first, 0)) * p.in.axis[a];
      }
      positions[i] = exists ? static_cast<int>(offset) : -1;
    }
  }

  __device__ void make_entries(const OverlapAddBlock& block) const {
    OverlapAddEntry* const entries = reinterpret_cast<OverlapAddEntry*>(shared + p.entries);
    for (int i = threadIdx.x; i < p.column_warps * p.entry_count; i += blockDim.x) {
      int rest = i, at[3];
      const int warp = p.by_entries(rest);
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        at[a] = rest;
        rest = p.axis[a].by_reach(at[a]);
      }
      OverlapAddEntry entry{};
      entry.input = ((at[0] * p.held[2] + at[1]) * p.held[3] + at[2]) * 16;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = block.first_column + warp * kTiles + j;
        int fragment = p.copies > 1 ? 0 : warp * kTiles + j;
        bool exists = column < p.columns;
        const OverlapAddColumns columns(p, exists ? column : 0);
#pragma unroll
        for (int a = 0; a < 3; ++a) {
          const int index = p.axis[a].low + at[a] - columns.low[a] - columns.copy * p.axis[a].copy_shift;
          exists = exists && index >= 0 && index < columns.count[a];
          fragment = fragment * p.axis[a].support + index;
        }
        entry.fragment[j] = exists ? fragment * kFragmentBytes : -1;
      }
      entries[i] = entry;
    }
  }

  // Of the columns of every fragment, in a channel's weights; -1: zero.
  __device__ void make_weight_offsets(const OverlapAddBlock& block) const {
    int* const offsets = reinterpret_cast<int*>(shared + p.weights);
    // Other threads than make_entries' first ones.
    for (int i = blockDim.x - 1 - threadIdx.x; i < p.fragments * 8; i += blockDim.x) {
      int rest = i / 8;
      const int tile = p.by_support(rest);
      const int column = block.first_column + tile;
      const OverlapAddColumns columns(p, min(column, p.columns - 1));
      int residue[3], channel, tap[3];
      bool exists = columns.find(p, i % 8, residue, channel) && column < p.columns;
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        int offset = rest;
        rest = p.axis[a].by_support(offset);
        int distance = residue[a] - p.axis[a].stride * (columns.low[a] + offset);
        exists = exists && distance >= 0;
        distance = max(distance, 0);
        tap[a] = p.axis[a].by_dilation(distance);
        exists = exists && distance == 0 && tap[a] < p.axis[a].kernel;
      }
      const int offset =
          ((channel * p.axis[0].kernel + tap[0]) * p.axis[1].kernel + tap[1]) * p.axis[2].kernel + tap[2];
      offsets[i] = exists ? offset : -1;
    }
  }

  __device__ __forceinline__ void store_position(uint32_t to, int position,
                                                 const uint32_t (&word)[kOverlapAddWords]) const {
    if constexpr (kThree) {
      uint32_t term[3][4];
#pragma unroll
      for (int w = 0; w < 4; ++w)
        overlap_add_split_pair(word[2 * w], word[2 * w + 1], term[0][w], term[1][w], term[2][w]);
#pragma unroll
      for (int i = 0; i < 3; ++i) overlap_add_store(to + position * 48 + i * 16, term[i]);
    } else {
      uint32_t low[4], high[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        low[w] = kRounds ? overlap_add_round(word[w]) : word[w];
        high[w] = kRounds ? overlap_add_round(word[w + 4]) : word[w + 4];
      }
      overlap_add_store(to + position * 16, low);
      overlap_add_store(to + position * 16 + p.half_bytes, high);
    }
  }

  // A thread takes all channels of a position, or of two neighbours; neighbouring threads take neighbouring ones.
  __device__ __forceinline__ void copy_inputs(int step, uint32_t to, int thread, int threads) const {
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    const int channel = step * kOverlapAddWords * kHalves;
    const T* const from = input + channel * p.in.channel;
#pragma unroll 1
    for (int i = thread; i < p.held_positions; i += threads * kBatch) {
      Raw raw[kBatch][kOverlapAddWords];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int offset = i + b * threads < p.held_positions ? positions[i + b * threads] : -1;
        const T* at = from + static_cast<uint32_t>(offset);
#pragma unroll
        for (int w = 0; w < kOverlapAddWords; ++w, at += kHalves * p.in.channel) {
          load(raw[b][w], at, p.in.channel, offset >= 0 ? p.group_in - channel - w * kHalves : 0);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        uint32_t word[kOverlapAddWords];
#pragma unroll
        for (int w = 0; w < kOverlapAddWords; ++w) word[w] = join(raw[b][w]);
        if (i + b * threads < p.held_positions) store_position(to, i + b * threads, word);
      }
    }
  }
  template <bool kWhole, int kPairs>
  __device__ __forceinline__ void copy_pairs(int step, uint32_t to, int thread, int threads) const {
    constexpr int kChannels = kOverlapAddWords * kHalves;
    using Two = std::conditional_t<kHalves == 1, uint2, uint32_t>;
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    const int channel = step * kChannels, pairs = p.held_positions / 2;
    const T* const from = input + channel * p.in.channel;
#pragma unroll 1
    for (int i = thread; i < pairs; i += threads * kPairs) {
      Two two[kPairs][kChannels];
#pragma unroll
      for (int b = 0; b < kPairs; ++b) {
        const int offset = i + b * threads < pairs ? positions[(i + b * threads) * 2] : -1;
        const T* at = from + static_cast<uint32_t>(offset);
#pragma unroll
        for (int c = 0; c < kChannels; ++c, at += p.in.channel) {
          two[b][c] = Two{};
          if (offset >= 0 && (kWhole || channel + c < p.group_in)) two[b][c] = __ldg(reinterpret_cast<const Two*>(at));
        }
      }
#pragma unroll
      for (int b = 0; b < kPairs; ++b) {
        if (i + b * threads >= pairs) continue;
        uint32_t word[2][kOverlapAddWords];
#pragma unroll
        for (int w = 0; w < kOverlapAddWords; ++w) {
          if constexpr (kHalves == 1) {
            word[0][w] = two[b][w].x, word[1][w] = two[b][w].y;
          } else {
            word[0][w] = __byte_perm(two[b][2 * w], two[b][2 * w + 1], 0x5410);
            word[1][w] = __byte_perm(two[b][2 * w], two[b][2 * w + 1], 0x7632);
          }
        }
        // Every other four threads begin with the second one, so that eight write to different banks.
        const bool second = (i + b * threads) / 4 % 2 == 1;
#pragma unroll
        for (int w = 0; w < kOverlapAddWords; ++w) {
          const uint32_t begin = second ? word[1][w] : word[0][w];
          word[1][w] = second ? word[0][w] : word[1][w], word[0][w] = begin;
        }
        store_position(to, (i + b * threads) * 2 + (second ? 1 : 0), word[0]);
        store_position(to, (i + b * threads) * 2 + (second ? 0 : 1), word[1]);
      }
    }
  }

  // The same for three terms.
  __device__ __forceinline__ void copy_three_granules(const char* from, int channel, uint32_t to, int thread,
                                                      int threads) const {
    constexpr int kGranules = 4;  // in flight
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    to += thread % 2 * 8;
#pragma unroll 1
    for (int i = thread / 2; i < p.held_positions; i += threads / 2 * kGranules) {
      uint4 four[kGranules];
#pragma unroll
      for (int b = 0; b < kGranules; ++b) {
        const int at = i + b * (threads / 2), offset = at < p.held_positions ? positions[at] : -1;
        four[b] = make_uint4(0, 0, 0, 0);
        if (offset >= 0 && channel < p.group_in) {
          four[b] = __ldg(reinterpret_cast<const uint4*>(from + static_cast<uint32_t>(offset) * sizeof(T)));
        }
      }
#pragma unroll
      for (int b = 0; b < kGranules; ++b) {
        const int at = i + b * (threads / 2);
        uint32_t term[3][2];
        overlap_add_split_pair(four[b].x, four[b].y, term[0][0], term[1][0], term[2][0]);
        overlap_add_split_pair(four[b].z, four[b].w, term[0][1], term[1][1], term[2][1]);
#pragma unroll
        for (int t = 0; t < 3; ++t) {
          if (at < p.held_positions) overlap_add_store(to + at * 48 + t * 16, term[t]);
        }
      }
    }
  }

  // channels_last: 16 bytes of a position; neighbouring threads take its halves.
  __device__ __forceinline__ void copy_granules(int step, uint32_t to, int thread, int threads) const {
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    const int half = thread % 2, channel = (step * 2 + half) * 4 * kHalves;
    const char* const from = reinterpret_cast<const char*>(input + (channel < p.group_in ? channel : 0));
    if constexpr (kThree) {
      copy_three_granules(from, channel, to, thread, threads);
      return;
    }
    to += half * p.half_bytes;
#pragma unroll 4
    for (int i = thread / 2; i < p.held_positions; i += threads / 2) {
      const int offset = positions[i];
      const bool exists = offset >= 0 && channel < p.group_in;
      const uint32_t bytes = static_cast<uint32_t>(max(offset, 0)) * static_cast<uint32_t>(sizeof(T));
      copy_or_zero<16>(to + i * 16, from + bytes, exists);
    }
    if constexpr (kRounds) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      for (int i = thread / 2; i < p.held_positions; i += threads / 2) {
        uint32_t word[4];
        overlap_add_load(word, to + i * 16);
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = overlap_add_round(word[w]);
        overlap_add_store(to + i * 16, word);
      }
    }
  }

  // A thread takes a lane's two words of a fragment; neighbouring threads take neighbouring columns.
  __device__ __forceinline__ void load_weights(int step, int thread, int threads, Raw (&raw)[kWeightBatch][2]) const {
    const int* const offsets = reinterpret_cast<const int*>(shared + p.weights);
#pragma unroll
    for (int b = 0; b < kWeightBatch; ++b) {
      const int index = thread + b * threads, channel = (step * kOverlapAddWords + index / 8 % 4) * kHalves;
      const int offset = index < p.fragments * 32 ? offsets[index / 32 * 8 + index % 8] : -1;
      const T* const at = weight + channel * p.weight_channel + static_cast<uint32_t>(offset);
      const int channels = offset >= 0 ? p.group_in - channel : 0;
      load(raw[b][0], at, p.weight_channel, channels);
      load(raw[b][1], at + 4 * kHalves * p.weight_channel, p.weight_channel, channels - 4 * kHalves);
    }
  }
  __device__ __forceinline__ void store_weights(uint32_t to, int thread, int threads,
                                                const Raw (&raw)[kWeightBatch][2]) const {
#pragma unroll
    for (int b = 0; b < kWeightBatch; ++b) {
      const int index = thread + b * threads;
      if (index < p.fragments * 32) {
        const uint32_t lane = index % 8 * 4 + index / 8 % 4, place = to + index / 32 * kFragmentBytes + lane * 8;
        const uint32_t word[2] = {join(raw[b][0]), join(raw[b][1])};
        if constexpr (kStrict) {
          uint32_t term[4] = {word[0], word[1]};
          overlap_add_halve(term[0], term[2]), overlap_add_halve(term[1], term[3]);
          overlap_add_store(to + index / 32 * kFragmentBytes + lane * 16, term);
          continue;
        }
        const uint32_t rounded[2] = {overlap_add_round(word[0]), overlap_add_round(word[1])};
        overlap_add_store(place, kRounds ? rounded : word);
      }
    }
  }
};

#endif

}  // namespace fastconvt::cuda
