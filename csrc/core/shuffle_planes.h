// The 16-bit GEMM of contiguous transposed convolutions whose taps never overlap, kernel == stride on every axis, over
// planes that tensor copies cannot read: what it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// Turned round against the shuffle GEMM: rows are (output channel, tap), columns positions, whole lines of an image, so
// that what a channel's rows make is one run of its outputs, that one copy stores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "shuffle_gemm.h"

namespace fastconvt {

inline constexpr int kShufflePlanesColumns[] = {112, 200, 216};
inline constexpr int kShufflePlanesMaxSlots = 8, kShufflePlanesMaxStages = 16;
inline constexpr int kShufflePlanesStage = 8192;  // bytes: weights of 64 rows by 64 input channels
inline constexpr int64_t kShufflePlanesShared = 227 * 1024;
inline constexpr int kShufflePlanesNear = 4;  // row tiles before a tile's end its successor's inputs are asked for
// Warpgroups that multiply, in turns: three if they have the registers, so that two store meanwhile.
constexpr int shuffle_planes_teams(int columns) { return columns > 200 ? 2 : 3; }
inline constexpr int kShufflePlanesBlocks = 132;  // that run at once on an H200

struct ShufflePlanesTile {
  int columns;    // of a tile: of kShufflePlanesColumns
  int lines;      // of the input, in a tile
  int tiles;      // of a plane
  int row_tiles;  // of 64 rows each
  int chunks;     // of 64 input channels
  int slots, stages;
  int pitch;         // bytes from 8 positions of a chunk's inputs to the next 8
  int slot_bytes;    // of a chunk of inputs
  int buffer_bytes;  // of two that stage 64 rows
  int run_bytes;     // from a staged run to the next one
  bool skews;        // staged runs lie as their targets do modulo 32 bytes
  int copy;          // bytes of a copy of inputs: 16, 8 or 4
  int64_t items;     // tiles by row tiles
  // Shared memory in bytes: where each part begins; weights come first.
  int slots_begin, staging, barriers, places, shared_bytes;
  double cost_ms;
};

// Planes of outputs follow each other where the kernel is flat: lines of all of them.
inline int64_t shuffle_planes_height(const Problem& p) {
  return p.axis[0].kernel == 1 ? p.axis[0].in * p.axis[1].in : p.axis[1].in;
}
inline int64_t shuffle_planes_depth(const Problem& p) { return p.axis[0].kernel == 1 ? 1 : p.axis[0].in; }

// Everything that follows from columns; false if they do not suit the problem.
inline bool finish_shuffle_planes_tile(const Problem& p, ShufflePlanesTile& t) {
  const int64_t width = p.axis[2].in, height = shuffle_planes_height(p);
  const int64_t taps = p.axis[1].kernel * p.axis[2].kernel;
  if (width > t.columns) return false;
  t.tiles = static_cast<int>(ceil_div(height, std::min(height, t.columns / width)));
  t.lines = static_cast<int>(ceil_div(height, int64_t{t.tiles}));
  t.tiles = static_cast<int>(ceil_div(height, int64_t{t.lines}));
  const int64_t starts = p.in_positions() | height * width | (t.tiles > 1 ? t.lines * width : 0);
  t.copy = static_cast<int>(std::min<int64_t>(starts & -starts, 8) * 2);
  if (t.copy < 4) return false;
  t.row_tiles = static_cast<int>(ceil_div(p.out_channels * p.kernel_positions(), int64_t{64}));
  t.chunks = static_cast<int>(ceil_div(p.in_channels, int64_t{64}));
  t.items = p.batch * shuffle_planes_depth(p) * t.tiles * t.row_tiles;
  if (t.items >= int64_t{1} << 31) return false;
  t.pitch = 1024 + 16;  // other banks for neighbouring blocks of positions
  t.slot_bytes = t.columns / 8 * t.pitch;
  // Staged runs lie as their targets do modulo 32 bytes, and 32 bytes further modulo 128, for different banks.
  const int64_t run = t.lines * width * taps * 2;
  const int64_t places = p.out_positions() | height * width * taps | (t.tiles > 1 ? t.lines * width * taps : 0);
  t.skews = places % 16 != 0;
  t.run_bytes = static_cast<int>(round_up(run + (t.skews ? 16 : 0), int64_t{32}));
  while (t.run_bytes % 128 != 32) t.run_bytes += 32;
  t.buffer_bytes = static_cast<int>(64 / taps * t.run_bytes);
  // A chunk's slot serves all of a tile's rows; further ones take the next tile's first.
  const int64_t left = kShufflePlanesShared - 2 * t.buffer_bytes - 896;
  const int64_t room = (left - 6 * kShufflePlanesStage) / t.slot_bytes;
  const int most = std::min(2 * t.chunks, kShufflePlanesMaxSlots);
  t.slots = std::max(t.chunks, static_cast<int>(std::min<int64_t>(room, most)));
  if (t.slots > kShufflePlanesMaxSlots) return false;
  t.stages = static_cast<int>(
      std::min<int64_t>((left - int64_t{t.slots} * t.slot_bytes) / kShufflePlanesStage, kShufflePlanesMaxStages));
  if (t.stages < 4) return false;
  t.slots_begin = t.stages * kShufflePlanesStage;
  t.staging = static_cast<int>(round_up(t.slots_begin + t.slots * t.slot_bytes, 128));
  t.barriers = t.staging + 2 * t.buffer_bytes;
  t.places = t.barriers + 512;
  t.shared_bytes = t.places + 256;
  return true;
}

// Milliseconds on an H200. In clocks of a multiprocessor: what 64 rows take, products and the turn, their weights, or,
// in turns, products and the store, which is the slower the more warpgroups there are; and inputs, at the start and
// from tile to tile.
inline double shuffle_planes_tile_cost_ms(const Problem& p, const ShufflePlanesTile& t) {
  const int teams = shuffle_planes_teams(t.columns);
  const double made = double(ceil_div(t.items, int64_t{kShufflePlanesBlocks}));
  const double products = 120 + 2.0 * t.columns * t.chunks;
  const double store = teams == 2 ? 700 + 10.5 * t.columns : 1500 + 14.0 * t.columns;
  const double rows = std::max({products + 400, 410.0 * t.chunks, (products + store) / teams});
  const double inputs = t.chunks * t.columns, changes = std::ceil(made / t.row_tiles) - 1;
  const double clocks = made * rows + inputs * (11 + changes * (t.slots > t.chunks ? 9 : 14)) + store;
  return 0.0055 + std::max(clocks / 1.72e6, p.bytes() / 3.4e9);
}

inline ShufflePlanesTile find_shuffle_planes_tile(const Problem& problem) {
  ShufflePlanesTile best{};
  best.cost_ms = 2e9;
  for (const int columns : kShufflePlanesColumns) {
    ShufflePlanesTile t{};
    t.columns = columns;
    if (!finish_shuffle_planes_tile(problem, t)) continue;
    t.cost_ms = shuffle_planes_tile_cost_ms(problem, t);
    if (t.cost_ms < best.cost_ms) best = t;
  }
  return best;
}
inline ShufflePlanesTile shuffle_planes_tile(const Problem& p) { return last_result<find_shuffle_planes_tile>(p); }

// "" if the family can make the call, else a reason. Tensors that are not aligned go to the shuffle GEMM.
inline std::string shuffle_planes_refusal(const Problem& p) {
  if (p.layout != Layout::kContiguous) return "channels_last";
  if (p.groups != 1) return "groups";
  if (p.axis[2].kernel != 2 && p.axis[2].kernel != 4) return "a kernel other than 2 or 4 wide";
  if (16 % (p.axis[1].kernel * p.axis[2].kernel) != 0) return "taps of a plane that do not divide 16";
  if (p.out_channels * p.kernel_positions() % 8 != 0) return "weights that tensor copies cannot read";
  if (p.axis[2].in > 216) return "lines of more than 216 positions";
  const int64_t line = p.axis[2].in;
  if (line * p.axis[1].kernel * p.axis[2].kernel % 8 != 0) return "runs of outputs that are no multiple of 16 bytes";
  if (line % 2 != 0) return "lines of an odd size";
  const std::string refusal = shuffle_gemm_refusal(p);
  if (!refusal.empty()) return refusal;
  if (shuffle_planes_tile(p).cost_ms >= 1e9) return "too many input channels";
  return "";
}

inline double shuffle_planes_cost_ms(const Problem& p) { return shuffle_planes_tile(p).cost_ms; }

}  // namespace fastconvt
