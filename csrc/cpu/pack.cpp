// Weights into panels, and rows of a packed matrix back.
#include "convert.h"
#include "epilogue.h"
#include "isa.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

// Element index of (output lane, k) in a panel.
PAGEBUS_INLINE int64_t panel_index(DType dtype, int64_t lane, int64_t k) {
  return dtype == DType::bf16 ? k / 2 * (2 * kPanel) + lane * 2 + k % 2 : k * kPanel + lane;
}

// k in [from, to) of one output, from a row of the panel's dtype.
PAGEBUS_INLINE void pack_lane(DType dtype, const char* row, char* panel, int64_t lane, int64_t from, int64_t to) {
  for (int64_t k = from; k < to; ++k) {
    const int64_t at = panel_index(dtype, lane, k);
    if (dtype == DType::f32)
      reinterpret_cast<float*>(panel)[at] = reinterpret_cast<const float*>(row)[k];
    else
      reinterpret_cast<uint16_t*>(panel)[at] = reinterpret_cast<const uint16_t*>(row)[k];
  }
}

// Eight rows of eight words to eight columns.
PAGEBUS_INLINE void transpose8(__m256 (&x)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// Sixteen words, of two 16-bit values each, to the first and then the second of each.
PAGEBUS_INLINE void store_split(char* to, __m256 lo, __m256 hi) {
  const __m256i a = _mm256_castps_si256(lo), b = _mm256_castps_si256(hi), mask = _mm256_set1_epi32(0xffff);
  const __m256i first = _mm256_packus_epi32(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
  const __m256i second = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(first, 0xd8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_permute4x64_epi64(second, 0xd8));
}

// All lanes of a panel, `words` words of each: rows of the panel's dtype, `stride` bytes apart.
template <bool split>
void pack_words(const char* rows, int64_t stride, char* panel, int64_t words) {
  for (int64_t i = 0; i + 8 <= words; i += 8) {
    __m256 lo[8], hi[8];
    for (int r = 0; r < 8; ++r) {
      lo[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + r * stride + i * 4));
      hi[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + (r + 8) * stride + i * 4));
    }
    transpose8(lo);
    transpose8(hi);
    for (int j = 0; j < 8; ++j) {
      char* to = panel + (i + j) * (kPanel * 4);
      if constexpr (split) {
        store_split(to, lo[j], hi[j]);
      } else {
        _mm256_storeu_ps(reinterpret_cast<float*>(to), lo[j]);
        _mm256_storeu_ps(reinterpret_cast<float*>(to) + 8, hi[j]);
      }
    }
  }
}

PAGEBUS_INLINE void pack_panel(DType dtype, const char* rows, int64_t stride, char* panel, int64_t k) {
  const int64_t per_word = 4 / dtype_bytes(dtype), words = k / per_word;
  if (dtype == DType::f16)
    pack_words<true>(rows, stride, panel, words);
  else
    pack_words<false>(rows, stride, panel, words);
  for (int64_t lane = 0; lane < kPanel; ++lane)
    pack_lane(dtype, rows + lane * stride, panel, lane, words / 8 * 8 * per_word, k);
}

constexpr int64_t kPackDepth = 128;  // k that are converted at once

// `count` outputs of one panel, from output `lane` on: rows `stride` bytes apart, of the source's dtype.
PAGEBUS_INLINE void pack_lanes(const Packed& w, DType source, const char* rows, int64_t stride, char* panel,
                               int64_t lane, int64_t count) {
  const int64_t width = dtype_bytes(w.dtype);
  float values[kPackDepth];
  alignas(64) char block[kPanel * kPackDepth * 4];
  for (int64_t from = 0; from < w.k; from += kPackDepth) {
    const int64_t depth = w.k - from < kPackDepth ? w.k - from : kPackDepth;
    const char* in = rows + from * dtype_bytes(source);
    int64_t apart = stride;
    if (source != w.dtype) {
      for (int64_t r = 0; r < count; ++r) {
        widen(source, in + r * stride, values, depth);
        narrow(w.dtype, values, block + r * kPackDepth * width, depth);
      }
      in = block;
      apart = kPackDepth * width;
    }
    char* to = panel + from * kPanel * width;
    if (count == kPanel)
      pack_panel(w.dtype, in, apart, to, depth);
    else
      for (int64_t r = 0; r < count; ++r) pack_lane(w.dtype, in + r * apart, to, lane + r, 0, depth);
  }
}

}  // namespace

void pack(const PackArgs& a, int64_t begin, int64_t end) {
  const Packed& w = *a.w;
  const int64_t stride = w.k * dtype_bytes(a.source_dtype);
  for (int64_t n = begin; n < end;) {
    const int64_t output = a.first + n, lane = output % kPanel;
    const int64_t count = kPanel - lane < end - n ? kPanel - lane : end - n;
    pack_lanes(w, a.source_dtype, static_cast<const char*>(a.source) + n * stride, stride,
               w.data + panel_of(w, output, a.half) * w.panel_bytes, lane, count);
    n += count;
  }
}

void unpack_row(const Packed& w, int64_t output, float* y) {
  const char* panel = w.data + panel_of(w, output, 0) * w.panel_bytes;
  for (int64_t k = 0; k < w.k; ++k) y[k] = widen_one(w.dtype, panel, panel_index(w.dtype, output % kPanel, k));
}

}  // namespace pagebus::PAGEBUS_ISA
