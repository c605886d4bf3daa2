// From sums in registers to outputs in memory. Channels-last: straight from registers, a lane has neighbouring
// channels. Contiguous: the phases of an item meet in shared memory, and a table tells for each output of a run where.
#pragma once

#include "epilogue.cuh"
#include "phase_tma_item.cuh"

namespace fastconvt::cuda {

// A run of outputs of one channel: where it starts, in elements, -1: nowhere; and what it adds to a cell's number.
struct PhaseTmaLine {
  int64_t place;
  int cell;
};

// One sum by the definition, in float64: only taps and inputs that exist are multiplied.
template <typename T>
__device__ __noinline__ T phase_tma_definition(const PhaseTmaParams& p, int64_t place) {
  int64_t rest = place, o[3];
  const int64_t n = rest / p.out.batch;
  rest -= n * p.out.batch;
  int64_t channel;
  if (p.contiguous) {
    channel = rest / p.out.channel;
    rest -= channel * p.out.channel;
  }
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    o[a] = rest / p.out.axis[a];
    rest -= o[a] * p.out.axis[a];
  }
  if (!p.contiguous) channel = rest;
  const int64_t group = channel / p.group_out;
  const T* const input = static_cast<const T*>(p.input) + n * p.in.batch + group * p.group_in * p.in.channel;
  const T* const weight =
      static_cast<const T*>(p.weight) + (group * p.group_in * p.group_out + channel - group * p.group_out) * p.taps;
  double sum = p.bias == nullptr ? 0 : double(to_accumulator(static_cast<const T*>(p.bias)[channel]));
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int of_rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int t = of_rest % p.axis[a].kernel;
      of_rest /= p.axis[a].kernel;
      const int64_t at = o[a] + p.axis[a].padding - static_cast<int64_t>(t) * p.axis[a].dilation;
      exists = exists && at >= 0 && at % p.axis[a].stride == 0 && at / p.axis[a].stride < p.axis[a].in;
      offset += at / p.axis[a].stride * p.in.axis[a];
    }
    if (!exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      sum = fma(double(to_accumulator(input[offset + c * p.in.channel])),
                double(to_accumulator(weight[static_cast<int64_t>(c) * p.group_out * p.taps + tap])), sum);
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// Makes this thread's outputs that are not finite again, after they have been stored.
template <typename T>
__device__ __noinline__ void repair_stored(const PhaseTmaParams& p, int64_t place, int count) {
  T* const output = static_cast<T*>(p.output);
  for (int c = 0; c < count; ++c) {
    if (!is_finite(to_accumulator(output[place + c]))) output[place + c] = phase_tma_definition<T>(p, place + c);
  }
}

// For every channel of the item what the epilogue makes of a sum of nothing, and, as float, what it adds.
template <typename T, class Epilogue>
__device__ __forceinline__ void fill_constants(const PhaseTmaParams& p, const PhaseTmaItem& item, int columns,
                                               const Epilogue& epilogue, T* constants) {
  const int channel = item.channel_block * columns + threadIdx.x;
  if (threadIdx.x >= columns) return;
  float term = 0;
  if (channel < p.group_out) term = epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel);
  constants[threadIdx.x] = epilogue(0.f, term);
}

// Channels-last: the outputs of a warpgroup's sums. `columns` is the first of its columns among the block's.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ void store_sums(const PhaseTmaParams& p, const PhaseTmaItem& item,
                                           const PhaseTmaPhase& phase, const float (&sum)[kRowTiles][kColumnTiles][4],
                                           const Epilogue& epilogue, int first_cell, int first_channel) {
  constexpr int kTiles = 4, kWide = 2 * kTiles;  // that make the channels of a lane
  const int lane = threadIdx.x % 32, own = lane % 4 * kWide, first = first_channel + own;
  const T* const bias = static_cast<const T*>(epilogue.bias);
  T* const output = static_cast<T*>(p.output);
  int64_t place[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PhaseTmaCell cell = find_cell(p, first_cell + i * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4);
      const int n = item.first[0] + cell.at[0];
      bool exists = n < p.batch;
      int64_t at = n * p.out.batch + int64_t{item.group} * p.group_out + first;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int o = (item.first[a + 1] + cell.at[a + 1]) * p.axis[a].stride + phase.f[a];
        exists = exists && o < p.axis[a].out;
        at += o * p.out.axis[a];
      }
      place[i][half] = exists ? at : -1;
    }
  float probe = 0;
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += kTiles) {
    const int channel = first + j * 8;
    float term[kWide];
#pragma unroll
    for (int c = 0; c < kWide; ++c) {
      term[c] = bias != nullptr && channel + c < p.group_out
                    ? epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel + c)
                    : 0.f;
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
        if (place[i][half] < 0) continue;
        T* const to = output + place[i][half] + j * 8;
        if (p.vectors) {
          if (channel < p.group_out) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
        } else {
#pragma unroll
          for (int c = 0; c < kWide; ++c) {
            if (channel + c < p.group_out) to[c] = value.value[c];
          }
        }
      }
  }
  if (probe == 0.f) return;
#pragma unroll 1
  for (int j = 0; j < kColumnTiles; j += kTiles) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (place[i][half] < 0) continue;
        repair_stored<T>(p, place[i][half] + j * 8, min(kWide, max(0, p.group_out - first - j * 8)));
      }
  }
}

// Channels-last: outputs of an item without taps.
template <typename T, int kThreads>
__device__ __noinline__ void store_constants(const PhaseTmaParams& p, const PhaseTmaItem& item,
                                             const PhaseTmaPhase& phase, int columns, const T* constants) {
  if (phase.f[2] >= p.axis[2].stride) return;
  const int counts[3] = {count_cells(p, item, 0, phase.f[0]), count_cells(p, item, 1, phase.f[1]),
                         count_cells(p, item, 2, phase.f[2])};
  const int batches = min(p.box_batch, p.batch - item.first[0]);
  const int channels = min(columns, p.group_out - item.channel_block * columns);
  const int wide = p.vectors ? 8 : 1, vectors = channels / wide;
  const int lines = batches * counts[0] * counts[1];
  T* const output = static_cast<T*>(p.output) + int64_t{item.group} * p.group_out + item.channel_block * columns;
  const int lane = threadIdx.x % 32;
  for (int line = threadIdx.x / 32; line < lines; line += kThreads / 32) {
    const int row = line / counts[1], n = row / counts[0];
    const int at[3] = {row - n * counts[0], line - row * counts[1], 0};
    int64_t place = (item.first[0] + n) * p.out.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      place += ((item.first[a + 1] + at[a]) * p.axis[a].stride + phase.f[a]) * p.out.axis[a];
    }
    const int step = static_cast<int>(p.axis[2].stride * p.out.axis[2]);
    int v = lane % vectors, w = lane / vectors;
    const int more_v = 32 % vectors, more_w = 32 / vectors;
    while (w < counts[2]) {
      T* const to = output + place + static_cast<int64_t>(w) * step + v * wide;
      if (wide == 8) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(constants + v * 8);
      } else {
        *to = constants[v];
      }
      v += more_v, w += more_w;
      if (v >= vectors) v -= vectors, ++w;
    }
  }
}

// Contiguous: a warpgroup's sums go where their phase stands in each channel. Returns whether all were finite.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ bool stage_sums(const PhaseTmaParams& p, const PhaseTmaItem& item,
                                           const float (&sum)[kRowTiles][kColumnTiles][4], const Epilogue& epilogue,
                                           int first_cell, int first_channel, uint32_t staging) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float probe = 0;
  // Lanes 0 to 7 address the first eight cells of a tile of channels, 8 to 15 the next eight, 16 to 31 the next tile.
  uint32_t to =
      staging + (lane % 8 + lane / 16 * 8) * p.channel_pitch + (first_cell + warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += 2) {
    float term[2][2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int channel = first_channel + (j + k) * 8 + lane % 4 * 2 + c;
        term[k][c] = channel < p.group_out
                         ? epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel)
                         : 0.f;
      }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      uint32_t r[4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Pack<T, 2> pair;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float x = sum[i][j + k][half * 2 + c];
            probe = fmaf(x, 0.f, probe);
            pair.value[c] = epilogue(x, term[k][c]);
          }
          r[k * 2 + half] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      store_four_transposed(to + i * 128, r);
    }
    to += 16 * p.channel_pitch;
  }
  return probe == 0.f;
}

// Contiguous: for every output of a run where its sum is staged, as the number of an element of a channel; -1: it has
// none. The same for all items.
template <int kThreads>
__device__ __forceinline__ void fill_table(const PhaseTmaParams& p, short* table) {
  const int heights = p.merged ? p.axis[1].stride : 1;
  for (int i = threadIdx.x; i < p.run_rows * p.run_width; i += kThreads) {
    const int row = i / p.run_width, column = i - row * p.run_width;
    const int h = row / heights, f = row - h * heights, w = column / p.width_group;
    const int g = column - w * p.width_group;
    int slot = p.axis[2].phase[g].slot;
    const int outer = p.merged ? p.axis[1].phase[f].slot : 0;
    const bool inside = w < p.axis[2].box && (!p.merged || h < p.axis[1].box);
    if (slot < 0 || outer < 0 || !inside) {
      table[i] = -1;
    } else {
      slot += outer * p.width_slots;
      table[i] = static_cast<short>(slot * p.slot_pitch + cell_number(p, p.merged ? h : 0, w));
    }
  }
}

// Contiguous: the runs of an item. Returns how many.
template <int kThreads>
__device__ __forceinline__ int fill_lines(const PhaseTmaParams& p, const PhaseTmaItem& item, PhaseTmaLine* lines) {
  const int batches = min(p.box_batch, p.batch - item.first[0]);
  const int planes = count_cells(p, item, 0, item.f[0]);
  const int heights = p.merged ? 1 : count_cells(p, item, 1, item.f[1]);
  const int count = batches * planes * heights;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int row = i / heights, h = i - row * heights, n = row / planes, d = row - n * planes;
    const int o0 = (item.first[1] + d) * p.axis[0].stride + item.f[0];
    const int o1 = (item.first[2] + h) * p.axis[1].stride + item.f[1],
              o2 = item.first[3] * p.axis[2].stride + item.f[2] * p.width_group;
    lines[i].place = (item.first[0] + n) * p.out.batch + o0 * p.out.axis[0] + o1 * p.out.axis[1] + o2 * p.out.axis[2];
    lines[i].cell = (n << p.shift_batch) + (d << p.shift_depth) + (h << p.shift_height);
  }
  return count;
}

// How many outputs a run has. Where an item makes some of the phases only, so many of every cell.
__device__ __forceinline__ int run_length(const PhaseTmaParams& p, const PhaseTmaItem& item) {
  const int from = item.first[3] * p.axis[2].stride;
  const int width = item.last[2] ? p.axis[2].out - from : p.axis[2].box * p.axis[2].stride;
  if (!p.merged) return p.width_group == p.axis[2].stride ? width : width / p.axis[2].stride * p.width_group;
  const int row = item.first[2] * p.axis[1].stride;
  return width * (item.last[1] ? p.axis[1].out - row : p.axis[1].box * p.axis[1].stride);
}

// Where output number e of a run stands in it.
__device__ __forceinline__ int run_offset(const PhaseTmaParams& p, int e) {
  return p.width_group == p.axis[2].stride ? e : e + e / p.width_group * (p.axis[2].stride - p.width_group);
}

// Makes staged sums that are not finite again.
template <typename T, int kThreads>
__device__ __noinline__ void repair_staged(const PhaseTmaParams& p, const PhaseTmaItem& item, int columns, int lines,
                                           const PhaseTmaLine* line, const short* table, unsigned char* staging) {
  const int channels = min(columns, p.group_out - item.channel_block * columns), length = run_length(p, item);
  const int64_t first = int64_t{item.group} * p.group_out + item.channel_block * columns;
  for (int i = threadIdx.x; i < channels * length; i += kThreads) {
    const int channel = i / length, e = i - channel * length;
    if (table[e] < 0) continue;
    for (int l = 0; l < lines; ++l) {
      T* const at = reinterpret_cast<T*>(staging + channel * p.channel_pitch) + table[e] + line[l].cell;
      if (is_finite(to_accumulator(*at))) continue;
      *at = phase_tma_definition<T>(p, line[l].place + (first + channel) * p.out.channel + run_offset(p, e));
    }
  }
}

// Stores what is staged, eight outputs at a time; `constant`: the item has no tap. Every eighth channel of a run is
// aligned alike, so a thread finds its outputs' places once for all of them.
template <typename T, int kThreads>
__device__ __forceinline__ void store_runs(const PhaseTmaParams& p, const PhaseTmaItem& item, int columns, int lines,
                                           const PhaseTmaLine* line, const short* table, const T* constants,
                                           const unsigned char* staging, bool constant) {
  const int channels = min(columns, p.group_out - item.channel_block * columns), length = run_length(p, item);
  const int64_t first = int64_t{item.group} * p.group_out + item.channel_block * columns;
  const int vectors = (length + 7) / 8 + (p.vectors ? 0 : 1), jobs = vectors * lines * 8;
#pragma unroll 1
  for (int job = threadIdx.x; job < jobs; job += kThreads) {
    const int rest = job / vectors, v = job - rest * vectors, begin = rest / lines, l = rest - begin * lines;
    T* to = static_cast<T*>(p.output) + line[l].place + (first + begin) * p.out.channel;
    const int skew = p.vectors ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(T));
    const int e = v * 8 - skew;
    const bool whole = e >= 0 && e + 8 <= length;
    to += e;
    int at[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      at[k] = constant ? -1 : table[min(max(e + k, 0), length - 1)];
      if (at[k] >= 0) at[k] += line[l].cell;
    }
    const unsigned char* from = staging + begin * p.channel_pitch;
#pragma unroll 2
    for (int channel = begin; channel < channels; channel += 8) {
      const T nothing = constants[channel];
      Pack<T, 8> value;
#pragma unroll
      for (int k = 0; k < 8; ++k) value.value[k] = at[k] < 0 ? nothing : reinterpret_cast<const T*>(from)[at[k]];
      if (whole) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (e + k >= 0 && e + k < length) to[k] = value.value[k];
        }
      }
      to += 8 * p.out.channel;
      from += 8 * p.channel_pitch;
    }
  }
}

// The same where every run begins and ends with a whole word: neighbouring lanes store neighbouring words, and no two
// of them read the same bank.
template <typename T, int kThreads>
__device__ __forceinline__ void store_words(const PhaseTmaParams& p, const PhaseTmaItem& item, int columns, int lines,
                                            const PhaseTmaLine* line, const short* table, const T* constants,
                                            const unsigned char* staging, bool constant) {
  constexpr int kStep = 8;  // channels from one of a thread to its next
  const int channels = min(columns, p.group_out - item.channel_block * columns), words = run_length(p, item) / 2;
  const int64_t first = int64_t{item.group} * p.group_out + item.channel_block * columns;
  const int jobs = words * lines * kStep;
#pragma unroll 1
  for (int job = threadIdx.x; job < jobs; job += kThreads) {
    const int rest = job / words, word = job - rest * words, begin = rest / lines, l = rest - begin * lines;
    T* to = static_cast<T*>(p.output) + line[l].place + (first + begin) * p.out.channel + run_offset(p, 2 * word);
    int low = -1, high = -1;
    if (!constant) low = table[2 * word], high = table[2 * word + 1];
    const unsigned char* const from = staging + begin * p.channel_pitch + line[l].cell * 2;
    const unsigned char *from_low = from + low * 2, *from_high = from + high * 2;
#pragma unroll 4
    for (int channel = begin; channel < channels; channel += kStep) {
      Pack<T, 2> value;
      value.value[0] = value.value[1] = constants[channel];
      if (low >= 0) value.value[0] = *reinterpret_cast<const T*>(from_low);
      if (high >= 0) value.value[1] = *reinterpret_cast<const T*>(from_high);
      if (p.words) {
        *reinterpret_cast<Pack<T, 2>*>(to) = value;
      } else {
        to[0] = value.value[0], to[1] = value.value[1];
      }
      to += kStep * p.out.channel;
      from_low += kStep * p.channel_pitch, from_high += kStep * p.channel_pitch;
    }
  }
}

// The same where runs are whole groups of eight cells, aligned, of stride 1 or 2: cells move in groups.
template <typename T, int kThreads>
__device__ __forceinline__ void store_groups(const PhaseTmaParams& p, const PhaseTmaItem& item, int columns, int lines,
                                             const PhaseTmaLine* line, const short* table,
                                             const unsigned char* staging) {
  const int channels = min(columns, p.group_out - item.channel_block * columns), stride = p.axis[2].stride;
  const int vectors = run_length(p, item) / 8;
  const int64_t first = int64_t{item.group} * p.group_out + item.channel_block * columns;
  T* const output = static_cast<T*>(p.output);
  int v = threadIdx.x % vectors, rest = threadIdx.x / vectors;
  int channel = rest / lines, l = rest - channel * lines;
  const int more_v = kThreads % vectors, more = kThreads / vectors;
  const int more_channels = more / lines, more_l = more - more_channels * lines;
  while (channel < channels) {
    T* const to = output + line[l].place + (first + channel) * p.out.channel + v * 8;
    const T* const from = reinterpret_cast<const T*>(staging + channel * p.channel_pitch) + line[l].cell + table[v * 8];
    uint4 value;
    if (stride == 1) {
      value = *reinterpret_cast<const uint4*>(from);
    } else {
      const uint2 even = *reinterpret_cast<const uint2*>(from),
                  odd = *reinterpret_cast<const uint2*>(from + p.slot_pitch);
      value = {__byte_perm(even.x, odd.x, 0x5410), __byte_perm(even.x, odd.x, 0x7632),
               __byte_perm(even.y, odd.y, 0x5410), __byte_perm(even.y, odd.y, 0x7632)};
    }
    *reinterpret_cast<uint4*>(to) = value;
    v += more_v, l += more_l, channel += more_channels;
    if (v >= vectors) v -= vectors, ++l;
    if (l >= lines) l -= lines, ++channel;
  }
}

}  // namespace fastconvt::cuda
