// The phase-direct family's parameters, and what a template instance is. See core/phase_direct.h.
#pragma once

#include <cuda.h>

#include "../core/phase_direct.h"
#include "device/fast_divide.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// How inputs come to shared memory: planes by tensor copies; by element, wherever they lie; or, channels_last, four
// channels at a time by tensor copies, which the warp then transposes.
enum class PhaseDirectFill { kPlanes, kElements, kPixels };

struct PhaseDirectParams {
  CUtensorMap map;
  const float* input;
  const float* weight;
  const float* bias;
  float* output;
  Rectifier rectify;
  int64_t in_batch, in_channel, out_batch, out_channel;  // strides, in elements
  int in_pixel, out_pixel;
  int channels, group_in, group_out;  // channels: of the input
  int weight_channel, weight_tap;     // strides of a weight, of output channels and taps
  int in[2], out[2], padding[2], first_cell[2];
  FastDivide tiles[2];
  int all_tiles;
  bool vectors;  // rows of four outputs are aligned
};

template <int kShape, PhaseDirectFill kFillOf>
struct PhaseDirectTraits {
  static constexpr PhaseDirectShape kOf = kPhaseDirectShapes[kShape];
  static constexpr PhaseDirectFill kFill = kFillOf;
  static constexpr bool kPixels = kFill == PhaseDirectFill::kPixels;
  static constexpr int kKernel = kOf.kernel, kStride = kOf.stride, kRows = kOf.rows, kColumns = kOf.columns;
  static constexpr int kReach = kOf.reach();
  static constexpr int kLead = kFill == PhaseDirectFill::kPlanes ? kOf.lead() : 0;
  static constexpr int kLanes = kPhaseDirectLanes;
  static constexpr int kTileHeight = 32 / kLanes * kRows, kTileWidth = kLanes * kColumns;
  static constexpr int kSums = kRows * kStride * kColumns * kStride;
  static constexpr int kChain = kOf.chain;
  // Warps of a block: each makes a tile for its share of the channels.
  static constexpr int kWarps = kPixels ? 8 : 4, kBlocks = kPixels ? 1 : 2, kThreads = kWarps * 32;
  static constexpr int kCopied = kPixels ? 4 : 1;  // channels of a copy
  // A staged plane; the last positions of a row only fill it up to 16 bytes.
  static constexpr int kPitch = (kLead + kTileWidth + kReach - 1 + 3) / 4 * 4, kHeight = kTileHeight + kReach - 1;
  static constexpr int kPlane = (kPitch * kHeight + 31) / 32 * 32;  // floats, as all sizes here
  static constexpr int kStages = kPixels ? 1 : 3;
  static constexpr int kPlanesAt = kPixels ? (4 * kPitch * kHeight + 31) / 32 * 32 : 0;
  static constexpr int kWarpFloats = kPlanesAt + (kPixels ? 2 : kStages) * kPlane;
  static constexpr int kShares = kWarps * kSums * 32;
  static constexpr int kWeights = (kKernel * kKernel + 3) / 4 * 4;  // of a channel

  static constexpr int shared_bytes(int channels) {
    return (kWarps * kWarpFloats + kShares + channels * kWeights) * 4 + kWarps * kStages * 8;
  }
  // Rows of a kernel stand in the order of their use: those that read the first row of a window come first.
  static __host__ __device__ constexpr int row_place(int row) {
    const int back = row / kStride;
    return kKernel - (kStride * (back + 1) < kKernel ? kStride * (back + 1) : kKernel) + row % kStride;
  }
};

}  // namespace fastconvt::cuda
