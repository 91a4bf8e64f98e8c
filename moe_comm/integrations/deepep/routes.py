"""One row per (token, rank), as DeepEP sends tokens, with a dispatcher whose experts are the ranks.

    token 5, experts 0 1 on rank 0 and 2 3 on rank 1, ids [2, 0, 3]

    slots      2 0 3
    owners     1 0 1
    sent to    . 0 1        each rank once, in the last of its slots: combine adds in the order of DeepEP's reference

A rank receives the rows in the order (source rank, token). A second row per token carries bits in fp32 words: source
rank, token, expert ids, weights and scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any, ClassVar, TypeVar

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
HandleT = TypeVar("HandleT")


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return values and scales."""
    return x if isinstance(x, tuple) and len(x) == 2 else (x, None)


def checked(name: str, value: Any, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]) -> Tensor:
    """Return a tensor with one of ``dtypes`` and ``shapes``, or raise InputError. None: any size."""
    got = type(value).__name__
    if isinstance(value, Tensor):
        got = f"{value.dtype} {list(value.shape)}"
        fits = (
            len(shape) == value.dim() and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
            for shape in shapes
        )
        if value.dtype in dtypes and any(fits):
            return value
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise InputError(f"{name} must be {names} {str(list(shapes[-1])).replace('None', '*')}; got {got}")


def check_input(x: Any, topk_idx: Any, topk_weights: Any, num_experts: int | None = None) -> None:
    """Raise InputError for rows, ids and weights that a dispatch cannot send. num_experts None: any ids."""
    values, scales = unpacked(x)
    tokens = len(checked("x", values, FLOATS if scales is None else (E4M3,), (None, None)))
    if scales is not None:
        checked("the scales of x", scales, (torch.float32, torch.int32), (tokens, None))
    if topk_idx is not None:
        check_ids(topk_idx, tokens, num_experts)
    if topk_weights is not None:
        if topk_idx is None:
            raise InputError("topk_weights needs topk_idx")
        checked("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape))


def check_ids(topk_idx: Any, tokens: int | None, num_experts: int | None = None) -> None:
    """Raise InputError for ids that are not [T, K], or out of range."""
    ids_TK = checked("topk_idx", topk_idx, ID_DTYPES, (tokens, None))
    if not ids_TK.shape[1]:
        raise InputError("topk_idx needs at least one column; -1 selects no expert")
    if num_experts is None:
        return
    low, high = (int(v) for v in torch.aminmax(ids_TK)) if ids_TK.numel() else (DROPPED, DROPPED)
    if low < DROPPED or high >= num_experts or num_experts < 1:
        raise InputError(f"topk_idx must be -1 or an expert id below {num_experts}; got ids from {low} to {high}")


def check_handle(handle: Any, kind: type[HandleT]) -> HandleT:
    """Return ``handle``, or raise InputError if it is of another kind."""
    if isinstance(handle, kind):
        return handle
    raise InputError(f"handle must come from dispatch of the same buffer; got {type(handle).__name__}")


def placed(rows_NX: Tensor, place: Tensor, *shape: int) -> Tensor:
    """Return zeros [*shape, X] with ``rows_NX`` at ``place``, an index or a mask. Torch cannot index e4m3."""
    bits_NX = rows_NX.view(torch.uint8) if rows_NX.dtype.itemsize == 1 else rows_NX
    out = bits_NX.new_zeros(*shape, *rows_NX.shape[1:])
    out[place] = bits_NX
    return out.view(rows_NX.dtype)


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

    def _owners(self, ids_KT: Tensor, num_experts: int) -> Tensor:
        """Return the rank of each expert id, [K, T] int32; -1 for -1. ids_KT: from ``by_slot``."""
        owner_E = _owner_table(num_experts, self.group_size, ids_KT.device)
        return owner_E.index_select(0, ids_KT.view(-1)).view(ids_KT.shape)

    @contextmanager
    def _checks(self, x: Any, num_experts: int | None = None) -> Iterator[Dispatcher]:
        """Yield the dispatcher that the other ranks call next, and raise an error of the block on every rank."""
        dispatcher = self._dispatcher(x, num_experts)
        try:
            yield dispatcher
        except MoeCommError as fault:
            dispatcher.refuse(fault, torch.empty(0, device=self._device))

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
    ) -> tuple[Routes, Rows, Tensor | None]:
        """Send each token once to each rank that has one of its experts. Collective. No autograd.

        Args:
            is_token_in_rank, tokens_per_expert: [T, W] and [E], in place of ids.
            least_rows: rows that the caller sees at least.

        Returns:
            The routes, the received rows, and the weights [R, K].

        Raises:
            InputError, RankMismatch, PeerDied, PeerTimeout: on every rank.
        """
        dispatcher = self._dispatcher(x)
        tokens, device = len(unpacked(x)[0]), self._device
        top_k = 0 if topk_idx is None else topk_idx.shape[1]
        words_TX = torch.empty(
            tokens, 2 + top_k + (0 if topk_weights is None else top_k), dtype=torch.int32, device=device
        )
        words_TX[:, 0] = self.rank
        words_TX[:, 1] = torch.arange(tokens, device=device)
        if topk_idx is None:
            assert is_token_in_rank is not None and tokens_per_expert is not None
            ids_TN = torch.arange(self.group_size, device=device).where(is_token_in_rank, DROPPED)
            ids_E1 = torch.arange(num_experts, device=device).unsqueeze(1)
            counts_E1 = tokens_per_expert.int().view(torch.float32).unsqueeze(1)
            counts_N1 = self._dispatcher(x, num_experts).dispatch(counts_E1, ids_E1).rows_RD.view(torch.int32)
            counts_L = counts_N1.view(-1, self.group_size).sum(1)  # of all ranks, for this rank's experts
        else:
            ids_TN = last_slots(self._owners(by_slot(topk_idx), num_experts))
            words_TX[:, 2 : 2 + top_k] = topk_idx
        if topk_weights is not None:
            words_TX[:, 2 + top_k :] = topk_weights.view(torch.int32)
        sent = dispatcher.dispatch(words_TX.view(torch.float32), ids_TN)
        words_RX = sent.rows_RD.view(torch.int32)
        local_RK = weights_RK = None
        if topk_idx is not None:
            own = ExpertPlacement.of(num_experts, self.group_size).local_range(self.rank)
            local_RK = words_RX[:, 2 : 2 + top_k] - (own.start - 1)
            # Ones in all bits for this rank's experts: bit operations are much faster than ``masked_fill`` on CPU.
            mine_RK = ((local_RK > 0) & (local_RK <= len(own))).int().neg_()
            local_RK &= mine_RK
            counts_L = torch.bincount(local_RK.view(-1), minlength=1 + len(own))[1:]
            local_RK = local_RK.to(topk_idx.dtype).sub_(1)
            if topk_weights is not None:
                weights_RK = mine_RK.bitwise_and_(words_RX[:, 2 + top_k :]).view(torch.float32)
        source_R, token_R = words_RX[:, 0].contiguous(), words_RX[:, 1].contiguous()
        padded = max(len(source_R), least_rows)
        routes = Routes(dispatcher, ids_TN, sent.handle, source_R, token_R, local_RK, counts_L, padded)
        return routes, routes.send(x), weights_RK


@cache
def _owner_table(num_experts: int, world: int, device: torch.device) -> Tensor:
    """Return [1 + E] int32: -1, and the rank of each expert."""
    counts = torch.tensor(ExpertPlacement.of(num_experts, world).experts_per_rank)
    owner_E = torch.arange(world, dtype=torch.int32).repeat_interleave(counts)
    return F.pad(owner_E, (1, 0), value=DROPPED).to(device)


def by_slot(ids_TK: Tensor) -> Tensor:
    """Return the ids plus one, [K, T] int32. CPU operations on its rows are the fastest."""
    return ids_TK.T.to(torch.int32, memory_format=torch.contiguous_format, copy=True).add_(1)


def last_slots(owner_KT: Tensor) -> Tensor:
    """Keep the last slot of each rank in each token, and replace the others by -1. Returns [T, K] int64."""
    kept_KT = owner_KT.clone()
    for k in range(len(kept_KT) - 1):
        repeated_T = any_of(kept_KT[k + 1 :] == kept_KT[k])
        kept_KT[k].bitwise_or_(repeated_T.int().neg_())
    return kept_KT.T.to(torch.int64, memory_format=torch.contiguous_format)


def any_of(values_KT: Tensor) -> Tensor:
    """Return [T], 1 where one of ``values_KT``, bool, is True. ``Tensor.any`` is ten times slower on CPU."""
    return values_KT.view(torch.uint8).amax(0)


@dataclass(eq=False)
class Routes:
    """The routes of one dispatch, for combine and for further rows.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token; -1 elsewhere.
        words: of the dispatch of bits.
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        rows_per_expert: [L].
        padded_rows: number of rows that the caller sees.
    """

    dispatcher: Dispatcher
    ids_TN: Tensor
    words: DispatchHandle
    source_R: Tensor
    token_R: Tensor
    local_ids_RK: Tensor | None
    rows_per_expert: Tensor
    padded_rows: int

    def __post_init__(self) -> None:
        self._handles = {(False, self.words.hidden, self.words.dtype): self.words}

    @property
    def num_rows(self) -> int:
        """Number R of received rows."""
        return len(self.source_R)

    @property
    def rows_per_rank(self) -> Tensor:
        """[W] int64 received rows of each source rank."""
        return torch.bincount(self.source_R.long(), minlength=self.dispatcher.world)

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
        slots_TND = self._sum(rows_RD[: self.num_rows], slots=True).view(*self.ids_TN.shape, rows_RD.shape[1])
        terms = (*(bias if isinstance(bias, tuple) else (bias,)), *slots_TND.unbind(1))
        total_TD = reduce(torch.add, (term.float() for term in terms))
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

    def padded(self, x: Rows, weights_RK: Tensor | None) -> tuple[Rows, Tensor | None, Tensor | None]:
        """Return rows, local ids and weights of a dispatch, with padding."""
        rows = (self.pad(x[0]), self.pad(x[1])) if isinstance(x, tuple) else self.pad(x)
        ids = None if self.local_ids_RK is None else self.pad(self.local_ids_RK, -1)
        return rows, ids, None if weights_RK is None else self.pad(weights_RK)

    def check_combine(self, x: Any, topk_weights: Any, bias: Any, expanded: int | None = None) -> None:
        """Raise InputError for arguments that combine does not accept. expanded: rows of the expanded layout."""
        counts = [self.num_rows, self.padded_rows] if expanded is None else [expanded]
        rows = checked("x, all rows that were received,", x, FLOATS, *((count, None) for count in counts))
        if topk_weights is not None:
            top_k = None if self.local_ids_RK is None else self.local_ids_RK.shape[1]
            shapes = [(count, top_k) if expanded is None else (count,) for count in counts]
            checked("topk_weights", topk_weights, (torch.float32,), *shapes)
        terms = bias if isinstance(bias, tuple) else (bias,)
        if len(terms) not in (1, 2):
            raise InputError(f"bias must be one or two tensors; got {len(terms)}")
        for term in () if bias is None else terms:
            checked("bias", term, FLOATS, (len(self.ids_TN), rows.shape[1]))
