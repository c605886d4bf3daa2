// The tensors of gradients.
#pragma once

#include <utility>

#include "scope.h"

namespace fastconvt::cuda {

// The gradient of an input or a weight: what a kernel writes, dense in a layout of its own, and what the caller gets.
class Gradient {
 public:
  static Gradient none(const Tensor& like) { return {empty(like, 0), empty(like, 0)}; }
  static Gradient of_input(const Call& call) {
    const Tensor dense = allocate_input(call, call.problem.layout);
    return {dense, call.batched ? dense : torch::stable::squeeze(dense, 0)};
  }
  // As torch.empty_like(weight), which keeps the strides of a dense weight; kernels write it in `layout`.
  static Gradient of_weight(const Call& call, Layout layout = Layout::kContiguous) {
    const Tensor like = torch::stable::empty_like(call.weight);
    if (layout == Layout::kChannelsLast) return {to_layout(like, layout), like};
    const bool contiguous = has_strides_of(like, Layout::kContiguous);
    return {contiguous ? like : torch::stable::new_empty(like, vec(like.sizes())), like};
  }

  void* data() const { return dense_.numel() > 0 ? dense_.mutable_data_ptr() : nullptr; }
  // After the kernel has been launched.
  Tensor finish() {
    if (dense_.numel() > 0 && dense_.data_ptr() != result_.data_ptr()) torch::stable::copy_(result_, dense_);
    return result_;
  }

 private:
  Gradient(Tensor dense, Tensor result) : dense_(std::move(dense)), result_(std::move(result)) {}

  Tensor dense_, result_;
};

}  // namespace fastconvt::cuda
