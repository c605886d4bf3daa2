// The weight's gradient by pairs, device side. Rows are elements of the weight's rows, 256 a block, columns input
// channels, the inner dimension positions: 64 a stage. A block owns a partial sum; parts are added by another kernel,
// unless there is one only.
#pragma once

#include "pairs_gradient_block.cuh"
#include "pairs_gradient_repair.cuh"

namespace fastconvt::cuda {

// Its stages are every `splits`-th one from `split` on, so that all blocks walk through memory side by side.
struct PairsPart {
  int split, row_block, column_block;

  __device__ __forceinline__ explicit PairsPart(const PairsGradientParams& p) {
    int rest = static_cast<int>(blockIdx.x);
    split = p.kinds(rest);
    column_block = p.row_blocks(rest);
    row_block = rest;
  }
};

// One warp, a lane a unit of outputs or of inputs.
template <int kTiles>
__device__ __forceinline__ void copy_weight_gradient_stages(const PairsGradientParams& p, const CUtensorMap* grads,
                                                            const CUtensorMap* inputs, const PairsShared& shared,
                                                            const PairsPart& part) {
  const int lane = threadIdx.x % 32, units = kPairsWeightPositions / p.unit;
  const bool copies_inputs = lane >= units;
  const int own = copies_inputs ? lane - units : lane, width = copies_inputs ? p.input_unit : p.unit;
  const int inputs_at = units * p.unit_bytes + own * (kTiles * 8 * p.input_unit * 2);
  BarrierRing ring;
  for (int i = part.split; i < p.steps; i += p.splits, ring.advance(p.stages)) {
    const PairsUnit u = find_pairs_unit(p, i * units + own * width / p.unit);
    const uint32_t to = shared.stage(p, ring.place), full = shared.full(ring.place);
    mbarrier_wait(shared.empty(ring.place), ring.parity ^ 1);
    if (lane == 0) mbarrier_arrive_expecting(full, p.stage_bytes);
    __syncwarp();
    if (!copies_inputs) {
      load_pairs_unit(p, to + own * p.unit_bytes, grads, u, part.row_block * p.channels_of_box, full);
    } else if (own < kPairsWeightPositions / p.input_unit) {
      // Of whole images, what lies beyond a row's ends meets zeros.
      const bool images = p.lead_mask != 0;
      const int x = images ? (u.z * p.height.divisor + u.y) * p.width + u.x : u.x;
      load_box(to + inputs_at, inputs, x, images ? 0 : u.y, images ? 0 : u.z, part.column_block * kTiles * 8, u.n,
               full);
    }
  }
}

// What a thread loads of a stage. With one word a position the warpgroups have 64 rows of outputs each, and a thread
// both taps of two; with two words both have the same 64 rows, and two taps each.
template <int kWords>
struct PairsRows {
  uint32_t at[2][2];  // of every second 16 positions, the first and the second eight
  int beside;         // bytes from a pair of pairs to a third one
  int next, eight;    // bytes to 32 positions further; to eight rows further
  int index;          // of the block's elements of a row of the weight: the first one
  bool before;

  __device__ __forceinline__ void find(const PairsGradientParams& p, int warpgroup) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool halves = p.unit == 16;
    next = halves ? 2 * p.unit_bytes : p.unit == 32 ? p.unit_bytes : 128, eight = 8 * p.pitch;
    if constexpr (kWords == 1) {
      // Which row of eight: no bank twice.
      const int key = halves ? (g & 1) | (g & 2) << 1 | (g & 4) >> 1 : g % 4 * 2 + g / 4;
      const int row = warpgroup * 64 + warp * 16 + key, turn = halves ? key >> 1 & 3 : key;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at[0][h] = row * p.pitch + ((h * 2 + t / 2 ^ turn) << 4) + (t & 1) * 8;
        at[1][h] = halves ? at[0][h] + p.unit_bytes : at[0][h] ^ 64;
      }
      index = row * 2;
    } else {
      const int row = warp * 16 + g;
      before = warpgroup == 0;
      beside = before ? -4 : 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at[0][h] = row * p.pitch + (h * 8 + 2 * t) * 4 + p.margin * 2;
        at[1][h] = at[0][h] + (halves ? p.unit_bytes : 64);
      }
      index = row * 4 + warpgroup * 2;
    }
  }

  // 16 positions of both taps.
  __device__ __forceinline__ void load(uint32_t stage, int s, uint32_t (&rows)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t from = stage + s / 2 * next + at[s % 2][h] + r * eight;
        if constexpr (kWords == 1) {
          uint32_t x, y;
          load_pairs(from, x, y);
          rows[0][h * 2 + r] = __byte_perm(x, y, 0x5410), rows[1][h * 2 + r] = __byte_perm(x, y, 0x7632);
        } else {
          uint32_t x[3];
          load_three_pairs(from, from + beside, before, x);
          rows[0][h * 2 + r] = __byte_perm(x[0], x[1], 0x7632), rows[1][h * 2 + r] = __byte_perm(x[1], x[2], 0x5410);
        }
      }
  }
};

template <typename T, int kTiles>
__device__ __forceinline__ void store_weight_gradient(const PairsGradientParams& p, const PairsPart& part, int index,
                                                      int eight, const float (&sum)[2][kTiles][4]) {
  const int first = part.column_block * kTiles * 8 + threadIdx.x % 4 * 2;
  const int64_t at = static_cast<int64_t>(first) * p.inner + index;
  T* const to = static_cast<T*>(p.grad_weight) + at;
  float* const to_part = p.part_of(part.split) + at;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (first + j * 8 + c >= p.in_channels) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (index + r * eight >= p.inner) continue;
        const int64_t place = static_cast<int64_t>(j * 8 + c) * p.inner + r * eight;
        const float x = sum[0][j][r * 2 + c], y = sum[1][j][r * 2 + c];
        if (p.splits == 1) {
          *reinterpret_cast<uint32_t*>(to + place) = round_pair<T>(x, y);
        } else {
          *reinterpret_cast<float2*>(to_part + place) = make_float2(x, y);
        }
      }
    }
  if (p.splits > 1 || probe_sums(sum[0]) + probe_sums(sum[1]) == 0.f) return;
  asm volatile("" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < kTiles * 8; ++i) {
    const int channel = i / 8 * 8 + i / 4 % 2, in_row = i / 2 % 2 * eight + i % 2;
    if (first + channel >= p.in_channels || index + in_row >= p.inner) continue;
    T& element = to[static_cast<int64_t>(channel) * p.inner + in_row];
    if (!is_finite(to_accumulator(element))) {
      element = pairs_weight_gradient_at<T>(p, first + channel, index + in_row);
    }
  }
}

// `kBias`: also sums rows, as products by a tile of ones.
template <typename T, int kTiles, int kWords, bool kBias>
__device__ __forceinline__ void make_weight_gradient_part(const PairsGradientParams& p, const PairsShared& shared,
                                                          const PairsPart& part) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  PairsRows<kWords> thread;
  thread.find(p, warpgroup);
  // Inputs in lines of 128, 64 or 32 bytes.
  const uint32_t form = pairs_operand_form(p.input_unit == 64 ? 1 : p.input_unit == 32 ? 2 : 3, p.input_unit * 16);
  const int columns_at = (kPairsWeightPositions / p.unit * p.unit_bytes) >> 4;
  // From 16 positions to the next, and to the next 32.
  const int next = p.input_unit == 16 ? kTiles * 8 * 32 >> 4 : 2;
  const int next_two = p.input_unit == 64 ? 4 : kTiles * 8 * 64 >> 4;
  float sum[2][kTiles][4] = {}, bias[2][1][4] = {};
  BarrierRing ring;
#pragma unroll 1
  for (int i = part.split; i < p.steps; i += p.splits, ring.advance(p.stages)) {
    const uint32_t stage = shared.stage(p, ring.place);
    mbarrier_wait(shared.full(ring.place), ring.parity);
    uint32_t rows[4][2][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) thread.load(stage, s, rows[s]);
    settle_operands(rows);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint64_t columns = pairs_operand(form, (stage >> 4) + columns_at + s / 2 * next_two + s % 2 * next);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        start_pairs_product<T>(sum[k], rows[s][k], columns);
        if constexpr (kBias) start_pairs_product<T>(bias[k], rows[s][k], pairs_operand(form, shared.ones() >> 4));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(ring.place));
  }
  wait_for_previous_grid();
  const int index = part.row_block * kPairsRowBlock + thread.index, eight = 16 * kWords;
  if (kBias && threadIdx.x % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (index + r * eight >= p.inner) continue;
      float* const to = p.bias_partial + static_cast<int64_t>(part.split) * p.inner + index + r * eight;
      *reinterpret_cast<float2*>(to) = make_float2(bias[0][0][r * 2], bias[1][0][r * 2]);
    }
  }
  store_weight_gradient<T>(p, part, index, eight, sum);
}

template <typename T, int kTiles, int kWords>
__global__ void __launch_bounds__(kPairsThreads, 1)
    pairs_weight_gradient_kernel(const __grid_constant__ PairsGradientParams p,
                                 const __grid_constant__ CUtensorMap grads,
                                 const __grid_constant__ CUtensorMap inputs) {
#ifdef FASTCONVT_WGMMA
  extern __shared__ __align__(1024) char dynamic[];
  const PairsShared shared = start_pairs_block(p, dynamic);
  let_next_grid_begin();
  if (threadIdx.x < 128) {
    const uint32_t ones = round_pair<T>(1.f, 1.f);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.ones() + threadIdx.x * 4), "r"(ones) : "memory");
    fence_shared_writes();
  }
  __syncthreads();
  const PairsPart part(p);
  if (threadIdx.x < 256) {
    take_registers();
    if (p.bias_partial != nullptr && part.column_block == 0) {
      make_weight_gradient_part<T, kTiles, kWords, true>(p, shared, part);
    } else {
      make_weight_gradient_part<T, kTiles, kWords, false>(p, shared, part);
    }
  } else {
    give_registers();
    if (threadIdx.x < 288) copy_weight_gradient_stages<kTiles>(p, &grads, &inputs, shared, part);
  }
#endif
}

}  // namespace fastconvt::cuda
