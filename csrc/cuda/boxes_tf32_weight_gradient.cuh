// The weight's gradient from boxes: rows are terms, columns input channels, the inner dimension
// positions, 32 of a stage: inputs, as they lie, and what the positions see of the block's output channels.
#pragma once

#include "boxes_tf32_gradients_unit.cuh"

namespace fastconvt::cuda {

template <int kTiles>
__device__ __forceinline__ void copy_weight_boxes(const BoxesTf32Params& p, const BoxesTf32Maps& maps, uint32_t base,
                                                  int block) {
  const BoxesBarriers barriers{base, p.weight_stages, p.weight_stage_bytes};
  const int lane = threadIdx.x % 32, units = 32 / p.weight.positions;
  BarrierRing ring;
  for (int item = block; item < p.kinds * p.splits; item += p.blocks - p.input_blocks) {
    const int split = item / p.kinds, kind = item - split * p.kinds;
    const int column = kind / p.row_blocks * kTiles * 8, channel = kind % p.row_blocks * p.row_channels;
    for (int i = split; i < p.steps; i += p.splits, ring.advance(barriers.stages)) {
      const uint32_t to = barriers.stage(ring.place), full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expecting(full, units * p.weight.bytes + kTiles * 1024);
      if (lane < units) {
        BoxesPlace place(p, p.weight, i * units + lane);
        const uint32_t inputs = to + lane * (kTiles * 512);
        if (p.flat) {
          const int row = (place.at[2] * p.size[1] + place.at[1]) * p.size[0];
          if (p.shifted) place.at[0] = (row + place.at[0]) / 4 * 4 - row;  // what lies outside the row meets zeros
          load_box(inputs, &maps.inputs, row + place.at[0], 0, 0, column, place.at[3], full);
        } else {
          load_box(inputs, &maps.inputs, place.at[0], place.at[1], place.at[2], column, place.at[3], full);
        }
        load_box(to + kTiles * 1024 + lane * p.weight.pitch, &maps.grads_of_rows, place.output(p, 0),
                 place.output(p, 1), place.output(p, 2), channel, place.at[3], full);
      }
      __syncwarp();
    }
  }
}

// The terms of a lane's rows: `row`, the eighth after it, and the same 64 further.
template <int kTiles>
__device__ __noinline__ void repair_weight_boxes(const BoxesTf32Params& p, int column, int row, int first_term) {
  for (int i = 0; i < kTiles * 8; ++i) {
    const int channel = column + i / 8 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const int inside = row + i / 2 % 2 * 8 + (kTf32Rows<kTiles> == 2 ? i / 4 % 2 * 64 : 0), term = first_term + inside;
    if (channel >= p.in_channels || term >= p.inner || inside >= p.row_channels * p.taps) continue;
    float* const at = p.grad_weight + static_cast<int64_t>(channel) * p.inner + term;
    if (!is_finite(*at)) *at = boxes_weight_gradient_at(p, at - p.grad_weight);
  }
}

template <int kTiles>
__device__ __forceinline__ void store_weight_boxes(const BoxesTf32Params& p, int split, int column, int row,
                                                   int first_term, const float (&sum)[kTf32Rows<kTiles>][kTiles][4]) {
  const int t = threadIdx.x % 4, rows = p.row_channels * p.taps;
  float* const to = p.splits == 1 ? p.grad_weight : p.partial + static_cast<int64_t>(split) * p.in_channels * p.inner;
  const bool whole = column + kTiles * 8 <= p.in_channels;
  float probe = 0;
#pragma unroll
  for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int inside = row + m * 64 + r * 8, term = first_term + inside;
      if (inside >= rows || term >= p.inner) continue;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int channel = column + j * 8 + 2 * t + c;
          store_if(whole || channel < p.in_channels, to + static_cast<int64_t>(channel) * p.inner + term,
                   sum[m][j][r * 2 + c]);
          probe = fmaf(sum[m][j][r * 2 + c], 0.f, probe);
        }
    }
  if (probe != 0 && p.splits == 1) repair_weight_boxes<kTiles>(p, column, row, first_term);
}

template <int kTiles>
__device__ __forceinline__ void multiply_weight_boxes(const BoxesTf32Params& p, uint32_t base, int block) {
  const BoxesBarriers barriers{base, p.weight_stages, p.weight_stage_bytes};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = p.row_channels * p.taps;
  const int row = warpgroup * kTf32Rows<kTiles> * 64 + warp * 16 + g;
  uint32_t term[kTf32Rows<kTiles>][2], position[4][2];
#pragma unroll
  for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int tap = row + m * 64 + r * 8 < rows ? row + m * 64 + r * 8 : 0;
      const int channel = p.by_taps(tap);
      term[m][r] = kTiles * 1024 + offset_of_tap(p, p.weight_channel, p.weight_tap, channel, tap);
      asm volatile("" : "+r"(term[m][r]));  // a register: it is not found again in the loop
    }
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[k][h] = offset_of_position(p.weight, k * 8 + h * 4 + t);
      asm volatile("" : "+r"(position[k][h]));
    }
  const bool wide = p.weight.positions == 32;
  const uint32_t form = wide ? gradient_operand_form(1, 1024) : gradient_operand_form(2, 512);
  const int second = wide ? 4 : kTiles * 32;  // from the first 16 positions to the others, in units of 16 bytes
  BarrierRing ring;
  for (int item = block; item < p.kinds * p.splits; item += p.blocks - p.input_blocks) {
    const int split = item / p.kinds, kind = item - split * p.kinds;
    const int column = kind / p.row_blocks * kTiles * 8, first_term = kind % p.row_blocks * rows;
    const bool counts = p.bias_partial != nullptr && column == 0;
    float sum[kTf32Rows<kTiles>][kTiles][4] = {}, bias[2][2] = {};
#pragma unroll 1
    for (int i = split; i < p.steps; i += p.splits, ring.advance(barriers.stages)) {
      const uint32_t at = barriers.stage(ring.place);
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      uint32_t a[4][kTf32Rows<kTiles>][4];
#pragma unroll
      for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t from = at + term[m][r];
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int h = 0; h < 2; ++h) a[k][m][h * 2 + r] = load_word(from + position[k][h]);
        }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < kTf32Rows<kTiles>; ++m)
          start_tf32_product(sum[m], a[k][m], gradient_operand(form, (at >> 4) + k / 2 * second + k % 2 * 2));
      wgmma_commit();
      if (counts) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) bias[m][r] += __uint_as_float(a[k][m][r]) + __uint_as_float(a[k][m][2 + r]);
      }
      wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.empty(ring.place));
    }
    store_weight_boxes(p, split, column, row, first_term, sum);
    if (!counts) continue;
#pragma unroll
    for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float b = bias[m][r];
        b += __shfl_xor_sync(~0u, b, 1);
        b += __shfl_xor_sync(~0u, b, 2);
        const int inside = row + m * 64 + r * 8, of = first_term + inside;
        if (t == 0 && inside < rows && of < p.inner) p.bias_partial[static_cast<int64_t>(split) * p.inner + of] = b;
      }
  }
}

}  // namespace fastconvt::cuda
