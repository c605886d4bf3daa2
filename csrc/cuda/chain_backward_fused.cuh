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

#include "chain_backward_careful.cuh"
#include "device/copy.cuh"

namespace fastconvt::cuda {

// kOctets: output channels in eights, 1, 2 or 4.
template <typename T, int kOctets>
struct FusedBlock {
  static constexpr int kHalves = (kOctets + 1) / 2;  // of 16 channels
  static constexpr int kChannels = kOctets * 8;
  using Math = Log2Domain<float>;

  const FusedParams& p;
  float* shared;
  int warp, lane, group, quad;  // lane == group * 4 + quad
  float subtrahend;
  float subtrahend_sum;
  float bias_sum[kOctets][2];
  // What the row adds to its neighbours in this plane and in the one before: neighbour along the height, 16 cells.
  float near[2][2][4], far[2][2][4];

  __device__ __forceinline__ FusedBlock(const FusedParams& params, float* memory) : p(params), shared(memory) {
    warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    group = lane / 4, quad = lane % 4;
    subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
    subtrahend_sum = 0;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) bias_sum[o][0] = bias_sum[o][1] = 0;
  }

  // --- Tables of weights, as the lanes' fragments.

  __device__ __forceinline__ void store_halves(float* to, float first, float second) {
    float4 halves;
    split_tf32_rounded(first, halves.x, halves.z);
    split_tf32_rounded(second, halves.y, halves.w);
    *reinterpret_cast<float4*>(to) = halves;
  }

  __device__ void prepare() {
    for (int i = threadIdx.x; i < p.shared.floats; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    const int fragments = kOctets * kLanes;
    for (int i = threadIdx.x; i < p.steps * fragments; i += blockDim.x) {
      const int step = i / fragments, channel = i % fragments / kLanes * 8 + group;
      const int first = find_tap(p, p.step_phase[step], p.neighbours[step][0]);
      const int second = p.second_exists[step] ? find_tap(p, p.step_phase[step], p.neighbours[step][1]) : -1;
      store_halves(shared + p.shared.forward_weights + i * 4, load_weight<T>(p, quad, channel, first) * Math::kLog2E,
                   load_weight<T>(p, quad, channel, second) * Math::kLog2E);
    }
    for (int i = threadIdx.x; i < p.entries * fragments; i += blockDim.x) {
      const int entry = i / fragments, channel = i % fragments / kLanes * 8 + quad * 2;
      const int tap = find_tap(p, p.entry_phase[entry], p.entry_pair[entry] * 2 + group / 4);
      store_halves(shared + p.shared.input_weights + i * 4, load_weight<T>(p, group % 4, channel, tap),
                   load_weight<T>(p, group % 4, channel + 1, tap));
    }
    const T* bias = static_cast<const T*>(p.bias);
    for (int c = threadIdx.x; c < kChannels; c += blockDim.x) {
      const float value = bias != nullptr && c < p.out_channels ? to_accumulator(__ldg(bias + c)) : 0;
      shared[p.shared.bias + c] = c < p.out_channels ? value * Math::kLog2E : -Math::infinity();
    }
    __syncthreads();
  }

  // --- Planes of the input.

  __device__ __forceinline__ float* plane(int z) const {
    return shared + p.shared.planes + (z + kPlanes) % kPlanes * (p.rows + 1) * kPlanePitch * 4;
  }

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

  // The plane has one more row and column than the tile's cells; those come first.
  __device__ __forceinline__ void stage(const FusedTile& tile, int z) const {
#pragma unroll 1
    for (int c = 0; c < p.in_channels; ++c) stage_element(tile, z, warp + 1, lane + 1, c);
    if (warp < p.in_channels) stage_element(tile, z, 0, lane + 1, warp);
    for (int i = threadIdx.x; i < (p.rows + 1) * p.in_channels; i += blockDim.x) {
      stage_element(tile, z, i / p.in_channels, 0, i % p.in_channels);
    }
  }

  // --- One phase of the warp's row.

  // u, times log2(e). Cells group + 16 m and + 8, channels 8 o + 2 quad and + 1.
  __device__ __forceinline__ void make_u(const FusedPlace& place, float (&u)[2][kOctets][4]) const {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const float2 bias = *reinterpret_cast<const float2*>(shared + p.shared.bias + o * 8 + quad * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) u[m][o][0] = u[m][o][2] = bias.x, u[m][o][1] = u[m][o][3] = bias.y;
    }
    const int own = ((warp + 1) * kPlanePitch + 1 + lane % 16) * 16;
    const uint32_t here = shared_address(plane(place.cell[0])) + own;
    const uint32_t before = shared_address(plane(place.cell[0] - 1)) + own;
    const float4* weights = reinterpret_cast<const float4*>(shared + p.shared.forward_weights) + lane;
    const int end = p.first_step[place.phase + 1];
#pragma unroll 1
    for (int step = p.first_step[place.phase]; step < end; ++step) {
      const int neighbour = p.neighbours[step][lane / 16];
      const uint32_t from =
          (neighbour & 4 ? before : here) - (neighbour >> 1 & 1) * kPlanePitch * 16 - (neighbour & 1) * 16;
      float high[2][4], low[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float x[4];
        load_matrices(x, from + m * 256);
#pragma unroll
        for (int i = 0; i < 4; ++i) split_tf32(x[i], high[m][i], low[m][i]);
      }
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float4 w = weights[(step * kOctets + o) * kLanes];
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(u[m][o], high[m], w.z, w.w);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(u[m][o], low[m], w.x, w.y);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(u[m][o], high[m], w.x, w.y);
      }
    }
  }

  // Makes du of u. False, before anything is changed that lasts, if some output needs the careful way: so it is where
  // an input or a weight of the phase is not finite, since then a low half, and u with it, is NaN.
  __device__ __forceinline__ bool make_du(const FusedPlace& place, bool owns_row, float grad_output,
                                          float (&u)[2][kOctets][4]) {
    float row[4] = {};  // cells group + 8 r
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u[m][o][i] = Math::exp2(u[m][o][i]);
          row[m * 2 + i / 2] += u[m][o][i];
        }
      }
    }
    // Each lane of a quad gets the total of one cell, group + 8 quad.
    const bool upper = quad & 2, odd = quad & 1;
    const float first = (upper ? row[2] : row[0]) + __shfl_xor_sync(kAllLanes, upper ? row[0] : row[2], 2);
    const float second = (upper ? row[3] : row[1]) + __shfl_xor_sync(kAllLanes, upper ? row[1] : row[3], 2);
    const float total = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);

    const int cell = group + quad * 8;
    const bool exists = output_exists(p, place, cell);
    const float log = Math::log2(total);
    const float reciprocal = Math::divide(1.0f, total + Math::kExpMinus3);
    const float value = log * Math::kLn2, gate = total * reciprocal;
    const float before_clamp = value * gate * (1.0f / 6) - subtrahend;
    const float passed = before_clamp >= p.min && before_clamp <= p.max ? grad_output : 0.0f;
    const float slope = gate + value * gate * (Math::kExpMinus3 * reciprocal);
    const float factor = exists ? passed * slope * (1.0f / 6) * Math::divide(1.0f, total) : 0.0f;
    const bool safe = fabsf(log) < kFusedSafe && is_finite(factor);
    // NOTE: where no output exists, an infinite 2^u would still be multiplied by 0.
    if (__any_sync(kAllLanes, !is_finite(total) || (exists && !safe))) return false;
    if (owns_row && exists && cell < place.own) subtrahend_sum += passed;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float own = __shfl_sync(kAllLanes, factor, group * 4 + r);
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        u[r / 2][o][r % 2 * 2] *= own;
        u[r / 2][o][r % 2 * 2 + 1] *= own;
      }
    }
    return true;
  }

  __device__ __forceinline__ float (&sums_of(int pair))[2][4] { return pair & 2 ? far[pair & 1] : near[pair & 1]; }

  // D += du x weights, for the pairs of neighbours in `pairs`.
  __device__ __forceinline__ void add_to_neighbours(const FusedPlace& place, int pairs,
                                                    const float (&du)[2][kOctets][4]) {
    const float4* weights = reinterpret_cast<const float4*>(shared + p.shared.input_weights) + lane;
    const int all = p.pairs[place.phase], first = p.first_entry[place.phase];
    float high[2][kOctets][4], low[2][kOctets][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split_tf32(du[m][o][i % 2 * 2 + i / 2], high[m][o][i], low[m][o][i]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (!(pairs >> pair & 1)) continue;
      const int entry = first + __popc(all & ((1 << pair) - 1));
      float main[2][4] = {}, rest[2][4] = {};
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float4 w = weights[(entry * kOctets + o) * kLanes];
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(main[m], high[m][o], w.x, w.y);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(rest[m], high[m][o], w.z, w.w);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_tf32(rest[m], low[m][o], w.x, w.y);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_of(pair)[m][i] += main[m][i] + rest[m][i];
      }
    }
  }

  __device__ __forceinline__ float* patch() const { return shared + p.shared.patches + warp * kChannels * kPatchPitch; }

  // du where other lanes can read it, without what the row does not own.
  __device__ __forceinline__ void store_du(const FusedPlace& place, const float (&du)[2][kOctets][4]) {
    const bool owns_last = place.own == place.cells || group < 7;  // of the lane's cells
    __syncwarp();
    float* to = patch() + quad * 2 * kPatchPitch + group;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float second = m == 0 || owns_last ? du[m][o][i + 2] : 0;
          to[(o * 8 + i) * kPatchPitch + m * 16] = du[m][o][i];
          to[(o * 8 + i) * kPatchPitch + m * 16 + 8] = second;
          bias_sum[o][i] += du[m][o][i] + second;
        }
      }
    }
    __syncwarp();
  }

  // dW += du transposed x inputs.
  __device__ __forceinline__ void add_to_weight(const FusedPlace& place) const {
    const int own = ((warp + 1) * kPlanePitch + 1 + quad) * 4 + group % 4;
    const float* here = plane(place.cell[0]) + own;
    const float* before = plane(place.cell[0] - 1) + own;
    const int begin = p.first_step[place.phase], end = p.first_step[place.phase + 1];
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      float high[4][4], low[4][4];  // 16 channels by 8 cells each
      const float* from = patch() + (half * 16 + group) * kPatchPitch + quad;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool exists = kOctets > 1 || i % 2 == 0;
          const float value = exists ? from[i % 2 * 8 * kPatchPitch + k * 8 + i / 2 * 4] : 0;
          split_tf32(value, high[k][i], low[k][i]);
        }
      }
      float4* sums =
          reinterpret_cast<float4*>(shared + p.shared.weight_sums) + (warp * p.steps * kHalves + half) * kLanes + lane;
#pragma unroll 1
      for (int step = begin; step < end; ++step) {
        const int neighbour = p.neighbours[step][group / 4];
        const float* x = (neighbour & 4 ? before : here) - (neighbour >> 1 & 1) * kPlanePitch * 4 - (neighbour & 1) * 4;
        float main[4] = {}, rest[4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float high0, low0, high1, low1;
          split_tf32(x[k * 32], high0, low0);
          split_tf32(x[k * 32 + 16], high1, low1);
          multiply_tf32(main, high[k], high0, high1);
          multiply_tf32(rest, high[k], low0, low1);
          multiply_tf32(rest, low[k], high0, high1);
        }
        float4 sum = sums[step * kHalves * kLanes];
        sum.x += main[0] + rest[0], sum.y += main[1] + rest[1];
        sum.z += main[2] + rest[2], sum.w += main[3] + rest[3];
        sums[step * kHalves * kLanes] = sum;
      }
    }
  }

  __device__ __forceinline__ void do_carefully(const FusedPlace& place, bool owns_row, int pairs) {
    __syncwarp();
    const float passed = careful_du<T>(p, place, kChannels, patch());
    if (owns_row) subtrahend_sum += passed;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (!(pairs >> pair & 1)) continue;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float4 sum = careful_input_sums<T>(p, place, patch(), pair, m * 16 + group);
        float (&to)[4] = sums_of(pair)[m];
        to[0] += sum.x, to[1] += sum.y, to[2] += sum.z, to[3] += sum.w;
      }
    }
    if (!owns_row) return;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (group + i / 2 * 8 < place.own) {
          bias_sum[o][i % 2] += patch()[(o * 8 + quad * 2 + i % 2) * kPatchPitch + group + i / 2 * 8];
        }
      }
    }
    if (!p.wants_weight) return;
    float* sums = shared + p.shared.weight_sums + (warp * p.steps * kHalves * kLanes + lane) * 4;
#pragma unroll 1
    for (int step = p.first_step[place.phase]; step < p.first_step[place.phase + 1]; ++step) {
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        careful_weight_sums<T>(p, place, patch(), step, half * 16 + group, sums + (step * kHalves + half) * kLanes * 4);
      }
    }
  }

  // All phases of the warp's row in plane z. Neighbours outside the tile get nothing.
  __device__ __forceinline__ void make_row(const FusedTile& tile, int z) {
    FusedPlace place;
    place.batch = tile.batch;
    place.cell[0] = z, place.cell[1] = tile.first[1] + warp, place.cell[2] = tile.first[2];
    place.cells = tile.cells[2], place.own = tile.own[2];
    const bool owns_row = warp < tile.own[1] && z < tile.first[0] + tile.own[0];
    int inside = p.grad_input != nullptr ? 15 : 0;
    if (z == tile.first[0]) inside &= 3;                 // nothing before the first plane
    if (z == tile.first[0] + tile.own[0]) inside &= 12;  // only the plane before counts
    if (warp == 0) inside &= 5;                          // the same for rows
    if (warp == tile.own[1]) inside &= 10;
#pragma unroll 1
    for (int phase = 0; phase < p.phases; ++phase) {
      const int pairs = p.pairs[phase] & inside;
      if (!owns_row && pairs == 0) continue;
      place.phase = phase;
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        place.output[a] = place.cell[a] * p.axis[a].stride + p.residue[phase][a] - p.axis[a].padding;
      }
      if (place.output[0] < 0 || place.output[0] >= p.axis[0].out || place.output[1] < 0 ||
          place.output[1] >= p.axis[1].out) {
        continue;
      }
      const int cell = group + quad * 8;
      float grad_output = 0;
      if (output_exists(p, place, cell)) {
        grad_output = to_accumulator(__ldg(static_cast<const T*>(p.grad_output) + output_offset(p, place, cell)));
      }
      float u[2][kOctets][4];
      make_u(place, u);
      if (!make_du(place, owns_row, grad_output, u)) {
        do_carefully(place, owns_row, pairs);
        continue;
      }
      if (owns_row) store_du(place, u);
      if (pairs != 0) add_to_neighbours(place, pairs, u);
      if (owns_row && p.wants_weight) add_to_weight(place);
    }
  }

  // --- The input's gradient.

  __device__ __forceinline__ float* exchange(int row, int neighbour, int cell) const {
    return shared + p.shared.exchange + ((row * 2 + neighbour) * kExchangeCells + cell) * 8;
  }

  // What the warp's row has added to the plane before.
  __device__ __forceinline__ void publish() const {
#pragma unroll
    for (int neighbour = 0; neighbour < 2; ++neighbour) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* sum = far[neighbour][i / 2] + i % 2 * 2;
        *reinterpret_cast<float2*>(exchange(warp, neighbour, i * 8 + group) + quad * 2) = make_float2(sum[0], sum[1]);
      }
    }
  }

  __device__ __forceinline__ void store_input_gradient(const FusedTile& tile, int z) const {
    const int y = tile.first[1] + warp, x = tile.first[2] + lane;
    if (warp >= tile.own[1] || z >= p.axis[0].in || y >= p.axis[1].in || lane >= tile.own[2] || x >= p.axis[2].in)
      return;
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // the cells at, after, below and below after the input
      if (i >= 2 && warp + 1 >= tile.cells[1]) break;
      const float4 part = *reinterpret_cast<const float4*>(exchange(warp + i / 2, i / 2, lane + i % 2) + i % 2 * 4);
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
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
      if (computes && warp < tile.cells[1]) make_row(tile, z);
      if (p.grad_input == nullptr) continue;
      if (z > first) {
        if (warp < tile.cells[1]) publish();
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
      const int pitch = i < count ? count : kChannels * kPatchPitch;
      float sum = 0;
      for (int w = 0; w < p.rows; ++w) sum += from[w * pitch];
      to[i] = sum;
    }
  }
};

template <typename T, int kOctets>
__global__ void __launch_bounds__(kMaxTileRows* kLanes, 1)
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
