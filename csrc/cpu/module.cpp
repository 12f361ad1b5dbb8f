// Python's view: the Decoder, and Ops, the single kernels for tests and benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>

#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagebus {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutputTable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Raw = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

Blocks parse_blocks(const std::string& name) {
  return name == "Q4_0" ? Blocks::q4_0 : name == "Q4_1" ? Blocks::q4_1 : name == "Q8_0" ? Blocks::q8_0 : Blocks::none;
}

// float32 arrays, the bits of bfloat16 and float16 ones as 16-bit integers, or the bytes of GGUF blocks [rows, bytes].
// `shape`, where not empty, is that of the whole of which the array holds the rows from `first` on.
Tensor tensor_of(const Raw& array, const std::string& dtype, std::vector<int64_t> shape = {}, int64_t first = 0) {
  Tensor tensor{array.data(), DType::f32, std::move(shape), first, 0, parse_blocks(dtype)};
  if (tensor.blocks == Blocks::none) tensor.dtype = parse_dtype(dtype);
  const bool matches = tensor.blocks != Blocks::none ? array.dtype() == nb::dtype<uint8_t>()
                       : tensor.dtype == DType::f32
                           ? array.dtype() == nb::dtype<float>()
                           : array.dtype() == nb::dtype<uint16_t>() || array.dtype() == nb::dtype<int16_t>();
  if (!matches) throw std::invalid_argument("the array's type does not hold " + dtype);
  if (tensor.shape.empty())
    for (size_t i = 0; i < array.ndim(); ++i) tensor.shape.push_back(int64_t(array.shape(i)));
  tensor.count = array.ndim() ? int64_t(array.shape(0)) : 0;
  if (tensor.blocks != Blocks::none) {
    require(array.ndim() == 2 && tensor.shape.size() == 2 && tensor.shape[1] % 32 == 0 &&
                int64_t(array.shape(1)) == tensor.shape[1] / 32 * block_bytes(tensor.blocks),
            "the rows do not hold these blocks");
  }
  return tensor;
}

Formats parse_formats(const std::vector<std::vector<std::string>>& layers, const std::string& head,
                      const std::string& embed) {
  Formats formats{{}, parse_format(head), parse_format(embed)};
  for (const auto& layer : layers) {
    require(layer.size() == 4, "formats of a layer are those of qkv, o, gate_up and down");
    formats.layers.push_back(
        {parse_format(layer[0]), parse_format(layer[1]), parse_format(layer[2]), parse_format(layer[3])});
  }
  return formats;
}

std::span<const int32_t> ints(const Ints& array) { return {array.data(), array.shape(0)}; }

Batch batch_of(Ints tokens, Ints positions, Ints query_start, Ints context_lens, IntTable block_tables,
               Ints logit_rows) {
  require(block_tables.shape(0) == context_lens.shape(0), "block_tables must have one row per sequence");
  return {ints(tokens),
          ints(positions),
          ints(query_start),
          ints(context_lens),
          {block_tables.data(), block_tables.shape(0) * block_tables.shape(1)},
          ints(logit_rows),
          int64_t(block_tables.shape(1))};
}

// One row of _draws in services/worker/native.py: row, temperature, top_k, top_p, min_p, seed, index, banned, keep.
using Draw = std::tuple<size_t, double, int32_t, double, double, uint64_t, uint64_t, std::vector<int32_t>, bool>;

// How to sample `count` rows: greedily, but for those in `draws`. `kept` gets the scores of those that keep them.
std::vector<SampleRow> sample_rows(size_t count, const std::vector<Draw>& draws, const OutputTable& kept) {
  std::vector<SampleRow> rows(count);
  size_t keeping = 0;
  for (const auto& [row, temperature, top_k, top_p, min_p, seed, index, banned, keep] : draws) {
    require(row < count, "a row to sample does not exist");
    rows[row] = {temperature, top_k, top_p, min_p, seed, index, banned};
    std::sort(rows[row].banned.begin(), rows[row].banned.end());
    if (!keep) continue;
    require(keeping < kept.shape(0), "kept must have a row for each that keeps its logits");
    rows[row].keep = kept.data() + keeping++ * kept.shape(1);
  }
  return rows;
}

// A packed matrix with memory of its own.
class Matrix {
 public:
  Matrix(Engine& engine, const Tensor& weight, Format format, DType dtype, bool gated, const float* bias) {
    require(weight.shape.size() == 2 && weight.shape[0] > 0 && weight.shape[1] > 0, "a weight must be a matrix");
    require(!gated || weight.shape[0] % 2 == 0, "gate and up must have the same rows");
    const int64_t n = weight.shape[0] / (gated ? 2 : 1), k = weight.shape[1];
    packed = packed_layout(format, dtype, n, k, gated);
    const auto bytes = size_t(packed_bytes(packed));
    data_ = Memory(bytes < kHugePage / 8 ? bytes : round_up(bytes, kHugePage), true);  // a decoder's lie in one mapping
    packed.data = data_.data();
    const int64_t row_bytes =
        weight.blocks == Blocks::none ? k * dtype_bytes(weight.dtype) : k / 32 * block_bytes(weight.blocks);
    for (int half = 0; half <= int(gated); ++half)
      engine.pack(
          {&packed, static_cast<const char*>(weight.data) + half * n * row_bytes, weight.dtype, 0, half, weight.blocks},
          n);
    if (!bias) return;
    bias_ = Memory(size_t(packed.panels * kPanel) * 4);
    packed.bias = bias_.floats();
    for (int half = 0; half <= int(gated); ++half)
      for (int64_t i = 0; i < n; ++i)
        packed.bias[(gated ? i / kPanel * 2 + half : i / kPanel) * kPanel + i % kPanel] = bias[half * n + i];
  }

  Packed packed;

 private:
  Memory data_, bias_;
};

// The single kernels, on arrays as Python has them.
class Ops {
 public:
  Ops(const std::string& isa, int threads) : engine_(isa, threads) {}

  const char* isa() const { return engine_.kernels().name; }

  // `target`: a dtype, or q8, q4 or w8. GGUF blocks are [n, bytes], `k` tells the columns.
  std::unique_ptr<Matrix> pack(Raw weight, const std::string& source, const std::string& target, bool gated,
                               nb::object bias, int64_t k) {
    const bool quantised = target == "q8" || target == "q4" || target == "w8";
    const Format format = quantised ? parse_format(target) : Format::dense;
    const DType dtype = quantised ? DType::f32 : parse_dtype(target);
    std::vector<int64_t> shape;
    if (k) shape = {int64_t(weight.shape(0)), k};
    const Tensor tensor = tensor_of(weight, source, std::move(shape));
    require(quantised || tensor.blocks == Blocks::none, "blocks are for quantised matrices");
    if (bias.is_none()) return std::make_unique<Matrix>(engine_, tensor, format, dtype, gated, nullptr);
    const auto values = nb::cast<Floats>(bias);
    require(values.shape(0) == weight.shape(0), "a bias must have one value per output");
    return std::make_unique<Matrix>(engine_, tensor, format, dtype, gated, values.data());
  }

  // The matrix as its rows are read back, [n, k]; of a gated one the gate.
  void unpack(const Matrix& w, OutputTable y) {
    require(int64_t(y.shape(0)) == w.packed.n && int64_t(y.shape(1)) == w.packed.k, "y must be [n, k]");
    for (int64_t n = 0; n < w.packed.n; ++n) engine_.unpack_row(w.packed, n, y.data() + n * w.packed.k);
  }

  void gemm(const Matrix& w, FloatTable x, OutputTable y, bool accumulate) {
    require(int64_t(x.shape(1)) == w.packed.k && int64_t(y.shape(1)) == w.packed.n && x.shape(0) == y.shape(0),
            "x must be [rows, k] and y [rows, n]");
    require(!(accumulate && w.packed.gated), "a gated product cannot be accumulated");
    const Epilogue epilogue = w.packed.gated ? Epilogue::silu_mul : accumulate ? Epilogue::add : Epilogue::store;
    const nb::gil_scoped_release release;
    engine_.gemm({&w.packed, x.data(), w.packed.k, y.data(), w.packed.n, epilogue}, int64_t(x.shape(0)));
  }

  void rms_norm(FloatTable x, Floats weight, OutputTable y, float eps) {
    const auto rows = int64_t(x.shape(0)), n = int64_t(x.shape(1)), padded = round_up(n, kPanel);
    require(int64_t(weight.shape(0)) == n && int64_t(y.shape(0)) == rows && int64_t(y.shape(1)) == n,
            "shapes must agree");
    std::vector<float> in(size_t(rows * padded)), w(static_cast<size_t>(padded));
    for (int64_t r = 0; r < rows; ++r) std::copy_n(x.data() + r * n, n, in.begin() + r * padded);
    std::copy_n(weight.data(), n, w.begin());
    engine_.rms_norm(in.data(), padded, w.data(), in.data(), padded, rows, n, eps);
    for (int64_t r = 0; r < rows; ++r) std::copy_n(in.begin() + r * padded, n, y.data() + r * n);
  }

  void softcap(Output x, float cap) { engine_.softcap(x.data(), int64_t(x.shape(0)), cap); }

  void silu_mul(Floats gate, Floats up, Output y) {
    require(gate.shape(0) == up.shape(0) && gate.shape(0) == y.shape(0), "shapes must agree");
    engine_.kernels().silu_mul(gate.data(), up.data(), y.data(), int64_t(y.shape(0)));
  }

  // Samples rows of logits, piece by piece as a step does.
  std::vector<int32_t> sample(FloatTable logits, const std::vector<Draw>& draws, OutputTable kept, int64_t piece) {
    const auto rows = int64_t(logits.shape(0)), ids = int64_t(logits.shape(1));
    require(piece >= 1 && ids >= 1 && rows <= kGemmRows && int64_t(kept.shape(1)) == ids, "no such rows");
    const std::vector<SampleRow> how = sample_rows(size_t(rows), draws, kept);
    std::vector<int32_t> tokens(static_cast<size_t>(rows));
    const nb::gil_scoped_release release;
    sampler_.begin(how, ids);
    engine_.pool().run((ids + piece - 1) / piece, [&](int64_t i, int thread) {
      const int64_t first = i * piece, count = std::min(piece, ids - first);
      std::vector<float> tile(size_t(rows * count));
      for (int64_t r = 0; r < rows; ++r) std::copy_n(logits.data() + r * ids + first, count, tile.data() + r * count);
      sampler_.take(tile.data(), count, 0, rows, first, count, thread);
    });
    sampler_.finish(tokens.data());
    return tokens;
  }

  // Reads all of an array; returns the bytes.
  int64_t probe_read(FloatTable data) {
    const int64_t n = int64_t(data.size()), chunk = 1 << 16;
    const nb::gil_scoped_release release;
    engine_.pool().run(n / chunk, [&](int64_t i, int thread) {
      engine_.scratch(thread)[0] = engine_.kernels().probe_read(data.data() + i * chunk, chunk);
    });
    return n / chunk * chunk * 4;
  }

  // Multiply-adds that depend on nothing but registers, as a product with weights of `dtype` has them; returns the
  // floating-point operations.
  int64_t probe_fma(int64_t iterations, const std::string& dtype) {
    const int64_t chunks = int64_t(engine_.pool().threads()) * 8;
    const bool pairs = engine_.kernels().rounds_bf16 && parse_dtype(dtype) == DType::bf16;
    const auto probe = pairs ? engine_.kernels().probe_bf16 : engine_.kernels().probe_fma;
    const nb::gil_scoped_release release;
    engine_.pool().run(chunks, [&](int64_t, int thread) { engine_.scratch(thread)[0] = probe(iterations); });
    return chunks * iterations * kProbeFlops * (pairs ? 2 : 1);
  }

  Engine& engine() { return engine_; }

 private:
  Engine engine_;
  Sampler sampler_{engine_};
};

// A KV cache of one layer with its rope and attention: q [rows, heads * dim] and the like, as a step has them.
class AttentionLayer {
 public:
  AttentionLayer(Ops& ops, const std::string& dtype, int heads, int kv_heads, int head_dim, int block_size,
                 int64_t blocks, int window, std::vector<float> inv_freq, float factor, float softcap)
      : engine_(ops.engine()),
        heads_(heads),
        window_(window),
        blocks_(blocks),
        inv_freq_(std::move(inv_freq)),
        factor_(factor),
        softcap_(softcap) {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 && head_dim <= 4096 && window >= 0,
            "no such layer");
    require(block_size >= 1 && block_size <= 256 && blocks >= 1 && blocks < 1 << 24, "no such cache");
    require(softcap >= 0, "a softcap must not be negative");
    require(int(inv_freq_.size()) * 2 <= head_dim, "rope.dim must be at most head_dim");
    cache_.dtype = parse_dtype(dtype);
    cache_.block_size = block_size;
    cache_.kv_heads = kv_heads;
    cache_.head_dim = head_dim;
    finish_cache_layout(cache_, 1);
    kv_ = Memory(size_t(blocks * cache_.block_bytes), true);
    cache_.kv = kv_.data();
    engine_.reserve(AttentionPlan::scratch_floats(cache_, heads / kv_heads));
  }

  // Fills the cache with the bytes of NaN in every dtype: what memory that was never written may hold.
  void poison() { std::fill_n(kv_.data(), kv_.bytes(), char(0xff)); }

  int64_t partitions() const { return plan_.partitions(); }

  void run(FloatTable qkv, Ints positions, Ints query_start, Ints context_lens, IntTable tables, float scale,
           OutputTable out) {
    const auto rows = int64_t(qkv.shape(0)), sequences = int64_t(context_lens.shape(0)),
               width = int64_t(tables.shape(1));
    const int group = heads_ / cache_.kv_heads, dim = cache_.head_dim;
    require(int64_t(qkv.shape(1)) == int64_t(heads_ + 2 * cache_.kv_heads) * dim,
            "qkv must be [rows, (heads + 2 kv_heads) * head_dim]");
    require(int64_t(out.shape(0)) == rows && int64_t(out.shape(1)) == int64_t(heads_) * dim,
            "out must be [rows, heads * head_dim]");
    require(int64_t(positions.shape(0)) == rows && int64_t(query_start.shape(0)) == sequences + 1, "shapes must agree");
    require(
        int64_t(tables.shape(0)) == sequences && query_start.data()[0] == 0 && query_start.data()[sequences] == rows,
        "bad rows");
    std::vector<int32_t> sequence(static_cast<size_t>(rows));
    for (int64_t s = 0; s < sequences; ++s) {
      const int32_t first = query_start.data()[s], end = query_start.data()[s + 1], length = context_lens.data()[s];
      require(first <= end && length >= end - first && (length + cache_.block_size - 1) / cache_.block_size <= width,
              "bad rows");
      for (int32_t t = first; t < end; ++t) {
        require(positions.data()[t] == length - (end - t), "bad positions");
        sequence[size_t(t)] = int32_t(s);
      }
      for (int64_t i = 0; i * cache_.block_size < length; ++i)
        require(tables.data()[s * width + i] >= 0 && tables.data()[s * width + i] < blocks_, "bad block");
    }
    const auto half = int64_t(inv_freq_.size());
    std::vector<float> cos(size_t(rows * half)), sin(size_t(rows * half)), q(size_t(rows * heads_ * cache_.padded_dim));
    const nb::gil_scoped_release release;
    const StepRows step{rows, positions.data(), sequence.data(), tables.data(), width};
    rope_table(engine_.pool(), positions.data(), rows, inv_freq_, factor_, cos.data(), sin.data());
    engine_.rope({&step, &cache_, qkv.data(), int64_t(qkv.shape(1)), q.data(), group, 0, int(2 * half), cos.data(),
                  sin.data(), nullptr, nullptr, 0.0f, scale * kLog2E});
    plan_.build({query_start.data(), context_lens.data(), sequences, tables.data(), width}, cache_, group, window_,
                engine_.pool().threads());
    plan_.run(engine_, {&step, &cache_, q.data(), out.data(), int64_t(heads_) * dim, 0, softcap_ * kLog2E});
  }

 private:
  Engine& engine_;
  CacheLayout cache_{};
  int heads_, window_;
  int64_t blocks_;
  std::vector<float> inv_freq_;
  float factor_, softcap_;
  Memory kv_;
  AttentionPlan plan_;
};

}  // namespace
}  // namespace pagebus

NB_MODULE(_cpu, m) {
  using namespace pagebus;
  m.def("runnable_isas", &runnable_isas, "Names of the kernel builds this CPU can run, best first.");

  nb::class_<Decoder>(m, "Decoder", "A decoder's packed weights and KV cache, and one call per step.")
      .def(
          "__init__",
          [](Decoder* self, int64_t vocab_size, int64_t hidden_size, int64_t num_layers, int64_t num_heads,
             int64_t num_kv_heads, int64_t head_dim, int64_t intermediate_size, float norm_eps,
             std::vector<float> inv_freq, float attention_factor, std::vector<int> windows, float attention_scale,
             float attention_softcap, float final_logit_softcap, bool tie_embeddings, bool qkv_bias, bool o_bias,
             bool mlp_bias, bool qk_norm, const std::string& dtype, int64_t block_size,
             const std::vector<std::vector<std::string>>& formats, const std::string& head_format,
             const std::string& embed_format, const std::string& isa, int threads) {
            new (self) Decoder({vocab_size,
                                hidden_size,
                                num_layers,
                                num_heads,
                                num_kv_heads,
                                head_dim,
                                intermediate_size,
                                norm_eps,
                                std::move(inv_freq),
                                attention_factor,
                                std::move(windows),
                                attention_scale,
                                attention_softcap,
                                final_logit_softcap,
                                tie_embeddings,
                                qkv_bias,
                                o_bias,
                                mlp_bias,
                                qk_norm,
                                parse_dtype(dtype),
                                block_size,
                                parse_formats(formats, head_format, embed_format)},
                               isa, threads);
          },
          nb::kw_only(), "vocab_size"_a, "hidden_size"_a, "num_layers"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
          "intermediate_size"_a, "norm_eps"_a, "inv_freq"_a, "attention_factor"_a, "windows"_a, "attention_scale"_a,
          "attention_softcap"_a, "final_logit_softcap"_a, "tie_embeddings"_a, "qkv_bias"_a, "o_bias"_a, "mlp_bias"_a,
          "qk_norm"_a, "dtype"_a, "block_size"_a, "formats"_a, "head_format"_a, "embed_format"_a, "isa"_a, "threads"_a)
      .def_prop_ro("isa", &Decoder::isa)
      .def_prop_ro("block_bytes", &Decoder::block_bytes)
      .def_prop_ro("weight_bytes", &Decoder::weight_bytes)
      .def(
          "load",
          [](Decoder& self, int64_t layer, const std::string& name, Raw array, const std::string& dtype,
             std::vector<int64_t> shape, int64_t first) {
            const Tensor tensor = tensor_of(array, dtype, std::move(shape), first);
            const nb::gil_scoped_release release;
            self.load(layer, name, tensor);
          },
          "layer"_a, "name"_a, "array"_a, "dtype"_a, "shape"_a = std::vector<int64_t>{}, "first"_a = 0)
      .def("allocate_kv", &Decoder::allocate_kv, "num_blocks"_a)
      .def(
          "copy_blocks", [](Decoder& self, Ints pairs) { self.copy_blocks(ints(pairs)); }, "pairs"_a)
      .def(
          "forward",
          [](Decoder& self, Ints tokens, Ints positions, Ints query_start, Ints context_lens, IntTable block_tables,
             Ints logit_rows, OutputTable logits) {
            require(logits.shape(0) == logit_rows.shape(0) && int64_t(logits.shape(1)) == self.vocab_size(),
                    "logits must be [logit_rows, vocab_size]");
            const Batch batch = batch_of(tokens, positions, query_start, context_lens, block_tables, logit_rows);
            const nb::gil_scoped_release release;
            self.forward(batch, logits.data());
          },
          nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(), nb::arg("query_start").noconvert(),
          nb::arg("context_lens").noconvert(), nb::arg("block_tables").noconvert(), nb::arg("logit_rows").noconvert(),
          nb::arg("logits").noconvert())
      .def(
          "forward_and_sample",
          [](Decoder& self, Ints tokens, Ints positions, Ints query_start, Ints context_lens, IntTable block_tables,
             Ints logit_rows, const std::vector<Draw>& draws, OutputTable kept) {
            const Batch batch = batch_of(tokens, positions, query_start, context_lens, block_tables, logit_rows);
            const std::vector<SampleRow> rows = sample_rows(batch.logit_rows.size(), draws, kept);
            std::vector<int32_t> chosen(rows.size());
            {
              const nb::gil_scoped_release release;
              self.forward_and_sample(batch, rows, int64_t(kept.shape(1)), chosen.data());
            }
            return chosen;
          },
          nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(), nb::arg("query_start").noconvert(),
          nb::arg("context_lens").noconvert(), nb::arg("block_tables").noconvert(), nb::arg("logit_rows").noconvert(),
          "draws"_a, nb::arg("kept").noconvert());

  nb::class_<Matrix>(m, "Matrix").def_prop_ro("bytes", [](const Matrix& w) { return packed_bytes(w.packed); });
  nb::class_<Ops>(m, "Ops", "The single kernels, for tests and benchmarks.")
      .def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a)
      .def_prop_ro("isa", &Ops::isa)
      .def("pack", &Ops::pack, "weight"_a, "source"_a, "dtype"_a, "gated"_a = false, "bias"_a = nb::none(), "k"_a = 0)
      .def("unpack", &Ops::unpack, "w"_a, nb::arg("y").noconvert())
      .def("gemm", &Ops::gemm, "w"_a, "x"_a, nb::arg("y").noconvert(), "accumulate"_a = false)
      .def("rms_norm", &Ops::rms_norm, "x"_a, "weight"_a, nb::arg("y").noconvert(), "eps"_a)
      .def("silu_mul", &Ops::silu_mul, "gate"_a, "up"_a, nb::arg("y").noconvert())
      .def("sample", &Ops::sample, "logits"_a, "draws"_a, nb::arg("kept").noconvert(), "piece"_a)
      .def("softcap", &Ops::softcap, nb::arg("x").noconvert(), "cap"_a, "x = tanh(x / cap) * cap.")
      .def("probe_read", &Ops::probe_read, "data"_a, "Reads an array; returns its bytes.")
      .def("probe_fma", &Ops::probe_fma, "iterations"_a, "dtype"_a = "float32",
           "Runs multiply-adds; returns the operations.");
  nb::class_<AttentionLayer>(m, "AttentionLayer", "Rope, KV write and paged attention of one layer.")
      .def(nb::init<Ops&, const std::string&, int, int, int, int, int64_t, int, std::vector<float>, float, float>(),
           nb::keep_alive<1, 2>(), "ops"_a, "dtype"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a,
           "blocks"_a, "window"_a, "inv_freq"_a, "factor"_a, "softcap"_a = 0.0f)
      .def("poison", &AttentionLayer::poison)
      .def_prop_ro("partitions", &AttentionLayer::partitions,
                   "Partitions of keys that the last run read, of all heads.")
      .def("run", &AttentionLayer::run, "qkv"_a, "positions"_a, "query_start"_a, "context_lens"_a, "tables"_a,
           "scale"_a, nb::arg("out").noconvert());
}
