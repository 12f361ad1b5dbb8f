// The panels of quantised matrices: groups along k, one after another, each with the float16 scales of its sixteen
// outputs and then the codes.
//   q8, groups of 32: [16] scales, [32 k][16] int8; a weight is scale * code
//   q4, groups of 32: [16] scales, [16] offsets, [4][16] words of 8 codes, lowest k lowest; scale * code + offset
//   w8, groups of 64: [16] scales, [64 / 4][16][4] int8; scale * code
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr int kScaleBytes = 2 * kPanel;

PAGEBUS_INLINE const char* panel_group(const Packed& w, int64_t panel, int64_t group) {
  return w.data + panel * w.panel_bytes + group * group_bytes(w.format);
}

PAGEBUS_INLINE V load_scales(const char* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }

// Place of the code of (lane, k) in a group; of q4, that of its word.
PAGEBUS_INLINE int code_at(Format format, int lane, int k) {
  if (format == Format::q8) return kScaleBytes + k * kPanel + lane;
  if (format == Format::q4) return 2 * kScaleBytes + (k / 8 * kPanel + lane) * 4;
  return kScaleBytes + (k / 4 * kPanel + lane) * 4 + k % 4;
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
