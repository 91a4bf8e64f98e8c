"""``bench layer`` end to end at tiny sizes: all layers compute the same function, and the report is consistent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.bench.common.inputs import WrongAnswer, make_x
from moe_comm.bench.common.settings import LAYER_PRESETS, LayerBench
from moe_comm.bench.layer import benchmark as layer
from moe_comm.bench.layer.peers import LayerWeights
from moe_comm.cli import run
from moe_comm.errors import ConfigError

pytest.importorskip("transformers")

TINY = LayerBench(ranks=2, tokens=40, hidden=64, ffn=32, experts=8, top_k=2, warmup=1, iterations=2, memory=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the benchmark on two ranks and return the report from its output file."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    returned = layer.main(TINY, str(path))
    report: dict[str, Any] = json.loads(path.read_text())
    assert report == returned
    return report


def test_moe_comm_and_hugging_face_agree_for_every_expert_parallel_size(report: dict[str, Any]) -> None:
    sizes = {name: row["ep"] for name, row in report["contestants"].items() if name != "torchtitan"}
    assert sizes == {"moe_comm_ep1": 1, "moe_comm": 2, "hf_grouped_mm": 1, "hf_all_to_all": 2}
    assert all(report["max_error"][name] < 1e-5 for name in sizes)
    assert set(report["contestants"]) | set(report["skipped"]) >= {"torchtitan"}


def test_rates_and_speedups_follow_from_the_times(report: dict[str, Any]) -> None:
    rows = report["contestants"]
    assert TINY.flops == 6 * 3 * 40 * 2 * 64 * 32
    for row in rows.values():
        assert row["gflops"] == pytest.approx(TINY.flops * 1e-6 / row["total_ms"])
        assert row["gemm_fraction"] == pytest.approx(row["gflops"] / report["gemm_gflops"])
    expected = rows["hf_all_to_all"]["total_ms"] / rows["moe_comm"]["total_ms"]
    assert rows["hf_all_to_all"]["speedup"] == pytest.approx(expected)
    expected = rows["hf_grouped_mm"]["total_ms"] / rows["moe_comm_ep1"]["total_ms"]
    assert rows["hf_grouped_mm"]["speedup"] == pytest.approx(expected)
    assert "speedup" not in rows["moe_comm"]


@pytest.mark.slow
def test_peak_memory_holds_at_least_weights_and_gradients() -> None:
    settings = replace(TINY, ranks=1, tokens=256, hidden=256, ffn=512, experts=8)
    weights_mib = settings.experts * 3 * settings.hidden * settings.ffn * 4 / 2**20
    measured = layer.peak_memory(settings, "moe_comm_ep1")
    assert 2 * weights_mib < measured["peak_memory_mib"] < 10 * weights_mib


def test_layers_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = LayerWeights.fill
    calls: list[int] = []

    def fill_with_error(self: LayerWeights, experts: range, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        fill(self, experts, gate_up, down)
        calls.append(1)
        if len(calls) > 1:
            down[3] *= 1.01

    monkeypatch.setattr(LayerWeights, "fill", torch.no_grad()(fill_with_error))
    with pytest.raises(WrongAnswer, match="hf_grouped_mm"):
        layer.main(replace(TINY, ranks=1, peers=("hf_grouped_mm",)))


def test_every_rank_makes_the_same_weights_for_an_expert() -> None:
    all_experts, two_experts = torch.empty(8, 64, 64), torch.empty(2, 64, 64)
    down = torch.empty(8, 64, 32)
    LayerWeights(TINY).fill(range(8), all_experts, down)
    LayerWeights(TINY).fill(range(4, 6), two_experts, down[:2].clone())
    assert torch.equal(all_experts[4:6], two_experts)
    assert not torch.equal(all_experts[4], all_experts[5])


def test_presets_have_the_documented_shapes() -> None:
    comm, compute = (LayerBench(**LAYER_PRESETS[name]) for name in ("comm", "compute"))
    assert (comm.hidden, comm.ffn, comm.experts, comm.top_k, comm.tokens) == (1024, 512, 64, 8, 4096)
    assert (compute.hidden, compute.ffn, compute.experts, compute.top_k, compute.tokens) == (1024, 4096, 8, 2, 4096)


def test_options_of_the_command_win_over_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LayerBench] = []
    monkeypatch.setattr(layer, "main", lambda settings, _: seen.append(settings))
    for given in ([], ["--tokens", "64"], ["--tokens", "64", "--experts", "64"]):  # 64 experts are also the default
        assert run(["bench", "layer", "--preset", "compute", *given]) == 0
    assert [(one.tokens, one.experts, one.ffn) for one in seen] == [(4096, 8, 4096), (64, 8, 4096), (64, 64, 4096)]


def test_experts_must_divide_by_ranks() -> None:
    with pytest.raises(ConfigError, match="divisible"):
        replace(TINY, experts=7)


def test_the_allowed_error_follows_from_the_dtype_and_from_near_ties_of_the_router() -> None:
    """A router with bf16 logits may select another expert for near ties, which increases the allowed error.

    With ``top_k`` equal to the number of experts there are no ties, and only rounding errors are allowed.
    """
    settings = replace(TINY, ranks=1, tokens=512, experts=16, dtype="bfloat16")
    x_TD = make_x(settings, 0)
    allowed = layer.allowed_error(settings, x_TD)
    assert allowed > layer.allowed_error(replace(settings, top_k=16), x_TD) == pytest.approx(4 * 2**-7)
    float32_allowed = layer.allowed_error(replace(settings, dtype="float32"), x_TD.float())
    assert float32_allowed < 0.01
    report = layer.main(replace(settings, peers=("hf_grouped_mm", "hf_all_to_all")))
    assert report["max_error"]["hf_grouped_mm"] <= allowed
    assert set(report["contestants"]) == {"moe_comm_ep1", "hf_grouped_mm"}
    assert "more than one rank" in report["skipped"]["hf_all_to_all"]


def test_the_bf16_output_matches_float64() -> None:
    """Compare the bf16 output of moe_comm with plain torch in float64 on the same bf16 inputs and weights."""
    settings = replace(TINY, ranks=1, tokens=64, dtype="bfloat16")
    x_TD = make_x(settings, 0)
    weights = LayerWeights(settings)
    router_ED = weights.router().double()
    weights_TK, ids_TK = torch.softmax(x_TD.double() @ router_ED.T, -1).topk(settings.top_k, -1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    expected_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for expert in range(settings.experts):
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        h = x_TD[token].double() @ weights.gate_up(expert).double().T
        out = (torch.nn.functional.silu(h[:, : settings.ffn]) * h[:, settings.ffn :]) @ weights.down(expert).double().T
        expected_TD.index_add_(0, token, out * weights_TK[token, slot, None])
    contestant = layer.KINDS["moe_comm_ep1"](settings, 0)
    actual_TD = contestant.forward(x_TD).detach().double()
    contestant.close()
    assert float((actual_TD - expected_TD).norm() / expected_TD.norm()) < 2**-7
