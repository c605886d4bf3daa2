// The weight's gradient as an implicit matrix product: rows are granules of output channels or taps, columns input
// channels, the inner dimension is positions. Some warps stage both tensors, box by box, the others multiply.
// Blocks own partial sums, which a second kernel adds, in float64, where there are several.
#pragma once

#include "dense_gradient_copy.cuh"
#include "dense_gradient_product.cuh"
#include "dense_weight_gradient_sums.cuh"
#include "device/registers.cuh"

namespace fastconvt::cuda {

// Stages a box of inputs: granules of channels, position by position, or of neighbouring positions, as they lie in
// memory, channel by channel.
template <typename T>
__device__ __forceinline__ void stage_inputs(const DenseParams& p, const DenseTables& tables, const DenseBox& box,
                                             const T* inputs, int columns, int channels, int thread, char* target) {
  constexpr int kUnit = kGranule<T>;
  const auto find_position = [&](int i, int& offset) {
    const int at = tables.boxes[i];
    const int x = box.at[2] + (at & 1023), y = box.at[1] + (at >> 10 & 1023), z = box.at[0] + (at >> 20);
    offset = z * p.input.along[0] + y * p.input.along[1] + x * p.input.along[2];
    return at >= 0 && x < p.axis[2].in && y < p.axis[1].in && z < p.axis[0].in;
  };
  if (p.input_row_bytes > 0) {
    const int granules = p.positions / kUnit;  // a power of two
    const int granule = thread & (granules - 1), apart = p.producers / granules;
    int offset;
    const bool exists = find_position(granule * kUnit, offset);
    int channel = thread / granules;
    const T* from = inputs + offset + channel * p.input.element;
    uint32_t to = shared_address(target) + channel * p.input_row_bytes + granule * 16;
#pragma unroll 4
    for (; channel < columns; channel += apart, from += apart * p.input.element, to += apart * p.input_row_bytes) {
      const bool copied = exists && channel < channels;
      copy_or_zero<16>(to, copied ? from : inputs, copied);
    }
    return;
  }
  const auto find = [&](int i, int& offset, unsigned& mask, int& place) {
    mask = find_position(i, offset) ? kWholeGranule<T> : 0;
    place = i * 16;
  };
  copy_tensor<T>(p.input, inputs, p.positions, columns / kUnit, channels, thread, target, p.input_plane_bytes, find);
}

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
    if (round > 0) dense_wait(kDenseEmpty + stage, p.threads);
    char* const target = stages + stage * p.stage_bytes;
    stage_gradients<T>(p, tables, grads + box.batch * p.grad.batch, channels, at[0], at[1], at[2], thread, target);
    const T* const from = inputs + box.batch * p.input.batch;
    stage_inputs<T>(p, tables, box, from, columns, input_channels, thread, target + p.chunk_planes * p.plane_bytes);
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
  int row_bytes;    // of inputs; 0: they lie in planes
};

// Two blocks of eight columns of 16 neighbouring positions (32 bits: 8), from inputs in rows: `inputs` is what this
// lane loads of the first ones.
__device__ __forceinline__ void load_inputs(uint32_t inputs, int row_bytes, int step, int n, uint32_t (&both)[4]) {
  load_dense<false>(both, inputs + n * 8 * row_bytes + step * 32);
}

// Adds the products of 16 positions.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void add_positions(const DensePositions<T, kRows>& o, int step,
                                              DenseSums<kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32;
  const uint32_t at = o.stage + o.places[step * 16 + lane % 8 + lane / 16 * 8];
  const uint32_t input = o.inputs + (step * 16 + lane % 16) * 16;
  uint32_t b[(kColumns + 1) / 2][4];
  if (o.row_bytes > 0) {
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) load_inputs(o.inputs, o.row_bytes, step, n, b[n / 2]);
  } else {
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
      load_dense<true>(b[n / 2], input + (kColumns == 1 ? 0 : n + lane / 16) * o.plane_bytes);
    }
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
    uint32_t words[kColumns + 1][2];
    if (o.row_bytes > 0) {
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        uint32_t both[4];
        load_inputs(o.inputs, o.row_bytes, step + k * apart, n, both);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[n + i / 2][i % 2] = both[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        words[i / 2][i % 2] = load_word(o.inputs + (position + i % 2 * 4) * 16 + i / 2 * 2 * o.plane_bytes);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at[k][half] = o.stage + o.places[position + 4 * half];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if constexpr (kSplit) {
          split_dense(words[n][half], b[k][n][half], rest[k][n][half]);
        } else {
          b[k][n][half] = nearest_tf32(words[n][half]);
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
                                                     const DenseKind& kind, int split, char* stages, float4* totals) {
  constexpr int kUnits = 16 / kGranule<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = p.warps_m * p.warps_n;
  const int warp_k = warp / warps, warp_mn = warp % warps, warp_n = warp_mn % p.warps_n, warp_m = warp_mn / p.warps_n;
  DensePositions<T, kRows> operands;
  operands.places = tables.places;
  operands.plane_bytes = p.input_plane_bytes;
  operands.row_bytes = p.input_row_bytes;
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
  // What this lane loads first of its first columns.
  uint32_t inputs = p.chunk_planes * p.plane_bytes;
  if (p.input_row_bytes > 0) {
    const int column = warp_n * 8 * kColumns + lane % 8 + (kColumns > 1 ? lane / 16 * 8 : 0);
    inputs += column * p.input_row_bytes + lane / 8 % 2 * 16;
  } else {
    inputs += warp_n * (8 * kColumns / kGranule<T>)*p.input_plane_bytes;
    if constexpr (sizeof(T) == 4) inputs += lane / 16 * p.input_plane_bytes + lane / 4 % 4 * 4;
  }
  const int steps = p.positions / kGranule<T> / 2;
  DenseSums<kRows, kColumns> sums = {};
  int stage = 0, parity = 0, until_flush = p.run;
  bool flushed = false;
  for (int index = split; index < p.tiles; index += p.splits) {
    mbarrier_wait(barriers + 8 * stage, parity);
    operands.stage = shared_address(stages + stage * p.stage_bytes);
    operands.inputs = operands.stage + inputs;
    add_stage<T, kPrecision, kRows, kColumns>(operands, warp_k, p.warps_k, steps, sums);
    dense_arrive(kDenseEmpty + stage, p.threads);
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
  dense_wait(kDenseTeam, kDenseConsumers<T>);  // the room is that of the stages
  if (p.warps_k > 1) {
    reduce_dense<kRows, kColumns>(kDenseConsumers<T>, warps, p.warps_k, warp_mn, warp_k,
                                  reinterpret_cast<float4*>(stages), sums);
    dense_wait(kDenseTeam, kDenseConsumers<T>);
  }
  float* const room = reinterpret_cast<float*>(stages);
  if (warp_k == 0) {
    leave_sums<T, kRows, kColumns>(p, warp_m * kRows * 16 + lane / 4, warp_n * kColumns * 8 + lane % 4 * 2, room, sums);
  }
  dense_wait(kDenseTeam, kDenseConsumers<T>);
  store_sums<T>(p, kind, split, p.warps_n * kColumns * 8, room);
}

// kProducers: warps that copy.
template <typename T, DensePrecision kPrecision, int kRows, int kColumns, int kProducers>
__global__ void __launch_bounds__(kDenseConsumers<T> + 32 * kProducers, dense_gradient_blocks(sizeof(T)))
    dense_weight_gradient_kernel(const __grid_constant__ DenseParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_grid_begin();
  extern __shared__ __align__(16) char shared[];
  const DenseTables tables(p, shared);
  tables.fill(p);
  const uint32_t barriers = shared_address(shared);
  if (threadIdx.x == 0) init_full(barriers, p.producers);
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
  for (int i = threadIdx.x; i < p.steps; i += p.threads) {
    const int plane = i / taps;
    tables.steps[i] = plane < p.chunk_planes ? plane * p.plane_bytes + DenseTables::tap_place(p, i - plane * taps) : 0;
  }
  __syncthreads();
  const int kinds = gridDim.x / p.splits, split = blockIdx.x / kinds;
  const DenseKind kind(p, blockIdx.x - split * kinds);
  char* const stages = shared + p.table_bytes;
  // Operands of products want more registers than copies.
  constexpr bool kShift = kProducers == 8 && kPrecision == DensePrecision::kFloat32;
  if (threadIdx.x >= kDenseConsumers<T>) {
    if constexpr (kShift) lower_registers<88>();
    produce_dense_weight<T>(p, tables, barriers, kind, split, p.warps_n * kColumns * 8, stages);
  } else {
    if constexpr (kShift) raise_registers<168>();
    consume_dense_weight<T, kPrecision, kRows, kColumns>(
        p, tables, barriers, kind, split, stages,
        reinterpret_cast<float4*>(stages) - kRows * kColumns * kDenseConsumers<T> + threadIdx.x);
  }
#endif
}

}  // namespace fastconvt::cuda
