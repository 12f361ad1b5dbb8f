// Products of int8 activations with int8 weights: exact integer sums inside a group of 64 k, and one chain of float32
// multiply-adds over the groups, ascending. Compiled a second time for AVX-512 VNNI; the bits are the same.
#include <cstring>

#include "epilogue.h"
#include "isa.h"
#include "quantized.h"
#include "vec_int.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr int kGroup = 64;
constexpr int kGroupBytes = group_bytes(Format::w8);

// Eight codes a step; in the form the product reads: int16, or with VNNI int8.
#ifdef __AVX512VNNI__
constexpr int kCodeBytes = 1;
PAGEBUS_INLINE void store_codes(__m256i codes, char* to) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm256_cvtsepi32_epi8(codes));
}
#else
constexpr int kCodeBytes = 2;
PAGEBUS_INLINE void store_codes(__m256i codes, char* to) {
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
#endif

PAGEBUS_INLINE int32_t reduce_add(__m256i a) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a);
  int32_t sum = 0;
  for (int32_t lane : lanes) sum += lane;
  return sum;
}

// The largest magnitude's bits, which as integers are ordered like the numbers, with NaN above all.
PAGEBUS_INLINE uint32_t top_bits(const float* x) {
  __m256i top = _mm256_setzero_si256();
  for (int k = 0; k < kGroup; k += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    top = _mm256_max_epu32(top, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), top);
  uint32_t most = 0;
  for (uint32_t lane : lanes) most = most < lane ? lane : most;
  return most;
}

// Symmetric: scale = max |x| / 127. What is not finite makes the scale NaN, and so all it meets.
PAGEBUS_INLINE void encode_group(const float* x, char* codes, float& scale, int32_t& sum) {
  const uint32_t bits = top_bits(x);
  const float top = from_bits(bits);
  const bool some = top >= 1e-30f && bits < 0x7f800000u;
  const __m256 inverse = _mm256_set1_ps(some ? 127.0f / top : 0.0f);
  __m256i total = _mm256_setzero_si256();
  for (int k = 0; k < kGroup; k += 8) {
    const __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), inverse));
    total = _mm256_add_epi32(total, code);
    store_codes(code, codes + k * kCodeBytes);
  }
  scale = some ? top / 127.0f : bits < 0x7f800000u ? 0.0f : from_bits(0x7fc00000u);
  sum = 128 * reduce_add(total);
}

template <int R, int NV>
struct Places {
  const char* codes[R];
  const float* scales[R];
  const int32_t* sums[R];
  const char* panels[NV];
};

template <int R, int NV>
PAGEBUS_INLINE Places<R, NV> places(const GemmArgs& g, int64_t row, int64_t panel) {
  Places<R, NV> at;
  const RowCodes& x = *g.codes;
  for (int r = 0; r < R; ++r) {
    at.codes[r] = x.codes + (row + r) * x.ld;
    at.scales[r] = x.scales + (row + r) * x.groups;
    at.sums[r] = x.sums + (row + r) * x.groups;
  }
  for (int v = 0; v < NV; ++v) at.panels[v] = panel_group(*g.w, panel + v, 0);
  return at;
}

// acc += dot * (the row's scale * the output's).
PAGEBUS_INLINE void add_scaled(V& acc, V dot, float row_scale, V scales) {
  acc = fma(dot, mul(set1(row_scale), scales), acc);
}

#ifdef __AVX512VNNI__

constexpr int kRows = 12, kWidePanels = 2, kDepthGroups = 8;
template <int R>
constexpr int kThinPanels = 2;

// acc[r][v] += the groups [from, to) of row r and panel v. vpdpbusd multiplies unsigned by signed: the weights get 128
// added, and the sums start from what that will add.
template <int R, int NV>
PAGEBUS_INLINE void multiply_groups(const Places<R, NV>& at, int64_t from, int64_t to, const char*, Prefetch ahead,
                                    V (&acc)[R][NV]) {
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  for (int64_t g = from; g < to; ++g) {
    __m512i dot[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) dot[r][v] = _mm512_set1_epi32(-at.sums[r][g]);
    for (int q = 0; q < kGroup / 4; ++q) {
      ahead();
      __m512i w[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
        w[v] = _mm512_xor_si512(flip, _mm512_loadu_si512(at.panels[v] + g * kGroupBytes + kScaleBytes + q * 64));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, at.codes[r] + g * kGroup + q * 4, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) dot[r][v] = _mm512_dpbusd_epi32(dot[r][v], w[v], x);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const V scales = load_scales(at.panels[v] + g * kGroupBytes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) add_scaled(acc[r][v], {_mm512_cvtepi32_ps(dot[r][v])}, at.scales[r][g], scales);
    }
  }
}

template <int R, int NV>
PAGEBUS_INLINE void multiply_thin(const Places<R, NV>& at, int64_t groups, V (&acc)[R][NV]) {
  multiply_groups<R, NV>(at, 0, groups, nullptr, {at.panels[0], 0}, acc);
}

PAGEBUS_INLINE void expand_groups(const GemmArgs&, int64_t, int64_t, int64_t, char*) {}

#else

constexpr int kRows = 6, kWidePanels = 1, kDepthGroups = 8;
template <int R>
constexpr int kThinPanels = R == 1 ? 2 : 1;

PAGEBUS_INLINE __m256i load_quads(const char* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// A group of a panel as int16 pairs [32][16][2], from quads [16][16][4] of int8.
PAGEBUS_INLINE void expand_group(const char* group, char* to) {
  for (int q = 0; q < kGroup / 4; ++q) {
    for (int half = 0; half < 2; ++half) {
      const char* from = group + kScaleBytes + q * 64 + half * 32;
      const __m256 a = _mm256_castsi256_ps(load_quads(from)), b = _mm256_castsi256_ps(load_quads(from + 16));
      const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
      const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
      char* pair = to + q * 128 + half * 32;
      _mm256_store_pd(reinterpret_cast<double*>(pair), _mm256_permute4x64_pd(even, 0xd8));
      _mm256_store_pd(reinterpret_cast<double*>(pair + 64), _mm256_permute4x64_pd(odd, 0xd8));
    }
  }
}

PAGEBUS_INLINE void expand_groups(const GemmArgs& g, int64_t panel, int64_t from, int64_t to, char* expanded) {
  for (int64_t i = from; i < to; ++i) expand_group(panel_group(*g.w, panel, i), expanded + (i - from) * 32 * 64);
}

PAGEBUS_INLINE __m256i load256(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// lo and hi += the pair of a row's codes at `x` times those of two times eight outputs. As assembly: six rows need all
// sixteen registers, and GCC would spill the sums.
PAGEBUS_INLINE void add_pairs(__m256i& lo, __m256i& hi, const char* x, __m256i w0, __m256i w1) {
  __m256i a, b;
  asm("vpbroadcastd %6, %2\n\t"
      "vpmaddwd %4, %2, %3\n\t"
      "vpmaddwd %5, %2, %2\n\t"
      "vpaddd %3, %0, %0\n\t"
      "vpaddd %2, %1, %1"
      : "+x"(lo), "+x"(hi), "=&x"(a), "=&x"(b)
      : "x"(w0), "x"(w1), "m"(*reinterpret_cast<const int32_t*>(x)));
}

// acc[r][0] += the groups [from, to) of row r and the panel, whose weights are expanded.
template <int R, int NV>
PAGEBUS_INLINE void multiply_groups(const Places<R, NV>& at, int64_t from, int64_t to, const char* expanded,
                                    Prefetch ahead, V (&acc)[R][NV]) {
  static_assert(NV == 1);
  for (int64_t g = from; g < to; ++g) {
    __m256i lo[R], hi[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
    const char* codes[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) codes[r] = at.codes[r] + g * 2 * kGroup;
    for (int pair = 0; pair < kGroup / 2; ++pair, expanded += 64) {
      ahead();
      const __m256i w0 = load256(expanded), w1 = load256(expanded + 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        add_pairs(lo[r], hi[r], codes[r] + pair * 4, w0, w1);
      }
    }
    const V scales = load_scales(at.panels[0] + g * kGroupBytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) add_scaled(acc[r][0], to_float(lo[r], hi[r]), at.scales[r][g], scales);
  }
}

// [l0 a, l0 b, l1 a, l1 b, ...] of eight lanes in two registers, to the lanes' sums.
PAGEBUS_INLINE __m256i fold(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8); }

template <int R, int NV>
PAGEBUS_INLINE void multiply_thin(const Places<R, NV>& at, int64_t groups, V (&acc)[R][NV]) {
  for (int64_t g = 0; g < groups; ++g) {
    __m256i dot[R][NV][4];
#pragma GCC unroll 8
    for (int i = 0; i < R * NV * 4; ++i) dot[i / (NV * 4)][i / 4 % NV][i % 4] = _mm256_setzero_si256();
    for (int q = 0; q < kGroup / 4; ++q) {
      __m256i x[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int64_t four;
        std::memcpy(&four, at.codes[r] + g * 2 * kGroup + q * 8, 8);
        x[r] = _mm256_set1_epi64x(four);
      }
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
#pragma GCC unroll 8
        for (int i = 0; i < 4; ++i) {
          const __m256i w = load_quads(at.panels[v] + g * kGroupBytes + kScaleBytes + q * 64 + i * 16);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) dot[r][v][i] = _mm256_add_epi32(dot[r][v][i], _mm256_madd_epi16(x[r], w));
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const V scales = load_scales(at.panels[v] + g * kGroupBytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i(&d)[4] = dot[r][v];
        add_scaled(acc[r][v], to_float(fold(d[0], d[1]), fold(d[2], d[3])), at.scales[r][g], scales);
      }
    }
  }
}

#endif

// Sums of two panels, or of one where no second is, `NV` at a time.
template <int R, int NV>
void thin_unit(const GemmArgs& g, int64_t row, int64_t panel, int64_t panels) {
  float sums[R][kUnitPanels * kPanel];
  for (int64_t p = 0; p < panels; p += NV) {
    V acc[R][NV];
    for (auto& line : acc)
      for (V& x : line) x = zero();
    multiply_thin<R, NV>(places<R, NV>(g, row, panel + p), g.codes->groups, acc);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) store(sums[r] + (p + v) * kPanel, acc[r][v]);
  }
  for (int r = 0; r < R; ++r) finish_row(g, row + r, panel, panels, sums[r]);
}

void gemm_thin(const GemmArgs& g, int64_t row, int rows, int64_t panel, int64_t end) {
  with_rows<2>(rows, [&]<int R>() {
    for (; panel < end; panel += kUnitPanels) {
      const int64_t panels = end - panel < kUnitPanels ? end - panel : kUnitPanels;
      if (panels % kThinPanels<R> == 0)
        thin_unit<R, kThinPanels<R>>(g, row, panel, panels);
      else
        thin_unit<R, 1>(g, row, panel, panels);
    }
  });
}

template <int NV>
void wide_panels(const GemmArgs& g, int64_t row, int64_t rows, int64_t panel, int64_t from, int64_t to,
                 const char* expanded, float* sums, int64_t ld) {
  const int64_t blocks = (rows + kRows - 1) / kRows, groups = g.codes->groups;
  const bool more = to < groups || panel + NV < g.w->panels;
  const char* next = to < groups ? panel_group(*g.w, panel, to) : panel_group(*g.w, panel + NV, 0);
  const int64_t share = more ? kDepthGroups * kGroupBytes / blocks : 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = rows * i / blocks, last = rows * (i + 1) / blocks;
    const Prefetch ahead{next + i * share, share / ((to - from) * 32)};
    with_rows<kRows>(int(last - first), [&]<int R>() __attribute__((noinline)) {
      V acc[R][NV];
      float* c = sums + first * ld;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = from ? load(c + r * ld + v * kPanel) : zero();
      multiply_groups<R, NV>(places<R, NV>(g, row + first, panel), from, to, expanded, ahead, acc);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) store(c + r * ld + v * kPanel, acc[r][v]);
    });
  }
}

void gemm_wide(const GemmArgs& g, int64_t row, int64_t rows, int64_t panel, int64_t end, float* scratch) {
  constexpr int64_t ld = kUnitPanels * kPanel;
  float* sums = scratch;
  char* expanded = reinterpret_cast<char*>(scratch + kGemmRows * ld);
  for (; panel < end; panel += kUnitPanels) {
    const int64_t panels = end - panel < kUnitPanels ? end - panel : kUnitPanels;
    for (int64_t from = 0; from < g.codes->groups; from += kDepthGroups) {
      const int64_t to = from + kDepthGroups < g.codes->groups ? from + kDepthGroups : g.codes->groups;
      int64_t p = 0;
      for (; p + kWidePanels <= panels; p += kWidePanels) {
        expand_groups(g, panel + p, from, to, expanded);
        wide_panels<kWidePanels>(g, row, rows, panel + p, from, to, expanded, sums + p * kPanel, ld);
      }
      for (; p < panels; ++p) wide_panels<1>(g, row, rows, panel + p, from, to, expanded, sums + p * kPanel, ld);
    }
    for (int64_t r = 0; r < rows; ++r) finish_row(g, row + r, panel, panels, sums + r * ld);
  }
}

}  // namespace

void encode_row(const float* x, int64_t k, int64_t row, const RowCodes& to) {
  for (int64_t g = 0; g < to.groups; ++g) {
    const int64_t count = k - g * kGroup < kGroup ? k - g * kGroup : kGroup;
    const float* from = x + g * kGroup;
    float padded[kGroup] = {};
    if (count < kGroup) from = static_cast<const float*>(std::memcpy(padded, from, size_t(count) * sizeof(float)));
    const int64_t at = row * to.groups + g;
    encode_group(from, to.codes + row * to.ld + g * kGroup * kCodeBytes, to.scales[at], to.sums[at]);
  }
}

void gemm_w8a8(const GemmArgs& g, int64_t row, int64_t row_end, int64_t unit_begin, int64_t unit_end, float* scratch) {
  const int64_t panel = unit_begin * kUnitPanels;
  const int64_t end = unit_end * kUnitPanels < g.w->panels ? unit_end * kUnitPanels : g.w->panels;
  if (row_end - row <= 2) return gemm_thin(g, row, int(row_end - row), panel, end);
  for (; row < row_end; row += kGemmRows)
    gemm_wide(g, row, row_end - row < kGemmRows ? row_end - row : kGemmRows, panel, end, scratch);
}

}  // namespace pagebus::PAGEBUS_ISA
