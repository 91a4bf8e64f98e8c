"""Stored measurements and the choice that all ranks make alike of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import cli
from moe_comm.dispatch.channels import CollectiveOptions, channel_of, configure_collectives
from moe_comm.errors import RankMismatch
from moe_comm.overlap import tuning
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.cost import Rates, Work, predict
from moe_comm.overlap.gather_matmul import gather_matmul, reference
from moe_comm.overlap.tuning import (
    Choice,
    Measured,
    Place,
    Store,
    Tried,
    cache_folder,
    choose,
    configure_tuning,
    fallback_rows,
    load_store,
    machine_name,
    prediction_error,
    save_store,
    store_path,
)
from tests.pool import RankPool

CPU = torch.device("cpu")
PLACE = Place(hosts=1, shared=False, threads=1, device="cpu", bytes_per_s=1e9)
WORK = Work("gather_matmul", "forward", 1024, 512, 512, torch.float32, 2)


def measured(work: Work = WORK, chunks: int = 8, place: Place = PLACE, ms: float = 1.0) -> Measured:
    tried = (Tried(Choice(), 2.0, 1.5), Tried(Choice(chunks=chunks), ms, 0.9 * ms))
    return Measured(work, place, tried, int(chunks > 1))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    store = Store((measured(), measured(replace(WORK, dtype=torch.bfloat16, rows=7), 1), measured(chunks=4)))
    path = save_store(tmp_path / "deep" / "down", store)
    assert load_store(tmp_path / "deep" / "down") == store
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    raw = json.loads(path.read_text())
    assert (raw["version"], raw["machine"]) == (tuning.VERSION, machine_name())
    assert raw["prediction_error"] == prediction_error(store.measured)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_store(tmp_path, Store((measured(),)))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tuning.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_store(tmp_path, Store())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def _damage(raw: dict[str, Any], how: str) -> str:
    if how == "another version":
        raw["version"] = 99
    elif how == "another machine":
        raw["machine"] = "a toaster"
    elif how == "a field missing":
        del raw["measured"][0]["work"]["rows"]
    elif how == "a time that is text":
        raw["measured"][0]["tried"][0]["ms"] = "soon"
    elif how == "no time at all":
        raw["measured"][0]["tried"][0]["ms"] = float("nan")
    elif how == "no such operator":
        raw["measured"][0]["work"]["operator"] = "matmul"
    elif how == "no such dtype":
        raw["measured"][0]["work"]["dtype"] = "nn"
    elif how == "no such choice":
        raw["measured"][0]["best"] = 7
    elif how == "a list":
        return "[]"
    text = json.dumps(raw)
    return text[: len(text) // 2] if how == "cut off" else "" if how == "empty" else text


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("another version", "is of version 99, and this is moe_comm's version 1"),
        ("another machine", "is of another machine"),
        ("a field missing", "cannot be read"),
        ("a time that is text", "cannot be read"),
        ("no time at all", "cannot be read"),
        ("no such operator", "unknown work 'matmul'"),
        ("no such dtype", "cannot be read"),
        ("no such choice", "cannot be read"),
        ("a list", "cannot be read"),
        ("cut off", "cannot be read"),
        ("empty", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_a_warning(how: str, told: str, tmp_path: Path) -> None:
    path = save_store(tmp_path, Store((measured(),)))
    path.write_text(_damage(json.loads(path.read_text()), how))
    with pytest.warns(RuntimeWarning, match=told) as warned:
        assert load_store(tmp_path) == Store()
    assert "Run moe-comm tune" in str(warned[0].message)


def test_no_file_is_no_measurement_and_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert load_store(tmp_path / "nowhere") == Store()
    assert not recwarn.list


def test_the_cache_is_the_users() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/moe_comm/overlap")
    assert cache_folder({}) == Path.home() / ".cache" / "moe_comm" / "overlap"
    assert store_path(Path("a"), "one machine") != store_path(Path("a"), "another")


def test_the_nearest_shape_counts_and_far_ones_do_not() -> None:
    store = Store(
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


def _chunks(store: Store, rows: int) -> int | None:
    found = store.find(replace(WORK, rows=rows), PLACE)
    return None if found is None else found.chunks


def test_few_rows_fall_back_up_to_where_one_chunk_was_measured_to_be_best() -> None:
    rows_and_best = [(64, 1), (256, 1), (1024, 4), (4096, 1)]
    store = Store(tuple(measured(replace(WORK, rows=rows), best) for rows, best in rows_and_best))
    assert fallback_rows(store.measured) == 256
    assert [_chunks(store, rows) for rows in (0, 1, 20, 100, 1500)] == [1, 1, 1, 1, 4]
    assert fallback_rows([]) == 0
    assert fallback_rows([measured(chunks=4)]) == 0


def test_measurements_hold_where_they_were_taken() -> None:
    far = replace(PLACE, hosts=2)
    store = Store((measured(), measured(chunks=16, place=far)))

    def found(place: Place) -> int | None:
        choice = store.find(WORK, place)
        return None if choice is None else choice.chunks

    assert (found(PLACE), found(far)) == (8, 16)
    # Inside a host the link is the machine's own; between hosts it may be any.
    assert found(replace(PLACE, bytes_per_s=1e7)) == 8
    assert found(replace(far, bytes_per_s=1.9e9)) == 16
    assert found(replace(far, bytes_per_s=1e8)) is None
    for other in (replace(PLACE, threads=8), replace(PLACE, shared=True), replace(PLACE, device="a GPU")):
        assert found(other) is None


def test_what_is_measured_again_replaces_what_was() -> None:
    store = Store((measured(chunks=2), measured(replace(WORK, rows=1), 1))).merged([measured(chunks=16)])
    assert [(m.work.rows, m.chosen.choice.chunks) for m in store.measured] == [(1, 1), (1024, 16)]


def test_the_error_of_the_model_is_over_all_that_was_tried() -> None:
    found = prediction_error([measured(), measured()])
    assert found == pytest.approx({"median": (0.25 + 0.1) / 2, "worst": 0.25})
    assert prediction_error([]) == {}


# --- ranks ---


def _here(work: Work) -> tuple[Any, Place]:
    """The channel of all ranks, and where they are."""
    channel = channel_of(dist.group.WORLD)
    rates = tuning.rates_of(channel, work.dtype, CPU)
    return channel, tuning.place_of(channel, rates, CPU)


def _differ(rank: int, world: int, arg: tuple[str, dict[int, int]]) -> tuple[Choice, int, Choice]:
    folder, stored = Path(arg[0]) / f"rank{rank}", arg[1]
    configure_collectives(CollectiveOptions(shared_memory=False))
    configure_tuning(folder)
    try:
        work = replace(WORK, world=world)
        channel, place = _here(work)
        if rank in stored:
            save_store(folder, Store((measured(work, stored[rank], place),)))
        first = choose(work, channel, CPU)
        with pytest.MonkeyPatch.context() as patch:
            asked: list[str] = []
            patch.setattr(channel, "start_all_gather", lambda *args: asked.append("exchange"))
            again = choose(replace(work, rows=work.rows + 1), channel, CPU)  # in the same bucket
        assert again == first
        return first, len(asked), choose(replace(work, rows=1), channel, CPU)
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stored", [{0: 8, 1: 2}, {0: 16}, {1: 16}, {}], ids=str)
def test_ranks_choose_alike_though_their_files_differ(
    world: int, stored: dict[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    found = pool.run(_differ, (str(tmp_path), stored))
    assert len(set(found)) == 1
    choice, exchanges, of_one_row = found[0]
    assert exchanges == 0
    assert choice.chunks == stored.get(0, choice.chunks)
    assert of_one_row == Choice()


def _mismatch(rank: int, world: int, folder: str) -> None:
    configure_tuning(Path(folder))
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        channel, _ = _here(WORK)
        with pytest.raises(RankMismatch, match="chooses chunks for gather_matmul forward of 1024"):
            choose(replace(WORK, other=3 + rank), channel, CPU)
        assert choose(WORK, channel, CPU).chunks >= 1
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


def test_ranks_that_ask_about_different_work_learn_so(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(_mismatch, str(tmp_path))


def _measures(rank: int, world: int, folder: str) -> list[Rates]:
    configure_tuning(Path(folder))
    found = []
    try:
        for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False)):
            configure_collectives(options)
            tuning._state.known.clear()
            before = torch.get_rng_state()
            found.append(tuning.rates_of(channel_of(dist.group.WORLD), torch.float32, CPU))
            assert torch.equal(torch.get_rng_state(), before)
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()
    return found


def test_rates_are_the_same_on_every_rank_and_make_sense(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_measures, str(tmp_path))
    assert first == second
    for rates in first:
        assert 0 < rates.latency_s < 1 and 1e5 < rates.bytes_per_s < 1e13 and 0 <= rates.hides <= 1
        assert all(1e6 < rate < 1e16 for _, rate in rates.gemm)
        assert predict(WORK.load(), rates, 4) > 0
    assert [rates.shared for rates in first] == [True, False]


def _used(rank: int, world: int, folder: str) -> bool:
    """Whether what is stored is what an operator does; the model is not asked."""
    stored = load_store(Path(folder)).measured
    one = next(m for m in stored if m.work.operator == "gather_matmul" and m.work.direction == "forward")
    threads = torch.get_num_threads()
    torch.set_num_threads(one.place.threads)
    configure_tuning(Path(folder))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "cheapest", None)
            x = torch.ones(one.work.rows // world, one.work.sent)
            w = torch.ones(one.work.other, one.work.sent)
            y = gather_matmul(x, w, dist.group.WORLD, Overlap("auto"))
            assert torch.equal(y, reference(x, w, dist.group.WORLD))
            return choose(one.work, channel_of(dist.group.WORLD), CPU) == one.chosen.choice
    finally:
        torch.set_num_threads(threads)
        configure_tuning()


def test_the_command_stores_what_another_process_uses(
    tmp_path: Path, pool2: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rows", "1", "--rows", "64", "--sent", "16", "--other", "16", "--warmup", "0", "--rounds", "1"]
    out = tmp_path / "out.json"
    assert cli.run(["tune", "--ranks", "2", *sizes, "--cache", str(tmp_path), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["op"], row["direction"], row["rows"]) for row in found["results"][:4]] == [
        ("gather_matmul", direction, 2 * rows) for rows in (1, 64) for direction in ("forward", "backward")
    ]
    assert {row["op"] for row in found["results"]} >= {"matmul_scatter", "dispatch_matmul", "matmul_combine"}
    for row in found["results"]:
        assert row["error"] == pytest.approx(abs(row["predicted_ms"] / row["best_ms"] - 1))
        assert row["best_ms"] <= row["serial_ms"]
    assert 0 <= found["prediction_error"]["median"] <= found["prediction_error"]["worst"]
    stored = json.loads(store_path(tmp_path).read_text())
    assert stored["prediction_error"] == found["prediction_error"]
    assert "error of the cost model over all that was tried" in capsys.readouterr().out
    assert pool2.run(_used, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--operator", "matmul"], "unknown operator 'matmul'; known: gather_matmul"),
        (["--rows", "0"], "--rows"),
        (["--dtype", "int8"], "float32"),
    ],
)
def test_a_wrong_request_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", *arguments]) == 2
    assert told in capsys.readouterr().err
