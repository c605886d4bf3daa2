// From tasks to granules: which tile a block makes, which of its outputs exist, and its inputs.
#pragma once

#include "chain_mma_block.cuh"

namespace fastconvt::cuda::chain_mma {

template <class Traits>
class Stage {
 protected:
  using T = typename Traits::Element;

  const Params& p;
  const Shared<Traits> shared;
  BlockState& block;
  TeamState& state;

  __device__ Stage(const Params& p, unsigned char* memory, State& state)
      : p(p), shared{p, memory}, block(state.block), state(state.team[threadIdx.y]) {}

  // 0 or 1. No shape that is known at compile time has them.
  __device__ __forceinline__ int twins() const { return Traits::Shape::kUnits > 0 ? 0 : p.twins; }

  // Inputs of a thread's next positions, on their way from global memory.
  static constexpr int kAhead = Traits::kPadBias || Traits::kRests ? 6 : 4;
  struct Batch {
    T value[kAhead][kBlock];
  };

  // Where cells lie in the region and in the output, and positions in the region.
  __device__ void list_places() {
    const int teams = blockDim.y;
    for (int cell = block_thread(); cell < p.tile_groups * kCellsPerGroup; cell += block_threads()) {
      int x = cell;
      int y = p.tile_size[2](x);
      const int z = p.tile_size[1](y);
      shared.cell_positions()[cell] =
          static_cast<uint16_t>(z < p.tile[0] ? ((z * p.region[1] + y) * p.region[2] >> twins()) + x : 0);
      const int output = (z * p.stride[0] * p.out[1] + y * p.stride[1]) * p.out[2] + x * p.stride[2];
      for (int team = 0; team < teams; ++team) shared.cells(shared.team(team))[cell].output = output;
    }
    for (int position = block_thread(); position < p.positions; position += block_threads()) {
      int x = position;
      int y = p.region_size[2](x);
      const int z = p.region_size[1](y);
      shared.places()[position] = z << 20 | y << 10 | x;
    }
  }

  // The task's tile and which of its parts.
  __device__ int find_tile(int task, int& part) const {
    part = 0;
    if (task < p.whole_tiles) return task;
    part = task - p.whole_tiles;
    return p.whole_tiles + p.parts(part);
  }

  __device__ Tile locate(int task) const {
    Tile tile;
    int part, index = find_tile(task, part);
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int place = index;
      index = p.tiles[a](place);
      tile.origin[a] = p.first_cell[a] + place * p.tile[a];
    }
    tile.entry = index;
    return tile;
  }

  // One thread of the team does.
  __device__ void set_state(int task, const Tile& tile) {
    state.task = task;
    int64_t first = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) first = first * p.out[a] + (tile.origin[a] * p.stride[a] - p.padding[a]);
    state.output = tile.entry * p.output_batch + first;
    state.first_cell = 0;
    state.end_cell = p.tile_groups * kCellsPerGroup;
    if (task < p.whole_tiles) return;
    int part;
    find_tile(task, part);
    state.first_cell = p.tile_groups * part / p.parts.divisor * kCellsPerGroup;
    state.end_cell = p.tile_groups * (part + 1) / p.parts.divisor * kCellsPerGroup;
  }

  // Which outputs of each cell exist.
  __device__ void list_cells(const Tile& tile) {
    for (int cell = team_thread(); cell < p.tile_groups * kCellsPerGroup; cell += kTeamThreads) {
      int at[3];
      at[2] = cell;
      at[1] = p.tile_size[2](at[2]);
      at[0] = p.tile_size[1](at[1]);
      uint32_t exists = at[0] < p.tile[0] ? p.all_exist : 0;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        const int place = tile.origin[a] + at[a] - p.first_cell[a];
        exists &= place == 0 ? p.first_exists[a] : p.all_exist;
        exists &= place < p.last_cell[a] ? p.all_exist : place == p.last_cell[a] ? p.last_exists[a] : 0;
      }
      shared.cells()[cell].outputs = exists;
    }
  }

  // A tile's inputs. A place exists if no field of place + above and of below - place has lost its top bit.
  struct Source {
    const T* first;  // at place 0
    uint32_t above, below;
  };

  __device__ Source find_source(const Tile& tile) const {
    constexpr int kTop = 1 << 9;
    Source source{static_cast<const T*>(p.input) + tile.entry * p.input_batch, 0, 0};
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int first = tile.origin[a] * (a == 2 ? 1 + twins() : 1) + p.low[a];
      source.above = source.above << 10 | (kTop - max(0, min(-first, kTop)));
      source.below = source.below << 10 | (kTop - 1 + max(0, min(p.in[a] - first, kTop)));
      source.first += static_cast<int64_t>(first) * p.input_axis[a];
    }
    keep(source.first);
    return source;
  }

  // Positions `begin`, begin + kTeamThreads, ... An input that does not exist is zero.
  __device__ __forceinline__ void load(const Source& source, int block, int begin, Batch& batch) const {
    constexpr uint32_t kTops = 1 << 29 | 1 << 19 | 1 << 9;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int position = begin + i * kTeamThreads;
      const uint32_t place = position < p.positions ? shared.places()[position] : 0;
      const bool exists = position < p.positions && (place + source.above & source.below - place & kTops) == kTops;
      const int at = static_cast<int>(place >> 20) * p.input_axis[0] +
                     static_cast<int>(place >> 10 & 1023) * p.input_axis[1] +
                     static_cast<int>(place & 1023) * p.input_axis[2];
#pragma unroll
      for (int c = 0; c < kBlock; ++c) {
        if (Traits::kPadBias && c == kBlock - 1) continue;
        const int channel = block * kBlock + c;
        batch.value[i][c] =
            exists && channel < p.in_channels ? __ldg(source.first + (at + channel * p.input_channel)) : T{};
      }
    }
  }

  // The granules of the tile's region; the first batch has been loaded.
  __device__ void stage_inputs(const Source& source, Batch& batch) {
    const float scale = block.input_scale;
    for (int b = 0; b < p.channel_blocks; ++b) {
      uint4* const plane = shared.granules() + (b * (Traits::kSplit ? 2 : 1) * p.positions >> twins());
      for (int begin = team_thread(); begin < p.positions; begin += kAhead * kTeamThreads) {
        if (b > 0 || begin != team_thread()) load(source, b, begin, batch);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int position = begin + i * kTeamThreads;
          if (position < p.positions) store_granules(plane, position, batch.value[i], scale);
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
    const uint2 rounded = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
    store_pairs(plane, position, rounded);
    if constexpr (Traits::kSplit) {
      const uint2 rest = make_uint2(pack_rest(rounded.x, x[0], x[1]), pack_rest(rounded.y, x[2], x[3]));
      if constexpr (Traits::kRests) {
        store_pairs(plane + (p.positions >> twins()), position, rest);
      } else {
        plane[p.positions + position] = make_uint4(rounded.x, rounded.y, rest.x, rest.y);
      }
    }
  }

  // A position's half of the pair granules that it is in.
  __device__ __forceinline__ void store_pairs(uint4* plane, int position, uint2 half) {
    uint2* const halves = reinterpret_cast<uint2*>(plane) + (twins() ? 1 : 2) * position;
    halves[0] = half;
    if (twins()) return;
    if (position > 0) halves[-1] = half;
    if (position == p.positions - 1) halves[1] = make_uint2(0, 0);
  }
};

}  // namespace fastconvt::cuda::chain_mma
