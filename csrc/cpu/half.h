// float16 and bfloat16 as bits, and their conversions: branch-free on the way in (loops over them vectorise), one
// rounding to nearest even on the way out. NaN stays NaN, and subnormals are exact.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastconvt::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// What a kernel computes with: float for the halves, else the type itself.
inline float to_accumulator(float value) { return value; }
inline double to_accumulator(double value) { return value; }
inline float to_accumulator(BFloat16 value) { return float_from_bits(uint32_t(value.bits) << 16); }
inline float to_accumulator(Half value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  const uint32_t normal = magnitude + (112u << 23);  // the exponent's bias goes from 15 to 127
  const uint32_t special = magnitude | 0x7f800000u;  // inf, NaN
  const uint32_t subnormal = bits_of_float(float_from_bits(magnitude + (113u << 23)) - 0x1p-14f);
  const uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
  return float_from_bits(sign | (magnitude < (31u << 23) ? finite : special));
}

inline void from_accumulator(float value, float* out) { *out = value; }
inline void from_accumulator(double value, double* out) { *out = value; }
inline void from_accumulator(float value, BFloat16* out) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  out->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
inline void from_accumulator(float value, Half* out) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 0.5 has float16's smallest subnormal as its unit in the last place: adding it rounds at the right bit.
  const uint32_t subnormal = bits_of_float(float_from_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;  // 65536 and more: inf
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  out->bits = uint16_t(sign | result);
}

}  // namespace fastconvt::cpu
