#include "heads_weight_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "heads_gradient_params.h"
#include "heads_weight_gradient_reduction.cuh"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

// Parts of the sum over boxes, each made by its own blocks.
int64_t count_splits(const Problem& problem, const HeadsGradientTile& tile) {
  constexpr int64_t kMaxElements = int64_t{16} << 20;  // of all partial sums together
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || processors < 1) {
    processors = 128;
  }
  const int64_t resident =
      std::min<int64_t>(heads_gradient_blocks(problem, true), kHeadsGradientShared / (tile.shared_bytes + 1024));
  return std::max<int64_t>(1,
                           std::min({std::max<int64_t>(1, resident) * processors / heads_gradient_kinds(problem, tile),
                                     heads_gradient_boxes(problem, tile), kMaxElements / problem.weight_elements()}));
}

int64_t count_bias_splits(const Problem& problem, const HeadsGradientTile& tile, int64_t splits) {
  return heads_bias_by_pairs(problem) ? splits * tile.pair_chunks : splits;
}

template <int kValue>
using Int = std::integral_constant<int, kValue>;

template <class Traits>
cudaError_t launch(const HeadsGradientParams& params, const HeadsGradientTile& tile, int kinds, bool early,
                   cudaStream_t stream) {
  const auto kernel = heads_weight_gradient_kernel<Traits>;
  const int shared = static_cast<int>(tile.shared_bytes);
  int blocks = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kHeadsGradientThreads, shared, static_cast<int>(kHeadsGradientShared), blocks);
  if (error != cudaSuccess) return error;
  const dim3 grid(params.splits, kinds);
  if (early) return launch_early(kernel, grid, kHeadsGradientThreads, shared, stream, params);
  kernel<<<grid, kHeadsGradientThreads, shared, stream>>>(params);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_reduction(const HeadsGradientParams& p, const Problem& problem, int bias_splits, void* grad_weight,
                             void* grad_bias, cudaStream_t stream) {
  HeadsReductionParams r = heads_reduction_params(problem, p.grad, p.input, grad_weight, grad_bias);
  r.partial = p.partial, r.bias_partial = p.bias_partial;
  r.splits = p.splits, r.bias_splits = bias_splits;
  return launch_heads_reduction<T>(r, stream);
}

}  // namespace

int64_t heads_weight_gradient_workspace(const Problem& problem) {
  HeadsGradientTile tile{};
  if (problem.in_elements() == 0 || !heads_gradient_refusal(problem, true, tile).empty()) return 0;
  const int64_t splits = count_splits(problem, tile);
  const int64_t bias = count_bias_splits(problem, tile, splits) * problem.out_channels;
  return (splits * problem.weight_elements() + bias) * int64_t{sizeof(float)};
}

cudaError_t launch_heads_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  HeadsGradientTile tile{};
  if (problem.in_elements() == 0 || !heads_gradient_refusal(problem, true, tile).empty()) return cudaErrorNotSupported;
  HeadsGradientParams params = heads_gradient_params(problem, tile, grad_output, input, nullptr, nullptr);
  params.splits = static_cast<int>(count_splits(problem, tile));
  params.partial = static_cast<float*>(workspace);
  params.bias_partial = grad_bias != nullptr ? params.partial + params.splits * params.weight_elements : nullptr;
  const int bias_splits = static_cast<int>(count_bias_splits(problem, tile, params.splits));
  const bool early = heads_gradients_overlap(heads_gradient_tile(problem, false), tile);
  const auto run = [&](auto tag, auto operands) {
    using T = typename decltype(tag)::type;
    constexpr HeadsOperands kOperands = decltype(operands)::value;
    const auto launch_tile = [&](auto rows, auto columns) {
      return launch<HeadsWeightGradientTraits<T, kOperands, decltype(rows)::value, decltype(columns)::value>>(
          params, tile, static_cast<int>(heads_gradient_kinds(problem, tile)), early, stream);
    };
    cudaError_t error;
    if (tile.channels == 16) {
      constexpr int kFewest = sizeof(T) == 2 ? 5 : 6;  // float32 takes two columns at a time
      error = tile.pairs <= 8 * kFewest ? launch_tile(Int<1>{}, Int<kFewest>{}) : launch_tile(Int<1>{}, Int<10>{});
    } else {
      error = tile.pairs <= 32   ? launch_tile(Int<2>{}, Int<4>{})
              : tile.pairs <= 48 ? launch_tile(Int<2>{}, Int<6>{})
                                 : launch_tile(Int<2>{}, Int<8>{});
    }
    return error != cudaSuccess ? error
                                : launch_reduction<T>(params, problem, bias_splits, grad_weight, grad_bias, stream);
  };
  using Split = std::integral_constant<HeadsOperands, HeadsOperands::kSplit>;
  using Tf32 = std::integral_constant<HeadsOperands, HeadsOperands::kTf32>;
  using Halves = std::integral_constant<HeadsOperands, HeadsOperands::k16Bits>;
  if (problem.dtype == DType::kFloat16) return run(TypeTag<__half>{}, Halves{});
  if (problem.dtype == DType::kBFloat16) return run(TypeTag<__nv_bfloat16>{}, Halves{});
  return problem.allow_tf32 ? run(TypeTag<float>{}, Tf32{}) : run(TypeTag<float>{}, Split{});
}

}  // namespace fastconvt::cuda
