// Paged attention, decode and prefill alike: a softmax per partition of keys, merged one after the other as in online
// softmax (Milakov and Gimelshein, 2018). The rows of an item are its tokens times the query heads of one KV head, so
// that those share its loads.

#include <cstring>

#include "attention_product.h"
#include "convert.h"
#include "isa.h"
#include "softmax.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

constexpr int kGroups = kPartition / kLanes;
constexpr int64_t kScores = kPartition + kLanes;  // from row to row: not a power of two, which would share cache sets

// Where a partition's keys and values lie, by groups of sixteen tokens.
template <class T>
struct Tile {
  int groups;
  const T* keys[kGroups];    // [head_dim][sixteen]
  const T* values[kGroups];  // [sixteen tokens], value_step apart; sixteen columns each, column_step apart
  int64_t value_step, column_step;
};

// Rows that pass through the registers together, and the keys of the partition they see: some of them, all of them.
struct Block {
  int32_t row, rows, lo, hi, common_lo, common_hi;
};

// An item's rows in scratch memory. What they saw so far is `out` over `sum`, relative to 2^maximum.
struct Rows {
  int64_t count, dim, padded;
  float *q, *out;                               // [count][padded]
  float* scores;                                // [count][kScores], later weights
  float *maximum, *sum;                         // [count]
  float *part_maximum, *part_sum, *keep, *add;  // of the partition, and the factors of the merge
  int32_t *from, *to;                           // keys of the partition that each row sees
  Block* blocks;
  int block_count;
  float *staged_k, *staged_v;
};

Rows place_rows(const AttentionArgs& a, float* scratch) {
  const int64_t dim = a.cache->head_dim, padded = a.cache->padded_dim;
  const int64_t n = (a.max_rows + kLanes - 1) / kLanes * kLanes;
  Rows w{};
  w.dim = dim;
  w.padded = padded;
  const auto take = [&](int64_t floats) {
    float* at = scratch;
    scratch += floats;
    return at;
  };
  w.staged_k = take(kPartition * dim);
  w.staged_v = take(kPartition * padded);
  w.q = take(n * padded);
  w.out = take(n * padded);
  w.scores = take(n * kScores);
  float** const lines[] = {&w.maximum, &w.sum, &w.part_maximum, &w.part_sum, &w.keep, &w.add};
  for (float** line : lines) *line = take(n);
  w.from = reinterpret_cast<int32_t*>(take(n));
  w.to = reinterpret_cast<int32_t*>(take(n));
  w.blocks = reinterpret_cast<Block*>(scratch);
  return w;
}

void start_item(const AttentionArgs& a, const AttentionItem& item, Rows& w) {
  w.count = int64_t(item.tokens) * a.group;
  const int64_t bytes = a.group * w.padded * 4;
  for (int32_t i = 0; i < item.tokens; ++i) {
    const float* q = a.q + (item.kv_head * a.step->rows + a.order[item.first + i]) * a.group * w.padded;
    std::memcpy(w.q + i * a.group * w.padded, q, size_t(bytes));
  }
  for (int64_t r = 0; r < w.count; r += kLanes) {
    store(w.maximum + r, set1(kNothing));
    store(w.sum + r, zero());
  }
  std::memset(w.out, 0, size_t(w.count * w.padded) * 4);
}

int32_t clamp_key(int32_t key) { return key < 0 ? 0 : key < kPartition ? key : kPartition; }

// Which keys of the partition each row sees; the blocks of those that see any.
void look(const AttentionArgs& a, const AttentionItem& item, int32_t start, Rows& w) {
  for (int32_t i = 0; i < item.tokens; ++i) {
    const int32_t position = a.step->positions[a.order[item.first + i]];
    const int32_t from = a.window ? clamp_key(position - a.window + 1 - start) : 0;
    const int32_t to = clamp_key(position + 1 - start);
    for (int g = 0; g < a.group; ++g) {
      w.from[i * a.group + g] = from < to ? from : 0;
      w.to[i * a.group + g] = from < to ? to : 0;
    }
  }
  w.block_count = 0;
  const int64_t blocks = (w.count + kBlockRows - 1) / kBlockRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const auto first = int32_t(w.count * i / blocks), end = int32_t(w.count * (i + 1) / blocks);
    Block b{first, end - first, kPartition, 0, 0, kPartition};
    for (int32_t r = first; r < end; ++r) {
      if (w.from[r] == w.to[r]) continue;
      b.lo = w.from[r] < b.lo ? w.from[r] : b.lo;
      b.hi = w.to[r] > b.hi ? w.to[r] : b.hi;
      b.common_lo = w.from[r] > b.common_lo ? w.from[r] : b.common_lo;
      b.common_hi = w.to[r] < b.common_hi ? w.to[r] : b.common_hi;
    }
    if (b.lo < b.hi) w.blocks[w.block_count++] = b;
  }
}

template <class B, int R, int NV>
PAGEBUS_INLINE void score_groups(const Rows& w, const Tile<typename B::T>& tile, int64_t row, int group, Ahead& ahead) {
  V acc[R][NV];
  unrolled<R * NV>(PAGEBUS_EACH(i) { acc[i.value / NV][i.value % NV] = zero(); });
  accumulate_streams<B, R, NV>(w.dim, w.q + row * w.padded, w.padded, tile.keys + group, kLanes, acc, ahead);
  float* scores = w.scores + row * kScores + group * kLanes;
  unrolled<R * NV>(PAGEBUS_EACH(i) {
    store(scores + i.value / NV * kScores + i.value % NV * kLanes, acc[i.value / NV][i.value % NV]);
  });
}

// Scores of all rows, `width` groups of keys at a time, so that these stay in the first-level cache.
template <class B>
void score(const Rows& w, const Tile<typename B::T>& tile, int width, Ahead& ahead) {
  for (int first = 0; first < tile.groups; first += width)
    for (const Block* b = w.blocks; b < w.blocks + w.block_count; ++b)
      with_rows<kBlockRows>(b->rows, [&]<int R>() {
        constexpr int NV = streams<R>;
        int group = first < b->lo / kLanes ? b->lo / kLanes : first;
        int end = (b->hi + kLanes - 1) / kLanes;
        end = end < first + width ? end : first + width;
        for (; group + NV <= end; group += NV) score_groups<B, R, NV>(w, tile, b->row, group, ahead);
        if constexpr (NV > 1)
          for (; group < end; ++group) score_groups<B, R, 1>(w, tile, b->row, group, ahead);
      });
}

// sums[r] += weights of rows row + r times the values of keys [from, to), for NV sixteens of columns.
template <class B, int R, int NV>
PAGEBUS_INLINE void add_values(const Rows& w, const Tile<typename B::T>& tile, int64_t row, int column, int from,
                               int to, float* sums, Ahead& ahead) {
  V acc[R][NV];
  unrolled<R * NV>(PAGEBUS_EACH(i) { acc[i.value / NV][i.value % NV] = load(sums + i.value * kLanes); });
  while (from < to) {
    const int g = from / kLanes;
    int end = (g + 1) * kLanes;
    while (end < to && tile.values[end / kLanes] == tile.values[g] + (end - g * kLanes) * tile.value_step)
      end += kLanes;
    end = end < to ? end : to;
    const typename B::T* values[NV];
    for (int v = 0; v < NV; ++v)
      values[v] = tile.values[g] + (from - g * kLanes) * tile.value_step + (column + v) * tile.column_step;
    accumulate_streams<B, R, NV>(end - from, w.scores + row * kScores + from, kScores, values, tile.value_step, acc,
                                 ahead);
    from = end;
  }
  unrolled<R * NV>(PAGEBUS_EACH(i) { store(sums + i.value * kLanes, acc[i.value / NV][i.value % NV]); });
}

// The partition's share of a block's outputs, merged into them. Keys that only some rows see are added row by row, as
// what the others must not see may hold anything.
template <class B, int R, int NV>
PAGEBUS_INLINE void attend_columns(const Rows& w, const Tile<typename B::T>& tile, const Block& b, int column,
                                   Ahead& ahead) {
  alignas(64) float sums[R * NV * kLanes];
  for (int i = 0; i < R * NV; ++i) store(sums + i * kLanes, zero());
  const bool common = b.common_lo < b.common_hi;
  const auto fringe = [&](int from, int to) {
    for (int r = 0; r < R; ++r) {
      const int first = w.from[b.row + r] > from ? w.from[b.row + r] : from;
      const int end = w.to[b.row + r] < to ? w.to[b.row + r] : to;
      if (first < end) add_values<B, 1, NV>(w, tile, b.row + r, column, first, end, sums + r * NV * kLanes, ahead);
    }
  };
  if (b.lo < b.common_lo || !common) fringe(b.lo, common ? b.common_lo : b.hi);
  if (common) {
    add_values<B, R, NV>(w, tile, b.row, column, b.common_lo, b.common_hi, sums, ahead);
    if (b.common_hi < b.hi) fringe(b.common_hi, b.hi);
  }
  for (int r = 0; r < R; ++r) {
    const int64_t row = b.row + r;
    if (w.from[row] == w.to[row]) continue;
    const V keep = set1(w.keep[row]), factor = set1(w.add[row]);
    for (int v = 0; v < NV; ++v) {
      float* out = w.out + row * w.padded + (column + v) * kLanes;
      store(out, fma(load(sums + (r * NV + v) * kLanes), factor, mul(load(out), keep)));
    }
  }
}

template <class B>
void attend(const Rows& w, const Tile<typename B::T>& tile, int width, Ahead& ahead) {
  const int columns = int(w.padded / kLanes);
  for (int first = 0; first < columns; first += width)
    for (const Block* b = w.blocks; b < w.blocks + w.block_count; ++b)
      with_rows<kBlockRows>(b->rows, [&]<int R>() {
        constexpr int NV = streams<R>;
        const int end = first + width < columns ? first + width : columns;
        int column = first;
        for (; column + NV <= end; column += NV) attend_columns<B, R, NV>(w, tile, *b, column, ahead);
        if constexpr (NV > 1)
          for (; column < end; ++column) attend_columns<B, R, 1>(w, tile, *b, column, ahead);
      });
}

// Factors of the running state and of a partition of the given maximum and sum, and the new state; sixteen rows.
PAGEBUS_INLINE void merge_states(float* maximum, float* sum, V part_maximum, V part_sum, float* keep, float* add_) {
  const V old = load(maximum), top = max(old, part_maximum);
  const V kept = exp2_falling(sub(old, top)), added = exp2_falling(sub(part_maximum, top));
  store(sum, add(mul(load(sum), kept), mul(part_sum, added)));
  store(maximum, top);
  store(keep, kept);
  store(add_, added);
}

// Scores to weights, and the states of the rows.
void soften(const AttentionArgs& a, Rows& w) {
  for (int64_t r = 0; r < w.count; r += kLanes) {
    store(w.part_maximum + r, set1(kNothing));
    store(w.part_sum + r, zero());
  }
  for (const Block* b = w.blocks; b < w.blocks + w.block_count; ++b) {
    for (int64_t r = b->row; r < b->row + b->rows; ++r) {
      if (a.softcap != 0.0f) cap_scores(w.scores + r * kScores, a.softcap, w.from[r], w.to[r]);
      w.part_maximum[r] = highest(w.scores + r * kScores, w.from[r], w.to[r]);
    }
    for (int64_t r = b->row; r < b->row + b->rows; ++r)
      if (w.from[r] < w.to[r])
        w.part_sum[r] = exponentiate(w.scores + r * kScores, w.part_maximum[r], w.from[r], w.to[r]);
  }
  for (int64_t r = 0; r < w.count; r += kLanes)
    merge_states(w.maximum + r, w.sum + r, load(w.part_maximum + r), load(w.part_sum + r), w.keep + r, w.add + r);
}

float* partial(const AttentionArgs& a, int64_t i, int32_t partition, int32_t kv_head) {
  return a.partials + ((a.slots[i] + partition) * a.cache->kv_heads + kv_head) * partial_floats(*a.cache, a.group);
}

// Leaves what the rows saw of one partition to `merge`, and starts them anew.
void leave_partials(const AttentionArgs& a, const AttentionItem& item, int32_t partition, Rows& w) {
  for (int32_t i = 0; i < item.tokens; ++i) {
    const int64_t row = int64_t(i) * a.group;
    if (w.from[row] == w.to[row]) continue;
    float* to = partial(a, item.first + i, partition, item.kv_head);
    std::memcpy(to, w.out + row * w.padded, size_t(a.group * w.padded) * 4);
    std::memcpy(to + a.group * w.padded, w.maximum + row, size_t(a.group) * 4);
    std::memcpy(to + a.group * (w.padded + 1), w.sum + row, size_t(a.group) * 4);
  }
  for (int64_t r = 0; r < w.count; r += kLanes) {
    store(w.maximum + r, set1(kNothing));
    store(w.sum + r, zero());
  }
  std::memset(w.out, 0, size_t(w.count * w.padded) * 4);
}

PAGEBUS_INLINE void write_rows(const AttentionArgs& a, int32_t first, int32_t tokens, int32_t kv_head, const Rows& w) {
  for (int64_t r = 0; r < int64_t(tokens) * a.group; ++r) {
    float* out = a.out + a.order[first + r / a.group] * a.ldout + (kv_head * a.group + r % a.group) * w.dim;
    const V scale = set1(1.0f / w.sum[r]);
    for (int64_t i = 0; i < w.dim; i += kLanes)
      store_columns(out + i, mul(load(w.out + r * w.padded + i), scale), w.dim - i);
  }
}

const char* head_of(const AttentionArgs& a, const AttentionItem& item, int32_t block) {
  const CacheLayout& c = *a.cache;
  return c.kv + block * c.block_bytes + a.layer * c.layer_bytes + item.kv_head * c.head_bytes;
}

// The partition as it lies in the cache: blocks of a multiple of sixteen tokens only.
template <class T>
Tile<T> find(const AttentionArgs& a, const AttentionItem& item, int32_t partition) {
  const CacheLayout& c = *a.cache;
  const int32_t start = partition * kPartition;
  const int32_t tokens = item.end - start < kPartition ? item.end - start : kPartition;
  Tile<T> tile;
  tile.groups = (tokens + kLanes - 1) / kLanes;
  tile.value_step = c.padded_dim;
  tile.column_step = kLanes;
  const int32_t* block = a.step->tables + item.sequence * a.step->table_width + start / c.block_size;
  int32_t offset = start % c.block_size;
  for (int g = 0; g < tile.groups; ++g) {
    const char* head = head_of(a, item, *block);
    tile.keys[g] = reinterpret_cast<const T*>(head) + offset * c.head_dim;
    tile.values[g] = reinterpret_cast<const T*>(head + c.value_offset) + offset * c.padded_dim;
    offset += kLanes;
    if (offset == c.block_size) offset = 0, ++block;
  }
  return tile;
}

template <class T>
Ahead ahead_of(const Tile<T>& tile, const Rows& w) {
  Ahead ahead;
  for (int g = 0; g < tile.groups; ++g) ahead.add(tile.keys[g], w.dim * kLanes * int64_t(sizeof(T)));
  for (int g = 0; g < tile.groups; ++g) ahead.add(tile.values[g], w.padded * kLanes * int64_t(sizeof(T)));
  return ahead;
}

Tile<float> staged_tile(const Rows& w, int groups) {
  Tile<float> tile;
  tile.groups = groups;
  tile.value_step = kLanes;
  tile.column_step = kPartition * kLanes;
  for (int g = 0; g < groups; ++g) {
    tile.keys[g] = w.staged_k + g * w.dim * kLanes;
    tile.values[g] = w.staged_v + g * kLanes * kLanes;
  }
  return tile;
}

// The partition copied out as floats, for many rows.
template <class B>
Tile<float> stage(const Tile<typename B::T>& tile, const Rows& w) {
  for (int g = 0; g < tile.groups; ++g) {
    for (int64_t i = 0; i < w.dim * kLanes; i += kLanes)
      store(w.staged_k + g * w.dim * kLanes + i, B::first(tile.keys[g] + i));
    for (int64_t t = 0; t < kLanes; ++t)
      for (int64_t i = 0; i < w.padded; i += kLanes)
        store(w.staged_v + i * kPartition + (g * kLanes + t) * kLanes, B::first(tile.values[g] + t * w.padded + i));
  }
  return staged_tile(w, tile.groups);
}

// The same for blocks of any size, token by token.
template <class B>
Tile<float> stage_tokens(const AttentionArgs& a, const AttentionItem& item, int32_t partition, const Rows& w) {
  const CacheLayout& c = *a.cache;
  const int32_t start = partition * kPartition;
  const int32_t tokens = item.end - start < kPartition ? item.end - start : kPartition;
  for (int32_t t = 0; t < tokens; ++t) {
    const int32_t block = (start + t) / c.block_size, offset = (start + t) % c.block_size;
    const char* head = head_of(a, item, a.step->tables[item.sequence * a.step->table_width + block]);
    const auto* values = reinterpret_cast<const typename B::T*>(head + c.value_offset) + offset * w.padded;
    for (int64_t d = 0; d < w.dim; ++d)
      w.staged_k[(t / kLanes * w.dim + d) * kLanes + t % kLanes] = widen_one(c.dtype, head, d * c.key_lanes + offset);
    for (int64_t i = 0; i < w.padded; i += kLanes)
      store(w.staged_v + i * kPartition + t * kLanes, B::first(values + i));
  }
  return staged_tile(w, (tokens + kLanes - 1) / kLanes);
}

template <class B>
void attend_partition(const AttentionArgs& a, const Tile<typename B::T>& tile, int width, Rows& w, Ahead& ahead) {
  score<B>(w, tile, width, ahead);
  soften(a, w);
  attend<B>(w, tile, width, ahead);
}

// Runs items one after the other; while one partition is worked on, the memory brings the next.
template <class B>
void run_items(const AttentionArgs& a, const AttentionItem* items, int64_t count, float* scratch) {
  using T = typename B::T;
  Rows w = place_rows(a, scratch);
  const bool in_groups = a.cache->block_size % kLanes == 0;
  Tile<T> next{};
  if (in_groups && count) next = find<T>(a, items[0], items[0].partition_begin);
  for (int64_t i = 0; i < count; ++i) {
    const AttentionItem& item = items[i];
    start_item(a, item, w);
    for (int32_t p = item.partition_begin; p < item.partition_end; ++p) {
      const Tile<T> tile = next;
      Ahead ahead;
      if (in_groups && (p + 1 < item.partition_end || i + 1 < count)) {
        const bool same = p + 1 < item.partition_end;
        next = find<T>(a, same ? item : items[i + 1], same ? p + 1 : items[i + 1].partition_begin);
        ahead = ahead_of(next, w);
      }
      look(a, item, p * kPartition, w);
      if (!in_groups)
        attend_partition<ReadF32>(a, stage_tokens<B>(a, item, p, w), kWide, w, ahead);
      else if (w.count > 2 * kBlockRows)
        attend_partition<ReadF32>(a, stage<B>(tile, w), kWide, w, ahead);
      else
        attend_partition<B>(a, tile, 4, w, ahead);
      if (item.partial) leave_partials(a, item, p, w);
    }
    if (!item.partial) write_rows(a, item.first, item.tokens, item.kv_head, w);
  }
}

}  // namespace

void attention(const AttentionArgs& a, const AttentionItem* items, int64_t count, float* scratch) {
  switch (a.cache->dtype) {
    case DType::f32:
      return run_items<ReadF32>(a, items, count, scratch);
    case DType::bf16:
      return run_items<ReadBf16>(a, items, count, scratch);
    case DType::f16:
      return run_items<ReadF16>(a, items, count, scratch);
  }
}

// One token after the other: a partition's state is merged into the sum of those before just as `attention` does it.
void merge(const AttentionArgs& a, const AttentionMerge& m, float* scratch) {
  Rows w = place_rows(a, scratch);
  for (int32_t i = m.first; i < m.first + m.tokens; ++i) {
    const int32_t position = a.step->positions[a.order[i]];
    start_item(a, {i, 1, 0, m.kv_head, 0, 0, 0, true}, w);
    for (int32_t p = first_partition(position, a.window); p <= position / kPartition; ++p) {
      const float* from = partial(a, i, p, m.kv_head);
      std::memcpy(w.part_maximum, from + a.group * w.padded, size_t(a.group) * 4);
      std::memcpy(w.part_sum, from + a.group * (w.padded + 1), size_t(a.group) * 4);
      for (int64_t r = 0; r < a.group; r += kLanes)
        merge_states(w.maximum + r, w.sum + r, load(w.part_maximum + r), load(w.part_sum + r), w.keep + r, w.add + r);
      for (int64_t r = 0; r < a.group; ++r)
        for (int64_t c = 0; c < w.padded; c += kLanes) {
          float* out = w.out + r * w.padded + c;
          store(out, fma(load(from + r * w.padded + c), set1(w.add[r]), mul(load(out), set1(w.keep[r]))));
        }
    }
    write_rows(a, i, 1, m.kv_head, w);
  }
}

}  // namespace pagebus::PAGEBUS_ISA
