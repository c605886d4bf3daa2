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
  const void* packed;  // weights in the order of copies
  const void* bias;    // or null
  void* output;
  Rectifier rectifier;
  FastDivide row_tiles, tiles, depth;  // of an item
  FastDivide width;                    // of the input
  FastDivide kernel_depth;
  int items;
  int height, lines;
  int in_channels, out_channels;
  int rows;  // of the product: output channels by taps
  int kernel_height;
  int taps_shift;  // of a plane: log2
  int chunks;
  int slots, slot_bytes, pitch, stages;
  int run_bytes, buffer_bytes;
  bool skews;
  int copy;  // bytes of a copy of inputs: 16, 8 or 4
  int slots_begin, staging, barriers, places;
  int64_t input_plane, output_plane;  // elements of a channel; of a depth of it
  int64_t input_channel, output_channel;
  int64_t next_channel;  // of outputs, from the end of the last depth tap's plane of an item
};

// A tile of positions.
struct ShufflePlanesItem {
  int tile, depth, n;
  int count;  // positions
};

FASTCONVT_HOST_DEVICE ShufflePlanesItem find_shuffle_planes_item(const ShufflePlanesParams& p, int tile) {
  ShufflePlanesItem found;
  int depth = p.tiles(tile);
  found.tile = tile;
  found.n = p.depth(depth);
  found.depth = depth;
  const int left = p.height - tile * p.lines;
  found.count = (left < p.lines ? left : p.lines) * p.width.divisor;
  return found;
}

// What a block makes: `left` items from `first` on, by tiles of positions.
struct ShufflePlanesWork {
  int first, left;
  int tile, row_tile, count;  // the present tile: of positions, its first rows and how many row tiles
};

// The next tile; false if there is none.
FASTCONVT_HOST_DEVICE bool find_work(const ShufflePlanesParams& p, ShufflePlanesWork& work) {
  if (work.left == 0) return false;
  work.row_tile = work.first;
  work.tile = p.row_tiles(work.row_tile);
  const int rest = p.row_tiles.divisor - work.row_tile;
  work.count = work.left < rest ? work.left : rest;
  work.first += work.count, work.left -= work.count;
  return true;
}

// Blocks share all items evenly, which keeps them from reading inputs all at once.
FASTCONVT_HOST_DEVICE ShufflePlanesWork find_first_work(const ShufflePlanesParams& p, int block, int blocks) {
  const int first = static_cast<int>(static_cast<int64_t>(p.items) * block / blocks);
  const int end = static_cast<int>(static_cast<int64_t>(p.items) * (block + 1) / blocks);
  return {first, end - first, 0, 0, 0};
}

}  // namespace fastconvt::cuda
