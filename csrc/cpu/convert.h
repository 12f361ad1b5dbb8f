// Between float32 and the storage types, one value at a time; round to nearest even.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

PAGEBUS_INLINE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

PAGEBUS_INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);  // a quiet NaN stays one
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

PAGEBUS_INLINE float widen_one(DType dtype, const void* p, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == DType::bf16 ? from_bits(uint32_t(bits) << 16) : _cvtsh_ss(bits);
}

PAGEBUS_INLINE void narrow_one(DType dtype, float x, void* p, int64_t i) {
  if (dtype == DType::f32)
    static_cast<float*>(p)[i] = x;
  else
    static_cast<uint16_t*>(p)[i] =
        dtype == DType::bf16 ? to_bf16(x) : uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace pagebus::PAGEBUS_ISA
