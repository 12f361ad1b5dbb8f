// Between float32 and the storage types, whole arrays.
#include "convert.h"

#include "isa.h"

namespace pagebus::PAGEBUS_ISA {

void widen(DType dtype, const void* source, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (dtype == DType::f32)
      store(y + i, load(static_cast<const float*>(source) + i));
    else if (dtype == DType::bf16)
      store(y + i, load_bf16(static_cast<const uint16_t*>(source) + i));
    else
      store(y + i, load_f16(static_cast<const uint16_t*>(source) + i));
  }
  for (; i < n; ++i) y[i] = widen_one(dtype, source, i);
}

void narrow(DType dtype, const float* x, void* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (dtype == DType::f32)
      store(static_cast<float*>(y) + i, load(x + i));
    else if (dtype == DType::bf16)
      store_bf16(static_cast<uint16_t*>(y) + i, load(x + i));
    else
      store_f16(static_cast<uint16_t*>(y) + i, load(x + i));
  }
  for (; i < n; ++i) narrow_one(dtype, x[i], y, i);
}

}  // namespace pagebus::PAGEBUS_ISA
