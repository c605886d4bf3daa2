// A warp's products: 64 rows by kPositions positions, 32 bytes of input channels a step.
#pragma once

#include "pixel_shuffle_weights.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// To the nearest TF32 number: the unit would truncate.
__device__ __forceinline__ void pixel_shuffle_round_input(uint32_t& x) {
  asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
}

// sum = left * right + start.
template <typename T>
__device__ __forceinline__ void pixel_shuffle_multiply(float (&sum)[4], const uint32_t (&left)[4],
                                                       const uint32_t (&right)[2], const float (&start)[4]) {
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  }
}

template <class Traits>
class PixelShuffleProduct {
  using T = typename Traits::T;
  static constexpr int kTilesM = Traits::kTilesM, kTilesN = Traits::kTilesN;

 public:
  using Sums = float[kTilesM][kTilesN][4];

  // `first` is the warp's first position in a tile; column c of a product is position `column(c)` of its eight.
  __device__ PixelShuffleProduct(const PixelShuffleParams& p, int first, bool apart)
      : step_bytes(p.tile.tiles_m * 512), pitch(p.tile.input_pitch) {
    const int lane = threadIdx.x % 32;
    if constexpr (Traits::kChannelsLast) {
      right_lane = (first + lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
    } else if constexpr (Traits::kSize == 2) {
      right_lane = (lane % 16) * pitch + (first + lane / 16 * 8) * 2;
    } else {
      const int column = lane / 4;
      right_lane = lane % 4 * pitch + (first + (apart ? column / 2 + column % 2 * 4 : column)) * 4;
    }
  }

  struct Operands {
    uint32_t left[kTilesM][4], right[kTilesN][2];
  };

  // Adds `steps` steps to the sums, the first of them already loaded. `weights` are the lane's in the first step and of
  // the first tile, `inputs` the warp's stage. The next step's operands are loaded before this one's products;
  // load_next() loads those of the next stage, if there is one.
  template <class LoadNext>
  __device__ __forceinline__ void add(uint32_t weights, uint32_t inputs, int steps, Operands& even, Sums& sum,
                                      LoadNext&& load_next) const {
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
      Operands odd;
      if (step + 1 < steps) load(weights + step_bytes, inputs + input_step(), odd);
      round_inputs(even);
      multiply(even, sum);
      weights += 2 * step_bytes, inputs += 2 * input_step();
      if (step + 2 < steps) {
        load(weights, inputs, even);
      } else {
        load_next();
      }
      if (step + 1 < steps) {
        round_inputs(odd);
        multiply(odd, sum);
      }
    }
  }

  // The same with three products of TF32 terms, the small ones first, two steps at a time into sums of their own that
  // float32 adds: the unit truncates where it adds.
  __device__ __forceinline__ void add_split(uint32_t weights, uint32_t inputs, int steps, Sums& sum) const {
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
      Sums part = {};
      multiply_split(weights, inputs, part);
      if (step + 1 < steps) multiply_split(weights + step_bytes, inputs + input_step(), part);
      weights += 2 * step_bytes, inputs += 2 * input_step();
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j)
#pragma unroll
          for (int q = 0; q < 4; ++q) sum[i][j][q] += part[i][j][q];
    }
  }

  __device__ __forceinline__ void load(uint32_t weights, uint32_t inputs, Operands& o) const {
    inputs += right_lane;
    load_left(weights, o.left);
#pragma unroll
    for (int j = 0; j < kTilesN; j += 2) {
      if constexpr (Traits::kChannelsLast) {
        pixel_shuffle_matrices<false>(o.right[j][0], o.right[j][1], o.right[j + 1][0], o.right[j + 1][1],
                                      inputs + j * 8 * pitch);
      } else if constexpr (Traits::kSize == 2) {
        pixel_shuffle_matrices<true>(o.right[j][0], o.right[j][1], o.right[j + 1][0], o.right[j + 1][1],
                                     inputs + j * 16);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          o.right[j + i / 2][i % 2] = pixel_shuffle_load(inputs + (j + i / 2) * 32 + i % 2 * 4 * pitch);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static void load_left(uint32_t weights, uint32_t (&left)[kTilesM][4]) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) pixel_shuffle_load(left[i], weights + i * 512);
  }
  __device__ __forceinline__ int input_step() const {
    return Traits::kChannelsLast ? 32 : Traits::kStepChannels * pitch;
  }

  __device__ __forceinline__ static void round_inputs(Operands& o) {
    if constexpr (Traits::kPrecision == PixelShufflePrecision::kTf32) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j)
        pixel_shuffle_round_input(o.right[j][0]), pixel_shuffle_round_input(o.right[j][1]);
    }
  }

  __device__ __forceinline__ static void multiply(const Operands& o, Sums& sum) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) pixel_shuffle_multiply<T>(sum[i][j], o.left[i], o.right[j], sum[i][j]);
  }

  __device__ __forceinline__ void multiply_split(uint32_t weights, uint32_t inputs, Sums& part) const {
    Operands high, low;
    load(weights, inputs, high);
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) split(high.left[i][q], low.left[i][q]);
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int q = 0; q < 2; ++q) split(high.right[j][q], low.right[j][q]);
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) pixel_shuffle_multiply<T>(part[i][j], low.left[i], high.right[j], part[i][j]);
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) pixel_shuffle_multiply<T>(part[i][j], high.left[i], low.right[j], part[i][j]);
    multiply(high, part);
  }

  __device__ __forceinline__ static void split(uint32_t& high, uint32_t& low) {
    float terms[2];
    split_tf32_rounded(__uint_as_float(high), terms[0], terms[1]);
    high = __float_as_uint(terms[0]), low = __float_as_uint(terms[1]);
  }

  const int step_bytes, pitch;
  int right_lane;
};

#endif

}  // namespace fastconvt::cuda
