"""Fault injection in training; see ``moe_comm.observe.faults``.

    start ─▶ batch ─▶ forward: │dispatch│ at=forward │experts│ ─▶ backward: at=backward ─▶ after_backward ─▶ at=end

The faults of a step are determined before the step begins. Module hooks that inject them are added before the step and
removed after it. Other steps, and runs without faults, have no such hooks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.faults import (
    DAMAGE,
    PROGRESS,
    DueFault,
    FaultPlan,
    FaultSpec,
    Injection,
    next_attempt,
    read_injections,
    write_injection,
)
from moe_comm.observe.records import INJECTED, LineWriter
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import read_bounded
from moe_comm.train.checkpoint import files
from moe_comm.train.checkpoint.folder import COMPLETE, MANIFEST, METADATA, complete_checkpoints
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.attempts import folder_before

EXIT_CODE = 17
LINK = "link0"
"""Network interface of a host that ``moe_comm.bench.hosts`` simulates with a network namespace."""
COMMAND_TIMEOUT_S = 10.0


def execute(fault: FaultSpec) -> None:
    """Execute a fault. Returns if the rank survives it."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            ctypes.string_at(0)
        case "exit":
            os._exit(EXIT_CODE)
        case "hold_gil":
            thread = threading.Thread(target=_hold_gil, args=(fault.seconds,), name="holds the GIL", daemon=True)
            thread.start()
            thread.join()
        case "slow_cpu":
            end = time.monotonic() + fault.seconds
            while time.monotonic() < end:
                sum(range(1000))
        case "slow_sleep":
            time.sleep(fault.seconds)
        case "full_shm":
            _fill("/dev/shm", fault.mib << 20, fault.seconds)


def _hold_gil(seconds: float) -> None:
    """Wait in C without releasing the interpreter's lock."""
    end = time.monotonic() + seconds
    library = ctypes.PyDLL(None)
    while (remaining := end - time.monotonic()) > 0:
        library.poll(None, 0, min(int(remaining * 1000) + 1, 1 << 30))


def _fill(folder: str, max_bytes: int, seconds: float) -> None:
    """Allocate the free space of ``folder``, at most ``max_bytes``, in an anonymous file for ``seconds``."""
    space = os.statvfs(folder)
    size = min(space.f_bavail * space.f_frsize, max_bytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        with contextlib.suppress(OSError):  # another process has used the space
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        time.sleep(seconds)


def choose_file(checkpoints: Path, kind: str, rng: random.Random) -> Path | None:
    """Return a file of the newest complete checkpoint that ``kind`` can damage, or None.

    The marker of completeness is never returned: without it, the checkpoint would be ignored.
    """
    newest = complete_checkpoints(checkpoints, lenient=True)[-1:]
    if not newest or newest[0].path.is_symlink():  # a link may lead to a checkpoint of another run
        return None
    folder = newest[0].path
    names = sorted(folder.glob("rank-*"))
    if kind != "checkpoint_missing":
        names += [folder / METADATA, folder / MANIFEST]
    existing = [path for path in names if path.exists() and path.name != COMPLETE]
    return rng.choice(existing) if existing else None


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Truncate ``path`` or flip a bit in it, at a random offset, or delete it."""
    if kind == "checkpoint_missing":
        path.unlink()
        return
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        offset = rng.randrange(os.fstat(handle).st_size)
        if kind == "checkpoint_truncate":
            os.ftruncate(handle, offset)
        else:
            os.pwrite(handle, bytes([os.pread(handle, 1, offset)[0] ^ 1 << rng.randrange(8)]), offset)
    finally:
        os.close(handle)


def check_link() -> str:
    """Check that this rank's host has its own network link with a rate limit (a token bucket filter)."""
    problem = ""
    if os.path.exists("/proc/1/ns/net") and _same_network():
        problem = "this rank is in the network namespace of the machine"
    elif LINK not in {name for _, name in socket.if_nameindex()}:
        problem = f"this rank's host has no interface {LINK}"
    elif shutil.which("tc") is None:
        problem = "tc is not installed (package iproute2)"
    else:
        with contextlib.suppress(ConfigError):
            _shape()
            return ""
        problem = f"the link of this host is not shaped, or tc may not be run by user id {os.geteuid()}"
    raise ConfigError(f"slow_link: {problem}; it needs ranks on hosts of moe_comm.bench.hosts (run_on_hosts), as root")


def slow_link(mbit: float) -> Callable[[], None]:
    """Limit this host's link to ``mbit`` Mbit/s. Returns a function that restores its rate."""
    original = _shape()
    _tc("replace", {**original, "rate": f"{mbit}mbit"})
    return lambda: _tc("replace", original)


def link_shape() -> str:
    """Return the shaping of this host's link as JSON, for ``shape_link``."""
    return json.dumps(_shape())


def shape_link(shape: str) -> None:
    """Shape this host's link. ``shape`` is a result of ``link_shape``."""
    _tc("replace", json.loads(shape))


def _same_network() -> bool:
    with contextlib.suppress(OSError):
        return os.stat("/proc/1/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    return True


def _shape() -> dict[str, str]:
    """Return rate, burst and latency of the link's token bucket filter (tbf), as tc prints them."""
    words = _run("qdisc", "show", "dev", LINK).split()
    shape: dict[str, str] = {key: words[words.index(key) + 1] for key in ("rate", "burst", "lat") if key in words}
    if "tbf" not in words or len(shape) != 3:
        raise ConfigError(f"{LINK} is not shaped by tbf: {' '.join(words)}")
    return shape


def _tc(verb: str, shape: dict[str, str]) -> None:
    rate, burst, latency = shape["rate"], shape["burst"], shape["lat"]
    _run("qdisc", verb, "dev", LINK, "root", "tbf", "rate", rate, "burst", burst, "latency", latency)


def _run(*arguments: str) -> str:
    result = subprocess.run(("tc", *arguments), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if result.returncode:
        raise ConfigError(f"tc {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


IMMEDIATE_KINDS = ("kill", "stop", "segv", "exit", "hold_gil", "slow_cpu", "slow_sleep", "full_shm")
"""Faults that can be injected at any point of a step."""
INJECTED_BYTES = 64 << 20
"""Maximum size of the record of an earlier run that is copied."""


class FaultOnPurpose(RuntimeError):
    """Raised by the ``raise_*`` faults. It is not a ``MoeCommError``, because it simulates an error in user code."""


class Injector(StepHook):
    """Injects the faults of ``[faults]``. Every rank of a run creates one. Collective.

    ``finish_saves`` waits for the checkpoint in progress. Raises ConfigError on every rank if a fault of the plan is
    invalid or not possible here.
    """

    def __init__(
        self,
        config: TrainConfig,
        stages: Sequence[nn.Module],
        corpus: Any,
        finish_saves: Callable[[], None],
        ranks: Ranks,
        run: Path,
    ) -> None:
        self._path = run / INJECTED
        if ranks.is_first:
            self._copy_record(config, run)
        # The other ranks read the file only after this broadcast.
        self._attempt = int(ranks.broadcast_text(str(next_attempt(run)) if ranks.is_first else ""))
        self._plan = FaultPlan.of(config.faults.plan, config.faults.seed, ranks.rank, ranks.world, self._attempt)
        self._seed, self._ranks, self._run, self._finish_saves = config.faults.seed, ranks, run, finish_saves
        self._stages = stages
        self._layers = [layer for stage in stages for _, layer in moe_layers(stage)]
        kinds = {fault.kind for fault in self._plan.faults}
        if "flip_bit" in kinds and (config.parallel.overlap_chunks or config.parallel.interleave):
            raise ConfigError(
                "flip_bit needs dispatches that are not chunked: set parallel.overlap_chunks=0, interleave=false"
            )
        if "slow_link" in kinds:
            ranks.run_on_some(check_link)
        injected = read_injections(self._path)
        self._plan.fired = {injection.key for injection in injected}
        # Restore the link of a rank that died while its link was slow.
        links = [i.what for i in injected if (i.kind, i.rank) == ("slow_link", ranks.rank) and i.what]
        if "slow_link" in kinds and links:
            shape_link(links[0])
        self._pending: list[DueFault] = []
        self._slow: dict[DueFault, int] = {}  # active slow_* faults, with the last step that they slowed
        self._links: list[tuple[int, Callable[[], None]]] = []  # (step, function to restore the link before that step)
        self._undo: list[Callable[[], None]] = []
        self._step = 0
        self._write_block = files.write_block
        self._progress = LineWriter(run / PROGRESS) if ranks.is_first else None
        if "raise_thread" in kinds:
            self._wrap_corpus(corpus)
        ranks.barrier()

    # --- StepHook ---

    def before_step(self, step: int) -> None:
        self._step = step
        self._restore_links(step)
        self._slow = {due: last for due, last in self._slow.items() if step < due.step + due.fault.steps}
        # Faults that could not be injected in their step remain pending.
        self._pending += [due for due in self._plan.due(step, time.monotonic()) if due not in self._pending]
        for due in [due for due in self._pending if due.fault.kind in DAMAGE]:
            self._damage(due)
        for due in [due for due in self._pending if due.fault.kind == "slow_link"]:
            self._fire(due, link_shape())
            self._links.append((step + due.fault.steps, slow_link(due.fault.mbit)))
        if any(due.fault.kind == "full_disk" for due in self._pending):
            self._fill_disk()
        self._inject_due("start")
        for due in (*self._pending, *self._slow):
            if due.fault.kind in (*IMMEDIATE_KINDS, "raise_forward", "raise_backward", "flip_bit") and self._layers:
                self._hook(due)

    def after_backward(self, step: int, loss: float) -> float:
        self._remove_hooks()
        # On a rank without experts or without rows, the hooks have not run.
        for point in ("forward", "backward"):
            self._inject_due(point)
        for due in list(self._pending):
            if due.fault.kind in ("raise_forward", "raise_backward"):
                self._raise(due)
            elif due.fault.kind == "nan_loss":
                self._fire(due)
                loss = float("nan")
            elif due.fault.kind == "nan_grad" and (grads := self._gradients()):
                self._fire(due)
                grads[0].reshape(-1)[:1].fill_(float("nan"))
        return loss

    def after_step(self, report: StepReport) -> None:
        self._inject_due("end")
        if self._progress is not None:
            self._progress.write({"step": report.step, "time_s": time.time(), "attempt": self._attempt})

    def close(self) -> None:
        self._remove_hooks()
        self._restore_links(None)
        files.write_block = self._write_block
        if self._progress is not None:
            self._progress.close()

    # --- faults ---

    def _fire(self, due: DueFault, what: str = "", step: int = 0) -> None:
        """Record that ``due`` is injected now. ``step`` 0 is the current step."""
        if due in self._pending:
            self._pending.remove(due)
        if due.key in self._plan.fired:
            return
        self._plan.fired.add(due.key)
        fault = due.fault
        write_injection(
            self._path,
            Injection(
                time.time(), due.key, fault.kind, self._ranks.rank, step or self._step, self._attempt, str(fault), what
            ),
        )

    def _inject_due(self, point: str) -> None:
        """Inject the faults that are due at this point of the step."""
        for due in (*self._pending, *self._slow):
            if due.fault.kind in IMMEDIATE_KINDS and due.fault.at == point:
                self._execute(due)

    def _execute(self, due: DueFault) -> None:
        fault = due.fault
        if fault.kind in ("slow_cpu", "slow_sleep"):
            if self._slow.get(due, 0) == self._step:
                return  # once a step
            self._slow[due] = self._step
        self._fire(due)
        execute(fault)

    def _raise(self, due: DueFault) -> None:
        self._fire(due)
        raise FaultOnPurpose(f"{due.fault.kind} on purpose, in step {self._step}")

    def _hook(self, due: DueFault) -> None:
        """Add a hook that injects ``due`` in the step's forward or backward pass."""
        fault = due.fault
        layer = self._layers[fault.layer % len(self._layers)]
        if fault.kind == "flip_bit":
            self._hook_dispatch(due, layer.dispatcher)
            return
        raises = fault.kind.startswith("raise")

        def inject() -> None:
            if due in self._pending or due in self._slow:
                self._raise(due) if raises else self._execute(due)

        if fault.kind == "raise_forward" or (not raises and fault.at == "forward"):
            # Hook the experts: they are always called as a module, the layer is not.
            handle = layer.experts.register_forward_pre_hook(lambda module, args: inject())
            self._undo.append(handle.remove)
        elif raises or fault.at == "backward":

            def on_output(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda grad: inject())

            self._undo.append(layer.experts.register_forward_hook(on_output).remove)

    def _hook_dispatch(self, due: DueFault, dispatcher: Any) -> None:
        """Flip a bit of the rows that the next dispatch returns, before their checksums are verified."""
        in_place = dispatcher.dispatch_in_place

        def flip(rows_RD: Tensor) -> None:
            data = rows_RD.detach().view(torch.uint8)
            rng = random.Random(f"{self._seed} {due.key}")
            row, byte, bit = rng.randrange(data.shape[0]), rng.randrange(data.shape[1]), rng.randrange(8)
            self._fire(due, f"row {row}, byte {byte}, bit {bit}")
            data[row, byte] ^= 1 << bit

        def flipping(send: Any) -> Any:
            def send_and_flip(*args: Any) -> Any:
                results = send(*args)
                rows_RD = results[0]
                if due in self._pending and rows_RD.numel() and torch.is_floating_point(rows_RD):
                    flip(rows_RD)
                return results

            return send_and_flip

        def flip_in_place(*args: Any, **options: Any) -> Any:
            rows, handle = in_place(*args, **options)
            if due in self._pending and handle.num_rows:
                rows = rows.dense()
                flip(rows)
            return rows, handle

        sends = {name: flipping(getattr(dispatcher, name)) for name in ("_send", "_send_with")}  # one may use the other
        replaced = {**sends, "dispatch_in_place": flip_in_place}
        for name, function in replaced.items():
            setattr(dispatcher, name, function)

        def undo() -> None:
            for name in replaced:
                vars(dispatcher).pop(name, None)

        self._undo.append(undo)

    def _fill_disk(self) -> None:
        """Make the next checkpoint write of this rank fail with ENOSPC."""
        write_block = self._write_block

        def write_or_fail(file: Any, block: memoryview) -> None:
            for due in [due for due in self._pending if due.fault.kind == "full_disk"]:
                self._fire(due)
                files.write_block = write_block
                raise OSError(28, "No space left on device (on purpose)", getattr(file, "name", None))
            write_block(file, block)

        if files.write_block is self._write_block:
            files.write_block = write_or_fail

    def _damage(self, due: DueFault) -> None:
        """Damage the newest checkpoint. If there is none, ``due`` remains pending."""
        self._finish_saves()
        rng = random.Random(f"{self._seed} {due.key}")
        path = choose_file(self._run / "checkpoints", due.fault.kind, rng)
        if path is not None:
            self._fire(due, str(path.relative_to(self._run)))
            damage(path, due.fault.kind, rng)

    def _wrap_corpus(self, corpus: Any) -> None:
        """Make the thread that reads batches raise."""
        batch_of = corpus.batch_of

        def read_or_raise(step: int) -> Any:  # the corpus counts steps from 0, fault plans from 1
            for due in self._plan.due(step + 1, time.monotonic(), thread=True):
                self._fire(due, step=step + 1)
                raise FaultOnPurpose(f"raise_thread on purpose, in the data of step {step + 1}")
            return batch_of(step)

        corpus.batch_of = read_or_raise

    def _gradients(self) -> list[Tensor]:
        grads = (param.grad for stage in self._stages for param in stage.parameters())
        local = (grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads if grad is not None)
        return [grad for grad in local if grad.numel() and grad.is_contiguous()]

    def _remove_hooks(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _restore_links(self, step: int | None) -> None:
        for end, restore in [link for link in self._links if step is None or link[0] <= step]:
            self._links.remove((end, restore))
            restore()

    def _copy_record(self, config: TrainConfig, run: Path) -> None:
        """Copy the record of injected faults, if a run starts over in a new folder because it had saved nothing."""
        if config.checkpoint.resume != "auto" or self._path.exists():
            return
        earlier = folder_before(run, config.run.name)
        if earlier is not None and (earlier / INJECTED).exists():
            write_file(self._path, read_bounded(earlier / INJECTED, INJECTED_BYTES))
