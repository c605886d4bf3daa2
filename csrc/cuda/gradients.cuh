// The gradients of a transposed convolution with respect to its input and its weight, of one window of the problem at a
// time. T is the tensors' element type; S that of the output's gradient. No atomics: the same bits every run.
#pragma once

#include <cuda_runtime.h>

#include "chain.cuh"

namespace fastconvt::cuda {

// Where the gradient of a window's outputs lies: phase by phase along each axis, so that threads on neighbouring cells
// touch neighbouring elements. Places whose output does not exist are neither written nor read.
struct PhaseView {
  CellAxis axis[3];
  Strides cell;        // to the next batch entry, channel, or cell of the same phase
  int64_t residue[3];  // to the next phase

  // Element offset of the phases with residue r along axis a.
  FASTCONVT_HOST_DEVICE int64_t residue_offset(int a, int r, int stride) const {
    return (r - axis[a].first_residue + (r < axis[a].first_residue ? stride : 0)) * residue[a];
  }
};

#ifdef __CUDACC__

template <typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc value) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(kAllLanes, value, lane);
  return value;
}

// The outputs that tap t reaches from inputs: from input i, along one axis, cell i + offset of the phase with this
// residue. These exist for cells begin to begin + size - 1 of the view.
struct TapReach {
  int residue;
  int offset;
  int begin;
  int size;
};

__device__ __forceinline__ TapReach reach_of_tap(const AxisParams& axis, const CellAxis& cells, int out_begin,
                                                 int out_end, int tap) {
  const int64_t shift = static_cast<int64_t>(tap) * axis.dilation;
  TapReach reach;
  reach.residue = static_cast<int>(shift % axis.stride);
  reach.offset = static_cast<int>(shift / axis.stride);
  const int first = out_begin + axis.padding - reach.residue;  // output of cell 0 is residue - padding
  const int end = out_end + axis.padding - reach.residue;
  reach.begin = first > 0 ? (first + axis.stride - 1) / axis.stride : 0;
  reach.size = max(0, (end > 0 ? (end + axis.stride - 1) / axis.stride : 0) - reach.begin);
  reach.begin -= cells.first_cell;
  return reach;
}

#endif  // __CUDACC__

inline PhaseView make_phase_view(const Problem& problem, const Window& window) {
  PhaseView view{};
  int64_t stride = 1;
  for (int a = 2; a >= 0; --a) {
    view.axis[a] = make_cell_axis(problem.axis[a], window.out_begin[a], window.out_end[a]);
    view.cell.axis[a] = stride;
    view.residue[a] = stride * view.axis[a].cells;
    stride *= int64_t{view.axis[a].cells} * view.axis[a].residues;
  }
  view.cell.channel = stride;
  view.cell.batch = stride * problem.out_channels;
  return view;
}

// grad_input of the window's inputs: a strided convolution of the output's gradient.
template <typename T, typename S>
cudaError_t launch_input_gradient(const Problem& problem, const Window& window, const S* grad_output, const T* weight,
                                  T* grad_input, cudaStream_t stream);

// In how many partial sums the weight's gradient is made.
int64_t weight_gradient_slots(const Problem& problem);

// Adds the window's inputs times output gradients to partial (slots, weight elements).
template <typename T, typename S>
cudaError_t launch_weight_gradient(const Problem& problem, const Window& window, const T* input, const S* grad_output,
                                   accumulator_t<T>* partial, cudaStream_t stream);

// output[i] = scale * sum over slots of partial[slot][i], summed in float64.
template <typename T>
cudaError_t launch_reduction(const accumulator_t<T>* partial, int64_t slots, int64_t count, double scale, T* output,
                             cudaStream_t stream);

}  // namespace fastconvt::cuda
