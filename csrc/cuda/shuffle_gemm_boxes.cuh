// Stores of the shuffle GEMM by bulk copies: a warpgroup stages rounded outputs, and its first warp copies them. By
// tensor copies: 64 columns of 64 positions in lines of 128 bytes, swizzled. Contiguous, a box is of positions of one
// row, so that nothing of it lies outside; channels_last, a box is a tile, and what lies past an end is not stored
// (before a begin would be illegal). By runs, channels_last: outputs that are neighbours
// in memory.
#pragma once

#include "device/bulk.cuh"
#include "device/tensor_copy.cuh"
#include "shuffle_gemm_copy.cuh"

namespace fastconvt::cuda {

// Until they have been written, and this thread sees it.
__device__ __forceinline__ void wait_for_bulk_stores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
#endif
}

// 64 columns to a buffer, channels_last: a position's are a line.
template <typename T, int kColumns>
__device__ __forceinline__ void stage_pixels(const ShuffleGemmParams& p, const float (&sum)[kColumns / 8][4], int round,
                                             uint32_t buffer, uint32_t terms, uint32_t (&mark)[4]) {
  const int lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32 % 4;
  float2 term[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) term[j] = load_shared_pair(terms + (round * 64 + j * 8 + 2 * t) * 4);
  const uint32_t line = buffer + (warp * 16 + lane % 8) * 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&s)[4] = sum[round * 8 + j + i];
        words[i] = make_pair<T, false>(p, s[2 * half], s[2 * half + 1], term[j + i]);
        mark_not_finite<T>(mark[half * 2 + i % 2], words[i]);
      }
      store_matrices(line + half * 1024 + (((j + lane / 8) ^ lane % 8) << 4), words);
    }
  }
}

__device__ __forceinline__ void swap_if(bool swap, uint32_t& a, uint32_t& b) {
  const uint32_t old = a;
  a = swap ? b : a;
  b = swap ? old : b;
}

// The same, contiguous: a line is of 64 / kTaps positions of a row of outputs. Lanes take turns, so that those which
// store at once keep to different banks.
template <typename T, int kTaps, int kColumns>
__device__ __forceinline__ void stage_rows(const ShuffleGemmParams& p, const float (&sum)[kColumns / 8][4], int round,
                                           uint32_t buffer, uint32_t terms, uint32_t (&mark)[4]) {
  static_assert(kTaps == 2 || kTaps == 4);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32 % 4;
  float2 term[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) term[j] = load_shared_pair(terms + (round * 64 + j * 8 + 2 * t) * 4);
  const bool other_half = kTaps == 2 ? t & 1 : t >> 1;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t words[2][2];  // eight columns, half
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&s)[4] = sum[round * 8 + j + i];
        words[i][half] = make_pair<T, false>(p, s[2 * half], s[2 * half + 1], term[j + i]);
        mark_not_finite<T>(mark[i * 2 + half], words[i][half]);
      }
      swap_if(other_half, words[i][0], words[i][1]);
    }
    if constexpr (kTaps == 2) {
      const int other = t >> 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) swap_if(other, words[0][half], words[1][half]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (j + (i ^ other)) * 4 + t, vector = warp % 2 * 4 + (half ^ (t & 1)) * 2 + g / 4;
          store_shared(buffer + warp / 2 * 4096 + row * 128 + ((vector ^ (row & 7)) << 4) + g % 4 * 4, words[i][half]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = (j + i) * 2 + (t >> 1), vector = (half ^ (t >> 1)) * 4 + g / 2;
          store_shared(buffer + warp * 2048 + row * 128 + ((vector ^ (row & 7)) << 4) + g % 2 * 8 + (t & 1) * 4,
                       words[i][half]);
        }
      }
    }
  }
}

// What a lane copies of a tile.
struct ShuffleGemmTarget {
  bool exists;
  uint32_t source;  // in a buffer
  int x, y, z, v;   // contiguous: element, row, plane, sample; channels_last: position, line, plane
};
template <bool kContiguous>
__device__ __forceinline__ ShuffleGemmTarget find_box(const ShuffleGemmParams& p, int tile) {
  ShuffleGemmTarget box{};
  if constexpr (!kContiguous) {
    const ShuffleGemmSource source = find_source<kContiguous, true>(p, tile);
    box.exists = threadIdx.x % 32 == 0;
    box.x = source.position, box.y = source.n, box.z = source.slice * p.tap_depth;
  } else {
    int n, position;
    const int at = threadIdx.x % 32 * p.box;
    box.exists = at < 64 && find_position(p, tile, min(at, 63), n, position);
    box.source = at * 128;
    int w = position;
    int h = p.width(w);
    const int d = p.height(h);
    box.x = w * p.width_step;
    box.y = h * p.tap_height, box.z = d * p.tap_depth, box.v = n;
  }
  return box;
}

// Copies 64 columns from `column` on.
template <bool kContiguous>
__device__ __forceinline__ void copy_box(const ShuffleGemmParams& p, const CUtensorMap* map, uint32_t buffer,
                                         const ShuffleGemmTarget& box, int group, int column) {
  if constexpr (kContiguous) {
    const int channel = group * p.group_out + p.channel_columns(column);
    if (box.exists) store_box(map, buffer + box.source, box.x, box.y, box.z, channel, box.v);
  } else {
    int run = p.run(column);
    int line = p.kernel_width(run);
    const int depth = p.kernel_height(line);
    const int x = run * p.out_channels + group * p.group_out + column;
    if (box.exists) store_box(map, buffer, x, box.x, line, box.y, box.z + depth);
  }
}

// Lines of inputs of which a tile has positions: the first one's first position is `begin` in it.
struct ShuffleGemmLines {
  int begin, count;
  __device__ __forceinline__ ShuffleGemmLines(const ShuffleGemmParams& p, int tile) {
    begin = tile;
    if (!p.flat) p.image(begin);
    begin *= 64;
    p.width(begin);
    count = (begin + 63) / p.width.divisor + 1;
  }
  __device__ __forceinline__ int first(const ShuffleGemmParams& p, int line) const {
    return max(0, line * p.width.divisor - begin);
  }
  __device__ __forceinline__ int end(const ShuffleGemmParams& p, int line) const {
    return min(64, (line + 1) * p.width.divisor - begin);
  }
};

// All columns of a tile.
template <typename T>
__device__ __forceinline__ void copy_runs(const ShuffleGemmParams& p, uint32_t image, int tile) {
  const ShuffleGemmLines lines(p, tile);
  const int pixel = p.run.divisor * 2;
  for (int i = threadIdx.x % 32; i < lines.count * p.tap_depth * p.tap_height; i += 32) {
    const int tap = i / lines.count, line = i % lines.count, first = lines.first(p, line);
    const int64_t place = find_shuffle_gemm_place(p, tile, first);
    if (place < 0) continue;
    const int64_t from_first = tap / p.tap_height * p.depth_tap + tap % p.tap_height * p.height_tap;
    store_run(static_cast<T*>(p.output) + place + from_first, image + (tap * 64 + first) * pixel,
              (lines.end(p, line) - first) * pixel);
  }
}

// Before anything is staged: what was staged before has been read. A warpgroup.
__device__ __forceinline__ void wait_for_staging(int warpgroup) {
  if (threadIdx.x % 128 < 32) wait_for_bulk_reads();
  meet_warpgroup(warpgroup);
}

// Returns a mark of what is not finite.
template <typename T, int kTaps, int kColumns>
__device__ __forceinline__ uint32_t store_boxes(const ShuffleGemmParams& p, const CUtensorMap* map,
                                                const float (&sum)[kColumns / 8][4], uint32_t staging, uint32_t terms,
                                                int tile, int group, int block, int warpgroup) {
  constexpr bool kContiguous = kTaps != 0;
  const bool copies = threadIdx.x % 128 < 32;
  ShuffleGemmTarget box{};
  if (copies) box = find_box<kContiguous>(p, tile);
  uint32_t mark[4] = {};
#pragma unroll
  for (int round = 0; round < kColumns / 64; ++round) {
    const int column = block * kColumns + round * 64;
    if (column >= p.columns) break;
    const int number = round & (p.buffers - 1);
    const uint32_t buffer = staging + number * kShuffleGemmStaging;
    if (number == 0) wait_for_staging(warpgroup);
    if constexpr (kContiguous) {
      stage_rows<T, kTaps, kColumns>(p, sum, round, buffer, terms, mark);
    } else {
      stage_pixels<T, kColumns>(p, sum, round, buffer, terms, mark);
    }
    fence_shared_writes();
    meet_warpgroup(warpgroup);
    if (copies) {
      copy_box<kContiguous>(p, map, buffer, box, group, column);
      commit_bulk();
    }
  }
  if constexpr (!kContiguous) {  // lines of a stage past the box hold anything
    const int position = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (position >= p.box_positions) mark[0] = mark[1] = 0;
    if (position + 8 >= p.box_positions) mark[2] = mark[3] = 0;
  }
  return mark[0] | mark[1] | mark[2] | mark[3];
}

// All columns of a tile, in the order of memory: (outer tap, position, column of a run).
template <typename T, int kColumns>
__device__ __forceinline__ uint32_t store_runs(const ShuffleGemmParams& p, const float (&sum)[kColumns / 8][4],
                                               uint32_t image, uint32_t terms, uint32_t offsets, int tile,
                                               int warpgroup) {
  const int lane = threadIdx.x % 32, t = lane % 4, thread = threadIdx.x % 128, pixel = p.run.divisor * 2;
  const uint32_t line = image + (thread / 32 * 16 + lane / 4) * pixel;
  uint32_t mark[4] = {};
  wait_for_staging(warpgroup);
#pragma unroll
  for (int round = 0; round < kColumns / 64; ++round) {
    float2 term[8];
    uint32_t place[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = round * 64 + j * 8 + 2 * t;
      term[j] = load_shared_pair(terms + column * 4), place[j] = load_shared_word(offsets + column * 2);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float (&s)[4] = sum[round * 8 + j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = make_pair<T, false>(p, s[2 * half], s[2 * half + 1], term[j]);
        if (place[j] != ~0u) store_shared(line + half * 8 * pixel + place[j], word);
        mark_not_finite<T>(mark[j % 4], word);
      }
    }
  }
  fence_shared_writes();
  meet_warpgroup(warpgroup);
  if (thread < 32) {
    copy_runs<T>(p, image, tile);
    commit_bulk();
  }
  return mark[0] | mark[1] | mark[2] | mark[3];
}

}  // namespace fastconvt::cuda
