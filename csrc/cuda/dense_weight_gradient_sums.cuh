// What blocks of the weight's gradient have summed: partial sums in the order of the weight, and the gradient.
#pragma once

#include "dense_gradient_product.cuh"

namespace fastconvt::cuda {

// What a block sums: input channels of a block, output channels of a chunk, taps of a block.
struct DenseKind {
  int group, block, chunk, tap[3];

  __device__ DenseKind(const DenseParams& p, int index) {
    find_taps(p, index, tap);
    chunk = index % p.chunks;
    index /= p.chunks;
    block = index % p.in_blocks;
    group = index / p.in_blocks;
  }
};

// Element `element` by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ T dense_weight_gradient_at(const DenseParams& p, int element) {
  const int kw = element % p.kernel[2];
  element /= p.kernel[2];
  const int kh = element % p.kernel[1];
  element /= p.kernel[1];
  const int kd = element % p.kernel[0];
  element /= p.kernel[0];
  const int out = element % p.grad.channels, in = element / p.grad.channels;
  const int group = in / p.input.channels, channel = in - group * p.input.channels;
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

template <typename T>
__device__ __forceinline__ void store_weight_gradient(const DenseParams& p, int element, float sum) {
  static_cast<T*>(p.output)[element] =
      is_finite(sum) ? from_accumulator<T>(sum) : dense_weight_gradient_at<T>(p, element);
}

// The sums of part `split`, in the order of the weight.
template <typename T>
__device__ __forceinline__ float* partial_sums(const DenseParams& p, int split) {
  if (sizeof(T) == 4 && split == 0) return static_cast<float*>(p.output);
  return static_cast<float*>(p.workspace) + (split - (sizeof(T) == 4 ? 1 : 0)) * p.weight_elements;
}

// A warp's sums, of which a thread has the first row's and column's and others 8 apart, into a block's rows of input
// channels.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void leave_sums(const DenseParams& p, int first_row, int first_column, float* room,
                                           const DenseSums<kRows, kColumns>& sums) {
  constexpr int kUnit = kGranule<T>;
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const int row = first_row + i * 8, unit = row / kUnit, e = row % kUnit, plane = unit / taps;
    if (plane >= p.chunk_planes) continue;
    float* const to = room + (p.runs > 1 ? row : (plane * kUnit + e) * taps + unit - plane * taps);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      to[(first_column + n * 8) * p.sum_row] = sums[i / 2][n][i % 2 * 2];
      to[(first_column + n * 8 + 1) * p.sum_row] = sums[i / 2][n][i % 2 * 2 + 1];
    }
  }
}

// Stores a block's rows, by threads that are neighbours along the weight.
template <typename T>
__device__ __forceinline__ void store_sums(const DenseParams& p, const DenseKind& kind, int split, int columns,
                                           const float* room) {
  constexpr int kUnit = kGranule<T>, kThreads = kDenseConsumers<T>;
  const int width = p.axis[2].taps * p.runs, taps = p.axis[0].taps * p.axis[1].taps * width;
  const int channels = p.chunk_planes * (p.runs > 1 ? 1 : kUnit), count = channels * taps;
  const int lanes = min(kThreads, (count + 31) / 32 * 32), shares = kThreads / lanes, share = threadIdx.x / lanes;
  if (share >= shares) return;
  const int kernel = p.kernel[0] * p.kernel[1] * p.kernel[2], row = p.grad.channels * kernel;
  const int first = kind.block * columns, exist = min(columns, p.input.channels - first);
  float* const partial = partial_sums<T>(p, split);
#pragma unroll 1
  for (int i = threadIdx.x - share * lanes; i < count; i += lanes) {
    const int out = i / taps;
    int tap = i - out * taps;
    const int kw = kind.tap[2] * p.runs + tap % width;
    tap /= width;
    const int kh = kind.tap[1] + tap % p.axis[1].taps, kd = kind.tap[0] + tap / p.axis[1].taps;
    const int out_channel = kind.chunk * channels + out;
    if (out_channel >= p.grad.channels || kd >= p.kernel[0] || kh >= p.kernel[1] || kw >= p.kernel[2]) continue;
    int element = (kind.group * p.input.channels + first) * row + out_channel * kernel +
                  (kd * p.kernel[1] + kh) * p.kernel[2] + kw + share * row;
#pragma unroll 4
    for (int column = share; column < exist; column += shares, element += shares * row) {
      const float sum = room[column * p.sum_row + i];
      if (p.splits == 1) {
        store_weight_gradient<T>(p, element, sum);
      } else {
        partial[element] = sum;
      }
    }
  }
}

constexpr int kDenseReduceThreads = 256;

// Adds the parts: each element by `shares` threads.
template <typename T>
__global__ void __launch_bounds__(kDenseReduceThreads)
    dense_weight_reduction_kernel(const __grid_constant__ DenseParams p, int shares) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ double shared[kDenseReduceThreads];
  const int elements = kDenseReduceThreads / shares, share = threadIdx.x / elements;
  const int element = blockIdx.x * elements + threadIdx.x - share * elements;
  wait_for_previous_grid();
  double sum = 0;
  if (element < p.weight_elements) {
#pragma unroll 4
    for (int split = share; split < p.splits; split += shares) sum += partial_sums<T>(p, split)[element];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || element >= p.weight_elements) return;
  for (int k = 1; k < shares; ++k) sum += shared[threadIdx.x + k * elements];
  store_weight_gradient<T>(p, element, static_cast<float>(sum));
#endif
}

}  // namespace fastconvt::cuda
