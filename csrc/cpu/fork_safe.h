// Mutexes that a forked child finds free, and the data that they guard complete.
//
// A child has only the thread that forked. A mutex that another thread held stays locked in the child forever, over
// data that may be half changed. So a fork waits for the holders of all these mutexes:
//
//   fork():  lock all  ->  fork  ->  parent: unlock all
//                               ->  child:  unlock all
#pragma once

#include <mutex>

namespace moe_comm {

// A thread that holds one of these mutexes must not fork, and must not lock a second one.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace moe_comm
