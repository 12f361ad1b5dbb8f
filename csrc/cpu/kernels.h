// What a build of the kernels for one instruction set offers. Plain structs and function pointers only: the kernels'
// translation units are compiled with instructions the machine may lack, so no inline function may be shared with them.
#pragma once

#include <cstdint>

namespace pagebus {

enum class DType : int { f32, bf16, f16 };
static constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

enum class Epilogue : int { store, add, silu_mul };

// How a matrix holds its weights: as numbers of its dtype, or as codes with float16 scales for groups along k: int8
// (q8), 4 bits and an offset (q4), int8 for integer products (w8). See quantized.h for their panels.
enum class Format : int { dense, q8, q4, w8 };
constexpr int kMaxGroup = 64;
static constexpr int group_k(Format format) { return format == Format::w8 ? 64 : 32; }
static constexpr int group_bytes(Format format) {
  return format == Format::q4 ? 16 * (4 + 16) : 16 * (2 + group_k(format));
}

// A weight matrix [n outputs, k inputs] as panels of 16 outputs, each [k][16] in the dtype; in bf16 two successive k
// are paired, [k / 2][16][2]. With `gated`, the panels of gate and up (n outputs each) alternate. A unit is two panels.
constexpr int kPanel = 16;
constexpr int kUnitPanels = 2;

struct Packed {
  DType dtype;
  bool gated;
  int64_t n, k;
  int64_t panels;       // without padding to whole units
  int64_t panel_bytes;  // from one panel to the next
  char* data;
  float* bias;  // [panels * 16], padded with 0, or null
  Format format = Format::dense;
};

// Rows of activations as int8 codes, in the form that a build's integer product reads, with a scale for each group
// of 64.
struct RowCodes {
  char* codes;
  int64_t ld;     // bytes from one row to the next
  float* scales;  // [rows][groups]
  int32_t* sums;  // [rows][groups], 128 times the sum of a group's codes
  int64_t groups;
};

// y[rows, n] = epilogue(x[rows, k] * w^T + bias): stored, added to y, or silu(gate) * up.
struct GemmArgs {
  const Packed* w;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  Epilogue epilogue;
  const RowCodes* codes = nullptr;  // of x, for a w8 matrix
  const uint32_t* pairs = nullptr;  // x as pairs of bf16, [rows][ld_pairs], for a dense bf16 matrix and `rounds_bf16`
  int64_t ld_pairs = 0;
};
constexpr int kThinGemmRows = 2;  // up to these, panels are read as a whole
constexpr int kGemmRows = 96;     // rows that share a sweep over the panels
constexpr int kSpanPanels = 8;    // panels that share a pass over some of the rows' columns
constexpr int kWidened = 256;     // k of a quantised panel that are widened at once
constexpr int kGemmScratch = kGemmRows * kPanel * kSpanPanels + kWidened * kPanel;

// A source's blocks of 32 quantised weights along k, as GGUF files hold them; none: it holds numbers.
enum class Blocks : int { none, q4_0, q4_1, q8_0 };
static constexpr int64_t block_bytes(Blocks blocks) {
  return blocks == Blocks::q4_0 ? 18 : blocks == Blocks::q4_1 ? 20 : 34;
}

// Copies source rows [n][k] to outputs first .. first + n of a packed matrix; `half` 1 means the up part of a gated
// one.
struct PackArgs {
  Packed* w;
  const void* source;
  DType source_dtype;
  int64_t first;
  int half;
  Blocks blocks = Blocks::none;
};

// The KV cache: block b at kv + b * block_bytes, in it layer by layer, in that head by head: keys transposed,
// [block_size / key_lanes][head_dim][key_lanes], then values [block_size][head_dim padded to 16].
struct CacheLayout {
  DType dtype;
  int block_size, kv_heads, head_dim, padded_dim;
  int key_lanes;  // 16; block_size where that is no multiple of 16
  int64_t head_bytes, value_offset, layer_bytes, block_bytes;
  char* kv;
};

// Where the rows of a step go: row t belongs to sequence `sequence[t]` and sits at `positions[t]`.
struct StepRows {
  int64_t rows;
  const int32_t* positions;
  const int32_t* sequence;
  const int32_t* tables;  // [sequences][table_width]
  int64_t table_width;
};

// Splits qkv into q (normed, rotated, scaled, [kv_heads][rows][group][padded_dim]) and keys and values (into the
// cache).
struct RopeArgs {
  const StepRows* step;
  const CacheLayout* cache;
  const float* qkv;
  int64_t ldqkv;
  float* q;
  int group, layer, rope_dim;
  const float* cos;     // [rows][rope_dim / 2]
  const float* sin;     // [rows][rope_dim / 2]
  const float* q_norm;  // [padded_dim] or null
  const float* k_norm;
  float eps, scale;  // scale: of the scores, in powers of two (see AttentionArgs)
};

// Attention reduces over absolute positions: each partition of 128 keys has a softmax of its own, and they are merged
// in ascending order. Whether one item runs all partitions of a row or many items share them, the bits agree.
// Scores are logarithms to base 2: q holds the factor log2(e).
constexpr int kPartition = 128;
constexpr float kLog2E = 1.44269504088896341f;

struct AttentionItem {
  int32_t first, tokens;  // of AttentionArgs::order
  int32_t sequence;       // whose block table leads to the keys, in these partitions the same for all tokens
  int32_t kv_head;
  int32_t partition_begin, partition_end;
  int32_t end;   // no token sees keys from here on
  bool partial;  // leave each partition's result to `merge`; else these are all partitions, write the output
};

// Tokens whose partial results are complete.
struct AttentionMerge {
  int32_t first, tokens, kv_head;
};

struct AttentionArgs {
  const StepRows* step;
  const CacheLayout* cache;
  const float* q;
  float* out;  // [rows][heads * head_dim]
  int64_t ldout;
  int layer;
  float softcap;  // scores become tanh(score / softcap) * softcap, in powers of two like them; 0: as they are
  // The rest is the plan's.
  int group = 1, window = 0;
  int max_rows = 0;                // tokens * group of an item at most
  const int32_t* order = nullptr;  // rows of the step
  const int64_t* slots = nullptr;  // of each of `order`: its result of partition p is partial slots[i] + p
  float* partials = nullptr;  // [slots][kv_heads], each [group][padded_dim], then [group] maxima, then [group] sums
};

// The first one that a row sees.
static constexpr int32_t first_partition(int32_t position, int window) {
  return window && position >= window ? (position - window + 1) / kPartition : 0;
}

static constexpr int64_t partial_floats(const CacheLayout& c, int group) { return int64_t(group) * (c.padded_dim + 2); }

// What `attention` needs: a partition's keys and values as floats, and per row its query, output, scores and states.
static constexpr int64_t attention_scratch(const CacheLayout& c, int max_rows) {
  return int64_t(kPartition) * (c.head_dim + c.padded_dim) +
         (int64_t(max_rows) + 16) * (2 * c.padded_dim + kPartition + 32);
}

// The best score of a row, the lowest id of equals; infinite once one of them is no number.
struct Best {
  float score;
  int32_t id;
};
constexpr int kSumBlock = 256;  // weights that are summed before the sums are

struct Kernels {
  const char* name;
  void (*pack)(const PackArgs&, int64_t begin, int64_t end);  // source rows
  void (*gemm)(const GemmArgs&, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
               float* scratch);
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t padded, int64_t n, float eps);
  void (*rope)(const RopeArgs&, int64_t row_begin, int64_t row_end, float* scratch);
  void (*attention)(const AttentionArgs&, const AttentionItem* items, int64_t count, float* scratch);
  void (*merge)(const AttentionArgs&, const AttentionMerge&, float* scratch);
  void (*softcap)(float* x, int64_t n, float cap);  // x = tanh(x / cap) * cap
  void (*silu_mul)(const float* gate, const float* up, float* y, int64_t n);
  void (*unpack_row)(const Packed&, int64_t output, float* y);
  void (*widen)(DType, const void* source, float* y, int64_t n);
  void (*narrow)(DType, const float* x, void* y, int64_t n);
  void (*find_best)(const float* scores, int64_t n, int32_t first, Best& best);
  void (*exp_weights)(float* scores, int64_t n, float best, float temperature);
  void (*block_sums)(const float* weights, int64_t n, double* sums);
  void (*block_maxima)(const float* scores, int64_t n, float* maxima);
  int64_t (*at_least)(const float* x, int64_t n, float bound, int32_t* ids, float* values);
  // Like pack, gemm and unpack_row, for quantised matrices. False: the source has a value that is not finite.
  bool (*quantize)(const PackArgs&, int64_t begin, int64_t end);
  void (*gemm_quantized)(const GemmArgs&, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
                         float* scratch);  // q8 and q4
  void (*gemm_w8a8)(const GemmArgs&, int64_t row_begin, int64_t row_end, int64_t unit_begin, int64_t unit_end,
                    float* scratch);
  void (*encode_row)(const float* x, int64_t k, int64_t row, const RowCodes& to);
  void (*unpack_quantized)(const Packed&, int64_t output, float* y);
  bool rounds_bf16;  // with bf16 weights, gemm takes the activations as bf16 too
  float (*probe_read)(const float* data, int64_t n);
  float (*probe_fma)(int64_t iterations);   // kProbeFlops each
  float (*probe_bf16)(int64_t iterations);  // as many, twice as many with `rounds_bf16`
};
constexpr int kProbeChains = 12, kProbeFlops = 2 * 16 * kProbeChains;

const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
// Builds of some kernels for CPUs that have more, which take the places of AVX-512's.
void exchange_avx512_vnni(Kernels& table);
void exchange_avx512_bf16(Kernels& table);

}  // namespace pagebus
