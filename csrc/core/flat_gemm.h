// The flat GEMM family, float32 and TF32 on matrix units: what it can make, and how it divides a problem. Plain C++17.
//
// Along each axis an output is o = stride * cell + f, 0 <= f < stride, and the cells of one phase (f0, f1, f2) are an
// implicit matrix product, as in core/axis_phases.h. Here the cells of the whole batch are walked flat: along an inner
// axis every line of cells is followed by a few padding positions, which the next line shares, so that a tap is one
// offset into a flat list of positions, whatever line or batch entry it reaches, and a tile is any run of positions.
// Along an outer axis there is no padding; every shift of it is staged anew. Which axes are inner is chosen by cost.
// A class of items is a phase, or two neighbouring phases of the last axis, whose outputs then stand side by side.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "axis_phases.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kFlatGemmRows = 64;      // output channels of an item
inline constexpr int kFlatGemmColumns = 128;  // cells of a product
inline constexpr int kFlatGemmChannels = 16;  // input channels of a stage
inline constexpr int kFlatGemmTapBytes = kFlatGemmRows * kFlatGemmChannels * 4;
inline constexpr int kFlatGemmMaxTaps = 128;  // of the kernel, and stages of a chunk
inline constexpr int kFlatGemmMaxClasses = 64;
inline constexpr int kFlatGemmMaxBlocks = 144;             // that share items
inline constexpr int kFlatGemmMaxStages = 6;               // in flight
inline constexpr int kFlatGemmMaxStaged = 1024;            // positions
inline constexpr int kFlatGemmRunBytes = 8 * 16 * 72 * 4;  // of eight warps, 16 channels by 64 outputs
// Float32 sums of equal terms lose some 2^-27 each time that products are added to them, beyond 2^-22.
inline constexpr int kFlatGemmChain = 4;  // taps of a chunk that the matrix unit adds, in long chains; else two
inline constexpr int kFlatGemmMaxSums = 96;
inline constexpr int kFlatGemmShared = 225 * 1024;

// One axis of a class of items: one phase, or two (units).
struct FlatGemmAxisClass {
  int taps[2], first_tap[2], shift[2];  // tap number j of a unit reads cell + shift - j * offset_step
  int low, high;                        // shifts of both units
  int shifts;                           // different ones
};

struct FlatGemmAxis {
  int cells, units, classes, offset_step, tap_step;
  int pitch;   // positions of a line, as an inner axis
  int extent;  // of the shifts of a class, at most
  FlatGemmAxisClass of[kMaxAxisStride];
};

inline FlatGemmAxis flat_gemm_axis(const Axis& axis, int units) {
  FlatGemmAxis a{};
  const int stride = static_cast<int>(axis.stride), gcd = static_cast<int>(std::gcd(axis.stride, axis.dilation));
  a.cells = static_cast<int>(ceil_div(axis.out(), axis.stride));
  a.units = units;
  a.classes = ceil_div(stride, units);
  a.offset_step = static_cast<int>(axis.dilation) / gcd;
  a.tap_step = stride / gcd;
  a.pitch = a.cells;
  for (int c = 0; c < a.classes; ++c) {
    FlatGemmAxisClass& k = a.of[c];
    bool any = false;
    for (int u = 0; u < units && c * units + u < stride; ++u) {
      const AxisPhase phase = axis_phase(axis, c * units + u);
      k.taps[u] = phase.num_taps, k.first_tap[u] = phase.first_tap, k.shift[u] = phase.shift;
      if (phase.num_taps == 0) continue;
      const int low = phase.shift - (phase.num_taps - 1) * a.offset_step;
      k.low = any ? std::min(k.low, low) : low;
      k.high = any ? std::max(k.high, phase.shift) : phase.shift;
      any = true;
    }
    if (!any) continue;
    k.shifts = k.taps[0] + k.taps[1];
    if (k.taps[0] > 0 && k.taps[1] > 0 && (k.shift[0] - k.shift[1]) % a.offset_step == 0) {
      k.shifts = (k.high - k.low) / a.offset_step + 1;
    }
    a.extent = std::max(a.extent, k.high - k.low);
    // A position beyond the line is the next line's, which must be beyond the input for both.
    const int in = static_cast<int>(axis.in);
    const int pitch = k.low <= 0 ? std::max(a.cells + std::max(k.high, 0), in - k.low) : a.cells + k.high - k.low;
    a.pitch = std::max(a.pitch, pitch);
  }
  return a;
}

// How a problem is divided.
struct FlatGemmTile {
  bool pairs;      // the two units of an item are phases; else they are cells
  bool unaligned;  // runs of outputs are not multiples of 16 bytes
  bool runs;       // outputs are stored through shared memory
  int inner;       // bit a: axis a is an inner one
  int pitch[3];    // positions of a line along each axis
  int cells;       // positions of an item
  int staged;      // with those that its taps reach
  int chunks;      // of input channels
  int stage_taps;  // at most
  int stages;      // in flight
  int classes, channel_blocks;
  bool chains;  // float32 products are added in longer chains
  bool even;    // all items take the same time
  bool split;   // blocks share items, by stages and chunks
  int units;    // of those, of an item
  int64_t positions, tiles, items;
  int input_bytes, stage_bytes, table_at, runs_at, places_at, barriers_at, shared_bytes;
  double cost_ms;
};

// Divides shared memory; false if it is too small.
inline bool place_flat_gemm_tile(FlatGemmTile& t, bool three) {
  const int parts = three ? 2 : 1;
  t.input_bytes = round_up(t.staged, three ? 32 : 64) * kFlatGemmChannels * 4;
  t.stage_bytes = (t.input_bytes + t.stage_taps * kFlatGemmTapBytes) * parts;
  const int run_bytes = t.runs ? kFlatGemmRunBytes : 0;
  const int rest = run_bytes + round_up(t.staged * 4, 16) + t.cells * 8 + 16 * kFlatGemmMaxStages + 1024;
  t.stages = std::min(kFlatGemmMaxStages, (kFlatGemmShared - rest) / t.stage_bytes);
  if (t.stages < 2) return false;
  t.places_at = t.stages * t.stage_bytes;
  t.table_at = t.places_at + t.cells * 8;
  t.runs_at = t.table_at + round_up(t.staged * 4, 16);
  t.barriers_at = t.runs_at + run_bytes;
  t.shared_bytes = t.barriers_at + 16 * t.stages + 1024;  // the beginning is aligned to 1024 bytes
  return true;
}

// Clocks of an H200 at 1.75 GHz, fitted.
struct FlatGemmCost {
  double product;            // of a tap of a chunk, for one unit
  double position, weights;  // loading a position, and the weights of a tap
  double least, stage;       // of a stage and chunk, and of a stage
  double overlap;            // how much of the shorter of products and loads adds to the longer
  double item;
  double store[7];  // aligned pairs, runs at stride 2, at more, cells alone, channels-last, unaligned pairs, at more
  double constants[2];  // an item without taps: contiguous, channels-last
  double tail;          // a last round of few items, against a full one
  double split;         // where blocks share items
};
inline constexpr FlatGemmCost kFlatGemmCost[2] = {
    // TF32, float32
    {246, 4.5, 58, 900, 1340, 0.46, 2470, {8500, 10400, 22000, 15300, 7200, 15800, 50000}, {20000, 9700}, 0.66, 16500},
    {590, 9.3, 204, 1500, 100, 0.55, 4310, {8300, 6500, 22300, 12100, 6900, 23300, 42300}, {21600, 6900}, 0.4, 9300},
};

// Milliseconds of the products on an H200.
inline double flat_gemm_products_ms(const Problem& problem, const FlatGemmAxis (&axis)[3], FlatGemmTile& t) {
  const FlatGemmCost& cost = kFlatGemmCost[problem.allow_tf32 ? 0 : 1];
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const int store = channels_last                 ? 4
                    : !t.pairs                    ? 3
                    : !t.unaligned                ? 0
                    : !t.runs                     ? problem.axis[2].stride == 2 ? 5 : 6
                    : problem.axis[2].stride == 2 ? 1
                                                  : 2;
  // Of an item's channels those that exist are stored.
  double stored = double(problem.out_channels_per_group()) / (t.channel_blocks * kFlatGemmRows);
  if (channels_last) stored = std::max(stored, 0.6);
  double sum = 0, longest = 0, shortest = 1e30, most_shifts = 0, least_shifts = 1e30;
  for (int c0 = 0; c0 < axis[0].classes; ++c0)
    for (int c1 = 0; c1 < axis[1].classes; ++c1)
      for (int c2 = 0; c2 < axis[2].classes; ++c2) {
        const FlatGemmAxisClass* const k[3] = {&axis[0].of[c0], &axis[1].of[c1], &axis[2].of[c2]};
        double shifts = 1;
        for (int a = 0; a < 3; ++a) {
          if (!(t.inner >> a & 1)) shifts *= k[a]->shifts;
          if (k[a]->shifts == 0) shifts = 0;
        }
        double item = cost.constants[channels_last] * stored;
        if (shifts > 0) {
          const double taps = double(k[0]->taps[0]) * k[1]->taps[0] * (k[2]->taps[0] + k[2]->taps[1]);
          const double products = taps * (t.pairs ? 1 : 2) * cost.product;
          const double loads = std::max(shifts * (t.staged * cost.position) + taps * cost.weights, shifts * cost.least);
          const double both = std::max(products, loads) + cost.overlap * std::min(products, loads);
          item = t.chunks * both + shifts * cost.stage + cost.item + cost.store[store] * stored;
        }
        sum += item;
        longest = std::max(longest, item), shortest = std::min(shortest, item);
        most_shifts = std::max(most_shifts, shifts), least_shifts = std::min(least_shifts, shifts);
      }
  const double average = sum / t.classes;
  // Long items start late; else the last round is not full, unless blocks share items.
  double rounds = double(t.items) / 132;
  t.split = false;
  t.units = static_cast<int>(most_shifts) * t.chunks;
  t.even = false;
  if (longest > 1.2 * average) return std::max(rounds * average + 0.5 * (longest - average), longest) / 1.75e6;
  const double full = std::floor(rounds), part = rounds - full;
  if (part > 0) rounds = full + (full > 0 ? cost.tail + (1 - cost.tail) * part : 1);
  const double shared = double(t.items) / 132 * average + cost.split;
  t.even = !t.runs && shortest == longest && least_shifts == most_shifts && most_shifts > 0;
  if (t.even && rounds < 8 && t.units > 1 && double(t.items) * t.units < 1e9 && shared < 0.96 * rounds * average) {
    t.split = true;
    return shared / 1.75e6;
  }
  return rounds * average / 1.75e6;
}

// How often products are added to a float32 sum: after `chain` taps of a stage and chunk.
inline double flat_gemm_sums(const FlatGemmAxis (&axis)[3], const FlatGemmTile& t, int chain) {
  double stages = 1, taps = 1;
  for (int a = 0; a < 3; ++a) {
    int most = 0;
    for (int c = 0; c < axis[a].classes; ++c) {
      most = std::max({most, axis[a].of[c].taps[0], axis[a].of[c].taps[1]});
    }
    (t.inner >> a & 1 ? taps : stages) *= most;
  }
  return t.chunks * stages * std::ceil(taps / chain);
}

// Of tiles with or without pairs the cheapest, if it is cheaper than `best`.
inline void choose_flat_gemm_tile(const Problem& problem, bool pairs, int only_inner, FlatGemmTile& best) {
  const bool three = !problem.allow_tf32, contiguous = problem.layout == Layout::kContiguous;
  FlatGemmAxis axis[3];
  for (int a = 0; a < 3; ++a) axis[a] = flat_gemm_axis(problem.axis[a], a == 2 && pairs ? 2 : 1);
  FlatGemmTile t{};
  t.pairs = pairs;
  t.cells = kFlatGemmColumns * (pairs ? 2 : 4);
  t.chunks = static_cast<int>(ceil_div(problem.in_channels_per_group(), int64_t{kFlatGemmChannels}));
  t.channel_blocks = static_cast<int>(ceil_div(problem.out_channels_per_group(), int64_t{kFlatGemmRows}));
  t.classes = axis[0].classes * axis[1].classes * axis[2].classes;
  for (int inner = 0; inner < 8; ++inner) {
    if (only_inner >= 0 && inner != only_inner) continue;
    // An axis of one position is the same inside and outside.
    if ((inner & 1 && problem.axis[0].is_trivial()) || (inner & 2 && problem.axis[1].is_trivial())) continue;
    t.inner = inner;
    double positions = double(problem.batch), reach = 0;
    int64_t step = 1;
    t.stage_taps = 1;
    for (int a = 2; a >= 0; --a) {
      const bool is_inner = inner >> a & 1;
      t.pitch[a] = is_inner ? axis[a].pitch : axis[a].cells;
      // Pairs of cells begin at even places, so that their outputs are aligned.
      if (a == 2 && contiguous && t.pitch[a] >= 16) t.pitch[a] = round_up(t.pitch[a], 2);
      if (is_inner) reach += double(axis[a].extent) * double(step);
      step *= t.pitch[a];
      positions *= t.pitch[a];
      int most = 0;
      for (int c = 0; c < axis[a].classes; ++c) {
        const FlatGemmAxisClass& k = axis[a].of[c];
        most = std::max(most, is_inner ? k.taps[0] + k.taps[1] : (k.taps[0] > 0) + (k.taps[1] > 0));
      }
      t.stage_taps *= std::max(most, 1);
    }
    for (int a = 0, last = 1; a < 3; ++a) {  // no padding after the last cell
      last = a == 0 ? t.pitch[1] * t.pitch[2] : a == 1 ? t.pitch[2] : 1;
      positions -= double(t.pitch[a] - axis[a].cells) * last;
    }
    t.unaligned = pairs && contiguous &&
                  (problem.axis[2].stride != 2 || problem.axis[2].out() % 4 != 0 ||
                   problem.axis[2].out() != 2 * axis[2].cells || t.pitch[2] % 2 != 0);
    t.chains = three && flat_gemm_sums(axis, t, 2) > kFlatGemmMaxSums;
    if (t.chains && flat_gemm_sums(axis, t, kFlatGemmChain) > kFlatGemmMaxSums) continue;
    if (reach + t.cells > kFlatGemmMaxStaged || positions >= double(int64_t{1} << 30)) continue;
    t.staged = t.cells + static_cast<int>(reach);
    t.positions = static_cast<int64_t>(positions);
    t.tiles = ceil_div(t.positions, int64_t{t.cells});
    const double items = double(t.tiles) * t.classes * t.channel_blocks * double(problem.groups);
    if (items >= double(int64_t{1} << 30)) continue;
    t.items = static_cast<int64_t>(items);
    // Through shared memory, or without it, with more room for stages and blocks that share items.
    for (int through = t.unaligned; through >= 0; --through) {
      t.runs = through != 0;
      if (!place_flat_gemm_tile(t, three)) continue;
      t.cost_ms = flat_gemm_products_ms(problem, axis, t);
      if (t.cost_ms < best.cost_ms) best = t;
    }
  }
}

// Contiguous outputs of neighbouring phases must be made together; channels-last ones may be.
inline FlatGemmTile flat_gemm_tile(const Problem& problem, int only_inner = -1) {
  FlatGemmTile best{};
  best.cost_ms = 2e9;
  const bool strided = problem.axis[2].stride > 1;
  if (strided) choose_flat_gemm_tile(problem, true, only_inner, best);
  if (!strided || problem.layout == Layout::kChannelsLast) choose_flat_gemm_tile(problem, false, only_inner, best);
  return best;
}

// "" if the family can make the call, else a reason.
inline std::string flat_gemm_refusal(const Problem& problem) {
  if (problem.dtype != DType::kFloat32) return "not float32";
  if (problem.in_channels_per_group() < 8 || problem.out_channels_per_group() < 8) {
    return "fewer than 8 channels a group";
  }
  if (has_no_elements(problem)) return "no elements";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& axis : problem.axis) {
    if (axis.stride > kMaxAxisStride) return "a stride of more than 32";
    if (axis.kernel > kFlatGemmMaxTaps || axis.padding >= kLimit || axis.dilation >= 4096) {
      return "a large kernel, dilation or padding";
    }
    if (axis.in >= kLimit || axis.out() >= kLimit) return "an axis of 2^24 or more";
    if ((axis.padding + (axis.kernel - 1) * axis.dilation) / axis.stride >= 32000) return "taps too far apart";
  }
  if (problem.kernel_positions() > kFlatGemmMaxTaps) return "a kernel of more than 128 taps";
  if (problem.axis[0].stride * problem.axis[1].stride * problem.axis[2].stride > kFlatGemmMaxClasses) {
    return "more than 64 phases";
  }
  if (std::max(problem.in_channels, problem.out_channels) >= kLimit || problem.batch >= kLimit) {
    return "2^24 channels or batch entries";
  }
  if (double(problem.in_positions()) * double(problem.in_channels) >= double(int64_t{1} << 31)) {
    return "an input of 2^31 elements a batch entry";
  }
  const FlatGemmTile tile = flat_gemm_tile(problem);
  if (tile.cost_ms >= 1e9) return "too many items, long float32 sums, or too many inputs of an item for shared memory";
  // Inputs of an item are addressed from its first batch entry's.
  const double entries = 2 + kFlatGemmMaxStaged / (double(tile.pitch[0]) * tile.pitch[1] * tile.pitch[2]);
  if (entries * double(problem.in_positions()) * double(problem.in_channels) >= double(int64_t{1} << 31)) {
    return "inputs of an item too far apart";
  }
  return "";
}

// On an H200, with the launch that packs.
inline double flat_gemm_cost_ms(const Problem& problem) {
  const double weights = double(problem.weight_elements()) * 4 * (problem.allow_tf32 ? 2 : 3);
  return 0.009 + std::max(flat_gemm_tile(problem).cost_ms, problem.bytes() / 3.2e9) + weights / 2.0e9;
}

}  // namespace fastconvt
