// The weight's gradient from contiguous tensors as they lie, device side: see core/few_weight_gradient.h. Rows are
// input channels, columns (output channel, tap), the inner dimension positions of all images. What taps meet is
// gathered element by element, asynchronously. Code is short, since it comes from memory the first time.
#pragma once

#include "device/copy_groups.cuh"
#include "device/numeric.cuh"
#include "device/tf32.cuh"
#include "few_weight_gradient_params.h"
#include "gemm_weight_gradient_store.cuh"

namespace fastconvt::cuda {

constexpr int kFewWeightThreads = 256, kFewWeightStages = 3;
constexpr int kFewWeightRowPitch = kFewWeightPositions + 4, kFewWeightColumnPitch = kFewWeightColumns + 8;
constexpr int kFewWeightRowFloats = kFewWeightRows * kFewWeightRowPitch;
constexpr int kFewWeightStageFloats = kFewWeightRowFloats + kFewWeightPositions * kFewWeightColumnPitch;

// Elements side by side, zeros where nothing is.
template <int kCount>
__device__ __forceinline__ void gather(uint32_t target, const float* base, int offset, bool exists) {
  copy_or_zero<kCount * 4>(target, base + (exists ? offset : 0), exists);
}

// Of a position, or of a tap: where its outputs begin, along the axes and in elements.
struct FewWeightPlace {
  int at[3], offset;
};

__device__ __forceinline__ FewWeightPlace place_of_position(const FewWeightParams& p, int& position) {
  const int image = p.positions(position);
  int rest = position;
  int x[3];
  x[0] = p.plane(rest), x[1] = p.width(rest), x[2] = rest;
  FewWeightPlace place;
  place.offset = image * p.out_batch;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    place.at[a] = x[a] * p.step[a] - p.padding[a];
    place.offset += place.at[a] * p.out_pitch[a];
  }
  position += image * p.in_batch;  // now where the input is
  return place;
}

__device__ __forceinline__ FewWeightPlace place_of_column(const FewWeightParams& p, int column, int group) {
  int rest = min(column, p.columns - 1);
  const int channel = p.taps(rest);
  int tap[3];
  tap[0] = p.tap_plane(rest), tap[1] = p.tap_width(rest), tap[2] = rest;
  FewWeightPlace place;
  place.offset = (group * p.group_out + channel) * p.out_channel;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    place.at[a] = tap[a] * p.dilation[a];
    place.offset += place.at[a] * p.out_pitch[a];
  }
  if (column >= p.columns) place.at[0] = -(1 << 30);  // nothing
  return place;
}

// A stage: a lane has a position of all rows that its warp copies, and four columns, or two pairs, of some positions.
struct FewWeightCopies {
  FewWeightPlace column[4];
  int first_row, rows;  // of the input's channels

  __device__ __forceinline__ void copy(const FewWeightParams& p, int first, uint32_t stage) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int position = first + lane;
    const bool exists = position < p.all;
    position = min(position, p.all - 1);
    FewWeightPlace place = place_of_position(p, position);
    if (!exists) place.at[0] = -(1 << 30);
    uint32_t to = stage + (warp * kFewWeightRowPitch + lane) * 4;
    int from = position + (first_row + warp) * p.in_channel;
#pragma unroll 4
    for (int row = warp; row < kFewWeightRows; row += 8) {
      gather<1>(to, p.input, from, exists && row < rows);
      to += 8 * kFewWeightRowPitch * 4, from += 8 * p.in_channel;
    }
    to = stage + (kFewWeightRowFloats + warp * kFewWeightColumnPitch + lane) * 4;
#pragma unroll 2
    for (int k = warp; k < kFewWeightPositions; k += 8) {
      int at[3];
#pragma unroll
      for (int a = 0; a < 3; ++a) at[a] = __shfl_sync(~0u, place.at[a], k);
      const int offset = __shfl_sync(~0u, place.offset, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p.gathers_pairs && i > 1) break;
        bool inside = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
          inside = inside && static_cast<unsigned>(at[a] + column[i].at[a]) < static_cast<unsigned>(p.out[a]);
        }
        if (p.gathers_pairs) {
          gather<2>(to + lane * 4 + i * 256, p.grad, offset + column[i].offset, inside);
        } else {
          gather<1>(to + i * 128, p.grad, offset + column[i].offset, inside);
        }
      }
      to += 8 * kFewWeightColumnPitch * 4;
    }
  }
};

// Products of eight positions: 64 rows and 32 columns of a warp. In float32 as three products of parts.
template <bool kSplit>
__device__ __forceinline__ void few_multiply(float (&sum)[4][4][4], uint32_t rows, uint32_t columns) {
  float b[4][2], b_low[4][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(columns + (h * 4 * kFewWeightColumnPitch + n * 8) * 4));
      if (kSplit) {
        split_tf32_rounded(x, b[n][h], b_low[n][h]);
      } else {
        b[n][h] = __uint_as_float(rounded_tf32(__float_as_uint(x)));
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    float a[4], low[4];
    load_matrices(a, rows + m * 16 * kFewWeightRowPitch * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kSplit) {
        split_tf32_rounded(a[i], a[i], low[i]);
      } else {
        a[i] = __uint_as_float(rounded_tf32(__float_as_uint(a[i])));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (kSplit) {
        multiply_tf32(sum[m][n], low, b[n][0], b[n][1]);
        multiply_tf32(sum[m][n], a, b_low[n][0], b_low[n][1]);
      }
      multiply_tf32(sum[m][n], a, b[n][0], b[n][1]);
    }
  }
}

// The bias's gradient: a warp has a channel.
__device__ __forceinline__ void few_bias(const FewWeightParams& p, int block) {
  const int channel = block * kFewWeightBiasChannels + static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (channel >= p.out_channels) return;
  double sum = 0;
#pragma unroll 1
  for (int image = 0; image < p.batch; ++image) {
    const float* const from = p.grad + image * p.out_batch + channel * p.out_channel;
#pragma unroll 4
    for (int i = lane; i < p.out_positions; i += 32) sum += static_cast<double>(__ldg(from + i));
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) p.bias[channel] = static_cast<float>(sum);
}

// Makes what is not finite again.
__device__ __noinline__ void few_repair(const FewWeightParams& p, int group, int first_row, int first_column) {
  for (int i = threadIdx.x; i < kFewWeightRows * kFewWeightColumns; i += kFewWeightThreads) {
    const int row = first_row + i / kFewWeightColumns, column = first_column + i % kFewWeightColumns;
    if (row >= p.group_in || column >= p.columns) continue;
    float* const to = p.output + (static_cast<int64_t>(group) * p.group_in + row) * p.columns + column;
    if (is_finite(*to)) continue;
    const int taps = p.taps.divisor;
    *to = gemm_weight_gradient_at<float>(p.definition, group * p.group_in + row, column / taps, column % taps);
  }
}

template <bool kSplit>
__global__ void __launch_bounds__(kFewWeightThreads, kSplit ? 1 : 2)
    few_weight_gradient_kernel(const __grid_constant__ FewWeightParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ float4 few_weight_stages[];
  const uint32_t stages = shared_address(few_weight_stages);
  int rest = static_cast<int>(blockIdx.x);
  if (rest >= p.weight_blocks) return few_bias(p, rest - p.weight_blocks);
  const int both = p.column_blocks(rest), first_column = rest * kFewWeightColumns;
  rest = both;
  const int group = p.row_blocks(rest), first_row = rest * kFewWeightRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  FewWeightCopies copies;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = p.gathers_pairs ? i % 2 * 64 + lane * 2 : i * 32 + lane;
    copies.column[i] = place_of_column(p, first_column + column, group);
  }
  copies.first_row = group * p.group_in + first_row, copies.rows = p.group_in - first_row;
  const auto copy = [&](int chunk) {
    const int first = chunk * kFewWeightPositions;
    if (first < p.all) copies.copy(p, first, stages + chunk % kFewWeightStages * (kFewWeightStageFloats * 4));
    commit_copies();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < kFewWeightStages - 1; ++chunk) copy(chunk);
  // Of this lane in fragments.
  const uint32_t rows = ((warp % 2 * 64 + lane % 16) * kFewWeightRowPitch + lane / 16 * 4) * 4;
  const uint32_t columns = (kFewWeightRowFloats + lane % 4 * kFewWeightColumnPitch + warp / 2 * 32 + lane / 4) * 4;
  float sum[4][4][4] = {};
#pragma unroll 1
  for (int chunk = 0; chunk * kFewWeightPositions < p.all; ++chunk) {
    wait_for_groups(kFewWeightStages - 2);
    __syncthreads();
    copy(chunk + kFewWeightStages - 1);
    const uint32_t stage = stages + chunk % kFewWeightStages * (kFewWeightStageFloats * 4);
#pragma unroll 1
    for (int k = 0; k < kFewWeightPositions; k += 16) {
      float part[4][4][4];  // matrix units truncate where they add
      if (kSplit) {
#pragma unroll
        for (int i = 0; i < 64; ++i) part[i / 16][i / 4 % 4][i % 4] = 0;
      }
#pragma unroll
      for (int half = 0; half < 16; half += 8) {
        few_multiply<kSplit>(kSplit ? part : sum, stage + rows + (k + half) * 4,
                             stage + columns + (k + half) * (kFewWeightColumnPitch * 4));
      }
      if (kSplit) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
      }
    }
  }
  float probe = 0;
  const int row = first_row + warp % 2 * 64 + lane / 4, column = first_column + warp / 2 * 32 + lane % 4 * 2;
  float* to = p.output + (static_cast<int64_t>(group) * p.group_in + row) * p.columns + column;
#pragma unroll
  for (int m = 0; m < 8; ++m, to += int64_t{8} * p.columns) {
    if (row + m * 8 >= p.group_in) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float x = sum[m / 2][n][m % 2 * 2], y = sum[m / 2][n][m % 2 * 2 + 1];
      probe = fmaf(x, 0.f, fmaf(y, 0.f, probe));
      if (p.pairs) {
        if (column + n * 8 < p.columns) *reinterpret_cast<float2*>(to + n * 8) = make_float2(x, y);
      } else {
        if (column + n * 8 < p.columns) to[n * 8] = x;
        if (column + n * 8 + 1 < p.columns) to[n * 8 + 1] = y;
      }
    }
  }
  if (__syncthreads_or(probe != 0)) few_repair(p, group, first_row, first_column);
#endif
}

}  // namespace fastconvt::cuda
