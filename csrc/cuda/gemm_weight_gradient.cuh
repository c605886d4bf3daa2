// The weight's gradient as one matrix product, device side. See core/gemm_weight_gradient.h. A block sums, for some
// input channels and slots, a share of all positions: one warp copies boxes of both tensors, two warpgroups multiply.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/prefetch_map.cuh"
#include "gemm_weight_gradient_finish.cuh"

namespace fastconvt::cuda {

// Registers of a thread that multiplies, and of one that copies.
constexpr int kGemmWeightRegisters = 216, kGemmWeightCopierRegisters = 72;

// In shared memory: of every stage, that it is full and that it is empty.
struct GemmWeightBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (kGemmWeightMaxStages + stage) * 8; }
};

// A staged box of outputs: its channel, its coordinates for the first tile, in the order of the tile's axes.
struct GemmWeightBox {
  int channel, at[4];
};
// Where slots stand in a stage, in bytes, and the boxes; in shared memory.
struct GemmWeightTables {
  GemmWeightBox box[2 * kGemmWeightMaxSlots];
  int slot[2 * kGemmWeightMaxSlots], number[2 * kGemmWeightMaxSlots];  // number: of its tap
  // Slots of counted taps, of the first block of channels and of both.
  int counted[2 * kGemmWeightMaxSlots], first_counted, all_counted;
  int boxes;
};

// By a warp: a lane has a slot. Slots of one residue and block of channels follow each other and share a box.
__device__ __forceinline__ void fill_tables(const GemmWeightParams& p, const GemmWeightShare& share,
                                            GemmWeightTables& tables) {
  static_assert(2 * kGemmWeightMaxSlots <= 32);
#ifdef FASTCONVT_GEMM_WEIGHT
  const int lane = threadIdx.x % 32, slot = share.first_slot + lane;
  if (lane < 2 * kGemmWeightMaxSlots) tables.slot[lane] = p.inputs_bytes;  // of slots that nobody asks for: any place
  __syncwarp();
  const bool exists = slot < share.end_slot;
  const unsigned all = __ballot_sync(~0u, exists);
  if (!exists) return;
  const int channel_block = slot / p.taps;
  const GemmWeightTap tap = load_tap(p, slot - channel_block * p.taps);
  const int residue = (tap.residue[0] * kGemmWeightMaxStride + tap.residue[1]) * kGemmWeightMaxStride + tap.residue[2];
  const int key = channel_block * kGemmWeightMaxStride * kGemmWeightMaxStride * kGemmWeightMaxStride + residue;
  const unsigned same = __match_any_sync(all, key);
  const bool first = (same & ((1u << lane) - 1)) == 0;
  const int box = __popc(__ballot_sync(all, first) & ((2u << lane) - 1)) - 1;
  int rows = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int a = p.axis_of[i];
    int at = 0;
    if (a > 0) {
      const int shift = tap.shift[a - 1], least = __reduce_min_sync(same, shift);
      rows += (shift - least) * p.pitch[i];
      at = p.stride[i] * least + tap.residue[a - 1] - p.padding[i];
    }
    if (first) tables.box[box].at[i] = at;
  }
  if (first) tables.box[box].channel = share.group * p.out_pitch + channel_block * (p.row_bytes / 2);
  const int at = p.inputs_bytes + box * p.box_bytes + rows * p.row_bytes;
  tables.slot[lane] = at, tables.number[lane] = tap.number;
  const int block = channel_block - share.first_slot / p.taps;
  const unsigned counted = __ballot_sync(all, tap.counted && block < kGemmWeightBiasBlocks);
  const unsigned of_first = __ballot_sync(all, tap.counted && block == 0);
  if (counted >> lane & 1) tables.counted[__popc(counted & ((1u << lane) - 1))] = at;
  if (slot + 1 != share.end_slot) return;
  tables.boxes = box + 1, tables.first_counted = __popc(of_first), tables.all_counted = __popc(counted);
#endif
}

// Products of two planes of either operand, but for that of the second ones.
template <int kPlanes>
constexpr int kGemmWeightPasses = 2 * kPlanes - 1;

// One thread.
template <int kPlanes>
__device__ __forceinline__ void copy_stages(const GemmWeightParams& p, const GemmWeightShare& share,
                                            const GemmWeightTables& tables, GemmWeightBarriers barriers,
                                            uint32_t stages, const GemmWeightMaps<kPlanes>& maps) {
  int tile[4], rest = share.begin;
  for (int i = 0; i < 4; ++i) {
    tile[i] = rest % p.tiles[i];
    rest /= p.tiles[i];
  }
  const int channel = share.group * (p.direct ? p.group_in : p.in_pitch) + share.in_block * (p.rows ? 128 : 64);
  const int bytes = p.inputs_bytes + tables.boxes * p.box_copied;
  wait_for_previous_grid();  // for packed tensors
  let_next_grid_begin();     // it may rely on them, too
  int stage = 0, parity = 1;
  for (int index = share.begin; index < share.end; ++index) {
#pragma unroll
    for (int pass = 0; pass < kGemmWeightPasses<kPlanes>; ++pass) {
      const CUtensorMap *const inputs = &maps.input[pass == 1], *const grads = &maps.grad[pass == 2];
      mbarrier_wait(barriers.empty(stage), parity);
      const uint32_t full = barriers.full(stage), to = stages + stage * p.stage_bytes;
      mbarrier_arrive_expecting(full, bytes);
      int at[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) at[i] = tile[i] * p.box[i];
      for (int half = 0; half < (p.rows ? 2 : 1); ++half) {
        const int first = channel + half * 64;
        const int from[5] = {p.direct ? at[0] : first, p.direct ? at[1] : at[0], p.direct ? at[2] : at[1],
                             p.direct ? first : at[2], at[3]};
        load_box(to + half * kGemmWeightPositions * 128, inputs, from, full);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) at[i] *= p.stride[i];
      for (int b = 0; b < tables.boxes; ++b) {
        const GemmWeightBox& box = tables.box[b];
        const int from[5] = {box.channel, at[0] + box.at[0], at[1] + box.at[1], at[2] + box.at[2], at[3] + box.at[3]};
        load_box(to + p.inputs_bytes + b * p.box_bytes, grads, from, full);
      }
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
    for (int i = 0; i < 4; ++i) {
      if (++tile[i] < p.tiles[i]) break;
      tile[i] = 0;
    }
  }
}

// Adds what is staged for counted taps, for the bias's gradient: three warps, which the copying one leaves over, by
// products with ones. A warp has sixteen channels of a slot, a fourth sixteen in turn with the others; of up to two
// blocks of channels. Blocks that differ in input channels share the tiles.
template <typename T, int kColumnTiles>
__device__ __noinline__ void sum_stages(const GemmWeightParams& p, const GemmWeightShare& share,
                                        const GemmWeightTables& tables, GemmWeightBarriers barriers, uint32_t stages) {
  constexpr int kTiles = kColumnTiles / 2, kSteps = kGemmWeightPositions / 16, kOwn = kTiles == 4 ? 2 : 1;
  constexpr uint32_t kSwizzle = (kColumnTiles - 1) * 16;
  const int warp = (threadIdx.x - kGemmWeightMultipliers) / 32 - 1, lane = threadIdx.x % 32;
  uint32_t row[kSteps];  // of a lane's position and channels, in bytes
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    row[k] = (p.step_at[k] + lane / 16 * p.group_pitch) * 16 + (lane % 8 * kColumnTiles + lane / 8 % 2) * 16;
  }
  float sum[kGemmWeightBiasBlocks][kOwn][4] = {};
  int stage = 0, parity = 0, turn = 0;
#pragma unroll 1
  for (int index = share.begin; index < share.end; ++index) {
    mbarrier_wait(barriers.full(stage), parity);
    const bool own = index % p.in_blocks == share.in_block;
#pragma unroll
    for (int block = 0; block < kGemmWeightBiasBlocks && own; ++block) {
      const int end = block == 0 ? tables.first_counted : tables.all_counted;
#pragma unroll 1
      for (int slot = block == 0 ? 0 : tables.first_counted; slot < end; ++slot) {
        const uint32_t from = stages + stage * p.stage_bytes + tables.counted[slot];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const int tile = i == 0 ? warp : 3;
          if (i == 0 ? tile >= kTiles : turn != warp) continue;
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            const uint32_t at = from + row[k] + tile * 32;
            uint32_t a[4];
            load_four_transposed(a, at ^ (at >> 3 & kSwizzle));
            add_positions<T>(sum[block][i], a);
          }
        }
      }
    }
    if (own && ++turn == kGemmWeightBiasWarps) turn = 0;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.empty(stage));
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
  if (p.output != nullptr) leave_stages<32 * kGemmWeightBiasWarps>();
  const int slot_block = share.first_slot / p.slots, groups = p.kinds / p.in_blocks / p.slot_blocks;
  const int64_t part = (share.split * p.in_blocks + share.in_block) * kGemmWeightBiasWarps + warp;
  float* to = p.bias_partial +
              ((part * groups + share.group) * p.slot_blocks + slot_block) * (kGemmWeightBiasBlocks * kColumnTiles * 8);
  if (lane % 4 > 0) return;  // all columns of the product are the same
#pragma unroll
  for (int block = 0; block < kGemmWeightBiasBlocks; ++block, to += kColumnTiles * 8) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float (&d)[4] = sum[block][tile == 3 ? kOwn - 1 : 0];
      const bool has = tile == 3 || tile == warp;
      to[tile * 16 + lane / 4] = has ? d[0] : 0, to[tile * 16 + 8 + lane / 4] = has ? d[2] : 0;
    }
  }
}

template <typename T, int kColumnTiles, int kSlots, int kPlanes>
__device__ __forceinline__ void multiply_stages(const GemmWeightParams& p, const GemmWeightShare& share,
                                                const GemmWeightTables& tables, const GemmWeightOrder& order,
                                                GemmWeightBarriers barriers, uint32_t stages) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first_slot = p.rows ? 0 : warpgroup * kSlots;
  uint32_t slot[kSlots], steps[4];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) slot[i] = (stages + tables.slot[first_slot + i]) >> 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) steps[j] = p.step_at[j];
  const uint32_t form = positions_form(p.swizzle, p.group_pitch);
  uint32_t inputs[4];  // what a lane loads of every 16 positions
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (p.direct) {  // eight positions of a channel
      const int at = (warp * 16 + lane % 16) * p.channel_bytes + p.input_at[j] + lane / 16 * 16;
      inputs[j] = stages + (at ^ (at >> 3 & p.input_swizzle));
    } else {  // eight channels of a position
      const int position = j * 16 + lane % 8 + lane / 16 * 8, vector = warp * 2 + lane / 8 % 2;
      inputs[j] = stages + position * 128 + (vector ^ position % 8) * 16;
    }
    if (p.rows) inputs[j] += warpgroup * kGemmWeightPositions * 128;
  }
  float sum[kSlots][kColumnTiles][4] = {};
  int stage = 0, parity = 0;
  const int count = (share.end - share.begin) * kGemmWeightPasses<kPlanes>;
#pragma unroll 1
  for (int index = 0; index < count; ++index) {
    const uint32_t offset = stage * p.stage_bytes;
    mbarrier_wait(barriers.full(stage), parity);
    uint32_t a[4][4];
    if (p.direct) {
#pragma unroll
      for (int j = 0; j < 4; ++j) load_four(a[j], inputs[j] + offset);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) load_four_transposed(a[j], inputs[j] + offset);
    }
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        start_positions<T>(sum[i], a[j], positions_operand(form, slot[i] + (offset >> 4) + steps[j]));
      }
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.empty(stage));
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
  if (p.output != nullptr) {
    finish_sums<std::conditional_t<kPlanes == 2, float, T>>(p, share, order, stages, first_slot, sum);
  } else {
    store_partial(p, share, tables.number, first_slot, sum);
  }
}

template <typename T, int kColumnTiles, int kSlots, int kPlanes>
__global__ void __launch_bounds__(kGemmWeightThreads, 1)
    gemm_weight_gradient_kernel(const __grid_constant__ GemmWeightParams p,
                                const __grid_constant__ GemmWeightMaps<kPlanes> maps) {
#ifdef FASTCONVT_GEMM_WEIGHT
  extern __shared__ unsigned char unaligned_bytes[];
  __shared__ GemmWeightTables tables;
  __shared__ GemmWeightOrder order;
  const uint32_t base = (shared_address(unaligned_bytes) + 1023) & ~1023u;
  const GemmWeightBarriers barriers{base};
  const uint32_t stages = base + kGemmWeightHead;
  const GemmWeightShare share(p);
  const bool sums_bias = p.bias_partial != nullptr;
  if (threadIdx.x == kGemmWeightMultipliers) {
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) prefetch_map(&maps.input[i]), prefetch_map(&maps.grad[i]);
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), kGemmWeightMultipliers / 32 + (sums_bias ? kGemmWeightBiasWarps : 0));
    }
    fence_shared_writes();
  }
  if (threadIdx.x < 32) {
    fill_tables(p, share, tables);
  } else if (threadIdx.x < 64 && p.output != nullptr) {
    order_slots<std::conditional_t<kPlanes == 2, float, T>>(p, share.first_slot, share.end_slot - share.first_slot,
                                                            (share.end_tile(p) - share.first_tile(p)) * 8, order);
  }
  __syncthreads();
  if (threadIdx.x < kGemmWeightMultipliers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGemmWeightRegisters));
    multiply_stages<T, kColumnTiles, kSlots, kPlanes>(p, share, tables, order, barriers, stages);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGemmWeightCopierRegisters));
    if (threadIdx.x == kGemmWeightMultipliers) {
      copy_stages(p, share, tables, barriers, stages, maps);
    } else if (kPlanes == 1 && sums_bias && threadIdx.x >= kGemmWeightMultipliers + 32) {
      sum_stages<T, kColumnTiles>(p, share, tables, barriers, stages);
    }
    __syncwarp();
    if (p.clustered) meet_cluster();
  }
  if (p.clustered) meet_cluster();  // nobody leaves while others read
#endif
}

}  // namespace fastconvt::cuda
