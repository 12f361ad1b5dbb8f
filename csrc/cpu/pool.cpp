#include "pool.h"

#include <chrono>
#include <stdexcept>

namespace pagebus {
namespace {

constexpr int kChunkBits = 20;
constexpr uint64_t kChunkMask = (uint64_t(1) << kChunkBits) - 1;
constexpr auto kSpin = std::chrono::microseconds(30);  // longer than the serial parts between two loops of a step

uint64_t chunks_of(uint64_t ticket) { return ticket >> kChunkBits & kChunkMask; }
uint64_t next_of(uint64_t ticket) { return ticket & kChunkMask; }

// Polls `ready` for a few microseconds; says whether it came true.
template <class F>
bool spin(const F& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
  stop_ = true;
  wake();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::wake() {
  signal_.fetch_add(1);
  signal_.notify_all();
}

void Pool::share(int64_t chunks, Body body, const void* context) {
  if (uint64_t(chunks) > kChunkMask) throw std::length_error("too many chunks in a parallel loop");
  body_ = body;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 2 * kChunkBits) + 1;
  ticket_.store(job << 2 * kChunkBits | uint64_t(chunks) << kChunkBits);
  if (sleepers_.load()) wake();
  while (work(0)) {
  }
  const auto finished = [&] { return done_.load(std::memory_order_acquire) == uint32_t(chunks); };
  if (spin(finished)) return;
  for (uint32_t seen = done_.load(); seen != uint32_t(chunks); seen = done_.load()) done_.wait(seen);
}

// Claims one chunk of the current job and runs it; false when none is left.
bool Pool::work(int thread) {
  uint64_t ticket = ticket_.load();
  do {
    if (next_of(ticket) >= chunks_of(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1));
  const uint32_t all = uint32_t(chunks_of(ticket));
  body_(context_, int64_t(next_of(ticket)), thread);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == all && thread) done_.notify_one();
  return true;
}

void Pool::serve(int thread) {
  const auto open = [this] {
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    return next_of(ticket) < chunks_of(ticket);
  };
  while (!stop_.load()) {
    while (work(thread)) {
    }
    if (spin(open)) continue;
    const uint32_t seen = signal_.load();
    sleepers_.fetch_add(1);
    if (!open() && !stop_.load()) signal_.wait(seen);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace pagebus
