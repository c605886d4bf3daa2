// What a block of the phase GEMM works on: its items, and tables of their inputs, outputs and taps.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "phase_gemm_params.h"

namespace fastconvt::cuda {

// Half of a block copies, the other half multiplies.
constexpr int kPhaseGemmThreads = kPhaseGemmWarps * 32;

struct PhaseGemmItem {
  int group, channel_block;
  int f[3];      // phase along each axis; the last one is unused where a block makes all of them
  int first[4];  // batch entry and cells
  int outer_taps;
  int64_t unit;  // of weights, the first one of the item
};

__device__ __forceinline__ PhaseGemmItem find_item(const PhaseGemmParams& p, int index) {
  PhaseGemmItem item;
  int rest = p.channel_blocks(index);
  item.channel_block = index;
  const auto split = [&](const FastDivide& divide) {
    int remainder = rest;
    rest = divide(remainder);
    return remainder;
  };
  item.f[2] = p.contiguous ? 0 : split(p.axis[2].phases);
  item.f[1] = split(p.axis[1].phases);
  item.f[0] = split(p.axis[0].phases);
#pragma unroll
  for (int a = 2; a >= 0; --a) item.first[a + 1] = split(p.axis[a].tiles) * p.axis[a].box.divisor;
  item.first[0] = split(p.tiles_batch) * p.box_batch;
  item.group = rest;
  // Weights lie phase by phase, the last axis fastest.
  const PhaseGemmPhaseParams &depth = p.axis[0].phase[item.f[0]], &height = p.axis[1].phase[item.f[1]];
  item.outer_taps = depth.taps * height.taps;
  const int before = (depth.before * p.axis[1].kernel + depth.taps * height.before) * p.axis[2].kernel +
                     (p.contiguous ? 0 : item.outer_taps * p.axis[2].phase[item.f[2]].before);
  item.unit =
      ((static_cast<int64_t>(item.group) * p.channel_blocks.divisor + item.channel_block) * p.taps + before) * p.chunks;
  return item;
}

// The phase of the last axis that a pass makes.
__device__ __forceinline__ const PhaseGemmPhaseParams& last_phase(const PhaseGemmParams& p, const PhaseGemmItem& item,
                                                                  int pass) {
  return p.axis[2].phase[p.contiguous ? pass : item.f[2]];
}

// The input coordinate, relative to the first cell, of the first staged input.
__device__ __forceinline__ int first_shift(const PhaseGemmParams& p, const PhaseGemmItem& item, int a) {
  if (a == 2 && p.contiguous) return p.min_shift;
  const PhaseGemmPhaseParams& phase = p.axis[a].phase[item.f[a]];
  return phase.taps > 0 ? phase.shift - (phase.taps - 1) * p.axis[a].offset_step : 0;
}

// For every staged input where it stands, in granules from the first batch entry's; -1: nowhere.
__device__ __forceinline__ void fill_inputs(const PhaseGemmParams& p, const PhaseGemmItem& item, int thread,
                                            int* table) {
  int begin[3];
#pragma unroll
  for (int a = 0; a < 3; ++a) begin[a] = item.first[a + 1] + first_shift(p, item, a);
  for (int i = thread; i < p.inputs; i += kPhaseGemmThreads) {
    int rest = i, at[3];
    bool exists = true;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int remainder = rest;
      rest = p.axis[a].halo(remainder);
      at[a] = begin[a] + remainder;
      exists = exists && static_cast<unsigned>(at[a]) < static_cast<unsigned>(p.axis[a].in);
    }
    exists = exists && item.first[0] + rest < p.batch;
    const int64_t position =
        ((static_cast<int64_t>(rest) * p.axis[0].in + at[0]) * p.axis[1].in + at[1]) * p.axis[2].in + at[2];
    table[i] = exists ? static_cast<int>(position * p.pixel_granules) : -1;
  }
}

// For every row of outputs where it stands, in elements; -1: nowhere. Contiguous: a row is a run of the last axis of
// one channel, else one position.
__device__ __forceinline__ void fill_rows(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                          int64_t* table) {
  for (int i = threadIdx.x; i < rows; i += kPhaseGemmThreads) {
    int rest = i, o[3];
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int cell = 0;
      if (a < 2 || !p.contiguous) {
        cell = rest;
        rest = p.axis[a].box(cell);
      }
      o[a] = (item.first[a + 1] + cell) * p.axis[a].stride + item.f[a];
    }
    const int n = item.first[0] + rest;
    const bool exists = n < p.batch && o[0] < p.axis[0].out && o[1] < p.axis[1].out && o[2] < p.axis[2].out;
    table[i] = exists ? n * p.out.batch + o[0] * p.out.axis[0] + o[1] * p.out.axis[1] + o[2] * p.out.axis[2] : -1;
  }
}

// For every tap of every pass what it adds to the address of a staged input.
__device__ __forceinline__ void fill_taps(const PhaseGemmParams& p, const PhaseGemmItem& item, int* table) {
  const int heights = p.axis[1].phase[item.f[1]].taps, depths = p.axis[0].phase[item.f[0]].taps;
  const int origin = first_shift(p, item, 2);
  int entry = 0;
  for (int pass = 0; pass < p.passes; ++pass) {
    const PhaseGemmPhaseParams& last = last_phase(p, item, pass);
    const int taps = item.outer_taps * last.taps;
    for (int i = threadIdx.x; i < taps; i += kPhaseGemmThreads) {
      const int outer = i / last.taps, plane = outer / heights;
      const int width = last.shift - (i - outer * last.taps) * p.axis[2].offset_step - origin;
      const int height = (heights - 1 - (outer - plane * heights)) * p.axis[1].offset_step;
      const int depth = (depths - 1 - plane) * p.axis[0].offset_step;
      table[entry + i] = ((depth * p.axis[1].halo.divisor + height) * p.axis[2].halo.divisor + width) * p.pitch;
    }
    entry += taps;
  }
}

// What a lane adds to the address of staged inputs to load its row of the operand of 16 cells: lanes 0 to 15 their
// first 16 bytes, 16 to 31 their second.
__device__ __forceinline__ int cell_address(const PhaseGemmParams& p, int first) {
  const int lane = threadIdx.x % 32;
  int rest = first + lane % 16, at[3];
  if (rest >= p.cells) rest = 0;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    at[a] = rest;
    rest = p.axis[a].box(at[a]);
  }
  const int row = (rest * p.axis[0].halo.divisor + at[0]) * p.axis[1].halo.divisor + at[1];
  return (row * p.axis[2].halo.divisor + at[2]) * p.pitch + lane / 16 * 16;
}

// A ring of places and how often it went round.
struct PhaseGemmRing {
  int place = 0, parity = 0;
  __device__ __forceinline__ void advance(int places) {
    if (++place == places) place = 0, parity ^= 1;
  }
};

// A position in the sequence of stages of an item: passes, in each the chunks of input channels, in each the taps.
struct PhaseGemmCursor {
  PhaseGemmRing loads;  // of chunks, of all items
  int first_buffer, last_pass;
  bool loading;  // this visit to the chunk is the first one
  int pass, chunk, tap;
  int taps;   // of the pass
  int entry;  // of the pass's first tap in the table

  __device__ __forceinline__ void begin(const PhaseGemmParams& p, const PhaseGemmItem& item) {
    pass = chunk = tap = entry = 0;
    first_buffer = loads.place;
    loading = true;
    if (p.resident) {
      last_pass = 0;
      for (int i = 0; i < p.passes; ++i) {
        if (last_phase(p, item, i).taps > 0) last_pass = i;
      }
    }
    seek(p, item);
  }
  // Goes on to the next pass that has taps, this one included.
  __device__ __forceinline__ void seek(const PhaseGemmParams& p, const PhaseGemmItem& item) {
    for (; pass < p.passes; ++pass) {
      taps = item.outer_taps * last_phase(p, item, pass).taps;
      if (taps > 0) break;
    }
  }
  __device__ __forceinline__ int count(const PhaseGemmParams& p) const { return min(p.taps_per_stage, taps - tap); }
  // Where the chunk is staged.
  __device__ __forceinline__ int buffer(const PhaseGemmParams& p) const {
    if (loading) return loads.place;
    const int place = first_buffer + chunk;
    return place < p.buffers ? place : place - p.buffers;
  }
  // Whether no later stage reads the chunk.
  __device__ __forceinline__ bool is_last_use(const PhaseGemmParams& p) const {
    return tap + p.taps_per_stage >= taps && (!p.resident || pass == last_pass);
  }
  __device__ __forceinline__ void advance(const PhaseGemmParams& p, const PhaseGemmItem& item) {
    tap += p.taps_per_stage;
    if (tap < taps) return;
    tap = 0;
    if (loading) loads.advance(p.buffers);
    if (++chunk < p.chunks) return;
    chunk = 0;
    entry += taps;
    ++pass;
    loading = !p.resident;
    seek(p, item);
  }
};

}  // namespace fastconvt::cuda
