// Both gradients of depthwise layers (one input channel a group), and the bias's, in one pass over the output's
// gradient. An input meets the same patch of it in both:
//
//   grad_input[i]  = sum over taps t of grad_output[i * stride - padding + t * dilation] * weight[t]
//   grad_weight[t] = sum over i of input[i] * grad_output[i * stride - padding + t * dilation].
//
// A block takes a channel, has rows of both tensors copied to shared memory, two stages ahead, and marches down the
// bases of the height. A thread has kInputs neighbouring inputs and kPhases phases of the height: at each base it loads
// the columns that its inputs reach, which meet kDepth planes and kHeight rows of inputs, and keeps the weights and
// their sums in registers. Threads of other phases, or of those of the depth, are neighbouring lanes, that add up the
// input's gradient. What is to be added at the next base stays in registers, at the next base of the depth in shared
// memory.
#pragma once

#include "depthwise_gradients_stage.cuh"
#include "depthwise_gradients_sums.cuh"
#include "depthwise_gradients_thread.cuh"

namespace fastconvt::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kResident)
    depthwise_gradients_kernel(const __grid_constant__ DepthwiseGradientsParams p,
                               const __grid_constant__ DepthwiseWeightParams whole) {
#ifdef FASTCONVT_DEPTHWISE_GRADIENTS
  using T = typename Traits::T;
  constexpr int kInputs = Traits::kInputs, kDepth = Traits::kDepth, kHeight = Traits::kHeight;
  constexpr int kPhases = Traits::kPhases, kKernel = Traits::kKernel, kStride = Traits::kStride;
  constexpr bool kFlat = Traits::kFlat;
  constexpr int kThreads = Traits::kThreads, kWarps = kThreads / 32, kStages = kDepthwiseStages;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const sums = reinterpret_cast<float*>(shared + p.sums_place);
  T* const stages = reinterpret_cast<T*>(shared + p.stages_place);
  const uint32_t barriers = shared_address(shared);
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int number = static_cast<int>(threadIdx.x);
  const DepthwiseBlock block(p);
  const int split = block.split, channel = block.channel;
  const int turns = ((p.units + p.slots - 1) / p.slots - split + p.splits - 1) / p.splits;
  const int total = turns * p.depth_bases * p.slabs;

  DepthwiseStageCursor ahead{split}, at{split};
  const auto copy = [&](int i, bool own_turn) {
    if (i >= total) return;
    if (own_turn) {
      const int stage = i % kStages;
      if (i >= kStages) mbarrier_wait(barriers + (kStages + stage) * 8, (i / kStages - 1) & 1);
      copy_stage<Traits>(p, ahead, channel, stages + stage * p.stage, barriers + stage * 8);
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

  // The threads beyond are as the first one, but add and store nothing.
  const bool works = number < p.threads;
  const int own_class = number % Traits::kClasses;
  int slot = 0, group = works ? number / Traits::kClasses : 0;
  slot = p.by_group(group);
  const int classes = (height.stride + kPhases - 1) / kPhases, depth_phase = own_class / classes;
  const int height_phase = (own_class - depth_phase * classes) * kPhases;  // the first one
  const bool has_class = depth_phase < depth.stride;
  // The tap of a sum, negative if it is none.
  const auto tap_of = [&](int i) {
    const int ph = height_phase + i / (kKernel * kHeight * kDepth);
    const int tz = window_tap_of(depth, p.by_depth_dilation, depth_phase, i / (kKernel * kHeight) % kDepth);
    const int ty = window_tap_of(height, p.by_height_dilation, ph, i / kKernel % kHeight), tx = i % kKernel;
    const bool exists = has_class && ph < height.stride && tz >= 0 && ty >= 0 && tx < width.kernel;
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
                              height_phase * p.grad_pitch + group * (kInputs * kStride) + p.shift;
  const T* const input_place = stages + p.input_place + slot * p.input_slot + group * kInputs;
  float* const planes =
      reinterpret_cast<float*>(shared + p.planes_place) + slot * p.height_rows * p.tile + group * kInputs;
  const bool stores = works && own_class == 0 && p.output != nullptr;
  int chain = 0, x = 0, y = 0, grad_rows = 0, whole_rows = 0, rows_done = 0, bias_bases = 0, input_rows[kDepth] = {};
  int grad_shift = 0, input_shift = 0, first_mask = 0, last_mask = 0;
  float not_finite = 0;  // or zero
  bool stores_unit = false, exists = false;
  T* target = nullptr;

#pragma unroll 1
  for (int i = 0; i < total; ++i) {
    copy(i + kDepthwiseAhead, number / 32 == i % kWarps);  // the warps take turns
    if (at.slab == 0) {
      const DepthwiseUnit unit(p, at.turn * p.slots + slot);
      const int z = unit.z + at.depth_base, depth_end = min(unit.z + p.depth_rows, static_cast<int>(depth.in));
      const int64_t origin = unit.sample * p.input_batch + channel * p.input_channel +
                             (z - (kDepth - 1)) * p.input_plane +
                             static_cast<int64_t>(unit.y - (kHeight - 1)) * p.input_row;
      x = unit.x + group * kInputs;
      target = static_cast<T*>(p.output) + origin + x;
      exists = unit.exists && (kFlat || x < width.in);
      stores_unit = stores && exists && at.depth_base >= kDepth - 1 && z - (kDepth - 1) < depth_end;
      if constexpr (kFlat) {
        constexpr int kMask = Traits::kChunk - 1;
        const int64_t grad_first = unit.sample * p.grad_batch + channel * p.grad_channel - width.padding;
        const T *grad = static_cast<const T*>(p.grad) + grad_first, *input = static_cast<const T*>(p.input) + origin;
        grad_shift = static_cast<int>(reinterpret_cast<uint64_t>(grad) / sizeof(T)) & kMask;
        input_shift = static_cast<int>(reinterpret_cast<uint64_t>(input) / sizeof(T)) & kMask;
      } else {
        const int rows = min(p.height_rows, static_cast<int>(height.in) - unit.y);
        const int gz = z * depth.stride + depth_phase - depth.padding;
        y = unit.y * height.stride + height_phase - height.padding;
        grad_rows =
            exists && static_cast<unsigned>(gz) < static_cast<unsigned>(depth.out) ? static_cast<int>(height.out) : 0;
        whole_rows = height_phase + kPhases <= height.stride ? max(0, grad_rows - (kPhases - 1)) : 0;
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          input_rows[d] = exists && z - d >= unit.z && z - d < depth_end ? rows : 0;
        }
        const bool counts_depth = at.depth_base < p.depth_rows || depth_end == depth.in;
        bias_bases = !counts_depth ? 0 : unit.y + p.height_rows >= height.in ? p.height_bases : p.height_rows;
        rows_done = stores && exists ? rows : 0;
        first_mask = x == 0 ? 0 : -1, last_mask = x + kInputs >= width.in ? 0 : -1;
      }
      thread.restart();
    }
    const int stage = i % kStages * p.stage, first = at.slab * p.bases;
    const int bases = min(p.bases, p.height_bases - first);
    const T *grad_at = grad_place + stage + grad_shift, *input_at = input_place + stage + input_shift;
    if (kFlat) x = first * p.tile + group;
    mbarrier_wait(barriers + i % kStages * 8, i / kStages & 1);
    // A base of which all rows, or in a single axis all columns, exist, or not.
    const auto add_base = [&](int base, auto is_whole) {
      constexpr bool kWhole = decltype(is_whole)::value;
      float grad[Traits::kColumns];
      thread.load_inputs(input_at, p.input_plane_pitch, input_rows, kFlat ? -1 : base);
      if (!kWhole) thread.begin();
#pragma unroll
      for (int ph = 0; ph < kPhases; ++ph) {
        if constexpr (!kWhole && !kFlat) {
          const int row = y + base * height.stride + ph;
          if (static_cast<unsigned>(row) >= static_cast<unsigned>(grad_rows)) continue;
          if (height_phase + ph >= height.stride) continue;
        }
        load_columns<Traits>(grad_at + ph * p.grad_pitch, grad);
        int bias_columns = 0;
        if constexpr (kFlat && !kWhole) {
          const bool is_input = exists && x < width.in;
          const unsigned mask = is_input ? existing_columns<Traits>(width, x) : 0;
#pragma unroll
          for (int e = 0; e < Traits::kColumns; ++e) grad[e] = mask >> e & 1 ? grad[e] : 0.f;
          if (!is_input) thread.input[0][0][0] = 0;
          bias_columns = is_input ? bias_columns_of<Traits>(width, x) : 0;
        }
#pragma unroll
        for (int e = 0; e < Traits::kMargin; ++e) {
          grad[e] = keep_bits(grad[e], first_mask);
          grad[Traits::kColumns - 1 - e] = keep_bits(grad[Traits::kColumns - 1 - e], last_mask);
        }
        if (ph == 0) {
          thread.template add_row<kWhole>(ph, grad);
        } else {
          thread.template add_row<false>(ph, grad);
        }
        if (kFlat || base < bias_bases) thread.add_bias(grad, kWhole || !kFlat, bias_columns);
      }
    };
#pragma unroll(Traits::kSums < 32 ? 2 : 1)
    for (int b = 0; b < bases; ++b, grad_at += p.grad_base, input_at += p.input_base) {
      const int base = first + b;
      bool whole;
      if constexpr (kFlat) {
        whole = exists && static_cast<unsigned>(x - p.inside_begin) < static_cast<unsigned>(p.inside_count);
      } else {
        whole = static_cast<unsigned>(y + base * height.stride) < static_cast<unsigned>(whole_rows);
      }
      if (whole) {
        add_base(base, std::true_type{});
      } else {
        add_base(base, std::false_type{});
      }
      float value[kDepth][kInputs];
      thread.finish(value);
      const int done = base - (kHeight - 1);
      if (kFlat ? stores_unit && x < width.in : static_cast<unsigned>(done) < static_cast<unsigned>(rows_done)) {
        if constexpr (kDepth > 1) exchange_planes<Traits>(planes + done * p.tile, value);
        if (kDepth == 1 || stores_unit) {
          Pack<T, kInputs> pack;
#pragma unroll
          for (int e = 0; e < kInputs; ++e) {
            not_finite = fmaf(value[0][e], 0.f, not_finite);
            pack.value[e] = from_accumulator<T>(value[0][e]);
          }
          *reinterpret_cast<Pack<T, kInputs>*>(target) = pack;
        }
      }
      target += kFlat ? p.tile : p.input_row;
      if (kFlat) x += p.tile;
    }
    __syncwarp();
    if (number % 32 == 0) mbarrier_arrive(barriers + (kStages + i % kStages) * 8);
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
  const DepthwiseBlock again(p);     // found again rather than kept in registers
  thread.keep(column);
  if (!has_class) column[Traits::kSums * kThreads] = 0;  // it has read the rows of another class
  __syncthreads();
  float not_finite_sum = 0;  // or zero
#pragma unroll 1
  for (int i = number / 32; i <= Traits::kSums; i += kWarps) {
    const int lane = number % 32;
    float total = 0;
#pragma unroll 1
    for (int e = lane; e < p.threads; e += 32) total += sums[i * kThreads + e];
#pragma unroll
    for (int apart = 16; apart >= Traits::kClasses; apart /= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    if (i < Traits::kSums) {
      const int tap = lane < Traits::kClasses ? tap_of(i) : -1;
      if (tap < 0 || whole.output == nullptr) continue;
      not_finite_sum = fmaf(total, 0.f, not_finite_sum);
      if (alone) {
        static_cast<T*>(whole.output)[filter + tap] = from_accumulator<T>(total);
      } else if (p.cluster) {
        sums[i * kThreads + lane] = total;
      } else {
        p.partial[again.split * p.weight_elements + filter + tap] = total;
      }
      continue;
    }
#pragma unroll
    for (int apart = Traits::kClasses / 2; apart > 0; apart /= 2) total += __shfl_xor_sync(0xffffffffu, total, apart);
    if (lane > 0 || whole.grad_bias == nullptr) continue;
    not_finite_sum = fmaf(total, 0.f, not_finite_sum);
    if (alone) {
      static_cast<T*>(whole.grad_bias)[again.channel] = from_accumulator<T>(total);
    } else if (p.cluster) {
      sums[i * kThreads] = total;
    } else {
      p.bias_partial[static_cast<int64_t>(again.split) * p.channels + again.channel] = total;
    }
  }
  if (!alone && !p.cluster) return;
  const bool repeats = __syncthreads_or(not_finite_sum != 0);
  if (p.cluster) {
    add_sums_of_cluster<Traits>(p, whole, again, sums, !repeats, tap_of);
  } else if (repeats) {
    repair_sums<T, kThreads>(whole, again.channel, reinterpret_cast<double*>(sums));
  }
#endif
}

}  // namespace fastconvt::cuda
