// The half of a phase GEMM's block that copies: chunks of inputs, cell by cell, and stages of weights, in bulk.
#pragma once

#include "phase_gemm_barrier.cuh"
#include "phase_gemm_stage.cuh"

namespace fastconvt::cuda {

// Copies 16 bytes, or zeros where `exists` is false.
__device__ __forceinline__ void copy_granule(uint32_t target, const void* source, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
               : "memory");
#endif
}

// Starts the copies of a chunk. Lanes run along the granules of an input first.
__device__ __forceinline__ void copy_inputs(const PhaseGemmParams& p, const PhaseGemmItem& item, int chunk, int thread,
                                            const int* table, uint32_t target) {
  constexpr int kBatch = 4;
  const int log2 = p.granules_log2, granule = thread & ((1 << log2) - 1);
  const int per_turn = kPhaseGemmThreads >> log2, row = thread >> log2;
  const char* const source = static_cast<const char*>(p.source);
  const int first = (chunk << log2) + granule;
  const bool channels = first < p.group_granules;
  const char* const base =
      source + (item.first[0] * p.image_granules + static_cast<int64_t>(item.group) * p.group_granules + first) * 16;
  target += row * p.pitch + granule * 16;
  const int step = per_turn * p.pitch;
  for (int i = row; i < p.inputs; i += kBatch * per_turn) {
    int offset[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) offset[k] = i + k * per_turn < p.inputs ? table[i + k * per_turn] : -2;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const bool exists = channels && offset[k] >= 0;
      if (offset[k] != -2) copy_granule(target, exists ? base + static_cast<int64_t>(offset[k]) * 16 : source, exists);
      target += step;
    }
  }
}

// Copies what all items of the block need, stage by stage, each as soon as its place is free.
template <int kColumns>
__device__ __forceinline__ void copy_stages(const PhaseGemmParams& p, int thread, int* table, uint32_t shared) {
  const PhaseGemmBarriers barriers{shared + p.barriers_at, p.stages};
  wait_for_previous_grid();  // for the packed tensors
  PhaseGemmRing ring;
  PhaseGemmCursor at;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const PhaseGemmItem item = find_item(p, index);
    meet<2>();  // everyone has done with the table before
    fill_inputs(p, item, thread, table);
    meet<2>();
    const int unit_bytes = kColumns << (p.granules_log2 + 4);
    const char* weights = static_cast<const char*>(p.packed_weight) + item.unit * unit_bytes;
    for (at.begin(p, item); at.pass < p.passes; at.advance(p, item), ring.advance(p.stages)) {
      const uint32_t full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      const int bytes = at.count(p) * unit_bytes;
      if (thread == 0) {
        mbarrier_arrive_expecting(full, bytes);
        bulk_load(shared + p.weights_at + ring.place * p.stage_bytes, weights, bytes, full);
      }
      weights += bytes;
      if (at.tap == 0 && at.loading) {
        mbarrier_wait(barriers.free(at.loads.place), at.loads.parity ^ 1);
        copy_inputs(p, item, at.chunk, thread, table, shared + p.inputs_at + at.loads.place * p.buffer_bytes);
      }
      mbarrier_arrive_after_copies(full);
    }
  }
}

}  // namespace fastconvt::cuda
