// The operators on CUDA: check, shape, plan, launch.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../planning.h"
#include "launchers.h"
#include "measure.h"

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
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) device.name = properties.name;
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

// The plan's choice for a call that `make(candidate)` makes. Under fastconvt.autotune the first call of a problem
// measures: another candidate is kept where its median is 3 % shorter. `share(candidate)` is the operation's part of
// what a call makes.
template <class Make, class Share>
Candidate choose(Operation operation, const Problem& problem, const Scope& scope, const Make& make,
                 const Share& share) {
  constexpr double kGain = 0.97;
  const DeviceInfo device = scope.device();
  if (!wants_measurement(operation, problem, device) || is_forced() || is_capturing(scope.stream())) {
    return choose_candidate(operation, problem, device);
  }
  const Plan plan = plan_operation(operation, problem, device);
  std::vector<double> ms = time_candidates(plan, scope.stream(), make);
  std::vector<Timing> timings;
  for (int i = 0; i < int(ms.size()); ++i) {
    ms[i] *= share(plan.candidates[i]);
    if (ms[i] > 0) timings.push_back({plan.candidates[i].name, ms[i]});
  }
  int fastest = plan.choice;
  for (int i = 0; i < int(ms.size()); ++i) {
    if (ms[i] > 0 && ms[i] < kGain * ms[plan.choice] && ms[i] < ms[fastest]) fastest = i;
  }
  keep_measurement(operation, problem, device, plan.candidates[fastest].name, timings);
  return plan.candidates[fastest];
}

template <class Make>
Candidate choose(Operation operation, const Problem& problem, const Scope& scope, const Make& make) {
  return choose(operation, problem, scope, make, [](const Candidate&) { return 1.0; });
}

const void* bias_data(const Call& call) { return call.bias ? call.bias->const_data_ptr() : nullptr; }

Tensor empty(const Tensor& like, int64_t size) { return torch::stable::new_empty(like, std::vector<int64_t>{size}); }

Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, std::vector<int64_t>{bytes}, torch::headeronly::ScalarType::Byte);
}

const char* plain_name(int spatial) {
  static const char* const kNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};
  return kNames[spatial - 1];
}

// The kernels of a candidate, and the bytes of the workspace that they need, null if none.
using Launch = decltype(&launch_dense);
using WorkspaceOf = int64_t (*)(const Problem&, const void* input, const void* weight);
struct Launcher {
  CandidateId id;
  Launch launch;
  WorkspaceOf workspace = nullptr;
};

template <decltype(&launch_gather) kLaunch>
cudaError_t without_workspace(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, void* /*workspace*/, cudaStream_t stream) {
  return kLaunch(problem, input, weight, bias, output, stream);
}

// A workspace whose size depends on less than the problem and the alignment of both tensors.
template <auto kWorkspace>
int64_t workspace_of(const Problem& problem, const void* input, const void* /*weight*/) {
  if constexpr (std::is_invocable_v<decltype(kWorkspace), const Problem&>) {
    return kWorkspace(problem);
  } else {
    return kWorkspace(problem, input);
  }
}

constexpr Launcher kLaunchers[] = {
    {CandidateId::kGather, without_workspace<launch_gather>},
    {CandidateId::kDepthwise, without_workspace<launch_depthwise>},
    {CandidateId::kDirect, without_workspace<launch_direct>},
    {CandidateId::kHeads, without_workspace<launch_heads>},
    {CandidateId::kHeadsGemm, without_workspace<launch_heads_gemm>},
    {CandidateId::kPhaseDirect, without_workspace<launch_phase_direct>},
    {CandidateId::kOverlapAdd, without_workspace<launch_overlap_add>},
    {CandidateId::kFilterBank, without_workspace<launch_filter_bank>},
    {CandidateId::kPixelShuffle, without_workspace<launch_pixel_shuffle>},
    {CandidateId::kShuffleGemm, launch_shuffle_gemm, shuffle_gemm_workspace},
    {CandidateId::kFlatGemm, launch_flat_gemm, workspace_of<flat_gemm_workspace>},
    {CandidateId::kPhaseTma, launch_phase_tma, workspace_of<phase_tma_workspace>},
    {CandidateId::kPhaseTf32, launch_phase_tf32, workspace_of<phase_tf32_workspace>},
    {CandidateId::kPhasePixels, launch_phase_pixels, phase_pixels_workspace},
    {CandidateId::kDense, launch_dense, workspace_of<dense_workspace>},
    {CandidateId::kRowTile, without_workspace<launch_row_tile>},
    {CandidateId::kRows, without_workspace<launch_rows>},
    {CandidateId::kRowsMma, without_workspace<launch_rows_mma>},
    {CandidateId::kRowsPersistent, launch_rows_persistent, workspace_of<rows_persistent_workspace>},
    {CandidateId::kLongRows, without_workspace<launch_long_rows>},
    {CandidateId::kPixelRows, without_workspace<launch_pixel_rows>},
};

// By the kernels of a candidate.
cudaError_t launch_convolution(CandidateId candidate, const Call& call, void* output, cudaStream_t stream) {
  Problem problem = call.problem;
  problem.weight_layout = weight_layout(candidate, call.problem);
  if (!activates(candidate, problem)) problem.activation = Activation::kNone, problem.alpha = 0;
  const Tensor as_read = weight_of(call, candidate);
  const void *input = call.input.const_data_ptr(), *weight = as_read.const_data_ptr();
  for (const Launcher& kernels : kLaunchers) {
    if (kernels.id != candidate) continue;
    std::optional<Tensor> space;
    if (kernels.workspace) space = workspace(call.input, kernels.workspace(problem, input, weight));
    return kernels.launch(problem, input, weight, bias_data(call), output, space ? space->mutable_data_ptr() : nullptr,
                          stream);
  }
  return cudaErrorNotSupported;
}

// A checked call of the operator `name`, with its activation.
Tensor convolve(const char* name, const Scope& scope, const Call& call) {
  const Problem& problem = call.problem;
  if (problem.batch == 0) {
    return finish_output(call, allocate_output(call, problem.out_channels, problem.layout), problem.layout);
  }
  const auto activate = [&](const Tensor& output) {
    if (problem.activation == Activation::kNone) return;
    if (!scope.device().refusal.empty()) return aten_activation(problem, output);
    check(launch_activation(problem, output.mutable_data_ptr(), scope.stream()), name);
  };
  const auto make = [&](const Candidate& candidate) {
    if (candidate.id == CandidateId::kAten) return aten_conv_transpose(call, activate);
    const Tensor output = allocate_output(call, problem.out_channels, problem.layout);
    check(launch_convolution(candidate.id, call, output.mutable_data_ptr(), scope.stream()), name);
    if (!activates(candidate.id, problem)) activate(output);
    return output;
  };
  return finish_output(call, make(choose(Operation::kConvTranspose, problem, scope, make)), problem.layout);
}

template <int kSpatial>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                      IntList padding, IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32) {
  const char* const name = plain_name(kSpatial);
  const Scope scope(input);
  return convolve(name, scope,
                  make_call(name, kSpatial, {input, weight, bias, {}, {}}, stride, padding, output_padding, groups,
                            dilation, allow_tf32));
}

template <int kSpatial>
Tensor conv_transpose_act(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias, IntList stride,
                          IntList padding, IntList output_padding, int64_t groups, IntList dilation,
                          std::string activation, double alpha, bool allow_tf32) {
  const std::string name = std::string(plain_name(kSpatial)) + "_act";
  const Scope scope(input);
  Call call = make_call(name.c_str(), kSpatial, {input, weight, bias, {}, {}}, stride, padding, output_padding, groups,
                        dilation, allow_tf32);
  set_activation(name.c_str(), activation, alpha, call.problem);
  return convolve(name.c_str(), scope, call);
}

// The gradient of an input or a weight: what a kernel writes, dense in a layout of its own, and what the caller gets.
class Gradient {
 public:
  static Gradient none(const Tensor& like) { return {empty(like, 0), empty(like, 0)}; }
  static Gradient of_input(const Call& call) {
    const Tensor dense = allocate_input(call, call.problem.layout);
    return {dense, call.batched ? dense : torch::stable::squeeze(dense, 0)};
  }
  // As torch.empty_like(weight), which keeps the strides of a dense weight; kernels write it in `layout`.
  static Gradient of_weight(const Call& call, Layout layout = Layout::kContiguous) {
    const Tensor like = torch::stable::empty_like(call.weight);
    if (layout == Layout::kChannelsLast) return {to_layout(like, layout), like};
    const bool contiguous = has_strides_of(like, Layout::kContiguous);
    return {contiguous ? like : torch::stable::new_empty(like, vec(like.sizes())), like};
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

// The kernels of a candidate for a gradient of the input and of the weight; and what makes all gradients and shares
// work, null if there is nothing, which may refuse tensors for their alignment. It makes both, or any `as_one`.
using GradientWorkspace = int64_t (*)(const Problem&, const void* grad_output, const void* input, const void* weight);
struct GradientKernels {
  CandidateId id;
  decltype(&launch_dense_input_gradient) input;
  GradientWorkspace input_workspace;  // null: none
  decltype(&launch_dense_weight_gradient) weight;
  GradientWorkspace weight_workspace;
  decltype(&launch_depthwise_gradients) all = nullptr;
  GradientWorkspace workspace_of_all = nullptr;
  bool as_one = false;  // whether that pass costs hardly more than one of them
};

// A launcher of the input's gradient that needs no workspace.
template <cudaError_t (*kLaunch)(const Problem&, const void*, const void*, void*, cudaStream_t)>
cudaError_t launch_without(const Problem& problem, const void* grad_output, const void* weight, void* grad_input,
                           void* /*workspace*/, cudaStream_t stream) {
  return kLaunch(problem, grad_output, weight, grad_input, stream);
}

template <int64_t (*kWorkspace)(const Problem&)>
int64_t of_problem(const Problem& problem, const void*, const void*, const void*) {
  return kWorkspace(problem);
}

constexpr GradientKernels kGradients[] = {
    {CandidateId::kRows, launch_without<launch_rows_input_gradient>, nullptr, launch_rows_weight_gradient,
     of_problem<rows_weight_gradient_workspace>},
    {CandidateId::kDepthwise, launch_without<launch_depthwise_input_gradient>, nullptr,
     launch_depthwise_weight_gradient, of_problem<depthwise_weight_gradient_workspace>},
    {CandidateId::kDepthwiseGradients, launch_without<launch_depthwise_input_gradient>, nullptr,
     launch_depthwise_weight_gradient, of_problem<depthwise_weight_gradient_workspace>, launch_depthwise_gradients,
     of_problem<depthwise_gradients_workspace>, /*as_one=*/true},
    {CandidateId::kHeads, launch_without<launch_heads_input_gradient>, nullptr, launch_heads_weight_gradient,
     of_problem<heads_weight_gradient_workspace>},
    {CandidateId::kDirect, launch_without<launch_direct_input_gradient>, nullptr, launch_direct_weight_gradient,
     of_problem<direct_weight_gradient_workspace>},
    {CandidateId::kDenseGradients, launch_dense_input_gradient, of_problem<dense_input_gradient_workspace>,
     launch_dense_weight_gradient, of_problem<dense_weight_gradient_workspace>},
    {CandidateId::kMirrored, launch_mirrored_input_gradient, mirrored_input_gradient_workspace, nullptr, nullptr},
    {CandidateId::kGradientGemm, launch_gemm_input_gradient, gemm_input_gradient_workspace, launch_gemm_weight_gradient,
     gemm_weight_gradient_workspace, launch_gemm_gradients, gemm_gradients_workspace},
    {CandidateId::kPairsGradients, launch_pairs_input_gradient, pairs_input_gradient_workspace,
     launch_pairs_weight_gradient, pairs_weight_gradient_workspace, launch_pairs_gradients, pairs_gradients_workspace},
    {CandidateId::kPairsTf32, launch_pairs_tf32_input_gradient, pairs_tf32_input_gradient_workspace,
     launch_pairs_tf32_weight_gradient, pairs_tf32_weight_gradient_workspace, launch_pairs_tf32_gradients,
     of_problem<pairs_tf32_gradients_workspace>, /*as_one=*/true},
    {CandidateId::kBoxesTf32, launch_boxes_tf32_input_gradient, boxes_tf32_input_gradient_workspace,
     launch_boxes_tf32_weight_gradient, boxes_tf32_weight_gradient_workspace, launch_boxes_tf32_gradients,
     of_problem<boxes_tf32_gradients_workspace>, /*as_one=*/true},
};

// Those of a candidate; null: ATen's.
const GradientKernels* gradient_kernels(const Candidate& candidate) {
  for (const GradientKernels& kernels : kGradients) {
    if (kernels.id == candidate.id) return &kernels;
  }
  return nullptr;
}

using Gradients = std::array<Tensor, 3>;  // of input, weight and bias; those that were not asked for are empty
constexpr int64_t kInputBit = 1, kWeightBit = 2, kBiasBit = 4;

// A backward call; the gradients named by bits are made by one of the functions.
class Backward {
 public:
  Backward(const char* name, const Scope& scope, const Call& call, const Tensor& grad_output)
      : name_(name), scope_(scope), call_(call), grad_output_(grad_output) {}

  // Those of the input and the weight by kernels that may be null, in one pass where they are the same and there is
  // one. The weight's comes first, since its workspace may stand where the input's will be.
  Gradients make(const GradientKernels* of_input, const GradientKernels* of_weight, bool of_bias) {
    if (!dense_) {
      const Tensor batched = call_.batched ? grad_output_ : torch::stable::unsqueeze(grad_output_, 0);
      dense_ = to_layout(batched, call_.problem.layout);
    }
    Gradient input = of_input ? Gradient::of_input(call_) : Gradient::none(call_.input);
    Gradient weight = of_weight ? Gradient::of_weight(call_, weight_layout(of_weight->id, call_.problem))
                                : Gradient::none(call_.input);
    const Tensor bias = empty(call_.input, of_bias ? call_.problem.out_channels : 0);
    const GradientKernels* const all = of_input ? of_input : of_weight;
    const bool together = !of_input || !of_weight || of_input == of_weight;
    if (!together || !launch_all(*all, input, weight, bias)) {
      if (of_weight) launch_weight(*of_weight, weight, bias, input);
      if (of_input) launch_input(*of_input, input);
    }
    return {input.finish(), weight.finish(), bias};
  }

  Gradients make_by_aten(const Tensor& input, int64_t bits) const {
    const auto found = call_operator("fastconvt::_conv_transpose_aten_backward", "", grad_output_, input, call_.weight,
                                     spatial_list(call_, &Axis::stride), spatial_list(call_, &Axis::padding),
                                     spatial_list(call_, &Axis::output_padding), call_.problem.groups,
                                     spatial_list(call_, &Axis::dilation), bits, call_.problem.allow_tf32);
    return {to_tensor(found[0]), to_tensor(found[1]), to_tensor(found[2])};
  }

 private:
  static void* data(const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; }

  // Whether it could.
  bool launch_all(const GradientKernels& kernels, const Gradient& input, const Gradient& weight,
                  const Tensor& bias) const {
    const bool both = input.data() != nullptr && weight.data() != nullptr;
    if (!kernels.all || !(both || kernels.as_one)) return false;
    const Tensor as_read = weight_of(call_, kernels.id);
    const void *grad = dense_->const_data_ptr(), *x = call_.input.const_data_ptr(), *w = as_read.const_data_ptr();
    const Tensor sums = workspace(call_.input, kernels.workspace_of_all(call_.problem, grad, x, w));
    const cudaError_t error = kernels.all(call_.problem, grad, x, w, input.data(), weight.data(), data(bias),
                                          sums.mutable_data_ptr(), scope_.stream());
    if (error != cudaErrorNotSupported) check(error, name_);
    return error == cudaSuccess;
  }

  void launch_input(const GradientKernels& kernels, const Gradient& gradient) const {
    const Tensor as_read = weight_of(call_, kernels.id);
    const void *grad = dense_->const_data_ptr(), *w = as_read.const_data_ptr();
    std::optional<Tensor> packed;
    if (kernels.input_workspace) {
      packed = workspace(call_.input, kernels.input_workspace(call_.problem, grad, nullptr, w));
    }
    check(kernels.input(call_.problem, grad, w, gradient.data(), packed ? packed->mutable_data_ptr() : nullptr,
                        scope_.stream()),
          name_);
  }

  void launch_weight(const GradientKernels& kernels, const Gradient& gradient, const Tensor& bias,
                     const Gradient& input) const {
    const void *grad = dense_->const_data_ptr(), *x = call_.input.const_data_ptr();
    const int64_t bytes = kernels.weight_workspace(call_.problem, grad, x, nullptr);
    std::optional<Tensor> sums;
    if (input.data() == nullptr || bytes > call_.problem.in_elements() * call_.problem.element_size()) {
      sums = workspace(call_.input, bytes);
    }
    check(kernels.weight(call_.problem, grad, x, gradient.data(), data(bias),
                         sums ? sums->mutable_data_ptr() : input.data(), scope_.stream()),
          name_);
  }

  const char* name_;
  const Scope& scope_;
  const Call& call_;
  const Tensor& grad_output_;
  std::optional<Tensor> dense_;  // grad_output as our kernels read it
};

template <int kSpatial>
std::tuple<Tensor, Tensor, Tensor> conv_transpose_backward(const Tensor& grad_output, const Tensor& input,
                                                           const Tensor& weight, IntList stride, IntList padding,
                                                           IntList output_padding, int64_t groups, IntList dilation,
                                                           std::vector<bool> mask, bool allow_tf32) {
  const std::string name = std::string(plain_name(kSpatial)) + "_backward";
  const Scope scope(input);
  Call call = make_call(name.c_str(), kSpatial, {input, weight, {}, {}, grad_output}, stride, padding, output_padding,
                        groups, dilation, allow_tf32);
  call.problem.has_bias = mask[2];
  Backward backward(name.c_str(), scope, call, grad_output);
  Gradients gradients{empty(input, 0), empty(input, 0), empty(input, 0)};
  int64_t missing = (mask[0] ? kInputBit : 0) | (mask[1] ? kWeightBit : 0) | (mask[2] ? kBiasBit : 0);
  const auto take = [&](const Gradients& made, int64_t bits) {
    for (int i = 0; i < 3; ++i) {
      if (bits >> i & 1) gradients[i] = made[i];
    }
    missing &= ~bits;
  };
  const int64_t of_input = missing & kInputBit, of_weight = mask[1] ? missing & ~kInputBit : 0;
  const bool both = of_input && of_weight;
  const auto planned = [&](Operation operation, int64_t bits) -> const GradientKernels* {
    if (bits == 0 || call.problem.in_elements() == 0) return nullptr;
    const auto in_one_pass = [&](const Candidate& candidate) {
      const GradientKernels* const kernels = gradient_kernels(candidate);
      return both && kernels && kernels->as_one;
    };
    return gradient_kernels(choose(
        operation, call.problem, scope,
        [&](const Candidate& candidate) {
          const GradientKernels* const kernels = gradient_kernels(candidate);
          const int64_t made = in_one_pass(candidate) ? of_input | of_weight : bits;
          if (!kernels) return backward.make_by_aten(input, made);
          return backward.make(made & kInputBit ? kernels : nullptr, made & kWeightBit ? kernels : nullptr,
                               made & kBiasBit);
        },
        [&](const Candidate& candidate) { return in_one_pass(candidate) ? 0.5 : 1.0; }));
  };
  const GradientKernels* const by_input = planned(Operation::kInputGradient, of_input);
  const GradientKernels* const by_weight = planned(Operation::kWeightGradient, of_weight);
  if (by_input || by_weight) {
    const int64_t bits = (by_input ? of_input : 0) | (by_weight ? of_weight : 0);
    take(backward.make(by_input, by_weight, bits & kBiasBit), bits);
  }
  if (missing != 0) take(backward.make_by_aten(input, missing), missing);
  return {gradients[0], gradients[1], gradients[2]};
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
  const auto make = [&](const Candidate& candidate) {
    if (candidate.id == CandidateId::kAten) return aten_logsumexp_hardswish(call, subtrahend, min, max);
    const Tensor output = allocate_output(call, 1, layout);
    const auto launch = candidate.id == CandidateId::kFusedMma ? launch_chain_mma : launch_logsumexp_hardswish;
    check(launch(call.problem, call.input.const_data_ptr(), contiguous_weight(call).const_data_ptr(), bias_data(call),
                 subtrahend.const_data_ptr(), min, max, output.mutable_data_ptr(), scope.stream()),
          kChain);
    return output;
  };
  return finish_output(call, make(choose(Operation::kLogSumExpHardswish, call.problem, scope, make)), layout);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logsumexp_hardswish_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
    const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
    std::vector<bool> mask, double min, double max, bool allow_tf32) {
  const std::string name = std::string(kChain) + "_backward";
  const Scope scope(input);
  const Call call = make_call(name.c_str(), 3, {input, weight, bias, subtrahend, grad_output}, stride, padding,
                              output_padding, groups, dilation, /*allow_tf32=*/false);
  using Found = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  const auto make_by_aten = [&]() -> Found {
    int64_t asked = 0;
    for (int i = 0; i < 4; ++i) asked |= int64_t{mask[i]} << i;
    const auto found = call_operator("fastconvt::_logsumexp_hardswish_aten_backward", "", grad_output, input, weight,
                                     bias, subtrahend, spatial_list(call, &Axis::stride),
                                     spatial_list(call, &Axis::padding), spatial_list(call, &Axis::output_padding),
                                     groups, spatial_list(call, &Axis::dilation), asked, min, max, allow_tf32);
    return {to_tensor(found[0]), to_tensor(found[1]), to_tensor(found[2]), to_tensor(found[3])};
  };
  if (call.problem.in_elements() == 0) return make_by_aten();
  const auto make = [&](const Candidate& candidate) -> Found {
    if (candidate.id == CandidateId::kAten) return make_by_aten();
    Gradient grad_input = mask[0] ? Gradient::of_input(call) : Gradient::none(input);
    Gradient grad_weight = mask[1] ? Gradient::of_weight(call) : Gradient::none(input);
    const Tensor grad_bias = empty(input, mask[2] ? call.problem.out_channels : 0);
    const Tensor grad_subtrahend = mask[3] ? torch::stable::new_empty(input, vec(subtrahend.sizes())) : empty(input, 0);
    const auto data = [](const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; };
    const bool mma = candidate.id == CandidateId::kFusedMma && fused_chain_backward_fits(call.problem);
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
  };
  return make(choose(Operation::kChainGradients, call.problem, scope, make));
}

std::string plan(std::string op, IntList input, IntList weight, bool bias, IntList stride, IntList padding,
                 IntList output_padding, int64_t groups, IntList dilation, std::string dtype, std::string layout,
                 bool allow_tf32, std::string activation) {
  int index = 0;
  check(cudaGetDevice(&index), "fastconvt.plan needs a CUDA device");
  return plan_json(device_info(index), op, input, weight, bias, stride, padding, output_padding, groups, dilation,
                   dtype, layout, allow_tf32, activation);
}

}  // namespace
}  // namespace fastconvt::cuda

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CUDA, m) {
  m.impl("conv_transpose1d", TORCH_BOX(&fastconvt::cuda::conv_transpose<1>));
  m.impl("conv_transpose2d", TORCH_BOX(&fastconvt::cuda::conv_transpose<2>));
  m.impl("conv_transpose3d", TORCH_BOX(&fastconvt::cuda::conv_transpose<3>));
  m.impl("conv_transpose1d_act", TORCH_BOX(&fastconvt::cuda::conv_transpose_act<1>));
  m.impl("conv_transpose2d_act", TORCH_BOX(&fastconvt::cuda::conv_transpose_act<2>));
  m.impl("conv_transpose3d_act", TORCH_BOX(&fastconvt::cuda::conv_transpose_act<3>));
  m.impl("conv_transpose3d_logsumexp_hardswish", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish));
  m.impl("conv_transpose1d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<1>));
  m.impl("conv_transpose2d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<2>));
  m.impl("conv_transpose3d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<3>));
  m.impl("conv_transpose3d_logsumexp_hardswish_backward", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeExplicitAutograd, m) {
  m.impl("_plan_cuda", TORCH_BOX(&fastconvt::cuda::plan));
  m.impl("_force_cuda", TORCH_BOX(&fastconvt::force_candidate));
  m.impl("_autotune_cuda", TORCH_BOX(&fastconvt::set_autotune_folder));
}
