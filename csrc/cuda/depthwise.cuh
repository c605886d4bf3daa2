// The depthwise kernel: a thread marches along the height with the inputs that its outputs read in registers.
#pragma once

#include "depthwise_channels.cuh"
#include "depthwise_exact.cuh"
#include "depthwise_rows.cuh"
#include "depthwise_table.cuh"

namespace fastconvt::cuda {

// Where a thread is: which columns, bases and sample.
template <class Columns>
struct DepthwiseThread {
  using T = typename Columns::T;
  int column, segment, plane, sample;
  const T* input;  // the sample, from the channel or the first channel on
  T* output;

  __device__ DepthwiseThread(const DepthwiseParams& p, const DepthwiseBlock<Columns>& block) {
    column = block.chunk * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    segment = p.by_columns(column);
    plane = p.by_segment(segment);
    sample = p.by_plane(plane);
    plane += p.first_plane;
    int in_channel = block.channel;
    if (!Columns::kChannels) {
      int rest = in_channel;
      in_channel = p.by_multiplier(rest);
    }
    input = static_cast<const T*>(p.input) + sample * p.input_batch + in_channel * p.input_channel;
    output = static_cast<T*>(p.output) + sample * p.output_batch + block.channel * p.output_channel;
  }
};

// Adds the products of one phase of depth and height, whose rows of the window with taps `mask` tells.
template <class Columns, int kDepth, int kHeight>
__device__ __forceinline__ void make_sums(const Columns& columns, int place, int mask,
                                          const float (&x)[kDepth][kHeight][Columns::kInputs],
                                          float (&sum)[Columns::kOutputs]) {
  constexpr int kWindow = kDepth * kHeight, kAll = (1 << kWindow) - 1;
  float w[Columns::kWeights];
  if constexpr (!Columns::kChannels) columns.load_weights(place, w);
  const auto add = [&](int j) {
    if constexpr (Columns::kChannels) columns.load_weights(place, j, w);
#pragma unroll
    for (int e = 0; e < Columns::kOutputs; ++e) {
#pragma unroll
      for (int i = 0; i < Columns::kTaps; ++i) {
        if (columns.has_tap(e, i)) {
          sum[e] = fmaf(x[j / kHeight][j % kHeight][Columns::input_of(e, i)], w[Columns::weight_of(e, j, i)], sum[e]);
        }
      }
    }
  };
  if (mask == kAll) {
#pragma unroll
    for (int j = 0; j < kWindow; ++j) add(j);
  } else {
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      if (mask >> j & 1) add(j);
    }
  }
}

// Finds the thread's place anew, so that the fast path's variables need not live until here.
template <class Columns>
__device__ __noinline__ void make_exact_thread(const DepthwiseParams& p) {
  const DepthwiseBlock<Columns> block(p);
  const DepthwiseThread<Columns> thread(p, block);
  const Columns columns(p, block.table, thread.column, thread.output);
  if (thread.sample >= p.batch || columns.channel() >= block.channels) return;
  const int begin = p.first_row + thread.segment * p.march;
  make_exact<typename Columns::T>(p, {thread.input, thread.output, block.bias, block.channel, thread.plane, begin,
                                      block.phase, block.phases, columns.exact()});
}

template <class Columns, int kDepth, int kHeight>
__global__ void __launch_bounds__(Columns::kThreads, Columns::kWarps * 32 / Columns::kThreads)
    depthwise_kernel(const __grid_constant__ DepthwiseParams p) {
  using T = typename Columns::T;
  using Raw = typename Columns::Raw;
  const DepthwiseBlock<Columns> block(p);
  TableFill<Columns, kDepth, kHeight> fill(p, block);
  const DepthwiseThread<Columns> thread(p, block);
  Columns columns(p, block.table, thread.column, thread.output);
  const bool active = thread.sample < p.batch && columns.channel() < block.channels;
  const int begin = p.first_row + thread.segment * p.march;
  const int end = active ? min(begin + p.march, p.first_row + p.num_rows) : begin;

  // The row that is loaded next, in the first plane of the window.
  const int first_plane = thread.plane - (kDepth - 1);
  int row = begin - (kHeight - 1);
  const T* source = thread.input + int64_t{first_plane} * p.input_plane + int64_t{row} * p.row_step;
  columns.move_inputs(row * p.step_in);
  unsigned rows_in[kDepth];  // of each plane that exists
#pragma unroll
  for (int z = 0; z < kDepth; ++z) {
    const bool exists = active && static_cast<unsigned>(first_plane + z) < static_cast<unsigned>(p.axis[0].in);
    rows_in[z] = exists ? p.rows_in : 0;
  }
  const auto load_row = [&](Raw(&raw)[kDepth][Columns::kRaw]) {
#pragma unroll
    for (int z = 0; z < kDepth; ++z) {
      columns.load(source + int64_t{z} * p.input_plane, static_cast<unsigned>(row) < rows_in[z], raw[z]);
    }
    ++row, source += p.row_step;
    columns.move_inputs(p.step_in);
  };

  // The first inputs are on their way while the block's weights are.
  Raw before[kHeight > 1 ? kHeight - 1 : 1][kDepth][Columns::kRaw], next[kDepth][Columns::kRaw];
#pragma unroll
  for (int y = 0; y < kHeight - 1; ++y) load_row(before[y]);
  load_row(next);
  if (!__syncthreads_and(fill.finish())) return make_exact_thread<Columns>(p);

  float x[kDepth][kHeight][Columns::kInputs];
#pragma unroll
  for (int z = 0; z < kDepth; ++z) {
#pragma unroll
    for (int y = 0; y < kHeight - 1; ++y) columns.convert(before[y][z], x[z][y]);
  }
  // Where a thread makes nothing, it is far in front of all planes.
  const int front = thread.plane * p.axis[0].stride - p.axis[0].padding;
  const int first_front = active ? front : -(1 << 30);
  int top = begin * p.row_stride - p.row_padding + block.phase;
  columns.move_outputs(begin * p.step_out);
  T* target = thread.output + int64_t{front} * p.output_plane + int64_t{top} * p.output_row + columns.out_offset();
  const int place_size = columns.place_size();

  // Together, since lanes of a warp may exchange outputs.
#pragma unroll 1
  for (int q = begin; __any_sync(0xffffffff, q < end); ++q) {
#pragma unroll
    for (int z = 0; z < kDepth; ++z) columns.convert(next[z], x[z][kHeight - 1]);
    if (q + 1 < end) load_row(next);

    T* plane = target;
#pragma unroll 1
    for (int rz = 0; rz < p.axis[0].stride; ++rz, plane += p.output_plane) {
      const bool exists = static_cast<unsigned>(first_front + rz) < static_cast<unsigned>(p.axis[0].out);
      const unsigned limit = exists ? p.rows_out : 0;
      const int place = rz * p.phases;
      T* output = plane;
#pragma unroll 1
      for (int ry = 0; ry < block.phases; ++ry, output += p.output_row) {
        float sum[Columns::kOutputs];
        columns.init(block.bias, sum);
        make_sums<Columns, kDepth, kHeight>(columns, (place + ry) * place_size, block.masks[place + ry], x, sum);
        p.rectify(sum);
        columns.store(output, static_cast<unsigned>(top + ry) < limit, sum);
      }
    }
    top += p.row_stride;
    target += p.row_stride * int64_t{p.output_row} + p.step_out;
    columns.move_outputs(p.step_out);

#pragma unroll
    for (int z = 0; z < kDepth; ++z) {
#pragma unroll
      for (int y = 0; y < kHeight - 1; ++y) {
#pragma unroll
        for (int i = 0; i < Columns::kInputs; ++i) x[z][y][i] = x[z][y + 1][i];
      }
    }
  }
}

}  // namespace fastconvt::cuda
