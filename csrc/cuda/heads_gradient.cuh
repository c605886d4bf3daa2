// What both gradients of the head family share on the device (core/heads_gradient.h): the output's gradient around a
// box of positions in shared memory, where its elements lie there, and fragments of mma.sync. Requires compute
// capability 8.0; code for older GPUs is empty.
#pragma once

#include <cuda_runtime.h>

#include "../core/heads_gradient.h"
#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "params.h"

namespace fastconvt::cuda {

constexpr int kHeadsGradientThreads = 32 * kHeadsGradientWarps, kHeadsGradientThreadsLog2 = 7;
static_assert(kHeadsGradientThreads == 1 << kHeadsGradientThreadsLog2);

// How operands enter the matrix unit.
enum class HeadsOperands {
  kSplit,  // float32 as a sum of two TF32 numbers: three products
  kTf32,   // float32 rounded to TF32
  k16Bits,
};

struct HeadsGradientAxis {
  int in, out, kernel, stride, padding, dilation;
  int box, grads;
  FastDivide by_kernel, by_box, by_grads, by_tiles;
};

// Copies from memory to shared memory, by vectors of 16, 8 or 4 bytes, or elements of 2: `lanes` threads side by side
// share a row, and others take the next ones.
struct HeadsCopy {
  int bytes;
  int vectors;  // of a row
  int lanes_log2;

  __device__ int first_vector() const { return threadIdx.x & ((1 << lanes_log2) - 1); }
  __device__ int first_row() const { return threadIdx.x >> lanes_log2; }
  __device__ int vector_step() const { return 1 << lanes_log2; }
  __device__ int row_step_log2() const { return kHeadsGradientThreadsLog2 - lanes_log2; }
  __device__ int row_step() const { return 1 << row_step_log2(); }
};

struct HeadsGradientParams {
  HeadsGradientAxis axis[3];
  const void *grad, *input, *weight;
  void* output;                         // the input's gradient
  float* partial;                       // (splits, weight elements) of the weight's gradient
  float* bias_partial;                  // (splits, pair chunks, output channels); null: there is none
  Strides grad_strides, input_strides;  // elements
  int64_t weight_elements;
  int group_in, group_out, pairs;  // of a group
  int out_channels;
  int boxes;
  int channels, chunk_pairs;  // of a block
  int positions;
  FastDivide by_channel_chunks, by_pair_chunks, by_chunk_pairs;
  // The output's gradient. Memory has `row_elements` of a row in a row; the box begins `lead` places later in a staged
  // row. Interleaved: channels_last in groups, which are apart in memory and side by side when staged.
  bool channels_last, interleaved;
  int column, rows, row_pitch, row_elements, lead;
  FastDivide by_column;
  HeadsCopy grad_copy;
  // Inputs, as runs of positions; channels_last: of channels.
  int runs, input_pitch;
  FastDivide by_run;  // positions
  bool whole_rows;    // a run is several whole rows of the input
  HeadsCopy input_copy;
  int store_bytes;  // of the input's gradient, at a time
  int stages, grad_bytes, stage_bytes;
  bool bias_by_pairs, bias_by_ones;  // by ones: by pairs, of a channel of ones
  int bias_items, bias_parts;
  FastDivide by_bias_chunks;
  int splits;
  // Places in shared memory, in bytes.
  int box_ring, row_table, run_table, place_table, base_table, offset_table, bias_sums, first_stage;
};

// What a block makes.
struct HeadsKind {
  int group, channel, pair;  // the first ones

  __device__ explicit HeadsKind(const HeadsGradientParams& p) {
    pair = blockIdx.y;
    channel = p.by_pair_chunks(pair);
    pair *= p.chunk_pairs;
    group = p.by_channel_chunks(channel);
    channel *= p.channels;
  }
};

// Three coordinates below 512 in a word, a bit between them; two below 2^15.
constexpr uint32_t kHeadsGuards = 1u << 29 | 1u << 19 | 1u << 9, kHeadsRowGuards = 1u << 31 | 1u << 15;

// A box, as all threads read it from shared memory.
struct alignas(16) HeadsBox {
  int64_t grad, input;  // of the first position's first tap, and of the position, in the first channel: elements
  int place;            // of the first staged element in its row in memory
  uint32_t lowest, highest, last;  // rows of the output's gradient, and positions, that exist
  int run;                         // positions of a run that exist
  int inside;                      // whether all rows exist
  int first[3];
  int batch;

  __device__ void make(const HeadsGradientParams& p, const HeadsKind& kind, int index) {
    lowest = 0, highest = kHeadsRowGuards, last = kHeadsGuards, inside = true;
    int origin[3];
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const HeadsGradientAxis& axis = p.axis[a];
      first[a] = index;
      index = axis.by_tiles(first[a]);
      first[a] *= axis.box;
      last |= static_cast<uint32_t>(min(axis.box, axis.in - first[a]) - 1) << (20 - 10 * a);
      origin[a] = first[a] * axis.stride - axis.padding;
      if (a == 2) continue;
      const int low = max(0, -origin[a]), high = min(axis.grads, axis.out - origin[a]) - 1;
      inside = inside && low == 0 && high == axis.grads - 1;
      lowest |= static_cast<uint32_t>(high < 0 ? 1 : low) << (16 - 16 * a);
      highest |= static_cast<uint32_t>(max(0, high)) << (16 - 16 * a);
    }
    batch = index;
    place = p.interleaved ? origin[2] : origin[2] * p.column - p.lead;
    run = min(p.axis[2].box, p.axis[2].in - first[2]);
    if (p.whole_rows) run *= min(p.axis[1].box, p.axis[1].in - first[1]);
    grad = batch * p.grad_strides.batch + kind.group * p.group_out * p.grad_strides.channel +
           origin[0] * p.grad_strides.axis[0] + origin[1] * p.grad_strides.axis[1];
    input = batch * p.input_strides.batch + (kind.group * p.group_in + kind.channel) * p.input_strides.channel +
            ((first[0] * p.axis[1].in + first[1]) * p.axis[2].in + first[2]) * p.input_strides.axis[2];
  }
};

// A staged row of the output's gradient.
struct HeadsRow {
  int64_t offset;        // in memory, from that of the box's first one
  uint32_t coordinates;  // depth, height
};

// A position of the box: where it lies from the first one, and its coordinates, beyond all others if it is none.
struct HeadsPlace {
  int offset;
  uint32_t coordinates;

  __device__ bool exists(const HeadsBox& box) const {
    return ((box.last - coordinates) & kHeadsGuards) == kHeadsGuards;
  }
  __device__ int of_axis(int a) const { return coordinates >> (20 - 10 * a) & 511; }
};

// Where a pair of a group lies from a position's place, in bytes.
template <typename T>
__device__ __forceinline__ int heads_pair_offset(const HeadsGradientParams& p, int kw) {
  const auto &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  int kh = width.by_kernel(kw);
  int kd = height.by_kernel(kh);
  const int co = depth.by_kernel(kd);
  int row = kd * depth.dilation * height.grads + kh * height.dilation;
  if (!p.channels_last) row += co * depth.grads * height.grads;
  return (row * p.row_pitch + kw * width.dilation * p.column + (p.channels_last ? co : 0)) *
         static_cast<int>(sizeof(T));
}

// The rows, the positions, and their places among the staged elements, and those of `pairs` pairs, in bytes.
// position_of(i) and pair_of(i) are what stands at i.
template <typename T, typename PositionOf, typename PairOf>
__device__ __forceinline__ void heads_make_tables(const HeadsGradientParams& p, int first_pair, int pairs,
                                                  unsigned char* shared, PositionOf position_of, PairOf pair_of) {
  const auto &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  HeadsRow* rows = reinterpret_cast<HeadsRow*>(shared + p.row_table);
  for (int i = threadIdx.x; i < p.rows; i += kHeadsGradientThreads) {
    int h = i, d = height.by_grads(h);
    const int channel = depth.by_grads(d);
    rows[i] = {channel * p.grad_strides.channel + d * p.grad_strides.axis[0] + h * p.grad_strides.axis[1],
               static_cast<uint32_t>(d << 16 | h)};
  }
  HeadsPlace* places = reinterpret_cast<HeadsPlace*>(shared + p.place_table);
  int* bases = reinterpret_cast<int*>(shared + p.base_table);
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * p.positions; i += kHeadsGradientThreads) {
    const bool of_base = i >= p.positions;
    int w = of_base ? position_of(i - p.positions) : i;
    int h = width.by_box(w);
    int d = height.by_box(h);
    const bool exists = d < depth.box;
    if (of_base) {
      if (!exists) d = h = w = 0;
      const int row = d * depth.stride * height.grads + h * height.stride;
      bases[i - p.positions] = (row * p.row_pitch + w * width.stride * p.column + p.lead) * static_cast<int>(sizeof(T));
    } else {
      places[i] = {(d * height.in + h) * width.in + w,
                   exists ? static_cast<uint32_t>(d << 20 | h << 10 | w) : kHeadsGuards};
    }
  }
  int* offsets = reinterpret_cast<int*>(shared + p.offset_table);
#pragma unroll 1
  for (int i = threadIdx.x; i < (p.chunk_pairs + 15) / 16 * 16; i += kHeadsGradientThreads) {
    const int pair = pair_of(i);
    offsets[i] = pair < pairs ? heads_pair_offset<T>(p, first_pair + pair) : 0;
  }
}

// Copies kBytes; zeros where nothing `exists`.
template <int kBytes, typename T>
__device__ __forceinline__ void heads_copy(T* target, const T* source, bool exists) {
  if constexpr (kBytes == 2) {
    *target = exists ? __ldg(source) : T{};
  } else {
    copy_or_zero<kBytes>(shared_address(target), source, exists);
  }
}

// Calls function() `count` times, four of them without a branch between: each costs some instructions for the first
// copy after it.
template <typename Function>
__device__ __forceinline__ void heads_repeat(int count, Function&& function) {
#pragma unroll 1
  for (; count >= 4; count -= 4) {
    function();
    function();
    function();
    function();
  }
#pragma unroll 1
  for (; count > 0; --count) function();
}

template <typename T, typename Function>
__device__ __forceinline__ void heads_for_bytes(int bytes, Function&& function) {
  if (bytes == 16) return function(std::integral_constant<int, 16>{});
  if (bytes == 8) return function(std::integral_constant<int, 8>{});
  if (sizeof(T) == 4 || bytes == 4) return function(std::integral_constant<int, 4>{});
  if constexpr (sizeof(T) == 2) function(std::integral_constant<int, 2>{});
}

// Begins to copy the output's gradient around a box.
template <typename T>
__device__ __forceinline__ void heads_stage_grads(const HeadsGradientParams& p, const HeadsBox& box,
                                                  const unsigned char* shared, unsigned char* stage) {
  const HeadsRow* const rows = reinterpret_cast<const HeadsRow*>(shared + p.row_table);
  const T* const from = static_cast<const T*>(p.grad) + box.grad;
  const int first = box.place, row_step = p.grad_copy.row_step();
  const uint32_t lowest = box.lowest, highest = box.highest;
  heads_for_bytes<T>(p.grad_copy.bytes, [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
#pragma unroll 1
    for (int v = p.grad_copy.first_vector(); v < p.grad_copy.vectors; v += p.grad_copy.vector_step()) {
      const int element = v * (kBytes / static_cast<int>(sizeof(T)));
      int place = first + element;
      int64_t offset = place;
      if (p.interleaved) {
        int channel = element;
        place = first + p.by_column(channel);
        offset = place * p.grad_strides.axis[2] + channel;
      }
      const bool in_row = static_cast<unsigned>(place) < p.row_elements;
      const T* const source = from + offset;
      T* target = reinterpret_cast<T*>(stage) + p.grad_copy.first_row() * p.row_pitch + element;
      int r = p.grad_copy.first_row();
      if (kBytes == 16 && box.inside) {
        heads_repeat((p.rows - r + row_step - 1) >> p.grad_copy.row_step_log2(), [&] {
          heads_copy<kBytes>(target, source + rows[r].offset, in_row);
          r += row_step, target += row_step * p.row_pitch;
        });
        continue;
      }
#pragma unroll 1
      for (; r < p.rows; r += row_step, target += row_step * p.row_pitch) {
        const HeadsRow row = rows[r];
        const uint32_t inside = ((row.coordinates | kHeadsRowGuards) - lowest) & (highest - row.coordinates);
        heads_copy<kBytes>(target, source + row.offset, in_row && (inside & kHeadsRowGuards) == kHeadsRowGuards);
      }
    }
  });
}

// The boxes of a block, each computed while the next ones are copied. One thread makes what all need to know of a box,
// a turn before it is copied. Everyone has met after the tables were made.
template <typename Copy, typename Compute>
__device__ __forceinline__ void heads_for_boxes(const HeadsGradientParams& p, const HeadsKind& kind,
                                                unsigned char* shared, Copy&& copy, Compute&& compute) {
  HeadsBox* const ring = reinterpret_cast<HeadsBox*>(shared + p.box_ring);
  const int step = gridDim.x;
  int copied = blockIdx.x, computed = copied - (p.stages - 1) * step;  // boxes
  int target = 0, stage = 0, slot = 0, next_slot = p.stages, used_slot = 0;
#pragma unroll 1
  for (; computed < p.boxes; copied += step, computed += step) {
    const bool started = computed >= 0;
    if (started) {
      wait_for_groups(p.stages - 2);
      __syncthreads();
    }
    if (copied < p.boxes) copy(ring[slot], target);
    commit_copies();
    if (++target == p.stages) target = 0;
    if (++slot > p.stages) slot = 0;
    if (!started) continue;
    if (threadIdx.x == next_slot % kHeadsGradientWarps * 32 && copied + step < p.boxes) {
      ring[next_slot].make(p, kind, copied + step);
    }
    if (++next_slot > p.stages) next_slot = 0;
    compute(ring[used_slot], stage);
    if (++used_slot > p.stages) used_slot = 0;
    if (++stage == p.stages) stage = 0;
  }
}

// The first boxes, before everyone meets.
__device__ __forceinline__ void heads_make_boxes(const HeadsGradientParams& p, const HeadsKind& kind,
                                                 unsigned char* shared) {
  const int i = threadIdx.x / 32, index = blockIdx.x + i * gridDim.x;
  if (threadIdx.x % 32 == 0 && i < p.stages && index < p.boxes) {
    reinterpret_cast<HeadsBox*>(shared + p.box_ring)[i].make(p, kind, index);
  }
}

// A staged element as a word of a fragment.
template <typename T>
__device__ __forceinline__ uint32_t heads_element(const unsigned char* place) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const uint32_t*>(place);
  } else {
    return *reinterpret_cast<const uint16_t*>(place);
  }
}

// x = high + low, `high` rounded to nearest. Infinity, NaN and what rounds to infinity make `low` infinite or NaN.
__device__ __forceinline__ void heads_split(uint32_t x, uint32_t& high, uint32_t& low) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
// Rounds to TF32 in that the matrix unit truncates: an error of at most 2^-11 of x. Infinity and NaN stay what they
// are.
__device__ __forceinline__ uint32_t heads_round(uint32_t x) {
  return __float_as_uint(__uint_as_float(x) * (1 + 1.f / 2048));
}

// d += a * b: 16 x 8 by 8 x 8 (TF32), or 16 x 16 by 16 x 8.
template <typename T>
__device__ __forceinline__ void heads_gradient_mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 4) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

}  // namespace fastconvt::cuda
