// The way of a block of rows_input_gradient.cuh: its tiles, in a tile the rows of the output's gradient, in a row the
// chunks of channels.
#pragma once

#include "rows_gradient.cuh"

namespace fastconvt::cuda {

constexpr int kInputGradientRows = 4;   // of a warp
constexpr int kInputGradientTiles = 2;  // of a warp, 16 positions each
constexpr int kInputGradientChannels = 8;
constexpr int kNoTap = 0xff;

struct RowsInputGradientParams {
  AxisParams height, width;
  RowSource grad;
  Strides grad_input;
  const void* weight;
  void* output;
  int in_channels, out_channels;    // of a merged group
  int group_inputs, group_outputs;  // channels of a group
  int tiles;                        // (batch, row tile, segment, group, channel block), the last one fastest
  FastDivide by_channel_block, by_group, by_segment, by_row_tile;
  // The tile (RowsInputGradientTile).
  int warps_x, rows, channels, chunks, steps;
  int columns, pitch;
  int row_step, candidates, max_rows;
  int stages;
  int weight_words;
};

// A tile: its first input.
struct InputGradientTile {
  int batch, group, channel, y, x;  // a merged group, and a channel of it

  __device__ InputGradientTile(const RowsInputGradientParams& p, int index) {
    channel = index;
    index = p.by_channel_block(channel);
    channel *= kInputGradientChannels;
    group = index;
    index = p.by_group(group);
    x = index;
    index = p.by_segment(x);
    x *= p.warps_x * 32;
    y = index;
    batch = p.by_row_tile(y);
    y *= p.rows;
  }

  template <typename T>
  __device__ const T* grad(const RowsInputGradientParams& p) const {
    return static_cast<const T*>(p.grad.data) + batch * p.grad.batch +
           static_cast<int64_t>(group * p.out_channels) * p.grad.channel;
  }
};

// The rows of the output's gradient that a tile visits: `reach` rows after that of tap 0 of its first row. A warp's
// rows meet it in the taps taps.x, a byte a row, where taps.y has a bit.
struct RowList {
  int count;
  const int* reach;
  const int2* taps;

  __device__ static bool in_range(const RowsInputGradientParams& p, int y, int reach, int& j) {
    j = y * p.height.stride - p.height.padding + reach;
    return j >= 0 && j < p.height.out;
  }
};

// By the first warp.
__device__ inline int list_rows(const RowsInputGradientParams& p, int* reaches, int2* taps) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int candidate = lane; candidate - lane < p.candidates; candidate += 32) {
    const int reach = candidate * p.row_step;
    const auto tap_of = [&](int y) {
      const int rest = reach - y * p.height.stride;
      const int tap = rest / p.height.dilation;
      return rest >= 0 && tap < p.height.kernel && tap * p.height.dilation == rest ? tap : kNoTap;
    };
    bool used = false;
    for (int y = 0; y < p.rows && candidate < p.candidates; ++y) used = used || tap_of(y) != kNoTap;
    const unsigned mask = __ballot_sync(0xffffffffu, used);
    if (used) {
      const int place = count + __popc(mask & ((1u << lane) - 1));
      reaches[place] = reach;
      for (int y = 0; y < p.rows; y += kInputGradientRows) {
        int2 word = {0, 0};
        for (int i = 0; i < kInputGradientRows; ++i) {
          const int tap = tap_of(y + i);
          word.x |= tap << 8 * i;
          word.y |= (tap != kNoTap) << i;
        }
        taps[(place * p.rows + y) / kInputGradientRows] = word;
      }
    }
    count += __popc(mask);
  }
  return count;
}

// What is to be staged next: the tiles of a block, in a tile its rows, in a row its chunks of channels.
template <typename T>
struct InputGradientCursor {
  int index;
  int row = 0, chunk = 0;
  int y, first_column;
  const T* grad;

  __device__ InputGradientCursor(const RowsInputGradientParams& p, const RowList& list) : index(blockIdx.x) {
    if (index < p.tiles) begin_tile(p);
    skip(p, list);
  }

  __device__ void begin_tile(const RowsInputGradientParams& p) {
    const InputGradientTile tile(p, index);
    y = tile.y;
    first_column = tile.x * p.width.stride - p.width.padding;
    grad = tile.grad<T>(p);
  }

  __device__ void skip(const RowsInputGradientParams& p, const RowList& list) {
    for (int j; index < p.tiles && (row == list.count || !RowList::in_range(p, y, list.reach[row], j));) {
      if (row < list.count) {
        ++row;
        continue;
      }
      row = 0;
      index += gridDim.x;
      if (index < p.tiles) begin_tile(p);
    }
  }

  __device__ void stage(const RowsInputGradientParams& p, const RowList& list, T* target) const {
    int j;
    RowList::in_range(p, y, list.reach[row], j);
    const int channel = chunk * p.channels;
    stage_row<kRowsThreads>(
        threadIdx.x, p.grad,
        grad + static_cast<int64_t>(channel) * p.grad.channel + static_cast<int64_t>(j) * p.grad.row, first_column,
        p.columns, p.channels, p.out_channels - channel, p.pitch, target);
  }

  __device__ void next(const RowsInputGradientParams& p, const RowList& list) {
    if (++chunk < p.chunks) return;
    chunk = 0;
    ++row;
    skip(p, list);
  }
};

}  // namespace fastconvt::cuda
