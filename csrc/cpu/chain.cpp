// Prepares the fused chain: taps, channel tiles, packed weights; and picks the kernel of the instruction set.
#include <algorithm>
#include <vector>

#include "chain.h"
#include "half.h"
#include "kernels.h"
#include "target.h"

namespace fastconvt::cpu::chain {

namespace portable {
namespace {
constexpr int kVectorBytes = 32;
constexpr int kWidest = 4;
#include "chain_kernel.h"
}  // namespace
}  // namespace portable

#ifdef FASTCONVT_X86
FASTCONVT_TARGET_BEGIN(FASTCONVT_AVX2)
namespace avx2 {
namespace {
constexpr int kVectorBytes = 64;
constexpr int kWidest = 4;
#include "chain_kernel.h"
}  // namespace
}  // namespace avx2
FASTCONVT_TARGET_END

FASTCONVT_TARGET_BEGIN(FASTCONVT_AVX512)
namespace avx512 {
namespace {
constexpr int kVectorBytes = 64;
constexpr int kWidest = 16;
#include "chain_kernel.h"
}  // namespace
}  // namespace avx512
FASTCONVT_TARGET_END
#endif

namespace {

struct Variant {
  Kernel kernel;
  int widest;
};

Variant variant_of(Isa isa, DType dtype) {
#ifdef FASTCONVT_X86
  if (isa == Isa::kAvx512) return {avx512::kernel_of(dtype), avx512::kWidest};
  if (isa == Isa::kAvx2) return {avx2::kernel_of(dtype), avx2::kWidest};
#endif
  return {portable::kernel_of(dtype), portable::kWidest};
}

// Elements of a row buffer at most, and the alignment in elements of a column in it: at least any kernel's block.
constexpr int64_t kRowBuffer = 4096;
constexpr int64_t kAlignment = 16;

template <class A>
A* aligned(A* buffer) {
  const auto bytes = kAlignment * sizeof(A);
  return reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(buffer) + bytes - 1) / bytes * bytes);
}

// The taps of one axis by column of outputs.
struct AxisLists {
  std::vector<Tap> taps;
  std::vector<int64_t> first_tap{0};

  explicit AxisLists(const fastconvt::Axis& axis) {
    for (int64_t column = 0; column < axis.stride && column < axis.out(); ++column) {
      const int64_t phase = axis.phase(column);
      for (int64_t t = axis.first_tap(phase); t < axis.kernel; t += axis.tap_step()) {
        taps.push_back({t, axis.base(column) + axis.offset(phase, t)});
      }
      first_tap.push_back(int64_t(taps.size()));
    }
  }
};

// The width of the tile for the next channels of a group.
int tile_width(int64_t channels, int widest) {
  if (channels > widest - widest / 4) return widest;
  return channels > 1 ? 4 : 1;
}

// T is the tensors' type, A that of the accumulators.
template <class T, class A>
class ChainJob final : public Job {
 public:
  ChainJob(const Variant& variant, const Problem& problem, const void* input, const void* weight, const void* bias,
           const void* subtrahend, double min, double max, void* output)
      : kernel_(variant.kernel),
        axes_{AxisLists(problem.axis[0]), AxisLists(problem.axis[1]), AxisLists(problem.axis[2])},
        num_rows_(problem.batch * problem.axis[0].out() * problem.axis[1].out()) {
    make_tiles(problem, variant.widest);
    pack(problem, static_cast<const T*>(weight), static_cast<const T*>(bias));
    make_chunks();
    set_params(problem);
    set_buffers(problem, variant.widest);
    params_.input = input;
    params_.output = output;
    params_.subtrahend = subtrahend;
    params_.min = min;
    params_.max = max;
  }

  int64_t num_tasks() const override { return num_rows_ * params_.strips; }

  void run(int64_t begin, int64_t end) const override {
    const int64_t row_taps = params_.kernel[0] * params_.kernel[1], positions = row_taps * params_.kernel[2];
    std::vector<RowTap> rows(row_taps);
    std::vector<Step> steps(3 * positions);
    const std::unique_ptr<A[]> buffer(new A[2 * row_buffer_ + packed_elements_ + kAlignment]);
    A* max = aligned(buffer.get());
    std::fill(max, max + 2 * row_buffer_, A(0));  // the lanes beyond a column's end are finished, not stored
    const Scratch scratch = {rows.data(), steps.data(),      steps.data() + positions, steps.data() + 2 * positions,
                             max,         max + row_buffer_, max + 2 * row_buffer_};
    kernel_(params_, scratch, begin, end);
  }

 private:
  void make_tiles(const Problem& problem, int widest) {
    const int64_t per_group = problem.out_channels_per_group();
    for (int64_t channel = 0; channel < problem.out_channels;) {
      const int64_t group = channel / per_group;
      const int64_t left = std::min((group + 1) * per_group - channel, kMaxChunk - channel % kMaxChunk);
      Tile tile{};
      tile.width = tile_width(left, widest);
      tile.count = int(std::min<int64_t>(left, tile.width));
      tile.input_offset = group * problem.in_channels_per_group() * problem.in_positions();
      tiles_.push_back(tile);
      channel += tile.count;
    }
  }

  // weight (in_channels, out_channels / groups, kernel positions) to [tile][kernel position][input channel][width].
  void pack(const Problem& problem, const T* weight, const T* bias) {
    const int64_t depth = problem.in_channels_per_group(), per_group = problem.out_channels_per_group();
    const int64_t positions = problem.kernel_positions();
    int64_t padded = 0;
    for (const Tile& tile : tiles_) padded += tile.width;
    bias_.resize(padded);
    weights_.resize(padded * depth * positions);
    A *packed = weights_.data(), *packed_bias = bias_.data();
    int64_t channel = 0;
    for (Tile& tile : tiles_) {
      tile.weights = packed;
      tile.bias = packed_bias;
      const int64_t first_input = channel / per_group * depth;
      for (int o = 0; o < tile.count; ++o, ++channel) {
        if (bias) packed_bias[o] = to_accumulator(bias[channel]);
        for (int64_t c = 0; c < depth; ++c) {
          const T* source = weight + ((first_input + c) * per_group + channel % per_group) * positions;
          for (int64_t k = 0; k < positions; ++k) packed[(k * depth + c) * tile.width + o] = to_accumulator(source[k]);
        }
      }
      packed += tile.width * depth * positions;
      packed_bias += tile.width;
    }
  }

  void make_chunks() {
    for (const Tile& tile : tiles_) {
      if (chunks_.empty() || chunks_.back().count == kMaxChunk) chunks_.push_back({&tile, 0, 0});
      ++chunks_.back().num_tiles;
      chunks_.back().count += tile.count;
    }
    params_.chunks = chunks_.data();
    params_.num_chunks = int64_t(chunks_.size());
  }

  void set_params(const Problem& problem) {
    for (int i = 0; i < 3; ++i) {
      const fastconvt::Axis& axis = problem.axis[i];
      params_.axis[i] = {axis.in, axis.out(), axis.stride, axes_[i].taps.data(), axes_[i].first_tap.data()};
      params_.kernel[i] = axis.kernel;
    }
    params_.input_elements = problem.in_elements();
    params_.batch_stride = problem.in_channels * problem.in_positions();
    params_.channel_stride = problem.in_positions();
    params_.in_channels = problem.in_channels;
    params_.in_channels_per_group = problem.in_channels_per_group();
  }

  void set_buffers(const Problem& problem, int widest) {
    const fastconvt::Axis& last = problem.axis[2];
    const int64_t columns = std::min({last.stride, last.out(), int64_t(kMaxColumns)});
    const int64_t positions = ceil_div(last.out(), last.stride);
    params_.strip_positions = std::min(kRowBuffer / columns, positions + kAlignment - 1) / kAlignment * kAlignment;
    params_.strips = ceil_div(positions, params_.strip_positions);
    row_buffer_ = columns * params_.strip_positions;

    // Measured: worth its copy for the halves' conversion, and where many tiles would read many planes, which collide
    // in the cache when their size is a power of two.
    const int64_t tiles = ceil_div(problem.out_channels_per_group(), widest), depth = problem.in_channels_per_group();
    params_.packs = sizeof(T) == 2 || (tiles >= 4 && depth >= 16);
    packed_elements_ = params_.packs ? std::min(kPackedElements, problem.kernel_positions() * depth * kAlignment) : 0;
  }

  Kernel kernel_;
  AxisLists axes_[3];
  int64_t num_rows_;
  int64_t row_buffer_ = 0;  // elements of each row buffer
  int64_t packed_elements_ = 0;
  std::vector<Tile> tiles_;
  std::vector<Chunk> chunks_;
  std::vector<A> weights_;
  std::vector<A> bias_;
  Params params_{};
};

}  // namespace
}  // namespace fastconvt::cpu::chain

namespace fastconvt::cpu {

std::unique_ptr<Job> logsumexp_hardswish_job(Isa isa, const Problem& problem, const void* input, const void* weight,
                                             const void* bias, const void* subtrahend, double min, double max,
                                             void* output) {
  const auto make = [&](auto type, auto accumulator) -> std::unique_ptr<Job> {
    using ThisJob = chain::ChainJob<decltype(type), decltype(accumulator)>;
    return std::make_unique<ThisJob>(chain::variant_of(isa, problem.dtype), problem, input, weight, bias, subtrahend,
                                     min, max, output);
  };
  switch (problem.dtype) {
    case DType::kFloat32:
      return make(float{}, float{});
    case DType::kFloat64:
      return make(double{}, double{});
    case DType::kFloat16:
      return make(Half{}, float{});
    default:
      return make(BFloat16{}, float{});
  }
}

}  // namespace fastconvt::cpu
