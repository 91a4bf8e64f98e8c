"""Record which modules run on one rank while its transfers are in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor, nn

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.layers.transformer.model import Transformer


@dataclass
class TransferLog:
    """Log of computations and transfers.

    events: name of each computation, in order, and descriptions of the transfers in flight.
    started: number of transfers started so far.
    pending: descriptions of the transfers in flight now.
    """

    events: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    started: int = 0
    pending: list[str] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight now."""
        return len(self.pending)

    def record(self, name: str) -> None:
        self.events.append((name, tuple(self.pending)))

    def counts(self, name: str) -> list[int]:
        """Return the number of transfers in flight at each event with this name."""
        return [len(pending) for event, pending in self.events if event == name]

    def watch(self, name: str, module: nn.Module) -> None:
        """Record the end of each forward pass of ``module``, and the start of its backward as "<name> backward"."""

        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            self.record(name)
            if output.requires_grad:
                output.register_hook(lambda _: self.record(f"{name} backward"))

        module.register_forward_hook(hook)

    def watch_attention(self, model: Transformer) -> None:
        """Watch the attention of all layers."""
        for block in model.layers.values():
            self.watch("attention", block.attention)  # type: ignore[arg-type]


@contextlib.contextmanager
def record_transfers() -> Iterator[TransferLog]:
    """Log the all-to-alls of this process. Each is in flight from its start until its first wait."""
    log = TransferLog()
    start = Channel.start_all_to_all

    def start_and_count(
        self: Channel,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        description: str,
        out: Tensor | None = None,
    ) -> PendingTensor:
        pending = start(self, rows, send, receive, description, out)
        log.started += 1
        log.pending.append(description)
        completed: list[bool] = []

        def wait() -> Tensor:
            if not completed:
                completed.append(True)
                log.pending.remove(description)
            return pending()

        return replace(pending, wait=wait)

    with mock.patch.object(Channel, "start_all_to_all", start_and_count):
        yield log
