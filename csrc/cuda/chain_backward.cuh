// The gradients of the fused chain. Nothing is kept from the forward: a window of the problem at a time, one kernel
// recomputes u and S and writes du, the gradient of the convolution's output, into the workspace; the general gradient
// kernels take it from there. With v = log(S), G = grad_output where min <= h(v) - subtrahend <= max and 0 elsewhere:
//
//   grad_subtrahend = -sum G,   du_c = exp(u_c - v) * G * h'(v),   6 h'(v) = sigmoid(v + 3) * (1 + v * sigmoid(-v - 3))
#pragma once

#include "chain.cuh"

namespace fastconvt::cuda {

// How the problem is cut, so that du of one window stays within the workspace, and what else lies there, by offset in
// bytes. The partial sums come first; a slot belongs to one warp.
struct BackwardPlan {
  int64_t batch;     // entries a window
  int64_t parts[3];  // of each axis of the input; 1 unless a single batch entry is too large
  int64_t weight_slots;
  int64_t slots;  // of the sums for bias and subtrahend
  int64_t weight_sums, bias_sums, subtrahend_sums, gradient;
  int64_t bytes;
};

BackwardPlan plan_backward(const Problem& problem);

}  // namespace fastconvt::cuda
