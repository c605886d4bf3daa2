#include "plan.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <vector>

#include "boxes_tf32_gradients.h"
#include "chain_backward.h"
#include "chain_mma.h"
#include "cpu_cost.h"
#include "cudnn_cost.h"
#include "dense.h"
#include "dense_gradient.h"
#include "depthwise.h"
#include "depthwise_gradient.h"
#include "depthwise_gradients.h"
#include "direct.h"
#include "direct_gradient.h"
#include "few_input_gradient.h"
#include "few_weight_gradient.h"
#include "filter_bank.h"
#include "flat_gemm.h"
#include "gemm_gradients.h"
#include "gemm_weight_gradient.h"
#include "gradient_gemm.h"
#include "heads.h"
#include "heads_gemm.h"
#include "heads_gradient.h"
#include "long_rows.h"
#include "mirrored_gradient.h"
#include "overlap_add.h"
#include "pairs_gradient.h"
#include "pairs_tf32_gradients.h"
#include "phase_direct.h"
#include "phase_pixels.h"
#include "phase_tf32.h"
#include "phase_tma.h"
#include "pixel_rows.h"
#include "pixel_shuffle.h"
#include "row_tile.h"
#include "rows.h"
#include "rows_gradient.h"
#include "rows_mma.h"
#include "rows_persistent.h"
#include "shuffle_gemm.h"
#include "shuffle_planes.h"

namespace fastconvt {
namespace {

std::string needs(bool available, const char* what) {
  return available ? "" : std::string("this processor or this build has no ") + what;
}

// What the CUDA kernels' 32-bit parameters hold.
constexpr int64_t kMaxAttribute = int64_t{1} << 29;
constexpr int64_t kMaxSize = int64_t{1} << 30;

std::string cuda_refusal(const Problem& p, const DeviceInfo& device) {
  for (const Axis& a : p.axis) {
    const int64_t extent = (a.kernel - 1) * a.dilation;
    if (std::max({a.kernel, a.stride, a.padding, a.dilation, extent}) >= kMaxAttribute) {
      return "a kernel, stride, padding or dilation of 2^29 or more";
    }
  }
  const int64_t inner = p.in_channels * p.axis[0].kernel * p.axis[1].kernel;
  const int64_t outer = std::max({p.axis[0].in, p.axis[1].in, p.axis[0].out(), p.axis[1].out()});
  if (std::max({p.batch, p.in_channels, p.out_channels, inner, outer}) >= kMaxSize) {
    return "a batch, channels, depth or height of 2^30 or more";
  }
  return device.refusal;
}

// The chain's kernels hold positions, too, in 32 bits.
std::string fused_refusal(const Problem& p, const DeviceInfo& device) {
  const int64_t channels = std::max(p.in_channels_per_group(), p.out_channels_per_group());
  bool small = p.kernel_positions() * channels < kMaxAttribute;
  for (const Axis& a : p.axis) {
    const double extent = double(a.in) * double(a.stride) + double(a.dilation) * double(a.kernel);
    small = small && a.in < kMaxSize && extent + double(a.output_padding) < double(kMaxAttribute);
  }
  return small ? cuda_refusal(p, device) : "an axis, or an inner product, of 2^29 or more";
}

// The least time on an H200: bytes at 4.3 TB/s, or operations at the float32 rate.
double cuda_floor(const Problem& p) { return std::max(ms(2 * p.macs(), 55e12), ms(p.bytes(), 4.3e12)); }

// The general kernels. A gather tile has eight output channels, idle or not, and a block takes all input channels and
// taps of the outer axes one after the other. The chain's gradients take some 30 times its forward's least time.
double own_cuda_cost(Operation operation, const Problem& p, const DeviceInfo&) {
  if (operation == Operation::kChainGradients) return 0.005 + 30 * cuda_floor(p);
  if (operation != Operation::kConvTranspose) return 0.005 + 3.2 * cuda_floor(p);
  const double idle = 8.0 / double(std::min<int64_t>(8, p.out_channels_per_group()));
  double length = double(p.in_channels_per_group());
  for (const Axis& a : p.axis) length *= double(ceil_div(a.kernel, a.tap_step()));
  const double bytes = p.bytes() * (p.element_size() == 2 ? 2 : 1);  // 16 bits take as many instructions as float32
  return 0.015 + std::max(3.2 * std::max(idle * ms(2 * p.macs(), 55e12), ms(bytes, 4.3e12)), 5e-5 * length);
}

// The refusal of a family that also needs a GPU of this compute capability, 90 for 9.0, and one below kEnd, from where
// on GPUs have less shared memory.
template <int kCapability, std::string (*kRefusal)(const Problem&), int kEnd = 1000>
std::string family_refusal(const Problem& p, const DeviceInfo& device) {
  if (!device.refusal.empty()) return device.refusal;
  if (device.capability < kCapability || device.capability >= kEnd) {
    return "a GPU of compute capability " + std::to_string(device.capability / 10) + "." +
           std::to_string(device.capability % 10);
  }
  if (p.batch == 0) return "an empty batch";
  return kRefusal(p);
}

// About 0.66 ms for the gradients of the reference layer: seven times the least time of its forward.
double fused_gradients_cost(Operation, const Problem& p, const DeviceInfo&) { return 0.04 + 7 * cuda_floor(p); }

// The cost of a family that has its own model, fitted on an H200.
template <double (*kCost)(const Problem&)>
double family_cost(Operation, const Problem& p, const DeviceInfo&) {
  return kCost(p);
}

// Of either gradient, where one pass makes both.
template <double (*kCost)(const Problem&)>
double half_of(Operation, const Problem& p, const DeviceInfo&) {
  return kCost(p) / 2;
}

// PyTorch's own. The unfused chain passes over the convolution's output some ten times.
double aten_cuda_cost(Operation operation, const Problem& p, const DeviceInfo&) {
  switch (operation) {
    case Operation::kInputGradient:
    case Operation::kWeightGradient:
      return cudnn_gradient_cost(p, operation == Operation::kWeightGradient);
    case Operation::kChainGradients:
      return cudnn_cost(p) + ms(40 * p.bytes(), 4.3e12);
    case Operation::kLogSumExpHardswish:
      return cudnn_cost(p) + ms(10 * p.bytes(), 4.3e12);
    default:
      return cudnn_cost(p);
  }
}

std::string never(const Problem&, const DeviceInfo&) { return ""; }

// The operations that a row is for.
constexpr unsigned bit(Operation operation) { return 1u << static_cast<int>(operation); }
constexpr unsigned kForward = bit(Operation::kConvTranspose);
constexpr unsigned kChain = bit(Operation::kLogSumExpHardswish);
constexpr unsigned kChainGradients = bit(Operation::kChainGradients);
constexpr unsigned kBothGradients = bit(Operation::kInputGradient) | bit(Operation::kWeightGradient);
constexpr unsigned kAny = ~0u;

struct Row {
  CandidateId id;
  const char* name;
  bool cuda;
  unsigned makes;
  std::string (*refusal)(const Problem&, const DeviceInfo&);
  double (*cost)(Operation, const Problem&, const DeviceInfo&);
  bool shares = false;  // the cost of a gradient is its part of what both take together
};

const Row kTable[] = {
    {CandidateId::kPhaseAvx512, "phase_avx512", false, kForward | kChain,
     [](const Problem&, const DeviceInfo& d) { return needs(d.avx512, "AVX-512"); },
     [](Operation o, const Problem& p, const DeviceInfo& d) { return phase_cost(o, p, d, kAvx512Rate); }},
    {CandidateId::kPhaseAvx2, "phase_avx2", false, kForward | kChain,
     [](const Problem&, const DeviceInfo& d) { return needs(d.avx2, "AVX2 and FMA"); },
     [](Operation o, const Problem& p, const DeviceInfo& d) { return phase_cost(o, p, d, kAvx2Rate); }},
    {CandidateId::kPhasePortable, "phase_portable", false, kForward | kChain, never,
     [](Operation o, const Problem& p, const DeviceInfo& d) { return phase_cost(o, p, d, kPortableRate); }},
    {CandidateId::kAten, "aten", false, kAny, never, aten_cpu_cost},
    {CandidateId::kGather, "gather", true, kForward, cuda_refusal, own_cuda_cost},
    {CandidateId::kDepthwise, "depthwise", true, kForward, family_refusal<75, depthwise_refusal>,
     family_cost<depthwise_cost_ms>},
    {CandidateId::kDirect, "direct", true, kForward, family_refusal<75, direct_refusal>, family_cost<direct_cost_ms>},
    {CandidateId::kHeads, "heads", true, kForward, family_refusal<90, heads_refusal, 120>, family_cost<heads_cost_ms>},
    {CandidateId::kHeadsGemm, "heads_gemm", true, kForward, family_refusal<90, heads_gemm_refusal, 91>,
     family_cost<heads_gemm_cost_ms>},
    {CandidateId::kPhaseDirect, "phase_direct", true, kForward, family_refusal<90, phase_direct_refusal, 120>,
     family_cost<phase_direct_cost_ms>},
    {CandidateId::kOverlapAdd, "overlap_add", true, kForward, family_refusal<90, overlap_add_refusal, 120>,
     family_cost<overlap_add_cost_ms>},
    {CandidateId::kFilterBank, "filter_bank", true, kForward, family_refusal<90, filter_bank_refusal, 91>,
     family_cost<filter_bank_cost_ms>},
    {CandidateId::kPixelShuffle, "pixel_shuffle", true, kForward, family_refusal<80, pixel_shuffle_refusal, 120>,
     family_cost<pixel_shuffle_cost_ms>},
    {CandidateId::kShuffleGemm, "shuffle_gemm", true, kForward, family_refusal<90, shuffle_gemm_refusal, 91>,
     family_cost<shuffle_gemm_cost_ms>},
    {CandidateId::kShufflePlanes, "shuffle_planes", true, kForward, family_refusal<90, shuffle_planes_refusal, 91>,
     family_cost<shuffle_planes_cost_ms>},
    {CandidateId::kFlatGemm, "flat_gemm", true, kForward, family_refusal<90, flat_gemm_refusal, 91>,
     family_cost<flat_gemm_cost_ms>},
    {CandidateId::kPhaseTma, "phase_tma", true, kForward, family_refusal<90, phase_tma_refusal, 91>,
     family_cost<phase_tma_cost_ms>},
    {CandidateId::kPhaseTf32, "phase_tf32", true, kForward, family_refusal<90, phase_tf32_refusal, 91>,
     family_cost<phase_tf32_cost_ms>},
    {CandidateId::kPhasePixels, "phase_pixels", true, kForward, family_refusal<90, phase_pixels_refusal, 91>,
     family_cost<phase_pixels_cost_ms>},
    {CandidateId::kDense, "dense", true, kForward, family_refusal<80, dense_refusal>, family_cost<dense_cost_ms>},
    {CandidateId::kRowTile, "row_tile", true, kForward, family_refusal<90, row_tile_refusal>,
     family_cost<row_tile_cost_ms>},
    {CandidateId::kRows, "rows", true, kForward, family_refusal<90, rows_refusal>, family_cost<rows_cost_ms>},
    {CandidateId::kRowsMma, "rows_mma", true, kForward, family_refusal<90, rows_mma_refusal, 120>,
     family_cost<rows_mma_cost_ms>},
    {CandidateId::kRowsPersistent, "rows_persistent", true, kForward, family_refusal<90, rows_persistent_refusal, 120>,
     family_cost<rows_persistent_cost_ms>},
    {CandidateId::kLongRows, "long_rows", true, kForward, family_refusal<90, long_rows_refusal, 120>,
     family_cost<long_rows_cost_ms>},
    {CandidateId::kPixelRows, "pixel_rows", true, kForward, family_refusal<90, pixel_rows_refusal, 120>,
     family_cost<pixel_rows_cost_ms>},
    {CandidateId::kRows, "rows_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<80, rows_input_gradient_refusal>, family_cost<rows_input_gradient_cost_ms>},
    {CandidateId::kRows, "rows_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<80, rows_weight_gradient_refusal>, family_cost<rows_weight_gradient_cost_ms>},
    {CandidateId::kDepthwise, "depthwise_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<75, depthwise_input_gradient_refusal>, family_cost<depthwise_input_gradient_cost_ms>},
    {CandidateId::kDepthwise, "depthwise_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<75, depthwise_weight_gradient_refusal>, family_cost<depthwise_weight_gradient_cost_ms>},
    {CandidateId::kDepthwiseGradients, "depthwise_gradients", true, kBothGradients,
     family_refusal<90, depthwise_gradients_refusal>, half_of<depthwise_gradients_cost_ms>, /*shares=*/true},
    {CandidateId::kHeads, "heads_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<80, heads_input_gradient_refusal>, family_cost<heads_input_gradient_cost_ms>},
    {CandidateId::kHeads, "heads_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<80, heads_weight_gradient_refusal>, family_cost<heads_weight_gradient_cost_ms>},
    {CandidateId::kDirect, "direct_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<75, direct_input_gradient_refusal>, family_cost<direct_input_gradient_cost_ms>},
    {CandidateId::kDirect, "direct_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<80, direct_weight_gradient_refusal>, family_cost<direct_weight_gradient_cost_ms>},
    {CandidateId::kDenseGradients, "dense_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<90, dense_input_gradient_refusal, 120>, family_cost<dense_input_gradient_cost_ms>},
    {CandidateId::kDenseGradients, "dense_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<90, dense_weight_gradient_refusal, 120>, family_cost<dense_weight_gradient_cost_ms>},
    {CandidateId::kMirrored, "mirrored_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<90, mirrored_gradient_refusal, 91>, family_cost<mirrored_gradient_cost_ms>},
    {CandidateId::kGradientGemm, "gemm_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<90, gradient_gemm_refusal, 91>, family_cost<gemm_gradients_input_cost_ms>, /*shares=*/true},
    {CandidateId::kGradientGemm, "gemm_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<90, gemm_weight_gradient_refusal, 91>, family_cost<gemm_gradients_weight_cost_ms>, /*shares=*/true},
    {CandidateId::kPairsGradients, "pairs_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<90, pairs_gradient_refusal, 91>, family_cost<pairs_input_gradient_cost_ms>, /*shares=*/true},
    {CandidateId::kPairsGradients, "pairs_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<90, pairs_gradient_refusal, 91>, family_cost<pairs_weight_gradient_cost_ms>, /*shares=*/true},
    {CandidateId::kPairsTf32, "pairs_tf32_gradients", true, kBothGradients, family_refusal<90, pairs_tf32_refusal, 91>,
     half_of<pairs_tf32_cost_ms>, /*shares=*/true},
    {CandidateId::kBoxesTf32, "boxes_tf32_gradients", true, kBothGradients, family_refusal<90, boxes_tf32_refusal, 91>,
     half_of<boxes_tf32_cost_ms>, /*shares=*/true},
    {CandidateId::kFewPositions, "few_dgrad", true, bit(Operation::kInputGradient),
     family_refusal<90, few_input_gradient_refusal>, family_cost<few_input_gradient_cost_ms>},
    {CandidateId::kFewPositions, "few_wgrad", true, bit(Operation::kWeightGradient),
     family_refusal<90, few_weight_gradient_refusal>, family_cost<few_weight_gradient_cost_ms>},
    {CandidateId::kFusedMma, "fused_mma", true, kChain, family_refusal<80, chain_mma_refusal>,
     family_cost<chain_mma_cost_ms>},
    {CandidateId::kFusedMma, "fused_mma", true, kChainGradients, family_refusal<80, fused_chain_backward_refusal>,
     fused_gradients_cost},
    {CandidateId::kFused, "fused", true, kChain | kChainGradients, fused_refusal, own_cuda_cost},
    {CandidateId::kAten, "aten", true, kAny, never, aten_cuda_cost, /*shares=*/true},
};

// An activation in a pass of its own: it reads and writes the output.
double pass_cost(const Problem& p, const DeviceInfo& device) {
  const double bytes = 2 * double(p.element_size()) * double(p.out_elements());
  return device.cuda ? 0.003 + ms(bytes, 4.1e12) : 0.005 + ms(bytes, 4e9) / device.threads;
}

// Those of the table, with what they refuse or cost.
std::vector<Candidate> list_candidates(Operation operation, const Problem& problem, const DeviceInfo& device) {
  std::vector<Candidate> candidates;
  for (const Row& row : kTable) {
    if (row.cuda != device.cuda || (row.makes & bit(operation)) == 0) continue;
    Problem as_read = problem;
    as_read.weight_layout = weight_layout(row.id, problem);
    std::string refusal = row.refusal(as_read, device);
    const bool can = refusal.empty();
    double cost_ms = can ? row.cost(operation, as_read, device) : 0;
    // Costs of families that read contiguous weights only count the copy of others already.
    if (can && as_read.weight_layout == Layout::kChannelsLast && problem.weight_layout == Layout::kContiguous) {
      cost_ms += 0.005 + ms(double(problem.element_size() * problem.weight_elements()), 2e11);
    }
    const bool passes = problem.activation != Activation::kNone && !activates(row.id, problem);
    if (can && passes) cost_ms += pass_cost(problem, device);
    candidates.push_back({row.id, row.name, std::move(refusal), cost_ms});
  }
  return candidates;
}

// Whether a family's gradients share work, where it makes both. Matrix products share what they pack.
bool shares(CandidateId id, Layout layout) {
  if (id == CandidateId::kGradientGemm && layout == Layout::kChannelsLast) return false;
  for (const Row& row : kTable) {
    if (row.id == id && row.shares) return true;
  }
  return false;
}

// The index of the candidate for one gradient in the cheapest pair of candidates for both, since training wants both:
// one whose work is shared takes longer beside another family.
int cheapest_beside(const std::vector<Candidate>& candidates, const std::vector<Candidate>& others, Layout layout) {
  constexpr double kAlone = 1.2;
  constexpr double kGain = 0.985;  // a tie goes to PyTorch's: no estimate is better than that
  const auto alone = [&](const Candidate& c) { return c.cost_ms * (shares(c.id, layout) ? kAlone : 1); };
  double least_other = std::numeric_limits<double>::infinity(), least = least_other;
  for (const Candidate& other : others) {
    if (other.refusal.empty()) least_other = std::min(least_other, alone(other));
  }
  int choice = -1;
  for (int i = 0; i < int(candidates.size()); ++i) {
    const Candidate& c = candidates[i];
    if (!c.refusal.empty()) continue;
    double both = alone(c) + least_other;
    for (const Candidate& other : others) {
      if (!other.refusal.empty() || other.id != c.id || !shares(c.id, layout)) continue;
      both = std::min(both, (c.cost_ms + other.cost_ms) * (c.id == CandidateId::kAten ? kGain : 1));
    }
    if (both < least) least = both, choice = i;
  }
  return choice;
}

std::string format(const char* pattern, double value) {
  char text[32];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

}  // namespace

Plan make_plan(Operation operation, const Problem& problem, const DeviceInfo& device, const std::string& forced) {
  Plan plan{list_candidates(operation, problem, device), -1};
  for (int i = 0; !forced.empty() && i < int(plan.candidates.size()); ++i) {
    const Candidate& c = plan.candidates[i];
    if (c.name != forced) continue;
    if (!c.refusal.empty()) throw std::runtime_error("candidate " + forced + " cannot make this call: " + c.refusal);
    plan.choice = i;
  }
  if (plan.choice >= 0) return plan;
  if (device.cuda && (bit(operation) & kBothGradients) != 0) {
    const bool of_input = operation == Operation::kInputGradient;
    const Operation other = of_input ? Operation::kWeightGradient : Operation::kInputGradient;
    plan.choice = cheapest_beside(plan.candidates, list_candidates(other, problem, device), problem.layout);
    return plan;
  }
  for (int i = 0; i < int(plan.candidates.size()); ++i) {
    const Candidate& c = plan.candidates[i];
    if (c.refusal.empty() && (plan.choice < 0 || c.cost_ms < plan.chosen().cost_ms)) plan.choice = i;
  }
  return plan;
}

Layout weight_layout(CandidateId candidate, const Problem& problem) {
  switch (candidate) {
    case CandidateId::kHeadsGemm:
    case CandidateId::kPhaseDirect:
    case CandidateId::kPhaseTf32:
    case CandidateId::kPhasePixels:
    case CandidateId::kDense:
    case CandidateId::kMirrored:
    case CandidateId::kGradientGemm:
    case CandidateId::kAten:
      return problem.weight_layout;
    case CandidateId::kShuffleGemm:
      return problem.layout;
    default:
      return Layout::kContiguous;
  }
}

bool activates(CandidateId candidate, const Problem& problem) {
  switch (candidate) {
    case CandidateId::kPhaseAvx512:
    case CandidateId::kPhaseAvx2:
    case CandidateId::kPhasePortable:
    case CandidateId::kGather:
      return true;
    case CandidateId::kAten:
      return false;
    default:
      return is_rectifier(problem.activation, problem.alpha);
  }
}

bool is_candidate(const std::string& name) {
  for (const Row& row : kTable) {
    if (row.name == name) return true;
  }
  return false;
}

std::string Plan::to_json() const {
  std::string text = std::string("{\"choice\": \"") + chosen().name + "\", \"candidates\": [";
  for (const Candidate& c : candidates) {
    if (&c != &candidates[0]) text += ", ";
    text += std::string("{\"name\": \"") + c.name + "\", \"supported\": " + (c.refusal.empty() ? "true" : "false") +
            ", \"reason\": \"" + c.refusal +
            "\", \"cost_ms\": " + (c.refusal.empty() ? format("%.6g", c.cost_ms) : "null") + "}";
  }
  return text + "]}";
}

std::string Plan::to_line() const {
  std::string text = chosen().name;
  for (const Candidate& c : candidates) {
    text += std::string(&c == &candidates[0] ? ": " : "; ") + c.name + " " +
            (c.refusal.empty() ? format("%.3g ms", c.cost_ms) : c.refusal);
  }
  return text;
}

}  // namespace fastconvt
