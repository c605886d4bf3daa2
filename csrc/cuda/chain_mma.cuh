// The fused chain on tensor cores (chain.cuh has its arithmetic; core/chain_mma.h the plan). Every product is a float16
// mma.sync with float32 accumulators, whatever the element type.
//
// Inputs are scaled by a power of two, and weights by its inverse, so that the largest weight is near 2^6: that keeps
// what rounding leaves of either factor in float16's range. Three products are then exact to 2^-21, and one is as TF32.
// Whatever leaves the range ends as NaN or infinity in S, as a NaN does, and that output is made by the definition.
//
// A block is up to five teams of four warps. They share the weights; each has its own tile and its own barrier.
#pragma once

#include "chain_mma_weights.cuh"

namespace fastconvt::cuda::chain_mma {

template <class Traits>
class Kernel : public Weights<Traits> {
  using Base = Weights<Traits>;
  using Base::p, Base::shared, Base::block, Base::state;
  using typename Base::T;
  using Shape = typename Traits::Shape;
  using Math = Log2Domain<float>;
  static constexpr int kColumns = Traits::kColumns;
  using Fragment = Pack<uint32_t, 2 * kColumns>;

 public:
  __device__ Kernel(const Params& p, unsigned char* memory, State& state) : Base(p, memory, state) {}

  // Teams claim their block's tasks one by one: an even share each would end at different times, since the
  // multiprocessor favours older warps.
  __device__ void run() {
    this->prepare();
    int task = claim();
    while (task < p.num_tasks) {
      stage(task);
      synchronize_team();
      int cell = state.first_cell + team_thread() / 32 * kCellsPerGroup;
      for (; cell < state.end_cell; cell += kWarps * kCellsPerGroup) make_group(cell);
      task = claim();
      if (state.unsafe != 0) {
        make_by_definition(state.task);
        synchronize_team();
        if (team_thread() == 0) state.unsafe = 0;
      }
    }
  }

 private:
  // The team's next task. All its threads meet here.
  __device__ int claim() {
    if (team_thread() == 0) state.next = blockIdx.x + atomicAdd(&block.claimed, 1) * gridDim.x;
    synchronize_team();
    return state.next;
  }

  __device__ void stage(int task) {
    typename Base::Batch batch;
    const Tile tile = this->locate(task);
    const auto source = this->find_source(tile);
    this->load(source, 0, team_thread(), batch);
    this->list_cells(tile);
    if (team_thread() == 0) this->set_state(task, tile);
    this->stage_inputs(source, batch);
  }

  using Accumulators = float[kTiles][kColumns][4];
  using Bias = float[kColumns][4];

  // One step for the phases of kPhases, a bit mask. kFirst: the accumulators begin with the bias, or with 0 where that
  // is added elsewhere.
  template <int kPhases, bool kFirst>
  __device__ __forceinline__ void multiply(uint32_t offset, const uint32_t (&rows)[kTiles], const Fragment* fragments,
                                           const Bias& bias, Accumulators& first, Accumulators& second) const {
    uint32_t a[kTiles][4], rest[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      load_matrices(rows[m] + offset, a[m]);
      if constexpr (Traits::kRests) load_matrices(rows[m] + offset + p.shared.rests, rest[m]);
    }
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
          const float* const begin = !kFirst ? sum[m][c] : Traits::kPadBias ? zero : bias[c];
          multiply_add(sum[m][c], a[m], b.value[2 * c], b.value[2 * c + 1], begin);
        }
      }
      if constexpr (Traits::kRests) {
        multiply_rests(a, rest, b, *fragments, sum);
        fragments += 32;
      }
    }
  }

  // The two small products: with the weights' rests, and of the inputs' rests.
  __device__ __forceinline__ void multiply_rests(const uint32_t (&a)[kTiles][4], const uint32_t (&rest)[kTiles][4],
                                                 const Fragment& b, const Fragment& b_rest, Accumulators& sum) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t scaled[2] = {scale_down(b.value[2 * c]), scale_down(b.value[2 * c + 1])};
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply_add(sum[m][c], a[m], b_rest.value[2 * c], b_rest.value[2 * c + 1], sum[m][c]);
        multiply_add(sum[m][c], rest[m], scaled[0], scaled[1], sum[m][c]);
      }
    }
  }

  // Sums over the lane's channels of 2^u, for the two rows that it holds of each matrix.
  __device__ __forceinline__ void sum_powers(const Accumulators& u, float (&sum)[kTiles][2]) const {
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
            constexpr bool kPolynomial = Traits::kCoarseSum;
            power[i] = kPolynomial && row + i == 2 && c == kColumns - 1 ? exp2_polynomial(x) : Math::exp2(x);
          }
          part[c] = power[0] + power[1];
        }
        sum[m][row] = kColumns == 1 ? part[0] : part[0] + part[kColumns - 1];
      }
    }
  }

  // Adds S of a unit's phases to its two columns of the totals. A matrix product gathers the four lanes of a row; a sum
  // goes in as two TF32 terms, or truncated to one, which finish() corrects in the mean.
  __device__ __forceinline__ void add_powers(const Accumulators& first, const Accumulators& second, bool paired,
                                             int unit, float (&totals)[kTiles][4]) const {
    float sum[2][kTiles][2] = {};
    if (paired) sum_powers(second, sum[1]);
    sum_powers(first, sum[0]);
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

  __device__ __forceinline__ int num_units() const { return Shape::kUnits > 0 ? Shape::kUnits : p.num_units; }

  // All outputs of a group of cells.
  __device__ __forceinline__ void make_group(int first) {
    const int lane = threadIdx.x % 32;
    const uint32_t any = __reduce_or_sync(kAllLanes, shared.cells()[first + lane].outputs);
    uint32_t rows[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      rows[m] = shared_address(shared.granules()) + shared.cell_positions()[first + m * kRows + lane % kRows] * 16;
    }
    for (int begin = 0; begin < num_units(); begin += kRoundUnits) {
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
      const int* const step = p.shape_step + first_step<Shape>(kUnit);
      const Fragment* const fragments = shared.fragments() + first_fragment<Shape>(kUnit) * 32 + threadIdx.x % 32;
      uint32_t at[kShapeDeltas][kTiles];
#pragma unroll
      for (int c = 0; c < kShapeDeltas; ++c) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) at[c][m] = rows[m] + ((threadIdx.x & 16) ? p.shape_delta[c] : 0);
      }
      Accumulators first, second;
      multiply<3, true>(step[0], at[Shape::delta(kUnit, 0)], fragments, of.bias, first, second);
#pragma unroll
      for (int i = 1; i < kBoth; ++i) {
        multiply<3, false>(step[i], at[Shape::delta(kUnit, i)], fragments + 64 * i, of.bias, first, second);
      }
#pragma unroll
      for (int i = kBoth; i < kBoth + kSingle; ++i) {
        multiply<1, false>(step[i], at[Shape::delta(kUnit, i)], fragments + 32 * (kBoth + i), of.bias, first, second);
      }
      add_powers(first, second, true, kUnit, totals);
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
        return (threadIdx.x & 16) ? taken >> 16 : taken & 0xffff;
      };
      multiply<3, true>(take(), rows, fragments, of.bias, first, second);
      constexpr int kBoth = 64 * Traits::kParts;
      fragments += kBoth;
#pragma unroll 1
      for (int i = 1; i < unit.both; ++i, fragments += kBoth) {
        multiply<3, false>(take(), rows, fragments, of.bias, first, second);
      }
#pragma unroll 1
      for (int i = 0; i < unit.single[0]; ++i, fragments += kBoth / 2) {
        multiply<1, false>(take(), rows, fragments, of.bias, first, second);
      }
#pragma unroll 1
      for (int i = 0; i < unit.single[1]; ++i, fragments += kBoth / 2) {
        multiply<2, false>(take(), rows, fragments, of.bias, first, second);
      }
      add_powers(first, second, unit.paired, index, totals);
    }
  }

  // The outputs of one unit for the lane's cells.
  __device__ __forceinline__ void store(int first, int unit, const float (&totals)[kTiles][4]) {
    if (unit >= num_units()) return;
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
    value = log2 * (Math::kLn2 / 6) * gate - block.subtrahend;
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(p.min));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(p.max));
    return fabsf(log2) < Math::kSafe;
  }

  // Outputs whose S is out of range or not a number: in float32, with the maximum.
  __device__ void make_by_definition(int task) const {
    const Tile tile = this->locate(task);
    for (int cell = team_thread(); cell < p.tile_groups * kCellsPerGroup; cell += kTeamThreads) {
      int at[3];
      at[2] = cell;
      at[1] = p.tile_size[2](at[2]);
      at[0] = p.tile_size[1](at[1]);
      for (uint32_t left = shared.cells()[cell].outputs >> kUnsafe; left != 0; left &= left - 1) {
        const int bit = __ffs(left) - 1;
        const PackedUnit& unit = p.unit[bit / 2];
        int base[3], residue[3] = {unit.residue[0], unit.residue[1], unit.residue[2] + bit % 2};
        for (int a = 0; a < 3; ++a) {  // for twins, these are not the axis's own
          const int output = (tile.origin[a] + at[a]) * p.stride[a] - p.padding[a] + residue[a];
          base[a] = (output + p.axis[a].padding) / p.axis[a].stride;
          residue[a] = (output + p.axis[a].padding) % p.axis[a].stride;
        }
        const float value = output_by_definition(tile.entry, base, residue);
        static_cast<T*>(p.output)[state.output + shared.cells()[cell].output + unit.output + bit % 2] =
            from_accumulator<T>(value);
      }
    }
  }

  __device__ float output_by_definition(int64_t entry, const int (&base)[3], const int (&residue)[3]) const {
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
            const T* source = static_cast<const T*>(p.input) + entry * p.input_batch +
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
    return clamp(a.value * a.gate * (1.0f / 6) - block.subtrahend, p.min, p.max);
  }
};

template <class Traits>
__global__ void __launch_bounds__(kMaxTeams* kTeamThreads, 1) chain_mma_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ State state;
  Kernel<Traits>(p, memory, state).run();
#endif
}

}  // namespace fastconvt::cuda::chain_mma
