// The gradients of rows (1D and 2D) with respect to weight and bias, the weight's on matrix units:
//
//   grad_weight[ci, co, kh, kw] = sum over n, y, x of input[ci, y, x] * grad_output[co, j, i],
//
// j = y * stride - padding + kh * dilation along the height, i likewise along the width. The taps kh of one phase (a
// class: first, first + tap_step, ...) meet the same rows: j(q) = q * stride + first * dilation - padding, and tap
// number i of the class takes the input row y = q - i * offset_step there. A block keeps one class and walks down q:
// one row of the output's gradient enters a ring of stages, one input row a ring of slots. The product of a row is (co,
// kw) by positions times positions by (tap, ci); a warp takes every fourth part of the positions and owns all sums.
#pragma once

#include "rows_gradient.cuh"

namespace fastconvt::cuda {

// Blocks of a multiprocessor: what registers allow.
constexpr int weight_gradient_blocks(int rows, int columns) { return rows > 2 && columns == 3 ? 2 : 3; }

struct RowsWeightGradientParams {
  AxisParams height, width;
  RowSource grad, input;
  float* partial;  // (splits, weight elements)
  void* output;
  int64_t weight_elements;
  int splits;
  int batch;
  int group_blocks;
  int in_channels, out_channels;  // of a group
  int segments;
  // The tile (RowsWeightGradientTile).
  int groups, positions, tile_out, tile_in, out_chunks, in_chunks, classes;
  int columns, grad_pitch, input_columns, input_pitch;
  int reach, stages, input_slots;
};

// What a block sums: output channels out .. out + outs - 1 and input channels in .. in + ins - 1 of p.groups groups,
// and the taps of a class.
struct WeightGradientBlock {
  int split, group, out, outs, in, ins;  // the first group
  int first_tap, taps;
  int begin, rows;  // its q: begin .. begin + rows - 1

  __device__ explicit WeightGradientBlock(const RowsWeightGradientParams& p) {
    int index = blockIdx.x;
    in = index % p.in_chunks * p.tile_in;
    index /= p.in_chunks;
    out = index % p.out_chunks * p.tile_out;
    index /= p.out_chunks;
    first_tap = index % p.classes;
    index /= p.classes;
    group = index % p.group_blocks * p.groups;
    split = index / p.group_blocks;
    ins = min(p.tile_in, p.in_channels - in);
    outs = min(p.tile_out, p.out_channels - out);
    taps = (p.height.kernel - 1 - first_tap) / p.height.tap_step() + 1;
    // 0 <= j(q) < out, and 0 <= q - i * offset_step < in for some tap.
    const int64_t shift = static_cast<int64_t>(p.height.padding) - first_tap * p.height.dilation;
    const int64_t first = shift > 0 ? (shift + p.height.stride - 1) / p.height.stride : 0;
    const int64_t end = p.height.out + shift > 0 ? (p.height.out + shift - 1) / p.height.stride + 1 : 0;
    begin = static_cast<int>(first);
    rows = static_cast<int>(
        max(int64_t{0}, min(end, p.height.in + (taps - 1) * static_cast<int64_t>(p.height.offset_step())) - first));
  }
};

// The walk of a block over its rows: down q, then over segments of the width, then over the batch. Each column begins
// `reach` - 1 steps early, with input rows alone.
struct RowWalk {
  int batch, segment;
  int q, first, end;  // sums from `first` on
  int64_t left;       // rows of this column and those after it

  __device__ RowWalk(const RowsWeightGradientParams& p, const WeightGradientBlock& block) {
    const int64_t all = static_cast<int64_t>(p.batch) * p.segments * block.rows;
    const int64_t from = all * block.split / p.splits;
    left = all * (block.split + 1) / p.splits - from;
    if (left == 0) return;
    const int64_t column = from / block.rows;
    batch = static_cast<int>(column / p.segments);
    segment = static_cast<int>(column - static_cast<int64_t>(batch) * p.segments);
    begin_column(p, block, block.begin + static_cast<int>(from - column * block.rows));
  }

  __device__ void begin_column(const RowsWeightGradientParams& p, const WeightGradientBlock& block, int from) {
    first = from;
    end = static_cast<int>(min(static_cast<int64_t>(block.begin) + block.rows, first + left));
    q = first - (p.reach - 1);
  }

  __device__ bool sums() const { return q >= first; }

  __device__ void next(const RowsWeightGradientParams& p, const WeightGradientBlock& block) {
    if (++q < end) return;
    left -= end - first;
    if (left == 0) return;
    if (++segment == p.segments) segment = 0, ++batch;
    begin_column(p, block, block.begin);
  }
};

template <typename T, RowsOperands kOperands, int kRows, int kColumns>
struct WeightGradientSums {
  float sum[kRows][kColumns][4] = {};

  // Adds `steps` times 8 positions: grad points at this lane's first one, input[column] too.
  __device__ __forceinline__ void add(const T* grad, const int (&offset)[kRows][2], const T* const (&input)[kColumns],
                                      int stride, int steps) {
    constexpr int kPair = kRows <= 2 ? 2 : 1;  // what registers allow
    int step = 0;
#pragma unroll 1
    for (; step + kPair <= steps; step += kPair) add_steps<kPair>(grad, offset, input, stride, step);
    if (kPair > 1 && step < steps) add_steps<1>(grad, offset, input, stride, step);
  }

  // The matrix unit sums the small products of all kSteps steps first.
  template <int kSteps>
  __device__ __forceinline__ void add_steps(const T* grad, const int (&offset)[kRows][2],
                                            const T* const (&input)[kColumns], int stride, int first) {
    constexpr bool kSplit = kOperands == RowsOperands::kSplit;
    grad += first * 8 * stride;
    Tf32Pair b[kSteps][kColumns][2];
#pragma unroll
    for (int i = 0; i < kSteps * kColumns * 2; ++i) {
      const int step = i / (2 * kColumns), column = i / 2 % kColumns;
      b[step][column][i % 2] = split_tf32<kOperands>(to_accumulator(input[column][(first + step) * 8 + i % 2 * 4]));
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        const T* element = grad + offset[row][i % 2] + (i / 2 * 4) * stride;
        const Tf32Pair pair = split_tf32<kOperands>(to_accumulator(*element));
        high[i / 4][i % 4] = pair.high;
        low[i / 4][i % 4] = pair.low;
      }
      float part[kColumns][4] = {};
#pragma unroll
      for (int i = kSplit ? 0 : 2 * kSteps; i < 3 * kSteps; ++i) {
        const int term = i < 2 * kSteps ? i % 2 : 2, step = i < 2 * kSteps ? i / 2 : i - 2 * kSteps;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          const Tf32Pair(&c)[2] = b[step][column];
          mma_tf32(part[column], term == 0 ? low[step] : high[step], term == 1 ? c[0].low : c[0].high,
                   term == 1 ? c[1].low : c[1].high, part[column]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) sum[row][i / 4][i % 4] += part[i / 4][i % 4];
    }
  }

  // To shared memory: this warp's place, [row][column][i][lane].
  __device__ __forceinline__ void save(float* place) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) place[((row * kColumns + column) * 4 + i) * 32] = sum[row][column][i];
      }
    }
  }
};

// Adds the warps' sums in their order and writes this block's share of the partial weight gradient.
template <int kRows, int kColumns>
__device__ __forceinline__ void store_partial(const RowsWeightGradientParams& p, const WeightGradientBlock& block,
                                              const float* saved) {
  constexpr int kSums = kRows * kColumns * 128;
  float* partial = p.partial + block.split * p.weight_elements;
  const int kernel_width = p.width.kernel;
  for (int e = threadIdx.x; e < p.groups * block.ins * block.outs * block.taps * kernel_width; e += kRowsThreads) {
    int index = e;
    const int kw = index % kernel_width;
    index /= kernel_width;
    const int tap = index % block.taps;
    index /= block.taps;
    const int co = index % block.outs;
    index /= block.outs;
    const int ci = index % block.ins, group = index / block.ins;
    const int row = co * kernel_width + kw, column = tap * p.tile_in + ci;  // of the product
    const int place =
        ((row / 16 * kColumns + column / 8) * 4 + row % 16 / 8 * 2 + column % 2) * 32 + row % 8 * 4 + column % 8 / 2;
    float sum = 0;
    for (int warp = group; warp < kRowsWarps; warp += p.groups) sum += saved[warp * kSums + place];
    const int64_t channels =
        (static_cast<int64_t>(block.group + group) * p.in_channels + block.in + ci) * p.out_channels + block.out + co;
    partial[(channels * p.height.kernel + block.first_tap + tap * p.height.tap_step()) * kernel_width + kw] = sum;
  }
}

template <typename T, RowsOperands kOperands, int kRows, int kColumns>
__global__ void __launch_bounds__(kRowsThreads, weight_gradient_blocks(kRows, kColumns))
    rows_weight_gradient_kernel(const __grid_constant__ RowsWeightGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  const int grad_channel = p.tile_out * p.grad_pitch, input_channel = p.tile_in * p.input_pitch;  // of one group
  const int grad_elements = p.groups * grad_channel, input_elements = p.groups * input_channel;
  T* stages = reinterpret_cast<T*>(shared);
  T* inputs = stages + p.stages * grad_elements;
  const WeightGradientBlock block(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const T* grad = static_cast<const T*>(p.grad.data) +
                  static_cast<int64_t>(block.group * p.out_channels + block.out) * p.grad.channel;
  const T* input = static_cast<const T*>(p.input.data) +
                   static_cast<int64_t>(block.group * p.in_channels + block.in) * p.input.channel;
  RowWalk ahead(p, block);
  int ahead_stage = 0, ahead_slot = 0;
  const auto stage_next = [&] {
    if (ahead.left > 0) {
      const int x = ahead.segment * p.positions, y = ahead.q;
      const bool exists = y >= 0 && y < p.height.in;
      stage_row(p.input,
                input + ahead.batch * p.input.batch + (exists ? static_cast<int64_t>(y) * p.input.row : int64_t{0}), x,
                p.input_columns, p.groups * p.tile_in, exists ? p.groups * block.ins : 0, p.input_pitch,
                inputs + ahead_slot * input_elements);
      if (ahead.sums()) {
        const int j = y * p.height.stride + block.first_tap * p.height.dilation - p.height.padding;
        stage_row(p.grad, grad + ahead.batch * p.grad.batch + static_cast<int64_t>(j) * p.grad.row,
                  x * p.width.stride - p.width.padding, p.columns, p.groups * p.tile_out, p.groups * block.outs,
                  p.grad_pitch, stages + ahead_stage * grad_elements);
      }
      ahead.next(p, block);
      if (++ahead_stage == p.stages) ahead_stage = 0;
      if (++ahead_slot == p.input_slots) ahead_slot = 0;
    }
    commit_copies();
  };
  for (int i = 1; i < p.stages; ++i) stage_next();

  // This lane's rows (co, kw) and columns (tap, ci) of the product; those in excess repeat the first one. Where the
  // group's first channel has the skew 0, a row has row_skew, packed with its offset, and a column column_skew.
  constexpr int kSkewBits = 3;
  const int group = warp % p.groups;  // of the block's
  const int steps = p.positions * p.groups / (8 * kRowsWarps);
  const int first_position = warp / p.groups * steps * 8;
  int packed_offset[kRows][2], slots_back[kColumns], input_offset[kColumns];
  unsigned column_skew[kColumns];
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const int row = i * 8 + lane / 4;
    int co = row / p.width.kernel, kw = row - co * p.width.kernel;
    if (co >= p.tile_out) co = kw = 0;
    const int offset = co * p.grad_pitch + kw * p.width.dilation;
    packed_offset[i / 2][i % 2] = offset << kSkewBits | skew_of(p.grad, co * static_cast<unsigned>(p.grad.channel));
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = i * 8 + lane / 4;
    const int tap = column / p.tile_in, ci = column - tap * p.tile_in;
    slots_back[i] = tap < block.taps ? tap * p.height.offset_step() : 0;
    input_offset[i] = group * input_channel + ci * p.input_pitch + first_position + lane % 4;
    column_skew[i] = ci * static_cast<unsigned>(p.input.channel) - slots_back[i] * static_cast<unsigned>(p.input.row);
  }
  const int grad_offset = group * grad_channel + (first_position + lane % 4) * p.width.stride;
  const unsigned grad_index =
      memory_index(grad) + group * p.out_channels * static_cast<unsigned>(p.grad.channel) +
      (block.first_tap * p.height.dilation - p.height.padding) * static_cast<unsigned>(p.grad.row) - p.width.padding;
  const unsigned input_index = memory_index(input) + group * p.in_channels * static_cast<unsigned>(p.input.channel);

  WeightGradientSums<T, kOperands, kRows, kColumns> sums;
  int stage = 0, slot = 0;
  for (RowWalk walk(p, block); walk.left > 0; walk.next(p, block)) {
    wait_for_groups(p.stages - 2);
    __syncthreads();
    stage_next();
    if (walk.sums()) {
      const unsigned grad_at = grad_index + walk.batch * static_cast<unsigned>(p.grad.batch) +
                               walk.q * p.height.stride * static_cast<unsigned>(p.grad.row) +
                               walk.segment * p.positions * p.width.stride;
      const unsigned input_at = input_index + walk.batch * static_cast<unsigned>(p.input.batch) +
                                walk.q * static_cast<unsigned>(p.input.row) + walk.segment * p.positions;
      int offset[kRows][2];
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        const int packed = packed_offset[i / 2][i % 2];
        offset[i / 2][i % 2] = (packed >> kSkewBits) + skew_of(p.grad, grad_at + packed);
      }
      const T* columns[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        int from = slot - slots_back[i];
        if (from < 0) from += p.input_slots;
        columns[i] = inputs + from * input_elements + input_offset[i] + skew_of(p.input, input_at + column_skew[i]);
      }
      sums.add(stages + stage * grad_elements + grad_offset, offset, columns, p.width.stride, steps);
    }
    if (++stage == p.stages) stage = 0;
    if (++slot == p.input_slots) slot = 0;
  }
  wait_for_groups(0);
  __syncthreads();
  float* saved = reinterpret_cast<float*>(shared);
  sums.save(saved + warp * kRows * kColumns * 128 + lane);
  __syncthreads();
  store_partial<kRows, kColumns>(p, block, saved);
#endif
}

// One element by the definition, where infinity and NaN meet only what they should: this thread's share of the
// positions.
template <typename T>
__device__ __forceinline__ double weight_gradient_share(const RowsWeightGradientParams& p, int64_t element, int thread,
                                                        int threads) {
  const int kw = static_cast<int>(element % p.width.kernel);
  element /= p.width.kernel;
  const int kh = static_cast<int>(element % p.height.kernel);
  element /= p.height.kernel;
  const int64_t co = element % p.out_channels, ci = element / p.out_channels;  // ci counts over all groups
  const T* input = static_cast<const T*>(p.input.data) + ci * p.input.channel;
  const T* grad = static_cast<const T*>(p.grad.data) + (ci / p.in_channels * p.out_channels + co) * p.grad.channel;
  double sum = 0;
  for (int64_t row = 0; row < p.batch * p.height.in; ++row) {
    const int64_t n = row / p.height.in, y = row - n * p.height.in;
    const int64_t j = y * p.height.stride - p.height.padding + kh * p.height.dilation;
    if (j < 0 || j >= p.height.out) continue;
    for (int64_t x = thread; x < p.width.in; x += threads) {
      const int64_t i = x * p.width.stride - p.width.padding + kw * p.width.dilation;
      if (i < 0 || i >= p.width.out) continue;
      const float a = to_accumulator(input[n * p.input.batch + y * p.input.row + x * p.input.column]);
      const float b = to_accumulator(grad[n * p.grad.batch + j * p.grad.row + i * p.grad.column]);
      sum += static_cast<double>(a) * b;
    }
  }
  return sum;
}

constexpr int kReduceElements = 32;  // of a block
constexpr int kReduceThreads = 8;    // that share one

template <typename T>
__global__ void __launch_bounds__(kReduceElements* kReduceThreads)
    rows_weight_reduction_kernel(const __grid_constant__ RowsWeightGradientParams p) {
  __shared__ double sums[kReduceThreads][kReduceElements];
  const int column = threadIdx.x % kReduceElements, share = threadIdx.x / kReduceElements;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kReduceElements;
  const int64_t element = first + column;
  double sum = 0;
  if (element < p.weight_elements) {
#pragma unroll 8
    for (int split = share; split < p.splits; split += kReduceThreads) {
      sum += p.partial[split * p.weight_elements + element];
    }
  }
  sums[share][column] = sum;
  __syncthreads();
  T* output = static_cast<T*>(p.output);
  bool again = false;
  if (share == 0 && element < p.weight_elements) {
    for (int other = 1; other < kReduceThreads; ++other) sum += sums[other][column];
    again = !isfinite(sum);
    output[element] = from_accumulator<T>(static_cast<float>(sum));
  }
  // The first warp knows which elements to make again; all threads share each.
  __shared__ unsigned repeated;
  if (share == 0) {
    const unsigned mask = __ballot_sync(0xffffffffu, again);
    if (column == 0) repeated = mask;
  }
  __syncthreads();
  for (unsigned mask = repeated; mask != 0; mask &= mask - 1) {
    const int64_t which = first + __ffs(mask) - 1;
    sums[share][column] = weight_gradient_share<T>(p, which, threadIdx.x, kReduceElements * kReduceThreads);
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0;
      for (int i = 0; i < kReduceElements * kReduceThreads; ++i)
        total += sums[i / kReduceElements][i % kReduceElements];
      output[which] = from_accumulator<T>(static_cast<float>(total));
    }
    __syncthreads();
  }
}

}  // namespace fastconvt::cuda
