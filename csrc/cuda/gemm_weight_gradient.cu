// The weight's gradient as one matrix product, host side: packing, the maps of the tensors that copies read, and the
// template instance that multiplies.
#include "gemm_weight_gradient.cuh"

#include <algorithm>
#include <limits>

#include "dispatch.h"
#include "gemm_gradients.h"
#include "gemm_weight_gradient_maps.h"
#include "gemm_weight_gradient_pack.cuh"
#include "gemm_weight_gradient_reduction.cuh"
#include "gradient_gemm_pack_plan.h"
#include "launchers.h"
#include "rows_bias_gradient.cuh"

namespace fastconvt::cuda {
namespace {

// Partial sums: those of the bias, then those of the weight.
int64_t bias_bytes(const Problem& problem, const GemmWeightTile& t) {
  if (!problem.has_bias) return 0;
  if (gemm_weight_sums_bias(problem, t)) return gemm_weight_bias_bytes(problem, t);
  const BiasGradientParams bias = make_bias_params(problem, nullptr, nullptr, nullptr);
  return round_up(int64_t{bias.channels} * bias.batch_slices * bias.position_slices * int64_t{sizeof(double)},
                  int64_t{512});
}

// Returns the blocks that pack it.
int64_t pack_params(const Problem& problem, const GemmWeightOperand& x, void* target, GradientPackParams& p) {
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
      : inputs(gemm_weight_input(problem, input)), grads(gemm_weight_grad(problem, grad_output)) {
    direct = t.direct && reinterpret_cast<uintptr_t>(input) % 16 == 0;
    if (!direct && !gemm_weight_lies(problem, inputs)) {
      blocks = pack_params(problem, inputs, places.input, p);
      inputs.data = places.input;
    }
    if (packed != nullptr) {
      grads.data = packed;
    } else if (!gemm_weight_lies(problem, grads)) {
      more = pack_params(problem, grads, places.grad, q);
      grads.data = places.grad;
    }
  }

  GemmWeightOperand inputs, grads;
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

// `direct`: inputs are read as they lie.
GemmWeightParams make_params(const Problem& problem, const GemmWeightTile& t, bool direct) {
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
  p.by_splits = fast_divide(t.clustered ? p.splits : p.kinds), p.by_taps = fast_divide(p.taps);
  p.by_slot_blocks = fast_divide(p.slot_blocks), p.by_in_blocks = fast_divide(p.in_blocks);
  for (int i = 0; i < 4; ++i) p.by_tiles[i] = fast_divide(p.tiles[i]);
  p.share = p.all_tiles / p.splits, p.more = p.all_tiles % p.splits;
  p.rows = t.rows, p.direct = direct, p.clustered = t.clustered;
  const int run = t.box[0] * t.box[1] * t.box[2];  // positions of a channel that lie together
  p.channel_bytes = run * 2;
  for (int j = 0; j < 4; ++j) p.input_at[j] = (j * 16 / run * 64 * run + j * 16 % run) * 2;
  p.input_swizzle = t.box[0] == 64 ? 0x70 : 0x30;
  p.swizzle = p.row_bytes == 128 ? 1 : p.row_bytes == 64 ? 2 : 3;
  p.boxes = t.boxes, p.box_bytes = t.box_bytes, p.box_copied = t.rows_of_box() * p.row_bytes;
  p.inputs_bytes = (t.rows ? 2 : 1) * kGemmWeightPositions * 128;
  p.stage_bytes = t.stage_bytes, p.stages = gemm_weight_stages(problem, t);
  p.items = static_cast<int>(t.kinds * t.splits);
  p.staged = gemm_weight_apart_bytes(problem, t) > 0 ? p.stages * t.stage_bytes : 0;
  p.weight_pitch = static_cast<int>(gemm_weight_pitch(problem));
  p.part = problem.in_channels * p.weight_pitch * p.taps;
  p.channels_last = problem.weight_layout == Layout::kChannelsLast;
  return p;
}

// Those of the bias come first, at the place of those that are further if there is one.
void place_parts(const Problem& problem, const GemmWeightTile& t, const GemmWeightPlaces& places, bool sums_bias,
                 GemmWeightParams& p) {
  char *const near = static_cast<char*>(places.sums), *const far = static_cast<char*>(places.far_sums);
  if (sums_bias) p.bias_partial = reinterpret_cast<float*>(far != nullptr ? far : near);
  p.step = p.part, p.far_row = std::numeric_limits<int>::max();
  if (far == nullptr) {
    if (near != nullptr) p.partial = reinterpret_cast<float*>(near + bias_bytes(problem, t));
    return;
  }
  p.partial = reinterpret_cast<float*>(near);
  p.step = p.part / 2, p.far_row = static_cast<int>(problem.in_channels / 2);
  const intptr_t apart = reinterpret_cast<intptr_t>(far) + bias_bytes(problem, t) - reinterpret_cast<intptr_t>(near);
  p.further = apart / static_cast<intptr_t>(sizeof(float)) - p.part / 2;
}

template <typename T, int kPlanes, int kShape = 0>
cudaError_t launch_shape(const Problem& problem, const GemmWeightTile& t, const GemmWeightParams& p,
                         const GemmWeightMaps<kPlanes>& maps, cudaStream_t stream) {
  if constexpr (kShape == kNumGemmWeightShapes) {
    return cudaErrorNotSupported;
  } else {
    if (t.shape != kShape) return launch_shape<T, kPlanes, kShape + 1>(problem, t, p, maps, stream);
    constexpr GemmWeightShape kOf = kGemmWeightShapes[kShape];
    const auto kernel = gemm_weight_gradient_kernel<T, kOf.width / 8, kOf.slots, kPlanes>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kGemmWeightShared));
    if (error != cudaSuccess) return error;
    const int64_t apart = gemm_weight_apart_bytes(problem, t);
    const int64_t shared = 1024 + kGemmWeightHead + int64_t{p.stages} * t.stage_bytes + apart;
    const int cluster = t.clustered ? static_cast<int>(t.splits) : 1;
    const unsigned blocks = static_cast<unsigned>(apart > 0 ? kGemmWeightProcessors : t.kinds * t.splits);
    return launch_early_clusters(kernel, dim3(blocks), kGemmWeightThreads, shared, cluster, stream, p, maps);
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

// Rows and channels of a block that turns parts; returns the blocks.
template <typename T>
int64_t plan_turning(const GemmWeightParams& p, GemmWeightReduction& r) {
  // Blocks large enough to load much at a time, and enough of them; rows of 128 bytes if possible.
  const int pitch = p.taps | 1;
  const int room = static_cast<int>(std::min<int64_t>(kGemmWeightReduceSums, p.part / 528));
  r.channels = std::min(
      {p.weight_pitch, std::max(32, std::min(128, room / pitch / 8 * 8)), kGemmWeightReduceSums / pitch / 8 * 8});
  r.rows = std::max(1, room / (r.channels * pitch));
  const int blocks = ceil_div(p.weight_pitch, r.channels);
  r.channel_blocks = fast_divide(blocks), r.vectors = fast_divide(r.channels / 4);
  const int units = r.rows * r.channels / 4 * p.taps;
  while (r.shares < 32 && r.shares * 2 <= r.splits && r.shares * units < kGemmWeightReduceThreads) r.shares *= 2;
  r.pairs = p.group_out % 2 == 0 && reinterpret_cast<uintptr_t>(r.output) % (2 * sizeof(T)) == 0;
  r.channels_last = p.channels_last;
  return ceil_div(int64_t{r.all_rows}, int64_t{r.rows}) * blocks;
}

// Sums of parts, of the bias as well unless it is null.
template <typename T>
cudaError_t launch_reduction(const Problem& problem, const Problem& products, const GemmWeightParams& p, void* output,
                             void* bias, cudaStream_t stream) {
  GemmWeightReduction r{};
  r.definition = p.definition;
  r.group_in = p.group_in, r.group_out = p.group_out, r.weight_pitch = p.weight_pitch;
  r.all_rows = static_cast<int>(problem.in_channels);
  r.splits = p.splits, r.shares = 1, r.taps = fast_divide(p.taps);
  r.part = p.part, r.step = p.step, r.far_row = p.far_row, r.further = p.further;
  r.partial = p.partial, r.output = output;
  r.bias_partial = p.bias_partial, r.bias = bias;
  r.out_channels = static_cast<int>(problem.out_channels), r.width = p.row_bytes / 2;
  r.groups = static_cast<int>(problem.groups);
  r.merged = static_cast<int>(products.out_channels / problem.out_channels);
  r.slots = p.slots, r.slot_blocks = p.slot_blocks, r.parts = p.splits * p.bias_blocks * kGemmWeightBiasWarps;
  r.out_positions = problem.out_positions();
  const bool finished = p.output != nullptr;  // already
  const bool as_it_lies =
      p.channels_last && p.group_out == p.weight_pitch && reinterpret_cast<uintptr_t>(output) % (4 * sizeof(T)) == 0;
  int64_t blocks = 0;
  if (finished || as_it_lies) {
    const int64_t units = p.part / 4;
    while (r.shares < 32 && r.shares * 2 <= r.splits && r.shares * units < kGemmWeightReduceThreads * 528)
      r.shares *= 2;
    blocks = finished ? 0 : ceil_div(units, int64_t{kGemmWeightReduceThreads / r.shares});
  } else {
    blocks = plan_turning<T>(p, r);
  }
  r.bias_blocks = p.bias_partial != nullptr ? ceil_div(r.out_channels, 32) : 0;
  const int64_t grid = blocks + r.bias_blocks;
  if (grid >= int64_t{1} << 31) return cudaErrorNotSupported;
  const auto kernel = finished || as_it_lies ? gemm_weight_sum_kernel<T> : gemm_weight_reduction_kernel<T>;
  return launch_early(kernel, dim3(static_cast<unsigned>(grid)), kGemmWeightReduceThreads, 0, stream, r);
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
    error = packs.direct ? make_gemm_weight_direct_map(problem, t, c.input, maps.input[plane])
                         : make_gemm_weight_map(problem, t, packs.inputs, plane, 64, t.box, ones, maps.input[plane]);
    if (error == cudaSuccess) {
      error = make_gemm_weight_map(problem, t, packs.grads, plane, p.row_bytes / 2, box, p.stride, maps.grad[plane]);
    }
  }
  using Multiplied = std::conditional_t<sizeof(T) == 4, __nv_bfloat16, T>;
  if (error == cudaSuccess && p.boxes_out) error = make_gemm_weight_output_map(problem, t, p.output, maps.output);
  return error != cudaSuccess ? error : launch_shape<Multiplied, kPlanes>(problem, t, p, maps, stream);
}

template <typename T>
cudaError_t launch_sums(const WeightCall& c, void* grad_bias, cudaStream_t stream) {
  const Problem& problem = c.plan.products;
  const GemmWeightTile& t = c.plan.weight;
  const Packs packs(problem, t, c.grad_output, c.packed, c.input, c.places);
  const bool sums = c.phase != GemmWeightPhase::kRest;
  cudaError_t error = c.packed != nullptr || !sums ? cudaSuccess : launch_pack<T>(packs, stream);
  if (error != cudaSuccess) return error;
  GemmWeightParams p = make_params(problem, t, packs.direct);
  place_parts(problem, t, c.places, grad_bias != nullptr, p);
  p.definition = make_definition(c.problem, c.grad_output, c.input);
  if (c.plan.form == GemmGradientsForm::kUnrolled) {
    p.definition.unrolled_taps = static_cast<int>(c.problem.kernel_positions());
  } else if (c.plan.form == GemmGradientsForm::kMerged) {
    p.definition.merged_taps = static_cast<int>(c.problem.axis[2].kernel);
  }
  p.pairs = has_pairs<T>(p, c.grad_weight);
  p.eights = p.channels_last && p.group_out % 8 == 0 && reinterpret_cast<uintptr_t>(c.grad_weight) % 16 == 0;
  if (gemm_weight_finishes(problem, t)) p.output = c.grad_weight;
  p.boxes_out = p.output != nullptr && sizeof(T) == 2 && p.eights && !t.clustered;
  p.bias_blocks = gemm_weight_bias_blocks(t);
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
  return bias_bytes(problem, t) + (gemm_weight_finishes(problem, t) ? 0 : round_up(t.splits * part, int64_t{512}));
}
int64_t gemm_weight_far_sums_bytes(const Problem& problem, const GemmWeightTile& t) {
  return gemm_weight_sums_bytes(problem, t) - gemm_weight_near_bytes(problem, t);
}
int64_t gemm_weight_input_bytes(const Problem& problem, const GemmWeightTile& t, const void* input) {
  const bool direct = t.direct && reinterpret_cast<uintptr_t>(input) % 16 == 0;
  const GemmWeightOperand x = gemm_weight_input(problem, input);
  return direct || gemm_weight_lies(problem, x) ? 0 : x.bytes();
}
int64_t gemm_weight_grad_bytes(const Problem& problem, const void* grad_output) {
  const GemmWeightOperand x = gemm_weight_grad(problem, grad_output);
  return gemm_weight_lies(problem, x) ? 0 : x.bytes();
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
