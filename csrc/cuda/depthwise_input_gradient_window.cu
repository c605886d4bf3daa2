// The host side of depthwise_input_gradient_window.cuh: what it serves, and how a problem is divided.
#include "depthwise_input_gradient_window.cuh"

#include <algorithm>
#include <cmath>

#include "dispatch.h"

namespace fastconvt::cuda {
namespace {

constexpr int64_t kChannelVector = 4;
constexpr int64_t kWindowThreads = 128;  // of a block; twice as many share large weights
constexpr double kWindowSetup = 2;       // of a thread, in rows
constexpr int64_t kWindowShared = 40 * 1024;

struct Call {
  const void* grad;
  const void* weight;
  void* output;
  cudaStream_t stream;

  bool aligned(int64_t bytes) const {
    return (reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(output)) % bytes == 0;
  }
};

// Of kernels for few taps along the last axis: whether the weights of `tables` channel vectors fit.
template <class Shape>
int64_t window_shared(const Problem& problem, int64_t tables) {
  const int64_t rows = problem.axis[0].kernel * (problem.axis[1].kernel + 1);
  const int64_t items = round_up(problem.axis[1].stride * problem.axis[0].kernel, int64_t{Shape::kBatch});
  return items * int64_t{sizeof(DepthwiseWindowItem)} + tables * rows * Shape::kWeights * 4;
}

// Rows of the input that a thread makes: more share its set-up and its first bases, fewer fill the GPU better. `rounds`
// of blocks that the GPU holds at a time make all rows at once.
int choose_march(int64_t rows, int64_t halo, double rounds) {
  int best = 1;
  double best_cost = 1e300;
  for (int64_t segments = 1; segments <= std::min<int64_t>(rows, 64); ++segments) {
    const int64_t march = ceil_div(rows, segments);
    const double own = rounds * double(ceil_div(rows, march));
    const double idle = 0.5 * (std::ceil(own) - own) * std::min(1.0, 2 / own);
    const double cost = std::max(1.0, own + idle) * (double(march) + double(halo) + kWindowSetup);
    if (cost < best_cost) best = static_cast<int>(march), best_cost = cost;
  }
  return best;
}

template <class Shape>
DepthwiseWindowParams make_window_params(Problem problem, int64_t& tiles, int64_t& chunks) {
  DepthwiseWindowParams p{};
  const Strides in = input_strides(problem), out = output_strides(problem);
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  p.channels_last = channels_last;
  p.grad_outer = channels_last ? out.batch : out.channel, p.output_outer = channels_last ? in.batch : in.channel;
  p.grad_plane = out.axis[0], p.grad_row = out.axis[1], p.output_plane = in.axis[0], p.output_row = in.axis[1];
  p.grad_column = static_cast<int>(out.axis[2]), p.output_column = static_cast<int>(in.axis[2]);
  int64_t outers = problem.batch * (channels_last ? 1 : problem.in_channels);
  if (problem.axis[1].is_trivial()) {  // 1D: down the samples
    problem.axis[1].in = problem.batch;
    p.grad_row = out.batch, p.output_row = in.batch;
    outers = channels_last ? 1 : problem.in_channels;
  }
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const int64_t groups = ceil_div<int64_t>(width.in, Shape::kInputs);
  int64_t vectors = 1;
  tiles = 1;
  if (channels_last) {
    const int64_t all = problem.in_channels / Shape::kVector;
    vectors = std::min<int64_t>(all, kDepthwiseGradientThreads);
    while (window_shared<Shape>(problem, vectors) > kWindowShared) vectors = ceil_div<int64_t>(vectors, 2);
    tiles = ceil_div(all, vectors);
    vectors = ceil_div(all, tiles);
  }
  const bool many = Shape::kVector > 1 && window_shared<Shape>(problem, vectors) > kWindowShared / 4;
  const int64_t threads = std::max(vectors, many ? 2 * kWindowThreads : kWindowThreads);
  p.groups = static_cast<int>(std::min(groups, threads / vectors));
  chunks = ceil_div<int64_t>(groups, p.groups);
  p.groups = static_cast<int>(ceil_div(groups, chunks));
  int64_t slots = std::max<int64_t>(1, threads / (vectors * p.groups));
  while (!channels_last && window_shared<Shape>(problem, slots) > kWindowShared / 4 && slots > 1) slots /= 2;
  p.units = static_cast<int>(outers * depth.in);
  p.slots = static_cast<int>(std::min<int64_t>(slots, p.units));
  p.vectors = static_cast<int>(vectors);
  p.tile = static_cast<int>(vectors * Shape::kVector);
  p.tables = channels_last ? p.vectors : p.slots;
  p.channels = static_cast<int>(problem.in_channels);
  const int64_t blocks = chunks * tiles * ceil_div<int64_t>(p.units, p.slots);
  p.march = choose_march(height.in, Shape::kReach - 1,
                         double(blocks) * double(p.slots * p.groups * vectors) / (256.0 * Shape::kResident * 132));
  p.segments = static_cast<int>(ceil_div<int64_t>(height.in, p.march));
  p.by_vectors = fast_divide(p.vectors), p.by_groups = fast_divide(p.groups);
  p.by_chunk = fast_divide(static_cast<int>(chunks)), p.by_segment = fast_divide(p.segments);
  p.by_plane = fast_divide(static_cast<int>(depth.in)), p.by_tile = fast_divide(static_cast<int>(tiles));
  p.by_channels = fast_divide(p.channels);
  p.by_table_rows = fast_divide(static_cast<int>(depth.kernel * (height.kernel + 1)));
  p.by_depth = fast_divide(static_cast<int>(depth.kernel));
  p.items = static_cast<int>(round_up(height.stride * depth.kernel, int64_t{Shape::kBatch}));
  p.by_height_rows = fast_divide(static_cast<int>(height.kernel + 1));
  return p;
}

template <class Shape>
cudaError_t launch_window(const Problem& problem, const Call& call) {
  int64_t tiles, chunks;
  DepthwiseWindowParams p = make_window_params<Shape>(problem, tiles, chunks);
  p.grad = call.grad, p.weight = call.weight, p.output = call.output;
  p.vector_store = Shape::kVector == 1 && !p.channels_last && problem.axis[2].in % Shape::kInputs == 0 &&
                   reinterpret_cast<uintptr_t>(call.output) % (Shape::kInputs * sizeof(typename Shape::T)) == 0;
  const int64_t blocks = chunks * tiles * p.segments * ceil_div<int64_t>(p.units, p.slots);
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  depthwise_input_gradient_window_kernel<Shape>
      <<<static_cast<unsigned>(blocks), static_cast<unsigned>(round_up(p.slots * p.groups * p.vectors, 32)),
         static_cast<size_t>(window_shared<Shape>(problem, p.tables)), call.stream>>>(p);
  return cudaGetLastError();
}

// Kernels of at most kKernel at stride kStride: kInputs inputs a thread in channels_last, kRowInputs where rows and
// padding suit vectors.
template <typename T, int kKernel, int kStride, int kInputs, int kRowInputs, int kLead>
cudaError_t dispatch_window(const Problem& problem, const Call& call) {
  using Scalar = DepthwiseWindowShape<T, kKernel, kStride, kStride == 1 ? 4 : 1, 1, kNoLead>;
  const Axis& width = problem.axis[2];
  if (problem.layout == Layout::kChannelsLast) {
    using Vectors = DepthwiseWindowShape<T, kKernel, kStride, kInputs, kChannelVector, kNoLead>;
    if (problem.in_channels % kChannelVector == 0 && call.aligned(kChannelVector * int64_t{sizeof(T)})) {
      return window_shared<Vectors>(problem, 1) <= kWindowShared ? launch_window<Vectors>(problem, call)
                                                                 : cudaErrorNotSupported;
    }
  } else {
    if constexpr (kLead != kNoLead) {
      using Rows = DepthwiseWindowShape<T, kKernel, kStride, kRowInputs, 1, kLead>;
      if (width.out() % 4 == 0 && width.padding % 4 == kLead && call.aligned(4 * int64_t{sizeof(T)})) {
        return window_shared<Rows>(problem, 1) <= kWindowShared ? launch_window<Rows>(problem, call)
                                                                : cudaErrorNotSupported;
      }
    }
    if (kStride > 3) return cudaErrorNotSupported;
  }
  return window_shared<Scalar>(problem, 1) <= kWindowShared ? launch_window<Scalar>(problem, call)
                                                            : cudaErrorNotSupported;
}

template <typename T>
cudaError_t dispatch_shape(const Problem& problem, const Call& call) {
  const Axis& width = problem.axis[2];
  if (!depthwise_input_window(problem)) return cudaErrorNotSupported;
  if (width.stride == 1) return dispatch_window<T, 3, 1, 2, 4, 1>(problem, call);
  if (width.stride == 2) return dispatch_window<T, 4, 2, 2, 4, 1>(problem, call);
  if (width.stride == 3) return dispatch_window<T, 6, 3, 1, 1, kNoLead>(problem, call);
  if (width.stride == 4) return dispatch_window<T, 8, 4, 1, 1, kNoLead>(problem, call);
  return dispatch_window<T, 16, 8, 1, 1, 0>(problem, call);
}

}  // namespace

cudaError_t launch_depthwise_input_window(const Problem& problem, const void* grad_output, const void* weight,
                                          void* grad_input, cudaStream_t stream) {
  const Call call{grad_output, weight, grad_input, stream};
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_shape<T>(problem, call);
  });
}

}  // namespace fastconvt::cuda
