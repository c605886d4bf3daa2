#include "direct_input_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

template <typename T, int kChannels, int kPositions>
cudaError_t launch(const DirectGradientParams& params, cudaStream_t stream) {
  const auto kernel = direct_input_gradient_kernel<T, kChannels, kPositions>;
  constexpr int kMost = kDirectGradientMaxPairs * (sizeof(DirectPair) + kChannels * sizeof(float));
  const int padded = round_up(params.pairs, kDirectStep);
  const int shared = padded * static_cast<int>(sizeof(DirectPair) + kChannels * sizeof(float));
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(kernel, kDirectGradientThreads, shared, kMost, blocks);
  if (error != cudaSuccess) return error;
  // Many tiles: as many blocks as fit, each with the same weights for all of its tiles.
  const int most = std::max(1, blocks / params.kinds);
  const dim3 grid(params.units < 2 * most ? params.units : most, params.kinds);
  return launch_early(kernel, grid, kDirectGradientThreads, shared, stream, params);
}

}  // namespace

cudaError_t launch_direct_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                         void* grad_input, cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  if (!direct_input_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const DirectInputGradientTile tile = direct_input_gradient_tile(problem);
  DirectGradientParams params = direct_gradient_params(problem, grad_output, nullptr, weight, grad_input);
  params.channels = static_cast<int>(tile.channels), params.kinds = static_cast<int>(problem.groups * tile.chunks);
  params.by_chunks = fast_divide(static_cast<int>(tile.chunks));
  params.units = static_cast<int>(problem.batch * tile.units);
  params.by_units = fast_divide(static_cast<int>(tile.units));
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return tile.channels == 4   ? launch<T, 4, 2>(params, stream)
           : tile.channels == 8 ? launch<T, 8, 2>(params, stream)
                                : launch<T, 16, 2>(params, stream);
  });
}

}  // namespace fastconvt::cuda
