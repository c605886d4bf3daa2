// What fastconvt.autotune has measured: for each problem on a device, the candidate that was fastest. Process-wide, and
// kept in a file for each kind of device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan.h"

namespace fastconvt {

// Milliseconds of a candidate.
struct Timing {
  std::string candidate;
  double ms;
};

// Measures new problems from now on, and keeps the results in this folder; "" stops it. Returns the folder before. What
// has been measured stays in use.
std::string set_autotune_folder(std::string folder);

// The candidate that was measured to be the fastest.
std::optional<std::string> tuned_candidate(Operation operation, const Problem& problem, const DeviceInfo& device);

// Another number after each change of what the functions above may answer.
uint64_t tuning_version();

// Whether this problem is to be measured.
bool wants_measurement(Operation operation, const Problem& problem, const DeviceInfo& device);

// Keeps the fastest; the times of all that were measured go to the file, for people and for fits of the costs.
void keep_measurement(Operation operation, const Problem& problem, const DeviceInfo& device, const std::string& fastest,
                      const std::vector<Timing>& timings);

}  // namespace fastconvt
