// The shuffle GEMM over planes, host side: parameters of a problem, and the template instance that runs it.
#include "shuffle_planes.cuh"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

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
  p.row_tiles = fast_divide(t.row_tiles), p.tiles = fast_divide(t.tiles);
  p.depth = fast_divide(static_cast<int>(shuffle_planes_depth(problem)));
  p.width = fast_divide(static_cast<int>(problem.axis[2].in));
  p.kernel_depth = fast_divide(static_cast<int>(problem.axis[0].kernel));
  p.items = static_cast<int>(t.items);
  p.height = static_cast<int>(shuffle_planes_height(problem)), p.lines = t.lines;
  p.in_channels = static_cast<int>(problem.in_channels), p.out_channels = static_cast<int>(problem.out_channels);
  p.rows = static_cast<int>(problem.out_channels * problem.kernel_positions());
  p.kernel_height = static_cast<int>(problem.axis[1].kernel);
  while (1 << p.taps_shift < problem.axis[1].kernel * problem.axis[2].kernel) ++p.taps_shift;
  p.chunks = t.chunks;
  p.slots = t.slots, p.slot_bytes = t.slot_bytes, p.pitch = t.pitch, p.stages = t.stages;
  p.run_bytes = t.run_bytes, p.buffer_bytes = t.buffer_bytes, p.skews = t.skews, p.copy = t.copy;
  p.slots_begin = t.slots_begin, p.staging = t.staging, p.barriers = t.barriers, p.places = t.places;
  p.input_plane = int64_t{p.height} * problem.axis[2].in;
  p.output_plane = p.input_plane * problem.axis[1].kernel * problem.axis[2].kernel;
  p.input_channel = problem.in_positions(), p.output_channel = problem.out_positions();
  p.next_channel = p.output_channel - problem.axis[0].kernel * p.output_plane;
  return p;
}

int64_t packed_bytes(const ShufflePlanesTile& t) { return int64_t{t.row_tiles} * t.chunks * kShufflePlanesStage; }

cudaError_t pack_planes(const Problem& problem, const ShufflePlanesTile& t, const void* weight, void* packed,
                        cudaStream_t stream) {
  const int blocks = t.row_tiles * 4, count = t.chunks * 64 * blocks;
  pack_planes_weights<<<ceil_div(count, kPlanesPackThreads), kPlanesPackThreads, 0, stream>>>(
      static_cast<const uint4*>(weight), static_cast<uint4*>(packed), fast_divide(blocks),
      static_cast<int>(problem.in_channels), t.chunks,
      static_cast<int>(problem.out_channels * problem.kernel_positions()),
      problem.axis[1].kernel == 2 && problem.axis[2].kernel == 2, count);
  return cudaGetLastError();
}

template <typename T, int kTaps, int kColumns>
cudaError_t launch_planes_kernel(const ShufflePlanesTile& t, const ShufflePlanesParams& p, cudaStream_t stream) {
  const auto kernel = shuffle_planes_kernel<T, kTaps, kColumns>;
  int resident = 0;
  const cudaError_t error = count_resident_blocks(kernel, kShufflePlanesThreads<kColumns>, t.shared_bytes,
                                                  static_cast<int>(kShufflePlanesShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  // As few as make them all in the same time: more of them have whole tiles.
  const int blocks = ceil_div(p.items, ceil_div(p.items, std::min(resident, p.items)));
  return launch_early(kernel, dim3(blocks), kShufflePlanesThreads<kColumns>, t.shared_bytes, stream, p);
}

template <typename T, int kTaps>
cudaError_t dispatch_planes_columns(const ShufflePlanesTile& t, const ShufflePlanesParams& p, cudaStream_t stream) {
  switch (t.columns) {
    case 112:
      return launch_planes_kernel<T, kTaps, 112>(t, p, stream);
    case 200:
      return launch_planes_kernel<T, kTaps, 200>(t, p, stream);
    case 216:
      return launch_planes_kernel<T, kTaps, 216>(t, p, stream);
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t launch_planes_tile(const Problem& problem, const ShufflePlanesTile& t, const void* input,
                               const void* weight, const void* bias, void* output, void* workspace,
                               cudaStream_t stream) {
  ShufflePlanesParams p = make_planes_params(problem, t, input, weight, bias, output);
  p.packed = workspace;
  const cudaError_t error = pack_planes(problem, t, weight, workspace, stream);
  if (error != cudaSuccess) return error;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) -> cudaError_t {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) != 2) {
      return cudaErrorNotSupported;
    } else {
      return problem.axis[2].kernel == 2 ? dispatch_planes_columns<T, 2>(t, p, stream)
                                         : dispatch_planes_columns<T, 4>(t, p, stream);
    }
  });
}

}  // namespace

int64_t shuffle_planes_workspace(const Problem& problem, const void* input, const void* weight) {
  const ShufflePlanesTile& t = shuffle_planes_tile(problem);
  if (planes_suit(t, input, weight)) return packed_bytes(t);
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
