// What the kernels of the shuffle GEMM see of a Problem.
#pragma once

#include "../core/shuffle_gemm.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// What a block needs before its first products comes first, in few lines of the constant cache.
struct ShuffleGemmParams {
  FastDivide column_blocks, groups;  // of an item's tiles
  FastDivide image;                  // positions of a sample (flat), or tiles
  bool resident, by_hand;
  bool whole_weights;  // columns of a group are a multiple of 64
  bool flat;           // tiles are of all samples' positions
  int stages, stage_bytes;
  int buffers;  // of a warpgroup's staging
  int ring, barriers, staging, terms, offsets;
  int chunks;
  int sharing, teams;  // warpgroups that share stages, tiles of an item; such teams of a block
  int tiles, items;
  int columns;       // of a group
  bool takes_turns;  // the teams; the first one's ends with the products of chunk hand_over
  // channels_last tiles that such copies store: whether they do; positions, lines, both; tiles as in ShuffleGemmBox.
  bool boxed;
  int hand_over;
  FastDivide box_width, across, down;
  int box_height, box_positions, lines;
  int in_channels, out_channels, group_in, group_out;
  const void* bias;                        // or null
  FastDivide channel_columns;              // contiguous: taps; channels_last: output channels of a group
  FastDivide run;                          // channels_last: columns that are neighbours in memory
  FastDivide kernel_width, kernel_height;  // channels_last: 1 for the width if a run has all its taps
  int64_t plane;                           // contiguous: outputs of a channel
  int64_t depth_tap, height_tap;           // of outputs, from a tap to the next one
  int width_tap;
  int width_step;
  int64_t batch_step, depth_step, height_step;  // of outputs, from an input position's first one to the next one's
  FastDivide width, height;                     // of the input
  int batch, positions;
  void* output;
  int vector;                 // bytes of a store: 16, 8 or 4
  int line_shift;             // channels_last, few channels: a line that is copied has 1 << line_shift positions
  int box;                    // contiguous: positions of a tensor copy of outputs
  int tap_depth, tap_height;  // of the kernel
  const void* input;
  const void* weight;
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
  found.first_tile = p.groups(found.group) * p.sharing;
  return found;
}

}  // namespace fastconvt::cuda
