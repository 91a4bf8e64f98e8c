"""Index arithmetic of ``hierarchical``: which rank relays what, in which order, and how many bytes cross between hosts.

Rank h * L + l is rank l of host h. A token of rank (g, l) with experts on host h goes to rank (h, l), once, and from
there to the ranks of those experts; so the L ranks of a host share its link evenly, and every rank talks to one rank on
each other host: its rail.

    2 hosts x 2 ranks       host 0            host 1
                            rank 0 ◀───────▶ rank 2       rail 0
                            rank 1 ◀───────▶ rank 3       rail 1

Copies leave ordered by (host, token), slots by (host, token, slot); so they arrive at a relay by (source host, token,
slot), and come to an expert's rank by (expert, relay l, source host g, token, slot); those of its own host and those of
the others one after the other. The order that every dispatcher gives is (expert, source rank, token, slot), and source
rank is g * L + l: within an expert the L x H blocks of rows are transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Literal

import torch
from torch import Tensor

from moe_comm.dispatch import plain
from moe_comm.dispatch.group_scales import GROUP
from moe_comm.dispatch.handshake import Words
from moe_comm.dispatch.wire_dtype import AS_THEY_ARE, WireDtype, WireDtypes, bytes_per_row
from moe_comm.errors import ConfigError
from moe_comm.kernels.wide import wide_dtype
from moe_comm.topology import ExpertPlacement

OPS = ("dispatch", "combine", "combine backward", "dispatch backward")


@dataclass(frozen=True)
class HostMap:
    """``count`` hosts of ``per_host`` ranks each, numbered host by host."""

    count: int
    per_host: int

    @classmethod
    def of(cls, hosts: Sequence[int]) -> HostMap:
        """From a number for each rank that is equal for ranks of one host.

        Raises:
            ConfigError: hosts have different numbers of ranks, or ranks of a host are not next to each other.
        """
        count = len(set(hosts))
        per_host = len(hosts) // max(count, 1)
        regular = [hosts[rank // per_host * per_host] for rank in range(len(hosts))] if count else []
        if not count or count * per_host != len(hosts) or list(hosts) != regular:
            first = list(dict.fromkeys(hosts))
            shown = [first.index(host) for host in hosts]
            raise ConfigError(
                "hierarchical dispatch needs hosts with equal numbers of ranks, and the ranks of a host next to each "
                f"other; by rank the hosts are {shown}. Number the ranks host by host, or use 'all_to_all'"
            )
        return cls(count, per_host)

    @property
    def world(self) -> int:
        return self.count * self.per_host

    def host(self, rank: int) -> int:
        return rank // self.per_host

    def local(self, rank: int) -> int:
        """Place of ``rank`` on its host."""
        return rank % self.per_host

    def members(self, host: int) -> range:
        """Ranks of ``host``."""
        return range(host * self.per_host, (host + 1) * self.per_host)

    def rail(self, rank: int) -> range:
        """The ranks with the same place as ``rank``, one on each host, itself among them."""
        return range(self.local(rank), self.world, self.per_host)

    def inside(self, placement: ExpertPlacement, host: int) -> ExpertPlacement:
        """Experts of one host as if there were no other. A host without experts is given one, which gets no rows."""
        counts = tuple(placement.experts_per_rank[rank] for rank in self.members(host))
        return ExpertPlacement(counts if sum(counts) else (1, *counts[1:]))

    def experts(self, placement: ExpertPlacement) -> tuple[int, ...]:
        """``count + 1`` expert ids; those of host ``h`` are ``range(result[h], result[h + 1])``."""
        return placement.offsets[:: self.per_host]


Way = Literal["slots", "runs", "sums"]
"""What a relay sends home for a token: the row of each slot; the same, but one sum for a run of slots at the token's
beginning; one sum of all."""


def way_back(deterministic: bool, dtype: torch.dtype, wire_dtypes: WireDtypes) -> Way:
    """A sum that is to have the bits of one rank is of slots that come first, and as wide as the sum of all."""
    if not deterministic:
        return "sums"
    wide = wide_dtype(dtype) == dtype
    narrow = any(wire_dtypes.of(op).narrows(dtype) for op in ("combine", "dispatch backward"))
    return "runs" if wide and not narrow else "slots"


ELSEWHERE, NOWHERE = -1, -2
"""In the ids that go with a copy: the slot's expert is on another host; the slot is dropped."""


@dataclass(frozen=True)
class Departures:
    """What leaves a rank, by host of destination, and what comes back; its own host is one of them.

    token_C: token of each copy, by (host, token). ids_CK: its experts, counted from the first of the host; or
        ``ELSEWHERE``, ``NOWHERE``. copies_H: copies to each host.
    slot_S: flat slots, by (host, token, slot). slots_H: slots of each host.
    rows_H: rows that come back from each host. place_TX: where a token's stand among them, in the order in which they
        are added; -1 for none. lead_TK: slots whose weights are in the rows already; None for none.
    """

    token_C: Tensor
    ids_CK: Tensor
    copies_H: tuple[int, ...]
    slot_S: Tensor
    slots_H: tuple[int, ...]
    rows_H: tuple[int, ...]
    place_TX: Tensor
    lead_TK: Tensor | None = None


def ids_dtype(host_experts: Sequence[int]) -> torch.dtype:
    """The smallest integers that hold the experts of any host; ``host_experts`` as ``HostMap.experts`` gives them."""
    most = max(stop - start for start, stop in pairwise(host_experts))
    return torch.int16 if most <= 1 << 15 else torch.int32


def departures(ids_TK: Tensor, host_experts: Sequence[int], slots_H: Sequence[int], way: Way) -> Departures:
    """Sort tokens and slots by host.

    Args:
        ids_TK: valid expert ids, or -1.
        host_experts: as ``HostMap.experts`` gives them.
        slots_H: slots of ``ids_TK`` on each host.
    """
    tokens = ids_TK.shape[0]
    count, device = len(host_experts) - 1, ids_TK.device
    first_H = torch.tensor(host_experts, device=device)
    ids_TK = ids_TK.long()
    host_TK = torch.bucketize(ids_TK, first_H[1:], right=True).masked_fill_(ids_TK < 0, -1)
    goes_TH = torch.zeros(tokens, count + 1, dtype=torch.bool, device=device)
    goes_HT = goes_TH.scatter_(1, torch.where(host_TK < 0, count, host_TK), True)[:, :count].T.contiguous()
    host_C, token_C = goes_HT.nonzero(as_tuple=True)
    copies_H = tuple(goes_HT.sum(1).tolist())
    host_CK = host_TK[token_C]
    ids_CK = ids_TK[token_C] - first_H[host_C].unsqueeze(1)
    ids_CK = torch.where(host_CK == host_C.unsqueeze(1), ids_CK, torch.where(host_CK < 0, NOWHERE, ELSEWHERE))
    # Of an empty result torch keeps strides by which it cannot be seen as bytes, unless told otherwise.
    ids_CK = ids_CK.to(ids_dtype(host_experts), memory_format=torch.contiguous_format)
    order, place_TK = plain.order_slots(host_TK, count)
    slot_S, slots_H = order[: sum(slots_H)], tuple(slots_H)
    if way == "slots":
        return Departures(token_C, ids_CK, copies_H, slot_S, slots_H, slots_H, place_TK)
    if way == "sums":
        place_HT = (goes_HT.flatten().cumsum(0) - 1).view(count, tokens)
        place_TH = place_HT.masked_fill(~goes_HT, -1).T.contiguous()
        return Departures(token_C, ids_CK, copies_H, slot_S, slots_H, copies_H, place_TH)
    first_T = (host_TK >= 0).to(torch.uint8).argmax(1, keepdim=True)
    stays_TK = (host_TK == host_TK.gather(1, first_T)) | (host_TK < 0)
    lead_TK = stays_TK.to(torch.uint8).cumprod(1).bool() & (host_TK >= 0)
    added_TK = lead_TK & (lead_TK.cumsum(1) > 1)
    gone_H = torch.bincount(host_TK[added_TK], minlength=count).tolist()
    rows_H = tuple(slots - gone for slots, gone in zip(slots_H, gone_H, strict=True))
    _, place_TK = plain.order_slots(host_TK.masked_fill(added_TK, -1), count)
    return Departures(token_C, ids_CK, copies_H, slot_S, slots_H, rows_H, place_TK, lead_TK)


@dataclass(frozen=True)
class Units:
    """What a relay passes on in its host as tokens of a dispatch, and whose sums it sends home.

    token_U: arrived token of each; None: they are the tokens. ids_UK: experts of the host, or -1.
    slot_S: flat place in ``ids_UK`` of each slot that arrived, by (source host, token, slot).
    lead_S: slots that are weighted here; None for all. rows_H: units of each source host.
    """

    token_U: Tensor | None
    ids_UK: Tensor
    slot_S: Tensor
    lead_S: Tensor | None
    rows_H: tuple[int, ...]


def units(ids_PK: Tensor, copies_H: Sequence[int], slots_H: Sequence[int], way: Way) -> Units:
    """Cut arrived tokens into what goes home in one row.

        ids of a token here    3  .  2  2  *  1  0       * another host's    . dropped
        sums                  [3  .  2  2  *  1  0]
        runs                  [3  .  2  2][*  1][0]      the first sum is what one rank would have so far
        slots                 [3][2][2][1][0]

    Args:
        ids_PK: int64, as ``Departures.ids_CK``. copies_H, slots_H: tokens and slots that came from each host.
    """
    top_k, device = ids_PK.shape[1], ids_PK.device
    here_PK = ids_PK >= 0
    slot_S = here_PK.flatten().nonzero().squeeze(1)
    ids_S = ids_PK.flatten()[slot_S]
    if way == "sums":
        return Units(None, ids_PK.clamp(min=-1), slot_S, None, tuple(copies_H))
    if way == "slots":
        every = torch.arange(slot_S.numel(), device=device)
        return Units(slot_S // top_k, ids_S.unsqueeze(1), every, None, tuple(slots_H))
    lead_PK = here_PK & ((ids_PK == ELSEWHERE).cumsum(1) == 0)
    lead_S = lead_PK.flatten()[slot_S]
    added_S = lead_S & (lead_PK.cumsum(1).flatten()[slot_S] > 1)
    ends = torch.tensor([0, *accumulate(slots_H)], device=device)
    rows_H = torch.cat((ends[:1], (~added_S).cumsum(0)))[ends].diff()
    in_all = tuple(rows_H.tolist())
    place_S = ((~added_S).cumsum(0) - 1) * top_k + slot_S % top_k
    ids_UK = torch.full((sum(in_all) * top_k,), -1, device=device)
    ids_UK[place_S] = ids_S
    return Units((slot_S // top_k)[~added_S], ids_UK.view(-1, top_k), place_S, lead_S, in_all)


def transpose_within(counts_EAB: Tensor, num_rows: int) -> Tensor:
    """Where each row of a list ordered by (e, a, b) stands in the one ordered by (e, b, a).

    Args:
        counts_EAB: [E, A, B] int64 rows in each block.
        num_rows: their sum.

    Returns:
        [num_rows] int64: ``rows_eab = rows_eba[result]``.
    """
    sizes_EBA = counts_EAB.transpose(1, 2).contiguous()
    start_EBA = (sizes_EBA.flatten().cumsum(0) - sizes_EBA.flatten()).view(sizes_EBA.shape)
    sizes = counts_EAB.flatten()
    shift = start_EBA.transpose(1, 2).flatten() - (sizes.cumsum(0) - sizes)
    place = torch.arange(num_rows, device=counts_EAB.device)
    return place + torch.repeat_interleave(shift, sizes, output_size=num_rows)


def expert_places(
    rows_WE: Words, experts: range, hosts: HostMap, host: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where rows that come to the experts' rank stand among those that ``dispatch`` gives.

    Args:
        rows_WE: rows that each rank has for each expert.
        experts: of this rank, which is on ``host``.

    Returns:
        [N] and [F] int64: of rows from ranks on ``host``, and of those from the others, in the order of each.
    """
    counts_WE = torch.from_numpy(rows_WE[:, experts.start : experts.stop].copy())
    counts_EGL = counts_WE.T.reshape(len(experts), hosts.count, hosts.per_host)
    counts_ELG = counts_EGL.transpose(1, 2).contiguous()
    near_ELG = torch.zeros_like(counts_ELG, dtype=torch.bool)
    near_ELG[:, :, host] = True
    place_R = transpose_within(counts_ELG, int(counts_WE.sum()))
    near_R = near_ELG.flatten().repeat_interleave(counts_ELG.flatten())
    return place_R[near_R].to(device, non_blocking=True), place_R[~near_R].to(device, non_blocking=True)


@dataclass(frozen=True)
class WireBytes:
    """Bytes sent to other hosts. rows: in their payload, with scales of groups. weights: routing weights and their
    gradients. ids: expert ids that go with tokens. The small exchange that starts an operation is not counted."""

    rows: int = 0
    weights: int = 0
    ids: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.rows + other.rows, self.weights + other.weights, self.ids + other.ids)

    @property
    def total(self) -> int:
        return self.rows + self.weights + self.ids


def inter_host_bytes(
    ids_WTK: Sequence[Tensor],
    placement: ExpertPlacement,
    hosts: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    deterministic: bool = True,
    wire_dtypes: WireDtypes = AS_THEY_ARE,
    weights_grad: bool = True,
) -> dict[str, WireBytes]:
    """What all ranks together send between hosts in each operation of one dispatch.

        copies   (token, other host with an expert of it)      slots   (token, slot) with its expert on another host

        operation            rows                     weights                                          ids
        dispatch             copies                                                                    copies x K
        combine              by way: slots,           none if the way is slots, else slots
                             runs (below), copies
        combine backward     copies                   slots; and back, if the weights need a gradient
        dispatch backward    as combine               none

    Runs are slots, less m - 1 for each token whose first m slots (dropped ones aside) are on one other host, and no
    more than these m.

    Args:
        ids_WTK: the expert ids of every rank's tokens, [T, K] each; -1 is dropped.
        hosts: a number for each rank that is equal for ranks of one host.
        deterministic, wire_dtypes: of ``DispatchOptions``.

    Raises:
        ConfigError: as ``HostMap.of``.
    """
    where = HostMap.of(hosts)
    experts = where.experts(placement)
    owner = [host for host in range(where.count) for _ in range(experts[host], experts[host + 1])]
    copies: list[int] = []  # from each rank to each other host
    slots: list[int] = []
    runs: list[int] = []
    for rank, ids_TK in enumerate(ids_WTK):
        destinations = [[owner[e] for e in row if e >= 0] for row in ids_TK.tolist()]
        for host in set(range(where.count)) - {where.host(rank)}:
            copies.append(sum(host in row for row in destinations))
            slots.append(sum(row.count(host) for row in destinations))
            leading = (len(list(takewhile(host.__eq__, row))) for row in destinations)
            runs.append(slots[-1] - sum(max(length - 1, 0) for length in leading))
    weight = wide_dtype(dtype).itemsize
    id_bytes = ids_dtype(experts).itemsize * (ids_WTK[0].shape[1] if len(ids_WTK) else 0)

    def rows(op: str, blocks: list[int]) -> int:
        return sum(_block_bytes(block, hidden, wire_dtypes.of(op), dtype) for block in blocks)

    way = way_back(deterministic, dtype, wire_dtypes)
    back = {"slots": slots, "runs": runs, "sums": copies}[way]
    once = weight * sum(slots)
    return {
        "dispatch": WireBytes(rows("dispatch", copies), 0, id_bytes * sum(copies)),
        "combine": WireBytes(rows("combine", back), 0 if way == "slots" else once),
        "combine backward": WireBytes(rows("combine backward", copies), once * (1 + weights_grad)),
        "dispatch backward": WireBytes(rows("dispatch backward", back)),
    }


def _block_bytes(rows: int, hidden: int, wire_dtype: WireDtype, dtype: torch.dtype) -> int:
    """Of rows that go from one rank to another."""
    scales = 4 * hidden * -(-rows // GROUP) if wire_dtype.scales == "group" else 0
    return rows * bytes_per_row(hidden, wire_dtype, dtype) + scales


__all__ = [
    "Departures",
    "HostMap",
    "Units",
    "Way",
    "WireBytes",
    "departures",
    "expert_places",
    "ids_dtype",
    "inter_host_bytes",
    "transpose_within",
    "units",
    "way_back",
]
