"""What ``events`` has in place of the native span recorder where the core is not built: it records nothing."""

from __future__ import annotations

from typing import Any, Self


class Open:
    """A span that leaves no record; ``moe_comm._C.Open`` has the methods' meaning."""

    index = -1
    begin_ns = 0
    nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def put_rows(self, rows: Any, nbytes: int, /) -> None:
        pass

    def put(self, **told: Any) -> None:
        pass

    def put_device(self, begin_ns: int, end_ns: int, /) -> None:
        pass


_OPEN = Open()


class SpanRecorder:
    """As ``moe_comm._C.SpanRecorder``, but ``enabled`` stays False."""

    step = 0
    micro = 0
    device: Any = None
    _names: dict[str, int]

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made._names = {}
        return made

    @property
    def enabled(self) -> bool:
        return False

    @enabled.setter
    def enabled(self, wanted: bool) -> None:
        pass

    def span(self, kind: int, name: str, /, **told: Any) -> Open:
        return _OPEN

    def _bind(self, buffer: memoryview, records: int, main_thread: int, /) -> None:
        pass

    def _begin_step(self, step: int, /) -> None:
        self.step, self.micro = step, 0

    def _count_anew(self) -> None:
        pass

    def _take(self) -> tuple[dict[int, int], dict[int, int], dict[int, int], dict[int, int], int]:
        return {}, {}, {}, {}, 0
