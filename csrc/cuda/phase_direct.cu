// The phase-direct family, host side: parameters of a problem, the map that tensor copies read, and the template
// instance that runs it.
#include "phase_direct.cuh"

#include <algorithm>

#include "launchers.h"
#include "occupancy.h"
#include "params.h"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

PhaseDirectParams phase_direct_params(const Problem& problem, const PhaseDirectShape& shape, const void* input,
                                      const void* weight, const void* bias, void* output) {
  PhaseDirectParams p{};
  p.input = static_cast<const float*>(input), p.weight = static_cast<const float*>(weight);
  p.bias = problem.has_bias ? static_cast<const float*>(bias) : nullptr, p.output = static_cast<float*>(output);
  p.rectify = rectifier(problem);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.in_batch = in.batch, p.in_channel = in.channel, p.in_pixel = static_cast<int>(in.axis[2]);
  p.out_batch = out.batch, p.out_channel = out.channel, p.out_pixel = static_cast<int>(out.axis[2]);
  p.channels = static_cast<int>(problem.in_channels);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  const bool last = problem.weight_layout == Layout::kChannelsLast;
  p.weight_channel = last ? 1 : static_cast<int>(problem.kernel_positions());
  p.weight_tap = last ? p.group_out : 1;
  p.all_tiles = static_cast<int>(problem.batch);
  for (int a = 0; a < 2; ++a) {
    const Axis& axis = problem.axis[a + 1];
    const int tiles = static_cast<int>(phase_direct_tiles(axis, shape, a + 1));
    p.in[a] = static_cast<int>(axis.in), p.out[a] = static_cast<int>(axis.out());
    p.padding[a] = static_cast<int>(axis.padding),
    p.first_cell[a] = static_cast<int>(phase_direct_first_cell(axis, shape, a + 1));
    p.tiles[a] = fast_divide(tiles), p.all_tiles *= tiles;
  }
  p.vectors = p.out_pixel == 1 && (p.first_cell[1] * shape.stride - p.padding[1]) % 4 == 0 && p.out[1] % 4 == 0 &&
              reinterpret_cast<uintptr_t>(output) % 16 == 0;
  return p;
}

PhaseDirectFill choose_fill(const Problem& problem, const void* input) {
  const bool aligned = reinterpret_cast<uintptr_t>(input) % 16 == 0 && tensor_map_encoder() != nullptr;
  if (problem.layout == Layout::kContiguous) {
    return aligned && problem.axis[2].in % 4 == 0 ? PhaseDirectFill::kPlanes : PhaseDirectFill::kElements;
  }
  return aligned && problem.in_channels_per_group() % 4 == 0 ? PhaseDirectFill::kPixels : PhaseDirectFill::kElements;
}

template <class Traits>
cudaError_t make_map(const Problem& problem, PhaseDirectParams& p) {
  if (Traits::kFill == PhaseDirectFill::kElements) return cudaSuccess;
  const cuuint64_t width = p.in[1], height = p.in[0], channels = p.channels, batch = problem.batch;
  const cuuint32_t columns = Traits::kPitch, rows = Traits::kHeight, steps[4] = {1, 1, 1, 1};
  const cuuint64_t plane_dims[3] = {width, height, channels * batch}, planes[2] = {width * 4, width * height * 4};
  const cuuint64_t pixel_dims[4] = {channels, width, height, batch};
  const cuuint64_t pixels[3] = {channels * 4, channels * width * 4, channels * width * height * 4};
  const cuuint32_t plane_box[3] = {columns, rows, 1}, pixel_box[4] = {4, columns, rows, 1};
  constexpr bool kPixels = Traits::kPixels;
  return tensor_map_encoder()(&p.map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kPixels ? 4 : 3, const_cast<float*>(p.input),
                              kPixels ? pixel_dims : plane_dims, kPixels ? pixels : planes,
                              kPixels ? pixel_box : plane_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

template <class Traits>
cudaError_t launch(const Problem& problem, PhaseDirectParams& p, cudaStream_t stream) {
  cudaError_t error = make_map<Traits>(problem, p);
  if (error != cudaSuccess) return error;
  const int shared = Traits::shared_bytes(p.group_in);
  int resident = 0;
  error = count_resident_blocks(phase_direct_kernel<Traits>, Traits::kThreads, shared,
                                static_cast<int>(kPhaseDirectShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  const int channels = static_cast<int>(problem.out_channels);
  const dim3 grid(std::min(p.all_tiles, std::max(resident / channels, 1)), channels);
  phase_direct_kernel<Traits><<<grid, Traits::kThreads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <int kShape>
cudaError_t dispatch_shape(const Problem& problem, int shape, PhaseDirectParams& p, cudaStream_t stream) {
  if constexpr (kShape == static_cast<int>(kPhaseDirectShapes.size())) {
    return cudaErrorNotSupported;
  } else {
    if (shape != kShape) return dispatch_shape<kShape + 1>(problem, shape, p, stream);
    switch (choose_fill(problem, p.input)) {
      case PhaseDirectFill::kPlanes:
        return launch<PhaseDirectTraits<kShape, PhaseDirectFill::kPlanes>>(problem, p, stream);
      case PhaseDirectFill::kPixels:
        return launch<PhaseDirectTraits<kShape, PhaseDirectFill::kPixels>>(problem, p, stream);
      default:
        return launch<PhaseDirectTraits<kShape, PhaseDirectFill::kElements>>(problem, p, stream);
    }
  }
}

}  // namespace

cudaError_t launch_phase_direct(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!phase_direct_refusal(problem).empty()) return cudaErrorNotSupported;
  const int shape = phase_direct_shape(problem);
  PhaseDirectParams p = phase_direct_params(problem, kPhaseDirectShapes[shape], input, weight, bias, output);
  return dispatch_shape<0>(problem, shape, p, stream);
}

}  // namespace fastconvt::cuda
