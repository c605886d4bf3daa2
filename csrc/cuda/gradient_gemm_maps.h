// The tensors of a gradient GEMM as its copies read and write them.
#pragma once

#include "gradient_gemm_params.h"
#include "tensor_map.h"

namespace fastconvt::cuda {

// cuTensorMapEncodeIm2col of the driver, as tensor_map_encoder() finds its like: its copies walk through the positions
// of a convolution.
inline decltype(&cuTensorMapEncodeIm2col) im2col_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(encode);
}

struct GradientGemmMaps {
  CUtensorMap positions, weights, gradients;
};

inline CUtensorMapSwizzle swizzle_of(const GradientGemmParams& p) {
  return p.swizzle == 1   ? CU_TENSOR_MAP_SWIZZLE_128B
         : p.swizzle == 2 ? CU_TENSOR_MAP_SWIZZLE_64B
                          : CU_TENSOR_MAP_SWIZZLE_32B;
}
inline CUtensorMapDataType type_of(const Problem& problem) {
  return problem.dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
// The same of what is multiplied: copies round to TF32.
inline CUtensorMapDataType operand_type_of(const Problem& problem) {
  return problem.dtype == DType::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : type_of(problem);
}

// The output's gradient, channels innermost: copies walk through the input's positions.
inline bool make_position_map(const Problem& problem, const GradientGemmParams& p, const void* tensor,
                              CUtensorMap& map) {
  const auto encode = im2col_map_encoder();
  if (encode == nullptr) return false;
  const int rank = p.rank;
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(p.out_channels)}, pitches[4];
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  int lower[3] = {0, 0, 0}, upper[3] = {0, 0, 0};
  cuuint64_t pitch = p.out_channels * problem.element_size();
  for (int i = 0; i < rank; ++i) {
    const Axis& axis = problem.axis[2 - i];
    dims[i + 1] = static_cast<cuuint64_t>(axis.out());
    steps[i + 1] = static_cast<cuuint32_t>(axis.stride);
    lower[i] = static_cast<int>(-axis.padding);
    upper[i] = static_cast<int>(axis.padding - (axis.kernel - 1) * axis.dilation - axis.output_padding);
    pitches[i] = pitch;
    pitch *= static_cast<cuuint64_t>(axis.out());
  }
  dims[rank + 1] = static_cast<cuuint64_t>(problem.batch), pitches[rank] = pitch;
  return encode(&map, operand_type_of(problem), rank + 2, const_cast<void*>(tensor), dims, pitches, lower, upper,
                p.chunk, p.rows, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(p),
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline bool make_weight_map(const Problem& problem, const GradientGemmParams& p, const void* tensor, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t channels = static_cast<cuuint64_t>(p.group_pitch);
  const cuuint64_t taps = static_cast<cuuint64_t>(problem.kernel_positions()),
                   bytes = channels * problem.element_size();
  const cuuint64_t dims[3] = {channels, taps, static_cast<cuuint64_t>(problem.in_channels)};
  const cuuint64_t pitches[2] = {bytes, bytes * taps};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(p.chunk), 1, static_cast<cuuint32_t>(p.columns)};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(&map, operand_type_of(problem), 3, const_cast<void*>(tensor), dims, pitches, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(p), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The weight as it lies, for windows: a row for each input channel.
inline bool make_window_map(const Problem& problem, const GradientGemmParams& p, const void* tensor, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t row = static_cast<cuuint64_t>(problem.out_channels * problem.kernel_positions());
  const cuuint64_t dims[3] = {row, 1, static_cast<cuuint64_t>(problem.in_channels)}, pitches[2] = {row * 2, row * 2};
  const cuuint32_t box[3] = {kGradientGemmWindowInner, 1, static_cast<cuuint32_t>(p.columns)}, steps[3] = {1, 1, 1};
  return encode(&map, type_of(problem), 3, const_cast<void*>(tensor), dims, pitches, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The input as it lies, for windows of the weight's gradient: an image's positions, images, channels.
inline bool make_image_map(const Problem& problem, const GradientGemmParams& p, const void* tensor, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t image = u(problem.in_positions());
  const cuuint64_t dims[3] = {image, u(problem.batch), u(problem.in_channels)};
  const cuuint64_t pitches[2] = {image * u(problem.in_channels) * 2, image * 2};
  const cuuint32_t box[3] = {kGradientGemmWindowInner, 1, static_cast<cuuint32_t>(p.columns)}, steps[3] = {1, 1, 1};
  return encode(&map, type_of(problem), 3, const_cast<void*>(tensor), dims, pitches, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The input's gradient as it is stored: channels of a group first or positions of a batch entry.
inline bool make_gradient_map(const Problem& problem, const GradientGemmParams& p, CUtensorMap& map) {
  if (p.store != GradientGemmStore::kBoxes) return true;
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t group = static_cast<cuuint64_t>(p.group_in), groups = static_cast<cuuint64_t>(problem.groups);
  const cuuint64_t image = static_cast<cuuint64_t>(p.image.divisor), element = problem.element_size();
  const cuuint64_t positions = static_cast<cuuint64_t>(p.positions), batch = static_cast<cuuint64_t>(problem.batch);
  const cuuint32_t width = static_cast<cuuint32_t>(p.line_bytes / element), half = p.rows / 2,
                   columns = p.staged_columns;
  const cuuint64_t turned[4] = {group, groups, positions, 1}, dims[4] = {image, group, groups, batch};
  const cuuint64_t all = element * group * groups;
  const cuuint64_t turned_pitches[3] = {element * group, all, all * positions};
  const cuuint64_t pitches[3] = {element * image, element * image * group, all * image};
  const cuuint32_t turned_box[4] = {width, 1, half, 1}, box[4] = {width, columns, 1, 1}, steps[4] = {1, 1, 1, 1};
  return encode(&map, type_of(problem), 4, p.grad_input, p.contiguous ? dims : turned,
                p.contiguous ? pitches : turned_pitches, p.contiguous ? box : turned_box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                p.line_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fastconvt::cuda
