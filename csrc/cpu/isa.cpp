#include "kernels.h"
#include "target.h"

namespace fastconvt::cpu {

Isa best_isa() {
#ifdef FASTCONVT_X86
  // What the kernels' target pragmas name; a level is taken only as a whole.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPortable;
#else
  return Isa::kPortable;
#endif
}

}  // namespace fastconvt::cpu
