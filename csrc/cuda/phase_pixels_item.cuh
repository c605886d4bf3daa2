// What a block of the phase GEMM on tensor copies works on: its items. Warps find out what they are and
// write it down for the others.
#pragma once

#include "phase_pixels_product.cuh"

namespace fastconvt::cuda {

struct PhasePixelsItem {
  int group, channel_block;
  int f[3];      // phase along each axis, or pair of phases along the last one
  int first[4];  // batch entry and cells
  bool last[3];  // the tile reaches the end of the outputs
};

__device__ __forceinline__ PhasePixelsItem find_item(const PhasePixelsParams& p, int index) {
  PhasePixelsItem item;
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

// The phase that a warpgroup makes.
struct PhasePixelsPhase {
  int f[3];
  int taps[3];
  int count;   // of taps
  int before;  // taps of the phases before
};

__device__ __forceinline__ PhasePixelsPhase find_phase(const PhasePixelsParams& p, const PhasePixelsItem& item,
                                                       int warpgroup) {
  PhasePixelsPhase phase;
  const int height = item.f[1], width = p.split == PhaseTmaSplit::kPhases ? 2 * item.f[2] + warpgroup : item.f[2];
  phase.f[0] = item.f[0], phase.f[1] = height, phase.f[2] = width;
  phase.count = 0, phase.before = 0;
  phase.taps[0] = phase.taps[1] = phase.taps[2] = 0;
  if (width >= p.axis[2].stride) return phase;
  const PhasePixelsPhaseParams &d = p.axis[0].phase[item.f[0]], &h = p.axis[1].phase[height],
                               &w = p.axis[2].phase[width];
  if (d.slot < 0 || h.slot < 0 || w.slot < 0) return phase;
  phase.taps[0] = d.taps, phase.taps[1] = h.taps, phase.taps[2] = w.taps;
  phase.count = d.taps * h.taps * w.taps;
  phase.before = (d.before * p.axis[1].kernel + d.taps * h.before) * p.axis[2].kernel + d.taps * h.taps * w.before;
  return phase;
}

// The input, relative to the first cell, that a staged box begins with: the least of what any warpgroup reads. Even
// lanes know the phase of the first, odd ones that of the second.
__device__ __forceinline__ void find_start(const PhasePixelsParams& p, const PhasePixelsPhase& phase, int (&start)[3]) {
  const int other_count = __shfl_xor_sync(~0u, phase.count, 1);
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    start[a] = 0;
    if (phase.count > 0) {
      start[a] = p.axis[a].phase[phase.f[a]].shift - (phase.taps[a] - 1) * p.axis[a].offset_step;
    }
    const int other = __shfl_xor_sync(~0u, start[a], 1);
    if (phase.count == 0) start[a] = other;
    if (phase.count > 0 && other_count > 0) start[a] = min(start[a], other);
  }
}

// How a warpgroup goes through the taps of its phase, the last axis fastest: what one adds to the address of a cell,
// and what that falls by.
struct PhasePixelsWalk {
  int offset, step, row_step, plane_step;
  int width, height;
};
__device__ __forceinline__ PhasePixelsWalk find_walk(const PhasePixelsParams& p, const PhasePixelsPhase& phase,
                                                     const int (&start)[3]) {
  PhasePixelsWalk walk{};
  if (phase.count == 0) return walk;
#pragma unroll
  for (int a = 0; a < 3; ++a) walk.offset += (p.axis[a].phase[phase.f[a]].shift - start[a]) * p.axis[a].step_bytes;
  walk.width = phase.taps[2], walk.height = phase.taps[1];
  walk.step = p.axis[2].offset_step * p.axis[2].step_bytes;
  walk.row_step = p.axis[1].offset_step * p.axis[1].step_bytes - walk.width * walk.step;
  walk.plane_step =
      p.axis[0].offset_step * p.axis[0].step_bytes - walk.height * (walk.row_step + walk.width * walk.step);
  return walk;
}
// The same through the weights of those taps: of the kernel's, number `offset`.
__device__ __forceinline__ PhasePixelsWalk find_weight_walk(const PhasePixelsParams& p, const PhasePixelsPhase& phase) {
  PhasePixelsWalk walk{};
  if (phase.count == 0) return walk;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    walk.offset = walk.offset * p.axis[a].kernel + p.axis[a].phase[phase.f[a]].first_tap;
  }
  const int row = -p.axis[1].tap_step * p.axis[2].kernel;
  walk.width = phase.taps[2], walk.height = phase.taps[1];
  walk.step = -p.axis[2].tap_step;
  walk.row_step = row - walk.width * walk.step;
  walk.plane_step = -p.axis[0].tap_step * p.axis[1].kernel * p.axis[2].kernel - walk.height * row;
  return walk;
}
struct PhasePixelsTap {
  int offset, w, h;
  __device__ __forceinline__ void advance(const PhasePixelsWalk& walk) {
    offset -= walk.step;
    if (++w < walk.width) return;
    w = 0, offset -= walk.row_step;
    if (++h < walk.height) return;
    h = 0, offset -= walk.plane_step;
  }
};

// An item, in shared memory. What a warpgroup makes of it:
struct PhasePixelsShare {
  PhasePixelsWalk walk;
  int count;      // of taps
  int counts[3];  // of cells along each axis that have outputs
  bool whole;     // all cells of the box have
  int64_t place;  // the first cell's output of the group's first channel
  const char* packed_weights;
  PhasePixelsWalk weights;
};
struct PhasePixelsTask {
  int group;  // -1: there is no more
  int channel_block;
  int taps;     // the most of a warpgroup
  int batches;  // entries of the box
  int at[5];    // coordinates of the copy
  PhasePixelsShare share[2];
};

// Coordinates of a cell in its box: batch, depth, height, width.
struct PhasePixelsCell {
  int at[4];
};
__device__ __forceinline__ PhasePixelsCell find_cell(const PhasePixelsParams& p, int cell) {
  const auto digits = [&](int shift, int size) { return (cell >> shift) & (size - 1); };
  PhasePixelsCell c;
  c.at[0] = digits(p.shift_batch, p.box_batch);
  c.at[1] = digits(p.shift_depth, p.axis[0].box);
  c.at[2] = digits(p.shift_height, p.axis[1].box);
  const int low = 1 << p.low_width_log2;
  c.at[3] =
      digits(p.shift_width, low) + (digits(p.shift_high_width, p.axis[2].box >> p.low_width_log2) << p.low_width_log2);
  return c;
}
// How many cells of an item's tile a phase has along an axis: up to its last output in the last tile.
__device__ __forceinline__ int count_cells(const PhasePixelsParams& p, const PhasePixelsItem& item, int a, int f) {
  return item.last[a] ? max(0, p.axis[a].phase[f].cells - item.first[a + 1]) : p.axis[a].box;
}

// Shared memory by its parts.
struct PhasePixelsShared {
  unsigned char* bytes;
  const PhasePixelsParams& p;
  __device__ __forceinline__ PhasePixelsTask* tasks() const {
    return reinterpret_cast<PhasePixelsTask*>(bytes + p.tasks_at);
  }
  // What the epilogue adds to each channel.
  __device__ __forceinline__ float* terms(int task) const {
    return reinterpret_cast<float*>(bytes + p.terms_at) + task * p.columns;
  }
};

}  // namespace fastconvt::cuda
