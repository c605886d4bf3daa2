// The tensors of the weight's gradient as one matrix product, as copies read and write them.
#pragma once

#include "../core/gemm_weight_gradient.h"
#include "tensor_map.h"

namespace fastconvt::cuda {

// A tensor with channels innermost, in rows of whole vectors of 16 bytes; float32 as two planes.
struct GemmWeightOperand {
  const void* data;
  int planes;
  int64_t groups, channels, group_pitch;  // channels of a group, and their pitch
  int64_t size[4];                        // batch, depth, height, width

  int64_t positions() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t pitch() const { return groups * group_pitch; }
  int64_t bytes() const { return round_up(planes * plane_bytes(), int64_t{1024}); }
  int64_t plane_bytes() const { return positions() * pitch() * 2; }
};

inline GemmWeightOperand gemm_weight_input(const Problem& problem, const void* data) {
  return {data,
          problem.dtype == DType::kFloat32 ? 2 : 1,
          problem.groups,
          problem.in_channels_per_group(),
          round_up(problem.in_channels_per_group(), int64_t{8}),
          {problem.batch, problem.axis[0].in, problem.axis[1].in, problem.axis[2].in}};
}
inline GemmWeightOperand gemm_weight_grad(const Problem& problem, const void* data) {
  return {data,
          problem.dtype == DType::kFloat32 ? 2 : 1,
          problem.groups,
          problem.out_channels_per_group(),
          round_up(problem.out_channels_per_group(), int64_t{8}),
          {problem.batch, problem.axis[0].out(), problem.axis[1].out(), problem.axis[2].out()}};
}

inline bool gemm_weight_lies(const Problem& problem, const GemmWeightOperand& x) {
  return x.planes == 1 && gemm_weight_as_it_lies(problem, x.channels) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// Of a plane. `box`: positions, in the order of the tile's axes; `steps`: from one to the next.
inline cudaError_t make_gemm_weight_map(const Problem& problem, const GemmWeightTile& t, const GemmWeightOperand& x,
                                        int plane, int channels, const int (&box)[4], const int (&steps)[4],
                                        CUtensorMap& map) {
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
inline cudaError_t make_gemm_weight_direct_map(const Problem& problem, const GemmWeightTile& t, const void* input,
                                               CUtensorMap& map) {
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

// The weight's gradient with channels innermost, in boxes of 64 rows of a slot.
inline cudaError_t make_gemm_weight_output_map(const Problem& problem, const GemmWeightTile& t, void* output,
                                               CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t channels = u(problem.out_channels_per_group()), taps = u(problem.kernel_positions());
  const cuuint64_t rows = u(problem.in_channels_per_group());
  const cuuint64_t dims[4] = {channels, taps, rows, u(problem.groups)};
  const cuuint64_t pitches[3] = {channels * 2, channels * taps * 2, channels * taps * rows * 2};
  const cuuint32_t width = static_cast<cuuint32_t>(kGemmWeightShapes[t.shape].width);
  const cuuint32_t box[4] = {width, 1, 64, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMapSwizzle swizzle = width == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : width == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode(&map, type, 4, output, dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

}  // namespace fastconvt::cuda
