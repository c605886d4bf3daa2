// Transposed convolution with few output channels a group, by windows (csrc/core/heads_window.h). A warp holds the sums
// of four bases of the mid axis by 32 positions, and takes rows of inputs from slots of its own in shared memory:
// a row is multiplied by the weights of its own base and of the next one, at the position and beside it. Two rows at a
// time are the halves of the unit's 16 rows, so that its operands need no moves between registers.
#pragma once

#include "heads_repair.cuh"
#include "heads_window_load.cuh"
#include "heads_window_store.cuh"

namespace fastconvt::cuda {

template <typename T_, HeadsPrecision kPrecision_, bool kMarch_, bool kPixels_>
struct HeadsWindowTraits {
  using Element = T_;
  static constexpr HeadsPrecision kPrecision = kPrecision_;
  static constexpr bool kMarch = kMarch_;
  static constexpr bool kPixels = kPixels_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class Traits, bool kRectify>
class HeadsWindowKernel {
  using T = typename Traits::Element;
  using Store = HeadsWindowStore<T, Traits::kMarch, kRectify>;
  using Loader = HeadsWindowLoader<T, Traits::kPixels>;
  using Sums = typename Store::Sums;
  static constexpr int kRows = kHeadsWindowRows;
  static constexpr bool kFloat32 = Traits::kPrecision == HeadsPrecision::kFloat32;
  static constexpr int kFragmentBytes = kFloat32 ? 512 : 256;

  const HeadsWindowParams& p;
  unsigned char* const shared;
  const int group;
  const int first, stride;  // of the warp's items
  Store store;
  Loader loader;
  int stage = 0;  // the one that is used next

 public:
  __device__ HeadsWindowKernel(const HeadsWindowParams& p, unsigned char* shared, int group, int block)
      : p(p),
        shared(shared),
        group(group),
        first(block * kHeadsWindowWarps + threadIdx.x / 32),
        stride(gridDim.x / p.groups * kHeadsWindowWarps),
        store(p, shared),
        loader(p, shared, group, first, stride) {}

  __device__ void run() {
    loader.advance();
    loader.request(0);
    loader.advance();
    loader.request(Loader::kStageBytes);
    stage_weights();
    store.prepare(group);
    __syncthreads();
    Sums sum;
#pragma unroll 1
    for (int index = first; index < p.items; index += stride) {
      clear(sum);
      int steps = 0;
#pragma unroll 1
      for (int step = -p.warm; step == -p.warm || step < steps; ++step) {
        // Found again after the products, which need the registers.
        HeadsWindowItem item;
        item.find(p, index);
        if (item.begin + step >= 0 && item.begin + step < p.size[0]) add_plane(item.rows(p), item.stacked, sum);
        item.find(p, index);
        if (step >= 0) store.run(item, group, item.begin + step, sum);
        Traits::kMarch ? turn(sum) : clear(sum);
        steps = item.end - item.begin;
      }
    }
    // Inputs and weights that do not exist are zeros, which only finite factors leave without effect, and halves of
    // float32 may be inf: both show in a sum that is not finite.
    if (!__any_sync(~0u, store.is_careful())) return;
    __syncwarp();
#pragma unroll 1
    for (int index = first; index < p.items; index += stride) repair(p, index, group);
  }

 private:
  static __device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
    for (int i = 0; i < kRows * 16; ++i) sum[i / 32][i / 16 % 2][i / 4 % 4][i % 4] = 0;
  }
  // To the next base of the first axis.
  static __device__ __forceinline__ void turn(Sums& sum) {
#pragma unroll
    for (int i = 0; i < kRows * 8; ++i) {
      float* const pair = sum[i / 16][i / 8 % 2][i / 2 % 4] + i % 2 * 2;
      pair[0] = pair[1], pair[1] = 0;
    }
  }

  // As right operands, by step, distance of the mid axis, parity and distance of the last axis; zeros where no output,
  // tap or channel exists.
  __device__ void stage_weights() const {
    constexpr int kHalves = 4 / sizeof(T);  // weights of a word
    const int lane = threadIdx.x % 32, column = lane / 4;
    int channel = Traits::kMarch ? column / 2 : column;
    const bool is_output = channel < p.combos;
    int mid_phase = p.by_channels(channel);
    int march_tap = p.by_mid_stride(mid_phase);
    if (Traits::kMarch && column % 2 == 1) march_tap += p.axis[0].stride;
    for (int fragment = threadIdx.x / 32; fragment < 8; fragment += kHeadsWindowWarps) {
      const int mid_tap = mid_phase + fragment / 4 * p.axis[1].stride, parity = fragment / 2 % 2;
      const int width_tap = 1 - parity + fragment % 2 * 2;
      const bool exists =
          is_output && march_tap < p.axis[0].kernel && mid_tap < p.axis[1].kernel && width_tap < p.axis[2].kernel;
      // The channels of a lane's two words (heads_window_load.cuh).
      constexpr bool kNeighbours = Traits::kPixels && sizeof(T) == 4;
      int input = lane % 4 * (kNeighbours ? 2 : kHalves);
      const int pitch = p.channels * p.taps;
      const T* from = static_cast<const T*>(p.weight) + (static_cast<int64_t>(group) * p.group_in + input) * pitch +
                      channel * p.taps + (march_tap * p.axis[1].kernel + mid_tap) * p.axis[2].kernel + width_tap;
      // Of one product, both distances of the last axis are side by side.
      unsigned char* to =
          shared + (kFloat32 ? fragment * 512 + lane * 16 : fragment / 2 * 512 + lane * 16 + fragment % 2 * 8);
#pragma unroll 8
      for (int step = 0; step < p.steps; ++step) {
        T value[2 * kHalves];
#pragma unroll
        for (int h = 0; h < 2 * kHalves; ++h) {
          const int further = kNeighbours ? h : h / kHalves * 4 * kHalves + h % kHalves;
          value[h] = exists && input + further < p.group_in ? __ldg(from + further * pitch) : T{};
        }
        store_weights(to, value);
        input += 8 * kHalves, from += 8 * kHalves * static_cast<int64_t>(pitch), to += 8 * kFragmentBytes;
      }
    }
  }
  static __device__ __forceinline__ void store_weights(unsigned char* to, const T (&value)[8 / sizeof(T)]) {
    if constexpr (kFloat32) {
      float4 word;
      split_tf32_rounded(value[0], word.x, word.z);
      split_tf32_rounded(value[1], word.y, word.w);
      *reinterpret_cast<float4*>(to) = word;
    } else if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(to_tf32(value[0]), to_tf32(value[1]));
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(two_halves(value[0], value[1]), two_halves(value[2], value[3]));
    }
  }

  // All input channels of a plane; the rows of the mid axis that exist have a bit each.
  __device__ __forceinline__ void add_plane(unsigned rows, bool stacked, Sums& sum) {
    uint32_t weights = shared_address(shared) + threadIdx.x % 32 * 16;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step, weights += 8 * kFragmentBytes) {
      heads_window_wait<1>();
      __syncwarp();
#pragma unroll
      for (int r = 0; r <= kRows / 2; ++r) {
        HeadsWindowLeft left = loader.read(stage, r);
        if (r == kRows / 2) {
          // Here, so that products hide what copies wait for.
          __syncwarp();
          loader.advance();
          loader.request(stage);
          stage = Loader::kStageBytes - stage;
        }
        if (((rows >> r | rows >> (r + kRows / 2)) & 1) == 0) continue;
        [[maybe_unused]] uint32_t low[6][4];
        halve(left.word, low);
#pragma unroll
        for (int distance = 0; distance < 2; ++distance) {
          // Row r is of base r - 1, and before base r; the other row likewise.
          const int base = r - 1 + distance;
          if (base < 0 || base >= kRows / 2 || (distance == 0 && stacked)) continue;
          if constexpr (kFloat32) {
            add_rows_float32(left.word, low, weights + distance * 4 * kFragmentBytes, sum[base]);
          } else {
            add_rows(left, weights + distance * 4 * kFragmentBytes, sum[base]);
          }
        }
      }
    }
  }

  // What the unit multiplies, of what was loaded.
  static __device__ __forceinline__ void halve(uint32_t (&word)[6][4], uint32_t (&low)[6][4]) {
#pragma unroll
    for (int i = 0; i < 24; ++i) {
      uint32_t& w = word[i / 4][i % 4];
      if constexpr (kFloat32) {
        // Rounded, as the weights are: what is left out stays below 2^-21 even where all products are alike.
        float h, l;
        split_tf32_rounded(__uint_as_float(w), h, l);
        w = __float_as_uint(h), low[i / 4][i % 4] = __float_as_uint(l);
      } else if constexpr (Traits::kPrecision == HeadsPrecision::kTf32) {
        w = heads_round_tf32(w);
      }
    }
  }

  static __device__ __forceinline__ void add_rows(const HeadsWindowLeft& left, uint32_t weights,
                                                  float (&sum)[2][4][4]) {
    uint4 right[2];
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) right[parity] = heads_load(weights + parity * 2 * kFragmentBytes);
#pragma unroll
    for (int d = 0; d < 2; ++d)
#pragma unroll
      for (int parity = 0; parity < 2; ++parity)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint32_t (&a)[4] = left.word[1 + t + parity - d];
          const uint32_t w0 = d == 0 ? right[parity].x : right[parity].z;
          const uint32_t w1 = d == 0 ? right[parity].y : right[parity].w;
          if constexpr (sizeof(T) == 4) {
            heads_multiply_tf32(sum[parity][t], a, w0, w1);
          } else {
            heads_multiply_16<T>(sum[parity][t], a, w0, w1);
          }
        }
  }

  // Three products of halves for one, the small ones first; sums go on in float32, since the tensor core truncates.
  static __device__ __forceinline__ void add_rows_float32(const uint32_t (&high)[6][4], const uint32_t (&low)[6][4],
                                                          uint32_t weights, float (&sum)[2][4][4]) {
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      uint4 right[2];
#pragma unroll
      for (int d = 0; d < 2; ++d) right[d] = heads_load(weights + (parity * 2 + d) * kFragmentBytes);
      float part[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) heads_start_tf32(part[t], high[1 + t + parity], right[0].z, right[0].w);
#pragma unroll
      for (int t = 0; t < 4; ++t) heads_multiply_tf32(part[t], high[t + parity], right[1].z, right[1].w);
#pragma unroll
      for (int d = 0; d < 2; ++d)
#pragma unroll
        for (int t = 0; t < 4; ++t) heads_multiply_tf32(part[t], low[1 + t + parity - d], right[d].x, right[d].y);
#pragma unroll
      for (int d = 0; d < 2; ++d)
#pragma unroll
        for (int t = 0; t < 4; ++t) heads_multiply_tf32(part[t], high[1 + t + parity - d], right[d].x, right[d].y);
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[parity][i / 4][i % 4] += part[i / 4][i % 4];
    }
  }

  // Makes the outputs of an item that are not finite again, by the definition.
  static __device__ __noinline__ void repair(const HeadsWindowParams& p, int index, int group) {
    HeadsWindowItem item;
    item.find(p, index);
    const int first[3] = {item.begin * p.axis[0].stride - p.axis[0].padding,
                          item.row * p.axis[1].stride - p.axis[1].padding, 2 * (item.column - p.shift) - p.lead};
    const int marches = (item.end - item.begin) * p.axis[0].stride, phases = p.axis[1].stride;
#pragma unroll 1
    for (int i = 0; i < marches * kRows * phases * p.channels; ++i) {
      int rest = i;
      const int channel = rest % p.channels;
      rest /= p.channels;
      const int phase = rest % phases;
      rest /= phases;
      const int base = rest % kRows, march = first[0] + rest / kRows;
      const int mid = first[1] + phase + (item.stacked ? 0 : base * phases);
      const int batch = item.batch + (item.stacked ? base : 0);
      const bool exists = march >= 0 && march < p.out_size[0] && mid >= 0 && mid < p.out_size[1] && batch < p.batch;
      if (!exists || (!item.stacked && item.row + base >= p.end_row)) continue;
#pragma unroll 1
      for (int width = first[2] + threadIdx.x % 32; width < first[2] + 2 * kHeadsWindowUnit; width += 32) {
        if (width < 0 || width >= p.out_size[2]) continue;
        T* const place = static_cast<T*>(p.output) + batch * p.out.batch +
                         (static_cast<int64_t>(group) * p.channels + channel) * p.out.channel + march * p.out.axis[0] +
                         mid * p.out.axis[1] + width * p.out.axis[2];
        if (p.rectify.shows_finite(to_accumulator(*place))) continue;
        double sum = heads_sum_by_definition<T>(p, batch, group, channel, march, mid, width);
        if (p.bias != nullptr) sum += to_accumulator(static_cast<const T*>(p.bias)[group * p.channels + channel]);
        *place = from_accumulator<T>(p.rectify(static_cast<float>(sum)));
      }
    }
  }
};

#endif

template <class Traits, bool kRectify>
__global__ void __launch_bounds__(kHeadsWindowWarps * 32, 1)
    heads_window_kernel(const __grid_constant__ HeadsWindowParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  int group = blockIdx.x;
  const int block = p.by_groups(group);
  HeadsWindowKernel<Traits, kRectify>(p, shared, group, block).run();
#endif
}

}  // namespace fastconvt::cuda
