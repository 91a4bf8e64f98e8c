"""``bench layer`` end to end at tiny sizes: all layers compute the same function, and the arithmetic of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.bench.common.case import WrongAnswer
from moe_comm.bench.common.settings import LAYER_PRESETS, LayerBench
from moe_comm.bench.layer import benchmark as layer
from moe_comm.bench.layer.peers import Weights
from moe_comm.errors import ConfigError

pytest.importorskip("transformers")

TINY = LayerBench(ranks=2, tokens=40, hidden=64, ffn=32, experts=8, top_k=2, warmup=1, iterations=2, memory=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One whole run at two ranks, as the command does it; read back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    returned = layer.main(TINY, str(path))
    read: dict[str, Any] = json.loads(path.read_text())
    assert read == returned
    return read


def test_ours_and_both_of_hugging_face_agree_at_their_expert_parallel_sizes(found: dict[str, Any]) -> None:
    sizes = {name: row["ep"] for name, row in found["contestants"].items() if name != "torchtitan"}
    assert sizes == {"moe_comm_ep1": 1, "moe_comm": 2, "hf_grouped_mm": 1, "hf_all_to_all": 2}
    assert all(found["max_error"][name] < 1e-5 for name in sizes)
    assert set(found["contestants"]) | set(found["skipped"]) >= {"torchtitan"}


def test_rates_and_speedups_follow_from_the_times(found: dict[str, Any]) -> None:
    rows = found["contestants"]
    assert TINY.flops == 6 * 3 * 40 * 2 * 64 * 32
    for row in rows.values():
        assert row["gflops"] == pytest.approx(TINY.flops * 1e-6 / row["total_ms"])
        assert row["gemm_fraction"] == pytest.approx(row["gflops"] / found["gemm_gflops"])
    expected = rows["hf_all_to_all"]["total_ms"] / rows["moe_comm"]["total_ms"]
    assert rows["hf_all_to_all"]["speedup"] == pytest.approx(expected)
    expected = rows["hf_grouped_mm"]["total_ms"] / rows["moe_comm_ep1"]["total_ms"]
    assert rows["hf_grouped_mm"]["speedup"] == pytest.approx(expected)
    assert "speedup" not in rows["moe_comm"]


def test_one_rank_compares_whole_copies_and_says_why_the_rest_is_missing() -> None:
    found = layer.main(replace(TINY, ranks=1, peers=("hf_grouped_mm", "hf_all_to_all")))
    assert set(found["contestants"]) == {"moe_comm_ep1", "hf_grouped_mm"}
    assert "more than one rank" in found["skipped"]["hf_all_to_all"]


def test_peak_memory_holds_at_least_weights_and_gradients() -> None:
    settings = replace(TINY, ranks=1, tokens=256, hidden=256, ffn=512, experts=8)
    weights_mib = settings.experts * 3 * settings.hidden * settings.ffn * 4 / 2**20
    found = layer.peak_memory(settings, "moe_comm_ep1")
    assert 2 * weights_mib < found["peak_memory_mib"] < 10 * weights_mib


def test_layers_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Weights.fill
    calls: list[int] = []

    def crooked(self: Weights, experts: range, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        fill(self, experts, gate_up, down)
        calls.append(1)
        if len(calls) > 1:
            down[3] *= 1.01

    monkeypatch.setattr(Weights, "fill", torch.no_grad()(crooked))
    with pytest.raises(WrongAnswer, match="hf_grouped_mm"):
        layer.main(replace(TINY, ranks=1, peers=("hf_grouped_mm",)))


def test_every_rank_makes_the_same_weights_for_an_expert() -> None:
    whole, part = torch.empty(8, 64, 64), torch.empty(2, 64, 64)
    down = torch.empty(8, 64, 32)
    Weights(TINY).fill(range(8), whole, down)
    Weights(TINY).fill(range(4, 6), part, down[:2].clone())
    assert torch.equal(whole[4:6], part)
    assert not torch.equal(whole[4], whole[5])


def test_presets_are_the_two_shapes_of_the_targets() -> None:
    comm, compute = (LayerBench(**LAYER_PRESETS[name]) for name in ("comm", "compute"))
    assert (comm.hidden, comm.ffn, comm.experts, comm.top_k, comm.tokens) == (1024, 512, 64, 8, 4096)
    assert (compute.hidden, compute.ffn, compute.experts, compute.top_k, compute.tokens) == (1024, 4096, 8, 2, 4096)


def test_experts_must_divide_by_ranks() -> None:
    with pytest.raises(ConfigError, match="divide"):
        replace(TINY, experts=7)
