// The direct family on matrix units, in 16 bits and contiguous layout: stride 2 along the last axis, at most four input
// channels a group, and two rows of inputs that the outputs of a base reach.
//
// A product has 16 rows, (phase of the last axis, two phases of the height, four output channels), eight columns, bases
// of the last axis, and 16 terms: four input channels, a pair of inputs side by side, and two rows or two such pairs.
// So a lane loads a run of inputs of one channel, which are its operand as they stand, and ends with runs of outputs.
// Most weights of the matrix may be zero: what is not finite is made again by the definition.
#pragma once

#include "direct.cuh"

namespace fastconvt::cuda {

// d = a * b + c, 16 x 16 by 16 x 8.
template <typename T>
__device__ __forceinline__ void multiply_16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                            const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
#endif
}

constexpr int kMmaRows = 2;    // of the window
constexpr int kMmaBases = 32;  // of a warp, along the last axis

// kPairs: of inputs side by side that a base's outputs reach.
template <typename T_, int kPairs_, bool kAligned_>
struct DirectMma {
  using T = T_;
  static constexpr int kPairs = kPairs_, kSteps = kPairs;  // products to add up
  static constexpr bool kAligned = kAligned_;
  static constexpr int kWords = kPairs + 1;        // of a lane's run of inputs, by its first of two columns
  static constexpr int kRun = 4 + 2 * kPairs - 1;  // inputs of a lane
  // A lane's inputs of a row, as loaded: two runs, 16 bases apart.
  struct RawVectors {
    uint2 body;
    std::conditional_t<kPairs == 1, T, uint2> rest;
  };
  struct RawElements {
    T value[kRun];
  };
  using Raw = std::conditional_t<kAligned, RawVectors, RawElements>[2];
  using Words = unsigned[2][kWords];
};

// Weights of a block as operands: [pair of height phases][step][lane], four words each.
template <class Mma>
__device__ __forceinline__ void fill_operands(const DirectParams& p, int quad, uint4* operands) {
  using T = typename Mma::T;
  const AxisParams &height = p.axis[1], &width = p.axis[2];
  int local = quad;
  const int group = p.by_quads_per_group(local);
  unsigned* const words = reinterpret_cast<unsigned*>(operands);
#pragma unroll 1
  for (int i = threadIdx.x; i < (height.stride + 1) / 2 * Mma::kSteps * 128; i += static_cast<int>(blockDim.x)) {
    const int reg = i % 4, lane = i / 4 % 32, step = i / 128 % Mma::kSteps;
    const int in = lane % 4, out = local * kDirectChannels + lane / 4 % 4;
    const int ry = i / (128 * Mma::kSteps) * 2 + lane / 16, column = reg % 2;
    const int row = Mma::kPairs == 1 ? reg / 2 : step, side = Mma::kPairs == 1 ? 0 : reg / 2 * 2;
    int rest_y = ry - (p.window_row + row) * height.stride;
    const bool reaches = rest_y >= 0;
    const int ty = p.by_dilation[0](rest_y);
    const bool exists = in < p.in_channels && out < p.out_channels && ry < height.stride && reaches && rest_y == 0 &&
                        ty < height.kernel;
    const int64_t filter = (int64_t{group} * p.in_channels + in) * p.out_channels + out;
    const T* const from = static_cast<const T*>(p.weight) + (filter * height.kernel + ty) * width.kernel;
    Pack<T, 2> pack{};
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      int rest = p.front + column - (p.first_place + side + v) * width.stride;
      const bool side_exists = exists && rest >= 0;
      const int tx = p.by_dilation[1](rest);
      if (side_exists && rest == 0 && tx < width.kernel) pack.value[v] = __ldg(from + tx);
    }
    words[i] = reinterpret_cast<const unsigned&>(pack);
  }
}

// A lane's inputs of a row of its channel; `from` is its first input, of column `at`.
template <class Mma>
__device__ __forceinline__ void load_inputs(const typename Mma::T* from, int at, unsigned limit,
                                            typename Mma::Raw& raw) {
#pragma unroll
  for (int h = 0; h < 2; ++h, from += 16, at += 16) {
    if constexpr (Mma::kAligned) {
      raw[h] = {};
      if (static_cast<unsigned>(at) < limit) raw[h].body = __ldg(reinterpret_cast<const uint2*>(from));
      if (static_cast<unsigned>(at + 4) < limit) {
        if constexpr (Mma::kPairs == 1) {
          raw[h].rest = __ldg(from + 4);
        } else {
          raw[h].rest = __ldg(reinterpret_cast<const uint2*>(from + 4));
        }
      }
    } else {
      load_run<0, Mma::kRun>(from, at, limit, raw[h].value);
    }
  }
}

// Operands: `selector` takes lanes of odd columns one input further.
template <class Mma>
__device__ __forceinline__ void make_words(const typename Mma::Raw& raw, unsigned selector,
                                           typename Mma::Words& words) {
  constexpr int kWords = Mma::kWords;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned w[kWords + 1] = {};
    if constexpr (Mma::kAligned) {
      w[0] = raw[h].body.x, w[1] = raw[h].body.y;
      if constexpr (Mma::kPairs == 1) {
        w[2] = reinterpret_cast<const unsigned short&>(raw[h].rest);
      } else {
        w[2] = raw[h].rest.x, w[3] = raw[h].rest.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Mma::kRun; ++i) {
        w[i / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short&>(raw[h].value[i])) << i % 2 * 16;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[h][i] = __byte_perm(w[i], w[i + 1], selector);
  }
}

template <typename T>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  Pack<T, 2> pack;
  pack.value[0] = from_accumulator<T>(low), pack.value[1] = from_accumulator<T>(high);
  return reinterpret_cast<const unsigned&>(pack);
}

// `zeros` stays zero as long as both numbers are finite.
template <typename T>
__device__ __forceinline__ void check_pair(unsigned word, unsigned& zeros) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const unsigned none = 0;
  const Pair result = __hfma2(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(none),
                              reinterpret_cast<const Pair&>(zeros));
  zeros = reinterpret_cast<const unsigned&>(result);
#endif
}

// After the check, which looks at rounded sums.
template <typename T>
__device__ __forceinline__ unsigned rectified_pair(const DirectParams& p, unsigned word) {
  const auto& pack = reinterpret_cast<const Pack<T, 2>&>(word);
  return pack_pair<T>(p.rectify(to_accumulator(pack.value[0])), p.rectify(to_accumulator(pack.value[1])));
}

// Eight outputs side by side, of which `limit - at` exist.
template <typename T>
__device__ __forceinline__ void store_eight(const DirectParams& p, T* target, int at, int limit, const uint4& words) {
  if (p.output_unit == 8) {
    if (at < limit) __stcs(reinterpret_cast<uint4*>(target), words);
  } else if (p.output_unit == 4) {
    if (at < limit) __stcs(reinterpret_cast<uint2*>(target), make_uint2(words.x, words.y));
    if (at + 4 < limit) __stcs(reinterpret_cast<uint2*>(target + 4), make_uint2(words.z, words.w));
  } else {
    const auto& pack = reinterpret_cast<const Pack<T, 8>&>(words);
    if (p.output_unit == 2) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        if (at + i < limit) store_pack(target + i, reinterpret_cast<const Pack<T, 2>*>(pack.value)[i / 2]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i < limit) target[i] = pack.value[i];
      }
    }
  }
}

// Where a lane is: warps own a tile of the last axis, a segment of bases of the height, a plane and a sample.
template <class Mma>
struct DirectMmaLane {
  using T = typename Mma::T;
  int first, segment, plane, channel, group;
  bool active, channel_exists;
  const T* input;  // the plane, from the group's first channel on
  T* output;       // the plane of the lane's channel

  __device__ __forceinline__ DirectMmaLane(const DirectParams& p) {
    const DirectBlock block(p);
    const int lane = threadIdx.x % 32;
    int tile = block.chunk * static_cast<int>(blockDim.x / 32) + static_cast<int>(threadIdx.x / 32);
    segment = p.by_columns(tile);
    plane = p.by_segment(segment);
    const int sample = p.by_plane(plane);
    active = sample < p.batch;
    first = tile * kMmaBases;
    int local = block.quad;
    group = p.by_quads_per_group(local);
    channel = local * kDirectChannels + lane / 4 % 4;
    channel_exists = channel < p.out_channels;
    input = static_cast<const T*>(p.input) + sample * p.input_batch + group * p.in_channels * p.input_channel +
            int64_t{plane} * p.input_plane;
    output = static_cast<T*>(p.output) + sample * p.output_batch +
             (group * p.out_channels + channel) * p.output_channel + int64_t{plane} * p.output_plane;
  }

  __device__ __forceinline__ float bias(const DirectParams& p) const {
    if (p.bias == nullptr || !channel_exists) return 0;
    return to_accumulator(__ldg(static_cast<const T*>(p.bias) + group * p.out_channels + channel));
  }
  __device__ __forceinline__ int column() const { return first * 2 + threadIdx.x % 4 * 8; }
  // Of the height, among the two of a product.
  __device__ __forceinline__ static int phase() { return threadIdx.x % 32 / 16; }
};

// All outputs of a lane by the definition.
template <class Mma>
__device__ __noinline__ void repair_outputs(const DirectParams& p) {
  using T = typename Mma::T;
  const DirectMmaLane<Mma> lane(p);
  const AxisParams& height = p.axis[1];
  const int64_t filter = int64_t{height.kernel} * p.axis[2].kernel;
  const T* const weight =
      static_cast<const T*>(p.weight) + (int64_t{lane.group} * p.in_channels * p.out_channels + lane.channel) * filter;
  const int begin = p.first_row + lane.segment * p.march, end = min(begin + p.march, p.first_row + p.num_rows);
#pragma unroll 1
  for (int i = 0; i < (end - begin) * height.stride * 16; ++i) {
    const int q = begin + i / 16 / height.stride, ry = i / 16 % height.stride;
    const int oy = q * height.stride - height.padding + ry, ox = lane.column() + i % 8 + i / 8 % 2 * kMmaBases;
    if (ry % 2 != lane.phase() || oy < 0 || oy >= height.out || ox >= p.axis[2].out) continue;
    const int at[3] = {0, oy, ox};  // in the plane, where the inputs begin
    lane.output[int64_t{oy} * p.output_row + ox] =
        from_accumulator<T>(p.rectify(exact_direct(p, lane.input, weight, at, lane.bias(p))));
  }
}

// The outputs of one base of the height.
template <class Mma>
__device__ __forceinline__ void make_rows(const DirectParams& p, const typename Mma::Words (&x)[kMmaRows],
                                          const uint4* operands, float bias, int phase, int oy, typename Mma::T* target,
                                          int column, int limit, unsigned& zeros) {
  using T = typename Mma::T;
  const float start[4] = {bias, bias, bias, bias};
#pragma unroll 1
  for (int phases = p.axis[1].stride; phases > 0; phases -= 2) {
    float sum[2][2][4];
#pragma unroll
    for (int step = 0; step < Mma::kSteps; ++step, operands += 32) {
      const uint4 loaded = *operands;
      const unsigned a[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int l = 0; l < 2; ++l) {
          const unsigned b0 = Mma::kPairs == 1 ? x[0][h][l] : x[step][h][l];
          const unsigned b1 = Mma::kPairs == 1 ? x[1][h][l] : x[step][h][l + Mma::kPairs - 1];
          if (step == 0) {
            multiply_16<T>(sum[h][l], a, b0, b1, start);
          } else {
            multiply_16<T>(sum[h][l], a, b0, b1, sum[h][l]);
          }
        }
      }
    }
    const bool exists = phase < phases && static_cast<unsigned>(oy) < static_cast<unsigned>(p.axis[1].out);
    const int end = exists ? limit : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 words = {pack_pair<T>(sum[h][0][0], sum[h][0][2]), pack_pair<T>(sum[h][0][1], sum[h][0][3]),
                     pack_pair<T>(sum[h][1][0], sum[h][1][2]), pack_pair<T>(sum[h][1][1], sum[h][1][3])};
      check_pair<T>(words.x, zeros), check_pair<T>(words.y, zeros);
      check_pair<T>(words.z, zeros), check_pair<T>(words.w, zeros);
      if (p.rectify.on) {
        words = {rectified_pair<T>(p, words.x), rectified_pair<T>(p, words.y), rectified_pair<T>(p, words.z),
                 rectified_pair<T>(p, words.w)};
      }
      const int at = column + h * kMmaBases;
      store_eight(p, target + at, at, end, words);
    }
    oy += 2, target += int64_t{2} * p.output_row;
  }
}

template <class Mma, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) direct_mma_kernel(const __grid_constant__ DirectParams p) {
  using T = typename Mma::T;
  extern __shared__ __align__(16) unsigned char shared[];
  const AxisParams& height = p.axis[1];
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const DirectMmaLane<Mma> lane(p);
  const int begin = p.first_row + lane.segment * p.march;
  int end = lane.active ? min(begin + p.march, p.first_row + p.num_rows) : begin;
  keep(end);

  int row = begin + p.window_row;
  int at = lane.first + g / 2 * 4 + p.first_input;
  const T* source = lane.input + t * p.input_channel + (int64_t{row} * p.input_row + at);
  unsigned columns = lane.active && t < p.in_channels ? static_cast<unsigned>(p.axis[2].in) : 0;
  unsigned selector = g % 2 != 0 ? 0x5432 : 0x3210;
  keep(at), keep(source), keep(columns), keep(selector);
  const auto load_row = [&](typename Mma::Raw& raw) {
    const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(height.in);
    load_inputs<Mma>(source, at, exists ? columns : 0, raw);
    ++row, source += p.input_row;
  };
  // Two rows are on their way.
  typename Mma::Raw raw[2];
  typename Mma::Words x[kMmaRows];
  load_row(raw[1]);
  load_row(raw[0]);
  make_words<Mma>(raw[1], selector, x[0]);
  load_row(raw[1]);
  uint4* const operands = reinterpret_cast<uint4*>(shared);
  fill_operands<Mma>(p, DirectBlock(p).quad, operands);
  float bias = lane.bias(p);
  int column = lane.column(), limit = lane.channel_exists ? static_cast<int>(p.axis[2].out) : 0;
  int oy = begin * height.stride - height.padding + lane.phase();
  T* target = lane.output + int64_t{oy} * p.output_row;
  keep(bias), keep(column), keep(limit), keep(oy), keep(target);
  const uint4* own = operands + threadIdx.x % 32;
  unsigned zeros = 0;
  __syncthreads();

#pragma unroll 1
  for (int q = begin; q < end; q += 2) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (q + u >= end) break;
      make_words<Mma>(raw[u], selector, x[1]);
      load_row(raw[u]);
      make_rows<Mma>(p, x, own, bias, lane.phase(), oy, target, column, limit, zeros);
      oy += height.stride, target += int64_t{height.stride} * p.output_row;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < Mma::kWords; ++i) x[0][h][i] = x[1][h][i];
      }
    }
  }
  if (zeros != 0 && limit > 0) repair_outputs<Mma>(p);
}

}  // namespace fastconvt::cuda
