// The gradients of weight and bias for layers with few (output channel, tap) pairs a group:
//
//   grad_weight[ci, pair] = sum over positions of input[ci, position] * grad_output[co, position's place in tap].
//
// A block stages the inputs of a box of positions and the output's gradient around it. A warp has up to 32 channels by
// 64 pairs, or 16 by 80, in registers; the warps of a block share channels, then positions. Blocks own their partial
// sums, which a second kernel adds in float64.
#pragma once

#include "heads_weight_gradient_bias.cuh"

namespace fastconvt::cuda {

template <typename T_, HeadsOperands kOperands_, int kRows_, int kColumns_>
struct HeadsWeightGradientTraits {
  using Element = T_;
  static constexpr HeadsOperands kOperands = kOperands_;
  static constexpr int kRows = kRows_;        // of 16 channels
  static constexpr int kColumns = kColumns_;  // of 8 pairs
  static constexpr int kBlocks = sizeof(T_) == 4 ? 3 : 4;
};

template <class Traits>
class HeadsWeightGradient {
  using T = typename Traits::Element;
  static constexpr bool kSplit = Traits::kOperands == HeadsOperands::kSplit;
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns;
  static constexpr int kChunk = 16;  // positions
  static constexpr int kGroup = kColumns == 6       ? 6
                                : kColumns % 5 == 0 ? 5
                                                    : 4;  // columns whose operands are in registers
  static constexpr bool kOffsetsInRegisters = kRows * kColumns < (kSplit ? 12 : 16);

  const HeadsGradientParams& p;
  unsigned char* const shared;
  const HeadsKind kind;
  const int lane = threadIdx.x % 32, column = lane % 4, row = lane / 4, warp = threadIdx.x / 32;
  const int channel_warps, position_warps;  // that share channels, and positions
  const int first_channel, first_chunk;     // of this warp
  float sums[kRows][kColumns][4] = {};
  float pair_sums[kColumns] = {};         // of the output's gradient, for the bias's
  const int channel_step, position_step;  // of staged inputs, in bytes
  const int input_offset;                 // of this lane's first operand
  const bool adds_pairs;

 public:
  __device__ HeadsWeightGradient(const HeadsGradientParams& p, unsigned char* shared)
      : p(p),
        shared(shared),
        kind(p),
        channel_warps(p.channels / (16 * kRows)),
        position_warps(kHeadsGradientWarps / channel_warps),
        first_channel(warp % channel_warps * 16 * kRows),
        first_chunk(warp / channel_warps),
        channel_step(p.channels_last ? sizeof(T) : sizeof(T) * p.input_pitch),
        position_step(p.channels_last ? sizeof(T) * p.input_pitch : sizeof(T)),
        input_offset(first_offset()),
        adds_pairs(p.bias_partial != nullptr && p.bias_by_pairs && !p.bias_by_ones && kind.channel == 0 &&
                   first_channel == 0) {}

  __device__ void run() {
    const int pairs = min(p.chunk_pairs, p.pairs - kind.pair);
    heads_make_tables<T>(p, kind.pair, pairs, shared, [](int i) { return position_of(i); }, [](int i) { return i; });
    make_runs();
    heads_make_boxes(p, kind, shared);
    const HeadsBias<T> bias(p, shared, kind);
    bias.clear();
    if (!p.channels_last) clear_excess();
    wait_for_previous_grid();
    __syncthreads();
    int offset[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int pair = n * 8 + row;
      offset[n] = pair < pairs ? reinterpret_cast<const int*>(shared + p.offset_table)[pair] : 0;
    }
    heads_for_boxes(
        p, kind, shared,
        [&](const HeadsBox& box, int stage) {
          unsigned char* to = shared + p.first_stage + stage * p.stage_bytes;
          heads_stage_grads<T>(p, box, shared, to);
          stage_inputs(box, reinterpret_cast<T*>(to + p.grad_bytes));
          if (p.bias_partial != nullptr && p.bias_by_ones) stage_ones(box, reinterpret_cast<T*>(to + p.grad_bytes));
        },
        [&](const HeadsBox& box, int stage) {
          const unsigned char* from = shared + p.first_stage + stage * p.stage_bytes;
          if (adds_pairs) {
            add_box<true>(offset, from, from + p.grad_bytes);
          } else {
            add_box<false>(offset, from, from + p.grad_bytes);
          }
          bias.add(box, reinterpret_cast<const T*>(from));
        });
    __syncthreads();
    let_next_grid_begin();  // the second pass may get ready
    store_sums(pairs);
    if (p.bias_partial != nullptr && kind.channel == 0) store_bias(bias, pairs);
  }

 private:
  // What stands at i of the table: a lane's four positions of a chunk side by side, as fragments have them.
  static __device__ __forceinline__ int position_of(int i) {
    const int t = i / 4 % 4, e = i % 4;
    return i / kChunk * kChunk + (sizeof(T) == 4 ? 4 * e + t : 2 * t + e % 2 + e / 2 * 8);
  }

  __device__ __forceinline__ void make_runs() const {
    HeadsPlace* runs = reinterpret_cast<HeadsPlace*>(shared + p.run_table);  // where they begin
    for (int i = threadIdx.x; i < p.runs; i += kHeadsGradientThreads) {
      int height = p.whole_rows ? 0 : i;
      const int depth = p.whole_rows ? i : p.axis[1].by_box(height);
      runs[i] = {(depth * p.axis[1].in + height) * p.axis[2].in, static_cast<uint32_t>(depth << 20 | height << 10)};
    }
  }

  // Contiguous: positions beyond the box's last one, in every stage.
  __device__ __forceinline__ void clear_excess() const {
    const int begin = p.axis[0].box * p.axis[1].box * p.axis[2].box, excess = p.positions - begin;
    for (int i = threadIdx.x; i < p.stages * p.channels * excess; i += kHeadsGradientThreads) {
      const int line = i / excess, stage = line / p.channels;
      T* inputs = reinterpret_cast<T*>(shared + p.first_stage + stage * p.stage_bytes + p.grad_bytes);
      inputs[(line - stage * p.channels) * p.input_pitch + begin + i - line * excess] = T{};
    }
  }

  __device__ __forceinline__ void stage_inputs(const HeadsBox& box, T* stage) const {
    const T* const first = static_cast<const T*>(p.input) + box.input;
    const int channels = min(p.channels, p.group_in - kind.channel);
    heads_for_bytes<T>(p.input_copy.bytes, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value, kElements = kBytes / static_cast<int>(sizeof(T));
      const int row_step = p.input_copy.row_step(), log2 = p.input_copy.row_step_log2();
#pragma unroll 1
      for (int v = p.input_copy.first_vector(); v < p.input_copy.vectors; v += p.input_copy.vector_step()) {
        int r = p.input_copy.first_row();
        const int element = v * kElements;
        T* target = stage + r * p.input_pitch + element;
        if (p.channels_last) {
          if (element >= channels) break;
          const int in_channels = static_cast<int>(p.input_strides.axis[2]);
          const HeadsPlace* places = reinterpret_cast<const HeadsPlace*>(shared + p.place_table);
          heads_repeat((p.positions - r + row_step - 1) >> log2, [&] {
            const HeadsPlace place = places[r];
            heads_copy<kBytes>(target, first + static_cast<int64_t>(place.offset) * in_channels + element,
                               place.exists(box));
            r += row_step, target += row_step * p.input_pitch;
          });
        } else {
          int within = element;
          const int index = p.by_run(within);
          const HeadsPlace run = reinterpret_cast<const HeadsPlace*>(shared + p.run_table)[index];
          const bool exists = within < box.run && run.exists(box);
          const T* source = first + r * p.input_strides.channel + run.offset + within;
          heads_repeat((channels - r + row_step - 1) >> log2, [&] {
            heads_copy<kBytes>(target, source, exists);
            source += row_step * p.input_strides.channel, target += row_step * p.input_pitch;
          });
        }
      }
    });
  }

  // The channel after the group's: ones where there are positions.
  __device__ __forceinline__ void stage_ones(const HeadsBox& box, T* stage) const {
    const HeadsPlace* places = reinterpret_cast<const HeadsPlace*>(shared + p.place_table);
    const int step = p.channels_last ? p.input_pitch : 1;
    T* const ones = stage + p.group_in * (p.channels_last ? 1 : p.input_pitch);
    for (int i = threadIdx.x; i < p.positions; i += kHeadsGradientThreads) {
      ones[i * step] = from_accumulator<T>(places[i].exists(box) ? 1.f : 0.f);
    }
  }

  // Where this lane's operands lie from those of channel 0 and position 0: ldmatrix takes rows of 8 channels, or
  // positions, of 16 bits.
  __device__ __forceinline__ int first_offset() const {
    const int r = lane % 8, right = lane / 8 % 2 * 8, below = lane / 16 * 8;
    const int channel = sizeof(T) == 4 ? row : p.channels_last ? right : right + r;
    const int position = sizeof(T) == 4 ? column : p.channels_last ? below + r : below;
    return (first_channel + channel) * channel_step + (first_chunk * kChunk + position) * position_step;
  }

  // The operand of 16 channels and a chunk of positions, 32 bits a register: float32 of 8 positions, then 8 more.
  __device__ __forceinline__ void load_inputs(const unsigned char* from, uint32_t (&a)[16 / sizeof(T) * 2]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = *reinterpret_cast<const uint32_t*>(from + i % 2 * 8 * channel_step + i / 2 * 4 * position_step);
      }
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
      if (p.channels_last) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(shared_address(from))
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(shared_address(from))
                     : "memory");
      }
#endif
    }
  }

  template <bool kPairs>
  __device__ __forceinline__ void add_box(const int (&offset)[kColumns], const unsigned char* grads,
                                          const unsigned char* inputs) {
    const int4* bases = reinterpret_cast<const int4*>(shared + p.base_table) + first_chunk * 4 + column;
    inputs += input_offset;
    int left = p.axis[0].box * p.axis[1].box * p.axis[2].box - first_chunk * kChunk;  // positions of the box
#pragma unroll 1
    for (int chunk = first_chunk; chunk < p.positions / kChunk; chunk += position_warps) {
      const int4 b = *bases;
      const unsigned char* base[4] = {grads + b.x, grads + b.y, grads + b.z, grads + b.w};
      HeadsMask<T> mask{};
      if constexpr (kPairs) mask.make(left, column);
      left -= position_warps * kChunk;
      uint32_t a[kRows][16 / sizeof(T) * 2];
#pragma unroll
      for (int m = 0; m < kRows; ++m) load_inputs(inputs + m * 16 * channel_step, a[m]);
      bases += position_warps * 4;
      inputs += position_warps * kChunk * position_step;
      if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int first = 0; first < kColumns; first += kGroup) add_group<kPairs>(offset, base, mask, a, first);
      } else {
        uint32_t low[kRows][8];
#pragma unroll
        for (int i = 0; i < 8 * kRows; ++i) {
          const uint32_t x = a[i / 8][i % 8];
          if (kSplit) {
            heads_split(x, a[i / 8][i % 8], low[i / 8][i % 8]);
          } else {
            a[i / 8][i % 8] = heads_round(x);
          }
        }
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
          add_columns<kPairs>(offset_of(offset, n), offset_of(offset, n + 1), base, mask, a, low, n);
        }
      }
    }
  }

  // Where this lane's pair of a column lies.
  __device__ __forceinline__ int offset_of(const int (&offset)[kColumns], int n) const {
    return kOffsetsInRegisters ? offset[n] : reinterpret_cast<const int*>(shared + p.offset_table)[n * 8 + row];
  }

  // Some columns of 8 pairs, 16 bits.
  template <bool kPairs>
  __device__ __forceinline__ void add_group(const int (&offset)[kColumns], const unsigned char* const (&base)[4],
                                            const HeadsMask<T>& mask, const uint32_t (&a)[kRows][16 / sizeof(T) * 2],
                                            int first) {
    uint32_t right[kGroup][2];
#pragma unroll
    for (int i = 0; i < 2 * kGroup; ++i) {
      const int at = offset_of(offset, first + i / 2), e = i % 2 * 2;
      right[i / 2][i % 2] = heads_element<T>(base[e] + at) | heads_element<T>(base[e + 1] + at) << 16;
    }
#pragma unroll
    for (int i = 0; i < kRows * kGroup; ++i) {
      const int n = i / kRows, m = i % kRows;
      heads_gradient_mma<T>(sums[m][first + n], a[m][0], a[m][1], a[m][2], a[m][3], right[n][0], right[n][1]);
    }
    if constexpr (kPairs) {
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
        pair_sums[first + n] +=
            sum_of_halves<T>(right[n][0] & mask.word[0]) + sum_of_halves<T>(right[n][1] & mask.word[1]);
      }
    }
  }

  // Two columns of 8 pairs, float32.
  template <bool kPairs>
  __device__ __forceinline__ void add_columns(int offset0, int offset1, const unsigned char* const (&base)[4],
                                              const HeadsMask<T>& mask, const uint32_t (&a)[kRows][16 / sizeof(T) * 2],
                                              const uint32_t (&low)[kRows][8], int n) {
    uint32_t b[2][4], b_low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t x = heads_element<T>(base[i % 4] + (i < 4 ? offset0 : offset1));
      if (kSplit) {
        heads_split(x, b[i / 4][i % 4], b_low[i / 4][i % 4]);
      } else {
        b[i / 4][i % 4] = heads_round(x);
      }
      if (kPairs && mask.exists[i % 4]) pair_sums[n + i / 4] += __uint_as_float(x);
    }
    const auto multiply = [&](float (&sum)[4], const uint32_t (&left)[16 / sizeof(T) * 2], const uint32_t (&right)[4],
                              int step) {
      heads_gradient_mma<T>(sum, left[4 * step], left[4 * step + 1], left[4 * step + 2], left[4 * step + 3],
                            right[2 * step], right[2 * step + 1]);
    };
    if constexpr (kSplit) {
      // The matrix unit truncates: it adds one chunk, the small products first, and float32 the chunks.
      float part[kRows][2][4] = {};
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        const int step = i < 4 ? i / 2 : i - 4;
#pragma unroll
        for (int k = 0; k < 2 * kRows; ++k) {
          const int m = k / 2, c = k % 2;
          multiply(part[m][c], i < 4 && i % 2 == 0 ? low[m] : a[m], i < 4 && i % 2 == 1 ? b_low[c] : b[c], step);
        }
      }
#pragma unroll
      for (int k = 0; k < 8 * kRows; ++k) sums[k / 8][n + k / 4 % 2][k % 4] += part[k / 8][k / 4 % 2][k % 4];
    } else {
#pragma unroll
      for (int k = 0; k < 4 * kRows; ++k)
        multiply(sums[k / 2 % kRows][n + k % 2], a[k / 2 % kRows], b[k % 2], k / (2 * kRows));
    }
  }

  // The block's partial sums, those of the warps that share positions in their order.
  __device__ __forceinline__ void store_sums(int pairs) {
    constexpr int kSums = kRows * kColumns * 128;
    float* saved = reinterpret_cast<float*>(shared + p.first_stage);
#pragma unroll
    for (int i = 0; i < kRows * kColumns * 4; ++i) {
      saved[warp * kSums + i * 32 + lane] = sums[i / (4 * kColumns)][i / 4 % kColumns][i % 4];
    }
    __syncthreads();
    const int channels = min(p.channels, p.group_in - kind.channel);
    float* to = p.partial + static_cast<int64_t>(blockIdx.x) * p.weight_elements +
                static_cast<int64_t>(kind.group * p.group_in + kind.channel) * p.pairs + kind.pair;
#pragma unroll 4
    for (int i = threadIdx.x; i < channels * p.chunk_pairs; i += kHeadsGradientThreads) {
      int pair = i;
      const int channel = p.by_chunk_pairs(pair);
      if (pair >= pairs) continue;
      const int owner = channel / (16 * kRows), m = channel / 16 % kRows, r = channel % 16;
      const int place = ((m * kColumns + pair / 8) * 4 + r / 8 * 2 + pair % 2) * 32 + r % 8 * 4 + pair % 8 / 2;
      float sum = 0;
      for (int w = owner; w < position_warps * channel_warps; w += channel_warps) sum += saved[w * kSums + place];
      to[static_cast<int64_t>(channel) * p.pairs + pair] = sum;
    }
  }

  // After the sums were stored.
  __device__ __forceinline__ void store_bias(const HeadsBias<T>& bias, int pairs) const {
    if (!p.bias_by_pairs) {
      if (kind.pair == 0) bias.store();
      return;
    }
    float* saved = reinterpret_cast<float*>(shared + p.first_stage);
    if (p.bias_by_ones) {
      // Those of the channel of ones, by the warps that have it, are beside the weight's.
      constexpr int kSums = kRows * kColumns * 128;
      const int owner = p.group_in / (16 * kRows), m = p.group_in / 16 % kRows, r = p.group_in % 16;
      bias.store_pairs(saved + owner * kSums, channel_warps * kSums, position_warps, pairs, [&](int pair) {
        return ((m * kColumns + pair / 8) * 4 + r / 8 * 2 + pair % 2) * 32 + r % 8 * 4 + pair % 8 / 2;
      });
      return;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float sum = pair_sums[n];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (column == 0 && first_channel == 0) saved[first_chunk * kColumns * 8 + n * 8 + row] = sum;
    }
    __syncthreads();
    bias.store_pairs(saved, kColumns * 8, position_warps, pairs, [](int pair) { return pair; });
  }
};

template <class Traits>
__global__ void __launch_bounds__(kHeadsGradientThreads, Traits::kBlocks)
    heads_weight_gradient_kernel(const __grid_constant__ HeadsGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared[];
  HeadsWeightGradient<Traits>(p, shared).run();
#endif
}

}  // namespace fastconvt::cuda
