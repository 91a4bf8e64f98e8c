"""Fault injection in training; see ``moe_comm.observe.faults``.

    start ─▶ batch ─▶ forward: │dispatch│ at=forward │experts│ ─▶ backward: at=backward ─▶ after_backward ─▶ at=end

The faults of a step are determined before the step begins. Module hooks that inject them are added before the step and
removed after it. Other steps, and runs without faults, have no such hooks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.fault_outcomes import PROGRESS, next_attempt
from moe_comm.observe.faults import DAMAGE, DueFault, FaultPlan, Injection, read_injections, write_injection
from moe_comm.observe.records import INJECTED, LineWriter
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import read_bounded
from moe_comm.train.checkpoint import files
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import fault_actions
from moe_comm.train.resilience.attempts import folder_before

IMMEDIATE_KINDS = ("kill", "stop", "segv", "exit", "hold_gil", "slow_cpu", "slow_sleep", "full_shm")
"""Faults that can be injected at any point of a step."""
INJECTED_BYTES = 64 << 20
"""Maximum size of the record of an earlier run that is copied."""


class FaultOnPurpose(RuntimeError):
    """Raised by the ``raise_*`` faults. It is not a ``MoeCommError``, because it simulates an error in user code."""


class Injector(StepHook):
    """Injects the faults of ``[faults]``. Every rank of a run creates one. Collective.

    Args:
        stages: this rank's stages of the model.
        corpus: its ``batch_of`` raises for ``raise_thread``.
        finish_saves: waits for the checkpoint in progress.
        run: folder of the run.

    Raises:
        ConfigError: on every rank. A fault of the plan is invalid, or is not possible here.
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
            ranks.run_on_some(fault_actions.check_link)
        injected = read_injections(self._path)
        self._plan.fired = {injection.key for injection in injected}
        # Restore the link of a rank that died while its link was slow.
        links = [i.what for i in injected if (i.kind, i.rank) == ("slow_link", ranks.rank) and i.what]
        if "slow_link" in kinds and links:
            fault_actions.shape_link(links[0])
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
            self._fire(due, fault_actions.link_shape())
            self._links.append((step + due.fault.steps, fault_actions.slow_link(due.fault.mbit)))
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
        fault_actions.execute(fault)

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
        send = dispatcher._send

        def send_and_flip(*args: Any) -> Any:
            results = send(*args)
            rows_RD = results[0]
            if due in self._pending and rows_RD.numel() and torch.is_floating_point(rows_RD):
                data = rows_RD.detach().view(torch.uint8)
                rng = random.Random(f"{self._seed} {due.key}")
                row, byte, bit = rng.randrange(data.shape[0]), rng.randrange(data.shape[1]), rng.randrange(8)
                self._fire(due, f"row {row}, byte {byte}, bit {bit}")
                data[row, byte] ^= 1 << bit
            return results

        dispatcher._send = send_and_flip
        self._undo.append(lambda: vars(dispatcher).pop("_send", None))

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
        path = fault_actions.choose_file(self._run / "checkpoints", due.fault.kind, rng)
        if path is not None:
            self._fire(due, str(path.relative_to(self._run)))
            fault_actions.damage(path, due.fault.kind, rng)

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
