// The depthwise family, host side: how a problem is divided, and the template instance that runs it.
#include "../core/depthwise.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "depthwise.cuh"
#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int64_t kMaxThreads = int64_t{1} << 30;  // of one channel tile, in one launch
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

// What a thread owns along the last axis: see the struct of that name.
enum class Form { kWords, kPairs, kCarry, kChannels };

// Vectors of a thread, by the bytes of an element and the window.
constexpr int word_count(int size, int window) { return size == 2 && window > 4 ? 2 : 4; }
constexpr int pair_count(int size) { return size == 2 ? 1 : 2; }
constexpr int carry_count(int size) { return size == 2 ? 1 : 2; }
constexpr int kChannelVector = 4;
constexpr int channel_count(int size, int window) { return size == 2 && window <= 4 ? 4 : 2; }
constexpr int kScalarCount = 8;

struct Choice {
  Form form;
  int vector;     // columns, or channels, side by side
  int count;      // such vectors of a thread
  int align = 1;  // a thread's first column begins at a multiple of so many elements
  int first = 0;  // phase of the first column of a pair; stride of carried columns
  int channel_tile = 1;
  int phases = 1 << 14;  // of the height that share a block, at most
};

// Whether threads march along tiles of the last axis.
bool is_flat(const Problem& problem) { return problem.layout == Layout::kContiguous && problem.axis[1].is_trivial(); }

// Whether there is one base along the last axis.
bool is_line(const Problem& problem) {
  return depthwise_window(problem) < 2 && problem.axis[2].out() <= problem.axis[2].stride;
}

Choice choose_channels(const Problem& problem, uintptr_t addresses) {
  const int size = static_cast<int>(problem.element_size());
  const DepthwiseWindow& w = kDepthwiseChannels[depthwise_window(problem)];
  const bool line = is_line(problem);
  const auto aligned = [&](int vector) {
    return problem.out_channels % vector == 0 && addresses % (vector * size) == 0;
  };
  if (line && aligned(16 / size)) return Choice{Form::kChannels, 16 / size, 1};
  if (line || !aligned(kChannelVector)) return Choice{Form::kChannels, 1, line ? 1 : kScalarCount};
  return Choice{Form::kChannels, kChannelVector, channel_count(size, w.depth * w.height * w.width)};
}

// The stride that carried columns are compiled for; 0 if they are not for this one.
int carry_stride(const Problem& problem, int vector) {
  const DepthwiseWindow& window = kDepthwiseRows[depthwise_window(problem)];
  const Axis& width = problem.axis[2];
  if (width.dilation != 1 || depthwise_taps(width) != window.width || window.depth != 1 || window.height > 2 ||
      window.width > 2) {
    return 0;
  }
  if (width.stride >= vector) return vector;
  if (width.stride == 2) return is_flat(problem) && window.width == 2 ? 2 : 0;
  return width.stride == 3 || width.stride == 4 ? static_cast<int>(width.stride) : 0;
}

Choice choose_form(const Problem& problem, const void* input, const void* output) {
  const Axis& width = problem.axis[2];
  const int size = static_cast<int>(problem.element_size()), vector = 16 / size;
  const auto address = reinterpret_cast<uintptr_t>(output);
  if (problem.layout == Layout::kChannelsLast) {
    return choose_channels(problem, reinterpret_cast<uintptr_t>(input) | address);
  }
  const int64_t row_bytes = width.out() * size;
  const bool vectors = row_bytes % 16 == 0;
  const DepthwiseWindow& window = kDepthwiseRows[depthwise_window(problem)];
  if (vectors && width.dilation == 1 && width.stride == 2 && width.kernel > 1 && window.width <= 2 &&
      depthwise_taps(width) == window.width) {
    const int shift = static_cast<int>(address / size % vector);
    return Choice{Form::kPairs, vector, pair_count(size), shift == 0 ? 1 : vector,
                  static_cast<int>((width.padding + shift) % 2)};
  }
  const int carry = carry_stride(problem, vector);
  if (carry > 0 && (vectors || is_flat(problem))) {
    return Choice{Form::kCarry, vector, carry_count(size), vectors && address % 16 == 0 ? 1 : vector, carry};
  }
  Choice choice{Form::kWords, 4 / size, word_count(size, window.depth * window.height * window.width)};
  const int64_t unit = is_flat(problem) ? 128 : std::min<int64_t>(128, row_bytes & -row_bytes);
  if (address % unit != 0 || row_bytes % unit != 0) choice.align = static_cast<int>(unit / size);
  return choice;
}

// How many channels and phases of the height share a block: filling their table is work too.
void choose_block(const Problem& problem, Choice& choice) {
  const bool channels = choice.form == Form::kChannels;
  const int64_t vector = channels ? choice.vector : 1;
  int64_t tile = channels ? problem.out_channels : 1;
  int64_t phases = std::min<int64_t>(choice.phases, problem.axis[1].stride);
  const auto bytes = [&] { return phases * depthwise_table_row(problem, tile) + tile * 4 + 64; };
  const auto halve_tile = [&] { tile = round_up(tile / 2, vector); };
  while (bytes() > 6 * 1024 && tile * problem.element_size() > 128) halve_tile();
  while (bytes() > 16 * 1024 && phases > 2) phases = (phases + 1) / 2;
  while (bytes() > kDepthwiseTable && phases > 1) phases = (phases + 1) / 2;
  while (bytes() > kDepthwiseTable && tile > vector) halve_tile();
  choice.channel_tile = static_cast<int>(tile);
  choice.phases = static_cast<int>(phases);
}

void set_problem(const Problem& problem, DepthwiseParams& p) {
  set_march_tensors(problem, p);
  for (int a = 0; a < 3; ++a) p.by_dilation[a] = fast_divide(p.axis[a].dilation);
  p.channels = static_cast<int>(problem.out_channels);
  p.by_multiplier = fast_divide(static_cast<int>(problem.out_channels_per_group()));
  p.row_step = p.input_row;
  p.rows_in = static_cast<int>(p.axis[1].in), p.rows_out = static_cast<int>(p.axis[1].out);
  p.row_stride = p.axis[1].stride, p.row_padding = p.axis[1].padding;
  p.first_row = static_cast<int>(p.axis[1].first_base()), p.num_rows = static_cast<int>(p.axis[1].num_bases());
  p.first_plane = static_cast<int>(p.axis[0].first_base());
}

// Threads along the last axis, and tiles if the height is trivial.
void set_columns(const Problem& problem, const Choice& choice, DepthwiseParams& p) {
  const int64_t stride = p.axis[2].stride, width = p.axis[2].out + choice.align - 1;
  const int64_t own = int64_t{choice.vector} * choice.count;
  int64_t columns;
  p.align = choice.align;
  p.align_columns = static_cast<int>(round_up(choice.align - 1, stride));
  if (choice.form == Form::kChannels) {
    columns = ceil_div(p.axis[2].out, stride * choice.count) * stride * (choice.channel_tile / choice.vector);
  } else {
    // All columns of a thread are in one phase.
    const int64_t step = choice.form == Form::kPairs ? 1 : stride / std::gcd<int64_t>(stride, choice.vector);
    columns = round_up(ceil_div(width, own), step);
    const int64_t warps = std::lcm<int64_t>(step, 32), sectors = std::lcm<int64_t>(step, 8);
    if (is_flat(problem) && columns > kDepthwiseRowThreads && warps <= kDepthwiseRowThreads) {
      columns = kDepthwiseRowThreads / warps * warps;
    } else if (columns >= 4 * sectors) {
      columns = round_up(columns, sectors);
    }
    p.column_out = static_cast<int>(columns * choice.vector);
    p.column_in = static_cast<int>(p.column_out / stride);
  }
  p.columns = static_cast<int>(columns);
  const bool spread = choice.form == Form::kWords || choice.form == Form::kCarry;
  p.slot_pitch = static_cast<int>(spread ? ceil_div(stride, choice.vector) : stride);
  p.num_slots = spread ? p.slot_pitch * choice.vector : p.slot_pitch;
  if (!is_flat(problem)) return;
  p.step_out = static_cast<int>(columns * own), p.step_in = static_cast<int>(p.step_out / stride);
  p.row_step = p.output_row = 0;
  p.row_stride = 1, p.row_padding = 0, p.first_row = 0;
  p.num_rows = p.rows_in = p.rows_out = static_cast<int>(ceil_div(width, columns * own));
}

// Bases of the height that a thread makes: more share a thread's set-up, fewer fill the GPU better. In microseconds on
// an H200: a round of blocks costs its set-up and its outputs, and the last round is rarely full.
template <class Columns>
int choose_march(const DepthwiseParams& p, int64_t batch) {
  constexpr double kResident = 132.0 * 32 * Columns::kWarps;
  const double outputs = double(p.axis[0].stride) * p.phases * Columns::kOutputs;
  const double step = std::max(kResident * outputs * sizeof(typename Columns::T) / 3.3e6, outputs * 0.03);
  const double setup = 0.6 + p.table_size * 0.0005;
  const double threads = double(p.columns) * double(p.axis[0].num_bases()) * double(batch) *
                         double(ceil_div(p.channels, p.channel_tile)) * double(ceil_div(p.row_stride, p.phases));
  int best = 1;
  double best_cost = 1e300;
  for (int most = 1; most <= 64; ++most) {
    const int64_t segments = ceil_div(p.num_rows, most);
    const int march = static_cast<int>(ceil_div(p.num_rows, segments));
    const double rounds = 1.03 * threads * double(segments) / kResident;
    const double idle = 0.5 * (std::ceil(rounds) - rounds) * std::min(1.0, 2 / rounds);
    // Long marches lie far apart in memory.
    const double cost = std::max(1.0, rounds + idle) * (setup + march * step) * (1 + 0.002 * march);
    if (cost < best_cost) best = march, best_cost = cost;
  }
  return best;
}

template <class Columns, int kDepth, int kHeight>
cudaError_t launch(DepthwiseParams& p, int64_t batch, cudaStream_t stream) {
  const int places = p.axis[0].stride * p.phases;
  const int phase_size = kDepth * kHeight * Columns::kTaps * p.channel_tile;
  int64_t table;  // floats
  if (Columns::kChannels) {
    p.table_size = places * kDepth * kHeight * p.axis[2].kernel * p.channel_tile;
    p.slot_pitch = phase_size + (p.channel_tile - phase_size % 32 + 32 * p.channel_tile) % 32;  // keeps banks apart
    table = int64_t{places} * p.axis[2].stride * p.slot_pitch;
    p.by_entries = fast_divide(p.axis[2].kernel);
  } else {
    table = p.table_size = places * p.num_slots * phase_size;
    p.by_entries = fast_divide(p.num_slots);
  }
  p.table_offset = static_cast<int>(round_up(p.channel_tile * 4, 16));
  p.mask_offset = p.table_offset + static_cast<int>(round_up(table * 4, 16));
  const auto shared = static_cast<size_t>(p.mask_offset + places * 4);
  if (p.march == 0) p.march = choose_march<Columns>(p, batch);
  const int64_t segments = ceil_div(p.num_rows, p.march), planes = p.axis[0].num_bases();
  const int64_t tiles = ceil_div(p.channels, p.channel_tile), groups = ceil_div(p.row_stride, p.phases);
  p.by_columns = fast_divide(p.columns);
  p.by_segment = fast_divide(static_cast<int>(segments));
  p.by_plane = fast_divide(static_cast<int>(planes));
  p.by_phase_group = fast_divide(static_cast<int>(groups));
  p.by_phases = fast_divide(p.phases);
  p.by_depth_phases = fast_divide(p.axis[0].stride);
  p.by_slot_pitch = fast_divide(p.slot_pitch);
  p.by_stride = fast_divide(p.axis[2].stride);
  const int64_t sample = p.columns * segments * planes;
  const int64_t slice = std::max<int64_t>(
      1, std::min({batch, kMaxThreads / sample, kMaxGrid / (tiles * groups) * Columns::kThreads / sample}));
  for (int64_t done = 0; done < batch; done += slice) {
    p.batch = static_cast<int>(std::min(slice, batch - done));
    const int64_t threads = sample * p.batch;
    const int64_t block = std::min<int64_t>(Columns::kThreads, round_up(threads, 32));
    const int64_t chunks = ceil_div(threads, block);
    if (chunks * tiles * groups > kMaxGrid || threads >= 2 * kMaxThreads) return cudaErrorNotSupported;
    p.by_chunk = fast_divide(static_cast<int>(chunks));
    depthwise_kernel<Columns, kDepth, kHeight>
        <<<static_cast<unsigned>(chunks * tiles * groups), static_cast<unsigned>(block), shared, stream>>>(p);
    p.input = static_cast<const char*>(p.input) + slice * p.input_batch * static_cast<int>(sizeof(typename Columns::T));
    p.output = static_cast<char*>(p.output) + slice * p.output_batch * static_cast<int>(sizeof(typename Columns::T));
  }
  return cudaGetLastError();
}

// Calls function(integral constants of the window's depth, height and width).
template <int index, bool channels, typename Function>
cudaError_t dispatch_window(int window, Function&& function) {
  constexpr int kNum = channels ? kNumDepthwiseChannels : kNumDepthwiseRows;
  if constexpr (index < kNum) {
    constexpr DepthwiseWindow kWindow = channels ? kDepthwiseChannels[index] : kDepthwiseRows[index];
    if (window == index) {
      return function(std::integral_constant<int, kWindow.depth>{}, std::integral_constant<int, kWindow.height>{},
                      std::integral_constant<int, kWindow.width>{});
    }
    return dispatch_window<index + 1, channels>(window, function);
  } else {
    return cudaErrorNotSupported;
  }
}

template <typename T>
cudaError_t dispatch_channels(const Problem& problem, const Choice& choice, DepthwiseParams& p, cudaStream_t stream) {
  return dispatch_window<0, true>(depthwise_window(problem), [&](auto depth, auto height, auto width) {
    constexpr int kWindow = depth * height, kCount = channel_count(sizeof(T), kWindow * width);
    if constexpr (depth == 1 && width == 1) {
      if (choice.count == 1 && choice.vector > 1) {
        return launch<ChannelColumns<T, kWindow, width, 1, 16 / sizeof(T)>, depth, height>(p, problem.batch, stream);
      }
      if (choice.count == 1) {
        return launch<ChannelColumns<T, kWindow, width, 1, 1>, depth, height>(p, problem.batch, stream);
      }
    }
    if (choice.vector > 1) {
      return launch<ChannelColumns<T, kWindow, width, kCount, kChannelVector>, depth, height>(p, problem.batch, stream);
    }
    return launch<ChannelColumns<T, kWindow, width, kScalarCount, 1>, depth, height>(p, problem.batch, stream);
  });
}

template <typename T, int stride, int taps, int depth, int height>
cudaError_t launch_carry(const Problem& problem, DepthwiseParams& p, cudaStream_t stream) {
  if constexpr (stride <= 16 / sizeof(T) && (stride > 2 || (height == 1 && taps == 2))) {
    using Columns = CarryColumns<T, depth * height, taps, carry_count(sizeof(T)), stride>;
    return launch<Columns, depth, height>(p, problem.batch, stream);
  } else {
    return cudaErrorNotSupported;
  }
}

template <typename T>
cudaError_t dispatch_form(const Problem& problem, const Choice& choice, DepthwiseParams& p, cudaStream_t stream) {
  if (choice.form == Form::kChannels) return dispatch_channels<T>(problem, choice, p, stream);
  return dispatch_window<0, false>(depthwise_window(problem), [&](auto depth, auto height, auto width) {
    constexpr int kWindow = depth * height, kPairs = pair_count(sizeof(T));
    if constexpr (width <= 2) {
      if (choice.form == Form::kPairs && choice.first == 0) {
        return launch<PairColumns<T, kWindow, width, kPairs, 0>, depth, height>(p, problem.batch, stream);
      }
      if (choice.form == Form::kPairs) {
        return launch<PairColumns<T, kWindow, width, kPairs, 1>, depth, height>(p, problem.batch, stream);
      }
      if constexpr (depth == 1) {
        if (choice.form == Form::kCarry && choice.first == 2) {
          return launch_carry<T, 2, width, depth, height>(problem, p, stream);
        }
        if (choice.form == Form::kCarry && choice.first == 3) {
          return launch_carry<T, 3, width, depth, height>(problem, p, stream);
        }
        if (choice.form == Form::kCarry && choice.first == 4) {
          return launch_carry<T, 4, width, depth, height>(problem, p, stream);
        }
        if (choice.form == Form::kCarry) return launch_carry<T, 8, width, depth, height>(problem, p, stream);
      }
    }
    return launch<WordColumns<T, kWindow, width, word_count(sizeof(T), kWindow * width)>, depth, height>(
        p, problem.batch, stream);
  });
}

cudaError_t run(const Problem& problem, const Choice& choice, DepthwiseParams& p, cudaStream_t stream) {
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_form<T>(problem, choice, p, stream);
  });
}

DepthwiseParams make_params(const Problem& problem, const Choice& choice, const void* input, const void* weight,
                            const void* bias, void* output) {
  DepthwiseParams p{};
  p.input = input, p.weight = weight, p.bias = bias, p.output = output;
  p.rectify = rectifier(problem);
  set_problem(problem, p);
  p.channel_tile = choice.channel_tile, p.phases = choice.phases;
  p.by_vectors = fast_divide(std::max(1, choice.channel_tile / choice.vector));
  set_columns(problem, choice, p);
  p.odd_rows = problem.element_size() == 2 && p.axis[2].out % 2 != 0 && !is_flat(problem);
  return p;
}

}  // namespace

cudaError_t launch_depthwise(const Problem& original, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream) {
  if (original.out_elements() == 0) return cudaSuccess;
  if (!depthwise_refusal(original).empty()) return cudaErrorNotSupported;
  const Problem problem = depthwise_view(original);
  Choice choice = choose_form(problem, input, output);
  choose_block(problem, choice);
  DepthwiseParams p = make_params(problem, choice, input, weight, bias, output);
  return run(problem, choice, p, stream);
}

}  // namespace fastconvt::cuda
