// What the kernels of the shuffle GEMM see of a Problem.
#pragma once

#include "../core/shuffle_gemm.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

struct ShuffleGemmParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  FastDivide column_blocks, groups;        // of a pair of tiles
  FastDivide image;                        // positions of a sample (flat), or tiles
  FastDivide width, height;                // of the input
  FastDivide kernel_width, kernel_height;  // channels_last: 1 for the width if a run has all its taps
  FastDivide channel_columns;              // contiguous: taps; channels_last: output channels of a group
  FastDivide run;                          // channels_last: columns that are neighbours in memory
  bool resident, by_hand;
  bool flat;  // tiles are of all samples' positions
  int batch, positions;
  int in_channels, out_channels, group_in, group_out;
  int columns;  // of a group
  int tiles, items;
  int chunks;
  int stages, stage_bytes;
  bool takes_turns;  // the two warpgroups; the first one's ends with the products of chunk hand_over
  int hand_over;
  int vector;  // bytes of a store: 16, 8 or 4
  int ring, staging, terms, offsets, barriers;
  int64_t batch_step, depth_step, height_step;  // of outputs, from an input position's first one to the next one's
  int width_step;
  int64_t depth_tap, height_tap;  // of outputs, from a tap to the next one
  int width_tap;
  int64_t plane;  // contiguous: outputs of a channel
  Rectifier rectify;
  float negative_slope;  // of `rectify`, also where it has a floor
};

// The outputs of an item: a pair of tiles of positions, by a block of columns of a group.
struct ShuffleGemmItem {
  int pair, group, block;
};

FASTCONVT_HOST_DEVICE ShuffleGemmItem find_shuffle_gemm_item(const ShuffleGemmParams& p, int item) {
  ShuffleGemmItem found;
  const int rest = p.column_blocks(item);
  found.block = item;
  found.group = rest;
  found.pair = p.groups(found.group);
  return found;
}

}  // namespace fastconvt::cuda
