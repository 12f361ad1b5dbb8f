// The native executor: a decoder's packed weights and KV cache, and one call per step.
#pragma once

#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "engine.h"
#include "sample.h"

namespace pagebus {

// How the matrices hold their weights. `embed` counts where the head has weights of its own.
struct Formats {
  struct Layer {
    Format qkv, o, gate_up, down;
  };
  std::vector<Layer> layers;
  Format head, embed;
};

// The fields of DecoderSpec (services/worker/spec.py) and of the executor.
struct DecoderConfig {
  int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size;
  float norm_eps;
  std::vector<float> inv_freq;
  float attention_factor;
  std::vector<int> windows;
  float attention_scale, attention_softcap, final_logit_softcap;
  bool tie_embeddings, qkv_bias, o_bias, mlp_bias, qk_norm;
  DType dtype;
  int64_t block_size;
  Formats formats;
};

// StepBatch (services/worker/executor.py).
struct Batch {
  std::span<const int32_t> tokens, positions, query_start, context_lens, block_tables, logit_rows;
  int64_t table_width;
};

// A checkpoint's tensor, [rows] or [rows, columns], row-major. `data` may be a part of a matrix: `count` rows from row
// `first` on. With blocks, the dtype says nothing.
struct Tensor {
  const void* data;
  DType dtype;
  std::vector<int64_t> shape;
  int64_t first = 0, count = 0;
  Blocks blocks = Blocks::none;
};

class Decoder {
 public:
  // Throws std::invalid_argument for a config that makes no decoder.
  Decoder(DecoderConfig config, const std::string& isa, int threads);

  int64_t vocab_size() const { return config_.vocab_size; }
  const char* isa() const { return engine_.kernels().name; }

  // Packs one weight, e.g. (3, "q.weight"); layer -1 for those outside the layers. Throws std::invalid_argument.
  void load(int64_t layer, const std::string& name, const Tensor& tensor);

  int64_t block_bytes() const { return cache_.block_bytes; }
  int64_t weight_bytes() const { return int64_t(weights_.bytes()); }
  void allocate_kv(int64_t blocks);
  void copy_blocks(std::span<const int32_t> pairs);

  // Runs a step; logits: [logit_rows][vocab_size]. Throws std::invalid_argument, before anything is written.
  void forward(const Batch& batch, float* logits);

  // Runs a step; tokens: one of the ids 0 to ids - 1, or -1, for each of logit_rows. Throws like forward.
  void forward_and_sample(const Batch& batch, std::span<const SampleRow> rows, int64_t ids, int32_t* tokens);

 private:
  struct Layer {
    Packed qkv, o, gate_up, down;
    float *attn_norm, *mlp_norm, *q_norm, *k_norm;
    size_t plan;  // of plans_
  };

  void place_weights();
  float* place_floats(int64_t n);
  void load_embedding(const Tensor& tensor);
  void load_matrix(Packed& w, const Tensor& tensor, int64_t rows, int64_t first, int half);
  void load_floats(float* to, const Tensor& tensor, int64_t n);
  void load_gated_bias(Packed& w, const Tensor& tensor, int half);
  void check(const Batch& batch) const;
  void reserve(int64_t rows);
  void embed(const Batch& batch);
  void attend(const Layer& layer, int index);
  void project(const Layer& layer, float* hidden, const float* attn, int64_t rows);
  // Takes what the head's matrix multiplies, [count][ld_hidden_], of the logit rows from `begin` on.
  using Head = std::function<void(const float* x, int64_t begin, int64_t count)>;
  void step(const Batch& batch, const Head& head);
  void finish(std::span<const int32_t> wanted, const Head& head);

  DecoderConfig config_;
  Engine engine_;
  std::mutex mutex_;
  CacheLayout cache_{};
  int64_t num_blocks_ = 0;
  Memory kv_, weights_, floats_;
  int64_t placed_floats_ = 0;
  Packed head_{};               // tied, it is the embedding too
  Packed embed_{};              // where the head has weights of its own and the embedding is quantised
  char* embed_rows_ = nullptr;  // [vocab][hidden] where it is not
  float* final_norm_ = nullptr;
  std::vector<Layer> layers_;

  // Activations of a step, rows apart by these many floats.
  StepRows step_{};
  std::vector<int> plan_windows_;  // the different windows of the layers, and the step's plan for each
  std::vector<AttentionPlan> plans_;
  Sampler sampler_{engine_};
  int64_t capacity_ = 0, ld_hidden_ = 0, ld_qkv_ = 0, ld_attn_ = 0, ld_mlp_ = 0;
  Memory hidden_, last_, normed_, qkv_, q_, attn_, mlp_, cos_, sin_;
  std::vector<int32_t> sequence_;
};

}  // namespace pagebus
