// exp and log of the fused chain, for loops that vectorise: no branch, no call, NaN in and out. Included once for each
// instruction set by chain_kernel.h, hence no include guard.

template <class A>
struct Bits;
template <>
struct Bits<float> {
  using Type = uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  static constexpr float kBias = 127.0f;
  static constexpr float kHighest = 88.8f;  // exp() of this is inf
  // 2^f = 1 + f * (...) for |f| <= 1/2, minimax: 9.2e-8.
  static constexpr float kExp2[] = {0.69314700365f, 0.24022242427f, 0.05550733581f, 0.00967151299f, 0.00132647273f};
  static constexpr int kLogTerms = 5;
};
template <>
struct Bits<double> {
  using Type = uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  static constexpr double kBias = 1023.0;
  static constexpr double kHighest = 709.9;
  // ln(2)^k / k!: the Taylor series; the first term left out is 4e-18.
  static constexpr double kExp2[] = {6.931471805599453e-1,  2.4022650695910072e-1, 5.550410866482158e-2,
                                     9.618129107628477e-3,  1.3333558146428443e-3, 1.5403530393381608e-4,
                                     1.5252733804059841e-5, 1.3215486790144307e-6, 1.0178086009239699e-7,
                                     7.054911620801123e-9,  4.445538271870811e-10, 2.5678435993488206e-11,
                                     1.3691488853904128e-12};
  static constexpr int kLogTerms = 11;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Hides a constant from the compiler, which then makes one instruction of `x < bound ? bound : x`. To be called outside
// of the loop.
template <class A>
inline A opaque(A constant) {
  __asm__("" : "+m"(constant));
  return constant;
}

// The exponent of the smallest normal number.
template <class A>
constexpr A kLowest = A(1) - Bits<A>::kBias;

// exp(x) for x <= 0 or NaN is scale * (1 + rest); `lowest` is opaque(kLowest<A>).
template <class A>
struct ExpParts {
  A scale, rest;
};
template <class A>
inline ExpParts<A> exp_parts(A x, A lowest) {
  using B = Bits<A>;
  using U = typename B::Type;
  constexpr int kTerms = sizeof(B::kExp2) / sizeof(A);
  // Adding kShift rounds to an integer and leaves it, biased as an exponent, in the low bits.
  constexpr A kShift = A(U(3) << (B::kMantissa - 1)) + B::kBias;
  A log2 = x * A(1.4426950408889634);
  log2 = log2 < lowest ? lowest : log2;  // keeps NaN
  const A shifted = log2 + kShift;
  const A fraction = log2 - (shifted - kShift);
  A power = B::kExp2[kTerms - 1];
#pragma GCC unroll 16
  for (int k = kTerms - 2; k >= 0; --k) power = power * fraction + B::kExp2[k];
  return {bit_cast<A>(bit_cast<U>(shifted) << B::kMantissa), power * fraction};
}

// exp(x) for x <= 0 or NaN, at least the smallest normal number.
template <class A>
inline A exp_nonpositive(A x, A lowest) {
  const ExpParts<A> of = exp_parts(x, lowest);
  return (of.rest + A(1)) * of.scale;
}

// exp(x) for any x.
template <class A>
inline A exp_any(A x, A lowest) {
  return exp_nonpositive(x > Bits<A>::kHighest ? Bits<A>::kHighest : x, lowest);
}

// log(x) for normal positive x. x = 2^e * m with m in [sqrt(1/2), sqrt(2)), log(m) = 2 artanh((m - 1) / (m + 1)).
template <class A>
inline A log_positive(A x) {
  using B = Bits<A>;
  using U = typename B::Type;
  const U shifted = bit_cast<U>(x) + (bit_cast<U>(A(1)) - B::kSqrtHalf);
  const A mantissa = bit_cast<A>((shifted & ((U(1) << B::kMantissa) - 1)) + B::kSqrtHalf);
  constexpr A kInteger = A(U(1) << B::kMantissa);  // its bits plus n are those of kInteger + n
  const A biased = bit_cast<A>((shifted >> B::kMantissa) | bit_cast<U>(kInteger));
  const A exponent = biased - (kInteger + B::kBias);
  const A z = (mantissa - A(1)) / (mantissa + A(1));
  const A square = z * z;
  A series = A(2) / A(2 * B::kLogTerms - 1);
#pragma GCC unroll 16
  for (int k = B::kLogTerms - 2; k >= 0; --k) series = series * square + A(2) / A(2 * k + 1);
  return exponent * A(0.6931471805599453) + z * series;
}
