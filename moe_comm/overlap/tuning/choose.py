"""Chooses backend and number of chunks: from measurements of this machine, else from the cost model.

    choose(work)   ──▶ known for this group and bucket of rows?  ──▶ return it, in microseconds
                       │ no: collective, the same result on every rank
                       ├─ the group's rates, measured once for each dtype (``rates.py``)
                       ├─ a measurement that ``moe-comm tune`` stored (``store.py``): same machine, ranks, hosts,
                       │  threads and dtype, and a near shape; between hosts also a link of about the same rate
                       ├─ else the cost model (``cost.py``)
                       └─ rank 0's choice is sent to all ranks, because hosts may have different files

If several operators and directions need one choice, it is the one with the smallest sum of times.

``device_rates`` are the rates of the device executor (``device_cost.py``): those in rank 0's store, else constants.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec

import torch

from moe_comm.comm.agree import digest, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.errors import RankMismatch
from moe_comm.overlap.options import BACKENDS, CHUNKED, SHARED, TRITON
from moe_comm.overlap.tuning.cost import CHUNKS, IN_PLACE, MARGIN, GroupRates, OperatorWork, cheapest, predict
from moe_comm.overlap.tuning.device_cost import CAPABILITY, H100, DeviceRates
from moe_comm.overlap.tuning.rates import measure_rates
from moe_comm.overlap.tuning.store import OverlapChoice, TuningEnvironment, TuningStore, cache_folder, read_store

PROBLEM_CHARACTERS = 300
"""Maximum length of the problem with stored measurements that rank 0 sends to the other ranks."""
Works = OperatorWork | tuple[OperatorWork, ...]


@dataclass
class _GroupState:
    """State of one group: rates by (dtype, device type), choices, and on rank 0 its stored measurements."""

    rates: dict[tuple[torch.dtype, str], GroupRates] = field(default_factory=dict)
    choices: dict[tuple[Works, str, tuple[str, ...]], OverlapChoice] = field(default_factory=dict)
    store: TuningStore | None = None
    device_rates: dict[str, DeviceRates | None] = field(default_factory=dict)


def choose(work: Works, channel: Channel, device: torch.device, backends: tuple[str, ...] = BACKENDS) -> OverlapChoice:
    """Return how to run ``work`` over ``channel``; the same on every rank. Collective on the first call for a shape.

    Args:
        work: One or several operators; several run with the same choice.
        backends: Backends to choose from. Triton is chosen only if it was measured to be the fastest, or if it is the
            only backend; never on CPUs if there is another one.
    """
    state = channel.comm.keep("tuning", _GroupState)
    bucket = work.bucket() if isinstance(work, OperatorWork) else tuple(part.bucket() for part in work)
    key = bucket, device.type, backends
    choice = state.choices.get(key)
    if choice is None:
        choice = state.choices[key] = _agree_on_choice(bucket, channel, state, device, backends)
    return choice


def rates_of(channel: Channel, dtype: torch.dtype, device: torch.device) -> GroupRates:
    """Return the group's rates. They are measured in the first call, which is collective."""
    state = channel.comm.keep("tuning", _GroupState)
    if (dtype, device.type) not in state.rates:
        state.rates[dtype, device.type] = measure_rates(channel, dtype, device)
    return state.rates[dtype, device.type]


def device_rates(channel: Channel | None, device: torch.device) -> DeviceRates | None:
    """Return the rates of the device executor, the same on every rank; None if none are known for the GPU. Collective
    in the first call of a group. channel: None for a rank without a group."""
    if channel is None:
        return _known_rates(read_store(cache_folder())[0], device)
    state = channel.comm.keep("tuning", _GroupState)
    if device.type not in state.device_rates:
        known = _known_rates(read_store(cache_folder())[0], device) if channel.rank == 0 else None
        text = json.dumps(None if known is None else asdict(known))
        shared = json.loads(gather_texts(channel, "sharing the rates of the device executor", text)[0])
        state.device_rates[device.type] = None if shared is None else DeviceRates(**shared)
    return state.device_rates[device.type]


def _known_rates(store: TuningStore, device: torch.device) -> DeviceRates | None:
    cuda = device.type == "cuda"
    calibrated = store.device_rates.get(torch.cuda.get_device_name(device) if cuda else device.type)
    if calibrated is not None:
        return calibrated
    return None if cuda and torch.cuda.get_device_capability(device) != CAPABILITY else H100


def place_of(channel: Channel, rates: GroupRates, device: torch.device) -> TuningEnvironment:
    """Return the environment of this rank's measurements."""
    hosts = len(set(channel.comm.hosts))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return TuningEnvironment(hosts, rates.shared, threads, name, rates.bytes_per_s)


def as_run(chunks: int, work: OperatorWork, rates: GroupRates) -> OverlapChoice:
    """Return ``chunks`` with the backend that runs them in this group."""
    in_place = chunks > 1 and rates.shared and work.operator in IN_PLACE
    return OverlapChoice(SHARED if in_place else CHUNKED, chunks)


def on_gpus(device: torch.device) -> bool:
    """Return whether Triton kernels can be chosen automatically on ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


def _agree_on_choice(
    work: Works, channel: Channel, state: _GroupState, device: torch.device, backends: tuple[str, ...]
) -> OverlapChoice:
    """Return rank 0's choice, on every rank.

    A problem with its stored measurements becomes a warning on every rank, and the cost model decides. An exception on
    rank 0 alone would leave the other ranks waiting.
    """
    works = (work,) if isinstance(work, OperatorWork) else work
    description = f"choosing chunks for {', '.join(map(str, works))}"
    local_digest = torch.tensor([digest(work, backends)], dtype=torch.int64, device="cpu")
    digests = channel.all_gather(local_digest.to(channel.control_device), description).cpu()
    if others := [rank for rank, value in enumerate(digests[:, 0].tolist()) if value != local_digest[0]]:
        raise RankMismatch(
            f"rank {channel.rank} chooses chunks for {works[0]}, but ranks {others} choose for other work or backends; "
            "call the same operators with the same shapes and overlap settings on every rank"
        )
    rates = rates_of(channel, works[0].dtype, device)
    if len(backends) > 1 and not on_gpus(device):
        backends = tuple(name for name in backends if name != TRITON)
    choice, problem = OverlapChoice(), ""
    if channel.rank == 0:
        environment = place_of(channel, rates, device)
        try:
            if state.store is None:
                state.store, problem = read_store(cache_folder())
            choice = KnownTimes(state.store, environment, rates, backends).best(works)
        except Exception as error:
            problem = f"cannot be used ({type(error).__name__}: {error}); ignored"
            state.store = TuningStore()
            choice = KnownTimes(state.store, environment, rates, backends).best(works)
    text = json.dumps([asdict(choice), problem[:PROBLEM_CHARACTERS]])
    fields_of_choice, problem = json.loads(gather_texts(channel, description, text)[0])
    if problem:
        warnings.warn(f"rank 0's measurements: {problem}", RuntimeWarning, stacklevel=2)
    return OverlapChoice(**fields_of_choice)


@dataclass(frozen=True)
class KnownTimes:
    """What a rank knows of the times of operators: stored measurements that are valid in ``environment``, and the cost
    model. backends: those to choose from."""

    store: TuningStore
    environment: TuningEnvironment
    rates: GroupRates
    backends: tuple[str, ...]

    def best(self, works: tuple[OperatorWork, ...]) -> OverlapChoice:
        """Return one choice for all of ``works``."""
        if self.backends == (TRITON,):
            return self._fastest(works) or OverlapChoice(TRITON)
        if len(works) > 1:
            return self._fastest(works) or OverlapChoice()
        if (stored := self.store.find(works[0], self.environment, self.backends)) is not None:
            return stored
        predicted = as_run(cheapest(works[0], self.rates), works[0], self.rates)
        return predicted if predicted.backend in self.backends else OverlapChoice()

    def _fastest(self, works: tuple[OperatorWork, ...]) -> OverlapChoice | None:
        """Return the choice with the smallest sum of times; None if no choice has times for all of ``works``."""
        tables = [self._times(work) for work in works]
        common = set.intersection(*map(set, tables))
        sums = {choice: sum(table[choice] for table in tables) for choice in tables[0] if choice in common}
        best = min(sums, key=lambda choice: sums[choice], default=None)
        serial = sums.get(OverlapChoice())
        if best is not None and serial is not None and sums[best] >= serial * (1 - MARGIN):
            return OverlapChoice()
        return best

    def _times(self, work: OperatorWork) -> dict[OverlapChoice, float]:
        """Return seconds by choice: measured for the nearest shape, else predicted."""
        rates, near = self.rates, self.store.nearest(work, self.environment)
        if near is not None:
            # Operators are measured alone.
            alone = replace(work, beside=0)
            beside = {
                c: predict(work, rates, c) - predict(alone, rates, c) for c in {t.choice.chunks for t in near.tried}
            }
            tried = (trial for trial in near.tried if trial.choice.backend in self.backends)
            return {trial.choice: trial.ms * 1e-3 + beside[trial.choice.chunks] for trial in tried}
        if CHUNKED not in self.backends:
            return {}
        if self.store.falls_back(work, self.environment) or not (work.gathered or work.scattered):
            return {OverlapChoice(): predict(work, rates, 1)}
        times = {as_run(chunks, work, rates): predict(work, rates, chunks) for chunks in CHUNKS}
        return {choice: seconds for choice, seconds in times.items() if choice.backend in self.backends}
