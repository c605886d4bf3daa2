// The heads GEMM: what a block is told (csrc/core/heads_gemm.h), how it finds its part of the problem, and its shared
// memory.
#pragma once

#include "../core/heads_gemm.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

struct HeadsGemmAxis {
  int in, out, kernel, padding;
  int first;         // input of offset 0 of cell 0
  int first_output;  // of phase 0 of cell 0; it may be negative
  int step;          // cells from one block to the next
  FastDivide by_boxes;
};

struct HeadsGemmParams {
  const float* input;
  const float* weight;
  const float* bias;  // or null
  float* output;
  Rectifier rectify;
  Strides in, out;
  HeadsGemmAxis axis[3];
  int group_in, group_out, taps;
  int weight_channel;          // elements from one input channel to the next
  int weight_out, weight_tap;  // from one output channel, and tap, to the next
  int64_t weights;             // in all, below 2^31
  FastDivide by_groups;
};

// kStrict: float32 in three TF32 products. kVector: inputs that are copied at once, neighbours along the width or, in
// channels_last, channels.
template <bool kStrict_, bool kChannelsLast_, int kVector_>
struct HeadsGemmTraits {
  static constexpr bool kStrict = kStrict_, kChannelsLast = kChannelsLast_;
  static constexpr int kVector = kVector_;
  static constexpr int kDepth = kHeadsGemmBox[0], kHeight = kHeadsGemmBox[1], kLine = kHeadsGemmLine;
  static constexpr int kRows = kDepth * kHeight * kLine, kWarpgroups = (kRows + 63) / 64;
  static constexpr int kMakers = kWarpgroups * 128, kFeeders = 128, kThreads = kMakers + kFeeders;
  // All registers of a multiprocessor that a block of this size begins with.
  static constexpr int kMakerRegisters = 88, kFeederRegisters = 40;
  static constexpr int kHeld = (kDepth + 1) * (kHeight + 1) * kLine;  // inputs
  static constexpr int kColumns = 2 * 8 * kHeadsGemmOut;
  static constexpr int kStages = 4;
  // Sums of more steps than these are added up in shared memory, since few additions should follow each other.
  static constexpr int kFold = 32;

  // Words of a channel, which are 8 modulo 32, or of a position's channels: no two lanes meet in a bank.
  static constexpr int kPitch = kChannelsLast ? 12 : (kHeld + 23) / 32 * 32 + 8;
  static constexpr int kInputBytes = (kChannelsLast ? kHeld : kHeadsGemmChannels) * kPitch * 4;
  // Weights: four channels of all columns are a granule, strictly followed by what the leading bits leave; a tap has
  // two.
  static constexpr int kRests = kColumns * 16, kGranule = (kStrict ? 2 : 1) * kRests, kTap = 2 * kGranule;
  static constexpr int kStage = kInputBytes + 4 * kTap;
  static constexpr int kSumPitch = kColumns + 2;  // words of a row

  // Shared memory in bytes: barriers, where the inputs stand, stages, sums.
  static constexpr int kPlaces = 128, kStage0 = kPlaces + (kHeld * 4 + 127) / 128 * 128;
  static constexpr int kSums = kStage0 + kStages * kStage, kShared = kSums + kRows * kSumPitch * 4;
  static_assert(kHeld % 2 == 0 && kStage % 128 == 0 && kShared <= 227 * 1024);
};

// The box of a block.
struct HeadsGemmBlock {
  int n, group;
  int cell[3];  // the first one

  __device__ explicit HeadsGemmBlock(const HeadsGemmParams& p) {
    // Volatile, so that it is found again rather than kept in registers.
    int rest;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(rest));
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int index = rest;
      rest = p.axis[a].by_boxes(index);
      cell[a] = index * p.axis[a].step;
    }
    group = rest;
    n = p.by_groups(group);
  }

  __device__ __forceinline__ const float* input(const HeadsGemmParams& p) const {
    return p.input + n * p.in.batch + static_cast<int64_t>(group) * p.group_in * p.in.channel;
  }
  __device__ __forceinline__ const float* weight(const HeadsGemmParams& p) const {
    return p.weight + static_cast<int64_t>(group) * p.group_in * p.weight_channel;
  }
};

// Barriers, a pair a stage: its inputs and weights are there; nobody reads them any more.
struct HeadsGemmBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + stage * 16 + 8; }
};

// The 11 leading bits of x, rounded to nearest; NaN where x is not finite or huge.
__device__ __forceinline__ float heads_gemm_lead(float x) {
  const float scaled = __fmul_rn(x, 8193.f);
  return __fsub_rn(scaled, __fsub_rn(scaled, x));
}

// What is left of x without its leading bits, so that the matrix unit, which drops bits, rounds it to nearest.
__device__ __forceinline__ float heads_gemm_rest(float x, float lead) {
  return __uint_as_float(__float_as_uint(__fsub_rn(x, lead)) + 0x1000u);
}

}  // namespace fastconvt::cuda
