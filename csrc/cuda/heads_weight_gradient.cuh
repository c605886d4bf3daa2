// The gradients of weight and bias for layers with few (output channel, tap) pairs a group:
//
//   grad_weight[ci, pair] = sum over positions of input[ci, position] * grad_output[co, position's place in tap].
//
// A block stages the inputs of a box of positions and the output's gradient around it. A warp has up to 32 channels by
// 64 pairs, or 16 by 80, in registers; the warps of a block share channels, then positions. Blocks own their partial
// sums, which a second kernel adds in float64.
#pragma once

#include "heads_gradient.cuh"

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

  const HeadsGradientParams& p;
  unsigned char* const shared;
  const HeadsKind kind;
  const int lane = threadIdx.x % 32, column = lane % 4, row = lane / 4, warp = threadIdx.x / 32;
  const int channel_warps, position_warps;  // that share channels, and positions
  const int first_channel, first_chunk;     // of this warp
  float sums[kRows][kColumns][4] = {};

 public:
  __device__ HeadsWeightGradient(const HeadsGradientParams& p, unsigned char* shared)
      : p(p),
        shared(shared),
        kind(p),
        channel_warps(p.channels / (16 * kRows)),
        position_warps(kHeadsGradientWarps / channel_warps),
        first_channel(warp % channel_warps * 16 * kRows),
        first_chunk(warp / channel_warps) {}

  __device__ void run() {
    const int pairs = min(p.chunk_pairs, p.pairs - kind.pair);
    heads_make_tables<T>(p, kind.pair, pairs, shared, [](int i) { return position_of(i); }, [](int i) { return i; });
    make_runs();
    heads_make_boxes(p, kind, shared);
    double* bias = reinterpret_cast<double*>(shared + p.bias_sums);
    for (int i = threadIdx.x; i < p.bias_items * 32; i += kHeadsGradientThreads) bias[i] = 0;
    if (!p.channels_last) clear_excess();
    __syncthreads();
    int offset[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int pair = n * 8 + row;
      offset[n] = pair < pairs ? reinterpret_cast<const int*>(shared + p.offset_table)[pair] : 0;
    }
    const bool with_bias = p.bias_partial != nullptr && kind.channel == 0 && kind.pair == 0;
    heads_for_boxes(
        p, kind, shared,
        [&](const HeadsBox& box, int stage) {
          unsigned char* to = shared + p.first_stage + stage * p.stage_bytes;
          heads_stage_grads<T>(p, box, shared, to);
          stage_inputs(box, reinterpret_cast<T*>(to + p.grad_bytes));
        },
        [&](const HeadsBox& box, int stage) {
          const unsigned char* from = shared + p.first_stage + stage * p.stage_bytes;
          add_box(offset, from, from + p.grad_bytes);
          if (with_bias) add_bias(box, reinterpret_cast<const T*>(from));
        });
    __syncthreads();
    if (with_bias) store_bias();
    store_sums(pairs);
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
      const int row_step = p.input_copy.row_step();
#pragma unroll 1
      for (int v = p.input_copy.first_vector(); v < p.input_copy.vectors; v += p.input_copy.vector_step()) {
        int r = p.input_copy.first_row();
        const int element = v * kElements;
        if (p.channels_last) {
          if (element >= channels) break;
          T* target = stage + r * p.input_pitch + element;
          const int in_channels = static_cast<int>(p.input_strides.axis[2]);
          const HeadsPlace* places = reinterpret_cast<const HeadsPlace*>(shared + p.place_table);
#pragma unroll(kBytes == 16 ? 4 : 1)
          for (; r < p.positions; r += row_step, target += row_step * p.input_pitch) {
            const HeadsPlace place = places[r];
            heads_copy<kBytes>(target, first + static_cast<int64_t>(place.offset) * in_channels + element,
                               place.exists(box));
          }
        } else {
          int within = element;
          const int index = p.by_run(within);
          const HeadsPlace run = reinterpret_cast<const HeadsPlace*>(shared + p.run_table)[index];
          const bool exists = within < box.run && run.exists(box);
          T* target = stage + r * p.input_pitch + element;
          const T* source = first + r * p.input_strides.channel + run.offset + within;
#pragma unroll(kBytes == 16 ? 4 : 1)
          for (; r < channels; r += row_step, target += row_step * p.input_pitch) {
            heads_copy<kBytes>(target, source, exists);
            source += row_step * p.input_strides.channel;
          }
        }
      }
    });
  }

  // The operand of 16 channels and a chunk of positions, 32 bits a register: float32 of 8 positions, then 8 more.
  __device__ __forceinline__ void load_inputs(const unsigned char* inputs, int channel, int position,
                                              uint32_t (&a)[16 / sizeof(T) * 2]) const {
    if constexpr (sizeof(T) == 4) {
      const int channel_step = p.channels_last ? 4 : 4 * p.input_pitch;
      const int position_step = p.channels_last ? 4 * p.input_pitch : 4;
      const unsigned char* from = inputs + (channel + row) * channel_step + (position + column) * position_step;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = *reinterpret_cast<const uint32_t*>(from + i % 2 * 8 * channel_step + i / 2 * 4 * position_step);
      }
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
      const int r = lane % 8, right = lane / 8 % 2 * 8, below = lane / 16 * 8;  // matrices: channels, then positions
      if (p.channels_last) {
        const uint32_t from = shared_address(inputs) +
                              ((position + below + r) * p.input_pitch + channel + right) * static_cast<int>(sizeof(T));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(from)
                     : "memory");
      } else {
        const uint32_t from = shared_address(inputs) +
                              ((channel + right + r) * p.input_pitch + position + below) * static_cast<int>(sizeof(T));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(from)
                     : "memory");
      }
#endif
    }
  }

  __device__ __forceinline__ void add_box(const int (&offset)[kColumns], const unsigned char* grads,
                                          const unsigned char* inputs) {
    const int4* bases = reinterpret_cast<const int4*>(shared + p.base_table) + column;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < p.positions / kChunk; chunk += position_warps) {
      const int4 b = bases[chunk * 4];
      const unsigned char* base[4] = {grads + b.x, grads + b.y, grads + b.z, grads + b.w};
      uint32_t a[kRows][16 / sizeof(T) * 2];
#pragma unroll
      for (int m = 0; m < kRows; ++m) load_inputs(inputs, first_channel + 16 * m, chunk * kChunk, a[m]);
      if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          uint32_t raw[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) raw[i] = heads_element<T>(base[i] + offset[n]);
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            heads_gradient_mma<T>(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], raw[0] | raw[1] << 16,
                                  raw[2] | raw[3] << 16);
          }
        }
      } else {
        uint32_t low[kRows][8];
#pragma unroll
        for (int i = 0; i < 8 * kRows; ++i) {
          const uint32_t x = a[i / 8][i % 8], high = heads_round_to_tf32(x);
          a[i / 8][i % 8] = high;
          low[i / 8][i % 8] = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
        }
#pragma unroll
        for (int n = 0; n < kColumns; n += 2) {
          add_columns(offset[n], offset[n + 1], base, a, low, n);
        }
      }
    }
  }

  // Two columns of 8 pairs, float32.
  __device__ __forceinline__ void add_columns(int offset0, int offset1, const unsigned char* const (&base)[4],
                                              const uint32_t (&a)[kRows][16 / sizeof(T) * 2],
                                              const uint32_t (&low)[kRows][8], int n) {
    uint32_t b[2][4], b_low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t x = heads_element<T>(base[i % 4] + (i < 4 ? offset0 : offset1));
      b[i / 4][i % 4] = kSplit ? x : heads_round_to_tf32(x);
      b_low[i / 4][i % 4] = heads_low(x);
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

  // Adds the outputs that belong to the box, those before that of the next one, to the bias's sums.
  __device__ __forceinline__ void add_bias(const HeadsBox& box, const T* grads) const {
    int begin[3], end[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const HeadsGradientAxis& axis = p.axis[a];
      const int origin = box.first[a] * axis.stride - axis.padding;
      const bool last = box.first[a] + axis.box >= axis.in;
      begin[a] = max(0, -origin);
      end[a] = last ? axis.out - origin : min(axis.box * axis.stride, axis.out - origin);
    }
    double* const bias = reinterpret_cast<double*>(shared + p.bias_sums) + lane;
    for (int item = warp; item < p.bias_items; item += kHeadsGradientWarps) {
      const BiasLane own(p, item, lane);
      float sum = 0;
      for (int d = begin[0]; d < end[0]; ++d) {
        for (int h = begin[1] + own.part; h < end[1]; h += p.bias_parts) {
          const T* from =
              grads + ((own.plane * p.axis[0].grads + d) * p.axis[1].grads + h) * p.row_pitch + p.lead + own.channel;
#pragma unroll 4
          for (int w = begin[2] + own.first; w < end[2]; w += own.step) sum += to_accumulator(from[w * p.column]);
        }
      }
      if (own.exists) bias[item * 32] += sum;
    }
  }

  // What a lane sums of an item: contiguous, each 32nd place of an output channel; channels_last, of up to 32 channels.
  struct BiasLane {
    int part, plane, channel, first, step;
    bool exists;

    __device__ BiasLane(const HeadsGradientParams& p, int item, int lane) {
      int chunk = item;
      part = p.by_bias_chunks(chunk);
      plane = p.channels_last ? 0 : chunk;
      channel = p.channels_last ? chunk * 32 : 0;
      first = lane, step = 32;
      exists = true;
      if (!p.channels_last) return;
      const int channels = min(32, p.group_out - channel);
      channel += lane % channels;
      first = lane / channels;
      step = 32 / channels;
      exists = first < step;
      if (!exists) first = 1 << 30;
    }
  };

  __device__ __forceinline__ void store_bias() const {
    const double* bias = reinterpret_cast<const double*>(shared + p.bias_sums);
    for (int channel = threadIdx.x; channel < p.group_out; channel += kHeadsGradientThreads) {
      double sum = 0;
      const int chunks = p.by_bias_chunks.divisor, chunk = p.channels_last ? channel / 32 : channel;
      const int channels = p.channels_last ? min(32, p.group_out - chunk * 32) : 1;
      for (int part = 0; part < p.bias_parts; ++part) {
        for (int i = p.channels_last ? channel % 32 : 0; i < 32 / channels * channels; i += channels) {
          sum += bias[(part * chunks + chunk) * 32 + i];
        }
      }
      p.bias_partial[static_cast<int64_t>(blockIdx.x) * p.out_channels + kind.group * p.group_out + channel] = sum;
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
    for (int i = threadIdx.x; i < channels * pairs; i += kHeadsGradientThreads) {
      const int channel = i / pairs, pair = i - channel * pairs;
      const int owner = channel / (16 * kRows), m = channel / 16 % kRows, r = channel % 16;
      const int place = ((m * kColumns + pair / 8) * 4 + r / 8 * 2 + pair % 2) * 32 + r % 8 * 4 + pair % 8 / 2;
      float sum = 0;
      for (int w = owner; w < position_warps * channel_warps; w += channel_warps) sum += saved[w * kSums + place];
      to[static_cast<int64_t>(channel) * p.pairs + pair] = sum;
    }
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
