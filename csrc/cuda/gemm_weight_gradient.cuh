// The weight's gradient as one matrix product, device side. See core/gemm_weight_gradient.h. A block sums, for some
// input channels and slots, a share of all positions: one warp copies boxes of both tensors, two warpgroups multiply.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/prefetch_map.cuh"
#include "gemm_weight_gradient_finish.cuh"

namespace fastconvt::cuda {

// Registers of a thread that multiplies, and of one that copies.
constexpr int kGemmWeightRegisters = 216, kGemmWeightCopierRegisters = 72;

// In shared memory: of every stage, that it is full and that it is empty; of both tables, that nobody reads them.
struct GemmWeightBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (kGemmWeightMaxStages + stage) * 8; }
  __device__ __forceinline__ uint32_t left(int table) const { return address + (2 * kGemmWeightMaxStages + table) * 8; }
};

// A staged box of outputs: its channel, its coordinates for the first tile, in the order of the tile's axes.
struct GemmWeightBox {
  int channel, at[4];
};
// What an item is, where slots stand in a stage, in bytes, and the boxes; in shared memory.
struct GemmWeightTables {
  GemmWeightShare share;
  GemmWeightBox box[2 * kGemmWeightMaxSlots];
  int slot[2 * kGemmWeightMaxSlots], number[2 * kGemmWeightMaxSlots];  // number: of its tap
  // Slots of counted taps, of the first block of channels and of both.
  int counted[2 * kGemmWeightMaxSlots], first_counted, all_counted;
  int boxes;
  GemmWeightOrder order;
};

// A place in the ring of stages.
struct GemmWeightRing {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void step(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// By a warp: a lane has a slot. Slots of one residue and block of channels follow each other and share a box.
__device__ __forceinline__ void fill_tables(const GemmWeightParams& p, int item, GemmWeightTables& tables) {
  static_assert(2 * kGemmWeightMaxSlots <= 32);
#ifdef FASTCONVT_GEMM_WEIGHT
  const GemmWeightShare share(p, item);
  const int lane = threadIdx.x % 32, slot = share.first_slot + lane;
  if (lane == 0) tables.share = share;
  if (lane < 2 * kGemmWeightMaxSlots) tables.slot[lane] = p.inputs_bytes;  // of slots that nobody asks for: any place
  __syncwarp();
  const bool exists = slot < share.end_slot;
  const unsigned all = __ballot_sync(~0u, exists);
  if (!exists) return;
  int place = slot;
  const int channel_block = p.by_taps(place);
  const GemmWeightTap tap = load_tap(p, place);
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
  place = share.first_slot;
  const int block = channel_block - p.by_taps(place);
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

// One thread: tiles [begin, end).
template <int kPlanes>
__device__ __forceinline__ void copy_stages(const GemmWeightParams& p, const GemmWeightTables& tables, int begin,
                                            int end, GemmWeightBarriers barriers, uint32_t stages,
                                            const GemmWeightMaps<kPlanes>& maps, GemmWeightRing& ring) {
  const GemmWeightShare& share = tables.share;
  int tile[4], rest = begin;
  for (int i = 0; i < 4; ++i) {
    const int next = p.by_tiles[i](rest);
    tile[i] = rest, rest = next;
  }
  const int channel = share.group * (p.direct ? p.group_in : p.in_pitch) + share.in_block * (p.rows ? 128 : 64);
  const int bytes = p.inputs_bytes + tables.boxes * p.box_copied;
  for (int index = begin; index < end; ++index) {
#pragma unroll
    for (int pass = 0; pass < kGemmWeightPasses<kPlanes>; ++pass) {
      const CUtensorMap *const inputs = &maps.input[pass == 1], *const grads = &maps.grad[pass == 2];
      mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
      const uint32_t full = barriers.full(ring.stage), to = stages + ring.stage * p.stage_bytes;
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
      ring.step(p.stages);
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
__device__ __noinline__ void sum_stages(const GemmWeightParams& p, const GemmWeightTables& tables,
                                        GemmWeightBarriers barriers, uint32_t stages, GemmWeightRing& ring) {
  mbarrier_wait(barriers.full(ring.stage), ring.parity);  // tables are ready, too
  const GemmWeightShare share = tables.share;
  constexpr int kTiles = kColumnTiles / 2, kSteps = kGemmWeightPositions / 16, kOwn = kTiles == 4 ? 2 : 1;
  constexpr uint32_t kSwizzle = (kColumnTiles - 1) * 16;
  const int warp = (threadIdx.x - kGemmWeightMultipliers) / 32 - 1, lane = threadIdx.x % 32;
  uint32_t row[kSteps];  // of a lane's position and channels, in bytes
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    row[k] = (p.step_at[k] + lane / 16 * p.group_pitch) * 16 + (lane % 8 * kColumnTiles + lane / 8 % 2) * 16;
  }
  float sum[kGemmWeightBiasBlocks][kOwn][4] = {};
  int turn = 0;
#pragma unroll 1
  for (int index = share.begin; index < share.end; ++index) {
    mbarrier_wait(barriers.full(ring.stage), ring.parity);
    const bool own = index % p.bias_blocks == share.in_block;
#pragma unroll
    for (int block = 0; block < kGemmWeightBiasBlocks && own; ++block) {
      const int end = block == 0 ? tables.first_counted : tables.all_counted;
#pragma unroll 1
      for (int slot = block == 0 ? 0 : tables.first_counted; slot < end; ++slot) {
        const uint32_t from = stages + ring.stage * p.stage_bytes + tables.counted[slot];
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
    if (lane == 0) mbarrier_arrive(barriers.empty(ring.stage));
    ring.step(p.stages);
  }
  if (p.output != nullptr && p.staged == 0) leave_stages<32 * kGemmWeightBiasWarps>();
  if (share.in_block >= p.bias_blocks) return;
  const int slot_block = share.first_slot / p.slots, groups = p.kinds / p.in_blocks / p.slot_blocks;
  const int64_t part = (share.split * p.bias_blocks + share.in_block) * kGemmWeightBiasWarps + warp;
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
__device__ __forceinline__ void multiply_stages(const GemmWeightParams& p, const CUtensorMap* output,
                                                const GemmWeightTables& tables, GemmWeightBarriers barriers,
                                                uint32_t stages, GemmWeightRing& ring) {
  const int thread = thread_again(), warpgroup = __shfl_sync(~0u, thread / 128, 0);
  const int warp = thread / 32 % 4, lane = thread % 32;
  const int first_slot = p.rows ? 0 : warpgroup * kSlots;
  mbarrier_wait(barriers.full(ring.stage), ring.parity);  // tables are ready, too
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
  const int count = (tables.share.end - tables.share.begin) * kGemmWeightPasses<kPlanes>;
#pragma unroll 1
  for (int index = 0; index < count; ++index) {
    const uint32_t offset = ring.stage * p.stage_bytes;
    mbarrier_wait(barriers.full(ring.stage), ring.parity);
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
    if (lane == 0) mbarrier_arrive(barriers.empty(ring.stage));
    ring.step(p.stages);
  }
  const GemmWeightShare share = tables.share;
  if (kPlanes == 1 && p.boxes_out) {
    finish_boxes<T>(p, output, share, tables.number, stages, first_slot, sum);
  } else if (p.output != nullptr) {
    finish_sums<std::conditional_t<kPlanes == 2, float, T>>(p, share, tables.order, stages, first_slot, sum);
  } else {
    store_partial(p, share, tables.number, first_slot, sum);
  }
}

template <typename T, int kPlanes>
__device__ __forceinline__ void fill_order(const GemmWeightParams& p, int item, GemmWeightTables& tables) {
  if (p.output == nullptr || p.boxes_out) return;
  const GemmWeightShare share(p, item);
  order_slots<std::conditional_t<kPlanes == 2, float, T>>(p, share.first_slot, share.end_slot - share.first_slot,
                                                          (share.end_tile(p) - share.first_tile(p)) * 8, tables.order);
}

// The items of a block: the first one, the second one and so on.
__device__ __forceinline__ int item_of(int number) { return static_cast<int>(blockIdx.x + number * gridDim.x); }

template <typename T, int kColumnTiles, int kSlots, int kPlanes>
__global__ void __launch_bounds__(kGemmWeightThreads, 1)
    gemm_weight_gradient_kernel(const __grid_constant__ GemmWeightParams p,
                                const __grid_constant__ GemmWeightMaps<kPlanes> maps) {
#ifdef FASTCONVT_GEMM_WEIGHT
  extern __shared__ unsigned char unaligned_bytes[];
  const uint32_t base = (shared_address(unaligned_bytes) + 1023) & ~1023u;
  constexpr int kTables = 256;
  static_assert(kTables + 2 * sizeof(GemmWeightTables) <= kGemmWeightHead);
  GemmWeightTables* const tables = static_cast<GemmWeightTables*>(__cvta_shared_to_generic(base + kTables));
  const GemmWeightBarriers barriers{base};
  const uint32_t stages = base + kGemmWeightHead;
  constexpr bool kWalks = kColumnTiles * 8 * kSlots <= kGemmWeightWalkColumns;
  const bool sums_bias = p.bias_partial != nullptr;
  const int readers = kGemmWeightMultipliers / 32 + (sums_bias ? kGemmWeightBiasWarps : 0);
  if (threadIdx.x == kGemmWeightMultipliers) {
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) prefetch_map(&maps.input[i]), prefetch_map(&maps.grad[i]);
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), readers);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(barriers.left(i), readers);
    fence_shared_writes();
  }
  if (threadIdx.x < 32) {
    fill_tables(p, item_of(0), tables[0]);
  } else if (threadIdx.x < 64) {
    fill_order<T, kPlanes>(p, item_of(0), tables[0]);
  }
  __syncthreads();
  if (threadIdx.x < kGemmWeightMultipliers) {
    GemmWeightRing ring;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGemmWeightRegisters));
#pragma unroll 1
    for (int number = 0; item_of(number) < p.items; ++number) {
      multiply_stages<T, kColumnTiles, kSlots, kPlanes>(p, &maps.output, tables[number % 2], barriers, stages, ring);
      if (!kWalks) break;
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.left(number % 2));
    }
    if (p.boxes_out && threadIdx.x % 128 == 0) wait_for_bulk_reads();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGemmWeightCopierRegisters));
    if (threadIdx.x < kGemmWeightMultipliers + 32) {
      if (threadIdx.x == kGemmWeightMultipliers) {
        wait_for_previous_grid();  // for packed tensors
        let_next_grid_begin();     // it may rely on them, too
      }
      // The next item's tables are made once stages are on their way.
      GemmWeightRing ring;
      const bool copies = threadIdx.x == kGemmWeightMultipliers;
#pragma unroll 1
      for (int number = 0; item_of(number) < p.items; ++number) {
        const GemmWeightTables& table = tables[number % 2];
        const int begin = table.share.begin, end = table.share.end, middle = min(end, begin + p.stages);
        const int next = number + 1;
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          const int from = part == 0 ? begin : middle, to = part == 0 ? middle : end;
          if (copies) copy_stages(p, table, from, to, barriers, stages, maps, ring);
          __syncwarp();
          if (!kWalks || part > 0 || item_of(next) >= p.items) continue;
          if (next > 1) mbarrier_wait(barriers.left(next % 2), (next / 2 - 1) % 2);
          fill_tables(p, item_of(next), tables[next % 2]);
          fill_order<T, kPlanes>(p, item_of(next), tables[next % 2]);
          __syncwarp();
        }
      }
    } else if (kPlanes == 1 && sums_bias) {
      GemmWeightRing ring;
#pragma unroll 1
      for (int number = 0; item_of(number) < p.items; ++number) {
        sum_stages<T, kColumnTiles>(p, tables[number % 2], barriers, stages, ring);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.left(number % 2));
      }
    }
    __syncwarp();
    if (p.clustered) meet_cluster();
  }
  if (p.clustered) meet_cluster();  // nobody leaves while others read
#endif
}

}  // namespace fastconvt::cuda
