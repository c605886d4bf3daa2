// Tiles of dense gradients (dense_gradient.h): how a block stages the output's gradient, and what that takes.
//
// A block stages the output's gradient around a box of input positions in granules of 16 bytes: neighbouring output
// channels at one place or, where these are few, a run of neighbouring taps along the width for one channel. Along each
// axis places are sorted by the class of taps that reads them, so that a granule lies at a sum of two offsets, one of
// the position and one of the tap, and neighbouring positions read neighbouring granules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "problem.h"

namespace fastconvt {

// Warps of a block that multiply, and blocks of a multiprocessor: operands of float32 products want registers.
constexpr int dense_gradient_consumers(int64_t element_size) { return element_size == 2 ? 4 : 8; }
constexpr int dense_gradient_producers(int64_t element_size) {
  return element_size == 2 ? 4 : 8;
}  // that copy, at most
constexpr int dense_gradient_blocks(int64_t element_size) { return element_size == 2 ? 2 : 1; }
inline constexpr int64_t kDenseGradientShared = 227 * 1024;
inline constexpr int kDenseGradientLoads = 32;  // of a thread that are on their way at a time
inline constexpr int64_t kDenseGradientMaxStages = 4;
inline constexpr int64_t kDenseGradientEntries = 8192;  // of a chunk of weights that blocks turn into operands
inline constexpr int64_t kDenseGradientBarriers = 32;   // bytes

inline int64_t dense_granule(const Problem& p) { return 16 / p.element_size(); }
inline bool dense_gradient_split(const Problem& p) { return p.dtype == DType::kFloat32 && !p.allow_tf32; }

// One axis of a block. Places that are read are `unit` elements apart; in such units positions are `step` apart and
// taps `turn`. Taps of one class read places that are equal modulo `step`.
struct DenseGradientAxis {
  int64_t all_taps = 1, taps = 1,
          tap_blocks = 1;  // runs of taps along the width, maybe
  int64_t dilation = 1;
  int64_t unit = 1, step = 1, turn = 1;
  int64_t classes = 1;
  int64_t reach = 0;  // positions that the last tap reads beyond the first one
  int64_t box = 1, tiles = 1;
  int64_t extent() const { return box + reach; }  // places of a class
  int64_t places() const { return classes * extent(); }
};

struct DenseGradientTile {
  int64_t shared = kDenseGradientShared;  // of a multiprocessor
  // The forward (dense.h): products of a launch, how many of these have taps, and what part of all taps; their lists of
  // taps; and, a bit each, axes whose phases are columns.
  int64_t phases = 1, busy_phases = 1, kinds = 1;
  double filled = 1;
  unsigned joined = 0;
  bool any_columns = false;  // of boxes, not only multiples of eight
  bool runs = false;         // granules are runs of taps
  DenseGradientAxis axis[3];
  int64_t m_tiles = 4, n_tiles = 4;  // of a warp, 16 and 8 wide
  int64_t warps_m = 4, warps_n = 1, warps_k = 1;
  int64_t positions = 0;     // of a box, rounded up
  int64_t in_blocks = 1;     // of input channels
  int64_t planes = 1;        // of granules: output channels, 16 bytes of them each, or one
  int64_t chunk_planes = 1;  // staged at a time
  int64_t chunks = 1;
  int64_t pitch = 0;        // granules from plane to plane
  int64_t input_pitch = 0;  // the weight's gradient: of granules of input channels
  bool input_rows = false;  // the same: inputs are staged as they lie in memory, if they are aligned
  int64_t steps = 1;        // the input's gradient: of 16 (32 bits: 8) products each, of a chunk
  bool totals = false;      // sums go on in shared memory
  bool resident = false;    // the input's gradient: all weights stay in shared memory
  bool plain = false;       // the same: weights of 32 bits are staged as they lie in memory, a row a column
  bool made = false;        // of these, if they stay: blocks make operands of them once
  bool quads = false;       // of these, four neighbouring taps are read at a time
  int64_t weight_row = 0, weight_channel = 0;  // words from row to row, and from output channel to output channel
  int64_t weight_bytes = 0;                    // of a chunk
  int64_t table_bytes = 0, stage_bytes = 0, shared_bytes = 0;
  int producers = 4;                                             // warps of a block that copy
  int64_t stages = 0;                                            // 0: there is no tile
  double cycles = 0;                                             // of a block for a tile; at last, of the kernel
  int64_t in_channels() const { return warps_n * n_tiles * 8; }  // of a block
  int64_t taps() const { return axis[0].taps * axis[1].taps * axis[2].taps; }
  int64_t tap_blocks() const { return axis[0].tap_blocks * axis[1].tap_blocks * axis[2].tap_blocks; }
  int64_t lines() const { return axis[0].places() * axis[1].places(); }
  int64_t places() const { return lines() * axis[2].places(); }
};

// Everything of an axis but its box; a block has `taps` of its taps.
inline void dense_gradient_taps(const Problem& p, int a, bool runs, int64_t taps, DenseGradientAxis& axis) {
  const int64_t run = runs && a == 2 ? dense_granule(p) : 1;
  axis.all_taps = ceil_div(p.axis[a].kernel, run);
  axis.taps = std::min(taps, axis.all_taps);
  axis.tap_blocks = ceil_div(axis.all_taps, axis.taps);
  axis.dilation = p.axis[a].dilation * run;
  axis.unit = std::gcd(p.axis[a].stride, axis.dilation);
  axis.step = p.axis[a].stride / axis.unit;
  axis.turn = axis.dilation / axis.unit;
  axis.classes = std::min(axis.taps, axis.step);
  axis.reach = (axis.taps - 1) * axis.turn / axis.step;
}

// Whether runs of taps waste less than granules of channels.
inline bool dense_gradient_runs(const Problem& p) {
  const int64_t unit = dense_granule(p), channels = p.out_channels_per_group(), kernel = p.axis[2].kernel;
  if (p.axis[2].out() < p.axis[2].dilation * unit) return false;        // one run is in range, at least
  if (p.layout == Layout::kChannelsLast && channels > 2) return false;  // whose elements are far apart
  return round_up(kernel, unit) * channels < round_up(channels, unit) * kernel;
}

// Granules of a plane such that four positions of two planes lie in banks of their own.
inline int64_t dense_gradient_pitch(int64_t granules) { return round_up(granules - 4, int64_t{8}) + 4; }

// How plain weights lie, so that eight rows of four channels are in banks of their own as far as taps allow.
inline void dense_gradient_rows(const Problem& p, DenseGradientTile& t) {
  const int64_t run = t.runs ? dense_granule(p) : 1, taps = t.taps() * run;
  t.quads = !t.runs && taps % 4 == 0;
  t.weight_channel = t.quads && taps % 16 == 0 ? taps + 4 : taps;
  const int64_t channels = t.chunk_planes * (t.runs ? 1 : dense_granule(p));
  const int64_t quads = ceil_div(channels * t.weight_channel, int64_t{4});
  t.weight_row = 4 * (t.quads && t.weight_channel / 4 % 2 != 0 ? dense_gradient_pitch(quads) : quads | 1);
}

// Whether plain weights, if they are aligned, are copied in 16 bytes: rows, chunks and channels are whole ones.
inline bool dense_gradient_vectors(const Problem& p, const DenseGradientTile& t) {
  const int64_t kernel = p.kernel_positions();
  const int64_t channels = t.chunk_planes * (t.runs ? 1 : dense_granule(p));
  return t.tap_blocks() == 1 && p.out_channels_per_group() * kernel % 4 == 0 && channels * kernel % 4 == 0 &&
         (t.weight_channel == kernel || (!t.runs && kernel % 4 == 0));
}

// Granules from row to row of staged inputs such that eight rows lie in banks of their own.
inline int64_t dense_gradient_row(const Problem& p, const DenseGradientTile& t) {
  return t.positions / dense_granule(p) | 1;
}

inline int64_t dense_gradient_boxes(const Problem& p, const DenseGradientTile& t) {
  return p.batch * t.axis[0].tiles * t.axis[1].tiles * t.axis[2].tiles;
}

// Boxes of at most `positions`: function(tile) for each.
template <typename Function>
void dense_gradient_for_boxes(const Problem& p, DenseGradientTile t, Function&& function) {
  const int64_t positions = t.positions;
  const auto even = [](int64_t size, int64_t most, int64_t unit) {
    return std::min(most, round_up(ceil_div(size, ceil_div(size, most)), unit));
  };
  int64_t before = 0;
  const auto with_columns = [&](int64_t x) {
    if (x == before) return;
    before = x;
    int64_t y_before = 0;
    for (int64_t most_y = positions / x; most_y >= 1; most_y /= 2) {
      const int64_t y = even(p.axis[1].in, most_y, 1);
      const int64_t z = even(p.axis[0].in, positions / (x * y), 1);
      if (y != y_before) {
        const int64_t box[3] = {z, y, x};
        for (int a = 0; a < 3; ++a) t.axis[a].box = box[a], t.axis[a].tiles = ceil_div(p.axis[a].in, box[a]);
        function(t);
      }
      y_before = y;
      if (p.axis[0].in == 1) break;
    }
  };
  // Multiples of eight, whose operands lie in banks of their own, or what wastes less.
  const auto columns = [&](int64_t most) {
    const auto filled = [&](int64_t x) { return double(p.axis[2].in) / double(round_up(p.axis[2].in, x)); };
    const int64_t eights = even(p.axis[2].in, most, 8), any = even(p.axis[2].in, most, 1);
    return t.any_columns && filled(eights) < 0.9 * filled(any) ? any : eights;
  };
  for (int64_t most = positions; most >= std::min<int64_t>(8, positions); most /= 2) {
    with_columns(columns(most));
    // With what taps reach beyond, a little less may be whole rounds of copies.
    if (p.axis[0].in * p.axis[1].in == 1 && most > 16) with_columns(even(p.axis[2].in, most - 8, 8));
  }
}

// Copies of 16 bits go through registers, many loads of a thread at a time: of how many places, so that all rounds are
// as few as possible.
inline int64_t dense_gradient_rounds(const Problem& p, int64_t places, int64_t planes, int64_t items) {
  const int64_t most = kDenseGradientLoads / dense_granule(p);
  return ceil_div(places, 128 * items) * ceil_div(planes, most / items);
}
inline int64_t dense_gradient_items(const Problem& p, int64_t places, int64_t planes) {
  int64_t best = kDenseGradientLoads / dense_granule(p);  // of a plane
  for (int64_t items = best / 2; items >= 1; items /= 2) {
    const bool whole = planes % (kDenseGradientLoads / dense_granule(p) / items) == 0;
    if (whole && dense_gradient_rounds(p, places, planes, items) <= dense_gradient_rounds(p, places, planes, best)) {
      best = items;
    }
  }
  return best;
}
inline int64_t dense_gradient_rounds(const Problem& p, int64_t places, int64_t planes) {
  return dense_gradient_rounds(p, places, planes, dense_gradient_items(p, places, planes));
}

// Clocks, fitted to 254 tiles of ten layers on an H200, within an eighth.
inline constexpr double kDenseLatency = 650;  // of asynchronous copies
inline constexpr double kDensePlace = 230;    // to find 128 places
inline constexpr double kDenseWords = 210,
                        kDenseVectors = 225;  // to copy 128 granules, in words or whole
inline constexpr double kDenseRound = 1820;   // a round of loads of 16 bits
inline constexpr double kDenseWeights = 130;  // bytes of packed weights a clock
inline constexpr double kDenseSplit = 47, kDenseTf32 = 15,
                        kDense16 = 25;  // the products of 16 x 8 numbers of a step
inline constexpr double kDenseOperand = 7;
inline constexpr double kDenseChunk = 1290, kDenseTile = 2490;
inline constexpr double kDenseClocksMs = 1.65e6;

// The same of float32 products, fitted to 92 tiles of 47 layers, within a twentieth.
struct DenseClocks {
  double place, words, vectors;  // as above, of as many places as threads copy
  double product, operand, overlap, chunk, tile, latency;
};
inline constexpr DenseClocks kDenseInput = {370, 165, 95, 49, 5, 0.27, 850, 2000, 450};
inline constexpr DenseClocks kDenseWeight = {230, 132, 60, 41.5, 10, 0.25, 670, 4600, 1300};
inline constexpr double kDensePlain = 33,
                        kDensePlainWords = 10;  // bytes of plain weights a clock, in 16 bytes or words
inline constexpr double kDenseDirect = 1.2;     // products whose warps make the operands of their weights

inline double dense_gradient_copies(const DenseClocks& clocks, const DenseGradientTile& t, int64_t places,
                                    int64_t planes, bool vector) {
  const double each = (vector ? clocks.vectors : clocks.words) * (t.producers == 8 ? 1.4 : 1);
  return double(ceil_div(places, int64_t{32} * t.producers)) * (clocks.place + double(planes) * each);
}
inline double dense_gradient_stage(const DenseClocks& clocks, const DenseGradientTile& t, double copies,
                                   double product) {
  return std::max({product, copies, (copies + clocks.latency) / double(t.stages - 1)}) +
         clocks.overlap * std::min(product, copies) + clocks.chunk;
}

// Of copies to a stage.
inline double dense_gradient_copies(const Problem& p, int64_t places, int64_t planes, bool vector) {
  if (vector || p.element_size() == 4) {
    const double rounds = double(ceil_div(places, int64_t{128}));
    return rounds * (kDensePlace + double(planes) * (vector ? kDenseVectors : kDenseWords));
  }
  return kDenseRound * double(dense_gradient_rounds(p, places, planes));
}

// Of a step of all warps.
inline double dense_gradient_step(const Problem& p, const DenseGradientTile& t, bool of_weight) {
  const bool words = p.element_size() == 4;
  const double product = dense_gradient_split(p) ? kDenseSplit : words ? kDenseTf32 : kDense16;
  const double operands = of_weight && words ? double(4 * t.m_tiles + 2 * t.n_tiles) : double(t.m_tiles + t.n_tiles);
  return double(t.m_tiles * t.n_tiles) * product + operands * kDenseOperand;
}

// Of a stage, where the copies take `copies` and the products `product`.
inline double dense_gradient_stage(const DenseGradientTile& t, double copies, double product) {
  return std::max({product, copies, (copies + kDenseLatency) / double(t.stages - 1)}) +
         0.2 * std::min(product, copies) + kDenseChunk;
}

// Float32 sums of a warp go on in shared memory after some 32 steps: long sums would lose what one of 24 bits drops.
inline constexpr int64_t kDenseGradientRun = 32;
inline int64_t dense_gradient_total_bytes(const DenseGradientTile& t) {
  return t.m_tiles * t.n_tiles * 512 * dense_gradient_consumers(4);
}

// Shared memory of a block.
constexpr int64_t dense_gradient_budget(int64_t element_size, int64_t shared = kDenseGradientShared) {
  const int64_t blocks = dense_gradient_blocks(element_size);
  return shared / blocks - (blocks - 1) * 1024;
}

}  // namespace fastconvt
