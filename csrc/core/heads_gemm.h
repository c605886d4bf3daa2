// The heads GEMM: transposed convolutions to at most three output channels a group, with kernel 3 or 4 and stride 2
// along three axes, as one matrix product of a block on asynchronous matrix units. What it can make. Plain C++17: no
// Torch, no CUDA.
//
// Write o + padding = 2 q + phase: cell q reads the inputs at q - 1 and q along each axis, by the taps phase + 2 and
// phase. Rows of the product are inputs, in lines along the width. Its inner dimension is (tap of depth and height,
// channel); its columns are (tap of the width, output channel, phase of all axes). So an output is the sum of two
// elements in neighbouring rows, and an input is read four times rather than eight.
#pragma once

#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kHeadsGemmOut = 3;              // output channels of a group, at most
inline constexpr int kHeadsGemmChannels = 8;         // input channels of a step
inline constexpr int kHeadsGemmBox[3] = {3, 3, 33};  // cells of a block, at most
inline constexpr int kHeadsGemmLine = 34;            // inputs of a line
inline constexpr int64_t kHeadsGemmMultiprocessors = 132;

// From a block to the next one, in cells; even along a width of several blocks, so that pairs of inputs stay whole.
constexpr int64_t heads_gemm_step(int axis, int64_t cells) {
  return kHeadsGemmBox[axis] - (axis == 2 && cells > kHeadsGemmBox[2] ? 1 : 0);
}

inline int64_t heads_gemm_cells(const Axis& a) { return a.base(a.out() - 1) - a.base(0) + 1; }

inline int64_t heads_gemm_boxes(const Problem& p) {
  int64_t boxes = p.batch * p.groups;
  for (int a = 0; a < 3; ++a) {
    const int64_t cells = heads_gemm_cells(p.axis[a]);
    boxes *= ceil_div(cells, heads_gemm_step(a, cells));
  }
  return boxes;
}

// Whether pairs of inputs along the width, or channels in fours, are aligned where the tensor is.
inline bool heads_gemm_vectors(const Problem& p) {
  if (p.layout == Layout::kChannelsLast) return p.in_channels_per_group() % 4 == 0;
  return p.axis[2].in % 2 == 0 && (p.axis[2].base(0) - 1) % 2 == 0;
}

inline std::string heads_gemm_refusal(const Problem& p) {
  if (p.dtype != DType::kFloat32) return "a data type other than float32";
  for (const Axis& a : p.axis) {
    if (a.stride != 2 || a.dilation != 1 || a.kernel < 3 || a.kernel > 4) {
      return "anything but a kernel of 3 or 4, stride 2 and no dilation along three axes";
    }
  }
  if (p.out_channels_per_group() > kHeadsGemmOut) return "more than 3 output channels a group";
  if (p.in_channels_per_group() < 16) return "fewer than 16 input channels a group";
  if (p.out_elements() == 0) return "";
  if (p.in_positions() == 0) return "an empty input";
  constexpr int64_t kLimit = int64_t{1} << 28;
  for (const Axis& a : p.axis) {
    if (a.in >= kLimit || a.out() >= kLimit || a.padding >= kLimit) return "a long axis, or a large padding";
  }
  if (double(p.in_positions()) >= double(int64_t{1} << 31)) return "an input of 2^31 positions";
  if (p.batch >= kLimit || p.in_channels >= 1 << 20) return "a large batch or many channels";
  if (double(heads_gemm_boxes(p)) >= 2e9) return "too many tiles";
  return "";
}

// Milliseconds on an H200, of what is not refused: fitted to layers of 8 to 60 steps, within a twelfth.
inline double heads_gemm_cost_ms(const Problem& p) {
  if (p.out_elements() == 0) return 0;
  const double steps = double(ceil_div(p.in_channels_per_group(), int64_t{kHeadsGemmChannels}));
  const bool vectors = heads_gemm_vectors(p);
  double step = p.allow_tf32 ? (vectors ? 1.13e-3 : 1.25e-3) : vectors ? 1.53e-3 : 1.63e-3;
  if (p.layout == Layout::kChannelsLast)
    step = p.allow_tf32 ? (vectors ? 1.43e-3 : 3.2e-3) : vectors ? 1.87e-3 : 3.85e-3;
  const int64_t boxes = heads_gemm_boxes(p), rounds = ceil_div(boxes, kHeadsGemmMultiprocessors);
  const double waves = rounds > 4 ? double(boxes) / double(kHeadsGemmMultiprocessors) + 0.25 : double(rounds);
  return 0.0055 + (0.0035 + steps * step) * waves;
}

}  // namespace fastconvt
