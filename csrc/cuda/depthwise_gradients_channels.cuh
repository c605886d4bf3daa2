// As depthwise_gradients.cuh, in channels_last: lanes are (class, channel), and warps have different columns or
// samples. What is staged are boxes of (channel, column, row, plane), by tensor copies, with zeros for what does not
// exist.
#pragma once

#include <cuda.h>

#include "depthwise_gradients_repair.cuh"
#include "depthwise_gradients_stage.cuh"
#include "depthwise_gradients_thread.cuh"
#include "device/tensor_copy.cuh"

namespace fastconvt::cuda {

#ifdef FASTCONVT_DEPTHWISE_GRADIENTS

// Starts the copies of a stage; one warp calls it.
template <class Traits>
__device__ __forceinline__ void copy_boxes(const DepthwiseGradientsParams& p, const CUtensorMap* grad_map,
                                           const CUtensorMap* input_map, const DepthwiseStageCursor& at, int channel,
                                           typename Traits::T* stage, uint32_t barrier) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < p.slots) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(p.slot_bytes)
                 : "memory");
    const DepthwiseUnit unit(p, at.turn * p.slots + lane);
    const int z = unit.z + at.depth_base, y = unit.y + at.slab * p.bases;
    load_box(shared_address(stage + lane * p.grad_slot), grad_map, channel, unit.x * Traits::kStride - Traits::kMargin,
             y * height.stride - height.padding, z * depth.stride - depth.padding, unit.sample, barrier);
    load_box(shared_address(stage + p.input_place + lane * p.input_slot), input_map, channel, unit.x, y,
             z - (Traits::kDepth - 1), unit.sample, barrier);
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    depthwise_gradients_channels_kernel(const __grid_constant__ DepthwiseGradientsParams p,
                                        const __grid_constant__ DepthwiseWeightParams whole,
                                        const __grid_constant__ CUtensorMap grad_map,
                                        const __grid_constant__ CUtensorMap input_map) {
#ifdef FASTCONVT_DEPTHWISE_GRADIENTS
  using T = typename Traits::T;
  constexpr int kInputs = Traits::kInputs, kDepth = Traits::kDepth, kHeight = Traits::kHeight;
  constexpr int kPhases = Traits::kPhases, kKernel = Traits::kKernel, kChannels = Traits::kChannels;
  constexpr int kThreads = Traits::kThreads, kWarps = kThreads / 32, kStages = kDepthwiseStages;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const sums = reinterpret_cast<float*>(shared + p.sums_place);
  T* const stages = reinterpret_cast<T*>(shared + p.stages_place);
  const uint32_t barriers = shared_address(shared);
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int number = static_cast<int>(threadIdx.x), lane = number % 32;
  const int split = static_cast<int>(blockIdx.x) / p.channel_tiles;
  const int first_channel = (static_cast<int>(blockIdx.x) - split * p.channel_tiles) * kChannels;
  const int turns = ((p.units + p.slots - 1) / p.slots - split + p.splits - 1) / p.splits;
  const int total = turns * p.depth_bases * p.slabs;

  DepthwiseStageCursor ahead{split}, at{split};
  const auto copy = [&](int i, bool own_turn) {
    if (i >= total) return;
    if (own_turn) {
      const int stage = i % kStages;
      if (i >= kStages) mbarrier_wait(barriers + (kStages + stage) * 8, (i / kStages - 1) & 1);
      copy_boxes<Traits>(p, &grad_map, &input_map, ahead, first_channel, stages + stage * p.stage,
                         barriers + stage * 8);
    }
    ahead.advance(p);
  };
  if (number == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(barriers + i * 8, 1);                   // it is full
      mbarrier_init(barriers + (kStages + i) * 8, kWarps);  // it has been read
    }
    fence_shared_writes();
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kDepthwiseAhead; ++i) copy(i, number < 32);
  let_next_grid_begin();

  // The warps beyond are as the first one, but add and store nothing.
  const bool works = number < p.threads;
  const int own_class = lane / kChannels, channel = first_channel + lane % kChannels;
  int slot = 0, group = works ? number / 32 : 0;
  slot = p.by_group(group);
  const int classes = (height.stride + kPhases - 1) / kPhases, depth_phase = own_class / classes;
  const int height_phase = (own_class - depth_phase * classes) * kPhases;  // the first one
  const bool has_class = depth_phase < depth.stride, has_channel = channel < p.channels;
  // The tap of a sum, negative if it is none.
  const auto tap_of = [&](int i) {
    const int ph = height_phase + i / (kKernel * kHeight * kDepth);
    const int tz = window_tap_of(depth, p.by_depth_dilation, depth_phase, i / (kKernel * kHeight) % kDepth);
    const int ty = window_tap_of(height, p.by_height_dilation, ph, i / kKernel % kHeight), tx = i % kKernel;
    const bool exists = has_channel && has_class && ph < height.stride && tz >= 0 && ty >= 0 && tx < width.kernel;
    return exists ? (tz * height.kernel + ty) * width.kernel + tx : -1;
  };
  const int64_t filter = static_cast<int64_t>(channel) * depth.kernel * height.kernel * width.kernel;

  DepthwiseGradientsThread<Traits> thread;
  float* const column = sums + number;
#pragma unroll
  for (int i = 0; i < Traits::kSums; ++i) {
    const int tap = tap_of(i);
    thread.weight_at(i) = tap >= 0 ? to_accumulator(static_cast<const T*>(p.weight)[filter + tap]) : 0.f;
    thread.sum_at(i) = 0;
    column[i * kThreads] = 0;
  }
  column[Traits::kSums * kThreads] = 0;

  const T* const grad_place = stages + slot * p.grad_slot + (has_class ? depth_phase : 0) * p.grad_plane_pitch +
                              height_phase * p.grad_pitch + group * (Traits::kOwn * kChannels) + lane % kChannels;
  const T* const input_place =
      stages + p.input_place + slot * p.input_slot + group * (kInputs * kChannels) + lane % kChannels;
  float* const planes = reinterpret_cast<float*>(shared + p.planes_place) +
                        (slot * p.height_rows * p.tile + group * kInputs) * kChannels + lane % kChannels;
  const bool stores = works && own_class == 0 && has_channel && p.output != nullptr;
  int chain = 0, inputs = 0, rows_done = 0, bias_bases = 0, input_rows[kDepth] = {};
  float not_finite = 0;  // or zero
  bool stores_unit = false;
  T* target = nullptr;

#pragma unroll 1
  for (int i = 0; i < total; ++i) {
    copy(i + kDepthwiseAhead, number / 32 == i % kWarps);  // the warps take turns
    if (at.slab == 0) {
      const DepthwiseUnit unit(p, at.turn * p.slots + slot);
      const int z = unit.z + at.depth_base, depth_end = min(unit.z + p.depth_rows, static_cast<int>(depth.in));
      const int x = unit.x + group * kInputs, rows = min(p.height_rows, static_cast<int>(height.in) - unit.y);
      target = static_cast<T*>(p.output) + unit.sample * p.input_batch + channel + (z - (kDepth - 1)) * p.input_plane +
               static_cast<int64_t>(unit.y - (kHeight - 1)) * p.input_row + static_cast<int64_t>(x) * p.input_column;
      inputs = unit.exists && works ? min(kInputs, static_cast<int>(width.in) - x) : 0;
      const bool exists = inputs > 0;
      stores_unit = stores && exists && at.depth_base >= kDepth - 1 && z - (kDepth - 1) < depth_end;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        input_rows[d] = exists && z - d >= unit.z && z - d < depth_end ? rows : 0;
      }
      const bool counts_depth = at.depth_base < p.depth_rows || depth_end == depth.in;
      const int counted = unit.y + p.height_rows >= height.in ? p.height_bases : p.height_rows;
      bias_bases = exists && counts_depth ? counted : 0;
      rows_done = stores && exists ? rows : 0;
      thread.restart();
    }
    const int stage = i % kStages * p.stage, first = at.slab * p.bases;
    const int bases = min(p.bases, p.height_bases - first);
    const T *grad_at = grad_place + stage, *input_at = input_place + stage;
    mbarrier_wait(barriers + i % kStages * 8, i / kStages & 1);
#pragma unroll 1
    for (int b = 0; b < bases; ++b, grad_at += p.grad_base, input_at += p.input_base) {
      const int base = first + b;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
#pragma unroll
        for (int e = 0; e < kInputs; ++e) {
          const T x = input_at[(kDepth - 1 - d) * p.input_plane_pitch + e * kChannels];
          thread.input[d][0][e] = base < input_rows[d] ? to_accumulator(x) : 0.f;
        }
      }
      float bias = 0;  // of a base at a time: equal terms of a longer sum would be less exact
#pragma unroll
      for (int ph = 0; ph < kPhases; ++ph) {
        if (ph > 0 && height_phase + ph >= height.stride) continue;
        float grad[Traits::kColumns];
#pragma unroll
        for (int e = 0; e < Traits::kColumns; ++e) {
          grad[e] = to_accumulator(grad_at[ph * p.grad_pitch + e * kChannels]);
        }
        if (ph == 0) {
          thread.template add_row<true>(ph, grad);
        } else {
          thread.template add_row<false>(ph, grad);
        }
        bias += thread.own_columns(grad);
      }
      thread.bias += base < bias_bases ? bias : 0.f;
      float value[kDepth][kInputs];
      thread.finish(value);
      const int done = base - (kHeight - 1);
      if (static_cast<unsigned>(done) < static_cast<unsigned>(rows_done)) {
#pragma unroll
        for (int e = 0; e < kInputs; ++e) {
          float gradient = value[0][e];
          if constexpr (kDepth > 1) {
            float* const plane = planes + (done * p.tile + e) * kChannels;
            gradient = *plane + value[kDepth - 1][e];
            *plane = value[0][e];
          }
          if (stores_unit && e < inputs) {
            not_finite = fmaf(gradient, 0.f, not_finite);
            target[static_cast<int64_t>(e) * p.input_column] = from_accumulator<T>(gradient);
          }
        }
      }
      target += p.input_row;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers + (kStages + i % kStages) * 8);
    chain += bases;
    if (chain + p.bases > Traits::kChain) {
      thread.keep(column);
      chain = 0;
    }
    if (at.slab == p.slabs - 1 && at.depth_base == p.depth_bases - 1) {
      if (not_finite != 0) repair_inputs<Traits>(p, at.turn * p.slots + slot, channel, group);
      not_finite = 0;
    }
    at.advance(p);
  }
  if (whole.output == nullptr && whole.grad_bias == nullptr) return;
  const bool alone = p.splits == 1;  // the sums are whole
  thread.keep(column);
  if (!has_class) column[Traits::kSums * kThreads] = 0;  // it has read the rows of another class
  __syncthreads();
  float not_finite_sum = 0;  // or zero
#pragma unroll 1
  for (int i = number / 32; i <= Traits::kSums; i += kWarps) {
    float sum = 0;
#pragma unroll 1
    for (int e = lane; e < p.threads; e += 32) sum += sums[i * kThreads + e];
    if (i < Traits::kSums) {
      const int tap = tap_of(i);
      if (tap < 0 || whole.output == nullptr) continue;
      not_finite_sum = fmaf(sum, 0.f, not_finite_sum);
      if (alone) {
        static_cast<T*>(whole.output)[filter + tap] = from_accumulator<T>(sum);
      } else {
        p.partial[split * p.weight_elements + filter + tap] = sum;
      }
      continue;
    }
#pragma unroll
    for (int apart = Traits::kClasses / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, apart * kChannels);
    }
    if (own_class > 0 || !has_channel || whole.grad_bias == nullptr) continue;
    not_finite_sum = fmaf(sum, 0.f, not_finite_sum);
    if (alone) {
      static_cast<T*>(whole.grad_bias)[channel] = from_accumulator<T>(sum);
    } else {
      p.bias_partial[static_cast<int64_t>(split) * p.channels + channel] = sum;
    }
  }
  if (!alone || !__syncthreads_or(not_finite_sum != 0)) return;
#pragma unroll 1
  for (int c = first_channel; c < min(first_channel + kChannels, p.channels); ++c) {
    repair_sums<T, kThreads>(whole, c, reinterpret_cast<double*>(sums));
  }
#endif
}

}  // namespace fastconvt::cuda
