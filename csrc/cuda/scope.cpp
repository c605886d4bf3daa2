#include "scope.h"

#include <cstdio>
#include <mutex>

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// Why our kernels cannot run on the current device, "" if they can.
std::string find_refusal(int capability) {
  const cudaError_t error = probe_image();
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // the error is handled here
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (error == cudaErrorInsufficientDriver || driver < CUDART_VERSION / 1000 * 1000) {
    return "built with CUDA " + version(CUDART_VERSION) + ", which the driver (CUDA " + version(driver) +
           ") is too old for";
  }
  return "no kernel image for sm_" + std::to_string(capability) + " in this build (" + cudaGetErrorString(error) + ")";
}

}  // namespace

DeviceInfo device_info(int index) {
  static std::mutex mutex;
  static std::vector<std::optional<DeviceInfo>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (size_t(index) >= known.size()) known.resize(index + 1);
  if (!known[index]) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    DeviceInfo device;
    device.cuda = true;
    device.capability = 10 * major + minor;
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) device.name = properties.name;
    device.refusal = find_refusal(device.capability);
    if (!device.refusal.empty()) {
      std::fprintf(stderr, "fastconvt: PyTorch's own kernels serve cuda:%d: %s\n", index, device.refusal.c_str());
    }
    known[index] = device;
  }
  return *known[index];
}

}  // namespace fastconvt::cuda
