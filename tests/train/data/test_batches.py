"""Batches of a corpus: the same tokens on any number of ranks, resume, held-out text and prefetching."""

from __future__ import annotations

import json
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.topology import ParallelConfig
from moe_comm.train.data import IGNORE, Corpus, CorpusSettings, Prefetch, prepare_all
from tests.train.data.common import corpus_of, pairs, prepared, texts, token_file, write_jsonl

TWO = [[7, 30, 2, 18, 25, 9], [40, 3, 11, 8]]
KINDS = [
    {"packing": packing, "documents": documents}
    for packing in ("contiguous", "best_fit", "random")
    for documents in ("joined", "separate")
]


def half(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2, dim=1)[rank]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 8), (3, 2)])
def test_any_number_of_ranks_and_micro_batches_sees_the_same_tokens(
    kind: dict[str, Any], dp: int, micro_batches: int, tmp_path: Path
) -> None:
    corpus = corpus_of(TWO, tmp_path, (2.0, 1.0), seq_len=8, batch=8, **kind)
    for step in (0, 5):
        whole = corpus.batch_of(step).local()
        parts = [
            corpus.batch_of(step).micro(i, micro_batches).local(rank, dp)
            for i in range(micro_batches)
            for rank in range(dp)
        ]
        for name in ("ids_BS", "targets_BS", "positions_BS"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
            assert getattr(whole, name).shape == (8, 8) and getattr(whole, name).dtype == torch.int64
        documents = [part.documents_BS for part in parts if part.documents_BS is not None]
        if kind["documents"] == "separate":
            assert torch.equal(torch.cat(documents), whole.documents_BS)
        else:
            assert not documents and whole.documents_BS is None
        valid = int((whole.targets_BS != IGNORE).sum())
        assert {part.num_targets for part in parts} == {valid} == {whole.num_targets}
        micros = [corpus.batch_of(step).micro(i, micro_batches) for i in range(micro_batches)]
        assert sum(int((micro.local().targets_BS != IGNORE).sum()) for micro in micros) == valid


@pytest.mark.parametrize("dp", [1, 3, 7])
def test_token_order_with_different_numbers_of_sequences_per_rank(dp: int, tmp_path: Path) -> None:
    """A capacity over the whole micro-batch drops slots in this order."""
    corpus = corpus_of([[400]], tmp_path, seq_len=4, batch=10)
    config = ParallelConfig(dp=dp)
    ids, indices = [], []
    for rank in range(dp):
        ids_BS = corpus.batch_of(2).local(rank, dp).ids_BS
        plan = ModelPlan(config.place(rank), config.sizes)
        ids.append(ids_BS.flatten())
        indices.append(plan.token_index(*ids_BS.shape).flatten())
    order = torch.cat(indices)
    assert len(order.unique()) == 40
    assert torch.equal(torch.cat(ids)[order.argsort()], corpus.batch_of(2).local().ids_BS.flatten())


def test_a_sequence_is_sharded_over_context_parallel_ranks(tmp_path: Path) -> None:
    corpus = corpus_of(TWO, tmp_path, seq_len=8, batch=4, documents="separate")
    whole = corpus.batch_of(1).local()
    parts = [corpus.batch_of(1).local(shard=partial(half, rank=rank)) for rank in range(2)]
    for name in ("ids_BS", "targets_BS", "positions_BS", "documents_BS"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(whole, name))
    assert {part.num_targets for part in parts} == {whole.num_targets}
    assert torch.equal(whole.to("cpu").ids_BS, whole.ids_BS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mask_marks_the_padding_of_training_and_validation(kind: dict[str, Any], tmp_path: Path) -> None:
    corpus = corpus_of(TWO, tmp_path, seq_len=8, batch=8, validation=0.2, **kind)
    padded = 0
    for batch in [*map(corpus.batch_of, range(12)), *corpus.validation_batches()]:
        whole, parts = batch.local(), [batch.local(shard=partial(half, rank=rank)) for rank in range(2)]
        is_token = whole.ids_BS != 0  # in these files only padding is 0
        if whole.mask_BS is None:
            assert is_token.all() and all(part.mask_BS is None for part in parts)
            continue
        padded += int((~whole.mask_BS).sum())
        assert whole.mask_BS.dtype == torch.bool and torch.equal(whole.mask_BS, is_token)
        assert torch.equal(torch.cat([part.mask_BS for part in parts if part.mask_BS is not None], 1), is_token)
        assert (whole.targets_BS[~is_token] == IGNORE).all()
    assert padded


def test_only_the_sequences_of_this_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of([[500]], tmp_path, seq_len=8, batch=6)
    read: list[int] = []
    file = corpus.files[0]
    original = file.read
    monkeypatch.setattr(file, "read", lambda start, stop: read.append(stop - start) or original(start, stop))
    batch = corpus.batch_of(3)
    assert not read
    batch.local(1, 3)
    assert read == [9, 9]


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_an_epoch_has_every_training_target_once_and_no_held_out_one(kind: dict[str, Any], tmp_path: Path) -> None:
    lengths = [7, 30, 2, 18, 25, 9, 30]
    corpus = corpus_of([lengths], tmp_path, seq_len=8, batch=1, validation=0.25, **kind)
    total, train = sum(lengths), len(corpus.train[0])
    assert train == total - 30  # the end of a document that is nearest to 91
    sequences = corpus.sampler.sources[0].sequences
    assert corpus.epochs == [1 / sequences]
    ids: list[int] = []
    targets: list[int] = []
    for step in range(sequences):
        batch = corpus.batch_of(step).local()
        ids += [i for i in batch.ids_BS.flatten().tolist() if i]
        targets += [t for _, t in pairs(batch.ids_BS, batch.targets_BS)]
    if kind["packing"] == "contiguous":
        assert sorted(ids) == list(range(1, train))
    else:
        assert sorted(ids) == list(range(1, train + 1))
    if kind == {"packing": "contiguous", "documents": "joined"}:
        assert sorted(targets) == list(range(2, train + 1))
    starts = {1, 8, 38, 40, 58, 83}
    if kind["documents"] == "separate":
        assert sorted(targets) == sorted(set(range(1, train + 1)) - starts)
    held_out = [pair for b in corpus.validation_batches() for pair in pairs(b.local().ids_BS, b.local().targets_BS)]
    assert sorted(held_out) == [(i, i + 1) for i in range(train + 1, total)]


def test_a_resumed_run_continues_with_the_same_tokens_on_any_number_of_ranks(tmp_path: Path) -> None:
    first, resumed = (corpus_of(TWO, tmp_path, (2.0, 1.0), seq_len=6, batch=6, seed=3) for _ in range(2))
    start = resumed.resume(json.loads(json.dumps(first.state(7))))
    assert start == 7
    for step in range(start, 12):
        parts = [resumed.batch_of(step).local(rank, 3).ids_BS for rank in range(3)]
        assert torch.equal(torch.cat(parts), first.batch_of(step).local().ids_BS)


def test_resuming_with_other_settings_is_rejected(tmp_path: Path) -> None:
    state = corpus_of(TWO, tmp_path, seq_len=6, batch=6).state(4)
    with pytest.raises(ConfigError, match=r"documents was 'joined' and is 'separate'.*validation was 0.1 and is 0.2"):
        corpus_of(TWO, tmp_path, seq_len=6, batch=6, documents="separate", validation=0.2).resume(state)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    corpus = corpus_of([[50] * 4, [50] * 40], tmp_path, (3.0, 1.0), seq_len=5, batch=8)
    sizes = [len(view) for view in corpus.train]
    assert sizes[1] > 5 * sizes[0]
    for step in range(30):
        assert (corpus.batch_of(step).indices.source_B == 0).sum() == 6
    assert corpus.state(30)["sources"][0]["epoch"] >= 4


def test_held_out_text_starts_at_a_document_if_one_is_near(tmp_path: Path) -> None:
    for lengths, fraction, expected in (
        ([10] * 10, 0.1, 10),
        ([10] * 10, 0.25, 30),
        ([80, 20], 0.15, 20),
        ([50, 50], 0.1, 10),  # a whole document would be five times too long, so it is split
        ([100], 0.2, 20),
        ([100], 0.0, 0),
        ([100], 0.001, 5),  # at least a sequence and the target of its last token
    ):
        corpus = corpus_of([lengths], tmp_path, seq_len=4, batch=1, validation=fraction)
        assert len(corpus.validation[0]) == expected
        assert len(corpus.train[0]) == 100 - expected
        assert corpus.train[0].stop == corpus.validation[0].start


def test_the_shortest_text_that_fits_works_and_a_shorter_one_is_rejected(tmp_path: Path) -> None:
    corpus = corpus_of([[18]], tmp_path, seq_len=8, batch=5)
    assert corpus.batch_of(0).local().ids_BS.shape == (5, 8)
    assert len(corpus.validation_batches()) == 1
    with pytest.raises(ConfigError, match="'made0' has 17 tokens; training and validation need 9 each"):
        corpus_of([[17]], tmp_path, seq_len=8, batch=5)
    with pytest.raises(ConfigError, match="'made1' has 8 tokens; training needs 9 each"):
        corpus_of([[9], [8]], tmp_path, seq_len=8, batch=5, validation=0.0)


def test_validation_is_spread_over_the_held_out_text_and_padded_to_full_batches(tmp_path: Path) -> None:
    corpus = corpus_of([[400], [100]], tmp_path, (1.0, 1.0), seq_len=4, batch=3, validation=0.5)
    few = corpus.validation_batches(2)
    assert [batch.rows for batch in few] == [3, 3]
    firsts = [row[0] for batch in few for row in batch.local().ids_BS.tolist()]
    assert firsts[:3] == [201, 297, 397] and firsts[3] == 51 and firsts[5] == 99
    every = corpus.validation_batches(batch=5)
    assert [batch.rows for batch in every] == [5] * 13
    assert sum(batch.num_targets for batch in every) == 199 + 49
    last = every[-1].local()  # 50 + 13 sequences, and two of padding
    assert last.targets_BS[2, 0] == 100
    assert (last.targets_BS[3:] == IGNORE).all()
    assert len(corpus.validation_batches(1000, batch=5)) == 13
    with pytest.raises(ConfigError, match=r"data\.validation is 0"):
        corpus_of([[100]], tmp_path, seq_len=4, batch=1, validation=0.0).validation_batches(1)


def test_batches_that_cannot_be_split_are_config_errors(tmp_path: Path) -> None:
    batch = corpus_of([[100]], tmp_path, seq_len=4, batch=6).batch_of(0)
    with pytest.raises(ConfigError, match=r"data.batch \(6\) must be a multiple of data.micro_batches \(4\)"):
        batch.micro(0, 4)
    with pytest.raises(ConfigError, match="got index 2"):
        batch.micro(2, 2)
    with pytest.raises(ConfigError, match="2 sequences for 3 data-parallel ranks"):
        batch.micro(0, 3).local(0, 3)


def test_sources_of_different_tokenizers_are_rejected(tmp_path: Path) -> None:
    files = [token_file(tmp_path, [50]), token_file(tmp_path, [50], vocab=300)]
    settings = CorpusSettings(source=["a", "b"], seq_len=4)
    with pytest.raises(ConfigError, match="'a' and 'b' were prepared with different tokenizers"):
        Corpus(files, settings)
    with pytest.raises(ConfigError, match="2 sources but 1 prepared folders"):
        Corpus.open([files[0].path], settings)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_batches_of_prepared_files_decode_to_their_text(tokenizer: str, tmp_path: Path) -> None:
    documents = texts(60, seed=8)
    corpus, settings = prepared(
        documents, tmp_path, tokenizer=tokenizer, vocab=300, seq_len=16, batch=2, shuffle=False, validation=0.2
    )
    text = corpus.tokenizer().decode(corpus.batch_of(0).local().ids_BS.flatten().tolist())
    assert "".join(documents).startswith(text.rstrip("\ufffd"))
    assert corpus.batch_of(0).local().targets_BS.max() < corpus.vocab_size
    corpus.save_tokenizer(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.eos_token_id == corpus.end_of_text
    prompt = corpus.tokenizer().decode(corpus.prompt(4))
    document = corpus.files[0].offsets.tolist().index(corpus.validation[0].start)
    assert documents[document].startswith(prompt.rstrip("\ufffd")[:1])
    assert prepare_all(settings) == [file.path for file in corpus.files]


def test_statistics_are_those_of_the_mixture(tmp_path: Path) -> None:
    sources = []
    for name, documents in (("a", ["a" * 9] * 40), ("b", ["bbcc\u00e9"] * 40)):
        sources.append(str(write_jsonl(tmp_path / f"{name}.jsonl", documents)))
    settings = CorpusSettings(source=sources, cache=str(tmp_path / "cache"), seq_len=4, batch=2)
    statistics = Corpus.open(prepare_all(settings), settings).statistics()
    p = [0.9 / 2, 2 / 7 / 2, 2 / 7 / 2, 1 / 7 / 2, 1 / 7 / 2, (0.1 + 1 / 7) / 2]  # a, b, c, two bytes of é, ends
    assert statistics.unigram_entropy == pytest.approx(-sum(q * math.log(q) for q in p))
    assert statistics.bytes_per_token == pytest.approx((0.9 + 6 / 7) / 2)
    assert (statistics.tokens, statistics.documents) == (400 + 280, 80)
    assert statistics.train_tokens + statistics.validation_tokens == statistics.tokens


def test_only_the_next_step_is_prefetched() -> None:
    loaded: list[int] = []
    ahead = threading.Semaphore(0)

    def load(step: int) -> int:
        loaded.append(step)
        ahead.release()
        return step * 10

    with Prefetch(load, last=5) as data:
        assert data.get(0) == 0
        for _ in range(2):
            assert ahead.acquire(timeout=120)
        assert loaded == [0, 1]
        assert [data.get(step) for step in (1, 2, 4)] == [10, 20, 40]
    assert loaded in ([0, 1, 2, 3, 4], [0, 1, 2, 4])  # step 3 may be loaded before the test skips it
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_an_error_of_prefetching_is_raised_at_its_step(tmp_path: Path) -> None:
    corpus = corpus_of([[100]], tmp_path, seq_len=4, batch=2)

    def load(step: int) -> Any:
        if step == 2:
            raise CorruptFile("tokens.bin is altered")
        return corpus.batch_of(step).local()

    with Prefetch(load, last=9) as data:
        for step in range(2):
            assert torch.equal(data.get(step).ids_BS, corpus.batch_of(step).local().ids_BS)
        with pytest.raises(CorruptFile, match="altered"):
            data.get(2)
        assert torch.equal(data.get(3).ids_BS, corpus.batch_of(3).local().ids_BS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]
