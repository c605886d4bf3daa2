// How a warp of the fused kernel makes du of a row of 32 cells, one phase at a time: see chain_backward_fused.cuh.
#pragma once

#include "chain_backward_careful.cuh"

namespace fastconvt::cuda {

// kOctets: output channels in eights, 1, 2 or 4.
template <typename T, int kOctets>
struct FusedDu {
  static constexpr int kHalves = (kOctets + 1) / 2;  // of 16 channels
  static constexpr int kChannels = kOctets * 8;
  static constexpr bool kSplit = sizeof(T) == 4;  // else TF32 holds inputs exactly, and is exact enough for the rest
  using Math = Log2Domain<float>;
  // Cells group + 16 m, channels 8 o + 2 quad and + 1; the same of cells group + 16 m + 8.
  using Values = float[2][kOctets][4];

  const FusedParams& p;
  float* shared;
  int warp, lane, group, quad;  // lane == group * 4 + quad
  bool careful;                 // since a weight is not finite
  float subtrahend;
  float subtrahend_sum;
  float bias_sum[kOctets][2];
  // What the row adds to its neighbours in this plane and in the one before: neighbour along the height, 16 cells.
  float near[2][2][4], far[2][2][4];

  __device__ __forceinline__ FusedDu(const FusedParams& params, float* memory) : p(params), shared(memory) {
    warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    group = lane / 4, quad = lane % 4;
    subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
    subtrahend_sum = 0;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) bias_sum[o][0] = bias_sum[o][1] = 0;
  }

  __device__ __forceinline__ float* plane(int z) const {
    return shared + p.shared.planes + (z + kPlanes) % kPlanes * (p.rows + 1) * kPlanePitch * 4;
  }
  __device__ __forceinline__ float* patch() const { return shared + p.shared.patches + warp * p.shared.patch_floats; }

  // The row, and what its warp needs for all of its passes.
  struct Row {
    int z, y;
    bool owned, cell_owned;    // cell: the lane's own one, group + 8 quad
    int inside;                // pairs of neighbours that are in the tile
    int output[3];             // of the cell in phase 0; far out where there is no cell
    const T* grad_output;      // there
    const int* offsets;        // of the neighbours, by step
    uint32_t input;            // shared address of the lane's cell for matrices
    const char* weight_input;  // and for the weight's gradient
  };

  static __device__ __forceinline__ void split(float x, float& high, float& low) {
    if constexpr (kSplit) {
      split_tf32(x, high, low);
    } else {
      split_tf32_rounded(x, high, low);
    }
  }

  // --- u = inputs x weights.

  struct Operands {
    float x[2][4];
    float4 w[kOctets];
  };

  __device__ __forceinline__ void load_operands(const Row& row, int offset, int step, Operands& operands) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) load_matrices(operands.x[m], row.input + offset + m * 16 * 16);
    const float4* weights = reinterpret_cast<const float4*>(shared + p.shared.forward_weights) + lane;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) operands.w[o] = weights[(step * kOctets + o) * kLanes];
  }

  // The small parts first.
  static __device__ __forceinline__ void multiply(const Operands& operands, Values& u) {
    float high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) split_tf32(operands.x[i / 4][i % 4], high[i / 4][i % 4], low[i / 4][i % 4]);
#pragma unroll
    for (int part = kSplit ? 0 : 2; part < 3; ++part) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        const float4 w = operands.w[o];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (part == 0) multiply_tf32(u[m][o], high[m], w.z, w.w);
          if (part == 1) multiply_tf32(u[m][o], low[m], w.x, w.y);
          if (part == 2) multiply_tf32(u[m][o], high[m], w.x, w.y);
        }
      }
    }
  }

  // Times log2(e).
  __device__ __forceinline__ void make_u(const Row& row, const FusedPhase& phase, Values& u) const {
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      const float2 bias = *reinterpret_cast<const float2*>(shared + p.shared.bias + o * 8 + quad * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) u[m][o][0] = u[m][o][2] = bias.x, u[m][o][1] = u[m][o][3] = bias.y;
    }
    const int* offsets = row.offsets + lane / 16;
    int step = phase.first_step;
    if (step + 1 < phase.end_step) {
#pragma unroll 1
      do {
        Operands first, second;
        load_operands(row, offsets[step * 2], step, first);
        load_operands(row, offsets[step * 2 + 2], step + 1, second);
        multiply(first, u);
        multiply(second, u);
        step += 2;
      } while (step + 1 < phase.end_step);
    }
    if (step < phase.end_step) {
      Operands operands;
      load_operands(row, offsets[step * 2], step, operands);
      multiply(operands, u);
    }
  }

  // --- du of u.

  // Subtracts each cell's maximum over the channels, and returns that of the lane's own cell.
  __device__ __forceinline__ float subtract_maxima(Values& u) const {
    float own = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float top = -Math::infinity();
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        top = fmaxf(top, fmaxf(u[r / 2][o][r % 2 * 2], u[r / 2][o][r % 2 * 2 + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
#pragma unroll
      for (int o = 0; o < kOctets; ++o) u[r / 2][o][r % 2 * 2] -= top, u[r / 2][o][r % 2 * 2 + 1] -= top;
      if (quad == r) own = top;
    }
    return own;
  }

  // Turns u into 2^u and returns the sum over channels for the lane's own cell.
  __device__ __forceinline__ float add_powers(Values& u) const {
    float row[4] = {};
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float (&pair)[4] = u[r / 2][o];
        pair[r % 2 * 2] = Math::exp2(pair[r % 2 * 2]);
        pair[r % 2 * 2 + 1] = Math::exp2(pair[r % 2 * 2 + 1]);
        const float sum = pair[r % 2 * 2] + pair[r % 2 * 2 + 1];
        row[r] = o == 0 ? sum : row[r] + sum;
      }
    }
    const bool upper = quad & 2, odd = quad & 1;
    const float first = (upper ? row[2] : row[0]) + __shfl_xor_sync(kAllLanes, upper ? row[0] : row[2], 2);
    const float second = (upper ? row[3] : row[1]) + __shfl_xor_sync(kAllLanes, upper ? row[1] : row[3], 2);
    return (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
  }

  __device__ __forceinline__ void scale(float factor, Values& u) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float own = __shfl_sync(kAllLanes, factor, group * 4 + r);
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        u[r / 2][o][r % 2 * 2] *= own;
        u[r / 2][o][r % 2 * 2 + 1] *= own;
      }
    }
  }

  // Makes du. False, before anything is changed that lasts, if that takes more care: for values that are not finite.
  // Such an input makes all channels infinite or NaN, and S 0, infinite or NaN.
  template <bool kMaximum>
  __device__ __forceinline__ bool try_du(const Row& row, const FusedPhase& phase, bool exists, float grad_output,
                                         Values& u) {
    make_u(row, phase, u);
    const float top = kMaximum ? subtract_maxima(u) : 0;
    const float total = add_powers(u);
    float log = fast_log2(total);
    float reciprocal = fast_reciprocal(total + Math::kExpMinus3);
    float gate = total * reciprocal, complement = Math::kExpMinus3 * reciprocal;
    bool unsafe = exists && !(fabsf(log) < kFusedSafe);
    if (kMaximum) {
      log += top;
      const float shifted = log + 3 * Math::kLog2E;
      gate = fast_reciprocal(1 + Math::exp2(-shifted));
      complement = fast_reciprocal(1 + Math::exp2(shifted));
      unsafe = !is_finite(log);
    }
    const float value = log * (Math::kLn2 / 6) * gate;  // h
    const float before_clamp = value - subtrahend;
    if (!(before_clamp >= p.min && before_clamp <= p.max)) grad_output = 0;
    const float factor = grad_output * (gate * (1.0f / 6) + value * complement) * fast_reciprocal(total);
    // NOTE: where no output exists, what is not finite would still be multiplied by 0.
    unsafe |= !is_finite(log) || !is_finite(factor);
    if (__any_sync(kAllLanes, unsafe)) return false;
    scale(exists ? factor : 0.0f, u);
    if (row.cell_owned) subtrahend_sum += grad_output;
    return true;
  }

  __device__ __forceinline__ bool make_du(const Row& row, const FusedPhase& phase, Values& u) {
    const unsigned x = row.output[2] + phase.residue[2];
    const bool exists = x < static_cast<unsigned>(p.axis[2].out);
    const float grad_output = exists ? to_accumulator(__ldg(row.grad_output + phase.output)) : 0;
    if (careful) return false;
    return try_du<false>(row, phase, exists, grad_output, u) || try_du<true>(row, phase, exists, grad_output, u);
  }
};

}  // namespace fastconvt::cuda
