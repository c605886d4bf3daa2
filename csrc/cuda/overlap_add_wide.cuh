// Many columns (csrc/core/overlap_add.h): a block holds all channels of its inputs and all weights of its columns; its
// warps take items, 48 cells by 32 columns.
#pragma once

#include "overlap_add_product.cuh"
#include "overlap_add_store.cuh"
#include "overlap_add_wide_weights.cuh"

namespace fastconvt::cuda {

template <typename T_, OverlapAddPrecision kPrecision_>
struct OverlapAddWideTraits {
  using Element = T_;
  static constexpr OverlapAddPrecision kPrecision = kPrecision_;
  static constexpr bool kStrict = kPrecision == OverlapAddPrecision::kFloat32;
  static constexpr int kMaxThreads = static_cast<int>(overlap_add_wide_warps(kStrict)) * 32;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Makes a lane's outputs of an item again, by the definition: bit i * 8 + element.
template <typename T>
__device__ __noinline__ void overlap_add_wide_repair(const OverlapAddParams& p, int chunk, int set, uint64_t wrong) {
  const OverlapAddBlock block(p, p.block_sets);
  const OverlapAddOutputs<T> outputs{p, block};
  for (; wrong != 0; wrong &= wrong - 1) {
    const int bit = __ffsll(static_cast<int64_t>(wrong)) - 1;
    int at[4];
    const OverlapAddWideColumn column(p, (block.first_column + set) * kOverlapAddWideColumns +
                                             overlap_add_wide_element(bit % 8, overlap_add_dealt(p.vector)));
    if (!outputs.find_cell(chunk * kOverlapAddWideRows + bit / 8 * 8 + threadIdx.x % 32 / 4, at) || !column.exists ||
        !outputs.is_output(at, column.residue)) {
      continue;
    }
    const double exact = overlap_add_by_definition<T>(p, at[0], block.group, column.channel, at[1] + column.residue[0],
                                                      at[2] + column.residue[1], at[3] + column.residue[2]);
    static_cast<T*>(p.output)[outputs.cell_offset(at) + outputs.column_offset(column.residue, column.channel)] =
        from_accumulator<T>(p.rectify(static_cast<float>(exact + outputs.bias_term(column.channel))));
  }
}

template <class Traits>
class OverlapAddWideKernel {
  using T = typename Traits::Element;
  static constexpr bool kStrict = Traits::kStrict;
  static constexpr int kRows = kOverlapAddWideRows / 16, kTiles = kOverlapAddWideColumns / 8;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kPositionBytes = kStrict ? overlap_add_wide_bytes(true) : 16;
  using Stage = OverlapAddStage<T, Traits::kPrecision, 2, kStrict>;
  using Sums = float[kTiles][kRows][4];

  const OverlapAddParams& p;
  unsigned char* const shared;
  const int lane, warp, warps;
  const OverlapAddBlock block;  // its first column is a set
  T* const origin;              // the first output of the first cell

 public:
  __device__ OverlapAddWideKernel(const OverlapAddParams& p, unsigned char* shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        warps(blockDim.x / 32),
        block(p, p.block_sets),
        origin(static_cast<T*>(p.output) + first_output(OverlapAddOutputs<T>{p, block})) {}

  __device__ void run() {
    make_rows();
    make_columns();
    make_granules();
    copy_inputs();
    OverlapAddWideWeights<T, Traits::kPrecision>(p, block, shared_address(shared) + p.right).copy();
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const int items = min(p.block_sets, p.sets - block.first_column) * p.chunks;
#pragma unroll 1
    for (int item = warp; item < items; item += warps) {
      int chunk = item;
      const int set = p.by_chunks(chunk);
      Sums sum = {};
      multiply(chunk, set, sum);
      store(chunk, set, sum);
    }
  }

 private:
  // Of every row of cells: where its outputs are, from those of the block's first cell on, and their coordinates; a row
  // that is no cell has none. And its position in the inputs.
  __device__ void make_rows() const {
    const OverlapAddOutputs<T> outputs{p, block};
    int4* const rows = reinterpret_cast<int4*>(shared + p.cell_rows);
    int* const positions = reinterpret_cast<int*>(rows + p.chunks * kOverlapAddWideRows);
    const int64_t first = first_output(outputs) - block.group * p.group_out * p.out.channel;
    for (int i = threadIdx.x; i < p.chunks * kOverlapAddWideRows; i += blockDim.x) {
      int at[4], cell[4];
      const bool exists = outputs.find_cell(i, at);
      rows[i] =
          make_int4(static_cast<int>(outputs.cell_offset(at) - first), exists ? at[1] : INT32_MIN / 2, at[2], at[3]);
      overlap_add_split(min(i, p.rows - 1), p.by_box, cell);
      positions[i] = ((cell[0] * p.held[1] + cell[1]) * p.held[2] + cell[2]) * p.held[3] + cell[3] + p.lead;
    }
  }
  __device__ __forceinline__ int64_t first_output(const OverlapAddOutputs<T>& outputs) const {
    int at[4] = {block.cell[0]};
#pragma unroll
    for (int a = 0; a < 3; ++a) at[a + 1] = p.axis[a].first + block.cell[a + 1] * p.axis[a].step;
    return outputs.cell_offset(at) + block.group * p.group_out * p.out.channel;
  }

  // Of every column: where its outputs are, from a cell's first one on, and its residues; one that does not exist has
  // none. And its bias.
  __device__ void make_columns() const {
    const OverlapAddOutputs<T> outputs{p, block};
    const int count = p.block_sets * kOverlapAddWideColumns;
    int2* const columns = reinterpret_cast<int2*>(shared + p.outputs);
    float* const terms = reinterpret_cast<float*>(shared + p.terms);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const OverlapAddWideColumn c(p, block.first_column * kOverlapAddWideColumns + i);
      const int64_t offset = outputs.column_offset(c.residue, c.channel) - block.group * p.group_out * p.out.channel;
      columns[i] = c.exists
                       ? make_int2(static_cast<int>(offset), c.residue[0] << 20 | c.residue[1] << 10 | c.residue[2])
                       : make_int2(0, INT32_MIN);
      terms[i] = c.exists ? outputs.bias_term(c.channel) : 0.f;
    }
  }

  // Where a cell's inputs of every granule are, from its position on.
  __device__ void make_granules() const {
    int* const granules = reinterpret_cast<int*>(shared + p.entries);
    for (int i = threadIdx.x; i < p.all_granules; i += blockDim.x) {
      int channel = i, at[3];
      int rest = p.by_channel_granules(channel);
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        at[a] = rest;
        rest = p.axis[a].by_reach(at[a]);
      }
      const int position = (at[0] * p.held[2] + at[1]) * p.held[3] + at[2];
      const int begin = kStrict ? channel * p.step_bytes : channel / 2 * p.step_bytes + channel % 2 * p.half_bytes;
      granules[i] = rest == 0 ? begin + position * kPositionBytes : 0;
    }
  }

  // Every group of warps copies some of the steps.
  __device__ void copy_inputs() const {
    Stage stage(p, shared);
    __syncthreads();
    const int groups = min(p.steps, warps), size = warps / groups, group = warp / size;
    if (group >= groups) return;
    for (int i = group; i < p.steps; i += groups) {
      stage.copy_step(i, shared + i * p.step_bytes, threadIdx.x - group * size * 32, size * 32);
    }
  }

  // Weights of two granules for two column tiles of a set, at lanes' addresses.
  using Pair = uint32_t[4];

  __device__ __forceinline__ void multiply(int chunk, int set, Sums& sum) const {
    const int* const positions =
        reinterpret_cast<const int*>(shared + p.cell_rows) + (p.chunks * 4 + chunk) * kOverlapAddWideRows;
    const uint32_t base = shared_address(shared), granule_bytes = p.block_sets * kOverlapAddWideColumns * 16;
    uint32_t rows[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) rows[m] = base + positions[m * 16 + lane % 16] * kPositionBytes;
    constexpr int kTerms = kStrict ? 3 : 1;
    uint32_t right = base + p.right + lane / 8 % 2 * kTerms * granule_bytes +
                     (set * kOverlapAddWideColumns + lane / 16 * 8 + lane % 8) * 16;
    const int* granules = reinterpret_cast<const int*>(shared + p.entries) + lane / 16;
    uint32_t next = *granules;
#pragma unroll 1
    for (int left_granules = p.all_granules; left_granules > 0; left_granules -= 2) {
      const uint32_t at = next;
      granules += 2, next = *granules;  // one ahead; the last one is not used
      if constexpr (kStrict) {
        OverlapAddThreeLeft left[kRows];
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
#pragma unroll
          for (int t = 0; t < 3; ++t) overlap_add_load_left(left[m][t], rows[m] + at + t * 16);
        }
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
          Pair pair[3];
#pragma unroll
          for (int t = 0; t < 3; ++t) overlap_add_load_left(pair[t], right + t * granule_bytes + j * 128);
#pragma unroll
          for (int of_pair = 0; of_pair < 2; ++of_pair) {
            const OverlapAddThreeRight operand = {{pair[0][of_pair * 2], pair[0][of_pair * 2 + 1]},
                                                  {pair[1][of_pair * 2], pair[1][of_pair * 2 + 1]},
                                                  {pair[2][of_pair * 2], pair[2][of_pair * 2 + 1]}};
            overlap_add_multiply_three(left, operand, sum[j + of_pair]);
          }
        }
      } else {
        OverlapAddOperands<kRows, kTiles> operands;
#pragma unroll
        for (int m = 0; m < kRows; ++m) overlap_add_load_left(operands.left[m], rows[m] + at);
#pragma unroll
        for (int j = 0; j < kTiles; j += 2) {
          Pair pair;
          overlap_add_load_left(pair, right + j * 128);
          operands.right[j][0] = pair[0], operands.right[j][1] = pair[1];
          operands.right[j + 1][0] = pair[2], operands.right[j + 1][1] = pair[3];
          operands.exists[j] = operands.exists[j + 1] = 0;
        }
        overlap_add_multiply<T, Traits::kPrecision>(operands, sum);
      }
      right += 2 * kTerms * granule_bytes;
    }
  }

  __device__ __forceinline__ void store(int chunk, int set, Sums& sum) const {
    // Inputs and weights that do not exist are zeros, which only finite factors leave without effect.
    float probe[4] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) probe[i] = fmaf(sum[j][m][i], 0.f, probe[i]);
    const bool repairs = __any_sync(0xffffffffu, !(probe[0] + probe[1] + probe[2] + probe[3] == 0));
    uint64_t wrong = 0;
    if (repairs) {
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (!is_finite(sum[e / 2][i / 2][i % 2 * 2 + e % 2])) wrong |= uint64_t{1} << (i * 8 + e);
        }
    }
    if (p.vector == kVector) {
      store_vectors<kVector>(chunk, set, sum);
    } else if (p.vector == kVector / 2) {
      store_vectors<kVector / 2>(chunk, set, sum);
    } else if (kVector > 4 && p.vector == 2) {
      store_vectors<2>(chunk, set, sum);
    } else {
      store_vectors<1>(chunk, set, sum);
    }
    if (repairs) overlap_add_wide_repair<T>(p, chunk, set, wrong);
  }

  // Sums become outputs.
  template <int kDealt>
  __device__ __forceinline__ void finish(int set, Sums& sum) const {
    const float* const terms = reinterpret_cast<const float*>(shared + p.terms) + set * kOverlapAddWideColumns;
#pragma unroll
    for (int e = 0; e < 8; e += kDealt) {
      const auto term = *reinterpret_cast<const Pack<float, kDealt>*>(terms + overlap_add_wide_element(e, kDealt));
#pragma unroll
      for (int v = 0; v < kDealt; ++v) {
#pragma unroll
        for (int i = 0; i < 2 * kRows; ++i) sum[(e + v) / 2][i / 2][i % 2 * 2 + v % 2] += term.value[v];
      }
    }
    p.rectify(sum);
  }

  template <int kCount>
  __device__ __forceinline__ void store_vectors(int chunk, int set, Sums& sum) const {
    constexpr int kDealt = overlap_add_dealt(kCount);
    finish<kDealt>(set, sum);
    const int4* const rows =
        reinterpret_cast<const int4*>(shared + p.cell_rows) + chunk * kOverlapAddWideRows + lane / 4;
    const int2* const columns = reinterpret_cast<const int2*>(shared + p.outputs);
#pragma unroll
    for (int v = 0; v < 8; v += kCount) {
      const int index = set * kOverlapAddWideColumns + overlap_add_wide_element(v, kDealt);
      const int2 column = columns[index];
      if (column.y < 0) continue;
      const int residue[3] = {column.y >> 20, column.y >> 10 & 1023, column.y & 1023};
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        const int4 row = rows[i * 8];
        if (static_cast<unsigned>(row.y + residue[0]) >= static_cast<unsigned>(p.axis[0].out) ||
            static_cast<unsigned>(row.z + residue[1]) >= static_cast<unsigned>(p.axis[1].out) ||
            static_cast<unsigned>(row.w + residue[2]) >= static_cast<unsigned>(p.axis[2].out)) {
          continue;
        }
        float value[kCount];
#pragma unroll
        for (int e = 0; e < kCount; ++e) value[e] = sum[(v + e) / 2][i / 2][i % 2 * 2 + (v + e) % 2];
        *reinterpret_cast<Pack<T, kCount>*>(origin + static_cast<uint32_t>(row.x + column.x)) = rounded<T>(value);
      }
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    overlap_add_wide_kernel(const __grid_constant__ OverlapAddParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char overlap_add_shared[];
  OverlapAddWideKernel<Traits>(p, overlap_add_shared).run();
#endif
}

}  // namespace fastconvt::cuda
