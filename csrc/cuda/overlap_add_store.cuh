// The overlap-add family's outputs: where they are, and those that are not finite by the definition.
#pragma once

#include "overlap_add_params.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// One output without the bias, by the definition: only taps and inputs that exist are multiplied. In float64, since
// large finite products must not overflow on the way.
template <typename T>
__device__ __noinline__ double overlap_add_by_definition(const OverlapAddParams& p, int n, int group, int channel,
                                                         int o0, int o1, int o2) {
  const T* const input =
      static_cast<const T*>(p.input) + n * p.in.batch + static_cast<int64_t>(group) * p.group_in * p.in.channel;
  const T* const weight = static_cast<const T*>(p.weight) + static_cast<int64_t>(group) * p.group_in * p.weight_channel;
  const int o[3] = {o0, o1, o2};
  int first[3], base[3], phase[3];
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const AxisParams& axis = p.definition[a];
    base[a] = (o[a] + axis.padding) / axis.stride, phase[a] = (o[a] + axis.padding) % axis.stride;
    first[a] = axis.first_tap(phase[a]);
  }
  const auto find = [&](int a, int tap, int64_t& offset) {
    const int at = base[a] + p.definition[a].offset(phase[a], tap);
    offset += at * p.in.axis[a];
    return static_cast<unsigned>(at) < static_cast<unsigned>(p.axis[a].in);
  };
  double sum = 0;
#pragma unroll 1
  for (int t0 = first[0]; t0 < p.axis[0].kernel; t0 += p.definition[0].tap_step()) {
#pragma unroll 1
    for (int t1 = first[1]; t1 < p.axis[1].kernel; t1 += p.definition[1].tap_step()) {
#pragma unroll 1
      for (int t2 = first[2]; t2 < p.axis[2].kernel; t2 += p.definition[2].tap_step()) {
        int64_t offset = 0;
        if (!find(0, t0, offset) || !find(1, t1, offset) || !find(2, t2, offset)) continue;
        const T* const tap =
            weight +
            ((static_cast<int64_t>(channel) * p.axis[0].kernel + t0) * p.axis[1].kernel + t1) * p.axis[2].kernel + t2;
#pragma unroll 1
        for (int c = 0; c < p.group_in; ++c) {
          sum = fma(static_cast<double>(to_accumulator(input[offset + c * p.in.channel])),
                    static_cast<double>(to_accumulator(tap[c * p.weight_channel])), sum);
        }
      }
    }
  }
  return sum;
}

// Where a block's rows and columns are in the output.
template <typename T>
struct OverlapAddOutputs {
  const OverlapAddParams& p;
  const OverlapAddBlock& block;

  // Output coordinates of a row's first residue: batch, depth, height, width; false where no cell is.
  __device__ __forceinline__ bool find_cell(int row, int (&at)[4]) const {
    overlap_add_split(row, p.by_box, at);
    at[0] += block.cell[0];
    bool exists = row < p.rows && at[0] < p.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int cell = block.cell[a + 1] + at[a + 1];
      exists = exists && cell < p.axis[a].cells;
      at[a + 1] = p.axis[a].first + cell * p.axis[a].step;
    }
    return exists;
  }
  // Residues of column 0 .. 7 of a column tile, and its channel.
  __device__ __forceinline__ bool find_column(int tile, int index, int (&residue)[3], int& channel) const {
    const int column = block.first_column + tile;
    const OverlapAddColumns columns(p, min(column, p.columns - 1));
    const bool exists = columns.find(p, index, residue, channel) && column < p.columns;
#pragma unroll
    for (int a = 0; a < 3; ++a) residue[a] += columns.copy * p.axis[a].copy_shift * p.axis[a].stride;
    return exists;
  }
  __device__ __forceinline__ bool is_output(const int (&at)[4], const int (&residue)[3]) const {
    bool exists = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      exists = exists && static_cast<unsigned>(at[a + 1] + residue[a]) < static_cast<unsigned>(p.axis[a].out);
    }
    return exists;
  }
  // Of a row's first residue; and what a column adds.
  __device__ __forceinline__ int64_t cell_offset(const int (&at)[4]) const {
    return at[0] * p.out.batch + at[1] * p.out.axis[0] + at[2] * p.out.axis[1] + at[3] * p.out.axis[2];
  }
  __device__ __forceinline__ int64_t column_offset(const int (&residue)[3], int channel) const {
    return (block.group * p.group_out + channel) * p.out.channel + residue[0] * p.out.axis[0] +
           residue[1] * p.out.axis[1] + residue[2] * p.out.axis[2];
  }
  __device__ __forceinline__ float bias_term(int channel) const {
    return p.bias == nullptr
               ? 0.f
               : to_accumulator(__ldg(static_cast<const T*>(p.bias) + block.group * p.group_out + channel));
  }
};

// Makes the block's outputs that are not finite again, by the definition.
template <typename T>
__device__ __noinline__ void overlap_add_repair(const OverlapAddParams& p, int columns) {
  const OverlapAddBlock block(p, columns);
  const OverlapAddOutputs<T> outputs{p, block};
  for (int i = threadIdx.x; i < p.rows * columns * 8; i += blockDim.x) {
    int at[4], residue[3], channel;
    const int row = i / (columns * 8), column = i - row * columns * 8;
    if (!outputs.find_cell(row, at) || !outputs.find_column(column / 8, column % 8, residue, channel) ||
        !outputs.is_output(at, residue)) {
      continue;
    }
    T* const place = static_cast<T*>(p.output) + outputs.cell_offset(at) + outputs.column_offset(residue, channel);
    if (p.rectify.shows_finite(to_accumulator(*place))) continue;
    const double exact = overlap_add_by_definition<T>(p, at[0], block.group, channel, at[1] + residue[0],
                                                      at[2] + residue[1], at[3] + residue[2]);
    *place = from_accumulator<T>(p.rectify(static_cast<float>(exact + outputs.bias_term(channel))));
  }
}

#endif

}  // namespace fastconvt::cuda
