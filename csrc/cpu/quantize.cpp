// Quantised matrices made, at load, from floats or from a GGUF file's blocks, a group of a panel at a time; and rows
// read back. services/worker/quantize.py has the same arithmetic, operation by operation.
#include <cstring>

#include "convert.h"
#include "epilogue.h"
#include "isa.h"
#include "quantized.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr float kMaxHalf = 65504.0f;
constexpr int kRefits = 3;

// A group of sixteen outputs, [k][output].
struct Group {
  alignas(64) float values[kMaxGroup][kPanel];
  uint16_t scale[kPanel], offset[kPanel];  // float16
  uint8_t codes[kMaxGroup][kPanel];        // int8 in q8 and w8
};

PAGEBUS_INLINE V absolute(V x) { return max(x, sub(zero(), x)); }

// x as the nearest float16 of finite size, in both forms.
PAGEBUS_INLINE V round_half(V x, uint16_t* to) {
  float wide[kPanel];
  store(wide, min(set1(kMaxHalf), max(set1(-kMaxHalf), x)));
  for (int l = 0; l < kPanel; ++l) narrow_one(DType::f16, wide[l], to, l);
  return load_f16(to);
}

PAGEBUS_INLINE V divisor(V scale) { return where_less(zero(), absolute(scale), scale, set1(1.0f)); }

PAGEBUS_INLINE void store_codes(V codes, uint8_t* to) {
  float wide[kPanel];
  store(wide, codes);
  for (int l = 0; l < kPanel; ++l) to[l] = uint8_t(int(wide[l]));
}

// Symmetric: scale = max |w| / 127.
void encode_int8(Group& g, int count) {
  V top = zero();
  for (int k = 0; k < count; ++k) top = max(top, absolute(load(g.values[k])));
  const V scale = round_half(div(top, set1(127.0f)), g.scale);
  const V by = divisor(scale);
  for (int k = 0; k < count; ++k) {
    const V code = min(set1(127.0f), max(set1(-127.0f), round(div(load(g.values[k]), by))));
    store_codes(where_less(zero(), scale, code, zero()), g.codes[k]);
  }
}

PAGEBUS_INLINE V code4(V w, V by, V offset) { return min(set1(15.0f), max(zero(), round(div(sub(w, offset), by)))); }

// A scale and offset, the sum of squared errors and the sums that a least-squares fit needs.
struct Fit {
  uint16_t scale[kPanel], offset[kPanel];
  V d, m, error, q, qq, w, wq;
};

void assess(Fit& f, const Group& g, int count, V scale, V offset) {
  f.d = round_half(scale, f.scale);
  f.m = round_half(offset, f.offset);
  f.error = f.q = f.qq = f.w = f.wq = zero();
  const V by = divisor(f.d);
  for (int k = 0; k < count; ++k) {
    const V w = load(g.values[k]), q = code4(w, by, f.m);
    const V off = sub(w, add(mul(f.d, q), f.m));
    f.error = add(f.error, mul(off, off));
    f.q = add(f.q, q);
    f.qq = add(f.qq, mul(q, q));
    f.w = add(f.w, w);
    f.wq = add(f.wq, mul(w, q));
  }
}

// Starts from the range, scale = (max - min) / 15, and alternates codes and a least-squares fit of scale and offset;
// each output keeps the best it has seen.
void encode_q4(Group& g, int count) {
  V low = load(g.values[0]), high = low;
  for (int k = 1; k < count; ++k) {
    low = min(low, load(g.values[k]));
    high = max(high, load(g.values[k]));
  }
  Fit best;
  assess(best, g, count, div(sub(high, low), set1(15.0f)), low);
  Fit last = best;
  const V n = set1(float(count));
  for (int i = 0; i < kRefits; ++i) {
    const V spread = sub(mul(n, last.qq), mul(last.q, last.q));
    const V slope = div(sub(mul(n, last.wq), mul(last.w, last.q)), divisor(spread));
    const V scale = where_less(zero(), spread, slope, zero());
    const V offset = div(sub(last.w, mul(scale, last.q)), n);
    assess(last, g, count, scale, offset);
    float old_error[kPanel], error[kPanel];
    store(old_error, best.error);
    store(error, last.error);
    for (int l = 0; l < kPanel; ++l) {
      if (!(error[l] < old_error[l])) continue;
      best.scale[l] = last.scale[l];
      best.offset[l] = last.offset[l];
    }
    best.error = min(last.error, best.error);
  }
  std::memcpy(g.scale, best.scale, sizeof(g.scale));
  std::memcpy(g.offset, best.offset, sizeof(g.offset));
  const V m = load_f16(g.offset), by = divisor(load_f16(g.scale));
  for (int k = 0; k < count; ++k) store_codes(code4(load(g.values[k]), by, m), g.codes[k]);
}

// GGUF's blocks of 32 (ggml-common.h): Q4_0 {f16 d, 16 bytes}, Q4_1 {f16 d, f16 m, 16 bytes}, Q8_0 {f16 d, 32 int8}; a
// byte of 4-bit codes holds those of k and k + 16.
constexpr int kBlock = 32;

struct Block {
  const uint8_t* p;
  Blocks kind;

  PAGEBUS_INLINE uint16_t half(int i) const {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * i, 2);
    return bits;
  }
  PAGEBUS_INLINE uint8_t code(int k) const {
    if (kind == Blocks::q8_0) return p[2 + k];
    const uint8_t byte = p[(kind == Blocks::q4_0 ? 2 : 4) + k % 16];
    return k < 16 ? byte & 15 : byte >> 4;
  }
  PAGEBUS_INLINE float value(int k) const {
    const float d = _cvtsh_ss(half(0));
    if (kind == Blocks::q8_0) return d * float(int8_t(code(k)));
    if (kind == Blocks::q4_0) return d * float(int(code(k)) - 8);
    return d * float(code(k)) + _cvtsh_ss(half(1));
  }
};

PAGEBUS_INLINE Block block_of(const PackArgs& a, int64_t n, int64_t k) {
  const int64_t index = (n * a.w->k + k) / kBlock;
  return {static_cast<const uint8_t*>(a.source) + index * block_bytes(a.blocks), a.blocks};
}

PAGEBUS_INLINE bool fits(Format format, Blocks blocks) {
  return format == Format::q8 ? blocks == Blocks::q8_0
                              : format == Format::q4 && (blocks == Blocks::q4_0 || blocks == Blocks::q4_1);
}

void copy_block(const Block& block, int lane, Group& g) {
  g.scale[lane] = block.half(0);
  if (block.kind == Blocks::q4_1) g.offset[lane] = block.half(1);
  if (block.kind == Blocks::q4_0) narrow_one(DType::f16, -8.0f * _cvtsh_ss(block.half(0)), g.offset, lane);
  for (int k = 0; k < kBlock; ++k) g.codes[k][lane] = block.code(k);
}

void read_values(const PackArgs& a, int64_t n, int64_t from, int count, int lane, Group& g) {
  if (a.blocks == Blocks::none) {
    for (int k = 0; k < count; ++k) g.values[k][lane] = widen_one(a.source_dtype, a.source, n * a.w->k + from + k);
    return;
  }
  for (int k = 0; k < count; k += kBlock) {
    const Block block = block_of(a, n, from + k);
    for (int i = 0; i < kBlock; ++i) g.values[k + i][lane] = block.value(i);
  }
}

bool all_finite(const Group& g, int count) {
  V check = zero();
  for (int k = 0; k < count; ++k) check = add(check, sub(load(g.values[k]), load(g.values[k])));
  return reduce_add(check) == 0;
}

void write_lane(const Group& g, Format format, int lane, int count, char* to) {
  std::memcpy(to + 2 * lane, g.scale + lane, 2);
  if (format != Format::q4) {
    for (int k = 0; k < count; ++k) to[code_at(format, lane, k)] = char(g.codes[k][lane]);
    return;
  }
  std::memcpy(to + kScaleBytes + 2 * lane, g.offset + lane, 2);
  for (int k = 0; k < count; k += 8) {
    uint32_t word = 0;
    for (int i = 0; i < 8 && k + i < count; ++i) word |= uint32_t(g.codes[k + i][lane]) << (4 * i);
    std::memcpy(to + code_at(format, lane, k), &word, 4);
  }
}

// Source rows [begin, end), which go to lanes of one panel.
bool quantize_lanes(const PackArgs& a, int64_t begin, int64_t end) {
  const Packed& w = *a.w;
  const int lane = int((a.first + begin) % kPanel), lanes = int(end - begin), group = group_k(w.format);
  char* panel = w.data + panel_of(w, a.first + begin, a.half) * w.panel_bytes;
  const bool copies = fits(w.format, a.blocks);
  Group g = {};
  for (int64_t from = 0; from < w.k; from += group, panel += group_bytes(w.format)) {
    const int count = int(w.k - from < group ? w.k - from : group);
    for (int l = 0; l < lanes; ++l) {
      if (copies)
        copy_block(block_of(a, begin + l, from), lane + l, g);
      else
        read_values(a, begin + l, from, count, lane + l, g);
    }
    if (!copies) {
      if (!all_finite(g, count)) return false;
      w.format == Format::q4 ? encode_q4(g, count) : encode_int8(g, count);
    }
    for (int l = lane; l < lane + lanes; ++l) write_lane(g, w.format, l, count, panel);
  }
  return true;
}

}  // namespace

bool quantize(const PackArgs& a, int64_t begin, int64_t end) {
  bool finite = true;
  while (begin < end) {
    const int64_t next = begin + kPanel - (a.first + begin) % kPanel;
    finite &= quantize_lanes(a, begin, next < end ? next : end);
    begin = next;
  }
  return finite;
}

void unpack_quantized(const Packed& w, int64_t output, float* y) {
  const int lane = int(output % kPanel), group = group_k(w.format);
  for (int64_t k = 0; k < w.k; ++k) {
    const char* p = panel_group(w, panel_of(w, output, 0), k / group);
    const char* code = p + code_at(w.format, lane, int(k % group));
    const float scale = widen_one(DType::f16, p, lane);
    if (w.format != Format::q4) {
      y[k] = scale * float(int8_t(*code));
      continue;
    }
    uint32_t word;
    std::memcpy(&word, code, 4);
    y[k] = __builtin_fmaf(scale, float(word >> (4 * (k % 8)) & 15), widen_one(DType::f16, p + kScaleBytes, lane));
  }
}

}  // namespace pagebus::PAGEBUS_ISA
