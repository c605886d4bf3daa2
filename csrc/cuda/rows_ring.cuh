// What persistent kernels along rows have in common: phases with taps, and rings of stages in shared memory that pass
// from one role of warps to another (compute capability 9.0).
#pragma once

#include "rows_persistent_async.cuh"

namespace fastconvt::cuda {

// Which phases of an axis have taps. Phase r is number kind_of(r) of them; what the others are, is known.
template <int kKernel, int kStride, int kDilation>
struct TappedPhases {
  static constexpr uint32_t bits() {
    uint32_t phases = 0;
    for (int t = 0; t < kKernel; ++t) phases |= uint32_t{1} << t * kDilation % kStride;
    return phases;
  }
  static constexpr uint32_t kTapped = bits();
  __host__ __device__ static constexpr bool has_taps(int r) { return (kTapped >> r & 1) != 0; }
  __host__ __device__ static constexpr int kind_of(int r) { return __builtin_popcount(kTapped & ((1u << r) - 1)); }
  static constexpr int kKinds = kind_of(kStride);
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Where a role is in a ring.
struct RowsRing {
  int size;
  int at = 0;
  int parity = 0;     // of the times that the place has been in use
  bool fresh = true;  // the place has not been in use

  __device__ explicit RowsRing(int size) : size(size) {}
  __device__ void advance() {
    if (++at == size) at = 0, parity ^= 1, fresh = false;
  }
};

// Whether the barrier's phase of this parity is complete; of a whole warp.
__device__ inline bool is_complete(uint64_t* barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return __all_sync(~0u, done != 0);
}

// A storing warp's way through the stages: one is handed back while copies still read the next.
class RowsReadStages {
  uint64_t* const free;  // the barriers of all stages
  int reading = -1;      // the stage that copies may still read

 public:
  __device__ explicit RowsReadStages(uint64_t* free) : free(free) {}

  // Waits for what is in a stage.
  __device__ void wait_for(uint64_t* staged, int parity) {
    if (reading >= 0 && !is_complete(staged, parity)) finish();
    wait_at(staged, parity);
  }
  // After the copies of a stage have been issued.
  __device__ void commit(int stage) {
    commit_bulk();
    if (reading >= 0) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      release();
    }
    reading = stage;
  }
  __device__ void finish() {
    wait_for_bulk_reads();
    if (reading >= 0) release();
    reading = -1;
  }

 private:
  __device__ void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at(free + reading);
  }
};

#endif

}  // namespace fastconvt::cuda
