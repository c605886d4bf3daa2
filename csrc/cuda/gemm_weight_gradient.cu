// The weight's gradient as one matrix product, host side: packing, the maps of the tensors that copies read, and the
// template instance that multiplies.
#include "gemm_weight_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "gemm_gradients.h"
#include "gemm_weight_gradient_pack.cuh"
#include "gemm_weight_gradient_reduction.cuh"
#include "gradient_gemm_pack_plan.h"
#include "launchers.h"
#include "rows_bias_gradient.cuh"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

// A tensor with channels innermost, in rows of whole vectors of 16 bytes; float32 as two planes.
struct Operand {
  const void* data;
  int planes;
  int64_t groups, channels, group_pitch;  // channels of a group, and their pitch
  int64_t size[4];                        // batch, depth, height, width

  int64_t positions() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t pitch() const { return groups * group_pitch; }
  int64_t bytes() const { return round_up(planes * plane_bytes(), int64_t{1024}); }
  int64_t plane_bytes() const { return positions() * pitch() * 2; }
};

Operand input_operand(const Problem& problem, const void* data) {
  return {data,
          problem.dtype == DType::kFloat32 ? 2 : 1,
          problem.groups,
          problem.in_channels_per_group(),
          round_up(problem.in_channels_per_group(), int64_t{8}),
          {problem.batch, problem.axis[0].in, problem.axis[1].in, problem.axis[2].in}};
}
Operand grad_operand(const Problem& problem, const void* data) {
  return {data,
          problem.dtype == DType::kFloat32 ? 2 : 1,
          problem.groups,
          problem.out_channels_per_group(),
          round_up(problem.out_channels_per_group(), int64_t{8}),
          {problem.batch, problem.axis[0].out(), problem.axis[1].out(), problem.axis[2].out()}};
}

bool as_it_lies(const Problem& problem, const Operand& x) {
  return x.planes == 1 && gemm_weight_as_it_lies(problem, x.channels) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// Partial sums: those of the bias, then those of the weight.
int64_t bias_bytes(const Problem& problem, const GemmWeightTile& t) {
  if (!problem.has_bias) return 0;
  const int64_t counted = t.splits * t.in_blocks * kGemmWeightBiasWarps * problem.groups * t.slot_blocks *
                          kGemmWeightBiasBlocks * kGemmWeightShapes[t.shape].width * int64_t{sizeof(float)};
  const BiasGradientParams bias = make_bias_params(problem, nullptr, nullptr, nullptr);
  const int64_t slices = int64_t{bias.channels} * bias.batch_slices * bias.position_slices * int64_t{sizeof(double)};
  return round_up(gemm_weight_sums_bias(problem, t) ? counted : slices, int64_t{1024});
}

// Returns the blocks that pack it.
int64_t pack_params(const Problem& problem, const Operand& x, void* target, GradientPackParams& p) {
  const int channels = x.planes == 2 ? kSplitPackChannels : 64;  // of a tile
  const int64_t blocks = plan_positions(problem, x.size[0], x.positions() / x.size[0], x.groups, x.channels,
                                        x.group_pitch, channels, x.data, target, p);
  if (x.planes == 2) p.vectors = p.group % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  return blocks;
}

// What of both tensors is packed, by this family; operands become what copies read.
struct Packs {
  Packs(const Problem& problem, const GemmWeightTile& t, const void* grad_output, const void* packed, const void* input,
        const GemmWeightPlaces& places)
      : inputs(input_operand(problem, input)), grads(grad_operand(problem, grad_output)) {
    direct = t.direct && reinterpret_cast<uintptr_t>(input) % 16 == 0;
    if (!direct && !as_it_lies(problem, inputs)) {
      blocks = pack_params(problem, inputs, places.input, p);
      inputs.data = places.input;
    }
    if (packed != nullptr) {
      grads.data = packed;
    } else if (!as_it_lies(problem, grads)) {
      more = pack_params(problem, grads, places.grad, q);
      grads.data = places.grad;
    }
  }

  Operand inputs, grads;
  bool direct;  // inputs are read as they lie, contiguous
  GradientPackParams p{}, q{};
  int64_t blocks = 0, more = 0;
};

template <typename T>
cudaError_t launch_pack(const Packs& packs, cudaStream_t stream) {
  const int64_t blocks = packs.blocks + packs.more;
  if (blocks == 0) return cudaSuccess;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  gemm_weight_pack_kernel<T><<<static_cast<unsigned>(blocks), kGradientPackThreads, 0, stream>>>(
      packs.p, packs.q, static_cast<int>(packs.blocks));
  return cudaGetLastError();
}

// Of a plane. `box`: positions, in the order of the tile's axes; `steps`: from one to the next.
cudaError_t make_map(const Problem& problem, const GemmWeightTile& t, const Operand& x, int plane, int channels,
                     const int (&box)[4], const int (&steps)[4], CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t pitch[4];
  pitch[3] = static_cast<cuuint64_t>(x.pitch()) * 2;
  for (int a = 2; a >= 0; --a) pitch[a] = pitch[a + 1] * static_cast<cuuint64_t>(x.size[a + 1]);
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(x.pitch())}, pitches[4];
  cuuint32_t boxes[5] = {static_cast<cuuint32_t>(channels)}, strides[5] = {1};
  for (int i = 0; i < 4; ++i) {
    dims[i + 1] = static_cast<cuuint64_t>(x.size[t.order[i]]), pitches[i] = pitch[t.order[i]];
    boxes[i + 1] = static_cast<cuuint32_t>(box[i] * steps[i]), strides[i + 1] = static_cast<cuuint32_t>(steps[i]);
  }
  const CUtensorMapSwizzle swizzle = channels == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : channels == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                      : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  void* const data = const_cast<char*>(static_cast<const char*>(x.data)) + plane * x.plane_bytes();
  return encode(&map, type, 5, data, dims, pitches, boxes, strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

// Contiguous inputs, channel by channel.
cudaError_t make_direct_map(const Problem& problem, const GemmWeightTile& t, const void* input, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t width = u(problem.axis[2].in), height = u(problem.axis[1].in), depth = u(problem.axis[0].in);
  const cuuint64_t dims[5] = {width, height, depth, u(problem.in_channels), u(problem.batch)};
  const cuuint64_t image = width * height * depth * 2;
  const cuuint64_t pitches[4] = {width * 2, width * height * 2, image, image * u(problem.in_channels)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(t.box[0]), static_cast<cuuint32_t>(t.box[1]),
                             static_cast<cuuint32_t>(t.box[2]), 64, static_cast<cuuint32_t>(t.box[3])};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 5, const_cast<void*>(input), dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                t.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

// `direct`: inputs are read as they lie.
GemmWeightParams make_params(const Problem& problem, const GemmWeightTile& t, bool direct, float* partial) {
  GemmWeightParams p{};
  int pitch = 1;
  p.row_bytes = kGemmWeightShapes[t.shape].width * 2;
  for (int i = 0; i < 4; ++i) {
    const int a = t.order[i];
    p.axis_of[i] = a;
    p.tiles[i] = static_cast<int>(t.tiles[i]), p.box[i] = t.box[i], p.pitch[i] = pitch;
    p.stride[i] = static_cast<int>(gemm_weight_stride(problem, a));
    p.padding[i] = a == 0 ? 0 : static_cast<int>(problem.axis[a - 1].padding);
    pitch *= t.box[i] + t.halo[i];
  }
  // Rows of a staged box of outputs at which groups of eight positions begin.
  const auto row_of = [&](int position) {
    int row = 0;
    for (int i = 0; i < 4; ++i) {
      row += position % t.box[i] * p.pitch[i];
      position /= t.box[i];
    }
    return row;
  };
  for (int j = 0; j < 4; ++j) p.step_at[j] = row_of(j * 16) * p.row_bytes / 16;
  p.group_pitch = row_of(8) * p.row_bytes / 16;
  p.all_tiles = static_cast<int>(t.all_tiles);
  p.splits = static_cast<int>(t.splits), p.kinds = static_cast<int>(t.kinds);
  p.in_blocks = t.in_blocks, p.channel_blocks = t.channel_blocks, p.slot_blocks = t.slot_blocks, p.slots = t.slots;
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.in_pitch = static_cast<int>(round_up(p.group_in, 8)), p.out_pitch = static_cast<int>(round_up(p.group_out, 8));
  std::array<GemmWeightTap, kGemmWeightMaxTaps> taps;
  p.taps = gemm_weight_taps(problem, taps);
  std::copy(taps.begin(), taps.begin() + p.taps, p.tap);
  p.all_slots = t.channel_blocks * p.taps;
  p.rows = t.rows, p.direct = direct;
  const int run = t.box[0] * t.box[1] * t.box[2];  // positions of a channel that lie together
  p.channel_bytes = run * 2;
  for (int j = 0; j < 4; ++j) p.input_at[j] = (j * 16 / run * 64 * run + j * 16 % run) * 2;
  p.input_swizzle = t.box[0] == 64 ? 0x70 : 0x30;
  p.swizzle = p.row_bytes == 128 ? 1 : p.row_bytes == 64 ? 2 : 3;
  p.boxes = t.boxes, p.box_bytes = t.box_bytes, p.box_copied = t.rows_of_box() * p.row_bytes;
  p.inputs_bytes = (t.rows ? 2 : 1) * kGemmWeightPositions * 128;
  p.stage_bytes = t.stage_bytes, p.stages = t.stages;
  p.weight_pitch = static_cast<int>(gemm_weight_pitch(problem));
  p.part = problem.in_channels * p.weight_pitch * p.taps;
  p.partial = partial;
  p.channels_last = problem.weight_layout == Layout::kChannelsLast;
  return p;
}

template <typename T, int kPlanes, int kShape = 0>
cudaError_t launch_shape(const GemmWeightTile& t, const GemmWeightParams& p, const GemmWeightMaps<kPlanes>& maps,
                         cudaStream_t stream) {
  if constexpr (kShape == kNumGemmWeightShapes) {
    return cudaErrorNotSupported;
  } else {
    if (t.shape != kShape) return launch_shape<T, kPlanes, kShape + 1>(t, p, maps, stream);
    constexpr GemmWeightShape kOf = kGemmWeightShapes[kShape];
    const auto kernel = gemm_weight_gradient_kernel<T, kOf.width / 8, kOf.slots, kPlanes>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kGemmWeightShared));
    if (error != cudaSuccess) return error;
    const int64_t shared = 1024 + kGemmWeightHead + int64_t{t.stages} * t.stage_bytes;
    const int cluster = t.clustered ? static_cast<int>(t.splits) : 1;
    return launch_early_clusters(kernel, dim3(static_cast<unsigned>(t.kinds * t.splits)), kGemmWeightThreads, shared,
                                 cluster, stream, p, maps);
  }
}

GemmWeightDefinition make_definition(const Problem& problem, const void* grad_output, const void* input) {
  GemmWeightDefinition d{};
  for (int a = 0; a < 3; ++a) d.axis[a] = axis_params(problem.axis[a]);
  d.in = input_strides(problem), d.out = output_strides(problem);
  d.batch = problem.batch;
  d.group_in = static_cast<int>(problem.in_channels_per_group());
  d.group_out = static_cast<int>(problem.out_channels_per_group());
  d.grad = grad_output, d.input = input;
  return d;
}

// Whether every two neighbours of a row of the weight stand aligned.
template <typename T>
bool has_pairs(const GemmWeightParams& p, const void* output) {
  const int64_t row = p.channels_last ? p.group_out : int64_t{p.group_out} * p.taps;
  return row % 2 == 0 && reinterpret_cast<uintptr_t>(output) % (2 * sizeof(T)) == 0;
}

// Sums of parts, of the bias as well unless it is null.
template <typename T>
cudaError_t launch_reduction(const Problem& problem, const Problem& products, const GemmWeightParams& p, void* output,
                             void* bias, cudaStream_t stream) {
  GemmWeightReduction r{};
  r.definition = p.definition;
  r.group_in = p.group_in, r.group_out = p.group_out, r.weight_pitch = p.weight_pitch;
  r.all_rows = static_cast<int>(problem.in_channels);
  // Blocks large enough to load much at a time, and enough of them; rows of 128 bytes if possible.
  const int pitch = p.taps | 1;
  const int room = static_cast<int>(std::min<int64_t>(kGemmWeightReduceSums, p.part / 528));
  r.channels = std::min(
      {p.weight_pitch, std::max(32, std::min(128, room / pitch / 8 * 8)), kGemmWeightReduceSums / pitch / 8 * 8});
  r.rows = std::max(1, room / (r.channels * pitch));
  const int blocks = ceil_div(p.weight_pitch, r.channels);
  r.channel_blocks = fast_divide(blocks), r.vectors = fast_divide(r.channels / 4), r.taps = fast_divide(p.taps);
  const int units = r.rows * r.channels / 4 * p.taps;
  r.splits = p.splits, r.shares = 1;
  while (r.shares < 32 && r.shares * 2 <= r.splits && r.shares * units < kGemmWeightReduceThreads) r.shares *= 2;
  r.pairs = p.group_out % 2 == 0 && reinterpret_cast<uintptr_t>(output) % (2 * sizeof(T)) == 0;
  r.channels_last = problem.weight_layout == Layout::kChannelsLast;
  r.part = p.part, r.partial = p.partial;
  r.output = output;
  r.bias_partial = p.bias_partial, r.bias = bias;
  r.out_channels = static_cast<int>(problem.out_channels), r.width = p.row_bytes / 2;
  r.groups = static_cast<int>(problem.groups);
  r.merged = static_cast<int>(products.out_channels / problem.out_channels);
  r.slots = p.slots, r.slot_blocks = p.slot_blocks, r.parts = p.splits * p.in_blocks * kGemmWeightBiasWarps;
  r.out_positions = problem.out_positions();
  const bool finished = p.output != nullptr;  // already
  r.weight_blocks = finished ? 0 : static_cast<int>(ceil_div(problem.in_channels, int64_t{r.rows}) * blocks);
  const int64_t grid = r.weight_blocks + (p.bias_partial != nullptr ? ceil_div(problem.out_channels, int64_t{32}) : 0);
  if (grid >= int64_t{1} << 31) return cudaErrorNotSupported;
  return launch_early(gemm_weight_reduction_kernel<T>, dim3(static_cast<unsigned>(grid)), kGemmWeightReduceThreads, 0,
                      stream, r);
}

struct WeightCall {
  GemmWeightPhase phase;
  const Problem& problem;
  const GemmGradientsPlan& plan;
  const void *grad_output, *packed, *input;
  void *grad_weight, *grad_bias;
  GemmWeightPlaces places;
};

template <typename T>
cudaError_t launch_products(const WeightCall& c, const Packs& packs, const GemmWeightParams& p, cudaStream_t stream) {
  const Problem& problem = c.plan.products;
  const GemmWeightTile& t = c.plan.weight;
  cudaError_t error = cudaSuccess;
  constexpr int kPlanes = sizeof(T) == 4 ? 2 : 1;
  GemmWeightMaps<kPlanes> maps;
  const int ones[4] = {1, 1, 1, 1};
  int box[4];
  for (int i = 0; i < 4; ++i) box[i] = t.box[i] + t.halo[i];
  for (int plane = 0; plane < kPlanes && error == cudaSuccess; ++plane) {
    error = packs.direct ? make_direct_map(problem, t, c.input, maps.input[plane])
                         : make_map(problem, t, packs.inputs, plane, 64, t.box, ones, maps.input[plane]);
    if (error == cudaSuccess) {
      error = make_map(problem, t, packs.grads, plane, p.row_bytes / 2, box, p.stride, maps.grad[plane]);
    }
  }
  using Multiplied = std::conditional_t<sizeof(T) == 4, __nv_bfloat16, T>;
  return error != cudaSuccess ? error : launch_shape<Multiplied, kPlanes>(t, p, maps, stream);
}

template <typename T>
cudaError_t launch_sums(const WeightCall& c, void* grad_bias, cudaStream_t stream) {
  const Problem& problem = c.plan.products;
  const GemmWeightTile& t = c.plan.weight;
  const Packs packs(problem, t, c.grad_output, c.packed, c.input, c.places);
  const bool sums = c.phase != GemmWeightPhase::kRest;
  cudaError_t error = c.packed != nullptr || !sums ? cudaSuccess : launch_pack<T>(packs, stream);
  if (error != cudaSuccess) return error;
  char* const place = static_cast<char*>(c.places.sums);
  float* const partial = place == nullptr ? nullptr : reinterpret_cast<float*>(place + bias_bytes(problem, t));
  GemmWeightParams p = make_params(problem, t, packs.direct, partial);
  p.definition = make_definition(c.problem, c.grad_output, c.input);
  if (c.plan.form == GemmGradientsForm::kUnrolled) {
    p.definition.unrolled_taps = static_cast<int>(c.problem.kernel_positions());
  } else if (c.plan.form == GemmGradientsForm::kMerged) {
    p.definition.merged_taps = static_cast<int>(c.problem.axis[2].kernel);
  }
  p.pairs = has_pairs<T>(p, c.grad_weight);
  p.eights = p.channels_last && p.group_out % 8 == 0 && reinterpret_cast<uintptr_t>(c.grad_weight) % 16 == 0;
  if (gemm_weight_finishes(problem, t)) p.output = c.grad_weight;
  p.clustered = t.clustered;
  if (grad_bias != nullptr) p.bias_partial = reinterpret_cast<float*>(place);
  if (sums) error = launch_products<T>(c, packs, p, stream);
  const bool rest = c.phase != GemmWeightPhase::kSums && (p.output == nullptr || grad_bias != nullptr);
  if (error != cudaSuccess || !rest) return error;
  return launch_reduction<T>(c.problem, problem, p, c.grad_weight, grad_bias, stream);
}

cudaError_t launch_call(const WeightCall& c, cudaStream_t stream) {
  return dispatch_up_to_float32(c.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool sums_bias = c.grad_weight != nullptr && gemm_weight_sums_bias(c.plan.products, c.plan.weight);
    cudaError_t error = cudaSuccess;
    if (c.grad_weight != nullptr) error = launch_sums<T>(c, sums_bias ? c.grad_bias : nullptr, stream);
    if (error != cudaSuccess || c.grad_bias == nullptr || sums_bias || c.phase == GemmWeightPhase::kSums) return error;
    return launch_bias<T>(c.problem, make_bias_params(c.problem, c.grad_output, c.grad_bias, c.places.sums), stream);
  });
}

}  // namespace

int64_t gemm_weight_sums_bytes(const Problem& problem, const GemmWeightTile& t) {
  const int64_t part = problem.in_channels * gemm_weight_pitch(problem) * problem.kernel_positions() * 4;
  return bias_bytes(problem, t) + (gemm_weight_finishes(problem, t) ? 0 : round_up(t.splits * part, int64_t{1024}));
}
int64_t gemm_weight_input_bytes(const Problem& problem, const GemmWeightTile& t, const void* input) {
  const bool direct = t.direct && reinterpret_cast<uintptr_t>(input) % 16 == 0;
  const Operand x = input_operand(problem, input);
  return direct || as_it_lies(problem, x) ? 0 : x.bytes();
}
int64_t gemm_weight_grad_bytes(const Problem& problem, const void* grad_output) {
  const Operand x = grad_operand(problem, grad_output);
  return as_it_lies(problem, x) ? 0 : x.bytes();
}

int64_t gemm_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                       const void* /*weight*/) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return 0;
  const GemmWeightTile& t = last_result<gemm_weight_tile>(problem);
  return gemm_weight_sums_bytes(problem, t) + gemm_weight_input_bytes(problem, t, input) +
         gemm_weight_grad_bytes(problem, grad_output);
}
int64_t gemm_weight_gradient_workspace(const Problem& problem) {
  const void* const unaligned = reinterpret_cast<const void*>(1);
  return gemm_weight_gradient_workspace(problem, unaligned, unaligned, nullptr);
}

cudaError_t launch_packed_gemm_weight_gradient(const Problem& problem, const GemmGradientsPlan& plan,
                                               const void* grad_output, const void* packed, const void* input,
                                               void* grad_weight, void* grad_bias, const GemmWeightPlaces& places,
                                               GemmWeightPhase phase, cudaStream_t stream) {
  return launch_call({phase, problem, plan, grad_output, packed, input, grad_weight, grad_bias, places}, stream);
}

cudaError_t launch_gemm_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                        void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  if (grad_bias != nullptr && !problem.has_bias) return cudaErrorNotSupported;  // there is no room for its sums
  const GemmWeightTile& t = last_result<gemm_weight_tile>(problem);
  char* const base = static_cast<char*>(workspace);
  char* const packed_input = base + gemm_weight_sums_bytes(problem, t);
  const GemmGradientsPlan plan{GemmGradientsForm::kTurned, problem, {}, t, 0, false};
  return launch_call({GemmWeightPhase::kAll,
                      problem,
                      plan,
                      grad_output,
                      nullptr,
                      input,
                      grad_weight,
                      grad_bias,
                      {base, packed_input, packed_input + gemm_weight_input_bytes(problem, t, input)}},
                     stream);
}

}  // namespace fastconvt::cuda
