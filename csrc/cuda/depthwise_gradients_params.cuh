// What depthwise_gradients.cuh computes with: shapes, and how a problem is divided.
#pragma once

#include <cuda_runtime.h>

#include "../core/depthwise_gradients.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"

namespace fastconvt::cuda {

// Stages of a block, and how many are on their way: a slot that is filled again has been read a stage before.
constexpr int kDepthwiseStages = 4, kDepthwiseAhead = 2;

template <typename T_, int kShape, bool kChannelsLast_ = false>
struct DepthwiseGradientsTraits {
  using T = T_;
  static constexpr bool kChannelsLast = kChannelsLast_;
  static constexpr DepthwiseGradientsShape kList = kChannelsLast
                                                       ? kDepthwiseGradientsChannels[kChannelsLast ? kShape : 0]
                                                       : kDepthwiseGradientsShapes[kChannelsLast ? 0 : kShape];
  static constexpr int kKernel = kList.kernel, kStride = kList.stride, kInputs = kList.inputs;
  static constexpr int kDepth = kList.depth, kHeight = kList.height;
  static constexpr int kThreads = kList.threads, kResident = kList.resident;
  static constexpr int kPhases = kList.phases, kClasses = kList.classes;
  static constexpr bool kAligned = kList.aligned;
  static constexpr bool kFlat = !kAligned;  // one axis: bases of the height are parts of one row
  static constexpr int kColumns = (kInputs - 1) * kStride + kKernel;
  // In channels_last, a warp's channels: its lanes are (class, channel). Lanes from one class to the next.
  static constexpr int kChannels = kChannelsLast ? 32 / kClasses : 1, kNextClass = kChannels;
  static constexpr int kSums = kDepth * kPhases * kHeight * kKernel;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements of 16 bytes
  // Columns before the first input's own ones, as many as after the last one's, where rows are aligned.
  static constexpr int kMargin = kAligned ? (kKernel - kStride) / 2 : 0;
  // How a thread's first column is aligned: it is kFirst modulo kModulus.
  static constexpr int kOwn = kInputs * kStride, kModulus = !kAligned ? 1 : kOwn % kChunk == 0 ? kChunk : kOwn;
  static constexpr int kFirst = (kModulus - kMargin % kModulus) % kModulus;
  // Bases of a chain of float32 sums.
  static constexpr int kChain = sizeof(T) == 4 ? 32 / kInputs : 1 << 10;
};

struct DepthwiseGradientsParams {
  const void* grad;
  const void* input;
  const void* weight;
  void* output;         // the input's gradient, or null
  bool cluster;         // whether the blocks of a channel are one, that adds their sums; else those of several go to
  float* partial;       // (splits, weight_elements)
  float* bias_partial;  // and (splits, channels)
  AxisParams axis[3];
  int64_t grad_batch, grad_channel, input_batch, input_channel, grad_plane, input_plane;  // strides, in elements
  int grad_row, input_row;
  int64_t weight_elements, grad_elements, input_elements;
  int channels, channel_tiles;
  int grad_column, input_column;
  // Threads are (slot, column group, class), the class fastest. A slot makes a unit: a part of the rows and planes of a
  // sample, over all bases that reach it.
  int slots, groups, threads;
  int tile;                        // inputs of a slot along the last axis
  int inside_begin, inside_count;  // inputs of a single axis all of whose columns exist, but for the last input
  int depth_rows, height_rows;     // planes and rows of a unit
  int depth_bases, height_bases;
  int units, splits;
  int bases, slabs;  // bases of the height in a stage, stages of a plane
  FastDivide by_depth_dilation, by_height_dilation;
  FastDivide by_group, by_tile, by_height_part, by_depth_part;
  // What is staged: runs of whole rows, or single rows, of each slot's planes.
  bool whole_rows;
  int grad_jobs, input_jobs;
  FastDivide by_grad_run, by_grad_plane, by_input_run, by_input_plane;
  // Places in a stage, in elements: of slots, planes, rows and bases.
  int grad_slot, grad_plane_pitch, grad_pitch, grad_base;
  int input_slot, input_plane_pitch, input_pitch, input_base;
  int input_place;                             // of the inputs in a stage
  int stage;                                   // elements
  int slot_bytes;                              // of a stage, in channels_last
  int shift;                                   // from a row's place to its first column
  int sums_place, planes_place, stages_place;  // bytes of shared memory
};

// Which stage, of all that a block goes through.
struct DepthwiseStageCursor {
  int turn, depth_base = 0, slab = 0;

  __device__ __forceinline__ void advance(const DepthwiseGradientsParams& p) {
    if (++slab < p.slabs) return;
    slab = 0;
    if (++depth_base < p.depth_bases) return;
    depth_base = 0;
    turn += p.splits;
  }
};

// What a block makes in contiguous tensors; those of a channel follow each other where they are a cluster.
struct DepthwiseBlock {
  int split, channel;

  __device__ __forceinline__ explicit DepthwiseBlock(const DepthwiseGradientsParams& p) {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    const int divisor = p.cluster ? p.splits : p.channels, quotient = number / divisor;
    const int rest = number - quotient * divisor;
    split = p.cluster ? rest : quotient, channel = p.cluster ? quotient : rest;
  }
};

struct DepthwiseUnit {
  int sample, z, y, x;  // the first input
  bool exists;

  __device__ __forceinline__ DepthwiseUnit(const DepthwiseGradientsParams& p, int number) {
    exists = number < p.units;
    int tile = exists ? number : 0;
    int height_part = p.by_tile(tile);
    int depth_part = p.by_height_part(height_part);
    sample = p.by_depth_part(depth_part);
    z = depth_part * p.depth_rows, y = height_part * p.height_rows, x = tile * p.tile;
  }
};

}  // namespace fastconvt::cuda
