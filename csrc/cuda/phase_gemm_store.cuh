// From sums in registers to outputs in memory: through shared memory, so that neighbours are stored together.
#pragma once

#include "epilogue.cuh"
#include "phase_gemm_stage.cuh"

namespace fastconvt::cuda {

// Stages the sums of a pass: a lane's first row and what its next tile adds. Returns whether all were finite.
// Contiguous: channel by channel, in it all phases of the last axis; else cell by cell.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ bool stage_sums(const PhaseGemmParams& p, const PhaseGemmItem& item, int pass,
                                           const float (&sum)[kRowTiles][kColumnTiles][4], const Epilogue& epilogue,
                                           int first_row, int row_step, unsigned char* staging) {
  const int lane = threadIdx.x % 32;
  float probe = 0;
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const int column = j * 8 + lane % 4 * 2, channel = item.channel_block * kColumnTiles * 8 + column;
    float term[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t of_all = static_cast<int64_t>(item.group) * p.group_out + channel + c;
      term[c] = channel + c < p.group_out ? epilogue.channel_term(of_all) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * row_step + half * 8;
        const float low = sum[i][j][half * 2], high = sum[i][j][half * 2 + 1];
        probe = fmaf(low, 0.f, fmaf(high, 0.f, probe));
        const T a = epilogue(low, term[0]), b = epilogue(high, term[1]);
        if (p.contiguous) {
          T* const to = reinterpret_cast<T*>(staging + column * p.staging_pitch) + row * p.passes + pass;
          to[0] = a;
          to[p.staging_pitch / static_cast<int>(sizeof(T))] = b;
        } else {
          *reinterpret_cast<Pack<T, 2>*>(staging + row * p.staging_pitch + column * sizeof(T)) = Pack<T, 2>{{a, b}};
        }
      }
  }
  return probe == 0.f;
}

// Stores what is staged, V at a time.
template <class V, typename T, int kColumns>
__device__ __forceinline__ void store_staged(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                             const int64_t* table, const unsigned char* staging) {
  constexpr int kWide = sizeof(V) / sizeof(T);
  T* const output = static_cast<T*>(p.output);
  const int64_t first_channel = static_cast<int64_t>(item.group) * p.group_out + item.channel_block * kColumns;
  const int channels = min(kColumns, p.group_out - item.channel_block * kColumns);
  const int run = p.contiguous ? p.axis[2].box.divisor * p.passes : channels;  // elements of a staged row
  const int vectors = (run + kWide - 1) / kWide;
  const int kept = p.contiguous ? min(run, p.axis[2].out - item.first[3] * p.axis[2].stride) : channels;
  const int jobs = vectors * rows * (p.contiguous ? channels : 1);
  // The first job of a thread, and what the next one adds.
  int v = threadIdx.x % vectors, line = threadIdx.x / vectors;
  const int more_v = kPhaseGemmThreads % vectors, more_lines = kPhaseGemmThreads / vectors;
  int channel = p.contiguous ? line / rows : 0, row = p.contiguous ? line - channel * rows : line;
  for (int job = threadIdx.x; job < jobs; job += kPhaseGemmThreads) {
    const int64_t place = table[row];
    if (place >= 0 && v * kWide < kept) {
      const int at = p.contiguous ? channel * p.staging_pitch + (row * run + v * kWide) * static_cast<int>(sizeof(T))
                                  : row * p.staging_pitch + v * static_cast<int>(sizeof(V));
      const V value = *reinterpret_cast<const V*>(staging + at);
      T* const to = output + place + (first_channel + channel) * p.out.channel + v * kWide;
      *reinterpret_cast<V*>(to) = value;
    }
    v += more_v;
    row += more_lines;
    if (v >= vectors) v -= vectors, ++row;
    if (p.contiguous) {
      while (row >= rows) row -= rows, ++channel;
    }
  }
}

// Part of a contiguous row of outputs: where its first element stands, in memory and staged, and how many elements come
// before its first 16-byte word of memory.
template <typename T>
struct StagedRun {
  T* to;
  const T* from;
  int before;
};
template <typename T>
__device__ __forceinline__ StagedRun<T> staged_run(const PhaseGemmParams& p, T* output, int64_t place, int channel,
                                                   int offset, const unsigned char* staging) {
  T* const to = output + place + channel * p.out.channel;
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(T));
  return {to, reinterpret_cast<const T*>(staging + channel * p.staging_pitch) + offset,
          skew == 0 ? 0 : static_cast<int>(16 / sizeof(T)) - skew};
}

// Sixteen staged bytes from anywhere.
template <typename T>
__device__ __forceinline__ uint4 load_unaligned(const T* from) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  uint32_t w[5];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = words[i];
  if constexpr (sizeof(T) == 2) {
    if (address % 4 != 0) {
      w[4] = words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], 16);
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

// The same for contiguous rows that are not aligned alike: the 16-byte words of memory that a row fills, then the
// elements before and after them, one a thread.
template <typename T, int kColumns>
__device__ __forceinline__ void store_unaligned(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                                const int64_t* table, const unsigned char* staging) {
  constexpr int kWide = 16 / sizeof(T);
  T* const output = static_cast<T*>(p.output) +
                    (static_cast<int64_t>(item.group) * p.group_out + item.channel_block * kColumns) * p.out.channel;
  const int channels = min(kColumns, p.group_out - item.channel_block * kColumns);
  const int run = p.axis[2].box.divisor * p.passes;
  const int kept = min(run, p.axis[2].out - item.first[3] * p.axis[2].stride);
  const int words = run / kWide;
  {
    int v = threadIdx.x % words, line = threadIdx.x / words;
    const int more_v = kPhaseGemmThreads % words, more_lines = kPhaseGemmThreads / words;
    int channel = line / rows, row = line - channel * rows;
    while (channel < channels) {
      const int64_t place = table[row];
      const StagedRun<T> at = staged_run(p, output, place, channel, row * run, staging);
      const int begin = at.before + v * kWide;
      if (place >= 0 && begin + kWide <= kept) {
        *reinterpret_cast<uint4*>(at.to + begin) = load_unaligned(at.from + begin);
      }
      v += more_v;
      row += more_lines;
      if (v >= words) v -= words, ++row;
      while (row >= rows) row -= rows, ++channel;
    }
  }
  const int k = threadIdx.x % (2 * kWide);
  for (int line = threadIdx.x / (2 * kWide); line < rows * channels; line += kPhaseGemmThreads / (2 * kWide)) {
    const int channel = line / rows, row = line - channel * rows;
    const int64_t place = table[row];
    if (place < 0) continue;
    const StagedRun<T> at = staged_run(p, output, place, channel, row * run, staging);
    const int whole = kept > at.before ? (kept - at.before) / kWide * kWide : 0;
    const int i = k < kWide ? k : at.before + whole + k - kWide;
    if (k < kWide ? i < min(at.before, kept) : i < kept) at.to[i] = at.from[i];
  }
}

// For every channel of the item what the epilogue adds.
template <int kColumns, class Epilogue>
__device__ __forceinline__ void fill_terms(const PhaseGemmParams& p, const PhaseGemmItem& item,
                                           const Epilogue& epilogue, float* terms) {
  const int channel = item.channel_block * kColumns + threadIdx.x;
  if (threadIdx.x >= kColumns) return;
  terms[threadIdx.x] =
      channel < p.group_out ? epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel) : 0.f;
}

// Stores the sums of an item in channels-last straight from registers, 16 bytes a lane. Returns whether all were
// finite.
template <typename T, int kRowTiles, int kColumnTiles, class Epilogue>
__device__ __forceinline__ bool store_sums(const PhaseGemmParams& p, const PhaseGemmItem& item,
                                           const float (&sum)[kRowTiles][kColumnTiles][4], const Epilogue& epilogue,
                                           const int64_t* table, const float* terms) {
  constexpr int kTiles = 8 / sizeof(T), kWide = 2 * kTiles;  // that make the channels of a lane
  float probe = 0;
  if constexpr (kColumnTiles % kTiles == 0) {
    const int lane = threadIdx.x % 32, own = lane % 4 * kWide, first_row = threadIdx.x / 32 * 16 + lane / 4;
    const int first = item.channel_block * kColumnTiles * 8 + own;
    T* const output = static_cast<T*>(p.output) + static_cast<int64_t>(item.group) * p.group_out + first;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("" ::: "memory");  // a row after the other: few registers
        const int row = first_row + i * 64 + half * 8;
        const int64_t place = row < p.cells ? table[row] : -1;
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += kTiles) {
          Pack<T, kWide> value;
#pragma unroll
          for (int c = 0; c < kWide; ++c) {
            const float x = sum[i][j + c / 2][half * 2 + c % 2];
            probe = fmaf(x, 0.f, probe);
            value.value[c] = epilogue(x, terms[j * 8 + own + c]);
          }
          if (place < 0 || first + j * 8 >= p.group_out) continue;
          T* const to = output + place + j * 8;
          if (p.vector_bytes == 16) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&value);
          } else {
#pragma unroll
            for (int c = 0; c < kWide; ++c) to[c] = value.value[c];
          }
        }
      }
  }
  return probe == 0.f;
}

// Stores a channels-last item without taps: the bias alone. A thread keeps its channel.
template <typename T, int kColumns, class Epilogue>
__device__ __noinline__ void store_constants(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                             const int64_t* table, const Epilogue& epilogue) {
  static_assert(kPhaseGemmThreads % kColumns == 0);
  const int column = threadIdx.x % kColumns, channel = item.channel_block * kColumns + column;
  if (channel >= p.group_out) return;
  const int64_t of_all = static_cast<int64_t>(item.group) * p.group_out + channel;
  const T value = epilogue(0.f, epilogue.channel_term(of_all));
  for (int row = threadIdx.x / kColumns; row < rows; row += kPhaseGemmThreads / kColumns) {
    if (table[row] >= 0) static_cast<T*>(p.output)[table[row] + of_all] = value;
  }
}

// One sum by the definition, in float64: only taps and inputs that exist are multiplied.
template <typename T>
__device__ __noinline__ double phase_gemm_definition(const PhaseGemmParams& p, int n, int group, int channel, int o0,
                                                     int o1, int o2) {
  const int o[3] = {o0, o1, o2};
  const T* const input = static_cast<const T*>(p.input) + n * p.in.batch + group * int64_t{p.group_in} * p.in.channel;
  const T* const weight =
      static_cast<const T*>(p.weight) + (static_cast<int64_t>(group) * p.group_in * p.group_out + channel) * p.taps;
  double sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int t = rest % p.axis[a].kernel;
      rest /= p.axis[a].kernel;
      const int64_t at = int64_t{o[a]} + p.axis[a].padding - static_cast<int64_t>(t) * p.axis[a].dilation;
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
  return sum;
}

// Makes the outputs that are not finite again, by the definition: staged, or in memory where they have been stored.
template <typename T, int kColumns>
__device__ __noinline__ void repair_outputs(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                            const int64_t* table, unsigned char* staging) {
  const int channels = min(kColumns, p.group_out - item.channel_block * kColumns);
  const int run = p.contiguous ? p.axis[2].box.divisor * p.passes : 1;
  for (int i = threadIdx.x; i < rows * run * channels; i += kPhaseGemmThreads) {
    const int channel = i / (rows * run), at = i - channel * rows * run, row = at / run;
    T* place = reinterpret_cast<T*>(staging + channel * p.staging_pitch) + at;
    if (!p.contiguous) place = reinterpret_cast<T*>(staging + at * p.staging_pitch) + channel;
    if (p.direct) {
      place = static_cast<T*>(p.output) + table[row] + static_cast<int64_t>(item.group) * p.group_out +
              item.channel_block * kColumns + channel;
    }
    if (table[row] < 0 || is_finite(to_accumulator(*place))) continue;
    const int box[3] = {p.axis[0].box.divisor, p.axis[1].box.divisor, p.axis[2].box.divisor};
    int rest = p.contiguous ? row : row / box[2];
    const int o2 = p.contiguous ? item.first[3] * p.axis[2].stride + at - row * run
                                : (item.first[3] + row % box[2]) * p.axis[2].stride + item.f[2];
    if (o2 >= p.axis[2].out) continue;
    const int o1 = (item.first[2] + rest % box[1]) * p.axis[1].stride + item.f[1];
    rest /= box[1];
    const int o0 = (item.first[1] + rest % box[0]) * p.axis[0].stride + item.f[0];
    const int n = item.first[0] + rest / box[0], out_channel = item.channel_block * kColumns + channel;
    double sum = phase_gemm_definition<T>(p, n, item.group, out_channel, o0, o1, o2);
    if (p.bias != nullptr) {
      sum += to_accumulator(static_cast<const T*>(p.bias)[int64_t{item.group} * p.group_out + out_channel]);
    }
    *place = from_accumulator<T>(static_cast<float>(sum));
  }
}

template <typename T, int kColumns>
__device__ __forceinline__ void store_tile(const PhaseGemmParams& p, const PhaseGemmItem& item, int rows,
                                           const int64_t* table, const unsigned char* staging) {
  const bool long_runs = p.axis[2].box.divisor * p.passes * sizeof(T) >= 128;
  if (p.contiguous && p.vector_bytes < 16 && long_runs)
    return store_unaligned<T, kColumns>(p, item, rows, table, staging);
  switch (p.vector_bytes) {
    case 16:
      return store_staged<uint4, T, kColumns>(p, item, rows, table, staging);
    case 8:
      return store_staged<uint2, T, kColumns>(p, item, rows, table, staging);
    case 4:
      return store_staged<uint32_t, T, kColumns>(p, item, rows, table, staging);
    default:
      if constexpr (sizeof(T) == 2) return store_staged<uint16_t, T, kColumns>(p, item, rows, table, staging);
  }
}

}  // namespace fastconvt::cuda
