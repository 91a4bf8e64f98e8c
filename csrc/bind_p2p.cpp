// Python bindings of the peer_to_peer kernels: argument words, single launches, and complete operations (Plan).
#include "bind_p2p.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind_tensor.h"
#include "cuda/args.h"
#include "cuda/launch.h"
#include "cuda/lend.h"
#include "cuda/order.h"
#include "cuda/plan.h"
#include "cuda/record.h"
#include "cuda/starters.h"

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
          {"max_slices", kMaxSlices},
          {"slice_columns", kSliceColumns},
          {"tile_rows", kTileRows},
          {"tile_flags", kTileFlags},
          {"order_words", kOrderWords},
          {"send_tile_words", static_cast<int64_t>(sizeof(SendTile) / 8)},
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
          {"wait_posted", kPosted},
          {"wait_done", kDone},
          {"wait_arrived", kArrived},
          {"wait_sent", kSent},
          {"wait_results", kResults},
          {"wait_staged", kStaged},
          {"row_link_bytes", static_cast<int64_t>(sizeof(RowLink))},
          {"format_same", kSame},
          {"format_block_scales", kBlockScales},
          {"format_row_scales", kRowScales},
          {"state_words", static_cast<int64_t>(sizeof(State) / 8)},
          {"report_words", static_cast<int64_t>(sizeof(Report) / 8)}};
}

int checked_number(const std::string& kernel, const std::string& args) {
  const int number = p2p::kernel_number(kernel);
  if (number < 0) throw std::invalid_argument("no kernel is called '" + kernel + "'; expected one of p2p_words()");
  const int64_t bytes = p2p::argument_bytes(number);
  if (static_cast<int64_t>(args.size()) != bytes) {
    throw std::invalid_argument("p2p_" + kernel + " takes " + std::to_string(bytes) + " bytes of arguments; got " +
                                std::to_string(args.size()));
  }
  return number;
}

// A Starter implemented in Python: recorders and other devices in tests.
class PythonStarter : public p2p::Starter {
 public:
  explicit PythonStarter(py::function call) : call_(std::move(call)) {}
  ~PythonStarter() override {
    py::gil_scoped_acquire gil;
    call_ = py::function();
  }
  void start(int kernel, const p2p::Launch& how, const void* args) override {
    py::gil_scoped_acquire gil;
    const auto bytes = static_cast<size_t>(p2p::argument_bytes(kernel));
    call_(p2p::kernel_name(kernel), how.blocks, how.threads, how.shared_bytes, how.stream,
          py::bytes(static_cast<const char*>(args), bytes));
  }

 private:
  py::function call_;
};

std::shared_ptr<p2p::Starter> cuda_starter(int device) {
#ifdef MOE_COMM_WITH_CUDA
  return std::make_shared<p2p::CudaStarter>(device);
#else
  (void)device;
  throw p2p::LaunchError(
      "this build of moe_comm has no CUDA kernels: compile them with NVRTC, or install a build that has them "
      "(MOE_COMM_CUDA=on)");
#endif
}

std::shared_ptr<p2p::Starter> driver_starter(const std::map<std::string, uintptr_t>& calls, uintptr_t context,
                                             const std::map<std::string, uintptr_t>& functions) {
  p2p::Driver d = driver_of(calls, context);
  for (int kernel = 0; kernel < p2p::kKernels; ++kernel) {
    d.functions.push_back(reinterpret_cast<void*>(functions.at(p2p::kernel_name(kernel))));
  }
  return std::make_shared<p2p::DriverStarter>(d);
}

void start(p2p::Starter& starter, const std::string& kernel, int64_t blocks, int64_t threads, int64_t shared_bytes,
           uintptr_t stream, const std::string& args) {
  const int number = checked_number(kernel, args);
  if (blocks < 0 || threads < 1 || threads > 1024) {
    throw std::invalid_argument("p2p_" + kernel + " needs blocks >= 0 and 1 <= threads <= 1024; got " +
                                std::to_string(blocks) + " blocks of " + std::to_string(threads) + " threads");
  }
  if (blocks == 0) return;
  if (shared_bytes < 0) shared_bytes = p2p::shared_bytes(number, args.data(), threads);
  py::gil_scoped_release release;
  starter.start(number, {blocks, threads, shared_bytes, stream, -1}, args.data());
}

using Offer = std::array<int64_t, p2p::kOfferWords>;

p2p::MeetInput meet_args(const py::bytes& header, int64_t slot, const Offer& offer) {
  constexpr int64_t bytes = p2p::kHeaderWords * 8;
  if (PyBytes_GET_SIZE(header.ptr()) != bytes) {
    throw std::invalid_argument("a header has " + std::to_string(p2p::kHeaderWords) + " words (" +
                                std::to_string(bytes) + " bytes); got " +
                                std::to_string(PyBytes_GET_SIZE(header.ptr())) + " bytes");
  }
  p2p::MeetInput t;
  t.header = PyBytes_AS_STRING(header.ptr());
  t.slot = slot;
  std::copy(offer.begin(), offer.end(), t.offer);
  return t;
}

py::list list_of(const std::vector<int64_t>& numbers) {
  py::list list(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) list[i] = numbers[i];
  return list;
}

using SendingWords = std::array<int64_t, 10>;

p2p::Sending sending_of(const SendingWords& how) {
  return {how[0], how[1], how[2], how[3], how[4], how[5], how[6], how[7], how[8], how[9]};
}

using Buffers4 = std::array<int64_t, 4>;
using Buffers6 = std::array<int64_t, 6>;

p2p::Lending lending_of(const Buffers4& words) { return {words[0], words[1], words[2], words[3]}; }

p2p::Lending lending_of(Buffers4 words, int64_t plan_at) {
  words[3] = plan_at;
  return lending_of(words);
}

p2p::LendSettings settings_of(const std::array<int64_t, 6>& words) {
  return {words[0], words[1], words[2], words[3], words[4], words[5]};
}

// Words of a header (comm/header.py): its number, and the number of the dispatch above kCallShift.
constexpr size_t kSeqWord = 1, kOriginWord = 7;
constexpr int kCallShift = 32;

// Operations of records, whose headers and offers differ from run to run. `launch` starts one, with its meet.
// numbers: buffers whose addresses are the operation's number and that of its dispatch (-1: it is one); the address of
// this rank's block; the number of staging slots for headers.
template <class Launch>
void record_operation(p2p::Record& record, std::shared_ptr<p2p::Plan> plan, const py::bytes& header,
                      const std::array<int64_t, 4>& numbers, Launch launch) {
  std::array<int64_t, p2p::kHeaderWords> recorded{};
  std::memcpy(recorded.data(), meet_args(header, 0, {}).header, sizeof recorded);
  record.add([plan = std::move(plan), recorded, numbers, launch](const p2p::Record::Addresses& at, uintptr_t) {
    const auto& [seq, call, block, ring] = numbers;
    auto words = recorded;
    words[kSeqWord] += at.at(static_cast<size_t>(seq));
    if (call >= 0) words[kOriginWord] |= (at.at(static_cast<size_t>(call)) & 0x7FFFFFFF) << kCallShift;
    p2p::MeetInput input;
    input.header = reinterpret_cast<const char*>(words.data());
    input.slot = (plan->turn + 1) % ring;
    input.offer[p2p::kRoom] = -1;
    launch(*plan, input, [&at](int64_t buffer) { return buffer < 0 ? 0 : at.at(static_cast<size_t>(buffer)); }, block);
  });
}

// of: tokens, top_k, hidden, dtype. at: buffers of tensors.
void bind_recorded(py::class_<p2p::Plan, std::shared_ptr<p2p::Plan>>& plan) {
  using p2p::Plan;
  using p2p::Record;
  plan.def(
          "record_dispatch",
          [](std::shared_ptr<Plan> self, Record& record, const py::bytes& header, const std::array<int64_t, 4>& numbers,
             const Buffers4& of, const Buffers6& at, const std::array<int64_t, 3>& sizes, const SendingWords& sending) {
            record_operation(record, std::move(self), header, numbers,
                             [=](Plan& p, p2p::MeetInput& input, const auto& address, int64_t block) {
                               const auto& [rows, ids, place, x, counts, digest] = at;
                               const auto& [room, chunk, stride] = sizes;
                               input.offer[p2p::kRowsAt] = address(rows) - block;
                               input.offer[p2p::kRoom] = room;
                               p2p::Sending how = sending_of(sending);
                               how.own_counts_at = address(counts);
                               how.digest_at = address(digest);
                               p.dispatch(input, {{of[0], of[1]}, address(ids), address(place), chunk},
                                          {address(x), stride, of[2], of[3]}, how, {});
                             });
          })
      .def("record_sum",
           [](std::shared_ptr<Plan> self, Record& record, const py::bytes& header,
              const std::array<int64_t, 4>& numbers, const Buffers4& of, const Buffers6& at, int64_t blocks) {
             record_operation(record, std::move(self), header, numbers,
                              [=](Plan& p, p2p::MeetInput& input, const auto& address, int64_t block) {
                                const auto& [rows, place, weights, y, offered, words] = at;
                                if (rows >= 0) input.offer[p2p::kRowsAt] = address(rows) - block;
                                if (offered >= 0) input.offer[p2p::kScalesAt] = address(offered) - block;
                                p.combine(input, blocks, {of[0], of[1]}, {address(y), 0, of[2], of[3]},
                                          {address(place), address(weights), address(words)});
                              });
           })
      .def("record_spread", [](std::shared_ptr<Plan> self, Record& record, const py::bytes& header,
                               const std::array<int64_t, 4>& numbers, const Buffers4& of,
                               const std::array<int64_t, 5>& at, const std::array<int64_t, 2>& sizes) {
        record_operation(record, std::move(self), header, numbers,
                         [=](Plan& p, p2p::MeetInput& input, const auto& address, int64_t block) {
                           const auto& [rows, place, x, offered, words] = at;
                           const auto& [blocks, stride] = sizes;
                           input.offer[p2p::kBlockAt] = address(rows) - block;
                           input.offer[p2p::kScalesAt] = address(offered) - block;
                           p.send(input, blocks, {of[0], of[1]}, {address(x), stride, of[2], of[3]},
                                  {address(place), 0, address(words)});
                         });
      });
}

// lending: as in lend, pull and collect, without the plan, whose buffer is in `at`.
void bind_recorded_lending(py::class_<p2p::Plan, std::shared_ptr<p2p::Plan>>& plan) {
  using p2p::Plan;
  using p2p::Record;
  plan.def("record_lend",
           [](std::shared_ptr<Plan> self, Record& record, const py::bytes& header,
              const std::array<int64_t, 4>& numbers, const std::array<int64_t, 3>& of, const std::array<int64_t, 3>& at,
              const Buffers4& lending, const std::array<int64_t, 6>& settings) {
             record_operation(record, std::move(self), header, numbers,
                              [=](Plan& p, p2p::MeetInput& input, const auto& address, int64_t) {
                                const auto& [tokens, top_k, chunk] = of;
                                p.lend(input, {{tokens, top_k}, address(at[0]), address(at[1]), chunk},
                                       lending_of(lending, address(at[2])), settings_of(settings));
                              });
           })
      .def("record_pull",
           [](std::shared_ptr<Plan> self, Record& record, size_t plan_words, const Buffers4& lending,
              const Buffers4& sizes, const std::array<int64_t, 3>& how) {
             record.add([=, plan = std::move(self)](const Record::Addresses& at, uintptr_t) {
               plan->pull(lending_of(lending, at.at(plan_words)), sizes, how[0], how[1], how[2]);
             });
           })
      .def("record_collect", [](std::shared_ptr<Plan> self, Record& record, const py::bytes& header,
                                const std::array<int64_t, 4>& numbers, const Buffers6& at, const Buffers4& lending,
                                const Buffers4& sizes, const std::array<int64_t, 2>& how) {
        record_operation(record, std::move(self), header, numbers,
                         [=](Plan& p, p2p::MeetInput& input, const auto& address, int64_t block) {
                           const auto& [grads, plan_words, out_0, out_1, out_2, out_3] = at;
                           input.offer[p2p::kRowsAt] = address(grads) - block;
                           p.collect(input, lending_of(lending, address(plan_words)), sizes,
                                     {address(out_0), address(out_1), address(out_2), address(out_3)}, how[0], how[1]);
                         });
      });
}

void bind_plan(py::module_& m) {
  using p2p::Plan;
  using Release = py::gil_scoped_release;
  py::class_<Plan, std::shared_ptr<Plan>> plan(
      m, "P2pPlan", "The operations of one rank, each as a sequence of kernel launches. See cuda/plan.h.");
  bind_recorded(plan);
  bind_recorded_lending(plan);
  plan.def(py::init([](std::shared_ptr<p2p::Starter> starter, const std::array<int64_t, 9>& group,
                       std::vector<int64_t> offsets, int64_t headers_at, int64_t all_headers_at, int64_t host_counts_at,
                       int64_t left_at) {
        p2p::RankConstants home;
        static_assert(sizeof home.group == sizeof group + sizeof home.group.timeout_ns, "timeout_ns is last");
        std::memcpy(&home.group, group.data(), sizeof group);
        home.offsets = std::move(offsets);
        home.headers_at = headers_at;
        home.all_headers_at = all_headers_at;
        home.host_counts_at = host_counts_at;
        home.left_at = left_at;
        return std::make_shared<Plan>(std::move(starter), home);
      }))
      .def_readwrite("turn", &Plan::turn)
      .def("begin", &Plan::begin)
      .def("use", [](Plan& p, const std::array<int64_t, 6>& at) { p.use({at[0], at[1], at[2], at[3], at[4], at[5]}); })
      .def("dispatch",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer, int64_t tokens, int64_t top_k,
              int64_t ids_at, int64_t place_at, int64_t chunk, int64_t x_at, int64_t stride, int64_t hidden,
              int64_t dtype, const SendingWords& how, const std::array<int64_t, 5>& links) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.dispatch(t, {{tokens, top_k}, ids_at, place_at, chunk}, {x_at, stride, hidden, dtype}, sending_of(how),
                        {links[0], links[1], links[2], links[3], links[4]});
           })
      .def("arrive", &Plan::arrive, py::call_guard<Release>())
      .def("received", &Plan::received)
      .def("meet",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.meet(t);
           })
      .def("sum",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer, int64_t blocks, int64_t tokens,
              int64_t top_k, int64_t hidden, int64_t dtype, int64_t place_at, int64_t weights_at, int64_t y_at,
              int64_t words_at) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.combine(t, blocks, {tokens, top_k}, {y_at, 0, hidden, dtype}, {place_at, weights_at, words_at});
           })
      .def(
          "sum_slices",
          [](Plan& p, int64_t blocks, int64_t tokens, int64_t top_k, int64_t hidden, int64_t dtype, int64_t place_at,
             int64_t weights_at, int64_t y_at) {
            p.sum_slices(blocks, {tokens, top_k}, {y_at, 0, hidden, dtype}, place_at, weights_at);
            p.done();
          },
          py::call_guard<Release>())
      .def("done", &Plan::done, py::call_guard<Release>())
      .def("lend",
           [](Plan& p, const py::bytes& header, int64_t slot, int64_t tokens, int64_t top_k, int64_t ids_at,
              int64_t place_at, int64_t chunk, const Buffers4& lending, const std::array<int64_t, 6>& settings) {
             const p2p::MeetInput t = meet_args(header, slot, {0, 0, 0, 0, -1});
             Release release;
             p.lend(t, {{tokens, top_k}, ids_at, place_at, chunk}, lending_of(lending), settings_of(settings));
           })
      .def(
          "pull",
          [](Plan& p, const Buffers4& lending, const Buffers4& sizes, int64_t stacks_at, int64_t element,
             int64_t blocks) { p.pull(lending_of(lending), sizes, stacks_at, element, blocks); },
          py::call_guard<Release>())
      .def("collect",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer, const Buffers4& lending,
              const Buffers4& sizes, const Buffers4& out_at, int64_t dtype, int64_t blocks) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.collect(t, lending_of(lending), sizes, out_at, dtype, blocks);
           })
      .def("sum_reduced",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer, int64_t blocks, int64_t tokens,
              int64_t top_k, int64_t hidden, int64_t dtype, int64_t place_at, int64_t weights_at, int64_t y_at,
              const std::array<int64_t, 4>& own) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.meet(t);
             p.sum_reduced(blocks, {tokens, top_k}, {y_at, 0, hidden, dtype}, place_at, weights_at,
                           {own[0], own[1], own[2], own[3]});
             p.done();
           })
      .def("spread",
           [](Plan& p, const py::bytes& header, int64_t slot, const Offer& offer, int64_t blocks, int64_t tokens,
              int64_t top_k, int64_t hidden, int64_t dtype, int64_t place_at, int64_t weights_at, int64_t grad_at,
              int64_t stride, int64_t dots_at, int64_t words_at, int64_t order_at, bool done) {
             const p2p::MeetInput t = meet_args(header, slot, offer);
             Release release;
             p.send(t, blocks, {tokens, top_k}, {grad_at, stride, hidden, dtype}, {place_at, weights_at, words_at},
                    dots_at, order_at, done);
           })
      .def("send_few",
           [](Plan& p, int64_t tokens, int64_t top_k, int64_t ids_at, int64_t hidden, int64_t dtype, int64_t x_at,
              int64_t stride, int64_t offers_at, int64_t place_at, int64_t max_tokens, int64_t parts, int64_t format,
              int64_t power_of_two) {
             p2p::LlSendArgs a{};
             a.tokens = tokens;
             a.top_k = top_k;
             a.ids_at = ids_at;
             a.hidden = hidden;
             a.dtype = dtype;
             a.x_at = x_at;
             a.stride = stride;
             a.offers_at = offers_at;
             a.place_at = place_at;
             a.max_tokens = max_tokens;
             a.parts = parts;
             a.format = format;
             a.power_of_two = power_of_two;
             Release release;
             p.send_few(a);
           })
      .def("receive_few", &Plan::receive_few, py::call_guard<Release>())
      .def("sum_few",
           [](Plan& p, int64_t blocks, int64_t tokens, int64_t top_k, int64_t hidden, int64_t dtype, int64_t place_at,
              int64_t weights_at, int64_t y_at, int64_t offers_at) {
             Release release;
             p.sum_few(blocks, {tokens, top_k}, {y_at, 0, hidden, dtype}, place_at, weights_at, offers_at);
           })
      .def("completed_turn", &Plan::completed_turn)
      .def("failed", &Plan::failed)
      .def("wait", &Plan::wait, py::call_guard<Release>())
      .def("counted", [](const Plan& p, int64_t header_word) {
        const p2p::Counted c = p.counted(header_word);
        return py::make_tuple(list_of(c.own), list_of(c.rows), list_of(c.header_words), c.dropped);
      });
}

// Wrap bytes of a block as a matrix. The tensor keeps `owner` alive.
py::capsule block_tensor(uintptr_t at, int64_t rows, int64_t columns, int code, int bits, int device_type, int device,
                         const py::object& owner) {
  PyObject* referenced = owner.inc_ref().ptr();
  return matrix_tensor(reinterpret_cast<void*>(at), rows, columns,
                       {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}, {device_type, device},
                       [referenced] {
                         if (!Py_IsInitialized()) return;  // at interpreter exit, leak the reference
                         py::gil_scoped_acquire gil;
                         Py_DECREF(referenced);
                       });
}

}  // namespace

p2p::Driver driver_of(const std::map<std::string, uintptr_t>& calls, uintptr_t context) {
  p2p::Driver d;
  const auto take = [&](auto& pointer, const char* name) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(calls.at(name));
  };
  take(d.launch, "cuLaunchKernel");
  take(d.set_attribute, "cuFuncSetAttribute");
  take(d.get_context, "cuCtxGetCurrent");
  take(d.set_context, "cuCtxSetCurrent");
  take(d.error_name, "cuGetErrorName");
  take(d.error_words, "cuGetErrorString");
  d.context = reinterpret_cast<void*>(context);
  return d;
}

void bind_p2p(py::module_& m) {
  m.def("p2p_words", &p2p_words, "Return the argument words of each kernel: their names in order. A word has 8 bytes.");
  m.def("p2p_constants", &p2p_constants, "Return the constants of cuda/args.h by name.");
  m.def(
      "p2p_control",
      [](int64_t world, int64_t experts, int64_t local_experts) {
        const p2p::Control c{world, experts, local_experts};
        return std::map<std::string, int64_t>{{"header", c.header(0, 0)},      {"offer", c.offer(0, 0)},
                                              {"counts", c.counts(0, 0)},      {"done", c.done(0)},
                                              {"arrived", c.arrived(0, 0, 0)}, {"sent", c.sent(0, 0, 0, 0)},
                                              {"results", c.results(0, 0)},    {"bytes", c.bytes()}};
      },
      py::arg("world"), py::arg("experts"), py::arg("local_experts"),
      "Return the size of the control area in bytes, and the first word of each part.");
  m.def(
      "p2p_row_bytes",
      [](int64_t hidden, int64_t dtype, int64_t format) {
        return std::make_pair(p2p::row_bytes(hidden, dtype, format), 4 * p2p::row_scales(hidden, format));
      },
      py::arg("hidden"), py::arg("dtype"), py::arg("format"), "Return the bytes of a received row, and of its scales.");
  m.def(
      "p2p_shared_bytes",
      [](const std::string& kernel, int64_t threads, const std::string& args) {
        return p2p::shared_bytes(checked_number(kernel, args), args.data(), threads);
      },
      py::arg("kernel"), py::arg("threads"), py::arg("args"), "Return the bytes of shared memory that a block needs.");
  m.def(
      "p2p_lend_words",
      [](int64_t world, int64_t experts, int64_t residents, int64_t copies) {
        const int64_t teams = p2p::usual_threads(p2p::k_lend) / 32;
        return std::make_pair(p2p::LendPlan::words(world, experts, copies),
                              p2p::LendWork::words(world, experts, residents, teams));
      },
      py::arg("world"), py::arg("experts"), py::arg("residents"), py::arg("copies"),
      "Return the int64 words of a plan, and of the memory that the kernel lend needs.");
  m.def(
      "p2p_threads",
      [] {
        std::map<std::string, int64_t> threads;
        for (int kernel = 0; kernel < p2p::kKernels; ++kernel) {
          threads[p2p::kernel_name(kernel)] = p2p::usual_threads(kernel);
        }
        return threads;
      },
      "Return the number of threads per block of each kernel.");
  m.def(
      "p2p_tensor", &block_tensor, py::arg("at"), py::arg("rows"), py::arg("columns"), py::arg("code"), py::arg("bits"),
      py::arg("device_type"), py::arg("device"), py::arg("owner"),
      "Return memory as a matrix for torch.from_dlpack. The tensor keeps `owner` alive. code, bits, device_type: as in "
      "DLPack.");
  py::class_<p2p::Starter, std::shared_ptr<p2p::Starter>>(m, "P2pStarter", "A kernel launcher.")
      .def_static("host", [] { return std::shared_ptr<p2p::Starter>(std::make_shared<p2p::HostStarter>()); })
      .def_static("cuda", &cuda_starter, py::arg("device"))
      .def_static("driver", &driver_starter, py::arg("calls"), py::arg("context"), py::arg("functions"))
      .def_static("python",
                  [](py::function call) {
                    return std::shared_ptr<p2p::Starter>(std::make_shared<PythonStarter>(std::move(call)));
                  })
      .def("start", &start, py::arg("kernel"), py::arg("blocks"), py::arg("threads"), py::arg("shared_bytes"),
           py::arg("stream"), py::arg("args"), "Launch a kernel. shared_bytes -1: as many as it needs.");
  bind_plan(m);
}

}  // namespace moe_comm
