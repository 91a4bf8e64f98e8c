"""``bench overlap``: end to end between network namespaces with tiny sizes, and its functions over loopback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.settings import OPERATORS, OverlapBench
from moe_comm.bench.hosts.namespaces import unavailable_reason
from moe_comm.bench.overlap import benchmark as overlap, operators as overlap_experts
from moe_comm.bench.overlap.benchmark import OverlapLayerContest, widths
from moe_comm.bench.overlap.contest import DIRECTIONS, PARTS, MeasuredRates, hidden_of
from moe_comm.errors import ConfigError, MissingDependency
from tests.pool import RankPool

TINY = OverlapBench(
    rows=(1, 32),
    width=32,
    ratios=(1.0,),
    chunks=2,
    tokens=40,
    hidden=32,
    ffn=(32,),
    warmup=0,
    rounds=1,
    seconds=0,
)


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "hosts can be created")
@pytest.mark.slow
def test_operators_and_layer_are_checked_and_timed_between_hosts(tmp_path: Path) -> None:
    for package in ("perfetto", "matplotlib", "transformers"):
        pytest.importorskip(package)
    trace, png = tmp_path / "out.perfetto-trace", tmp_path / "out.png"
    bench = replace(TINY, rows=(32,))
    returned = overlap.main(bench, str(tmp_path / "out.json"), str(trace), str(png))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["results"] == returned["results"]
    cases = [(op, direction) for op in OPERATORS for direction in DIRECTIONS]
    assert [(row["op"], row["direction"]) for row in result["results"]] == cases
    for row in result["results"]:
        assert row["hidden"] == pytest.approx(hidden_of(row)["hidden"]) and row["ratio"] == 1
        assert all(row[f"{part}_ms"] > 0 and row["cpu_ms"][part] > 0 for part in PARTS)
    assert result["slowest_vs_serial"] == max(row["vs_serial_paired"] for row in result["results"])
    assert all(row["vs_serial"] == row["overlapped_ms"] / row["serial_ms"] for row in result["results"])
    (layer,) = result["layer"]
    assert layer["skipped"] is None and layer["ffn"] == 32
    assert layer["speedup_vs_serial"] == layer["serial_ms"] / layer["overlapped_ms"]
    assert layer["speedup_vs_hf_ep"] == layer["hf_ep_ms"] / layer["overlapped_ms"]
    assert png.read_bytes().startswith(b"\x89PNG") and trace.stat().st_size > 1000


def test_missing_privileges_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("moe_comm.bench.hosts.namespaces.os.geteuid", lambda: 1000)
        with pytest.raises(ConfigError, match="root"):
            overlap.main(TINY)
    monkeypatch.setattr("moe_comm.bench.overlap.timeline.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"perfetto.*\.\[bench\]"):
        overlap.main(TINY, trace="out.perfetto-trace")


# --- ranks over loopback ---


def check_all_operators(rank: int, world: int, bench: OverlapBench) -> list[tuple[str, list[str]]]:
    """Check each operator and direction. Return the parts that returned a result."""
    result = []
    for operator in OPERATORS:
        for direction in DIRECTIONS:
            contest = overlap.CONTESTS[operator](direction, bench, 20, 48)
            contest.check()
            result.append((contest.name, [name for name, work in contest.parts().items() if work() is not None]))
    return result


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_operator_equals_its_serial_form(pool2: RankPool, deterministic: bool) -> None:
    result = pool2.run(check_all_operators, replace(TINY, deterministic=deterministic, experts=6, top_k=3), timeout=60)
    names = [f"{operator} {direction}" for operator in OPERATORS for direction in DIRECTIONS]
    assert result[0] == result[1] == [(name, list(PARTS)) for name in names]


def error_with_one_wrong_bit(rank: int, world: int, operator: str) -> str:
    """Return the error message of ``check`` for an operator whose result differs in the last bit of one element."""
    contest = overlap.CONTESTS[operator]("forward", TINY, 20, 48)
    original = contest.overlapped

    def wrong() -> Tensor:
        y = original()
        assert isinstance(y, Tensor)
        y[-1, -1] = torch.nextafter(y[-1, -1], torch.tensor(9e9))
        return y

    contest.overlapped = wrong
    try:
        contest.check()
    except WrongAnswer as error:
        return str(error)
    return ""


@pytest.mark.parametrize("operator", ["gather_matmul", "matmul_combine"])
def test_an_operator_with_different_bits_is_not_timed(pool2: RankPool, operator: str) -> None:
    assert all(
        operator in message and "differs" in message
        for message in pool2.run(error_with_one_wrong_bit, operator, timeout=60)
    )


def run_benchmark(rank: int, world: int, bench: OverlapBench) -> Any:
    return overlap.run((bench, 1e8, True), 1)


def test_the_same_results_and_timelines_on_every_rank(pool2: RankPool) -> None:
    bench = replace(TINY, operators=("dispatch_matmul",), peers=False)
    (result, steps), (other, same_steps) = pool2.run(run_benchmark, bench, timeout=120)
    assert result == other and steps == same_steps
    titles = {(step.title, step.variant) for step in steps}
    cases = ("serial", "overlapped")
    assert titles == {(title, v) for title in (*_names("dispatch_matmul"), "MoE layer of width 32") for v in cases}
    assert [row["rows"] for row in result["results"]] == [1, 32, 1, 32]
    assert result["layer"][0]["skipped"] == "peers=False" and result["layer"][0]["speedup_vs_hf_ep"] is None
    result |= overlap.slowest(result["results"]) | {"settings": vars(bench), "link_gbit_measured": [1.0]}
    result["machine"] = {"cpu": "any", "cores": 2, "isa": "none"}
    assert [table.row_count for table in overlap.tables(result)] == [4, 3]


def _names(operator: str) -> list[str]:
    return [f"{operator} {direction}" for direction in DIRECTIONS]


def compare_layers(rank: int, world: int, arg: None) -> tuple[bool, bool]:
    """Return whether the layers overlap, and whether a layer with a different weight is detected."""
    contest = OverlapLayerContest(replace(TINY, peers=False), 32)
    modules: list[Any] = [runner.contestant.module for runner in contest.runners.values()]
    contest.check()
    with torch.no_grad():
        modules[1].experts.w2[0, 0, 0] += 1
    try:
        contest.check()
        differs = False
    except WrongAnswer:
        differs = True
    dist.barrier()
    return [module.overlap is not None for module in modules] == [False, True], differs


def test_the_layers_differ_only_in_overlap_and_are_compared_in_bits(pool2: RankPool) -> None:
    assert pool2.run(compare_layers, None, timeout=60) == [(True, True)] * 2


# --- arithmetic ---


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(48, 8, 2), (16, 4, 4), (64, 16, 1)])
def test_routing_is_random_and_balanced(tokens: int, experts: int, top_k: int) -> None:
    ids_TK = overlap_experts.balanced_ids(tokens, experts, top_k, torch.Generator().manual_seed(0))
    assert ids_TK.shape == (tokens, top_k)
    assert torch.equal(ids_TK.flatten().bincount(minlength=experts), torch.full((experts,), tokens * top_k // experts))
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())
    assert not torch.equal(ids_TK[:experts], ids_TK[experts : 2 * experts])


def test_an_incomplete_block_of_tokens_is_routed() -> None:
    ids_TK = overlap_experts.balanced_ids(1, 16, 2, torch.Generator().manual_seed(0))
    assert ids_TK.shape == (1, 2) and int(ids_TK.min()) >= 0 and int(ids_TK.max()) < 16


def test_expert_gemms_equal_a_loop() -> None:
    generator, sizes = torch.Generator().manual_seed(0), (3, 0, 5)
    rows, grad = (torch.randn(8, width, generator=generator) for width in (16, 32))
    b_EDG = torch.randn(3, 16, 32, generator=generator)
    expected = torch.cat([r @ b for r, b in zip(rows.split(sizes), b_EDG, strict=True)])
    torch.testing.assert_close(overlap_experts.products(rows, sizes, b_EDG), expected)
    result = overlap_experts.weight_products(grad, rows, sizes, b_EDG.transpose(1, 2).contiguous())
    expected = torch.stack([g.t() @ r for g, r in zip(grad.split(sizes), rows.split(sizes), strict=True)])
    torch.testing.assert_close(result, expected)


def test_hidden_is_the_saved_fraction_of_the_smaller_time() -> None:
    times = {"serial_ms": 30.0, "overlapped_ms": 21.0, "compute_ms": 20.0, "comm_ms": 10.0, "chunked_comm_ms": 8.0}
    assert hidden_of(times) == {"hidden": 0.875, "vs_serial": 0.7, "ratio_measured": 0.5}
    assert hidden_of(times | {"overlapped_ms": 20.0})["hidden"] == 1.0
    assert hidden_of(times | {"overlapped_ms": 19.9})["hidden"] == 1.0, "values above 1 are noise"
    case = {"op": "a", "direction": "forward", "ratio": 1}
    rows = [case | {"rows": n, "vs_serial_paired": ratio} for n, ratio in ((1, 0.9), (2, 1.1))]
    worst = overlap.slowest(rows)
    assert worst["slowest_vs_serial"] == 1.1 and worst["slowest_case"]["rows"] == 2
    assert overlap.slowest([])["slowest_vs_serial"] is None


def test_the_width_of_a_layers_experts_follows_from_the_rates() -> None:
    # For 2 ranks, the width at which a GEMM takes as long as a transfer is flops_per_s / bytes_per_s.
    rates = MeasuredRates(flops_per_s=64e9, bytes_per_s=0.1e9)
    assert rates.balanced(2) == 640
    assert widths(replace(TINY, ffn=()), rates) == (256,)
    assert widths(replace(TINY, ffn=(96, 7)), rates) == (96, 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"operators": ("transpose",)}, "transpose"),
        ({"operators": (), "layer": False}, "nothing to measure"),
        ({"rows": ()}, "rows"),
        ({"ratios": (0.0,)}, "ratios"),
        ({"experts": 5}, "multiple of the"),
        ({"top_k": 17}, "top_k 17"),
        ({"chunks": "many"}, "chunks"),
    ],
)
def test_invalid_settings_are_rejected(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **changed)
