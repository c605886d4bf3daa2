// fastconvt from C++: link the library, look the operator up by its name, call it. This is inference: autograd is in
// the Python package, so the call stands under NoGradGuard.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <cstdio>

int main() {
  const at::NoGradGuard no_grad;
  const auto conv_transpose2d =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fastconvt::conv_transpose2d", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::SymIntArrayRef,
                            c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt, c10::SymIntArrayRef, bool)>();

  const at::Tensor input = at::randn({2, 16, 20, 30});
  const at::Tensor weight = at::randn({16, 8, 4, 4});
  const std::vector<c10::SymInt> stride{2, 2}, padding{1, 1}, output_padding{0, 0}, dilation{1, 1};
  const at::Tensor output =
      conv_transpose2d.call(input, weight, std::nullopt, stride, padding, output_padding, 1, dilation, false);

  const double error = (output - at::conv_transpose2d(input, weight, {}, 2, 1)).abs().max().item<double>();
  std::printf("%d x %d to %d x %d, largest difference from ATen: %.2g\n", int(input.size(2)), int(input.size(3)),
              int(output.size(2)), int(output.size(3)), error);
  return error < 1e-4 ? 0 : 1;
}
