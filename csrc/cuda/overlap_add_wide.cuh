// Many output channels a group or long strides (csrc/core/overlap_add.h): a block holds all channels of its inputs, and
// its warps go over the column tiles, whose weights come straight to registers.
#pragma once

#include "overlap_add_product.cuh"
#include "overlap_add_store.cuh"

namespace fastconvt::cuda {

template <typename T_, OverlapAddPrecision kPrecision_>
struct OverlapAddWideTraits {
  using Element = T_;
  static constexpr OverlapAddPrecision kPrecision = kPrecision_;
  static constexpr bool kStrict = kPrecision == OverlapAddPrecision::kFloat32;
  static constexpr int kMaxThreads = static_cast<int>(overlap_add_wide_warps(kStrict)) * 32;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// A warp's item: rows of cells by two column tiles, which have the same residues of different channels.
struct OverlapAddWideItem {
  int chunk, residues, channels;  // which rows, column tile of the first channels, and pair of channels

  __device__ OverlapAddWideItem(const OverlapAddParams& p, int first, int index) {
    chunk = index;
    residues = first + p.by_chunks(chunk);
    channels = p.by_tiles(residues);
  }
  __device__ int column(const OverlapAddParams& p, int tile) const {
    return (channels * 2 + tile) * p.tiles + residues;
  }
};

// Makes an item's outputs that are not finite again, by the definition. A lane's are those that it stored.
template <typename T, int kRows>
__device__ __noinline__ void overlap_add_wide_repair(const OverlapAddParams& p, int first, int index) {
  OverlapAddBlock block(p, 1);
  block.first_column = 0;
  const OverlapAddOutputs<T> outputs{p, block};
  const OverlapAddWideItem item(p, first, index);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < kRows * 2 * 4; ++i) {
    int at[4], residue[3], channel;
    const int row = (item.chunk * kRows * 2 + i / 4) * 8 + lane / 4;
    if (!outputs.find_cell(row, at) ||
        !outputs.find_column(item.column(p, i / 2 % 2), lane % 4 * 2 + i % 2, residue, channel) ||
        !outputs.is_output(at, residue)) {
      continue;
    }
    T* const place = static_cast<T*>(p.output) + outputs.cell_offset(at) + outputs.column_offset(residue, channel);
    if (is_finite(to_accumulator(*place))) continue;
    const double exact = overlap_add_by_definition<T>(p, at[0], block.group, channel, at[1] + residue[0],
                                                      at[2] + residue[1], at[3] + residue[2]);
    *place = from_accumulator<T>(static_cast<float>(exact + outputs.bias_term(channel)));
  }
}

template <class Traits>
class OverlapAddWideKernel {
  using T = typename Traits::Element;
  static constexpr bool kStrict = Traits::kStrict;
  static constexpr int kRows = kOverlapAddWideRows / 16, kTiles = 2, kOffsets = 2;
  static constexpr int kHalves = 4 / sizeof(T);
  static constexpr int kPositionBytes = kStrict ? overlap_add_wide_bytes(true) : 16;
  using Stage = OverlapAddStage<T, Traits::kPrecision, kTiles, kStrict>;
  using Sums = float[kTiles][kRows][4];

  const OverlapAddParams& p;
  unsigned char* const shared;
  const int lane, warp, warps;
  OverlapAddBlock block;
  int first, items;

  // Of the next weights: their item, step and offsets.
  int item, step = 0, offsets = 0;
  int low[3], count[3], at[3], residue[3];
  int weight;
  bool exists[kTiles] = {};
  int tap[kOffsets];
  // On their way.
  typename Stage::Raw raw[kTiles][kOffsets][2];
  uint32_t input[kOffsets];
  bool last = true;

 public:
  __device__ OverlapAddWideKernel(const OverlapAddParams& p, unsigned char* shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32), warps(blockDim.x / 32), block(p, 1) {
    first = block.first_column * p.block_tiles;
    items = max(min(p.block_tiles, p.all_tiles - first), 0) * p.chunks;
    block.first_column = 0;
  }

  __device__ void run() {
    item = warp;
    begin_item();
    load();
    make_rows();
    copy_inputs();
    Sums sum = {};
    for (int now = warp; now < items; now += warps) {
      uint32_t rows[kRows];
      find_rows(rows, OverlapAddWideItem(p, first, now).chunk);
#pragma unroll 1
      for (bool end = false; !end;) {
        end = last;
        multiply(rows, sum);
      }
      store(now, sum);
    }
  }

 private:
  // Of every row of cells: where its outputs are, from those of the block's first cell on, and their coordinates; a row
  // that is no cell has none. And its position in the inputs.
  __device__ void make_rows() const {
    const OverlapAddOutputs<T> outputs{p, block};
    int4* const rows = reinterpret_cast<int4*>(shared + p.weights);
    int* const positions = reinterpret_cast<int*>(rows + p.chunks * kOverlapAddWideRows);
    const int64_t origin = first_output(outputs);
    for (int i = threadIdx.x; i < p.chunks * kOverlapAddWideRows; i += blockDim.x) {
      int at[4], cell[4];
      const bool exists = outputs.find_cell(i, at);
      rows[i] =
          make_int4(static_cast<int>(outputs.cell_offset(at) - origin), exists ? at[1] : INT32_MIN / 2, at[2], at[3]);
      overlap_add_split(min(i, p.rows - 1), p.by_box, cell);
      positions[i] = ((cell[0] * p.held[1] + cell[1]) * p.held[2] + cell[2]) * p.held[3] + cell[3] + p.lead;
    }
  }
  __device__ __forceinline__ int64_t first_output(const OverlapAddOutputs<T>& outputs) const {
    int at[4] = {block.cell[0]};
#pragma unroll
    for (int a = 0; a < 3; ++a) at[a + 1] = p.axis[a].first + block.cell[a + 1] * p.axis[a].step;
    return outputs.cell_offset(at);
  }

  // Every group of warps copies some of the steps.
  __device__ void copy_inputs() const {
    Stage stage(p, shared);
    __syncthreads();
    const int groups = min(p.steps, warps), size = warps / groups, group = warp / size;
    if (group < groups) {
      for (int i = group; i < p.steps; i += groups) {
        stage.copy_step(i, shared + i * p.step_bytes, threadIdx.x - group * size * 32, size * 32);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }

  __device__ __forceinline__ void begin_item() {
    if (item >= items) {
      exists[0] = exists[1] = false;
      return;
    }
    const OverlapAddWideItem where(p, first, item);
    const OverlapAddColumns columns(p, where.residues);
    int channel;
    const bool found = columns.find(p, lane / 4, residue, channel);
    channel += where.channels * 2 * p.span_channels;
    offsets = 1;
#pragma unroll
    for (int a = 0; a < 3; ++a) low[a] = columns.low[a], count[a] = columns.count[a], at[a] = 0, offsets *= count[a];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) exists[j] = found && channel + j * p.span_channels < p.group_out;
    weight = channel * p.taps + lane % 4 * (kStrict ? 2 : 1) * kHalves * static_cast<int>(p.weight_channel);
    step = 0;
    next_offsets();
  }

  // The next two offsets.
  __device__ __forceinline__ void next_offsets() {
#pragma unroll
    for (int o = 0; o < kOffsets; ++o) {
      bool is_tap = offsets > 0;
      int offset = 0, position = 0;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int of_base = low[a] + at[a], t = residue[a] - p.axis[a].stride * of_base;
        is_tap = is_tap && static_cast<unsigned>(t) < static_cast<unsigned>(p.axis[a].kernel);
        offset = offset * p.axis[a].kernel + t;
        position = position * p.held[a + 1] + of_base - p.axis[a].low;
      }
      tap[o] = is_tap ? offset : -1;
      input_of_tap[o] = offsets > 0 ? position * kPositionBytes : input_of_tap[0];
      --offsets;
      if (++at[2] == count[2]) at[2] = 0, ++at[1];
      if (at[1] == count[1]) at[1] = 0, ++at[0];
    }
  }
  uint32_t input_of_tap[kOffsets] = {};

  __device__ __forceinline__ void load() {
    const T* const of_group =
        static_cast<const T*>(p.weight) + static_cast<int64_t>(block.group) * p.group_in * p.weight_channel;
    const int of_channel = static_cast<int>(p.weight_channel);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const int channel = (step * kOverlapAddWords + w * (kStrict ? 1 : 4)) * kHalves;
      const int left = p.group_in - channel - lane % 4 * (kStrict ? 2 : 1) * kHalves;
      const int index = weight + channel * of_channel;
#pragma unroll
      for (int o = 0; o < kOffsets; ++o) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          Stage::load(raw[j][o][w], of_group + static_cast<uint32_t>(index + j * p.tile_taps + tap[o]), of_channel,
                      exists[j] && tap[o] >= 0 ? left : 0);
        }
      }
    }
#pragma unroll
    for (int o = 0; o < kOffsets; ++o) input[o] = step * p.step_bytes + input_of_tap[o];
    last = offsets <= 0 && step == p.steps - 1;
    if (++step < p.steps) return;
    step = 0;
    if (!last) {
      next_offsets();
    } else {
      item += warps;
      begin_item();
    }
  }

  __device__ __forceinline__ void multiply(const uint32_t (&rows)[kRows], Sums& sum) {
    if constexpr (kStrict) {
      OverlapAddThreeRight right[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int o = 0; o < kOffsets; ++o) {
          overlap_add_split_pair(raw[j][o][0][0], raw[j][o][1][0], right[j][0][o], right[j][1][o], right[j][2][o]);
        }
      }
      const uint32_t from = lane < 16 ? input[0] : input[1];
      load();
      OverlapAddThreeLeft left[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int t = 0; t < 3; ++t) overlap_add_load_left(left[m][t], rows[m] + from + t * 16);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) overlap_add_multiply_three(left, right[j], sum[j]);
    } else {
      OverlapAddOperands<kRows, kTiles> operands[kOffsets];
#pragma unroll
      for (int o = 0; o < kOffsets; ++o) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          operands[o].exists[j] = 0;
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const uint32_t word = Stage::join(raw[j][o][w]);
            operands[o].right[j][w] = Traits::kPrecision == OverlapAddPrecision::kTf32 ? overlap_add_round(word) : word;
          }
        }
      }
      const uint32_t from[kOffsets] = {input[0], input[1]};
      load();
#pragma unroll
      for (int o = 0; o < kOffsets; ++o) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) overlap_add_load_left(operands[o].left[m], rows[m] + from[o]);
      }
#pragma unroll
      for (int o = 0; o < kOffsets; ++o) overlap_add_multiply<T, Traits::kPrecision>(operands[o], sum);
    }
  }

  // Where the lane's rows of the left operands begin in the first step.
  __device__ __forceinline__ void find_rows(uint32_t (&rows)[kRows], int chunk) const {
    const int* const positions = reinterpret_cast<const int*>(shared + p.weights) + p.chunks * kOverlapAddWideRows * 4;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      rows[m] = shared_address(shared) + positions[(chunk * kRows + m) * 16 + lane % 16] * kPositionBytes +
                (kStrict ? 0 : lane / 16 * p.half_bytes);
    }
  }

  // And sum = 0.
  __device__ __forceinline__ void store(int index, Sums& sum) const {
    const OverlapAddOutputs<T> outputs{p, block};
    const OverlapAddWideItem where(p, first, index);
    int side[2][3], other[3];
    const int64_t origin = first_output(outputs);
    T* place[kTiles][2];
    bool found[kTiles][2];
    float term[kTiles][2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        int channel;
        found[j][s] = outputs.find_column(where.column(p, j), lane % 4 * 2 + s, j == 0 ? side[s] : other, channel);
        place[j][s] = static_cast<T*>(p.output) + origin + outputs.column_offset(side[s], channel);
        term[j][s] = found[j][s] ? outputs.bias_term(channel) : 0.f;
      }
    }
    const int4* const rows = reinterpret_cast<const int4*>(shared + p.weights) + where.chunk * kRows * 16 + lane / 4;
    float probe = 0;
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      const int4 row = rows[i * 8];
      bool is_output[2];
      float value[kTiles][2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        is_output[s] = static_cast<unsigned>(row.y + side[s][0]) < static_cast<unsigned>(p.axis[0].out) &&
                       static_cast<unsigned>(row.z + side[s][1]) < static_cast<unsigned>(p.axis[1].out) &&
                       static_cast<unsigned>(row.w + side[s][2]) < static_cast<unsigned>(p.axis[2].out);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          float& of_sum = sum[j][i / 2][i % 2 * 2 + s];
          probe = fmaf(of_sum, 0.f, probe);
          value[j][s] = of_sum + term[j][s], of_sum = 0;
        }
      }
      if (p.vectors) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (is_output[0] && found[j][0]) store_two(place[j][0] + row.x, value[j][0], value[j][1]);
        }
        continue;
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        T* const at = place[0][s] + row.x;
        if (!is_output[s] || !found[0][s]) continue;
        if (p.neighbours && found[1][s] && reinterpret_cast<uintptr_t>(at) % (2 * sizeof(T)) == 0) {
          store_two(at, value[0][s], value[1][s]);
          continue;
        }
        *at = from_accumulator<T>(value[0][s]);
        if (found[1][s]) place[1][s][row.x] = from_accumulator<T>(value[1][s]);
      }
    }
    if (__any_sync(0xffffffffu, !(probe == 0))) overlap_add_wide_repair<T, kRows>(p, first, index);
  }
  static __device__ __forceinline__ void store_two(T* place, float first, float second) {
    struct alignas(2 * sizeof(T)) Two {
      T of[2];
    };
    *reinterpret_cast<Two*>(place) = Two{{from_accumulator<T>(first), from_accumulator<T>(second)}};
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads)
    overlap_add_wide_kernel(const __grid_constant__ OverlapAddParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char overlap_add_shared[];
  OverlapAddWideKernel<Traits>(p, overlap_add_shared).run();
#endif
}

}  // namespace fastconvt::cuda
