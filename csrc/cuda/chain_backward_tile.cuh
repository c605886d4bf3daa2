// Tiles, phases and weights of the fused kernel of the chain's gradients.
#pragma once

#include "chain.cuh"
#include "chain_backward_fused.h"
#include "device/tf32.cuh"

namespace fastconvt::cuda {

// Where du is made by this kernel, |log2 S| is below; so 1 / S times dv neither overflows nor loses bits.
constexpr float kFusedSafe = 64.0f;

__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void prefetch_to_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

struct FusedTile {
  int batch;
  int first[3];  // cell
  int own[3];    // cells
  int cells[3];  // with those beyond the own ones, along depth and width
  int seam;      // before the tile's first row
};

__device__ __forceinline__ FusedTile find_tile(const FusedParams& p, int index) {
  FusedTile tile;
  tile.batch = index % p.batch;
  index /= p.batch;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int a = i == 0 ? 2 : i - 1;  // width, depth, height: the last ones, perhaps shorter, come last
    const FusedAxis& axis = p.axis[a];
    tile.first[a] = index % axis.tiles * axis.tile;
    index /= axis.tiles;
    tile.own[a] = min(axis.tile, axis.cells - tile.first[a]);
    const bool last = tile.first[a] + tile.own[a] == axis.cells;
    tile.cells[a] = tile.own[a] + (a == 1 || last ? 0 : 1);
  }
  tile.seam = tile.first[1] / p.axis[1].tile - 1;
  return tile;
}

// One phase of one row of cells.
struct FusedPlace {
  int batch;
  int cell[3];     // of lane 0
  int output[3];   // of that cell
  int cells, own;  // along the width
  int phase;
};

__device__ __forceinline__ bool output_exists(const FusedParams& p, const FusedPlace& place, int cell) {
  const int x = place.output[2] + cell * p.axis[2].stride;
  return cell < place.cells && x >= 0 && x < p.axis[2].out;
}

__device__ __forceinline__ int64_t output_offset(const FusedParams& p, const FusedPlace& place, int cell) {
  const int64_t row = (static_cast<int64_t>(place.batch) * p.axis[0].out + place.output[0]) * p.axis[1].out;
  return (row + place.output[1]) * p.axis[2].out + place.output[2] + cell * p.axis[2].stride;
}

// The weight's tap for a phase and a neighbour along all axes, or -1.
__device__ __forceinline__ int find_tap(const FusedParams& p, int phase, int neighbour) {
  int tap = 0;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int t = p.phase[phase].residue[a] + (neighbour >> (2 - a) & 1) * p.axis[a].stride;
    if (t >= p.axis[a].kernel) return -1;
    tap = tap * p.axis[a].kernel + t;
  }
  return tap;
}

template <typename T>
__device__ __forceinline__ float load_weight(const FusedParams& p, int in_channel, int out_channel, int tap) {
  if (in_channel >= p.in_channels || out_channel >= p.out_channels || tap < 0) return 0;
  const int taps = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  return to_accumulator(
      __ldg(static_cast<const T*>(p.weight) + (in_channel * p.out_channels + out_channel) * taps + tap));
}

}  // namespace fastconvt::cuda
