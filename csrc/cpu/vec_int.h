// I: sixteen int32, beside V.
#pragma once

#include "vec.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

#ifdef __AVX512F__

struct I {
  __m512i x;
};

PAGEBUS_INLINE I load_int32(const void* p) { return {_mm512_loadu_si512(p)}; }
PAGEBUS_INLINE I load_int8(const void* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
PAGEBUS_INLINE I bit_and(I a, int mask) { return {_mm512_and_si512(a.x, _mm512_set1_epi32(mask))}; }
PAGEBUS_INLINE V to_float(I a) { return {_mm512_cvtepi32_ps(a.x)}; }
template <int N>
PAGEBUS_INLINE I shift_right(I a) {
  return {_mm512_srli_epi32(a.x, N)};
}
PAGEBUS_INLINE V to_float(__m256i lo, __m256i hi) {
  return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1))};
}

#else

struct I {
  __m256i lo, hi;
};

PAGEBUS_INLINE I load_int32(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
PAGEBUS_INLINE I load_int8(const void* p) {
  const auto* q = static_cast<const char*>(p);
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + 8)))};
}
PAGEBUS_INLINE I bit_and(I a, int mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
PAGEBUS_INLINE V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
template <int N>
PAGEBUS_INLINE I shift_right(I a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
PAGEBUS_INLINE V to_float(__m256i lo, __m256i hi) { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }

#endif

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
