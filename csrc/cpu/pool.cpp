#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fork_safe.h"

namespace moe_comm {

namespace {

class Pool {
 public:
  void run(int parts, const std::function<void(int)>& part) {
    std::lock_guard<std::mutex> one_at_a_time(run_mutex_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (static_cast<int>(threads_.size()) < parts - 1) {
      const int index = static_cast<int>(threads_.size()) + 1;
      threads_.emplace_back([this, index] { work(index); });
    }
    part_ = &part;
    parts_ = parts;
    left_ = parts - 1;
    error_ = nullptr;
    ++round_;
    lock.unlock();
    wake_.notify_all();
    guarded(part, 0);
    lock.lock();
    done_.wait(lock, [this] { return left_ == 0; });
    part_ = nullptr;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

 private:
  // The first exception of a round is raised by run, after all threads have left the part.
  void guarded(const std::function<void(int)>& part, int index) {
    try {
      part(index);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void work(int index) {
    uint64_t last_round = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != last_round; });
      if (stop_) return;
      last_round = round_;
      if (index >= parts_) continue;
      const std::function<void(int)>* part = part_;
      lock.unlock();
      guarded(*part, index);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex run_mutex_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* part_ = nullptr;
  std::exception_ptr error_;
  int parts_ = 0, left_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
};

// Created on first use and again in a forked child, which inherits no threads. Never destroyed, because a thread may
// still use it at process exit.
Pool& pool() {
  static ForkSafeMutex& mutex = *new ForkSafeMutex();
  static Pool* instance = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<ForkSafeMutex> lock(mutex);
  if (instance == nullptr || owner != getpid()) {
    instance = new Pool();
    owner = getpid();
  }
  return *instance;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, count / std::max<int64_t>(grain, 1)));
  if (parts == 1) {
    if (count > 0) body(0, count);
    return;
  }
  pool().run(static_cast<int>(parts), [&](int part) {
    const int64_t first = count * part / parts, last = count * (part + 1) / parts;
    if (first < last) body(first, last);
  });
}

}  // namespace moe_comm
