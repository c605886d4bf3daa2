#include "depthwise_input_gradient.cuh"

#include <algorithm>
#include <type_traits>

#include "depthwise_input_gradient_channels.cuh"
#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int64_t kThreads = 128;  // of a block, where a row of it suffices
constexpr int64_t kChannelVector = 4;
constexpr int64_t kBlocks = 3200;  // some three rounds of blocks

void set_strides(const Problem& problem, DepthwiseInputParams& p) {
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.grad_batch = out.batch, p.grad_channel = out.channel, p.grad_plane = out.axis[0];
  p.output_batch = in.batch, p.output_channel = in.channel, p.output_plane = in.axis[0];
  p.grad_row = static_cast<int>(out.axis[1]), p.grad_column = static_cast<int>(out.axis[2]);
  p.output_row = static_cast<int>(in.axis[1]), p.output_column = static_cast<int>(in.axis[2]);
  p.channels = static_cast<int>(problem.in_channels);
  p.multiplier = static_cast<int>(problem.out_channels_per_group());
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
}

// Units along each axis, and how many a block makes.
void set_units(int64_t batch, int64_t planes, int64_t rows, int64_t columns, int64_t tiles, int64_t blocks,
               DepthwiseInputParams& p) {
  const int64_t units = batch * planes * rows * columns;
  const int64_t of_part = std::max<int64_t>(1, units * tiles / blocks);
  p.parts = static_cast<int>(ceil_div(units, of_part));
  p.units = static_cast<int>(units);
  p.units_of_part = static_cast<int>(ceil_div<int64_t>(units, p.parts));
  p.by_part = fast_divide(p.parts);
  p.by_plane = fast_divide(static_cast<int>(planes));
  p.by_row = fast_divide(static_cast<int>(rows));
  p.by_column = fast_divide(static_cast<int>(columns));
}

// Contiguous. The first axis is one that has several inputs, be it the batch: a thread makes neighbours along it.
DepthwiseInputParams make_rows_params(Problem problem, int taps) {
  DepthwiseInputParams p{};
  if (problem.axis[0].is_trivial()) std::swap(problem.axis[0], problem.axis[1]);
  set_strides(problem, p);
  int64_t batch = problem.batch;
  if (problem.axis[0].is_trivial()) {
    problem.axis[0].in = batch;
    p.axis[0] = axis_params(problem.axis[0]);
    p.grad_plane = p.grad_batch, p.output_plane = p.output_batch;
    batch = 1;
  }
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const int64_t own = kDepthwiseGradientColumns, step = width.stride;
  const int64_t most = 512 / taps / step * step, span = (width.kernel - 1) * width.dilation + 1;
  const auto threads_of = [&](int64_t columns) { return round_up(ceil_div(columns, own), step); };
  int64_t columns = width.in, threads = threads_of(width.out());
  if (threads > most) {
    columns = (most * own - span) / width.stride + 1;
    columns = ceil_div(width.in, ceil_div(width.in, columns));
    threads = threads_of((columns - 1) * width.stride + span);
  }
  const int64_t slots = std::max<int64_t>(1, kThreads / threads);
  int64_t plane_slots = height.in > 1 ? std::min<int64_t>(slots, 2) : slots;
  plane_slots = std::min(plane_slots, ceil_div<int64_t>(depth.in, kDepthwiseInputRows));
  const int64_t row_slots = std::min(height.in, slots / plane_slots);
  p.threads = static_cast<int>(threads);
  p.plane_slots = static_cast<int>(plane_slots);
  p.row_slots = static_cast<int>(row_slots);
  p.slots = p.plane_slots * p.row_slots;
  p.columns = static_cast<int>(columns);
  p.pitch = static_cast<int>(round_up(threads * own + threads * own / 32 + 1, 4));
  p.table_size = static_cast<int>(
      round_up(problem.out_channels_per_group() * depth.kernel * height.kernel * width.stride * taps, 4));
  p.by_threads = fast_divide(p.threads);
  p.by_row_slot = fast_divide(p.row_slots);
  p.by_columns = fast_divide(p.columns);
  p.by_stride = fast_divide(p.axis[2].stride);
  set_units(batch, ceil_div<int64_t>(depth.in, plane_slots * kDepthwiseInputRows), ceil_div(height.in, row_slots),
            ceil_div(width.in, columns), p.channels, kBlocks, p);
  return p;
}

DepthwiseInputParams make_channels_params(const Problem& problem, int64_t vector) {
  DepthwiseInputParams p{};
  set_strides(problem, p);
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const int64_t count = depthwise_channel_count(static_cast<int>(vector));
  const int64_t filter = problem.out_channels_per_group() * problem.kernel_positions();
  const int64_t all = problem.in_channels / vector;
  const int64_t fitting = std::min(
      {all, int64_t{kDepthwiseGradientThreads}, kDepthwiseGradientTable / (filter * vector * int64_t{sizeof(float)})});
  int64_t tiles = ceil_div(all, fitting);
  const int64_t vectors = ceil_div(all, tiles);
  tiles = ceil_div(all, vectors);
  p.vectors = static_cast<int>(vectors);
  p.thread_columns = static_cast<int>(
      std::max<int64_t>(1, std::min(std::max(kThreads, vectors) / vectors, ceil_div(width.in, count))));
  const int64_t columns = ceil_div(width.in, p.thread_columns * count);
  const int64_t work = problem.batch * depth.in * columns * tiles * height.in;
  const int64_t segments = ceil_div(height.in, std::clamp<int64_t>(work / kBlocks, 4, 32));
  p.march = static_cast<int>(ceil_div(height.in, segments));
  p.table_size = static_cast<int>(round_up(filter * vectors * vector, 4));
  p.by_vectors = fast_divide(p.vectors);
  p.by_taps = fast_divide(static_cast<int>(problem.kernel_positions()));
  set_units(problem.batch, depth.in, ceil_div<int64_t>(height.in, p.march), columns, tiles, 2 * kBlocks, p);
  return p;
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const DepthwiseInputParams& p, int64_t tiles, int64_t threads, int64_t shared,
                   cudaStream_t stream) {
  const int64_t blocks = tiles * p.parts;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(round_up(threads, 32)), static_cast<size_t>(shared),
           stream>>>(p);
  return cudaGetLastError();
}

struct Call {
  const void* grad;
  const void* weight;
  void* output;
  cudaStream_t stream;

  bool aligned(int64_t bytes) const {
    return (reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(output)) % bytes == 0;
  }
  void set(DepthwiseInputParams& p) const { p.grad = grad, p.weight = weight, p.output = output; }
};

template <typename T, int kTaps>
cudaError_t launch_rows(const Problem& problem, const Call& call) {
  DepthwiseInputParams p = make_rows_params(problem, kTaps);
  call.set(p);
  const int64_t shared = p.table_size + int64_t{p.slots} * kDepthwiseInputRows * kTaps * p.pitch;
  return launch(depthwise_input_gradient_kernel<T, kTaps>, p, p.channels, p.threads * p.slots, 4 * shared, call.stream);
}

template <typename T, int kVector>
cudaError_t launch_channels(const Problem& problem, const Call& call) {
  DepthwiseInputParams p = make_channels_params(problem, kVector);
  call.set(p);
  const int64_t shared = p.table_size + problem.axis[1].stride * kDepthwiseGradientReach;
  return launch(depthwise_input_gradient_channels_kernel<T, kVector>, p,
                ceil_div<int64_t>(p.channels, p.vectors * kVector), p.thread_columns * p.vectors, 4 * shared,
                call.stream);
}

template <typename T>
cudaError_t dispatch(const Problem& problem, const Call& call) {
  if (problem.layout == Layout::kChannelsLast) {
    const bool vectors = problem.in_channels % kChannelVector == 0 && problem.out_channels == problem.groups &&
                         call.aligned(kChannelVector * int64_t{sizeof(T)});
    return vectors ? launch_channels<T, kChannelVector>(problem, call) : launch_channels<T, 1>(problem, call);
  }
  return depthwise_taps(problem.axis[2]) > 2 ? launch_rows<T, 4>(problem, call) : launch_rows<T, 2>(problem, call);
}

}  // namespace

cudaError_t launch_depthwise_input_gradient(const Problem& original, const void* grad_output, const void* weight,
                                            void* grad_input, cudaStream_t stream) {
  if (!depthwise_input_gradient_refusal(original).empty()) return cudaErrorNotSupported;
  if (original.in_elements() == 0) return cudaSuccess;
  const Problem problem = depthwise_gradient_view(original);
  const cudaError_t error = launch_depthwise_input_window(problem, grad_output, weight, grad_input, stream);
  if (error != cudaErrorNotSupported) return error;
  const Call call{grad_output, weight, grad_input, stream};
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch<T>(problem, call);
  });
}

}  // namespace fastconvt::cuda
