"""Diagnoses of hand-made steps, with and without slow ranks and links, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_comm.cli import run as command
from moe_comm.errors import CorruptFile, InputError
from moe_comm.observe import records
from moe_comm.observe.diagnose import Diagnosis, culprits, diagnose
from moe_comm.observe.records import FaultRecord, LineWriter, RankStep
from moe_comm.observe.window import Window, make_window

STEPS = 20


def lines(
    world: int,
    seed: int = 0,
    slow: dict[int, float] | None = None,
    part: str = "compute",
    rows: np.ndarray | None = None,
    per_row: float = 0.0,
    links: np.ndarray | None = None,
    noise: float = 0.03,
) -> list[RankStep]:
    """Return step lines with 100 ms of compute time, multiplied by ``slow`` on some ranks; two ranks per host."""
    generator = np.random.default_rng(seed)
    step_lines = []
    for step in range(1, STEPS + 1):
        for rank in range(world):
            factor = (slow or {}).get(rank, 1.0)
            seconds = {"compute": 0.1, "data": 0.005, "checkpoint": 0.0}
            seconds[part] *= factor
            own_rows = 0 if rows is None else int(rows[step - 1, rank])
            seconds["compute"] += own_rows * per_row
            seconds = {
                name: value * float(np.exp(noise * generator.standard_normal())) for name, value in seconds.items()
            }
            probes = {}
            if links is not None and rank % 2 == 0:
                for peer in range(0, world, 2):
                    if peer != rank:
                        jitter = float(np.exp(0.1 * generator.standard_normal()))
                        probes[str(peer)] = float(links[peer // 2, rank // 2]) * jitter
            step_lines.append(
                RankStep(
                    step=step,
                    rank=rank,
                    host=f"host{rank // 2}",
                    begin_s=float(step),
                    total=0.2,
                    communication=0.05,
                    memory_bytes=0,
                    rows=own_rows,
                    links=probes,
                    **seconds,
                )
            )
    return step_lines


def only_diagnosis(window: Window) -> Diagnosis:
    diagnoses = diagnose(window)
    assert len(diagnoses) == 1, diagnoses
    return diagnoses[0]


@pytest.mark.parametrize("world", [2, 4, 16])
@pytest.mark.parametrize("part", ["compute", "data"])
def test_a_slow_rank_is_reported_with_its_slow_activity(world: int, part: str) -> None:
    diagnosis = only_diagnosis(make_window(lines(world, slow={1: 2.5}, part=part)))
    assert (diagnosis.kind, diagnosis.ranks) == ("slow rank", (1,))
    assert diagnosis.factor == pytest.approx(2.5, rel=0.1) and diagnosis.sure > 0.95
    assert part in diagnosis.why and "host0" in diagnosis.why


def test_healthy_runs_have_no_diagnosis() -> None:
    for seed in range(100):
        assert diagnose(make_window(lines(4, seed, links=healthy(2)))) == []


def test_a_rank_whose_experts_are_popular_is_not_slow() -> None:
    generator = np.random.default_rng(0)
    rows = generator.integers(800, 1200, (STEPS, 4)) + np.array([0, 4000, 0, 0])
    window = make_window(lines(4, rows=rows, per_row=5e-5))
    assert window.parts["compute"][:, 1].mean() > 2 * window.parts["compute"][:, 0].mean()
    assert diagnose(window) == []


def test_a_slow_rank_is_reported_although_its_rows_vary_between_steps() -> None:
    rows = np.random.default_rng(0).integers(500, 1500, (STEPS, 4))
    diagnosis = only_diagnosis(make_window(lines(4, slow={2: 2.0}, rows=rows, per_row=2e-5)))
    assert (diagnosis.kind, diagnosis.ranks) == ("slow rank", (2,))


def test_ranks_are_compared_within_their_stage() -> None:
    """The last stage has the output layer, and no rank is slow."""
    equal = make_window(lines(4, slow={2: 1.6, 3: 1.6}), stage=(0, 0, 1, 1))
    assert diagnose(equal) == []
    slow = make_window(lines(4, slow={2: 1.6, 3: 3.2}), stage=(0, 0, 1, 1))
    assert only_diagnosis(slow).ranks == (3,)


def healthy(hosts: int) -> np.ndarray:
    return np.full((hosts, hosts), 0.002)


@pytest.mark.parametrize("hosts", [2, 3, 4, 8])
def test_one_slow_element_of_the_matrix_is_a_slow_link(hosts: int) -> None:
    links = healthy(hosts)
    links[1, 0] = 0.02
    diagnosis = only_diagnosis(make_window(lines(2 * hosts, links=links)))
    assert (diagnosis.kind, diagnosis.ranks) == ("slow link", (2, 0))


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_slow_rows_columns_and_both_are_a_slow_sender_receiver_and_host(hosts: int) -> None:
    for kind, rows, columns in (("slow sender", [1], []), ("slow receiver", [], [1]), ("slow host", [1], [1])):
        links = healthy(hosts)
        links[rows], links[:, columns] = 0.03, 0.03
        diagnosis = only_diagnosis(make_window(lines(2 * hosts, links=links)))
        assert (diagnosis.kind, diagnosis.ranks) == (kind, (2,))


def test_too_few_steps_give_no_diagnosis() -> None:
    window = make_window(lines(4, slow={1: 3.0}))
    assert diagnose(window.between(1, 4)) == [] and diagnose(window.between(1, 8))


def test_a_missing_step_of_one_rank_does_not_affect_the_others() -> None:
    generator = np.random.default_rng(0)
    rows = generator.integers(800, 1200, (STEPS, 4)) + np.array([0, 4000, 0, 0])
    popular = lines(4, rows=rows, per_row=5e-5)
    assert (popular[-1].step, popular[-1].rank) == (STEPS, 3)
    assert diagnose(make_window(popular[:-1])) == []
    assert only_diagnosis(make_window(lines(4, slow={1: 2.5})[:-1])).ranks == (1,)


def test_memory_is_bounded_for_sparse_rank_numbers() -> None:
    sparse = [replace(line, rank=line.rank * 300_000) for line in lines(4, slow={1: 2.5})]
    assert only_diagnosis(make_window(sparse)).ranks == (300_000,)
    many = [replace(line, rank=line.rank * 500) for line in lines(4, links=healthy(2))]
    window = make_window([replace(line, links={"1000": 0.01} if line.rank == 0 else {}) for line in many])
    assert window.ranks == (0, 500, 1000, 1500) and window.links.matrices()[1].shape == (STEPS, 2, 2)
    assert window.between(3, 7).links.matrices()[1].shape == (5, 2, 2)
    scattered = [replace(many[0], step=number, rank=number, links={}) for number in range(3000)]
    with pytest.raises(CorruptFile, match="3000 lines for 3000 steps of 3000 ranks"):
        make_window(scattered)


def test_a_probe_of_an_invalid_rank_is_skipped() -> None:
    odd = dict.fromkeys(("²", "-1", "9" * 5000, "1000000000", "2"), 0.01)
    window = make_window([replace(line, links=odd if line.rank == 0 else {}) for line in lines(4)])
    assert window.links.matrices()[0] == [0, 2]


def test_the_later_line_of_a_repeated_step_is_used() -> None:
    first_lines, later_lines = lines(2, slow={0: 9.0}), lines(2)
    assert diagnose(make_window([*first_lines, *later_lines])) == []


def test_a_window_without_lines_is_rejected() -> None:
    with pytest.raises(InputError, match="no step"):
        make_window([])


def write_lines(folder: Path, slow: dict[int, float]) -> Path:
    for line in lines(4, slow=slow):
        records.append(folder / records.RANKS / f"rank-{line.rank:05d}.jsonl", line)
    return folder


def test_consecutive_windows_with_the_same_diagnosis_are_merged(tmp_path: Path) -> None:
    write_lines(tmp_path, {2: 2.0})
    (entry,) = culprits(tmp_path, size=8)
    assert (entry.finding.ranks, entry.first_step, entry.last_step) == ((2,), 1, STEPS)
    assert str(entry).startswith(f"steps 1 to {STEPS}: slow rank, rank 2 (100% confidence): rank 2 on host1 spends ")


def test_detected_faults_are_included_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path, {2: 2.0})
    writer = LineWriter(tmp_path / records.FAULTS)
    writer.write(FaultRecord(0.0, 30, "stuck", [1], "restart", "rank 1 is hung"))
    writer.write(FaultRecord(0.0, 31, "spike", [0], "rerun"))
    writer.close()
    entries = culprits(tmp_path)
    assert [(one.finding.kind, one.finding.ranks, one.first_step) for one in entries] == [
        ("slow rank", (2,), 1),
        ("hang", (1,), 30),
    ]
    assert culprits(tmp_path, (25, 35))[0].finding.kind == "hang"


def test_the_command_prints_slow_ranks_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, healthy = write_lines(tmp_path / "slow", {0: 3.0}), write_lines(tmp_path / "fine", {})
    out = tmp_path / "found.json"
    assert command(["diagnose", str(slow), "--steps", "5:15", "--json", str(out)]) == 0
    assert "steps 5 to 15: slow rank, rank 0 (" in capsys.readouterr().out
    (entry,) = json.loads(out.read_text())
    assert entry["finding"]["kind"] == "slow rank" and entry["finding"]["ranks"] == [0]
    assert command(["diagnose", str(healthy)]) == 0
    assert capsys.readouterr().out == "no rank, link or host stands out\n"


def test_a_folder_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="observe"):
        culprits(tmp_path)
    assert command(["diagnose", str(tmp_path / "none")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
