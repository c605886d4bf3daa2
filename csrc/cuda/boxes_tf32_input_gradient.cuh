// The input's gradient from boxes: rows are positions, columns input channels, terms (output channel,
// tap) in the weight's order. A stage holds 32 terms: lines of the weight, as they lie, and what all positions see of
// the channels of these terms.
#pragma once

#include "boxes_tf32_gradients_unit.cuh"

namespace fastconvt::cuda {

template <int kTiles>
constexpr int kBoxesItem = kTf32Rows<kTiles> * 128;  // positions

struct BoxesInputItem {
  int unit, column, split, begin, end;

  __device__ __forceinline__ BoxesInputItem(const BoxesTf32Params& p, int index, int columns, int positions) {
    split = index / p.items;
    const int item = index - split * p.items, first = item / p.column_blocks;
    column = (item - first * p.column_blocks) * columns;
    unit = first * (positions / p.input.positions);
    begin = static_cast<int>(static_cast<int64_t>(p.chunks) * split / p.input_splits);
    end = static_cast<int>(static_cast<int64_t>(p.chunks) * (split + 1) / p.input_splits);
  }
};

// Lanes copy a unit each, another one the weights.
template <int kTiles>
__device__ __forceinline__ void copy_input_boxes(const BoxesTf32Params& p, const BoxesTf32Maps& maps, uint32_t base,
                                                 int block) {
  const BoxesBarriers barriers{base, p.stages, p.stage_bytes};
  const int lane = threadIdx.x % 32, units = kBoxesItem<kTiles> / p.input.positions;
  BarrierRing ring;
  for (int index = block; index < p.items * p.input_splits; index += p.input_blocks) {
    const BoxesInputItem item(p, index, kTiles * 8, kBoxesItem<kTiles>);
    const BoxesPlace place(p, p.input, item.unit + lane);
    for (int c = item.begin; c < item.end; ++c, ring.advance(barriers.stages)) {
      const uint32_t to = barriers.stage(ring.place), full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      if (lane == units) {
        mbarrier_arrive_expecting(full, units * p.input.bytes + kTiles * 1024);
        load_box(to, &maps.weights, c * 32, item.column, 0, 0, 0, full);
      }
      if (lane < units) {
        const int channel = p.parts > 1 ? c / p.parts : c * 32 / p.taps;
        const int depth = p.parts > 1 ? (c - channel * p.parts) * p.depth_taps * p.axis[0].dilation : 0;
        load_box(to + kTiles * 1024 + lane * p.input.pitch, &maps.grads_of_chunk, place.output(p, 0),
                 place.output(p, 1), place.output(p, 2) + depth, channel, place.at[3], full);
      }
      __syncwarp();
    }
  }
}

template <int kTiles>
__device__ __noinline__ void repair_input_boxes(const BoxesTf32Params& p, int unit, int inside, int column) {
  const BoxesPlace place(p, p.input, unit);
  for (int r = 0; r < 2; ++r) {
    float* const to = boxes_input_place(p, place, inside + r * 8, p.grad_input);
    if (to == nullptr) continue;
    for (int i = 0; i < kTiles * 2; ++i) {
      const int channel = column + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      if (channel >= p.in_channels) break;
      float* const at = to + static_cast<int64_t>(channel) * p.image;
      if (!is_finite(*at)) *at = boxes_input_gradient_at(p, at - p.grad_input);
    }
  }
}

// 64 positions from `position` of the item's on; returns 0 if everything is finite.
template <int kTiles>
__device__ __forceinline__ float store_input_boxes(const BoxesTf32Params& p, const BoxesPlace& place, int inside,
                                                   int column, float* base, const float (&sum)[kTiles][4]) {
  const int t = threadIdx.x % 4;
  const bool whole = column + kTiles * 8 <= p.in_channels;
  float probe = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const to = boxes_input_place(p, place, inside + r * 8, base);
    if (to == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int channel = column + j * 8 + 2 * t + c;
        store_if(whole || channel < p.in_channels, to + static_cast<int64_t>(channel) * p.image, sum[j][r * 2 + c]);
        probe = fmaf(sum[j][r * 2 + c], 0.f, probe);
      }
  }
  return probe;
}

template <int kTiles>
__device__ __forceinline__ void multiply_input_boxes(const BoxesTf32Params& p, uint32_t base, int block) {
  const BoxesBarriers barriers{base, p.stages, p.stage_bytes};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kRows = kTf32Rows<kTiles>;
  const int own = warpgroup * kRows * 64 + warp * 16 + g;  // the first of its positions: 8, 64 and 72 further
  const uint32_t row[2] = {offset_of_position(p.input, own) + kTiles * 1024,
                           offset_of_position(p.input, own + 8) + kTiles * 1024};
  const uint32_t half = offset_of_position(p.input, own + 64) - offset_of_position(p.input, own);
  const uint32_t form = gradient_operand_form(1, 1024);
  BarrierRing ring;
  for (int index = block; index < p.items * p.input_splits; index += p.input_blocks) {
    const BoxesInputItem item(p, index, kTiles * 8, kBoxesItem<kTiles>);
    float sum[kRows][kTiles][4] = {};
    int phase = item.begin % p.phases;
#pragma unroll 1
    for (int c = item.begin; c < item.end; ++c, ring.advance(barriers.stages)) {
      uint32_t term[4][2];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) term[k][i] = load_word(barriers.table() + (phase * 32 + k * 8 + i * 4 + t) * 4);
      if (++phase == p.phases) phase = 0;
      const uint32_t at = barriers.stage(ring.place);
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      uint32_t a[4][kRows][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t from = at + row[r] + m * half;
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) a[k][m][i * 2 + r] = load_word(from + term[k][i]);
        }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < kRows; ++m) start_tf32_product(sum[m], a[k][m], gradient_operand(form, (at >> 4) + k * 2));
      wgmma_commit();
      wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.empty(ring.place));
    }
    float* const to = p.input_splits == 1
                          ? p.grad_input
                          : p.input_partial + item.split * p.batch * p.in_channels * static_cast<int64_t>(p.image);
    float probe = 0;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int position = own + m * 64, unit = position / p.input.positions;
      probe += store_input_boxes(p, BoxesPlace(p, p.input, item.unit + unit), position - unit * p.input.positions,
                                 item.column, to, sum[m]);
    }
    if (probe == 0 || p.input_splits > 1) continue;
    for (int m = 0; m < kRows; ++m) {
      const int position = own + m * 64, unit = position / p.input.positions;
      repair_input_boxes<kTiles>(p, item.unit + unit, position - unit * p.input.positions, item.column);
    }
  }
}

}  // namespace fastconvt::cuda
