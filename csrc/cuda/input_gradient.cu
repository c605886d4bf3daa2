#include "gradients.cuh"

#include <algorithm>

namespace fastconvt::cuda {
namespace {

struct InputGradientParams {
  RowProduct product;
  AxisParams axis[3];
  PhaseView view;
  int out_begin[3], out_end[3];
  int first_input[3];
  int inputs[3];
  int classes[3];  // of taps: a class has one phase
  int64_t phases;
  int phases_per_table;
  Strides output;
  int64_t batch_begin;
  int64_t threads;
  int64_t items;  // (tile of kThreads threads, channel block)
};

// The phase of a class of taps: t, t + tap_step, ... along each axis.
__device__ inline void fill_phase(const InputGradientParams& p, int64_t index, Phase& phase) {
  int taps = 1;
  phase.source_offset = 0;
#pragma unroll 1
  for (int a = 2; a >= 0; --a) {
    const AxisParams& axis = p.axis[a];
    const int tap = split_off(index, p.classes[a]);
    const TapReach reach = reach_of_tap(axis, p.view.axis[a], p.out_begin[a], p.out_end[a], tap);
    phase.residue[a] = reach.residue;
    phase.first_tap[a] = tap;
    phase.num_taps[a] = (axis.kernel - 1 - tap) / axis.tap_step() + 1;
    phase.offset[a] = reach.offset - p.view.axis[a].first_cell - reach.begin;
    phase.source_size[a] = reach.size;
    phase.source_offset += p.view.residue_offset(a, reach.residue, axis.stride) + reach.begin * p.view.cell.axis[a];
    taps *= phase.num_taps[a];
  }
  phase.rows = taps * p.product.row_channels;
}

template <typename T, typename S, int kColumns>
__global__ void __launch_bounds__(kThreads, kColumns <= 4 && sizeof(T) < 8 ? 6 : kMinBlocks<T>)
    input_gradient_kernel(const __grid_constant__ InputGradientParams p, const S* grad_output, const T* weight,
                          T* grad_input) {
  using Acc = accumulator_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Phase* phases = reinterpret_cast<Phase*>(shared);
  Acc* rows = reinterpret_cast<Acc*>(phases + p.phases_per_table);
  const RowProduct& r = p.product;
  const T* no_bias = nullptr;
  int64_t table = -1;  // the phase that the table begins with
  for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
    int64_t thread = item;
    const ChannelBlock block = find_block<kColumns>(r, split_off(thread, r.blocks));
    thread = thread * kThreads + threadIdx.x;
    const bool active = thread < p.threads;
    Cells cells;
    const int64_t batch = find_cell(active ? thread : 0, p.inputs, cells.coordinate);
    const bool last_rows = cells.coordinate[1] + kCells > p.inputs[1];
    const int heights = last_rows ? p.inputs[1] - cells.coordinate[1] : kCells;
    cells.offset = batch * r.source.batch;
    int64_t to = (p.batch_begin + batch) * p.output.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      cells.coordinate[a] += p.first_input[a];
      cells.offset += cells.coordinate[a] * r.source.axis[a];
      to += cells.coordinate[a] * p.output.axis[a];
    }
    Acc sum[kCells][kColumns] = {};
    for (int64_t first = 0; first < p.phases; first += p.phases_per_table) {
      const int count = static_cast<int>(min(p.phases - first, static_cast<int64_t>(p.phases_per_table)));
      if (first != table) {
        prepare_phases<kColumns>(r, first, count, weight, no_bias, Acc(1), Acc(0), phases, rows,
                                 [&](int64_t index, Phase& phase) { fill_phase(p, index, phase); });
        table = first;
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        add_block<kColumns>(r, phases[i], cells, block, grad_output, weight, no_bias, Acc(1), Acc(0), rows, sum);
      }
    }
    to += (static_cast<int64_t>(block.group) * r.columns + block.first_column) * p.output.channel;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        if (active && block.first_column + c < r.columns && i < heights) {
          grad_input[to + c * p.output.channel + i * p.output.axis[1]] = from_accumulator<T>(sum[i][c]);
        }
      }
    }
  }
}

InputGradientParams make_input_gradient_params(const Problem& problem, const Window& window, int columns) {
  InputGradientParams p{};
  RowProduct& r = p.product;
  const int64_t positions = problem.kernel_positions();
  p.view = make_phase_view(problem, window);
  r.source = p.view.cell;
  r.row_channels = static_cast<int>(problem.out_channels_per_group());
  finish_source(r, problem.dtype == DType::kFloat64 ? 8 : 4);
  r.columns = static_cast<int>(problem.in_channels_per_group());
  r.blocks_per_group = static_cast<int>(ceil_div(r.columns, columns));
  r.blocks = static_cast<int>(r.blocks_per_group * problem.groups);
  r.weight_row_stride = positions;
  r.weight_column_stride = r.row_channels * positions;
  r.weight_group_stride = r.columns * r.weight_column_stride;
  p.output = input_strides(problem);
  p.batch_begin = window.batch_begin;
  p.threads = window.batch_count;
  p.phases = 1;
  int64_t weight_stride = 1;
  for (int a = 2; a >= 0; --a) {
    const AxisParams axis = p.axis[a] = axis_params(problem.axis[a]);
    r.axis[a] = {axis.tap_step(), axis.offset_step(), static_cast<int>(weight_stride),
                 axis.offset_step() * r.source.axis[a]};
    weight_stride *= axis.kernel;
    p.out_begin[a] = window.out_begin[a];
    p.out_end[a] = window.out_end[a];
    p.first_input[a] = window.in_begin[a];
    p.inputs[a] = window.in_end[a] - window.in_begin[a];
    p.classes[a] = std::min(axis.kernel, axis.tap_step());
    p.phases *= p.classes[a];
    p.threads *= a == 1 ? ceil_div(p.inputs[a], kCells) : p.inputs[a];
  }
  p.phases_per_table = static_cast<int>(std::min<int64_t>(p.phases, kMaxPhases));
  p.items = ceil_div(p.threads, kThreads) * r.blocks;
  return p;
}

}  // namespace

template <typename T, typename S>
cudaError_t launch_input_gradient(const Problem& problem, const Window& window, const S* grad_output, const T* weight,
                                  T* grad_input, cudaStream_t stream) {
  return dispatch_columns<T>(problem.in_channels_per_group(), [&](auto columns) {
    InputGradientParams params = make_input_gradient_params(problem, window, columns);
    const int64_t rows = problem.kernel_positions() * params.product.row_channels * params.product.blocks;
    const int64_t all_rows = params.phases > kMaxPhases ? kMaxAttribute : rows;  // several tables: nothing is resident
    const int64_t shared =
        plan_shared_memory(params.phases_per_table, all_rows, columns, sizeof(accumulator_t<T>), params.product);
    const auto kernel = input_gradient_kernel<T, S, columns>;
    int64_t grid;
    const cudaError_t error = count_blocks(reinterpret_cast<const void*>(kernel), shared, params.items, grid);
    if (error != cudaSuccess) return error;
    kernel<<<grid, kThreads, shared, stream>>>(params, grad_output, weight, grad_input);
    return cudaGetLastError();
  });
}

template cudaError_t launch_input_gradient(const Problem&, const Window&, const float*, const float*, float*,
                                           cudaStream_t);
template cudaError_t launch_input_gradient(const Problem&, const Window&, const double*, const double*, double*,
                                           cudaStream_t);
template cudaError_t launch_input_gradient(const Problem&, const Window&, const float*, const __half*, __half*,
                                           cudaStream_t);
template cudaError_t launch_input_gradient(const Problem&, const Window&, const float*, const __nv_bfloat16*,
                                           __nv_bfloat16*, cudaStream_t);

}  // namespace fastconvt::cuda
