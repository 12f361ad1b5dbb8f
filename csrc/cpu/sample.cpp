#include "sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace pagebus {
namespace {

constexpr int64_t kScoreBytes = int64_t(64) << 20;  // of a block's scores, unless one row has more
constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The number in [0, 1) of this seed and output index: SplitMix64 (Steele, Lea, Flood 2014), keyed by the seed.
double uniform(uint64_t seed, uint64_t index) {
  return double(mix(mix(seed) + 0x9E3779B97F4A7C15u * (index + 1)) >> 11) * 0x1p-53;
}

// The first index above `target`; where rounding leaves none, the last that adds weight.
int64_t first_above(std::span<const double> running, double target) {
  const auto above = std::upper_bound(running.begin(), running.end(), target);
  return std::min(above, std::lower_bound(running.begin(), running.end(), running.back())) - running.begin();
}

// The lightest weight of a nucleus, and how many as heavy as it are inside.
struct NucleusEdge {
  float weight;
  int64_t equals;
};

// Positive floats order as their bits do: each round splits the weights by some bits, from the upper ones on, and goes
// on with the bucket in which the mass that is left out, counted from the lightest, would pass `allowed`. What `total`
// holds beyond these weights is lighter than all of them.
NucleusEdge nucleus_edge(std::span<const float> weights, double total, double allowed) {
  constexpr struct {
    int shift, buckets;
  } rounds[] = {{18, 4096}, {9, 512}, {0, 512}};  // no weight is above 1, whose bits are 0x3f800000
  std::vector<double> masses;
  std::vector<float> bucket;
  double outside = 0.0;
  for (const auto& [shift, buckets] : rounds) {
    masses.assign(size_t(buckets), 0.0);
    const auto name = [&](float w) { return std::bit_cast<uint32_t>(w) >> shift & uint32_t(buckets - 1); };
    for (float w : weights) masses[name(w)] += double(w);
    if (shift == rounds[0].shift)
      outside = std::clamp(total - std::accumulate(masses.begin(), masses.end(), 0.0), 0.0, allowed);
    uint32_t edge = 0;
    double before = outside;
    for (uint32_t b = 0; b < masses.size() && outside <= allowed; ++b) {
      if (masses[b] == 0.0) continue;
      edge = b;
      before = outside;
      outside += masses[b];
    }
    outside = before;
    std::vector<float> next;
    next.reserve(weights.size());
    for (float w : weights)
      if (name(w) == edge) next.push_back(w);
    bucket.swap(next);
    weights = bucket;
  }
  const auto count = int64_t(weights.size());
  const auto dropped = int64_t(std::floor((allowed - outside) / double(weights[0])));
  return {weights[0], count - std::clamp<int64_t>(dropped, 0, count - 1)};
}

// Sets those of the banned ids that lie in the piece to -infinity; infinity into `best` for one that is no number.
void ban(const std::vector<int32_t>& banned, float* scores, int64_t first, int64_t count, Best& best) {
  for (auto id = std::lower_bound(banned.begin(), banned.end(), first); id != banned.end() && *id < first + count;
       ++id) {
    float& score = scores[*id - first];
    if (!(score < kInfinity)) best.score = kInfinity;
    score = -kInfinity;
  }
}

}  // namespace

void Candidates::at_least(float bound) {
  if (!ids_) {
    n_ = kernels_.at_least(weights_, n_, bound, list_ids_, list_);
    weights_ = list_;
    ids_ = list_ids_;
    return;
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < n_; ++i) {
    if (weights_[i] < bound) continue;
    weights_[kept] = weights_[i];
    list_ids_[kept++] = list_ids_[i];
  }
  n_ = kept;
}

// Those as large as the k-th stay. The k-th largest of the blocks' maxima is no larger than the k-th of all: few are
// left to rank.
void Candidates::top_k(int64_t k) {
  if (k <= 0 || k >= n_) return;
  std::vector<float> ranked(size_t((n_ + kSumBlock - 1) / kSumBlock));
  const auto kth = [&] {
    std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater());
    return ranked[size_t(k - 1)];
  };
  kernels_.block_maxima(weights_, n_, ranked.data());
  at_least(k <= int64_t(ranked.size()) ? kth() : -kInfinity);
  ranked.assign(weights_, weights_ + n_);
  at_least(kth());
}

// The fewest weights, heaviest first, that hold `share` of the mass (arXiv 1904.09751); of those as heavy as the last
// the lowest ids.
void Candidates::top_p(double share) {
  if (share >= 1.0) return;
  const double total = sum_blocks(), allowed = (1.0 - share) * total;
  at_least(float(allowed / double(n_) * 0.999999));  // what is lighter fits outside, even n times
  const NucleusEdge edge = nucleus_edge(std::span(weights_, size_t(n_)), total, allowed);
  int64_t kept = 0, equals = edge.equals;
  for (int64_t i = 0; i < n_; ++i) {
    const float weight = weights_[i];
    weights_[kept] = weight;
    list_ids_[kept] = list_ids_[i];
    kept += weight > edge.weight || (weight == edge.weight && equals-- > 0);
  }
  n_ = kept;
}

double Candidates::sum_blocks() {
  sums_.resize(size_t((n_ + kSumBlock - 1) / kSumBlock));
  kernels_.block_sums(weights_, n_, sums_.data());
  std::partial_sum(sums_.begin(), sums_.end(), sums_.begin());
  return sums_.back();
}

int32_t Candidates::locate(double share) {
  const double target = share * sum_blocks();
  const int64_t block = first_above(sums_, target), first = block * kSumBlock;
  double running[kSumBlock], sum = 0.0;
  const int64_t length = std::min<int64_t>(kSumBlock, n_ - first);
  for (int64_t i = 0; i < length; ++i) running[i] = sum += double(weights_[first + i]);
  const double before = block ? sums_[size_t(block - 1)] : 0.0;
  const int64_t i = first + first_above({running, size_t(length)}, target - before);
  return ids_ ? ids_[i] : int32_t(i);
}

int64_t Sampler::block_rows(int64_t ids) { return std::clamp<int64_t>(kScoreBytes / (ids * 4), 1, kGemmRows); }

void Sampler::begin(std::span<const SampleRow> rows, int64_t ids) {
  rows_ = rows;
  ids_ = ids;
  best_.assign(size_t(engine_.pool().threads()), std::vector<Best>(rows.size(), {-kInfinity, 0}));
  place_.assign(rows.size(), -1);
  int64_t drawing = 0;
  for (size_t r = 0; r < rows.size(); ++r)
    if (!rows[r].greedy()) place_[r] = drawing++;
  const auto grow = [](Memory& memory, int64_t bytes) {
    if (int64_t(memory.bytes()) < bytes) memory = Memory(size_t(bytes));
  };
  grow(scores_, drawing * ids * 4);
  if (drawing) grow(lists_, engine_.pool().threads() * ids * 8);
}

void Sampler::take(float* tile, int64_t ld, int64_t row, int64_t row_end, int64_t first, int64_t count, int thread) {
  for (int64_t r = row; r < row_end; ++r) {
    float* scores = tile + (r - row) * ld;
    const SampleRow& how = rows_[size_t(r)];
    Best& best = best_[size_t(thread)][size_t(r)];
    if (how.keep) std::copy_n(scores, count, how.keep + first);
    if (!how.banned.empty()) ban(how.banned, scores, first, count, best);
    engine_.kernels().find_best(scores, count, int32_t(first), best);
    const int64_t place = place_[size_t(r)];
    if (place >= 0) std::copy_n(scores, count, scores_.floats() + place * ids_ + first);
  }
}

void Sampler::finish(int32_t* tokens) {
  for (size_t r = 0; r < rows_.size(); ++r) {
    Best& all = best_[0][r];
    for (const auto& of_thread : best_)
      if (of_thread[r].score > all.score || (of_thread[r].score == all.score && of_thread[r].id < all.id))
        all = of_thread[r];
    tokens[r] = std::isfinite(all.score) ? all.id : -1;
  }
  std::vector<size_t> drawing;
  for (size_t r = 0; r < rows_.size(); ++r)
    if (place_[r] >= 0 && tokens[r] >= 0) drawing.push_back(r);
  engine_.pool().run(int64_t(drawing.size()), [&](int64_t i, int thread) {
    const size_t r = drawing[size_t(i)];
    tokens[r] = draw(scores_.floats() + place_[r] * ids_, best_[0][r].score, rows_[r], thread);
  });
}

int32_t Sampler::draw(float* scores, float best, const SampleRow& row, int thread) const {
  char* list = lists_.data() + thread * ids_ * 8;
  Candidates candidates(engine_.kernels(), scores, ids_, reinterpret_cast<float*>(list),
                        reinterpret_cast<int32_t*>(list + ids_ * 4));
  candidates.top_k(row.top_k);
  candidates.become_weights(best, row.temperature);
  candidates.top_p(row.top_p);
  if (row.min_p > 0.0) candidates.at_least(float(row.min_p));
  return candidates.locate(uniform(row.seed, row.index));
}

}  // namespace pagebus
