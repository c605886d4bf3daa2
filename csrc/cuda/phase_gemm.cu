// The phase GEMM, host side: the tile of a problem, the launch that packs and the template instance that multiplies.
#include "phase_gemm.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"
#include "phase_gemm_pack.cuh"

namespace fastconvt::cuda {
namespace {

bool reads_packed(const Problem& problem, const void* input) {
  return phase_gemm_packs_input(problem) || reinterpret_cast<uintptr_t>(input) % 16 != 0;
}

int64_t packed_weight_bytes(const Problem& problem, const PhaseGemmTile& t) {
  return problem.groups * phase_gemm_channel_bytes(t) * t.channel_blocks * phase_gemm_columns(t) *
         problem.kernel_positions();
}
int64_t packed_input_bytes(const Problem& problem, const PhaseGemmTile& t) {
  return problem.batch * problem.in_positions() * problem.groups * phase_gemm_channel_bytes(t);
}

PhaseGemmAxisParams axis_params(const Axis& axis, const PhaseGemmTile& t, int a) {
  const PhaseGemmAxis of = phase_gemm_axis(axis);
  PhaseGemmAxisParams p{};
  p.in = static_cast<int>(axis.in);
  p.out = static_cast<int>(axis.out());
  p.kernel = static_cast<int>(axis.kernel);
  p.stride = static_cast<int>(axis.stride);
  p.padding = static_cast<int>(axis.padding);
  p.dilation = static_cast<int>(axis.dilation);
  p.tap_step = of.tap_step;
  p.offset_step = of.offset_step;
  p.box = fast_divide(t.box[a + 1]);
  p.halo = fast_divide(t.halo[a + 1]);
  p.tiles = fast_divide(static_cast<int>(t.tiles[a + 1]));
  p.phases = fast_divide(p.stride);
  int before = 0;
  for (int f = 0; f < p.stride; ++f) {
    const PhaseGemmPhase phase = phase_gemm_phase(axis, f);
    p.phase[f] = {phase.shift, static_cast<short>(phase.num_taps), static_cast<short>(before),
                  static_cast<short>(phase.first_tap)};
    before += phase.num_taps;
  }
  return p;
}

// The widest store that every run of outputs allows: the lowest bit that is set in any of its measures.
int vector_bytes(const Problem& problem, const PhaseGemmTile& t, const void* output) {
  const int64_t element = problem.element_size();
  uint64_t measures = reinterpret_cast<uintptr_t>(output) | 16;
  if (problem.layout == Layout::kContiguous) {
    measures |= problem.axis[2].out() * element | t.box[3] * t.passes * element;
  } else {
    measures |= problem.out_channels_per_group() * element | phase_gemm_columns(t) * element;
  }
  return static_cast<int>(measures & (~measures + 1));
}

PhaseGemmParams make_params(const Problem& problem, const PhaseGemmTile& t, const void* input, const void* weight,
                            const void* bias, void* output, void* workspace) {
  const int64_t element = problem.element_size();
  PhaseGemmParams p{};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a], t, a);
  p.batch = static_cast<int>(problem.batch);
  p.box_batch = t.box[0];
  p.tiles_batch = fast_divide(static_cast<int>(t.tiles[0]));
  p.channel_blocks = fast_divide(t.channel_blocks);
  p.items = static_cast<int>(t.items);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.passes = t.passes;
  p.contiguous = problem.layout == Layout::kContiguous;
  p.resident = t.resident;
  p.direct = t.direct;
  p.taps = static_cast<int>(problem.kernel_positions());
  p.cells = t.box[0] * t.box[1] * t.box[2] * t.box[3];
  p.inputs = t.inputs;
  p.granules_log2 = t.granules / 2;
  p.steps = t.granules / 2;
  p.chunks = t.chunks;
  p.last_steps = static_cast<int>(ceil_div(p.group_in * element - int64_t{t.chunks - 1} * t.granules * 16, 32));
  if (reads_packed(problem, input)) {
    p.group_granules = static_cast<int>(phase_gemm_channel_bytes(t) / 16);
    p.source = static_cast<char*>(workspace) + round_up(packed_weight_bytes(problem, t), 256);
  } else {
    p.group_granules = static_cast<int>(p.group_in * element / 16);
    p.source = input;
  }
  p.pixel_granules = int64_t{p.group_granules} * problem.groups;
  p.image_granules = p.pixel_granules * problem.in_positions();
  p.stages = t.stages;
  p.taps_per_stage = t.taps_per_stage;
  p.buffers = t.buffers;
  p.min_shift = phase_gemm_axis(problem.axis[2]).min_shift;
  p.vector_bytes = vector_bytes(problem, t, output);
  p.pitch = t.pitch;
  p.buffer_bytes = t.buffer_bytes;
  p.stage_bytes = t.stage_bytes;
  p.staging_pitch = t.staging_pitch;
  p.rows_at = t.rows_at, p.taps_at = t.taps_at, p.barriers_at = t.barriers_at;
  p.inputs_at = t.inputs_at, p.weights_at = t.weights_at, p.staging_at = t.staging_at;
  p.in = input_strides(problem);
  p.out = output_strides(problem);
  p.packed_weight = workspace;
  p.input = input, p.weight = weight, p.output = output;
  p.bias = problem.has_bias ? bias : nullptr;
  return p;
}

template <typename T>
cudaError_t launch_pack(const Problem& problem, const PhaseGemmTile& t, const PhaseGemmParams& p, void* workspace,
                        cudaStream_t stream) {
  PhaseGemmPackParams q{};
  q.columns = phase_gemm_columns(t);
  q.per_group = static_cast<int>(phase_gemm_channel_bytes(t) / 16);
  q.weight_granules = packed_weight_bytes(problem, t) / 16;
  q.weight_blocks = ceil_div(q.weight_granules, int64_t{kPackThreads});
  q.image = static_cast<int>(problem.in_positions());
  q.positions = problem.batch * problem.in_positions();
  q.position_blocks = ceil_div(q.positions, int64_t{kPackPositions});
  q.pixel_granules = static_cast<int>(p.pixel_granules);
  q.round = problem.allow_tf32;
  q.pairs = problem.layout == Layout::kContiguous && q.image % 2 == 0 &&
            reinterpret_cast<uintptr_t>(p.input) % (2 * problem.element_size()) == 0;
  const bool input = p.source != p.input;
  const int64_t blocks = q.weight_blocks + (input ? q.position_blocks * ceil_div(q.pixel_granules, kPackGranules) : 0);
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  phase_gemm_pack_kernel<T><<<static_cast<unsigned>(blocks), kPackThreads, 0, stream>>>(
      p, q, static_cast<uint4*>(workspace), static_cast<uint4*>(const_cast<void*>(p.source)));
  return cudaGetLastError();
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
cudaError_t launch_products(Kernel* kernel, const PhaseGemmTile& t, const PhaseGemmParams& p, cudaStream_t stream) {
  constexpr int kThreads = 2 * kPhaseGemmThreads;
  int resident = 0;
  const cudaError_t error =
      count_resident_blocks(kernel, kThreads, t.shared_bytes, static_cast<int>(kPhaseGemmShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  const dim3 grid(count_blocks(t.items, static_cast<int>(t.phases) * t.channel_blocks, resident));
  return launch_early(kernel, grid, kThreads, t.shared_bytes, stream, p);
}

template <typename T, bool kThree, int kShape = 0>
cudaError_t dispatch_shape(const PhaseGemmTile& t, const PhaseGemmParams& p, cudaStream_t stream) {
  if constexpr (kShape == kNumPhaseGemmShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr PhaseGemmShape kOf = kPhaseGemmShapes[kShape];
    if constexpr (phase_gemm_allows(kOf, kThree)) {
      if (t.shape == kShape) {
        constexpr int kBlocks = phase_gemm_blocks(kOf, sizeof(T));
        return launch_products(phase_gemm_kernel<T, kThree, kOf.row_tiles, kOf.column_tiles, kBlocks>, t, p, stream);
      }
    }
    return dispatch_shape<T, kThree, kShape + 1>(t, p, stream);
  }
}

}  // namespace

int64_t phase_gemm_workspace(const Problem& problem, const void* input) {
  const PhaseGemmTile t = phase_gemm_tile(problem);
  int64_t bytes = round_up(packed_weight_bytes(problem, t), 256);
  if (reads_packed(problem, input)) bytes += packed_input_bytes(problem, t);
  return bytes;
}

cudaError_t launch_phase_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                              void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!phase_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  const PhaseGemmTile t = phase_gemm_tile(problem);
  const PhaseGemmParams p = make_params(problem, t, input, weight, bias, output, workspace);
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    cudaError_t error = launch_pack<T>(problem, t, p, workspace, stream);
    if (error != cudaSuccess) return error;
    if constexpr (sizeof(T) == 4) {
      if (!problem.allow_tf32) return dispatch_shape<T, true>(t, p, stream);
    }
    return dispatch_shape<T, false>(t, p, stream);
  });
}

}  // namespace fastconvt::cuda
