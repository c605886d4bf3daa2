// The operators on CUDA: check, shape, plan, launch.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <utility>

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
    device.capability = 10 * major + minor;
    device.refusal = find_refusal(device.capability);
    if (!device.refusal.empty()) {
      std::fprintf(stderr, "fastconvt: PyTorch's own kernels serve cuda:%d: %s\n", index, device.refusal.c_str());
    }
    known[index] = device;
  }
  return *known[index];
}

// The current device and stream of a call: those of its input, until the end of the scope. An input that is on no GPU
// is refused by the check of the arguments.
class Scope {
 public:
  explicit Scope(const Tensor& input) : index_(input.is_cuda() ? input.get_device_index() : 0), guard_(index_) {
    check(cudaSetDevice(index_), "cudaSetDevice");  // for this library's own copy of the runtime
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  DeviceInfo device() const { return device_info(index_); }

 private:
  int index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

const void* bias_data(const Call& call) { return call.bias ? call.bias->const_data_ptr() : nullptr; }

Tensor empty(const Tensor& like, int64_t size) { return torch::stable::new_empty(like, std::vector<int64_t>{size}); }

Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, std::vector<int64_t>{bytes}, torch::headeronly::ScalarType::Byte);
}

const char* plain_name(int spatial) {
  static const char* const kNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};
  return kNames[spatial - 1];
}

// The launchers that need no workspace.
constexpr std::pair<CandidateId, decltype(&launch_gather)> kLaunchers[] = {
    {CandidateId::kGather, launch_gather},          {CandidateId::kDepthwise, launch_depthwise},
    {CandidateId::kDirect, launch_direct},          {CandidateId::kHeads, launch_heads},
    {CandidateId::kOverlapAdd, launch_overlap_add}, {CandidateId::kPixelShuffle, launch_pixel_shuffle},
    {CandidateId::kRowTile, launch_row_tile},       {CandidateId::kRows, launch_rows},
    {CandidateId::kRowsMma, launch_rows_mma},       {CandidateId::kLongRows, launch_long_rows},
    {CandidateId::kPixelRows, launch_pixel_rows},
};

// By the kernels of a candidate.
cudaError_t launch_convolution(CandidateId candidate, const Call& call, void* output, cudaStream_t stream) {
  const Problem& problem = call.problem;
  const Tensor contiguous = contiguous_weight(call);
  const void *input = call.input.const_data_ptr(), *weight = contiguous.const_data_ptr(), *bias = bias_data(call);
  if (candidate == CandidateId::kRowsPersistent) {
    const Tensor counter = workspace(call.input, rows_persistent_workspace(problem));
    return launch_rows_persistent(problem, input, weight, bias, output, counter.mutable_data_ptr(), stream);
  }
  if (candidate == CandidateId::kPhaseGemm) {
    const Tensor packed = workspace(call.input, phase_gemm_workspace(problem, input));
    return launch_phase_gemm(problem, input, weight, bias, output, packed.mutable_data_ptr(), stream);
  }
  for (const auto& [id, launch] : kLaunchers) {
    if (id == candidate) return launch(problem, input, weight, bias, output, stream);
  }
  return cudaErrorNotSupported;
}

template <int kSpatial>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                      IntList padding, IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32) {
  const char* const name = plain_name(kSpatial);
  const Scope scope(input);
  const Call call = make_call(name, kSpatial, {input, weight, bias, {}, {}}, stride, padding, output_padding, groups,
                              dilation, allow_tf32);
  const Problem& problem = call.problem;
  if (problem.batch == 0) {
    return finish_output(call, allocate_output(call, problem.out_channels, problem.layout), problem.layout);
  }
  const CandidateId choice = plan_operation(Operation::kConvTranspose, problem, scope.device()).chosen().id;
  if (choice == CandidateId::kAten) return finish_output(call, aten_conv_transpose(call), problem.layout);
  const Tensor output = allocate_output(call, problem.out_channels, problem.layout);
  check(launch_convolution(choice, call, output.mutable_data_ptr(), scope.stream()), name);
  return finish_output(call, output, problem.layout);
}

// The gradient of an input or a weight: what a kernel writes, dense in a layout of its own, and what the caller gets.
class Gradient {
 public:
  static Gradient none(const Tensor& like) { return {empty(like, 0), empty(like, 0)}; }
  static Gradient of_input(const Call& call) {
    const Tensor dense = allocate_input(call, call.problem.layout);
    return {dense, call.batched ? dense : torch::stable::squeeze(dense, 0)};
  }
  // As torch.empty_like(weight), which keeps the strides of a dense weight.
  static Gradient of_weight(const Tensor& weight) {
    const Tensor like = torch::stable::empty_like(weight);
    const bool contiguous = has_strides_of(like, Layout::kContiguous);
    return {contiguous ? like : torch::stable::new_empty(weight, vec(weight.sizes())), like};
  }

  void* data() const { return dense_.numel() > 0 ? dense_.mutable_data_ptr() : nullptr; }
  // After the kernel has been launched.
  Tensor finish() {
    if (dense_.numel() > 0 && dense_.data_ptr() != result_.data_ptr()) torch::stable::copy_(result_, dense_);
    return result_;
  }

 private:
  Gradient(Tensor dense, Tensor result) : dense_(std::move(dense)), result_(std::move(result)) {}

  Tensor dense_, result_;
};

// The kernels of a candidate for a gradient of the input and of the weight.
struct GradientKernels {
  CandidateId id;
  decltype(&launch_rows_input_gradient) input;
  decltype(&launch_rows_weight_gradient) weight;
  int64_t (*weight_workspace)(const Problem&);
};
constexpr GradientKernels kGradients[] = {
    {CandidateId::kRows, launch_rows_input_gradient, launch_rows_weight_gradient, rows_weight_gradient_workspace},
    {CandidateId::kDepthwise, launch_depthwise_input_gradient, launch_depthwise_weight_gradient,
     depthwise_weight_gradient_workspace},
    {CandidateId::kHeads, launch_heads_input_gradient, launch_heads_weight_gradient, heads_weight_gradient_workspace},
};

// Those of the plan's choice; null: ATen's.
const GradientKernels* plan_gradient(Operation operation, const Problem& problem, const DeviceInfo& device) {
  if (problem.in_elements() == 0) return nullptr;
  const CandidateId id = plan_operation(operation, problem, device).chosen().id;
  for (const GradientKernels& kernels : kGradients) {
    if (kernels.id == id) return &kernels;
  }
  return nullptr;
}

constexpr int64_t kInputBit = 1, kWeightBit = 2, kBiasBit = 4;

template <int kSpatial>
std::tuple<Tensor, Tensor, Tensor> conv_transpose_backward(const Tensor& grad_output, const Tensor& input,
                                                           const Tensor& weight, IntList stride, IntList padding,
                                                           IntList output_padding, int64_t groups, IntList dilation,
                                                           std::vector<bool> mask, bool allow_tf32) {
  const std::string name = std::string(plain_name(kSpatial)) + "_backward";
  const Scope scope(input);
  const Call call = make_call(name.c_str(), kSpatial, {input, weight, {}, {}, grad_output}, stride, padding,
                              output_padding, groups, dilation, allow_tf32);
  const Problem& problem = call.problem;
  const auto ours = [&](bool asked, Operation operation) {
    return asked ? plan_gradient(operation, problem, scope.device()) : nullptr;
  };
  const GradientKernels* const by_input = ours(mask[0], Operation::kInputGradient);
  const GradientKernels* const by_weight = ours(mask[1], Operation::kWeightGradient);
  const bool by_bias = by_weight && mask[2];
  Gradient grad_input = by_input ? Gradient::of_input(call) : Gradient::none(input);
  Gradient grad_weight = by_weight ? Gradient::of_weight(weight) : Gradient::none(input);
  std::tuple<Tensor, Tensor, Tensor> gradients{empty(input, 0), empty(input, 0),
                                               empty(input, by_bias ? problem.out_channels : 0)};
  if (by_input || by_weight) {
    const Tensor grad =
        to_layout(call.batched ? grad_output : torch::stable::unsqueeze(grad_output, 0), problem.layout);
    if (by_input) {
      check(by_input->input(problem, grad.const_data_ptr(), contiguous_weight(call).const_data_ptr(), grad_input.data(),
                            scope.stream()),
            name.c_str());
    }
    if (by_weight) {
      const Tensor sums = workspace(input, by_weight->weight_workspace(problem));
      check(by_weight->weight(problem, grad.const_data_ptr(), call.input.const_data_ptr(), grad_weight.data(),
                              by_bias ? std::get<2>(gradients).mutable_data_ptr() : nullptr, sums.mutable_data_ptr(),
                              scope.stream()),
            name.c_str());
    }
  }
  std::get<0>(gradients) = grad_input.finish();
  std::get<1>(gradients) = grad_weight.finish();
  const int64_t missing = (mask[0] && !by_input ? kInputBit : 0) | (mask[1] && !by_weight ? kWeightBit : 0) |
                          (mask[2] && !by_bias ? kBiasBit : 0);
  if (missing != 0) {
    const auto found = call_operator("fastconvt::_conv_transpose_aten_backward", "", grad_output, input, weight,
                                     spatial_list(call, &Axis::stride), spatial_list(call, &Axis::padding),
                                     spatial_list(call, &Axis::output_padding), groups,
                                     spatial_list(call, &Axis::dilation), missing, allow_tf32);
    const Tensor input_gradient = to_tensor(found[0]), weight_gradient = to_tensor(found[1]);
    const Tensor bias_gradient = to_tensor(found[2]);
    if (missing & kInputBit) std::get<0>(gradients) = input_gradient;
    if (missing & kWeightBit) std::get<1>(gradients) = weight_gradient;
    if (missing & kBiasBit) std::get<2>(gradients) = bias_gradient;
  }
  return gradients;
}

constexpr const char* kChain = "conv_transpose3d_logsumexp_hardswish";

Tensor logsumexp_hardswish(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                           const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding,
                           int64_t groups, IntList dilation, double min, double max, bool allow_tf32) {
  const Scope scope(input);
  const Call call = make_call(kChain, 3, {input, weight, bias, subtrahend, {}}, stride, padding, output_padding, groups,
                              dilation, allow_tf32);
  const Layout layout = Layout::kContiguous;  // one channel: both layouts are the same memory
  if (call.problem.batch == 0) return finish_output(call, allocate_output(call, 1, layout), layout);
  const CandidateId choice = plan_operation(Operation::kLogSumExpHardswish, call.problem, scope.device()).chosen().id;
  if (choice == CandidateId::kAten) {
    return finish_output(call, aten_logsumexp_hardswish(call, subtrahend, min, max), layout);
  }
  const Tensor output = allocate_output(call, 1, layout);
  const auto launch = choice == CandidateId::kFusedMma ? launch_chain_mma : launch_logsumexp_hardswish;
  check(launch(call.problem, call.input.const_data_ptr(), contiguous_weight(call).const_data_ptr(), bias_data(call),
               subtrahend.const_data_ptr(), min, max, output.mutable_data_ptr(), scope.stream()),
        kChain);
  return finish_output(call, output, layout);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logsumexp_hardswish_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
    const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
    std::vector<bool> mask, double min, double max, bool allow_tf32) {
  const std::string name = std::string(kChain) + "_backward";
  const Scope scope(input);
  const Call call = make_call(name.c_str(), 3, {input, weight, bias, subtrahend, grad_output}, stride, padding,
                              output_padding, groups, dilation, /*allow_tf32=*/false);
  const CandidateId choice = plan_operation(Operation::kChainGradients, call.problem, scope.device()).chosen().id;
  if (choice == CandidateId::kAten || call.problem.in_elements() == 0) {
    int64_t asked = 0;
    for (int i = 0; i < 4; ++i) asked |= int64_t{mask[i]} << i;
    const auto found = call_operator("fastconvt::_logsumexp_hardswish_aten_backward", "", grad_output, input, weight,
                                     bias, subtrahend, spatial_list(call, &Axis::stride),
                                     spatial_list(call, &Axis::padding), spatial_list(call, &Axis::output_padding),
                                     groups, spatial_list(call, &Axis::dilation), asked, min, max, allow_tf32);
    return {to_tensor(found[0]), to_tensor(found[1]), to_tensor(found[2]), to_tensor(found[3])};
  }
  Gradient grad_input = mask[0] ? Gradient::of_input(call) : Gradient::none(input);
  Gradient grad_weight = mask[1] ? Gradient::of_weight(weight) : Gradient::none(input);
  const Tensor grad_bias = empty(input, mask[2] ? call.problem.out_channels : 0);
  const Tensor grad_subtrahend = mask[3] ? torch::stable::new_empty(input, vec(subtrahend.sizes())) : empty(input, 0);
  const auto data = [](const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; };
  const bool mma = choice == CandidateId::kFusedMma && fused_chain_backward_fits(call.problem);
  const auto workspace_bytes = mma ? fused_chain_backward_workspace : logsumexp_hardswish_backward_workspace;
  const auto launch = mma ? launch_fused_chain_backward : launch_logsumexp_hardswish_backward;
  const Tensor grad = to_layout(grad_output, Layout::kContiguous);
  const Tensor sums = workspace(input, workspace_bytes(call.problem));
  const Tensor contiguous = contiguous_weight(call);
  check(launch(call.problem, grad.const_data_ptr(), call.input.const_data_ptr(), contiguous.const_data_ptr(),
               bias_data(call), subtrahend.const_data_ptr(), min, max, grad_input.data(), grad_weight.data(),
               data(grad_bias), data(grad_subtrahend), sums.mutable_data_ptr(), scope.stream()),
        name.c_str());
  return {grad_input.finish(), grad_weight.finish(), grad_bias, grad_subtrahend};
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
  m.impl("conv_transpose1d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<1>));
  m.impl("conv_transpose2d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<2>));
  m.impl("conv_transpose3d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<3>));
  m.impl("conv_transpose3d_logsumexp_hardswish_backward", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeExplicitAutograd, m) {
  m.impl("_plan_cuda", TORCH_BOX(&fastconvt::cuda::plan));
  m.impl("_force_cuda", TORCH_BOX(&fastconvt::force_candidate));
}
