// V: sixteen floats, whatever the instruction set; two AVX2 registers or one of AVX-512. Every kernel is written over
// V, and every reduction has the same order on both, so that all builds of a kernel give the same bits; only the bf16
// product of AVX-512 BF16 has its own.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pagebus::PAGEBUS_ISA {
namespace {

#define PAGEBUS_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

#ifdef __AVX512F__

struct V {
  __m512 x;
};

PAGEBUS_INLINE V zero() { return {_mm512_setzero_ps()}; }
PAGEBUS_INLINE V set1(float a) { return {_mm512_set1_ps(a)}; }
PAGEBUS_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
PAGEBUS_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.x); }
PAGEBUS_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
PAGEBUS_INLINE V add(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
PAGEBUS_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
PAGEBUS_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
PAGEBUS_INLINE V div(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
// Of two operands the second is returned when either is NaN.
PAGEBUS_INLINE V min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
PAGEBUS_INLINE V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
PAGEBUS_INLINE V round(V a) { return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// acc += a * b.
PAGEBUS_INLINE void accumulate(V& acc, V a, V b) { acc = fma(a, b, acc); }

// 2^n for integral n in [-126, 127].
PAGEBUS_INLINE V exp2_int(V n) {
  const __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.x), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}

// a where x < y, else b.
PAGEBUS_INLINE V where_less(V x, V y, V a, V b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.x, y.x, _CMP_LT_OQ), b.x, a.x)};
}

// Bit i: lane i of x is above bound, or one of them is NaN.
PAGEBUS_INLINE uint32_t lanes_above_or_nan(V x, V bound) { return _mm512_cmp_ps_mask(x.x, bound.x, _CMP_NLE_UQ); }
// Bit i: lane i of x is bound or more.
PAGEBUS_INLINE uint32_t lanes_at_least(V x, V bound) { return _mm512_cmp_ps_mask(x.x, bound.x, _CMP_GE_OQ); }

// a in lanes [from, to), b elsewhere.
PAGEBUS_INLINE V where_lanes(int from, int to, V a, V b) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 m =
      _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(from)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(to));
  return {_mm512_mask_blend_ps(m, b.x, a.x)};
}

PAGEBUS_INLINE V load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}

PAGEBUS_INLINE V load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// To nearest even; a NaN stays one.
PAGEBUS_INLINE void store_bf16(uint16_t* p, V a) {
  const __m512i bits = _mm512_castps_si512(a.x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i value = _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q),
                                             high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(value));
}
PAGEBUS_INLINE void store_f16(uint16_t* p, V a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT));
}

// Sixteen pairs of bf16: the first (`even`) or second (`odd`) of each pair.
PAGEBUS_INLINE V load_bf16_even(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
PAGEBUS_INLINE V load_bf16_odd(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}

PAGEBUS_INLINE __m256 fold_add(V a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a.x), _mm512_extractf32x8_ps(a.x, 1));
}
PAGEBUS_INLINE __m256 fold_max(V a) {
  return _mm256_max_ps(_mm512_castps512_ps256(a.x), _mm512_extractf32x8_ps(a.x, 1));
}

#else

struct V {
  __m256 lo, hi;
};

PAGEBUS_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PAGEBUS_INLINE V set1(float a) {
  const __m256 x = _mm256_set1_ps(a);
  return {x, x};
}
PAGEBUS_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PAGEBUS_INLINE void store(float* p, V a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
PAGEBUS_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
PAGEBUS_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PAGEBUS_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PAGEBUS_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PAGEBUS_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// Of two operands the second is returned when either is NaN.
PAGEBUS_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PAGEBUS_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PAGEBUS_INLINE V round(V a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// acc += a * b. As assembly: GCC would keep moving accumulators between registers, and spill one in the loops that need
// all.
PAGEBUS_INLINE void accumulate(V& acc, V a, V b) {
  __m256 lo = acc.lo, hi = acc.hi;
  asm("vfmadd231ps %2, %1, %0" : "+x"(lo) : "x"(a.lo), "x"(b.lo));
  asm("vfmadd231ps %2, %1, %0" : "+x"(hi) : "x"(a.hi), "x"(b.hi));
  acc = {lo, hi};
}

PAGEBUS_INLINE __m256 exp2_int8(__m256 n) {
  const __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
// 2^n for integral n in [-126, 127].
PAGEBUS_INLINE V exp2_int(V n) { return {exp2_int8(n.lo), exp2_int8(n.hi)}; }

// a where x < y, else b.
PAGEBUS_INLINE V where_less(V x, V y, V a, V b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}

PAGEBUS_INLINE uint32_t lane_mask(__m256 lo, __m256 hi) {
  return uint32_t(_mm256_movemask_ps(lo)) | uint32_t(_mm256_movemask_ps(hi)) << 8;
}
// Bit i: lane i of x is above bound, or one of them is NaN.
PAGEBUS_INLINE uint32_t lanes_above_or_nan(V x, V bound) {
  return lane_mask(_mm256_cmp_ps(x.lo, bound.lo, _CMP_NLE_UQ), _mm256_cmp_ps(x.hi, bound.hi, _CMP_NLE_UQ));
}
// Bit i: lane i of x is bound or more.
PAGEBUS_INLINE uint32_t lanes_at_least(V x, V bound) {
  return lane_mask(_mm256_cmp_ps(x.lo, bound.lo, _CMP_GE_OQ), _mm256_cmp_ps(x.hi, bound.hi, _CMP_GE_OQ));
}

// a in lanes [from, to), b elsewhere.
PAGEBUS_INLINE V where_lanes(int from, int to, V a, V b) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lane8 = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  const __m256i below = _mm256_set1_epi32(from), end = _mm256_set1_epi32(to);
  const __m256i lo = _mm256_andnot_si256(_mm256_cmpgt_epi32(below, lane), _mm256_cmpgt_epi32(end, lane));
  const __m256i hi = _mm256_andnot_si256(_mm256_cmpgt_epi32(below, lane8), _mm256_cmpgt_epi32(end, lane8));
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lo)), _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(hi))};
}

PAGEBUS_INLINE __m256 widen_bf16(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
PAGEBUS_INLINE V load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }

PAGEBUS_INLINE V load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

// Eight bf16 as words.
PAGEBUS_INLINE __m256i narrow_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_or_si256(high, _mm256_set1_epi32(0x40)),
                            _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
// To nearest even; a NaN stays one.
PAGEBUS_INLINE void store_bf16(uint16_t* p, V a) {
  const __m256i both = _mm256_packus_epi32(narrow_bf16(a.lo), narrow_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
PAGEBUS_INLINE void store_f16(uint16_t* p, V a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

PAGEBUS_INLINE __m256i load_int(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
// Sixteen pairs of bf16: the first (`even`) or second (`odd`) of each pair.
PAGEBUS_INLINE V load_bf16_even(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_int(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(load_int(p + 16), 16))};
}
PAGEBUS_INLINE V load_bf16_odd(const uint16_t* p) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_int(p), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(load_int(p + 16), mask))};
}

PAGEBUS_INLINE __m256 fold_add(V a) { return _mm256_add_ps(a.lo, a.hi); }
PAGEBUS_INLINE __m256 fold_max(V a) { return _mm256_max_ps(a.lo, a.hi); }

#endif

PAGEBUS_INLINE float reduce_add(V a) {
  const __m256 x8 = fold_add(a);
  const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_add_ss(x2, _mm_shuffle_ps(x2, x2, 1)));
}

PAGEBUS_INLINE float reduce_max(V a) {
  const __m256 x8 = fold_max(a);
  const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
  const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
  return _mm_cvtss_f32(_mm_max_ss(x2, _mm_shuffle_ps(x2, x2, 1)));
}

// e^x to about 1e-7 relative (Cephes' expf polynomial); 0 below -87.3, finite above 88.3, NaN for NaN.
PAGEBUS_INLINE V exp(V x) {
  const V clamped = min(set1(88.3f), max(set1(-87.3f), x));
  const V n = round(mul(clamped, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return where_less(x, set1(-87.3f), zero(), mul(p, exp2_int(n)));
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
