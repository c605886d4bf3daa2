// Activations of stored values, in loops that vectorise. Included by conv_kernel.h, once for each instruction set: no
// include guard.

#include "chain_math.h"

// exp(x) - 1 for x <= 0 or NaN, with a small relative error also near 0.
template <class A>
inline A expm1_nonpositive(A x, A lowest) {
  const ExpParts<A> of = exp_parts(x, lowest);
  return of.scale * of.rest + (of.scale - A(1));
}

template <class A>
inline A tanh_any(A x, A lowest) {
  const A magnitude = x < 0 ? -x : x;
  const A below = expm1_nonpositive(A(-2) * magnitude, lowest);
  const A result = -below / (A(2) + below);
  return x < 0 ? -result : result;
}

// 1 + erf(x), to 3e-7 in float32: Abramowitz and Stegun, 7.1.26.
inline float one_plus_erf(float x, float lowest) {
  constexpr float kFar = 9;  // the rest, 1 - erf, is 0 from here on: products below the normal numbers are slow
  const float magnitude = x < 0 ? -x : x;
  const float y = magnitude > kFar ? kFar : magnitude;
  const float t = 1.0f / (1.0f + 0.3275911f * y);
  const float series =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float rest = series * exp_nonpositive(-y * y, lowest);
  const float above = magnitude > kFar ? 0.0f : rest;
  return x < 0 ? above : 2.0f - above;
}
// The same to 2e-16: Cody's rational approximations (1969), of erf(x) / x in x * x and of erfc(x) * exp(x * x).
constexpr double kErfTop[] = {1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2,
                              3.77485237685302021e2, 3.20937758913846947e3};
constexpr double kErfBottom[] = {1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
                                 2.84423683343917062e3};
constexpr double kErfcTop[] = {2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
                               6.61191906371416295e1,  2.98635138197400131e2,  8.81952221241769090e2,
                               1.71204761263407058e3,  2.05107837782607147e3,  1.23033935479799725e3};
constexpr double kErfcBottom[] = {1.0,
                                  1.57449261107098347e1,
                                  1.17693950891312499e2,
                                  5.37181101862009858e2,
                                  1.62138957456669019e3,
                                  3.29079923573345963e3,
                                  4.36261909014324716e3,
                                  3.43936767414372164e3,
                                  1.23033935480374942e3};

// Of descending powers of x.
template <int kCount>
inline double polynomial(const double (&coefficients)[kCount], double x) {
  double sum = coefficients[0];
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) sum = sum * x + coefficients[i];
  return sum;
}

inline double one_plus_erf(double x, double lowest) {
  constexpr double kFar = 27;  // the rest, 1 - erf, is 0 from here on
  const double magnitude = x < 0 ? -x : x, square = x * x;
  const double near = 1.0 + x * (polynomial(kErfTop, square) / polynomial(kErfBottom, square));
  const double y = magnitude > kFar ? kFar : magnitude;
  const double rest = polynomial(kErfcTop, y) / polynomial(kErfcBottom, y) * exp_nonpositive(-y * y, lowest);
  const double above = magnitude > kFar ? 0.0 : rest;
  const double far = x < 0 ? above : 2.0 - above;
  return magnitude < 0.46875 ? near : far;
}

template <class A, class Function>
inline void map_values(A* values, int64_t count, const Function& function) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = function(values[i]);
}

// values[i] = activation(values[i]).
template <class A>
void activate(Activation activation, double alpha, A* values, int64_t count) {
  const A lowest = opaque(kLowest<A>);
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return map_values(values, count, [](A x) { return x < 0 ? A(0) : x; });
    case Activation::kLeakyRelu: {
      const A slope = A(alpha);
      return map_values(values, count, [=](A x) { return x > 0 ? x : x * slope; });
    }
    case Activation::kSilu:
      return map_values(values, count, [=](A x) { return x / (A(1) + exp_any(-x, lowest)); });
    case Activation::kGelu:
      return map_values(values, count,
                        [=](A x) { return A(0.5) * x * one_plus_erf(x * A(0.7071067811865476), lowest); });
    case Activation::kGeluTanh:
      return map_values(values, count, [=](A x) {
        const A inner = A(0.7978845608028654) * (x + A(0.044715) * x * x * x);
        return A(0.5) * x * (A(1) + tanh_any(inner, lowest));
      });
    case Activation::kTanh:
      return map_values(values, count, [=](A x) { return tanh_any(x, lowest); });
    case Activation::kSigmoid:
      return map_values(values, count, [=](A x) { return A(1) / (A(1) + exp_any(-x, lowest)); });
    case Activation::kHardswish:
      return map_values(values, count, [](A x) {
        A gate = x + A(3);
        gate = gate < 0 ? A(0) : gate;
        gate = gate > A(6) ? A(6) : gate;
        return x * (gate / A(6));
      });
  }
}
