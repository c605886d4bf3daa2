// The fused chain for one instruction set: included once for each, inside a namespace of its own and under its target
// pragma, hence no include guard. kVectorBytes and kWidest come from there.
//
// A block is kLanes consecutive base positions of one column of an output row, a vector of them for each of up to
// kMaxChunk channels. All channels of a position are in one lane, so logsumexp needs no shuffle, and only a maximum and
// a sum per output reach the row buffer; the row is finished there and interleaved into the output.

#include "chain_math.h"

template <class A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

// Where a tile's steps read: the first input channel of its group, at the block's first base position.
template <class T>
struct Source {
  const T* data;
  int64_t channels;
  int64_t channel_stride;
};

// channels[o] = bias + the products of the full steps, for the kWidth channels of one tile.
template <class T, class A, int kWidth>
void accumulate(const Source<T>& source, const Tile& tile, const Steps& steps, A (*channels)[kLanes<A>]) {
  constexpr int kL = kLanes<A>;
  const A* weights = static_cast<const A*>(tile.weights);
  const A* bias = static_cast<const A*>(tile.bias);
  const int64_t depth = source.channels, stride = source.channel_stride;
  alignas(64) A sum[kWidth][kL];
#pragma GCC unroll 16
  for (int o = 0; o < kWidth; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) sum[o][l] = bias[o];
  }
  for (const Step* step = steps.full; step < steps.full_end; ++step) {
    const T* x = source.data + step->input_offset;
    const A* w = weights + step->kernel_position * depth * kWidth;
    for (int64_t c = 0; c < depth; ++c, x += stride, w += kWidth) {
#pragma GCC unroll 16
      for (int o = 0; o < kWidth; ++o) {
#pragma omp simd
        for (int l = 0; l < kL; ++l) sum[o][l] += to_accumulator(x[l]) * w[o];
      }
    }
  }
#pragma GCC unroll 16
  for (int o = 0; o < kWidth; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) channels[o][l] = sum[o][l];
  }
}

// Adds those of the partial steps. Missing lanes are left untouched, so that a tap outside of the input never meets an
// infinite weight.
template <class T, class A, int kWidth>
void accumulate_partial(const Source<T>& source, const Tile& tile, const Steps& steps, A (*channels)[kLanes<A>]) {
  constexpr int kL = kLanes<A>;
  const A* weights = static_cast<const A*>(tile.weights);
  const int64_t depth = source.channels, stride = source.channel_stride;
  alignas(64) A sum[kWidth][kL];
#pragma GCC unroll 16
  for (int o = 0; o < kWidth; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) sum[o][l] = channels[o][l];
  }
  for (const Step* step = steps.partial; step < steps.end; ++step) {
    const T* x = source.data + step->input_offset;
    const A* w = weights + step->kernel_position * depth * kWidth;
    const int first = step->first, last = step->last;
    for (int64_t c = 0; c < depth; ++c, x += stride, w += kWidth) {
      alignas(64) A value[kL];
#pragma omp simd
      for (int l = 0; l < kL; ++l) value[l] = (l >= first) & (l < last) ? to_accumulator(x[l]) : A(0);
#pragma GCC unroll 16
      for (int o = 0; o < kWidth; ++o) {
        const A weight = w[o];
#pragma omp simd
        for (int l = 0; l < kL; ++l) {
          const A next = sum[o][l] + value[l] * weight;
          sum[o][l] = (l >= first) & (l < last) ? next : sum[o][l];
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int o = 0; o < kWidth; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) channels[o][l] = sum[o][l];
  }
}

// The sums of products of one tile.
template <class T, class A, int kWidth>
void convolve_width(const Source<T>& source, const Tile& tile, const Steps& steps, A (*channels)[kLanes<A>]) {
  accumulate<T, A, kWidth>(source, tile, steps, channels);
  if (steps.partial < steps.end) accumulate_partial<T, A, kWidth>(source, tile, steps, channels);
}

template <class T, class A>
void convolve(const Source<T>& source, const Tile& tile, const Steps& steps, A (*channels)[kLanes<A>]) {
  if (tile.width == kWidest) {
    convolve_width<T, A, kWidest>(source, tile, steps, channels);
  } else if (tile.width == 4) {
    convolve_width<T, A, 4>(source, tile, steps, channels);
  } else {
    convolve_width<T, A, 1>(source, tile, steps, channels);
  }
}

// The lanes whose sum is NaN: a NaN channel makes them NaN for good, else the infinite maximum is the result so far.
template <class A>
__attribute__((noinline, cold)) void settle(const A (*channels)[kLanes<A>], int count, A* max, A* sum) {
  for (int l = 0; l < kLanes<A>; ++l) {
    if (sum[l] == sum[l]) continue;
    for (int o = 0; o < count; ++o) {
      if (channels[o][l] != channels[o][l]) max[l] = channels[o][l];
    }
    sum[l] = A(1);
  }
}

// Takes a chunk of channels into the running logsumexp, which is log(sum) + max in every lane.
template <class A>
void reduce(const A (*channels)[kLanes<A>], int count, bool first, A* running_max, A* running_sum) {
  constexpr int kL = kLanes<A>;
  const A lowest = opaque(kLowest<A>);
  alignas(64) A max[kL], sum[kL];
#pragma omp simd
  for (int l = 0; l < kL; ++l) max[l] = first ? channels[0][l] : running_max[l];
  for (int o = 0; o < count; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) max[l] = channels[o][l] > max[l] ? channels[o][l] : max[l];
  }
#pragma omp simd
  for (int l = 0; l < kL; ++l) sum[l] = A(0);
  if (!first) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) sum[l] = running_sum[l] * exp_nonpositive(running_max[l] - max[l], lowest);
  }
  for (int o = 0; o < count; ++o) {
#pragma omp simd
    for (int l = 0; l < kL; ++l) sum[l] += exp_nonpositive(channels[o][l] - max[l], lowest);
  }
  int unsettled = 0;
#pragma omp simd reduction(| : unsettled)
  for (int l = 0; l < kL; ++l) {
    unsettled |= sum[l] != sum[l];
    running_max[l] = max[l];
    running_sum[l] = sum[l];
  }
  if (unsettled) settle(channels, count, running_max, running_sum);
}

// clamp(h(v) - subtrahend, min, max) of v = logsumexp, h(v) = v * sigmoid(v + 3) / 6.
template <class A>
inline A finish(A max_channel, A sum, A subtrahend, A min, A max, A lowest) {
  const A v = max_channel + log_positive(sum);
  A result = v / (A(6) + A(6) * exp_any(A(-3) - v, lowest)) - subtrahend;
  result = result < min ? min : result;  // keeps NaN
  return result > max ? max : result;
}

template <class T, class A>
class Chain {
 public:
  Chain(const Params& params, const Scratch& scratch)
      : p_(params),
        scratch_(scratch),
        max_(static_cast<A*>(scratch.max)),
        sum_(static_cast<A*>(scratch.sum)),
        packed_(static_cast<A*>(scratch.packed)),
        subtrahend_(to_accumulator(*static_cast<const T*>(p_.subtrahend))) {
    if (p_.min != p_.min || p_.max != p_.max) subtrahend_ = A(__builtin_nan(""));  // as torch.clamp: NaN everywhere
  }

  void run(int64_t begin, int64_t end) {
    const AxisTaps& w = p_.axis[2];
    const int64_t columns = w.out < w.stride ? w.out : w.stride;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / p_.strips;
      find_rows(row);
      for (int64_t column = 0; column < columns; column += kMaxColumns) {
        const int64_t left = columns - column;
        run_strip(static_cast<T*>(p_.output) + row * w.out, task % p_.strips * p_.strip_positions, column,
                  int(left < kMaxColumns ? left : kMaxColumns));
      }
    }
  }

 private:
  static constexpr int kL = kLanes<A>;

  // The (depth, height) taps of one output row that exist.
  void find_rows(int64_t row) {
    const AxisTaps &d = p_.axis[0], &h = p_.axis[1];
    const int64_t oh = row % h.out, od = row / h.out % d.out, n = row / (h.out * d.out);
    const int64_t d_column = od % d.stride, h_column = oh % h.stride;
    num_rows_ = 0;
    for (int64_t a = d.first_tap[d_column]; a < d.first_tap[d_column + 1]; ++a) {
      const int64_t id = od / d.stride + d.taps[a].offset;
      if (id < 0 || id >= d.in) continue;
      for (int64_t b = h.first_tap[h_column]; b < h.first_tap[h_column + 1]; ++b) {
        const int64_t ih = oh / h.stride + h.taps[b].offset;
        if (ih < 0 || ih >= h.in) continue;
        scratch_.rows[num_rows_++] = {(d.taps[a].tap * p_.kernel[1] + h.taps[b].tap) * p_.kernel[2],
                                      n * p_.batch_stride + (id * h.in + ih) * p_.axis[2].in};
      }
    }
  }

  // Columns [column, column + count) of an output row, from base position `position` to the end of the strip.
  void run_strip(T* row, int64_t position, int64_t column, int count) {
    const AxisTaps& w = p_.axis[2];
    const int64_t first = position * w.stride + column;
    const auto positions = [&](int64_t output) {  // from `output` on, in its column
      const int64_t left = output < w.out ? (w.out - output + w.stride - 1) / w.stride : 0;
      return int(left < p_.strip_positions ? left : p_.strip_positions);
    };
    const int length = positions(first);
    const int pitch = (length + kL - 1) / kL * kL;
    for (int c = 0; c < count; ++c) {
      run_column(column + c, position, positions(first + c), max_ + c * pitch, sum_ + c * pitch);
    }
    A *max = max_, *sum = sum_;
    const A subtrahend = subtrahend_, low = A(p_.min), high = A(p_.max), lowest = opaque(kLowest<A>);
#pragma omp simd
    for (int i = 0; i < count * pitch; ++i) max[i] = finish(max[i], sum[i], subtrahend, low, high, lowest);
    store(max, pitch, row + first, w.out - first, length, count);
  }

  // Interleaves `count` columns of results, up to `length` positions each, into the `size` outputs at `out`.
  void store(const A* results, int pitch, T* out, int64_t size, int length, int count) const {
    const int64_t stride = p_.axis[2].stride;
    if (stride == 1) {
#pragma omp simd
      for (int i = 0; i < length; ++i) from_accumulator(results[i], out + i);
    } else if (stride == 2 && count == 2) {
      const A* odd = results + pitch;
      const int pairs = int(size / 2 < length ? size / 2 : length);
#pragma omp simd
      for (int i = 0; i < pairs; ++i) {
        from_accumulator(results[i], out + 2 * i);
        from_accumulator(odd[i], out + 2 * i + 1);
      }
      if (pairs < length) from_accumulator(results[pairs], out + 2 * pairs);
    } else {
      for (int c = 0; c < count; ++c) {
        for (int i = 0; i < length && i * stride + c < size; ++i) {
          from_accumulator(results[c * pitch + i], out + i * stride + c);
        }
      }
    }
  }

  // The running logsumexp of base positions [position, position + length) of one column.
  void run_column(int64_t column, int64_t position, int length, A* max, A* sum) {
    const AxisTaps& w = p_.axis[2];
    const Tap *taps = w.taps + w.first_tap[column], *taps_end = w.taps + w.first_tap[column + 1];
    int64_t lowest = INT64_MAX, highest = INT64_MIN, last_row = 0;
    Step* end = scratch_.steps;
    for (const Tap* tap = taps; tap < taps_end; ++tap) {
      lowest = tap->offset < lowest ? tap->offset : lowest;
      highest = tap->offset > highest ? tap->offset : highest;
      for (const RowTap* row = scratch_.rows; row < scratch_.rows + num_rows_; ++row) {
        *end++ = {row->kernel_position + tap->tap, row->input_offset + tap->offset, 0, kL};
        last_row = row->input_offset > last_row ? row->input_offset : last_row;
      }
    }
    if (end == scratch_.steps) return fill_constant(length, max, sum);
    const int64_t last_load = last_row + highest + (p_.in_channels - 1) * p_.channel_stride + kL;
    for (int i = 0; i < length; i += kL) {
      const int lanes = length - i < kL ? length - i : kL;
      const int64_t start = position + i;
      const bool inside = start + lowest >= 0 && start + highest + lanes <= w.in;
      if (inside && start + last_load <= p_.input_elements) {
        run_block({scratch_.steps, end, nullptr, nullptr, start}, max + i, sum + i);
      } else {
        run_block(edge_steps(taps, taps_end, start, lanes), max + i, sum + i);
      }
    }
  }

  // The steps of a block that may not read all it loads: some tap leaves the row, or it is one of the last in memory.
  Steps edge_steps(const Tap* taps, const Tap* taps_end, int64_t start, int lanes) const {
    const AxisTaps& w = p_.axis[2];
    const int64_t last_channel = (p_.in_channels - 1) * p_.channel_stride;
    Step *full = scratch_.edge_steps, *end = full + p_.kernel[0] * p_.kernel[1] * p_.kernel[2], *partial = end;
    for (const Tap* tap = taps; tap < taps_end; ++tap) {
      const int64_t at = start + tap->offset;
      const int64_t first = at < 0 ? -at : 0;
      const int64_t last = w.in - at < lanes ? w.in - at : lanes;
      if (first >= last) continue;
      for (const RowTap* row = scratch_.rows; row < scratch_.rows + num_rows_; ++row) {
        const bool safe = row->input_offset + at + last_channel + kL <= p_.input_elements;
        Step* step = first == 0 && last == lanes && safe ? full++ : --partial;
        *step = {row->kernel_position + tap->tap, row->input_offset + tap->offset, int(first), int(last)};
      }
    }
    return {scratch_.edge_steps, full, partial, end, start};
  }

  void fill_constant(int length, A* max, A* sum) {
    if (!has_constant_) run_block({nullptr, nullptr, nullptr, nullptr, 0}, constant_max_, constant_sum_);
    has_constant_ = true;
    for (int i = 0; i < length; ++i) {
      max[i] = constant_max_[0];
      sum[i] = constant_sum_[0];
    }
  }

  // The running logsumexp of one block.
  void run_block(const Steps& steps, A* max, A* sum) const {
    alignas(64) A channels[kMaxChunk + kMaxWidth][kL];
    const int64_t depth = p_.in_channels_per_group;
    const int64_t num_steps = (steps.full_end - steps.full) + (steps.end - steps.partial);
    const bool packs = p_.packs && num_steps * depth * kL <= kPackedElements;
    Steps packed{};
    int64_t packed_offset = -1;
    for (int64_t i = 0; i < p_.num_chunks; ++i) {
      const Chunk& chunk = p_.chunks[i];
      A(*row)[kL] = channels;
      for (const Tile* tile = chunk.tiles; tile < chunk.tiles + chunk.num_tiles; row += tile->count, ++tile) {
        const T* input = static_cast<const T*>(p_.input) + tile->input_offset + steps.position;
        if (!packs) {
          convolve<T, A>({input, depth, p_.channel_stride}, *tile, steps, row);
          continue;
        }
        if (tile->input_offset != packed_offset) packed = pack(input, steps);
        packed_offset = tile->input_offset;
        convolve<A, A>({packed_, depth, kL}, *tile, packed, row);
      }
      reduce(channels, chunk.count, i == 0, max, sum);
    }
  }

  // Gathers what the steps of one group read: [step][input channel][lane].
  Steps pack(const T* input, const Steps& steps) const {
    A* to = packed_;
    Step* packed = scratch_.packed_steps;
    for (const Step* step = steps.full; step < steps.full_end; ++step) {
      *packed++ = {step->kernel_position, to - packed_, 0, kL};
      const T* x = input + step->input_offset;
      for (int64_t c = 0; c < p_.in_channels_per_group; ++c, x += p_.channel_stride, to += kL) {
#pragma omp simd
        for (int l = 0; l < kL; ++l) to[l] = to_accumulator(x[l]);
      }
    }
    const Step* partial = packed;
    for (const Step* step = steps.partial; step < steps.end; ++step) {
      *packed++ = {step->kernel_position, to - packed_, step->first, step->last};
      const T* x = input + step->input_offset;
      for (int64_t c = 0; c < p_.in_channels_per_group; ++c, x += p_.channel_stride, to += kL) {
        for (int l = 0; l < kL; ++l) to[l] = l >= step->first && l < step->last ? to_accumulator(x[l]) : A(0);
      }
    }
    return {scratch_.packed_steps, partial, partial, packed, 0};
  }

  const Params& p_;
  const Scratch& scratch_;
  A *max_, *sum_;  // row buffers: [column][position]
  A* packed_;
  A subtrahend_;
  int64_t num_rows_ = 0;
  bool has_constant_ = false;
  alignas(64) A constant_max_[kL], constant_sum_[kL];  // of outputs without taps
};

template <class T, class A>
void run_chain(const Params& params, const Scratch& scratch, int64_t begin, int64_t end) {
  Chain<T, A>(params, scratch).run(begin, end);
}

Kernel kernel_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return run_chain<float, float>;
    case DType::kFloat64:
      return run_chain<double, double>;
    case DType::kFloat16:
      return run_chain<Half, float>;
    default:
      return run_chain<BFloat16, float>;
  }
}
