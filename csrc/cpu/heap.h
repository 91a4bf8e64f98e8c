// One rank's heap: a POSIX shared-memory segment that grows, and an allocator for blocks in it.
//
// The address range is reserved once, so growing never moves a block. Peers map the grown part when they first access
// an offset beyond their mapping. Only the owner allocates and frees. The allocator state is private to the owner's
// process, so a peer that dies during an operation cannot corrupt it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "cpu/fork_safe.h"

namespace moe_comm {

constexpr int64_t kBlockAlign = 64;
constexpr int64_t kGrowStep = int64_t{2} << 20;  // size of a huge page

// A reserved address range. The first `mapped` bytes map a file (or private memory if fd is -1).
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
  // Extend the mapping to `bytes`. With `populate`, fault in the new pages; returns false if memory ran out.
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
  // A non-empty `name` (with leading slash) creates a shared segment with mode 0600; an empty name creates private
  // memory. The first `control_bytes` are zeroed and never allocated.
  Heap(const std::string& name, int64_t control_bytes, int64_t initial_bytes, int64_t reserve_bytes);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Allocate at least `bytes` and return the offset. Throws HeapError if memory is exhausted, or in a forked child if
  // the segment is shared. Thread-safe.
  int64_t alloc(int64_t bytes);
  // Free a block. Thread-safe. In a forked child it has no effect on a shared segment.
  void free(int64_t offset);
  // Free a block when all of the `flags` 32-bit words at its start are nonzero; peers write them. Until then the block
  // is not reused. Thread-safe.
  void free_when_raised(int64_t offset, int64_t flags);
  // Return whether [p, p + bytes) is inside this heap.
  bool owns(const void* p, int64_t bytes) const;
  // Unlink the name. The memory is released when the last mapping is removed.
  void unlink();

  char* base() const { return map_->base(); }
  const std::string& name() const { return name_; }
  int64_t reserve() const { return map_->reserve(); }
  int64_t size() const { return map_->mapped(); }
  // Bytes and number of blocks. Those of free_when_raised are counted until they are freed.
  int64_t used();
  int64_t peak() const;
  int64_t blocks();

 private:
  void grow(int64_t bytes);
  bool inherited() const;
  void insert_free(int64_t offset, int64_t bytes);
  // With the lock held.
  void free_locked(int64_t offset);
  void free_raised();

  std::string name_;
  bool linked_ = false;
  pid_t owner_;
  std::unique_ptr<Mapping> map_;
  mutable ForkSafeMutex mutex_;
  std::map<int64_t, int64_t> free_;                  // offset -> bytes, adjacent free blocks are merged
  std::set<std::pair<int64_t, int64_t>> free_size_;  // (bytes, offset), for best fit
  std::map<int64_t, int64_t> live_;                  // offset -> bytes
  std::map<int64_t, int64_t> retired_;               // offset -> flags, of free_when_raised
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

// Remove segments named /<prefix>.<pid>.* of processes that have exited, and return how many were removed. Runs at
// startup.
int sweep_stale(const std::string& prefix);

}  // namespace moe_comm
