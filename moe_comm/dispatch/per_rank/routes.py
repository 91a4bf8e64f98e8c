"""The routes of one exchange, for combine and for further rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.per_rank.arguments import FLOATS, Bias, Rows, checked, unpacked
from moe_comm.dispatch.per_rank.layout import SENDER_WORDS
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.fp8 import E4M3
from moe_comm.tensor_memory import materialized


def wide_rows(x: Rows) -> tuple[Tensor, Tensor | None]:
    """Return values and scales. e4m3 values become bf16, which holds each of them, so that combine can return bf16."""
    values, scales = unpacked(x)
    return (values, None) if scales is None else (values.to(torch.bfloat16), scales)


def narrow_rows(rows_RD: Tensor, words_RX: Tensor, scales: Tensor) -> Rows:
    """Return received e4m3 values, and scales like ``scales``, which are the last words."""
    first = words_RX.shape[1] - scales.shape[1]
    return rows_RD.to(E4M3), words_RX[:, first:].contiguous().view(scales.dtype)


class RankRoutes:
    """Routes for rows of any width and dtype. Each new one counts the slots once more.

    Attributes:
        ids_TN: [T, N] int64 ranks of each token, each at most once; -1 elsewhere.
        source_R, token_R: int32 source rank and token of each received row.
        local_ids_RK: ids of this rank's experts, -1 for experts of other ranks; None without ids.
        rows_per_expert: [L].
        padded_rows: number of rows that the caller sees.
    """

    source_R: Tensor
    token_R: Tensor
    local_ids_RK: Tensor | None
    rows_per_expert: Tensor
    padded_rows: int

    def __init__(self, dispatcher: Dispatcher, ids_TN: Tensor) -> None:
        self.dispatcher, self.ids_TN = dispatcher, ids_TN
        self._handles: dict[tuple[bool, int, torch.dtype], DispatchHandle] = {}

    def send(self, x_TD: Tensor) -> Tensor:
        """Return the rows that this rank receives. Collective."""
        key = False, x_TD.shape[1], x_TD.dtype
        if key in self._handles:
            return self.dispatcher.spread(x_TD, self._handles[key])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN)
        self._handles[key] = sent.handle
        return sent.rows_RD

    def send_with(self, x_TD: Tensor, words: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return received rows and int32 words: the sender's, and ``words`` [T, X], fp32 or integers. Collective.

        The label of the dispatch lists the words, because ranks that send others of the same width must not differ.
        """
        sent_words = {name: materialized(part) for name, part in words.items() if part is not None}
        label = " and ".join(f"{part.shape[1]} {name}" for name, part in sent_words.items())
        if (scales := sent_words.get("scales")) is not None:
            label += f" ({str(scales.dtype).removeprefix('torch.')})"
        tokens = len(x_TD)
        token_T1 = torch.arange(tokens, dtype=torch.int32, device=x_TD.device).unsqueeze(1)
        sender_T2 = F.pad(token_T1, (1, 0), value=self.dispatcher.rank)
        bits = [part.view(torch.int32) if part.is_floating_point() else part.int() for part in sent_words.values()]
        words_TX = torch.cat([sender_T2, *bits], 1)
        extra = words_TX.unsqueeze(1).expand(tokens, self.ids_TN.shape[1], words_TX.shape[1])
        sent = self.dispatcher.dispatch(x_TD, self.ids_TN, extra_TKX=extra, label=label)
        assert sent.extra_RX is not None
        self._handles[False, x_TD.shape[1], x_TD.dtype] = sent.handle
        return sent.rows_RD, sent.extra_RX

    def sum(self, rows_RD: Tensor, terms: Sequence[Tensor] = ()) -> Tensor:
        """Return [T, D]: ``terms`` and each token's rows, added in fp32 in slot order and rounded once. Collective."""
        if not terms:
            return self._sum(rows_RD, slots=False)
        slots_TND = self._sum(rows_RD, slots=True).view(*self.ids_TN.shape, rows_RD.shape[1])
        return reduce(torch.add, (term.float() for term in (*terms, *slots_TND.unbind(1)))).to(rows_RD.dtype)

    def _sum(self, rows_RD: Tensor, slots: bool) -> Tensor:
        """Return the sums [T, D]. slots: [T * N, D], the row of each slot; zeros without one."""
        ids = self.ids_TN.reshape(-1, 1) if slots else self.ids_TN
        key = slots, rows_RD.shape[1], rows_RD.dtype
        if key not in self._handles:
            nothing = rows_RD.new_zeros(1, 1).expand(len(ids), rows_RD.shape[1])
            self._handles[key] = self.dispatcher.dispatch(nothing, ids).handle
        return self.dispatcher.combine(
            rows_RD, torch.ones(ids.shape, device=rows_RD.device, dtype=torch.float32), self._handles[key]
        )

    def received(self, words_RX: Tensor, local_ids_RK: Tensor | None, rows_per_expert: Tensor, least_rows: int) -> None:
        """Store what the rows are."""
        self.source_R, self.token_R = words_RX[:, 0].contiguous(), words_RX[:, 1].contiguous()
        self.local_ids_RK, self.rows_per_expert = local_ids_RK, rows_per_expert
        self.padded_rows = max(len(words_RX), least_rows)

    @property
    def num_rows(self) -> int:
        """Number R of received rows."""
        return len(self.source_R)

    @property
    def rank_ends(self) -> Tensor:
        """[W] int32 end of the received rows of each source rank."""
        ranks_W = torch.arange(self.dispatcher.world, dtype=torch.int32, device=self.source_R.device)
        return torch.searchsorted(self.source_R, ranks_W, right=True, out_int32=True)

    def aligned(self, alignment: int) -> Tensor:
        """Return the rows per expert, rounded up."""
        counts_L = self.rows_per_expert
        return counts_L if alignment == 1 else (counts_L + alignment - 1) // alignment * alignment

    def again(self, x: Rows, topk_weights: Tensor | None = None) -> tuple[Rows, Tensor | None]:
        """Send other rows, and weights [T, K] or None. Return those of this rank's experts. Collective."""
        values, scales = wide_rows(x)
        if scales is None and topk_weights is None:
            return self.send(values), None
        rows, words_RX = self.send_with(values, {"weights": topk_weights, "scales": scales})
        weights = None
        if topk_weights is not None:
            assert self.local_ids_RK is not None
            bits_RK = words_RX[:, SENDER_WORDS : SENDER_WORDS + topk_weights.shape[1]]
            weights = bits_RK.masked_fill(self.local_ids_RK < 0, 0).view(torch.float32)
        return rows if scales is None else narrow_rows(rows, words_RX, scales), weights

    def combine(self, rows_RD: Tensor, weights_RK: Tensor | None, bias: Bias) -> tuple[Tensor, Tensor | None]:
        """Return the sums of each token's rows [T, D] and weights [T, K] over the ranks. Collective.

        Rows are added in fp32, starting with ``bias``, and rounded once. Ranks that disagree on the presence of weights
        or bias start different operations, which raises RankMismatch.
        """
        weights_TK = None if weights_RK is None else self.sum(weights_RK[: self.num_rows])
        terms = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        return self.sum(rows_RD[: self.num_rows], terms), weights_TK

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
