// The host side of depthwise_gradients_channels.cuh.
#include "depthwise_gradients_channels.cuh"

#include <algorithm>
#include <iterator>

#include "depthwise_gradients_tile.h"
#include "dispatch.h"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

// A tensor in channels_last, and the box of it that is copied at a time: (channel, column, row, plane, sample).
cudaError_t make_map(const Problem& problem, const void* tensor, int64_t width, int64_t height, int64_t depth,
                     const cuuint32_t (&box)[5], CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t pixel = static_cast<cuuint64_t>(problem.in_channels * problem.element_size());
  const cuuint64_t w = width, h = height, d = depth;
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(problem.in_channels), w, h, d,
                               static_cast<cuuint64_t>(problem.batch)};
  const cuuint64_t pitches[4] = {pixel, w * pixel, h * w * pixel, d * h * w * pixel};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = problem.dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 5, const_cast<void*>(tensor), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

template <class Traits>
cudaError_t launch(const Problem& problem, const DepthwiseGradientsTile& t, DepthwiseGradientsParams p,
                   const DepthwiseWeightParams& whole, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(typename Traits::T), kChannels = Traits::kChannels, kAligned = 128 / kSize;
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.grad_batch = out.batch, p.grad_channel = out.channel, p.grad_plane = out.axis[0];
  p.input_batch = in.batch, p.input_channel = in.channel, p.input_plane = in.axis[0];
  p.grad_row = static_cast<int>(out.axis[1]), p.input_row = static_cast<int>(in.axis[1]);
  p.grad_column = static_cast<int>(out.axis[2]), p.input_column = static_cast<int>(in.axis[2]);
  p.weight_elements = problem.weight_elements();
  p.channels = static_cast<int>(problem.in_channels), p.channel_tiles = static_cast<int>(t.channel_tiles);
  p.slots = static_cast<int>(t.slots), p.groups = static_cast<int>(t.groups);
  p.threads = p.slots * p.groups * 32;
  p.tile = static_cast<int>(t.tile);
  p.depth_rows = static_cast<int>(t.depth_rows), p.height_rows = static_cast<int>(t.height_rows);
  p.depth_bases = static_cast<int>(t.depth_bases), p.height_bases = static_cast<int>(t.height_bases);
  p.units = static_cast<int>(t.units), p.splits = static_cast<int>(t.splits);

  const int64_t sums = 128 + (Traits::kSums + 1) * Traits::kThreads * 4;
  const int64_t planes =
      Traits::kDepth > 1 ? round_up(t.slots * t.height_rows * t.tile * kChannels * 4, int64_t{128}) : 0;
  const int64_t columns = (t.tile - 1) * Traits::kStride + Traits::kKernel;
  const int64_t most = std::min<int64_t>({Traits::kChain, t.height_bases, 256 / height.stride});
  int64_t bases = ceil_div(t.height_bases, ceil_div(t.height_bases, most)), total = 0;
  for (;; bases = std::min(bases - 1, ceil_div(t.height_bases, ceil_div(t.height_bases, bases) + 1))) {
    const int64_t row = columns * kChannels, plane = bases * height.stride * row, slot = plane * depth.stride;
    const int64_t input_plane = bases * t.tile * kChannels, input_slot = input_plane * Traits::kDepth;
    p.bases = static_cast<int>(bases), p.slabs = static_cast<int>(ceil_div(t.height_bases, bases));
    p.grad_pitch = static_cast<int>(row), p.grad_plane_pitch = static_cast<int>(plane);
    p.grad_slot = static_cast<int>(round_up(slot, kAligned)), p.grad_base = static_cast<int>(height.stride * row);
    p.input_plane_pitch = static_cast<int>(input_plane),
    p.input_slot = static_cast<int>(round_up(input_slot, kAligned));
    p.input_base = static_cast<int>(t.tile * kChannels);
    p.slot_bytes = static_cast<int>((slot + input_slot) * kSize);
    p.input_place = p.grad_slot * p.slots;
    p.stage = p.input_place + p.input_slot * p.slots;
    p.sums_place = 128, p.planes_place = static_cast<int>(sums), p.stages_place = static_cast<int>(sums + planes);
    total = p.stages_place + kDepthwiseStages * p.stage * kSize;
    if (bases == 1 || total <= kDepthwiseGradientsShared / Traits::kResident) break;
  }
  p.by_depth_dilation = fast_divide(p.axis[0].dilation), p.by_height_dilation = fast_divide(p.axis[1].dilation);
  p.by_group = fast_divide(p.groups);
  p.by_tile = fast_divide(static_cast<int>(t.tiles));
  p.by_height_part = fast_divide(static_cast<int>(t.height_parts));
  p.by_depth_part = fast_divide(static_cast<int>(t.depth_parts));
  const int64_t blocks = t.splits * t.channel_tiles;
  if (blocks >= int64_t{1} << 31 || columns > 256) return cudaErrorNotSupported;
  if (p.bases * height.stride > 256) return cudaErrorNotSupported;
  const cuuint32_t channels = kChannels, rows = static_cast<cuuint32_t>(p.bases);
  const cuuint32_t grad_box[5] = {channels, static_cast<cuuint32_t>(columns),
                                  static_cast<cuuint32_t>(rows * height.stride), static_cast<cuuint32_t>(depth.stride),
                                  1};
  const cuuint32_t input_box[5] = {channels, static_cast<cuuint32_t>(t.tile), rows, Traits::kDepth, 1};
  CUtensorMap grad_map, input_map;
  cudaError_t error = make_map(problem, p.grad, width.out(), height.out(), depth.out(), grad_box, grad_map);
  if (error == cudaSuccess) error = make_map(problem, p.input, width.in, height.in, depth.in, input_box, input_map);
  const auto kernel = depthwise_gradients_channels_kernel<Traits>;
  if (error == cudaSuccess) error = allow_depthwise_shared(kernel, total);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, static_cast<size_t>(total), stream>>>(p, whole, grad_map,
                                                                                                  input_map);
  return cudaGetLastError();
}

template <typename T, int kShape = 0>
cudaError_t dispatch_shape(const Problem& problem, const DepthwiseGradientsTile& t, const DepthwiseGradientsParams& p,
                           const DepthwiseWeightParams& whole, cudaStream_t stream) {
  if constexpr (kShape < static_cast<int>(std::size(kDepthwiseGradientsChannels))) {
    return t.shape == kShape ? launch<DepthwiseGradientsTraits<T, kShape, true>>(problem, t, p, whole, stream)
                             : dispatch_shape<T, kShape + 1>(problem, t, p, whole, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t launch_depthwise_gradients_channels(const Problem& problem, const DepthwiseGradientsTile& t,
                                                const DepthwiseGradientsParams& p, const DepthwiseWeightParams& whole,
                                                cudaStream_t stream) {
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    return dispatch_shape<typename decltype(tag)::type>(problem, t, p, whole, stream);
  });
}

}  // namespace fastconvt::cuda
