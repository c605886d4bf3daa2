// What the pixel-shuffle kernels get.
#pragma once

#include "../core/pixel_shuffle.h"
#include "device/fast_divide.h"
#include "rectifier.h"

namespace fastconvt::cuda {

enum class PixelShufflePrecision : int { kFloat32, kTf32, k16Bits };

// How sums become stores.
enum class PixelShuffleStore : int {
  kElements,  // one by one
  kPairs,     // contiguous, 2 taps along the width: `piece` positions a store
  kQuads,     // contiguous, 4 taps along the width: `piece` positions a store
  kChannels,  // channels_last: 16 bytes
  kRuns,      // channels_last: through shared memory
};

struct PixelShuffleParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  PixelShuffleTile tile;
  PixelShuffleStore store;
  int piece;
  int input_copy, weight_copy;        // bytes of a copy to shared memory
  int input_columns, weight_columns;  // copies of a row, rounded up to a power of two
  int group_in, group_out;            // channels
  int taps, kernel_height, kernel_width;
  int positions, total;  // of a sample, of all
  int tiles;             // of positions
  int chunks_of_group, chunks;
  int64_t input_batch, output_batch;  // strides in elements
  int input_pixel;                    // channels_last: all input channels
  int output_channel, output_axis[3];
  int place_axis[3];  // elements of the output from a position to the next one
  FastDivide by_positions, by_width, by_height, by_taps, by_kernel_width, by_kernel_height, by_chunks,
      by_chunks_of_group, by_run, by_channels;
};

}  // namespace fastconvt::cuda
