// From sums in registers to the input's gradient in memory, by way of shared memory. A warpgroup stages 64 positions at
// a time, in lines as memory has them: a position's channels, or a channel's positions.
#pragma once

#include "device/bulk.cuh"
#include "device/tensor_copy.cuh"
#include "gradient_gemm_params.h"
#include "gradient_gemm_product.cuh"

namespace fastconvt::cuda {

// What a block makes: neighbouring positions by neighbouring channels of a group.
struct GradientGemmItem {
  int group, first_channel, first_position;
};

__device__ __forceinline__ GradientGemmItem find_item(const GradientGemmParams& p, int index) {
  GradientGemmItem item{};
  int rest = index;
  index = p.column_blocks(rest);
  item.first_channel = rest * p.columns;
  item.group = p.row_blocks(index);
  item.first_position = index * p.rows;
  return item;
}

// An element by the definition, in float64: only outputs that exist are multiplied.
template <typename T>
__device__ __noinline__ T weight_gradient_by_definition(const GradientGemmParams& params, int channel, int element) {
  const GradientGemmDefinition& p = params.definition;
  const int width = p.axis[2].kernel, height = p.axis[1].kernel, depth = p.axis[0].kernel,
            taps = width * height * depth;
  const int out_channel = element / taps, tap = element % taps;
  const int t[3] = {tap / width / height, tap / width % height, tap % width};
  const T* const grad = static_cast<const T*>(p.grad_output) + out_channel * p.out.channel;
  const T* const input = static_cast<const T*>(p.input) + channel * p.in.channel;
  const int in_height = p.axis[1].in.divisor, in_width = p.axis[2].in.divisor;
  double sum = 0;
#pragma unroll 1
  for (int64_t i = 0; i < int64_t{p.batch} * params.image_positions; ++i) {
    const int64_t n = i / params.image_positions;
    const int q = static_cast<int>(i - n * params.image_positions);
    const int at[3] = {q / in_width / in_height, q / in_width % in_height, q % in_width};
    int64_t from = n * p.out.batch;
    bool exists = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int o = at[a] * p.axis[a].stride - p.axis[a].padding + t[a] * p.axis[a].dilation;
      exists = exists && o >= 0 && o < p.axis[a].out;
      from += o * p.out.axis[a];
    }
    if (exists) sum = fma(double(to_accumulator(grad[from])), double(to_accumulator(input[n * p.in.batch + q])), sum);
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// The same of the input's gradient.
template <typename T>
__device__ __noinline__ T gradient_by_definition(const GradientGemmParams& params, int group, int channel,
                                                 int position) {
  const GradientGemmDefinition& p = params.definition;
  int at[3], image = position;
  const int n = params.image(image);
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    int rest = image;
    image = p.axis[a].in(rest);
    at[a] = rest * p.axis[a].stride - p.axis[a].padding;
  }
  const int64_t taps = int64_t{p.axis[0].kernel} * p.axis[1].kernel * p.axis[2].kernel;
  const int64_t weight_tap = p.weight_turned ? p.group_out : 1, weight_channel = p.weight_turned ? 1 : taps;
  const T* const weight =
      static_cast<const T*>(p.weight) + (int64_t{group} * params.group_in + channel) * p.group_out * taps;
  const T* const source =
      static_cast<const T*>(p.grad_output) + n * p.out.batch + int64_t{group} * p.group_out * p.out.channel;
  double sum = 0;
  int tap = 0;
#pragma unroll 1
  for (int t0 = 0; t0 < p.axis[0].kernel; ++t0) {
#pragma unroll 1
    for (int t1 = 0; t1 < p.axis[1].kernel; ++t1) {
#pragma unroll 1
      for (int t2 = 0; t2 < p.axis[2].kernel; ++t2, ++tap) {
        const int o0 = at[0] + t0 * p.axis[0].dilation, o1 = at[1] + t1 * p.axis[1].dilation;
        const int o2 = at[2] + t2 * p.axis[2].dilation;
        if (o0 < 0 || o0 >= p.axis[0].out || o1 < 0 || o1 >= p.axis[1].out || o2 < 0 || o2 >= p.axis[2].out) continue;
        const T* const from = source + o0 * p.out.axis[0] + o1 * p.out.axis[1] + o2 * p.out.axis[2];
#pragma unroll 1
        for (int c = 0; c < p.group_out; ++c) {
          sum = fma(double(to_accumulator(from[c * p.out.channel])),
                    double(to_accumulator(weight[c * weight_channel + tap * weight_tap])), sum);
        }
      }
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// A warpgroup waits for itself; returns whether anyone of it has said so.
__device__ __forceinline__ bool meet_warpgroup(int warpgroup, bool says) {
  int result = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %2, 0;\nbarrier.cta.red.or.pred any, %1, 128, mine;\n"
      "selp.b32 %0, 1, 0, any;\n}"
      : "=r"(result)
      : "r"(warpgroup + 1), "r"(static_cast<int>(says))
      : "memory");
#endif
  return result != 0;
}

__device__ __forceinline__ void store_shared(uint32_t address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// From another block's shared memory.
__device__ __forceinline__ void load_cluster(uint32_t address, float (&x)[4]) {
#ifdef FASTCONVT_GRADIENT_GEMM
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
#endif
}

// Where an element of a position and a channel is staged: lines of positions or channels in blocks of up to 128 bytes.
// Tensor copies want their 16 bytes turned round (swizzled); otherwise lines are a little further apart.
template <typename T, bool kContiguous>
__device__ __forceinline__ int staged_place(const GradientGemmParams& p, int channel, int position) {
  const int line = kContiguous ? channel : position;
  const int at = (kContiguous ? position : channel) * static_cast<int>(sizeof(T));
  return (at >> p.line_log2) * p.line_block + line * p.line_pitch +
         ((at & (p.line_bytes - 1)) ^ ((line >> p.line_shift & p.line_mask) << 4));
}

// Stages a column tile of what is staged, of 64 positions, which begin at `row` of the warpgroup's.
template <typename T, bool kContiguous>
__device__ __forceinline__ void stage_tile(const GradientGemmParams& p, uint32_t staging, const float (&d)[4], int row,
                                           int tile) {
  const int lane = threadIdx.x % 32, channel = tile * 8 + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = row + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
    using Pair = Pack<T, 2>;
    const Pair pair{from_accumulator<T>(d[2 * half]), from_accumulator<T>(d[2 * half + 1])};
    if constexpr (kContiguous) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        *static_cast<T*>(__cvta_shared_to_generic(staging + staged_place<T, true>(p, channel + k, position))) =
            pair.value[k];
      }
    } else {
      *static_cast<Pair*>(__cvta_shared_to_generic(staging + staged_place<T, false>(p, channel, position))) = pair;
    }
  }
}

// Stages all column tiles of a part.
template <typename T, bool kContiguous, int kParts, int kTiles>
__device__ __forceinline__ void stage_sums(const GradientGemmParams& p, uint32_t staging, const float (&d)[kTiles][4],
                                           int row, int part) {
  constexpr int kStaged = kTiles / kParts;
  if constexpr (sizeof(T) == 2) {
    const int lane = threadIdx.x % 32, tile = lane / 16 * 8, at = row + threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kStaged; j += 2) {
      const float (&x)[4] = d[part * kStaged + j], (&y)[4] = d[part * kStaged + j + 1];
      const uint32_t packed[4] = {round_pair<T>(x[0], x[1]), round_pair<T>(x[2], x[3]), round_pair<T>(y[0], y[1]),
                                  round_pair<T>(y[2], y[3])};
      const int place = kContiguous ? staged_place<T, true>(p, j * 8 + tile + lane % 8, at)
                                    : staged_place<T, false>(p, j * 8 + tile, at + lane % 8);
      store_matrices<kContiguous>(staging + place, packed);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kStaged; ++j) stage_tile<T, kContiguous>(p, staging, d[part * kStaged + j], row, j);
  }
}

// What a warpgroup has staged: the channels [begin, end) of an item's positions from `first` on.
struct GradientGemmStaged {
  uint32_t staging;
  int first, begin, end;
};

// Piece by piece of neighbouring elements of a line.
template <typename T, bool kContiguous, int kPiece>
__device__ __forceinline__ void store_pieces(const GradientGemmParams& p, const GradientGemmItem& item,
                                             const GradientGemmStaged& staged) {
  using Piece = Pack<T, kPiece>;
  const int width = kContiguous ? p.rows / 2 : staged.end - staged.begin, pieces = width / kPiece;
  const int lines = kContiguous ? staged.end - staged.begin : p.rows / 2, shift = 31 - __clz(pieces);
#pragma unroll 2
  for (int i = threadIdx.x % 128; i < lines << shift; i += 128) {
    const int line = i >> shift, in_line = (i & (pieces - 1)) * kPiece;
    const int channel = item.first_channel + staged.begin + (kContiguous ? line : in_line);
    int position = staged.first + (kContiguous ? in_line : line);
    if (channel >= p.group_in || position >= p.positions) continue;
    const uint32_t from = staged.staging + (kContiguous ? staged_place<T, true>(p, line, in_line)
                                                        : staged_place<T, false>(p, in_line, line));
    const int n = p.image(position);
    *reinterpret_cast<Piece*>(static_cast<T*>(p.grad_input) + n * p.in.batch +
                              (int64_t{item.group} * p.group_in + channel) * p.in.channel + position * p.in.axis[2]) =
        *reinterpret_cast<const Piece*>(__cvta_shared_to_generic(from));
  }
}

// By the warpgroup itself, in the widest pieces that are aligned and do not cross the end of a batch entry.
template <typename T, bool kContiguous>
__device__ __noinline__ void store_by_threads(const GradientGemmParams& p, const GradientGemmItem& item,
                                              const GradientGemmStaged& staged) {
  if (p.piece == 16 / sizeof(T)) {
    store_pieces<T, kContiguous, 16 / sizeof(T)>(p, item, staged);
  } else if (p.piece == 4) {
    store_pieces<T, kContiguous, 4>(p, item, staged);
  } else if (p.piece == 2) {
    store_pieces<T, kContiguous, 2>(p, item, staged);
  } else {
    store_pieces<T, kContiguous, 1>(p, item, staged);
  }
}

// Makes staged elements that are not finite again.
template <typename T, bool kContiguous>
__device__ __noinline__ void repair_staged(const GradientGemmParams& p, const GradientGemmItem& item,
                                           const GradientGemmStaged& staged) {
  const int positions = p.rows / 2, count = (staged.end - staged.begin) * positions;
  for (int i = threadIdx.x % 128; i < count; i += 128) {
    const int column = i / positions, row = i % positions, channel = item.first_channel + staged.begin + column;
    if (channel >= p.group_in || staged.first + row >= p.positions) continue;
    T* const at =
        static_cast<T*>(__cvta_shared_to_generic(staged.staging + staged_place<T, kContiguous>(p, column, row)));
    if (is_finite(to_accumulator(*at))) continue;
    *at = p.definition.input != nullptr ? weight_gradient_by_definition<T>(p, channel, staged.first + row)
                                        : gradient_by_definition<T>(p, item.group, channel, staged.first + row);
  }
}

// The warpgroup meets, and makes again what is not finite: some of it if a thread's `probe` is not 0.
template <typename T, bool kContiguous>
__device__ __forceinline__ void finish_staging(const GradientGemmParams& p, const GradientGemmItem& item,
                                               const GradientGemmStaged& staged, int warpgroup, float probe) {
  if (!meet_warpgroup(warpgroup, probe != 0.f)) return;
  repair_staged<T, kContiguous>(p, item, staged);
  meet_warpgroup(warpgroup, false);
}

// Stages a part of a warpgroup's sums.
template <typename T, bool kContiguous, int kParts, int kRowTiles, int kTiles>
__device__ __forceinline__ void stage_part(const GradientGemmParams& p, const GradientGemmItem& item,
                                           const GradientGemmStaged& staged, int warpgroup, int part,
                                           const float (&sum)[kRowTiles][kTiles][4]) {
  constexpr int kStaged = kTiles / kParts;
  float probe = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kStaged; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) probe = fmaf(sum[i][part * kStaged + j][k], 0.f, probe);
    stage_sums<T, kContiguous, kParts>(p, staged.staging, sum[i], i * 64, part);
  }
  finish_staging<T, kContiguous>(p, item, staged, warpgroup, probe);
}

// Stores what a warpgroup has staged, by tensor copies. One thread.
template <typename T>
__device__ __forceinline__ void store_boxes(const GradientGemmParams& p, const CUtensorMap* map,
                                            const GradientGemmItem& item, const GradientGemmStaged& staged) {
  const int width = p.line_bytes / static_cast<int>(sizeof(T));
  const int first_channel = item.first_channel + staged.begin;
  for (int i = 0; i * width < (p.contiguous ? p.rows / 2 : staged.end - staged.begin); ++i) {
    const uint32_t source = staged.staging + i * p.line_block;
    if (p.contiguous) {
      int position = staged.first + i * width;
      if (position >= p.positions) return;
      const int n = p.image(position);
      store_box(map, source, position, first_channel, item.group, n);
    } else {
      store_box(map, source, first_channel + i * width, item.group, staged.first, 0);
    }
  }
}

// The same channel by channel: runs of positions. Contiguous; a warp.
template <typename T>
__device__ __forceinline__ void store_runs(const GradientGemmParams& p, const GradientGemmItem& item,
                                           const GradientGemmStaged& staged) {
  const int first_channel = item.first_channel + staged.begin;
  const int channels = min(staged.end - staged.begin, p.group_in - first_channel);
  const int positions = min(p.rows / 2, p.positions - staged.first);
  const int64_t all = int64_t{item.group} * p.group_in + first_channel;
  for (int line = threadIdx.x % 32; line < channels; line += 32) {
    for (int done = 0; done < positions;) {
      int at = staged.first + done;
      const int n = p.image(at), run = min(positions - done, p.image.divisor - at);
      store_run(static_cast<T*>(p.grad_input) + n * p.in.batch + (all + line) * p.in.channel + at,
                staged.staging + line * p.line_pitch + done * static_cast<int>(sizeof(T)),
                run * static_cast<int>(sizeof(T)));
      done += run;
    }
  }
}

}  // namespace fastconvt::cuda
