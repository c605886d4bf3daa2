// What the kernels of the shuffle GEMM over planes see of a Problem.
#pragma once

#include "../core/shuffle_planes.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

struct ShufflePlanesParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectifier;
  FastDivide parts, tiles, depth;  // of an item
  FastDivide width;                // of the input
  FastDivide kernel_depth;
  int items;
  int height, lines;
  int in_channels, out_channels;
  int rows;  // of the product: output channels by taps
  int kernel_height;
  int taps_shift;  // of a plane: log2
  int part;        // 64 rows each, of an item
  int chunks;
  int slots, slot_bytes, pitch, stages;
  int run_bytes;
  bool skews;
  int copy;  // bytes of a copy of inputs: 16, 8 or 4
  int slots_begin, staging, barriers, table;
  int64_t input_plane, output_plane;  // elements of a channel; of a depth of it
  int64_t input_channel, output_channel;
};

struct ShufflePlanesItem {
  int part, tile, depth, n;
  int count;  // positions
};

FASTCONVT_HOST_DEVICE ShufflePlanesItem find_shuffle_planes_item(const ShufflePlanesParams& p, int item) {
  ShufflePlanesItem found;
  int tile = p.parts(item);
  found.part = item;
  int depth = p.tiles(tile);
  found.tile = tile;
  found.n = p.depth(depth);
  found.depth = depth;
  const int left = p.height - tile * p.lines;
  found.count = (left < p.lines ? left : p.lines) * p.width.divisor;
  return found;
}

}  // namespace fastconvt::cuda
