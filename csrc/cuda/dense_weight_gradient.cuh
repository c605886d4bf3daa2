// The weight's gradient as an implicit matrix product: rows are granules of output channels or taps, columns input
// channels, the inner dimension is positions. Half of the warps stage both tensors, box by box, the others multiply.
// Blocks own partial sums; a second kernel adds them, in float64.
#pragma once

#include "dense_gradient_copy.cuh"
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

template <typename T>
__device__ __forceinline__ void produce_dense_weight(const DenseParams& p, const DenseTables& tables, uint32_t barriers,
                                                     const DenseKind& kind, int split, int columns, char* stages) {
  const int thread = threadIdx.x - kDenseConsumers<T>;
  const int first = kind.chunk * p.chunk_planes;
  const T* const grads = static_cast<const T*>(p.grad.data) + kind.group * p.grad.group + first * p.grad.plane;
  const int channels = p.grad.channels - first * p.grad.plane_channels;
  const T* const inputs = static_cast<const T*>(p.input.data) + kind.group * p.input.group +
                          static_cast<int64_t>(kind.block) * columns * p.input.element;
  const int input_channels = p.input.channels - kind.block * columns;
  int stage = 0, round = 0;
  for (int index = split; index < p.tiles; index += p.splits) {
    const DenseBox box(p, index);
    int at[3];
    for (int a = 0; a < 3; ++a) {
      at[a] = box.at[a] * p.axis[a].stride - p.axis[a].padding + kind.tap[a] * p.axis[a].dilation;
    }
    if (round > 0) dense_wait(kDenseEmpty + stage, kDenseThreads<T>);
    char* const target = stages + stage * p.stage_bytes;
    stage_gradients<T>(p, tables, grads + box.batch * p.grad.batch, channels, at[0], at[1], at[2], thread, target);
    const T* const from = inputs + box.batch * p.input.batch;
    const auto find = [&](int i, int& offset, unsigned& mask, int& place) {
      const int at = tables.boxes[i];
      const int x = box.at[2] + (at & 1023), y = box.at[1] + (at >> 10 & 1023), z = box.at[0] + (at >> 20);
      const bool exists = at >= 0 && x < p.axis[2].in && y < p.axis[1].in && z < p.axis[0].in;
      offset = z * p.input.along[0] + y * p.input.along[1] + x * p.input.along[2];
      mask = exists ? (1u << kGranule<T>)-1 : 0;
      place = i * 16;
    };
    copy_tensor<T>(p.input, from, p.positions, columns / kGranule<T>, input_channels, thread,
                   target + p.chunk_planes * p.plane_bytes, p.input_plane_bytes, find);
    arrive_full(barriers + 8 * stage);
    if (++stage == p.stages) stage = 0, round = 1;
  }
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Where a warp's operands are: positions' granules, its rows' for position 0, the first columns' inputs.
template <typename T, int kRows>
struct DensePositions {
  const int* places;
  uint32_t rows[kRows][sizeof(T) / 2];
  uint32_t stage, inputs;
  int plane_bytes;  // of inputs
};

// Adds the products of 16 positions.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void add_positions(const DensePositions<T, kRows>& o, int step,
                                              DenseSums<kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32;
  const uint32_t at = o.stage + o.places[step * 16 + lane % 8 + lane / 16 * 8];
  const uint32_t input = o.inputs + (step * 16 + lane % 16) * 16;
  uint32_t b[(kColumns + 1) / 2][4];
#pragma unroll
  for (int n = 0; n < kColumns; n += 2) {
    load_dense<true>(b[n / 2], input + (kColumns == 1 ? 0 : n + lane / 16) * o.plane_bytes);
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    uint32_t a[4];
    load_dense<true>(a, at + o.rows[m][0]);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      multiply_dense<T>(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// The same for kSteps times 8 positions of 32 bits, `apart` steps from each other; float32 takes three products for
// one, the small ones first. The unit truncates where it adds, so that long sums are made outside of it.
template <bool kSplit, int kSteps, int kRows, int kColumns>
__device__ __forceinline__ void add_words(const DensePositions<float, kRows>& o, int step, int apart,
                                          DenseSums<kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32;
  uint32_t at[kSteps][2], b[kSteps][kColumns][2], rest[kSteps][kColumns][2];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int position = (step + k * apart) * 8 + lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at[k][half] = o.stage + o.places[position + 4 * half];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const uint32_t word = load_word(o.inputs + (position + 4 * half) * 16 + 2 * n * o.plane_bytes);
        if constexpr (kSplit) {
          split_dense(word, b[k][n][half], rest[k][n][half]);
        } else {
          b[k][n][half] = nearest_tf32(word);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    uint32_t a[kSteps][4], low[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = load_word(at[k][i / 2] + o.rows[m][i % 2]);
        if constexpr (kSplit) {
          split_dense(word, a[k][i], low[k][i]);
        } else {
          a[k][i] = push_tf32(word);
        }
      }
    }
    if constexpr (kSplit) {
      float part[kColumns][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], low[k], b[k][n][0], b[k][n][1]);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], a[k], rest[k][n][0], rest[k][n][1]);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], a[k], b[k][n][0], b[k][n][1]);
      }
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(sums[m][n], a[k], b[k][n][0], b[k][n][1]);
      }
    }
  }
}

// Adds a stage's steps first, first + apart, ...
template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
__device__ __forceinline__ void add_stage(const DensePositions<T, kRows>& o, int first, int apart, int count,
                                          DenseSums<kRows, kColumns>& sums) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll 1
    for (int step = first; step < count; step += apart) add_positions<T, kRows, kColumns>(o, step, sums);
  } else {
    constexpr bool kSplit = kPrecision == DensePrecision::kFloat32;
    int step = first;
#pragma unroll 1
    for (; step + apart < count; step += 2 * apart) add_words<kSplit, 2, kRows, kColumns>(o, step, apart, sums);
    if (step < count) add_words<kSplit, 1, kRows, kColumns>(o, step, apart, sums);
  }
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
__device__ __forceinline__ void consume_dense_weight(const DenseParams& p, const DenseTables& tables, uint32_t barriers,
                                                     int split, char* stages, float4* totals, float4* partial) {
  constexpr int kUnits = 16 / kGranule<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = p.warps_m * p.warps_n;
  const int warp_k = warp / warps, warp_mn = warp % warps, warp_n = warp_mn % p.warps_n, warp_m = warp_mn / p.warps_n;
  DensePositions<T, kRows> operands;
  operands.places = tables.places;
  operands.plane_bytes = p.input_plane_bytes;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int unit = (warp_m * kRows + m) * kUnits;
    if constexpr (sizeof(T) == 2) {
      operands.rows[m][0] = tables.steps[unit + lane / 8 % 2];
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) operands.rows[m][i] = tables.steps[unit + 2 * i + lane / 16] + lane / 4 % 4 * 4;
    }
  }
  // Of this lane's first column.
  uint32_t inputs = p.chunk_planes * p.plane_bytes + warp_n * (8 * kColumns / kGranule<T>)*p.input_plane_bytes;
  if constexpr (sizeof(T) == 4) inputs += lane / 16 * p.input_plane_bytes + lane / 4 % 4 * 4;
  const int steps = p.positions / kGranule<T> / 2;
  DenseSums<kRows, kColumns> sums = {};
  int stage = 0, parity = 0, until_flush = p.run;
  bool flushed = false;
  for (int index = split; index < p.tiles; index += p.splits) {
    wait_full(barriers + 8 * stage, parity);
    operands.stage = shared_address(stages + stage * p.stage_bytes);
    operands.inputs = operands.stage + inputs;
    add_stage<T, kPrecision, kRows, kColumns>(operands, warp_k, p.warps_k, steps, sums);
    dense_arrive(kDenseEmpty + stage, kDenseThreads<T>);
    if (++stage == p.stages) stage = 0, parity ^= 1;
    if constexpr (kPrecision == DensePrecision::kFloat32) {
      if (--until_flush != 0) continue;
      flush_dense<kRows, kColumns>(totals, !flushed, false, sums);
      flushed = true, until_flush = p.run;
    }
  }
  if constexpr (kPrecision == DensePrecision::kFloat32) {
    if (flushed) flush_dense<kRows, kColumns>(totals, false, true, sums);
  }
  if (p.warps_k > 1) {
    dense_wait(kDenseTeam,
               kDenseConsumers<T>);  // the room is that of the stages
    reduce_dense<kRows, kColumns>(warps, p.warps_k, warp_mn, warp_k, reinterpret_cast<float4*>(stages), sums);
  }
  if (warp_k > 0) return;
  partial += warp_mn * kRows * kColumns * 32 + lane;
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    const auto& s = sums[i / kColumns][i % kColumns];
    partial[i * 32] = make_float4(s[0], s[1], s[2], s[3]);
  }
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
__global__ void __launch_bounds__(kDenseThreads<T>, dense_gradient_blocks(sizeof(T)))
    dense_weight_gradient_kernel(const __grid_constant__ DenseParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char shared[];
  const DenseTables tables(p, shared);
  tables.fill(p);
  const uint32_t barriers = shared_address(shared);
  if (threadIdx.x == 0) init_full(barriers);
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
  for (int i = threadIdx.x; i < p.steps; i += kDenseThreads<T>) {
    const int plane = i / taps;
    tables.steps[i] = plane < p.chunk_planes ? plane * p.plane_bytes + DenseTables::tap_place(p, i - plane * taps) : 0;
  }
  __syncthreads();
  const int kinds = gridDim.x / p.splits, split = blockIdx.x / kinds, kind = blockIdx.x - split * kinds;
  char* const stages = shared + p.table_bytes;
  if (threadIdx.x >= kDenseConsumers<T>) {
    produce_dense_weight<T>(p, tables, barriers, DenseKind(p, kind), split, p.warps_n * kColumns * 8, stages);
  } else {
    const int64_t sums = p.warps_m * p.warps_n * kRows * kColumns * 32;
    consume_dense_weight<T, kPrecision, kRows, kColumns>(
        p, tables, barriers, split, stages,
        reinterpret_cast<float4*>(stages) - kRows * kColumns * kDenseConsumers<T> + threadIdx.x,
        static_cast<float4*>(p.workspace) + (static_cast<int64_t>(split) * kinds + kind) * sums);
  }
#endif
}

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
