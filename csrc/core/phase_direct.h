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
  int chain;           // channels whose products are added one after the other
  int padding;         // for which tiles begin where copies can
  double cycles;       // of a multiprocessor for a channel of a tile, measured

  constexpr int reach() const { return (kernel + stride - 1) / stride; }
  // Tensor copies begin at multiples of 16 bytes along the width: so many inputs before the first one of a tile.
  constexpr int lead() const { return (padding / stride - (reach() - 1) + 4 * reach()) % 4; }
};
// Sums of all cells of a thread stay below 129, so that a multiprocessor holds eight warps.
inline constexpr std::array<PhaseDirectShape, 3> kPhaseDirectShapes{{
    {9, 2, 4, 4, 1, 4, 480},
    {9, 3, 2, 4, 5, 4, 320},
    {9, 4, 2, 4, 5, 4, 328},
}};

inline constexpr int kPhaseDirectLanes = 8;  // of a warp, side by side
inline constexpr int64_t kPhaseDirectShared = 227 * 1024;
inline constexpr int64_t kPhaseDirectMaxChannels = 80;  // of a group: their weights stay in shared memory

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
  if (problem.in_channels_per_group() > kPhaseDirectMaxChannels) return "many input channels a group";
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
  const int64_t of_one = ceil_div(tiles, int64_t{132});  // of a multiprocessor
  const int64_t channels = problem.in_channels_per_group();
  double cycles = 0;
  if (problem.layout == Layout::kChannelsLast && channels % 4 == 0) {
    // Eight warps share a tile's channels, four at a time.
    cycles = double(of_one) * (1.12 * double(round_up(channels, int64_t{32})) * shape.cycles + 1500);
  } else {
    // Two tiles at a time; a lone one does not keep the units busy. Copies by element cost more.
    const bool elements = problem.layout == Layout::kChannelsLast || problem.axis[2].in % 4 != 0;
    const double at_a_time = double(of_one / 2 * 2) + 1.3 * double(of_one % 2);
    cycles = at_a_time * ((elements ? 1.7 : 1) * double(round_up(channels, int64_t{4})) * shape.cycles + 750);
  }
  return 0.006 + cycles / 1.97e6;
}

}  // namespace fastconvt
