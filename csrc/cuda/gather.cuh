// The general transposed convolution: every parameter, dtype and layout, in true arithmetic of the accumulator's type.
// A thread owns kPhases phases x kChannels channels x kPositions positions in registers; inputs and weights come
// through shared memory, a few virtual channels at a time (gather.h).
#pragma once

#include "device/numeric.cuh"
#include "epilogue.cuh"
#include "gather_stage.cuh"

namespace fastconvt::cuda {

template <typename T, int kPhases_, int kChannels_, int kPositions_, bool kLong_ = false>
struct GatherTraits {
  using Element = T;
  using Acc = accumulator_t<T>;
  static constexpr int kPhases = kPhases_;
  static constexpr int kChannels = kChannels_;
  static constexpr int kPositions = kPositions_;
  static constexpr bool kLong = kLong_;  // sums in two levels
  static constexpr int kWarpPositions = 32 * kPositions;
  static constexpr int kRegisters = (kLong ? 2 : 1) * kPhases * kChannels * kPositions * sizeof(Acc) / 4;
  static constexpr int kMinBlocks = gather_min_blocks(kLong ? 64 : kRegisters);
  static_assert(kRegisters <= 64, "two blocks of 256 threads must fit an SM");
};

// The activation of outputs begin, begin + 32, ... below end where they are staged or stored. Sixteen bits are rounded
// before it, too, as PyTorch does. Out of line: the kernels are many, and their registers are full of accumulators.
template <typename T>
__device__ __noinline__ void activate_outputs(T* values, int begin, int end, Activation kind, accumulator_t<T> alpha) {
  const Activator<accumulator_t<T>> activate{kind, alpha};
  for (int i = begin; i < end; i += 32) {
    accumulator_t<T> value[1] = {to_accumulator(values[i])};
    activate(value);
    values[i] = from_accumulator<T>(value[0]);
  }
}

template <class Traits>
class GatherKernel {
  using T = typename Traits::Element;
  using Acc = typename Traits::Acc;
  static constexpr int kPhases = Traits::kPhases;
  static constexpr int kChannels = Traits::kChannels;
  static constexpr int kPositions = Traits::kPositions;

  const GatherParams& p;
  const GatherBlock& block;
  Acc* const shared;
  int unit;      // of this thread, within the block
  int group;     // of the unit, within the block
  int position;  // first of the thread's positions; the others follow 32 apart
  bool active;   // some output of the thread, or of its neighbours, may exist
  Acc acc[kPhases][kChannels][kPositions];
  // Long sums: a sum of some kGatherRun products goes here, and the next one begins with what rounding lost (Kahan's
  // compensated sum), so that the rounding of equal products does not add up.
  Acc total[Traits::kLong ? kPhases : 1][kChannels][kPositions];
  int run_length = 0;

 public:
  __device__ GatherKernel(const GatherParams& p, const GatherBlock& block, Acc* shared)
      : p(p), block(block), shared(shared) {
    const int slots = p.tile.positions / kPositions;
    const int thread = threadIdx.x;
    // Contiguous: a warp is one unit, its lanes neighbouring positions. Channels last: units are fastest.
    unit = p.channels_last ? thread % p.tile.units : thread / slots;
    const int slot = p.channels_last ? thread / p.tile.units : thread - unit * slots;
    position = slot / 32 * Traits::kWarpPositions + slot % 32;
    active = output_channel<Traits>(p, block, unit * kChannels, group) < p.out_channels &&
             position - position % 32 < block.positions;
    for_each_accumulator([](Acc& a) { a = Acc{0}; });
    if constexpr (Traits::kLong) add_up([](Acc& sum, Acc) { sum = Acc{0}; });
  }

  __device__ void run() {
    const int taps =
        (block.outer[0].tap_end - block.outer[0].tap_begin) * (block.outer[1].tap_end - block.outer[1].tap_begin);
    const int channels = taps * p.in_channels;
    const int lag = p.tile.stages - 1;  // steps between staging and computing
    InputPosition* const positions = reinterpret_cast<InputPosition*>(shared + p.tile.stages * p.tile.stage_size);
    GatherStep step{VirtualChannel(block), channels, block.entry_begin};
    bool more = channels > 0 && block.entry_begin < block.entry_end;
    if (more) {
      // No barrier: each thread stages the positions that it has prepared.
      for (int m = threadIdx.x; m < p.tile.positions + p.tile.halo; m += blockDim.x) {
        positions[m] = GatherPosition(p, block, m).inputs(p, block);
      }
    }
    int count = 0, entries = 0;  // of the step to compute, if any
    for (int i = 0; more || count > 0; ++i) {
      const int next_count = more ? step.channels(p.tile) : 0, next_entries = step.entries(p.tile, block);
      if (more) {
        GatherStage<Traits>(p, block, positions, step, shared + (i & lag) * p.tile.stage_size).fill();
        more = advance(step, channels);
      }
      if (lag == 0) {
        count = next_count, entries = next_entries;
        wait_for_copies();
        __syncthreads();
      }
      if (count > 0) compute(shared + ((i - lag) & lag) * p.tile.stage_size, count, entries);
      count = lag * next_count, entries = next_entries;
      wait_for_copies();
      __syncthreads();
    }
    if constexpr (Traits::kLong) {
      add_up([](Acc& sum, Acc& a) { a += sum; });
    }
    // Inputs outside the tensor were staged as zeros, which only finite weights leave without effect (0 * inf is NaN).
    // Any other weight shows in an accumulator that is not finite.
    Acc probe{0};
    for_each_accumulator([&](Acc& a) { probe = fma(a, Acc{0}, probe); });
    if (__syncthreads_or(probe != Acc{0})) {
      store_by_definition(taps);
    } else {
      store();
    }
  }

 private:
  template <typename Function>
  __device__ void for_each_accumulator(Function&& function) {
#pragma unroll
    for (int r = 0; r < kPhases; ++r)
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
#pragma unroll
        for (int i = 0; i < kPositions; ++i) function(acc[r][c][i]);
  }

  // Long sums: every total with its accumulator.
  template <typename Function>
  __device__ void add_up(Function&& function) {
#pragma unroll
    for (int r = 0; r < kPhases; ++r)
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
#pragma unroll
        for (int i = 0; i < kPositions; ++i) function(total[r][c][i], acc[r][c][i]);
  }

  __device__ bool advance(GatherStep& step, int channels) const {
    const int count = step.channels(p.tile);
    step.left -= count;
    if (step.left > 0) {
      step.place.advance(p, block, count);
      return true;
    }
    step.place = VirtualChannel(block);
    step.left = channels;
    step.entry += p.tile.entries;
    return step.entry < block.entry_end;
  }

  // Adds the products of one stage.
  __device__ void compute(const Acc* stage, int count, int entries) {
    if (!active) return;
    const Acc* const inputs = stage + p.tile.input_offset + group * p.tile.channels * p.tile.input_pitch + position;
    const Acc* const weights = stage + p.tile.weight_offset + weight_index<Traits>(p, 0, unit * kChannels);
    for (int e = 0; e < entries; ++e) {
      const int2 entry = reinterpret_cast<const int2*>(stage)[e];
      const Acc* const x = inputs + entry.x;
      const Acc* const w = weights + e * p.tile.channels * p.tile.weight_row;
      const bool leading = (entry.y & (entry.y + 1)) == 0;
      if constexpr (Traits::kLong) {
        compute_runs(leading, entry.y, x, w, count);
      } else {
        dispatch_phases<0>(leading, entry.y, x, w, count);
      }
    }
  }

  // Long sums: some kGatherRun products at a time.
  __device__ void compute_runs(bool leading, int mask, const Acc* x, const Acc* w, int count) {
    for (int v = 0; v < count; v += kGatherRun) {
      const int run = min(count - v, kGatherRun);
      dispatch_phases<0>(leading, mask, x + v * p.tile.input_pitch, w + v * p.tile.weight_row, run);
      run_length += run;
      if (run_length < kGatherRun) continue;
      add_up([](Acc& sum, Acc& a) {
        const Acc next = sum + a, lost = a - (next - sum);
        sum = next, a = isfinite(next) ? lost : Acc{0};
      });
      run_length = 0;
    }
  }

  // Entries whose phases are 0 .. r share their inputs; other phases come one by one. All branches are uniform.
  template <int r>
  __device__ void dispatch_phases(bool leading, int mask, const Acc* x, const Acc* w, int count) {
    if constexpr (r < kPhases) {
      if (leading) {
        if (mask == (2 << r) - 1) return accumulate<0, r + 1>(x, w, count);
      } else if (mask >> r & 1) {
        accumulate<r, r + 1>(x, w, count);
      }
      dispatch_phases<r + 1>(leading, mask, x, w, count);
    }
  }

  template <int begin, int end>
  __device__ void accumulate(const Acc* x, const Acc* w, int count) {
#pragma unroll 2
    for (int v = 0; v < count; ++v) {
      Acc xs[kPositions], ws[kPhases][kChannels];
#pragma unroll
      for (int i = 0; i < kPositions; ++i) xs[i] = x[32 * i];
      load_weights<begin, end>(w, ws);
#pragma unroll
      for (int r = begin; r < end; ++r)
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
#pragma unroll
          for (int i = 0; i < kPositions; ++i) acc[r][c][i] = fma(xs[i], ws[r][c], acc[r][c][i]);
      x += p.tile.input_pitch;
      w += p.tile.weight_row;
    }
  }

  template <int begin, int end>
  __device__ void load_weights(const Acc* w, Acc (&ws)[kPhases][kChannels]) const {
    if constexpr (kChannels == 1) {
      const Pack<Acc, kPhases> row = *reinterpret_cast<const Pack<Acc, kPhases>*>(w);
#pragma unroll
      for (int r = begin; r < end; ++r) ws[r][0] = row.value[r];
    } else {
#pragma unroll
      for (int r = begin; r < end; ++r) {
        const Pack<Acc, kChannels> row =
            *reinterpret_cast<const Pack<Acc, kChannels>*>(w + weight_index<Traits>(p, r, 0));
#pragma unroll
        for (int c = 0; c < kChannels; ++c) ws[r][c] = row.value[c];
      }
    }
  }

  __device__ int bias_channel(int channel) const { return p.by_bias(channel); }

  // The phases of one position a lane are interleaved through shared memory: a warp then stores neighbouring outputs,
  // or, in channels_last, neighbouring channels.
  __device__ void store() const {
    using Channels = Pack<T, kChannels>;
    const unsigned lane = threadIdx.x % 32, phases = p.tile.phases;
    Channels* const row = reinterpret_cast<Channels*>(shared) + threadIdx.x / 32 * staged_outputs(kChannels, phases);
    OutputPosition* const table = reinterpret_cast<OutputPosition*>(
        reinterpret_cast<Channels*>(shared) + blockDim.x / 32 * staged_outputs(kChannels, phases));
    for (int m = threadIdx.x; m < p.tile.positions; m += blockDim.x) {
      OutputPosition outputs;
      outputs.offset = GatherPosition(p, block, m).outputs(p, block, outputs.begin, outputs.end);
      table[m] = outputs;
    }
    __syncthreads();

    int g;
    const int channel = output_channel<Traits>(p, block, unit * kChannels, g);
    const int channels = min(kChannels, p.out_channels - channel);
    const int64_t global_channel = static_cast<int64_t>(block.group + g) * p.out_channels + channel;
    const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
    Acc terms[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      terms[c] = c < channels ? epilogue.channel_term(bias_channel(global_channel + c)) : Acc{0};
    }
    T* const out = static_cast<T*>(p.output) + global_channel * p.output_stride.channel;
    const int first = position - position % 32;
    if (!__any_sync(~0u, active)) return;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
#pragma unroll
      for (unsigned r = 0; r < kPhases; ++r) {
        Channels values;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) values.value[c] = epilogue(acc[r][c][i], terms[c]);
        if (r < phases) row[staged_output(kChannels, lane * phases + r)] = values;
      }
      __syncwarp();
      if (p.activation != Activation::kNone) {
        const int end = staged_outputs(kChannels, phases) * kChannels;  // the gaps, too
        activate_outputs(row->value, lane, end, p.activation, static_cast<Acc>(p.alpha));
        __syncwarp();
      }
#pragma unroll 1
      for (unsigned k = 0; k < phases; ++k) {
        const unsigned index = p.channels_last ? lane * phases + k : 32 * k + lane;
        int r = index;
        const int source = p.by_phases(r);  // the lane that made relative phase r
        const OutputPosition at = table[p.channels_last ? position + 32 * i : first + 32 * i + source];
        if (r < at.begin || r >= at.end || !active) continue;
        const Channels values = row[staged_output(kChannels, index)];
        T* const to = out + at.offset + static_cast<int64_t>(r) * p.output_phase;
        if (p.vector_output) {
          *reinterpret_cast<Channels*>(to) = values;
        } else {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            if (c < channels) to[c * p.output_stride.channel] = values.value[c];
          }
        }
      }
      __syncwarp();
    }
  }

  // Straight from global memory, output by output: only taps and inputs that exist are multiplied.
  __device__ void store_by_definition(int taps) const {
    const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
    const int outputs = p.tile.positions * p.tile.phases * p.tile.units * kChannels;
    for (int index = threadIdx.x; index < outputs; index += blockDim.x) {
      int r = index, g;
      const int m = p.by_phases(r);
      const GatherPosition at(p, block, m % p.tile.positions);
      const int channel = output_channel<Traits>(p, block, m / p.tile.positions, g);
      int begin, end;
      const int64_t offset = at.outputs(p, block, begin, end) + static_cast<int64_t>(r) * p.output_phase;
      if (r < begin || r >= end || channel >= p.out_channels) continue;
      const int64_t global_channel = static_cast<int64_t>(block.group + g) * p.out_channels + channel;
      const Acc sum =
          sum_by_definition(at, block.phase + r, static_cast<int64_t>(block.group + g) * p.in_channels, channel, taps);
      T* const at_output = static_cast<T*>(p.output) + global_channel * p.output_stride.channel + offset;
      *at_output = epilogue(sum, epilogue.channel_term(bias_channel(global_channel)));
      if (p.activation != Activation::kNone) {
        activate_outputs(at_output, 0, 1, p.activation, static_cast<Acc>(p.alpha));
      }
    }
  }

  // In float64: the sum has no runs.
  __device__ Acc sum_by_definition(const GatherPosition& at, int phase, int64_t first_channel, int channel,
                                   int taps) const {
    double sum = 0;
    VirtualChannel place(block);
#pragma unroll 1
    for (int v = 0; v < taps * p.in_channels; ++v, place.advance(p, block, 1)) {
      const int y = block.outer[1].input + at.height - place.height_tap * p.axis[1].offset_step();
      const int z = block.outer[0].input + at.depth - place.depth_tap * p.axis[0].offset_step();
      if (y < 0 || y >= p.axis[1].in || z < 0 || z >= p.axis[0].in) continue;
      const int64_t height_tap = block.outer[1].first_tap + place.height_tap * p.axis[1].tap_step();
      const int64_t depth_tap = block.outer[0].first_tap + place.depth_tap * p.axis[0].tap_step();
      const T* const w = static_cast<const T*>(p.weight) + (first_channel + place.channel) * p.weight_channel +
                         channel * p.weight_filter + (depth_tap * p.axis[1].kernel + height_tap) * p.axis[2].kernel;
      const T* const x = static_cast<const T*>(p.input) + at.batch * p.input_stride.batch +
                         (first_channel + place.channel) * p.input_stride.channel + z * p.input_stride.axis[0] +
                         y * p.input_stride.axis[1];
#pragma unroll 1
      for (int e = block.entry_begin; e < block.entry_end; ++e) {
        const int tap = entry_tap(p, phase, entry_offset(p, e));
        const int64_t i = block.base + at.column - entry_offset(p, e);
        if (tap < 0 || i < 0 || i >= p.axis[2].in) continue;
        sum = fma(double{to_accumulator(x[i * p.input_stride.axis[2]])}, double{to_accumulator(w[tap])}, sum);
      }
    }
    return static_cast<Acc>(sum);
  }
};

template <class Traits>
__global__ void __launch_bounds__(kMaxGatherThreads, Traits::kMinBlocks)
    gather_kernel(const __grid_constant__ GatherParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  __shared__ GatherBlock block;
  for (int64_t index = blockIdx.x; index < p.num_blocks; index += gridDim.x) {
    if (threadIdx.x % 32 == 0) {
      for (int a = threadIdx.x / 32; a < 3; a += blockDim.x / 32) prepare_block(p, index, a, block);
    }
    __syncthreads();
    GatherKernel<Traits>(p, block, reinterpret_cast<typename Traits::Acc*>(dynamic_shared)).run();
    __syncthreads();
  }
}

}  // namespace fastconvt::cuda
