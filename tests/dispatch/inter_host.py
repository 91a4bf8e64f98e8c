"""The formula of the bytes that ``hierarchical`` sends between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from moe_comm.dispatch.hierarchical.rail import WireBytes
from moe_comm.dispatch.hierarchical.relay_routes import HostMap, ids_dtype, return_format
from moe_comm.dispatch.wire_dtype import GROUP, UNCHANGED, WireDtype, WireDtypes, bytes_per_row
from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.topology import ExpertPlacement


def inter_host_bytes(
    ids_WTK: Sequence[Tensor],
    placement: ExpertPlacement,
    hosts: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    *,
    deterministic: bool = True,
    wire_dtypes: WireDtypes = UNCHANGED,
    weights_grad: bool = True,
) -> dict[str, WireBytes]:
    """Return the bytes that all ranks together send between hosts in each operation of one dispatch.

        copies   (token, other host with an expert of it)      slots   (token, slot) with its expert on another host

        operation            rows                     weights                                          ids
        dispatch             copies                                                                    copies x K
        combine              by return format: slots, none for the format "slots", else slots
                             runs (below), copies
        combine backward     copies                   slots; twice, if the weights need a gradient
        dispatch backward    as combine               none

    Runs are slots, minus m - 1 for each token whose m leading slots (without dropped ones) are on one other host.

    Args:
        ids_WTK: expert ids of each rank's tokens, [T, K] each; -1 is dropped.
        placement: of the experts.
        hosts: one number per rank, equal for ranks of one host.
        hidden, dtype: of the rows.
        deterministic, wire_dtypes: of ``DispatchOptions``.
        weights_grad: whether the weights need a gradient.
    """
    host_map = HostMap.of(hosts)
    experts = host_map.experts(placement)
    host_of_expert = [host for host in range(host_map.count) for _ in range(experts[host], experts[host + 1])]
    copies: list[int] = []  # from each rank to each other host
    slots: list[int] = []
    runs: list[int] = []
    for rank, ids_TK in enumerate(ids_WTK):
        destinations = [[host_of_expert[e] for e in row if e >= 0] for row in ids_TK.tolist()]
        for host in set(range(host_map.count)) - {host_map.host(rank)}:
            copies.append(sum(host in row for row in destinations))
            slots.append(sum(row.count(host) for row in destinations))
            leading = (len(list(takewhile(host.__eq__, row))) for row in destinations)
            runs.append(slots[-1] - sum(max(length - 1, 0) for length in leading))
    weight = accumulate_dtype(dtype).itemsize
    id_bytes = ids_dtype(experts).itemsize * (ids_WTK[0].shape[1] if len(ids_WTK) else 0)

    def rows(op: str, blocks: list[int]) -> int:
        return sum(_block_bytes(block, hidden, wire_dtypes.of(op), dtype) for block in blocks)

    back = return_format(deterministic, dtype, wire_dtypes)
    returned = {"slots": slots, "runs": runs, "sums": copies}[back]
    weights_bytes = weight * sum(slots)
    return {
        "dispatch": WireBytes(rows("dispatch", copies), 0, id_bytes * sum(copies)),
        "combine": WireBytes(rows("combine", returned), 0 if back == "slots" else weights_bytes),
        "combine backward": WireBytes(rows("combine backward", copies), weights_bytes * (1 + weights_grad)),
        "dispatch backward": WireBytes(rows("dispatch backward", returned)),
    }


def _block_bytes(rows: int, hidden: int, wire_dtype: WireDtype, dtype: torch.dtype) -> int:
    """Return the bytes of ``rows`` rows between two ranks."""
    scales = 4 * hidden * -(-rows // GROUP) if wire_dtype.scales == "group" else 0
    return rows * bytes_per_row(hidden, wire_dtype, dtype) + scales
