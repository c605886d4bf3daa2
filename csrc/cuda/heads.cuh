// Transposed convolution with few output channels a group, by scatter and fold (csrc/core/heads.h): a warp multiplies
// 32 positions of the box by all (channel, tap) pairs of the block, straight from what its lanes loaded; the
// products of all warps meet in shared memory, where whole output rows are folded and stored.
#pragma once

#include "heads_fold.cuh"
#include "heads_load.cuh"
#include "heads_repair.cuh"

namespace fastconvt::cuda {

template <typename T_, HeadsPrecision kPrecision_, int kRowTiles_, bool kPlanes_>
struct HeadsTraits {
  using Element = T_;
  static constexpr HeadsPrecision kPrecision = kPrecision_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr bool kPlanes = kPlanes_;
  // Steps that are loaded ahead: what registers allow.
  static constexpr int kAhead = 2;
  // So that a thread has at most 128 registers, or 168.
  static constexpr int kMaxThreads = kRowTiles > 4 ? 384 : 512;
  static constexpr int kStepChannels = 32 / sizeof(T_);
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class Traits>
class HeadsKernel {
  using T = typename Traits::Element;
  static constexpr int kRowTiles = Traits::kRowTiles;
  using Sums = float[kRowTiles][4][4];  // by tile of 16 pairs, position in a quad, register

  const HeadsParams& p;
  unsigned char* const shared;
  const int lane;
  const int group;
  HeadsFold<T> fold;
  HeadsLoader<T, Traits::kPlanes, Traits::kAhead> loader;
  int place[2];  // of the products of the lane's two quads; -1: nowhere

 public:
  __device__ HeadsKernel(const HeadsParams& p, unsigned char* shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        group(blockIdx.x % p.groups),
        fold(p, shared, group),
        loader(p, group) {}

  __device__ void run() {
    HeadsItem item;
    // The first pass, before everything else, only starts the loads.
    int index = blockIdx.x - gridDim.x, step = 0, turn = 0;
    item.first = item.begin = item.end = 0;
    bool started = false;
    while (true) {
      const bool has_products = !started || (step >= 0 && step < p.march_in);
      if (has_products) make_products(started);
      if (started) {
        fold.run(step, turn, has_products);
        if (++turn == p.march_turns) turn = 0;
      } else {
        stage_weights();
        fold.prepare();
      }
      if (++step < item.end && started) continue;
      index += gridDim.x;
      if (index >= p.items) break;
      item.find(p, index);
      const bool clipped = p.of_mid.is_clipped(item.mid) || p.of_width.is_clipped(item.width);
      const bool clear = !started || (clipped && !fold.is_of(item));
      if (clear || p.march_warm > 0) __syncthreads();  // everyone has folded
      if (clear) clear_products();
      find_places(item);
      fold.begin(item);
      step = item.first, turn = 0, started = true;
    }
    // Inputs that do not exist are zeros, which only finite weights leave without effect, and halves of float32 may be
    // inf: both show in a sum that is not finite.
    if (!__syncthreads_or(fold.is_careful())) return;
    for (index = blockIdx.x; index < p.items; index += gridDim.x) {
      item.find(p, index);
      heads_repair<T>(p, item, group);
    }
  }

 private:
  // Only of quads that are read and lie among the positions that are held.
  __device__ void find_places(const HeadsItem& item) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const HeadsQuad quad(p, threadIdx.x / 32 * 8 + lane % 4 * 2 + i);
      const int row = p.of_mid.read_shift(item.mid) + quad.row,
                column = p.of_width.read_shift(item.width) + quad.column;
      const bool exists = quad.exists(p) && column < p.of_width.held &&
                          p.of_mid.read_begin(item.mid) + quad.row < p.of_mid.read_end(item.mid);
      place[i] = exists ? quad.batch * p.box_pitch + row * p.of_width.held + column : -1;
    }
  }

  // Zeros where no pair or channel exists.
  __device__ void stage_weights() const {
    constexpr int kHalves = 4 / sizeof(T);  // weights of a word
    uint32_t* const words = reinterpret_cast<uint32_t*>(shared);
    const T* const from = static_cast<const T*>(p.weight) + static_cast<int64_t>(group) * p.group_in * p.pairs;
#pragma unroll 4
    for (int i = threadIdx.x; i < p.steps * kRowTiles * 128; i += blockDim.x) {
      const int fragment = i / 128, step = fragment / kRowTiles;
      const int pair = (fragment - step * kRowTiles) * 16 + i % 2 * 8 + i / 16 % 8;
      const int channel = step * Traits::kStepChannels + (i / 4 % 4 * 2 + i / 2 % 2) * kHalves;
      T value[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const bool exists = pair < p.pairs && channel + h < p.group_in;
        value[h] = exists ? __ldg(from + (channel + h) * p.pairs + pair) : T{};
      }
      if constexpr (sizeof(T) == 2) {
        words[i] = two_halves(value[0], value[1]);
      } else {
        words[i] = Traits::kPrecision == HeadsPrecision::kTf32 ? to_tf32(value[0]) : __float_as_uint(value[0]);
      }
    }
  }

  __device__ void clear_products() const {
    float* const products = reinterpret_cast<float*>(shared + p.products);
    for (int i = threadIdx.x; i < p.pairs * p.pitch + 32; i += blockDim.x) products[i] = 0;
  }

  __device__ __forceinline__ void make_products(bool started) {
    Sums sum;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][t][i] = 0;
    uint32_t weights = shared_address(shared) + lane * 16;
#pragma unroll 1
    for (int step = 0; step < (started ? p.steps : 1); step += Traits::kAhead) {
      loader.advance();
#pragma unroll
      for (int i = 0; i < Traits::kAhead; ++i, weights += kRowTiles * 512) {
        if (started && step + i < p.steps) add_step(loader.step(i), weights, sum);
        loader.request(i);
      }
    }
    if (!started) return;
    __syncthreads();  // everyone has folded
    store(sum);
    __syncthreads();
  }

  __device__ __forceinline__ void add_step(const HeadsRight& right, uint32_t weights, Sums& sum) const {
    if constexpr (Traits::kPrecision == HeadsPrecision::kFloat32) {
      add_step_float32(right, weights, sum);
    } else {
      HeadsRight rounded = right;
      if constexpr (Traits::kPrecision == HeadsPrecision::kTf32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) rounded.word[i / 4][i % 4] = heads_round_tf32(right.word[i / 4][i % 4]);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 a = heads_load(weights + m * 512);
        const uint32_t left[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          if constexpr (sizeof(T) == 4) {
            heads_multiply_tf32(sum[m][t], left, rounded.word[0][t], rounded.word[1][t]);
          } else {
            heads_multiply_16<T>(sum[m][t], left, rounded.word[0][t], rounded.word[1][t]);
          }
        }
      }
    }
  }

  // Three products of halves for one, the small ones first; sums go on in float32, since the tensor core truncates.
  __device__ __forceinline__ void add_step_float32(const HeadsRight& right, uint32_t weights, Sums& sum) const {
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float h, l;
      split_tf32(__uint_as_float(right.word[i / 4][i % 4]), h, l);
      high[i / 4][i % 4] = __float_as_uint(h), low[i / 4][i % 4] = __float_as_uint(l);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const uint4 a = heads_load(weights + m * 512);
      const uint32_t word[4] = {a.x, a.y, a.z, a.w};
      uint32_t left_high[4], left_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float h, l;
        split_tf32_rounded(__uint_as_float(word[i]), h, l);
        left_high[i] = __float_as_uint(h), left_low[i] = __float_as_uint(l);
      }
#pragma unroll
      for (int first = 0; first < 4; first += 2) {
        float part[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) heads_start_tf32(part[t], left_low, high[0][first + t], high[1][first + t]);
#pragma unroll
        for (int t = 0; t < 2; ++t) heads_multiply_tf32(part[t], left_high, low[0][first + t], low[1][first + t]);
#pragma unroll
        for (int t = 0; t < 2; ++t) heads_multiply_tf32(part[t], left_high, high[0][first + t], high[1][first + t]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[m][first + i / 4][i % 4] += part[i / 4][i % 4];
      }
    }
  }

  // A lane has both quads of its two columns, in 16 pairs two rows of each.
  __device__ __forceinline__ void store(const Sums& sum) const {
    float* const products = reinterpret_cast<float*>(shared + p.products);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (place[i] < 0) continue;
      float* const to = products + place[i];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int pair = m * 16 + h * 8 + lane / 4;
          if (pair >= p.pairs) continue;
          *reinterpret_cast<float4*>(to + pair * p.pitch) =
              make_float4(sum[m][0][2 * h + i], sum[m][1][2 * h + i], sum[m][2][2 * h + i], sum[m][3][2 * h + i]);
        }
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1) heads_kernel(const __grid_constant__ HeadsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  HeadsKernel<Traits>(p, shared).run();
#endif
}

}  // namespace fastconvt::cuda
