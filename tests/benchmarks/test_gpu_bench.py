"""benchmarks/gpu: wrong results are rejected, and bytes are those that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import dispatchers, layers, movement, products
from benchmarks.gpu.record import Recorder, read
from benchmarks.gpu.timing import Timer

CASE = dispatchers.Case(Timer("cpu", 0, 1), tokens=6, hidden=256, experts=4, top_k=2)


def test_a_wrong_result_is_refused() -> None:
    exact_TD = torch.tensor([[4.0, -1.0]], dtype=torch.float64)
    assert dispatchers.difference("peer_to_peer", exact_TD + 0.0625, exact_TD) == 0.0625
    assert dispatchers.difference("peer_to_peer fp8", exact_TD + 0.25, exact_TD) == 0.25
    for name, wrong in (("peer_to_peer", 0.25), ("peer_to_peer fp8", 0.5), ("peer_to_peer", float("nan"))):
        with pytest.raises(AssertionError, match="differs from the reference"):
            dispatchers.difference(name, exact_TD + wrong, exact_TD)
    rows_RD = torch.ones(2, 2)
    with pytest.raises(AssertionError, match="rows differ"):
        dispatchers.check("peer_to_peer", rows_RD + 1, exact_TD, (rows_RD, exact_TD), 1)


def test_a_contestant_with_wrong_rows_is_recorded_as_failed(tmp_path: Path) -> None:
    class Wrong(dispatchers.TorchContestant):
        def combine(self, rows_RD: torch.Tensor, weights_TK: torch.Tensor, order: Any) -> torch.Tensor:
            return super().combine(rows_RD, weights_TK, order) + 10

    recorder = Recorder("dispatch", tmp_path / "results.jsonl", "cpu")
    work = {"wrong": Wrong, "right": dispatchers.TorchContestant}
    code = recorder.run_all(
        (name, lambda name=name, make=make: movement.measure_contestant(CASE, name, make))
        for name, make in work.items()
    )
    assert code == 1
    lines = read(tmp_path / "results.jsonl")
    assert [(line["operation"], line["event"]) for line in lines] == [
        ("wrong", "started"), ("wrong", "failed"), ("right", "started"),
        ("right", "row"), ("right", "row"), ("right", "row"), ("right", "done"),
    ]  # fmt: skip
    assert "differs from the reference" in lines[1]["error"]


def test_a_failed_measurement_over_nccl_closes_its_process_group() -> None:
    class Wrong(dispatchers.NcclContestant):
        def combine(self, rows_RD: torch.Tensor, weights_TK: torch.Tensor, order: Any) -> torch.Tensor:
            return super().combine(rows_RD, weights_TK, order) + 10

    with pytest.raises(AssertionError, match="differs from the reference"):
        list(movement.measure_contestant(CASE, "wrong", lambda: Wrong(CASE)))
    assert not dist.is_initialized()


def test_fp8_counts_the_bytes_of_fp8() -> None:
    assert CASE.moved_bytes() == 6 * 512 + 12 * 512
    assert CASE.moved_bytes("fp8_block") == 6 * 512 + 12 * (256 + 2 * 4 + 8)  # two scales, rows aligned to 16 bytes


def test_products_agree_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = products.CPU_SHAPES[0]
    assert sum(shape.counts()) == shape.rows and 0 in shape.counts()
    timer = Timer("cpu", 0, 1)
    for operation in ("forward", "gradient of rows", "gradient of weights"):
        assert products.measure(shape, operation, "torch.mm by expert", timer)["max_error"] == 0.0
    monkeypatch.setattr(products.Problem, "_ours", lambda self, operation: self.grad_RN)
    with pytest.raises(AssertionError, match=r"differs from torch\.mm"):
        products.measure(shape, "forward", "moe_comm grouped_mm", timer)


def test_a_layer_that_raises_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layers.KINDS["moe_comm_ep1"], "build", broken)
    recorder = Recorder("layer-small", tmp_path / "results.jsonl", "cpu")
    assert recorder.run_all(layers.operations("small", "cpu")) == 1
    lines = read(tmp_path / "results.jsonl")
    assert [line["operation"] for line in lines if line["event"] == "failed"] == ["small, moe_comm_ep1"]
    rows = {line["who"]: line for line in lines if line["event"] == "row"}
    assert rows["hf_grouped_mm"]["tflop_s"] > 0 and rows["torch.mm"]["tflop_s"] > 0
    assert rows["sonic_moe"]["skipped"] == "requires a Hopper or Blackwell GPU"
