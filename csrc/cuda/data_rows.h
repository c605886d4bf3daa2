// The rows of a layer of one or two spatial axes, for kernels that make one row of outputs at a time. A data row is an
// output row whose phase can have taps; the rows between data rows are constant, bias and nothing else.
#pragma once

#include "../core/rows.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

// A base of kernel parameters. Data rows are first_row + i * row_step.
struct DataRows {
  int in_height, in_width, out_height, out_width;
  int padding, first_base, bases, segments;  // of the last axis
  int kernel_height, row_dilation;           // row_dilation: input rows between neighbouring taps of a phase
  int first_row, row_step, rows;
  int row_phase;               // (first_row + padding) / row_step
  int row_inverse;             // of dilation / gcd modulo stride / gcd, along the height
  bool tapless;                // no output row has a phase with taps: row 0 stands for a data row
  FastDivide by_row_phase;     // stride / gcd of the height: phases with taps, and the taps' step
  FastDivide by_row_dilation;  // row_dilation
};

inline void set_data_rows(const Problem& problem, DataRows& p) {
  const AxisParams height = axis_params(problem.axis[1]), width = axis_params(problem.axis[2]);
  p.in_height = static_cast<int>(height.in), p.out_height = static_cast<int>(height.out);
  p.kernel_height = height.kernel;
  p.row_dilation = height.dilation_quotient;
  p.row_inverse = height.inverse;
  p.row_step = height.gcd;
  p.first_row = (height.gcd - height.padding % height.gcd) % height.gcd;
  p.tapless = p.first_row >= p.out_height;
  if (p.tapless) p.first_row = 0;
  p.rows = (p.out_height - p.first_row + p.row_step - 1) / p.row_step;
  p.row_phase = (p.first_row + height.padding) / p.row_step;
  p.by_row_phase = fast_divide(height.stride_quotient);
  p.by_row_dilation = fast_divide(height.dilation_quotient);
  p.in_width = static_cast<int>(width.in), p.out_width = static_cast<int>(width.out);
  p.padding = width.padding;
  p.first_base = static_cast<int>(width.first_base()), p.bases = static_cast<int>(width.num_bases());
  p.segments = static_cast<int>(row_segments(problem.axis[2]));
}

#ifdef __CUDACC__

// The taps of a data row that are in range.
struct RowTaps {
  int first, count;  // first + j * step
  int input_row;     // that the first of them reads; the j-th reads j * row_dilation before

  // row_step * (row_phase + row) = output_row + padding = stride * q + row_step * phase.
  __device__ static RowTaps make(const DataRows& p, int row) {
    RowTaps r;
    int phase = p.row_phase + row;
    const int q = p.by_row_phase(phase);
    int t = phase * p.row_inverse;
    p.by_row_phase(t);
    int reach = t * p.row_dilation - phase;  // a multiple of the step
    const int h = q - p.by_row_phase(reach);
    int last = p.kernel_height - 1 - t;
    const int taps = last < 0 || p.tapless ? 0 : p.by_row_phase(last) + 1;
    int above = h - p.in_height + p.row_dilation;  // taps that read below the input come first
    const int begin = above < p.row_dilation ? 0 : p.by_row_dilation(above);
    int below = h;
    const int end = h < 0 ? 0 : min(taps, p.by_row_dilation(below) + 1);
    r.count = max(0, end - begin);
    r.first = t + begin * p.by_row_phase.divisor;
    r.input_row = h - begin * p.row_dilation;
    return r;
  }
};

#endif

}  // namespace fastconvt::cuda
