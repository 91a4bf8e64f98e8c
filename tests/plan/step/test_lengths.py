"""Documents of different lengths in the planner: their work on the ranks, and the choice of balanced lengths."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.key_exchange import key_ranges
from moe_comm.layers.attention.placed import DocumentPlacement
from moe_comm.layers.attention.sequence import Documents
from moe_comm.layers.transformer.lengths.cost import LengthCost
from moe_comm.layers.transformer.lengths.loads import balanced_loads, static_loads
from moe_comm.layers.transformer.lengths.solve import CAPACITY, solve
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.lengths import DocumentLengths, read_histogram
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping
from moe_plan.search.request import PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import SearchSpace
from moe_plan.step.lengths import LAUNCHES, UNEVEN

SMALL = ModelShape("small", 6, 512, 8, 4, 64, 4096, 8, 2, 1024, dense_layers=1, dense_ffn=2048)
SEQ_LEN = 32768
LONG = DocumentLengths(((SEQ_LEN,), (512,) * 64, (512,) * 64, (512,) * 64) * 8)


def request(lengths: DocumentLengths | None, shared: float = 1.0, capacity: float | None = None) -> PlanRequest:
    cluster = cluster_named("h100", 4, 4)
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, shared=shared))
    return PlanRequest(SMALL, cluster, Workload(SEQ_LEN, capacity=capacity, lengths=lengths), 4)


@pytest.mark.parametrize("window", [None, 5])
def test_received_keys_are_those_that_the_ring_exchanges(window: int | None) -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 24) for _ in range(7)]
    lengths.append(96 - sum(lengths))
    cost, cp = LengthCost(pair=1, token=1, window=window), 4
    documents_S = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths, dtype=torch.int64))
    ranges = key_ranges(Documents(documents_S[None]), 96, cp, window)
    exchanged = sum(ranges.tokens(query, key) for query in range(cp) for key in range(cp))
    assert static_loads([[lengths]], 96, cp, cost).keys == ((cp, exchanged),)
    placement = DocumentPlacement.of(lengths, solve(lengths, cp, cost).ranks, cp)
    placed = key_ranges(placement.documents("cpu"), 96, cp, window)
    exchanged = sum(placed.tokens(query, key) for query in range(cp) for key in range(cp))
    assert sum(tokens for _, tokens in balanced_loads([lengths], cp, cost).keys) == exchanged


def test_a_step_waits_for_the_rank_with_the_long_document_unless_lengths_are_balanced() -> None:
    static = Mapping(ParallelConfig(dp=4, ep=4))
    plan_request = request(LONG)
    models = [plan_request.model(replace(static, lengths=mode)) for mode in ("static", "balanced")]
    first, second = (model.predict() for model in models)
    uneven, even = (model.documents for model in models)
    assert uneven is not None and even is not None
    # One rank has all pairs of its sequence, the others 64 times fewer.
    assert uneven.slowest > 1.2 > 1.05 > even.slowest and uneven.idle > 0.15 > even.idle
    assert first.seconds - second.seconds == pytest.approx(
        sum(first.breakdown[name] - second.breakdown[name] for name in (UNEVEN, LAUNCHES, "document keys"))
    )
    assert first.breakdown["products"] == second.breakdown["products"] and second.seconds < first.seconds
    # Without the setting, no document is on two ranks, and a token attends to fewer ones than in a whole sequence.
    assert "document keys" not in first.sent and sum(second.sent["document keys"].values()) > 0
    whole = request(None).model(static).predict()
    assert first.breakdown["products"] < whole.breakdown["products"] and first.model_flops < whole.model_flops
    memories = [plan_request.fit(model.placed.mapping).fullest for model in models]
    assert memories[1].activations > memories[0].activations * (1 + CAPACITY) / 2


def test_ranks_that_share_cores_lend_them_while_they_wait() -> None:
    static = Mapping(ParallelConfig(dp=4, ep=4))
    assert request(LONG, shared=4.0).model(static).predict().breakdown[UNEVEN] == 0


@pytest.mark.parametrize("shared", [1.0, 2.0])
def test_a_search_finds_the_fastest_setting_of_lengths(shared: float) -> None:
    plan_request = request(LONG, shared)
    space = SearchSpace(sharding=("zero1",), recompute=("none",), schedule=("1f1b",), virtual=(1,))
    every = list(space.candidates(plan_request))
    assert {mapping.lengths for mapping in every} == {"static", "balanced"}
    assert all(mapping.can_balance for mapping in every if mapping.lengths == "balanced")
    result = search(plan_request, space)
    assert result.tried == len(every)
    fastest = min((plan_request.candidate(mapping) for mapping in every), key=lambda one: one.step.seconds)
    assert result.best[0].step.seconds == pytest.approx(fastest.step.seconds, rel=1e-9)


def test_only_mappings_that_the_trainer_balances_are_tried() -> None:
    space, mapping = SearchSpace(), Mapping(ParallelConfig(dp=4, ep=4))
    assert space.length_modes(request(LONG), mapping) == ("static", "balanced")
    assert space.length_modes(request(None), mapping) == ("static",)
    assert space.length_modes(request(LONG, capacity=1.0), mapping) == ("static",)
    assert space.length_modes(request(LONG), Mapping(ParallelConfig(dp=2, pp=2))) == ("static",)
    with pytest.raises(ConfigError, match="balanced lengths require pp = 1"):
        Mapping(ParallelConfig(dp=2, pp=2), lengths="balanced")


def test_documents_of_a_histogram_fill_the_sequences() -> None:
    drawn = DocumentLengths.drawn({3: 5, 40: 1}, 16, 50)
    assert len(drawn.sequences) == 50 and all(sum(sequence) == 16 for sequence in drawn.sequences)
    assert drawn.sequences == DocumentLengths.drawn({3: 5, 40: 1}, 16, 50).sequences
    assert {length for sequence in drawn.sequences for length in sequence} >= {3, 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is no histogram"),
        ("{", "is no histogram"),
        ("{}", "has no documents"),
        ('{"5": 0}', "has no documents"),
        ('{"0": 1}', "numbers of documents by length"),
        ('{"x": 1}', "numbers of documents by length"),
        ('{"5": 1.5}', "numbers of documents by length"),
        ('{"5": true}', "numbers of documents by length"),
        ('{"99999999999999999999": 1}', "numbers of documents by length"),
    ],
)
def test_a_damaged_histogram_raises(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_histogram(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_histogram(tmp_path / "absent.json")
