// From a warp's sums to the output. Two tables in shared memory make addresses: a row's element among those of a
// position, and a position's first element.
#pragma once

#include "pixel_shuffle_runs.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

__device__ __forceinline__ void pixel_shuffle_store(float* at, const float (&v)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
template <typename T, int kCount>
__device__ __forceinline__ void pixel_shuffle_store(T* at, const T* values) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.value[i] = values[i];
  *reinterpret_cast<Pack<T, kCount>*>(at) = pack;
}

// A warp's 64 rows from `first_order` on by kPositions positions from `first_position` on, by the definition, in
// float64: what is not finite, too large or too small for the products' unit.
template <class Traits>
__device__ __noinline__ void pixel_shuffle_store_by_definition(const PixelShuffleParams& p, int first_order,
                                                               int first_position, uint32_t rows, uint32_t places) {
  using T = typename Traits::T;
  int chunk_of_group = blockIdx.x;
  p.by_chunks(chunk_of_group);
  const int group = p.by_chunks_of_group(chunk_of_group);
  const T* const input = static_cast<const T*>(p.input);
  const T* const weight = static_cast<const T*>(p.weight);
  const int rows_exist = p.tile.channels * p.taps, per_turn = 16 * Traits::kTilesM;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < per_turn * Traits::kPositions; i += 32) {
    const int order = first_order + i % per_turn, place = i / per_turn;
    if (order >= rows_exist) continue;
    const int row = pixel_shuffle_load(rows + 4 * order);
    const int64_t base = pixel_shuffle_load_place(places + 8 * place);
    if (row < 0 || base < 0) continue;
    const int inner = Traits::kChannelsLast ? p.tile.channels : p.taps;
    const int tap = Traits::kChannelsLast ? order / inner : order % inner;
    const int channel = chunk_of_group * p.tile.channels + (Traits::kChannelsLast ? order % inner : order / inner);
    const int at = first_position + place, sample = at / p.positions;
    int64_t from, step;
    if constexpr (Traits::kChannelsLast) {
      from = static_cast<int64_t>(at) * p.input_pixel + group * p.group_in, step = 1;
    } else {
      step = p.positions;
      from = sample * p.input_batch + static_cast<int64_t>(group) * p.group_in * step + (at - sample * p.positions);
    }
    double sum = 0;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      const T value = input[from + c * step];
      const T w = weight[((static_cast<int64_t>(group) * p.group_in + c) * p.group_out + channel) * p.taps + tap];
      sum = fma(static_cast<double>(to_accumulator(value)), static_cast<double>(to_accumulator(w)), sum);
    }
    if (p.bias != nullptr) sum += to_accumulator(static_cast<const T*>(p.bias)[group * p.group_out + channel]);
    static_cast<T*>(p.output)[base + row] = from_accumulator<T>(p.rectify(static_cast<float>(sum)));
  }
}

template <class Traits>
class PixelShuffleStorer {
  using T = typename Traits::T;
  using Sums = typename PixelShuffleProduct<Traits>::Sums;
  static constexpr int kTilesM = Traits::kTilesM, kTilesN = Traits::kTilesN, kRun = Traits::kRun;
  static constexpr int kRuns = kTilesM / Traits::kGroup;

 public:
  __device__ PixelShuffleStorer(const PixelShuffleParams& params, const PixelShuffleEpilogue<T>& epilogue,
                                uint32_t shared)
      : p(params), epilogue(epilogue), shared(shared) {}

  // The rows' table, by all warps that multiply.
  __device__ void find_rows(int group, int chunk_of_group) const {
    for (int order = threadIdx.x; order < p.tile.tiles_m * 16; order += p.tile.warps * 32) {
      int row = -1;
      float term = 0;
      if (order < p.tile.channels * p.taps) {
        int inner = order;
        const int outer = (Traits::kChannelsLast ? p.by_channels : p.by_taps)(inner);
        int tap = Traits::kChannelsLast ? outer : inner;
        const int channel = chunk_of_group * p.tile.channels + (Traits::kChannelsLast ? inner : outer);
        if (channel < p.group_out) {
          const int height = p.by_kernel_width(tap);  // tap becomes that of the width
          int of_height = height;
          const int depth = p.by_kernel_height(of_height);
          const int whole = group * p.group_out + channel;
          row = whole * p.output_channel + depth * p.output_axis[0] + of_height * p.output_axis[1] +
                tap * p.output_axis[2];
          term = epilogue.channel_term(whole);
        }
      }
      pixel_shuffle_keep(rows() + 4 * order, static_cast<uint32_t>(row));
      pixel_shuffle_keep(terms() + 4 * order, __float_as_uint(term));
    }
  }

  // The warp's positions' table.
  __device__ void find_places(int first) const {
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Traits::kPositions; i += 32) {
      int64_t place = -1;
      if (first + i < p.total) {
        int width = first + i;
        const int sample = p.by_positions(width);
        int height = p.by_width(width);
        const int depth = p.by_height(height);
        place = sample * p.output_batch + depth * p.place_axis[0] + height * p.place_axis[1] + width * p.place_axis[2];
      }
      pixel_shuffle_keep(places() + 8 * i, place);
    }
    __syncwarp();
  }

  // What a lane's sums of 64 rows begin with.
  __device__ __forceinline__ void start(int first_tile, Sums& sum) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t at = terms() + 4 * order_of(first_tile, r);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const float term = __uint_as_float(pixel_shuffle_load(at + 4 * e));
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          float (&of_tile)[4] = sum[r * Traits::kGroup + e / 2][j];
          of_tile[e % 2 * 2] = of_tile[e % 2 * 2 + 1] = term;
        }
      }
    }
  }

  // Of 64 rows from tile `first_tile` on.
  __device__ void store(int first_tile, int first_position, const Sums& sum) {
    const int first_order = first_tile / Traits::kGroup * 8 * kRun, orders = p.tile.channels * p.taps;
    if (first_order >= orders || first_position >= p.total) return;
    const bool in_runs = Traits::kChannelsLast && p.store == PixelShuffleStore::kRuns;
    const bool is_last = first_order + 16 * kTilesM >= orders;
    const bool is_wrong = __any_sync(~0u, !is_right(sum));
    if (in_runs) {
      careful |= is_wrong;
    } else if (is_wrong) {
      store_by_definition(first_order, first_position);
      return;
    }
    if (p.rectify.on) {
      store_sums<true>(first_tile, first_order, first_position, is_last, sum);
    } else {
      store_sums<false>(first_tile, first_order, first_position, is_last, sum);
    }
  }

 private:
  template <bool kRectify>
  __device__ __forceinline__ void store_sums(int first_tile, int first_order, int first_position, bool is_last,
                                             const Sums& sum) {
    int row[kRuns];  // the order of the lane's runs
#pragma unroll
    for (int r = 0; r < kRuns; ++r) row[r] = order_of(first_tile, r);
    switch (p.store) {
      case PixelShuffleStore::kPairs:
        if constexpr (!Traits::kChannelsLast) store_pairs<kRectify>(first_order, row, sum);
        break;
      case PixelShuffleStore::kQuads:
        if constexpr (!Traits::kChannelsLast) store_quads<kRectify>(row, sum);
        break;
      case PixelShuffleStore::kChannels:
        if constexpr (Traits::kChannelsLast) store_channels<kRectify>(row, sum);
        break;
      case PixelShuffleStore::kRuns:
        if constexpr (Traits::kChannelsLast) {
          PixelShuffleRuns<Traits>(p, shared).keep(first_order, place_of(0),
                                                   [&](int i, int j, int q) { return value<kRectify>(sum, i, j, q); });
          if (is_last) finish_runs(first_order, first_position);
        }
        break;
      default:
        store_elements<kRectify>(row, sum);
    }
  }

  __device__ void finish_runs(int last_order, int first_position) {
    if (careful) {
      for (int order = 0; order <= last_order; order += 16 * kTilesM) store_by_definition(order, first_position);
      careful = false;
    } else {
      PixelShuffleRuns<Traits>(p, shared).copy(places(), min(Traits::kPositions, p.total - first_position));
    }
  }

  __device__ void store_by_definition(int first_order, int first_position) const {
    pixel_shuffle_store_by_definition<Traits>(p, first_order, first_position, rows(), places());
  }

  // Finite, and not so small, unless zero, that a factor's second term may have been lost.
  static __device__ __forceinline__ bool is_right(const Sums& sum) {
    constexpr float kSmall = 7.9e-31f;  // 2^-100
    float magnitude[4] = {};
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) magnitude[q] += fabsf(sum[i][j][q]);
    const float all = (magnitude[0] + magnitude[1]) + (magnitude[2] + magnitude[3]);
    return is_finite(all) && (!Traits::kSplit || all == 0 || all >= kSmall);
  }

  template <bool kRectify>
  __device__ __forceinline__ T value(const Sums& sum, int i, int j, int q) const {
    return from_accumulator<T>(kRectify ? p.rectify(sum[i][j][q]) : sum[i][j][q]);
  }
  // Where run r of the lane begins in the order.
  static __device__ __forceinline__ int order_of(int first_tile, int r) {
    return first_tile / Traits::kGroup * 8 * kRun + (r * 8 + threadIdx.x % 32 / 4) * kRun;
  }
  __device__ __forceinline__ T* output(int64_t place, int row) const {
    return static_cast<T*>(p.output) + (place + row);
  }

  // Two taps of two positions are neighbours; in 16 bits, neighbouring lanes swap halves to have four positions each.
  template <bool kRectify>
  __device__ __forceinline__ void store_pairs(int first_order, const int (&row)[kRuns], const Sums& sum) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (first_order + r * 8 * kRun >= p.tile.channels * p.taps) break;
      const int element[2] = {element_of(row[r]), element_of(row[r] + 2)};
      if (Traits::kSize == 2 && p.piece == 4) {
        store_swapped_pairs<kRectify>(r, element, sum);
      } else {
        store_own_pairs<kRectify>(r, element, sum);
      }
    }
  }
  template <bool kRectify>
  __device__ __forceinline__ void store_swapped_pairs(int r, const int (&element)[2], const Sums& sum) const {
    const int quad = threadIdx.x % 4;
    const bool odd = quad % 2 != 0;
#pragma unroll
    for (int j = 0; j < kTilesN; j += 2) {
      const int64_t place = place_of((odd ? j + 1 : j) * 8 + quad / 2 * 4);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const Pack<T, 4> low = pair<kRectify>(sum, 2 * r + u, j), high = pair<kRectify>(sum, 2 * r + u, j + 1);
        const uint2 a = reinterpret_cast<const uint2&>(low), b = reinterpret_cast<const uint2&>(high);
        const uint2 own = odd ? b : a, other = odd ? a : b;
        const uint2 got = {__shfl_xor_sync(~0u, other.x, 1), __shfl_xor_sync(~0u, other.y, 1)};
        const uint4 all = odd ? make_uint4(got.x, got.y, own.x, own.y) : make_uint4(own.x, own.y, got.x, got.y);
        if (place >= 0 && element[u] >= 0) *reinterpret_cast<uint4*>(output(place, element[u])) = all;
      }
    }
  }
  template <bool kRectify>
  __device__ __forceinline__ void store_own_pairs(int r, const int (&element)[2], const Sums& sum) const {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int at = j * 8 + 2 * (threadIdx.x % 4);
      const int64_t place = place_of(at), next = place_of(at + 1);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const Pack<T, 4> values = pair<kRectify>(sum, 2 * r + u, j);
        if (element[u] < 0) continue;
        if (p.piece >= 2) {
          if (place >= 0) pixel_shuffle_store<T, 4>(output(place, element[u]), values.value);
        } else {
          if (place >= 0) pixel_shuffle_store<T, 2>(output(place, element[u]), values.value);
          if (next >= 0) pixel_shuffle_store<T, 2>(output(next, element[u]), values.value + 2);
        }
      }
    }
  }
  template <bool kRectify>
  __device__ __forceinline__ Pack<T, 4> pair(const Sums& sum, int i, int j) const {
    return {{value<kRectify>(sum, i, j, 0), value<kRectify>(sum, i, j, 2), value<kRectify>(sum, i, j, 1),
             value<kRectify>(sum, i, j, 3)}};
  }

  // Four taps of a position; in 16 bits its neighbour has the next four. In 32 bits the columns are apart.
  template <bool kRectify>
  __device__ __forceinline__ void store_quads(const int (&row)[kRuns], const Sums& sum) const {
    const int quad = threadIdx.x % 4;
    int element[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) element[r] = element_of(row[r]);
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int at = j * 8 + (Traits::kSize == 4 ? quad : 2 * quad);
      const int64_t place = place_of(at), next = place_of(at + (Traits::kSize == 4 ? 4 : 1));
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        if (element[r] < 0) continue;
        T values[8];
#pragma unroll
        for (int q = 0; q < 8; ++q) values[q] = value<kRectify>(sum, 2 * r + q / 2 % 2, j, q % 2 * 2 + q / 4);
        if (Traits::kSize == 2 && p.piece >= 2) {
          if (place >= 0) pixel_shuffle_store<T, 16 / sizeof(T)>(output(place, element[r]), values);
        } else {
          if (place >= 0) pixel_shuffle_store<T, 4>(output(place, element[r]), values);
          if (next >= 0) pixel_shuffle_store<T, 4>(output(next, element[r]), values + 4);
        }
      }
    }
  }

  // 16 bytes of neighbouring channels.
  template <bool kRectify>
  __device__ __forceinline__ void store_channels(const int (&row)[kRuns], const Sums& sum) const {
    int element[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) element[r] = element_of(row[r]);
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t place = place_of(j * 8 + threadIdx.x % 4 * 2 + h);
        if (place < 0) continue;
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          if (element[r] < 0) continue;
          T values[kRun];
#pragma unroll
          for (int e = 0; e < kRun; ++e) values[e] = value<kRectify>(sum, r * Traits::kGroup + e / 2, j, e % 2 * 2 + h);
          pixel_shuffle_store<T, kRun>(output(place, element[r]), values);
        }
      }
  }

  template <bool kRectify>
  __device__ __forceinline__ void store_elements(const int (&row)[kRuns], const Sums& sum) const {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t place = place_of(j * 8 + 2 * quad + h);
        if (place < 0) continue;
#pragma unroll
        for (int i = 0; i < kTilesM; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int element = element_of(row[2 * i / kRun] + (2 * i + half) % kRun);
            if (element >= 0) *output(place, element) = value<kRectify>(sum, i, j, half * 2 + h);
          }
      }
  }

  // The tables.
  __device__ uint32_t rows() const { return shared + p.tile.rows; }
  __device__ uint32_t terms() const { return shared + p.tile.bias; }
  __device__ uint32_t places() const { return shared + p.tile.places + threadIdx.x / 32 * (Traits::kPositions * 8); }
  __device__ __forceinline__ int element_of(int order) const { return pixel_shuffle_load(rows() + 4 * order); }
  __device__ __forceinline__ int64_t place_of(int i) const { return pixel_shuffle_load_place(places() + 8 * i); }

  const PixelShuffleParams& p;
  const PixelShuffleEpilogue<T>& epilogue;
  const uint32_t shared;
  bool careful = false;  // a tile's runs are to be made by the definition
};

#endif

}  // namespace fastconvt::cuda
