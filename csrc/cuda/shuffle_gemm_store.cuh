// The stores of the shuffle GEMM: a warpgroup's sums are rounded, staged in shared memory as memory has them, and go
// there in vectors. A lane holds, with g = lane / 4 and t = lane % 4, of every eight columns 2t and 2t + 1, of the
// positions 16 * warp + g and 8 further.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/store_matrices.cuh"
#include "shuffle_gemm_params.h"

namespace fastconvt::cuda {

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared_vector(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_vector(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Two outputs: of sums and what bias adds to them. A floor would hide negative infinity from repair_tile(); a slope of
// 0 does not: their product is NaN, which fmaxf() ignores.
template <typename T, bool kRectify>
__device__ __forceinline__ uint32_t make_pair(const ShuffleGemmParams& p, float low, float high, const float2& term) {
  low += term.x, high += term.y;
  if constexpr (kRectify) {
    low = fmaxf(low, fmaf(low, p.negative_slope, 0.f));  // 0, not -0
    high = fmaxf(high, fmaf(high, p.negative_slope, 0.f));
  }
  return round_pair<T>(low, high);
}

// NaN in `mark` remembers that a pair was not finite; it begins with 0.
template <typename T>
__device__ __forceinline__ void mark_not_finite(uint32_t& mark, uint32_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(mark) : "r"(pair), "r"(0));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(mark) : "r"(pair), "r"(0));
  }
#endif
}
template <typename T>
__device__ __forceinline__ void mark_not_finite(uint32_t& mark, const uint4& pairs) {
  mark_not_finite<T>(mark, pairs.x);
  mark_not_finite<T>(mark, pairs.y);
  mark_not_finite<T>(mark, pairs.z);
  mark_not_finite<T>(mark, pairs.w);
}
__device__ __forceinline__ bool is_marked(uint32_t mark) { return (mark & 0x7fff7fffu) != 0; }

// All threads of a warpgroup.
__device__ __forceinline__ void meet_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
}

// The same; whether any of them says so. The shuffle shows the compiler that all threads agree: with a barrier behind a
// branch that might diverge it would keep operands' places out of uniform registers.
__device__ __forceinline__ bool any_of_warpgroup(int warpgroup, bool says) {
  int any;
  asm volatile(
      "{\n.reg .pred says, any;\nsetp.ne.b32 says, %2, 0;\nbarrier.red.or.pred any, %1, 128, says;\n"
      "selp.b32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(2 + warpgroup), "r"(static_cast<int>(says))
      : "memory");
  return __shfl_sync(~0u, any, 0) != 0;
}

// The sample and the position in it of position `at` of a tile; false if there is none.
__device__ __forceinline__ bool find_position(const ShuffleGemmParams& p, int tile, int at, int& n, int& position) {
  position = p.flat ? tile * 64 + at : tile;
  n = p.image(position);
  if (!p.flat) position = position * 64 + at;
  return n < p.batch && position < p.positions;
}

// The same for a tile that tensor copies store, channels_last.
__device__ __forceinline__ bool find_box_position(const ShuffleGemmParams& p, int tile, int at, int& n, int& position) {
  int w = at, line = p.across(tile);
  const int slice = p.down(line);
  line = line * p.box_height + p.box_width(w);
  w += tile * p.box_width.divisor;
  position = (slice * p.lines + line) * p.width.divisor + w;
  n = p.image(position);
  return at < p.box_positions && w < p.width.divisor && line < p.lines;
}

// Its first output, of output channel 0.
__device__ __forceinline__ int64_t find_place_of(const ShuffleGemmParams& p, int n, int position) {
  int line = position;
  const int rest = p.width(line), w = line;
  int h = rest;
  const int d = p.height(h);
  return n * p.batch_step + d * p.depth_step + h * p.height_step + static_cast<int64_t>(w) * p.width_step;
}
// The same; -1 if there is no such position.
__device__ __forceinline__ int64_t find_shuffle_gemm_place(const ShuffleGemmParams& p, int tile, int at) {
  int n, position;
  return find_position(p, tile, at, n, position) ? find_place_of(p, n, position) : -1;
}

// Contiguous: the row of outputs (output channel and all taps but the last axis') of a group, from its first channel.
__device__ __forceinline__ int64_t find_output_row(const ShuffleGemmParams& p, int row, int taps_width) {
  int column = row * taps_width;
  const int channel = p.channel_columns(column);
  column /= taps_width;
  const int depth = p.kernel_height(column);
  return channel * p.plane + depth * p.depth_tap + column * p.height_tap;
}
// channels_last: a group's column, from its first channel.
__device__ __forceinline__ int64_t find_output_column(const ShuffleGemmParams& p, int column) {
  int run = p.run(column);
  int line = p.kernel_width(run);
  const int w = run, depth = p.kernel_height(line);
  return depth * p.depth_tap + line * p.height_tap + static_cast<int64_t>(w) * p.width_tap + column;
}

// Contiguous: 64 columns at a time, as rows of the outputs of 64 positions; kTaps: of the last axis.
template <int kTaps>
struct StagedRows {
  static constexpr int kRows = 64 / kTaps, kVectors = 8 * kTaps, kBytes = 128 * kTaps;
  // Neighbouring rows keep to different banks, or, 16 taps, neighbouring positions.
  static __device__ __forceinline__ int place(int row, int vector) {
    if constexpr (kTaps == 2) vector ^= (row & 3) << 1;
    if constexpr (kTaps == 4) vector ^= (row & 1) << 2;
    if constexpr (kTaps == 16) vector ^= vector >> 3 & 1;
    return row * kBytes + vector * 16;
  }
};

// Where a thread stores vectors of a tile, but for columns; null if there is no such position.
template <typename T, int kTaps, int kColumns, ShuffleGemmStore kStore, bool kWhole>
struct ShuffleGemmPlaces {  // tensor copies and bulk copies find theirs themselves
  __device__ __forceinline__ void find(const ShuffleGemmParams&, int) {}
};
template <typename T, int kTaps, int kColumns, bool kWhole>
struct ShuffleGemmPlaces<T, kTaps, kColumns, ShuffleGemmStore::kVectors, kWhole> {
  using Staged = StagedRows<kTaps>;
  static constexpr int kPlaces = kWhole ? 1 : kTaps == 2 ? 4 : kTaps == 4 ? 2 : 1;
  T* output[kPlaces];
  __device__ __forceinline__ void find(const ShuffleGemmParams& p, int tile) {
    const int vector = threadIdx.x % 128 % Staged::kVectors;
    const int step = kWhole ? 1 : p.vector * kPlaces / 16;  // places of a store
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int64_t place =
          i % step == 0 ? find_shuffle_gemm_place(p, tile, (vector * 8 + i * 8 / kPlaces) / kTaps) : -1;
      output[i] = place >= 0 ? static_cast<T*>(p.output) + place + vector * 8 % kTaps : nullptr;
    }
  }
};
template <typename T, int kColumns, bool kWhole>
struct ShuffleGemmPlaces<T, 0, kColumns, ShuffleGemmStore::kVectors, kWhole> {
  static constexpr int kWide = kWhole || kColumns < 128 ? 64 : 128, kVectors = kWide / 8, kPositions = 32 / kVectors;
  static constexpr int kLoads = kVectors / 4;
  int64_t mine;  // of position lane % 16 of the warp's, or -1
  T* output[2 * kLoads];
  __device__ __forceinline__ void find(const ShuffleGemmParams& p, int tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    mine = find_shuffle_gemm_place(p, tile, warp * 16 + lane % 16);
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) {
      const int64_t place = __shfl_sync(~0u, mine, i / kLoads * 8 + i % kLoads * kPositions + lane / kVectors);
      output[i] = place >= 0 ? static_cast<T*>(p.output) + place : nullptr;
    }
  }
};

template <typename T, int kTaps, int kColumns, bool kWhole>
using ShuffleGemmVectors = ShuffleGemmPlaces<T, kTaps, kColumns, ShuffleGemmStore::kVectors, kWhole>;

// Returns a mark of what is not finite; the warpgroup must meet before staging again. kWhole: all vectors are of 16
// bytes, which takes fewer registers.
template <typename T, int kTaps, int kColumns, bool kRectify, bool kWhole>
__device__ __forceinline__ uint32_t store_rows(const ShuffleGemmParams& p, const float (&sum)[kColumns / 8][4],
                                               uint32_t staging, uint32_t terms, uint32_t offsets,
                                               const ShuffleGemmVectors<T, kTaps, kColumns, kWhole>& places, int block,
                                               int warpgroup) {
  using Staged = StagedRows<kTaps>;
  constexpr int kPlaces = ShuffleGemmVectors<T, kTaps, kColumns, kWhole>::kPlaces, kStep = Staged::kRows / 4;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int vector = thread % Staged::kVectors, first_row = thread / Staged::kVectors;
  const auto& output = places.output;
  offsets += first_row * (kTaps * 2);
  uint32_t mark[4] = {};  // four chains, for speed
#pragma unroll
  for (int round = 0; round < kColumns / 64; ++round) {
    if (block * kColumns + round * 64 >= p.columns) break;
    // Loads first: later ones would wait for the stores before them.
    float2 term[8];
    uint32_t row[4];
#pragma unroll
    for (int j = 0; j < 8; ++j) term[j] = load_shared_pair(terms + (round * 64 + j * 8 + 2 * t) * 4);
#pragma unroll
    for (int k = 0; k < 4; ++k) row[k] = load_shared_word(offsets + (round * 64 + k * kStep * kTaps) * 2);
    if (round > 0) meet_warpgroup(warpgroup);  // what was staged before has been read
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float (&s)[4] = sum[round * 8 + j];
      const int at = j * 8 + 2 * t, position = thread / 32 * 16 + g;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = (position + 8 * half) * kTaps + at % kTaps;
        store_shared(staging + Staged::place(at / kTaps, element / 8) + element % 8 * 2,
                     make_pair<T, kRectify>(p, s[2 * half], s[2 * half + 1], term[j]));
      }
    }
    meet_warpgroup(warpgroup);
    uint4 staged[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) staged[k] = load_shared_vector(staging + Staged::place(first_row + k * kStep, vector));
    if (kWhole || p.vector == 16) {
      if (output[0] != nullptr) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (row[k] != ~0u) *reinterpret_cast<uint4*>(output[0] + row[k]) = staged[k];
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (row[k] == ~0u) continue;
        const uint32_t words[4] = {staged[k].x, staged[k].y, staged[k].z, staged[k].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T* const to = output[i * kPlaces / 4];
          if (p.vector == 8 && i % 2 == 0 && to != nullptr) {
            *reinterpret_cast<uint2*>(to + row[k]) = make_uint2(words[i], words[i + 1]);
          }
          if (kTaps == 2 && p.vector == 4 && to != nullptr) *reinterpret_cast<uint32_t*>(to + row[k]) = words[i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) mark_not_finite<T>(mark[k], staged[k]);
  }
  return mark[0] | mark[1] | mark[2] | mark[3];
}

// channels_last: 8 positions of a warp by up to 128 columns at a time.
template <typename T, int kColumns, bool kRectify, bool kWhole>
__device__ __forceinline__ uint32_t store_pixels(const ShuffleGemmParams& p, const float (&sum)[kColumns / 8][4],
                                                 uint32_t staging, uint32_t terms, uint32_t offsets,
                                                 const ShuffleGemmVectors<T, 0, kColumns, kWhole>& places, int block) {
  using Places = ShuffleGemmVectors<T, 0, kColumns, kWhole>;
  constexpr int kWide = Places::kWide, kVectors = Places::kVectors, kPositions = Places::kPositions;
  constexpr int kLoads = Places::kLoads;
  const int lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32 % 4;
  const int64_t mine = places.mine;
  const auto& output = places.output;
  staging += warp * 2048;
  // Of what the lane gives to stmatrix: row lane % 8 of one of four neighbouring matrices.
  const uint32_t to = staging + lane % 8 * (kWide * 2);
  uint32_t mark[4] = {};  // four chains, for speed
#pragma unroll
  for (int part = 0; part < kColumns / kWide; ++part) {
    if (block * kColumns + part * kWide >= p.columns) break;
    // Loads first: later ones would wait for the stores before them.
    float2 term[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) term[j] = load_shared_pair(terms + (part * kWide + j * 8 + 2 * t) * 4);
    const uint32_t offset = load_shared_word(offsets + (part * kWide + lane % kVectors * 8) * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kVectors; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&s)[4] = sum[part * kVectors + j + i];
          words[i] = make_pair<T, kRectify>(p, s[2 * half], s[2 * half + 1], term[j + i]);
        }
        store_matrices(to + ((j + lane / 8) ^ lane % 8) * 16, words);
      }
      __syncwarp();
      uint4 staged[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int position = k * kPositions + lane / kVectors;
        staged[k] = load_shared_vector(staging + position * (kWide * 2) + (lane % kVectors ^ position) * 16);
      }
      if (kWhole || p.vector == 16) {
        if (offset != ~0u) {
#pragma unroll
          for (int k = 0; k < kLoads; ++k) {
            T* const pixel = output[half * kLoads + k];
            if (pixel != nullptr) *reinterpret_cast<uint4*>(pixel + offset) = staged[k];
          }
        }
      } else {
        // Runs of whole words only: a lane stores one at a time.
#pragma unroll 1
        for (int at = lane * 2; at < kWide; at += 64) {
          const uint32_t word_offset = load_shared_word(offsets + (part * kWide + at) * 2);
#pragma unroll
          for (int position = 0; position < 8; ++position) {
            const int64_t place = __shfl_sync(~0u, mine, half * 8 + position);
            const uint32_t word =
                load_shared_word(staging + position * (kWide * 2) + (at / 8 ^ position) * 16 + at % 8 * 2);
            if (place < 0 || word_offset == ~0u) continue;
            *reinterpret_cast<uint32_t*>(static_cast<T*>(p.output) + place + word_offset) = word;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) mark_not_finite<T>(mark[k], staged[k]);
      __syncwarp();
    }
  }
  return mark[0] | mark[1] | mark[2] | mark[3];
}

}  // namespace fastconvt::cuda
