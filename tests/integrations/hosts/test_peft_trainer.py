"""Adapters (LoRA of PEFT) through ``MoETrainer`` on 2 ranks against one process with plain ``Trainer``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import

import pytest

pytest.importorskip("peft", reason="needs make hosts")

import torch
from torch import Tensor

from moe_comm.integrations.hugging_face import swap_moe
from tests.integrations.loops import TrainingCase, launched, make_trainer
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


def assert_same_run(ours: str, theirs: str) -> None:
    for folder in (f"checkpoint-{SAVED}", "final"):
        got, want = files(f"{ours}/{folder}"), files(f"{theirs}/{folder}")
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k} {m}")
    got, want = (torch.load(f"{out}/checkpoint-{SAVED}/optimizer.pt") for out in (ours, theirs))
    assert got["param_groups"] == want["param_groups"] and got["state"].keys() == want["state"].keys()
    for index, values in want["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(got["state"][index][key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", list(SETTINGS))
def test_training_saving_and_resuming_equal_one_process(
    target: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    from transformers import Trainer

    for folder in folders:
        one, two = (str(tmp_path / Path(folder).name / name) for name in ("one", "two"))
        case = TrainingCase(folder, out=one)
        losses = train(0, 1, case, target, Trainer)
        for got in pool2.run(on_ranks, (replace(case, out=two), target)):
            assert got == pytest.approx(losses, rel=1e-5)
        assert_same_run(two, one)
        # at the other number of ranks, from each other's checkpoints
        case = replace(case, out=f"{two}b", resume=f"{one}/checkpoint-{SAVED}")
        pool2.run(on_ranks, (case, target))
        case2 = replace(case, out=f"{one}b", resume=f"{two}/checkpoint-{SAVED}")
        train(0, 1, case2, target)
        for out in (case.out, case2.out):
            for key, value in files(f"{one}/final").items():
                torch.testing.assert_close(files(f"{out}/final")[key], value, rtol=1e-5, atol=1e-5)
