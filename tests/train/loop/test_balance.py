"""Training while experts are lent to other ranks, compared with training without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import PeerToPeerOptions
from moe_comm.errors import ConfigError
from moe_comm.layers import MoELayer
from moe_comm.layers.moe.load import moe_layers
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import load
from moe_comm.train.dry_run import fake_ranks
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.metrics import StepReport
from tests.pool import RankPool
from tests.train.common import SGD, Trained, assert_close, assert_floats, session, whole
from tests.train.loop.test_resume import AUTO, MOMENTUM, _run_until, folder_of, losses_of, weights_of

LEND = "placement.balance={rows = 1.0, worth = 0}"


def train_lending(rank: int, world: int, settings: list[str]) -> tuple[Trained, list[float]]:
    """Train, and return also how many experts the layers of all stages lent in a call, mean of each step."""
    lent = []
    with session(settings) as active:
        layers = [layer for stage in active.stages for _, layer in moe_layers(stage)]

        def count(report: StepReport) -> None:
            load, lends = report.load, [layer.last_plan is not None for layer in layers]
            lent.append(sum(load.lent_experts))
            if not any(lends):
                return
            assert all(lends) and max(load.rows_lent) <= 1.02 < max(load.rows_fixed)  # the mean is rounded up
            assert max(load.copied_bytes) > 0
            for layer in layers:
                assert layer.dispatch_stats is not None and layer.last_plan is not None
                assert layer.dispatch_stats.received == layer.last_plan.rows[layer.place["ep"]]
            if "data.micro_batches=1" in settings:  # plans count what is not dropped
                kept = [round(sum(slots) * (1 - drop)) for slots, drop in zip(load.slots, load.dropped, strict=True)]
                rows = [sum(layer.last_plan.rows) for layer in layers if layer.last_plan is not None]
                assert rows == kept and (sum(load.dropped) > 0) is ("model.capacity=1.2" in settings)

        status = active.trainer.fit(count)
        reports = active.trainer.reports
        trained = Trained(
            [one.loss for one in reports],
            [one.grad_norm for one in reports],
            [],
            active.parts(),
            active.trainer.evaluate(),
            status,
        )
        return trained, lent


CASES = {
    "zero1, overlap": (2, "parallel.sharding=zero1 parallel.overlap_chunks=2"),
    "replicate, interleaved": (2, "parallel.sharding=replicate parallel.interleave=true parallel.overlap_chunks=2"),
    "fsdp, recomputation": (2, "parallel.sharding=fsdp model.recompute=full"),
    "fsdp, sent weights": (2, "parallel.sharding=fsdp parallel.backend=all_to_all data.micro_batches=2"),
    "zero1, capacity": (2, "parallel.sharding=zero1 model.capacity=1.2 data.micro_batches=1"),
    "fsdp, capacity of batches": (2, "parallel.sharding=fsdp model.capacity=1.2 model.capacity_scope=batch"),
    "1f1b": (
        4,
        "parallel.pp=2 parallel.schedule=1f1b data.micro_batches=4 parallel.sharding=fsdp model.recompute=full",
    ),
    "interleaved 1f1b": (
        4,
        "parallel.pp=2 parallel.schedule=interleaved_1f1b model.layers=4 data.micro_batches=4 parallel.sharding=zero1",
    ),
    "zero bubble, fsdp, sent weights": (
        4,
        "parallel.pp=2 parallel.schedule=zero_bubble model.layers=4 data.micro_batches=4 parallel.sharding=fsdp "
        "parallel.backend=all_to_all",
    ),
    "zero bubble, zero1, recomputation": (
        4,
        "parallel.pp=2 parallel.schedule=zero_bubble model.layers=4 data.micro_batches=4 parallel.sharding=zero1 "
        "model.recompute=selective",
    ),
    "zbv, zero1, overlap": (
        4,
        "parallel.pp=2 parallel.schedule=zbv model.layers=4 data.micro_batches=4 parallel.sharding=zero1 "
        "parallel.overlap_chunks=2",
    ),
    "zbv, fsdp, full recomputation": (
        4,
        "parallel.pp=2 parallel.schedule=zbv model.layers=4 data.micro_batches=4 parallel.sharding=fsdp "
        "model.recompute=full",
    ),
    "zbv, ep 4, sent weights": (
        8,
        "parallel.pp=2 parallel.ep=4 parallel.schedule=zbv model.layers=4 data.micro_batches=2 parallel.sharding=zero1 "
        "parallel.backend=all_to_all",
    ),
    "dualpipev": (
        4,
        "parallel.pp=2 parallel.schedule=dualpipev model.layers=4 data.micro_batches=4 parallel.sharding=zero1",
    ),
    "dualpipev, interleaved": (
        4,
        "parallel.pp=2 parallel.schedule=dualpipev model.layers=4 data.micro_batches=8 data.batch=16 "
        "parallel.sharding=replicate parallel.interleave=true parallel.overlap_chunks=2 parallel.backend=all_to_all",
    ),
    "etp, fsdp, sent weights": (4, "parallel.etp=2 parallel.sharding=fsdp parallel.backend=all_to_all"),
    "etp, zero1, recomputation": (4, "parallel.etp=2 parallel.sharding=zero1 model.recompute=full"),
    "edp": (4, "parallel.sharding=zero1 parallel.overlap_gradients=on"),
}


@pytest.mark.parametrize(("world", "settings"), CASES.values(), ids=CASES)
def test_a_run_that_lends_experts_trains_the_same_model(
    world: int, settings: str, shared_settings: list[str], pools: dict[int, RankPool]
) -> None:
    pool, given = pools[world], [*shared_settings, "parallel.ep=2", *SGD, *settings.split()]
    expected = [one for one, _ in pool.run(train_lending, given, timeout=120)]
    results = pool.run(train_lending, [*given, LEND], timeout=120)
    for (trained, lent), wanted in zip(results, expected, strict=True):
        assert len(lent) == 4 and min(lent) > 0
        assert trained.losses[0] == wanted.losses[0]  # later ones follow from gradients with other bits
        assert_floats(trained.losses, wanted.losses)
        assert_floats(trained.norms, wanted.norms, 3e-5)
        assert_floats([trained.validation], [wanted.validation])
    assert_close(whole([one.parts for one, _ in results]), whole([one.parts for one in expected]), 3e-4)


def train_over_sockets(rank: int, world: int, arg: tuple[list[str], bool]) -> tuple[Trained, list[float]]:
    """Train while gloo sends the weights of experts that are lent. Return also the resident share of each step.

    arg: settings, and whether the weights are sent behind attention.
    """
    settings, behind_attention = arg
    with session(settings) as active, pytest.MonkeyPatch.context() as patch:
        configure_collectives(CollectiveOptions(shared_memory=False))
        if not behind_attention:  # calls send the weights before their plan
            patch.setattr(MoELayer, "prefetch", lambda layer: None)
        active.trainer.fit()
        reports = active.trainer.reports
        trained = Trained(
            [one.loss for one in reports], [one.grad_norm for one in reports], [], active.parts(), 0.0, ""
        )
        return trained, [max(one.load.resident_share, default=0.0) for one in reports]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, ["parallel.sharding=zero1", "model.recompute=full"]),
        (2, ["parallel.interleave=true", "parallel.overlap_chunks=2"]),
        (4, ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "model.layers=4", "checkpoint.every=2"]),
    ],
)
def test_weights_sent_behind_attention_change_no_bits(
    world: int, settings: list[str], shared_settings: list[str], pools: dict[int, RankPool]
) -> None:
    settings = [*shared_settings, "parallel.ep=2", "parallel.backend=all_to_all", LEND, *SGD, *settings]
    expected, results = (
        pools[world].run(train_over_sockets, (settings, behind), timeout=120) for behind in (False, True)
    )
    for (trained, shares), (wanted, _) in zip(results, expected, strict=True):
        assert (trained.losses, trained.norms) == (wanted.losses, wanted.norms)
        assert shares[0] == 0 < shares[1] and (shares[2] == 0) is ("checkpoint.every=2" in settings)
    parts = [whole([one.parts for one, _ in runs]) for runs in (results, expected)]
    assert all(torch.equal(tensor, parts[1][name]) for name, tensor in parts[0].items())


def test_a_run_that_lends_experts_resumes_on_other_numbers_of_ranks(
    settings: list[str], pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    """Two steps on each mapping have the losses of one process. The last mapping does not lend experts."""
    common = [*settings, *MOMENTUM, "run.steps=6", "checkpoint.every=2"]
    alone = [*common, f"run.folder={tmp_path / 'alone'}"]
    _run_until(0, 1, (alone, None))
    stages = (
        (pool2, ["parallel.ep=2", LEND], 2),
        (pool4, ["parallel.ep=4", LEND], 4),
        (pool2, ["parallel.ep=2"], None),
    )
    for pool, mapping, crash in stages:
        pool.run(_run_until, ([*common, AUTO, *mapping], crash), timeout=90)
    folder = folder_of(common)
    assert_floats(losses_of(folder), losses_of(folder_of(alone)))
    assert_close(weights_of(folder), weights_of(folder_of(alone)))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [sum(one["load"].get("lent_experts", ())) > 0 for one in lines if "load" in one] == [True] * 4 + [False] * 2


def test_masters_in_files_train_experts_that_moved_to_shared_memory(
    shared_settings: list[str], pool2: RankPool, tmp_path: Path
) -> None:
    settings = [*shared_settings, "parallel.ep=2", *SGD, LEND, "model.dtype=bfloat16"]
    offload = ["offload.optimizer=file", "offload.budget=256KiB", f"offload.path={tmp_path}"]
    expected, offloaded = (pool2.run(train_lending, one, timeout=60) for one in (settings, [*settings, *offload]))
    for (wanted, _), (trained, lent) in zip(expected, offloaded, strict=True):
        assert min(lent) > 0
        assert (trained.losses, trained.validation) == (wanted.losses, wanted.validation)


def test_layers_have_room_for_the_rows_that_balance_allows() -> None:
    settings = ["model.top_k=2", "data.batch=12", "data.micro_batches=2", "data.seq_len=32", "model.dtype=bfloat16"]
    balance, memory = "placement.balance={memory = 1.25}", 'peer_to_peer.capacity_rows="memory"'
    for more, rows in (
        ([balance, memory, "peer_to_peer.heap_bytes=4096"], 120),  # 3 sequences on 2 ranks, 2 slots a token, 1.25
        (["peer_to_peer.capacity_rows=7", "peer_to_peer.heap_bytes=4096"], 7),
        ([], None),
    ):
        config = load(None, [*settings, "parallel.backend=all_to_all", *more])
        with fake_ranks(4, 0):
            mesh = ParallelMesh(ParallelConfig(dp=2, tp=2, ep=4))
            (stage,) = build_stages(config, architecture_of(config, 300), mesh, "meta")
        for _, layer in moe_layers(stage):
            options = layer.dispatcher.options
            assert options.peer_to_peer == PeerToPeerOptions(None if rows is None else 4096, capacity_rows=rows)
            assert options.checked is (rows is None)
    for more in (
        [],
        [LEND],
        [balance, "parallel.lengths=balanced", "parallel.context=ring", "data.documents=separate"],
    ):
        with pytest.raises(ConfigError, match=r"peer_to_peer\.capacity_rows"):
            load(None, [memory, *more])


def test_settings_that_balance_does_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match="balance"):
        load(None, [LEND, "placement.kind=relocate"])
    for removed in ("placement.kind=replicate", "placement.slots=1", "placement.rematerialize=true"):
        with pytest.raises(ConfigError, match=r"placement\.(kind|slots|rematerialize).*placement\.balance"):
            load(None, [removed])
    with pytest.raises(ConfigError, match="rows"):
        load(None, ["placement.balance={rows = 0.5}"])
