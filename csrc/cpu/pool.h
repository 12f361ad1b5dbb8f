// Threads that share out the chunks of a loop, and sleep when there is none.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pagebus {

// One caller at a time. Chunks are claimed one by one, so a busy core only delays the chunk it holds, and a thread that
// never wakes delays nothing.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls f(chunk, thread) for every chunk in [0, chunks), on the caller (thread 0) and the workers; returns when all
  // are done. f must not throw.
  template <class F>
  void run(int64_t chunks, const F& f) {
    if (chunks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < chunks; ++i) f(i, 0);
      return;
    }
    share(chunks, [](const void* context, int64_t i, int thread) { (*static_cast<const F*>(context))(i, thread); }, &f);
  }

 private:
  using Body = void (*)(const void*, int64_t, int);

  void share(int64_t chunks, Body body, const void* context);
  bool work(int thread);
  void serve(int thread);
  void wake();

  // Job number, number of chunks and next chunk in one word: who advances it owns a chunk of the job that is current.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  Body body_ = nullptr;
  const void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace pagebus
