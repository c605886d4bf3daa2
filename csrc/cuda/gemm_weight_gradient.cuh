// The weight's gradient as one matrix product, device side. See core/gemm_weight_gradient.h. A block sums, for some
// input channels and slots, a share of all positions: one warp copies boxes of both tensors, two warpgroups multiply.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/shared_address.cuh"
#include "gemm_weight_gradient_product.cuh"

namespace fastconvt::cuda {

constexpr int kGemmWeightMultipliers = 256, kGemmWeightThreads = kGemmWeightMultipliers + 128;
constexpr int kGemmWeightBiasWarps = 3;
// Registers of a thread that multiplies, and of one that copies.
constexpr int kGemmWeightRegisters = 224, kGemmWeightCopierRegisters = 56;

// In shared memory: of every stage, that it is full and that it is empty.
struct GemmWeightBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (kGemmWeightMaxStages + stage) * 8; }
};

// What a block sums, and of which positions.
struct GemmWeightShare {
  int group, in_block, first_slot, end_slot;
  int split, begin, end;  // tiles

  __device__ explicit GemmWeightShare(const GemmWeightParams& p) {
    split = static_cast<int>(blockIdx.x) / p.kinds;
    int kind = static_cast<int>(blockIdx.x) - split * p.kinds;
    const int slot_block = kind % p.slot_blocks;
    kind /= p.slot_blocks;
    in_block = kind % p.in_blocks;
    group = kind / p.in_blocks;
    first_slot = slot_block * p.slots;
    end_slot = min(first_slot + p.slots, p.all_slots);
    begin = static_cast<int>(static_cast<int64_t>(p.all_tiles) * split / p.splits);
    end = static_cast<int>(static_cast<int64_t>(p.all_tiles) * (split + 1) / p.splits);
  }
};

// A staged box of outputs: its channel, its coordinates for the first tile, in the order of the tile's axes.
struct GemmWeightBox {
  int channel, at[4];
};
// Where slots stand in a stage, in bytes, and the boxes; in shared memory.
struct GemmWeightTables {
  GemmWeightBox box[2 * kGemmWeightMaxSlots];
  int slot[2 * kGemmWeightMaxSlots];
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
  const GemmWeightTap& tap = p.tap[slot - channel_block * p.taps];
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
  tables.slot[lane] = p.inputs_bytes + box * p.box_bytes + rows * p.row_bytes;
  if (slot + 1 == share.end_slot) tables.boxes = box + 1;
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

// Two numbers of 16 bits in a word.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

// Adds what is staged for counted taps, for the bias's gradient: three warps, which the copying one leaves over. A lane
// has eight channels of some positions, of up to two blocks of channels.
template <typename T, int kColumnTiles>
__device__ __forceinline__ void sum_stages(const GemmWeightParams& p, const GemmWeightShare& share,
                                           const GemmWeightTables& tables, GemmWeightBarriers barriers,
                                           uint32_t stages) {
  constexpr int kVectors = kColumnTiles, kLanes = 32 * kGemmWeightBiasWarps;
  constexpr uint32_t kSwizzle = (kVectors - 1) * 16;
  const int thread = threadIdx.x - kGemmWeightMultipliers - 32, lane = thread % 32, vector = thread % kVectors;
  float sum[kGemmWeightBiasBlocks][8] = {};
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int index = share.begin; index < share.end; ++index) {
    mbarrier_wait(barriers.full(stage), parity);
#pragma unroll
    for (int block = 0; block < kGemmWeightBiasBlocks; ++block) {
      const int first = max(share.first_slot, (share.first_slot / p.taps + block) * p.taps);
      const int end = min(share.end_slot, (share.first_slot / p.taps + block + 1) * p.taps);
      for (int slot = first; slot < end; ++slot) {
        if (!p.tap[slot % p.taps].counted) continue;
        const uint32_t from = stages + stage * p.stage_bytes + tables.slot[slot - share.first_slot] + vector * 16;
#pragma unroll 2
        for (int k = thread / kVectors; k < kGemmWeightPositions; k += kLanes / kVectors) {
          const int row = (p.step_at[k / 16] + k / 8 % 2 * p.group_pitch) * 16 + k % 8 * kVectors * 16;
          const uint32_t at = from + row;
          uint32_t w[4];
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                       : "r"(at ^ (at >> 3 & kSwizzle))
                       : "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 both = unpack<T>(w[i]);
            sum[block][2 * i] += both.x, sum[block][2 * i + 1] += both.y;
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.empty(stage));
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
  const int slot_block = share.first_slot / p.slots;
  float* to = p.bias_partial + vector * 8 +
              (((static_cast<int64_t>(share.split) * kGemmWeightBiasWarps + thread / 32) *
                    (p.kinds / p.in_blocks / p.slot_blocks) +
                share.group) *
                   p.slot_blocks +
               slot_block) *
                  kGemmWeightBiasBlocks * kVectors * 8;
#pragma unroll
  for (int block = 0; block < kGemmWeightBiasBlocks; ++block, to += kVectors * 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = sum[block][i];
#pragma unroll
      for (int apart = kVectors; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
      if (lane < kVectors) to[i] = x;
    }
  }
}

template <typename T, int kColumnTiles, int kSlots, int kPlanes>
__device__ __forceinline__ void multiply_stages(const GemmWeightParams& p, const GemmWeightShare& share,
                                                const GemmWeightTables& tables, GemmWeightBarriers barriers,
                                                uint32_t stages) {
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
  const int row = share.in_block * (p.rows ? 128 : 64) + (p.rows ? warpgroup * 64 : 0) + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int number = share.first_slot + first_slot + i;
    if (number >= share.end_slot) continue;
    const int channel_block = number / p.taps, tap = p.tap[number - channel_block * p.taps].number;
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

template <typename T, int kColumnTiles, int kSlots, int kPlanes>
__global__ void __launch_bounds__(kGemmWeightThreads, 1)
    gemm_weight_gradient_kernel(const __grid_constant__ GemmWeightParams p,
                                const __grid_constant__ GemmWeightMaps<kPlanes> maps) {
#ifdef FASTCONVT_GEMM_WEIGHT
  let_next_grid_begin();
  extern __shared__ unsigned char unaligned_bytes[];
  __shared__ GemmWeightTables tables;
  const uint32_t base = (shared_address(unaligned_bytes) + 1023) & ~1023u;
  const GemmWeightBarriers barriers{base};
  const uint32_t stages = base + kGemmWeightHead;
  const GemmWeightShare share(p);
  const bool sums_bias = p.bias_partial != nullptr && share.in_block == 0;
  if (threadIdx.x == kGemmWeightMultipliers) {
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), kGemmWeightMultipliers / 32 + (sums_bias ? kGemmWeightBiasWarps : 0));
    }
    fence_shared_writes();
  }
  if (threadIdx.x < 32) fill_tables(p, share, tables);
  __syncthreads();
  if (threadIdx.x < kGemmWeightMultipliers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGemmWeightRegisters));
    multiply_stages<T, kColumnTiles, kSlots, kPlanes>(p, share, tables, barriers, stages);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGemmWeightCopierRegisters));
    if (threadIdx.x == kGemmWeightMultipliers) {
      copy_stages(p, share, tables, barriers, stages, maps);
    } else if (sums_bias && threadIdx.x >= kGemmWeightMultipliers + 32) {
      sum_stages<T, kColumnTiles>(p, share, tables, barriers, stages);
    }
  }
#endif
}

}  // namespace fastconvt::cuda
