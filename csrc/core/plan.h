// The plan: which implementation makes a call, chosen by a pure, printable function over one table of candidates.
// Plain C++17: no Torch, no CUDA.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace fastconvt {

// Milliseconds for `amount` at `rate` a second, of which costs are made.
inline double ms(double amount, double rate) { return amount / rate * 1e3; }

enum class Operation { kConvTranspose, kInputGradient, kWeightGradient, kLogSumExpHardswish, kChainGradients };

// The implementations, one row each in plan.cpp. kAten is PyTorch's own (oneDNN, cuDNN), so that the plan never loses
// to it.
enum class CandidateId {
  kPhaseAvx512,
  kPhaseAvx2,
  kPhasePortable,
  kGather,
  kDepthwise,
  kDepthwiseGradients,
  kDirect,
  kDense,
  kDenseGradients,
  kMirrored,
  kGradientGemm,
  kPairsGradients,
  kPairsTf32,
  kBoxesTf32,
  kFewPositions,
  kHeads,
  kHeadsGemm,
  kOverlapAdd,
  kPhaseDirect,
  kFilterBank,
  kPixelShuffle,
  kShuffleGemm,
  kShufflePlanes,
  kFlatGemm,
  kPhaseTma,
  kPhaseTf32,
  kPhasePixels,
  kRowTile,
  kRows,
  kRowsMma,
  kRowsPersistent,
  kLongRows,
  kPixelRows,
  kFused,
  kFusedMma,
  kAten
};

// What the plan knows of the machine.
struct DeviceInfo {
  bool cuda = false;
  int threads = 1;      // CPU: how many a call may use
  bool avx2 = false;    // CPU: this processor and this build have it
  bool avx512 = false;  // CPU: likewise
  std::string name;     // CUDA: as the driver calls the device
  int capability = 0;   // CUDA: of the device, 90 for 9.0
  std::string refusal;  // CUDA: why our kernels cannot run on the device, "" if they can

  bool operator==(const DeviceInfo& other) const {
    return cuda == other.cuda && threads == other.threads && avx2 == other.avx2 && avx512 == other.avx512 &&
           name == other.name && capability == other.capability && refusal == other.refusal;
  }
};

struct Candidate {
  CandidateId id;
  const char* name;
  std::string refusal;  // why it cannot make this call; empty if it can
  double cost_ms;       // estimated time; meaningful where there is no refusal
};

struct Plan {
  std::vector<Candidate> candidates;  // those of the device, in the table's order
  int choice;                         // index of the cheapest that can, or of the forced one

  const Candidate& chosen() const { return candidates[choice]; }
  // {"choice": name, "candidates": [{"name", "supported", "reason", "cost_ms"}]}
  std::string to_json() const;
  // One line for a log: the choice, then every other candidate with its cost or its refusal.
  std::string to_line() const;
};

// `forced` names the candidate to use, "" leaves the choice to the costs, and so does a candidate of other operations
// or devices. Throws std::runtime_error where the forced candidate is one for such calls and cannot make this one.
Plan make_plan(Operation operation, const Problem& problem, const DeviceInfo& device, const std::string& forced);

// The layout in which a candidate reads the weight, and writes its gradient; it is copied where it has another one.
Layout weight_layout(CandidateId candidate, const Problem& problem);

// Whether a candidate's kernels apply the activation to what they store. A pass of its own follows the others, and
// their costs count it.
bool activates(CandidateId candidate, const Problem& problem);

// Whether some device has a candidate of this name.
bool is_candidate(const std::string& name);

}  // namespace fastconvt
