// The flat GEMM, host side: how a problem is divided, the launch that packs weights and the one that multiplies.
#include "flat_gemm.cuh"

#include <algorithm>

#include "flat_gemm_pack.cuh"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

int64_t flat_packed_bytes(const Problem& problem, const FlatGemmTile& t) {
  return problem.groups * t.channel_blocks * t.chunks * problem.kernel_positions() *
         (kFlatGemmTapBytes * (problem.allow_tf32 ? 1 : 2));
}

// After the weights: sums of parts of items, and flags that they are there.
int64_t flat_partial_bytes(const FlatGemmTile& t) {
  return t.split ? int64_t{kFlatGemmMaxBlocks} * (2 * 128 * kFlatGemmGroup * 4 + 8) : 0;
}

// A tap of a class: where it reads, and which of the kernel's it is.
struct FlatGemmEntry {
  int shift[3];  // along outer axes
  int unit, offset, tap;
  bool same_stage(const FlatGemmEntry& other) const { return std::equal(shift, shift + 3, other.shift); }
  bool operator<(const FlatGemmEntry& other) const {
    for (int a = 0; a < 3; ++a) {
      if (shift[a] != other.shift[a]) return shift[a] < other.shift[a];
    }
    return unit != other.unit ? unit < other.unit : offset < other.offset;
  }
};

int list_entries(const Problem& problem, const FlatGemmTile& t, const FlatGemmAxis (&axis)[3],
                 const FlatGemmAxisClass* const (&of)[3], FlatGemmEntry* entry) {
  const int step[3] = {t.pitch[1] * t.pitch[2], t.pitch[2], 1};
  int count = 0;
  for (int u = 0; u < axis[2].units; ++u)
    for (int i = 0; i < of[0]->taps[0]; ++i)
      for (int j = 0; j < of[1]->taps[0]; ++j)
        for (int k = 0; k < of[2]->taps[u]; ++k) {
          const int number[3] = {i, j, k};
          FlatGemmEntry e{};
          e.unit = u;
          for (int a = 0; a < 3; ++a) {
            const int v = a == 2 ? u : 0, shift = of[a]->shift[v] - number[a] * axis[a].offset_step;
            e.tap =
                e.tap * static_cast<int>(problem.axis[a].kernel) + of[a]->first_tap[v] + number[a] * axis[a].tap_step;
            if (t.inner >> a & 1) {
              e.offset += (shift - of[a]->low) * step[a];
            } else {
              e.shift[a] = shift;
            }
          }
          entry[count++] = e;
        }
  std::sort(entry, entry + count);
  return count;
}

// The classes, their stages and taps.
void set_classes(const Problem& problem, const FlatGemmTile& t, const FlatGemmAxis (&axis)[3], FlatGemmParams& p,
                 int& stages) {
  FlatGemmEntry entry[kFlatGemmMaxTaps];
  int classes = 0, taps = 0;
  stages = 0;
  for (int c0 = 0; c0 < axis[0].classes; ++c0)
    for (int c1 = 0; c1 < axis[1].classes; ++c1)
      for (int c2 = 0; c2 < axis[2].classes; ++c2) {
        const FlatGemmAxisClass* const of[3] = {&axis[0].of[c0], &axis[1].of[c1], &axis[2].of[c2]};
        const int c[3] = {c0, c1, c2}, count = list_entries(problem, t, axis, of, entry);
        FlatGemmClass& k = p.of_class[classes++];
        k.first_stage = static_cast<short>(stages);
        for (int a = 0; a < 3; ++a) {
          k.f[a] = static_cast<short>(c[a] * axis[a].units);
          k.low[a] = static_cast<short>(t.inner >> a & 1 ? of[a]->low : 0);
        }
        for (int i = 0; i < count; ++i, ++taps) {
          if (i == 0 || !entry[i].same_stage(entry[i - 1])) {
            FlatGemmStage& stage = p.stage[stages++];
            stage = {};
            stage.first_tap = static_cast<short>(taps);
            for (int a = 0; a < 3; ++a) stage.shift[a] = static_cast<short>(entry[i].shift[a]);
          }
          ++p.stage[stages - 1].taps[entry[i].unit];
          p.tap[taps] = {static_cast<unsigned short>(entry[i].offset), static_cast<unsigned short>(entry[i].tap)};
        }
        k.stages = static_cast<short>(stages - k.first_stage);
      }
}

FlatGemmParams flat_params(const Problem& problem, const FlatGemmTile& t, const void* input, const void* weight,
                           const void* bias, void* output, void* workspace, int& stages) {
  FlatGemmParams p{};
  FlatGemmAxis axis[3];
  for (int a = 0; a < 3; ++a) {
    const Axis& of = problem.axis[a];
    axis[a] = flat_gemm_axis(of, a == 2 && t.pairs ? 2 : 1);
    p.axis[a] = {static_cast<int>(of.in),
                 static_cast<int>(of.out()),
                 static_cast<int>(of.kernel),
                 static_cast<int>(of.stride),
                 static_cast<int>(of.padding),
                 static_cast<int>(of.dilation),
                 axis[a].cells,
                 fast_divide(t.pitch[a])};
  }
  set_classes(problem, t, axis, p, stages);
  p.channel_blocks = fast_divide(t.channel_blocks);
  p.class_count = fast_divide(t.classes);
  p.tiles = fast_divide(static_cast<int>(t.tiles));
  p.items = static_cast<int>(t.items);
  p.batch = static_cast<int>(problem.batch);
  p.pairs = t.pairs, p.chains = t.chains;
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.cells = t.cells, p.staged = t.staged;
  p.half = t.cells / 2;
  p.unit = t.pairs ? 0 : kFlatGemmColumns;
  p.chunks = t.chunks;
  p.taps = static_cast<int>(problem.kernel_positions());
  p.stages = t.stages;
  p.input_bytes = t.input_bytes, p.stage_bytes = t.stage_bytes;
  p.places_at = t.places_at, p.table_at = t.table_at, p.runs_at = t.runs_at, p.barriers_at = t.barriers_at;
  p.wide = reinterpret_cast<uintptr_t>(input) % 16 == 0 && p.group_in % 4 == 0;
  p.runs = t.runs;
  p.quads = t.pairs && problem.axis[2].stride == 2 && t.pitch[2] % 2 == 0 && p.axis[2].cells % 2 == 0 &&
            p.axis[2].out == 2 * p.axis[2].cells && reinterpret_cast<uintptr_t>(output) % 16 == 0;
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.input = static_cast<const float*>(input), p.weight = static_cast<const float*>(weight);
  p.bias = problem.has_bias ? static_cast<const float*>(bias) : nullptr;
  p.rectify = rectifier(problem);
  p.output = static_cast<float*>(output);
  p.packed = static_cast<unsigned char*>(workspace);
  p.split = t.split;
  p.units = fast_divide(std::max(t.units, 1));
  p.partial = reinterpret_cast<float*>(p.packed + flat_packed_bytes(problem, t));
  p.flags = reinterpret_cast<int*>(p.partial + int64_t{kFlatGemmMaxBlocks} * 2 * 128 * kFlatGemmGroup);
  return p;
}

template <bool kThree>
cudaError_t launch_flat_pack(const Problem& problem, const FlatGemmTile& t, const FlatGemmParams& p, int stages,
                             cudaStream_t stream) {
  FlatGemmPackParams q{};
  q.channels = kFlatGemmPackChannels;
  const auto shared = [&] { return kFlatGemmChannels * (q.channels * (p.taps | 1) + 4) * 4; };
  // Not too much for a block, that there may be many.
  while (q.channels > 2 && (shared() > 40 * 1024 || q.channels * p.taps > 128)) q.channels /= 2;
  q.chunks = fast_divide(t.chunks);
  q.columns = fast_divide(t.channel_blocks * kFlatGemmRows / q.channels);
  q.taps = fast_divide(p.taps);
  q.lines = fast_divide(q.channels * p.taps);
  q.stages = stages;
  const int64_t blocks = problem.groups * t.chunks * q.columns.divisor;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  flat_gemm_pack_kernel<kThree><<<static_cast<unsigned>(blocks), kFlatGemmPackThreads, shared(), stream>>>(p, q);
  return cudaGetLastError();
}

template <bool kThree, bool kChannelsLast, bool kSplit, bool kRectify>
cudaError_t launch_flat_products(const FlatGemmTile& t, FlatGemmParams& p, cudaStream_t stream) {
  int resident = 0;
  const auto kernel = flat_gemm_kernel<kThree, kChannelsLast, kSplit, kRectify>;
  const cudaError_t error =
      count_resident_blocks(kernel, kFlatGemmThreads<kThree>, t.shared_bytes, kFlatGemmShared + 2048, resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  int blocks = static_cast<int>(std::min<int64_t>(t.items, resident));
  if constexpr (kSplit) {
    blocks = std::min(resident, kFlatGemmMaxBlocks);
    const int all = static_cast<int>(t.items) * t.units;
    p.share = all / blocks, p.longer_shares = all % blocks;
  } else if (t.items > resident) {
    // A number that shares no factor with the items of a tile, so that every block gets all classes.
    while (std::gcd(blocks, t.classes * t.channel_blocks) != 1) --blocks;
    if (blocks < resident * 9 / 10) blocks = resident;
  }
  const dim3 grid(static_cast<unsigned>(blocks));
  return launch_early(kernel, grid, kFlatGemmThreads<kThree>, t.shared_bytes, stream, p);
}

cudaError_t launch_flat_tile(const Problem& problem, const FlatGemmTile& t, const void* input, const void* weight,
                             const void* bias, void* output, void* workspace, cudaStream_t stream) {
  int stages = 0;
  FlatGemmParams p = flat_params(problem, t, input, weight, bias, output, workspace, stages);
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  cudaError_t error = problem.allow_tf32 ? launch_flat_pack<false>(problem, t, p, stages, stream)
                                         : launch_flat_pack<true>(problem, t, p, stages, stream);
  if (error != cudaSuccess) return error;
  const auto launch = [&](auto three, auto last) {
    constexpr bool kThree = decltype(three)::value, kChannelsLast = decltype(last)::value;
    return dispatch_rectifier(p.rectify, [&](auto rectify) {
      constexpr bool kRectify = decltype(rectify)::value;
      return t.split ? launch_flat_products<kThree, kChannelsLast, true, kRectify>(t, p, stream)
                     : launch_flat_products<kThree, kChannelsLast, false, kRectify>(t, p, stream);
    });
  };
  if (problem.allow_tf32) {
    return channels_last ? launch(std::false_type{}, std::true_type{}) : launch(std::false_type{}, std::false_type{});
  }
  return channels_last ? launch(std::true_type{}, std::true_type{}) : launch(std::true_type{}, std::false_type{});
}

}  // namespace

int64_t flat_gemm_workspace(const Problem& problem) {
  const FlatGemmTile t = flat_gemm_tile(problem);
  return flat_packed_bytes(problem, t) + flat_partial_bytes(t);
}

cudaError_t launch_flat_gemm(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, void* workspace, cudaStream_t stream) {
  if (problem.out_elements() == 0) return cudaSuccess;
  if (!flat_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_flat_tile(problem, flat_gemm_tile(problem), input, weight, bias, output, workspace, stream);
}

}  // namespace fastconvt::cuda
