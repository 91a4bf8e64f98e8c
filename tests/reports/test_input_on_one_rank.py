"""Invalid input on one rank: a typed error there that names the fault, one on the other rank that names the rank, and
the next call works. A rank that waits for the other one raises PeerTimeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.integrations.deepep import Buffer, ElasticBuffer
from moe_comm.layers.parallel.collectives import gather_dim, scatter_sum, sum_over, swap_dims
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from tests.dispatch import cases
from tests.dispatch.test_contract import BACKENDS, usable
from tests.dispatch.workers import ErrorText, Job, build, caught
from tests.pool import RankPool, on_ranks

T, D, K, E = 6, 8, 2, 8
TIMEOUT_S = 20.0
Faults = dict[str, tuple[ErrorText, bool]]
"""The error of each fault, and whether the next call was right."""


BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "None": (lambda x: None, "NoneType"),
    "a scalar": (lambda x: x.flatten()[0], ""),
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "on meta": (lambda x: x.to("meta"), "meta"),
    "sparse": (lambda x: x.to_sparse(), "sparse"),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "qint8"),
    "nested": (lambda x: torch.nested.as_nested_tensor(list(x)), "nested"),
}


def check(results: list[Faults], count: int) -> None:
    """Rank 0 has InputError with the text of its fault; rank 1 an error of the library that names rank 0."""
    first, second = results
    assert len(first) == count
    for name, ((kind, text), works_on) in first.items():
        expected = BAD[name.rpartition(": ")[2]][1] if name.rpartition(": ")[2] in BAD else ""
        assert kind == "InputError" and expected in text and works_on, f"{name}: {kind}: {text}, {works_on}"
        (kind, text), works_on = second[name]
        assert kind in ("InputError", "PeerRaised") and "rank 0" in text and works_on, f"{name}: {kind}: {text}"


def operations(rank: int, world: int, job: Job) -> Faults:
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    other = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD = torch.arange(T * D, dtype=torch.float32).view(T, D)
    ids_TK, weights_TK = torch.arange(T * K).view(T, K) % E, torch.full((T, K), 0.5)
    extra_TKX = torch.arange(T * K * 2.0).view(T, K, 2)
    sent, others = dispatcher.dispatch(x_TD, ids_TK), other.dispatch(x_TD, ids_TK)

    def backward(bad: Callable[[Tensor], Any]) -> None:
        x = x_TD.clone().requires_grad_()
        y_TD = dispatcher.combine(dispatcher.dispatch(x, ids_TK).rows_RD, weights_TK, sent.handle)
        y_TD.backward(bad(torch.ones_like(y_TD)))

    calls: dict[str, Callable[[Callable[[Any], Any]], object]] = {
        "x": lambda bad: dispatcher.dispatch(bad(x_TD), ids_TK),
        "ids": lambda bad: dispatcher.dispatch(x_TD, bad(ids_TK)),
        "extra": lambda bad: dispatcher.dispatch(x_TD, ids_TK, extra_TKX=bad(extra_TKX)),
        "rows": lambda bad: dispatcher.combine(bad(sent.rows_RD), weights_TK, sent.handle),
        "weights": lambda bad: dispatcher.combine(sent.rows_RD, bad(weights_TK), sent.handle),
        "spread": lambda bad: dispatcher.spread(bad(x_TD), sent.handle),
    }
    acts = {f"{name}: {kind}": (call, bad) for name, call in calls.items() for kind, (bad, _) in BAD.items()}
    del acts["extra: None"]  # RankMismatch: the ranks disagree on whether there are extra values
    single: dict[str, tuple[Callable[..., object], Callable[[Any], Any]]] = {
        "combine without a handle": (
            lambda bad: dispatcher.combine(sent.rows_RD, weights_TK, bad(sent.handle)),
            lambda _: None,
        ),
        "combine with another's handle": (
            lambda bad: dispatcher.combine(sent.rows_RD, weights_TK, bad(sent.handle)),
            lambda _: others.handle,
        ),
        "spread without a handle": (lambda bad: dispatcher.spread(x_TD, bad(sent.handle)), lambda _: None),
        "label": (lambda bad: dispatcher.dispatch(x_TD, ids_TK, label=bad("moe")), lambda _: None),
        "no memory": (
            lambda bad: dispatcher.dispatch(bad(x_TD), ids_TK),
            lambda _: torch.zeros(1).expand(T, 2**50),  # one number, of which no dense copy can be allocated
        ),
        "gradient: sparse": (backward, BAD["sparse"][0]),
    }
    outcomes: Faults = {}
    for name, (act, bad) in (acts | single).items():
        given = bad if rank == 0 else lambda good: good
        raised = caught(lambda act=act, given=given: act(given))  # type: ignore[misc]
        again = dispatcher.dispatch(x_TD, ids_TK)
        y_TD = dispatcher.combine(again.rows_RD, weights_TK, again.handle)
        outcomes[name] = raised, torch.equal(again.rows_RD, sent.rows_RD) and torch.equal(y_TD, x_TD)
    return outcomes


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_an_operation(backend: str, pool2: RankPool) -> None:
    usable(backend, "cpu")
    check(pool2.run(operations, Job(backend, timeout_s=TIMEOUT_S)), 6 * len(BAD) - 1 + 6)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_dtype_on_one_rank_is_a_mismatch(rank: int, world: int, backend: str) -> None:
    """What differs between ranks would be read as something else."""
    usable(backend, "cpu")
    job = Job(backend, timeout_s=TIMEOUT_S)
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = torch.ones(T, D), torch.arange(T * K).view(T, K) % E
    extra_TKX = torch.arange(T * K * 2.0).view(T, K, 2)
    sent = dispatcher.dispatch(x_TD, ids_TK, extra_TKX=extra_TKX)
    first = rank == 0
    acts: dict[str, Callable[[], object]] = {
        "extra values": lambda: dispatcher.dispatch(x_TD, ids_TK, extra_TKX=extra_TKX.int() if first else extra_TKX),
        "extra values of spread": lambda: dispatcher.spread(x_TD, sent.handle, extra_TKX.int() if first else extra_TKX),
        "rows": lambda: dispatcher.dispatch(x_TD.bfloat16() if first else x_TD, ids_TK),
        "presence": lambda: dispatcher.dispatch(x_TD, ids_TK, extra_TKX=None if first else extra_TKX),
    }
    for name, act in acts.items():
        kind, text = caught(act)
        assert kind == "RankMismatch", f"{name}: {kind}: {text}"
        again = dispatcher.dispatch(x_TD, ids_TK.int() if first else ids_TK, extra_TKX=extra_TKX)
        assert again.extra_RX is not None and sent.extra_RX is not None
        assert torch.equal(again.extra_RX, sent.extra_RX), name


def buffers(rank: int, world: int, arg: None) -> Faults:
    """Words of equal width that mean something else on one rank, and values that cannot be sent."""
    assert dist.group.WORLD is not None
    elastic, buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8), Buffer(dist.group.WORLD)
    x_TD, ids_TK, weights_TK = torch.ones(T, 256).bfloat16(), torch.arange(T * K).view(T, K) % 4, torch.ones(T, K)
    fp8 = x_TD.to(torch.float8_e4m3fn), torch.ones(T, K)
    layout = buffer.get_dispatch_layout(ids_TK, 4)
    kept = {"is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}
    first = rank == 0

    def send(x: Any, weights: Any = weights_TK) -> Any:
        return elastic.dispatch(x, ids_TK, weights, num_experts=4)

    good = send(x_TD)[0]
    acts: dict[str, Callable[[], object]] = {
        "weights against scales": lambda: send(x_TD) if first else send(fp8, None),
        "dtype of scales": lambda: send(fp8 if first else (fp8[0], fp8[1].int()), None),
        "presence of weights": lambda: send(x_TD, None if first else weights_TK),
        "x: None": lambda: send(None if first else x_TD),
        "x: on meta": lambda: send(x_TD.to("meta") if first else x_TD),
        "weights: sparse": lambda: send(x_TD, weights_TK.to_sparse() if first else weights_TK),
        "first interface, weights: sparse": lambda: buffer.dispatch(
            x_TD, topk_idx=ids_TK, topk_weights=weights_TK.to_sparse() if first else weights_TK, **kept
        ),
    }
    outcomes: Faults = {}
    for name, act in acts.items():
        raised = caught(act)
        outcomes[name] = raised, torch.equal(send(x_TD)[0], good)
    return outcomes


def test_of_deepep_buffers(pool2: RankPool) -> None:
    results = pool2.run(buffers)
    names = list(results[0])
    for outcomes in results:
        for name in names[:3]:
            (kind, text), works_on = outcomes.pop(name)
            assert kind == "RankMismatch" and works_on, f"{name}: {kind}: {text}"
    check(results, len(names) - 3)


def layers(rank: int, world: int, overlap: Overlap | None) -> Faults:
    layer = MoELayer.build(
        MoEConfig(D, 16, RouterConfig(4, K)), dist.group.WORLD, seed=0, label="moe.1", overlap=overlap
    )
    x_TD = torch.arange(T * D, dtype=torch.float32).view(T, D) / 50
    good = layer(x_TD)
    routing = layer.router(x_TD)
    bad_routing = routing._replace(ids_TK=routing.ids_TK.to_sparse())
    acts: dict[str, Callable[[], object]] = {
        f"x: {name}": lambda bad=bad: layer(bad(x_TD) if rank == 0 else x_TD)  # type: ignore[misc]
        for name, (bad, _) in BAD.items()
    }
    acts["routing: sparse"] = lambda: layer(x_TD, bad_routing if rank == 0 else routing)
    outcomes: Faults = {}
    for name, act in acts.items():
        raised = caught(act)
        outcomes[name] = raised, torch.equal(layer(x_TD), good)
    return outcomes


@pytest.mark.parametrize("overlap", [None, Overlap(executor="pipelined")], ids=["serial", "pipelined"])
def test_of_a_layer(overlap: Overlap | None, pool2: RankPool) -> None:
    check(pool2.run(layers, overlap), len(BAD) + 1)


def collectives(rank: int, world: int, arg: None) -> Faults:
    group = dist.group.WORLD
    x_SD, w_ND = torch.arange(4.0 * D).view(4, D), torch.ones(4, D)
    calls: dict[str, Callable[[Any], Any]] = {
        "gather_dim": lambda x: gather_dim(x, group, 0),
        "scatter_sum": lambda x: scatter_sum(x, group, 0),
        "sum_over": lambda x: sum_over(x, group),
        "swap_dims": lambda x: swap_dims(x, group, 0, 1),
        "gather_matmul": lambda x: gather_matmul(x, w_ND, group),
        "matmul_scatter": lambda x: matmul_scatter(x, w_ND, group),
    }
    outcomes: Faults = {}
    for name, call in calls.items():
        good = call(x_SD)
        for kind in ("None", "on meta", "sparse"):
            raised = caught(lambda call=call, kind=kind: call(BAD[kind][0](x_SD) if rank == 0 else x_SD))  # type: ignore[misc]
            outcomes[f"{name}: {kind}"] = raised, torch.equal(call(x_SD), good)
    return outcomes


def test_of_a_collective(pool2: RankPool) -> None:
    check(pool2.run(collectives), 18)


def overlapped(rank: int, world: int, job: Job) -> Faults:
    dispatcher: Any = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK, weights_TK = torch.ones(T, D), torch.arange(T * K).view(T, K) % E, torch.ones(T, K)
    w_EGD, w_EDF = torch.ones(E // world, 4, D), torch.ones(E // world, D, 4)

    def run(x: Any = x_TD, w: Any = w_EGD, weights: Any = weights_TK) -> Tensor:
        h_RG, dispatch = dispatch_matmul(dispatcher, x, ids_TK, w, Overlap(chunks=2))
        return matmul_combine(h_RG, w_EDF, weights, dispatch)

    good = run()
    outcomes: Faults = {}
    for kind in ("None", "complex", "on meta", "sparse"):
        for name, value in (("x", x_TD), ("w", w_EGD), ("weights", weights_TK)):
            raised = caught(lambda n=name, v=value, k=kind: run(**({n: BAD[k][0](v)} if rank == 0 else {})))  # type: ignore[misc]
            outcomes[f"{name}: {kind}"] = raised, torch.equal(run(), good)
    return outcomes


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_of_an_overlapped_operator(backend: str, pool2: RankPool) -> None:
    check(pool2.run(overlapped, Job(backend, timeout_s=TIMEOUT_S)), 12)
