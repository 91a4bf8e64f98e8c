"""Which backend and how many chunks: what was measured on this machine, else what the cost model predicts.

    choose(work)   ──▶ known for this group and bucket of rows?  ──▶ done, in microseconds
                       │ no: collective, the same on every rank
                       ├─ the group's rates, once for each dtype (``rates.py``)
                       ├─ a measurement that ``moe-comm tune`` stored (``store.py``): same machine, ranks, hosts,
                       │  threads, dtype, and near in shape; between hosts only with a link like this one's
                       ├─ else the cost model (``cost.py``)
                       └─ the first rank's choice is told to all: hosts may have different files

Where one choice has to serve several operators and directions, it is the one whose sum of their times is smallest.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from moe_comm.comm.channel import Channel
from moe_comm.comm.communicator import communicators
from moe_comm.comm.meeting import digest
from moe_comm.errors import RankMismatch
from moe_comm.overlap.cost import CHUNKS, IN_PLACE, MARGIN, Rates, Work, cheapest, predict
from moe_comm.overlap.options import BACKENDS, CHUNKED, SHARED, TRITON
from moe_comm.overlap.rates import measure_rates
from moe_comm.overlap.store import Choice, Place, Store, cache_folder, read_store

CHOICE_BYTES, PROBLEM_BYTES = 256, 512
"""Of a choice, and of what is wrong with the stored measurements, as ranks tell them to each other."""
Works = Work | tuple[Work, ...]


@dataclass
class _Known:
    """Of one group: rates by (dtype, device type), and what was chosen."""

    rates: dict[tuple[torch.dtype, str], Rates] = field(default_factory=dict)
    chosen: dict[tuple[Works, str, tuple[str, ...]], Choice] = field(default_factory=dict)


class _State:
    """Of this process, as process groups are."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.store: Store | None = None


_state = _State()


def configure_tuning(folder: Path | None = None) -> None:
    """Take measurements from ``folder`` (None: ``cache_folder()``) from now on, and forget what was chosen before.

    On every rank, or on none; folders may differ.
    """
    _state.folder, _state.store = folder, None
    for comm in communicators():
        comm.forget("tuning")


def choose(work: Works, channel: Channel, device: torch.device, backends: tuple[str, ...] = BACKENDS) -> Choice:
    """How to run ``work`` over ``channel``: the same on every rank. Collective on a shape's first call.

    Args:
        work: several are to be run in the same way.
        backends: to choose from. Triton kernels only where they were measured to be best, or nothing else is allowed;
            never on a CPU then.

    Raises:
        RankMismatch: ranks ask about different work.
    """
    known = channel.comm.keep("tuning", _Known)
    bucket = work.bucket() if isinstance(work, Work) else tuple(one.bucket() for one in work)
    key = bucket, device.type, backends
    choice = known.chosen.get(key)
    if choice is None:
        choice = known.chosen[key] = _agreed(bucket, channel, known, device, backends)
    return choice


def rates_of(channel: Channel, dtype: torch.dtype, device: torch.device) -> Rates:
    """The group's rates, measured on the first call, which is collective."""
    known = channel.comm.keep("tuning", _Known)
    if (dtype, device.type) not in known.rates:
        known.rates[dtype, device.type] = measure_rates(channel, dtype, device)
    return known.rates[dtype, device.type]


def place_of(channel: Channel, rates: Rates, device: torch.device) -> Place:
    """Where this rank's measurements hold."""
    hosts = len(set(channel.comm.hosts))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(hosts, rates.shared, torch.get_num_threads() if device.type == "cpu" else 0, name, rates.bytes_per_s)


def as_run(chunks: int, work: Work, rates: Rates) -> Choice:
    """``chunks`` with the name of the backend that they mean here."""
    in_place = chunks > 1 and rates.shared and work.operator in IN_PLACE
    return Choice(SHARED if in_place else CHUNKED, chunks)


def on_gpus(device: torch.device) -> bool:
    """Whether Triton kernels can be chosen by themselves there."""
    return device.type == "cuda" and find_spec("triton") is not None


def _agreed(work: Works, channel: Channel, known: _Known, device: torch.device, backends: tuple[str, ...]) -> Choice:
    """The first rank's choice. What goes wrong with its measurements is a warning on every rank, and the model's choice
    counts: a rank that raised alone would leave the others waiting."""
    works = (work,) if isinstance(work, Work) else work
    description = f"choosing chunks for {', '.join(map(str, works))}"
    asked = torch.tensor([digest(work, backends)])
    told = channel.all_gather(asked.to(channel.control_device), description).cpu()
    if odd := [rank for rank, other in enumerate(told[:, 0].tolist()) if other != asked[0]]:
        raise RankMismatch(f"rank {channel.rank} chooses chunks for {works[0]}, and ranks {odd} for something else")
    rates = rates_of(channel, works[0].dtype, device)
    if len(backends) > 1 and not on_gpus(device):
        backends = tuple(name for name in backends if name != TRITON)
    choice, problem = Choice(), ""
    if channel.rank == 0:  # the others' is not heard
        place = place_of(channel, rates, device)
        try:
            if _state.store is None:
                _state.store, problem = read_store(_state.folder or cache_folder())
            choice = _found(works, _state.store, place, rates, backends)
        except Exception as error:
            problem = f"cannot be used ({type(error).__name__}: {error}); ignored"
            _state.store = Store()
            choice = _found(works, _state.store, place, rates, backends)
    raw = json.dumps(asdict(choice)).encode().ljust(CHOICE_BYTES)
    raw += problem.encode()[:PROBLEM_BYTES].ljust(PROBLEM_BYTES)
    said = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(channel.control_device)
    first = bytes(channel.all_gather(said, description)[0].tolist())
    if problem := first[CHOICE_BYTES:].decode(errors="replace").strip():
        warnings.warn(f"rank 0's measurements: {problem}", RuntimeWarning, stacklevel=2)
    return Choice(**json.loads(first[:CHOICE_BYTES]))


def _found(works: tuple[Work, ...], store: Store, place: Place, rates: Rates, backends: tuple[str, ...]) -> Choice:
    if backends == (TRITON,):
        return _fastest(works, store, place, rates, backends) or Choice(TRITON)
    if len(works) == 1:
        found = store.find(works[0], place, backends)
        return found or _allowed(as_run(cheapest(works[0], rates), works[0], rates), backends)
    return _fastest(works, store, place, rates, backends) or Choice()


def _allowed(choice: Choice, backends: Collection[str]) -> Choice:
    return choice if choice.backend in backends else Choice()


def _fastest(
    works: tuple[Work, ...], store: Store, place: Place, rates: Rates, backends: tuple[str, ...]
) -> Choice | None:
    """By the sum of the times of all ``works``; None: nothing is known of any one choice for all of them."""
    tables = [_times(work, store, place, rates, backends) for work in works]
    common = set.intersection(*map(set, tables))
    sums = {choice: sum(table[choice] for table in tables) for choice in tables[0] if choice in common}
    best = min(sums, key=lambda choice: sums[choice], default=None)
    alone = sums.get(Choice())
    if best is not None and alone is not None and sums[best] >= alone * (1 - MARGIN):
        return Choice()
    return best


def _times(work: Work, store: Store, place: Place, rates: Rates, backends: Collection[str]) -> dict[Choice, float]:
    """Seconds by choice: measured for the nearest shape, else predicted."""
    near = store.nearest(work, place)
    if near is not None:
        return {tried.choice: tried.ms * 1e-3 for tried in near.tried if tried.choice.backend in backends}
    if CHUNKED not in backends:
        return {}
    load = work.load()
    if store.falls_back(work, place) or not (load.gathered or load.scattered):
        return {Choice(): predict(load, rates, 1)}
    found = {as_run(chunks, work, rates): predict(load, rates, chunks) for chunks in CHUNKS}
    return {choice: seconds for choice, seconds in found.items() if choice.backend in backends}
