// The fused kernel of the chain's gradients.
//
// The gradients of the fused chain, for few channels, without du in memory. A block makes a tile of cells, a row of 32
// a warp, and marches along the depth. For one phase of its row a warp makes
//
//   u    cells x channels       = inputs of the neighbours x weights          tensor cores, 3 TF32 products for one
//   du   in the same registers  = 2^u / S * dv
//   D    cells x (neighbour, input channel) += du x weights                   du's registers are the operand
//   dW   channels x (neighbour, input channel) += du transposed x inputs      du goes through shared memory
//
// D holds what a cell adds to the gradients of its neighbours. Along the depth they meet in registers: what is added to
// the plane before starts from what the plane before has. Along height and width they meet in shared memory. A tile has
// one more row, column and plane of cells than it owns, unless it is the last one.
//
// Tensor cores truncate when they add: no chain of them is longer than a phase's, and sums go on in float32.
#pragma once

#include "chain_backward_row.cuh"
#include "device/copy.cuh"

namespace fastconvt::cuda {

template <typename T, int kOctets>
struct FusedBlock : FusedRow<T, kOctets> {
  using Base = FusedRow<T, kOctets>;
  using Base::Base;
  using Base::bias_sum, Base::careful, Base::far, Base::group, Base::kChannels, Base::kHalves, Base::lane, Base::near,
      Base::p, Base::patch, Base::plane, Base::quad, Base::shared, Base::subtrahend_sum, Base::warp;
  using typename Base::Math;

  // --- Tables of weights, as the lanes' fragments.

  // Whether one is not finite.
  __device__ __forceinline__ bool store_halves(float* to, float first, float second) {
    float4 halves;
    split_tf32_rounded(first, halves.x, halves.z);
    split_tf32_rounded(second, halves.y, halves.w);
    *reinterpret_cast<float4*>(to) = halves;
    return !is_finite(halves.z) || !is_finite(halves.w);  // NOTE: rounding turns some NaN into 0
  }

  __device__ void prepare() {
    bool bad = false;
    for (int i = threadIdx.x; i < p.shared.floats / 4; i += blockDim.x) {
      reinterpret_cast<float4*>(shared)[i] = make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    const int fragments = kOctets * kLanes;
    for (int i = threadIdx.x; i < p.steps * fragments; i += blockDim.x) {
      const int step = i / fragments, channel = i % fragments / kLanes * 8 + group;
      const int first = find_tap(p, p.step_phase[step], p.neighbours[step][0]);
      const int second = p.second_exists[step] ? find_tap(p, p.step_phase[step], p.neighbours[step][1]) : -1;
      bad |= store_halves(shared + p.shared.forward_weights + i * 4,
                          load_weight<T>(p, quad, channel, first) * Math::kLog2E,
                          load_weight<T>(p, quad, channel, second) * Math::kLog2E);
    }
    for (int i = threadIdx.x; i < p.entries * fragments; i += blockDim.x) {
      const int entry = i / fragments, channel = i % fragments / kLanes * 8 + quad * 2;
      const int tap = find_tap(p, p.entry_phase[entry], p.entry_pair[entry] * 2 + group / 4);
      bad |= store_halves(shared + p.shared.input_weights + i * 4, load_weight<T>(p, group % 4, channel, tap),
                          load_weight<T>(p, group % 4, channel + 1, tap));
    }
    FusedPhase* phases = reinterpret_cast<FusedPhase*>(shared + p.shared.phases);
    for (int i = threadIdx.x; i < p.phases; i += blockDim.x) phases[i] = p.phase[i];
    int* offsets = reinterpret_cast<int*>(shared + p.shared.offsets);
    for (int i = threadIdx.x; i < kPlanes * p.steps * 2; i += blockDim.x) {
      const int z = i / (p.steps * 2), neighbour = p.neighbours[i / 2 % p.steps][i % 2];
      const int planes = neighbour & 4 ? static_cast<int>(plane(z + kPlanes - 1) - plane(z)) * 4 : 0;
      offsets[i] = planes - ((neighbour >> 1 & 1) * kPlanePitch + (neighbour & 1)) * 16;
    }
    const T* bias = static_cast<const T*>(p.bias);
    for (int c = threadIdx.x; c < kChannels; c += blockDim.x) {
      const float value = bias != nullptr && c < p.out_channels ? to_accumulator(__ldg(bias + c)) : 0;
      shared[p.shared.bias + c] = c < p.out_channels ? value * Math::kLog2E : -Math::infinity();
    }
    careful = __syncthreads_or(bad);
  }

  // --- Planes of the input.

  // One element of the plane: its row and column there, its channel.
  __device__ __forceinline__ void stage_element(const FusedTile& tile, int z, int row, int column, int c) const {
    const int y = tile.first[1] - 1 + row, x = tile.first[2] - 1 + column;
    float* to = plane(z) + (row * kPlanePitch + column) * 4 + c;
    if (z >= 0 && z < p.axis[0].in && y >= 0 && y < p.axis[1].in && x >= 0 && x < p.axis[2].in) {
      const T* from = static_cast<const T*>(p.input) + tile.batch * p.input_stride.batch + z * p.input_stride.axis[0] +
                      y * p.input_stride.axis[1] + x * p.input_stride.axis[2];
      copy_column<T>(to, 0, from + c * p.input_stride.channel, 0, 1);
    } else {
      *to = 0;
    }
  }

  // Calls function(row, column, channel) for this thread's part of a plane, which has one more row and column than the
  // tile has cells; those come first.
  template <typename Function>
  __device__ __forceinline__ void for_each_staged(Function&& function) const {
#pragma unroll 1
    for (int c = 0; c < p.in_channels; ++c) function(warp + 1, lane + 1, c);
    for (int c = warp; c < p.in_channels; c += p.rows) function(0, lane + 1, c);
    for (int i = threadIdx.x; i < (p.rows + 1) * p.in_channels; i += blockDim.x) {
      function(i / p.in_channels, 0, i % p.in_channels);
    }
  }

  __device__ __forceinline__ void stage(const FusedTile& tile, int z) const {
    for_each_staged([&](int row, int column, int c) { stage_element(tile, z, row, column, c); });
  }

  // --- The input's gradient.

  __device__ __forceinline__ float* exchange(int row, int neighbour, int cell) const {
    return shared + p.shared.patches + row * p.shared.patch_floats + (neighbour * kExchangeCells + cell) * 8;
  }

  // What the warp's row has added to the plane before. Nothing comes from beyond the 32 cells.
  __device__ __forceinline__ void publish() const {
    __syncwarp();
#pragma unroll
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sum = far[neighbour][i / 2] + i % 2 * 2;
        *reinterpret_cast<float2*>(exchange(warp, neighbour, i * 8 + group) + quad * 2) = make_float2(sum[0], sum[1]);
      }
      if (lane < 8) exchange(warp, neighbour, kTileCells)[lane] = 0;
    }
  }

  // Adds what the cells of a row, at the lane's input and after, add to it as to their neighbour along the height.
  __device__ __forceinline__ void add_exchanged(int row, int neighbour, float (&sum)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 part = *reinterpret_cast<const float4*>(exchange(row, neighbour, lane + i) + i * 4);
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
  }

  // One of the two parts of a row at a seam: fused_seam_kernel adds them.
  __device__ __forceinline__ void store_seam(const FusedTile& tile, int part, int seam, int z,
                                             const float (&sum)[4]) const {
    const int64_t line = ((int64_t{part} * p.batch + tile.batch) * (p.axis[1].tiles - 1) + seam) * p.axis[0].in + z;
    float* to = p.seams + line * p.in_channels * p.axis[2].in + tile.first[2] + lane;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < p.in_channels) to[c * p.axis[2].in] = sum[c];
    }
  }

  __device__ __forceinline__ void store_input_gradient(const FusedTile& tile, int z) const {
    const int y = tile.first[1] + warp, x = tile.first[2] + lane;
    if (warp >= tile.own[1] || z >= p.axis[0].in || lane >= tile.own[2] || x >= p.axis[2].in) return;
    if (warp == 0 && y > 0 && y <= p.axis[1].in) {
      float sum[4] = {};
      add_exchanged(0, 1, sum);
      store_seam(tile, 1, tile.seam, z, sum);
    }
    if (y >= p.axis[1].in) return;
    float sum[4] = {};
    add_exchanged(warp, 0, sum);
    if (warp + 1 < tile.own[1]) {
      add_exchanged(warp + 1, 1, sum);
    } else if (y + 1 < p.axis[1].cells) {
      store_seam(tile, 0, tile.seam + 1, z, sum);
      return;
    }
    T* to = static_cast<T*>(p.grad_input) + tile.batch * p.input_stride.batch + z * p.input_stride.axis[0] +
            y * p.input_stride.axis[1] + x * p.input_stride.axis[2];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < p.in_channels) to[c * p.input_stride.channel] = from_accumulator<T>(sum[c]);
    }
  }

  __device__ __forceinline__ void make_tile(const FusedTile& tile) {
#pragma unroll
    for (int i = 0; i < 16; ++i) near[i / 8][i / 4 % 2][i % 4] = far[i / 8][i / 4 % 2][i % 4] = 0;
    const int first = tile.first[0], end = first + tile.own[0];
    __syncthreads();
    stage(tile, first - 1);
    stage(tile, first);
#pragma unroll 1
    for (int z = first; z <= end; ++z) {
      const bool computes = z < first + tile.cells[0];
      if (!computes && p.grad_input == nullptr) break;
      wait_for_copies();
      __syncthreads();  // also: the plane that goes, and the exchange, have been read
      if (z + 1 < first + tile.cells[0]) stage(tile, z + 1);
      if (computes && warp < tile.own[1]) Base::make_row(tile, z);
      if (p.grad_input == nullptr) continue;
      if (z > first) {
        if (warp < tile.own[1]) publish();
        __syncthreads();
        store_input_gradient(tile, z - 1);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        far[i / 8][i / 4 % 2][i % 4] = near[i / 8][i / 4 % 2][i % 4];
        near[i / 8][i / 4 % 2][i % 4] = 0;
      }
    }
  }

  // --- The block's sums.

  __device__ void store_sums() {
    float* scratch = patch();  // the lanes of a warp, then the warps, in a fixed order
#pragma unroll
    for (int distance = 4; distance < kLanes; distance *= 2) {
#pragma unroll
      for (int i = 0; i < 2 * kOctets; ++i) {
        bias_sum[i / 2][i % 2] += __shfl_xor_sync(kAllLanes, bias_sum[i / 2][i % 2], distance);
      }
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      subtrahend_sum += __shfl_xor_sync(kAllLanes, subtrahend_sum, distance);
    }
    __syncwarp();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < 2 * kOctets; ++i) scratch[i / 2 * 8 + quad * 2 + i % 2] = bias_sum[i / 2][i % 2];
    }
    if (lane == 0) scratch[kChannels] = subtrahend_sum;
    __syncthreads();
    float* to = p.sums + static_cast<int64_t>(blockIdx.x) * p.sums_stride;
    const int count = p.steps * kHalves * kLanes * 4;
    for (int i = threadIdx.x; i < count + kChannels + 1; i += blockDim.x) {
      const float* from = i < count ? shared + p.shared.weight_sums + i : shared + p.shared.patches + i - count;
      const int pitch = i < count ? count : p.shared.patch_floats;
      float sum = 0;
      for (int w = 0; w < p.rows; ++w) sum += from[w * pitch];
      to[i] = sum;
    }
  }
};

template <typename T, int kOctets>
__global__ void __launch_bounds__(max_tile_rows(kOctets) * kLanes, 1)
    fused_chain_backward_kernel(const __grid_constant__ FusedParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char memory[];
  FusedBlock<T, kOctets> block(p, reinterpret_cast<float*>(memory));
  block.prepare();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) block.make_tile(find_tile(p, tile));
  block.store_sums();
#endif
}

}  // namespace fastconvt::cuda
