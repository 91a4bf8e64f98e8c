"""Byte and BPE tokenizers: encoding, saving for transformers, and the end-of-text token."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moe_comm.errors import ConfigError
from moe_comm.train.data import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, train_bpe
from tests.train.data.common import texts

TEXTS = [*texts(30, seed=1), "", "a <|endoftext|> in the text", "\x00\x7f\ufffd"]


@pytest.fixture(scope="module")
def bpe() -> FileTokenizer:
    return train_bpe(texts(200, seed=0), 400)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: FileTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


def test_decoding_returns_the_text(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS)] == TEXTS


def test_no_text_is_encoded_as_end_of_text(tokenizer: Tokenizer) -> None:
    for ids in tokenizer.encode(TEXTS):
        assert tokenizer.end_of_text not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("with_model_config", [False, True])
def test_transformers_loads_a_saved_tokenizer(tokenizer: Tokenizer, tmp_path: Path, with_model_config: bool) -> None:
    if with_model_config:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "architectures": None}))
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    plain = [text for text in TEXTS if "<|endoftext|>" not in text]
    assert [loaded(text, add_special_tokens=False)["input_ids"] for text in plain] == tokenizer.encode(plain)
    assert loaded.eos_token_id == loaded.pad_token_id == tokenizer.end_of_text
    assert loaded.decode(tokenizer.encode(["sun \u6f22"])[0]) == "sun \u6f22"
    reloaded = load_tokenizer(tmp_path)
    assert reloaded.encode(TEXTS) == tokenizer.encode(TEXTS)
    assert reloaded.end_of_text == tokenizer.end_of_text


def test_training_a_bpe_is_deterministic_and_respects_the_vocabulary_size(bpe: FileTokenizer) -> None:
    second = train_bpe(texts(200, seed=0), 400)
    assert (second.text, second.digest) == (bpe.text, bpe.digest)
    assert bpe.vocab_size <= 400
    assert len(bpe.encode(["sun wind"])[0]) < 8
    assert train_bpe(texts(200, seed=0), 300).digest != bpe.digest


def test_a_tokenizer_can_be_pickled(bpe: FileTokenizer) -> None:
    other = pickle.loads(pickle.dumps(bpe))
    assert other.encode(TEXTS) == bpe.encode(TEXTS)
    assert other.digest == bpe.digest


def test_truncation_and_padding_of_the_file_are_not_applied(bpe: FileTokenizer) -> None:
    settings = json.loads(bpe.text)
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert FileTokenizer(json.dumps(settings)).encode(TEXTS) == bpe.encode(TEXTS)


def test_end_of_text_is_an_argument_or_configured_or_a_known_name(bpe: FileTokenizer, tmp_path: Path) -> None:
    settings = json.loads(bpe.text)
    top = bpe.vocab_size
    for number, name in enumerate(("<stop>", "</s>")):
        added = {**settings["added_tokens"][0], "id": top + number, "content": name}
        settings["added_tokens"].append(added)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    assert load_tokenizer(file).end_name == "<|endoftext|>"
    assert load_tokenizer(file, "</s>").end_of_text == top + 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert load_tokenizer(tmp_path).end_of_text == top
    assert load_tokenizer(tmp_path).vocab_size == top + 2
    with pytest.raises(ConfigError, match=r"no token <none> .* set data.end_of_text"):
        load_tokenizer(file, "<none>")


def test_an_invalid_tokenizer_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)
