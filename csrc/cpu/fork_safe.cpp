#include "fork_safe.h"

#include <pthread.h>

#include <set>

namespace moe_comm {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<ForkSafeMutex*> all;
};

// Never destroyed: heaps may be freed, and processes forked, while the process exits.
Registry& registry() {
  static Registry* const instance = new Registry();
  return *instance;
}

void lock_all() {
  registry().mutex.lock();
  for (ForkSafeMutex* mutex : registry().all) mutex->lock();
}

void unlock_all() {
  for (ForkSafeMutex* mutex : registry().all) mutex->unlock();
  registry().mutex.unlock();
}

// When the library is loaded, before a second thread can use it.
[[maybe_unused]] const int registered = (registry(), pthread_atfork(lock_all, unlock_all, unlock_all));

}  // namespace

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.insert(this);
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.erase(this);
}

}  // namespace moe_comm
