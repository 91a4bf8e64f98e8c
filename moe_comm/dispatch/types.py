"""Options and results of dispatch, and the errors for invalid expert ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor

from moe_comm.dispatch.wire_dtype import UNCHANGED, WireDtypes
from moe_comm.errors import ConfigError, RoutingError
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.runtime.seconds import seconds_of
from moe_comm.topology.balance import Balance

OnDevice = Literal["", "rows", "tokens"]
"""What experts can be computed from without row counts on the CPU: nothing, dispatched rows, or also the tokens."""
DROPPED = -1
"""Expert id of a dropped slot. A slot is one of the K (token, expert) pairs of a token; a dropped one adds nothing."""
INVALID_LOGITS = -2
"""Expert id that a router assigns to a token whose logits are NaN or all -Inf. Dispatch then raises on every rank."""


@dataclass(frozen=True)
class PeerToPeerOptions:
    """Options of ``peer_to_peer``.

    Args:
        heap_bytes: size of each rank's device memory for dispatched rows, expert outputs and gradients that exist at
            the same time. ``gpu.heap.heap_bytes`` computes it. None: 2 GiB on CUDA, 16 MiB if emulated.
        num_blocks: maximum number of thread blocks of the kernels that move rows; None: two per multiprocessor. A
            smaller number, such as 16, leaves multiprocessors to other kernels. Does not change results.
        relay: send a token's row once to each rank and copy it there, instead of once to each of its experts.
        capacity_rows: number of rows for which ``dispatch_fixed`` and layers have room on each rank. With it, a layer
            with 16-bit experts keeps the counts on the GPU, and the host does not wait for them. A layer's call that
            sends a rank more rows raises ``HeapError`` on every rank. T tokens on each of W ranks send T * K rows to a
            rank on average, and at most W * T * min(K, experts of the rank), or f * T * K with ``Balance(memory=f)``.
            "memory": this last bound, where T is the largest number of tokens of a rank in the first call of a layer
            that lends experts; a later call with more is a fault on every rank, as one that sends more rows.
        own_stream: run operations on a separate stream, which the caller's stream waits for.
        emulate: take CPU tensors and run the same kernels on the CPU. For tests: it is slow.
        bulk_copies: dispatch copies rows with cp.async.bulk, which needs few multiprocessors. Only on GPUs that have it
            (sm_90 and newer), and not for rows that the kernel encodes as fp8. Does not change results.
        fast_combine: each rank adds its rows of a token before they move, so combine moves one row per token and rank
            instead of one per slot. These partial sums are rounded to the row dtype. The output differs in rounding
            from that of other backends and depends on the placement of experts, so this needs
            ``DispatchOptions(deterministic=False)``. Gradients are computed as without this option. The heap needs room
            for a copy of the experts' outputs, and 16 bytes per row.
    """

    heap_bytes: int | None = None
    num_blocks: int | None = None
    relay: bool = False
    capacity_rows: int | Literal["memory"] | None = None
    own_stream: bool = False
    emulate: bool = False
    bulk_copies: bool = False
    fast_combine: bool = False

    def __post_init__(self) -> None:
        for name in ("heap_bytes", "num_blocks", "capacity_rows"):
            value = getattr(self, name)
            bound = "memory" if name == "capacity_rows" else None
            if value not in (None, bound) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                or_bound = "" if bound is None else f", {bound!r}"
                raise ConfigError(
                    f"PeerToPeerOptions.{name} must be a positive integer{or_bound} or None; got {value!r}"
                )


@dataclass(frozen=True)
class DispatchOptions:
    """Options of a dispatcher.

    Args:
        timeout_s: seconds to wait for a live peer before ``PeerTimeout`` is raised.
        deterministic: make the bits of the results independent of the number of ranks. False allows a backend to sum
            partial results in another order if that moves fewer bytes.
        checked: compare headers between ranks before every operation. False compares them only in dispatch.
        wire_dtypes: format of rows in transfer, by direction. All backends round in the same way, so results stay
            independent of the number of ranks. ``local`` and ``shared_memory`` read rows in place, so a wire dtype does
            not reduce the bytes that they move.
        peer_to_peer: options of the ``peer_to_peer`` backend.
        checksums: compare dispatched rows with checksums from the sender; see ``checksums.py``. Costs one pass over
            tokens and rows, and an exchange of 16 bytes per expert.
        balance: layers lend experts to other ranks in passes in which their homes have too many rows; see ``Balance``.
            It has not run on a GPU. None: never.
    """

    timeout_s: float = 300.0
    deterministic: bool = True
    checked: bool = True
    wire_dtypes: WireDtypes = UNCHANGED
    peer_to_peer: PeerToPeerOptions = field(default_factory=PeerToPeerOptions)
    checksums: bool = False
    balance: Balance | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout_s", seconds_of("timeout_s", self.timeout_s))
        if not isinstance(self.wire_dtypes, WireDtypes):
            raise ConfigError(f"wire_dtypes must be a WireDtypes; got {self.wire_dtypes!r}")
        if self.peer_to_peer.capacity_rows == "memory" and (self.balance is None or self.balance.memory is None):
            raise ConfigError(
                'capacity_rows="memory" needs DispatchOptions(balance=Balance(memory=...)), which limits the rows of a '
                "rank; or give a number of rows"
            )
        if self.balance is not None and not self.deterministic:
            raise ConfigError("balance keeps the bits of results, so it needs DispatchOptions(deterministic=True)")
        if self.deterministic and not self.wire_dtypes.invariant:
            raise ConfigError(
                "with fp8 scales per group of rows the results depend on the number of ranks; use fp8_block for "
                "gradients, or DispatchOptions(deterministic=False)"
            )


class DeviceCounts(Sequence[int]):
    """Row counts of experts, which are copied from the device when they are read.

    Attributes:
        on_device: [E] int64.
    """

    def __init__(self, on_device: Tensor, check: Callable[[], None], dropped: Callable[[], int]) -> None:
        self.on_device, self._check, self._dropped = on_device, check, dropped
        self._known: list[int] | None = None

    def __len__(self) -> int:
        return self.on_device.shape[0]

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._read()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    @property
    def dropped(self) -> int:
        """Number of dropped slots."""
        self._read()
        return self._dropped()

    def _read(self) -> list[int]:
        if self._known is None:
            self._known = self.on_device.tolist()
            self._check()
        return self._known


@dataclass(slots=True, eq=False)  # created in every dispatch; a frozen dataclass takes longer to construct
class DispatchHandle:
    """Describes the rows of one dispatch. ``combine`` and both backward passes take it. Do not modify it.

    Attributes:
        num_tokens, top_k, hidden: sizes T, K and D of the dispatched tokens.
        dtype, device: of the rows.
        rows_per_expert: number of rows of each local expert, in order of expert id. ``rows_RD`` has them in this order.
            ``DeviceCounts`` if the host does not know them.
        num_rows: sum of ``rows_per_expert``; the room for rows if these are ``DeviceCounts``.
        num_dropped: number of this rank's slots with id -1.
        num_own: number of this rank's slots whose rows stay on this rank. None if rows are relayed or gathered: the
            inner collectives record their bytes.
        label: name of the layer, for error messages.
        state: private to the backend.
        call: sequence number of the dispatch. Ranks compare it in ``combine``.
        maker: id of the dispatcher that created the handle. ``combine`` of any other dispatcher raises.
        extra: of a dispatch with extra values; None without. Private to the backend.
        in_place: whether experts read the tokens in place.
    """

    num_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    rows_per_expert: tuple[int, ...]
    num_rows: int
    num_dropped: int
    num_own: int | None
    label: str
    state: Any = field(repr=False)
    call: int = 0
    maker: int = 0
    extra: ExtraRoutes | None = field(default=None, repr=False)
    in_place: bool = False


@dataclass(slots=True, eq=False)
class ExtraRoutes:
    """The routes of extra values.

    Attributes:
        width: number of values of each slot.
        ids_N1: expert ids of the slots, for backends that send the values in a dispatch in which a slot is a token.
        slots: handle of the last of these dispatches.
    """

    width: int
    ids_N1: Tensor
    slots: DispatchHandle | None = None


@dataclass(slots=True, eq=False)
class Dispatched:
    """Result of a dispatch.

    Attributes:
        rows_RD: [R, D] rows of this rank's experts, ordered by (expert, source rank, token, slot). After a dispatch
            with ``scaled``, it has shape, dtype and autograd history of the rows, but no memory: every element is NaN.
            Experts read ``scaled`` and return the gradient of the rows as the gradient of ``rows_RD``.
        handle: argument of ``combine``.
        scaled: the same rows as e4m3 values and fp32 scales, without autograd; None without ``scaled``.
        extra_RX: [R, X] the extra values of each row; None without them.
    """

    rows_RD: Tensor
    handle: DispatchHandle
    scaled: ScaledRows | None = None
    extra_RX: Tensor | None = None


def routing_error(ids_TK: Tensor, num_experts: int) -> RoutingError:
    """Return the error for the first invalid id of ``ids_TK``."""
    bad = ((ids_TK < DROPPED) | (ids_TK >= num_experts)).nonzero()
    token, slot = (int(v) for v in bad[0])
    return RoutingError(_routing_text(int(ids_TK[token, slot]), token, slot, len(bad), num_experts))


def peers_routing_error(rank: int, bad: int, first: int, value: int, top_k: int, num_experts: int) -> RoutingError:
    """Return the error for ``bad`` invalid ids of another rank; the first one is ``value`` in flat slot ``first``."""
    return RoutingError(f"rank {rank}: {_routing_text(value, *divmod(first, top_k), bad, num_experts)}")


def earlier_routing_error(bad: int, first: int, value: int, top_k: int, num_experts: int) -> RoutingError:
    """Return the error of an earlier call with ``bad`` invalid ids; the first is ``value`` in flat slot ``first``."""
    text = _routing_text(value, *divmod(first, top_k), bad, num_experts)
    return RoutingError(f"in an earlier call, whose results for these tokens are NaN: {text}")


def _routing_text(value: int, token: int, slot: int, bad: int, num_experts: int) -> str:
    if value == INVALID_LOGITS:
        return f"router logits of token {token} are NaN or all -Inf"
    return (
        f"expert id {value} of token {token}, slot {slot} is outside 0..{num_experts - 1} (-1 drops a slot); "
        f"{bad} bad ids"
    )
