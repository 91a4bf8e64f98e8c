"""Replacement of the native span recorder where the native core is not built. It records nothing."""

from __future__ import annotations

from typing import Any, Self


class NullSpan:
    """A span without a record; see ``moe_comm._C.Open`` for the methods."""

    index = -1
    begin_ns = 0
    nbytes = 0

    def __enter__(self) -> Self:
        return self

    def _ignore(self, *args: Any, **values: Any) -> None:
        pass

    __exit__ = put_rows = put = put_device = _ignore


_SPAN = NullSpan()


class NullSpanRecorder:
    """Like ``moe_comm._C.SpanRecorder``, but ``enabled`` is always False."""

    step = 0
    micro = 0
    device: Any = None
    _names: dict[str, int]

    def __new__(cls, *args: Any) -> Self:
        recorder = super().__new__(cls)
        recorder._names = {}
        return recorder

    enabled = property(lambda self: False, lambda self, value: None)

    def span(self, kind: int, name: str, /, **values: Any) -> NullSpan:
        return _SPAN

    def _ignore(self, *args: Any) -> None:
        pass

    _bind = _reset_calls = _ignore

    def _begin_step(self, step: int, /) -> None:
        self.step, self.micro = step, 0

    def _take(self) -> tuple[dict[int, int], dict[int, int], dict[int, int], dict[int, int], int]:
        return {}, {}, {}, {}, 0
