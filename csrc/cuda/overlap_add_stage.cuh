// The overlap-add family's way from global to shared memory: tables of a block, and stages of inputs and weights.
//
// A step of inputs is two halves of four words of 32 bits by position: 16 bytes a position, so that ldmatrix reads
// eight neighbours without conflicts, whatever the offset. A step of weights is fragments: lane l = 4 * g + t holds
// words t and t + 4 of column g.
#pragma once

#include "device/shared_address.cuh"
#include "overlap_add_params.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// 16 bytes of shared memory, or zeros.
__device__ __forceinline__ void overlap_add_copy_16(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
               : "memory");
}
template <int kWords>
__device__ __forceinline__ void overlap_add_store(uint32_t target, const uint32_t (&word)[kWords]) {
  if constexpr (kWords == 4) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  } else {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(target), "r"(word[0]), "r"(word[1]) : "memory");
  }
}

// What a warp does for one offset: where its inputs begin, and the fragments of its column tiles; -1: none. In bytes.
struct alignas(16) OverlapAddEntry {
  int input;
  int fragment[kOverlapAddMaxTiles];
};

template <typename T, int kTiles>
class OverlapAddStage {
  static constexpr int kHalves = 4 / sizeof(T);                // channels of a word
  static constexpr int kBatch = sizeof(T) == 4 ? 2 : 1;        // positions in flight
  static constexpr int kWeightBatch = sizeof(T) == 4 ? 3 : 2;  // pairs of words in flight

  const OverlapAddParams& p;
  const OverlapAddBlock& block;
  unsigned char* const shared;
  const T* input;   // the group's first channel at the first position that the box reaches
  const T* weight;  // the group's

 public:
  __device__ OverlapAddStage(const OverlapAddParams& p, const OverlapAddBlock& block, unsigned char* shared)
      : p(p), block(block), shared(shared) {
    input = static_cast<const T*>(p.input) + block.cell[0] * p.in.batch +
            static_cast<int64_t>(block.group) * p.group_in * p.in.channel;
#pragma unroll
    for (int a = 0; a < 3; ++a) input += min(max(first_input(a), 0), p.axis[a].in - 1) * p.in.axis[a];
    weight = static_cast<const T*>(p.weight) + static_cast<int64_t>(block.group) * p.group_in * p.weight_channel;
  }

  __device__ void make_tables() const {
    make_entries();
    make_weight_offsets();
    // Offsets of positions, from the first one that exists; -1: it does not.
    int* const positions = reinterpret_cast<int*>(shared + p.positions);
    for (int i = threadIdx.x; i < (p.held_positions + 7) / 8 * 8; i += blockDim.x) {
      int at[4];
      overlap_add_split(i, p.by_held, at);
      bool exists = i < p.held_positions && block.cell[0] + at[0] < p.batch;
      int64_t offset = at[0] * p.in.batch;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int x = first_input(a) + at[a + 1];
        exists = exists && x >= 0 && x < p.axis[a].in;
        offset += (x - max(first_input(a), 0)) * p.in.axis[a];
      }
      positions[i] = exists ? static_cast<int>(offset) : -1;
    }
  }

  // Copies step `step` to `target`, by a team; it is there after the team's copies have arrived and its next barrier.
  __device__ __forceinline__ void copy_step(int step, unsigned char* target, int thread, int threads) const {
    const uint32_t to = shared_address(target), to_weights = to + 2 * p.half_bytes;
    // The first weights are on their way while inputs are.
    uint32_t word[kWeightBatch][2];
    load_weights(step, thread, threads, word);
    const bool whole = (step + 1) * kOverlapAddWords * kHalves <= p.group_in;
    if (p.granules) {
      copy_granules(step, to, thread, threads);
    } else if (!whole) {
      copy_inputs<false, 1>(step, to, thread, threads);
    } else if (kHalves == 1 && p.held_positions > kBatch * threads) {
      copy_inputs<true, 2 * kBatch>(step, to, thread, threads);
    } else {
      copy_inputs<true, kBatch>(step, to, thread, threads);
    }
    store_weights(to_weights, thread, threads, word);
    for (int i = thread + kWeightBatch * threads; i < p.fragments * 32; i += kWeightBatch * threads) {
      load_weights(step, i, threads, word);
      store_weights(to_weights, i, threads, word);
    }
  }

 private:
  __device__ int first_input(int a) const {
    return p.axis[a].first_base + block.cell[a + 1] * p.axis[a].bases + p.axis[a].low;
  }

  __device__ void make_entries() const {
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
        entry.fragment[j] = exists ? fragment * 256 : -1;
      }
      entries[i] = entry;
    }
  }

  // Of the columns of every fragment, in a channel's weights; -1: zero.
  __device__ void make_weight_offsets() const {
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

  // A word of channels at an offset, or zero where that is negative. channels: how many exist, unless all do (kWhole).
  template <bool kWhole>
  __device__ __forceinline__ uint32_t load(const T* from, int64_t stride, int offset, int channels) const {
    const bool first = offset >= 0 && (kWhole || channels > 0), second = offset >= 0 && (kWhole || channels > 1);
    const uint32_t bytes = static_cast<uint32_t>(offset) * static_cast<uint32_t>(sizeof(T));
    const char* const low = reinterpret_cast<const char*>(from) + bytes;
    if constexpr (kHalves == 1) {
      return first ? __ldg(reinterpret_cast<const uint32_t*>(low)) : 0u;
    } else {
      const char* const high = reinterpret_cast<const char*>(from + stride) + bytes;
      const uint32_t a = first ? __ldg(reinterpret_cast<const unsigned short*>(low)) : 0u;
      const uint32_t b = second ? __ldg(reinterpret_cast<const unsigned short*>(high)) : 0u;
      return a | b << 16;
    }
  }

  // A thread takes all channels of a position; neighbouring threads take neighbouring positions.
  template <bool kWhole, int kPositions>
  __device__ __forceinline__ void copy_inputs(int step, uint32_t to, int thread, int threads) const {
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    const int channel = step * kOverlapAddWords * kHalves;
    const T* const from = input + channel * p.in.channel;
#pragma unroll 1
    for (int i = thread; i < p.held_positions; i += threads * kPositions) {
      uint32_t word[kPositions][kOverlapAddWords];
#pragma unroll
      for (int b = 0; b < kPositions; ++b) {
        const int offset = i + b * threads < p.held_positions ? positions[i + b * threads] : -1;
#pragma unroll
        for (int w = 0; w < kOverlapAddWords; ++w) {
          const int c = w * kHalves;
          word[b][w] = load<kWhole>(from + c * p.in.channel, p.in.channel, offset, p.group_in - channel - c);
        }
      }
#pragma unroll
      for (int b = 0; b < kPositions; ++b) {
        const uint32_t place = to + (i + b * threads) * 16;
        if (i + b * threads >= p.held_positions) continue;
        const uint32_t low[4] = {word[b][0], word[b][1], word[b][2], word[b][3]};
        const uint32_t high[4] = {word[b][4], word[b][5], word[b][6], word[b][7]};
        overlap_add_store(place, low);
        overlap_add_store(place + p.half_bytes, high);
      }
    }
  }

  // channels_last: 16 bytes of a position; neighbouring threads take its halves.
  __device__ __forceinline__ void copy_granules(int step, uint32_t to, int thread, int threads) const {
    const int* const positions = reinterpret_cast<const int*>(shared + p.positions);
    const int half = thread % 2, channel = (step * 2 + half) * 4 * kHalves;
    const char* const from = reinterpret_cast<const char*>(input + (channel < p.group_in ? channel : 0));
    to += half * p.half_bytes;
#pragma unroll 4
    for (int i = thread / 2; i < p.held_positions; i += threads / 2) {
      const int offset = positions[i];
      const bool exists = offset >= 0 && channel < p.group_in;
      const uint32_t bytes = static_cast<uint32_t>(max(offset, 0)) * static_cast<uint32_t>(sizeof(T));
      overlap_add_copy_16(to + i * 16, from + bytes, exists);
    }
  }

  // A thread takes a lane's two words of a fragment; neighbouring threads take neighbouring columns.
  __device__ __forceinline__ void load_weights(int step, int thread, int threads,
                                               uint32_t (&word)[kWeightBatch][2]) const {
    const int* const offsets = reinterpret_cast<const int*>(shared + p.weights);
#pragma unroll
    for (int b = 0; b < kWeightBatch; ++b) {
      const int index = thread + b * threads, channel = (step * kOverlapAddWords + index / 8 % 4) * kHalves;
      const int offset = index < p.fragments * 32 ? offsets[index / 32 * 8 + index % 8] : -1;
      const T* const from = weight + channel * p.weight_channel;
      word[b][0] = load<false>(from, p.weight_channel, offset, p.group_in - channel);
      word[b][1] = load<false>(from + 4 * kHalves * p.weight_channel, p.weight_channel, offset,
                               p.group_in - channel - 4 * kHalves);
    }
  }
  __device__ __forceinline__ void store_weights(uint32_t to, int thread, int threads,
                                                const uint32_t (&word)[kWeightBatch][2]) const {
#pragma unroll
    for (int b = 0; b < kWeightBatch; ++b) {
      const int index = thread + b * threads;
      if (index < p.fragments * 32) {
        overlap_add_store(to + index / 32 * 256 + index % 8 * 32 + index / 8 % 4 * 8, word[b]);
      }
    }
  }
};

#endif

}  // namespace fastconvt::cuda
