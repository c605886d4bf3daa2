// Stages and runs of the gradients of pairs.
#pragma once

#include "pairs_tf32_gradients_params.h"
#include "tf32_gradient_product.cuh"

namespace fastconvt::cuda {

// Bytes of a stage: 256 or 128 rows (positions, or terms), and what they are multiplied with; see the kernels.
template <int kTiles>
constexpr int kPairsRows = kTf32Rows<kTiles> * (16 << 10);
template <int kTiles>
constexpr int kPairsStage = kPairsRows<kTiles> + kTiles * 1024;
template <int kTiles>
constexpr int kPairsStages = (224 << 10) / kPairsStage<kTiles>;

template <int kTiles>
struct PairsBarriers {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kPairsStages<kTiles> + stage); }
  __device__ __forceinline__ uint32_t stage(int stage) const { return base + 1024 + stage * kPairsStage<kTiles>; }
  __device__ __forceinline__ void initialize() const {
    for (int i = 0; i < kPairsStages<kTiles>; ++i) {
      mbarrier_init(full(i), 1);
      mbarrier_init(empty(i), 8);
    }
    fence_shared_writes();
  }
};

// Where a run begins.
struct PairsRun {
  int x, y, z, n;

  __device__ __forceinline__ PairsRun(const PairsTf32Params& p, int run, int of_row) {
    int row = run / of_row;
    x = (run - row * of_row) * kPairsRun;
    int plane = row / p.height;
    y = row - plane * p.height;
    n = plane / p.depth;
    z = plane - n * p.depth;
  }
};

}  // namespace fastconvt::cuda
