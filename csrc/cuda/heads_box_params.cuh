// Heads in one turn: what a block is told, and its box (csrc/core/heads_box.h).
#pragma once

#include "../core/heads_box.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// Of a phase: where the products of its first tap are, and what that reads from a base on.
struct HeadsBoxTaps {
  int bytes, offset, count;
};

struct HeadsBoxAxis {
  AxisParams axis;
  int outputs;  // of a tile
  int low, high, held, tiles;
  HeadsBoxTaps taps[kHeadsBoxStride];
  int tap_bytes;       // from a tap of a phase to the next one
  int position_bytes;  // between products of neighbouring positions
};

struct HeadsBoxParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  HeadsBoxAxis of[3];
  int in_channels, out_channels, taps, pairs;
  int steps;                   // of 32 bytes of input channels
  int positions;               // of a box
  int pitch;                   // floats between the products of neighbouring pairs
  int channel_bytes;           // between the products of neighbouring output channels
  int zeros;                   // where the products end, bytes
  int row_elements;            // of the table of a row
  int row_batches;             // of kHeadsBoxRows rows of outputs
  bool channels_last;          // a row's elements are pixels with all channels
  bool element_pairs;          // two elements are an aligned vector
  bool two_taps;               // whether an output may have two along the last axis
  int weights, slots, tables;  // bytes
  FastDivide by_tiles[3], by_held[3], by_stride[3], by_batches, by_rows, by_places, by_channels, by_pairs;
};

// The box of a block: first outputs and how many there are, first positions and how many there are.
struct HeadsBoxPlace {
  int sample;
  int first[3], outputs[3];
  int begin[3], positions[3];

  __device__ __forceinline__ void find(const HeadsBoxParams& p) {
    int rest = blockIdx.x, tile[3];
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      tile[a] = rest;
      rest = p.by_tiles[a](tile[a]);
    }
    sample = rest;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const HeadsBoxAxis& of = p.of[a];
      first[a] = tile[a] * of.outputs;
      outputs[a] = min(of.outputs, static_cast<int>(of.axis.out) - first[a]);
      const int places = of.outputs / of.axis.stride, place = tile[a] * places;
      const int last = place + (outputs[a] - 1) / of.axis.stride;
      begin[a] = max(0, place + of.low);
      positions[a] = max(0, min(static_cast<int>(of.axis.in), last + of.high + 1) - begin[a]);
    }
  }
  __device__ bool reads() const { return positions[0] > 0 && positions[1] > 0 && positions[2] > 0; }
};

}  // namespace fastconvt::cuda
