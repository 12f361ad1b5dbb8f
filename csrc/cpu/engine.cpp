#include "engine.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace pagebus {
namespace {

constexpr int64_t kChunkBytes = 262144;  // weights of a chunk at few rows
constexpr int64_t kRowMultiple = 12;     // of a row block, so that most register blocks are full

bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef PAGEBUS_HAVE_AVX512
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && runs_avx2();
}
#endif

// Tables of the builds that this CPU can run, each with all that the one before it has.
std::vector<Kernels> find_builds() {
  std::vector<Kernels> builds;
  if (runs_avx2()) builds.push_back(*kernels_avx2());
#ifdef PAGEBUS_HAVE_AVX512
  if (!runs_avx512()) return builds;
  builds.push_back(*kernels_avx512());
  [[maybe_unused]] const auto exchange = [&](void (*kernels)(Kernels&)) {
    Kernels table = builds.back();
    kernels(table);
    builds.push_back(table);
  };
#ifdef PAGEBUS_HAVE_AVX512_VNNI
  if (__builtin_cpu_supports("avx512vnni")) exchange(exchange_avx512_vnni);
#endif
#ifdef PAGEBUS_HAVE_AVX512_BF16
  if (__builtin_cpu_supports("avx512bf16")) exchange(exchange_avx512_bf16);
#endif
#endif
  return builds;
}

// Best first.
const std::vector<Kernels>& builds() {
  static const std::vector<Kernels> all = [] {
    std::vector<Kernels> found = find_builds();
    std::reverse(found.begin(), found.end());
    return found;
  }();
  return all;
}

const Kernels* choose(const std::string& isa) {
  std::string known;
  for (const Kernels& kernels : builds()) {
    if (isa.empty() || isa == kernels.name) return &kernels;
    known += (known.empty() ? "" : ", ") + std::string(kernels.name);
  }
  if (known.empty())
    throw std::invalid_argument("this CPU has none of the instruction sets AVX2 with FMA and F16C, or AVX-512");
  throw std::invalid_argument("instruction set '" + isa + "' cannot run here; these can: " + known);
}

int check_threads(int threads) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("threads must be in [1, 1024], got " + std::to_string(threads));
  return threads;
}

// Rows per chunk of a loop over the rows of a step: small loops stay on the caller.
constexpr int64_t kRowChunk = 8;

template <class F>
void run_rows(Pool& pool, int64_t rows, const F& f) {
  pool.run((rows + kRowChunk - 1) / kRowChunk,
           [&](int64_t chunk, int thread) { f(chunk * kRowChunk, std::min(rows, (chunk + 1) * kRowChunk), thread); });
}

}  // namespace

std::vector<std::string> runnable_isas() {
  std::vector<std::string> names;
  for (const Kernels& kernels : builds()) names.push_back(kernels.name);
  return names;
}

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  throw std::invalid_argument("dtype must be float32, bfloat16 or float16, got '" + name + "'");
}

Format parse_format(const std::string& name) {
  if (name == "dense") return Format::dense;
  if (name == "q8") return Format::q8;
  if (name == "q4") return Format::q4;
  if (name == "w8") return Format::w8;
  throw std::invalid_argument("format must be dense, q8, q4 or w8, got '" + name + "'");
}

Engine::Engine(const std::string& isa, int threads) : kernels_(choose(isa)), pool_(check_threads(threads)) {
  scratch_.resize(size_t(threads));
  reserve(kGemmScratch + kTileFloats);
}

void Engine::reserve(int64_t floats) {
  for (Memory& memory : scratch_)
    if (int64_t(memory.bytes()) < floats * 4) memory = Memory(size_t(floats) * 4);
}

// With few rows the weights' bytes set the size of a chunk, with many the arithmetic does. Few rows read several panels
// beside each other, as many as the chunk has.
Engine::Cut Engine::cut(const Packed& w, int64_t rows, int64_t units) const {
  const int64_t threads = pool_.threads(), row_blocks = (rows + kGemmRows - 1) / kGemmRows;
  int64_t step = kChunkBytes / (w.panel_bytes * kUnitPanels);
  if (rows > kThinGemmRows) step = std::min<int64_t>(kSpanPanels / kUnitPanels, units * row_blocks / (threads * 8));
  step = std::clamp<int64_t>(step, 1, std::max<int64_t>(1, units / (threads * 4)));
  if (rows <= kThinGemmRows) step = step < 4 ? 2 : step / 4 * 4;
  return {round_up((rows + row_blocks - 1) / row_blocks, kRowMultiple), row_blocks, step, (units + step - 1) / step};
}

Engine::Product Engine::product(const GemmArgs& args, int64_t rows) {
  Product product{args, kernels_->gemm, {}};
  if (args.w->format == Format::w8) {
    product.kernel = kernels_->gemm_w8a8;
    product.codes = encode_rows(args, rows);
  } else if (args.w->format != Format::dense) {
    product.kernel = kernels_->gemm_quantized;
  } else if (args.w->dtype == DType::bf16 && kernels_->rounds_bf16) {
    product.args = round_rows(args, rows);
  }
  return product;
}

void Engine::gemm(const GemmArgs& args, int64_t rows) {
  const int64_t units = (args.w->panels + kUnitPanels - 1) / kUnitPanels;
  const Cut c = cut(*args.w, rows, units);
  const Product product = this->product(args, rows);
  pool_.run(c.row_blocks * c.spans, [&](int64_t chunk, int thread) {
    const int64_t row = chunk / c.spans * c.row_block, unit = chunk % c.spans * c.step;
    product.run(row, std::min(rows, row + c.row_block), unit, std::min(units, unit + c.step), scratch(thread));
  });
}

// Row codes take two bytes each at most; rows a multiple of 4096 bytes apart would fall on the same cache sets.
RowCodes Engine::encode_rows(const GemmArgs& args, int64_t rows) {
  const int64_t groups = (args.w->k + kMaxGroup - 1) / kMaxGroup, ld = groups * kMaxGroup * 2 + 64;
  const int64_t scales_at = rows * ld, bytes = scales_at + rows * groups * 8;
  if (int64_t(codes_.bytes()) < bytes) codes_ = Memory(size_t(round_up(bytes, 1 << 16)));
  auto* scales = reinterpret_cast<float*>(codes_.data() + scales_at);
  const RowCodes codes{codes_.data(), ld, scales, reinterpret_cast<int32_t*>(scales + rows * groups), groups};
  run_rows(pool_, rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) kernels_->encode_row(args.x + r * args.ldx, args.w->k, r, codes);
  });
  return codes;
}

// An odd last k is paired with 0. Rows a multiple of 4096 bytes apart would fall on the same cache sets.
GemmArgs Engine::round_rows(GemmArgs args, int64_t rows) {
  const int64_t k = args.w->k, ld = round_up(k, 32) / 2 + 16, bytes = rows * ld * 4;
  if (int64_t(pairs_.bytes()) < bytes) pairs_ = Memory(size_t(round_up(bytes, 1 << 16)));
  auto* pairs = reinterpret_cast<uint32_t*>(pairs_.data());
  run_rows(pool_, rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      if (k % 2) pairs[r * ld + k / 2] = 0;
      kernels_->narrow(DType::bf16, args.x + r * args.ldx, pairs + r * ld, k);
    }
  });
  args.pairs = pairs;
  args.ld_pairs = ld;
  return args;
}

void Engine::pack(const PackArgs& args, int64_t rows) {
  const int64_t lead = args.first % kPanel;  // chunks end where panels do, so that no two threads share one
  std::atomic<bool> finite{true};
  pool_.run((rows + lead + kPanel - 1) / kPanel, [&](int64_t chunk, int) {
    const int64_t begin = std::max<int64_t>(0, chunk * kPanel - lead),
                  end = std::min(rows, (chunk + 1) * kPanel - lead);
    if (args.w->format == Format::dense)
      kernels_->pack(args, begin, end);
    else if (!kernels_->quantize(args, begin, end))
      finite = false;
  });
  if (!finite) throw std::invalid_argument("a value that is not finite cannot be quantised");
}

void Engine::unpack_row(const Packed& w, int64_t output, float* y) const {
  (w.format == Format::dense ? kernels_->unpack_row : kernels_->unpack_quantized)(w, output, y);
}

void Engine::rms_norm(const float* x, int64_t ldx, const float* weight, float* y, int64_t ldy, int64_t rows, int64_t n,
                      float eps) {
  run_rows(pool_, rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      kernels_->rms_norm(x + r * ldx, weight, y + r * ldy, round_up(n, kPanel), n, eps);
  });
}

void Engine::rope(const RopeArgs& args) {
  run_rows(pool_, args.step->rows,
           [&](int64_t begin, int64_t end, int thread) { kernels_->rope(args, begin, end, scratch(thread)); });
}

void Engine::softcap(float* x, int64_t n, float cap) {
  constexpr int64_t chunk = 1 << 13;
  pool_.run((n + chunk - 1) / chunk,
            [&](int64_t i, int) { kernels_->softcap(x + i * chunk, std::min(chunk, n - i * chunk), cap); });
}

Packed packed_layout(Format format, DType dtype, int64_t n, int64_t k, bool gated) {
  const int64_t panels = (n + kPanel - 1) / kPanel * (gated ? 2 : 1);
  const int64_t depth = dtype == DType::bf16 ? round_up(k, 2) : k;
  const int64_t bytes = format == Format::dense ? depth * kPanel * dtype_bytes(dtype)
                                                : round_up(k, group_k(format)) / group_k(format) * group_bytes(format);
  return {dtype, gated, n, k, panels, round_up(bytes, 64), nullptr, nullptr, format};
}

int64_t packed_bytes(const Packed& w) { return w.panels * w.panel_bytes; }

void finish_cache_layout(CacheLayout& c, int64_t layers) {
  const int64_t width = dtype_bytes(c.dtype);
  c.padded_dim = int(round_up(c.head_dim, kPanel));
  c.key_lanes = c.block_size % kPanel ? c.block_size : kPanel;
  c.value_offset = round_up(int64_t(c.head_dim) * c.block_size * width, 64);
  c.head_bytes = c.value_offset + round_up(int64_t(c.padded_dim) * c.block_size * width, 64);
  c.layer_bytes = c.head_bytes * c.kv_heads;
  c.block_bytes = c.layer_bytes * layers;
}

void rope_table(Pool& pool, const int32_t* positions, int64_t rows, const std::vector<float>& inv_freq, float factor,
                float* cos, float* sin) {
  const auto half = int64_t(inv_freq.size());
  run_rows(pool, rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = float(positions[t]) * inv_freq[size_t(i)];
        cos[t * half + i] = std::cos(angle) * factor;
        sin[t * half + i] = std::sin(angle) * factor;
      }
  });
}

}  // namespace pagebus
