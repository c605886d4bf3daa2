// csrc/core without Python: every output of an axis is in one phase, and the taps of that phase are the ones of the
// definition. tests/test_core.py proves more, through the Python binding.
#include <cstdio>
#include <cstdlib>

#include "../csrc/core/problem.h"

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// The taps of output o by the definition, against those of its phase.
void check_output(const fastconvt::Axis& axis, int64_t o) {
  const int64_t r = axis.phase(o), q = axis.base(o);
  expect(axis.stride * q + r == o + axis.padding && r < axis.stride, "phase and base");
  expect(o >= axis.first_output(r) && (o - axis.first_output(r)) % axis.stride == 0, "outputs of a phase");
  int64_t next = axis.first_tap(r);
  for (int64_t t = 0; t < axis.kernel; ++t) {
    const bool tap = (o + axis.padding - t * axis.dilation) % axis.stride == 0;
    expect(tap == (t == next), "taps of a phase");
    if (!tap) continue;
    expect((q + axis.offset(r, t)) * axis.stride == o + axis.padding - t * axis.dilation, "input position of a tap");
    next += axis.tap_step();
  }
}

}  // namespace

int main() {
  int axes = 0;
  for (int64_t kernel = 1; kernel <= 5; ++kernel) {
    for (int64_t stride = 1; stride <= 4; ++stride) {
      for (int64_t dilation = 1; dilation <= 4; ++dilation) {
        for (int64_t padding = 0; padding <= 3; ++padding) {
          const fastconvt::Axis axis{6, kernel, stride, padding, 0, dilation};
          int64_t outputs = 0;
          for (int64_t r = 0; r < stride && axis.out() > 0; ++r) outputs += axis.num_outputs(r);
          expect(outputs == (axis.out() > 0 ? axis.out() : 0), "phases cover the outputs once");
          for (int64_t o = 0; o < axis.out(); ++o) check_output(axis, o);
          ++axes;
        }
      }
    }
  }
  std::printf("%d axes passed\n", axes);
  return 0;
}
