// The register-blocked product over sixteen-wide streams, on which GEMM and attention are built.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "vec.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

// Readers: what the k-th step of a stream holds, how the other factor is broadcast and how both are accumulated. A step
// of a stream is `width` elements, `depth` k of sixteen values each.
struct FloatInput {
  using A = float;
  static PAGEBUS_INLINE V broadcast(const A* a) { return set1(*a); }
  static PAGEBUS_INLINE void add_product(V& acc, V a, V b) { accumulate(acc, a, b); }
};
struct ReadF32 : FloatInput {
  using T = float;
  static constexpr int depth = 1, width = 16;
  static PAGEBUS_INLINE V first(const T* p) { return load(p); }
  static PAGEBUS_INLINE V second(const T* p) { return load(p); }
};
struct ReadBf16 : FloatInput {
  using T = uint16_t;
  static constexpr int depth = 1, width = 16;
  static PAGEBUS_INLINE V first(const T* p) { return load_bf16(p); }
  static PAGEBUS_INLINE V second(const T* p) { return load_bf16(p); }
};
struct ReadBf16Pairs : FloatInput {
  using T = uint16_t;
  static constexpr int depth = 2, width = 32;
  static PAGEBUS_INLINE V first(const T* p) { return load_bf16_even(p); }
  static PAGEBUS_INLINE V second(const T* p) { return load_bf16_odd(p); }
};
struct ReadF16 : FloatInput {
  using T = uint16_t;
  static constexpr int depth = 1, width = 16;
  static PAGEBUS_INLINE V first(const T* p) { return load_f16(p); }
  static PAGEBUS_INLINE V second(const T* p) { return load_f16(p); }
};

// acc[r][v] += a[r] * w(v). What is few stays in registers, the other side passes through.
template <int R, int NV, class B = FloatInput, class W>
PAGEBUS_INLINE void multiply_step(const typename B::A* a, int64_t lda, const W& w, V (&acc)[R][NV]) {
  if constexpr (R <= 2) {
    V x[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) x[r] = B::broadcast(a + r * lda);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const V column = w(v);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) B::add_product(acc[r][v], x[r], column);
    }
  } else {
    V columns[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) columns[v] = w(v);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const V x = B::broadcast(a + r * lda);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) B::add_product(acc[r][v], x, columns[v]);
    }
  }
}

// What a product asks of the memory with each step: nothing, or a line of what comes next.
struct NoPrefetch {
  PAGEBUS_INLINE void operator()() {}
};
struct Prefetch {
  const char* at;
  int64_t step;  // bytes
  PAGEBUS_INLINE void operator()() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

// acc[r][v] += sum over k, ascending, of a[r][k] * stream v's k-th sixteen. One chain of fused multiply-adds per
// output: the same bits whatever R and NV. `ldb`: elements from one step of a stream to the next.
template <class B, int R, int NV, class Ahead = NoPrefetch>
PAGEBUS_INLINE void multiply(int64_t k, const typename B::A* a, int64_t lda, const typename B::T* const* b, int64_t ldb,
                             V (&acc)[R][NV], Ahead ahead = {}) {
  const typename B::T* p[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) p[v] = b[v];
  for (int64_t s = 0; s < k / B::depth; ++s) {
    multiply_step<R, NV, B>(a, lda, [&](int v) __attribute__((always_inline)) { return B::first(p[v]); }, acc);
    if constexpr (B::depth == 2)
      multiply_step<R, NV, B>(a + 1, lda, [&](int v) __attribute__((always_inline)) { return B::second(p[v]); }, acc);
    a += B::depth;
    ahead();
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) p[v] += ldb;
  }
  if (B::depth == 2 && k % 2)
    multiply_step<R, NV, B>(a, lda, [&](int v) __attribute__((always_inline)) { return B::first(p[v]); }, acc);
}

PAGEBUS_INLINE V silu(V x) {
  const V value = div(x, add(set1(1.0f), exp(sub(zero(), x))));
  return where_less(x, set1(-88.3f), set1(-0.0f), value);
}

// Rows of a register block, whose chains hide the latency of the multiply-adds; wide: panels beside each other. With
// few rows, columns<R> sixteens beside each other do.
#ifdef __AVX512F__
constexpr int kBlockRows = 12, kWide = 2;
template <int R>
constexpr int columns = R == 1 ? 4 : 2;
#else
constexpr int kBlockRows = 6, kWide = 1;
template <int R>
constexpr int columns = R == 1   ? 4
                        : R == 2 ? 2
                                 : 1;
#endif

// Calls f with R = rows as a constant, 1 <= rows <= Max.
template <int Max, class F>
PAGEBUS_INLINE void with_rows(int rows, F&& f) {
  if constexpr (Max >= 1) {
    if (rows == Max)
      f.template operator()<Max>();
    else
      with_rows<Max - 1>(rows, f);
  }
}

PAGEBUS_INLINE void store_columns(float* y, V value, int64_t columns) {
  if (columns >= kLanes) return store(y, value);
  float tmp[kLanes];
  store(tmp, value);
  for (int64_t i = 0; i < columns; ++i) y[i] = tmp[i];
}

PAGEBUS_INLINE V load_columns(const float* y, int64_t columns) {
  if (columns >= kLanes) return load(y);
  float tmp[kLanes] = {};
  for (int64_t i = 0; i < columns; ++i) tmp[i] = y[i];
  return load(tmp);
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
