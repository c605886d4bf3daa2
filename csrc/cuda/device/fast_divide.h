// Division by a run-time constant in three instructions.
#pragma once

#include <cstdint>

#include "../params.h"

namespace fastconvt::cuda {

// n / divisor and n % divisor for 0 <= n < 2^31: (high(n * multiplier) + n) >> shift.
struct FastDivide {
  int divisor;
  uint32_t multiplier;
  int shift;

  // The quotient; n becomes the remainder.
  FASTCONVT_HOST_DEVICE int operator()(int& n) const {
    const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier >> 32);
    const int quotient = static_cast<int>((high + n) >> shift);
    n -= quotient * divisor;
    return quotient;
  }
};

// Requires 1 <= divisor < 2^31.
inline FastDivide fast_divide(int divisor) {
  int shift = 0;
  while ((int64_t{1} << shift) < divisor) ++shift;
  const uint64_t multiplier = (((uint64_t{1} << shift) - divisor) << 32) / divisor + 1;
  return {divisor, static_cast<uint32_t>(multiplier), shift};
}

}  // namespace fastconvt::cuda
