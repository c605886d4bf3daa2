// How sums of dense layers become outputs.
#pragma once

#include <climits>

#include "dense_gradient_product.cuh"
#include "dense_params.cuh"
#include "epilogue.cuh"

namespace fastconvt::cuda {

// One output by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ T dense_at(const DenseForward& f, int batch, int group, int channel, int z, int y, int x) {
  const DenseParams& p = f.phase;
  const int64_t channel_stride = p.run_dilation > 0 ? p.grad.plane : p.grad.element;
  const T* input = static_cast<const T*>(p.grad.data) + batch * p.grad.batch + group * p.grad.group;
  const int64_t taps = static_cast<int64_t>(p.kernel[0]) * p.kernel[1] * p.kernel[2];
  const T* weight = static_cast<const T*>(p.weight) +
                    static_cast<int64_t>(group) * p.grad.channels * f.out_channels * taps + channel * f.weight_channel;
  const int at[3] = {z, y, x};
  int first[3], base[3];
  for (int a = 0; a < 3; ++a) {
    const AxisParams& axis = f.axis[a].layer;
    const int shifted = at[a] + axis.padding, phase = shifted % axis.stride;
    first[a] = axis.first_tap(phase);
    base[a] = shifted / axis.stride + (first[a] < axis.kernel ? axis.offset(phase, first[a]) : 0);
  }
  double sum = f.bias == nullptr ? 0. : to_accumulator(static_cast<const T*>(f.bias)[group * f.out_channels + channel]);
  const auto step = [&](int a) { return f.axis[a].layer.tap_step(); };
  int i[3];
  i[0] = base[0];
  for (int kd = first[0]; kd < p.kernel[0]; kd += step(0), i[0] -= f.axis[0].layer.offset_step()) {
    i[1] = base[1];
    for (int kh = first[1]; kh < p.kernel[1]; kh += step(1), i[1] -= f.axis[1].layer.offset_step()) {
      i[2] = base[2];
      for (int kw = first[2]; kw < p.kernel[2]; kw += step(2), i[2] -= f.axis[2].layer.offset_step()) {
        if (i[0] < 0 || i[0] >= p.axis[0].out || i[1] < 0 || i[1] >= p.axis[1].out || i[2] < 0 ||
            i[2] >= p.axis[2].out) {
          continue;
        }
        const T* from = input + i[0] * p.grad.along[0] + i[1] * p.grad.along[1] + i[2] * p.grad.along[2];
        const T* by = weight + ((static_cast<int64_t>(kd) * p.kernel[1] + kh) * p.kernel[2] + kw) * f.weight_tap;
        for (int c = 0; c < p.grad.channels; ++c) {
          sum += static_cast<double>(to_accumulator(from[c * channel_stride])) *
                 static_cast<double>(to_accumulator(by[c * f.out_channels * taps]));
        }
      }
    }
  }
  return from_accumulator<T>(f.rectify(static_cast<float>(sum)));
}

template <typename T>
struct alignas(2 * sizeof(T)) DensePair {
  T even, odd;
};

// Rows of the sums are cells: where their outputs begin, in elements from the box's first one. Negative: none.
__device__ __forceinline__ void fill_dense_rows(const DenseForward& f, const DenseTables& tables) {
  const DenseParams& p = f.phase;
  for (int i = threadIdx.x; i < p.positions; i += blockDim.x) {  // as tables.fill() does
    const int cell = tables.boxes[i];
    tables.places[i] = cell < 0 ? INT_MIN
                                : (cell >> 20) * f.axis[0].layer.stride * p.input.along[0] +
                                      (cell >> 10 & 1023) * f.axis[1].layer.stride * p.input.along[1] +
                                      (cell & 1023) * f.axis[2].layer.stride * p.input.along[2];
  }
}

// Where a warp's sums go to.
struct DenseTarget {
  const DenseForward& f;
  const DenseTables& tables;
  int first_row;
  int at[3];  // the first output of the first cell of the box
  int group;
  int64_t offset;
  bool inside;  // all outputs exist, but those of rows that are no cells

  __device__ DenseTarget(const DenseForward& f, const DenseTables& tables, const DenseTile& tile,
                         const DensePhase& phase, int first_row)
      : f(f), tables(tables), first_row(first_row), group(tile.group) {
    const DenseParams& p = f.phase;
    inside = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int stride = f.axis[a].layer.stride, out = static_cast<int>(f.axis[a].layer.out);
      at[a] = tile.box.at[a] * stride + phase.output[a];
      inside = inside && at[a] + (p.axis[a].box - 1) * stride + f.axis[a].joined <= out;
    }
    offset = tile.box.batch * p.input.batch + tile.group * p.input.group + places(at);
  }
  __device__ int places(const int (&at)[3]) const {
    const DenseSource& to = f.phase.input;
    return at[0] * to.along[0] + at[1] * to.along[1] + at[2] * to.along[2];
  }
  __device__ int row(int i) const { return first_row + i * 8 + static_cast<int>(threadIdx.x) % 32 / 4; }
  // The first output of row i.
  __device__ void find(int i, int (&first)[3]) const {
    const int box = tables.boxes[row(i)], cell[3] = {box >> 20, box >> 10 & 1023, box & 1023};
#pragma unroll
    for (int a = 0; a < 3; ++a) first[a] = at[a] + cell[a] * f.axis[a].layer.stride;
  }
  // Bytes: of how many joined phases an output exists, along each axis, up to 127.
  __device__ int bounds(int i) const {
    int first[3], bytes = 0;
    find(i, first);
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int left = static_cast<int>(f.axis[a].layer.out) - first[a];
      bytes |= max(0, min(left, 127)) << 8 * a;
    }
    return tables.boxes[row(i)] < 0 ? 0 : bytes;
  }
  __device__ static int bytes(const DenseColumn& column) {
    return column.exists ? column.phase[0] | column.phase[1] << 8 | column.phase[2] << 16 : 0x7f7f7f;
  }
  // Whether each byte of the bounds is greater than that of the phases.
  __device__ static bool exists(int bounds, int phases) {
    return (((bounds | 0x808080) - (phases + 0x010101)) & 0x808080) == 0x808080;
  }
};

// Of what is not finite, by the definition.
template <typename T, int kRows, int kColumns>
__device__ __forceinline__ void repair_dense(const DenseTarget& target, int batch, int first_column) {
  const DenseForward& f = target.f;
#pragma unroll 1
  for (int k = 0; k < 4 * kRows * kColumns; ++k) {
    const int i = k / (2 * kColumns);
    const DenseColumn column(f, first_column + k / 2 % kColumns * 8 + threadIdx.x % 4 * 2 + k % 2);
    if (!DenseTarget::exists(target.bounds(i), DenseTarget::bytes(column))) continue;
    int at[3];
    target.find(i, at);
    for (int a = 0; a < 3; ++a) at[a] += column.phase[a];
    T* const to = static_cast<T*>(f.phase.output) + batch * f.phase.input.batch + target.group * f.phase.input.group +
                  column.channel * f.phase.input.element + target.places(at);
    if (f.rectify.shows_finite(to_accumulator(*to))) continue;
    *to = dense_at<T>(f, batch, target.group, column.channel, at[0], at[1], at[2]);
  }
}

template <typename T, int kRows, int kColumns, bool kRectify>
__device__ __forceinline__ void store_dense(const DenseForward& f, const DenseTables& tables, int index, int first_row,
                                            int first_column, const DenseSums<kRows, kColumns>& sums) {
  asm volatile("" : "+r"(index));  // what follows is made again: registers are short before
  const DenseTile tile(f, index);
  const DensePhase phase(f, tile.phase);
  const DenseTarget target(f, tables, tile, phase, first_row);
  first_column += tile.block * f.phase.warps_n * kColumns * 8;
  T* const base = static_cast<T*>(f.phase.output) + target.offset;
  // Lanes find out about a column each.
  const int lane = threadIdx.x % 32;
  const DenseColumn own(f, first_column + lane);
  const int own_bytes = DenseTarget::bytes(own);
  const int own_offset = static_cast<int>(own.channel * f.phase.input.element) + target.places(own.phase);
  const auto epilogue = make_epilogue<T, kRectify>(f.bias, f.rectify);
  const float own_term =
      own.exists && f.bias != nullptr ? epilogue.channel_term(tile.group * f.out_channels + own.channel) : 0.f;
  int rows[2 * kRows];
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) rows[i] = tables.places[target.row(i)];
  float check = 0;  // NaN if a sum is not finite
  const auto store = [&](auto inside) {
    int bounds[2 * kRows];
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) bounds[i] = decltype(inside)::value ? 0 : target.bounds(i);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      int to[2], phases[2];
      float terms[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int from = n * 8 + lane % 4 * 2 + k;
        to[k] = __shfl_sync(~0u, own_offset, from);
        phases[k] = __shfl_sync(~0u, own_bytes, from);
        terms[k] = __shfl_sync(~0u, own_term, from);
      }
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) {
        const float even = sums[i / 2][n][i % 2 * 2], odd = sums[i / 2][n][i % 2 * 2 + 1];
        check = fmaf(even, 0.f, fmaf(odd, 0.f, check));
        const T values[2] = {epilogue(even, terms[0]), epilogue(odd, terms[1])};
        const auto exists = [&](int k) {
          return decltype(inside)::value ? rows[i] >= 0 && phases[k] != 0x7f7f7f
                                         : DenseTarget::exists(bounds[i], phases[k]);
        };
        if (f.pairs) {
          if (exists(0)) *reinterpret_cast<DensePair<T>*>(base + (to[0] + rows[i])) = {values[0], values[1]};
        } else {
          if (exists(0)) base[to[0] + rows[i]] = values[0];
          if (exists(1)) base[to[1] + rows[i]] = values[1];
        }
      }
    }
  };
  if (target.inside) {
    store(std::true_type{});
  } else {
    store(std::false_type{});
  }
  if (!(check == 0)) repair_dense<T, kRows, kColumns>(target, tile.box.batch, first_column);
}

}  // namespace fastconvt::cuda
