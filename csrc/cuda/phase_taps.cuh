// The phase GEMMs' order of a weight's taps: by phases, then within a phase, both last axis fastest.
#pragma once

namespace fastconvt::cuda {

struct TapPlace {
  int before;  // taps of earlier phases
  int taps;    // of its phase
  int number;  // in its phase
};

// For the parameters of any of the families.
template <class Params>
__device__ __forceinline__ TapPlace find_tap(const Params& p, int tap) {
  int t[3];
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    t[a] = tap % p.axis[a].kernel;
    tap /= p.axis[a].kernel;
  }
  TapPlace place{0, 1, 0};
  int kernels = p.taps;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const auto& axis = p.axis[a];
    int f = (t[a] * axis.dilation - axis.padding) % axis.stride;
    if (f < 0) f += axis.stride;
    const auto& phase = axis.phase[f];
    kernels /= axis.kernel;
    place.before += place.taps * phase.before * kernels;
    place.number = place.number * phase.taps + (t[a] - phase.first_tap) / axis.tap_step;
    place.taps *= phase.taps;
  }
  return place;
}

}  // namespace fastconvt::cuda
