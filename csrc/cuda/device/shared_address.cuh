// Pointers to shared memory as instructions take them.
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace fastconvt::cuda
