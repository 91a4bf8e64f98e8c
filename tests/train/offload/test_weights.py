"""Runs with weights in the host's memory have the bits of runs without, also after a resume from each other's
checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from moe_comm.train import run
from moe_comm.train.optim import make_optimizer
from moe_comm.train.parallel import DataParallel
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions
from tests.pool import RankPool
from tests.train.common import config_of, session
from tests.train.loop.test_resume import AUTO, _run_until, folder_of, losses_of, state_of

FSDP = ("parallel.sharding=fsdp", "optimizer.clip=0.5")
WEIGHTS = "offload.weights=host"
STEPS = 3
CASES = {
    "tp, muon, full": (
        *("parallel.tp=2", "parallel.etp=2", "parallel.ep=1", "model.recompute=full"),
        *("optimizer.kind=muon", "optimizer.momentum=0.9", "optimizer.lr=0.01"),
    ),
    "edp, shared expert, lamb": ("parallel.ep=1", "model.shared_ffn=24", "optimizer.kind=lamb"),
    "pp, tied, sgd": (
        *("parallel.pp=2", "model.layers=4", "model.tie=true", "optimizer.kind=sgd", "optimizer.momentum=0.9"),
        "optimizer.lr=0.03",
    ),
}


def _train(rank: int, world: int, settings: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Train without and with offload; return losses and norms of both, and the names of weights that differ."""
    losses, weights = [], []
    for options in ((), (WEIGHTS,)):
        with session([*settings, *options]) as active:
            steps = [active.trainer.train_step(step) for step in range(STEPS)]
            losses.append([(step.loss, step.grad_norm) for step in steps])
            owned = active.trainer.train_state.data_parallel.owned()
            weights.append({item.name: item.value.detach().clone() for item in owned})
            assert _offloads(active.trainer.train_state.stages) == {bool(options)}
    expected, actual = weights
    return losses, [name for name, value in expected.items() if not torch.equal(value, actual[name])]


def _offloads(stages: Sequence[nn.Module]) -> set[bool]:
    """Return whether the units of FSDP offload. On CPU ranks only FSDP's private state shows it."""
    units: list[Any] = [module for stage in stages for module in stage.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups if group is not None}


@pytest.mark.parametrize("case", CASES)
def test_weights_on_the_host_change_no_bit(pool2: RankPool, shared_settings: list[str], case: str) -> None:
    for losses, different in pool2.run(_train, [*shared_settings, *FSDP, *CASES[case]], timeout=60):
        assert losses[0] == losses[1]
        assert len(losses[0]) == STEPS
        assert different == []


def test_runs_resume_with_and_without_weights_on_the_host(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path
) -> None:
    common = [*shared_settings, *FSDP, "run.steps=6", "checkpoint.every=2", "parallel.ep=2", "model.dtype=bfloat16"]
    common += ["parallel.overlap_gradients=on", "run.nonfinite=rerun"]
    common += ["offload.optimizer=file", "offload.budget=256KiB", f"offload.path={tmp_path}"]
    resident, mixed = ([*common, f"run.folder={tmp_path / name}"] for name in ("resident", "mixed"))
    pool2.run(_run_until, (resident, None), timeout=90)
    pool2.run(_run_until, ([*mixed, WEIGHTS], 2), timeout=90)
    pool2.run(_run_until, ([*mixed, AUTO], 4), timeout=90)
    pool2.run(_run_until, ([*mixed, WEIGHTS, AUTO], None), timeout=90)
    assert losses_of(folder_of(mixed)) == losses_of(folder_of(resident))
    actual, expected = state_of(folder_of(mixed)), state_of(folder_of(resident))
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def _memory(rank: int, world: int, settings: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of all tensors of a new trainer, and those of this rank's shards."""
    gc.collect()
    before = _live_storages()
    with session(settings) as active:
        gc.collect()
        owned = active.trainer.train_state.data_parallel.owned()
        shards = sum(item.value.nbytes for item in owned)
        now = _live_storages()
        return sum(now[key] for key in now.keys() - before.keys()), shards


def _live_storages() -> dict[int, int]:
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # isinstance fails on dead proxies
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    plain = [one.untyped_storage() for one in local if one.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in plain}


def test_fsdp_frees_the_complete_weights(pool2: RankPool, shared_settings: list[str]) -> None:
    large = ("model.hidden=128", "model.ffn=256", "parallel.ep=1", "optimizer.kind=sgd", "optimizer.momentum=0")
    for everything, shards in pool2.run(_memory, [*shared_settings, *FSDP, *large], timeout=60):
        assert shards > 1 << 20
        assert shards <= everything < 1.5 * shards  # all weights are twice the shards of two ranks


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lamb", "muon"])
def test_the_update_of_weights_on_the_host_mixes_no_devices(kind: Any) -> None:
    """Fake tensors know their device, and operators refuse to mix them."""
    mesh = ParallelMesh(ParallelConfig(), "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        matrix, vector, experts = (
            OwnedParameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu")), Sharding(shape))
            for name, shape in (("layers.0.attention.q.weight", (8, 8)), ("norm.weight", (8,)), ("w", (4, 8, 8)))
        )
        experts.sharding = Sharding((4, 8, 8), expert=True)
        optimizer = make_optimizer([matrix, vector, experts], mesh, OptimizerOptions(kind=kind, momentum=0.9))
        for item in (matrix, vector, experts):
            item.value.grad = torch.ones_like(item.value)
        optimizer.step(0.1)
        assert all(item.value.device.type == "cpu" for item in (matrix, vector, experts))


def _refused_on_one_rank(rank: int, world: int, settings: list[str]) -> str:
    replicated = mock.patch.object(DataParallel, "_in_unit", return_value=False) if rank == 1 else nullcontext()
    with replicated, pytest.raises(ConfigError) as caught, session(settings):
        pass
    return str(caught.value)


def test_all_ranks_refuse_weights_that_one_rank_does_not_shard(pool2: RankPool, shared_settings: list[str]) -> None:
    for message in pool2.run(_refused_on_one_rank, [*shared_settings, *FSDP, WEIGHTS], timeout=60):
        assert "FSDP does not shard" in message


def test_settings_that_do_not_fit_are_refused(shared_settings: list[str]) -> None:
    for settings, message in (
        ((WEIGHTS,), "requires parallel.sharding"),
        ((WEIGHTS, "parallel.sharding=zero1"), "requires parallel.sharding"),
        ((WEIGHTS, *FSDP, "placement.kind=relocate"), "placement.kind"),
        ((WEIGHTS, *FSDP, "placement.balance={rows = 1.0}"), "placement.balance"),
        ((WEIGHTS, *FSDP, "offload.optimizer=host", "offload.budget=1MiB"), "set optimizer = 'none'"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_of([*shared_settings, *settings])
    with pytest.raises(ConfigError, match="start a process group, also for one rank"):
        run(None, [*shared_settings, *FSDP, WEIGHTS])
