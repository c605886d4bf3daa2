// The row family on tensor cores: units of work, and what they need in shared memory.
#pragma once

#include "../core/rows_mma.h"
#include "device/copy_groups.cuh"
#include "epilogue.cuh"
#include "params.h"
#include "rectifier.h"
#include "rows_mma_fragment.cuh"
#include "rows_mma_height.h"

namespace fastconvt::cuda {

struct RowsMmaParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  RowsMmaTile tile;
  RowsMmaPhase phase[kRowsMmaMaxStride];
  int in_height, out_height, height_kernel, height_stride, height_padding;
  int tap_step, back_step;   // between the taps of a phase of the height, and between what they read
  int first_base, end_base;  // of the height
  int in_width, out_width, padding;
  int in_channels, out_channels;  // of a group; groups that are made as one count as one
  int group_in, group_out;        // of a true group
  int groups, batch;
  int bases;           // of the height, in all batch entries
  int parts;           // of these, that blocks make one after the other
  int items;           // parts of all channel blocks and segments
  bool vector_input;   // four channels of a position can be loaded at once
  bool vector_output;  // 16 bytes of a block's channels can be stored at once
  // Elements between what a thread loads of an input row for one strip and for the next.
  int64_t strip_offset;
};

template <typename T, int kKernel_, int kStride_, int kDilation_>
struct RowsMmaTraits {
  using Element = T;
  static constexpr int kKernel = kKernel_;
  static constexpr int kStride = kStride_;
  static constexpr int kDilation = kDilation_;
  static constexpr int kReach = (kKernel - 1) * kDilation / kStride;  // bases that taps read back
  static constexpr int kHalo = (kReach + 3) / 4 * 4;
  static constexpr int kTiles = kRowsMmaColumns / 8;
  using Sums = float[kStride][kTiles][4];         // of a strip, by phase of the last axis, tile and register
  static constexpr int kRun = 8 * kStride;        // neighbouring outputs of a lane
  static constexpr int kVector = 16 / sizeof(T);  // elements
  static constexpr int kStrips = rows_mma_strips(sizeof(T));
  static constexpr int kMaxThreads = kRowsMmaStrips / kStrips * 32;
  static constexpr int kMinBlocks = 512 / kMaxThreads;
};

// One base of the height, for a block of output channels, a batch entry and a segment of the last axis.
template <typename T>
struct RowsMmaUnit {
  int item;
  int block;       // of channels, over all groups
  int base;        // of the height
  int left;        // bases that follow it in the item
  bool fresh;      // the base before is another unit's
  int column;      // base of the last axis where the segment starts
  int channels;    // output channels of the block
  const T* input;  // the group's first channel, row 0, `column`
  T* output;       // the block's first channel, row 0, phase 0 of `column`

  // Channel blocks of the same inputs are neighbours, then segments, then rows.
  __device__ void start(const RowsMmaParams& p, int index) {
    item = index;
    const int blocks = p.groups * p.tile.channel_blocks;
    block = index % blocks;
    index /= blocks;
    const int segment = index % p.tile.segments;
    index /= p.tile.segments;
    const int first = static_cast<int>(static_cast<int64_t>(p.bases) * index / p.parts);
    left = static_cast<int>(static_cast<int64_t>(p.bases) * (index + 1) / p.parts) - first - 1;
    const int batch = first / (p.end_base - p.first_base);
    base = p.first_base + first - batch * (p.end_base - p.first_base);
    fresh = true;
    column = static_cast<int>(p.tile.base) + segment * p.tile.columns;
    const int group = block / p.tile.channel_blocks;
    const int channel = (block - group * p.tile.channel_blocks) * kRowsMmaChannels;
    channels = min(kRowsMmaChannels, p.out_channels - channel);
    input = static_cast<const T*>(p.input) + batch * p.in.batch + group * p.in_channels * p.in.channel +
            column * p.in.axis[2];
    output = static_cast<T*>(p.output) + batch * p.out.batch + (group * p.out_channels + channel) * p.out.channel;
  }

  // To the next base, the next batch entry or the block's next item.
  __device__ void advance(const RowsMmaParams& p) {
    fresh = false;
    ++base;
    if (--left < 0) return start(p, item + gridDim.x);
    if (base < p.end_base) return;
    fresh = true;
    base = p.first_base;
    input += p.in.batch;
    output += p.out.batch;
  }

  // The segment's column 0 of an input row in the group's first channel, or null.
  __device__ const T* input_row(const RowsMmaParams& p, int y) const {
    const bool exists = item < p.items && static_cast<unsigned>(y) < static_cast<unsigned>(p.in_height);
    return exists ? input + y * p.in.axis[1] : nullptr;
  }
};

// Four neighbouring elements in memory, as words; zeros if there are none. Without a branch, which would wait for what
// it loads.
template <typename T>
struct alignas(sizeof(T) * 4) RowsMmaQuad {
  uint32_t word[sizeof(T)];

  // Asynchronously; `this` is in shared memory.
  __device__ void request(const T* at, bool exists) { copy_or_zero<4 * sizeof(T)>(shared_address(this), at, exists); }

  __device__ void load(const T* at, bool exists) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) word[i] = 0;
    if constexpr (sizeof(T) == 4) {
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5]; }"
                   : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
                   : "r"(static_cast<int>(exists)), "l"(at));
    } else {
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%3]; }"
                   : "+r"(word[0]), "+r"(word[1])
                   : "r"(static_cast<int>(exists)), "l"(at));
    }
  }
};

// Input rows of all channels of a group on their way from global to shared memory, as words: a TF32 value, or channels
// 2 * r and 2 * r + 1 in word row r. In every step of 8 input channels and for each of its warp's strips a thread moves
// two quads: the 8 channels of a column. The halo is a few threads' in addition. A row comes in asynchronously, a unit
// ahead, to cells that only the thread sees. Where memory has no aligned quads, it is copied element by element when it
// is needed.
template <typename T>
class RowsMmaInputRows {
  using Quad = RowsMmaQuad<T>;
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kWordRows = kRowsMmaStep / kPerWord;  // of a step
  static constexpr int kStrips = rows_mma_strips(sizeof(T));

  Quad* const cells;

 public:
  __device__ explicit RowsMmaInputRows(unsigned char* shared) : cells(reinterpret_cast<Quad*>(shared) + threadIdx.x) {}

  // Sends for row y.
  __device__ void request(const RowsMmaParams& p, const RowsMmaUnit<T>& unit, int y) const {
    const T* const source = unit.input_row(p, y);
    if (source != nullptr && p.vector_input) {
      Quad* cell = cells;
      for_each_quad(p, source, unit.column, [&](const T* at, bool exists) {
        cell->request(at, exists);
        cell += blockDim.x;
      });
    }
    commit_copies();
  }

  // Writes what has come.
  __device__ void store(const RowsMmaParams& p, const RowsMmaUnit<T>& unit, int y, uint32_t* row) const {
    wait_for_groups(0);
    const T* const source = unit.input_row(p, y);
    if (source == nullptr) return;
    if (!p.vector_input) return copy_elements(p, source, unit.column, row);
    const Quad* cell = cells;
    store_quads(p, row, [&](Quad& quad) {
      quad = *cell;
      cell += blockDim.x;
    });
  }

  // Both at once.
  __device__ void copy(const RowsMmaParams& p, const RowsMmaUnit<T>& unit, int y, uint32_t* row) const {
    const T* const source = unit.input_row(p, y);
    if (source == nullptr) return;
    if (!p.vector_input) return copy_elements(p, source, unit.column, row);
    uint32_t* target = row + p.tile.halo + threadIdx.x;
#pragma unroll 1
    for (int step = 0; step < p.tile.steps; ++step, target += kWordRows * p.tile.row_pitch) {
      Quad quads[kStrips][2];
      int i = 0;
      for_each_quad_of_step(p, source, unit.column, step, [&](const T* at, bool exists) {
        quads[i / 2][i % 2].load(at, exists);
        ++i;
      });
      store_step(p, target, quads);
    }
    if (!p.tile.with_halo || !has_halo(p)) return;
    Quad quads[kPerWord];
    int i = 0;
    for_each_halo_quad(p, source, unit.column, [&](const T* at, bool exists) { quads[i++].load(at, exists); });
    store_halo(p, row, quads);
  }

 private:
  // A thread has a column of the halo, and 4 or 8 channels.
  static __device__ bool has_halo(const RowsMmaParams& p) { return threadIdx.x < p.tile.steps * kWordRows; }
  static __device__ int halo_column() { return threadIdx.x % 4; }
  static __device__ int halo_channel() { return threadIdx.x / 4 * (4 * kPerWord); }

  static __device__ bool is_inside(const RowsMmaParams& p, int at) {
    return static_cast<unsigned>(at) < static_cast<unsigned>(p.in_width);
  }

  template <typename Function>
  __device__ void for_each_quad_of_step(const RowsMmaParams& p, const T* source, int column, int step,
                                        Function&& function) const {
    const int x = threadIdx.x, first = step * kRowsMmaStep;
    const T* at = source + x * p.in.axis[2] + first;
#pragma unroll
    for (int i = 0; i < kStrips; ++i, at += p.strip_offset) {
      const bool inside = is_inside(p, column + x + i * static_cast<int>(blockDim.x));
      function(at, inside && first < p.in_channels);
      function(at + 4, inside && first + 4 < p.in_channels);
    }
  }
  template <typename Function>
  static __device__ void for_each_halo_quad(const RowsMmaParams& p, const T* source, int column, Function&& function) {
    const int at = halo_column() - p.tile.halo;
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) {
      const int channel = halo_channel() + 4 * i;
      function(source + channel + at * p.in.axis[2], channel < p.in_channels && is_inside(p, column + at));
    }
  }
  template <typename Function>
  __device__ void for_each_quad(const RowsMmaParams& p, const T* source, int column, Function&& function) const {
#pragma unroll 1
    for (int step = 0; step < p.tile.steps; ++step) for_each_quad_of_step(p, source, column, step, function);
    if (p.tile.with_halo && has_halo(p)) for_each_halo_quad(p, source, column, function);
  }

  template <typename Load>
  __device__ void store_quads(const RowsMmaParams& p, uint32_t* row, Load&& load) const {
    uint32_t* target = row + p.tile.halo + threadIdx.x;
#pragma unroll 1
    for (int step = 0; step < p.tile.steps; ++step, target += kWordRows * p.tile.row_pitch) {
      Quad quads[kStrips][2];
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) load(quads[i / 2][i % 2]);
      store_step(p, target, quads);
    }
    if (!p.tile.with_halo || !has_halo(p)) return;
    Quad quads[kPerWord];
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) load(quads[i]);
    store_halo(p, row, quads);
  }
  static __device__ void store_halo(const RowsMmaParams& p, uint32_t* row, const Quad* quads) {
    store_channels<kPerWord>(row + halo_channel() / kPerWord * p.tile.row_pitch + halo_column(), p.tile.row_pitch,
                             quads);
  }

  static __device__ void store_step(const RowsMmaParams& p, uint32_t* target, const Quad (&quads)[kStrips][2]) {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) store_channels<2>(target + i * blockDim.x, p.tile.row_pitch, quads[i]);
  }
  template <int kQuads>
  static __device__ void store_channels(uint32_t* target, int pitch, const Quad* quads) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(T)); ++j, target += pitch) {
        *target = kPerWord == 1 ? to_tf32(__uint_as_float(quads[i].word[j])) : quads[i].word[j];
      }
    }
  }

  static __device__ __noinline__ void copy_elements(const RowsMmaParams& p, const T* source, int column,
                                                    uint32_t* row) {
    const int pitch = p.tile.row_pitch;
    for (int i = threadIdx.x; i < p.tile.halo + p.tile.columns; i += blockDim.x) {
      const int x = column - p.tile.halo + i;
      const bool inside = static_cast<unsigned>(x) < static_cast<unsigned>(p.in_width);
      const auto element = [&](int c) {
        return inside && c < p.in_channels ? __ldg(source + c + (x - column) * p.in.axis[2]) : from_accumulator<T>(0.f);
      };
#pragma unroll 4
      for (int r = 0; r < p.tile.steps * kWordRows; ++r) {
        if constexpr (kPerWord == 1) {
          row[r * pitch + i] = to_tf32(element(r));
        } else {
          row[r * pitch + i] = two_halves(element(2 * r), element(2 * r + 1));
        }
      }
    }
  }
};

// The output channel of row `row + 8 * half` of an MMA: a lane's two are neighbours.
__device__ inline int rows_mma_channel(int row, int half) { return 2 * row + half; }

// What stays in shared memory for a channel block: the weights as the lanes need them, [height tap][step][tap of the
// last axis][lane], and the bias.
template <class Traits>
__device__ void stage_channels(const RowsMmaParams& p, int block, MmaLeft<typename Traits::Element>* weights,
                               float* terms) {
  using T = typename Traits::Element;
  const int group = block / p.tile.channel_blocks, first = (block - group * p.tile.channel_blocks) * kRowsMmaChannels;
  const int taps = p.height_kernel * Traits::kKernel;
  const T* const weight =
      static_cast<const T*>(p.weight) + static_cast<int64_t>(group) * p.in_channels * p.group_out * taps;
  for (int i = threadIdx.x; i < taps * p.tile.steps * 32; i += blockDim.x) {
    const int row = i / 32 / Traits::kKernel, height_tap = row / p.tile.steps;
    const int tap = height_tap * Traits::kKernel + i / 32 % Traits::kKernel;
    const int step = row - height_tap * p.tile.steps;
    weights[i] = make_left<T>(i % 32 / 4, i % 4, [&](int mma_row, int in) {
      const int out = first + rows_mma_channel(mma_row % 8, mma_row / 8);
      in += step * kRowsMmaStep;
      const bool exists = out < p.out_channels && in < p.in_channels && in / p.group_in == out / p.group_out;
      return exists ? __ldg(weight + (in * p.group_out + out % p.group_out) * taps + tap) : from_accumulator<T>(0.f);
    });
  }
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  const auto term = [&](int c) {
    return first + c < p.out_channels ? epilogue.channel_term(group * p.out_channels + first + c) : 0.f;
  };
  if (threadIdx.x < kRowsMmaChannels) terms[threadIdx.x] = term(threadIdx.x);
}

}  // namespace fastconvt::cuda
