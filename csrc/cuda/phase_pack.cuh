// What the launches that pack for the phase GEMMs share.
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

// The order of a weight's taps: by phases, then within a phase, both last axis fastest.
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

constexpr int kPhasePackTile = 64;  // channels, and positions

// In 16 bits: a tile of 64 rows, channels, by 64 columns, neighbours in memory: two columns are a word.
constexpr int kPhasePackPitch = kPhasePackTile / 2 + 1;  // keeps banks apart
using PhasePackTile = uint32_t[kPhasePackTile][kPhasePackPitch];

// Eight channels, from number 8 * granule on, of two columns.
__device__ __forceinline__ void read_tile(const PhasePackTile& tile, int granule, int pair, uint4& even, uint4& odd) {
  uint32_t low[4], high[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a = tile[granule * 8 + 2 * k][pair], b = tile[granule * 8 + 2 * k + 1][pair];
    low[k] = __byte_perm(a, b, 0x5410), high[k] = __byte_perm(a, b, 0x7632);
  }
  even = {low[0], low[1], low[2], low[3]}, odd = {high[0], high[1], high[2], high[3]};
}

}  // namespace fastconvt::cuda
