#include "chain.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {

bool chain_supports(const Problem& problem) {
  constexpr int64_t kLimit = kMaxAttribute;
  if (problem.in_channels >= kLimit || problem.out_channels >= kLimit) return false;
  if (problem.kernel_positions() * std::max(problem.in_channels_per_group(), problem.out_channels_per_group()) >=
      kLimit) {
    return false;
  }
  return std::all_of(problem.axis.begin(), problem.axis.end(), [](const Axis& axis) {
    const int64_t extent = axis.in * axis.stride + axis.dilation * axis.kernel + axis.output_padding;
    return fits(axis) && extent < kLimit;
  });
}

void restrict_axis(const Problem& problem, int a, int64_t begin, int64_t end, Window& window) {
  const Axis& axis = problem.axis[a];
  const int64_t out = axis.out();
  const auto output = [out](int64_t o) { return static_cast<int>(std::clamp<int64_t>(o, 0, out)); };
  const int64_t next = end * axis.stride - axis.padding;
  const int64_t reach = (end - 1) * axis.stride - axis.padding + axis.dilation * (axis.kernel - 1) + 1;
  const bool last = end == axis.in;
  window.in_begin[a] = static_cast<int>(begin);
  window.in_end[a] = static_cast<int>(end);
  window.own_begin[a] = begin == 0 ? 0 : output(begin * axis.stride - axis.padding);
  window.own_end[a] = last ? static_cast<int>(out) : output(next);
  window.out_begin[a] = std::min(window.own_begin[a], static_cast<int>(out) - 1);  // at least one output
  window.out_end[a] = std::max(last ? static_cast<int>(out) : output(std::max(next, reach)), window.out_begin[a] + 1);
}

Window whole_window(const Problem& problem) {
  Window window{};
  window.batch_count = problem.batch;
  for (int a = 0; a < 3; ++a) restrict_axis(problem, a, 0, problem.axis[a].in, window);
  return window;
}

CellAxis make_cell_axis(const Axis& axis, int out_begin, int out_end) {
  const int64_t first = (out_begin + axis.padding) / axis.stride;
  const int64_t last = (out_end - 1 + axis.padding) / axis.stride;
  return {static_cast<int>(first), static_cast<int>(last - first + 1),
          static_cast<int>((out_begin + axis.padding) % axis.stride),
          static_cast<int>(std::min<int64_t>(axis.stride, out_end - out_begin))};
}

int64_t plan_shared_memory(int64_t phases, int64_t all_rows, int columns, int64_t accumulator_size,
                           RowProduct& product) {
  constexpr int64_t kResidentBytes = 32 << 10;
  constexpr int64_t kChunkBytes = 16 << 10;
  const int64_t row_bytes = columns * accumulator_size;
  product.resident = all_rows * row_bytes <= kResidentBytes;
  product.chunk_rows = static_cast<int>(product.resident ? kMaxAttribute : kChunkBytes / row_bytes);
  return phases * int64_t{sizeof(Phase)} + (product.resident ? all_rows * row_bytes : kChunkBytes);
}

int64_t plan_chain_memory(const Problem& problem, int columns, int64_t accumulator_size, ChainParams& params) {
  const int64_t rows = params.phases + problem.kernel_positions() * problem.in_channels_per_group();
  return plan_shared_memory(params.table_phases, rows * params.product.blocks, columns, accumulator_size,
                            params.product);
}

cudaError_t count_blocks(const void* kernel, int64_t shared_bytes, int64_t items, int64_t& blocks) {
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared_bytes);
  }
  if (error == cudaSuccess && resident == 0) error = cudaErrorInvalidConfiguration;
  blocks = std::min<int64_t>(items, int64_t{resident} * multiprocessors);
  return error;
}

ChainParams make_chain_params(const Problem& problem, const Window& window, int columns) {
  constexpr int64_t kEnoughItems = 1024;  // below: several items share a tile, each with some of the phases
  ChainParams p{};
  RowProduct& r = p.product;
  const int64_t positions = problem.kernel_positions();
  r.source = input_strides(problem);
  r.row_channels = static_cast<int>(problem.in_channels_per_group());
  finish_source(r, problem.element_size());
  r.bias_rows = 1;
  r.columns = static_cast<int>(problem.out_channels_per_group());
  r.blocks_per_group = (r.columns + columns - 1) / columns;
  r.blocks = static_cast<int>(r.blocks_per_group * problem.groups);
  r.weight_row_stride = r.columns * positions;
  r.weight_column_stride = positions;
  r.weight_group_stride = r.row_channels * r.weight_row_stride;
  p.window = window;
  p.channels = static_cast<int>(problem.out_channels);
  p.threads = window.batch_count;
  p.phases = 1;
  int64_t weight_stride = 1;
  for (int a = 2; a >= 0; --a) {
    const AxisParams axis = p.axis[a] = axis_params(problem.axis[a]);
    r.axis[a] = {axis.tap_step(), -axis.offset_step(), static_cast<int>(weight_stride),
                 -axis.offset_step() * r.source.axis[a]};
    weight_stride *= axis.kernel;
    p.cell[a] = make_cell_axis(problem.axis[a], window.out_begin[a], window.out_end[a]);
    p.cells[a] = p.cell[a].cells;
    p.threads *= a == 1 ? (p.cells[a] + kCells - 1) / kCells : p.cells[a];
    p.phases *= p.cell[a].residues;
  }
  const int64_t tiles = (p.threads + kThreads - 1) / kThreads;
  int64_t slices = (p.phases + kMaxPhases - 1) / kMaxPhases;
  while (tiles * slices < kEnoughItems && slices < p.phases) slices = std::min(2 * slices, p.phases);
  p.phases_per_item = static_cast<int>((p.phases + slices - 1) / slices);
  p.slices = (p.phases + p.phases_per_item - 1) / p.phases_per_item;
  p.items = tiles * p.slices;
  p.table_phases = p.phases <= kMaxPhases ? static_cast<int>(p.phases) : p.phases_per_item;
  return p;
}

namespace {

template <typename T>
struct OutputParams {
  T* output;
  accumulator_t<T> min, max;
};

template <typename T, int kColumns>
struct StoreOutput {
  using Acc = accumulator_t<T>;

  const OutputParams<T>& o;

  __device__ __forceinline__ void add_block(const ChainParams&, const Phase&, const Place&, const ChannelBlock&,
                                            Acc (&)[kCells][kColumns]) {}

  template <typename Sum>
  __device__ __forceinline__ void finish(const ChainParams& p, const Phase& phase, const Place& place,
                                         const Sum (&total)[kCells], Acc (&)[kCells][kColumns]) {
    const Outputs outputs(p, phase, place);
    T* to = o.output + outputs.offset(p, place);
    const Acc subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      const Activation<Acc> a = total[cell].activate();
      const Acc value = clamp(a.value * a.gate * Acc(1.0 / 6) - subtrahend, o.min, o.max);
      if (outputs.exists(p, cell)) to[cell * outputs.step(p)] = from_accumulator<T>(value);
    }
  }
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T>)
    logsumexp_hardswish_kernel(const __grid_constant__ ChainParams p, const __grid_constant__ OutputParams<T> o) {
  extern __shared__ __align__(16) unsigned char shared[];
  StoreOutput<T, kColumns> epilogue{o};
  run_chain<T, kColumns>(p, shared, epilogue);
}

}  // namespace

cudaError_t launch_logsumexp_hardswish(const Problem& problem, const void* input, const void* weight, const void* bias,
                                       const void* subtrahend, double min, double max, void* output,
                                       cudaStream_t stream) {
  if (!chain_supports(problem)) return cudaErrorNotSupported;
  if (problem.batch == 0) return cudaSuccess;
  return dispatch_dtype(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_columns<T>(problem.out_channels_per_group(), [&](auto columns) {
      ChainParams params = make_chain_params(problem, whole_window(problem), columns);
      params.input = input, params.weight = weight, params.bias = bias, params.subtrahend = subtrahend;
      const OutputParams<T> to{static_cast<T*>(output), static_cast<accumulator_t<T>>(min),
                               static_cast<accumulator_t<T>>(max)};
      const int64_t shared = plan_chain_memory(problem, columns, sizeof(accumulator_t<T>), params);
      const auto kernel = logsumexp_hardswish_kernel<T, columns>;
      int64_t grid;
      const cudaError_t error = count_blocks(reinterpret_cast<const void*>(kernel), shared, params.items, grid);
      if (error != cudaSuccess) return error;
      kernel<<<grid, kThreads, shared, stream>>>(params, to);
      return cudaGetLastError();
    });
  });
}

}  // namespace fastconvt::cuda
