// Long rows, host side: parameters of a problem and the template instance that runs it.
#include "long_rows.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

// Bytes that one copy moves: what the input's address and rows are aligned to, at most 16.
int input_granule(const Problem& problem, const void* input) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(input) | static_cast<uint64_t>(problem.axis[2].in * problem.element_size()) | 16;
  return static_cast<int>(bits & (~bits + 1));
}

LongRowsParams long_rows_params(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output) {
  const Axis& width = problem.axis[2];
  LongRowsParams p{};
  p.tile = long_rows_tile(problem);
  p.padding = static_cast<int>(width.padding);
  p.in_width = static_cast<int>(width.in);
  p.out_width = static_cast<int>(width.out());
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.in_channels = p.tile.merged * p.group_in;
  p.out_channels = p.tile.merged * p.group_out;
  p.items = static_cast<int>(problem.batch) * p.tile.tiles;
  p.granule = input_granule(problem, input);
  p.by_tiles = fast_divide(p.tile.tiles);
  p.by_group_in = fast_divide(p.group_in);
  p.by_group_out = fast_divide(p.group_out);
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.input = input, p.weight = weight, p.output = output;
  p.bias = problem.has_bias ? bias : nullptr;
  p.rectify = rectifier(problem);
  return p;
}

template <class Traits>
cudaError_t launch(const LongRowsParams& p, cudaStream_t stream) {
  int blocks = 0;
  const cudaError_t error =
      count_resident_blocks(long_rows_kernel<Traits>, kLongRowsThreads, p.tile.shared_bytes, kLongRowsShared, blocks);
  if (error != cudaSuccess) return error;
  // No more of them than the rounds of items need: all have as many items then.
  const int most = std::clamp(blocks / p.tile.sets, 1, p.items);
  const int of_set = ceil_div(p.items, ceil_div(p.items, most));
  long_rows_kernel<Traits><<<of_set * p.tile.sets, kLongRowsThreads, p.tile.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kSplit, int kKernel, int kStride, int kDilation>
cudaError_t launch_shape(const LongRowsParams& p, cudaStream_t stream) {
  constexpr int kSteps = kLongRowsInChannels / long_rows_step(sizeof(T));
  if constexpr (long_rows_keeps_inputs(kKernel, kStride, kDilation)) {
    if (p.tile.steps == kSteps && p.tile.groups == 1) {
      return launch<LongRowsTraits<T, kSplit, kSteps, kKernel, kStride, kDilation>>(p, stream);
    }
  }
  return launch<LongRowsTraits<T, kSplit, 0, kKernel, kStride, kDilation>>(p, stream);
}

}  // namespace

cudaError_t launch_long_rows(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!long_rows_refusal(problem).empty()) return cudaErrorNotSupported;
  const LongRowsParams p = long_rows_params(problem, input, weight, bias, output);
  return dispatch_products(problem.dtype, long_rows_splits(problem), [&](auto tag, auto split) {
    return dispatch_axis<kLongRowsShapes>(problem.axis[2], [&](auto shape) {
      using T = typename decltype(tag)::type;
      constexpr auto kOf = kLongRowsShapes[decltype(shape)::value];
      return launch_shape<T, decltype(split)::value, kOf.kernel, kOf.stride, kOf.dilation>(p, stream);
    });
  });
}

}  // namespace fastconvt::cuda
