// The direct kernels' way out where a weight is not finite: outputs one by one, by the definition, so that it meets
// only inputs that exist.
#pragma once

#include "device/numeric.cuh"
#include "direct_params.h"

namespace fastconvt::cuda {

// What a thread makes.
template <typename T>
struct DirectExactRows {
  const T* input;  // of its sample, from the group's first channel on
  T* output;
  const float* bias;
  int quad, channels;
  int plane, begin;          // bases of the depth and, the first one, of the height
  int first, vector, count;  // columns: vectors, and how many
};

// One output by the definition; `weight` is that of the group's first input channel.
template <typename T>
__device__ float exact_direct(const DirectParams& p, const T* input, const T* weight, const int (&at)[3], float sum) {
  int phase[3], base[3];
  for (int a = 0; a < 3; ++a) {
    phase[a] = (at[a] + p.axis[a].padding) % p.axis[a].stride;
    base[a] = (at[a] + p.axis[a].padding) / p.axis[a].stride;
  }
  const auto for_taps = [&](int a, auto&& function) {
    const AxisParams& axis = p.axis[a];
    for (int t = axis.first_tap(phase[a]); t < axis.kernel; t += axis.tap_step()) {
      const int i = base[a] + axis.offset(phase[a], t);
      if (i >= 0 && i < axis.in) function(t, i);
    }
  };
  const int filter = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  for_taps(0, [&](int tz, int z) {
    for_taps(1, [&](int ty, int y) {
      for_taps(2, [&](int tx, int x) {
        const T* source = input + int64_t{z} * p.input_plane + int64_t{y} * p.input_row + x * p.input_inner;
        const T* from = weight + (tz * p.axis[1].kernel + ty) * p.axis[2].kernel + tx;
        for (int c = 0; c < p.in_channels; ++c) {
          sum = fmaf(to_accumulator(*source), to_accumulator(*from), sum);
          source += p.input_channel, from += int64_t{p.out_channels} * filter;
        }
      });
    });
  });
  return sum;
}

template <typename T>
__device__ __noinline__ void make_exact_rows(const DirectParams& p, const DirectExactRows<T>& rows) {
  const int filter = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  const int group = rows.quad / p.quads_per_group, out = rows.quad % p.quads_per_group * kDirectChannels;
  const T* const weight =
      static_cast<const T*>(p.weight) + (int64_t{group} * p.in_channels * p.out_channels + out) * int64_t{filter};
  const int end = min(rows.begin + p.march, p.first_row + p.num_rows);
  const auto make_row = [&](int oz, int oy) {
#pragma unroll 1
    for (int e = 0; e < rows.count * rows.vector * rows.channels; ++e) {
      const int c = e % rows.channels, v = e / rows.channels;
      const int ox = rows.first + v / rows.vector * p.column_out + v % rows.vector;
      if (ox >= p.axis[2].out) continue;
      const int at[3] = {oz, oy, ox};
      const float sum = exact_direct(p, rows.input, weight + int64_t{c} * filter, at, rows.bias[c]);
      rows.output[c * p.output_channel + int64_t{oz} * p.output_plane + int64_t{oy} * p.output_row +
                  ox * p.output_inner] = from_accumulator<T>(p.rectify(sum));
    }
  };
#pragma unroll 1
  for (int q = rows.begin; q < end; ++q) {
#pragma unroll 1
    for (int rz = 0; rz < p.axis[0].stride; ++rz) {
      const int oz = rows.plane * p.axis[0].stride - p.axis[0].padding + rz;
      if (oz < 0 || oz >= p.axis[0].out) continue;
#pragma unroll 1
      for (int ry = 0; ry < p.axis[1].stride; ++ry) {
        const int oy = q * p.axis[1].stride - p.axis[1].padding + ry;
        if (oy >= 0 && oy < p.axis[1].out) make_row(oz, oy);
      }
    }
  }
}

}  // namespace fastconvt::cuda
