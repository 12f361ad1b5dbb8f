// What becomes of a product's sums: bias, and storing, adding or gating.
#pragma once

#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

// The panel that holds an output; `half` 1 means the up part of a gated matrix.
PAGEBUS_INLINE int64_t panel_of(const Packed& w, int64_t output, int half) {
  return w.gated ? output / kPanel * 2 + half : output / kPanel;
}

PAGEBUS_INLINE V with_bias(const Packed& w, int64_t panel, const float* sum) {
  const V value = load(sum);
  return w.bias ? add(value, load(w.bias + panel * kPanel)) : value;
}

// One row of sums of `panels` panels from `panel` on, into y.
PAGEBUS_INLINE void finish_row(const GemmArgs& g, int64_t row, int64_t panel, int64_t panels, const float* sums) {
  const Packed& w = *g.w;
  float* y = g.y + row * g.ldy;
  if (g.epilogue == Epilogue::silu_mul) {
    for (int64_t p = 0; p < panels; p += 2) {
      const int64_t column = (panel + p) / 2 * kPanel;
      const V gate = with_bias(w, panel + p, sums + p * kPanel);
      const V up = with_bias(w, panel + p + 1, sums + (p + 1) * kPanel);
      store_columns(y + column, mul(silu(gate), up), w.n - column);
    }
    return;
  }
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t column = (panel + p) * kPanel;
    V value = with_bias(w, panel + p, sums + p * kPanel);
    if (g.epilogue == Epilogue::add) value = add(load_columns(y + column, w.n - column), value);
    store_columns(y + column, value, w.n - column);
  }
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
