"""The SonicMoE benchmark peer converts weights and gradients to SonicMoE's documented layout. The package is a fake."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_comm.bench.common.settings import LayerBench
from moe_comm.bench.layer.peers import HuggingFaceLayer, LayerWeights, SonicMoELayer

pytest.importorskip("transformers")

SETTINGS = LayerBench(ranks=1, tokens=24, hidden=32, ffn=16, experts=4, top_k=2, dtype="bfloat16")


class Kernels(Enum):
    sonicmoe = "sonicmoe"


class Activation(Enum):
    SWIGLU = "swiglu"


class StandIn(nn.Module):
    """Fake ``sonicmoe.MoE``: gate and up rows alternate; weights are a softmax over the selected logits."""

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: Activation,
        add_bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        assert activation_function is Activation.SWIGLU and not add_bias
        self.top_k = num_experts_per_tok
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc, self.c_proj = nn.Module(), nn.Module()
        self.c_fc.weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.c_proj.weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x_TD: Tensor, kernel_backend_moe: Kernels) -> tuple[Tensor, None]:
        assert kernel_backend_moe is Kernels.sonicmoe
        logits_TK, ids_TK = self.router(x_TD).topk(self.top_k)
        weights_TK = logits_TK.float().softmax(-1)
        both_TKF = torch.einsum("td,tkfd->tkf", x_TD.float(), self.c_fc.weight.float()[ids_TK])
        inner_TKF = nn.functional.silu(both_TKF[..., ::2]) * both_TKF[..., 1::2]
        out_TKD = torch.einsum("tkf,tkdf->tkd", inner_TKF, self.c_proj.weight.float()[ids_TK])
        return (out_TKD * weights_TK[..., None]).sum(1).to(x_TD.dtype), None


@pytest.fixture
def fake_sonicmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a fake ``sonicmoe`` package."""
    sonic: Any = ModuleType("sonicmoe")
    sonic.MoE, sonic.KernelBackendMoE = StandIn, Kernels
    enums: Any = ModuleType("sonicmoe.enums")
    enums.ActivationType = Activation
    monkeypatch.setitem(sys.modules, "sonicmoe", sonic)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)


def test_output_and_gradients_match_the_reference(fake_sonicmoe: None) -> None:
    x_TD = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    results = {}
    for kind in (HuggingFaceLayer, SonicMoELayer):
        layer = kind(SETTINGS, 0)
        y_TD = layer.forward(x_TD)
        y_TD.float().square().sum().backward()
        results[kind.name] = {"output": y_TD.detach(), **layer.grads()}
    for name, expected in results[HuggingFaceLayer.name].items():
        difference = float(
            (results[SonicMoELayer.name][name].float() - expected.float()).norm() / expected.float().norm()
        )
        assert difference < 3e-2, f"{name} differs by {difference:.1e}"


def test_the_interleaved_layout_differs_from_halves() -> None:
    """If both layouts were equal, the test above could not detect a wrong one."""
    gate_up_FD = LayerWeights(SETTINGS).gate_up(0)
    assert not torch.equal(gate_up_FD[::2], gate_up_FD[:16])


def test_the_unavailable_reason_names_the_gpu() -> None:
    assert "GPU" in str(SonicMoELayer.unavailable_reason(SETTINGS))
