// The convolution for one instruction set: included once for each, in a namespace of its own and under its target
// pragma, hence no include guard. kVectorBytes, kRegisters, kMaxBlock, stream_vector(), stream_end() and store_half()
// come from there.
//
// A step computes `rows` rows of cells for every phase and channel: its input rows are gathered in the window, register
// tiles write each phase of the last axis to a plane of its own, and the planes are interleaved into the output.

#include "conv_tile.h"

// In this order: it uses the vectors of the tiles.
#include "conv_emit.h"

#include "conv_activation.h"

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Working memory of one thread.
template <class T>
struct Scratch {
  T* window;
  T* planes;
  const T** rows;     // of each outer tap
  const T** weights;  // of each outer tap
  int64_t* heights;   // input row of each outer tap for the step's first cell
  int64_t* done;      // outputs already written of each channel's row
};

// One task, and the step it is at.
struct Place {
  int64_t first_block, last_block;
  int64_t batch, group, depth;
  int64_t column;         // first cell along the last axis
  int64_t columns;        // cells along it
  int64_t height;         // first cell of the step
  int64_t gathered = -1;  // last input row in the window (rows == 1)
  int64_t slot = 0;       // of the input row that the smallest shift of the height reads
};

// dst[i] = src[first + i], zero outside [0, in). The row behind it, which the next step wants, is fetched early: no
// hardware foresees a jump to another channel.
template <class S, class T>
void gather_row(T* __restrict dst, const S* __restrict src, int64_t in, int64_t first, int64_t count) {
  const int64_t begin = smaller(larger(-first, 0), count);
  const int64_t end = larger(smaller(in - first, count), begin);
  for (int64_t i = 0; i < begin; ++i) dst[i] = 0;
  for (int64_t i = begin; i < end; i += 64 / sizeof(S)) __builtin_prefetch(src + first + i + in, 0, 2);
  for (int64_t i = begin; i < end; ++i) dst[i] = to_accumulator(src[first + i]);
  for (int64_t i = end; i < count; ++i) dst[i] = 0;
}

// Input rows [first, last] of every channel and depth into the window, from `slot` on.
template <class S, class T>
void gather_rows(const ConvPlan& plan, const Place& at, int64_t first, int64_t last, int64_t slot, T* window) {
  const AxisTaps &depth = plan.axis[0], &height = plan.axis[1], &width = plan.axis[2];
  const int64_t count = plan.rows > 1 ? plan.pitch : at.columns + width.max_shift - width.min_shift;
  for (int64_t d = 0; d < depth.num_shifts; ++d) {
    const int64_t in_depth = at.depth + depth.shifts[d];
    if (in_depth < 0 || in_depth >= depth.in) continue;
    for (int64_t c = 0; c < plan.in_channels; ++c) {
      const int64_t channel = (at.batch * plan.groups + at.group) * plan.in_channels + c;
      const S* src = static_cast<const S*>(plan.input) + (channel * depth.in + in_depth) * height.in * width.in;
      T* dst = window + d * plan.slice_stride + c * plan.channel_stride;
      int64_t to = slot;
      for (int64_t row = first; row <= last; ++row) {
        const bool inside = row >= 0 && row < height.in;
        gather_row(dst + to * plan.row_stride, src + (inside ? row * width.in : 0), inside ? width.in : 0,
                   at.column + plan.origin, count);
        if (++to == plan.window_rows && plan.ring) to = 0;
      }
      if (plan.rows > 1) {  // behind the last row, what its last columns see
        for (int64_t i = 0; i < -plan.origin; ++i) dst[to * plan.row_stride + i] = 0;
      }
    }
  }
}

// Brings the window to the step's rows.
template <class S, class T>
void gather(const ConvPlan& plan, Place& at, T* window) {
  const AxisTaps& height = plan.axis[1];
  const int64_t first = at.height + height.min_shift;
  const int64_t last = at.height + plan.rows - 1 + height.max_shift;
  if (plan.ring) {
    at.slot = first % plan.window_rows;
    if (at.slot < 0) at.slot += plan.window_rows;
    const int64_t from = larger(at.gathered + 1, larger(first, 0)), to = smaller(last, height.in - 1);
    if (from > to) return;
    gather_rows<S>(plan, at, from, to, from % plan.window_rows, window);
    at.gathered = to;
  } else if (plan.rows > 1) {
    gather_rows<S>(plan, at, first, last, 0, window);
  } else {
    for (int64_t i = 0; i < height.num_shifts; ++i) {
      const int64_t row = at.height + height.shifts[i];
      if (row >= 0 && row < height.in) gather_rows<S>(plan, at, row, row, i, window);
    }
  }
}

// The window's slot of the row that a tap of the height reads.
inline int64_t slot_of(const ConvPlan& plan, const Place& at, int64_t shift) {
  const AxisTaps& height = plan.axis[1];
  if (plan.ring || plan.rows > 1) {
    const int64_t slot = at.slot + shift - height.min_shift;
    return slot < plan.window_rows ? slot : slot - plan.window_rows;
  }
  int64_t slot = 0;
  while (height.shifts[slot] != shift) ++slot;
  return slot;
}

// The outer taps of a depth and height phase that exist, as pointers into window and weights; returns how many.
template <class T>
int64_t outer_taps(const ConvPlan& plan, const Place& at, int64_t depth_phase, int64_t height_phase, const T* weights,
                   int64_t tap_stride, const Scratch<T>& scratch) {
  const AxisTaps &depth = plan.axis[0], &height = plan.axis[1];
  int64_t count = 0;
  for (int64_t i = depth.first[depth_phase]; i < depth.first[depth_phase + 1]; ++i) {
    const int64_t in_depth = at.depth + depth.taps[i].shift;
    if (in_depth < 0 || in_depth >= depth.in) continue;
    int64_t slice = 0;
    while (depth.shifts[slice] != depth.taps[i].shift) ++slice;
    for (int64_t j = height.first[height_phase]; j < height.first[height_phase + 1]; ++j) {
      const int64_t row = at.height + height.taps[j].shift;
      if (plan.rows == 1 && (row < 0 || row >= height.in)) continue;
      scratch.rows[count] = scratch.window + slice * plan.slice_stride +
                            slot_of(plan, at, height.taps[j].shift) * plan.row_stride - plan.origin;
      scratch.weights[count] =
          weights + (depth.taps[i].index * plan.kernel[1] + height.taps[j].index) * plan.kernel[2] * tap_stride;
      scratch.heights[count] = row;
      ++count;
    }
  }
  return count;
}

// The outputs of `cells` cells from `column` on, those that have a tap outside the input, tap by tap.
template <class T>
void redo_edges(const ConvPlan& plan, const Place& at, const TileInput<T>& input, const Scratch<T>& scratch,
                int64_t block, const T* bias, int64_t column, int64_t cells, T* planes) {
  const AxisTaps &height = plan.axis[1], &width = plan.axis[2];
  for (int64_t cell = column; cell < column + cells; ++cell) {
    const int64_t row = plan.rows > 1 ? cell / plan.pitch : 0, j = at.column + cell - row * plan.pitch;
    const auto inside = [&](int64_t u, int64_t t) {
      const int64_t y = scratch.heights[u] + row, x = j + input.taps[t].shift;
      return y >= 0 && y < height.in && x >= 0 && x < width.in;
    };
    bool edge = false;
    for (int64_t u = 0; u < input.outer_taps; ++u) {
      for (int64_t t = 0; t < input.num_taps; ++t) edge = edge || !inside(u, t);
    }
    for (int64_t m = 0; edge && m < block; ++m) {
      T sum = bias[m];
      for (int64_t u = 0; u < input.outer_taps; ++u) {
        for (int64_t t = 0; t < input.num_taps; ++t) {
          if (!inside(u, t)) continue;
          const T* x = input.rows[u] + input.taps[t].shift + cell;
          const T* w = input.weights[u] + input.taps[t].index * input.tap_stride + m;
          for (int64_t c = 0; c < plan.in_channels; ++c) sum += x[c * input.channel_stride] * w[c * block];
        }
      }
      planes[m * plan.planes * plan.plane_stride + cell] = sum;
    }
  }
}

// Input channels that a tile takes at once: what they bring to the first-level cache serves all phases.
constexpr int64_t kLeastChannels = 8;
inline int64_t channels_at_once(int64_t outer_taps, int64_t row_bytes) {
  constexpr int64_t kCacheBytes = 24 << 10;
  return larger(kLeastChannels, smaller(kRun, kCacheBytes / (outer_taps * row_bytes)));
}

// One channel block at one step: `rows` rows of one depth and height phase.
template <class S, class T>
struct Block {
  int64_t size;
  bool exact_edges;
  const T* bias;
  int64_t rows;
  int64_t outputs;  // of a row
  S* first_row;
  int64_t channel_outputs;  // from a channel's row to the next channel's
};

// Cells [column, column + cells) of phases [first_phase, last_phase) of a channel block, into their planes, as they are
// to be stored.
template <class S, class T>
void compute_tile(const ConvPlan& plan, const Place& at, const Block<S, T>& block, TileInput<T>& input,
                  int64_t first_phase, int64_t last_phase, int64_t column, int64_t cells, const Scratch<T>& scratch) {
  const AxisTaps& width = plan.axis[2];
  const int64_t vectors = (cells + kLanes<T> - 1) / kLanes<T>;
  const int64_t share = plan.in_channels <= kLeastChannels
                            ? plan.in_channels
                            : channels_at_once(input.outer_taps, (vectors + 1) * kVectorBytes);
  const TileFn<T> compute = tile_function<T>(block.size, int(vectors));
  for (int64_t c = 0; c < plan.in_channels; c += share) {
    input.channels = smaller(share, plan.in_channels - c);
    input.x_offset = c * plan.channel_stride;
    input.w_offset = c * block.size;
    for (int64_t phase = first_phase; phase < last_phase; ++phase) {
      T* planes = scratch.planes + (phase - first_phase) * plan.plane_stride;
      input.taps = width.taps + width.first[phase];
      input.num_taps = width.first[phase + 1] - width.first[phase];
      compute(input, c == 0 ? block.bias : nullptr, column, planes + column, plan.planes * plan.plane_stride);
      if (block.exact_edges && c + share >= plan.in_channels) {
        redo_edges(plan, at, input, scratch, block.size, block.bias, column, cells, planes);
      }
    }
  }
  if (plan.activation == Activation::kNone) return;
  for (int64_t m = 0; m < block.size; ++m) {
    for (int64_t phase = 0; phase < last_phase - first_phase; ++phase) {
      T* plane = scratch.planes + (m * plan.planes + phase) * plan.plane_stride;
      activate(plan.activation, plan.alpha, plane + column, cells);
    }
  }
}

// The rows of a channel block where there are taps.
template <class S, class T>
void compute_rows(const ConvPlan& plan, const Place& at, const Block<S, T>& block, TileInput<T>& input,
                  const Scratch<T>& scratch) {
  const int64_t phases = plan.axis[2].phases, planes = plan.planes * plan.plane_stride;  // of a channel
  const int64_t cells = (block.rows - 1) * plan.pitch + at.columns;
  const int64_t vectors = (cells + kLanes<T> - 1) / kLanes<T>, most = max_vectors(int(block.size));
  const int64_t tiles = vectors <= most ? 1 : (vectors + most - 1) / most;
  const int64_t share = (tiles == 1 ? vectors : (vectors + tiles - 1) / tiles) * kLanes<T>;
  for (int64_t m = 0; m < block.size; ++m) scratch.done[m] = 0;
  for (int64_t column = 0; column < cells; column += share) {
    const int64_t end = smaller(column + share, cells);
    if (!interleaves(phases)) {
      for (int64_t phase = 0; phase < phases; ++phase) {
        compute_tile(plan, at, block, input, phase, phase + 1, column, end - column, scratch);
        for (int64_t m = 0; m < block.size; ++m) {
          emit_phase(block.first_row + m * block.channel_outputs + column * phases,
                     scratch.planes + m * planes + column, phases, phase, end - column,
                     block.outputs - column * phases);
        }
      }
      continue;
    }
    compute_tile(plan, at, block, input, 0, phases, column, end - column, scratch);
    for (int64_t m = 0; block.rows == 1 && m < block.size; ++m) {
      scratch.done[m] =
          emit_row(block.first_row + m * block.channel_outputs, scratch.planes + m * planes, plan.plane_stride, phases,
                   scratch.done[m], smaller(end * phases, block.outputs), end == cells, plan.stream);
    }
  }
  for (int64_t m = 0; block.rows > 1 && m < block.size; ++m) {
    for (int64_t row = 0; row < block.rows; ++row) {
      emit_row(block.first_row + m * block.channel_outputs + row * plan.axis[1].stride * plan.axis[2].out,
               scratch.planes + m * planes + row * plan.pitch, plan.plane_stride, phases, 0, block.outputs, true,
               plan.stream);
    }
  }
}

// All outputs of one step.
template <class S, class T>
void run_step(const ConvPlan& plan, const Place& at, const Scratch<T>& scratch) {
  const AxisTaps &depth = plan.axis[0], &height = plan.axis[1], &width = plan.axis[2];
  for (int64_t b = at.first_block; b < at.last_block; ++b) {
    const int64_t index = at.group * plan.blocks + b, channel = at.group * plan.out_channels + plan.block_begin[b];
    const T* weights = static_cast<const T*>(plan.weight) + index * plan.block_elements;
    Block<S, T> block;
    block.size = plan.block_begin[b + 1] - plan.block_begin[b];
    block.exact_edges = plan.exact_edges[index];
    block.bias = static_cast<const T*>(plan.bias) + channel;
    block.outputs = smaller(at.columns * width.phases, width.out - at.column * width.stride);
    block.channel_outputs = depth.out * height.out * width.out;
    S* first_channel = static_cast<S*>(plan.output) +
                       (at.batch * plan.groups * plan.out_channels + channel) * block.channel_outputs +
                       at.column * width.stride;
    TileInput<T> input = {};
    input.rows = scratch.rows;
    input.weights = scratch.weights;
    input.channel_stride = plan.channel_stride;
    input.tap_stride = tap_stride(plan, block.size);
    for (int64_t dp = 0; dp < depth.phases; ++dp) {
      const int64_t out_depth = at.depth * depth.stride + dp;
      if (out_depth >= depth.out) break;
      for (int64_t hp = 0; hp < height.phases; ++hp) {
        const int64_t out_row = at.height * height.stride + hp;
        if (out_row >= height.out) break;
        block.rows = plan.rows;
        while (out_row + (block.rows - 1) * height.stride >= height.out) --block.rows;
        block.first_row = first_channel + (out_depth * height.out + out_row) * width.out;
        input.outer_taps = outer_taps(plan, at, dp, hp, weights, input.tap_stride, scratch);
        if (input.outer_taps > 0) {
          compute_rows(plan, at, block, input, scratch);
          continue;
        }
        for (int64_t m = 0; m < block.size; ++m) {
          T value = block.bias[m];
          activate(plan.activation, plan.alpha, &value, 1);
          for (int64_t row = 0; row < block.rows; ++row) {
            fill_row(block.first_row + m * block.channel_outputs + row * height.stride * width.out, value,
                     block.outputs, plan.stream);
          }
        }
      }
    }
  }
}

template <class S, class T>
void run_tasks(const ConvPlan& plan, int64_t begin, int64_t end) {
  const int64_t outer = plan.kernel[0] * plan.kernel[1];
  const int64_t bytes = (plan.window_elements + plan.plane_elements) * int64_t(sizeof(T)) +
                        outer * int64_t(2 * sizeof(T*) + sizeof(int64_t)) + kMaxBlock * int64_t(sizeof(int64_t));
  char* memory = static_cast<char*>(allocate(bytes));
  Scratch<T> scratch;
  scratch.window = reinterpret_cast<T*>(memory);
  scratch.planes = scratch.window + plan.window_elements;
  scratch.rows = reinterpret_cast<const T**>(scratch.planes + plan.plane_elements);
  scratch.weights = scratch.rows + outer;
  scratch.heights = reinterpret_cast<int64_t*>(scratch.weights + outer);
  scratch.done = scratch.heights + outer;
  const int64_t sizes[] = {plan.column_tiles, plan.row_tiles, plan.axis[0].cells, plan.chunks, plan.groups};
  int64_t index[] = {0, 0, 0, 0, 0, begin};  // of the task along each of them, and the batch
  for (int i = 0; i < 5; ++i) {
    index[i] = index[5] % sizes[i];
    index[5] /= sizes[i];
  }
  for (int64_t task = begin; task < end; ++task) {
    Place at;
    at.column = index[0] * plan.width;
    at.columns = smaller(plan.width, plan.axis[2].cells - at.column);
    at.depth = index[2];
    at.first_block = index[3] * plan.blocks / plan.chunks;
    at.last_block = (index[3] + 1) * plan.blocks / plan.chunks;
    at.group = index[4];
    at.batch = index[5];
    plan.prepare(plan.owner, at.group, at.first_block, at.last_block, task);
    const int64_t first_height = index[1] * plan.steps * plan.rows;
    const int64_t last_height = smaller(first_height + plan.steps * plan.rows, plan.axis[1].cells);
    for (at.height = first_height; at.height < last_height; at.height += plan.rows) {
      gather<S, T>(plan, at, scratch.window);
      run_step<S, T>(plan, at, scratch);
    }
    int i = 0;
    while (i < 5 && ++index[i] == sizes[i]) index[i++] = 0;
    if (i == 5) ++index[5];
  }
  stream_end();
  release(memory);
}

inline void activate_any(const Problem& problem, void* values, int64_t count) {
  if (problem.dtype == DType::kFloat64) {
    activate(problem.activation, problem.alpha, static_cast<double*>(values), count);
  } else {
    activate(problem.activation, problem.alpha, static_cast<float*>(values), count);
  }
}

inline void run(const ConvPlan& plan, int64_t begin, int64_t end) {
  switch (plan.dtype) {
    case DType::kFloat32:
      return run_tasks<float, float>(plan, begin, end);
    case DType::kFloat64:
      return run_tasks<double, double>(plan, begin, end);
    case DType::kFloat16:
      return run_tasks<Half, float>(plan, begin, end);
    case DType::kBFloat16:
      return run_tasks<BFloat16, float>(plan, begin, end);
  }
}
