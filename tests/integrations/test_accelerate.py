"""accelerate trains, clips, saves and resumes swapped models like one process, or raises on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm
from moe_comm.integrations.hugging_face import expert_mesh, prepare_accelerator, swap_moe
from tests.integrations.loops import (
    OWN,
    STEPS,
    OwnGPT,
    TrainingCase,
    assert_equals_one_process,
    before_resume,
    check_against_one_process,
    error_of,
    launched,
    let_fsdp_run_on_the_cpu,
    make_accelerator,
    make_optimizer,
    resumed,
    with_accelerate,
)
from tests.integrations.models import VOCAB, ep_group, load, num_targets, save_model, token_loss
from tests.integrations.test_state import assert_same
from tests.pool import RankPool


def train(rank: int, world: int, cases: list[TrainingCase]) -> list[tuple[dict[str, Tensor], list[float]]]:
    results = []
    for case in cases:
        with launched(rank, world):
            _, model, losses = with_accelerate(case, world)
            state = moe_comm.state_dict(model)
            results.append((state if rank == 0 else {}, losses))
    return results


check = partial(check_against_one_process, train)


@pytest.mark.parametrize(
    "rank_counts", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("2 to 4", "4 to 2")), "4 to 1"]
)
def test_a_run_resumed_on_a_different_number_of_ranks_matches_an_uninterrupted_one(
    rank_counts: str, folders: list[str], tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    """The resumed run also has a different wrapper. One process loads with plain accelerate."""
    before, after = int(rank_counts[0]), int(rank_counts[-1])
    pools: dict[int, RankPool] = {2: pool2, 4: pool4}
    first = before_resume(folders, tmp_path, stop=3)
    pools[before].run(train, first)
    second = [resumed(case, "-3", after, out="", stop=STEPS) for case in first]
    if after > 1:
        check(pools[after], second)
        return
    for case in second:
        with launched(0, 1):
            _, model, losses = with_accelerate(replace(case, ep=1), 1, prepare=lambda accelerator: accelerator)
            assert_equals_one_process(case, model.state_dict(), losses)


def test_ranks_without_experts_train_save_and_resume(tmp_path: Path, pool2: RankPool, pool4: RankPool) -> None:
    folder = save_model("mixtral", tmp_path / "model", num_local_experts=3, hidden_size=16)
    cases = [TrainingCase(folder, name, ep=4, out=str(tmp_path / name), stop=2) for name in ("ddp", "fsdp2")]
    check(pool4, cases)
    check(pool4, [resumed(case, "-2", 4, stop=4) for case in cases])
    check(pool2, [resumed(case, "-4", 2, ep=2, stop=STEPS, out="") for case in cases])


@dataclass(frozen=True)
class Step:
    """Sequences of each rank. same: the router of every block chooses the same experts for all tokens."""

    folder: str
    wrapper: str
    ep: int
    sequences: tuple[int, ...]
    same: bool = False

    def model(self, mesh: Any = None) -> Any:
        if self.folder == OWN:
            return OwnGPT(mesh and mesh.get_group("ep"))
        model = load(self.folder).train()
        if self.same:
            for name, param in model.named_parameters():
                if name.endswith((".gate.weight", ".router.weight")):
                    param.data.zero_()  # top-k of equal logits
        return swap_moe(model, mesh)

    def ids(self) -> list[Tensor]:
        ids = torch.randint(3, VOCAB, (sum(self.sequences), 9), generator=torch.Generator().manual_seed(5))
        return list(ids.split(self.sequences))


def clipped_step(rank: int, world: int, cases: list[Step]) -> list[tuple[dict[str, Tensor], float]]:
    """Return the whole model after one step of SGD with clipped gradients, and the norm that clipping returns."""
    results = []
    for case in cases:
        with launched(rank, world):
            accelerator = prepare_accelerator(make_accelerator(TrainingCase(case.folder, case.wrapper, accumulate=1)))
            model = case.model(expert_mesh(case.ep, accelerator.device.type))
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
            ids = case.ids()
            loss = token_loss(model(input_ids=ids[rank]).logits, ids[rank], num_targets(ids))
            accelerator.backward(loss * world)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            results.append((moe_comm.state_dict(model), float(norm)))
    return results


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_gradient_sums_and_the_norm_of_clipping_equal_one_process(
    wrapper: str, folders: list[str], pool4: RankPool
) -> None:
    world, uneven, none = 4, (3, 1, 2, 2), (0, 2, 1, 3)
    cases = [Step(folder, wrapper, ep, uneven) for folder in folders for ep in (2, world)]
    # transformers runs no batch of 0 sequences.
    cases += [
        Step(OWN, wrapper, 2, uneven),
        Step(OWN, wrapper, world, none),
        Step(folders[1], wrapper, world, uneven, same=True),
    ]
    results = pool4.run(clipped_step, cases)
    for case, *ranks in zip(cases, *results, strict=True):
        model, ids = case.model(), case.ids()
        token_loss(model(input_ids=torch.cat(ids)).logits, torch.cat(ids), num_targets(ids)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert norm > 0.1
        torch.optim.SGD(model.parameters(), 1.0).step()
        for state, got in ranks:
            assert got == pytest.approx(norm, rel=1e-5), str(case)
            assert state.keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def meshes(rank: int, world: int, _: None) -> tuple[list[int], list[int], str, str]:
    mesh = expert_mesh(2)
    assert mesh is not None
    ranks = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("ep", "edp")]
    return (*ranks, error_of(expert_mesh, 3), error_of(expert_mesh, 0))


def test_expert_mesh_has_consecutive_ranks_of_different_experts(pool4: RankPool) -> None:
    for rank, (ep, edp, *errors) in enumerate(pool4.run(meshes)):
        start = rank // 2 * 2
        assert ep == [start, start + 1] and edp == [rank % 2, rank % 2 + 2]
        assert all(error.startswith("ConfigError") and "4" in error for error in errors)
    assert expert_mesh() is None


def write(rank: int, world: int, arg: tuple[TrainingCase, str]) -> dict[str, Any]:
    """Train, then save in every way that accelerate documents."""
    case, folder = arg
    with launched(rank, world):
        accelerator, model, _ = with_accelerate(case, world)
        accelerator.save_model(model, f"{folder}/weights")
        state = accelerator.get_state_dict(model)
        inner = accelerator.unwrap_model(model)
        inner.save_pretrained(f"{folder}/model", is_main_process=accelerator.is_main_process, state_dict=state)
        refused = error_of(inner.save_pretrained, f"{folder}/part")
        local = moe_comm.state_dict(model, form="local")
        refused_local = error_of(inner.save_pretrained, f"{folder}/part", state_dict=local)
        accelerator.wait_for_everyone()
        return {"expected": moe_comm.state_dict(model), "refused": [refused, refused_local]}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_saved_models_are_complete(wrapper: str, folders: list[str], tmp_path: Path, pool2: RankPool) -> None:
    from safetensors.torch import load_file

    for folder in folders:
        out = tmp_path / Path(folder).name
        results = pool2.run(write, (TrainingCase(folder, wrapper), str(out)))
        expected = results[0]["expected"]
        assert_same(load(str(out / "model")).state_dict(), expected)
        assert_same(load_file(out / "weights" / "model.safetensors"), expected)
        for result in results:
            assert all("save_swapped" in message for message in result["refused"])
        assert not (out / "part").exists()


def use_without_integration(rank: int, world: int, folder: str) -> list[str]:
    """Return the errors of plain accelerate with a swapped model."""
    messages = []
    with launched(rank, world):
        accelerator = make_accelerator(TrainingCase(folder))
        model = swap_moe(load(folder), ep_group(2))
        model, _ = accelerator.prepare(model, make_optimizer(model, "adamw"))
        for call, args in (
            (accelerator.save_state, (f"{folder}/refused",)),
            (accelerator.save_model, (model, f"{folder}/refused")),
            (accelerator.get_state_dict, (model,)),
            (accelerator.load_state, (folder,)),
        ):
            messages.append(error_of(call, *args))
    with launched(rank, world):
        accelerator = make_accelerator(TrainingCase(folder, "fsdp2"))
        model = swap_moe(load(folder), ep_group(2))
        messages.append(error_of(accelerator.prepare, model, make_optimizer(model, "adamw")))
    return messages


def test_unsupported_calls_of_plain_accelerate_raise_on_every_rank(folders: list[str], pool2: RankPool) -> None:
    for folder in folders:
        for messages in pool2.run(use_without_integration, folder, timeout=60):
            for message in messages:
                assert message.startswith("ConfigError") and "prepare_accelerator(accelerator)" in message, message


def train_without_integration(rank: int, world: int, case: TrainingCase) -> tuple[dict[str, Tensor], list[float]]:
    with launched(rank, world):
        _, model, losses = with_accelerate(case, world, prepare=lambda accelerator: accelerator)
        return moe_comm.state_dict(model), losses


def test_plain_accelerate_trains_under_ddp(folders: list[str], pool2: RankPool) -> None:
    case = TrainingCase(folders[1])
    assert_equals_one_process(case, *pool2.run(train_without_integration, case)[0])


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Any:
        return self.inner(**inputs)


def wrap_and_train(rank: int, world: int, case: TrainingCase) -> str:
    with launched(rank, world):
        accelerator = prepare_accelerator(make_accelerator(case))
        model = Wrapper(swap_moe(load(case.folder), ep_group(2)))
        model, optimizer = accelerator.prepare(model, make_optimizer(model, "adamw"))
        ids = torch.arange(8).reshape(1, 8)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        return error_of(optimizer.step)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_module_that_contains_a_swapped_model_trains(wrapper: str, folders: list[str], pool2: RankPool) -> None:
    assert pool2.run(wrap_and_train, TrainingCase(folders[1], wrapper, accumulate=1)) == ["no error"] * 2


def refuse_settings(rank: int, world: int, folder: str) -> dict[str, str]:
    messages = {}
    for name, settings in (
        ("cpu_ram_efficient_loading", {"cpu_ram_efficient_loading": True}),
        ("cpu_offload", {"cpu_offload": True}),
        ("fsdp_version", {}),
    ):
        with launched(rank, world):
            accelerator = prepare_accelerator(_accelerator(folder, name, settings))
            model = swap_moe(load(folder), ep_group(2))
            messages[name] = error_of(accelerator.prepare, model, make_optimizer(model, "adamw"))
    for name, set_up in (("fp16", _scale), ("DEEPSPEED", _use_deepspeed), ("data parallelism only", _use_tp)):
        with launched(rank, world):
            accelerator = prepare_accelerator(make_accelerator(TrainingCase(folder, "fsdp2")))
            set_up(accelerator)
            model = swap_moe(load(folder), ep_group(2))
            messages[name] = error_of(accelerator.prepare, model, make_optimizer(model, "adamw"))
    with launched(rank, world):
        accelerator = prepare_accelerator(make_accelerator(TrainingCase(folder, "fsdp2")))
        model = swap_moe(load(folder), ep_group(2))
        foreign = make_optimizer(load(folder), "adamw")
        messages["build it after swap_moe"] = error_of(accelerator.prepare, model, foreign)
        model, _ = accelerator.prepare(model, make_optimizer(model, "adamw"))
        some = list(model.parameters())[:2]
        messages["model.parameters()"] = error_of(accelerator.clip_grad_norm_, some, 1.0)
    return messages


def _scale(accelerator: Any) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu")  # accelerate creates one on GPUs only


def _use_deepspeed(accelerator: Any) -> None:
    from accelerate import DistributedType

    accelerator.state.distributed_type = DistributedType.DEEPSPEED  # the package is not installed


def _use_tp(accelerator: Any) -> None:
    from accelerate import ParallelismConfig

    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)


def _accelerator(folder: str, name: str, settings: dict[str, Any]) -> Any:
    if name != "fsdp_version":
        return make_accelerator(TrainingCase(folder, "fsdp2"), **settings)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    let_fsdp_run_on_the_cpu()
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1), cpu=True)


def test_unsupported_settings_raise_on_every_rank_and_are_named(folders: list[str], pool2: RankPool) -> None:
    for messages in pool2.run(refuse_settings, folders[1], timeout=60):
        for named, message in messages.items():
            assert message.startswith(("ConfigError", "UnsupportedModel")) and named in message, message


def resume_and_count(rank: int, world: int, case: TrainingCase) -> int:
    with launched(rank, world):
        accelerator, _, _ = with_accelerate(case, world)
        accelerator.load_state(case.resume)
        return int(accelerator.step)


def test_four_ranks_resume_at_the_micro_batch_that_two_ranks_saved(
    folders: list[str], tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    case = TrainingCase(folders[0], out=str(tmp_path / "run"), stop=1)
    pool2.run(train, [case])
    steps = pool4.run(resume_and_count, replace(case, out="", resume=f"{case.out}-1", stop=1))
    assert steps == [case.accumulate] * 4


def fail_to_write(rank: int, world: int, arg: tuple[TrainingCase, str]) -> str:
    case, blocked = arg
    with launched(rank, world):
        accelerator, _, _ = with_accelerate(case, world)
        return error_of(accelerator.save_state, blocked)


def test_a_save_that_fails_on_one_rank_raises_on_every_rank(
    folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    (tmp_path / "state" / "model.safetensors").mkdir(parents=True)
    first, second = pool2.run(fail_to_write, (TrainingCase(folders[0], stop=1), str(tmp_path / "state")))
    assert first.split(":")[0] not in ("no error", "CheckpointError")
    assert second.startswith("CheckpointError")


def test_models_that_are_not_swapped_are_trained_and_saved_by_plain_accelerate(
    saved: Callable[[str], str], tmp_path: Path
) -> None:
    with launched(0, 1):
        accelerator = prepare_accelerator(make_accelerator(TrainingCase(saved("mixtral"), accumulate=1)))
        assert prepare_accelerator(accelerator) is accelerator
        model = torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, "adamw"))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, torch.tensor(6.0).sqrt())
        optimizer.step()
        accelerator.save_state(str(tmp_path))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        torch.nn.init.zeros_(model.weight)
        accelerator.load_state(str(tmp_path))
        assert_same(model.state_dict(), expected)
