#include "planning.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "core/tuning.h"

namespace fastconvt {
namespace {

std::mutex force_mutex;
std::string forced_candidate;
std::atomic<uint64_t> force_version{0};

std::string current_force() {
  const std::lock_guard<std::mutex> lock(force_mutex);
  return forced_candidate;
}

bool log_wanted() {
  static const char* const value = std::getenv("FASTCONVT_LOG_PLAN");
  static const bool wanted = value != nullptr && std::string(value) == "1";
  return wanted;
}

// Of what differs between the layers of a network.
size_t hash(Operation operation, const Problem& p) {
  uint64_t mixed = static_cast<uint64_t>(operation) + 7 * static_cast<uint64_t>(p.dtype);
  for (const int64_t value : {p.batch, p.in_channels, p.out_channels, p.groups, int64_t(p.activation)})
    mixed = mixed * 1000003 + value;
  for (const Axis& a : p.axis) {
    for (const int64_t value : {a.in, a.kernel, a.stride, a.padding}) mixed = mixed * 1000003 + value;
  }
  return static_cast<size_t>(mixed ^ mixed >> 32);
}

const std::string kPlain = "conv_transpose";

// The operation of an operator named conv_transpose{1,2,3}d and what follows.
std::optional<Operation> find_operation(const std::string& op) {
  const size_t end = kPlain.size() + 2;
  if (op.size() < end || op.compare(0, kPlain.size(), kPlain) != 0 || op[end - 1] != 'd') return std::nullopt;
  const char spatial = op[end - 2];
  const std::string rest = op.substr(end);
  if (spatial < '1' || spatial > '3') return std::nullopt;
  if (rest.empty() || rest == "_act") return Operation::kConvTranspose;
  if (rest == "_input_gradient") return Operation::kInputGradient;
  if (rest == "_weight_gradient") return Operation::kWeightGradient;
  if (spatial == '3' && rest == "_logsumexp_hardswish") return Operation::kLogSumExpHardswish;
  if (spatial == '3' && rest == "_logsumexp_hardswish_backward") return Operation::kChainGradients;
  return std::nullopt;
}

// The candidate of the current force, else the one that was measured to be the fastest, else the cheapest.
Plan current_plan(Operation operation, const Problem& problem, const DeviceInfo& device) {
  const std::string forced = current_force();
  Plan plan = make_plan(operation, problem, device, forced);
  if (!forced.empty()) return plan;
  const std::optional<std::string> tuned = tuned_candidate(operation, problem, device);
  for (int i = 0; tuned && i < int(plan.candidates.size()); ++i) {
    if (plan.candidates[i].refusal.empty() && plan.candidates[i].name == *tuned) plan.choice = i;
  }
  return plan;
}

}  // namespace

std::string plan_json(const DeviceInfo& device, const std::string& op, IntList input, IntList weight, bool bias,
                      IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
                      const std::string& dtype, const std::string& layout, bool allow_tf32,
                      const std::string& activation) {
  const std::optional<Operation> operation = find_operation(op);
  STD_TORCH_CHECK(operation, "fastconvt.plan: no operator with a plan is called ", op);
  const int spatial = op[kPlain.size()] - '0';
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
  // A weight of one channel or one tap has the same memory in both layouts.
  const bool one = problem.out_channels_per_group() == 1 || problem.kernel_positions() == 1;
  problem.weight_layout = one ? Layout::kContiguous : problem.layout;
  problem.allow_tf32 = allow_tf32;
  set_activation(op.c_str(), activation, 0, problem);
  return current_plan(*operation, problem, device).to_json();
}

Plan plan_operation(Operation operation, const Problem& problem, const DeviceInfo& device) {
  Plan plan = current_plan(operation, problem, device);
  if (log_wanted()) std::fprintf(stderr, "fastconvt: %s\n", plan.to_line().c_str());
  return plan;
}

Candidate choose_candidate(Operation operation, const Problem& problem, const DeviceInfo& device) {
  if (log_wanted()) return plan_operation(operation, problem, device).chosen();
  struct Remembered {
    uint64_t force, tuning;
    Operation operation;
    Problem problem;
    DeviceInfo device;
    Candidate choice;
  };
  static thread_local std::array<std::optional<Remembered>, 64> remembered;
  const uint64_t force = force_version, tuning = tuning_version();
  std::optional<Remembered>& latest = remembered[hash(operation, problem) % remembered.size()];
  const bool known = latest && latest->force == force && latest->tuning == tuning && latest->operation == operation &&
                     latest->problem == problem && latest->device == device;
  if (!known) {
    latest.emplace(
        Remembered{force, tuning, operation, problem, device, current_plan(operation, problem, device).chosen()});
  }
  return latest->choice;
}

bool is_forced() { return !current_force().empty(); }

std::string force_candidate(std::string name) {
  STD_TORCH_CHECK(name.empty() || is_candidate(name), "no candidate is called ", name);
  const std::lock_guard<std::mutex> lock(force_mutex);
  std::swap(name, forced_candidate);
  ++force_version;
  return name;
}

}  // namespace fastconvt
