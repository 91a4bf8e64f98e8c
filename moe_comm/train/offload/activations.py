"""Activations that are stored in a file or in host memory between the forward and the backward pass.

    forward    layer 0 ─▶ layer 1 ─▶ layer 2      tensors that autograd saves are copied to pages of the budget
                  │put       │put       │put
                  ▼          ▼          ▼
               the last pages stay in memory; when most of the budget is used, the first are written to the file
                  │take      │take      │take
                  ▼          ▼          ▼
    backward   layer 0 ◀─ layer 1 ◀─ layer 2      pages are read ahead, in the reverse order

A page holds one tensor or a part of one. The tensors of the running layer are not in the budget.

A value that recompute "selective" would compute again is stored instead if that costs less: transfers that overlap with
computation cost nothing, others their duration. The measured rate of the store and the measured duration of each
computation decide for the next step. Values that take longest per byte are stored first.

After an error a step continues with undefined values, because other ranks wait in its collectives. ``finish`` raises
the error on every rank before gradients are reduced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.recompute import Fn
from moe_comm.layers.transformer.block import TransformerBlock
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.offload.files import BLOCK
from moe_comm.runtime.offload.store import Budget, Store, Traffic
from moe_comm.topology import ParallelMesh
from moe_comm.train.offload.layout import LEAST_CHUNK
from moe_comm.train.offload.resident import OffloadReport
from moe_comm.train.offload.settings import OffloadSection
from moe_comm.train.offload.streamed import open_backing, opening, raise_on_all

LEAST_TENSOR = 16 << 10
"""Bytes of the smallest tensor that is stored."""
PAGES, MOST_PAGE = 64, 4 << 20
"""Number of pages that fit in the budget, unless they would be larger or smaller than ``MOST_PAGE``, ``LEAST_CHUNK``.
"""


def page_bytes(budget: int) -> int:
    """Return the size of pages for a budget."""
    return max(LEAST_CHUNK, min(MOST_PAGE, budget // PAGES // BLOCK * BLOCK))


@dataclass(eq=False)
class _Stored:
    """A stored tensor. ``freed`` gets its pages when no graph refers to it anymore."""

    pages: list[int]
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    freed: deque[list[int]]

    def __del__(self) -> None:
        self.freed.append(self.pages)  # may run inside of any other operation of the store


class ActivationOffload:
    """Stores the activations of the layers of ``stages``. Construct and ``start`` it on every rank.

    Args:
        options: section [offload], whose ``activations`` is not "none".
    """

    def __init__(self, options: OffloadSection, stages: Sequence[nn.Module], mesh: ParallelMesh) -> None:
        self._options, self._mesh, self._device = options, mesh, torch.device(mesh.device)
        self._blocks = [
            module for stage in stages for module in stage.modules() if isinstance(module, TransformerBlock)
        ]
        self._budget = Budget(options.activation_bytes)
        self._page = page_bytes(self._budget.total)
        self._store: Store | None = None
        self._free: list[int] = []
        self._freed: deque[list[int]] = deque()
        self._groups: dict[int, list[int]] = {}  # pages of a micro-batch, in the order of the forward pass
        self._place: dict[int, tuple[int, int]] = {}  # micro-batch, and position in the group, of a page
        self._costs: dict[tuple[str, int], list[float]] = {}  # seconds and bytes of recomputed values
        self._chosen: set[tuple[str, int]] = set()
        self._error: BaseException | None = None
        self._began: float | None = None
        self._held = self._stored = 0
        self.report = OffloadReport(0, self._budget.total, 0)

    def start(self) -> None:
        """Open the store. Collective.

        Raises:
            ConfigError: the budget is too small, or the tier does not exist for the device. On every rank.
            StoreFull, StoreIOError: the file cannot be created. On every rank.
        """
        with opening(self._mesh, self.close):
            self._open()
        for block in self._blocks:
            block.saved = self

    def keep(self, x: Tensor) -> Fn | None:
        """Copy ``x`` to pages, and return a function that returns it; None: leave it in memory."""
        nbytes = x.numel() * x.element_size()
        dense = _is_dense(x)
        if self._error is not None or nbytes < LEAST_TENSOR or dense is None or x.device.type != self._device.type:
            return None
        assert self._store is not None
        if self._began is None:
            self._began = time.perf_counter()
        x = x.detach()
        values = x.as_strided((x.numel(),), (1,), x.storage_offset()) if dense else x.reshape(-1)
        stored = _Stored([], x.size(), x.stride(), x.dtype, self._freed)
        try:
            self._reuse()
            for memory in values.view(torch.uint8).split(self._page):
                key = self._new_page()
                stored.pages.append(key)
                self._held += self._page
                self._store.put(key, memory.numel()).copy_(memory)
                self._store.release(key, dirty=True, keep=True)
        except MoeCommError as error:
            self._error = error
            return None
        self._stored = max(self._stored, self._held)
        return partial(self._fetch, stored)

    def prefers(self, layer: str, number: int, seconds: float, nbytes: int) -> bool:
        """See ``SavedActivations``."""
        cost = self._costs.setdefault((layer, number), [0.0, 0.0])
        cost[0] += seconds
        cost[1] += nbytes
        return (layer, number) in self._chosen and nbytes >= LEAST_TENSOR

    def finish(self) -> None:
        """End the passes of a step. Collective.

        Raises:
            StoreFull, StoreIOError, CorruptFile: an activation was not stored or read. On every rank.
        """
        self._reuse()
        raise_on_all(self._mesh, self._first_error())
        assert self._store is not None
        traffic, now = self._store.take_traffic(), time.perf_counter()
        seconds = now - (now if self._began is None else self._began)
        self._choose(traffic, seconds - traffic.waited_s)
        self.report = OffloadReport(
            self._stored,
            self._budget.total,
            self._budget.peak,
            traffic.read,
            traffic.written,
            seconds,
            traffic.waited_s,
            traffic.busy_s,
        )
        self._began, self._stored = None, self._held

    def close(self) -> None:
        """Release the file, memory and threads."""
        for block in self._blocks:
            block.saved = None
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        options, slots = self._options, self._budget.total // self._page
        if slots < options.in_flight + 1:
            raise ConfigError(
                f"offload.activation_budget is {self._budget.total} bytes, and at least "
                f"{(options.in_flight + 1) * self._page} are needed: {options.in_flight + 1} pages (in_flight + 1) of "
                f"{self._page} bytes"
            )
        backing = open_backing("activations", options, slots * self._page, self._device)
        sizes, threads = [self._page] * slots, options.in_flight
        self._store = Store(
            backing, sizes, slots, self._budget, self._device, threads, options.deadline_s, self._next_use
        )
        self._free = list(range(slots))

    def _new_page(self) -> int:
        assert self._store is not None
        if not self._free:
            self._free += self._store.extend(self._store.slots)
        key = self._free.pop()
        group = self._groups.setdefault(EVENTS.micro, [])
        self._place[key] = EVENTS.micro, len(group)
        group.append(key)
        return key

    def _fetch(self, stored: _Stored) -> Tensor:
        """Return a stored tensor; undefined values after an error."""
        x = torch.empty_strided(stored.size, stored.stride, dtype=stored.dtype, device=self._device)
        dense = _is_dense(x)
        values = (
            x.as_strided((x.numel(),), (1,))
            if dense
            else torch.empty_like(x, memory_format=torch.contiguous_format).view(-1)
        )
        if self._error is None:
            try:
                self._read(stored.pages, values.view(torch.uint8))
            except MoeCommError as error:
                self._error = error
        if self._error is not None:
            values.zero_()
        return x if dense else x.copy_(values.view(x.size()))

    def _read(self, pages: list[int], memory: Tensor) -> None:
        assert self._store is not None
        self._reuse()
        self._store.announce([*reversed(pages), *islice(self._following(pages[0]), self._store.slots)])
        parts = memory.split(self._page)
        for key, part in zip(reversed(pages), reversed(parts), strict=True):
            part.copy_(self._store.take(key)[: part.numel()])
            self._store.release(key, dirty=False, keep=True)

    def _following(self, key: int) -> Iterator[int]:
        """Iterate over the pages that backward most likely reads after ``key``."""
        micro, position = self._place[key]
        groups = list(self._groups)
        for number in groups[groups.index(micro) :]:
            group = self._groups[number]
            for at in range(position if number == micro else len(group), 0, -1):
                if self._place.get(group[at - 1]) == (number, at - 1):
                    yield group[at - 1]

    def _next_use(self, key: int) -> float:
        """Return a number that is larger for pages that backward reads later."""
        micro, position = self._place.get(key, (0, 0))
        return (micro << 32) - position

    def _reuse(self) -> None:
        """Make the pages of freed tensors available."""
        while self._freed:
            pages = self._freed.popleft()
            self._held -= len(pages) * self._page
            if self._store is not None:
                self._store.discard(pages)
            for key in pages:
                self._place.pop(key, None)
            self._free += pages
        if not self._place:
            self._groups.clear()

    def _choose(self, traffic: Traffic, compute_s: float) -> None:
        """Choose the recomputed values to store in the next step."""
        costs, self._costs = self._costs, {}
        moved = traffic.read + traffic.written
        if not moved or not traffic.busy_s:
            return  # the rate is not known
        rate = moved / traffic.busy_s
        hidden = rate * compute_s - moved + sum(2 * costs[key][1] for key in self._chosen & costs.keys())
        self._chosen = set()
        for key, (seconds, nbytes) in sorted(costs.items(), key=lambda item: -item[1][0] / max(item[1][1], 1)):
            if (2 * nbytes - max(hidden, 0.0)) / rate < seconds:
                self._chosen.add(key)
                hidden -= 2 * nbytes

    def _first_error(self) -> BaseException | str:
        if self._error is None and self._store is not None:
            try:
                self._store.check()
            except BaseException as error:
                self._error = error
        return self._error if self._error is not None else ""


def _is_dense(x: Tensor) -> bool | None:
    """Return whether the elements of ``x`` fill a range of memory; None if ``x`` cannot be stored."""
    if type(x) is not Tensor or x.layout != torch.strided or not x.is_floating_point():
        return None
    dense, extent = True, 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return None  # elements share memory
        dense &= stride == extent
        extent = stride * size
    return dense
