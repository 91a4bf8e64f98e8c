"""``Overlap``: how layers and operators overlap what they compute with what they transfer. Settings only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

CHUNKED, SHARED, TRITON = BACKENDS = ("chunked", "shared_memory", "triton")
"""What an operator can be run by."""
DEFAULT_CHUNKS = 4
Backend = Literal["auto", "chunked", "triton"]
ExecutorName = Literal["auto", "serial", "pipelined", "device"]
_ALLOWED: dict[str, tuple[str, ...]] = {"auto": BACKENDS, "chunked": (CHUNKED,), "triton": (TRITON,)}


def at_least_one(name: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")


@dataclass(frozen=True)
class Overlap:
    """How an operator overlaps its collective.

    chunks: parts in which a rank's rows travel. 1: all at once, and one step after the other. "auto": as ``moe-comm
        tune`` measured on this machine, else as a cost model predicts from the group's own rates; every rank does as
        the group's first, which tells the others when an operator of a shape is first called.
    chunk_bytes: no smaller parts than this, and so fewer: each costs a round trip, which must be short beside it. Not
        for "auto", which knows what a round trip costs.
    deterministic: weight gradients have the same bits for every number of chunks: they are one product over all rows,
        or one for each rank, and wait for the last of these. False: they are added up as rows arrive, which hides more.
    backend: "chunked": chunks over whatever the group's ranks talk by. "triton": one fused kernel on symmetric memory,
        of GPUs of one host (of CPU ranks only where Triton interprets, as tests do); its own bits, whatever the
        programs. "auto": linear layers of CPU ranks that share memory read in place, all else is chunked; and with
        chunks "auto", a kernel where ``moe-comm tune`` measured on these GPUs that it is faster: there the bits, which
        on GPUs nothing promises for every number of ranks, depend on what was measured. "chunked" keeps them.
    executor: of a whole expert layer. "serial": dispatch, experts and combine one after the other. "pipelined": experts
        compute rows as they arrive, over ``all_to_all`` in chunks and over ``shared_memory`` peer by peer. "device":
        Triton's kernels, for experts without biases. "auto": "device" with backend "triton", else pipelined where the
        dispatcher can and there are enough rows for more than one chunk. A dispatcher that cannot run an executor that
        is named is a ConfigError on every rank, in the layer's first call.
    programs: of a Triton kernel, those that communicate; None: with chunks "auto" as tuned, else as it takes by itself.

    Raises:
        ConfigError: chunks is neither a whole number of at least 1 nor "auto", or backend or executor is
            not known.
    """

    chunks: int | Literal["auto"] = DEFAULT_CHUNKS
    chunk_bytes: int = 128 << 10
    deterministic: bool = True
    backend: Backend = "auto"
    programs: int | None = None
    executor: ExecutorName = "auto"

    def __post_init__(self) -> None:
        if self.chunks != "auto":
            at_least_one("chunks", self.chunks)
        at_least_one("chunk_bytes", self.chunk_bytes)
        if self.programs is not None:
            at_least_one("programs", self.programs)
        if self.backend not in get_args(Backend):
            raise ConfigError(f"unknown backend {self.backend!r}; known: {', '.join(get_args(Backend))}")
        if self.executor not in get_args(ExecutorName):
            raise ConfigError(f"unknown executor {self.executor!r}; known: {', '.join(get_args(ExecutorName))}")

    @classmethod
    def of(cls, overlap: Overlap | Literal["auto"] | None) -> Overlap | None:
        """What a layer is given: "auto" is ``Overlap("auto")``.

        Raises:
            ConfigError: another name.
        """
        if isinstance(overlap, str):
            if overlap != "auto":
                raise ConfigError(f'overlap must be an Overlap, "auto" or None; got {overlap!r}')
            return cls("auto")
        return overlap

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that ``backend`` allows."""
        return _ALLOWED[self.backend]

    def chunks_of(self, num_bytes: int) -> int:
        """In how many parts ``num_bytes`` travel; by name, where no more than that is known, ``DEFAULT_CHUNKS``."""
        chunks = DEFAULT_CHUNKS if isinstance(self.chunks, str) else self.chunks
        return min(chunks, max(1, num_bytes // self.chunk_bytes))


DEFAULT = Overlap()
