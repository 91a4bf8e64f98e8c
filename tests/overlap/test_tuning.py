"""The choice from measurements and the cost model, which is the same on all ranks; and the command that measures."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import cli
from moe_comm.bench import tune
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, communicator_of, configure_collectives
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.errors import RankMismatch
from moe_comm.overlap.chunk_plan import RowSegments
from moe_comm.overlap.executors import pipelined
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul
from moe_comm.overlap.options import BACKENDS, CHUNKED, SHARED, TRITON, Overlap
from moe_comm.overlap.tuning import choose as tuning
from moe_comm.overlap.tuning.choose import choose
from moe_comm.overlap.tuning.cost import DIRECTIONS, FUSED, GroupRates, OperatorWork, predict
from moe_comm.overlap.tuning.store import (
    Measurement,
    OverlapChoice,
    Trial,
    TuningEnvironment,
    TuningStore,
    load_store,
    save_store,
    store_path,
)
from moe_comm.topology import ExpertPlacement
from tests.overlap.common import gather_reference
from tests.overlap.measurements import PLACE, WORK, configure_tuning, fused, measured
from tests.pool import RankPool, on_ranks

CPU = torch.device("cpu")
SLOW_LINK = GroupRates(2e-4, 119e6, 1.0, 3e-5, 2e-6, ((16, 5e9), (64, 20e9), (256, 60e9), (1024, 100e9)))
EXPERTS = tuple(
    replace(WORK, operator=operator, direction=direction, groups=8)
    for operator in ("dispatch_matmul", "matmul_combine")
    for direction in DIRECTIONS
)


def _times(work: OperatorWork, *times: float) -> Measurement:
    """Return a measurement with the times of 1, 2 and 4 chunks."""
    trials = tuple(Trial(OverlapChoice(chunks=chunks), ms, ms) for chunks, ms in zip((1, 2, 4), times, strict=True))
    return Measurement(work, PLACE, trials, min(range(3), key=lambda i: times[i]))


def _choice(works: tuple[OperatorWork, ...], store: TuningStore, rates: GroupRates = SLOW_LINK) -> OverlapChoice:
    return tuning.KnownTimes(store, PLACE, rates, (CHUNKED,)).best(works)


def _joint_choice(*measurements: Measurement) -> OverlapChoice:
    return _choice(EXPERTS, TuningStore(measurements))


def test_one_choice_for_several_operators_has_the_smallest_sum() -> None:
    a, b, c, d = EXPERTS
    # Three of four are fastest in 4 chunks, but the last one loses more than they gain.
    rows = ((a, 10, 9, 8), (b, 10, 9, 8), (c, 10, 9, 8), (d, 10, 6, 20))
    assert _joint_choice(*(_times(*row) for row in rows)) == OverlapChoice(chunks=2)
    assert _joint_choice(*(_times(*row) for row in rows[:3]), _times(d, 10, 7, 8)) == OverlapChoice(chunks=4)
    # The sum must save 5%, like a choice of the model.
    assert _joint_choice(*(_times(work, 10, 9.8, 9.6) for work in EXPERTS)) == OverlapChoice()


def test_operators_without_measurements_are_predicted() -> None:
    many = tuple(replace(work, rows=16384) for work in EXPERTS)
    assert _choice(many, TuningStore()).chunks > 1
    few = tuple(replace(work, rows=8) for work in EXPERTS)
    assert _choice(few, TuningStore()) == OverlapChoice()
    # One of them was measured, and dominates because it is very slow in chunks.
    assert _joint_choice(_times(EXPERTS[2], 10, 1e6, 1e6)) == OverlapChoice()


def test_operators_beside_the_experts_are_added_to_measurements() -> None:
    """The experts were measured alone, and are too small to hide their transfers."""
    alone = tuple(replace(work, other=8) for work in EXPERTS)
    beside = tuple(replace(work, beside=2048 if work.operator == "dispatch_matmul" else 0) for work in alone)
    store = TuningStore(tuple(_times(work, 20, 20.5, 21) for work in alone))
    for rates, chunks in ((SLOW_LINK, 2), (replace(SLOW_LINK, hides=0.0), 1)):
        assert _choice(alone, store, rates) == OverlapChoice()
        assert _choice(beside, store, rates).chunks == chunks


@pytest.mark.parametrize("operator", FUSED)
def test_kernels_and_programs_are_candidates_on_gpus_only(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Processors:
        multi_processor_count = 40

    cuda, two_hosts = torch.device("cuda"), replace(PLACE, hosts=2)
    assert [c.backend for c in tune.candidates(operator, 4096, SLOW_LINK, PLACE, CPU)] == [CHUNKED] * 5
    shared = tune.candidates(operator, 4096, replace(SLOW_LINK, shared=True), PLACE, CPU)
    assert (OverlapChoice(SHARED, 2) in shared) == (operator in ("gather_matmul", "matmul_scatter"))
    monkeypatch.setattr(tune, "on_gpus", lambda device: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Processors)
    candidates = tune.candidates(operator, 32, SLOW_LINK, PLACE, cuda)
    assert candidates == [
        OverlapChoice(),
        OverlapChoice(chunks=2),
        *(OverlapChoice(TRITON, programs=n) for n in (4, 8, 16)),
    ]
    assert tune.candidates("matmul_swap", 32, SLOW_LINK, PLACE, cuda) == candidates[:2]
    assert tune.candidates(operator, 32, SLOW_LINK, two_hosts, cuda) == candidates[:2]


def test_a_candidate_is_measured_with_its_own_settings() -> None:
    assert tune.overlap_of(OverlapChoice(chunks=4)) == Overlap(4, 1, backend="chunked")
    assert tune.overlap_of(OverlapChoice(SHARED, 2)) == Overlap(2, 1)
    assert tune.overlap_of(OverlapChoice(TRITON, programs=8)) == Overlap(1, 1, backend="triton", programs=8)


# --- ranks ---


def _channel_and_environment(work: OperatorWork) -> tuple[Any, TuningEnvironment]:
    """Return the channel of all ranks, and their environment."""
    channel = channel_of(dist.group.WORLD)
    rates = tuning.rates_of(channel, work.dtype, CPU)
    return channel, tuning.place_of(channel, rates, CPU)


def _choose_with_file(
    rank: int, world: int, arg: tuple[str, dict[int, int]]
) -> tuple[OverlapChoice, int, OverlapChoice]:
    folder, stored = Path(arg[0]) / f"rank{rank}", arg[1]
    configure_collectives(CollectiveOptions(shared_memory=False))
    configure_tuning(folder)
    try:
        work = replace(WORK, world=world)
        channel, place = _channel_and_environment(work)
        if rank in stored:
            save_store(folder, TuningStore((measured(work, stored[rank], place),)))
        first = choose(work, channel, CPU)
        with pytest.MonkeyPatch.context() as patch:
            exchanges: list[str] = []
            patch.setattr(channel, "start_all_gather", lambda *args: exchanges.append("exchange"))
            # A shape of the same bucket needs no exchange.
            again = choose(replace(work, rows=work.rows + 1), channel, CPU)
        assert again == first
        return first, len(exchanges), choose(replace(work, rows=1), channel, CPU)
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


@pytest.mark.parametrize(("world", "stored"), [(2, {0: 8, 1: 2}), (2, {}), (4, {0: 16}), (4, {1: 16})], ids=str)
def test_ranks_make_the_same_choice_with_different_files(
    world: int, stored: dict[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    results = pool.run(_choose_with_file, (str(tmp_path), stored))
    assert len(set(results)) == 1
    choice, exchanges, of_one_row = results[0]
    assert exchanges == 0
    assert choice.chunks == stored.get(0, choice.chunks)
    assert of_one_row == OverlapChoice()


def _choose_for_different_work(rank: int, world: int, folder: str) -> None:
    configure_tuning(Path(folder))
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        channel = channel_of(dist.group.WORLD)
        different_works = replace(WORK, other=3 + rank), replace(WORK, dtype=(torch.float32, torch.bfloat16)[rank])
        for work in different_works:  # raises before the rates of a dtype are measured
            with pytest.raises(RankMismatch, match="chooses chunks for gather_matmul forward of 1024"):
                choose(work, channel, CPU)
        assert choose(WORK, channel, CPU).chunks >= 1
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


def test_ranks_that_choose_for_different_work_raise(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(_choose_for_different_work, str(tmp_path))


def _measure_rates(rank: int, world: int, folder: str) -> list[GroupRates]:
    configure_tuning(Path(folder))
    rates = []
    try:
        for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False)):
            configure_collectives(options)
            communicator_of(dist.group.WORLD).forget("tuning")
            before = torch.get_rng_state()
            rates.append(tuning.rates_of(channel_of(dist.group.WORLD), torch.float32, CPU))
            assert torch.equal(torch.get_rng_state(), before)
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()
    return rates


def test_rates_are_the_same_on_every_rank_and_plausible(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_measure_rates, str(tmp_path))
    assert first == second
    for rates in first:
        assert 0 < rates.latency_s < 1 and 1e5 < rates.bytes_per_s < 1e13 and 0 <= rates.hides <= 1
        assert all(1e6 < rate < 1e16 for _, rate in rates.gemm)
        assert predict(WORK, rates, 4) > 0
    assert [rates.shared for rates in first] == [True, False]


def _choose_on_fake_gpu(rank: int, world: int, folder: str) -> None:
    """Check the choice from GPU measurements, without a GPU."""
    configure_tuning(Path(folder))
    cuda = torch.device("cuda")
    channel = channel_of(dist.group.WORLD)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "rates_of", lambda *args: SLOW_LINK)
            patch.setattr(tuning, "place_of", lambda *args: PLACE)
            patch.setattr(tuning, "on_gpus", lambda device: device.type == "cuda")
            assert choose(WORK, channel, cuda) == OverlapChoice(TRITON, programs=8)
            assert choose(WORK, channel, cuda, (CHUNKED,)) == OverlapChoice(chunks=4)
            assert choose(WORK, channel, CPU) == OverlapChoice(chunks=4)
            assert choose((WORK, WORK), channel, cuda) == OverlapChoice(TRITON, programs=8)
            assert choose((WORK, WORK), channel, CPU) == OverlapChoice(chunks=4)
            unknown = replace(WORK, sent=7)
            assert choose(unknown, channel, cuda).backend == CHUNKED
            assert choose(unknown, channel, cuda, (TRITON,)) == OverlapChoice(TRITON)  # the default number of programs
    finally:
        configure_tuning()


def test_a_kernel_is_chosen_if_measured_to_be_fastest_and_never_on_a_cpu(tmp_path: Path, pool2: RankPool) -> None:
    save_store(tmp_path, TuningStore((fused(),)))
    pool2.run(_choose_on_fake_gpu, str(tmp_path))


@on_ranks(2)
def test_unreadable_measurements_of_rank_0_are_a_warning_on_every_rank(rank: int) -> None:
    channel = channel_of(dist.group.WORLD)
    fault = RecursionError("maximum recursion depth exceeded")

    def read(folder: Path) -> tuple[TuningStore, str]:
        if rank == 0:
            raise fault
        raise AssertionError("only rank 0 may read its measurements")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "read_store", read)
        try:
            configure_tuning()
            with pytest.warns(RuntimeWarning, match="rank 0's measurements: cannot be used .RecursionError: maximum"):
                choice = choose(WORK, channel, CPU)
            assert choice.backend in BACKENDS
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert choose(WORK, channel, CPU) == choice
                configure_tuning()
                with pytest.raises(RuntimeWarning, match="cannot be used"):  # raises on every rank, so no rank waits
                    choose(WORK, channel, CPU)
        finally:
            configure_tuning()


STORED_CHUNKS = {
    ("dispatch_matmul", "forward"): 1,
    ("dispatch_matmul", "backward"): 4,
    ("matmul_combine", "forward"): 3,
    ("matmul_combine", "backward"): 1,
}


def _run_with_stored_chunks(rank: int, world: int, arg: tuple[str, bool]) -> None:
    """Check that each operator runs with its stored chunks. swapped: store them for the other direction."""
    folder, swapped = Path(arg[0]), arg[1]
    configure_collectives(CollectiveOptions(shared_memory=False, checked=True))
    configure_tuning(folder)
    tokens, hidden, width, inner = 24, 16, 32, 48
    try:
        dispatcher = AllToAllDispatcher(ExpertPlacement.of(4, world), dist.group.WORLD, rank)
        generator = torch.Generator().manual_seed(rank)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).requires_grad_()

        ids = torch.rand(tokens, 4, generator=generator).topk(2).indices
        x, weights = draw(tokens, hidden), draw(tokens, 2)
        w1, w2 = draw(2, width, hidden), draw(2, hidden, inner)
        leaves = x, w1, w2, weights
        act, grad = draw(width, inner).detach(), draw(tokens, hidden).detach()
        rates = tuning.rates_of(dispatcher.channel, torch.float32, CPU)
        place = tuning.place_of(dispatcher.channel, rates, CPU)
        measurements = []
        for (operator, direction), chunks in STORED_CHUNKS.items():
            if swapped:
                chunks = STORED_CHUNKS[operator, next(d for d in DIRECTIONS if d != direction)]
            other = width if operator == "dispatch_matmul" else inner
            work = OperatorWork(operator, direction, 2 * tokens, hidden, other, torch.float32, world, 2)
            measurements.append(measured(work, chunks, place))
        if rank == 0:
            save_store(folder, TuningStore(tuple(measurements)))

        def run(overlap: Overlap) -> list[torch.Tensor]:
            h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, overlap)
            y = matmul_combine(h @ act, w2, weights, dispatch)
            return [h.detach(), y.detach(), *torch.autograd.grad(y, leaves, grad)]

        plain = run(Overlap(1))
        used: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipelined, "run_ranges", _recording(pipelined.run_ranges, used))
            auto = run(Overlap("auto"))
        assert all(map(torch.equal, auto, plain))
        # The order is dispatch, combine, combine backward, dispatch backward.
        assert used == ([4, 1, 3, 1] if swapped else [1, 3, 1, 4])
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


def _recording(run_ranges: Callable[..., None], used: list[int]) -> Callable[..., None]:
    """Return ``run_ranges`` that also records the number of segments in ``used``."""

    def recorded(segments: RowSegments, *args: Any) -> None:
        used.append(len(segments.ranges))
        run_ranges(segments, *args)

    return recorded


@pytest.mark.parametrize("swapped", [False, True])
def test_operators_for_experts_use_the_stored_choice_for_each_direction(
    swapped: bool, tmp_path: Path, pool2: RankPool
) -> None:
    pool2.run(_run_with_stored_chunks, (str(tmp_path), swapped))


def _uses_stored_choice(rank: int, world: int, folder: str) -> bool:
    """Return whether the operators use the stored choice; the model is not used."""
    stored = load_store(Path(folder)).measured
    measurement = next(m for m in stored if m.work.operator == "gather_matmul" and m.work.direction == "forward")
    threads = torch.get_num_threads()
    torch.set_num_threads(measurement.place.threads)
    configure_tuning(Path(folder))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "cheapest", None)
            x = torch.ones(measurement.work.rows // world, measurement.work.sent)
            w = torch.ones(measurement.work.other, measurement.work.sent)
            y = gather_matmul(x, w, dist.group.WORLD, Overlap("auto"))
            assert torch.equal(y, gather_reference(x, w, dist.group.WORLD))
            return choose(measurement.work, channel_of(dist.group.WORLD), CPU) == measurement.chosen.choice
    finally:
        torch.set_num_threads(threads)
        configure_tuning()


def test_measurements_stored_by_the_command_are_used_by_another_process(
    tmp_path: Path, pool2: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--rows", "1", "--rows", "64", "--sent", "16", "--other", "16", "--warmup", "0", "--rounds", "1"]
    out = tmp_path / "out.json"
    assert cli.run(["tune", "--ranks", "2", *sizes, "--cache", str(tmp_path), "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [(row["op"], row["direction"], row["rows"]) for row in written["results"][:4]] == [
        ("gather_matmul", direction, 2 * rows) for rows in (1, 64) for direction in ("forward", "backward")
    ]
    assert {row["op"] for row in written["results"]} >= {"matmul_scatter", "dispatch_matmul", "matmul_combine"}
    for row in written["results"]:
        assert row["error"] == pytest.approx(abs(row["predicted_ms"] / row["best_ms"] - 1))
        assert row["best_ms"] <= row["serial_ms"]
    assert 0 <= written["prediction_error"]["median"] <= written["prediction_error"]["worst"]
    stored = json.loads(store_path(tmp_path).read_text())
    assert stored["prediction_error"] == written["prediction_error"]
    assert "error of the cost model over all candidates" in capsys.readouterr().out
    assert pool2.run(_uses_stored_choice, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operator", "matmul"], "unknown operator 'matmul' (did you mean 'gather_matmul'?); known: gather_matmul"),
        (["--rows", "0"], "--rows"),
        (["--dtype", "int8"], "float32"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
