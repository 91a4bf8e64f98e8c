#include "heap.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "errors.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace moe_comm {

namespace {

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

std::string reason(const std::string& what, int code) { return what + ": " + std::strerror(code); }

}  // namespace

Mapping::Mapping(int fd, int64_t reserve) : fd_(fd), reserve_(round_up(reserve, kGrowStep)) {
  // Reserve one extra step, so that the base can be aligned to a huge page.
  const size_t bytes = static_cast<size_t>(reserve_ + kGrowStep);
  void* raw = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    const int code = errno;
    if (fd_ >= 0) close(fd_);
    throw HeapError(reason("cannot reserve " + std::to_string(reserve_) + " bytes of addresses", code));
  }
  char* start = static_cast<char*>(raw);
  base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(start), kGrowStep));
  if (base_ > start) munmap(start, static_cast<size_t>(base_ - start));
  char* end = start + bytes;
  char* used_end = base_ + reserve_;
  if (end > used_end) munmap(used_end, static_cast<size_t>(end - used_end));
}

Mapping::~Mapping() {
  munmap(base_, static_cast<size_t>(reserve_));
  if (fd_ >= 0) close(fd_);
}

bool Mapping::extend(int64_t bytes, bool populate) {
  bytes = round_up(bytes, kGrowStep);
  const int64_t old = mapped();
  if (bytes <= old) return true;
  if (bytes > reserve_) return false;
  const size_t more = static_cast<size_t>(bytes - old);
  const int flags = MAP_FIXED | (fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  char* at = base_ + old;
  if (mmap(at, more, PROT_READ | PROT_WRITE, flags, fd_, fd_ >= 0 ? old : 0) == MAP_FAILED) return false;
  madvise(at, more, MADV_HUGEPAGE);
  // Page faults cost more than the copies that follow, so fault the pages in now. If the kernel lacks this call, pages
  // are faulted in on first access; posix_fallocate has reserved them.
  if (populate && madvise(at, more, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    shrink(old);
    return false;
  }
  mapped_.store(bytes, std::memory_order_release);
  return true;
}

void Mapping::shrink(int64_t bytes) {
  // Return everything beyond `bytes` to reserved address space.
  mmap(base_ + bytes, static_cast<size_t>(reserve_ - bytes), PROT_NONE,
       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mapped_.store(std::min(mapped(), bytes), std::memory_order_release);
}

Heap::Heap(const std::string& name, int64_t control_bytes, int64_t initial_bytes, int64_t reserve_bytes)
    : name_(name), owner_(getpid()) {
  int fd = -1;
  if (!name_.empty()) {
    fd = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) throw HeapError(reason("cannot create shared memory " + name_, errno));
    linked_ = true;
    flock(fd, LOCK_SH | LOCK_NB);  // shows sweep_stale, in any pid namespace, that a process uses the segment
  }
  const int64_t control = round_up(control_bytes, kBlockAlign);
  try {
    map_ = std::make_unique<Mapping>(fd, reserve_bytes);
    grow(std::max(control, initial_bytes));
  } catch (...) {
    unlink();
    throw;
  }
  if (control) {
    // The first free block starts after the control region.
    const int64_t bytes = free_.at(0);
    free_.clear();
    free_size_.clear();
    std::memset(base(), 0, static_cast<size_t>(control));
    if (bytes > control) insert_free(control, bytes - control);
  }
}

Heap::~Heap() {
  if (getpid() == owner_) unlink();  // a forked child must not unlink a segment that its parent still uses
}

void Heap::unlink() {
  if (linked_) shm_unlink(name_.c_str());
  linked_ = false;
}

void Heap::insert_free(int64_t offset, int64_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    free_size_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free_size_.erase({previous->second, previous->first});
      free_.erase(previous);
    }
  }
  free_[offset] = bytes;
  free_size_.insert({bytes, offset});
}

void Heap::grow(int64_t bytes) {
  const int64_t old = map_->mapped();
  const int64_t target = round_up(old + bytes, kGrowStep);
  if (target == old) return;
  const std::string action = "cannot grow " + (name_.empty() ? std::string("the heap") : "shared memory " + name_) +
                             " from " + std::to_string(old) + " to " + std::to_string(target) + " bytes";
  if (target > map_->reserve()) {
    throw HeapError(action + ": it may hold at most " + std::to_string(map_->reserve()) +
                    " bytes, the reserved address range. Increase reserve_bytes, or send fewer tokens at once");
  }
  const int fd = map_->fd();
  if (fd >= 0 && ftruncate(fd, target) != 0) throw HeapError(reason(action, errno));
  // Touch pages through the mapping first, which can use huge pages. Then call fallocate, so that a full /dev/shm is an
  // error here instead of a SIGBUS later.
  bool done = map_->extend(target, /*populate=*/true);
  int code = done ? 0 : fd >= 0 ? ENOSPC : ENOMEM;
  if (done && fd >= 0) {
    do {
      code = posix_fallocate(fd, old, target - old);
    } while (code == EINTR);
    done = code == 0;
  }
  if (!done) {
    map_->shrink(old);
    if (fd >= 0 && ftruncate(fd, old) != 0) code = errno;
    throw HeapError(reason(action, code) + (fd >= 0 ? ". /dev/shm is full: free it, remount it larger "
                                                      "(mount -o remount,size=...), or send fewer tokens at once"
                                                    : ""));
  }
  insert_free(old, target - old);
}

int64_t Heap::alloc(int64_t bytes) {
  if (bytes < 0 || bytes > map_->reserve()) {
    throw HeapError("cannot allocate a block of " + std::to_string(bytes) + " bytes: the heap may hold at most " +
                    std::to_string(map_->reserve()) +
                    " bytes, the reserved address range. Increase reserve_bytes, or send fewer tokens at once");
  }
  if (inherited()) {
    throw HeapError("shared memory " + name_ + " belongs to process " + std::to_string(owner_) + "; process " +
                    std::to_string(getpid()) + ", a forked child, must create its own group");
  }
  bytes = std::max(round_up(bytes, kBlockAlign), kBlockAlign);
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  free_raised();
  auto fit = free_size_.lower_bound({bytes, 0});
  if (fit == free_size_.end()) {
    // A free block at the end of the heap becomes a part of the new one.
    const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
    const bool at_end = last != free_.end() && last->first + last->second == map_->mapped();
    grow(at_end ? bytes - last->second : bytes);
    fit = free_size_.lower_bound({bytes, 0});
  }
  const auto [size, offset] = *fit;
  free_size_.erase(fit);
  free_.erase(offset);
  if (size > bytes) insert_free(offset + bytes, size - bytes);
  live_[offset] = bytes;
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return offset;
}

void Heap::free(int64_t offset) {
  if (inherited()) return;
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  free_locked(offset);
}

void Heap::free_locked(int64_t offset) {
  auto it = live_.find(offset);
  if (it == live_.end()) return;
  const int64_t bytes = it->second;
  live_.erase(it);
  used_ -= bytes;
  insert_free(offset, bytes);
}

void Heap::free_when_raised(int64_t offset, int64_t flags) {
  if (inherited()) return;
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  retired_[offset] = flags;
  free_raised();
}

void Heap::free_raised() {
  for (auto it = retired_.begin(); it != retired_.end();) {
    auto* flags = reinterpret_cast<std::atomic<uint32_t>*>(base() + it->first);
    const bool raised = std::all_of(flags, flags + it->second, [](const std::atomic<uint32_t>& flag) {
      return flag.load(std::memory_order_acquire) != 0;
    });
    if (raised) free_locked(it->first);
    it = raised ? retired_.erase(it) : std::next(it);
  }
}

// Private memory is copied on fork and belongs to the child. A shared segment still belongs to the parent; the child
// has only a copy of the allocator state.
bool Heap::inherited() const { return map_->fd() >= 0 && getpid() != owner_; }

bool Heap::owns(const void* p, int64_t bytes) const {
  const char* at = static_cast<const char*>(p);
  return at >= base() && at + bytes <= base() + size();
}

int64_t Heap::used() {
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  free_raised();
  return used_;
}

int64_t Heap::peak() const {
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  return peak_;
}

int64_t Heap::blocks() {
  const std::lock_guard<ForkSafeMutex> lock(mutex_);
  free_raised();
  return static_cast<int64_t>(live_.size());
}

int sweep_stale(const std::string& prefix) {
  DIR* dir = opendir("/dev/shm");
  if (dir == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(dir)) {
    const std::string file = entry->d_name;
    if (file.rfind(prefix + ".", 0) != 0) continue;
    const long pid = std::strtol(file.c_str() + prefix.size() + 1, nullptr, 10);
    if (pid <= 0 || kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    // The pid may belong to another pid namespace. A process that has the segment open also holds a lock on it.
    const int fd = shm_open(("/" + file).c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && shm_unlink(("/" + file).c_str()) == 0) ++removed;
    close(fd);
  }
  closedir(dir);
  return removed;
}

}  // namespace moe_comm
