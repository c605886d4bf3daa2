// The 16-bit GEMM of transposed convolutions whose taps never overlap, kernel == stride on every axis: what it can
// make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// Every output has one tap, so a layer is one matrix product: rows are positions, the inner dimension input channels,
// columns (output channel, tap), or (tap, output channel) where weights are channels_last. Both operands are read as
// they lie in memory, by tensor copies; the store shuffles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kShuffleGemmChunk = 64;  // input channels of a stage, and positions of a tile
inline constexpr int kShuffleGemmColumns[] = {256, 128, 64};
inline constexpr int kShuffleGemmMaxStages = 24;
inline constexpr int64_t kShuffleGemmShared = 227 * 1024;
inline constexpr int kShuffleGemmStaging = 8192;  // bytes of a buffer of a warpgroup's outputs on their way to memory
inline constexpr int kShuffleGemmBlocks = 132;    // that run at once on an H200
inline constexpr int kShuffleGemmFewChannels = 16, kShuffleGemmFewColumns = 80;  // at most, in a warp's registers
inline constexpr int kShuffleGemmFewWarps = 12, kShuffleGemmFewStages = 6;       // of a block, of a warp
// Shared memory of a warp: outputs of 32 positions, and inputs; of a block: bias and weights.
inline constexpr int kShuffleGemmFewShared =
    kShuffleGemmFewColumns * 64 + kShuffleGemmFewStages * kShuffleGemmFewChannels * 128;
inline constexpr int kShuffleGemmFewTables = kShuffleGemmFewColumns * (4 + 2 * kShuffleGemmFewChannels);
// Lines: bytes of a stage, 64 channels of 128 positions; from a staged line to the next one; of a warp's staging.
inline constexpr int kShuffleGemmLinesStage = 16384, kShuffleGemmLinesPitch = 256 + 32;
inline constexpr int kShuffleGemmLinesStaging = 8 * kShuffleGemmLinesPitch + 64;

// How outputs leave shared memory: threads store vectors; tensor copies of boxes; bulk copies of all that is side by
// side of a line of positions. Copies cost a block's warpgroups less, but have the fewer registers of four of them.
// kFew: of few channels and columns, warps multiply and store on their own. kLines: rows are the weights' columns.
enum class ShuffleGemmStore { kVectors, kBoxes, kRuns, kFew, kLines };

// A tile that tensor copies store, channels_last: positions of some lines of inputs, up to 64. Lines are all, or where
// kernels are deep a slice's; what of a tile lies past their ends is not stored.
struct ShuffleGemmBox {
  int width, height;
  int64_t lines, across, down, slices;  // tiles: along a line, across lines of a slice
  int64_t tiles() const { return across * down * slices; }
};

struct ShuffleGemmTile {
  ShuffleGemmStore store;
  int warpgroups;  // that multiply: 2, or 4 of fewer registers
  int sharing;     // of them: a team, 1 or 2, that multiplies at a time by the same weights; teams take turns
  int columns;     // of a tile: of kShuffleGemmColumns
  bool resident;   // a block's weights stay, else they come with the inputs
  bool by_hand;    // weights that tensor copies cannot read
  int chunks;      // of input channels, in a group
  bool packed;     // contiguous inputs that tensor copies cannot read
  int column_blocks;
  int stages, stage_bytes;
  int buffers;           // of a warpgroup's outputs, 1 or 2
  ShuffleGemmBox box;    // channels_last, if boxes are stored
  int64_t tiles, items;  // of positions; a team's tiles by a column block
  // Shared memory in bytes: where each part begins; resident weights come first.
  int ring, staging, terms, offsets, barriers, shared_bytes;
  double cost_ms;

  // Of warpgroups that make an item together: of kLines 64 rows each, of others a tile each.
  int teams() const { return warpgroups / (store == ShuffleGemmStore::kLines ? columns / 64 : sharing); }
};

// Whether tensor copies cannot read the inputs: contiguous planes of sizes that are no multiple of 16 bytes. Planes of
// all samples of a channel are put side by side first.
inline bool shuffle_gemm_packs(const Problem& p) {
  return p.layout == Layout::kContiguous && p.in_positions() % 8 != 0;
}

inline int64_t shuffle_gemm_tiles(const Problem& p, bool packed) {
  return p.layout == Layout::kContiguous && !packed ? p.batch * ceil_div(p.in_positions(), int64_t{64})
                                                    : ceil_div(p.batch * p.in_positions(), int64_t{64});
}

// Outputs of neighbouring columns that are neighbours in memory, channels_last.
inline int64_t shuffle_gemm_run(const Problem& p) {
  return p.groups == 1 ? p.axis[2].kernel * p.out_channels : p.out_channels_per_group();
}

// Whether tensor copies can store outputs.
inline bool shuffle_gemm_can_copy_boxes(const Problem& p) {
  if (p.layout != Layout::kContiguous) return shuffle_gemm_run(p) % 64 == 0;
  const int64_t width = p.axis[2].in, taps = p.kernel_positions(), kernel = p.axis[2].kernel;
  return (kernel == 2 || kernel == 4) && 64 % taps == 0 && width * kernel % 64 == 0 &&
         (p.groups == 1 || p.out_channels_per_group() * taps % 64 == 0);
}

// As few tiles as can be.
inline ShuffleGemmBox find_shuffle_gemm_box(const Problem& p) {
  const int64_t all = p.batch * p.axis[0].in * p.axis[1].in, width = p.axis[2].in;
  const int64_t slices = p.axis[0].kernel > 1 ? p.batch * p.axis[0].in : 1, lines = all / slices;
  ShuffleGemmBox best{};
  for (int64_t w = std::min<int64_t>(width, 64); w > 0; --w) {
    const int64_t h = std::min(64 / w, lines);
    const ShuffleGemmBox box{static_cast<int>(w), static_cast<int>(h), lines,
                             ceil_div(width, w),  ceil_div(lines, h),  slices};
    if (best.width == 0 || box.tiles() < best.tiles()) best = box;
  }
  return best;
}

// Whether outputs of a row of taps, or of a run, are whole vectors of 16 bytes.
inline bool shuffle_gemm_whole(const Problem& p) {
  return (p.layout == Layout::kContiguous ? p.axis[2].out() : shuffle_gemm_run(p)) % 8 == 0;
}

// Whether there is a kernel for store, warpgroups and columns.
inline bool shuffle_gemm_can_store(const Problem& p, const ShuffleGemmTile& t) {
  const bool contiguous = p.layout == Layout::kContiguous, whole = shuffle_gemm_whole(p);
  const int64_t taps = p.axis[2].kernel, run = shuffle_gemm_run(p);
  if (t.warpgroups == 2) return t.columns == 128 || (whole && (!contiguous || taps <= 4));
  const bool narrow = !contiguous && t.store == ShuffleGemmStore::kBoxes && t.columns == 64 && t.resident;
  if ((t.columns != 128 && !narrow) || is_rectifier(p.activation, p.alpha)) return false;
  if (t.store == ShuffleGemmStore::kVectors) return contiguous && taps == 2 && whole;
  if (t.store == ShuffleGemmStore::kBoxes) return shuffle_gemm_can_copy_boxes(p);
  return !contiguous && p.groups == 1 && run <= 64 && run % 2 == 0 && p.axis[2].in * run % 8 == 0 &&
         p.axis[2].in >= 16 && t.resident && t.column_blocks == 1;
}

// Whether warps can work on their own: they store boxes of 32 positions, or runs.
inline bool shuffle_gemm_few(const Problem& p) {
  const int64_t width = p.axis[2].in, run = shuffle_gemm_run(p);
  if (p.groups > 1 || p.in_channels > kShuffleGemmFewChannels || shuffle_gemm_packs(p)) return false;
  if (p.out_channels * p.kernel_positions() > kShuffleGemmFewColumns) return false;
  if (p.layout == Layout::kContiguous) return p.axis[2].kernel == 2 && width % 32 == 0;
  return run % 2 == 0 && width * run % 8 == 0 && width >= 16;
}

// Where rows are the weights' columns, 256 of a block or 128 of two teams: contiguous lines of outputs that begin at
// multiples of 32 bytes, since vectors that share 32 bytes take long. A team's ring has the inputs of two items.
inline bool finish_shuffle_gemm_lines(const Problem& p, ShuffleGemmTile& t) {
  const int64_t columns = p.out_channels_per_group() * p.kernel_positions();
  if (p.layout != Layout::kContiguous || p.groups > 1 || t.packed || t.by_hand) return false;
  if (p.axis[2].kernel != 2 || p.axis[2].out() % 16 != 0 || columns <= 64) return false;
  if (t.column_blocks > kShuffleGemmBlocks) return false;
  const int64_t weights = int64_t{t.chunks} * t.columns * 128;
  const int staging = 16 * kShuffleGemmLinesStaging, teams = t.teams();
  const int64_t left = kShuffleGemmShared - weights - staging - 1024;
  t.stage_bytes = kShuffleGemmLinesStage;
  t.stages = static_cast<int>(std::min<int64_t>(left / t.stage_bytes, kShuffleGemmMaxStages)) / teams;
  if (left < 0 || t.stages < 2 * t.chunks) return false;
  t.ring = static_cast<int>(weights);
  t.staging = t.ring + teams * t.stages * t.stage_bytes;
  t.barriers = t.staging + staging;
  t.shared_bytes = t.barriers + 1024;
  t.tiles = shuffle_gemm_tiles(p, t.packed);
  t.items = ceil_div(t.tiles, int64_t{2}) * t.column_blocks;
  return t.items < int64_t{1} << 31;
}

// Everything that follows from what is chosen, the first five; false if they do not suit the problem.
inline bool finish_shuffle_gemm_tile(const Problem& p, ShuffleGemmTile& t) {
  const bool contiguous = p.layout == Layout::kContiguous;
  const int64_t columns = p.out_channels_per_group() * p.kernel_positions(), in = p.in_channels_per_group();
  t.by_hand = columns % 8 != 0;
  t.chunks = static_cast<int>(ceil_div(in, int64_t{kShuffleGemmChunk}));
  t.packed = shuffle_gemm_packs(p);
  t.column_blocks = static_cast<int>(ceil_div(columns, int64_t{t.columns}));
  const int64_t parts = t.column_blocks * p.groups;
  if (t.store == ShuffleGemmStore::kFew) {
    t.tiles = shuffle_gemm_tiles(p, t.packed);
    t.items = ceil_div(t.tiles, int64_t{kShuffleGemmFewWarps});
    t.shared_bytes = kShuffleGemmFewWarps * (kShuffleGemmFewShared + 8 * kShuffleGemmFewStages) + kShuffleGemmFewTables;
    return shuffle_gemm_few(p);
  }
  if (t.store == ShuffleGemmStore::kLines) return finish_shuffle_gemm_lines(p, t);
  if (!shuffle_gemm_can_store(p, t)) return false;
  const bool choice = shuffle_gemm_whole(p) && (!contiguous || p.axis[2].kernel <= 4);  // of columns
  if (choice && t.columns > 64 && columns <= t.columns / 2) return false;
  if (t.resident ? parts > kShuffleGemmBlocks || t.sharing == t.warpgroups : t.by_hand) return false;
  const int64_t weights = t.resident ? int64_t{t.chunks} * t.columns * 128 : 0;
  if (weights >= kShuffleGemmShared) return false;
  const bool boxes = t.store == ShuffleGemmStore::kBoxes;
  const int terms = t.warpgroups * t.columns * 4, offsets = boxes ? 0 : terms / 2;
  t.stage_bytes = t.sharing * 8192 + (t.resident ? 0 : t.columns * 128);
  // Runs need the outputs of all columns at once; boxes have two buffers where that leaves the inputs of four items, or
  // of one where inputs come from the cache: eight blocks read them.
  const int ahead = (t.column_blocks < 8 ? 4 : 1) * t.chunks;
  int staging = 0;
  for (t.buffers = t.store == ShuffleGemmStore::kVectors || t.columns == 64 ? 1 : 2; t.buffers > 0; --t.buffers) {
    staging = t.buffers * t.warpgroups * kShuffleGemmStaging;
    const int64_t left = kShuffleGemmShared - weights - terms - offsets - staging - 1024;
    t.stages = static_cast<int>(std::min<int64_t>(left / t.stage_bytes, kShuffleGemmMaxStages));
    if (!boxes || t.buffers == 1 || (t.resident && t.stages >= ahead)) break;
  }
  if (t.stages < (t.resident ? 5 : 2)) return false;
  t.ring = static_cast<int>(weights);
  t.staging = t.ring + t.stages * t.stage_bytes;
  t.terms = t.staging + staging;
  t.offsets = t.terms + terms;
  t.barriers = t.offsets + offsets;
  t.shared_bytes = t.barriers + 1024;
  if (boxes && !contiguous) t.box = find_shuffle_gemm_box(p);
  t.tiles = t.box.width > 0 ? t.box.tiles() : shuffle_gemm_tiles(p, t.packed);
  t.items = ceil_div(t.tiles, int64_t{t.sharing}) * parts;
  return t.items < int64_t{1} << 31;
}

// About the larger one; more where they are close.
inline double shuffle_gemm_longer(double a, double b) {
  const double more = std::max(a, b), ratio = std::min(a, b) / more, square = ratio * ratio, fourth = square * square;
  return more * std::sqrt(std::sqrt(std::sqrt(1 + fourth * fourth)));
}

// Milliseconds on an H200. In clocks of a multiprocessor: what a team multiplies, bound by tensor cores or by its
// copies, and what it stores, both for an item; teams do it in turns. The first one waits for its copies; four
// warpgroups' first stores are not in each other's way. Or bound by memory: outputs that the cache cannot keep are
// written as they come, best close to each other: contiguous in long rows, channels_last of few positions at a time.
inline double shuffle_gemm_tile_cost_ms(const Problem& p, const ShuffleGemmTile& t) {
  const bool contiguous = p.layout == Layout::kContiguous;
  const int64_t columns = p.out_channels_per_group() * p.kernel_positions(), parts = t.column_blocks * p.groups;
  if (t.store == ShuffleGemmStore::kFew) {
    const double made_ms = double(t.tiles) / kShuffleGemmBlocks * 360 / 1.755e6;
    return shuffle_gemm_longer(0.009 + made_ms, 0.009 + p.bytes() / 3.9e9);
  }
  if (t.store == ShuffleGemmStore::kLines) {
    const int64_t teams = kShuffleGemmBlocks / t.column_blocks * t.column_blocks * t.teams();
    const double made_ms = double(ceil_div(t.items, teams)) * (1024 * t.chunks + 1700) / 1.755e6;
    return shuffle_gemm_longer(0.0065 + made_ms, 0.004 + p.bytes() / 3.75e9);
  }
  const int teams = t.teams();
  const int64_t blocks = t.resident ? kShuffleGemmBlocks / parts * parts : kShuffleGemmBlocks;
  const int64_t rounds = ceil_div(t.items, blocks);
  const double inputs = t.sharing * 8192, weights = t.columns * 128;
  const bool boxes = t.store != ShuffleGemmStore::kVectors;
  const double thin = p.in_channels_per_group() <= 16 ? 0.25 : 1;  // of a chunk only the first products
  const double chunk = std::max(thin * t.sharing * std::max(1.67 * t.columns, t.warpgroups == 2 ? 126.0 : 200.0) + 260,
                                (inputs + (t.resident ? 0 : weights)) / 58.7);
  const double products = t.chunks * chunk * (t.resident ? 0.9 : 1.0) * (boxes ? 0.91 : 1.0);
  const double used =
      double(t.column_blocks == 1 ? std::min<int64_t>(t.columns, round_up(columns, int64_t{64})) : t.columns);
  double store = t.warpgroups == 2 ? 300 + 14.7 * used
                 : !boxes          ? 1115 + 17.8 * used
                 : t.columns == 64 ? 1850
                                   : 1588 + 14.9 * used;
  if (!boxes && !shuffle_gemm_whole(p)) store *= contiguous ? 1.52 : 1.81;
  const double made = teams == 1 ? products + 0.92 * store : std::max(products, (products + store) / teams);
  const double item = shuffle_gemm_longer(made, p.bytes() / double(t.items) / 19.0);
  const double first = (t.resident ? 410 : 370) + t.chunks * std::max(chunk, (inputs + weights) / 58.7) +
                       store * (t.warpgroups == 4 ? 0.64 : 1);
  const double packing = t.packed ? 0.0037 + 2.0 * double(p.in_elements() * p.element_size()) / 3e9 : 0;
  const double made_ms = 0.006 + (first + double(rounds - 1) * item) / 1.755e6 + packing;
  const double scattered = contiguous ? (t.sharing == 1 ? 0.07 : 0) + (boxes ? 0.045 : 0)
                                      : (t.columns > 64 ? 0.08 : 0) + (t.sharing == 2 ? 0.015 : 0);
  const double bytes = p.bytes() + scattered * std::max(0.0, double(p.out_elements() * p.element_size()) - 60e6);
  const bool behind = t.store == ShuffleGemmStore::kBoxes && t.buffers == 2 && t.stages >= 4 * t.chunks;
  const double edges = 0.0055 + 0.0005 * t.sharing - (behind ? 0.0006 : 0);
  return shuffle_gemm_longer(made_ms, edges + bytes / 3.92e9);
}

inline ShuffleGemmTile find_shuffle_gemm_tile(const Problem& problem) {
  ShuffleGemmTile best{};
  best.cost_ms = 2e9;
  const auto compare = [&](ShuffleGemmTile& t) {
    if (!finish_shuffle_gemm_tile(problem, t)) return;
    t.cost_ms = shuffle_gemm_tile_cost_ms(problem, t);
    if (t.cost_ms < best.cost_ms) best = t;
  };
  using Store = ShuffleGemmStore;
  constexpr struct {
    Store store;
    int warpgroups;
  } kKernels[] = {{Store::kVectors, 2}, {Store::kVectors, 4}, {Store::kBoxes, 4}, {Store::kRuns, 4}};
  constexpr struct {
    bool resident;
    int sharing;
  } kSources[] = {{true, 1}, {true, 2}, {false, 1}, {false, 2}};
  for (const auto& kernel : kKernels) {
    for (const auto& source : kSources) {
      for (const int columns : kShuffleGemmColumns) {
        ShuffleGemmTile t{};
        t.store = kernel.store, t.warpgroups = kernel.warpgroups, t.columns = columns;
        t.resident = source.resident, t.sharing = source.sharing;
        compare(t);
      }
    }
  }
  ShuffleGemmTile few{};
  few.store = Store::kFew, few.warpgroups = 2, few.sharing = 1, few.columns = kShuffleGemmFewColumns;
  few.resident = true;
  compare(few);
  // 128 rows have the finer items, unless inputs are read more than twice.
  ShuffleGemmTile lines{};
  lines.store = Store::kLines, lines.warpgroups = 4, lines.sharing = 2, lines.resident = true;
  lines.columns = problem.out_channels_per_group() * problem.kernel_positions() > 256 ? 256 : 128;
  compare(lines);
  return best;
}
inline ShuffleGemmTile shuffle_gemm_tile(const Problem& p) { return last_result<find_shuffle_gemm_tile>(p); }

// "" if the family can make the call, else a reason. Outputs that are not aligned to 16 bytes are made slowly.
inline std::string shuffle_gemm_refusal(const Problem& p) {
  if (p.element_size() != 2) return "not 16 bits";
  for (const Axis& axis : p.axis) {
    if (axis.kernel != axis.stride) return "kernel and stride differ";
    if (axis.padding != 0 || axis.output_padding != 0) return "padding or output padding";
    if (axis.kernel > 1 && axis.dilation != 1) return "dilation";
  }
  const int64_t in = p.in_channels_per_group(), out = p.out_channels_per_group(), width = p.axis[2].kernel;
  if (in < 8) return "fewer than 8 input channels a group";
  if (p.out_elements() == 0 || out < 1) return "no elements";
  constexpr double kLimit = double(1 << 30);
  if (double(p.batch) * double(p.in_positions()) >= kLimit) return "2^30 input positions";
  if (double(p.batch) * double(p.in_channels) >= kLimit) return "2^30 channels of all samples";
  if (double(p.out_channels) * double(p.out_positions()) >= 2 * kLimit) return "samples of 2^31 elements";
  if (double(p.in_channels) * double(out) * double(p.kernel_positions()) >= kLimit) return "a weight of 2^30 elements";
  if (double(p.in_channels) * double(p.in_positions()) >= double(int64_t{1} << 38))
    return "an input of 2^38 elements a sample";
  if (p.layout == Layout::kContiguous) {
    if (width != 2 && width != 4 && width != 8 && width != 16)
      return "contiguous with a kernel other than 2, 4, 8, 16 wide";
  } else {
    if (p.weight_layout != p.layout && p.kernel_positions() != 1 && out != 1)
      return "channels_last with a contiguous weight";
    if (in % 8 != 0) return "channels_last with input channels a group that are no multiple of 8";
    if (shuffle_gemm_run(p) % 2 != 0) return "channels_last with odd runs of outputs";
  }
  if (shuffle_gemm_tile(p).cost_ms >= 1e9) return "too many columns or groups";
  return "";
}

inline double shuffle_gemm_cost_ms(const Problem& p) { return shuffle_gemm_tile(p).cost_ms; }

}  // namespace fastconvt
