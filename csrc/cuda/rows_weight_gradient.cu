#include "rows_weight_gradient.cuh"

#include <algorithm>

#include "dispatch.h"
#include "rows_bias_gradient.cuh"

namespace fastconvt::cuda {
namespace {

// Blocks that the device holds at a time.
int64_t resident_blocks() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || processors < 1) {
    processors = 128;
  }
  return processors * kWeightGradientBlocks;
}

// Parts of the sum over batch and positions, each made by its own blocks.
int64_t count_splits(const Problem& problem, const RowsWeightGradientTile& tile) {
  constexpr int64_t kMaxElements = int64_t{8} << 20;  // of all partial sums together
  const int64_t rows = problem.batch * problem.axis[1].in * ceil_div(problem.axis[2].in, tile.positions);
  const int64_t splits = std::min({resident_blocks() / rows_weight_gradient_blocks(problem, tile), ceil_div(rows, 4),
                                   kMaxElements / problem.weight_elements(), rows_weight_gradient_most_parts(problem)});
  return std::max<int64_t>(1, splits);
}

// Of a block whose warps keep 16 * rows by 8 * columns sums each, which they add up at the end.
int64_t rows_weight_gradient_shared(const RowsWeightGradientTile& tile, int rows, int columns) {
  return std::max<int64_t>(tile.shared_bytes, 4 * kRowsWarps * rows * columns * 128);
}

RowsWeightGradientParams make_params(const Problem& problem, const RowsWeightGradientTile& tile,
                                     const void* grad_output, const void* input, void* grad_weight, void* workspace) {
  RowsWeightGradientParams p{};
  p.height = axis_params(problem.axis[1]);
  p.width = axis_params(problem.axis[2]);
  p.grad = row_source(problem, output_strides(problem), p.width.out, tile.groups * tile.out_channels, 16, grad_output);
  p.input = row_source(problem, input_strides(problem), p.width.in, tile.groups * tile.in_channels, 8, input);
  p.partial = static_cast<float*>(workspace);
  p.output = grad_weight;
  p.weight_elements = problem.weight_elements();
  p.splits = static_cast<int>(count_splits(problem, tile));
  p.batch = static_cast<int>(problem.batch);
  p.group_blocks = static_cast<int>(problem.groups / tile.groups);
  p.groups = static_cast<int>(tile.groups);
  p.in_channels = static_cast<int>(problem.in_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels_per_group());
  p.segments = static_cast<int>(ceil_div(p.width.in, tile.positions));
  p.positions = static_cast<int>(tile.positions);
  p.tile_out = static_cast<int>(tile.out_channels);
  p.tile_in = static_cast<int>(tile.in_channels);
  p.out_chunks = static_cast<int>(tile.out_chunks);
  p.in_chunks = static_cast<int>(tile.in_chunks);
  p.classes = static_cast<int>(tile.classes);
  p.columns = static_cast<int>(tile.columns);
  p.input_columns = static_cast<int>(rows_input_columns(problem, tile.positions));
  p.grad_pitch = static_cast<int>(tile.grad_pitch);
  p.input_pitch = static_cast<int>(tile.input_pitch);
  p.reach = static_cast<int>(tile.reach);
  p.stages = static_cast<int>(tile.stages);
  p.input_slots = static_cast<int>(tile.input_slots);
  return p;
}

template <typename Kernel>
cudaError_t launch_kernel(Kernel kernel, const RowsWeightGradientParams& p, int64_t shared, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{p.splits} * p.group_blocks * p.classes * p.out_chunks * p.in_chunks;
  kernel<<<static_cast<unsigned>(blocks), kWeightGradientThreads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, RowsOperands kOperands>
cudaError_t launch(const RowsWeightGradientParams& p, const RowsWeightGradientTile& tile, cudaStream_t stream) {
  const auto with = [&](auto rows, auto columns) {
    return launch_kernel(rows_weight_gradient_kernel<T, kOperands, rows, columns>, p,
                         rows_weight_gradient_shared(tile, rows, columns), stream);
  };
  const auto with_columns = [&](auto rows) {
    if (tile.matrix_columns == 1) return with(rows, std::integral_constant<int, 1>{});
    if (tile.matrix_columns == 2) return with(rows, std::integral_constant<int, 2>{});
    return with(rows, std::integral_constant<int, 3>{});
  };
  const bool one = tile.matrix_rows == 1 && tile.matrix_columns == 1;
  const cudaError_t error = one ? with(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{})
                            : tile.matrix_rows <= 2 ? with_columns(std::integral_constant<int, 2>{})
                                                    : with_columns(std::integral_constant<int, 5>{});
  if (error != cudaSuccess) return error;
  const int64_t blocks = ceil_div(p.weight_elements, kReduceElements);
  rows_weight_reduction_kernel<T><<<static_cast<unsigned>(blocks), kReduceElements * kReduceThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// The workspace holds the bias's partial sums, which are float64, then the weight's.
int64_t bias_workspace(const Problem& problem) {
  const BiasGradientParams p = make_bias_params(problem, nullptr, nullptr, nullptr);
  return int64_t{p.channels} * p.batch_slices * p.position_slices * int64_t{sizeof(double)};
}

}  // namespace

int64_t rows_weight_gradient_workspace(const Problem& problem) {
  if (!rows_weight_gradient_refusal(problem).empty()) return 0;
  const int64_t splits = count_splits(problem, rows_weight_gradient_tile(problem));
  return bias_workspace(problem) + splits * problem.weight_elements() * int64_t{sizeof(float)};
}

cudaError_t launch_rows_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                        void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  if (!rows_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  const auto run = [&](auto tag, auto operands) {
    using T = typename decltype(tag)::type;
    cudaError_t error = cudaSuccess;
    if (grad_bias != nullptr) {
      error = launch_bias<T>(problem, make_bias_params(problem, grad_output, grad_bias, workspace), stream);
    }
    if (error != cudaSuccess || grad_weight == nullptr) return error;
    const RowsWeightGradientTile tile = rows_weight_gradient_tile(problem);
    void* partial = static_cast<char*>(workspace) + bias_workspace(problem);
    const auto params = make_params(problem, tile, grad_output, input, grad_weight, partial);
    return launch<T, decltype(operands)::value>(params, tile, stream);
  };
  using AsIs = std::integral_constant<RowsOperands, RowsOperands::kAsIs>;
  using Round = std::integral_constant<RowsOperands, RowsOperands::kRound>;
  using Split = std::integral_constant<RowsOperands, RowsOperands::kSplit>;
  if (problem.dtype == DType::kFloat16) return run(TypeTag<__half>{}, AsIs{});
  if (problem.dtype == DType::kBFloat16) return run(TypeTag<__nv_bfloat16>{}, AsIs{});
  return problem.allow_tf32 ? run(TypeTag<float>{}, Round{}) : run(TypeTag<float>{}, Split{});
}

}  // namespace fastconvt::cuda
