// The host side of depthwise_gradients.cuh: how a problem is divided.
#include "depthwise_gradients.cuh"

#include <algorithm>

#include "depthwise_gradients_tile.h"
#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kPortableCluster = 8;  // blocks

// The smallest number that is not less than `least`, and `rest` modulo `period`.
int64_t at_least(int64_t least, int64_t rest, int64_t period) {
  return least + ((rest - least) % period + period) % period;
}

// In clusters of so many blocks; cudaErrorNotSupported where the device has no room for one.
template <typename... Params>
cudaError_t launch_cluster(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared, int cluster,
                           cudaStream_t stream, const Params&... params) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
  config.attrs = &attribute, config.numAttrs = 1;
  if (cluster > kPortableCluster) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1) {
      cudaGetLastError();  // the error is handled here
      return cudaErrorNotSupported;
    }
  }
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <class Traits>
cudaError_t launch(const Problem& problem, const DepthwiseGradientsTile& t, DepthwiseGradientsParams p,
                   const DepthwiseWeightParams& whole, cudaStream_t stream) {
  using T = typename Traits::T;
  constexpr int64_t kSize = sizeof(T), kChunk = Traits::kChunk, kBanks = 128 / kSize;
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.grad_batch = out.batch, p.grad_channel = out.channel, p.grad_plane = out.axis[0];
  p.input_batch = in.batch, p.input_channel = in.channel, p.input_plane = in.axis[0];
  p.grad_row = static_cast<int>(out.axis[1]), p.input_row = static_cast<int>(in.axis[1]);
  p.weight_elements = problem.weight_elements();
  p.grad_elements = problem.out_elements(), p.input_elements = problem.in_elements();
  p.channels = static_cast<int>(problem.in_channels);
  p.grad_column = p.input_column = 1;
  p.slots = static_cast<int>(t.slots), p.groups = static_cast<int>(t.groups);
  p.threads = p.slots * p.groups * Traits::kClasses;
  p.tile = static_cast<int>(t.tile);
  p.depth_rows = static_cast<int>(t.depth_rows), p.height_rows = static_cast<int>(t.height_rows);
  p.depth_bases = static_cast<int>(t.depth_bases), p.height_bases = static_cast<int>(t.height_bases);
  p.units = static_cast<int>(t.units), p.splits = static_cast<int>(t.splits);
  if (t.flat) {
    const int64_t begin = ceil_div(width.padding, width.stride);
    const int64_t end = std::min(width.in - 1, (width.out() + width.padding - Traits::kKernel) / width.stride + 1);
    p.inside_begin = static_cast<int>(begin), p.inside_count = static_cast<int>(std::max<int64_t>(0, end - begin));
  }
  // Whole rows are copied as one, unless threads that are side by side would read the same banks.
  p.whole_rows = Traits::kAligned && t.tiles == 1 && Traits::kClasses == depth.stride;
  const int64_t rest = (kChunk - width.padding % kChunk) % kChunk;  // of a row's first column
  p.shift = static_cast<int>(p.whole_rows ? -width.padding : Traits::kAligned ? rest : 0);

  const int64_t sums = 128 + (Traits::kSums + 1) * Traits::kThreads * 4;
  const int64_t planes = Traits::kDepth > 1 ? round_up(t.slots * t.height_rows * t.tile * 4, int64_t{128}) : 0;
  const int64_t most = std::min<int64_t>(Traits::kChain, t.height_bases);
  int64_t bases = ceil_div(t.height_bases, ceil_div(t.height_bases, most)), total = 0;
  for (;; bases = std::min(bases - 1, ceil_div(t.height_bases, ceil_div(t.height_bases, bases) + 1))) {
    const int64_t inputs = t.flat ? t.tile * bases : t.tile, apart = t.flat ? kChunk : rest;
    int64_t pitch = round_up((inputs - 1) * Traits::kStride + Traits::kKernel + apart, kChunk);
    int64_t input_pitch = round_up(inputs + (t.flat ? kChunk : 0), kChunk);
    if (p.whole_rows) {
      pitch = width.out(), input_pitch = width.in;
    } else if (Traits::kClasses > 1) {
      pitch = at_least(pitch, std::max(kBanks / Traits::kClasses, kChunk), kBanks);
    }
    const int64_t grad_rows = t.flat ? 1 : bases * height.stride, input_rows = t.flat ? 1 : bases;
    int64_t plane = pitch * grad_rows;
    if (Traits::kClasses > 1 && depth.stride > 1) plane = at_least(plane, kBanks / 2, kBanks);
    p.bases = static_cast<int>(bases), p.slabs = static_cast<int>(ceil_div(t.height_bases, bases));
    const int grad_runs = p.whole_rows || t.flat ? 1 : static_cast<int>(grad_rows);
    const int input_runs = p.whole_rows || t.flat ? 1 : static_cast<int>(input_rows);
    p.grad_jobs = static_cast<int>(t.slots * depth.stride * grad_runs);
    p.input_jobs = static_cast<int>(t.slots * Traits::kDepth * input_runs);
    p.by_grad_run = fast_divide(grad_runs), p.by_input_run = fast_divide(input_runs);
    p.grad_pitch = static_cast<int>(pitch), p.grad_plane_pitch = static_cast<int>(plane);
    p.grad_slot = static_cast<int>(plane * depth.stride);
    p.grad_base = static_cast<int>(t.flat ? t.tile * Traits::kStride : pitch * height.stride);
    p.input_pitch = static_cast<int>(input_pitch);
    p.input_base = static_cast<int>(t.flat ? t.tile : input_pitch);
    p.input_plane_pitch = static_cast<int>(input_pitch * input_rows);
    p.input_slot = p.input_plane_pitch * Traits::kDepth;
    p.input_place = p.grad_slot * p.slots;
    p.stage = p.input_place + p.input_slot * p.slots;
    p.sums_place = 128, p.planes_place = static_cast<int>(sums), p.stages_place = static_cast<int>(sums + planes);
    total = p.stages_place + kDepthwiseStages * p.stage * kSize + 64;  // a thread may read columns beyond
    if (bases == 1 || total <= kDepthwiseGradientsShared / Traits::kResident) break;
  }
  p.by_depth_dilation = fast_divide(p.axis[0].dilation), p.by_height_dilation = fast_divide(p.axis[1].dilation);
  p.by_group = fast_divide(p.groups);
  p.by_tile = fast_divide(static_cast<int>(t.tiles));
  p.by_height_part = fast_divide(static_cast<int>(t.height_parts));
  p.by_depth_part = fast_divide(static_cast<int>(t.depth_parts));
  p.by_grad_plane = fast_divide(static_cast<int>(depth.stride)), p.by_input_plane = fast_divide(Traits::kDepth);
  const int64_t blocks = t.splits * problem.in_channels;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  const auto kernel = depthwise_gradients_kernel<Traits>;
  const cudaError_t error = allow_depthwise_shared(kernel, total);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (p.cluster) return launch_cluster(kernel, grid, Traits::kThreads, total, p.splits, stream, p, whole);
  kernel<<<grid, Traits::kThreads, static_cast<size_t>(total), stream>>>(p, whole);
  return cudaGetLastError();
}

bool is_aligned(const void* grad, const void* input, const void* output) {
  return (reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(input) |
          reinterpret_cast<uintptr_t>(output)) %
             16 ==
         0;
}

template <typename T, int kShape = 0>
cudaError_t dispatch_shape(const Problem& problem, const DepthwiseGradientsTile& t, const DepthwiseGradientsParams& p,
                           const DepthwiseWeightParams& whole, cudaStream_t stream) {
  if constexpr (kShape < static_cast<int>(std::size(kDepthwiseGradientsShapes))) {
    return t.shape == kShape ? launch<DepthwiseGradientsTraits<T, kShape>>(problem, t, p, whole, stream)
                             : dispatch_shape<T, kShape + 1>(problem, t, p, whole, stream);
  }
  return cudaErrorNotSupported;
}

// Of what several blocks have made. It may start before they end, and waits for them itself.
template <typename T>
cudaError_t launch_reduction(const DepthwiseWeightParams& whole, cudaStream_t stream) {
  const int64_t elements =
      (whole.output != nullptr ? whole.weight_elements : 0) + (whole.grad_bias != nullptr ? whole.channels : 0);
  const dim3 grid(static_cast<unsigned>(ceil_div(elements, kDepthwiseReduceElements)));
  return launch_early(depthwise_weight_reduction_kernel<T>, grid, kDepthwiseReduceElements * kDepthwiseReduceShares, 0,
                      stream, whole);
}

}  // namespace

int64_t depthwise_gradients_workspace(const Problem& original) {
  if (original.in_elements() == 0 || !depthwise_gradients_refusal(original).empty()) return 0;
  const Problem problem = depthwise_gradients_view(original);
  int64_t parts = 0;
  for (const bool aligned : {false, true}) {
    if (depthwise_gradients_shape(problem, aligned) < 0) continue;
    const DepthwiseGradientsTile t = choose_depthwise_gradients_tile(problem, aligned);
    if (t.splits > 1 && !t.cluster) parts = std::max(parts, t.splits);
  }
  const int64_t biases = problem.has_bias ? problem.in_channels : 0;
  return parts * (problem.weight_elements() + biases) * int64_t{sizeof(float)};
}

cudaError_t launch_depthwise_gradients(const Problem& original, const void* grad_output, const void* input,
                                       const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                       void* workspace, cudaStream_t stream) {
  if (!depthwise_gradients_refusal(original).empty() || original.in_elements() == 0) return cudaErrorNotSupported;
  const Problem problem = depthwise_gradients_view(original);
  const bool aligned = is_aligned(grad_output, input, grad_input);
  if (depthwise_gradients_shape(problem, aligned) < 0) return cudaErrorNotSupported;
  const DepthwiseGradientsTile t = choose_depthwise_gradients_tile(problem, aligned);
  DepthwiseGradientsParams p{};
  p.grad = grad_output, p.input = input, p.weight = weight, p.output = grad_input;
  const bool sums = grad_weight != nullptr || grad_bias != nullptr;
  p.cluster = sums && t.cluster;
  p.partial = static_cast<float*>(workspace);
  p.bias_partial = grad_bias != nullptr ? p.partial + t.splits * problem.weight_elements() : nullptr;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DepthwiseWeightParams r{};
    for (int a = 0; a < 3; ++a) r.axis[a] = axis_params(problem.axis[a]);
    const Strides in = input_strides(problem), out = output_strides(problem);
    r.grad = grad_output, r.input = input, r.output = grad_weight, r.grad_bias = grad_bias;
    r.partial = p.partial, r.bias_partial = p.bias_partial;
    r.weight_elements = problem.weight_elements();
    r.grad_batch = out.batch, r.grad_channel = out.channel, r.input_batch = in.batch, r.input_channel = in.channel;
    r.grad_plane = static_cast<int>(out.axis[0]), r.input_plane = static_cast<int>(in.axis[0]);
    r.grad_row = static_cast<int>(out.axis[1]), r.input_row = static_cast<int>(in.axis[1]);
    r.grad_column = static_cast<int>(out.axis[2]), r.input_column = static_cast<int>(in.axis[2]);
    r.channels = static_cast<int>(problem.out_channels), r.batch = static_cast<int>(problem.batch);
    r.by_multiplier = fast_divide(1);
    r.splits = static_cast<int>(t.splits), r.classes = 1;
    const cudaError_t error = problem.layout == Layout::kChannelsLast
                                  ? launch_depthwise_gradients_channels(problem, t, p, r, stream)
                                  : dispatch_shape<T>(problem, t, p, r, stream);
    const bool parts = sums && t.splits > 1 && !t.cluster;
    return error == cudaSuccess && parts ? launch_reduction<T>(r, stream) : error;
  });
}

}  // namespace fastconvt::cuda
