"""Loops of ``MoETrainer`` and accelerate train and clip like one process, and ``MoETrainer`` saves and resumes."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import moe_comm
from moe_comm.integrations.checkpoint import save
from moe_comm.integrations.hugging_face import swap_moe
from tests.integrations.loops import (
    OWN,
    TrainingCase,
    assert_equals_one_process,
    before_resume,
    check_against_one_process,
    error_of,
    launched,
    make_trainer,
    matrix,
    one_process,
    product,
    resumed,
    spread_model,
)
from tests.integrations.models import ep_group, load
from tests.integrations.test_accelerate import train as train_with_accelerate
from tests.integrations.test_state import assert_same
from tests.pool import RankPool, Work

SAVED = 2
"""Step of the checkpoint from which training resumes."""


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(
    rank: int, world: int, case: TrainingCase, kind: Any = None, **settings: Any
) -> tuple[dict[str, Tensor], list[float]]:
    with launched(rank, world):
        model = spread_model(case)
        trainer = make_trainer(case, world, model, kind, **settings)
        trainer.train(resume_from_checkpoint=case.resume or None)
        losses = logged(trainer)
        state = moe_comm.state_dict(trainer.model)
        return state, losses[SAVED:] if case.resume else losses


def train(rank: int, world: int, cases: list[TrainingCase]) -> list[tuple[dict[str, Tensor], list[float]]]:
    results = [run(rank, world, case) for case in cases]
    return results if rank == 0 else []


SLOW = pytest.mark.slow
check = partial(check_against_one_process, train)
loops = pytest.mark.parametrize("loop", [train_with_accelerate, train], ids=["accelerate", "Trainer"])


@pytest.mark.parametrize(
    ("world", "loop"),
    [
        (2, train_with_accelerate),
        pytest.param(4, train_with_accelerate, marks=SLOW),
        pytest.param(2, train, marks=SLOW),
        (4, train),
    ],
    ids=["accelerate-2", "accelerate-4", "Trainer-2", "Trainer-4"],
)
def test_parameters_after_five_steps_equal_those_of_one_process(
    world: int, loop: Work, folders: list[str], pool2: RankPool, pool4: RankPool
) -> None:
    check_against_one_process(loop, {2: pool2, 4: pool4}[world], matrix(folders, world))


@SLOW
@loops
@pytest.mark.timeout(1200)
def test_every_combination_of_settings_equals_one_process(
    loop: Work, folders: list[str], pool2: RankPool, pool4: RankPool
) -> None:
    check_against_one_process(loop, pool2, product(folders, 2))
    check_against_one_process(loop, pool4, product(folders, 4))


@loops
def test_bf16_stays_close_to_one_process_in_bf16(loop: Work, folders: list[str], pool2: RankPool) -> None:
    cases = [TrainingCase(folders[0], wrapper, bf16=True) for wrapper in ("ddp", "fsdp2")]
    for case, (_, losses) in zip(cases, pool2.run(loop, cases)[0], strict=True):
        assert losses == pytest.approx(one_process(case)[1], rel=0.02), str(case)


def train_and_save(rank: int, world: int, cases: list[TrainingCase]) -> None:
    for case in cases:
        run(rank, world, case, save_strategy="steps", save_steps=SAVED)


@pytest.mark.parametrize(
    "rank_counts", [pytest.param("2 to 4", marks=SLOW), "4 to 2", pytest.param("4 to 1", marks=SLOW)]
)
def test_a_run_resumed_on_a_different_number_of_ranks_matches_an_uninterrupted_one(
    rank_counts: str, folders: list[str], tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    """The resumed run also has a different wrapper. Each checkpoint is a full model for ``from_pretrained``."""
    before, after = int(rank_counts[0]), int(rank_counts[-1])
    pools: dict[int, RankPool] = {2: pool2, 4: pool4}
    first = before_resume(folders, tmp_path)
    pools[before].run(train_and_save, first)
    for case in first:
        if case.folder == OWN:
            continue
        params, _ = one_process(replace(case, stop=SAVED))
        for name, value in load(f"{case.out}/checkpoint-{SAVED}").state_dict().items():
            torch.testing.assert_close(value, params[name], rtol=1e-5, atol=1e-5)
    second = [resumed(case, f"/checkpoint-{SAVED}", after) for case in first]
    if after > 1:
        check(pools[after], second)
        return
    for case in second:
        assert_equals_one_process(case, *run(0, 1, replace(case, ep=1)))


def save_and_load_best(rank: int, world: int, case: TrainingCase) -> tuple[dict[str, Any], list[str]]:
    """Evaluate after each step with a metric that is best after the second one."""
    from transformers import Trainer

    from moe_comm.integrations.hugging_face import MoETrainerMixin

    class Mine(MoETrainerMixin, Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_mine": float(abs(self.state.global_step - SAVED))}

    with launched(rank, world):
        model = swap_moe(load(case.folder), ep_group(case.ep))
        settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "mine", "greater_is_better": False}
        settings |= {"save_total_limit": 2}
        trainer = make_trainer(case, world, model, Mine, **settings)
        trainer.train()
        trainer.save_model(f"{case.out}/final")
        best = moe_comm.state_dict(trainer.model)
        errors = []
        for name in ("os.pwrite", "os.preadv"):  # on one rank, the disk fails
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(name, broken)
                errors.append(error_of(trainer.train, resume_from_checkpoint=f"{case.out}/checkpoint-{SAVED}"))
        damaged = Path(f"{case.out}/checkpoint-{SAVED}/optimizer.pt")
        if rank == 0:
            damaged.write_bytes(damaged.read_bytes()[:-100])
        dist.barrier()
        errors.append(error_of(trainer.train, resume_from_checkpoint=f"{case.out}/checkpoint-{SAVED}"))
        return best, errors


def save_to_own_folders(rank: int, world: int, case: TrainingCase) -> dict[str, Tensor]:
    """Save to a folder of each rank, as on hosts that do not share files."""
    save.VISIBLE_S = 0.1  # private: the time that a network file system needs
    try:
        with launched(rank, world):
            model = swap_moe(load(case.folder), ep_group(case.ep))
            out = f"{case.out}/{rank}"
            trainer = make_trainer(
                replace(case, out=out), world, model, save_strategy="steps", save_steps=1, max_steps=1
            )
            trainer.train()
            accelerator = trainer.accelerator
            accelerator.save_state(f"{out}/state")
            return moe_comm.state_dict(trainer.model)
    finally:
        save.VISIBLE_S = 10.0


def test_hosts_that_do_not_share_files_gather_on_the_first(folders: list[str], tmp_path: Path, pool2: RankPool) -> None:
    state = pool2.run(save_to_own_folders, TrainingCase(folders[0], out=str(tmp_path)))[0]
    assert_same(load(f"{tmp_path}/0/checkpoint-1").state_dict(), state)
    assert_same(load_file(tmp_path / "0" / "state" / "model.safetensors"), state)
    optimizer = torch.load(tmp_path / "0" / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert any(value["exp_avg"].shape[0] == 8 for value in optimizer["state"].values())
    assert not list((tmp_path / "1").rglob("*.safetensors"))


def broken(*args: Any) -> int:
    raise OSError(errno.EIO, "the disk is gone")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_subclass_loads_the_best_model_and_saves_the_full_model(
    wrapper: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    for folder in folders:
        case = TrainingCase(folder, wrapper, out=str(tmp_path / Path(folder).name))
        (best, errors), (_, errors_of_1) = pool2.run(save_and_load_best, case)
        assert [error.split(":")[0] for error in errors] == ["CheckpointError", "CheckpointError", "CorruptFile"]
        assert [error.split(":")[0] for error in errors_of_1] == ["OSError", "CheckpointError", "CorruptFile"]
        for error, words in zip(
            errors + errors_of_1, ["the disk is gone", "the disk is gone", "optimizer.pt"] * 2, strict=True
        ):
            assert words in error
        assert_same(load(f"{case.out}/final").state_dict(), best)
        load(f"{case.out}/final").save_pretrained(tmp_path / "plain")
        names = {path.name for path in (tmp_path / "plain").iterdir()} | {"training_args.bin"}
        assert {path.name for path in (Path(case.out) / "final").iterdir()} == names
        weights = [
            (folder / "model.safetensors").read_bytes() for folder in (Path(case.out) / "final", tmp_path / "plain")
        ]
        assert weights[0] == weights[1]
        expected, _ = one_process(replace(case, stop=SAVED))
        for name, value in best.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
        architecture = json.loads((Path(case.out) / "final" / "config.json").read_text())["architectures"]
        assert architecture == [type(load(folder)).__name__]


def use_plain_trainer(rank: int, world: int, folder: str) -> dict[str, str]:
    from transformers import Trainer

    messages = {}
    with launched(rank, world):
        model = swap_moe(load(folder), ep_group(2))
        trainer = make_trainer(TrainingCase(folder), world, model, Trainer, save_strategy="steps")
        messages["train with checkpoints"] = error_of(trainer.train)
    with launched(rank, world):
        trainer = make_trainer(TrainingCase(folder), world, model, Trainer)
        messages["save_model"] = error_of(trainer.save_model, f"{folder}/refused")
        messages["resume"] = error_of(trainer.train, resume_from_checkpoint=folder)
    with launched(rank, world):
        trainer = make_trainer(TrainingCase(folder, "fsdp2"), world, model, Trainer)
        messages["fsdp2"] = error_of(trainer.train)
    return messages


def test_unsupported_calls_of_plain_trainer_raise_on_every_rank(folders: list[str], pool2: RankPool) -> None:
    for folder in folders:
        for messages in pool2.run(use_plain_trainer, folder, timeout=60):
            for what, message in messages.items():
                expected = "prepare_accelerator" if what == "fsdp2" else "MoETrainer"
                assert message.startswith("ConfigError") and expected in message, f"{what}: {message}"


def import_trainer_late(rank: int, world: int, case: TrainingCase) -> tuple[bool, str]:
    with launched(rank, world):
        model = swap_moe(load(case.folder), ep_group(2))
        late = "transformers.trainer" not in sys.modules
        from transformers import Trainer

        from moe_comm.integrations.hugging_face import MoETrainer

        assert issubclass(MoETrainer, Trainer)
        trainer = make_trainer(case, world, model, Trainer, save_strategy="steps", save_steps=1)
        return late, error_of(trainer.train)


def test_the_trainer_is_imported_on_first_use_and_one_imported_after_the_swap_raises_at_its_first_checkpoint(
    folders: list[str], tmp_path: Path
) -> None:
    with RankPool(2, bare=True) as pool:
        for late, message in pool.run(import_trainer_late, TrainingCase(folders[0], out=str(tmp_path)), timeout=60):
            assert late
            assert message.startswith("ConfigError") and "MoETrainer" in message
    assert not list(tmp_path.rglob("*.safetensors"))


def train_plain(rank: int, world: int, case: TrainingCase) -> tuple[dict[str, Tensor], list[float]]:
    from transformers import Trainer

    return run(rank, world, case, Trainer)


def test_plain_trainer_without_checkpoints_trains_under_ddp(folders: list[str], pool2: RankPool) -> None:
    case = TrainingCase(folders[1])
    assert_equals_one_process(case, *pool2.run(train_plain, case)[0])


def test_a_model_on_one_rank_resumes_with_its_experts(folders: list[str], tmp_path: Path) -> None:
    """Plain ``Trainer`` does not restore them, because its checkpoints use the names of the hub."""
    case = TrainingCase(folders[0], out=str(tmp_path), ep=1)
    run(0, 1, case, save_strategy="steps", save_steps=SAVED)
    again = replace(case, resume=str(tmp_path / f"checkpoint-{SAVED}"))
    assert_equals_one_process(again, *run(0, 1, again))
