// Sums of all positions become the weight's gradient: by way of shared memory, in rows as memory has them.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "gemm_weight_gradient_params.h"

namespace fastconvt::cuda {

// The thread's number, read again where it is asked for: a block walks through items, and what would be kept from item
// to item costs registers that sums need.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// One element by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ float gemm_weight_gradient_at(const GemmWeightDefinition& p, int row, int channel, int tap) {
  if (p.merged_taps > 0) tap = tap * p.merged_taps + channel / p.group_out, channel %= p.group_out;
  if (p.unrolled_taps > 0) tap = channel % p.unrolled_taps, channel /= p.unrolled_taps;
  const int group = row / p.group_in, width = p.axis[2].kernel, height = p.axis[1].kernel;
  const int taps[3] = {tap / width / height, tap / width % height, tap % width};
  const T* const grad =
      static_cast<const T*>(p.grad) + (static_cast<int64_t>(group) * p.group_out + channel) * p.out.channel;
  const T* const input = static_cast<const T*>(p.input) + row * p.in.channel;
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = z * p.axis[0].stride + taps[0] * p.axis[0].dilation - p.axis[0].padding;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int64_t y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = y * p.axis[1].stride + taps[1] * p.axis[1].dilation - p.axis[1].padding;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        const T* const gradients = grad + n * p.out.batch + at_z * p.out.axis[0] + at_y * p.out.axis[1];
        const T* const inputs = input + n * p.in.batch + z * p.in.axis[0] + y * p.in.axis[1];
        for (int64_t x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = x * p.axis[2].stride + taps[2] * p.axis[2].dilation - p.axis[2].padding;
          if (at_x < 0 || at_x >= p.axis[2].out) continue;
          sum += static_cast<double>(to_accumulator(gradients[at_x * p.out.axis[2]])) *
                 static_cast<double>(to_accumulator(inputs[x * p.in.axis[2]]));
        }
        if (sum != sum) return static_cast<float>(sum);  // NaN stays
      }
    }
  }
  return static_cast<float>(sum);
}

// What a block finishes: rows of input channels, and slots, those of one block of output channels together; of each
// block, `width` channels from first_column on. In a staged row every such run of slots has width times slots elements,
// in the order of the weight's gradient.
struct GemmWeightStaged {
  uint32_t base;
  int pitch;  // bytes from row to row
  int group, first_row, rows, first_slot, slots;
  int block_width, first_column, width;

  // The first channel of a slot.
  __device__ __forceinline__ int first_channel(int block) const { return block * block_width + first_column; }
};

// Where the elements of slots are staged in a row, in bytes: of the first channel, and from channel to channel.
// `number` is the tap at a place of the run in which a slot stands; in shared memory.
struct GemmWeightOrder {
  int at[2 * kGemmWeightMaxSlots], step[2 * kGemmWeightMaxSlots], number[2 * kGemmWeightMaxSlots];
};

// Out of the parameters by one load, since divergent loads of constants wait for each other.
__device__ __forceinline__ GemmWeightTap load_tap(const GemmWeightParams& p, int number) {
  static_assert(sizeof(GemmWeightTap) == 16);
  uint32_t w[4];
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(&p.tap[number]));
  return *reinterpret_cast<const GemmWeightTap*>(w);
}

// By a warp: a lane has one of `slots` from `first_slot` on, of `width` channels.
template <typename T>
__device__ __forceinline__ void order_slots(const GemmWeightParams& p, int first_slot, int slots, int width,
                                            GemmWeightOrder& order) {
  constexpr int kSize = sizeof(T);
  const int i = threadIdx.x % 32, slot = first_slot + min(i, slots - 1);
  int in_block = slot;
  p.by_taps(in_block);
  const int first = slot - in_block;
  const int begin = max(first, first_slot) - first_slot, end = min(first + p.taps - first_slot, slots);
  const int number = load_tap(p, slot - first).number;
  int place = 0;
  for (int k = 0; k < slots; ++k) {
    const int other = __shfl_sync(~0u, number, k);
    place += k >= begin && k < end && other < number;
  }
  if (i >= slots) return;
  order.number[begin + place] = number;
  order.step[i] = (p.channels_last ? 1 : end - begin) * kSize;
  order.at[i] = (begin * width + place * (p.channels_last ? width : 1)) * kSize;
}

// Stages the sums of two neighbouring channels, `step` bytes apart.
template <typename T>
__device__ __forceinline__ void stage_pair(uint32_t at, int step, float x, float y) {
  const Pack<T, 2> pair{from_accumulator<T>(x), from_accumulator<T>(y)};
  if (sizeof(T) == 2 && step == 2) {
    *static_cast<Pack<T, 2>*>(__cvta_shared_to_generic(at)) = pair;
  } else {
    *static_cast<T*>(__cvta_shared_to_generic(at)) = pair.value[0];
    *static_cast<T*>(__cvta_shared_to_generic(at + step)) = pair.value[1];
  }
}

// Copies what is staged for the slots of one block of channels, `begin` to `end` of the block's: units of kUnit
// neighbours. A thread keeps its place in a row and walks through rows.
template <typename T, int kUnit>
__device__ __forceinline__ void store_run(const GemmWeightParams& p, const GemmWeightStaged& s,
                                          const GemmWeightOrder& order, int begin, int end) {
  constexpr int kThreads = 256, kAtOnce = kUnit == 8 ? 4 : 8;  // rows that are read at the same time
  using Unit = Pack<T, kUnit>;
  const int block = (s.first_slot + begin) / p.taps, first = s.first_channel(block);
  const int channels = min(s.width, p.group_out - first), slots = end - begin;
  if (channels <= 0) return;
  const int units = channels * slots / kUnit, lanes = min(kThreads, (units + 31) & ~31), shares = kThreads / lanes;
  const int share = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) - share * lanes;
  if (share >= shares) return;
  const int64_t row_pitch = static_cast<int64_t>(p.group_out) * p.taps;
  T* const output = static_cast<T*>(p.output) + (static_cast<int64_t>(s.group) * p.group_in + s.first_row) * row_pitch;
  for (int unit = lane; unit < units; unit += lanes) {
    const int element = unit * kUnit, period = p.channels_last ? channels : slots;
    const int outer = element / period, inner = element - outer * period;
    const int place = p.channels_last ? outer : inner, channel = p.channels_last ? inner : outer;
    const int in_run = p.channels_last ? place * s.width + channel : element;
    const int tap = order.number[begin + place];
    T* to = output + (p.channels_last ? tap * p.group_out + first + channel : (first + channel) * p.taps + tap);
    uint32_t from = s.base + (begin * s.width + in_run) * sizeof(T) + share * s.pitch;
    to += share * row_pitch;
#pragma unroll 1
    for (int row = share; row < s.rows; row += kAtOnce * shares) {
      Unit value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row + i * shares >= s.rows) break;
        value[i] = *static_cast<const Unit*>(__cvta_shared_to_generic(from + i * shares * s.pitch));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row + i * shares < s.rows) *reinterpret_cast<Unit*>(to + i * shares * row_pitch) = value[i];
      }
      to += kAtOnce * shares * row_pitch, from += kAtOnce * shares * s.pitch;
    }
  }
}

// Whether every two neighbours of a staged run are neighbours in memory, aligned as a pair.
__device__ __forceinline__ bool has_pairs(const GemmWeightParams& p, const GemmWeightOrder& order, int begin, int end) {
  if (!p.pairs) return false;
  if (p.channels_last || end - begin == p.taps) return true;
  bool pairs = (end - begin) % 2 == 0 && p.taps % 2 == 0;
  for (int i = begin; i < end; i += 2) {
    pairs = pairs && order.number[i] % 2 == 0 && order.number[i + 1] == order.number[i] + 1;
  }
  return pairs;
}

template <typename T>
__device__ __noinline__ void store_weight(const GemmWeightParams& p, const GemmWeightStaged& s,
                                          const GemmWeightOrder& order) {
  for (int begin = 0; begin < s.slots;) {
    const int end = min(s.slots, ((s.first_slot + begin) / p.taps + 1) * p.taps - s.first_slot);
    if (sizeof(T) == 4) {
      store_run<T, 1>(p, s, order, begin, end);
    } else if (p.eights) {
      store_run<T, 16 / sizeof(T)>(p, s, order, begin, end);
    } else if (has_pairs(p, order, begin, end)) {
      store_run<T, 2>(p, s, order, begin, end);
    } else {
      store_run<T, 1>(p, s, order, begin, end);
    }
    begin = end;
  }
}

// Makes staged elements that are not finite again.
template <typename T>
__device__ __noinline__ void repair_weight(const GemmWeightParams& p, const GemmWeightStaged& s,
                                           const GemmWeightOrder& order) {
  const int in_row = s.slots * s.width;
  for (int i = threadIdx.x; i < s.rows * in_row; i += 256) {
    const int row = i / in_row, rest = i - row * in_row, slot = rest / s.width, in_block = rest - slot * s.width;
    const int block = (s.first_slot + slot) / p.taps, channel = s.first_channel(block) + in_block;
    if (channel >= p.group_out) continue;
    T* const at = static_cast<T*>(
        __cvta_shared_to_generic(s.base + row * s.pitch + order.at[slot] + in_block * order.step[slot]));
    if (is_finite(to_accumulator(*at))) continue;
    const int tap = p.tap[s.first_slot + slot - block * p.taps].number;
    *at = from_accumulator<T>(
        gemm_weight_gradient_at<T>(p.definition, s.group * p.group_in + s.first_row + row, channel, tap));
  }
}

}  // namespace fastconvt::cuda
