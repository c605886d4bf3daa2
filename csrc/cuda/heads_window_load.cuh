// Heads by windows: input on its way to the tensor cores. Every warp copies the rows that it will multiply to slots of
// its own in shared memory, asynchronously, two steps of input channels ahead, over the ends of planes and work items.
// So no warp waits for another.
#pragma once

#include "heads_window_params.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// From shared memory.
template <int kBytes>
__device__ __forceinline__ void heads_window_read(uint32_t* word, uint32_t address) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word[0]) : "r"(address) : "memory");
  }
}

// kBytes from global to shared memory, or zeros.
template <int kBytes>
__device__ __forceinline__ void heads_window_copy(uint32_t to, const void* from, bool exists) {
  if constexpr (kBytes == 4) {
    asm volatile("{ .reg .pred p; setp.eq.b32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], 4, p; }" ::"r"(to),
                 "l"(from), "r"(static_cast<int>(exists))
                 : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, %3, 0; cp.async.ca.shared.global.L2::256B [%0], [%1], %2, p; }" ::"r"(to),
        "l"(from), "n"(kBytes), "r"(static_cast<int>(exists))
        : "memory");
  }
}
__device__ __forceinline__ void heads_window_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kGroups groups of copies of the lane are under way.
template <int kGroups>
__device__ __forceinline__ void heads_window_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
// One half, through registers.
__device__ __forceinline__ uint32_t heads_window_half(const void* from, bool exists) {
  uint32_t word;
  asm volatile(
      "{ .reg .pred p; .reg .b16 h; setp.ne.b32 p, %1, 0; mov.b16 h, 0; @p ld.global.nc.b16 h, [%2]; "
      "cvt.u32.u16 %0, h; }"
      : "=&r"(word)
      : "r"(static_cast<int>(exists)), "l"(from));
  return word;
}
__device__ __forceinline__ void heads_window_put_half(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(static_cast<unsigned short>(word)) : "memory");
}

// A lane's left operands of two rows of inputs: by position, -1 to 4 from its first one; first its first channels of
// both rows, then its second ones. With quad = lane % 4 and four bytes of channels a word, those are words quad and
// quad + 4 of a step, or in channels_last float32, where that is one load, 2 * quad and the next one.
struct HeadsWindowLeft {
  uint32_t word[6][4];
};

// A slot holds 34 positions of a step of channels. Contiguous: channels one after the other, the position beyond and
// the one before behind the others. kPixels: positions one after the other, with a gap after every fourth one, the one
// before at the end. Pitches keep the banks of a warp's loads apart.
template <typename T, bool kPixels>
class HeadsWindowLoader {
  static constexpr int kSize = sizeof(T);
  static constexpr int kStepChannels = 32 / kSize;
  static constexpr int kChannelPitch = kHeadsWindowPlanesSlot / kStepChannels;
  static constexpr int kSlot = kPixels ? kHeadsWindowPixelsSlot : kHeadsWindowPlanesSlot;
  static constexpr int kGap = kSize == 4 ? 32 : 16;  // bytes after four positions
  static constexpr int kBefore = kPixels ? kHeadsWindowPixelsSlot - 32 : 32 * kSize + 4;

  const HeadsWindowParams& p;
  const int group;
  const uint32_t slots;
  // The step that is copied next.
  int item;
  const int stride;           // between a warp's items
  int planes = 0;             // that are left in the item, this one included
  int left = 0;               // channels
  unsigned rows = 0;          // that exist, a bit each
  int column = 0;             // of the unit
  const T* source = nullptr;  // what the lane copies of the first row, whether it exists or not
  int64_t beyond = 0;         // from there to what it copies beyond the unit
  int64_t pitch = 0;          // from row to row

 public:
  static constexpr int kStageBytes = (kHeadsWindowRows + 1) * kSlot;

  __device__ HeadsWindowLoader(const HeadsWindowParams& p, unsigned char* shared, int group, int first, int stride)
      : p(p),
        group(group),
        slots(shared_address(shared) + p.slots + threadIdx.x / 32 * (2 * kStageBytes)),
        item(first - stride),
        stride(stride) {}

  // To the next step.
  __device__ __forceinline__ void advance() {
    left -= kStepChannels;
    source += kStepChannels * p.in.channel;
    if (left > 0) return;
    source += p.in.axis[0] - (p.group_in - left) * p.in.channel;
    left = p.group_in;
    if (--planes <= 0) find_item();  // also at the very first
  }

  // Rows r and r + 2 of the step that was copied to a stage.
  __device__ __forceinline__ HeadsWindowLeft read(int stage, int r) const {
    HeadsWindowLeft a;
    read_row(a, stage + r * kSlot, 0);
    read_row(a, stage + (r + kHeadsWindowRows / 2) * kSlot, 1);
    return a;
  }

  // Copies a step to a stage: once all lanes have read what was there.
  __device__ __forceinline__ void request(int stage) const {
    const uint32_t to = slots + stage;
    if (!p.vectors) {
#pragma unroll 1
      for (int r = 0; r <= kHeadsWindowRows; ++r) {
        copy_elements(source + r * pitch, to + r * kSlot, rows >> r & 1 ? left : 0);
      }
    } else if constexpr (kPixels) {
      copy_pixels(to);
    } else if (kSize == 4 || p.wide) {
      copy_planes<16>(to);
    } else {
      copy_planes<8>(to);
    }
    heads_window_commit();
  }

 private:
  __device__ __forceinline__ void read_row(HeadsWindowLeft& a, int slot, int half) const {
    const int lane = threadIdx.x % 32, quad = lane % 4, place = lane / 4;
    if constexpr (kPixels) {
      const uint32_t at = slots + slot + quad * (kSize == 4 ? 8 : 4);
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        const int x = i - 1;
        const int offset = x < 0 && place == 0 ? kBefore : cell(0, place * 4) + x * 32 + (x < 0 ? -kGap : x / 4 * kGap);
        if constexpr (kSize == 4) {
          uint32_t word[2];
          heads_window_read<8>(word, at + offset);
          a.word[i][half] = word[0], a.word[i][2 + half] = word[1];
        } else {
          // The unit's operands are what is loaded: words wherever they have to be.
          heads_window_read<4>(&a.word[i][half], at + offset);
          heads_window_read<4>(&a.word[i][2 + half], at + offset + 16);
        }
      }
    } else {
      constexpr int kLaneChannels = 8 / kSize;
      uint32_t raw[8], before[kLaneChannels], after[kLaneChannels];
      const uint32_t at = slots + slot + quad * (4 / kSize * kChannelPitch) + place * (4 * kSize);
      const uint32_t at_before = place == 0 ? at + kBefore : at - 4;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        const int channel = i / (4 / kSize) * (kStepChannels / 2) + i % (4 / kSize);
        heads_window_read<4 * kSize>(raw + i * kSize, at + channel * kChannelPitch);
        heads_window_read<4>(before + i, at_before + channel * kChannelPitch);
        heads_window_read<4>(after + i, at + channel * kChannelPitch + 4 * kSize);
      }
      HeadsRight word;
      word.template from_planes<T>(raw);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int t = 0; t < 4; ++t) a.word[1 + t][2 * c + half] = word.word[c][t];
        if constexpr (kSize == 4) {
          a.word[0][2 * c + half] = before[c], a.word[5][2 * c + half] = after[c];
        } else {
          a.word[0][2 * c + half] = __byte_perm(before[2 * c], before[2 * c + 1], 0x7632);
          a.word[5][2 * c + half] = __byte_perm(after[2 * c], after[2 * c + 1], 0x5410);
        }
      }
    }
  }

  __device__ __forceinline__ void find_item() {
    planes = 0, left = p.group_in;
    while (planes <= 0 && item + stride < p.items) {
      item += stride;
      HeadsWindowItem at;
      at.find(p, item);
      const int begin = max(0, at.begin - p.warm);
      planes = min(p.size[0], at.end) - begin;
      rows = at.rows(p), pitch = at.row_pitch(p);
      column = at.column;
      const int main_offset = lane_place(), main_channel = lane_channel();
      const int64_t x = p.in.axis[2], c = p.in.channel;
      source = static_cast<const T*>(p.input) + (static_cast<int64_t>(group) * p.group_in + main_channel) * c +
               at.batch * p.in.batch + begin * p.in.axis[0] + (at.row - 1) * p.in.axis[1] + (column + main_offset) * x;
      beyond = (edge_channel() - main_channel) * c + (edge_place() - main_offset) * x;
    }
    if (planes <= 0) rows = 0;
  }

  // What a lane copies: its first channel and position.
  __device__ __forceinline__ int lane_channel() const {
    const int lane = threadIdx.x % 32;
    if (p.vectors) return kPixels ? lane % 2 * (kStepChannels / 2) : lane / (p.wide ? 2 * kSize : 8);
    return kPixels ? lane % kStepChannels : 0;
  }
  __device__ __forceinline__ int lane_place() const {
    const int lane = threadIdx.x % 32;
    if (p.vectors) return kPixels ? lane / 2 : p.wide ? lane % (2 * kSize) * (16 / kSize) : lane % 8 * 4;
    return kPixels ? lane / kStepChannels : lane;
  }
  // Beyond the unit.
  __device__ __forceinline__ int edge_channel() const {
    const int lane = threadIdx.x % 32;
    return kPixels && p.vectors ? lane % 2 * (kStepChannels / 2) : lane / 2;
  }
  __device__ __forceinline__ int edge_place() const {
    const int lane = threadIdx.x % 32;
    if (kPixels && p.vectors) return lane < 2 ? -1 : 32;
    return lane % 2 == 1 ? 32 : !kPixels && p.vectors && kSize == 2 ? -2 : -1;
  }

  __device__ __forceinline__ bool is_inside(int place) const {
    return static_cast<unsigned>(column + place) < static_cast<unsigned>(p.size[2]);
  }

  // kBytes of a channel at a time, and words beyond the unit.
  template <int kBytes>
  __device__ __forceinline__ void copy_planes(uint32_t to) const {
    constexpr int kLanes = 32 * kSize / kBytes, kChannels = 32 / kLanes;  // of a channel; at a time
    const int lane = threadIdx.x % 32, channel = lane / kLanes, edge = lane / 2;
    const bool exists = is_inside(lane % kLanes * (kBytes / kSize));
    const bool any = edge < kStepChannels && edge < left && is_inside(lane % 2 == 1 ? 32 : -1);
    const uint32_t at = to + channel * kChannelPitch + lane % kLanes * kBytes;
    const uint32_t at_edge = to + edge * kChannelPitch + (lane % 2 == 1 ? 32 * kSize : kBefore);
    const T* from = source;
#pragma unroll
    for (int r = 0; r <= kHeadsWindowRows; ++r, from += pitch) {
      const bool row = rows >> r & 1;  // zeros where there is none
#pragma unroll
      for (int k = 0; k < kStepChannels; k += kChannels) {
        heads_window_copy<kBytes>(at + r * kSlot + k * kChannelPitch, from + k * p.in.channel,
                                  row && exists && channel + k < left);
      }
      if (edge < kStepChannels) heads_window_copy<4>(at_edge + r * kSlot, from + beyond, row && any);
    }
  }

  // 16 bytes of channels of a position at a time.
  __device__ __forceinline__ void copy_pixels(uint32_t to) const {
    const int lane = threadIdx.x % 32;
    const bool exists = lane % 2 * (kStepChannels / 2) < left;
    const uint32_t at = to + cell(0, lane / 2) + lane % 2 * 16;
    const uint32_t at_edge = to + (lane < 2 ? kBefore : cell(0, 32)) + lane % 2 * 16;
    const T* from = source;
#pragma unroll
    for (int r = 0; r <= kHeadsWindowRows; ++r, from += pitch) {
      const bool row = exists && (rows >> r & 1);
      heads_window_copy<16>(at + r * kSlot, from, row && is_inside(lane / 2));
      heads_window_copy<16>(at + r * kSlot + cell(0, 16), from + 16 * p.in.axis[2], row && is_inside(lane / 2 + 16));
      if (lane < 4) heads_window_copy<16>(at_edge + r * kSlot, from + beyond, row && is_inside(lane < 2 ? -1 : 32));
    }
  }

  // Where channel c of position x is in a slot.
  static __device__ __forceinline__ int cell(int c, int x) {
    return kPixels ? x * 32 + x / 4 * kGap + c * kSize : c * kChannelPitch + x * kSize;
  }

  // Where memory has no aligned vectors. Halves go through registers, for which the warp waits.
  __device__ __forceinline__ void copy_elements(const T* from, uint32_t to, int channels) const {
    const int lane = threadIdx.x % 32;
    const int channel = lane_channel(), place = lane_place();
    const int at_edge = kPixels ? (lane % 2 == 1 ? cell(0, 32) : kBefore) + lane / 2 * kSize
                                : lane / 2 * kChannelPitch + (lane % 2 == 1 ? 32 * kSize : kBefore + 4 - kSize);
    const bool any = lane / 2 < kStepChannels && lane / 2 < channels && is_inside(lane % 2 == 1 ? 32 : -1);
    constexpr int kBatch = 4;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < kStepChannels; first += kBatch) {
      uint32_t word[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int k = first + i, c = kPixels ? channel : k, x = kPixels ? place + k * (32 / kStepChannels) : place;
        const T* const at = from + (kPixels ? k * (32 / kStepChannels) * p.in.axis[2] : k * p.in.channel);
        const bool exists = c < channels && is_inside(x);
        if constexpr (kSize == 4) {
          heads_window_copy<4>(to + cell(c, x), at, exists);
        } else {
          word[i] = heads_window_half(at, exists);
        }
      }
      if constexpr (kSize == 2) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int k = first + i;
          heads_window_put_half(to + (kPixels ? cell(channel, place + k * (32 / kStepChannels)) : cell(k, place)),
                                word[i]);
        }
      }
    }
    if constexpr (kSize == 4) {
      if (lane / 2 < kStepChannels) heads_window_copy<4>(to + at_edge, from + beyond, any);
    } else {
      heads_window_put_half(to + at_edge, heads_window_half(from + beyond, any));
    }
  }
};

#endif

}  // namespace fastconvt::cuda
