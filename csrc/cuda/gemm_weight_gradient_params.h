// What the kernels of the weight's gradient as one matrix product see of a Problem.
#pragma once

#include "../core/gemm_weight_gradient.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

// An element by its definition.
struct GemmWeightDefinition {
  AxisParams axis[3];
  Strides in, out;
  int64_t batch;
  int group_in, group_out;
  int unrolled_taps;  // 0; or "channels" are (channel, one of these taps), and there is one "tap"
  int merged_taps;    // 0; or "channels" are (one of these taps, of the last axis, channel)
  const void* grad;
  const void* input;
};

struct GemmWeightParams {
  // In the order of the tile's axes, innermost first.
  int axis_of[4];                  // 0: batch
  int tiles[4], box[4], pitch[4];  // pitch: of a staged box of outputs, in its rows
  int stride[4], padding[4];
  int all_tiles, splits, kinds;
  int items;             // of all blocks: kinds times splits
  FastDivide by_splits;  // clustered; if not, by kinds
  FastDivide by_slot_blocks, by_in_blocks, by_taps, by_tiles[4];
  int share, more;  // tiles of a split, and splits that have one more
  int staged;       // where sums are staged, in bytes from the first stage: there, or behind all stages
  int in_blocks, channel_blocks, slot_blocks, slots, all_slots;
  int group_in, group_out;
  int in_pitch, out_pitch;  // of groups, in what copies read
  int taps;
  bool rows;
  bool direct;             // inputs are staged channel by channel
  int input_at[4];         // direct: of every 16 positions, in bytes from a channel's first one
  int channel_bytes;       // from a channel to the next
  int input_swizzle;       // mask of the bits that the one above the lowest 128 bytes change
  int row_bytes, swizzle;  // of a staged box of outputs, and as descriptors have it
  int group_pitch;         // from eight positions of outputs to the next, in 16 bytes
  int step_at[4];          // of every 16 positions: where their outputs begin, in 16 bytes
  int boxes, box_bytes, box_copied, inputs_bytes;
  int stage_bytes, stages;
  int weight_pitch;           // of partial sums: channels
  int64_t part;               // of a split, in elements
  float* partial;             // of the first split
  int64_t step;               // from a split to the next one: `part`, or half of it where halves of all rows are apart:
  int far_row;                // rows from this one on are
  int64_t further;            // as many elements further
  void* output;               // the weight's gradient, if blocks finish their sums themselves; else null
  bool clustered;             // the splits of a kind are a cluster, which finishes them
  bool channels_last, pairs;  // of the weight, as GemmWeightReduction has them
  bool eights;                // the same of every eight neighbours
  bool boxes_out;             // tensor copies store what is staged
  GemmWeightDefinition definition;
  int bias_blocks;      // of input channels that share the tiles to sum
  float* bias_partial;  // (splits, these blocks, warps, groups, slot blocks, kGemmWeightBiasBlocks, channels of a
                        // slot); may be null
  GemmWeightTap tap[kGemmWeightMaxTaps];
};

// How partial sums become the weight's gradient.
struct GemmWeightReduction {
  GemmWeightDefinition definition;
  int group_in, group_out, weight_pitch;
  int rows, channels;  // of a block of the grid
  int all_rows;
  FastDivide channel_blocks, vectors, taps;  // vectors: of four channels, of a block
  int splits, shares;
  bool channels_last;           // of the weight
  bool pairs;                   // every two neighbours of a row stand aligned
  int64_t part, step, further;  // as GemmWeightParams have them
  int far_row;
  const float* partial;
  const float* bias_partial;
  int bias_blocks;                                     // of the grid, the first ones: they reduce the bias
  int out_channels, width, slots, slot_blocks, parts;  // parts: splits times blocks times warps that summed the bias
  int groups, merged;                                  // merged: channels of the products that are one
  int64_t out_positions;
  void* bias;
  void* output;
};

}  // namespace fastconvt::cuda
