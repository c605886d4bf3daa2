// Windows of a gradient GEMM: weights are read as they lie, and the left operand, pairs of taps of an output channel,
// comes through registers from padded planes of the output's gradient. See core/gradient_gemm.h.
#pragma once

#include "device/shared_address.cuh"
#include "gradient_gemm_store.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage, that it is full and that it is empty; of what each warpgroup stages, that it is
// there and that it has been read.
struct GradientGemmBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kGradientGemmMaxStages + stage); }
  __device__ __forceinline__ uint32_t staged(int warpgroup) const {
    return full(2 * kGradientGemmMaxStages + warpgroup);
  }
  __device__ __forceinline__ uint32_t stored(int warpgroup) const { return staged(2 + warpgroup); }
};

__device__ __forceinline__ uint32_t first_stage(uint32_t base) { return base + kGradientGemmHeader; }

// Neighbours in memory, in whole vectors.
__device__ __forceinline__ void copy_run(uint32_t target, const void* source, int bytes, uint32_t barrier) {
#ifdef FASTCONVT_GRADIENT_GEMM
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// What blocks multiply: im2col copies and packed weights; windows and weights as they lie; or, for the weight's
// gradient, windows and inputs as they lie, images of up to 64 or 48 positions.
enum class GradientGemmForm { kIm2col, kWindows, kWeightWindows, kShortWeightWindows };
template <GradientGemmForm kForm>
constexpr bool kIsOfWeight =
    kForm == GradientGemmForm::kWeightWindows || kForm == GradientGemmForm::kShortWeightWindows;

// The images that a tile's positions belong to.
__device__ __forceinline__ void find_images(const GradientGemmParams& p, int first_position, int& first, int& count) {
  int position = first_position, last = min(first_position + p.rows, p.positions) - 1;
  first = p.image(position);
  count = p.image(last) - first + 1;
}

// Copies what an item needs, each stage as soon as its place is free: weights and a window of every image, or inputs of
// an image and its window.
template <bool kOfWeight>
__device__ __forceinline__ void copy_windows(const GradientGemmParams& p, const CUtensorMap* columns_map, uint32_t base,
                                             int begin, int end, const GradientGemmItem& item, BarrierRing& ring) {
  const GradientGemmBarriers barriers{base};
  int first = 0, images = 1;
  if (!kOfWeight) find_images(p, item.first_position, first, images);
  const int bytes = p.slice * p.plane * 2;
  const char* planes = static_cast<const char*>(p.planes) + first * p.planes_image;
  if (kOfWeight) planes += static_cast<int64_t>(item.first_position / p.rows) * bytes;
  for (int i = begin; i < end; ++i, ring.advance(p.stages)) {
    const uint32_t full = barriers.full(ring.place);
    const uint32_t columns = first_stage(base) + ring.place * p.stage_bytes;
    mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
    mbarrier_arrive_expecting(full, p.unit_columns_bytes + images * bytes);
    load_weights(columns, columns_map, kOfWeight ? 0 : i * kGradientGemmWindowInner, kOfWeight ? i : 0,
                 item.first_channel, full);
    const char* from = planes + i * (kOfWeight ? p.planes_image : int64_t{bytes});
    for (int n = 0; n < images; ++n, from += p.planes_image) {
      copy_run(columns + p.unit_columns_bytes + n * bytes, from, bytes, full);
    }
  }
}

__device__ __forceinline__ uint32_t load_pair(uint32_t address) {
  uint32_t pair;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(address) : "memory");
  return pair;
}
// Two elements that are no neighbours.
__device__ __forceinline__ uint32_t load_pair(uint32_t address, int apart) {
  uint16_t low, high;
  asm volatile("ld.shared.u16 %0, [%2];\nld.shared.u16 %1, [%3];"
               : "=h"(low), "=h"(high)
               : "r"(address), "r"(address + apart)
               : "memory");
  return low | static_cast<uint32_t>(high) << 16;
}

// Bytes from the beginning of a window to a position's first tap, and from there to a tap.
__device__ __forceinline__ int window_position(const GradientGemmParams& p, int position) {
  int q2 = position, q1 = p.axis[2].in(q2);
  const int q0 = p.axis[1].in(q1);
  return 2 * (q0 * p.axis[0].stride * p.plane_layer + q1 * p.axis[1].stride * p.plane_row + q2 * p.axis[2].stride);
}
__device__ __forceinline__ int window_tap(const GradientGemmParams& p, int element) {
  const int taps2 = p.axis[2].kernel, taps1 = taps2 * p.axis[1].kernel, taps = taps1 * p.axis[0].kernel;
  const int tap = element % taps;
  return 2 * (element / taps * p.plane + tap / taps1 * p.axis[0].dilation * p.plane_layer +
              tap % taps1 / taps2 * p.axis[1].dilation * p.plane_row + tap % taps2);
}

// Where a lane's operands stand in the windows of a stage, in bytes: rows, and pairs of the inner dimension.
template <GradientGemmForm kForm>
struct GradientGemmWindowPlaces {
  static constexpr bool kOfWeight = kIsOfWeight<kForm>;
  static constexpr int kSteps = kForm == GradientGemmForm::kShortWeightWindows ? 3 : kGradientGemmWindowInner / 16;
  int row[2], pair[2 * kSteps], apart;

  __device__ __forceinline__ GradientGemmWindowPlaces(const GradientGemmParams& p, int warpgroup, int first_position) {
    const int lane = threadIdx.x % 32, own = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    int start = first_position;
    const int first_image = kOfWeight ? 0 : p.image(start);
    apart = 2 * p.axis[2].stride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kOfWeight) {
        row[i] = window_tap(p, own + i * 8);
      } else {
        int rest = min(first_position + own + i * 8, p.positions - 1);
        const int image = p.image(rest) - first_image;
        row[i] = 2 * image * p.slice * p.plane + window_position(p, rest);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int k = i * 8 + lane % 4 * 2;
      pair[i] = !kOfWeight ? window_tap(p, k) : k < p.image_positions ? window_position(p, k) : 0;
    }
  }
  __device__ __forceinline__ void load(uint32_t windows, uint32_t (&a)[kSteps][4]) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = windows + row[i % 2] + pair[2 * k + i / 2];
        a[k][i] = kOfWeight ? load_pair(at, apart) : load_pair(at);
      }
  }
};

// The products of an item's stages. While the ones of a stage run, the next one's rows come to registers.
template <typename T, GradientGemmForm kForm, int kTiles>
__device__ __forceinline__ void multiply_windows(const GradientGemmParams& p, uint32_t base, int warpgroup, int count,
                                                 int first_position, BarrierRing& ring, float (&sum)[kTiles][4]) {
  using Places = GradientGemmWindowPlaces<kForm>;
  const GradientGemmBarriers barriers{base};
  const Places places(p, warpgroup, first_position);
  const uint32_t form = gradient_operand_form(p.swizzle, 8 * p.chunk_bytes);
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t a[2][Places::kSteps][4];
  const auto stage_of = [&] { return first_stage(base) + ring.place * p.stage_bytes; };
  mbarrier_wait(barriers.full(ring.place), ring.parity);
  places.load(stage_of() + p.unit_columns_bytes, a[0]);
  int add = 0;
  const auto step = [&](int i, const uint32_t (&now)[Places::kSteps][4], uint32_t (&next)[Places::kSteps][4]) {
    const uint32_t columns = stage_of() >> 4, empty = barriers.empty(ring.place);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Places::kSteps; ++k) {
      start_window_product<T>(sum, now[k], gradient_operand(form, columns + k * 2), k == 0 ? add : 1);
    }
    wgmma_commit();
    add = 1;
    ring.advance(p.stages);
    if (i + 1 < count) {
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      places.load(stage_of() + p.unit_columns_bytes, next);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (arrives) mbarrier_arrive(empty);
  };
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    step(i, a[0], a[1]);
    if (i + 1 < count) step(i + 1, a[1], a[0]);
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) asm volatile("" : "+f"(sum[j][k])::"memory");  // nothing reads them earlier
}

// The bias's gradient of an output channel by the definition.
template <typename T>
__device__ __noinline__ float bias_by_definition(const GradientGemmParams& params, int channel) {
  const GradientGemmDefinition& p = params.definition;
  const int image = p.axis[0].out * p.axis[1].out * p.axis[2].out;
  double sum = 0;
  for (int n = 0; n < p.batch; ++n) {
    const T* const from = static_cast<const T*>(p.grad_output) + n * p.out.batch + channel * p.out.channel;
    for (int i = 0; i < image; ++i) sum += static_cast<double>(to_accumulator(from[i]));
  }
  return static_cast<float>(sum);
}

// Sums the windows of an item, for the bias's gradient: some lanes have an output channel. One warp.
template <typename T>
__device__ __forceinline__ void sum_windows(const GradientGemmParams& p, uint32_t base, const GradientGemmItem& item,
                                            int count, BarrierRing& ring) {
  const GradientGemmBarriers barriers{base};
  const int lane = threadIdx.x % 32, lanes = 32 / p.slice, channel = lane / lanes;
  const bool own = item.first_channel == 0;
  const int begin = (channel * p.plane + lane % lanes * 4) * 2, end = own ? (channel + 1) * p.plane * 2 : 0;
  float sums[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i, ring.advance(p.stages)) {
    mbarrier_wait(barriers.full(ring.place), ring.parity);
    const uint32_t window = first_stage(base) + ring.place * p.stage_bytes + p.unit_columns_bytes;
#pragma unroll 4
    for (int at = begin; at < end; at += lanes * 8) {
      uint32_t bits[2];
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "r"(window + at) : "memory");
      const Pack<T, 4>& four = *reinterpret_cast<const Pack<T, 4>*>(&bits);
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] += to_accumulator(four.value[k]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.empty(ring.place));
  }
  float sum = sums[0] + sums[1] + (sums[2] + sums[3]);
  for (int apart = lanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  if (!own || lane % lanes != 0) return;
  const int out_channel = item.first_position / p.rows * p.slice + channel;
  if (!is_finite(sum)) sum = bias_by_definition<T>(p, out_channel);
  static_cast<T*>(p.bias)[out_channel] = from_accumulator<T>(sum);
}

}  // namespace fastconvt::cuda
