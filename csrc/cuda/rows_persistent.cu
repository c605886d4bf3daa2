// The persistent row family, host side: parameters of a problem and the template instance that runs it.
#include "rows_persistent.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

// Bytes that one copy moves: what the input's address and rows are aligned to, at most 16.
int input_granule(const Problem& problem, const void* input) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(input) | static_cast<uint64_t>(problem.axis[2].in * problem.element_size()) | 16;
  return static_cast<int>(bits & (~bits + 1));
}

RowsPersistentParams rows_persistent_params(const Problem& problem, const void* input, const void* weight,
                                            const void* bias, void* output) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  RowsPersistentParams p{};
  set_height(height, p);
  p.padding = static_cast<int>(width.padding);
  p.in_width = static_cast<int>(width.in);
  p.out_width = static_cast<int>(width.out());
  p.tile = rows_persistent_tile(problem);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.in_channels = p.tile.merged * p.group_in;
  p.out_channels = p.tile.merged * p.group_out;
  p.before = p.tile.first_base > height.base(0) ? 1 : 0;
  p.after = p.tile.first_base + p.tile.bases <= height.base(height.out() - 1) ? 1 : 0;
  p.granule = input_granule(problem, input);
  // Every segment has a line at either end, the last one too.
  const int64_t segment = int64_t{p.tile.columns} * width.stride;
  const int64_t last_start = p.tile.base * width.stride - width.padding + (p.tile.segments - 1) * segment;
  const bool whole_lines = width.out() - std::max<int64_t>(0, last_start) >= 2 * (128 / problem.element_size());
  const auto tapless = [&](int r) { return p.phase[(r + p.height_stride) % p.height_stride].first_tap < 0; };
  for (int r = 0; r < p.height_stride; ++r) {
    p.phase[r].joined_before = whole_lines && tapless(r - 1) != tapless(r);
    p.phase[r].joined_after = whole_lines && tapless(r + 1) != tapless(r);
  }
  const int blocks = static_cast<int>(problem.groups) / p.tile.merged * p.tile.channel_blocks;
  p.sets = blocks * p.tile.segments;
  p.by_sets = fast_divide(p.sets);
  p.by_blocks = fast_divide(blocks);
  p.by_parts = fast_divide(p.tile.parts);
  p.by_channel_blocks = fast_divide(p.tile.channel_blocks);
  p.by_group_in = fast_divide(p.group_in);
  p.by_group_out = fast_divide(p.group_out);
  p.least_bases = p.tile.bases / p.tile.parts;
  p.items = static_cast<int>(problem.batch) * p.tile.parts * p.sets;
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.input = input, p.weight = weight, p.output = output;
  p.rectify = rectifier(problem);
  p.bias = problem.has_bias ? bias : nullptr;
  return p;
}

template <class Traits>
cudaError_t launch(const RowsPersistentParams& p, cudaStream_t stream) {
  int device = 0, multiprocessors = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess && shared < kRowsPersistentShared) return cudaErrorNotSupported;
  if (error == cudaSuccess) {
    // The same value every time: launches from several threads must not undo each other's.
    error = cudaFuncSetAttribute(rows_persistent_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kRowsPersistentShared);
  }
  if (error != cudaSuccess) return error;
  // A whole multiple of the sets: a block then keeps its weights. And no more blocks than the rounds of items need: all
  // have as many of them then.
  int grid = std::max(1, multiprocessors);
  if (grid > p.sets && grid % p.sets * 8 <= grid) grid -= grid % p.sets;
  grid = std::min(grid, p.items);
  const int unit = grid % p.sets == 0 ? p.sets : 1;
  grid = ceil_div(ceil_div(p.items, ceil_div(p.items, grid)), unit) * unit;
  const int threads = 32 * (p.tile.team_warps * p.tile.teams + kRowsPersistentStorers + kRowsPersistentFeeders);
  rows_persistent_kernel<Traits><<<grid, threads, p.tile.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

// What blocks count arrivals in, once it has been cleared by one of them.
int64_t rows_persistent_workspace(const Problem&) { return sizeof(unsigned); }

cudaError_t launch_rows_persistent(const Problem& problem, const void* input, const void* weight, const void* bias,
                                   void* output, void* workspace, cudaStream_t stream) {
  if (!rows_persistent_refusal(problem).empty()) return cudaErrorNotSupported;
  RowsPersistentParams p = rows_persistent_params(problem, input, weight, bias, output);
  // Chunks of one row are too small to wait for one another.
  p.arrivals = p.tile.chunk * p.tile.rows > 1 ? static_cast<unsigned*>(workspace) : nullptr;
  return dispatch_products(problem.dtype, rows_persistent_splits(problem), [&](auto tag, auto split) {
    return dispatch_axis<kRowsPersistentShapes>(problem.axis[2], [&](auto shape) {
      using T = typename decltype(tag)::type;
      constexpr auto kOf = kRowsPersistentShapes[decltype(shape)::value];
      return launch<RowsPersistentTraits<T, decltype(split)::value, kOf.kernel, kOf.stride, kOf.dilation>>(p, stream);
    });
  });
}

}  // namespace fastconvt::cuda
