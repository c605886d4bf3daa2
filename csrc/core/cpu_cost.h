// What kernels on the CPU take: ours and PyTorch's. Plain C++17: no Torch.
#pragma once

#include <algorithm>
#include <cmath>

#include "plan.h"

namespace fastconvt {

// An instruction set as our CPU kernels use it: float32 lanes of a vector, multiply-adds a second and core.
struct CpuRate {
  int64_t lanes;
  double macs;
};
inline constexpr CpuRate kAvx512Rate{16, 105e9}, kAvx2Rate{8, 57e9}, kPortableRate{4, 21e9};

// Costs are fitted to 109 layers, each timed on one core of a Zen with AVX-512: the choice is 5 %
// slower than the best on average. How they scale with the number of threads is less certain.
//
// Ours: multiply-adds, idle lanes of the last axis included, where few output channels reuse a loaded input little;
// then packing, traffic, and a share for each row and each window. Channels-last tensors are converted on the way in
// and out.
inline double phase_cost(Operation operation, const Problem& p, const DeviceInfo& device, CpuRate rate) {
  const double wide = p.dtype == DType::kFloat64 ? 2 : 1;
  const Axis &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int64_t rows = ceil_div(height.out(), height.stride), cells = ceil_div(width.out(), width.stride);
  const double channels = double(p.batch) * double(p.in_channels) * double(p.out_channels_per_group());
  const double per_row = cells >= 64 ? double(height.num_pairs()) * double(round_up(cells, rate.lanes))
                                     : double(height.kernel) * double(round_up(rows * cells, rate.lanes));
  const double macs = std::max(p.macs(), channels * double(depth.num_pairs()) * double(width.kernel) * per_row);
  const double reuse = std::min(1.0, 0.08 + 0.2 * double(p.out_channels_per_group()));
  const double compute = ms(macs * wide, rate.macs * reuse) + 0.6e-6 * double(p.weight_elements());
  const double traffic = ms(p.bytes(), p.bytes() < 8e6 ? 30e9 : 12e9);
  const double row_count = double(p.batch) * double(p.out_channels) * double(depth.out()) * double(height.out());
  const double overhead = 8e-6 * row_count + 35e-6 * double(p.batch) * double(p.groups);
  const double conversion = p.layout == Layout::kChannelsLast ? ms(2 * p.bytes(), 4e9) : 0;
  const bool chain = operation == Operation::kLogSumExpHardswish;
  const double exponentials = chain ? ms(double(p.out_elements()) * wide, rate.macs / 8) : 0;
  return 0.005 + (compute + traffic + overhead + conversion + exponentials) / device.threads;
}

// PyTorch on the CPU: oneDNN's blocks of 16 channels, and page faults of the fresh output. Halves are computed in
// float32; the unfused chain passes over the convolution's output some ten times.
inline double aten_cpu_cost(Operation operation, const Problem& p, const DeviceInfo& device) {
  const int64_t in = p.in_channels_per_group(), out = p.out_channels_per_group();
  const double passes = operation == Operation::kLogSumExpHardswish ? ms(10 * p.bytes(), 1.5e9) : 0;
  const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  const double conversion = half ? ms(3 * p.bytes(), 2e9) : 0;
  if (in == 1 && out == 1) {
    const double rate = p.bytes() < 6e6 ? 20e9 : p.bytes() <= 14e6 ? 12e9 : 1.5e9;
    return 0.04 + (ms(p.bytes(), rate) + conversion + passes) / device.threads;
  }
  const double fill = double(round_up(in, 16) * round_up(out, 16)) / double(in * out);
  const double bytes = p.bytes() * (half ? 2 : 1) * double(round_up(out, 16)) / double(out);
  const bool dense = p.axis[0].stride == 1 && p.axis[1].stride == 1 && p.axis[2].stride == 1;
  const double bandwidth = dense || bytes < 4e6 ? 6e9 : bytes <= 16e6 ? 3e9 : 0.75e9 * std::sqrt(device.threads);
  const double rate = (p.dtype == DType::kFloat64 ? 3e9 : 100e9) * device.threads;
  return 0.005 + ms(p.macs() * fill, rate) + ms(bytes, bandwidth) + (conversion + passes) / device.threads;
}

}  // namespace fastconvt
