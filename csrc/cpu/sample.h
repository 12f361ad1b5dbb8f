// Choosing the next token from a row's scores, by the rules of services/worker/sampler.py, on the pool's threads.
#pragma once

#include <span>
#include <vector>

#include "engine.h"

namespace pagebus {

// How to sample one row (Row of services/worker/sampler.py).
struct SampleRow {
  double temperature = 0.0;
  int32_t top_k = 0;
  double top_p = 1.0, min_p = 0.0;
  uint64_t seed = 0, index = 0;
  std::vector<int32_t> banned = {};  // ascending
  float* keep = nullptr;             // where the scores go, as they came; or null

  bool greedy() const { return temperature <= 1e-4 || top_k == 1; }
};

// The weights a row draws from, and their ids in ascending order; without ids, those of all.
class Candidates {
 public:
  // `weights` [n] and the list's memory are the caller's.
  Candidates(const Kernels& kernels, float* weights, int64_t n, float* list, int32_t* list_ids)
      : kernels_(kernels), weights_(weights), n_(n), list_(list), list_ids_(list_ids) {}

  // Each of these keeps a part. top_k is for scores, before they become weights.
  void top_k(int64_t k);
  void top_p(double share);
  void at_least(float bound);

  void become_weights(float best, double temperature) { kernels_.exp_weights(weights_, n_, best, float(temperature)); }
  // The id at which the running sum passes `share` of the total.
  int32_t locate(double share);

 private:
  double sum_blocks();

  const Kernels& kernels_;
  float* weights_;
  int64_t n_;
  const int32_t* ids_ = nullptr;
  float* list_;
  int32_t* list_ids_;
  std::vector<double> sums_;  // running, by blocks
};

// Gives each row of a block its token, or -1 (scores that are no numbers, or nothing left to choose from): a function
// of the row's scores and SampleRow alone, whoever takes the pieces.
class Sampler {
 public:
  explicit Sampler(Engine& engine) : engine_(engine) {}

  // Rows of a block at most, so that the memory of their scores is bounded.
  static int64_t block_rows(int64_t ids);

  // Begins a block of rows with scores for the ids 0 to ids - 1.
  void begin(std::span<const SampleRow> rows, int64_t ids);

  // Takes the scores of ids [first, first + count) of rows [row, row_end), in `tile` [rows][ld], which it may change.
  // The ids that one thread takes must ascend.
  void take(float* tile, int64_t ld, int64_t row, int64_t row_end, int64_t first, int64_t count, int thread);

  // Writes the tokens once all has been taken.
  void finish(int32_t* tokens);

 private:
  int32_t draw(float* scores, float best, const SampleRow& row, int thread) const;

  Engine& engine_;
  std::span<const SampleRow> rows_;
  int64_t ids_ = 0;
  std::vector<std::vector<Best>> best_;  // [threads][rows]
  std::vector<int64_t> place_;           // of a row in scores_, or -1
  Memory scores_;                        // [rows that draw][ids]
  Memory lists_;                         // [threads][ids] values, then ids
};

}  // namespace pagebus
