// Plans a convolution for the CPU kernels: the taps of every phase, the packed weights, and how the work is cut.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "conv_plan.h"
#include "half.h"
#include "kernels.h"
#include "target.h"

namespace fastconvt::cpu {

namespace conv {

void* allocate(int64_t bytes) { return ::operator new(size_t(bytes), std::align_val_t(64)); }
void release(void* memory) { ::operator delete(memory, std::align_val_t(64)); }

namespace {

constexpr int64_t kMinTasks = 128;                   // enough for many threads
constexpr int64_t kWindowBytes = 256 << 10;          // the window shares the second-level cache with the weights
constexpr int64_t kPlaneBytes = 64 << 10;            // the planes are written and read at once
constexpr int64_t kStreamBytes = int64_t(24) << 20;  // an output of this size leaves the caches anyway
constexpr int64_t kHugePageBytes = int64_t(4) << 20;

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // A fresh output costs a fault a page, most of the time of a memory-bound call: let the pages be large.
  if (bytes < kHugePageBytes) return;
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: refusing it changes nothing
#endif
}

class ConvJob : public Job {
 public:
  ConvJob(Isa isa, const Problem& problem, const void* input, const void* weight, const void* bias, void* output);
  int64_t num_tasks() const override { return plan_.tasks; }
  void run(int64_t begin, int64_t end) const override {
    if (begin < end) run_(plan_, begin, end);
  }

 private:
  void list_taps(const Problem& problem);
  template <class S, class T>
  void set_dtype(const void* weight, const void* bias);
  template <class S, class T>
  void pack_block(int64_t group, int64_t block);
  void prepare(int64_t group, int64_t first_block, int64_t last_block, int64_t task);
  void cut(const Problem& problem);
  void lay_out();

  ConvPlan plan_ = {};
  IsaShape shape_ = {};
  void (*run_)(const ConvPlan&, int64_t, int64_t) = nullptr;
  int64_t accumulator_bytes_ = 4;
  std::vector<Tap> taps_[3];
  std::vector<int64_t> first_[3];
  std::vector<int64_t> shifts_[3];
  std::vector<int64_t> block_begin_;
  const void* weight_ = nullptr;
  void (ConvJob::*pack_)(int64_t, int64_t) = nullptr;
  std::unique_ptr<void, void (*)(void*)> packed_weight_{nullptr, release};
  std::unique_ptr<std::atomic<int>[]> states_;  // of the packed blocks
  std::vector<unsigned char> exact_edges_;
  std::vector<double> packed_bias_;  // of either accumulator type: double aligns both
};

// The taps of each phase, in ascending order.
void ConvJob::list_taps(const Problem& problem) {
  for (int i = 0; i < 3; ++i) {
    const Axis& from = problem.axis[i];
    AxisTaps& axis = plan_.axis[i];
    axis.in = from.in;
    axis.out = from.out();
    axis.stride = from.stride;
    axis.phases = std::min(axis.stride, axis.out);
    axis.cells = ceil_div(axis.out, axis.stride);
    plan_.kernel[i] = from.kernel;
    std::vector<int64_t>& first = first_[i];
    first.assign(size_t(axis.phases) + 1, 0);
    const auto phase_of = [&](int64_t tap) { return from.first_output(tap * from.dilation % from.stride); };
    for (int64_t t = 0; t < from.kernel; ++t) {
      if (phase_of(t) < axis.phases) ++first[size_t(phase_of(t)) + 1];
    }
    for (size_t p = 1; p < first.size(); ++p) first[p] += first[p - 1];
    taps_[i].resize(size_t(first.back()));
    std::vector<int64_t> next(first);
    for (int64_t t = 0; t < from.kernel; ++t) {
      const int64_t output = phase_of(t);
      if (output >= axis.phases) continue;
      const int64_t shift = from.base(output) + from.offset(from.phase(output), t);
      taps_[i][size_t(next[size_t(output)]++)] = {shift, t};
    }
    for (const Tap& tap : taps_[i]) shifts_[i].push_back(tap.shift);
    std::sort(shifts_[i].begin(), shifts_[i].end());
    shifts_[i].erase(std::unique(shifts_[i].begin(), shifts_[i].end()), shifts_[i].end());
    axis.shifts = shifts_[i].data();
    axis.num_shifts = int64_t(shifts_[i].size());
    axis.min_shift = shifts_[i].empty() ? 0 : shifts_[i].front();
    axis.max_shift = shifts_[i].empty() ? 0 : shifts_[i].back();
    axis.taps = taps_[i].data();
    axis.first = first.data();
  }
}

template <class S, class T>
void ConvJob::set_dtype(const void* weight, const void* bias) {
  accumulator_bytes_ = sizeof(T);
  weight_ = weight;
  pack_ = &ConvJob::pack_block<S, T>;
  const int64_t most = ceil_div(plan_.out_channels, plan_.blocks), blocks = plan_.groups * plan_.blocks;
  const int64_t positions = plan_.kernel[0] * plan_.kernel[1] * plan_.kernel[2];
  plan_.block_elements =
      positions * std::max(tap_stride(plan_, most), tap_stride(plan_, std::max<int64_t>(1, most - 1)));
  packed_weight_.reset(allocate(blocks * plan_.block_elements * int64_t(sizeof(T))));
  prefer_huge_pages(packed_weight_.get(), blocks * plan_.block_elements * int64_t(sizeof(T)));
  plan_.weight = packed_weight_.get();
  states_ = std::make_unique<std::atomic<int>[]>(size_t(blocks));
  exact_edges_.resize(size_t(blocks));
  plan_.exact_edges = exact_edges_.data();
  plan_.owner = this;
  plan_.prepare = [](void* owner, int64_t group, int64_t first_block, int64_t last_block, int64_t task) {
    static_cast<ConvJob*>(owner)->prepare(group, first_block, last_block, task);
  };
  packed_bias_.resize(size_t(ceil_div(plan_.groups * plan_.out_channels * int64_t(sizeof(T)), sizeof(double))));
  plan_.bias = packed_bias_.data();
  T* to = reinterpret_cast<T*>(packed_bias_.data());
  for (int64_t c = 0; c < plan_.groups * plan_.out_channels; ++c) {
    to[c] = bias == nullptr ? T(0) : to_accumulator(static_cast<const S*>(bias)[c]);
  }
}

template <class S, class T>
void ConvJob::pack_block(int64_t group, int64_t block) {
  const int64_t positions = plan_.kernel[0] * plan_.kernel[1] * plan_.kernel[2];
  const int64_t begin = block_begin_[size_t(block)], size = block_begin_[size_t(block) + 1] - begin;
  const int64_t stride = tap_stride(plan_, size);
  T* to = static_cast<T*>(packed_weight_.get()) + (group * plan_.blocks + block) * plan_.block_elements;
  int not_finite = 0;
  for (int64_t c = 0; c < plan_.in_channels; ++c, to += size) {
    const int64_t channel = group * plan_.in_channels + c;
    const S* from = static_cast<const S*>(weight_) + (channel * plan_.out_channels + begin) * positions;
    for (int64_t i = 0; i < size * positions; ++i) {
      const T value = to_accumulator(from[i]);
      not_finite |= value - value != 0;
    }
    for (int64_t k = 0; k < positions; ++k) {
      for (int64_t m = 0; m < size; ++m) to[k * stride + m] = to_accumulator(from[m * positions + k]);
    }
  }
  exact_edges_[size_t(group * plan_.blocks + block)] = not_finite != 0;
}

// Packs what nobody has begun to pack of a chunk, then waits for the others. Each task starts at another block.
void ConvJob::prepare(int64_t group, int64_t first_block, int64_t last_block, int64_t task) {
  enum { kRaw, kBegun, kPacked };
  const int64_t count = last_block - first_block;
  std::atomic<int>* const states = states_.get() + group * plan_.blocks + first_block;
  const int64_t start = count == 1 ? 0 : task * count / plan_.tasks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = (start + i) % count;
    int expected = kRaw;
    if (states[block].load(std::memory_order_relaxed) != kRaw ||
        !states[block].compare_exchange_strong(expected, kBegun, std::memory_order_relaxed)) {
      continue;
    }
    (this->*pack_)(group, first_block + block);
    states[block].store(kPacked, std::memory_order_release);
  }
  for (int64_t block = 0; block < count; ++block) {
    while (states[block].load(std::memory_order_acquire) != kPacked) std::this_thread::yield();
  }
}

// Rows, columns and channels of a task.
void ConvJob::cut(const Problem& problem) {
  const AxisTaps &depth = plan_.axis[0], &height = plan_.axis[1], &width = plan_.axis[2];
  const int64_t lanes = shape_.vector_bytes / accumulator_bytes_;
  const int64_t row_span = height.max_shift - height.min_shift, span = width.max_shift - width.min_shift;
  const int64_t column_bytes = accumulator_bytes_ * std::max<int64_t>(1, depth.num_shifts) * plan_.in_channels;

  // Narrow images: many rows as one.
  const int64_t zeros = std::max(-std::min<int64_t>(width.min_shift, 0), width.cells + width.max_shift - width.in);
  plan_.rows = 1;
  plan_.pitch = std::max(width.in + std::max<int64_t>(zeros, 0), width.cells);
  const bool narrow = width.cells < 4 * lanes && plan_.pitch < round_up(width.cells, lanes) * 3 / 2;
  if (narrow && interleaves(width.phases)) {
    const int64_t most = kWindowBytes / (column_bytes * plan_.pitch) - row_span;
    plan_.rows = std::min({height.cells, most, ceil_div(16 * lanes, plan_.pitch)});
    if (plan_.rows <= row_span) plan_.rows = 1;
  }
  plan_.ring = plan_.rows == 1 && row_span < 2 * height.num_shifts;
  plan_.window_rows = plan_.rows > 1 || plan_.ring ? plan_.rows + row_span : height.num_shifts;

  // Wide images: columns as the caches hold.
  const int64_t block = std::min(shape_.max_block, plan_.out_channels);
  plan_.planes = interleaves(width.phases) ? width.phases : 1;
  const int64_t columns = std::min(kWindowBytes / (column_bytes * std::max<int64_t>(1, plan_.window_rows)) - span,
                                   kPlaneBytes / (accumulator_bytes_ * width.phases * block));
  const int64_t most_columns = std::max({4 * lanes, span, columns});
  plan_.column_tiles = plan_.rows > 1 ? 1 : ceil_div(width.cells, most_columns);
  plan_.width = plan_.column_tiles == 1 ? width.cells : round_up(ceil_div(width.cells, plan_.column_tiles), lanes);
  plan_.column_tiles = ceil_div(width.cells, plan_.width);

  const int64_t outer = problem.batch * plan_.groups * depth.cells * plan_.column_tiles;
  const int64_t steps = ceil_div(height.cells, plan_.rows);
  const int64_t least_steps = plan_.ring ? 4 * row_span + 1 : 1;
  plan_.row_tiles = std::max<int64_t>(1, std::min(ceil_div(kMinTasks, outer), steps / least_steps));
  plan_.steps = ceil_div(steps, plan_.row_tiles);
  plan_.row_tiles = ceil_div(steps, plan_.steps);
  plan_.chunks = std::min(plan_.blocks, ceil_div(kMinTasks / 4, outer * plan_.row_tiles));
  plan_.tasks = outer * plan_.row_tiles * plan_.chunks;
}

// Strides of the window and the planes. Odd numbers of vectors keep rows out of each other's cache sets.
void ConvJob::lay_out() {
  const AxisTaps& width = plan_.axis[2];
  const int64_t lanes = shape_.vector_bytes / accumulator_bytes_;
  const auto odd = [&](int64_t elements) { return (ceil_div(elements, lanes) | 1) * lanes; };
  plan_.plane_stride = odd((plan_.rows - 1) * plan_.pitch + plan_.width + 2 * lanes);
  if (plan_.rows == 1) {
    plan_.origin = width.min_shift;
    plan_.pitch = odd(plan_.width + width.max_shift - width.min_shift);
    plan_.channel_stride = plan_.pitch;
    plan_.row_stride = plan_.in_channels * plan_.pitch;
    plan_.slice_stride = plan_.window_rows * plan_.row_stride;
  } else {
    plan_.origin = std::min<int64_t>(width.min_shift, 0);
    plan_.channel_stride = odd(plan_.window_rows * plan_.pitch - plan_.origin);
    plan_.row_stride = plan_.pitch;
    plan_.slice_stride = plan_.in_channels * plan_.channel_stride;
  }
  // Tiles read, and rows are written, in whole vectors: some behind the end, whose lanes nothing uses.
  const int64_t block = std::min(shape_.max_block, plan_.out_channels);
  const int64_t slices = plan_.axis[0].num_shifts * plan_.slice_stride;
  plan_.window_elements = round_up(slices + 2 * lanes + std::max<int64_t>(width.max_shift, 0), lanes);
  plan_.plane_elements = block * plan_.planes * plan_.plane_stride + 2 * lanes;
}

ConvJob::ConvJob([[maybe_unused]] Isa isa, const Problem& problem, const void* input, const void* weight,
                 const void* bias, void* output) {
  shape_ = kPortableShape;
  run_ = run_portable;
#ifdef FASTCONVT_X86
  if (isa == Isa::kAvx2) shape_ = kAvx2Shape, run_ = run_avx2;
  if (isa == Isa::kAvx512) shape_ = kAvx512Shape, run_ = run_avx512;
#endif
  plan_.dtype = problem.dtype;
  plan_.activation = problem.activation;
  plan_.alpha = problem.alpha;
  plan_.input = input;
  plan_.output = output;
  plan_.groups = problem.groups;
  plan_.in_channels = problem.in_channels_per_group();
  plan_.out_channels = problem.out_channels_per_group();
  plan_.blocks = ceil_div(plan_.out_channels, shape_.max_block);
  for (int64_t b = 0; b <= plan_.blocks; ++b) block_begin_.push_back(b * plan_.out_channels / plan_.blocks);
  plan_.block_begin = block_begin_.data();
  list_taps(problem);
  if (problem.out_elements() == 0) return;
  switch (problem.dtype) {
    case DType::kFloat32:
      set_dtype<float, float>(weight, bias);
      break;
    case DType::kFloat64:
      set_dtype<double, double>(weight, bias);
      break;
    case DType::kFloat16:
      set_dtype<Half, float>(weight, bias);
      break;
    case DType::kBFloat16:
      set_dtype<BFloat16, float>(weight, bias);
      break;
  }
  cut(problem);
  lay_out();
  const int64_t bytes = problem.out_elements() * problem.element_size();
  const int64_t row_bytes = problem.axis[2].out() * problem.element_size();
  plan_.stream = problem.element_size() >= 4 && bytes >= kStreamBytes && (row_bytes >= 1024 || row_bytes % 64 == 0);
  prefer_huge_pages(output, bytes);
}

class ActivationJob : public Job {
 public:
  ActivationJob([[maybe_unused]] Isa isa, const Problem& problem, void* values, int64_t count)
      : problem_(problem), values_(static_cast<char*>(values)), count_(count) {
#ifdef FASTCONVT_X86
    if (isa == Isa::kAvx2) run_ = activate_avx2;
    if (isa == Isa::kAvx512) run_ = activate_avx512;
#endif
  }
  int64_t num_tasks() const override { return ceil_div(count_, kShare); }
  void run(int64_t begin, int64_t end) const override {
    const int64_t first = begin * kShare, last = std::min(end * kShare, count_);
    const int64_t size = problem_.dtype == DType::kFloat64 ? 8 : 4;
    if (first < last) run_(problem_, values_ + first * size, last - first);
  }

 private:
  static constexpr int64_t kShare = 1 << 14;

  Problem problem_;
  char* values_;
  int64_t count_;
  void (*run_)(const Problem&, void*, int64_t) = activate_portable;
};

}  // namespace
}  // namespace conv

std::unique_ptr<Job> activation_job(Isa isa, const Problem& problem, void* values, int64_t count) {
  return std::make_unique<conv::ActivationJob>(isa, problem, values, count);
}

std::unique_ptr<Job> conv_transpose_job(Isa isa, const Problem& problem, const void* input, const void* weight,
                                        const void* bias, void* output) {
  return std::make_unique<conv::ConvJob>(isa, problem, input, weight, bias, output);
}

}  // namespace fastconvt::cpu
