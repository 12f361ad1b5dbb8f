// Between float32 and the storage types, whole arrays.
#include "convert.h"

#include "isa.h"

namespace pagebus::PAGEBUS_ISA {

void widen(DType dtype, const void* source, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = widen_one(dtype, source, i);
}

void narrow(DType dtype, const float* x, void* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow_one(dtype, x[i], y, i);
}

}  // namespace pagebus::PAGEBUS_ISA
