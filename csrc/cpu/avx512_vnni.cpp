// AVX-512 VNNI: the integer product and its rows' codes, compiled beside a build of w8a8.cpp.
#include "isa.h"

namespace pagebus {

void exchange_avx512_vnni(Kernels& table) {
  table.name = "avx512_vnni";
  table.gemm_w8a8 = avx512_vnni::gemm_w8a8;
  table.encode_row = avx512_vnni::encode_row;
}

}  // namespace pagebus
