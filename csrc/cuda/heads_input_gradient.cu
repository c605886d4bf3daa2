#include "heads_input_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "heads_gradient_params.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

int store_bytes(const Problem& problem, const HeadsGradientTile& tile, const void* output) {
  const int64_t size = problem.element_size();
  if (problem.layout == Layout::kChannelsLast) {
    return heads_vector_bytes(
        size, {heads_address(output), problem.in_channels * size, problem.in_channels_per_group() * size});
  }
  const HeadsRuns runs = heads_runs_of(problem, tile);
  return heads_vector_bytes(size, {heads_address(output), runs.plane * size, runs.rows * size, runs.box * size});
}

template <class Traits>
cudaError_t launch(const Problem& problem, const HeadsGradientParams& params, const HeadsGradientTile& tile,
                   cudaStream_t stream) {
  const auto kernel = heads_input_gradient_kernel<Traits>;
  const HeadsGradientTile next = heads_gradient_tile(problem, true);
  const bool room = heads_gradients_overlap(tile, next);
  const int shared = static_cast<int>(room ? std::max(tile.shared_bytes, next.shared_bytes) : tile.shared_bytes);
  int blocks = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kHeadsGradientThreads, shared, static_cast<int>(kHeadsGradientShared), blocks);
  if (error != cudaSuccess) return error;
  const int kinds = static_cast<int>(heads_gradient_kinds(problem, tile));
  const dim3 grid(std::min(std::max(1, blocks / kinds), params.boxes), kinds);
  return launch_early(kernel, grid, kHeadsGradientThreads, shared, stream, params);
}

template <typename T, HeadsOperands kOperands>
cudaError_t launch_layout(const Problem& problem, const HeadsGradientParams& params, const HeadsGradientTile& tile,
                          cudaStream_t stream) {
  return params.channels_last ? launch<HeadsInputGradientTraits<T, kOperands, true>>(problem, params, tile, stream)
                              : launch<HeadsInputGradientTraits<T, kOperands, false>>(problem, params, tile, stream);
}

}  // namespace

cudaError_t launch_heads_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  HeadsGradientTile tile{};
  if (!heads_gradient_refusal(problem, false, tile).empty()) return cudaErrorNotSupported;
  HeadsGradientParams params = heads_gradient_params(problem, tile, grad_output, nullptr, weight, grad_input);
  params.store_bytes = store_bytes(problem, tile, grad_input);
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 4) {
      return problem.allow_tf32 ? launch_layout<T, HeadsOperands::kTf32>(problem, params, tile, stream)
                                : launch_layout<T, HeadsOperands::kSplit>(problem, params, tile, stream);
    } else {
      return launch_layout<T, HeadsOperands::k16Bits>(problem, params, tile, stream);
    }
  });
}

}  // namespace fastconvt::cuda
