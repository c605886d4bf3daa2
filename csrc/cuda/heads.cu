// The head family, host side: parameters of a problem and the template instance that runs it.
#include "heads.cuh"

#include <algorithm>

#include "dispatch.h"
#include "heads_box.h"
#include "heads_window.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool heads_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

HeadsAxis heads_axis(const Axis& axis, const HeadsSpan& span, int64_t tap_pairs, int64_t unit) {
  HeadsAxis a{};
  a.in = static_cast<int>(axis.in), a.out = static_cast<int>(axis.out());
  a.stride = static_cast<int>(axis.stride), a.padding = static_cast<int>(axis.padding);
  a.kernel = static_cast<int>(axis.kernel), a.dilation = static_cast<int>(axis.dilation);
  a.first = static_cast<int>(span.first), a.end = static_cast<int>(span.end);
  a.low = static_cast<int>(span.low), a.high = static_cast<int>(span.high);
  a.places = static_cast<int>(span.places), a.lead = static_cast<int>(span.lead);
  a.tiles = static_cast<int>(span.tiles), a.before = static_cast<int>(span.before);
  a.held = static_cast<int>(span.held), a.inputs = static_cast<int>(span.inputs);
  a.tap_step = static_cast<int>(axis.tap_step());
  a.tap_pairs = static_cast<int>(tap_pairs);
  a.unit = static_cast<int>(unit);
  return a;
}

// The events of the march: its taps, and the phases without taps. Every output coordinate has one that emits it.
void set_march(const Axis& march, HeadsParams& p) {
  const int stride = static_cast<int>(march.stride), padding = static_cast<int>(march.padding);
  const int kernel = static_cast<int>(march.kernel), tap_step = static_cast<int>(march.tap_step());
  for (int tap = 0; tap < kernel; ++tap) {
    p.event[p.events++] = {static_cast<int>(tap * march.dilation) - padding, static_cast<short>(tap), tap < tap_step,
                           tap + tap_step < kernel};
  }
  for (int phase = 0; phase < stride; ++phase) {
    if (march.first_tap(phase) == march.kernel) p.event[p.events++] = {phase - padding, -1, true, false};
  }
  const int out = static_cast<int>(march.out());
  int first = INT32_MAX, last = INT32_MIN;
  const auto floor_div = [](int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); };
  for (int i = 0; i < p.events; ++i) {
    if (!p.event[i].emits) continue;
    const int from = -floor_div(p.event[i].shift, stride), to = floor_div(out - 1 - p.event[i].shift, stride);
    if (from <= to) first = std::min(first, from), last = std::max(last, to);
  }
  p.first_step = first, p.steps_of_march = last - first + 1;
  p.march_in = static_cast<int>(march.in), p.march_out = out, p.march_stride = stride;
  p.march_turns = static_cast<int>(march.dilation * march.tap_step() / march.stride);
  p.march_warm = p.march_turns * ((kernel + tap_step - 1) / tap_step - 1);
}

HeadsParams heads_params(const Problem& problem, const HeadsTile& tile, const void* input, const void* weight,
                         const void* bias, void* output) {
  const Axis &march = problem.axis[tile.march], &mid = problem.axis[tile.mid], &width = problem.axis[2];
  const int64_t size = problem.element_size(), taps = problem.kernel_positions();
  HeadsParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.march = tile.march, p.mid = tile.mid;
  const int64_t pairs_of[2] = {problem.axis[1].kernel * width.kernel, width.kernel};
  p.of_mid = heads_axis(mid, tile.of_mid, pairs_of[tile.mid], 1);
  p.of_width = heads_axis(width, tile.of_width, 1, 4);
  p.march_pairs = static_cast<int>(pairs_of[tile.march]);
  p.pitch = static_cast<int>(tile.pitch);
  const auto back = [](const Axis& a) { return static_cast<int>(a.dilation * a.tap_step() / a.stride); };
  p.of_mid.fold_step = p.of_mid.tap_step * p.of_mid.tap_pairs * p.pitch - back(mid) * p.of_width.held;
  p.of_width.fold_step = p.of_width.tap_step * p.pitch - back(width);
  p.most_taps = (p.of_width.kernel - 1) / p.of_width.tap_step + 1;
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  set_march(march, p);
  p.batch = static_cast<int>(problem.batch), p.box_batch = static_cast<int>(tile.batch);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.groups = static_cast<int>(problem.groups);
  p.channels = static_cast<int>(tile.channels);
  p.taps = static_cast<int>(taps), p.pairs = static_cast<int>(tile.channels * taps);
  p.steps = static_cast<int>(tile.steps);
  p.box_pitch = p.of_mid.held * p.of_width.held;
  p.mid_outputs = (p.of_mid.places + p.of_mid.lead) * p.of_mid.stride;
  p.rows = static_cast<int>(tile.rows), p.chunks = static_cast<int>(tile.chunks);
  p.width_quads = p.of_width.inputs / 4;
  const auto taps_of = [](const Axis& a, int64_t e, int64_t before, int64_t tap_floats, int64_t position_floats) {
    const int64_t first = a.first_tap(e % a.stride), position = before + (e - first * a.dilation) / a.stride;
    if (first == a.kernel) return HeadsTaps{0, 0};
    return HeadsTaps{static_cast<int>(first * tap_floats + position * position_floats),
                     static_cast<int>(a.num_taps(e % a.stride))};
  };
  for (int e = 0; e < p.of_mid.stride; ++e) {
    p.mid_taps[e] = taps_of(mid, e, p.of_mid.before, int64_t{p.of_mid.tap_pairs} * p.pitch, p.of_width.held);
  }
  for (int e = 0; e < p.of_width.stride; ++e) {
    p.width_taps[e] = taps_of(width, e + width.padding, p.of_width.before, p.pitch, 1);
  }
  p.channels_last = problem.layout == Layout::kChannelsLast;
  p.whole_rows = p.channels == problem.out_channels;
  p.row_vectors = p.channels * size % 16 == 0 && problem.out_channels * size % 16 == 0 && heads_aligned(output, 16);
  const int64_t lane_channels = 8 / size;
  p.pixel_vectors = p.channels_last && problem.in_channels % lane_channels == 0 && p.group_in % lane_channels == 0 &&
                    heads_aligned(input, 8);
  p.products = static_cast<int>(tile.products), p.pending = static_cast<int>(tile.pending);
  p.outputs = static_cast<int>(tile.outputs), p.row_bytes = static_cast<int>(tile.row_bytes);
  p.views = static_cast<int>(tile.views), p.bias_terms = static_cast<int>(tile.bias);
  p.pending_turn = p.rows * p.channels * p.chunks * 32 * p.of_width.stride;
  p.pending_row = p.march_turns * p.pending_turn;
  return p;
}

// Cuts the march, so that all blocks end at about the same time, and returns how many there are.
int cut_march(HeadsParams& p, int resident) {
  const int boxes = p.of_mid.tiles * p.of_width.tiles * ((p.batch + p.box_batch - 1) / p.box_batch);
  // A block keeps its group.
  const int grid = resident > p.groups ? resident - resident % p.groups : p.groups;
  double least = 0;
  for (int segments = 1; segments <= std::min(p.steps_of_march, 64); ++segments) {
    const double turns = (int64_t{boxes} * segments * p.groups + grid - 1) / grid;
    const double cost = turns * ((p.steps_of_march + segments - 1) / segments + p.march_warm);
    if (least == 0 || cost < least) least = cost, p.segments = segments;
  }
  p.segment_steps = (p.steps_of_march + p.segments - 1) / p.segments;
  p.segments = (p.steps_of_march + p.segment_steps - 1) / p.segment_steps;
  p.items = boxes * p.segments * p.groups;
  p.by_groups = fast_divide(p.groups);
  p.by_width_tiles = fast_divide(p.of_width.tiles), p.by_mid_tiles = fast_divide(p.of_mid.tiles);
  p.by_segments = fast_divide(p.segments);
  p.by_width_quads = fast_divide(std::max(1, p.width_quads)), p.by_rows = fast_divide(std::max(1, p.of_mid.inputs));
  p.by_chunks = fast_divide(p.chunks), p.by_mid_outputs = fast_divide(p.mid_outputs);
  p.by_mid_stride = fast_divide(p.of_mid.stride);
  return std::min(grid, p.items);
}

template <class Traits>
cudaError_t launch(HeadsParams& p, const HeadsTile& tile, cudaStream_t stream) {
  const int shared = static_cast<int>(tile.shared_bytes), threads = static_cast<int>(tile.warps) * 32;
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(heads_kernel<Traits>, threads, shared, kHeadsShared, blocks);
  if (error != cudaSuccess) return error;
  const int grid = cut_march(p, std::max(1, blocks));
  heads_kernel<Traits><<<grid, threads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, HeadsPrecision kPrecision, int kRowTiles = 1>
cudaError_t dispatch_heads(HeadsParams& p, const HeadsTile& tile, cudaStream_t stream) {
  if constexpr (kRowTiles > kHeadsMaxRowTiles) {
    return cudaErrorNotSupported;
  } else {
    if (tile.row_tiles != kRowTiles) return dispatch_heads<T, kPrecision, kRowTiles + 1>(p, tile, stream);
    const bool planes = !p.channels_last && p.of_width.in % 4 == 0 && heads_aligned(p.input, 4 * sizeof(T));
    if (planes) return launch<HeadsTraits<T, kPrecision, kRowTiles, true>>(p, tile, stream);
    return launch<HeadsTraits<T, kPrecision, kRowTiles, false>>(p, tile, stream);
  }
}

bool has_capability_90() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace

cudaError_t launch_heads(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                         cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  const HeadsChoice choice = heads_choose(problem, has_capability_90());
  if (!choice.refusal.empty()) return cudaErrorNotSupported;
  if (choice.way == HeadsWay::kWindows) return launch_heads_window(problem, input, weight, bias, output, stream);
  if (choice.way == HeadsWay::kBox) return launch_heads_box(problem, input, weight, bias, output, stream);
  const HeadsTile& tile = choice.tile;
  HeadsParams p = heads_params(problem, tile, input, weight, bias, output);
  return dispatch_precision<HeadsPrecision>(problem, [&](auto tag, auto precision) {
    return dispatch_heads<typename decltype(tag)::type, decltype(precision)::value>(p, tile, stream);
  });
}

}  // namespace fastconvt::cuda
