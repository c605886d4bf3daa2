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
  FastDivide column_blocks, groups;        // of an item's tiles
  FastDivide image;                        // positions of a sample (flat), or tiles
  FastDivide width, height, depth;         // of the input
  FastDivide kernel_width, kernel_height;  // channels_last: 1 for the width if a run has all its taps
  FastDivide channel_columns;              // contiguous: taps; channels_last: output channels of a group
  FastDivide run;                          // channels_last: columns that are neighbours in memory
  bool resident, by_hand;
  bool whole_weights;  // columns of a group are a multiple of 64
  bool flat;           // tiles are of all samples' positions
  int batch, positions;
  int in_channels, out_channels, group_in, group_out;
  int columns;                   // of a group
  int sharing, teams;            // warpgroups that share stages, tiles of an item; such teams of a block
  int tiles, items, item_tiles;  // item_tiles: of positions, resident the teams' own
  int chunks;
  int stages, stage_bytes;
  bool takes_turns;  // the teams; the first one's ends with the products of chunk hand_over
  int hand_over;
  int vector;                 // bytes of a store: 16, 8 or 4
  int box;                    // positions of a tensor copy of outputs
  int tap_depth, tap_height;  // of the kernel
  int ring, staging, terms, offsets, barriers;
  int64_t batch_step, depth_step, height_step;  // of outputs, from an input position's first one to the next one's
  int width_step;
  int64_t depth_tap, height_tap;  // of outputs, from a tap to the next one
  int width_tap;
  int64_t plane;  // contiguous: outputs of a channel
  Rectifier rectify;
  float negative_slope;  // of `rectify`, also where it has a floor
};

// The outputs of an item: some tiles of positions, by a block of columns of a group.
struct ShuffleGemmItem {
  int first_tile, group, block;
};

FASTCONVT_HOST_DEVICE ShuffleGemmItem find_shuffle_gemm_item(const ShuffleGemmParams& p, int item) {
  ShuffleGemmItem found;
  const int rest = p.column_blocks(item);
  found.block = item;
  found.group = rest;
  found.first_tile = p.groups(found.group) * p.item_tiles;
  return found;
}

}  // namespace fastconvt::cuda
