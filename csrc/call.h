// What every entry does, on any device: check the arguments, build the Problem, allocate, hand over to ATen.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/arguments.h"
#include "core/plan.h"

namespace fastconvt {

using torch::stable::Tensor;
using IntList = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::vector<int64_t> vec(IntList list) { return {list.begin(), list.end()}; }

// A checked call: input and bias are dense in problem.layout, the input has a batch dimension; the weight is as given.
struct Call {
  Problem problem;
  int spatial;   // 1, 2 or 3: of the operator
  bool batched;  // whether the caller's input has a batch dimension
  Tensor input;
  Tensor weight;
  std::optional<Tensor> bias;
};

// The tensors of a call; those that an operator does not have are absent.
struct Tensors {
  Tensor input;
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<Tensor> subtrahend;
  std::optional<Tensor> grad_output;
};

// Checks the arguments and makes input, weight and bias dense; nothing is allocated before the checks have passed.
Call make_call(const char* op, int spatial, const Tensors& tensors, IntList stride, IntList padding,
               IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32);

// Gives the problem an activation by its name, which is checked; alpha counts for leaky_relu.
void set_activation(const char* op, const std::string& name, double alpha, Problem& problem);

// The weight as a candidate's kernels read it, and as most do.
Tensor weight_of(const Call& call, CandidateId candidate);
Tensor contiguous_weight(const Call& call);

// The spatial entries of an axis list, for the operator's own number of dimensions.
std::vector<int64_t> spatial_list(const Call& call, int64_t Axis::* member);

// A tensor of the output's shape with this many channels, or of the input's, in this layout, uninitialised.
Tensor allocate_output(const Call& call, int64_t channels, Layout layout);
Tensor allocate_input(const Call& call, Layout layout);

// Dense in `layout`, copied if need be; sizes of 1 may keep any stride.
Tensor to_layout(const Tensor& tensor, Layout layout);

// The output as the caller gets it: with exactly the strides of a fresh tensor in `layout`, which fake tensors promise
// too, and without the batch dimension if the input had none.
Tensor finish_output(const Call& call, const Tensor& output, Layout layout);

// Whether the strides are exactly those of a fresh tensor in this layout: a dimension of size 1 may have any other.
bool has_strides_of(const Tensor& t, Layout layout);

// Calls an operator by name; lists are passed as std::vector<int64_t>. Its results come first in what is returned.
template <class... Args>
auto call_operator(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max<size_t>(1, sizeof...(Args))> stack{torch::stable::detail::from(args)...};
  STD_TORCH_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) == 0, name,
                  " failed; PyTorch has printed the reason to stderr");
  return stack;
}

// ATen's convolution, in float32 where the CPU's halves would accumulate in half precision, and its rounding.
Tensor aten_convolution(const Call& call);
Tensor in_dtype_of(const Call& call, const Tensor& output);

// The activation by ATen, in place.
void aten_activation(const Problem& problem, Tensor output);

inline Tensor to_tensor(StableIValue value) { return torch::stable::detail::to<Tensor>(value); }

// The candidate "aten": PyTorch's own operators, float16 and bfloat16 computed in float32 on the CPU; activate(tensor)
// applies the call's activation, if there is one, in place.
template <class Activate>
Tensor aten_conv_transpose(const Call& call, const Activate& activate) {
  const Tensor output = aten_convolution(call);
  if (call.problem.activation != Activation::kNone) activate(output);
  return in_dtype_of(call, output);
}
Tensor aten_logsumexp_hardswish(const Call& call, const Tensor& subtrahend, double min, double max);

}  // namespace fastconvt
