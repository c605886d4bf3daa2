// What becomes of a block's sums: partial ones for the reduction; or, where a block or a cluster sums all positions,
// the weight's gradient.
#pragma once

#include "device/cluster.cuh"
#include "gemm_weight_gradient_product.cuh"
#include "gemm_weight_gradient_store.cuh"

namespace fastconvt::cuda {

constexpr int kGemmWeightMultipliers = 256, kGemmWeightThreads = kGemmWeightMultipliers + 128;
constexpr int kGemmWeightBiasWarps = 3;

// What a block sums, and of which positions.
struct GemmWeightShare {
  int group, in_block, first_slot, end_slot;
  int split, begin, end;  // tiles

  __device__ explicit GemmWeightShare(const GemmWeightParams& p) {
    const int block = static_cast<int>(blockIdx.x);
    split = p.clustered ? block % p.splits : block / p.kinds;
    int kind = p.clustered ? block / p.splits : block - split * p.kinds;
    const int slot_block = kind % p.slot_blocks;
    kind /= p.slot_blocks;
    in_block = kind % p.in_blocks;
    group = kind / p.in_blocks;
    first_slot = slot_block * p.slots;
    end_slot = min(first_slot + p.slots, p.all_slots);
    begin = static_cast<int>(static_cast<int64_t>(p.all_tiles) * split / p.splits);
    end = static_cast<int>(static_cast<int64_t>(p.all_tiles) * (split + 1) / p.splits);
  }

  // Column tiles of every slot that the block finishes: a part, in a cluster.
  __device__ __forceinline__ int first_tile(const GemmWeightParams& p) const {
    return p.clustered ? p.row_bytes / 16 * split / p.splits : 0;
  }
  __device__ __forceinline__ int end_tile(const GemmWeightParams& p) const {
    return p.clustered ? p.row_bytes / 16 * (split + 1) / p.splits : p.row_bytes / 16;
  }
};

// The multiplying threads meet, and return whether anyone says so.
__device__ __forceinline__ bool meet_multipliers(bool says) {
  int result = 0;
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %1, 0;\nbarrier.cta.red.or.pred any, 1, %2, mine;\n"
      "selp.b32 %0, 1, 0, any;\n}"
      : "=r"(result)
      : "r"(static_cast<int>(says)), "n"(kGemmWeightMultipliers)
      : "memory");
#endif
  return result != 0;
}
// The warps that sum the bias have read all stages; those that multiply wait for this.
template <int kLanes>
__device__ __forceinline__ void leave_stages() {
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile("barrier.cta.arrive 2, %0;" ::"n"(kGemmWeightMultipliers + kLanes) : "memory");
#endif
}
template <int kLanes>
__device__ __forceinline__ void wait_for_stages() {
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile("barrier.cta.sync 2, %0;" ::"n"(kGemmWeightMultipliers + kLanes) : "memory");
#endif
}

// The first of the rows of a thread's sums, in its block.
__device__ __forceinline__ int row_of_thread(const GemmWeightParams& p) {
  const int warp = threadIdx.x / 32;
  return (p.rows ? warp : warp % 4) * 16 + threadIdx.x % 32 / 4;
}

// Partial sums as the reduction reads them.
template <int kColumnTiles, int kSlots>
__device__ __forceinline__ void store_partial(const GemmWeightParams& p, const GemmWeightShare& share,
                                              const int* numbers, int first_slot,
                                              const float (&sum)[kSlots][kColumnTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int row = share.in_block * (p.rows ? 128 : 64) + row_of_thread(p);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int number = share.first_slot + first_slot + i;
    if (number >= share.end_slot) continue;
    const int channel_block = number / p.taps, tap = numbers[first_slot + i];
    const int column = channel_block * kColumnTiles * 8 + lane % 4 * 2;
    float* const to = p.partial + share.split * p.part +
                      ((static_cast<int64_t>(share.group) * p.group_in + row) * p.taps + tap) * p.weight_pitch + column;
    const int64_t further = int64_t{8} * p.taps * p.weight_pitch;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      if (column + n * 8 >= p.weight_pitch) continue;
      if (row < p.group_in) *reinterpret_cast<float2*>(to + n * 8) = make_float2(sum[i][n][0], sum[i][n][1]);
      if (row + 8 < p.group_in) {
        *reinterpret_cast<float2*>(to + further + n * 8) = make_float2(sum[i][n][2], sum[i][n][3]);
      }
    }
  }
}

// Stages a column tile of a slot, `column` channels from the first one staged.
template <typename T>
__device__ __forceinline__ void stage_sums(const GemmWeightStaged& staged, const GemmWeightOrder& order, int row,
                                           int slot, int column, const float (&d)[4], float& probe) {
  const int step = order.step[slot];
  const uint32_t to = staged.base + row * staged.pitch + order.at[slot] + (column + threadIdx.x % 4 * 2) * step;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    stage_pair<T>(to + half * 8 * staged.pitch, step, d[2 * half], d[2 * half + 1]);
    probe = fmaf(d[2 * half], 0.f, fmaf(d[2 * half + 1], 0.f, probe));
  }
}

// The blocks of a cluster, each with sums of some positions, leave them in shared memory; each adds everyone's, in the
// order of the blocks, of its share of the column tiles, [begin, end) of every slot.
template <typename T, int kColumnTiles, int kSlots>
__device__ __forceinline__ void stage_shared_sums(const GemmWeightParams& p, const GemmWeightStaged& staged,
                                                  const GemmWeightOrder& order, uint32_t stages, int first_slot,
                                                  int begin, int end, const float (&sum)[kSlots][kColumnTiles][4],
                                                  float& probe) {
  constexpr int kTile = kGemmWeightMultipliers * 16, kAtOnce = 8;
  const uint32_t own = stages + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) store_four(own + (i * kColumnTiles + n) * kTile, sum[i][n]);
  meet_cluster();
  const int width = end - begin, count = kSlots * width, row = row_of_thread(p);
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float total[kAtOnce][4] = {};
#pragma unroll 2
    for (int block = 0; block < p.splits; ++block) {
      float part[kAtOnce][4];
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        const int number = min(first + q, count - 1), i = number / width, n = begin + number - i * width;
        load_cluster_four(cluster_address(own + (i * kColumnTiles + n) * kTile, block), part[q]);
      }
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
        for (int k = 0; k < 4; ++k) total[q][k] += part[q][k];
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      const int number = first + q, i = number / width;
      if (number >= count || first_slot + i >= staged.slots) continue;
      stage_sums<T>(staged, order, row, first_slot + i, (number - i * width) * 8, total[q], probe);
    }
  }
}

// Where a block, or a cluster, has summed all positions: sums become the weight's gradient, by way of shared memory.
template <typename T, int kColumnTiles, int kSlots>
__device__ __forceinline__ void finish_sums(const GemmWeightParams& p, const GemmWeightShare& share,
                                            const GemmWeightOrder& order, uint32_t stages, int first_slot,
                                            const float (&sum)[kSlots][kColumnTiles][4]) {
  const int rows = p.rows ? 128 : 64, width = kColumnTiles * 8;
  const int begin = share.first_tile(p), end = share.end_tile(p);
  const GemmWeightStaged staged{
      stages + (p.clustered ? kSlots * kColumnTiles * kGemmWeightMultipliers * 16 : 0),
      p.slots * (end - begin) * 8 * static_cast<int>(sizeof(T)) + (p.channels_last ? kGemmWeightSkew : 4),
      share.group,
      share.in_block * rows,
      min(rows, p.group_in - share.in_block * rows),
      share.first_slot,
      share.end_slot - share.first_slot,
      width,
      begin * 8,
      (end - begin) * 8};
  if (p.bias_partial != nullptr) wait_for_stages<32 * kGemmWeightBiasWarps>();
  meet_multipliers(false);
  float probe = 0;
  if (p.clustered) {
    stage_shared_sums<T>(p, staged, order, stages, first_slot, begin, end, sum, probe);
  } else {
    const int row = row_of_thread(p);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (first_slot + i >= staged.slots) continue;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        stage_sums<T>(staged, order, row, first_slot + i, n * 8, sum[i][n], probe);
      }
    }
  }
  if (meet_multipliers(probe != 0)) {
    repair_weight<T>(p, staged, order);
    meet_multipliers(false);
  }
  store_weight<T>(p, staged, order);
}

}  // namespace fastconvt::cuda
