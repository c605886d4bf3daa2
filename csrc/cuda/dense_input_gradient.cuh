// The input's gradient as an implicit matrix product: rows are positions of a box, columns input channels, the inner
// dimension is output channels by taps. Half of the warps stage the output's gradient, the others multiply. Weights of
// 32 bits are read as they lie; of 16, a first kernel lays them out as operands.
#pragma once

#include "dense_gradient_copy.cuh"
#include "dense_gradient_steps.cuh"
#include "dense_input_gradient_steps.cuh"
#include "device/registers.cuh"

namespace fastconvt::cuda {

template <typename T>
__global__ void __launch_bounds__(256)
    dense_weights_kernel(const __grid_constant__ DenseParams p, int columns, int64_t entries) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_grid_begin();
  constexpr int kUnit = kGranule<T>;
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (entry >= entries) return;
  // (group, block of columns, chunk, step, eight columns, lane)
  const int lane = static_cast<int>(entry % 32), tiles = columns / 8;
  int64_t index = entry / 32;
  const int tile = static_cast<int>(index % tiles);
  index /= tiles;
  const int step = static_cast<int>(index % p.steps);
  index /= p.steps;
  int tap_block = static_cast<int>(index % p.chunks);
  index /= p.chunks;
  const int chunk = tap_block % p.plane_chunks;
  tap_block /= p.plane_chunks;
  int first_tap[3];
  find_taps(p, tap_block, first_tap);
  const int block = static_cast<int>(index % p.in_blocks), group = static_cast<int>(index / p.in_blocks);
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
  const int channel = block * columns + tile * 8 + lane / 4;
  const int kernel = p.kernel[0] * p.kernel[1] * p.kernel[2];
  const T* weight = static_cast<const T*>(p.weight) +
                    (static_cast<int64_t>(group) * p.input.channels + channel) * p.grad.channels * kernel;
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int granule = 2 * step + half, plane = granule / taps, tap = granule - plane * taps;
    const int row = tap / p.axis[2].taps, run = first_tap[2] + tap - row * p.axis[2].taps;
    const int kd = first_tap[0] + row / p.axis[1].taps, kh = first_tap[1] + row % p.axis[1].taps;
    T element[4 / sizeof(T)];
#pragma unroll
    for (int i = 0; i < 4 / static_cast<int>(sizeof(T)); ++i) {
      const int e = lane % 4 * (4 / static_cast<int>(sizeof(T))) + i;
      const int from = p.runs > 1 ? chunk * p.chunk_planes + plane : (chunk * p.chunk_planes + plane) * kUnit + e;
      const int kw = p.runs > 1 ? run * kUnit + e : run;
      const bool exists = plane < p.chunk_planes && channel < p.input.channels && from < p.grad.channels &&
                          kd < p.kernel[0] && kh < p.kernel[1] && kw < p.kernel[2];
      element[i] =
          exists ? weight[static_cast<int64_t>(from) * kernel + (kd * p.kernel[1] + kh) * p.kernel[2] + kw] : T{};
    }
    memcpy(&words[half], element, 4);
  }
  static_cast<uint2*>(p.workspace)[entry] = make_uint2(words[0], words[1]);
#endif
}

// A block's tiles: (box, group, block of input channels), the last one fastest.
struct DenseInputTile {
  DenseBox box;
  int group, block;

  static __device__ int box_of(const DenseParams& p, int index, int& group, int& block) {
    block = index;
    group = p.by_in_block(block);
    return p.by_group(group);
  }
  __device__ DenseInputTile(const DenseParams& p, int index) : box(p, box_of(p, index, group, block)) {}
};

// `columns` are those of a block.
template <typename T>
__device__ __forceinline__ void produce_dense_input(const DenseParams& p, const DenseTables& tables, uint32_t barriers,
                                                    int columns, char* stages) {
  const int thread = threadIdx.x - kDenseConsumers<T>;
  int stage = 0, round = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const DenseInputTile tile(p, index);
    const T* grad = static_cast<const T*>(p.grad.data) + tile.box.batch * p.grad.batch + tile.group * p.grad.group;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      int at[3], tap[3], tap_block = chunk / p.plane_chunks;
      const int first = (chunk - tap_block * p.plane_chunks) * p.chunk_planes;
      find_taps(p, tap_block, tap);
      for (int a = 0; a < 3; ++a) {
        at[a] = tile.box.at[a] * p.axis[a].stride - p.axis[a].padding + tap[a] * p.axis[a].dilation;
      }
      if (round > 0) dense_wait(kDenseEmpty + stage, p.threads);
      char* target = stages + stage * p.stage_bytes;
      char* const weights = target + p.chunk_planes * p.plane_bytes;
      if (sizeof(T) == 4 && !p.resident) {
        stage_plain_weights(p, tile.group, tile.block, columns, chunk, weights, thread, p.producers);
      } else if (!p.resident) {
        const int64_t block = (static_cast<int64_t>(tile.group) * p.in_blocks + tile.block) * p.chunks + chunk;
        copy_words(static_cast<const char*>(p.workspace) + block * p.weight_bytes, weights, p.weight_bytes, thread,
                   p.producers);
      }
      stage_gradients<T>(p, tables, grad + first * p.grad.plane, p.grad.channels - first * p.grad.plane_channels, at[0],
                         at[1], at[2], thread, target);
      arrive_full(barriers + 8 * stage);
      if (++stage == p.stages) stage = 0, round = 1;
    }
  }
}

// One element by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ T dense_input_gradient_at(const DenseParams& p, int batch, int group, int channel, int z, int y,
                                                  int x) {
  const int taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
  const int64_t channel_stride = p.run_dilation > 0 ? p.grad.plane : p.grad.element;
  const int run = p.runs;
  const T* weight = static_cast<const T*>(p.weight) +
                    (static_cast<int64_t>(group) * p.input.channels + channel) * p.grad.channels * taps;
  const T* grad = static_cast<const T*>(p.grad.data) + batch * p.grad.batch + group * p.grad.group;
  double sum = 0;
  for (int tap = 0; tap < taps; ++tap) {
    const int kw = tap % p.kernel[2], kh = tap / p.kernel[2] % p.kernel[1], kd = tap / (p.kernel[2] * p.kernel[1]);
    const int64_t at_z = static_cast<int64_t>(z) * p.axis[0].stride - p.axis[0].padding + kd * p.axis[0].dilation;
    const int64_t at_y = static_cast<int64_t>(y) * p.axis[1].stride - p.axis[1].padding + kh * p.axis[1].dilation;
    const int64_t at_x =
        static_cast<int64_t>(x) * p.axis[2].stride - p.axis[2].padding + kw * (p.axis[2].dilation / run);
    if (at_z < 0 || at_z >= p.axis[0].out || at_y < 0 || at_y >= p.axis[1].out || at_x < 0 || at_x >= p.axis[2].out) {
      continue;
    }
    const int64_t offset = at_z * p.grad.along[0] + at_y * p.grad.along[1] + at_x * p.grad.along[2];
    for (int c = 0; c < p.grad.channels; ++c) {
      sum += static_cast<double>(to_accumulator(grad[offset + c * channel_stride])) *
             static_cast<double>(to_accumulator(weight[static_cast<int64_t>(c) * taps + tap]));
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// What is not finite is made again, by the definition.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void store_dense_input(const DenseParams& p, const DenseTables& tables,
                                                  const DenseInputTile& tile, int first_row, int first_channel,
                                                  const DenseSums<kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32;
  const int channel = first_channel + lane % 4 * 2;
  T* const first = static_cast<T*>(p.output) + tile.box.batch * p.input.batch + tile.group * p.input.group +
                   channel * p.input.element;
  const auto find = [&](int i, int (&at)[3]) {
    const int place = tables.boxes[first_row + i * 8 + lane / 4];
    at[2] = tile.box.at[2] + (place & 1023);
    at[1] = tile.box.at[1] + (place >> 10 & 1023);
    at[0] = tile.box.at[0] + (place >> 20);
    return place >= 0 && at[2] < p.axis[2].in && at[1] < p.axis[1].in && at[0] < p.axis[0].in;
  };
  const auto offset = [&](const int (&at)[3]) {
    return at[0] * p.input.along[0] + at[1] * p.input.along[1] + at[2] * p.input.along[2];
  };
  const bool whole = first_channel + 8 * kColumns <= p.input.channels;
  float check = 0;  // NaN if a sum is not finite
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    int at[3];
    if (!find(i, at)) continue;
    T* to = first + offset(at);
#pragma unroll
    for (int n = 0; n < kColumns; ++n, to += 8 * p.input.element) {
      const float even = sums[i / 2][n][i % 2 * 2], odd = sums[i / 2][n][i % 2 * 2 + 1];
      check = fmaf(even, 0.f, fmaf(odd, 0.f, check));
      if (whole || channel + n * 8 < p.input.channels) to[0] = from_accumulator<T>(even);
      if (whole || channel + n * 8 + 1 < p.input.channels) to[p.input.element] = from_accumulator<T>(odd);
    }
  }
  const bool finite = check == 0;
  if (finite) return;
#pragma unroll 1
  for (int k = 0; k < 4 * kRows * kColumns; ++k) {
    const int c = k / 2 % kColumns * 8 + k % 2;
    int at[3];
    if (!find(k / (2 * kColumns), at) || channel + c >= p.input.channels) continue;
    T* const to = first + offset(at) + c * p.input.element;
    if (is_finite(to_accumulator(*to))) continue;
    *to = dense_input_gradient_at<T>(p, tile.box.batch, tile.group, channel + c, at[0], at[1], at[2]);
  }
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
__device__ __forceinline__ void consume_dense_input(const DenseParams& p, const DenseTables& tables, uint32_t barriers,
                                                    char* weights, char* stages, float4* room, float4* totals) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = p.warps_m * p.warps_n;
  const int warp_k = warp / warps, warp_mn = warp % warps, warp_n = warp_mn % p.warps_n, warp_m = warp_mn / p.warps_n;
  const int first_row = warp_m * kRows * 16;
  const int columns = p.warps_n * kColumns;
  DenseOperands<kRows> operands;
  operands.steps = tables.steps;
  operands.weight_step = columns * 32 * kDenseEntry<kPrecision>;
  const int own_weights = (warp_n * kColumns * 32 + lane) * kDenseEntry<kPrecision>;
  DensePlainOperands<kRows> plain;
  plain.steps = tables.steps, plain.table = tables.weights, plain.quads = p.weight_quads;
  plain.columns = 8 * p.weight_row * 4;
  const int own_row =
      ((warp_n * kColumns * 8 + lane / 4) * p.weight_row + lane % 4 * (p.runs > 1 ? 1 : p.weight_channel)) * 4;
#pragma unroll
  for (int m = 0; m < kRows; ++m) operands.rows[m] = plain.rows[m] = tables.places[first_row + m * 16 + lane % 16];
  int stage = 0, parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const DenseInputTile tile(p, index);
    DenseSums<kRows, kColumns> sums = {};
    int until_flush = p.run;
    bool flushed = false;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      mbarrier_wait(barriers + 8 * stage, parity);
      const char* source = stages + stage * p.stage_bytes;
      operands.stage = shared_address(source);
      const char* const here = p.resident ? weights + chunk * p.weight_bytes : source + p.chunk_planes * p.plane_bytes;
      if (sizeof(T) == 4 && !p.weights_made) {
        if constexpr (sizeof(T) == 4) {
          plain.stage = operands.stage, plain.weights = shared_address(here) + own_row;
          add_plain_stage<kPrecision, kRows, kColumns>(plain, warp_k, p.warps_k, p.steps, sums);
        }
      } else {
        operands.weights = here + own_weights;
        add_dense_steps<T, kPrecision, kRows, kColumns>(operands, warp_k, p.warps_k, p.steps, sums);
      }
      dense_arrive(kDenseEmpty + stage, p.threads);
      if (++stage == p.stages) stage = 0, parity ^= 1;
      if constexpr (kPrecision == DensePrecision::kFloat32) {
        if (--until_flush != 0 || chunk + 1 == p.chunks) continue;
        flush_dense<kRows, kColumns>(totals, !flushed, false, sums);
        flushed = true, until_flush = p.run;
      }
    }
    if constexpr (kPrecision == DensePrecision::kFloat32) {
      if (flushed) flush_dense<kRows, kColumns>(totals, false, true, sums);
    }
    if (p.warps_k > 1) reduce_dense<kRows, kColumns>(kDenseConsumers<T>, warps, p.warps_k, warp_mn, warp_k, room, sums);
    if (warp_k == 0) {
      store_dense_input<T, kRows, kColumns>(p, tables, tile, first_row, (tile.block * columns + warp_n * kColumns) * 8,
                                            sums);
    }
    // Before the room is used again.
    if (p.warps_k > 1) dense_wait(kDenseTeam, kDenseConsumers<T>);
  }
}

// kProducers: warps that copy.
template <typename T, DensePrecision kPrecision, int kRows, int kColumns, int kProducers>
__global__ void __launch_bounds__(kDenseConsumers<T> + 32 * kProducers, dense_gradient_blocks(sizeof(T)))
    dense_input_gradient_kernel(const __grid_constant__ DenseParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char shared[];
  const DenseTables tables(p, shared);
  tables.fill(p);
  const uint32_t barriers = shared_address(shared);
  if (threadIdx.x == 0) init_full(barriers, p.producers);
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps;
  for (int i = threadIdx.x; i < 2 * p.steps; i += p.threads) {
    const int plane = i / taps;
    tables.steps[i] = plane < p.chunk_planes ? plane * p.plane_bytes + DenseTables::tap_place(p, i - plane * taps) : 0;
  }
  const int reduction = (p.warps_k - 1) * p.warps_m * p.warps_n * kRows * kColumns * 512;
  float4* const room = reinterpret_cast<float4*>(shared + p.table_bytes - reduction);
  float4* const totals = room - (p.run > 0 ? kRows * kColumns * kDenseConsumers<T> : 0);
  char* const weights = shared + p.table_bytes;
  const int weight_bytes = p.resident ? p.chunks * p.weight_bytes : 0;
  const int columns = p.warps_n * kColumns * 8;
  if constexpr (sizeof(T) == 4) fill_plain_weights(p, tables.weights);
  wait_for_previous_grid();
  if (p.resident) {
    if constexpr (sizeof(T) == 4) {
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        stage_plain_weights(p, 0, 0, columns, chunk, weights + chunk * p.weight_bytes, threadIdx.x, p.threads);
      }
    } else {
      copy_words(static_cast<const char*>(p.workspace), weights, weight_bytes, threadIdx.x, p.threads);
    }
    wait_for_copies();
    __syncthreads();
    if (sizeof(T) == 4 && p.weights_made) {
      constexpr int kThreads = kDenseConsumers<T> + 32 * kProducers;
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        make_operands<kPrecision, kThreads>(p, tables.weights, columns, weights + chunk * p.weight_bytes);
      }
    }
  }
  __syncthreads();
  // Operands of products want more registers than copies.
  constexpr bool kShift = kProducers == 8 && kPrecision == DensePrecision::kFloat32;
  if (threadIdx.x >= kDenseConsumers<T>) {
    if constexpr (kShift) lower_registers<88>();
    produce_dense_input<T>(p, tables, barriers, columns, weights + weight_bytes);
  } else {
    if constexpr (kShift) raise_registers<168>();
    consume_dense_input<T, kPrecision, kRows, kColumns>(p, tables, barriers, weights, weights + weight_bytes, room,
                                                        totals + threadIdx.x);
  }
#endif
}

}  // namespace fastconvt::cuda
