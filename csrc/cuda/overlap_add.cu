// The overlap-add family, host side: parameters of a problem and the template instance that runs it.
#include "overlap_add.cuh"
#include "overlap_add_wide.cuh"

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

OverlapAddAxis overlap_add_axis(const Axis& axis, const OverlapAddTile& tile, int a) {
  OverlapAddAxis x{};
  x.in = static_cast<int>(axis.in), x.out = static_cast<int>(axis.out());
  x.kernel = static_cast<int>(axis.kernel), x.stride = static_cast<int>(axis.stride);
  x.dilation = static_cast<int>(axis.dilation);
  x.bases = static_cast<int>(tile.bases[a]);
  x.copy_shift = tile.copies > 1 && a == tile.copy_axis ? static_cast<int>(tile.copy_shift) : 0;
  x.step = x.stride * x.bases;
  x.residues = x.copy_shift > 0 ? x.stride * x.copy_shift : x.step;
  x.first_base = static_cast<int>(axis.base(0));
  x.first = static_cast<int>(axis.base(0) * axis.stride - axis.padding);
  x.cells = static_cast<int>(tile.cells[a]);
  x.span = static_cast<int>(tile.span[a]), x.spans = static_cast<int>(tile.spans[a]);
  x.low = static_cast<int>(tile.low[a]), x.reach = static_cast<int>(tile.reach[a]);
  x.support = static_cast<int>(tile.support[a]);
  x.by_stride = fast_divide(x.stride), x.by_dilation = fast_divide(x.dilation);
  x.by_span = fast_divide(x.span), x.by_spans = fast_divide(x.spans);
  x.by_reach = fast_divide(x.reach), x.by_support = fast_divide(x.support);
  return x;
}

OverlapAddParams overlap_add_params(const Problem& problem, const OverlapAddTile& tile, const void* input,
                                    const void* weight, const void* bias, void* output) {
  OverlapAddParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  p.in = input_strides(problem), p.out = output_strides(problem);
  for (int a = 0; a < 3; ++a) {
    p.axis[a] = overlap_add_axis(problem.axis[a], tile, a);
    p.definition[a] = axis_params(problem.axis[a]);
    p.by_boxes[a] = fast_divide(static_cast<int>(ceil_div(tile.cells[a], tile.box[a + 1])));
    p.by_box[a] = fast_divide(static_cast<int>(tile.box[a + 1]));
    p.by_held[a] = fast_divide(static_cast<int>(tile.held[a + 1]));
  }
  p.batch = static_cast<int>(problem.batch), p.groups = static_cast<int>(problem.groups);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.span_channels = static_cast<int>(tile.span_channels);
  p.columns = static_cast<int>(tile.columns), p.copies = static_cast<int>(tile.copies);
  p.row_warps = static_cast<int>(tile.row_warps), p.column_warps = static_cast<int>(tile.column_warps);
  p.teams = static_cast<int>(tile.teams);
  p.rows = 1;
  for (int i = 0; i < 4; ++i) {
    p.box[i] = static_cast<int>(tile.box[i]), p.held[i] = static_cast<int>(tile.held[i]);
    p.rows *= p.box[i];
  }
  p.held_positions = static_cast<int>(tile.held_positions);
  p.steps = static_cast<int>(tile.steps), p.stage_steps = static_cast<int>(tile.stage_steps);
  p.fragments = static_cast<int>(tile.fragments);
  p.entry_count = tile.wide ? 0 : static_cast<int>(tile.entry_count()),
  p.support_count = static_cast<int>(tile.support_count());
  p.weight_channel = problem.out_channels_per_group() * problem.kernel_positions();
  p.half_bytes = static_cast<int>(round_up(tile.held_positions, int64_t{8})) * 16;
  p.step_weights = static_cast<int>(tile.step_bytes - tile.fragments * overlap_add_fragment_bytes(tile.strict));
  p.step_bytes = static_cast<int>(tile.step_bytes), p.stage_bytes = static_cast<int>(tile.stage_bytes);
  p.entries = static_cast<int>(tile.entries), p.positions = static_cast<int>(tile.positions);
  p.weights = static_cast<int>(tile.weights), p.pointers = static_cast<int>(tile.pointers);
  p.fold_entries = static_cast<int>(tile.fold_entries), p.totals = static_cast<int>(tile.totals);
  p.channels_last = problem.layout == Layout::kChannelsLast;
  const int64_t vector = 16 / problem.element_size();
  p.granules = p.channels_last && problem.in_channels % vector == 0 && p.group_in % vector == 0 &&
               reinterpret_cast<uintptr_t>(input) % 16 == 0;
  if (tile.wide) {
    p.chunks = static_cast<int>(tile.chunks);
    p.block_sets = static_cast<int>(tile.block_sets), p.sets = static_cast<int>(tile.sets);
    p.taps = static_cast<int>(problem.kernel_positions());
    p.wide_columns = p.group_out;
    for (const Axis& axis : problem.axis) p.wide_columns *= static_cast<int>(axis.stride);
    p.channel_granules = static_cast<int>(tile.channel_granules);
    p.all_granules = static_cast<int>(round_up(tile.granules, int64_t{2}));
    p.right = static_cast<int>(tile.right), p.cell_rows = static_cast<int>(tile.rows);
    p.outputs = static_cast<int>(tile.outputs);
    p.terms = p.outputs + p.block_sets * kOverlapAddWideColumns * 8;
    p.by_chunks = fast_divide(p.chunks), p.by_group_out = fast_divide(p.group_out);
    p.by_channel_granules = fast_divide(p.channel_granules);
    p.vector = static_cast<int>(overlap_add_wide_vector(problem));
    while (reinterpret_cast<uintptr_t>(output) % (p.vector * problem.element_size()) != 0) p.vector /= 2;
  }
  p.lead = static_cast<int>(tile.lead);
  p.pairs = tile.pairs && reinterpret_cast<uintptr_t>(input) % (2 * problem.element_size()) == 0;
  p.by_groups = fast_divide(p.groups);
  p.by_entries = fast_divide(std::max(p.entry_count, 1)), p.by_support = fast_divide(p.support_count);
  p.by_column_blocks = fast_divide(static_cast<int>(tile.column_blocks));
  return p;
}

cudaError_t launch(void (*kernel)(OverlapAddParams), const OverlapAddParams& p, const OverlapAddTile& tile,
                   cudaStream_t stream) {
  const int shared = static_cast<int>(tile.shared_bytes),
            threads = static_cast<int>(tile.team_warps() * tile.teams) * 32;
  int blocks = 0;
  const cudaError_t error = count_resident_blocks(kernel, threads, shared, kOverlapAddShared, blocks);
  if (error != cudaSuccess) return error;
  const int grid = static_cast<int>(tile.boxes * tile.column_blocks) * p.groups;
  kernel<<<grid, threads, shared, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, OverlapAddPrecision kPrecision>
cudaError_t dispatch_overlap_add(const OverlapAddParams& p, const OverlapAddTile& tile, cudaStream_t stream) {
  if (tile.wide) return launch(overlap_add_wide_kernel<OverlapAddWideTraits<T, kPrecision>>, p, tile, stream);
  if (tile.warp_columns == 3) return launch(overlap_add_kernel<OverlapAddTraits<T, kPrecision, 3>>, p, tile, stream);
  return launch(overlap_add_kernel<OverlapAddTraits<T, kPrecision, 2>>, p, tile, stream);
}

}  // namespace

cudaError_t launch_overlap_add(const Problem& problem, const void* input, const void* weight, const void* bias,
                               void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  OverlapAddTile tile{};
  if (!overlap_add_refusal(problem, tile).empty()) return cudaErrorNotSupported;
  const OverlapAddParams p = overlap_add_params(problem, tile, input, weight, bias, output);
  return dispatch_precision<OverlapAddPrecision>(problem, [&](auto tag, auto precision) {
    return dispatch_overlap_add<typename decltype(tag)::type, decltype(precision)::value>(p, tile, stream);
  });
}

}  // namespace fastconvt::cuda
