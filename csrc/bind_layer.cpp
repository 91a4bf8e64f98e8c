// Dispatch, experts and combine of a layer in one call.
#include "bind_layer.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "bind_torch.h"
#include "bind_transfer.h"
#include "cpu/errors.h"
#include "cpu/expert_layer.h"

namespace py = pybind11;

namespace moe_comm {
namespace {

// A span of the recorder (bind_spans.cpp), open until `end` or the end of the scope; none() without a recorder.
class SpanScope {
 public:
  explicit SpanScope(py::object span) : span_(std::move(span)) {
    if (!span_.is_none()) span_.attr("__enter__")();
  }
  ~SpanScope() {
    try {
      end();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the end of a span");
    }
  }
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;
  void end() {
    const py::object span = std::exchange(span_, py::none());
    if (!span.is_none()) span.attr("__exit__")(py::none(), py::none(), py::none());
  }
  void put_rows(const Layout& layout, int64_t nbytes) {
    if (!span_.is_none()) span_.attr("put_rows")(py::cast(layout.rows_per_expert), nbytes);
  }

 private:
  py::object span_;
};

// A block of this rank's heap that peers read. After an error they may still read it, so it is not freed.
class SharedBlock {
 public:
  SharedBlock(Heap& heap, int64_t bytes) : heap_(heap), offset_(heap.alloc(bytes)) {}
  void free() { heap_.free(offset_); }
  char* data() const { return heap_.base() + offset_; }

 private:
  Heap& heap_;
  int64_t offset_;
};

[[noreturn]] void refuse(const std::string& text) {
  const py::object kind = py::module_::import("moe_comm.errors").attr("InputError");
  PyErr_SetString(kind.ptr(), text.c_str());
  throw py::error_already_set();
}

gemm::Stack stack_at(py::handle tensor, const std::array<int64_t, 3>& sizes, int dtype, bool transposed) {
  if (tensor.is_none()) return {0, 0, 0, 0};
  TensorStack stack = stack_of(tensor);
  if (transposed) {
    std::swap(stack.sizes[1], stack.sizes[2]);
    std::swap(stack.strides[1], stack.strides[2]);
  }
  if (!std::equal(sizes.begin(), sizes.end(), stack.sizes) || stack.dtype != dtype) {
    refuse("the weights of experts do not match the tokens of the layer");
  }
  return {stack.data, stack.strides[0], stack.strides[1], stack.strides[2]};
}

// w13, w2, b13 and b2 of the experts of this rank; biases may be None.
SwigluExperts experts_of(const py::tuple& tensors, bool transposed, const Shape& shape, int threads) {
  const TensorStack last = stack_of(tensors[1]);
  const int64_t count = last.sizes[0], ffn = last.sizes[transposed ? 1 : 2];
  const auto bias = [&](size_t i, int64_t width) {
    const gemm::Stack stack = stack_at(tensors[i], {count, width, 1}, shape.dtype, false);
    if (stack.base && width > 1 && stack.row != dtype_bytes(shape.dtype)) refuse("biases of experts must be dense");
    return stack;
  };
  return {stack_at(tensors[0], {count, 2 * ffn, shape.hidden}, shape.dtype, transposed),
          stack_at(tensors[1], {count, shape.hidden, ffn}, shape.dtype, transposed),
          bias(2, 2 * ffn),
          bias(3, shape.hidden),
          count,
          shape.hidden,
          ffn,
          shape.dtype,
          threads};
}

using Compared = std::array<int64_t, kComparedWords>;

py::object run_layer(Transfer& transfer, const std::pair<Compared, Compared>& compared, const std::string& label,
                     const std::array<py::object, 3>& inputs, const py::tuple& weights, bool transposed,
                     std::shared_ptr<Heap> results, int threads, const std::array<py::object, 3>& spans) {
  const Tokens tokens(inputs[0], inputs[1]);
  const Shape shape = tokens.shape();
  const TensorMatrix weights_TK = dense_floats(inputs[2], shape.tokens, shape.top_k);
  const auto* const of_slots = reinterpret_cast<const float*>(weights_TK.data);
  const SwigluExperts experts = experts_of(weights, transposed, shape, threads);
  const int64_t row_bytes = shape.hidden * dtype_bytes(shape.dtype);

  if (experts.experts != transfer.experts()) refuse("the weights are not those of this rank's experts");
  SpanScope dispatch(spans[0]);
  Shared shared = without_gil([&] {
    const std::vector<int64_t> ids = valid_ids(tokens.ids(), of_slots, shape.tokens, shape.top_k);
    return transfer.start_share(make_op(compared.first, label, 0, ""), tokens.rows(), ids.data(), shape);
  });
  const Layout& layout = *shared.layout;
  dispatch.put_rows(layout, (shape.tokens * shape.top_k - layout.dropped - layout.own) * row_bytes);
  dispatch.end();

  SpanScope computing(spans[1]);
  // Peers that sleep wake up while this rank computes.
  SharedBlock rows = without_gil([&] {
    try {
      SharedBlock out(transfer.heap(), layout.rows * row_bytes);
      try {
        run_experts(experts, layout, *shared.tokens, *results, out.data());
      } catch (...) {
        out.free();  // no peer knows the block yet
        throw;
      }
      shared.tokens.reset();
      return out;
    } catch (...) {
      shared.pending->finish();
      throw;
    }
  });

  computing.end();
  if (!spans[2].is_none()) spans[2].attr("put")(py::arg("nbytes") = (layout.rows - layout.own) * row_bytes);
  SpanScope combine(spans[2]);
  const bool empty = shape.tokens == 0 || shape.hidden == 0;
  const int64_t block = without_gil([&] {
    shared.pending->finish();
    int64_t sums = -1;
    try {
      sums = transfer.sum(make_op(compared.second, label, 0, ""), layout, {rows.data(), row_bytes}, of_slots, {},
                          nullptr, empty ? nullptr : results.get());
    } catch (const HandshakeFailed&) {  // no peer reads the rows
      rows.free();
      throw;
    }
    rows.free();
    return sums;
  });
  py::object sums = py::none();
  if (block >= 0) sums = block_tensor(std::move(results), block, shape.tokens, shape.hidden, shape.dtype);
  return py::make_tuple(sums, layout.rows);
}

}  // namespace

void bind_layer(py::module_& m) {
  m.def("run_layer", &run_layer, py::arg("transfer"), py::arg("compared"), py::arg("label"), py::arg("inputs"),
        py::arg("weights"), py::arg("transposed"), py::arg("results"), py::arg("threads"), py::arg("spans"),
        "Dispatch, SwiGLU experts and combine without autograd; see cpu/expert_layer.h.");
}

}  // namespace moe_comm
