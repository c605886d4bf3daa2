// Transposed convolution of one or two spatial axes with few channels a group, row by row, in true float32: kernel,
// stride and dilation of the last axis are compiled in, everything else is not.
#pragma once

#include "rows_feed.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// By the computing warps of a team: all weights, and the input rows of the first data row.
template <class Traits>
__device__ inline void stage_first_row(const RowsParams& p, const RowsBlock& b, RowsShared<Traits>& shared) {
  const RowsColumns columns = RowsColumns::make<Traits>(p, b);
  const uint64_t policy = evict_first_policy();
  const int warp = threadIdx.x / 32 % kRowsWarps;
  for (int t = 0; t < p.kernel_height; ++t) {
    stage_weights<Traits>(p, b, t, 0, b.channels, shared.weights + t * p.weight_slot);
  }
  const int top = RowsTaps::make(p, b.row).top;
  for (int row = max(0, top - p.row_reach); row <= min(top, p.in_height - 1); ++row) {
    int slot = row;
    p.by_ring(slot);
    stage_input<Traits>(p, b, columns, row, 0, b.channels, shared.inputs(p) + slot * p.input_slot, warp, kRowsWarps,
                        policy);
  }
}

// A computing warp.
template <class Traits>
class RowsKernel {
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kChunks = Traits::kChunks;
  static constexpr int kEntries = Traits::kMaxEntry + 1;

  const RowsParams& p;
  const RowsBlock& b;
  RowsShared<Traits>& shared;
  const uint64_t stream_policy;
  const int lane, warp;
  int group, quad;  // of this thread, within the block
  int column;       // first of the thread's columns; the others follow kColumnStep apart
  bool active;      // the thread's channels exist
  const float* inputs;   // where the thread's are in ring slot 0
  const float* weights;  // where the thread's are in slot 0
  // Of a warp's row of outputs beyond kColumns, a thread makes one.
  int tail_group, tail_quad;
  bool tail_tap[Traits::kMaxTaps];  // of the thread's tail output, whether it exists
  float tail_acc;
  float acc[4][kChunks][kStride];

 public:
  __device__ RowsKernel(const RowsParams& p, RowsShared<Traits>& shared)
      : p(p),
        b(shared.block),
        shared(shared),
        stream_policy(evict_first_policy()),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % kRowsWarps) {
    RowsBlock::place(p, Traits::kChannelsLast ? lane % 4 : warp, group, quad);
    RowsBlock::place(p, warp, tail_group, tail_quad);
    column = Traits::kChannelsLast ? warp * kChunks * 8 + lane / 4 : lane;
    active = b.channel_exists(p, group, quad, 0);
    if (Traits::kChannelsLast && !active) group = quad = 0;  // computes what it does not store
    // Several groups are staged whole; one group may come in chunks, and is at 0.
    const RowsColumns columns = RowsColumns::make<Traits>(p, b);
    inputs = shared.inputs(p) + (column + b.base - columns.first) * Traits::kColumnPitch +
             group * p.in_channels * Traits::kChannelStep;
    weights = shared.weights + (group * p.in_channels * p.block_quads + quad) * Traits::kQuadPitch;
    if (b.tail > 0) find_tail_taps();
  }

  __device__ void run() {
#pragma unroll 1
    for (int row = 0; row < b.rows; ++row) {
      wait_at(&shared.fed[row & 1], row >> 1 & 1);
      start_accumulators();
      const RowsStep step = shared.steps[row];
      if constexpr (Traits::kResident) {
        if (Traits::kChannelsLast || active) accumulate_ring(step);
        if (b.tail > 0) accumulate_ring_tail(step);
      } else {
        accumulate_chunks(step);
      }
      __syncwarp();
      if (lane == 0) arrive_at(&shared.used[row & 1]);
      const bool suspect = __any_sync(~0u, is_suspect());
      if constexpr (Traits::kChannelsLast) {
        store_pixels(row);
      } else {
        store_rows(row);
      }
      if (suspect) store_edges_by_definition(row);
    }
    wait_for_bulk_reads();
  }

 private:
  __device__ int first_output() const { return b.base * kStride - p.padding; }  // of column 0, phase 0

  __device__ void start_accumulators() {
    const float4 start = reinterpret_cast<const float4*>(shared.bias)[Traits::kChannelsLast ? lane % 4 : warp];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
      for (int r = 0; r < kStride; ++r) {
        acc[0][i][r] = start.x, acc[1][i][r] = start.y, acc[2][i][r] = start.z, acc[3][i][r] = start.w;
      }
    tail_acc = shared.bias[4 * warp + lane % 4];
  }

  // Taps from the ring: the j-th reads the input row row_dilation * j before the first one's.
  __device__ void accumulate_ring(const RowsStep& step) {
    const int count = p.block_groups == 1 ? b.channels : p.in_channels;  // of a group
    const float* x = inputs + step.input;
    const float* w = weights + step.weight;
    int wrap = step.input;
#pragma unroll 1
    for (int j = 0; j < step.taps; ++j) {
      accumulate(x, w, count);
      wrap -= p.ring_step;
      x -= p.ring_step;
      if (wrap < 0) wrap += p.ring_size, x += p.ring_size;
      w += p.weight_step;
    }
  }
  __device__ void accumulate_ring_tail(const RowsStep& step) {
    int input = step.input, weight = step.weight;
    for (int j = 0; j < step.taps; ++j) {
      accumulate_tail(input, weight, p.block_groups == 1 ? b.channels : p.in_channels);
      input -= p.ring_step;
      if (input < 0) input += p.ring_size;
      weight += p.weight_step;
    }
  }

  __device__ void accumulate_chunks(const RowsStep& step) {
    const RowsColumns columns = RowsColumns::make<Traits>(p, b);
    for (int channel = 0; channel < b.channels; channel += p.channel_chunk) {
      const int channels = min(p.channel_chunk, b.channels - channel);
      for (int tap = 0; tap < step.taps; tap += p.ring) {
        const int count = min(p.ring, step.taps - tap);
        for (int j = 0; j < count; ++j) {
          const int row = step.input_row - (tap + j) * p.row_dilation;
          const int kernel_row = step.first + (tap + j) * p.by_row_phase.divisor;
          stage_input<Traits>(p, b, columns, row, channel, channels, shared.inputs(p) + j * p.input_slot, warp,
                              kRowsWarps, stream_policy);
          stage_weights<Traits>(p, b, kernel_row, channel, channels, shared.weights + j * p.weight_slot);
        }
        wait_for_copies();
        sync_computing_warps();
        for (int j = 0; j < count; ++j) {
          const int own = p.block_groups == 1 ? channels : p.in_channels;
          if (Traits::kChannelsLast || active) accumulate(inputs + j * p.input_slot, weights + j * p.weight_slot, own);
          if (b.tail > 0) accumulate_tail(j * p.input_slot, j * p.weight_slot, own);
        }
        sync_computing_warps();
      }
    }
  }
  __device__ static void sync_computing_warps() {
    sync_named(1 + Traits::kTeams + threadIdx.x / kRowsTeamThreads, kRowsTeamThreads);
  }

  // Adds the products of one tap of the height.
  __device__ __forceinline__ void accumulate(const float* x, const float* w, int channels) {
    const int step = p.block_quads * Traits::kQuadPitch;
#pragma unroll 2
    for (int c = 0; c < channels; ++c, x += Traits::kChannelStep, w += step) multiply_row(x, w);
  }

  __device__ __forceinline__ void multiply_row(const float* x, const float* w) {
    float4 ws[kKernel];
    float xs[kEntries][kChunks];
#pragma unroll
    for (int t = 0; t < kKernel; ++t) ws[t] = reinterpret_cast<const float4*>(w)[t];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
      for (int e = 0; e < kEntries; ++e) xs[e][i] = x[(i * Traits::kColumnStep - e) * Traits::kColumnPitch];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int t = 0; t < kKernel; ++t) {
        const float value = xs[Traits::entry(t)][i];
        const int r = Traits::phase(t);
        acc[0][i][r] = fmaf(ws[t].x, value, acc[0][i][r]);
        acc[1][i][r] = fmaf(ws[t].y, value, acc[1][i][r]);
        acc[2][i][r] = fmaf(ws[t].z, value, acc[2][i][r]);
        acc[3][i][r] = fmaf(ws[t].w, value, acc[3][i][r]);
      }
    }
  }

  // The thread's output beyond kColumns: channel threadIdx.x % 4 of the warp's quad, output threadIdx.x % 32 / 4.
  __device__ static int tail_output() { return threadIdx.x % 32 / 4; }
  __device__ static int tail_first_tap() {
    const int r = tail_output() % kStride;
    int first = kKernel;
#pragma unroll
    for (int t = Traits::kTapStep - 1; t >= 0; --t) {
      if (t < kKernel && Traits::phase(t) == r) first = t;
    }
    return first;
  }
  __device__ static int tail_entry(int t) { return t * Traits::kDilation / kStride; }

  __device__ void find_tail_taps() {
    const int t = tail_first_tap(), q = b.base + Traits::kColumns + tail_output() / kStride;
#pragma unroll
    for (int i = 0; i < Traits::kMaxTaps; ++i) {
      const int x = q - tail_entry(t) - i * Traits::kEntryStep;
      tail_tap[i] = tail_exists() && t + i * Traits::kTapStep < kKernel && x >= 0 && x < p.in_width;
    }
  }
  __device__ bool tail_exists() const {
    return tail_output() / kStride < b.tail && b.channel_exists(p, tail_group, tail_quad, lane % 4);
  }

  __device__ void accumulate_tail(int input, int weight, int channels) {
    const RowsColumns columns = RowsColumns::make<Traits>(p, b);
    const int first = tail_first_tap(), step = p.block_quads * Traits::kQuadPitch;
    const int at = Traits::kColumns + tail_output() / kStride + b.base - columns.first - tail_entry(first);
    const float* x = shared.inputs(p) + input + tail_group * p.in_channels * Traits::kChannelStep +
                     at * Traits::kColumnPitch;
    const float* w = shared.weights + weight + tail_group * p.in_channels * step + tail_quad * Traits::kQuadPitch +
                     4 * first + lane % 4;
#pragma unroll 1
    for (int c = 0; c < channels; ++c, x += Traits::kChannelStep, w += step) {
#pragma unroll
      for (int i = 0; i < Traits::kMaxTaps; ++i) {
        if (!tail_tap[i]) continue;
        tail_acc = fmaf(w[4 * Traits::kTapStep * i], x[-Traits::kEntryStep * Traits::kColumnPitch * i], tail_acc);
      }
    }
  }

  // Inputs outside the tensor were staged as zeros, which only finite weights leave without effect (0 * inf is NaN): an
  // output that read one and is not finite has to be made again, by the definition.
  __device__ bool reads_outside(int column) const {
    return b.base + column < Traits::kMaxEntry || b.base + column >= p.in_width;
  }
  __device__ float probe(int i) const {
    const int j = column + i * Traits::kColumnStep;
    float sum = 0;
    if (j < b.columns && reads_outside(j)) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int r = 0; r < kStride; ++r) sum = fmaf(acc[c][i][r], 0.0f, sum);
    }
    return sum;
  }
  __device__ bool is_suspect() const {
    float sum = 0;
    if (b.base + b.columns > p.in_width) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) sum += probe(i);
    } else if (b.base < Traits::kMaxEntry) {
      sum = probe(0);
    }
    return active && sum != 0.0f;
  }

  // Channel of a group, output of the row.
  __device__ float by_definition(const RowsTaps& taps, int group, int channel, int output) const {
    const int64_t input_channel = static_cast<int64_t>(b.group + group) * p.in_channels;
    float sum = p.bias == nullptr ? 0 : p.bias[static_cast<int64_t>(b.group + group) * p.out_channels + channel];
#pragma unroll 1
    for (int c = 0; c < p.in_channels; ++c) {
#pragma unroll 1
      for (int tap = 0; tap < taps.count; ++tap) {
        const float* const x = p.input + b.batch * p.input_stride.batch +
                               (input_channel + c) * p.input_stride.channel +
                               (taps.input_row - tap * p.row_dilation) * p.input_stride.axis[1];
        const float* const w = p.weight + (input_channel + c) * p.weight_channel +
                               static_cast<int64_t>(channel) * p.weight_filter +
                               (taps.first + tap * p.by_row_phase.divisor) * kKernel;
#pragma unroll 1
        for (int t = 0; t < kKernel; ++t) {
          const int at = output + p.padding - t * Traits::kDilation, i = at / kStride;
          if (at >= 0 && at % kStride == 0 && i < p.in_width) sum = fmaf(w[t], x[i * p.input_stride.axis[2]], sum);
        }
      }
    }
    return sum;
  }

  // Over what the warp has stored.
  __device__ void store_edges_by_definition(int row) const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    const RowsTaps taps = RowsTaps::make(p, b.row + row);
    const int first = Traits::kChannelsLast ? warp * kChunks * 8 : 0;  // columns
    const int end = min(b.columns, Traits::kChannelsLast ? first + kChunks * 8 : Traits::kColumns);
    for (int c = 0; c < 4; ++c) {
      if (!b.channel_exists(p, group, quad, c)) break;
      float* const output = b.row_of(p, b.first_channel(p, group, quad) + c, taps.output_row);
      const int last = min(p.out_width, first_output() + end * kStride);
      // Channels_last: lanes of one quad share its columns.
#pragma unroll 1
      for (int at = max(0, first_output() + first * kStride) + (Traits::kChannelsLast ? lane / 4 : lane); at < last;
           at += Traits::kChannelsLast ? 8 : 32) {
        if (!reads_outside((at - first_output()) / kStride)) continue;
        output[at * p.output_stride.axis[2]] = by_definition(taps, group, 4 * (b.quad + quad) + c, at);
      }
    }
  }

  // A warp a quad: its rows go through shared memory, each in one bulk store. Lane c of the first four stores channel c.
  __device__ void store_rows(int data_row) {
    if (!active) return;
    const RowsRun run = shared.runs[data_row & 3][4 * warp + lane % 4];
    const int from = offset_in(run.to, kVector), around = from << 16 | run.before << 8 | run.after;
    const bool ends = __any_sync(~0u, run.low > 0 || run.high < run.stored);
    float* const buffers = shared.outputs(p, warp);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      constexpr int kBuffers = Traits::kOutputBuffers;
      float* const row = buffers + c % kBuffers * Traits::kOutputPitch;
      if (lane == (kBuffers == 4 ? c : c ^ 2)) wait_for_bulk_reads();  // it stored from this buffer
      float* const data = row + __shfl_sync(~0u, run.data, c) + lane * kStride;
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int r = 0; r < kStride; ++r) data[i * Traits::kColumnStep * kStride + r] = acc[c][i][r];
      if (b.tail > 0 && lane % 4 == c && tail_output() / kStride < b.tail) {
        row[run.data + Traits::kColumns * kStride + tail_output()] = tail_acc;
      }
      const int of_c = __shfl_sync(~0u, around, c), end = __shfl_sync(~0u, from + run.stored, c);
      __syncwarp();
      if (of_c & 0xffff) {
        const float constant = shared.bias[4 * warp + c];
        if (lane < (of_c >> 8 & 255)) row[(of_c >> 16) + lane] = constant;
        if (lane < (of_c & 255)) row[end - 1 - lane] = constant;
      }
      fence_before_bulk();
      __syncwarp();
      if (lane == c && run.low < run.high) {
        bulk_store(run.to + run.low, row + from + run.low, run.high - run.low, stream_policy);
        commit_bulk();
      }
      if (ends && lane % 4 == c) {
        for (int i = lane / 4; i < run.low; i += 8) run.to[i] = row[from + i];
        for (int i = run.high + lane / 4; i < run.stored; i += 8) run.to[i] = row[from + i];
      }
    }
  }

  // Channels_last: four lanes store 16 neighbouring channels of a pixel.
  __device__ void store_pixels(int row) {
    const int64_t pixel = p.output_stride.axis[2];
    const int output_row = p.first_row + (b.row + row) * p.row_step;
    if (active) {
      const int channels = min(4, p.out_channels - 4 * (b.quad + quad));
      float* const output = b.row_of(p, b.first_channel(p, group, quad), output_row);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int j = column + i * Traits::kColumnStep;
#pragma unroll
        for (int r = 0; r < kStride; ++r) {
          const int at = first_output() + j * kStride + r;
          if (j >= b.columns || at < 0 || at >= p.out_width) continue;
          const float4 values{acc[0][i][r], acc[1][i][r], acc[2][i][r], acc[3][i][r]};
          float* const to = output + at * pixel;
          if (p.vector_output) {
            __stcs(reinterpret_cast<float4*>(to), values);
          } else {
            to[0] = values.x;
            if (channels > 1) to[1] = values.y;
            if (channels > 2) to[2] = values.z;
            if (channels > 3) to[3] = values.w;
          }
        }
      }
    }
    const int at = first_output() + Traits::kColumns * kStride + tail_output();
    if (b.tail > 0 && tail_exists() && at < p.out_width) {
      b.row_of(p, b.first_channel(p, tail_group, tail_quad) + lane % 4, output_row)[at * pixel] = tail_acc;
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) rows_kernel(const __grid_constant__ RowsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  if (threadIdx.x >= Traits::kTeams * kRowsTeamThreads) {
    set_fewer_registers<Traits::kFeedRegisters>();
    const int in_block = threadIdx.x / 32 % kRowsWarps, team = blockIdx.x * Traits::kTeams + in_block;
    if (in_block >= Traits::kTeams || team >= p.teams) return;
    auto& shared = *reinterpret_cast<RowsShared<Traits>*>(dynamic_shared + in_block * p.team_bytes);
    if (threadIdx.x % 32 == 0) shared.block = RowsBlock::make<Traits>(p, team);
    __syncwarp();
    RowsFeeder<Traits> feeder(p, shared);
    feeder.prepare();
    sync_named(1 + in_block, kRowsTeamThreads + 32);
    feeder.run();
  } else {
    set_more_registers<Traits::kComputeRegisters>();
    const int in_block = threadIdx.x / kRowsTeamThreads, team = blockIdx.x * Traits::kTeams + in_block;
    if (team >= p.teams) return;
    auto& shared = *reinterpret_cast<RowsShared<Traits>*>(dynamic_shared + in_block * p.team_bytes);
    if constexpr (Traits::kResident) stage_first_row<Traits>(p, RowsBlock::make<Traits>(p, team), shared);
    wait_for_copies();
    sync_named(1 + in_block, kRowsTeamThreads + 32);
    RowsKernel<Traits>(p, shared).run();
  }
#endif
}

}  // namespace fastconvt::cuda
