// The input's gradient of few positions, host side.
#include "few_input_gradient.cuh"

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

FewInputParams make_params(const Problem& problem, const FewInputTile& t, const float* grad_output, const float* weight,
                           float* grad_input) {
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  FewInputParams p{};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.axis[a] = {fast_divide(i(axis.in)), i(axis.out()),   i(axis.kernel),
                 i(axis.stride),          i(axis.padding), i(axis.dilation)};
  }
  p.image = fast_divide(i(problem.in_positions())), p.taps = fast_divide(i(problem.kernel_positions()));
  p.splits = fast_divide(t.splits), p.row_blocks = fast_divide(i(t.row_blocks));
  p.positions = i(problem.batch * problem.in_positions()), p.channels = i(problem.in_channels);
  p.out_channels = i(problem.out_channels), p.inner = i(problem.out_channels * problem.kernel_positions());
  p.steps = t.steps;
  p.in_batch = i(problem.in_channels * problem.in_positions());
  p.out_image = i(problem.out_positions()), p.out_batch = p.out_image * p.out_channels;
  p.vectors = p.inner % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0;
  p.lane_taps = problem.axis[2].kernel >= 4 ? 2 : 0;
  p.grad_output = grad_output, p.weight = weight, p.grad_input = grad_input;
  return p;
}

template <int kShape, bool kSplit>
cudaError_t launch_shape(const FewInputTile& t, const FewInputParams& p, cudaStream_t stream) {
  const auto kernel = few_input_gradient_kernel<kShape, kSplit>;
  constexpr int kShared = kFewInputShapes[kShape].stages * FewInputBlock<kShape>::kStage * int{sizeof(float)};
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(t.row_blocks * t.column_blocks * t.splits));
  return launch_early_clusters(kernel, grid, kFewInputThreads, kShared, t.splits, stream, p);
}

}  // namespace

cudaError_t launch_few_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                      void* grad_input, cudaStream_t stream) {
  if (!few_input_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const FewInputTile& t = last_result<few_input_tile>(problem);
  const FewInputParams p = make_params(problem, t, static_cast<const float*>(grad_output),
                                       static_cast<const float*>(weight), static_cast<float*>(grad_input));
  if (t.shape == 0) {
    return problem.allow_tf32 ? launch_shape<0, false>(t, p, stream) : launch_shape<0, true>(t, p, stream);
  }
  return problem.allow_tf32 ? launch_shape<1, false>(t, p, stream) : launch_shape<1, true>(t, p, stream);
}

}  // namespace fastconvt::cuda
