// How granules come to shared memory, and who waits for them.
#pragma once

#include "dense_gradient.cuh"
#include "device/barrier.cuh"
#include "device/copy.cuh"
#include "device/copy_groups.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage, that it is full; its producers arrive twice, the second time when their
// asynchronous copies have landed.
__device__ __forceinline__ void init_full(uint32_t barriers, int producers) {
  for (int i = 0; i < kDenseGradientMaxStages; ++i) mbarrier_init(barriers + 8 * i, 2 * producers);
}
__device__ __forceinline__ void arrive_full(uint32_t barrier) {
  mbarrier_arrive_after_copies(barrier);
  mbarrier_arrive(barrier);
}

// kItems places that are copied at a time: offsets from the first channel's first element, in elements, and bits of the
// elements of a granule that exist there.
template <int kItems>
struct DensePlaces {
  int offset[kItems];
  unsigned mask[kItems];
  int target[kItems];  // bytes; -1: none
};

template <typename T>
struct alignas(16) DenseGranule {
  T element[kGranule<T>];
};

// One granule of which `channels` channels and only the elements of the mask exist.
template <typename T>
__device__ __forceinline__ DenseGranule<T> load_part(const DenseSource& s, const T* base, int offset, unsigned mask,
                                                     int channels) {
  DenseGranule<T> granule;
#pragma unroll
  for (int e = 0; e < kGranule<T>; ++e) {
    const bool exists = (s.plane_channels == 1 ? channels > 0 : e < channels) && (mask >> e & 1);
    const T value = __ldg(exists ? base + offset + e * s.element : static_cast<const T*>(s.data));
    granule.element[e] = exists ? value : T{};
  }
  return granule;
}

template <typename T>
constexpr unsigned kWholeGranule = (1u << kGranule<T>)-1;

// Copies the granules of a place, from plane to plane, asynchronously: whole ones, or numbers of 32 bits. `base` is the
// first channel, of `channels`.
template <typename T>
__device__ __forceinline__ void copy_granules_async(const DenseSource& s, const T* base, int offset, unsigned mask,
                                                    int planes, int channels, char* target, int plane_bytes) {
  constexpr int kUnit = kGranule<T>;
  const T* from = base + offset;
  if (s.vector) {
#pragma unroll 4
    for (int plane = 0; plane < planes; ++plane, from += s.plane, target += plane_bytes, channels -= s.plane_channels) {
      const bool all = mask == kWholeGranule<T> && channels >= s.plane_channels, none = mask == 0 || channels <= 0;
      if (all || none) {
        copy_or_zero<16>(shared_address(target), all ? from : base, all);
      } else {
        *reinterpret_cast<DenseGranule<T>*>(target) = load_part(s, base, static_cast<int>(from - base), mask, channels);
      }
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll 2
    for (int plane = 0; plane < planes; ++plane, from += s.plane, target += plane_bytes, channels -= s.plane_channels) {
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        const bool exists = (s.plane_channels == 1 ? channels > 0 : e < channels) && (mask >> e & 1);
        copy_or_zero<4>(shared_address(target) + 4 * e, exists ? from + e * s.element : base, exists);
      }
    }
  }
}

// Copies granules of a few places through registers, many loads at a time.
template <typename T, int kItems>
__device__ __forceinline__ void copy_granules(const DenseSource& s, const T* base, const DensePlaces<kItems>& places,
                                              int planes, int channels, char* stage, int plane_bytes) {
  constexpr int kUnit = kGranule<T>, kPlanes = kDenseGradientLoads / kUnit / kItems;
  const auto store = [&](const DenseGranule<T>& granule, int item, int plane) {
    if (places.target[item] >= 0) {
      *reinterpret_cast<DenseGranule<T>*>(stage + places.target[item] + plane * plane_bytes) = granule;
    }
  };
  int offset[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) offset[i] = places.mask[i] == kWholeGranule<T> ? places.offset[i] : 0;
#pragma unroll 1
  for (int plane = 0; plane < planes; plane += kPlanes) {
    if (plane + kPlanes <= planes && (plane + kPlanes) * s.plane_channels <= channels) {
      unsigned short words[kItems * kPlanes][kUnit];
      const T* const first = base + plane * s.plane;
#pragma unroll
      for (int i = 0; i < kItems * kPlanes; ++i) {
        const T* from = first + offset[i / kPlanes] + i % kPlanes * s.plane;
#pragma unroll
        for (int e = 0; e < kUnit; ++e) {
          words[i][e] = __ldg(reinterpret_cast<const unsigned short*>(from + e * s.element));
        }
      }
#pragma unroll
      for (int i = 0; i < kItems * kPlanes; ++i) {
        uint32_t pairs[4];
        const bool exists = places.mask[i / kPlanes] == kWholeGranule<T>;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[k] = exists ? words[i][2 * k] | static_cast<uint32_t>(words[i][2 * k + 1]) << 16 : 0;
        }
        if (places.target[i / kPlanes] >= 0) {
          *reinterpret_cast<uint4*>(stage + places.target[i / kPlanes] + (plane + i % kPlanes) * plane_bytes) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    } else {
#pragma unroll 1
      for (int k = plane; k < min(plane + kPlanes, planes); ++k) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          store(load_part(s, base + k * s.plane, places.offset[i], places.mask[i], channels - k * s.plane_channels), i,
                k);
        }
      }
    }
  }
  if (s.plane_channels > 1) return;
  // Runs that cross an edge.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (places.mask[i] == kWholeGranule<T> || places.mask[i] == 0) continue;
#pragma unroll 1
    for (int k = 0; k < min(planes, channels); ++k) {
      store(load_part(s, base + k * s.plane, places.offset[i], places.mask[i], 1), i, k);
    }
  }
}

// Calls copy(places) for `count` places that find(index, offset, mask, target) knows, a few at a time.
template <int kItems, typename Find, typename Copy>
__device__ __forceinline__ void for_places(int count, int thread, int producers, Find&& find, Copy&& copy) {
#pragma unroll 1
  for (int first = thread; first < count; first += kItems * producers) {
    DensePlaces<kItems> places;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int index = first + i * producers;
      places.offset[i] = 0, places.mask[i] = 0, places.target[i] = -1;
      if (index < count) find(index, places.offset[i], places.mask[i], places.target[i]);
    }
    copy(places);
  }
}

template <typename T, typename Find>
__device__ __forceinline__ void copy_tensor(const DenseSource& s, const T* base, int count, int planes, int channels,
                                            int thread, char* stage, int plane_bytes, Find&& find) {
  if (sizeof(T) == 4 || s.vector) {
#pragma unroll 1
    for (int i = thread; i < count; i += s.producers) {
      int offset = 0, target = 0;
      unsigned mask = 0;
      find(i, offset, mask, target);
      copy_granules_async(s, base, offset, mask, planes, channels, stage + target, plane_bytes);
    }
  } else if constexpr (sizeof(T) == 2) {
    const auto copy = [&](const auto& places) { copy_granules(s, base, places, planes, channels, stage, plane_bytes); };
    if (s.items == 1) {
      for_places<1>(count, thread, s.producers, find, copy);
    } else if (s.items == 2) {
      for_places<2>(count, thread, s.producers, find, copy);
    } else {
      for_places<4>(count, thread, s.producers, find, copy);
    }
  }
}

// Stages the output's gradient around the box whose first position reads (z, y, x) in tap 0; `base` is the first
// channel of the chunk, which has `channels` channels.
template <typename T>
__device__ __forceinline__ void stage_gradients(const DenseParams& p, const DenseTables& tables, const T* base,
                                                int channels, int z, int y, int x, int thread, char* stage) {
  constexpr int kUnit = kGranule<T>;
  const auto find = [&](int i, int& offset, unsigned& mask, int& target) {
    int e = i;
    const int line_index = p.by_columns(e);
    const int2 line = tables.lines[line_index], column = tables.columns[e];
    const int at_z = z + line.x, at_y = y + line.y, at_x = x + column.x;
    if (static_cast<unsigned>(at_z) < p.axis[0].out && static_cast<unsigned>(at_y) < p.axis[1].out) {
      if (p.run_dilation == 0) {
        mask = static_cast<unsigned>(at_x) < p.axis[2].out ? (1u << kUnit) - 1 : 0;
      } else {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) {
          mask |= (static_cast<unsigned>(at_x + k * p.run_dilation) < p.axis[2].out) << k;
        }
      }
    }
    // The first element of a run may not exist where later ones do.
    offset = at_z * p.grad.along[0] + at_y * p.grad.along[1] + at_x * p.grad.along[2];
    target = (line_index * p.columns + column.y) * 16;
  };
  copy_tensor<T>(p.grad, base, p.lines * p.columns, p.chunk_planes, channels, thread, stage, p.plane_bytes, find);
}

}  // namespace fastconvt::cuda
