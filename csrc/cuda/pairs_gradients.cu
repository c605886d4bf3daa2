// The gradients by pairs, host side: the maps of the tensors that copies read, and the template instances.
#include <algorithm>

#include "aligned_gradients.h"
#include "dispatch.h"
#include "pairs_gradient_maps.h"
#include "pairs_gradient_reduction.cuh"
#include "pairs_input_gradient.cuh"
#include "pairs_weight_gradient.cuh"
#include "rows_bias_gradient.cuh"

namespace fastconvt::cuda {
namespace {

// Partial sums of the bias, in whichever way, and of the weight.
struct Workspace {
  int64_t partial, bytes;

  Workspace(const Problem& problem, const PairsGradientTile& t) {
    const BiasGradientParams bias = make_bias_params(problem, nullptr, nullptr, nullptr);
    const int64_t apart = int64_t{bias.channels} * bias.batch_slices * bias.position_slices * int64_t{sizeof(double)};
    partial = round_up(std::max(apart, t.splits * t.inner * int64_t{sizeof(float)}), int64_t{1024});
    bytes = partial + (t.splits > 1 ? (t.splits - t.lent) * problem.weight_elements() * int64_t{sizeof(float)} : 0);
  }
};

struct Tensors : GradientTensors {
  char* workspace;
  float* lent = nullptr;  // the memory of the input's gradient, for parts of the weight's
};

PairsGradientParams make_params(const Problem& problem, const PairsGradientTile& t, const Tensors& tensors) {
  PairsGradientParams p{};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  p.in = input_strides(problem), p.out = output_strides(problem), p.batch = problem.batch;
  p.height = fast_divide(static_cast<int>(p.axis[1].in)), p.depth = fast_divide(static_cast<int>(p.axis[0].in));
  p.width = static_cast<int>(p.axis[2].in);
  for (int i = 0; i < 2; ++i) p.step[i] = p.axis[1 - i].stride, p.padding[i] = p.axis[1 - i].padding;
  p.in_channels = static_cast<int>(problem.in_channels), p.out_channels = static_cast<int>(problem.out_channels);
  p.inner = static_cast<int>(t.inner);
  p.unit = t.unit, p.input_unit = t.input_unit;
  p.margin = t.margin, p.pitch = t.pitch * 2;
  p.column_blocks = fast_divide(static_cast<int>(t.column_blocks));
  p.grad_output = tensors.grad_output, p.input = tensors.input, p.weight = tensors.weight;
  p.grad_input = tensors.grad_input, p.grad_weight = tensors.grad_weight, p.grad_bias = tensors.grad_bias;
  return p;
}

void set_units(const Problem& problem, int64_t row_units, int rows, PairsGradientParams& p) {
  p.row_units = fast_divide(static_cast<int>(row_units));
  p.units = static_cast<int>(problem.batch * problem.axis[0].in * problem.axis[1].in * row_units);
  p.unit_bytes = rows * p.pitch;
  p.channels_of_box = rows / static_cast<int>(pairs_row_taps(problem));
}

void set_stages(int positions, int columns_bytes, PairsGradientParams& p) {
  p.stage_bytes = positions / p.unit * p.unit_bytes + columns_bytes;
  p.stages = static_cast<int>(std::min<int64_t>(kPairsMaxStages, (kPairsShared - kPairsHead) / p.stage_bytes));
}

CUtensorMapDataType type_of_16_bits(const Problem& problem) {
  return problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

bool make_grad_map(const Problem& problem, const PairsGradientParams& p, CUtensorMap& map) {
  const bool wide = problem.axis[2].kernel == 4;
  return make_pairs_map(type_of_16_bits(problem), 2, pairs_output(problem, p.grad_output), p.pitch / 2,
                        static_cast<int>(problem.axis[1].kernel), static_cast<int>(problem.axis[0].kernel),
                        p.channels_of_box, wide ? 0 : p.pitch, map);
}

template <typename Kernel>
cudaError_t allow_shared(Kernel* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kPairsShared));
}

int64_t shared_bytes(const PairsGradientParams& p) { return kPairsHead + int64_t{p.stages} * p.stage_bytes; }

template <typename T, int kTiles, int kWords>
cudaError_t launch_input(const Problem& problem, const PairsGradientTile& t, const Tensors& tensors,
                         cudaStream_t stream) {
  PairsGradientParams p = make_params(problem, t, tensors);
  set_units(problem, t.row_units, 32 / kWords, p);
  p.items = static_cast<int>(t.items), p.chunks = ceil_div(p.inner, 64);
  set_stages(kPairsPositions, kTiles * 8 * 128, p);
  CUtensorMap grads, weights;
  if (!make_grad_map(problem, p, grads) ||
      !make_pairs_weight_map(type_of_16_bits(problem), 2, problem, p.weight, t.inner, kTiles * 8, weights)) {
    return cudaErrorNotSupported;
  }
  const auto kernel = pairs_input_gradient_kernel<T, kTiles, kWords>;
  const cudaError_t error = allow_shared(kernel);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(t.input_blocks), kPairsThreads, shared_bytes(p), stream>>>(p, grads, weights);
  return cudaGetLastError();
}

// `early`: the grid before it is the input's gradient.
template <typename T, int kTiles, int kWords>
cudaError_t launch_weight(const Problem& problem, const PairsGradientTile& t, const Tensors& tensors, bool sums_bias,
                          bool early, cudaStream_t stream) {
  PairsGradientParams p = make_params(problem, t, tensors);
  set_units(problem, t.weight_row_units, 128 / kWords, p);
  set_stages(kPairsWeightPositions, kTiles * 8 * kPairsWeightPositions * 2, p);
  p.lead_mask = t.lead > 0 ? 7 : 0;
  p.row_blocks = fast_divide(static_cast<int>(t.row_blocks)), p.kinds = fast_divide(static_cast<int>(t.kinds));
  p.steps = static_cast<int>(t.steps), p.splits = static_cast<int>(t.splits);
  const Workspace places(problem, t);
  p.part = problem.weight_elements();
  p.lent = static_cast<int>(t.lent), p.lent_partial = tensors.lent;
  p.partial = reinterpret_cast<float*>(tensors.workspace + places.partial);
  p.bias_partial = sums_bias ? reinterpret_cast<float*>(tensors.workspace) : nullptr;
  CUtensorMap grads, inputs;
  if (!make_grad_map(problem, p, grads) || !make_pairs_map(type_of_16_bits(problem), 2, pairs_input(problem, p.input),
                                                           p.input_unit, 1, 1, kTiles * 8, p.input_unit * 2, inputs)) {
    return cudaErrorNotSupported;
  }
  const auto kernel = pairs_weight_gradient_kernel<T, kTiles, kWords>;
  cudaError_t error = allow_shared(kernel);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(t.kinds * t.splits);
  if (early) {
    error = launch_early(kernel, dim3(blocks), kPairsThreads, shared_bytes(p), stream, p, grads, inputs);
  } else {
    kernel<<<blocks, kPairsThreads, shared_bytes(p), stream>>>(p, grads, inputs);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess || (p.splits == 1 && !sums_bias)) return error;
  PairsReduction r{};
  r.vectors = p.splits > 1 ? p.part / 4 : 0, r.shares = 1;
  while (r.shares * 2 <= p.splits && r.shares < 16 && r.vectors * r.shares < 132 * 2048) r.shares *= 2;
  r.weight_blocks = static_cast<int>(ceil_div(r.vectors * r.shares, int64_t{kPairsReduceThreads}));
  r.aligned = reinterpret_cast<uintptr_t>(p.grad_weight) % 8 == 0;
  const int bias_blocks = sums_bias ? ceil_div(p.out_channels, kPairsReduceThreads / 32) : 0;
  return launch_early(pairs_reduction_kernel<T>, dim3(static_cast<unsigned>(r.weight_blocks + bias_blocks)),
                      kPairsReduceThreads, 0, stream, p, r);
}

// Calls launch<T, tiles, words>() of the tile's instance.
template <typename Launch>
cudaError_t dispatch_tile(const Problem& problem, const PairsGradientTile& t, Launch&& launch) {
  const auto with_type = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_tiles = [&](auto tiles) {
      return problem.axis[2].kernel == 2 ? launch(TypeTag<T>{}, tiles, std::integral_constant<int, 1>{})
                                         : launch(TypeTag<T>{}, tiles, std::integral_constant<int, 2>{});
    };
    return t.columns == 64 ? with_tiles(std::integral_constant<int, 8>{})
                           : with_tiles(std::integral_constant<int, 16>{});
  };
  return problem.dtype == DType::kFloat16 ? with_type(TypeTag<__half>{}) : with_type(TypeTag<__nv_bfloat16>{});
}

// The weight's and the bias's; aligned tensors.
cudaError_t make_weight(const Problem& problem, const PairsGradientTile& t, const Tensors& tensors, bool early,
                        cudaStream_t stream) {
  const bool sums_bias = tensors.grad_bias != nullptr && tensors.grad_weight != nullptr && gemm_weight_counts(problem);
  if (tensors.grad_bias != nullptr && !sums_bias) {
    const BiasGradientParams p = make_bias_params(problem, tensors.grad_output, tensors.grad_bias, tensors.workspace);
    const cudaError_t error = problem.dtype == DType::kFloat16 ? launch_bias<__half>(problem, p, stream)
                                                               : launch_bias<__nv_bfloat16>(problem, p, stream);
    if (error != cudaSuccess) return error;
    early = false;
  }
  if (tensors.grad_weight == nullptr) return cudaSuccess;
  return dispatch_tile(problem, t, [&](auto tag, auto tiles, auto words) {
    return launch_weight<typename decltype(tag)::type, tiles.value, words.value>(problem, t, tensors, sums_bias, early,
                                                                                 stream);
  });
}

cudaError_t make_input(const Problem& problem, const PairsGradientTile& t, const Tensors& tensors,
                       cudaStream_t stream) {
  return dispatch_tile(problem, t, [&](auto tag, auto tiles, auto words) {
    return launch_input<typename decltype(tag)::type, tiles.value, words.value>(problem, t, tensors, stream);
  });
}

// Any of the three may be null. cudaErrorNotSupported: a tensor is not aligned.
cudaError_t launch_any(const Problem& problem, const Tensors& tensors, cudaStream_t stream) {
  if (!pairs_gradient_refusal(problem).empty() || !tensors.aligned()) return cudaErrorNotSupported;
  const PairsGradientTile& alone = last_result<pairs_gradient_tile>(problem);
  const bool both = tensors.grad_input != nullptr && tensors.grad_weight != nullptr;
  const PairsGradientTile t = both ? alone.both() : alone;
  if (tensors.grad_input != nullptr) {
    const cudaError_t error = make_input(problem, t, tensors, stream);
    if (error != cudaSuccess) return error;
  }
  return make_weight(problem, t, tensors, tensors.grad_input != nullptr, stream);
}

struct Pairs {
  static int64_t bytes(const Problem& problem, bool input, bool weight) {
    if (!weight || !pairs_gradient_refusal(problem).empty()) return 0;
    const PairsGradientTile& alone = last_result<pairs_gradient_tile>(problem);
    return Workspace(problem, input ? alone.both() : alone).bytes;
  }
  static cudaError_t launch(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
    return launch_any(problem, {of, static_cast<char*>(workspace)}, stream);
  }
  // Of the weight's gradient, tensors whose parts may lie in the memory of the input's.
  static bool beside(const Problem& problem, const GradientTensors& of) {
    return of.aligned() && pairs_gradient_refusal(problem).empty();
  }
};
using Launchers = AlignedLaunchers<Pairs>;

}  // namespace

int64_t pairs_gradients_workspace(const Problem& problem, const void* /*grad_output*/, const void* /*input*/,
                                  const void* /*weight*/) {
  return Pairs::bytes(problem, true, true);
}

cudaError_t launch_pairs_gradients(const Problem& problem, const void* grad_output, const void* input,
                                   const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                   void* workspace, cudaStream_t stream) {
  return Launchers::all(problem, {grad_output, input, weight, grad_input, grad_weight, grad_bias}, workspace, stream);
}

int64_t pairs_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                       const void* weight) {
  return Launchers::input_workspace(problem, grad_output, weight);
}

cudaError_t launch_pairs_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, void* workspace, cudaStream_t stream) {
  return Launchers::input(problem, grad_output, weight, grad_input, workspace, stream);
}

int64_t pairs_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                        const void* /*weight*/) {
  return Launchers::weight_workspace(problem, grad_output, input);
}

cudaError_t launch_pairs_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  return Launchers::weight(problem, grad_output, input, grad_weight, grad_bias, workspace, stream);
}

int64_t pairs_weight_gradient_beside_workspace(const Problem& problem, const void* grad_output, const void* input,
                                               const void* weight) {
  if (!Pairs::beside(problem, {grad_output, input, nullptr})) {
    return gemm_weight_gradient_beside_workspace(problem, grad_output, input, weight);
  }
  return Workspace(problem, last_result<pairs_gradient_tile>(problem).beside()).bytes;
}

cudaError_t launch_pairs_weight_gradient_beside(const Problem& problem, const void* grad_output, const void* input,
                                                void* grad_input, void* grad_weight, void* grad_bias, void* workspace,
                                                cudaStream_t stream) {
  if (!Pairs::beside(problem, {grad_output, input, nullptr})) {
    return launch_gemm_weight_gradient_beside(problem, grad_output, input, grad_input, grad_weight, grad_bias,
                                              workspace, stream);
  }
  const Tensors tensors{{grad_output, input, nullptr, nullptr, grad_weight, grad_bias},
                        static_cast<char*>(workspace),
                        static_cast<float*>(grad_input)};
  if (!GradientTensors{grad_input, grad_weight, nullptr}.aligned()) return cudaErrorNotSupported;
  return make_weight(problem, last_result<pairs_gradient_tile>(problem).beside(), tensors, false, stream);
}

}  // namespace fastconvt::cuda
