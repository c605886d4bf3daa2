// The phase-direct family: transposed convolutions with one output channel or few, a large kernel of the closed list
// below, and float32 arithmetic without matrix units. What it can make, and its cost. Plain C++17: no Torch, no CUDA.
//
// A cell is one base along each axis (problem.h), with all its phases: stride * stride outputs, which read a window of
// `reach` * `reach` inputs. A thread holds rows * columns cells in registers; its warp has a tile of them, for a share
// of the input channels. Every tap is one multiply-add of a weight that all lanes share.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

struct PhaseDirectShape {
  int kernel, stride;  // of both axes
  int rows, columns;   // cells of a thread
  int chain;           // channels whose products are added one after the other, for outputs of more than four taps
  int64_t channels;    // of a group, at most: accuracy and shared memory
  int padding;         // for which tiles begin where copies can
  double cycles;       // of a multiprocessor for a channel of a tile, measured

  constexpr int sums() const { return rows * columns * stride * stride; }
  constexpr int reach() const { return (kernel + stride - 1) / stride; }
  // Tensor copies begin at multiples of 16 bytes along the width: so many inputs before the first one of a tile.
  constexpr int lead() const { return (padding / stride - (reach() - 1) + 4 * reach()) % 4; }
};
// Sums of all cells of a thread, and totals of those of many taps, leave a multiprocessor eight warps.
inline constexpr std::array<PhaseDirectShape, 3> kPhaseDirectShapes{{
    {9, 2, 4, 4, 1, 80, 4, 455},
    {9, 3, 2, 4, 5, 80, 4, 272},
    {9, 4, 2, 4, 5, 56, 4, 254},
}};

inline constexpr int kPhaseDirectLanes = 8;  // of a warp, side by side
inline constexpr int64_t kPhaseDirectShared = 227 * 1024;

// Of the list above, or -1.
inline int phase_direct_shape(const Problem& problem) {
  for (size_t i = 0; i < kPhaseDirectShapes.size(); ++i) {
    const PhaseDirectShape& shape = kPhaseDirectShapes[i];
    bool fits = true;
    for (int a = 1; a < 3; ++a) {
      const Axis& axis = problem.axis[a];
      fits = fits && axis.kernel == shape.kernel && axis.stride == shape.stride && axis.dilation == 1;
    }
    if (fits) return static_cast<int>(i);
  }
  return -1;
}

// Where the tiles of a warp begin along an axis, 1 or 2, and how many they are. Other paddings begin up to three cells
// earlier.
inline int64_t phase_direct_first_cell(const Axis& axis, const PhaseDirectShape& shape, int a) {
  const int64_t first = axis.base(0);
  return a == 1 ? first : first - (first - (shape.reach() - 1) - shape.lead() + 4 * shape.reach()) % 4;
}
inline int64_t phase_direct_tiles(const Axis& axis, const PhaseDirectShape& shape, int a) {
  const int64_t cells = axis.base(axis.out() - 1) - phase_direct_first_cell(axis, shape, a) + 1;
  return ceil_div(cells, int64_t{a == 1 ? 32 / kPhaseDirectLanes * shape.rows : kPhaseDirectLanes * shape.columns});
}

inline std::string phase_direct_refusal(const Problem& problem) {
  if (problem.dtype != DType::kFloat32) return "not float32";
  if (!problem.axis[0].is_trivial()) return "three dimensions";
  if (phase_direct_shape(problem) < 0) return "a kernel, stride or dilation out of the list";
  if (problem.out_channels_per_group() > 4) return "many output channels a group";
  if (problem.out_channels > 65535) return "many output channels";
  if (problem.batch * problem.in_channels >= int64_t{1} << 30) return "a large batch";
  for (int a = 1; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    if (axis.in >= int64_t{1} << 24 || axis.padding >= int64_t{1} << 24) return "a long axis or a large padding";
  }
  // What tensor copies can address.
  if (double(problem.in_channels) * double(problem.in_positions()) >= double(int64_t{1} << 37))
    return "a large problem";
  const PhaseDirectShape& shape = kPhaseDirectShapes[phase_direct_shape(problem)];
  if (problem.in_channels_per_group() > shape.channels) return "many input channels a group";
  if (problem.out_elements() > 0 && double(phase_direct_tiles(problem.axis[1], shape, 1)) *
                                            double(phase_direct_tiles(problem.axis[2], shape, 2)) *
                                            double(problem.batch) >=
                                        double(int64_t{1} << 30)) {
    return "a large problem";
  }
  return "";
}

// Milliseconds on an H200, fitted to runs.
inline double phase_direct_cost_ms(const Problem& problem) {
  if (problem.out_elements() == 0) return 0;
  const PhaseDirectShape& shape = kPhaseDirectShapes[std::max(phase_direct_shape(problem), 0)];
  const int64_t tiles = phase_direct_tiles(problem.axis[1], shape, 1) * phase_direct_tiles(problem.axis[2], shape, 2) *
                        problem.batch * problem.out_channels;
  const int64_t channels = problem.in_channels_per_group();
  const bool last = problem.layout == Layout::kChannelsLast;
  double cycles = 0;
  if (last && channels % 4 == 0) {
    const double tile = 1.22 * double(round_up(channels, int64_t{8})) * shape.cycles + 30 * shape.sums();
    cycles = double(ceil_div(tiles, int64_t{132})) * std::max(tile, 8800.);
  } else {
    // Two tiles of a multiprocessor at a time; a lone one takes more than half of that. Copies by element cost more.
    const double slower = last ? 2.5 : problem.axis[2].in % 4 != 0 ? 1.7 : 1;
    const double tile = slower * double(round_up(channels, int64_t{4})) * shape.cycles + 18 * shape.sums();
    cycles = (tiles <= 132 ? 1.2 : 2 * double(ceil_div(tiles, int64_t{264}))) * tile;
  }
  return 0.0065 + cycles / 1.97e6;
}

}  // namespace fastconvt
