// The clock of fastconvt.autotune.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../core/tuning.h"

namespace fastconvt::cuda {

// Two events around work on a stream.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) expect(cudaEventCreate(&event));
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Milliseconds of one of `repeats` runs.
  template <class Run>
  double time(int repeats, const Run& run) {
    expect(cudaEventRecord(events_[0], stream_));
    for (int i = 0; i < repeats; ++i) run();
    expect(cudaEventRecord(events_[1], stream_));
    expect(cudaEventSynchronize(events_[1]));
    float ms = 0;
    expect(cudaEventElapsedTime(&ms, events_[0], events_[1]));
    return ms / repeats;
  }

 private:
  static void expect(cudaError_t error) {
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("fastconvt: autotune: ") + cudaGetErrorString(error));
  }

  cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
};

// Whether a CUDA graph is being captured: then nothing can be measured.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

// Times `run(candidate)` for each candidate that can make the call, taking turns, and returns the median milliseconds,
// 0 for those that are hopeless or fail, as cuDNN may.
template <class Run>
std::vector<double> time_candidates(const Plan& plan, cudaStream_t stream, const Run& run) {
  constexpr int kRounds = 7, kMaxRepeats = 20;
  constexpr double kRoundMs = 0.5, kHopeless = 3;
  Stopwatch watch(stream);
  const int count = int(plan.candidates.size());
  std::vector<double> once(count, 0);  // 0: left out
  const auto try_once = [&](int i) {
    const Candidate& candidate = plan.candidates[i];
    run(candidate);  // the first run loads the kernels, and lets cuDNN search
    once[i] = watch.time(1, [&] { run(candidate); });
  };
  try_once(plan.choice);
  for (int i = 0; i < count; ++i) {
    if (i == plan.choice || !plan.candidates[i].refusal.empty()) continue;
    if (plan.candidates[i].cost_ms > 30 * plan.chosen().cost_ms) continue;
    try {
      try_once(i);
    } catch (const std::exception&) {
      once[i] = 0;
    }
  }
  double best = once[plan.choice];
  for (const double ms : once) best = ms > 0 ? std::min(best, ms) : best;
  std::vector<std::vector<double>> times(count);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < count; ++i) {
      if (once[i] == 0 || (i != plan.choice && once[i] > kHopeless * best)) continue;
      const int repeats = std::clamp(int(kRoundMs / once[i]), 1, kMaxRepeats);
      times[i].push_back(watch.time(repeats, [&] { run(plan.candidates[i]); }));
    }
  }
  std::vector<double> medians(count, 0);
  for (int i = 0; i < count; ++i) {
    if (times[i].empty()) continue;
    std::nth_element(times[i].begin(), times[i].begin() + kRounds / 2, times[i].end());
    medians[i] = times[i][kRounds / 2];
  }
  return medians;
}

}  // namespace fastconvt::cuda
