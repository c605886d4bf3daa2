// Grids that begin while the one before them in the stream ends (compute capability 9.0; elsewhere they wait).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fastconvt::cuda {

// Nothing that another grid writes may be read, and nothing written, before this.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next grid may get ready.
__device__ __forceinline__ void let_next_grid_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that calls wait_for_previous_grid(), perhaps before the grid before it has ended, in clusters of
// some blocks.
template <typename... Params>
cudaError_t launch_early_clusters(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared, int cluster,
                                  cudaStream_t stream, const Params&... params) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared, cudaStream_t stream,
                         const Params&... params) {
  return launch_early_clusters(kernel, grid, threads, shared, 1, stream, params...);
}

}  // namespace fastconvt::cuda
