// The operators on CUDA: check, shape, plan, launch.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdio>
#include <mutex>

#include "../planning.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "fastconvt: ", what, ": ", cudaGetErrorString(error));
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// Why our kernels cannot run on the current device, "" if they can.
std::string find_refusal(int capability) {
  const cudaError_t error = probe_image();
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // the error is handled here
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (error == cudaErrorInsufficientDriver || driver < CUDART_VERSION / 1000 * 1000) {
    return "built with CUDA " + version(CUDART_VERSION) + ", which the driver (CUDA " + version(driver) +
           ") is too old for";
  }
  return "no kernel image for sm_" + std::to_string(capability) + " in this build (" + cudaGetErrorString(error) + ")";
}

// The device, found out at its first call; a device that our kernels cannot serve is said once and then left to ATen.
DeviceInfo device_info(int index) {
  static std::mutex mutex;
  static std::vector<std::optional<DeviceInfo>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (size_t(index) >= known.size()) known.resize(index + 1);
  if (!known[index]) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    DeviceInfo device;
    device.cuda = true;
    device.refusal = find_refusal(10 * major + minor);
    if (!device.refusal.empty()) {
      std::fprintf(stderr, "fastconvt: PyTorch's own kernels serve cuda:%d: %s\n", index, device.refusal.c_str());
    }
    known[index] = device;
  }
  return *known[index];
}

// The current device and stream of a call: those of its input, until the end of the scope.
class Scope {
 public:
  explicit Scope(const Tensor& input) : guard_(input.get_device_index()), index_(input.get_device_index()) {
    check(cudaSetDevice(index_), "cudaSetDevice");  // for this library's own copy of the runtime
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  DeviceInfo device() const { return device_info(index_); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int index_;
  cudaStream_t stream_;
};

const void* bias_data(const Call& call) { return call.bias ? call.bias->const_data_ptr() : nullptr; }

template <int kSpatial>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                      IntList padding, IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32) {
  static const char* const kNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};
  const Scope scope(input);
  const Call call = make_call(kNames[kSpatial - 1], kSpatial, {input, weight, bias, {}, {}}, stride, padding,
                              output_padding, groups, dilation, allow_tf32);
  const Problem& problem = call.problem;
  const bool empty = problem.batch == 0;
  if (!empty && plan_call(call, scope.device()).chosen().id == CandidateId::kAten) {
    return finish_output(call, aten_conv_transpose(call), problem.layout);
  }
  const Tensor output = allocate_output(call, problem.out_channels, problem.layout);
  if (empty) return finish_output(call, output, problem.layout);
  check(launch_gather(problem, call.input.const_data_ptr(), call.weight.const_data_ptr(), bias_data(call),
                      output.mutable_data_ptr(), scope.stream()),
        kNames[kSpatial - 1]);
  return finish_output(call, output, problem.layout);
}

constexpr const char* kChain = "conv_transpose3d_logsumexp_hardswish";

Tensor logsumexp_hardswish(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                           const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding,
                           int64_t groups, IntList dilation, double min, double max, bool allow_tf32) {
  const Scope scope(input);
  const Call call = make_call(kChain, 3, {input, weight, bias, subtrahend, {}}, stride, padding, output_padding, groups,
                              dilation, allow_tf32);
  const Layout layout = Layout::kContiguous;  // one channel: both layouts are the same memory
  const Tensor output = allocate_output(call, 1, layout);
  if (call.problem.batch == 0) return finish_output(call, output, layout);
  if (plan_call(call, scope.device()).chosen().id == CandidateId::kAten) {
    return finish_output(call, aten_logsumexp_hardswish(call, subtrahend, min, max), layout);
  }
  check(launch_logsumexp_hardswish(call.problem, call.input.const_data_ptr(), call.weight.const_data_ptr(),
                                   bias_data(call), subtrahend.const_data_ptr(), min, max, output.mutable_data_ptr(),
                                   scope.stream()),
        kChain);
  return finish_output(call, output, layout);
}

// The gradients of the chain by our kernels: grad_input dense in the call's layout and batched, the others contiguous.
std::tuple<Tensor, Tensor, Tensor, Tensor> logsumexp_hardswish_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
    const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
    std::vector<bool> mask, double min, double max) {
  const Scope scope(input);
  const Call call =
      make_call("conv_transpose3d_logsumexp_hardswish_backward", 3, {input, weight, bias, subtrahend, grad_output},
                stride, padding, output_padding, groups, dilation, /*allow_tf32=*/false);
  const Tensor grad = to_layout(grad_output, Layout::kContiguous);
  const auto empty = [&](int64_t size) { return torch::stable::new_empty(input, std::vector<int64_t>{size}); };
  const Tensor grads[] = {mask[0] ? torch::stable::empty_like(call.input) : empty(0),
                          mask[1] ? torch::stable::empty_like(call.weight) : empty(0),
                          empty(mask[2] ? call.problem.out_channels : 0), empty(mask[3] ? 1 : 0)};
  const auto data = [&](int i) { return mask[i] ? grads[i].mutable_data_ptr() : nullptr; };
  const Tensor workspace =
      torch::stable::new_empty(input, std::vector<int64_t>{logsumexp_hardswish_backward_workspace(call.problem)},
                               torch::headeronly::ScalarType::Byte);
  check(launch_logsumexp_hardswish_backward(call.problem, grad.const_data_ptr(), call.input.const_data_ptr(),
                                            call.weight.const_data_ptr(), bias_data(call), subtrahend.const_data_ptr(),
                                            min, max, data(0), data(1), data(2), data(3), workspace.mutable_data_ptr(),
                                            scope.stream()),
        "conv_transpose3d_logsumexp_hardswish_backward");
  return {grads[0], grads[1], grads[2], grads[3]};
}

std::string plan(std::string op, IntList input, IntList weight, bool bias, IntList stride, IntList padding,
                 IntList output_padding, int64_t groups, IntList dilation, std::string dtype, std::string layout,
                 bool allow_tf32) {
  int index = 0;
  check(cudaGetDevice(&index), "fastconvt.plan needs a CUDA device");
  return plan_json(device_info(index), op, input, weight, bias, stride, padding, output_padding, groups, dilation,
                   dtype, layout, allow_tf32);
}

}  // namespace
}  // namespace fastconvt::cuda

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CUDA, m) {
  m.impl("conv_transpose1d", TORCH_BOX(&fastconvt::cuda::conv_transpose<1>));
  m.impl("conv_transpose2d", TORCH_BOX(&fastconvt::cuda::conv_transpose<2>));
  m.impl("conv_transpose3d", TORCH_BOX(&fastconvt::cuda::conv_transpose<3>));
  m.impl("conv_transpose3d_logsumexp_hardswish", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish));
  m.impl("_logsumexp_hardswish_backward", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeExplicitAutograd, m) {
  m.impl("_plan_cuda", TORCH_BOX(&fastconvt::cuda::plan));
  m.impl("_force_cuda", TORCH_BOX(&fastconvt::force_candidate));
}
