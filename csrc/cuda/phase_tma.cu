// The phase GEMM on tensor copies, host side: the tile of a problem, the launch that packs, the map of the tensor that
// copies read, and the template instance that multiplies.
#include "phase_tma.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"
#include "phase_tma_pack.cuh"
#include "tensor_map.h"

namespace fastconvt::cuda {
namespace {

bool copies_packed(const Problem& problem, const void* input) {
  return problem.layout == Layout::kContiguous || reinterpret_cast<uintptr_t>(input) % 16 != 0;
}

int log2_of(int64_t x) {
  int log2 = 0;
  while (int64_t{1} << log2 < x) ++log2;
  return log2;
}

int64_t packed_weight_bytes(const Problem& problem, const PhaseTmaTile& t) {
  return problem.groups * t.channel_blocks * t.columns * problem.kernel_positions() * phase_tma_channels(t) * 2;
}
int64_t packed_input_bytes(const Problem& problem, const PhaseTmaTile& t) {
  return problem.batch * problem.in_positions() * problem.groups * phase_tma_channels(t) * 2;
}

PhaseTmaAxisParams axis_params(const Axis& axis, const PhaseTmaTile& t, int a, int phases) {
  PhaseTmaAxisParams p{};
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
void set_order(const PhaseTmaTile& t, PhaseTmaParams& p) {
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

PhaseTmaParams make_params(const Problem& problem, const PhaseTmaTile& t, const void* input, const void* weight,
                           const void* bias, void* output, void* workspace) {
  const bool of_phases = t.split == PhaseTmaSplit::kPhases;
  PhaseTmaParams p{};
  p.contiguous = problem.layout == Layout::kContiguous;
  p.merged = t.merged;
  p.split = t.split;
  const int strides[3] = {static_cast<int>(problem.axis[0].stride), static_cast<int>(problem.axis[1].stride),
                          static_cast<int>(problem.axis[2].stride)};
  p.width_group = strides[2] / t.width_groups;
  const int widths = of_phases ? ceil_div(p.width_group, 2) : p.width_group;
  const int phases[3] = {strides[0], t.merged ? 1 : strides[1], p.contiguous ? t.width_groups : widths};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a], t, a, phases[a]);
  p.width_passes = p.contiguous ? widths : 1;
  p.passes = p.width_passes * (t.merged ? strides[1] : 1);
  for (const PhaseTmaPhaseParams& phase : p.axis[2].phase) p.width_slots = std::max(p.width_slots, phase.slot + 1);
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
  p.group_channels = copies_packed(problem, input) ? static_cast<int>(phase_tma_channels(t)) : p.group_in;
  p.slot_pitch = phase_tma_slot_pitch(t);
  set_order(t, p);
  p.swizzle = t.chunk == 64 ? 1 : t.chunk == 32 ? 2 : 3;
  p.stages = t.stages;
  p.taps_per_stage = t.taps_per_stage;
  p.buffers = t.buffers;
  p.unit_bytes = t.unit_bytes;
  p.stage_bytes = t.stage_bytes;
  p.buffer_bytes = t.buffer_bytes;
  p.copied_bytes = t.inputs * t.chunk * 2;
  p.channel_pitch = t.channel_pitch;
  p.run_rows = t.run_rows, p.run_width = t.run_width, p.lines = t.lines;
  p.columns = t.columns;
  p.tasks_at = t.tasks_at, p.lines_at = t.lines_at, p.terms_at = t.terms_at, p.table_at = t.table_at;
  p.inputs_at = t.inputs_at, p.weights_at = t.weights_at, p.staging_at = t.staging_at;
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  const int64_t width = problem.axis[2].out();
  p.vectors = reinterpret_cast<uintptr_t>(output) % 16 == 0 &&
              (p.contiguous ? width % 8 == 0 && !t.merged && (t.tiles[3] == 1 || t.box[3] * strides[2] % 8 == 0)
                            : p.group_out % 8 == 0);
  p.words = p.contiguous && reinterpret_cast<uintptr_t>(output) % 4 == 0 && width % 2 == 0 &&
            (t.tiles[3] == 1 || t.box[3] * strides[2] % 2 == 0);
  p.wide = p.contiguous && t.width_groups == 1 && p.vectors && strides[2] <= 2 && p.width_slots == strides[2] &&
           !p.batch_inner && t.box[3] % 8 == 0 && width % (8 * strides[2]) == 0;
  p.packed_weight = workspace;
  p.input = input, p.weight = weight, p.output = output;
  p.bias = problem.has_bias ? bias : nullptr;
  p.rectify = rectifier(problem);
  return p;
}

void* packed_input(const Problem& problem, const PhaseTmaTile& t, void* workspace) {
  return static_cast<char*>(workspace) + round_up(packed_weight_bytes(problem, t), 1024);
}

template <typename T>
cudaError_t launch_pack(const Problem& problem, const PhaseTmaTile& t, const PhaseTmaParams& p, void* workspace,
                        cudaStream_t stream) {
  PhaseTmaPackParams q{};
  q.columns = phase_tma_columns(t);
  q.blocks = t.channel_blocks * (t.columns / q.columns);
  q.weight_columns = static_cast<int>(ceil_div(int64_t{q.columns} * q.blocks * p.taps, int64_t{kPhaseTmaPackColumns}));
  q.weight_blocks = int64_t{q.weight_columns} * p.chunks * problem.groups;
  q.image = static_cast<int>(problem.in_positions());
  q.position_blocks = ceil_div(q.image, kPhaseTmaPackColumns);
  q.padded_channels = static_cast<int>(phase_tma_channels(t));
  q.all_channels = static_cast<int>(q.padded_channels * problem.groups);
  q.channel_blocks = ceil_div(q.all_channels, kPhasePackTile);
  q.pairs = p.contiguous && q.image % 2 == 0 && reinterpret_cast<uintptr_t>(p.input) % 4 == 0;
  q.weight_pairs = p.group_out * p.taps % 2 == 0 && reinterpret_cast<uintptr_t>(p.weight) % 4 == 0;
  int64_t blocks = q.weight_blocks;
  if (copies_packed(problem, p.input)) blocks += q.position_blocks * q.channel_blocks * problem.batch;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  phase_tma_pack_kernel<T><<<static_cast<unsigned>(blocks), kPhaseTmaPackThreads, 0, stream>>>(
      p, q, static_cast<uint4*>(workspace), static_cast<uint4*>(packed_input(problem, t, workspace)));
  return cudaGetLastError();
}

// The tensor that copies read, channels innermost, and their box.
cudaError_t make_map(const Problem& problem, const PhaseTmaTile& t, const PhaseTmaParams& p, void* workspace,
                     CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const bool packed = copies_packed(problem, p.input);
  const cuuint64_t channels = static_cast<cuuint64_t>(p.group_channels) * problem.groups;
  const cuuint64_t width = p.axis[2].in, height = p.axis[1].in, depth = p.axis[0].in, pixel = channels * 2;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(problem.batch), depth, height, width};
  const cuuint64_t strides[4] = {depth * height * width * pixel, height * width * pixel, width * pixel, pixel};
  const int axes[4] = {p.batch_inner ? 0 : 3, p.batch_inner ? 3 : 0, 2, 1};
  cuuint64_t dims[5] = {channels}, pitches[4];
  cuuint32_t box[5] = {static_cast<cuuint32_t>(p.chunk)};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    dims[i + 1] = sizes[axes[i]], pitches[i] = strides[axes[i]];
    box[i + 1] = static_cast<cuuint32_t>(t.halo[axes[i]]);
  }
  const CUtensorMapSwizzle swizzle = p.chunk == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : p.chunk == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
  void* const source = packed ? packed_input(problem, t, workspace) : const_cast<void*>(p.input);
  const CUtensorMapDataType type =
      problem.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 5, source, dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

// As many blocks as run at once, or fewer: a number that shares no factor with the items of a tile, so that every block
// gets all phases, which differ in their taps.
int count_blocks(int64_t items, int of_a_tile, int resident) {
  if (items <= resident) return static_cast<int>(items);
  while (std::gcd(resident, of_a_tile) != 1) --resident;
  return resident;
}

// The products start as soon as the blocks that pack leave room, and wait for them on the device.
template <class Kernel>
cudaError_t launch_products(Kernel* kernel, int threads, const PhaseTmaTile& t, const PhaseTmaParams& p,
                            const CUtensorMap& map, cudaStream_t stream) {
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, threads, t.shared_bytes, static_cast<int>(kPhaseTmaShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  const int of_a_tile =
      p.axis[0].phases.divisor * p.axis[1].phases.divisor * p.axis[2].phases.divisor * t.channel_blocks;
  const dim3 grid(count_blocks(t.items, of_a_tile, resident));
  return launch_early(kernel, grid, threads, t.shared_bytes, stream, p, map);
}

template <typename T, int kShape = 0>
cudaError_t dispatch_tma_shape(const PhaseTmaTile& t, const PhaseTmaParams& p, const CUtensorMap& map,
                               cudaStream_t stream) {
  if constexpr (kShape == kNumPhaseTmaShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr PhaseTmaShape kOf = kPhaseTmaShapes[kShape];
    if (t.shape == kShape) {
      return dispatch_rectifier(p.rectify, [&](auto rectify) {
        return launch_products(
            phase_tma_kernel<T, kOf.row_tiles, kOf.columns / 8, kOf.warpgroups, decltype(rectify)::value>,
            kOf.warpgroups * 128 + 128, t, p, map, stream);
      });
    }
    return dispatch_tma_shape<T, kShape + 1>(t, p, map, stream);
  }
}

cudaError_t launch_tile(const Problem& problem, const PhaseTmaTile& t, const void* input, const void* weight,
                        const void* bias, void* output, void* workspace, cudaStream_t stream) {
  const PhaseTmaParams p = make_params(problem, t, input, weight, bias, output, workspace);
  CUtensorMap map;
  const cudaError_t error = make_map(problem, t, p, workspace, map);
  if (error != cudaSuccess) return error;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) != 2) {
      return cudaErrorNotSupported;
    } else {
      const cudaError_t packing = launch_pack<T>(problem, t, p, workspace, stream);
      return packing != cudaSuccess ? packing : dispatch_tma_shape<T>(t, p, map, stream);
    }
  });
}

int64_t tile_workspace(const Problem& problem, const PhaseTmaTile& t, const void* input) {
  int64_t bytes = round_up(packed_weight_bytes(problem, t), 1024);
  if (copies_packed(problem, input)) bytes += packed_input_bytes(problem, t);
  return bytes;
}

}  // namespace

int64_t phase_tma_workspace(const Problem& problem, const void* input) {
  return tile_workspace(problem, phase_tma_tile(problem), input);
}

cudaError_t launch_phase_tma(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!phase_tma_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_tile(problem, phase_tma_tile(problem), input, weight, bias, output, workspace, stream);
}

}  // namespace fastconvt::cuda
