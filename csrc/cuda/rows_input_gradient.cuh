// The gradient of rows (1D and 2D) with respect to the input, on matrix units:
//
//   grad_input[ci, y, x] = sum over co, kh, kw of grad_output[co, j, i] * weight[ci, co, kh, kw],
//
// j = y * stride - padding + kh * dilation along the height, i likewise along the width. A block stages one row j of
// some channels at a time. A fragment of it, 16 positions x by 8 (kw, co) pairs, is loaded and split once and meets all
// the rows y of a warp that have a tap there, 8 input channels wide. The weights, split, stay in shared memory for the
// life of a persistent block.
#pragma once

#include "rows_input_gradient_walk.cuh"

namespace fastconvt::cuda {

// Weights as fragments: for each (kh, chunk, step) and lane, b0 and b1 high, then low.
template <typename T, RowsOperands kOperands>
__device__ __forceinline__ void stage_weights(const RowsInputGradientParams& p, const InputGradientTile& tile,
                                              float4* fragments) {
  const int taps = p.height.kernel * p.width.kernel;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.weight_words / 4; i += kRowsThreads) {
    const int lane = i % 32;
    int step = i / 32;
    const int kh = step / (p.chunks * p.steps);
    step -= kh * p.chunks * p.steps;
    const int chunk = step / p.steps;
    step -= chunk * p.steps;
    const int ci = tile.channel + lane / 4;
    const T* weight = static_cast<const T*>(p.weight) +
                      static_cast<int64_t>(tile.group * p.in_channels + ci) * p.group_outputs * taps +
                      kh * p.width.kernel;
    Tf32Pair pair[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = step * 8 + half * 4 + lane % 4;
      const int kw = k / p.channels;
      const int co = chunk * p.channels + k - kw * p.channels - ci / p.group_inputs * p.group_outputs;
      const bool exists = ci < p.in_channels && co >= 0 && co < p.group_outputs && kw < p.width.kernel;
      pair[half] = split_tf32<kOperands>(exists ? to_accumulator(weight[co * taps + kw]) : 0.f);
      pair[half].low = split_tf32<RowsOperands::kRound>(__uint_as_float(pair[half].low)).high;
    }
    fragments[i] = make_float4(__uint_as_float(pair[0].high), __uint_as_float(pair[1].high),
                               __uint_as_float(pair[0].low), __uint_as_float(pair[1].low));
  }
}

using InputGradientSums = float[kInputGradientRows][kInputGradientTiles][4];

// A lane's part of what one or two steps read.
template <typename T, int kSteps>
using RawGradients = T[kSteps][kInputGradientTiles][4];

template <int kSteps, typename T>
__device__ __forceinline__ void load_steps(const T* const (&column)[2], int stride, const int2* offsets,
                                           RawGradients<T, kSteps>& raw) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int2 offset = offsets[step * 4];
#pragma unroll
    for (int i = 0; i < 4 * kInputGradientTiles; ++i) {
      const T* first = i % 4 < 2 ? column[0] + offset.x : column[1] + offset.y;
      raw[step][i / 4][i % 4] = first[(i / 4 * 16 + i % 2 * 8) * stride];
    }
  }
}

// Adds kSteps steps to the sums of the rows y in kMask. The matrix unit sums the small products of all of them first.
// prefetch() runs when `raw` is free.
template <RowsOperands kOperands, int kMask, int kSteps, typename T, typename Prefetch>
__device__ __forceinline__ void add_steps(RawGradients<T, kSteps>& raw,
                                          const float4* const (&fragments)[kInputGradientRows], Prefetch&& prefetch,
                                          InputGradientSums& sum) {
  constexpr bool kSplit = kOperands == RowsOperands::kSplit;
  float4 b[kSteps][kInputGradientRows];
#pragma unroll
  for (int i = 0; i < kSteps * kInputGradientRows; ++i) {
    const int step = i / kInputGradientRows, y = i % kInputGradientRows;
    if (kMask >> y & 1) b[step][y] = fragments[y][step * 32];
  }
  uint32_t high[kSteps][kInputGradientTiles][4], low[kSteps][kInputGradientTiles][4];
#pragma unroll
  for (int i = 0; i < kSteps * kInputGradientTiles * 4; ++i) {
    const int step = i / (4 * kInputGradientTiles), tile = i / 4 % kInputGradientTiles;
    const Tf32Pair pair = split_tf32<kOperands>(to_accumulator(raw[step][tile][i % 4]));
    high[step][tile][i % 4] = pair.high;
    low[step][tile][i % 4] = pair.low;
  }
  prefetch();
  float part[kInputGradientRows][kInputGradientTiles][4] = {};
#pragma unroll
  for (int i = kSplit ? 0 : 2 * kSteps; i < 3 * kSteps; ++i) {
    const int term = i < 2 * kSteps ? i % 2 : 2, step = i < 2 * kSteps ? i / 2 : i - 2 * kSteps;
#pragma unroll
    for (int y = 0; y < kInputGradientRows; ++y) {
      if (!(kMask >> y & 1)) continue;
      const float4 weight = b[step][y];
#pragma unroll
      for (int tile = 0; tile < kInputGradientTiles; ++tile) {
        mma_tf32(part[y][tile], term == 0 ? low[step][tile] : high[step][tile],
                 __float_as_uint(term == 1 ? weight.z : weight.x), __float_as_uint(term == 1 ? weight.w : weight.y),
                 part[y][tile]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kInputGradientRows * kInputGradientTiles * 4; ++i) {
    const int y = i / (4 * kInputGradientTiles), tile = i / 4 % kInputGradientTiles;
    if (kMask >> y & 1) sum[y][tile][i % 4] += part[y][tile][i % 4];
  }
}

// Adds one staged row to the sums of the rows y in kMask. `column` is this lane's first position, in the channels of
// its first and of its second pairs (kw, co), which `offsets` has; fragments[y] are its weights.
template <RowsOperands kOperands, int kMask, typename T>
__device__ __forceinline__ void add_row(const T* const (&column)[2], int stride, const int2* offsets,
                                        const float4* const (&first_fragments)[kInputGradientRows], int steps,
                                        InputGradientSums& sum) {
  const float4* fragments[kInputGradientRows];
#pragma unroll
  for (int y = 0; y < kInputGradientRows; ++y) fragments[y] = first_fragments[y];
  RawGradients<T, 2> raw;
  if (steps >= 2) load_steps<2>(column, stride, offsets, raw);
#pragma unroll 1
  for (; steps >= 2; steps -= 2) {
    offsets += 2 * 4;
    add_steps<kOperands, kMask, 2, T>(
        raw, fragments,
        [&] {
          if (steps >= 4) load_steps<2>(column, stride, offsets, raw);
        },
        sum);
#pragma unroll
    for (int y = 0; y < kInputGradientRows; ++y) fragments[y] += 2 * 32;
  }
  if (steps == 1) {
    RawGradients<T, 1> last;
    load_steps<1>(column, stride, offsets, last);
    add_steps<kOperands, kMask, 1, T>(last, fragments, [] {}, sum);
  }
}

// Calls function(std::integral_constant<int, mask>), uniform in the warp, unless the mask is 0. All four rows at once
// would not fit the registers.
template <int kMask = 1, typename Function>
__device__ __forceinline__ void dispatch_mask(int mask, Function&& function) {
  if constexpr (kMask == (1 << kInputGradientRows) - 1) {
    if (mask != kMask) return;
    function(std::integral_constant<int, kMask & 3>{});
    function(std::integral_constant<int, kMask & ~3>{});
  } else {
    if (mask == kMask) return function(std::integral_constant<int, kMask>{});
    dispatch_mask<kMask + 1>(mask, function);
  }
}

// One element by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ T input_gradient_at(const RowsInputGradientParams& p, int batch, int64_t channel, int y,
                                            int x) {
  const int taps = p.height.kernel * p.width.kernel;
  const T* weight = static_cast<const T*>(p.weight) + channel * p.group_outputs * taps;
  const T* grad = static_cast<const T*>(p.grad.data) + batch * p.grad.batch +
                  channel / p.group_inputs * p.group_outputs * p.grad.channel;
  double sum = 0;
  for (int kh = 0; kh < p.height.kernel; ++kh) {
    const int64_t j = static_cast<int64_t>(y) * p.height.stride - p.height.padding + kh * p.height.dilation;
    if (j < 0 || j >= p.height.out) continue;
    for (int kw = 0; kw < p.width.kernel; ++kw) {
      const int64_t i = static_cast<int64_t>(x) * p.width.stride - p.width.padding + kw * p.width.dilation;
      if (i < 0 || i >= p.width.out) continue;
      for (int64_t co = 0; co < p.group_outputs; ++co) {
        const float g = to_accumulator(grad[co * p.grad.channel + j * p.grad.row + i * p.grad.column]);
        const float w = to_accumulator(weight[co * taps + kh * p.width.kernel + kw]);
        sum += static_cast<double>(g) * w;
      }
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// Stores the sums of a warp whose first input is (y, x). What is not finite is made again, by the definition.
template <typename T>
__device__ __forceinline__ void store_sums(const RowsInputGradientParams& p, const InputGradientTile& tile, int y,
                                           int x, const InputGradientSums& sum) {
  const int lane = threadIdx.x % 32;
  const int channel = tile.channel + lane % 4 * 2;
  x += lane / 4;
  const int64_t group_channel = static_cast<int64_t>(tile.group) * p.in_channels + channel;
  T* first = static_cast<T*>(p.output) + tile.batch * p.grad_input.batch + group_channel * p.grad_input.channel +
             y * p.grad_input.axis[1] + x * p.grad_input.axis[2];
  const int rows = min(kInputGradientRows, static_cast<int>(p.height.in) - y);
  const int channels = p.in_channels - channel;
  const int columns = static_cast<int>(p.width.in) - x;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kInputGradientRows; ++i) {
    T* row = first + i * p.grad_input.axis[1];
#pragma unroll
    for (int c = 0; c < 2; ++c, row += p.grad_input.channel) {
#pragma unroll
      for (int k = 0; k < 2 * kInputGradientTiles; ++k) {
        if (i >= rows || c >= channels || 8 * k >= columns) continue;
        const float value = sum[i][k / 2][k % 2 * 2 + c];
        finite = finite && isfinite(value);
        row[8 * k * p.grad_input.axis[2]] = from_accumulator<T>(value);
      }
    }
  }
  if (finite) return;
#pragma unroll 1
  for (int i = 0; i < rows * 2 * 2 * kInputGradientTiles; ++i) {
    const int k = i % (2 * kInputGradientTiles), c = i / (2 * kInputGradientTiles) % 2;
    const int row = i / (4 * kInputGradientTiles);
    T* element = first + row * p.grad_input.axis[1] + c * p.grad_input.channel + 8 * k * p.grad_input.axis[2];
    if (c < channels && 8 * k < columns && !isfinite(to_accumulator(*element))) {
      *element = input_gradient_at<T>(p, tile.batch, group_channel + c, y + row, x + 8 * k);
    }
  }
}

template <typename T, RowsOperands kOperands>
__global__ void __launch_bounds__(kRowsThreads, 3)
    rows_input_gradient_kernel(const __grid_constant__ RowsInputGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) float shared[];
  float4* fragments = reinterpret_cast<float4*>(shared);
  int2* offsets = reinterpret_cast<int2*>(shared + p.weight_words);
  T* stages = reinterpret_cast<T*>(offsets + p.steps * 4);
  const int stage_elements = p.channels * p.pitch;
  int2* taps = reinterpret_cast<int2*>(stages + p.stages * stage_elements);
  int* reaches = reinterpret_cast<int*>(taps + p.max_rows * p.rows / kInputGradientRows);

  if (threadIdx.x < 32) {
    const int count = list_rows(p, reaches, taps);
    if (threadIdx.x == 0) reaches[p.max_rows] = count;
  }
  for (int k = threadIdx.x; k < p.steps * 8; k += kRowsThreads) {  // lane % 4 reads pairs k and k + 4 of a step
    const int kw = k / p.channels;
    const int offset = kw < p.width.kernel ? k % p.channels * p.pitch + kw * p.width.dilation : 0;
    reinterpret_cast<int*>(offsets)[k / 8 * 8 + k % 4 * 2 + k % 8 / 4] = offset;
  }
  __syncthreads();
  const RowList list{reaches[p.max_rows], reaches, taps};

  InputGradientCursor<T> ahead(p, list);
  int ahead_stage = 0;
  const auto stage_next = [&] {
    if (ahead.index < p.tiles) {
      ahead.stage(p, list, stages + ahead_stage * stage_elements);
      ahead.next(p, list);
      if (++ahead_stage == p.stages) ahead_stage = 0;
    }
    commit_copies();
  };
  for (int i = 1; i < p.stages; ++i) stage_next();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_x = warp % p.warps_x, warp_y = warp / p.warps_x;
  const int warps_y = kRowsWarps / p.warps_x;
  const int position = (warp_x * 32 + lane / 4) * p.width.stride;
  int stage = 0, group = -1, channel = -1;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const InputGradientTile tile(p, index);
    if (tile.group != group || tile.channel != channel) {
      __syncthreads();  // everyone has done with the weights before
      stage_weights<T, kOperands>(p, tile, fragments);
      __syncthreads();
      group = tile.group;
      channel = tile.channel;
    }
    // In memory, modulo 2^32: the first column of row 0 of channel lane % 4.
    const unsigned channel_stride = p.grad.channel;
    const unsigned first_index =
        memory_index(tile.grad<T>(p)) + tile.x * p.width.stride - p.width.padding + lane % 4 * channel_stride;
    InputGradientSums sum = {};
    for (int row = 0; row < list.count; ++row) {
      int j;
      if (!RowList::in_range(p, tile.y, list.reach[row], j)) continue;
      const int2 own = list.taps[row * warps_y + warp_y];
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        wait_for_groups(p.stages - 2);
        __syncthreads();
        stage_next();
        const float4* own_fragments[kInputGradientRows];
#pragma unroll
        for (int y = 0; y < kInputGradientRows; ++y) {
          own_fragments[y] = fragments + ((own.x >> 8 * y & 0xff) * p.chunks + chunk) * p.steps * 32 + lane;
        }
        const T* column = stages + stage * stage_elements + position;
        const unsigned index = first_index + j * p.grad.row + chunk * p.channels * channel_stride;
        const int2 skew = {skew_of(p.grad, index), skew_of(p.grad, index + 4 * channel_stride)};
        const T* const columns[2] = {column + skew.x, column + skew.y};
        const auto add = [&](auto mask) {
          add_row<kOperands, mask>(columns, p.width.stride, offsets + lane % 4, own_fragments, p.steps, sum);
        };
        dispatch_mask(own.y, add);
        if (++stage == p.stages) stage = 0;
      }
    }
    store_sums<T>(p, tile, tile.y + warp_y * kInputGradientRows, tile.x + warp_x * 32, sum);
  }
#endif
}

}  // namespace fastconvt::cuda
