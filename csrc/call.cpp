#include "call.h"

#include <algorithm>
#include <array>

// Read from the file by fastconvt/_library.py, so that a library which does not load can still be named.
extern "C" __attribute__((used, visibility("default"))) const char fastconvt_built_for[] =
    "fastconvt built for " FASTCONVT_BUILT_FOR;

namespace fastconvt {
namespace {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;

// One call of an ATen operator with one result.
template <class... Args>
Tensor call_aten(const char* name, const char* overload, const Args&... args) {
  return to_tensor(call_operator(name, overload, args...)[0]);
}

MemoryFormat memory_format(int64_t dim, Layout layout) {
  if (layout == Layout::kContiguous) return MemoryFormat::Contiguous;
  return dim == 5 ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
}

std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

std::string dtype_name(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "dtype " + std::to_string(int(t.scalar_type()));
  }
}

TensorInfo describe(const char* name, const Tensor& t) {
  return {name, {t.sizes().begin(), t.sizes().end()}, dtype_name(t), device_name(t)};
}

// Whether the tensor is dense in channels_last, and not also contiguous by PyTorch's reading of size-1 dimensions; the
// rule stands in fastconvt/_shapes.py. 1D tensors are never channels_last.
bool is_channels_last(const Tensor& t) {
  const int64_t dim = t.dim();
  const IntList sizes = t.sizes(), strides = t.strides();
  if (dim < 4 || strides[1] == 0) return false;
  int64_t dense = 1, extent = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t axis = i == 0 ? 1 : i == dim - 1 ? 0 : dim - i;
    if (strides[axis] < extent || (axis == 0 && extent == strides[1])) return false;
    if (sizes[axis] != 1 && strides[axis] != dense) return false;
    dense *= sizes[axis];
    extent = strides[axis] * sizes[axis];
  }
  return true;
}

Tensor allocate(const Call& call, const std::vector<int64_t>& sizes, Layout layout) {
  return torch::stable::empty(sizes, call.input.scalar_type(), std::nullopt, call.input.device(), std::nullopt,
                              memory_format(call.spatial + 2, layout));
}

bool is_half(const Problem& p) { return p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16; }

Tensor to_dtype(const Tensor& t, ScalarType dtype) { return torch::stable::to(t, dtype); }

// The convolution by ATen in float32 where the CPU's halves would accumulate in half precision, in its own dtype
// elsewhere.
Tensor aten_convolution(const Call& call, bool in_float32) {
  const auto as_computed = [&](const Tensor& t) { return in_float32 ? to_dtype(t, ScalarType::Float) : t; };
  std::optional<Tensor> bias;
  if (call.bias) bias = as_computed(*call.bias);
  const bool deterministic =
      !call.input.is_cpu() && torch::stable::detail::to<bool>(call_operator("fastconvt::_deterministic", "")[0]);
  // cuDNN would convert the weight again if it were not in the input's layout.
  const bool as_given = !call.input.is_cpu() && is_channels_last(call.weight);
  const Tensor weight = as_given ? call.weight : contiguous_weight(call);
  return call_aten("aten::_convolution", "", as_computed(call.input), as_computed(weight), bias,
                   spatial_list(call, &Axis::stride), spatial_list(call, &Axis::padding),
                   spatial_list(call, &Axis::dilation), /*transposed=*/true, spatial_list(call, &Axis::output_padding),
                   call.problem.groups, /*benchmark=*/true, deterministic, /*cudnn_enabled=*/true,
                   call.problem.allow_tf32);
}

}  // namespace

Call make_call(const char* op, int spatial, const Tensors& tensors, IntList stride, IntList padding,
               IntList output_padding, int64_t groups, IntList dilation, bool allow_tf32) {
  const auto& [input, weight, bias, subtrahend, grad_output] = tensors;
  Arguments arguments{op,
                      spatial,
                      {describe("input", input), describe("weight", weight)},
                      vec(stride),
                      vec(padding),
                      vec(output_padding),
                      vec(dilation),
                      groups};
  if (bias) arguments.tensors.push_back(describe("bias", *bias));
  if (subtrahend) arguments.tensors.push_back(describe("subtrahend", *subtrahend));
  if (grad_output) arguments.tensors.push_back(describe("grad_output", *grad_output));
  Call call{check_arguments(arguments), spatial, input.dim() == spatial + 2, input, weight, bias};
  if (!call.batched) call.input = torch::stable::unsqueeze(input, 0);
  call.problem.allow_tf32 = allow_tf32;
  const bool by_weight = is_channels_last(weight);
  call.problem.weight_layout = by_weight ? Layout::kChannelsLast : Layout::kContiguous;
  const bool channels_last = by_weight || is_channels_last(call.input);
  call.problem.layout = channels_last ? Layout::kChannelsLast : Layout::kContiguous;
  call.input = to_layout(call.input, call.problem.layout);
  if (bias) call.bias = to_layout(*bias, Layout::kContiguous);
  return call;
}

void set_activation(const char* op, const std::string& name, double alpha, Problem& problem) {
  const std::optional<Activation> activation = find_activation(name);
  std::string names;
  for (const char* known : kActivationNames) names += std::string(names.empty() ? "" : ", ") + known;
  STD_TORCH_CHECK(activation, op, ": expected activation to be one of ", names, ", but got ", name);
  problem.activation = *activation;
  problem.alpha = *activation == Activation::kLeakyRelu ? alpha : 0;
}

Tensor weight_of(const Call& call, CandidateId candidate) {
  return to_layout(call.weight, weight_layout(candidate, call.problem));
}

Tensor contiguous_weight(const Call& call) { return to_layout(call.weight, Layout::kContiguous); }

bool has_strides_of(const Tensor& t, Layout layout) {
  const int64_t dim = t.dim();
  int64_t dense = 1;
  for (int64_t i = 0; i < dim; ++i) {
    const bool last = layout == Layout::kChannelsLast;
    const int64_t axis = !last ? dim - 1 - i : i == 0 ? 1 : i == dim - 1 ? 0 : dim - i;
    if (t.strides()[axis] != dense) return false;
    dense *= std::max<int64_t>(t.sizes()[axis], 1);
  }
  return true;
}

std::vector<int64_t> spatial_list(const Call& call, int64_t Axis::* member) {
  std::vector<int64_t> list;
  for (int i = 3 - call.spatial; i < 3; ++i) list.push_back(call.problem.axis[i].*member);
  return list;
}

Tensor allocate_output(const Call& call, int64_t channels, Layout layout) {
  std::vector<int64_t> sizes{call.problem.batch, channels};
  for (int i = 3 - call.spatial; i < 3; ++i) sizes.push_back(call.problem.axis[i].out());
  return allocate(call, sizes, layout);
}

Tensor allocate_input(const Call& call, Layout layout) { return allocate(call, vec(call.input.sizes()), layout); }

Tensor to_layout(const Tensor& tensor, Layout layout) {
  if (layout == Layout::kContiguous && tensor.is_contiguous()) return tensor;
  return torch::stable::contiguous(tensor, memory_format(tensor.dim(), layout));
}

Tensor finish_output(const Call& call, const Tensor& output, Layout layout) {
  Tensor finished = output;
  if (!has_strides_of(output, layout)) {
    finished = allocate_output(call, output.size(1), layout);
    torch::stable::copy_(finished, output);
  }
  return call.batched ? finished : torch::stable::squeeze(finished, 0);
}

Tensor aten_convolution(const Call& call) {
  return aten_convolution(call, /*in_float32=*/is_half(call.problem) && call.input.is_cpu());
}

Tensor in_dtype_of(const Call& call, const Tensor& output) {
  const ScalarType dtype = call.input.scalar_type();
  return output.scalar_type() == dtype ? output : to_dtype(output, dtype);
}

void aten_activation(const Problem& problem, Tensor output) {
  const auto constant = [&](double value) {  // on the CPU and without dimensions: it is not rounded to the dtype
    return torch::stable::full(std::vector<int64_t>{}, value, ScalarType::Double);
  };
  switch (problem.activation) {
    case Activation::kNone:
      return;
    case Activation::kLeakyRelu: {
      const Tensor positive = call_aten("aten::gt", "Tensor", output, constant(0));
      const Tensor below = call_aten("aten::mul", "Tensor", output, constant(problem.alpha));
      torch::stable::copy_(output, call_aten("aten::where", "self", positive, output, below));
      return;
    }
    case Activation::kGelu:
      call_aten("aten::gelu_", "", output, std::string("none"));
      return;
    case Activation::kGeluTanh:
      call_aten("aten::gelu_", "", output, std::string("tanh"));
      return;
    default:
      call_aten(("aten::" + std::string(activation_name(problem.activation)) + "_").c_str(), "", output);
  }
}

Tensor aten_logsumexp_hardswish(const Call& call, const Tensor& subtrahend, double min, double max) {
  const bool in_float32 = is_half(call.problem);
  const Tensor v = call_aten("aten::logsumexp", "", aten_convolution(call, in_float32), std::vector<int64_t>{1}, true);
  const auto constant = [&](double value) {
    return torch::stable::full(std::vector<int64_t>{1}, value, v.scalar_type(), std::nullopt, v.device());
  };
  const Tensor gate = call_aten("aten::sigmoid", "", torch::stable::subtract(v, constant(-3)));
  const Tensor h = call_aten("aten::div", "Tensor", call_aten("aten::mul", "Tensor", v, gate), constant(6));
  const Tensor s = torch::stable::reshape(to_dtype(subtrahend, v.scalar_type()), std::vector<int64_t>{1});
  const Tensor clamped = call_aten("aten::clamp", "Tensor", torch::stable::subtract(h, s),
                                   std::optional<Tensor>(constant(min)), std::optional<Tensor>(constant(max)));
  return to_dtype(clamped, call.input.scalar_type());
}

}  // namespace fastconvt
