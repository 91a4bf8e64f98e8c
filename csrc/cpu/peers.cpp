// Communicator: peer liveness, the state of each peer, and the error messages that report it.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "communicator.h"
#include "errors.h"
#include "futex.h"

namespace moe_comm {

namespace {

const char* const kOps[] = {"dispatch", "combine", "combine backward", "dispatch backward", "collective"};  // header.py

constexpr int64_t kCollective = 4;
#define MOE_SAME_CALLS "all ranks must call a layer equally often, also in generate and evaluation"
const char* const kSameCalls = MOE_SAME_CALLS;
const char* const kAdvice = ". See the output of that rank, then restart all ranks; " MOE_SAME_CALLS;

std::string op_name(int64_t op) {
  const bool known = op >= 0 && op < static_cast<int64_t>(sizeof kOps / sizeof kOps[0]);
  return known ? std::string(kOps[op]) : "operation " + std::to_string(op);
}

// A snapshot of a header that its owner may be overwriting. Words may come from two calls, but no word is torn.
struct HeaderSnapshot {
  explicit HeaderSnapshot(const Record& record) {
    for (int i = 0; i < kHeaderWords; ++i) words[i] = __atomic_load_n(&record.header[i], __ATOMIC_RELAXED);
  }
  std::string label() const {
    if (words[kFaultWord]) return "";
    const char* text = reinterpret_cast<const char*>(words + kTextWord);
    return std::string(text, strnlen(text, sizeof(int64_t) * (kHeaderWords - kTextWord)));
  }
  // For example "combine (call 3) of layer 'moe.1'" or "all-reduce of (4, 8) float32 along 0 (call 7)".
  std::string call() const {
    const std::string name = label(), number = " (call " + std::to_string(words[1]) + ")";
    if (words[0] == kCollective && !name.empty()) return name + number;
    return op_name(words[0]) + number + (name.empty() ? "" : " of layer '" + name + "'");
  }
  int64_t words[kHeaderWords];
};

std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
  return text;
}

}  // namespace

bool Communicator::alive(int peer) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  if (p.local || !options_.watch_pids) return true;
  if (p.pidfd >= 0) {
    pollfd poll_for{p.pidfd, POLLIN, 0};
    return poll(&poll_for, 1, 0) <= 0;  // readable once the process has exited, even if it is a zombie
  }
  if (kill(p.pid, 0) != 0 && errno == ESRCH) return false;
  // Without pidfd_open (seccomp, old kernels), a zombie still has a pid. Its state follows the closing parenthesis of
  // the name.
  char stat[512];
  const int fd = open(("/proc/" + std::to_string(p.pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;
  const ssize_t length = read(fd, stat, sizeof stat - 1);
  close(fd);
  stat[std::max<ssize_t>(length, 0)] = 0;
  const char* name_end = std::strrchr(stat, ')');
  return name_end == nullptr || name_end[1] == 0 || (name_end[2] != 'Z' && name_end[2] != 'X');
}

std::string Communicator::describe_state(int peer) const {
  const Control& c = control(peer);
  const HeaderSnapshot header(c.record);
  const int64_t since = now_ns() - c.since_ns.load(std::memory_order_relaxed);
  const int64_t step = c.step.load(std::memory_order_relaxed);
  const bool in_op = c.in_op.load(std::memory_order_relaxed) != 0;
  const bool has_called = in_op || header.words[1] != 0;
  std::string text = "rank " + std::to_string(peer) + ": ";
  if (!alive(peer)) {
    text +=
        !has_called ? "dead; it made no call" : (in_op ? "dead; was in " : "dead; its last call was ") + header.call();
  } else if (!has_called) {
    text += "no call yet, for " + seconds(since);
  } else {
    text += (in_op ? "in " : "between operations for " + seconds(since) + ", after ") + header.call();
  }
  if (step >= 0) text += " at step " + std::to_string(step);
  const int waits = c.waiting_for.load(std::memory_order_relaxed);
  if (in_op && waits >= 0) text += ", waiting for rank " + std::to_string(waits) + " since " + seconds(since);
  return text;
}

std::string Communicator::describe_wait(int waiting_for) const {
  const std::string self = "rank " + std::to_string(rank_);
  if (waiting_for < 0) return self + " checked its peers";
  const HeaderSnapshot own(control(rank_).record);
  const int64_t step = control(rank_).step.load(std::memory_order_relaxed);
  return self + " in " + own.call() + (step >= 0 ? " at step " + std::to_string(step) : "") + " waited for rank " +
         std::to_string(waiting_for);
}

void Communicator::fail(FailureKind kind, int failed_rank, const std::string& text) {
  std::string report = text + "\nState of each rank:";
  for (int p = 0; p < world_; ++p) report += "\n  " + describe_state(p);
  Control& own = control(rank_);
  own.failed_rank.store(failed_rank);
  own.failure.store(static_cast<uint32_t>(kind));
  ring();
  failure_ = report;
  failure_kind_ = kind;
  throw_failure();
}

void Communicator::throw_failure() const {
  if (failure_kind_ == FailureKind::died) throw PeerDied(failure_);
  if (failure_kind_ == FailureKind::timeout) throw PeerTimeout(failure_);
  throw PeerError(failure_);
}

void Communicator::throw_if_peer_failed(int waiting_for) {
  for (int p = 0; p < world_; ++p) {
    if (p == rank_) continue;
    const uint32_t failure = control(p).failure.load();
    if (failure) {
      const int failed_rank = control(p).failed_rank.load();
      const char* const reasons[] = {"", " is dead", " did not respond before the deadline",
                                     " aborted the operation after an error"};
      fail(static_cast<FailureKind>(failure), failed_rank,
           describe_wait(waiting_for) + ": rank " + std::to_string(failed_rank) + reasons[failure & 3] +
               (p == failed_rank ? "" : " (reported by rank " + std::to_string(p) + ")") + kAdvice);
    }
  }
  for (int p = 0; p < world_; ++p) {
    if (p != rank_ && !alive(p)) {
      fail(FailureKind::died, p,
           describe_wait(waiting_for) + ": rank " + std::to_string(p) + " (pid " + std::to_string(control(p).pid) +
               ") is dead" + kAdvice);
    }
  }
}

bool Communicator::owned() const { return control(rank_).pid == getpid(); }

void Communicator::check_owner() const {
  if (!owned()) {
    throw PeerError("this group belongs to process " + std::to_string(control(rank_).pid) + ", but process " +
                    std::to_string(getpid()) + " called it; a forked child must create its own group");
  }
}

void Communicator::check_usable() const {
  check_owner();
  if (!failure_.empty()) throw_failure();
}

void Communicator::check_peers() {
  check_owner();
  const std::unique_lock<std::mutex> idle(mutex_, std::try_to_lock);
  if (!idle.owns_lock()) return;
  check_usable();
  throw_if_peer_failed(-1);
}

void Communicator::fail_timeout(int peer, int64_t waited_ns) {
  fail(FailureKind::timeout, peer,
       describe_wait(peer) + " for " + seconds(waited_ns) + ": its process (pid " + std::to_string(control(peer).pid) +
           ") is alive but did not respond before the deadline; " + kSameCalls +
           ". If it is only slow, increase timeout_s");
}

}  // namespace moe_comm
