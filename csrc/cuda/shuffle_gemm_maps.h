// The shuffle GEMM's tensors as tensor copies see them.
#pragma once

#include "../core/shuffle_gemm.h"
#include "tensor_map.h"

namespace fastconvt::cuda {

// channels_last, few channels: inputs are copied by lines of 4 positions, which takes less time than by single ones.
inline int few_line_shift(const Problem& problem) {
  return problem.in_channels == kShuffleGemmFewChannels && problem.batch * problem.in_positions() % 4 == 0 ? 2 : 0;
}

// Elements of a channel in packed inputs, a multiple of 16 bytes.
inline int64_t packed_pitch(const Problem& problem) {
  return round_up(problem.batch * problem.in_positions(), int64_t{8});
}

// Inputs: contiguous (positions, channels, groups, batch), packed ones without batch; channels_last (channels, groups,
// positions), by boxes (channels, groups, positions, lines, slices).
inline cudaError_t make_input_map(const Problem& problem, const ShuffleGemmBox& box, bool packed, const void* input,
                                  CUtensorMap& map) {
  const cuuint64_t positions = problem.in_positions(), in = problem.in_channels_per_group(), groups = problem.groups;
  const cuuint64_t batch = problem.batch;
  if (problem.layout == Layout::kContiguous) {
    const cuuint64_t pitch = packed ? packed_pitch(problem) : positions;
    return encode_map(problem.dtype, input, {packed ? batch * positions : positions, in, groups, packed ? 1 : batch},
                      {pitch * 2, pitch * in * 2, pitch * in * groups * 2}, {64, 64, 1, 1}, map);
  }
  const cuuint64_t pixel = in * groups * 2;
  if (box.width > 0) {
    const cuuint64_t width = problem.axis[2].in, line = pixel * width, lines = box.lines, slices = box.slices;
    const auto box_width = static_cast<cuuint32_t>(box.width), box_height = static_cast<cuuint32_t>(box.height);
    return encode_map(problem.dtype, input, {in, groups, width, lines, slices}, {in * 2, pixel, line, line * lines},
                      {64, 1, box_width, box_height, 1}, map);
  }
  return encode_map(problem.dtype, input, {in, groups, positions * batch, 1},
                    {in * 2, pixel, pixel * positions * batch}, {64, 1, 64, 1}, map);
}

// Weights: (columns, channels, 1, groups), or by 64 columns (64, channels, columns / 64, groups).
inline cudaError_t make_weight_map(const Problem& problem, int of_tile, const void* weight, CUtensorMap& map) {
  const cuuint64_t in = problem.in_channels_per_group(), groups = problem.groups;
  const cuuint64_t columns = problem.out_channels_per_group() * problem.kernel_positions();
  const bool whole = columns % 64 == 0;
  const cuuint64_t inner = whole ? 64 : columns;
  const cuuint32_t blocks = whole ? of_tile / 64 : 1;
  return encode_map(problem.dtype, weight, {inner, in, columns / inner, groups},
                    {columns * 2, inner * 2, columns * in * 2}, {64, 64, blocks, 1}, map);
}

// Outputs: contiguous (row, rows, planes, channels, batch), by 64 elements of all rows of some channels; channels_last
// (a position's run of all channels, positions, rows of a line, lines, planes), by 64 channels of a tile.
inline cudaError_t make_output_map(const Problem& problem, const ShuffleGemmBox& box, void* output, CUtensorMap& map) {
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_NONE;
  const cuuint64_t channels = problem.out_channels, batch = problem.batch;
  const cuuint64_t kernel_height = problem.axis[1].kernel, kernel_depth = problem.axis[0].kernel;
  if (problem.layout == Layout::kContiguous) {
    const cuuint64_t width = problem.axis[2].out(), height = problem.axis[1].out(), depth = problem.axis[0].out();
    const cuuint64_t row = width * 2, plane = row * height, volume = plane * depth;
    const auto box_height = static_cast<cuuint32_t>(kernel_height), box_depth = static_cast<cuuint32_t>(kernel_depth);
    const auto box_channels = static_cast<cuuint32_t>(64 / problem.kernel_positions());
    return encode_map(problem.dtype, output, {width, height, depth, channels, batch},
                      {row, plane, volume, volume * channels}, {64, box_height, box_depth, box_channels, 1}, map,
                      kPromotion);
  }
  const cuuint64_t run = channels * problem.axis[2].kernel, width = problem.axis[2].in, lines = box.lines;
  const cuuint64_t row = run * 2 * width, line = row * kernel_height, planes = box.slices * kernel_depth;
  const auto box_width = static_cast<cuuint32_t>(box.width), box_height = static_cast<cuuint32_t>(box.height);
  return encode_map(problem.dtype, output, {run, width, kernel_height, lines, planes},
                    {run * 2, row, line, line * lines}, {64, box_width, 1, box_height, 1}, map, kPromotion);
}

// Where warps work on their own: inputs of 64 positions, and contiguous outputs of 32, all channels.
inline cudaError_t make_few_maps(const Problem& problem, bool packed, const void* input, void* output,
                                 CUtensorMap& inputs, CUtensorMap& outputs) {
  const cuuint64_t positions = problem.in_positions(), in = problem.in_channels, batch = problem.batch;
  constexpr cuuint32_t kChannels = kShuffleGemmFewChannels;
  if (problem.layout != Layout::kContiguous) {
    const cuuint64_t all = in * 2 * positions * batch;
    const int shift = few_line_shift(problem);
    const cuuint64_t line = in << shift;
    return encode_map(problem.dtype, input, {line, 1, positions * batch >> shift, 1}, {line * 2, line * 2, all},
                      {kChannels << shift, 1, cuuint32_t{64} >> shift, 1}, inputs, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  const cuuint64_t pitch = (packed ? packed_pitch(problem) : positions) * 2;
  const cudaError_t error =
      encode_map(problem.dtype, input, {packed ? batch * positions : positions, in, 1, packed ? 1 : batch},
                 {pitch, pitch * in, pitch * in}, {64, kChannels, 1, 1}, inputs);
  if (error != cudaSuccess) return error;
  const auto kernel = [&](int axis) { return static_cast<cuuint32_t>(problem.axis[axis].kernel); };
  const cuuint64_t width = problem.axis[2].out(), height = problem.axis[1].out(), depth = problem.axis[0].out();
  const cuuint64_t channels = problem.out_channels, row = width * 2, plane = row * height, volume = plane * depth;
  return encode_map(
      problem.dtype, output, {width, height, depth, channels, batch}, {row, plane, volume, volume * channels},
      {64, kernel(1), kernel(0), static_cast<cuuint32_t>(channels), 1}, outputs, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace fastconvt::cuda
