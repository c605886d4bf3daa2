// The head family: transposed convolutions with few output channels a group. What it can make, and the tile of a block.
// Plain C++17: no Torch, no CUDA.
//
// Scatter and fold: one matrix product makes, for every input position, what each (output channel, tap) adds to the
// output; its rows are the pairs, its inner dimension the input channels, its columns positions. It knows nothing of
// stride, padding and dilation. The products lie in shared memory, and every output folds its taps there. A block holds
// a box of positions of all axes but one, along which it marches: what reaches outputs of a later step waits in shared
// memory. Short windows have a way without a fold (heads_window.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "heads_box.h"
#include "heads_window.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kHeadsMaxRowTiles = 5;  // of 16 pairs, that a warp holds
inline constexpr int kHeadsMaxWarps = 10;    // each makes 32 positions
inline constexpr int kHeadsMaxMarch = 16;    // kernel of the axis of the march
inline constexpr int kHeadsMaxStride = 16;
inline constexpr int kHeadsViewBytes = 48;  // what a warp notes of its work item
inline constexpr int64_t kHeadsShared = 227 * 1024;

// How an axis is cut into tiles of places. A place of the last axis is `stride` neighbouring outputs, from a multiple
// of the stride on; one of the mid axis is a base (problem.h). Place u reads inputs from u + low to u + high. Tile t
// begins at place first + t * places; the first tile owns `lead` places more, and so the others begin that much later,
// since inputs before the first one do not exist.
struct HeadsSpan {
  int64_t first, end;  // places
  int64_t low, high;
  int64_t places, lead, tiles;
  int64_t before;  // positions held before the tile's begin
  int64_t held;    // positions whose products are held
  int64_t inputs;  // the most positions that a tile reads
};

struct HeadsTile {
  int march, mid;     // axes; the last axis is the third one
  int64_t channels;   // output channels of a group
  int64_t row_tiles;  // of 16 (channel, tap) pairs
  int64_t steps;      // of 32 bytes of input channels
  int64_t batch;      // entries in a box
  HeadsSpan of_mid, of_width;
  int64_t quads;  // of four positions, in a box
  int64_t warps;
  int64_t pitch;         // floats between the products of neighbouring pairs
  int64_t chunks;        // of 32 places, in a row
  int64_t rows;          // of outputs, in a box and step, without channels
  int64_t pending_rows;  // that wait, for every row and channel
  int64_t row_bytes;     // of a warp's outputs on their way to memory
  // Shared memory in bytes: where each part begins; the weights come first.
  int64_t products, pending, outputs, views, bias, shared_bytes;
};

// `unit` is 4 where positions are read four at a time: `places` is a multiple of 4 then, or the whole axis.
inline void heads_cut(const Axis& axis, int64_t places, int64_t lead, int64_t unit, HeadsSpan& s) {
  const auto down = [unit](int64_t a) { return a >= 0 ? a / unit * unit : -((unit - 1 - a) / unit * unit); };
  s.places = std::min(places, s.end - s.first);
  s.lead = lead;
  s.tiles = std::max<int64_t>(1, ceil_div(s.end - s.first - lead, s.places));
  s.before = s.first - down(s.first + s.low);
  s.held = -down(-(s.before + s.places + lead + s.high));
  s.inputs = 0;
  // Tiles read most near the first one that no border clips.
  const int64_t whole = ceil_div(std::max<int64_t>(0, unit - s.low - s.first), s.places);
  for (const int64_t t : {int64_t{0}, int64_t{1}, whole - 1, whole, whole + 1, s.tiles - 2, s.tiles - 1}) {
    if (t < 0 || t >= s.tiles) continue;
    const int64_t from = s.first + t * s.places;
    const int64_t begin = std::max<int64_t>(0, down(from + (t > 0 ? lead : 0) + s.low));
    const int64_t stop = std::min(axis.in, std::min(from + s.places + lead, s.end) + s.high);
    if (stop > begin) s.inputs = std::max(s.inputs, -down(begin - stop));
  }
}

// Of the mid axis: bases.
inline HeadsSpan heads_bases(const Axis& axis) {
  HeadsSpan s{};
  s.first = axis.base(0), s.end = axis.base(axis.out() - 1) + 1;
  s.low = -((axis.kernel - 1) * axis.dilation / axis.stride);
  return s;
}

// Of the last axis: runs of `stride` outputs.
inline HeadsSpan heads_runs(const Axis& axis) {
  HeadsSpan s{};
  s.end = (axis.out() - 1) / axis.stride + 1;
  bool any = false;
  for (int64_t t = 0; t < axis.kernel; ++t) {
    // Output e of a run reads its input by tap t if s divides e + padding - t * dilation.
    const int64_t shift = axis.padding - t * axis.dilation;
    const int64_t offset = shift > 0 ? (shift + axis.stride - 1) / axis.stride : -(-shift / axis.stride);
    s.low = any ? std::min(s.low, offset) : offset, s.high = any ? std::max(s.high, offset) : offset;
    any = true;
  }
  return s;
}

// Everything that follows from the spans.
inline void heads_finish(const Problem& problem, HeadsTile& t) {
  const Axis &march = problem.axis[t.march], &mid = problem.axis[t.mid], &width = problem.axis[2];
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  t.quads = t.batch * t.of_mid.inputs * t.of_width.inputs / 4;
  t.warps = std::max<int64_t>(1, ceil_div(t.quads, 8));
  // 4 modulo 8 keeps the banks of a warp's stores apart.
  t.pitch = ceil_div(t.batch * t.of_mid.held * t.of_width.held - 4, 8) * 8 + 4;
  t.chunks = ceil_div(t.of_width.places, 32);
  const int64_t mid_outputs = (t.of_mid.places + t.of_mid.lead) * mid.stride;
  t.rows = t.batch * mid_outputs;
  const int64_t turns = march.dilation * march.tap_step() / march.stride;
  t.pending_rows = std::max<int64_t>(0, march.kernel - march.tap_step()) * turns;
  t.row_bytes = (32 * width.stride * (channels_last ? t.channels : 1) * problem.element_size() + 31) / 16 * 16;
  t.products = t.steps * t.row_tiles * 512;
  t.pending = t.products + ceil_div(t.channels * problem.kernel_positions() * t.pitch + 32, 4) * 16;
  t.outputs = t.pending + t.pending_rows * t.rows * t.channels * t.chunks * 32 * width.stride * 4;
  t.views = t.outputs + t.warps * t.row_bytes;
  t.bias = t.views + t.warps * kHeadsViewBytes;
  t.shared_bytes = t.bias + t.channels * 4;
}

// The time of all boxes, in steps of a warp: few resident warps do not hide their latency, few blocks do not overlap
// products and folding.
inline double heads_work(const Problem& problem, const HeadsTile& t) {
  const int64_t most = t.row_tiles > 4 ? 12 : 16;  // warps of a multiprocessor, by their registers
  const int64_t by_registers = std::max<int64_t>(1, most / t.warps);
  const int64_t blocks = std::min<int64_t>(kHeadsShared / (t.shared_bytes + 1024), by_registers);
  return double(problem.groups * t.of_mid.tiles * t.of_width.tiles * ceil_div(problem.batch, t.batch) * t.warps) *
         (1 + 3 / double(blocks * t.warps)) * (1 + 0.3 / double(blocks));
}

// The box: shared_bytes stays 0 where there is none.
inline void heads_choose_box(const Problem& problem, HeadsTile& tile) {
  const Axis &mid = problem.axis[tile.mid], &width = problem.axis[2];
  constexpr int64_t kMost = kHeadsMaxWarps * 32;
  HeadsTile best{};
  double best_cost = 0;
  const auto consider = [&](HeadsTile t) {
    if (t.of_width.inputs * t.of_mid.inputs > kMost) return;
    const int64_t positions = std::max<int64_t>(1, t.of_width.inputs * t.of_mid.inputs);
    for (int64_t batch = 1; batch <= std::min<int64_t>({problem.batch, kMost / positions, 8}); batch *= 2) {
      t.batch = batch;
      heads_finish(problem, t);
      if (t.shared_bytes > kHeadsShared) break;
      // Short rows are slow to read.
      const double cost = heads_work(problem, t) * (1 + 12 / double(std::max<int64_t>(1, t.of_width.inputs)));
      if (best.shared_bytes == 0 || cost < best_cost) best = t, best_cost = cost;
    }
  };
  const auto consider_mid = [&](HeadsTile t) {
    t.of_mid = heads_bases(mid);
    const int64_t all = t.of_mid.end - t.of_mid.first, reach = -t.of_mid.low;
    heads_cut(mid, all, 0, 1, t.of_mid);
    consider(t);
    for (int64_t places = 1; places < all && places <= 16; places += places < 8 ? 1 : 4) {
      if (places * t.of_width.inputs > kMost) break;
      heads_cut(mid, places, 0, 1, t.of_mid);
      consider(t);
      if (reach == 0 || places + reach >= all) continue;
      heads_cut(mid, places, reach, 1, t.of_mid);
      consider(t);
    }
  };
  HeadsTile t = tile;
  t.of_width = heads_runs(width);
  const int64_t all = t.of_width.end;
  heads_cut(width, all, 0, 4, t.of_width);
  if (t.of_width.inputs <= kMost) consider_mid(t);
  const int64_t halo = t.of_width.held - all;
  for (const int64_t positions : {64, 128, 192, 256}) {
    const int64_t places = (positions - halo) / 4 * 4;
    if (places <= 0 || places >= all) continue;
    heads_cut(width, places, 0, 4, t.of_width);
    consider_mid(t);
  }
  tile = best;
}

inline HeadsTile heads_tile(const Problem& problem) {
  HeadsTile t{};
  t.march = problem.axis[0].is_trivial() ? 1 : 0;
  t.mid = 1 - t.march;
  t.channels = problem.out_channels_per_group();
  t.row_tiles = ceil_div(t.channels * problem.kernel_positions(), 16);
  t.steps = ceil_div(problem.in_channels_per_group() * problem.element_size(), 32);
  heads_choose_box(problem, t);
  return t;
}

// "" if the family can make the call, else a reason; the tile of what it can make.
inline std::string heads_refusal(const Problem& problem, HeadsTile& t) {
  if (problem.dtype == DType::kFloat64) return "float64";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& a : problem.axis) {
    if (a.in >= kLimit || a.out() >= kLimit || a.padding >= kLimit || a.stride > kHeadsMaxStride || a.kernel > 1024 ||
        a.dilation > 1024) {
      return "a long axis, or a large kernel, stride, padding or dilation";
    }
  }
  if (problem.batch >= kLimit || problem.in_channels >= 32768 || problem.out_channels >= 32768) {
    return "a large batch or many channels";
  }
  if (problem.out_channels_per_group() * problem.kernel_positions() > kHeadsMaxRowTiles * 16) {
    return "more than 80 pairs of an output channel of a group and a tap";
  }
  // The general kernel is as good where there is little to multiply.
  if (problem.in_channels_per_group() < 8) return "fewer than 8 input channels a group";
  const Axis &width = problem.axis[2], &march = problem.axis[problem.axis[0].is_trivial() ? 1 : 0];
  const int64_t most_taps = (width.kernel - 1) / width.tap_step() + 1;
  if (width.stride == 3 || width.stride > 4 || (width.stride == 4 && most_taps > 2)) {
    return "a stride of " + std::to_string(width.stride) + " along the last axis";
  }
  if (march.kernel > kHeadsMaxMarch) return "a kernel beyond 16 along the first axis";
  if (problem.out_elements() == 0) return "";
  t = heads_tile(problem);
  if (t.shared_bytes == 0) return "too many input channels, or taps too far apart, for the shared memory of a block";
  const double boxes = double(t.of_mid.tiles) * double(t.of_width.tiles) * double(problem.batch);
  if (boxes * double(problem.groups) * 64 >= 2e9) return "too many tiles";
  return "";
}

// Milliseconds on an H200: products by inner length and pairs, folding by pairs.
inline double heads_cost_ms(const Problem& problem, const HeadsTile& t) {
  const bool halves = problem.element_size() == 2;
  const double product = halves ? 0.28 : problem.allow_tf32 ? 0.5 : 0.83;  // picoseconds
  const double pairs = double(t.channels * problem.kernel_positions());
  const double folds = pairs > 64 ? 2 : 0.9;
  const double position = folds * pairs + product * double(problem.in_channels_per_group() * t.row_tiles);
  const bool apart = problem.axis[2].kernel <= problem.axis[2].stride;  // more is stored for what is loaded
  const double layout = problem.layout != Layout::kChannelsLast ? 1 : apart ? 1.65 : 1.12;
  return 0.028 + 1e-9 / 1.28 * layout * position * 32 * double(problem.axis[t.march].in) * heads_work(problem, t);
}

// The ways of the family: scatter and fold, windows (heads_window.h), and small layers in one turn (heads_box.h), which
// need compute capability 9.0 exactly. "" if one of the first two can make the call; the time and the way of the best;
// the tile is that of scatter and fold.
enum class HeadsWay : int { kFold, kWindows, kBox };
struct HeadsChoice {
  std::string refusal;
  double cost_ms = 0;
  HeadsWay way = HeadsWay::kFold;
  HeadsTile tile{};
};
inline HeadsChoice heads_choose(const Problem& problem, bool with_boxes = true) {
  HeadsChoice choice;
  choice.refusal = heads_refusal(problem, choice.tile);
  if (problem.out_elements() == 0) return choice;
  if (choice.refusal.empty()) choice.cost_ms = heads_cost_ms(problem, choice.tile);
  const auto consider = [&choice](double cost, HeadsWay way) {
    if (!choice.refusal.empty() || cost < choice.cost_ms) {
      choice.refusal.clear(), choice.cost_ms = cost, choice.way = way;
    }
  };
  if (heads_window_refusal(problem).empty()) consider(heads_window_cost_ms(problem), HeadsWay::kWindows);
  if (!with_boxes || !choice.refusal.empty()) return choice;
  if (heads_box_refusal(problem).empty()) consider(heads_box_cost_ms(problem), HeadsWay::kBox);
  return choice;
}

inline std::string heads_refusal(const Problem& problem) { return heads_choose(problem).refusal; }
inline double heads_cost_ms(const Problem& problem) { return heads_choose(problem).cost_ms; }

}  // namespace fastconvt
