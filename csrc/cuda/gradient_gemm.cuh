// The gradient GEMM, device side. See core/gradient_gemm.h. Blocks are persistent: one thread copies what all their
// items need, two warpgroups multiply,
// two warps store.
#pragma once

#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/prefetch_map.cuh"
#include "device/shared_address.cuh"
#include "gradient_gemm_store.cuh"
#include "gradient_gemm_windows.cuh"

namespace fastconvt::cuda {

constexpr int kGradientGemmThreads = 384;

// As gradient_gemm_parts().
template <typename T, int kRowTiles, int kTiles>
constexpr int kGradientGemmParts = kRowTiles * 128 * kTiles * 8 * sizeof(T) > (64 << 10) ? 2 : 1;

// Which block of its cluster this is.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// The stages of an item that a block of a cluster sums.
__device__ __forceinline__ void find_share(const GradientGemmParams& p, int rank, int& begin, int& end) {
  begin = p.inner * rank / p.splits, end = p.inner * (rank + 1) / p.splits;
}

// A tap and a chunk of channels, in the order of the inner dimension.
struct GradientGemmUnit {
  int chunk, tap, t[3];

  __device__ __forceinline__ void find(const GradientGemmParams& p, int unit) {
    tap = unit / p.chunks, chunk = unit - tap * p.chunks;
    int rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int outer = rest / p.axis[a].kernel;
      t[a] = rest - outer * p.axis[a].kernel, rest = outer;
    }
  }
  __device__ __forceinline__ void advance(const GradientGemmParams& p) {
    if (++chunk < p.chunks) return;
    chunk = 0, ++tap;
    if (++t[2] < p.axis[2].kernel) return;
    t[2] = 0;
    if (++t[1] < p.axis[1].kernel) return;
    t[1] = 0, ++t[0];
  }
};

// The items of a block, one after the other: those that it makes alone, then its share of one, where clusters share.
struct GradientGemmWalk {
  int index, begin, end;
  bool shared;

  __device__ __forceinline__ GradientGemmWalk(const GradientGemmParams& p, int rank)
      : index(blockIdx.x), begin(0), end(p.inner), shared(false) {
    leave_whole(p, rank);
  }
  __device__ __forceinline__ bool exists(const GradientGemmParams& p) const { return index < p.items; }
  __device__ __forceinline__ void advance(const GradientGemmParams& p, int rank) {
    index += gridDim.x;
    if (shared) index = p.items;
    leave_whole(p, rank);
  }

 private:
  __device__ __forceinline__ void leave_whole(const GradientGemmParams& p, int rank) {
    if (shared || index < p.whole || p.splits == 1) return;
    index = p.whole + blockIdx.x / p.splits, shared = true;
    find_share(p, rank, begin, end);
  }
};
// Whether a block's cluster shares an item.
__device__ __forceinline__ bool shares_item(const GradientGemmParams& p) {
  return p.splits > 1 && p.whole + static_cast<int>(blockIdx.x) / p.splits < p.items;
}

// Copies what an item needs, each stage as soon as its place is free.
__device__ __forceinline__ void copy_item(const GradientGemmParams& p, const CUtensorMap* positions,
                                          const CUtensorMap* weights, uint32_t base, const GradientGemmWalk& walk,
                                          BarrierRing& ring) {
  const GradientGemmBarriers barriers{base};
  const GradientGemmItem item = find_item(p, walk.index);
  int at[5], image = item.first_position;
  at[4] = p.image(image);
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    int rest = image;
    image = p.axis[a].in(rest);
    at[3 - a] = rest * p.axis[a].stride - p.axis[a].padding;
  }
  const int in_channel = item.group * p.group_in + item.first_channel;
  GradientGemmUnit unit;
  int number = walk.begin * p.units_per_stage;
  unit.find(p, number);
  for (int i = walk.begin; i < walk.end; ++i, ring.advance(p.stages)) {
    const uint32_t full = barriers.full(ring.place);
    const uint32_t rows = first_stage(base) + ring.place * p.stage_bytes;
    const uint32_t columns = rows + p.units_per_stage * p.unit_rows_bytes;
    mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
    mbarrier_arrive_expecting(full, p.stage_bytes);
    for (int u = 0; u < p.units_per_stage; ++u, ++number) {
      const bool exists = number < p.units;  // else zeros, from beyond the channels
      const int offset[3] = {unit.t[0] * p.axis[0].dilation, unit.t[1] * p.axis[1].dilation,
                             unit.t[2] * p.axis[2].dilation};
      at[0] = exists ? item.group * p.group_pitch + unit.chunk * p.chunk : p.out_channels;
      load_positions(rows + u * p.unit_rows_bytes, positions, p.rank, at, offset, full);
      load_weights(columns + u * p.unit_columns_bytes, weights, exists ? unit.chunk * p.chunk : p.out_channels,
                   unit.tap, in_channel, full);
      if (number + 1 < p.units) unit.advance(p);
    }
  }
}

// Copies what all items need. One thread.
template <GradientGemmForm kForm>
__device__ __forceinline__ void copy_items(const GradientGemmParams& p, const CUtensorMap* positions,
                                           const CUtensorMap* weights, uint32_t base, int rank) {
  if (!p.ready) wait_for_previous_grid();  // for the packed tensors
  let_next_grid_begin();                   // it may rely on them, too
  BarrierRing ring;
  for (GradientGemmWalk walk(p, rank); walk.exists(p); walk.advance(p, rank)) {
    if constexpr (kForm != GradientGemmForm::kIm2col) {
      copy_windows<kIsOfWeight<kForm>>(p, weights, base, walk.begin, walk.end, find_item(p, walk.index), ring);
    } else {
      copy_item(p, positions, weights, base, walk, ring);
    }
  }
}

// The products of an item's stages [begin, end).
template <typename T, int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_item(const GradientGemmParams& p, uint32_t base, int warpgroup, int count,
                                              BarrierRing& ring, float (&sum)[kRowTiles][kTiles][4]) {
  constexpr int kSteps = 4;  // of 32 bytes a row
  const GradientGemmBarriers barriers{base};
  const uint32_t form = gradient_operand_form(p.swizzle, 8 * p.chunk_bytes);
  const bool arrives = threadIdx.x % 32 == 0;
  const int steps = p.chunk_bytes / 32;
  uint32_t row_step[kSteps], column_step[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    row_step[k] = (k / steps * p.unit_rows_bytes + k % steps * 32 + warpgroup * kRowTiles * 64 * p.chunk_bytes) >> 4;
    column_step[k] = (p.units_per_stage * p.unit_rows_bytes + k / steps * p.unit_columns_bytes + k % steps * 32) >> 4;
  }
  const int tile_step = 64 * p.chunk_bytes >> 4;
  uint32_t done = 0;  // the stage before
  int add = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t stage = (first_stage(base) + ring.place * p.stage_bytes) >> 4;
    mbarrier_wait(barriers.full(ring.place), ring.parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        start_gradient_product<T>(sum[r], gradient_operand(form, stage + row_step[k] + r * tile_step),
                                  gradient_operand(form, stage + column_step[k]), k == 0 ? add : 1);
      }
    wgmma_commit();
    wgmma_wait<1>();
    add = 1;
    if (arrives && done != 0) mbarrier_arrive(done);
    done = barriers.empty(ring.place);
    ring.advance(p.stages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) asm volatile("" : "+f"(sum[r][j][k])::"memory");  // nothing reads them earlier
  if (arrives && done != 0) mbarrier_arrive(done);
}

// What a warpgroup stages of its item's channels: `number` is a part, or a block's place in its cluster.
__device__ __forceinline__ GradientGemmStaged find_staged(const GradientGemmParams& p, const GradientGemmItem& item,
                                                          uint32_t base, int warpgroup, int number, int share) {
  return {base + p.staging_at + warpgroup * p.staging_share, item.first_position + warpgroup * (p.rows / 2),
          number * share, (number + 1) * share};
}

template <typename T, bool kContiguous, int kRowTiles, int kTiles>
__device__ __forceinline__ void store_sums(const GradientGemmParams& p, const GradientGemmItem& item, uint32_t base,
                                           int warpgroup, int& parity, const float (&sum)[kRowTiles][kTiles][4]) {
  constexpr int kParts = kGradientGemmParts<T, kRowTiles, kTiles>;
  const GradientGemmBarriers barriers{base};
  const bool by_threads = p.store == GradientGemmStore::kThreads;
#pragma unroll
  for (int part = 0; part < kParts; ++part, parity ^= 1) {
    const GradientGemmStaged staged = find_staged(p, item, base, warpgroup, part, p.staged_columns);
    if (!by_threads) mbarrier_wait(barriers.stored(warpgroup), parity ^ 1);
    stage_part<T, kContiguous, kParts>(p, item, staged, warpgroup, part, sum);
    if (!by_threads) {
      fence_shared_writes();
      mbarrier_arrive(barriers.staged(warpgroup));
    } else {
      if (p.stores_wait) wait_for_previous_grid();
      store_by_threads<T, kContiguous>(p, item, staged);
      meet_warpgroup(warpgroup, false);
    }
  }
}

// The same where the blocks of a cluster share an item: each leaves its sums in shared memory, where stages were, adds
// everyone's of its share of the channels, in the order of the blocks, and stores these.
template <typename T, bool kContiguous, int kRowTiles, int kTiles>
__device__ __forceinline__ void add_and_store(const GradientGemmParams& p, const GradientGemmItem& item,
                                              const GradientGemmStaged& staged, uint32_t base, int warpgroup,
                                              const float (&sum)[kRowTiles][kTiles][4]) {
  constexpr int kTile = 128 * 16, kAtOnce = 4;  // bytes of a tile's sums; tiles that are read at the same time
  const uint32_t own = first_stage(base) + warpgroup * (kRowTiles * kTiles * kTile) + threadIdx.x % 128 * 16;
  asm volatile("bar.sync 3, 256;" ::: "memory");  // nobody multiplies what sums will stand on
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) store_shared(own + (i * kTiles + j) * kTile, sum[i][j]);
  meet_cluster();
  const int share = kTiles / p.splits, first = staged.begin / 8, count = kRowTiles * share;
  float probe = 0;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce) {
    float total[kAtOnce][4] = {};
#pragma unroll 1
    for (int s = 0; s < p.splits; ++s) {
      float part[kAtOnce][4];
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        const int n = min(begin + q, count - 1), i = n / share, j = first + n - i * share;
        load_cluster(cluster_address(own + (i * kTiles + j) * kTile, s), part[q]);
      }
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
        for (int k = 0; k < 4; ++k) total[q][k] += part[q][k];
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      const int n = begin + q, i = n / share;
      if (n >= count) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) probe = fmaf(total[q][k], 0.f, probe);
      stage_tile<T, kContiguous>(p, staged.staging, total[q], i * 64, n - i * share);
    }
  }
  finish_staging<T, kContiguous>(p, item, staged, warpgroup, probe);
  if (p.stores_wait) wait_for_previous_grid();
  store_by_threads<T, kContiguous>(p, item, staged);
}

template <typename T, bool kContiguous, int kRowTiles, int kTiles>
__device__ __forceinline__ void finish_item(const GradientGemmParams& p, const GradientGemmItem& item, bool shared,
                                            uint32_t base, int warpgroup, int rank, int& parity,
                                            const float (&sum)[kRowTiles][kTiles][4]) {
  if (shared) {
    if (p.store != GradientGemmStore::kThreads) {
      mbarrier_wait(GradientGemmBarriers{base}.stored(warpgroup), parity ^ 1);
    }
    add_and_store<T, kContiguous>(p, item, find_staged(p, item, base, warpgroup, rank, p.columns / p.splits), base,
                                  warpgroup, sum);
  } else {
    store_sums<T, kContiguous>(p, item, base, warpgroup, parity, sum);
  }
}

template <typename T, int kRowTiles, int kTiles, GradientGemmForm kForm>
__device__ __forceinline__ void multiply_items(const GradientGemmParams& p, uint32_t base, int rank) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  BarrierRing ring;
  int parity = 0;
  float sum[kRowTiles][kTiles][4];
  for (GradientGemmWalk walk(p, rank); walk.exists(p); walk.advance(p, rank)) {
    const GradientGemmItem item = find_item(p, walk.index);
    if constexpr (kForm != GradientGemmForm::kIm2col) {
      multiply_windows<T, kForm>(p, base, warpgroup, walk.end - walk.begin, item.first_position, ring, sum[0]);
    } else {
      multiply_item<T>(p, base, warpgroup, walk.end - walk.begin, ring, sum);
    }
    if (p.contiguous) {
      finish_item<T, true>(p, item, walk.shared, base, warpgroup, rank, parity, sum);
    } else {
      finish_item<T, false>(p, item, walk.shared, base, warpgroup, rank, parity, sum);
    }
  }
}

// Stores what a warpgroup stages. One warp.
template <typename T>
__device__ __forceinline__ void store_items(const GradientGemmParams& p, const CUtensorMap* map, uint32_t base,
                                            int warpgroup) {
  const GradientGemmBarriers barriers{base};
  int parity = 0;
  if (p.stores_wait) wait_for_previous_grid();
  for (int index = blockIdx.x; index < p.whole; index += gridDim.x) {
    const GradientGemmItem item = find_item(p, index);
    for (int part = 0; part * p.staged_columns < p.columns; ++part, parity ^= 1) {
      const GradientGemmStaged staged = find_staged(p, item, base, warpgroup, part, p.staged_columns);
      mbarrier_wait(barriers.staged(warpgroup), parity);
      if (p.store == GradientGemmStore::kRuns) {
        store_runs<T>(p, item, staged);
      } else if (threadIdx.x % 32 == 0) {
        store_boxes<T>(p, map, item, staged);
      }
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.stored(warpgroup));
    }
  }
}

template <typename T, int kRowTiles, int kTiles, GradientGemmForm kForm>
__global__ void __launch_bounds__(kGradientGemmThreads, 1)
    gradient_gemm_kernel(const __grid_constant__ GradientGemmParams p, const __grid_constant__ CUtensorMap positions,
                         const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap gradients) {
#ifdef FASTCONVT_GRADIENT_GEMM
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  const GradientGemmBarriers barriers{base};
  if (threadIdx.x == 0) {
    if (kForm == GradientGemmForm::kIm2col) prefetch_map(&positions);
    prefetch_map(&weights);
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), p.bias != nullptr ? 9 : 8);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(barriers.staged(i), 128);
      mbarrier_init(barriers.stored(i), 1);
    }
    fence_new_barriers();
  }
  __syncthreads();
  const int rank = p.splits > 1 ? cluster_rank() : 0;
  if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    multiply_items<T, kRowTiles, kTiles, kForm>(p, base, rank);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x == 256) copy_items<kForm>(p, &positions, &weights, base, rank);
    __syncwarp();
    const int warp = threadIdx.x / 32 - 9;
    if (p.store != GradientGemmStore::kThreads && (warp == 0 || warp == 1)) {
      store_items<T>(p, &gradients, base, warp);
      __syncwarp();
    }
    if constexpr (kIsOfWeight<kForm>) {
      BarrierRing ring;
      for (GradientGemmWalk walk(p, rank); warp == 2 && p.bias != nullptr && walk.exists(p); walk.advance(p, rank)) {
        sum_windows<T>(p, base, find_item(p, walk.index), p.inner, ring);
      }
    }
    if (shares_item(p)) meet_cluster();
  }
  if (p.splits > 1) meet_cluster();  // nobody leaves while others read
  // Who waits for this grid waits for the one before it as well.
  if (p.ready && blockIdx.x + 1 == gridDim.x) wait_for_previous_grid();
#endif
}

}  // namespace fastconvt::cuda
