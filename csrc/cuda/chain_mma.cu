#include "chain_mma.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace chain_mma {
namespace {

using Plan = fastconvt::chain_mma::Plan;

// The granule's byte offset from that of a cell.
uint32_t granule_offset(const Plan& plan, const fastconvt::chain_mma::Granule& granule) {
  int position = 0;
  for (int a = 0; a < 3; ++a) position = position * plan.region[a] + granule.offset[a] - plan.low[a];
  const int plane = granule.block * (plan.split ? 2 : 1) + (granule.pair ? 0 : 1);
  return static_cast<uint32_t>(plane * plan.positions() + position) * plan.position_bytes();
}

void set_steps(const Plan& plan, Params& p) {
  p.num_steps = plan.num_steps;
  p.num_fragments = plan.num_fragments;
  for (int s = 0; s < plan.num_steps; ++s) {
    const fastconvt::chain_mma::Step& step = plan.step[s];
    p.step[s] = granule_offset(plan, step.granule[0]) | granule_offset(plan, step.granule[1]) << 16;
    p.step_fragment[s] = static_cast<short>(step.first_fragment);
    p.step_phases[s] |= static_cast<unsigned char>(step.phases);
    for (int g = 0; g < 2; ++g) {
      const fastconvt::chain_mma::Granule& from = step.granule[g];
      PackedGranule& to = p.granule[s][g];
      to.pair = from.pair;
      to.block = static_cast<unsigned char>(from.block);
      for (int i = 0; i < 4; ++i) to.tap[i / 2][i % 2] = static_cast<short>(from.tap[i / 2][i % 2]);
    }
  }
}

void set_units(const Plan& plan, Params& p) {
  p.num_units = plan.num_units;
  for (int u = 0; u < plan.num_units; ++u) {
    const fastconvt::chain_mma::Unit& from = plan.unit[u];
    PackedUnit& to = p.unit[u];
    to.output = (from.residue[0] * p.out[1] + from.residue[1]) * p.out[2] + from.residue[2];
    to.first_step = static_cast<short>(from.first_step);
    p.step_phases[from.first_step] |= 4;
    to.first_fragment = static_cast<short>(plan.step[from.first_step].first_fragment);
    to.both = static_cast<unsigned char>(from.both);
    to.paired = from.paired;
    for (int i = 0; i < 2; ++i) to.single[i] = static_cast<unsigned char>(from.single[i]);
    for (int a = 0; a < 3; ++a) {
      to.residue[a] = static_cast<unsigned char>(from.residue[a]);
    }
  }
}

// Which outputs the first and the last cell of each axis have; all others have all.
void set_existence(const Problem& problem, const Plan& plan, Params& p) {
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.last_cell[a] = plan.cells[a] - 1;
    for (int u = 0; u < plan.num_units; ++u) {
      for (int phase = 0; phase < 1 + plan.unit[u].paired; ++phase) {
        const uint32_t bit = 1u << (2 * u + phase);
        const int64_t residue = plan.unit[u].residue[a] + (a == 2 ? phase : 0);
        const int64_t first = int64_t{plan.first_cell[a]} * plan.stride[a] + residue - plan.padding[a];
        p.all_exist |= bit;
        if (first >= 0) p.first_exists[a] |= bit;
        if (first + int64_t{p.last_cell[a]} * plan.stride[a] < axis.out()) p.last_exists[a] |= bit;
      }
    }
  }
}

Params make_params(const Problem& problem, const Plan& plan) {
  Params p{};
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.kernel_positions = static_cast<int>(problem.kernel_positions());
  p.weight_elements = static_cast<int>(problem.weight_elements());
  const Strides strides = input_strides(problem);
  p.input_batch = strides.batch;
  p.output_batch = problem.out_positions();
  p.input_channel = static_cast<int>(strides.channel);
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = axis_params(problem.axis[a]);
    p.input_axis[a] = static_cast<int>(strides.axis[a]);
    p.in[a] = static_cast<int>(problem.axis[a].in);
    p.out[a] = static_cast<int>(problem.axis[a].out());
    p.stride[a] = plan.stride[a];
    p.padding[a] = plan.padding[a];
    p.tile[a] = plan.tile[a];
    p.first_cell[a] = plan.first_cell[a];
    p.low[a] = plan.low[a];
    p.region[a] = plan.region[a];
    p.tiles[a] = fast_divide(plan.tiles[a]);
    p.tile_size[a] = fast_divide(plan.tile[a]);
    p.region_size[a] = fast_divide(plan.region[a]);
  }
  p.twins = plan.twins;
  p.tile_groups = plan.tile_groups();
  p.positions = plan.positions();
  p.shared.bias = plan.column_chunks * plan.num_fragments * plan.column_tiles * 256;
  p.shared.places = p.shared.bias + plan.column_chunks * plan.column_tiles * 32;
  p.shared.cell_positions = p.shared.places + p.positions * 4;
  p.shared.teams = static_cast<int>(plan.block_bytes);
  p.shared.team_bytes = static_cast<int>(plan.team_bytes);
  p.shared.cells = plan.planes() * p.positions * plan.position_bytes();
  p.shared.rests = p.positions * plan.position_bytes();
  p.channel_blocks = plan.channel_blocks;
  p.column_chunks = plan.column_chunks;
  set_steps(plan, p);
  set_units(plan, p);
  set_existence(problem, plan, p);
  return p;
}

// The tiles that are left over when all blocks, or teams, have had equally many are cut, so that more end together.
void set_tasks(const Plan& plan, int blocks, int teams, Params& p) {
  const int tiles = static_cast<int>(plan.num_tiles), all = blocks * teams, slots = tiles < all ? all : blocks;
  const int rest = tiles % slots;
  const int parts = rest == 0 ? 1 : std::max(1, std::min(slots / rest, plan.tile_groups() / kWarps));
  p.parts = fast_divide(parts);
  p.whole_tiles = tiles - rest;
  p.num_tasks = p.whole_tiles + rest * parts;
}

template <class Traits>
cudaError_t launch(const Plan& plan, Params params, cudaStream_t stream) {
  const auto kernel = chain_mma_kernel<Traits>;
  int device = 0, multiprocessors = 0, limit = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  // As many teams as fit, but not so many that multiprocessors go without.
  const int64_t wanted = (plan.num_tiles + multiprocessors - 1) / multiprocessors;
  const int64_t room = (limit - int64_t{sizeof(State)} - plan.block_bytes) / plan.team_bytes;
  const int teams = static_cast<int>(std::max<int64_t>(1, std::min({int64_t{kMaxTeams}, wanted, room})));
  const int shared = static_cast<int>(plan.block_bytes + teams * plan.team_bytes);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, teams * kTeamThreads, shared);
  }
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorInvalidConfiguration;
  const int blocks = static_cast<int>(std::min<int64_t>(plan.num_tiles, int64_t{resident} * multiprocessors));
  set_tasks(plan, blocks, teams, params);
  kernel<<<blocks, dim3(kTeamThreads, teams), shared, stream>>>(params);
  return cudaGetLastError();
}

// Whether the plan has the shape, which sets its part of the parameters.
template <class Shape>
bool set_shape(const Plan& plan, Params& p) {
  static_assert(first_step<Shape>(Shape::kUnits) <= kMaxShapeSteps);
  if (plan.num_units != Shape::kUnits || plan.column_chunks > 1) return false;
  bool known[kShapeDeltas] = {true};
  for (int u = 0; u < plan.num_units; ++u) {
    const fastconvt::chain_mma::Unit& unit = plan.unit[u];
    if (!unit.paired || unit.both != Shape::both(u) || unit.single[0] != Shape::single(u) || unit.single[1] != 0) {
      return false;
    }
    for (int i = 0; i < unit.both + unit.single[0]; ++i) {
      const int s = unit.first_step + i, delta = Shape::delta(u, i);
      const int first = static_cast<int>(p.step[s] & 0xffff), further = static_cast<int>(p.step[s] >> 16) - first;
      p.shape_step[s] = first;
      if (!known[delta]) p.shape_delta[delta] = further;
      known[delta] = true;
      if (p.shape_delta[delta] != further) return false;
    }
  }
  return true;
}

template <typename T, bool kSplit, int kColumns>
cudaError_t launch_any(const Plan& plan, const Params& params, cudaStream_t stream) {
  if constexpr (kSplit) {
    if (plan.rests) return launch<Traits<T, kSplit, kColumns, AnyRests, false>>(plan, params, stream);
  }
  return launch<Traits<T, kSplit, kColumns, AnyShape, false>>(plan, params, stream);
}

template <typename T, bool kSplit>
cudaError_t launch_columns(const Plan& plan, Params params, cudaStream_t stream) {
  if (plan.column_tiles == 1) return launch_any<T, kSplit, 1>(plan, params, stream);
  using Shape = Kernel3Stride2<kSplit>;
  if (!plan.twins && params.in_channels < kBlock && set_shape<Shape>(plan, params)) {
    return launch<Traits<T, kSplit, 2, Shape, true>>(plan, params, stream);
  }
  return launch_any<T, kSplit, 2>(plan, params, stream);
}

}  // namespace
}  // namespace chain_mma

cudaError_t launch_chain_mma(const Problem& problem, const void* input, const void* weight, const void* bias,
                             const void* subtrahend, double min, double max, void* output, cudaStream_t stream) {
  if (problem.batch == 0) return cudaSuccess;
  chain_mma::Plan plan{};
  fastconvt::chain_mma::make_plan(problem, plan);
  if (!plan.refusal.empty()) return cudaErrorNotSupported;
  chain_mma::Params params = chain_mma::make_params(problem, plan);
  params.input = input, params.weight = weight, params.bias = bias, params.subtrahend = subtrahend;
  params.output = output, params.min = static_cast<float>(min), params.max = static_cast<float>(max);
  switch (problem.dtype) {
    case DType::kFloat16:
      return chain_mma::launch_columns<__half, false>(plan, params, stream);
    case DType::kBFloat16:
      return chain_mma::launch_columns<__nv_bfloat16, false>(plan, params, stream);
    default:
      return plan.split ? chain_mma::launch_columns<float, true>(plan, params, stream)
                        : chain_mma::launch_columns<float, false>(plan, params, stream);
  }
}

}  // namespace fastconvt::cuda
