// A convolution prepared for the CPU kernels: plain data that the code of every instruction set reads.
#pragma once

#include <cstdint>

#include "../core/problem.h"

namespace fastconvt::cpu::conv {

// One tap of a phase along one axis: cell j reads input j + shift and weight position `index`.
struct Tap {
  int64_t shift;
  int64_t index;
};

// One axis by phases. Here phases are counted from the first output: output = cell * stride + phase, so a cell holds
// one output of each phase. Phase p has taps[first[p]] up to taps[first[p + 1]].
struct AxisTaps {
  int64_t in;
  int64_t out;
  int64_t stride;
  int64_t phases;     // min(stride, out)
  int64_t cells;      // ceil(out / stride)
  int64_t min_shift;  // over all taps; both 0 if there are none
  int64_t max_shift;
  const Tap* taps;
  const int64_t* first;
  const int64_t* shifts;  // the distinct shifts of all taps, ascending
  int64_t num_shifts;
};

struct ConvPlan {
  DType dtype;
  Activation activation;  // of what is stored
  double alpha;
  const void* input;
  void* output;
  const void* bias;  // accumulator type, one an output channel
  int64_t groups;
  int64_t in_channels;   // of a group
  int64_t out_channels;  // of a group
  int64_t kernel[3];
  AxisTaps axis[3];

  // The packed weights, accumulator type: for each group and channel block [kd][kh][kw][in channel][channel of the
  // block], kernel positions tap_stride() apart. A task calls prepare() before it reads the blocks of its chunk: the
  // first to come packs them.
  const void* weight;
  int64_t block_elements;
  void (*prepare)(void* owner, int64_t group, int64_t first_block, int64_t last_block, int64_t task);
  void* owner;

  // By group and block: a weight is inf or NaN. Zeros stand for the input beyond its edges, and such a weight would
  // make them NaN: the outputs whose taps lie partly outside are then computed once more, tap by tap.
  const unsigned char* exact_edges;

  bool stream;  // non-temporal stores: the output is larger than the caches; float32 and float64 only

  // A task makes `steps` steps of `rows` cells along the height, `width` cells along the last axis, one cell along
  // the depth and the channel blocks of one chunk. With rows > 1 the rows lie in the window one behind the other,
  // `pitch` apart with zeros between them, and are computed as one long row: narrow images fill whole vectors.
  int64_t blocks;  // channel blocks of a group: block b is channels [block_begin[b], block_begin[b + 1])
  const int64_t* block_begin;
  int64_t chunks;
  int64_t rows;
  int64_t steps;
  int64_t width;
  int64_t row_tiles;
  int64_t column_tiles;
  int64_t tasks;  // [batch][group][chunk][depth cell][row tile][column tile]

  // The window: the input rows of a step, as accumulator type, zero where there is no input. Position 0 of a row is
  // input column (first cell of the tile) + origin. It has a slice for each distinct shift of the depth, and in it for
  // every input channel `window_rows` rows: with rows > 1 all rows that the step can see, else a ring of them, which
  // keeps what the next step needs, or (ring == false, if a dilation leaves too many in between) one for each distinct
  // shift of the height.
  bool ring;
  int64_t origin;
  int64_t pitch;
  int64_t window_rows;
  int64_t row_stride;
  int64_t channel_stride;
  int64_t slice_stride;
  int64_t window_elements;

  // The results of a channel block and step, by channel and phase of the last axis; by channel only if there are too
  // many phases to interleave at once.
  int64_t planes;  // of a channel
  int64_t plane_stride;
  int64_t plane_elements;
};

// Elements of a packed block from one kernel position to the next; never a large power of two, so that a block's kernel
// positions do not fall into the same cache sets.
inline int64_t tap_stride(const ConvPlan& plan, int64_t block_size) {
  const int64_t elements = plan.in_channels * block_size;
  return elements % 256 == 0 ? elements + 16 : elements;
}

// Rows of so many phases are interleaved as a whole, of others phase by phase.
inline bool interleaves(int64_t phases) { return phases <= 4 || phases == 8; }

// What a plan must know about the code that will run it.
struct IsaShape {
  int64_t vector_bytes;
  int64_t max_block;  // output channels of a register tile
};

// Tasks [begin, end) of the plan, by instruction set.
void run_portable(const ConvPlan& plan, int64_t begin, int64_t end);
void run_avx2(const ConvPlan& plan, int64_t begin, int64_t end);
void run_avx512(const ConvPlan& plan, int64_t begin, int64_t end);

// The problem's activation of `count` values of its accumulator type, in place, by instruction set.
void activate_portable(const Problem& problem, void* values, int64_t count);
void activate_avx2(const Problem& problem, void* values, int64_t count);
void activate_avx512(const Problem& problem, void* values, int64_t count);

extern const IsaShape kPortableShape, kAvx2Shape, kAvx512Shape;

// Aligned to a cache line; throws std::bad_alloc.
void* allocate(int64_t bytes);
void release(void* memory);

}  // namespace fastconvt::cpu::conv
