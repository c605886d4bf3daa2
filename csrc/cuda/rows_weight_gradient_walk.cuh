// The way of a block of rows_weight_gradient.cuh over its rows, and the warps that copy these to shared memory.
#pragma once

#include "rows_gradient.cuh"

namespace fastconvt::cuda {

// A block has kRowsWarps warps that compute, and two that only copy.
constexpr int kCopyThreads = 64;
constexpr int kWeightGradientThreads = kRowsThreads + kCopyThreads;
constexpr int kWeightGradientBlocks = 2;  // of a multiprocessor: what registers allow

struct RowsWeightGradientParams {
  AxisParams height, width;
  RowSource grad, input;
  float* partial;  // (splits, weight elements)
  void* output;
  int64_t weight_elements;
  int splits;
  int batch;
  int group_blocks;
  int in_channels, out_channels;  // of a group
  int segments;
  // The tile (RowsWeightGradientTile).
  int groups, positions, tile_out, tile_in, out_chunks, in_chunks, classes;
  int columns, grad_pitch, input_columns, input_pitch;
  int reach, stages, input_slots;
};

// What a block sums: output channels out .. out + outs - 1 and input channels in .. in + ins - 1 of p.groups groups,
// and the taps of a class.
struct WeightGradientBlock {
  int split, group, out, outs, in, ins;  // the first group
  int first_tap, taps;
  int begin, rows;  // its q: begin .. begin + rows - 1

  __device__ WeightGradientBlock(const RowsWeightGradientParams& p, int index) {
    in = index % p.in_chunks * p.tile_in;
    index /= p.in_chunks;
    out = index % p.out_chunks * p.tile_out;
    index /= p.out_chunks;
    first_tap = index % p.classes;
    index /= p.classes;
    group = index % p.group_blocks * p.groups;
    split = index / p.group_blocks;
    ins = min(p.tile_in, p.in_channels - in);
    outs = min(p.tile_out, p.out_channels - out);
    taps = (p.height.kernel - 1 - first_tap) / p.height.tap_step() + 1;
    // 0 <= j(q) < out, and 0 <= q - i * offset_step < in for some tap.
    const int64_t shift = static_cast<int64_t>(p.height.padding) - first_tap * p.height.dilation;
    const int64_t first = shift > 0 ? (shift + p.height.stride - 1) / p.height.stride : 0;
    const int64_t end = p.height.out + shift > 0 ? (p.height.out + shift - 1) / p.height.stride + 1 : 0;
    begin = static_cast<int>(first);
    rows = static_cast<int>(
        max(int64_t{0}, min(end, p.height.in + (taps - 1) * static_cast<int64_t>(p.height.offset_step())) - first));
  }
};

// The walk of a block over its rows: down q, then over segments of the width, then over the batch. Each column begins
// `reach` - 1 steps early, with input rows alone.
struct RowWalk {
  int batch, segment;
  int q, first, end;  // sums from `first` on
  int left;           // rows of this column and those after it

  __device__ RowWalk(const RowsWeightGradientParams& p, const WeightGradientBlock& block) {
    const int64_t all = static_cast<int64_t>(p.batch) * p.segments * block.rows;
    const int64_t from = all * block.split / p.splits;
    left = static_cast<int>(all * (block.split + 1) / p.splits - from);
    if (left == 0) return;
    const int64_t column = from / block.rows;
    batch = static_cast<int>(column / p.segments);
    segment = static_cast<int>(column - static_cast<int64_t>(batch) * p.segments);
    begin_column(p, block, block.begin + static_cast<int>(from - column * block.rows));
  }

  __device__ void begin_column(const RowsWeightGradientParams& p, const WeightGradientBlock& block, int from) {
    first = from;
    end = first + min(block.begin + block.rows - first, left);
    q = first - (p.reach - 1);
  }

  __device__ bool sums() const { return q >= first; }

  __device__ void next(const RowsWeightGradientParams& p, const WeightGradientBlock& block) {
    if (++q < end) return;
    left -= end - first;
    if (left == 0) return;
    if (++segment == p.segments) segment = 0, ++batch;
    begin_column(p, block, block.begin);
  }
};

// Shared memory, and what a block copies there.
template <typename T>
struct WeightGradientRings {
  T* stages;  // rows of the output's gradient
  T* inputs;
  int grad_elements, input_elements;  // of a place
  const T* grad;                      // the first channel's
  const T* input;

  __device__ WeightGradientRings(const RowsWeightGradientParams& p, const WeightGradientBlock& block, void* shared) {
    grad_elements = p.groups * p.tile_out * p.grad_pitch;
    input_elements = p.groups * p.tile_in * p.input_pitch;
    stages = static_cast<T*>(shared);
    inputs = stages + p.stages * grad_elements;
    grad = static_cast<const T*>(p.grad.data) +
           static_cast<int64_t>(block.group * p.out_channels + block.out) * p.grad.channel;
    input = static_cast<const T*>(p.input.data) +
            static_cast<int64_t>(block.group * p.in_channels + block.in) * p.input.channel;
  }
};

// All threads of a block, wherever their code is.
__device__ __forceinline__ void meet() { asm volatile("barrier.sync 0, %0;" ::"n"(kWeightGradientThreads) : "memory"); }

// What the copying warps do: rows are in place when they meet the others, `stages` - 1 steps after they were asked for.
template <typename T>
__device__ __forceinline__ void copy_rows(const RowsWeightGradientParams& p, const WeightGradientBlock& block,
                                          const WeightGradientRings<T>& rings) {
  const int thread = threadIdx.x - kRowsThreads;
  RowWalk ahead(p, block);
  int stage = 0, slot = 0;
  const auto copy_next = [&] {
    if (ahead.left > 0) {
      const int x = ahead.segment * p.positions, y = ahead.q;
      const bool exists = y >= 0 && y < p.height.in;
      stage_row<kCopyThreads>(
          thread, p.input,
          rings.input + ahead.batch * p.input.batch + (exists ? static_cast<int64_t>(y) * p.input.row : int64_t{0}), x,
          p.input_columns, p.groups * p.tile_in, exists ? p.groups * block.ins : 0, p.input_pitch,
          rings.inputs + slot * rings.input_elements);
      if (ahead.sums()) {
        const int j = y * p.height.stride + block.first_tap * p.height.dilation - p.height.padding;
        stage_row<kCopyThreads>(thread, p.grad,
                                rings.grad + ahead.batch * p.grad.batch + static_cast<int64_t>(j) * p.grad.row,
                                x * p.width.stride - p.width.padding, p.columns, p.groups * p.tile_out,
                                p.groups * block.outs, p.grad_pitch, rings.stages + stage * rings.grad_elements);
      }
      ahead.next(p, block);
      if (++stage == p.stages) stage = 0;
      if (++slot == p.input_slots) slot = 0;
    }
    commit_copies();
  };
  for (int i = 1; i < p.stages; ++i) copy_next();
  for (RowWalk walk(p, block); walk.left > 0; walk.next(p, block)) {
    wait_for_groups(p.stages - 2);
    meet();
    copy_next();
  }
  wait_for_groups(0);
}

}  // namespace fastconvt::cuda
