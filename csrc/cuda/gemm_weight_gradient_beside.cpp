// The weight's gradient by matrix products before the input's by other kernels: the pieces of its workspace that fit
// stand in the memory of that gradient.
#include "gemm_gradients.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kPieces = 3;  // sums, the packed input, the packed gradient of the output

struct Pieces {
  int64_t bytes[kPieces];
  unsigned lent = 0;  // a bit for each piece that stands in the memory of the input's gradient
  int64_t rest = 0;   // bytes of the others

  Pieces(const Problem& problem, const GemmWeightTile& tile, const void* grad_output, const void* input)
      : bytes{round_up(gemm_weight_sums_bytes(problem, tile), kAligned),
              round_up(gemm_weight_input_bytes(problem, tile, input), kAligned),
              round_up(gemm_weight_grad_bytes(problem, grad_output), kAligned)} {
    const int64_t room = problem.in_elements() * problem.element_size();
    int64_t most = 0, all = 0;
    for (unsigned some = 0; some < 1u << kPieces; ++some) {
      int64_t sum = 0;
      for (int i = 0; i < kPieces; ++i) sum += some >> i & 1 ? bytes[i] : 0;
      if (sum <= room && sum > most) most = sum, lent = some;
      all = sum;
    }
    rest = all - most;
  }

  GemmWeightPlaces places(void* grad_input, void* workspace) const {
    void* place[kPieces];
    int64_t used[2] = {};
    for (int i = 0; i < kPieces; ++i) {
      const bool is_lent = lent >> i & 1;
      place[i] = static_cast<char*>(is_lent ? grad_input : workspace) + used[is_lent];
      used[is_lent] += bytes[i];
    }
    return {place[0], place[1], place[2]};
  }

 private:
  static constexpr int64_t kAligned = 256;
};

}  // namespace

int64_t gemm_weight_gradient_beside_workspace(const Problem& problem, const void* grad_output, const void* input,
                                              const void* /*weight*/) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return 0;
  return Pieces(problem, last_result<gemm_weight_tile>(problem), grad_output, input).rest;
}

cudaError_t launch_gemm_weight_gradient_beside(const Problem& problem, const void* grad_output, const void* input,
                                               void* grad_input, void* grad_weight, void* grad_bias, void* workspace,
                                               cudaStream_t stream) {
  if (!gemm_weight_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  if (grad_bias != nullptr && !problem.has_bias) return cudaErrorNotSupported;  // there is no room for its sums
  const GemmWeightTile& tile = last_result<gemm_weight_tile>(problem);
  const GemmGradientsPlan plan{GemmGradientsForm::kTurned, problem, {}, tile, 0, false};
  return launch_packed_gemm_weight_gradient(problem, plan, grad_output, nullptr, input, grad_weight, grad_bias,
                                            Pieces(problem, tile, grad_output, input).places(grad_input, workspace),
                                            GemmWeightPhase::kAll, stream);
}

}  // namespace fastconvt::cuda
