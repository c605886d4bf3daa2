// The operators on the CPU: check, shape, plan, run.
#include <torch/csrc/stable/library.h>

#include "../planning.h"
#include "kernels.h"

namespace fastconvt::cpu {

namespace {

// This processor, and the threads that a call may use.
DeviceInfo device_info() {
  DeviceInfo device;
  device.threads = int(torch::stable::get_num_threads());
  device.avx2 = best_isa() >= Isa::kAvx2;
  device.avx512 = best_isa() >= Isa::kAvx512;
  return device;
}

Isa isa_of(CandidateId id) {
  switch (id) {
    case CandidateId::kPhaseAvx512:
      return Isa::kAvx512;
    case CandidateId::kPhaseAvx2:
      return Isa::kAvx2;
    default:
      return Isa::kPortable;
  }
}

// Waking other threads costs some microseconds: below this many multiply-adds and stored elements, one is faster.
constexpr double kSerialWork = 1e5;

void run(const Job& job, const Problem& problem) {
  const int64_t tasks = job.num_tasks();
  if (problem.macs() + double(problem.out_elements()) < kSerialWork) return job.run(0, tasks);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { job.run(begin, end); });
}

const void* bias_data(const Call& call) { return call.bias ? call.bias->const_data_ptr() : nullptr; }

// Our kernels know the contiguous layout: a channels-last call is converted on the way in and on the way out.
Call contiguous_call(Call call) {
  call.input = to_layout(call.input, Layout::kContiguous);
  call.weight = contiguous_weight(call);
  call.problem.layout = Layout::kContiguous;
  return call;
}

Tensor convolve(const Call& call) {
  const Layout layout = call.problem.layout;
  if (call.problem.batch == 0) {
    return finish_output(call, allocate_output(call, call.problem.out_channels, layout), layout);
  }
  const CandidateId choice = choose_candidate(Operation::kConvTranspose, call.problem, device_info()).id;
  if (choice == CandidateId::kAten) {
    // By our kernels: some of PyTorch's make NaN of inf.
    const auto activate = [&](const Tensor& values) {
      run(*activation_job(best_isa(), call.problem, values.mutable_data_ptr(), values.numel()), call.problem);
    };
    return finish_output(call, aten_conv_transpose(call, activate), layout);
  }
  const Call ours = contiguous_call(call);
  Tensor output = allocate_output(ours, ours.problem.out_channels, Layout::kContiguous);
  run(*conv_transpose_job(isa_of(choice), ours.problem, ours.input.const_data_ptr(), ours.weight.const_data_ptr(),
                          bias_data(ours), output.mutable_data_ptr()),
      ours.problem);
  return finish_output(call, output, layout);
}

constexpr const char* kNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};

template <int kSpatial>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                      IntList padding, IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32) {
  return convolve(make_call(kNames[kSpatial - 1], kSpatial, {input, weight, bias, {}, {}}, stride, padding,
                            output_padding, groups, dilation, allow_tf32));
}

template <int kSpatial>
Tensor conv_transpose_act(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                          IntList padding, IntList output_padding, int64_t groups, IntList dilation,
                          std::string activation, double alpha, bool allow_tf32) {
  const std::string name = std::string(kNames[kSpatial - 1]) + "_act";
  Call call = make_call(name.c_str(), kSpatial, {input, weight, bias, {}, {}}, stride, padding, output_padding, groups,
                        dilation, allow_tf32);
  set_activation(name.c_str(), activation, alpha, call.problem);
  return convolve(call);
}

Tensor logsumexp_hardswish(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                           const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding,
                           int64_t groups, IntList dilation, double min, double max, bool allow_tf32) {
  const Call call = make_call("conv_transpose3d_logsumexp_hardswish", 3, {input, weight, bias, subtrahend, {}}, stride,
                              padding, output_padding, groups, dilation, allow_tf32);
  const Layout layout = Layout::kContiguous;  // one channel: both layouts are the same memory
  Tensor output = allocate_output(call, 1, layout);
  if (call.problem.batch == 0) return finish_output(call, output, layout);
  const CandidateId choice = choose_candidate(Operation::kLogSumExpHardswish, call.problem, device_info()).id;
  if (choice == CandidateId::kAten) {
    return finish_output(call, aten_logsumexp_hardswish(call, subtrahend, min, max), layout);
  }
  const Call ours = contiguous_call(call);
  run(*logsumexp_hardswish_job(isa_of(choice), ours.problem, ours.input.const_data_ptr(), ours.weight.const_data_ptr(),
                               bias_data(ours), subtrahend.const_data_ptr(), min, max, output.mutable_data_ptr()),
      ours.problem);
  return finish_output(call, output, layout);
}

std::string plan(std::string op, IntList input, IntList weight, bool bias, IntList stride, IntList padding,
                 IntList output_padding, int64_t groups, IntList dilation, std::string dtype, std::string layout,
                 bool allow_tf32, std::string activation) {
  return plan_json(device_info(), op, input, weight, bias, stride, padding, output_padding, groups, dilation, dtype,
                   layout, allow_tf32, activation);
}

}  // namespace
}  // namespace fastconvt::cpu

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CPU, m) {
  m.impl("conv_transpose1d", TORCH_BOX(&fastconvt::cpu::conv_transpose<1>));
  m.impl("conv_transpose2d", TORCH_BOX(&fastconvt::cpu::conv_transpose<2>));
  m.impl("conv_transpose3d", TORCH_BOX(&fastconvt::cpu::conv_transpose<3>));
  m.impl("conv_transpose1d_act", TORCH_BOX(&fastconvt::cpu::conv_transpose_act<1>));
  m.impl("conv_transpose2d_act", TORCH_BOX(&fastconvt::cpu::conv_transpose_act<2>));
  m.impl("conv_transpose3d_act", TORCH_BOX(&fastconvt::cpu::conv_transpose_act<3>));
  m.impl("conv_transpose3d_logsumexp_hardswish", TORCH_BOX(&fastconvt::cpu::logsumexp_hardswish));
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeExplicitAutograd, m) {
  m.impl("_plan_cpu", TORCH_BOX(&fastconvt::cpu::plan));
  m.impl("_force_cpu", TORCH_BOX(&fastconvt::force_candidate));
}
