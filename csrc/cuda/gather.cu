// The gather family, host side: the tile of a problem and the template instance that runs it.
#include "gather.cuh"

#include <algorithm>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kMaxStagedChannels = 32;  // more in one step saves little (48: 0.3 %, 16: +10 % on the layer list)
constexpr int kStaticShared = 256;      // of the kernel, at most
constexpr int kMaxColumns = 1 << 15;
constexpr int64_t kMaxIndex = int64_t{1} << 30;

// What a thread owns, as the traits of the kernel have it.
struct Shape {
  int phases, channels, positions;
};

// Few positions get few a thread: the rest would idle.
constexpr int64_t kFewPositions = 48;

Shape choose_shape(const Problem& problem) {
  const int64_t stride = problem.axis[2].stride, channels = problem.out_channels_per_group();
  int64_t positions = problem.batch;
  for (const Axis& axis : problem.axis) positions *= ceil_div(axis.out(), axis.stride);
  if (problem.dtype == DType::kFloat64) {
    return stride == 1 ? Shape{1, 4, 8} : stride == 2 ? Shape{2, 4, 4} : Shape{4, 4, 2};
  }
  if (channels == 1) {
    return stride == 1 ? Shape{1, 1, 8} : stride == 2 ? Shape{2, 1, 8} : stride <= 4 ? Shape{4, 1, 8} : Shape{8, 1, 4};
  }
  if (positions <= kFewPositions && stride <= 2) return stride == 1 ? Shape{1, 8, 1} : Shape{2, 4, 1};
  if (stride == 1) return channels > 4 ? Shape{1, 8, 8} : Shape{1, 4, 8};
  return stride == 2 ? Shape{2, 4, 8} : stride <= 4 ? Shape{4, 4, 4} : Shape{8, 4, 2};
}

// Whether rounding may exceed the rule of accuracy if the products of an output are added one after the other.
bool is_long(const Problem& problem) {
  double products = static_cast<double>(problem.in_channels_per_group());
  for (const Axis& axis : problem.axis) products *= static_cast<double>(ceil_div(axis.kernel, axis.tap_step()));
  return problem.dtype == DType::kFloat32 && products > kGatherLong;
}

template <typename T, bool kLong, typename Function>
cudaError_t dispatch_shape(const Shape& shape, Function&& function) {
  constexpr int kShare = kLong ? 2 : 1;  // half the positions, with a total each
  const auto is = [&](int phases, int channels) { return shape.phases == phases && shape.channels == channels; };
  if constexpr (sizeof(T) == 8) {
    if (is(1, 4)) return function(GatherTraits<T, 1, 4, 8>{});
    if (is(2, 4)) return function(GatherTraits<T, 2, 4, 4>{});
    return function(GatherTraits<T, 4, 4, 2>{});
  } else {
    if (is(1, 8) && shape.positions == 1) return function(GatherTraits<T, 1, 8, 1, kLong>{});
    if (is(1, 8)) return function(GatherTraits<T, 1, 8, 8 / kShare, kLong>{});
    if (is(1, 4)) return function(GatherTraits<T, 1, 4, 8 / kShare, kLong>{});
    if (is(1, 1)) return function(GatherTraits<T, 1, 1, 8 / kShare, kLong>{});
    if (is(2, 4) && shape.positions == 1) return function(GatherTraits<T, 2, 4, 1, kLong>{});
    if (is(2, 4)) return function(GatherTraits<T, 2, 4, 8 / kShare, kLong>{});
    if (is(2, 1)) return function(GatherTraits<T, 2, 1, 8 / kShare, kLong>{});
    if (is(4, 4)) return function(GatherTraits<T, 4, 4, 4 / kShare, kLong>{});
    if (is(4, 1)) return function(GatherTraits<T, 4, 1, 8 / kShare, kLong>{});
    if (is(8, 4)) return function(GatherTraits<T, 8, 4, 2 / kShare, kLong>{});
    return function(GatherTraits<T, 8, 1, 4 / kShare, kLong>{});
  }
}

// Offsets that `entries` consecutive entries span, at most.
int64_t entry_span(const AxisParams& axis, int64_t entries) {
  return axis.dilation <= axis.stride ? entries - 1 : ceil_div((entries - 1) * axis.dilation, axis.stride);
}

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// What does not depend on the tile.
GatherParams problem_params(const Problem& problem, int channels_per_bias, const void* input, const void* weight,
                            const void* bias, void* output) {
  GatherParams p{};
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  p.input_stride = input_strides(problem);
  p.output_stride = output_strides(problem);
  p.input = input, p.weight = weight, p.bias = bias, p.output = output;
  p.activation = problem.activation, p.alpha = problem.alpha;
  p.batch = static_cast<int>(problem.batch);
  p.groups = static_cast<int>(problem.groups);
  p.in_channels = static_cast<int>(problem.in_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels_per_group());
  p.channels_last = problem.layout == Layout::kChannelsLast;
  p.by_bias = fast_divide(channels_per_bias);
  for (int a = 0; a < 2; ++a) {
    p.bases[a] = static_cast<int>(ceil_div(p.axis[a].out, p.axis[a].stride));
    p.last_output[a] = static_cast<int>((p.axis[a].out - 1) % p.axis[a].stride);
    p.output_row[a] = p.axis[a].stride * p.output_stride.axis[a];
    p.input_tap[a] = -p.axis[a].offset_step() * p.input_stride.axis[a];
  }
  const AxisParams& last = p.axis[2];
  p.weight_axis[1] = last.kernel;
  p.weight_axis[0] = static_cast<int64_t>(p.axis[1].kernel) * last.kernel;
  for (int a = 0; a < 2; ++a) p.weight_tap[a] = p.axis[a].tap_step() * p.weight_axis[a];
  p.weight_filter = problem.kernel_positions();
  p.weight_channel = p.weight_filter * p.out_channels;
  p.weight_group = p.weight_channel * p.in_channels;
  p.input_group = p.input_stride.channel * p.in_channels;
  p.output_phase = static_cast<int>(p.output_stride.axis[2]);
  const int64_t reach = (last.kernel - int64_t{1}) * last.dilation;
  p.num_entries = static_cast<int>(last.dilation <= last.stride ? reach / last.stride + 1 : last.kernel);
  return p;
}

// What the choice of a tile depends on besides the problem.
struct Device {
  int num_sms, shared_per_sm, shared_per_block;
};

cudaError_t query(Device& device) {
  int id = 0;
  cudaError_t error = cudaGetDevice(&id);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, id);
  };
  get(device.num_sms, cudaDevAttrMultiProcessorCount);
  get(device.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return error;
}

// Channels, rows and entries of a tile.
void shape_tile(const Shape& shape, int warps, int units, GatherParams& p) {
  GatherTile& t = p.tile;
  const AxisParams& last = p.axis[2];
  t.warps = warps;
  t.units = units;
  t.positions = warps / units * 32 * shape.positions;
  t.phase_groups = static_cast<int>(ceil_div(last.stride, shape.phases));
  t.phases = static_cast<int>(ceil_div(last.stride, t.phase_groups));

  const int group_units = static_cast<int>(ceil_div(p.out_channels, shape.channels));
  t.groups = group_units >= units ? 1 : std::min(units / group_units, p.groups);
  t.units_per_group = std::min(group_units, units);
  t.channel_blocks =
      static_cast<int>(group_units >= units ? p.groups * ceil_div(group_units, units) : ceil_div(p.groups, t.groups));

  const int64_t max_columns = std::max<int64_t>(1, std::min<int64_t>(kMaxColumns, kMaxIndex / 2 / last.stride));
  p.segments = static_cast<int>(ceil_div(last.num_bases(), max_columns));
  t.columns = static_cast<int>(ceil_div(last.num_bases(), p.segments));
  // A halo of at most a quarter of a row: more entries at once would idle more than they save.
  const int64_t max_span = std::min(64, std::max(1, t.columns / 4));
  t.entries = std::min(p.num_entries, std::max(1, 32 / t.phases));
  while (t.entries > 1 && entry_span(last, t.entries) > max_span) --t.entries;
  t.halo = static_cast<int>(entry_span(last, t.entries));
  t.pitch = t.columns + t.halo;
}

// Steps and shared memory of a tile that shape_tile has made.
void stage_tile(const Problem& problem, const Shape& shape, const Device& device, GatherParams& p) {
  GatherTile& t = p.tile;
  const int element = static_cast<int>(problem.element_size()), acc = std::max(element, 4);
  // In channels_last a warp reads 32 / units positions of each unit: an odd multiple keeps groups in different banks.
  const int lanes = p.channels_last ? 32 / t.units : 1;
  t.input_pitch = lanes * static_cast<int>(ceil_div(t.positions + t.halo, lanes) | 1);
  t.weight_phase = t.units * shape.channels + (t.phases > 1 ? 4 : 0);
  t.weight_row = shape.channels == 1 ? t.units * shape.phases : t.phases * t.weight_phase;
  t.weight_offset = static_cast<int>(ceil_div(t.entries * 8, 16) * 16 / acc);

  const int registers = is_long(problem) ? 64 : shape.phases * shape.channels * shape.positions * acc / 4;
  const int resident = gather_min_blocks(registers) * (kMaxGatherThreads / 32) / t.warps;
  const int64_t shared = std::min(device.shared_per_block, device.shared_per_sm / resident - 1024) - kStaticShared;
  const int64_t max_channels = ceil_div(p.axis[0].kernel, p.axis[0].tap_step()) *
                               ceil_div(p.axis[1].kernel, p.axis[1].tap_step()) * p.in_channels;
  const int64_t channel_size = t.entries * t.weight_row + t.groups * t.input_pitch;
  const int positions = (t.positions + t.halo) * static_cast<int>(sizeof(InputPosition));
  const auto fit = [&](int stages) { return ((shared - positions) / acc / stages - t.weight_offset) / channel_size; };
  t.stages = max_channels <= std::min<int64_t>(kMaxStagedChannels, fit(1)) || fit(2) < 1 ? 1 : 2;
  int64_t channels = std::max<int64_t>(1, std::min({max_channels, fit(t.stages), int64_t{kMaxStagedChannels}}));
  channels = ceil_div(max_channels, ceil_div(max_channels, channels));
  if (channels > 4 && channels < max_channels) channels = std::min(ceil_div(channels, 4) * 4, fit(t.stages) / 4 * 4);
  t.channels = static_cast<int>(channels);
  const int columns = t.phases * t.entries * t.units * shape.channels;
  t.channel_split = 0;
  while (columns << (t.channel_split + 1) <= t.warps * 32 && 2 << t.channel_split <= t.channels) ++t.channel_split;

  t.input_offset = t.weight_offset + t.channels * t.entries * t.weight_row;
  t.stage_size = static_cast<int>(ceil_div(t.input_offset + t.channels * t.groups * t.input_pitch, 4) * 4);
  const int outputs = t.warps * staged_outputs(shape.channels, t.phases) * shape.channels * element;
  t.shared_bytes = std::max(t.stages * t.stage_size * acc + positions,
                            outputs + t.positions * static_cast<int>(sizeof(OutputPosition)));

  const bool four = p.channels_last && aligned(p.input, 4 * element);
  p.vector_input = four && p.in_channels % 4 == 0 && t.channels % 4 == 0;
  p.vector_groups = four && p.in_channels == 1 && p.groups % 4 == 0 && t.groups % 4 == 0;
  p.vector_output = p.channels_last && p.out_channels % shape.channels == 0 &&
                    aligned(p.output, std::min(16, shape.channels * element));
}

void finish(const Shape& shape, GatherParams& p) {
  const GatherTile& t = p.tile;
  const int64_t positions = static_cast<int64_t>(p.batch) * p.bases[1] * p.bases[0] * t.pitch - t.halo;
  p.num_blocks = ceil_div(positions, t.positions) * p.segments * t.channel_blocks * p.axis[0].stride *
                 p.axis[1].stride * t.phase_groups;
  for (int a = 0; a < 2; ++a) p.by_phase[a] = fast_divide(p.axis[a].stride);
  p.by_phase[2] = fast_divide(t.phase_groups);
  p.by_channel_block = fast_divide(t.channel_blocks);
  p.by_group_block = fast_divide(std::max(1, t.channel_blocks / p.groups));
  p.by_segment = fast_divide(p.segments);
  p.by_pitch = fast_divide(t.pitch);
  p.by_batch = fast_divide(p.batch);
  p.by_height = fast_divide(p.bases[1]);
  p.by_phases = fast_divide(t.phases);
  p.by_entries = fast_divide(t.entries);
  p.by_group_units = fast_divide(t.units_per_group);
  p.by_unit_channels = fast_divide(t.units * shape.channels);
  p.by_stride = fast_divide(p.axis[2].stride);
  p.by_dilation = fast_divide(p.axis[2].dilation);
}

void make_tile(const Problem& problem, const Shape& shape, const Device& device, int warps, int units,
               GatherParams& p) {
  shape_tile(shape, warps, units, p);
  stage_tile(problem, shape, device, p);
  finish(shape, p);
}

// Instructions that the busiest SM issues, roughly: enough to rank the tiles of one problem.
double tile_cost(const GatherParams& p, const Shape& shape, const Device& device) {
  const GatherTile& t = p.tile;
  if (t.shared_bytes > device.shared_per_block - kStaticShared) return 1e300;
  const double outer_taps =
      static_cast<double>(p.axis[0].kernel) * p.axis[1].kernel / p.axis[0].stride / p.axis[1].stride;
  const double channels = outer_taps * p.in_channels;
  const double taps = static_cast<double>(p.axis[2].kernel) / t.phase_groups;
  const double entries = std::min<double>(p.num_entries, taps);
  const double chunks = std::max(1.0, entries / t.entries);
  const double steps = std::max(1.0, channels / t.channels) * chunks;
  const double active = static_cast<double>(t.warps) / t.units * std::min(t.units, t.groups * t.units_per_group);
  const double positions = (t.positions + t.halo) / 32.0;
  const double items = t.entries * t.phases * t.units * shape.channels / 32.0;

  const double compute =
      active * (entries * (shape.positions + 6) + taps * (shape.channels * (shape.positions + 0.5) + 1));
  const double copies = 6.5 * (chunks * positions * t.groups + taps * t.units * shape.channels / 32);
  const double runs = std::max(1.0, t.channels / static_cast<double>(p.in_channels));
  const double step =
      t.warps * 60 + positions * (30 + runs * (15 + 10 * t.groups)) + std::max<double>(items, t.warps) * 110;
  const double store = positions * 100 + active * shape.positions * (30 + t.phases * (40 + 5.0 * shape.channels));
  const double block = channels * (compute + copies) + steps * step + store + t.warps * 150 + 1500;
  const double per_sm = static_cast<double>(ceil_div(p.num_blocks, device.num_sms));
  // Too few warps to hide latency.
  const double idle = std::max(1.0, 8.0 / (std::min(per_sm, 16.0 / t.warps) * t.warps));
  return per_sm * block * idle;
}

void choose_tile(const Problem& problem, const Shape& shape, const Device& device, GatherParams& p) {
  double best = -1;
  int best_warps = 0, best_units = 0;
  for (int warps = kMaxGatherThreads / 32; warps >= 2; warps /= 2) {
    for (int units = 1; units <= warps; units *= 2) {
      make_tile(problem, shape, device, warps, units, p);
      const double cost = tile_cost(p, shape, device);
      if (best < 0 || cost < best) best = cost, best_warps = warps, best_units = units;
    }
  }
  make_tile(problem, shape, device, best_warps, best_units, p);
}

// What 32-bit arithmetic in the kernel can count; only the last axis may be longer.
bool supported(const Problem& problem) {
  int64_t taps = problem.in_channels_per_group();
  for (const Axis& axis : problem.axis) {
    if (!fits(axis)) return false;
  }
  for (int a = 0; a < 2; ++a) {
    const Axis& axis = problem.axis[a];
    taps *= ceil_div(axis.kernel, axis.tap_step());
    if (axis.in >= kMaxIndex || ceil_div(axis.out(), axis.stride) >= kMaxIndex || taps >= kMaxIndex) return false;
  }
  return problem.batch < kMaxIndex && problem.in_channels < kMaxIndex && problem.out_channels < kMaxIndex;
}

// A single input position whose outputs are exactly the kernel is one matrix product: in contiguous layout, weights and
// outputs of a channel lie in the same order, so the kernel positions become channels. Other problems are returned as
// they are.
Problem single_position_product(const Problem& problem) {
  bool single = problem.layout == Layout::kContiguous;
  for (const Axis& axis : problem.axis) {
    const bool whole = axis.out() == axis.kernel && axis.padding == 0 && (axis.dilation == 1 || axis.kernel == 1);
    single = single && axis.in == 1 && whole;
  }
  if (!single || problem.out_channels * problem.kernel_positions() >= kMaxIndex) return problem;
  Problem product = problem;
  product.out_channels *= problem.kernel_positions();
  product.axis = {};
  return product;
}

static_assert(sizeof(GatherBlock) <= kStaticShared, "the block's own variables are not counted in shared_bytes");

template <class Traits>
cudaError_t launch(const GatherParams& p, const Device& device, cudaStream_t stream) {
  // The same value every time: launches from several threads must not undo each other's.
  const cudaError_t error = cudaFuncSetAttribute(gather_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 device.shared_per_block - kStaticShared);
  if (error != cudaSuccess) return error;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(p.num_blocks, INT32_MAX));
  gather_kernel<Traits><<<grid, p.tile.warps * 32, p.tile.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gather(const Problem& problem, const void* input, const void* weight, const void* bias, void* output,
                          cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  Device device{};
  const cudaError_t error = query(device);
  if (error != cudaSuccess) return error;

  const Problem product = single_position_product(problem);
  if (!supported(product)) return cudaErrorNotSupported;
  const int channels_per_bias = static_cast<int>(product.out_channels / problem.out_channels);
  GatherParams p = problem_params(product, channels_per_bias, input, weight, bias, output);
  Shape shape = choose_shape(product);
  const bool in_two_levels = is_long(product);
  if (in_two_levels) shape.positions = std::max(1, shape.positions / 2);
  choose_tile(product, shape, device, p);
  const auto run = [&](auto traits) { return launch<decltype(traits)>(p, device, stream); };
  if (in_two_levels) return dispatch_shape<float, true>(shape, run);
  return dispatch_dtype(problem.dtype,
                        [&](auto tag) { return dispatch_shape<typename decltype(tag)::type, false>(shape, run); });
}

}  // namespace fastconvt::cuda
