// The shuffle GEMM, host side: parameters of a problem, maps of its tensors, and the template instance that runs it.
#include "shuffle_gemm.cuh"

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"
#include "shuffle_gemm_few.cuh"
#include "shuffle_gemm_lines.cuh"
#include "shuffle_gemm_maps.h"
#include "shuffle_gemm_pack.cuh"

namespace fastconvt::cuda {
namespace {

bool aligned_16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void set_store(const Problem& problem, ShuffleGemmParams& p) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const int64_t inner = contiguous ? 1 : problem.out_channels;
  const int64_t row = problem.axis[2].out() * inner, plane = problem.axis[1].out() * row;
  const int64_t depth = problem.axis[0].kernel, height = problem.axis[1].kernel, width = problem.axis[2].kernel;
  p.batch_step = problem.out_positions() * problem.out_channels;
  p.depth_step = depth * plane, p.height_step = height * row;
  p.width_step = static_cast<int>(width * inner);
  p.depth_tap = plane, p.height_tap = row, p.width_tap = static_cast<int>(inner);
  p.plane = problem.out_positions();
  const int64_t run = shuffle_gemm_run(problem);
  p.run = fast_divide(static_cast<int>(run));
  p.kernel_width = fast_divide(static_cast<int>(problem.groups == 1 ? 1 : width));
  p.kernel_height = fast_divide(static_cast<int>(height));
  const int64_t whole = contiguous ? row : run;
  p.vector = whole % 8 == 0 ? 16 : contiguous && whole % 4 == 0 ? 8 : 4;
}

ShuffleGemmParams make_params(const Problem& problem, const ShuffleGemmTile& t, bool packed, const void* input,
                              const void* weight, const void* bias, void* output) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  ShuffleGemmParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.column_blocks = fast_divide(t.column_blocks);
  p.groups = fast_divide(static_cast<int>(problem.groups));
  p.positions = static_cast<int>(problem.in_positions());
  p.flat = !contiguous || packed;
  p.image = fast_divide(p.flat ? p.positions : ceil_div(p.positions, 64));
  p.width = fast_divide(static_cast<int>(problem.axis[2].in));
  p.height = fast_divide(static_cast<int>(problem.axis[1].in));
  p.batch = static_cast<int>(problem.batch);
  p.in_channels = static_cast<int>(problem.in_channels), p.out_channels = static_cast<int>(problem.out_channels);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.columns = static_cast<int>(p.group_out * problem.kernel_positions());
  p.channel_columns = fast_divide(contiguous ? static_cast<int>(problem.kernel_positions()) : p.group_out);
  p.resident = t.resident, p.by_hand = t.by_hand, p.whole_weights = p.columns % 64 == 0;
  p.boxed = t.box.width > 0;
  p.tiles = static_cast<int>(p.boxed ? t.tiles : shuffle_gemm_tiles(problem, packed));
  p.sharing = t.sharing, p.teams = t.teams();
  p.items = ceil_div(p.tiles, p.sharing) * t.column_blocks * p.groups.divisor;
  p.chunks = t.chunks;
  p.stages = t.stages, p.stage_bytes = t.stage_bytes;
  if (contiguous) p.box = 64 / static_cast<int>(problem.axis[2].kernel);
  if (p.boxed) {
    const ShuffleGemmBox& box = t.box;
    p.box_width = fast_divide(box.width), p.box_height = box.height, p.box_positions = box.width * box.height;
    p.across = fast_divide(static_cast<int>(box.across)), p.down = fast_divide(static_cast<int>(box.down));
    p.lines = static_cast<int>(box.lines);
  }
  p.tap_depth = static_cast<int>(problem.axis[0].kernel), p.tap_height = static_cast<int>(problem.axis[1].kernel);
  p.buffers = t.buffers;
  p.line_shift = few_line_shift(problem);
  p.ring = t.ring, p.staging = t.staging, p.terms = t.terms, p.offsets = t.offsets, p.barriers = t.barriers;
  set_store(problem, p);
  p.rectify = rectifier(problem);
  p.negative_slope = p.rectify.floor == 0 ? 0 : p.rectify.slope;
  return p;
}

// Copies rows of `length` elements, whose number is outer * inner.
cudaError_t launch_pack(const void* source, void* target, int64_t outer, int64_t inner, int64_t length, int64_t pitch,
                        cudaStream_t stream) {
  int64_t width = 8;  // bytes of a vector
  while (width > 2 && (length * 2 % width != 0 || reinterpret_cast<uintptr_t>(source) % width != 0)) width /= 2;
  const int64_t of = width / 2;
  ShuffleGemmPackParams p{};
  p.source = source, p.target = target;
  p.rows = static_cast<int>(outer * inner), p.inner = fast_divide(static_cast<int>(inner));
  p.length = length / of, p.outer_pitch = p.length, p.pitch = pitch / of;
  const int64_t of_row = ceil_div(p.length, int64_t{64});
  const int64_t blocks = ceil_div(outer * inner * of_row, int64_t{8 * kShuffleGemmPackRows});
  if (blocks * 8 * kShuffleGemmPackRows >= int64_t{1} << 31) return cudaErrorNotSupported;
  p.segments = fast_divide(static_cast<int>(of_row));
  const auto kernel = width == 8   ? shuffle_gemm_pack_kernel<uint2>
                      : width == 4 ? shuffle_gemm_pack_kernel<unsigned int>
                                   : shuffle_gemm_pack_kernel<unsigned short>;
  kernel<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

// What of the workspace packed inputs and weights take.
int64_t packed_input_bytes(const Problem& problem, const void* input) {
  if (!shuffle_gemm_packs(problem) && aligned_16(input)) return 0;
  const bool contiguous = problem.layout == Layout::kContiguous;
  return round_up((contiguous ? packed_pitch(problem) * problem.in_channels : problem.in_elements()) * 2, int64_t{256});
}
int64_t packed_weight_bytes(const Problem& problem, const void* weight) {
  const int64_t columns = problem.out_channels_per_group() * problem.kernel_positions();
  return aligned_16(weight) || columns % 8 != 0 ? 0 : round_up(problem.weight_elements() * 2, int64_t{256});
}

// Packs what must be; `input` and `weight` become what copies read.
cudaError_t pack_tensors(const Problem& problem, void* workspace, const void*& input, const void*& weight,
                         cudaStream_t stream) {
  const int64_t input_bytes = packed_input_bytes(problem, input), weight_bytes = packed_weight_bytes(problem, weight);
  cudaError_t error = cudaSuccess;
  if (weight_bytes > 0) {
    void* const to = static_cast<char*>(workspace) + input_bytes;
    error = launch_pack(weight, to, 1, 1, problem.weight_elements(), problem.weight_elements(), stream);
    weight = to;
  }
  if (input_bytes > 0 && error == cudaSuccess) {
    if (problem.layout == Layout::kContiguous) {
      error = launch_pack(input, workspace, problem.batch, problem.in_channels, problem.in_positions(),
                          packed_pitch(problem), stream);
    } else {
      error = launch_pack(input, workspace, 1, 1, problem.in_elements(), problem.in_elements(), stream);
    }
    input = workspace;
  }
  return error;
}

struct ShuffleGemmMaps {
  CUtensorMap inputs, weights, outputs;
};

// After a launch that packs it starts early, and waits on the device.
template <typename Kernel, typename... Args>
cudaError_t launch_blocks(Kernel* kernel, int64_t blocks, int threads, int shared_bytes, bool after_packing,
                          cudaStream_t stream, const Args&... args) {
  const dim3 grid(static_cast<unsigned>(blocks));
  if (after_packing) return launch_early(kernel, grid, threads, shared_bytes, stream, args...);
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

template <typename T, int kTaps, int kColumns, ShuffleGemmStore kStore, int kWarpgroups, bool kRectify, bool kWhole>
cudaError_t launch_kernel(const ShuffleGemmTile& t, ShuffleGemmParams p, const ShuffleGemmMaps& maps,
                          bool after_packing, cudaStream_t stream) {
  const auto kernel = shuffle_gemm_kernel<T, kTaps, kColumns, kStore, kWarpgroups, kRectify, kWhole>;
  constexpr int kThreads = kWarpgroups * 128 + 128;
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kThreads, t.shared_bytes, static_cast<int>(kShuffleGemmShared), resident);
  if (error != cudaSuccess) return error;
  int64_t blocks = std::min(resident, p.items);
  const int parts = t.column_blocks * p.groups.divisor;
  // Resident: a block keeps to its columns.
  if (t.resident) blocks = blocks / parts * parts;
  if (blocks == 0) return cudaErrorNotSupported;
  // Of a team, nothing to store meanwhile. A team that waits for a stage must know that the stage's inputs before were
  // there, since barriers tell apart two phases only.
  const bool single = p.items <= blocks * p.teams;
  p.takes_turns = p.teams > 1 && !(single && p.teams * t.chunks <= t.stages);
  p.hand_over = single && p.teams == 2 ? std::clamp(2 * t.chunks - 1 - t.stages, 0, t.chunks - 1) : t.chunks - 1;
  return launch_blocks(kernel, blocks, kThreads, t.shared_bytes, after_packing, stream, maps.inputs, maps.weights,
                       maps.outputs, p);
}

template <typename T, int kTaps, bool kRectify>
cudaError_t dispatch_columns(const ShuffleGemmTile& t, const ShuffleGemmParams& p, const ShuffleGemmMaps& maps,
                             bool after_packing, cudaStream_t stream) {
  using Store = ShuffleGemmStore;
  const auto launch = [&](auto columns, auto store, auto warpgroups, auto whole) {
    return launch_kernel<T, kTaps, columns(), store(), warpgroups(), kRectify, whole()>(t, p, maps, after_packing,
                                                                                        stream);
  };
  constexpr std::integral_constant<Store, Store::kVectors> kVectors;
  constexpr std::integral_constant<int, 2> kTwo;
  constexpr std::integral_constant<int, 4> kFour;
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  constexpr std::integral_constant<int, 256> k256;
  constexpr std::true_type kWhole;
  if (t.warpgroups == 4) {
    if constexpr (!kRectify && kTaps < 8) {
      constexpr std::integral_constant<Store, Store::kBoxes> kBoxes;
      if constexpr (kTaps == 0) {
        if (t.columns == 64) return launch(k64, kBoxes, kFour, kWhole);
      }
      if (t.store == Store::kBoxes) return launch(k128, kBoxes, kFour, kWhole);
    }
    if constexpr (!kRectify && kTaps == 0) {
      if (t.store == Store::kRuns) return launch(k128, std::integral_constant<Store, Store::kRuns>{}, kFour, kWhole);
    }
    if constexpr (!kRectify && kTaps == 2) {
      if (t.store == Store::kVectors) return launch(k128, kVectors, kFour, kWhole);
    }
    return cudaErrorNotSupported;
  }
  if constexpr (kTaps < 8) {
    if (p.vector < 16) return launch(k128, kVectors, kTwo, std::false_type{});
    if (t.columns == 256) return launch(k256, kVectors, kTwo, kWhole);
    if (t.columns == 64) return launch(k64, kVectors, kTwo, kWhole);
  }
  return launch(k128, kVectors, kTwo, kWhole);
}

template <typename T, bool kRectify>
cudaError_t dispatch_taps(const Problem& problem, const ShuffleGemmTile& t, const ShuffleGemmParams& p,
                          const ShuffleGemmMaps& maps, bool after_packing, cudaStream_t stream) {
  if (problem.layout == Layout::kChannelsLast) {
    return dispatch_columns<T, 0, kRectify>(t, p, maps, after_packing, stream);
  }
  switch (problem.axis[2].kernel) {
    case 2:
      return dispatch_columns<T, 2, kRectify>(t, p, maps, after_packing, stream);
    case 4:
      return dispatch_columns<T, 4, kRectify>(t, p, maps, after_packing, stream);
    case 8:
      return dispatch_columns<T, 8, kRectify>(t, p, maps, after_packing, stream);
    case 16:
      return dispatch_columns<T, 16, kRectify>(t, p, maps, after_packing, stream);
    default:
      return cudaErrorNotSupported;
  }
}

template <typename T, int kRows, bool kRectify>
cudaError_t launch_lines(const ShuffleGemmTile& t, const ShuffleGemmParams& p, const ShuffleGemmMaps& maps,
                         bool after_packing, cudaStream_t stream) {
  const auto kernel = shuffle_gemm_lines_kernel<T, kRows, kRectify>;
  constexpr int kThreads = kShuffleGemmLinesThreads;
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kThreads, t.shared_bytes, static_cast<int>(kShuffleGemmShared), resident);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(resident, p.items) / t.column_blocks * t.column_blocks;
  if (blocks == 0) return cudaErrorNotSupported;
  return launch_blocks(kernel, blocks, kThreads, t.shared_bytes, after_packing, stream, maps.inputs, maps.weights, p);
}

template <typename T, bool kRectify>
cudaError_t launch_few(const Problem& problem, const ShuffleGemmTile& t, const ShuffleGemmParams& p,
                       const ShuffleGemmMaps& maps, bool after_packing, cudaStream_t stream) {
  const auto kernel = problem.layout == Layout::kContiguous ? shuffle_gemm_few_kernel<T, true, kRectify>
                                                            : shuffle_gemm_few_kernel<T, false, kRectify>;
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kShuffleGemmFewThreads, t.shared_bytes, t.shared_bytes, resident);
  if (error != cudaSuccess) return error;
  return launch_blocks(kernel, std::min<int64_t>(resident, t.items), kShuffleGemmFewThreads, t.shared_bytes,
                       after_packing, stream, maps.inputs, maps.outputs, p);
}

template <typename T>
cudaError_t launch_exact(const Problem& problem, ShuffleGemmParams p, cudaStream_t stream) {
  p.tiles = static_cast<int>(shuffle_gemm_tiles(problem, false));  // that are no boxes
  const auto kernel =
      problem.layout == Layout::kContiguous ? shuffle_gemm_exact_kernel<T, true> : shuffle_gemm_exact_kernel<T, false>;
  const int64_t blocks = ceil_div(problem.out_elements(), int64_t{256});
  kernel<<<static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20)), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_tile(const Problem& problem, const ShuffleGemmTile& t, const void* input, const void* weight,
                        const void* bias, void* output, void* workspace, cudaStream_t stream) {
  const bool packed = packed_input_bytes(problem, input) > 0, copies = aligned_16(output);
  const ShuffleGemmParams p = make_params(problem, t, copies && packed, input, weight, bias, output);
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) -> cudaError_t {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) != 2) {
      return cudaErrorNotSupported;
    } else {
      if (!copies) return launch_exact<T>(problem, p, stream);
      ShuffleGemmMaps maps{};
      const void *read_input = input, *read_weight = weight;
      cudaError_t error = pack_tensors(problem, workspace, read_input, read_weight, stream);
      const bool after_packing = read_input != input || read_weight != weight;
      if (error == cudaSuccess && t.store == ShuffleGemmStore::kFew) {
        error = make_few_maps(problem, packed, read_input, output, maps.inputs, maps.outputs);
        if (error != cudaSuccess) return error;
        return dispatch_rectifier(p.rectify, [&](auto rectify) {
          return launch_few<T, decltype(rectify)::value>(problem, t, p, maps, after_packing, stream);
        });
      }
      if (error == cudaSuccess) error = make_input_map(problem, t.box, packed, read_input, maps.inputs);
      if (error == cudaSuccess && !t.by_hand) error = make_weight_map(problem, t.columns, read_weight, maps.weights);
      if (error == cudaSuccess && t.store == ShuffleGemmStore::kBoxes) {
        error = make_output_map(problem, t.box, output, maps.outputs);
      }
      if (error != cudaSuccess) return error;
      return dispatch_rectifier(p.rectify, [&](auto rectify) {
        if (t.store == ShuffleGemmStore::kLines) {
          const auto launch = t.columns == 256 ? launch_lines<T, 256, decltype(rectify)::value>
                                               : launch_lines<T, 128, decltype(rectify)::value>;
          return launch(t, p, maps, after_packing, stream);
        }
        return dispatch_taps<T, decltype(rectify)::value>(problem, t, p, maps, after_packing, stream);
      });
    }
  });
}

}  // namespace

int64_t shuffle_gemm_workspace(const Problem& problem, const void* input, const void* weight) {
  return packed_input_bytes(problem, input) + packed_weight_bytes(problem, weight);
}

cudaError_t launch_shuffle_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!shuffle_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_tile(problem, shuffle_gemm_tile(problem), input, weight, bias, output, workspace, stream);
}

}  // namespace fastconvt::cuda
