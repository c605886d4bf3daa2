// Transposed convolution of one or two spatial axes with few channels a group, in channels_last, row by row, in true
// float32: kernel, stride and dilation of the last axis are compiled in, everything else is not.
#pragma once

#include "rows_constants.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <class Traits>
class RowsKernel {
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kChunks = Traits::kChunks;
  static constexpr int kEntries = Traits::kMaxEntry + 1;
  static constexpr int kWarpColumns = kChunks * Traits::kColumnStep;

  const RowsParams& p;
  const RowsBlock b;
  const RowTaps taps;
  const RowsColumns columns;
  // Shared memory: constant outputs on their way; then what is staged.
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
        taps(RowTaps::make(p, b.row)),
        columns(RowsColumns::make<Traits>(p, b)),
        constants(shared),
        weights(shared + Traits::kConstants),
        inputs(weights + p.tap_chunk * p.weight_slot),
        stream_policy(evict_first_policy()),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {
    RowsBlock::place(p, lane % 4, group, quad);
    RowsBlock::place(p, warp, tail_group, tail_quad);
    column = warp * kWarpColumns + lane / 4;
    active = b.channel_exists(p, group, quad, 0);
  }

  __device__ void run() {
    const int channels = min(p.channel_chunk, b.channels);
    stage(0, min(p.tap_chunk, taps.count), 0, channels);
    prefetch_inputs();
    const RowsConstants<Traits> constant_rows{p, b, constants, stream_policy};
    constant_rows.fill();
    fence_shared_writes();
    wait_for_copies();
    __syncthreads();
    constant_rows.store();  // before the data: the memory has work while the block computes
    start_accumulators();
    if constexpr (Traits::kWhole) {
      if (active) accumulate(taps.count, channels);
    } else {
      accumulate_chunks();
    }
    const bool suspect = __any_sync(~0u, is_suspect());
    p.rectify(acc);
    store();
    if (suspect) store_edges_by_definition();
    wait_for_bulk_reads();
  }

 private:
  __device__ int first_output() const { return b.base * kStride - p.padding; }  // of column 0, phase 0
  __device__ float bias(int group, int quad, int c) const { return b.bias(p, group, quad, c); }

  __device__ void stage(int tap, int count, int channel, int channels) const {
    const RowsWeightStager<Traits> filters(p, b);
    int row = taps.input_row - tap * p.row_dilation, kernel_row = taps.first + tap * p.by_row_phase.divisor;
    float *input = inputs, *weight = weights;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const float* const source = p.input + b.batch * p.input_stride.batch + row * p.input_stride.axis[1] +
                                  static_cast<int64_t>(b.group) * p.in_channels + channel;
      stage_pixels<Traits>(p, columns, channels, source, input, stream_policy);
      filters.stage(p, kernel_row, channel, channels, weight);
      row -= p.row_dilation, kernel_row += p.by_row_phase.divisor;
      input += Traits::kInputSlot, weight += p.weight_slot;
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
          if (Traits::has_taps(r)) asm volatile("" : "+f"(acc[c][i][r]));
        }
  }

  // Adds the products of what is staged.
  __device__ __forceinline__ void accumulate(int count, int channels) {
    const int own = p.block_groups == 1 ? channels : p.in_channels;  // of the thread's group
    const int step = p.block_quads * Traits::kQuadPitch;
    const float* x = inputs + (column + b.base - columns.first) * Traits::kPixelPitch + group * p.in_channels;
    const float* w = weights + (group * p.in_channels * p.block_quads + quad) * Traits::kQuadPitch;
    const int x_skip = Traits::kInputSlot - own, w_skip = p.weight_slot - own * step;
#pragma unroll 1
    for (int j = 0; j < count; ++j, x += x_skip, w += w_skip) {
#pragma unroll 2
      for (int c = 0; c < own; ++c, ++x, w += step) multiply_row(x, w);
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
      for (int e = 0; e < kEntries; ++e) xs[e][i] = x[(i * Traits::kColumnStep - e) * Traits::kPixelPitch];
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

  // The thread's output beyond kColumns: channel lane % 4 of the warp's quad, output lane / 4.
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
    const float* x = inputs + row + at * Traits::kPixelPitch;
    const float* w = weights + row * step + tail_quad * Traits::kQuadPitch + 4 * first + lane % 4;
#pragma unroll 1
    for (int j = 0; j < count; ++j, x += Traits::kInputSlot, w += p.weight_slot) {
#pragma unroll 1
      for (int c = 0; c < channels; ++c) {
#pragma unroll
        for (int i = 0; i < Traits::kMaxTaps; ++i) {
          if (!tail_tap[i]) continue;
          tail_acc = fmaf(w[c * step + 4 * Traits::kTapStep * i], x[c - Traits::kEntryStep * Traits::kPixelPitch * i],
                          tail_acc);
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
    float sum = bias(group, (channel - 4 * b.quad) / 4, channel % 4);
#pragma unroll 1
    for (int c = 0; c < p.in_channels; ++c) {
#pragma unroll 1
      for (int tap = 0; tap < taps.count; ++tap) {
        const float* const x = p.input + b.batch * p.input_stride.batch + input_channel + c +
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
    return p.rectify(sum);
  }

  // Over what the warp has stored: the lanes of a quad share its pixels.
  __device__ void store_edges_by_definition() const {
    __syncwarp();
    const int first = max(0, first_output() + warp * kWarpColumns * kStride);
    const int end = min(p.out_width, first_output() + min(b.columns, (warp + 1) * kWarpColumns) * kStride);
#pragma unroll 1
    for (int c = 0; c < 4 && b.channel_exists(p, group, quad, c); ++c) {
      float* const output = b.row_of(p, b.first_channel(p, group, quad) + c);
#pragma unroll 1
      for (int at = first + lane / 4; at < end; at += 8) {
        if (!reads_outside((at - first_output()) / kStride)) continue;
        output[at * p.output_stride.axis[2]] = by_definition(group, 4 * (b.quad + quad) + c, at);
      }
    }
  }

  // Four lanes store 16 neighbouring channels of a pixel.
  __device__ void store() {
    const int64_t pixel = p.output_stride.axis[2];
    if (active) {
      const int channels = min(4, p.out_channels - 4 * (b.quad + quad));
      float* const output = b.row_of(p, b.first_channel(p, group, quad));
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
      b.row_of(p, b.first_channel(p, tail_group, tail_quad) + lane % 4)[at * pixel] = p.rectify(tail_acc);
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
