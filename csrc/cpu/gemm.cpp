// The packed-weight GEMM.
#include "convert.h"
#include "epilogue.h"
#include "isa.h"
#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

template <class B>
PAGEBUS_INLINE const typename B::T* panel_data(const Packed& w, int64_t panel) {
  return reinterpret_cast<const typename B::T*>(w.data + panel * w.panel_bytes);
}

template <class B, int R, int NV>
void thin_panels(const GemmArgs& g, int64_t row, int64_t& panel, int64_t end) {
  for (; panel + NV <= end; panel += NV) {
    const typename B::T* b[NV];
    for (int v = 0; v < NV; ++v) b[v] = panel_data<B>(*g.w, panel + v);
    V acc[R][NV];
    for (auto& line : acc)
      for (V& x : line) x = zero();
    multiply<B, R, NV>(g.w->k, g.x + row * g.ldx, g.ldx, b, kPanel * B::depth, acc);
    float sums[(NV > 1 ? NV : 2) * kPanel] = {};  // a gated matrix has no lone panel
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < NV; ++v) store(sums + v * kPanel, acc[r][v]);
      finish_row(g, row + r, panel, NV, sums);
    }
  }
}

template <class B>
void gemm_thin(const GemmArgs& g, int64_t row, int rows, int64_t panel, int64_t end) {
  with_rows<kThinRows>(rows, [&]<int R>() {
    if constexpr (R == 1) thin_panels<B, R, 4>(g, row, panel, end);
    thin_panels<B, R, 2>(g, row, panel, end);
    if (panel < end) thin_panels<B, R, 1>(g, row, panel, end);
  });
}

// sums[rows][NV panels], `ld` floats apart, of the k in [from, to). Each row block asks for its share of the next
// panel, so that memory and arithmetic overlap; a single block leaves that to the hardware.
template <class B, int NV>
void wide_panels(const GemmArgs& g, int64_t row, int64_t rows, int64_t panel, int64_t from, int64_t to, float* sums,
                 int64_t ld) {
  const typename B::T* b[NV];
  for (int v = 0; v < NV; ++v) b[v] = panel_data<B>(*g.w, panel + v) + from * kPanel;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const bool more = blocks > 1 && panel + NV < g.w->panels;
  const char* next = reinterpret_cast<const char*>(b[NV - 1]) + (more ? g.w->panel_bytes : 0);
  const int64_t share = more ? (to - from) * kPanel * int64_t(sizeof(typename B::T)) / blocks : 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = rows * i / blocks, last = rows * (i + 1) / blocks;
    const float* a = g.x + (row + first) * g.ldx + from;
    const Prefetch ahead{next + i * share, share * B::depth / (to - from)};
    with_rows<kBlockRows>(int(last - first), [&]<int R>() __attribute__((noinline)) {
      V acc[R][NV];
      float* c = sums + first * ld;
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = from ? load(c + r * ld + v * kPanel) : zero();
      multiply<B, R, NV>(to - from, a, g.ldx, b, kPanel * B::depth, acc, ahead);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < NV; ++v) store(c + r * ld + v * kPanel, acc[r][v]);
    });
  }
}

template <class B>
void gemm_wide(const GemmArgs& g, int64_t row, int64_t rows, int64_t panel, int64_t end, float* sums) {
  constexpr int64_t ld = kUnitPanels * kPanel;
  for (; panel < end; panel += kUnitPanels) {
    const int64_t panels = end - panel < kUnitPanels ? end - panel : kUnitPanels;
    for (int64_t from = 0; from < g.w->k; from += kDepthBlock) {
      const int64_t to = from + kDepthBlock < g.w->k ? from + kDepthBlock : g.w->k;
      int64_t p = 0;
      for (; p + kWide <= panels; p += kWide)
        wide_panels<B, kWide>(g, row, rows, panel + p, from, to, sums + p * kPanel, ld);
      for (; p < panels; ++p) wide_panels<B, 1>(g, row, rows, panel + p, from, to, sums + p * kPanel, ld);
    }
    for (int64_t r = 0; r < rows; ++r) finish_row(g, row + r, panel, panels, sums + r * ld);
  }
}

template <class B>
void gemm_run(const GemmArgs& g, int64_t row, int64_t row_end, int64_t panel, int64_t end, float* scratch) {
  if (row_end - row <= kThinRows) return gemm_thin<B>(g, row, int(row_end - row), panel, end);
  for (; row < row_end; row += kGemmRows)
    gemm_wide<B>(g, row, row_end - row < kGemmRows ? row_end - row : kGemmRows, panel, end, scratch);
}

}  // namespace

void gemm(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end, float* scratch) {
  const int64_t panel = unit_begin * kUnitPanels;
  const int64_t end = unit_end * kUnitPanels < g.w->panels ? unit_end * kUnitPanels : g.w->panels;
  switch (g.w->dtype) {
    case DType::f32:
      return gemm_run<ReadF32>(g, row_begin, row_end, panel, end, scratch);
    case DType::bf16:
      return gemm_run<ReadBf16Pairs>(g, row_begin, row_end, panel, end, scratch);
    case DType::f16:
      return gemm_run<ReadF16>(g, row_begin, row_end, panel, end, scratch);
  }
}

namespace {

// Element index of (output lane, k) in a panel.
PAGEBUS_INLINE int64_t panel_index(DType dtype, int64_t lane, int64_t k) {
  return dtype == DType::bf16 ? k / 2 * (2 * kPanel) + lane * 2 + k % 2 : k * kPanel + lane;
}

}  // namespace

void pack(const PackArgs& a, int64_t begin, int64_t end) {
  const Packed& w = *a.w;
  for (int64_t n = begin; n < end; ++n) {
    const int64_t output = a.first + n;
    char* panel = w.data + panel_of(w, output, a.half) * w.panel_bytes;
    for (int64_t k = 0; k < w.k; ++k) {
      const int64_t to = panel_index(w.dtype, output % kPanel, k), from = n * w.k + k;
      if (w.dtype == DType::f32)
        reinterpret_cast<float*>(panel)[to] = widen_one(a.source_dtype, a.source, from);
      else if (w.dtype == a.source_dtype)
        reinterpret_cast<uint16_t*>(panel)[to] = static_cast<const uint16_t*>(a.source)[from];
      else
        narrow_one(w.dtype, widen_one(a.source_dtype, a.source, from), panel, to);
    }
  }
}

void unpack_row(const Packed& w, int64_t output, float* y) {
  const char* panel = w.data + panel_of(w, output, 0) * w.panel_bytes;
  for (int64_t k = 0; k < w.k; ++k) y[k] = widen_one(w.dtype, panel, panel_index(w.dtype, output % kPanel, k));
}

}  // namespace pagebus::PAGEBUS_ISA
