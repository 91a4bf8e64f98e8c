"""Parsers of untrusted files return a correct result or raise a typed error. They never crash, hang or fill memory."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from moe_comm.train import config
from tests.fuzz.mutate import ODD_VALUES, mutate_bytes, mutate_json, mutate_json_lines
from tests.fuzz.rooms import READ, REFUSED, folder
from tests.fuzz.targets import CORPUS, TARGETS, Target

ROOT = Path(__file__).parents[2]
USABLE = [target for target in TARGETS.values() if not target.needs or importlib.util.find_spec(target.needs)]
QUICK = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_every_corpus_case_ends_within_the_time_and_memory_limits() -> None:
    """Replay the corpus in a subprocess, so that a crash fails this test and does not end pytest."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "replay"], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert process.returncode == 0, f"{process.stdout[-300:]}\n{process.stderr[-3000:]}"
    assert f"{sum(len(target.corpus_files) for target in USABLE)} cases" in process.stdout


def test_every_corpus_folder_belongs_to_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
    for name in ("config_toml", "overrides", "checkpoint_metadata", "tokens_meta", "jsonl", "parquet"):
        assert TARGETS[name].corpus_files, name


@pytest.mark.parametrize("target", USABLE, ids=lambda target: target.name)
def test_all_seeds_are_read(target: Target) -> None:
    for seed in target.seeds():
        assert target.run(seed) == READ


@pytest.mark.parametrize("target", USABLE, ids=lambda target: target.name)
def test_any_bytes_are_refused_or_read(target: Target) -> None:
    @QUICK
    @given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
    def check(content: bytes) -> None:
        assert target.run(content) in (READ, REFUSED)

    check()


@pytest.mark.parametrize("target", USABLE, ids=lambda target: target.name)
def test_a_file_with_a_few_changes_is_refused_or_read(target: Target) -> None:
    seeds = target.seeds()

    @QUICK
    @given(st.integers(0, 2**32), st.sampled_from(seeds), st.integers(1, 3))
    def check(seed: int, content: bytes, num_changes: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_changes):
            content = target.mutate(content, rng)
        assert target.run(content) in (READ, REFUSED)

    check()


DEFAULTS = {
    f"{section}.{key}": value
    for section, keys in config.TrainConfig().model_dump(mode="json").items()
    for key, value in keys.items()
}
TEXTS = [key for key, value in DEFAULTS.items() if isinstance(value, str)]
NUMBERS = [key for key, value in DEFAULTS.items() if isinstance(value, int | float)]


@QUICK
@given(
    st.dictionaries(st.sampled_from(TEXTS), st.text(min_size=1, max_size=20), max_size=3),
    st.dictionaries(st.sampled_from(NUMBERS), st.integers() | st.floats(), max_size=4),
)
def test_settings_that_load_are_dumped_and_load_back_unchanged(
    texts: dict[str, str], numbers: dict[str, float]
) -> None:
    """The settings are JSON, which can represent every text and number."""
    tree: dict[str, dict[str, object]] = {}
    for key, value in (texts | numbers).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    assert TARGETS["config_json"].run(json.dumps(tree).encode()) in (READ, REFUSED)


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:30])
def test_odd_values_of_every_setting_are_refused_or_load_back_unchanged(value: object) -> None:
    for key in DEFAULTS:
        section, _, name = key.partition(".")
        content = json.dumps({section: {name: value}}).encode()
        assert TARGETS["config_json"].run(content) in (READ, REFUSED), key


def test_mutations_are_reproducible_and_differ_between_seeds() -> None:
    content = b'{"a": [1, 2, {"b": "c"}], "d": 4}'
    for mutate in (mutate_json, mutate_json_lines, mutate_bytes):
        mutations = [mutate(content, random.Random(n)) for n in range(50)]
        assert mutations == [mutate(content, random.Random(n)) for n in range(50)]
        assert len(set(mutations)) > 20
    assert folder().is_dir()
