#include "planning.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace fastconvt {
namespace {

std::mutex force_mutex;
std::string forced_candidate;

std::string current_force() {
  const std::lock_guard<std::mutex> lock(force_mutex);
  return forced_candidate;
}

bool log_wanted() {
  const char* value = std::getenv("FASTCONVT_LOG_PLAN");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace

std::string plan_json(const DeviceInfo& device, const std::string& op, IntList input, IntList weight, bool bias,
                      IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
                      const std::string& dtype, const std::string& layout, bool allow_tf32) {
  const bool chain = op == "conv_transpose3d_logsumexp_hardswish";
  const bool plain = op == "conv_transpose1d" || op == "conv_transpose2d" || op == "conv_transpose3d";
  STD_TORCH_CHECK(chain || plain, "fastconvt.plan: no operator with a plan is called ", op);
  const int spatial = op[14] - '0';
  Arguments arguments{op,
                      spatial,
                      {{"input", vec(input), dtype, ""}, {"weight", vec(weight), dtype, ""}},
                      vec(stride),
                      vec(padding),
                      vec(output_padding),
                      vec(dilation),
                      groups};
  if (bias) arguments.tensors.push_back({"bias", {weight.size() > 1 ? weight[1] * groups : 0}, dtype, ""});
  Problem problem = check_arguments(arguments);
  problem.layout = layout == "channels_last" ? Layout::kChannelsLast : Layout::kContiguous;
  problem.allow_tf32 = allow_tf32;
  const Operation operation = chain ? Operation::kLogSumExpHardswish : Operation::kConvTranspose;
  return make_plan(operation, problem, device, current_force()).to_json();
}

Plan plan_call(const Call& call, const DeviceInfo& device) {
  static const bool log = log_wanted();
  Plan plan = make_plan(call.operation, call.problem, device, current_force());
  if (log) std::fprintf(stderr, "fastconvt: %s\n", plan.to_line().c_str());
  return plan;
}

std::string force_candidate(std::string name) {
  STD_TORCH_CHECK(name.empty() || is_candidate(name), "no candidate is called ", name);
  const std::lock_guard<std::mutex> lock(force_mutex);
  std::swap(name, forced_candidate);
  return name;
}

}  // namespace fastconvt
