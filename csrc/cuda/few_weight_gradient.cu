// The weight's gradient from contiguous tensors as they lie, host side.
#include "few_weight_gradient.cuh"

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

FewWeightParams make_params(const Problem& problem, const void* grad_output, const void* input, void* grad_weight,
                            void* grad_bias) {
  const auto to_int = [](int64_t x) { return static_cast<int>(x); };
  FewWeightParams p{};
  GemmWeightDefinition& d = p.definition;
  const Strides in = input_strides(problem), out = output_strides(problem);
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    d.axis[a] = axis_params(axis);
    p.step[a] = to_int(axis.stride), p.padding[a] = to_int(axis.padding), p.dilation[a] = to_int(axis.dilation);
    p.out[a] = to_int(axis.out()), p.out_pitch[a] = to_int(out.axis[a]);
  }
  d.in = in, d.out = out, d.batch = problem.batch;
  d.group_in = p.group_in = to_int(problem.in_channels_per_group());
  d.group_out = p.group_out = to_int(problem.out_channels_per_group());
  d.grad = grad_output, d.input = input;
  p.grad = static_cast<const float*>(grad_output), p.input = static_cast<const float*>(input);
  p.output = static_cast<float*>(grad_weight), p.bias = static_cast<float*>(grad_bias);
  p.in_channel = to_int(in.channel), p.in_batch = to_int(in.batch);
  p.out_channel = to_int(out.channel), p.out_batch = to_int(out.batch);
  const int64_t width = problem.axis[2].in, height = problem.axis[1].in;
  p.positions = fast_divide(to_int(problem.in_positions()));
  p.plane = fast_divide(to_int(width * height)), p.width = fast_divide(to_int(width));
  const int64_t tap_width = problem.axis[2].kernel, tap_plane = tap_width * problem.axis[1].kernel;
  p.taps = fast_divide(to_int(problem.kernel_positions()));
  p.tap_plane = fast_divide(to_int(tap_plane)), p.tap_width = fast_divide(to_int(tap_width));
  p.all = to_int(problem.batch * problem.in_positions());
  p.columns = to_int(problem.out_channels_per_group() * problem.kernel_positions());
  p.row_blocks = fast_divide(ceil_div(p.group_in, kFewWeightRows));
  p.column_blocks = fast_divide(ceil_div(p.columns, kFewWeightColumns));
  p.weight_blocks = grad_weight != nullptr ? to_int(few_weight_blocks(problem)) : 0;
  p.out_channels = to_int(problem.out_channels), p.out_positions = to_int(problem.out_positions());
  p.batch = to_int(problem.batch);
  const Axis& last = problem.axis[2];
  p.gathers_pairs = last.dilation == 1 && reinterpret_cast<uintptr_t>(grad_output) % 8 == 0 &&
                    (last.kernel | last.stride | last.padding | last.out()) % 2 == 0;
  p.pairs = p.columns % 2 == 0 && reinterpret_cast<uintptr_t>(grad_weight) % 8 == 0;
  return p;
}

}  // namespace

cudaError_t launch_few_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                       void* grad_weight, void* grad_bias, void* /*workspace*/, cudaStream_t stream) {
  if (!few_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const FewWeightParams p = make_params(problem, grad_output, input, grad_weight, grad_bias);
  const int bias_blocks = grad_bias != nullptr ? ceil_div(p.out_channels, kFewWeightBiasChannels) : 0;
  const unsigned blocks = static_cast<unsigned>(p.weight_blocks + bias_blocks);
  if (blocks == 0) return cudaSuccess;
  constexpr int kShared = kFewWeightStages * kFewWeightStageFloats * int{sizeof(float)};
  const auto kernel = problem.allow_tf32 ? few_weight_gradient_kernel<false> : few_weight_gradient_kernel<true>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kFewWeightThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fastconvt::cuda
