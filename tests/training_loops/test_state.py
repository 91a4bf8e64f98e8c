"""State dicts of models and optimizers: saving raises if experts would be lost, and full state dicts are exact."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import moe_comm
from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from tests.pool import RankPool, on_ranks
from tests.training_loops.loops import OPTIMIZERS, Case, loss_at, wrap
from tests.training_loops.models import KINDS, ep_group


def build_and_train(case: Case, rank: int, world: int, steps: int = 0) -> tuple[Any, Any, list[float]]:
    """Return model and optimizer after ``steps`` steps, and the losses of the global batch. Collective."""
    model = wrap(KINDS[case.kind].on(ep_group(case.ep)), case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    return model, optimizer, train_steps(model, optimizer, case, range(steps), rank, world)


def train_steps(model: Any, optimizer: Any, case: Case, steps: range, rank: int = 0, world: int = 1) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_at(model, step, rank, world, mean=case.loop != "own sum")
        loss.backward()
        if case.loop == "own sum":
            moe_comm.sync_gradients(model)
        optimizer.step()
        losses_by_rank: list[Any] = [float(loss.detach())]
        if world > 1:
            losses_by_rank = [None] * world
            dist.all_gather_object(losses_by_rank, float(loss.detach()))
        losses.append(sum(losses_by_rank) / (1 if case.loop == "own sum" else world))
    return losses


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    """Return a line for each value in which two nested state dicts differ in a bit."""
    if isinstance(want, Mapping):
        if got.keys() != want.keys():
            return [f"{path}: keys {got.keys() ^ want.keys()}"]
        return [line for key in want for line in differences(got[key], want[key], f"{path}/{key}")]
    if isinstance(want, Tensor):
        return [] if torch.equal(got, want) else [f"{path}: {tuple(got.shape)} differs from {tuple(want.shape)}"]
    return [] if got == want else [f"{path}: {got} instead of {want}"]


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return copies of the full state dicts. Collective."""
    state = {"model": moe_comm.state_dict(model), "optimizer": moe_comm.optimizer_state_dict(model, optimizer)["state"]}
    return copy.deepcopy(state)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["gpt, 5 experts", "qwen3"])
def test_saving_one_ranks_experts_raises_on_every_rank(rank: int, world: int, kind: str, tmp_path: Path) -> None:
    save_directly(kind, tmp_path, rank, world)


@on_ranks(4)
def test_saving_raises_on_ranks_without_experts_too(rank: int, world: int, tmp_path: Path) -> None:
    save_directly("gpt, 3 experts", tmp_path, rank, world)


def save_directly(kind: str, folder: Path, rank: int, world: int) -> None:
    """Save the state dicts of this rank in every way, each of which must raise."""
    model, optimizer, _ = build_and_train(Case(kind, "own sum", world, "adamw"), rank, world, steps=1)
    fresh = OPTIMIZERS["adamw"](model.parameters())
    moe_comm.load_optimizer_state_dict(model, fresh, moe_comm.optimizer_state_dict(model, optimizer, form="local"))
    ways: list[Callable[[], object]] = [
        lambda: save_file(dict(model.state_dict()), folder / f"{rank}.safetensors"),
        lambda: torch.save(fresh.state_dict(), io.BytesIO()),
    ]
    for state in (model.state_dict(), optimizer.state_dict()):
        ways += [
            partial(torch.save, state, io.BytesIO()),
            partial(pickle.dumps, state),
            partial(torch.save, {"ema": decayed(state)}, io.BytesIO()),
        ]
    for way in ways:
        with pytest.raises(ConfigError, match=r"moe_comm.state_dict\(model\)"):
            way()
    assert not list(folder.iterdir())


def decayed(state: Any) -> Any:
    """Return an average of ``state``, computed out of place."""
    if isinstance(state, Mapping):
        return {key: decayed(value) for key, value in state.items()}
    return 0.9 * state + 0.1 * state.clone() if isinstance(state, Tensor) else state


@on_ranks(4)
@pytest.mark.parametrize(
    "kind", [pytest.param("gpt, 3 experts", marks=pytest.mark.slow), "gpt, etp 2", "mixtral, 5 experts"]
)
def test_every_form_of_the_state_loads_bit_for_bit(rank: int, world: int, kind: str) -> None:
    for case in (Case(kind, "ddp", 4, "adamw"), Case(kind, "fsdp", 2, "adamw")):
        model, optimizer, _ = build_and_train(case, rank, world, steps=2)
        want = whole(model, optimizer)
        other, fresh, _ = build_and_train(case, rank, world)
        for form in ("full", "sharded", "local"):
            train_steps(other, fresh, case, range(1), rank, world)  # other weights
            model_state: Any = moe_comm.state_dict(model, form=form)  # type: ignore[arg-type]
            optimizer_state = moe_comm.optimizer_state_dict(model, optimizer, form=form)  # type: ignore[arg-type]
            moe_comm.load_state_dict(other, copy.deepcopy(model_state))
            moe_comm.load_optimizer_state_dict(other, fresh, copy.deepcopy(optimizer_state))
            assert not differences(whole(other, fresh), want, f"{case}, {form}")
            if form == "local" and case.loop != "fsdp":
                torch.save([model_state, optimizer_state], io.BytesIO())
        first = moe_comm.state_dict(model, rank0_only=True, cpu=True)
        assert not differences(first, want["model"] if rank % case.ep == 0 else {}, f"{case}, rank 0 only")


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "loop", "ep"),
    [
        ("gpt, 3 experts", "own sum", 4),
        ("mixtral, 5 experts", "ddp", 2),
        ("gpt, shared expert, frozen router", "fsdp", 2),
    ],
)
def test_gathered_gradients_are_those_of_one_process(rank: int, world: int, kind: str, loop: str, ep: int) -> None:
    case = Case(kind, loop, ep)
    model, reference = wrap(KINDS[kind].on(ep_group(ep)), case), KINDS[kind].on(None)
    loss_at(reference, 0).backward()
    loss_at(model, 0, rank, world, mean=loop != "own sum").backward()
    if loop == "own sum":
        moe_comm.sync_gradients(model)
    weights = moe_comm.gather_state_dict(model)
    gradients = moe_comm.gather_gradients(model)
    assert gradients.keys() == dict(reference.named_parameters()).keys()
    for name, param in reference.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=1e-6)
        if loop == "own sum" and "experts" in name:
            assert torch.equal(gradients[name], expected), name
    assert not differences(moe_comm.gather_state_dict(model), weights, "weights")
    assert bool(moe_comm.gather_gradients(model, rank0_only=True)) == (rank % ep == 0)


def save_and_continue(rank: int, world: int, arg: tuple[Case, str]) -> list[float]:
    """Save after two steps. Return the losses of steps 2 to 4."""
    case, file = arg
    model, optimizer, _ = build_and_train(case, rank, world, steps=2)
    state = {
        "model": moe_comm.state_dict(model, rank0_only=True),
        "optimizer": moe_comm.optimizer_state_dict(model, optimizer, rank0_only=True),
    }
    if rank == 0:
        torch.save(state, file)
    return train_steps(model, optimizer, case, range(2, 5), rank, world)


def resume(rank: int, world: int, arg: tuple[Case, str]) -> list[float]:
    case, file = arg
    state = torch.load(file)
    model, optimizer, _ = build_and_train(case, rank, world)
    moe_comm.load_state_dict(model, state["model"])
    moe_comm.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train_steps(model, optimizer, case, range(2, 5), rank, world)


@pytest.mark.parametrize(
    ("kind", "loop"), [("gpt, 5 experts", "own sum"), ("mixtral, 5 experts", "ddp"), ("gpt, 5 experts", "fsdp")]
)
def test_a_run_resumes_from_the_file_of_rank_0_on_any_number_of_ranks(
    kind: str, loop: str, tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    pools = {2: pool2, 4: pool4}
    for ranks, others in ((2, (2, 4)), (4, (2,))):
        file = str(tmp_path / f"{ranks}.pt")
        case = Case(kind, loop, 2, "adamw")
        expected = pools[ranks].run(save_and_continue, (case, file), timeout=120)[0]
        for other in others:
            losses = pools[other].run(resume, (case, file), timeout=120)[0]
            if other == ranks:
                assert losses == expected
            assert losses == pytest.approx(expected, rel=1e-5), f"{ranks} to {other} ranks"
        assert resume(0, 1, (Case(kind, "own sum", 1, "adamw"), file)) == pytest.approx(expected, rel=1e-5)


def save_distributed(rank: int, world: int, arg: tuple[Case, str, str]) -> Any:
    """Save with torch's distributed checkpoint. Return the full state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    case, folder, how = arg
    model, optimizer, _ = build_and_train(case, rank, world, steps=2)
    want = whole(model, optimizer)
    if how == "get_state_dict":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
    else:
        state = {"model": moe_comm.state_dict(model, form="sharded")}
    dcp.save(state, checkpoint_id=folder)
    return want


def load_distributed(rank: int, world: int, arg: tuple[Case, str, str, Any]) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    case, folder, how, want = arg
    model, optimizer, _ = build_and_train(case, rank, world, steps=1 if how == "get_state_dict" else 0)
    if how == "get_state_dict":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return differences(whole(model, optimizer), want, str(case))
    state = {"model": moe_comm.state_dict(model, form="sharded")}
    dcp.load(state, checkpoint_id=folder)
    moe_comm.load_state_dict(model, state["model"])
    return differences(moe_comm.state_dict(model), want["model"], str(case))


@pytest.mark.parametrize(
    ("kind", "loop", "method"),
    [
        ("gpt, 5 experts", "ddp", "get_state_dict"),
        ("gpt, 3 experts", "own sum", "state_dict"),
        ("qwen3", "fsdp", "get_state_dict"),
    ],
)
def test_distributed_checkpoints_load_on_another_number_of_ranks(
    kind: str, loop: str, method: str, tmp_path: Path, pool2: RankPool, pool4: RankPool
) -> None:
    for source, target in ((pool2, pool4), (pool4, pool2)):
        folder = str(tmp_path / str(source.world))
        want = source.run(save_distributed, (Case(kind, loop, source.world, "adamw"), folder, method), timeout=120)[0]
        arg = (Case(kind, loop, 2, "adamw"), folder, method, want)
        wrong = [line for lines in target.run(load_distributed, arg, timeout=120) for line in lines]
        assert not wrong, "\n".join(wrong)


@on_ranks(2)
def test_saving_by_async_save_raises_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = KINDS["gpt, 5 experts"].on(ep_group(world))
    state = {"model": moe_comm.state_dict(model, form="sharded")}
    with pytest.raises(ConfigError, match="not async_save"):
        dcp.async_save(state, checkpoint_id=tmp_path / "saved")


@on_ranks(2)
def test_copies_and_averages_have_the_experts_of_all_ranks(rank: int, world: int) -> None:
    case = Case("gpt, 5 experts", "ddp", world, "adamw")
    ddp, optimizer, _losses = build_and_train(case, rank, world, steps=2)
    model = ddp.module
    want = copy.deepcopy(moe_comm.state_dict(model))
    assert not differences(moe_comm.state_dict(copy.deepcopy(model)), want)
    state = copy.deepcopy(model.state_dict())
    train_steps(ddp, optimizer, case, range(2, 3), rank, world)
    later = copy.deepcopy(moe_comm.state_dict(model))
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            state[name].lerp_(value, 0.25)
    average = {k: v.lerp(later[k], 0.25) if v.is_floating_point() else v for k, v in want.items()}
    model.load_state_dict(state)
    assert not differences(moe_comm.state_dict(model), average)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    assert not differences(moe_comm.state_dict(averaged.module), average)
    with pytest.raises(ConfigError):
        torch.save(averaged.state_dict(), io.BytesIO())
    # Training a copy must not change the model.
    twin = copy.deepcopy(model)
    train_steps(twin, OPTIMIZERS["sgd"](twin.parameters()), Case("", "own sum", world), range(1), rank, world)
    assert not differences(moe_comm.state_dict(model), average)


class RowMeans(torch.optim.SGD):
    """Keeps a mean of each row of a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = param.grad.mean(-1, keepdim=True)
        return super().step(closure)


@on_ranks(2)
def test_state_of_other_shapes_and_other_ranks_raises(rank: int, world: int) -> None:
    model, optimizer, _losses = build_and_train(Case("gpt, 5 experts", "own sum", world, "adamw"), rank, world, steps=1)
    key = "blocks.0.moe.experts.w13"
    full = moe_comm.state_dict(model)
    other = KINDS["gpt, 3 experts"].on(ep_group(world))
    peer_experts: list[Any] = [None] * world
    dist.all_gather_object(peer_experts, moe_comm.state_dict(model, form="local")[key])
    peer_state = model.state_dict()
    peer_state[key] = type(peer_state[key]).of(peer_experts[1 - rank], of_rank(peer_state[key].shards, 1 - rank), "w13")
    truncated = copy.deepcopy(moe_comm.optimizer_state_dict(model, optimizer))
    for values in truncated["state"].values():
        values["exp_avg"] = values["exp_avg"][:1]
    factored = RowMeans(model.parameters(), 0.1)
    loss_at(model, 0, rank, world).backward()
    moe_comm.sync_gradients(model)
    factored.step()
    with pytest.raises(InputError):
        moe_comm.load_state_dict(other, full)  # experts of another number
    with pytest.raises(InputError):
        moe_comm.load_state_dict(model, {**full, key: full[key][..., :-1]})
    with pytest.raises(InputError):
        moe_comm.load_state_dict(model, {**full, "embed.weight": full["embed.weight"][1:]})
    for load in (partial(moe_comm.load_state_dict, model), model.load_state_dict):
        with pytest.raises(InputError):
            load(peer_state)
    with pytest.raises(InputError):
        moe_comm.load_optimizer_state_dict(model, optimizer, truncated)
    with pytest.raises(UnsupportedModel):
        moe_comm.optimizer_state_dict(model, factored)
    with pytest.raises(ConfigError):
        torch.save(factored.state_dict(), io.BytesIO())


def of_rank(shards: Any, rank: int) -> Any:
    """Return ``shards`` with the coordinates of another rank."""
    return type(shards)(shards.group, shards.shardings, shards.place_of(rank), shards.sizes)


class WithExtraState(torch.nn.Linear):
    """A layer whose state dict has a value that is not a tensor."""

    extra: object = None

    def get_extra_state(self) -> object:
        return {"scale": 2.0}

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_values_that_are_not_tensors_are_loaded_unchanged() -> None:
    model = WithExtraState(2, 2)
    moe_comm.load_state_dict(model, moe_comm.state_dict(model))
    assert model.extra == {"scale": 2.0}
