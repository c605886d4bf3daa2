// The input's gradient of a transposed convolution as one matrix product on asynchronous matrix units: rows are input
// positions, columns input channels, the inner dimension taps by output channels. Plain C++17: no Torch, no CUDA;
// csrc/cuda/gemm_input_gradient.* computes what this plans.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "problem.h"

namespace fastconvt {

constexpr int kGradientGemmMaxStages = 8;
constexpr int64_t kGradientGemmShared = 226 << 10;
// Who stores what is staged: one thread by tensor copies, a warp by copies of runs, or those who staged it.
enum class GradientGemmStore { kBoxes, kRuns, kThreads };

constexpr int kGradientGemmHeader = 1024;  // bytes of shared memory before the stages

// What a warpgroup sums: `rows` times 64 positions by `columns` channels; a block has two.
struct GradientGemmShape {
  int rows, columns;
};
constexpr GradientGemmShape kGradientGemmShapes[] = {{2, 128}, {1, 256}, {2, 64}, {1, 128}, {1, 64}, {2, 32}};
constexpr int kNumGradientGemmShapes = sizeof(kGradientGemmShapes) / sizeof(kGradientGemmShapes[0]);

struct GradientGemmTile {
  int shape = -1;
  int rows = 0, columns = 0;  // of a block
  int chunk = 0;              // channels of a unit, which is one tap of these
  int chunks = 0;             // of a group's output channels
  int units_per_stage = 0;
  int inner = 0;   // stages of all units
  int splits = 1;  // blocks of a cluster, which share the inner dimension
  int64_t items = 0;
  int64_t whole = 0;     // the first items, that a block makes alone: all of them, or what fills the GPU some times
  bool windows = false;  // weights are read as they lie, the output's gradient in windows of padded planes
  int column_blocks = 0;
  GradientGemmStore store = GradientGemmStore::kThreads;
  int window_bytes = 0;  // of a stage
  int stages = 0, stage_bytes = 0, line_pitch = 0, staging_bytes = 0, shared_bytes = 0;
  double cycles = 0, packing = 0;  // packing: of what is packed for it
};

// Channels of a group in tensors that copies read: whole vectors of 16 bytes.
inline int64_t gradient_gemm_pitch(const Problem& p) {
  return round_up(p.out_channels_per_group(), 16 / p.element_size());
}
// Whether copies read the output's gradient, and the weight, as they lie, if they are aligned.
inline bool gradient_gemm_reads(const Problem& p, Layout layout) {
  return layout == Layout::kChannelsLast && p.out_channels_per_group() == gradient_gemm_pitch(p);
}

// Axes that a copy has besides channels and batch.
inline int gradient_gemm_rank(const Problem& p) {
  return !p.axis[0].is_trivial() ? 3 : !p.axis[1].is_trivial() ? 2 : 1;
}

// Contiguous tensors of 16 bits, small images: the inner dimension has the weight's own order, output channels by taps.
// Then the left operand comes through registers, a pair of neighbouring taps each, from windows: the planes of some
// output channels, with their padding, for all images that a tile's positions belong to.
struct GradientGemmWindows {
  int64_t size[3], plane;  // of an image's plane, in elements
  int slice;               // channels of a stage
  int images;              // of a tile at most
  int64_t image_bytes;     // of a window
};
constexpr int kGradientGemmWindowRows = 128;  // positions of a tile
constexpr int kGradientGemmWindowInner = 64;  // elements of a stage

inline GradientGemmWindows gradient_gemm_windows(const Problem& p) {
  GradientGemmWindows w{};
  w.plane = 1;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    w.size[a] = (axis.in - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1;
    if (a == 2) w.size[a] = round_up(w.size[a], int64_t{2});
    w.plane *= w.size[a];
  }
  constexpr int64_t kRows = kGradientGemmWindowRows;
  const int64_t image = p.in_positions();
  w.slice = static_cast<int>(kGradientGemmWindowInner / std::min<int64_t>(p.kernel_positions(), 64));
  w.images = static_cast<int>(image % kRows == 0 ? 1 : kRows % image == 0 ? kRows / image : (kRows - 2) / image + 2);
  w.image_bytes = w.slice * w.plane * 2;
  return w;
}
inline int64_t gradient_gemm_planes_bytes(const Problem& p) {
  return round_up(p.batch * p.out_channels * gradient_gemm_windows(p).plane * 2, int64_t{1024});
}

// If the weight is aligned.
inline bool gradient_gemm_may_have_windows(const Problem& p) {
  if (p.element_size() != 2 || p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return false;
  const Axis& last = p.axis[2];
  const int64_t taps = p.kernel_positions();
  if (p.groups != 1 || last.stride % 2 + last.kernel % 2 != 0 || last.dilation != 1) return false;
  if (taps > kGradientGemmWindowInner || kGradientGemmWindowInner % taps != 0) return false;
  if (p.out_channels * taps % kGradientGemmWindowInner != 0) return false;
  for (const Axis& axis : p.axis) {
    if (axis.in > 1024 || axis.kernel * axis.dilation > 1024) return false;
  }
  const GradientGemmWindows w = gradient_gemm_windows(p);
  return w.image_bytes % 16 == 0 && w.images * w.image_bytes <= (24 << 10) &&
         double(p.batch) * double(p.out_channels) * double(w.plane) < double(1 << 30);
}

// The widest unit that wastes little.
inline void gradient_gemm_chunk(const Problem& p, GradientGemmTile& t) {
  if (t.windows) {
    const GradientGemmWindows w = gradient_gemm_windows(p);
    t.window_bytes = static_cast<int>(round_up(w.images * w.image_bytes, int64_t{1024}));
    t.chunk = kGradientGemmWindowInner, t.units_per_stage = 1;
    t.chunks = t.inner = static_cast<int>(p.out_channels * p.kernel_positions() / kGradientGemmWindowInner);
    return;
  }
  const int64_t channels = p.out_channels_per_group();
  const int widest = static_cast<int>(128 / p.element_size());
  t.chunk = widest;
  for (int chunk = widest / 2; chunk >= widest / 4; chunk /= 2) {
    if (double(round_up(channels, int64_t{chunk})) <= 0.8 * double(round_up(channels, int64_t{t.chunk}))) {
      t.chunk = chunk;
    }
  }
  t.chunks = static_cast<int>(ceil_div(channels, int64_t{t.chunk}));
  t.units_per_stage = widest / t.chunk;
  t.inner = static_cast<int>(ceil_div(t.chunks * p.kernel_positions(), int64_t{t.units_per_stage}));
}

// Parts of a block's channels that are staged one after the other.
inline int gradient_gemm_parts(int rows, int columns, int element) {
  return rows * columns * element > (64 << 10) ? 2 : 1;
}

// If the tensor is aligned to 16 bytes.
inline GradientGemmStore gradient_gemm_store(const Problem& p, const GradientGemmTile& t) {
  const int64_t wide = 16 / p.element_size();
  if (t.whole == 0) return GradientGemmStore::kThreads;
  if (p.layout == Layout::kChannelsLast) {
    return p.in_channels_per_group() % wide == 0 ? GradientGemmStore::kBoxes : GradientGemmStore::kThreads;
  }
  if (p.in_positions() % 64 == 0) return GradientGemmStore::kBoxes;
  if (t.windows && p.in_positions() % 16 == 0 && p.in_positions() >= 32) return GradientGemmStore::kRuns;
  return p.in_positions() % wide == 0 && p.in_positions() >= 64 && t.rows == 256 ? GradientGemmStore::kRuns
                                                                                 : GradientGemmStore::kThreads;
}

inline bool gradient_gemm_fit(const Problem& p, GradientGemmTile& t) {
  const int element = static_cast<int>(p.element_size());
  const bool contiguous = p.layout == Layout::kContiguous;
  t.stage_bytes = t.columns * 128 + (t.windows ? t.window_bytes : t.rows * 128);
  // Lines of positions or channels; without tensor copies 32 bytes further apart, which bulk copies want at least.
  const int columns = t.columns / gradient_gemm_parts(t.rows, t.columns, element);
  const int line = (contiguous ? t.rows / 2 : columns) * element, lines = contiguous ? columns : t.rows / 2;
  t.line_pitch = t.store == GradientGemmStore::kBoxes ? std::min(line, 128) : line + 32;
  t.staging_bytes = 2 * lines * (t.store == GradientGemmStore::kBoxes ? line : t.line_pitch);
  const int64_t left = kGradientGemmShared - kGradientGemmHeader - t.staging_bytes;
  t.stages = static_cast<int>(std::min<int64_t>(left / t.stage_bytes, kGradientGemmMaxStages));
  // The blocks of a cluster leave their sums where stages were.
  const int sums = t.splits == 1 ? 0 : t.rows * t.columns * 4;
  if (t.stages >= 2 && t.windows) {
    const int least = static_cast<int>(round_up(int64_t{ceil_div(sums, t.stages)}, int64_t{1024}));
    if (least * t.stages <= left) t.stage_bytes = std::max(t.stage_bytes, least);
  }
  t.shared_bytes = kGradientGemmHeader + t.stages * t.stage_bytes + t.staging_bytes;
  return t.stages >= 2 && sums <= t.stages * t.stage_bytes;
}

// Clusters of some blocks that an H200 of 132 multiprocessors runs at once.
inline int64_t gradient_gemm_clusters(int splits) {
  return splits == 1 ? 132 : splits == 2 ? 66 : splits == 4 ? 30 : 15;
}

// Of a stage: what copies bring, what shared memory gives to products, or products.
inline double gradient_gemm_stage_clocks(const Problem& p, const GradientGemmTile& t) {
  const int bytes = t.chunk * static_cast<int>(p.element_size());
  const double area = double(t.rows * t.columns) / 32;
  const double copies = double(t.stage_bytes) / 43.4 * (bytes == 128 ? 1 : bytes == 64 ? 1.55 : 2.57);
  const int products = t.rows / 64;
  const double operands = 4.0 * products * (64 + t.columns) * 32;
  const double shared = (operands + double(t.stage_bytes)) / 128 * 1.12;
  const double images = t.windows ? 30.0 * gradient_gemm_windows(p).images : 0;  // one thread starts their copies
  return (std::max({area * 1.04, t.windows ? 0 : copies, shared}) + images) * (t.stages < 3 ? 2 : 1);
}

// Clocks of all blocks but for their start, about: fitted to an H200.
inline double gradient_gemm_cycles(const Problem& p, const GradientGemmTile& t) {
  const double area = double(t.rows * t.columns) / 32, stage = gradient_gemm_stage_clocks(p, t);
  const double threads = 6.7 * area, store = 2000 + (t.store == GradientGemmStore::kThreads ? threads : 0);
  const double rounds = double(t.whole) / double(gradient_gemm_clusters(t.splits) * t.splits);
  const double whole = t.whole == t.items && rounds > 4 ? rounds + 0.3 : std::ceil(rounds);
  const double shared = t.whole == t.items
                            ? 0
                            : double(ceil_div(t.inner, t.splits)) * stage + (t.columns == 256 ? 11400 : 6400) + threads;
  return whole * (double(t.inner) * stage + store) + shared + (t.splits == 8 ? 5000 : 0);
}

// Of what has to be packed for this product alone: the weight, or padded planes.
inline int64_t gradient_gemm_own_bytes(const Problem& p, const GradientGemmTile& t) {
  if (t.windows) return gradient_gemm_planes_bytes(p);
  return gradient_gemm_reads(p, p.weight_layout)
             ? 0
             : p.in_channels * p.kernel_positions() * gradient_gemm_pitch(p) * p.element_size();
}

// The best one for a shape, of no more blocks than some, in clusters of at most `most` blocks.
inline void gradient_gemm_consider(const Problem& p, GradientGemmTile t, int64_t blocks, int most,
                                   GradientGemmTile& best) {
  const int64_t channels = p.in_channels_per_group(), positions = p.batch * p.in_positions();
  gradient_gemm_chunk(p, t);
  t.column_blocks = static_cast<int>(ceil_div(channels, int64_t{t.columns}));
  t.items = ceil_div(positions, int64_t{t.rows}) * t.column_blocks * p.groups;
  for (t.splits = 1; t.splits <= most; t.splits *= 2) {
    if (t.splits > 1 && (t.inner < 4 * t.splits || t.splits * 8 > t.columns)) break;
    // Few items are split, or those that remain when all blocks have made as many.
    const int64_t clusters = gradient_gemm_clusters(t.splits), at_once = clusters * t.splits;
    t.whole = t.splits == 1 ? t.items : t.items / at_once * at_once;
    const int64_t rest = t.items - t.whole;
    if (t.splits > 1 && (rest == 0 || rest > clusters || t.whole > 4 * at_once)) continue;
    if ((t.whole == 0 ? rest * t.splits : t.splits == 1 ? t.items : at_once) > blocks) continue;
    t.store = gradient_gemm_store(p, t);
    if (!gradient_gemm_fit(p, t)) continue;
    t.cycles = gradient_gemm_cycles(p, t);
    const double packing = double(gradient_gemm_own_bytes(p, t)) * (t.windows ? 1100 : 1800) / 1e6;
    if (best.shape < 0 || t.cycles + packing < best.cycles + best.packing) best = t, best.packing = packing;
  }
}

// Of no more blocks than some, in clusters of at most four then, which need multiprocessors that are close to each
// other; none: a tile without a shape.
inline GradientGemmTile gradient_gemm_tile_of(const Problem& p, int64_t blocks, bool windows = true) {
  GradientGemmTile best{};
  for (int shape = 0; shape < kNumGradientGemmShapes; ++shape) {
    GradientGemmTile t{};
    t.shape = shape;
    t.rows = kGradientGemmShapes[shape].rows * 128, t.columns = kGradientGemmShapes[shape].columns;
    if (t.columns > 32 && t.columns >= 2 * p.in_channels_per_group()) continue;
    gradient_gemm_consider(p, t, blocks, blocks < 132 ? 4 : 8, best);
    t.windows = windows && t.rows == kGradientGemmWindowRows && t.columns >= 128 && gradient_gemm_may_have_windows(p) &&
                gradient_gemm_planes_bytes(p) <= p.weight_elements() * p.element_size();
    if (t.windows) gradient_gemm_consider(p, t, blocks, blocks < 132 ? 4 : 8, best);
  }
  return best;
}
// If the weight is not aligned.
inline GradientGemmTile gradient_gemm_plain_tile(const Problem& p) {
  return gradient_gemm_tile_of(p, int64_t{1} << 40, false);
}
inline GradientGemmTile gradient_gemm_tile(const Problem& p) { return gradient_gemm_tile_of(p, int64_t{1} << 40); }

// The weight's gradient from the same planes: rows are elements of the weight's rows, output channels by taps, columns
// input channels, a stage is an image of up to 64 positions of the input, which is read as it lies. As a problem of the
// input's gradient: what is stored is alike.
inline Problem window_weight_problem(const Problem& p) {
  Problem q = p;
  q.batch = 1;
  q.axis[0] = q.axis[1] = {1, 1, 1, 0, 0, 1};
  q.axis[2] = {p.out_channels * p.kernel_positions(), 1, 1, 0, 0, 1};
  return q;
}
// If the input is aligned.
inline bool gradient_gemm_may_have_weight_windows(const Problem& p) {
  if (!gradient_gemm_may_have_windows(p)) return false;
  const int64_t positions = p.in_positions(), taps = p.kernel_positions(), inner = p.out_channels * taps;
  if (taps < 4 || inner % kGradientGemmWindowRows != 0 || inner >= (1 << 30)) return false;
  if (positions > 64 || positions % 8 != 0 || p.axis[2].in % 2 != 0) return false;
  for (const Axis& axis : p.axis) {
    if (p.has_bias && axis.padding < axis.output_padding) return false;  // planes lack outputs
  }
  if (p.has_bias && gradient_gemm_windows(p).plane % 4 != 0) return false;
  return 2 * gradient_gemm_windows(p).image_bytes % 16 == 0 && p.in_channels >= 128;
}
inline GradientGemmTile gradient_gemm_weight_tile(const Problem& p) {
  GradientGemmTile t{};
  if (!gradient_gemm_may_have_weight_windows(p)) return t;
  const GradientGemmWindows w = gradient_gemm_windows(p);
  const Problem q = window_weight_problem(p);
  t.windows = true;
  t.window_bytes = static_cast<int>(round_up(2 * w.image_bytes, int64_t{1024}));
  t.rows = kGradientGemmWindowRows, t.columns = p.in_channels > 128 ? 256 : 128;
  t.chunk = kGradientGemmWindowInner, t.units_per_stage = 1;
  t.chunks = t.inner = static_cast<int>(p.batch);
  t.column_blocks = static_cast<int>(ceil_div(p.in_channels, int64_t{t.columns}));
  t.items = t.whole = q.axis[2].in / t.rows * t.column_blocks;
  t.store = gradient_gemm_store(q, t);
  if (!gradient_gemm_fit(q, t)) return t;
  const double steps = double(ceil_div(p.in_positions(), int64_t{16}));
  const double stage = std::max(double(t.rows * t.columns) / 32 * 1.08 * steps / 4, double(t.stage_bytes) / 43.4);
  t.cycles = double(ceil_div(t.items, int64_t{132})) * (double(t.inner) * stage * 1.2 + 3500);
  t.shape = t.columns == 256 ? 1 : 3;
  return t;
}

inline std::string gradient_gemm_refusal(const Problem& p) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  if (p.dtype == DType::kFloat64 || (p.dtype == DType::kFloat32 && !p.allow_tf32)) return "float32 and float64";
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  const int rank = gradient_gemm_rank(p);
  const int64_t limit = rank == 3 ? 15 : rank == 2 ? 127 : 32767;
  for (const Axis& axis : p.axis) {
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
    if (axis.stride > 8) return "a stride of more than 8";
    const int64_t reach = (axis.kernel - 1) * axis.dilation, upper = axis.padding - reach - axis.output_padding;
    if (axis.padding > limit || upper < -limit || upper > limit || reach > 2 * limit + 1) {
      return "a kernel that reaches too far";
    }
    if (axis.in >= kMaxSize || axis.out() >= kMaxSize) return "an axis of 2^30 or more";
  }
  if (p.kernel_positions() > 1024) return "a kernel of more than 1024 elements";
  if (double(p.batch) * double(p.in_positions()) >= double(kMaxSize)) return "2^30 or more positions";
  if (double(p.batch) * double(p.out_positions()) >= double(kMaxSize)) return "2^30 or more positions";
  if (std::max(p.in_channels, p.out_channels) >= (1 << 20)) return "2^20 or more channels";
  if (double(p.weight_elements()) >= double(kMaxSize)) return "a weight of 2^30 or more elements";
  if (p.out_channels_per_group() < 16 || p.in_channels_per_group() < 16) return "fewer than 16 channels in a group";
  if (last_result<gradient_gemm_tile>(p).items >= kMaxSize) return "too many tiles";
  return "";
}

// Milliseconds on an H200.
inline double gradient_gemm_cost_ms(const Problem& p) {
  const GradientGemmTile& t = last_result<gradient_gemm_tile>(p);
  const double element = double(p.element_size()), rate = 3.6e9;  // bytes a millisecond
  const double memory = element * double(p.out_elements() + p.in_elements()) / rate;
  double packing = 0;
  packing += 2 * double(gradient_gemm_own_bytes(p, t)) / 2e9;
  if (!t.windows && !gradient_gemm_reads(p, p.layout))
    packing += 2 * element * double(p.out_elements()) / (element == 2 ? 2.8e9 : 3.8e9);
  return 0.0064 + (packing > 0 ? 0.003 + packing : 0) + std::max(t.cycles / 1.7e6, memory);
}

}  // namespace fastconvt
