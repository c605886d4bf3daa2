// The first kernel of dense layers: weights as operands, phase by phase.
#pragma once

#include "dense_gradient_steps.cuh"
#include "dense_params.cuh"

namespace fastconvt::cuda {

// n / d, for 0 <= n < 2^20 and d < 2^20.
__device__ __forceinline__ int small_quotient(int n, int d) {
  return __float2int_rz((static_cast<float>(n) + 0.5f) * __frcp_rn(static_cast<float>(d)));
}

constexpr int kDensePackedPhases = 8;  // of a thread: their weights are neighbours

template <typename T, DensePrecision kPrecision>
__global__ void __launch_bounds__(256)
    dense_forward_weights_kernel(const __grid_constant__ DenseForward f, int tiles, int64_t threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  let_next_grid_begin();
  const DenseParams& p = f.phase;
  constexpr int kUnit = kGranule<T>, kPart = 4 / sizeof(T);
  int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= threads) return;
  // (group, block of columns, chunk, eight columns, step, lane)
  const int lane = static_cast<int>(index % 32);
  index /= 32;
  const int step = static_cast<int>(index % p.steps);
  index /= p.steps;
  const int tile = static_cast<int>(index % tiles);
  index /= tiles;
  const int chunk = static_cast<int>(index % p.chunks);
  index /= p.chunks;
  const int block = static_cast<int>(index % p.in_blocks), group = static_cast<int>(index / p.in_blocks);
  int tap_block = chunk / p.plane_chunks, begin[3];
  const int first_plane = (chunk - tap_block * p.plane_chunks) * p.chunk_planes;
  find_taps(p, tap_block, begin);
  const DenseColumn column(f, (block * tiles + tile) * 8 + lane / 4);
  const int64_t kernel = static_cast<int64_t>(p.kernel[0]) * p.kernel[1] * p.kernel[2];
  const int64_t from_channel = f.out_channels * kernel;
  const T* weight =
      static_cast<const T*>(p.weight) + group * p.grad.channels * from_channel + column.channel * f.weight_channel;
  const int first_phase = blockIdx.y * kDensePackedPhases;
#pragma unroll 1
  for (int k = first_phase; k < min(first_phase + kDensePackedPhases, f.phases); ++k) {
    const DensePhase phase(f, k);
    if (step >= phase.steps) continue;
    int last[3], before[3], count[3];  // the tap of the layer that the first one here is; others before it
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      last[a] = phase.last[a], before[a] = 0, count[a] = phase.count[a];
      if (f.axis[a].joined == 1) continue;
      const DenseTaps taps(f.axis[a], column.phase[a]);
      last[a] = taps.last(f.axis[a]), count[a] = taps.count;
      before[a] = (taps.start - phase.start[a]) / f.axis[a].layer.offset_step();
    }
    const int all = phase.taps[0] * phase.taps[1] * phase.taps[2];
    uint32_t words[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int granule = 2 * step + half, plane = small_quotient(granule, all);
      const int tap = granule - plane * all, line = small_quotient(tap, phase.taps[2]);
      int at[3];  // in the list
      const int sheet = small_quotient(line, phase.taps[1]);
      at[2] = begin[2] + tap - line * phase.taps[2];
      at[1] = begin[1] + line - sheet * phase.taps[1], at[0] = begin[0] + sheet;
      T element[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        const int e = lane % 4 * kPart + i;
        const int from = p.runs > 1 ? first_plane + plane : (first_plane + plane) * kUnit + e;
        bool exists = plane < p.chunk_planes && column.exists && from < p.grad.channels;
        int64_t offset = 0;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
          const int own = (a == 2 && p.runs > 1 ? at[a] * kUnit + e : at[a]) - before[a];
          offset = offset * p.kernel[a] + (last[a] - own * f.axis[a].layer.tap_step());
          exists = exists && own >= 0 && own < count[a];
        }
        element[i] = exists ? weight[from * from_channel + offset * f.weight_tap] : T{};
      }
      uint32_t word;
      memcpy(&word, element, 4);
      if constexpr (kPrecision == DensePrecision::kFloat32) {
        split_dense(word, words[half], words[2 + half]);
      } else {
        words[half] = kPrecision == DensePrecision::kTf32 ? round_tf32(__uint_as_float(word)) : word;
      }
    }
    const int64_t part = ((static_cast<int64_t>(group) * p.in_blocks + block) * f.phases + k) * p.chunks + chunk;
    char* target = static_cast<char*>(p.workspace) +
                   (((part * p.steps + step) * tiles + tile) * 32 + lane) * kDenseEntry<kPrecision>;
    if constexpr (kPrecision == DensePrecision::kFloat32) {
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    }
  }
#endif
}

}  // namespace fastconvt::cuda
