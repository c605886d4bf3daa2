// The shuffle GEMM over planes: from sums in registers through shared memory to outputs. A warp's 16 rows are whole
// runs: an output channel's (and depth's) lines of outputs, one after the other, of the tile's lines of inputs. Lane
// 4 * g + t has sums of rows 2g and 2g + 1, two neighbouring taps, for columns 2t and 2t + 1 of every eight.
#pragma once

#include "device/barrier.cuh"
#include "device/bulk.cuh"
#include "device/elect.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "shuffle_planes_params.h"

namespace fastconvt::cuda {

// Where a run begins, in elements.
__device__ __forceinline__ int64_t find_planes_run(const ShufflePlanesParams& p, const ShufflePlanesItem& item, int run,
                                                   int kernel_width) {
  int depth_tap = run;
  const int channel = p.kernel_depth(depth_tap);
  const int64_t plane = static_cast<int64_t>(item.n) * p.out_channels + channel;
  const int64_t line = static_cast<int64_t>(item.tile) * p.lines * p.kernel_height * (p.width.divisor * kernel_width);
  return plane * p.output_channel + (item.depth * p.kernel_depth.divisor + depth_tap) * p.output_plane + line;
}

// Bytes by which a run is staged further, to lie as its target does modulo 32 bytes.
__device__ __forceinline__ int find_skew(const ShufflePlanesParams& p, int64_t run) {
  return p.skews ? static_cast<int>((reinterpret_cast<uintptr_t>(p.output) + 2 * run) & 16) : 0;
}

template <typename T>
__device__ __noinline__ float make_planes_output(const ShufflePlanesParams& p, ShufflePlanesItem item, int position,
                                                 int row) {
  const T* x = static_cast<const T*>(p.input) + static_cast<int64_t>(item.n) * p.in_channels * p.input_channel +
               item.depth * p.input_plane + static_cast<int64_t>(item.tile) * p.lines * p.width.divisor + position;
  const T* w = static_cast<const T*>(p.weight) + row;
  double sum = 0;
#pragma unroll 4
  for (int c = 0; c < p.in_channels; ++c) {
    sum += double(to_accumulator(*x)) * double(to_accumulator(*w));
    x += p.input_channel, w += p.rows;
  }
  const int channel = row / (p.rows / p.out_channels);
  if (p.bias != nullptr) sum += double(to_accumulator(static_cast<const T*>(p.bias)[channel]));
  return p.rectifier(static_cast<float>(sum));
}

// A warp's staged outputs whose sums were perhaps not finite, by the definition: sums in float32 may overflow on their
// way to a finite one.
template <typename T, int kTaps>
__device__ __noinline__ void repair_runs(const ShufflePlanesParams& p, ShufflePlanesItem item, unsigned char* to,
                                         int first_row) {
  const int lane = threadIdx.x % 32, taps = p.kernel_height * kTaps, line = p.width.divisor * kTaps;
  for (int i = 0; i < 16 / taps && first_row + i * taps < p.rows; ++i) {
    const int skew = find_skew(p, find_planes_run(p, item, first_row / taps + i, kTaps));
    T* const run = reinterpret_cast<T*>(to + i * p.run_bytes + skew);
    for (int at = lane; at < item.count * taps; at += 32) {
      if (p.rectifier.shows_finite(to_accumulator(run[at]))) continue;
      const int of = at / line, x = at % line;
      const int row = first_row + i * taps + of % p.kernel_height * kTaps + x % kTaps;
      run[at] =
          from_accumulator<T>(make_planes_output<T>(p, item, of / p.kernel_height * p.width.divisor + x / kTaps, row));
    }
  }
}

// Four neighbouring outputs of what a lane has of every eight columns: two taps of two positions, or, by exchange with
// the lane that has the other taps, four taps of one.
template <typename T, int kTaps>
__device__ __forceinline__ void join_taps(const float (&s)[4], uint32_t (&word)[2], int lane) {
  word[0] = round_pair<T>(s[0], s[2]), word[1] = round_pair<T>(s[1], s[3]);
  if constexpr (kTaps == 4) {
    const bool upper = lane & 4;  // keeps the second position
    const uint32_t other = __shfl_xor_sync(~0u, upper ? word[0] : word[1], 4);
    (upper ? word[0] : word[1]) = other;
  }
}

// Stages them if their place exists; `mark` becomes NaN if one is not finite.
template <typename T>
__device__ __forceinline__ void stage_words(const uint32_t (&word)[2], uint32_t to, uint32_t place,
                                            uint32_t (&mark)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0xffff;\n@exists st.shared.v2.b32 [%2], {%0, %1};\n}" ::"r"(
          word[0]),
      "r"(word[1]), "r"(to + place), "r"(place)
      : "memory");
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(mark[i]) : "r"(word[i]), "r"(0));
    } else {
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(mark[i]) : "r"(word[i]), "r"(0));
    }
  }
#endif
}

// Where pairs of positions go in a run, in bytes, two in a word, 0xffff: nowhere; those of every fourth lane 64 bytes
// apart in shared memory. A warpgroup.
template <int kTaps, int kColumns>
__device__ __forceinline__ void find_planes_places(const ShufflePlanesParams& p, uint32_t to) {
  const int lane = threadIdx.x % 128 / 16, j = threadIdx.x % 16;
  if (lane >= 4 || j >= (kColumns + 15) / 16) return;
  const int skipped = (p.kernel_height - 1) * p.width.divisor * (kTaps * 2);
  uint32_t places = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = (2 * j + half) * 8 + lane * 2;
    int rest = position;
    const int line = p.width(rest), place = position * (kTaps * 2) + line * skipped;
    places |= (line >= p.lines ? 0xffffu : static_cast<uint32_t>(place)) << half * 16;
  }
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + lane * 64 + j * 4), "r"(places) : "memory");
}

// A lane's of them: in registers where there are enough, else loaded when they are needed.
template <int kColumns>
struct ShufflePlanesPlaces {
  static constexpr bool kHeld = shuffle_planes_teams(kColumns) == 2;
  static constexpr int kWords = kHeld ? (kColumns + 15) / 16 : 1;
  uint32_t from, held[kWords];

  __device__ __forceinline__ void begin(uint32_t table) {
    from = table + threadIdx.x % 4 * 64;
#pragma unroll
    for (int j = 0; kHeld && j < kWords; ++j) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(held[j]) : "r"(from + j * 4) : "memory");
    }
  }
  // Those of four blocks of positions.
  __device__ __forceinline__ void find(int first, uint32_t (&places)[2]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        places[i] = first / 2 + i < kWords ? held[first / 2 + i] : 0;
        asm volatile("" : "+r"(places[i]));  // no copies of both halves
      }
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(places[0]), "=r"(places[1]) : "r"(from + first * 2));
    }
  }
};

// What bias adds to a lane's rows, two taps of a channel.
template <typename T>
__device__ __forceinline__ T load_term(const ShufflePlanesParams& p, int row) {
  int channel = row >> p.taps_shift;
  channel = p.kernel_depth(channel);
  return p.bias != nullptr && channel < p.out_channels ? __ldg(static_cast<const T*>(p.bias) + channel) : T{};
}

// A lane's first row of a warp's 16, a pair of taps, as weights are packed.
template <int kTaps>
__device__ __forceinline__ int find_pair_row(const ShufflePlanesParams& p) {
  const int pair = threadIdx.x % 32 / 4;
  return kTaps == 2 && p.taps_shift == 2 ? pair % 4 * 4 + pair / 4 * 2 : pair * 2;
}
// Where in a warp's staged runs a lane's pairs of taps begin, but for a skew.
template <int kTaps>
__device__ __forceinline__ int find_pair(const ShufflePlanesParams& p) {
  const int row = find_pair_row<kTaps>(p), height = (row & ((1 << p.taps_shift) - 1)) / kTaps;
  return (row >> p.taps_shift) * p.run_bytes + height * p.width.divisor * (kTaps * 2) + row % kTaps * 4;
}

// Stores 64 rows' outputs. `staging`: the warp's part of shared memory; `target`: where the first run goes, in
// elements.
template <typename T, int kTaps, int kColumns>
__device__ __forceinline__ void store_planes(const ShufflePlanesParams& p, const ShufflePlanesItem& item,
                                             float (&sum)[kColumns / 8][4], float term, int64_t target, int pair,
                                             const ShufflePlanesPlaces<kColumns>& places, uint32_t staging,
                                             int first_row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kBlocks = kColumns / 8;
  const int lane = threadIdx.x % 32, first_run = first_row >> p.taps_shift;
  uint32_t mark[2] = {};  // NaN if any sum is not finite
  if (p.rectifier.on) {
    float finite = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) finite = fmaf(sum[j][i] += term, 0, finite);
    }
    if (!is_finite(finite)) mark[0] = ~0u;
    p.rectifier(sum);
    term = 0;
  }
  uint32_t at = staging + pair;
  if (p.skews)
    at += find_skew(p, find_planes_run(p, item, first_run + (find_pair_row<kTaps>(p) >> p.taps_shift), kTaps));
  // Several at a time: a store would wait for its own place.
#pragma unroll
  for (int first = 0; first < kBlocks; first += 4) {
    uint32_t words[4][2], place[2];
    places.find(first, place);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= kBlocks) continue;
      float (&s)[4] = sum[first + i];
#pragma unroll
      for (float& x : s) x += term;
      join_taps<T, kTaps>(s, words[i], lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= kBlocks) continue;
      stage_words<T>(words[i], at, i % 2 == 0 ? place[i / 2] & 0xffff : place[i / 2] >> 16, mark);
    }
  }
  __syncwarp();
  if (__any_sync(~0u, ((mark[0] | mark[1]) & 0x7fff7fffu) != 0)) {
    repair_runs<T, kTaps>(p, item, static_cast<unsigned char*>(__cvta_shared_to_generic(staging)), first_row);
    __syncwarp();
  }
  fence_shared_writes();
  __syncwarp();
  if (elect_one()) {
    const int runs = min(16 >> p.taps_shift, (p.rows >> p.taps_shift) - first_run);
    const int bytes = item.count << (p.taps_shift + 1);
    uint32_t source = staging;
    int depth_tap = first_run;
    p.kernel_depth(depth_tap);
#pragma unroll 1
    for (int i = 0; i < runs; ++i, source += p.run_bytes) {
      store_run(static_cast<T*>(p.output) + target, source + find_skew(p, target), bytes);
      target += p.output_plane;
      if (++depth_tap == p.kernel_depth.divisor) target += p.next_channel, depth_tap = 0;
    }
    commit_bulk();
  }
#endif
}

}  // namespace fastconvt::cuda
