// Transposed convolution with few output channels, in one turn (csrc/core/heads_box.h): four warps multiply 128
// positions at a time by all (channel, tap) pairs, until the products of the block's box lie in shared memory; then
// whole output rows are folded and stored.
#pragma once

#include "device/barrier.cuh"
#include "heads_box_fold.cuh"
#include "heads_box_load.cuh"
#include "heads_box_product.cuh"

namespace fastconvt::cuda {

template <typename T_, HeadsPrecision kPrecision_, int kColumns_, HeadsBoxMode kMode_>
struct HeadsBoxTraits {
  using Element = T_;
  static constexpr HeadsPrecision kPrecision = kPrecision_;
  static constexpr HeadsBoxMode kMode = kMode_;
  static constexpr bool kFloat32 = kPrecision == HeadsPrecision::kFloat32;
  static constexpr int kColumns = kColumns_;
  // Float32: weights' leading halves, then their rests.
  static constexpr int kAllColumns = kFloat32 ? 2 * kColumns : kColumns;
  static constexpr int kWarps = heads_box_warps(kMode, kColumns);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Traits>
class HeadsBoxKernel {
  using T = typename Traits::Element;
  static constexpr bool kFloat32 = Traits::kFloat32;
  static constexpr int kTiles = Traits::kColumns / 8;
  static constexpr int kStepBytes = Traits::kAllColumns * 32;
  static constexpr int kThreads = Traits::kWarps * 32;
  // By size of the products, 16 positions, 8 columns, register.
  using Sums = float[kFloat32 ? 2 : 1][2][kTiles][4];

  const HeadsBoxParams& p;
  unsigned char* const shared;
  HeadsBoxPlace& place;  // in shared memory

 public:
  __device__ HeadsBoxKernel(const HeadsBoxParams& p, unsigned char* shared, HeadsBoxPlace& place)
      : p(p), shared(shared), place(place) {}

  __device__ __forceinline__ void run() {
    const HeadsBoxTables tables(p, shared);
    make_products(tables);
    __syncthreads();
    HeadsBoxFold<T> fold(p, place, tables, shared);
    fold.run();
    // Inputs that do not exist are not used; halves of float32 may be inf, which shows in a sum that is not finite.
    if (__syncthreads_or(fold.careful)) heads_box_repair<T>(p, place);
  }

 private:
  static constexpr int kWeights = 8;  // of a thread, at a time

  __device__ __forceinline__ void load_weights(int first, T (&value)[kWeights]) const {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const int at = first + i * kThreads + threadIdx.x;
      value[i] = at < p.pairs * p.in_channels ? __ldg(static_cast<const T*>(p.weight) + at) : T{};
    }
  }

  // To where the products read them: granules of 16 bytes of channels by columns.
  __device__ __forceinline__ void place_weights(int first, const T (&value)[kWeights]) const {
    constexpr int kLaneChannels = 8 / sizeof(T), kHalves = 4 / sizeof(T);
    T* const target = reinterpret_cast<T*>(shared + p.weights);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      int column = first + i * kThreads + threadIdx.x;
      const int channel = p.by_pairs(column);
      if (channel >= p.in_channels) break;
      int step = channel / (4 * kLaneChannels), quad = channel / kLaneChannels % 4;
      if constexpr (Traits::kMode == HeadsBoxMode::kPixels) {
        step = channel / (8 * kLaneChannels) * 2 + channel / kLaneChannels % 2;
        quad = channel / (2 * kLaneChannels) % 4;
      }
      const int half = channel / kHalves % 2;
      T* const to = target + ((step * 2 + half) * Traits::kAllColumns + column) * (16 / sizeof(T)) + quad * kHalves +
                    channel % kHalves;
      if constexpr (kFloat32) {
        float high, low;
        split_tf32_rounded(value[i], high, low);
        to[0] = high, to[Traits::kColumns * 4] = __uint_as_float(heads_round_tf32(__float_as_uint(low)));
      } else if constexpr (sizeof(T) == 4) {
        to[0] = __uint_as_float(to_tf32(value[i]));
      } else {
        to[0] = value[i];
      }
    }
  }

  __device__ __forceinline__ void make_products(const HeadsBoxTables& tables) const {
    T value[kWeights];
    load_weights(0, value);
    float bias = 0;
    if (threadIdx.x < p.out_channels) bias = BiasEpilogue<T>{static_cast<const T*>(p.bias)}.channel_term(threadIdx.x);
    HeadsBoxPlace found;
    found.find(p);
    HeadsBoxLoader<T, Traits::kMode, Traits::kWarps> loader(p, found, shared + p.slots);
    const bool reads = found.reads();
#pragma unroll 1
    for (int i = 0; reads && i < loader.kAhead; ++i) loader.request(found);
    if (threadIdx.x == 0) place = found;
    // Columns and channels that do not exist are zeros.
    uint4* const weights = reinterpret_cast<uint4*>(shared + p.weights);
    for (int i = threadIdx.x; i < p.steps * (kStepBytes / 16); i += kThreads) weights[i] = uint4{};
    if (threadIdx.x < 4) reinterpret_cast<float*>(shared + p.zeros)[threadIdx.x] = 0;
    __syncthreads();
    heads_box_make_tables(p, found, tables, shared_address(shared));
    place_weights(0, value);
#pragma unroll 1
    for (int first = kWeights * kThreads; first < p.pairs * p.in_channels; first += kWeights * kThreads) {
      load_weights(first, value);
      place_weights(first, value);
    }
    if (threadIdx.x < p.out_channels) tables.bias[threadIdx.x] = bias;
    fence_shared_writes();
    __syncthreads();
    if (!reads) return;
#pragma unroll 1
    for (int i = 0; i < loader.kMore; ++i) loader.request(found);
    multiply(loader);
  }

  // A lane's left operand: by 16 positions, register. Float32: leading halves and rests.
  struct Left {
    uint32_t high[2][4], low[2][4];
  };

  template <class Loader>
  __device__ __forceinline__ void multiply(Loader& loader) const {
    Sums sum;
    clear(sum);
    const uint32_t weights = shared_address(shared + p.weights);
    // Four warps multiply together.
    int chunk = heads_box_warp(), step = 0;
#pragma unroll 1
    while ((chunk & ~3) * 32 < p.positions) {
      Left left;
      make_left(loader.values(), left);
      start(left, weights + step * kStepBytes, sum);
      loader.request(place);
      wgmma_wait<0>();
      if (++step < p.steps) continue;
      store(sum, chunk * 32);
      clear(sum);
      step = 0, chunk += Traits::kWarps;
    }
  }

  __device__ __forceinline__ static void clear(Sums& sum) {
#pragma unroll
    for (int i = 0; i < (kFloat32 ? 2 : 1) * 8 * kTiles; ++i) {
      sum[i / (8 * kTiles)][i / (4 * kTiles) % 2][i / 4 % kTiles][i % 4] = 0;
    }
  }

  __device__ __forceinline__ static void make_left(const HeadsRight& values, Left& left) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // Positions j and j + 1 are rows lane / 4 and lane / 4 + 8 of a product.
      const uint32_t word = values.word[j / 2 % 2][j / 4 * 2 + j % 2];
      if constexpr (kFloat32) {
        float high, low;
        split_tf32_rounded(__uint_as_float(word), high, low);
        left.high[j / 4][j % 4] = __float_as_uint(high);
        left.low[j / 4][j % 4] = heads_round_tf32(__float_as_uint(low));
      } else {
        left.high[j / 4][j % 4] = Traits::kPrecision == HeadsPrecision::kTf32 ? heads_round_tf32(word) : word;
      }
    }
  }

  // Float32: leading halves by leading halves, and by themselves the small products, since the matrix unit truncates.
  __device__ __forceinline__ static void start(const Left& left, uint32_t weights, Sums& sum) {
    const uint64_t columns = heads_box_operand(weights, Traits::kAllColumns * 16);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      heads_box_start<T, kTiles>(sum[0][m], left.high[m], columns);
      if constexpr (kFloat32) {
        heads_box_start<T, kTiles>(sum[1][m], left.high[m], columns + Traits::kColumns);
        heads_box_start<T, kTiles>(sum[1][m], left.low[m], columns);
      }
    }
    wgmma_commit();
  }

  // The products of the warp's chunk that begins at `first`.
  __device__ __forceinline__ void store(const Sums& sum, int first) const {
    if (first >= p.positions) return;
    const int lane = threadIdx.x % 32;
    float* const products = reinterpret_cast<float*>(shared) + first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int pair = n * 8 + lane % 4 * 2 + c;
        if (pair >= p.pairs) continue;
        float value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          value[j] = sum[0][j / 2][n][j % 2 * 2 + c];
          if constexpr (kFloat32) value[j] += sum[1][j / 2][n][j % 2 * 2 + c];
        }
        float* const to = products + pair * p.pitch;
        if constexpr (Traits::kMode != HeadsBoxMode::kPixels) {
          *reinterpret_cast<float4*>(to + lane / 4 * 4) = make_float4(value[0], value[1], value[2], value[3]);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[lane / 4 + 8 * j] = value[j];
        }
      }
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kWarps * 32, 1) heads_box_kernel(const __grid_constant__ HeadsBoxParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ HeadsBoxPlace place;
  HeadsBoxKernel<Traits>(p, shared, place).run();
#endif
}

}  // namespace fastconvt::cuda
