from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.train.config import DataSection
from moe_comm.train.data import Corpus, read_text, unigram_entropy
from tests.train.common import TEXT

SECTION = DataSection(seq_len=8, batch=5)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_order_of_the_data_does_not_depend_on_the_number_of_ranks(world: int) -> None:
    corpus = Corpus(TEXT, SECTION, seed=3)
    whole = corpus.train_batch(7)
    parts = [corpus.train_batch(7, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([part.inputs_BS for part in parts]), whole.inputs_BS)
    assert torch.equal(torch.cat([part.targets_BS for part in parts]), whole.targets_BS)
    assert {part.num_targets for part in parts} == {whole.num_targets} == {whole.targets_BS.numel()}


def test_targets_are_the_next_bytes() -> None:
    batch = Corpus(TEXT, SECTION, seed=3).train_batch(0)
    assert torch.equal(batch.inputs_BS[:, 1:], batch.targets_BS[:, :-1])
    assert bytes(batch.inputs_BS[0].tolist()) in TEXT


def test_steps_and_seeds_give_other_batches_and_equal_ones_the_same() -> None:
    first = Corpus(TEXT, SECTION, seed=3).train_batch(0).inputs_BS
    assert torch.equal(first, Corpus(TEXT, SECTION, seed=3).train_batch(0).inputs_BS)
    assert not torch.equal(first, Corpus(TEXT, SECTION, seed=3).train_batch(1).inputs_BS)
    assert not torch.equal(first, Corpus(TEXT, SECTION, seed=4).train_batch(0).inputs_BS)


def test_training_never_sees_validation_text() -> None:
    text = bytes([0]) * 900 + bytes([1]) * 100
    corpus = Corpus(text, SECTION, seed=0)
    assert (corpus.train_bytes, corpus.validation_bytes) == (900, 100)
    assert all(int(corpus.train_batch(step).targets_BS.max()) == 0 for step in range(50))
    assert all(int(batch.inputs_BS.min()) == 1 for batch in corpus.validation_batches(3))


def test_validation_batches_reach_both_ends_of_the_text() -> None:
    text = bytes(900) + bytes(range(100))
    batches = Corpus(text, SECTION, seed=0).validation_batches(4)
    assert int(batches[0].inputs_BS[0, 0]) == 0
    assert int(batches[-1].targets_BS[-1, -1]) == 99


def test_the_shortest_text_that_fits_works_and_a_shorter_one_is_refused() -> None:
    Corpus(bytes(18), SECTION, seed=0).train_batch(0)
    with pytest.raises(ConfigError, match="17 bytes; training and validation need 9 bytes each"):
        Corpus(bytes(17), SECTION, seed=0)


def test_the_unigram_entropy_is_in_nats_per_byte() -> None:
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(b"aaab") == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_every_python_carries_english_text() -> None:
    text = read_text("pydoc")
    assert len(text) > 300_000
    assert 3.0 < unigram_entropy(text) < 3.5
    paragraphs = text.split(b"\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_a_text_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_text(str(tmp_path / "none.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_text(str(tmp_path / "latin.txt"))
    (tmp_path / "fine.txt").write_text("h\u00e9 \u2192", encoding="utf-8")
    assert read_text(str(tmp_path / "fine.txt")).decode() == "h\u00e9 \u2192"
