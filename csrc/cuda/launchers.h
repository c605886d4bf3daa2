// The CUDA kernels as the entries see them: each launcher picks a tile and a template instance, launches on `stream`
// and returns. None allocates, synchronises or keeps state, so all can be captured in a graph as the very first call.
#pragma once

#include <cuda_runtime_api.h>

#include "../core/problem.h"

namespace fastconvt::cuda {

// Whether this library's kernels can run on the current device: cudaSuccess, or why not.
cudaError_t probe_image();

// output = activation(output), in place: the problem's, where activates() (core/plan.h) is false for what has made the
// output. Sixteen bits are rounded before it, too, as PyTorch does.
cudaError_t launch_activation(const Problem& problem, void* output, cudaStream_t stream);

// output = conv_transpose(input, weight) + bias, every dtype, layout and parameter; `bias` may be null. It also
// applies the problem's activation; the kernels below apply those that is_rectifier() (core/activation.h) names.
// Float32 is true float32, float16 and bfloat16 accumulate in float32 and round once. cudaErrorNotSupported: an
// attribute or a kernel's extent of 2^29 or more, or batch, channels, depth or height of 2^30 or more; tensors and the
// last axis may be larger.
cudaError_t launch_gather(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                          cudaStream_t stream);

// The same for one input channel a group (core/depthwise.h), for few channels a group (core/direct.h), and for few
// output channels a group (core/heads.h).
cudaError_t launch_depthwise(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream);
cudaError_t launch_direct(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                          cudaStream_t stream);
cudaError_t launch_heads(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                         cudaStream_t stream);

// The same where the last axis has one of the shapes of core/rows.h or core/rows_mma.h: few channels a group, in
// float32 (contiguous; channels_last), and, channels_last, on matrix units in TF32, float16 and bfloat16.
cudaError_t launch_row_tile(const Problem& problem, const void* input, const void* weight, const void* bias,
                            void* output, cudaStream_t stream);
cudaError_t launch_rows(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                        cudaStream_t stream);
cudaError_t launch_rows_mma(const Problem& problem, const void* input, const void* weight, const void* bias,
                            void* output, cudaStream_t stream);

// The same for few output channels of layers with kernel 3 or 4 and stride 2 along three axes (core/heads_gemm.h), on
// matrix units; weights of both layouts; compute capability 9.0.
cudaError_t launch_heads_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, cudaStream_t stream);
// The same for few output channels with 9 x 9 taps (core/phase_direct.h), float32 without matrix units; weights of both
// layouts.
cudaError_t launch_phase_direct(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, cudaStream_t stream);
// The same where few output channels a group have many taps that overlap (core/overlap_add.h), on matrix units.
cudaError_t launch_overlap_add(const Problem& problem, const void* input, const void* weight, const void* bias,
                               void* output, cudaStream_t stream);
// The same in 1D for long kernels and large strides, also for many output channels (core/filter_bank.h), on matrix
// units; compute capability 9.0.
cudaError_t launch_filter_bank(const Problem& problem, const void* input, const void* weight, const void* bias,
                               void* output, cudaStream_t stream);

// The same where no tap overlaps another (core/pixel_shuffle.h), on matrix units, float32 by three products.
cudaError_t launch_pixel_shuffle(const Problem& problem, const void* input, const void* weight, const void* bias,
                                 void* output, cudaStream_t stream);

// The same for any taps in float32, as three TF32 products, and in TF32, for 8 channels a group and more
// (core/flat_gemm.h); compute capability 9.0. The workspace is device memory, aligned to 16 bytes.
int64_t flat_gemm_workspace(const Problem& problem);
cudaError_t launch_flat_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, void* workspace, cudaStream_t stream);

// The same in 16 bits, inputs and weights by bulk tensor copies (core/phase_tma.h); compute capability 9.0. The
// workspace is device memory, aligned to 256 bytes; its size depends on the alignment of the input.
int64_t phase_tma_workspace(const Problem& problem, const void* input);
cudaError_t launch_phase_tma(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, void* workspace, cudaStream_t stream);

// The same in 16 bits where no tap overlaps another (core/shuffle_gemm.h), inputs and weights by tensor copies as they
// lie; compute capability 9.0. The workspace, aligned to 256 bytes, holds what is not aligned to 16 bytes.
int64_t shuffle_gemm_workspace(const Problem& problem, const void* input, const void* weight);
cudaError_t launch_shuffle_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, void* workspace, cudaStream_t stream);
// The same over planes that tensor copies cannot read (core/shuffle_planes.h), contiguous; the workspace likewise.
int64_t shuffle_planes_workspace(const Problem& problem, const void* input, const void* weight);
cudaError_t launch_shuffle_planes(const Problem& problem, const void* input, const void* weight, const void* bias,
                                  void* output, void* workspace, cudaStream_t stream);

// The same in 16 bits, channels_last, with weights of either layout (core/phase_pixels.h); compute capability 9.0. The
// workspace, aligned to 256 bytes, holds what is not aligned to 16 bytes and weights that are contiguous.
int64_t phase_pixels_workspace(const Problem& problem, const void* input, const void* weight);
cudaError_t launch_phase_pixels(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, void* workspace, cudaStream_t stream);

// The same in TF32, inputs by bulk tensor copies (core/phase_tf32.h).
int64_t phase_tf32_workspace(const Problem& problem, const void* input);
cudaError_t launch_phase_tf32(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, void* workspace, cudaStream_t stream);

// The same for any layer of eight channels a group and more (core/dense.h), in every precision but float64, on
// synchronous matrix units; compute capability 8.0. The workspace, aligned to 16 bytes, holds packed weights.
int64_t dense_workspace(const Problem& problem);
cudaError_t launch_dense(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                         void* workspace, cudaStream_t stream);

// The same for few channels and short kernels on matrix units, float32 by three products: long rows, contiguous
// (core/long_rows.h); rows of whole pixels, channels_last (core/pixel_rows.h).
cudaError_t launch_long_rows(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream);
cudaError_t launch_pixel_rows(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, cudaStream_t stream);

// Contiguous on matrix units, float32 by three products, too (core/rows_persistent.h). The workspace, not initialised,
// aligned to 4 bytes, paces the reads of all blocks; null: they are not paced.
int64_t rows_persistent_workspace(const Problem& problem);
cudaError_t launch_rows_persistent(const Problem& problem, const void* input, const void* weight, const void* bias,
                                   void* output, void* workspace, cudaStream_t stream);

// The gradients of such layers, on matrix units (core/rows_gradient.h): float32 stays within the rule of accuracy by
// three TF32 products for one. grad_output is dense in the problem's layout; grad_bias may be null. The workspace is
// device memory, aligned to 16 bytes.
cudaError_t launch_rows_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                       void* grad_input, cudaStream_t stream);
int64_t rows_weight_gradient_workspace(const Problem& problem);
cudaError_t launch_rows_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                        void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// The same for one input channel a group (core/depthwise_gradient.h), true float32.
cudaError_t launch_depthwise_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                            void* grad_input, cudaStream_t stream);
int64_t depthwise_weight_gradient_workspace(const Problem& problem);
cudaError_t launch_depthwise_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                             void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// All of these in one pass (core/depthwise_gradients.h); any of the three gradients may be null. Compute
// capability 9.0. cudaErrorNotSupported, before anything is launched, also where tensors are not aligned to 16 bytes.
int64_t depthwise_gradients_workspace(const Problem& problem);
cudaError_t launch_depthwise_gradients(const Problem& problem, const void* grad_output, const void* input,
                                       const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                       void* workspace, cudaStream_t stream);

// The same for few output channels a group (core/heads_gradient.h).
cudaError_t launch_heads_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, cudaStream_t stream);
int64_t heads_weight_gradient_workspace(const Problem& problem);
cudaError_t launch_heads_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// The same for few channels a group and small layers (core/direct_gradient.h), contiguous; grad_bias may be null.
// Compute capability 7.5 for the input's, 8.0 for the weight's.
cudaError_t launch_direct_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                         void* grad_input, cudaStream_t stream);
int64_t direct_weight_gradient_workspace(const Problem& problem);
cudaError_t launch_direct_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                          void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// The same for any number of channels on matrix units (core/dense_gradient.h); grad_bias may be null. Compute
// capability 9.0, for its shared memory. The workspaces are aligned to 16 bytes.
int64_t dense_input_gradient_workspace(const Problem& problem);
cudaError_t launch_dense_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, void* workspace, cudaStream_t stream);
int64_t dense_weight_gradient_workspace(const Problem& problem);
cudaError_t launch_dense_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// The input's gradient of a layer without strides, by the forward kernels (core/mirrored_gradient.h); compute
// capability 9.0. The workspace is aligned to 256 bytes.
int64_t mirrored_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                          const void* weight);
cudaError_t launch_mirrored_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                           void* grad_input, void* workspace, cudaStream_t stream);

// The gradients of dense layers as matrix products on tensor copies and asynchronous matrix units, the weight's in its
// weight_layout: of the input (core/gradient_gemm.h), of the weight (core/gemm_weight_gradient.h), and both, with one
// packed copy of grad_output; grad_bias may be null. Compute capability 9.0. The workspaces are aligned to 256 bytes.
int64_t gemm_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                      const void* weight);
cudaError_t launch_gemm_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                       void* grad_input, void* workspace, cudaStream_t stream);
int64_t gemm_gradients_workspace(const Problem& problem, const void* grad_output, const void* input,
                                 const void* weight);
cudaError_t launch_gemm_gradients(const Problem& problem, const void* grad_output, const void* input,
                                  const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                  void* workspace, cudaStream_t stream);

// The same in 16 bits from contiguous tensors as they lie, where the stride along the last axis is 2 and the kernel 2
// or 4 (core/pairs_gradient.h). launch_pairs_gradients leaves tensors that are not aligned to 16 bytes to the other
// two.
int64_t pairs_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                       const void* weight);
cudaError_t launch_pairs_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                        void* grad_input, void* workspace, cudaStream_t stream);
int64_t pairs_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight);
cudaError_t launch_pairs_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                         void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);
// As launch_gemm_weight_gradient_beside, below.
int64_t pairs_weight_gradient_beside_workspace(const Problem& problem, const void* grad_output, const void* input,
                                               const void* weight);
cudaError_t launch_pairs_weight_gradient_beside(const Problem& problem, const void* grad_output, const void* input,
                                                void* grad_input, void* grad_weight, void* grad_bias, void* workspace,
                                                cudaStream_t stream);
int64_t pairs_gradients_workspace(const Problem& problem, const void* grad_output, const void* input,
                                  const void* weight);
cudaError_t launch_pairs_gradients(const Problem& problem, const void* grad_output, const void* input,
                                   const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                   void* workspace, cudaStream_t stream);

// The same in TF32 from contiguous tensors as they lie: where kernel and stride along the last axis are 2
// (core/pairs_tf32_gradients.h), and other dense layers (core/boxes_tf32_gradients.h); compute capability 9.0. Both
// gradients in one launch share what is read; cudaErrorNotSupported, before anything is launched, where tensors are not
// aligned to 16 bytes: the gradients by matrix products serve those, one by one. Workspaces are aligned to 256 bytes.
int64_t pairs_tf32_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                            const void* weight);
cudaError_t launch_pairs_tf32_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                             void* grad_input, void* workspace, cudaStream_t stream);
int64_t pairs_tf32_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                             const void* weight);
cudaError_t launch_pairs_tf32_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                              void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);
int64_t pairs_tf32_gradients_workspace(const Problem& problem);
cudaError_t launch_pairs_tf32_gradients(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* workspace, cudaStream_t stream);
int64_t boxes_tf32_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                            const void* weight);
cudaError_t launch_boxes_tf32_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                             void* grad_input, void* workspace, cudaStream_t stream);
int64_t boxes_tf32_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                             const void* weight);
cudaError_t launch_boxes_tf32_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                              void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);
int64_t boxes_tf32_gradients_workspace(const Problem& problem);
cudaError_t launch_boxes_tf32_gradients(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* workspace, cudaStream_t stream);
int64_t gemm_weight_gradient_workspace(const Problem& problem, const void* grad_output, const void* input,
                                       const void* weight);
cudaError_t launch_gemm_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                        void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);
// The same before the gradient of the input is made: the workspace is what of it does not fit that one's memory.
int64_t gemm_weight_gradient_beside_workspace(const Problem& problem, const void* grad_output, const void* input,
                                              const void* weight);
cudaError_t launch_gemm_weight_gradient_beside(const Problem& problem, const void* grad_output, const void* input,
                                               void* grad_input, void* grad_weight, void* grad_bias, void* workspace,
                                               cudaStream_t stream);
// Both in float32 and TF32 for few positions, contiguous (core/few_{input,weight}_gradient.h), without a workspace.
cudaError_t launch_few_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                      void* grad_input, cudaStream_t stream);
cudaError_t launch_few_weight_gradient(const Problem& problem, const void* grad_output, const void* input,
                                       void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream);

// output (batch, 1, D', H', W'), contiguous = clamp(h(logsumexp over channels of conv_transpose) - subtrahend, min,
// max), h(v) = v * sigmoid(v + 3) / 6; `subtrahend` is one element in device memory. cudaErrorNotSupported: an axis, or
// the inner products' length, of 2^30 or more.
cudaError_t launch_logsumexp_hardswish(const Problem& problem, const void* input, const void* weight, const void* bias,
                                       const void* subtrahend, double min, double max, void* output,
                                       cudaStream_t stream);

// The same on matrix units (core/chain_mma.h).
cudaError_t launch_chain_mma(const Problem& problem, const void* input, const void* weight, const void* bias,
                             const void* subtrahend, double min, double max, void* output, cudaStream_t stream);

// Its gradients; any of the four may be null. grad_output is (batch, 1, D', H', W'), contiguous; the others are laid
// out as what they are the gradients of. The workspace is device memory, aligned to 16 bytes, of the size that
// logsumexp_hardswish_backward_workspace() tells: at most some 200 MB, unless partial sums of the weight alone need
// more.
int64_t logsumexp_hardswish_backward_workspace(const Problem& problem);
cudaError_t launch_logsumexp_hardswish_backward(const Problem& problem, const void* grad_output, const void* input,
                                                const void* weight, const void* bias, const void* subtrahend,
                                                double min, double max, void* grad_input, void* grad_weight,
                                                void* grad_bias, void* grad_subtrahend, void* workspace,
                                                cudaStream_t stream);

// The same without the convolution's gradient in memory (core/chain_backward.h); it needs a GPU whose shared memory
// holds its tile.
bool fused_chain_backward_fits(const Problem& problem);
int64_t fused_chain_backward_workspace(const Problem& problem);
cudaError_t launch_fused_chain_backward(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, const void* bias, const void* subtrahend, double min,
                                        double max, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* grad_subtrahend, void* workspace, cudaStream_t stream);

}  // namespace fastconvt::cuda
