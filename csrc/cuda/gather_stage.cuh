// Global to shared memory: what one step of a block of the gather family needs.
#pragma once

#include "device/copy.cuh"
#include "gather_block.cuh"

namespace fastconvt::cuda {

// Virtual channels from `place` on, as many as fit of the `left` ones, and entries from `entry` on.
struct GatherStep {
  VirtualChannel place;
  int left;
  int entry;

  __device__ int channels(const GatherTile& tile) const { return min(tile.channels, left); }
  __device__ int entries(const GatherTile& tile, const GatherBlock& block) const {
    return min(tile.entries, block.entry_end - entry);
  }
};

// Columns of the staged input: column c holds the input at origin + c, zero unless begin <= c < end.
struct StagedColumns {
  int64_t origin;
  int begin, end;

  __device__ StagedColumns(const GatherParams& p, const GatherBlock& block, int entry) {
    origin = block.base - entry_offset(p, entry) - p.tile.halo;
    begin = clamp_to_int(-origin, 0, p.tile.pitch);
    end = clamp_to_int(p.axis[2].in - origin, 0, p.tile.pitch);
  }
};

// The tap of a phase of the last axis that reads at base - offset, or -1.
__device__ inline int entry_tap(const GatherParams& p, int phase, int offset) {
  int rest = phase + p.axis[2].stride * offset;
  const int tap = p.by_dilation(rest);
  return phase < p.axis[2].stride && rest == 0 && tap < p.axis[2].kernel ? tap : -1;
}

// The output channel, within its group, of the block's channel c, whose group is g of the block; >= out_channels if
// there is none.
template <class Traits>
__device__ int output_channel(const GatherParams& p, const GatherBlock& block, int c, int& g) {
  int u = static_cast<unsigned>(c) / Traits::kChannels;
  g = min(p.by_group_units(u), p.tile.groups - 1);
  if (block.group + g >= p.groups) return p.out_channels;
  return c + (block.unit - g * p.tile.units_per_group) * Traits::kChannels;
}

// Where the weights of relative phase r and block channel c stand in a row: vectors of channels, or of phases where a
// thread has one channel.
template <class Traits>
__device__ int weight_index(const GatherParams& p, int r, int c) {
  return Traits::kChannels == 1 ? c * Traits::kPhases + r : r * p.tile.weight_phase + c;
}

template <class Traits>
class GatherStage {
  using T = typename Traits::Element;
  using Acc = typename Traits::Acc;

  const GatherParams& p;
  const GatherBlock& block;
  const InputPosition* const positions;
  const GatherStep& step;
  Acc* const stage;

 public:
  __device__ GatherStage(const GatherParams& p, const GatherBlock& block, const InputPosition* positions,
                         const GatherStep& step, Acc* stage)
      : p(p), block(block), positions(positions), step(step), stage(stage) {}

  __device__ void fill() const {
    fill_entries(reinterpret_cast<int2*>(stage));
    fill_inputs(stage + p.tile.input_offset);
    fill_weights(stage + p.tile.weight_offset);
  }

 private:
  // Per entry: the column that it reads for base 0, and a bit for each relative phase that has a tap there.
  __device__ void fill_entries(int2* entries) const {
    const int first = entry_offset(p, step.entry);
    for (int e = threadIdx.x; e < step.entries(p.tile, block); e += blockDim.x) {
      const int offset = entry_offset(p, step.entry + e);
      int mask = 0;
#pragma unroll 1
      for (int r = 0; r < block.phases; ++r) mask |= (entry_tap(p, block.phase + r, offset) >= 0) << r;
      entries[e] = make_int2(p.tile.halo - (offset - first), mask);
    }
  }

  // Calls function(v, run, place, offset) for each run of virtual channels v .. v + run - 1 that share a tap; its
  // elements are tap_step[a] apart from tap to tap.
  template <typename Function>
  __device__ void for_each_run(VirtualChannel place, int begin, int end, const int64_t (&tap_step)[2],
                               Function&& function) const {
    int64_t offset = place.depth_tap * tap_step[0] + place.height_tap * tap_step[1];
#pragma unroll 1
    for (int v = begin; v < end;) {
      const int run = min(end - v, p.in_channels - place.channel);
      function(v, run, place, offset);
      v += run;
      offset += tap_step[1];
      if (place.next_tap(block)) {
        offset += tap_step[0] - (block.outer[1].tap_end - block.outer[1].tap_begin) * tap_step[1];
      }
    }
  }

  __device__ void fill_inputs(Acc* inputs) const {
    const StagedColumns columns(p, block, step.entry);
    const T* const input = static_cast<const T*>(p.input) + block.input + columns.origin * p.input_stride.axis[2];
#pragma unroll 1
    for (int m = threadIdx.x; m < p.tile.positions + p.tile.halo; m += blockDim.x) {
      const InputPosition at = positions[m];
      int column = block.column + m;
      p.by_pitch(column);
      const bool exists = column >= columns.begin && column < columns.end;
      for_each_run(step.place, 0, step.channels(p.tile), p.input_tap,
                   [&](int v, int run, const VirtualChannel& place, int64_t offset) {
                     const unsigned y = static_cast<unsigned>(at.height) - place.height_tap * p.axis[1].offset_step();
                     const unsigned z = static_cast<unsigned>(at.depth) - place.depth_tap * p.axis[0].offset_step();
                     const bool inside =
                         exists && y < static_cast<unsigned>(p.axis[1].in) && z < static_cast<unsigned>(p.axis[0].in);
                     const T* const source = input + at.offset + offset + place.channel * p.input_stride.channel;
                     fill_input_run(inputs + v * p.tile.input_pitch + m, inside ? source : nullptr, run);
                   });
    }
  }

  // One run of one position, in all groups of the block; zeros if there is no source.
  __device__ void fill_input_run(Acc* target, const T* source, int run) const {
    const int group_pitch = p.tile.channels * p.tile.input_pitch;
    const int groups = min(p.tile.groups, p.groups - block.group);
    if (p.vector_groups && source != nullptr) return copy_vectors(target, group_pitch, source, groups);
#pragma unroll 1
    for (int g = 0; g < groups; ++g, target += group_pitch) {
      if (source == nullptr) {
        fill_column(target, p.tile.input_pitch, run);
        continue;
      }
      if (p.vector_input) {
        copy_vectors(target, p.tile.input_pitch, source, run);
      } else {
        copy_column(target, p.tile.input_pitch, source, p.input_stride.channel, run);
      }
      source += p.input_group;
    }
  }

  __device__ void fill_weights(Acc* weights) const {
    const int items = (p.tile.phases * p.tile.entries * p.tile.units * Traits::kChannels) << p.tile.channel_split;
    const int count = step.channels(p.tile), entries = step.entries(p.tile, block);
    const int share = (count + (1 << p.tile.channel_split) - 1) >> p.tile.channel_split;
    const T* const weight =
        static_cast<const T*>(p.weight) + block.weight + block.outer[0].weight + block.outer[1].weight;
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      int r = item, g;
      int e = p.by_phases(r);
      int c = p.by_entries(e);
      const int begin = p.by_unit_channels(c) * share;
      const int tap = entry_tap(p, block.phase + r, entry_offset(p, step.entry + e));
      if (tap < 0 || e >= entries || r >= block.phases || begin >= count) continue;
      const int channel = output_channel<Traits>(p, block, c, g);
      const T* const source = weight + tap + channel * p.weight_filter + g * p.weight_group;
      Acc* const target = weights + e * p.tile.channels * p.tile.weight_row + weight_index<Traits>(p, r, c);
      VirtualChannel place = step.place;
      place.advance(p, block, begin);
      for_each_run(place, begin, min(count, begin + share), p.weight_tap,
                   [&](int v, int run, const VirtualChannel& at, int64_t offset) {
                     if (channel < p.out_channels) {
                       copy_column(target + v * p.tile.weight_row, p.tile.weight_row,
                                   source + offset + at.channel * p.weight_channel, p.weight_channel, run);
                     } else {
                       fill_column(target + v * p.tile.weight_row, p.tile.weight_row, run);
                     }
                   });
    }
  }
};

}  // namespace fastconvt::cuda
