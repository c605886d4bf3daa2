// Unrolls the output's gradient for products, host side.
#include "gemm_unroll.cuh"

#include <algorithm>

#include "dispatch.h"
#include "gemm_gradients.h"
#include "gradient_gemm_pack_plan.h"

namespace fastconvt::cuda {
namespace {

// Of a grid: enough blocks, and few sums for the bias.
struct UnrollGrid {
  int columns, steps, positions;  // blocks of columns, steps of a block, blocks of positions

  explicit UnrollGrid(const Problem& problem) {
    const int64_t tiles = ceil_div(problem.batch * problem.in_positions(), int64_t{kUnrollPositions});
    columns =
        static_cast<int>(ceil_div(problem.out_channels * problem.kernel_positions(), int64_t{kUnrollVectors * 8}));
    steps = static_cast<int>(std::clamp<int64_t>(tiles * columns / (132 * 16), 1, 8));
    positions = static_cast<int>(ceil_div(tiles, int64_t{steps}));
  }
};

UnrollParams make_params(const Problem& problem, const void* grad_output, void* unrolled, float* partial) {
  UnrollParams p{};
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.axis[a] = {fast_divide(i(axis.in)), i(axis.out()),   i(axis.kernel),
                 i(axis.stride),          i(axis.padding), i(axis.dilation)};
  }
  const UnrollGrid grid(problem);
  p.column_blocks = fast_divide(grid.columns);
  p.taps = i(problem.kernel_positions()), p.channels = i(problem.out_channels), p.columns = p.channels * p.taps;
  p.image = i(problem.out_positions()), p.positions = i(problem.batch * problem.in_positions());
  p.steps = grid.steps;
  p.source = grad_output, p.target = unrolled, p.partial = partial;
  return p;
}

// Taps that always meet neighbouring outputs, aligned together.
int count_neighbours(const Problem& problem, const void* grad_output) {
  const Axis& last = problem.axis[2];
  for (int wide = 4; wide > 1; wide /= 2) {
    const int64_t rest = last.kernel % wide + last.stride % wide + last.padding % wide + last.out() % wide;
    if (rest == 0 && last.dilation == 1 && reinterpret_cast<uintptr_t>(grad_output) % (2 * wide) == 0) return wide;
  }
  return 1;
}

// A channel's outputs are those of its counted taps, each once.
void count_taps(const Problem& problem, UnrollBiasParams& p) {
  std::array<GemmWeightTap, kGemmWeightMaxTaps> taps;
  const int count = gemm_weight_taps(problem, taps);
  for (int t = 0; t < count; ++t) {
    if (taps[t].counted) p.counted[taps[t].number / 32] |= 1u << taps[t].number % 32;
  }
}

}  // namespace

int64_t gemm_unrolled_bytes(const Problem& problem) {
  return round_up(problem.batch * problem.in_positions() * problem.out_channels * problem.kernel_positions() * 2,
                  int64_t{1024});
}
int64_t gemm_unrolled_bias_bytes(const Problem& problem) {
  const UnrollGrid grid(problem);
  return round_up(int64_t{grid.positions} * problem.out_channels * problem.kernel_positions() * int64_t{sizeof(float)},
                  int64_t{1024});
}

cudaError_t launch_gemm_unroll(const Problem& problem, const void* grad_output, void* unrolled, float* bias_partial,
                               const void* weight, void* packed_weight, const void* input, void* packed_input,
                               cudaStream_t stream) {
  return dispatch_16_bits(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const UnrollGrid grid(problem);
    const UnrollParams p = make_params(problem, grad_output, unrolled, bias_partial);
    GradientPackParams weights{}, inputs{};
    int64_t more = 0;
    if (packed_weight != nullptr) plan_weights<T>(unrolled_problem(problem), weight, packed_weight, weights);
    if (packed_input != nullptr) {
      const int64_t channels = problem.in_channels_per_group();
      more = plan_positions(problem, problem.batch, problem.in_positions(), problem.groups, channels,
                            round_up(channels, int64_t{8}), 64, input, packed_input, inputs);
    }
    const int64_t own = int64_t{grid.columns} * grid.positions, blocks = own + weights.weight_blocks + more;
    if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
    const int wide = count_neighbours(problem, grad_output);
    const auto kernel = wide == 4   ? gemm_unroll_kernel<T, 4>
                        : wide == 2 ? gemm_unroll_kernel<T, 2>
                                    : gemm_unroll_kernel<T, 1>;
    kernel<<<static_cast<unsigned>(blocks), kUnrollThreads, 0, stream>>>(p, weights, inputs, static_cast<int>(own));
    return cudaGetLastError();
  });
}

cudaError_t launch_gemm_unrolled_bias(const Problem& problem, const void* grad_output, const float* partial,
                                      void* grad_bias, cudaStream_t stream) {
  UnrollBiasParams p{};
  p.partial = partial;
  p.channels = static_cast<int>(problem.out_channels), p.taps = static_cast<int>(problem.kernel_positions());
  p.columns = p.channels * p.taps, p.blocks = UnrollGrid(problem).positions;
  count_taps(problem, p);
  p.grad = grad_output, p.out = output_strides(problem);
  p.batch = problem.batch, p.positions = problem.out_positions(), p.bias = grad_bias;
  return dispatch_16_bits(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_early(unroll_bias_kernel<T>, dim3(static_cast<unsigned>(p.channels)), kUnrollThreads, 0, stream, p);
  });
}

}  // namespace fastconvt::cuda
