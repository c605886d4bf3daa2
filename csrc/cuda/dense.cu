#include "dense.cuh"

#include <algorithm>

#include "../core/dense.h"
#include "dispatch.h"

namespace fastconvt::cuda {
namespace {

// Shared memory that a block may have on this device.
int64_t device_shared() {
  int device = 0, shared = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return kDenseGradientShared;
  }
  return shared;
}

// Batch entries are a first axis, maybe.
Strides folded_strides(const Problem& problem, Strides strides) {
  if (dense_folds_batch(problem)) strides.axis[0] = strides.batch;
  return strides;
}

DenseForward dense_forward(const Problem& layer, const DenseGradientTile& t, const void* input, const void* weight,
                           const void* bias, void* output, void* workspace) {
  const Problem problem = dense_folded(layer);
  const Problem phase = dense_phase(layer, t.joined);
  DenseForward f{};
  DenseParams& p = f.phase;
  p = dense_params(phase, t, input, nullptr);
  DenseSource from = dense_source(folded_strides(layer, input_strides(layer)), problem.in_channels_per_group(), t.runs,
                                  dense_granule(problem), phase.axis[2].dilation, 1, input);
  from.producers = p.grad.producers, from.items = p.grad.items;
  p.grad = from;
  p.input = dense_source(folded_strides(layer, output_strides(layer)), problem.out_channels_per_group(), false, 1, 1, 1,
                         output);
  p.input.channels = static_cast<int>(phase.in_channels_per_group());
  p.weight = weight, p.output = output, p.workspace = workspace;
  f.kinds = 1;
  int taps_of_weight = 1, joined = 1;
  for (int a = 0; a < 3; ++a) {
    DenseLayerAxis& axis = f.axis[a];
    axis.layer = axis_params(problem.axis[a]);
    axis.joined = dense_is_joined(t.joined, a) ? axis.layer.stride : 1;
    axis.by_phase = fast_divide(axis.layer.stride / axis.joined);
    axis.by_stride = fast_divide(axis.layer.stride), axis.by_gcd = fast_divide(axis.layer.gcd);
    axis.by_tap_step = fast_divide(axis.layer.tap_step());
    axis.start = static_cast<int>(axis.joined > 1 ? dense_joined_taps(problem.axis[a]).start : 0);
    axis.most_taps = static_cast<int>(dense_most_taps(problem.axis[a]));
    if (axis.joined == 1 && dense_has_fewer_taps(problem.axis[a]) && t.axis[a].tap_blocks == 1 && !(t.runs && a == 2)) {
      axis.fewer = f.kinds, f.kinds *= 2;
    }
    p.kernel[a] = axis.layer.kernel;
    taps_of_weight *= axis.layer.kernel, joined *= axis.joined;
    f.by_joined_axis[a] = fast_divide(axis.joined);
  }
  f.out_channels = static_cast<int>(problem.out_channels_per_group());
  f.by_channels = fast_divide(f.out_channels), f.by_joined = fast_divide(joined);
  f.channels_first = problem.layout == Layout::kChannelsLast;
  f.phases = static_cast<int>(t.phases);
  f.by_phase = fast_divide(f.phases);
  const bool last = problem.weight_layout == Layout::kChannelsLast;
  f.weight_channel = last ? 1 : taps_of_weight, f.weight_tap = last ? f.out_channels : 1;
  f.bias = bias;
  f.rectify = rectifier(layer);
  f.step_bytes = p.weight_bytes / p.steps;
  f.pairs = dense_has_pairs(layer, t.joined) &&
            reinterpret_cast<uintptr_t>(output) % static_cast<uintptr_t>(2 * problem.element_size()) == 0;
  p.tiles = static_cast<int>(dense_gradient_boxes(phase, t) * problem.groups * t.in_blocks * t.phases);
  if (t.totals) p.run = static_cast<int>(std::max<int64_t>(1, kDenseGradientRun * t.warps_k / t.steps));
  return f;
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
cudaError_t launch_product(const DenseForward& f, const DenseGradientTile& t, cudaStream_t stream) {
  const auto kernel = f.rectify.on ? dense_kernel<T, kPrecision, kRows, kColumns, true>
                                   : dense_kernel<T, kPrecision, kRows, kColumns, false>;
  const int most = static_cast<int>(dense_gradient_budget(sizeof(T), t.shared));
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(f.phase.tiles, dense_processors() * dense_gradient_blocks(sizeof(T)));
  return launch_early(kernel, dim3(static_cast<unsigned>(blocks)), f.phase.threads, t.shared_bytes, stream, f);
}

}  // namespace

int64_t dense_workspace(const Problem& problem) {
  if (!dense_refusal(problem).empty()) return 0;
  return dense_entries(problem, dense_tile(problem, device_shared())) * (dense_gradient_split(problem) ? 16 : 8);
}

cudaError_t launch_dense(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                         void* workspace, cudaStream_t stream) {
  if (!dense_refusal(problem).empty()) return cudaErrorNotSupported;
  const DenseGradientTile& tile = dense_tile(problem, device_shared());
  if (tile.stages == 0) return cudaErrorNotSupported;
  const DenseForward f = dense_forward(problem, tile, input, weight, bias, output, workspace);
  return dispatch_precision<DensePrecision>(problem, [&](auto tag, auto precision) {
    using T = typename decltype(tag)::type;
    constexpr DensePrecision kPrecision = decltype(precision)::value;
    const int tiles = static_cast<int>(tile.in_channels() / 8);
    const int64_t threads = dense_entries(problem, tile) / tile.phases;
    const dim3 grid(static_cast<unsigned>(ceil_div(threads, 256)),
                    static_cast<unsigned>(ceil_div(tile.phases, kDensePackedPhases)));
    dense_forward_weights_kernel<T, kPrecision><<<grid, 256, 0, stream>>>(f, tiles, threads);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    if (tile.n_tiles == 1) return launch_product<T, kPrecision, 4, 1>(f, tile, stream);
    if (tile.n_tiles == 2) return launch_product<T, kPrecision, 4, 2>(f, tile, stream);
    if constexpr (kPrecision != DensePrecision::kFloat32) {
      if (tile.m_tiles == 4) return launch_product<T, kPrecision, 4, 4>(f, tile, stream);
    }
    return launch_product<T, kPrecision, 2, 4>(f, tile, stream);
  });
}

}  // namespace fastconvt::cuda
