"""Documents on their ranks: the same tokens, losses and gradients as whole sequences in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.sequence import shard_sequence
from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.lengths.cost import LengthCost
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, prepare_all
from moe_comm.train.dry_run import describe
from moe_comm.train.lengths.feed import PlacedBatch, check_model, cost_of, documents_of, open_feed, static_work
from moe_comm.train.lengths.predict import LengthPrediction, can_balance, predict_lengths
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.lengths import UNIT_S
from moe_plan.step.step import StepModel
from tests.pool import RankPool
from tests.train.common import config_of
from tests.train.data.common import corpus_of, pairs, write_jsonl

LENGTHS = [40, 3, 1, 5, 9, 2, 14, 40, 6, 1, 8, 3, 17, 4, 2, 11, 40, 7, 5]


@pytest.mark.parametrize("packing", ["contiguous", "best_fit", "random"])
def test_documents_have_the_tokens_and_targets_of_the_sequences(packing: str, tmp_path: Path) -> None:
    corpus = corpus_of([LENGTHS], tmp_path, seq_len=16, batch=4, packing=packing, documents="separate", validation=0.1)
    steps = [corpus.batch_of(step) for step in range(4)] + corpus.validation_batches()
    for batch in steps:
        whole = batch.local()
        expected = []
        for row, length in enumerate(whole.ids_BS.ne(corpus.end_of_text).sum(1).tolist()):
            for column in range(length):
                values = (whole.ids_BS, whole.targets_BS, whole.positions_BS)
                expected.append(tuple(int(value[row, column]) for value in values))
        from moe_comm.train.data.packing import read_run

        actual = []
        for own, run in documents_of(batch):
            cut = run.length // 2  # in two parts, as on two ranks
            for begin, size in ((0, cut), (cut, run.length - cut)):
                if size:
                    ids, targets = read_run(own, run, begin, size)
                    actual += zip(ids.tolist(), targets.tolist(), range(begin, begin + size), strict=True)
        assert actual == expected


SETTINGS = (
    *("data.seq_len=32", "data.batch=8", "data.micro_batches=2", "data.documents=separate", "data.packing=best_fit"),
    *("model.hidden=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.experts=4", "model.ffn=24"),
    *("model.init_std=0.2", "model.aux_loss=0.1", "model.z_loss=0.01", "parallel.context=ring"),
    *("parallel.lengths=balanced", "data.validation=0.1", "parallel.backend=all_to_all"),
)
CASES: dict[str, tuple[str, ...]] = {
    "GQA, ep 4": ("parallel.cp=2", "parallel.ep=4"),
    "MLA, cp 4": (
        "parallel.cp=4",
        "parallel.ep=1",
        "model.family=deepseek_v3",
        "model.expert_groups=2",
        "model.aux_loss=0",
    ),
    "window, dp 4": ("parallel.dp=4", "parallel.ep=2", "model.family=mixtral", "model.window=5"),
    "tp 2": ("parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "model.family=olmoe", "model.kv_heads=4"),
    "empty ranks": ("parallel.dp=4", "data.batch=2", "data.seq_len=3", "data.packing=contiguous"),
}


@torch.no_grad()
def prepare_model(config: TrainConfig, corpus: Corpus, mesh: ParallelMesh, alone: bool) -> Transformer:
    architecture = architecture_of(config, corpus.vocab_size)
    stage = Transformer(architecture) if alone else build_stages(config, architecture, mesh)[0]
    initialize(stage, 0)
    for _, layer in moe_layers(stage):
        layer.aux_scale = 1 / config.data.micro_batches
    return stage.double().train()


def compare(rank: int, world: int, arg: tuple[list[str], str]) -> tuple[list[int], list[tuple[int, int]], float]:
    """Compare loss and gradients of two steps with this process alone, in float64.

    Returns:
        tokens of this rank in each micro-batch, (token, target) of all of them, and the largest relative difference.
    """
    settings, folder = arg
    config = config_of(settings)
    corpus = Corpus.open([folder], config.data, 0)
    mesh = ParallelMesh(config.parallel.mapping(world))
    model, alone = (prepare_model(config, corpus, mesh, alone) for alone in (False, True))
    shardings = shardings_of(model)
    tokens: list[int] = []
    seen: list[tuple[int, int]] = []
    largest = 0.0
    with open_feed(config, corpus, mesh, model.config, 2) as feed:
        for step in range(2):
            batch = feed.train(step)
            assert batch.lengths is not None
            static, balanced = batch.lengths.static, batch.lengths.balanced
            assert len(balanced) == mesh.size("cp", "dp") and abs(sum(balanced) / len(balanced) - 1) < 1e-3
            if config.data.batch // config.data.micro_batches >= mesh.size("dp"):
                assert len(static) == len(balanced) and abs(sum(static) / len(static) - 1) < 1e-3
                assert max(balanced) <= 1.2 * max(static)
            else:
                assert static == ()
            losses = torch.zeros(2, dtype=torch.float64)
            for micro in batch.micro:
                hidden = model(micro.ids_BS, **micro.arguments)
                loss = model.loss(hidden, micro.targets_BS) / batch.num_targets
                loss.backward()
                losses[0] += loss.detach()
                tokens.append(micro.ids_BS.shape[1] if micro.mask_BS is None else int(micro.mask_BS.sum()))
                seen += pairs(micro.ids_BS, micro.targets_BS) if mesh.place["tp"] == 0 else []
            for index in range(config.data.micro_batches):
                whole = corpus.batch_of(step).micro(index, config.data.micro_batches).local()
                hidden = alone(whole.ids_BS, whole.positions_BS, whole.documents_BS, whole.mask_BS)
                loss = alone.loss(hidden, whole.targets_BS) / batch.num_targets
                loss.backward()
                losses[1] += loss.detach() / world
    dist.all_reduce(losses)
    largest = float((losses[0] - losses[1]).abs() / losses[1])
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        group = mesh.sum_group(shardings[name])
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
        whole_grad = expected[name].grad
        assert whole_grad is not None, name
        part = shardings[name].take(whole_grad, mesh.place, mesh.sizes)
        largest = max(largest, float((parameter.grad - part).abs().max() / whole_grad.abs().max().clamp_min(1e-30)))
    model.close()
    alone.close()
    return tokens, seen, largest


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_balanced_lengths_equal_those_of_one_process(case: str, pool4: RankPool, tmp_path: Path) -> None:
    rng = random.Random(0)
    documents = ["x" * 31] + [
        "".join(rng.choices("abcdef", k=min(31, int(rng.lognormvariate(1.6, 1))))) for _ in range(80)
    ]
    settings = [*SETTINGS, *CASES[case], f"data.source={write_jsonl(tmp_path / 'd.jsonl', documents)}"]
    settings.append(f"data.cache={tmp_path}")
    config = config_of(settings)
    (folder,) = prepare_all(config.data)
    corpus = Corpus.open([folder], config.data, 0)
    results = pool4.run(compare, (settings, str(folder)))
    assert max(difference for *_, difference in results) <= 1e-10
    expected = [corpus.batch_of(step).local() for step in range(2)]
    all_pairs = sorted(pair for batch in expected for pair in pairs(batch.ids_BS, batch.targets_BS))
    assert sorted(pair for _, seen, _ in results for pair in seen) == all_pairs
    if case == "empty ranks":
        assert any(not count for tokens, *_ in results for count in tokens)
    else:
        assert any(len(set(counts)) > 1 for counts in zip(*(tokens for tokens, *_ in results), strict=True))


def test_a_batch_depends_on_the_step_alone_and_no_rank_reads_all_of_it(tmp_path: Path) -> None:
    corpus = corpus_of([LENGTHS], tmp_path, seq_len=32, batch=4, documents="separate", packing="best_fit")
    config = config_of([*SETTINGS, "data.batch=4", "data.micro_batches=1"])
    architecture = architecture_of(config, 256)
    mesh = ParallelMesh(config.parallel.mapping(1))
    feeds = [open_feed(config, corpus, mesh, architecture, 9) for _ in range(2)]
    for feed in feeds:
        feed._world, feed._rank = 4, 1  # type: ignore[attr-defined]  # without processes
    (first,), (again,) = (feed._read(corpus.batch_of(3)) for feed in feeds)
    for feed in feeds:
        feed.__exit__(None, None, None)
    assert isinstance(first, PlacedBatch) and isinstance(again, PlacedBatch)
    assert first.placement == again.placement and torch.equal(first.ids_BS, again.ids_BS)
    assert 0 < first.ids_BS.shape[1] < 4 * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("data.documents=joined",), "data.documents"),
        (("parallel.context=ulysses",), "parallel.context"),
        (("parallel.pp=2",), "parallel.pp = 1"),
        (("parallel.auto=true",), "parallel.pp = 1"),
        (("model.capacity=1.5",), "no model.capacity"),
    ],
)
def test_settings_that_do_not_fit_raise(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of([*SETTINGS, *changes])


def test_a_balance_loss_of_each_sequence_raises() -> None:
    architecture = architecture_of(config_of(SETTINGS), 256)
    router: Any = replace(architecture.moe.router, balance_form="sequence", balance_loss=0.1)
    with pytest.raises(ConfigError, match="a balance loss of each sequence"):
        check_model(replace(architecture, moe=replace(architecture.moe, router=router)))


@pytest.mark.parametrize("mapping", [("parallel.cp=4",), ("parallel.dp=4",), ("parallel.cp=2", "parallel.dp=2")])
def test_the_prediction_counts_the_pairs_of_every_rank(mapping: tuple[str, ...], tmp_path: Path) -> None:
    corpus = corpus_of([LENGTHS], tmp_path, seq_len=32, batch=8, documents="separate", packing="best_fit")
    config = config_of([*SETTINGS, *mapping, "data.micro_batches=1", "run.steps=1"])
    architecture = architecture_of(config, 256)
    ranks = config.parallel.mapping(4)
    batch = corpus.batch_of(0)
    cost = LengthCost(pair=3, token=5)
    loads = []
    for dp_rank in range(ranks.dp):
        for cp_rank in range(ranks.cp):
            shard = partial(shard_sequence, cp=ranks.cp, rank=cp_rank, context="ring")
            local = batch.local(dp_rank, ranks.dp, shard)
            positions = local.positions_BS if local.mask_BS is None else local.positions_BS[local.mask_BS]
            loads.append(int((3 * (positions + 1) + 5).sum()))
    assert list(static_work(batch, ranks.dp, ranks.cp, cost)) == loads
    prediction = predict_lengths(config, corpus, ranks, architecture)
    assert prediction is not None and 1 <= prediction.balanced <= prediction.static
    model_cost = cost_of(config, architecture, ranks)
    work = static_work(batch, ranks.dp, ranks.cp, model_cost)
    assert prediction.static == pytest.approx(max(work) * 4 / sum(work))


@pytest.mark.parametrize("ep", [1, 4])
def test_work_on_a_described_machine_is_the_time_of_the_planner(ep: int) -> None:
    settings = [*SETTINGS, "parallel.dp=4", f"parallel.ep={ep}", "data.seq_len=512", "data.micro_batches=1"]
    config = config_of([*settings, "parallel.machine=h100"])
    architecture, mapping = architecture_of(config, 256), config.parallel.mapping(4)
    flops = cost_of(config_of(settings), architecture, mapping)
    timed = cost_of(config, architecture, mapping)
    assert timed.token / timed.pair > flops.token / flops.pair and timed.document > 0
    tokens = 8 * 512 // 4
    alone = PlacedMapping(Mapping(ParallelConfig(), micro_batch=2), cluster_named("h100", 1))
    step = StepModel(ModelShape.of(architecture), alone, Workload(512, "fp32"), 2).predict()
    seconds = step.seconds - step.breakdown["optimizer"]
    work = 2 * (timed.work(512) - timed.document) * UNIT_S
    assert tokens == 1024
    # Keys through links at their rate, to 4 ranks of a host.
    gathered = cluster_named("h100", 4).all_gather(timed.key_bytes * 1e6, range(4))
    assert dict(timed.transfers)[4] * 1e6 * UNIT_S == pytest.approx(gathered.seconds - gathered.latency_s, rel=0.01)
    assert flops.transfers == ()
    assert work == pytest.approx(seconds, rel=0.02) if ep == 1 else work < seconds


def test_a_dry_run_predicts_lengths_of_prepared_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["x" * 31, *("a" * 3 for _ in range(60))]
    source = write_jsonl(tmp_path / "d.jsonl", documents)
    settings = [*SETTINGS, "parallel.dp=4", "parallel.ranks=4", f"data.source={source}", f"data.cache={tmp_path}"]
    config = config_of(settings)
    assert "lengths:" not in describe(config)
    prepare_all(config.data)
    assert "the slowest rank has" in describe(config)
    monkeypatch.setattr("moe_comm.train.data.preparation.scan", lambda _: 1 // 0)
    assert "lengths:" not in describe(config_of([*settings, "parallel.lengths=static", "data.documents=joined"]))


def test_balanced_lengths_are_recommended_only_where_they_can_be_chosen() -> None:
    assert str(LengthPrediction(2.0, 1.0)).endswith("would save time")
    assert str(LengthPrediction(2.0, 1.0, chosen=True)).endswith("with balanced ones")
    config = config_of([*SETTINGS, "parallel.dp=4"])
    mapping, architecture = config.parallel.mapping(4), architecture_of(config, 256)
    assert can_balance(config, mapping, architecture)
    router: Any = replace(architecture.moe.router, balance_form="sequence", balance_loss=0.1)
    assert not can_balance(config, mapping, replace(architecture, moe=replace(architecture.moe, router=router)))
