// What both dense gradients share on the device: where granules stand in shared memory, how they come there, and
// products of the three precisions. Requires compute capability 8.0; code for older GPUs is empty.
#pragma once

#include <cuda_runtime.h>

#include "../core/dense_gradient.h"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "params.h"

namespace fastconvt::cuda {

enum class DensePrecision { kFloat32, kTf32, k16Bits };

template <typename T>
constexpr int kDenseConsumers = 32 * dense_gradient_consumers(sizeof(T));
constexpr int kDenseBarrierBytes = kDenseGradientBarriers;
static_assert(kDenseBarrierBytes >= 8 * kDenseGradientMaxStages);

template <typename T>
constexpr int kGranule = 16 / sizeof(T);  // elements

struct DenseAxis {
  int in, out;
  int stride, padding, dilation;  // in elements; the dilation is that of runs
  int unit, step, turn;           // the lattice (DenseGradientAxis)
  int all_taps, taps, tap_blocks;
  int classes, extent;
  int box, tiles;
};

// A tensor as granules: channels, or runs of one channel.
struct DenseSource {
  const void* data;
  int64_t batch, group;    // strides, in elements
  int64_t plane, element;  // from granule to granule of a place, and inside one
  int along[3];            // along the axes
  int plane_channels;      // how many channels a plane has
  int channels;            // of a group
  int producers;           // threads that copy
  int items;               // places that are copied at a time
  bool vector;             // granules lie in memory as such, aligned
};

struct DenseParams {
  DenseAxis axis[3];
  DenseSource grad, input;  // of the input's gradient: where it goes to
  const void* weight;
  void* output;
  void* workspace;
  int64_t weight_elements;
  int batch, groups;
  int runs;          // elements of a granule that are taps: 1 or kGranule
  int run_dilation;  // from element to element; 0: granules of channels
  int kernel[3];     // of the layer
  int chunk_planes,
      chunks;  // of the input's gradient: plane by plane, in each block of taps
  int plane_chunks;
  int plane_bytes, input_plane_bytes;
  int input_row_bytes;  // 0: inputs are staged in planes
  int lines, columns;   // of places
  int positions;
  int in_blocks;
  int warps_m, warps_n, warps_k;
  int steps, weight_bytes, resident;
  int weight_row, weight_channel, weight_quads;  // of plain weights
  int weight_vector, weights_made;               // whether they are copied in 16 bytes, and become operands
  FastDivide by_weight_row, by_weight_channel;   // in units of these
  int table_bytes, stage_bytes, stages;
  int tiles, splits;
  int sum_row;             // of the weight's gradient: floats of a row of sums
  int threads, producers;  // of a block
  int run;                 // chunks, or boxes, after which sums go on in shared memory; 0: they
                           // do not
  FastDivide by_columns, by_tile[3], by_group, by_in_block;
};

// A granule's tap along an axis: its class, in the order of places, and how far beyond the position it reads.
__device__ __forceinline__ int dense_tap_place(const DenseAxis& a, int tap) {
  const int at = tap * a.turn;
  const int shift = at / a.step, residue = at - shift * a.step;
  int order = residue;
  if (a.classes < a.step) {
    order = 0;
    for (int t = 0; t < a.classes; ++t) order += t * a.turn % a.step < residue;
  }
  return order * a.extent + shift;
}

// The residue of class number `order`.
__device__ __forceinline__ int dense_residue(const DenseAxis& a, int order) {
  if (a.classes == a.step) return order;
  for (int t = 0; t < a.classes; ++t) {
    const int residue = t * a.turn % a.step;
    int before = 0;
    for (int u = 0; u < a.classes; ++u) before += u * a.turn % a.step < residue;
    if (before == order) return residue;
  }
  return 0;
}

// Tables of a block in shared memory.
struct DenseTables {
  int2* columns;  // of places in memory's order: from the box's first one in
                  // memory; in a line of granules
  int2* lines;    // depth and height, from the box's first one
  int* places;    // of positions, in bytes
  int* boxes;     // of positions: x, y << 10, z << 20; -1: none
  int* steps;     // bytes of granules that are multiplied
  int* weights;   // of plain weights, which stand behind: bytes of these granules' first ones in a row, -1: none

  __device__ DenseTables(const DenseParams& p, char* shared) {
    columns = reinterpret_cast<int2*>(shared + kDenseBarrierBytes);
    lines = columns + p.columns;
    places = reinterpret_cast<int*>(lines + p.lines);
    boxes = places + p.positions;
    steps = boxes + p.positions;
    weights = reinterpret_cast<int*>(shared + (reinterpret_cast<char*>(steps + 2 * p.steps) - shared + 15) / 16 * 16);
  }

  __device__ void fill(const DenseParams& p) const {
    const DenseAxis &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
    for (int i = threadIdx.x; i < p.columns; i += blockDim.x) {
      const int cell = i / width.classes, order = i - cell * width.classes;
      columns[i] = {cell * width.stride + dense_residue(width, order) * width.unit, order * width.extent + cell};
    }
    const int rows = height.classes * height.extent;
    for (int i = threadIdx.x; i < p.lines; i += blockDim.x) {
      const int z = i / rows, y = i - z * rows;
      const int z_class = z / depth.extent, y_class = y / height.extent;
      lines[i] = {(z - z_class * depth.extent) * depth.stride + dense_residue(depth, z_class) * depth.unit,
                  (y - y_class * height.extent) * height.stride + dense_residue(height, y_class) * height.unit};
    }
    for (int i = threadIdx.x; i < p.positions; i += blockDim.x) {
      const int x = i % width.box, y = i / width.box % height.box, z = i / (width.box * height.box);
      const bool exists = z < depth.box;
      places[i] = exists ? ((z * rows + y) * p.columns + x) * 16 : 0;
      boxes[i] = exists ? x | y << 10 | z << 20 : -1;
    }
  }

  // Of granule `tap` (of taps) of plane 0, in bytes.
  __device__ static int tap_place(const DenseParams& p, int tap) {
    const DenseAxis &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
    const int kw = tap % width.taps;
    tap /= width.taps;
    const int kh = tap % height.taps, kd = tap / height.taps;
    const int rows = height.classes * height.extent;
    return ((dense_tap_place(depth, kd) * rows + dense_tap_place(height, kh)) * p.columns +
            dense_tap_place(width, kw)) *
           16;
  }
};

// The first taps of block `index` of them; the index becomes what is left.
__device__ __forceinline__ void find_taps(const DenseParams& p, int& index, int (&tap)[3]) {
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    tap[a] = index % p.axis[a].tap_blocks * p.axis[a].taps;
    index /= p.axis[a].tap_blocks;
  }
}

// Threads of a block that wait for each other: named barriers.
__device__ __forceinline__ void dense_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void dense_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
constexpr int kDenseEmpty = 1, kDenseTeam = 1 + kDenseGradientMaxStages;

// A block's box: its batch entry and first position.
struct DenseBox {
  int batch, at[3];

  __device__ DenseBox(const DenseParams& p, int index) {
    for (int a = 2; a >= 0; --a) {
      at[a] = index;
      index = p.by_tile[a](at[a]);
      at[a] *= p.axis[a].box;
    }
    batch = index;
  }
};

// ---- Host.

inline DenseAxis dense_axis(const Axis& axis, const DenseGradientAxis& t) {
  DenseAxis a{};
  a.in = static_cast<int>(axis.in), a.out = static_cast<int>(axis.out());
  a.stride = static_cast<int>(axis.stride), a.padding = static_cast<int>(axis.padding);
  a.dilation = static_cast<int>(t.dilation);
  a.unit = static_cast<int>(t.unit), a.step = static_cast<int>(t.step), a.turn = static_cast<int>(t.turn);
  a.all_taps = static_cast<int>(t.all_taps), a.taps = static_cast<int>(t.taps);
  a.tap_blocks = static_cast<int>(t.tap_blocks);
  a.classes = static_cast<int>(t.classes), a.extent = static_cast<int>(t.extent());
  a.box = static_cast<int>(t.box), a.tiles = static_cast<int>(t.tiles);
  return a;
}

// `step` divides the columns of granules.
inline DenseSource dense_source(const Strides& strides, int64_t channels, bool runs, int64_t granule, int64_t dilation,
                                int64_t step, const void* data) {
  DenseSource s{};
  s.data = data;
  s.batch = strides.batch;
  s.group = channels * strides.channel;
  s.plane = (runs ? 1 : granule) * strides.channel;
  s.element = runs ? dilation * strides.axis[2] : strides.channel;
  for (int a = 0; a < 3; ++a) s.along[a] = static_cast<int>(strides.axis[a]);
  s.plane_channels = static_cast<int>(runs ? 1 : granule);
  s.channels = static_cast<int>(channels);
  const int64_t all = std::gcd(std::gcd(std::gcd(s.batch, s.group), std::gcd(s.plane, strides.axis[0])),
                               std::gcd(strides.axis[1], step * strides.axis[2]));
  s.vector = s.element == 1 && all % granule == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return s;
}

inline DenseParams dense_params(const Problem& problem, const DenseGradientTile& t, const void* grad_output,
                                const void* input) {
  DenseParams p{};
  const int64_t granule = dense_granule(problem);
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = dense_axis(problem.axis[a], t.axis[a]);
    p.by_tile[a] = fast_divide(p.axis[a].tiles);
    p.kernel[a] = static_cast<int>(problem.axis[a].kernel);
  }
  p.grad = dense_source(
      output_strides(problem), problem.out_channels_per_group(), t.runs, granule, problem.axis[2].dilation,
      std::gcd(std::gcd(problem.axis[2].stride, problem.axis[2].padding), t.axis[2].dilation), grad_output);
  p.input = dense_source(input_strides(problem), problem.in_channels_per_group(), false, granule, 1, 1, input);
  p.batch = static_cast<int>(problem.batch), p.groups = static_cast<int>(problem.groups);
  p.runs = static_cast<int>(t.runs ? granule : 1);
  p.run_dilation = static_cast<int>(t.runs ? problem.axis[2].dilation : 0);
  p.plane_chunks = static_cast<int>(ceil_div(t.planes, t.chunk_planes)),
  p.chunk_planes = static_cast<int>(t.chunk_planes);
  p.chunks = static_cast<int>(t.chunks);
  p.plane_bytes = static_cast<int>(16 * t.pitch), p.input_plane_bytes = static_cast<int>(16 * t.input_pitch);
  const bool rows = t.input_rows && reinterpret_cast<uintptr_t>(input) % 16 == 0;
  p.input_row_bytes = static_cast<int>(rows ? 16 * dense_gradient_row(problem, t) : 0);
  p.lines = static_cast<int>(t.lines()), p.columns = static_cast<int>(t.axis[2].places());
  p.positions = static_cast<int>(t.positions);
  p.in_blocks = static_cast<int>(t.in_blocks);
  p.warps_m = static_cast<int>(t.warps_m), p.warps_n = static_cast<int>(t.warps_n);
  p.warps_k = static_cast<int>(t.warps_k);
  p.steps = static_cast<int>(t.steps), p.weight_bytes = static_cast<int>(t.weight_bytes);
  p.resident = t.resident;
  p.table_bytes = static_cast<int>(t.table_bytes), p.stage_bytes = static_cast<int>(t.stage_bytes);
  p.stages = static_cast<int>(t.stages);
  p.weight_elements = problem.weight_elements();
  p.producers = 32 * t.producers;
  p.threads = 32 * dense_gradient_consumers(problem.element_size()) + p.producers;
  p.grad.producers = p.input.producers = p.producers;
  p.grad.items = static_cast<int>(dense_gradient_items(problem, t.places(), t.chunk_planes));
  p.input.items = static_cast<int>(dense_gradient_items(problem, t.positions, t.in_channels() / granule));
  p.by_columns = fast_divide(p.columns);
  p.by_group = fast_divide(p.groups);
  p.by_in_block = fast_divide(p.in_blocks);
  return p;
}

inline int dense_processors() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || processors < 1) {
    processors = 132;
  }
  return processors;
}

}  // namespace fastconvt::cuda
