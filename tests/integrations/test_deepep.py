"""The ``deep_ep`` module against DeepEP's reference, on CPU ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.integrations.deepep import Buffer, install, uninstall
from moe_comm.topology import ExpertPlacement
from tests.integrations import deepep_oracle as oracle
from tests.integrations.deepep_oracle import CASES, Case
from tests.pool import RankPool


def equal(a: Any, b: Any) -> bool:
    """Compare tensors, or tuples of values and scales, bit by bit."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype == b.dtype and torch.equal(a, b)


def top(x: Any, rows: int) -> Any:
    return tuple(t[:rows] for t in x) if isinstance(x, tuple) else x[:rows]


def expert_outputs(case: Case, want: oracle.Received) -> Tensor:
    """Return [R, H]: the sum of the outputs of this rank's experts for each received row."""
    slots = oracle.outputs(case, want.source, want.token)
    return oracle.in_order(slots.masked_fill(want.ids.unsqueeze(-1) < 0, 0))


def legacy(rank: int, world: int, arg: tuple[str, Case]) -> None:
    backend, case = arg
    deep_ep = install(backend=backend)
    buffer = deep_ep.Buffer(dist.group.WORLD)
    sent, want = oracle.batch(case, rank), oracle.dispatch(case, rank, world)
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(sent.ids, case.num_experts)
    assert per_rdma_rank is None and event.event is None
    assert torch.equal(per_expert, torch.bincount(sent.ids[sent.ids >= 0], minlength=case.num_experts).int())
    assert torch.equal(per_rank, in_rank.sum(0).int())
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    counts = [int((want.ids == e).sum()) for e in range(_num_local(case, rank, world))]

    x, ids, weights, got, handle, event = buffer.dispatch(
        sent.x, **layout, topk_idx=sent.ids, topk_weights=sent.weights, async_finish=True
    )
    event.current_stream_wait()
    assert equal(x, want.x) and torch.equal(ids, want.ids) and torch.equal(weights, want.weights)
    assert got == counts
    ends = [int((want.source <= source).sum()) for source in range(world)]
    assert handle[0][:, rank].tolist() == ends and torch.equal(handle[3].long(), want.token)

    again, *rest, event = buffer.dispatch(sent.x, handle=handle)
    assert equal(again, want.x) and rest == [None] * 4
    y, back, _ = buffer.combine(expert_outputs(case, want), handle, topk_weights=weights)
    assert torch.equal(y, oracle.combine(case, rank, world))
    assert torch.equal(back, sent.weights.masked_fill(sent.ids < 0, 0.0))
    for num_bias in (1, 2):
        bias = sent.bias[0] if num_bias == 1 else sent.bias
        y, _, _ = buffer.combine(expert_outputs(case, want), handle, bias=bias)
        assert torch.equal(y, oracle.combine(case, rank, world, num_bias)), num_bias

    *_, got, _, _ = buffer.dispatch(
        sent.x, **layout, topk_idx=sent.ids, topk_weights=sent.weights, expert_alignment=128
    )
    assert got == [-(-count // 128) * 128 for count in counts]
    x, ids, weights, got, handle, _ = buffer.dispatch(
        sent.x, **layout, topk_idx=sent.ids, topk_weights=sent.weights, num_worst_tokens=100
    )
    assert got == [] and len(ids) == len(weights) == 100 and bool((ids[len(want.ids) :] == -1).all())
    assert equal(top(x, len(want.ids)), want.x) and torch.equal(ids[: len(want.ids)], want.ids)
    padded = torch.cat((expert_outputs(case, want), torch.full((100 - len(want.ids), case.hidden), 7.0).to(case.dtype)))
    assert torch.equal(buffer.combine(padded, handle)[0], oracle.combine(case, rank, world))

    x, ids, weights, got, handle, _ = buffer.dispatch(sent.x, **layout)  # the layout alone
    assert equal(x, want.x) and ids is None and weights is None and got == counts
    uninstall()


def _num_local(case: Case, rank: int, world: int) -> int:
    return len(ExpertPlacement.of(case.num_experts, world).local_range(rank))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("world", "backend"), [(2, "auto"), (4, "all_to_all"), (2, "all_gather")])
def test_buffer_has_the_bits_of_the_reference(case: Case, world: int, backend: str, pools: dict[int, RankPool]) -> None:
    pools[world].run(legacy, (backend, case))


def changed_ids(rank: int, world: int, mode: str) -> list[list[int]]:
    """Return the local ids that three dispatches received: of the same ids, changed ones, and invalid ones (none)."""
    buffer, received = Buffer(dist.group.WORLD), []
    with torch.inference_mode(mode == "inference"):
        ids = torch.tensor([[0], [1]])
        x = torch.ones(2, 4)
        for change in (0, 1, 2):
            _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, world)
            ids[1] -= change
            try:
                got = buffer.dispatch(
                    x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=x[:, :1]
                )
                received.append(got[1].flatten().tolist())
            except InputError:  # on both ranks
                received.append([])
    return received


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_ids_that_change_after_the_layout_are_checked_and_sent_again(mode: str, pools: dict[int, RankPool]) -> None:
    assert pools[2].run(changed_ids, mode) == [[[0, 0], [0] * 4, []], [[0, 0], [], []]]


def elastic(rank: int, world: int, case: Case) -> None:
    deep_ep = install()
    most = max(case.tokens) + 3
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=most)
    sent, want = oracle.batch(case, rank), oracle.dispatch(case, rank, world)
    num_rows, num_local = len(want.ids), _num_local(case, rank, world)
    counts = [int((want.ids == e).sum()) for e in range(num_local)]
    for synchronised in (True, False):
        stats = torch.zeros(num_local, dtype=torch.int32)
        x, ids, weights, handle, _ = buffer.dispatch(
            sent.x,
            sent.ids,
            sent.weights,
            stats,
            num_experts=case.num_experts,
            expert_alignment=4,
            do_cpu_sync=synchronised,
        )
        assert stats.tolist() == counts and len(ids) == (num_rows if synchronised else world * most)
        assert equal(top(x, num_rows), want.x) and torch.equal(ids[:num_rows], want.ids)
        assert torch.equal(weights[:num_rows], want.weights) and handle.topk_idx is not sent.ids
        aligned = [-(-count // 4) * 4 for count in counts]
        assert handle.num_recv_tokens_per_expert_list == (aligned if synchronised else [])
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
        assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == num_rows
        assert torch.equal(handle.recv_src_metadata[:num_rows, 0].long(), want.source * most + want.token)
        again, ids_again, _, same, _ = buffer.dispatch(sent.x, handle=handle)
        assert same is handle and equal(top(again, num_rows), want.x) and torch.equal(ids_again, ids)
        outputs = handle.routes.pad(expert_outputs(case, want), 7.0)
        y, back, _ = buffer.combine(outputs, handle, topk_weights=weights, bias=sent.bias)
        assert torch.equal(y, oracle.combine(case, rank, world, 2))
        assert torch.equal(back, sent.weights.masked_fill(sent.ids < 0, 0.0))

    for alignment, synchronised in ((1, True), (128, True), (4, False)):
        x, ids, weights, handle, _ = buffer.dispatch(
            sent.x,
            sent.ids,
            sent.weights,
            num_experts=case.num_experts,
            expert_alignment=alignment,
            do_cpu_sync=synchronised,
            do_expand=True,
        )
        values = x[0] if isinstance(x, tuple) else x
        assert ids is None and len(values) == len(weights) == handle.num_expanded_tokens
        place = handle.recv_src_metadata[:num_rows, 2:].long()
        start = 0
        for expert in range(num_local):  # rows of an expert in the order of (source rank, token), then padding
            row, slot = (want.ids == expert).nonzero(as_tuple=True)
            span = torch.arange(start, start + len(row))
            assert torch.equal(place[row, slot], span)
            assert int(handle.psum_num_recv_tokens_per_expert[expert]) == start + len(row)
            expected = tuple(t[row] for t in want.x) if isinstance(want.x, tuple) else want.x[row]
            actual = tuple(t[span] for t in x) if isinstance(x, tuple) else x[span]
            assert equal(actual, expected) and torch.equal(weights[span], want.weights[row, slot])
            start += -(-len(row) // alignment) * alignment
        assert not synchronised or start == handle.num_expanded_tokens
        assert int((place >= 0).sum()) == sum(counts)
        again, none, weights_again, _, _ = buffer.dispatch(sent.x, None, sent.weights, handle=handle, do_expand=True)
        assert equal(again, x) and none is None and torch.equal(weights_again, weights)
        outputs = torch.full((len(values), case.hidden), 7.0, dtype=case.dtype)
        outputs[place[place >= 0]] = oracle.outputs(case, want.source, want.token)[place >= 0]
        y, back, _ = buffer.combine(outputs, handle, topk_weights=weights)
        assert torch.equal(y, oracle.combine(case, rank, world))
        assert torch.equal(back, sent.weights.masked_fill(sent.ids < 0, 0.0))
    buffer.destroy()
    uninstall()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_elastic_buffer_has_the_bits_of_the_reference(case: Case, pools: dict[int, RankPool]) -> None:
    pools[4].run(elastic, case)


def low_latency(rank: int, world: int, case: Case) -> None:
    deep_ep = install()
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    sent, most = oracle.batch(case, rank), max(case.tokens) + 1
    assert isinstance(sent.x, Tensor)
    own = ExpertPlacement.of(case.num_experts, world).local_range(rank)
    for use_fp8, round_scale, use_ue8m0 in (
        (False, False, False),
        *(((True, False, False), (True, True, False), (True, True, True)) if case.hidden == 512 else ()),
    ):
        x, counts, handle, event, hook = buffer.low_latency_dispatch(
            sent.x,
            sent.ids,
            most,
            case.num_experts,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            return_recv_hook=True,
        )
        hook()
        values, scales = x if use_fp8 else (x, None)
        assert handle == (None, None, most, case.hidden, case.num_experts)
        assert values.shape == (len(own), world * most, case.hidden) and event.event is None
        outputs = torch.full(values.shape, float("nan"), dtype=case.dtype)
        for local, expert in enumerate(own):
            at = 0
            for source in range(world):
                peer = oracle.batch(case, source)
                token, slot = (peer.ids == expert).nonzero(as_tuple=True)
                span = slice(at, at + len(token))
                assert isinstance(peer.x, Tensor)
                if scales is None:
                    assert torch.equal(values[local, span], peer.x[token])
                else:
                    factor = scales[local, span]
                    if use_ue8m0:
                        assert factor.dtype == torch.int32
                        factor = torch.exp2(factor.contiguous().view(torch.uint8).float() - 127)
                    blocks = values[local, span].float().unflatten(1, (-1, 128))
                    error = (blocks * factor.unsqueeze(2)).flatten(1) - peer.x[token].float()
                    assert error.numel() == 0 or float(error.abs().max()) < 0.2
                outputs[local, span] = oracle.outputs(case, torch.full_like(token, source), token)[
                    torch.arange(len(token)), slot
                ]
                at += len(token)
            assert int(counts[local]) == at
        tokens = torch.arange(len(sent.ids))
        slots = oracle.outputs(case, torch.full_like(tokens, rank), tokens)
        weights = sent.weights.masked_fill(sent.ids < 0, 0.0).unsqueeze(-1)
        expected = oracle.in_order(slots.float() * weights).to(case.dtype)
        for zero_copy in (False, True):
            given = outputs
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = outputs
                given = torch.zeros_like(outputs)
            out = torch.empty_like(expected)
            y, _, hook = buffer.low_latency_combine(
                given, sent.ids, sent.weights, handle, zero_copy=zero_copy, return_recv_hook=True, out=out
            )
            hook()
            assert y is out and torch.equal(y, expected)
    uninstall()


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.fp8 and case.routing != "one"]
    + [
        Case("all tokens to one expert", routing="one", top_k=1),
        Case("hidden 512", hidden=512),
        Case("idle", (0, 5), 512),
    ],
    ids=lambda case: case.name,
)
def test_low_latency_calls(case: Case, pools: dict[int, RankPool]) -> None:
    pools[2].run(low_latency, case)


def faults(rank: int, world: int, _: None) -> dict[str, tuple[str, str]]:
    """Return what this rank raises if the last rank alone makes a mistake; then a correct call works."""
    deep_ep = install()
    buffer = deep_ep.Buffer(dist.group.WORLD)
    case = CASES[0]
    sent = oracle.batch(case, rank)
    assert isinstance(sent.x, Tensor)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(sent.ids, case.num_experts)
    dispatch = {
        "x": sent.x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": sent.ids,
        "topk_weights": sent.weights,
    }
    rows, _, weights, _, handle, _ = buffer.dispatch(**dispatch)
    wrong: dict[str, dict[str, Any]] = {
        "ids of floats": {"topk_idx": sent.ids.float()},
        "id out of range": {"topk_idx": sent.ids + case.num_experts},
        "weights of another dtype": {"topk_weights": sent.weights.double()},
        "weights of another shape": {"topk_weights": sent.weights[:, :1]},
        "x of integers": {"x": sent.x.int()},
        "x of one dimension": {"x": sent.x.flatten()},
        "x of no tensor": {"x": None},
        "x of no dimension": {"x": torch.tensor(1.0)},
        "experts of no vector": {"num_tokens_per_expert": per_expert[:, None]},
        "scales of another length": {"x": (sent.x.to(torch.float8_e4m3fn), torch.ones(1, 1))},
        "layout of other tokens": {"is_token_in_rank": in_rank[:-1]},
        "no layout": {"num_tokens_per_expert": None},
        "handle and ids": {"handle": handle},
        "allocation without an event": {"allocate_on_comm_stream": True},
        "handle of something else": {"handle": (1, 2), "topk_idx": None, "topk_weights": None},
        "rows of another width": {"x": sent.x[:, :-1]},
    }
    raised: dict[str, tuple[str, str]] = {}
    last = rank == world - 1

    def attempt(name: str, call: Callable[..., Any], right: dict[str, Any], changes: dict[str, Any]) -> None:
        try:
            call(**(right | changes if last else right))
            raised[name] = "", ""
        except Exception as error:
            raised[name] = type(error).__name__, str(error)
        assert torch.equal(buffer.dispatch(**dispatch)[0], rows), name

    for name, changes in wrong.items():
        attempt(name, buffer.dispatch, dispatch, changes)
    bias = torch.zeros_like(sent.x)
    combine = {"x": rows, "handle": handle, "topk_weights": weights, "bias": bias}
    combined: dict[str, dict[str, Any]] = {
        "combine of fewer rows": {"x": rows[:-1]},
        "combine of no tensor": {"x": None},
        "combine with another handle": {"handle": (1, 2)},
        "bias of other tokens": {"bias": bias[:-1]},
        "three biases": {"bias": (bias, bias, bias)},
        "no bias on one rank": {"bias": None},
        "weights of fewer rows": {"topk_weights": weights[:-1]},
        "weights of doubles": {"topk_weights": weights.double()},
        "no weights on one rank": {"topk_weights": None},
    }
    for name, changes in combined.items():
        attempt(name, buffer.combine, combine, changes)
    assert buffer.combine(**combine)[0].shape == sent.x.shape

    blocks, _, made, _, _ = buffer.low_latency_dispatch(sent.x, sent.ids, 20, case.num_experts, use_fp8=False)
    fixed = {"x": sent.x, "topk_idx": sent.ids, "num_max_dispatch_tokens_per_rank": 20, "num_experts": case.num_experts}
    for name, changes in {
        "more tokens than a block holds": {"num_max_dispatch_tokens_per_rank": 2},
        "one expert twice": {"topk_idx": torch.zeros_like(sent.ids)},
        "ids of floats, low latency": {"topk_idx": sent.ids.float()},
        "no ids, low latency": {"topk_idx": None},
        "ids without columns": {"topk_idx": sent.ids[:, :0]},
        "low-latency rows with scales": {"x": (sent.x.to(torch.float8_e4m3fn), torch.ones(len(sent.x), 1))},
        "low-latency x of no tensor": {"x": None},
    }.items():
        attempt(name, buffer.low_latency_dispatch, fixed, changes)
    combine = {"x": blocks, "topk_idx": sent.ids, "topk_weights": sent.weights, "handle": made}
    for name, changes in {
        "blocks of fewer experts": {"x": blocks[1:]},
        "low-latency weights of fewer tokens": {"topk_weights": sent.weights[1:]},
        "LogFMT": {"use_logfmt": True},
        "handle of the other dispatch": {"handle": handle},
    }.items():
        attempt(name, buffer.low_latency_combine, combine, changes)

    elastic = deep_ep.ElasticBuffer(dist.group.WORLD)
    given = {"x": sent.x, "topk_idx": sent.ids, "topk_weights": sent.weights, "num_experts": case.num_experts}
    attempt("no largest number of tokens", elastic.dispatch, given, {})
    given |= {"num_max_tokens_per_rank": max(case.tokens), "do_expand": True}
    attempt("more tokens than the largest number", elastic.dispatch, given, {"num_max_tokens_per_rank": 2})
    attempt("elastic x of no dimension", elastic.dispatch, given, {"x": torch.tensor(1.0)})
    expanded, _, slot_weights, made, _ = elastic.dispatch(**given)
    replay = {"x": sent.x, "topk_weights": sent.weights, "handle": made}
    for name, changes in {
        "replay of double weights": {"topk_weights": sent.weights.double()},
        "replay of another handle": {"handle": handle},
        "replay of fewer tokens": {"x": sent.x[1:], "topk_weights": sent.weights[1:]},
    }.items():
        attempt(name, elastic.dispatch, replay, changes)
    combine = {"x": expanded, "handle": made, "topk_weights": slot_weights, "bias": bias}
    for name, changes in {
        "fewer expanded rows": {"x": expanded[:-1]},
        "expanded rows of one dimension": {"x": expanded[:, 0]},
        "expanded weights of two dimensions": {"topk_weights": sent.weights},
        "bias of another width": {"bias": bias[:, 1:]},
    }.items():
        attempt(name, elastic.combine, combine, changes)
    assert elastic.combine(**combine)[0].shape == sent.x.shape
    uninstall()
    return raised


def test_bad_arguments_of_one_rank_raise_on_every_rank(pools: dict[int, RankPool]) -> None:
    others = {
        "rows of another width": "RankMismatch",
        "no bias on one rank": "RankMismatch",
        "no weights on one rank": "RankMismatch",
        "allocation without an event": "ConfigError",
        "LogFMT": "ConfigError",
    }
    for outcome in pools[2].run(faults, None):
        assert len(outcome) == 46 and others.keys() <= outcome.keys()
        for name, (kind, text) in outcome.items():
            assert kind == others.get(name, "InputError"), f"{name}: {kind}: {text}"


def low_latency_only(rank: int, world: int, mistakes: str) -> dict[str, tuple[str, str]]:
    """Return what this rank raises if the last rank makes mistakes in a group without other dispatchers."""
    deep_ep = install(timeout_s=20.0)
    group = dist.new_group(backend="gloo")
    buffer, case, last = deep_ep.Buffer(group), CASES[0], rank == world - 1
    sent = oracle.batch(case, rank)
    assert isinstance(sent.x, Tensor)
    raised: dict[str, tuple[str, str]] = {}

    def dispatch(x: Any) -> Any:
        return buffer.low_latency_dispatch(x, sent.ids, 20, case.num_experts, use_fp8=False)

    def combine(handle: Any) -> Any:
        return buffer.low_latency_combine(rows, sent.ids, sent.weights, handle)[0]

    def attempt(name: str, call: Callable[..., Any], arg: Any) -> None:
        try:
            call(arg)
            raised[name] = "", ""
        except Exception as error:
            raised[name] = type(error).__name__, str(error)

    if mistakes == "first":
        attempt("x", dispatch, None if last else sent.x)
    rows, _, handle, _, _ = dispatch(sent.x)
    if mistakes == "later":
        attempt("handle", combine, (1, 2) if last else handle)
        with torch.device("meta" if last else "cpu"):  # a default device other than that of the rows
            attempt("x", dispatch, None if last else sent.x)
    assert combine(handle).shape == sent.x.shape
    uninstall()
    dist.destroy_process_group(group)
    return raised


@pytest.mark.parametrize("mistakes", ["first", "later"])
def test_mistakes_in_a_group_with_low_latency_calls_only(mistakes: str, pools: dict[int, RankPool]) -> None:
    for raised in pools[2].run(low_latency_only, mistakes):
        assert raised
        for name, (kind, text) in raised.items():
            assert kind == "InputError" and name in text, f"{name}: {kind}: {text}"


def test_install_is_found_and_uninstall_removes_it() -> None:
    assert find_spec("deep_ep") is None
    try:
        module = install()
        assert find_spec("deep_ep") is not None and importlib.import_module("deep_ep") is module
        from deep_ep import Buffer as Installed, ElasticBuffer, EPHandle, topk_idx_t  # type: ignore[import-not-found]
        from deep_ep.utils import EventHandle, EventOverlap  # type: ignore[import-not-found]
        from deep_ep.utils.event import EventOverlap as Same  # type: ignore[import-not-found]

        assert issubclass(Installed, Buffer) and topk_idx_t is torch.int64 and Same is EventOverlap
        assert ElasticBuffer.backend == "auto" and EPHandle.__name__ == "EPHandle"
        EventOverlap(EventHandle()).current_stream_wait()
        with pytest.raises(InputError, match="async_finish"):
            EventOverlap().current_stream_wait()
        calls: list[int] = []
        event = EventOverlap(EventHandle())
        event.register_hook_after_wait(lambda: calls.append(1))
        with event(release_handle=True):
            assert calls == []
        assert calls == [1] and event.event is None
        config = Installed.get_dispatch_config(7)
        assert config.get_nvl_buffer_size_hint(10, 7) == config.get_rdma_buffer_size_hint(10, 7) == 0
        assert install(timeout_s=9.0) is not module and sys.modules["deep_ep"].Buffer.timeout_s == 9.0
    finally:
        uninstall()
    uninstall()
    assert find_spec("deep_ep") is None and "deep_ep.utils" not in sys.modules


def test_install_refuses_what_it_would_break(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="unknown dispatch backend 'nvshmem'"):
        install(backend="nvshmem")
    (tmp_path / "deep_ep.py").write_text("")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match="DeepEP is installed"):
            install()
        assert install(replace=True).__version__ == "2.1.0"
        uninstall()
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.fused_a2a", SimpleNamespace(HAVE_DEEP_EP=False))
    with pytest.raises(ConfigError, match=r"fused_a2a was imported before install"):
        install()
    with pytest.raises(ConfigError, match="needs group="):
        Buffer(None)
