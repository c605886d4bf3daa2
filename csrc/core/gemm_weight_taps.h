// Taps of the weight's gradient as a matrix product (gemm_weight_gradient.h): which share outputs. Plain C++17: no
// Torch, no CUDA.
#pragma once

#include <algorithm>
#include <array>

#include "problem.h"

namespace fastconvt {

constexpr int kGemmWeightMaxTaps = 128;
constexpr int kGemmWeightMaxStride = 8;  // of copies

// A tap: its number in the kernel, its residue and its shift along depth, height and width. The outputs of counted taps
// are all outputs, each once.
struct alignas(16) GemmWeightTap {
  short number, residue[3], shift[3];
  bool counted;

  bool same_residue(const GemmWeightTap& other) const {
    return residue[0] == other.residue[0] && residue[1] == other.residue[1] && residue[2] == other.residue[2];
  }
};

// Whether taps padding .. padding + stride - 1 of every axis meet every output once, so that the bias's gradient is a
// sum of what is staged for them.
inline bool gemm_weight_counts(const Problem& p) {
  return std::all_of(p.axis.begin(), p.axis.end(), [](const Axis& a) {
    return (a.dilation == 1 || a.kernel == 1) && a.padding + a.stride <= a.kernel && a.out() <= a.in * a.stride;
  });
}

// Taps by residue, those of one residue by shift. Returns how many.
inline int gemm_weight_taps(const Problem& p, std::array<GemmWeightTap, kGemmWeightMaxTaps>& taps) {
  int count = 0;
  const auto residues = [&](const Axis& axis, auto&& visit) {
    for (int64_t r = 0; r < axis.stride; ++r) {
      for (int64_t t = 0; t < axis.kernel; ++t) {
        if (t * axis.dilation % axis.stride == r) {
          visit(r);
          break;
        }
      }
    }
  };
  const auto with_residue = [&](const Axis& axis, int64_t r, auto&& visit) {
    for (int64_t t = 0; t < axis.kernel; ++t) {
      if (t * axis.dilation % axis.stride == r) visit(t, t * axis.dilation / axis.stride);
    }
  };
  residues(p.axis[0], [&](int64_t rd) {
    residues(p.axis[1], [&](int64_t rh) {
      residues(p.axis[2], [&](int64_t rw) {
        with_residue(p.axis[0], rd, [&](int64_t kd, int64_t ed) {
          with_residue(p.axis[1], rh, [&](int64_t kh, int64_t eh) {
            with_residue(p.axis[2], rw, [&](int64_t kw, int64_t ew) {
              const auto s = [](int64_t x) { return static_cast<short>(x); };
              const int64_t number = (kd * p.axis[1].kernel + kh) * p.axis[2].kernel + kw;
              const auto counted = [](const Axis& a, int64_t t) { return t >= a.padding && t < a.padding + a.stride; };
              taps[count++] = {s(number),
                               {s(rd), s(rh), s(rw)},
                               {s(ed), s(eh), s(ew)},
                               counted(p.axis[0], kd) && counted(p.axis[1], kh) && counted(p.axis[2], kw)};
            });
          });
        });
      });
    });
  });
  return count;
}

// What a block stages for its slots, one residue of one block of channels after the other: calls
// visit(first slot, last slot + 1, least shifts, greatest shifts).
template <typename Taps, typename Visit>
void gemm_weight_boxes(const Taps& taps, int count, int first, int last, Visit&& visit) {
  for (int slot = first; slot < last;) {
    const GemmWeightTap& tap = taps[slot % count];
    int least[3], most[3], end = slot;
    for (int a = 0; a < 3; ++a) least[a] = most[a] = tap.shift[a];
    for (; end < last && end / count == slot / count && taps[end % count].same_residue(tap); ++end) {
      for (int a = 0; a < 3; ++a) {
        least[a] = std::min<int>(least[a], taps[end % count].shift[a]);
        most[a] = std::max<int>(most[a], taps[end % count].shift[a]);
      }
    }
    visit(slot, end, least, most);
    slot = end;
  }
}

}  // namespace fastconvt
