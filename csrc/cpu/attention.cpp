// Paged attention, decode and prefill alike: online softmax (Milakov and Gimelshein, 2018) over tiles of keys,
// partition by partition. The rows of an item are its tokens times the query heads of one KV head, so that those share
// its loads.

#include "convert.h"
#include "isa.h"
#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr float kNothing = -__builtin_inff();
constexpr int kGroups = kTile / kLanes;

// A softmax under way for some rows: outputs [rows][padded_dim] relative to the maxima, and sums.
struct Softmax {
  float *out, *maximum, *sum;

  PAGEBUS_INLINE void clear(int64_t rows, int dim) const {
    for (int64_t i = 0; i < rows * dim; ++i) out[i] = 0.0f;
    for (int64_t r = 0; r < rows; ++r) maximum[r] = kNothing, sum[r] = 0.0f;
  }
};

// Where a tile's keys and values lie: by groups of sixteen tokens.
template <class T>
struct Tile {
  const T* keys[kGroups];    // [head_dim], ldk apart, sixteen tokens each
  const T* values[kGroups];  // [sixteen][padded_dim]
  int64_t ldk;
};

struct Work {
  const AttentionArgs& args;
  const AttentionItem& item;
  const CacheLayout& cache;
  const float* q;  // [rows][padded_dim]
  int64_t rows;
  int last;         // position of the last row
  int lowest;       // first key any row sees
  float* staged_k;  // [head_dim][kTile]
  float* staged_v;  // [kTile][padded_dim]
  float* scores;    // [kBlockRows][kTile]
  Softmax part, whole;

  PAGEBUS_INLINE const char* head(int block) const {
    return cache.kv + block * cache.block_bytes + args.layer * cache.layer_bytes + item.kv_head * cache.head_bytes;
  }
  PAGEBUS_INLINE int block_of(int position) const {
    return args.step->tables[item.sequence * args.step->table_width + position / cache.block_size];
  }
};

// Adds keys [from, to) of the tile to R rows from `row` on, whose scores are ready and exponentiated against alpha.
template <class B, int R, int NV>
PAGEBUS_INLINE void add_values_columns(const Work& w, const Tile<typename B::T>& tile, int64_t row, int column,
                                       int from, int to, const float* alpha, const float* p) {
  const int dim = w.cache.padded_dim;
  V acc[R][NV];
  float* out = w.part.out + row * dim + column;
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = mul(load(out + r * dim + v * kLanes), set1(alpha[r]));
  while (from < to) {
    const int g = from / kLanes;
    int end = (g + 1) * kLanes;
    while (end < to && tile.values[end / kLanes] == tile.values[g] + (end - g * kLanes) * dim) end += kLanes;
    if (end > to) end = to;
    const typename B::T* values[NV];
    for (int v = 0; v < NV; ++v) values[v] = tile.values[g] + (from - g * kLanes) * dim + column + v * kLanes;
    multiply<B, R, NV>(end - from, p + from, kTile, values, dim, acc);
    from = end;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(out + r * dim + v * kLanes, acc[r][v]);
}

template <class B, int R>
PAGEBUS_INLINE void add_values(const Work& w, const Tile<typename B::T>& tile, int64_t row, int from, int to,
                               const float* alpha, const float* p) {
  constexpr int NV = columns<R>;
  int column = 0;
  for (; column + NV * kLanes <= w.cache.padded_dim; column += NV * kLanes)
    add_values_columns<B, R, NV>(w, tile, row, column, from, to, alpha, p);
  if constexpr (NV > 1)
    for (; column < w.cache.padded_dim; column += kLanes)
      add_values_columns<B, R, 1>(w, tile, row, column, from, to, alpha, p);
}

template <class B, int R, int NV>
PAGEBUS_INLINE void score_groups(const Work& w, const Tile<typename B::T>& tile, int64_t row, int group) {
  V acc[R][NV];
  for (auto& line : acc)
    for (V& x : line) x = zero();
  const int dim = w.cache.padded_dim;
  multiply<B, R, NV>(w.cache.head_dim, w.q + row * dim, dim, tile.keys + group, tile.ldk, acc);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(w.scores + r * kTile + (group + v) * kLanes, acc[r][v]);
}

// Group g of a row's scores, `other` where no key of [from, to) is.
PAGEBUS_INLINE V seen_scores(const float* scores, int g, int from, int to, V other) {
  const V all = load(scores + g * kLanes);
  if (from <= g * kLanes && to >= (g + 1) * kLanes) return all;
  return where_lanes(from - g * kLanes, to - g * kLanes, all, other);
}

PAGEBUS_INLINE float highest(const float* scores, int from, int to) {
  V top = set1(kNothing);
  for (int g = from / kLanes; g * kLanes < to; ++g) top = max(top, seen_scores(scores, g, from, to, set1(kNothing)));
  return reduce_max(top);
}

// Turns the scores of a row's keys [from, to) into weights e^(score - maximum); returns their sum.
PAGEBUS_INLINE float exponentiate(float* scores, float maximum, int from, int to) {
  V total = zero();
  for (int g = from / kLanes; g * kLanes < to; ++g) {
    const V p = exp(sub(seen_scores(scores, g, from, to, set1(kNothing)), set1(maximum)));
    store(scores + g * kLanes, p);
    total = add(total, p);
  }
  return reduce_add(total);
}

// R rows from `row` on against one tile that starts at position `start`.
template <class B, int R>
void attend_rows(const Work& w, const Tile<typename B::T>& tile, int64_t row, int start) {
  int from[R], to[R], lo = kTile, hi = 0;
  bool same = true;
  for (int r = 0; r < R; ++r) {
    const int position = w.item.position + int(row + r) / w.args.group;
    const int first = w.args.window && position - w.args.window + 1 > start ? position - w.args.window + 1 - start : 0;
    from[r] = first < kTile ? first : kTile;
    to[r] = position + 1 - start < kTile ? position + 1 - start : kTile;
    if (to[r] < from[r]) to[r] = from[r];
    if (from[r] < to[r]) lo = from[r] < lo ? from[r] : lo, hi = to[r] > hi ? to[r] : hi;
    same = same && from[r] == from[0] && to[r] == to[0];
  }
  if (lo >= hi) return;
  constexpr int NV = columns<R>;
  int group = lo / kLanes;
  for (; (group + NV - 1) * kLanes < hi && group + NV <= kGroups; group += NV)
    score_groups<B, R, NV>(w, tile, row, group);
  if constexpr (NV > 1)
    for (; group * kLanes < hi; ++group) score_groups<B, R, 1>(w, tile, row, group);

  float change[kLanes] = {}, alpha[kLanes], maxima[R];
  for (int r = 0; r < R; ++r) {
    if (from[r] == to[r]) continue;
    const float old = w.part.maximum[row + r], top = highest(w.scores + r * kTile, from[r], to[r]);
    maxima[r] = old < top ? top : old;
    change[r] = old - maxima[r];
  }
  store(alpha, exp(load(change)));
  for (int r = 0; r < R; ++r) {
    if (from[r] == to[r]) continue;
    const float sum = exponentiate(w.scores + r * kTile, maxima[r], from[r], to[r]);
    w.part.maximum[row + r] = maxima[r];
    w.part.sum[row + r] = w.part.sum[row + r] * alpha[r] + sum;
  }
  if (same) return add_values<B, R>(w, tile, row, lo, hi, alpha, w.scores);
  for (int r = 0; r < R; ++r)
    if (from[r] < to[r]) add_values<B, 1>(w, tile, row + r, from[r], to[r], alpha + r, w.scores + r * kTile);
}

template <class B>
void attend_tile(const Work& w, const Tile<typename B::T>& tile, int start) {
  const int64_t blocks = (w.rows + kBlockRows - 1) / kBlockRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t first = w.rows * i / blocks, last = w.rows * (i + 1) / blocks;
    with_rows<kBlockRows>(int(last - first), [&]<int R>() { attend_rows<B, R>(w, tile, first, start); });
  }
}

// The tile as it lies in the cache: blocks of a multiple of sixteen tokens only.
template <class B>
void attend_in_place(const Work& w, int start, int end) {
  using T = typename B::T;
  Tile<T> tile;
  tile.ldk = w.cache.block_size;
  for (int g = 0; g < kGroups; ++g) {
    const int position = start + g * kLanes;
    if (position >= end) {  // never read, but must be a pointer
      tile.keys[g] = tile.keys[0];
      tile.values[g] = tile.values[0];
      continue;
    }
    const char* head = w.head(w.block_of(position));
    const int offset = position % w.cache.block_size;
    tile.keys[g] = reinterpret_cast<const T*>(head) + offset;
    tile.values[g] = reinterpret_cast<const T*>(head + w.cache.value_offset) + offset * w.cache.padded_dim;
  }
  attend_tile<B>(w, tile, start);
}

// The tile copied out as floats: for many rows, or for blocks that are no multiple of sixteen tokens.
template <class B>
void attend_staged(const Work& w, int start, int end) {
  const int dim = w.cache.head_dim, padded = w.cache.padded_dim, size = w.cache.block_size;
  const bool whole = size % kLanes == 0;
  for (int t = 0; t < kTile && start + t < end; t += whole ? kLanes : 1) {
    const char* head = w.head(w.block_of(start + t));
    const int offset = (start + t) % size;
    const auto* keys = reinterpret_cast<const typename B::T*>(head) + offset;
    const auto* values = reinterpret_cast<const typename B::T*>(head + w.cache.value_offset) + offset * padded;
    for (int d = 0; d < dim; ++d) {
      if (whole)
        store(w.staged_k + d * kTile + t, B::first(keys + d * size));
      else
        w.staged_k[d * kTile + t] = widen_one(w.cache.dtype, keys, d * size);
    }
    for (int i = 0; i < (whole ? kLanes : 1) * padded; i += kLanes)
      store(w.staged_v + t * padded + i, B::first(values + i));
  }
  Tile<float> tile;
  tile.ldk = kTile;
  for (int g = 0; g < kGroups; ++g) {
    tile.keys[g] = w.staged_k + g * kLanes;
    tile.values[g] = w.staged_v + g * kLanes * padded;
  }
  attend_tile<ReadF32>(w, tile, start);
}

// whole += part, for rows [0, rows): the one place where partitions meet.
PAGEBUS_INLINE void merge_rows(const Softmax& whole, const Softmax& part, int64_t rows, int dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.0f && part.maximum[r] == kNothing) continue;
    const float top = whole.maximum[r] < part.maximum[r] ? part.maximum[r] : whole.maximum[r];
    float change[kLanes] = {whole.maximum[r] - top, part.maximum[r] - top}, factor[kLanes];
    store(factor, exp(load(change)));
    whole.sum[r] = whole.sum[r] * factor[0] + part.sum[r] * factor[1];
    whole.maximum[r] = top;
    for (int i = 0; i < dim; i += kLanes) {
      float* out = whole.out + r * dim + i;
      store(out, fma(load(part.out + r * dim + i), set1(factor[1]), mul(load(out), set1(factor[0]))));
    }
  }
}

PAGEBUS_INLINE void write_rows(const AttentionArgs& a, const AttentionItem& item, const Softmax& whole) {
  const int dim = a.cache->head_dim;
  for (int64_t r = 0; r < int64_t(item.tokens) * a.group; ++r) {
    float* out = a.out + (item.row + r / a.group) * a.ldout + (item.kv_head * a.group + r % a.group) * dim;
    const V scale = set1(1.0f / whole.sum[r]);
    for (int i = 0; i < dim; i += kLanes)
      store_columns(out + i, mul(load(whole.out + r * a.cache->padded_dim + i), scale), dim - i);
  }
}

PAGEBUS_INLINE Softmax partial(const AttentionArgs& a, int64_t index) {
  float* out = a.partials + index * a.max_rows * (a.cache->padded_dim + 2);
  float* maximum = out + int64_t(a.max_rows) * a.cache->padded_dim;
  return {out, maximum, maximum + a.max_rows};
}

template <class B>
void attention_run(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  const CacheLayout& c = *a.cache;
  const int64_t dim = c.padded_dim, max_rows = a.max_rows;
  float* staged_k = scratch;
  float* staged_v = staged_k + c.head_dim * kTile;
  float* scores = staged_v + kTile * dim;
  float* out = scores + kLanes * kTile;
  float* lines = out + 2 * max_rows * dim;
  Work w{a,
         item,
         c,
         a.q + (item.kv_head * a.step->rows + item.row) * a.group * dim,
         int64_t(item.tokens) * a.group,
         item.position + item.tokens - 1,
         0,
         staged_k,
         staged_v,
         scores,
         {out, lines, lines + max_rows},
         {out + max_rows * dim, lines + 2 * max_rows, lines + 3 * max_rows}};
  if (a.window && item.position - a.window + 1 > 0) w.lowest = item.position - a.window + 1;
  const bool staged = c.block_size % kLanes || w.rows > 2 * kBlockRows;

  if (item.partial < 0) w.whole.clear(w.rows, int(dim));
  for (int p = item.partition_begin; p < item.partition_end; ++p) {
    if (item.partial >= 0) w.part = partial(a, item.partial + p - item.partition_begin);
    w.part.clear(w.rows, int(dim));
    for (int start = p * kPartition; start < (p + 1) * kPartition && start <= w.last; start += kTile) {
      if (start + kTile <= w.lowest) continue;
      if (staged)
        attend_staged<B>(w, start, w.last + 1);
      else
        attend_in_place<B>(w, start, w.last + 1);
    }
    if (item.partial < 0) merge_rows(w.whole, w.part, w.rows, int(dim));
  }
  if (item.partial < 0) write_rows(a, item, w.whole);
}

}  // namespace

void attention(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  switch (a.cache->dtype) {
    case DType::f32:
      return attention_run<ReadF32>(a, item, scratch);
    case DType::bf16:
      return attention_run<ReadBf16>(a, item, scratch);
    case DType::f16:
      return attention_run<ReadF16>(a, item, scratch);
  }
}

// Puts together the partial results of an item that was split: `partial` is the first, the partitions are all of them.
void merge(const AttentionArgs& a, const AttentionItem& item, float* scratch) {
  const int64_t rows = int64_t(item.tokens) * a.group;
  float* lines = scratch + a.max_rows * a.cache->padded_dim;
  const Softmax whole{scratch, lines, lines + a.max_rows};
  whole.clear(rows, a.cache->padded_dim);
  for (int p = item.partition_begin; p < item.partition_end; ++p)
    merge_rows(whole, partial(a, item.partial + p - item.partition_begin), rows, a.cache->padded_dim);
  write_rows(a, item, whole);
}

}  // namespace pagebus::PAGEBUS_ISA
