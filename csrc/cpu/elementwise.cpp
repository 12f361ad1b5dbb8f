// Norms, rotary embedding with the KV write, and the gate. Without reductions a plain loop gives the same bits however
// the compiler vectorises it (contraction is off).

#include "convert.h"
#include "isa.h"
#include "product.h"
#include "softmax.h"

namespace pagebus::PAGEBUS_ISA {
// x and weight hold zeros between n and padded, a multiple of 16. y may be x.
void rms_norm(const float* x, const float* weight, float* y, int64_t padded, int64_t n, float eps) {
  V sum = zero(), sum2 = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    const V a = load(x + i), b = load(x + i + kLanes);
    sum = fma(a, a, sum);
    sum2 = fma(b, b, sum2);
  }
  if (i < padded) sum = fma(load(x + i), load(x + i), sum);
  const float mean = reduce_add(add(sum, sum2)) / float(n);
  const float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
  const V scale = set1(1.0f / root);
  for (i = 0; i < padded; i += kLanes) store(y + i, mul(load(weight + i), mul(load(x + i), scale)));
}

void silu_mul(const float* gate, const float* up, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_columns(y + i, mul(silu(load_columns(gate + i, n - i)), load_columns(up + i, n - i)), n - i);
}

void softcap(float* x, int64_t n, float cap) {
  const V inverse = set1(1.0f / cap);
  for (int64_t i = 0; i < n; i += kLanes)
    store_columns(x + i, cap_softly(load_columns(x + i, n - i), set1(cap), inverse), n - i);
}

namespace {

// The head at x, normed where `norm` is given, rotated by the row's cos and sin, into y [padded_dim].
PAGEBUS_INLINE void rotate(const RopeArgs& a, int64_t row, const float* x, const float* norm, float* y) {
  const CacheLayout& c = *a.cache;
  for (int i = 0; i < c.head_dim; ++i) y[i] = x[i];
  for (int i = c.head_dim; i < c.padded_dim; ++i) y[i] = 0.0f;
  if (norm) rms_norm(y, norm, y, c.padded_dim, c.head_dim, a.eps);
  const int half = a.rope_dim / 2;
  const float* cos = a.cos + row * half;
  const float* sin = a.sin + row * half;
  for (int i = 0; i < half; ++i) {
    const float first = y[i], second = y[i + half];
    y[i] = first * cos[i] - second * sin[i];
    y[i + half] = second * cos[i] + first * sin[i];
  }
}

}  // namespace

void rope(const RopeArgs& a, int64_t row_begin, int64_t row_end, float* scratch) {
  const CacheLayout& c = *a.cache;
  const StepRows& step = *a.step;
  const int64_t width = dtype_bytes(c.dtype);
  for (int64_t t = row_begin; t < row_end; ++t) {
    const float* qkv = a.qkv + t * a.ldqkv;
    for (int h = 0; h < c.kv_heads * a.group; ++h) {
      float* q = a.q + ((h / a.group * step.rows + t) * a.group + h % a.group) * c.padded_dim;
      rotate(a, t, qkv + h * c.head_dim, a.q_norm, q);
      for (int i = 0; i < c.head_dim; ++i) q[i] *= a.scale;
    }
    const float* keys = qkv + c.kv_heads * a.group * c.head_dim;
    const float* values = keys + c.kv_heads * c.head_dim;
    const int32_t position = step.positions[t];
    const int32_t block = step.tables[step.sequence[t] * step.table_width + position / c.block_size];
    const int64_t offset = position % c.block_size;
    char* layer = c.kv + block * c.block_bytes + a.layer * c.layer_bytes;
    for (int h = 0; h < c.kv_heads; ++h) {
      char* head = layer + h * c.head_bytes;
      const int64_t lane = (offset / c.key_lanes * c.head_dim) * c.key_lanes + offset % c.key_lanes;
      rotate(a, t, keys + h * c.head_dim, a.k_norm, scratch);
      for (int i = 0; i < c.head_dim; ++i) narrow_one(c.dtype, scratch[i], head, i * c.key_lanes + lane);
      narrow(c.dtype, values + h * c.head_dim, head + c.value_offset + offset * c.padded_dim * width, c.head_dim);
    }
  }
}

// Eight streams beside each other: one alone is not fetched ahead as fast as the memory allows.
float probe_read(const float* data, int64_t n) {
  constexpr int streams = 8;
  const int64_t apart = n / streams;
  V top[streams];
  for (V& x : top) x = zero();
  for (int64_t i = 0; i + kLanes <= apart; i += kLanes)
#pragma GCC unroll 8
    for (int s = 0; s < streams; ++s) top[s] = max(top[s], load(data + s * apart + i));
  for (int s = 1; s < streams; ++s) top[0] = max(top[0], top[s]);
  return reduce_max(top[0]);
}

float probe_fma(int64_t iterations) {
#ifdef __AVX512F__
  constexpr int chains = 12;
#else
  constexpr int chains = 6;  // of two registers each
#endif
  V acc[chains];
  for (int v = 0; v < chains; ++v) acc[v] = set1(float(v));
  const V a = set1(0.5f), b = set1(0.25f);
  for (int64_t i = 0; i < iterations * (kProbeChains / chains); ++i)
#pragma GCC unroll 12
    for (int v = 0; v < chains; ++v) acc[v] = fma(a, acc[v], b);
  for (int v = 1; v < chains; ++v) acc[0] = max(acc[0], acc[v]);
  return reduce_max(acc[0]);
}

}  // namespace pagebus::PAGEBUS_ISA
