// The row family on tensor cores, host side: parameters of a problem and the template instance that runs it.
#include "rows_mma.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

RowsMmaParams rows_mma_params(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  RowsMmaParams p{};
  set_height(height, p);
  p.padding = static_cast<int>(width.padding);
  p.in_width = static_cast<int>(width.in);
  p.out_width = static_cast<int>(width.out());
  p.batch = static_cast<int>(problem.batch);
  p.tile = rows_mma_tile(problem);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.in_channels = p.tile.merged * p.group_in;
  p.out_channels = p.tile.merged * p.group_out;
  p.groups = static_cast<int>(problem.groups) / p.tile.merged;
  p.first_base = static_cast<int>(height.base(0));
  p.end_base = static_cast<int>(height.base(height.out() - 1)) + 1;
  p.vector_input = p.in_channels % 4 == 0 && aligned(input, 4 * problem.element_size());
  p.vector_output = p.out_channels * problem.element_size() % 16 == 0 && aligned(output, 16);
  p.bases = p.batch * (p.end_base - p.first_base);
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.strip_offset = p.tile.columns / rows_mma_strips(problem.element_size()) * p.in.axis[2];
  p.input = input, p.weight = weight, p.output = output;
  p.rectify = rectifier(problem);
  p.bias = problem.has_bias ? bias : nullptr;
  return p;
}

// Cuts the work for `waves` parts a block.
void cut(RowsMmaParams& p, int blocks, int waves) {
  const int sets = p.groups * p.tile.channel_blocks * p.tile.segments;
  p.parts = static_cast<int>(std::clamp<int64_t>(int64_t{blocks} * waves / sets, 1, p.bases));
  p.items = sets * p.parts;
}

// Neighbouring bases of the height share input rows, so parts are long. Where they are long enough, more of them let
// blocks that run at the same time write close to each other.
void cut(RowsMmaParams& p, int blocks) {
  cut(p, blocks, 4);
  if (p.bases / p.parts < 2 * p.tile.span) cut(p, blocks, 1);
}

template <class Traits>
cudaError_t launch(RowsMmaParams& p, cudaStream_t stream) {
  const int shared = static_cast<int>(p.tile.shared_bytes), threads = p.tile.warps * 32;
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(rows_mma_kernel<Traits>, threads, shared, kRowsMmaShared, blocks);
  if (error != cudaSuccess) return error;
  // Whole multiples of the channel blocks: a block then keeps its weights.
  const int channel_blocks = p.groups * p.tile.channel_blocks;
  int grid = std::max(1, blocks);
  if (grid > channel_blocks) grid -= grid % channel_blocks;
  cut(p, grid);
  rows_mma_kernel<Traits><<<std::min(grid, p.items), threads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kShape = 0>
cudaError_t dispatch_rows_mma(const Axis& width, RowsMmaParams& p, cudaStream_t stream) {
  if constexpr (kShape == kNumRowsMmaShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr RowsMmaShape kOf = kRowsMmaShapes[kShape];
    if (width.kernel == kOf.kernel && width.stride == kOf.stride && width.dilation == kOf.dilation) {
      return launch<RowsMmaTraits<T, kOf.kernel, kOf.stride, kOf.dilation>>(p, stream);
    }
    return dispatch_rows_mma<T, kShape + 1>(width, p, stream);
  }
}

}  // namespace

cudaError_t launch_rows_mma(const Problem& problem, const void* input, const void* weight, const void* bias,
                            void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!rows_mma_refusal(problem).empty()) return cudaErrorNotSupported;
  RowsMmaParams p = rows_mma_params(problem, input, weight, bias, output);
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_rows_mma<T>(problem.axis[2], p, stream);
  });
}

}  // namespace fastconvt::cuda
