// What a block of the tensor-core chain's kernel is made of: shapes, instructions, shared memory.
#pragma once

#include <type_traits>

#include "chain.cuh"
#include "chain_mma_params.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda::chain_mma {

// Steps of a unit whose number is known at compile time; AnyShape: read from the parameters. kRests as in the plan.
struct AnyShape {
  static constexpr bool kRests = false;
  static constexpr int kUnits = 0;
  FASTCONVT_HOST_DEVICE static constexpr int both(int) { return 0; }
  FASTCONVT_HOST_DEVICE static constexpr int single(int) { return 0; }
  FASTCONVT_HOST_DEVICE static constexpr int delta(int, int) { return 0; }
};

struct AnyRests : AnyShape {
  static constexpr bool kRests = true;
};

// Kernel 3 and stride 2 along each axis: units of 4, 2, 2 and 1 rows, the first phase with two taps in each.
template <bool kSplit>
struct Kernel3Stride2 {
  static constexpr bool kRests = false;
  static constexpr int kUnits = 4;
  FASTCONVT_HOST_DEVICE static constexpr int rows(int unit) { return 4 >> (unit + 1) / 2; }
  FASTCONVT_HOST_DEVICE static constexpr int both(int unit) { return kSplit ? rows(unit) : (rows(unit) + 1) / 2; }
  // Of the first phase.
  FASTCONVT_HOST_DEVICE static constexpr int single(int unit) { return kSplit ? (rows(unit) + 1) / 2 : 0; }
  // The class of a step of the unit: a split and a pair granule, neighbours along height or depth, or one granule.
  FASTCONVT_HOST_DEVICE static constexpr int delta(int unit, int step) {
    return kSplit && step < both(unit) ? 1 : unit == 1 ? 3 : unit == 3 ? 0 : 2;
  }
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
  using Shape = Shape_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kColumns = kColumns_;  // of 8 channels
  static constexpr bool kRests = Shape::kRests;
  static constexpr int kParts = kRests ? 2 : 1;  // of a step's weights: rounded, and what rounding left of them
  // Of at most three channels: the fourth of each cell is 1 and carries the bias. Costs no instruction.
  static constexpr bool kPadBias = kPadBias_;
  // Where results are no more exact than that: S is summed in TF32, and polynomials relieve the special function unit.
  static constexpr bool kCoarseSum = !kSplit;
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

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// sum += a * b in TF32, 16 x 8 x 8.
__device__ __forceinline__ void add_selected(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Both halves divided by kSplitScale.
__device__ __forceinline__ uint32_t scale_down(uint32_t halves) {
  const __half2 h = __hmul2(reinterpret_cast<const __half2&>(halves), __float2half2_rn(1 / kSplitScale));
  return reinterpret_cast<const uint32_t&>(h);
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(h);
}

// 2^x by multiply-adds, to 1e-7 of it: a NaN becomes 2^128.
__device__ __forceinline__ float exp2_polynomial(float x) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-126.0f));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(128.0f));
  constexpr float kRound = 12582912;  // 1.5 * 2^23: leaves an integer in the low bits
  const float rounded = x + kRound;
  const float rest = x - (rounded - kRound);
  float power = fmaf(0.0013276470126584172f, rest, 0.009675540961325169f);
  power = fmaf(power, rest, 0.05550713463717729f);
  power = fmaf(power, rest, 0.24022120237350464f);
  power = fmaf(power, rest, 0.6931469440460205f);
  power = fmaf(power, rest, 1.0000001192092896f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}

// What rounding to float16 left of x and y, scaled; infinite where an input is out of the range that is exact enough.
__device__ __forceinline__ uint32_t pack_rest(uint32_t rounded, float x, float y) {
  const float2 r = __half22float2(reinterpret_cast<const __half2&>(rounded));
  const float infinity = Log2Domain<float>::infinity();
  const float low = fabsf(x) > kInputLimit ? infinity : (x - r.x) * kSplitScale;
  const float high = fabsf(y) > kInputLimit ? infinity : (y - r.y) * kSplitScale;
  return pack(low, high);
}

// Shared memory as a team sees it. The offsets stay in the parameters: as pointers they would take registers.
template <class Traits>
struct Shared {
  using Fragment = Pack<uint32_t, 2 * Traits::kColumns>;

  const Params& p;
  unsigned char* const memory;

  __device__ unsigned char* team(int index) const { return memory + p.shared.teams + index * p.shared.team_bytes; }
  __device__ unsigned char* team() const { return team(threadIdx.y); }

  // Of weights: [chunk][fragment][lane].
  __device__ Fragment* fragments() const { return reinterpret_cast<Fragment*>(memory); }
  // [chunk][column]
  __device__ float* bias() const { return reinterpret_cast<float*>(memory + p.shared.bias); }
  // Of a position in the region: depth, height and width, 10 bits each.
  __device__ uint32_t* places() const { return reinterpret_cast<uint32_t*>(memory + p.shared.places); }
  // Of a cell's first granule.
  __device__ uint16_t* cell_positions() const { return reinterpret_cast<uint16_t*>(memory + p.shared.cell_positions); }
  // [block][pair, split][position]
  __device__ uint4* granules() const { return reinterpret_cast<uint4*>(team()); }
  __device__ Cell* cells(unsigned char* team) const { return reinterpret_cast<Cell*>(team + p.shared.cells); }
  __device__ Cell* cells() const { return cells(team()); }
};

struct Tile {
  int64_t entry;  // of the batch
  int origin[3];  // its first cell
};

// What threads share beside. In registers it would be spilled.
struct BlockState {
  float input_scale, subtrahend;
  int largest_weight;  // its absolute value's bits
  int claimed;         // tasks of the block
};

struct TeamState {
  int64_t output;  // element offset of residues 0 of the tile's first cell, which need not exist
  int task, next;
  int first_cell, end_cell;  // of the tile: those that the task makes
  int unsafe;                // some output of the tile is left to make_by_definition()
};

struct State {
  BlockState block;
  TeamState team[kMaxTeams];
};

// A thread in its team; teams are threadIdx.y.
__device__ __forceinline__ int team_thread() { return threadIdx.x; }

// A thread in its block, and how many there are.
__device__ __forceinline__ int block_thread() { return threadIdx.y * kTeamThreads + threadIdx.x; }
__device__ __forceinline__ int block_threads() { return blockDim.y * kTeamThreads; }

__device__ __forceinline__ void synchronize_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "n"(kTeamThreads) : "memory");
}

}  // namespace fastconvt::cuda::chain_mma
