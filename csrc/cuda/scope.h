// What all operators on CUDA begin with: the device and the stream of a call, and the choice of its candidate.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../planning.h"
#include "measure.h"

namespace fastconvt::cuda {

inline void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "fastconvt: ", what, ": ", cudaGetErrorString(error));
}

// A device, found out at its first call; one that our kernels cannot serve is said once and then left to ATen.
DeviceInfo device_info(int index);

// The current device and stream of a call: those of its input, until the end of the scope. An input that is on no GPU
// is refused by the check of the arguments.
class Scope {
 public:
  explicit Scope(const Tensor& input) : index_(input.is_cuda() ? input.get_device_index() : 0), guard_(index_) {
    check(cudaSetDevice(index_), "cudaSetDevice");  // for this library's own copy of the runtime
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }
  DeviceInfo device() const { return device_info(index_); }

 private:
  int index_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// The plan's choice for a call that `make(candidate)` makes. Under fastconvt.autotune the first call of a problem
// measures: another candidate is kept where its median is 3 % shorter. `share(candidate)` is the operation's part of
// what a call makes.
template <class Make, class Share>
Candidate choose(Operation operation, const Problem& problem, const Scope& scope, const Make& make,
                 const Share& share) {
  constexpr double kGain = 0.97;
  const DeviceInfo device = scope.device();
  if (!wants_measurement(operation, problem, device) || is_forced() || is_capturing(scope.stream())) {
    return choose_candidate(operation, problem, device);
  }
  const Plan plan = plan_operation(operation, problem, device);
  std::vector<double> ms = time_candidates(plan, scope.stream(), make);
  std::vector<Timing> timings;
  for (int i = 0; i < int(ms.size()); ++i) {
    ms[i] *= share(plan.candidates[i]);
    if (ms[i] > 0) timings.push_back({plan.candidates[i].name, ms[i]});
  }
  int fastest = plan.choice;
  for (int i = 0; i < int(ms.size()); ++i) {
    if (ms[i] > 0 && ms[i] < kGain * ms[plan.choice] && ms[i] < ms[fastest]) fastest = i;
  }
  keep_measurement(operation, problem, device, plan.candidates[fastest].name, timings);
  return plan.candidates[fastest];
}

template <class Make>
Candidate choose(Operation operation, const Problem& problem, const Scope& scope, const Make& make) {
  return choose(operation, problem, scope, make, [](const Candidate&) { return 1.0; });
}

inline const void* bias_data(const Call& call) { return call.bias ? call.bias->const_data_ptr() : nullptr; }

inline Tensor empty(const Tensor& like, int64_t size) {
  return torch::stable::new_empty(like, std::vector<int64_t>{size});
}

inline Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, std::vector<int64_t>{bytes}, torch::headeronly::ScalarType::Byte);
}

inline const char* plain_name(int spatial) {
  static const char* const kNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};
  return kNames[spatial - 1];
}

}  // namespace fastconvt::cuda
