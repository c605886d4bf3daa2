// What the gradients by matrix products share: what is packed once for both, and the order in which they run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/gemm_gradients.h"

namespace fastconvt::cuda {

// The output's gradient with channels innermost, (batch, positions, groups, channels of a group, rounded up to whole
// vectors of 16 bytes); TF32 is rounded. The weight likewise: (input channels, taps, channels). 0 bytes: it is so
// already.
int64_t gradient_gemm_packed_bytes(const Problem& problem, const void* grad_output);
int64_t gradient_gemm_own_bytes(const Problem& problem, const GradientGemmTile& tile, const void* weight);
// Packs both in one launch, and the input for the weight's gradient (16 bits); what has no target is not packed.
cudaError_t launch_gradient_gemm_pack(const Problem& problem, const GradientGemmTile& tile, const void* grad_output,
                                      void* packed, const void* weight, void* own, const void* input,
                                      void* packed_input, cudaStream_t stream);

// How the input's gradient follows the grid before it. `ready`: that one has waited for what is read before it let this
// one begin. `stores_wait`: it reads what is where the input's gradient will be.
struct GradientGemmOrder {
  bool ready = false, stores_wait = false;
};
// Products are those of a form of the problem (core/gemm_gradients.h). What is packed is what copies read; the tensors
// themselves serve the definition.
cudaError_t launch_packed_gemm_input_gradient(const Problem& problem, const Problem& products,
                                              const GradientGemmTile& tile, const void* grad_output, const void* packed,
                                              const void* weight, const void* packed_weight, void* grad_input,
                                              GradientGemmOrder order, cudaStream_t stream);

// The weight's gradient, and the bias's if that is not null, from padded planes, which launch_gradient_gemm_pack() has
// made; where gradient_gemm_weight_tile() has a shape and the input is aligned to 16 bytes.
cudaError_t launch_window_weight_gradient(const Problem& problem, const GradientGemmTile& tile, const void* grad_output,
                                          const void* planes, const void* input, void* grad_weight, void* grad_bias,
                                          cudaStream_t stream);

// Where the weight's gradient has partial sums, and what it packs itself.
struct GemmWeightPlaces {
  void *sums, *input, *grad;
  void* far_sums = nullptr;  // of the second half of all rows, and of the bias: apart, if there is such a place
};
int64_t gemm_weight_sums_bytes(const Problem& problem, const GemmWeightTile& tile);
// Of them, those that may be apart (GemmGradientsPlan::halved).
int64_t gemm_weight_far_sums_bytes(const Problem& problem, const GemmWeightTile& tile);
// 0: it is read as it lies.
int64_t gemm_weight_input_bytes(const Problem& problem, const GemmWeightTile& tile, const void* input);
int64_t gemm_weight_grad_bytes(const Problem& problem, const void* grad_output);
// All of it; the products; or what comes after them: sums of parts, and the bias.
enum class GemmWeightPhase { kAll, kSums, kRest };
// The weight's gradient, with the bias's if that is not null. If `packed` is null, it packs both tensors where that is
// needed, otherwise nothing: the input is at its place if it had to be packed.
cudaError_t launch_packed_gemm_weight_gradient(const Problem& problem, const GemmGradientsPlan& plan,
                                               const void* grad_output, const void* packed, const void* input,
                                               void* grad_weight, void* grad_bias, const GemmWeightPlaces& places,
                                               GemmWeightPhase phase, cudaStream_t stream);

// Bytes of the unrolled matrix (core/gemm_gradients.h), and of sums for the bias.
int64_t gemm_unrolled_bytes(const Problem& problem);
int64_t gemm_unrolled_bias_bytes(const Problem& problem);
// Unrolls; packs the weight and the input as well, unless their targets are null. So is `bias_partial` without a bias.
cudaError_t launch_gemm_unroll(const Problem& problem, const void* grad_output, void* unrolled, float* bias_partial,
                               const void* weight, void* packed_weight, const void* input, void* packed_input,
                               cudaStream_t stream);
// The bias's gradient from these sums, where gemm_weight_counts().
cudaError_t launch_gemm_unrolled_bias(const Problem& problem, const void* grad_output, const float* partial,
                                      void* grad_bias, cudaStream_t stream);

}  // namespace fastconvt::cuda
