// How a step's attention is shared out: items of query rows by partitions of keys, in chunks of work for the threads.
#pragma once

#include <vector>

#include "engine.h"

namespace pagebus {

// The sequences of a step, as in StepBatch (services/worker/executor.py).
struct StepSequences {
  const int32_t* query_start;   // [count + 1]
  const int32_t* context_lens;  // [count]
  int64_t count;
  const int32_t* tables;  // [count][table_width]
  int64_t table_width;
};

// One step's attention under one window. Short sequences whose block tables begin alike share items over the partitions
// that those blocks cover, so that each of these is read once. The cut does not change the result.
class AttentionPlan {
 public:
  // Query rows an item may have, and the scratch floats one takes.
  static int max_rows(int group);
  static int64_t scratch_floats(const CacheLayout& cache, int group);

  void build(const StepSequences& step, const CacheLayout& cache, int group, int window, int threads);

  // `args` but for what the plan itself knows.
  void run(Engine& engine, AttentionArgs args) const;

  // Partitions of keys that `run` reads, of all KV heads.
  int64_t partitions() const;

 private:
  // Tokens first .. first + tokens of `order_` over some partitions of the keys of `sequence`, for every KV head.
  struct Unit {
    int32_t first, tokens, sequence, partition_begin, partition_end, end;
    bool partial;
  };
  // A sequence few of whose rows run in this step.
  struct Thin {
    int32_t sequence, first, tokens;  // first: of `order_`
    int32_t blocks, length;
    int32_t shared;  // partitions it has in common with its successor
  };

  int32_t first_partition(int32_t position) const { return pagebus::first_partition(position, window_); }
  int32_t shared_partitions(const StepSequences& step, const Thin& a, const Thin& b, int block_size) const;
  void add_wide(const StepSequences& step, int32_t sequence);
  void sort_thin(const StepSequences& step, int block_size);
  void cover(size_t begin, size_t end, int32_t from);
  void add_shared(size_t begin, size_t end, int32_t from, int32_t to);
  void add_own(const Thin& thin, int32_t from);
  void cut_units(int kv_heads, int threads);
  void place_partials(const StepSequences& step, const CacheLayout& cache);
  int64_t cost(const Unit& unit) const;

  int group_ = 1, window_ = 0, tile_ = 1;
  std::vector<int32_t> order_;  // the step's rows, those that share items beside each other
  std::vector<int64_t> slots_;  // of each of `order_`: its partial result of partition p is slots_[i] + p
  std::vector<Thin> thin_;
  std::vector<Unit> units_;
  std::vector<AttentionItem> items_;
  std::vector<int64_t> chunks_;  // chunk c is items chunks_[c] .. chunks_[c + 1]
  std::vector<AttentionMerge> merges_;
  Memory partials_;
};

}  // namespace pagebus
