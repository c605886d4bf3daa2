// The gradients of a transposed convolution as products on matrix units, for any kernel, stride and dilation: tiles,
// refusals and costs. Plain C++17: no Torch, no CUDA; csrc/cuda/dense_{input,weight}_gradient.* compute what this
// plans.
#pragma once

#include <string>

#include "dense_gradient_tile.h"

namespace fastconvt {

// ---- The input's gradient.

// Everything that follows from the box; chunks are the largest that fit.
inline void dense_input_gradient_finish(const Problem& p, DenseGradientTile& t) {
  const bool split = dense_gradient_split(p);
  const int64_t entry = split ? 16 : 8, taps = t.taps();
  t.pitch = dense_gradient_pitch(t.places());
  const int64_t budget = dense_gradient_budget(p.element_size(), t.shared);
  const int64_t reduction = (t.warps_k - 1) * t.warps_m * t.warps_n * t.m_tiles * t.n_tiles * 512;
  const auto fit = [&](int64_t planes, bool resident) {
    t.chunk_planes = ceil_div(t.planes, ceil_div(t.planes, planes));
    t.chunks = ceil_div(t.planes, t.chunk_planes) * t.tap_blocks();
    t.steps = ceil_div(t.chunk_planes * taps, int64_t{2});
    t.weight_bytes = t.steps * t.warps_n * t.n_tiles * 32 * entry;
    if (t.plain) {
      dense_gradient_rows(p, t);
      const int64_t rows = t.in_channels() * t.weight_row * 4;
      if (t.made && t.steps * t.in_channels() * 4 > kDenseGradientEntries) return false;
      t.weight_bytes = t.made ? std::max(t.weight_bytes, rows) : rows;  // operands stand in place of the rows
    }
    t.resident = resident;
    t.totals = split && t.chunks > 1 && t.chunks * t.steps > 2 * kDenseGradientRun * t.warps_k;
    t.table_bytes = kDenseGradientBarriers +
                    round_up(8 * (t.axis[2].places() + t.lines() + t.positions + t.kinds * t.steps), int64_t{16}) +
                    (t.plain ? round_up(8 * t.steps, int64_t{16}) : 0) + reduction +
                    (t.totals ? dense_gradient_total_bytes(t) : 0);
    t.stage_bytes = t.chunk_planes * t.pitch * 16 + (resident ? 0 : t.weight_bytes);
    const int64_t fixed = t.table_bytes + (resident ? t.phases * t.chunks * t.weight_bytes : 0);
    t.stages = std::min((budget - fixed) / t.stage_bytes, kDenseGradientMaxStages);
    t.shared_bytes = fixed + t.stages * t.stage_bytes;
    return t.stages >= 2;
  };
  const bool once = p.groups == 1 && t.in_blocks == 1;
  for (int64_t planes = std::min<int64_t>(t.planes, 32); planes >= 1; planes = planes > 1 ? ceil_div(planes, 2) : 0) {
    t.made = once && t.plain;
    if (t.made && fit(planes, true)) return;
    t.made = false;
    if (once && fit(planes, true)) return;
    if (fit(planes, false)) return;
  }
  t.stages = 0;
}

// Clocks of a block for a tile, about; and how many of its warps copy, where these leave registers to the others.
inline double dense_input_gradient_strict_cycles(const Problem& p, DenseGradientTile& t) {
  const DenseClocks& clocks = kDenseInput;
  const double rate = dense_gradient_vectors(p, t) ? kDensePlain : kDensePlainWords;
  const double weights = t.resident ? 0 : double(t.weight_bytes) / rate;
  const double product =
      double(t.steps) / double(t.warps_k) * (t.made ? 1 : kDenseDirect) *
      (double(t.m_tiles * t.n_tiles) * clocks.product + double(t.m_tiles + t.n_tiles) * clocks.operand);
  const auto copies = [&]() {
    const bool vector = p.layout == Layout::kChannelsLast;  // runs are aligned, rarely
    return weights + dense_gradient_copies(clocks, t, t.places(), t.chunk_planes, vector);
  };
  t.producers = 4;
  if (copies() > 0.64 * product) t.producers = 8;
  return double(t.chunks) * dense_gradient_stage(clocks, t, copies(), product) + clocks.tile;
}
inline double dense_input_gradient_cycles(const Problem& p, DenseGradientTile& t) {
  if (dense_gradient_split(p)) return dense_input_gradient_strict_cycles(p, t);
  const double chunks = double(t.chunks);
  const bool vector = p.layout == Layout::kChannelsLast || t.runs;
  const double rate = !t.plain || dense_gradient_vectors(p, t) ? kDenseWeights : kDensePlainWords;
  t.producers = dense_gradient_producers(p.element_size());
  const bool tf32 = t.producers == 8;  // as measured afterwards
  const double copies = dense_gradient_copies(p, t.places(), t.chunk_planes, vector) * (tf32 ? 0.65 : 1) +
                        (t.resident ? 0 : double(t.weight_bytes) / rate);
  const double product = double(t.steps) / double(t.warps_k) * dense_gradient_step(p, t, false) * (tf32 ? 1.15 : 1);
  return chunks * dense_gradient_stage(t, copies, product) + kDenseTile;
}

// How the warps of a block, and a warp's sums, are arranged.
struct DenseGradientShape {
  int64_t warps_m, warps_n, warps_k, m_tiles, n_tiles;

  bool fits(const Problem& p, bool of_weight) const {
    const int64_t in = p.in_channels_per_group();
    return warps_m * warps_n * warps_k == dense_gradient_consumers(p.element_size()) && (n_tiles == 1) == (in <= 8) &&
           (n_tiles != 2 || in <= 16) && (warps_n == 1 || in > warps_n * 16) &&
           (of_weight || n_tiles <= 2 || m_tiles == 2 || !dense_gradient_split(p));  // registers
  }
};

// The best tile of one of these shapes; `first` knows what is common to all, cycles(p, tile) what a tile takes.
template <size_t kCount, typename Cycles>
DenseGradientTile dense_input_gradient_best(const Problem& p, DenseGradientTile first,
                                            const DenseGradientShape (&shapes)[kCount], Cycles&& cycles) {
  const int64_t in = p.in_channels_per_group();
  DenseGradientTile best{};
  first.runs = dense_gradient_runs(p);
  first.planes = first.runs ? p.out_channels_per_group() : ceil_div(p.out_channels_per_group(), dense_granule(p));
  for (int a = 0; a < 3; ++a) dense_gradient_taps(p, a, first.runs, p.axis[a].kernel, first.axis[a]);
  double least = 0;
  const auto choose = [&]() {
    for (const DenseGradientShape& shape : shapes) {
      if (!shape.fits(p, false)) continue;
      DenseGradientTile t = first;
      t.warps_m = shape.warps_m, t.warps_n = shape.warps_n, t.warps_k = shape.warps_k;
      t.m_tiles = shape.m_tiles, t.n_tiles = shape.n_tiles;
      t.positions = t.warps_m * t.m_tiles * 16;
      t.in_blocks = ceil_div(in, t.in_channels());
      dense_gradient_for_boxes(p, t, [&](DenseGradientTile& x) {
        dense_input_gradient_finish(p, x);
        if (x.stages == 0) return;
        x.cycles = cycles(p, x);
        const double rounds = double(dense_gradient_boxes(p, x) * p.groups * x.busy_phases * x.in_blocks) /
                              double(132 * dense_gradient_blocks(p.element_size()));
        const double cost = (rounds > 6 ? rounds + 0.3 : double(int64_t(rounds + 0.999))) * x.cycles;
        if (best.stages == 0 || cost < least) best = x, least = cost;
      });
    }
  };
  // Fewer taps at a time where they do not fit, or as long as it helps.
  for (int split = 0; split < 10; ++split) {
    const double before = least;
    const bool found = best.stages > 0;
    if (split > 0) {
      int longest = 2;
      for (int a = 1; a >= 0; --a) longest = first.axis[a].taps > first.axis[longest].taps ? a : longest;
      if (first.axis[longest].taps == 1) break;
      const int64_t taps = ceil_div(first.axis[longest].taps, int64_t{2});
      dense_gradient_taps(p, longest, first.runs, taps, first.axis[longest]);
    }
    choose();
    if (split > 0 && found && !(least < before)) break;
    if (split == 0 && best.stages > 0 && best.chunk_planes > 1) break;
  }
  best.cycles = least;
  return best;
}

inline DenseGradientTile dense_input_gradient_tile(const Problem& p) {
  constexpr DenseGradientShape kShapes[] = {
      {8, 1, 1, 4, 4}, {8, 1, 1, 2, 4}, {4, 1, 2, 2, 4}, {2, 1, 4, 2, 4}, {1, 1, 8, 2, 4}, {4, 2, 1, 4, 4},
      {4, 2, 1, 2, 4}, {2, 2, 2, 2, 4}, {1, 2, 4, 2, 4}, {2, 4, 1, 4, 4}, {2, 4, 1, 2, 4}, {8, 1, 1, 4, 1},
      {4, 1, 2, 4, 1}, {2, 1, 4, 4, 1}, {1, 1, 8, 4, 1}, {4, 1, 1, 4, 4}, {4, 1, 1, 2, 4}, {2, 1, 2, 2, 4},
      {1, 1, 4, 2, 4}, {2, 2, 1, 4, 4}, {1, 4, 1, 4, 4}, {1, 2, 2, 2, 4}, {4, 1, 1, 4, 1}, {1, 1, 4, 4, 1}};
  DenseGradientTile first{};
  first.plain = first.any_columns = p.element_size() == 4;
  return dense_input_gradient_best(p, first, kShapes, dense_input_gradient_cycles);
}

// ---- The weight's gradient.

// Granules that a block sums.
inline int64_t dense_weight_units(const Problem& p, const DenseGradientTile& t) {
  return t.warps_m * t.m_tiles * 16 / dense_granule(p);
}
inline int64_t dense_weight_kinds(const Problem& p, const DenseGradientTile& t) {
  return p.groups * t.in_blocks * t.chunks * t.tap_blocks();
}

// A block's sums in shared memory, a row for each input channel, before they are stored.
inline int64_t dense_weight_row(const Problem& p, const DenseGradientTile& t) {
  return t.chunk_planes * t.taps() * dense_granule(p) | 1;
}

inline void dense_weight_gradient_finish(const Problem& p, DenseGradientTile& t) {
  t.pitch = dense_gradient_pitch(t.places());
  t.input_pitch = dense_gradient_pitch(t.positions);
  t.totals = dense_gradient_split(p);
  t.table_bytes =
      kDenseGradientBarriers +
      round_up(8 * (t.axis[2].places() + t.lines() + t.positions) + 4 * dense_weight_units(p, t), int64_t{16}) +
      (t.totals ? dense_gradient_total_bytes(t) : 0);
  const int64_t unit = dense_granule(p);
  t.input_rows = p.layout == Layout::kContiguous && p.axis[2].in % unit == 0 && t.axis[2].box % unit == 0;
  t.stage_bytes =
      16 * (t.chunk_planes * t.pitch + std::max(t.in_channels() / unit * t.input_pitch,
                                                t.input_rows ? t.in_channels() * dense_gradient_row(p, t) : 0));
  t.stages =
      std::min((dense_gradient_budget(p.element_size()) - t.table_bytes) / t.stage_bytes, kDenseGradientMaxStages);
  if (t.stages < 2) t.stages = 0;
  const int64_t reduction = (t.warps_k - 1) * t.warps_m * t.warps_n * t.m_tiles * t.n_tiles * 512;
  const int64_t sums = t.in_channels() * dense_weight_row(p, t) * int64_t{sizeof(float)};
  t.shared_bytes = t.table_bytes + std::max({t.stages * t.stage_bytes, reduction, sums});
  if (t.shared_bytes > dense_gradient_budget(p.element_size())) t.stages = 0;
}

// Clocks of a block for a box, about; and how many of its warps copy.
inline double dense_weight_gradient_cycles(const Problem& p, DenseGradientTile& t) {
  const bool vector = p.layout == Layout::kChannelsLast;
  const int64_t planes = t.in_channels() / dense_granule(p);
  const double copies = dense_gradient_copies(p, t.places(), t.chunk_planes, vector || t.runs) +
                        dense_gradient_copies(p, t.positions, planes, vector || t.input_rows);
  const double steps = double(t.positions) / double(2 * dense_granule(p) * t.warps_k);
  const double product = steps * dense_gradient_step(p, t, true);
  t.producers = p.element_size() == 4 && copies > 1.2 * product ? 8 : 4;
  if (!dense_gradient_split(p)) {
    // TF32, as measured afterwards.
    const double product_rate = p.element_size() == 4 ? 0.8 : 1;
    const double copy_rate = t.producers == 8 && !t.runs ? 0.6 : product_rate;
    return dense_gradient_stage(t, copy_rate * copies, product_rate * product);
  }
  const DenseClocks& clocks = kDenseWeight;
  return dense_gradient_stage(clocks, t,
                              dense_gradient_copies(clocks, t, t.places(), t.chunk_planes, vector) +
                                  dense_gradient_copies(clocks, t, t.positions, planes, vector || t.input_rows),
                              steps * (double(t.m_tiles * t.n_tiles) * clocks.product +
                                       double(4 * t.m_tiles + 2 * t.n_tiles) * clocks.operand));
}

// Bytes of partial sums that need memory: none for one part; the first one stands in a gradient of 32 bits itself.
inline int64_t dense_weight_partial_bytes(const Problem& p, int64_t splits) {
  return splits == 1 ? 0 : (splits - (p.element_size() == 4 ? 1 : 0)) * p.weight_elements() * int64_t{sizeof(float)};
}

// Parts of the sum over boxes, each made by its own blocks. Parts of float32 sums are short, since they are added in
// float64, and no more than the memory of the input's gradient can hold: PyTorch needs none for these.
inline int64_t dense_weight_splits(const Problem& p, const DenseGradientTile& t) {
  constexpr int64_t kLongest = 20 << 10;  // positions
  const int64_t boxes = dense_gradient_boxes(p, t), least = ceil_div(boxes * t.positions, kLongest);
  const int64_t resident = 132 * dense_gradient_blocks(p.element_size()) / dense_weight_kinds(p, t);
  const int64_t fit = 1 + p.in_elements() / p.weight_elements();
  const int64_t splits = dense_gradient_split(p) ? std::max(std::min(resident, fit), least) : resident;
  return std::max<int64_t>(1, std::min(boxes, splits));
}

inline DenseGradientTile dense_weight_gradient_tile(const Problem& p) {
  constexpr DenseGradientShape kShapes[] = {
      {8, 1, 1, 4, 4}, {4, 1, 2, 4, 4}, {2, 1, 4, 4, 4}, {4, 2, 1, 4, 4}, {2, 4, 1, 4, 4}, {2, 2, 2, 4, 4},
      {1, 1, 8, 4, 4}, {8, 1, 1, 8, 1}, {4, 1, 2, 8, 1}, {2, 1, 4, 8, 1}, {4, 1, 1, 4, 4}, {2, 1, 2, 4, 4},
      {1, 1, 4, 4, 4}, {2, 2, 1, 4, 4}, {1, 4, 1, 4, 4}, {4, 1, 1, 8, 1}, {2, 1, 2, 8, 1}, {1, 1, 4, 8, 1}};
  const int64_t in = p.in_channels_per_group(), unit = dense_granule(p);
  DenseGradientTile best{};
  const bool runs = dense_gradient_runs(p);
  const int64_t planes = runs ? p.out_channels_per_group() : ceil_div(p.out_channels_per_group(), unit);
  double least = 0;
  for (const DenseGradientShape& shape : kShapes) {
    if (!shape.fits(p, true)) continue;
    DenseGradientTile t{};
    t.any_columns = p.element_size() == 4;
    t.runs = runs, t.planes = planes, t.warps_m = shape.warps_m, t.warps_n = shape.warps_n, t.warps_k = shape.warps_k;
    t.m_tiles = shape.m_tiles, t.n_tiles = shape.n_tiles;
    t.in_blocks = ceil_div(in, t.in_channels());
    // As many taps as a block can sum, of whole rows and planes if possible; then as many planes.
    const int64_t units = dense_weight_units(p, t);
    int64_t left = units;
    for (int a = 2; a >= 0; --a) {
      dense_gradient_taps(p, a, runs, 1, t.axis[a]);
      const int64_t all = t.axis[a].all_taps;
      const int64_t taps = ceil_div(all, ceil_div(all, std::max<int64_t>(1, std::min(left, all))));
      dense_gradient_taps(p, a, runs, taps, t.axis[a]);
      left /= taps;
    }
    t.chunks = ceil_div(planes, std::max<int64_t>(1, units / t.taps()));
    t.chunk_planes = ceil_div(planes, t.chunks);
    for (const int64_t positions : {256, 128, 64}) {
      t.positions = positions;
      if (t.warps_k * (p.element_size() == 2 ? 16 : 8) > positions) continue;
      dense_gradient_for_boxes(p, t, [&](DenseGradientTile& x) {
        dense_weight_gradient_finish(p, x);
        if (x.stages == 0) return;
        const int64_t splits = dense_weight_splits(p, x), kinds = dense_weight_kinds(p, x);
        const double rounds = double(ceil_div(splits * kinds, int64_t{132} * dense_gradient_blocks(p.element_size())));
        const double boxes = double(ceil_div(dense_gradient_boxes(p, x), splits));
        const double bytes = double(4 * p.weight_elements() * splits);
        const double sums = bytes / 1000 + (splits > 1 ? bytes / 1000 + 4000 : 0);  // bytes a cycle
        x.cycles = dense_weight_gradient_cycles(p, x);
        const double once = dense_gradient_split(p) ? kDenseWeight.tile : 0;
        const double cost = rounds * (boxes * x.cycles + once) + sums;
        if (best.stages == 0 || cost < least) best = x, least = cost;
      });
    }
  }
  best.cycles = least;
  return best;
}

// ---- Both.

inline const DenseGradientTile& dense_gradient_tile(const Problem& p, bool of_weight) {
  return of_weight ? last_result<dense_weight_gradient_tile>(p) : last_result<dense_input_gradient_tile>(p);
}

inline std::string dense_gradient_refusal(const Problem& p, bool of_weight, DenseGradientTile& t) {
  constexpr int64_t kMaxAttribute = 4096, kMaxSize = int64_t{1} << 30;
  constexpr double kMaxVolume = double(kMaxSize);
  if (p.dtype == DType::kFloat64) return "float64";
  for (const Axis& axis : p.axis) {
    if (std::max({axis.kernel, axis.stride, axis.padding, axis.dilation, axis.output_padding}) > kMaxAttribute) {
      return "a kernel, stride, padding or dilation of more than 4096";
    }
    if (std::max(axis.in, axis.out()) >= kMaxSize) return "an axis of 2^30 or more";
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
  }
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize) return "a batch or channels of 2^30 or more";
  const double inner_in = double(p.layout == Layout::kChannelsLast ? p.in_channels : 1);
  const double inner_out = double(p.layout == Layout::kChannelsLast ? p.out_channels : 1);
  const auto volume = [](double depth, double height, double width) { return depth * height * width; };
  if (volume(double(p.axis[0].in), double(p.axis[1].in), double(p.axis[2].in)) * inner_in >= kMaxVolume ||
      volume(double(p.axis[0].out()), double(p.axis[1].out()), double(p.axis[2].out())) * inner_out >= kMaxVolume) {
    return "2^30 or more positions";
  }
  if (double(p.weight_elements()) >= double(1 << 25)) return "a weight of 2^25 or more elements";
  if (p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel > 4096) return "a kernel of more than 4096 elements";
  t = dense_gradient_tile(p, of_weight);
  if (t.stages == 0) return "a kernel that does not fit shared memory";
  if (double(p.batch) * double(t.axis[0].tiles * t.axis[1].tiles) * double(t.axis[2].tiles) * double(p.groups) *
          double(t.in_blocks) >=
      kMaxVolume) {
    return "2^30 or more tiles";
  }
  if (of_weight && dense_weight_kinds(p, t) > 65535) return "too many groups";
  return "";
}

inline std::string dense_input_gradient_refusal(const Problem& p) {
  DenseGradientTile tile{};
  return dense_gradient_refusal(p, false, tile);
}
inline std::string dense_weight_gradient_refusal(const Problem& p) {
  DenseGradientTile tile{};
  return dense_gradient_refusal(p, true, tile);
}

// Milliseconds on an H200.
inline double dense_input_gradient_cost_ms(const Problem& p) {
  if (p.in_elements() == 0) return 0;
  const DenseGradientTile& t = dense_gradient_tile(p, false);
  const double layout = p.layout == Layout::kChannelsLast ? 0.008 : 0;
  return 0.0115 + layout + t.cycles / kDenseClocksMs;
}
inline double dense_weight_gradient_cost_ms(const Problem& p) {
  if (p.in_elements() == 0) return 0;
  const double bias_rate = p.layout == Layout::kChannelsLast ? 0.5e9 : 3.8e9;  // bytes a millisecond
  const double bias = p.has_bias ? 0.011 + double(p.element_size() * p.out_elements()) / bias_rate : 0;
  const int64_t in = p.in_channels_per_group();
  const double few = in < 8 ? 2 : in == 8 ? 1.25 : 1;  // what the family is not made for
  // Pixels of 16 bits that are no whole vectors are copied by element.
  const bool vectors = p.layout != Layout::kChannelsLast || p.element_size() == 4 || p.out_channels % 8 == 0;
  return 0.011 + bias + few * (vectors ? 1 : 2.2) * dense_gradient_tile(p, true).cycles / kDenseClocksMs;
}

}  // namespace fastconvt
