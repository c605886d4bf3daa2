// The weights of a block of the depthwise kernels, brought into the order of phases in shared memory.
#pragma once

#include "depthwise_columns.cuh"

namespace fastconvt::cuda {

// What a block makes, and what it has in shared memory.
template <class Columns>
struct DepthwiseBlock {
  using T = typename Columns::T;
  int chunk, channel, channels, phase, phases;
  float* bias;
  // [depth phase][height phase][phase of the last axis][plane, row of the window][tap]([channel])
  float* table;
  int* masks;  // [depth phase][height phase]: which planes and rows of the window have taps

  __device__ explicit DepthwiseBlock(const DepthwiseParams& p) {
    extern __shared__ __align__(16) unsigned char shared[];
    int rest = blockIdx.x;
    int group = p.by_chunk(rest);
    chunk = rest;
    rest = group;
    channel = p.by_phase_group(rest) * p.channel_tile;
    channels = min(p.channel_tile, p.channels - channel);
    phase = rest * p.phases;
    phases = min(p.phases, p.row_stride - phase);
    bias = reinterpret_cast<float*>(shared);
    table = reinterpret_cast<float*>(shared + p.table_offset);
    masks = reinterpret_cast<int*>(shared + p.mask_offset);
  }
};

// A row of weights: that of one row of the window in one phase of height and depth; null if there is none.
template <class Columns, int kDepth, int kHeight>
__device__ __forceinline__ const typename Columns::T* table_row(const DepthwiseParams& p,
                                                                const DepthwiseBlock<Columns>& block, int channel,
                                                                int rz, int ry, int j) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1];
  const int tz = tap_at(p, 0, rz, kDepth - 1 - j / kHeight);
  const int ty = tap_at(p, 1, block.phase + ry, kHeight - 1 - j % kHeight);
  if (tz < 0 || ty < 0 || ry >= block.phases || channel >= block.channels) return nullptr;
  const int64_t filter = int64_t{depth.kernel} * height.kernel * p.axis[2].kernel;
  return static_cast<const typename Columns::T*>(p.weight) + (block.channel + channel) * filter +
         (tz * height.kernel + ty) * p.axis[2].kernel;
}

// A weight on its way to the table of a block, the index-th; `to` is negative if it has no place there.
template <class Columns, int kDepth, int kHeight>
struct TableEntry {
  using T = typename Columns::T;
  int to = -1;
  T value{};

  __device__ __forceinline__ TableEntry(const DepthwiseParams& p, const DepthwiseBlock<Columns>& block, int index) {
    constexpr int kTaps = Columns::kTaps, kWindow = kDepth * kHeight;
    const AxisParams& width = p.axis[2];
    if (index >= p.table_size) return;
    if constexpr (Columns::kChannels) {
      // In the order of memory: lanes read neighbours. Places without a tap stay as they are, and are never used.
      int tx = index, ry = p.by_entries(tx);
      const int j = ry % kWindow;
      ry /= kWindow;
      int c = p.by_phases(ry), rz = c;
      c = p.by_depth_phases(rz);
      const T* const row = table_row<Columns, kDepth, kHeight>(p, block, c, rz, ry, j);
      if (row == nullptr) return;
      value = __ldg(row + tx);
      int r = tx * width.dilation;
      const int i = p.by_stride(r);
      to = ((rz * p.phases + ry) * width.stride + r) * p.slot_pitch + (j * kTaps + i) * p.channel_tile + c;
    } else {
      // In the order of the table: what has no tap becomes zero.
      to = index;
      const int i = index % kTaps, j = index / kTaps % kWindow;
      int slot = index / (kTaps * kWindow), ry = p.by_entries(slot);
      const int rz = p.by_phases(ry), r = Columns::phase_at(p, slot);
      const int tx = first_tap(width, r) + i * width.tap_step();
      const T* const row = table_row<Columns, kDepth, kHeight>(p, block, 0, rz, ry, j);
      if (row != nullptr && r < width.stride && tx < width.kernel) value = __ldg(row + tx);
    }
  }
};

// The block's weights in the order of phases. A thread's first weight is on its way while other work is done.
template <class Columns, int kDepth, int kHeight>
struct TableFill {
  using T = typename Columns::T;
  using Entry = TableEntry<Columns, kDepth, kHeight>;
  const DepthwiseParams& p;
  const DepthwiseBlock<Columns>& block;
  Entry entry;

  __device__ TableFill(const DepthwiseParams& params, const DepthwiseBlock<Columns>& b)
      : p(params), block(b), entry(params, b, threadIdx.x) {}

  // Whether all that this thread has moved are finite.
  __device__ __forceinline__ bool finish() {
    const int threads = static_cast<int>(blockDim.x);
    bool finite = true;
    const auto store = [&](const Entry& e) {
      const float value = to_accumulator(e.value);
      finite = finite && is_finite(value);
      if (e.to >= 0) block.table[e.to] = value;
    };
    store(entry);
#pragma unroll 1
    for (int index = threadIdx.x + threads; index < p.table_size; index += 2 * threads) {
      const Entry a(p, block, index), b(p, block, index + threads);
      store(a), store(b);
    }
    fill_masks();
#pragma unroll 1
    for (int c = threadIdx.x; c < p.channel_tile; c += threads) {
      const bool exists = p.bias != nullptr && c < block.channels;
      block.bias[c] = exists ? to_accumulator(__ldg(static_cast<const T*>(p.bias) + block.channel + c)) : 0.f;
    }
    return finite;
  }

  __device__ __forceinline__ void fill_masks() const {
#pragma unroll 1
    for (int place = threadIdx.x; place < p.axis[0].stride * p.phases; place += static_cast<int>(blockDim.x)) {
      int ry = place, mask = 0;
      const int rz = p.by_phases(ry);
#pragma unroll
      for (int j = 0; j < kDepth * kHeight; ++j) {
        mask |= (tap_at(p, 0, rz, kDepth - 1 - j / kHeight) >= 0 && ry < block.phases &&
                 tap_at(p, 1, block.phase + ry, kHeight - 1 - j % kHeight) >= 0)
                << j;
      }
      block.masks[place] = mask;
    }
  }
};

}  // namespace fastconvt::cuda
