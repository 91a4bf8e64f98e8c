"""Optimizer state that is stored in a file or in host memory, and streamed through a budget of memory at the update.

    chunk i + 1    read ─────▶
    chunk i             update ───▶
    chunk i - 1                  write ─────▶

Each sweep visits the chunks in the reverse order of the last one, so that the chunks that are still in memory are the
first. Gradients stay in memory. Masters are stored, too, if the model computes with a separate copy of the weights,
which each chunk updates at once.

The order of chunks does not depend on errors, because other ranks wait in the collectives of an optimizer: after an
error the sweep continues with undefined values, and ``finish`` raises the error on every rank before the weights are
published. The state is then partly updated; resume from a checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.collectives import channel_of, sum_values
from moe_comm.runtime.offload.files import Backing, HostMemory, LocalFile
from moe_comm.runtime.offload.store import Budget, Store
from moe_comm.topology import ParallelMesh
from moe_comm.train.offload.layout import Chunk, Part, Stored, chunk_bytes, cut, whole
from moe_comm.train.offload.resident import MASTERS, OffloadReport, Opener, Piece, ResidentState, Sweep
from moe_comm.train.offload.settings import OffloadSection
from moe_comm.train.parallel.parameters import OwnedParameter


@dataclass
class _Order:
    """The chunks of one sweep. ``kept``: number of chunks that stay in memory at its end."""

    owned: list[OwnedParameter]
    groups: list[list[OwnedParameter]] | None
    keys: list[int] = field(default_factory=list)
    kept: int = 0
    forward: bool = True


class StreamedState(ResidentState):
    """State in a file or in host memory; see the module.

    Args:
        options: section [offload].

    Raises:
        ConfigError: the budget is too small, or the tier does not exist for the device of the parameters. Raised by
            ``start`` on every rank, as well as ``StoreFull`` and ``StoreIOError``.
    """

    resident = False

    def __init__(self, options: OffloadSection, mesh: ParallelMesh) -> None:
        super().__init__()
        self._options, self._mesh = options, mesh
        # Offloaded weights are updated on the host, and so is their state.
        self._device = torch.device("cpu" if options.weights == "host" else mesh.device)
        self._orders: list[_Order] = []
        self._items: list[OwnedParameter] = []
        self._fields: list[tuple[str, ...]] = []
        self._parts: dict[str, list[tuple[int, Part]]] = {}
        self._chunks: list[Chunk] = []
        self._store: Store | None = None
        self._budget = Budget(options.budget_bytes)
        self._borrowing = threading.Lock()
        self._fetched: dict[tuple[str, str], Tensor] = {}  # by parameter and field
        self._error: BaseException | None = None
        self._update_s = 0.0
        self.report = OffloadReport(0, options.budget_bytes, 0)

    def add(
        self,
        owned: Sequence[OwnedParameter],
        names: Sequence[str],
        groups: Sequence[Sequence[OwnedParameter]] | None = None,
    ) -> Sweep:
        for item in owned:
            absent = _absent(item.value)
            self.tensors[item.name] = dict.fromkeys(names, absent)
        order = _Order(list(owned), None if groups is None else [list(group) for group in groups])
        self._orders.append(order)
        return Sweep(lambda: self._sweep(order))

    def start(self) -> None:
        with opening(self._mesh, self.close):
            self._open()
            for item, fields in zip(self._items, self._fields, strict=True):
                if MASTERS in fields and item.value.numel():
                    with self._opened(item, MASTERS, True) as stored:
                        stored.copy_(item.value.detach())
                    item.value.data = _absent(item.value)
                    item.offloaded = True

    def opener(self, name: str, field: str) -> Opener | None:
        number = next((n for n, item in enumerate(self._items) if item.name == name), None)
        if number is None or field not in self._fields[number] or not self._items[number].value.numel():
            return None
        return lambda write: self._opened(self._items[number], field, write)

    def finish(self) -> None:
        raise_on_all(self._mesh, self._first_error())
        assert self._store is not None
        traffic = self._store.take_traffic()
        self.report = OffloadReport(
            sum(chunk.nbytes for chunk in self._chunks),
            self._budget.total,
            self._budget.peak,
            traffic.read,
            traffic.written,
            self._update_s,
            traffic.waited_s,
            traffic.busy_s,
        )
        self._update_s = 0.0

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        """Cut chunks, prove the budget, and open the store."""
        options = self._options
        capacity = chunk_bytes(options.budget_bytes, options.in_flight)
        for order in self._orders:
            stored = [self._stored(item) for item in order.owned]
            first = len(self._chunks)
            if order.groups is None:
                self._chunks += cut(stored, capacity)
            else:
                by_name = {item.name: entry for item, entry in zip(order.owned, stored, strict=True)}
                self._chunks += whole([[by_name[item.name] for item in group] for group in order.groups])
            order.keys = list(range(first, len(self._chunks)))
        for key, chunk in enumerate(self._chunks):
            for part in chunk.parts:
                self._parts.setdefault(self._items[part.item].name, []).append((key, part))
        largest, total = (function([chunk.nbytes for chunk in self._chunks] or [0]) for function in (max, sum))
        working = options.in_flight + 1
        if working * largest > options.budget_bytes:
            raise ConfigError(
                f"offload.budget is {options.budget_bytes} bytes, and at least {working * largest} are needed: "
                f"{working} chunks (in_flight + 1) of {largest} bytes"
            )
        slots = options.budget_bytes // largest if largest else working
        nonempty = [order for order in self._orders if order.keys]
        for order in nonempty:
            several = len(nonempty) > 1
            order.kept = (slots - working) * len(order.keys) // len(self._chunks) if several else slots
        backing = open_backing("optimizer", options, total, self._device)
        sizes = [chunk.nbytes for chunk in self._chunks]
        self._store = Store(backing, sizes, slots, self._budget, self._device, options.in_flight, options.deadline_s)
        self.report = OffloadReport(total, self._budget.total, 0)

    def _stored(self, item: OwnedParameter) -> Stored:
        fields = (*((MASTERS,) if item.param is not None else ()), *self.tensors[item.name])
        self._items.append(item)
        self._fields.append(fields)
        return Stored(len(self._items) - 1, item.value.numel(), item.value.element_size(), fields)

    def _sweep(self, order: _Order) -> Iterator[tuple[int, list[Piece]]]:
        assert self._store is not None, "start() was not called"
        began = time.perf_counter()
        keys = order.keys if order.forward else order.keys[::-1]
        order.forward = not order.forward
        self._fetched = {}
        self._store.announce(keys)
        for number, key in enumerate(keys):
            chunk = self._chunks[key]
            memory = self._take(key)
            pieces = [self._piece(part, memory) for part in chunk.parts]
            yield chunk.group, pieces
            if self._error is None:
                for piece in pieces:
                    if piece.item.param is not None:
                        _write(piece.item, 0 if piece.part is None else piece.part.start, piece.value)
                self._store.release(key, dirty=True, keep=len(keys) - number <= order.kept)
        self._update_s += time.perf_counter() - began

    def _take(self, key: int) -> Tensor:
        """Return the bytes of a chunk; undefined values after an error."""
        assert self._store is not None
        if self._error is None:
            try:
                return self._store.take(key)
            except BaseException as error:
                self._error = error
        nbytes = self._chunks[key].nbytes
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def _piece(self, part: Part, memory: Tensor) -> Piece:
        item = self._items[part.item]
        value = item.value.detach()
        complete = part.stop - part.start == value.numel()
        shape = value.shape if complete else (part.stop - part.start,)
        fields = {name: _field(memory, part, offset, value.dtype).view(shape) for name, offset in part.offsets.items()}
        if MASTERS in fields:
            values = fields.pop(MASTERS)
        else:
            values = value if complete else value.view(-1)[part.start : part.stop]
        return Piece(item, None if complete else slice(part.start, part.stop), values, fields)

    @contextlib.contextmanager
    def _opened(self, item: OwnedParameter, field: str, write: bool) -> Iterator[Tensor]:
        """Yield a tensor of a parameter: its values, or with ``write`` one whose values are stored afterwards."""
        assert self._store is not None
        with self._borrowing:
            if write:
                self._fetched = {}
            elif (item.name, field) not in self._fetched:
                self._fetch(item)
            tensor = self._empty(item) if write else self._fetched[item.name, field]
        flat = tensor.view(-1)
        yield tensor
        if write:
            with self._borrowing:
                for key, part in self._parts[item.name]:
                    with self._store.borrowed(key, write=True) as memory:
                        stored = _field(memory, part, part.offsets[field], tensor.dtype)
                        stored.copy_(flat[part.start : part.stop])
            if field == MASTERS:
                _write(item, 0, tensor)

    def _empty(self, item: OwnedParameter) -> Tensor:
        return torch.empty(item.value.shape, dtype=item.value.dtype, device=item.value.device)

    def _fetch(self, item: OwnedParameter) -> None:
        """Read all fields of a parameter at once: a save, which opens the others next, reads each chunk once."""
        assert self._store is not None
        self._fetched = {}
        fields = self._fields[next(number for number, one in enumerate(self._items) if one is item)]
        fetched = {name: self._empty(item) for name in fields}
        for key, part in self._parts[item.name]:
            with self._store.borrowed(key, write=False) as memory:
                for name in fields:
                    stored = _field(memory, part, part.offsets[name], item.value.dtype)
                    fetched[name].view(-1)[part.start : part.stop].copy_(stored)
        self._fetched = {(item.name, name): tensor for name, tensor in fetched.items()}  # not after an error

    def _first_error(self) -> BaseException | str:
        assert self._store is not None
        if self._error is None:
            try:
                self._store.check()
            except BaseException as error:
                self._error = error
        return self._error if self._error is not None else ""


def open_backing(
    key: Literal["optimizer", "activations"], options: OffloadSection, nbytes: int, device: torch.device
) -> Backing:
    """Open the tier of ``offload.<key>`` with space for ``nbytes`` bytes.

    Raises:
        ConfigError: the tier does not exist for the device.
        StoreFull, StoreIOError: there is not enough space, or the file cannot be created.
    """
    if getattr(options, key) == "file":
        return LocalFile(Path(options.path).expanduser(), nbytes, options.checksums)
    if device.type == "cpu":
        raise ConfigError(
            f"offload.{key} = 'host' moves data from a GPU to the host's memory, but these ranks compute on the CPU: "
            "use 'file'"
        )
    return HostMemory(nbytes)


@contextlib.contextmanager
def opening(mesh: ParallelMesh, close: Callable[[], None]) -> Iterator[None]:
    """Raise a library error of the block on every rank, after ``close``: the process may go on, with another folder or
    budget. Collective."""
    outcome: BaseException | str = ""
    try:
        yield
    except MoeCommError as error:
        outcome = error
    try:
        raise_on_all(mesh, outcome)
    except BaseException:
        close()
        raise


def raise_on_all(mesh: ParallelMesh, outcome: BaseException | str) -> None:
    """Raise an error of any rank on every rank; ``outcome`` is "" on a rank without one. Collective."""
    group = mesh.world_group
    if group is None:
        if isinstance(outcome, BaseException):
            raise outcome
        return
    failed = torch.tensor([float(outcome != "")], dtype=torch.float64, device="cpu")
    if sum_values(failed, group).item():
        agree(outcome, lambda text: gather_texts(channel_of(group), "the transfer of offloaded data", text))


def _absent(like: Tensor) -> Tensor:
    """Return a tensor of NaN without memory, in the shape of ``like``; torch refuses to write to it."""
    nan = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    return nan.expand(like.shape)


def _field(memory: Tensor, part: Part, offset: int, dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + (part.stop - part.start) * dtype.itemsize].view(dtype)


def _write(item: OwnedParameter, start: int, values: Tensor) -> None:
    """Copy masters from element ``start`` on to the weights that the model computes with."""
    weights = item.weights
    assert weights is not None
    dim = item.shard.dim if item.shard is not None else 0
    values = values.detach().reshape(-1)
    # Rows of the parameter that are contiguous in the shard: a shard of columns has gaps.
    if not weights.dim():
        weights.copy_(values[0])
        return
    rows_RL = weights.flatten(dim)
    rows_RL = rows_RL.flatten(0, dim - 1) if dim else rows_RL.unsqueeze(0)
    length = rows_RL.shape[1]
    while values.numel():
        row, column = divmod(start, length)
        if not column and values.numel() >= length:
            count = values.numel() // length
            size = count * length
            rows_RL[row : row + count].copy_(values[:size].view(count, length))
        else:
            size = min(length - column, values.numel())
            rows_RL[row, column : column + size].copy_(values[:size])
        start, values = start + size, values[size:]
