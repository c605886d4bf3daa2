// What the gradients in TF32 from contiguous tensors (pairs_tf32_gradients.cu, boxes_tf32_gradients.cu) share on the
// host beside their launchers: the maps by which copies read tensors.
#pragma once

#include <type_traits>

#include "aligned_gradients.h"
#include "tensor_map.h"

namespace fastconvt::cuda {

// Copies round to TF32. Sizes and boxes are width, height, depth, channels, batch.
inline bool make_tf32_map(const void* data, const int64_t (&size)[5], const int (&box)[5], CUtensorMapSwizzle swizzle,
                          CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t dims[5], pitches[4], pitch = 4;
  cuuint32_t boxes[5] = {}, steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    dims[i] = static_cast<cuuint64_t>(size[i]), boxes[i] = static_cast<cuuint32_t>(box[i]);
    if (i > 0) pitches[i - 1] = pitch;
    pitch *= dims[i];
  }
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 5, const_cast<void*>(data), dims, pitches, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// launch(tiles of a block for the input's gradient, for the weight's), both as types.
template <class Plan, class Launch>
cudaError_t dispatch_tiles(const Plan& t, const Launch& launch) {
  using Tiles8 = std::integral_constant<int, 8>;
  using Tiles16 = std::integral_constant<int, 16>;
  using Tiles32 = std::integral_constant<int, 32>;
  if (t.input_tiles == 8) return launch(Tiles8{}, Tiles8{});
  if (t.input_tiles == 16) {
    return t.weight_tiles == 16 ? launch(Tiles16{}, Tiles16{}) : launch(Tiles16{}, Tiles32{});
  }
  return t.weight_tiles == 16 ? launch(Tiles32{}, Tiles16{}) : launch(Tiles32{}, Tiles32{});
}

}  // namespace fastconvt::cuda
