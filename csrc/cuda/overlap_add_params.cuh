// The overlap-add family: what a block is told (csrc/core/overlap_add.h), and how it finds its part of the problem.
#pragma once

#include "../core/overlap_add.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

enum class OverlapAddPrecision : int { kFloat32, kTf32, k16Bits };

struct OverlapAddAxis {
  int in, out, kernel, stride, dilation;
  int bases;       // of a cell
  int residues;    // of a cell, without copies
  int step;        // outputs from one cell to the next
  int first;       // output of residue 0 of cell 0; it may be negative
  int first_base;  // input of offset 0 of cell 0
  int cells;
  int span, spans;  // of column tiles
  int low, reach;   // offsets
  int support;      // offsets of a column tile, at most
  int copy_shift;   // from a column tile to its copy, in bases; 0 along other axes
  FastDivide by_stride, by_dilation, by_span, by_spans, by_reach, by_support;
};

struct OverlapAddParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  OverlapAddAxis axis[3];
  AxisParams definition[3];
  int batch, groups;
  int group_in, group_out;  // channels
  int span_channels, columns, copies;
  int row_warps, column_warps;
  int teams;            // each makes a share of the steps
  int box[4], held[4];  // cells and positions: batch, depth, height, width
  int rows;             // cells of a block
  int held_positions;
  int steps, stage_steps, fragments, entry_count, support_count;
  int64_t weight_channel;  // elements from one input channel to the next
  int fold_entries;
  int half_bytes, step_weights, step_bytes, stage_bytes, entries, positions, weights, pointers,
      totals;  // bytes of shared memory
  // Wide (overlap_add_wide.cuh).
  int chunks, block_sets, sets;
  int wide_columns, taps;                // taps of an output channel
  int channel_granules, all_granules;    // of an offset; an even number in all
  int right, cell_rows, outputs, terms;  // bytes of shared memory
  int vector;                            // outputs of so many neighbouring columns are an aligned vector
  FastDivide by_chunks, by_channel_granules, by_group_out;
  int lead;       // positions held before the first one along the width
  bool pairs;     // contiguous: two positions are an aligned vector
  bool granules;  // channels_last: 16 bytes of channels are an aligned vector
  bool channels_last;
  FastDivide by_groups, by_column_blocks, by_entries, by_support, by_boxes[3], by_box[3],
      by_held[3];  // depth, height, width
};

// The box of a block.
struct OverlapAddBlock {
  int group, first_column;
  int cell[4];  // the first one: batch, depth, height, width

  __device__ OverlapAddBlock(const OverlapAddParams& p, int columns) {
    // Volatile, so that it is found again rather than kept in registers.
    int rest;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(rest));
    int index = p.by_column_blocks(rest);
    first_column = rest * columns;
    rest = p.by_groups(index);
    group = index;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      index = rest;
      rest = p.by_boxes[a](index);
      cell[a + 1] = index * p.box[a + 1];
    }
    cell[0] = rest * p.box[0];
  }
};

// index, row-major over `sizes` (depth, height, width), as batch, depth, height, width.
__device__ __forceinline__ void overlap_add_split(int index, const FastDivide (&sizes)[3], int (&at)[4]) {
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    at[a + 1] = index;
    index = sizes[a](at[a + 1]);
  }
  at[0] = index;
}

// A column tile: which spans it has, and its offsets along each axis: low .. low + count - 1, without the copy's shift.
struct OverlapAddColumns {
  int span[3], channel, copy;
  int low[3], count[3];

  __device__ OverlapAddColumns(const OverlapAddParams& p, int column) {
    int rest = column;
    copy = 0;
    if (p.copies > 1) copy = column, rest = 0;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const OverlapAddAxis& axis = p.axis[a];
      span[a] = rest;
      rest = axis.by_spans(span[a]);
      const int begin = span[a] * axis.span, end = min(begin + axis.span, axis.residues);
      const int back = (axis.kernel - 1) * axis.dilation - begin;
      int most = end - 1, distance = back >= 0 ? back : axis.stride - 1 - back;
      low[a] = axis.by_stride(distance);
      if (back >= 0) low[a] = -low[a];
      count[a] = axis.by_stride(most) - low[a] + 1;
    }
    channel = rest * p.span_channels;
  }

  // Residue and channel of column 0 .. 7; false where there is none.
  __device__ bool find(const OverlapAddParams& p, int index, int (&residue)[3], int& of_channel) const {
    bool exists = true;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int rest = index;
      index = p.axis[a].by_span(rest);
      residue[a] = span[a] * p.axis[a].span + rest;
      exists = exists && residue[a] < p.axis[a].residues;
    }
    of_channel = channel + index;
    return exists && index < p.span_channels && of_channel < p.group_out;
  }
};

}  // namespace fastconvt::cuda
