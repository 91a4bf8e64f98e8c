"""The typed seam between layers and the ways to move rows.

    x_TD, ids_TK ──dispatch──▶ rows_RD (this rank's experts, expert-major) ──experts──▶ rows_RD ──combine──▶ y_TD

A backend provides three primitives without autograd; ``dispatch/autograd.py`` joins them:

    _send    dispatch forward:  each routed row to its place at the owner of its expert
    _sum     combine forward (weighted) and dispatch backward (unweighted): K rows of a token, in slot order
    _spread  combine backward: a token's gradient, times its weight, back to the K places; and the weights' gradient
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError  # no public name

from moe_comm.comm.header import DTYPES, GroupCalls, Header
from moe_comm.comm.meeting import communicator_of
from moe_comm.dispatch.checksums import Damage
from moe_comm.dispatch.payload import AS_THEY_ARE, Payloads
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.errors import (
    ConfigError,
    InputError,
    MoeCommError,
    PeerRaised,
    RoutingError,
    known_to_peers,
    mark_known,
)
from moe_comm.topology import ExpertPlacement

MESSAGE_CHARS = 160
"""Of an exception's text, what other ranks are told: it travels in a header."""
DROPPED = -1
"""Expert id of a slot that goes to no expert and adds nothing to the output."""
INVALID_LOGITS = -2
"""Expert id by which a router marks a token whose logits are NaN or all -Inf; dispatch raises on every rank."""


@dataclass(frozen=True)
class DispatchOptions:
    """How operations wait and check.

    timeout_s: seconds to wait for a peer that lives but does not arrive before ``PeerTimeout``.
    deterministic: the bits of the results do not depend on the number of ranks; False allows a backend to
        sum partial results in another order where that moves fewer bytes.
    checked: compare headers before every operation; where False, only in dispatch.
    payloads: what rows look like while they travel, by direction; rounding is the same with every backend, so that
        bits still do not depend on the number of ranks. Only backends that send rows move fewer bytes:
        ``local`` and ``shared_memory`` read rows where they lie.
    peer_to_peer: what only that backend has.
    checksums: compare the rows that dispatch brings with what was sent; see ``checksums.py``. Costs a pass over tokens
        and rows, and an exchange of 16 bytes an expert.
    """

    timeout_s: float = 300.0
    deterministic: bool = True
    checked: bool = True
    payloads: Payloads = AS_THEY_ARE
    peer_to_peer: PeerToPeerOptions = field(default_factory=PeerToPeerOptions)
    checksums: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a positive, finite number of seconds; got {self.timeout_s}")
        if not isinstance(self.payloads, Payloads):
            raise ConfigError(f"payloads must be a Payloads, a choice for each direction; got {self.payloads!r}")
        if self.deterministic and not self.payloads.invariant:
            raise ConfigError(
                "with fp8 scales per group of rows the bits depend on the number of ranks; use fp8_block for "
                "gradients, or DispatchOptions(deterministic=False)"
            )


@dataclass(frozen=True)
class Layout:
    """Where one dispatch put the rows; ``combine`` and both backward passes need it.

    rows_per_expert: rows of each local expert, in order of expert id; they stand one after another in rows_RD.
    num_dropped: slots of this rank's tokens with id -1.
    state: private to the backend that made the layout.
    call: number of the dispatch call, by which ranks notice that they combine different ones.
    maker: which of this process's dispatchers made it; ``combine`` of any other one raises.
    """

    num_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    rows_per_expert: tuple[int, ...]
    num_rows: int
    num_dropped: int
    label: str
    state: Any = field(repr=False)
    call: int = 0
    maker: int = 0


@dataclass(frozen=True)
class Dispatched:
    """``rows_RD``: the rows for this rank's experts, by (expert, source rank, token, slot)."""

    rows_RD: Tensor
    layout: Layout


_makers = count(1)


class Dispatcher(ABC):
    """Moves token rows to the ranks that hold their experts, and the results back. Differentiable.

    Attributes:
        damage: of rows that arrived, with ``DispatchOptions.checksums``.
        comm: what this process keeps for the group; None without one. calls: numbers of the group's operations.
        maker: a number that no other dispatcher of this process has.
    """

    name: ClassVar[str]
    packs: ClassVar[bool] = False
    """Whether it moves rows as their payload; else it is given rows that are rounded as the payload would."""

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None = None,
        rank: int = 0,
        options: DispatchOptions | None = None,
    ) -> None:
        self.placement = placement
        self.comm = None if group is None else communicator_of(group, (options or DispatchOptions()).timeout_s)
        self.rank = rank
        self.world = placement.world
        self.options = options or DispatchOptions()
        self.damage = Damage()
        self.calls = GroupCalls() if self.comm is None else self.comm.calls
        if self.comm is not None:
            self.comm.users.add(self)
        self._ordinal = self.calls.add_dispatcher()
        self.maker = next(_makers)

    @property
    def group(self) -> ProcessGroup | None:
        """The expert-parallel process group; None where this process holds all experts.

        Raises:
            ConfigError: it has been destroyed.
        """
        return None if self.comm is None else self.comm.group

    @property
    def num_calls(self) -> int:
        """How many operations this dispatcher has begun."""
        return self.calls.last(self._ordinal)

    @cached_property
    def num_experts(self) -> int:
        return self.placement.num_experts

    @cached_property
    def local_experts(self) -> range:
        """Global ids of this rank's experts."""
        return self.placement.local_range(self.rank)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, *, label: str = "") -> Dispatched:
        """Send each token's row to the owners of its K experts.

        Args:
            x_TD: [T, D] fp32, bf16 or fp16; any strides; T may be zero and may differ between ranks.
            ids_TK: [T, K] int32 or int64 global expert ids; -1 drops the slot.
            label: name of the layer, for error messages.

        Returns:
            Rows of this rank's experts, and the layout that ``combine`` needs.

        Raises:
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
            CorruptPayload: on every rank, of the rows of an earlier dispatch, with ``DispatchOptions.checksums``.
        """
        from moe_comm.dispatch.autograd import dispatch

        return dispatch(self, x_TD, ids_TK, label)

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, layout: Layout) -> Tensor:
        """Bring each token's K results back and sum them, weighted, in fp32 and in slot order.

        Args:
            rows_RD: [R, D] the experts' output, rows as ``dispatch`` gave them. Read in place by the peers if it
                comes from ``empty_rows``, else copied there first.
            weights_TK: [T, K] routing weights.
            layout: what ``dispatch`` returned.

        Returns:
            y_TD: [T, D] in the dtype of ``rows_RD``.

        Raises:
            CorruptPayload: as ``dispatch``, if operations are checked.
        """
        from moe_comm.dispatch.autograd import combine

        return combine(self, rows_RD, weights_TK, layout)

    def empty_rows(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised [num_rows, width] storage of the kind this backend reads and writes fastest."""
        return torch.empty(num_rows, width, dtype=dtype, device=device)

    def own_rows(self, layout: Layout, leaving: int) -> int | None:
        """How many of the ``leaving`` rows of an operation are for this rank itself; None: rows go another way than
        straight from rank to rank, and what moves them counts them."""
        return None

    def close(self) -> None:  # noqa: B027 - most backends hold nothing beyond their group
        """Give back what this dispatcher holds. Collective; calling it twice is allowed."""

    def release(self) -> None:  # noqa: B027
        """Let go of what belongs to the group, which is destroyed. Not collective."""

    def refuse(self, fault: MoeCommError, x: Tensor, *, label: str = "") -> NoReturn:
        """Meet the other ranks' dispatch with an error of this rank's own, found before it could call: all raise it.

        Args:
            x: any tensor of the dtype and on the device of the rows that would have been sent.
        """
        header = Header(
            "dispatch",
            self.calls.next(self._ordinal),
            0,
            x.dtype,
            1,
            self.num_experts,
            False,
            label,
            fault,
            ordinal=self._ordinal,
            calls=self.calls,
        )
        self._send(x.new_empty(0, 0), x.new_empty(0, 1, dtype=torch.int64), header)
        raise fault

    def abort(self, error: Exception, *, label: str = "", in_flight: bool = False) -> None:
        """Tell the other ranks that this rank raised ``error`` between two operations, instead of its next one.

        Every rank then raises: this one ``error``, which the caller raises again, and the others ``PeerRaised`` from
        the operation that they are in, or that they call next. It must be one of a dispatcher of this group. This call
        waits for it, at most ``DispatchOptions.timeout_s``. Afterwards the group can be used again: the ranks agree on
        the number of calls. It does nothing if the other ranks raise already, because ``error`` came from an operation.

        Where ranks do not meet in the next operation, because rows are in flight or because nothing is ``checked``, the
        others raise ``PeerError`` where they wait, and the group is unusable afterwards.

        Args:
            label: name of the layer, for the other ranks' message.
            in_flight: rows of an operation that has begun are still in transfer.
        """
        if self.world == 1 or known_to_peers(error):
            return
        mark_known(error)
        where = f" in layer {label!r}" if label else ""
        text = " ".join(str(error).split())[:MESSAGE_CHARS]
        text = f"raised {type(error).__name__}{where} instead of its next operation: {text}"
        if in_flight or not self.handshakes:
            self._leave_behind(f"rank {self.rank} {text}")
            return
        with suppress(MoeCommError):
            self.refuse(PeerRaised(text), torch.empty(0), label=label)

    @contextmanager
    def abort_on_error(self, label: str = "", *, in_flight: bool = False) -> Iterator[None]:
        """Call ``abort`` for an exception that leaves the ``with`` block. The block is the code between two operations:
        the experts, or the call of ``backward``."""
        try:
            yield
        except _StopRecomputationError:  # how activation checkpointing ends a forward pass early
            raise
        except Exception as error:
            self.abort(error, label=label, in_flight=in_flight)
            raise

    @property
    def handshakes(self) -> bool:
        """Whether every operation compares headers between ranks, and not only dispatch."""
        return self.options.checked

    def _leave_behind(self, text: str) -> None:  # noqa: B027 - only what waits for torch.distributed has others to tell
        """Tell the other ranks that this one does not go on, where they cannot meet it."""

    # --- for autograd.py and the backends ---

    def header(self, op: str, layout: Layout, requires_grad: bool) -> Header:
        """The next handshake for ``op`` on rows laid out by ``layout``."""
        return Header(
            op,
            self.calls.next(self._ordinal),
            layout.hidden,
            layout.dtype,
            layout.top_k,
            self.num_experts,
            requires_grad,
            layout.label,
            of_call=layout.call,
            ordinal=self._ordinal,
            calls=self.calls,
        )

    def dispatch_header(self, x_TD: Tensor, ids_TK: Tensor, label: str) -> Header:
        """The handshake of a dispatch; holds the fault if the input is bad."""
        fault = self._fault(x_TD, ids_TK) or self.damage.fault()
        return Header(
            "dispatch",
            self.calls.next(self._ordinal),
            x_TD.shape[-1] if x_TD.dim() else 0,
            x_TD.dtype,
            ids_TK.shape[-1] if ids_TK.dim() else 0,
            self.num_experts,
            torch.is_grad_enabled() and x_TD.requires_grad,
            label,
            fault,
            ordinal=self._ordinal,
            maker=self.maker,
            calls=self.calls,
        )

    def _fault(self, x_TD: Tensor, ids_TK: Tensor) -> MoeCommError | None:
        if x_TD.dim() != 2 or ids_TK.dim() != 2 or x_TD.shape[0] != ids_TK.shape[0]:
            return InputError(
                f"dispatch needs x [T, D] and ids [T, K]; got {tuple(x_TD.shape)} and {tuple(ids_TK.shape)}"
            )
        if x_TD.dtype not in DTYPES:
            return InputError(f"rows must be float32, bfloat16, float16 or float64; got {x_TD.dtype}")
        if ids_TK.dtype not in (torch.int64, torch.int32):
            return InputError(f"expert ids must be int64 or int32; got {ids_TK.dtype}")
        if x_TD.device != ids_TK.device:
            return InputError(f"x is on {x_TD.device} but the expert ids are on {ids_TK.device}")
        if ids_TK.shape[1] < 1:
            return InputError("top-k must be at least 1; got ids of width 0")
        return self._routing_fault(ids_TK)

    def _routing_fault(self, ids_TK: Tensor) -> RoutingError | None:
        """Ids out of range. Backends that count in native code override this and check while counting."""
        if not ids_TK.numel():
            return None
        low, high = (int(v) for v in torch.aminmax(ids_TK))
        if low >= DROPPED and high < self.num_experts:
            return None
        return routing_error(ids_TK, self.num_experts)

    @abstractmethod
    def _send(self, x_TD: Tensor, ids_TK: Tensor, header: Header) -> tuple[Tensor, Layout]: ...

    @abstractmethod
    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, layout: Layout, header: Header) -> Tensor: ...

    @abstractmethod
    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, layout: Layout, header: Header
    ) -> tuple[Tensor, Tensor | None]:
        """``rows_RD`` None: the weights need no gradient."""


def routing_error(ids_TK: Tensor, num_experts: int) -> RoutingError:
    """The error for the first bad id of ``ids_TK``."""
    bad = ((ids_TK < DROPPED) | (ids_TK >= num_experts)).nonzero()
    token, slot = (int(v) for v in bad[0])
    value = int(ids_TK[token, slot])
    if value == INVALID_LOGITS:
        return RoutingError(
            f"router logits of token {token} are NaN or all -Inf (first of {len(bad[:, 0].unique())} such tokens)"
        )
    return RoutingError(
        f"expert id {value} of token {token}, slot {slot} is outside 0..{num_experts - 1} (-1 drops a slot); "
        f"{len(bad)} bad ids"
    )


def peers_routing_error(rank: int, bad: int, first: int, value: int, top_k: int, num_experts: int) -> RoutingError:
    """The error for the ids of another rank, of which it told how many are bad, and slot and value of the first."""
    token, slot = divmod(first, top_k)
    if value == INVALID_LOGITS:
        return RoutingError(f"rank {rank}: router logits of token {token} are NaN or all -Inf")
    return RoutingError(
        f"rank {rank}: expert id {value} of token {token}, slot {slot} is outside 0..{num_experts - 1} "
        f"(-1 drops a slot); {bad} bad ids"
    )


__all__ = [
    "DROPPED",
    "INVALID_LOGITS",
    "DispatchOptions",
    "Dispatched",
    "Dispatcher",
    "Layout",
    "peers_routing_error",
    "routing_error",
]
