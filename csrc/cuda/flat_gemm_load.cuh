// The warpgroups of a flat GEMM's block that load: inputs through registers, where they are rounded to TF32 or split,
// and weights in bulk. A staged position has 64 bytes of channels; their granules of 16 bytes are swizzled as the
// matrix unit expects it.
#pragma once

#include "flat_gemm_item.cuh"

namespace fastconvt::cuda {

__device__ __forceinline__ uint32_t granule_address(int position, int granule) {
  return position * 64 + ((granule ^ (position >> 1 & 3)) << 4);
}

__device__ __forceinline__ void store_granule(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// The 11 leading bits of x, rounded to nearest; NaN where x is not finite or huge. Three float operations: the integer
// ones of a conversion have half their rate.
__device__ __forceinline__ float leading_bits(float x) {
  const float scaled = __fmul_rn(x, 8193.f);
  return __fsub_rn(scaled, __fsub_rn(scaled, x));
}

// Rounds four channels to TF32 and stores them; kThree: and what is left of them, `rest` bytes further.
template <bool kThree>
__device__ __forceinline__ void store_rounded(uint32_t address, int rest, const float (&x)[4]) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float leading = leading_bits(x[i]);
    high[i] = __float_as_uint(leading);
    if constexpr (kThree) low[i] = __float_as_uint(leading_bits(__fsub_rn(x[i], leading)));
  }
  store_granule(address, high);
  if constexpr (kThree) store_granule(address + rest, low);
}

// For every staged position where its first channel stands, from the first batch entry's; -1: nowhere.
template <int kLoaders>
__device__ __forceinline__ void fill_positions(const FlatGemmParams& p, const FlatGemmItem& item,
                                               const FlatGemmStage& stage, int first_entry, int thread, int* table) {
  const FlatGemmClass& k = item.of(p);
  for (int i = thread; i < p.staged; i += kLoaders) {
    const int position = item.first + i;
    const FlatGemmPlace place = find_place(p, position);
    int64_t offset = (place.n - first_entry) * p.in.batch;
    bool exists = place.n < p.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int at = place.at[a] + k.low[a] + stage.shift[a];
      exists = exists && static_cast<unsigned>(at) < static_cast<unsigned>(p.axis[a].in);
      offset += at * p.in.axis[a];
    }
    table[i] = exists ? static_cast<int>(offset) : -1;
  }
}

// A round: what a thread loads at once, and when it is stored, of a stage of a chunk.
struct FlatGemmRound {
  const unsigned char* weights;  // of the stage
  int bytes;                     // of them; 0: the end
  int begin;                     // position
  bool last;                     // of the stage
};

// The sequence of rounds of all items of the block. A thread has a granule of every kTurn-th position. Contiguous: the
// lanes of a warp have neighbouring positions; channels-last: four lanes share one.
template <bool kThree, bool kChannelsLast, bool kSplit>
struct FlatGemmWalk {
  static constexpr int kLoaders = kFlatGemmLoaders<kThree>, kTurn = kLoaders / 4;
  static constexpr int kUnits = kThree ? 4 : 6;  // granules of a round
  using Values = float[kUnits][4];

  FlatGemmSchedule<kSplit> schedule;
  bool fresh;  // a stage begins
  int stage, begin;
  int left;                      // channels, from the chunk on
  const float* base;             // the thread's first channel in the chunk
  const unsigned char* weights;  // of the stage and the chunk
  int bytes;                     // of them
  int offset[kUnits];

  static __device__ __forceinline__ int granule(int thread) { return kChannelsLast ? thread % 4 : thread / 32 % 4; }
  static __device__ __forceinline__ int first_position(int thread) {
    return kChannelsLast ? thread / 4 : thread % 32 + thread / 128 * 32;
  }

  // Goes on to the next item that has taps.
  __device__ __forceinline__ void seek(const FlatGemmParams& p) {
    do {
      schedule.count = 0;
    } while (schedule.next(p) && schedule.count == 0);
    const int whole = schedule.from / p.chunks, chunk = schedule.from - whole * p.chunks;
    if (schedule.count > 0) stage = schedule.item(p).of(p).first_stage + whole;
    begin = 0, left = p.group_in - chunk * kFlatGemmChannels, fresh = true;
  }

  // Whole units of a warp that are beyond the staged positions are left out.
  __device__ __forceinline__ bool has_unit(const FlatGemmParams& p, int u) const {
    return begin + u * kTurn < p.staged;
  }
  __device__ __forceinline__ void load_wide(const FlatGemmParams& p, int channels, Values& x) const {
    const float* from = base;
    asm volatile("" : "+l"(from));  // an address, to which one instruction adds an offset
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (!has_unit(p, u)) break;
      float4 v{0.f, 0.f, 0.f, 0.f};
      if (offset[u] >= 0 && channels > 0) v = __ldg(reinterpret_cast<const float4*>(from + offset[u]));
      x[u][0] = v.x, x[u][1] = v.y, x[u][2] = v.z, x[u][3] = v.w;
    }
  }
  template <bool kAll>
  __device__ __forceinline__ void load_narrow(const FlatGemmParams& p, int channels, Values& x) const {
    const float* from[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      from[c] = base + c * (kChannelsLast ? 1 : p.in.channel);
      asm volatile("" : "+l"(from[c]));  // an address, to which one instruction adds an offset
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (!has_unit(p, u)) break;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[u][c] = 0.f;
        if (offset[u] >= 0 && (kAll || c < channels)) x[u][c] = __ldg(from[c] + offset[u]);
      }
    }
  }

  __device__ __forceinline__ void begin_stage(const FlatGemmParams& p, int thread, int* table) {
    constexpr int kTapBytes = kFlatGemmTapBytes * (kThree ? 2 : 1);
    const FlatGemmStage& of = p.stage[stage];
    const FlatGemmItem item = schedule.item(p);
    const int first_entry = find_place(p, item.first).n;
    meet_group<kLoaders>(3);  // everyone has done with the table before
    fill_positions<kLoaders>(p, item, of, first_entry, thread, table);
    meet_group<kLoaders>(3);
    const int channel = p.group_in - left, taps = of.taps[0] + of.taps[1];
    base = p.input + first_entry * p.in.batch +
           (static_cast<int64_t>(item.group) * p.group_in + channel + granule(thread) * 4) * p.in.channel;
    bytes = taps * kTapBytes;
    const int64_t before = static_cast<int64_t>(item.group * p.channel_blocks.divisor + item.channel_block) * p.taps;
    weights = p.packed + ((before + of.first_tap) * p.chunks + channel / kFlatGemmChannels * taps) * kTapBytes;
  }

  // Starts the loads of a round and goes on.
  __device__ __forceinline__ FlatGemmRound load(const FlatGemmParams& p, int thread, int* table, Values& x) {
    FlatGemmRound round{nullptr, 0, 0, false};
    if (schedule.count == 0) return round;
    if (fresh) begin_stage(p, thread, table);
    if (fresh || p.staged > kUnits * kTurn) {
      const int first = begin + first_position(thread);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) offset[u] = first + u * kTurn < p.staged ? table[first + u * kTurn] : -1;
    }
    if (kChannelsLast && p.wide) {
      load_wide(p, left - granule(thread) * 4, x);
    } else if (left >= kFlatGemmChannels) {
      load_narrow<true>(p, 4, x);
    } else {
      load_narrow<false>(p, left - granule(thread) * 4, x);
    }
    fresh = false;
    round = {weights, bytes, begin, false};
    begin += kUnits * kTurn;
    if (begin < p.staged) return round;
    round.last = true;
    begin = 0;
    base += kFlatGemmChannels * p.in.channel;
    weights += bytes;
    left -= kFlatGemmChannels;
    if (left <= 0) ++stage, left = p.group_in, fresh = true;
    if (--schedule.count == 0) seek(p);
    return round;
  }
};

// Loads what all items of the block need, a round ahead of what is stored.
template <bool kThree, bool kChannelsLast, bool kSplit>
__device__ __forceinline__ void load_items(const FlatGemmParams& p, int thread, unsigned char* shared) {
  using Walk = FlatGemmWalk<kThree, kChannelsLast, kSplit>;
  const FlatGemmBarriers barriers{shared_address(shared) + p.barriers_at, p.stages};
  int* const table = reinterpret_cast<int*>(shared + p.table_at);
  int place = 0, parity = 0;
  const auto store = [&](const FlatGemmRound& round, const typename Walk::Values& x) {
    const uint32_t target = shared_address(shared) + place * p.stage_bytes, full = barriers.full(place);
    if (round.begin == 0) {
      mbarrier_wait(barriers.empty(place), parity ^ 1);
      if (thread == 0) {
        mbarrier_arrive_expecting(full, round.bytes);
        bulk_load(target + p.input_bytes * (kThree ? 2 : 1), round.weights, round.bytes, full);
      }
    }
    // Units are a multiple of 32 positions apart, which keeps the swizzle; beyond the staged ones is room for zeros.
    const uint32_t address =
        target + granule_address(round.begin + Walk::first_position(thread), Walk::granule(thread));
#pragma unroll
    for (int u = 0; u < Walk::kUnits; ++u) {
      if (round.begin + u * Walk::kTurn >= p.staged) break;
      store_rounded<kThree>(address + u * Walk::kTurn * 64, p.input_bytes, x[u]);
    }
    if (!round.last) return;
    fence_shared_writes();  // what was stored is read by the matrix unit
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    if (++place == p.stages) place = 0, parity ^= 1;
  };
  Walk walk;
  walk.schedule.begin(p);
  walk.schedule.from = 0;
  walk.seek(p);
  typename Walk::Values even, odd;
  FlatGemmRound first = walk.load(p, thread, table, even);
  if (thread == 0) wait_for_previous_grid();  // for the packed weights
  while (true) {
    const FlatGemmRound second = walk.load(p, thread, table, odd);
    if (first.bytes == 0) break;
    store(first, even);
    first = walk.load(p, thread, table, even);
    if (second.bytes == 0) break;
    store(second, odd);
  }
}

}  // namespace fastconvt::cuda
