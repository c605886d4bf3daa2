// Rows of pixels, host side: parameters of a problem and the template instance that runs it.
#include "pixel_rows.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

// Bytes that one copy moves: what the input's address and pixels are aligned to, at most 16.
int input_granule(const Problem& problem, const void* input) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(input) | static_cast<uint64_t>(problem.in_channels * problem.element_size()) | 16;
  return static_cast<int>(bits & (~bits + 1));
}

PixelRowsParams pixel_rows_params(const Problem& problem, const void* input, const void* weight, const void* bias,
                                  void* output) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  PixelRowsParams p{};
  set_height(height, p);
  p.tile = pixel_rows_tile(problem);
  p.padding = static_cast<int>(width.padding);
  p.in_width = static_cast<int>(width.in);
  p.out_width = static_cast<int>(width.out());
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.skew = static_cast<int>(reinterpret_cast<uintptr_t>(output) % kPixelRowsSector / problem.element_size());
  p.granule = input_granule(problem, input);
  p.items = static_cast<int>(problem.batch) * (p.tile.end - p.tile.first) * p.tile.segments;
  p.by_segments = fast_divide(p.tile.segments);
  p.by_bases = fast_divide(p.tile.end - p.tile.first);
  p.by_group_in = fast_divide(p.group_in);
  p.by_group_out = fast_divide(p.group_out);
  p.by_height_kernel = fast_divide(p.height_kernel);
  p.by_pieces = fast_divide(static_cast<int>(problem.in_channels * problem.element_size() / p.granule));
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.input = input, p.weight = weight, p.output = output;
  p.rectify = rectifier(problem);
  p.bias = problem.has_bias ? bias : nullptr;
  return p;
}

template <class Traits>
cudaError_t launch(const PixelRowsParams& p, cudaStream_t stream) {
  int blocks = 0;
  const cudaError_t error =
      count_resident_blocks(pixel_rows_kernel<Traits>, Traits::kThreads, p.tile.shared_bytes, kPixelRowsShared, blocks);
  if (error != cudaSuccess) return error;
  // No more of them than the rounds of items need: all have as many items then.
  const int most = std::clamp(blocks, 1, p.items);
  const int grid = ceil_div(p.items, ceil_div(p.items, most));
  pixel_rows_kernel<Traits><<<grid, Traits::kThreads, p.tile.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_pixel_rows(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!pixel_rows_refusal(problem).empty()) return cudaErrorNotSupported;
  const PixelRowsParams p = pixel_rows_params(problem, input, weight, bias, output);
  return dispatch_products(problem.dtype, pixel_rows_splits(problem), [&](auto tag, auto split) {
    return dispatch_axis<kPixelRowsShapes>(problem.axis[2], [&](auto shape) {
      using T = typename decltype(tag)::type;
      constexpr auto kOf = kPixelRowsShapes[decltype(shape)::value];
      return launch<PixelRowsTraits<T, decltype(split)::value, kOf.kernel, kOf.stride, kOf.dilation>>(p, stream);
    });
  });
}

}  // namespace fastconvt::cuda
