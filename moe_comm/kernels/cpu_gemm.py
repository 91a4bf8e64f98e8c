"""GEMMs of rows by expert: each expert's rows times its weight, and the gradients of the weights.

On the CPU they run in the native core (csrc/cpu/gemm). There a row of a product has the same bits in every batch, at
every position, for every number of threads and on every instruction set, and the gradient of a weight is a sum over the
expert's rows in order, in fp32 (float64 in float64). On other devices, and on a CPU without the native core, torch
computes them expert by expert, and the bits may depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.kernels.native import core, on_cpu
from moe_comm.kernels.token_rows import TokenRows
from moe_comm.runtime.memory import DTYPE_CODES, address, in_memory, materialized, row_address

_CODES = {**DTYPE_CODES, torch.float64: 3}


def is_native(*tensors: Tensor) -> bool:
    """Return whether the native core computes products of these tensors, which have one dtype."""
    return tensors[0].dtype in _CODES and on_cpu(*tensors)


class ExpertWeights:
    """Weights [E, N, K] and biases [E, N] or None, with any strides. Their memory must stay valid.

    transposed: the weights as [E, K, N], without biases.
    is_native: whether the native core multiplies by them.
    others: weights [1, N, K] of the experts E, E + 1, ..., and biases [1, N]. A call with one of these has no other.
    """

    def __init__(
        self,
        w_ENK: Tensor,
        bias_EN: Tensor | None = None,
        others: Sequence[Tensor | None] = (),
        other_biases: Sequence[Tensor | None] = (),
    ) -> None:
        self._others: list[ExpertWeights] = []
        for w, bias in zip(others, other_biases, strict=True):
            if w is not None:
                self._others.append(ExpertWeights(w, None if bias_EN is None else bias))
        self._w_ENK, self._bias_EN = materialized(w_ENK), None if bias_EN is None else materialized(bias_EN)
        self.dtype = w_ENK.dtype
        self.is_native: bool = is_native(self._w_ENK) and all(one.is_native for one in self._others)
        if self.is_native:
            self._at = _stack(self._w_ENK)
            if self._bias_EN is not None and self._bias_EN.stride(1) != 1:
                self._bias_EN = self._bias_EN.contiguous()
            self._bias = row_address(self._bias_EN, w_ENK.dtype)

    @property
    def transposed(self) -> ExpertWeights:
        result = ExpertWeights(self._w_ENK.transpose(1, 2))
        result._others = [one.transposed for one in self._others]
        return result

    def stack_from(self, first: int) -> tuple[int, int, int, int]:
        """Return the address of expert ``first``, and strides in bytes; the weights must be native."""
        if self._others and (other := self._other(first)):
            return other.stack_from(0)
        at, expert, row, element = self._at
        return at + first * expert, expert, row, element

    def bias_from(self, first: int) -> tuple[int, int, int, int]:
        """Return address and strides of the biases, or zeros."""
        if self._others and (other := self._other(first)):
            return other.bias_from(0)
        at, expert = self._bias
        return (at + first * expert, expert, 0, 0) if at else (0, 0, 0, 0)

    def _other(self, first: int) -> ExpertWeights | None:
        """Return the weights of expert ``first`` if they are not in the stack."""
        other = first - self._w_ENK.shape[0]
        return self._others[other] if other >= 0 else None

    def multiply(self, x_RK: Tensor | TokenRows, out_RN: Tensor, sizes: Sequence[int], first: int = 0) -> None:
        """Write out[r] = x[r] @ w[e].T + bias[e]. No autograd.

        Args:
            x_RK: rows of the experts ``first``, ``first + 1``, ...
            out_RN: dense rows, with any stride between them.
            sizes: number of rows of each of these experts.
        """
        if self._others and (other := self._other(first)):
            other.multiply(x_RK, out_RN, sizes)
            return
        if self.is_native:
            self._run(x_RK, out_RN, sizes, first, self.bias_from(first)[:2], False)
            return
        for e, (w_KN, x_rK, out_rN) in enumerate(self._by_expert(x_RK, out_RN, sizes, first)):
            if self._bias_EN is None:
                torch.mm(x_rK, w_KN, out=out_rN)
            else:
                torch.addmm(self._bias_EN[first + e], x_rK, w_KN, out=out_rN)

    def add(self, x_RK: Tensor, out_RN: Tensor, sizes: Sequence[int], first: int = 0) -> None:
        """Add what ``multiply`` writes, without biases, to ``out_RN``. The sums are rounded once."""
        if self.is_native:
            self._run(x_RK, out_RN, sizes, first, (0, 0), True)
            return
        for w_KN, x_rK, out_rN in self._by_expert(x_RK, out_RN, sizes, first):
            out_rN.addmm_(x_rK, w_KN)

    def _by_expert(
        self, x_RK: Tensor | TokenRows, out_RN: Tensor, sizes: Sequence[int], first: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        w_EKN = self._w_ENK[first : first + len(sizes)].transpose(1, 2)
        return zip(w_EKN.unbind(0), _dense(x_RK).split(sizes), out_RN.split(sizes), strict=True)

    def _run(
        self,
        x_RK: Tensor | TokenRows,
        out_RN: Tensor,
        sizes: Sequence[int],
        first: int,
        bias: tuple[int, ...],
        accumulate: bool,
    ) -> None:
        dtype, count, x_RK = self._w_ENK.dtype, x_RK.shape[0], _with_dense_rows(x_RK)
        core().grouped_gemm(
            sizes,
            _CODES[dtype],
            torch.get_num_threads(),
            _operand(x_RK, dtype, self._w_ENK.shape[2]),
            self.stack_from(first),
            self._w_ENK.shape[1],
            bias,
            row_address(out_RN, dtype, (count, self._w_ENK.shape[1])),
            accumulate,
        )


class GradientBuffers(NamedTuple):
    """Memory of ``SwigluExperts.backward``.

    h_RG: of forward; None: it is computed again. act_RF, grad_h_RG: outputs, times ``weights_R`` if given. of_batch:
    they are overwritten by each batch of experts. weights_R, dots_R: as of ``expert_mlp.BackwardInputs``. grad_rows_RD:
    output or None.
    """

    h_RG: Tensor | None
    act_RF: Tensor
    grad_h_RG: Tensor
    of_batch: bool
    weights_R: Tensor | None
    dots_R: Tensor | None
    grad_rows_RD: Tensor | None


@dataclass(frozen=True)
class SwigluExperts:
    """Stacks of SwiGLU experts, whose passes are one native call each (csrc/cpu/expert_layer.h)."""

    w13: ExpertWeights
    w2: ExpertWeights

    @property
    def is_native(self) -> bool:
        """Whether ``forward`` supports them, and ``backward`` if they have no biases."""
        return self.w13.is_native and self.w2.is_native and self.w13.dtype in DTYPE_CODES

    def forward(
        self,
        rows: Tensor | TokenRows,
        sizes: Sequence[int],
        first: int,
        buffers: tuple[Tensor, bool, Tensor],
        out_RD: Tensor,
    ) -> None:
        """Write the outputs of experts ``first``, ``first + 1``, ..., or of one that is not in the stacks.

        Args:
            buffers: h_RG, whether it is of all rows (otherwise of a batch of experts), and act_RF of a batch.
        """
        dtype, rows = out_RD.dtype, _with_dense_rows(rows)
        h_RG, keep, act_RF = buffers
        out, stride = row_address(out_RD, dtype)
        core().swiglu_experts(
            sizes,
            DTYPE_CODES[dtype],
            torch.get_num_threads(),
            _operand(rows, dtype, out_RD.shape[1]),
            (*self._stacks(first), self.w13.bias_from(first), self.w2.bias_from(first)),
            (out_RD.shape[1], act_RF.shape[1]),
            (h_RG.data_ptr(), keep, act_RF.data_ptr()),
            (out, stride),
        )

    def backward(
        self,
        rows: tuple[Tensor | TokenRows, Tensor | TokenRows],
        sizes: Sequence[int],
        first: int,
        buffers: GradientBuffers,
        grads: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Write the gradients of experts ``first``, ``first + 1``, ..., or of one that is not in the stacks.

        Args:
            rows: those of forward, and the gradients of its outputs.
            grads: outputs for the gradients of w13 and w2 of these experts, of which one stride is 1; or None.
        """
        x, grad = map(_with_dense_rows, rows)
        dtype, hidden, ffn = grad.dtype, grad.shape[1], buffers.act_RF.shape[1]
        h, stride = row_address(buffers.h_RG, dtype)
        none = 0, 0, 0, 0
        core().swiglu_experts_backward(
            sizes,
            DTYPE_CODES[dtype],
            torch.get_num_threads(),
            (_operand(x, dtype, hidden), _operand(grad, dtype, hidden)),
            (*self._stacks(first), none, none),
            (hidden, ffn),
            (h, stride // dtype.itemsize, buffers.act_RF.data_ptr(), buffers.grad_h_RG.data_ptr(), buffers.of_batch),
            (address(buffers.weights_R, torch.float32), address(buffers.dots_R, torch.float32)),
            row_address(buffers.grad_rows_RD, dtype),
            [(*none, 0) if one is None else (*_stack(one), _CODES[one.dtype]) for one in grads],
        )

    def _stacks(self, first: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.w13.stack_from(first), self.w2.stack_from(first)


def weight_gradients(y_RN: Tensor | TokenRows, x_RK: Tensor | TokenRows, out_ENK: Tensor, sizes: Sequence[int]) -> None:
    """Write out[e] = y[rows of e].T @ x[rows of e]; zeros for an expert without rows. No autograd.

    out_ENK: in the dtype of the rows, or in fp32.
    """
    if not is_native(out_ENK):
        parts = zip(_dense(y_RN).split(sizes), _dense(x_RK).split(sizes), out_ENK.unbind(0), strict=True)
        for y_rN, x_rK, out_NK in parts:
            torch.mm(y_rN.t().to(out_NK.dtype), x_rK.to(out_NK.dtype), out=out_NK)
        return
    if out_ENK.stride(2) != 1 and out_ENK.shape[2] > 1:
        if out_ENK.stride(1) == 1:
            weight_gradients(x_RK, y_RN, out_ENK.transpose(1, 2), sizes)
        else:
            dense_ENK = torch.empty_like(out_ENK, memory_format=torch.contiguous_format)
            weight_gradients(y_RN, x_RK, dense_ENK, sizes)
            out_ENK.copy_(dense_ENK)
        return
    dtype, y_RN, x_RK = y_RN.dtype, _with_dense_rows(y_RN), _with_dense_rows(x_RK)
    y, x = _operand(y_RN, dtype, out_ENK.shape[1]), _operand(x_RK, dtype, out_ENK.shape[2])
    *at, _ = _stack(out_ENK)
    out = (*at, out_ENK.element_size())
    core().grouped_gemm_weights(sizes, _CODES[dtype], torch.get_num_threads(), y, x, out, _CODES[out_ENK.dtype], False)


def _dense(x_RK: Tensor | TokenRows) -> Tensor:
    return x_RK if isinstance(x_RK, Tensor) else x_RK.dense()


def _stack(w_ENK: Tensor) -> tuple[int, int, int, int]:
    size = w_ENK.element_size()
    expert, row, element = w_ENK.stride()
    return w_ENK.data_ptr(), expert * size, row * size, element * size


def _with_dense_rows(x_RK: Tensor | TokenRows) -> Tensor | TokenRows:
    """Return rows that ``_operand`` takes. The caller keeps them until the native core has read them."""
    if not isinstance(x_RK, Tensor):
        return x_RK
    if not in_memory(x_RK):  # a negative view, or zeros without memory
        return x_RK.clone(memory_format=torch.contiguous_format)
    row, element = x_RK.stride()
    return x_RK if element == 1 and (row >= x_RK.shape[1] or row == 0) else x_RK.contiguous()


def _operand(
    x_RK: Tensor | TokenRows, dtype: torch.dtype, width: int
) -> tuple[list[int], list[int], int, int, int, int, int]:
    """Return rows as the native core takes them."""
    if not isinstance(x_RK, Tensor):
        return x_RK.operand()
    rows = x_RK.shape[0]
    at, stride = row_address(x_RK, dtype, (rows, width))
    return [at], [rows], stride if rows > 1 else width * dtype.itemsize, 0, 0, rows, width
