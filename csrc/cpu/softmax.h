// What turns scores into weights: powers of two, tanh, and the softmax of a row's scores.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr float kNothing = -3.4028234e38f;  // below every score, yet the difference of two is a number

// Bits moved up by 23, where a float's exponent is.
PAGEBUS_INLINE V to_exponent(V a) {
#ifdef __AVX512F__
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.x), 23))};
#else
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.lo), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.hi), 23))};
#endif
}

// 2^x for x <= 0, to 1.7e-7 relative (minimax polynomial for 2^f, |f| <= 1/2); 2^-125 below -125, NaN for NaN.
PAGEBUS_INLINE V exp2_falling(V x) {
  const V magic = set1(12583039.0f);  // 1.5 * 2^23 + 127: rounds to an integer, and leaves its exponent's bits
  const V t = max(set1(-125.0f), x);
  const V shifted = add(t, magic);
  const V f = sub(t, sub(shifted, magic));
  V p = set1(1.326472731e-03f);
  p = fma(p, f, set1(9.671512991e-03f));
  p = fma(p, f, set1(5.550733581e-02f));
  p = fma(p, f, set1(2.402224243e-01f));
  p = fma(p, f, set1(6.931470037e-01f));
  p = fma(p, f, set1(1.0f));
  return mul(p, to_exponent(shifted));
}

// tanh to 2e-7 relative (Cephes' tanhf: a polynomial below 5/8, exponentials above); NaN for NaN.
PAGEBUS_INLINE V tanh(V x) {
  const V negative = sub(zero(), x);
  const V size = max(negative, x);
  const V square = mul(x, x);
  V p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const V small = fma(mul(p, square), x, x);
  const V large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(size, size)), set1(1.0f))));
  return where_less(size, set1(0.625f), small, where_less(x, zero(), sub(zero(), large), large));
}

PAGEBUS_INLINE V cap_softly(V x, V cap, V inverse) { return mul(tanh(mul(x, inverse)), cap); }

// Group g of a row's scores, nothing where no key of [from, to) is.
PAGEBUS_INLINE V seen_scores(const float* scores, int g, int from, int to) {
  const V all = load(scores + g * kLanes);
  if (from <= g * kLanes && to >= (g + 1) * kLanes) return all;
  return where_lanes(from - g * kLanes, to - g * kLanes, all, set1(kNothing));
}

PAGEBUS_INLINE void cap_scores(float* scores, float cap, int from, int to) {
  const V inverse = set1(1.0f / cap);
  for (int g = from / kLanes; g * kLanes < to; ++g)
    store(scores + g * kLanes, cap_softly(load(scores + g * kLanes), set1(cap), inverse));
}

PAGEBUS_INLINE float highest(const float* scores, int from, int to) {
  V top = set1(kNothing);
  for (int g = from / kLanes; g * kLanes < to; ++g) top = max(top, seen_scores(scores, g, from, to));
  return reduce_max(top);
}

// Turns the scores of a row's keys [from, to) into weights 2^(score - maximum); returns their sum.
PAGEBUS_INLINE float exponentiate(float* scores, float maximum, int from, int to) {
  V total = zero();
  for (int g = from / kLanes; g * kLanes < to; ++g) {
    const V p = exp2_falling(sub(seen_scores(scores, g, from, to), set1(maximum)));
    store(scores + g * kLanes, p);
    total = add(total, p);
  }
  return reduce_add(total);
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
