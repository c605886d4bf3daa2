// The persistent row family: the warps that multiply.
#pragma once

#include "rows_persistent_exact.cuh"
#include "rows_persistent_role.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The warps that multiply. A warp of a team makes a strip of bases.
template <class Traits>
class RowsPersistentMaker : RowsPersistentRole<Traits> {
  using Role = RowsPersistentRole<Traits>;
  using T = typename Traits::Element;
  using Item = RowsPersistentItem<T>;
  using Role::lane, Role::p, Role::terms;
  using Sums = float[Traits::kKinds][Traits::kTiles][4];  // of the phases with taps
  using Right = uint32_t[Traits::kReach + 1][Traits::kTiles][sizeof(typename Traits::Element) / 2];
  static constexpr int kStride = Traits::kStride;
  static constexpr int kKinds = Traits::kKinds;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kReach = Traits::kReach;
  static constexpr int kTapLanes = Traits::kKernel * (Traits::kSplit ? 64 : 32);  // of a step's weights
  static constexpr int kWords = sizeof(T) / 2;  // of a lane's right operand, for 8 terms

  const int team, warp, row, quad;  // `warp` of the team
  float start[2];                   // the bias of channels `row` and `row + 8`, or 0 where that is not finite
  bool finite_terms;                // the bias of all channels is
  uint32_t origin;                  // of row 0 of channel `row`: where it stands in memory, in elements, modulo 2^32

 public:
  __device__ RowsPersistentMaker(const RowsPersistentParams& p, unsigned char* shared)
      : Role(p, shared),
        team(threadIdx.x / 32 / p.tile.team_warps),
        warp(threadIdx.x / 32 % p.tile.team_warps),
        row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4) {}

  __device__ void run() {
    int staged_block = Item(p, blockIdx.x).block, k = 0, slot = 0;
    int next = team;  // the team's next base, from the item's first one on
    change_channels(staged_block);
    for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++k) {
      const auto chunk = this->chunk_of(k);
      wait_at(chunk.full, chunk.parity);
      const Item item = *chunk.item;
      if (item.block != staged_block) {
        change_channels(item.block);
        staged_block = item.block;
      }
      origin = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(item.output) / sizeof(T)) +
               static_cast<uint32_t>(this->first_output(item)) + row * static_cast<uint32_t>(p.out.channel);
      if (next >= item.count) finish(chunk.empty);
      for (; next < item.count; next += p.tile.teams, slot += p.tile.rows) {
        const bool last = next + p.tile.teams >= item.count;
        make_base(item, item.base + next, slot, chunk.inputs, last ? chunk.empty : nullptr);
      }
      next -= item.count;
    }
  }

 private:
  __device__ void change_channels(int block) {
    this->sync_roles();
    stage_channels<Traits>(p, block, this->weights, terms, this->constants, threadIdx.x, this->makers());
    fence_shared_writes();
    this->sync_roles();
    const bool finite[2] = {is_finite(terms[row]), is_finite(terms[row + 8])};
    start[0] = finite[0] ? terms[row] : 0.f;
    start[1] = finite[1] ? terms[row + 8] : 0.f;
    finite_terms = __all_sync(~0u, finite[0] && finite[1]);
  }

  // The warp is done with what stands behind a barrier, if any.
  __device__ void finish(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0 && barrier != nullptr) arrive_at(barrier);
  }

  // After the last row, the warp is finished with the inputs.
  __device__ void make_base(const Item& item, int base, int slot, const T* chunk, uint64_t* inputs) const {
    int left = p.tile.rows;
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      if (this->tapless(phase)) continue;
      const auto stage = this->stage_of(team, slot++);
      uint64_t* const last_of = --left == 0 ? inputs : nullptr;
      if (this->has_output(this->output_y(base, phase))) {
        make_row(item, base, phase, chunk, stage, last_of);
        fence_shared_writes();
      } else {
        finish(last_of);
        stage.wait_until_free();
      }
      finish(stage.staged);
    }
  }

  __device__ void make_row(const Item& item, int base, int phase, const T* chunk, const typename Role::Stage& stage,
                           uint64_t* inputs) const {
    Sums sum;
    add_taps(item, base, phase, chunk, sum);
    finish(inputs);
    stage.wait_until_free();
    if (are_right(sum)) {
      if (!finite_terms) add_infinite_terms({terms[row], terms[row + 8]}, sum);
      stage_outputs(item, this->output_y(base, phase), stage.outputs, sum);
    } else {
      stage_by_definition<Traits>(p, item, base, phase, warp * 8 * kTiles * kStride, terms,
                                  stage.outputs + Traits::kLine);
    }
  }

  static __device__ bool are_right(const Sums& sum) {
    if constexpr (Traits::kSplit) {
      return are_exact(sum);
    } else {
      return are_finite(sum);
    }
  }

  __device__ void clear(Sums& sum) const {
#pragma unroll
    for (int r = 0; r < kKinds; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] = start[i / 2];
  }

  // Of a phase that has taps.
  __device__ void add_taps(const Item& item, int base, int phase, const T* chunk, Sums& sum) const {
    clear(sum);
    const int step_pitch = kRowsMmaStep * p.tile.row_pitch;
    int y = base - p.phase[phase].back, tap = p.phase[phase].first_tap;
    chunk += (y - item.base + p.tile.span - 1) * p.tile.steps * step_pitch + kRowsPersistentHalo + p.tile.shift +
             warp * 8 * kTiles;
    do {
      if (has_input_row(p, y)) {
        const MmaLeft<T>* weight = this->weights + tap * p.tile.steps * kTapLanes + lane;
        int step = 0;
        if constexpr (Traits::kPairsSteps) {
#pragma unroll 1
          for (; step + 2 <= p.tile.steps; step += 2, weight += 2 * kTapLanes) {
            add_two_steps(chunk + step * step_pitch, step_pitch, weight, sum);
          }
          if (step < p.tile.steps) add_step(chunk + step * step_pitch, weight, sum);
        } else {
#pragma unroll 1
          do {
            add_step(chunk + step * step_pitch, weight, sum);
            weight += kTapLanes;
          } while (++step < p.tile.steps);
        }
      }
      chunk -= p.back_step * p.tile.steps * step_pitch;
      tap += p.tap_step;
      y -= p.back_step;
    } while (tap < p.height_kernel);
  }

  // The right operands of the warp's tiles, moved back by 0 .. kReach bases. What no tap reads is optimized away.
  __device__ void load_inputs(const T* input, Right& right) const {
    if constexpr (sizeof(T) == 4) {
      input += quad * p.tile.row_pitch + row;
#pragma unroll
      for (int back = 0; back <= kReach; ++back)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            const float value = input[4 * i * p.tile.row_pitch + 8 * j - back];
            right[back][j][i] = Traits::kSplit ? __float_as_uint(value) : to_tf32(value);
          }
    } else {
      constexpr int kLoads = (kTiles + 4) / 4;
      uint32_t tile[4 * kLoads];  // from the one before the strip on
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        load_transposed(input + lane % 8 * p.tile.row_pitch + (min(lane / 8 + 4 * i, kTiles) - 1) * 8, tile + 4 * i);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) right[0][j][0] = tile[j + 1];
#pragma unroll
      for (int back = 1; back <= kReach; ++back)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          right[back][j][0] = __shfl_sync(~0u, row >= 8 - back ? tile[j] : tile[j + 1], (lane - 4 * back) & 31);
        }
    }
  }

  __device__ void add_step(const T* input, const MmaLeft<T>* weight, Sums& sum) const {
    Right right;
    load_inputs(input, right);
    if constexpr (Traits::kSplit) {
      add_split(right, weight, sum);
    } else {
      add_whole(right, weight, sum);
    }
  }

  // Two steps in MMAs of 16 terms.
  __device__ void add_two_steps(const T* input, int step_pitch, const MmaLeft<T>* weight, Sums& sum) const {
    Right right, next;
    load_inputs(input, right);
    load_inputs(input + step_pitch, next);
#pragma unroll
    for (int t = 0; t < Traits::kKernel; ++t) {
      const int r = Traits::kind_of(t * Traits::kDilation % kStride), back = t * Traits::kDilation / kStride;
      const MmaLeft<T> left = weight[t * 32], next_left = weight[t * 32 + kTapLanes];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        multiply_add_two(sum[r][j], left, next_left, right[back][j][0], next[back][j][0]);
      }
    }
  }

  __device__ void add_whole(const Right& right, const MmaLeft<T>* weight, Sums& sum) const {
#pragma unroll
    for (int t = 0; t < Traits::kKernel; ++t) {
      constexpr int kNext = Traits::kTapStep;  // tap of the same phase
      const int r = Traits::kind_of(t * Traits::kDilation % kStride), back = t * Traits::kDilation / kStride;
      const MmaLeft<T> left = weight[t * 32];
      if constexpr (sizeof(T) == 4) {
        multiply_tap(t, left, right, sum);
      } else if (t / kNext % 2 == 0 && t + kNext < Traits::kKernel) {  // two taps in an MMA of 16 terms
        const MmaLeft<T> next = weight[(t + kNext) * 32];
        const int next_back = (t + kNext) * Traits::kDilation / kStride;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          multiply_add_two(sum[r][j], left, next, right[back][j][0], right[next_back][j][0]);
        }
      } else if (t / kNext % 2 == 0) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) multiply_add(sum[r][j], left, right[back][j][0]);
      }
    }
  }

  // float32 by three products of TF32 terms, the small ones first, into sums of their own: the unit truncates where it
  // adds.
  __device__ void add_split(Right& right, const MmaLeft<T>* weight, Sums& sum) const {
    Right low;
#pragma unroll
    for (int back = 0; back <= kReach; ++back)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          float terms[2];
          split_tf32_rounded(__uint_as_float(right[back][j][i]), terms[0], terms[1]);
          right[back][j][i] = __float_as_uint(terms[0]);
          low[back][j][i] = __float_as_uint(terms[1]);
        }
    Sums part = {};
#pragma unroll
    for (int t = 0; t < Traits::kKernel; ++t) {
      multiply_tap(t, weight[2 * t * 32 + 32], right, part);
      multiply_tap(t, weight[2 * t * 32], low, part);
    }
#pragma unroll
    for (int t = 0; t < Traits::kKernel; ++t) multiply_tap(t, weight[2 * t * 32], right, part);
#pragma unroll
    for (int r = 0; r < kKinds; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] += part[r][j][i];
  }

  static __device__ __forceinline__ void multiply_tap(int t, const MmaLeft<T>& left, const Right& right, Sums& sum) {
    const int r = Traits::kind_of(t * Traits::kDilation % kStride), back = t * Traits::kDilation / kStride;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) multiply_add(sum[r][j], left, right[back][j][0], right[back][j][1]);
  }

  // What stands outside of the row is the constant that fills it up.
  __device__ void fill_outside(int first, Sums& sum) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j, first += 8 * kStride) {
      if (first >= 0 && first + 8 * kStride <= p.out_width) continue;
      const float term[2] = {terms[row], terms[row + 8]};
#pragma unroll
      for (int r = 0; r < kStride; ++r) {
        if (!Traits::has_taps(r)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int o = first + (2 * quad + i % 2) * kStride + r;
          if (static_cast<unsigned>(o) >= static_cast<unsigned>(p.out_width)) {
            sum[Traits::kind_of(r)][j][i] = term[i / 2];
          }
        }
      }
    }
  }

  // A lane has two neighbouring bases of a tile, all phases.
  __device__ void stage_outputs(const Item& item, int y, T* stage, Sums& sum) const {
    constexpr int kRun = 2 * kStride;
    const int begin = warp * 8 * kTiles * kStride;
    fill_outside(this->first_output(item) + begin, sum);
    p.rectify(sum);
    // As staged_channel says; the last bits of an address do.
    const uint32_t at = origin + y * static_cast<uint32_t>(p.out.axis[1]);
    const uint32_t low_skew = at % Traits::kSector;
    const uint32_t high_skew = (at + 8 * static_cast<uint32_t>(p.out.channel)) % Traits::kSector;
    T* const channel = stage + row * p.tile.output_pitch + Traits::kLine + begin + quad * kRun;
    T* const low = channel + low_skew;
    T* const high = channel + 8 * p.tile.output_pitch + high_skew;
    if (__all_sync(~0u, (low_skew | high_skew) % 2 == 0)) {
      stage_half<2>(low, 0, sum);
      stage_half<2>(high, 1, sum);
    } else if constexpr (sizeof(T) == 2) {
      stage_words(low, low_skew % 2 != 0, 0, sum);
      stage_words(high, high_skew % 2 != 0, 1, sum);
    } else {
      stage_half<1>(low, 0, sum);
      stage_half<1>(high, 1, sum);
    }
  }

  // 16-bit outputs in words; where the first one stands in the middle of a word, words pair it with what comes before.
  __device__ void stage_words(T* target, bool odd, int half, const Sums& sum) const {
    const T constant = kKinds < kStride ? from_accumulator<T>(p.rectify(terms[row + 8 * half])) : T{};
    const uint32_t pick = odd ? 0x5432 : 0x7654;
    const auto value = [&](int i, int j) {
      const int r = i % kStride;
      return Traits::has_taps(r) ? from_accumulator<T>(sum[Traits::kind_of(r)][j][2 * half + i / kStride]) : constant;
    };
#pragma unroll
    for (int j = 0; j < kTiles; ++j, target += 8 * kStride) {
      uint32_t words[kStride];
#pragma unroll
      for (int i = 0; i < kStride; ++i) words[i] = two_halves(value(2 * i, j), value(2 * i + 1, j));
      uint32_t* const to = reinterpret_cast<uint32_t*>(target - (odd ? 1 : 0));
#pragma unroll
      for (int i = 1; i < kStride; ++i) to[i] = __byte_perm(words[i - 1], words[i], pick);
      if (odd) {
        reinterpret_cast<uint16_t*>(target)[0] = static_cast<uint16_t>(words[0]);
        reinterpret_cast<uint16_t*>(target)[2 * kStride - 1] = static_cast<uint16_t>(words[kStride - 1] >> 16);
      } else {
        to[0] = words[0];
      }
    }
  }

  template <int kCount>
  __device__ void stage_half(T* target, int half, const Sums& sum) const {
    const T constant = kKinds < kStride ? from_accumulator<T>(p.rectify(terms[row + 8 * half])) : T{};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 2 * kStride; i += kCount) {
        Pack<T, kCount> values;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          const int r = (i + e) % kStride;
          values.value[e] = Traits::has_taps(r)
                                ? from_accumulator<T>(sum[Traits::kind_of(r)][j][2 * half + (i + e) / kStride])
                                : constant;
        }
        *reinterpret_cast<Pack<T, kCount>*>(target + j * 8 * kStride + i) = values;
      }
  }
};

#endif

}  // namespace fastconvt::cuda
