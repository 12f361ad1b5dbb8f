#include "decoder.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pagebus {
namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

std::string text(int64_t n) { return std::to_string(n); }

// Rows a multiple of 4096 bytes apart would fall on the same cache sets.
int64_t leading(int64_t n) { return round_up(n, kPanel) + kPanel; }

// Denormals and rounding as the default has them, whatever the calling thread has set: the same bits everywhere.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

}  // namespace

Decoder::Decoder(DecoderConfig config, const std::string& isa, int threads)
    : config_(std::move(config)), engine_(isa, threads) {
  const DecoderConfig& c = config_;
  constexpr int64_t limit = int64_t(1) << 24;
  for (int64_t size :
       {c.vocab_size, c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size})
    require(size >= 1 && size <= limit, "every size of the decoder must be in [1, 2^24], got " + text(size));
  require(c.num_heads % c.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require(int64_t(c.inv_freq.size()) * 2 <= c.head_dim, "rope.dim must be at most head_dim");
  require(int64_t(c.windows.size()) == c.num_layers, "windows must hold one entry per layer");
  require(int64_t(c.formats.layers.size()) == c.num_layers, "formats must hold one entry per layer");
  for (int window : c.windows) require(window >= 0, "windows must not be negative");
  require(c.attention_softcap >= 0 && c.final_logit_softcap >= 0, "a softcap must not be negative");
  require(c.block_size >= 1 && c.block_size <= 256, "block_size must be in [1, 256], got " + text(c.block_size));
  cache_.dtype = c.dtype;
  cache_.block_size = int(c.block_size);
  cache_.kv_heads = int(c.num_kv_heads);
  cache_.head_dim = int(c.head_dim);
  finish_cache_layout(cache_, c.num_layers);
  const int group = int(c.num_heads / c.num_kv_heads);
  engine_.reserve(AttentionPlan::scratch_floats(cache_, group));
  ld_hidden_ = leading(c.hidden_size);
  ld_qkv_ = leading((c.num_heads + 2 * c.num_kv_heads) * c.head_dim);
  ld_attn_ = leading(c.num_heads * c.head_dim);
  ld_mlp_ = leading(c.intermediate_size);
  place_weights();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto found = std::find(plan_windows_.begin(), plan_windows_.end(), c.windows[i]);
    layers_[i].plan = size_t(found - plan_windows_.begin());
    if (found == plan_windows_.end()) plan_windows_.push_back(c.windows[i]);
  }
  plans_.resize(plan_windows_.size());
}

// One mapping holds all matrices, so that it can take huge pages; nothing is touched before its weight is loaded.
void Decoder::place_weights() {
  const DecoderConfig& c = config_;
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  layers_.resize(size_t(c.num_layers));
  std::vector<Packed*> matrices;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const Formats::Layer& f = c.formats.layers[i];
    layer.qkv = packed_layout(f.qkv, c.dtype, q + 2 * kv, c.hidden_size, false);
    layer.o = packed_layout(f.o, c.dtype, c.hidden_size, q, false);
    layer.gate_up = packed_layout(f.gate_up, c.dtype, c.intermediate_size, c.hidden_size, true);
    layer.down = packed_layout(f.down, c.dtype, c.hidden_size, c.intermediate_size, false);
    matrices.insert(matrices.end(), {&layer.qkv, &layer.o, &layer.gate_up, &layer.down});
  }
  head_ = packed_layout(c.formats.head, c.dtype, c.vocab_size, c.hidden_size, false);
  matrices.push_back(&head_);
  const bool plain_embedding = !c.tie_embeddings && c.formats.embed == Format::dense;
  if (!c.tie_embeddings && !plain_embedding) {
    embed_ = packed_layout(c.formats.embed, c.dtype, c.vocab_size, c.hidden_size, false);
    matrices.push_back(&embed_);
  }
  int64_t bytes = 0;
  for (const Packed* w : matrices) bytes += packed_bytes(*w);
  const int64_t rows_at = bytes;
  if (plain_embedding) bytes += c.vocab_size * c.hidden_size * dtype_bytes(c.dtype);
  weights_ = Memory(size_t(bytes), true);
  if (plain_embedding) embed_rows_ = weights_.data() + rows_at;
  int64_t at = 0;
  for (Packed* w : matrices) {
    w->data = weights_.data() + at;
    at += packed_bytes(*w);
  }

  const int64_t hidden = round_up(c.hidden_size, kPanel), dim = cache_.padded_dim;
  const int64_t biases =
      layers_[0].qkv.panels + layers_[0].o.panels + layers_[0].gate_up.panels + layers_[0].down.panels;
  floats_ = Memory(size_t(c.num_layers * (2 * hidden + 2 * dim + biases * kPanel) + hidden) * 4);
  for (Layer& layer : layers_) {
    layer.attn_norm = place_floats(hidden);
    layer.mlp_norm = place_floats(hidden);
    layer.q_norm = c.qk_norm ? place_floats(dim) : nullptr;
    layer.k_norm = c.qk_norm ? place_floats(dim) : nullptr;
    if (c.qkv_bias) layer.qkv.bias = place_floats(layer.qkv.panels * kPanel);
    if (c.o_bias) layer.o.bias = place_floats(layer.o.panels * kPanel);
    if (c.mlp_bias) layer.gate_up.bias = place_floats(layer.gate_up.panels * kPanel);
    if (c.mlp_bias) layer.down.bias = place_floats(layer.down.panels * kPanel);
  }
  final_norm_ = place_floats(hidden);
}

float* Decoder::place_floats(int64_t n) {
  float* at = floats_.floats() + placed_floats_;
  placed_floats_ += n;
  return at;
}

void Decoder::load_matrix(Packed& w, const Tensor& tensor, int64_t rows, int64_t first, int half) {
  require(tensor.shape == std::vector<int64_t>{rows, w.k}, "the shape must be [" + text(rows) + ", " + text(w.k) + "]");
  require(tensor.first >= 0 && tensor.count >= 0 && tensor.first + tensor.count <= rows, "no such rows");
  engine_.pack({&w, tensor.data, tensor.dtype, first + tensor.first, half, tensor.blocks}, tensor.count);
}

void Decoder::load_embedding(const Tensor& tensor) {
  const DecoderConfig& c = config_;
  const int64_t hidden = c.hidden_size, from = hidden * dtype_bytes(tensor.dtype), to = hidden * dtype_bytes(c.dtype);
  if (c.tie_embeddings) return load_matrix(head_, tensor, c.vocab_size, 0, 0);
  if (!embed_rows_) return load_matrix(embed_, tensor, c.vocab_size, 0, 0);
  require(tensor.shape == std::vector<int64_t>{c.vocab_size, hidden}, "the shape must be [vocab_size, hidden_size]");
  require(tensor.first >= 0 && tensor.first + tensor.count <= c.vocab_size, "no such rows");
  engine_.pool().run(tensor.count, [&](int64_t row, int) {
    std::vector<float> values(static_cast<size_t>(hidden));
    engine_.kernels().widen(tensor.dtype, static_cast<const char*>(tensor.data) + row * from, values.data(), hidden);
    engine_.kernels().narrow(c.dtype, values.data(), embed_rows_ + (tensor.first + row) * to, hidden);
  });
}

void Decoder::load_floats(float* to, const Tensor& tensor, int64_t n) {
  require(to, "the decoder has no such weight");
  require(tensor.shape == std::vector<int64_t>{n}, "the shape must be [" + text(n) + "]");
  engine_.kernels().widen(tensor.dtype, tensor.data, to, n);
}

void Decoder::load_gated_bias(Packed& w, const Tensor& tensor, int half) {
  std::vector<float> values(size_t(w.n));
  load_floats(w.bias ? values.data() : nullptr, tensor, w.n);
  for (int64_t i = 0; i < w.n; ++i) w.bias[(i / kPanel * 2 + half) * kPanel + i % kPanel] = values[size_t(i)];
}

void Decoder::load(int64_t index, const std::string& name, const Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const DecoderConfig& c = config_;
  const int64_t hidden = c.hidden_size, ff = c.intermediate_size;
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  if (index < 0) {
    if (name == "final_norm.weight") return load_floats(final_norm_, tensor, hidden);
    if (name == "lm_head.weight" && !c.tie_embeddings) return load_matrix(head_, tensor, c.vocab_size, 0, 0);
    require(name == "embed.weight", "the decoder has no such weight");
    return load_embedding(tensor);
  }
  require(index < c.num_layers, "layer out of range");
  Layer& layer = layers_[size_t(index)];
  const auto offset = [](float* bias, int64_t n) { return bias ? bias + n : nullptr; };
  if (name == "attn_norm.weight") return load_floats(layer.attn_norm, tensor, hidden);
  if (name == "mlp_norm.weight") return load_floats(layer.mlp_norm, tensor, hidden);
  if (name == "q_norm.weight") return load_floats(layer.q_norm, tensor, c.head_dim);
  if (name == "k_norm.weight") return load_floats(layer.k_norm, tensor, c.head_dim);
  if (name == "q.weight") return load_matrix(layer.qkv, tensor, q, 0, 0);
  if (name == "k.weight") return load_matrix(layer.qkv, tensor, kv, q, 0);
  if (name == "v.weight") return load_matrix(layer.qkv, tensor, kv, q + kv, 0);
  if (name == "o.weight") return load_matrix(layer.o, tensor, hidden, 0, 0);
  if (name == "gate.weight") return load_matrix(layer.gate_up, tensor, ff, 0, 0);
  if (name == "up.weight") return load_matrix(layer.gate_up, tensor, ff, 0, 1);
  if (name == "down.weight") return load_matrix(layer.down, tensor, hidden, 0, 0);
  if (name == "q.bias") return load_floats(layer.qkv.bias, tensor, q);
  if (name == "k.bias") return load_floats(offset(layer.qkv.bias, q), tensor, kv);
  if (name == "v.bias") return load_floats(offset(layer.qkv.bias, q + kv), tensor, kv);
  if (name == "o.bias") return load_floats(layer.o.bias, tensor, hidden);
  if (name == "gate.bias") return load_gated_bias(layer.gate_up, tensor, 0);
  if (name == "up.bias") return load_gated_bias(layer.gate_up, tensor, 1);
  if (name == "down.bias") return load_floats(layer.down.bias, tensor, hidden);
  throw std::invalid_argument("the decoder has no such weight");
}

void Decoder::allocate_kv(int64_t blocks) {
  const std::lock_guard lock(mutex_);
  require(blocks >= 0 && blocks <= INT32_MAX, "the number of KV blocks must be in [0, 2^31), got " + text(blocks));
  kv_ = Memory();
  num_blocks_ = 0;
  kv_ = Memory(size_t(blocks * cache_.block_bytes), true);
  cache_.kv = kv_.data();
  num_blocks_ = blocks;
}

void Decoder::copy_blocks(std::span<const int32_t> pairs) {
  const std::lock_guard lock(mutex_);
  require(pairs.size() % 2 == 0, "copies must be pairs");
  for (int32_t block : pairs) require(block >= 0 && block < num_blocks_, "KV block " + text(block) + " does not exist");
  for (size_t i = 0; i < pairs.size(); i += 2) {
    if (pairs[i] == pairs[i + 1]) continue;
    std::memcpy(cache_.kv + pairs[i + 1] * cache_.block_bytes, cache_.kv + pairs[i] * cache_.block_bytes,
                size_t(cache_.block_bytes));
  }
}

void Decoder::check(const Batch& b) const {
  const auto rows = int64_t(b.tokens.size()), sequences = int64_t(b.context_lens.size());
  require(int64_t(b.positions.size()) == rows, "positions must be as many as tokens");
  require(int64_t(b.query_start.size()) == sequences + 1, "query_start must have one entry more than context_lens");
  require(int64_t(b.block_tables.size()) == sequences * b.table_width, "block_tables must have one row per sequence");
  require(b.query_start[0] == 0 && b.query_start.back() == rows, "query_start must run from 0 to the number of tokens");
  for (int32_t token : b.tokens)
    require(token >= 0 && token < config_.vocab_size, "token " + text(token) + " is not in the vocabulary");
  for (int32_t row : b.logit_rows)
    require(row >= 0 && row < rows, "logit row " + text(row) + " is not a row of the step");
  for (int64_t s = 0; s < sequences; ++s) {
    const int32_t first = b.query_start[size_t(s)], end = b.query_start[size_t(s) + 1],
                  length = b.context_lens[size_t(s)];
    require(first <= end, "query_start must not fall");
    if (first == end) continue;
    require(length >= end - first, "context_lens must count the step's tokens");
    for (int32_t t = first; t < end; ++t)
      require(b.positions[size_t(t)] == length - (end - t), "positions must be successive and end at context_lens - 1");
    const int64_t blocks = (length + config_.block_size - 1) / config_.block_size;
    require(blocks <= b.table_width, "block_tables is too narrow for " + text(length) + " tokens");
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = b.block_tables[size_t(s * b.table_width + i)];
      require(block >= 0 && block < num_blocks_, "KV block " + text(block) + " does not exist");
    }
  }
}

// Activation rows grow to the largest step seen; the zeros between a row's end and its padding are never written.
void Decoder::reserve(int64_t rows) {
  if (rows <= capacity_) return;
  capacity_ = round_up(rows, 64);
  const auto make = [&](int64_t floats) { return Memory(size_t(capacity_ * floats) * 4, true); };
  hidden_ = make(ld_hidden_);
  last_ = make(ld_hidden_);
  normed_ = make(ld_hidden_);
  qkv_ = make(ld_qkv_);
  q_ = make(config_.num_heads * cache_.padded_dim);
  attn_ = make(ld_attn_);
  mlp_ = make(ld_mlp_);
  cos_ = make(std::max<int64_t>(1, int64_t(config_.inv_freq.size())));
  sin_ = make(std::max<int64_t>(1, int64_t(config_.inv_freq.size())));
}

void Decoder::embed(const Batch& b) {
  const int64_t hidden = config_.hidden_size;
  engine_.pool().run(step_.rows, [&](int64_t row, int) {
    float* to = hidden_.floats() + row * ld_hidden_;
    const int64_t token = b.tokens[size_t(row)];
    if (embed_rows_)
      engine_.kernels().widen(config_.dtype, embed_rows_ + token * hidden * dtype_bytes(config_.dtype), to, hidden);
    else
      engine_.unpack_row(config_.tie_embeddings ? head_ : embed_, token, to);
  });
}

// Writes the rows' keys and values of a layer, and attends: hidden to attn.
void Decoder::attend(const Layer& layer, int index) {
  const DecoderConfig& c = config_;
  const int group = int(c.num_heads / c.num_kv_heads), rope_dim = int(2 * c.inv_freq.size());
  float *x = normed_.floats(), *qkv = qkv_.floats(), *q = q_.floats(), *attn = attn_.floats();
  engine_.rms_norm(hidden_.floats(), ld_hidden_, layer.attn_norm, x, ld_hidden_, step_.rows, c.hidden_size, c.norm_eps);
  engine_.gemm({&layer.qkv, x, ld_hidden_, qkv, ld_qkv_, Epilogue::store}, step_.rows);
  engine_.rope({&step_, &cache_, qkv, ld_qkv_, q, group, index, rope_dim, cos_.floats(), sin_.floats(), layer.q_norm,
                layer.k_norm, c.norm_eps, c.attention_scale * kLog2E});
  AttentionArgs args{&step_, &cache_, q, attn, ld_attn_, index, c.attention_softcap * kLog2E};
  plans_[layer.plan].run(engine_, args);
}

// The rest of a layer, which looks at each row alone.
void Decoder::project(const Layer& layer, float* h, const float* attn, int64_t rows) {
  const DecoderConfig& c = config_;
  float *x = normed_.floats(), *mlp = mlp_.floats();
  engine_.gemm({&layer.o, attn, ld_attn_, h, ld_hidden_, Epilogue::add}, rows);
  engine_.rms_norm(h, ld_hidden_, layer.mlp_norm, x, ld_hidden_, rows, c.hidden_size, c.norm_eps);
  engine_.gemm({&layer.gate_up, x, ld_hidden_, mlp, ld_mlp_, Epilogue::silu_mul}, rows);
  engine_.gemm({&layer.down, mlp, ld_mlp_, h, ld_hidden_, Epilogue::add}, rows);
}

// After the last layer's attention only the rows whose logits are wanted go on; qkv's memory is free for them.
void Decoder::finish(std::span<const int32_t> wanted, const Head& head) {
  const DecoderConfig& c = config_;
  float *h = last_.floats(), *attn = qkv_.floats(), *x = normed_.floats();
  for (size_t begin = 0; begin < wanted.size(); begin += size_t(capacity_)) {
    const auto rows = wanted.subspan(begin, std::min(size_t(capacity_), wanted.size() - begin));
    const auto count = int64_t(rows.size());
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(hidden_.floats() + rows[size_t(r)] * ld_hidden_, c.hidden_size, h + r * ld_hidden_);
      std::copy_n(attn_.floats() + rows[size_t(r)] * ld_attn_, c.num_heads * c.head_dim, attn + r * ld_attn_);
    }
    project(layers_.back(), h, attn, count);
    engine_.rms_norm(h, ld_hidden_, final_norm_, x, ld_hidden_, count, c.hidden_size, c.norm_eps);
    head(x, int64_t(begin), count);
  }
}

void Decoder::forward(const Batch& b, float* logits) {
  step(b, [&](const float* x, int64_t begin, int64_t count) {
    float* y = logits + begin * config_.vocab_size;
    engine_.gemm({&head_, x, ld_hidden_, y, config_.vocab_size, Epilogue::store}, count);
    if (config_.final_logit_softcap != 0.0f)
      engine_.softcap(y, count * config_.vocab_size, config_.final_logit_softcap);
  });
}

void Decoder::forward_and_sample(const Batch& b, std::span<const SampleRow> rows, int64_t ids, int32_t* tokens) {
  require(rows.size() == b.logit_rows.size(), "there must be as many rows to sample as logit_rows");
  require(ids >= 1 && ids <= config_.vocab_size, "ids to sample from must be in [1, vocab_size], got " + text(ids));
  const int64_t block = Sampler::block_rows(ids);
  step(b, [&](const float* x, int64_t begin, int64_t count) {
    for (int64_t first = 0; first < count; first += block) {
      const int64_t size = std::min(block, count - first), at = begin + first;
      sampler_.begin(rows.subspan(size_t(at), size_t(size)), ids);
      engine_.gemm_tiles(
          {&head_, x + first * ld_hidden_, ld_hidden_, nullptr, 0, Epilogue::store}, size, ids,
          [&](float* tile, int64_t ld, int64_t row, int64_t row_end, int64_t id, int64_t id_end, int thread) {
            if (config_.final_logit_softcap != 0.0f)
              for (int64_t r = 0; r < row_end - row; ++r)
                engine_.kernels().softcap(tile + r * ld, id_end - id, config_.final_logit_softcap);
            sampler_.take(tile, ld, row, row_end, id, id_end - id, thread);
          });
      sampler_.finish(tokens + at);
    }
  });
}

void Decoder::step(const Batch& b, const Head& head) {
  const std::lock_guard lock(mutex_);
  check(b);
  const auto rows = int64_t(b.tokens.size()), sequences = int64_t(b.context_lens.size());
  if (!rows) return;
  const DefaultFloatMode float_mode;
  reserve(rows);
  sequence_.resize(size_t(rows));
  for (int64_t s = 0; s < sequences; ++s)
    std::fill(sequence_.begin() + b.query_start[size_t(s)], sequence_.begin() + b.query_start[size_t(s) + 1],
              int32_t(s));
  step_ = {rows, b.positions.data(), sequence_.data(), b.block_tables.data(), b.table_width};
  const StepSequences step{b.query_start.data(), b.context_lens.data(), sequences, b.block_tables.data(),
                           b.table_width};
  for (size_t i = 0; i < plans_.size(); ++i)
    plans_[i].build(step, cache_, int(config_.num_heads / config_.num_kv_heads), plan_windows_[i],
                    engine_.pool().threads());
  rope_table(engine_.pool(), b.positions.data(), rows, config_.inv_freq, config_.attention_factor, cos_.floats(),
             sin_.floats());
  embed(b);
  for (size_t i = 0; i < layers_.size(); ++i) {
    attend(layers_[i], int(i));
    if (i + 1 < layers_.size()) project(layers_[i], hidden_.floats(), attn_.floats(), rows);
  }
  finish(b.logit_rows, head);
}

}  // namespace pagebus
