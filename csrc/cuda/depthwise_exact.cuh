// The depthwise kernels' way out where a weight is not finite: outputs one by one, by the definition, so that it meets
// only inputs that exist. One function for all forms, since it is large and rarely runs.
#pragma once

#include "depthwise_columns.cuh"

namespace fastconvt::cuda {

// What a thread makes.
template <typename T>
struct ExactOutputs {
  const T* input;  // of its sample, from its channel or the first channel of its block on
  T* output;
  const float* bias;  // of the block's channels
  int channel;        // the first of them
  int plane, begin;   // bases of the depth and, the first one, of the height
  int phase, phases;  // of the height
  ExactColumns columns;
};

// One output by the definition: weights that are not finite meet only inputs that exist.
template <typename T>
__device__ float exact_output(const DepthwiseParams& p, const T* input, const T* weight, int oz, int oy, int ox,
                              float sum) {
  const int at[3] = {oz, oy, ox};
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
  for_taps(0, [&](int tz, int z) {
    for_taps(1, [&](int ty, int y) {
      for_taps(2, [&](int tx, int x) {
        const T* const source = input + int64_t{z} * p.input_plane + int64_t{y} * p.input_row + x * p.input_inner;
        const float w = to_accumulator(weight[(tz * p.axis[1].kernel + ty) * p.axis[2].kernel + tx]);
        sum = fmaf(to_accumulator(*source), w, sum);
      });
    });
  });
  return sum;
}

template <typename T>
__device__ __noinline__ void make_exact(const DepthwiseParams& p, const ExactOutputs<T>& outputs) {
  const ExactColumns& columns = outputs.columns;
  const int filter = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  const int places = p.axis[0].stride * outputs.phases;
#pragma unroll 1
  for (int turn = 0; turn < p.march * places; ++turn) {
    const int q = outputs.begin + turn / places, ry = turn % outputs.phases, rz = turn % places / outputs.phases;
    const int oz = outputs.plane * p.axis[0].stride - p.axis[0].padding + rz;
    const int oy = q * p.row_stride - p.row_padding + outputs.phase + ry;
    if (oz < 0 || oz >= p.axis[0].out || oy < 0 || oy >= p.rows_out) continue;
    const int row = p.step_out == 0 ? oy : 0;
#pragma unroll 1
    for (int e = 0; e < columns.vector * columns.count; ++e) {
      const int side = e % columns.vector;
      const int ox = columns.first + e / columns.vector * columns.step + (columns.channels ? 0 : side) + q * p.step_out;
      const int c = columns.channel + (columns.channels ? side : 0);
      if (ox < 0 || ox >= p.axis[2].out) continue;
      const T* const weight = static_cast<const T*>(p.weight) + int64_t{outputs.channel + c} * filter;
      const float sum = exact_output(p, outputs.input + c, weight, oz, row, ox, outputs.bias[c]);
      outputs.output[int64_t{oz} * p.output_plane + int64_t{row} * p.output_row + ox * p.output_inner + c] =
          from_accumulator<T>(p.rectify(sum));
    }
  }
}

}  // namespace fastconvt::cuda
