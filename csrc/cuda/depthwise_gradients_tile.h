// How the gradients of a depthwise layer are divided among blocks and threads (host side).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../core/depthwise_gradients.h"
#include "depthwise_gradients_params.cuh"
#include "depthwise_weight_gradient_walk.cuh"

namespace fastconvt::cuda {

constexpr int64_t kDepthwiseGradientsShared = 225 * 1024;  // bytes of a multiprocessor's blocks

struct DepthwiseGradientsTile {
  int shape = 0;
  bool flat = false;
  int64_t groups = 1, tile = 1, tiles = 1, slots = 1;
  int64_t depth_parts = 1, height_parts = 1, depth_rows = 1, height_rows = 1, depth_bases = 1, height_bases = 1;
  int64_t units = 1, splits = 1, channel_tiles = 1;
  bool cluster = false;  // the blocks of a channel, of splits, are one
};

inline DepthwiseGradientsTile depthwise_gradients_tile_of(const Problem& problem, int shape_index) {
  constexpr int64_t kParts[] = {1, 2, 3, 4, 5, 6, 8, 9, 12, 16};
  constexpr double kWalk = 3, kBlock = 16;  // in bases: what a turn and a block cost beside them
  constexpr int64_t kBases = 1024;          // of a thread, at most: the sums of more would be less exact in float32
  constexpr int64_t kPlanes = 20 * 1024;    // bytes of planes that wait for the next base of the depth
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  DepthwiseGradientsTile t;
  t.shape = shape_index;
  const DepthwiseGradientsShape& shape =
      channels_last ? kDepthwiseGradientsChannels[t.shape] : kDepthwiseGradientsShapes[t.shape];
  t.flat = !shape.aligned;
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const int64_t resident = shape.resident * 132, most = shape.threads / (channels_last ? 32 : shape.classes),
                all = ceil_div<int64_t>(width.in, shape.inputs);
  t.groups = std::min(all, most);
  if (!t.flat && all > most) t.groups = round_up(ceil_div(all, ceil_div(all, most)), int64_t{channels_last ? 1 : 8});
  // What blocks divide beside units.
  t.channel_tiles = channels_last ? ceil_div<int64_t>(problem.in_channels, 32 / shape.classes) : problem.in_channels;
  t.tile = t.groups * shape.inputs;
  t.tiles = t.flat ? 1 : ceil_div(all, t.groups);
  const int64_t rows = t.flat ? ceil_div(all, t.groups) : height.in;
  double best = 1e300;
  for (const int64_t depth_parts : kParts) {
    if (depth_parts > 1 && (depth_parts > 8 || depth_parts * 2 > depth.in || shape.depth == 1)) break;
    for (const int64_t height_parts : kParts) {
      if (height_parts > 1 && (t.flat || height_parts * 4 > height.in)) break;
      DepthwiseGradientsTile u = t;
      u.depth_rows = shape.depth == 1 ? 1 : ceil_div(depth.in, depth_parts);
      u.depth_parts = ceil_div(depth.in, u.depth_rows);
      u.height_rows = ceil_div(rows, height_parts);
      u.height_parts = ceil_div(rows, u.height_rows);
      u.depth_bases = u.depth_rows + shape.depth - 1, u.height_bases = u.height_rows + shape.height - 1;
      u.units = problem.batch * u.depth_parts * u.height_parts * u.tiles;
      u.slots = std::min(u.units, std::max<int64_t>(1, most / u.groups));
      const int64_t turns_of_all = ceil_div(u.units, u.slots);
      for (int more = 0; more < 2; ++more) {
        const int64_t least = ceil_div(turns_of_all, std::max<int64_t>(1, kBases / (u.depth_bases * u.height_bases)));
        const int64_t wanted = std::max(least, resident / t.channel_tiles + more);
        u.splits = std::clamp<int64_t>(wanted, 1, turns_of_all);
        const int64_t turns = ceil_div(turns_of_all, u.splits);
        u.splits = ceil_div(turns_of_all, turns);
        const double rounds = double(u.splits * t.channel_tiles) / double(resident);
        const double own =
            rounds <= 1 ? 1 : rounds + 0.5 * (double(ceil_div(u.splits * t.channel_tiles, resident)) - rounds);
        const bool large = (shape.depth > 1 &&
                            u.slots * u.height_rows * u.tile * (channels_last ? 128 / shape.classes : 4) > kPlanes) ||
                           u.depth_bases * u.height_bases > kBases;
        const double bases = double(turns * u.depth_bases) * (double(u.height_bases) + kWalk) + kBlock;
        const double cost = own * bases * double(u.slots) * (large ? 2 : 1);
        if (cost >= best) continue;
        best = cost;
        t = u;
        t.splits = u.splits;
      }
    }
  }
  return t;
}

// Clusters need no workspace and no second kernel. All are to run at once: pairs always fit, larger ones leave some
// room of the multiprocessors without any.
inline bool depthwise_gradients_cluster(const Problem& problem, const DepthwiseGradientsTile& t) {
  constexpr int64_t kLargest = 16;  // blocks
  if (problem.layout != Layout::kContiguous || t.splits == 1 || t.splits > kLargest) return false;
  const int64_t resident = 132 * kDepthwiseGradientsShapes[t.shape].resident, blocks = problem.in_channels * t.splits;
  return blocks <= (t.splits == 2 ? resident : resident * 7 / 8);
}

// Requires a shape for the problem.
inline DepthwiseGradientsTile choose_depthwise_gradients_tile(const Problem& problem, bool aligned) {
  DepthwiseGradientsTile t = depthwise_gradients_tile_of(problem, depthwise_gradients_shape(problem, aligned));
  t.cluster = depthwise_gradients_cluster(problem, t);
  if (problem.layout != Layout::kContiguous || t.splits == 1 || t.cluster || t.shape != 0) return t;
  DepthwiseGradientsTile large = depthwise_gradients_tile_of(problem, kDepthwiseLargeBlocks);
  large.cluster = depthwise_gradients_cluster(problem, large);
  return large.cluster && 2 * large.splits >= t.splits ? large : t;
}

// Lets a kernel have so much shared memory; cudaErrorNotSupported where the device has less.
template <class Kernel>
cudaError_t allow_depthwise_shared(Kernel* kernel, int64_t bytes) {
  int device = 0, largest = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&largest, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  if (bytes > largest) return cudaErrorNotSupported;
  // The same value every time: launches from several threads must not undo each other's.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, largest);
}

// In channels_last: depthwise_gradients_channels.cu. Pointers are set, and nothing else of `p`.
cudaError_t launch_depthwise_gradients_channels(const Problem& problem, const DepthwiseGradientsTile& t,
                                                const DepthwiseGradientsParams& p, const DepthwiseWeightParams& whole,
                                                cudaStream_t stream);

}  // namespace fastconvt::cuda
