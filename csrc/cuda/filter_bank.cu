// The filter-bank family, host side: parameters of a problem and the template instance that runs it.
#include "filter_bank.cuh"

#include "dispatch.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// The most bytes that channels of a position can be read by.
int access_bytes(const Problem& problem, const void* input) {
  const int64_t size = problem.element_size();
  for (const int bytes : {16, 8, 4}) {
    if (problem.in_channels * size % bytes == 0 && problem.in_channels_per_group() * size % bytes == 0 &&
        aligned(input, bytes)) {
      return bytes;
    }
  }
  return static_cast<int>(size);
}

FilterBankParams filter_bank_params(const Problem& problem, const FilterBankTile& tile, const void* input,
                                    const void* weight, const void* bias, void* output) {
  const Axis& axis = problem.axis[2];
  const int64_t size = problem.element_size();
  FilterBankParams p{};
  p.input = input, p.weight = weight, p.bias = problem.has_bias ? bias : nullptr, p.output = output;
  p.rectify = rectifier(problem);
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.batch = static_cast<int>(problem.batch), p.groups = static_cast<int>(problem.groups);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.length = static_cast<int>(axis.in), p.kernel = static_cast<int>(axis.kernel);
  p.stride = static_cast<int>(axis.stride), p.padding = static_cast<int>(axis.padding);
  p.outputs = axis.out();
  p.first_base = static_cast<int>(axis.base(0));
  p.bases = static_cast<int>(axis.base(axis.out() - 1)) - p.first_base + 1;
  p.lead = static_cast<int>(tile.lead);
  p.first_input = p.first_base - static_cast<int>(tile.taps - 1 + tile.lead);
  p.row_tiles = static_cast<int>(tile.row_tiles), p.loops = static_cast<int>(tile.loops);
  p.sums = tile.loops > 1 ? static_cast<int>(tile.slots * tile.stage_bytes) : 0;
  while (1 << p.split_bits < tile.splits) ++p.split_bits;
  p.rows = p.group_out * p.stride, p.taps = static_cast<int>(tile.taps);
  p.chunks = static_cast<int>(tile.chunks), p.stages = static_cast<int>(tile.stages);
  p.slots = static_cast<int>(tile.slots), p.held = static_cast<int>(tile.held);
  p.pitch = static_cast<int>(tile.pitch), p.stage_bytes = static_cast<int>(tile.stage_bytes);
  p.weight_channel = problem.out_channels_per_group() * axis.kernel;
  p.weight_bytes = problem.weight_elements() * size;
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  p.input_bytes = channels_last ? access_bytes(problem, input) : tile.pairs && aligned(input, 2 * size) ? 1 : 0;
  p.store_pairs = (!channels_last || problem.out_channels == 1) && axis.stride % 2 == 0 && axis.padding % 2 == 0 &&
                  axis.out() % 2 == 0 && aligned(output, 2 * size);
  p.by_stride = fast_divide(p.stride);
  p.by_row_blocks = fast_divide(static_cast<int>(tile.row_blocks()));
  p.by_column_tiles = fast_divide(static_cast<int>(tile.column_tiles));
  p.by_span = fast_divide(static_cast<int>(tile.span));
  return p;
}

template <class Traits>
cudaError_t launch(FilterBankParams p, const FilterBankTile& tile, cudaStream_t stream) {
  const int shared = static_cast<int>(tile.shared_bytes), threads = Traits::kMakers + Traits::kFeeders;
  int blocks = 0;
  const cudaError_t error =
      count_resident_blocks(filter_bank_kernel<Traits>, threads, shared, kFilterBankShared, blocks);
  if (error != cudaSuccess) return error;
  p.feed_lanes = std::min(Traits::kFeeders, ceil_div(p.held, p.input_bytes + 1));
  p.feed_groups = Traits::kFeeders / p.feed_lanes;
  const int64_t grid = tile.row_blocks() * tile.column_tiles * p.groups * tile.splits;
  p.prefetchers = static_cast<int>(std::min<int64_t>(grid, blocks));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(tile.splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid)), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = tile.splits > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, filter_bank_kernel<Traits>, static_cast<const FilterBankParams>(p));
}

}  // namespace

cudaError_t launch_filter_bank(const Problem& problem, const void* input, const void* weight, const void* bias,
                               void* output, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  FilterBankTile tile{};
  if (!filter_bank_refusal(problem, tile).empty()) return cudaErrorNotSupported;
  const FilterBankParams p = filter_bank_params(problem, tile, input, weight, bias, output);
  const Axis& axis = problem.axis[2];
  const bool pairs = axis.stride % 2 == 0 && axis.kernel % 2 == 0 && aligned(weight, 2 * problem.element_size());
  return dispatch_precision<FilterBankPrecision>(problem, [&](auto tag, auto precision) {
    using T = typename decltype(tag)::type;
    constexpr FilterBankPrecision kPrecision = decltype(precision)::value;
    return pairs ? launch<FilterBankTraits<T, kPrecision, true>>(p, tile, stream)
                 : launch<FilterBankTraits<T, kPrecision, false>>(p, tile, stream);
  });
}

}  // namespace fastconvt::cuda
