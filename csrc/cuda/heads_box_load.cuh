// Heads in one turn: inputs on their way to the matrix units, through slots of each warp in shared memory. A warp waits
// for nobody else. (Loads to registers would wait for each other: the compiler counts them all together.)
//
// A chunk is 32 positions of the box, in its own order. With quad = lane % 4 and column = lane / 4, a lane multiplies
// four positions (4 * column and the next three; kPixels: column, column + 8, ...) by the channels from
// quad * kLaneChannels on. What does not exist is read elsewhere: its products are not used, or meet zero weights.
#pragma once

#include "heads_box_params.cuh"
#include "heads_product.cuh"

namespace fastconvt::cuda {

// The first of the lane's channels in a step, which are next to each other.
template <typename T, HeadsBoxMode kMode>
__device__ __forceinline__ int heads_box_channel(int step, int quad) {
  constexpr int kLaneChannels = 8 / sizeof(T);
  // A lane's channels of two steps are 16 bytes.
  if constexpr (kMode == HeadsBoxMode::kPixels) return ((step & ~1) * 4 + quad * 2 + (step & 1)) * kLaneChannels;
  return (step * 4 + quad) * kLaneChannels;
}

// The warp's number, known to be the same for all lanes.
__device__ __forceinline__ int heads_box_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kBytes>
__device__ __forceinline__ void heads_box_copy(uint32_t target, const void* source) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(kBytes) : "memory");
  }
}

template <typename T, HeadsBoxMode kMode, int kWarps>
class HeadsBoxLoader {
  static constexpr int kLaneChannels = 8 / sizeof(T), kStepChannels = 4 * kLaneChannels;
  static constexpr int kSlot = heads_box_slot(kMode), kRing = heads_box_ahead(kMode) * kSlot;
  static constexpr bool kPixels = kMode == HeadsBoxMode::kPixels, kPlanes = kMode == HeadsBoxMode::kPlanes;
  static constexpr bool kHalves = sizeof(T) == 2;
  // Asynchronous copies of single elements are slow, and there are none of two bytes: two steps wait in registers for
  // as long.
  static constexpr bool kHeld = kMode == HeadsBoxMode::kElements;
  // Slots. kPixels: two steps together, 16 bytes a lane and position. kPlanes in 16 bits: channels 72 bytes apart. Else
  // words of a channel, or two of them, 144 bytes apart. No banks are met twice.
  static constexpr int kPitch = kPlanes && kHalves ? 72 : 144;

  const HeadsBoxParams& p;
  const T* source;  // the first position of the box and the first channel
  const uint32_t slots;
  int offset[kPixels ? 4 : 1];  // of the positions that the lane copies
  int chunk, step = 0;
  int target = 0, next = 0;  // slots: of the next copies and of the next values
  uint32_t held[kHeld ? 2 : 1][kHeld ? kStepChannels : 1];
  bool holds = false;

 public:
  static constexpr int kAhead = heads_box_ahead(kMode);
  // Requests before the first values beyond kAhead: those that put away what is held.
  static constexpr int kMore = kHeld ? kAhead : 0;

  __device__ __forceinline__ HeadsBoxLoader(const HeadsBoxParams& p, const HeadsBoxPlace& place, void* shared)
      : p(p),
        source(static_cast<const T*>(p.input)),
        slots(shared_address(shared) + heads_box_warp() * kRing),
        chunk(heads_box_warp()) {
    source += place.sample * p.in.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) source += place.begin[a] * p.in.axis[a];
    find(place);
  }

  // What the next step multiplies.
  __device__ __forceinline__ HeadsRight values() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPixels ? kAhead - 2 : kAhead - 1) : "memory");
    __syncwarp();
    const int lane = threadIdx.x % 32, quad = lane % 4, column = lane / 4;
    const uint32_t slot = slots + next;
    next = next + kSlot < kRing ? next + kSlot : 0;
    HeadsRight right;
    uint32_t raw[8];
    if constexpr (kPixels) {
      const bool second = (slot - slots) / kSlot % 2 != 0;
      const uint32_t from = slot + lane * 16 + (second ? 8 - kSlot : 0);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(right.word[0][j]), "=r"(right.word[1][j])
                     : "r"(from + j * 512));
      }
    } else if constexpr (kPlanes && kHalves) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(raw[2 * c]), "=r"(raw[2 * c + 1])
                     : "r"(slot + (quad * 4 + c) * kPitch + column * 8));
      }
      right.template from_planes<T>(raw);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 word = heads_load(slot + (quad * 2 + h) * kPitch + column * 16);
        right.word[h][0] = word.x, right.word[h][1] = word.y, right.word[h][2] = word.z, right.word[h][3] = word.w;
      }
    }
    return right;
  }

  // Copies kAhead steps ahead, to the slot whose values have been used.
  __device__ __forceinline__ void request(const HeadsBoxPlace& place) {
    __syncwarp();
    if (kPlanes || target / kSlot % 2 != 0) {
      if constexpr (kHeld) release();
      if ((chunk & ~3) * 32 < p.positions) copy(place);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    target = target + kSlot < kRing ? target + kSlot : 0;
  }

 private:
  __device__ __forceinline__ void find(const HeadsBoxPlace& place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < (kPixels ? 4 : 1); ++j) {
      int x = chunk * 32 + (kPixels ? 8 * j + lane / 4 : kPlanes ? lane % 8 * 4 : lane);
      int y = p.by_held[2](x);
      const int z = p.by_held[1](y);
      const bool exists =
          chunk * 32 < p.positions && x < place.positions[2] && y < place.positions[1] && z < place.positions[0];
      const int at =
          z * static_cast<int>(p.in.axis[0]) + y * static_cast<int>(p.in.axis[1]) + x * static_cast<int>(p.in.axis[2]);
      offset[j] = exists ? at : 0;
    }
  }

  __device__ __forceinline__ const T* channel_at(int channel) const {
    return source + (min(channel, p.in_channels - 1) * static_cast<int>(p.in.channel) + offset[0]);
  }

  __device__ __forceinline__ void copy(const HeadsBoxPlace& place) {
    const int lane = threadIdx.x % 32;
    const uint32_t slot = slots + target;
    if constexpr (kPixels) {
      const int channel = min(heads_box_channel<T, kMode>(step, lane % 4), p.in_channels - 2 * kLaneChannels);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        heads_box_copy<16>(slot - kSlot + j * 512 + lane * 16, source + (channel + offset[j]));
      }
      advance(2, place);
    } else if constexpr (kPlanes) {
      constexpr int kBytes = 4 * sizeof(T);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        const int channel = i * 4 + lane / 8;
        heads_box_copy<kBytes>(slot + channel * kPitch + lane % 8 * kBytes, channel_at(step * kStepChannels + channel));
      }
      advance(1, place);
    } else {
      holds = true;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < kStepChannels; ++i) {
          const T* const at = channel_at(step * kStepChannels + i);
          if constexpr (kHalves) {
            held[k][i] = __ldg(reinterpret_cast<const unsigned short*>(at));
          } else {
            held[k][i] = __ldg(reinterpret_cast<const uint32_t*>(at));
          }
        }
        advance(1, place);
      }
    }
  }

  __device__ __forceinline__ void advance(int steps, const HeadsBoxPlace& place) {
    step += steps;
    if (step < p.steps) return;
    step = 0, chunk += kWarps;
    find(place);
  }

  // What is held goes to the last two slots, whose values have been used.
  __device__ __forceinline__ void release() {
    if (!holds) return;
    const uint32_t slot = slots + target - kSlot + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int k = i / 8, c = i % 8;
      const uint32_t word = kHalves ? held[k][2 * c] | held[k][2 * c + 1] << 16 : held[k][c];
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(slot + k * kSlot + c * kPitch), "r"(word) : "memory");
    }
  }
};

#endif

}  // namespace fastconvt::cuda
