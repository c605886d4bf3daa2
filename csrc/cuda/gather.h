// The gather family as host and device see it: the tile of a block and everything that is derived from it.
#pragma once

#include <cstdint>

#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

// A block makes, for one phase of the outer axes and up to `phases` phases of the last one, the outputs of `positions`
// consecutive positions and `units` channel units (the output channels of one thread).
//
// Positions number the bases (design.md): rows of the last axis, `pitch` apart, then batch, height, depth. A row is
// `columns` bases and `halo` idle positions, so that the inputs of a row, halo included, fill its pitch exactly: the
// input of position m and offset o stands at m + o in shared memory, whatever the row. Rows longer than `columns` are
// cut in segments. Taps of the outer axes do not need a halo: a (depth tap, height tap, input channel) triple is one
// virtual channel, staged as its own shifted copy. Taps of the last axis are grouped in entries: the taps that read at
// one offset.
struct GatherTile {
  int warps;
  int units;
  int positions;
  int phases;           // of the last axis, in one block
  int phase_groups;     // blocks that share the phases of the last axis
  int groups;           // convolution groups in one block; 1 unless a group has fewer channel units than a block
  int units_per_group;  // of those in the block
  int channel_blocks;   // over all groups
  int columns;
  int halo;
  int pitch;
  int entries;        // staged at once
  int channels;       // virtual channels staged at once
  int channel_split;  // log2 of the threads that share the virtual channels when weights are staged
  int stages;         // 1, or 2: staging overlaps computing
  int input_pitch;    // between virtual channels in shared memory
  int weight_row;     // between virtual channels of one entry in shared memory
  int weight_phase;   // between phases in a row
  // Offsets in a stage and its size, in accumulators.
  int weight_offset;
  int input_offset;
  int stage_size;
  int shared_bytes;  // of the stages, and later of the outputs on their way to the store
};

// Blocks of kMaxGatherThreads threads that an SM's registers must hold, given the 32-bit registers of accumulators a
// thread.
constexpr int kMaxGatherThreads = 256;
constexpr int gather_min_blocks(int registers) { return registers <= 16 ? 4 : registers <= 32 ? 3 : 2; }

// A sum in float32 of more products is long, and is added to a total after so many, or a few more.
inline constexpr int kGatherLong = 128;
inline constexpr int kGatherRun = 16;

// Outputs are staged for the store `channels` at once: place of the index-th. A gap after every 128 bytes keeps banks
// apart.
FASTCONVT_HOST_DEVICE constexpr unsigned staged_output(unsigned channels, unsigned index) {
  return index + index / (channels == 1 ? 32 : 8);
}
// Places of a warp, which holds 32 x phases of them.
FASTCONVT_HOST_DEVICE constexpr unsigned staged_outputs(unsigned channels, unsigned phases) {
  return (staged_output(channels, 32 * phases) + 3) / 4 * 4;
}

// Where the inputs of a position stand: element offset of tap 0 of the outer axes and of column 0, and their
// coordinates.
struct InputPosition {
  int64_t offset;
  int height, depth;  // negative where there is none
};

// Where the outputs of a position stand: relative phase r at offset + r * stride, for begin <= r < end.
struct OutputPosition {
  int64_t offset;
  int begin, end;
};

struct GatherParams {
  AxisParams axis[3];
  Strides input_stride;
  Strides output_stride;
  // Of the outer axes, in elements.
  int64_t output_row[2];   // between the outputs of neighbouring bases of a phase
  int64_t input_tap[2];    // between the inputs of neighbouring taps of a phase: back from the first tap's
  int64_t weight_tap[2];   // between the weights of neighbouring taps of a phase
  int64_t weight_axis[2];  // between neighbouring kernel positions
  // In elements.
  int64_t weight_filter;   // between output channels
  int64_t weight_channel;  // between input channels
  int64_t weight_group;    // between groups
  int64_t input_group;
  int output_phase;  // between neighbouring outputs of the last axis
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Activation activation;
  double alpha;
  int batch;
  int groups;
  int in_channels;   // of one group
  int out_channels;  // of one group
  bool channels_last;
  bool vector_input;   // channels_last: four channels of a group can be loaded at once
  bool vector_groups;  // channels_last, one input channel a group: four groups can
  bool vector_output;  // channels_last: a thread's channels can be stored at once
  GatherTile tile;
  int bases[2];        // of the outer axes, per phase
  int last_output[2];  // of the outer axes, relative to the last base: phases beyond it have one output less
  int num_entries;
  int segments;  // of a row of the last axis
  int64_t num_blocks;
  FastDivide by_phase[3], by_channel_block, by_group_block, by_segment;  // blocks
  FastDivide by_pitch, by_batch, by_height;                              // positions
  FastDivide by_phases, by_entries, by_unit_channels, by_group_units;    // staged weights, stored rows
  FastDivide by_stride, by_dilation;                                     // of the last axis
  FastDivide by_bias;                                                    // output channels that share a bias
};

// Entry e reads the input at base - entry_offset(e).
FASTCONVT_HOST_DEVICE int entry_offset(const GatherParams& p, int e) {
  if (p.axis[2].dilation <= p.axis[2].stride) return e;
  int reach = e * p.axis[2].dilation;
  return p.by_stride(reach);
}

}  // namespace fastconvt::cuda
