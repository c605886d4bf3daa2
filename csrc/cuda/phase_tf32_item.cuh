// What a block of the phase GEMM on tensor copies works on: its items and their passes. One warp finds out what they
// are and writes it down for the others.
#pragma once

#include "phase_tf32_product.cuh"

namespace fastconvt::cuda {

struct PhaseTf32Item {
  int group, channel_block;
  int f[3];      // phase along each axis; those that an item makes all are 0; the last one counts what passes do
  int first[4];  // batch entry and cells
  bool last[3];  // the tile reaches the end of the outputs
};

__device__ __forceinline__ PhaseTf32Item find_item(const PhaseTf32Params& p, int index) {
  PhaseTf32Item item;
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
struct PhaseTf32Phase {
  int f[3];
  int taps[3];
  int count;   // of taps
  int before;  // taps of the phases before
};

__device__ __forceinline__ PhaseTf32Phase find_phase(const PhaseTf32Params& p, const PhaseTf32Item& item, int pass,
                                                     int warpgroup) {
  PhaseTf32Phase phase;
  int height = item.f[1], width = item.f[2];
  if (p.merged) height = pass / p.width_passes;
  if (p.contiguous) width = p.merged ? pass - height * p.width_passes : pass;
  if (p.split == PhaseTmaSplit::kPhases) width = 2 * width + warpgroup;
  if (p.contiguous) width += item.f[2] * p.width_group;
  phase.f[0] = item.f[0], phase.f[1] = height, phase.f[2] = width;
  phase.count = 0, phase.before = 0;
  phase.taps[0] = phase.taps[1] = phase.taps[2] = 0;
  if (width >= p.axis[2].stride) return phase;
  const PhaseTf32PhaseParams &d = p.axis[0].phase[item.f[0]], &h = p.axis[1].phase[height], &w = p.axis[2].phase[width];
  if (d.slot < 0 || h.slot < 0 || w.slot < 0) return phase;
  phase.taps[0] = d.taps, phase.taps[1] = h.taps, phase.taps[2] = w.taps;
  phase.count = d.taps * h.taps * w.taps;
  phase.before = (d.before * p.axis[1].kernel + d.taps * h.before) * p.axis[2].kernel + d.taps * h.taps * w.before;
  return phase;
}

// The input, relative to the first cell, that a staged box begins with: the least of what any warpgroup reads. Even
// lanes know the phase of the first, odd ones that of the second.
__device__ __forceinline__ void find_start(const PhaseTf32Params& p, const PhaseTf32Phase& phase, int (&start)[3]) {
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
struct PhaseTf32Walk {
  int offset, step, row_step, plane_step;
  int width, height;
};
__device__ __forceinline__ PhaseTf32Walk find_walk(const PhaseTf32Params& p, const PhaseTf32Phase& phase,
                                                   const int (&start)[3]) {
  PhaseTf32Walk walk{};
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
struct PhaseTf32Tap {
  int offset, w, h;
  __device__ __forceinline__ void advance(const PhaseTf32Walk& walk) {
    offset -= walk.step;
    if (++w < walk.width) return;
    w = 0, offset -= walk.row_step;
    if (++h < walk.height) return;
    h = 0, offset -= walk.plane_step;
  }
};

// A pass of an item, in shared memory. What a warpgroup makes of it:
struct PhaseTf32Share {
  PhaseTf32Walk walk;
  int count;      // of taps
  int staged_at;  // contiguous: where its phase is staged, in elements of a channel
  int counts[3];  // of cells along each axis that have outputs
  bool whole;     // all cells of the box have
  int64_t place;  // channels-last: the first cell's output of the group's first channel
  const char* weights;
};
struct PhaseTf32Task {
  int group;  // -1: there is no more
  int channel_block;
  int taps;  // the most of a warpgroup
  bool last_pass;
  int item_slot;      // of two, where channels' terms and lines of outputs stand
  int batches;        // entries of the box
  int lines, length;  // contiguous: runs of a channel, and the outputs of one
  int at[5];          // coordinates of the copy
  PhaseTf32Share share[2];
};

// Coordinates of a cell in its box: batch, depth, height, width.
struct PhaseTf32Cell {
  int at[4];
};
__device__ __forceinline__ PhaseTf32Cell find_cell(const PhaseTf32Params& p, int cell) {
  const auto digits = [&](int shift, int size) { return (cell >> shift) & (size - 1); };
  PhaseTf32Cell c;
  c.at[0] = digits(p.shift_batch, p.box_batch);
  c.at[1] = digits(p.shift_depth, p.axis[0].box);
  c.at[2] = digits(p.shift_height, p.axis[1].box);
  const int low = 1 << p.low_width_log2;
  c.at[3] =
      digits(p.shift_width, low) + (digits(p.shift_high_width, p.axis[2].box >> p.low_width_log2) << p.low_width_log2);
  return c;
}
// The number of a cell, without its batch entry and planes.
__device__ __forceinline__ int cell_number(const PhaseTf32Params& p, int height, int width) {
  const int low = width & ((1 << p.low_width_log2) - 1);
  return (height << p.shift_height) + (low << p.shift_width) + (width >> p.low_width_log2 << p.shift_high_width);
}

// How many cells of an item's tile a phase has along an axis: up to its last output in the last tile.
__device__ __forceinline__ int count_cells(const PhaseTf32Params& p, const PhaseTf32Item& item, int a, int f) {
  return item.last[a] ? max(0, p.axis[a].phase[f].cells - item.first[a + 1]) : p.axis[a].box;
}

// A run of outputs of one channel: where it starts, in elements, and what it adds to a cell's number.
struct PhaseTf32Line {
  int64_t place;
  int cell;
};

// Shared memory by its parts.
struct PhaseTf32Shared {
  unsigned char* bytes;
  const PhaseTf32Params& p;
  __device__ __forceinline__ PhaseTf32Task* tasks() const {
    return reinterpret_cast<PhaseTf32Task*>(bytes + p.tasks_at);
  }
  __device__ __forceinline__ PhaseTf32Line* lines(int slot) const {
    return reinterpret_cast<PhaseTf32Line*>(bytes + p.lines_at) + slot * p.lines;
  }
  // What the epilogue adds to each channel.
  __device__ __forceinline__ float* terms(int slot) const {
    return reinterpret_cast<float*>(bytes + p.terms_at) + slot * p.columns;
  }
  __device__ __forceinline__ short* table() const { return reinterpret_cast<short*>(bytes + p.table_at); }
  __device__ __forceinline__ unsigned char* staging() const { return bytes + p.staging_at; }
};

// The threads that multiply wait for each other.
template <int kThreads>
__device__ __forceinline__ void meet_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

}  // namespace fastconvt::cuda
