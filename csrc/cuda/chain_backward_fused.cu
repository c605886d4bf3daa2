#include <algorithm>

#include "chain_backward.cuh"
#include "chain_backward_fused.cuh"
#include "dispatch.h"
#include "gradients.cuh"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kMaxBlocks = 256;  // sums of so many have room
constexpr int kReduceSlots = 8;

int count_octets(const Problem& problem) { return problem.out_channels <= 8 ? 1 : problem.out_channels <= 16 ? 2 : 4; }

// Appends the steps of a phase, of two neighbours each, and its pairs of neighbours along the width.
void plan_phase(const Problem& problem, int index, FusedParams& p) {
  FusedPhase& phase = p.phase[index];
  phase.first_step = p.steps;
  phase.first_entry = p.entries;
  int found = 0;
  for (int neighbour = 0; neighbour < 8; ++neighbour) {
    bool exists = true;
    for (int a = 0; a < 3; ++a) {
      const Axis& axis = problem.axis[a];
      exists = exists && phase.residue[a] + (neighbour >> (2 - a) & 1) * axis.stride < axis.kernel;
    }
    if (!exists) continue;
    if (found++ % 2 == 0) {
      p.step_phase[p.steps] = static_cast<uint8_t>(index);
      p.neighbours[p.steps][0] = p.neighbours[p.steps][1] = static_cast<uint8_t>(neighbour);
      ++p.steps;
    } else {
      p.neighbours[p.steps - 1][1] = static_cast<uint8_t>(neighbour);
      p.second_exists[p.steps - 1] = true;
    }
    if (phase.pairs >> neighbour / 2 & 1) continue;
    phase.pairs |= 1 << neighbour / 2;
    p.entry_phase[p.entries] = static_cast<uint8_t>(index);
    p.entry_pair[p.entries++] = static_cast<uint8_t>(neighbour / 2);
  }
  phase.end_step = p.steps;
}

void plan_phases(const Problem& problem, FusedParams& p) {
  const auto& axis = problem.axis;
  for (int z = 0; z < axis[0].stride; ++z) {
    for (int y = 0; y < axis[1].stride; ++y) {
      for (int x = 0; x < axis[2].stride; ++x) {
        FusedPhase& phase = p.phase[p.phases];
        phase.residue[0] = z, phase.residue[1] = y, phase.residue[2] = x;
        phase.output = (z * axis[1].out() + y) * axis[2].out() + x;
        plan_phase(problem, p.phases++, p);
      }
    }
  }
}

void plan_shared(FusedParams& p, int octets) {
  int at = 0;
  const auto place = [&at](int floats) {
    const int offset = at;
    at += (floats + 3) / 4 * 4;
    return offset;
  };
  FusedShared& s = p.shared;
  s.phases = place(p.phases * static_cast<int>(sizeof(FusedPhase) / sizeof(float)));
  s.offsets = place(kPlanes * p.steps * 2 + 2);  // the loops read one step ahead
  s.forward_weights = place(p.steps * octets * kLanes * 4);
  s.input_weights = place(p.entries * octets * kLanes * 4);
  s.bias = place(octets * 8);
  s.weight_sums = place(p.rows * p.steps * ((octets + 1) / 2) * kLanes * 4);
  s.patch_floats = std::max(octets * 8 * kPatchPitch, 2 * kExchangeCells * 8);
  s.patches = place(p.rows * s.patch_floats);
  s.planes = place(kPlanes * (p.rows + 1) * kPlanePitch * 4);
  s.floats = at;
}

// Tiles for blocks with so much shared memory, `slots` of them at a time; false if there is too little.
bool plan_tiles(FusedParams& p, int octets, int64_t shared_bytes, int64_t slots) {
  for (p.rows = std::min(max_tile_rows(octets), p.axis[1].cells);; --p.rows) {
    if (p.rows < 1 || (p.rows < 4 && p.axis[1].cells > p.rows)) return false;
    plan_shared(p, octets);
    if (int64_t{p.shared.floats} * 4 <= shared_bytes) break;
  }
  FusedAxis& height = p.axis[1];
  height.tiles = (height.cells + p.rows - 1) / p.rows;
  height.tile = p.rows = (height.cells + height.tiles - 1) / height.tiles;
  height.tiles = (height.cells + height.tile - 1) / height.tile;
  plan_shared(p, octets);
  FusedAxis& width = p.axis[2];
  width.tile = width.cells <= kTileCells ? kTileCells : kTileCells - 1;
  width.tiles = (width.cells + width.tile - 1) / width.tile;
  // Along the depth: as few planes twice as go with an even share of the blocks.
  FusedAxis& depth = p.axis[0];
  const int64_t columns = int64_t{p.batch} * height.tiles * width.tiles;
  double least = 0;
  for (int tiles = 1; tiles <= depth.cells; tiles = tiles < 64 ? tiles + 1 : 2 * tiles) {
    const int length = (depth.cells + tiles - 1) / tiles;
    const double cost = static_cast<double>((columns * tiles + slots - 1) / slots) * (length + 1.5);
    if (tiles > 1 && cost >= least) continue;
    least = cost;
    depth.tile = length;
    depth.tiles = (depth.cells + length - 1) / length;
  }
  p.tiles = static_cast<int>(columns * depth.tiles);
  return true;
}

FusedParams make_fused_params(const Problem& problem) {
  FusedParams p{};
  p.input_stride = input_strides(problem);
  p.in_channels = static_cast<int>(problem.in_channels);
  p.out_channels = static_cast<int>(problem.out_channels);
  p.batch = static_cast<int>(problem.batch);
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    FusedAxis& to = p.axis[a];
    to.in = static_cast<int>(axis.in);
    to.out = static_cast<int>(axis.out());
    to.kernel = static_cast<int>(axis.kernel);
    to.stride = static_cast<int>(axis.stride);
    to.padding = static_cast<int>(axis.padding);
    to.cells = static_cast<int>(std::max(axis.in, axis.base(axis.out() - 1) + 1));
  }
  const int octets = count_octets(problem);
  plan_phases(problem, p);
  p.sums_stride = p.steps * ((octets + 1) / 2) * kLanes * 4 + octets * 8 + 1;
  return p;
}

// Where a weight's gradient lies in a block's sums.
__device__ __forceinline__ int find_weight_sum(const FusedParams& p, int index, int halves) {
  int phase = 0, neighbour = 0, scale = 1;
  const int volume = p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  int tap = index % volume;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    const int t = tap % p.axis[a].kernel;
    tap /= p.axis[a].kernel;
    phase += t % p.axis[a].stride * scale;
    neighbour += t / p.axis[a].stride << (2 - a);
    scale *= p.axis[a].stride;
  }
  int step = 0;
  while (p.step_phase[step] != phase || (p.neighbours[step][0] != neighbour && p.neighbours[step][1] != neighbour)) {
    ++step;
  }
  const int channel = index / volume % p.out_channels;
  const int column = index / volume / p.out_channels + (p.neighbours[step][0] == neighbour ? 0 : 4);
  const int lane = channel % 8 * 4 + column / 2;
  return ((step * halves + channel / 16) * kLanes + lane) * 4 + channel / 8 % 2 * 2 + column % 2;
}

template <typename T>
struct FusedGradients {
  T *weight, *bias, *subtrahend;  // or null
};

// Adds up the blocks' sums, in float64.
template <typename T>
__device__ __forceinline__ void reduce_sums(const FusedParams& p, const FusedGradients<T>& to, int blocks, int octets) {
  __shared__ double parts[kReduceSlots][kLanes];
  const int halves = (octets + 1) / 2,
            weights = p.in_channels * p.out_channels * p.axis[0].kernel * p.axis[1].kernel * p.axis[2].kernel;
  const int index = blockIdx.x * kLanes + threadIdx.x;
  T* target = nullptr;
  int from = p.steps * halves * kLanes * 4;
  double scale = 1;
  if (index < weights) {
    target = to.weight == nullptr ? nullptr : to.weight + index;
    from = find_weight_sum(p, index, halves);
  } else if (index < weights + p.out_channels) {
    target = to.bias == nullptr ? nullptr : to.bias + index - weights;
    from += index - weights;
  } else if (index == weights + p.out_channels) {
    target = to.subtrahend;
    from += octets * 8;
    scale = -1;
  }
  double sum = 0;
  if (target != nullptr) {
#pragma unroll 4
    for (int b = threadIdx.y; b < blocks; b += kReduceSlots) {
      sum += p.sums[static_cast<int64_t>(b) * p.sums_stride + from];
    }
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || target == nullptr) return;
  for (int i = 1; i < kReduceSlots; ++i) sum += parts[i][threadIdx.x];
  *target = from_accumulator<T>(static_cast<float>(scale * sum));
}

// Adds the two parts of the input's gradient at the seams.
template <typename T>
__device__ __forceinline__ void add_seam(const FusedParams& p, int64_t index, int64_t count) {
  if (index >= count) return;
  int64_t rest = index;
  const int x = split_off(rest, p.axis[2].in), c = split_off(rest, p.in_channels), z = split_off(rest, p.axis[0].in);
  const int y = (split_off(rest, p.axis[1].tiles - 1) + 1) * p.axis[1].tile - 1;
  if (y >= p.axis[1].in) return;
  T* to = static_cast<T*>(p.grad_input) + rest * p.input_stride.batch + z * p.input_stride.axis[0] +
          y * p.input_stride.axis[1] + x * p.input_stride.axis[2] + c * p.input_stride.channel;
  *to = from_accumulator<T>(p.seams[index] + p.seams[index + count]);
}

// The first blocks add up sums, the others seams.
template <typename T>
__global__ void fused_finish_kernel(const __grid_constant__ FusedParams p, FusedGradients<T> to, int blocks, int octets,
                                    int reductions, int64_t seams) {
  if (blockIdx.x < reductions) {
    reduce_sums(p, to, blocks, octets);
  } else {
    const int64_t block = blockIdx.x - reductions;
    add_seam<T>(p, (block * kReduceSlots + threadIdx.y) * kLanes + threadIdx.x, seams);
  }
}

// How the present device runs it: completes `p`, in blocks that all run at a time. False if it cannot.
bool plan_device(const Problem& problem, FusedParams& p, int& blocks) {
  int device = 0, multiprocessors = 0, shared = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return false;
  }
  const int slots = std::min(multiprocessors, kMaxBlocks);
  if (major < 8 || !plan_tiles(p, count_octets(problem), shared, slots)) return false;
  blocks = std::min(p.tiles, slots);
  return true;
}

int64_t count_seam_elements(const FusedParams& p) {
  return int64_t{p.batch} * (p.axis[1].tiles - 1) * p.axis[0].in * p.in_channels * p.axis[2].in;
}

template <typename T, int kOctets>
cudaError_t launch(const FusedParams& p, int blocks, int64_t outputs, const FusedGradients<T>& to,
                   cudaStream_t stream) {
  const auto kernel = fused_chain_backward_kernel<T, kOctets>;
  const int bytes = p.shared.floats * int{sizeof(float)};
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, p.rows * kLanes, bytes, stream>>>(p);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const auto finish = fused_finish_kernel<T>;
  const dim3 threads(kLanes, kReduceSlots);
  const int reductions = static_cast<int>(ceil_div(outputs, kLanes));
  const int64_t seams = p.grad_input != nullptr ? count_seam_elements(p) : 0;
  const int64_t grid = reductions + ceil_div(seams, kLanes * kReduceSlots);
  finish<<<grid, threads, 0, stream>>>(p, to, blocks, kOctets, reductions, seams);
  return cudaGetLastError();
}

}  // namespace

bool fused_chain_backward_fits(const Problem& problem) {
  if (!fused_chain_backward_refusal(problem).empty()) return false;
  FusedParams p = make_fused_params(problem);
  int blocks;
  return plan_device(problem, p, blocks);
}

int64_t fused_chain_backward_workspace(const Problem& problem) {
  FusedParams p = make_fused_params(problem);
  int blocks;
  if (!plan_device(problem, p, blocks)) return 0;
  return (int64_t{blocks} * p.sums_stride + 2 * count_seam_elements(p)) * int64_t{sizeof(float)};
}

cudaError_t launch_fused_chain_backward(const Problem& problem, const void* grad_output, const void* input,
                                        const void* weight, const void* bias, const void* subtrahend, double min,
                                        double max, void* grad_input, void* grad_weight, void* grad_bias,
                                        void* grad_subtrahend, void* workspace, cudaStream_t stream) {
  if (!fused_chain_backward_refusal(problem).empty()) return cudaErrorNotSupported;
  FusedParams p = make_fused_params(problem);
  int blocks;
  if (!plan_device(problem, p, blocks)) return cudaErrorNotSupported;
  const int64_t outputs = problem.weight_elements() + problem.out_channels + 1;
  p.grad_output = grad_output, p.input = input, p.weight = weight, p.bias = bias, p.subtrahend = subtrahend;
  p.grad_input = grad_input, p.wants_weight = grad_weight != nullptr;
  p.sums = static_cast<float*>(workspace);
  p.seams = p.sums + int64_t{blocks} * p.sums_stride;
  p.min = static_cast<float>(min), p.max = static_cast<float>(max);
  return dispatch_dtype(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 8) {
      return cudaErrorNotSupported;
    } else {
      const FusedGradients<T> to{static_cast<T*>(grad_weight), static_cast<T*>(grad_bias),
                                 static_cast<T*>(grad_subtrahend)};
      switch (count_octets(problem)) {
        case 1:
          return launch<T, 1>(p, blocks, outputs, to, stream);
        case 2:
          return launch<T, 2>(p, blocks, outputs, to, stream);
        default:
          return launch<T, 4>(p, blocks, outputs, to, stream);
      }
    }
  });
}

}  // namespace fastconvt::cuda
