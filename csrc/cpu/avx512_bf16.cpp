// AVX-512 BF16: the product of bf16 weights with activations rounded to bf16; compiled beside a build of gemm.cpp.
#include "isa.h"
#include "vec.h"

namespace pagebus {
namespace avx512_bf16 {
namespace {

float probe_bf16(int64_t iterations) {
  __m512 acc[kProbeChains];
  for (int v = 0; v < kProbeChains; ++v) acc[v] = _mm512_set1_ps(float(v));
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < iterations; ++i)
#pragma GCC unroll 12
    for (int v = 0; v < kProbeChains; ++v) acc[v] = _mm512_dpbf16_ps(acc[v], (__m512bh)ones, (__m512bh)ones);
  V all = {acc[0]};
  for (int v = 1; v < kProbeChains; ++v) all = max(all, {acc[v]});
  return reduce_max(all);
}

}  // namespace
}  // namespace avx512_bf16

void exchange_avx512_bf16(Kernels& table) {
  table.name = "avx512_bf16";
  table.gemm = avx512_bf16::gemm;
  table.rounds_bf16 = true;
  table.probe_bf16 = avx512_bf16::probe_bf16;
}

}  // namespace pagebus
