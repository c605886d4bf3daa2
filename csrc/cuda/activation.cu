// An activation of a whole output in place, for kernels that do not apply it to what they store.
#include <algorithm>

#include "dispatch.h"
#include "epilogue.cuh"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsAtOnce = 2;  // loaded by a thread before it computes

// Vectors of 16 bytes, and the elements before the first and behind the last one.
template <typename T>
struct ActivationParams {
  static constexpr int kVector = 16 / sizeof(T);
  T* data;
  int64_t count;
  int64_t head;
  int64_t vectors;
  Activator<accumulator_t<T>> activate;
};

template <typename T, int kCount>
__device__ void activate_values(const Activator<accumulator_t<T>>& activate, Pack<T, kCount>& values) {
  accumulator_t<T> x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = to_accumulator(values.value[i]);
  activate(x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values.value[i] = from_accumulator<T>(x[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) activation_kernel(const __grid_constant__ ActivationParams<T> p) {
  constexpr int kVector = ActivationParams<T>::kVector;
  using Vector = Pack<T, kVector>;
  Vector* const vectors = reinterpret_cast<Vector*>(p.data + p.head);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t first = thread; first < p.vectors; first += kVectorsAtOnce * step) {
    Vector values[kVectorsAtOnce];
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i) {
      if (first + i * step < p.vectors) values[i] = vectors[first + i * step];
    }
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i) {
      if (first + i * step >= p.vectors) break;
      activate_values(p.activate, values[i]);
      vectors[first + i * step] = values[i];
    }
  }
  const int64_t tail = p.head + p.vectors * kVector, edges = p.head + p.count - tail;  // fewer than 2 * kVector
  if (thread < edges) {
    T* const at = p.data + (thread < p.head ? thread : tail + thread - p.head);
    Pack<T, 1> value{*at};
    activate_values(p.activate, value);
    *at = value.value[0];
  }
}

template <typename T>
cudaError_t launch(const Problem& problem, void* output, cudaStream_t stream) {
  constexpr int kVector = ActivationParams<T>::kVector;
  constexpr int64_t kMaxBlocks = 1 << 16;
  ActivationParams<T> p{};
  p.data = static_cast<T*>(output);
  p.count = problem.out_elements();
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(output) % 16 / sizeof(T));
  p.head = std::min<int64_t>(p.count, misaligned == 0 ? 0 : kVector - misaligned);
  p.vectors = (p.count - p.head) / kVector;
  p.activate = {problem.activation, static_cast<accumulator_t<T>>(problem.alpha)};
  const int64_t blocks = std::clamp<int64_t>(ceil_div(p.vectors, int64_t{kThreads * kVectorsAtOnce}), 1, kMaxBlocks);
  activation_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_activation(const Problem& problem, void* output, cudaStream_t stream) {
  if (problem.activation == Activation::kNone || problem.out_elements() == 0) return cudaSuccess;
  return dispatch_dtype(problem.dtype,
                        [&](auto tag) { return launch<typename decltype(tag)::type>(problem, output, stream); });
}

}  // namespace fastconvt::cuda
