"""``bench dispatch`` end to end at tiny sizes: keys, agreement of all contestants, and rejection of wrong results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.bench.common import report
from moe_comm.bench.common.inputs import (
    WrongAnswer,
    check_result,
    expected_rows,
    expected_sum,
    expected_y,
    make_ids,
    make_inputs,
    make_x,
    relative_error,
)
from moe_comm.bench.common.settings import DISPATCH_PEERS, DispatchBench, Dtype
from moe_comm.bench.dispatch import benchmark as dispatch, mpi_ranks
from moe_comm.dispatch import make_dispatcher
from moe_comm.errors import ConfigError

TINY = DispatchBench(ranks=2, tokens=33, hidden=48, experts=7, top_k=3, warmup=1, iterations=2)
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the benchmark on two ranks and return the result from its output file."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    returned = dispatch.main(TINY, str(path))
    from_file: dict[str, Any] = json.loads(path.read_text())
    assert from_file == returned
    return from_file


def test_the_result_has_all_documented_keys(result: dict[str, Any]) -> None:
    for key in (*(f"{phase}_ms" for phase in PHASES), "dispatch_limit_ms", "combine_limit_ms", "limit_ratio"):
        assert result[key] > 0, key
    assert result["settings"]["tokens"] == TINY.tokens
    assert result["settings"]["iterations"] == TINY.iterations
    assert {"cpu", "cores", "isa", "versions"} <= result["machine"].keys()
    assert set(result["overhead_us"]) == {"dispatch", "combine"}


def test_ratios_follow_from_the_times(result: dict[str, Any]) -> None:
    own_ms = result["dispatch_ms"] + result["combine_ms"]
    limit = result["dispatch_limit_ms"] + result["combine_limit_ms"]
    assert result["limit_ratio"] == pytest.approx(own_ms / limit)
    for peer in result["peers"].values():
        assert peer["speedup"] == pytest.approx((peer["dispatch_ms"] + peer["combine_ms"]) / own_ms)
        assert peer["speedup_dispatch"] == pytest.approx(peer["dispatch_ms"] / result["dispatch_ms"])


def test_every_peer_is_measured_or_skipped_with_a_reason(result: dict[str, Any]) -> None:
    assert set(result["peers"]) | set(result["skipped"]) == set(DISPATCH_PEERS)
    assert {"torch_gloo", "torch_gloo_tuned"} <= result["peers"].keys()
    if mpi_ranks.unavailable_reason() is None:
        assert {"torch_mpich", "torch_mpich_tuned"} <= result["peers"].keys(), result["skipped"]
        assert "mpiexec" in result["peers"]["torch_mpich"]["measured"]


def test_moe_comm_matches_plain_torch_in_bits_and_peers_within_tolerance(result: dict[str, Any]) -> None:
    assert result["max_error"]["moe_comm"]["combine"] == 0.0
    assert all(error < 1e-5 for errors in result["max_error"].values() for error in errors.values())


def test_a_result_contains_its_settings(result: dict[str, Any]) -> None:
    assert DispatchBench.from_dict(result["settings"]) == TINY


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_rank_runs_in_every_dtype(dtype: Dtype) -> None:
    settings = replace(TINY, ranks=1, dtype=dtype, peers=("torch_gloo", "torch_gloo_tuned"))
    (result,) = dispatch.measure_all([settings])
    assert set(result["peers"]) == set(settings.peers)
    assert result["dispatch_limit_ms"] > 0


def test_forward_only_and_zero_tokens_are_measured() -> None:
    settings = replace(TINY, ranks=1, peers=("torch_gloo_tuned",))
    forward_only, empty = dispatch.measure_all([replace(settings, backward=False), replace(settings, tokens=0)])
    assert forward_only["dispatch_backward_ms"] is None
    assert empty["dispatch_ms"] > 0


def test_wrong_rows_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY, ranks=1)
    inputs = make_inputs(settings, 0)
    contestant = dispatch.MoeCommDispatch(make_dispatcher(settings.experts), settings, inputs)
    monkeypatch.setattr(dispatch, "expected_rows", lambda s, rank: expected_rows(s, rank).flip(0))
    with pytest.raises(WrongAnswer, match="dispatch differs"):
        contestant.check()


def test_nan_and_wrong_shapes_are_rejected() -> None:
    expected = torch.ones(2, 3)
    assert relative_error(torch.full((2, 3), float("nan")), expected) == float("inf")
    assert relative_error(torch.ones(3, 2), expected) == float("inf")
    with pytest.raises(WrongAnswer):
        check_result("x", "y", torch.full((2, 3), float("nan")), expected, bits=False)


def test_inputs_are_seeded_distinct_and_differ_between_ranks() -> None:
    ids_TK = make_ids(TINY, 0)
    assert torch.equal(ids_TK, make_ids(TINY, 0))
    assert not torch.equal(ids_TK, make_ids(TINY, 1))
    assert not torch.equal(make_x(TINY, 0), make_x(TINY, 1))
    assert all(len(set(row)) == TINY.top_k for row in ids_TK.tolist())
    inputs = make_inputs(TINY, 0)
    unweighted = expected_sum(inputs, None, inputs.x_TD)
    assert relative_error(unweighted, inputs.x_TD * inputs.scale_E[inputs.ids_TK].sum(1, keepdim=True)) < 1e-6
    assert expected_y(inputs).shape == inputs.x_TD.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 8}, "top_k"),
        ({"ranks": 8}, "ranks"),
        ({"dtype": "float8"}, "float8"),
        ({"backend": "carrier_pigeon"}, "carrier_pigeon"),
        ({"peers": ("nccl",)}, "nccl"),
        ({"hidden": 0}, "hidden"),
        ({"device": "cuda"}, "ranks=2"),
    ],
)
def test_the_error_names_the_invalid_setting(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)


def test_an_unwritable_path_is_rejected_before_measuring(tmp_path: Path) -> None:
    report.check_writable(None)
    report.check_writable("-")
    report.check_writable(str(tmp_path / "new" / "out.json"))
    with pytest.raises(IsADirectoryError, match="directory"):
        report.check_writable(str(tmp_path))
