// The shuffle GEMM turned round: contiguous, kernels two wide, resident weights. A warpgroup multiplies 64 rows of
// weights' columns by 128 positions; a warp's 16 rows are 8 lines of outputs of these positions, so that warps store on
// their own. Teams of warpgroups, which make all rows of a block, have a ring of inputs each, and nobody takes turns.
#pragma once

#include "shuffle_gemm.cuh"

namespace fastconvt::cuda {

// A team's inputs, two tiles of 64 positions an item. One thread.
__device__ __forceinline__ void copy_lines(const ShuffleGemmParams& p, uint32_t base, const CUtensorMap* map,
                                           int team) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  ShuffleGemmRing ring;
  for (int index = blockIdx.x + team * gridDim.x; index < p.items; index += p.teams * gridDim.x) {
    const int tile = find_shuffle_gemm_item(p, index).first_tile;
    const ShuffleGemmSource from = find_source<true, false>(p, tile), second = find_source<true, false>(p, tile + 1);
    const bool both = tile + 1 < p.tiles;
    for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
      const int place = team * p.stages + ring.place;
      const uint32_t to = base + p.ring + place * kShuffleGemmLinesStage, full = barriers.full(place);
      mbarrier_wait(barriers.empty(place), ring.parity ^ 1);
      mbarrier_arrive_expecting(full, both ? kShuffleGemmLinesStage : kShuffleGemmLinesStage / 2);
      load_inputs<true, false>(map, to, from, chunk, 0, full);
      if (both) load_inputs<true, false>(map, to + kShuffleGemmLinesStage / 2, second, chunk, 0, full);
    }
  }
}

// What bias adds to a lane's two rows of a warp's.
template <typename T>
__device__ __forceinline__ float2 load_line_terms(const ShuffleGemmParams& p, int first_column) {
  float terms[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int column = first_column + i * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
    if (p.bias == nullptr || column >= p.columns) continue;
    terms[i] = to_accumulator(__ldg(static_cast<const T*>(p.bias) + p.channel_columns(column)));
  }
  return make_float2(terms[0], terms[1]);
}

// Stages a lane's share of 8 lines of 64 positions. It has the same tap of neighbouring positions; the other one is in
// a lane of the next row. Lanes of even rows exchange what they have of the lower 8 rows, odd ones' of the upper 8.
template <typename T, bool kRectify>
__device__ __forceinline__ void stage_lines(const ShuffleGemmParams& p, const float (*sum)[4], const float2& terms,
                                            uint32_t to, uint32_t (&mark)[4]) {
  const bool odd = threadIdx.x & 4;
  const uint32_t low_taps = odd ? 0x1054 : 0x5410, high_taps = odd ? 0x3276 : 0x7632;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float (&s)[4] = sum[i];
    const uint32_t lower = make_pair<T, kRectify>(p, s[0], s[1], make_float2(terms.x, terms.x));
    const uint32_t upper = make_pair<T, kRectify>(p, s[2], s[3], make_float2(terms.y, terms.y));
    mark_not_finite<T>(mark[i % 2 * 2], lower);
    mark_not_finite<T>(mark[i % 2 * 2 + 1], upper);
    const uint32_t own = odd ? upper : lower, other = __shfl_xor_sync(~0u, odd ? lower : upper, 4);
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + i * 32), "r"(__byte_perm(own, other, low_taps)),
                 "r"(__byte_perm(own, other, high_taps))
                 : "memory");
  }
}

// All threads that multiply. kRows: of a block.
template <typename T, int kRows, bool kRectify>
__device__ __forceinline__ void make_lines(const ShuffleGemmParams& p, uint32_t base, int warp) {
  constexpr int kPitch = kShuffleGemmLinesPitch, kTeams = 256 / kRows;
  const ShuffleGemmBarriers barriers{base + p.barriers};
  const int team = warp / (kRows / 16), lane = threadIdx.x % 32, g = lane / 4;
  const bool arrives = lane == 0;
  const int part = static_cast<int>(blockIdx.x) % p.column_blocks.divisor;  // of columns, a block keeps to it
  const int first_column = part * kRows + warp % (kRows / 16) * 16;
  const float2 terms = load_line_terms<T>(p, first_column);
  // Of lines: the lane stores 16 bytes of every other one.
  uint32_t line[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = first_column + i * 4 + lane / 16 * 2;
    line[i] = column < p.columns ? static_cast<uint32_t>(find_output_row(p, column / 2, 2)) : ~0u;
  }
  // The upper four lines lie 64 bytes further, for different banks.
  const uint32_t staging = base + p.staging + warp * kShuffleGemmLinesStaging;
  const uint32_t to = staging + (g / 2 + g % 2 * 4) * kPitch + g % 2 * 64 + lane % 4 * 8;
  const uint32_t from = staging + lane / 16 * kPitch + lane % 16 * 16;
  const uint32_t weights = base + warp % (kRows / 16) / 4 * 8192;
  ShuffleGemmRing ring;
  bool first = true;
  for (int index = blockIdx.x + team * gridDim.x; index < p.items; index += kTeams * gridDim.x) {
    const int tile = find_shuffle_gemm_item(p, index).first_tile;
    float sum[16][4];
    uint32_t done = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const int stage = team * p.stages + ring.place;
      if (first) mbarrier_wait(barriers.weights(chunk), 0);
      mbarrier_wait(barriers.full(stage), ring.parity);
      const uint32_t rows = swizzled_operand(weights + chunk * (kRows * 128), 8192);
      const uint32_t columns = swizzled_operand(base + p.ring + stage * kShuffleGemmLinesStage, 8192);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        start_swizzled_product<T, true, 128>(sum, rows + k * 128, columns + k * 128, chunk | k);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (arrives && done != 0) mbarrier_arrive(done);
      done = barriers.empty(stage);
      ring.advance(p.stages);
    }
    first = false;
    // Of 4 neighbouring positions, in a lane each.
    const int64_t place = find_shuffle_gemm_place(p, tile + lane / 16, lane % 16 * 4);
    wgmma_wait<0>();
    if (arrives) mbarrier_arrive(done);
    uint32_t mark[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __syncwarp();  // what was staged before has been read
      stage_lines<T, kRectify>(p, sum + half * 8, terms, to, mark);
      const int64_t target = __shfl_sync(~0u, place, half * 16 + lane % 16);
      T* const output = static_cast<T*>(p.output) + target;
      __syncwarp();
      uint4 staged[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) staged[i] = load_shared_vector(from + i * 2 * kPitch + i / 2 * 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (target >= 0 && line[i] != ~0u) *reinterpret_cast<uint4*>(output + line[i]) = staged[i];
      }
    }
    if (__any_sync(~0u, is_marked(mark[0] | mark[1] | mark[2] | mark[3]))) {
      __syncwarp();
      for (int i = 0; i < 2; ++i) repair_tile<T, true, 16, 32>(p, tile + i, 0, first_column / 16);
    }
  }
}

inline constexpr int kShuffleGemmLinesThreads = 640;

template <typename T, int kRows, bool kRectify>
__global__ void __launch_bounds__(kShuffleGemmLinesThreads, 1)
    shuffle_gemm_lines_kernel(const __grid_constant__ CUtensorMap inputs, const __grid_constant__ CUtensorMap weights,
                              const __grid_constant__ ShuffleGemmParams p) {
#ifdef FASTCONVT_SHUFFLE_GEMM
  constexpr int kTeams = 256 / kRows, kWarps = 16;  // that multiply; four more copy
  extern __shared__ __align__(1024) unsigned char bytes[];
  const uint32_t base = shared_address(bytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), copier = warp - kWarps;
  if (elect_one()) {
    if (copier >= 0) {
      if (copier == 0) prefetch_map(&inputs);
      if (copier == 3) prefetch_map(&weights);
    } else {
      const ShuffleGemmBarriers barriers{base + p.barriers};
#pragma unroll 1
      for (int i = warp; i < kTeams * p.stages; i += kWarps) {
        mbarrier_init(barriers.full(i), 1);
        mbarrier_init(barriers.empty(i), kRows / 16);
      }
      if (warp < p.chunks) mbarrier_init(barriers.weights(warp), 1);
      fence_new_barriers();
    }
  }
  __syncthreads();
  if (copier >= 0) {
    lower_registers<32>();
    if (copier >= kTeams && copier < 3) return;
    if (elect_one()) {
      wait_for_previous_grid();  // for packed tensors
      if (copier < kTeams) {
        copy_lines(p, base, &inputs, copier);
      } else {
        copy_weights<kRows>(p, base, &weights);
      }
    }
  } else {
    raise_registers<112>();
    make_lines<T, kRows, kRectify>(p, base, warp);
  }
#endif
}

}  // namespace fastconvt::cuda
