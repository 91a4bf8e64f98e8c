"""The order of sequences: permutations, the mixture of sources, and the resumable state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.train.data.sampler import MAX_PERIOD, Mixture, Permutation, SampledSource, Sampler

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


@EXAMPLES
@given(st.integers(1, 700), st.integers(0, 10), st.integers(0, 10))
def test_a_permutation_has_every_number_once(n: int, seed: int, epoch: int) -> None:
    order = Permutation(n, (seed, 0, epoch))
    whole = order(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    assert order(np.array([n - 1, 0])).tolist() == [whole[n - 1], whole[0]]
    assert np.array_equal(Permutation(n, (seed, 0, epoch))(np.arange(n)), whole)


def test_a_permutation_looks_random_and_differs_by_key() -> None:
    n = 4096
    orders = [Permutation(n, (0, 0, epoch))(np.arange(n)) for epoch in range(4)]
    for order in orders:
        # Correlation of a random order with the sorted one is about 1/sqrt(n) = 0.016; five times that is not random.
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.08
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.08
    for a in range(4):
        for b in range(a):
            assert (orders[a] == orders[b]).sum() < 10  # about one equal position is expected


def test_a_permutation_needs_no_memory() -> None:
    n = 10**15 + 37
    values = Permutation(n, (1, 2, 3))(np.arange(n - 1000, n))
    assert len(set(values.tolist())) == 1000
    assert values.min() >= 0 and values.max() < n
    assert values.max() > n // 2 > values.min()


@EXAMPLES
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_each_source_has_its_share_to_within_one_sequence_at_all_times(weights: list[int]) -> None:
    mixture = Mixture([float(weight) for weight in weights])
    numbers = np.arange(3 * mixture.period)
    source = mixture.source(numbers)
    share = np.array(weights) / sum(weights)
    for s in range(len(weights)):
        counts = np.concatenate([[0], np.cumsum(source == s)])
        assert np.abs(counts - share[s] * np.arange(len(counts))).max() < 1
        assert mixture.count(s, numbers).tolist() == counts[:-1].tolist()


def test_weights_with_a_common_denominator_are_exact_and_others_are_close() -> None:
    assert Mixture([0.7, 0.3]).draws == [7, 3]
    assert Mixture([2, 1, 1]).draws == [2, 1, 1]
    assert Mixture([5.0]).draws == [1]
    mixture = Mixture([1 / 3, 0.25, 1e-9])
    assert mixture.period in (MAX_PERIOD, MAX_PERIOD + 1)
    assert mixture.draws[2] == 1
    assert mixture.draws[0] / mixture.period == pytest.approx((1 / 3) / (1 / 3 + 0.25), abs=1e-4)


def make(**changes: Any) -> Sampler:
    sources = changes.pop("sources", [SampledSource("a", "da", 11, 3.0), SampledSource("b", "db", 5, 1.0)])
    arguments = {"batch": 6, "seed": 1, "shuffle": True, "settings": {"seq_len": 8, "packing": "contiguous"}}
    arguments.update(changes)
    return Sampler(sources, **arguments)


def drawn(sampler: Sampler, steps: range) -> list[tuple[int, int]]:
    indices = [sampler.indices(step) for step in steps]
    return [(int(s), int(i)) for p in indices for s, i in zip(p.source_B, p.index_B, strict=True)]


def test_every_epoch_of_a_source_has_each_sequence_once_in_another_order() -> None:
    sequence = drawn(make(), range(30))
    for source, size in ((0, 11), (1, 5)):
        indices = [i for s, i in sequence if s == source]
        epochs = [indices[start : start + size] for start in range(0, len(indices) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs) > 2


def test_without_shuffling_sequences_are_in_order() -> None:
    indices = [i for s, i in drawn(make(shuffle=False), range(5)) if s == 0]
    assert indices == [n % 11 for n in range(len(indices))]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    whole = drawn(make(), range(20))
    fresh = make()
    assert [drawn(fresh, range(step, step + 1)) for step in (13, 2, 13)] == [
        whole[6 * step : 6 * step + 6] for step in (13, 2, 13)
    ]
    assert drawn(make(seed=2), range(20)) != whole


def test_the_state_has_the_consumed_sequences_and_a_resumed_run_continues() -> None:
    state = json.loads(json.dumps(make().state(9)))
    assert [(s["name"], s["consumed"], s["epoch"]) for s in state["sources"]] == [("a", 41, 3), ("b", 13, 2)]
    assert sum(s["consumed"] for s in state["sources"]) == 9 * 6
    resumed = make()
    first = resumed.resume(state)
    assert drawn(resumed, range(first, 20)) == drawn(make(), range(9, 20))


SOURCES = [SampledSource("a", "da", 11, 3.0), SampledSource("b", "db", 5, 1.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 7}, r"data.batch was 6 and is 7"),
        ({"settings": {"seq_len": 9, "packing": "random"}}, r"packing.*; data.seq_len was 8 and is 9"),
        ({"sources": SOURCES[:1]}, r"the sources were a, b and are a"),
        ({"sources": [SOURCES[0], SampledSource("b", "other", 5, 1.0)]}, r"source 'b' has other tokens"),
        ({"sources": [SampledSource("a", "da", 11, 2.0), SOURCES[1]]}, r"weight of source 'a' was 3.0 and is 2.0"),
    ],
)
def test_resuming_with_other_data_or_settings_names_the_changes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes).resume(make().state(9))


@pytest.mark.parametrize("state", [{}, {"step": 1, "version": 1, "settings": {}}])
def test_an_invalid_state_is_a_config_error(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampler state cannot be read"):
        make().resume(state)


def test_a_state_of_another_version_is_rejected() -> None:
    with pytest.raises(ConfigError, match="version 2"):
        make().resume({**make().state(3), "version": 2})
