"""MoE layers overlap by default if other modules run while rows are in flight, and the cost model predicts a gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.comm.group_setup import communicator_of
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import Transformer
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.tuning import choose as tuning
from moe_comm.overlap.tuning.cost import GroupRates
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import TrainConfig, load
from moe_comm.train.loop.build import architecture_of, build_stages
from tests.layers.transfers import TransferLog, record_transfers
from tests.pool import RankPool

MODEL = [
    "model.vocab=300",
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.experts=4",
    "model.top_k=2",
    "model.ffn=16",
    "data.seq_len=32",
]
SHARED = ["model.shared_ffn=256"]
SHORTCUT = ["model.shortcut=true", "model.dense_ffn=256"]
PARALLEL = ["model.parallel_block=true"]
LINK = GroupRates(1e-5, 1e7, 1.0, 1e-5, 1e-6, ((16, 1e9), (1024, 1e9)))
"""A slow link that works beside the cores."""
CORES = GroupRates(1e-5, 1e7, 0.0, 1e-5, 1e-6, ((16, 1e9), (1024, 1e9)))
"""Transfers use the cores, as between processes of one machine."""


def _config(settings: list[str]) -> TrainConfig:
    return load(None, [*MODEL, "parallel.backend=all_to_all", *settings])


def _overlaps(settings: list[str]) -> list[Overlap | None]:
    """Return the settings of the MoE layers, and of all other layers."""
    config = _config(["parallel.ranks=1", *settings])
    (stage,) = build_stages(config, architecture_of(config, None), ParallelMesh(ParallelConfig()), "meta")
    return [*(layer.overlap for layer in stage.moe_layers()), stage.plan.overlap]


@pytest.mark.parametrize("branch", [SHARED, SHORTCUT, PARALLEL], ids=["shared", "shortcut", "parallel"])
def test_the_default_asks_the_cost_model_where_other_modules_run_beside_the_experts(branch: list[str]) -> None:
    auto = Overlap("auto")
    assert _overlaps(branch) == [auto, auto, None]
    assert _overlaps([*branch, "parallel.overlap_chunks=0"]) == [None] * 3
    assert _overlaps([*branch, "parallel.overlap_chunks=3"]) == [Overlap(3)] * 3
    assert _overlaps([*branch, 'faults.plan=["flip_bit:step=1"]']) == [None] * 3


def test_without_such_modules_the_default_is_no_overlap() -> None:
    assert _overlaps([]) == [None] * 3


def _train(settings: list[str]) -> tuple[list[Tensor], TransferLog]:
    config = _config(settings)
    mesh = ParallelMesh(ParallelConfig(dp=2, ep=2))
    (stage,) = build_stages(config, architecture_of(config, None), mesh)
    assert isinstance(stage, Transformer)
    initialize(stage, 3)
    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(mesh.rank))
    with record_transfers() as log:
        for block in stage.layers.values():
            log.watch("beside", block.dense if hasattr(block, "second_dense") else block.moe.shared)  # type: ignore[arg-type]
            if hasattr(block, "second_dense"):
                log.watch("second", block.second_dense)  # type: ignore[arg-type]
        stage.loss(stage(ids), ids).backward()
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    stage.close()
    return gradients, log


def _in_flight(rank: int, world: int, arg: tuple[list[str], GroupRates]) -> dict[str, Any]:
    """Return whether transfers are in flight during the other modules, by event. Gradients do not change."""
    settings, rates = arg
    expected, serial = _train([*settings, "parallel.overlap_chunks=0"])
    assert not any(pending for _, pending in serial.events)
    communicator = communicator_of(torch.distributed.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "rates_of", lambda *_: rates)
        communicator.forget("tuning")
        gradients, log = _train(settings)
    communicator.forget("tuning")
    assert len(gradients) == len(expected) and all(map(torch.equal, gradients, expected))
    return {
        name: {bool(pending) for event, pending in log.events if event == name} for name in sorted(dict(log.events))
    }


@pytest.mark.parametrize("rates", [LINK, CORES], ids=["link", "cores"])
@pytest.mark.parametrize(
    ("branch", "names"),
    [(SHARED, ("beside", "beside backward")), (SHORTCUT, ("beside", "beside backward", "second", "second backward"))],
    ids=["shared", "shortcut"],
)
def test_the_default_hides_transfers_behind_these_modules_if_the_model_predicts_a_gain(
    branch: list[str], names: tuple[str, ...], rates: GroupRates, pool2: RankPool
) -> None:
    """The order of operators is fixed, and gradients have the same bits."""
    assert pool2.run(_in_flight, (branch, rates)) == [{name: {rates is LINK} for name in names}] * 2
