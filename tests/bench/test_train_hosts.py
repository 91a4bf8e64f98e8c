"""``bench train`` between network namespaces with tiny sizes."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_comm.bench.hosts.namespaces import Hosts, unavailable_reason
from moe_comm.bench.train import benchmark as train
from moe_comm.bench.train.settings import Variant
from moe_comm.errors import ConfigError
from tests.bench.tiny_train import TINY

pytest.importorskip("transformers")
pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

BENCH = replace(TINY, hosts=2, peers=("hf_ddp", "one_process"), variants=(Variant("ep1", ("parallel.ep=1",)),))
PARAMETERS = 2 * 300 * 64 + 2 * (3 * 8 * 64 * 32)
"""Embedding, output layer and experts. The model has more."""
needs_hosts = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "hosts can be created")


def leftovers() -> list[str]:
    """Return the processes of hosts that this process created, and the temporary folders of the benchmark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [text for text in path.read_text().split("\0") if text.startswith(f"moe_comm-{os.getpid()}-")]
        except OSError:  # the process has ended
            continue
    return found + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{train.PREFIX}*")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Run the benchmark on two hosts and return the result from its output file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        returned = train.main(BENCH, str(folder / "out.json"), str(folder / "out.pftrace"))
        assert leftovers() == []
    from_file: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert from_file == returned
    return from_file


@needs_hosts
@pytest.mark.slow
def test_contestants_over_links_have_the_same_losses(result: dict[str, Any]) -> None:
    assert (result["hosts"], result["ranks_per_host"], result["link_gbit"]) == (2, 1, 1.0)
    assert len(result["link_gbit_measured"]) == 2
    assert list(result["variants"]) == ["ep1"] and list(result["peers"]) == ["hf_ddp"]
    assert result["skipped"] == {"one_process": "runs in one process, on one host"}
    for row in (result["variants"]["ep1"], result["peers"]["hf_ddp"]):
        assert row["loss_rel_diff"] < 1e-5 and row["speedup"] == pytest.approx(row["step_ms"] / result["step_ms"])
    assert result["speedup_over_all"] == result["peers"]["hf_ddp"]["speedup"]
    assert (result["mapping"]["ep"], result["variants"]["ep1"]["mapping"]["ep"]) == (2, 1)
    assert result["settings"]["variants"] == {"ep1": ["parallel.ep=1"]}


@needs_hosts
@pytest.mark.slow
def test_the_bytes_of_each_contestant_are_counted_on_each_link(result: dict[str, Any]) -> None:
    rows = {"moe_comm": result, **result["variants"], **result["peers"]}
    for row in rows.values():
        sent, received = row["bytes_per_link"]["sent"], row["bytes_per_link"]["received"]
        assert len(sent) == len(received) == 2 and min(sent) > 0
        # Medians of two steps; a step ends before the last acknowledgement is counted.
        assert sent == pytest.approx(received[::-1], rel=0.02, abs=4000)
    # All gradients are summed over two hosts: each sends half of them and half of the sums.
    for name in ("ep1", "hf_ddp"):
        assert min(rows[name]["bytes_per_link"]["sent"]) > 4 * PARAMETERS
    assert max(rows["moe_comm"]["bytes_per_link"]["sent"]) < min(rows["ep1"]["bytes_per_link"]["sent"])


@needs_hosts
@pytest.mark.slow
def test_exposed_communication_is_that_of_the_loop_or_the_rest_of_the_step(result: dict[str, Any]) -> None:
    for row in (result, result["variants"]["ep1"]):
        assert row["exposed_communication_ms"] == row["step"]["seconds"]["communication"] * 1e3 > 0
    ddp = result["peers"]["hf_ddp"]
    assert ddp["exposed_communication_ms"] == ddp["step_ms"] - ddp["compute_ms"] and ddp["compute_ms"] > 0


@needs_hosts
@pytest.mark.slow
def test_the_trace_has_one_step_of_each_configuration_on_each_rank(result: dict[str, Any], folder: Path) -> None:
    trace = pb2.Trace()
    trace.ParseFromString((folder / "out.pftrace").read_bytes())
    processes = [p.track_descriptor.process.process_name for p in trace.packet if p.track_descriptor.process.pid]
    assert processes == ["rank 0 (host 0)", "rank 1 (host 1)"]
    names = [packet.track_event.name for packet in trace.packet if packet.HasField("track_event")]
    assert names.count("step of moe_comm") == names.count("step of ep1") == 2
    assert "dispatch" in names and "all-reduce" in names


@pytest.mark.slow
@needs_hosts
def test_nothing_is_left_when_a_contestant_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Hosts(2, 1):
        assert len({name for name in leftovers() if "host" in name}) == 2
    pipeline = Variant("pipeline", ("parallel.pp=2", "parallel.schedule=zbv"))
    with pytest.raises(ConfigError, match=r"rank \d on host \d .*2 layers cannot fill 4 stages"):
        train.main(replace(BENCH, peers=(), variants=(pipeline,)))
    assert leftovers() == []


def test_missing_privileges_are_reported_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.bench.hosts.namespaces.os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"cannot create 2 hosts: .*root"):
        train.main(BENCH)
