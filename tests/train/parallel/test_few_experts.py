"""Ranks with fewer experts than owners, or with none, train like one process, and the work is sharded.

The tests use toy models for each optimizer, and real runs, which would hang on collectives in the wrong order.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_comm.topology import ExpertPlacement, ParallelConfig, ParallelMesh, Sharding, Split
from moe_comm.train.optim import OptimizerOptions
from moe_comm.train.parallel import DataParallelOptions, LocalParameter
from moe_comm.train.parallel.fsdp import fits
from tests.pool import RankPool
from tests.train.common import SGD, assert_same_training, train as train_run, write_text
from tests.train.toy import assemble, pieces, train

STRATEGIES = ("zero1", "fsdp")
OPTIMIZERS = {
    "sgd": OptimizerOptions(kind="sgd", momentum=0.5),
    "adamw": OptimizerOptions(kind="adamw"),
    "lamb": OptimizerOptions(kind="lamb"),
    "muon": OptimizerOptions(kind="muon", momentum=0.9),
}
CASES = {
    "1 expert, edp 4": (1, ParallelConfig(dp=4)),
    "1 expert a rank, edp 2": (2, ParallelConfig(dp=4, ep=2)),
    "2 experts, edp 4": (2, ParallelConfig(dp=4)),
    "1 expert, etp 2, edp 2": (1, ParallelConfig(tp=2, dp=2, etp=2)),
    "3 experts on 4 ranks": (3, ParallelConfig(dp=4, ep=4)),
    "1 expert on 2 ranks, edp 2": (1, ParallelConfig(dp=4, ep=2)),
}
UNEVEN = "layers.0.experts.uneven"
"""Neither dimension divides by 4; shards of two experts along other dimensions are not contiguous."""


def shardings_of(experts: int, ep: int) -> dict[str, Sharding]:
    split = Split(0, "ep", sizes=ExpertPlacement.balanced(experts, ep).experts_per_rank)
    return {
        "layers.0.norm.weight": Sharding((8,)),
        "layers.0.router.weight": Sharding((experts, 8)),
        "layers.0.experts.w13": Sharding((experts, 16, 8), (split, Split(1, "etp", segments=2)), expert=True),
        "layers.0.experts.w2": Sharding((experts, 6, 8), (split, Split(2, "etp")), expert=True),
        "layers.0.experts.b2": Sharding((experts, 8), (split,), expert=True),
        UNEVEN: Sharding((experts, 7, 5), (split,), expert=True),
        "layers.1.norm.weight": Sharding((8,)),
    }


def trained_on(config: ParallelConfig, experts: int, strategy: str, kind: str) -> Any:
    mesh = ParallelMesh(config)
    # In transfer threads too: ranks with other numbers of experts have other buckets.
    options = DataParallelOptions(sharding=strategy, overlap_gradients="on" if kind == "adamw" else "off")
    shardings = shardings_of(experts, config.ep)
    data_parallel, _, _ = train(mesh, options, OPTIMIZERS[kind], shardings=shardings, bucket_bytes=900)
    owned = data_parallel.owned()
    counts = {item.name: item.value.numel() for item in owned}
    assert counts == {item.name: math.prod(item.shape_of(mesh, mesh.rank)) for item in owned}
    return pieces(owned, mesh), counts


def trained(rank: int, world: int, arg: tuple[str, int]) -> Any:
    """Train with two of the optimizers. They and the strategies alternate with the case, so that the tests cover all
    pairs."""
    case, number = arg
    experts, config = CASES[case]
    kinds = [*OPTIMIZERS][number % 2 :: 2]
    pairs = [(STRATEGIES[(i + number // 2) % 2], kind) for i, kind in enumerate(kinds)]
    return {pair: trained_on(config, experts, *pair) for pair in pairs}


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_trains_as_one_process_and_every_rank_owns_a_shard(pool4: RankPool, case: str) -> None:
    experts, config = CASES[case]
    results = pool4.run(trained, (case, list(CASES).index(case)), timeout=240)
    shardings = shardings_of(experts, config.ep)
    for strategy, kind in results[0]:
        alone = trained_on(ParallelConfig(), experts, "replicate", kind)[0]
        expected = assemble([alone], shardings)
        for name, value in assemble([result[strategy, kind][0] for result in results], shardings).items():
            difference = (value - expected[name]).abs().max() / expected[name].abs().max()
            assert difference < 1e-5, f"{strategy}, {kind}: {name} differs by {difference:.1e}"
    for rank, result in enumerate(results):
        for strategy, kind in result:
            for name, count in result[strategy, kind][1].items():
                sharding = shardings[name]
                part = math.prod(sharding.local_shape(config.place(rank), config.sizes))
                if "experts" in name and name != UNEVEN:
                    owners = config.size(*(("edp",) if strategy == "fsdp" else sharding.sum_axes))
                    assert count == part / owners, f"{strategy}: rank {rank} owns {count} of {part} elements of {name}"
                elif strategy == "zero1":
                    assert count > 0 or not part, f"rank {rank} owns nothing of {name}"


REAL = {
    "2 ranks without experts": ("model.experts=1", "parallel.ep=2", "model.recompute=full"),
    "a stage's rank without experts": (
        "model.experts=1",
        "parallel.ep=2",
        "parallel.pp=2",
        "parallel.schedule=zero_bubble",
    ),
}


@pytest.mark.parametrize("case", REAL)
def test_real_fsdp_runs_train_as_one_process(pool4: RankPool, tmp_path: Path, case: str) -> None:
    common = [*write_text(tmp_path), *SGD, "model.top_k=1", "model.experts=1"]
    results = pool4.run(train_run, [*common, *REAL[case], "parallel.sharding=fsdp"], timeout=120)
    assert_same_training(results, train_run(0, 1, common))


def test_fsdp_shards_the_unit_of_a_rank_without_experts_but_not_an_empty_vocabulary_shard() -> None:
    empty = nn.Parameter(torch.empty(0, 8))
    experts = Sharding((2, 8), (Split(0, "ep"),), expert=True)
    assert fits(LocalParameter("layers.0.experts.w", empty, experts, torch.float32))
    assert not fits(LocalParameter("embed.weight", empty, Sharding((9, 8), (Split(0, "tp"),)), torch.float32))
