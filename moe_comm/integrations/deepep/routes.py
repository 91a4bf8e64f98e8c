"""One row per (token, rank), as DeepEP sends tokens, with a dispatcher whose experts are the ranks.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the last of its slots: combine adds in the order of DeepEP's reference

A rank receives the rows in the order (source rank, token). A second row per token carries bits in fp32 words: source
rank, token, expert ids, weights and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch import DROPPED, Dispatcher, DispatchHandle, DispatchOptions
from moe_comm.dispatch.input_faults import ID_DTYPES
from moe_comm.dispatch.shared import shared_dispatcher
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.fp8 import E4M3
from moe_comm.topology import ExpertPlacement

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Rows = Tensor | tuple[Tensor, Tensor]
"""Rows [T, H], or e4m3 values [T, H] and fp32 or int32 scales [T, S]."""
Bias = Tensor | tuple[Tensor, Tensor] | None


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return values and scales."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def fault_of(
    name: str, value: Any, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]
) -> InputError | None:
    """Return the error for a value that is no tensor with one of ``dtypes`` and ``shapes``. None: any size."""
    got = type(value).__name__
    if isinstance(value, Tensor):
        got = f"{value.dtype} {list(value.shape)}"
        fits = (
            len(shape) == value.dim() and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
            for shape in shapes
        )
        if value.dtype in dtypes and any(fits):
            return None
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return InputError(f"{name} must be {names} {str(list(shapes[-1])).replace('None', '*')}; got {got}")


def input_fault(x: Any, topk_idx: Any, topk_weights: Any) -> InputError | None:
    """Return the error for rows, ids and weights that a dispatch cannot send, without communication."""
    values, scales = unpacked(x)
    fault = fault_of("x", values, FLOATS if scales is None else (E4M3,), (None, None))
    if fault is None and scales is not None:
        fault = fault_of("the scales of x", scales, (torch.float32, torch.int32), (len(values), None))
    if fault is None and topk_idx is not None:
        fault = fault_of("topk_idx", topk_idx, ID_DTYPES, (len(values), None))
    if fault is not None or topk_weights is None:
        return fault
    if topk_idx is None:
        return InputError("topk_weights needs topk_idx")
    return fault_of("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape))


def refuse(dispatcher: Dispatcher, fault: MoeCommError | None, device: torch.device) -> None:
    """Raise ``fault`` of this rank, if any, on every rank. device: of the rows that would have been sent."""
    if fault is not None:
        dispatcher.refuse(fault, torch.empty(0, device=device))


def range_fault(ids_TK: Tensor, num_experts: int) -> InputError | None:
    """Return the error for ids out of range."""
    low, high = (int(v) for v in torch.aminmax(ids_TK)) if ids_TK.numel() else (DROPPED, DROPPED)
    if low >= DROPPED and high < num_experts and num_experts > 0:
        return None
    return InputError(f"topk_idx must be -1 or an expert id below {num_experts}; got ids from {low} to {high}")


class GroupBuffer:
    """What both buffers share. Dispatchers are created on first use, which is collective.

    Raises:
        ConfigError: there is no process group.
    """

    backend: ClassVar[str] = "auto"
    timeout_s: ClassVar[float] = 300.0

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is None:
            raise ConfigError("a deep_ep buffer of moe_comm needs group=, a torch.distributed process group")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    def destroy(self) -> None:
        """Do nothing: the dispatchers are released with the process group."""

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which all operations run. Needs CUDA."""
        return torch.cuda.current_stream()

    @cached_property
    def _device(self) -> torch.device:
        """Device of the last rows; before the first ones, the default of the group."""
        return Channel(communicator_of(self.group, self.timeout_s), self.timeout_s).rows_device

    def _dispatcher(self, x: Any, num_experts: int | None = None) -> Dispatcher:
        """Return the dispatcher of ``num_experts`` experts, or the one whose experts are the ranks.

        It is for the device of x. An x that is no tensor has the device of the last rows, as on the other ranks.
        """
        values, _ = unpacked(x)
        if isinstance(values, Tensor):
            self._device = values.device
        options = DispatchOptions(timeout_s=self.timeout_s)
        return shared_dispatcher(num_experts or self.group_size, self.group, self._device, self.backend, options)

    def _owner(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """Return the rank of each expert id; -1 for -1."""
        ends = torch.tensor(ExpertPlacement.of(num_experts, self.group_size).offsets[1:], device=ids_TK.device)
        return torch.bucketize(ids_TK.long(), ends, right=True).masked_fill_(ids_TK < 0, DROPPED)

    def _check_handle(self, handle: Any, kind: type[Any], x: Any, num_experts: int | None = None) -> None:
        """Raise InputError on every rank if ``handle`` is of another kind.

        num_experts: of the dispatcher that the other ranks call. A new one would wait for them to create it too.
        """
        if not isinstance(handle, kind):
            fault = InputError(f"handle must come from dispatch of the same buffer; got {type(handle).__name__}")
            refuse(self._dispatcher(x, num_experts), fault, self._device)

    def _exchange(
        self,
        x: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int,
        is_token_in_rank: Tensor | None = None,
        tokens_per_expert: Tensor | None = None,
        *,
        least_rows: int = 0,
        fault: MoeCommError | None = None,
    ) -> tuple[Routes, Rows, Tensor | None]:
        """Send each token once to each rank that has one of its experts. Collective. No autograd.

        Args:
            is_token_in_rank, tokens_per_expert: [T, W] and [E], in place of ids.
            least_rows: rows that the caller sees at least.
            fault: error of this rank, which all ranks raise, also that of ``input_fault``.

        Returns:
            The routes, the received rows, and the weights [R, K].

        Raises:
            InputError, RankMismatch, PeerDied, PeerTimeout: on every rank.
        """
        dispatcher = self._dispatcher(x)
        if fault is None and topk_idx is not None:
            fault = range_fault(topk_idx, num_experts)
        refuse(dispatcher, fault, self._device)
        tokens, device = len(unpacked(x)[0]), self._device
        words = [torch.full((tokens, 1), self.rank, dtype=torch.int32, device=device)]
        words.append(torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1))
        if topk_idx is None:
            assert is_token_in_rank is not None and tokens_per_expert is not None
            ids_TN = torch.arange(self.group_size, device=device).where(is_token_in_rank, DROPPED)
            ids_E1 = torch.arange(num_experts, device=device).unsqueeze(1)
            counts_E1 = tokens_per_expert.int().view(torch.float32).unsqueeze(1)
            counts_N1 = self._dispatcher(x, num_experts).dispatch(counts_E1, ids_E1).rows_RD.view(torch.int32)
            counts_L = counts_N1.view(-1, self.group_size).sum(1)  # of all ranks, for this rank's experts
        else:
            ids_TN = last_slots(self._owner(topk_idx, num_experts))
            words.append(topk_idx.to(torch.int32))
        if topk_weights is not None:
            words.append(topk_weights.contiguous().view(torch.int32))
        sent = dispatcher.dispatch(torch.cat(words, 1).view(torch.float32), ids_TN)
        words_RX = sent.rows_RD.view(torch.int32)
        local_RK = weights_RK = None
        if topk_idx is not None:
            own, top_k = ExpertPlacement.of(num_experts, self.group_size).local_range(self.rank), topk_idx.shape[1]
            ids_RK = words_RX[:, 2 : 2 + top_k].to(topk_idx.dtype)
            mine_RK = (ids_RK >= own.start) & (ids_RK < own.stop)
            local_RK = torch.where(mine_RK, ids_RK - own.start, -1)
            counts_L = torch.bincount(local_RK[mine_RK].long(), minlength=len(own))
            if topk_weights is not None:
                weights_RK = sent.rows_RD[:, 2 + top_k :].masked_fill(~mine_RK, 0.0)
        source_R, token_R = words_RX[:, 0].contiguous(), words_RX[:, 1].contiguous()
        routes = Routes(dispatcher, ids_TN, sent.handle, source_R, token_R, local_RK, counts_L, least_rows)
        return routes, routes.send(x), weights_RK


def last_slots(owner_TK: Tensor) -> Tensor:
    """Keep the last slot of each rank in each token, and replace the others by -1."""
    kept = owner_TK.clone()
    for k in range(owner_TK.shape[1] - 1):
        kept[:, k].masked_fill_((owner_TK[:, k + 1 :] == owner_TK[:, k, None]).any(1), DROPPED)
    return kept


@dataclass(eq=False)
class Routes:
    """The routes of one dispatch, for combine and for further rows.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token; -1 elsewhere.
        words: of the dispatch of bits.
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        rows_per_expert: [L].
        least_rows: rows that the caller sees at least.
    """

    dispatcher: Dispatcher
    ids_TN: Tensor
    words: DispatchHandle
    source_R: Tensor
    token_R: Tensor
    local_ids_RK: Tensor | None
    rows_per_expert: Tensor
    least_rows: int

    def __post_init__(self) -> None:
        self._handles = {(False, self.words.hidden, self.words.dtype): self.words}

    @property
    def num_rows(self) -> int:
        """Number R of received rows."""
        return len(self.source_R)

    @property
    def padded_rows(self) -> int:
        """Number of rows that the caller sees."""
        return max(self.num_rows, self.least_rows)

    def aligned(self, alignment: int) -> Tensor:
        """Return the rows per expert, rounded up."""
        return (self.rows_per_expert + alignment - 1) // alignment * alignment

    def send(self, x: Rows) -> Rows:
        """Send rows. e4m3 values are sent as bf16, which holds each of them, so that combine can return bf16."""
        values_TD, scales = unpacked(x)
        if scales is None:
            return self._send(values_TD)
        values_RD = self._send(values_TD.to(torch.bfloat16)).to(E4M3)
        return values_RD, self.send_words(scales.contiguous()).view(scales.dtype)

    def _send(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank receives. Rows of a new width or dtype count their slots once more."""
        key = False, x_TD.shape[1], x_TD.dtype
        if key in self._handles:
            return self.dispatcher.spread(x_TD, self._handles[key])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN)
        self._handles[key] = sent.handle
        return sent.rows_RD

    def send_words(self, words_TX: Tensor) -> Tensor:
        """Return the received rows of any 32-bit words, as int32. ``spread`` may multiply by one, which changes NaN."""
        return self.dispatcher.dispatch(words_TX.view(torch.float32), self.ids_TN).rows_RD.view(torch.int32)

    def combine(self, rows_RD: Tensor, weights_RK: Tensor | None, bias: Bias) -> tuple[Tensor, Tensor | None]:
        """Return the sums of each token's rows [T, D] and weights [T, K] over the ranks. Collective.

        Rows are added in fp32, starting with ``bias``, and rounded once. Ranks that disagree on the presence of weights
        or bias start different operations, which raises RankMismatch.
        """
        weights_TK = None
        if weights_RK is not None:
            top_k = weights_RK.shape[1]
            padded_RX = F.pad(weights_RK[: self.num_rows], (0, max(0, self.words.hidden - top_k)))
            weights_TK = self._sum(padded_RX)[:, :top_k]
        if bias is None:
            return self._sum(rows_RD[: self.num_rows]), weights_TK
        first, *more = bias if isinstance(bias, tuple) else (bias,)
        total_TD = sum((term.float() for term in more), first.float())
        slots_TND = self._sum(rows_RD[: self.num_rows], slots=True).view(*self.ids_TN.shape, rows_RD.shape[1])
        for slot_TD in slots_TND.unbind(1):
            total_TD = total_TD + slot_TD.float()
        return total_TD.to(rows_RD.dtype), weights_TK

    def _sum(self, rows_RD: Tensor, slots: bool = False) -> Tensor:
        """Return the sums [T, D]. slots: [T * N, D], the row of each slot; zeros without one."""
        ids = self.ids_TN.reshape(-1, 1) if slots else self.ids_TN
        key = slots, rows_RD.shape[1], rows_RD.dtype
        if key not in self._handles:
            nothing = rows_RD.new_zeros(1, 1).expand(len(ids), rows_RD.shape[1])
            self._handles[key] = self.dispatcher.dispatch(nothing, ids).handle
        return self.dispatcher.combine(rows_RD, torch.ones(ids.shape, device=rows_RD.device), self._handles[key])

    def pad(self, rows: Tensor, fill: float = 0) -> Tensor:
        """Append rows up to ``padded_rows``."""
        missing = self.padded_rows - rows.shape[0]
        return rows if missing <= 0 else torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))

    def pad_rows(self, x: Rows) -> Rows:
        """Pad rows, or values and scales."""
        return (self.pad(x[0]), self.pad(x[1])) if isinstance(x, tuple) else self.pad(x)

    def padded(self, x: Rows, weights_RK: Tensor | None) -> tuple[Rows, Tensor | None, Tensor | None]:
        """Return rows, local ids and weights of a dispatch, with padding."""
        ids = None if self.local_ids_RK is None else self.pad(self.local_ids_RK, -1)
        return self.pad_rows(x), ids, None if weights_RK is None else self.pad(weights_RK)

    def check(self, fault: MoeCommError | None) -> None:
        """Raise ``fault`` of this rank, if any, on every rank."""
        refuse(self.dispatcher, fault, self.words.device)

    def combine_fault(self, x: Any, topk_weights: Any, bias: Any, expanded: int | None = None) -> InputError | None:
        """Return the error for arguments that combine does not accept. expanded: rows of the expanded layout."""
        counts = [self.num_rows, self.padded_rows] if expanded is None else [expanded]
        fault = fault_of("x, all rows that were received,", x, FLOATS, *((count, None) for count in counts))
        if fault is None and topk_weights is not None:
            top_k = None if self.local_ids_RK is None else self.local_ids_RK.shape[1]
            shapes = [(count, top_k) if expanded is None else (count,) for count in counts]
            fault = fault_of("topk_weights", topk_weights, (torch.float32,), *shapes)
        terms = bias if isinstance(bias, tuple) else (bias,)
        if len(terms) not in (1, 2):
            fault = fault or InputError(f"bias must be one or two tensors; got {len(terms)}")
        for term in () if bias is None else terms:
            fault = fault or fault_of("bias", term, FLOATS, (len(self.ids_TN), x.shape[1]))
        return fault
