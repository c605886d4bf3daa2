// Transposed convolution of one or two spatial axes with few channels a group in true float32: a block a row of
// outputs. Kernel, stride and dilation of the last axis are compiled in, everything else is not.
#pragma once

#include "row_tile_block.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What stays in shared memory while the registers are full of accumulators.
struct RowTileShared {
  RowTileBlock block;
  RowTileTaps taps;
  alignas(16) float bias[4 * kRowTileWarps];
};
static_assert(sizeof(RowTileShared) <= kRowTileHead);

// The channels of a warp.
struct RowTileQuad {
  int group, quad, channels;  // within the block; no channels: the warp has none

  __device__ static RowTileQuad make(const RowTileParams& p, const RowTileBlock& b) {
    RowTileQuad q;
    const int warp = threadIdx.x / 32;
    q.group = p.block_quads == 1 ? warp : p.block_quads == 2 ? warp / 2 : 0;
    q.quad = warp - q.group * p.block_quads;
    const bool exists = q.group < b.groups && q.quad < p.block_quads;
    q.channels = exists ? min(4, p.out_channels - 4 * (b.quad + q.quad)) : 0;
    return q;
  }
  __device__ int first_channel(const RowTileParams& p, const RowTileBlock& b) const {
    return (b.group + group) * p.out_channels + 4 * (b.quad + quad);
  }
  // First output of the data row in channel c of the warp.
  __device__ float* row(const RowTileParams& p, const RowTileBlock& b, int c) const {
    return p.output + b.batch * p.output_batch + static_cast<int64_t>(first_channel(p, b) + c) * p.output_channel +
           static_cast<int64_t>(p.first_row + b.row * p.row_step) * p.out_width;
  }
};

template <class Traits>
class RowTileKernel {
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kChunks = Traits::kChunks;

  const RowTileParams& p;
  RowTileShared& head;
  float* const shared;
  const int lane, warp;
  float tail;  // sum of an output beyond kRowColumns
  float acc[4][kChunks][kStride];

 public:
  __device__ RowTileKernel(const RowTileParams& p, unsigned char* shared)
      : p(p),
        head(*reinterpret_cast<RowTileShared*>(shared)),
        shared(reinterpret_cast<float*>(shared + kRowTileHead)),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32) {}

  __device__ void run() {
    int total, end;
    {
      const RowTileBlock b = RowTileBlock::make(p);
      const RowTileTaps taps = RowTileTaps::make(p, b.row);
      const RowTileQuad q = RowTileQuad::make(p, b);
      total = b.groups * p.in_channels * taps.count, end = min(p.chunk_rows, total);
      stage(b, taps, q, 0, end);
      prefetch_inputs(p, warp, lane);
      if (threadIdx.x == 0) head.block = b, head.taps = taps;
      fill_constants(b, q);
      wait_for_tile();
      store_constants(b, q);
    }
    clear_accumulators();
#pragma unroll 1
    for (int begin = 0;;) {
      accumulate(begin, end);
      begin += p.chunk_rows;
      if (begin >= total) break;
      end = min(begin + p.chunk_rows, total);
      __syncthreads();
      const RowTileBlock b = head.block;
      stage(b, head.taps, RowTileQuad::make(p, b), begin, end);
      wait_for_tile();
    }
    if (p.bias != nullptr) add_bias();
    if (lane < 8) wait_for_bulk_reads();  // of constants, where outputs are staged
    const bool suspect = __any_sync(~0u, is_suspect());
    __syncthreads();
    store_outputs(suspect);
  }

 private:
  __device__ float* tile() const { return shared + p.tile; }
  __device__ float* weights() const { return shared + warp * p.weight_slab; }
  __device__ float* constants(int c) const { return shared + p.constants + (4 * warp + c) * p.constant_step; }

  // Rows begin .. end - 1 of the block's pairs of channel and tap; the weights are the warp's own.
  __device__ void stage(const RowTileBlock& b, const RowTileTaps& taps, const RowTileQuad& q, int begin,
                        int end) const {
    stage_inputs<Traits>(p, b, taps, begin, end, tile(), evict_first_policy());
    if (q.channels == 0) return;
    const int own = p.block_groups == 1 ? end : p.in_channels * taps.count;
    const float* const source = p.weight +
                                static_cast<int64_t>((b.group + q.group) * p.in_channels) * p.weight_channel +
                                4 * (b.quad + q.quad) * p.weight_filter;
    stage_weights<Traits>(p, taps, begin, own, source, q.channels, weights());
  }
  __device__ static void wait_for_tile() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }

  // Buffers that constant rows are stored from: zeros for all channels, or each channel's bias.
  __device__ void fill_constants(const RowTileBlock& b, const RowTileQuad& q) const {
    const float bias = p.bias != nullptr && lane < q.channels ? __ldg(p.bias + q.first_channel(p, b) + lane) : 0.0f;
    if (lane < 4) head.bias[4 * warp + lane] = bias;
    if (p.constant_step == 0) {
      for (int i = 4 * threadIdx.x; i < p.constant_pitch; i += 4 * kRowTileThreads) {
        *reinterpret_cast<float4*>(constants(0) + i) = float4{0, 0, 0, 0};
      }
    } else {
#pragma unroll 1
      for (int c = 0; c < 4; ++c) {
        const float value = p.rectify(__shfl_sync(~0u, bias, c));
        for (int i = 4 * lane; i < p.constant_pitch; i += 128) {
          *reinterpret_cast<float4*>(constants(c) + i) = float4{value, value, value, value};
        }
      }
    }
    fence_shared_writes();
  }

  // The constant rows that follow the data row, and those that lead a plane, before its outputs: the memory has work
  // while the block computes. A lane a run.
  __device__ void store_constants(const RowTileBlock& b, const RowTileQuad& q) const {
    const int c = lane % 4;
    const bool leading = lane >= 4, first = b.row == 0, last = b.row == p.rows - 1;
    if (p.constant_pitch == 0 || c >= q.channels || lane >= (first && p.leading > 0 ? 8 : 4)) return;
    float* to = q.row(p, b, c);
    int count;
    if (leading) {
      count = p.leading - min(p.leading_lines, offset_in(to, kLine));
      to -= p.leading;
    } else {
      const int after = last ? p.trailing : p.gap, lines = last ? p.trailing_lines : p.gap_lines;
      to += p.out_width;
      const int next = last ? 0 : min(lines, offset_in(to + after, kLine)), own = min(lines, missing_in(to, kLine));
      to += own;
      count = after - own - next;
    }
    b.share(p, to, count);
    const float* const from = constants(c);
    int low = min(missing_in(to, kVector), count);
#pragma unroll 1
    for (; low > 0; --low, --count) *to++ = *from;
    int bulk = count & -kVector;
    count -= bulk;
    const uint64_t policy = evict_first_policy();
#pragma unroll 1
    for (; bulk > 0; bulk -= p.constant_pitch, to += p.constant_pitch) {
      bulk_store(to, from, min(bulk, p.constant_pitch), policy);
    }
    to += bulk;
#pragma unroll 1
    for (; count > 0; --count) *to++ = *from;
    commit_bulk();
  }

  // Zeros take a thread half as many instructions as other values: the bias is added at the end.
  __device__ void clear_accumulators() {
#pragma unroll
    for (int c = 0; c < 4; ++c)
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int r = 0; r < kStride; ++r) acc[c][i][r] = 0;
    tail = 0;
  }
  __device__ void add_bias() {
    const float4 bias = reinterpret_cast<const float4*>(head.bias)[warp];
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
#pragma unroll
      for (int r = 0; r < kStride; ++r) {
        acc[0][i][r] += bias.x, acc[1][i][r] += bias.y, acc[2][i][r] += bias.z, acc[3][i][r] += bias.w;
      }
  }

  // Adds the products of what is staged.
  __device__ __forceinline__ void accumulate(int begin, int end) {
    const RowTileQuad q = RowTileQuad::make(p, head.block);
    if (q.channels == 0) return;
    const int rows = p.block_groups == 1 ? end - begin : p.in_channels * head.taps.count;
    const float* const inputs =
        tile() + q.group * rows * Traits::kInputPitch + head.block.base - head.block.first_column<Traits>();
    multiply_rows(inputs + lane, weights(), rows);
    if (head.block.tail > 0) multiply_tail(inputs, weights(), rows);
  }

  __device__ __forceinline__ void multiply_rows(const float* x, const float* w, int rows) {
#pragma unroll 2
    for (int row = 0; row < rows; ++row, x += Traits::kInputPitch, w += 4 * kKernel) {
      float4 ws[kKernel];
      float xs[Traits::kMaxEntry + 1][kChunks];
#pragma unroll
      for (int t = 0; t < kKernel; ++t) ws[t] = reinterpret_cast<const float4*>(w)[t];
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
#pragma unroll
        for (int e = 0; e <= Traits::kMaxEntry; ++e) xs[e][i] = x[32 * i - e];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
          for (int t = 0; t < kKernel; ++t) {
            const float weight = c == 0 ? ws[t].x : c == 1 ? ws[t].y : c == 2 ? ws[t].z : ws[t].w;
            float& sum = acc[c][i][Traits::phase(t)];
            sum = fmaf(weight, xs[Traits::entry(t)][i], sum);
          }
        }
      }
    }
  }

  // The few outputs beyond kRowColumns: a lane has one channel, one output and a part of the rows.
  __device__ void multiply_tail(const float* x, const float* w, int rows) {
    const RowTileBlock& b = head.block;
    const int outputs = tail_slots(b), slot = lane / 4, at = slot & (outputs - 1);
    const int r = at % kStride, column = kRowColumns + at / kStride;
    if (at >= b.tail * kStride) return;
    const int step = 8 / outputs, first = slot / outputs;
    x += column + first * Traits::kInputPitch;
    w += lane % 4 + first * (4 * kKernel);
    const int inside = p.in_width - b.base - column;
#pragma unroll 1
    for (int row = first; row < rows; row += step, x += step * Traits::kInputPitch, w += step * (4 * kKernel)) {
#pragma unroll
      for (int t = 0; t < kKernel; ++t) {
        const int entry = Traits::entry(t);
        if (Traits::phase(t) == r && -entry < inside) tail = fmaf(w[4 * t], x[-entry], tail);
      }
    }
  }
  // For outputs there: a power of two.
  __device__ static int tail_slots(const RowTileBlock& b) {
    const int outputs = b.tail * kStride;
    return outputs > 4 ? 8 : outputs > 2 ? 4 : 2;
  }

  // Inputs outside the tensor were staged as zeros, which only finite weights leave without effect (0 * inf is NaN): an
  // output that read one and is not finite has to be made again, by the definition.
  __device__ float probe(const RowTileBlock& b, int i) const {
    const int j = lane + 32 * i;
    float sum = 0;
    if (j < b.columns && b.reads_outside<Traits>(p, j)) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int r = 0; r < kStride; ++r) sum = fmaf(acc[c][i][r], 0.0f, sum);
    }
    return sum;
  }
  __device__ bool is_suspect() const {
    const RowTileBlock& b = head.block;
    float sum = 0;
    if (b.base + b.columns > p.in_width) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) sum += probe(b, i);
    } else if (b.base < Traits::kMaxEntry) {
      sum = probe(b, 0);
    }
    return sum != 0.0f;
  }

  // A channel's outputs stand in shared memory as in memory, modulo 16 bytes, with the constants of its first and last
  // 128-byte lines around them.
  __device__ void store_outputs(bool suspect) {
    const RowTileBlock b = head.block;
    const RowTileQuad q = RowTileQuad::make(p, b);
    if (q.channels == 0) return;
    const bool first = b.row == 0, last = b.row == p.rows - 1;
    const int begin = b.output_begin(p, kStride);
    const int count = min(p.out_width, (b.base + b.columns + b.tail) * kStride - p.padding) - begin;
    const int origin = b.base * kStride - p.padding - begin;  // of column 0, phase 0
    const int lines_before = b.segment > 0 ? 0 : first ? p.leading_lines : p.gap_lines;
    const int lines_after = b.segment < p.segments - 1 ? 0 : last ? p.trailing_lines : p.gap_lines;
    float* const row = q.row(p, b, 0) + begin;
    const int offset = offset_in(row, kLine);
    float* const buffers = tile() + 4 * warp * Traits::kOutputPitch;
    // Where output `begin` of channel c stands.
    const auto data = [&](int c) {
      const int behind = (offset + c * p.output_channel) & (kLine - 1), before = min(lines_before, behind);
      return buffers + c * Traits::kOutputPitch + before + ((behind - before) & (kVector - 1));
    };
    bool exists[kStride];  // in column 0
#pragma unroll
    for (int r = 0; r < kStride; ++r) exists[r] = kStride * lane + origin + r >= 0;
    const auto keep = [&](auto rectified) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float* const to = data(c) + origin + kStride * lane;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
#pragma unroll
          for (int r = 0; r < kStride; ++r) {
            const float value = decltype(rectified)::value ? p.rectify(acc[c][i][r]) : acc[c][i][r];
            if (i > 0 || exists[r]) to[32 * kStride * i + r] = value;
          }
      }
    };
    p.rectify.on ? keep(std::true_type{}) : keep(std::false_type{});
    __syncwarp();  // what comes now may stand where columns beyond the end were written
    const int c = lane % 4, slot = lane / 4;
    if (b.tail > 0) {
      for (int distance = 4 * tail_slots(b); distance < 32; distance *= 2) {
        tail += __shfl_xor_sync(~0u, tail, distance);
      }
      if (slot < b.tail * kStride)
        data(c)[origin + kRowColumns * kStride + slot] = p.rectify(tail + head.bias[4 * warp + c]);
      __syncwarp();
    }
    if (suspect) {
#pragma unroll 1
      for (int i = 0; i < q.channels; ++i) {
        edges_by_definition<Traits>(p, b, head.taps, b.group + q.group, 4 * (b.quad + q.quad) + i, data(i));
      }
      __syncwarp();
    }
    float* const channel_row = row + static_cast<int64_t>(c) * p.output_channel;
    const int before = c < q.channels ? min(lines_before, offset_in(channel_row, kLine)) : 0;
    const int after = c < q.channels ? min(lines_after, missing_in(channel_row + count, kLine)) : 0;
    store_row(channel_row - before, data(c) - before, before, c < q.channels ? count : 0, after);
    if (lane < 4) wait_for_bulk_reads();
  }

  // Eight lanes store the row of a channel, and constants around its `count` outputs.
  __device__ __forceinline__ void store_row(float* row, float* data, int before, int count, int after) const {
    const int slot = lane / 4, stored = before + count + after;
    const float constant = p.rectify(head.bias[4 * warp + lane % 4]);
#pragma unroll 1
    for (int i = slot; i < before; i += 8) data[i] = constant;
#pragma unroll 1
    for (int i = slot; i < after; i += 8) data[before + count + i] = constant;
    fence_shared_writes();
    __syncwarp();
    const int low = min(missing_in(row, kVector), stored), bulk = (stored - low) & -kVector, rest = stored - low - bulk;
    if (slot == 0 && bulk > 0) {
      bulk_store(row + low, data + low, bulk, evict_first_policy());
      commit_bulk();
    }
    if (slot < low) row[slot] = data[slot];
    if (slot < rest) row[stored - 1 - slot] = data[stored - 1 - slot];
  }
};

#endif

template <class Traits>
__global__ void __launch_bounds__(kRowTileThreads, Traits::kBlocks)
    row_tile_kernel(const __grid_constant__ RowTileParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char row_tile_shared[];
  RowTileKernel<Traits>(p, row_tile_shared).run();
#endif
}

}  // namespace fastconvt::cuda
