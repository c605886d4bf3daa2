// The tensors of the gradients by pairs as copies read them.
#pragma once

#include "pairs_gradient_params.h"
#include "tensor_map.h"

namespace fastconvt::cuda {

// Boxes of a contiguous tensor (batch, channels, depth, height, width) with these sizes.
struct PairsTensor {
  const void* data;
  int64_t width, height, depth, channels, batch;
};

// A box: of a batch entry. `swizzle_bytes` of its lines: 128, 64, 32, or 0.
inline bool make_pairs_map(CUtensorMapDataType type, int element, const PairsTensor& x, int width, int height,
                           int depth, int channels, int swizzle_bytes, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const auto u = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  const auto b = [](int v) { return static_cast<cuuint32_t>(v); };
  const cuuint64_t dims[5] = {u(x.width), u(x.height), u(x.depth), u(x.channels), u(x.batch)};
  cuuint64_t pitches[4], pitch = u(element);
  for (int i = 0; i < 4; ++i) pitches[i] = pitch *= dims[i];
  const cuuint32_t box[5] = {b(width), b(height), b(depth), b(channels), 1}, steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                           : CU_TENSOR_MAP_SWIZZLE_NONE;
  return encode(&map, type, 5, const_cast<void*>(x.data), dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

inline PairsTensor pairs_output(const Problem& p, const void* data) {
  return {data, p.axis[2].out(), p.axis[1].out(), p.axis[0].out(), p.out_channels, p.batch};
}

// The input; where rows are no whole vectors, of rows of whole images.
inline PairsTensor pairs_input(const Problem& p, const void* data) {
  if (pairs_reads_images(p)) return {data, p.in_positions(), 1, 1, p.in_channels, p.batch};
  return {data, p.axis[2].in, p.axis[1].in, p.axis[0].in, p.in_channels, p.batch};
}

// The weight's rows, in boxes of 128 bytes by `channels`.
inline bool make_pairs_weight_map(CUtensorMapDataType type, int element, const Problem& p, const void* weight,
                                  int64_t inner, int channels, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(p.in_channels)};
  const cuuint64_t pitches[1] = {dims[0] * static_cast<cuuint64_t>(element)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / element), static_cast<cuuint32_t>(channels)};
  const cuuint32_t steps[2] = {1, 1};
  return encode(&map, type, 2, const_cast<void*>(weight), dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fastconvt::cuda
