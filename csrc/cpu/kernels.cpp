// The table of an instruction set's kernels.
#include "kernels.h"

#include "isa.h"

#define PAGEBUS_STRING2(x) #x
#define PAGEBUS_STRING(x) PAGEBUS_STRING2(x)
#define PAGEBUS_JOIN2(a, b) a##b
#define PAGEBUS_JOIN(a, b) PAGEBUS_JOIN2(a, b)

namespace pagebus {

const Kernels* PAGEBUS_JOIN(kernels_, PAGEBUS_ISA)() {
  namespace isa = PAGEBUS_ISA;
  static constexpr Kernels table{PAGEBUS_STRING(PAGEBUS_ISA),
                                 isa::pack,
                                 isa::gemm,
                                 isa::rms_norm,
                                 isa::rope,
                                 isa::attention,
                                 isa::merge,
                                 isa::softcap,
                                 isa::silu_mul,
                                 isa::unpack_row,
                                 isa::widen,
                                 isa::narrow,
                                 isa::find_best,
                                 isa::exp_weights,
                                 isa::block_sums,
                                 isa::block_maxima,
                                 isa::at_least,
                                 isa::quantize,
                                 isa::gemm_quantized,
                                 isa::gemm_w8a8,
                                 isa::encode_row,
                                 isa::unpack_quantized,
                                 false,
                                 isa::probe_read,
                                 isa::probe_fma,
                                 isa::probe_fma};
  return &table;
}

}  // namespace pagebus
