#include "dense_input_gradient.cuh"

#include <algorithm>

#include "dispatch.h"

namespace fastconvt::cuda {
namespace {

int64_t count_entries(const Problem& problem, const DenseGradientTile& t) {
  return problem.groups * t.in_blocks * t.chunks * t.steps * (t.in_channels() / 8) * 32;
}

void plain_weights(const Problem& problem, const DenseGradientTile& t, DenseParams& p) {
  const int64_t kernel = problem.kernel_positions(), channels = t.chunk_planes * p.grad.plane_channels;
  p.weight_row = static_cast<int>(t.weight_row), p.weight_channel = static_cast<int>(t.weight_channel);
  p.weight_quads = t.quads, p.weights_made = t.made;
  p.weight_vector = dense_gradient_vectors(problem, t) && reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
  p.by_weight_row = fast_divide(static_cast<int>(std::max<int64_t>(1, channels * kernel / 4)));
  p.by_weight_channel = fast_divide(static_cast<int>(std::max<int64_t>(1, kernel / 4)));
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns, int kProducers>
cudaError_t launch_product(const DenseParams& p, const DenseGradientTile& t, cudaStream_t stream) {
  const auto kernel = dense_input_gradient_kernel<T, kPrecision, kRows, kColumns, kProducers>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(dense_gradient_budget(sizeof(T))));
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(p.tiles, dense_processors() * dense_gradient_blocks(sizeof(T)));
  return launch_early(kernel, dim3(static_cast<unsigned>(blocks)), p.threads, t.shared_bytes, stream, p);
}

}  // namespace

int64_t dense_input_gradient_workspace(const Problem& problem) {
  DenseGradientTile tile{};
  if (!dense_gradient_refusal(problem, false, tile).empty() || tile.plain) return 0;
  return count_entries(problem, tile) * 8;
}

cudaError_t launch_dense_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, void* workspace, cudaStream_t stream) {
  DenseGradientTile tile{};
  if (!dense_gradient_refusal(problem, false, tile).empty()) return cudaErrorNotSupported;
  DenseParams p = dense_params(problem, tile, grad_output, nullptr);
  p.weight = weight;
  p.output = grad_input;
  p.workspace = workspace;
  if (tile.plain) plain_weights(problem, tile, p);
  p.tiles = static_cast<int>(dense_gradient_boxes(problem, tile) * problem.groups * tile.in_blocks);
  if (tile.totals) {
    p.run = static_cast<int>(std::max<int64_t>(1, kDenseGradientRun * tile.warps_k / tile.steps));
  }
  return dispatch_precision<DensePrecision>(problem, [&](auto tag, auto precision) {
    using T = typename decltype(tag)::type;
    constexpr DensePrecision kPrecision = decltype(precision)::value;
    if constexpr (sizeof(T) == 2) {
      const int64_t entries = count_entries(problem, tile);
      dense_weights_kernel<T><<<static_cast<unsigned>(ceil_div(entries, 256)), 256, 0, stream>>>(
          p, static_cast<int>(tile.in_channels()), entries);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    const auto with_producers = [&](auto producers) {
      constexpr int kProducers = decltype(producers)::value;
      if (tile.n_tiles == 1) return launch_product<T, kPrecision, 4, 1, kProducers>(p, tile, stream);
      if constexpr (kPrecision != DensePrecision::kFloat32) {
        if (tile.m_tiles == 4) return launch_product<T, kPrecision, 4, 4, kProducers>(p, tile, stream);
      }
      return launch_product<T, kPrecision, 2, 4, kProducers>(p, tile, stream);
    };
    if constexpr (kPrecision == DensePrecision::kFloat32) {
      if (tile.producers == 4) return with_producers(std::integral_constant<int, 4>{});
    }
    return with_producers(std::integral_constant<int, dense_gradient_producers(sizeof(T))>{});
  });
}

}  // namespace fastconvt::cuda
