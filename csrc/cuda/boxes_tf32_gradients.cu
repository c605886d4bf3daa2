// Gradients in TF32 from boxes, host side: what blocks do, and the tensors as copies read them.
#include <algorithm>

#include "../core/boxes_tf32_gradients.h"
#include "boxes_tf32_gradients.cuh"
#include "tf32_gradients.h"

namespace fastconvt::cuda {
namespace {

// Partial sums of the weight, of the input, of the bias.
struct BoxesWorkspace {
  int64_t input_at, bias_at, bytes;
  BoxesWorkspace(const Problem& problem, const BoxesTf32Plan& t) {
    constexpr int64_t kFloat = sizeof(float);
    const int64_t inner = problem.weight_elements() / problem.in_channels;
    input_at = t.splits > 1 ? t.splits * problem.weight_elements() * kFloat : 0;
    bias_at = input_at + (t.input_splits > 1 ? t.input_splits * problem.in_elements() * kFloat : 0);
    bytes = bias_at + (problem.has_bias ? t.splits * inner * kFloat : 0);
  }
};

const BoxesTf32Plan& boxes_plan_of(const Problem& problem, bool input, bool weight) {
  if (!weight) return last_result<boxes_tf32_plan<true, false>>(problem);
  return input ? last_result<boxes_tf32_plan<true, true>>(problem) : last_result<boxes_tf32_plan<false, true>>(problem);
}

// What a unit looks like in shared memory; a channel and the taps of an axis are so many bytes apart.
BoxesUnitParams make_unit(const Problem& problem, const BoxesUnit& u, int& channel, int (&tap)[3]) {
  BoxesUnitParams p{};
  p.positions = u.positions, p.count = static_cast<int>(u.count), p.pitch = u.pitch, p.bytes = u.bytes;
  int pitch = 4;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[2 - a];
    p.tiles[a] = fast_divide(static_cast<int>(u.tiles[a]));
    p.offset[a] = pitch * static_cast<int>(axis.stride), tap[a] = pitch * static_cast<int>(axis.dilation);
    pitch *= u.span[a];
  }
  channel = pitch, p.offset[3] = pitch * u.channels;
  for (int a = 0; a < 4; ++a) p.box[a] = fast_divide(u.box[a]);
  return p;
}

BoxesTf32Params make_boxes_params(const Problem& problem, const BoxesTf32Plan& t, const GradientTensors& of,
                                  char* workspace) {
  BoxesTf32Params p{};
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[2 - a];
    p.size[a] = i(axis.in), p.stride[a] = i(axis.stride), p.padding[a] = i(axis.padding);
    p.axis[a] = axis_params(problem.axis[a]);
  }
  p.size[3] = i(problem.batch), p.lead = t.weight.lead, p.image = i(problem.in_positions());
  p.taps = i(problem.kernel_positions());
  p.in_channels = i(problem.in_channels), p.inner = i(problem.out_channels) * p.taps;
  p.stages = t.stages, p.stage_bytes = t.stage_bytes;
  p.weight_stages = t.weight_stages, p.weight_stage_bytes = t.weight_stage_bytes;
  p.column_blocks = t.column_blocks, p.blocks = t.blocks, p.input_blocks = t.input_blocks;
  p.input = make_unit(problem, t.input, p.input_channel, p.input_tap);
  p.items = i(t.items), p.chunks = i(t.chunks), p.input_splits = i(t.input_splits);
  p.depth_taps = t.depth_taps, p.parts = p.taps > 32 ? p.taps / 32 : 1;
  p.phases = p.parts > 1 ? 1 : p.taps / std::gcd(p.taps, 32);
  p.weight = make_unit(problem, t.weight, p.weight_channel, p.weight_tap);
  p.flat = t.flat || t.shifted, p.shifted = t.shifted, p.steps = i(t.steps), p.row_blocks = i(t.row_blocks),
  p.row_channels = t.weight.channels;
  p.kinds = i(t.kinds), p.splits = i(t.splits);
  p.grad_output = static_cast<const float*>(of.grad_output), p.input_tensor = static_cast<const float*>(of.input);
  p.weight_tensor = static_cast<const float*>(of.weight);
  p.grad_input = static_cast<float*>(of.grad_input), p.grad_weight = static_cast<float*>(of.grad_weight);
  p.grad_bias = static_cast<float*>(of.grad_bias);
  const BoxesWorkspace places(problem, t);
  p.partial = reinterpret_cast<float*>(workspace);
  p.input_partial = reinterpret_cast<float*>(workspace + places.input_at);
  if (of.grad_bias != nullptr) p.bias_partial = reinterpret_cast<float*>(workspace + places.bias_at);
  p.by_taps = fast_divide(p.taps);
  p.by_width = fast_divide(p.axis[2].kernel), p.by_height = fast_divide(p.axis[1].kernel);
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.batch = problem.batch, p.out_channels = i(problem.out_channels);
  // Positions of a unit beyond a row's end count as well.
  const int64_t width = t.weight.box[0] * t.weight.tiles[0];
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.counted[a] = std::min(axis.out(), (a == 2 ? std::max(width, axis.in) : axis.in) * axis.stride);
    p.uncounted = p.uncounted || p.counted[a] < axis.out();
  }
  return p;
}

bool make_boxes_maps(const Problem& problem, const BoxesTf32Plan& t, const BoxesTf32Params& p, BoxesTf32Maps& maps) {
  const Axis *depth = &problem.axis[0], *height = &problem.axis[1], *width = &problem.axis[2];
  const int64_t grads[5] = {width->out(), height->out(), depth->out(), problem.out_channels, problem.batch};
  const auto grads_map = [&](const BoxesUnit& u, CUtensorMap& map) {
    return make_tf32_map(p.grad_output, grads, {u.span[0], u.span[1], u.span[2], u.channels, u.box[3]},
                         CU_TENSOR_MAP_SWIZZLE_NONE, map);
  };
  if (p.grad_input != nullptr) {
    const int64_t lines[5] = {p.inner, p.in_channels, 1, 1, 1};
    if (!grads_map(t.input, maps.grads_of_chunk) ||
        !make_tf32_map(p.weight_tensor, lines, {32, t.input_tiles * 8, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B,
                       maps.weights)) {
      return false;
    }
  }
  if (p.grad_weight == nullptr) return true;
  const int64_t inputs[5] = {p.flat ? int64_t{p.image} : width->in, p.flat ? 1 : height->in, p.flat ? 1 : depth->in,
                             problem.in_channels, problem.batch};
  return grads_map(t.weight, maps.grads_of_rows) &&
         make_tf32_map(p.input_tensor, inputs, {t.weight.positions, 1, 1, t.weight_tiles * 8, 1},
                       t.weight.positions == 32 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, maps.inputs);
}

template <int kInputTiles, int kWeightTiles>
cudaError_t launch_tiles(const BoxesTf32Params& p, const BoxesTf32Maps& maps, cudaStream_t stream) {
  const auto kernel = boxes_tf32_kernel<kInputTiles, kWeightTiles>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBoxesShared));
  if (error != cudaSuccess) return error;
  const int64_t stages = std::max(int64_t{p.stages} * p.stage_bytes, int64_t{p.weight_stages} * p.weight_stage_bytes);
  return launch_early(kernel, dim3(static_cast<unsigned>(p.blocks)), kBoxesThreads, 1024 + kBoxesHeader + stages,
                      stream, p, maps);
}

BoxesParts parts_of(const float* parts, float* sums, int64_t elements, int count) {
  BoxesParts of{parts, sums, elements / 4, count, 1, 0};
  if (count == 1 || sums == nullptr) return of;
  while (of.shares * 2 <= count && of.shares < 16 && of.vectors * of.shares < 132 * 2048) of.shares *= 2;
  of.blocks = static_cast<int>(ceil_div(of.vectors * of.shares, int64_t{kBoxesReduceThreads}));
  return of;
}

cudaError_t launch_boxes_reduction(const BoxesTf32Params& p, cudaStream_t stream) {
  const BoxesParts weight = parts_of(p.partial, p.grad_weight, int64_t{p.in_channels} * p.inner, p.splits);
  const BoxesParts input =
      parts_of(p.input_partial, p.grad_input, p.batch * p.in_channels * int64_t{p.image}, p.input_splits);
  const int biases = p.grad_bias != nullptr ? ceil_div(p.out_channels, kBoxesReduceThreads / 32) : 0;
  if (weight.blocks + input.blocks + biases == 0) return cudaSuccess;
  return launch_early(boxes_tf32_reduction_kernel, dim3(static_cast<unsigned>(weight.blocks + input.blocks + biases)),
                      kBoxesReduceThreads, 0, stream, p, weight, input);
}

// cudaErrorNotSupported: a tensor is not aligned.
cudaError_t launch_boxes(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
  if (!boxes_tf32_refusal(problem).empty() || !of.aligned()) return cudaErrorNotSupported;
  if (of.grad_bias != nullptr && !problem.has_bias) return cudaErrorNotSupported;
  const BoxesTf32Plan& t = boxes_plan_of(problem, of.grad_input != nullptr, of.grad_weight != nullptr);
  const BoxesTf32Params p = make_boxes_params(problem, t, of, static_cast<char*>(workspace));
  BoxesTf32Maps maps{};
  if (!make_boxes_maps(problem, t, p, maps)) return cudaErrorNotSupported;
  const cudaError_t error = dispatch_tiles(t, [&](auto input, auto weight) {
    return launch_tiles<decltype(input)::value, decltype(weight)::value>(p, maps, stream);
  });
  return error == cudaSuccess ? launch_boxes_reduction(p, stream) : error;
}

struct Boxes {
  static int64_t bytes(const Problem& problem, bool input, bool weight) {
    return BoxesWorkspace(problem, boxes_plan_of(problem, input, weight)).bytes;
  }
  static cudaError_t launch(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
    return launch_boxes(problem, of, workspace, stream);
  }
};
using Launchers = AlignedLaunchers<Boxes>;

}  // namespace

int64_t boxes_tf32_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                            const void* weight) {
  return Launchers::input_workspace(problem, grad_output, weight);
}

cudaError_t launch_boxes_tf32_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                             void* grad_input, void* workspace, cudaStream_t stream) {
  return Launchers::input(problem, grad_output, weight, grad_input, workspace, stream);
}

int64_t boxes_tf32_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                             const void* /*weight*/) {
  return Launchers::weight_workspace(problem, grad_output, input);
}

cudaError_t launch_boxes_tf32_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                              void* grad_weight, void* grad_bias, void* workspace,
                                              cudaStream_t stream) {
  return Launchers::weight(problem, grad_output, input, grad_weight, grad_bias, workspace, stream);
}

int64_t boxes_tf32_gradients_workspace(const Problem& problem) { return Boxes::bytes(problem, true, true); }

cudaError_t launch_boxes_tf32_gradients(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* workspace, cudaStream_t stream) {
  return Launchers::all(problem, {grad_output, input, weight, grad_input, grad_weight, grad_bias}, workspace, stream);
}

}  // namespace fastconvt::cuda
