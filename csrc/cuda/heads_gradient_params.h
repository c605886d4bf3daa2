// Parameters of both gradients of the head family, from a problem and its tile.
#pragma once

#include "heads_gradient.cuh"

namespace fastconvt::cuda {

static_assert(sizeof(HeadsBox) * (kHeadsGradientMaxStages + 1) == kHeadsGradientRingBytes);

// The widest vector, in bytes, that divides all of `bytes`, which end with 0.
inline int heads_vector_bytes(int64_t size, std::initializer_list<int64_t> bytes) {
  for (int64_t vector = 16; vector > size; vector /= 2) {
    if (vector < 4) break;
    bool fits = true;
    for (const int64_t b : bytes) fits = fits && b % vector == 0;
    if (fits) return static_cast<int>(vector);
  }
  return static_cast<int>(size);
}
inline int64_t heads_address(const void* pointer) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)); }

// Of rows of so many vectors: with the least work of a thread, that of a column of vectors being twice a copy's.
inline HeadsCopy heads_copy_of(int bytes, int64_t vectors, int64_t rows) {
  HeadsCopy copy{bytes, static_cast<int>(vectors), 3};
  int64_t least = 0;
  for (int log2 = 3; (1 << log2) <= kHeadsGradientThreads; ++log2) {
    const int64_t copies =
        ceil_div(vectors, int64_t{1} << log2) * (2 + ceil_div(rows << log2, int64_t{kHeadsGradientThreads}));
    if (least == 0 || copies <= least) least = copies, copy.lanes_log2 = log2;
  }
  return copy;
}

// What divides the beginning, and the length, of each run of positions that a box has in a channel's plane; 0: nothing
// to divide.
struct HeadsRuns {
  int64_t plane, rows, box;
};
inline HeadsRuns heads_runs_of(const Problem& problem, const HeadsGradientTile& tile) {
  const auto& axis = problem.axis;
  if (tile.tiles[2] > 1) return {problem.in_positions(), axis[2].in, tile.box[2]};
  const bool one = tile.tiles[1] == 1 && tile.box[0] == 1;
  return {problem.in_positions(), axis[1].in * axis[2].in, one ? 0 : tile.box[1] * axis[2].in};
}

inline void set_heads_grads(const Problem& problem, const HeadsGradientTile& tile, HeadsGradientParams& p) {
  const int64_t size = problem.element_size(), out = problem.axis[2].out();
  p.channels_last = problem.layout == Layout::kChannelsLast;
  p.interleaved = p.channels_last && problem.groups > 1;
  p.column = static_cast<int>(tile.column), p.rows = static_cast<int>(tile.rows);
  p.row_pitch = static_cast<int>(tile.row_pitch);
  p.by_column = fast_divide(p.column);
  const int64_t row = out * (p.channels_last ? problem.out_channels : 1) * size;
  const int64_t moved = tile.tiles[2] > 1 ? tile.box[2] * problem.axis[2].stride * tile.column * size : 0;
  const int64_t group = p.interleaved ? tile.column * size : 0;
  const int bytes =
      heads_vector_bytes(size, {heads_address(p.grad), group, p.interleaved ? 0 : row, p.interleaved ? 0 : moved});
  const int64_t elements = bytes / size;
  const int64_t begin = -problem.axis[2].padding * tile.column;  // of the first box's first row
  p.lead = p.interleaved ? 0 : static_cast<int>((begin % elements + elements) % elements);
  p.row_elements = static_cast<int>(p.interleaved ? out : out * tile.column);
  p.grad_copy = heads_copy_of(bytes, ceil_div(p.lead + tile.grads[2] * tile.column, elements), tile.rows);
}

inline void set_heads_inputs(const Problem& problem, const HeadsGradientTile& tile, HeadsGradientParams& p) {
  const int64_t size = problem.element_size();
  const HeadsRuns runs = heads_runs_of(problem, tile);
  p.whole_rows = tile.tiles[2] == 1;
  p.runs = static_cast<int>(tile.box[0] * (p.whole_rows ? 1 : tile.box[1]));
  const int64_t run = tile.box[2] * (p.whole_rows ? tile.box[1] : 1);
  p.by_run = fast_divide(static_cast<int>(run));
  p.input_pitch = static_cast<int>(tile.input_pitch);
  const int bytes =
      p.channels_last
          ? heads_vector_bytes(size, {heads_address(p.input), problem.in_channels * size, p.group_in * size})
          : heads_vector_bytes(size, {heads_address(p.input), runs.plane * size, runs.rows * size, runs.box * size});
  const int64_t vectors = ceil_div(p.channels_last ? p.channels : p.runs * run, bytes / static_cast<int>(size));
  p.input_copy = heads_copy_of(bytes, vectors, p.channels_last ? p.positions : p.channels);
}

inline HeadsGradientParams heads_gradient_params(const Problem& problem, const HeadsGradientTile& tile,
                                                 const void* grad, const void* input, const void* weight,
                                                 void* output) {
  HeadsGradientParams p{};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    HeadsGradientAxis& to = p.axis[a];
    to.in = static_cast<int>(axis.in), to.out = static_cast<int>(axis.out());
    to.kernel = static_cast<int>(axis.kernel), to.stride = static_cast<int>(axis.stride);
    to.padding = static_cast<int>(axis.padding), to.dilation = static_cast<int>(axis.dilation);
    to.box = static_cast<int>(tile.box[a]), to.grads = static_cast<int>(tile.grads[a]);
    to.by_kernel = fast_divide(to.kernel), to.by_box = fast_divide(to.box), to.by_grads = fast_divide(to.grads);
    to.by_tiles = fast_divide(static_cast<int>(tile.tiles[a]));
  }
  p.grad = grad, p.input = input, p.weight = weight, p.output = output;
  p.grad_strides = output_strides(problem), p.input_strides = input_strides(problem);
  p.weight_elements = problem.weight_elements();
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.pairs = static_cast<int>(p.group_out * problem.kernel_positions());
  p.out_channels = static_cast<int>(problem.out_channels);
  p.boxes = static_cast<int>(heads_gradient_boxes(problem, tile));
  p.channels = static_cast<int>(tile.channels), p.chunk_pairs = static_cast<int>(tile.pairs);
  p.positions = static_cast<int>(tile.positions);
  p.by_channel_chunks = fast_divide(static_cast<int>(tile.channel_chunks));
  p.by_pair_chunks = fast_divide(static_cast<int>(tile.pair_chunks));
  p.by_chunk_pairs = fast_divide(p.chunk_pairs);
  set_heads_grads(problem, tile, p);
  set_heads_inputs(problem, tile, p);
  p.stages = static_cast<int>(tile.stages), p.grad_bytes = static_cast<int>(tile.grad_bytes);
  p.stage_bytes = static_cast<int>(tile.grad_bytes + tile.input_bytes);
  p.bias_items = static_cast<int>(tile.bias_items);
  const int64_t items = p.channels_last ? ceil_div(problem.out_channels_per_group(), int64_t{32}) : p.group_out;
  p.bias_by_pairs = heads_bias_by_pairs(problem), p.bias_by_ones = heads_bias_by_ones(problem, tile);
  p.bias_parts = static_cast<int>(tile.bias_items / items);
  p.by_bias_chunks = fast_divide(static_cast<int>(items));
  int place = static_cast<int>(tile.fragments);
  const auto take = [&place](int64_t bytes) {
    const int from = place;
    place += static_cast<int>(bytes);
    return from;
  };
  p.box_ring = take(kHeadsGradientRingBytes);
  p.row_table = take(tile.rows * 16);
  p.run_table = take(tile.box[0] * tile.box[1] * 16);
  p.bias_sums = take(tile.bias_items * 256);
  p.place_table = take(tile.positions * 8), p.base_table = take(tile.positions * 4);
  p.offset_table = take(round_up(tile.pairs, int64_t{16}) * 4);
  p.first_stage = take(0);
  return p;
}

}  // namespace fastconvt::cuda
