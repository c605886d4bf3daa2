// The shuffle GEMM of few channels: a single step of the matrix units takes all of them, and a warp keeps all weights
// in registers. Warps work on their own, on 64 positions in two steps.
//
// A lane's sums are of neighbouring columns. Contiguous, these are both taps of a row of outputs; rows of two products
// are such that the lane has them of four neighbouring positions, a vector. All leave by bulk copies: contiguous, of
// boxes of 32 positions of a line, all channels; channels_last, of runs.
#pragma once

#include "device/dependent_launch.cuh"
#include "shuffle_gemm_boxes.cuh"
#include "shuffle_gemm_repair.cuh"

namespace fastconvt::cuda {

inline constexpr int kShuffleGemmFewThreads = kShuffleGemmFewWarps * 32;

// d = a * b, 16 x 16 by 16 x 8.
template <typename T>
__device__ __forceinline__ void multiply_few(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FASTCONVT_FEW(type)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f))
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_FEW("f16");
  } else {
    FASTCONVT_FEW("bf16");
  }
#undef FASTCONVT_FEW
#endif
}

// What a thread reads of weights, 16 channels of each column, and of what bias adds to columns; 0 where there is none.
// Before inputs are asked for, which would keep it waiting.
inline constexpr int kShuffleGemmFewLoads =
    (kShuffleGemmFewColumns * (kShuffleGemmFewChannels + 1) + kShuffleGemmFewThreads - 1) / kShuffleGemmFewThreads;

template <typename T, bool kContiguous>
__device__ __forceinline__ void load_few_tables(const ShuffleGemmParams& p, T (&value)[kShuffleGemmFewLoads]) {
#pragma unroll
  for (int j = 0; j < kShuffleGemmFewLoads; ++j) {
    const int i = threadIdx.x + j * kShuffleGemmFewThreads;
    const int column = i % kShuffleGemmFewColumns, row = i / kShuffleGemmFewColumns;
    value[j] = T{};
    if (column >= p.columns) continue;
    if (row < p.group_in) {
      value[j] = __ldg(static_cast<const T*>(p.weight) + row * p.columns + column);
    } else if (row == kShuffleGemmFewChannels && p.bias != nullptr) {
      int channel = column;
      const int quotient = p.channel_columns(channel);
      value[j] = __ldg(static_cast<const T*>(p.bias) + (kContiguous ? quotient : channel));
    }
  }
}
// To shared memory: what bias adds, and behind it the weights.
template <typename T>
__device__ __forceinline__ void store_few_tables(const T (&value)[kShuffleGemmFewLoads], uint32_t terms) {
#pragma unroll
  for (int j = 0; j < kShuffleGemmFewLoads; ++j) {
    const int i = threadIdx.x + j * kShuffleGemmFewThreads;
    const int column = i % kShuffleGemmFewColumns, row = i / kShuffleGemmFewColumns;
    if (row < kShuffleGemmFewChannels) {
      const uint32_t to = terms + kShuffleGemmFewColumns * 4 + (column * kShuffleGemmFewChannels + row) * 2;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(reinterpret_cast<const unsigned short&>(value[j]))
                   : "memory");
    } else if (row == kShuffleGemmFewChannels) {
      store_shared(terms + column * 4, __float_as_uint(to_accumulator(value[j])));
    }
  }
}

// A lane's part of 32 inputs from `at` on of a tile in shared memory, as operands of two products: channels 4t to 4t +
// 3 of positions 4g to 4g + 3 (contiguous), or of g, g + 8, g + 16 and g + 24.
template <bool kContiguous>
__device__ __forceinline__ void load_few_operands(uint32_t tile, int at, uint32_t (&operand)[2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint2 quad[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = t * 4 + i;  // swizzled
    const int place = kContiguous ? row * 128 + ((at + g * 4) * 2 ^ (row & 7) << 4) : (at + g + i * 8) * 32 + t * 8;
    const float2 pair = load_shared_pair(tile + place);
    quad[i] = make_uint2(__float_as_uint(pair.x), __float_as_uint(pair.y));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kContiguous) {
      const uint2 &low = quad[i / 2 * 2], &high = quad[i / 2 * 2 + 1];
      operand[0][i] = __byte_perm(low.x, high.x, i % 2 == 0 ? 0x5410 : 0x7632);
      operand[1][i] = __byte_perm(low.y, high.y, i % 2 == 0 ? 0x5410 : 0x7632);
    } else {
      operand[i / 2][i % 2] = quad[i].x, operand[i / 2][i % 2 + 2] = quad[i].y;
    }
  }
}

__device__ __forceinline__ void store_shared_if(bool stores, uint32_t address, uint32_t word) {
  asm volatile("{\n.reg .pred stores;\nsetp.ne.b32 stores, %2, 0;\n@stores st.shared.b32 [%0], %1;\n}" ::"r"(address),
               "r"(word), "r"(static_cast<int>(stores))
               : "memory");
}

// Outputs of 32 positions, from `at` of a tile on, to memory: a tensor copy (contiguous), or a copy of each run. A
// warp.
template <typename T, bool kContiguous>
__device__ __forceinline__ void copy_few_outputs(const ShuffleGemmParams& p, const CUtensorMap* map, uint32_t image,
                                                 int tile, int at) {
  int n, position;
  const bool exists = find_position(p, tile, at, n, position);
  int w = position;
  if constexpr (kContiguous) {
    int h = p.width(w);
    const int d = p.height(h);
    if (elect_one() && exists) store_box(map, image, w * 2, h * p.tap_height, d * p.tap_depth, 0, n);
  } else {
    p.width(w);
    const int run = p.run.divisor;
#pragma unroll 1
    for (int first = 0, next = p.width.divisor - w; first < 32; first = next, next += p.width.divisor) {
      const int64_t place = find_shuffle_gemm_place(p, tile, at + first);
      if (place < 0) break;
      uint32_t from = image + first * run * 2;
#pragma unroll 1
      for (int depth = 0; depth < p.tap_depth; ++depth) {
#pragma unroll 1
        for (int height = 0; height < p.tap_height; ++height, from += run * 64) {
          T* const to = static_cast<T*>(p.output) + place + depth * p.depth_tap + height * p.height_tap;
          if (elect_one()) store_run(to, from, (min(next, 32) - first) * run * 2);
        }
      }
    }
  }
  commit_bulk();
}

template <typename T, bool kContiguous, bool kRectify>
__global__ void __launch_bounds__(kShuffleGemmFewThreads, 1)
    shuffle_gemm_few_kernel(const __grid_constant__ CUtensorMap inputs, const __grid_constant__ CUtensorMap outputs,
                            const __grid_constant__ ShuffleGemmParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kTiles = kShuffleGemmFewColumns / 8, kImage = kShuffleGemmFewColumns * 64;
  constexpr int kInputs = kShuffleGemmFewChannels * 128, kStages = kShuffleGemmFewStages;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int pixel = p.run.divisor * 2, stride = gridDim.x * kShuffleGemmFewWarps;
  const uint32_t image = shared_address(bytes) + warp * kShuffleGemmFewShared, ring = image + kImage;
  const uint32_t terms = shared_address(bytes) + kShuffleGemmFewWarps * kShuffleGemmFewShared;
  const uint32_t barriers = terms + kShuffleGemmFewTables + warp * (kStages * 8);
  const auto load = [&](int tile, int stage) {
    if (tile >= p.tiles) return;
    mbarrier_arrive_expecting(barriers + stage * 8, kInputs);
    ShuffleGemmSource from = find_source<kContiguous, false>(p, tile);
    if constexpr (!kContiguous) from.position >>= p.line_shift;
    load_inputs<kContiguous, false>(&inputs, ring + stage * kInputs, from, 0, 0, barriers + stage * 8);
  };
  int tile = warp * gridDim.x + blockIdx.x;  // so that blocks share the last ones evenly
  if (elect_one()) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) mbarrier_init(barriers + i * 8, 1);
    fence_shared_writes();
  }
  T table[kShuffleGemmFewLoads];
  load_few_tables<T, kContiguous>(p, table);
  if (elect_one()) {
    wait_for_previous_grid();  // for packed inputs
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) load(tile + i * stride, i);
  }
  store_few_tables(table, terms);
  __syncthreads();
  uint32_t weights[kTiles][2], place[kTiles];  // of a lane's outputs in an image
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float2 words = load_shared_pair(terms + kShuffleGemmFewColumns * 4 + (i * 8 + g) * 32 + t * 8);
    weights[i][0] = __float_as_uint(words.x), weights[i][1] = __float_as_uint(words.y);
    if constexpr (kContiguous) {
      place[i] = (i * 4 + t) * 128 + ((g ^ ((i * 4 + t) & 7)) << 4);
    } else {
      int column = i * 8 + t * 2;
      const int line = p.run(column);
      place[i] = i * 8 + t * 2 < p.columns ? line * p.run.divisor * 64 + column * 2 + g * pixel : ~0u;
    }
  }
  const uint32_t rows[4] = {image, image + 8 * pixel, image + 16 * pixel, image + 24 * pixel};
  int stage = 0, parity = 0;
  for (; tile < p.tiles; tile += stride) {
    mbarrier_wait(barriers + stage * 8, parity);
    uint32_t mark[4] = {};
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      uint32_t operands[2][4];
      load_few_operands<kContiguous>(ring + stage * kInputs, step * 32, operands);
      wait_for_bulk_reads();
      __syncwarp();
      if (step == 1 && elect_one()) load(tile + kStages * stride, stage);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i % 5 == 0 && i * 8 >= p.columns) break;
        const float2 term = load_shared_pair(terms + (i * 8 + t * 2) * 4);
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float sum[4];
          multiply_few<T>(sum, operands[j], weights[i]);
          words[2 * j] = make_pair<T, kRectify>(p, sum[0], sum[1], term);
          words[2 * j + 1] = make_pair<T, kRectify>(p, sum[2], sum[3], term);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mark_not_finite<T>(mark[j], words[j]);
        if constexpr (kContiguous) {
          store_shared_vector(image + place[i], make_uint4(words[0], words[1], words[2], words[3]));
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) store_shared_if(place[i] != ~0u, rows[j] + place[i], words[j]);
        }
      }
      fence_shared_writes();
      __syncwarp();
      copy_few_outputs<T, kContiguous>(p, &outputs, image, tile, step * 32);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
    if (__any_sync(~0u, is_marked(mark[0] | mark[1] | mark[2] | mark[3]))) {
      wait_for_bulk_stores();
      __syncwarp();
      repair_tile<T, kContiguous, kShuffleGemmFewColumns, 32>(p, tile, 0, 0);
    }
  }
  wait_for_bulk_reads();
#endif
}

}  // namespace fastconvt::cuda
