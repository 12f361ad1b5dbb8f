#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace pagebus {
namespace {

constexpr int kQueryRows = 96;  // rows of an item at most
constexpr int kThinRows = 32;   // a sequence with more rows is bound by arithmetic, not by reading keys
constexpr int kReadCost = 6;    // what reading a partition costs, in rows attending to it
constexpr int kChunksPerThread = 6;

}  // namespace

int AttentionPlan::max_rows(int group) { return std::max(group, kQueryRows / group * group); }

int64_t AttentionPlan::scratch_floats(const CacheLayout& cache, int group) {
  return attention_scratch(cache, max_rows(group));
}

int64_t AttentionPlan::cost(const Unit& unit) const {
  return int64_t(unit.partition_end - unit.partition_begin) * (unit.tokens * group_ + kReadCost);
}

void AttentionPlan::build(const StepSequences& step, const CacheLayout& cache, int group, int window, int threads) {
  group_ = group;
  window_ = window;
  tile_ = max_rows(group) / group;
  order_.clear();
  thin_.clear();
  units_.clear();
  for (int32_t s = 0; s < step.count; ++s) {
    const int32_t tokens = step.query_start[s + 1] - step.query_start[s], length = step.context_lens[s];
    if (tokens == 1 || (tokens && tokens * group <= kThinRows))
      thin_.push_back({s, 0, tokens, (length + cache.block_size - 1) / cache.block_size, length, 0});
    else if (tokens)
      add_wide(step, s);
  }
  sort_thin(step, cache.block_size);
  for (size_t i = 0, next; i < thin_.size(); i = next) {
    for (next = i + 1; next < thin_.size() && thin_[next - 1].shared; ++next) {
    }
    cover(i, next, 0);
  }
  cut_units(cache.kv_heads, threads);
  place_partials(step, cache);
}

// A sequence with many rows, a tile of them at a time.
void AttentionPlan::add_wide(const StepSequences& step, int32_t s) {
  const int32_t begin = step.query_start[s], tokens = step.query_start[s + 1] - begin;
  const int32_t computed = step.context_lens[s] - tokens;
  for (int32_t token = 0; token < tokens; token += tile_) {
    const int32_t count = std::min(tile_, tokens - token), end = computed + token + count;
    units_.push_back(
        {int32_t(order_.size()), count, s, first_partition(computed + token), (end - 1) / kPartition + 1, end, false});
    for (int32_t i = 0; i < count; ++i) order_.push_back(begin + token + i);
  }
}

// Sequences with the same first blocks beside each other, and how much each has in common with the next.
void AttentionPlan::sort_thin(const StepSequences& step, int block_size) {
  const auto table = [&](const Thin& t) { return step.tables + t.sequence * step.table_width; };
  std::sort(thin_.begin(), thin_.end(), [&](const Thin& a, const Thin& b) {
    const auto [x, y] = std::mismatch(table(a), table(a) + std::min(a.blocks, b.blocks), table(b));
    if (x != table(a) + std::min(a.blocks, b.blocks)) return *x < *y;
    return a.blocks != b.blocks ? a.blocks < b.blocks : a.sequence < b.sequence;
  });
  for (size_t i = 0; i < thin_.size(); ++i) {
    Thin& t = thin_[i];
    t.first = int32_t(order_.size());
    order_.resize(order_.size() + size_t(t.tokens));
    std::iota(order_.end() - t.tokens, order_.end(), step.query_start[t.sequence]);
    if (i + 1 == thin_.size()) break;
    const Thin& next = thin_[i + 1];
    const auto blocks =
        std::mismatch(table(t), table(t) + std::min(t.blocks, next.blocks), table(next)).first - table(t);
    t.shared = int32_t(std::min<int64_t>({blocks * block_size, t.length, next.length}) / kPartition);
  }
}

// Shares out the partitions from `from` on of neighbours that have all those before in common. They form a tree: what
// all have in common first, then each part of them that has more.
void AttentionPlan::cover(size_t begin, size_t end, int32_t from) {
  if (end - begin == 1) return add_own(thin_[begin], from);
  int32_t common = thin_[begin].shared;
  for (size_t i = begin + 1; i + 1 < end; ++i) common = std::min(common, thin_[i].shared);
  if (common > from) add_shared(begin, end, from, common);
  for (size_t i = begin, next; i < end; i = next) {
    for (next = i + 1; next < end && thin_[next - 1].shared > common; ++next) {
    }
    cover(i, next, common);
  }
}

void AttentionPlan::add_shared(size_t begin, size_t end, int32_t from, int32_t to) {
  int32_t lowest = to;
  for (size_t i = begin; i < end; ++i) lowest = std::min(lowest, first_partition(thin_[i].length - thin_[i].tokens));
  from = std::max(from, lowest);
  if (from >= to) return;
  const int32_t first = thin_[begin].first, tokens = thin_[end - 1].first + thin_[end - 1].tokens - first;
  const int32_t tiles = (tokens + tile_ - 1) / tile_;
  for (int32_t i = 0; i < tiles; ++i) {
    const auto at = [&](int32_t tile) { return int32_t(int64_t(tokens) * tile / tiles); };
    units_.push_back({first + at(i), at(i + 1) - at(i), thin_[begin].sequence, from, to, to * kPartition, true});
  }
}

void AttentionPlan::add_own(const Thin& t, int32_t from) {
  const int32_t begin = std::max(from, first_partition(t.length - t.tokens)), end = (t.length - 1) / kPartition + 1;
  if (begin < end) units_.push_back({t.first, t.tokens, t.sequence, begin, end, t.length, from > 0});
}

// Units times KV heads to items, of which those with many partitions are split, and items to chunks of similar cost.
void AttentionPlan::cut_units(int kv_heads, int threads) {
  items_.clear();
  chunks_.assign(1, 0);
  int64_t all = 0, filled = 0;
  for (const Unit& unit : units_) all += cost(unit) * kv_heads;
  const int64_t share = std::max<int64_t>(1, threads == 1 ? all : all / (threads * kChunksPerThread));
  for (Unit& unit : units_) {
    const int32_t partitions = unit.partition_end - unit.partition_begin;
    const auto pieces = int32_t(std::clamp<int64_t>((cost(unit) + share / 2) / share, 1, partitions));
    unit.partial = unit.partial || pieces > 1;
    for (int head = 0; head < kv_heads; ++head)
      for (int32_t i = 0; i < pieces; ++i) {
        const auto at = [&](int32_t piece) { return unit.partition_begin + partitions * piece / pieces; };
        items_.push_back({unit.first, unit.tokens, unit.sequence, head, at(i), at(i + 1), unit.end, unit.partial});
        filled += cost(unit) / pieces;
        if (filled < share) continue;
        chunks_.push_back(int64_t(items_.size()));
        filled = 0;
      }
  }
  if (chunks_.back() != int64_t(items_.size())) chunks_.push_back(int64_t(items_.size()));
}

// A slot for every partition that a row with partial results sees, and who puts them together.
void AttentionPlan::place_partials(const StepSequences& step, const CacheLayout& cache) {
  merges_.clear();
  slots_.assign(order_.size(), -1);
  int64_t slots = 0;
  std::vector<bool> partial(order_.size());
  for (const Unit& unit : units_)
    if (unit.partial) std::fill_n(partial.begin() + unit.first, unit.tokens, true);
  const auto place = [&](int32_t sequence, int32_t first, int32_t tokens) {
    if (!partial[size_t(first)]) return;
    for (int32_t i = first; i < first + tokens; ++i) {
      const int32_t position = step.context_lens[sequence] - (step.query_start[sequence + 1] - order_[size_t(i)]);
      slots_[size_t(i)] = slots - first_partition(position);
      slots += position / kPartition + 1 - first_partition(position);
    }
    for (int head = 0; head < cache.kv_heads; ++head) merges_.push_back({first, tokens, head});
  };
  for (const Thin& t : thin_) place(t.sequence, t.first, t.tokens);
  const int32_t wide = thin_.empty() ? int32_t(order_.size()) : thin_.front().first;
  for (const Unit& unit : units_)
    if (unit.first < wide) place(unit.sequence, unit.first, unit.tokens);
  const int64_t bytes = slots * cache.kv_heads * partial_floats(cache, group_) * 4;
  if (int64_t(partials_.bytes()) < bytes) partials_ = Memory(size_t(bytes), true);
}

int64_t AttentionPlan::partitions() const {
  int64_t sum = 0;
  for (const AttentionItem& item : items_) sum += item.partition_end - item.partition_begin;
  return sum;
}

void AttentionPlan::run(Engine& engine, AttentionArgs args) const {
  args.group = group_;
  args.window = window_;
  args.max_rows = max_rows(group_);
  args.order = order_.data();
  args.slots = slots_.data();
  args.partials = partials_.floats();
  engine.pool().run(int64_t(chunks_.size()) - 1, [&](int64_t i, int thread) {
    engine.kernels().attention(args, items_.data() + chunks_[size_t(i)], chunks_[size_t(i) + 1] - chunks_[size_t(i)],
                               engine.scratch(thread));
  });
  engine.pool().run(int64_t(merges_.size()), [&](int64_t i, int thread) {
    engine.kernels().merge(args, merges_[size_t(i)], engine.scratch(thread));
  });
}

}  // namespace pagebus
