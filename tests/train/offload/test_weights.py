"""Runs with weights in the host's memory have the bits of runs without, also after a resume from each other's
checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from moe_comm.observe.report.figures import panels
from moe_comm.observe.report.read import read_run
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from moe_comm.train import run
from moe_comm.train.dry_run import examine
from moe_comm.train.loop.progress import LineProgress
from moe_comm.train.metrics import TensorBoardSink
from moe_comm.train.optim import make_optimizer
from moe_comm.train.parallel import DataParallel
from moe_comm.train.parallel.parameters import OwnedParameter, WeightsReport
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
    shown = panels(read_run(folder_of(mixed)))["curves"]["values"]
    for name in ("read", "written", "stored"):
        assert [value is not None for value in shown[f"weights_{name}"]] == [True, True, False, False, True, True]
    assert not any("weights" in name for name in panels(read_run(folder_of(resident)))["curves"]["values"])


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


def _copies(rank: int, world: int, settings: Sequence[str]) -> tuple[WeightsReport, int]:
    """Return the copies of the second step, and the bytes of this rank's shards."""
    with session([*settings, WEIGHTS]) as active:
        reports = [active.trainer.train_step(step).weights for step in range(2)]
        assert reports[1] is not None
        return reports[1], sum(item.value.nbytes for item in active.trainer.train_state.data_parallel.owned())


@pytest.mark.parametrize(
    "changes",
    [
        ("parallel.ep=1", "data.micro_batches=2"),
        ("parallel.ep=2", "data.micro_batches=1", "model.recompute=full"),  # the experts are units of one rank
        ("parallel.ep=1", "model.dtype=bfloat16", "model.recompute=full", "parallel.overlap_gradients=on"),
        ("parallel.pp=2", "data.micro_batches=2"),
    ],
)
def test_copied_bytes_are_those_of_the_dry_run(
    pool2: RankPool, shared_settings: list[str], changes: tuple[str, ...]
) -> None:
    settings = (*shared_settings, *FSDP, *changes, "parallel.ranks=2")
    positions = examine(config_of([*settings, WEIGHTS])).positions
    expected = [rank.copied for position in positions for rank in position.ranks]
    reports, shards = zip(*pool2.run(_copies, settings, timeout=60), strict=True)
    assert [report.read + report.stored for report in reports] == expected  # gradients are as large as shards
    assert [report.written for report in reports] == list(shards)
    assert all(report.written <= report.stored < 1.01 * report.written for report in reports)


def _gathers(rank: int, world: int, settings: Sequence[str]) -> list[str]:
    """Return the units that gather weights in a step, in order, with the pass that they precede or "prefetch"."""
    with session(settings) as active:
        active.trainer.train_step(0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            active.trainer.train_step(1)
    gathered = [event for event in profile.events() if event.name.startswith("FSDP::all_gather (")]
    names = []
    for event in sorted(gathered, key=lambda event: event.time_range.start):
        parent = event.cpu_parent
        prefetched = parent is not None and "_prefetch for" in parent.name
        names.append(event.name[len("FSDP::all_gather (layers.") : -1] + " ahead" * prefetched)
    return names


@pytest.mark.parametrize("settings", [(), ("model.recompute=full",), ("parallel.overlap_gradients=on",)])
def test_weights_on_the_host_are_gathered_a_layer_ahead(
    pool2: RankPool, shared_settings: list[str], settings: tuple[str, ...]
) -> None:
    common = (*shared_settings, *FSDP, "parallel.ep=1", "model.layers=3", "data.micro_batches=1", *settings)
    layers = [[f"{layer} ahead", f"{layer}.moe.experts ahead"] for layer in range(3)]
    forward = [unit for layer in layers for unit in layer]
    backward = [unit for layer in reversed(layers) for unit in layer]
    for gathered in pool2.run(_gathers, (*common, WEIGHTS), timeout=60):
        assert gathered == forward + backward
    if "parallel.overlap_gradients=on" in settings:
        for gathered in pool2.run(_gathers, (*common, "model.recompute=full"), timeout=60):
            assert gathered == forward + backward  # recomputation does not gather the next layer again


def test_events_and_progress_have_the_copied_bytes(
    shared_settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="needs the train extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with session(shared_settings) as active:
        report = replace(active.trainer.train_step(0), weights=WeightsReport(1 << 30, 3 << 29, 1 << 29))
    events, progress = TensorBoardSink(tmp_path), LineProgress(1)
    events.write(report)
    events.close()
    result = EventAccumulator(str(tmp_path)).Reload()
    values = {name: result.Scalars(f"weights/{name}_gib")[0].value for name in ("stored", "read", "written")}
    assert values == {"stored": 1.0, "read": 1.5, "written": 0.5}
    progress.start(2)
    progress.update(report)
    progress.update(replace(report, weights=None))
    first, second = capsys.readouterr().out.splitlines()
    assert "weights copied 2 GiB" in first and "weights" not in second
