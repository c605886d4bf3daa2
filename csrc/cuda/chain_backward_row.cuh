// What a warp of the fused kernel makes of a row of 32 cells: see chain_backward_fused.cuh.
#pragma once

#include "chain_backward_du.cuh"

namespace fastconvt::cuda {

template <typename T, int kOctets>
struct FusedRow : FusedDu<T, kOctets> {
  using Base = FusedDu<T, kOctets>;
  using Base::Base, Base::bias_sum, Base::far, Base::group, Base::kChannels, Base::kHalves, Base::kSplit, Base::lane,
      Base::near, Base::p, Base::patch, Base::plane, Base::quad, Base::shared, Base::split, Base::subtrahend_sum,
      Base::warp;
  using typename Base::Row, typename Base::Values;

  // --- The input's gradient.

  __device__ __forceinline__ float (&sums_of(int pair))[2][4] { return pair & 2 ? far[pair & 1] : near[pair & 1]; }

  // D += du x weights, for the pairs of neighbours in `pairs`.
  __device__ __forceinline__ void add_to_neighbours(const FusedPhase& phase, int pairs, const Values& du) {
    const float4* weights = reinterpret_cast<const float4*>(shared + p.shared.input_weights) + lane;
    float high[2][kOctets][4], low[2][kOctets][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
#pragma unroll
        for (int i = 0; i < 4; ++i) split(du[m][o][i % 2 * 2 + i / 2], high[m][o][i], low[m][o][i]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (!(pairs >> pair & 1)) continue;
      const int entry = phase.first_entry + __popc(phase.pairs & ((1 << pair) - 1));
      // NOTE: what starts from D is truncated to D's last bit. Two chains of equal length hide the latency.
      float rest[2][4] = {};
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float4 w = weights[(entry * kOctets + o) * kLanes];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float (&sum)[4] = sums_of(pair)[m];
          if (kSplit) multiply_tf32(rest[m], low[m][o], w.x, w.y);
          multiply_tf32(sum, high[m][o], w.x, w.y);
          if (kSplit) multiply_tf32(o % 2 == 0 ? rest[m] : sum, high[m][o], w.z, w.w);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_of(pair)[m][i] += rest[m][i];
      }
    }
  }

  // --- The gradients of weight and bias.

  // du where other lanes can read it, without what the row does not own.
  __device__ __forceinline__ void store_du(const FusedTile& tile, const Values& du) {
    const bool owns_last = tile.own[2] == tile.cells[2] || group < 7;  // of the lane's cells
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

  __device__ __forceinline__ float4* weight_sums(int step, int half) const {
    return reinterpret_cast<float4*>(shared + p.shared.weight_sums) +
           ((warp * p.steps + step) * kHalves + half) * kLanes + lane;
  }

  // dW += du transposed x inputs.
  __device__ __forceinline__ void add_to_weight(const Row& row, const FusedPhase& phase) const {
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
          split(value, high[k][i], low[k][i]);
        }
      }
      const int* offsets = row.offsets + group / 4;
      int offset = offsets[phase.first_step * 2];
#pragma unroll 1
      for (int step = phase.first_step; step < phase.end_step; ++step) {
        const float* x = reinterpret_cast<const float*>(row.weight_input + offset);
        offset = offsets[step * 2 + 2];
        float part[2][4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float high0, low0, high1, low1;
          split_tf32(x[k * 32], high0, low0);
          split_tf32(x[k * 32 + 16], high1, low1);
          if (kSplit) multiply_tf32(part[k / 2], high[k], low0, low1);
          if (kSplit) multiply_tf32(part[k / 2], low[k], high0, high1);
          multiply_tf32(part[k / 2], high[k], high0, high1);
        }
        float4 sum = *weight_sums(step, half);
        sum.x += part[0][0] + part[1][0], sum.y += part[0][1] + part[1][1];
        sum.z += part[0][2] + part[1][2], sum.w += part[0][3] + part[1][3];
        *weight_sums(step, half) = sum;
      }
    }
  }

  // --- A phase by the definition.

  __device__ __forceinline__ void add_carefully(const FusedTile& tile, const Row& row, int index, int pairs) {
    const FusedPhase& phase = p.phase[index];
    FusedPlace place;
    place.batch = tile.batch, place.phase = index;
    place.cell[0] = row.z, place.cell[1] = row.y, place.cell[2] = tile.first[2];
    place.cells = tile.cells[2], place.own = tile.own[2];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      place.output[a] = place.cell[a] * p.axis[a].stride + phase.residue[a] - p.axis[a].padding;
    }
    __syncwarp();
    const float passed = careful_du<T>(p, place, kChannels, patch());
    if (row.owned) subtrahend_sum += passed;
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
    if (!row.owned) return;
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
#pragma unroll 1
    for (int step = phase.first_step; step < phase.end_step; ++step) {
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        careful_weight_sums<T>(p, place, patch(), step, half * 16 + group,
                               reinterpret_cast<float*>(weight_sums(step, half)));
      }
    }
  }

  // --- The row.

  __device__ __forceinline__ Row find_row(const FusedTile& tile, int z) const {
    Row row;
    row.z = z, row.y = tile.first[1] + warp;
    row.owned = z < tile.first[0] + tile.own[0];
    row.inside = p.grad_input != nullptr ? 15 : 0;
    if (z == tile.first[0]) row.inside &= 3;                 // nothing before the first plane
    if (z == tile.first[0] + tile.own[0]) row.inside &= 12;  // only the plane before counts
    if (row.y == 0) row.inside &= 5;
    const int cell = group + quad * 8;
    row.cell_owned = row.owned && cell < tile.own[2];
    row.output[0] = z * p.axis[0].stride - p.axis[0].padding;
    row.output[1] = row.y * p.axis[1].stride - p.axis[1].padding;
    row.output[2] = (tile.first[2] + cell) * p.axis[2].stride - p.axis[2].padding;
    const int64_t line = (static_cast<int64_t>(tile.batch) * p.axis[0].out + row.output[0]) * p.axis[1].out;
    row.grad_output = static_cast<const T*>(p.grad_output) + (line + row.output[1]) * p.axis[2].out + row.output[2];
    if (cell >= tile.cells[2]) row.output[2] = -(1 << 30);
    const float* here = plane(z) + ((warp + 1) * kPlanePitch + 1) * 4;
    row.offsets = reinterpret_cast<const int*>(shared + p.shared.offsets) + z % kPlanes * p.steps * 2;
    row.input = shared_address(here) + lane % 16 * 16;
    row.weight_input = reinterpret_cast<const char*>(here + quad * 4 + group % 4);
    return row;
  }

  // The gradients of the row's outputs in the next plane: to the L2 cache.
  __device__ __forceinline__ void prefetch_next(const FusedTile& tile, const Row& row) const {
    constexpr int kLine = 128 / sizeof(T);
    const int lines = kTileCells * p.axis[2].stride / kLine + 1;
    const int first = tile.first[2] * p.axis[2].stride - p.axis[2].padding;
    for (int i = lane; i < p.axis[0].stride * p.axis[1].stride * lines; i += kLanes) {
      const int line = i / lines, x = max(first, 0) + i % lines * kLine;
      const int z = row.output[0] + p.axis[0].stride + line / p.axis[1].stride;
      const int y = row.output[1] + line % p.axis[1].stride;
      if (z < 0 || z >= p.axis[0].out || y < 0 || y >= p.axis[1].out || x >= p.axis[2].out) continue;
      const int64_t row_index = (static_cast<int64_t>(tile.batch) * p.axis[0].out + z) * p.axis[1].out + y;
      prefetch_to_l2(static_cast<const T*>(p.grad_output) + row_index * p.axis[2].out + x);
    }
  }

  // All phases of the warp's row in plane z. Neighbours outside the tile get nothing.
  __device__ __forceinline__ void make_row(const FusedTile& tile, int z) {
    const Row row = find_row(tile, z);
    if (z + 1 < tile.first[0] + tile.cells[0]) prefetch_next(tile, row);
    const FusedPhase* phases = reinterpret_cast<const FusedPhase*>(shared + p.shared.phases);
    bool counts = false;  // the phase with the lane's number
    if (lane < p.phases) {
      const unsigned output_z = row.output[0] + phases[lane].residue[0],
                     output_y = row.output[1] + phases[lane].residue[1];
      counts = output_z < static_cast<unsigned>(p.axis[0].out) && output_y < static_cast<unsigned>(p.axis[1].out) &&
               (row.owned || (phases[lane].pairs & row.inside) != 0);
    }
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, counts); left != 0; left &= left - 1) {
      const int index = __ffs(left) - 1;
      const FusedPhase phase = phases[index];
      const int pairs = phase.pairs & row.inside;
      Values du;
      if (Base::make_du(row, phase, du)) {
        if (row.owned) store_du(tile, du);
        if (pairs != 0) add_to_neighbours(phase, pairs, du);
        if (row.owned && p.wants_weight) add_to_weight(row, phase);
      } else {
        add_carefully(tile, row, index, pairs);
      }
    }
  }
};

}  // namespace fastconvt::cuda
