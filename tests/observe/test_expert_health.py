"""Expert load metrics, and the series that are written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_comm.layers.moe.load import LayerLoad
from moe_comm.observe.records import LoadLine, read_lines
from moe_comm.train.metrics import (
    NO_LOAD,
    ExpertLoad,
    JsonlSink,
    LoadsSink,
    StepReport,
    StepTimes,
    TensorBoardSink,
    across_layers,
    layers_to_write,
    quantile,
)


def layer(*slots: int, dropped: int = 0) -> LayerLoad:
    return LayerLoad(torch.tensor(slots), torch.tensor(dropped))


def report(step: int, load: ExpertLoad) -> StepReport:
    times = StepTimes(total=1.0, compute=0.5, communication=0.25, data=0.1, checkpoint=0.05)
    return StepReport(step, 2.0, 1e-3, 1.0, 100, times, load, 1 << 20)


def many(layers: int) -> ExpertLoad:
    """Return the load of several layers. Layer i has an imbalance of 1 + i/4; layer 4 has a dead expert."""
    return ExpertLoad.of({f"l{i}": layer(4 + i, 4 - i) for i in range(layers)}, [2.0] * layers)


def test_metrics_of_a_layer() -> None:
    even, skewed, nothing = layer(3, 3, 3, 3), layer(8, 4, 0, 0, dropped=3), layer(0, 0)
    assert (even.imbalance, even.least, even.mean, even.dead, even.drop_rate) == (1, 1, 3, 0, 0)
    assert even.diversity == pytest.approx(1)
    assert (skewed.imbalance, skewed.least, skewed.mean, skewed.dead, skewed.drop_rate) == (8 / 3, 0, 3, 2, 0.25)
    assert skewed.diversity == pytest.approx(math.exp(math.log(3) - 2 / 3 * math.log(2)) / 4)
    assert layer(0, 5, 0, 0, 0).diversity == pytest.approx(1 / 5)
    assert (nothing.imbalance, nothing.least, nothing.mean, nothing.diversity, nothing.drop_rate) == (1, 1, 0, 1, 0)


def test_the_load_of_a_step_has_metrics_and_slots_of_each_layer() -> None:
    load = ExpertLoad.of({"a": layer(3, 1), "b": layer(4, 0, dropped=1)}, [2.0, 3.0])
    assert load.names == ("a", "b") and load.slots == ((3, 1), (4, 0))
    assert load.imbalance == (1.5, 2.0) and load.least == (0.5, 0.0) and load.dead_share == (0.0, 0.5)
    assert {len(values) for values in load.metrics().values()} == {2} and len(load.metrics()) == 8
    assert report(1, load).without_slots() == replace(report(1, load), load=replace(load, slots_LE=None))


def test_lent_experts_have_metrics_of_each_layer() -> None:
    """On 2 ranks that share the experts, in 3 calls; the second layer lends nothing, and the third has no rows."""
    counts = ((20, 2 * 16, 2 * 11, 3, 6, 3, 400), (20, 2 * 11, 2 * 11, 3, 0, 0, 0), (0, 0, 0, 3, 0, 0, 0))
    loads = {f"l{i}": replace(layer(3, 1), lent=torch.tensor(one)) for i, one in enumerate(counts)}
    load = ExpertLoad.of(loads, [2.0] * 3)
    assert load.rows_fixed == (1.6, 1.1, 1.0) and load.rows_lent == (1.1, 1.1, 1.0)
    assert load.lent_experts == (2, 0, 0) and load.copied_bytes == (400, 0, 0)
    assert load.resident_share == (0.5, 0, 0) and len(load.metrics()) == 13
    published = ExpertLoad.of({"a": replace(layer(3, 1), lent=torch.tensor((0, 0, 0, 0, 0, 0, 8)))}, [2.0])
    assert published.copied_bytes == (8,) and published.rows_fixed == published.resident_share == ()


def test_stacked_layers_have_the_metrics_of_each_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    loads = {
        f"l{i}": LayerLoad(torch.randint(0, 9 * i + 1, (16,), generator=generator), torch.tensor(i)) for i in range(5)
    }
    load = ExpertLoad.of(loads, [0.0] * 5)
    for i, one in enumerate(loads.values()):
        total = int(one.load_E.sum())
        assert load.imbalance[i] == (int(one.load_E.max()) * 16 / total if total else 1)
        assert load.dropped[i] == (i / total if total else 0) and load.mean[i] == total / 16
        assert (load.least[i], load.dead[i], load.diversity[i]) == (one.least, one.dead, one.diversity)
    assert ExpertLoad.of({}, []) == NO_LOAD and NO_LOAD.slots == ()


def test_lines_are_json_for_skipped_steps_too(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(replace(report(1, ExpertLoad.of({"a": layer(3, 1)}, [math.nan])), grad_norm=math.inf))
    sink.close()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert written["load"]["balance"] == [None] and written["grad_norm"] is None and written["loss"] == 2.0


def test_metrics_across_layers_are_the_median_and_the_95th_percentile() -> None:
    values = [float(i) for i in range(1, 22)]
    result = across_layers({"imbalance": values, "diversity": values, "dropped": []})
    assert result == {"imbalance": (11, 20), "diversity": (11, 2)}
    assert quantile([1.0, 2.0], 0.25) == 1.25 and quantile([5.0], 0.95) == 5


def test_only_the_worst_layers_are_written_if_there_are_too_many() -> None:
    assert layers_to_write([1, 3, 2], 8, 24) == (0, 1, 2)
    assert layers_to_write([1, 3, 2], 8, 23) == (1, 2)
    assert layers_to_write([2, 2, 2], 8, 8) == (0,)
    assert layers_to_write([1, 3, 2], 8, 7) == layers_to_write([], 8, 7) == ()


def test_lines_and_event_files_respect_the_maximum_number_of_series(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the train extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, events = JsonlSink(tmp_path / "metrics.jsonl", series=20), TensorBoardSink(tmp_path / "events", series=20)
    for sink in (lines, events):
        sink.write(report(1, many(5)))
        sink.close()
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written["load"]["layers"] == [3, 4] and written["load"]["imbalance"] == [1.75, 2.0]
    assert written["load"]["dead"] == [0, 1] and "slots" not in written["load"] and "names" not in written["load"]
    assert written["load_across"]["imbalance"] == pytest.approx([1.5, 1.95])
    result = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = result.Tags()["scalars"]
    assert sum("_layer_" in tag for tag in tags) == 16 and "router/imbalance_layer_4" in tags
    assert result.Scalars("router/imbalance_p95")[0].value == pytest.approx(1.95)
    assert result.Scalars("router/least_p50")[0].value == pytest.approx(0.5)


def test_loads_are_written_every_few_steps_and_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    sink = LoadsSink(path, every=4)
    for step in range(1, 10):
        sink.write(report(step, many(2)))
    sink.close()
    assert [(line.step, line.layer) for line in read_lines(path, LoadLine)] == [
        (step, name) for step in (1, 4, 8) for name in ("l0", "l1")
    ]
    with path.open("a") as file:
        file.write('{"step": 12, "lay')
    resumed = LoadsSink(path, every=4, done=5)
    resumed.write(report(8, many(1)))
    resumed.close()
    result = list(read_lines(path, LoadLine))
    assert [line.step for line in result] == [1, 1, 4, 4, 8] and result[-1] == LoadLine(8, "l0", [4, 4])
