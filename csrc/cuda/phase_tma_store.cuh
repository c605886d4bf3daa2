// From sums in registers to outputs in memory. Channels-last: straight from registers, a lane has neighbouring
// channels. Contiguous: the phases of an item meet in shared memory, and a table tells for each output of a run where.
#pragma once

#include "epilogue.cuh"
#include "phase_tma_item.cuh"

namespace fastconvt::cuda {

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
  return from_accumulator<T>(p.rectify(static_cast<float>(sum)));
}

// Makes this thread's outputs that are not finite again, after they have been stored.
template <typename T>
__device__ __noinline__ void repair_stored(const PhaseTmaParams& p, int64_t place, int count) {
  T* const output = static_cast<T*>(p.output);
  for (int c = 0; c < count; ++c) {
    T& stored = output[place + c];
    if (!p.rectify.shows_finite(to_accumulator(stored))) stored = phase_tma_definition<T>(p, place + c);
  }
}

// Channels-last: where the outputs of a thread's cells stand, from that of the box's first cell.
template <int kRowTiles>
__device__ __forceinline__ void find_rows(const PhaseTmaParams& p, int first_cell, int (&rows)[kRowTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PhaseTmaCell cell =
          find_cell(p, first_cell + i * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + threadIdx.x % 32 / 4);
      int64_t at = cell.at[0] * p.out.batch;
#pragma unroll
      for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].stride * p.out.axis[a];
      rows[i][half] = static_cast<int>(at);
    }
}

// Whether a cell of an item has an output.
__device__ __forceinline__ bool has_output(const PhaseTmaParams& p, const PhaseTmaTask& task,
                                           const PhaseTmaShare& share, int number) {
  const PhaseTmaCell cell = find_cell(p, number);
  return cell.at[0] < task.batches && cell.at[1] < share.counts[0] && cell.at[2] < share.counts[1] &&
         cell.at[3] < share.counts[2];
}

// Channels-last: the outputs of a warpgroup's sums. A lane has eight neighbouring channels of four tiles.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ void store_sums(const PhaseTmaParams& p, const PhaseTmaTask& task,
                                           const PhaseTmaShare& share, const float (&sum)[kRowTiles][kColumnTiles][4],
                                           const Epilogue& epilogue, const int (&rows)[kRowTiles][2], int first_cell,
                                           int first_column, const float* terms) {
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
  if (probe == 0.f) return;
#pragma unroll 1
  for (int j = 0; j < kColumnTiles; j += kTiles) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if ((exists >> (i * 2 + half) & 1) == 0) continue;
        repair_stored<T>(p, share.place + first + rows[i][half] + j * 8,
                         min(kWide, max(0, p.group_out - first - j * 8)));
      }
  }
}

// Channels-last: outputs of an item without taps.
template <typename T, int kThreads, class Epilogue>
__device__ __noinline__ void store_constants(const PhaseTmaParams& p, const PhaseTmaTask& task,
                                             const PhaseTmaShare& share, const Epilogue& epilogue, const float* terms) {
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

// Contiguous: a warpgroup's sums go where their phase stands in each channel. Returns whether all were finite.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ bool stage_sums(const PhaseTmaParams& p, const float (&sum)[kRowTiles][kColumnTiles][4],
                                           const Epilogue& epilogue, int first_cell, const float* terms,
                                           uint32_t staging) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float probe = 0;
  // Lanes 0 to 7 address the first eight cells of a tile of channels, 8 to 15 the next eight, 16 to 31 the next tile.
  uint32_t to =
      staging + (lane % 8 + lane / 16 * 8) * p.channel_pitch + (first_cell + warp * 16 + lane / 8 % 2 * 8) * 2;
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

// Where output number e of a run stands in it.
__device__ __forceinline__ int run_offset(const PhaseTmaParams& p, int e) {
  return p.width_group == p.axis[2].stride ? e : e + e / p.width_group * (p.axis[2].stride - p.width_group);
}

// The channels of an item, and the first one of all.
struct PhaseTmaChannels {
  int count;
  int64_t first;
  __device__ __forceinline__ PhaseTmaChannels(const PhaseTmaParams& p, const PhaseTmaTask& task)
      : count(min(p.columns, p.group_out - task.channel_block * p.columns)),
        first(int64_t{task.group} * p.group_out + task.channel_block * p.columns) {}
};

// Makes staged sums that are not finite again.
template <typename T, int kThreads>
__device__ __noinline__ void repair_staged(const PhaseTmaParams& p, const PhaseTmaTask& task, const PhaseTmaLine* line,
                                           const short* table, unsigned char* staging) {
  const PhaseTmaChannels channels(p, task);
  for (int i = threadIdx.x; i < channels.count * task.length; i += kThreads) {
    const int channel = i / task.length, e = i - channel * task.length;
    if (table[e] < 0) continue;
    for (int l = 0; l < task.lines; ++l) {
      T* const at = reinterpret_cast<T*>(staging + channel * p.channel_pitch) + table[e] + line[l].cell;
      if (p.rectify.shows_finite(to_accumulator(*at))) continue;
      *at = phase_tma_definition<T>(p, line[l].place + (channels.first + channel) * p.out.channel + run_offset(p, e));
    }
  }
}

// Stores what is staged, eight outputs at a time; `constant`: the item has no tap. Every eighth channel of a run is
// aligned alike, so a thread finds its outputs' places once for all of them.
template <typename T, int kThreads, class Epilogue>
__device__ __forceinline__ void store_runs(const PhaseTmaParams& p, const PhaseTmaTask& task, const PhaseTmaLine* line,
                                           const short* table, const Epilogue& epilogue, const float* terms,
                                           const unsigned char* staging, bool constant) {
  const PhaseTmaChannels channels(p, task);
  const int length = task.length, lines = task.lines;
  const int vectors = (length + 7) / 8 + (p.vectors ? 0 : 1), jobs = vectors * lines * 8;
#pragma unroll 1
  for (int job = threadIdx.x; job < jobs; job += kThreads) {
    const int rest = job / vectors, v = job - rest * vectors, begin = rest / lines, l = rest - begin * lines;
    T* to = static_cast<T*>(p.output) + line[l].place + (channels.first + begin) * p.out.channel;
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
    for (int channel = begin; channel < channels.count; channel += 8) {
      const T nothing = epilogue(0.f, terms[channel]);
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

// The same where every run begins and ends with a whole word: neighbouring lanes store neighbouring words, eight of
// them a whole sector of memory, and no two of them read the same bank.
template <typename T, int kThreads, class Epilogue>
__device__ __forceinline__ void store_words(const PhaseTmaParams& p, const PhaseTmaTask& task, const PhaseTmaLine* line,
                                            const short* table, const Epilogue& epilogue, const float* terms,
                                            const unsigned char* staging, bool constant) {
  constexpr int kStep = 8;  // channels from one of a thread to its next: they are aligned alike
  const PhaseTmaChannels channels(p, task);
  const int words = task.length / 2, lines = task.lines;
  const bool runs = p.width_group == p.axis[2].stride && !p.vectors;
  const int slots = runs ? (words + 14) / 8 * 8 : words, jobs = slots * lines * kStep;
#pragma unroll 1
  for (int job = threadIdx.x; job < jobs; job += kThreads) {
    const int rest = job / slots, begin = rest / lines, l = rest - begin * lines;
    int word = job - rest * slots;
    T* to = static_cast<T*>(p.output) + line[l].place + (channels.first + begin) * p.out.channel;
    if (runs) word -= static_cast<int>(reinterpret_cast<uintptr_t>(to) % 32 / 4);
    if (word < 0 || word >= words) continue;
    to += run_offset(p, 2 * word);
    int low = -1, high = -1;
    if (!constant) low = table[2 * word], high = table[2 * word + 1];
    const unsigned char* const from = staging + begin * p.channel_pitch + line[l].cell * 2;
    const unsigned char *from_low = from + low * 2, *from_high = from + high * 2;
#pragma unroll 4
    for (int channel = begin; channel < channels.count; channel += kStep) {
      Pack<T, 2> value;
      value.value[0] = value.value[1] = epilogue(0.f, terms[channel]);
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
__device__ __forceinline__ void store_groups(const PhaseTmaParams& p, const PhaseTmaTask& task,
                                             const PhaseTmaLine* line, const short* table,
                                             const unsigned char* staging) {
  const PhaseTmaChannels channels(p, task);
  const int stride = p.axis[2].stride, vectors = task.length / 8, lines = task.lines;
  T* const output = static_cast<T*>(p.output);
  int v = threadIdx.x % vectors, rest = threadIdx.x / vectors;
  int channel = rest / lines, l = rest - channel * lines;
  const int more_v = kThreads % vectors, more = kThreads / vectors;
  const int more_channels = more / lines, more_l = more - more_channels * lines;
#pragma unroll 2
  while (channel < channels.count) {
    T* const to = output + line[l].place + (channels.first + channel) * p.out.channel + v * 8;
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
