// What becomes of a block's sums: partial ones for the reduction; or, where a block or a cluster sums all positions,
// the weight's gradient.
#pragma once

#include "device/cluster.cuh"
#include "gemm_weight_gradient_product.cuh"
#include "gemm_weight_gradient_store.cuh"

namespace fastconvt::cuda {

constexpr int kGemmWeightMultipliers = 256, kGemmWeightThreads = kGemmWeightMultipliers + 128;

// What a block sums, and of which positions.
struct GemmWeightShare {
  int group, in_block, first_slot, end_slot;
  int split, begin, end;  // tiles

  GemmWeightShare() = default;
  __device__ GemmWeightShare(const GemmWeightParams& p, int item) {
    int rest = item, kind = p.by_splits(rest);
    split = p.clustered ? rest : kind;
    if (!p.clustered) kind = rest;
    const int both = p.by_slot_blocks(kind), slot_block = kind;
    in_block = both;
    group = p.by_in_blocks(in_block);
    first_slot = slot_block * p.slots;
    end_slot = min(first_slot + p.slots, p.all_slots);
    begin = split * p.share + min(split, p.more);
    end = begin + p.share + (split < p.more);
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
// Those of a warpgroup likewise.
__device__ __forceinline__ bool meet_warpgroup(int warpgroup, bool says) {
  int result = 0;
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %1, 0;\nbarrier.cta.red.or.pred any, %2, 128, mine;\n"
      "selp.b32 %0, 1, 0, any;\n}"
      : "=r"(result)
      : "r"(static_cast<int>(says)), "r"(3 + warpgroup)
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
  const int thread = thread_again(), warp = thread / 32;
  return (p.rows ? warp : warp % 4) * 16 + thread % 32 / 4;
}

// The first of the columns of a thread's sums, in a column tile.
__device__ __forceinline__ int column_of_thread() { return thread_again() % 4 * 2; }

// Partial sums as the reduction reads them.
template <int kColumnTiles, int kSlots>
__device__ __forceinline__ void store_partial(const GemmWeightParams& p, const GemmWeightShare& share,
                                              const int* numbers, int first_slot,
                                              const float (&sum)[kSlots][kColumnTiles][4]) {
  const int lane = thread_again() % 32;
  const int row = share.in_block * (p.rows ? 128 : 64) + row_of_thread(p);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int number = share.first_slot + first_slot + i;
    if (number >= share.end_slot) continue;
    int rest = number;
    const int channel_block = p.by_taps(rest), tap = numbers[first_slot + i];
    const int column = channel_block * kColumnTiles * 8 + lane % 4 * 2;
    // Halves that are apart are whole tiles of 16 rows.
    const int all_rows = share.group * p.group_in + row;
    float* const to = p.partial + share.split * p.step + (all_rows >= p.far_row ? p.further : 0) +
                      (static_cast<int64_t>(all_rows) * p.taps + tap) * p.weight_pitch + column;
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

// Stages a column tile of a slot, the thread's column `column` channels from the first one staged.
template <typename T>
__device__ __forceinline__ void stage_sums(const GemmWeightStaged& staged, const GemmWeightOrder& order, int row,
                                           int slot, int column, const float (&d)[4], float& probe) {
  const int step = order.step[slot];
  const uint32_t to = staged.base + row * staged.pitch + order.at[slot] + column * step;
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
  const uint32_t own = stages + thread_again() * 16;
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) store_four(own + (i * kColumnTiles + n) * kTile, sum[i][n]);
  meet_cluster();
  const int width = end - begin, count = kSlots * width, row = row_of_thread(p), column = column_of_thread();
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
      stage_sums<T>(staged, order, row, first_slot + i, column + (number - i * width) * 8, total[q], probe);
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
      stages + p.staged + (p.clustered ? kSlots * kColumnTiles * kGemmWeightMultipliers * 16 : 0),
      p.slots * (end - begin) * 8 * static_cast<int>(sizeof(T)) + (p.channels_last ? kGemmWeightSkew : 4),
      share.group,
      share.in_block * rows,
      min(rows, p.group_in - share.in_block * rows),
      share.first_slot,
      share.end_slot - share.first_slot,
      width,
      begin * 8,
      (end - begin) * 8};
  if (p.bias_partial != nullptr && p.staged == 0) wait_for_stages<32 * kGemmWeightBiasWarps>();
  meet_multipliers(false);
  float probe = 0;
  if (p.clustered) {
    stage_shared_sums<T>(p, staged, order, stages, first_slot, begin, end, sum, probe);
  } else {
    const int row = row_of_thread(p), column = column_of_thread();
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (first_slot + i >= staged.slots) continue;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        stage_sums<T>(staged, order, row, first_slot + i, column + n * 8, sum[i][n], probe);
      }
    }
  }
  if (meet_multipliers(probe != 0)) {
    repair_weight<T>(p, staged, order);
    meet_multipliers(false);
  }
  store_weight<T>(p, staged, order);
}

// Makes what is not finite again, of a warpgroup's boxes.
template <typename T, int kColumnTiles>
__device__ __noinline__ void repair_boxes(const GemmWeightParams& p, const GemmWeightShare& share, uint32_t boxes,
                                          int first_row, int first_slot, int end_slot) {
  constexpr int kWidth = kColumnTiles * 8, kBox = 64 * kWidth;
  constexpr uint32_t kSwizzle = (kColumnTiles - 1) * 16;
  for (int i = threadIdx.x % 128; i < (end_slot - first_slot) * kBox; i += 128) {
    const int slot = first_slot + i / kBox, row = first_row + i % kBox / kWidth;
    const int channel = slot / p.taps * kWidth + i % kWidth;
    if (row >= p.group_in || channel >= p.group_out) continue;
    const uint32_t at = i * 2;  // boxes are aligned as the pattern is
    T* const value = static_cast<T*>(__cvta_shared_to_generic(boxes + (at ^ (at >> 3 & kSwizzle))));
    if (is_finite(to_accumulator(*value))) continue;
    const int tap = p.tap[slot % p.taps].number;
    *value =
        from_accumulator<T>(gemm_weight_gradient_at<T>(p.definition, share.group * p.group_in + row, channel, tap));
  }
}

// The same as finish_sums() where a slot's channels are neighbours in memory: each warpgroup stages a box of 64 rows
// for every slot, and tensor copies store them while the next item is multiplied.
template <typename T, int kColumnTiles, int kSlots>
__device__ __forceinline__ void finish_boxes(const GemmWeightParams& p, const CUtensorMap* map,
                                             const GemmWeightShare& share, const int* numbers, uint32_t stages,
                                             int first_slot, const float (&sum)[kSlots][kColumnTiles][4]) {
  constexpr int kRow = kColumnTiles * 16, kBox = 64 * kRow;
  constexpr uint32_t kSwizzle = (kColumnTiles - 1) * 16;
  const int all = thread_again(), thread = all % 128, warpgroup = all / 128, lane = all % 32;
  const uint32_t boxes = stages + p.staged + warpgroup * (kSlots * kBox);
  const int first_row = p.rows ? share.in_block * 128 + warpgroup * 64 : share.in_block * 64;
  const int first = share.first_slot + first_slot, end = min(first + kSlots, share.end_slot);
  if (p.staged == 0) {
    if (p.bias_partial != nullptr) wait_for_stages<32 * kGemmWeightBiasWarps>();
    meet_multipliers(false);
  } else {
    if (thread == 0) wait_for_bulk_reads();
    meet_warpgroup(warpgroup, false);
  }
  uint32_t probe[4] = {};
  const uint32_t row = (thread / 32 * 16 + lane % 16) * kRow + lane / 16 * 16;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      uint32_t pair[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Pack<T, 2> both{from_accumulator<T>(sum[i][n + k / 2][k % 2 * 2]),
                              from_accumulator<T>(sum[i][n + k / 2][k % 2 * 2 + 1])};
        pair[k] = *reinterpret_cast<const uint32_t*>(&both);
        if (first + i < end) probe_pair<T>(probe[k], pair[k]);
      }
      const uint32_t at = row + n * 16;
      store_matrices(boxes + i * kBox + (at ^ (at >> 3 & kSwizzle)), pair);
    }
  }
  fence_shared_writes();
  if (meet_warpgroup(warpgroup, ((probe[0] | probe[1] | probe[2] | probe[3]) & 0x7fff7fff) != 0)) {
    repair_boxes<T, kColumnTiles>(p, share, boxes, first_row, first, end);
    fence_shared_writes();
    meet_warpgroup(warpgroup, false);
  }
  if (thread != 0) return;
#pragma unroll 1
  for (int i = 0; first + i < end; ++i) {
    const int channel = (first + i) / p.taps * (kColumnTiles * 8);
    store_box(map, boxes + i * kBox, channel, numbers[first_slot + i], first_row, share.group);
  }
  commit_bulk();
}

}  // namespace fastconvt::cuda
