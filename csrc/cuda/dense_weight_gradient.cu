#include "dense_weight_gradient.cuh"

#include "dispatch.h"
#include "rows_bias_gradient.cuh"

namespace fastconvt::cuda {
namespace {

// The bias's partial sums, which are float64, are done with before the weight's stand in their place.
int64_t bias_workspace(const Problem& problem) {
  const BiasGradientParams p = make_bias_params(problem, nullptr, nullptr, nullptr);
  return round_up(int64_t{p.channels} * p.batch_slices * p.position_slices * int64_t{sizeof(double)}, int64_t{16});
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns, int kProducers>
cudaError_t launch_product(const DenseParams& p, const DenseGradientTile& t, int kinds, cudaStream_t stream) {
  const auto kernel = dense_weight_gradient_kernel<T, kPrecision, kRows, kColumns, kProducers>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(dense_gradient_budget(sizeof(T))));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(kinds * p.splits), p.threads, t.shared_bytes, stream>>>(p);
  error = cudaGetLastError();
  if (error != cudaSuccess || p.splits == 1) return error;
  int shares = 1;
  while (shares < 8 && 4 * shares < p.splits) shares *= 2;
  const int64_t blocks = ceil_div(p.weight_elements * shares, kDenseReduceThreads);
  return launch_early(dense_weight_reduction_kernel<T>, dim3(static_cast<unsigned>(blocks)), kDenseReduceThreads, 0,
                      stream, p, shares);
}

}  // namespace

int64_t dense_weight_gradient_workspace(const Problem& problem) {
  DenseGradientTile tile{};
  if (!dense_gradient_refusal(problem, true, tile).empty()) return 0;
  return std::max(bias_workspace(problem), dense_weight_partial_bytes(problem, dense_weight_splits(problem, tile)));
}

cudaError_t launch_dense_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  DenseGradientTile tile{};
  if (!dense_gradient_refusal(problem, true, tile).empty()) return cudaErrorNotSupported;
  DenseParams p = dense_params(problem, tile, grad_output, input);
  p.output = grad_weight;
  p.workspace = workspace;
  p.tiles = static_cast<int>(dense_gradient_boxes(problem, tile));
  p.splits = static_cast<int>(dense_weight_splits(problem, tile));
  p.steps = static_cast<int>(dense_weight_units(problem, tile));
  p.sum_row = static_cast<int>(dense_weight_row(problem, tile));
  const int64_t steps = tile.positions / (2 * dense_granule(problem) * tile.warps_k);  // of a box
  if (tile.totals) p.run = static_cast<int>(std::max<int64_t>(1, kDenseGradientRun / std::max<int64_t>(1, steps)));
  const int kinds = static_cast<int>(dense_weight_kinds(problem, tile));
  return dispatch_precision<DensePrecision>(problem, [&](auto tag, auto precision) {
    using T = typename decltype(tag)::type;
    constexpr DensePrecision kPrecision = decltype(precision)::value;
    if (grad_bias != nullptr) {
      const cudaError_t error =
          launch_bias<T>(problem, make_bias_params(problem, grad_output, grad_bias, workspace), stream);
      if (error != cudaSuccess) return error;
    }
    if (grad_weight == nullptr) return cudaSuccess;
    const auto with_producers = [&](auto producers) {
      constexpr int kProducers = decltype(producers)::value;
      if (tile.n_tiles == 1) return launch_product<T, kPrecision, 8, 1, kProducers>(p, tile, kinds, stream);
      return launch_product<T, kPrecision, 4, 4, kProducers>(p, tile, kinds, stream);
    };
    if constexpr (sizeof(T) == 4) {
      if (tile.producers == 8) return with_producers(std::integral_constant<int, 8>{});
    }
    return with_producers(std::integral_constant<int, 4>{});
  });
}

}  // namespace fastconvt::cuda
