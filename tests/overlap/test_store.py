"""The store of ``moe-comm tune``: its file, and the lookup."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.overlap.options import CHUNKED, SHARED, TRITON
from moe_comm.overlap.tuning import store as store_file
from moe_comm.overlap.tuning.device_cost import H100
from moe_comm.overlap.tuning.store import (
    OverlapChoice,
    TuningEnvironment,
    TuningStore,
    cache_folder,
    errors_by_operator,
    fallback_rows,
    load_store,
    machine_name,
    prediction_error,
    save_store,
    store_path,
)
from tests.overlap.measurements import PLACE, WORK, fused, measured


def test_saved_measurements_are_loaded(tmp_path: Path) -> None:
    rates = {"NVIDIA H100 80GB HBM3": replace(H100, waiting=0.9)}
    store = TuningStore((measured(), measured(replace(WORK, dtype=torch.bfloat16, rows=7), 1), fused()), rates)
    assert store.merged([fused()]).device_rates == rates
    path = save_store(tmp_path / "deep" / "down", store)
    assert load_store(tmp_path / "deep" / "down") == store
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    raw = json.loads(path.read_text())
    assert (raw["version"], raw["machine"]) == (store_file.VERSION, machine_name())
    assert raw["prediction_error"] == prediction_error(store.measured)


def test_a_failed_write_leaves_the_old_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_store(tmp_path, TuningStore((measured(),)))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(store_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_store(tmp_path, TuningStore())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _damage(raw: dict[str, Any], damage: str) -> str:
    if damage == "another version":
        raw["version"] = 99
    elif damage == "another machine":
        raw["machine"] = "another machine"
    elif damage == "a field missing":
        del raw["measured"][0]["work"]["rows"]
    elif damage == "a time that is text":
        raw["measured"][0]["tried"][0]["ms"] = "soon"
    elif damage == "no time at all":
        raw["measured"][0]["tried"][0]["ms"] = float("nan")
    elif damage == "no such backend":
        raw["measured"][0]["tried"][0]["choice"]["backend"] = "magic"
    elif damage == "no programs":
        raw["measured"][0]["tried"][0]["choice"]["programs"] = -1
    elif damage == "no such operator":
        raw["measured"][0]["work"]["operator"] = "matmul"
    elif damage == "no such dtype":
        raw["measured"][0]["work"]["dtype"] = "nn"
    elif damage == "no such choice":
        raw["measured"][0]["best"] = 7
    elif damage == "endless rates":
        raw["device_rates"] = {"a GPU": asdict(H100) | {"processors": math.inf}}
    elif damage == "a list":
        return "[]"
    text = json.dumps(raw)
    return text[: len(text) // 2] if damage == "cut off" else "" if damage == "empty" else text


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        ("another version", "has version 99; expected 2"),
        ("another machine", "belongs to another machine"),
        ("a field missing", "cannot be read"),
        ("a time that is text", "cannot be read"),
        ("no time at all", "cannot be read"),
        ("no such backend", "cannot be read"),
        ("no programs", "cannot be read"),
        ("no such operator", "unknown work 'matmul'"),
        ("no such dtype", "cannot be read"),
        ("no such choice", "cannot be read"),
        ("endless rates", "cannot be read"),
        ("a list", "cannot be read"),
        ("cut off", "cannot be read"),
        ("empty", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(damage: str, warning: str, tmp_path: Path) -> None:
    path = save_store(tmp_path, TuningStore((measured(),)))
    path.write_text(_damage(json.loads(path.read_text()), damage))
    with pytest.warns(RuntimeWarning, match=warning) as warned:
        assert load_store(tmp_path) == TuningStore()
    assert "Run moe-comm tune" in str(warned[0].message)


def test_a_missing_file_gives_no_measurements_and_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert load_store(tmp_path / "nowhere") == TuningStore()
    assert not [one for one in recwarn.list if issubclass(one.category, RuntimeWarning)], recwarn.list


def test_the_cache_folder_is_in_the_users_home() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/moe_comm/overlap")
    assert cache_folder({}) == Path.home() / ".cache" / "moe_comm" / "overlap"
    assert store_path(Path("a"), "one machine") != store_path(Path("a"), "another")


def test_the_nearest_shape_is_used_and_far_ones_are_not() -> None:
    store = TuningStore(
        tuple(measured(replace(WORK, rows=rows), chunks) for rows, chunks in ((512, 2), (1024, 4), (8192, 8)))
    )
    assert [_chunks(store, rows) for rows in (512, 700, 1024, 2000, 2049, 5000, 16384, 20000)] == [
        2,
        2,
        4,
        4,
        None,
        8,
        8,
        None,
    ]
    other = [
        replace(WORK, operator="matmul_scatter"),
        replace(WORK, direction="backward"),
        replace(WORK, dtype=torch.bfloat16),
        replace(WORK, world=4),
        replace(WORK, sent=2048),
        replace(WORK, other=100),
    ]
    assert [store.find(work, PLACE) for work in other] == [None] * len(other)


def _chunks(store: TuningStore, rows: int) -> int | None:
    choice = store.find(replace(WORK, rows=rows), PLACE)
    return None if choice is None else choice.chunks


def test_few_rows_fall_back_to_serial_up_to_the_measured_threshold() -> None:
    rows_and_best = [(64, 1), (256, 1), (1024, 4), (4096, 1)]
    store = TuningStore(tuple(measured(replace(WORK, rows=rows), best) for rows, best in rows_and_best))
    assert fallback_rows(store.measured) == 256
    assert [_chunks(store, rows) for rows in (0, 1, 20, 100, 1500)] == [1, 1, 1, 1, 4]
    assert fallback_rows([]) == 0
    assert fallback_rows([measured(chunks=4)]) == 0


def test_measurements_are_used_in_their_environment_only() -> None:
    two_hosts = replace(PLACE, hosts=2)
    store = TuningStore((measured(), measured(chunks=16, place=two_hosts)))

    def chunks_in(place: TuningEnvironment) -> int | None:
        choice = store.find(WORK, place)
        return None if choice is None else choice.chunks

    assert (chunks_in(PLACE), chunks_in(two_hosts)) == (8, 16)
    # The link rate matters between hosts only.
    assert chunks_in(replace(PLACE, bytes_per_s=1e7)) == 8
    assert chunks_in(replace(two_hosts, bytes_per_s=1.9e9)) == 16
    assert chunks_in(replace(two_hosts, bytes_per_s=1e8)) is None
    for other in (replace(PLACE, threads=8), replace(PLACE, shared=True), replace(PLACE, device="a GPU")):
        assert chunks_in(other) is None


def test_new_measurements_replace_old_ones() -> None:
    store = TuningStore((measured(chunks=2), measured(replace(WORK, rows=1), 1))).merged([measured(chunks=16)])
    assert [(m.work.rows, m.chosen.choice.chunks) for m in store.measured] == [(1, 1), (1024, 16)]


def test_the_model_error_covers_all_trials() -> None:
    error = prediction_error([measured(), measured()])
    assert error == pytest.approx({"median": (0.25 + 0.1) / 2, "worst": 0.25})
    assert prediction_error([]) == {}
    # The model does not cover Triton kernels.
    assert prediction_error([fused()]) == pytest.approx({"median": (0.25 + 0.1) / 2, "worst": 0.25})
    scatter = measured(replace(WORK, operator="matmul_scatter"), ms=0.9 / 1.8)
    assert errors_by_operator([measured(), scatter, measured()]) == {
        "gather_matmul forward": pytest.approx({"median": 0.175, "worst": 0.25}),
        "matmul_scatter forward": pytest.approx({"median": 0.175, "worst": 0.25}),
    }


def test_only_allowed_backends_are_returned() -> None:
    store = TuningStore((fused(),))
    assert store.find(WORK, PLACE) == OverlapChoice(TRITON, programs=8)
    assert store.find(WORK, PLACE, (CHUNKED, SHARED)) == OverlapChoice(chunks=4)
    assert store.find(WORK, PLACE, (TRITON,)) == OverlapChoice(TRITON, programs=8)
    assert TuningStore((measured(),)).find(WORK, PLACE, (TRITON,)) is None
