"""Ranks start, communicate over loopback only, and return results or raise one error that names the cause."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import make_dispatcher
from moe_comm.errors import CheckpointError, ConfigError, InputError, PeerDied, RoutingError
from moe_comm.runtime.launch import (
    STORE_VARIABLE,
    Interrupted,
    RankFailed,
    agent,
    available_cores,
    init_ranks,
    launch,
    under_torchrun,
)


def sum_of_ranks(offset: int) -> dict[str, Any]:
    with init_ranks("cpu", timeout_s=60) as ranks:
        total = torch.tensor([ranks.rank + offset])
        dist.all_reduce(total)
        dist.barrier()
        result = {"rank": ranks.rank, "world": ranks.world, "total": int(total)}
    threads = os.environ["OMP_NUM_THREADS"]
    return result | {"threads": threads, "group_destroyed": not dist.is_initialized(), "torchrun": under_torchrun()}


FORKED = ("torch",)
"""Preloaded modules, so that ranks start quickly where the start method does not matter."""


def fail(mode: str) -> None:
    with init_ranks("cpu", timeout_s=60) as ranks:
        if ranks.rank == 1:
            if mode.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "exit":
                sys.exit(3)
            if mode == "bug":
                raise ZeroDivisionError("a bug")
            raise InputError("the rows are wrong")
        if mode in ("bug", "killed, reported by torch"):  # rank 0 then fails with torch's own error
            dist.all_reduce(torch.zeros(1))
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise PeerDied(f"rank 1 is gone: {error}") from error


def fail_between_operations() -> None:
    """The experts of rank 1 raise while rank 0 waits in combine."""
    with init_ranks("cpu", timeout_s=60) as ranks:
        dispatcher = make_dispatcher(2, dist.group.WORLD)
        sent = dispatcher.dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]))
        with dispatcher.abort_on_error():
            if ranks.rank == 1:
                raise ZeroDivisionError("a bug")
        dispatcher.combine(sent.rows_RD, torch.ones(2, 1), sent.handle)


def one_rank() -> tuple[int, int, str]:
    with init_ranks("cpu") as ranks:
        total = torch.ones(1)
        dist.all_reduce(total)
        return ranks.rank, ranks.world, ranks.device


@pytest.fixture(autouse=True)
def no_rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", STORE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_two_ranks_return_their_results_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    results = launch(sum_of_ranks, (10,), ranks=2)
    assert [r["rank"] for r in results] == [0, 1]
    assert {r["world"] for r in results} == {2}
    assert {r["total"] for r in results} == {21}
    assert all(r["group_destroyed"] and r["torchrun"] for r in results)
    assert {r["threads"] for r in results} == {str(max(1, available_cores() // 2))}
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    assert changed <= {"TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_one_rank_runs_in_this_process_with_a_group_of_its_own() -> None:
    assert launch(one_rank, ranks=1) == [(0, 1, "cpu")]
    assert not dist.is_initialized()


def test_under_torchrun_its_ranks_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch(os.getpid) == [os.getpid()] == launch(os.getpid, ranks=1)


def test_an_existing_group_is_used_and_not_destroyed() -> None:
    with init_ranks("cpu") as outer, init_ranks("cpu") as inner:
        assert inner == outer
        del inner
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_an_error_of_the_library_keeps_its_class_and_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(InputError) as caught:
        launch(fail, ("input error",), ranks=2, preload=FORKED)
    assert str(caught.value) == "rank 1: the rows are wrong"
    # The launcher raises; neither the ranks nor torch's agent print anything of their own.
    assert "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


def raise_inside(rank: int) -> None:
    """Raise an error of the library on every rank, from a call in this file."""
    with init_ranks("cpu", timeout_s=60) as ranks:
        bad = 9 if ranks.rank == rank else 1
        make_dispatcher(4, dist.group.WORLD if ranks.world > 1 else None).dispatch(  # the user's frame
            torch.ones(1, 4), torch.tensor([[bad]])
        )


def lines_of(error: BaseException) -> list[str]:
    """Return the frames and the text that Python would print."""
    return [line for text in traceback.format_exception(error) for line in text.splitlines()]


def test_an_error_of_the_library_is_printed_once_with_the_users_frame() -> None:
    with pytest.raises(RoutingError) as caught:
        launch(raise_inside, (1,), ranks=2, preload=FORKED)
    error = caught.value
    assert str(error).startswith("rank 1: expert id 9 of token 0") and str(error).count("rank ") == 1
    lines = lines_of(error)
    assert len([line for line in lines if line.startswith("  File")]) == 2, "this test and launch"
    at = next(line for line in lines if line.startswith("at "))
    assert __file__ in at and "in raise_inside: make_dispatcher(" in at
    assert error.details == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_tracebacks_the_whole_traceback_is_kept(ranks: int) -> None:
    with pytest.raises(RoutingError) as caught:
        launch(raise_inside, (0,), ranks=ranks, tracebacks=True, preload=FORKED)
    assert "in raise_inside" in caught.value.details and "moe_comm/dispatch/" in caught.value.details


def test_in_the_process_of_the_caller_frames_of_packages_are_hidden() -> None:
    with pytest.raises(RoutingError) as caught:
        launch(raise_inside, (0,), ranks=1)
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames.count(__file__) == 2
    assert [Path(name).name for name in frames if name != __file__] == ["launcher.py"]


def test_an_error_that_is_not_of_the_library_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailed) as caught:
        launch(fail, ("bug",), ranks=2, preload=FORKED)
    assert str(caught.value) == "rank 1 failed with ZeroDivisionError: a bug"
    assert 'raise ZeroDivisionError("a bug")' in caught.value.details


def test_an_error_between_operations_is_reported_instead_of_the_errors_of_its_peers() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 failed with ZeroDivisionError: a bug(\n|$)"):
        launch(fail_between_operations, ranks=2, preload=FORKED)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("killed, reported by torch", "was killed by SIGKILL"),
        ("exit", "ended with exit code 3"),
    ],
)
def test_a_rank_that_ends_without_an_error_is_the_cause(how: str, expected: str) -> None:
    with pytest.raises(RankFailed, match=rf"^rank 1 \(pid \d+\) {expected}"):
        launch(fail, (how,), ranks=2, preload=FORKED)


def fail_at_first(folder: str, how: str, times: int) -> tuple[int, int]:
    """Rank 1 fails ``times`` times. ``folder`` counts its attempts."""
    with init_ranks("cpu", timeout_s=60) as ranks:
        Path(folder, f"{ranks.rank}.{ranks.restarts}").touch()
        if ranks.rank == 1 and ranks.restarts < times:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            kind = RoutingError if how == "refused" else CheckpointError
            raise kind(f"attempt {ranks.restarts}")
        total = torch.ones(1)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise PeerDied(f"rank 1 is gone: {error}") from error
        return int(total), ranks.restarts


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_failed_rank_restarts_all_ranks_with_a_new_group(how: str, tmp_path: Path) -> None:
    assert launch(fail_at_first, (str(tmp_path), how, 1), 2, restarts=2, preload=FORKED) == [(2, 1), (2, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.slow
def test_after_the_last_restart_the_cause_of_the_last_attempt_is_raised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^rank 1: attempt 1\n"):
        launch(fail_at_first, (str(tmp_path), "raised", 5), ranks=2, restarts=1, preload=FORKED)


def test_errors_that_the_user_must_fix_cause_no_restart(tmp_path: Path) -> None:
    with pytest.raises(RoutingError, match=r"^rank 1: attempt 0\n"):
        launch(fail_at_first, (str(tmp_path), "refused", 1), ranks=2, restarts=2, preload=FORKED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.0", "1.0"]


def handle_signals(*kinds: signal.Signals) -> int:
    """Return the end of a pipe that can be read once one of ``kinds`` was received.

    The C handler writes to the pipe. A Python handler runs later: if the signal arrives just before the main thread
    enters a wait, or in another thread, it runs only after that wait.
    """
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent)
    for kind in kinds:
        signal.signal(kind, lambda number, frame: None)
    return received


def stop_at_signal(folder: str, how: str) -> str:
    """Return a result at SIGINT and SIGTERM, or fail there, or do not handle them."""
    with init_ranks("cpu", timeout_s=60) as ranks:
        received = handle_signals(*([] if how == "default" else [signal.SIGINT, signal.SIGTERM]))
        Path(folder, str(ranks.rank)).touch()
        if not select.select([received], [], [], 200)[0]:
            return "no signal"
        if how == "fails":
            raise InputError("could not finish")
        dist.barrier()
        return "finished"


def signal_when_ready(folder: Path, kind: signal.Signals) -> threading.Thread:
    """Send ``kind`` to this process when both ranks run."""

    def send() -> None:
        end = time.monotonic() + 200
        while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(os.getpid(), kind)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_that_finish_at_a_signal_return_their_results(tmp_path: Path, restarts: int) -> None:
    """Torch's agent would wait 30 s for finished ranks that wait for each other, and kill them."""
    thread = signal_when_ready(tmp_path, signal.SIGTERM)
    results = launch(stop_at_signal, (str(tmp_path), "finishes"), ranks=2, restarts=restarts, preload=FORKED)
    assert results == ["finished"] * 2
    thread.join()


@pytest.mark.parametrize(
    ("how", "kind", "restarts"),
    [("finishes", signal.SIGINT, 0), ("default", signal.SIGTERM, 0), ("default", signal.SIGTERM, 1)],
)
def test_a_signal_at_which_ranks_do_not_finish_raises_interrupted(
    tmp_path: Path, how: str, kind: signal.Signals, restarts: int
) -> None:
    """Ctrl-C always raises. Ranks that the signal ended are not restarted."""
    thread = signal_when_ready(tmp_path, kind)
    preload = FORKED if kind == signal.SIGTERM else ()
    with pytest.raises(Interrupted, match=f"stopped by {kind.name}") as caught:
        launch(stop_at_signal, (str(tmp_path), how), ranks=2, restarts=restarts, preload=preload)
    assert caught.value.number == kind
    thread.join()


def test_an_error_after_a_signal_is_raised(tmp_path: Path) -> None:
    thread = signal_when_ready(tmp_path, signal.SIGTERM)
    with pytest.raises(InputError, match="could not finish"):
        launch(stop_at_signal, (str(tmp_path), "fails"), ranks=2, restarts=1, preload=FORKED)
    thread.join()


def test_ranks_forked_from_a_preloaded_process_work_like_spawned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in ("1", "2"):  # the setting of each launch applies, although the process that forks the ranks is older
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results = launch(sum_of_ranks, (10,), ranks=2, preload=("torch",))
        assert [(r["rank"], r["total"], r["threads"]) for r in results] == [(0, 21, threads), (1, 21, threads)]
        assert all(r["group_destroyed"] and r["torchrun"] for r in results)
    assert launch(is_forked_and_num_threads, ranks=1, restarts=1, preload=("torch",)) == [(True, 2)]


def is_forked_and_num_threads() -> tuple[bool, int]:
    """Return whether this process was forked from another one than the launcher, and torch's threads."""
    parent = multiprocessing.parent_process()
    return parent is not None and parent.pid != os.getppid(), torch.get_num_threads()


@pytest.mark.parametrize(
    ("how", "preload"), [pytest.param("waits", (), marks=pytest.mark.slow), ("finishes", ("torch",))]
)
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path, how: str, preload: tuple[str, ...]) -> None:
    """Forked and spawned ranks, including ranks that finish their work first and cannot return the result."""
    started = tmp_path / "started"
    started.mkdir()
    code = (
        "from tests.runtime.launch.test_launch import launch, wait_for_signal\n"
        f"launch(wait_for_signal, ({str(started)!r}, {how!r}), 2, preload={preload!r})"
    )
    # A separate, short path: the server that forks ranks creates a socket in it.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmpdir,
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": tmpdir}) as launcher,
    ):
        deadline = time.monotonic() + 120
        while len(paths := list(started.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        pids = [int(path.name) for path in paths]
        launcher.kill()
    while [pid for pid in pids if Path("/proc", str(pid)).exists()] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not [pid for pid in pids if Path("/proc", str(pid)).exists()]


def wait_for_signal(folder: str, how: str) -> None:
    received = handle_signals(*([signal.SIGINT] if how == "finishes" else []))
    Path(folder, str(os.getpid())).touch()
    assert select.select([received], [], [], 200)[0]


def test_a_stopped_rank_does_not_delay_the_error_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agent, "ENDING_S", 0.1)
    with pytest.raises(InputError, match="rank 1: the rows are wrong"):
        launch(stop_or_fail, (str(tmp_path / "failed"),), ranks=2, preload=FORKED)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 25, "torch's agent waits 30 s"


def stop_or_fail(mark: str) -> None:
    with init_ranks("cpu", timeout_s=60) as ranks:
        dist.barrier()
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        Path(mark).touch()
        raise InputError("the rows are wrong")


@pytest.mark.parametrize("ranks", [0, -1, 10**6])
def test_number_of_ranks_is_checked(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"got {ranks}"):
        launch(one_rank, ranks=ranks)


def test_devices_are_checked() -> None:
    with pytest.raises(ConfigError, match="cpu or cuda; got 'tpu'"), init_ranks("tpu"):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs one GPU"), init_ranks("cuda"):
            pass


def test_a_module_runs_with_its_arguments_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leave_a_mark.py").write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launch("leave_a_mark", (str(tmp_path),), ranks=2) == [None, None]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.slow
def test_torchrun_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, torch, torch.distributed as dist\n"
        "from moe_comm.runtime.launch import init_ranks, launch\n"
        "def work():\n"
        "    with init_ranks('cpu', 60) as ranks:\n"
        "        total = torch.tensor([ranks.rank + 1])\n"
        "        dist.all_reduce(total)\n"
        "        pathlib.Path(sys.argv[1], f'out{ranks.rank}').write_text(str(int(total)))\n"
        "launch(work)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert process.returncode == 0, process.stderr
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["3", "3"]


@dataclass
class Ended:
    """The end of a rank's process, as torch's agent reports it."""

    exitcode: int
    pid: int = 7


def leave_record(folder: Path, rank: int, kind: str, message: str) -> None:
    record = {"time": rank, "kind": kind, "message": message, "traceback": f"Traceback\n{kind}: {message}\n"}
    (folder / str(rank)).write_text(json.dumps(record))


def test_a_rank_that_ended_itself_while_waiting_is_never_the_cause(tmp_path: Path) -> None:
    alone = {0: Ended(agent.ENDED_BY_WATCH)}
    assert "rank 0 (pid 7) ended itself: a rank that it waited for was lost" in str(agent._cause(alone, tmp_path))
    failures = {0: Ended(agent.ENDED_BY_WATCH), 1: Ended(-signal.SIGSEGV)}
    assert "rank 1 (pid 7) was killed by SIGSEGV" in str(agent._cause(failures, tmp_path))
    leave_record(tmp_path, 1, "PeerDied", "rank 2 is gone")
    assert "rank 2 is gone" in str(agent._cause(failures, tmp_path))


def test_a_rank_that_the_watchers_killed_is_reported_as_stuck_and_not_as_out_of_memory(tmp_path: Path) -> None:
    failures = {1: Ended(-signal.SIGKILL)}
    assert "out of memory?" in str(agent._cause(failures, tmp_path))
    leave_record(tmp_path, 0, "PeerDied", "rank 1 is gone. Noticed: rank 1 is stuck: it sleeps; report: faults/a.txt")
    message = str(agent._cause(failures, tmp_path))
    assert message.endswith("was killed by SIGKILL. Noticed: rank 1 is stuck: it sleeps; report: faults/a.txt")


def test_a_rank_that_finishes_while_it_is_checked_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "ENDING_S", 0.0)
    alive = tmp_path / "alive"
    alive.mkdir()
    (alive / "0.0").symlink_to("gone")  # listed in the folder, but missing when it is read
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (alive / "0.1").write_text(str(process.pid))
    wait_results = iter([False, False, False, True])
    finished = SimpleNamespace(wait=lambda seconds: next(wait_results))
    agent._run_killer(tmp_path, finished, ())  # type: ignore[arg-type]
    assert process.poll() is None
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def _die(early: bool) -> str:
    rank = int(os.environ["RANK"])
    if rank and early:
        os._exit(5)
    with init_ranks("cpu"):
        if rank:
            os._exit(5)
    return "alive"


def test_a_rank_that_may_die_must_join_the_others_first() -> None:
    """They would wait for it until their deadline."""
    assert launch(_die, (False,), 2, preload=("torch",), may_die=(1,)) == ["alive", None]
    with pytest.raises(RankFailed, match=r"rank 1 .* ended with exit code 5"):
        launch(_die, (True,), 2, preload=("torch",), may_die=(1,))
