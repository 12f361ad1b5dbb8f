// Zeroed memory straight from the system, touched page by page as it is first written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace pagebus {

constexpr size_t kHugePage = size_t(2) << 20;

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes, bool huge_pages = false) : bytes_(bytes) {
    if (!bytes) return;
#ifdef __SANITIZE_ADDRESS__  // memory whose ends the sanitizer watches
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes)) throw std::bad_alloc();
    data_ = static_cast<char*>(std::memset(p, 0, bytes));
    (void)huge_pages;
#else
    const size_t slack = huge_pages ? kHugePage : 0;
    void* p = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping_ = data_ = static_cast<char*>(p);
    mapped_ = bytes + slack;
    if (!huge_pages) return;
    data_ += (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage;
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        mapping_(std::exchange(other.mapping_, nullptr)),
        mapped_(std::exchange(other.mapped_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~Memory() {
#ifdef __SANITIZE_ADDRESS__
    std::free(data_);
#else
    if (mapping_) munmap(mapping_, mapped_);
#endif
  }

  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  char* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace pagebus
