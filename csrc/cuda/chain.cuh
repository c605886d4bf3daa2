// The fused chain clamp(h(logsumexp over channels of conv_transpose3d(x)) - subtrahend, min, max), h(v) = v * sigmoid(v
// + 3) / 6: what its forward and its backward share. The convolution's output stays in registers.
//
// u are the convolution's outputs times log2(e), S = sum over channels of 2^u, so that logsumexp = log2(S) * ln(2) and
// sigmoid(logsumexp + 3) = S / (S + e^-3). A first attempt subtracts no maximum: 16 fewer instructions a channel and
// output. Where some log2(S) leaves the safe range, or is NaN, the phase is made once more with the maximum.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/row_product.cuh"
#include "params.h"

namespace fastconvt::cuda {

// Part of a problem: a range of the batch and, along each axis, of the inputs, with the outputs that these take part
// in. Own ranges partition the outputs.
struct Window {
  int64_t batch_begin, batch_count;
  int in_begin[3], in_end[3];
  int out_begin[3], out_end[3];
  int own_begin[3], own_end[3];
};

// The outputs of a window as phases and cells: along an axis, output q * stride + residue - padding has cell q.
struct CellAxis {
  int first_cell;
  int cells;
  int first_residue;  // of the first output; residues go round from there
  int residues;       // that have outputs
};

struct ChainParams {
  RowProduct product;
  AxisParams axis[3];
  CellAxis cell[3];
  Window window;
  int cells[3];
  int channels;     // of the convolution's output
  int64_t threads;  // that have cells: kCells each
  int64_t items;    // (tile of kThreads threads, slice of the phases), the slices of a tile in sequence
  int64_t phases;
  int64_t slices;
  int phases_per_item;
  int table_phases;  // all, if a block's table can hold them; else those of an item
  const void* input;
  const void* weight;
  const void* bias;        // or null
  const void* subtrahend;  // one element
};

// Whether coordinates fit the 32-bit arithmetic of these kernels; offsets are 64-bit.
bool chain_supports(const Problem& problem);

Window whole_window(const Problem& problem);

// Restricts `window` to inputs [begin, end) of axis `a`.
void restrict_axis(const Problem& problem, int a, int64_t begin, int64_t end, Window& window);

CellAxis make_cell_axis(const Axis& axis, int out_begin, int out_end);

// For threads that make `columns` channels; sets all but the pointers and the clamp's bounds.
ChainParams make_chain_params(const Problem& problem, const Window& window, int columns);

constexpr int kMaxPhases = 64;  // in a block's table

// Bytes of shared memory for a table of phases and for rows of weights, `all_rows` in all; sets resident and
// chunk_rows.
int64_t plan_shared_memory(int64_t phases, int64_t all_rows, int columns, int64_t accumulator_size,
                           RowProduct& product);

// The same for a chain.
int64_t plan_chain_memory(const Problem& problem, int columns, int64_t accumulator_size, ChainParams& params);

// How many blocks of kThreads fill the present device, at most `items`.
cudaError_t count_blocks(const void* kernel, int64_t shared_bytes, int64_t items, int64_t& blocks);

// Calls function with a compile-time number of channels for one thread, 4, 8 or 16: the least work for a group of
// `channels`. 16 float64 accumulators a cell would not fit the registers.
template <typename T, typename Function>
auto dispatch_columns(int64_t channels, Function&& function) {
  const auto work = [channels](int64_t columns) { return (channels + columns - 1) / columns * (columns + 6); };
  if constexpr (sizeof(T) < 8) {
    if (work(16) <= work(8) && work(16) <= work(4)) return function(std::integral_constant<int, 16>{});
  }
  if (work(8) <= work(4)) return function(std::integral_constant<int, 8>{});
  return function(std::integral_constant<int, 4>{});
}

#ifdef __CUDACC__

template <typename Acc>
struct Log2Domain;

template <>
struct Log2Domain<float> {
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kLn2 = 0.6931471805599453f;
  static constexpr float kExpMinus3 = 0.049787068367863944f;
  static constexpr float kSafe = 100.0f;
  static __device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float log2(float x) { return __log2f(x); }
  static __device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
};

template <>
struct Log2Domain<double> {
  static constexpr double kLog2E = 1.4426950408889634074;
  static constexpr double kLn2 = 0.6931471805599453094;
  static constexpr double kExpMinus3 = 0.049787068367863942979;
  static constexpr double kSafe = 900.0;
  static __device__ __forceinline__ double exp2(double x) { return ::exp2(x); }
  static __device__ __forceinline__ double log2(double x) { return ::log2(x); }
  static __device__ __forceinline__ double divide(double x, double y) { return x / y; }
  static __device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000LL); }
};

// As torch: NaN stays, NaN bounds give NaN, and max wins where min > max.
template <typename Acc>
__device__ __forceinline__ Acc clamp(Acc value, Acc min, Acc max) {
  value = value >= min || value != value ? value : min;
  return value <= max || value != value ? value : max;
}

// The index-th phase of a chain's window.
__device__ inline void fill_phase(const ChainParams& p, int64_t index, Phase& phase) {
  int taps = 1;
#pragma unroll 1
  for (int a = 2; a >= 0; --a) {
    const AxisParams& axis = p.axis[a];
    const int residue = (p.cell[a].first_residue + split_off(index, p.cell[a].residues)) % axis.stride;
    phase.residue[a] = residue;
    phase.first_tap[a] = axis.first_tap(residue);
    phase.num_taps[a] = axis.num_taps(residue);
    phase.offset[a] = phase.num_taps[a] == 0 ? 0 : static_cast<int>(axis.offset(residue, phase.first_tap[a]));
    phase.source_size[a] = static_cast<int>(axis.in);
    taps *= phase.num_taps[a];
  }
  phase.rows = 1 + taps * p.product.row_channels;
  phase.source_offset = 0;
}

// The place of one thread: its batch entry (of the whole batch) and its cells (z, y + p, x).
struct Place {
  bool active;
  int64_t batch;
  Cells cells;
};

__device__ __forceinline__ Place find_place(const ChainParams& p, int64_t tile) {
  Place place;
  const int64_t thread = tile * kThreads + threadIdx.x;
  place.active = thread < p.threads;
  place.batch = p.window.batch_begin + find_cell(place.active ? thread : 0, p.cells, place.cells.coordinate);
  place.cells.offset = place.batch * p.product.source.batch;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    place.cells.coordinate[a] += p.cell[a].first_cell;
    place.cells.offset += place.cells.coordinate[a] * p.product.source.axis[a];
  }
  return place;
}

// The outputs of a thread's cells in one phase: the coordinates of the first one.
struct Outputs {
  int at[3];
  bool inside;  // the window, along depth and width

  __device__ __forceinline__ Outputs(const ChainParams& p, const Phase& phase, const Place& place) {
#pragma unroll
    for (int a = 0; a < 3; ++a)
      at[a] = place.cells.coordinate[a] * p.axis[a].stride + phase.residue[a] - p.axis[a].padding;
    inside = place.active & (at[0] >= p.window.out_begin[0]) & (at[0] < p.window.out_end[0]) &
             (at[2] >= p.window.out_begin[2]) & (at[2] < p.window.out_end[2]);
  }

  __device__ __forceinline__ bool exists(const ChainParams& p, int cell) const {
    const int y = at[1] + cell * p.axis[1].stride;
    return inside & (y >= p.window.out_begin[1]) & (y < p.window.out_end[1]);
  }

  // Whether an output that exists counts in sums over outputs.
  __device__ __forceinline__ bool is_own(const ChainParams& p, int cell) const {
    const int y = at[1] + cell * p.axis[1].stride;
    return (at[0] >= p.window.own_begin[0]) & (at[0] < p.window.own_end[0]) & (y >= p.window.own_begin[1]) &
           (y < p.window.own_end[1]) & (at[2] >= p.window.own_begin[2]) & (at[2] < p.window.own_end[2]);
  }

  // Element offset of the first one in a contiguous (batch, 1, D', H', W') tensor; the next cell is step() further.
  __device__ __forceinline__ int64_t offset(const ChainParams& p, const Place& place) const {
    return ((place.batch * p.axis[0].out + at[0]) * p.axis[1].out + at[1]) * p.axis[2].out + at[2];
  }
  static __device__ __forceinline__ int64_t step(const ChainParams& p) { return p.axis[1].stride * p.axis[2].out; }
};

// v = logsumexp, sigmoid(v + 3) and its complement.
template <typename Acc>
struct Activation {
  Acc value, gate, complement;
};

// The sum of 2^u over channels as it grows: first attempt.
template <typename Acc, bool kCareful>
struct ChannelSum {
  using Math = Log2Domain<Acc>;
  Acc sum = 0;

  // Returns what restore() takes.
  __device__ __forceinline__ Acc add(Acc u) {
    const Acc power = Math::exp2(u);
    sum += power;
    return power;
  }
  __device__ __forceinline__ bool is_safe() const { return fabs(Math::log2(sum)) < Math::kSafe; }
  __device__ __forceinline__ Activation<Acc> activate() const {
    const Acc reciprocal = Math::divide(Acc(1), sum + Math::kExpMinus3);
    return {Math::log2(sum) * Math::kLn2, sum * reciprocal, Math::kExpMinus3 * reciprocal};
  }
  // The channel's share of S is scale() * restore(add(u)).
  __device__ __forceinline__ Acc scale() const { return Math::divide(Acc(1), sum); }
  __device__ __forceinline__ Acc restore(Acc power) const { return power; }
};

// The same with the maximum, right for every u: as torch, +inf in a channel gives +inf, and -inf in all of them -inf.
template <typename Acc>
struct ChannelSum<Acc, true> {
  using Math = Log2Domain<Acc>;
  Acc sum = 0;  // of 2^(u - top)
  Acc top = -Math::infinity();

  __device__ __forceinline__ Acc add(Acc u) {
    if (u == top) {  // also infinities
      sum += Acc(1);
    } else if (u > top) {
      sum = sum * Math::exp2(top - u) + Acc(1);
      top = u;
    } else {
      sum += Math::exp2(u - top);  // also where u is NaN
    }
    return u;
  }
  __device__ __forceinline__ bool is_safe() const { return true; }
  __device__ __forceinline__ Acc log2() const { return top + Math::log2(sum); }
  __device__ __forceinline__ Activation<Acc> activate() const {
    const Acc shifted = log2() + Acc(3) * Math::kLog2E;
    return {log2() * Math::kLn2, Math::divide(Acc(1), Acc(1) + Math::exp2(-shifted)),
            Math::divide(Acc(1), Acc(1) + Math::exp2(shifted))};
  }
  __device__ __forceinline__ Acc scale() const { return Acc(1); }
  __device__ __forceinline__ Acc restore(Acc u) const { return Math::exp2(u - log2()); }
};

// One attempt at one phase: the epilogue gets add_block() with each channel block, and finish(). False, before
// finish(), if it has to be repeated with the maximum.
template <typename T, int kColumns, bool kCareful, typename Epilogue>
__device__ __forceinline__ bool attempt_phase(const ChainParams& p, const Phase& phase, const Place& place,
                                              accumulator_t<T>* rows, Epilogue& epilogue) {
  using Acc = accumulator_t<T>;
  ChannelSum<Acc, kCareful> total[kCells];
  Acc sum[kCells][kColumns];
  ChannelBlock block{0, 0, 0};
#pragma unroll 1
  for (; block.index < p.product.blocks; ++block.index) {
    add_block<kColumns>(p.product, phase, place.cells, block, static_cast<const T*>(p.input),
                        static_cast<const T*>(p.weight), static_cast<const T*>(p.bias), Log2Domain<Acc>::kLog2E,
                        -Log2Domain<Acc>::infinity(), rows, sum);
    const int columns = p.product.columns - block.first_column;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (kCareful && c >= columns) break;  // padding; its 2^u is 0 unless an input is not finite
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell) sum[cell][c] = total[cell].add(sum[cell][c]);
    }
    epilogue.add_block(p, phase, place, block, sum);
    block.first_column += kColumns;
    if (block.first_column >= p.product.columns) {
      block.first_column = 0;
      ++block.group;
    }
  }
  if constexpr (!kCareful) {
    const Outputs outputs(p, phase, place);
    bool unsafe = false;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) unsafe = unsafe | (outputs.exists(p, cell) & !total[cell].is_safe());
    // Where rows are staged, the whole block repeats together.
    if (p.product.resident ? __any_sync(kAllLanes, unsafe) : __syncthreads_or(unsafe)) return false;
  }
  epilogue.finish(p, phase, place, total, sum);
  return true;
}

// The whole walk: items, phases.
template <typename T, int kColumns, typename Epilogue>
__device__ __forceinline__ void run_chain(const ChainParams& p, unsigned char* shared, Epilogue& epilogue) {
  using Acc = accumulator_t<T>;
  Phase* phases = reinterpret_cast<Phase*>(shared);
  Acc* rows = reinterpret_cast<Acc*>(phases + p.table_phases);
  const bool one_table = p.table_phases == p.phases;
  int64_t table = -1;  // the phase that the table begins with
  for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
    const int64_t tile = item / p.slices;
    const int64_t first = (item + tile) % p.slices * p.phases_per_item;  // no block always gets the same slice
    const int count = static_cast<int>(min(p.phases - first, static_cast<int64_t>(p.phases_per_item)));
    const int64_t table_first = one_table ? 0 : first;
    if (table_first != table) {
      prepare_phases<kColumns>(p.product, table_first, one_table ? p.table_phases : count,
                               static_cast<const T*>(p.weight), static_cast<const T*>(p.bias), Log2Domain<Acc>::kLog2E,
                               -Log2Domain<Acc>::infinity(), phases, rows,
                               [&](int64_t index, Phase& phase) { fill_phase(p, index, phase); });
      table = table_first;
    }
    const Place place = find_place(p, tile);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Phase& phase = phases[first - table_first + i];
      if (!attempt_phase<T, kColumns, false>(p, phase, place, rows, epilogue)) {
        attempt_phase<T, kColumns, true>(p, phase, place, rows, epilogue);
      }
    }
  }
}

#endif  // __CUDACC__

}  // namespace fastconvt::cuda
