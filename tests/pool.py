"""Ranks for tests: processes that are reused between tests, with a deadline and stack traces after a timeout.

    @on_ranks(2, 4)                                   # once with 2 ranks, once with 4
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sum(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> None:
        assert ...                                    # runs on every rank

    with RankPool(2) as pool:                         # where the test compares results of ranks
        results = pool.run(work, arg, timeout=60)     # work(rank, world, arg), a module-level function

Each rank is a process with one torch thread. Its default process group is gloo with a FileStore on loopback. Functions
are sent by import path, arguments and results as pickled bytes (tensors by value), so ranks share only what the code
under test shares.

Errors of a run:

    a rank raises       the other ranks get ``grace`` seconds to finish, then RankFailure
    a rank dies         the same, unless the test passed expect_dead={rank}
    the deadline        all ranks print their stacks (SIGUSR1, faulthandler) and are killed, RankFailure

After a failure of a rank, the pool restarts its ranks on the next run. It also restarts ranks that created many process
groups, because the gloo threads of each group wake up a hundred times per second until the process exits.

The processes come from the fork server of multiprocessing. They start in 50 ms; with "spawn", importing torch and
transformers would take two to four core-seconds. The server has imported ``PRELOAD``, without modules that the
collected tests do not need.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

GROUP_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
EXIT_S, STACKS_S = 60.0, 10.0
MOST_THREADS = 150
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "transformers.trainer",
    "transformers.models.mixtral.modeling_mixtral",
    "hypothesis",
    "pytest",
    "tensorboard.backend.event_processing.event_accumulator",
    "typer",
    "moe_comm.layers",
    "moe_comm.dispatch.backends.native",
    "moe_comm.dispatch.hierarchical.dispatcher",
    "moe_comm.integrations.hugging_face.swap",
    "moe_comm.train.loop.job",
    "tests.integrations.hosts.sglang_cpu",
)
BARE = PRELOAD[:4]

Work = Callable[[int, int, Any], Any]


class RankFailure(AssertionError):
    """A rank raised, died, or exceeded the deadline.

    ``errors`` contains (type name, message) by rank. The pool adds the types "ProcessDied" and "Deadline".
    """

    def __init__(self, errors: dict[int, tuple[str, str]], details: dict[int, str]) -> None:
        self.errors = errors
        lines = [f"{len(errors)} rank(s) failed"]
        for rank in sorted(errors):
            name, message = errors[rank]
            lines.append(f"--- rank {rank}: {name}: {message}")
            lines.append(details.get(rank, "").rstrip())
        super().__init__("\n".join(lines))


_BARE = forkserver.ForkServer()
"""Fork server of bare ranks. The fork server of multiprocessing forks the other ranks."""


def start_server() -> None:
    """Start the fork server of multiprocessing, unless it runs. ``launch`` uses it too, and loads fewer modules."""
    multiprocessing.set_forkserver_preload([name for name in PRELOAD if name in BARE or name in sys.modules])
    with _environment(ONE_THREAD):
        forkserver.ensure_running()


class RankPool:
    """Context manager with ``world`` rank processes, which start on the first run.

    Args:
        bare: fork ranks from a server that has imported only torch, for tests of what happens on other imports, such
            as that of Triton, which selects its interpreter on import.
    """

    def __init__(self, world: int, *, bare: bool = False) -> None:
        self.world = world
        self._bare = bare
        self._made_folder: Path | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._generation = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank, and start the ranks if necessary."""
        self._ensure_up()
        return [process.pid for process in self._processes]

    def run(
        self,
        work: Work,
        arg: Any = None,
        timeout: float = 120.0,
        *,
        expect_dead: Collection[int] = (),
        grace: float = 5.0,
    ) -> list[Any]:
        """Call ``work(rank, world, arg)`` on every rank and return the results by rank.

        Args:
            timeout: seconds until every rank's stacks are printed and all are killed.
            expect_dead: ranks that die or stop on purpose; they are not waited for, and their result is None.
            grace: seconds the other ranks get once one has failed.

        Raises:
            RankFailure: see ``RankFailure.errors``.
        """
        self._ensure_up()
        message = pickle.dumps((work.__module__, work.__qualname__, arg, timeout))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        results: list[Any] = [None] * self.world
        errors: dict[int, tuple[str, str]] = {}
        details: dict[int, str] = {}
        waiting = set(range(self.world)) - set(expect_dead)
        deadline = time.monotonic() + timeout
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            ready = wait([self._pipes[rank] for rank in waiting], remaining_s)
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                waiting.discard(rank)
                try:
                    failed, *answer = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(EXIT_S)
                    failed, answer = "ProcessDied", [f"exit code {self._processes[rank].exitcode}", ""]
                if failed:
                    errors[rank], details[rank] = (failed, answer[0]), answer[1]
                    deadline = min(deadline, time.monotonic() + grace)
                else:
                    results[rank] = answer[0]
        if waiting:
            details |= self._stacks(waiting)
            for rank in waiting:
                errors[rank] = ("Deadline", f"did not return (timeout {timeout} s, {grace} s after a failure)")
        if expect_dead or waiting or any(name == "ProcessDied" for name, _ in errors.values()):
            self._kill()
        if errors:
            raise RankFailure(errors, details)
        return results

    def close(self) -> None:
        """End all ranks: with a request, then with SIGKILL."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
        self._kill()
        if self._made_folder is not None:
            shutil.rmtree(self._made_folder, ignore_errors=True)
            self._made_folder = None

    def _ensure_up(self) -> None:
        if self._processes and _threads(self._processes[0].pid) > MOST_THREADS:
            self._kill()
        if self._processes:
            return
        self._generation += 1
        start_server()
        context = multiprocessing.get_context("forkserver")
        _BARE.set_forkserver_preload(list(BARE))
        store = str(self._folder / f"store{self._generation}")
        with _environment(ONE_THREAD), _forked_from(_BARE if self._bare else None):
            for rank in range(self.world):
                local, remote = context.Pipe()
                args = (rank, self.world, store, str(self._stack_file(rank)), remote, dict(os.environ), list(sys.path))
                process = context.Process(target=_rank_main, args=args, name=f"rank{rank}", daemon=True)
                process.start()
                remote.close()
                self._processes.append(process)
                self._pipes.append(local)
        for rank, pipe in enumerate(self._pipes):
            try:
                up = pipe.poll(START_TIMEOUT_S)
                failed = pickle.loads(pipe.recv_bytes()) if up else f"not up within {START_TIMEOUT_S} s"
            except EOFError:
                failed = "died while starting"
            if failed:
                self._kill()
                raise RankFailure({rank: ("StartFailed", failed)}, {})

    @property
    def _folder(self) -> Path:
        if self._made_folder is None:
            self._made_folder = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        return self._made_folder

    def _stack_file(self, rank: int) -> Path:
        return self._folder / f"stacks{self._generation}.{rank}"

    def _stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Request the Python stacks of ``ranks`` and return what they write within ``STACKS_S``."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        end, before = time.monotonic() + STACKS_S, list[int]()
        while time.monotonic() < end:
            sizes = [self._stack_file(rank).stat().st_size for rank in ranks]
            if all(sizes) and sizes == before:
                break
            before = sizes
            time.sleep(0.2)  # the stacks may be incomplete
        stacks = {rank: self._stack_file(rank).read_text() or "(no stacks: stopped)" for rank in ranks}
        for rank, text in sorted(stacks.items()):
            print(f"--- stacks of rank {rank} (pid {self._processes[rank].pid})\n{text}", file=sys.stderr)
        return stacks

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def on_ranks(*worlds: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test on every rank of the module's pools, once for each number of ranks in ``worlds``.

    The test gets ``rank``, ``world`` and ``group`` (the default group), if it has parameters of these names. Its other
    parameters are fixtures and parametrized values of the main process, which are pickled. Place it above other marks.
    It is skipped if all ranks skip it for the same reason.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        of_ranks = {"rank", "world", "group"} & parameters.keys()

        def on_rank(rank: int, world: int, arguments: dict[str, Any]) -> str | None:
            from torch.distributed import group

            values = {"rank": rank, "world": world, "group": group.WORLD}
            try:
                body(**{name: values[name] for name in of_ranks}, **arguments)
            except pytest.skip.Exception as skipped:
                return str(skipped)
            return None

        @functools.wraps(body)
        def test(pools: dict[int, RankPool], ranks: int, **arguments: Any) -> None:
            reasons = pools[ranks].run(on_rank, arguments, timeout)
            assert len(set(reasons)) == 1, f"some ranks skipped the test: {reasons}"
            if reasons[0] is not None:
                pytest.skip(reasons[0])

        on_rank.__module__, on_rank.__qualname__ = body.__module__, f"{body.__qualname__}.on_rank"
        test.on_rank = on_rank  # type: ignore[attr-defined]  # where ranks find it
        requested = ["pools", "ranks", *(name for name in parameters if name not in of_ranks)]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what pytest reads
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in requested]
        )
        del test.__wrapped__  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", worlds)(test)

    return decorate


def with_longer_deadline(check: Callable[[float], None], *deadlines_s: float) -> None:
    """Call ``check`` with the first deadline; if it fails, with the next one.

    This is for tests that wait until an operation times out. On an idle machine the first deadline is enough. On a
    busy one, a healthy rank may also exceed it, and then the test must wait longer.
    """
    for deadline_s in deadlines_s[:-1]:
        try:
            return check(deadline_s)
        except AssertionError as error:  # RankFailure, too
            print(f"failed with a deadline of {deadline_s} s: {error}", file=sys.stderr)
    return check(deadlines_s[-1])


def _threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


@contextmanager
def _forked_from(server: forkserver.ForkServer | None) -> Iterator[None]:
    """Inside the block, ``server`` forks the processes of the "forkserver" context. None: the default server does."""
    usual = forkserver.connect_to_new_process
    if server is not None:
        forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = usual


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    rank: int, world: int, store: str, stack_file: str, pipe: Connection, environment: dict[str, str], path: list[str]
) -> None:
    os.environ.update(environment)
    sys.path[:] = path
    stacks = open(stack_file, "w")  # noqa: SIM115  faulthandler writes to it until the process ends
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # a collection of the 400,000 objects that the fork server loaded takes 0.25 s
    try:
        file_store = dist.FileStore(store, world)
        dist.init_process_group(
            "gloo", store=file_store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
        )
    except Exception:
        pipe.send_bytes(pickle.dumps(traceback.format_exc()))
        return
    pipe.send_bytes(pickle.dumps(""))
    while True:
        try:
            module, name, arg, timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # destructors of process groups may wait for ranks that exited
        # Without this, a hung rank would not exit when the parent is killed.
        faulthandler.dump_traceback_later(timeout + 60, exit=True)
        try:
            answer = pickle.dumps(("", _find(module, name)(rank, world, arg)))
        except BaseException as error:
            answer = pickle.dumps((type(error).__name__, str(error), traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


def _find(module: str, name: str) -> Work:
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[return-value]
