"""``moe-comm place``: recorded loads, decisions and replays of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.observe.records import (
    ATTEMPTS,
    LOADS,
    METRICS,
    PLACEMENTS,
    Attempt,
    LoadLine,
    PlacementLine,
    SpanLine,
    append,
)
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import DecisionSettings, decide
from moe_plan.whatif.placement import study
from tests.support.synthetic import SyntheticRun, write_run

SKEWED = [4000, 3000, 2000, 1000]
CURRENT = Placement.contiguous(4, 2)
NEVER = DecisionSettings(every=1000)


def write(run: Path, steps: int = 10, ep: int = 2, zero: int = 0) -> None:
    """Write a run that switched after step 4."""
    append(run / ATTEMPTS, Attempt(0, ep, 0.0, 1.0, 1, "fresh", {"dp": ep, "ep": ep}))
    for step in range(1, steps + 1):
        append(run / LOADS, LoadLine(step, "a", [*SKEWED, *[999] * zero]))
    if zero:
        (run / "config.resolved.toml").write_text("[model]\nexperts = 4\n")
    decision = decide([SKEWED], CURRENT, DecisionSettings(every=4, window=4))
    assert decision.placement is not None
    append(run / PLACEMENTS, PlacementLine.of(4, "a", decision, CURRENT))
    kept = decide([SKEWED], decision.placement, DecisionSettings(every=4, window=4))
    append(run / PLACEMENTS, PlacementLine.of(8, "a", kept, decision.placement))


@pytest.mark.parametrize("zero", [0, 2])
def test_realised_ratios_follow_the_recorded_placements(tmp_path: Path, zero: int) -> None:
    write(tmp_path, zero=zero)
    result = study(tmp_path, [NEVER, DecisionSettings(every=4, window=4)])
    layer = result.layers[0]
    assert result.ranks == 2 and not result.costs
    assert layer.fixed == pytest.approx(1.4) and layer.best == 1.0 and layer.hottest == 1.0
    assert layer.realised == pytest.approx((4 * 1.4 + 6) / 10)
    assert [(line.step, line.switched, ratio) for line, ratio in layer.decisions] == [(4, True, 1.0), (8, False, 1.0)]
    assert layer.decisions[0][0].ratio_after == 1.0 and layer.decisions[0][0].placement != CURRENT
    assert [one.ratio for one in layer.replays] == pytest.approx([1.4, (4 * 1.4 + 6) / 10])


def test_other_numbers_of_ranks_ignore_the_recorded_decisions(tmp_path: Path) -> None:
    write(tmp_path)
    layer = study(tmp_path, [NEVER], ranks=4).layers[0]
    assert layer.decisions == () and layer.realised is None and layer.fixed == layer.hottest == 1.6


def test_runs_without_loads_or_with_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        study(tmp_path, [NEVER])
    (tmp_path / METRICS).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no expert loads.*observe\.loads=1"):
        study(tmp_path, [NEVER])
    append(tmp_path / LOADS, LoadLine(1, "a", SKEWED))
    with pytest.raises(ConfigError, match="ep 1"):
        study(tmp_path, [NEVER])
    assert study(tmp_path, [NEVER], ranks=2).layers[0].fixed == 1.4


def test_the_command_prints_layers_decisions_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(
        tmp_path / "run", SyntheticRun(ranks=4, steps=40, ranks_per_host=2, ep=2, layers=2, span_steps=(1, 10))
    )
    out = tmp_path / "place.json"
    assert cli.run(["place", str(run), "--every", "10", "--every", "20", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "layers.1.moe" in printed and "decisions of the run" in printed
    result = json.loads(out.read_text())
    assert result["ranks"] == 2 and [one["every"] for one in result["settings"]] == [10, 20]
    layer = result["layers"][0]
    assert layer["steps"] == [1, 10, 20, 30, 40] and layer["best"] <= layer["realised"] <= layer["fixed"]
    assert len(layer["decisions"]) == 5 and len(layer["replays"]) == 2
    assert cli.run(["place", str(run), "--ranks", "4", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["layers"][0]["realised"] is None and " - " in capsys.readouterr().out
    assert cli.run(["place", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", [(20, 5, 0.05), (100, 5, 0.05)]),
        ("--every 3", [(3, 3, 0.05)]),
        ("--every 8 --window 8 --window 2", [(8, 8, 0.05), (8, 2, 0.05)]),
        ("--every 8 --threshold 0.5", [(8, 5, 0.5)]),
        ("--every 8 --window 9", "window (9) must be at most every (8)"),
    ],
)
def test_each_option_of_the_command_takes_effect_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, expected: str | list[tuple[int, int, float]]
) -> None:
    write(tmp_path)
    out = tmp_path / "place.json"
    code = cli.run(["place", str(tmp_path), "--json", str(out), *options.split()])
    if isinstance(expected, str):
        assert code == 2 and expected in capsys.readouterr().err
    else:
        settings = json.loads(out.read_text())["settings"]
        assert [tuple(one[name] for name in ("every", "window", "threshold")) for one in settings] == expected


def test_lending_is_replayed_with_each_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    out = tmp_path / "place.json"
    assert cli.run(["place", str(tmp_path), "--balance", "1", "--balance", "64", "--json", str(out)]) == 0
    assert "experts lent in each step" in capsys.readouterr().out
    result = json.loads(out.read_text())
    layer = result["layers"][0]
    tight, loose = layer["lending"]
    assert (tight["rows"], loose["rows"]) == (1, 64)
    # Without the widths of experts, copies cost nothing.
    assert result["expert_bytes"] is None and tight["saved_s"] > 0 and "bytes_in_step" not in tight
    assert tight["before"] == loose["before"] == loose["ratio"] == layer["fixed"] > tight["ratio"]
    assert tight["copies"] > 0 == loose["copies"]
    write_spans(tmp_path, 'kind = "adamw"', "bfloat16")
    measured = study(tmp_path, [NEVER], limits=[1.0])
    weights, gradient = 3 * 16 * 8 * 2, 3 * 16 * 8 * 4
    lent = measured.layers[0].lending[0]
    assert measured.expert_bytes == (weights, gradient) and 0 < lent.resident < lent.copies
    sent = lent.copies * (2 * weights + gradient) - lent.resident * 2 * weights
    assert measured.lending_bytes(lent) == pytest.approx((sent, lent.residents * weights))
    # A row takes 0.4 s, and a step saves 2 rows of the busiest rank.
    assert measured.layers[0].lending[0].ratio == tight["ratio"]
    assert measured.layers[0].lending[0].saved_s == pytest.approx(0.8, rel=1e-3)


def write_spans(run: Path, optimizer: str, dtype: str) -> None:
    """Write the configuration, and the spans of step 1: 2 seconds of experts, and 1000 bytes in one second per rank."""
    text = f'[model]\nhidden = 16\nffn = 8\nexperts = 4\ndtype = "{dtype}"\n[optimizer]\n{optimizer}\n'
    (run / "config.resolved.toml").write_text(text)
    second = 10**9
    for rank in (0, 1):
        path, group = run / "spans" / f"rank-0000{rank}.jsonl", [0, 1]
        path.parent.mkdir(exist_ok=True)
        append(path, SpanLine(rank, "step", "step", 0, 3 * second, 1))
        append(path, SpanLine(rank, "compute", "experts", 0, 2 * second, 1, layer="a"))
        append(
            path, SpanLine(rank, "dispatch", "dispatch", 2 * second, 3 * second, 1, layer="a", group=group, nbytes=1000)
        )


@pytest.mark.parametrize(
    ("optimizer", "state", "dtype"),
    [
        ('kind = "adamw"', 2, "float32"),
        ('kind = "sgd"', 0, "bfloat16"),
        ('kind = "sgd"\nmomentum = 0.9', 1, "float32"),
    ],
)
def test_switches_cost_the_bytes_of_an_expert_at_the_rate_of_the_run(
    tmp_path: Path, optimizer: str, state: int, dtype: str
) -> None:
    write(tmp_path)
    write_spans(tmp_path, optimizer, dtype)
    result = study(tmp_path, [NEVER])
    assert result.costs and result.settings[0].seconds_per_row == pytest.approx(4 / sum(SKEWED))
    # A switch sends masters and state.
    assert result.settings[0].seconds_to_move == pytest.approx(3 * 16 * 8 * 4 * (1 + state) / 1000)
