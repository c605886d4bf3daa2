// Where the outputs of a block of the row kernels go. Stores of whole 128-byte lines are what the memory likes best: a
// data row is stored with the constants that share its first and last line, and the constant rows between data rows
// start and end on lines.
#pragma once

#include "rows_stage.cuh"

namespace fastconvt::cuda {

constexpr int kLine = 32, kVector = 4;  // floats

// How far an address is behind the start of its line or vector, in floats.
__device__ inline int offset_in(const float* pointer, int floats) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / 4) & (floats - 1);
}
// How far before the end of the one that it is in, 0 at a start.
__device__ inline int missing_in(const float* pointer, int floats) { return -offset_in(pointer, floats) & (floats - 1); }

// What a warp stores of one row of a channel: constants, outputs, constants, all from a staged row that is aligned as
// the memory is.
struct RowsRun {
  float* to;          // where the first of `stored` goes
  int low, high;      // of them, those that a bulk store can take
  int stored;         // from offset_in(to, kLine) on in the staged row
  int data;           // where column 0, phase 0 would stand in the staged row
  int before, after;  // constants

  // `row` is the channel's row, perhaps the first or the last data row of its plane. Constants are at hand for up to a
  // line around it.
  template <int stride>
  __device__ static RowsRun make(const RowsParams& p, const RowsBlock& b, bool first, bool last, float* row) {
    RowsRun r;
    const int begin = b.output_begin(p, stride), count = b.output_end(p, stride) - begin;
    r.before = b.segment == 0 ? min(first ? p.leading_lines : p.gap_lines, offset_in(row + begin, kLine)) : 0;
    const bool ends = b.segment == p.segments - 1;
    r.after = ends ? min(last ? p.trailing_lines : p.gap_lines, missing_in(row + begin + count, kLine)) : 0;
    r.to = row + begin - r.before;
    r.data = r.before + offset_in(r.to, kLine) + b.base * stride - p.padding - begin;
    r.stored = r.before + count + r.after;
    r.low = min(missing_in(r.to, kVector), r.stored);
    r.high = r.low + ((r.stored - r.low) & -kVector);
    return r;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Calls store(begin, end) for the part of 0 .. count - 1 that can be stored 16 bytes at a time, by one thread of
// `slots`, and store_one(i) for the up to 3 + 3 others.
template <int slots, typename Bulk, typename One>
__device__ inline void store_run(const float* output, int count, int slot, Bulk&& bulk, One&& one) {
  const int low = min(missing_in(output, kVector), count);
  const int high = low + ((count - low) & -kVector);
  bulk(low, high);
  for (int i = slot; i < low; i += slots) one(i);
  for (int i = high + slot; i < count; i += slots) one(i);
}

// The share of one segment in `count` constants.
struct RowsConstants {
  float* output;
  int count;

  __device__ RowsConstants(const RowsParams& p, const RowsBlock& b, float* output, int count)
      : output(output), count(count) {
    if (p.segments == 1) return;
    const int share = (count / p.segments + kLine) & -kLine, begin = min(share * b.segment, count);
    this->output += begin;
    this->count = min(count - begin, share);
  }

  // `pitch` of them are at `source`; by kSlots threads.
  __device__ void store(const float* source, int pitch, int slot, uint64_t policy) const {
    if (count <= 0) return;
    store_run<kSlots>(
        output, count, slot,
        [&](int low, int high) {
          for (int at = low + slot * pitch; at < high; at += kSlots * pitch) {
            bulk_store(output + at, source, min(high - at, pitch), policy);
          }
        },
        [&](int at) { output[at] = *source; });
  }
  static constexpr int kSlots = 2;
};

#endif

}  // namespace fastconvt::cuda
