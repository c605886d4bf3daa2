// Whether this library's kernels can run on the current device.
#include "launchers.h"

namespace fastconvt::cuda {

__global__ void probe_kernel() {}

cudaError_t probe_image() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, probe_kernel);
}

}  // namespace fastconvt::cuda
