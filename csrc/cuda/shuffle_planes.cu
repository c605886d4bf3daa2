// The shuffle GEMM over planes, host side: parameters of a problem, the map of its weights, and the template instance
// that runs it.
#include "shuffle_planes.cuh"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

bool is_aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether copies can read the tensors; the shuffle GEMM reads the others.
bool planes_suit(const ShufflePlanesTile& t, const void* input, const void* weight) {
  return is_aligned(input, t.copy) && is_aligned(weight, 16);
}

ShufflePlanesParams make_planes_params(const Problem& problem, const ShufflePlanesTile& t, const void* input,
                                       const void* weight, const void* bias, void* output) {
  ShufflePlanesParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectifier = rectifier(problem);
  p.parts = fast_divide(t.parts), p.tiles = fast_divide(t.tiles);
  p.depth = fast_divide(static_cast<int>(shuffle_planes_depth(problem)));
  p.width = fast_divide(static_cast<int>(problem.axis[2].in));
  p.kernel_depth = fast_divide(static_cast<int>(problem.axis[0].kernel));
  p.items = static_cast<int>(t.items);
  p.height = static_cast<int>(shuffle_planes_height(problem)), p.lines = t.lines;
  p.in_channels = static_cast<int>(problem.in_channels), p.out_channels = static_cast<int>(problem.out_channels);
  p.rows = static_cast<int>(problem.out_channels * problem.kernel_positions());
  p.kernel_height = static_cast<int>(problem.axis[1].kernel);
  while (1 << p.taps_shift < problem.axis[1].kernel * problem.axis[2].kernel) ++p.taps_shift;
  p.part = t.part, p.chunks = t.chunks;
  p.slots = t.slots, p.slot_bytes = t.slot_bytes, p.pitch = t.pitch, p.stages = t.stages;
  p.run_bytes = t.run_bytes, p.skews = t.skews, p.copy = t.copy;
  p.slots_begin = t.slots_begin, p.staging = t.staging, p.barriers = t.barriers, p.table = t.table;
  p.input_plane = int64_t{p.height} * problem.axis[2].in;
  p.output_plane = p.input_plane * problem.axis[1].kernel * problem.axis[2].kernel;
  p.input_channel = problem.in_positions(), p.output_channel = problem.out_positions();
  return p;
}

int64_t packed_rows(const Problem& problem) {
  return round_up(problem.out_channels * problem.kernel_positions(), int64_t{16});
}

cudaError_t pack_planes(const Problem& problem, const void* weight, void* packed, cudaStream_t stream) {
  const int blocks = static_cast<int>(packed_rows(problem) / 16);
  const int count = static_cast<int>(problem.in_channels * blocks);
  pack_planes_weights<<<ceil_div(count, kPlanesPackThreads), kPlanesPackThreads, 0, stream>>>(
      static_cast<const uint4*>(weight), static_cast<uint4*>(packed), fast_divide(blocks),
      static_cast<int>(problem.out_channels * problem.kernel_positions()), count);
  return cudaGetLastError();
}

cudaError_t make_planes_map(const Problem& problem, const void* weight, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t rows = packed_rows(problem);
  const cuuint64_t dims[2] = {rows, static_cast<cuuint64_t>(problem.in_channels)}, pitches[1] = {rows * 2};
  const cuuint32_t box[2] = {64, 64}, steps[2] = {1, 1};
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 2, const_cast<void*>(weight), dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

template <typename T, int kTaps, int kColumns>
cudaError_t launch_planes_kernel(const ShufflePlanesTile& t, const ShufflePlanesParams& p, const CUtensorMap& weights,
                                 cudaStream_t stream) {
  const auto kernel = shuffle_planes_kernel<T, kTaps, kColumns>;
  int resident = 0;
  const cudaError_t error = count_resident_blocks(kernel, kShufflePlanesThreads, t.shared_bytes,
                                                  static_cast<int>(kShufflePlanesShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  return launch_early(kernel, dim3(std::min(resident, p.items)), kShufflePlanesThreads, t.shared_bytes, stream, weights,
                      p);
}

template <typename T, int kTaps>
cudaError_t dispatch_planes_columns(const ShufflePlanesTile& t, const ShufflePlanesParams& p,
                                    const CUtensorMap& weights, cudaStream_t stream) {
  switch (t.columns) {
    case 112:
      return launch_planes_kernel<T, kTaps, 112>(t, p, weights, stream);
    case 200:
      return launch_planes_kernel<T, kTaps, 200>(t, p, weights, stream);
    case 216:
      return launch_planes_kernel<T, kTaps, 216>(t, p, weights, stream);
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t launch_planes_tile(const Problem& problem, const ShufflePlanesTile& t, const void* input,
                               const void* weight, const void* bias, void* output, void* workspace,
                               cudaStream_t stream) {
  const ShufflePlanesParams p = make_planes_params(problem, t, input, weight, bias, output);
  CUtensorMap weights;
  cudaError_t error = pack_planes(problem, weight, workspace, stream);
  if (error == cudaSuccess) error = make_planes_map(problem, workspace, weights);
  if (error != cudaSuccess) return error;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) -> cudaError_t {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) != 2) {
      return cudaErrorNotSupported;
    } else {
      return problem.axis[2].kernel == 2 ? dispatch_planes_columns<T, 2>(t, p, weights, stream)
                                         : dispatch_planes_columns<T, 4>(t, p, weights, stream);
    }
  });
}

}  // namespace

int64_t shuffle_planes_workspace(const Problem& problem, const void* input, const void* weight) {
  if (planes_suit(shuffle_planes_tile(problem), input, weight)) {
    return problem.in_channels * packed_rows(problem) * 2;
  }
  return shuffle_gemm_workspace(problem, input, weight);
}

cudaError_t launch_shuffle_planes(const Problem& problem, const void* input, const void* weight, const void* bias,
                                  void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!shuffle_planes_refusal(problem).empty()) return cudaErrorNotSupported;
  const ShufflePlanesTile& t = shuffle_planes_tile(problem);
  if (planes_suit(t, input, weight) && is_aligned(output, 16)) {
    return launch_planes_tile(problem, t, input, weight, bias, output, workspace, stream);
  }
  return launch_shuffle_gemm(problem, input, weight, bias, output, workspace, stream);
}

}  // namespace fastconvt::cuda
