"""Record spans (named time intervals) of transfers between pipeline stages.

    rank    [forward 0][~~~~ receive activations ~~~~][forward 1][~ receive gradients ~][backward 0][~ between passes ~]
                        ▲ send activations: no duration

Between two passes a schedule only starts transfers and waits for them. The time before a pass is therefore named after
the transfer that the pass receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS, Open

ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Transfers:
    """Spans of all pipeline stages of this rank."""

    def __init__(self) -> None:
        self._gap: Open | None = None  # the open span between two passes
        # Global rank to receive from, by (what, edge, micro-batch).
        self._expected: dict[tuple[str, str, int], int] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one run of a schedule."""
        self._expected.clear()
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def working(self, name: str, layer: str, micro: int, what: str = "", between: str = "") -> Iterator[None]:
        """Context of a pass of stage ``layer`` on a micro-batch, which receives ``what`` over the edge ``between``."""
        EVENTS.micro = micro
        self._name_gap(what, between, micro)
        in_step = self._gap is not None
        self._close()
        try:
            with EVENTS.span(Kind.COMPUTE, name, layer=layer):
                yield
        finally:
            if in_step:
                self._open()

    def received(self, what: str, between: str, micro: int) -> None:
        """End the span of the wait for ``what``, which was received before its pass, and begin the next one."""
        EVENTS.micro = micro
        if self._name_gap(what, between, micro):
            self._close()
            self._open()

    def receives(self, what: str, between: str, micro: int, ops: Sequence[Any]) -> None:
        """Record torch's receive operations of ``what``."""
        for op in ops:
            self._expected[what, between, micro] = op.peer
            if self._gap is not None and self._gap.peer < 0:
                EVENTS.micro = micro
                self._gap.put(name=f"receive {what}", layer=between, peer=op.peer)

    def sends(self, what: str, between: str, micro: int, ops: Sequence[Any]) -> None:
        """Record torch's send operations of ``what``."""
        previous, EVENTS.micro = EVENTS.micro, micro
        for op in ops:
            self.sent(what, between, op.peer, op.tensor.nbytes)
        EVENTS.micro = previous

    def sent(self, what: str, between: str, peer: int, nbytes: int) -> None:
        """Record a send of ``what`` to the global rank ``peer``."""
        with EVENTS.span(Kind.TRANSFER, f"send {what}", layer=between, peer=peer, nbytes=nbytes):
            pass

    def _name_gap(self, what: str, between: str, micro: int) -> bool:
        """Name the open span after an expected receive of ``what``, and return whether there is one."""
        peer = self._expected.pop((what, between, micro), -1)
        if peer < 0 or self._gap is None:
            return False
        self._gap.put(name=f"receive {what}", layer=between, peer=peer)
        return True

    def _open(self) -> None:
        self._gap = EVENTS.span(Kind.TRANSFER, "between passes").__enter__()
        receive = next(iter(self._expected.items()), None)
        if receive is not None:  # the oldest pending receive is most likely the next one to wait for
            (what, between, _), peer = receive
            self._gap.put(name=f"receive {what}", layer=between, peer=peer)

    def _close(self) -> None:
        gap, self._gap = self._gap, None
        if gap is not None:
            gap.__exit__()


def between(stage: int) -> str:
    """Return the name of the edge between stage ``stage`` and the next one in spans."""
    return f"stages {stage}-{stage + 1}"
