// Heads in one turn, host side: parameters of a problem and the template instance that runs it.
#include "heads_box.h"

#include <algorithm>

#include "dispatch.h"
#include "heads_box.cuh"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool box_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

HeadsBoxParams box_params(const Problem& problem, const HeadsBox& box) {
  const Problem view = heads_box_view(problem);
  HeadsBoxParams p{};
  p.in = input_strides(problem), p.out = output_strides(problem);
  if (problem.axis[0].is_trivial()) p.in.axis[0] = p.in.batch, p.out.axis[0] = p.out.batch;
  p.pitch = static_cast<int>(box.pitch);
  int pairs = 1, positions = 1;
  for (int a = 2; a >= 0; --a) {
    const HeadsBoxSpan& span = box.axis[a];
    HeadsBoxAxis& of = p.of[a];
    of.axis = axis_params(view.axis[a]);
    of.outputs = static_cast<int>(span.places * view.axis[a].stride);
    of.low = static_cast<int>(span.low), of.high = static_cast<int>(span.high);
    of.held = static_cast<int>(span.held), of.tiles = static_cast<int>(span.tiles);
    for (int phase = 0; phase < of.axis.stride; ++phase) {
      const int tap = of.axis.first_tap(phase);
      if (tap < of.axis.kernel) {
        of.taps[phase] = {tap * pairs * p.pitch * 4, of.axis.offset(phase, tap), of.axis.num_taps(phase)};
      }
    }
    of.tap_bytes = of.axis.tap_step() * pairs * p.pitch * 4, of.position_bytes = positions * 4;
    pairs *= of.axis.kernel, positions *= of.held;
    p.by_tiles[a] = fast_divide(of.tiles), p.by_held[a] = fast_divide(of.held);
    p.by_stride[a] = fast_divide(of.axis.stride);
  }
  p.in_channels = static_cast<int>(view.in_channels), p.out_channels = static_cast<int>(view.out_channels);
  p.taps = pairs, p.pairs = pairs * p.out_channels;
  p.steps = static_cast<int>(box.steps);
  p.positions = positions;
  p.channel_bytes = p.taps * p.pitch * 4, p.zeros = p.pairs * p.pitch * 4;
  p.two_taps = p.of[2].axis.kernel > p.of[2].axis.tap_step();
  p.channels_last = view.layout == Layout::kChannelsLast;
  p.row_elements = static_cast<int>(box.row_elements);
  p.row_batches = ceil_div(p.of[0].outputs * p.of[1].outputs, kHeadsBoxRows);
  p.by_batches = fast_divide(p.row_batches), p.by_rows = fast_divide(p.of[1].outputs);
  p.by_places = fast_divide(p.of[1].outputs / p.of[1].axis.stride);
  p.by_channels = fast_divide(p.out_channels), p.by_pairs = fast_divide(p.pairs);
  p.weights = static_cast<int>(box.weights), p.slots = static_cast<int>(box.slots),
  p.tables = static_cast<int>(box.tables);
  return p;
}

template <class Traits>
cudaError_t launch(const HeadsBoxParams& p, const HeadsBox& box, cudaStream_t stream) {
  const int shared = static_cast<int>(box.shared_bytes), threads = Traits::kWarps * 32;
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(heads_box_kernel<Traits>, threads, shared, kHeadsBoxShared, blocks);
  if (error != cudaSuccess) return error;
  heads_box_kernel<Traits><<<static_cast<unsigned>(box.blocks), threads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, HeadsPrecision kPrecision, int kColumns>
cudaError_t dispatch_mode(const HeadsBoxParams& p, const HeadsBox& box, cudaStream_t stream) {
  switch (box.mode) {
    case HeadsBoxMode::kPlanes:
      return launch<HeadsBoxTraits<T, kPrecision, kColumns, HeadsBoxMode::kPlanes>>(p, box, stream);
    case HeadsBoxMode::kPixels:
      return launch<HeadsBoxTraits<T, kPrecision, kColumns, HeadsBoxMode::kPixels>>(p, box, stream);
    default:
      return launch<HeadsBoxTraits<T, kPrecision, kColumns, HeadsBoxMode::kElements>>(p, box, stream);
  }
}

}  // namespace

cudaError_t launch_heads_box(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!heads_box_refusal(problem).empty()) return cudaErrorNotSupported;
  const HeadsBox box = heads_box(problem, box_aligned(input, 16));
  if (box.blocks == 0) return cudaErrorNotSupported;
  HeadsBoxParams p = box_params(problem, box);
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  const int64_t row = problem.axis[2].out() * (p.channels_last ? problem.out_channels : 1);
  p.element_pairs = row % 2 == 0 && box_aligned(output, 2 * problem.element_size());
  return dispatch_precision<HeadsPrecision>(problem, [&](auto tag, auto precision) {
    using T = typename decltype(tag)::type;
    constexpr HeadsPrecision kPrecision = decltype(precision)::value;
    return box.columns == 32 ? dispatch_mode<T, kPrecision, 32>(p, box, stream)
                             : dispatch_mode<T, kPrecision, kHeadsBoxPairs>(p, box, stream);
  });
}

}  // namespace fastconvt::cuda
