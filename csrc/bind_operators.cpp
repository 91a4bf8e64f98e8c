// Python bindings of operators on tensors. Arguments are element addresses, sizes and strides.
#include "bind_operators.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "cpu/balance.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/rank_slots.h"
#include "layout.h"

namespace py = pybind11;

namespace moe_comm {

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_operators(py::module_& m) {
  m.def(
      "swiglu_forward",
      [](uintptr_t h, int64_t h_stride, uintptr_t act, int64_t rows, int64_t width, int dtype, int threads) {
        py::gil_scoped_release release;
        const int64_t size = dtype_bytes(dtype);
        parallel_for(rows, 64, threads, [&](int64_t first, int64_t last) {
          kernels().swiglu(pointer<char>(h) + first * h_stride * size, h_stride,
                           pointer<char>(act) + first * width * size, last - first, width, dtype);
        });
      },
      py::arg("h"), py::arg("h_stride"), py::arg("act"), py::arg("rows"), py::arg("width"), py::arg("dtype"),
      py::arg("threads"),
      "act [rows, width] = silu(gate) * up, h [rows, 2 * width] = gate | up; h_stride in elements.");
  m.def(
      "swiglu_backward",
      [](uintptr_t h, int64_t h_stride, uintptr_t grad_act, uintptr_t grad_h, uintptr_t act, int64_t rows,
         int64_t width, int dtype, int threads) {
        py::gil_scoped_release release;
        const SwigluGradient gradient{
            pointer<char>(h), h_stride, pointer<char>(grad_act), pointer<char>(grad_h), pointer<char>(act),
            nullptr,          nullptr};
        parallel_for(rows, 64, threads, [&](int64_t first, int64_t last) {
          kernels().swiglu_backward(gradient, first, last, width, dtype);
        });
      },
      py::arg("h"), py::arg("h_stride"), py::arg("grad_act"), py::arg("grad_h"), py::arg("act"), py::arg("rows"),
      py::arg("width"), py::arg("dtype"), py::arg("threads"),
      "grad_h [rows, 2 * width] from grad_act. Recomputes act unless its address is 0.");

  m.def(
      "rms_norm_forward",
      [](uintptr_t x, uintptr_t weight, uintptr_t y, uintptr_t scale, int64_t rows, int64_t width, float eps, int dtype,
         int threads) {
        py::gil_scoped_release release;
        const int64_t row = width * dtype_bytes(dtype);
        parallel_for(rows, 64, threads, [&](int64_t first, int64_t last) {
          kernels().rms_norm(pointer<char>(x) + first * row, pointer<float>(weight), pointer<char>(y) + first * row,
                             pointer<float>(scale) + first, last - first, width, eps, dtype);
        });
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("scale"), py::arg("rows"), py::arg("width"),
      py::arg("eps"), py::arg("dtype"), py::arg("threads"),
      "y [rows, width] = x * scale * weight, scale [rows] = 1 / sqrt(mean of x^2 + eps); weight and scale are fp32.");
  m.def(
      "rms_norm_backward",
      [](uintptr_t x, uintptr_t weight, uintptr_t scale, uintptr_t grad_y, uintptr_t grad_x, uintptr_t grad_parts,
         int64_t rows, int64_t rows_of_part, int64_t width, int dtype, int threads) {
        py::gil_scoped_release release;
        const int64_t row = width * dtype_bytes(dtype), parts = (rows + rows_of_part - 1) / rows_of_part;
        parallel_for(parts, 1, threads, [&](int64_t first, int64_t last) {
          for (int64_t part = first; part < last; ++part) {
            const int64_t start = part * rows_of_part;
            const int64_t count = rows - start < rows_of_part ? rows - start : rows_of_part;
            kernels().rms_norm_backward(
                pointer<char>(x) + start * row, pointer<float>(weight), pointer<float>(scale) + start,
                pointer<char>(grad_y) + start * row, grad_x ? pointer<char>(grad_x) + start * row : nullptr,
                grad_parts ? pointer<float>(grad_parts) + part * width : nullptr, count, width, dtype);
          }
        });
      },
      py::arg("x"), py::arg("weight"), py::arg("scale"), py::arg("grad_y"), py::arg("grad_x"), py::arg("grad_parts"),
      py::arg("rows"), py::arg("rows_of_part"), py::arg("width"), py::arg("dtype"), py::arg("threads"),
      "grad_x [rows, width], and the gradient of the weight for each part of the rows, added to grad_parts [parts, "
      "width], fp32. An output with address 0 is not computed.");
  m.def(
      "rotate",
      [](uintptr_t x, std::array<int64_t, 3> strides, uintptr_t y, uintptr_t cos, uintptr_t sin, int64_t angles,
         float sign, std::array<int64_t, 4> shape, int threads) {
        py::gil_scoped_release release;
        const auto [batch, length, heads, width] = shape;
        const int64_t half = width / 2, tokens = length;
        parallel_for(batch * length, 16, threads, [&, heads = heads, width = width](int64_t first, int64_t last) {
          for (int64_t t = first; t < last; ++t) {
            const int64_t from = t / tokens * strides[0] + t % tokens * strides[1];
            kernels().rotate(pointer<float>(x) + from, strides[2], pointer<float>(y) + t * heads * width, width,
                             pointer<float>(cos) + t % angles * half, pointer<float>(sin) + t % angles * half, sign,
                             heads, half);
          }
        });
      },
      py::arg("x"), py::arg("strides"), py::arg("y"), py::arg("cos"), py::arg("sin"), py::arg("angles"),
      py::arg("sign"), py::arg("shape"), py::arg("threads"),
      "Rotary embedding: y [B, S, h, d] = x, with the halves of each head rotated by the angles of its token. Token t "
      "of B * S uses row t modulo angles of cos and sin [angles, d / 2]. sign -1 is the backward pass. fp32; strides "
      "of "
      "x in elements, y is dense.");

  m.def(
      "weighted_sum",
      [](uintptr_t rows, uintptr_t place, uintptr_t weights, uintptr_t y, std::array<int64_t, 3> shape, int dtype,
         int threads) {
        py::gil_scoped_release release;
        const auto [tokens, top_k, hidden] = shape;
        char* const base[] = {pointer<char>(rows)};
        const TokenLoop loop{pointer<int64_t>(place), base, top_k, hidden, dtype, false};
        parallel_for(tokens, 16, threads, [&, hidden = hidden](int64_t first, int64_t last) {
          kernels().sum(loop, first, last, pointer<char>(y), hidden * dtype_bytes(dtype), pointer<float>(weights));
        });
      },
      py::arg("rows"), py::arg("place"), py::arg("weights"), py::arg("y"), py::arg("shape"), py::arg("dtype"),
      py::arg("threads"),
      "y [T, D] = sum over k of weights [T, K] * the row at place [T, K]. Slots with place -1 add nothing. weights 0: "
      "all weights are 1. shape: T, K, D.");
  m.def(
      "scale_rows",
      [](uintptr_t rows, uintptr_t weights, uintptr_t partner, uintptr_t dots, std::array<int64_t, 2> shape, int dtype,
         int threads) {
        py::gil_scoped_release release;
        const auto [count, hidden] = shape;
        const int64_t stride = hidden * dtype_bytes(dtype);
        parallel_for(count, 16, threads, [&, hidden = hidden](int64_t first, int64_t last) {
          const int64_t place = 0;
          for (int64_t r = first; r < last; ++r) {
            char* const own[] = {pointer<char>(rows) + r * stride};
            char* const other[] = {partner ? pointer<char>(partner) + r * stride : nullptr};
            const TokenLoop loop{&place, partner ? other : nullptr, 1, hidden, dtype, false};
            kernels().spread(loop, 0, 1, own[0], stride, pointer<float>(weights) + r, own,
                             partner ? pointer<float>(dots) + r : nullptr);
          }
        });
      },
      py::arg("rows"), py::arg("weights"), py::arg("partner"), py::arg("dots"), py::arg("shape"), py::arg("dtype"),
      py::arg("threads"),
      "Multiply rows [R, D] by weights [R] in place. dots [R]: dot products of the rows before that and the rows of "
      "`partner`. partner 0: none.");

  m.def(
      "rank_layout",
      [](uintptr_t ids, std::array<int64_t, 2> shape, int64_t id_bytes, uintptr_t owner, int64_t world,
         std::array<uintptr_t, 4> outputs) {
        py::gil_scoped_release release;
        const auto [tokens, top_k] = shape;
        const RankLayout to{pointer<int32_t>(outputs[0]), pointer<int32_t>(outputs[1]), pointer<uint8_t>(outputs[2]),
                            pointer<int64_t>(outputs[3])};
        if (id_bytes == 8) {
          rank_layout(pointer<int64_t>(ids), tokens, top_k, pointer<int32_t>(owner), world, to);
        } else {
          rank_layout(pointer<int32_t>(ids), tokens, top_k, pointer<int32_t>(owner), world, to);
        }
      },
      py::arg("ids"), py::arg("shape"), py::arg("id_bytes"), py::arg("owner"), py::arg("world"), py::arg("outputs"),
      "See cpu/rank_slots.h. shape: T, K. outputs: per rank, per expert, in rank, ranks.");
  m.def(
      "local_slots",
      [](uintptr_t words, std::array<int64_t, 3> shape, std::array<int64_t, 2> own, int64_t id_bytes,
         std::array<uintptr_t, 3> outputs) {
        py::gil_scoped_release release;
        const auto [local, weights, rows] = outputs;
        if (id_bytes == 8) {
          local_slots(pointer<int32_t>(words), shape, own, pointer<int64_t>(local), pointer<int32_t>(weights),
                      pointer<int64_t>(rows));
        } else {
          local_slots(pointer<int32_t>(words), shape, own, pointer<int32_t>(local), pointer<int32_t>(weights),
                      pointer<int64_t>(rows));
        }
      },
      py::arg("words"), py::arg("shape"), py::arg("own"), py::arg("id_bytes"), py::arg("outputs"),
      "See cpu/rank_slots.h. shape: R, width, K. own: first expert and number of experts. outputs: local ids, weights "
      "or 0, rows of each expert.");
  m.def(
      "ids_of_mask",
      [](uintptr_t mask, std::array<int64_t, 3> shape, uintptr_t ids) {
        py::gil_scoped_release release;
        const auto [tokens, experts, top_k] = shape;
        return ids_of_mask(pointer<uint8_t>(mask), tokens, experts, top_k, pointer<int64_t>(ids));
      },
      py::arg("mask"), py::arg("shape"), py::arg("ids"), "See cpu/rank_slots.h. shape: T, E, K.");

  m.def(
      "plan_rows",
      [](const std::vector<int64_t>& loads, const std::vector<int64_t>& home, int64_t world,
         std::array<int64_t, 5> limits, const std::vector<std::array<int64_t, 2>>& residents) {
        const auto [rows, memory, row_ns, copy_ns, copies] = limits;
        std::vector<Resident> present;
        for (const auto& [expert, rank] : residents) present.push_back({expert, rank});
        const LentRows plan = plan_rows(loads, home, world, {rows, memory, row_ns, copy_ns, copies}, present);
        std::vector<std::array<int64_t, 3>> result;
        for (const Lent& one : plan.lent) result.push_back({one.expert, one.rank, one.rows});
        return std::pair(result, plan.digest);
      },
      py::arg("loads"), py::arg("home"), py::arg("world"), py::arg("limits"), py::arg("residents"),
      "See cpu/balance.h. limits: those of BalanceLimits. Returns (expert, rank, rows) of each lent expert, and the "
      "digest.");

  m.def(
      "bare_gather",
      [](uintptr_t src, uintptr_t index, uintptr_t dst, int64_t count, int64_t row_bytes, int threads) {
        py::gil_scoped_release release;
        parallel_for(count, 64, threads, [&](int64_t first, int64_t last) {
          kernels().bare_gather(pointer<char>(src), pointer<int64_t>(index), pointer<int64_t>(dst), first, last,
                                row_bytes);
        });
      },
      "Lower bound for benchmarks: copy row index[i] of src to address dst[i], with non-temporal stores.");
  m.def(
      "bare_weighted_sum",
      [](uintptr_t dst, uintptr_t src, uintptr_t weights, int64_t tokens, int64_t top_k, int64_t hidden, int dtype,
         int threads) {
        if (top_k > 64) {
          throw std::invalid_argument("bare_weighted_sum takes at most 64 rows per token; got top_k " +
                                      std::to_string(top_k));
        }
        py::gil_scoped_release release;
        parallel_for(tokens, 16, threads, [&](int64_t first, int64_t last) {
          kernels().bare_sum(pointer<char>(dst), pointer<int64_t>(src), pointer<float>(weights), first, last, top_k,
                             hidden, dtype);
        });
      },
      "Lower bound for benchmarks: dst[t] = sum of weights[t, k] times the row at address src[t, k].");
}

}  // namespace moe_comm
