// The Python face of peer_to_peer's kernels: what words they take, and starting them on a GPU or on this thread.
#include "bind_p2p.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/args.h"
#include "cuda/launch.h"

namespace py = pybind11;

namespace moe_comm {

namespace {

std::map<std::string, std::vector<std::string>> p2p_words() {
#define MOE_P2P_NAME(name) #name,
#define MOE_P2P_NAMES(kernel, Args, words) {#kernel, {words(MOE_P2P_NAME)}},
  return {MOE_P2P_KERNELS(MOE_P2P_NAMES)};
}

std::map<std::string, int64_t> p2p_constants() {
  using namespace p2p;
  return {{"header_words", kHeaderWords},
          {"compared_words", kComparedWords},
          {"fault_word", kFaultWord},
          {"bad_ids_word", kBadIdsWord},
          {"offer_words", kOfferWords},
          {"nowhere", kNowhere},
          {"max_parts", kMaxParts},
          {"scale_channels", kScaleChannels},
          {"rows_at", kRowsAt},
          {"block_at", kBlockAt},
          {"scales_at", kScalesAt},
          {"links_at", kLinksAt},
          {"room", kRoom},
          {"fault_timed_out", kTimedOut},
          {"fault_aborted", kAborted},
          {"fault_disagree", kDisagree},
          {"fault_bad_ids", kBadIds},
          {"fault_no_room", kNoRoom},
          {"wait_told", kTold},
          {"wait_done", kDone},
          {"wait_arrived", kArrived},
          {"wait_sent", kSent},
          {"format_same", kSame},
          {"format_block_scales", kBlockScales},
          {"format_row_scales", kRowScales},
          {"state_words", static_cast<int64_t>(sizeof(State) / 8)},
          {"report_words", static_cast<int64_t>(sizeof(Report) / 8)}};
}

int checked_number(const std::string& kernel, const std::string& args) {
  const int number = p2p::kernel_number(kernel);
  if (number < 0) throw std::invalid_argument("no kernel is called '" + kernel + "'; p2p_words() names them");
  const int64_t bytes = p2p::argument_bytes(number);
  if (static_cast<int64_t>(args.size()) != bytes) {
    throw std::invalid_argument("p2p_" + kernel + " takes " + std::to_string(bytes) + " bytes of arguments; got " +
                                std::to_string(args.size()));
  }
  return number;
}

void p2p_launch(const std::string& machine, const std::string& kernel, int64_t blocks, int64_t threads,
                int64_t shared_bytes, uintptr_t stream, const std::string& args, int device) {
  const int number = checked_number(kernel, args);
  if (machine != "host" && machine != "cuda") {
    throw std::invalid_argument("p2p_launch: machine must be 'host' or 'cuda'; got '" + machine + "'");
  }
  if (blocks < 0 || threads < 1 || threads > 1024) {
    throw std::invalid_argument("p2p_launch: needs blocks >= 0 and 1 <= threads <= 1024; got " +
                                std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads");
  }
  if (blocks == 0) return;
  py::gil_scoped_release release;
  if (machine == "host") {
    p2p::run_on_host(number, blocks, args.data());
    return;
  }
#ifdef MOE_COMM_WITH_CUDA
  if (shared_bytes < 0) shared_bytes = p2p::shared_bytes(number, args.data(), threads);
  const std::string error = p2p::launch_cuda(number, {blocks, threads, shared_bytes, stream, device}, args.data());
  if (!error.empty()) throw std::runtime_error("p2p_" + kernel + " was not launched: " + error);
#else
  (void)stream;
  (void)device;
  (void)shared_bytes;
  throw std::runtime_error("p2p_" + kernel + ": this build of moe_comm has no CUDA kernels; compile them with NVRTC");
#endif
}

}  // namespace

void bind_p2p(py::module_& m) {
  m.def("p2p_words", &p2p_words, "By kernel: the names of its arguments' words, 8 bytes each, in order.");
  m.def("p2p_constants", &p2p_constants, "Numbers of cuda/args.h by name.");
  m.def(
      "p2p_control",
      [](int64_t world, int64_t experts, int64_t local_experts) {
        const p2p::Control c{world, experts, local_experts};
        return std::map<std::string, int64_t>{
            {"header", c.header(0, 0)},   {"offer", c.offer(0, 0)},  {"counts", c.counts(0, 0)}, {"done", c.done(0)},
            {"arrived", c.arrived(0, 0)}, {"sent", c.sent(0, 0, 0)}, {"bytes", c.bytes()}};
      },
      py::arg("world"), py::arg("experts"), py::arg("local_experts"),
      "The control area: its size in bytes, and the first word of each part.");
  m.def(
      "p2p_row_bytes",
      [](int64_t hidden, int64_t dtype, int64_t format) {
        return std::make_pair(p2p::row_bytes(hidden, dtype, format), 4 * p2p::row_scales(hidden, format));
      },
      py::arg("hidden"), py::arg("dtype"), py::arg("format"), "Bytes of a row that arrives, and of its scales.");
  m.def(
      "p2p_shared_bytes",
      [](const std::string& kernel, int64_t threads, const std::string& args) {
        return p2p::shared_bytes(checked_number(kernel, args), args.data(), threads);
      },
      py::arg("kernel"), py::arg("threads"), py::arg("args"), "Shared memory that a block needs.");
  m.def(
      "p2p_launch", &p2p_launch, py::arg("machine"), py::arg("kernel"), py::arg("blocks"), py::arg("threads"),
      py::arg("shared_bytes"), py::arg("stream"), py::arg("args"), py::arg("device") = -1,
      "Start p2p_<kernel> on 'cuda', or run it on this thread ('host'). shared_bytes -1: what it needs. device: of the "
      "stream, -1 for the current one.");
}

}  // namespace moe_comm
