// Heads by windows: what a block is told, and its work items (csrc/core/heads_window.h).
#pragma once

#include "../core/heads_window.h"
#include "device/fast_divide.h"
#include "heads_product.cuh"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

struct HeadsWindowParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  AxisParams axis[3];
  int size[3], out_size[3];
  int batch, groups;
  int group_in, channels, taps;  // of a group; of a channel
  int combos, steps;
  int first_base, end_base, first_row, end_row;
  int lead, shift, first_column;
  int warm;                     // bases before a segment whose planes reach it
  int segments, segment_bases;  // of the first axis
  int units, mid_tiles, main_tiles;
  int items, main_items;  // of a group; those of main tiles come first
  bool stacked;           // the last bases along the mid axis are those of several batch entries
  FastDivide by_groups, by_units, by_tiles, by_segments, by_channels, by_mid_stride;
  bool vectors;         // four positions, or 16 bytes of neighbouring input channels, are an aligned vector
  bool wide;            // contiguous: so are 16 bytes of positions
  bool rows_of_pixels;  // channels_last: outputs go by way of shared memory
  bool whole_pixels;    // a group has all channels
  int table, slots, staged, staged_row, staged_warp;  // bytes
};

// What a warp makes: bases of all three axes. Stacked: the bases of the mid axis are one and the same, beyond the last
// row of inputs, of successive batch entries.
struct HeadsWindowItem {
  int batch;
  bool stacked;
  int begin, end;   // along the first axis
  int row, column;  // the first ones

  __device__ void find(const HeadsWindowParams& p, int index) {
    int rest = index < p.main_items ? index : index - p.main_items;
    int at = rest;
    rest = p.by_units(at);
    column = p.first_column + at * kHeadsWindowUnit;
    int tile = p.mid_tiles - 1;
    if (index < p.main_items) {
      tile = rest;
      rest = p.by_tiles(tile);
    }
    row = p.first_row + tile * kHeadsWindowRows;
    int segment = rest;
    batch = p.by_segments(segment);
    stacked = p.stacked && index >= p.main_items;
    if (stacked) batch *= kHeadsWindowRows;
    begin = p.first_base + segment * p.segment_bases;
    end = min(begin + p.segment_bases, p.end_base);
  }
  // The rows of inputs, from one before the first base on, that exist: a bit each.
  __device__ unsigned rows(const HeadsWindowParams& p) const {
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r <= kHeadsWindowRows; ++r) {
      const int y = stacked ? row - 1 : row - 1 + r;
      const bool exists = stacked ? r < kHeadsWindowRows && batch + r < p.batch : true;
      bits |= (exists && y >= 0 && y < p.size[1] ? 1u : 0u) << r;
    }
    return bits;
  }
  __device__ int64_t row_pitch(const HeadsWindowParams& p) const { return stacked ? p.in.batch : p.in.axis[1]; }
};

// The output of a base and parity in a column of the product.
struct alignas(16) HeadsWindowColumn {
  int64_t offset;  // elements, from the first output of the base
  int march, mid;  // from the base's first one
  int channel;     // -1: no output
  float bias;
  int run;  // of the base's rows of outputs
};
static_assert(sizeof(HeadsWindowColumn) == 32);

}  // namespace fastconvt::cuda
