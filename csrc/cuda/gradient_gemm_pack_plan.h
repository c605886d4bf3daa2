// How a tensor's channels come innermost: parameters of the kernels that pack, and their blocks.
#pragma once

#include <algorithm>

#include "../core/gradient_gemm.h"
#include "gradient_gemm_pack.cuh"

namespace fastconvt::cuda {

// (batch, groups, group, image), or channels innermost already, becomes (batch, image, groups, group_pitch). A tile has
// `channels`. Returns the blocks.
inline int64_t plan_positions(const Problem& problem, int64_t batch, int64_t image, int64_t groups, int64_t group,
                              int64_t group_pitch, int channels, const void* source, void* target,
                              GradientPackParams& p) {
  p.source = source, p.target = target;
  p.turned = problem.layout == Layout::kChannelsLast;
  p.groups = static_cast<int>(groups), p.group = static_cast<int>(group);
  p.group_pitch = static_cast<int>(group_pitch), p.pitch = p.groups * p.group_pitch;
  if (p.group == p.group_pitch) p.group *= p.groups, p.group_pitch = p.pitch, p.groups = 1;  // all as one
  p.image = static_cast<int>(image);
  p.vectors = p.image % 8 == 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0;
  p.positions = batch * image;
  if (p.turned) return ceil_div(p.positions, int64_t{kGradientPackPositions});
  const int columns = ceil_div(p.group_pitch, channels), rows = ceil_div(p.image, kGradientPackPositions);
  p.tile_positions = static_cast<int>(round_up(ceil_div(p.image, rows), 8));
  p.tile_columns = fast_divide(columns), p.tile_groups = fast_divide(p.groups), p.tile_rows = fast_divide(rows);
  return batch * p.groups * columns * rows;
}

// Padded planes of the output's gradient. Returns the blocks.
inline int64_t plan_planes(const Problem& problem, const void* source, void* planes, GradientPackParams& p) {
  const GradientGemmWindows w = gradient_gemm_windows(problem);
  p.source = source, p.planes = planes;
  p.image = static_cast<int>(problem.out_positions());
  p.plane = fast_divide(static_cast<int>(w.plane));
  p.plane_layer = fast_divide(static_cast<int>(w.size[1] * w.size[2]));
  p.plane_row = fast_divide(static_cast<int>(w.size[2]));
  for (int a = 0; a < 3; ++a) {
    p.plane_out[a] = static_cast<int>(problem.axis[a].out());
    p.plane_padding[a] = static_cast<int>(problem.axis[a].padding);
  }
  p.plane_vectors = problem.batch * problem.out_channels * w.plane / 8;
  return ceil_div(p.plane_vectors, int64_t{kGradientPackThreads});
}

// The weight as copies of the gradient GEMM read it; sets the blocks.
template <typename T>
void plan_weights(const Problem& problem, const void* weight, void* packed, GradientPackParams& p) {
  p.weight = weight, p.packed_weight = packed;
  p.weight_rows = static_cast<int>(problem.in_channels);
  p.channels = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.weight_turned = problem.weight_layout == Layout::kChannelsLast;
  p.weight_pitch = static_cast<int>(gradient_gemm_pitch(problem));
  const int room = kGradientPackBytes / static_cast<int>(sizeof(T));  // elements of a block
  p.block_channels = std::max(8, std::min<int>(p.weight_pitch, room / p.taps / 8 * 8));
  p.channel_blocks = ceil_div(p.channels, p.block_channels);
  p.block_rows = p.channel_blocks > 1 ? 1 : std::max(1, room / (p.channels * p.taps));
  p.row_taps = fast_divide(p.taps);
  p.row_vectors =
      fast_divide(ceil_div(std::min(p.channels, p.block_channels), 16 / static_cast<int>(sizeof(T))) * p.taps);
  const int64_t run = int64_t{p.channels} * p.taps, wide = 16 / static_cast<int>(sizeof(T));
  p.weight_vectors = reinterpret_cast<uintptr_t>(weight) % 16 == 0 && run % wide == 0 &&
                     int64_t{p.block_channels} * p.taps % wide == 0;
  p.weight_blocks = static_cast<int>(ceil_div(p.weight_rows, p.block_rows)) * p.channel_blocks;
}

}  // namespace fastconvt::cuda
