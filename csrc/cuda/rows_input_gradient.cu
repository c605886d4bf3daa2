#include "rows_input_gradient.cuh"

#include <algorithm>

#include "dispatch.h"

namespace fastconvt::cuda {
namespace {

RowsInputGradientParams make_params(const Problem& problem, const RowsInputGradientTile& tile, const void* grad_output,
                                    const void* weight, void* grad_input) {
  RowsInputGradientParams p{};
  p.height = axis_params(problem.axis[1]);
  p.width = axis_params(problem.axis[2]);
  p.grad = row_source(problem, output_strides(problem), p.width.out, tile.channels, 16, grad_output);
  p.grad_input = input_strides(problem);
  p.weight = weight;
  p.output = grad_input;
  p.in_channels = static_cast<int>(tile.in_channels);
  p.out_channels = static_cast<int>(tile.out_channels);
  p.group_inputs = static_cast<int>(problem.in_channels_per_group());
  p.group_outputs = static_cast<int>(problem.out_channels_per_group());
  p.tiles = static_cast<int>(rows_input_gradient_tiles(problem, tile));
  p.by_channel_block = fast_divide(static_cast<int>(ceil_div(p.in_channels, kInputGradientChannels)));
  p.by_group = fast_divide(static_cast<int>(problem.groups / tile.merged));
  p.by_segment = fast_divide(static_cast<int>(ceil_div(p.width.in, tile.positions)));
  p.by_row_tile = fast_divide(static_cast<int>(ceil_div(p.height.in, tile.rows)));
  p.warps_x = static_cast<int>(tile.warps_x);
  p.rows = static_cast<int>(tile.rows);
  p.channels = static_cast<int>(tile.channels);
  p.chunks = static_cast<int>(tile.chunks);
  p.steps = static_cast<int>(tile.steps);
  p.columns = static_cast<int>(tile.columns);
  p.pitch = static_cast<int>(tile.pitch);
  p.row_step = static_cast<int>(tile.row_step);
  p.candidates = static_cast<int>(tile.candidates);
  p.max_rows = static_cast<int>(tile.max_rows);
  p.stages = static_cast<int>(tile.stages);
  p.weight_words = static_cast<int>(tile.weight_words);
  return p;
}

// As many blocks as the device holds, and a multiple of the kinds of weights where possible: a block keeps one kind.
template <typename Kernel>
cudaError_t launch(Kernel kernel, const RowsInputGradientParams& params, int shared, cudaStream_t stream) {
  int device = 0, processors = 0, blocks = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kRowsThreads, shared);
  }
  if (error != cudaSuccess) return error;
  const int kinds = params.by_channel_block.divisor * params.by_group.divisor;
  int grid = std::max(1, processors * blocks);
  if (kinds <= grid) grid -= grid % kinds;
  kernel<<<std::min(grid, params.tiles), kRowsThreads, shared, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_rows_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                       void* grad_input, cudaStream_t stream) {
  if (!rows_input_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const RowsInputGradientTile tile = rows_input_gradient_tile(problem);
  const RowsInputGradientParams params = make_params(problem, tile, grad_output, weight, grad_input);
  const int shared = static_cast<int>(tile.shared_bytes);
  switch (problem.dtype) {
    case DType::kFloat16:
      return launch(rows_input_gradient_kernel<__half, RowsOperands::kAsIs>, params, shared, stream);
    case DType::kBFloat16:
      return launch(rows_input_gradient_kernel<__nv_bfloat16, RowsOperands::kAsIs>, params, shared, stream);
    default:
      return problem.allow_tf32
                 ? launch(rows_input_gradient_kernel<float, RowsOperands::kRound>, params, shared, stream)
                 : launch(rows_input_gradient_kernel<float, RowsOperands::kSplit>, params, shared, stream);
  }
}

}  // namespace fastconvt::cuda
