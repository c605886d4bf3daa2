// The pixel-shuffle family, host side: parameters of a problem and the template instance that runs it.
#include "pixel_shuffle.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

// The largest of 16, 8, ... bytes, at least `least`, that divides all.
int pixel_shuffle_bytes(int least, int64_t a, int64_t b, const void* pointer) {
  int bytes = 16;
  while (bytes > least && (a % bytes != 0 || b % bytes != 0 || reinterpret_cast<uintptr_t>(pointer) % bytes != 0)) {
    bytes /= 2;
  }
  return bytes;
}

// How to store, and by how many positions.
void set_store(const Problem& problem, PixelShuffleParams& p) {
  const Axis& width = problem.axis[2];
  const int64_t size = problem.element_size(), kernel = width.kernel;
  p.store = PixelShuffleStore::kElements, p.piece = 1;
  if (problem.layout == Layout::kChannelsLast) {
    // Neighbours in the order are neighbours in memory in runs of that many.
    const bool whole = p.tile.channels == problem.out_channels;
    const int64_t run = whole ? kernel * p.tile.channels : p.tile.channels;
    const int64_t vector = 16 / size;
    const bool fits = run % vector == 0 && (whole || (problem.out_channels % vector == 0 && p.group_out % vector == 0));
    if (reinterpret_cast<uintptr_t>(p.output) % 16 != 0) return;
    if (fits) {
      p.store = PixelShuffleStore::kChannels;
    } else if (p.tile.staged_bytes > 0) {
      p.store = PixelShuffleStore::kRuns;
    }
    return;
  }
  if (kernel != 2 && kernel != 4) return;
  const int64_t taps = kernel * size;
  if (reinterpret_cast<uintptr_t>(p.output) % taps != 0) return;
  p.store = kernel == 2 ? PixelShuffleStore::kPairs : PixelShuffleStore::kQuads;
  while (2 * p.piece * taps <= 16 && width.in % (2 * p.piece) == 0 &&
         reinterpret_cast<uintptr_t>(p.output) % (2 * p.piece * taps) == 0) {
    p.piece *= 2;
  }
}

PixelShuffleParams pixel_shuffle_params(const Problem& problem, const PixelShuffleTile& tile, const void* input,
                                        const void* weight, const void* bias, void* output) {
  const Axis *axis = problem.axis.data(), &height = axis[1], &width = axis[2];
  const int64_t size = problem.element_size(), taps = problem.kernel_positions();
  const Strides in = input_strides(problem), out = output_strides(problem);
  PixelShuffleParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  p.tile = tile;
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(taps);
  p.kernel_height = static_cast<int>(height.kernel), p.kernel_width = static_cast<int>(width.kernel);
  p.positions = static_cast<int>(problem.in_positions());
  p.total = static_cast<int>(problem.batch * problem.in_positions());
  p.tiles = (p.total + tile.positions - 1) / tile.positions;
  p.chunks_of_group = (p.group_out + tile.channels - 1) / tile.channels;
  p.chunks = static_cast<int>(p.chunks_of_group * problem.groups);
  p.input_batch = in.batch, p.output_batch = out.batch;
  p.input_pixel = static_cast<int>(problem.in_channels);
  p.output_channel = static_cast<int>(out.channel);
  for (int a = 0; a < 3; ++a) {
    p.output_axis[a] = static_cast<int>(out.axis[a]);
    p.place_axis[a] = static_cast<int>(out.axis[a] * axis[a].stride);
  }
  p.by_positions = fast_divide(p.positions);
  p.by_width = fast_divide(static_cast<int>(width.in)), p.by_height = fast_divide(static_cast<int>(height.in));
  p.by_taps = fast_divide(p.taps);
  p.by_kernel_width = fast_divide(p.kernel_width), p.by_kernel_height = fast_divide(p.kernel_height);
  p.by_chunks = fast_divide(p.chunks), p.by_chunks_of_group = fast_divide(p.chunks_of_group);
  p.by_run = fast_divide(p.kernel_width * tile.channels);
  const int64_t run = problem.layout == Layout::kChannelsLast ? problem.in_channels : p.positions;
  const int64_t part = problem.layout == Layout::kChannelsLast ? p.group_in : p.positions;
  p.input_copy = pixel_shuffle_bytes(static_cast<int>(size), run * size, part * size, input);
  p.weight_copy =
      pixel_shuffle_bytes(static_cast<int>(size), p.group_out * taps * size, tile.channels * taps * size, weight);
  const auto columns = [](int64_t bytes, int copy) {
    int n = 1;
    while (n * copy < bytes) n *= 2;
    return n;
  };
  p.input_columns =
      columns(problem.layout == Layout::kChannelsLast ? tile.stage_steps * 32 : tile.positions * size, p.input_copy);
  p.weight_columns = columns(tile.tiles_m * 16 * size, p.weight_copy);
  p.by_channels = fast_divide(tile.channels);
  set_store(problem, p);
  return p;
}

template <class Traits>
cudaError_t launch(const PixelShuffleParams& p, cudaStream_t stream) {
  using T = typename Traits::T;
  int blocks = 0;
  const int threads = p.tile.warps * 32 + kPixelShuffleProducers;
  const auto kernel = pixel_shuffle_kernel<Traits>;
  const cudaError_t error = count_resident_blocks(kernel, threads, p.tile.shared_bytes, kPixelShuffleShared, blocks);
  if (error != cudaSuccess) return error;
  const int streams = std::min(p.tiles, std::max(1, blocks / p.chunks));
  kernel<<<streams * p.chunks, threads, p.tile.shared_bytes, stream>>>(p, {static_cast<const T*>(p.bias)});
  return cudaGetLastError();
}

template <typename T, PixelShufflePrecision kPrecision, bool kChannelsLast>
cudaError_t dispatch_weights(const PixelShuffleParams& p, cudaStream_t stream) {
  if (p.tile.streamed) return launch<PixelShuffleTraits<T, kPrecision, kChannelsLast, true>>(p, stream);
  return launch<PixelShuffleTraits<T, kPrecision, kChannelsLast, false>>(p, stream);
}

template <typename T, PixelShufflePrecision kPrecision>
cudaError_t dispatch_layout(const PixelShuffleParams& p, Layout layout, cudaStream_t stream) {
  if (layout == Layout::kChannelsLast) return dispatch_weights<T, kPrecision, true>(p, stream);
  return dispatch_weights<T, kPrecision, false>(p, stream);
}

cudaError_t launch_pixel_shuffle_tile(const Problem& problem, const PixelShuffleTile& tile, const void* input,
                                      const void* weight, const void* bias, void* output, cudaStream_t stream) {
  const PixelShuffleParams p = pixel_shuffle_params(problem, tile, input, weight, bias, output);
  return dispatch_precision<PixelShufflePrecision>(problem, [&](auto tag, auto precision) {
    return dispatch_layout<typename decltype(tag)::type, decltype(precision)::value>(p, problem.layout, stream);
  });
}

}  // namespace

cudaError_t launch_pixel_shuffle(const Problem& problem, const void* input, const void* weight, const void* bias,
                                 void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  PixelShuffleTile tile;
  double cost = 0;
  if (!pixel_shuffle_refusal(problem, tile, cost).empty()) return cudaErrorNotSupported;
  return launch_pixel_shuffle_tile(problem, tile, input, weight, bias, output, stream);
}

}  // namespace fastconvt::cuda
