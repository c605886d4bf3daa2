// Which part of the problem a block of the gather family computes.
#pragma once

#include <climits>

#include "gather.h"

namespace fastconvt::cuda {

// The part of an outer axis that a block sees: one phase, its taps that are in range for some position of the tile.
struct GatherOuterAxis {
  int first_tap;
  int tap_begin, tap_end;  // the j-th tap of the phase is first_tap + j * tap_step
  int row;                 // of the first position, among the bases of the phase
  int rows;                // of the phase that have an output
  int input;               // row y and tap j read the input at input + y - j * offset_step
  int64_t output;          // element offset of row 0
  int64_t weight;          // element offset of the first tap
};

struct GatherBlock {
  GatherOuterAxis outer[2];
  int group;
  int unit;                      // first unit, within its group
  int phase, phases;             // of the last axis
  int positions;                 // that exist, from the first one on
  int column, batch;             // of the first position
  int column_begin, column_end;  // outputs of the segment that exist: stride * column + phase - first phase
  int entry_begin, entry_end;
  int64_t base;           // of column 0
  int64_t output;         // element offset of column 0, first phase
  int64_t input, weight;  // element offsets of the group
};

// Quotient and rest of any a >= 0.
__device__ inline int64_t divide(int64_t a, const FastDivide& by, int64_t& rest) {
  if ((a >> 31) == 0) {
    int n = static_cast<int>(a);
    const int quotient = by(n);
    rest = n;
    return quotient;
  }
  const int64_t quotient = a / by.divisor;
  rest = a - quotient * by.divisor;
  return quotient;
}

__device__ inline int clamp_to_int(int64_t x, int low, int high) {
  return static_cast<int>(x < low ? low : x > high ? high : x);
}

// Positions first .. last of a tile: their columns, and their rows by axis.
struct GatherTileRange {
  int64_t first, last;
  int64_t column[2], batch[2], height[2], depth[2];
  bool one_row;

  __device__ GatherTileRange(const GatherParams& p, int64_t index) {
    const int64_t all = static_cast<int64_t>(p.batch) * p.bases[1] * p.bases[0] * p.tile.pitch - p.tile.halo;
    first = index * p.tile.positions;
    last = (first + p.tile.positions < all ? first + p.tile.positions : all) - 1;
    const int64_t rows[2] = {divide(first, p.by_pitch, column[0]), divide(last, p.by_pitch, column[1])};
    one_row = rows[0] == rows[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) depth[i] = divide(divide(rows[i], p.by_batch, batch[i]), p.by_height, height[i]);
  }
};

__device__ inline void prepare_last_axis(const GatherParams& p, const GatherTileRange& range, int segment,
                                         int phase_group, GatherBlock& block) {
  const AxisParams& axis = p.axis[2];
  const GatherTile& tile = p.tile;
  block.positions = static_cast<int>(range.last - range.first + 1);
  block.column = static_cast<int>(range.column[0]);
  block.batch = static_cast<int>(range.batch[0]);
  block.phase = phase_group * tile.phases;
  block.phases = min(tile.phases, axis.stride - block.phase);
  block.base = axis.first_base() + static_cast<int64_t>(segment) * tile.columns;

  const int64_t origin = block.base * axis.stride + block.phase - axis.padding;
  block.output = origin * p.output_stride.axis[2];
  block.column_begin = clamp_to_int(-origin, 0, tile.columns * axis.stride);
  block.column_end = clamp_to_int(axis.out - origin, 0, tile.columns * axis.stride);

  // Entries that read inside the input for some column of the tile: 0 <= base - entry_offset < in.
  const int last_column = tile.columns - 1;
  const int64_t first_base = block.base + (range.one_row ? range.column[0] : 0);
  const int64_t last_base =
      block.base + (range.one_row && range.column[1] < last_column ? range.column[1] : last_column);
  const int max_offset = entry_offset(p, p.num_entries - 1);
  int low = clamp_to_int(first_base - axis.in + 1, 0, max_offset + 1);
  int high = clamp_to_int(last_base + 1, 0, max_offset + 1);
  if (axis.dilation > axis.stride) {  // from offsets to entries: the first entry of at least this offset
    low = low * axis.stride + axis.dilation - 1;
    low = p.by_dilation(low);
    high = high * axis.stride + axis.dilation - 1;
    high = p.by_dilation(high);
  }
  block.entry_begin = min(low, p.num_entries);
  block.entry_end = min(high, p.num_entries);
}

__device__ inline void prepare_outer_axis(const GatherParams& p, int a, int phase, int first_row, int last_row,
                                          GatherOuterAxis& outer) {
  const AxisParams& axis = p.axis[a];
  int first_output = (phase - axis.padding) % axis.stride;
  if (first_output < 0) first_output += axis.stride;
  const int taps = axis.num_taps(phase);
  outer.first_tap = axis.first_tap(phase);
  outer.output = first_output * p.output_stride.axis[a];
  outer.weight = outer.first_tap * p.weight_axis[a];
  outer.rows = p.bases[a] - (first_output > p.last_output[a]);
  outer.input = (first_output + axis.padding) / axis.stride + (taps > 0 ? axis.offset(phase, outer.first_tap) : 0);

  // Taps that read inside the input for some row: 0 <= input + row - j * step < in.
  const int step = axis.offset_step();
  const int low = outer.input + first_row - static_cast<int>(axis.in) + 1;
  const int high = outer.input + last_row;
  outer.tap_begin = low <= 0 ? 0 : min((low + step - 1) / step, taps);
  outer.tap_end = high < 0 ? outer.tap_begin : max(outer.tap_begin, min(high / step + 1, taps));
}

// Fills what block `index` knows of axis `a`; a thread an axis. Blocks that write neighbouring outputs or read the same
// inputs are neighbours: phases are fastest, then channels, then positions.
__device__ inline void prepare_block(const GatherParams& p, int64_t index, int a, GatherBlock& block) {
  int64_t phase[3], channel_block, segment;
#pragma unroll
  for (int i = 2; i >= 0; --i) index = divide(index, p.by_phase[i], phase[i]);
  index = divide(index, p.by_channel_block, channel_block);
  index = divide(index, p.by_segment, segment);
  const GatherTileRange range(p, index);
  if (a == 2) {
    block.unit = static_cast<int>(channel_block);
    block.group = p.by_group_block(block.unit) * p.tile.groups;
    block.unit *= p.tile.units;
    block.input = block.group * p.input_group;
    block.weight = block.group * p.weight_group;
    prepare_last_axis(p, range, static_cast<int>(segment), static_cast<int>(phase[2]), block);
    return;
  }
  // All rows where the tile crosses a plane.
  const bool whole = a == 1 && range.depth[0] != range.depth[1];
  const int first_row = static_cast<int>(a == 0 ? range.depth[0] : range.height[0]);
  const int last_row = static_cast<int>(a == 0 ? range.depth[1] : range.height[1]);
  prepare_outer_axis(p, a, static_cast<int>(a == 0 ? phase[0] : phase[1]), whole ? 0 : first_row,
                     whole ? p.bases[a] - 1 : last_row, block.outer[a]);
  block.outer[a].row = first_row;
}

// Position m of the block: its column (>= tile.columns in the halo) and the row that it belongs to.
struct GatherPosition {
  int column, batch, height, depth;

  __device__ GatherPosition(const GatherParams& p, const GatherBlock& block, int m) {
    column = block.column + m;
    batch = block.batch + p.by_pitch(column);
    height = block.outer[1].row + p.by_batch(batch);
    depth = block.outer[0].row + p.by_height(height);
  }

  __device__ InputPosition inputs(const GatherParams& p, const GatherBlock& block) const {
    const int y = block.outer[1].input + height, z = block.outer[0].input + depth;
    return {column * p.input_stride.axis[2] + batch * p.input_stride.batch + y * p.input_stride.axis[1] +
                z * p.input_stride.axis[0],
            y, depth < p.bases[0] ? z : INT_MIN};
  }

  // Offset of the position's output of relative phase 0, without channel; relative phases begin .. end - 1 exist.
  __device__ int64_t outputs(const GatherParams& p, const GatherBlock& block, int& begin, int& end) const {
    const bool exists = column < p.tile.columns && height < block.outer[1].rows && depth < block.outer[0].rows;
    const int o = column * p.axis[2].stride;
    begin = min(max(block.column_begin - o, 0), block.phases);
    end = exists ? max(min(block.column_end - o, block.phases), 0) : 0;
    return block.output + block.outer[1].output + block.outer[0].output + o * p.output_stride.axis[2] +
           batch * p.output_stride.batch + height * p.output_row[1] + depth * p.output_row[0];
  }
};

// A place in the loop over virtual channels: (depth tap, height tap, input channel), the last one fastest.
struct VirtualChannel {
  int depth_tap, height_tap, channel;

  __device__ explicit VirtualChannel(const GatherBlock& block)
      : depth_tap(block.outer[0].tap_begin), height_tap(block.outer[1].tap_begin), channel(0) {}

  // To channel 0 of the next tap; true if that is of the next depth.
  __device__ bool next_tap(const GatherBlock& block) {
    channel = 0;
    if (++height_tap < block.outer[1].tap_end) return false;
    height_tap = block.outer[1].tap_begin;
    ++depth_tap;
    return true;
  }

  __device__ void advance(const GatherParams& p, const GatherBlock& block, int count) {
    for (count += channel; count >= p.in_channels; count -= p.in_channels) next_tap(block);
    channel = count;
  }
};

}  // namespace fastconvt::cuda
