// The heads GEMM, host side: how a problem is divided, and the launch.
#include "heads_gemm.cuh"

#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

HeadsGemmParams heads_gemm_params(const Problem& problem, const void* input, const void* weight, const void* bias,
                                  void* output) {
  HeadsGemmParams p{};
  p.input = static_cast<const float*>(input), p.weight = static_cast<const float*>(weight);
  p.bias = static_cast<const float*>(bias), p.output = static_cast<float*>(output);
  p.rectify = rectifier(problem);
  p.in = input_strides(problem), p.out = output_strides(problem);
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    const int64_t cells = heads_gemm_cells(axis), step = heads_gemm_step(a, cells);
    HeadsGemmAxis& to = p.axis[a];
    to.in = static_cast<int>(axis.in), to.out = static_cast<int>(axis.out());
    to.kernel = static_cast<int>(axis.kernel), to.padding = static_cast<int>(axis.padding);
    to.first = static_cast<int>(axis.base(0)) - 1;
    to.first_output = static_cast<int>(2 * axis.base(0) - axis.padding);
    to.step = static_cast<int>(step);
    to.by_boxes = fast_divide(static_cast<int>(ceil_div(cells, step)));
  }
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.weight_channel = p.group_out * p.taps;
  const bool channels_last = problem.weight_layout == Layout::kChannelsLast;
  p.weight_out = channels_last ? 1 : p.taps, p.weight_tap = channels_last ? p.group_out : 1;
  p.weights = problem.weight_elements();
  p.by_groups = fast_divide(static_cast<int>(problem.groups));
  return p;
}

template <class Traits>
cudaError_t launch(const Problem& problem, const HeadsGemmParams& p, cudaStream_t stream) {
  const auto kernel = heads_gemm_kernel<Traits>;
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(kernel, Traits::kThreads, Traits::kShared, Traits::kShared, blocks);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<int>(heads_gemm_boxes(problem)), Traits::kThreads, Traits::kShared, stream>>>(p);
  return cudaGetLastError();
}

template <bool kStrict>
cudaError_t dispatch_heads_gemm(const Problem& problem, const HeadsGemmParams& p, cudaStream_t stream) {
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const bool vectors =
      heads_gemm_vectors(problem) && reinterpret_cast<uintptr_t>(p.input) % (channels_last ? 16 : 8) == 0;
  if (channels_last) {
    return vectors ? launch<HeadsGemmTraits<kStrict, true, 4>>(problem, p, stream)
                   : launch<HeadsGemmTraits<kStrict, true, 1>>(problem, p, stream);
  }
  return vectors ? launch<HeadsGemmTraits<kStrict, false, 2>>(problem, p, stream)
                 : launch<HeadsGemmTraits<kStrict, false, 1>>(problem, p, stream);
}

}  // namespace

cudaError_t launch_heads_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!heads_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  const HeadsGemmParams p = heads_gemm_params(problem, input, weight, bias, output);
  return problem.allow_tf32 ? dispatch_heads_gemm<false>(problem, p, stream)
                            : dispatch_heads_gemm<true>(problem, p, stream);
}

}  // namespace fastconvt::cuda
