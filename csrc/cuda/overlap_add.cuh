// Transposed convolution with few output channels a group and many taps (csrc/core/overlap_add.h): an implicit matrix
// product over offsets and channels, from one box of inputs in shared memory that serves every offset.
#pragma once

#include "overlap_add_product.cuh"
#include "overlap_add_store.cuh"

namespace fastconvt::cuda {

inline constexpr int kOverlapAddMaxThreads = static_cast<int>(kOverlapAddMaxWarps) * 32;  // of 128 registers

template <typename T_, OverlapAddPrecision kPrecision_, int kTiles_>
struct OverlapAddTraits {
  using Element = T_;
  static constexpr OverlapAddPrecision kPrecision = kPrecision_;
  static constexpr int kTiles = kTiles_;  // column tiles of a warp
  static constexpr int kRows = overlap_add_rows(kTiles_) / 16;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class Traits>
class OverlapAddKernel {
  using T = typename Traits::Element;
  static constexpr bool kStrict = Traits::kPrecision == OverlapAddPrecision::kFloat32;
  static constexpr int kRows = Traits::kRows, kTiles = Traits::kTiles, kWarpRows = kRows * 16;
  using Sums = float[kTiles][kRows][4];
  using Operands = OverlapAddOperands<kRows, kTiles>;

  const OverlapAddParams& p;
  unsigned char* const shared;
  const int lane, team, team_warp, row_warp, column_warp;

 public:
  __device__ OverlapAddKernel(const OverlapAddParams& p, unsigned char* shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        team(threadIdx.x / 32 / (p.row_warps * p.column_warps)),
        team_warp(threadIdx.x / 32 - team * p.row_warps * p.column_warps),
        row_warp(team_warp % p.row_warps),
        column_warp(team_warp / p.row_warps) {}

  __device__ void run() {
    OverlapAddStage<T, Traits::kPrecision, kTiles> stage(p, shared);
    uint32_t rows[kRows];
    find_rows(rows);
    Sums sum = {};
    __syncthreads();
    // A team copies and multiplies on its own; meanwhile others multiply.
    const int threads = p.row_warps * p.column_warps * 32, thread = team_warp * 32 + lane;
    unsigned char* const target = shared + team * p.stage_bytes;
    if (kStrict && p.fold_entries > 0) clear_totals();
    int until_fold = p.fold_entries;
#pragma unroll 1
    for (int first = team * p.stage_steps; first < p.steps; first += p.teams * p.stage_steps) {
      const int steps = min(p.stage_steps, p.steps - first);
      for (int i = 0; i < steps; ++i) stage.copy_step(first + i, target + i * p.step_bytes, thread, threads);
      asm volatile("cp.async.wait_all;" ::: "memory");
      sync_team(threads);
      for (int i = 0; i < steps; ++i) multiply_step(rows, team * p.stage_bytes + i * p.step_bytes, sum, until_fold);
      sync_team(threads);
    }
    if (kStrict && p.fold_entries > 0) fold(sum, true);
    if (p.teams > 1) add_teams(sum, thread, threads);
    store(sum);
  }

 private:
  __device__ __forceinline__ void sync_team(int threads) const {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
  }

  // Totals of a thread are its own.
  __device__ __forceinline__ float4& total(int index) const {
    return reinterpret_cast<float4*>(shared + p.totals)[index * blockDim.x + threadIdx.x];
  }
  __device__ __forceinline__ void clear_totals() const {
#pragma unroll
    for (int i = 0; i < kTiles * kRows; ++i) total(i) = make_float4(0, 0, 0, 0);
  }
  // total += sum; sum = what that lost. At the end sum = total + sum.
  __device__ __forceinline__ void fold(Sums& sum, bool end) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        float4& place = total(j * kRows + m);
        const float4 all = place;
        const float before[4] = {all.x, all.y, all.z, all.w};
        float after[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          after[i] = before[i] + sum[j][m][i];
          sum[j][m][i] = end ? after[i] : sum[j][m][i] - (after[i] - before[i]);
        }
        if (!end) place = make_float4(after[0], after[1], after[2], after[3]);
      }
    }
  }

  // The first team gets the sums of all, in their order.
  __device__ __forceinline__ void add_teams(Sums& sum, int thread, int threads) const {
    __syncthreads();
    float* const own = reinterpret_cast<float*>(shared) + thread;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (team > 0) own[(((team - 1) * kTiles + j) * kRows * 4 + m * 4 + i) * threads] = sum[j][m][i];
        }
    __syncthreads();
    if (team > 0) return;
#pragma unroll 1
    for (int other = 0; other < p.teams - 1; ++other) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int m = 0; m < kRows; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j][m][i] += own[((other * kTiles + j) * kRows * 4 + m * 4 + i) * threads];
    }
  }

  // Where the lane's rows of the left operands begin in the first step of the first team.
  __device__ void find_rows(uint32_t (&rows)[kRows]) const {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      int at[4];
      overlap_add_split(min(row_warp * kWarpRows + m * 16 + lane % 16, p.rows - 1), p.by_box, at);
      const int position =
          ((at[0] * p.held[1] + at[1] * p.axis[0].bases) * p.held[2] + at[2] * p.axis[1].bases) * p.held[3] +
          at[3] * p.axis[2].bases + p.lead;
      rows[m] = shared_address(shared) + lane / 16 * p.half_bytes + position * 16;
    }
  }

  // entry: OverlapAddEntry.
  __device__ __forceinline__ void load(Operands& operands, const int4& entry, const uint32_t (&rows)[kRows],
                                       uint32_t step, uint32_t weights) const {
    const int fragment[kOverlapAddMaxTiles] = {entry.y, entry.z, entry.w};
    const uint32_t input = step + entry.x;
#pragma unroll
    for (int m = 0; m < kRows; ++m) overlap_add_load_left(operands.left[m], rows[m] + input);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      operands.exists[j] = fragment[j];
      if (!kStrict && fragment[j] >= 0) overlap_add_load_right(operands.right[j], weights + fragment[j]);
    }
  }

  __device__ __forceinline__ void multiply_step(const uint32_t (&rows)[kRows], uint32_t step, Sums& sum,
                                                int& until_fold) const {
    uint32_t entry = shared_address(shared) + p.entries + column_warp * p.entry_count * sizeof(OverlapAddEntry);
    const uint32_t last = entry + (p.entry_count - 1) * sizeof(OverlapAddEntry);
    const uint32_t weights = shared_address(shared) + step + p.step_weights + lane * (kStrict ? 16 : 8);
    Operands operands;
    load(operands, overlap_add_load_entry(entry), rows, step, weights);
    // Entries are loaded one ahead; other warps hide the loads of operands, for which registers are short.
#pragma unroll 1
    for (int left = p.entry_count; left > 0; --left) {
      entry = min(entry + static_cast<uint32_t>(sizeof(OverlapAddEntry)), last);
      const int4 next = overlap_add_load_entry(entry);
      if constexpr (kStrict) {
        overlap_add_multiply_strict(operands, weights, sum);
        if (--until_fold == 0) fold(sum, false), until_fold = p.fold_entries;
      } else {
        overlap_add_multiply<T, Traits::kPrecision>(operands, sum);
      }
      load(operands, next, rows, step, weights);
    }
  }

  __device__ __forceinline__ void store(const Sums& sum) const {
    const OverlapAddBlock block(p, p.column_warps * kTiles);
    const OverlapAddOutputs<T> outputs{p, block};
    int residue[kTiles][2][3];
    T* place[kTiles][2];
    float term[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        int channel;
        const bool exists =
            outputs.find_column(column_warp * kTiles + j, lane % 4 * 2 + side, residue[j][side], channel);
        if (!exists) residue[j][side][2] = INT32_MIN / 2;  // no output
        place[j][side] = static_cast<T*>(p.output) + outputs.column_offset(residue[j][side], channel);
        term[j][side] = exists ? outputs.bias_term(channel) : 0.f;
      }
    }
    float probe = 0;
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      int at[4];
      const bool exists = team == 0 && outputs.find_cell(row_warp * kWarpRows + i * 8 + lane / 4, at);
      const int64_t offset = outputs.cell_offset(at);
      float value[kTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int side = 0; side < 2; ++side) value[j][side] = sum[j][i / 2][i % 2 * 2 + side] + term[j][side];
      }
      p.rectify(value);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          if (!exists || !outputs.is_output(at, residue[j][side])) continue;
          probe = fmaf(sum[j][i / 2][i % 2 * 2 + side], 0.f, probe);
          place[j][side][offset] = from_accumulator<T>(value[j][side]);
        }
      }
    }
    // Inputs and weights that do not exist are zeros, which only finite factors leave without effect, and rests of
    // float32 may be NaN: both show in a sum that is not finite.
    if (__syncthreads_or(!(probe == 0))) overlap_add_repair<T>(p, p.column_warps * kTiles);
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(kOverlapAddMaxThreads)
    overlap_add_kernel(const __grid_constant__ OverlapAddParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char overlap_add_shared[];
  OverlapAddKernel<Traits>(p, overlap_add_shared).run();
#endif
}

}  // namespace fastconvt::cuda
