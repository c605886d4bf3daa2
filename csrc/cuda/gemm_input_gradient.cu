// The input's gradient by the gradient GEMM, host side: packing, the maps of the tensors that copies read, and the
// template instance that multiplies.
#include <algorithm>

#include "dispatch.h"
#include "gemm_gradients.h"
#include "gradient_gemm.cuh"
#include "gradient_gemm_maps.h"
#include "gradient_gemm_pack.cuh"
#include "launchers.h"
#include "occupancy.h"

namespace fastconvt::cuda {
namespace {

bool is_read(const Problem& problem, Layout layout, const void* tensor) {
  return gradient_gemm_reads(problem, layout) && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
}

int64_t packed_weight_bytes(const Problem& problem) {
  return round_up(
      problem.in_channels * problem.kernel_positions() * gradient_gemm_pitch(problem) * problem.element_size(), 1024);
}
int64_t packed_gradient_bytes(const Problem& problem) {
  return problem.batch * problem.out_positions() * problem.groups * gradient_gemm_pitch(problem) *
         problem.element_size();
}

template <typename T>
void plan_weights(const Problem& problem, const void* weight, void* packed, GradientPackParams& p) {
  p.weight = weight, p.packed_weight = packed;
  p.weight_rows = static_cast<int>(problem.in_channels);
  p.channels = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.weight_turned = problem.weight_layout == Layout::kChannelsLast;
  p.weight_pitch = static_cast<int>(gradient_gemm_pitch(problem));
  const int room = kGradientPackBytes / static_cast<int>(sizeof(T));  // elements of a block
  p.block_channels = std::max(8, std::min<int>(p.weight_pitch, room / p.taps / 8 * 8));
  p.channel_blocks = ceil_div(p.channels, p.block_channels);
  p.block_rows = p.channel_blocks > 1 ? 1 : std::max(1, room / (p.channels * p.taps));
  p.row_taps = fast_divide(p.taps);
  p.row_vectors =
      fast_divide(ceil_div(std::min(p.channels, p.block_channels), 16 / static_cast<int>(sizeof(T))) * p.taps);
  const int64_t run = int64_t{p.channels} * p.taps, wide = 16 / static_cast<int>(sizeof(T));
  p.weight_vectors = reinterpret_cast<uintptr_t>(weight) % 16 == 0 && run % wide == 0 &&
                     int64_t{p.block_channels} * p.taps % wide == 0;
  p.weight_blocks = static_cast<int>(ceil_div(p.weight_rows, p.block_rows)) * p.channel_blocks;
}

template <typename T>
int64_t plan_positions(const Problem& problem, const void* grad_output, void* packed, GradientPackParams& p) {
  constexpr int kChannels = 128 / static_cast<int>(sizeof(T));
  p.source = grad_output, p.target = packed;
  p.turned = problem.layout == Layout::kChannelsLast;
  p.groups = static_cast<int>(problem.groups), p.group = static_cast<int>(problem.out_channels_per_group());
  p.group_pitch = static_cast<int>(gradient_gemm_pitch(problem)), p.pitch = p.groups * p.group_pitch;
  if (p.group == p.group_pitch) p.group *= p.groups, p.group_pitch = p.pitch, p.groups = 1;  // all as one
  p.image = static_cast<int>(problem.out_positions());
  p.vectors = p.image % 8 == 0 && reinterpret_cast<uintptr_t>(grad_output) % 16 == 0;
  p.positions = problem.batch * p.image;
  if (p.turned) return ceil_div(p.positions, int64_t{kGradientPackPositions});
  const int columns = ceil_div(p.group_pitch, kChannels), rows = ceil_div(p.image, kGradientPackPositions);
  p.tile_positions = static_cast<int>(round_up(ceil_div(p.image, rows), 8));
  p.tile_columns = fast_divide(columns), p.tile_groups = fast_divide(p.groups), p.tile_rows = fast_divide(rows);
  return problem.batch * p.groups * columns * rows;
}

// Packs what copies cannot read as it lies; null: nothing of it.
template <typename T>
cudaError_t launch_pack(const Problem& problem, const void* grad_output, void* packed_gradient, const void* weight,
                        void* packed_weight, cudaStream_t stream) {
  GradientPackParams p{};
  int64_t blocks = 0;
  if (packed_weight != nullptr) {
    plan_weights<T>(problem, weight, packed_weight, p);
    blocks = p.weight_blocks;
  }
  if (packed_gradient != nullptr) blocks += plan_positions<T>(problem, grad_output, packed_gradient, p);
  if (blocks == 0) return cudaSuccess;
  if (blocks >= int64_t{1} << 31) return cudaErrorNotSupported;
  gradient_pack_kernel<T><<<static_cast<unsigned>(blocks), kGradientPackThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

GradientGemmParams make_params(const Problem& problem, const GradientGemmTile& t, const void* grad_output,
                               const void* weight, void* grad_input) {
  GradientGemmParams p{};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.axis[a] = {fast_divide(static_cast<int>(axis.in)), static_cast<int>(axis.out()),
                 static_cast<int>(axis.kernel),          static_cast<int>(axis.stride),
                 static_cast<int>(axis.padding),         static_cast<int>(axis.dilation)};
  }
  p.rank = gradient_gemm_rank(problem);
  p.positions = static_cast<int>(problem.batch * problem.in_positions());
  p.image = fast_divide(static_cast<int>(problem.in_positions()));
  p.items = static_cast<int>(t.items);
  p.column_blocks = fast_divide(t.column_blocks);
  p.row_blocks = fast_divide(static_cast<int>(ceil_div(int64_t{p.positions}, int64_t{t.rows})));
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.group_pitch = static_cast<int>(gradient_gemm_pitch(problem));
  p.out_channels = p.group_pitch * static_cast<int>(problem.groups);
  p.weight_turned = problem.weight_layout == Layout::kChannelsLast;
  p.chunk = t.chunk, p.chunks = t.chunks;
  p.units = t.chunks * static_cast<int>(problem.kernel_positions());
  p.units_per_stage = t.units_per_stage, p.inner = t.inner, p.splits = t.splits;
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
  p.in = input_strides(problem), p.out = output_strides(problem);
  p.grad_output = grad_output, p.weight = weight, p.grad_input = grad_input;
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
  config.gridDim =
      dim3(static_cast<unsigned>(t.splits > 1 ? t.items * t.splits : std::min<int64_t>(t.items, resident)));
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

template <typename T, int kShape = 0>
cudaError_t dispatch_gradient_shape(const GradientGemmTile& t, const GradientGemmParams& p,
                                    const GradientGemmMaps& maps, cudaStream_t stream) {
  if constexpr (kShape == kNumGradientGemmShapes) {
    return cudaErrorNotSupported;
  } else {
    constexpr GradientGemmShape kOf = kGradientGemmShapes[kShape];
    if (t.shape == kShape) {
      return launch_products(gradient_gemm_kernel<T, kOf.rows, kOf.columns / 8>, t, p, maps, stream);
    }
    return dispatch_gradient_shape<T, kShape + 1>(t, p, maps, stream);
  }
}

// `packed`: the output's gradient as launch_gradient_gemm_pack leaves it, or null.
cudaError_t launch_tile(const Problem& problem, const GradientGemmTile& t, const void* grad_output, const void* packed,
                        const void* weight, void* grad_input, void* workspace, cudaStream_t stream) {
  const GradientGemmParams p = make_params(problem, t, grad_output, weight, grad_input);
  void* const packed_weight = is_read(problem, problem.weight_layout, weight) ? nullptr : workspace;
  void* packed_gradient = nullptr;
  const bool packs = packed == nullptr;  // here
  if (packs && is_read(problem, problem.layout, grad_output)) {
    packed = grad_output;
  } else if (packs) {
    packed = packed_gradient = static_cast<char*>(workspace) + packed_weight_bytes(problem);
  }
  GradientGemmMaps maps{};
  if (!make_position_map(problem, p, packed, maps.positions) ||
      !make_weight_map(problem, p, packed_weight != nullptr ? packed_weight : weight, maps.weights) ||
      !make_gradient_map(problem, p, maps.gradients)) {
    return cudaErrorNotSupported;
  }
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const cudaError_t packing =
        packs ? launch_pack<T>(problem, grad_output, packed_gradient, weight, packed_weight, stream) : cudaSuccess;
    return packing != cudaSuccess ? packing : dispatch_gradient_shape<T>(t, p, maps, stream);
  });
}

}  // namespace

int64_t gemm_input_gradient_workspace(const Problem& problem, bool packed) {
  // A tensor that is not aligned is packed, too.
  return packed_weight_bytes(problem) + (packed ? 0 : packed_gradient_bytes(problem));
}
int64_t gemm_input_gradient_workspace(const Problem& problem) { return gemm_input_gradient_workspace(problem, false); }

cudaError_t launch_gemm_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                       void* grad_input, void* workspace, cudaStream_t stream) {
  return launch_packed_gemm_input_gradient(problem, grad_output, nullptr, weight, grad_input, workspace, stream);
}

cudaError_t launch_packed_gemm_input_gradient(const Problem& problem, const void* grad_output, const void* packed,
                                              const void* weight, void* grad_input, void* workspace,
                                              cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  if (!gradient_gemm_refusal(problem).empty()) return cudaErrorNotSupported;
  return launch_tile(problem, last_result<gradient_gemm_tile>(problem), grad_output, packed, weight, grad_input,
                     workspace, stream);
}

int64_t gradient_gemm_packed_bytes(const Problem& problem, const void* grad_output) {
  return is_read(problem, problem.layout, grad_output) ? 0 : packed_gradient_bytes(problem);
}

cudaError_t launch_gradient_gemm_pack(const Problem& problem, const void* grad_output, void* packed, const void* weight,
                                      void* workspace, cudaStream_t stream) {
  void* const packed_weight = is_read(problem, problem.weight_layout, weight) ? nullptr : workspace;
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_pack<T>(problem, grad_output, packed, weight, packed_weight, stream);
  });
}

}  // namespace fastconvt::cuda
