// The direct kernel: a thread marches along the height; for each output row it adds up the taps of the other axes.
#pragma once

#include "direct_columns.cuh"
#include "direct_exact.cuh"

namespace fastconvt::cuda {

// What a block makes, and the weights of its quads: [quad][tap of depth and height][input channel][slot][channel], then
// the bias of the quad.
struct DirectBlock {
  int chunk, quad;
  float* table;

  __device__ explicit DirectBlock(const DirectParams& p) {
    extern __shared__ __align__(16) unsigned char shared[];
    table = reinterpret_cast<float*>(shared);
    // In channels_last tiles of quads are neighbours, so that their parts of a line are written together.
    int rest = blockIdx.x, tile = 0;
    if (p.tiles_first) {
      tile = rest;
      rest = p.by_tiles(tile);
    }
    tile += p.by_chunk(rest);
    chunk = rest, quad = tile * p.quad_tile;
  }
};

// Whether all that this thread has moved are finite.
template <class Shape>
__device__ __forceinline__ bool fill_table(const DirectParams& p, const DirectBlock& block) {
  using T = typename Shape::T;
  const AxisParams& width = p.axis[2];
  const int rows = p.by_tap_rows.divisor;
  bool finite = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.quad_tile * p.table_size; i += static_cast<int>(blockDim.x)) {
    int tap = i, row = p.by_filter_row(tap);
    int channel = p.by_tap_rows(row);
    int in = channel / Shape::kChannels, local = p.by_in_channels(in), group = block.quad + local;
    channel %= Shape::kChannels;
    int out = group;
    group = p.by_quads_per_group(out);
    out = out * Shape::kChannels + channel;
    if (out >= p.out_channels || block.quad + local >= p.quads) continue;
    const int64_t filter = (int64_t{group} * p.in_channels + in) * p.out_channels + out;
    const float value =
        to_accumulator(__ldg(static_cast<const T*>(p.weight) + (filter * rows + row) * width.kernel + tap));
    finite = finite && is_finite(value);
    const int reach = tap * width.dilation;
    const int column = (reach - p.front) & (Shape::kStride - 1);
    const int place = (p.front + column) / Shape::kStride - reach / Shape::kStride - p.first_place;
    const int slot = column * Shape::kWindow + place;
    block.table[local * p.quad_size + (row * p.in_channels + in) * Shape::kUnit + slot * Shape::kChannels + channel] =
        value;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.quad_tile * Shape::kChannels; i += static_cast<int>(blockDim.x)) {
    const int local = i / Shape::kChannels;
    int out = block.quad + local;
    const int group = p.by_quads_per_group(out);
    out = out * Shape::kChannels + i % Shape::kChannels;
    const bool exists = p.bias != nullptr && out < p.out_channels && block.quad + local < p.quads;
    block.table[local * p.quad_size + p.bias_offset + i % Shape::kChannels] =
        exists ? to_accumulator(__ldg(static_cast<const T*>(p.bias) + group * p.out_channels + out)) : 0.f;
  }
  return finite;
}

// Where a thread is: which quad, columns, bases and sample.
template <class Shape>
struct DirectThread {
  using T = typename Shape::T;
  int local, quad, column, segment, plane, sample, channels;
  bool active;
  const T* input;  // the sample, from the group's first channel on
  T* output;       // the sample, from the quad's first channel on

  __device__ DirectThread(const DirectParams& p, const DirectBlock& block) {
    int rest = block.chunk * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    local = 0;
    if (Shape::kChannelsLast) {
      // Eight lanes read the weights of two quads: more would cost twice the time.
      const int side = rest % 4;
      local = rest / 4;
      rest = p.by_quad_tile(local) * 4 + side;
    }
    column = rest;
    segment = p.by_columns(column);
    plane = p.by_segment(segment);
    sample = p.by_plane(plane);
    plane += p.first_plane;
    quad = block.quad + local;
    int in_group = quad;
    const int group = p.by_quads_per_group(in_group);
    channels = min(Shape::kChannels, p.out_channels - in_group * Shape::kChannels);
    active = sample < p.batch && quad < p.quads;
    input = static_cast<const T*>(p.input) + sample * p.input_batch + group * p.in_channels * p.input_channel;
    output = static_cast<T*>(p.output) + sample * p.output_batch +
             (group * p.out_channels + in_group * Shape::kChannels) * p.output_channel;
    keep(input), keep(output), keep(plane), keep(channels), keep(column);
  }
};

// Finds the thread's place anew, so that the fast path's variables need not live until here.
template <class Shape>
__device__ __noinline__ void make_exact_direct(const DirectParams& p) {
  const DirectBlock block(p);
  const DirectThread<Shape> thread(p, block);
  if (!thread.active) return;
  const DirectColumns<Shape> columns(p, thread.column, thread.channels);
  const float* const bias = block.table + thread.local * p.quad_size + p.bias_offset;
  make_exact_rows<typename Shape::T>(
      p, {thread.input, thread.output, bias, thread.quad, thread.channels, thread.plane,
          p.first_row + thread.segment * p.march, columns.first, Shape::kVector, Shape::kCount});
}

// Adds the taps of depth and height of one output row.
template <class Shape>
__device__ __forceinline__ void add_taps(const DirectParams& p, const DirectColumns<Shape>& columns,
                                         const typename Shape::T* input, int plane, int row, bool exists, int place,
                                         const float* weights, typename Shape::Sums& sum) {
  int t = p.places[place].begin, left = 0;
  const int end = p.places[place + 1].begin;
  const typename Shape::T* source;
  bool there;
  typename Shape::Raw next;
  // Four channels of a tap, then the next four, then the next tap.
  const auto load = [&]() {
    if (left <= 0) {
      const DirectTapRow tap = p.taps[t];
      there = exists && static_cast<unsigned>(plane + tap.plane) < static_cast<unsigned>(p.axis[0].in) &&
              static_cast<unsigned>(row + tap.row) < static_cast<unsigned>(p.axis[1].in);
      source = input + (plane * p.input_plane + row * p.input_row + tap.offset);
      left = p.in_channels;
    }
    columns.load(source, there, left, next);
    source += 4 * p.input_channel;
  };
  if (t == end) return;
  load();
  const float* from = weights + p.taps[t].weight;
#pragma unroll 1
  while (t < end) {
    typename Shape::Inputs x;
    columns.convert(next, x);
    const int count = left;
    const float* const now = from;
    left -= 4, from += 4 * Shape::kUnit;
    if (left <= 0) ++t, from = weights + p.taps[t].weight;
    if (t < end) load();
    columns.multiply(x, count, now, sum);
  }
}

template <class Shape, bool kRectify, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) direct_kernel(const __grid_constant__ DirectParams p) {
  const DirectBlock block(p);
  const bool finite = fill_table<Shape>(p, block);
  const DirectThread<Shape> thread(p, block);
  const DirectColumns<Shape> columns(p, thread.column, thread.channels);
  if (!__syncthreads_and(finite)) return make_exact_direct<Shape>(p);

  const float* const weights = block.table + thread.local * p.quad_size;
  const int begin = p.first_row + thread.segment * p.march;
  int end = thread.active ? min(begin + p.march, p.first_row + p.num_rows) : begin;
  keep(end);
  const AxisParams &depth = p.axis[0], &height = p.axis[1];
  // Together, since lanes of a warp may exchange outputs.
#pragma unroll 1
  for (int q = begin; __any_sync(0xffffffff, q < end); ++q) {
#pragma unroll 1
    for (int place = 0; place < p.num_places; ++place) {
      const int front = thread.plane * depth.stride - depth.padding, top = q * height.stride - height.padding;
      const bool exists = q < end &&
                          static_cast<unsigned>(front + p.places[place].depth) < static_cast<unsigned>(depth.out) &&
                          static_cast<unsigned>(top + p.places[place].row) < static_cast<unsigned>(height.out);
      typename Shape::Sums sum;
      columns.init(weights + p.bias_offset, sum);
      add_taps<Shape>(p, columns, thread.input, thread.plane, q, exists, place, weights, sum);
      if constexpr (kRectify) p.rectify(sum);
      const int offset = front * p.output_plane + top * p.output_row + p.places[place].offset;
      columns.store(thread.output + offset, exists, sum);
    }
  }
}

// The same with one tap along the depth, at most four input channels a group and kHeight rows of inputs that the
// outputs of a base reach: they stay in registers, so that each is loaded once.
template <class Shape, int kHeight, bool kAhead, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) direct_march_kernel(const __grid_constant__ DirectParams p) {
  const DirectBlock block(p);
  const DirectThread<Shape> thread(p, block);
  const DirectColumns<Shape> columns(p, thread.column, thread.channels);
  const int begin = p.first_row + thread.segment * p.march;
  int end = thread.active ? min(begin + p.march, p.first_row + p.num_rows) : begin;
  keep(end);
  const AxisParams& height = p.axis[1];

  int row = begin + p.window_row;  // that is loaded next
  const typename Shape::T* source = thread.input + (thread.plane * p.input_plane + row * p.input_row);
  const auto load_row = [&](typename Shape::Raw& raw) {
    const bool exists = thread.active && static_cast<unsigned>(row) < static_cast<unsigned>(height.in);
    columns.load(source, exists, p.in_channels, raw);
    ++row, source += p.input_row;
  };
  // The first inputs are on their way while the block's weights are.
  typename Shape::Raw before[kHeight - 1], next;
#pragma unroll
  for (int y = 0; y < kHeight - 1; ++y) load_row(before[y]);
  load_row(next);
  if (!__syncthreads_and(fill_table<Shape>(p, block))) return make_exact_direct<Shape>(p);

  typename Shape::Inputs x[kHeight];
#pragma unroll
  for (int y = 0; y < kHeight - 1; ++y) columns.convert(before[y], x[y]);
  const float* const weights = block.table + thread.local * p.quad_size;
  // Together, since lanes of a warp may exchange outputs.
#pragma unroll 1
  for (int q = begin; __any_sync(0xffffffff, q < end); ++q) {
    if (!kAhead && q > begin) load_row(next);
    columns.convert(next, x[kHeight - 1]);
    if (kAhead && q + 1 < end) load_row(next);
#pragma unroll 1
    for (int ry = 0; ry < height.stride; ++ry) {
      typename Shape::Sums sum;
      columns.init(weights + p.bias_offset, sum);
#pragma unroll
      for (int y = 0; y < kHeight; ++y) {
        const int offset = p.window_weight[ry * kHeight + y];
        if (offset >= 0) columns.multiply(x[y], p.in_channels, weights + offset, sum);
      }
      p.rectify(sum);
      const int top = q * height.stride - height.padding + ry;
      const bool exists = q < end && static_cast<unsigned>(top) < static_cast<unsigned>(height.out);
      columns.store(thread.output + (thread.plane * p.output_plane + top * p.output_row), exists, sum);
    }
#pragma unroll
    for (int y = 0; y < kHeight - 1; ++y) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int k = 0; k < Shape::kCount; ++k) {
#pragma unroll
          for (int i = 0; i < Shape::kSide; ++i) x[y][c][k][i] = x[y + 1][c][k][i];
        }
      }
    }
  }
}

}  // namespace fastconvt::cuda
