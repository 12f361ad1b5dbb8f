// What sampling does to a whole row of scores, at vector speed.
#include <limits>

#include "isa.h"
#include "product.h"

namespace pagebus::PAGEBUS_ISA {
namespace {

void better_of(const float* scores, int64_t n, int32_t first, Best& best) {
  for (int64_t i = 0; i < n; ++i) {
    if (scores[i] <= best.score) continue;
    best = {scores[i] == scores[i] ? scores[i] : std::numeric_limits<float>::infinity(), first + int32_t(i)};
  }
}

// Sixteen chains, then in order: the same sum however the compiler vectorises it.
double sum(const float* weights, int64_t n) {
  double chains[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) chains[lane] += double(weights[i + lane]);
  for (; i < n; ++i) chains[i % kLanes] += double(weights[i]);
  double all = 0;
  for (double chain : chains) all += chain;
  return all;
}

int64_t blocks(int64_t n) { return (n + kSumBlock - 1) / kSumBlock; }

int64_t block_length(int64_t n, int64_t block) {
  const int64_t left = n - block * kSumBlock;
  return left < kSumBlock ? left : kSumBlock;
}

}  // namespace

// Goes on with `best` over the scores of ids first ..., which must be higher than those before.
void find_best(const float* scores, int64_t n, int32_t first, Best& best) {
  int64_t i = 0;
  for (V bound = set1(best.score); i + 2 * kLanes <= n; i += 2 * kLanes) {
    if (!(lanes_above_or_nan(load(scores + i), bound) | lanes_above_or_nan(load(scores + i + kLanes), bound))) continue;
    better_of(scores + i, 2 * kLanes, first + int32_t(i), best);
    bound = set1(best.score);
  }
  better_of(scores + i, n - i, first + int32_t(i), best);
}

// In place: e^((score - best) / temperature).
void exp_weights(float* scores, int64_t n, float best, float temperature) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const V x = div(sub(load_columns(scores + i, n - i), set1(best)), set1(temperature));
    store_columns(scores + i, exp(x), n - i);
  }
}

void block_sums(const float* weights, int64_t n, double* sums) {
  for (int64_t b = 0; b < blocks(n); ++b) sums[b] = sum(weights + b * kSumBlock, block_length(n, b));
}

void block_maxima(const float* scores, int64_t n, float* maxima) {
  for (int64_t b = 0; b < blocks(n); ++b) {
    const float* x = scores + b * kSumBlock;
    const int64_t length = block_length(n, b);
    V all = set1(x[0]);
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) all = max(all, load(x + i));
    for (; i < length; ++i) all = max(all, set1(x[i]));
    maxima[b] = reduce_max(all);
  }
}

// The values of `bound` or more and their indexes; returns how many.
int64_t at_least(const float* x, int64_t n, float bound, int32_t* ids, float* values) {
  int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V value = load(x + i);
    uint32_t mask = lanes_at_least(value, set1(bound));
    if (mask == (1u << kLanes) - 1) {
      store(values + count, value);
      for (int lane = 0; lane < kLanes; ++lane) ids[count + lane] = int32_t(i) + lane;
      count += kLanes;
      continue;
    }
    for (; mask; mask &= mask - 1) {
      ids[count] = int32_t(i) + __builtin_ctz(mask);
      values[count] = x[ids[count]];
      ++count;
    }
  }
  for (; i < n; ++i)
    if (x[i] >= bound) {
      ids[count] = int32_t(i);
      values[count++] = x[i];
    }
  return count;
}

}  // namespace pagebus::PAGEBUS_ISA
