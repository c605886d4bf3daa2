// What the kernels of dense layers know of a layer, its phases, a tile and a column.
#pragma once

#include "dense_gradient.cuh"
#include "rectifier.h"

namespace fastconvt::cuda {

// One axis of all phases.
struct DenseLayerAxis {
  AxisParams layer;
  FastDivide by_phase;  // of those that are not columns
  FastDivide by_stride, by_gcd, by_tap_step;
  int joined;     // phases that are columns
  int start;      // of these: what the first tap of cell 0 reads
  int most_taps;  // of other phases
  int fewer;      // added to a phase's kind where it has one tap less than others; 0: that has no list of its own
};

struct DenseForward {
  DenseParams phase;  // `grad` is the input; `input`, along cells and columns, the output
  DenseLayerAxis axis[3];
  FastDivide by_phase;
  // Columns are channels by joined phases, the last axis of these fastest, or the other way round.
  FastDivide by_channels, by_joined, by_joined_axis[3];
  bool channels_first;
  int out_channels;  // of a group
  int phases, kinds;
  int64_t weight_channel, weight_tap;  // from output channel to output channel, and from tap to tap
  const void* bias;
  Rectifier rectify;
  int step_bytes;  // of packed weights
  bool pairs;      // columns 2 i and 2 i + 1 are neighbours in memory, aligned
};

// Taps of a phase: the layer's first one, how many, and what the last one reads for cell 0. Products have them in
// reverse.
struct DenseTaps {
  int first, count, start;

  __device__ DenseTaps(const DenseLayerAxis& axis, int output) {
    const AxisParams& layer = axis.layer;
    if (layer.stride == 1) {
      first = 0, count = layer.kernel, start = output + layer.padding - (count - 1) * layer.dilation;
      return;
    }
    int phase = output + layer.padding;
    const int base = axis.by_stride(phase);
    int rest = phase;
    first = axis.by_gcd(rest) * layer.inverse;
    axis.by_tap_step(first);
    int reach = layer.kernel - 1 - first + layer.tap_step();
    count = rest == 0 && first < layer.kernel ? axis.by_tap_step(reach) : 0;
    int before = first * layer.dilation - phase;  // a multiple of the stride
    start = base - axis.by_stride(before) - (count - 1) * layer.offset_step();
  }
  // The tap that products have first.
  __device__ int last(const DenseLayerAxis& axis) const { return first + (count - 1) * axis.layer.tap_step(); }
};

// What blocks must know of a phase.
struct DensePhase {
  int output[3];          // the first one
  int taps[3];            // in the list of steps
  int start[3];           // what the first of these reads for cell 0
  int last[3], count[3];  // of an axis that is not joined: the tap of the layer that the first one is, how many
  int kind, steps;

  __device__ DensePhase(const DenseForward& f, int index) {
    kind = 0;
    bool empty = false;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const DenseLayerAxis& axis = f.axis[a];
      output[a] = index;
      index = axis.by_phase(output[a]);
      taps[a] = f.phase.axis[a].taps;
      start[a] = axis.start, last[a] = 0, count[a] = 0;
      if (axis.joined > 1) continue;
      const DenseTaps own(axis, output[a]);
      empty = empty || own.count == 0;
      start[a] = own.start, last[a] = own.last(axis), count[a] = own.count;
      if (axis.fewer > 0) taps[a] = own.count, kind += own.count < axis.most_taps ? axis.fewer : 0;
    }
    steps = empty ? 0 : (f.phase.chunk_planes * taps[0] * taps[1] * taps[2] + 1) / 2;
  }
};

// A column: a channel of the group, and which of the joined phases along each axis.
struct DenseColumn {
  int channel;
  int phase[3];
  bool exists;

  __device__ DenseColumn(const DenseForward& f, int column) {
    int rest = column;
    if (f.channels_first) {
      channel = column;
      rest = f.by_channels(channel);
    } else {
      channel = f.by_joined(rest);
    }
    exists = column < f.phase.input.channels;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      phase[a] = rest;
      rest = f.by_joined_axis[a](phase[a]);
    }
  }
};

// A block's tiles: (box, group, phase, block of output channels), the last one fastest, so that what is read and
// written together is so at one time.
struct DenseTile {
  int group, phase, block;
  DenseBox box;

  static __device__ int box_of(const DenseForward& f, int index, int& group, int& phase, int& block) {
    block = index;
    phase = f.phase.by_in_block(block);
    group = f.by_phase(phase);
    return f.phase.by_group(group);
  }
  __device__ DenseTile(const DenseForward& f, int index) : box(f.phase, box_of(f, index, group, phase, block)) {}
};

}  // namespace fastconvt::cuda
