#include "arguments.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace fastconvt {
namespace {

using List = std::vector<int64_t>;
using Wide = __int128;  // holds every sum and product below without overflow

constexpr Wide kLargest = std::numeric_limits<int64_t>::max();

std::string join(const List& list, const char* separator) {
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) text += (i ? separator : "") + std::to_string(list[i]);
  return text;
}

std::string str(const List& list) { return "[" + join(list, ", ") + "]"; }

// The arguments with what follows from them; one method a group of checks, in the order in which they are made.
class Checker {
 public:
  explicit Checker(const Arguments& arguments) : a(arguments), input(a.tensors[0]), weight(a.tensors[1]) {
    for (const TensorInfo& t : a.tensors) {
      if (std::string(t.name) == "bias") bias = &t;
      if (std::string(t.name) == "subtrahend") subtrahend = &t;
      if (std::string(t.name) == "grad_output") grad_output = &t;
    }
  }

  Problem problem() {
    check_tensors();
    check_ranks();
    check_values();
    check_channels();
    if (subtrahend && !std::all_of(subtrahend->sizes.begin(), subtrahend->sizes.end(), [](auto s) { return s == 1; })) {
      fail("expected subtrahend to have one element, but got subtrahend of size " + str(subtrahend->sizes));
    }
    check_output();
    Problem built = build();
    if (grad_output) check_grad_output(built);
    return built;
  }

 private:
  [[noreturn]] void fail(const std::string& text) const { throw std::runtime_error(a.op + ": " + text); }

  void check_tensors() const {
    if (input.dtype != "float32" && input.dtype != "float64" && input.dtype != "float16" && input.dtype != "bfloat16") {
      fail("expected float32, float64, float16 or bfloat16, but got input of dtype " + input.dtype);
    }
    for (const TensorInfo& t : a.tensors) {
      if (t.device != input.device) {
        fail("Expected all tensors to be on the same device, but got input on " + input.device + " and " + t.name +
             " on " + t.device);
      }
    }
    for (const TensorInfo& t : a.tensors) {
      if (t.dtype != input.dtype) {
        fail("expected all tensors to have the same dtype, but got input of dtype " + input.dtype + " and " + t.name +
             " of dtype " + t.dtype);
      }
    }
  }

  void check_ranks() const {
    const int n = a.spatial;
    const int rank = int(input.sizes.size());
    if (rank != n + 1 && rank != n + 2) {
      fail("Expected " + std::to_string(n + 1) + "D (unbatched) or " + std::to_string(n + 2) + "D (batched) input to " +
           plain_op() + ", but got input of size: " + str(input.sizes));
    }
    if (int(weight.sizes.size()) != n + 2) {
      fail("expected " + std::to_string(n + 2) + "D weight, but got weight of size " + str(weight.sizes));
    }
    check_length("stride", a.stride);
    check_length("padding", a.padding);
    check_length("output_padding", a.output_padding);
    check_length("dilation", a.dilation);
  }

  void check_length(const char* name, const List& list) const {
    if (list.size() != 1 && int(list.size()) != a.spatial) {
      fail(std::string("expected ") + name + " to be a single integer value or a list of " + std::to_string(a.spatial) +
           " values to match the convolution dimensions, but got " + name + "=" + str(list));
    }
  }

  void check_values() const {
    check_least(a.stride, 1, "non-positive stride is not supported, but got stride=");
    check_least(a.dilation, 1, "dilation should be greater than zero, but got dilation=");
    check_least(a.padding, 0, "negative padding is not supported, but got padding=");
    check_least(a.output_padding, 0, "negative output_padding is not supported, but got output_padding=");
    if (a.groups < 1) fail("non-positive groups is not supported, but got groups=" + std::to_string(a.groups));
    for (int i = 0; i < a.spatial; ++i) {
      if (at(a.output_padding, i) >= std::max(at(a.stride, i), at(a.dilation, i))) {
        fail("output padding must be smaller than either stride or dilation, but got output_padding=" +
             str(a.output_padding) + ", stride=" + str(a.stride) + ", dilation=" + str(a.dilation));
      }
    }
  }

  void check_least(const List& list, int64_t least, const char* text) const {
    if (std::any_of(list.begin(), list.end(), [&](int64_t value) { return value < least; })) fail(text + str(list));
  }

  void check_channels() const {
    const List& w = weight.sizes;
    if (w[0] % a.groups != 0) {
      const std::string groups = std::to_string(a.groups);
      fail("Given groups=" + groups + ", expected weight to be divisible by " + groups +
           " at dimension 0, but got weight of size " + str(w));
    }
    const int64_t channels = input.sizes[input.sizes.size() - a.spatial - 1];
    if (channels != w[0]) {
      fail("Given weight of size " + str(w) + ", expected input" + str(input.sizes) + " to have " +
           std::to_string(w[0]) + " channels, but got " + std::to_string(channels) + " channels instead");
    }
    if (std::any_of(input.sizes.end() - a.spatial - 1, input.sizes.end(), [](auto size) { return size < 1; })) {
      fail("Only zero batch inputs are supported, but got input of size " + str(input.sizes));
    }
    if (w[1] < 1) fail("expected at least one output channel, but got weight of size " + str(w));
    if (std::any_of(w.begin() + 2, w.end(), [](auto size) { return size < 1; })) {
      fail("kernel size should be greater than zero, but got weight of size " + str(w));
    }
    if (bias && (bias->sizes.size() != 1 || Wide(bias->sizes[0]) != Wide(w[1]) * a.groups)) {
      fail("Given weight of size " + str(w) + " and groups=" + std::to_string(a.groups) +
           ", expected bias to be 1-dimensional with " + std::to_string(w[1] * a.groups) +
           " elements, but got bias of size " + str(bias->sizes) + " instead");
    }
  }

  // Uncropped, the output's sizes must fit in an int64, and so must its bytes.
  void check_output() const {
    const List sizes(input.sizes.end() - a.spatial, input.sizes.end());
    const std::string given = "Given input size per channel: (" + join(sizes, " x ") + "). ";
    List output;
    for (int i = 0; i < a.spatial; ++i) {
      const Wide uncropped = Wide(sizes[i] - 1) * at(a.stride, i) +
                             Wide(at(a.dilation, i)) * (weight.sizes[i + 2] - 1) + at(a.output_padding, i) + 1;
      if (uncropped > kLargest) fail(given + "Output size is too large");
      output.push_back(int64_t(std::max(uncropped - 2 * Wide(at(a.padding, i)), -kLargest)));
    }
    if (std::any_of(output.begin(), output.end(), [](int64_t size) { return size < 1; })) {
      fail(given + "Calculated output size per channel: (" + join(output, " x ") + "). Output size is too small");
    }
    Wide bytes = input.dtype == "float64" ? 8 : input.dtype == "float32" ? 4 : 2;
    List factors = output;
    factors.push_back(weight.sizes[1]);
    factors.push_back(a.groups);
    if (int(input.sizes.size()) == a.spatial + 2) factors.push_back(input.sizes[0]);
    if (std::count(factors.begin(), factors.end(), 0) > 0) return;
    for (int64_t factor : factors) {
      bytes *= factor;
      if (bytes > kLargest) fail(given + "Output size is too large");
    }
  }

  void check_grad_output(const Problem& p) const {
    List expected(input.sizes.begin(), input.sizes.end() - a.spatial - 1);
    expected.push_back(subtrahend ? 1 : p.out_channels);
    for (int i = 3 - a.spatial; i < 3; ++i) expected.push_back(p.axis[i].out());
    if (grad_output->sizes != expected) {
      fail("expected grad_output of size " + str(expected) + ", but got grad_output of size " +
           str(grad_output->sizes));
    }
  }

  // The operator whose gradients are computed, or the operator itself.
  std::string plain_op() const {
    const size_t suffix = a.op.rfind("_backward");
    return suffix == std::string::npos ? a.op : a.op.substr(0, suffix);
  }

  Problem build() const {
    Problem p;
    p.dtype = input.dtype == "float32"   ? DType::kFloat32
              : input.dtype == "float64" ? DType::kFloat64
              : input.dtype == "float16" ? DType::kFloat16
                                         : DType::kBFloat16;
    p.batch = int(input.sizes.size()) == a.spatial + 2 ? input.sizes[0] : 1;
    p.in_channels = weight.sizes[0];
    p.out_channels = weight.sizes[1] * a.groups;
    p.groups = a.groups;
    p.has_bias = bias != nullptr;
    for (int i = 0; i < a.spatial; ++i) {
      p.axis[3 - a.spatial + i] = {input.sizes[input.sizes.size() - a.spatial + i],
                                   weight.sizes[i + 2],
                                   at(a.stride, i),
                                   at(a.padding, i),
                                   at(a.output_padding, i),
                                   at(a.dilation, i)};
    }
    return p;
  }

  static int64_t at(const List& list, int i) { return list.size() == 1 ? list[0] : list[i]; }

  const Arguments& a;
  const TensorInfo& input;
  const TensorInfo& weight;
  const TensorInfo* bias = nullptr;
  const TensorInfo* subtrahend = nullptr;
  const TensorInfo* grad_output = nullptr;
};

}  // namespace

Problem check_arguments(const Arguments& arguments) { return Checker(arguments).problem(); }

}  // namespace fastconvt
