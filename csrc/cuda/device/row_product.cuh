// The inner product of the fused chain and of the input gradient: a thread owns kCells cells along the height and makes
// kColumns channels of each in registers, as a sum over rows, one row a (tap, source channel). All threads of a block
// are in the same phase, so a row of weights is one broadcast from shared memory, and neighbouring threads read
// neighbouring source elements. A source element that does not exist is never multiplied.
#pragma once

#include <cstdint>

#include "../params.h"
#include "numeric.cuh"

namespace fastconvt::cuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 128;
template <typename T>
constexpr int kMinBlocks = sizeof(T) < 8 ? 4 : 3;  // a multiprocessor: at most 128 or 168 registers a thread
constexpr int kCells = 4;                          // of a thread
constexpr int kMaxRun = 8;                         // channels

// One axis: the taps of a phase are tap_step apart, and each reads offset_step cells beyond the one before.
struct RowAxis {
  int tap_step;
  int offset_step;
  int weight_stride;   // elements of the weight from one tap to the next
  int64_t tap_stride;  // elements of the source from what one tap of a phase reads to what the next one does
};

// A group sums row_channels source channels into `columns` channels, kColumns of them a channel block. The rows of a
// phase and channel block: the bias, if it counts; then runs of channel_run source channels, in each run the taps, in
// each tap the run's channels. Short runs keep what neighbouring taps share in the L1 cache.
struct RowProduct {
  RowAxis axis[3];
  Strides source;              // along the axes: from one cell to the next
  int64_t cell_bytes[kCells];  // from a thread's first cell
  int64_t channel_bytes;
  int64_t weight_row_stride;
  int64_t weight_column_stride;
  int64_t weight_group_stride;
  int row_channels;
  int channel_run;  // divides row_channels
  int bias_rows;    // 1 or 0
  int columns;
  int blocks_per_group;
  int blocks;      // of all groups
  int chunk_rows;  // rows that are in shared memory at a time
  bool resident;   // every row of every phase and channel block stays in shared memory
};

// Tap number j along an axis is tap first_tap + j * tap_step; for a thread's cell q it reads the source coordinate
// q + offset + j * offset_step, which exists from 0 to source_size - 1.
struct alignas(16) Phase {
  int residue[3];
  int first_tap[3];
  int num_taps[3];
  int offset[3];
  int source_size[3];
  int rows;
  int rows_before;        // of the earlier phases in shared memory
  int64_t source_offset;  // of the coordinates (0, 0, 0)
};

// The cells of one thread: the coordinates of the first one, and what they add to the source's element offset.
struct Cells {
  int coordinate[3];
  int64_t offset;
};

// Sets what follows from product.source and product.row_channels.
inline void finish_source(RowProduct& product, int64_t element_size) {
  for (int cell = 0; cell < kCells; ++cell) product.cell_bytes[cell] = cell * product.source.axis[1] * element_size;
  product.channel_bytes = product.source.channel * element_size;
  product.channel_run = kMaxRun;
  while (product.row_channels % product.channel_run != 0) --product.channel_run;
}

// index % size; index becomes index / size.
__device__ __forceinline__ int split_off(int64_t& index, int size) {
  const int64_t quotient =
      index <= INT32_MAX ? static_cast<uint32_t>(index) / static_cast<uint32_t>(size) : index / size;
  const int remainder = static_cast<int>(index - quotient * size);
  index = quotient;
  return remainder;
}

// The thread's first cell among sizes[0] x sizes[1] x sizes[2] of them; returns the batch entry.
__device__ __forceinline__ int64_t find_cell(int64_t thread, const int (&sizes)[3], int (&cell)[3]) {
  cell[2] = split_off(thread, sizes[2]);
  cell[1] = split_off(thread, (sizes[1] + kCells - 1) / kCells) * kCells;
  cell[0] = split_off(thread, sizes[0]);
  return thread;
}

// A channel block: which of all groups', whose group, and its first channel in the group.
struct ChannelBlock {
  int index;
  int group;
  int first_column;
};

template <int kColumns>
__device__ __forceinline__ ChannelBlock find_block(const RowProduct& product, int index) {
  const int group = index / product.blocks_per_group;
  return {index, group, (index - group * product.blocks_per_group) * kColumns};
}

// Copies rows [begin, end) of a phase and channel block to shared memory, scaled. `bias` may be null; the columns
// beyond the group's last channel get weights 0 and the bias `padding`.
template <int kColumns, typename Acc, typename T>
__device__ void stage_rows(const RowProduct& product, const Phase& phase, const ChannelBlock& block, int begin, int end,
                           const T* weight, const T* bias, Acc scale, Acc padding, Acc* rows) {
  for (int i = threadIdx.x; i < (end - begin) * kColumns; i += kThreads) {
    int row = begin + i / kColumns - product.bias_rows;
    const int column = block.first_column + i % kColumns;
    Acc value = row < 0 ? padding : Acc(0);
    if (column < product.columns && row < 0) {
      value = bias == nullptr
                  ? Acc(0)
                  : scale * to_accumulator(bias[static_cast<int64_t>(block.group) * product.columns + column]);
    } else if (column < product.columns) {
      int channel = row % product.channel_run;
      row /= product.channel_run;
      int64_t offset = block.group * product.weight_group_stride + column * product.weight_column_stride;
      for (int a = 2; a >= 0; --a) {
        const int j = row % phase.num_taps[a];
        row /= phase.num_taps[a];
        offset +=
            static_cast<int64_t>(phase.first_tap[a] + j * product.axis[a].tap_step) * product.axis[a].weight_stride;
      }
      channel += row * product.channel_run;
      value = scale * to_accumulator(weight[offset + channel * product.weight_row_stride]);
    }
    rows[i] = value;
  }
}

// sum += weight rows [begin, end), counted without the bias, which lie at `rows`; `source` is the group's first
// channel.
template <int kColumns, typename Acc, typename S>
__device__ __forceinline__ void add_rows(const RowProduct& product, const Phase& phase, const Cells& cells,
                                         const S* source, const Acc* rows, int begin, int end,
                                         Acc (&sum)[kCells][kColumns]) {
  constexpr int kWide = 16 / sizeof(Acc);        // weights a load
  constexpr int kAhead = kColumns <= 4 ? 4 : 1;  // channels loaded before the first is used: what registers allow
  // Tap number j[a] along each axis. `at` are the coordinates that it reads for the thread's first cell.
  int j[3] = {0, 0, 0};
  int channel = 0;
  source += cells.offset + phase.source_offset;
  if (begin > 0) {
    channel = begin % product.channel_run;
    int tap = begin / product.channel_run;
    for (int a = 2; a >= 0; --a) {
      j[a] = tap % phase.num_taps[a];
      tap /= phase.num_taps[a];
    }
    source += tap * product.channel_run * product.source.channel;
  }
  int at[3];
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int shift = phase.offset[a] + j[a] * product.axis[a].offset_step;
    at[a] = cells.coordinate[a] + shift;
    source += shift * product.source.axis[a];
  }
  for (int left = end - begin; left > 0;) {
    bool exists[kCells];
#pragma unroll
    for (int p = 0; p < kCells; ++p) {
      exists[p] = (static_cast<unsigned>(at[0]) < phase.source_size[0]) &
                  (static_cast<unsigned>(at[1] + p) < phase.source_size[1]) &
                  (static_cast<unsigned>(at[2]) < phase.source_size[2]);
    }
    const char* element = reinterpret_cast<const char*>(source + channel * product.source.channel);
    const int steps = min(product.channel_run - channel, left);
    left -= steps;
    channel = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step += kAhead) {
      Acc value[kAhead][kCells];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (step + k < steps) {
#pragma unroll
          for (int p = 0; p < kCells; ++p) {
            if (exists[p]) {
              value[k][p] = to_accumulator(__ldg(reinterpret_cast<const S*>(element + product.cell_bytes[p])));
            }
          }
          element += product.channel_bytes;
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (step + k < steps) {
#pragma unroll
          for (int c = 0; c < kColumns; c += kWide) {
            const auto w = *reinterpret_cast<const Pack<Acc, kWide>*>(rows + c);
#pragma unroll
            for (int i = 0; i < kWide; ++i) {
#pragma unroll
              for (int p = 0; p < kCells; ++p) {
                if (exists[p]) sum[p][c + i] += value[k][p] * w.value[i];
              }
            }
          }
          rows += kColumns;
        }
      }
    }
    // The next tap, or the first one of the next run.
    bool wrapped = true;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      if (!wrapped) break;
      at[a] += product.axis[a].offset_step;
      source += product.axis[a].tap_stride;
      wrapped = ++j[a] == phase.num_taps[a];
      if (wrapped) {
        at[a] -= j[a] * product.axis[a].offset_step;
        source -= j[a] * product.axis[a].tap_stride;
        j[a] = 0;
      }
    }
    if (wrapped) source += product.channel_run * product.source.channel;
  }
}

// Adds all rows of one phase and channel block to the sums, which a bias row sets. Every thread of the block calls it.
template <int kColumns, typename Acc, typename T, typename S>
__device__ __forceinline__ void add_block(const RowProduct& product, const Phase& phase, const Cells& cells,
                                          const ChannelBlock& block, const S* source, const T* weight, const T* bias,
                                          Acc scale, Acc padding, Acc* shared_rows, Acc (&sum)[kCells][kColumns]) {
  const S* group_source = source + static_cast<int64_t>(block.group) * product.row_channels * product.source.channel;
  for (int begin = 0; begin < phase.rows; begin += product.chunk_rows) {
    const int end = begin + min(phase.rows - begin, product.chunk_rows);
    const Acc* rows = shared_rows;
    if (product.resident) {
      rows += (phase.rows_before * product.blocks + block.index * phase.rows) * kColumns;
    } else {
      __syncthreads();  // everyone has done with the rows before
      stage_rows<kColumns>(product, phase, block, begin, end, weight, bias, scale, padding, shared_rows);
      __syncthreads();
    }
    const bool with_bias = begin < product.bias_rows;
    if (with_bias) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int p = 0; p < kCells; ++p) sum[p][c] = rows[c];
      }
      rows += kColumns;
    }
    add_rows<kColumns>(product, phase, cells, group_source, rows, begin + with_bias - product.bias_rows,
                       end - product.bias_rows, sum);
  }
}

// Makes a table of phases first, ..., first + count - 1, one thread a phase by fill(index, phase), and stages their
// rows if they are to be resident.
template <int kColumns, typename Acc, typename T, typename Fill>
__device__ __forceinline__ void prepare_phases(const RowProduct& product, int64_t first, int count, const T* weight,
                                               const T* bias, Acc scale, Acc padding, Phase* phases, Acc* rows,
                                               Fill fill) {
  __syncthreads();  // everyone has done with the table before
  if (threadIdx.x < count) fill(first + threadIdx.x, phases[threadIdx.x]);
  __syncthreads();
  if (!product.resident) return;
  if (threadIdx.x == 0) {
    phases[0].rows_before = 0;
    for (int i = 1; i < count; ++i) phases[i].rows_before = phases[i - 1].rows_before + phases[i - 1].rows;
  }
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    for (int block = 0; block < product.blocks; ++block) {
      stage_rows<kColumns>(product, phases[i], find_block<kColumns>(product, block), 0, phases[i].rows, weight, bias,
                           scale, padding,
                           rows + (phases[i].rows_before * product.blocks + block * phases[i].rows) * kColumns);
    }
  }
  __syncthreads();
}

}  // namespace fastconvt::cuda
