// Rows of pixels: parameters, and how the roles of a block see them.
#pragma once

#include "../core/pixel_rows.h"
#include "device/fast_divide.h"
#include "epilogue.cuh"
#include "params.h"
#include "rectifier.h"
#include "rows_mma_height.h"
#include "rows_persistent_fragment.cuh"
#include "rows_ring.cuh"

namespace fastconvt::cuda {

struct PixelRowsParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  PixelRowsTile tile;
  RowsMmaPhase phase[kPixelRowsMaxStride];  // of the height
  int in_height, out_height, height_kernel, height_stride, height_padding;
  int tap_step, back_step;  // between the taps of a phase of the height, and between what they read
  int in_width, out_width, padding;
  int in_channels, out_channels;
  int group_in, group_out;
  int skew;     // elements that the output begins behind a sector
  int items;    // segments of all bases of the height, of all batch entries
  int granule;  // bytes that a copy of inputs moves
  FastDivide by_segments, by_bases, by_group_in, by_group_out, by_height_kernel;
  FastDivide by_pieces;  // copies of an input pixel
};

template <typename T, bool kSplit_, int kKernel_, int kStride_, int kDilation_>
struct PixelRowsTraits : TappedPhases<kKernel_, kStride_, kDilation_> {
  using Element = T;
  static constexpr bool kSplit = kSplit_;  // float32 as two TF32 terms, by three products
  static constexpr int kKernel = kKernel_;
  static constexpr int kStride = kStride_;
  static constexpr int kDilation = kDilation_;
  static constexpr int kReach = (kKernel - 1) * kDilation / kStride;  // bases that taps read back
  static constexpr int kMakers = pixel_rows_makers(kStride_);
  static constexpr int kThreads = 32 * (kMakers + 2);  // and a storer and a feeder
  static constexpr int kTiles = pixel_rows_tiles(sizeof(T), kStride_);
  static constexpr int kStrips = pixel_rows_strips(sizeof(T), kStride_);
  static constexpr int kBases = 8 * kTiles;       // of a strip
  static constexpr int kVector = 16 / sizeof(T);  // elements
};

// A segment of the output rows of one base of the height.
struct PixelRowsItem {
  int batch, base, column;  // column: base of the last axis where it starts
  __device__ PixelRowsItem(const PixelRowsParams& p, int index) {
    int segment = index;
    base = p.by_segments(segment);
    column = p.tile.base + segment * p.tile.columns;
    batch = p.by_bases(base);
    base += p.tile.first;
  }
};

// The base of column c of tile 0 of a strip, of tile j the j-th one behind it: lanes read their columns' inputs at the
// same time, and four pixels apart they stand in different banks.
template <int kTiles>
__device__ constexpr int pixel_rows_base(int c) {
  return kTiles == 4 ? 4 * c : c % 2 * 4 + c / 2 % 2 * 2 + c / 4 * 8;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the roles have in common.
template <class Traits>
struct PixelRowsRole {
  using Of = Traits;
  using T = typename Traits::Element;

  const PixelRowsParams& p;
  unsigned char* const shared;
  const int lane;

  __device__ PixelRowsRole(const PixelRowsParams& p, unsigned char* shared)
      : p(p), shared(shared), lane(threadIdx.x % 32) {}

  // [tap of the height][channel block][unit][tap][half of the unit][lane]
  __device__ MmaLeft<float>* weights() const { return reinterpret_cast<MmaLeft<float>*>(shared); }
  __device__ float* terms() const { return reinterpret_cast<float*>(shared + p.tile.terms); }
  __device__ T* constants() const { return reinterpret_cast<T*>(shared + p.tile.constants) + p.skew; }
  __device__ uint32_t* inputs(int buffer) const {
    return reinterpret_cast<uint32_t*>(shared + p.tile.inputs + buffer * p.tile.input_bytes);
  }
  __device__ int input_row_words() const { return (p.tile.columns + Traits::kReach) * p.tile.row_pitch; }
  __device__ T* outputs(int stage) const {
    return reinterpret_cast<T*>(shared + p.tile.outputs + stage * p.tile.output_bytes) + p.skew;
  }
  __device__ uint64_t* barrier(int kind, int place) const {
    return reinterpret_cast<uint64_t*>(shared + p.tile.barriers) + kind * kPixelRowsRing + place;
  }
  __device__ uint64_t* full(int buffer) const { return barrier(0, buffer); }
  __device__ uint64_t* empty(int buffer) const { return barrier(1, buffer); }
  __device__ uint64_t* staged(int stage) const { return barrier(2, stage); }
  __device__ uint64_t* free(int stage) const { return barrier(3, stage); }

  __device__ bool tapless(int phase) const { return p.phase[phase].first_tap < 0; }
  __device__ int output_y(int base, int phase) const { return base * p.height_stride + phase - p.height_padding; }
  __device__ bool has_output(int y) const { return static_cast<unsigned>(y) < static_cast<unsigned>(p.out_height); }
  __device__ bool has_input(int y) const { return static_cast<unsigned>(y) < static_cast<unsigned>(p.in_height); }
};

#endif

}  // namespace fastconvt::cuda
