// What blocks of the weight's gradient have summed comes together, in float64.
#pragma once

#include "dense_weight_gradient.cuh"

namespace fastconvt::cuda {

// One element by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ T dense_weight_gradient_at(const DenseParams& p, int group, int channel, int out, int kd,
                                                   int kh, int kw) {
  const int64_t out_stride = p.run_dilation > 0 ? p.grad.plane : p.grad.element;
  const T* const grad = static_cast<const T*>(p.grad.data) + group * p.grad.group + out * out_stride;
  const T* const input = static_cast<const T*>(p.input.data) + group * p.input.group + channel * p.input.element;
  const int shift_z = kd * p.axis[0].dilation - p.axis[0].padding,
            shift_y = kh * p.axis[1].dilation - p.axis[1].padding;
  const int shift_x = kw * (p.axis[2].dilation / p.runs) - p.axis[2].padding;
  double sum = 0;
  for (int n = 0; n < p.batch; ++n) {
    for (int z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = static_cast<int64_t>(z) * p.axis[0].stride + shift_z;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = static_cast<int64_t>(y) * p.axis[1].stride + shift_y;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        for (int x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = static_cast<int64_t>(x) * p.axis[2].stride + shift_x;
          if (at_x < 0 || at_x >= p.axis[2].out) continue;
          const T g = grad[n * p.grad.batch + at_z * p.grad.along[0] + at_y * p.grad.along[1] + at_x * p.grad.along[2]];
          const T v = input[n * p.input.batch + static_cast<int64_t>(z) * p.input.along[0] +
                            static_cast<int64_t>(y) * p.input.along[1] + static_cast<int64_t>(x) * p.input.along[2]];
          sum += static_cast<double>(to_accumulator(g)) * static_cast<double>(to_accumulator(v));
        }
      }
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

constexpr int kDenseReduceSlots = 32, kDenseReduceThreads = 256;

// Adds the splits of kDenseReduceSlots slots: four sums of a lane each.
template <typename T>
__global__ void __launch_bounds__(kDenseReduceThreads)
    dense_weight_reduction_kernel(const __grid_constant__ DenseParams p, int kinds, int kRows, int kColumns) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int kShares = kDenseReduceThreads / kDenseReduceSlots, kUnit = kGranule<T>;
  __shared__ double shared[kShares][4][kDenseReduceSlots];
  const int slots = p.warps_m * p.warps_n * kRows * kColumns * 32;  // of a kind
  const int64_t all = static_cast<int64_t>(kinds) * slots;
  const int slot_in_block = threadIdx.x % kDenseReduceSlots, share = threadIdx.x / kDenseReduceSlots;
  int64_t slot = static_cast<int64_t>(blockIdx.x) * kDenseReduceSlots + slot_in_block;  // slots are multiples of 32
  const float4* const partial = static_cast<const float4*>(p.workspace) + slot;
  wait_for_previous_grid();
  double sum[4] = {};
#pragma unroll 4
  for (int split = share; split < p.splits; split += kShares) {
    const float4 s = partial[split * all];
    sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) shared[share][i][slot_in_block] = sum[i];
  __syncthreads();
  if (threadIdx.x >= 4 * kDenseReduceSlots) return;
  const int i = threadIdx.x / kDenseReduceSlots;
  double total = 0;
#pragma unroll
  for (int k = 0; k < kShares; ++k) total += shared[k][i][slot_in_block];
  const DenseKind kind(p, static_cast<int>(slot / slots));
  int index = static_cast<int>(slot % slots);
  const int lane = index % 32;
  index /= 32;
  const int n = index % kColumns, m = index / kColumns % kRows, warp = index / (kColumns * kRows);
  const int column = (warp % p.warps_n * kColumns + n) * 8 + lane % 4 * 2 + i % 2;
  const int row = (warp / p.warps_n * kRows + m) * 16 + i / 2 * 8 + lane / 4;
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
  const int unit = row / kUnit, e = row % kUnit, plane = unit / taps;
  int tap = unit - plane * taps;
  const int run = kind.tap[2] + tap % p.axis[2].taps;
  tap /= p.axis[2].taps;
  const int kh = kind.tap[1] + tap % p.axis[1].taps, kd = kind.tap[0] + tap / p.axis[1].taps;
  const int kw = p.runs > 1 ? run * kUnit + e : run;
  const int channel = kind.block * p.warps_n * kColumns * 8 + column;
  const int out = p.runs > 1 ? kind.chunk * p.chunk_planes + plane : (kind.chunk * p.chunk_planes + plane) * kUnit + e;
  if (plane >= p.chunk_planes || channel >= p.input.channels || out >= p.grad.channels || kd >= p.kernel[0] ||
      kh >= p.kernel[1] || kw >= p.kernel[2]) {
    return;
  }
  const int64_t element =
      (((static_cast<int64_t>(kind.group * p.input.channels + channel) * p.grad.channels + out) * p.kernel[0] + kd) *
           p.kernel[1] +
       kh) *
          p.kernel[2] +
      kw;
  static_cast<T*>(p.output)[element] = is_finite(static_cast<float>(total))
                                           ? from_accumulator<T>(static_cast<float>(total))
                                           : dense_weight_gradient_at<T>(p, kind.group, channel, out, kd, kh, kw);
#endif
}

}  // namespace fastconvt::cuda
