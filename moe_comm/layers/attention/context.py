"""Causal attention of a sequence that is split over a context-parallel group, in one of three forms.

    ulysses   [B, S/cp, h, d] ──all-to-all──▶ [B, S, h/cp, d] ── attention of h/cp heads ──▶ all-to-all back
              (arXiv 2309.14509; used by MegaScale-MoE, arXiv 2505.11432). cp must divide the heads. Two all-to-alls of
              activations in each direction; their size per rank decreases with cp.
    ring      keys and values circulate, queries stay (arXiv 2310.01889). Any number of heads.
    token_ring  queries circulate and outputs return, keys and values stay (arXiv 2412.20501).

    forward, cp 3, rank 1               step 0            step 1            step 2             afterwards
    ring        keys and values of      rank 1            rank 0            rank 2
                sends its own           to rank 2         to rank 0         -
    token_ring  queries of              rank 1, 1st half  rank 0            rank 2             rank 1, 2nd half
                sends to the next rank  1's ─▶ rank 2     0's ─▶ rank 2     -                  -
                sends to the owner      -                 -                 output for rank 0  output for rank 2

The sequence is contiguous for ulysses and zig-zag for both rings (see ``sequence``). With ``Overlap``, the all-to-alls
of ulysses overlap with the projections next to them (``project_to_heads``, ``project_from_heads``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import AbortOnError
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import cast_parameter, compute_dtype, once_differentiable, without_autocast
from moe_comm.layers.attention.attention_blocks import (
    AttentionGradients,
    AttentionState,
    ScoreBlock,
    plan_blocks,
)
from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.key_exchange import (
    KeyExchange,
    KeyRanges,
    compact,
    key_ranges,
    pack,
    unpack,
)
from moe_comm.layers.attention.placed import PlacedDocuments
from moe_comm.layers.attention.sequence import Documents, check_context, chunks_of
from moe_comm.layers.parallel.collectives import (
    abort_on_error,
    channel_of,
    check_cut,
    group_rank,
    group_size,
    swap_dims,
)
from moe_comm.layers.parallel.recompute import recomputed
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ulysses import matmul_swap, swap_matmul

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class ContextSpec:
    """How a sequence is attended.

    group: ranks over which the sequence is split; None: this rank has the full sequence, a ring of one rank. context:
    form of context parallelism. scale: scale of the scores. window: see ``AttentionConfig``. documents: packed
    documents of the full sequence; None: each sequence is one document.
    """

    group: ProcessGroup | None
    context: Context
    scale: float
    window: int | None = None
    documents: Documents | None = None

    def ranges(self, q_BhSd: Tensor) -> KeyRanges:
        """Return the keys that the ranks send to each other, for this rank's queries ``q_BhSd``."""
        cp = group_size(self.group)
        return key_ranges(self.documents, q_BhSd.shape[2] * cp, cp, self.window)

    def blocks(
        self, q_BhSd: Tensor, key_rank: int, query_rank: int | None = None, received: bool = False
    ) -> list[ScoreBlock]:
        """Return the score blocks of the queries of ``query_rank`` (None: this rank) and the keys of ``key_rank``.

        Blocks with this rank's own keys are marked ``first``: no earlier block has their queries.

        Args:
            received: the keys are those of ``ranges``, which the query rank received, instead of all keys.
        """
        cp, rank = group_size(self.group), group_rank(self.group)
        query_rank = rank if query_rank is None else query_rank
        batch, length = q_BhSd.shape[0], q_BhSd.shape[2] * cp

        def plan() -> list[ScoreBlock]:
            ranges = self.ranges(q_BhSd)
            return plan_blocks(
                ranges.chunks[query_rank],
                compact(ranges.of(query_rank, key_rank)) if received else ranges.chunks[key_rank],
                batch=batch,
                window=self.window,
                documents=self.documents,
                device=q_BhSd.device,
                first=key_rank == rank,
            )

        if self.documents is None:
            return plan()
        key = (batch, length, cp, query_rank, key_rank, key_rank == rank, received, self.window, q_BhSd.device)
        if key not in self.documents.plans:
            self.documents.plans[key] = plan()
        blocks: list[ScoreBlock] = self.documents.plans[key]
        return blocks

    def received_blocks(self, q_BhSd: Tensor, step: int) -> list[ScoreBlock]:
        """Return the score blocks of this rank's queries and the keys received in ``step``."""
        _, key_rank = self.ranges(q_BhSd).partners(group_rank(self.group), step)
        return self.blocks(q_BhSd, key_rank, received=True)

    def exchange(self, q_BhSd: Tensor) -> KeyExchange | None:
        """Return the exchange of keys for this rank's queries; None on one rank."""
        return None if self.group is None else KeyExchange(self.ranges(q_BhSd), self.group)

    def begin(self, operation: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ``RankMismatch`` on every rank if the ranks call with different arguments and checks are enabled.

        Then raise ``InputError`` if the sequence cannot be split.
        """
        if self.group is not None and group_size(self.group) > 1:
            placed = self.documents.digest if isinstance(self.documents, PlacedDocuments) else ""
            shapes = ", ".join(str(tuple(t.shape) if not placed else (t.shape[1], t.shape[3])) for t in (q, k, v))
            description = f"{operation} of {shapes} {str(q.dtype).removeprefix('torch.')}, window {self.window}{placed}"
            channel_of(self.group).compare_before_transfer(description, q)
            if not placed:
                chunks_of(q.shape[2] * group_size(self.group), group_size(self.group), group_rank(self.group), "ring")

    def in_flight(self) -> AbortOnError:
        """Return a context manager that reports an exception to the other ranks, which may be in a transfer."""
        return abort_on_error("attention", self.group, in_flight=True)


def ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: ContextSpec) -> Tensor:
    """Return [B, h, S / cp, dv], the attention of this rank's queries to the full sequence. Collective.

    In backward, keys and values are sent once more. The receiver returns their gradients to the owner, which adds them
    in the order of the steps. With zig-zag chunks all ranks have the same work in each step: their own causal part in
    step 0, and half of the rectangle afterwards.
    """
    spec.begin("ring attention", q_BhSd, k_BkSd, v_BkSd)
    with spec.in_flight():
        return _Ring.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


def in_flight_backward(backward: Callable[[Any, Tensor], Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """Return ``backward`` so that it runs in the ``in_flight`` block of its context's ``spec``."""

    def run(ctx: Any, grad: Tensor) -> Gradients:
        with ctx.spec.in_flight():
            return backward(ctx, grad)

    return run


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: ContextSpec) -> Tensor:
        state = AttentionState.empty(q, v.shape[-1])
        with without_autocast(q):
            own = spec.blocks(q, group_rank(spec.group))
            for step, (k_step, v_step) in _key_steps((k, v), spec.exchange(q), "ring attention, keys and values"):
                state.add(q, k_step, v_step, spec.received_blocks(q, step) if step else own, spec.scale)
        out = state.out.to(q.dtype)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    @once_differentiable
    @in_flight_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec: ContextSpec = ctx.spec
        spec.begin("ring attention backward", q, k, v)
        dq, dk, dv = (torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v))
        own, exchange = AttentionGradients(dq, dk, dv), spec.exchange(q)
        first, second = split_own_blocks(spec.blocks(q, group_rank(spec.group)), spec)
        add_returned: Callable[[], None] | None = None
        for step, keys in _key_steps((k, v), exchange, "ring attention backward, keys and values"):
            if not step:
                own.add(grad, (out, lse), (q, k, v), first, spec.scale)
                continue
            assert exchange is not None
            parts = [torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in keys]
            blocks = spec.received_blocks(q, step)
            AttentionGradients(dq, *parts).add(grad, (out, lse), (q, *keys), blocks, spec.scale)
            if add_returned is not None:
                add_returned()
            operation = "ring attention backward, the gradients of keys and values"
            add_returned = exchange.start_gradients(step, parts, (dk, dv), operation)
        own.add(grad, (out, lse), (q, k, v), second, spec.scale)
        if add_returned is not None:
            add_returned()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _key_steps(
    own: tuple[Tensor, Tensor], exchange: KeyExchange | None, operation: str
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield (0, this rank's keys and values), then (step, the received ones) for each step.

    A transfer is started before the keys of the previous step are yielded, so it overlaps with the caller's work.
    """
    ready: tuple[int, Sequence[Tensor]] = 0, own
    for step in exchange.ranges.steps if exchange is not None else ():
        assert exchange is not None
        receive = exchange.start_keys(step, own, operation)
        yield ready
        ready = step, receive()
    yield ready


def query_steps(
    local_tensors: Sequence[Tensor], spec: ContextSpec, operation: str
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, tensors) for each step: this rank's tensors, then those of previous ranks in the ring.

    ``local_tensors`` begin with queries. Ranks at distances at which no query needs keys are left out. The tensors of a
    step are sent on before they are yielded, so the transfer overlaps with the caller's work.
    """
    cp, rank = group_size(spec.group), group_rank(spec.group)
    if cp == 1:
        yield 0, list(local_tensors)
        return
    packed, at = pack(local_tensors), 0
    for distance in (*spec.ranges(local_tensors[0]).distances, None):
        receive = None if distance is None else _send(packed, spec, operation, distance - at)
        yield (rank - at) % cp, unpack(packed, local_tensors)
        if receive is not None and distance is not None:
            packed, at = receive(), distance


def split_own_blocks(blocks: list[ScoreBlock], spec: ContextSpec) -> tuple[list[ScoreBlock], list[ScoreBlock]]:
    """Split a rank's own blocks into two parts, which overlap with the first and the last transfer."""
    if group_size(spec.group) == 1:
        return blocks, []
    cut = len(blocks) // 2
    return blocks[:cut], [replace(block, first=False) for block in blocks[cut:]]


def _send(packed: Tensor, spec: ContextSpec, operation: str, distance: int) -> Callable[[], Tensor]:
    if spec.group is None:
        return lambda: packed
    return channel_of(spec.group).rotate(packed, f"{operation}, {packed.nbytes} bytes", distance)


def token_ring_attention(q_BhSd: Tensor, k_BkSd: Tensor, v_BkSd: Tensor, spec: ContextSpec) -> Tensor:
    """Return the result of ``ring_attention``, from transfers that use both directions of each link. Collective.

    Each rank returns the output for its keys, and the log-sum-exp of the scores, to the owner of the queries. The owner
    merges them in the order of the steps, so the bits do not depend on timing. They differ from the ring's in rounding:
    outputs for one rank's keys are sent in the dtype of the queries. In backward, queries circulate with the output
    gradient and the merged output. Gradients of keys and values stay, and those of queries are returned.

    Elements per token and step on the busier direction of a link, for h heads, k key and value heads and equal widths
    d: forward h d instead of 2 k d for the ring, backward 3 h d instead of 2 k d + 4 k d (gradients are sent in fp32;
    16-bit activations). So it is faster if k is close to h and links are full-duplex.
    """
    spec.begin("token ring attention", q_BhSd, k_BkSd, v_BkSd)
    with spec.in_flight():
        return _TokenRing.apply(q_BhSd, k_BkSd, v_BkSd, spec)  # type: ignore[no-any-return]


class _TokenRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: ContextSpec) -> Tensor:
        rank = group_rank(spec.group)
        first, second = split_own_blocks(spec.blocks(q, rank), spec)
        state = AttentionState.no_keys(q, v.shape[-1])
        results = _ResultReturn(
            spec, "token ring attention, outputs", lambda received: state.merge(received[1], received[0])
        )
        with without_autocast(q):
            for query_rank, (q_step,) in query_steps([q], spec, "token ring attention, queries"):
                if query_rank == rank:
                    state.add(q, k, v, first, spec.scale)
                    continue
                part = AttentionState.no_keys(q, v.shape[-1])
                part.add(q_step, k, v, spec.blocks(q, rank, query_rank), spec.scale)
                results.send(query_rank, [part.lse, part.out.to(q.dtype)])
            state.add(q, k, v, second, spec.scale)
            results.wait()
        out = state.out.to(q.dtype)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, state.lse)
        return out

    @staticmethod
    @once_differentiable
    @in_flight_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec: ContextSpec = ctx.spec
        spec.begin("token ring attention backward", q, k, v)
        rank = group_rank(spec.group)
        first, second = split_own_blocks(spec.blocks(q, rank), spec)
        dq, dk, dv = (torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (q, k, v))
        results = _ResultReturn(
            spec, "token ring attention backward, gradients of queries", lambda received: dq.add_(received[0])
        )
        local_tensors = [q, lse, grad.to(q.dtype), out]
        for query_rank, (q_step, lse_step, grad_step, out_step) in query_steps(
            local_tensors, spec, "token ring attention backward, queries"
        ):
            if query_rank == rank:
                AttentionGradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), first, spec.scale)
                continue
            part = torch.zeros_like(dq)
            blocks = spec.blocks(q, rank, query_rank)
            AttentionGradients(part, dk, dv).add(grad_step, (out_step, lse_step), (q_step, k, v), blocks, spec.scale)
            results.send(query_rank, [part])
        AttentionGradients(dq, dk, dv).add(grad, (out, lse), (q, k, v), second, spec.scale)
        results.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _ResultReturn:
    """Returns results to the owners of queries, one per step; passes received results to ``consume`` in order."""

    def __init__(self, spec: ContextSpec, operation: str, consume: Callable[[list[Tensor]], object]) -> None:
        self._spec, self._operation, self._consume = spec, operation, consume
        self._pending: Callable[[], list[Tensor]] | None = None

    def send(self, query_rank: int, tensors: list[Tensor]) -> None:
        """Start to send this step's results to the owner of the queries."""
        self.wait()
        assert self._spec.group is not None
        distance = group_rank(self._spec.group) - query_rank
        packed = pack(tensors)
        description = f"{self._operation}, {packed.nbytes} bytes"
        receive = channel_of(self._spec.group).rotate(packed, description, -distance)
        self._pending = lambda: unpack(receive(), tensors)

    def wait(self) -> None:
        """Wait for the pending results for this rank's queries, and consume them."""
        if self._pending is not None:
            self._consume(self._pending())
            self._pending = None


def check_heads(heads: int, cp: int, context: Context) -> None:
    """Raise ConfigError unless this form over cp ranks supports the ``heads`` of a rank."""
    check_context(context)
    if context == "ulysses" and heads % cp:
        raise ConfigError(
            f"ulysses splits heads over the ranks: cp {cp} does not divide the {heads} heads of a rank; "
            'use context "ring" or "token_ring", which support any number of heads'
        )


def context_attention(q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, spec: ContextSpec) -> Tensor:
    """Return [B, S / cp, h, dv], the causal attention of this rank's queries to the full sequence. Collective.

    Args:
        q_BShd: [B, S / cp, h, d] in the layout of ``sequence``.
        k_BSkd: [B, S / cp, k, d], h a multiple of k.
        v_BSkd: [B, S / cp, k, dv].
        spec: with a context that ``check_heads`` accepts for these heads.
    """
    cp = group_size(spec.group)
    if isinstance(spec.documents, PlacedDocuments):
        with abort_on_error("attention", spec.group):  # only some ranks may have other tokens than placed
            check_placed(spec, q_BShd)
    else:
        check_documents(spec.documents, q_BShd.shape[0], q_BShd.shape[1] * cp)
    if cp == 1:
        return local_attention(q_BShd, k_BSkd, v_BSkd, spec)
    if spec.context != "ulysses":
        q, k, v = (t.transpose(1, 2) for t in (q_BShd, k_BSkd, v_BSkd))
        attend = ring_attention if spec.context == "ring" else token_ring_attention
        return attend(q, k, v, spec).transpose(1, 2)
    q, k, v = to_heads(q_BShd, k_BSkd, v_BSkd, spec.group)
    return swap_dims(local_attention(q, k, v, spec), spec.group, 1, 2)


def local_attention(q_BShd: Tensor, k_BSkd: Tensor, v_BSkd: Tensor, spec: ContextSpec) -> Tensor:
    """Return the causal attention [B, S, h, dv] of a full sequence on this rank, without an S x S mask."""
    q, k, v = (t.transpose(1, 2) for t in (q_BShd, k_BSkd, v_BSkd))
    if spec.documents is not None or (spec.window is not None and spec.window < q.shape[2]):
        return ring_attention(q, k, v, replace(spec, group=None)).transpose(1, 2)
    scale = spec.scale
    heads, width = k.shape[1], v.shape[-1]
    if q.device.type == "cuda" and q.dtype == torch.float32 and heads != q.shape[1]:
        # Only the flash kernel supports grouped heads without an S x S matrix, and it needs 16-bit floats.
        k, v = (t.repeat_interleave(q.shape[1] // heads, 1) for t in (k, v))
    if q.device.type == "cpu" and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # the CPU's flash kernel needs equal widths
    grouped = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[..., :width].transpose(1, 2)


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return [B, S, heads / cp, d] of each of q, k and v [B, S / cp, heads, d], in one all-to-all.

    If there are fewer key and value heads than ranks, they are repeated first, so that their gradients are summed.
    """
    cp = group_size(group)
    repeats = head_repeats(k.shape[2], cp)
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
    # For each destination, concatenate its heads of q, k and v.
    parts = [t.unflatten(2, (cp, -1)).flatten(3) for t in (q, k, v)]
    packed = swap_dims(torch.cat(parts, -1), group, 2, 1)
    split = packed.squeeze(2).split([part.shape[-1] for part in parts], -1)
    q, k, v = (part.unflatten(-1, (-1, t.shape[-1])) for part, t in zip(split, (q, k, v), strict=True))
    return q, k, v


def head_repeats(kv_heads: int, cp: int) -> int:
    """Return the number of ulysses ranks that receive each key and value head."""
    # Repeat to the least common multiple, which divides the number of query heads.
    return cp // math.gcd(kv_heads, cp)


# --- ulysses, overlapped with the projections ---


def project_to_heads(x_BSD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """Map [B, S / cp, D] to this rank's outputs of ``F.linear`` for all tokens, [B, S, N / cp]. See ``matmul_swap``.

    Args:
        weight_ND: outputs are ordered by the rank that receives them.
    """
    y_TN = matmul_swap(recomputed(_rows, x_BSD), cast_parameter(weight_ND, x_BSD), group, overlap)
    return y_TN.view(-1, x_BSD.shape[0], y_TN.shape[1]).transpose(0, 1)


def project_from_heads(x_BSK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
    """Map [B, S, K / cp] to ``F.linear`` of all inputs for this rank's tokens, [B, S / cp, N]. See ``swap_matmul``."""
    check_cut(x_BSK, 1, group)
    y_TN = swap_matmul(_rows(x_BSK), cast_parameter(weight_NK, x_BSK), group, overlap)
    return y_TN.view(-1, x_BSK.shape[0], y_TN.shape[1]).transpose(0, 1)


def _rows(x_BSD: Tensor) -> Tensor:
    """Return x as [S * B, D] in the compute dtype, ordered by token, so that each rank holds contiguous rows."""
    return x_BSD.to(compute_dtype(x_BSD)).transpose(0, 1).reshape(-1, x_BSD.shape[-1])


def check_documents(documents: Documents | None, batch: int, length: int) -> None:
    """Raise InputError unless ``documents`` describe ``batch`` sequences of ``length`` tokens."""
    full = (batch, length)
    if documents is not None and tuple(documents.ids_BS.shape) != full:
        raise InputError(
            f"documents have shape {tuple(documents.ids_BS.shape)}, but the full sequences have shape {full}; "
            "make them with Documents.of over the context-parallel group"
        )


def check_placed(spec: ContextSpec, q_BShd: Tensor) -> None:
    """Raise InputError unless the documents of ``spec`` are placed on its ranks, with this rank's tokens in q."""
    documents, cp, rank = spec.documents, group_size(spec.group), group_rank(spec.group)
    assert isinstance(documents, PlacedDocuments)
    if spec.context != "ring" and cp > 1:
        raise InputError(f'documents can be placed on single ranks with context "ring" only; got {spec.context!r}')
    tokens = [sum(chunk.size for chunk in chunks) for chunks in documents.chunks]
    if len(tokens) != cp or tuple(q_BShd.shape[:2]) != (1, tokens[rank]):
        raise InputError(
            f"documents are placed on {len(tokens)} ranks with {tokens} tokens, but rank {rank} of {cp} has "
            f"{tuple(q_BShd.shape[:2])}"
        )
