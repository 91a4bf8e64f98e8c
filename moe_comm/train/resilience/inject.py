"""Carries out faults on purpose in training; see ``moe_comm.observe.faults``.

    start ─▶ batch ─▶ forward: │rows arrive│ at=forward │experts│ ─▶ backward: at=backward ─▶ after_backward ─▶ at=end

What is due in a step is known before it; then hooks are put where it is to happen, and taken away after the step. So
without faults there are no hooks, and with faults there are none in the other steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.moe.load import moe_layers
from moe_comm.observe.faults import DAMAGE, Due, Injection, Plan, read_injections, write_injection
from moe_comm.observe.records import INJECTED, LineWriter
from moe_comm.observe.survival import PROGRESS, next_attempt
from moe_comm.train.checkpoint import files
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import fault_actions
from moe_comm.train.resilience.attempts import folder_before

ON_ARRIVAL = ("kill", "stop", "segv", "exit", "hold_gil", "slow_cpu", "slow_sleep", "full_shm")
"""What may happen at any place of a step."""


class FaultOnPurpose(RuntimeError):
    """What the ``raise_`` faults raise. Not one of this library's errors: like a bug in somebody's code."""


class Finishes(Protocol):
    """What saves checkpoints."""

    def finish(self) -> None: ...


class Injector(StepHook):
    """Every rank of a run makes one alike. Collective.

    Args:
        stages: this rank's parts of the model. corpus: where ``raise_thread`` strikes. saver: of the checkpoints.
        run: the run's folder.

    Raises:
        ConfigError: on every rank: a fault of the plan is none, or cannot be had here.
    """

    def __init__(
        self, config: TrainConfig, stages: Sequence[nn.Module], corpus: Any, saver: Finishes, ranks: Ranks, run: Path
    ) -> None:
        self._path = run / INJECTED
        if ranks.is_first:
            self._carry_over(config, run)
        # Others read the file only after they have got this.
        self._attempt = int(ranks.text_from_first(str(next_attempt(run)) if ranks.is_first else ""))
        self._plan = Plan.of(config.faults.plan, config.faults.seed, ranks.rank, ranks.world, self._attempt)
        self._seed, self._ranks, self._run, self._saver = config.faults.seed, ranks, run, saver
        self._stages = stages
        self._layers = [layer for stage in stages for _, layer in moe_layers(stage)]
        kinds = {fault.kind for fault in self._plan.faults}
        if "flip_bit" in kinds and (config.parallel.overlap_chunks or config.parallel.interleave):
            raise ConfigError(
                "flip_bit strikes rows that travel at once: set parallel.overlap_chunks=0, interleave=false"
            )
        if "slow_link" in kinds:
            ranks.while_some(fault_actions.check_link)
        before = read_injections(self._path)
        self._plan.fired = {one.key for one in before}
        # A rank that died while its link was slow left it so.
        links = [one.what for one in before if (one.kind, one.rank) == ("slow_link", ranks.rank) and one.what]
        if "slow_link" in kinds and links:
            fault_actions.shape_link(links[0])
        self._pending: list[Due] = []
        self._slow: dict[Due, int] = {}
        self._links: list[tuple[int, Callable[[], None]]] = []
        self._undo: list[Callable[[], None]] = []
        self._step = 0
        self._write_block = files.write_block
        self._progress = LineWriter(run / PROGRESS) if ranks.is_first else None
        if "raise_thread" in kinds:
            self._wrap(corpus)
        ranks.barrier()

    # --- StepHook ---

    def before_step(self, step: int) -> None:
        self._step = step
        self._restore_links(step)
        self._slow = {due: at for due, at in self._slow.items() if step < due.step + due.fault.steps}
        # What found no occasion in the step that it was planned for is still to come.
        self._pending += [due for due in self._plan.due(step, time.monotonic()) if due not in self._pending]
        for due in [due for due in self._pending if due.fault.kind in DAMAGE]:
            self._damage(due)
        for due in [due for due in self._pending if due.fault.kind == "slow_link"]:
            self._fire(due, fault_actions.link_shape())
            self._links.append((step + due.fault.steps, fault_actions.slow_link(due.fault.mbit)))
        if any(due.fault.kind == "full_disk" for due in self._pending):
            self._fill_disk()
        self._here("start")
        for due in (*self._pending, *self._slow):
            if due.fault.kind in (*ON_ARRIVAL, "raise_forward", "raise_backward", "flip_bit") and self._layers:
                self._hook(due)

    def after_backward(self, step: int, loss: float) -> float:
        self._take_away()
        # A rank without experts, or whose experts had no rows: at the latest here.
        for place in ("forward", "backward"):
            self._here(place)
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
        self._here("end")
        if self._progress is not None:
            self._progress.write({"step": report.step, "time_s": time.time(), "attempt": self._attempt})

    def close(self) -> None:
        self._take_away()
        self._restore_links(None)
        files.write_block = self._write_block
        if self._progress is not None:
            self._progress.close()

    # --- what happens ---

    def _fire(self, due: Due, what: str = "", step: int = 0) -> None:
        """Write down that ``due`` happens now. step: 0 is the one in progress."""
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

    def _here(self, place: str) -> None:
        """What is due at this place of the step."""
        for due in (*self._pending, *self._slow):
            if due.fault.kind in ON_ARRIVAL and due.fault.at == place:
                self._strike(due)

    def _strike(self, due: Due) -> None:
        fault = due.fault
        if fault.kind in ("slow_cpu", "slow_sleep"):
            if self._slow.get(due, 0) == self._step:
                return  # once a step
            self._slow[due] = self._step
        self._fire(due)
        fault_actions.strike(fault)

    def _raise(self, due: Due) -> None:
        self._fire(due)
        raise FaultOnPurpose(f"{due.fault.kind} on purpose, in step {self._step}")

    def _hook(self, due: Due) -> None:
        """Have ``due`` happen at its place in the step's forward or backward pass."""
        fault = due.fault
        layer = self._layers[fault.layer % len(self._layers)]
        if fault.kind == "flip_bit":
            self._hook_dispatch(due, layer.dispatcher)
            return
        raises = fault.kind.startswith("raise")

        def happen() -> None:
            if due in self._pending or due in self._slow:
                self._raise(due) if raises else self._strike(due)

        if fault.kind == "raise_forward" or (not raises and fault.at == "forward"):
            # Experts are always called as a module, also where the layer is not.
            handle = layer.experts.register_forward_pre_hook(lambda module, args: happen())
            self._undo.append(handle.remove)
        elif raises or fault.at == "backward":

            def on_output(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda grad: happen())

            self._undo.append(layer.experts.register_forward_hook(on_output).remove)

    def _hook_dispatch(self, due: Due, dispatcher: Any) -> None:
        """Flip a bit of the rows that the next dispatch brings, before anybody looks at them."""
        send = dispatcher._send

        def flipping(*args: Any) -> Any:
            found = send(*args)
            rows_RD = found[0]
            if due in self._pending and rows_RD.numel() and torch.is_floating_point(rows_RD):
                data = rows_RD.detach().view(torch.uint8)
                chance = random.Random(f"{self._seed} {due.key}")
                row, byte, bit = chance.randrange(data.shape[0]), chance.randrange(data.shape[1]), chance.randrange(8)
                self._fire(due, f"row {row}, byte {byte}, bit {bit}")
                data[row, byte] ^= 1 << bit
            return found

        dispatcher._send = flipping
        self._undo.append(lambda: vars(dispatcher).pop("_send", None))

    def _fill_disk(self) -> None:
        """Let the next checkpoint's bytes find no space, on this rank."""
        write_block = self._write_block

        def full(file: Any, block: memoryview) -> None:
            for due in [due for due in self._pending if due.fault.kind == "full_disk"]:
                self._fire(due)
                files.write_block = write_block
                raise OSError(28, "No space left on device (on purpose)", getattr(file, "name", None))
            write_block(file, block)

        if files.write_block is self._write_block:
            files.write_block = full

    def _damage(self, due: Due) -> None:
        """Harm the newest checkpoint; where there is none yet, later."""
        self._saver.finish()
        chance = random.Random(f"{self._seed} {due.key}")
        victim = fault_actions.choose_file(self._run / "checkpoints", due.fault.kind, chance)
        if victim is not None:
            self._fire(due, str(victim.relative_to(self._run)))
            fault_actions.damage(victim, due.fault.kind, chance)

    def _wrap(self, corpus: Any) -> None:
        """Let the thread that reads batches raise."""
        batch_of = corpus.batch_of

        def raising(step: int) -> Any:  # from 0, where ours are from 1
            for due in self._plan.due(step + 1, time.monotonic(), thread=True):
                self._fire(due, step=step + 1)
                raise FaultOnPurpose(f"raise_thread on purpose, in the data of step {step + 1}")
            return batch_of(step)

        corpus.batch_of = raising

    def _gradients(self) -> list[Tensor]:
        found = (param.grad for stage in self._stages for param in stage.parameters())
        local = (grad.to_local() if hasattr(grad, "to_local") else grad for grad in found if grad is not None)
        return [grad for grad in local if grad.numel() and grad.is_contiguous()]

    def _take_away(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _restore_links(self, step: int | None) -> None:
        for link in [link for link in self._links if step is None or link[0] <= step]:
            self._links.remove(link)
            link[1]()

    def _carry_over(self, config: TrainConfig, run: Path) -> None:
        """A run that was started again before it had saved anything has a new folder: what happened has happened."""
        if config.checkpoint.resume != "auto" or self._path.exists():
            return
        earlier = folder_before(run, config.run.name)
        if earlier is not None and (earlier / INJECTED).exists():
            self._path.write_bytes((earlier / INJECTED).read_bytes())
