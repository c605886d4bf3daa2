// How a block of depthwise_gradients.cuh has the rows of a stage copied to shared memory (compute capability 9.0).
#pragma once

#include "depthwise_gradients_params.cuh"
#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FASTCONVT_DEPTHWISE_GRADIENTS 1
#endif

#ifdef FASTCONVT_DEPTHWISE_GRADIENTS

// Addresses and size are multiples of 16 bytes; the barrier waits for it.
__device__ __forceinline__ void stage_copy(uint32_t target, uint64_t source, int bytes, uint32_t barrier) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  bulk_load(target, reinterpret_cast<const void*>(source), bytes, barrier);
}

// Copies all chunks of 16 bytes that [begin, end) of the tensor touches; the one of `first` goes to `place`. At the
// ends of the tensor, elements one by one.
template <class Traits>
__device__ __forceinline__ void copy_run(const typename Traits::T* tensor, int64_t elements, int64_t first,
                                         int64_t begin, int64_t end, typename Traits::T* place, uint32_t barrier) {
  using T = typename Traits::T;
  constexpr uint64_t kMask = ~uint64_t{15};
  const uint64_t low = reinterpret_cast<uint64_t>(tensor + begin) & kMask;
  const uint64_t high = (reinterpret_cast<uint64_t>(tensor + end) + 15) & kMask;
  const int64_t offset = static_cast<int64_t>(low - (reinterpret_cast<uint64_t>(tensor + first) & kMask));
  uint32_t target = shared_address(place) + static_cast<uint32_t>(offset);
  uint64_t from = low, to = high;
  if constexpr (!Traits::kAligned) {
    const T* const last = tensor + elements;
    const auto copy_one_by_one = [&](uint64_t chunk) {
      const T* source = reinterpret_cast<const T*>(chunk);
      T* copy = place + (static_cast<int64_t>(chunk - low) + offset) / static_cast<int64_t>(sizeof(T));
#pragma unroll 1
      for (int e = 0; e < Traits::kChunk; ++e) {
        if (source + e >= tensor && source + e < last) copy[e] = source[e];
      }
      fence_shared_writes();
    };
    if (from < reinterpret_cast<uint64_t>(tensor)) copy_one_by_one(from), from += 16;
    if (to > from && to > reinterpret_cast<uint64_t>(last)) to -= 16, copy_one_by_one(to);
    target += static_cast<uint32_t>(from - low);
  }
  if (to > from) stage_copy(target, from, static_cast<int>(to - from), barrier);
}

// Starts the copies of a stage, and has the barrier wait for them. One warp calls it.
template <class Traits>
__device__ __forceinline__ void copy_stage(const DepthwiseGradientsParams& p, const DepthwiseStageCursor& at,
                                           int channel, typename Traits::T* stage, uint32_t barrier) {
  using T = typename Traits::T;
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int lane = static_cast<int>(threadIdx.x) % 32, skipped = at.slab * p.bases;
  const int bases = min(p.bases, p.height_bases - skipped);
#pragma unroll 1
  for (int job = lane; job < p.grad_jobs + p.input_jobs; job += 32) {
    const bool is_grad = job < p.grad_jobs;
    int run = is_grad ? job : job - p.grad_jobs;
    int plane = is_grad ? p.by_grad_run(run) : p.by_input_run(run);
    const int slot = is_grad ? p.by_grad_plane(plane) : p.by_input_plane(plane);
    const DepthwiseUnit unit(p, at.turn * p.slots + slot);
    const int columns = Traits::kFlat ? bases * p.tile : p.tile;
    int z, y, rows, z_begin, z_end, y_end, x, x_end, place;
    if (is_grad) {
      z = (unit.z + at.depth_base) * depth.stride + plane - depth.padding;
      y = Traits::kFlat ? 0 : (unit.y + skipped) * height.stride - height.padding + run;
      rows = Traits::kFlat ? 1 : bases * height.stride;
      z_begin = 0, z_end = static_cast<int>(depth.out), y_end = static_cast<int>(height.out);
      x = (unit.x + (Traits::kFlat ? skipped * p.tile : 0)) * Traits::kStride - width.padding;
      x_end = min(x + (columns - 1) * Traits::kStride + Traits::kKernel, static_cast<int>(width.out));
      place = slot * p.grad_slot + plane * p.grad_plane_pitch + run * p.grad_pitch;
    } else {
      z = unit.z + at.depth_base - plane, y = Traits::kFlat ? 0 : unit.y + skipped + run;
      rows = Traits::kFlat ? 1 : bases;
      z_begin = unit.z, z_end = min(unit.z + p.depth_rows, static_cast<int>(depth.in));
      y_end = Traits::kFlat ? 1 : min(unit.y + p.height_rows, static_cast<int>(height.in));
      x = unit.x + (Traits::kFlat ? skipped * p.tile : 0);
      x_end = min(x + columns, static_cast<int>(width.in));
      place = p.input_place + slot * p.input_slot + plane * p.input_plane_pitch + run * p.input_pitch;
    }
    const bool whole = p.whole_rows && !Traits::kFlat;
    if (whole) x = 0, x_end = static_cast<int>(is_grad ? width.out : width.in);
    y_end = min(y_end, y + (whole ? rows : 1));
    const int y_begin = max(y, 0), x_begin = max(x, 0);
    if (!unit.exists || z < z_begin || z >= z_end || y_begin >= y_end || x_begin >= x_end || run >= rows) continue;
    const int64_t row = is_grad ? p.grad_row : p.input_row;
    const int64_t origin = is_grad ? unit.sample * p.grad_batch + channel * p.grad_channel + z * p.grad_plane
                                   : unit.sample * p.input_batch + channel * p.input_channel + z * p.input_plane;
    copy_run<Traits>(static_cast<const T*>(is_grad ? p.grad : p.input), is_grad ? p.grad_elements : p.input_elements,
                     origin + y * row + x, origin + y_begin * row + x_begin, origin + (y_end - 1) * row + x_end,
                     stage + place, barrier);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

#endif

}  // namespace fastconvt::cuda
