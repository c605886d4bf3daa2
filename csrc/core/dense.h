// The forward on matrix units from compute capability 8.0 on, for any kernel, stride and dilation: tiles, refusal and
// cost. Plain C++17: no Torch, no CUDA; csrc/cuda/dense.* compute what this plans.
//
// The outputs of one phase f, o = f + stride * cell along each axis, are to the input what the input's gradient is to
// the output's: the cells of a layer of stride 1, whose taps are those of the phase in reverse, as far apart as the
// phase's taps read. So tiles, staging and products are those of dense_gradient.h, for all phases in one launch. Where
// the phases of an axis read about the same inputs, they are joined: a product has columns for each of them, and all
// taps that one of them has.
#pragma once

#include <string>

#include "dense_gradient.h"

namespace fastconvt {

inline constexpr int64_t kDenseMaxWorkspace = int64_t{1} << 30;

// A phase's taps: the place that the first one reads, for cell 0, and how many there are.
struct DensePhaseTaps {
  int64_t start = 0, count = 0;
};
inline DensePhaseTaps dense_taps(const Axis& axis, int64_t f) {
  const int64_t phase = axis.phase(f), first = axis.first_tap(phase);
  if (first >= axis.kernel) return {};
  const int64_t count = axis.num_taps(phase);
  return {
      axis.base(f) + axis.offset(phase, first) - (count - 1) * (axis.dilation / std::gcd(axis.stride, axis.dilation)),
      count};
}

// The taps of all phases together; none if they read different places.
inline DensePhaseTaps dense_joined_taps(const Axis& axis) {
  constexpr int64_t kMaxJoined = 16;
  const int64_t turn = axis.dilation / std::gcd(axis.stride, axis.dilation);
  if (axis.stride > kMaxJoined) return {};
  DensePhaseTaps all{};
  for (int64_t f = 0; f < axis.stride; ++f) {
    const DensePhaseTaps taps = dense_taps(axis, f);
    if (taps.count == 0) continue;
    if (all.count == 0) all = taps;
    if ((taps.start - all.start) % turn != 0) return {};
    const int64_t start = std::min(all.start, taps.start);
    const int64_t end = std::max(all.start + all.count * turn, taps.start + taps.count * turn);
    all = {start, (end - start) / turn};
  }
  return all;
}

// The taps of a phase, at most; others have one less, or none.
inline int64_t dense_most_taps(const Axis& axis) { return ceil_div(axis.kernel, axis.tap_step()); }

inline bool dense_is_joined(unsigned joined, int a) { return joined >> a & 1; }

// Warps of a block that copy. More of them leave fewer registers to those that multiply.
constexpr int dense_producers(bool tf32) { return tf32 ? 8 : 4; }

// Whether batch entries are a first axis, so that a box may have several.
inline bool dense_folds_batch(const Problem& p) {
  constexpr double kMax = double(1 << 30);
  return p.axis[0].is_trivial() && double(p.in_elements()) < kMax && double(p.out_elements()) < kMax;
}
inline Problem dense_folded(const Problem& p) {
  Problem folded = p;
  if (dense_folds_batch(p)) folded.axis[0].in = p.batch, folded.batch = 1;
  return folded;
}

// Products as a layer whose input's gradient they are. The padding is the phase's own; what is added to the output
// makes the sizes right.
inline Problem dense_phase(const Problem& layer, unsigned joined) {
  const Problem p = dense_folded(layer);
  Problem phase = p;
  phase.in_channels = p.out_channels, phase.out_channels = p.in_channels;
  phase.weight_layout = Layout::kContiguous, phase.has_bias = false;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    Axis& to = phase.axis[a];
    const bool join = dense_is_joined(joined, a);
    to = Axis{ceil_div(axis.out(), axis.stride),
              join ? dense_joined_taps(axis).count : dense_most_taps(axis),
              1,
              0,
              0,
              axis.dilation / std::gcd(axis.stride, axis.dilation)};
    to.output_padding = axis.in - to.out();
    if (join) phase.in_channels *= axis.stride;
  }
  return phase;
}

// Whether phases with one tap less than others have a list of their own.
inline bool dense_has_fewer_taps(const Axis& axis) {
  return axis.kernel > axis.tap_step() && axis.kernel % axis.tap_step() != 0;
}

// What all tiles of a way to join have in common.
inline DenseGradientTile dense_first_tile(const Problem& p, unsigned joined) {
  DenseGradientTile t{};
  t.joined = joined;
  t.any_columns = true;
  for (int a = 0; a < 3; ++a) {
    if (dense_is_joined(joined, a)) continue;
    const Axis& axis = p.axis[a];
    const int64_t busy = std::min(axis.kernel, axis.tap_step());
    t.phases *= axis.stride, t.busy_phases *= busy;
    t.filled *= double(axis.kernel) / double(busy * dense_most_taps(axis));
    if (dense_has_fewer_taps(axis)) t.kinds *= 2;
  }
  return t;
}

// Calls function(joined) with the ways to join that are worth a look: all axes where the products of taps that do not
// exist are not too many, the last of them, none.
template <typename Function>
void dense_for_joined(const Problem& p, Function&& function) {
  constexpr double kMaxWaste = 2.5;
  unsigned all = 0, last = 0;
  double waste = 1;
  for (int a = 2; a >= 0; --a) {
    const Axis& axis = p.axis[a];
    if (axis.stride == 1) continue;
    const double more = double(dense_joined_taps(axis).count * axis.stride) / double(axis.kernel);
    if (more == 0 || waste * more > kMaxWaste) continue;
    waste *= more, all |= 1u << a;
    if (last == 0) last = all;
  }
  function(all);
  if (last != all) function(last);
  if (all != 0 && waste > 1) function(0u);
}

// Clocks of an H200, fitted to 843 tiles of 66 layers: four of five within an eighth.
inline constexpr double kDenseProducts[] = {34.8, 12.6, 7.3};               // of 16 x 8 numbers: float32, TF32, 16 bits
inline constexpr double kDenseLoads = 11.5;                                 // of 16 rows, or eight columns, of operands
inline constexpr double kDenseCopies[2][2] = {{0.46, 0.42}, {0.32, 0.63}};  // of what the gradients' take
inline constexpr double kDensePacked = 390;                                 // bytes of packed weights a clock
inline constexpr double kDenseStage[] = {940, 2430}, kDenseEnd[] = {1340, 1940};
inline constexpr double kDenseStores[] = {36, 33, 25.5};  // of an output of each thread
inline constexpr double kDenseBytesMs = 3.2e9, kDenseEntriesMs = 6.6e7;

inline int dense_precision(const Problem& p) { return p.element_size() == 2 ? 2 : p.allow_tf32 ? 1 : 0; }

// Whether neighbouring columns are neighbours in memory, pair by pair.
inline bool dense_has_pairs(const Problem& layer, unsigned joined) {
  if (layer.layout == Layout::kChannelsLast) return layer.out_channels_per_group() % 2 == 0;
  return dense_is_joined(joined, 2) && layer.axis[2].stride % 2 == 0 && layer.axis[2].out() % 2 == 0;
}

// How much more outputs take where neighbours are stored one by one, by others, or in short runs.
inline double dense_scatter(const Problem& layer, const DenseGradientTile& t) {
  const bool pairs = dense_has_pairs(layer, t.joined);
  const double sector = 32 / double(layer.element_size());
  if (layer.layout == Layout::kChannelsLast) {
    return 1 + 0.66 * sector / double(std::min(t.in_channels(), layer.out_channels_per_group())) + (pairs ? 0 : 3);
  }
  const Axis& width = layer.axis[2];
  const bool joined = dense_is_joined(t.joined, 2);
  const double others = joined ? 0 : double(std::min<int64_t>(width.stride, 8) - 1);
  return 1 + 0.89 * others + 1.6 * sector / double(t.axis[2].box * (joined ? width.stride : 1)) + (pairs ? 0 : 0.87);
}
inline double dense_store_cycles(const Problem& layer, const DenseGradientTile& t) {
  return kDenseStores[dense_precision(layer)] * double(4 * t.m_tiles * t.n_tiles) * dense_scatter(layer, t);
}

// Of a block for a tile, about.
inline double dense_cycles(const Problem& layer, const Problem& phase, const DenseGradientTile& t) {
  const bool last = layer.layout == Layout::kChannelsLast, words = layer.element_size() == 4;
  const double filled = 0.82 + 0.18 * t.filled, line = double(t.axis[2].places() * layer.element_size());
  const double copies = dense_gradient_copies(phase, t.places(), t.chunk_planes, last) * kDenseCopies[!words][last] *
                            (last ? 1 : 1 + 0.14 * 32 / line) +
                        (t.resident ? 0 : filled * double(t.weight_bytes) / kDensePacked);
  const double step = kDenseProducts[dense_precision(layer)] * double(t.m_tiles * t.n_tiles) +
                      kDenseLoads * double(t.m_tiles + t.n_tiles);
  const double product = filled * double(t.steps) / double(t.warps_k) * step;
  const double stage = std::max({product, copies, (copies + 890) / double(t.stages - 1)}) +
                       0.51 * std::min(product, copies) + kDenseStage[!words];
  return double(t.chunks) * stage + kDenseEnd[!words] + dense_store_cycles(layer, t);
}

// Packed weights: of 32 lanes, a step and eight channels an entry.
inline int64_t dense_entries(const Problem& p, const DenseGradientTile& t) {
  return t.phases * p.groups * t.in_blocks * t.chunks * t.steps * (t.in_channels() / 8) * 32;
}

// Milliseconds on an H200; a tile's cycles are those of all busy phases.
inline double dense_tile_ms(const Problem& p, const DenseGradientTile& t) {
  const double tiles = double(dense_gradient_boxes(dense_folded(p), t) * p.groups * t.in_blocks);
  const double idle = tiles * double(t.phases - t.busy_phases) / double(132 * dense_gradient_blocks(p.element_size()));
  const double cycles = t.cycles + idle * (2280 + 2.8 * dense_store_cycles(p, t));
  const double weights = double(dense_entries(p, t)) * (dense_gradient_split(p) ? 2 : 1) / kDenseEntriesMs;
  return 0.014 + std::max(cycles / kDenseClocksMs, p.bytes() / kDenseBytesMs) + weights;
}

template <int64_t kShared>
DenseGradientTile dense_tile_within(const Problem& p) {
  constexpr DenseGradientShape kShapes[] = {
      {8, 1, 1, 4, 4}, {8, 1, 1, 2, 4}, {4, 1, 2, 2, 4}, {2, 1, 4, 2, 4}, {1, 1, 8, 2, 4}, {4, 2, 1, 4, 4},
      {4, 2, 1, 2, 4}, {2, 2, 2, 2, 4}, {1, 2, 4, 2, 4}, {2, 4, 1, 4, 4}, {2, 4, 1, 2, 4}, {8, 1, 1, 4, 2},
      {4, 1, 2, 4, 2}, {2, 1, 4, 4, 2}, {8, 1, 1, 4, 1}, {4, 1, 2, 4, 1}, {2, 1, 4, 4, 1}, {1, 1, 8, 4, 1},
      {4, 1, 1, 4, 4}, {4, 1, 1, 2, 4}, {2, 1, 2, 2, 4}, {1, 1, 4, 2, 4}, {2, 2, 1, 4, 4}, {1, 4, 1, 4, 4},
      {1, 2, 2, 2, 4}, {4, 1, 1, 4, 2}, {2, 1, 2, 4, 2}, {1, 1, 4, 4, 2}, {4, 1, 1, 4, 1}, {1, 1, 4, 4, 1}};
  DenseGradientTile best{};
  double least = 0;
  dense_for_joined(p, [&](unsigned joined) {
    DenseGradientTile first = dense_first_tile(p, joined);
    first.shared = kShared;
    const DenseGradientTile t = dense_input_gradient_best(
        dense_phase(p, joined), first, kShapes,
        [&](const Problem& phase, const DenseGradientTile& x) { return dense_cycles(p, phase, x); });
    const double cost = dense_tile_ms(p, t);
    if (t.stages > 0 && (best.stages == 0 || cost < least)) best = t, least = cost;
  });
  best.producers = dense_producers(p.dtype == DType::kFloat32 && p.allow_tf32);
  return best;
}

// Of a GPU whose blocks may have `shared` bytes of shared memory.
inline const DenseGradientTile& dense_tile(const Problem& p, int64_t shared = kDenseGradientShared) {
  if (shared >= kDenseGradientShared) return last_result<dense_tile_within<kDenseGradientShared>>(p);
  if (shared >= 163 * 1024) return last_result<dense_tile_within<163 * 1024>>(p);
  return last_result<dense_tile_within<99 * 1024>>(p);
}

inline std::string dense_refusal(const Problem& p) {
  constexpr int64_t kMaxAttribute = 4096, kMaxSize = int64_t{1} << 30;
  if (p.dtype == DType::kFloat64) return "float64";
  double input = 1, output = 1, phases = 1, taps = 1;
  for (const Axis& axis : p.axis) {
    if (std::max({axis.kernel, axis.stride, axis.padding, axis.dilation, axis.output_padding}) > kMaxAttribute) {
      return "a kernel, stride, padding or dilation of more than 4096";
    }
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
    if (std::max(axis.in, axis.out()) >= kMaxSize) return "an axis of 2^30 or more";
    input *= double(axis.in), output *= double(axis.out());
    phases *= double(axis.stride), taps *= double(axis.kernel);
  }
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize) return "a batch or channels of 2^30 or more";
  if (p.in_channels_per_group() < 8 || p.out_channels_per_group() < 8) return "fewer than 8 channels a group";
  const bool last = p.layout == Layout::kChannelsLast;
  if (input * double(last ? p.in_channels : 1) >= double(kMaxSize) ||
      output * double(last ? p.out_channels : 1) >= double(kMaxSize)) {
    return "2^30 or more positions";
  }
  if (double(p.weight_elements()) >= double(1 << 25)) return "a weight of 2^25 or more elements";
  if (output * double(p.out_channels_per_group()) >= 2 * double(kMaxSize)) return "2^31 or more outputs of a group";
  if (taps > 4096) return "a kernel of more than 4096 elements";
  if (phases > 4096) return "more than 4096 phases";
  const DenseGradientTile& t = dense_tile(p);
  if (t.stages == 0) return "a kernel that does not fit shared memory";
  const double batch = dense_folds_batch(p) ? 1 : double(p.batch);
  if (batch * double(t.axis[0].tiles * t.axis[1].tiles) * double(t.axis[2].tiles) * double(p.groups) *
          double(t.in_blocks) * phases >=
      double(kMaxSize)) {
    return "2^30 or more tiles";
  }
  if (double(dense_entries(p, t)) * 16 >= double(kDenseMaxWorkspace)) return "packed weights of 1 GB or more";
  return "";
}

// Milliseconds on an H200.
inline double dense_cost_ms(const Problem& p) { return dense_tile_ms(p, dense_tile(p)); }

}  // namespace fastconvt
