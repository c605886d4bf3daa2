// The pixel-shuffle family: transposed convolutions whose taps never overlap, kernel == stride on every axis. What it
// can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// Every output has one tap: one matrix product of (output channel, tap) rows, input channels and positions makes the
// layer, and its store shuffles. A block keeps the weights of a chunk of output channels, all taps, in shared memory
// and walks over tiles of positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "problem.h"

namespace fastconvt {

inline constexpr int kPixelShuffleTilesM = 4;       // of 16 rows, that a warp makes at a time
inline constexpr int kPixelShuffleProducers = 128;  // threads that only copy
inline constexpr int64_t kPixelShuffleShared = 227 * 1024;
inline constexpr int kPixelShuffleMaxStages = 8;

struct PixelShuffleTile {
  int warps, warps_m;  // that multiply, 4 or 8; along the rows
  int channels;        // output channels of a chunk
  int tiles_m;         // of 16 rows, in a chunk
  int rounds;          // of 64 rows that a warp makes of a tile of positions
  int positions;       // in a tile
  int steps;           // of 32 bytes of input channels, in all
  int stage_steps;     // of them, in a stage; a power of two
  int stages;          // in the ring
  bool staggered;      // two groups of warps, so that one stores while the other multiplies
  bool streamed;       // weights come with the inputs, else all of the chunk's stay
  int input_pitch, stage_bytes;
  int stage_weights;               // streamed: where they begin in a stage
  int weight_pitch, weight_steps;  // of weights as they are in memory: bytes of an input channel, steps in a stage
  int staged_bytes;                // of a warp's outputs on their way to memory, or 0
  // Shared memory in bytes: where each part begins; packed weights come first.
  int ring, rows, bias, places, outputs, barriers, shared_bytes;
};

inline bool pixel_shuffle_splits(const Problem& p) { return p.dtype == DType::kFloat32 && !p.allow_tf32; }

// Tiles of 8 positions that a warp makes at a time: float32 by three products has two sets of sums.
inline int pixel_shuffle_tiles_n(const Problem& p) { return pixel_shuffle_splits(p) ? 4 : 8; }

// Everything that follows from warps, warps_m, channels, stage_steps, stages and streamed; false if shared memory is
// too small.
inline bool pixel_shuffle_finish(const Problem& problem, PixelShuffleTile& t) {
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const int size = static_cast<int>(problem.element_size());
  const int64_t rows = t.channels * problem.kernel_positions();
  const int64_t step_rows = 16 * kPixelShuffleTilesM * t.warps_m;
  if (rows > 4096) return false;
  t.rounds = static_cast<int>(ceil_div(rows, step_rows));
  t.tiles_m = kPixelShuffleTilesM * t.warps_m * t.rounds;
  t.positions = 8 * pixel_shuffle_tiles_n(problem) * (t.warps / t.warps_m);
  t.steps = static_cast<int>(ceil_div(problem.in_channels_per_group() * size, int64_t{32}));
  // The first group needs a whole tile that the other one has not released.
  if (t.staggered && (t.streamed || t.warps != 8 || t.stages * t.stage_steps < t.steps)) return false;
  if (t.rounds > 1 && (t.streamed || t.stage_steps < t.steps)) return false;
  // Rows of 16 bytes modulo 32 (or of 8 words modulo 32) keep the banks of a load apart.
  const int skew = size == 4 ? 32 : 16, step_channels = 32 / size;
  t.input_pitch = channels_last ? t.stage_steps * 32 + 16 : t.positions * size + skew;
  t.stage_bytes = channels_last ? t.positions * t.input_pitch : t.stage_steps * step_channels * t.input_pitch;
  t.weight_pitch = t.tiles_m * 16 * size + skew;
  const int weight_step = step_channels * t.weight_pitch;
  int64_t weight_bytes = int64_t{t.steps} * t.tiles_m * 512;
  if (t.streamed) {
    t.stage_weights = t.stage_bytes;
    t.stage_bytes = round_up(t.stage_bytes + t.stage_steps * weight_step, 16);
    weight_bytes = int64_t{2} * t.stage_steps * t.tiles_m * 512;
  } else {
    t.weight_steps = t.stage_bytes / weight_step;
    if (t.weight_steps == 0) return false;
  }
  const int64_t ring_bytes = int64_t{t.stages} * t.stage_bytes;
  if (weight_bytes + ring_bytes > kPixelShuffleShared) return false;
  // Whole positions of any number of channels go through shared memory.
  t.staged_bytes = 0;
  const int64_t run = t.channels * problem.axis[2].kernel, vector = 16 / size;
  if (channels_last && t.channels == problem.out_channels && run % vector != 0 && run * size % 4 == 0 &&
      t.warps_m == 1 && problem.axis[2].in * run % vector == 0) {
    const int64_t line = 8 * pixel_shuffle_tiles_n(problem) * run + vector;
    t.staged_bytes =
        static_cast<int>(std::min<int64_t>(round_up(rows / run * line * size, int64_t{16}), kPixelShuffleShared));
  }
  t.ring = static_cast<int>(weight_bytes);
  t.rows = t.ring + static_cast<int>(round_up(ring_bytes, int64_t{16}));
  t.bias = t.rows + t.tiles_m * 16 * 4;
  t.places = t.bias + t.tiles_m * 16 * 4;
  t.outputs = t.places + t.warps * 8 * pixel_shuffle_tiles_n(problem) * 8;
  t.barriers = t.outputs + t.warps * t.staged_bytes;
  t.shared_bytes = t.barriers + 16 * kPixelShuffleMaxStages;
  return t.shared_bytes <= kPixelShuffleShared;
}

// Sets stage_steps and stages: stages as large as leaves three of them, or two.
inline bool pixel_shuffle_fit(const Problem& problem, PixelShuffleTile& t) {
  const int64_t steps = ceil_div(problem.in_channels_per_group() * problem.element_size(), int64_t{32});
  for (const int least : {3, 2}) {
    for (t.stage_steps = 8; t.stage_steps >= 1; t.stage_steps /= 2) {
      if (t.stage_steps >= 2 * steps) continue;
      t.stages = least;
      if (!pixel_shuffle_finish(problem, t)) continue;
      const int spare = static_cast<int>(kPixelShuffleShared) - t.shared_bytes;
      t.stages = std::min(kPixelShuffleMaxStages, least + spare / t.stage_bytes);
      return pixel_shuffle_finish(problem, t);
    }
  }
  return false;
}

// What a store costs, compared with whole vectors.
inline double pixel_shuffle_store_factor(const Problem& problem, const PixelShuffleTile& t) {
  const int64_t kernel = problem.axis[2].kernel, vector = 16 / problem.element_size();
  if (problem.layout == Layout::kChannelsLast) {
    const bool whole = t.channels == problem.out_channels;
    const int64_t run = whole ? kernel * t.channels : t.channels;
    if (run % vector == 0 && (whole || problem.out_channels_per_group() % vector == 0)) return 1;
    return t.staged_bytes > 0 ? 2 : 6;
  }
  if (kernel != 2 && kernel != 4) return 4;
  return problem.axis[2].in * kernel % vector == 0 ? 1 : 1.8;
}

// Milliseconds on an H200, roughly. In cycles of a multiprocessor: products, what a stage and a tile cost besides, and
// stores, which all multiprocessors do at about the same time.
inline double pixel_shuffle_estimate(const Problem& problem, const PixelShuffleTile& t) {
  constexpr double kMultiprocessors = 132, kCyclesPerMs = 1.7e6;
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const double size = double(problem.element_size()), rows = 16.0 * t.tiles_m;
  const double chunks = double(problem.groups * ceil_div(problem.out_channels_per_group(), int64_t{t.channels}));
  const double tiles = std::ceil(double(problem.batch * problem.in_positions()) / t.positions);
  const bool split = pixel_shuffle_splits(problem), two = t.warps == 8;
  const double step = split ? (two ? 690 : 400) : (two ? 460 : 340);
  const double parts = std::ceil(double(t.steps) / t.stage_steps);
  double part = 250;
  if (t.streamed) part += 400 + 125.0 * std::ceil(2.0 * t.tiles_m / t.warps) * t.stage_steps / (size == 4 ? 1.5 : 2);
  const double outputs = double(t.channels * problem.kernel_positions()) * t.positions;
  const double stores = pixel_shuffle_store_factor(problem, t) * std::max(2500.0 * t.rounds, outputs * size / 17);
  // Copies of 16 bytes, or of what divides a row.
  const int64_t row_bytes = (channels_last ? problem.in_channels_per_group() : problem.in_positions()) * int64_t(size);
  const double copies = t.positions * t.steps * 32.0 / double(std::min<int64_t>(16, row_bytes & -row_bytes));
  const double work = t.rounds * t.steps * step + parts * part + stores + t.positions * t.steps * 32.0 / 64;
  const double tile = std::max(work, copies);
  const double start = 6000 + (t.streamed ? 2000 : rows * t.steps * 32 / 12);
  const double streams = std::max(1.0, std::min(tiles, std::floor(kMultiprocessors / chunks)));
  const double waves = std::ceil(chunks * streams / kMultiprocessors);
  const double cycles = waves * (start + std::ceil(tiles / streams) * tile);
  return 0.0025 + std::max(cycles / kCyclesPerMs, problem.bytes() / 3.9e9 + 0.004);
}

// The best of a few tiles; false if none fits. Its cost in milliseconds.
inline bool pixel_shuffle_tile(const Problem& problem, PixelShuffleTile& best, double& cost) {
  const int64_t taps = problem.kernel_positions(), channels = problem.out_channels_per_group();
  const int64_t vector = problem.layout == Layout::kChannelsLast ? 16 / problem.element_size() : 1;
  bool found = false;
  for (const auto& [warps, warps_m] : {std::pair{8, 1}, {8, 2}, {8, 4}, {4, 1}, {4, 2}, {4, 4}}) {
    for (int rounds = 1; rounds <= 4; rounds *= 2) {
      const int64_t rows = 64 * warps_m * rounds;
      if (rounds > 1 && rows / 2 >= channels * taps) break;
      int64_t chunk = std::max<int64_t>(1, rows / taps);
      if (chunk < channels && chunk >= vector) chunk -= chunk % vector;
      if (chunk >= channels) chunk = channels;
      for (const bool streamed : {false, true}) {
        PixelShuffleTile t{};
        t.warps = warps, t.warps_m = warps_m, t.channels = static_cast<int>(chunk);
        t.streamed = streamed;
        if (!pixel_shuffle_fit(problem, t)) continue;
        const double ms = pixel_shuffle_estimate(problem, t);
        if (!found || ms < cost) best = t, cost = ms;
        found = true;
      }
    }
  }
  // Worth it where the ring has room for the distance, and a block has tiles enough.
  best.staggered = found && best.warps == 8 && !best.streamed && best.stages * best.stage_steps * 4 >= best.steps * 5 &&
                   problem.batch * problem.in_positions() * problem.groups * channels >=
                       int64_t{132 * 6} * best.positions * best.channels;
  return found;
}

// "" if the family can make the call, else a reason. `tile` and `cost` are set where it is "".
inline std::string pixel_shuffle_refusal(const Problem& problem, PixelShuffleTile& tile, double& cost) {
  if (problem.dtype == DType::kFloat64) return "float64";
  for (const Axis& axis : problem.axis) {
    if (axis.kernel != axis.stride) return "kernel and stride differ";
    if (axis.padding != 0 || axis.output_padding != 0) return "padding or output padding";
    if (axis.kernel > 1 && axis.dilation != 1) return "dilation";
  }
  if (problem.in_channels_per_group() < 8) return "fewer than 8 input channels a group";
  if (problem.out_channels_per_group() < 1) return "no output channels";
  constexpr double kLimit = double(1 << 30);
  if (double(problem.batch) * double(problem.in_positions()) >= kLimit) return "2^30 input positions";
  if (double(problem.out_channels) * double(problem.out_positions()) >= 2 * kLimit) return "samples of 2^31 elements";
  if (double(problem.in_channels) * double(problem.out_channels) * double(problem.kernel_positions()) >= kLimit) {
    return "a weight of 2^30 elements";
  }
  if (problem.kernel_positions() > 4096 || !pixel_shuffle_tile(problem, tile, cost)) {
    return "too many taps or input channels for shared memory";
  }
  return "";
}
inline std::string pixel_shuffle_refusal(const Problem& problem) {
  PixelShuffleTile tile;
  double cost;
  return pixel_shuffle_refusal(problem, tile, cost);
}

// Milliseconds on an H200, roughly, of a problem that is not refused.
inline double pixel_shuffle_cost_ms(const Problem& problem) {
  PixelShuffleTile tile;
  double cost = 0;
  return pixel_shuffle_tile(problem, tile, cost) ? cost : 1e9;
}

}  // namespace fastconvt
