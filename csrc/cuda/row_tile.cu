// The row-tile kernels, host side: parameters of a problem and the instance that runs it.
#include "row_tile.cuh"

#include <algorithm>
#include <utility>

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kSharedFloats = (76800 - kRowTileHead) / 4;  // of a block: three fit an SM
constexpr int kMaxConstants = 1600;                        // floats that one bulk store takes
constexpr int kOwnConstants = 256;        // and of these, if each channel has its own: filling them takes time
constexpr int64_t kMaxGrid = 65535;       // of its second and third axis
constexpr int64_t kBurstBytes = 8 << 20;  // far less than the L2 cache

// Constant outputs, and how many of them may be stored with a data row.
void set_constants(RowTileParams& p) {
  const int last_row = p.first_row + (p.rows - 1) * p.row_step;
  p.leading = p.first_row * p.out_width;
  p.gap = (p.row_step - 1) * p.out_width;
  p.trailing = (p.out_height - 1 - last_row) * p.out_width;
  p.gap_lines = p.gap >= 64 ? 32 : 0;
  p.leading_lines = std::min(p.gap_lines, p.leading);
  p.trailing_lines = std::min(p.gap_lines, p.trailing);
}

// Which groups and channels a block makes, and what it stages at once; returns its floats of shared memory.
template <class Traits>
int set_chunks(RowTileParams& p) {
  const int quads = ceil_div(p.out_channels, 4);
  p.block_quads = std::min(quads, kRowTileWarps);
  p.quad_blocks = ceil_div(quads, p.block_quads);
  const int taps = ceil_div(p.kernel_height, p.by_row_phase.divisor);  // of one phase, at most
  const int constants = std::min(kMaxConstants, round_up(std::max({p.leading, p.gap, p.trailing}), 32));
  const int channels = 4 * kRowTileWarps;
  const bool own = p.bias != nullptr && constants > 0;  // each channel has its own constants, at least a line
  // Floats if `rows` are staged, of one group if there are several.
  const auto weights = [&](int64_t rows) {
    return (rows / p.block_groups * 4 * Traits::kKernel + 31) / 32 * 32 * (p.block_groups * p.block_quads);
  };
  const auto inputs = [](int64_t rows) { return (rows * Traits::kInputPitch + 31) / 32 * 32; };
  const auto floats = [&](int64_t rows) {
    const int64_t tile = std::max<int64_t>(Traits::kOutputs, inputs(rows) + (own ? 32 * channels : 0));
    return weights(rows) + tile + (own ? 0 : constants);
  };
  const int64_t group_rows = int64_t{p.in_channels} * taps;
  p.block_groups = std::min(p.groups, kRowTileWarps / p.block_quads);
  while (p.block_groups > 1 && floats(p.block_groups * group_rows) > kSharedFloats) --p.block_groups;
  int64_t rows = p.block_groups * group_rows;
  if (floats(rows) > kSharedFloats) {
    for (rows = 1; floats(rows + 1) <= kSharedFloats; ++rows) continue;
  }
  p.chunk_rows = static_cast<int>(rows);
  p.channel_blocks = ceil_div(p.groups, p.block_groups) * p.quad_blocks;
  p.tile = static_cast<int>(weights(rows));
  p.weight_slab = p.tile / (p.block_groups * p.block_quads);
  const int staged = static_cast<int>(inputs(rows)), size = static_cast<int>(floats(rows));
  p.constants = own ? p.tile + staged : size - constants;
  p.constant_pitch =
      own ? std::min((size - p.constants) / channels / 32 * 32, std::min(kOwnConstants, constants)) : constants;
  p.constant_step = own ? p.constant_pitch : 0;
  return size;
}

void set_bursts(const Problem& problem, int64_t blocks, RowTileParams& p) {
  p.input_bytes = problem.in_elements() * 4;
  const int64_t bursts = p.input_bytes / kBurstBytes;
  p.burst_blocks = bursts < 2 || blocks / bursts < 64 ? 0 : static_cast<int>(blocks / bursts);
  p.burst_bytes = static_cast<int>(bursts == 0 ? 0 : p.input_bytes / bursts / 16 * 16);
  p.by_burst = fast_divide(std::max(1, p.burst_blocks));
}

template <class Traits>
cudaError_t launch(const Problem& problem, RowTileParams& p, cudaStream_t stream) {
  const int bytes = kRowTileHead + 4 * set_chunks<Traits>(p);
  p.by_segment = fast_divide(p.segments);
  p.by_quad_block = fast_divide(p.quad_blocks);
  p.vector_input = reinterpret_cast<uintptr_t>(p.input) % 16 == 0 && p.in_width % 4 == 0;
  set_bursts(problem, problem.batch * p.channel_blocks * p.rows * p.segments, p);
  // The same value every time: launches from several threads must not undo each other's.
  const cudaError_t error = cudaFuncSetAttribute(row_tile_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 kRowTileHead + 4 * kSharedFloats);
  if (error != cudaSuccess) return error;
  for (int64_t done = 0; done < problem.batch; done += kMaxGrid) {
    const int64_t batch = std::min(kMaxGrid, problem.batch - done);
    const dim3 grid(p.rows * p.segments, p.channel_blocks, static_cast<unsigned>(batch));
    row_tile_kernel<Traits><<<grid, kRowTileThreads, bytes, stream>>>(p);
    p.input += kMaxGrid * p.input_batch, p.output += kMaxGrid * p.output_batch;
    p.burst_blocks = 0;
  }
  return cudaGetLastError();
}

template <int... indices>
cudaError_t dispatch(const Problem& problem, RowTileParams& p, cudaStream_t stream,
                     std::integer_sequence<int, indices...>) {
  const int index = row_shape_index(problem);
  cudaError_t error = cudaErrorNotSupported;
  ((index == indices && (error = launch<RowTileTraits<indices>>(problem, p, stream), true)), ...);
  return error;
}

}  // namespace

cudaError_t launch_row_tile(const Problem& problem, const void* input, const void* weight, const void* bias,
                            void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!row_tile_refusal(problem).empty()) return cudaErrorNotSupported;
  RowTileParams p{};
  p.input = static_cast<const float*>(input), p.weight = static_cast<const float*>(weight);
  p.bias = static_cast<const float*>(bias), p.output = static_cast<float*>(output);
  p.rectify = rectifier(problem);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.input_batch = in.batch, p.output_batch = out.batch;
  p.input_channel = static_cast<int>(in.channel), p.output_channel = static_cast<int>(out.channel);
  p.weight_filter = static_cast<int>(problem.kernel_positions());
  p.weight_channel = static_cast<int>(problem.out_channels_per_group() * problem.kernel_positions());
  p.groups = static_cast<int>(problem.groups);
  p.in_channels = static_cast<int>(problem.in_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels_per_group());
  set_data_rows(problem, p);
  p.tap_step = p.row_dilation * p.in_width;
  set_constants(p);
  return dispatch(problem, p, stream, std::make_integer_sequence<int, kNumRowShapes>{});
}

}  // namespace fastconvt::cuda
