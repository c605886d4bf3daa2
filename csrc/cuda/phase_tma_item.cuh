// What a block of the phase GEMM on tensor copies works on: its items, their passes and the taps of one.
#pragma once

#include "phase_tma_product.cuh"

namespace fastconvt::cuda {

struct PhaseTmaItem {
  int group, channel_block;
  int f[3];      // phase along each axis; those that an item makes all are 0; the last one counts what passes do
  int first[4];  // batch entry and cells
  bool last[3];  // the tile reaches the end of the outputs
};

__device__ __forceinline__ PhaseTmaItem find_item(const PhaseTmaParams& p, int index) {
  PhaseTmaItem item;
  int rest = p.channel_blocks(index);
  item.channel_block = index;
  const auto split = [&](const FastDivide& divide) {
    int remainder = rest;
    rest = divide(remainder);
    return remainder;
  };
#pragma unroll
  for (int a = 2; a >= 0; --a) item.f[a] = split(p.axis[a].phases);
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    const int tile = split(p.axis[a].tiles);
    item.first[a + 1] = tile * p.axis[a].box;
    item.last[a] = tile + 1 == p.axis[a].tiles.divisor;
  }
  item.first[0] = split(p.tiles_batch) * p.box_batch;
  item.group = rest;
  return item;
}

// The phase that a warpgroup makes in a pass.
struct PhaseTmaPhase {
  int f[3];
  int taps[3];
  int count;   // of taps
  int before;  // taps of the phases before
};

__device__ __forceinline__ PhaseTmaPhase find_phase(const PhaseTmaParams& p, const PhaseTmaItem& item, int pass,
                                                    int warpgroup) {
  PhaseTmaPhase phase;
  int height = item.f[1], width = item.f[2];
  if (p.merged) height = pass / p.width_passes;
  if (p.contiguous) width = p.merged ? pass - height * p.width_passes : pass;
  if (p.split == PhaseTmaSplit::kPhases) width = 2 * width + warpgroup;
  if (p.contiguous) width += item.f[2] * p.width_group;
  phase.f[0] = item.f[0], phase.f[1] = height, phase.f[2] = width;
  phase.count = 0, phase.before = 0;
  phase.taps[0] = phase.taps[1] = phase.taps[2] = 0;
  if (width >= p.axis[2].stride) return phase;
  const PhaseTmaPhaseParams &d = p.axis[0].phase[item.f[0]], &h = p.axis[1].phase[height], &w = p.axis[2].phase[width];
  if (d.slot < 0 || h.slot < 0 || w.slot < 0) return phase;
  phase.taps[0] = d.taps, phase.taps[1] = h.taps, phase.taps[2] = w.taps;
  phase.count = d.taps * h.taps * w.taps;
  phase.before = (d.before * p.axis[1].kernel + d.taps * h.before) * p.axis[2].kernel + d.taps * h.taps * w.before;
  return phase;
}

// The input, relative to the first cell, that a staged box begins with: the least of what any warpgroup reads.
__device__ __forceinline__ void find_start(const PhaseTmaParams& p, const PhaseTmaPhase& even, const PhaseTmaPhase& odd,
                                           int (&start)[3]) {
  const PhaseTmaPhase& one = even.count > 0 ? even : odd;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    start[a] = p.axis[a].phase[one.f[a]].shift - (one.taps[a] - 1) * p.axis[a].offset_step;
  }
  if (even.count > 0 && odd.count > 0) {
    start[2] = min(start[2], p.axis[2].phase[odd.f[2]].shift - (odd.taps[2] - 1) * p.axis[2].offset_step);
  }
}

// Goes through the taps of a phase, the last axis fastest; `offset` is what one adds to the address of a cell.
struct PhaseTmaTaps {
  int offset, step, row_step, plane_step;
  int width, height, w, h;
  __device__ __forceinline__ PhaseTmaTaps(const PhaseTmaParams& p, const PhaseTmaPhase& phase, const int (&start)[3]) {
    offset = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) offset += (p.axis[a].phase[phase.f[a]].shift - start[a]) * p.axis[a].step_bytes;
    width = phase.taps[2], height = phase.taps[1];
    step = p.axis[2].offset_step * p.axis[2].step_bytes;
    row_step = p.axis[1].offset_step * p.axis[1].step_bytes - width * step;
    plane_step = p.axis[0].offset_step * p.axis[0].step_bytes - height * (row_step + width * step);
    w = h = 0;
  }
  __device__ __forceinline__ void advance() {
    offset -= step;
    if (++w < width) return;
    w = 0, offset -= row_step;
    if (++h < height) return;
    h = 0, offset -= plane_step;
  }
};

// Coordinates of a cell in its box: batch, depth, height, width.
struct PhaseTmaCell {
  int at[4];
};
__device__ __forceinline__ PhaseTmaCell find_cell(const PhaseTmaParams& p, int cell) {
  const auto digits = [&](int shift, int size) { return (cell >> shift) & (size - 1); };
  PhaseTmaCell c;
  c.at[0] = digits(p.shift_batch, p.box_batch);
  c.at[1] = digits(p.shift_depth, p.axis[0].box);
  c.at[2] = digits(p.shift_height, p.axis[1].box);
  const int low = 1 << p.low_width_log2;
  c.at[3] =
      digits(p.shift_width, low) + (digits(p.shift_high_width, p.axis[2].box >> p.low_width_log2) << p.low_width_log2);
  return c;
}
// The number of a cell, without its batch entry and planes.
__device__ __forceinline__ int cell_number(const PhaseTmaParams& p, int height, int width) {
  const int low = width & ((1 << p.low_width_log2) - 1);
  return (height << p.shift_height) + (low << p.shift_width) + (width >> p.low_width_log2 << p.shift_high_width);
}

// How many cells of an item's tile a phase has along an axis: up to its last output in the last tile.
__device__ __forceinline__ int count_cells(const PhaseTmaParams& p, const PhaseTmaItem& item, int a, int f) {
  const PhaseTmaAxisParams& axis = p.axis[a];
  if (!item.last[a]) return axis.box;
  const int all = (axis.out - f + axis.stride - 1) / axis.stride;
  return max(0, all - item.first[a + 1]);
}

// The threads that multiply wait for each other.
template <int kThreads>
__device__ __forceinline__ void meet_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace fastconvt::cuda
