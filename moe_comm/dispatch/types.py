"""What dispatch takes and gives: options, the layout of rows, and the errors of bad expert ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_comm.deprecated import renamed_attributes, renamed_fields
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.wire_dtype import AS_THEY_ARE, WireDtypes
from moe_comm.errors import ConfigError, RoutingError

DROPPED = -1
"""Expert id of a slot that goes to no expert and adds nothing to the output."""
INVALID_LOGITS = -2
"""Expert id by which a router marks a token whose logits are NaN or all -Inf; dispatch raises on every rank."""


@renamed_fields(payloads="wire_dtypes")
@dataclass(frozen=True)
class DispatchOptions:
    """How operations wait and check.

    timeout_s: seconds to wait for a peer that lives but does not arrive before ``PeerTimeout``.
    deterministic: the bits of the results do not depend on the number of ranks; False allows a backend to
        sum partial results in another order where that moves fewer bytes.
    checked: compare headers before every operation; where False, only in dispatch.
    wire_dtypes: what rows look like while they travel, by direction; rounding is the same with every backend, so that
        bits still do not depend on the number of ranks. Only backends that send rows move fewer bytes:
        ``local`` and ``shared_memory`` read rows where they lie.
    peer_to_peer: what only that backend has.
    checksums: compare the rows that dispatch brings with what was sent; see ``checksums.py``. Costs a pass over tokens
        and rows, and an exchange of 16 bytes an expert.
    """

    timeout_s: float = 300.0
    deterministic: bool = True
    checked: bool = True
    wire_dtypes: WireDtypes = AS_THEY_ARE
    peer_to_peer: PeerToPeerOptions = field(default_factory=PeerToPeerOptions)
    checksums: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a positive, finite number of seconds; got {self.timeout_s}")
        if not isinstance(self.wire_dtypes, WireDtypes):
            raise ConfigError(
                f"wire_dtypes must be a WireDtypes, a choice for each direction; got {self.wire_dtypes!r}"
            )
        if self.deterministic and not self.wire_dtypes.invariant:
            raise ConfigError(
                "with fp8 scales per group of rows the bits depend on the number of ranks; use fp8_block for "
                "gradients, or DispatchOptions(deterministic=False)"
            )


@dataclass(slots=True, eq=False)  # one is made for every dispatch: a frozen one takes longer to make
class DispatchHandle:
    """Where one dispatch put the rows; ``combine`` and both backward passes need it. Nothing changes it.

    rows_per_expert: rows of each local expert, in order of expert id; they stand one after another in rows_RD.
    num_dropped: slots of this rank's tokens with id -1.
    state: private to the backend that made the handle.
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


@renamed_attributes(layout="handle")
@dataclass(slots=True, eq=False)
class Dispatched:
    """``rows_RD``: the rows for this rank's experts, by (expert, source rank, token, slot)."""

    rows_RD: Tensor
    handle: DispatchHandle


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
