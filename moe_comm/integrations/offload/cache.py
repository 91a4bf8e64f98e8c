"""The experts of all layers of a model in a store of chunks, and a budget of memory for some of them.

    layer l    rows of each expert are known ─▶ compute those in memory, read the others
                                             └▶ predict the experts of layer l + 1, read those that are likely

An expert in memory is replaced when another one is used earlier. The time of the next use, in layers, is estimated:

    of this call        0 .. 1, in the order of computation
    predicted           1 + misses of q
    others              layers until that layer runs again + misses of p              misses(p) = (1 - p) / p · layers

p is the share of the calls of its layer in which an expert was used; q is the share of those calls in which a certain
expert of the layer before was used, the highest for those of this call. Both weigh recent calls more. After the last
layer comes the first one of the next token. If all experts are used (p = 1), those of the layer that has just run are
replaced first; the least recently used ones are those that are used next.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.runtime.offload.files import BLOCK, Backing, HostMemory, LocalFile
from moe_comm.runtime.offload.store import Budget, Store, Traffic
from moe_comm.runtime.untrusted import byte_count

DECAY, PAIR_DECAY = 0.95, 0.99
"""Weight of the past in p and q, for each call."""
LIKELY = 0.5
"""Minimum q of an expert that is read ahead: a wrong one delays one that is needed by as much as a right one saves."""
ALIGNMENT = 64
"""Of the tensors in a chunk, in bytes."""
LEAST = 1e-3
"""Minimum share, so that its inverse is finite."""


@dataclass(frozen=True)
class ExpertOffload:
    """Where the experts of a model are, see ``offload_experts``.

    Attributes:
        budget: bytes of memory on the device for experts, for each rank: a number, or a text such as "4GiB". At least
            ``in_flight`` + 1 experts.
        path: an existing folder on a local disk for a file of this rank, which has no name and ends with the process.
            "": the host's memory, for experts on a GPU.
        in_flight: experts that are read at the same time.
        deadline_s: seconds to wait for one expert.
        checksums: verify the CRC-32 of each expert that is read from the file.
        predict: read the experts of the next layer ahead that are likely used.
    """

    budget: int | str
    path: str = ""
    in_flight: int = 2
    deadline_s: float = 60.0
    checksums: bool = True
    predict: bool = True

    def budget_bytes(self) -> int:
        """Return ``budget`` in bytes. Raises ``ConfigError`` if a setting is invalid."""
        try:
            budget = byte_count(self.budget)
        except ValueError as error:
            raise ConfigError(f"offload: {error}") from None
        if self.in_flight < 1 or self.deadline_s <= 0:
            raise ConfigError(f"offload: in_flight must be at least 1 and deadline_s positive; got {self}")
        return budget


@dataclass(frozen=True)
class LayerShape:
    """The experts of a layer on this rank: their number, and the shape of one by the name of its parameter."""

    experts: int
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    def offsets(self) -> tuple[dict[str, int], int]:
        """Return the byte at which each tensor begins in the chunk of an expert, and the bytes of the chunk."""
        offsets, end = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = end
            end += -(-prod(shape) * self.dtypes[name].itemsize // ALIGNMENT) * ALIGNMENT
        return offsets, -(-end // BLOCK) * BLOCK


@dataclass
class CacheReport:
    """Statistics of a rank's experts since they were offloaded.

    Attributes:
        stored: bytes of all experts of this rank.
        budget, peak: bytes of memory that they may use, and the most used so far.
        used, hits: experts that calls used, and how many of them were in memory or being read when the call's routing
            was known.
        ahead: experts that were read ahead or were to be.
        read: bytes read.
        waited_s: seconds in which a call waited for an expert.
        busy_s: seconds in which experts were read or written.
    """

    stored: int
    budget: int
    peak: int = 0
    used: int = 0
    hits: int = 0
    ahead: int = 0
    read: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0


class ExpertCache:
    """The experts of a model's layers on this rank.

    Attributes:
        device: of the memory in which experts are computed.
        close: releases the file, memory and threads; called when the model is freed.

    Raises:
        ConfigError: a setting is invalid, or the budget is too small.
        StoreFull, StoreIOError: the file cannot be created.
    """

    def __init__(self, layers: Sequence[LayerShape], options: ExpertOffload, device: torch.device) -> None:
        budget = options.budget_bytes()
        self._layers, self._options, self.device = layers, options, device
        self._first = [0, *accumulate(layer.experts for layer in layers)]
        self._offsets = [layer.offsets() for layer in layers]
        sizes = [nbytes for layer, (_, nbytes) in zip(layers, self._offsets, strict=True) for _ in range(layer.experts)]
        largest = max(sizes, default=0)
        working = options.in_flight + 1
        if working * largest > budget:
            raise ConfigError(
                f"offload: the budget is {budget} bytes, and at least {working * largest} are needed: {working} "
                f"experts (in_flight + 1) of {largest} bytes"
            )
        backing: Backing
        if options.path:
            backing = LocalFile(Path(options.path).expanduser(), sum(sizes), options.checksums)
        elif device.type == "cpu":
            raise ConfigError(
                "offload: experts on a GPU can be in the host's memory, but these are on the CPU: pass path, a folder "
                "on a local disk"
            )
        else:
            backing = HostMemory(sum(sizes))
        self._budget, self._lock = Budget(budget), threading.RLock()
        slots = min(len(sizes), budget // largest) if largest else working
        arguments = sizes, slots, self._budget, device, options.in_flight, options.deadline_s
        next_use = weakref.WeakMethod(self._next_use)  # the store's threads must not keep the cache alive
        self._store = Store(backing, *arguments, next_use=lambda key: method(key) if (method := next_use()) else 0.0)
        self.close = weakref.finalize(self, self._store.close)
        self._layer_of = [number for number, layer in enumerate(layers) for _ in range(layer.experts)]
        self._misses = [float(len(layers))] * len(sizes)  # of p, by key
        following = (*layers[1:], *layers[:1])
        with torch.inference_mode(False):  # later calls, which change them, may be outside of that mode
            self._shares = [torch.full((layer.experts,), 0.5, dtype=torch.float32, device="cpu") for layer in layers]
            # Of pairs of an expert and one of the next layer, how often they were used together, and the former at all.
            self._pairs = [
                torch.zeros(one.experts, other.experts, dtype=torch.float32, device="cpu")
                for one, other in zip(layers, following, strict=True)
            ]
            self._calls = [torch.zeros(layer.experts, dtype=torch.float32, device="cpu") for layer in layers]
        self._last: tuple[int, Tensor] | None = None
        self._current = 0
        self._soon: dict[int, float] = {}  # time of the next use of experts of this call, and of predicted ones
        self.report = CacheReport(sum(sizes), budget)

    def visit(self, layer: int, rows_per_expert: Sequence[int]) -> list[int]:
        """Note the rows of a call, and start to read its experts. Return the experts with rows, in the best order."""
        with self._lock:
            first = self._first[layer]
            used = [expert for expert, rows in enumerate(rows_per_expert) if rows]
            order = sorted(used, key=lambda expert: not self._store.ready(first + expert))
            self.report.used += len(used)
            self.report.hits += sum(self._store.ready(first + expert) for expert in used)
            self._learn(layer, used)
            self._current = layer
            self._soon = {first + expert: number / len(order) for number, expert in enumerate(order)}
            ahead = self._predicted(layer, used) if self._options.predict else {}
            self.report.ahead += sum(not self._store.ready(key) for key in ahead)
            self._soon |= {key: time for key, time in ahead.items() if key not in self._soon}
            self._store.announce([*(first + expert for expert in order), *ahead])
            return order

    @contextmanager
    def lease(self, layer: int, expert: int) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of an expert by name, [1, ...], which are valid in the context.

        Raises:
            StoreIOError, CorruptFile: it could not be read, or not within the deadline.
        """
        with self._lock:
            key = self._first[layer] + expert
            memory = self._store.take(key)
            try:
                yield self._tensors(layer, memory)
            finally:
                self._soon.pop(key, None)
                self._store.release(key, dirty=False, keep=True)

    @contextmanager
    def filling(self, layer: int, expert: int) -> Iterator[dict[str, Tensor]]:
        """Yield tensors as of ``lease``, to which the caller writes the values of the expert.

        Raises:
            StoreIOError: an earlier expert could not be written.
        """
        with self._lock, self._store.borrowed(self._first[layer] + expert, write=True) as memory:
            yield self._tensors(layer, memory)

    def statistics(self) -> CacheReport:
        """Return the statistics so far."""
        with self._lock:
            traffic: Traffic = self._store.take_traffic()
            report = self.report
            report.peak = self._budget.peak
            report.read += traffic.read
            report.waited_s += traffic.waited_s
            report.busy_s += traffic.busy_s
            return report

    def flush(self) -> None:
        """Wait until all experts are written, and none is read. Raises as ``lease``."""
        self._store.flush()

    def _tensors(self, layer: int, memory: Tensor) -> dict[str, Tensor]:
        described, (offsets, _) = self._layers[layer], self._offsets[layer]
        tensors = {}
        for name, shape in described.shapes.items():
            dtype = described.dtypes[name]
            flat = memory[offsets[name] : offsets[name] + prod(shape) * dtype.itemsize]
            tensors[name] = flat.view(dtype).view(1, *shape)
        return tensors

    def _next_use(self, key: int) -> float:
        """Return the time until an expert is used, in layers."""
        if (soon := self._soon.get(key)) is not None:
            return soon
        layers = len(self._layers)
        return ((self._layer_of[key] - self._current) % layers or layers) + self._misses[key]

    def _learn(self, layer: int, used: list[int]) -> None:
        """Update the shares with a call of a layer."""
        index_U = torch.tensor(used, dtype=torch.int64, device="cpu")
        shares = self._shares[layer].mul_(DECAY)
        shares[index_U] += 1 - DECAY
        layers, first = len(self._layers), self._first[layer]
        self._misses[first : first + len(shares)] = ((1 / shares.clamp(min=LEAST) - 1) * layers).tolist()
        if self._last is not None and (self._last[0] + 1) % layers == layer and self._options.predict:
            before, others_U = self._last
            self._pairs[before].mul_(PAIR_DECAY)
            self._calls[before].mul_(PAIR_DECAY)
            self._pairs[before][others_U.unsqueeze(1), index_U] += 1
            self._calls[before][others_U] += 1
        self._last = layer, index_U

    def _predicted(self, layer: int, used: list[int]) -> dict[int, float]:
        """Return the likely experts of the next layer with the times of their use, the most likely first."""
        layers = len(self._layers)
        following = (layer + 1) % layers
        if not used or following == layer:
            return {}
        assert self._last is not None
        index_U, shares = self._last[1], self._shares[following]
        # One call with the experts' shares of all calls stands for pairs that are not known yet.
        likely = ((self._pairs[layer][index_U] + shares) / (self._calls[layer][index_U] + 1).unsqueeze(1)).amax(0)
        values, experts = likely.sort(descending=True)
        first = self._first[following]
        return {
            first + expert: 1 + (1 / value - 1) * layers
            for value, expert in zip(values.tolist(), experts.tolist(), strict=True)
            if value >= LIKELY
        }
