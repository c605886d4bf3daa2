#include "gradients.cuh"

#include <algorithm>
#include <numeric>

namespace fastconvt::cuda {
namespace {

constexpr int kWarps = 4;       // of a block, one tap each
constexpr int kMaxRows = 4;     // input channels of a warp
constexpr int kMaxColumns = 8;  // output channels of a warp
constexpr int kOrderedTaps = 128;
constexpr int kReduceSlots = 8;  // threads that share an element in the final reduction

struct WeightGradientParams {
  AxisParams axis[3];
  PhaseView view;
  int out_begin[3], out_end[3];
  int first_input[3];
  int inputs[3];
  // A walk over the inputs of the window, kLanes a step: the step in mixed radix, and what a carry out of an axis adds
  // to the offsets.
  int step[3];
  int64_t input_step, grad_step;
  int64_t input_carry[3], grad_carry[3];
  Strides input;
  int64_t input_begin;  // offset of the window's first input
  int64_t positions;
  int64_t positions_per_split;
  int64_t splits;
  int64_t weight_elements;
  int taps;
  int tap_groups;  // of kWarps taps
  int rows;        // input channels of a group
  int columns;     // output channels of a group
  int row_blocks;
  int column_blocks;
  // To the channels of a warp from its first one, in bytes: an address costs two additions of constants. Tiles that
  // would reach beyond a group's channels begin earlier, and where the group has fewer channels than a tile the last
  // one stands in: every load is safe, and no sum is kept twice.
  int64_t row_bytes[kMaxRows];
  int64_t column_bytes[kMaxColumns];
  bool ordered;
  uint8_t tap_order[kOrderedTaps];  // the warps of a block: taps of the same phase, which share output gradients
};

template <typename T>
__device__ __forceinline__ T load_at(const T* base, int64_t bytes) {
  return __ldg(reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + bytes));
}

// A warp owns one tap, kRows input and kColumns output channels; its lanes walk over the inputs of one split.
template <typename T, typename S, int kRows, int kColumns>
__global__ void __launch_bounds__(kWarps* kLanes, sizeof(T) < 8 ? 5 : kMinBlocks<T>)
    weight_gradient_kernel(const __grid_constant__ WeightGradientParams p, const T* input, const S* grad_output,
                           accumulator_t<T>* partial) {
  using Acc = accumulator_t<T>;
  const int lane = threadIdx.x % kLanes;
  int64_t index = blockIdx.x;
  int tap = split_off(index, p.tap_groups) * kWarps + threadIdx.x / kLanes;
  const int own_column = split_off(index, p.column_blocks) * kColumns;
  const int own_row = split_off(index, p.row_blocks) * kRows;
  const int first_column = max(0, min(own_column, p.columns - kColumns));
  const int first_row = max(0, min(own_row, p.rows - kRows));
  const int64_t group = index / p.splits;
  const int64_t split = index - group * p.splits;
  if (tap >= p.taps) return;
  if (p.ordered) tap = p.tap_order[tap];
  partial += split * p.weight_elements + group * p.rows * p.columns * p.taps + tap;

  // Input i of an axis meets the output gradient at cell i + shift of the view's existing ones, 0 <= i + shift < size.
  int64_t position = split * p.positions_per_split + lane;
  int steps = static_cast<int>(
      (min(p.positions_per_split, p.positions - split * p.positions_per_split) - lane + kLanes - 1) / kLanes);
  int at[3], shift[3], size[3];
  input += p.input_begin + (group * p.rows + first_row) * p.input.channel;
  grad_output += (group * p.columns + first_column) * p.view.cell.channel;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    const TapReach reach =
        reach_of_tap(p.axis[a], p.view.axis[a], p.out_begin[a], p.out_end[a], tap % p.axis[a].kernel);
    tap /= p.axis[a].kernel;
    const int first = p.first_input[a] + reach.offset - p.view.axis[a].first_cell;
    at[a] = split_off(position, p.inputs[a]);
    shift[a] = first - reach.begin;
    size[a] = reach.size;
    input += at[a] * p.input.axis[a];
    grad_output += p.view.residue_offset(a, reach.residue, p.axis[a].stride) + (first + at[a]) * p.view.cell.axis[a];
  }
  input += position * p.input.batch;
  grad_output += position * p.view.cell.batch;

  // What does not exist counts as 0 times 0.
  const auto load = [&](Acc(&x)[kRows], Acc(&g)[kColumns]) {
    const bool exists = (static_cast<unsigned>(at[0] + shift[0]) < size[0]) &
                        (static_cast<unsigned>(at[1] + shift[1]) < size[1]) &
                        (static_cast<unsigned>(at[2] + shift[2]) < size[2]) & (steps > 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = exists ? to_accumulator(load_at(input, p.row_bytes[r])) : Acc(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) g[c] = exists ? to_accumulator(load_at(grad_output, p.column_bytes[c])) : Acc(0);
    --steps;
    input += p.input_step;
    grad_output += p.grad_step;
    int carry = 0;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      at[a] += p.step[a] + carry;
      carry = at[a] >= p.inputs[a];
      if (carry) {
        at[a] -= p.inputs[a];
        input += p.input_carry[a];
        grad_output += p.grad_carry[a];
      }
    }
  };
  Acc sum[kRows][kColumns] = {};
  Acc x[2][kRows], g[2][kColumns];
  const int pairs = (steps + 1) / 2;
  load(x[0], g[0]);
#pragma unroll 1
  for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load(x[1 - half], g[1 - half]);  // one position ahead
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][c] += x[half][r] * g[half][c];
      }
    }
  }

  // Each lane gets the totals of every kLanes-th sum.
  constexpr int kSums = kRows * kColumns;
  Acc totals[(kSums + kLanes - 1) / kLanes];
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const Acc total = warp_sum(sum[i / kColumns][i % kColumns]);
    if (lane == i % kLanes) totals[i / kLanes] = total;
  }
#pragma unroll
  for (int i = 0; i < kSums; i += kLanes) {
    const int row = first_row + (i + lane) / kColumns, column = first_column + (i + lane) % kColumns;
    if (i + lane < kSums && row >= own_row && row < p.rows && column >= own_column && column < p.columns) {
      partial[(static_cast<int64_t>(row) * p.columns + column) * p.taps] += totals[i / kLanes];
    }
  }
}

// Taps by phase. Beyond kOrderedTaps they stay as they are.
void order_taps(WeightGradientParams& p) {
  p.ordered = p.taps <= kOrderedTaps;
  if (!p.ordered) return;
  const auto phase_of = [&p](int tap) {
    int phase = 0, scale = 1;
    for (int a = 2; a >= 0; --a) {
      const int t = tap % p.axis[a].kernel;
      tap /= p.axis[a].kernel;
      phase += scale * (t % p.axis[a].tap_step());
      scale *= std::min(p.axis[a].kernel, p.axis[a].tap_step());
    }
    return phase;
  };
  std::iota(p.tap_order, p.tap_order + p.taps, uint8_t{0});
  std::stable_sort(p.tap_order, p.tap_order + p.taps, [&](int a, int b) { return phase_of(a) < phase_of(b); });
}

template <typename T, typename S>
WeightGradientParams make_weight_gradient_params(const Problem& problem, const Window& window, int rows, int columns) {
  WeightGradientParams p{};
  p.view = make_phase_view(problem, window);
  p.input = input_strides(problem);
  p.input_begin = window.batch_begin * p.input.batch;
  p.positions = window.batch_count;
  int64_t step = kLanes;
  for (int a = 2; a >= 0; --a) {
    p.axis[a] = axis_params(problem.axis[a]);
    p.out_begin[a] = window.out_begin[a];
    p.out_end[a] = window.out_end[a];
    p.first_input[a] = window.in_begin[a];
    p.inputs[a] = window.in_end[a] - window.in_begin[a];
    p.positions *= p.inputs[a];
    p.input_begin += window.in_begin[a] * p.input.axis[a];
    p.step[a] = static_cast<int>(step % p.inputs[a]);
    step /= p.inputs[a];
    const int64_t input_next = a == 0 ? p.input.batch : p.input.axis[a - 1];
    const int64_t grad_next = a == 0 ? p.view.cell.batch : p.view.cell.axis[a - 1];
    p.input_step += p.step[a] * p.input.axis[a];
    p.grad_step += p.step[a] * p.view.cell.axis[a];
    p.input_carry[a] = input_next - p.inputs[a] * p.input.axis[a];
    p.grad_carry[a] = grad_next - p.inputs[a] * p.view.cell.axis[a];
  }
  p.input_step += step * p.input.batch;
  p.grad_step += step * p.view.cell.batch;
  p.splits = weight_gradient_slots(problem);
  p.positions_per_split = ceil_div(ceil_div(p.positions, p.splits), kLanes) * kLanes;
  p.weight_elements = problem.weight_elements();
  p.taps = static_cast<int>(problem.kernel_positions());
  p.tap_groups = static_cast<int>(ceil_div(p.taps, kWarps));
  order_taps(p);
  p.rows = static_cast<int>(problem.in_channels_per_group());
  p.columns = static_cast<int>(problem.out_channels_per_group());
  p.row_blocks = static_cast<int>(ceil_div(p.rows, rows));
  p.column_blocks = static_cast<int>(ceil_div(p.columns, columns));
  for (int r = 0; r < rows; ++r) p.row_bytes[r] = std::min(r, p.rows - 1) * p.input.channel * int64_t{sizeof(T)};
  for (int c = 0; c < columns; ++c)
    p.column_bytes[c] = std::min(c, p.columns - 1) * p.view.cell.channel * int64_t{sizeof(S)};
  return p;
}

template <typename T>
__global__ void reduction_kernel(const accumulator_t<T>* partial, int64_t slots, int64_t count, double scale,
                                 T* output) {
  __shared__ double sums[kReduceSlots][kLanes];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  double sum = 0;
  if (i < count) {
#pragma unroll 4
    for (int64_t slot = threadIdx.y; slot < slots; slot += kReduceSlots) sum += partial[slot * count + i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= count) return;
  for (int other = 1; other < kReduceSlots; ++other) sum += sums[other][threadIdx.x];
  output[i] = from_accumulator<T>(static_cast<accumulator_t<T>>(scale * sum));
}

}  // namespace

int64_t weight_gradient_slots(const Problem& problem) {
  constexpr int64_t kBlocks = 4096;  // enough for every GPU; constant, so that the sums do not depend on the device
  constexpr int64_t kMaxElements = int64_t{8} << 20;  // of all slots together, if there are several
  const int64_t elements = problem.weight_elements();
  const int64_t blocks = ceil_div(problem.kernel_positions(), kWarps) *
                         ceil_div(elements, kMaxRows * kMaxColumns * problem.kernel_positions());
  return std::max<int64_t>(1, std::min(ceil_div(kBlocks, blocks), kMaxElements / elements));
}

template <typename T, typename S>
cudaError_t launch_weight_gradient(const Problem& problem, const Window& window, const T* input, const S* grad_output,
                                   accumulator_t<T>* partial, cudaStream_t stream) {
  const auto launch = [&](auto rows, auto columns) {
    const WeightGradientParams p = make_weight_gradient_params<T, S>(problem, window, rows, columns);
    const int64_t grid = p.tap_groups * p.column_blocks * p.row_blocks * p.splits * problem.groups;
    const auto kernel = weight_gradient_kernel<T, S, rows, columns>;
    kernel<<<grid, kWarps * kLanes, 0, stream>>>(p, input, grad_output, partial);
    return cudaGetLastError();
  };
  constexpr std::integral_constant<int, sizeof(T) < 8 ? kMaxColumns : kMaxColumns / 2> columns;
  const int64_t rows = problem.in_channels_per_group();
  const bool by_three = ceil_div(rows, 3) * 3 < ceil_div(rows, 4) * 4;
  return by_three ? launch(std::integral_constant<int, 3>{}, columns)
                  : launch(std::integral_constant<int, 4>{}, columns);
}

template <typename T>
cudaError_t launch_reduction(const accumulator_t<T>* partial, int64_t slots, int64_t count, double scale, T* output,
                             cudaStream_t stream) {
  const auto kernel = reduction_kernel<T>;
  const dim3 threads(kLanes, kReduceSlots);
  kernel<<<ceil_div(count, kLanes), threads, 0, stream>>>(partial, slots, count, scale, output);
  return cudaGetLastError();
}

#define FASTCONVT_INSTANTIATE(T, S)                                                                                 \
  template cudaError_t launch_weight_gradient(const Problem&, const Window&, const T*, const S*, accumulator_t<T>*, \
                                              cudaStream_t);                                                        \
  template cudaError_t launch_reduction(const accumulator_t<T>*, int64_t, int64_t, double, T*, cudaStream_t);
FASTCONVT_INSTANTIATE(float, float)
FASTCONVT_INSTANTIATE(double, double)
FASTCONVT_INSTANTIATE(__half, float)
FASTCONVT_INSTANTIATE(__nv_bfloat16, float)
#undef FASTCONVT_INSTANTIATE

}  // namespace fastconvt::cuda
