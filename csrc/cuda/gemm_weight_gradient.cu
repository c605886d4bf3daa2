// The weight's gradient as one matrix product, host side: packing, the maps of the tensors that copies read, and the
// template instance that multiplies.
#include "gemm_weight_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "gemm_weight_gradient_pack.cuh"
#include "gemm_weight_gradient_reduction.cuh"
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

// The workspace: partial sums of the bias, of the weight, the packed input, the packed gradient of the output.
struct Workspace {
  int64_t partial, input, grad, bytes;

  static int64_t bias_bytes(const Problem& problem, const GemmWeightTile& t) {
    const int64_t counted = t.splits * kGemmWeightBiasWarps * problem.groups * t.slot_blocks * kGemmWeightBiasBlocks *
                            kGemmWeightShapes[t.shape].width * int64_t{sizeof(float)};
    const BiasGradientParams bias = make_bias_params(problem, nullptr, nullptr, nullptr);
    return std::max(counted,
                    int64_t{bias.channels} * bias.batch_slices * bias.position_slices * int64_t{sizeof(double)});
  }
  explicit Workspace(const Problem& problem, const GemmWeightTile& t) {
    partial = problem.has_bias ? round_up(bias_bytes(problem, t), int64_t{1024}) : 0;
    const int64_t part = problem.in_channels * gemm_weight_pitch(problem) * problem.kernel_positions() * 4;
    input = partial + round_up(t.splits * part, int64_t{1024});
    grad = input + input_operand(problem, nullptr).bytes();
    bytes = grad + grad_operand(problem, nullptr).bytes();
  }
};

// Returns the blocks that pack it.
int64_t pack_params(const Problem& problem, const Operand& x, void* target, GradientPackParams& p) {
  p.source = x.data, p.target = target;
  p.turned = problem.layout == Layout::kChannelsLast;
  p.groups = static_cast<int>(x.groups), p.group = static_cast<int>(x.channels);
  p.group_pitch = static_cast<int>(x.group_pitch), p.pitch = static_cast<int>(x.pitch());
  if (p.group == p.group_pitch) p.group *= p.groups, p.group_pitch = p.pitch, p.groups = 1;  // all as one
  p.image = static_cast<int>(x.positions() / x.size[0]);
  p.vectors = p.image % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  p.positions = x.positions();
  if (x.planes == 2) p.vectors = p.group % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  if (p.turned) return ceil_div(p.positions, int64_t{kGradientPackPositions});
  const int columns = ceil_div(p.group_pitch, x.planes == 2 ? kSplitPackChannels : 64),
            rows = ceil_div(p.image, kGradientPackPositions);
  p.tile_positions = static_cast<int>(round_up(ceil_div(p.image, rows), 8));
  p.tile_columns = fast_divide(columns), p.tile_groups = fast_divide(p.groups), p.tile_rows = fast_divide(rows);
  return x.size[0] * p.groups * columns * rows;
}

// Packs what needs it; operands become what copies read.
template <typename T>
cudaError_t launch_pack(const Problem& problem, Operand& input, bool input_is_read, Operand& grad, bool grad_is_read,
                        void* packed_input, void* packed_grad, cudaStream_t stream) {
  GradientPackParams p{}, q{};
  int64_t blocks = 0, more = 0;
  if (!input_is_read && !as_it_lies(problem, input))
    blocks = pack_params(problem, input, packed_input, p), input.data = packed_input;
  if (!grad_is_read && !as_it_lies(problem, grad))
    more = pack_params(problem, grad, packed_grad, q), grad.data = packed_grad;
  if (blocks + more == 0) return cudaSuccess;
  if (blocks + more >= int64_t{1} << 31) return cudaErrorNotSupported;
  gemm_weight_pack_kernel<T>
      <<<static_cast<unsigned>(blocks + more), kGradientPackThreads, 0, stream>>>(p, q, static_cast<int>(blocks));
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
    return launch_early(kernel, dim3(static_cast<unsigned>(t.kinds * t.splits)), kGemmWeightThreads, shared, stream, p,
                        maps);
  }
}

template <typename T>
cudaError_t launch_reduction(const Problem& problem, const GemmWeightParams& p, const void* grad_output,
                             const void* input, void* output, void* bias, cudaStream_t stream) {
  GemmWeightReduction r{};
  for (int a = 0; a < 3; ++a) r.axis[a] = axis_params(problem.axis[a]);
  r.in = input_strides(problem), r.out = output_strides(problem);
  r.batch = problem.batch;
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
  r.grad = grad_output, r.input = input, r.output = output;
  r.bias_partial = p.bias_partial, r.bias = bias;
  r.out_channels = static_cast<int>(problem.out_channels), r.width = p.row_bytes / 2;
  r.slots = p.slots, r.slot_blocks = p.slot_blocks, r.parts = p.splits * kGemmWeightBiasWarps;
  r.out_positions = problem.out_positions();
  r.weight_blocks = static_cast<int>(ceil_div(problem.in_channels, int64_t{r.rows}) * blocks);
  const int64_t grid = r.weight_blocks + (p.bias_partial != nullptr ? ceil_div(problem.out_channels, int64_t{32}) : 0);
  if (grid >= int64_t{1} << 31) return cudaErrorNotSupported;
  return launch_early(gemm_weight_reduction_kernel<T>, dim3(static_cast<unsigned>(grid)), kGemmWeightReduceThreads, 0,
                      stream, r);
}

template <typename T>
cudaError_t launch_tile(const Problem& problem, const GemmWeightTile& t, const void* grad_output, const void* packed,
                        const void* input, void* grad_weight, void* grad_bias, char* workspace, cudaStream_t stream) {
  const Workspace places(problem, t);
  cudaError_t error = cudaSuccess;
  const bool sums_bias = grad_bias != nullptr && grad_weight != nullptr && gemm_weight_sums_bias(problem, t);
  if (grad_bias != nullptr && !sums_bias) {
    error = launch_bias<T>(problem, make_bias_params(problem, grad_output, grad_bias, workspace), stream);
    if (error != cudaSuccess) return error;
  }
  if (grad_weight == nullptr) return cudaSuccess;
  Operand inputs = input_operand(problem, input), grads = grad_operand(problem, grad_output);
  if (packed != nullptr && grads.planes == 2) packed = nullptr;  // it has another form
  if (packed != nullptr) grads.data = packed;
  const bool direct = t.direct && reinterpret_cast<uintptr_t>(input) % 16 == 0;
  error = launch_pack<T>(problem, inputs, direct, grads, packed != nullptr, workspace + places.input,
                         workspace + places.grad, stream);
  if (error != cudaSuccess) return error;
  GemmWeightParams p = make_params(problem, t, direct, reinterpret_cast<float*>(workspace + places.partial));
  if (sums_bias) p.bias_partial = reinterpret_cast<float*>(workspace);
  constexpr int kPlanes = sizeof(T) == 4 ? 2 : 1;
  GemmWeightMaps<kPlanes> maps;
  const int ones[4] = {1, 1, 1, 1};
  int box[4];
  for (int i = 0; i < 4; ++i) box[i] = t.box[i] + t.halo[i];
  for (int plane = 0; plane < kPlanes && error == cudaSuccess; ++plane) {
    error = direct ? make_direct_map(problem, t, input, maps.input[plane])
                   : make_map(problem, t, inputs, plane, 64, t.box, ones, maps.input[plane]);
    if (error == cudaSuccess) {
      error = make_map(problem, t, grads, plane, p.row_bytes / 2, box, p.stride, maps.grad[plane]);
    }
  }
  using Multiplied = std::conditional_t<sizeof(T) == 4, __nv_bfloat16, T>;
  if (error == cudaSuccess) error = launch_shape<Multiplied, kPlanes>(t, p, maps, stream);
  if (error != cudaSuccess) return error;
  return launch_reduction<T>(problem, p, grad_output, input, grad_weight, sums_bias ? grad_bias : nullptr, stream);
}

cudaError_t launch_any(const Problem& problem, const GemmWeightTile& t, const void* grad_output, const void* packed,
                       const void* input, void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_tile<T>(problem, t, grad_output, packed, input, grad_weight, grad_bias, static_cast<char*>(workspace),
                          stream);
  });
}

}  // namespace

int64_t gemm_weight_gradient_workspace(const Problem& problem) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return 0;
  return Workspace(problem, last_result<gemm_weight_tile>(problem)).bytes;
}

cudaError_t launch_packed_gemm_weight_gradient(const Problem& problem, const void* grad_output, const void* packed,
                                               const void* input, void* grad_weight, void* grad_bias, void* workspace,
                                               cudaStream_t stream) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_any(problem, last_result<gemm_weight_tile>(problem), grad_output, packed, input, grad_weight, grad_bias,
                    workspace, stream);
}

cudaError_t launch_gemm_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                        void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  return launch_packed_gemm_weight_gradient(problem, grad_output, nullptr, input, grad_weight, grad_bias, workspace,
                                            stream);
}

}  // namespace fastconvt::cuda
