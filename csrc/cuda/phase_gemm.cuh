// The phase GEMM, device side. See core/phase_gemm.h. Blocks are persistent: one half copies what all its items need,
// the other multiplies and stores.
#pragma once

#include "phase_gemm_copy.cuh"
#include "phase_gemm_store.cuh"
#include "phase_gemm_wgmma.cuh"

namespace fastconvt::cuda {

// Registers of a thread that multiplies, and of one that copies, where kBlocks share a multiprocessor.
template <int kBlocks>
constexpr int kMultiplierRegisters = kBlocks == 2   ? 208
                                     : kBlocks == 3 ? 120
                                                    : 88;
constexpr int kCopierRegisters = 40;

template <int kCount>
__device__ __forceinline__ void take_registers() {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// The steps of a stage: 32 bytes of channels of one tap each. `shift` is what a step adds to the address of a cell.
struct PhaseGemmSteps {
  const int* taps;
  int log2;  // of the steps of a tap: 0 or 1
  int count;
  uint32_t weights;
  int weight_step;  // from one step to the next, in bytes, if log2 == 1; else from one tap to the next
  __device__ __forceinline__ int shift(int step) const {
    return taps[min(step, count - 1) >> log2] + (step & ((1 << log2) - 1)) * 32;
  }
};

// Adds what a stage holds to the sums, float32 by three products: `cell` are the addresses of a lane's cells.
template <typename T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_three(float (&sum)[kRowTiles][kColumnTiles][4], const uint32_t (&cell)[kRowTiles],
                                          const PhaseGemmSteps& steps) {
  const int lane = threadIdx.x % 32;
  uint32_t columns = steps.weights + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * kColumnTiles * 128;
  int shift = steps.shift(0);
  for (int step = 0; step < steps.count; ++step) {
    PhaseGemmOperands<kRowTiles, kColumnTiles> o;
    load_operands(o, cell, shift, columns);
    shift = steps.shift(step + 1);
    columns += steps.weight_step;
    multiply_operands<T, true>(sum, o);
  }
}

template <typename T, int kRowTiles>
__device__ __forceinline__ void load_cells(uint32_t (&a)[kRowTiles][4], const uint32_t (&cell)[kRowTiles], int shift) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    load_four(a[i], cell[i] + shift);
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int q = 0; q < 4; ++q) a[i][q] = rounded_tf32(a[i][q]);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) asm volatile("" : "+r"(a[i][q]));  // not after wgmma_fence()
  }
}

// The same on asynchronous products. The cells of a step are loaded while the products of the one before run; those of
// the last step are in flight on return, and `release` is called when those of the stage before have ended.
template <typename T, int kRowTiles, int kColumnTiles, class Release>
__device__ __forceinline__ void add_stage(float (&sum)[kRowTiles][kColumnTiles][4], const uint32_t (&cell)[kRowTiles],
                                          const PhaseGemmSteps& steps, uint32_t (&even)[kRowTiles][4],
                                          uint32_t (&odd)[kRowTiles][4], Release&& release) {
  uint64_t columns = column_operand(steps.weights, kColumnTiles * 128);
  const auto start = [&](const uint32_t (&a)[kRowTiles][4]) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) start_product<T>(sum[i], a[i], columns);
    wgmma_commit();
    columns += steps.weight_step >> 4;
  };
  load_cells<T>(even, cell, steps.shift(0));
  int next = steps.shift(1);
#pragma unroll 1
  for (int step = 0; step < steps.count; step += 2) {
    start(even);
    wgmma_wait<1>();
    release(step == 0);
    if (step + 1 == steps.count) {
      wgmma_wait<0>();
      break;
    }
    load_cells<T>(odd, cell, next);
    next = steps.shift(step + 2);
    start(odd);
    wgmma_wait<1>();
    if (step + 2 < steps.count) load_cells<T>(even, cell, next);
    next = steps.shift(step + 3);
  }
}

// Makes and stores all items of the block.
template <typename T, bool kThree, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_items(const PhaseGemmParams& p, unsigned char* shared_bytes, int* not_finite) {
  constexpr int kColumns = kColumnTiles * 8;
  const uint32_t shared = shared_address(shared_bytes);
  const PhaseGemmBarriers barriers{shared + p.barriers_at, p.stages};
  int64_t* const row_table = reinterpret_cast<int64_t*>(shared_bytes + p.rows_at);
  int* const tap_table = reinterpret_cast<int*>(shared_bytes + p.taps_at);
  unsigned char* const staging = shared_bytes + p.staging_at;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = p.contiguous ? p.cells / p.axis[2].box.divisor : p.cells;
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  uint32_t cell_offset[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) cell_offset[i] = shared + p.inputs_at + cell_address(p, i * 64 + warp * 16);
  PhaseGemmRing ring;
  PhaseGemmCursor at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const PhaseGemmItem item = find_item(p, index);
    meet<1>();  // everyone has stored the item before
    fill_rows(p, item, rows, row_table);
    fill_taps(p, item, tap_table);
    if (p.direct) fill_terms<kColumns>(p, item, epilogue, reinterpret_cast<float*>(staging));
    if (threadIdx.x == 0) *not_finite = 0;
    meet<1>();
    at.begin(p, item);
    if (!p.contiguous && at.pass == p.passes) {  // the item's phase has no tap
      store_constants<T, kColumns>(p, item, rows, row_table, epilogue);
      continue;
    }
    bool finite = true;
#pragma unroll 1
    for (int pass = 0; pass < p.passes; ++pass) {
      float sum[kRowTiles][kColumnTiles][4] = {};
      uint32_t even[kRowTiles][4], odd[kRowTiles][4];
      uint32_t done[2] = {};  // barriers of the stage before
      const auto release = [&](bool first) {
        if (!first || lane != 0) return;
        if (done[0] != 0) mbarrier_arrive(done[0]);
        if (done[1] != 0) mbarrier_arrive(done[1]);
      };
#pragma unroll 1
      for (; at.pass == pass; at.advance(p, item), ring.advance(p.stages)) {
        uint32_t cell[kRowTiles];
        const int buffer = at.buffer(p);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) cell[i] = cell_offset[i] + buffer * p.buffer_bytes;
        const int log2 = (at.chunk + 1 == p.chunks ? p.last_steps : p.steps) - 1;
        const PhaseGemmSteps steps{tap_table + at.entry + at.tap, log2, at.count(p) << log2,
                                   shared + p.weights_at + ring.place * p.stage_bytes,
                                   kColumns * 32 * (log2 == 0 ? p.steps : 1)};
        mbarrier_wait(barriers.full(ring.place), ring.parity);
        if constexpr (kThree) {
          add_three<T>(sum, cell, steps);
        } else {
          add_stage<T>(sum, cell, steps, even, odd, release);
        }
        done[0] = barriers.empty(ring.place);
        done[1] = at.is_last_use(p) ? barriers.free(buffer) : 0;
        if constexpr (kThree) release(true);
      }
      if constexpr (!kThree) {
        wgmma_wait<0>();
        release(true);
      }
      if (p.direct) {
        finite = store_sums<T>(p, item, sum, epilogue, row_table, reinterpret_cast<const float*>(staging));
      } else {
        finite = stage_sums<T>(p, item, pass, sum, epilogue, warp * 16 + lane / 4, 64, staging) && finite;
      }
    }
    if (!finite) *not_finite = 1;
    meet<1>();
    if (*not_finite) {
      repair_outputs<T, kColumns>(p, item, rows, row_table, staging);
      meet<1>();
    }
    if (!p.direct) store_tile<T, kColumns>(p, item, rows, row_table, staging);
  }
}

template <typename T, bool kThree, int kRowTiles, int kColumnTiles, int kBlocks>
__global__ void __launch_bounds__(2 * kPhaseGemmThreads, kBlocks)
    phase_gemm_kernel(const __grid_constant__ PhaseGemmParams p) {
#ifdef FASTCONVT_PHASE_GEMM
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ int not_finite;
  if (threadIdx.x == 0) {
    const PhaseGemmBarriers barriers{shared_address(shared_bytes) + p.barriers_at, p.stages};
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), kPhaseGemmThreads + 1);
      mbarrier_init(barriers.empty(i), kPhaseGemmWarps);
    }
    for (int i = 0; i < p.buffers; ++i) mbarrier_init(barriers.free(i), kPhaseGemmWarps);
    fence_shared_writes();
  }
  __syncthreads();
  if (threadIdx.x < kPhaseGemmThreads) {
    take_registers<kMultiplierRegisters<kBlocks>>();
    multiply_items<T, kThree, kRowTiles, kColumnTiles>(p, shared_bytes, &not_finite);
  } else {
    give_registers<kCopierRegisters>();
    copy_stages<kColumnTiles * 8>(p, threadIdx.x - kPhaseGemmThreads, reinterpret_cast<int*>(shared_bytes),
                                  shared_address(shared_bytes));
  }
#endif
}

}  // namespace fastconvt::cuda
