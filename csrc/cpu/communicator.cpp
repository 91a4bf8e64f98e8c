#include "communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include "errors.h"
#include "futex.h"

namespace moe_comm {

namespace {

constexpr uint64_t kMagic = 0x6d6f65636f6d6d01;
constexpr uint32_t kPosted = 1, kReady = 2, kDone = 3, kPerOp = 4;
constexpr int64_t kCheckIntervalNs = 100 * 1000 * 1000;  // ns between liveness checks of the peers

int open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Heap> heap, int rank, int world, Options options)
    : heap_(std::move(heap)),
      rank_(rank),
      world_(world),
      options_(options),
      timeout_s_(options.timeout_s),
      op_base_(options.first_progress) {
  peers_.resize(static_cast<size_t>(world));
  peers_[static_cast<size_t>(rank)].local = heap_;
  Control* own = new (heap_->base()) Control();
  own->pid = getpid();
  own->rank = static_cast<uint32_t>(rank);
  own->progress.store(options.first_progress);
  own->waiting_for.store(-1);
  own->step.store(-1);
  own->since_ns.store(now_ns());
  own->magic.store(kMagic, std::memory_order_release);
}

Communicator::~Communicator() {
  for (Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

void Communicator::attach(const std::vector<std::string>& names) {
  if (static_cast<int>(names.size()) != world_)
    throw HeapError("attach needs the segment names of all " + std::to_string(world_) + " ranks; got " +
                    std::to_string(names.size()));
  for (int p = 0; p < world_; ++p) {
    if (p == rank_) continue;
    Peer& peer = peers_[static_cast<size_t>(p)];
    const std::string& name = names[static_cast<size_t>(p)];
    const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
      throw HeapError("cannot open shared memory " + name + " of rank " + std::to_string(p) + ": " +
                      std::strerror(errno) + ". The ranks must run on one host, as one user, with the same /dev/shm");
    struct stat info{};
    if (fstat(fd, &info) != 0 || info.st_uid != geteuid() || info.st_size < control_bytes()) {
      close(fd);
      throw HeapError("shared memory " + name + " of rank " + std::to_string(p) +
                      " is not a segment of this group: expected user " + std::to_string(geteuid()) + " and at least " +
                      std::to_string(control_bytes()) + " bytes; got user " + std::to_string(info.st_uid) + " and " +
                      std::to_string(info.st_size) + " bytes");
    }
    peer.map = std::make_unique<Mapping>(fd, heap_->reserve());
    if (!peer.map->extend(info.st_size, /*populate=*/false)) {
      throw HeapError("cannot map " + std::to_string(info.st_size) + " bytes of shared memory " + name + " of rank " +
                      std::to_string(p) + ": this process reserved " + std::to_string(peer.map->reserve()) +
                      " bytes of addresses. Use the same reserve_bytes on all ranks");
    }
    const Control& other = control(p);
    if (other.magic.load(std::memory_order_acquire) != kMagic || static_cast<int>(other.rank) != p) {
      throw HeapError("shared memory " + name + " has no control record of rank " + std::to_string(p) +
                      " of this group; it belongs to another group or rank");
    }
    peer.pid = other.pid;
    if (options_.watch_pids) peer.pidfd = open_pidfd(other.pid);
  }
}

void Communicator::attach_local(const std::vector<std::shared_ptr<Heap>>& heaps) {
  for (int p = 0; p < world_; ++p) peers_[static_cast<size_t>(p)].local = heaps[static_cast<size_t>(p)];
}

char* Communicator::peer_base(int peer) const {
  const Peer& p = peers_[static_cast<size_t>(peer)];
  return p.local ? p.local->base() : p.map->base();
}

Control& Communicator::control(int peer) const { return *reinterpret_cast<Control*>(peer_base(peer)); }

char* Communicator::address(int peer, int64_t offset, int64_t bytes) {
  Peer& p = peers_[static_cast<size_t>(peer)];
  if (p.map && offset + bytes > p.map->mapped() && !p.map->extend(offset + bytes, /*populate=*/true)) {
    throw HeapError(
        "cannot map " + std::to_string(offset + bytes) + " bytes of the shared memory of rank " + std::to_string(peer) +
        ": this process reserved " + std::to_string(p.map->reserve()) +
        " bytes of addresses, and memory may be exhausted. Use the same reserve_bytes on all ranks, or send "
        "fewer tokens per call");
  }
  return peer_base(peer) + offset;
}

void Communicator::set_step(int64_t step) { control(rank_).step.store(step, std::memory_order_relaxed); }

std::vector<int32_t> Communicator::pids() const {
  std::vector<int32_t> all;
  for (int p = 0; p < world_; ++p) all.push_back(control(p).pid);
  return all;
}

void Communicator::ring(int peer) {
  Control& other = control(peer);
  other.doorbell.fetch_add(1);
  if (other.sleeping.load()) futex_wake_all(other.doorbell);
}

void Communicator::ring() {
  for (int p = 0; p < world_; ++p) {
    if (p != rank_) ring(p);
  }
}

void Communicator::advance(uint32_t phase) {
  control(rank_).progress.store(op_base_ + phase);
  ring();
}

// 31 years at most, which still fit into 64 bits after an addition to a clock; also for infinity and NaN.
static int64_t nanoseconds(double seconds) { return static_cast<int64_t>((seconds < 1e9 ? seconds : 1e9) * 1e9); }

struct Communicator::WaitTimes {
  explicit WaitTimes(const Communicator& communicator)
      : started(now_ns()),
        deadline(started + nanoseconds(communicator.timeout_s_.load(std::memory_order_relaxed))),
        spin_until(started + static_cast<int64_t>(communicator.options_.spin_us * 1e3)),
        next_check(started + kCheckIntervalNs) {}
  int64_t started, deadline, spin_until, next_check;
};

bool Communicator::has_reached(int peer, uint32_t phase) const {
  return reached(control(peer).progress.load(), op_base_ + phase);
}

template <class Condition>
void Communicator::wait_for(int p, WaitTimes& times, Condition condition) {
  Control& own = control(rank_);
  bool slept = false;
  while (!condition()) {
    if (now_ns() < times.spin_until) {
      for (int k = 0; k < 16; ++k) cpu_relax();
      continue;
    }
    if (!slept) {
      own.waiting_for.store(p, std::memory_order_relaxed);
      own.since_ns.store(now_ns(), std::memory_order_relaxed);
      slept = true;
    }
    own.sleeping.store(1);
    const uint32_t doorbell = own.doorbell.load();
    const int64_t before = now_ns();
    bool peer_failed = false;
    for (int q = 0; q < world_; ++q) peer_failed = peer_failed || (q != rank_ && control(q).failure.load() != 0);
    if (!peer_failed && !condition()) {
      futex_wait(own.doorbell, doorbell, std::clamp<int64_t>(times.deadline - before, 0, kCheckIntervalNs));
    }
    own.sleeping.store(0);
    const int64_t now = now_ns();
    // If the whole job was stopped (Ctrl-Z) and resumed, the stopped time does not count against the peers.
    if (now - before > 10 * kCheckIntervalNs) times.deadline += now - before;
    if ((peer_failed || now >= times.next_check || now >= times.deadline) && !condition()) {
      throw_if_peer_failed(p);
      times.next_check = now + kCheckIntervalNs;
      if (options_.on_wait) options_.on_wait();
      if (now >= times.deadline) {
        fail_timeout(p, now - times.started);
      }
    }
  }
  own.waiting_for.store(-1, std::memory_order_relaxed);
}

void Communicator::wait_all(uint32_t phase) {
  WaitTimes times(*this);
  for (int i = 1; i < world_; ++i) {
    const int p = (rank_ + i) % world_;
    wait_for(p, times, [&] { return has_reached(p, phase); });
  }
}

std::string pack_header(const Op& op) {
  int64_t words[kHeaderWords] = {};
  std::copy(op.compared, op.compared + kComparedWords, words);
  words[kFaultWord] = op.fault;
  const std::string& text = op.fault ? op.fault_text : op.label;
  std::memcpy(words + kTextWord, text.data(), std::min(text.size(), sizeof(int64_t) * (kHeaderWords - kTextWord)));
  return std::string(reinterpret_cast<const char*>(words), sizeof words);
}

void Communicator::post(const Op& op) {
  check_usable();
  Control& own = control(rank_);
  Record& mine = own.record;
  in_op_ = true;
  settle();
  const std::string header = pack_header(op);
  for (int i = 0; i < kHeaderWords; ++i) {
    int64_t word;
    std::memcpy(&word, header.data() + i * sizeof word, sizeof word);
    __atomic_store_n(&mine.header[i], word, __ATOMIC_RELAXED);  // a peer's error report may read it
  }
  own.since_ns.store(now_ns(), std::memory_order_relaxed);
  own.in_op.store(1, std::memory_order_relaxed);
  advance(kPosted);
  if (op.fault) fail_handshake();
}

bool Communicator::header_matches(int peer) const {
  const Record &other = record(peer), &mine = control(rank_).record;
  return other.header[kFaultWord] == 0 && std::memcmp(other.header, mine.header, sizeof(int64_t) * kComparedWords) == 0;
}

void Communicator::fail_handshake() {
  wait_all(kPosted);
  std::vector<std::string> headers;
  for (int p = 0; p < world_; ++p) {
    headers.emplace_back(reinterpret_cast<const char*>(record(p).header), sizeof(Record::header));
  }
  finish();
  throw HandshakeFailed(std::move(headers));
}

void Communicator::begin(const Op& op) {
  post(op);
  wait_all(kPosted);
  for (int p = 0; p < world_; ++p) {
    if (!header_matches(p)) fail_handshake();
  }
}

int Communicator::wait_first(const std::vector<int>& peers, uint32_t phase) {
  int first = -1;
  WaitTimes times(*this);
  wait_for(peers.front(), times, [&] {
    for (const int p : peers) {
      if (!has_reached(p, phase)) continue;
      first = p;
      return true;
    }
    return false;
  });
  return first;
}

int Communicator::wait_any_posted(const std::vector<int>& peers) {
  const int peer = wait_first(peers, kPosted);
  if (!header_matches(peer)) fail_handshake();
  return peer;
}

bool Communicator::has_posted(int peer) const { return has_reached(peer, kPosted); }

int Communicator::wait_any_done(const std::vector<int>& peers) { return wait_first(peers, kDone); }

bool Communicator::is_done(int peer) const { return has_reached(peer, kDone); }

void Communicator::check_peer_ranks(const std::vector<int>& peers) const {
  if (peers.empty()) throw std::invalid_argument("the list of peers to wait for is empty; pass at least one rank");
  for (const int p : peers) {
    if (p < 0 || p >= world_ || p == rank_) {
      throw std::invalid_argument("rank " + std::to_string(p) + " is not a peer of rank " + std::to_string(rank_) +
                                  "; expected another rank in 0.." + std::to_string(world_ - 1));
    }
  }
}

void Communicator::raise_flag(std::atomic<uint32_t>& flag, int peer) {
  flag.store(1);
  if (peer != rank_) ring(peer);
}

void Communicator::wait_flag(const std::atomic<uint32_t>& flag, int peer) {
  WaitTimes times(*this);
  wait_for(peer, times, [&] { return flag.load() != 0 || has_reached(peer, kDone); });
  // After publish_done a peer raises no more flags: it raised those of all completed parts before.
  if (flag.load() == 0) fail_handshake();
}

void Communicator::publish_ready() { advance(kReady); }

void Communicator::wait_ready() { wait_all(kReady); }

void Communicator::publish_done() {
  if (done_published_) return;
  done_published_ = true;
  advance(kDone);
}

void Communicator::finish() {
  publish_done();
  wait_all(kDone);
  end_operation();
}

void Communicator::finish_later() {
  publish_done();
  end_operation();
  unsettled_ = true;
}

void Communicator::settle() {
  if (!unsettled_) return;
  in_op_ = true;  // if the wait throws, abandon notifies the peers
  control(rank_).in_op.store(1, std::memory_order_relaxed);
  wait_all(kDone - kPerOp);  // of the operation before op_base_
  unsettled_ = false;
}

void Communicator::end_operation() {
  op_base_ += kPerOp;
  in_op_ = done_published_ = false;
  Control& own = control(rank_);
  own.in_op.store(0, std::memory_order_relaxed);
  own.since_ns.store(now_ns(), std::memory_order_relaxed);
}

void Communicator::abandon() {
  if (!in_op_) return;
  in_op_ = false;
  give_up();
}

void Communicator::give_up() {
  if (!failure_.empty() || !owned()) return;  // the peers were already notified, or this is not their rank
  failure_ = "rank " + std::to_string(rank_) +
             " aborted an operation after an error. This group is unusable; restart the ranks";
  failure_kind_ = FailureKind::aborted;
  Control& own = control(rank_);
  own.failed_rank.store(rank_);
  own.failure.store(static_cast<uint32_t>(FailureKind::aborted));
  ring();
}

}  // namespace moe_comm
