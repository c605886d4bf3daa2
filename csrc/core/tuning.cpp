#include "tuning.h"

#include <atomic>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace fastconvt {
namespace {

std::mutex mutex;
std::string folder;                                               // "": nothing new is measured
std::map<std::string, std::map<std::string, std::string>> known;  // device -> problem -> candidate
std::set<std::string> files_read;
std::atomic<bool> in_use{false};  // whether anything has ever been asked of this file
std::atomic<uint64_t> version{0};

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kConvTranspose:
      return "forward";
    case Operation::kInputGradient:
      return "input_gradient";
    case Operation::kWeightGradient:
      return "weight_gradient";
    case Operation::kLogSumExpHardswish:
      return "logsumexp_hardswish";
    case Operation::kChainGradients:
      return "logsumexp_hardswish_backward";
  }
  return "";
}

// Everything of a call that a plan depends on, as text without tabs.
std::string describe(Operation operation, const Problem& p) {
  static const char* const kDTypes[] = {"float32", "float64", "float16", "bfloat16"};
  std::ostringstream text;
  text << name(operation) << ' ' << kDTypes[int(p.dtype)] << (p.allow_tf32 ? " tf32" : "")
       << (p.layout == Layout::kChannelsLast ? " channels_last" : " contiguous")
       << (p.weight_layout == Layout::kChannelsLast ? " weight channels_last" : "") << " batch " << p.batch
       << " channels " << p.in_channels << ' ' << p.out_channels << " groups " << p.groups
       << (p.has_bias ? " bias" : "");
  if (p.activation != Activation::kNone) text << ' ' << activation_name(p.activation);
  if (p.activation == Activation::kLeakyRelu) text << ' ' << p.alpha;
  for (const Axis& a : p.axis) {
    text << " axis " << a.in << ' ' << a.kernel << ' ' << a.stride << ' ' << a.padding << ' ' << a.output_padding << ' '
         << a.dilation;
  }
  return text.str();
}

// Of a device, "nvidia-h200.tsv": lines of a problem, the fastest candidate, then each that was measured and its
// milliseconds, with tabs between. A later line replaces an earlier one.
std::string file_of(const DeviceInfo& device) {
  std::string stem;
  for (const char c : device.name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (plain || (!stem.empty() && stem.back() != '-')) stem += plain ? char(std::tolower(c)) : '-';
  }
  return folder + "/" + stem + ".tsv";
}

// With the mutex held.
std::map<std::string, std::string>& results(const DeviceInfo& device) {
  auto& candidates = known[device.name];
  if (folder.empty() || !files_read.insert(file_of(device)).second) return candidates;
  std::ifstream file(file_of(device));
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find('\t');
    const size_t second = first == std::string::npos ? first : line.find('\t', first + 1);
    if (second != std::string::npos) candidates[line.substr(0, first)] = line.substr(first + 1, second - first - 1);
  }
  return candidates;
}

// One write of one line: several processes may append.
void append(const std::string& path, const std::string& line) {
  std::FILE* const file = std::fopen(path.c_str(), "a");
  const bool written = file != nullptr && std::fwrite(line.data(), 1, line.size(), file) == line.size();
  const bool closed = file == nullptr || std::fclose(file) == 0;
  if (written && closed) return;
  static std::once_flag said;
  std::call_once(said, [&] {
    std::fprintf(stderr, "fastconvt: autotune cannot write %s; this process alone keeps what it measures\n",
                 path.c_str());
  });
}

}  // namespace

std::string set_autotune_folder(std::string next) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::swap(next, folder);
  in_use = in_use || !folder.empty();
  ++version;
  return next;
}

uint64_t tuning_version() { return version; }

std::optional<std::string> tuned_candidate(Operation operation, const Problem& problem, const DeviceInfo& device) {
  if (!in_use || !device.cuda) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto& candidates = results(device);
  const auto found = candidates.find(describe(operation, problem));
  if (found == candidates.end()) return std::nullopt;
  return found->second;
}

bool wants_measurement(Operation operation, const Problem& problem, const DeviceInfo& device) {
  if (!in_use || !device.cuda) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  return !folder.empty() && results(device).count(describe(operation, problem)) == 0;
}

void keep_measurement(Operation operation, const Problem& problem, const DeviceInfo& device, const std::string& fastest,
                      const std::vector<Timing>& timings) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string key = describe(operation, problem);
  results(device)[key] = fastest;
  ++version;
  if (folder.empty()) return;
  std::ostringstream line;
  line << key << '\t' << fastest;
  for (const Timing& timing : timings) line << '\t' << timing.candidate << '\t' << timing.ms;
  line << '\n';
  append(file_of(device), line.str());
}

}  // namespace fastconvt
