// Python bindings of the native core. Arguments are addresses, sizes and plain numbers, and tensors where many small
// calls count (bind_torch.h); tensors are returned as DLPack capsules. No libtorch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>

#include "bind_gemm.h"
#include "bind_gpu_gemm.h"
#include "bind_layer.h"
#include "bind_operators.h"
#include "bind_p2p.h"
#include "bind_spans.h"
#include "bind_tensor.h"
#include "bind_torch.h"
#include "bind_transfer.h"
#include "cpu/communicator.h"
#include "cpu/errors.h"
#include "cpu/exchange.h"
#include "cpu/heap.h"
#include "cpu/kernels.h"
#include "cpu/pending.h"
#include "cpu/pool.h"
#include "cpu/rendezvous.h"
#include "cpu/shared_tokens.h"
#include "cpu/transfer.h"
#include "cuda/launch.h"
#include "cuda/sources.h"

#ifdef MOE_COMM_WITH_CUDA
#include "cuda/probe.h"
#endif

namespace py = pybind11;
using namespace moe_comm;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A block that peers write to until `pending` has finished. If it never finishes, peers may still write to the block,
// so the block is not reused.
py::capsule pending_tensor(std::shared_ptr<Heap> heap, std::shared_ptr<PendingReceive> pending, int64_t offset,
                           const Layout& layout) {
  char* data = heap->base() + offset;
  return matrix_tensor(data, layout.rows, layout.hidden, layout.dtype,
                       [heap = std::move(heap), pending = std::move(pending), offset] {
                         if (pending->finished()) heap->free(offset);
                       });
}

// Address, width and both strides of extra words (transfer.h); width 0 without.
using ExtraWords = std::array<int64_t, 4>;

Extra extra_of(const ExtraWords& words) {
  return {pointer<uint32_t>(static_cast<uintptr_t>(words[0])), words[1], words[2], words[3]};
}

py::object extra_tensor(const std::shared_ptr<Heap>& heap, int64_t block, int64_t rows, int64_t width) {
  if (block < 0) return py::none();
  return block_tensor(heap, block, rows, width, kFloat32);
}

// The parts of shared tokens (address of the rows of each rank, stride), the number of tokens of each rank, and the
// address of the packed places (rank, token) of the rows, which is valid while the layout exists.
py::tuple located_rows(const SharedTokens& shared, const Layout& layout) {
  py::list parts;
  for (const SharedTokens::Part& part : shared.parts) parts.append(py::make_tuple(part.base, part.stride));
  return py::make_tuple(std::move(parts), shared.tokens, reinterpret_cast<uintptr_t>(layout.token.data()));
}

// The rows of this rank's experts, [R, D].
TensorMatrix expert_rows(py::handle tensor, const Layout& layout) {
  TensorMatrix rows = matrix_of(tensor);
  if (rows.rows != layout.rows || rows.columns != layout.hidden || rows.dtype != layout.dtype) {
    throw std::invalid_argument("rows of experts must have the shape and dtype of the dispatched rows");
  }
  return rows;
}

void raise_python(const char* name, const char* text) {
  const py::object kind = py::module_::import("moe_comm.errors").attr(name);
  PyErr_SetString(kind.ptr(), text);
}

// Allow Ctrl-C to interrupt a wait. Python's signal handler only sets a flag; PyErr_CheckSignals raises the exception.
void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native core of moe_comm: shared-memory heap, handshake, dispatch, combine, and CPU kernels.";

  static py::exception<HandshakeFailed> handshake(m, "HandshakeFailed");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const HandshakeFailed& e) {
      py::list headers;
      for (const std::string& words : e.headers) headers.append(py::bytes(words));
      py::object error = py::reinterpret_borrow<py::object>(handshake)(
          "the headers of the ranks differ, or one reports a fault; see `headers`");
      error.attr("headers") = headers;
      PyErr_SetObject(handshake.ptr(), error.ptr());
    } catch (const HeapError& e) {
      raise_python("HeapError", e.what());
    } catch (const p2p::LaunchError& e) {
      raise_python("KernelError", e.what());
    } catch (const PeerDied& e) {
      raise_python("PeerDied", e.what());
    } catch (const PeerTimeout& e) {
      raise_python("PeerTimeout", e.what());
    } catch (const PeerError& e) {
      raise_python("PeerError", e.what());
    }
  });

  py::class_<Heap, std::shared_ptr<Heap>>(m, "Heap")
      .def(py::init<const std::string&, int64_t, int64_t, int64_t>(), py::arg("name"), py::arg("control_bytes") = 0,
           py::arg("initial_bytes") = 0, py::arg("reserve_bytes") = int64_t{1} << 38)
      .def_property_readonly("name", &Heap::name)
      .def_property_readonly("size", &Heap::size)
      .def_property_readonly("used", &Heap::used)
      .def_property_readonly("peak", &Heap::peak)
      .def_property_readonly("blocks", &Heap::blocks)
      .def("unlink", &Heap::unlink)
      .def("owns", [](const Heap& h, uintptr_t p, int64_t bytes) { return h.owns(pointer<void>(p), bytes); })
      .def(
          "tensor",
          [](const std::shared_ptr<Heap>& heap, int64_t rows, int64_t columns, int dtype) {
            int64_t bytes = 0;
            if (rows < 0 || columns < 0 || __builtin_mul_overflow(rows, columns, &bytes) ||
                __builtin_mul_overflow(bytes, dtype_bytes(dtype), &bytes)) {
              throw HeapError("cannot allocate a block of " + std::to_string(rows) + " x " + std::to_string(columns) +
                              " elements: sizes must be at least 0, and the bytes must fit in 63 bits");
            }
            const int64_t offset = without_gil([&] { return heap->alloc(bytes); });
            return block_tensor(heap, offset, rows, columns, dtype);
          },
          py::arg("rows"), py::arg("columns"), py::arg("dtype"),
          "Return an uninitialized [rows, columns] block as a DLPack capsule. The block is freed with the tensor.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def(py::init([](std::shared_ptr<Heap> heap, int rank, int world, double timeout_s, double spin_us,
                       uint32_t first_progress, bool watch_pids) {
             Communicator::Options options;
             options.timeout_s = timeout_s;
             options.spin_us = spin_us;
             options.first_progress = first_progress;
             options.watch_pids = watch_pids;
             options.on_wait = &check_signals;
             return std::make_shared<Communicator>(std::move(heap), rank, world, options);
           }),
           py::arg("heap"), py::arg("rank"), py::arg("world"), py::arg("timeout_s"), py::arg("spin_us"),
           py::arg("first_progress") = 0, py::arg("watch_pids") = true)
      .def_static("control_bytes", &Communicator::control_bytes)
      .def("attach", &Communicator::attach)
      .def("set_step", &Communicator::set_step)
      .def("set_timeout", &Communicator::set_timeout)
      .def("check_peers", &Communicator::check_peers)
      .def(
          "give_up",
          [](Communicator& c) {
            if (!c.owned()) return;  // a forked child, where a thread of the parent may have held the lock
            const auto lock = c.lock();
            c.give_up();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("pids", &Communicator::pids);

  py::class_<Layout, std::shared_ptr<Layout>>(m, "Layout")
      .def_property_readonly("rows_per_expert", [](const Layout& l) { return py::tuple(py::cast(l.rows_per_expert)); })
      .def_readonly("rows", &Layout::rows)
      .def_property_readonly("counts",
                             [](const Layout& l) {
                               return py::bytes(reinterpret_cast<const char*>(l.counts.data()), l.counts.size() * 8);
                             })
      .def_readonly("dropped", &Layout::dropped)
      .def_readonly("own", &Layout::own);

  py::class_<PendingReceive, std::shared_ptr<PendingReceive>>(m, "PendingReceive")
      .def("ready", &PendingReceive::ready)
      .def("next", &PendingReceive::next, py::call_guard<py::gil_scoped_release>())
      .def("finish", &PendingReceive::finish, py::call_guard<py::gil_scoped_release>())
      .def("finished", &PendingReceive::finished)
      .def("abandon", &PendingReceive::abandon);

  py::class_<PendingSum, std::shared_ptr<PendingSum>>(m, "PendingSum")
      .def("raise_flag", &PendingSum::raise_flag)
      .def("ready", &PendingSum::ready)
      .def("sum",
           [](PendingSum& l, uintptr_t weights, uintptr_t y) {
             py::gil_scoped_release release;
             l.sum(pointer<float>(weights), pointer<char>(y));
           })
      .def("finish", &PendingSum::finish, py::call_guard<py::gil_scoped_release>())
      .def("finished", &PendingSum::finished)
      .def("abandon", &PendingSum::abandon);

  py::class_<SharedTokens, std::shared_ptr<SharedTokens>>(m, "SharedTokens");

  py::class_<Transfer>(m, "Transfer")
      .def(py::init<std::shared_ptr<Communicator>, std::shared_ptr<Heap>, std::vector<int64_t>, int>(),
           py::arg("communicator").none(true), py::arg("heap"), py::arg("expert_offsets"), py::arg("threads"))
      // send, sum, spread: both halves of the operation in one call.
      .def("send",
           [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, py::handle x,
              py::handle ids, const ExtraWords& extra) {
             const Op op = make_op(compared, std::move(label), 0, "");
             const Tokens tokens(x, ids);
             const Sent sent = without_gil([&] {
               Sent sent = t.start_send(op, tokens.rows(), tokens.ids(), tokens.shape(), extra_of(extra));
               sent.pending->finish();
               return sent;
             });
             const Layout& layout = *sent.layout;
             return py::make_tuple(block_tensor(t.heap_ptr(), sent.block, layout.rows, layout.hidden, layout.dtype),
                                   sent.layout, py::tuple(py::cast(layout.rows_per_expert)), layout.rows,
                                   layout.dropped, layout.own,
                                   extra_tensor(t.heap_ptr(), sent.extra_block, layout.rows, extra[1]));
           })
      .def(
          "sum",
          [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, const Layout& layout,
             const py::object& rows, const py::object& weights, std::shared_ptr<Heap> results,
             const std::array<int64_t, 3>& extra) -> py::object {
            Op op = make_op(compared, std::move(label), 0, "");
            const TensorMatrix rows_RD = rows.is_none() ? TensorMatrix{} : expert_rows(rows, layout);
            const TensorMatrix weights_TK =
                weights.is_none() ? TensorMatrix{} : dense_floats(weights, layout.tokens, layout.top_k);
            const auto [words, width, out] = extra;
            const ExtraRows extra_rows{pointer<char>(static_cast<uintptr_t>(words)), width};
            auto* extra_out = pointer<uint32_t>(static_cast<uintptr_t>(out));
            const int64_t block = without_gil([&] {
              return t.sum(std::move(op), layout, {rows_RD.data, rows_RD.stride},
                           reinterpret_cast<const float*>(weights_TK.data), extra_rows, extra_out, results.get());
            });
            if (block < 0) return py::none();
            return block_tensor(std::move(results), block, layout.tokens, layout.hidden, layout.dtype);
          },
          py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg().none(true), py::arg())
      .def("spread",
           [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, const Layout& layout,
              uintptr_t g, int64_t g_stride, uintptr_t rows, int64_t rows_stride, uintptr_t weights, bool weight_grads,
              uintptr_t grad_weights, const ExtraWords& extra) {
             const Op op = make_op(compared, std::move(label), 0, "");
             const Spread spread = without_gil([&] {
               Spread spread =
                   t.start_spread(op, layout, {pointer<char>(g), g_stride}, {pointer<char>(rows), rows_stride},
                                  pointer<float>(weights), weight_grads, pointer<float>(grad_weights), extra_of(extra));
               spread.pending->finish();
               return spread;
             });
             return py::make_tuple(block_tensor(t.heap_ptr(), spread.block, layout.rows, layout.hidden, layout.dtype),
                                   extra_tensor(t.heap_ptr(), spread.extra_block, layout.rows, extra[1]));
           })
      .def("start_send",
           [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
              std::string text, uintptr_t x, int64_t x_stride, uintptr_t ids, int64_t tokens, int64_t top_k,
              int64_t hidden, int dtype) {
             const Op op = make_op(compared, std::move(label), fault, std::move(text));
             const Sent sent = without_gil([&] {
               return t.start_send(op, {pointer<char>(x), x_stride}, pointer<int64_t>(ids),
                                   {tokens, top_k, hidden, dtype});
             });
             return py::make_tuple(pending_tensor(t.heap_ptr(), sent.pending, sent.block, *sent.layout), sent.layout,
                                   sent.pending);
           })
      .def("share",
           [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, py::handle x,
              py::handle ids) {
             const Op op = make_op(compared, std::move(label), 0, "");
             const Tokens tokens(x, ids);
             Shared shared = without_gil([&] { return t.share(op, tokens.rows(), tokens.ids(), tokens.shape()); });
             const Layout& layout = *shared.layout;
             const py::tuple located = located_rows(*shared.tokens, layout);
             return py::make_tuple(shared.tokens, shared.layout, py::tuple(py::cast(layout.rows_per_expert)),
                                   layout.rows, layout.dropped, layout.own, located);
           })
      .def("copy_shared",
           [](const Transfer& t, const Layout& layout, const SharedTokens& tokens, size_t part, int64_t row,
              int64_t count, uintptr_t y) {
             py::gil_scoped_release release;
             t.copy_shared(layout, tokens, part, row, count, pointer<char>(y));
           })
      .def("share_again",
           [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, const Layout& layout,
              const std::vector<std::pair<uintptr_t, int64_t>>& parts, uintptr_t words, uintptr_t word_of_row) {
             const Op op = make_op(compared, std::move(label), 0, "");
             std::vector<Rows> rows;
             for (const auto& [x, stride] : parts) rows.push_back({pointer<char>(x), stride});
             const std::shared_ptr<SharedTokens> shared = without_gil([&] {
               return t.share_again(op, layout, rows, pointer<uint32_t>(words), pointer<uint32_t>(word_of_row));
             });
             return py::make_tuple(shared, located_rows(*shared, layout));
           })
      .def(
          "start_sum",
          [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
             std::string text, const Layout& layout, uintptr_t rows, int64_t rows_stride, bool computed) {
            const Op op = make_op(compared, std::move(label), fault, std::move(text));
            py::gil_scoped_release release;
            return t.start_sum(op, layout, {pointer<char>(rows), rows_stride}, computed);
          },
          py::keep_alive<0, 6>())
      .def("start_spread", [](Transfer& t, const std::array<int64_t, kComparedWords>& compared, std::string label,
                              const Layout& layout, uintptr_t g, int64_t g_stride, uintptr_t rows, int64_t rows_stride,
                              uintptr_t weights, bool weight_grads, uintptr_t grad_weights) {
        const Op op = make_op(compared, std::move(label), 0, "");
        const Spread spread = without_gil([&] {
          return t.start_spread(op, layout, {pointer<char>(g), g_stride}, {pointer<char>(rows), rows_stride},
                                pointer<float>(weights), weight_grads, pointer<float>(grad_weights));
        });
        return py::make_tuple(pending_tensor(t.heap_ptr(), spread.pending, spread.block, layout), spread.pending);
      });

  py::class_<Exchange>(m, "Exchange")
      .def(py::init<std::shared_ptr<Communicator>, int>(), py::arg("communicator"), py::arg("threads"))
      .def("copy",
           [](Exchange& e, const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
              std::string text, uintptr_t x, int64_t bytes, int64_t first, int64_t part, uintptr_t y) {
             const Op op = make_op(compared, std::move(label), fault, std::move(text));
             py::gil_scoped_release release;
             e.copy(op, {pointer<char>(x), bytes}, first, part, pointer<char>(y));
           })
      .def("sum",
           [](Exchange& e, const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
              std::string text, uintptr_t x, int64_t bytes, int64_t first, int64_t count, int dtype, uintptr_t y) {
             const Op op = make_op(compared, std::move(label), fault, std::move(text));
             py::gil_scoped_release release;
             e.sum(op, {pointer<char>(x), bytes}, first, count, dtype, pointer<char>(y));
           })
      .def("values",
           [](Exchange& e, const std::array<int64_t, kComparedWords>& compared, std::string label, const Values& own) {
             const Op op = make_op(compared, std::move(label), 0, "");
             std::vector<Values> all(static_cast<size_t>(e.world()));
             without_gil([&] { e.values(op, own, all.data()); });
             return all;
           })
      .def("all_sum", [](Exchange& e, const std::array<int64_t, kComparedWords>& compared, std::string label,
                         int64_t fault, std::string text, uintptr_t x, int64_t bytes, int dtype) {
        const Op op = make_op(compared, std::move(label), fault, std::move(text));
        py::gil_scoped_release release;
        e.all_sum(op, {pointer<char>(x), bytes}, dtype);
      });

  py::class_<Rendezvous>(m, "Rendezvous")
      .def(py::init([](std::shared_ptr<Communicator> communicator, int threads,
                       const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
                       std::string text, uintptr_t x, int64_t bytes) {
        const Op op = make_op(compared, std::move(label), fault, std::move(text));
        py::gil_scoped_release release;
        return std::make_unique<Rendezvous>(std::move(communicator), threads, op,
                                            Exchange::Buffer{pointer<char>(x), bytes});
      }))
      .def_static("flag_bytes", [] { return Rendezvous::kFlagBytes; })
      .def("next", &Rendezvous::next, py::call_guard<py::gil_scoped_release>())
      .def("rows",
           [](Rendezvous& r, int peer, int64_t first, int64_t rows, int64_t columns, int dtype) {
             char* data = r.rows(peer, first, rows * columns * dtype_bytes(dtype));
             return matrix_tensor(data, rows, columns, dtype, [communicator = r.communicator()] {});
           })
      .def("raise_flag", &Rendezvous::raise_flag)
      .def("add",
           [](Rendezvous& r, int64_t first, int64_t count, int dtype, uintptr_t y) {
             py::gil_scoped_release release;
             r.add(first, count, dtype, pointer<char>(y));
           })
      .def("publish_done", &Rendezvous::publish_done, py::call_guard<py::gil_scoped_release>())
      .def("finish", &Rendezvous::finish, py::call_guard<py::gil_scoped_release>())
      .def("abandon", &Rendezvous::abandon);

  bind_gemm(m);
  bind_gpu_gemm(m);
  bind_layer(m);
  bind_operators(m);
  bind_p2p(m);
  bind_spans(m);
  bind_torch(m);
  m.def("pack_header",
        [](const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault, std::string text) {
          return py::bytes(pack_header(make_op(compared, std::move(label), fault, std::move(text))));
        });
  m.def("sweep_stale", &sweep_stale,
        "Remove /dev/shm/<prefix>.<pid>.* of processes that have exited. Return how many were removed.");
  m.attr("interface") = MOE_COMM_INTERFACE;
  m.def("isa", [] { return std::string(kernels().name); }, "Return the instruction set in use.");
  m.def("isas", &isa_names, "Return the instruction sets that this CPU supports, best first.");
  m.def(
      "fence", [] { std::atomic_thread_fence(std::memory_order_seq_cst); },
      "Order the loads and stores before this call before those after it, as other processes see them.");
  m.def("set_isa", &set_isa, "Use another instruction set (tests). Return False if this CPU does not support it.");
  m.def("cuda_sources", &cuda_sources, "Return the device code of this build for NVRTC: path below csrc -> text.");
  m.def(
      "cuda_archs",
      [] {
#ifdef MOE_COMM_WITH_CUDA
        return cuda_archs();
#else
        return std::string();
#endif
      },
      "Return the architectures that nvcc compiled the kernels for, such as sm_80,sm_90a; empty if it compiled "
      "none. Does not access a GPU.");
  m.def("cuda_probe", []() -> py::object {
#ifdef MOE_COMM_WITH_CUDA
    return py::str(cuda_probe_json());
#else
    return py::none();
#endif
  });
}
