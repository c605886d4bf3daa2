// What the chain's kernels read: a prepared call as plain data, without templates of the standard library, whose
// instantiations must not be compiled for one instruction set and linked for all.
#pragma once

#include <cstdint>

namespace fastconvt::cpu::chain {

// Columns of an output row that are finished together.
constexpr int kMaxColumns = 64;

// What the steps of a block read is packed for its tiles where it is no more than this.
constexpr int64_t kPackedElements = 65536;

// Channels whose sums of products wait in the L1 cache to be reduced together, and the widest register tile.
constexpr int kMaxChunk = 64;
constexpr int kMaxWidth = 16;

// A tap of one phase: output o reads the input at o / stride + offset.
struct Tap {
  int64_t tap;
  int64_t offset;
};

// One spatial axis. Output o belongs to column o % stride; all outputs of a column have the same taps.
struct AxisTaps {
  int64_t in;
  int64_t out;
  int64_t stride;
  const Tap* taps;
  const int64_t*
      first_tap;  // of each column that has outputs, and one more: column c has taps [first_tap[c], first_tap[c + 1])
};

// A register tile: `count` channels of one group, computed as `width` of them.
struct Tile {
  int count;
  int width;
  int64_t input_offset;  // of the group's first input channel, in elements
  const void* weights;   // [kernel position][input channel of the group][width], in the accumulators' type
  const void* bias;      // [width], in the accumulators' type
};

// Channels that are reduced together: `num_tiles` tiles, `count` channels.
struct Chunk {
  const Tile* tiles;
  int num_tiles;
  int count;
};

struct Params {
  const void* input;
  void* output;
  const void* subtrahend;
  double min;
  double max;
  AxisTaps axis[3];
  int64_t kernel[3];
  int64_t input_elements;
  int64_t batch_stride;    // elements of one batch item of the input
  int64_t channel_stride;  // elements of one of its channels
  int64_t in_channels;
  int64_t in_channels_per_group;
  const Chunk* chunks;
  int64_t num_chunks;
  bool packs;               // whether several tiles read the same input
  int64_t strips;           // tasks per output row
  int64_t strip_positions;  // base positions of a strip
};

// A (depth, height) tap of the task at hand.
struct RowTap {
  int64_t kernel_position;  // of its first tap along the last axis
  int64_t input_offset;     // of the input row it reads, in elements
};

// One kernel position of the block at hand; lanes [first, last) exist in the input.
struct Step {
  int64_t kernel_position;
  int64_t input_offset;  // of base position 0, in elements
  int first;
  int last;
};

// The full steps exist in all lanes that are stored, and all their lanes are safe to load; the partial ones have lanes
// to leave out.
struct Steps {
  const Step* full;
  const Step* full_end;
  const Step* partial;
  const Step* end;
  int64_t position;  // the block's first base position
};

// Working memory of one thread.
struct Scratch {
  RowTap* rows;  // kernel[0] * kernel[1]
  Step* steps;   // as many as kernel positions
  Step* edge_steps;
  Step* packed_steps;
  void* max;  // kMaxColumns or fewer columns of strip_positions, in the accumulators' type
  void* sum;
  void* packed;  // kPackedElements, where params.packs
};

// Runs tasks [begin, end). A task is one strip of one output row.
using Kernel = void (*)(const Params& params, const Scratch& scratch, int64_t begin, int64_t end);

}  // namespace fastconvt::cpu::chain
