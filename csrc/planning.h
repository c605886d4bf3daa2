// fastconvt.plan and fastconvt.force, for one device's library.
#pragma once

#include <string>

#include "call.h"

namespace fastconvt {

// The plan of an operator named `op` as JSON, for tensors that are described and need not exist. The gradients of
// conv_transposeNd have plans of their own, as conv_transposeNd_input_gradient and conv_transposeNd_weight_gradient.
std::string plan_json(const DeviceInfo& device, const std::string& op, IntList input, IntList weight, bool bias,
                      IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
                      const std::string& dtype, const std::string& layout, bool allow_tf32,
                      const std::string& activation);

// The plan of an operation under the current force, or else under what autotune has measured, printed to stderr where
// FASTCONVT_LOG_PLAN is 1.
Plan plan_operation(Operation operation, const Problem& problem, const DeviceInfo& device);

// Its choice. A thread remembers those of its latest problems: a plan takes 1 to 15 microseconds.
Candidate choose_candidate(Operation operation, const Problem& problem, const DeviceInfo& device);

// Sets the candidate that every call must use, "" for the plan's own choice, and returns the one before. Process-wide.
std::string force_candidate(std::string name);
bool is_forced();

}  // namespace fastconvt
