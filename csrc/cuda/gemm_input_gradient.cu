// The input's gradient by the gradient GEMM, host side: packing, the maps of the tensors that copies read, and the
// template instance that multiplies.
#include <algorithm>

#include "dispatch.h"
#include "gemm_gradients.h"
#include "gradient_gemm.cuh"
#include "gradient_gemm_maps.h"
#include "gradient_gemm_pack_plan.h"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool is_read(const Problem& problem, Layout layout, const void* tensor) {
  return gradient_gemm_reads(problem, layout) && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

bool has_windows(const GradientGemmTile& t, const void* weight) {
  return t.windows && reinterpret_cast<uintptr_t>(weight) % 16 == 0;
}

int64_t packed_weight_bytes(const Problem& problem) {
  return round_up(
      problem.in_channels * problem.kernel_positions() * gradient_gemm_pitch(problem) * problem.element_size(), 1024);
}
int64_t packed_gradient_bytes(const Problem& problem) {
  return problem.batch * problem.out_positions() * problem.groups * gradient_gemm_pitch(problem) *
         problem.element_size();
}

// What one launch packs; null: nothing of it.
struct Packs {
  const void* grad_output;
  void* packed_gradient;
  const void* weight;
  void* packed_weight;
  const void* input;
  void* packed_input;
  void* planes;
};

template <typename T>
cudaError_t launch_pack(const Problem& problem, const Packs& packs, cudaStream_t stream) {
  constexpr int kChannels = 128 / static_cast<int>(sizeof(T)), kWide = 16 / static_cast<int>(sizeof(T));
  GradientPackParams p{}, q{};
  int64_t gradients = 0, inputs = 0, planes = 0;
  if (packs.packed_weight != nullptr) plan_weights<T>(problem, packs.weight, packs.packed_weight, p);
  if (packs.packed_gradient != nullptr) {
    gradients = plan_positions(problem, problem.batch, problem.out_positions(), problem.groups,
                               problem.out_channels_per_group(), gradient_gemm_pitch(problem), kChannels,
                               packs.grad_output, packs.packed_gradient, p);
  }
  if (packs.packed_input != nullptr) {
    inputs = plan_positions(problem, problem.batch, problem.in_positions(), problem.groups,
                            problem.in_channels_per_group(), round_up(problem.in_channels_per_group(), int64_t{kWide}),
                            kChannels, packs.input, packs.packed_input, q);
  }
  if (packs.planes != nullptr) planes = plan_planes(problem, packs.grad_output, packs.planes, p);
  const int64_t blocks = p.weight_blocks + gradients + inputs + planes;
  if (blocks == 0) return cudaSuccess;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  gradient_pack_kernel<T><<<static_cast<unsigned>(blocks), kGradientPackThreads, 0, stream>>>(
      p, q, static_cast<int>(gradients), static_cast<int>(inputs));
  return cudaGetLastError();
}

GradientGemmAxis make_axis(const Axis& axis) {
  const auto i = [](int64_t x) { return static_cast<int>(x); };
  return {fast_divide(i(axis.in)), i(axis.out()), i(axis.kernel), i(axis.stride), i(axis.padding), i(axis.dilation)};
}

GradientGemmDefinition make_definition(const Problem& problem, const void* grad_output, const void* weight) {
  GradientGemmDefinition d{};
  for (int a = 0; a < 3; ++a) d.axis[a] = make_axis(problem.axis[a]);
  d.group_out = static_cast<int>(problem.out_channels_per_group());
  d.weight_turned = problem.weight_layout == Layout::kChannelsLast;
  d.out = output_strides(problem);
  d.grad_output = grad_output, d.weight = weight;
  return d;
}

GradientGemmParams make_params(const Problem& problem, const GradientGemmTile& t, void* grad_input) {
  GradientGemmParams p{};
  for (int a = 0; a < 3; ++a) p.axis[a] = make_axis(problem.axis[a]);
  p.rank = gradient_gemm_rank(problem);
  p.positions = static_cast<int>(problem.batch * problem.in_positions());
  p.image = fast_divide(static_cast<int>(problem.in_positions()));
  p.items = static_cast<int>(t.items), p.whole = static_cast<int>(t.whole);
  p.column_blocks = fast_divide(t.column_blocks);
  p.row_blocks = fast_divide(static_cast<int>(ceil_div(int64_t{p.positions}, int64_t{t.rows})));
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_pitch = static_cast<int>(gradient_gemm_pitch(problem));
  p.out_channels = p.group_pitch * static_cast<int>(problem.groups);
  p.chunk = t.chunk, p.chunks = t.chunks;
  p.units = t.chunks * static_cast<int>(problem.kernel_positions());
  p.units_per_stage = t.units_per_stage, p.inner = t.inner, p.splits = t.splits;
  if (t.windows) {
    const GradientGemmWindows w = gradient_gemm_windows(problem);
    p.plane = static_cast<int>(w.plane), p.plane_layer = static_cast<int>(w.size[1] * w.size[2]);
    p.plane_row = static_cast<int>(w.size[2]), p.slice = w.slice;
    p.planes_image = problem.out_channels * w.plane * 2;
  }
  const int element = static_cast<int>(problem.element_size());
  p.rows = t.rows, p.columns = t.columns;
  p.staged_columns = t.columns / gradient_gemm_parts(t.rows, t.columns, element);
  p.chunk_bytes = t.chunk * static_cast<int>(problem.element_size());
  p.swizzle = p.chunk_bytes == 128 ? 1 : p.chunk_bytes == 64 ? 2 : 3;
  p.unit_rows_bytes = t.rows * p.chunk_bytes, p.unit_columns_bytes = t.columns * p.chunk_bytes;
  p.stages = t.stages, p.stage_bytes = t.stage_bytes;
  p.staging_at = kGradientGemmHeader + t.stages * t.stage_bytes;
  p.staging_share = t.staging_bytes / 2;
  p.contiguous = problem.layout == Layout::kContiguous;
  const int64_t wide = 16 / problem.element_size(), image = problem.in_positions();
  const int64_t lines = p.contiguous ? image : p.group_in;
  for (p.piece = static_cast<int>(wide); p.piece > 1; p.piece /= 2) {
    if (lines % p.piece == 0 && reinterpret_cast<uintptr_t>(grad_input) % (p.piece * problem.element_size()) == 0)
      break;
  }
  // A tensor that is not aligned is stored by threads, from lines as they are planned.
  const bool boxes = t.store == GradientGemmStore::kBoxes;
  const int line = (p.contiguous ? t.rows / 2 : p.staged_columns) * element;
  p.store = p.piece == wide ? t.store : GradientGemmStore::kThreads;
  p.line_pitch = t.line_pitch, p.line_bytes = boxes ? t.line_pitch : line;
  while (1 << p.line_log2 < p.line_bytes) ++p.line_log2;
  p.line_block = boxes ? (p.contiguous ? p.staged_columns : t.rows / 2) * t.line_pitch : line;
  p.line_shift = p.line_bytes == 128 ? 0 : 1, p.line_mask = !boxes ? 0 : p.line_bytes == 128 ? 7 : 3;
  p.in = input_strides(problem);
  p.grad_input = grad_input;
  return p;
}

// Starts as soon as the blocks that pack leave room, and waits for them on the device.
template <class Kernel>
cudaError_t launch_products(Kernel* kernel, const GradientGemmTile& t, const GradientGemmParams& p,
                            const GradientGemmMaps& maps, cudaStream_t stream) {
  int resident = 0;
  const cudaError_t error = count_resident_blocks(kernel, kGradientGemmThreads, t.shared_bytes,
                                                  static_cast<int>(kGradientGemmShared), resident);
  if (error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorNotSupported;
  cudaLaunchConfig_t config{};
  const int64_t shared = (t.items - t.whole) * t.splits;  // blocks of clusters that share items
  const int64_t blocks = t.splits == 1  ? std::min<int64_t>(t.items, resident)
                         : t.whole == 0 ? shared
                                        : std::max(shared, gradient_gemm_clusters(t.splits) * t.splits);
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kGradientGemmThreads);
  config.dynamicSmemBytes = static_cast<size_t>(t.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(t.splits);
  attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = t.splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p, maps.positions, maps.weights, maps.gradients);
}

// Windows are 128 positions by 128 or 256 channels, of 16 bits.
template <typename T, GradientGemmForm kForm>
cudaError_t launch_windows(const GradientGemmTile& t, const GradientGemmParams& p, const GradientGemmMaps& maps,
                           cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (t.columns == 128) return launch_products(gradient_gemm_kernel<T, 1, 16, kForm>, t, p, maps, stream);
    if (t.columns == 256) return launch_products(gradient_gemm_kernel<T, 1, 32, kForm>, t, p, maps, stream);
  }
  return cudaErrorNotSupported;
}

template <typename T, int kShape = 0>
cudaError_t dispatch_gradient_shape(const GradientGemmTile& t, const GradientGemmParams& p,
                                    const GradientGemmMaps& maps, cudaStream_t stream) {
  if constexpr (kShape == kNumGradientGemmShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr GradientGemmShape kOf = kGradientGemmShapes[kShape];
    if (t.shape == kShape) {
      return launch_products(gradient_gemm_kernel<T, kOf.rows, kOf.columns / 8, GradientGemmForm::kIm2col>, t, p, maps,
                             stream);
    }
    return dispatch_gradient_shape<T, kShape + 1>(t, p, maps, stream);
  }
}

// What is multiplied is packed, or lies as copies read it; `products` as launch_packed_gemm_input_gradient has it.
cudaError_t launch_tile(const Problem& problem, const Problem& products, const GradientGemmTile& t,
                        const void* grad_output, const void* packed, const void* weight, const void* packed_weight,
                        void* grad_input, GradientGemmOrder order, cudaStream_t stream) {
  GradientGemmParams p = make_params(products, t, grad_input);
  p.ready = order.ready, p.stores_wait = order.stores_wait;
  p.definition = make_definition(problem, grad_output, weight);
  GradientGemmMaps maps{};
  if (t.windows) {
    p.planes = packed_weight;
    if (!make_window_map(products, p, weight, maps.weights)) return cudaErrorNotSupported;
  } else if (!make_position_map(products, p, packed, maps.positions) ||
             !make_weight_map(products, p, packed_weight, maps.weights)) {
    return cudaErrorNotSupported;
  }
  if (!make_gradient_map(products, p, maps.gradients)) return cudaErrorNotSupported;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return t.windows ? launch_windows<T, GradientGemmForm::kWindows>(t, p, maps, stream)
                     : dispatch_gradient_shape<T>(t, p, maps, stream);
  });
}

}  // namespace

int64_t gradient_gemm_own_bytes(const Problem& problem, const GradientGemmTile& tile, const void* weight) {
  if (tile.windows) return gradient_gemm_planes_bytes(problem);
  return is_read(problem, problem.weight_layout, weight) ? 0 : packed_weight_bytes(problem);
}
int64_t gradient_gemm_packed_bytes(const Problem& problem, const void* grad_output) {
  return is_read(problem, problem.layout, grad_output) ? 0 : packed_gradient_bytes(problem);
}

namespace {
// For a weight that need not be aligned.
const GradientGemmTile& tile_for(const Problem& problem, const void* weight) {
  const GradientGemmTile& tile = last_result<gradient_gemm_tile>(problem);
  return !tile.windows || has_windows(tile, weight) ? tile : last_result<gradient_gemm_plain_tile>(problem);
}
}  // namespace

int64_t gemm_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                      const void* weight) {
  const GradientGemmTile& tile = tile_for(problem, weight);
  return gradient_gemm_own_bytes(problem, tile, weight) +
         (tile.windows ? 0 : gradient_gemm_packed_bytes(problem, grad_output));
}
int64_t gemm_input_gradient_workspace(const Problem& problem) {
  const void* const unaligned = reinterpret_cast<const void*>(1);
  return gemm_input_gradient_workspace(problem, unaligned, nullptr, unaligned);
}

cudaError_t launch_gemm_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                       void* grad_input, void* workspace, cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  if (!gradient_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  const GradientGemmTile& tile = tile_for(problem, weight);
  const int64_t own_bytes = gradient_gemm_own_bytes(problem, tile, weight);
  void* const own = own_bytes > 0 ? workspace : nullptr;
  const bool packs = !tile.windows && gradient_gemm_packed_bytes(problem, grad_output) > 0;
  void* const packed = packs ? static_cast<char*>(workspace) + own_bytes : nullptr;
  const cudaError_t error =
      launch_gradient_gemm_pack(problem, tile, grad_output, packed, weight, own, nullptr, nullptr, stream);
  if (error != cudaSuccess) return error;
  return launch_packed_gemm_input_gradient(problem, problem, tile, grad_output, packs ? packed : grad_output, weight,
                                           own != nullptr ? own : weight, grad_input, {}, stream);
}

cudaError_t launch_packed_gemm_input_gradient(const Problem& problem, const Problem& products,
                                              const GradientGemmTile& tile, const void* grad_output, const void* packed,
                                              const void* weight, const void* packed_weight, void* grad_input,
                                              GradientGemmOrder order, cudaStream_t stream) {
  return launch_tile(problem, products, tile, grad_output, packed, weight, packed_weight, grad_input, order, stream);
}

cudaError_t launch_window_weight_gradient(const Problem& problem, const GradientGemmTile& tile, const void* grad_output,
                                          const void* planes, const void* input, void* grad_weight, void* grad_bias,
                                          cudaStream_t stream) {
  const GradientGemmWindows w = gradient_gemm_windows(problem);
  const Problem rows = window_weight_problem(problem);
  GradientGemmParams p = make_params(rows, tile, grad_weight);
  for (int a = 0; a < 3; ++a) p.axis[a] = make_axis(problem.axis[a]);
  p.plane = static_cast<int>(w.plane), p.plane_layer = static_cast<int>(w.size[1] * w.size[2]);
  p.plane_row = static_cast<int>(w.size[2]), p.slice = 2 * w.slice;
  p.planes_image = problem.out_channels * w.plane * 2;
  p.image_positions = static_cast<int>(problem.in_positions());
  p.planes = planes, p.bias = grad_bias;
  p.definition = make_definition(problem, grad_output, nullptr);
  p.definition.input = input, p.definition.in = input_strides(problem);
  p.definition.batch = static_cast<int>(problem.batch);
  GradientGemmMaps maps{};
  if (!make_image_map(problem, p, input, maps.weights) || !make_gradient_map(rows, p, maps.gradients)) {
    return cudaErrorNotSupported;
  }
  return dispatch_16_bits(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.image_positions <= 48 ? launch_windows<T, GradientGemmForm::kShortWeightWindows>(tile, p, maps, stream)
                                   : launch_windows<T, GradientGemmForm::kWeightWindows>(tile, p, maps, stream);
  });
}

cudaError_t launch_gradient_gemm_pack(const Problem& problem, const GradientGemmTile& tile, const void* grad_output,
                                      void* packed, const void* weight, void* own, const void* input,
                                      void* packed_input, cudaStream_t stream) {
  void *const planes = tile.windows ? own : nullptr, *const packed_weight = tile.windows ? nullptr : own;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_pack<T>(problem, {grad_output, packed, weight, packed_weight, input, packed_input, planes}, stream);
  });
}

}  // namespace fastconvt::cuda
