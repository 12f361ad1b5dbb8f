// The kernels of one instruction set, which `PAGEBUS_ISA` names: each file that includes this is compiled once per set.
#pragma once

#include "kernels.h"

namespace pagebus::PAGEBUS_ISA {

void pack(const PackArgs& a, int64_t begin, int64_t end);
void gemm(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end, float* scratch);
void unpack_row(const Packed& w, int64_t output, float* y);
void rms_norm(const float* x, const float* weight, float* y, int64_t padded, int64_t n, float eps);
void silu_mul(const float* gate, const float* up, float* y, int64_t n);
void rope(const RopeArgs& a, int64_t row_begin, int64_t row_end, float* scratch);
void attention(const AttentionArgs& a, const AttentionItem* items, int64_t count, float* scratch);
void merge(const AttentionArgs& a, const AttentionMerge& m, float* scratch);
void softcap(float* x, int64_t n, float cap);
void widen(DType dtype, const void* source, float* y, int64_t n);
void narrow(DType dtype, const float* x, void* y, int64_t n);
void find_best(const float* scores, int64_t n, int32_t first, Best& best);
void exp_weights(float* scores, int64_t n, float best, float temperature);
void block_sums(const float* weights, int64_t n, double* sums);
void block_maxima(const float* scores, int64_t n, float* maxima);
int64_t at_least(const float* x, int64_t n, float bound, int32_t* ids, float* values);
bool quantize(const PackArgs& a, int64_t begin, int64_t end);
void gemm_quantized(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
                    float* scratch);
void gemm_w8a8(const GemmArgs& g, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
               float* scratch);
void encode_row(const float* x, int64_t k, int64_t row, const RowCodes& to);
void unpack_quantized(const Packed& w, int64_t output, float* y);
float probe_read(const float* data, int64_t n);
float probe_fma(int64_t iterations);

}  // namespace pagebus::PAGEBUS_ISA
