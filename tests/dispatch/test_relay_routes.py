"""Index arithmetic of hierarchical dispatch against loops: copies, slots, returned rows, and the formula for bytes."""

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
    expert_places,
    ids_dtype,
    inter_host_bytes,
    plan_sends,
    relay_units,
    return_format,
)
from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement
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

    to = [[host(e) for e in row] for row in ids]
    slots = [(h, t, k) for h in range(hosts) for t in range(tokens) for k in range(top_k) if to[t][k] == h]
    copies = sorted({(h, t) for h, t, _ in slots})
    slots_H = [sum(h == where for where, _, _ in slots) for h in range(hosts)]
    lead = {(h, t, k) for h, t, k in slots if all(other in (h, -1) for other in to[t][:k])}
    joined = {(h, t, k) for h, t, k in lead if any(slot in lead for slot in ((h, t, j) for j in range(k)))}
    returned = {
        "sums": [(h, t, None) for h, t in copies],
        "slots": slots,
        "runs": [slot for slot in slots if slot not in joined],
    }
    formats: tuple[ReturnFormat, ...] = ("sums", "slots", "runs")
    for back in formats:
        plan = plan_sends(torch.tensor(ids), bounds, slots_H, back)
        assert plan.token_C.tolist() == [t for _, t in copies]
        assert list(plan.copies_H) == [sum(h == where for where, _ in copies) for h in range(hosts)]
        assert plan.ids_CK.dtype == torch.int16
        assert plan.ids_CK.tolist() == [
            [e - bounds[h] if to[t][k] == h else OTHER_HOST if e >= 0 else DROPPED_SLOT for k, e in enumerate(ids[t])]
            for h, t in copies
        ]
        assert plan.slot_S.tolist() == [t * top_k + k for _, t, k in slots]
        rows = returned[back]
        assert list(plan.rows_H) == [sum(row[0] == h for row in rows) for h in range(hosts)]
        last = [[(h, t, None) for h in range(hosts)] if back == "sums" else [] for t in range(tokens)]
        expected = [last[t] or [(to[t][k], t, k) for k in range(top_k)] for t in range(tokens)]
        assert plan.place_TX.tolist() == [[rows.index(r) if r in rows else -1 for r in of] for of in expected]
        assert (plan.lead_TK is not None) == (back == "runs")
        if plan.lead_TK is not None:
            assert {(to[t][k], t, k) for t, k in plan.lead_TK.nonzero().tolist()} == lead


PICTURE = [
    [3, DROPPED_SLOT, 2, 2, OTHER_HOST, 1, 0],
    [OTHER_HOST, 4, 4, DROPPED_SLOT, DROPPED_SLOT, DROPPED_SLOT, DROPPED_SLOT],
]


@pytest.mark.parametrize(
    ("back", "tokens", "ids", "rows"),
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
    back: ReturnFormat, tokens: list[int] | None, ids: list[list[int]], rows: tuple[int, ...]
) -> None:
    found = relay_units(torch.tensor(PICTURE), (2, 0), (7, 0), back)
    assert (None if found.token_U is None else found.token_U.tolist()) == tokens
    assert found.ids_UK.tolist() == ids and found.rows_H == rows
    assert found.ids_UK.flatten()[found.slot_S].tolist() == [3, 2, 2, 1, 0, 4, 4]
    assert (found.lead_S is not None) == (back == "runs")
    if found.lead_S is not None:
        assert found.lead_S.tolist() == [True, True, True, False, False, False, False]


def test_partial_sums_need_the_dtype_of_the_total() -> None:
    same = WireDtypes()
    assert return_format(True, torch.float32, same) == return_format(True, torch.float64, same) == "runs"
    assert return_format(True, torch.bfloat16, same) == return_format(True, torch.float16, same) == "slots"
    assert return_format(True, torch.float32, WireDtypes(combine="bf16")) == "slots"
    assert return_format(True, torch.float32, WireDtypes(dispatch_backward="bf16")) == "slots"
    assert return_format(True, torch.float32, WireDtypes("fp8_token", combine_backward="bf16")) == "runs"
    assert return_format(False, torch.float32, same) == return_format(False, torch.bfloat16, same) == "sums"


def test_the_ids_of_many_experts_are_wider() -> None:
    assert ids_dtype((0, 1 << 15)) == torch.int16 and ids_dtype((0, 4, 5 + (1 << 15))) == torch.int32


@SEEDED
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.data())
def test_rows_are_ordered_by_source_rank(hosts: int, per_host: int, experts: int, data: st.DataObject) -> None:
    where, host = HostMap(hosts, per_host), data.draw(st.integers(0, hosts - 1))
    counts = [[data.draw(st.integers(0, 3)) for _ in range(experts + 1)] for _ in range(where.world)]
    arrived = [
        (e, source, row)
        for e in range(experts)
        for local in range(per_host)
        for source in range(local, where.world, per_host)
        for row in range(counts[source][1 + e])
    ]
    places = expert_places(np.array(counts, np.int64), range(1, 1 + experts), where, host, torch.device("cpu"))
    for place_N, near in zip(places, (True, False), strict=True):
        side = [row for row in arrived if (where.host(row[1]) == host) == near]
        assert [sorted(arrived)[place] for place in place_N.tolist()] == side


def test_a_token_is_sent_once_to_a_host_with_several_of_its_experts() -> None:
    """4 ranks of 10 tokens with 8 slots, 4 for each host: alternating, or those of host 0 first."""
    turns, first = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]), torch.arange(8)
    row = bytes_per_row(16, WireDtypes().of("dispatch"), torch.float32)
    for ids_K, deterministic, back in ((turns, True, 4), (first, True, (4 + 1) / 2), (first, False, 1)):
        formula = inter_host_bytes(
            [ids_K.repeat(10, 1)] * 4,
            ExpertPlacement.balanced(8, 4),
            two_hosts(4),
            16,
            torch.float32,
            deterministic=deterministic,
        )
        rows = {op: part.rows / (40 * row) for op, part in formula.items()}
        assert rows == {"dispatch": 1, "combine": back, "combine backward": 1, "dispatch backward": back}
        assert formula["dispatch"].ids == 40 * 8 * 2
