// The CPU kernels as the entries see them: a job is prepared once, then its tasks run on any threads in any order.
// No Torch below this line: the entries bring the threads.
#pragma once

#include <cstdint>
#include <memory>

#include "../core/problem.h"

namespace fastconvt::cpu {

enum class Isa : int { kPortable, kAvx2, kAvx512 };

// The best instruction set that this processor and this build have.
Isa best_isa();

// A prepared call. It packs the weights and keeps pointers to the caller's tensors, which must outlive it.
class Job {
 public:
  virtual ~Job() = default;
  virtual int64_t num_tasks() const = 0;
  // Runs tasks [begin, end); calls on disjoint ranges may be concurrent. Every output element is written by one task.
  virtual void run(int64_t begin, int64_t end) const = 0;
};

// output = activation(conv_transpose(input, weight) + bias). Every dtype, every legal problem in contiguous layout;
// `bias` may be null. float16 and bfloat16 are accumulated in float32 and rounded once.
std::unique_ptr<Job> conv_transpose_job(Isa isa, const Problem& problem, const void* input, const void* weight,
                                        const void* bias, void* output);

// The problem's activation of `count` values in place: float64 for a problem in float64, else float32.
std::unique_ptr<Job> activation_job(Isa isa, const Problem& problem, void* values, int64_t count);

// output (batch, 1, D', H', W') = clamp(h(logsumexp over channels of conv_transpose) - subtrahend, min, max),
// h(v) = v * sigmoid(v + 3) / 6. The convolution's output never leaves the registers and the L1 cache.
std::unique_ptr<Job> logsumexp_hardswish_job(Isa isa, const Problem& problem, const void* input, const void* weight,
                                             const void* bias, const void* subtrahend, double min, double max,
                                             void* output);

}  // namespace fastconvt::cpu
