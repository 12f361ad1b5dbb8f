// An instruction set chosen at run time, a pool of threads and their scratch memory: what runs the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace pagebus {

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Names of the kernel builds this CPU can run, best first.
std::vector<std::string> runnable_isas();

DType parse_dtype(const std::string& name);
Format parse_format(const std::string& name);

class Engine {
 public:
  // `isa`: one of runnable_isas(), or "" for the best. Throws std::invalid_argument.
  Engine(const std::string& isa, int threads);

  const Kernels& kernels() const { return *kernels_; }
  Pool& pool() { return pool_; }

  // Makes sure that every thread has this much scratch.
  void reserve(int64_t floats);
  float* scratch(int thread) { return scratch_[size_t(thread)].floats(); }

  void gemm(const GemmArgs& args, int64_t rows);
  // The product's outputs below `columns` piece by piece while they are in cache, instead of into args.y:
  // use(tile, ld, row, row_end, column, column_end, thread). A thread's pieces of a row ascend.
  template <class F>
  void gemm_tiles(const GemmArgs& args, int64_t rows, int64_t columns, const F& use);
  // Packs, or quantises. Throws std::invalid_argument for values that cannot be quantised.
  void pack(const PackArgs& args, int64_t rows);
  void unpack_row(const Packed& w, int64_t output, float* y) const;
  void rms_norm(const float* x, int64_t ldx, const float* weight, float* y, int64_t ldy, int64_t rows, int64_t n,
                float eps);
  void rope(const RopeArgs& args);
  void softcap(float* x, int64_t n, float cap);

 private:
  // A product with the kernel for its matrix, and the rows' codes where that takes them.
  struct Product {
    GemmArgs args;
    decltype(Kernels::gemm) kernel;
    RowCodes codes;

    void run(int64_t row, int64_t row_end, int64_t unit, int64_t unit_end, float* scratch) const {
      GemmArgs own = args;
      own.codes = &codes;
      kernel(own, row, row_end, unit, unit_end, scratch);
    }
  };
  Product product(const GemmArgs& args, int64_t rows);

  // How a product is cut into chunks: row blocks times spans of units.
  struct Cut {
    int64_t row_block, row_blocks, step, spans;
  };
  Cut cut(const Packed& w, int64_t rows, int64_t units) const;

  // The activations in the form that a product takes: codes, or pairs of bf16.
  RowCodes encode_rows(const GemmArgs& args, int64_t rows);
  GemmArgs round_rows(GemmArgs args, int64_t rows);

  const Kernels* kernels_;
  Pool pool_;

  std::vector<Memory> scratch_;
  Memory codes_, pairs_;
};

constexpr int64_t kTileFloats = 16384;  // of a tile of gemm_tiles, in a thread's scratch

template <class F>
void Engine::gemm_tiles(const GemmArgs& args, int64_t rows, int64_t columns, const F& use) {
  constexpr int64_t width = kUnitPanels * kPanel;
  const int64_t units = (columns + width - 1) / width;
  Cut c = cut(*args.w, rows, units);
  c.step = std::min(c.step, std::max<int64_t>(1, kTileFloats / (c.row_block * width)));
  c.spans = (units + c.step - 1) / c.step;
  const Product whole = product(args, rows);
  pool_.run(c.row_blocks * c.spans, [&](int64_t chunk, int thread) {
    const int64_t row = chunk / c.spans * c.row_block, row_end = std::min(rows, row + c.row_block);
    const int64_t unit = chunk % c.spans * c.step, unit_end = std::min(units, unit + c.step);
    float* tile = scratch(thread) + kGemmScratch;
    Product piece = whole;
    piece.args.ldy = (unit_end - unit) * width;
    piece.args.y = tile - row * piece.args.ldy - unit * width;
    piece.run(row, row_end, unit, unit_end, scratch(thread));
    use(tile, piece.args.ldy, row, row_end, unit * width, std::min(columns, unit_end * width), thread);
  });
}

// Shape, size and place of a packed matrix; the data is the caller's. `dtype` is that of a dense one.
Packed packed_layout(Format format, DType dtype, int64_t n, int64_t k, bool gated);
int64_t packed_bytes(const Packed& w);

// Fills in the offsets of a layout whose dtype, block_size, kv_heads and head_dim are set.
void finish_cache_layout(CacheLayout& cache, int64_t layers);

// cos and sin [rows][dim / 2] of position * inv_freq, times `factor`.
void rope_table(Pool& pool, const int32_t* positions, int64_t rows, const std::vector<float>& inv_freq, float factor,
                float* cos, float* sin);

}  // namespace pagebus
