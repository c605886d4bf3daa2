// The forward operators of plain convolutions on CUDA, and the plan: check, shape, plan, launch.
#include <torch/csrc/stable/library.h>

#include <type_traits>
#include <utility>

#include "launchers.h"
#include "scope.h"

namespace fastconvt::cuda {
namespace {

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
    {CandidateId::kShufflePlanes, launch_shuffle_planes, shuffle_planes_workspace},
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
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeExplicitAutograd, m) {
  m.impl("_plan_cuda", TORCH_BOX(&fastconvt::cuda::plan));
  m.impl("_force_cuda", TORCH_BOX(&fastconvt::force_candidate));
  m.impl("_autotune_cuda", TORCH_BOX(&fastconvt::set_autotune_folder));
}
