// Transposed convolution of one or two spatial axes with few channels a group, row by row, in true float32: kernel,
// stride and dilation of the last axis are compiled in, everything else is not.
#pragma once

#include "rows_store.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <class Traits>
class RowsKernel {
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kChunks = Traits::kChunks;
  static constexpr int kEntries = Traits::kMaxEntry + 1;

  const RowsParams& p;
  const RowsBlock b;
  const RowsTaps taps;
  const RowsColumns columns;
  // Shared memory: constant outputs on their way; then what is staged, and later the outputs.
  float* const constants;
  float* const weights;
  float* const inputs;
  const uint64_t stream_policy;
  const int lane, warp;
  int group, quad;  // of this thread, within the block
  int column;       // first of the thread's columns; the others follow kColumnStep apart
  bool active;      // the thread's channels exist
  // Of a warp's row of outputs beyond kColumns, a thread makes one.
  int tail_group, tail_quad;
  bool tail_tap[Traits::kMaxTaps];  // of the thread's tail output, whether it exists
  float tail_acc;
  float acc[4][kChunks][kStride];

 public:
  __device__ RowsKernel(const RowsParams& p, float* shared)
      : p(p),
        b(RowsBlock::make<Traits>(p, blockIdx.x)),
        taps(RowsTaps::make(p, b.row)),
        columns(RowsColumns::make<Traits>(p, b)),
        constants(shared),
        weights(shared + Traits::kConstants),
        inputs(weights + p.tap_chunk * p.weight_slot),
        stream_policy(evict_first_policy()),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {
    RowsBlock::place(p, Traits::kChannelsLast ? lane % 4 : warp, group, quad);
    RowsBlock::place(p, warp, tail_group, tail_quad);
    column = Traits::kChannelsLast ? warp * kChunks * 8 + lane / 4 : lane;
    active = b.channel_exists(p, group, quad, 0);
  }

  __device__ void run() {
    int channels = min(p.channel_chunk, b.channels), count = min(p.tap_chunk, taps.count);
    stage(0, count, 0, channels);
    prefetch_inputs();
    fill_constants();
    fence_before_bulk();
    wait_for_copies();
    __syncthreads();
    store_constant_rows();  // before the data: the memory has work while the block computes
    start_accumulators();
    if constexpr (Traits::kWhole) {
      if (active) accumulate(taps.count, channels);
    } else {
      accumulate_chunks();
    }
    __syncthreads();
    const bool suspect = __any_sync(~0u, is_suspect());
    if constexpr (Traits::kChannelsLast) {
      store_pixels();
    } else {
      store_rows();
    }
    if (suspect) store_edges_by_definition();
    wait_for_bulk_reads();
  }

 private:
  __device__ int first_output() const { return b.base * kStride - p.padding; }  // of column 0, phase 0
  __device__ float bias(int group, int quad, int c) const {
    return p.bias != nullptr && b.channel_exists(p, group, quad, c) ? __ldg(p.bias + b.first_channel(p, group, quad) + c)
                                                                    : 0.0f;
  }

  __device__ void stage(int tap, int count, int channel, int channels) const {
    const RowsStager<Traits> rows(p, b);
    const RowsWeightStager<Traits> filters(p, b);
    int row = taps.input_row - tap * p.row_dilation, kernel_row = taps.first + tap * p.by_row_phase.divisor;
    float *input = inputs, *weight = weights;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      if constexpr (Traits::kChannelsLast) {
        const float* const source = p.input + b.batch * p.input_stride.batch + row * p.input_stride.axis[1] +
                                    static_cast<int64_t>(b.group) * p.in_channels + channel;
        stage_pixels<Traits>(p, columns, channels, source, input, stream_policy);
      } else {
        rows.stage(p, row, channel, channels, input, stream_policy);
      }
      filters.stage(p, kernel_row, channel, channels, weight);
      row -= p.row_dilation, kernel_row += p.by_row_phase.divisor;
      input += p.input_slot, weight += p.weight_slot;
    }
  }

  // The first 64 blocks of a burst fetch what the next burst reads: blocks read the input in the order of memory.
  __device__ void prefetch_inputs() const {
    constexpr int kFetchers = 64;
    if (p.burst_blocks == 0 || warp != kRowsWarps - 1) return;
    int index = blockIdx.x;
    const int burst = p.by_burst(index);
    if (index >= kFetchers) return;
    const uint64_t policy = evict_last_policy();
    const int share = (p.burst_bytes / (kFetchers * 32) + 16) & -16;
    const int64_t first = -reinterpret_cast<int64_t>(p.input) & 15;
    for (int next = burst == 0 ? 0 : burst + 1; next <= burst + 1; ++next) {
      const int64_t at = first + static_cast<int64_t>(next) * p.burst_bytes + (index * 32 + lane) * share;
      const int64_t bytes = min(static_cast<int64_t>(share), p.input_bytes - at) & -16;
      if (bytes > 0) prefetch_bulk(reinterpret_cast<const char*>(p.input) + at, static_cast<int>(bytes), policy);
    }
  }

  // Zeros, or the pattern of a pixel.
  __device__ void fill_constants() const {
    if (p.row_step == 1 || p.constant_pitch == 0) return;
    if (p.bias == nullptr) {
      for (int i = threadIdx.x; i < Traits::kConstants / 4; i += kRowsThreads) {
        reinterpret_cast<float4*>(constants)[i] = float4{0, 0, 0, 0};
      }
    } else {
      for (int i = threadIdx.x; i < p.constant_pitch; i += kRowsThreads) {
        constants[i] = p.bias[i % static_cast<int>(p.output_stride.axis[2])];
      }
    }
  }

  // The constants around the data row. In contiguous tensors, lane l cares for channel l % 4.
  __device__ void store_constant_rows() const {
    if (p.row_step == 1) return;
    const bool first = b.row == 0, last = b.row == p.rows - 1;
    if constexpr (Traits::kChannelsLast) {
      float* const output = b.row_of(p, 0, taps.output_row);
      if (first && p.leading > 0) store_constant_pixels(output - p.leading * p.output_stride.axis[2], p.leading);
      store_constant_pixels(output + p.output_stride.axis[1], last ? p.trailing : p.gap);
    } else if (active) {
      float* const output = b.row_of(p, b.first_channel(p, group, quad) + lane % 4, taps.output_row);
      if (first && p.leading > 0) {
        store_constants(output - p.leading, p.leading - min(p.leading_lines, offset_in(output, kLine)));
      }
      float* const end = output + p.out_width;
      const int after = last ? p.trailing : p.gap;
      const int own = min(last ? p.trailing_lines : p.gap_lines, missing_in(end, kLine));
      const int next = last || p.gap_lines == 0 ? 0 : offset_in(end + after, kLine);
      store_constants(end + own, after - own - next);
    }
    commit_bulk();
  }

  __device__ void store_constants(float* output, int count) const {
    const int channels = min(4, p.out_channels - 4 * (b.quad + quad));
    const RowsConstants share(p, b, output, count);
    if (p.constant_pitch > 0) {
      if (lane % 4 < channels) share.store(constants, p.constant_pitch, lane / 4, stream_policy);
      return;
    }
    const float constant = bias(group, quad, lane % 4);
#pragma unroll 1
    for (int c = 0; c < channels; ++c) {
      const float value = __shfl_sync(~0u, constant, c);
      const int end = __shfl_sync(~0u, share.count, c);
      float* const to = reinterpret_cast<float*>(__shfl_sync(~0u, reinterpret_cast<int64_t>(share.output), c));
      if (end <= 0) continue;
      store_run<32>(
          to, end, lane,
          [&](int low, int high) {
            for (int at = low + 4 * lane; at < high; at += 128) {
              __stcs(reinterpret_cast<float4*>(to + at), float4{value, value, value, value});
            }
          },
          [&](int at) { to[at] = value; });
    }
  }

  // Channels_last: constant rows are whole pixels, shared by the blocks of a data row.
  __device__ void store_constant_pixels(float* output, int pixels) const {
    if (pixels == 0) return;
    const int64_t channels = p.output_stride.axis[2];
    const int blocks = p.segments * p.channel_blocks, block = b.segment * p.channel_blocks + b.channel_block;
    const int share = (pixels + blocks - 1) / blocks;
    const int64_t begin = min(int64_t{pixels}, int64_t{share} * block);
    const int64_t count = (min(int64_t{pixels}, begin + share) - begin) * channels;
    output += begin * channels;
    if (p.constant_pitch == 0) {
      for (int64_t i = threadIdx.x; i < count; i += kRowsThreads) output[i] = p.bias == nullptr ? 0.0f : p.bias[i % channels];
      return;
    }
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * p.constant_pitch; i < count;
         i += kRowsThreads * p.constant_pitch) {
      const int64_t size = min(count - i, static_cast<int64_t>(p.constant_pitch));
      bulk_store(output + i, constants, static_cast<int>(size), stream_policy);
    }
  }

  __device__ void start_accumulators() {
    float start[4] = {0, 0, 0, 0};
    if (p.bias != nullptr) {
#pragma unroll
      for (int c = 0; c < 4; ++c) start[c] = bias(group, quad, c);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int r = 0; r < kStride; ++r) {
          acc[c][i][r] = start[c];
          // In a register from here on: the compiler would copy the start again on every way to the loop.
          asm volatile("" : "+f"(acc[c][i][r]));
        }
  }

  // Adds the products of what is staged. Rows are (tap, channel), those of the thread's group: one run of rows where the
  // block has one group, and inputs are contiguous.
  __device__ __forceinline__ void accumulate(int count, int channels) {
    const bool flat = Traits::kWhole && !Traits::kChannelsLast && p.block_groups == 1;
    const int own = p.block_groups == 1 ? channels : p.in_channels;
    const int outer = flat ? 1 : count, inner = flat ? count * channels : own;
    const int step = p.block_quads * Traits::kQuadPitch;
    const float* x = inputs + (column + b.base - columns.first) * Traits::kColumnPitch +
                     group * p.in_channels * Traits::kChannelStep;
    const float* w = weights + (group * p.in_channels * p.block_quads + quad) * Traits::kQuadPitch;
    const int x_skip = p.input_slot - inner * Traits::kChannelStep, w_skip = p.weight_slot - inner * step;
#pragma unroll 1
    for (int j = 0; j < outer; ++j, x += x_skip, w += w_skip) {
#pragma unroll 2
      for (int c = 0; c < inner; ++c, x += Traits::kChannelStep, w += step) multiply_row(x, w);
    }
  }

  // The first chunk is staged.
  __device__ void accumulate_chunks() {
    if (b.tail > 0) find_tail_taps();
    bool staged = true;
#pragma unroll 1
    for (int channel = 0; channel < b.channels; channel += p.channel_chunk) {
      const int channels = min(p.channel_chunk, b.channels - channel);
#pragma unroll 1
      for (int tap = 0; tap < taps.count; tap += p.tap_chunk) {
        const int count = min(p.tap_chunk, taps.count - tap);
        if (!staged) {
          __syncthreads();
          stage(tap, count, channel, channels);
          wait_for_copies();
          __syncthreads();
        }
        staged = false;
        if (active) accumulate(count, channels);
        if (b.tail > 0) accumulate_tail(count, p.block_groups == 1 ? channels : p.in_channels);
      }
    }
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
    tail_acc = bias(tail_group, tail_quad, lane % 4);
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

  __device__ void accumulate_tail(int count, int channels) {
    const int first = tail_first_tap(), step = p.block_quads * Traits::kQuadPitch;
    const int at = Traits::kColumns + tail_output() / kStride + b.base - columns.first - tail_entry(first);
    const int row = tail_group * p.in_channels;
    const float* x = inputs + row * Traits::kChannelStep + at * Traits::kColumnPitch;
    const float* w = weights + row * step + tail_quad * Traits::kQuadPitch + 4 * first + lane % 4;
#pragma unroll 1
    for (int j = 0; j < count; ++j, x += p.input_slot, w += p.weight_slot) {
#pragma unroll 1
      for (int c = 0; c < channels; ++c) {
#pragma unroll
        for (int i = 0; i < Traits::kMaxTaps; ++i) {
          if (!tail_tap[i]) continue;
          tail_acc = fmaf(w[c * step + 4 * Traits::kTapStep * i],
                          x[c * Traits::kChannelStep - Traits::kEntryStep * Traits::kColumnPitch * i], tail_acc);
        }
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
  __device__ float by_definition(int group, int channel, int output) const {
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
  __device__ void store_edges_by_definition() const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
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
        output[at * p.output_stride.axis[2]] = by_definition(group, 4 * (b.quad + quad) + c, at);
      }
    }
  }

  // A warp a quad: its rows go through shared memory, each in one bulk store. Lane l cares for channel l % 4.
  __device__ void store_rows() {
    if (!active) return;
    float* const output = b.row_of(p, b.first_channel(p, group, quad) + lane % 4, taps.output_row);
    RowsRun run = RowsRun::make<kStride>(p, b, b.row == 0, b.row == p.rows - 1, output);
    if (!b.channel_exists(p, group, quad, lane % 4)) run.stored = run.low = run.high = run.before = run.after = 0;
    const int from = offset_in(run.to, kLine);
    const bool ends = __any_sync(~0u, run.low > 0 || run.high < run.stored);
    float* const rows = weights + 4 * warp * Traits::kOutputPitch + Traits::kOutputSlack;
    float* const own = rows + lane % 4 * Traits::kOutputPitch + from;
    const float constant = bias(group, quad, lane % 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float* const data = rows + c * Traits::kOutputPitch + __shfl_sync(~0u, run.data, c) + lane * kStride;
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int r = 0; r < kStride; ++r) data[i * Traits::kColumnStep * kStride + r] = acc[c][i][r];
    }
    if (!Traits::kWhole && tail_output() / kStride < b.tail) {
      own[run.data - from + Traits::kColumns * kStride + tail_output()] = tail_acc;
    }
    __syncwarp();
    for (int i = lane / 4; i < run.before; i += 8) own[i] = constant;
    for (int i = lane / 4; i < run.after; i += 8) own[run.stored - 1 - i] = constant;
    fence_before_bulk();
    __syncwarp();
    if (lane < 4 && run.low < run.high) {
      bulk_store(run.to + run.low, own + run.low, run.high - run.low, stream_policy);
    }
    commit_bulk();
    if (ends) {
      for (int i = lane / 4; i < run.low; i += 8) run.to[i] = own[i];
      for (int i = run.high + lane / 4; i < run.stored; i += 8) run.to[i] = own[i];
    }
  }

  // Channels_last: four lanes store 16 neighbouring channels of a pixel.
  __device__ void store_pixels() {
    const int64_t pixel = p.output_stride.axis[2];
    const int output_row = taps.output_row;
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
    if (!Traits::kWhole && tail_exists() && at < p.out_width) {
      b.row_of(p, b.first_channel(p, tail_group, tail_quad) + lane % 4, output_row)[at * pixel] = tail_acc;
    }
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(kRowsThreads, 3) rows_kernel(const __grid_constant__ RowsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) float dynamic_shared[];
  RowsKernel<Traits>(p, dynamic_shared).run();
#endif
}

}  // namespace fastconvt::cuda
