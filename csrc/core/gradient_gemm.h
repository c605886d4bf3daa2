// The input's gradient of a transposed convolution as one matrix product on asynchronous matrix units: rows are input
// positions, columns input channels, the inner dimension taps by output channels. Plain C++17: no Torch, no CUDA;
// csrc/cuda/gemm_input_gradient.* computes what this plans.
#pragma once

#include <algorithm>
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
  int column_blocks = 0;
  GradientGemmStore store = GradientGemmStore::kThreads;
  int stages = 0, stage_bytes = 0, line_pitch = 0, staging_bytes = 0, shared_bytes = 0;
  double cycles = 0;
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

// The widest unit that wastes little.
inline void gradient_gemm_chunk(const Problem& p, GradientGemmTile& t) {
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
  if (t.splits > 1) return GradientGemmStore::kThreads;
  if (p.layout == Layout::kChannelsLast) {
    return p.in_channels_per_group() % wide == 0 ? GradientGemmStore::kBoxes : GradientGemmStore::kThreads;
  }
  if (p.in_positions() % 64 == 0) return GradientGemmStore::kBoxes;
  return p.in_positions() % wide == 0 && p.in_positions() >= 64 && t.rows == 256 ? GradientGemmStore::kRuns
                                                                                 : GradientGemmStore::kThreads;
}

inline bool gradient_gemm_fit(const Problem& p, GradientGemmTile& t) {
  const int element = static_cast<int>(p.element_size());
  const bool contiguous = p.layout == Layout::kContiguous;
  t.stage_bytes = (t.rows + t.columns) * 128;
  // Lines of positions or channels; without tensor copies 32 bytes further apart, which bulk copies want at least.
  const int columns = t.columns / gradient_gemm_parts(t.rows, t.columns, element);
  const int line = (contiguous ? t.rows / 2 : columns) * element, lines = contiguous ? columns : t.rows / 2;
  t.line_pitch = t.store == GradientGemmStore::kBoxes ? std::min(line, 128) : line + 32;
  t.staging_bytes = 2 * lines * (t.store == GradientGemmStore::kBoxes ? line : t.line_pitch);
  const int64_t left = kGradientGemmShared - kGradientGemmHeader - t.staging_bytes;
  t.stages = static_cast<int>(std::min<int64_t>(left / t.stage_bytes, kGradientGemmMaxStages));
  t.shared_bytes = kGradientGemmHeader + t.stages * t.stage_bytes + t.staging_bytes;
  // The blocks of a cluster leave their sums where stages were.
  return t.stages >= 2 && (t.splits == 1 || t.rows * t.columns * 4 <= t.stages * t.stage_bytes);
}

// Clocks of all blocks but for their start, about: fitted to an H200 of 132 multiprocessors.
inline double gradient_gemm_cycles(const Problem& p, const GradientGemmTile& t) {
  const int clusters = t.splits == 1 ? 132 : t.splits == 2 ? 66 : t.splits == 4 ? 30 : 15;  // that run at once
  const int bytes = t.chunk * static_cast<int>(p.element_size());
  const double rate = t.columns == 256 ? 1.26 : t.columns == 128 ? 1.39 : t.columns == 64 ? 1.2 : 1.6;
  const double area = double(t.rows * t.columns) / 32;
  const double copies = double(t.stage_bytes) / 49 * (bytes == 128 ? 1 : bytes == 64 ? 1.75 : 2.9);
  const double stage = std::max(area * rate, copies) * (t.stages < 3 ? 2 : 1);
  const double store = 2000 + (t.store == GradientGemmStore::kThreads ? 6.7 * area : 0) + (t.splits > 1 ? 4400 : 0);
  const double rounds = double(t.items) / clusters;
  return (rounds > 4 ? rounds + 0.3 : double(ceil_div(t.items, int64_t{clusters}))) *
         (double(ceil_div(t.inner, t.splits)) * stage + store);
}

// Of no more blocks than some, in clusters of at most four then, which need multiprocessors that are close to each
// other; none: a tile without a shape.
inline GradientGemmTile gradient_gemm_tile_of(const Problem& p, int64_t blocks) {
  const int most = blocks < 132 ? 4 : 8;
  GradientGemmTile best{};
  const int64_t channels = p.in_channels_per_group(), positions = p.batch * p.in_positions();
  for (int shape = 0; shape < kNumGradientGemmShapes; ++shape) {
    GradientGemmTile t{};
    t.shape = shape;
    t.rows = kGradientGemmShapes[shape].rows * 128, t.columns = kGradientGemmShapes[shape].columns;
    if (t.columns > 32 && t.columns >= 2 * channels) continue;
    gradient_gemm_chunk(p, t);
    t.column_blocks = static_cast<int>(ceil_div(channels, int64_t{t.columns}));
    t.items = ceil_div(positions, int64_t{t.rows}) * t.column_blocks * p.groups;
    for (t.splits = 1; t.splits <= 8; t.splits *= 2) {
      if (t.splits > 1 && (t.items * t.splits > 132 || t.inner < 4 * t.splits)) break;
      if (t.splits * 8 > t.columns || t.items * t.splits > blocks || t.splits > most) break;
      t.store = gradient_gemm_store(p, t);
      if (!gradient_gemm_fit(p, t)) continue;
      t.cycles = gradient_gemm_cycles(p, t);
      if (best.shape < 0 || t.cycles < best.cycles) best = t;
    }
  }
  return best;
}
inline GradientGemmTile gradient_gemm_tile(const Problem& p) { return gradient_gemm_tile_of(p, int64_t{1} << 40); }

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
  if (!gradient_gemm_reads(p, p.weight_layout)) packing += 2 * element * double(p.weight_elements()) / 2e9;
  if (!gradient_gemm_reads(p, p.layout))
    packing += 2 * element * double(p.out_elements()) / (element == 2 ? 2.8e9 : 3.8e9);
  return 0.0064 + (packing > 0 ? 0.003 + packing : 0) + std::max(t.cycles / 1.7e6, memory);
}

}  // namespace fastconvt
