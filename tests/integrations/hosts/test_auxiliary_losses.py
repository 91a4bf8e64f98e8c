"""DeepSpeed and Lightning scale auxiliary losses like the main loss, which they divide by the micro-batches."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.loops import launched
from tests.pool import RankPool
from tests.reports.aux_loops import Grads, Model, assert_equal, expected, gradients, loader, micro_batches

N = 3


def deepspeed_step(rank: int, world: int, arg: None) -> Grads:
    """Return the gradients of a step of N micro-batches, the same ones on every rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read on import
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    import deepspeed
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile an all-reduce
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    model = Model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 1.0),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": N},
    )
    for ids in micro_batches(N):
        engine.backward(engine(ids).loss)
        engine.step()
    return {name: before[name] - param.detach() for name, param in engine.module.named_parameters()}


def test_deepspeed(pool2: RankPool) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: make adapters")
    for got in pool2.run(deepspeed_step, None):
        assert_equal(got, expected(micro_batches(N)))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_lightning(scale: bool, as_dict: bool) -> None:
    lightning = pytest.importorskip("lightning", reason="needs Lightning: make adapters")
    seen: list[Grads] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, rows: Tensor, index: int) -> Any:
            loss = self.model(rows).loss
            return {"loss": loss} if as_dict else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(gradients(self.model))

    class Scaling(lightning.pytorch.plugins.Precision):  # type: ignore[misc, name-defined]
        """What ``MixedPrecision`` does with fp16, which Lightning has on GPUs only."""

        def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
            return super().pre_backward(tensor, module) * 2.0**16  # type: ignore[no-any-return]

    with launched(0, 1):
        lightning.Trainer(
            accelerator="cpu",
            plugins=[Scaling()] if scale else None,
            max_steps=1,
            accumulate_grad_batches=N,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), loader(micro_batches(N)))
    factor = 2.0**16 if scale else 1.0
    (got,) = seen
    assert_equal({name: grad / factor for name, grad in got.items()}, expected(micro_batches(N)))
