"""``bench train`` end to end at a tiny size: all contestants train the same model, and the arithmetic of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.settings import TRAIN_PEERS
from moe_comm.bench.train import benchmark as train
from moe_comm.bench.train.settings import RIVALS, TRAIN_PRESETS, TrainBench, Variant
from moe_comm.cli import run
from moe_comm.errors import ConfigError
from tests.bench.tiny_train import TINY

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the benchmark on two ranks and return the result from its output file."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    returned = train.main(TINY, str(path))
    from_file: dict[str, Any] = json.loads(path.read_text())
    assert from_file == returned
    return from_file


def test_all_contestants_have_the_same_losses(result: dict[str, Any]) -> None:
    assert set(result["peers"]) == set(TINY.peers) and result["skipped"] == {}
    assert all(row["loss_rel_diff"] < 1e-5 for row in result["peers"].values())
    assert len(result["losses"]) == 3 and result["losses"][-1] < result["losses"][0]
    over_links = {"hosts", "link_gbit", "ranks_per_host", "bytes_per_link", "exposed_communication_ms", "variants"}
    assert not over_links & (set(result) | set(result["settings"]) | set(result["peers"]["hf_ddp"]))


def test_rates_and_speedups_follow_from_the_times(result: dict[str, Any]) -> None:
    for row in (result, *result["peers"].values()):
        assert row["tokens_per_s"] == pytest.approx(TINY.tokens / row["step_ms"] * 1e3)
        assert row["mfu"] == pytest.approx(
            row["tokens_per_s"] * result["flops_per_token"] / result["gemm_gflops"] * 1e-9
        )
    for row in result["peers"].values():
        assert row["speedup"] == pytest.approx(row["step_ms"] / result["step_ms"])
    rivals = {name: row["speedup"] for name, row in result["peers"].items() if name in RIVALS}
    assert result["speedup"] == min(rivals.values()) == rivals[result["best_peer"]]
    assert result["speedup_over_all"] == min(row["speedup"] for row in result["peers"].values())


def test_the_parts_of_a_step_add_up(result: dict[str, Any]) -> None:
    step = result["step"]
    parts = ("compute", "communication", "data", "checkpoint", "loop")
    # Each part is a separate median, so the sum is approximate.
    assert sum(step[part] for part in parts) == pytest.approx(1, abs=0.2)
    assert sum(step["seconds"][part] for part in parts) == pytest.approx(step["seconds"]["total"], rel=0.2)
    assert 0 < step["communication"] < step["compute"] + 1 and step["checkpoint"] == 0


@pytest.mark.slow
def test_a_variant_that_moves_experts_has_the_same_losses_and_reports_its_switches() -> None:
    moving = Variant.parse("placed:placement.kind=relocate,placement.every=1,placement.window=1,placement.threshold=0")
    result = train.main(replace(TINY, peers=(), steps=4, variants=(moving,)))
    row = result["variants"]["placed"]
    assert row["loss_rel_diff"] == 0  # the bits are those of fixed experts
    assert 0 < row["step"]["communication"] < 1 and 0 < result["step"]["communication"] < 1
    placement = row["placement"]
    assert (placement["switches"] > 0) == (placement["moved_bytes"] > 0)
    assert placement["busiest_over_mean"]["before"] > 1 and placement["busiest_over_mean"]["after"] >= 1
    assert "placement" not in result  # moe_comm itself has fixed experts


def test_contestants_with_different_losses_are_rejected() -> None:
    def contestant(name: str, *losses: float) -> Any:
        return SimpleNamespace(name=name, losses=list(losses))

    train._check([contestant("moe_comm", 5.0), contestant("other", 5.004)])
    train._check([contestant("moe_comm", 5.0, 4.0), contestant("other", 5.0, 4.03)])
    with pytest.raises(WrongAnswer, match=r"other: the loss of step 1 is 5\.006, but that of moe_comm is 5"):
        train._check([contestant("moe_comm", 5.0), contestant("other", 5.006)])
    with pytest.raises(WrongAnswer, match="step 2"):
        train._check([contestant("moe_comm", 5.0, 4.0), contestant("other", 5.0, float("nan"))])


def test_one_rank_compares_single_process_loops_only() -> None:
    names, skipped = train.select_contestants(replace(TINY, ranks=1, peers=TRAIN_PEERS))
    assert names == ["moe_comm", "hf_one_process"]
    assert set(skipped) == set(TRAIN_PEERS) - {"hf_one_process"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peers": ("nobody",)}, "unknown peer 'nobody'"),
        ({"experts": 7}, "experts must be divisible by ranks"),
        ({"sharding": "zero3"}, "unknown sharding 'zero3'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"vocab": 100}, "vocab must be at least 257"),
        ({"hosts": 3}, "ranks must be divisible by hosts"),
        ({"settings": ("parallel.epp=1",)}, "moe_comm: .*unknown key 'parallel.epp'"),
        ({"variants": (Variant("a", ("payload.combine=fp99",)),)}, "a: .*payload.combine"),
        ({"variants": (Variant("a", ("model.hidden=8",)),)}, "a: model.hidden is the same for all contestants"),
        ({"variants": (Variant("hf_ddp", ("parallel.ep=1",)),)}, "a name that no other contestant has; got hf_ddp"),
    ],
)
def test_impossible_train_settings_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)


def test_a_variant_is_parsed_and_changes_only_its_own_configuration() -> None:
    variant = Variant.parse("split:parallel.pp=2,parallel.stage_layers=[1,1],payload.combine=bf16")
    assert variant.name == "split"
    assert variant.overrides == ("parallel.pp=2", "parallel.stage_layers=[1,1]", "payload.combine=bf16")
    bench = replace(TINY, sharding="zero1", settings=("parallel.ep=1",), variants=(variant,))
    peers, own, split = (bench.config(name) for name in (None, "moe_comm", "split"))
    assert (peers.parallel.ep, own.parallel.ep, split.parallel.ep) == (None, 1, 1)
    assert (own.parallel.pp, split.parallel.pp, split.parallel.stage_layers) == (1, 2, [1, 1])
    assert {config.parallel.sharding for config in (peers, own, split)} == {"zero1"}
    assert (own.payload.combine, split.payload.combine) == ("same", "bf16")
    assert peers.model == own.model == split.model
    for text in ("ep1", ":parallel.ep=1", "a b:parallel.ep=1", "ep1:parallel.ep"):
        with pytest.raises(ConfigError, match="NAME:KEY=VALUE"):
            Variant.parse(text)


def test_presets_are_valid_and_the_command_reports_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(TrainBench(**preset).tokens > 0 for preset in TRAIN_PRESETS.values())
    assert run(["bench", "train", "--peer", "nobody"]) == 2
    assert "unknown peer 'nobody'" in capsys.readouterr().err
    assert run(["bench", "train", "--hosts", "2", "--variant", "a:parallel.epp=1"]) == 2
    assert "unknown key 'parallel.epp'" in capsys.readouterr().err
    assert run(["bench", "train", "--hosts", "2", "--ranks", "3"]) == 2
    assert "2 hosts x 1 ranks per host are 2; got --ranks 3" in capsys.readouterr().err
