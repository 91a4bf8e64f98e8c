"""Adapters (LoRA of PEFT) through ``MoETrainer`` and accelerate on 2 ranks against one process without this library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs make hosts")

import torch
from torch import Tensor
from transformers import Trainer

import moe_comm
from moe_comm.errors import CheckpointError
from moe_comm.integrations.hugging_face import MoETrainerMixin, prepare_accelerator, swap_moe
from tests.integrations.loops import TrainingCase, launched, make_trainer, with_accelerate
from tests.integrations.models import ep_group, load
from tests.pool import RankPool

SAVED, STEPS = 2, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "experts and attention": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "attention and router": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"]},
}


def adapted(model: Any, target: str) -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **SETTINGS[target]))


def files(folder: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "adapter_model.safetensors")


def train(rank: int, world: int, case: TrainingCase, target: str, kind: Any = None, **settings: Any) -> list[float]:
    """Train and save the adapter in ``case.out``/final. Return the losses."""
    with launched(rank, world):
        model = load(case.folder)
        if world > 1:
            model = swap_moe(model, ep_group(world))
        settings = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS} | settings
        trainer = make_trainer(case, world, adapted(model, target), kind, **settings)
        trainer.train(resume_from_checkpoint=case.resume or None)
        trainer.save_model(f"{case.out}/final")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_ranks(rank: int, world: int, arguments: tuple[TrainingCase, str]) -> list[float]:
    return train(rank, world, *arguments)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and got
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k} {m}")


def assert_same_run(ours: str, theirs: str) -> None:
    for folder in (f"checkpoint-{SAVED}", "final"):
        assert_close(files(f"{ours}/{folder}"), files(f"{theirs}/{folder}"))
    got, want = (torch.load(f"{out}/checkpoint-{SAVED}/optimizer.pt") for out in (ours, theirs))
    assert got["param_groups"] == want["param_groups"] and got["state"].keys() == want["state"].keys()
    for index, values in want["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(got["state"][index][key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "wrapper"), [*((name, "ddp") for name in SETTINGS), ("experts and attention", "fsdp2")]
)
def test_training_saving_and_resuming_equal_one_process(
    target: str, wrapper: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    for folder in folders if wrapper == "ddp" else folders[1:]:
        one, two = (str(tmp_path / Path(folder).name / name) for name in ("one", "two"))
        case = TrainingCase(folder, out=one)
        losses = train(0, 1, case, target, Trainer)
        ours = replace(case, wrapper=wrapper, out=two)
        for got in pool2.run(on_ranks, (ours, target)):
            assert got == pytest.approx(losses, rel=1e-5)
        assert_same_run(two, one)
        # at the other number of ranks, from each other's checkpoints
        ours = replace(ours, out=f"{two}b", resume=f"{one}/checkpoint-{SAVED}")
        pool2.run(on_ranks, (ours, target))
        case = replace(case, out=f"{one}b", resume=f"{two}/checkpoint-{SAVED}")
        train(0, 1, case, target)
        for out in (ours.out, case.out):
            assert_close(files(f"{out}/final"), files(f"{one}/final"))


def resume_from_a_full_model(rank: int, world: int, case: TrainingCase) -> str:
    with (
        launched(rank, world),
        pytest.raises(CheckpointError, match=r"contains a full model.*before get_peft_model") as e,
    ):
        train(rank, world, case, "attention and router")
    return str(e.value)


def test_a_full_checkpoint_is_refused(folders: list[str], tmp_path: Path, pool2: RankPool) -> None:
    case = TrainingCase(folders[1], out=str(tmp_path), resume=folders[1])
    assert len({resume_from_a_full_model(0, 1, case), *pool2.run(resume_from_a_full_model, case)}) == 1


def load_best(rank: int, world: int, case: TrainingCase) -> dict[str, Tensor]:
    """Evaluate after each step with a metric that is best after the second one."""

    class Mine(MoETrainerMixin, Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_mine": float(abs(self.state.global_step - SAVED))}

    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "mine", "greater_is_better": False}
    train(rank, world, case, "experts and attention", Mine, **settings)
    return files(f"{case.out}/final")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_best_adapters_are_loaded_at_the_end(
    wrapper: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    case = TrainingCase(folders[1], wrapper, out=str(tmp_path))
    for best in pool2.run(load_best, case):
        want, last = (files(tmp_path / f"checkpoint-{step}") for step in (SAVED, STEPS))
        assert best.keys() == want.keys() and all(best[key].equal(value) for key, value in want.items())
        assert not all(best[key].equal(value) for key, value in last.items())


def accelerate(rank: int, world: int, case: TrainingCase) -> tuple[dict[str, Tensor], list[float]]:
    """Return the adapters and the losses of a loop with accelerate, which is plain in one process."""

    def make(case: TrainingCase) -> Any:
        model = load(case.folder)
        return adapted(swap_moe(model, ep_group(world)) if world > 1 else model, "experts and attention")

    with launched(rank, world):
        prepare = prepare_accelerator if world > 1 else lambda accelerator: accelerator
        _, model, losses = with_accelerate(case, world, prepare, make)
        state = moe_comm.state_dict(model)
        return {name: value.clone() for name, value in state.items() if "lora" in name}, losses


def test_loops_of_accelerate_train_save_and_resume_as_one_process(
    folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    want, losses = accelerate(0, 1, TrainingCase(folders[1]))
    first = TrainingCase(folders[1], out=str(tmp_path / "run"), stop=3)
    pool2.run(accelerate, first)
    saved = TrainingCase(folders[1], resume=f"{first.out}-3")
    resumed = [*pool2.run(accelerate, replace(saved, wrapper="fsdp2")), accelerate(0, 1, saved)]
    for got, got_losses in resumed:
        assert_close(got, want)
        assert got_losses == pytest.approx(losses[3:], rel=1e-5)
