// The gradient of the input for layers with few (output channel, tap) pairs a group:
//
//   grad_input[ci, position] = sum over pairs (co, tap) of weight[ci, pair] * grad_output[co, position's place in tap].
//
// A warp makes 64 channels of 32 positions at a time. The weights stay in shared memory, as fragments; the output's
// gradient around a box of positions is staged there, and lanes gather their operands from it. Contiguous: a lane ends
// with neighbouring positions of a channel, channels_last: with neighbouring channels of a position.
#pragma once

#include "heads_gradient.cuh"

namespace fastconvt::cuda {

template <typename T_, HeadsOperands kOperands_, bool kLast_>
struct HeadsInputGradientTraits {
  using Element = T_;
  static constexpr HeadsOperands kOperands = kOperands_;
  static constexpr bool kLast = kLast_;
  static constexpr int kBlocks = kOperands == HeadsOperands::kSplit ? 3 : 4;
  static constexpr int kVector = 16 / sizeof(T_);
  static constexpr int kWords = kOperands == HeadsOperands::kSplit ? 4 : kOperands == HeadsOperands::kTf32 ? 2 : 1;
};

template <class Traits>
class HeadsInputGradient {
  using T = typename Traits::Element;
  static constexpr bool kLast = Traits::kLast, kSplit = Traits::kOperands == HeadsOperands::kSplit;
  static constexpr int kVector = Traits::kVector, kWords = Traits::kWords;
  using Sums = float[4][4][4];  // by 16 channels, 8 positions, register; channels_last: [m][2 * p + h] is of the 16
                                // positions p and the 8 channels 2 * m + h

  const HeadsGradientParams& p;
  unsigned char* const shared;
  const HeadsKind kind;
  const int lane = threadIdx.x % 32, column = lane % 4, row = lane / 4;

 public:
  __device__ HeadsInputGradient(const HeadsGradientParams& p, unsigned char* shared) : p(p), shared(shared), kind(p) {}

  __device__ void run() {
    heads_make_tables<T>(
        p, 0, p.pairs, shared, [](int i) { return position_of(i); },
        [](int i) { return i / 16 * 16 + i % 4 * 4 + i / 4 % 4; });
    heads_make_boxes(p, kind, shared);
    let_next_grid_begin();
    wait_for_previous_grid();
    __syncthreads();
    bool first = true;
    heads_for_boxes(
        p, kind, shared,
        [&](const HeadsBox& box, int stage) {
          heads_stage_grads<T>(p, box, shared, shared + p.first_stage + stage * p.stage_bytes);
        },
        [&](const HeadsBox& box, int stage) {
          if (first) {
            stage_weights();
            __syncthreads();
            first = false;
          }
          make_box(box, shared + p.first_stage + stage * p.stage_bytes);
        });
  }

 private:
  // Of place i: of the 32 positions of a unit, four places side by side are those of one lane's column of products.
  static __device__ __forceinline__ int position_of(int i) {
    const int n = i / 4 % 8, j = i % 4;  // tile j of 8
    const int position = kLast            ? 8 * j + n
                         : sizeof(T) == 4 ? 16 * (j / 2) + 4 * (n / 2) + 2 * (j % 2) + n % 2
                                          : 8 * (n / 2) + 2 * j + n % 2;
    return i / 32 * 32 + position;
  }
  // The channel of row `row` of half h of tile m of 16.
  static __device__ __forceinline__ int channel_of(int m, int h, int row) {
    if (!kLast) return 16 * m + 8 * h + row;
    return sizeof(T) == 4 ? 16 * m + 4 * (row / 2) + 2 * h + row % 2
                          : 32 * (m / 2) + 8 * (row / 2) + 4 * (m % 2) + 2 * h + row % 2;
  }

  // Fragments: by 16 pairs, 16 channels, word and lane; split: high, then low, of 8 pairs.
  __device__ __forceinline__ void stage_weights() const {
    uint4* fragments = reinterpret_cast<uint4*>(shared);
    const int tiles = p.channels / 16, all = (p.pairs + 15) / 16 * tiles * 32;
    const T* weight =
        static_cast<const T*>(p.weight) + static_cast<int64_t>(kind.group * p.group_in + kind.channel) * p.pairs;
    const int channels = p.group_in - kind.channel;
#pragma unroll 2
    for (int i = threadIdx.x; i < all; i += kHeadsGradientThreads) {
      const int tile = i / 32, chunk = tile / tiles, m = tile - chunk * tiles;
      T value[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int pair = chunk * 16 + e % 4 * 4 + column, channel = channel_of(m, e / 4, row);
        value[e / 4][e % 4] =
            pair < p.pairs && channel < channels ? __ldg(weight + static_cast<int64_t>(channel) * p.pairs + pair) : T{};
      }
      uint4* to = fragments + tile * kWords * 32 + lane;
      if constexpr (sizeof(T) == 2) {
        *to = make_uint4(two(value[0][0], value[0][1]), two(value[1][0], value[1][1]), two(value[0][2], value[0][3]),
                         two(value[1][2], value[1][3]));
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t high[4], low[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            heads_split(__float_as_uint(value[e % 2][2 * step + e / 2]), high[e], low[e]);
            if (!kSplit) high[e] = heads_round(__float_as_uint(value[e % 2][2 * step + e / 2]));
          }
          to[step * kWords / 2 * 32] = make_uint4(high[0], high[1], high[2], high[3]);
          if constexpr (kSplit) to[(2 * step + 1) * 32] = make_uint4(low[0], low[1], low[2], low[3]);
        }
      }
    }
  }
  static __device__ __forceinline__ uint32_t two(T first, T second) {
    uint16_t bits[2] = {};
    if constexpr (sizeof(T) == 2) memcpy(bits, &first, 2), memcpy(bits + 1, &second, 2);
    return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
  }

  __device__ __forceinline__ void make_box(const HeadsBox& box, const unsigned char* stage) const {
    const int groups = (p.channels + 63) / 64, units = p.positions / 32 * groups;
    for (int unit = threadIdx.x / 32; unit < units; unit += kHeadsGradientWarps) {
      const int group = groups == 1 ? 0 : unit % groups, position = (groups == 1 ? unit : unit / groups) * 32;
      Sums sums = {};
      add_pairs(position, group * 4, stage, sums);
      if constexpr (kLast) {
        store_last(box, position, group * 64, sums);
      } else {
        store(box, position, group * 64, sums);
      }
    }
  }

  // One product of fragments, in the order that the layout wants.
  static __device__ __forceinline__ void multiply(float (&sum)[4][4], const uint4& w, const uint32_t (&b)[4][2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kLast) {
        const int first = j / 2 * 2;
        heads_gradient_mma<T>(sum[j], b[first][0], b[first + 1][0], b[first][1], b[first + 1][1],
                              j % 2 == 0 ? w.x : w.y, j % 2 == 0 ? w.z : w.w);
      } else {
        heads_gradient_mma<T>(sum[j], w.x, w.y, w.z, w.w, b[j][0], b[j][1]);
      }
    }
  }

  __device__ __forceinline__ void add_pairs(int position, int first_tile, const unsigned char* stage,
                                            Sums& sums) const {
    const int4 bases = reinterpret_cast<const int4*>(shared + p.base_table)[position / 4 + row];
    const unsigned char* base[4] = {stage + bases.x, stage + bases.y, stage + bases.z, stage + bases.w};
    const int4* offsets = reinterpret_cast<const int4*>(shared + p.offset_table) + column;
    const int all_tiles = p.channels / 16, tiles = all_tiles - first_tile;
    const uint4* fragments = reinterpret_cast<const uint4*>(shared) + first_tile * kWords * 32 + lane;
    const int chunks = (p.pairs + 15) / 16;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, offsets += 4, fragments += all_tiles * kWords * 32) {
      const int4 offset = *offsets;
      const int at[4] = {offset.x, offset.y, offset.z, offset.w};
      uint32_t raw[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) raw[i / 4][i % 4] = heads_element<T>(base[i / 4] + at[i % 4]);
      if constexpr (sizeof(T) == 2) {
        uint32_t b[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = raw[i / 2][i % 2 * 2] | raw[i / 2][i % 2 * 2 + 1] << 16;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (m < tiles) multiply(sums[m], fragments[m * 32], b);
        }
      } else {
        uint32_t high[2][4][2], low[2][4][2];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const uint32_t x = raw[i / 4][i % 4];
          uint32_t &to = high[i % 4 / 2][i / 4][i % 2], &rest = low[i % 4 / 2][i / 4][i % 2];
          if (kSplit) {
            heads_split(x, to, rest);
          } else {
            to = heads_round(x);
          }
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (m >= tiles) continue;
          const uint4* w = fragments + m * kWords * 32;
          if constexpr (kSplit) {
            float part[4][4] = {};
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              multiply(part, w[(2 * step + 1) * 32], high[step]);
              multiply(part, w[2 * step * 32], low[step]);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) multiply(part, w[2 * step * 32], high[step]);
#pragma unroll
            for (int i = 0; i < 16; ++i) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
          } else {
#pragma unroll
            for (int step = 0; step < 2; ++step) multiply(sums[m], w[step * 32], high[step]);
          }
        }
      }
    }
  }

  __device__ const HeadsPlace* places() const { return reinterpret_cast<const HeadsPlace*>(shared + p.place_table); }

  __device__ T* output(const HeadsBox& box, int channel) const {
    return static_cast<T*>(p.output) + box.input + channel * p.input_strides.channel;
  }

  // kCount neighbours in memory, by one store.
  template <int kCount>
  static __device__ __forceinline__ void put(T* to, const float (&value)[kCount]) {
    if constexpr (kCount == 1) {
      *to = from_accumulator<T>(value[0]);
    } else {
      uint32_t word[kCount * sizeof(T) / 4];
#pragma unroll
      for (int i = 0; i < static_cast<int>(kCount * sizeof(T) / 4); ++i) {
        if constexpr (sizeof(T) == 4) {
          word[i] = __float_as_uint(value[i]);
        } else {
          word[i] = two(from_accumulator<T>(value[2 * i]), from_accumulator<T>(value[2 * i + 1]));
        }
      }
      // As assembly, since the compiler takes other stores apart.
      if constexpr (sizeof(word) == 16) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                     "r"(word[3])
                     : "memory");
      } else if constexpr (sizeof(word) == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
      } else {
        asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(word[0]) : "memory");
      }
    }
  }

  // Calls function(std::integral_constant<int, elements>) with what one store takes.
  template <typename Function>
  __device__ __forceinline__ void for_width(Function&& function) const {
    if (p.store_bytes == 16) return function(std::integral_constant<int, kVector>{});
    if (p.store_bytes >= 2 * sizeof(T)) return function(std::integral_constant<int, 2>{});
    function(std::integral_constant<int, 1>{});
  }

  // Contiguous: a lane has 8 positions of 8 channels, kVector of them side by side.
  __device__ __forceinline__ void store(const HeadsBox& box, int position, int first_channel, const Sums& sums) const {
    T* const to = output(box, first_channel + row);
    const int channels = min(p.channels, p.group_in - kind.channel) - first_channel - row;
    bool finite = true;
    for_width([&](auto width) {
      constexpr int kWidth = decltype(width)::value;
#pragma unroll
      for (int e = 0; e < 8; e += kWidth) {
        const HeadsPlace place = places()[position + e / kVector * 16 + kVector * column + e % kVector];
        if (!place.exists(box)) continue;
        T* target = to + place.offset;
#pragma unroll
        for (int c = 0; c < 8; ++c, target += 8 * p.input_strides.channel) {
          if (8 * c >= channels) break;
          float value[kWidth];
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const int at = e + i;
            value[i] = sums[c / 2][at / 2][c % 2 * 2 + at % 2];
            finite &= is_finite(value[i]);
          }
          put<kWidth>(target, value);
        }
      }
    });
    if (finite) return;
#pragma unroll 1
    for (int i = 0; i < 64; ++i) {
      const int e = i / 8, c = i % 8;
      const int q = position + e / kVector * 16 + kVector * column + e % kVector;
      const HeadsPlace place = places()[q];
      if (place.exists(box) && 8 * c < channels) {
        repair(p, box, place, first_channel + row + 8 * c);
      }
    }
  }

  // channels_last: a lane has 16 channels, kVector of them side by side, of 4 positions.
  __device__ __forceinline__ void store_last(const HeadsBox& box, int position, int first_channel,
                                             const Sums& sums) const {
    T* const to = output(box, first_channel + kVector * column);
    const int channels = min(p.channels, p.group_in - kind.channel) - first_channel - kVector * column;
    bool finite = true;
    for_width([&](auto width) {
      constexpr int kWidth = decltype(width)::value;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const HeadsPlace place = places()[position + 8 * r + row];
        if (!place.exists(box)) continue;
        T* target = to + place.offset * p.input_strides.axis[2];
#pragma unroll
        for (int e = 0; e < 16; e += kWidth) {
          const int channel = e / kVector * 4 * kVector + e % kVector;
          if (channel >= channels) continue;
          float value[kWidth];
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const int at = e + i;  // registers: 2 neighbours, halves, tiles of 16
            value[i] = sums[at / 4][r / 2 * 2 + at / 2 % 2][r % 2 * 2 + at % 2];
            finite &= is_finite(value[i]);
          }
          put<kWidth>(target + channel, value);
        }
      }
    });
    if (finite) return;
#pragma unroll 1
    for (int i = 0; i < 64; ++i) {
      const int q = position + i / 16 * 8 + row, channel = i % 16 / kVector * 4 * kVector + i % kVector;
      const HeadsPlace place = places()[q];
      if (place.exists(box) && channel < channels) {
        repair(p, box, place, first_channel + kVector * column + channel);
      }
    }
  }

  // Makes an element that is not finite again, by the definition, where infinity and NaN meet only what they should.
  // What it takes is little, so that no register of the callers waits for it.
  static __device__ __noinline__ void repair(const HeadsGradientParams& p, const HeadsBox& box, HeadsPlace place,
                                             int channel) {
    const HeadsKind kind(p);
    T* to = static_cast<T*>(p.output) + box.input + channel * p.input_strides.channel +
            place.offset * p.input_strides.axis[2];
    if (is_finite(to_accumulator(*to))) return;
    const T* grad = static_cast<const T*>(p.grad) + box.batch * p.grad_strides.batch +
                    kind.group * p.group_out * p.grad_strides.channel;
    const T* weight = static_cast<const T*>(p.weight) +
                      static_cast<int64_t>(kind.group * p.group_in + kind.channel + channel) * p.pairs;
    double sum = 0;
    for (int pair = 0; pair < p.pairs; ++pair) {
      int rest = pair;
      bool exists = true;
      int64_t offset = 0;
      for (int a = 2; a >= 0; --a) {
        const int tap = rest % p.axis[a].kernel;
        rest /= p.axis[a].kernel;
        const int o =
            (box.first[a] + place.of_axis(a)) * p.axis[a].stride - p.axis[a].padding + tap * p.axis[a].dilation;
        exists = exists && o >= 0 && o < p.axis[a].out;
        offset += o * p.grad_strides.axis[a];
      }
      if (!exists) continue;
      const float g = to_accumulator(grad[rest * p.grad_strides.channel + offset]), w = to_accumulator(weight[pair]);
      sum += static_cast<double>(g) * w;
    }
    *to = from_accumulator<T>(static_cast<float>(sum));
  }
};

template <class Traits>
__global__ void __launch_bounds__(kHeadsGradientThreads, Traits::kBlocks)
    heads_input_gradient_kernel(const __grid_constant__ HeadsGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  HeadsInputGradient<Traits>(p, shared).run();
#endif
}

}  // namespace fastconvt::cuda
