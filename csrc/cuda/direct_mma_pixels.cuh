// The same in channels_last: a product has 16 rows, bases of the last axis, eight columns, (phase of the last axis,
// four output channels), and 16 terms, (two rows, two inputs side by side, four input channels) or four inputs of one
// row. A warp makes kQuads quads of output channels, so that lanes store whole sectors.
#pragma once

#include "direct_mma.cuh"

namespace fastconvt::cuda {

constexpr int kPixelBases = 16;  // of a warp, along the last axis

template <typename T_, int kPairs_, int kQuads_>
struct DirectPixels {
  using T = T_;
  static constexpr int kPairs = kPairs_, kSteps = kPairs, kQuads = kQuads_;
  // Pairs of channels of a row: of each quad, of eight bases each, of inputs two apart.
  struct Words {
    unsigned value[kQuads][2][kPairs];
  };
};

// Where a lane is: warps own a tile of the last axis, a segment of bases of the height, a plane and a sample.
struct DirectPixelsLane {
  int first, segment, plane, sample, quad;
  bool active;

  __device__ __forceinline__ explicit DirectPixelsLane(const DirectParams& p) {
    const DirectBlock block(p);
    quad = block.quad;
    int tile = block.chunk * static_cast<int>(blockDim.x / 32) + static_cast<int>(threadIdx.x / 32);
    segment = p.by_columns(tile);
    plane = p.by_segment(segment);
    sample = p.by_plane(plane);
    active = sample < p.batch;
    first = tile * kPixelBases + threadIdx.x % 32 / 4;
  }
};

// Weights of a block as operands, [quad][phase of the height][step][lane], two words each, then the bias of its quads.
template <class Pixels>
__device__ __forceinline__ void fill_pixel_operands(const DirectParams& p, int first_quad, unsigned* words,
                                                    float* bias) {
  using T = typename Pixels::T;
  const AxisParams &height = p.axis[1], &width = p.axis[2];
#pragma unroll 1
  for (int i = threadIdx.x; i < Pixels::kQuads * height.stride * Pixels::kSteps * 64;
       i += static_cast<int>(blockDim.x)) {
    const int reg = i % 2, lane = i / 2 % 32, step = i / 64 % Pixels::kSteps, g = lane / 4, t = lane % 4;
    int ry = i / (64 * Pixels::kSteps);
    const int quad = p.by_phases(ry);
    int local = first_quad + quad;
    const int group = p.by_quads_per_group(local), out = local * kDirectChannels + g % 4, column = g / 4;
    const int row = Pixels::kPairs == 1 ? reg : step, side = t / 2 + (Pixels::kPairs == 1 ? 0 : reg * 2);
    int rest_y = ry - (p.window_row + row) * height.stride;
    int rest = p.front + column - (p.first_place + side) * width.stride;
    const bool reaches = rest_y >= 0 && rest >= 0;
    const int ty = p.by_dilation[0](rest_y), tx = p.by_dilation[1](rest);
    const bool exists = reaches && rest_y == 0 && rest == 0 && ty < height.kernel && tx < width.kernel &&
                        out < p.out_channels && first_quad + quad < p.quads;
    Pack<T, 2> pack{};
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int in = t % 2 * 2 + v;
      const int64_t filter = (int64_t{group} * p.in_channels + in) * p.out_channels + out;
      if (exists && in < p.in_channels) {
        pack.value[v] = __ldg(static_cast<const T*>(p.weight) + (filter * height.kernel + ty) * width.kernel + tx);
      }
    }
    words[i] = reinterpret_cast<const unsigned&>(pack);
  }
  for (int i = threadIdx.x; i < Pixels::kQuads * kDirectChannels; i += static_cast<int>(blockDim.x)) {
    int local = first_quad + i / kDirectChannels;
    const bool quad_exists = local < p.quads;
    const int group = p.by_quads_per_group(local), out = local * kDirectChannels + i % kDirectChannels;
    const bool exists = p.bias != nullptr && quad_exists && out < p.out_channels;
    bias[i] = exists ? to_accumulator(__ldg(static_cast<const T*>(p.bias) + group * p.out_channels + out)) : 0.f;
  }
}

// A row's inputs; `from` is that of the lane's first base, pixel `at`, and its pair of channels of group 0.
template <class Pixels>
__device__ __forceinline__ void load_pixels(const DirectParams& p, const typename Pixels::T* from, int at,
                                            unsigned limit, const int (&group)[Pixels::kQuads], int count,
                                            typename Pixels::Words& words) {
  using T = typename Pixels::T;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int s = 0; s < Pixels::kPairs; ++s) {
      const int pixel = h * 8 + s * 2;
      const bool exists = static_cast<unsigned>(at + pixel) < limit;
#pragma unroll
      for (int q = 0; q < Pixels::kQuads; ++q) {
        const T* const source = from + (pixel * p.input_inner + group[q]);
        unsigned word = 0;
        if (p.input_vectors) {
          if (exists) word = __ldg(reinterpret_cast<const unsigned*>(source));
        } else {
          Pack<T, 2> pack{};
          if (exists && count > 0) pack.value[0] = __ldg(source);
          if (exists && count > 1) pack.value[1] = __ldg(source + 1);
          word = reinterpret_cast<const unsigned&>(pack);
        }
        words.value[q][h][s] = word;
      }
    }
  }
}

// Stores a lane's pairs of channels of one pixel. Lanes of even and odd t hold the first and the second pair of each
// quad: they exchange, so that each has whole quads. All lanes of a warp call it.
template <typename T, int kQuads>
__device__ __forceinline__ void store_quads(const DirectParams& p, T* pixel, bool exists, int quad,
                                            const unsigned (&pair)[kQuads]) {
  const bool odd = threadIdx.x % 2 != 0;
  constexpr int kHalf = kQuads / 2;
  if (p.output_unit >= 4) {
    unsigned words[kQuads];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const unsigned other = __shfl_xor_sync(0xffffffff, odd ? pair[i] : pair[kHalf + i], 1);
      words[2 * i] = odd ? other : pair[i];
      words[2 * i + 1] = odd ? pair[kHalf + i] : other;
    }
    const int first = quad + (odd ? kHalf : 0);
    T* const target = pixel + first * kDirectChannels;
    if (kQuads == 4 && p.output_unit == 8) {
      const uint4 vector = {words[0], words[1], words[kQuads - 2], words[kQuads - 1]};
      if (exists && first < p.quads) __stcs(reinterpret_cast<uint4*>(target), vector);
    } else {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const uint2 vector = {words[2 * i], words[2 * i + 1]};
        if (exists && first + i < p.quads) __stcs(reinterpret_cast<uint2*>(target + i * kDirectChannels), vector);
      }
    }
  } else {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      int local = quad + q;
      const bool quad_exists = exists && local < p.quads;
      const int group = p.by_quads_per_group(local), out = local * kDirectChannels + (odd ? 2 : 0);
      T* const target = pixel + group * p.out_channels + out;
      const auto& pack = reinterpret_cast<const Pack<T, 2>&>(pair[q]);
      if (quad_exists && out < p.out_channels) target[0] = pack.value[0];
      if (quad_exists && out + 1 < p.out_channels) target[1] = pack.value[1];
    }
  }
}

// All outputs of a lane by the definition.
template <class Pixels>
__device__ __noinline__ void repair_pixels(const DirectParams& p) {
  using T = typename Pixels::T;
  const DirectPixelsLane lane(p);
  const AxisParams& height = p.axis[1];
  const int64_t filter = int64_t{height.kernel} * p.axis[2].kernel;
  const int begin = p.first_row + lane.segment * p.march, end = min(begin + p.march, p.first_row + p.num_rows);
  const int t = threadIdx.x % 4;
#pragma unroll 1
  for (int i = 0; i < (end - begin) * height.stride * Pixels::kQuads * 4; ++i) {
    const int row = i / (Pixels::kQuads * 4), rest = i % (Pixels::kQuads * 4);
    const int oy = (begin + row / height.stride) * height.stride - height.padding + row % height.stride;
    const int ox = (lane.first + rest % 2 * 8) * 2 + t / 2;
    int local = lane.quad + rest / 4;
    const bool exists = local < p.quads && oy >= 0 && oy < height.out && ox < p.axis[2].out;
    const int group = p.by_quads_per_group(local), out = local * kDirectChannels + t % 2 * 2 + rest / 2 % 2;
    if (!exists || out >= p.out_channels) continue;
    const T* const input = static_cast<const T*>(p.input) + lane.sample * p.input_batch +
                           int64_t{lane.plane} * p.input_plane + group * p.in_channels;
    const T* const weight =
        static_cast<const T*>(p.weight) + (int64_t{group} * p.in_channels * p.out_channels + out) * filter;
    const int channel = group * p.out_channels + out;
    const float bias = p.bias != nullptr ? to_accumulator(__ldg(static_cast<const T*>(p.bias) + channel)) : 0.f;
    const int at[3] = {0, oy, ox};  // in the plane, where the inputs begin
    static_cast<T*>(p.output)[lane.sample * p.output_batch + int64_t{lane.plane} * p.output_plane +
                              int64_t{oy} * p.output_row + int64_t{ox} * p.output_inner + channel] =
        from_accumulator<T>(p.rectify(exact_direct(p, input, weight, at, bias)));
  }
}

template <class Pixels, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) direct_pixels_kernel(const __grid_constant__ DirectParams p) {
  using T = typename Pixels::T;
  constexpr int kQuads = Pixels::kQuads, kSteps = Pixels::kSteps;
  extern __shared__ __align__(16) unsigned char shared[];
  const AxisParams& height = p.axis[1];
  const DirectPixelsLane lane(p);
  const int t = threadIdx.x % 4;
  const int begin = p.first_row + lane.segment * p.march;
  int end = lane.active ? min(begin + p.march, p.first_row + p.num_rows) : begin;
  keep(end);

  int group[kQuads];  // the first channels
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    int local = min(lane.quad + q, p.quads - 1);
    group[q] = p.by_quads_per_group(local) * p.in_channels;
  }
  int row = begin + p.window_row;
  int at = lane.first + t / 2 + p.first_input;
  const int count = p.in_channels - t % 2 * 2;
  const T* source = static_cast<const T*>(p.input) + lane.sample * p.input_batch + int64_t{lane.plane} * p.input_plane +
                    int64_t{row} * p.input_row + int64_t{at} * p.input_inner + t % 2 * 2;
  unsigned columns = lane.active && count > 0 ? static_cast<unsigned>(p.axis[2].in) : 0;
  keep(at), keep(source), keep(columns);
  const auto load_row = [&](typename Pixels::Words& words) {
    const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(height.in);
    load_pixels<Pixels>(p, source, at, exists ? columns : 0, group, count, words);
    ++row, source += p.input_row;
  };
  typename Pixels::Words x[2], next;
  load_row(x[0]);
  load_row(next);
  unsigned* const operands = reinterpret_cast<unsigned*>(shared);
  float* const bias = reinterpret_cast<float*>(shared + p.bias_offset);
  fill_pixel_operands<Pixels>(p, lane.quad, operands, bias);
  int column = lane.first * 2 + t / 2;
  int oy = begin * height.stride - height.padding;
  T* target = static_cast<T*>(p.output) + lane.sample * p.output_batch + int64_t{lane.plane} * p.output_plane +
              int64_t{oy} * p.output_row + int64_t{column} * p.output_inner;
  keep(column), keep(oy), keep(target);
  unsigned zeros = 0;
  __syncthreads();

#pragma unroll 1
  for (int q = begin; q < end; ++q) {
    x[1] = next;
    if (q + 1 < end) load_row(next);
#pragma unroll 1
    for (int ry = 0; ry < height.stride; ++ry, ++oy, target += p.output_row) {
      unsigned pair[2][kQuads];
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        const float2 start2 = reinterpret_cast<const float2*>(bias)[j * 2 + t % 2];
        float sum[4] = {start2.x, start2.y, start2.x, start2.y};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint2 b = reinterpret_cast<const uint2*>(
              operands)[((j * height.stride + ry) * kSteps + step) * 32 + threadIdx.x % 32];
          unsigned a[4];
          if constexpr (Pixels::kPairs == 1) {
            a[0] = x[0].value[j][0][0], a[1] = x[0].value[j][1][0];
            a[2] = x[1].value[j][0][0], a[3] = x[1].value[j][1][0];
          } else {
            a[0] = x[step].value[j][0][0], a[1] = x[step].value[j][1][0];
            a[2] = x[step].value[j][0][1], a[3] = x[step].value[j][1][1];
          }
          multiply_16<T>(sum, a, b.x, b.y, sum);
        }
        pair[0][j] = pack_pair<T>(sum[0], sum[1]), pair[1][j] = pack_pair<T>(sum[2], sum[3]);
        check_pair<T>(pair[0][j], zeros), check_pair<T>(pair[1][j], zeros);
      }
      if (p.rectify.on) {
#pragma unroll
        for (int i = 0; i < 2 * kQuads; ++i)
          pair[i / kQuads][i % kQuads] = rectified_pair<T>(p, pair[i / kQuads][i % kQuads]);
      }
      const unsigned limit = static_cast<unsigned>(oy) < static_cast<unsigned>(height.out) ? p.axis[2].out : 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        store_quads<T, kQuads>(p, target + h * 16 * p.output_inner, static_cast<unsigned>(column + h * 16) < limit,
                               lane.quad, pair[h]);
      }
    }
    x[0] = x[1];
  }
  __syncwarp();
  if (zeros != 0 && lane.active) repair_pixels<Pixels>(p);
}

}  // namespace fastconvt::cuda
