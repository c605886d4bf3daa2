// The phase GEMM on tensor copies, host side: the tile of a problem, the launch that packs, the map of the tensor that
// copies read, and the template instance that multiplies.
#include "phase_pixels.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"
#include "phase_pixels_pack.cuh"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

// Whether inputs do not lie in memory as copies read them: channels innermost, in whole vectors.
bool copies_packed(const Problem& problem, const void* input) {
  return problem.in_channels_per_group() % 8 != 0 || reinterpret_cast<uintptr_t>(input) % 16 != 0;
}

int log2_of(int64_t x) {
  int log2 = 0;
  while (int64_t{1} << log2 < x) ++log2;
  return log2;
}

int64_t packed_weight_bytes(const Problem& problem, const PhasePixelsTile& t) {
  if (!t.packed) return 0;
  return problem.groups * t.channel_blocks * t.columns * problem.kernel_positions() * phase_pixels_channels(t) * 2;
}
int64_t packed_input_bytes(const Problem& problem, const PhasePixelsTile& t) {
  return problem.batch * problem.in_positions() * problem.groups * phase_pixels_channels(t) * 2;
}

PhasePixelsAxisParams axis_params(const Axis& axis, const PhasePixelsTile& t, int a, int phases) {
  PhasePixelsAxisParams p{};
  p.in = static_cast<int>(axis.in);
  p.out = static_cast<int>(axis.out());
  p.kernel = static_cast<int>(axis.kernel);
  p.stride = static_cast<int>(axis.stride);
  p.padding = static_cast<int>(axis.padding);
  p.dilation = static_cast<int>(axis.dilation);
  const int64_t gcd = std::gcd(axis.stride, axis.dilation);
  p.tap_step = static_cast<int>(axis.stride / gcd);
  p.offset_step = static_cast<int>(axis.dilation / gcd);
  p.box = t.box[a + 1];
  p.tiles = fast_divide(static_cast<int>(t.tiles[a + 1]));
  p.phases = fast_divide(phases);
  int before = 0, slot = 0;
  for (int f = 0; f < p.stride; ++f) {
    const AxisPhase phase = axis_phase(axis, f);
    const bool used = phase.num_taps > 0 && f < axis.out();
    p.phase[f] = {phase.shift,
                  static_cast<short>(phase.num_taps),
                  static_cast<short>(before),
                  static_cast<short>(phase.first_tap),
                  static_cast<short>(used ? slot++ : -1),
                  static_cast<int>(std::max<int64_t>(0, ceil_div(axis.out() - f + axis.stride, axis.stride) - 1))};
    before += phase.num_taps;
  }
  return p;
}

// How cells are numbered, and where they stand in a staged box.
void set_order(const PhasePixelsTile& t, PhasePixelsParams& p) {
  const int n = log2_of(t.box[0]), h = log2_of(t.box[2]), w = log2_of(t.box[3]);
  const int position = t.chunk * 2;
  p.batch_inner = t.order == PhaseTmaOrder::kBatch;
  p.low_width_log2 = t.order == PhaseTmaOrder::kSquares ? 3 : w;
  p.shift_width = p.batch_inner ? n : 0;
  p.shift_batch = p.batch_inner ? 0 : p.low_width_log2;
  p.shift_height = p.batch_inner ? n + w : p.shift_batch + n;
  p.shift_high_width = p.shift_height + h;
  p.shift_depth = n + h + w;
  p.axis[2].step_bytes = p.batch_inner ? t.box[0] * position : position;
  p.batch_bytes = p.batch_inner ? position : t.halo[3] * position;
  p.axis[1].step_bytes = t.box[0] * t.halo[3] * position;
  p.axis[0].step_bytes = t.halo[2] * p.axis[1].step_bytes;
  p.group_bytes = t.order == PhaseTmaOrder::kSquares ? t.halo[3] * position : 8 * position;
}

PhasePixelsParams make_params(const Problem& problem, const PhasePixelsTile& t, const void* input, const void* weight,
                              const void* bias, void* output, void* workspace) {
  PhasePixelsParams p{};
  p.split = t.split;
  const int strides[3] = {static_cast<int>(problem.axis[0].stride), static_cast<int>(problem.axis[1].stride),
                          static_cast<int>(problem.axis[2].stride)};
  const int phases[3] = {strides[0], strides[1],
                         t.split == PhaseTmaSplit::kPhases ? ceil_div(strides[2], 2) : strides[2]};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a], t, a, phases[a]);
  p.batch = static_cast<int>(problem.batch);
  p.box_batch = t.box[0];
  p.tiles_batch = fast_divide(static_cast<int>(t.tiles[0]));
  p.channel_blocks = fast_divide(t.channel_blocks);
  p.items = static_cast<int>(t.items);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.chunk = t.chunk;
  p.chunks = t.chunks;
  p.group_channels = copies_packed(problem, input) ? static_cast<int>(phase_pixels_channels(t)) : p.group_in;
  set_order(t, p);
  p.swizzle = t.chunk == 64 ? 1 : t.chunk == 32 ? 2 : 3;
  p.stages = t.stages;
  p.taps_per_stage = t.taps_per_stage;
  p.buffers = t.buffers;
  p.unit_columns = phase_pixels_columns(t);
  p.unit_bytes = t.unit_bytes;
  p.weight_group_bytes = std::min(p.unit_columns, 64) * 16;
  if (t.packed) {
    p.packed_weight = workspace;
    p.permuted = phase_pixels_permutes(t);
    p.weight_tap_bytes = t.unit_bytes, p.weight_block_bytes = p.chunk * 128;
  } else {
    p.weight_tap_bytes = p.chunk * std::min(p.unit_columns, 64) * 2;
    p.weight_block_bytes = t.taps_per_stage * p.weight_tap_bytes;
  }
  const bool neighbours = p.axis[0].tap_step == 1 && p.axis[1].tap_step == 1 && p.axis[2].tap_step == 1;
  p.copied_taps = neighbours ? t.taps_per_stage : 1;
  p.stage_bytes = t.stage_bytes;
  p.buffer_bytes = t.buffer_bytes;
  p.copied_bytes = t.inputs * t.chunk * 2;
  p.staging_pitch = t.staging_pitch;
  p.columns = t.columns;
  p.tasks_at = t.tasks_at, p.terms_at = t.terms_at;
  p.inputs_at = t.inputs_at, p.weights_at = t.weights_at, p.staging_at = t.staging_at;
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.vectors = reinterpret_cast<uintptr_t>(output) % 16 == 0 && p.group_out % 8 == 0;
  p.bulk = p.vectors && p.unit_columns == 128;
  const bool innermost = problem.weight_layout == Layout::kChannelsLast;
  p.weight_column = innermost ? 1 : p.taps;
  p.weight_tap = innermost ? p.group_out : 1;
  p.input = input, p.weight = weight, p.output = output;
  p.bias = problem.has_bias ? bias : nullptr;
  p.rectify = rectifier(problem);
  return p;
}

void* packed_input(const Problem& problem, const PhasePixelsTile& t, void* workspace) {
  return static_cast<char*>(workspace) + round_up(packed_weight_bytes(problem, t), 1024);
}

template <typename T>
cudaError_t launch_pack(const Problem& problem, const PhasePixelsTile& t, const PhasePixelsParams& p, void* workspace,
                        cudaStream_t stream) {
  PhasePixelsPackParams q{};
  int64_t blocks = 0;
  if (t.packed) {
    q.weight_pairs = p.weight_tap == 1 && p.taps % 2 == 0 && reinterpret_cast<uintptr_t>(p.weight) % 4 == 0;
    q.tap_jobs = q.weight_pairs ? p.taps / 2 : p.taps;
    q.columns = p.unit_columns;
    q.blocks = t.channel_blocks * (t.columns / q.columns);
    q.granules = q.blocks * q.columns / 8;
    q.weight_jobs = phase_pixels_channels(t) * problem.groups * q.granules * q.tap_jobs;
    q.weight_blocks = ceil_div(q.weight_jobs, int64_t{kPhasePixelsPackThreads});
    blocks = q.weight_blocks;
  }
  if (copies_packed(problem, p.input)) {
    q.image = static_cast<int>(problem.in_positions());
    q.position_blocks = ceil_div(q.image, kPhasePackTile);
    q.padded_channels = static_cast<int>(phase_pixels_channels(t));
    q.all_channels = static_cast<int>(q.padded_channels * problem.groups);
    q.channel_blocks = ceil_div(q.all_channels, kPhasePackTile);
    blocks += q.position_blocks * q.channel_blocks * problem.batch;
  }
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  phase_pixels_pack_kernel<T><<<static_cast<unsigned>(blocks), kPhasePixelsPackThreads, 0, stream>>>(
      p, q, static_cast<uint4*>(workspace), static_cast<uint4*>(packed_input(problem, t, workspace)));
  return cudaGetLastError();
}

cudaError_t make_input_map(const Problem& problem, const PhasePixelsTile& t, const PhasePixelsParams& p,
                           void* workspace, CUtensorMap& map) {
  const bool packed = copies_packed(problem, p.input);
  const cuuint64_t channels = static_cast<cuuint64_t>(p.group_channels) * problem.groups;
  const cuuint64_t width = p.axis[2].in, height = p.axis[1].in, depth = p.axis[0].in, pixel = channels * 2;
  const cuuint64_t lengths[4] = {static_cast<cuuint64_t>(problem.batch), depth, height, width};
  const cuuint64_t strides[4] = {depth * height * width * pixel, height * width * pixel, width * pixel, pixel};
  const int axes[4] = {p.batch_inner ? 0 : 3, p.batch_inner ? 3 : 0, 2, 1};
  cuuint64_t sizes[5] = {channels}, pitches[4];
  cuuint32_t box[5] = {static_cast<cuuint32_t>(p.chunk)};
  for (int i = 0; i < 4; ++i) {
    sizes[i + 1] = lengths[axes[i]], pitches[i] = strides[axes[i]];
    box[i + 1] = static_cast<cuuint32_t>(t.halo[axes[i]]);
  }
  const CUtensorMapSwizzle swizzle = t.chunk == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : t.chunk == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_map(problem.dtype, packed ? packed_input(problem, t, workspace) : p.input, sizes, pitches, box, map,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, swizzle);
}

// Output channels, input channels of a group, taps, groups.
cudaError_t make_weight_map(const Problem& problem, const PhasePixelsParams& p, CUtensorMap& map) {
  const cuuint64_t pixel = static_cast<cuuint64_t>(p.group_out) * 2, row = pixel * p.taps;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(p.group_out), static_cast<cuuint64_t>(p.group_in),
                               static_cast<cuuint64_t>(p.taps), static_cast<cuuint64_t>(problem.groups)};
  const cuuint64_t pitches[3] = {row, pixel, row * p.group_in};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(std::min(p.unit_columns, 64)), static_cast<cuuint32_t>(p.chunk),
                             static_cast<cuuint32_t>(p.copied_taps), 1};
  return encode_map(problem.dtype, p.weight, sizes, pitches, box, map, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    p.unit_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// As many blocks as run at once, or fewer: a number that shares no factor with the items of a tile, so that every block
// gets all phases, which differ in their taps.
int count_blocks(int64_t items, int of_a_tile, int resident) {
  if (items <= resident) return static_cast<int>(items);
  while (std::gcd(resident, of_a_tile) != 1) --resident;
  return resident;
}

// After a launch that packs, the products start as soon as its blocks leave room, and wait for them on the device.
template <class Kernel>
cudaError_t launch_products(Kernel* kernel, int threads, const PhasePixelsTile& t, const PhasePixelsParams& p,
                            const PhasePixelsMaps& maps, bool early, cudaStream_t stream) {
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, threads, t.shared_bytes, static_cast<int>(kPhasePixelsShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  const int of_a_tile =
      p.axis[0].phases.divisor * p.axis[1].phases.divisor * p.axis[2].phases.divisor * t.channel_blocks;
  const dim3 grid(count_blocks(t.items, of_a_tile, resident));
  if (!early) {
    kernel<<<grid, threads, t.shared_bytes, stream>>>(p, maps);
    return cudaGetLastError();
  }
  return launch_early(kernel, grid, threads, t.shared_bytes, stream, p, maps);
}

template <typename T, int kShape = 0>
cudaError_t dispatch_pixels_shape(const PhasePixelsTile& t, const PhasePixelsParams& p, const PhasePixelsMaps& maps,
                                  bool early, cudaStream_t stream) {
  if constexpr (kShape == kNumPhasePixelsShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr PhasePixelsShape kOf = kPhasePixelsShapes[kShape];
    if (t.shape == kShape) {
      return dispatch_rectifier(p.rectify, [&](auto rectify) {
        return launch_products(
            phase_pixels_kernel<T, kOf.row_tiles, kOf.columns / 8, kOf.warpgroups, decltype(rectify)::value>,
            kPhasePixelsThreads<kOf.warpgroups>, t, p, maps, early, stream);
      });
    }
    return dispatch_pixels_shape<T, kShape + 1>(t, p, maps, early, stream);
  }
}

cudaError_t launch_tile(const Problem& problem, const PhasePixelsTile& t, const void* input, const void* weight,
                        const void* bias, void* output, void* workspace, cudaStream_t stream) {
  const PhasePixelsParams p = make_params(problem, t, input, weight, bias, output, workspace);
  PhasePixelsMaps maps{};
  cudaError_t error = make_input_map(problem, t, p, workspace, maps.input);
  if (error == cudaSuccess && !t.packed) error = make_weight_map(problem, p, maps.weight);
  if (error != cudaSuccess) return error;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) != 2) {
      return cudaErrorNotSupported;
    } else {
      const bool packs = copies_packed(problem, input) || t.packed;
      const cudaError_t packing = packs ? launch_pack<T>(problem, t, p, workspace, stream) : cudaSuccess;
      return packing != cudaSuccess ? packing : dispatch_pixels_shape<T>(t, p, maps, packs, stream);
    }
  });
}

// Weights that are not aligned are packed.
PhasePixelsTile tile_of(const Problem& problem, const void* weight) {
  const PhasePixelsTile t = phase_pixels_tile(problem);
  return t.packed || reinterpret_cast<uintptr_t>(weight) % 16 == 0 ? t : find_phase_pixels_tile(problem, true);
}

int64_t tile_workspace(const Problem& problem, const PhasePixelsTile& t, const void* input) {
  int64_t bytes = round_up(packed_weight_bytes(problem, t), int64_t{1024});
  if (copies_packed(problem, input)) bytes += packed_input_bytes(problem, t);
  return bytes;
}

}  // namespace

int64_t phase_pixels_workspace(const Problem& problem, const void* input, const void* weight) {
  return tile_workspace(problem, tile_of(problem, weight), input);
}

cudaError_t launch_phase_pixels(const Problem& problem, const void* input, const void* weight, const void* bias,
                                void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!phase_pixels_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_tile(problem, tile_of(problem, weight), input, weight, bias, output, workspace, stream);
}

}  // namespace fastconvt::cuda
