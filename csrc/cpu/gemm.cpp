// The packed-weight GEMM. Every output is one chain of multiply-adds over k, ascending, whatever the number of rows.
#include "epilogue.h"
#include "isa.h"
#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

#ifdef __AVX512BF16__
// Products of bf16 pairs, activations rounded too: a step adds two k to each float32 sum, the second first, and takes
// denormals for zero (VDPBF16PS, Intel SDM volume 2).
struct DotBf16 {
  using T = uint16_t;
  using A = uint32_t;
  static constexpr int depth = 1, width = 32;
  static PAGEBUS_INLINE V first(const T* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
  static PAGEBUS_INLINE V second(const T* p) { return first(p); }
  static PAGEBUS_INLINE V broadcast(const A* a) { return {_mm512_castsi512_ps(_mm512_set1_epi32(int(*a)))}; }
  static PAGEBUS_INLINE void add_product(V& acc, V a, V b) {
    acc.x = _mm512_dpbf16_ps(acc.x, (__m512bh)b.x, (__m512bh)a.x);
  }
};
using Bf16 = DotBf16;
#else
using Bf16 = ReadBf16Pairs;
#endif

// Activations as a product takes them: `steps` of them a row, rows `ld` apart.
template <class A>
struct Input {
  const A* data;
  int64_t ld, steps;
};

template <class B>
PAGEBUS_INLINE Input<typename B::A> input(const GemmArgs& g) {
  if constexpr (__is_same(typename B::A, uint32_t))
    return {g.pairs, g.ld_pairs, (g.w->k + 1) / 2};
  else
    return {g.x, g.ldx, g.w->k};
}

template <class B>
PAGEBUS_INLINE const typename B::T* panel_data(const Packed& w, int64_t panel, int64_t from = 0) {
  return reinterpret_cast<const typename B::T*>(w.data + panel * w.panel_bytes) + from / B::depth * B::width;
}

// Few rows: whole panels, several at once, whose streams the hardware fetches ahead once it has seen their first lines.
constexpr int kFirstLines = 8;
#ifdef __AVX512F__
constexpr int kThinPanels = 8;
#else
constexpr int kThinPanels = 4;
#endif

template <class B, int R, int NV>
void thin_panels(const GemmArgs& g, int64_t row, int64_t& panel, int64_t end) {
  const Input<typename B::A> x = input<B>(g);
  for (; panel + NV <= end; panel += NV) {
    const typename B::T* b[NV];
    for (int v = 0; v < NV; ++v) b[v] = panel_data<B>(*g.w, panel + v);
    if (panel + 2 * NV <= g.w->panels)
      for (int v = 0; v < NV; ++v)
        for (int line = 0; line < kFirstLines; ++line)
          __builtin_prefetch(g.w->data + (panel + NV + v) * g.w->panel_bytes + line * 64);
    V acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    multiply<B, R, NV>(x.steps, x.data + row * x.ld, x.ld, b, B::width, acc);
    float sums[(NV > 1 ? NV : 2) * kPanel] = {};  // a gated matrix has no lone panel
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(sums + v * kPanel, acc[r][v]);
      finish_row(g, row + r, panel, NV, sums);
    }
  }
}

template <class B>
void gemm_thin(const GemmArgs& g, int64_t row, int rows, int64_t panel, int64_t end) {
  with_rows<kThinGemmRows>(rows, [&]<int R>() {
    if constexpr (kThinPanels / R > 4) thin_panels<B, R, kThinPanels / R>(g, row, panel, end);
    if constexpr (kThinPanels / R >= 4) thin_panels<B, R, 4>(g, row, panel, end);
    thin_panels<B, R, 2>(g, row, panel, end);
    if (panel < end) thin_panels<B, R, 1>(g, row, panel, end);
  });
}

// More rows: a pass over the rows reads so much of the panels beside each other, which stays in the first-level cache.
constexpr int64_t kDepthBytes = 49152;
template <class B>
constexpr int64_t kDepthBlock = kDepthBytes / int64_t(sizeof(typename B::T) * B::width * kWide) * B::depth;

struct Span {
  int64_t row, rows, panel, end;
  float* sums;  // [rows][end - panel][kPanel]
};

// Asks the memory with each step for a piece of NV panels, those that come next.
template <int NV>
struct PrefetchPanels {
  const char* at;
  int64_t step, panel_bytes;
  PAGEBUS_INLINE void operator()() {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) __builtin_prefetch(at + v * panel_bytes, 0, 2);
    at += step;
  }
};

// Adds steps [from, to) of NV panels to the sums of all rows. Each row block asks for its share of `next`, what comes
// next of as many panels, so that memory and arithmetic overlap.
template <class B, int NV>
void wide_panels(const GemmArgs& g, const Span& s, int64_t panel, int64_t from, int64_t to, const void* next) {
  const Input<typename B::A> x = input<B>(g);
  const typename B::T* b[NV];
  for (int v = 0; v < NV; ++v) b[v] = panel_data<B>(*g.w, panel + v, from);
  const int64_t blocks = (s.rows + kBlockRows - 1) / kBlockRows, ld = (s.end - s.panel) * kPanel;
  const int64_t step = B::width * int64_t(sizeof(typename B::T)) / blocks, share = (to - from) / B::depth * step;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = s.rows * i / blocks, last = s.rows * (i + 1) / blocks;
    const PrefetchPanels<NV> ahead{static_cast<const char*>(next) + i * share, step, g.w->panel_bytes};
    with_rows<kBlockRows>(int(last - first), [&]<int R>() __attribute__((noinline)) {
      V acc[R][NV];
      float* c = s.sums + first * ld + (panel - s.panel) * kPanel;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] = from ? load(c + r * ld + v * kPanel) : zero();
      multiply<B, R, NV>(to - from, x.data + (s.row + first) * x.ld + from, x.ld, b, B::width, acc, ahead);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) store(c + r * ld + v * kPanel, acc[r][v]);
    });
  }
}

template <class B>
void gemm_wide(const GemmArgs& g, const Span& s) {
  const int64_t steps = input<B>(g).steps, blocks = (steps + kDepthBlock<B> - 1) / kDepthBlock<B>;
  for (int64_t i = 0, from = 0, to; i < blocks; ++i, from = to) {
    to = i + 1 < blocks ? steps * (i + 1) / blocks / 2 * 2 : steps;
    for (int64_t panel = s.panel, then; panel < s.end; panel = then) {
      then = panel + kWide <= s.end ? panel + kWide : panel + 1;
      const bool turn = then == s.end && to < steps;
      const void* next = panel_data<B>(*g.w, turn ? s.panel : then < g.w->panels ? then : panel, turn ? to : from);
      if (then - panel == kWide)
        wide_panels<B, kWide>(g, s, panel, from, to, next);
      else
        wide_panels<B, 1>(g, s, panel, from, to, next);
    }
  }
  const int64_t panels = s.end - s.panel;
  for (int64_t r = 0; r < s.rows; ++r) finish_row(g, s.row + r, s.panel, panels, s.sums + r * panels * kPanel);
}

template <class B>
void gemm_run(const GemmArgs& g, int64_t begin, int64_t end, int64_t panel, int64_t panel_end, float* scratch) {
  if (end - begin <= kThinGemmRows) return gemm_thin<B>(g, begin, int(end - begin), panel, panel_end);
  for (; panel < panel_end; panel += kSpanPanels)
    gemm_wide<B>(
        g, {begin, end - begin, panel, panel + kSpanPanels < panel_end ? panel + kSpanPanels : panel_end, scratch});
}

}  // namespace

void gemm(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end, float* scratch) {
  const int64_t panel = unit_begin * kUnitPanels;
  const int64_t end = unit_end * kUnitPanels < g.w->panels ? unit_end * kUnitPanels : g.w->panels;
  switch (g.w->dtype) {
    case DType::f32:
      return gemm_run<ReadF32>(g, row_begin, row_end, panel, end, scratch);
    case DType::bf16:
      return gemm_run<Bf16>(g, row_begin, row_end, panel, end, scratch);
    case DType::f16:
      return gemm_run<ReadF16>(g, row_begin, row_end, panel, end, scratch);
  }
}

}  // namespace pagebus::PAGEBUS_ISA
