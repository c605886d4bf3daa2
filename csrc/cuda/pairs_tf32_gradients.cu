// Gradients of pairs in TF32, host side: what blocks do, and the tensors as copies read them.
#include "pairs_tf32_gradients.cuh"

#include <algorithm>

#include "../core/pairs_tf32_gradients.h"
#include "tf32_gradients.h"

namespace fastconvt::cuda {
namespace {

// Partial sums of the weight, then of the bias.
struct Workspace {
  int64_t bias_at, bytes;
  Workspace(const Problem& problem, const PairsTf32Plan& t) {
    bias_at = t.splits > 1 ? t.splits * problem.weight_elements() * int64_t{sizeof(float)} : 0;
    const int64_t inner = problem.weight_elements() / problem.in_channels;
    bytes = bias_at + (problem.has_bias ? t.splits * inner * int64_t{sizeof(float)} : 0);
  }
};

const PairsTf32Plan& plan_of(const Problem& problem, bool input, bool weight) {
  if (!weight) return last_result<pairs_tf32_plan<true, false>>(problem);
  return input ? last_result<pairs_tf32_plan<true, true>>(problem) : last_result<pairs_tf32_plan<false, true>>(problem);
}

PairsTf32Params make_params(const Problem& problem, const PairsTf32Plan& t, const GradientTensors& of,
                            char* workspace) {
  PairsTf32Params p{};
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  p.width = i(problem.axis[2].in), p.height = i(problem.axis[1].in), p.depth = i(problem.axis[0].in);
  for (int a = 0; a < 2; ++a) p.step[a] = i(problem.axis[1 - a].stride), p.padding[a] = i(problem.axis[1 - a].padding);
  p.in_channels = i(problem.in_channels), p.inner = i(problem.weight_elements() / problem.in_channels);
  p.image = i(problem.in_positions());
  p.column_blocks = t.column_blocks, p.blocks = t.blocks, p.input_blocks = t.input_blocks;
  p.runs = {i(t.runs_of_row), i(t.runs)}, p.items = i(t.items), p.chunks = i(t.chunks);
  p.chunk_channels = i(16 / pairs_tf32_rows(problem)),
  p.row_channels = i(pairs_tf32_block_rows(t.weight_tiles) / 2 / pairs_tf32_rows(problem));
  p.vectors = p.width % 4 == 0, p.stream = t.input_tiles > 8, p.flat = t.flat, p.wide = t.wide;
  p.steps = {i(t.weight_runs_of_row), i(t.steps)};
  p.row_blocks = i(t.row_blocks), p.kinds = i(t.kinds), p.splits = i(t.splits);
  p.grad_output = static_cast<const float*>(of.grad_output), p.input = static_cast<const float*>(of.input);
  p.weight = static_cast<const float*>(of.weight);
  p.grad_input = static_cast<float*>(of.grad_input), p.grad_weight = static_cast<float*>(of.grad_weight);
  p.grad_bias = static_cast<float*>(of.grad_bias);
  p.partial = reinterpret_cast<float*>(workspace);
  if (of.grad_bias != nullptr) p.bias_partial = reinterpret_cast<float*>(workspace + Workspace(problem, t).bias_at);
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.batch = problem.batch, p.out_channels = i(problem.out_channels), p.taps = i(problem.kernel_positions());
  return p;
}

bool make_maps(const Problem& problem, const PairsTf32Plan& t, const PairsTf32Params& p, PairsTf32Maps& maps) {
  const Axis *depth = &problem.axis[0], *height = &problem.axis[1], *width = &problem.axis[2];
  const int64_t grads[5] = {width->out(), height->out(), depth->out(), problem.out_channels, problem.batch};
  const int kh = static_cast<int>(height->kernel), kd = static_cast<int>(depth->kernel);
  if (p.grad_input != nullptr) {
    if (!make_tf32_map(p.grad_output, grads, {32, kh, kd, p.chunk_channels, 1}, CU_TENSOR_MAP_SWIZZLE_128B,
                       maps.grads_of_chunk))
      return false;
    const cuuint64_t dims[2] = {static_cast<cuuint64_t>(p.inner), static_cast<cuuint64_t>(p.in_channels)},
                     pitches[1] = {dims[0] * 4};
    const cuuint32_t box[2] = {32, static_cast<cuuint32_t>(t.input_tiles * 8)}, steps[2] = {1, 1};
    if (tensor_map_encoder()(&maps.weights, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 2, const_cast<float*>(p.weight), dims,
                             pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
      return false;
    }
  }
  if (p.grad_weight == nullptr) return true;
  const int64_t inputs[5] = {p.flat ? int64_t{p.image} : width->in, p.flat ? 1 : height->in, p.flat ? 1 : depth->in,
                             problem.in_channels, problem.batch};
  return make_tf32_map(p.grad_output, grads, {32, kh, kd, p.row_channels, 1}, CU_TENSOR_MAP_SWIZZLE_128B,
                       maps.grads_of_rows) &&
         make_tf32_map(p.input, inputs, {t.wide ? 32 : 16, 1, 1, t.weight_tiles * 8, 1},
                       t.wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, maps.inputs);
}

template <int kInputTiles, int kWeightTiles>
cudaError_t launch_tiles(const PairsTf32Params& p, const PairsTf32Maps& maps, cudaStream_t stream) {
  constexpr int kShared = 2048 + std::max(kPairsStages<kInputTiles> * kPairsStage<kInputTiles>,
                                          kPairsStages<kWeightTiles> * kPairsStage<kWeightTiles>);
  const auto kernel = pairs_tf32_kernel<kInputTiles, kWeightTiles>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  return launch_early(kernel, dim3(static_cast<unsigned>(p.blocks)), kPairsThreads, kShared, stream, p, maps);
}

cudaError_t launch_reduction(const PairsTf32Params& p, cudaStream_t stream) {
  const int64_t vectors = int64_t{p.in_channels} * p.inner / 4;
  int shares = 1;
  while (shares * 2 <= p.splits && shares < 16 && vectors * shares < 132 * 2048) shares *= 2;
  const int64_t weights = p.splits > 1 ? ceil_div(vectors * shares, int64_t{kPairsReduceThreads}) : 0;
  const int64_t biases = p.grad_bias != nullptr ? ceil_div(p.out_channels, kPairsReduceThreads / 32) : 0;
  if (weights + biases == 0) return cudaSuccess;
  return launch_early(pairs_tf32_reduction_kernel, dim3(static_cast<unsigned>(weights + biases)), kPairsReduceThreads,
                      0, stream, p, static_cast<int>(weights), shares);
}

// cudaErrorNotSupported: a tensor is not aligned.
cudaError_t launch_aligned(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
  if (!pairs_tf32_refusal(problem).empty() || !of.aligned()) return cudaErrorNotSupported;
  if (of.grad_bias != nullptr && !problem.has_bias) return cudaErrorNotSupported;
  const PairsTf32Plan& t = plan_of(problem, of.grad_input != nullptr, of.grad_weight != nullptr);
  const PairsTf32Params p = make_params(problem, t, of, static_cast<char*>(workspace));
  PairsTf32Maps maps{};
  if (!make_maps(problem, t, p, maps)) return cudaErrorNotSupported;
  const cudaError_t error = dispatch_tiles(t, [&](auto input, auto weight) {
    return launch_tiles<decltype(input)::value, decltype(weight)::value>(p, maps, stream);
  });
  if (error != cudaSuccess || p.grad_weight == nullptr) return error;
  return launch_reduction(p, stream);
}

struct Pairs {
  static int64_t bytes(const Problem& problem, bool input, bool weight) {
    return Workspace(problem, plan_of(problem, input, weight)).bytes;
  }
  static cudaError_t launch(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
    return launch_aligned(problem, of, workspace, stream);
  }
};
using Launchers = AlignedLaunchers<Pairs>;

}  // namespace

int64_t pairs_tf32_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                            const void* weight) {
  return Launchers::input_workspace(problem, grad_output, weight);
}

cudaError_t launch_pairs_tf32_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                             void* grad_input, void* workspace, cudaStream_t stream) {
  return Launchers::input(problem, grad_output, weight, grad_input, workspace, stream);
}

int64_t pairs_tf32_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                             const void* /*weight*/) {
  return Launchers::weight_workspace(problem, grad_output, input);
}

cudaError_t launch_pairs_tf32_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                              void* grad_weight, void* grad_bias, void* workspace,
                                              cudaStream_t stream) {
  return Launchers::weight(problem, grad_output, input, grad_weight, grad_bias, workspace, stream);
}

int64_t pairs_tf32_gradients_workspace(const Problem& problem) { return Pairs::bytes(problem, true, true); }

cudaError_t launch_pairs_tf32_gradients(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* workspace, cudaStream_t stream) {
  return Launchers::all(problem, {grad_output, input, weight, grad_input, grad_weight, grad_bias}, workspace, stream);
}

}  // namespace fastconvt::cuda
