// The flat GEMM's outputs, from registers to memory.
#pragma once

#include "epilogue.cuh"
#include "flat_gemm_product.cuh"

namespace fastconvt::cuda {

// Where the outputs of a cell stand: of the first unit, times two, plus whether the second unit has one at its side;
// -1: nowhere.
__device__ __forceinline__ int64_t output_place(const FlatGemmParams& p, const FlatGemmItem& item, int cell) {
  const FlatGemmClass& k = item.of(p);
  const FlatGemmPlace place = find_place(p, item.first + cell);
  bool exists = place.n < p.batch;
  int64_t offset = place.n * p.out.batch;
  int last = 0;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int o = place.at[a] * p.axis[a].stride + k.f[a];
    exists = exists && place.at[a] < p.axis[a].cells && o < p.axis[a].out;
    offset += o * p.out.axis[a];
    last = o;
  }
  const bool second = p.pairs && k.f[2] + 1 < p.axis[2].stride && last + 1 < p.axis[2].out;
  return exists ? offset * 2 + (second ? 1 : 0) : -1;
}

// One sum by the definition, in float64: only taps and inputs that exist are multiplied.
__device__ __noinline__ float flat_gemm_definition(const FlatGemmParams& p, const FlatGemmItem& item, int channel,
                                                   int cell, int unit) {
  const FlatGemmPlace place = find_place(p, item.first + cell);
  const float* const input =
      p.input + place.n * p.in.batch + static_cast<int64_t>(item.group) * p.group_in * p.in.channel;
  const float* const weight =
      p.weight + (static_cast<int64_t>(item.group) * p.group_in * p.group_out + channel) * p.taps;
  double sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const FlatGemmAxisParams& axis = p.axis[a];
      const int t = rest % axis.kernel, o = place.at[a] * axis.stride + item.of(p).f[a] + (a == 2 ? unit : 0);
      rest /= axis.kernel;
      const int64_t at = int64_t{o} + axis.padding - static_cast<int64_t>(t) * axis.dilation;
      exists = exists && at >= 0 && at % axis.stride == 0 && at / axis.stride < axis.in;
      offset += at / axis.stride * p.in.axis[a];
    }
    if (!exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      sum = fma(double(input[offset + c * p.in.channel]),
                double(weight[static_cast<int64_t>(c) * p.group_out * p.taps + tap]), sum);
    }
  }
  if (p.bias != nullptr) sum += p.bias[int64_t{item.group} * p.group_out + channel];
  return p.rectify(static_cast<float>(sum));
}

__device__ __forceinline__ void repair_output(const FlatGemmParams& p, const FlatGemmItem& item, float* to, int channel,
                                              int cell, int unit) {
  if (!p.rectify.shows_finite(*to)) *to = flat_gemm_definition(p, item, channel, cell, unit);
}

// A thread's sums: channels 2 * g and 2 * g + 1 of its warp's 16, cells 8 * j + 2 * t and the next.
struct FlatGemmLane {
  int channel, cell;
};
__device__ __forceinline__ FlatGemmLane lane_of_sums() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return {warp * 16 + lane / 4 * 2, lane % 4 * 2};
}

__device__ __forceinline__ bool aligned(const float* to, int bytes) {
  return reinterpret_cast<uintptr_t>(to) % bytes == 0;
}
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void store_two(float* to, float a, float b) {
  if (aligned(to, 8)) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
  } else {
    to[0] = a, to[1] = b;
  }
}

// Channels-last: one or two channels of a cell.
template <class Epilogue>
__device__ __forceinline__ void store_channels(float* to, float a, float b, const Epilogue& epilogue,
                                               const float (&term)[2], int channels) {
  if (channels == 2) {
    store_two(to, epilogue(a, term[0]), epilogue(b, term[1]));
  } else {
    *to = epilogue(a, term[0]);
  }
}

// Contiguous, two phases side by side, where the output is not aligned: `out` is the channel's first output.
__device__ __forceinline__ void store_pair(float* out, int64_t place, float a, float b) {
  if (place < 0) return;
  if (place & 1) return store_two(out + (place >> 1), a, b);
  out[place >> 1] = a;
}

// Contiguous, the phase alone.
__device__ __forceinline__ void store_neighbours(float* out, int64_t place, int64_t next, float a, float b) {
  float* const to = out + (place >> 1);
  if (place >= 0 && next == place + 2) return store_two(to, a, b);
  if (place >= 0) *to = a;
  if (next >= 0) out[next >> 1] = b;
}

// Contiguous pairs whose runs are not aligned go through shared memory, 32 cells at a time: a warp's lanes then store
// neighbouring outputs of one of its 16 channels.
constexpr int kFlatGemmRunPitch = 72;  // banks apart
template <class Epilogue>
__device__ __forceinline__ void store_runs(const FlatGemmParams& p, const FlatGemmSums (&sum)[2],
                                           const Epilogue& epilogue, const int64_t* places, float* staging, float* out,
                                           int channels, const float (&term)[2]) {
  const int lane = threadIdx.x % 32;
  float* const own = staging + lane / 4 * 2 * kFlatGemmRunPitch + lane % 4 * 4;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float (&a)[4] = sum[0][part * 4 + i], (&b)[4] = sum[1][part * 4 + i];
        *reinterpret_cast<float4*>(own + r * kFlatGemmRunPitch + i * 16) = {
            epilogue(a[2 * r], term[r]), epilogue(b[2 * r], term[r]), epilogue(a[2 * r + 1], term[r]),
            epilogue(b[2 * r + 1], term[r])};
      }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t place = places[part * 32 + half * 16 + lane / 2];
      if (place < 0 || (lane % 2 == 1 && !(place & 1))) continue;
      float* to = out + (place >> 1) + lane % 2;
      const float* const from = staging + half * 32 + lane;
#pragma unroll 8
      for (int c = 0; c < channels; ++c, to += p.out.channel) *to = from[c * kFlatGemmRunPitch];
    }
  }
}

// kRuns: whether runs may go through shared memory.
template <bool kChannelsLast, bool kRuns, class Epilogue>
__device__ __forceinline__ void store_sums(const FlatGemmParams& p, const FlatGemmItem& item,
                                           const FlatGemmSums (&sum)[2], const Epilogue& epilogue,
                                           const int64_t* places, int first_cell, float* staging) {
  const FlatGemmLane lane = lane_of_sums();
  const int first = item.channel_block * kFlatGemmRows + lane.channel;
  const int channels = min(2, p.group_out - first);
  const int warp_first = first - lane.channel % 16;
  const int64_t of_all = static_cast<int64_t>(item.group) * p.group_out + first;
  const float term[2] = {channels >= 1 ? epilogue.channel_term(of_all) : 0.f,
                         channels == 2 ? epilogue.channel_term(of_all + 1) : 0.f};
  float* const out = p.output + of_all * p.out.channel;
  float probe = 0;
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) probe = fmaf(sum[u][j][q], 0.f, probe);
  if (!kChannelsLast && kRuns && p.runs) {
    store_runs(p, sum, epilogue, places, staging + threadIdx.x / 32 * 16 * kFlatGemmRunPitch,
               out - lane.channel % 16 * p.out.channel, min(16, p.group_out - warp_first), term);
  } else if (!kChannelsLast && p.quads) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int64_t place = places[j * 8 + lane.cell];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (place < 0 || r >= channels) continue;
        const float a = epilogue(sum[0][j][2 * r], term[r]), b = epilogue(sum[1][j][2 * r], term[r]);
        const float c = epilogue(sum[0][j][2 * r + 1], term[r]), d = epilogue(sum[1][j][2 * r + 1], term[r]);
        store_four(out + r * p.out.channel + (place >> 1), a, b, c, d);
      }
    }
  } else if (channels > 0) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int64_t *const at = places + j * 8 + lane.cell, place = at[0], next = at[1];
      if constexpr (kChannelsLast) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int64_t of = e == 0 ? place : next;
          if (of >= 0) store_channels(out + (of >> 1), sum[0][j][e], sum[0][j][2 + e], epilogue, term, channels);
        }
        if (p.pairs) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t of = e == 0 ? place : next;
            if (of < 0 || !(of & 1)) continue;
            store_channels(out + (of >> 1) + p.out.axis[2], sum[1][j][e], sum[1][j][2 + e], epilogue, term, channels);
          }
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int64_t of = at[p.unit + e];
            if (of >= 0) store_channels(out + (of >> 1), sum[1][j][e], sum[1][j][2 + e], epilogue, term, channels);
          }
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (r >= channels) continue;
          float* const to = out + r * p.out.channel;
          const float a = epilogue(sum[0][j][2 * r], term[r]), b = epilogue(sum[1][j][2 * r], term[r]);
          const float c = epilogue(sum[0][j][2 * r + 1], term[r]), d = epilogue(sum[1][j][2 * r + 1], term[r]);
          if (p.pairs) {
            store_pair(to, place, a, b);
            store_pair(to, next, c, d);
          } else {
            store_neighbours(to, place, next, a, c);
            store_neighbours(to, at[p.unit], at[p.unit + 1], b, d);
          }
        }
      }
    }
  }
  __syncwarp();  // other lanes have stored this one's sums
  if (probe == 0.f) return;
#pragma unroll 1
  for (int i = 0; i < 64 * channels; ++i) {
    const int r = i / 64, u = i / 32 % 2, cell = i / 2 % 16 * 8 + lane.cell + i % 2 + u * p.unit;
    const int64_t place = places[cell];
    if (place < 0 || (u == 1 && p.pairs && !(place & 1))) continue;
    const int unit = p.pairs ? u : 0;
    repair_output(p, item, out + r * p.out.channel + (place >> 1) + unit * p.out.axis[2], first + r, first_cell + cell,
                  unit);
  }
}

// An item without taps: the bias alone. Lanes run along the outputs.
template <bool kChannelsLast>
__device__ __forceinline__ void store_constants(const FlatGemmParams& p, const FlatGemmItem& item,
                                                const int64_t* places) {
  const int cells = p.pairs ? kFlatGemmColumns : 2 * kFlatGemmColumns;
  const int channels = min(kFlatGemmRows, p.group_out - item.channel_block * kFlatGemmRows);
  const int64_t of_all = static_cast<int64_t>(item.group) * p.group_out + item.channel_block * kFlatGemmRows;
  const BiasEpilogue<float> epilogue{p.bias};
  const int thread = threadIdx.x % kFlatGemmGroup;
  if constexpr (kChannelsLast) {
    const int channel = thread % kFlatGemmRows;
    if (channel >= channels) return;
    const float value = p.rectify(epilogue.channel_term(of_all + channel));
    const int units = p.pairs ? 2 : 1;
    for (int i = thread / kFlatGemmRows; i < cells * units; i += kFlatGemmGroup / kFlatGemmRows) {
      const int unit = p.pairs ? i % 2 : 0;
      const int64_t place = places[i / units];
      if (place < 0 || (unit == 1 && !(place & 1))) continue;
      p.output[(place >> 1) + unit * p.out.axis[2] + of_all + channel] = value;
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = half * kFlatGemmGroup + thread, cell = p.pairs ? i / 2 : i;
      const int64_t place = places[cell];
      if (place < 0 || (p.pairs && i % 2 == 1 && !(place & 1))) continue;
      float* to = p.output + (place >> 1) + (p.pairs ? i % 2 : 0) + of_all * p.out.channel;
      for (int c = 0; c < channels; ++c, to += p.out.channel) *to = p.rectify(epilogue.channel_term(of_all + c));
    }
  }
}

}  // namespace fastconvt::cuda
