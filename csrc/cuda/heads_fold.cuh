// The head family's second half: outputs from the products of pairs and positions in shared memory.
#pragma once

#include "heads_params.cuh"
#include "rows_mma_fragment.cuh"

namespace fastconvt::cuda {

// What a warp needs to know of an item when it folds; in shared memory, since the products need the registers.
struct alignas(16) HeadsView {
  void* box;                     // the first output of the box, at the march's first coordinate
  int output_begin, output_end;  // along the mid axis, in the box
  int outputs;                   // along the last axis
  int batches;
  int first, begin;  // steps
  int mid, width;    // tiles
};
static_assert(sizeof(HeadsView) == kHeadsViewBytes);

template <typename T>
class HeadsFold {
  static constexpr int kVector = 16 / sizeof(T);

  const HeadsParams& p;
  unsigned char* const shared;
  const int group;
  float probe = 0;  // NaN if a sum was not finite

  // What a step of the march does for one of its output coordinates: floats, or -1 for nothing.
  struct Event {
    int products = -1, add = -1, keep = -1;
    int64_t place = 0;  // elements
  };
  // Of the outputs of a place: where the products of the first two taps are.
  template <int kStride>
  struct Taps {
    int offset[kStride][2], count[kStride];
    int mid_step;      // floats to the next tap of the mid axis
    int channel_step;  // floats to the next channel's products
  };
  // 32 places of a row of the box, a lane each.
  struct Chunk {
    const float* products;  // at the lane's position, of the first channel and tap
    int mid_taps;
    float* pending;  // of the first channel
    T* outputs;      // of the first channel, at the march's first coordinate
    int count;       // outputs along the last axis
  };

 public:
  __device__ HeadsFold(const HeadsParams& p, unsigned char* shared, int group) : p(p), shared(shared), group(group) {}

  __device__ bool is_careful() const { return !(probe == 0); }

  // The bias, for the whole life of the block.
  __device__ void prepare() const {
    float* const bias = reinterpret_cast<float*>(shared + p.bias_terms);
    for (int i = threadIdx.x; i < p.channels; i += blockDim.x) {
      bias[i] = p.bias == nullptr ? 0.f : to_accumulator(static_cast<const T*>(p.bias)[group * p.channels + i]);
    }
  }

  // Nothing in shared memory changes but what the warp itself reads.
  __device__ void begin(const HeadsItem& item) const {
    HeadsView view;
    const int width = p.of_width.tile_begin(item.width) * p.of_width.stride;
    view.box = static_cast<T*>(p.output) + item.batch * p.out.batch +
               static_cast<int64_t>(group) * p.channels * p.out.channel + width * p.out.axis[2];
    const int mid = p.of_mid.tile_begin(item.mid) * p.of_mid.stride - p.of_mid.padding;
    view.box = static_cast<T*>(view.box) + static_cast<int64_t>(mid) * p.out.axis[p.mid];
    view.output_begin = max(p.of_mid.own_begin(item.mid) * p.of_mid.stride - p.of_mid.padding, 0) - mid;
    view.output_end = min(p.of_mid.own_end(item.mid) * p.of_mid.stride - p.of_mid.padding, p.of_mid.out) - mid;
    view.outputs = min(p.of_width.own_end(item.width) * p.of_width.stride, p.of_width.out) - width;
    view.batches = p.batch - item.batch;
    view.first = item.first, view.begin = item.begin;
    view.mid = item.mid, view.width = item.width;
    __syncwarp();
    if (threadIdx.x % 32 == 0) *noted() = view;
    __syncwarp();
  }

  // Whether the last item that began was of the same tiles.
  __device__ bool is_of(const HeadsItem& item) const {
    return noted()->mid == item.mid && noted()->width == item.width;
  }

  // All outputs of a step of the march. `has_products`: there is an input of this step.
  __device__ void run(int step, int turn, bool has_products) {
    const int stride = p.of_width.stride;
    const bool few = p.most_taps <= 2;
    if (stride == 1) {
      few ? fold<1, 2>(step, turn, has_products) : fold<1, 0>(step, turn, has_products);
    } else if (stride == 2) {
      few ? fold<2, 2>(step, turn, has_products) : fold<2, 0>(step, turn, has_products);
    } else {
      fold<4, 2>(step, turn, has_products);
    }
  }

 private:
  __device__ __forceinline__ HeadsView* noted() const {
    return reinterpret_cast<HeadsView*>(shared + p.views) + threadIdx.x / 32;
  }

  // The same in a register: the compiler would load a constant again and again.
  static __device__ __forceinline__ int held(int value) { return __shfl_sync(~0u, value, 0); }

  // Whether there is anything to do.
  __device__ __forceinline__ bool find_event(const HeadsView& view, int index, int step, int turn, Event& at) const {
    const HeadsEvent event = p.event[index];
    const int march = step * p.march_stride + event.shift;
    if (event.emits && (step < view.begin || march < 0 || march >= p.march_out)) return false;
    at.products = event.tap < 0 ? -1 : event.tap * p.march_pairs * p.pitch;
    const int waiting = turn * p.pending_turn;
    at.add = event.adds && step - p.march_turns >= view.first ? waiting + event.tap * p.pending_row : -1;
    at.keep = event.emits ? -1 : waiting + (event.tap - p.axis[p.march].tap_step()) * p.pending_row;
    at.place = march * p.out.axis[p.march];
    return true;
  }

  // kStride: of the last axis. kTaps: 2 where no output has more along the last axis, else 0.
  template <int kStride, int kTaps>
  __device__ __forceinline__ void fold(int step, int turn, bool has_products) {
    const int lane = threadIdx.x % 32;
    const HeadsView view = *noted();
    Taps<kStride> taps;
#pragma unroll
    for (int e = 0; e < kStride; ++e) {
      taps.offset[e][0] = held(p.width_taps[e].offset);
      taps.offset[e][1] = held(p.width_taps[e].offset + p.of_width.fold_step);
      taps.count[e] = held(p.width_taps[e].count);
    }
    taps.mid_step = held(p.of_mid.fold_step);
    taps.channel_step = held(p.taps * p.pitch);
    // Lane i looks after event i.
    Event mine;
    const unsigned active = __ballot_sync(~0u, lane < p.events && find_event(view, lane, step, turn, mine));
#pragma unroll 1
    for (int work = threadIdx.x / 32; work < p.rows * p.chunks; work += blockDim.x / 32) {
      int at = work;
      int output = p.by_chunks(at);
      const int batch = p.by_mid_outputs(output);
      Chunk chunk;
      chunk.count = view.outputs - at * 32 * kStride;
      if (batch >= view.batches || output < view.output_begin || output >= view.output_end || chunk.count <= 0)
        continue;
      int phase = output;
      const int base = p.by_mid_stride(phase);
      const HeadsTaps mid = p.mid_taps[phase];
      chunk.products = reinterpret_cast<const float*>(shared + p.products) + batch * p.box_pitch +
                       base * p.of_width.held + at * 32 + lane + mid.offset;
      chunk.mid_taps = mid.count;
      chunk.pending = reinterpret_cast<float*>(shared + p.pending) + (work * p.channels * 32 + lane) * kStride;
      chunk.outputs = static_cast<T*>(view.box) + batch * p.out.batch + output * p.out.axis[p.mid] +
                      at * 32 * kStride * p.out.axis[2];
#pragma unroll 1
      for (unsigned rest = active; rest != 0; rest &= rest - 1) {
        const int i = __ffs(rest) - 1;
        Event event;
        event.products = __shfl_sync(~0u, mine.products, i);
        event.add = __shfl_sync(~0u, mine.add, i), event.keep = __shfl_sync(~0u, mine.keep, i);
        event.place = __shfl_sync(~0u, mine.place, i);
        fold_event<kStride, kTaps>(chunk, event, taps, has_products && event.products >= 0 ? chunk.mid_taps : 0);
      }
    }
  }

  template <int kStride, int kTaps>
  __device__ __forceinline__ void fold_event(const Chunk& chunk, const Event& event, const Taps<kStride>& taps,
                                             int mid_taps) {
    const float* const bias = reinterpret_cast<const float*>(shared + p.bias_terms);
    T* row = chunk.outputs + event.place;
    if constexpr (kTaps == 2) {
      if (is_plain<kStride>(chunk, row)) return fold_plain<kStride>(chunk, event, taps, mid_taps, row);
    }
#pragma unroll 1
    for (int channel = 0; channel < p.channels; ++channel) {
      const float* const from = chunk.products + channel * taps.channel_step + event.products;
      float* const waiting = chunk.pending + channel * 32 * kStride;
      float sum[kStride];
      start<kStride>(waiting, event.add, sum);
      add_taps<kStride, kTaps>(from, taps, mid_taps, sum);
      if (event.keep >= 0) {
        keep<kStride>(waiting + event.keep, sum);
      } else {
        emit<kStride>(chunk, row, channel, bias[channel], sum);
      }
      if (!p.channels_last) row += p.out.channel;
    }
    if (event.keep < 0 && p.channels_last) copy_out(row, chunk.count);
  }

  // Whether every lane stores all its outputs of a channel at once.
  template <int kStride>
  __device__ __forceinline__ bool is_plain(const Chunk& chunk, const T* row) const {
    return !p.channels_last && chunk.count >= 32 * kStride && kStride * sizeof(T) >= 4 &&
           reinterpret_cast<uintptr_t>(row) % (kStride * sizeof(T)) == 0 && p.out.channel % kStride == 0;
  }

  // The same for all channels, in few instructions.
  template <int kStride>
  __device__ __forceinline__ void fold_plain(const Chunk& chunk, const Event& event, const Taps<kStride>& taps,
                                             int mid_taps, T* row) {
    const float* from = chunk.products + event.products;
    float* waiting = chunk.pending;
    const float* bias = reinterpret_cast<const float*>(shared + p.bias_terms);
    row += threadIdx.x % 32 * kStride;
#pragma unroll 1
    for (int left = p.channels; left > 0; --left) {
      float sum[kStride];
      start<kStride>(waiting, event.add, sum);
      add_taps<kStride, 2>(from, taps, mid_taps, sum);
      if (event.keep >= 0) {
        keep<kStride>(waiting + event.keep, sum);
      } else {
#pragma unroll
        for (int e = 0; e < kStride; ++e) probe = fmaf(sum[e], 0.f, probe), sum[e] += *bias;
        p.rectify(sum);
        *reinterpret_cast<Pack<T, kStride>*>(row) = rounded<T>(sum);
      }
      from += taps.channel_step, waiting += 32 * kStride, ++bias, row += p.out.channel;
    }
  }

  template <int kStride>
  static __device__ __forceinline__ void start(const float* waiting, int add, float (&sum)[kStride]) {
#pragma unroll
    for (int e = 0; e < kStride; ++e) sum[e] = 0;
    if (add >= 0) {
      const auto pack = *reinterpret_cast<const Pack<float, kStride>*>(waiting + add);
#pragma unroll
      for (int e = 0; e < kStride; ++e) sum[e] = pack.value[e];
    }
  }

  template <int kStride>
  static __device__ __forceinline__ void keep(float* to, const float (&sum)[kStride]) {
    Pack<float, kStride> pack;
#pragma unroll
    for (int e = 0; e < kStride; ++e) pack.value[e] = sum[e];
    *reinterpret_cast<Pack<float, kStride>*>(to) = pack;
  }

  template <int kStride, int kTaps>
  __device__ __forceinline__ void add_taps(const float* from, const Taps<kStride>& taps, int mid_taps,
                                           float (&sum)[kStride]) const {
#pragma unroll 1
    for (int tap = 0; tap < mid_taps; ++tap, from += taps.mid_step) {
#pragma unroll
      for (int e = 0; e < kStride; ++e) {
        if constexpr (kTaps == 2) {
          if (taps.count[e] > 0) sum[e] += from[taps.offset[e][0]];
          if (taps.count[e] > 1) sum[e] += from[taps.offset[e][1]];
        } else {
          const float* at = from + taps.offset[e][0];
#pragma unroll 1
          for (int i = 0; i < taps.count[e]; ++i, at += p.of_width.fold_step) sum[e] += *at;
        }
      }
    }
  }

  // A lane's outputs of a channel: in one store where that is aligned.
  template <int kStride>
  __device__ __forceinline__ void emit(const Chunk& chunk, T* row, int channel, float term, float (&sum)[kStride]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < kStride; ++e) probe = fmaf(sum[e], 0.f, probe), sum[e] += term;
    p.rectify(sum);
    const Pack<T, kStride> pack = rounded<T>(sum);
    constexpr bool kWide = kStride * sizeof(T) >= 4;
    if (kWide && !p.channels_last && reinterpret_cast<uintptr_t>(row) % (kStride * sizeof(T)) == 0) {
      if ((lane + 1) * kStride <= chunk.count) {
        *reinterpret_cast<Pack<T, kStride>*>(row + lane * kStride) = pack;
      } else {
#pragma unroll
        for (int e = 0; e < kStride; ++e) {
          if (lane * kStride + e < chunk.count) row[lane * kStride + e] = pack.value[e];
        }
      }
      return;
    }
    T* const to = staged(row);
#pragma unroll
    for (int e = 0; e < kStride; ++e) to[place(lane * kStride + e, channel)] = pack.value[e];
    if (!p.channels_last) copy_out(row, chunk.count);
  }

  // Outputs on their way to memory, one row of the warp: aligned modulo 16 bytes as they will be there.
  __device__ __forceinline__ T* staged(const T* row) const {
    const bool skewed = !p.channels_last || p.whole_rows;
    const int skew = skewed ? static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kVector - 1) : 0;
    return reinterpret_cast<T*>(shared + p.outputs + threadIdx.x / 32 * p.row_bytes) + skew;
  }
  __device__ __forceinline__ int place(int output, int channel) const {
    return p.channels_last ? output * p.channels + channel : output;
  }

  // `count`: outputs along the last axis.
  __device__ __forceinline__ void copy_out(T* row, int count) const {
    const T* const from = staged(row);
    const int lane = threadIdx.x % 32;
    count = min(count, 32 * p.of_width.stride);
    __syncwarp();
    if (!p.channels_last || p.whole_rows) {
      copy_run(row, from, p.channels_last ? count * p.channels : count);
    } else if (p.row_vectors) {
      const int vectors = p.channels / kVector;
#pragma unroll 1
      for (int i = lane; i < count * vectors; i += 32) {
        const int output = i / vectors;
        *reinterpret_cast<uint4*>(row + output * p.out.axis[2] + (i - output * vectors) * kVector) =
            reinterpret_cast<const uint4*>(from)[i];
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < count * p.channels; i += 32) {
        const int output = i / p.channels;
        row[output * p.out.axis[2] + i - output * p.channels] = from[i];
      }
    }
    __syncwarp();
  }

  // Neighbours in memory. `from` is aligned as `row` is.
  static __device__ __forceinline__ void copy_run(T* row, const T* from, int count) {
    const int lane = threadIdx.x % 32;
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (kVector - 1);
    const int head = min(count, -skew & (kVector - 1)), vectors = (count - head) / kVector;
    const int tail = head + vectors * kVector;
    if (lane < head) row[lane] = from[lane];
#pragma unroll 1
    for (int i = head + lane * kVector; i < tail; i += 32 * kVector) {
      *reinterpret_cast<uint4*>(row + i) = *reinterpret_cast<const uint4*>(from + i);
    }
    if (lane < count - tail) row[tail + lane] = from[tail + lane];
  }
};

}  // namespace fastconvt::cuda
