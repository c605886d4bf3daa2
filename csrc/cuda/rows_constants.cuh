// The constant rows around a data row: output rows whose phase has no taps are bias and nothing else.
#pragma once

#include "rows_stage.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <class Traits>
struct RowsConstants {
  const RowsParams& p;
  const RowsBlock& b;
  float* buffer;  // shared memory, from which constants are stored in bulk
  uint64_t stream_policy;

  // Zeros, or the pattern of a pixel.
  __device__ void fill() const {
    if (p.row_step == 1 || p.constant_pitch == 0) return;
    if (p.bias == nullptr) {
      for (int i = threadIdx.x; i < Traits::kConstants / 4; i += kRowsThreads) {
        reinterpret_cast<float4*>(buffer)[i] = float4{0, 0, 0, 0};
      }
    } else {
      for (int i = threadIdx.x; i < p.constant_pitch; i += kRowsThreads) {
        buffer[i] = p.rectify(p.bias[i % static_cast<int>(p.output_stride.axis[2])]);
      }
    }
  }

  // The constants around the data row.
  __device__ void store() const {
    if (p.row_step == 1) return;
    float* const output = b.row_of(p, 0);
    if (b.row == 0 && p.leading > 0) store_pixels(output - p.leading * p.output_stride.axis[2], p.leading);
    store_pixels(output + p.output_stride.axis[1], b.row == p.rows - 1 ? p.trailing : p.gap);
    commit_bulk();
  }

 private:
  // Constant rows are whole pixels, shared by the blocks of a data row.
  __device__ void store_pixels(float* output, int pixels) const {
    if (pixels == 0) return;
    const int64_t channels = p.output_stride.axis[2];
    const int blocks = p.segments * p.channel_blocks, block = b.segment * p.channel_blocks + b.channel_block;
    const int share = (pixels + blocks - 1) / blocks;
    const int64_t begin = min(int64_t{pixels}, int64_t{share} * block);
    const int64_t count = (min(int64_t{pixels}, begin + share) - begin) * channels;
    output += begin * channels;
    if (p.constant_pitch == 0) {
      for (int64_t i = threadIdx.x; i < count; i += kRowsThreads) {
        output[i] = p.bias == nullptr ? 0.0f : p.rectify(p.bias[i % channels]);
      }
      return;
    }
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * p.constant_pitch; i < count;
         i += kRowsThreads * p.constant_pitch) {
      const int64_t size = min(count - i, static_cast<int64_t>(p.constant_pitch));
      bulk_store(output + i, buffer, static_cast<int>(size), stream_policy);
    }
  }
};

#endif

}  // namespace fastconvt::cuda
