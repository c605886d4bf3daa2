// The input's gradient by pairs, device side. Rows are 256 input positions, columns input channels, the inner dimension
// the weight's rows in their own order: 64 elements a stage. Blocks are persistent.
#pragma once

#include "pairs_gradient_block.cuh"
#include "pairs_gradient_repair.cuh"

namespace fastconvt::cuda {

// Copies what all items need, each stage as soon as its place is free. One warp, a lane a unit.
template <int kTiles>
__device__ __forceinline__ void copy_input_gradient_items(const PairsGradientParams& p, const CUtensorMap* grads,
                                                          const CUtensorMap* weights, const PairsShared& shared) {
  const int lane = threadIdx.x % 32, units = kPairsPositions / p.unit;
  BarrierRing ring;
  for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
    int column = item;
    const int block = p.column_blocks(column);
    const PairsUnit u = find_pairs_unit(p, block * units + min(lane, units - 1));
    for (int c = 0; c < p.chunks; ++c, ring.advance(p.stages)) {
      const uint32_t to = shared.stage(p, ring.place), full = shared.full(ring.place);
      mbarrier_wait(shared.empty(ring.place), ring.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expecting(full, p.stage_bytes);
      __syncwarp();
      if (lane < units) {
        load_pairs_unit(p, to + lane * p.unit_bytes, grads, u, c * p.channels_of_box, full);
      } else if (lane == 31) {
        load_lines(to + units * p.unit_bytes, weights, c * 64, column * kTiles * 8, full);
      }
    }
  }
}

// What a thread loads of a stage: four neighbouring positions of its warp's 32. Rows g and g + 8 of one product are the
// first and the second, those of the other one the third and the fourth.
template <int kWords>
struct PairsPositions {
  uint32_t at[2];    // of 16 elements of the inner dimension, the first and the second eight
  int beside, step;  // bytes to the word beside four positions; to the next 16 elements
  bool before;

  // Which four positions of a warp's 32: no bank twice.
  __device__ __forceinline__ static int chunk(const PairsGradientParams& p) {
    const int g = threadIdx.x % 32 / 4;
    if (kWords == 2) return g;
    return p.unit == 16 ? (g & 4) | (g & 1) << 1 | (g & 2) >> 1 : (g & 1) << 2 | g >> 1;
  }

  __device__ __forceinline__ void find(const PairsGradientParams& p, int place) {
    const int t = threadIdx.x % 4, position = place * 32 + chunk(p) * 4, unit = position / p.unit;
    const int box = unit * p.unit_bytes, in_box = (position - unit * p.unit) / 4;
    if constexpr (kWords == 1) {
      step = 8 * p.pitch;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = h * 4 + t, turn = p.unit == 16 ? row >> 1 & 3 : row;
        at[h] = box + row * p.pitch + ((in_box ^ turn) << 4);
      }
    } else {
      step = 4 * p.pitch;
      before = t % 2 == 0;
      beside = before ? -4 : 16;
#pragma unroll
      for (int h = 0; h < 2; ++h) at[h] = box + (h * 2 + t / 2) * p.pitch + (in_box << 4) + p.margin * 2;
    }
  }

  // 16 elements of the inner dimension, for both products.
  __device__ __forceinline__ void load(uint32_t stage, int s, uint32_t (&rows)[2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = stage + s * step + at[h];
      uint32_t x[4];
      load_four_pairs(from, x);
      if constexpr (kWords == 2) {
        const uint32_t other = load_pair(from + beside);
        const uint32_t five[5] = {before ? other : x[0], before ? x[0] : x[1], before ? x[1] : x[2],
                                  before ? x[2] : x[3], before ? x[3] : other};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __byte_perm(five[i], five[i + 1], 0x5432);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) rows[m][2 * h] = x[2 * m], rows[m][2 * h + 1] = x[2 * m + 1];
    }
  }
};

// A thread's four positions, by all its channels. `place`: which four positions of all units.
template <typename T, int kTiles>
__device__ __forceinline__ void store_input_gradient(const PairsGradientParams& p, int place, int column,
                                                     const float (&sum)[2][kTiles][4]) {
  const int unit = place / (p.unit / 4);
  if (unit >= p.units) return;
  PairsUnit u = find_pairs_unit(p, unit);
  u.x += (place - unit * (p.unit / 4)) * 4;
  if (u.x >= p.width) return;
  const int first = column + threadIdx.x % 4 * 2;
  T* const to = static_cast<T*>(p.grad_input) + u.n * p.in.batch + u.z * p.in.axis[0] + u.y * p.in.axis[1] + u.x +
                first * p.in.channel;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (first + j * 8 + c >= p.in_channels) continue;
      const uint2 four =
          make_uint2(round_pair<T>(sum[0][j][c], sum[0][j][2 + c]), round_pair<T>(sum[1][j][c], sum[1][j][2 + c]));
      *reinterpret_cast<uint2*>(to + (j * 8 + c) * p.in.channel) = four;
    }
  if (probe_sums(sum[0]) + probe_sums(sum[1]) == 0.f) return;
  asm volatile("" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < kTiles * 8; ++i) {
    const int channel = i / 8 * 8 + i / 4 % 2;
    if (first + channel >= p.in_channels) break;
    T& at = to[channel * p.in.channel + i % 4];
    if (!is_finite(to_accumulator(at))) {
      at = pairs_input_gradient_at<T>(p, u.n, first + channel, u.z, u.y, u.x + i % 4);
    }
  }
}

template <typename T, int kTiles, int kWords>
__device__ __forceinline__ void make_input_gradient_items(const PairsGradientParams& p, const PairsShared& shared) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  PairsPositions<kWords> thread;
  thread.find(p, warp);
  const uint32_t form = pairs_operand_form(1, 1024);
  const int weights_at = (kPairsPositions / p.unit * p.unit_bytes) >> 4;
  BarrierRing ring;
  for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
    float sum[2][kTiles][4] = {};
#pragma unroll 1
    for (int c = 0; c < p.chunks; ++c, ring.advance(p.stages)) {
      const uint32_t stage = shared.stage(p, ring.place);
      mbarrier_wait(shared.full(ring.place), ring.parity);
      uint32_t rows[4][2][4];
#pragma unroll
      for (int s = 0; s < 4; ++s) thread.load(stage, s, rows[s]);
      settle_operands(rows);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          start_pairs_product<T>(sum[m], rows[s][m], pairs_operand(form, (stage >> 4) + weights_at + s * 2));
        }
      wgmma_commit();
      wgmma_wait<0>();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(ring.place));
    }
    int column = item;
    const int block = p.column_blocks(column);
    store_input_gradient<T>(p, block * (kPairsPositions / 4) + warp * 8 + thread.chunk(p), column * kTiles * 8, sum);
  }
}

template <typename T, int kTiles, int kWords>
__global__ void __launch_bounds__(kPairsThreads, 1)
    pairs_input_gradient_kernel(const __grid_constant__ PairsGradientParams p,
                                const __grid_constant__ CUtensorMap grads,
                                const __grid_constant__ CUtensorMap weights) {
#ifdef FASTCONVT_WGMMA
  extern __shared__ __align__(1024) char dynamic[];
  const PairsShared shared = start_pairs_block(p, dynamic);
  let_next_grid_begin();
  __syncthreads();
  if (threadIdx.x < 256) {
    take_registers();
    make_input_gradient_items<T, kTiles, kWords>(p, shared);
  } else {
    give_registers();
    if (threadIdx.x < 288) copy_input_gradient_items<kTiles>(p, &grads, &weights, shared);
  }
#endif
}

}  // namespace fastconvt::cuda
