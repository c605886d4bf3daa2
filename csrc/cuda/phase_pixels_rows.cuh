// From sums in registers to channels_last outputs: a warp turns its sums into rows of channels in shared memory, one a
// cell, and they leave by bulk stores while the next item is multiplied.
#pragma once

#include "epilogue.cuh"
#include "phase_pixels_definition.cuh"

namespace fastconvt::cuda {

// Cells whose rows a lane stores: of the warp's 16 * row_tiles, number lane + 32 * k.
template <int kRowTiles>
constexpr int kPhasePixelsOwnRows = kRowTiles < 2 ? 1 : kRowTiles / 2;

// The cell, in its box, of a lane's row; first_cell is the warpgroup's.
__device__ __forceinline__ int own_cell(int first_cell, int k) {
  const int row = threadIdx.x % 32 + 32 * k;
  return first_cell + row / 16 * 64 + threadIdx.x / 32 % 4 * 16 + row % 16;
}

// Where the outputs of a lane's rows stand, from that of the box's first cell.
template <int kRowTiles>
__device__ __forceinline__ void find_places(const PhasePixelsParams& p, int first_cell,
                                            int (&places)[kPhasePixelsOwnRows<kRowTiles>]) {
#pragma unroll
  for (int k = 0; k < kPhasePixelsOwnRows<kRowTiles>; ++k) {
    const PhasePixelsCell cell = find_cell(p, own_cell(first_cell, k));
    int64_t at = cell.at[0] * p.out.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].stride * p.out.axis[a];
    places[k] = static_cast<int>(at);
  }
}

// Whether a cell of an item has an output.
__device__ __forceinline__ bool has_output(const PhasePixelsParams& p, const PhasePixelsTask& task,
                                           const PhasePixelsShare& share, int number) {
  const PhasePixelsCell cell = find_cell(p, number);
  return cell.at[0] < task.batches && cell.at[1] < share.counts[0] && cell.at[2] < share.counts[1] &&
         cell.at[3] < share.counts[2];
}

// A warp's sums go to its rows in shared memory. Returns whether this lane's were finite.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ bool stage_rows(const PhasePixelsParams& p, const float (&sum)[kRowTiles][kColumnTiles][4],
                                           const Epilogue& epilogue, const float* terms, uint32_t staged) {
  const int lane = threadIdx.x % 32;
  float probe = 0;
  if (p.bulk) wait_for_stores();  // of the item before
  __syncwarp();
  // Lanes 0 to 15 address the cells of a tile of channels, 16 to 31 those of the next one.
  uint32_t to = staged + lane % 16 * p.staging_pitch + lane / 16 * 16;
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += 2) {
    float2 term[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) term[k] = *reinterpret_cast<const float2*>(terms + (j + k) * 8 + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      uint32_t r[4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float low = sum[i][j + k][half * 2], high = sum[i][j + k][half * 2 + 1];
          probe = fmaf(low, 0.f, fmaf(high, 0.f, probe));
          const Pack<T, 2> pair{{epilogue(low, term[k].x), epilogue(high, term[k].y)}};
          r[k * 2 + half] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      store_matrices(to + i * 16 * p.staging_pitch, r);
    }
    to += 32;
  }
  return probe == 0.f;
}

// Makes those of a lane's staged outputs that are not finite again.
template <typename T>
__device__ __noinline__ void repair_row(const PhasePixelsParams& p, T* row, int64_t place, int channels) {
  for (int c = 0; c < channels; ++c) {
    if (!p.rectify.shows_finite(to_accumulator(row[c]))) row[c] = phase_pixels_definition<T>(p, place + c);
  }
}

// Stores a warp's rows of `channels` channels: lanes go through them, 16 bytes or an element each. A lane knows where
// its own rows stand, and has -1 for one that has no output.
template <typename T, int kOwnRows>
__device__ __forceinline__ void move_rows(const PhasePixelsParams& p, const int (&places)[kOwnRows], T* output,
                                          const T* rows, int count, int channels) {
  const int lane = threadIdx.x % 32, pitch = p.staging_pitch / sizeof(T), wide = p.vectors ? 8 : 1;
  const int vectors = channels / wide;
  for (int first = 0; first < count * vectors; first += 32) {
    const int index = first + lane, row = min(index / vectors, count - 1), v = index - row * vectors;
    int place = __shfl_sync(~0u, places[0], row % 32);
    if constexpr (kOwnRows == 2) {
      const int other = __shfl_sync(~0u, places[1], row % 32);
      if (row >= 32) place = other;
    }
    if (place < 0 || v >= vectors) continue;
    T* const to = output + place + v * wide;
    const T* const from = rows + row * pitch + v * wide;
    if (wide == 8) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      *to = *from;
    }
  }
}

// A warp's staged rows go to memory.
template <typename T, int kRowTiles, int kColumns>
__device__ __forceinline__ void store_rows(const PhasePixelsShared& shared, const PhasePixelsTask& task,
                                           const PhasePixelsShare& share,
                                           const int (&places)[kPhasePixelsOwnRows<kRowTiles>], int first_cell,
                                           int first_column, int staged_at, bool finite) {
  constexpr int kOwnRows = kPhasePixelsOwnRows<kRowTiles>;
  const PhasePixelsParams& p = shared.p;
  const int lane = threadIdx.x % 32, first = task.channel_block * p.columns + first_column;
  const int channels = min(kColumns, p.group_out - first);
  if (channels <= 0) return;
  T* const output = static_cast<T*>(p.output) + share.place + first;
  T* const rows = reinterpret_cast<T*>(shared.bytes + staged_at);
  int own[kOwnRows];
#pragma unroll
  for (int k = 0; k < kOwnRows; ++k) {
    const bool exists =
        lane + 32 * k < 16 * kRowTiles && (share.whole || has_output(p, task, share, own_cell(first_cell, k)));
    own[k] = exists ? places[k] : -1;
  }
  if (__any_sync(~0u, !finite)) {
#pragma unroll 1
    for (int k = 0; k < kOwnRows; ++k) {
      T* const row = rows + (lane + 32 * k) * (p.staging_pitch / sizeof(T));
      const int place = k == 0 ? own[0] : own[kOwnRows - 1];
      if (place >= 0) repair_row<T>(p, row, share.place + first + place, channels);
    }
  }
  if (p.bulk) fence_shared_writes();
  __syncwarp();
  if (p.bulk) {
    const uint32_t from = shared_address(rows) + lane * p.staging_pitch;
#pragma unroll
    for (int k = 0; k < kOwnRows; ++k) {
      if (own[k] >= 0) bulk_store(output + own[k], from + 32 * k * p.staging_pitch, channels * sizeof(T));
    }
    commit_stores();
  } else {
    move_rows(p, own, output, rows, 16 * kRowTiles, channels);
  }
}

// Makes a thread's outputs that are not finite again, after they have been stored.
template <typename T>
__device__ __noinline__ void repair_stored(const PhasePixelsParams& p, int64_t place, int count) {
  T* const output = static_cast<T*>(p.output);
  for (int c = 0; c < count; ++c) {
    T& stored = output[place + c];
    if (!p.rectify.shows_finite(to_accumulator(stored))) stored = phase_pixels_definition<T>(p, place + c);
  }
}

// Where the outputs of a thread's cells stand, from that of the box's first cell.
template <int kRowTiles>
__device__ __forceinline__ void find_rows(const PhasePixelsParams& p, int first_cell, int (&rows)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PhasePixelsCell cell =
          find_cell(p, first_cell + i * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + threadIdx.x % 32 / 4);
      int64_t at = cell.at[0] * p.out.batch;
#pragma unroll
      for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].stride * p.out.axis[a];
      rows[i][half] = static_cast<int>(at);
    }
}

template <typename T, int kRowTiles, int kColumnTiles>
__device__ __noinline__ void repair_sums(const PhasePixelsParams& p, int64_t place, int first, int first_cell,
                                         uint32_t exists) {
  int rows[kRowTiles][2];
  find_rows(p, first_cell, rows);
#pragma unroll 1
  for (int j = 0; j < kColumnTiles; j += 4) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((exists >> (i * 2 + half) & 1) == 0) continue;
        repair_stored<T>(p, place + rows[i][half] + j * 8, min(8, max(0, p.group_out - first - j * 8)));
      }
  }
}

// The outputs of a warpgroup's sums, straight from registers, where weights are packed in such an order. A lane has
// eight neighbouring channels of four tiles.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ void store_sums(const PhasePixelsParams& p, const PhasePixelsTask& task,
                                           const PhasePixelsShare& share,
                                           const float (&sum)[kRowTiles][kColumnTiles][4], const Epilogue& epilogue,
                                           const int (&rows)[kRowTiles][2], int first_cell, int first_column,
                                           const float* terms) {
  constexpr int kTiles = 4, kWide = 2 * kTiles;
  const int lane = threadIdx.x % 32, own = first_column + lane % 4 * kWide;
  const int first = task.channel_block * p.columns + own;
  T* const output = static_cast<T*>(p.output) + share.place + first;
  uint32_t exists = ~0u;
  if (!share.whole) {
    exists = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int cell = first_cell + i * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
        if (has_output(p, task, share, cell)) exists |= 1u << (i * 2 + half);
      }
  }
  float probe = 0;
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += kTiles) {
    float term[kWide];
#pragma unroll
    for (int c = 0; c < kWide; c += 4) {
      *reinterpret_cast<float4*>(term + c) = *reinterpret_cast<const float4*>(terms + own + j * 8 + c);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pack<T, kWide> value;
#pragma unroll
        for (int c = 0; c < kWide; ++c) {
          const float x = sum[i][j + c / 2][half * 2 + c % 2];
          probe = fmaf(x, 0.f, probe);
          value.value[c] = epilogue(x, term[c]);
        }
        if ((exists >> (i * 2 + half) & 1) == 0) continue;
        T* const to = output + rows[i][half] + j * 8;
        if (p.vectors) {
          if (first + j * 8 < p.group_out) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
        } else {
#pragma unroll
          for (int c = 0; c < kWide; ++c) {
            if (first + j * 8 + c < p.group_out) to[c] = value.value[c];
          }
        }
      }
  }
  if (probe != 0.f) repair_sums<T, kRowTiles, kColumnTiles>(p, share.place + first, first, first_cell, exists);
}

// Outputs of an item without taps.
template <typename T, int kThreads, class Epilogue>
__device__ __noinline__ void store_constants(const PhasePixelsParams& p, const PhasePixelsTask& task,
                                             const PhasePixelsShare& share, const Epilogue& epilogue,
                                             const float* terms) {
  const int channels = min(p.columns, p.group_out - task.channel_block * p.columns);
  const int wide = p.vectors ? 8 : 1, vectors = channels / wide;
  const int height = share.counts[1], width = share.counts[2], lines = task.batches * share.counts[0] * height;
  T* const output = static_cast<T*>(p.output) + share.place + task.channel_block * p.columns;
  const int lane = threadIdx.x % 32, step = static_cast<int>(p.axis[2].stride * p.out.axis[2]);
  for (int line = threadIdx.x / 32; line < lines; line += kThreads / 32) {
    const int row = line / height, n = row / share.counts[0];
    T* const line_output = output + n * p.out.batch +
                           static_cast<int64_t>(row - n * share.counts[0]) * p.axis[0].stride * p.out.axis[0] +
                           static_cast<int64_t>(line - row * height) * p.axis[1].stride * p.out.axis[1];
    int v = lane % vectors, w = lane / vectors;
    const int more_v = 32 % vectors, more_w = 32 / vectors;
    while (w < width) {
      T* const to = line_output + static_cast<int64_t>(w) * step + v * wide;
      if (wide == 8) {
        Pack<T, 8> value;
#pragma unroll
        for (int c = 0; c < 8; ++c) value.value[c] = epilogue(0.f, terms[v * 8 + c]);
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
      } else {
        *to = epilogue(0.f, terms[v]);
      }
      v += more_v, w += more_w;
      if (v >= vectors) v -= vectors, ++w;
    }
  }
}

}  // namespace fastconvt::cuda
