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
constexpr uint32_t kArrived = 1, kReady = 2, kDone = 3, kPerOp = 4;
constexpr int64_t kLookAround = 100 * 1000 * 1000;  // ns between liveness checks of the peers

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
  std::atomic_thread_fence(std::memory_order_release);
  own->magic = kMagic;
}

Communicator::~Communicator() {
  for (Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

void Communicator::attach(const std::vector<std::string>& names) {
  if (static_cast<int>(names.size()) != world_) throw HeapError("attach needs one segment name per rank");
  for (int p = 0; p < world_; ++p) {
    if (p == rank_) continue;
    Peer& peer = peers_[static_cast<size_t>(p)];
    const std::string& name = names[static_cast<size_t>(p)];
    const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
      throw HeapError("cannot open shared memory " + name + " of rank " + std::to_string(p) + ": " +
                      std::strerror(errno));
    struct stat info{};
    if (fstat(fd, &info) != 0 || info.st_uid != geteuid() || info.st_size < control_bytes()) {
      close(fd);
      throw HeapError("shared memory " + name + " of rank " + std::to_string(p) +
                      " is not ours: it belongs to another user or is too small");
    }
    peer.map = std::make_unique<Mapping>(fd, heap_->reserve());
    if (!peer.map->extend(info.st_size, /*populate=*/false)) throw HeapError("cannot map shared memory " + name);
    const Control& other = control(p);
    if (other.magic != kMagic || static_cast<int>(other.rank) != p) {
      throw HeapError("shared memory " + name + " does not hold rank " + std::to_string(p) + " of this group");
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
    throw HeapError("cannot map " + std::to_string(offset + bytes) + " bytes of rank " + std::to_string(peer) +
                    "'s shared memory");
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

struct Communicator::Patience {
  explicit Patience(const Communicator& of)
      : started(now_ns()),
        deadline(started + static_cast<int64_t>(std::min(of.timeout_s_.load(std::memory_order_relaxed), 1e9) * 1e9)),
        spin_until(started + static_cast<int64_t>(of.options_.spin_us * 1e3)),
        next_look(started + kLookAround) {}
  int64_t started, deadline, spin_until, next_look;
};

bool Communicator::has_reached(int peer, uint32_t phase) const {
  return reached(control(peer).progress.load(), op_base_ + phase);
}

template <class Met>
void Communicator::wait_for(int p, Patience& patience, Met met) {
  Control& own = control(rank_);
  bool slept = false;
  while (!met()) {
    if (now_ns() < patience.spin_until) {
      for (int k = 0; k < 16; ++k) cpu_relax();
      continue;
    }
    if (!slept) {
      own.waiting_for.store(p, std::memory_order_relaxed);
      own.since_ns.store(now_ns(), std::memory_order_relaxed);
      slept = true;
    }
    own.sleeping.store(1);
    const uint32_t seen = own.doorbell.load();
    const int64_t before = now_ns();
    bool broken = false;
    for (int q = 0; q < world_; ++q) broken = broken || (q != rank_ && control(q).broken.load() != 0);
    if (!broken && !met()) {
      futex_wait(own.doorbell, seen, std::clamp<int64_t>(patience.deadline - before, 0, kLookAround));
    }
    own.sleeping.store(0);
    const int64_t now = now_ns();
    // If the whole job was stopped (Ctrl-Z) and resumed, the stopped time does not count against the peers.
    if (now - before > 10 * kLookAround) patience.deadline += now - before;
    if ((broken || now >= patience.next_look || now >= patience.deadline) && !met()) {
      look_after(p);
      patience.next_look = now + kLookAround;
      if (options_.on_wait) options_.on_wait();
      if (now >= patience.deadline) {
        too_late(p, now - patience.started);
      }
    }
  }
  own.waiting_for.store(-1, std::memory_order_relaxed);
}

void Communicator::wait_all(uint32_t phase) {
  Patience patience(*this);
  for (int i = 1; i < world_; ++i) {
    const int p = (rank_ + i) % world_;
    wait_for(p, patience, [&] { return has_reached(p, phase); });
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
  const std::string header = pack_header(op);
  for (int i = 0; i < kHeaderWords; ++i) {
    int64_t word;
    std::memcpy(&word, header.data() + i * sizeof word, sizeof word);
    __atomic_store_n(&mine.header[i], word, __ATOMIC_RELAXED);  // a peer's error report may read it
  }
  own.since_ns.store(now_ns(), std::memory_order_relaxed);
  own.in_op.store(1, std::memory_order_relaxed);
  advance(kArrived);
  if (op.fault) disagree();
}

bool Communicator::agrees(int peer) const {
  const Record &other = record(peer), &mine = control(rank_).record;
  return other.header[kFaultWord] == 0 && std::memcmp(other.header, mine.header, sizeof(int64_t) * kComparedWords) == 0;
}

void Communicator::disagree() {
  wait_all(kArrived);
  std::vector<std::string> headers;
  for (int p = 0; p < world_; ++p) {
    headers.emplace_back(reinterpret_cast<const char*>(record(p).header), sizeof(Record::header));
  }
  finish();
  throw HandshakeFailed(std::move(headers));
}

void Communicator::begin(const Op& op) {
  post(op);
  wait_all(kArrived);
  for (int p = 0; p < world_; ++p) {
    if (!agrees(p)) disagree();
  }
}

int Communicator::wait_first(const std::vector<int>& peers, uint32_t phase) {
  int found = -1;
  Patience patience(*this);
  wait_for(peers.front(), patience, [&] {
    for (const int p : peers) {
      if (!has_reached(p, phase)) continue;
      found = p;
      return true;
    }
    return false;
  });
  return found;
}

int Communicator::wait_any(const std::vector<int>& peers) {
  const int found = wait_first(peers, kArrived);
  if (!agrees(found)) disagree();
  return found;
}

bool Communicator::has_posted(int peer) const { return has_reached(peer, kArrived); }

int Communicator::wait_left(const std::vector<int>& peers) { return wait_first(peers, kDone); }

bool Communicator::has_left(int peer) const { return has_reached(peer, kDone); }

void Communicator::must_be_peers(const std::vector<int>& peers) const {
  if (peers.empty()) throw std::invalid_argument("there is no peer to wait for");
  for (const int p : peers) {
    if (p < 0 || p >= world_ || p == rank_) throw std::invalid_argument("rank " + std::to_string(p) + " is no peer");
  }
}

void Communicator::raise(std::atomic<uint32_t>& flag, int peer) {
  flag.store(1);
  if (peer != rank_) ring(peer);
}

void Communicator::wait_flag(const std::atomic<uint32_t>& flag, int peer) {
  Patience patience(*this);
  wait_for(peer, patience, [&] { return flag.load() != 0 || has_reached(peer, kDone); });
  // A peer that has left sets no more flags. It set all completed flags before it left.
  if (flag.load() == 0) disagree();
}

void Communicator::publish_ready() { advance(kReady); }

void Communicator::wait_ready() { wait_all(kReady); }

void Communicator::leave() {
  if (left_) return;
  left_ = true;
  advance(kDone);
}

void Communicator::finish() {
  leave();
  wait_all(kDone);
  op_base_ += kPerOp;
  in_op_ = left_ = false;
  Control& own = control(rank_);
  own.in_op.store(0, std::memory_order_relaxed);
  own.since_ns.store(now_ns(), std::memory_order_relaxed);
}

void Communicator::abandon() {
  if (!in_op_) return;
  in_op_ = false;
  if (!failure_.empty()) return;  // the peers were already notified
  failure_ = "rank " + std::to_string(rank_) + " left an operation in the middle after an error; the group is unusable";
  failure_kind_ = Broken::gave_up;
  Control& own = control(rank_);
  own.culprit.store(rank_);
  own.broken.store(static_cast<uint32_t>(Broken::gave_up));
  ring();
}

}  // namespace moe_comm
