// Products with weight-only quantised matrices: float32 activations, weights widened in registers for one or two rows
// and into the first-level cache for more. The sums have the order of the float32 product, hence its bits.
#include "quantized.h"

#include "epilogue.h"
#include "isa.h"
#include "vec_int.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

// Readers of a group of 32: f(x offset, weights of panel v at that k), k ascending.
struct ReadQ8 {
  template <int NV, class F>
  static PAGEBUS_INLINE void each(const char* const (&p)[NV], F&& f) {
    V d[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) d[v] = load_scales(p[v]);
    for (int k = 0; k < 32; ++k)
      f(k, [&](int v) __attribute__((always_inline)) {
        return mul(d[v], to_float(load_int8(p[v] + kScaleBytes + k * kPanel)));
      });
  }
};

// The code of an odd k stays where it is, four bits up, and meets a sixteenth of the scale: the same value exactly.
struct ReadQ4 {
  template <int NV, class F>
  static PAGEBUS_INLINE void each(const char* const (&p)[NV], F&& f) {
    V d[NV], d16[NV], m[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      d[v] = load_scales(p[v]);
      d16[v] = mul(d[v], set1(0.0625f));
      m[v] = load_scales(p[v] + kScaleBytes);
    }
    for (int j = 0; j < 4; ++j) {
      I words[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) words[v] = load_int32(p[v] + 2 * kScaleBytes + j * 4 * kPanel);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        f(8 * j + 2 * i,
          [&](int v) __attribute__((always_inline)) { return fma(d[v], to_float(bit_and(words[v], 15)), m[v]); });
        f(8 * j + 2 * i + 1,
          [&](int v) __attribute__((always_inline)) { return fma(d16[v], to_float(bit_and(words[v], 240)), m[v]); });
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) words[v] = shift_right<8>(words[v]);
      }
    }
  }
};

template <class B>
PAGEBUS_INLINE void widen_group(const char* group, float* to) {
  const char* const p[1] = {group};
  B::template each<1>(p, [&](int k, auto&& w) __attribute__((always_inline)) { store(to + k * kPanel, w(0)); });
}

// Panels beside each other at R rows: enough chains to hide the latency of a multiply-add, and no more than have room.
#ifdef __AVX512F__
template <int R>
constexpr int kThinPanels = 4;
#else
template <int R>
constexpr int kThinPanels = R == 1 ? 2 : 1;
#endif

constexpr int kDepth = kWidened / kWide;

template <class B, int R, int NV>
void thin_panels(const GemmArgs& g, int64_t row, int64_t& panel, int64_t end) {
  const Packed& w = *g.w;
  const int64_t whole = w.k / 32, rest = w.k % 32;
  float sums[R][(NV > kUnitPanels ? NV : kUnitPanels) * kPanel];
  for (; panel + NV <= end; panel += NV) {
    V acc[R][NV];
    for (auto& line : acc)
      for (V& x : line) x = zero();
    const char* p[NV];
    for (int v = 0; v < NV; ++v) p[v] = panel_group(w, panel + v, 0);
    const float* x = g.x + row * g.ldx;
    for (int64_t i = 0; i < whole; ++i, x += 32) {
      B::template each<NV>(p, [&](int k, auto&& weight)
                                  __attribute__((always_inline)) { multiply_step<R, NV>(x + k, g.ldx, weight, acc); });
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) p[v] += group_bytes(w.format);
    }
    if (rest) {
      float wide[NV][32 * kPanel];
      const float* b[NV];
      for (int v = 0; v < NV; ++v) {
        widen_group<B>(p[v], wide[v]);
        b[v] = wide[v];
      }
      multiply<ReadF32, R, NV>(rest, x, g.ldx, b, kPanel, acc);
    }
    const int64_t at = NV < kUnitPanels ? panel % kUnitPanels : 0;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) store(sums[r] + (at + v) * kPanel, acc[r][v]);
    if (at + NV < kUnitPanels && panel + NV < w.panels) continue;  // a gate waits for its up
    for (int r = 0; r < R; ++r) finish_row(g, row + r, panel - at, at + NV, sums[r]);
  }
}

template <class B>
void gemm_thin(const GemmArgs& g, int64_t row, int rows, int64_t panel, int64_t end) {
  with_rows<2>(rows, [&]<int R>() {
    constexpr int most = kThinPanels<R>;
    if constexpr (most > 2) thin_panels<B, R, most>(g, row, panel, end);
    if constexpr (most > 1) thin_panels<B, R, 2>(g, row, panel, end);
    thin_panels<B, R, 1>(g, row, panel, end);
  });
}

// sums[rows][NV panels] of the k in [from, to) of widened weights [NV][kDepth][16]. Meanwhile asks the memory
// for the codes that are widened next.
template <int NV>
void widened_panels(const GemmArgs& g, int64_t row, int64_t rows, int64_t from, int64_t to, const float* weights,
                    float* sums, int64_t ld, const char* next, int64_t next_bytes) {
  const float* b[NV];
  for (int v = 0; v < NV; ++v) b[v] = weights + v * kDepth * kPanel;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t share = next_bytes / blocks;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = rows * i / blocks, last = rows * (i + 1) / blocks;
    const float* a = g.x + (row + first) * g.ldx + from;
    const Prefetch ahead{next + i * share, share / (to - from)};
    with_rows<kBlockRows>(int(last - first), [&]<int R>() __attribute__((noinline)) {
      V acc[R][NV];
      float* c = sums + first * ld;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = from ? load(c + r * ld + v * kPanel) : zero();
      multiply<ReadF32, R, NV>(to - from, a, g.ldx, b, kPanel, acc, ahead);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) store(c + r * ld + v * kPanel, acc[r][v]);
    });
  }
}

template <class B>
void gemm_wide(const GemmArgs& g, int64_t row, int64_t rows, int64_t panel, int64_t end, float* scratch) {
  constexpr int64_t ld = kUnitPanels * kPanel;
  float *sums = scratch, *weights = scratch + kGemmRows * ld;
  const Packed& w = *g.w;
  for (; panel < end; panel += kUnitPanels) {
    const int64_t panels = end - panel < kUnitPanels ? end - panel : kUnitPanels;
    for (int64_t from = 0; from < w.k; from += kDepth) {
      const int64_t to = from + kDepth < w.k ? from + kDepth : w.k;
      const auto product = [&]<int NV>(int64_t p) __attribute__((always_inline)) {
        for (int v = 0; v < NV; ++v)
          for (int64_t k = from; k < to; k += 32)
            widen_group<B>(panel_group(w, panel + p + v, k / 32), weights + (v * kDepth + k - from) * kPanel);
        const bool deeper = to < w.k, more = deeper || panel + p + NV < w.panels;
        const char* next = panel_group(w, panel + p + (deeper ? 0 : NV), deeper ? to / 32 : 0);
        const int64_t bytes = more ? kDepth / 32 * group_bytes(w.format) : 0;
        widened_panels<NV>(g, row, rows, from, to, weights, sums + p * kPanel, ld, next, bytes);
      };
      int64_t p = 0;
      for (; p + kWide <= panels; p += kWide) product.template operator()<kWide>(p);
      for (; p < panels; ++p) product.template operator()<1>(p);
    }
    for (int64_t r = 0; r < rows; ++r) finish_row(g, row + r, panel, panels, sums + r * ld);
  }
}

template <class B>
void gemm_run(const GemmArgs& g, int64_t row, int64_t row_end, int64_t panel, int64_t end, float* scratch) {
  if (row_end - row <= 2) return gemm_thin<B>(g, row, int(row_end - row), panel, end);
  for (; row < row_end; row += kGemmRows)
    gemm_wide<B>(g, row, row_end - row < kGemmRows ? row_end - row : kGemmRows, panel, end, scratch);
}

}  // namespace

void gemm_quantized(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
                    float* scratch) {
  const int64_t panel = unit_begin * kUnitPanels;
  const int64_t end = unit_end * kUnitPanels < g.w->panels ? unit_end * kUnitPanels : g.w->panels;
  if (g.w->format == Format::q8)
    gemm_run<ReadQ8>(g, row_begin, row_end, panel, end, scratch);
  else
    gemm_run<ReadQ4>(g, row_begin, row_end, panel, end, scratch);
}

}  // namespace pagebus::PAGEBUS_ISA
