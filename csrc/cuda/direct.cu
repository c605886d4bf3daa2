// The direct family, host side: how a problem is divided, and the template instance that runs it.
#include "../core/direct.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "direct.cuh"
#include "direct_mma.cuh"
#include "direct_mma_pixels.cuh"
#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int64_t kMaxThreads = int64_t{1} << 30;  // of one tile of quads, in one launch
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

void set_problem(const Problem& problem, DirectParams& p) {
  set_march_tensors(problem, p);
  p.in_channels = static_cast<int>(problem.in_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels_per_group());
  p.quads_per_group = static_cast<int>(direct_quads(problem));
  p.quads = static_cast<int>(p.quads_per_group * problem.groups);
  p.first_row = static_cast<int>(p.axis[1].first_base()), p.num_rows = static_cast<int>(p.axis[1].num_bases());
  p.first_plane = static_cast<int>(p.axis[0].first_base());
  const Axis& width = problem.axis[2];
  p.front = static_cast<int>(width.padding % width.stride);
  p.first_place = static_cast<int>(direct_first(width.stride, width.kernel, width.dilation, width.padding));
  p.first_input = static_cast<int>(width.padding / width.stride) + p.first_place;
  p.mask = direct_mask(kDirectWindows[direct_window(problem)].width, width.stride, width.kernel, width.dilation,
                       width.padding);
}

// The taps of depth and height, in the order of their phases.
void set_taps(DirectParams& p, int unit) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1];
  int count = 0, place = 0;
  for (int rz = 0; rz < depth.stride; ++rz) {
    for (int ry = 0; ry < height.stride; ++ry) {
      p.places[place++] = {rz, ry, rz * p.output_plane + ry * p.output_row, count};
      for (int tz = depth.first_tap(rz); tz < depth.kernel; tz += depth.tap_step()) {
        for (int ty = height.first_tap(ry); ty < height.kernel; ty += height.tap_step()) {
          const int z = depth.offset(rz, tz), y = height.offset(ry, ty);
          p.taps[count++] = {z, y, z * p.input_plane + y * p.input_row,
                             (tz * height.kernel + ty) * p.in_channels * unit};
        }
      }
    }
  }
  p.places[place].begin = count;
  p.num_places = place;
}

// Whether a thread may march with `height` rows of inputs in registers.
bool set_window(int height, DirectParams& p) {
  int first = 0, last = -(1 << 30);
  for (int t = 0; t < p.places[p.num_places].begin; ++t) {
    first = std::min(first, p.taps[t].row), last = std::max(last, p.taps[t].row);
  }
  const AxisParams& depth = p.axis[0];
  if (p.in_channels > 4 || depth.kernel > 1 || depth.stride > 1 || depth.padding > 0 || depth.in != depth.out ||
      last - first >= height) {
    return false;
  }
  p.window_row = first;
  std::fill(p.window_weight, p.window_weight + p.num_places * height, -1);
  for (int ry = 0; ry < p.num_places; ++ry) {
    for (int t = p.places[ry].begin; t < p.places[ry + 1].begin; ++t) {
      p.window_weight[ry * height + p.taps[t].row - first] = p.taps[t].weight;
    }
  }
  return true;
}

void set_division(const Problem& problem, int vector, int count, DirectParams& p) {
  p.columns = static_cast<int>(ceil_div(p.axis[2].out, int64_t{vector} * count));
  if (problem.layout == Layout::kChannelsLast) p.columns = round_up(p.columns, 4);
  p.column_out = p.columns * vector;
  p.column_in = p.column_out / p.axis[2].stride;
  p.quad_size = static_cast<int>(direct_quad_bytes(problem) / 4);
  p.bias_offset = p.quad_size - kDirectChannels;
  p.quad_tile = 1;
  if (problem.layout == Layout::kChannelsLast) {
    p.quad_size = (p.quad_size / 4 | 1) * 4;  // keeps banks apart
    const int most = std::max(1, std::min(8, static_cast<int>(kDirectTable / 4 / p.quad_size)));
    for (int tile = 2; tile <= most; ++tile) {
      if (round_up(p.quads, tile) <= round_up(p.quads, p.quad_tile)) p.quad_tile = tile;
    }
  }
  p.table_size = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel * p.in_channels * kDirectChannels;
  p.by_quad_tile = fast_divide(p.quad_tile);
  p.by_columns = fast_divide(p.columns);
  p.by_plane = fast_divide(static_cast<int>(p.axis[0].num_bases()));
  p.by_quads_per_group = fast_divide(p.quads_per_group);
  p.by_filter_row = fast_divide(p.axis[2].kernel);
  p.by_tap_rows = fast_divide(p.axis[0].kernel * p.axis[1].kernel);
  p.by_in_channels = fast_divide(p.in_channels);
  for (int a = 0; a < 2; ++a) p.by_dilation[a] = fast_divide(p.axis[a + 1].dilation);
}

void set_alignment(const Problem& problem, int vector, DirectParams& p) {
  const auto aligned = [&](const void* pointer, int64_t elements) {
    return reinterpret_cast<uintptr_t>(pointer) % (elements * problem.element_size()) == 0;
  };
  if (problem.layout == Layout::kChannelsLast) {
    p.input_vectors = aligned(p.input, 4) && p.in_channels % 4 == 0;
    p.output_vectors = aligned(p.output, 4) && p.out_channels % 4 == 0;
    p.output_runs = problem.groups == 1 && problem.out_channels == 3 && aligned(p.output, 4) && p.axis[2].out % 4 == 0;
  } else {
    p.output_vectors = aligned(p.output, vector) && p.axis[2].out % vector == 0;
  }
}

// Bases of the height that a worker, a thread or a warp, makes: more share its set-up, which costs as much as `setup`
// of them, fewer fill the GPU better. A multiprocessor is bound by what its blocks do in all, unless there are fewer
// than `least`, too few to hide latencies; long marches lie far apart in memory.
int choose_march(int num_rows, double blocks_per_segment, double setup, double least) {
  int best = 1;
  double best_cost = 1e300;
  for (int most = 1; most <= 64; ++most) {
    const int64_t segments = ceil_div(num_rows, most);
    const int march = static_cast<int>(ceil_div(num_rows, segments));
    const double blocks = std::ceil(blocks_per_segment * double(segments) / 132);  // of an H200's multiprocessor
    const double cost = std::max(blocks, least) * (setup + march) * (1 + 0.01 * march);
    if (cost < best_cost) best = march, best_cost = cost;
  }
  return best;
}

// The order of blocks.
void set_tiles(const Problem& problem, int64_t tiles, DirectParams& p) {
  p.tiles_first = problem.layout == Layout::kChannelsLast;
  p.by_tiles = fast_divide(static_cast<int>(tiles));
}

// kHeight: rows of inputs in registers; 0: none, and any taps.
template <class Shape, int kHeight, bool kAhead, int kThreads, int kBlocks>
cudaError_t launch(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  using T = typename Shape::T;
  set_taps(p, Shape::kUnit);
  if (kHeight > 0 && !set_window(kHeight, p)) return cudaErrorNotSupported;
  set_division(problem, Shape::kVector, Shape::kCount, p);
  set_alignment(problem, Shape::kVector, p);
  const int64_t planes = p.axis[0].num_bases(), tiles = ceil_div(p.quads, p.quad_tile);
  const double row_blocks = double(p.columns) * double(planes * problem.batch * p.quad_tile) / kThreads * double(tiles);
  constexpr bool kPixels = Shape::kChannelsLast;
  p.march = choose_march(p.num_rows, row_blocks, kPixels ? 1.5 : 0.4, kPixels ? 4 : 2.5);
  set_tiles(problem, tiles, p);
  const int64_t segments = ceil_div(p.num_rows, p.march);
  p.by_segment = fast_divide(static_cast<int>(segments));
  const int64_t sample = p.columns * segments * planes * p.quad_tile;
  const int64_t slice =
      std::max<int64_t>(1, std::min({problem.batch, kMaxThreads / sample, kMaxGrid / tiles * kThreads / sample}));
  const size_t shared = size_t(p.quad_tile) * p.quad_size * 4;
  const auto kernel = [&] {
    if constexpr (kHeight > 0) {
      return direct_march_kernel<Shape, kHeight, kAhead, kThreads, kBlocks>;
    } else {
      return p.rectify.on ? direct_kernel<Shape, true, kThreads, kBlocks>
                          : direct_kernel<Shape, false, kThreads, kBlocks>;
    }
  }();
  for (int64_t done = 0; done < problem.batch; done += slice) {
    p.batch = static_cast<int>(std::min(slice, problem.batch - done));
    const int64_t threads = sample * p.batch;
    const int64_t block = std::min<int64_t>(kThreads, round_up(threads, 32));
    const int64_t chunks = ceil_div(threads, block);
    if (chunks * tiles > kMaxGrid || threads >= 2 * kMaxThreads) return cudaErrorNotSupported;
    p.by_chunk = fast_divide(static_cast<int>(chunks));
    kernel<<<static_cast<unsigned>(chunks * tiles), static_cast<unsigned>(block), shared, stream>>>(p);
    p.input = static_cast<const T*>(p.input) + slice * p.input_batch;
    p.output = static_cast<T*>(p.output) + slice * p.output_batch;
  }
  return cudaGetLastError();
}

// The kernels on matrix units: warps that own `bases` bases of the last axis and p.quad_tile quads.
template <class Kernel>
cudaError_t launch_warps(const Problem& problem, DirectParams& p, int bases, size_t shared, Kernel* kernel,
                         cudaStream_t stream) {
  constexpr int kThreads = 128;
  if (!set_window(kMmaRows, p)) return cudaErrorNotSupported;
  p.columns = static_cast<int>(ceil_div(p.axis[2].out, 2 * bases));
  p.by_columns = fast_divide(p.columns);
  p.by_phases = fast_divide(p.axis[1].stride);
  set_tiles(problem, ceil_div(p.quads, p.quad_tile), p);
  const int64_t planes = p.axis[0].num_bases(), tiles = ceil_div(p.quads, p.quad_tile);
  const double row_warps = double(p.columns) * double(planes * problem.batch * tiles);
  p.march = choose_march(p.num_rows, row_warps * 32 / kThreads, 1.3, 4);
  const int64_t segments = ceil_div(p.num_rows, p.march), warps = p.columns * segments * planes;
  p.by_segment = fast_divide(static_cast<int>(segments));
  const int64_t slice =
      std::max<int64_t>(1, std::min({problem.batch, kMaxThreads / 32 / warps, kMaxGrid / tiles * 4 / warps}));
  for (int64_t done = 0; done < problem.batch; done += slice) {
    p.batch = static_cast<int>(std::min(slice, problem.batch - done));
    const int64_t chunks = ceil_div(warps * p.batch, kThreads / 32);
    if (chunks * tiles > kMaxGrid) return cudaErrorNotSupported;
    p.by_chunk = fast_divide(static_cast<int>(chunks));
    kernel<<<static_cast<unsigned>(chunks * tiles), kThreads, shared, stream>>>(p);
    p.input = static_cast<const char*>(p.input) + slice * p.input_batch * 2;
    p.output = static_cast<char*>(p.output) + slice * p.output_batch * 2;
  }
  return cudaGetLastError();
}

template <typename T, int kPairs, bool kAligned>
cudaError_t launch_rows(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  using Mma = DirectMma<T, kPairs, kAligned>;
  constexpr int kBlocks = kPairs == 2 ? 4 : kAligned ? 6 : 5;
  p.quad_tile = 1;
  const size_t shared = size_t(p.axis[1].stride + 1) / 2 * kPairs * 512;
  return launch_warps(problem, p, kMmaBases, shared, direct_mma_kernel<Mma, 128, kBlocks>, stream);
}

template <typename T, int kPairs, int kQuads>
cudaError_t launch_pixels(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  constexpr int kBlocks = kQuads * kPairs > 4 ? 4 : 6;
  p.quad_tile = kQuads;
  p.bias_offset = kQuads * p.axis[1].stride * kPairs * 256;
  return launch_warps(problem, p, kPixelBases, size_t(p.bias_offset) + kQuads * 16,
                      direct_pixels_kernel<DirectPixels<T, kPairs, kQuads>, 128, kBlocks>, stream);
}

template <typename T, int kPairs>
cudaError_t dispatch_pairs(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  const auto aligned = [](const void* pointer, int elements) {
    return reinterpret_cast<uintptr_t>(pointer) % (elements * sizeof(T)) == 0;
  };
  if (problem.layout == Layout::kChannelsLast) {
    p.input_vectors = aligned(p.input, 2) && p.in_channels % 2 == 0;
    const int side = p.out_channels % 4 != 0 ? 1 : problem.out_channels % 8 == 0 && aligned(p.output, 8) ? 8 : 4;
    p.output_unit = aligned(p.output, side) ? side : 1;
    return p.quads <= 2 ? launch_pixels<T, kPairs, 2>(problem, p, stream)
                        : launch_pixels<T, kPairs, 4>(problem, p, stream);
  }
  p.output_unit = 8;
  while (!aligned(p.output, p.output_unit) || p.axis[2].out % p.output_unit != 0) p.output_unit /= 2;
  return aligned(p.input, 4) && p.axis[2].in % 4 == 0 && p.first_input % 4 == 0
             ? launch_rows<T, kPairs, true>(problem, p, stream)
             : launch_rows<T, kPairs, false>(problem, p, stream);
}

// On matrix units, if they can: cudaErrorNotSupported if not.
template <typename T>
cudaError_t dispatch_mma(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  if (problem.axis[2].stride != 2) return cudaErrorNotSupported;
  set_taps(p, 1);
  set_division(problem, 8, 1, p);
  return kDirectWindows[direct_window(problem)].width == 2 ? dispatch_pairs<T, 1>(problem, p, stream)
                                                           : dispatch_pairs<T, 2>(problem, p, stream);
}

// Few kernels, so one choice for each window, layout and size of elements.
template <typename T, int kIndex, bool kChannelsLast>
cudaError_t launch_window(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  constexpr int kStride = kDirectWindows[kIndex].stride;
  constexpr bool kShort = sizeof(T) == 2;
  set_taps(p, 1);
  // Rows of inputs stay in registers; stride 2 in 16 bits is for matrix units.
  if constexpr (!kDirectWindows[kIndex].only && (kStride == 4 || (kStride == 2 && !kShort))) {
    constexpr bool kAhead = !kShort && !kChannelsLast;
    if (set_window(2, p)) {
      return launch<DirectShape<T, kIndex, 4, 1, kChannelsLast>, 2, kAhead, 128, kAhead ? 4 : 5>(problem, p, stream);
    }
  }
  constexpr bool kWide = kStride == 2 && (kShort || kChannelsLast);
  constexpr int kCount = kStride == 2 && !kWide ? 2 : 1;
  return launch<DirectShape<T, kIndex, kWide ? 8 : 4, kCount, kChannelsLast>, 0, false, 128, 4>(problem, p, stream);
}

template <typename T, bool kChannelsLast, int index = 0>
cudaError_t dispatch_window(const Problem& problem, DirectParams& p, cudaStream_t stream) {
  if constexpr (index < kNumDirectWindows) {
    if (direct_window(problem) == index) return launch_window<T, index, kChannelsLast>(problem, p, stream);
    return dispatch_window<T, kChannelsLast, index + 1>(problem, p, stream);
  } else {
    return cudaErrorNotSupported;
  }
}

DirectParams make_params(const Problem& problem, const void* input, const void* weight, const void* bias,
                         void* output) {
  DirectParams p{};
  p.input = input, p.weight = weight, p.bias = bias, p.output = output;
  p.rectify = rectifier(problem);
  set_problem(problem, p);
  return p;
}

// Products of 16 bits need compute capability 8.0.
bool has_matrix_units() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

}  // namespace

cudaError_t launch_direct(const Problem& original, const void* input, const void* weight, const void* bias,
                          void* output, cudaStream_t stream) {
  if (original.out_elements() == 0) return cudaSuccess;
  if (!direct_refusal(original).empty()) return cudaErrorNotSupported;
  const Problem problem = direct_view(original);
  DirectParams p = make_params(problem, input, weight, bias, output);
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (has_matrix_units()) {
        const cudaError_t error = dispatch_mma<T>(problem, p, stream);
        if (error != cudaErrorNotSupported) return error;
      }
    }
    return problem.layout == Layout::kChannelsLast ? dispatch_window<T, true>(problem, p, stream)
                                                   : dispatch_window<T, false>(problem, p, stream);
  });
}

}  // namespace fastconvt::cuda
