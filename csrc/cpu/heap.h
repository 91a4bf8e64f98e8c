// One rank's memory: a POSIX shared-memory segment that grows, and blocks within it.
//
// The address range is reserved once, so growing never moves a block; peers map the grown part when they first
// see an offset beyond what they have mapped. Only the owner allocates and frees; the bookkeeping is private to
// its process, so a peer that dies in the middle of an operation cannot damage it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace moe_comm {

constexpr int64_t kBlockAlign = 64;
constexpr int64_t kGrowStep = int64_t{2} << 20;  // a huge page

// A reserved address range of which the first `mapped` bytes show a file (or private memory where fd is -1).
class Mapping {
 public:
  Mapping(int fd, int64_t reserve);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* base() const { return base_; }
  int64_t mapped() const { return mapped_.load(std::memory_order_acquire); }
  int64_t reserve() const { return reserve_; }
  int fd() const { return fd_; }
  // Map up to `bytes`. With `populate`, touch the new pages; returns false if memory ran out doing so.
  bool extend(int64_t bytes, bool populate);
  void shrink(int64_t bytes);

 private:
  int fd_;
  char* base_ = nullptr;
  std::atomic<int64_t> mapped_{0};
  int64_t reserve_ = 0;
};

class Heap {
 public:
  // `name` (with leading slash) creates a shared segment, mode 0600; empty makes private memory.
  // The first `control_bytes` are zeroed and never handed out.
  Heap(const std::string& name, int64_t control_bytes, int64_t initial_bytes, int64_t reserve_bytes);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Offset of a block of at least `bytes`; throws HeapError when memory is exhausted, and in a forked child where the
  // segment is shared. Thread-safe.
  int64_t alloc(int64_t bytes);
  // Give a block back. Safe on any thread, and in a forked child, where it does nothing to a shared segment.
  void free(int64_t offset);
  // Whether [p, p + bytes) lies within this heap.
  bool owns(const void* p, int64_t bytes) const;
  // Remove the name; the memory lives until the last mapping is gone.
  void unlink();

  char* base() const { return map_->base(); }
  const std::string& name() const { return name_; }
  int64_t reserve() const { return map_->reserve(); }
  int64_t size() const { return map_->mapped(); }
  int64_t used() const;
  int64_t peak() const;
  int64_t blocks() const;

 private:
  void grow(int64_t bytes);
  bool inherited() const;
  void insert_free(int64_t offset, int64_t bytes);

  std::string name_;
  bool linked_ = false;
  pid_t owner_;
  std::unique_ptr<Mapping> map_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;                  // offset -> bytes, neighbours merged
  std::set<std::pair<int64_t, int64_t>> free_size_;  // (bytes, offset), for best fit
  std::map<int64_t, int64_t> live_;                  // offset -> bytes
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

// Remove segments named /<prefix>.<pid>.* whose process is gone; returns how many. Run at start.
int sweep_stale(const std::string& prefix);

}  // namespace moe_comm
