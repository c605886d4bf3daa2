// Heads by windows: from sums to memory. A lane has four neighbouring positions of a row, so eight neighbouring outputs
// of each of its two columns.
#pragma once

#include "heads_window_params.cuh"

namespace fastconvt::cuda {

// kMarch: half of the columns are sums of the next base.
template <typename T, bool kMarch, bool kRectify>
class HeadsWindowStore {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kColumns = kMarch ? 1 : 2;  // of a lane, that are outputs
  static constexpr int kOutputs = 8, kHalf = kHeadsWindowRows / 2;

  const HeadsWindowParams& p;
  unsigned char* const shared;
  float probe = 0;  // NaN if a sum was not finite

 public:
  // By base, parity, position of the lane, register: the first two are of the first two bases, the others of the last
  // two.
  using Sums = float[kHeadsWindowRows / 2][2][4][4];

  __device__ HeadsWindowStore(const HeadsWindowParams& p, unsigned char* shared) : p(p), shared(shared) {}

  __device__ bool is_careful() const { return !(probe == 0); }

  // What every column is, for the whole life of the block.
  __device__ void prepare(int group) const {
    if (threadIdx.x >= kHeadsWindowColumns) return;
    HeadsWindowColumn column{0, 0, 0, -1, 0, 0};
    int rest = kMarch ? threadIdx.x / 2 : threadIdx.x;
    if (rest < p.combos) {
      int channel = rest;
      rest = p.by_channels(channel);
      column.mid = rest;
      column.march = p.by_mid_stride(column.mid);
      column.run = rest;
      column.offset =
          column.march * p.out.axis[0] + column.mid * p.out.axis[1] + static_cast<int64_t>(channel) * p.out.channel;
      column.channel = channel;
      const T* const bias = static_cast<const T*>(p.bias);
      column.bias = bias == nullptr ? 0.f : to_accumulator(bias[group * p.channels + channel]);
    }
    reinterpret_cast<HeadsWindowColumn*>(shared + p.table)[threadIdx.x] = column;
  }

  // The outputs of base `step` of the first axis.
  __device__ __forceinline__ void run(const HeadsWindowItem& item, int group, int step, const Sums& sum) {
    const int first = 2 * (item.column - p.shift) - p.lead, output = threadIdx.x % 32 / 4 * kOutputs;
    const int march = step * p.axis[0].stride - p.axis[0].padding;
    const int bases = item.stacked ? p.batch - item.batch : p.end_row - item.row;
    const int64_t pitch = item.stacked ? p.out.batch : p.axis[1].stride * p.out.axis[1];
    int mid = item.row * p.axis[1].stride - p.axis[1].padding;
    T* base = static_cast<T*>(p.output) + item.batch * p.out.batch +
              static_cast<int64_t>(group) * p.channels * p.out.channel + march * p.out.axis[0] + mid * p.out.axis[1] +
              first * p.out.axis[2];
    HeadsWindowColumn column[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      column[k] = reinterpret_cast<const HeadsWindowColumn*>(shared + p.table)[threadIdx.x % 4 * 2 + k];
    }
#pragma unroll
    for (int b = 0; b < kHeadsWindowRows; ++b) {
      if (b >= bases) break;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        Pack<T, kOutputs> pack;
        float all = 0;
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          const float value = sum[b % kHalf][i % 2][i / 2][b / kHalf * 2 + k];
          all += value;
          const float biased = value + column[k].bias;
          pack.value[i] = from_accumulator<T>(kRectify ? p.rectify(biased) : biased);
        }
        probe = fmaf(all, 0.f, probe);
        if (column[k].channel < 0) continue;
        if (p.rows_of_pixels) {
          stage(column[k], pack);
        } else if (is_inside(column[k], march, mid)) {
          store(base + column[k].offset + output, first + output, pack);
        }
      }
      if (p.rows_of_pixels) copy_rows(base, first, march, mid);
      base += pitch;
      if (!item.stacked) mid += p.axis[1].stride;
    }
  }

 private:
  __device__ __forceinline__ bool is_inside(const HeadsWindowColumn& column, int march, int mid) const {
    return static_cast<unsigned>(march + column.march) < static_cast<unsigned>(p.out_size[0]) &&
           static_cast<unsigned>(mid + column.mid) < static_cast<unsigned>(p.out_size[1]);
  }

  // `at`: where output `output` of a row is.
  __device__ __forceinline__ void store(T* at, int output, const Pack<T, kOutputs>& pack) const {
    const bool whole = output >= 0 && output + kOutputs <= p.out_size[2];
    if (whole && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kOutputs; i += kVector) {
        *reinterpret_cast<uint4*>(at + i) = *reinterpret_cast<const uint4*>(pack.value + i);
      }
    } else if (whole && reinterpret_cast<uintptr_t>(at) % (2 * sizeof(T)) == 0) {
#pragma unroll
      for (int i = 0; i < kOutputs; i += 2) {
        *reinterpret_cast<Pack<T, 2>*>(at + i) = *reinterpret_cast<const Pack<T, 2>*>(pack.value + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (output + i >= 0 && output + i < p.out_size[2]) at[i] = pack.value[i];
      }
    }
  }

  // The warp's row of outputs, as pixels; the skew aligns it as it will be in memory.
  __device__ __forceinline__ T* staged(int run) const {
    return reinterpret_cast<T*>(shared + p.staged + threadIdx.x / 32 * p.staged_warp + run * p.staged_row);
  }
  __device__ __forceinline__ void stage(const HeadsWindowColumn& column, const Pack<T, kOutputs>& pack) const {
    T* const to = staged(column.run) + threadIdx.x % 32 / 4 * kOutputs * p.channels + column.channel;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) to[i * p.channels] = pack.value[i];
  }

  // The rows of outputs of a base, by all lanes.
  __device__ __forceinline__ void copy_rows(T* base, int first, int march, int mid) const {
    __syncwarp();
    const int begin = max(0, -first), end = min(2 * kHeadsWindowUnit, p.out_size[2] - first);
#pragma unroll 1
    for (int m = 0; m < p.axis[0].stride; ++m) {
#pragma unroll 1
      for (int y = 0; y < p.axis[1].stride; ++y) {
        if (static_cast<unsigned>(march + m) >= static_cast<unsigned>(p.out_size[0]) ||
            static_cast<unsigned>(mid + y) >= static_cast<unsigned>(p.out_size[1])) {
          continue;
        }
        T* const row = base + m * p.out.axis[0] + y * p.out.axis[1];
        const T* const from = staged(m * p.axis[1].stride + y);
        if (p.whole_pixels) {
          copy_run(row + begin * p.channels, from + begin * p.channels, (end - begin) * p.channels);
        } else {
#pragma unroll 1
          for (int i = begin * p.channels + threadIdx.x % 32; i < end * p.channels; i += 32) {
            const int pixel = i / p.channels;
            row[pixel * p.out.axis[2] + i - pixel * p.channels] = from[i];
          }
        }
      }
    }
    __syncwarp();
  }

  // Neighbours in memory, in whole vectors of it.
  static __device__ __forceinline__ void copy_run(T* row, const T* from, int count) {
    const int lane = threadIdx.x % 32;
    const int head = static_cast<int>(-reinterpret_cast<intptr_t>(row) / static_cast<int>(sizeof(T)) & (kVector - 1));
#pragma unroll 1
    for (int i = lane * kVector - (kVector - head) % kVector; i < count; i += 32 * kVector) {
      Pack<T, kVector> pack;
#pragma unroll
      for (int j = 0; j < kVector; ++j) pack.value[j] = i + j >= 0 && i + j < count ? from[i + j] : T{};
      if (i >= 0 && i + kVector <= count) {
        *reinterpret_cast<Pack<T, kVector>*>(row + i) = pack;
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (i + j >= 0 && i + j < count) row[i + j] = pack.value[j];
        }
      }
    }
  }
};

}  // namespace fastconvt::cuda
