// Heads by windows, host side: parameters of a problem and the template instance that runs it.
#include "heads_window.cuh"

#include <algorithm>

#include "dispatch.h"
#include "heads_window.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

HeadsWindowParams window_params(const Problem& problem, const HeadsWindow& tile, const void* input, const void* weight,
                                const void* bias, void* output) {
  const int64_t size = problem.element_size();
  HeadsWindowParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  p.in = input_strides(problem), p.out = output_strides(problem);
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = axis_params(problem.axis[a]);
    p.size[a] = static_cast<int>(problem.axis[a].in), p.out_size[a] = static_cast<int>(problem.axis[a].out());
  }
  p.batch = static_cast<int>(problem.batch), p.groups = static_cast<int>(problem.groups);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.channels = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.combos = static_cast<int>(tile.combos), p.steps = static_cast<int>(tile.steps);
  p.first_base = static_cast<int>(tile.first_base), p.end_base = static_cast<int>(tile.end_base);
  p.first_row = static_cast<int>(tile.first_row), p.end_row = static_cast<int>(tile.end_row);
  p.lead = static_cast<int>(tile.lead), p.shift = static_cast<int>(tile.shift);
  p.first_column = static_cast<int>(tile.first_column);
  p.units = static_cast<int>(tile.units), p.mid_tiles = static_cast<int>(tile.mid_tiles);
  const bool partial = (tile.end_row - tile.first_row) % kHeadsWindowRows != 0;
  p.main_tiles = p.mid_tiles - (p.mid_tiles > 1 && partial ? 1 : 0);
  p.stacked = p.main_tiles < p.mid_tiles && p.end_row - 1 == p.size[1] && p.batch > 1 &&
              (p.end_row - p.first_row) % kHeadsWindowRows == 1;
  p.warm = tile.marches ? 1 : 0;
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const int64_t vector = channels_last ? 16 : 4 * size;
  p.vectors =
      is_aligned(input, vector) && (channels_last ? problem.in_channels * size % 16 == 0 && p.group_in * size % 16 == 0
                                                  : problem.axis[2].in % 4 == 0);
  p.wide = !channels_last && is_aligned(input, 16) && problem.axis[2].in * size % 16 == 0;
  p.rows_of_pixels = p.out.axis[2] > 1;
  p.whole_pixels = p.channels == problem.out_channels;
  const int fragment = problem.dtype == DType::kFloat32 && !problem.allow_tf32 ? 512 : 256;
  p.table = p.steps * 8 * fragment;
  p.slots = p.table + kHeadsWindowColumns * static_cast<int>(sizeof(HeadsWindowColumn));
  const int slot = channels_last ? kHeadsWindowPixelsSlot : kHeadsWindowPlanesSlot;
  p.staged = p.slots + kHeadsWindowWarps * 2 * (kHeadsWindowRows + 1) * slot;
  p.staged_row = static_cast<int>(2 * kHeadsWindowUnit * p.channels * size + 16);
  p.staged_warp =
      channels_last
          ? static_cast<int>(round_up(p.staged_row * problem.axis[0].stride * problem.axis[1].stride, int64_t{16}))
          : 0;
  return p;
}

// Cuts the first axis into segments and returns the blocks of a group.
int cut_bases(HeadsWindowParams& p, const HeadsWindow& tile, int resident) {
  const int bases = p.end_base - p.first_base, blocks = std::max(1, resident / p.groups);
  double turns = 0;
  p.segment_bases = static_cast<int>(heads_window_segment(tile, p.batch, int64_t{blocks} * kHeadsWindowWarps, turns));
  p.segments = ceil_div(bases, p.segment_bases);
  const int entries = p.stacked ? ceil_div(p.batch, kHeadsWindowRows) : p.batch;
  p.main_items = p.units * p.main_tiles * p.batch * p.segments;
  p.items = p.main_items + (p.mid_tiles - p.main_tiles) * p.units * entries * p.segments;
  p.by_groups = fast_divide(p.groups), p.by_units = fast_divide(p.units), p.by_tiles = fast_divide(p.main_tiles);
  p.by_segments = fast_divide(p.segments);
  p.by_channels = fast_divide(p.channels), p.by_mid_stride = fast_divide(p.axis[1].stride);
  return std::min(blocks, ceil_div(p.items, kHeadsWindowWarps));
}

template <class Traits>
cudaError_t launch(HeadsWindowParams& p, const HeadsWindow& tile, cudaStream_t stream) {
  constexpr int kThreads = kHeadsWindowWarps * 32;
  const int shared = static_cast<int>(tile.shared_bytes);
  int blocks = 0;
  const auto kernel = p.rectify.on ? heads_window_kernel<Traits, true> : heads_window_kernel<Traits, false>;
  const cudaError_t error = count_resident_blocks(kernel, kThreads, shared, kHeadsWindowShared, blocks);
  if (error != cudaSuccess) return error;
  const int grid = cut_bases(p, tile, blocks) * p.groups;
  kernel<<<grid, kThreads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, HeadsPrecision kPrecision>
cudaError_t dispatch_window(HeadsWindowParams& p, const HeadsWindow& tile, bool pixels, cudaStream_t stream) {
  if (tile.marches) {
    if (pixels) return launch<HeadsWindowTraits<T, kPrecision, true, true>>(p, tile, stream);
    return launch<HeadsWindowTraits<T, kPrecision, true, false>>(p, tile, stream);
  }
  if (pixels) return launch<HeadsWindowTraits<T, kPrecision, false, true>>(p, tile, stream);
  return launch<HeadsWindowTraits<T, kPrecision, false, false>>(p, tile, stream);
}

}  // namespace

cudaError_t launch_heads_window(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!heads_window_refusal(problem).empty()) return cudaErrorNotSupported;
  const HeadsWindow tile = heads_window(problem);
  HeadsWindowParams p = window_params(problem, tile, input, weight, bias, output);
  const bool pixels = problem.layout == Layout::kChannelsLast;
  return dispatch_precision<HeadsPrecision>(problem, [&](auto tag, auto precision) {
    return dispatch_window<typename decltype(tag)::type, decltype(precision)::value>(p, tile, pixels, stream);
  });
}

}  // namespace fastconvt::cuda
