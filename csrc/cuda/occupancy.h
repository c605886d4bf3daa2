// How many blocks of a kernel the GPU holds at once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

namespace fastconvt::cuda {

// Of blocks with `shared` bytes of shared memory each, in `blocks`; cudaErrorNotSupported if there are none. No launch
// of the kernel has more than `most` bytes.
template <class Kernel>
cudaError_t count_resident_blocks(Kernel* kernel, int threads, int shared, int most, int& blocks) {
  int device = 0, multiprocessors = 0, largest = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&largest, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess && shared > largest) error = cudaErrorNotSupported;
  if (error == cudaSuccess) {
    // The same value every time: launches from several threads must not undo each other's.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::min(most, largest));
  }
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
  blocks *= multiprocessors;
  return error;
}

}  // namespace fastconvt::cuda
