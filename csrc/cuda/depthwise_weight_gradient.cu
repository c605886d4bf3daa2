#include "depthwise_weight_gradient.cuh"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int64_t kVector = 4;  // channels, or columns, of a thread

// What a thread takes at a time.
enum class Form { kChannel, kChannels, kColumns };

struct Tile {
  Form form = Form::kChannel;
  int64_t vectors = 1;  // channel vectors of a tile
  int64_t tiles = 1;
  int64_t columns = 1;  // of a thread
  int64_t shares = 1;   // threads side by side
  int64_t slots = 1;
  bool flat = false;
  int64_t march = 1, segments = 1, chunks = 1, units = 1, splits = 1;
};

// How far apart threads of a slot are that see the same phase.
int64_t share_period(const Problem& problem, int64_t columns) {
  return problem.axis[2].stride / std::gcd(problem.axis[2].stride, columns);
}

// How channels and columns are spread over the threads of a block.
void choose_threads(const Problem& problem, Tile& t) {
  const Axis& width = problem.axis[2];
  constexpr int64_t kMost = kDepthwiseGradientThreads;
  t.columns = t.form == Form::kColumns ? kVector : 1;
  const int64_t period = share_period(problem, t.columns);
  const int64_t needed = round_up(ceil_div(width.out(), t.columns), period);
  if (problem.layout == Layout::kChannelsLast) {
    const int64_t vectors = problem.out_channels / (t.form == Form::kChannels ? kVector : 1);
    const int64_t fitting = std::min(vectors, kMost / period);
    t.tiles = ceil_div(vectors, fitting >= 16 && fitting < vectors ? fitting / 8 * 8 : fitting);
    t.vectors = ceil_div(vectors, t.tiles);
    t.shares = kMost / (t.vectors * period) * period;
  } else {
    t.tiles = problem.out_channels;
    const int64_t most = kMost / period * period, warps = std::lcm<int64_t>(period, 32);
    t.shares = most;
    if (t.flat && warps <= kMost) {
      t.shares = kMost / warps * warps;
    } else if (!t.flat) {
      t.shares = std::min(most, round_up(ceil_div(needed, ceil_div(needed, most)), period));
    }
  }
  t.shares = std::min(t.shares, needed);
  t.slots = std::max<int64_t>(1, kMost / (t.shares * t.vectors));
}

// How the sum over samples and positions is divided: into walks, and those among blocks. A walk costs its steps and the
// rows before it, a block its set-up and its sums, and the last round of blocks is rarely full. Partial sums are few
// against what is read, and walks not so long that float32 sums suffer.
Tile choose_tile(const Problem& problem, Form form) {
  constexpr int64_t kMaxTurns = 16, kMaxElements = int64_t{16} << 20;
  constexpr double kWalk = 4, kBlock = 24, kAlone = 3;  // in steps; a step that is not one of several that go together
  Tile t;
  t.form = form;
  t.flat = problem.axis[0].is_trivial() && problem.axis[1].is_trivial();
  choose_threads(problem, t);
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const auto bases = [](const Axis& axis) { return axis.base(axis.out() - 1) - axis.base(0) + 1; };
  const int64_t columns = ceil_div(width.out(), t.shares * t.columns), steps = t.flat ? columns : bases(height);
  t.chunks = t.flat ? 1 : columns;
  const int64_t walks = problem.batch * bases(depth) * t.chunks, blocks = depth.stride * height.stride * t.tiles;
  const int64_t partial = problem.weight_elements() + depth.stride * height.stride * problem.out_channels;
  const int64_t most = std::max<int64_t>(1, std::min(kMaxElements, problem.out_elements() / 16) / partial);
  const double resident = 132 * (form == Form::kChannel ? 4 : 2);
  const bool large = depthwise_gradient_window(problem) >= 3;  // not added in steps
  const int64_t together = form == Form::kChannel ? 8 : form == Form::kColumns ? 4 : 2, longest = large ? 24 : 48;
  double best = 1e300;
  for (int64_t segments = ceil_div(steps, longest), tried = 0; tried < 6 && segments <= steps; ++segments, ++tried) {
    const int64_t march = ceil_div(steps, segments), units = walks * ceil_div(steps, march);
    const double alone = double(march % together);
    const double walk = double(march) - alone + kAlone * alone + kWalk;
    const int64_t least = std::min(kMaxTurns, ceil_div(units, t.slots * most));
    for (int64_t turns = std::max<int64_t>(1, least); turns <= kMaxTurns; ++turns) {
      if (turns > 1 && (turns - 1) * t.slots >= units) break;
      const int64_t splits = ceil_div(units, t.slots * turns);
      const double rounds = double(splits * blocks) / resident;
      const double idle = 0.5 * (std::ceil(rounds) - rounds) * std::min(1.0, 2 / rounds);
      const double cost = std::max(1.0, rounds + idle) * (double(turns) * walk + kBlock);
      if (cost >= best) continue;
      best = cost;
      t.march = march, t.segments = ceil_div(steps, march), t.units = units, t.splits = splits;
    }
  }
  return t;
}

// The shapes of columns that there are.
int column_stride(const Problem& problem) {
  const Axis& width = problem.axis[2];
  const int window = depthwise_gradient_window(problem);
  const int stride = static_cast<int>(std::min<int64_t>(width.stride, 4));
  const bool listed = window == 0   ? stride > 1
                      : window == 2 ? stride == 2 || stride == 4
                      : window == 3 ? stride < 3
                      : window == 4 ? stride == 2
                                    : false;
  return listed && width.dilation == 1 && share_period(problem, kVector) <= 16 ? stride : 0;
}

Form choose_form(const Problem& problem, uintptr_t grad_address, uintptr_t input_address) {
  const auto aligned = [&](uintptr_t address) { return address % (kVector * problem.element_size()) == 0; };
  if (problem.layout == Layout::kContiguous) {
    const bool columns = column_stride(problem) > 0 && problem.axis[2].out() % kVector == 0 && aligned(grad_address);
    return columns ? Form::kColumns : Form::kChannel;
  }
  const bool channels = depthwise_gradient_window(problem) != 1 && problem.out_channels == problem.groups &&
                        problem.out_channels % kVector == 0 && aligned(grad_address | input_address);
  return channels ? Form::kChannels : Form::kChannel;
}

int64_t partial_elements(const Problem& problem, const Tile& tile) {
  const int64_t classes = problem.axis[0].stride * problem.axis[1].stride;
  return tile.splits * (problem.weight_elements() + classes * problem.out_channels);
}

DepthwiseWeightParams make_params(const Problem& problem, const Tile& t) {
  DepthwiseWeightParams p{};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.weight_elements = problem.weight_elements();
  p.grad_batch = out.batch, p.grad_channel = out.channel;
  p.input_batch = in.batch, p.input_channel = in.channel;
  p.grad_plane = static_cast<int>(out.axis[0]), p.input_plane = static_cast<int>(in.axis[0]);
  p.grad_row = static_cast<int>(out.axis[1]), p.input_row = static_cast<int>(in.axis[1]);
  p.grad_column = static_cast<int>(out.axis[2]), p.input_column = static_cast<int>(in.axis[2]);
  p.channels = static_cast<int>(problem.out_channels);
  p.by_multiplier = fast_divide(static_cast<int>(problem.out_channels_per_group()));
  p.batch = static_cast<int>(problem.batch);
  p.flat = t.flat;
  p.slots = static_cast<int>(t.slots);
  p.vectors = static_cast<int>(t.vectors);
  p.slot_threads = static_cast<int>(t.shares * t.vectors);
  p.step_out = static_cast<int>(t.shares * t.columns);
  p.step_in = p.step_out / p.axis[2].stride;
  p.period = static_cast<int>(share_period(problem, t.columns) * t.vectors);
  p.march = static_cast<int>(t.march);
  p.units = static_cast<int>(t.units);
  p.splits = static_cast<int>(t.splits);
  p.classes = p.axis[0].stride * p.axis[1].stride;
  p.by_slot_threads = fast_divide(p.slot_threads);
  p.by_vectors = fast_divide(p.vectors);
  p.by_chunk = fast_divide(static_cast<int>(t.chunks));
  p.by_segment = fast_divide(static_cast<int>(t.segments));
  p.by_plane = fast_divide(static_cast<int>(p.axis[0].num_bases()));
  p.by_class = fast_divide(p.classes);
  p.by_height_phase = fast_divide(p.axis[1].stride);
  p.by_tile = fast_divide(static_cast<int>(t.tiles));
  return p;
}

struct Call {
  const DepthwiseWeightParams& p;
  Form form;
  int window;         // of the list
  int column_stride;  // for Form::kColumns
  unsigned blocks;
  cudaStream_t stream;
};

template <typename T, int kWindow, int kVectors, int kStride>
cudaError_t launch(const Call& call) {
  constexpr DepthwiseWindow w = kDepthwiseGradientWindows[kWindow];
  using Shape = DepthwiseWeightShape<T, w.depth, w.height, w.width, kVectors, kStride>;
  const unsigned threads = static_cast<unsigned>(round_up(call.p.slots * call.p.slot_threads, 32));
  depthwise_weight_gradient_kernel<Shape><<<call.blocks, threads, 0, call.stream>>>(call.p);
  return cudaGetLastError();
}

template <typename T, int kWindow>
cudaError_t dispatch_form(const Call& call) {
  const int stride = call.column_stride;
  if (call.form == Form::kChannel) return launch<T, kWindow, 1, 0>(call);
  if constexpr (kWindow != 1) {
    if (call.form == Form::kChannels) return launch<T, kWindow, kVector, 0>(call);
    if constexpr (kWindow == 3) {
      if (stride == 1) return launch<T, kWindow, kVector, 1>(call);
    }
    if (stride == 2) return launch<T, kWindow, kVector, 2>(call);
    if constexpr (kWindow == 0) {
      if (stride == 3) return launch<T, kWindow, kVector, 3>(call);
    }
    if constexpr (kWindow == 0 || kWindow == 2) {
      if (stride == 4) return launch<T, kWindow, kVector, 4>(call);
    }
  }
  return cudaErrorNotSupported;
}

template <typename T>
cudaError_t dispatch_window(const Call& call) {
  switch (call.window) {
    case 0:
      return dispatch_form<T, 0>(call);
    case 1:
      return dispatch_form<T, 1>(call);
    case 2:
      return dispatch_form<T, 2>(call);
    case 3:
      return dispatch_form<T, 3>(call);
    case 4:
      return dispatch_form<T, 4>(call);
    default:
      return cudaErrorNotSupported;
  }
}

template <typename T>
cudaError_t launch_reduction(const DepthwiseWeightParams& p, cudaStream_t stream) {
  const int64_t elements = (p.output != nullptr ? p.weight_elements : 0) + (p.grad_bias != nullptr ? p.channels : 0);
  depthwise_weight_reduction_kernel<T><<<static_cast<unsigned>(ceil_div(elements, kDepthwiseReduceElements)),
                                         kDepthwiseReduceElements * kDepthwiseReduceShares, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int64_t depthwise_weight_gradient_workspace(const Problem& original) {
  if (original.in_elements() == 0 || !depthwise_weight_gradient_refusal(original).empty()) return 0;
  const Problem problem = depthwise_gradient_view(original);
  // Unaligned tensors have another tile.
  const int64_t elements = std::max(partial_elements(problem, choose_tile(problem, choose_form(problem, 1, 1))),
                                    partial_elements(problem, choose_tile(problem, choose_form(problem, 0, 0))));
  return elements * int64_t{sizeof(float)};
}

cudaError_t launch_depthwise_weight_gradient(const Problem& original, const void* grad_output, const void* input,
                                             void* grad_weight, void* grad_bias, void* workspace, cudaStream_t stream) {
  if (!depthwise_weight_gradient_refusal(original).empty()) return cudaErrorNotSupported;
  if (original.in_elements() == 0) return cudaErrorNotSupported;
  if (grad_weight == nullptr && grad_bias == nullptr) return cudaSuccess;
  const Problem problem = depthwise_gradient_view(original);
  const Form form = choose_form(problem, reinterpret_cast<uintptr_t>(grad_output), reinterpret_cast<uintptr_t>(input));
  const Tile tile = choose_tile(problem, form);
  DepthwiseWeightParams p = make_params(problem, tile);
  p.grad = grad_output, p.input = input, p.output = grad_weight, p.grad_bias = grad_bias;
  p.partial = static_cast<float*>(workspace);
  p.bias_partial = p.partial + tile.splits * p.weight_elements;
  const int64_t blocks = tile.splits * tile.tiles * p.classes;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  const Call call{
      p, form, depthwise_gradient_window(problem), column_stride(problem), static_cast<unsigned>(blocks), stream};
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const cudaError_t error = dispatch_window<T>(call);
    return error == cudaSuccess ? launch_reduction<T>(p, stream) : error;
  });
}

}  // namespace fastconvt::cuda
