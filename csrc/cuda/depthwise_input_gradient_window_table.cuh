// What depthwise_input_gradient_window.cuh computes with: shapes, threads, and the weights of a block in shared memory.
#pragma once

#include "depthwise_input_gradient_params.cuh"

namespace fastconvt::cuda {

constexpr int kNoLead = -1;

template <typename T_, int kKernel_, int kStride_, int kInputs_, int kVector_, int kLead_>
struct DepthwiseWindowShape {
  using T = T_;
  static constexpr int kKernel = kKernel_, kStride = kStride_, kInputs = kInputs_, kVector = kVector_;
  // Contiguous rows that begin at multiples of four elements: then so many columns are before such a multiple, and
  // vectors of four are loaded. kNoLead: columns are loaded one by one.
  static constexpr int kLead = kLead_;
  static constexpr int kReach = (kKernel + kStride - 1) / kStride;
  static constexpr int kColumns = (kInputs - 1) * kStride + kKernel;
  // Floats of a row of weights: LDS of 16 bytes, channel vectors in different banks.
  static constexpr int kWeights = (kKernel * kVector + 3) / 4 * 4 + (kKernel * kVector / 4 % 2 == 0 ? 4 : 0);
  static constexpr int kWords = kColumns * kVector * static_cast<int>(sizeof(T)) / 4;
  // Rows that are loaded at a time; where registers allow, while these are added the next ones are on their way.
  static constexpr int kElements = kColumns * kVector;
  static constexpr int kBatch = kStride % 2 == 1 || kElements > (kLead == kNoLead ? 12 : 16) ? 1 : 2;
  static constexpr bool kAhead = kBatch * kWords <= 24 && kBatch * kElements <= 32;
  static constexpr int kRegisters = (kAhead ? 2 : 1) * kBatch * kWords + kReach * kInputs * kVector +
                                    (sizeof(T) == 2 ? kBatch * kElements / 2 : 0);                   // of these
  static constexpr int kResident = kRegisters <= 24 ? 3 : kElements > 32 && sizeof(T) == 2 ? 1 : 2;  // blocks
};

// A row of the output's gradient that a base of the height reads: one for each phase of the height and plane.
struct alignas(16) DepthwiseWindowItem {
  int place;         // from the first row of the first plane, in elements
  int weights[3];    // where the weights of each row of the window begin
  int taps;          // a bit each
  int phase, depth;  // of the height; planes from the first one
  int unused;
};

struct DepthwiseWindowParams {
  const void* grad;
  const void* weight;
  void* output;
  AxisParams axis[3];
  int64_t grad_outer, grad_plane, grad_row, output_outer, output_plane, output_row;  // strides, in elements
  int grad_column, output_column;
  bool channels_last;
  int channels, tile;   // all, and those of a block: 1 in contiguous tensors
  int units;            // (outer, plane of the input); outer: samples, contiguous also channels
  int march, segments;  // of the height
  bool vector_store;
  // Threads are (slot, column group, channel vector), the vector fastest. A slot makes one unit.
  int slots, groups, vectors;
  int tables;  // of weights: slots, or channel vectors
  FastDivide by_vectors, by_groups, by_chunk, by_segment, by_plane, by_tile, by_channels, by_table_rows, by_height_rows,
      by_depth;
  int items;  // of a base, a multiple of the batch: one beyond has no taps
};

// What a thread makes.
struct DepthwiseWindowThread {
  int slot, group, vector;
  int unit, plane, outer, channel;
  int segment, x;
  bool exists;

  template <class Shape>
  __device__ static DepthwiseWindowThread make(const DepthwiseWindowParams& p) {
    DepthwiseWindowThread t;
    int block = static_cast<int>(blockIdx.x);
    int rest = p.by_chunk(block);
    t.segment = rest;
    rest = p.by_segment(t.segment);
    int tile = rest;
    const int first = p.by_tile(tile) * p.slots;
    t.vector = static_cast<int>(threadIdx.x);
    t.group = p.by_vectors(t.vector);
    t.slot = p.by_groups(t.group);
    t.x = (block * p.groups + t.group) * Shape::kInputs;
    t.unit = first + t.slot;
    t.exists = t.slot < p.slots && t.unit < p.units && t.x < p.axis[2].in;
    t.plane = min(t.unit, p.units - 1);
    t.outer = p.by_plane(t.plane);
    t.channel = t.outer;
    p.by_channels(t.channel);
    if (p.channels_last) t.channel = tile * p.tile + t.vector * Shape::kVector;
    t.exists = t.exists && t.channel < p.channels;
    return t;
  }
};

// Weights of each table: [tap of the depth][tap of the height, then none][tap, channel].
template <class Shape>
__device__ __forceinline__ void fill_window_table(const DepthwiseWindowParams& p, float* table,
                                                  DepthwiseWindowItem* items) {
  using T = typename Shape::T;
  const AxisParams &height = p.axis[1], &width = p.axis[2];
  const int height_rows = height.kernel + 1;
  int block = static_cast<int>(blockIdx.x), rest = p.by_chunk(block);
  int segment = rest;
  rest = p.by_segment(segment);
  int tile = rest;
  const int first = p.by_tile(tile) * p.slots;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.by_table_rows.divisor * p.tables * Shape::kWeights;
       i += static_cast<int>(blockDim.x)) {
    const int at = i % Shape::kWeights;
    int number = i / Shape::kWeights;  // [row][table] in channels_last, so that neighbours are in different banks
    int ty, tz, index;
    if (p.channels_last) {
      ty = number / p.tables, index = number - ty * p.tables;
    } else {
      ty = number;
      index = p.by_table_rows(ty);
    }
    tz = p.by_height_rows(ty);
    int channel;
    if (p.channels_last) {
      channel = tile * p.tile + index * Shape::kVector + at % Shape::kVector;
    } else {
      int plane = first + index;
      channel = p.by_plane(plane);
      p.by_channels(channel);
    }
    const int tap = at / Shape::kVector;
    float value = 0;
    if (ty < height.kernel && tap < width.kernel && channel < p.channels) {
      const int64_t row = (static_cast<int64_t>(channel) * p.axis[0].kernel + tz) * height.kernel + ty;
      value = to_accumulator(static_cast<const T*>(p.weight)[row * width.kernel + tap]);
    }
    table[i] = value;
  }
  const int row_size = p.channels_last ? p.tables * Shape::kWeights : Shape::kWeights;
  const int height_weights = height_rows * row_size;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.items; i += static_cast<int>(blockDim.x)) {
    DepthwiseWindowItem item = {};
    int plane = i;
    item.phase = p.by_depth(plane);
    const bool is_item = item.phase < height.stride;
    if (!is_item) plane = item.phase = 0;
    item.depth = plane * p.axis[0].dilation;
    item.place = static_cast<int>(item.depth * p.grad_plane + item.phase * p.grad_row);
#pragma unroll
    for (int w = 0; w < Shape::kReach; ++w) {
      const int distance = item.phase + w * height.stride, tap = distance / height.dilation;
      const bool exists = is_item && tap < height.kernel && tap * height.dilation == distance;
      item.weights[w] = plane * height_weights + (exists ? tap : height.kernel) * row_size;
      item.taps |= exists << w;
    }
    items[i] = item;
  }
}

}  // namespace fastconvt::cuda
