// What a thread of the direct kernels owns along the last axis: kCount vectors of kVector columns side by side, four
// output channels of each.
#pragma once

#include "direct_store.cuh"

namespace fastconvt::cuda {

// kIndex: of the window.
template <typename T_, int kIndex, int kVector_, int kCount_, bool kChannelsLast_>
struct DirectShape {
  using T = T_;
  static constexpr DirectWindow kList = kDirectWindows[kIndex];
  static constexpr int kStride = kList.stride, kWindow = kList.width, kVector = kVector_, kCount = kCount_;
  static constexpr unsigned kUsual = kList.mask;
  static constexpr bool kOnlyUsual = kList.only, kChannelsLast = kChannelsLast_;
  static constexpr int kChannels = kDirectChannels;
  static constexpr int kBases = kVector / kStride;
  static constexpr int kSide = kBases + kWindow - 1;  // inputs of a vector
  static constexpr int kSlots = kStride * kWindow;
  static constexpr int kUnit = kSlots * kChannels;  // weights of an input channel and a tap of the other axes
  using Inputs = float[4][kCount][kSide];           // of four channels
  using Sums = float[kCount][kVector][kChannels];
  // As loaded.
  struct RawPixels {
    Pack<T, 4> pixel[kSide];
  };
  using Raw = std::conditional_t<kChannelsLast, RawPixels[1][kCount], T[4][kCount][kSide]>;
};

// Quads of channels of a thread, and its columns.
template <class Shape>
struct DirectColumns {
  using T = typename Shape::T;
  using Raw = typename Shape::Raw;
  using Inputs = typename Shape::Inputs;
  using Sums = typename Shape::Sums;
  using Quad = Pack<T, 4>;
  static constexpr int kCount = Shape::kCount, kSide = Shape::kSide, kVector = Shape::kVector;
  static constexpr int kChannels = Shape::kChannels, kStride = Shape::kStride, kBases = Shape::kBases;

  const DirectParams& p;
  int first;     // the first column, as an output
  int channels;  // output channels that exist

  __device__ DirectColumns(const DirectParams& params, int column, int output_channels)
      : p(params), first(column * kVector), channels(output_channels) {}

  // From the inputs of `count` channels at `row`; those that do not exist are zeros.
  __device__ __forceinline__ void load(const T* row, bool exists, int count, Raw& raw) const {
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].in) : 0;
    const int source = first / kStride + p.first_input;
    if constexpr (Shape::kChannelsLast) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          const int at = source + k * p.column_in + i;
          raw[0][k].pixel[i] = load_quad(row + at * p.input_inner, static_cast<unsigned>(at) < limit ? count : 0);
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < count) {
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            const int at = source + k * p.column_in;
            load_run<0, kSide>(row + at, at, limit, raw[c][k]);
          }
          row += p.input_channel;
        }
      }
    }
  }

  __device__ __forceinline__ Quad load_quad(const T* from, int count) const {
    Quad quad{};
    if (p.input_vectors) {
      if (count > 0) {
        if constexpr (sizeof(Quad) == 16) {
          reinterpret_cast<uint4&>(quad) = __ldg(reinterpret_cast<const uint4*>(from));
        } else {
          reinterpret_cast<uint2&>(quad) = __ldg(reinterpret_cast<const uint2*>(from));
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < count) quad.value[c] = __ldg(from + c);
      }
    }
    return quad;
  }

  __device__ __forceinline__ void convert(const Raw& raw, Inputs& x) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          if constexpr (Shape::kChannelsLast) {
            x[c][k][i] = to_accumulator(raw[0][k].pixel[i].value[c]);
          } else {
            x[c][k][i] = to_accumulator(raw[c][k][i]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ static void init(const float* bias, Sums& sum) {
    float term[kChannels];
    load_floats<kChannels>(bias, term);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
#pragma unroll
        for (int o = 0; o < kChannels; ++o) sum[k][v][o] = term[o];
      }
    }
  }

  // Adds the products of `count` input channels and one tap of the other axes.
  __device__ __forceinline__ void multiply(const Inputs& x, int count, const float* weights, Sums& sum) const {
    if (Shape::kOnlyUsual || p.mask == Shape::kUsual) {
      multiply_mask<Shape::kUsual>(x, count, weights, sum);
    } else {
      multiply_mask<0>(x, count, weights, sum);
    }
  }

  template <unsigned kMask>
  __device__ __forceinline__ void multiply_mask(const Inputs& x, int count, const float* weights, Sums& sum) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < count) {
#pragma unroll
        for (int slot = 0; slot < Shape::kSlots; ++slot) {
          const bool exists = kMask != 0 ? kMask >> slot & 1 : p.mask >> slot & 1;
          if (exists) add(x[c], slot, weights + c * Shape::kUnit + slot * kChannels, sum);
        }
      }
    }
  }

  __device__ __forceinline__ static void add(const float (&line)[kCount][kSide], int slot, const float* weights,
                                             Sums& sum) {
    float w[kChannels];
    load_floats<kChannels>(weights, w);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int b = 0; b < kBases; ++b) {
        const float x = line[k][b + slot % Shape::kWindow];
#pragma unroll
        for (int o = 0; o < kChannels; ++o) {
          float& s = sum[k][b * kStride + slot / Shape::kWindow][o];
          s = fmaf(x, w[o], s);
        }
      }
    }
  }

  // `row` is where the outputs of the first channel begin. All lanes of a warp call it.
  __device__ __forceinline__ void store(T* row, bool exists, const Sums& sum) const {
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].out) : 0;
    if constexpr (Shape::kChannelsLast) {
      store_pixels(row, limit, sum);
    } else {
#pragma unroll
      for (int o = 0; o < kChannels; ++o) {
        const unsigned end = o < channels ? limit : 0;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          Pack<T, kVector> pack;
#pragma unroll
          for (int v = 0; v < kVector; ++v) pack.value[v] = from_accumulator<T>(sum[k][v][o]);
          const int at = first + k * p.column_out;
          if (p.output_vectors) {
            if (at < end) store_pack(row + at, pack);
          } else {
            store_realigned(row + at, at, end, at == k * p.column_out, first + kVector >= p.column_out, pack);
          }
        }
        row += p.output_channel;
      }
    }
  }

  __device__ __forceinline__ void store_pixels(T* row, unsigned limit, const Sums& sum) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kVector * 3 % 4 == 0) {
        const int at = first + k * p.column_out;
        if (p.output_runs && static_cast<unsigned>(at + kVector - 1) < limit) {
          store_run<T, kVector, 3>(row + at * 3, sum[k]);
          continue;
        }
      }
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const int at = first + k * p.column_out + v;
        Quad pack;
#pragma unroll
        for (int o = 0; o < kChannels; ++o) pack.value[o] = from_accumulator<T>(sum[k][v][o]);
        T* const target = row + at * p.output_inner;
        if (p.output_vectors) {
          if (static_cast<unsigned>(at) < limit) store_pack(target, pack);
        } else {
          store_part(target, 0, static_cast<unsigned>(at) < limit ? channels : 0, pack);
        }
      }
    }
  }
};

}  // namespace fastconvt::cuda
