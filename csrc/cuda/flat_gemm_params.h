// What the flat GEMM's kernels see of a Problem.
#pragma once

#include "../core/flat_gemm.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

struct FlatGemmAxisParams {
  int in, out;
  int kernel, stride, padding, dilation;
  int cells;
  FastDivide pitch;
};

// A tap: what it adds to a position, and which of the kernel's it is.
struct FlatGemmTap {
  unsigned short offset, tap;
};

// What is staged at once, for every chunk of input channels: the taps of the first unit, then those of the second.
struct FlatGemmStage {
  short shift[3];  // of the inputs along outer axes
  short first_tap;
  short taps[2];
};

struct FlatGemmClass {
  short first_stage, stages;
  short f[3];    // of the first unit
  short low[3];  // shift of the first staged position along inner axes
};

struct FlatGemmParams {
  FlatGemmAxisParams axis[3];
  FastDivide channel_blocks, class_count, tiles;
  int items;
  // Split: blocks get equal shares of all items' stages and chunks, `units` an item.
  bool split;
  FastDivide units;
  int share, longer_shares;  // units of a block; the first blocks have one more
  float* partial;
  int* flags;
  int batch;
  bool pairs;
  bool chains;  // float32 products are added in longer chains
  int group_in, group_out;
  int cells, staged;  // positions of an item
  int half, unit;     // the first cell of the second warpgroup, and of a warpgroup's second unit
  int chunks, taps;
  int stages;
  int input_bytes, stage_bytes;
  int places_at, table_at, runs_at, barriers_at;
  bool wide;   // channels_last: granules of inputs are aligned
  bool runs;   // pairs are stored through shared memory
  bool quads;  // pairs of cells have four outputs side by side, aligned
  Strides in, out;
  const float* input;
  const float* weight;
  const float* bias;
  Rectifier rectify;
  float* output;
  unsigned char* packed;  // weights, as they are copied
  FlatGemmClass of_class[kFlatGemmMaxClasses];
  FlatGemmStage stage[kFlatGemmMaxTaps];
  FlatGemmTap tap[kFlatGemmMaxTaps];
};
static_assert(sizeof(FlatGemmParams) <= 4096, "what a launch may pass");

}  // namespace fastconvt::cuda
