"""DeepSpeed's AutoEP with the rows moved by moe_comm, against AutoEP's own transport."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.integrations.models import VOCAB, new_model, randomise
from tests.pool import RankPool

os.environ["DS_ACCELERATOR"] = "cpu"  # read on import
pytest.importorskip("deepspeed", reason="needs DeepSpeed: make adapters")
if transformers.__version__ >= "5.20":
    pytest.skip("AutoEP of DeepSpeed 0.19.8 cannot read the registries of newer versions", allow_module_level=True)


@dataclass(frozen=True)
class Case:
    """lengths: tokens of each rank. one: all tokens choose experts of the first rank of each group of 2."""

    name: str
    family: str = "qwen3_moe"
    stage: int = 2
    lengths: tuple[int, ...] = (7, 7)
    one: bool = False
    expert_parallel: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("ZeRO 2"),
    Case("ZeRO 0, 4 ranks with different numbers of tokens", stage=0, lengths=(3, 9, 2, 6)),
    Case("ZeRO 2, all tokens to the experts of one rank", one=True),
    Case("ZeRO 3", stage=3),
    Case("ZeRO 1, Mixtral, scores before experts", stage=1, family="mixtral", expert_parallel={"score_apply": "pre"}),
    Case("expert loop, shared experts", family="qwen2_moe", expert_parallel={"use_grouped_mm": False}),
)


def make(case: Case) -> Any:
    """Return a random model with 8 experts in each block."""
    model = new_model(case.family, **({"num_experts_per_tok": 2} if case.one else {}))
    randomise(model, 0)
    if case.one:
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight.data.zero_()
            weight[:4] = torch.tensor([[1.0], [0.9], [-1.0], [-0.9]]) * torch.linspace(-1, 2, weight.shape[1])
    return model


def train(rank: int, world: int, arg: tuple[Case, bool]) -> tuple[list[float], float, dict[str, Tensor]]:
    """Return the losses, the last norm of gradients and the weights of two steps of DeepSpeed's engine."""
    import deepspeed
    from deepspeed import comm, ops

    from moe_comm.integrations.deepspeed import swap_transport

    case, swapped = arg
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile an all-reduce
    comm.init_distributed(dist_backend="gloo", verbose=False)
    model = make(case)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": case.stage},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "expert_parallel": {"enabled": True, "autoep_size": 2, **case.expert_parallel},
        },
    )
    if swapped:
        swap_transport(engine.module)
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, VOCAB, (1, case.lengths[rank]), generator=g)
    losses = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if case.one and not losses:
            counts_E = sum(m.tokens_per_expert for m in engine.module.modules() if hasattr(m, "tokens_per_expert"))
            assert counts_E[:4].sum() == 2 * 2 * 7 and not counts_E[4:].any()
        losses.append(float(loss.detach()))
    norm = float(engine.get_global_grad_norm() or 0.0)
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return losses, norm, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_engine_trains_as_with_autoeps_transport(case: Case, pools: dict[int, RankPool]) -> None:
    theirs, ours = (pools[len(case.lengths)].run(train, (case, swapped)) for swapped in (False, True))
    for (losses, norm, weights), (got, got_norm, got_weights) in zip(theirs, ours, strict=True):
        assert got == pytest.approx(losses, rel=1e-5) and got[-1] < got[0]
        assert got_norm == pytest.approx(norm, rel=1e-4)
        assert weights.keys() == got_weights.keys() and any("experts.w1" in name for name in weights)
        for name, value in weights.items():
            torch.testing.assert_close(got_weights[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n} {m}")
