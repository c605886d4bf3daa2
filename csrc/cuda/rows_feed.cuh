// The warp of a block that feeds the computing ones: it stages input rows, stores the constant rows, and works out
// where outputs go, one data row ahead. Everything that is slow but not much is out of the computing warps' way.
#pragma once

#include "rows_store.cuh"

namespace fastconvt::cuda {

// Shared memory of a team, in this order. Barriers and runs go round: the feeding warp is at most one row ahead.
template <class Traits>
struct RowsShared {
  uint64_t fed[2], used[2];  // row i is fed; all computing warps are done with its inputs
  RowsBlock block;
  alignas(16) float bias[4 * kRowsQuads];
  RowsStep steps[kRowsMaxRows];
  RowsRun runs[4][4 * kRowsQuads];
  alignas(128) float constants[Traits::kConstants];  // constant outputs on their way
  float weights[1];                                  // then inputs, then outputs on their way

  __device__ float* inputs(const RowsParams& p) { return weights + p.weight_slots * p.weight_slot; }
  __device__ float* outputs(const RowsParams& p, int warp) {
    return inputs(p) + p.ring * p.input_slot + warp * (Traits::kOutputBuffers * Traits::kOutputPitch) +
           Traits::kOutputSlack;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <class Traits>
class RowsFeeder {
  const RowsParams& p;
  const RowsBlock& b;
  RowsShared<Traits>& shared;
  const RowsColumns columns;
  const uint64_t stream_policy;
  const int lane;
  int group, quad;  // of channel lane % 16 of the block
  bool exists;
  float* output;  // the data row of that channel; channels_last: of the image

 public:
  __device__ RowsFeeder(const RowsParams& p, RowsShared<Traits>& shared)
      : p(p),
        b(shared.block),
        shared(shared),
        columns(RowsColumns::make<Traits>(p, b)),
        stream_policy(evict_first_policy()),
        lane(threadIdx.x % 32) {
    RowsBlock::place(p, lane % 16 / 4, group, quad);
    exists = b.channel_exists(p, group, quad, lane % 4);
    const int64_t channel = Traits::kChannelsLast ? 0 : b.first_channel(p, group, quad) + lane % 4;
    output = b.row_of(p, channel, p.first_row + b.row * p.row_step);
  }

  __device__ void prepare() {
    if (lane < 2) {
      init_barrier(&shared.fed[lane], 1);
      init_barrier(&shared.used[lane], kRowsWarps);
    }
    if (lane < b.rows) shared.steps[lane] = RowsStep::make(p, b.row + lane, lane + 1 == b.rows);
    if (lane < 16) {
      const int64_t channel = b.first_channel(p, group, quad) + lane % 4;
      shared.bias[lane] = exists && p.bias != nullptr ? p.bias[channel] : 0.0f;
    }
    make_run(0);
    fill_constants();
    fence_before_bulk();
  }

  __device__ void run() {
    for (int row = 0; row < b.rows; ++row) {
      if (lane == 0) arrive_at(&shared.fed[row & 1]);
      if (Traits::kResident) fetch_burst(row);
      store_constant_rows(row);  // before the data: the memory has work while the team computes
      if (row + 1 == b.rows) break;
      if (row > 0) wait_at(&shared.used[(row - 1) & 1], (row - 1) >> 1 & 1);
      const RowsStep step = shared.steps[row];
      if (Traits::kResident && step.next_slot >= 0) {
        stage_input<Traits>(p, b, columns, step.next_row, 0, b.channels, shared.inputs(p) + step.next_slot, 0, 1,
                            stream_policy);
      }
      output += p.row_step * p.output_stride.axis[1];
      make_run(row + 1);
      wait_for_copies();
      __syncwarp();
    }
    wait_for_bulk_reads();
  }

 private:
  __device__ bool is_first(int row) const { return b.row + row == 0; }
  __device__ bool is_last(int row) const { return b.row + row == p.rows - 1; }

  __device__ void make_run(int row) const {
    if (Traits::kChannelsLast || lane >= 16) return;
    RowsRun run = RowsRun::make<Traits::kStride>(p, b, is_first(row), is_last(row), output);
    if (!exists) run.stored = run.low = run.high = run.before = run.after = 0;
    shared.runs[row & 3][lane] = run;
  }

  // The last input row that data row `row` and those before it read.
  __device__ int top_of(int row) const {
    int phase = p.row_phase + b.row + min(row, b.rows - 1);
    return min(p.by_row_phase(phase), p.in_height - 1);
  }

  // Every burst_rows-th row: the inputs of the burst after next, of the first two at the start.
  __device__ void fetch_burst(int row) const {
    if (p.burst_rows == 0 || row % p.burst_rows != 0 || row + 1 >= b.rows) return;
    const int first = top_of(row == 0 ? 0 : row + p.burst_rows - 1) + 1, last = top_of(row + 2 * p.burst_rows - 1);
    if (first > last) return;
    const uint64_t policy = evict_last_policy();
    const float* const input = p.input + b.batch * p.input_stride.batch + first * p.input_stride.axis[1];
    const int64_t floats = (last - first + 1) * p.input_stride.axis[1];
    if constexpr (Traits::kChannelsLast) {
      if (b.channel_block > 0) return;  // all teams of a data row read the same pixels
      const int64_t share = floats / 32 + 1;
      fetch(input + lane * share, min(share, floats - lane * share), policy);
    } else {
      const int64_t channel = static_cast<int64_t>(b.group) * p.in_channels;
      for (int c = lane; c < b.channels; c += 32) fetch(input + (channel + c) * p.input_stride.channel, floats, policy);
    }
  }
  __device__ static void fetch(const float* source, int64_t floats, uint64_t policy) {
    const int64_t skipped = missing_in(source, kVector), count = (floats - skipped) & -kVector;
    if (count > 0) prefetch_bulk(source + skipped, static_cast<int>(4 * count), policy);
  }

  // Zeros, or the pattern of a pixel.
  __device__ void fill_constants() const {
    if (p.row_step == 1 || p.constant_pitch == 0) return;
    if (p.bias == nullptr) {
      for (int i = lane; i < Traits::kConstants / 4; i += 32) {
        reinterpret_cast<float4*>(shared.constants)[i] = float4{0, 0, 0, 0};
      }
    } else {
      for (int i = lane; i < p.constant_pitch; i += 32) {
        shared.constants[i] = p.bias[i % static_cast<int>(p.output_stride.axis[2])];
      }
    }
  }

  __device__ void store_constant_rows(int row) const {
    if (p.row_step == 1) return;
    const bool first = is_first(row), last = is_last(row);
    if constexpr (Traits::kChannelsLast) {
      if (first && p.leading > 0) store_constant_pixels(output - p.leading * p.output_stride.axis[2], p.leading);
      store_constant_pixels(output + p.output_stride.axis[1], last ? p.trailing : p.gap);
    } else {
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

  // Contiguous: `count` constants of the lane's channel.
  __device__ void store_constants(float* output, int count) const {
    const RowsConstants share(p, b, output, count);
    if (p.constant_pitch > 0) {
      if (exists) share.store(shared.constants, p.constant_pitch, lane / 16, stream_policy);
      return;
    }
#pragma unroll 1
    for (int c = 0; c < 16; ++c) {
      if (!__shfl_sync(~0u, exists, c)) continue;
      const float value = shared.bias[c];
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
      for (int64_t i = lane; i < count; i += 32) output[i] = p.bias == nullptr ? 0.0f : p.bias[i % channels];
      return;
    }
    for (int64_t i = static_cast<int64_t>(lane) * p.constant_pitch; i < count; i += 32 * p.constant_pitch) {
      const int64_t size = min(count - i, static_cast<int64_t>(p.constant_pitch));
      bulk_store(output + i, shared.constants, static_cast<int>(size), stream_policy);
    }
  }
};

#endif

}  // namespace fastconvt::cuda
