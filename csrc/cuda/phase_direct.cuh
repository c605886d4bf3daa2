// The phase-direct family, device side. See core/phase_direct.h. A block's warps make one tile after the other, each
// for its share of the input channels, and stage their own inputs: they meet only to add their sums up.
#pragma once

#include "device/barrier.cuh"
#include "device/copy_groups.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/tensor_copy.cuh"
#include "phase_direct_product.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int kPending>
__device__ __forceinline__ void phase_direct_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One output by the definition: only taps and inputs that exist are multiplied. In float64, since large finite products
// must not overflow on the way.
template <int kKernel, int kStride>
__device__ __noinline__ float phase_direct_by_definition(const PhaseDirectParams& p, int n, int channel, int oy,
                                                         int ox) {
  const int group = channel / p.group_out, y = oy + p.padding[0], x = ox + p.padding[1];
  double sum = p.bias == nullptr ? 0. : static_cast<double>(p.bias[channel]);
#pragma unroll 1
  for (int c = group * p.group_in; c < (group + 1) * p.group_in; ++c) {
    const float* const weight = p.weight + static_cast<int64_t>(c) * p.group_out * (kKernel * kKernel) +
                                (channel - group * p.group_out) * p.weight_channel;
    const float* const input = p.input + n * p.in_batch + c * p.in_channel;
#pragma unroll 1
    for (int ky = y % kStride; ky < kKernel && ky <= y; ky += kStride) {
      if ((y - ky) / kStride >= p.in[0]) continue;
#pragma unroll 1
      for (int kx = x % kStride; kx < kKernel && kx <= x; kx += kStride) {
        if ((x - kx) / kStride >= p.in[1]) continue;
        const int64_t position = static_cast<int64_t>((y - ky) / kStride) * p.in[1] + (x - kx) / kStride;
        sum = fma(static_cast<double>(input[position * p.in_pixel]),
                  static_cast<double>(weight[(ky * kKernel + kx) * p.weight_tap]), sum);
      }
    }
  }
  return p.rectify(static_cast<float>(sum));
}

// Four outputs that were just stored: what is not finite, by the definition.
template <int kKernel, int kStride>
__device__ __noinline__ void phase_direct_repair(const PhaseDirectParams& p, int n, int channel, int oy, int ox,
                                                 float* place) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    float* const output = place + i * p.out_pixel;
    if (static_cast<unsigned>(ox + i) >= static_cast<unsigned>(p.out[1]) || p.rectify.shows_finite(*output)) {
      continue;
    }
    *output = phase_direct_by_definition<kKernel, kStride>(p, n, channel, oy, ox + i);
  }
}

// The first cell of a tile, and its entry of the batch.
template <class Traits>
struct PhaseDirectTile {
  int n, y, x;
  __device__ __forceinline__ PhaseDirectTile(const PhaseDirectParams& p, int tile) {
    n = p.tiles[1](tile);
    x = p.first_cell[1] + tile * Traits::kTileWidth;
    int row = n;
    n = p.tiles[0](row);
    y = p.first_cell[0] + row * Traits::kTileHeight;
  }
};

template <class Traits>
struct PhaseDirectKernel {
  using Product = PhaseDirectProduct<Traits>;
  using Sums = typename Product::Sums;
  static constexpr int kRowQuads = Traits::kColumns * Traits::kStride / 4, kQuads = Traits::kSums / 4;

  const PhaseDirectParams& p;
  float* stages;  // of this warp
  float4* shares;
  float* weights;
  uint32_t barriers;  // of this warp
  int lane, warp, channel,
      group;                 // `warp` is uniform for the compiler, too: addresses stay out of the lanes' registers
  int begin, count, copies;  // channels of this warp, neighbours in pixels and every kWarps-th one in planes
  // What is copied next.
  int next_tile, left = 0, x, y, n, next;
  int stage = 0, parity = 0;

  __device__ __forceinline__ PhaseDirectKernel(const PhaseDirectParams& p, float* shared)
      : p(p),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        channel(blockIdx.y),
        next_tile(blockIdx.x) {
    stages = shared + warp * Traits::kWarpFloats;
    float* const all_shares = shared + Traits::kWarps * Traits::kWarpFloats;
    shares = reinterpret_cast<float4*>(all_shares);
    weights = all_shares + Traits::kShares;
    barriers = shared_address(weights + p.group_in * Traits::kWeights) + warp * Traits::kStages * 8;
    group = channel / p.group_out;
    if constexpr (Traits::kPixels) {
      // Pairs of neighbours; warps that share a scheduler are four apart, so their sums are equal.
      const int pairs = p.group_in / 2, of_all = pairs / Traits::kWarps, rest = pairs - of_all * Traits::kWarps;
      begin = (of_all * warp + min(warp, rest)) * 2;
      count = (of_all + (warp < rest ? 1 : 0)) * 2;
      copies = count > 0 ? (begin + count + 3) / 4 - begin / 4 : 0;
    } else {
      begin = warp;
      count = copies = (p.group_in - warp + Traits::kWarps - 1) / Traits::kWarps;
    }
  }

  __device__ __forceinline__ void begin_tile() {
    const PhaseDirectTile<Traits> tile(p, min(next_tile, p.all_tiles - 1));
    left = next_tile < p.all_tiles ? copies : 0;
    x = tile.x - (Traits::kReach - 1) - Traits::kLead, y = tile.y - (Traits::kReach - 1), n = tile.n;
    next = group * p.group_in + begin / Traits::kCopied * Traits::kCopied;
    next_tile += gridDim.x;
  }

  // Starts the next copy, if there is one.
  __device__ __forceinline__ void copy(int to) {
    if (left > 0) {
      if constexpr (Traits::kFill == PhaseDirectFill::kElements) {
        copy_elements(shared_address(stages + to * Traits::kPlane));
      } else if (lane == 0) {
        const uint32_t barrier = barriers + to * 8;
        mbarrier_arrive_expecting(barrier, Traits::kPitch * Traits::kHeight * 4 * Traits::kCopied);
        if constexpr (Traits::kPixels) {
          load_box(shared_address(stages), &p.map, next, x, y, n, barrier);
        } else {
          load_box(shared_address(stages + to * Traits::kPlane), &p.map, x, y, n * p.channels + next, barrier);
        }
      }
      next += Traits::kPixels ? Traits::kCopied : Traits::kWarps;
      if (--left == 0) begin_tile();
    }
    if constexpr (Traits::kFill == PhaseDirectFill::kElements) commit_copies();
  }
  // A lane a column; what is left of the rows together.
  __device__ __forceinline__ void copy_elements(uint32_t to) const {
    constexpr int kWidth = 32, kRest = Traits::kPitch - kWidth;
    const float* const from = p.input + n * p.in_batch + next * p.in_channel;
#pragma unroll 4
    for (int row = 0; row < Traits::kHeight; ++row) copy_element(to, from, row, lane);
#pragma unroll
    for (int i = lane; i < Traits::kHeight * kRest; i += 32) copy_element(to, from, i / kRest, kWidth + i % kRest);
  }
  __device__ __forceinline__ void copy_element(uint32_t to, const float* from, int row, int column) const {
    const int iy = y + row, ix = x + column;
    const bool exists = static_cast<unsigned>(iy) < static_cast<unsigned>(p.in[0]) &&
                        static_cast<unsigned>(ix) < static_cast<unsigned>(p.in[1]);
    const int64_t position = static_cast<int64_t>(iy) * p.in[1] + ix;
    copy_or_zero<4>(to + (row * Traits::kPitch + column) * 4, exists ? from + position * p.in_pixel : p.input, exists);
  }

  // All weights of the output channel, in the order of their use.
  __device__ __forceinline__ void load_weights() const {
    constexpr int kTaps = Traits::kKernel * Traits::kKernel;
    const int64_t pitch = static_cast<int64_t>(p.group_out) * kTaps;
    const float* const from =
        p.weight + group * p.group_in * pitch + (channel - group * p.group_out) * p.weight_channel;
#pragma unroll 4
    for (int i = threadIdx.x; i < p.group_in * kTaps; i += Traits::kThreads) {
      const int c = i / kTaps, tap = i - c * kTaps, row = tap / Traits::kKernel;
      const int place = Traits::row_place(row) * Traits::kKernel + tap - row * Traits::kKernel;
      copy_or_zero<4>(shared_address(weights + c * Traits::kWeights + place), from + c * pitch + tap * p.weight_tap,
                      true);
    }
    commit_copies();
    phase_direct_wait<0>();
  }

  // Where the plane of channel j of the warp's, the next one, is, once it is there.
  __device__ __forceinline__ const float* plane(int j) {
    const float* const plane = stages + stage * Traits::kPlane;
    if constexpr (Traits::kPixels) {
      const int place = (begin + j) % 4;
      if (j == 0 || place == 0) mbarrier_wait(barriers, parity);
      if (place % 2 == 0) transpose(place, place == 2 || j + 2 == count);
      return stages + Traits::kPlanesAt + place % 2 * Traits::kPlane;
    } else if constexpr (Traits::kFill == PhaseDirectFill::kElements) {
      phase_direct_wait<Traits::kStages - 1>();
      __syncwarp();
    } else {
      mbarrier_wait(barriers + stage * 8, parity);
    }
    return plane;
  }
  // Two of four channels become planes; then the next pixels may come, if these are done.
  __device__ __forceinline__ void transpose(int first, bool done) {
    float* const planes = stages + Traits::kPlanesAt;
#pragma unroll 6
    for (int i = lane; i < Traits::kPitch * Traits::kHeight; i += 32) {
      const float2 two = *reinterpret_cast<const float2*>(stages + i * 4 + first);
      planes[i] = two.x, planes[Traits::kPlane + i] = two.y;
    }
    __syncwarp();
    if (done) parity ^= 1, copy(0);
  }
  // After __syncwarp.
  __device__ __forceinline__ void release() {
    if constexpr (!Traits::kPixels) {
      copy(stage);
      if (++stage == Traits::kStages) stage = 0, parity ^= 1;
    }
  }

  // Leaves the warp's sums of a tile in its share; the other warps may be reading it until the first barrier.
  __device__ __forceinline__ void sum_tile() {
    const int first = lane / Traits::kLanes * Traits::kRows * Traits::kPitch +
                      lane % Traits::kLanes * Traits::kColumns + Traits::kLead;
    const float* weight = weights + begin * Traits::kWeights;
    Sums total, chained;
    Product::clear(total), Product::clear(chained);
    int chain = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const float* const input = plane(j) + first;
      if constexpr (Traits::kChain == 1) {
        Sums sum;
        Product::template run<true>(input, weight, sum);
        Product::move(sum, total);
      } else {
        Product::template run<false>(input, weight, chained);
      }
      weight += (Traits::kPixels ? 1 : Traits::kWarps) * Traits::kWeights;
      __syncwarp();
      release();
      if (Traits::kChain != 1 && ++chain == Traits::kChain) Product::move(chained, total), chain = 0;
    }
    if (Traits::kChain != 1) Product::move(chained, total), Product::copy_light(chained, total);
    __syncthreads();
    float4* const place = shares + warp * kQuads * 32 + lane;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      place[q * 32] = make_float4(Product::at(total, q * 4), Product::at(total, q * 4 + 1),
                                  Product::at(total, q * 4 + 2), Product::at(total, q * 4 + 3));
    }
    __syncthreads();
  }

  // Adds all shares; a warp stores some rows of all lanes' cells.
  __device__ __forceinline__ void store_tile(const PhaseDirectTile<Traits>& tile, float term) const {
    const int ox = (tile.x + lane % Traits::kLanes * Traits::kColumns) * Traits::kStride - p.padding[1];
#pragma unroll
    for (int row = warp; row < Traits::kRows * Traits::kStride; row += Traits::kWarps) {
      const int oy = (tile.y + lane / Traits::kLanes * Traits::kRows) * Traits::kStride + row - p.padding[0];
      if (static_cast<unsigned>(oy) >= static_cast<unsigned>(p.out[0])) continue;
#pragma unroll
      for (int q = 0; q < kRowQuads; ++q) {
        float4 sum[Traits::kWarps];
#pragma unroll
        for (int i = 0; i < Traits::kWarps; ++i) sum[i] = shares[(i * kQuads + row * kRowQuads + q) * 32 + lane];
#pragma unroll
        for (int step = 1; step < Traits::kWarps; step *= 2) {
#pragma unroll
          for (int i = 0; i + step < Traits::kWarps; i += 2 * step) {
            sum[i].x += sum[i + step].x, sum[i].y += sum[i + step].y;
            sum[i].z += sum[i + step].z, sum[i].w += sum[i + step].w;
          }
        }
        float value[4] = {sum[0].x + term, sum[0].y + term, sum[0].z + term, sum[0].w + term};
        store_quad(tile.n, oy, ox + q * 4, value);
      }
    }
  }
  __device__ __forceinline__ void store_quad(int entry, int oy, int ox, float (&value)[4]) const {
    float* const place = p.output + entry * p.out_batch + channel * p.out_channel +
                         (static_cast<int64_t>(oy) * p.out[1] + ox) * p.out_pixel;
    const float probe = fmaf(value[0], 0.f, fmaf(value[1], 0.f, fmaf(value[2], 0.f, value[3] * 0.f)));
    const bool finite = probe == 0;
    p.rectify(value);
    if (finite && p.vectors && ox >= 0 && ox + 3 < p.out[1]) {
      *reinterpret_cast<float4*>(place) = make_float4(value[0], value[1], value[2], value[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (static_cast<unsigned>(ox + i) < static_cast<unsigned>(p.out[1])) place[i * p.out_pixel] = value[i];
    }
    if (!finite) phase_direct_repair<Traits::kKernel, Traits::kStride>(p, entry, channel, oy, ox, place);
  }
  __device__ __forceinline__ void run() {
    if (Traits::kFill != PhaseDirectFill::kElements && lane == 0) {
      for (int i = 0; i < Traits::kStages; ++i) mbarrier_init(barriers + i * 8, 1);
      fence_new_barriers();
      fence_shared_writes();
    }
    __syncwarp();
    begin_tile();
#pragma unroll 1
    for (int i = 0; i < Traits::kStages; ++i) copy(i);
    load_weights();
    __syncthreads();
    const float term = p.bias == nullptr ? 0.f : __ldg(p.bias + channel);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < p.all_tiles; tile += gridDim.x) {
      sum_tile();
      store_tile(PhaseDirectTile<Traits>(p, tile), term);
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    phase_direct_kernel(const __grid_constant__ PhaseDirectParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) float phase_direct_shared[];
  PhaseDirectKernel<Traits>(p, phase_direct_shared).run();
#endif
}

}  // namespace fastconvt::cuda
