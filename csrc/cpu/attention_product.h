// The products of attention: R rows against NV streams of sixteen floats, while the memory brings what comes next.
#pragma once

#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

// A list of spans of memory to ask for, a line at a time. At its end stands the line asked for last, again and again.
class Ahead {
 public:
  void add(const void* begin, int64_t bytes) {
    const char* p = static_cast<const char*>(begin);
    if (count_ && ends_[count_ - 1] == p)
      ends_[count_ - 1] += bytes;
    else
      begins_[count_] = p, ends_[count_++] = p + bytes;
  }
  __attribute__((noinline, cold)) void advance() {
    if (next_ < count_) {
      at = begins_[next_], end = ends_[next_++], step = 64;
    } else {
      at -= step, step = 0, end = reinterpret_cast<const char*>(INTPTR_MAX);
    }
  }

  const char* at = reinterpret_cast<const char*>(this);  // asked for where there is nothing else: some mapped memory
  const char* end = at;
  int64_t step = 0;

 private:
  int next_ = 0, count_ = 0;
  const char *begins_[2 * kPartition / kLanes], *ends_[2 * kPartition / kLanes];
};

// Streams beside each other, by rows: as many as the registers hold.
#ifdef __AVX512F__
template <int R>
constexpr int streams = R <= 3 ? 4 : 2;
#else
template <int R>
constexpr int streams = R == 1   ? 4
                        : R <= 3 ? 2
                                 : 1;
#endif

template <int I>
struct Constant {
  static constexpr int value = I;
};

// f(Constant<0>), f(Constant<1>) ... f(Constant<N - 1>). Unlike a loop, which the compiler unrolls too late for that,
// it lets an array of accumulators live in registers: every access to one must be through this.
template <int N, int I = 0, class F>
PAGEBUS_INLINE void unrolled(const F& f) {
  if constexpr (I < N) {
    f(Constant<I>{});
    unrolled<N, I + 1>(f);
  }
}
#define PAGEBUS_EACH(i) [&](auto i) __attribute__((always_inline))

// A load that the compiler repeats instead of keeping its result, where accumulators need the registers.
PAGEBUS_INLINE V set1_again(const float& a) {
#ifdef __AVX512F__
  return set1(a);
#else
  __m256 x;
  asm volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(a));
  return {x, x};
#endif
}

// acc[r][v] += sum over k, ascending, of a[r][k] * stream v's k-th sixteen: one chain of fused multiply-adds per
// output, the same bits whatever R and NV.
template <class B, int R, int NV>
PAGEBUS_INLINE void accumulate_streams(int64_t k, const float* a, int64_t lda, const typename B::T* const* b,
                                       int64_t ldb, V (&acc)[R][NV], Ahead& ahead) {
  constexpr int lines = (NV * kLanes * int(sizeof(typename B::T)) + 63) / 64;
  const typename B::T* p[NV];
  unrolled<NV>(PAGEBUS_EACH(v) { p[v.value] = b[v.value]; });
  const char *at = ahead.at, *end = ahead.end;
  int64_t step = ahead.step;
  for (int64_t s = 0; s < k; ++s) {
    unrolled<NV>(PAGEBUS_EACH(v) {
      const V column = B::first(p[v.value]);
      unrolled<R>(PAGEBUS_EACH(r) {
        const V x = R > 2 && NV > 1 ? set1_again(a[r.value * lda]) : set1(a[r.value * lda]);
        acc[r.value][v.value] = fma(x, column, acc[r.value][v.value]);
      });
      p[v.value] += ldb;
    });
    ++a;
    unrolled<lines>(PAGEBUS_EACH(i) {
      (void)i;
      if (at >= end) [[unlikely]] {
        ahead.at = at;
        ahead.advance();
        at = ahead.at, end = ahead.end, step = ahead.step;
      }
      __builtin_prefetch(at, 0, 2);
      at += step;
    });
  }
  ahead.at = at;
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
