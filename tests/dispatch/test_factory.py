"""Choosing a backend: the same on every rank, with an explanation, and errors with an alternative."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from moe_comm.dispatch import BACKENDS, DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.peer_to_peer.access import ALONE, BLOCKED, MAY_SHARE, NO_KERNELS, REACHES, problem_of
from moe_comm.dispatch.selection import factory
from moe_comm.dispatch.selection.choice import GroupFacts, Traffic, choose
from moe_comm.dispatch.selection.factory import explain_choice
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError
from tests.dispatch.workers import ErrorText, caught
from tests.pool import RankPool

HOST = GroupFacts(world=4, hosts=1, native=True, device="cpu", transport="gloo")
FP8 = WireDtypes("fp8_block")


@pytest.mark.parametrize(
    ("facts", "traffic", "picked"),
    [
        (replace(HOST, world=1), Traffic(), "local"),
        (HOST, Traffic(top_k=8), "shared_memory"),
        (replace(HOST, native=False), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, hosts=2), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, hosts=2), Traffic(), "all_to_all"),
        (replace(HOST, hosts=2), Traffic(top_k=8), "all_gather"),
        (replace(HOST, hosts=2, world=16), Traffic(top_k=8), "all_to_all"),
        (replace(HOST, hosts=2, host_by_host=True), Traffic(top_k=8), "hierarchical"),
        (replace(HOST, hosts=2, host_by_host=True), Traffic(top_k=8, deterministic=False), "hierarchical"),
        (replace(HOST, hosts=4, world=16, host_by_host=True), Traffic(top_k=8), "hierarchical"),
        (replace(HOST, hosts=2, host_by_host=True), Traffic(top_k=1), "all_to_all"),
        (replace(HOST, hosts=4, world=16, host_by_host=True), Traffic(8, wire_dtypes=FP8), "hierarchical"),
        (replace(HOST, hosts=4, world=16, host_by_host=True), Traffic(8, wire_dtypes=FP8, scaled=True), "all_to_all"),
        (replace(HOST, hosts=4, world=16, host_by_host=True), Traffic(8, scaled=True), "hierarchical"),
        (replace(HOST, hosts=4, host_by_host=True), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, hosts=2, host_by_host=True, device="cuda", transport="nccl"), Traffic(top_k=8), "all_gather"),
        (replace(HOST, device="cuda", transport="nccl"), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, device="cuda", transport="nccl"), Traffic(top_k=8), "all_gather"),
        (replace(HOST, device="cuda", transport="nccl", peers=""), Traffic(top_k=2), "peer_to_peer"),
        (replace(HOST, device="cuda", transport="nccl", peers=""), Traffic(top_k=8), "peer_to_peer"),
        (replace(HOST, device="cuda", transport="nccl", peers="", hosts=2), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, device="cuda", transport="nccl", peers="", native=False), Traffic(top_k=2), "all_to_all"),
        (replace(HOST, device="cuda", transport="nccl", peers=""), Traffic(top_k=8, overlap=True), "peer_to_peer"),
        (
            replace(HOST, device="cuda", transport="nccl", peers=""),
            Traffic(top_k=8, overlap=True, fused=True),
            "peer_to_peer",
        ),
        (replace(HOST, device="cuda", transport="nccl"), Traffic(top_k=8, overlap=True), "all_to_all"),
        (replace(HOST, world=1, device="cuda", transport="nccl"), Traffic(top_k=8, overlap=True), "local"),
        (
            replace(HOST, device="cuda", transport="nccl", peers=""),
            Traffic(top_k=8, overlap=True, wire_dtypes=WireDtypes(combine_backward="fp8_group")),
            "peer_to_peer",
        ),
        (HOST, Traffic(top_k=8, overlap=True), "shared_memory"),
        (replace(HOST, emulate=True), Traffic(top_k=2), "shared_memory"),
        (replace(HOST, emulate=True, native=False), Traffic(top_k=2), "all_to_all"),
    ],
)
def test_auto_chooses_the_cheapest_backend_that_works(facts: GroupFacts, traffic: Traffic, picked: str) -> None:
    choice = choose(facts, traffic)
    assert choice.picked == picked
    assert not choice.problem(picked)
    assert f"-> {picked}" in str(choice)


def test_the_explanation_lists_every_backend_with_its_cost_or_problem() -> None:
    text = str(choose(replace(HOST, hosts=3, native=False), Traffic(top_k=8, hidden=1000, item_bytes=2)))
    assert all(name in text for name in BACKENDS if name != "auto")
    assert "no: the ranks are on 3 hosts; use 'all_to_all' between hosts" in text
    assert "hosts have different numbers of ranks" in text
    assert "24.0" in text, "all_to_all sends 2 * 8 * 3/4 rows of 2 KB for each token"


@pytest.mark.parametrize(
    ("devices", "access", "expected"),
    [
        ([5, 6], [REACHES, REACHES], ""),
        ([5, 5], [MAY_SHARE + ALONE, MAY_SHARE + ALONE], ""),
        ([5, 5], [ALONE, ALONE], "ranks 0 and 1 share a GPU, and rank 0 does not allow it for torch"),
        ([5, 5], [MAY_SHARE + REACHES, REACHES], "ranks 0 and 1 share a GPU, and rank 1 does not allow it for torch"),
        ([5, 6], [MAY_SHARE + REACHES, BLOCKED], "the GPU of rank 1 cannot reach"),
        ([5, 6], [REACHES, BLOCKED], "the GPU of rank 1 cannot reach"),
        ([5, 6], [ALONE, REACHES], "rank 0 sees only its own GPU"),
        ([5, 6], [REACHES, NO_KERNELS], "rank 1 has no kernels"),
        ([5, 0], [REACHES, NO_KERNELS], "rank 1 has no kernels"),
    ],
)
def test_peer_to_peer_needs_access_between_all_gpus(devices: list[int], access: list[int], expected: str) -> None:
    """Several ranks on one GPU need no peer access, but torch must allow it."""
    problem = problem_of(devices, access)
    assert expected in problem and bool(problem) == bool(expected)
    choice = choose(replace(HOST, world=2, device="cuda", transport="nccl", peers=problem), Traffic(top_k=2))
    assert choice.picked == ("all_gather" if expected else "peer_to_peer")
    assert expected in choice.problem("peer_to_peer")


def test_gpus_without_access_to_each_other_give_a_warning() -> None:
    gpus = replace(HOST, device="cuda", transport="nccl", peers="the GPU of rank 1 has no access")
    with pytest.warns(RuntimeWarning, match="auto takes 'all_to_all' on these GPUs: the GPU of rank 1 has no access"):
        factory.warn_no_peer_access(choose(gpus, Traffic(top_k=2)))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        for facts in (replace(gpus, hosts=2), replace(gpus, peers=""), HOST):
            factory.warn_no_peer_access(choose(facts))
    assert not caught_warnings


def test_one_rank_gets_local_for_every_backend_name() -> None:
    for backend in BACKENDS:
        assert make_dispatcher(4, backend=backend).name == "local"
    assert "-> local" in explain_choice()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "smoke"}, "unknown dispatch backend 'smoke'; known: auto, local"),
        ({"experts_per_rank": [1, 1]}, "1 counts that add up to 4"),
        ({"num_experts": 0}, "num_experts and world must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_dispatcher(**{"num_experts": 4, **arguments})


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_deadline_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        DispatchOptions(timeout_s=timeout_s)


def choices_of_rank(rank: int, world: int, native: list[bool]) -> tuple[str, str, str, ErrorText, ErrorText]:
    from moe_comm.comm import group_setup

    real = group_setup.native_is_built
    group_setup.native_is_built = lambda: real() and native[rank]
    try:
        group = dist.new_group()
        return (
            make_dispatcher(4, group).name,
            make_dispatcher(4, group, traffic=Traffic(top_k=4)).name,
            explain_choice(group),
            caught(lambda: make_dispatcher(4, group, backend="local")),
            caught(lambda: make_dispatcher(4, group, backend="shared_memory", device="cuda")),
        )
    finally:
        group_setup.native_is_built = real


def test_all_ranks_make_the_same_choice_even_if_one_lacks_the_native_core(pool2: RankPool) -> None:
    for of_rank in pool2.run(choices_of_rank, [True, False]):
        name, for_many_slots, text, local, on_cuda = of_rank
        assert (name, for_many_slots) == ("all_to_all", "all_gather")
        assert "not built on every rank" in text and "2 rank(s) on 1 host(s)" in text
        assert local[0] == "ConfigError" and "'local' sends nothing between them" in local[1]
        assert on_cuda[0] == "ConfigError" and "use 'all_to_all'" in on_cuda[1]


def mismatch_errors(rank: int, world: int, arg: object) -> list[ErrorText]:
    group = dist.group.WORLD
    wire = WireDtypes(dispatch="bf16") if rank else WireDtypes()
    experts = [3, 1] if rank else [1, 3]
    blocks = PeerToPeerOptions(num_blocks=1 + rank)
    return [
        caught(lambda: make_dispatcher(4, group, traffic=Traffic(top_k=2 + 2 * rank, wire_dtypes=wire))),
        caught(lambda: make_dispatcher(4, group, traffic=Traffic(top_k=2) if rank else None)),
        caught(lambda: make_dispatcher(4, group, backend="all_gather" if rank else "auto", experts_per_rank=experts)),
        caught(lambda: make_dispatcher(4, group, options=DispatchOptions(wire_dtypes=wire))),
        caught(lambda: make_dispatcher(4 + rank, group)),
        caught(lambda: make_dispatcher(4, group, options=DispatchOptions(checksums=rank == 1, peer_to_peer=blocks))),
        caught(lambda: make_dispatcher(4, group, experts_per_rank=[1] if rank else None)),
        caught(lambda: make_dispatcher(4, group, backend="smoke" if rank else "all_to_all")),
    ]


def test_the_settings_that_differ_are_named_with_their_values_by_rank(pool2: RankPool) -> None:
    for rank, of_rank in enumerate(pool2.run(mismatch_errors)):
        assert [kind for kind, _ in of_rank] == ["RankMismatch"] * 6 + ["ConfigError"] * 2, of_rank
        traffic, none_given, backend, options, number, more, sizes, unknown = (text for _, text in of_rank)
        assert "expected traffic" in traffic and "top_k: rank 0: 2, rank 1: 4; wire_dtypes.dispatch.format: " in traffic
        assert "rank 0: None, rank 1: not given; top_k: rank 0: not given, rank 1: 2" in none_given
        assert "backend: rank 0: 'auto', rank 1: 'all_gather'" in backend
        assert "experts per rank: rank 0: (1, 3), rank 1: (3, 1)" in backend
        assert "wire_dtypes when building a dispatcher: dispatch.format: rank 0: 'same', rank 1: 'bf16'" in options
        assert "number of experts when building a dispatcher: rank 0: 4, rank 1: 5" in number
        assert "disagree on checksums, options of peer_to_peer" in more
        for text, key in ((sizes, "1 counts"), (unknown, "'smoke'")):
            assert key in text and text.startswith("rank 1: ") == (rank == 0)


def test_auto_chooses_shared_memory_on_one_host(pool2: RankPool) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    assert [of_rank[:2] for of_rank in pool2.run(choices_of_rank, [True, True])] == [
        ("shared_memory", "shared_memory")
    ] * 2
