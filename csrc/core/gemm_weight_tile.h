// A tile of the weight's gradient as a matrix product (gemm_weight_gradient.h). Plain C++17: no Torch, no CUDA.
#pragma once

#include <algorithm>

#include "gemm_weight_taps.h"
#include "problem.h"

namespace fastconvt {

constexpr int kGemmWeightPositions = 64;           // of a stage
constexpr int64_t kGemmWeightLongest = 128 << 10;  // positions of a partial sum at most, about
constexpr int kGemmWeightMaxSlots = 8;             // of a warpgroup
constexpr int kGemmWeightMaxStages = 8;
constexpr int64_t kGemmWeightShared = 227 << 10;  // bytes of a block
constexpr int kGemmWeightHead = 2048;             // of them, barriers and tables

// Channels of a slot, and the slots of a warpgroup.
struct GemmWeightShape {
  int width, slots;
};
constexpr GemmWeightShape kGemmWeightShapes[] = {{64, 1}, {64, 2}, {64, 3}, {64, 4}, {64, 5}, {32, 2},
                                                 {32, 4}, {32, 5}, {32, 8}, {16, 4}, {16, 8}};
constexpr int kNumGemmWeightShapes = sizeof(kGemmWeightShapes) / sizeof(kGemmWeightShapes[0]);

// TF32 multiplies numbers of float32 as sums of two of bfloat16, which have more bits than one of TF32.
inline int gemm_weight_passes(const Problem& p) { return p.element_size() == 4 ? 3 : 1; }

// Axes are 0 to 3 here: batch, depth, height, width.
struct GemmWeightTile {
  int shape = -1;
  bool rows;     // warpgroups differ in input channels; if not, in slots
  bool direct;   // contiguous inputs are read as they lie, if they are aligned
  int order[4];  // axes, innermost first
  int box[4];    // positions of a stage, in this order
  int halo[4];   // further outputs of a staged residue, in this order
  int64_t tiles[4], all_tiles;
  int in_blocks, channel_blocks, slot_blocks;
  int slots;  // of a block
  int boxes;  // staged for a block at most
  int box_bytes, stage_bytes, stages;
  int64_t kinds, splits;
  bool clustered;  // the splits of a kind are a cluster, which adds them
  double clocks;

  int rows_of_box() const {
    int count = 1;
    for (int i = 0; i < 4; ++i) count *= box[i] + halo[i];
    return count;
  }
};

inline int64_t gemm_weight_size(const Problem& p, int axis) { return axis == 0 ? p.batch : p.axis[axis - 1].in; }
inline int64_t gemm_weight_stride(const Problem& p, int axis) { return axis == 0 ? 1 : p.axis[axis - 1].stride; }

// Clocks of a block for a stage, about: products, or rows that are copied.
inline double gemm_weight_stage_clocks(const GemmWeightTile& t) {
  const GemmWeightShape shape = kGemmWeightShapes[t.shape];
  const double product = shape.slots * (1.385 * shape.width + 9.3) + 676;
  const double rows = double(t.boxes * t.rows_of_box() + kGemmWeightPositions * (t.rows ? 2 : 1));
  return std::max(product, (shape.width == 64 ? 3.6 : 1.9) * rows) * (t.rows ? 1 : 1.04);
}

}  // namespace fastconvt
