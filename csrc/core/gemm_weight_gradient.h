// The weight's gradient as one matrix product with a long inner dimension, all positions, on asynchronous products and
// tensor copies, for 16 bits: tiles, refusals and costs. Plain C++17: no Torch, no CUDA;
// csrc/cuda/gemm_weight_gradient.* compute what this plans.
//
// Rows are input channels, columns are slots: a tap and a block of output channels each. Position x meets, for tap t,
// output s x - p + t d = s (x + e) + r - p: all taps of one residue r read the same outputs, e positions apart. A stage
// holds kGemmWeightPositions inputs and, for every residue that a block needs, one box of outputs with a halo.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "gemm_weight_tile.h"
#include "problem.h"

namespace fastconvt {

// Chooses the positions of a stage, for the halos of a block (by axis), and what follows from them.
inline bool gemm_weight_fit(const Problem& p, const int (&halo)[4], GemmWeightTile& t) {
  const int row_bytes = kGemmWeightShapes[t.shape].width * 2;
  double least = 0;
  GemmWeightTile best{};
  for (int inner = 3; inner >= 0; --inner) {
    GemmWeightTile x = t;
    x.order[0] = inner;
    for (int i = 1, axis = 3; axis >= 0; --axis) {
      if (axis != inner) x.order[i++] = axis;
    }
    int64_t size[4];
    int step[4];
    for (int i = 0; i < 4; ++i) {
      size[i] = gemm_weight_size(p, x.order[i]), step[i] = static_cast<int>(gemm_weight_stride(p, x.order[i]));
      x.halo[i] = halo[x.order[i]];
    }
    const auto useful = [&](int i, int box) { return box == 1 || box < 2 * size[i]; };
    if (x.direct && inner != 3) break;
    for (int b0 = x.direct ? 32 : 8; b0 <= kGemmWeightPositions; b0 *= 2) {
      if (b0 > (x.direct ? 32 : 8) && !useful(0, b0)) break;
      for (int b1 = 1; b0 * b1 <= kGemmWeightPositions && useful(1, b1); b1 *= 2) {
        for (int b2 = 1; b0 * b1 * b2 <= kGemmWeightPositions && useful(2, b2); b2 *= 2) {
          const int b3 = kGemmWeightPositions / (b0 * b1 * b2);
          const int boxes[4] = {b0, b1, b2, b3};
          bool fits = true;
          x.all_tiles = 1;
          for (int i = 0; i < 4; ++i) {
            x.box[i] = boxes[i];
            fits = fits && (boxes[i] + x.halo[i]) * step[i] <= 256;
            x.tiles[i] = ceil_div(size[i], int64_t{boxes[i]});
            x.all_tiles *= x.tiles[i];
          }
          if (!fits) continue;
          x.box_bytes = round_up(x.rows_of_box() * row_bytes, 1024);
          x.stage_bytes = x.boxes * x.box_bytes + (x.rows ? 2 : 1) * kGemmWeightPositions * 128;
          x.stages = static_cast<int>(
              std::min<int64_t>((kGemmWeightShared - 1024 - kGemmWeightHead) / x.stage_bytes, kGemmWeightMaxStages));
          if (x.stages < 2) continue;
          // Neighbours in memory, if nothing speaks against them.
          const double apart = inner == 3 ? 8.0 / b0 : inner == 0 ? 4 : 2;
          const double cost =
              double(x.all_tiles) * (gemm_weight_stage_clocks(x) + double(x.stage_bytes) / 200 + 8 * apart);
          if (best.shape < 0 || cost < least) best = x, least = cost;
        }
      }
    }
  }
  if (best.shape < 0) return false;
  t = best;
  return true;
}

// Whether channels are innermost already, in rows of whole vectors of 16 bytes.
inline bool gemm_weight_as_it_lies(const Problem& p, int64_t group_channels) {
  return p.element_size() == 2 && p.layout == Layout::kChannelsLast && group_channels % 8 == 0;
}

// Whether copies can read contiguous inputs, rows of whole vectors of 16 bytes.
inline bool gemm_weight_may_be_direct(const Problem& p) {
  return p.element_size() == 2 && p.layout == Layout::kContiguous && p.axis[2].in % 8 == 0 && p.axis[2].in >= 32;
}

constexpr double kGemmWeightClocksMs = 1.5e6;  // as power allows
// Bytes a millisecond that packing reads and writes.
inline double gemm_weight_pack_rate(const Problem& p) { return p.element_size() == 4 ? 3.8e9 : 3e9; }

// Blocks of channels whose outputs a block sums for the bias at most: a block that has more cannot.
constexpr int kGemmWeightBiasBlocks = 2;
inline bool gemm_weight_sums_bias(const Problem& p, const GemmWeightTile& t) {
  const int taps = static_cast<int>(p.kernel_positions());
  return p.has_bias && p.element_size() == 2 && gemm_weight_counts(p) &&
         t.slots <= taps * (kGemmWeightBiasBlocks - 1) + 1;
}

// Blocks that differ in input channels share the tiles to sum for the bias; and the bytes of its partial sums.
constexpr int kGemmWeightBiasWarps = 3;
inline int gemm_weight_bias_blocks(const GemmWeightTile& t) {
  return static_cast<int>(std::min<int64_t>(t.in_blocks, ceil_div(t.all_tiles, t.splits)));
}
inline int64_t gemm_weight_bias_bytes(const Problem& p, const GemmWeightTile& t) {
  if (!gemm_weight_sums_bias(p, t)) return 0;
  return round_up(t.splits * gemm_weight_bias_blocks(t) * kGemmWeightBiasWarps * p.groups * t.slot_blocks *
                      kGemmWeightBiasBlocks * kGemmWeightShapes[t.shape].width * int64_t{sizeof(float)},
                  int64_t{512});
}
// At most, of those of a pass of its own.
inline int64_t gemm_weight_bias_pass_bytes(const Problem& p) {
  const int64_t each = p.layout == Layout::kChannelsLast ? 32 : 1, channels = p.out_channels;
  return 8 * std::min(4096 * each + 2 * channels, channels * p.batch * ceil_div(p.out_positions(), int64_t{2048}));
}

// Clusters of some blocks that run at once on an H200.
inline int64_t gemm_weight_clusters(int64_t blocks) {
  return blocks == 1 ? 132 : blocks == 2 ? 66 : blocks == 3 ? 39 : blocks == 4 ? 30 : 15;
}

// Multiprocessors that the costs are for; blocks that finish more items than this walk through them.
constexpr int64_t kGemmWeightProcessors = 132;

// Whether blocks, or clusters, turn sums into the weight's gradient themselves, where stages were: a cluster's blocks
// leave their sums there, and each finishes a share of the columns.
constexpr int kGemmWeightSkew = 16;  // bytes between rows at most, which keep banks apart
inline int64_t gemm_weight_staged_bytes(const Problem& p, const GemmWeightTile& t) {
  const int width = kGemmWeightShapes[t.shape].width;
  const int64_t rows = t.rows ? 128 : 64, element = p.element_size();
  if (!t.clustered) {
    const int64_t boxes = int64_t{256} * kGemmWeightShapes[t.shape].slots * width;  // of 16 bits, for tensor copies
    return std::max(boxes, rows * (t.slots * width * element + kGemmWeightSkew));
  }
  const int64_t share = ceil_div(int64_t{width / 8}, t.splits) * 8;
  return int64_t{kGemmWeightShapes[t.shape].slots} * width * 512 + rows * (t.slots * share * element + kGemmWeightSkew);
}
inline bool gemm_weight_finishes(const Problem& p, const GemmWeightTile& t) {
  if (t.clustered ? t.splits > kGemmWeightShapes[t.shape].width / 8 : t.splits > 1) return false;
  return gemm_weight_staged_bytes(p, t) <= int64_t{t.stages} * t.stage_bytes;
}

// Whether tensor copies may store the weight's gradient: slots of neighbouring channels, whole vectors of 16 bytes.
inline bool gemm_weight_stores_boxes(const Problem& p, const GemmWeightTile& t) {
  return !t.clustered && p.element_size() == 2 && p.weight_layout == Layout::kChannelsLast &&
         p.out_channels_per_group() % 8 == 0 && gemm_weight_finishes(p, t);
}
// Columns of a warpgroup at most whose sums leave registers for what a block keeps from item to item.
constexpr int kGemmWeightWalkColumns = 256;
// Bytes behind the stages for what is staged, if blocks have more than one item each; 0: there is no room, or no need.
inline int64_t gemm_weight_apart_bytes(const Problem& p, const GemmWeightTile& t) {
  const GemmWeightShape shape = kGemmWeightShapes[t.shape];
  if (shape.width * shape.slots > kGemmWeightWalkColumns || !gemm_weight_stores_boxes(p, t)) return 0;
  if (t.clustered || t.splits > 1 || t.kinds <= kGemmWeightProcessors) return 0;
  const int64_t staged = round_up(gemm_weight_staged_bytes(p, t), int64_t{1024});
  return kGemmWeightShared - 1024 - kGemmWeightHead - staged < 3 * t.stage_bytes ? 0 : staged;
}
inline int gemm_weight_stages(const Problem& p, const GemmWeightTile& t) {
  const int64_t room = kGemmWeightShared - 1024 - kGemmWeightHead - gemm_weight_apart_bytes(p, t);
  return static_cast<int>(std::min<int64_t>(room / t.stage_bytes, kGemmWeightMaxStages));
}

inline int64_t gemm_weight_pitch(const Problem& p) { return round_up(p.out_channels_per_group(), int64_t{8}); }

constexpr double kGemmWeightNever = 1e30;
constexpr double kGemmWeightTooLarge = 1e12;  // clocks: only where nothing needs less memory

// Bytes of partial sums at most: they stand where the input's gradient will be, so that they cost no memory. With
// channels innermost, PyTorch needs as much as the outputs for the bias if these are many, and we pack nothing.
inline int64_t gemm_weight_room(const Problem& p) {
  const bool more = p.layout == Layout::kChannelsLast && p.has_bias && p.out_elements() >= 1 << 19;
  return p.element_size() * (p.in_elements() + (more ? p.out_elements() : 0));
}

// Whether partial sums may stand in two places, those of half of the rows each: there is twice as much room if the
// input is read as it lies, since the second half, and the bias's, then stand where it would be packed. Halves are
// whole tiles of 16 rows.
inline bool gemm_weight_may_halve(const Problem& p) {
  return gemm_weight_may_be_direct(p) && p.weight_layout == Layout::kContiguous && p.groups == 1 &&
         p.in_channels % 32 == 0 && (!p.has_bias || gemm_weight_counts(p));
}
// Of the first half.
inline int64_t gemm_weight_near_bytes(const Problem& p, const GemmWeightTile& t) {
  return t.splits * p.in_channels / 2 * gemm_weight_pitch(p) * p.kernel_positions() * 4;
}
inline bool gemm_weight_fits_halves(const Problem& p, const GemmWeightTile& t) {
  if (t.shape < 0 || !t.direct || gemm_weight_finishes(p, t)) return false;
  if (p.has_bias && !gemm_weight_sums_bias(p, t)) return false;
  return gemm_weight_near_bytes(p, t) + gemm_weight_bias_bytes(p, t) <= gemm_weight_room(p);
}

// Outputs that any tap meets; where they are not all, memory is read in pieces.
inline double gemm_weight_outputs(const Problem& p) {
  double outputs = double(p.out_elements());
  for (const Axis& a : p.axis) outputs *= double(std::min(a.kernel, a.tap_step())) / double(a.stride);
  return outputs;
}

// Clocks from a block's begin until it multiplies, and for what becomes of its sums, `rounds` times; `parts`: bytes of
// all partial sums.
inline double gemm_weight_end_clocks(const Problem& p, const GemmWeightTile& t, double rounds, double parts) {
  const GemmWeightShape shape = kGemmWeightShapes[t.shape];
  const bool innermost = p.weight_layout == Layout::kChannelsLast;
  constexpr double kBegin = 5000;
  double once = 5000, each = kBegin;
  if (t.clustered) {
    each += 2000 + 2500 * double(t.splits) + 20 * double(shape.width * shape.slots) + (innermost ? 0 : 1900);
  } else if (gemm_weight_apart_bytes(p, t) > 0) {
    once += kBegin, each = 2000;
  } else if (gemm_weight_stores_boxes(p, t)) {
    each += 1000;
  } else if (gemm_weight_finishes(p, t)) {
    each += 4000 + 38 * double(shape.width * shape.slots) * (p.element_size() == 4 ? 1.5 : 1);
  } else {
    each += 1500, once += innermost ? 5000 + parts / 1000 : 9000 + parts / 1000;
  }
  // Few taps of a channel, which are not neighbours in memory.
  const bool apart = !innermost && gemm_weight_finishes(p, t) && t.slots < std::min<int64_t>(8, p.kernel_positions());
  if (apart) each += 30 * double(shape.width * shape.slots);
  return once + each * rounds;
}

// Clocks in all, but for packing; chooses how often the sum is split. Blocks that do not run at once are no more than
// `blocks`, and partial sums no more than `bytes`.
inline double gemm_weight_clocks(const Problem& p, int64_t blocks, int64_t bytes, GemmWeightTile& t) {
  constexpr int64_t kProcessors = 132;
  const double stage = gemm_weight_stage_clocks(t) * gemm_weight_passes(p);
  const double weight = double(p.in_channels * gemm_weight_pitch(p) * p.kernel_positions()) * 4;
  // Matrix units truncate where they add: parts of sums are short.
  const int64_t fewest =
      std::min(t.all_tiles, ceil_div(t.all_tiles * gemm_weight_passes(p), kGemmWeightLongest / kGemmWeightPositions));
  const int64_t room = static_cast<int64_t>(double(bytes) / weight);
  const int64_t most = std::max(
      fewest, std::min({t.all_tiles, std::max<int64_t>(1, 2 * kProcessors / t.kinds), std::max<int64_t>(1, room)}));
  GemmWeightTile best = t;
  double least = kGemmWeightNever;
  const auto consider = [&](int64_t splits, bool clustered) {
    t.splits = splits, t.clustered = clustered;
    const bool finishes = gemm_weight_finishes(p, t);
    if ((clustered && !finishes) || t.kinds * splits > blocks) return;
    const int64_t at_once = clustered ? gemm_weight_clusters(splits) : kProcessors;
    const double rounds = double(ceil_div(clustered ? t.kinds : t.kinds * splits, at_once));
    const double multiplied = rounds * double(ceil_div(t.all_tiles, splits)) * stage;
    double clocks = multiplied + gemm_weight_end_clocks(p, t, rounds, weight * double(splits));
    const int64_t bias = !p.has_bias                   ? 0
                         : gemm_weight_sums_bias(p, t) ? gemm_weight_bias_bytes(p, t)
                                                       : gemm_weight_bias_pass_bytes(p);
    const double sums = (finishes ? 0 : double(splits) * weight) + double(bias);
    if (sums > double(bytes)) clocks += kGemmWeightTooLarge;
    if (clocks < least) least = clocks, best.splits = splits, best.clustered = clustered;
  };
  for (int64_t splits = fewest; splits <= most; ++splits) {
    if (splits > fewest && splits < most && (t.kinds * splits) % kProcessors < kProcessors / 2 &&
        t.kinds * splits > 64) {
      if (t.kinds * (splits + 1) / kProcessors == t.kinds * splits / kProcessors) continue;
    }
    consider(splits, false);
  }
  for (int64_t splits = std::max<int64_t>(2, fewest); splits <= std::min<int64_t>(4, t.all_tiles); ++splits) {
    if (t.kinds * splits <= 2 * kProcessors) consider(splits, true);
  }
  t.splits = best.splits, t.clustered = best.clustered;
  const double moved = (double(p.in_elements()) + gemm_weight_outputs(p)) * 2 * (gemm_weight_passes(p) > 1 ? 2 : 1);
  const double memory = moved / (gemm_weight_outputs(p) < double(p.out_elements()) ? 2.6e9 : 4.3e9);
  return t.clocks = std::max(least, 3000 + memory * kGemmWeightClocksMs) + 0.02 * least;  // the better one of equals
}

// Of the packed input, if that is needed.
inline double gemm_weight_input_clocks(const Problem& p, const GemmWeightTile& t) {
  if (t.direct || gemm_weight_as_it_lies(p, p.in_channels_per_group())) return 0;
  return double(p.in_elements() * p.element_size()) * 2 / gemm_weight_pack_rate(p) * kGemmWeightClocksMs;
}

// A tile of one shape; `rows` and `direct` as in GemmWeightTile.
inline bool gemm_weight_tile_of(const Problem& p, const std::array<GemmWeightTap, kGemmWeightMaxTaps>& taps, int count,
                                int shape, bool rows, bool direct, GemmWeightTile& t) {
  t = GemmWeightTile{};
  t.shape = shape, t.rows = rows, t.direct = direct;
  const GemmWeightShape of = kGemmWeightShapes[shape];
  t.slots = of.slots * (rows ? 1 : 2);
  t.in_blocks = static_cast<int>(ceil_div(p.in_channels_per_group(), int64_t{rows ? 128 : 64}));
  t.channel_blocks = static_cast<int>(ceil_div(p.out_channels_per_group(), int64_t{of.width}));
  const int all = t.channel_blocks * count;
  if (!rows && all < 2) return false;
  t.slot_blocks = ceil_div(all, t.slots);
  const int even = ceil_div(all, t.slot_blocks);
  if (even < t.slots - (rows ? 0 : 1)) return false;  // a smaller shape does it
  t.slots = even;
  t.kinds = p.groups * t.in_blocks * t.slot_blocks;
  const int period = std::min(all, std::lcm(count, t.slots));
  int halo[4] = {};
  for (int first = 0; first < period; first += t.slots) {
    int boxes = 0;
    gemm_weight_boxes(taps, count, first, std::min(first + t.slots, all),
                      [&](int, int, const int (&least)[3], const int (&most)[3]) {
                        ++boxes;
                        for (int a = 0; a < 3; ++a) halo[a + 1] = std::max(halo[a + 1], most[a] - least[a]);
                      });
    t.boxes = std::max(t.boxes, boxes);
  }
  return gemm_weight_fit(p, halo, t);
}

// The tiles of all shapes that suit the problem.
template <typename Visit>
void gemm_weight_each_tile(const Problem& p, Visit&& visit) {
  std::array<GemmWeightTap, kGemmWeightMaxTaps> taps;
  const int count = gemm_weight_taps(p, taps);
  const int64_t out = p.out_channels_per_group(), in = p.in_channels_per_group();
  for (int shape = 0; shape < kNumGemmWeightShapes; ++shape) {
    // Narrow slots only where wide ones would stand empty for the most part.
    const int64_t width = kGemmWeightShapes[shape].width, rest = (out - 1) % (2 * width) + 1;
    if (width < 64 && (rest > width || out > 2 * width + width / 2 * 2)) continue;
    if (width > 16 && out <= width / 2) continue;
    for (const bool rows : {false, true}) {
      if (rows && in <= 64) continue;
      for (const bool direct : {false, true}) {
        if (direct && !gemm_weight_may_be_direct(p)) continue;
        GemmWeightTile t;
        if (gemm_weight_tile_of(p, taps, count, shape, rows, direct, t)) visit(t);
      }
    }
  }
}

// The best ones with at most so many blocks at once, and so many bytes of partial sums; none: a tile without a shape.
template <size_t kLimits>
std::array<GemmWeightTile, kLimits> gemm_weight_tiles(const Problem& p, const std::array<int64_t, kLimits>& blocks,
                                                      int64_t bytes) {
  std::array<GemmWeightTile, kLimits> best{};
  for (GemmWeightTile& t : best) t.shape = -1;
  gemm_weight_each_tile(p, [&](const GemmWeightTile& tile) {
    for (size_t i = 0; i < kLimits; ++i) {
      GemmWeightTile t = tile;
      gemm_weight_clocks(p, blocks[i], bytes, t);
      t.clocks += gemm_weight_input_clocks(p, t);
      if (t.clocks < kGemmWeightNever && (best[i].shape < 0 || t.clocks < best[i].clocks)) best[i] = t;
    }
  });
  for (GemmWeightTile& t : best) {
    if (t.shape >= 0 && t.clocks >= kGemmWeightTooLarge) t.clocks -= kGemmWeightTooLarge;
  }
  return best;
}
constexpr int64_t kGemmWeightAnyBlocks = int64_t{1} << 40;
inline GemmWeightTile gemm_weight_tile(const Problem& p) {
  return gemm_weight_tiles<1>(p, {kGemmWeightAnyBlocks}, gemm_weight_room(p))[0];
}
// With twice the room, in two places; a tile without a shape: there are none.
inline GemmWeightTile gemm_weight_halved_tile(const Problem& p) {
  GemmWeightTile none{};
  if (!gemm_weight_may_halve(p)) return none;
  const GemmWeightTile t = gemm_weight_tiles<1>(p, {kGemmWeightAnyBlocks}, 2 * gemm_weight_room(p))[0];
  return gemm_weight_fits_halves(p, t) ? t : none;
}

inline std::string gemm_weight_gradient_refusal(const Problem& p) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  if (p.dtype == DType::kFloat64 || (p.dtype == DType::kFloat32 && !p.allow_tf32)) return "float32 and float64";
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  for (const Axis& axis : p.axis) {
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
    if (axis.stride > kGemmWeightMaxStride) return "a stride of more than 8";
    if (std::max({axis.padding, axis.dilation, axis.output_padding}) > 1024)
      return "a padding or dilation of more than 1024";
    if (axis.kernel > kGemmWeightMaxTaps || axis.dilation * axis.kernel > 8 * 1024) return "a long kernel";
    if (std::max(axis.in, axis.out()) >= kMaxSize) return "an axis of 2^30 or more";
  }
  if (p.kernel_positions() > kGemmWeightMaxTaps) return "a kernel of more than 128 elements";
  if (p.in_channels_per_group() < 16 || p.out_channels_per_group() < 8) return "few channels";
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize / 8) return "a batch or channels of 2^27 or more";
  const double limit = double(kMaxSize);
  const double in = double(p.axis[0].in) * double(p.axis[1].in) * double(p.axis[2].in);
  const double out = double(p.axis[0].out()) * double(p.axis[1].out()) * double(p.axis[2].out());
  if (double(p.batch) * in >= limit || double(p.batch) * out >= limit) return "2^30 or more positions";
  if (double(p.weight_elements()) >= double(1 << 28)) return "a weight of 2^28 or more elements";
  const GemmWeightTile& t = last_result<gemm_weight_tile>(p);
  if (t.shape < 0) return "a dilation whose positions do not fit shared memory";
  if (t.kinds * t.splits > (1 << 30)) return "too many groups";
  return "";
}

// Milliseconds on an H200.
inline double gemm_weight_gradient_cost_ms(const Problem& p) {
  const GemmWeightTile& t = last_result<gemm_weight_tile>(p);
  const double bias =
      p.has_bias && !gemm_weight_sums_bias(p, t) ? 0.012 + double(p.element_size() * p.out_elements()) / 3e9 : 0;
  double packed = 0;
  if (!gemm_weight_as_it_lies(p, p.out_channels_per_group())) {
    packed = 0.003 + double(p.out_elements() * p.element_size()) * 2 / gemm_weight_pack_rate(p);
  }
  const double clocks = p.element_size() == 4 ? 0.92 * t.clocks : t.clocks;  // products wait for memory less
  return 0.004 + bias + packed + clocks / kGemmWeightClocksMs;
}

}  // namespace fastconvt
