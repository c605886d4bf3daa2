// The row kernels, host side: parameters of a problem and the instance that runs it.
#include "rows.cuh"

#include <algorithm>
#include <climits>
#include <utility>

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kSharedBytes = 76800;       // of a block: three fit an SM
constexpr int64_t kBurstBytes = 8 << 20;  // far less than the L2 cache

// Taps of the height that a data row has, at most.
int max_taps(const RowsParams& p) { return std::max(1, ceil_div(p.kernel_height, p.by_row_phase.divisor)); }

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Which groups and channels a block makes, and what it stages at once; returns its bytes of shared memory.
template <class Traits>
int set_chunks(RowsParams& p) {
  const int quads = ceil_div(p.out_channels, 4);
  p.block_quads = std::min(quads, kRowsQuads);
  p.quad_blocks = ceil_div(quads, p.block_quads);
  // All channels of several groups have to be staged at once.
  p.block_groups = std::min(p.groups, kRowsQuads / p.block_quads);
  while (p.block_groups > 1 && p.block_groups * p.in_channels > Traits::kPixelChannels) --p.block_groups;
  p.channel_blocks = ceil_div(p.groups, p.block_groups) * p.quad_blocks;
  p.channel_chunk = std::min(p.block_groups * p.in_channels, Traits::kPixelChannels);
  p.weight_slot = p.channel_chunk * p.block_quads * Traits::kQuadPitch;
  const int size = Traits::kInputSlot + p.weight_slot;
  p.tap_chunk = std::clamp((kSharedBytes / 4 - Traits::kConstants) / size, 1, max_taps(p));
  return 4 * (Traits::kConstants + p.tap_chunk * size);
}

template <class Traits>
void set_vectors(const Problem& problem, RowsParams& p) {
  const int64_t channels = problem.out_channels;
  p.vector_input = aligned(p.input) && problem.in_channels % 4 == 0 && p.block_groups * p.in_channels % 4 == 0;
  p.vector_output = aligned(p.output) && channels % 4 == 0 && p.out_channels % 4 == 0;
  const bool bulk = aligned(p.output) && channels % 4 == 0 && channels <= Traits::kConstants;
  p.constant_pitch = bulk ? static_cast<int>(Traits::kConstants / channels * channels) : 0;
}

template <class Traits>
cudaError_t launch(const Problem& problem, RowsParams& p, int bytes, cudaStream_t stream) {
  set_vectors<Traits>(problem, p);
  p.by_segment = fast_divide(p.segments);
  p.by_row = fast_divide(p.rows);
  p.by_channel_block = fast_divide(p.channel_blocks);
  p.by_quad_block = fast_divide(p.quad_blocks);
  const int64_t blocks = problem.batch * p.channel_blocks * p.rows * p.segments;
  if (blocks > INT32_MAX) return cudaErrorNotSupported;
  p.input_bytes = problem.in_elements() * 4;
  const int64_t bursts = p.input_bytes / kBurstBytes;
  p.burst_blocks = bursts < 2 || blocks / bursts < 128 ? 0 : static_cast<int>(blocks / bursts);
  p.burst_bytes = static_cast<int>(bursts == 0 ? 0 : p.input_bytes / bursts / 16 * 16);
  p.by_burst = fast_divide(std::max(1, p.burst_blocks));
  // The same value every time: launches from several threads must not undo each other's.
  const cudaError_t error =
      cudaFuncSetAttribute(rows_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  rows_kernel<Traits><<<static_cast<unsigned>(blocks), kRowsThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <int index>
cudaError_t launch_shape(const Problem& problem, RowsParams& p, cudaStream_t stream) {
  using Whole = RowsTraits<index, true>;
  using Chunked = RowsTraits<index, false>;
  const int bytes = set_chunks<Whole>(p);
  const bool whole = p.tap_chunk == max_taps(p) && p.channel_chunk == p.block_groups * p.in_channels;
  if (whole && p.bases <= p.segments * Whole::kColumns) return launch<Whole>(problem, p, bytes, stream);
  return launch<Chunked>(problem, p, bytes, stream);
}

template <int... indices>
cudaError_t dispatch(const Problem& problem, RowsParams& p, cudaStream_t stream,
                     std::integer_sequence<int, indices...>) {
  const int index = row_shape_index(problem);
  cudaError_t error = cudaErrorNotSupported;
  ((index == indices ? void(error = launch_shape<indices>(problem, p, stream)) : void()), ...);
  return error;
}

}  // namespace

cudaError_t launch_rows(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                        cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!rows_refusal(problem).empty()) return cudaErrorNotSupported;
  RowsParams p{};
  p.input = static_cast<const float*>(input), p.weight = static_cast<const float*>(weight);
  p.bias = static_cast<const float*>(bias), p.output = static_cast<float*>(output);
  p.rectify = rectifier(problem);
  p.input_stride = input_strides(problem), p.output_stride = output_strides(problem);
  p.weight_filter = static_cast<int>(problem.kernel_positions());
  p.weight_channel = problem.out_channels_per_group() * problem.kernel_positions();
  p.groups = static_cast<int>(problem.groups);
  p.in_channels = static_cast<int>(problem.in_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels_per_group());
  set_data_rows(problem, p);
  p.leading = p.first_row * p.out_width;
  p.gap = (p.row_step - 1) * p.out_width;
  p.trailing = (p.out_height - 1 - p.first_row - (p.rows - 1) * p.row_step) * p.out_width;
  return dispatch(problem, p, stream, std::make_integer_sequence<int, kNumRowShapes>{});
}

}  // namespace fastconvt::cuda
