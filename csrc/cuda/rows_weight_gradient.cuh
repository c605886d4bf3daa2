// The gradients of rows (1D and 2D) with respect to weight and bias, the weight's on matrix units:
//
//   grad_weight[ci, co, kh, kw] = sum over n, y, x of input[ci, y, x] * grad_output[co, j, i],
//
// j = y * stride - padding + kh * dilation along the height, i likewise along the width. The taps kh of one phase (a
// class: first, first + tap_step, ...) meet the same rows: j(q) = q * stride + first * dilation - padding, and tap
// number i of the class takes the input row y = q - i * offset_step there. A block keeps one class and walks down q:
// one row of the output's gradient enters a ring of stages, one input row a ring of slots. The product of a row is (co,
// kw) by positions times positions by (tap, ci). A warp takes one of the block's groups and a share of the positions,
// and owns all sums of these. Other warps do nothing but copy.
#pragma once

#include "rows_weight_gradient_walk.cuh"

namespace fastconvt::cuda {

template <typename T, RowsOperands kOperands, int kRows, int kColumns>
struct WeightGradientSums {
  float sum[kRows][kColumns][4] = {};

  // Adds `steps` times 8 positions. The pointers are this lane's first elements. What moves on is the same in all
  // lanes, so that it needs no arithmetic of theirs.
  __device__ __forceinline__ void add(const T* const (&grad)[kRows][2], const T* const (&input)[kColumns], int stride,
                                      int steps) {
    constexpr int kPair = kRows <= 2 ? 2 : 1;  // what registers allow
    int step = 0;
#pragma unroll 1
    for (; step + kPair <= steps; step += kPair) add_steps<kPair>(grad, input, stride, step);
    if (kPair > 1 && step < steps) add_steps<1>(grad, input, stride, step);
  }

  // The matrix unit sums the small products of all kSteps steps first.
  template <int kSteps>
  __device__ __forceinline__ void add_steps(const T* const (&grad)[kRows][2], const T* const (&input)[kColumns],
                                            int stride, int first) {
    constexpr bool kSplit = kOperands == RowsOperands::kSplit;
    const int first_moved = first * 8 * stride * static_cast<int>(sizeof(T));
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
        const int moved = first_moved + i / 2 * 4 * stride * static_cast<int>(sizeof(T));
        const T* element = reinterpret_cast<const T*>(reinterpret_cast<const char*>(grad[row][i % 2]) + moved);
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
  for (int e = threadIdx.x; e < p.groups * block.ins * block.outs * block.taps * kernel_width;
       e += kWeightGradientThreads) {
    int index = e;
    const int kw = index % kernel_width;
    index /= kernel_width;
    const int tap = index % block.taps;
    index /= block.taps;
    const int co = index % block.outs;
    index /= block.outs;
    const int ci = index % block.ins, group = index / block.ins;
    const int row = co * kernel_width + kw,
              column = tap * p.tile_in + ci;  // of the product
    const int place =
        ((row / 16 * kColumns + column / 8) * 4 + row % 16 / 8 * 2 + column % 2) * 32 + row % 8 * 4 + column % 8 / 2;
    float sum = 0;
    for (int warp = group; warp < kRowsWarps; warp += p.groups) sum += saved[warp * kSums + place];
    const int64_t channels =
        (static_cast<int64_t>(block.group + group) * p.in_channels + block.in + ci) * p.out_channels + block.out + co;
    partial[(channels * p.height.kernel + block.first_tap + tap * p.height.tap_step()) * kernel_width + kw] = sum;
  }
}

// What the other warps do.
template <RowsOperands kOperands, int kRows, int kColumns, typename T>
__device__ __forceinline__ void add_rows(const RowsWeightGradientParams& p, const WeightGradientBlock& block,
                                         const WeightGradientRings<T>& rings,
                                         WeightGradientSums<T, kOperands, kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // This lane's rows (co, kw) and columns (tap, ci) of the product; those in excess repeat the first one. An offset is
  // packed with the skew of the channel, relative to the group's first one.
  constexpr int kSkewBits = 3, kSlotShift = 20;
  const int group = warp % p.groups;  // of the block's
  const int steps = p.positions * p.groups / (8 * kRowsWarps);
  const int first_position = warp / p.groups * steps * 8;
  int packed_row[kRows][2], packed_column[kColumns];
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const int row = i * 8 + lane / 4;
    int co = row / p.width.kernel, kw = row - co * p.width.kernel;
    if (co >= p.tile_out) co = kw = 0;
    const int offset = co * p.grad_pitch + kw * p.width.dilation;
    packed_row[i / 2][i % 2] = offset << kSkewBits | skew_of(p.grad, co * static_cast<unsigned>(p.grad.channel));
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = i * 8 + lane / 4;
    const int tap = column / p.tile_in, ci = column - tap * p.tile_in;
    const int slots_back = tap < block.taps ? tap * p.height.offset_step() : 0;
    packed_column[i] = slots_back << kSlotShift | ci * p.input_pitch << kSkewBits |
                       skew_of(p.input, ci * static_cast<unsigned>(p.input.channel));
  }
  const int input_offset = group * rings.input_elements / p.groups + first_position + lane % 4;
  const int grad_offset = group * rings.grad_elements / p.groups + (first_position + lane % 4) * p.width.stride;
  const unsigned grad_index =
      memory_index(rings.grad) + group * p.out_channels * static_cast<unsigned>(p.grad.channel) +
      (block.first_tap * p.height.dilation - p.height.padding) * static_cast<unsigned>(p.grad.row) - p.width.padding;
  const unsigned input_index =
      memory_index(rings.input) + group * p.in_channels * static_cast<unsigned>(p.input.channel);

  int stage = 0, slot = 0;
  for (RowWalk walk(p, block); walk.left > 0; walk.next(p, block)) {
    meet();
    if (walk.sums()) {
      const unsigned grad_at = grad_index + walk.batch * static_cast<unsigned>(p.grad.batch) +
                               walk.q * p.height.stride * static_cast<unsigned>(p.grad.row) +
                               walk.segment * p.positions * p.width.stride;
      const unsigned input_at = input_index + walk.batch * static_cast<unsigned>(p.input.batch) +
                                walk.q * static_cast<unsigned>(p.input.row) + walk.segment * p.positions;
      const T* rows[kRows][2];
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        const int packed = packed_row[i / 2][i % 2];
        rows[i / 2][i % 2] = rings.stages + stage * rings.grad_elements + grad_offset + (packed >> kSkewBits) +
                             skew_of(p.grad, grad_at + packed);
      }
      const T* columns[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int slots_back = packed_column[i] >> kSlotShift;
        const int offset = packed_column[i] % (1 << kSlotShift);
        const int from = slot - slots_back + (slot < slots_back ? p.input_slots : 0);
        const unsigned index = input_at + offset - slots_back * static_cast<unsigned>(p.input.row);
        columns[i] =
            rings.inputs + from * rings.input_elements + input_offset + (offset >> kSkewBits) + skew_of(p.input, index);
      }
      sums.add(rows, columns, p.width.stride, steps);
    }
    if (++stage == p.stages) stage = 0;
    if (++slot == p.input_slots) slot = 0;
  }
}

template <typename T, RowsOperands kOperands, int kRows, int kColumns>
__global__ void __launch_bounds__(kWeightGradientThreads, kWeightGradientBlocks)
    rows_weight_gradient_kernel(const __grid_constant__ RowsWeightGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  const WeightGradientBlock block(p, blockIdx.x);
  const WeightGradientRings<T> rings(p, block, shared);
  float* saved = reinterpret_cast<float*>(shared);
  if (threadIdx.x >= kRowsThreads) {
    copy_rows(p, block, rings);
    meet();
  } else {
    WeightGradientSums<T, kOperands, kRows, kColumns> sums;
    add_rows(p, block, rings, sums);
    meet();  // everyone has done with the rings
    sums.save(saved + threadIdx.x / 32 * kRows * kColumns * 128 + threadIdx.x % 32);
  }
  meet();
  int index;  // found out again, so that no register holds it or what follows from it
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  store_partial<kRows, kColumns>(p, WeightGradientBlock(p, index), saved);
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
  const int64_t co = element % p.out_channels,
                ci = element / p.out_channels;  // ci counts over all groups
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
