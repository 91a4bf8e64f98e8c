"""Index arithmetic of hierarchical dispatch compared with loops: copies, slots, returned rows and wire bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_comm.dispatch import WireDtypes
from moe_comm.dispatch.hierarchical.relay_routes import (
    DROPPED_SLOT,
    OTHER_HOST,
    HostMap,
    ReturnFormat,
    ids_dtype,
    plan_sends,
    relay_units,
    return_format,
    row_positions,
)
from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement
from tests.dispatch.inter_host import inter_host_bytes
from tests.dispatch.workers import two_hosts

SEEDED = settings(deadline=None, derandomize=True, max_examples=50)


def test_hosts_are_blocks_of_ranks() -> None:
    hosts = HostMap.of([70, 70, 3, 3, 9, 9])
    assert (hosts.count, hosts.per_host, hosts.world) == (3, 2, 6)
    assert list(hosts.rail(3)) == [1, 3, 5] and list(hosts.members(1)) == [2, 3]
    assert [(hosts.host(rank), hosts.local(rank)) for rank in (0, 3, 4)] == [(0, 0), (1, 1), (2, 0)]
    assert hosts.experts(ExpertPlacement.balanced(7, 6)) == (0, 3, 5, 7)


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1, 0, 0], [0, 1, 1, 2], []])
def test_hosts_that_are_not_blocks_of_equal_size_are_refused(hosts: list[int]) -> None:
    with pytest.raises(ConfigError, match="equal numbers of ranks"):
        HostMap.of(hosts)


@SEEDED
@given(st.data())
def test_copies_slots_and_returned_rows_are_ordered_by_host(data: st.DataObject) -> None:
    hosts, tokens, top_k = (data.draw(st.integers(1, n)) for n in (4, 9, 5))
    bounds = [0, *np.cumsum([data.draw(st.integers(0, 3)) for _ in range(hosts)]).tolist()]
    ids = [[data.draw(st.integers(-1, bounds[-1] - 1)) for _ in range(top_k)] for _ in range(tokens)]

    def host(e: int) -> int:
        return next(h for h in range(hosts) if e < bounds[h + 1]) if e >= 0 else -1

    host_TK = [[host(e) for e in row] for row in ids]
    slots = [(h, t, k) for h in range(hosts) for t in range(tokens) for k in range(top_k) if host_TK[t][k] == h]
    copies = sorted({(h, t) for h, t, _ in slots})
    slots_H = [sum(h == where for where, _, _ in slots) for h in range(hosts)]
    # The slots of a token before its first slot for another host are its leading run; one row returns their sum.
    lead = {(h, t, k) for h, t, k in slots if all(other in (h, -1) for other in host_TK[t][:k])}
    after_first = {(h, t, k) for h, t, k in lead if any(slot in lead for slot in ((h, t, j) for j in range(k)))}
    returned = {
        "sums": [(h, t, None) for h, t in copies],
        "slots": slots,
        "runs": [slot for slot in slots if slot not in after_first],
    }
    formats: tuple[ReturnFormat, ...] = ("sums", "slots", "runs")
    for kind in formats:
        plan = plan_sends(torch.tensor(ids), bounds, slots_H, kind)
        assert plan.token_C.tolist() == [t for _, t in copies]
        assert list(plan.copies_H) == [sum(h == where for where, _ in copies) for h in range(hosts)]
        assert plan.ids_CK.dtype == torch.int16
        assert plan.ids_CK.tolist() == [
            [
                e - bounds[h] if host_TK[t][k] == h else OTHER_HOST if e >= 0 else DROPPED_SLOT
                for k, e in enumerate(ids[t])
            ]
            for h, t in copies
        ]
        assert plan.slot_S.tolist() == [t * top_k + k for _, t, k in slots]
        rows = returned[kind]
        assert list(plan.rows_H) == [sum(row[0] == h for row in rows) for h in range(hosts)]
        sums_T = [[(h, t, None) for h in range(hosts)] if kind == "sums" else [] for t in range(tokens)]
        expected = [sums_T[t] or [(host_TK[t][k], t, k) for k in range(top_k)] for t in range(tokens)]
        assert plan.row_index_TX.tolist() == [[rows.index(r) if r in rows else -1 for r in of] for of in expected]
        assert (plan.lead_TK is not None) == (kind == "runs")
        if plan.lead_TK is not None:
            assert {(host_TK[t][k], t, k) for t, k in plan.lead_TK.nonzero().tolist()} == lead


# Ids of two tokens that a relay rank received: expert numbers on its host, or a marker.
RELAY_IDS = [
    [3, DROPPED_SLOT, 2, 2, OTHER_HOST, 1, 0],
    [OTHER_HOST, 4, 4, DROPPED_SLOT, DROPPED_SLOT, DROPPED_SLOT, DROPPED_SLOT],
]


@pytest.mark.parametrize(
    ("kind", "tokens", "ids", "rows"),
    [
        ("sums", None, [[3, -1, 2, 2, -1, 1, 0], [-1, 4, 4, -1, -1, -1, -1]], (2, 0)),
        ("slots", [0, 0, 0, 0, 0, 1, 1], [[3], [2], [2], [1], [0], [4], [4]], (7, 0)),
        (
            "runs",
            [0, 0, 0, 1, 1],
            [
                [3, -1, 2, 2, -1, -1, -1],
                [-1, -1, -1, -1, -1, 1, -1],
                [-1, -1, -1, -1, -1, -1, 0],
                [-1, 4, -1, -1, -1, -1, -1],
                [-1, -1, 4, -1, -1, -1, -1],
            ],
            (5, 0),
        ),
    ],
)
def test_a_relay_returns_slots_or_a_leading_run_or_one_sum(
    kind: ReturnFormat, tokens: list[int] | None, ids: list[list[int]], rows: tuple[int, ...]
) -> None:
    units = relay_units(torch.tensor(RELAY_IDS), (2, 0), (7, 0), kind)
    assert (None if units.token_U is None else units.token_U.tolist()) == tokens
    assert units.ids_UK.tolist() == ids and units.rows_H == rows
    assert units.ids_UK.flatten()[units.slot_S].tolist() == [3, 2, 2, 1, 0, 4, 4]
    assert (units.lead_S is not None) == (kind == "runs")
    if units.lead_S is not None:
        assert units.lead_S.tolist() == [True, True, True, False, False, False, False]


def test_partial_sums_need_the_dtype_of_the_total() -> None:
    same = WireDtypes()
    assert return_format(True, torch.float32, same) == return_format(True, torch.float64, same) == "runs"
    assert return_format(True, torch.bfloat16, same) == return_format(True, torch.float16, same) == "slots"
    assert return_format(True, torch.float32, WireDtypes(combine="bf16")) == "slots"
    assert return_format(True, torch.float32, WireDtypes(dispatch_backward="bf16")) == "slots"
    assert return_format(True, torch.float32, WireDtypes("fp8_token", combine_backward="bf16")) == "runs"
    assert return_format(False, torch.float32, same) == return_format(False, torch.bfloat16, same) == "sums"


def test_ids_are_int32_if_a_host_has_more_than_2_to_15_experts() -> None:
    assert ids_dtype((0, 1 << 15)) == torch.int16 and ids_dtype((0, 4, 5 + (1 << 15))) == torch.int32


@SEEDED
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.data())
def test_rows_are_ordered_by_source_rank(hosts: int, per_host: int, experts: int, data: st.DataObject) -> None:
    host_map, host = HostMap(hosts, per_host), data.draw(st.integers(0, hosts - 1))
    counts = [[data.draw(st.integers(0, 3)) for _ in range(experts + 1)] for _ in range(host_map.world)]
    arrived = [
        (e, source, row)
        for e in range(experts)
        for local in range(per_host)
        for source in range(local, host_map.world, per_host)
        for row in range(counts[source][1 + e])
    ]
    places = row_positions(np.array(counts, np.int64), range(1, 1 + experts), host_map, host, torch.device("cpu"))
    for position_N, own_host in zip(places, (True, False), strict=True):
        expected = [row for row in arrived if (host_map.host(row[1]) == host) == own_host]
        assert [sorted(arrived)[place] for place in position_N.tolist()] == expected


def test_a_token_is_sent_once_to_a_host_with_several_of_its_experts() -> None:
    """4 ranks with 10 tokens each; a token has 4 slots for each host, alternating or those of host 0 first.

    If those of host 0 are first, tokens of host 1 get one row, the sum of the leading run; those of host 0 get 4 rows.
    """
    alternating, first = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]), torch.arange(8)
    row = bytes_per_row(16, WireDtypes().of("dispatch"), torch.float32)
    for ids_K, deterministic, returned in ((alternating, True, 4), (first, True, (4 + 1) / 2), (first, False, 1)):
        formula = inter_host_bytes(
            [ids_K.repeat(10, 1)] * 4,
            ExpertPlacement.balanced(8, 4),
            two_hosts(4),
            16,
            torch.float32,
            deterministic=deterministic,
        )
        rows = {op: op_bytes.rows / (40 * row) for op, op_bytes in formula.items()}
        assert rows == {"dispatch": 1, "combine": returned, "combine backward": 1, "dispatch backward": returned}
        assert formula["dispatch"].ids == 40 * 8 * 2
