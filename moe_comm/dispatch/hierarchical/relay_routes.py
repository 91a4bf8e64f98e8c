"""Index arithmetic of ``hierarchical``: relays, order of rows, and bytes between hosts.

Rank h * L + l is rank l of host h. A token of rank (g, l) with experts on host h is sent to rank (h, l) once, which
forwards it to the ranks of those experts. The L ranks of a host share its link evenly. Each rank communicates with one
rank on each other host; together they form a rail.

    2 hosts x 2 ranks       host 0            host 1
                            rank 0 ◀───────▶ rank 2       rail 0
                            rank 1 ◀───────▶ rank 3       rail 1

A slot is one of the K (token, expert) pairs of a token. A copy is a token's row that is sent to one host. Copies are
sent in the order (host, token), slots in the order (host, token, slot). A relay therefore receives them by (source
host, token, slot). The rank of an expert receives rows by (expert, relay l, source host g, token, slot), first those of
its own host, then those of other hosts. Dispatch returns rows by (expert, source rank, token, slot), where the source
rank is g * L + l. So the L x H blocks of rows of each expert are transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from moe_comm.dispatch.handshake import Words
from moe_comm.dispatch.slots import plain
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True)
class HostMap:
    """``count`` hosts of ``per_host`` ranks each. Ranks are numbered host by host."""

    count: int
    per_host: int

    @classmethod
    def of(cls, hosts: Sequence[int]) -> HostMap:
        """Create the map from one number per rank, equal for ranks of one host."""
        count = len(set(hosts))
        per_host = len(hosts) // max(count, 1)
        regular = [hosts[rank // per_host * per_host] for rank in range(len(hosts))] if count else []
        if not count or count * per_host != len(hosts) or list(hosts) != regular:
            distinct = list(dict.fromkeys(hosts))
            shown = [distinct.index(host) for host in hosts]
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
        """Return the local rank of ``rank`` on its host."""
        return rank % self.per_host

    def members(self, host: int) -> range:
        """Return the ranks of ``host``."""
        return range(host * self.per_host, (host + 1) * self.per_host)

    def rail(self, rank: int) -> range:
        """Return the ranks with the same local rank as ``rank``, including itself, in order of host."""
        return range(self.local(rank), self.world, self.per_host)

    def inside(self, placement: ExpertPlacement, host: int) -> ExpertPlacement:
        """Return the placement inside one host. A host without experts gets one expert, which receives no rows."""
        counts = tuple(placement.experts_per_rank[rank] for rank in self.members(host))
        return ExpertPlacement(counts if sum(counts) else (1, *counts[1:]))

    def experts(self, placement: ExpertPlacement) -> tuple[int, ...]:
        """Return ``count + 1`` expert ids; those of host ``h`` are ``range(result[h], result[h + 1])``."""
        return placement.offsets[:: self.per_host]


ReturnFormat = Literal["slots", "runs", "sums"]
"""What a relay returns for a token: a row per slot; one sum of leading slots and a row per other slot; one sum."""


def return_format(deterministic: bool, dtype: torch.dtype, wire_dtypes: WireDtypes) -> ReturnFormat:
    """Return the format with the fewest bytes that gives the required bits.

    A sum of leading slots has the bits of one rank's partial sum if it is transferred in the dtype of the sum.
    """
    if not deterministic:
        return "sums"
    wide = accumulate_dtype(dtype) == dtype
    narrow = any(wire_dtypes.of(op).narrows(dtype) for op in ("combine", "dispatch backward"))
    return "runs" if wide and not narrow else "slots"


OTHER_HOST, DROPPED_SLOT = -1, -2
"""Values in the ids sent with a copy: the expert of the slot is on another host; the slot is dropped."""


@dataclass(frozen=True)
class SendPlan:
    """Rows that a rank sends in dispatch, by destination host including its own, and rows returned to it in combine.

    token_C: token of each copy, ordered by (host, token). copies_H: number of copies to each host.
    ids_CK: experts of each copy, numbered from the first of the host, or ``OTHER_HOST`` or ``DROPPED_SLOT``.
    slot_S: flat slots, ordered by (host, token, slot). slots_H: number of slots of each host.
    rows_H: number of rows returned from each host.
    row_index_TX: indices of a token's rows among the returned rows, in the order of the sum; -1 for none.
    lead_TK: slots whose weights the relay applies; None for none.
    """

    token_C: Tensor
    ids_CK: Tensor
    copies_H: tuple[int, ...]
    slot_S: Tensor
    slots_H: tuple[int, ...]
    rows_H: tuple[int, ...]
    row_index_TX: Tensor
    lead_TK: Tensor | None = None


def ids_dtype(host_experts: Sequence[int]) -> torch.dtype:
    """Return the smallest integer dtype for the expert ids of any host. ``host_experts`` is ``HostMap.experts``."""
    most = max(stop - start for start, stop in pairwise(host_experts))
    return torch.int16 if most <= 1 << 15 else torch.int32


def plan_sends(ids_TK: Tensor, host_experts: Sequence[int], slots_H: Sequence[int], back: ReturnFormat) -> SendPlan:
    """Sort tokens and slots by host.

    Args:
        ids_TK: valid expert ids, or -1.
        host_experts: result of ``HostMap.experts``.
        slots_H: number of slots of ``ids_TK`` on each host.
        back: what relays return for these tokens.
    """
    tokens = ids_TK.shape[0]
    count, device = len(host_experts) - 1, ids_TK.device
    first_H = torch.tensor(host_experts, dtype=torch.int64, device=device)
    ids_TK = ids_TK.long()
    host_TK = torch.bucketize(ids_TK, first_H[1:], right=True).masked_fill_(ids_TK < 0, -1)
    # Whether each token is sent to each host. The last column takes dropped slots and is removed.
    sent_TH = torch.zeros(tokens, count + 1, dtype=torch.bool, device=device)
    sent_HT = sent_TH.scatter_(1, torch.where(host_TK < 0, count, host_TK), True)[:, :count].T.contiguous()
    host_C, token_C = sent_HT.nonzero(as_tuple=True)
    copies_H = tuple(sent_HT.sum(1).tolist())
    host_CK = host_TK[token_C]
    ids_CK = ids_TK[token_C] - first_H[host_C].unsqueeze(1)
    ids_CK = torch.where(host_CK == host_C.unsqueeze(1), ids_CK, torch.where(host_CK < 0, DROPPED_SLOT, OTHER_HOST))
    # Without memory_format, an empty result may have strides that do not allow a view as bytes.
    ids_CK = ids_CK.to(ids_dtype(host_experts), memory_format=torch.contiguous_format)
    order, place_TK = plain.order_slots(host_TK, count)
    slot_S, slots_H = order[: sum(slots_H)], tuple(slots_H)
    if back == "slots":
        return SendPlan(token_C, ids_CK, copies_H, slot_S, slots_H, slots_H, place_TK)
    if back == "sums":
        place_HT = (sent_HT.flatten().cumsum(0) - 1).view(count, tokens)
        place_TH = place_HT.masked_fill(~sent_HT, -1).T.contiguous()
        return SendPlan(token_C, ids_CK, copies_H, slot_S, slots_H, copies_H, place_TH)
    first_T = (host_TK >= 0).to(torch.uint8).argmax(1, keepdim=True)
    on_first_host_TK = (host_TK == host_TK.gather(1, first_T)) | (host_TK < 0)
    lead_TK = on_first_host_TK.to(torch.uint8).cumprod(1).bool() & (host_TK >= 0)
    # Leading slots after the first one: the relay adds their rows to the first one's, so they return no row.
    added_TK = lead_TK & (lead_TK.cumsum(1) > 1)
    added_H = torch.bincount(host_TK[added_TK], minlength=count).tolist()
    rows_H = tuple(slots - added for slots, added in zip(slots_H, added_H, strict=True))
    _, place_TK = plain.order_slots(host_TK.masked_fill(added_TK, -1), count)
    return SendPlan(token_C, ids_CK, copies_H, slot_S, slots_H, rows_H, place_TK, lead_TK)


@dataclass(frozen=True)
class RelayUnits:
    """What a relay dispatches inside its host. It returns one row, the sum of a unit's slots, per unit.

    token_U: received token of each unit; None if units are the received tokens.
    ids_UK: experts of each unit, numbered inside the host, or -1.
    slot_S: flat index into ``ids_UK`` of each received slot, ordered by (source host, token, slot).
    lead_S: slots whose weights the relay applies; None for all. rows_H: number of units of each source host.
    """

    token_U: Tensor | None
    ids_UK: Tensor
    slot_S: Tensor
    lead_S: Tensor | None
    rows_H: tuple[int, ...]


def relay_units(ids_PK: Tensor, copies_H: Sequence[int], slots_H: Sequence[int], back: ReturnFormat) -> RelayUnits:
    """Divide received tokens into units, whose sums are returned as one row each.

        ids of a token here    3  .  2  2  *  1  0       * expert on another host    . dropped
        sums                  [3  .  2  2  *  1  0]
        runs                  [3  .  2  2][*  1][0]      the first sum is the partial sum that one rank would have
        slots                 [3][2][2][1][0]

    ``ids_PK`` is int64 ``SendPlan.ids_CK``. copies_H, slots_H: number of tokens and slots received from each host.
    """
    top_k, device = ids_PK.shape[1], ids_PK.device
    here_PK = ids_PK >= 0
    slot_S = here_PK.flatten().nonzero().squeeze(1)
    ids_S = ids_PK.flatten()[slot_S]
    if back == "sums":
        return RelayUnits(None, ids_PK.clamp(min=-1), slot_S, None, tuple(copies_H))
    if back == "slots":
        all_S = torch.arange(slot_S.numel(), device=device)
        return RelayUnits(slot_S // top_k, ids_S.unsqueeze(1), all_S, None, tuple(slots_H))
    # Leading slots are those before the first slot on another host. All but the first one are added to its unit.
    lead_PK = here_PK & ((ids_PK == OTHER_HOST).cumsum(1) == 0)
    lead_S = lead_PK.flatten()[slot_S]
    added_S = lead_S & (lead_PK.cumsum(1).flatten()[slot_S] > 1)
    ends = torch.tensor([0, *accumulate(slots_H)], dtype=torch.int64, device=device)
    rows_H = tuple(torch.cat((ends[:1], (~added_S).cumsum(0)))[ends].diff().tolist())
    place_S = ((~added_S).cumsum(0) - 1) * top_k + slot_S % top_k
    ids_UK = torch.full((sum(rows_H) * top_k,), -1, dtype=torch.int64, device=device)
    ids_UK[place_S] = ids_S
    return RelayUnits((slot_S // top_k)[~added_S], ids_UK.view(-1, top_k), place_S, lead_S, rows_H)


def transpose_within(counts_EAB: Tensor, num_rows: int) -> Tensor:
    """Return [num_rows] int64, the position in (e, b, a) order of each row in (e, a, b) order.

    ``rows_eab = rows_eba[result]``. ``counts_EAB`` is the int64 number of rows of each block, and ``num_rows`` their
    sum.
    """
    sizes_EBA = counts_EAB.transpose(1, 2).contiguous()
    start_EBA = (sizes_EBA.flatten().cumsum(0) - sizes_EBA.flatten()).view(sizes_EBA.shape)
    sizes = counts_EAB.flatten()
    shift = start_EBA.transpose(1, 2).flatten() - (sizes.cumsum(0) - sizes)
    place = torch.arange(num_rows, device=counts_EAB.device)
    return place + torch.repeat_interleave(shift, sizes, output_size=num_rows)


def row_positions(
    rows_WE: Words, experts: range, hosts: HostMap, host: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the positions of received rows among the rows that ``dispatch`` returns.

    Args:
        rows_WE: number of rows of each rank for each expert.
        experts: of this rank, which is on ``host``.

    Returns:
        [N] and [F] int64 for rows from ranks on ``host`` and from other ranks, each in the order of arrival.
    """
    counts_WE = torch.from_numpy(rows_WE[:, experts.start : experts.stop].copy())
    counts_EGL = counts_WE.T.reshape(len(experts), hosts.count, hosts.per_host)
    counts_ELG = counts_EGL.transpose(1, 2).contiguous()
    near_ELG = torch.zeros_like(counts_ELG, dtype=torch.bool)
    near_ELG[:, :, host] = True
    place_R = transpose_within(counts_ELG, int(counts_WE.sum()))
    near_R = near_ELG.flatten().repeat_interleave(counts_ELG.flatten())
    return place_R[near_R].to(device, non_blocking=True), place_R[~near_R].to(device, non_blocking=True)
