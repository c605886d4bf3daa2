#include "direct_weight_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "heads_weight_gradient_reduction.cuh"

namespace fastconvt::cuda {
namespace {

// Parts of the sum over positions, each made by its own blocks: four of a multiprocessor.
int64_t count_splits(const Problem& problem, const DirectWeightGradientTile& tile) {
  constexpr int64_t kMaxElements = int64_t{16} << 20, kWarps = kDirectGradientThreads / 32;
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || processors < 1) {
    processors = 128;
  }
  const int64_t resident = tile.rows == 4 ? 3 : 4;
  const int64_t most = std::min(resident * processors / direct_weight_gradient_kinds(problem, tile),
                                kMaxElements / problem.weight_elements());
  return std::max<int64_t>(1, std::min(most, ceil_div(problem.batch * tile.chunks, kWarps)));
}

// 64 channels, for 16 bits only.
template <typename T, bool kSplit>
auto wide_kernel() {
  return direct_weight_gradient_kernel < T, kSplit, sizeof(T) == 2 ? 4 : 2, 4 > ;
}

// Blocks that sum an output channel for the bias's gradient: two of a multiprocessor in all, and not without work.
int64_t count_bias_parts(const Problem& problem) {
  const int64_t bytes = problem.batch * problem.out_positions() * problem.element_size();
  return std::max<int64_t>(1, std::min(ceil_div(int64_t{264}, problem.out_channels), bytes / 8192));
}

}  // namespace

int64_t direct_weight_gradient_workspace(const Problem& problem) {
  if (problem.in_elements() == 0 || !direct_weight_gradient_refusal(problem).empty()) return 0;
  const int64_t splits = count_splits(problem, direct_weight_gradient_tile(problem));
  return (splits * problem.weight_elements() + count_bias_parts(problem) * problem.out_channels) *
         int64_t{sizeof(float)};
}

cudaError_t launch_direct_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                          void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  if (problem.in_elements() == 0 || !direct_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const DirectWeightGradientTile tile = direct_weight_gradient_tile(problem);
  const int64_t splits = count_splits(problem, tile);
  DirectGradientParams params = direct_gradient_params(problem, grad_output, input, nullptr, nullptr);
  params.chunk_pairs = static_cast<int>(tile.pairs);
  params.kinds = static_cast<int>(direct_weight_gradient_kinds(problem, tile));
  params.by_chunks = fast_divide(static_cast<int>(tile.channel_chunks));
  params.by_pair_chunks = fast_divide(static_cast<int>(tile.pair_chunks));
  params.units = static_cast<int>(problem.batch * tile.chunks);
  params.by_units = fast_divide(static_cast<int>(tile.chunks));
  params.partial = static_cast<float*>(workspace);
  params.splits = static_cast<int>(splits), params.by_splits = fast_divide(params.splits);
  params.bias_parts = static_cast<int>(count_bias_parts(problem));
  params.bias_partial = grad_bias != nullptr ? params.partial + splits * params.weight_elements : nullptr;
  HeadsReductionParams reduction = heads_reduction_params(problem, grad_output, input, grad_weight, grad_bias);
  reduction.partial = params.partial, reduction.bias_partial = params.bias_partial;
  reduction.splits = params.splits, reduction.bias_splits = params.bias_parts;
  const int sums = grad_bias != nullptr ? params.bias_parts * params.out_channels : 0;
  const dim3 grid(params.splits * params.kinds + sums);
  return dispatch_products(problem.dtype, !problem.allow_tf32, [&](auto tag, auto split) {
    using T = typename decltype(tag)::type;
    constexpr bool kSplit = decltype(split)::value;
    const auto kernel = tile.rows == 1   ? direct_weight_gradient_kernel<T, kSplit, 1, 8>
                        : tile.rows == 2 ? direct_weight_gradient_kernel<T, kSplit, 2, 4>
                                         : wide_kernel<T, kSplit>();
    const cudaError_t error = launch_early(kernel, grid, kDirectGradientThreads, 0, stream, params);
    return error != cudaSuccess ? error : launch_heads_reduction<T>(reduction, stream);
  });
}

}  // namespace fastconvt::cuda
