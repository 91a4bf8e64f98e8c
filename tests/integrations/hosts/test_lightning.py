"""Lightning trains, clips, validates, saves and resumes models with distributed experts like one process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from moe_comm.integrations.hugging_face import swap_moe
from tests.integrations.loops import OWN, OwnGPT, error_of
from tests.integrations.models import VOCAB, load
from tests.pool import RankPool

L = pytest.importorskip("lightning", reason="needs Lightning: make adapters")
BATCH, STEPS, LENGTH, CLIP = 8, 4, 9, 0.05


@dataclass(frozen=True)
class Run:
    """folder: of a saved model, or ``OWN``. out, resume: checkpoints. stop: last step."""

    folder: str
    ep: int
    out: str = ""
    resume: str = ""
    stop: int = STEPS


def examples(count: int = BATCH * STEPS, seed: int = 3) -> list[Tensor]:
    return list(torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed)))


def loader(items: list[Tensor], rank: int, world: int) -> Any:
    """Return batches of this rank. Together, those of all ranks are ``BATCH`` consecutive items."""
    return DataLoader(items[rank::world], batch_size=BATCH // world)  # type: ignore[arg-type]


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3, weight_decay=0.0)


def mean_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Module(L.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.model = folder, None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this for every fit, validate and test
            own = self.folder == OWN
            mesh = self.device_mesh
            self.model = OwnGPT(mesh.get_group("ep")) if own else swap_moe(load(self.folder).train(), mesh)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return mean_loss(self.model, ids)

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.log("valid", mean_loss(self.model, ids), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def make_trainer(rank: int, world: int, ep: int, stop: int = STEPS) -> Any:
    """Return a trainer on a rank that torchrun has started."""
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from moe_comm.integrations.lightning import ExpertParallelStrategy

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ExpertParallelStrategy(ep),
        plugins=[TorchElasticEnvironment()],
        max_steps=stop,
        use_distributed_sampler=False,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(rank: int, world: int, run: Run) -> float:
    """Train, save a checkpoint, and return the loss of validation."""
    trainer = make_trainer(rank, world, run.ep, run.stop)
    module = Module(run.folder)
    items = examples()
    if run.resume:  # after 2 steps; Lightning continues to count batches, but reads them from the start
        items = items[2 * BATCH :] + items[: 2 * BATCH]
    trainer.fit(module, loader(items, rank, world), ckpt_path=run.resume or None)
    trainer.save_checkpoint(run.out)
    (metrics,) = trainer.validate(module, loader(examples(BATCH, seed=9), rank, world), verbose=False)
    return float(metrics["valid"])


def one_process(run: Run) -> tuple[dict[str, Tensor], float]:
    model: Any = OwnGPT(None) if run.folder == OWN else load(run.folder).train()
    optimizer = make_optimizer(model)
    for ids in torch.stack(examples()).split(BATCH)[: run.stop]:
        mean_loss(model, ids).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        valid = mean_loss(model.eval(), torch.stack(examples(BATCH, seed=9)))
    return {f"model.{name}": value for name, value in model.state_dict().items()}, float(valid)


def check(pool: RankPool, run: Run) -> None:
    expected, valid = one_process(run)
    for got in pool.run(train, run):
        assert got == pytest.approx(valid, rel=1e-5)
    state = torch.load(run.out, weights_only=False)["state_dict"]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_checkpoints_and_validation_equal_one_process(
    world: int, ep: int, folders: list[str], tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    for number, folder in enumerate((*folders, OWN)):
        check(pools[world], Run(folder, ep, str(tmp_path / f"{number}.ckpt")))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_run_resumes_on_a_different_number_of_ranks(
    before: int, after: int, folders: list[str], tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    for number, folder in enumerate((folders[1], OWN)):
        first = Run(folder, before, str(tmp_path / f"{number}-first.ckpt"), stop=2)
        pools[before].run(train, first)
        check(pools[after], Run(folder, after, str(tmp_path / f"{number}.ckpt"), resume=first.out))


def uneven(rank: int, world: int, folder: str) -> str:
    return error_of(make_trainer(rank, world, 3).fit, Module(folder), loader(examples(), rank, world))


def test_a_group_that_does_not_divide_the_ranks_raises_on_every_rank(
    folders: list[str], pools: dict[int, RankPool]
) -> None:
    for error in pools[4].run(uneven, folders[0]):
        assert error.startswith("ConfigError") and "ep_size=3" in error
