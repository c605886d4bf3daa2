// The fused chain on tensor cores (chain.cuh has its arithmetic; core/chain_mma.h the plan). Every product is a 16-bit
// mma.sync with float32 accumulators.
//
// float32 inputs are scaled by a power of two so that the largest weight is near 2^6, which keeps what rounding leaves
// of either factor in float16's range; three products are then exact to 2^-21, and one is as TF32. Whatever leaves the
// range ends as NaN or infinity in S, which no finite input does, and is made again by the definition.
#pragma once

#include <cuda_runtime.h>

#include "../core/chain_mma.h"
#include "chain.cuh"
#include "device/fast_divide.h"

namespace fastconvt::cuda {

cudaError_t launch_chain_mma(const Problem& problem, const void* input, const void* weight, const void* bias,
                             const void* subtrahend, double min, double max, void* output, cudaStream_t stream);

namespace chain_mma {

using fastconvt::chain_mma::kBlock;
using fastconvt::chain_mma::kCellsPerGroup;
using fastconvt::chain_mma::kMaxSteps;
using fastconvt::chain_mma::kMaxUnits;
using fastconvt::chain_mma::kWarps;

constexpr int kBlockThreads = 32 * kWarps;
constexpr int kRows = 16;  // cells of a matrix product
constexpr int kTiles = kCellsPerGroup / kRows;
constexpr int kRoundUnits = 4;  // whose sums fill the columns of one 16 x 8 matrix

struct PackedGranule {
  bool pair;
  unsigned char block;
  short tap[2][2];
};

struct PackedUnit {
  int output;  // elements of the first phase's output from the cell's; the second phase's follows
  short first_step, first_fragment;
  unsigned char both, single[2], paired;
  unsigned char residue[4];  // of the first phase
};

struct alignas(8) Cell {
  int output;        // elements from that of the tile's first cell
  uint32_t outputs;  // bit 2 * unit + phase: it exists; kUnsafe bits further: it is left to make_by_definition()
};
constexpr int kUnsafe = 2 * kMaxUnits;
static_assert(kUnsafe == 16);

// In bytes; fragments of weights come first.
struct SharedOffsets {
  int bias, granules, cells, places, cell_positions;
};

struct Params {
  const void* input;
  const void* weight;
  const void* bias;        // or null
  const void* subtrahend;  // one element
  void* output;
  float min, max;
  int in_channels, out_channels, kernel_positions, weight_elements;
  int64_t input_batch, output_batch;
  int input_channel, input_axis[3];
  int in[3], out[3], stride[3], padding[3];
  int tile[3], first_cell[3], low[3], region[3];
  FastDivide tiles[3], tile_size[3], region_size[3], parts;
  int tile_groups, positions;
  SharedOffsets shared;
  int num_tasks, whole_tiles;  // whole tiles; then the rest, each in so many parts
  int channel_blocks, column_chunks, num_steps, num_units, num_fragments;
  int last_cell[3];                                     // counted from the first one
  uint32_t all_exist, first_exists[3], last_exists[3];  // bit 2 * unit + phase
  uint32_t step[kMaxSteps + 1];                         // byte offsets of the two granules from the cell's first
  short step_fragment[kMaxSteps];
  unsigned char step_phases[kMaxSteps];  // bit 2: the first step of its unit
  PackedGranule granule[kMaxSteps][2];
  PackedUnit unit[kMaxUnits];
  AxisParams axis[3];  // for the definition
};

#ifdef __CUDACC__

// Steps of a unit whose number is known at compile time; AnyShape: read from the parameters.
struct AnyShape {
  static constexpr int kUnits = 0;
  FASTCONVT_HOST_DEVICE static constexpr int both(int) { return 0; }
  FASTCONVT_HOST_DEVICE static constexpr int single(int) { return 0; }
};

// Kernel 3 and stride 2 along each axis: units of 4, 2, 2 and 1 rows, the first phase with two taps in each.
template <bool kSplit>
struct Kernel3Stride2 {
  static constexpr int kUnits = 4;
  FASTCONVT_HOST_DEVICE static constexpr int rows(int unit) { return 4 >> (unit + 1) / 2; }
  FASTCONVT_HOST_DEVICE static constexpr int both(int unit) { return kSplit ? rows(unit) : (rows(unit) + 1) / 2; }
  FASTCONVT_HOST_DEVICE static constexpr int single(int unit) {
    return kSplit ? (rows(unit) + 1) / 2 : 0;
  }  // of the first phase
};

template <class Shape>
FASTCONVT_HOST_DEVICE constexpr int first_step(int unit) {
  return unit == 0 ? 0 : first_step<Shape>(unit - 1) + Shape::both(unit - 1) + Shape::single(unit - 1);
}

template <class Shape>
FASTCONVT_HOST_DEVICE constexpr int first_fragment(int unit) {
  return unit == 0 ? 0 : first_fragment<Shape>(unit - 1) + 2 * Shape::both(unit - 1) + Shape::single(unit - 1);
}

template <typename T, bool kSplit_, int kColumns_, class Shape_, bool kPadBias_>
struct Traits {
  using Element = T;
  using Half = std::conditional_t<std::is_same_v<T, float>, __half, T>;  // what is multiplied
  using Shape = Shape_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kColumns = kColumns_;  // of 8 channels
  static constexpr bool kScaled = std::is_same_v<T, float>;
  // Of at most three channels: the fourth of each cell is 1 and carries the bias. Costs no instruction.
  static constexpr bool kPadBias = kPadBias_;
  // S is summed in TF32 where results are no more exact than that.
  static constexpr bool kCoarseSum = !kSplit && !std::is_same_v<T, __half>;
  static constexpr int kMinBlocks = kSplit ? 5 : 6;
};

constexpr float kSplitScale = 64;  // of what rounding an input leaves
constexpr float kInputLimit = 64;  // of a scaled input; weights are below 64, too
constexpr int kWeightExponent = 6;
constexpr float kTruncation = 1.000352f;  // of a TF32 term, in the mean

// Makes a pointer one value: else the compiler adds its terms again at each use.
template <typename T>
__device__ __forceinline__ void keep(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

template <typename Half>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float* c) {
  if constexpr (std::is_same_v<Half, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

// sum += a * b in TF32, 16 x 8 x 8.
__device__ __forceinline__ void add_selected(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename Half>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Half, __half>) {
    const __half2 h = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(h);
  }
}

// What rounding to float16 left of x and y, scaled; infinite where an input is out of the range that is exact enough.
__device__ __forceinline__ uint32_t pack_rest(uint32_t rounded, float x, float y) {
  const float2 r = __half22float2(reinterpret_cast<const __half2&>(rounded));
  const float infinity = Log2Domain<float>::infinity();
  const float low = fabsf(x) > kInputLimit ? infinity : (x - r.x) * kSplitScale;
  const float high = fabsf(y) > kInputLimit ? infinity : (y - r.y) * kSplitScale;
  return pack<__half>(low, high);
}

// A block's shared memory. The offsets stay in the parameters: as pointers they would take registers.
template <class Traits>
struct Shared {
  using Fragment = Pack<uint32_t, 2 * Traits::kColumns>;

  const Params& p;
  unsigned char* const memory;

  // Of weights: [chunk][fragment][lane].
  __device__ Fragment* fragments() const { return reinterpret_cast<Fragment*>(memory); }
  // [chunk][column]
  __device__ float* bias() const { return reinterpret_cast<float*>(memory + p.shared.bias); }
  // [block][pair, split][position]
  __device__ uint4* granules() const { return reinterpret_cast<uint4*>(memory + p.shared.granules); }
  __device__ Cell* cells() const { return reinterpret_cast<Cell*>(memory + p.shared.cells); }
  // Of a position in the region: depth, height and width, 10 bits each.
  __device__ uint32_t* places() const { return reinterpret_cast<uint32_t*>(memory + p.shared.places); }
  // Of a cell's first granule.
  __device__ uint16_t* cell_positions() const { return reinterpret_cast<uint16_t*>(memory + p.shared.cell_positions); }
};

// What the threads of a block share beside. In registers it would be spilled.
struct State {
  int64_t output;  // element offset of residues 0 of the tile's first cell, which need not exist
  float input_scale, subtrahend;
  int largest_weight;  // its absolute value's bits
  int unsafe;          // some output of the tile is left to make_by_definition()
};

template <class Traits>
class ChainMma {
  using T = typename Traits::Element;
  using Half = typename Traits::Half;
  using Shape = typename Traits::Shape;
  using Math = Log2Domain<float>;
  static constexpr int kColumns = Traits::kColumns;
  static constexpr bool kBiasFirst = Traits::kScaled && !Traits::kPadBias;
  using Fragment = Pack<uint32_t, 2 * kColumns>;

  const Params& p;
  const Shared<Traits> shared;
  State& state;
  int64_t batch;  // of the tile
  int origin[3];  // its first cell

 public:
  __device__ ChainMma(const Params& p, unsigned char* memory, State& state) : p(p), shared{p, memory}, state(state) {}

  __device__ void run() {
    prepare();
    for (int task = blockIdx.x; task < p.num_tasks; task += gridDim.x) {
      int tile = task, begin = 0, end = p.tile_groups;
      if (task >= p.whole_tiles) {
        int part = task - p.whole_tiles;
        tile = p.whole_tiles + p.parts(part);
        begin = p.tile_groups * part / p.parts.divisor;
        end = p.tile_groups * (part + 1) / p.parts.divisor;
      }
      locate(tile);
      if (threadIdx.x == 0) set_output();
      list_cells();
      stage_inputs();
      __syncthreads();
      for (int group = begin + threadIdx.x / 32; group < end; group += kWarps) make_group(group);
      __syncthreads();
      if (state.unsafe != 0) {
        make_by_definition(tile);
        __syncthreads();
        if (threadIdx.x == 0) state.unsafe = 0;
      }
    }
  }

 private:
  // Once a block: weights, bias and where cells find their granules.
  __device__ void prepare() {
    prefetch_first();
    if (threadIdx.x == 0) state.largest_weight = state.unsafe = 0;
    float weight_scale = 1;
    if constexpr (Traits::kScaled) {
      const int exponent = weight_exponent();
      weight_scale = Math::kLog2E * __int_as_float((127 - exponent) << 23);
      if (threadIdx.x == 0) state.input_scale = __int_as_float((127 + exponent) << 23);
    } else {
      list_places();
    }
    if (threadIdx.x == 0) state.subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int step = warp; step < p.num_steps; step += kWarps) {
      int fragment = p.step_fragment[step];
      for (int phase = 0; phase < 2; ++phase) {
        if (p.step_phases[step] >> phase & 1) pack_weights(step, phase, fragment++, lane, weight_scale);
      }
    }
    for (int c = threadIdx.x; c < p.column_chunks * kColumns * 8; c += kBlockThreads) {
      shared.bias()[c] = bias_of(c);
    }
    __syncthreads();
  }

  // Hides the latency of what the block needs first.
  __device__ void prefetch_first() {
    if (threadIdx.x == 0) {
      prefetch(p.subtrahend);
      if (p.bias != nullptr) prefetch(p.bias);
    }
    if (blockIdx.x >= p.whole_tiles) return;
    locate(blockIdx.x);
    const int rows = p.region[0] * p.region[1];
    for (int i = threadIdx.x; i < rows * p.in_channels; i += kBlockThreads) {
      int row = i % rows;
      const int channel = i / rows, z = origin[0] + p.low[0] + p.region_size[1](row);
      const int y = origin[1] + p.low[1] + row, x = max(origin[2] + p.low[2], 0);
      if (z >= 0 && z < p.in[0] && y >= 0 && y < p.in[1] && x < p.in[2]) {
        prefetch(static_cast<const T*>(p.input) + batch * p.input_batch +
                 (z * p.input_axis[0] + y * p.input_axis[1] + x * p.input_axis[2] + channel * p.input_channel));
      }
    }
  }

  // Where cells lie in the region and in the output, and positions in the region.
  __device__ void list_places() {
    for (int cell = threadIdx.x; cell < p.tile_groups * kCellsPerGroup; cell += kBlockThreads) {
      int x = cell;
      int y = p.tile_size[2](x);
      const int z = p.tile_size[1](y);
      shared.cell_positions()[cell] =
          static_cast<uint16_t>(z < p.tile[0] ? (z * p.region[1] + y) * p.region[2] + x : 0);
      shared.cells()[cell].output = (z * p.stride[0] * p.out[1] + y * p.stride[1]) * p.out[2] + x * p.stride[2];
    }
    for (int position = threadIdx.x; position < p.positions; position += kBlockThreads) {
      int x = position;
      int y = p.region_size[2](x);
      const int z = p.region_size[1](y);
      shared.places()[position] = z << 20 | y << 10 | x;
    }
  }

  // Such that the largest weight, times log2(e), is in [2^5, 2^6) after division by 2^exponent; 0 if that is no number.
  __device__ int weight_exponent() {
    constexpr int kAhead = 12;  // loads in flight
    float w[kAhead];
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = begin + i * kBlockThreads;
        w[i] = index < p.weight_elements ? __ldg(static_cast<const float*>(p.weight) + index) : 0;
      }
    };
    load(threadIdx.x);
    list_places();
    int bits = 0;
    for (int begin = threadIdx.x; begin < p.weight_elements; begin += kAhead * kBlockThreads) {
      if (begin != threadIdx.x) load(begin);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) bits = max(bits, __float_as_int(fabsf(w[i] * Math::kLog2E)));
    }
    bits = __reduce_max_sync(kAllLanes, bits);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&state.largest_weight, bits);
    __syncthreads();
    bits = state.largest_weight;
    const int exponent = (bits >> 23) - 126 - kWeightExponent;
    return bits == 0 || bits >= 0x7f800000 ? 0 : max(-100, min(100, exponent));
  }

  // In the domain of log2; a channel that does not exist adds 2^-inf.
  __device__ float bias_of(int column) const {
    if (column >= p.out_channels) return -Math::infinity();
    return p.bias == nullptr ? 0 : to_accumulator(__ldg(static_cast<const T*>(p.bias) + column)) * Math::kLog2E;
  }

  __device__ void pack_weights(int step, int phase, int fragment, int lane, float scale) {
    const int row = lane % 4 * 2;  // of the inner dimension, in both granules
    const int cell = row / kBlock;
    for (int chunk = 0; chunk < p.column_chunks; ++chunk) {
      Fragment packed;
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const PackedGranule& granule = p.granule[step][i % 2];
        const int column = (chunk * kColumns + i / 2) * 8 + lane / 4;
        const int tap = granule.tap[phase][granule.pair ? cell : 0];
        float w[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int channel = granule.block * kBlock + row % kBlock + j;
          const bool exists = tap >= 0 && channel < p.in_channels && column < p.out_channels;
          const int index = (channel * p.out_channels + column) * p.kernel_positions + tap;
          w[j] = exists ? to_accumulator(__ldg(static_cast<const T*>(p.weight) + index)) * scale : 0;
          if constexpr (Traits::kSplit) {
            const float high = __half2float(__float2half_rn(w[j]));
            w[j] = granule.pair ? w[j] - high : cell == 0 ? high : high * (1 / kSplitScale);
          }
          if (Traits::kPadBias && row + j == kBlock - 1 && p.step_phases[step] >> 2 != 0) {
            const float bias = bias_of(column), high = __half2float(__float2half_rn(bias));
            w[j] = i % 2 == 0 ? high : high == bias ? 0 : bias - high;
          }
        }
        packed.value[i] = pack<Half>(w[0], w[1]);
      }
      shared.fragments()[(chunk * p.num_fragments + fragment) * 32 + lane] = packed;
    }
  }

  __device__ void locate(int tile) {
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int index = tile;
      tile = p.tiles[a](index);
      origin[a] = p.first_cell[a] + index * p.tile[a];
    }
    batch = tile;
  }

  // Once a tile.
  __device__ void set_output() {
    int64_t first = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) first = first * p.out[a] + (origin[a] * p.stride[a] - p.padding[a]);
    state.output = batch * p.output_batch + first;
  }

  // Which outputs of each cell exist.
  __device__ void list_cells() {
    for (int cell = threadIdx.x; cell < p.tile_groups * kCellsPerGroup; cell += kBlockThreads) {
      int at[3];
      at[2] = cell;
      at[1] = p.tile_size[2](at[2]);
      at[0] = p.tile_size[1](at[1]);
      uint32_t exists = at[0] < p.tile[0] ? p.all_exist : 0;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int place = origin[a] + at[a] - p.first_cell[a];
        exists &= place == 0 ? p.first_exists[a] : p.all_exist;
        exists &= place < p.last_cell[a] ? p.all_exist : place == p.last_cell[a] ? p.last_exists[a] : 0;
      }
      shared.cells()[cell].outputs = exists;
    }
  }

  // The granules of the tile's region. An input that does not exist is zero.
  __device__ void stage_inputs() {
    constexpr int kAhead = Traits::kPadBias ? 6 : 4;  // positions of a thread that are loaded before one is stored
    const T* source = static_cast<const T*>(p.input) + batch * p.input_batch;
    // A place exists if no field of place + above and of below - place has lost its top bit.
    constexpr uint32_t kTop = 1 << 9, kTops = kTop << 20 | kTop << 10 | kTop;
    uint32_t above = 0, below = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int first = origin[a] + p.low[a];
      above = above << 10 | (kTop - max(0, min(-first, static_cast<int>(kTop))));
      below = below << 10 | (kTop - 1 + max(0, min(p.in[a] - first, static_cast<int>(kTop))));
      source += static_cast<int64_t>(first) * p.input_axis[a];
    }
    keep(source);
    const float scale = Traits::kScaled ? state.input_scale : 1.0f;
    for (int block = 0; block < p.channel_blocks; ++block) {
      uint4* const plane = shared.granules() + block * (Traits::kSplit ? 2 : 1) * p.positions;
      for (int begin = threadIdx.x; begin < p.positions; begin += kAhead * kBlockThreads) {
        T value[kAhead][kBlock];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int position = begin + i * kBlockThreads;
          const uint32_t place = position < p.positions ? shared.places()[position] : 0;
          const bool exists = position < p.positions && (place + above & below - place & kTops) == kTops;
          const int at = static_cast<int>(place >> 20) * p.input_axis[0] +
                         static_cast<int>(place >> 10 & 1023) * p.input_axis[1] +
                         static_cast<int>(place & 1023) * p.input_axis[2] + block * kBlock * p.input_channel;
#pragma unroll
          for (int c = 0; c < kBlock; ++c) {
            if (Traits::kPadBias && c == kBlock - 1) continue;
            value[i][c] =
                exists && block * kBlock + c < p.in_channels ? __ldg(source + (at + c * p.input_channel)) : T{};
          }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int position = begin + i * kBlockThreads;
          if (position < p.positions) store_granules(plane, position, value[i], scale);
        }
      }
    }
  }

  __device__ __forceinline__ void store_granules(uint4* plane, int position, const T (&value)[kBlock], float scale) {
    float x[kBlock];
#pragma unroll
    for (int c = 0; c < kBlock; ++c) {
      x[c] = Traits::kPadBias && c == kBlock - 1 ? 1.0f : to_accumulator(value[c]) * scale;
    }
    const uint2 rounded = make_uint2(pack<Half>(x[0], x[1]), pack<Half>(x[2], x[3]));
    uint2* const pairs = reinterpret_cast<uint2*>(plane) + 2 * position;
    pairs[0] = rounded;
    if (position > 0) pairs[-1] = rounded;
    if (position == p.positions - 1) pairs[1] = make_uint2(0, 0);
    if constexpr (Traits::kSplit) {
      plane[p.positions + position] =
          make_uint4(rounded.x, rounded.y, pack_rest(rounded.x, x[0], x[1]), pack_rest(rounded.y, x[2], x[3]));
    }
  }

  using Accumulators = float[kTiles][kColumns][4];
  using Bias = float[kColumns][4];

  // One step for the phases of kPhases, a bit mask. kFirst: the accumulators begin with the bias, or with 0 where that
  // is added elsewhere.
  template <int kPhases, bool kFirst>
  __device__ __forceinline__ void multiply(uint32_t step, const uint32_t (&rows)[kTiles], const Fragment* fragments,
                                           const Bias& bias, Accumulators& first, Accumulators& second) const {
    const uint32_t offset = (threadIdx.x & 16) ? step >> 16 : step & 0xffff;
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) load_matrices(rows[m] + offset, a[m]);
#pragma unroll
    for (int phase = 0; phase < 2; ++phase) {
      if (!(kPhases >> phase & 1)) continue;
      const Fragment b = *fragments;
      fragments += 32;
      Accumulators& sum = phase == 0 ? first : second;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float zero[4] = {0, 0, 0, 0};
          const float* const begin = !kFirst ? sum[m][c] : kBiasFirst ? bias[c] : zero;
          multiply_add<Half>(sum[m][c], a[m], b.value[2 * c], b.value[2 * c + 1], begin);
        }
      }
    }
  }

  // Sums over the lane's channels of 2^u, for the two rows that it holds of each matrix.
  __device__ __forceinline__ void sum_powers(const Accumulators& u, const Bias& bias, float (&sum)[kTiles][2]) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float part[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float power[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float x = u[m][c][2 * row + i];
            power[i] = Math::exp2(Traits::kScaled ? x : fmaf(x, Math::kLog2E, bias[c][i]));
          }
          part[c] = power[0] + power[1];
        }
        sum[m][row] = kColumns == 1 ? part[0] : part[0] + part[kColumns - 1];
      }
    }
  }

  // Adds S of a unit's phases to its two columns of the totals. A matrix product gathers the four lanes of a row; a sum
  // goes in as two TF32 terms, or truncated to one, which finish() corrects in the mean.
  __device__ __forceinline__ void add_powers(const Accumulators& first, const Accumulators& second, const Bias& bias,
                                             bool paired, int unit, float (&totals)[kTiles][4]) const {
    float sum[2][kTiles][2] = {};
    if (paired) sum_powers(second, bias, sum[1]);
    sum_powers(first, bias, sum[0]);
    const int column = threadIdx.x % 32 / 4 - 2 * unit;
    const uint32_t selected[2] = {column == 0 ? __float_as_uint(1.0f) : 0, column == 1 ? __float_as_uint(1.0f) : 0};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (Traits::kCoarseSum) {
        const uint32_t a[4] = {__float_as_uint(sum[0][m][0]), __float_as_uint(sum[0][m][1]),
                               __float_as_uint(sum[1][m][0]), __float_as_uint(sum[1][m][1])};
        add_selected(totals[m], a, selected[0], selected[1]);
      } else {
#pragma unroll
        for (int phase = 0; phase < 2; ++phase) {
          uint32_t a[4];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            a[row] = __float_as_uint(sum[phase][m][row]) & 0xffffe000;
            a[2 + row] = __float_as_uint(sum[phase][m][row] - __uint_as_float(a[row]));
          }
          add_selected(totals[m], a, selected[phase], selected[phase]);
        }
      }
    }
  }

  // All outputs of one group of cells.
  __device__ __forceinline__ void make_group(int group) {
    const int first = group * kCellsPerGroup, lane = threadIdx.x % 32;
    const uint32_t any = __reduce_or_sync(kAllLanes, shared.cells()[first + lane].outputs);
    uint32_t rows[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      rows[m] = shared_address(shared.granules()) + shared.cell_positions()[first + m * kRows + lane % kRows] * 16;
    }
    for (int begin = 0; begin < p.num_units; begin += kRoundUnits) {
      float totals[kTiles][4] = {};
      if (Shape::kUnits > 0 && any == p.all_exist) {
        add_units<0>(load_bias(0), rows, totals);
      } else {
#pragma unroll 1
        for (int i = 0; i < kRoundUnits && begin + i < p.num_units; ++i) {
          if (any >> (2 * (begin + i)) & 3) add_unit(p.unit[begin + i], i, rows, totals);
        }
      }
      store(first, begin + lane % 4, totals);
    }
  }

  struct BiasOf {
    Bias bias;
  };

  __device__ __forceinline__ BiasOf load_bias(int chunk) const {
    BiasOf of;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float2 b = reinterpret_cast<const float2*>(shared.bias())[(chunk * kColumns + c) * 4 + threadIdx.x % 4];
      of.bias[c][0] = of.bias[c][2] = b.x, of.bias[c][1] = of.bias[c][3] = b.y;
    }
    return of;
  }

  // Units kUnit, ... of a shape, in straight-line code.
  template <int kUnit>
  __device__ __forceinline__ void add_units(const BiasOf& of, const uint32_t (&rows)[kTiles],
                                            float (&totals)[kTiles][4]) const {
    if constexpr (kUnit < Shape::kUnits) {
      constexpr int kBoth = Shape::both(kUnit), kSingle = Shape::single(kUnit);
      const uint32_t* const step = p.step + first_step<Shape>(kUnit);
      const Fragment* const fragments = shared.fragments() + first_fragment<Shape>(kUnit) * 32 + threadIdx.x % 32;
      Accumulators first, second;
      multiply<3, true>(step[0], rows, fragments, of.bias, first, second);
#pragma unroll
      for (int i = 1; i < kBoth; ++i) multiply<3, false>(step[i], rows, fragments + 64 * i, of.bias, first, second);
#pragma unroll
      for (int i = 0; i < kSingle; ++i) {
        multiply<1, false>(step[kBoth + i], rows, fragments + 64 * kBoth + 32 * i, of.bias, first, second);
      }
      add_powers(first, second, of.bias, true, kUnit, totals);
      add_units<kUnit + 1>(of, rows, totals);
    }
  }

  __device__ __forceinline__ void add_unit(const PackedUnit& unit, int index, const uint32_t (&rows)[kTiles],
                                           float (&totals)[kTiles][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int chunk = 0; chunk < p.column_chunks; ++chunk) {
      const Fragment* fragments = shared.fragments() + (chunk * p.num_fragments + unit.first_fragment) * 32 + lane;
      const BiasOf of = load_bias(chunk);
      Accumulators first, second;
      const uint32_t* step = p.step + unit.first_step;
      uint32_t next = *step;
      const auto take = [&] {
        const uint32_t taken = next;
        next = *++step;  // one step ahead
        return taken;
      };
      multiply<3, true>(take(), rows, fragments, of.bias, first, second);
      fragments += 64;
#pragma unroll 1
      for (int i = 1; i < unit.both; ++i, fragments += 64) {
        multiply<3, false>(take(), rows, fragments, of.bias, first, second);
      }
#pragma unroll 1
      for (int i = 0; i < unit.single[0]; ++i, fragments += 32) {
        multiply<1, false>(take(), rows, fragments, of.bias, first, second);
      }
#pragma unroll 1
      for (int i = 0; i < unit.single[1]; ++i, fragments += 32) {
        multiply<2, false>(take(), rows, fragments, of.bias, first, second);
      }
      add_powers(first, second, of.bias, unit.paired, index, totals);
    }
  }

  // The outputs of one unit for the lane's cells.
  __device__ __forceinline__ void store(int first, int unit, const float (&totals)[kTiles][4]) {
    if (unit >= p.num_units) return;
    T* unit_output = static_cast<T*>(p.output) + state.output + p.unit[unit].output;
    keep(unit_output);
    const int lane_cell = first + threadIdx.x % 32 / 4;
    bool unsafe = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Cell cell = shared.cells()[lane_cell + m * kRows + row * 8];
        T* const to = unit_output + cell.output;
#pragma unroll
        for (int phase = 0; phase < 2; ++phase) {
          float value;
          const bool exact = finish(totals[m][2 * row + phase], value);
          const bool exists = cell.outputs >> (2 * unit) & (phase + 1);
          if (exists && exact) to[phase] = from_accumulator<T>(value);
          unsafe |= exists && !exact;
        }
      }
    }
    if (unsafe) mark_unsafe(lane_cell, unit, totals);
  }

  __device__ void mark_unsafe(int lane_cell, int unit, const float (&totals)[kTiles][4]) {
    state.unsafe = 1;
    for (int m = 0; m < kTiles; ++m) {
      for (int i = 0; i < 4; ++i) {
        float value;
        const uint32_t bit = 1u << (2 * unit + i % 2);
        const int cell = lane_cell + m * kRows + i / 2 * 8;
        if ((shared.cells()[cell].outputs & bit) != 0 && !finish(totals[m][i], value)) {
          atomicOr(&shared.cells()[cell].outputs, bit << kUnsafe);
        }
      }
    }
  }

  // The output for S; false if S is out of range. Bounds and NaN as in clamp().
  __device__ __forceinline__ bool finish(float sum, float& value) const {
    if (Traits::kCoarseSum) sum *= kTruncation;
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(sum));
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(sum + Math::kExpMinus3));
    const float gate = sum * reciprocal;
    value = log2 * (Math::kLn2 / 6) * gate - state.subtrahend;
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(p.min));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(p.max));
    return fabsf(log2) < Math::kSafe;
  }

  // Outputs whose S is out of range or not a number: in float32, with the maximum.
  __device__ void make_by_definition(int tile) {
    locate(tile);
    for (int cell = threadIdx.x; cell < p.tile_groups * kCellsPerGroup; cell += kBlockThreads) {
      int at[3];
      at[2] = cell;
      at[1] = p.tile_size[2](at[2]);
      at[0] = p.tile_size[1](at[1]);
      for (uint32_t left = shared.cells()[cell].outputs >> kUnsafe; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const PackedUnit& unit = p.unit[bit / 2];
        int base[3], residue[3] = {unit.residue[0], unit.residue[1], unit.residue[2] + bit % 2};
        for (int a = 0; a < 3; ++a) base[a] = origin[a] + at[a];
        const float value = output_by_definition(base, residue);
        static_cast<T*>(p.output)[state.output + shared.cells()[cell].output + unit.output + bit % 2] =
            from_accumulator<T>(value);
      }
    }
  }

  __device__ float output_by_definition(const int (&base)[3], const int (&residue)[3]) const {
    const T* const weight = static_cast<const T*>(p.weight);
    ChannelSum<float, true> total;
#pragma unroll 1
    for (int column = 0; column < p.out_channels; ++column) {
      float u = p.bias == nullptr ? 0 : to_accumulator(static_cast<const T*>(p.bias)[column]);
#pragma unroll 1
      for (int z = p.axis[0].first_tap(residue[0]); z < p.axis[0].kernel; z += p.axis[0].tap_step()) {
        const int iz = base[0] + p.axis[0].offset(residue[0], z);
        if (static_cast<unsigned>(iz) >= p.in[0]) continue;
#pragma unroll 1
        for (int y = p.axis[1].first_tap(residue[1]); y < p.axis[1].kernel; y += p.axis[1].tap_step()) {
          const int iy = base[1] + p.axis[1].offset(residue[1], y);
          if (static_cast<unsigned>(iy) >= p.in[1]) continue;
#pragma unroll 1
          for (int x = p.axis[2].first_tap(residue[2]); x < p.axis[2].kernel; x += p.axis[2].tap_step()) {
            const int ix = base[2] + p.axis[2].offset(residue[2], x);
            if (static_cast<unsigned>(ix) >= p.in[2]) continue;
            const T* source = static_cast<const T*>(p.input) + batch * p.input_batch +
                              (iz * p.input_axis[0] + iy * p.input_axis[1] + ix * p.input_axis[2]);
            const int tap = (z * p.axis[1].kernel + y) * p.axis[2].kernel + x;
#pragma unroll 1
            for (int channel = 0; channel < p.in_channels; ++channel) {
              u = fmaf(to_accumulator(source[channel * p.input_channel]),
                       to_accumulator(weight[(channel * p.out_channels + column) * p.kernel_positions + tap]), u);
            }
          }
        }
      }
      total.add(u * Math::kLog2E);
    }
    const Activation<float> a = total.activate();
    return clamp(a.value * a.gate * (1.0f / 6) - state.subtrahend, p.min, p.max);
  }
};

template <class Traits>
__global__ void __launch_bounds__(kBlockThreads, Traits::kMinBlocks)
    chain_mma_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ State state;
  ChainMma<Traits>(p, memory, state).run();
#endif
}

#endif  // __CUDACC__

}  // namespace chain_mma
}  // namespace fastconvt::cuda
