// The head family: what a block is told, and its work items (csrc/core/heads.h).
#pragma once

#include "../core/heads.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// An axis that is cut into tiles (HeadsSpan). Positions are those whose products are held, `before` ahead of a tile's
// first place.
struct HeadsAxis {
  int in, out, stride, padding;
  int kernel, dilation;
  int first, end;  // places
  int low, high;
  int places, lead, tiles, before, held, inputs;
  int tap_step;
  int tap_pairs;  // pairs between neighbouring taps
  int fold_step;  // floats between the products of neighbouring taps of a phase
  int unit;       // of the first position that a tile reads: a power of two

  __device__ int tile_begin(int tile) const { return first + tile * places; }
  __device__ int own_begin(int tile) const { return tile_begin(tile) + (tile > 0 ? lead : 0); }
  __device__ int own_end(int tile) const { return min(tile_begin(tile) + places + lead, end); }
  __device__ int read_begin(int tile) const { return max(0, own_begin(tile) + low) & -unit; }
  __device__ int read_end(int tile) const { return min(in, own_end(tile) + high); }
  __device__ int held_begin(int tile) const { return tile_begin(tile) - before; }
  // The held position of the first one that is read.
  __device__ int read_shift(int tile) const { return read_begin(tile) - held_begin(tile); }
  // Whether held positions do not exist, so that nobody writes their products.
  __device__ bool is_clipped(int tile) const { return held_begin(tile) < 0 || held_begin(tile) + held > in; }
};

// What the taps of an output read: where the products of the first one are, in floats, from those at the first position
// of its place's base, and how many taps there are.
struct alignas(8) HeadsTaps {
  int offset, count;
};

// What a step of the march does for one output coordinate of its axis: step * stride + shift.
struct HeadsEvent {
  int shift;
  short tap;   // -1: none, a constant
  bool emits;  // it was the last tap
  bool adds;   // earlier taps wait in row `tap`
};
inline constexpr int kHeadsMaxEvents = kHeadsMaxMarch + kHeadsMaxStride;

struct HeadsParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  int march, mid;  // axes
  HeadsAxis of_mid, of_width;
  AxisParams axis[3];
  HeadsEvent event[kHeadsMaxEvents];
  int events;
  int march_in, march_out, march_stride;
  int march_turns;  // steps between the taps of a phase
  int march_warm;   // steps before the first one that is complete
  int first_step, steps_of_march;
  int segments, segment_steps;  // of the march
  int march_pairs;              // pairs between neighbouring taps of the march
  int batch, box_batch;
  int group_in, channels, groups;  // input and output channels of a group
  int taps, pairs;                 // of a channel; of a group
  int steps;                       // of input channels
  int box_pitch, pitch;            // floats between batch entries of the box, and between pairs
  int mid_outputs, rows, chunks;
  int width_quads;
  HeadsTaps mid_taps[kHeadsMaxStride];  // by output of a base
  HeadsTaps width_taps[4];              // by output of a place
  int most_taps;                        // of an output along the last axis
  int items;
  FastDivide by_groups, by_width_tiles, by_mid_tiles, by_segments, by_width_quads, by_rows, by_chunks, by_mid_outputs,
      by_mid_stride;
  bool channels_last;
  bool whole_rows;     // channels_last: a group has all channels
  bool row_vectors;    // channels_last: its channels are whole aligned vectors of 16 bytes
  bool pixel_vectors;  // 8 bytes of neighbouring input channels are an aligned vector
  int products, pending, outputs, views, bias_terms;  // bytes
  int pending_turn, pending_row;                      // floats
  int row_bytes;
};

// A tile and a segment of the march, for a block of channels.
struct HeadsItem {
  int batch, mid, width;  // the first entry; tiles
  int first, begin, end;  // steps; outputs belong to those from `begin`

  __device__ void find(const HeadsParams& p, int index) {
    int rest = p.by_groups(index);
    width = rest;
    rest = p.by_width_tiles(width);
    mid = rest;
    rest = p.by_mid_tiles(mid);
    int segment = rest;
    batch = p.by_segments(segment) * p.box_batch;
    begin = p.first_step + segment * p.segment_steps;
    end = min(begin + p.segment_steps, p.first_step + p.steps_of_march);
    first = begin - p.march_warm;
  }
};

// A quad of the box: four positions of a row.
struct HeadsQuad {
  int batch, row, column;

  __device__ HeadsQuad(const HeadsParams& p, int index) {
    row = p.by_width_quads(index);
    column = 4 * index;
    batch = p.by_rows(row);
  }
  __device__ bool exists(const HeadsParams& p) const { return batch < p.box_batch; }
};

}  // namespace fastconvt::cuda
