"""Overlap settings of layers and operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

CHUNKED, SHARED, TRITON = BACKENDS = ("chunked", "shared_memory", "triton")
"""Backends of an operator, as stored measurements name them."""
DEFAULT_CHUNKS = 4
TILE = 16
"""Chunks consist of whole tiles of this many rows, because GEMMs of fewer rows are slower."""
Backend = Literal["auto", "chunked", "triton"]
ExecutorName = Literal["auto", "serial", "pipelined", "device"]
_ALLOWED: dict[str, tuple[str, ...]] = {"auto": BACKENDS, "chunked": (CHUNKED,), "triton": (TRITON,)}


def _at_least_one(name: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}")


@dataclass(frozen=True)
class Overlap:
    """Settings for overlapping communication with GEMMs.

    Every rank of a group must use the same settings.

    Args:
        chunks: Number of chunks that a rank's rows are sent in. 1 disables overlap: one transfer, then one GEMM.
            "auto" takes the number that ``moe-comm tune`` stored for this machine, else the prediction of the cost
            model. Rank 0 of the group decides; the first call of an operator with a new shape is collective.
        chunk_bytes: Minimum size of a chunk in bytes, which limits an integer ``chunks``. "auto" ignores it, because
            the cost model includes the latency of a chunk.
        deterministic: If True, weight gradients have the same bits for every number of chunks: they are one GEMM over
            all rows (or one for each rank) and wait for all rows. If False, they are accumulated as rows are received,
            which hides more communication.
        backend: "chunked": collectives in chunks, over any transport. "triton": Triton kernels, for the GPUs of one
            host (CPU ranks only in Triton's interpreter): of linear layers one fused kernel on symmetric memory, of
            experts kernels over ``peer_to_peer``. The bits of linear layers, and of fp32 experts, differ from those of
            the other backends and do not depend on ``programs``. "auto": linear layers of CPU ranks that share memory
            read peers' rows in place, all other operators are chunked. With ``chunks="auto"``, "auto" also selects a
            Triton kernel of a linear layer where ``moe-comm tune`` measured that it is faster, so on GPUs the bits
            depend on the stored measurements.
        programs: Number of programs of a Triton kernel that communicate; over ``peer_to_peer``, of thread blocks that
            send rows at the same time. None: the tuned number with ``chunks="auto"``, else the kernel's default.
        executor: Execution order of a whole expert layer. "serial": dispatch, experts, combine. "pipelined": experts
            compute rows as they are received, over ``all_to_all`` in chunks, and over ``shared_memory`` and
            ``peer_to_peer`` peer by peer. "device": kernels of a GPU, for experts without adapters, over
            ``peer_to_peer``. "auto": "device" with ``backend="triton"``, and for 16-bit rows with ``chunks="auto"`` if
            a cost model predicts that it saves 5%; else "pipelined" if the dispatcher supports it and there are enough
            rows for two chunks, else "serial". If the dispatcher does not support the named executor, the first call
            raises ConfigError on every rank.

    Raises:
        ConfigError: ``chunks`` is neither an integer of at least 1 nor "auto", or ``backend`` or ``executor`` is
            unknown.
    """

    chunks: int | Literal["auto"] = DEFAULT_CHUNKS
    chunk_bytes: int = 128 << 10
    deterministic: bool = True
    backend: Backend = "auto"
    programs: int | None = None
    executor: ExecutorName = "auto"

    def __post_init__(self) -> None:
        if self.chunks != "auto":
            _at_least_one("chunks", self.chunks)
        _at_least_one("chunk_bytes", self.chunk_bytes)
        if self.programs is not None:
            _at_least_one("programs", self.programs)
        if self.backend not in get_args(Backend):
            raise ConfigError(f"unknown backend {self.backend!r}; known: {', '.join(get_args(Backend))}")
        if self.executor not in get_args(ExecutorName):
            raise ConfigError(f"unknown executor {self.executor!r}; known: {', '.join(get_args(ExecutorName))}")

    @classmethod
    def of(cls, overlap: Overlap | Literal["auto"] | None) -> Overlap | None:
        """Return the settings that a layer's ``overlap`` argument means: "auto" is ``Overlap("auto")``.

        Raises:
            ConfigError: ``overlap`` is a string other than "auto".
        """
        if isinstance(overlap, str):
            if overlap != "auto":
                raise ConfigError(f'overlap must be an Overlap, "auto" or None; got {overlap!r}')
            return cls("auto")
        return overlap

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that ``backend`` allows."""
        return _ALLOWED[self.backend]

    @property
    def uses_kernels(self) -> bool:
        """Whether whole expert layers run as Triton kernels."""
        return self.executor == "device" or (self.executor == "auto" and self.backend == TRITON)

    @property
    def may_use_kernels(self) -> bool:
        """Whether a cost model chooses if whole expert layers over ``peer_to_peer`` run as kernels of a GPU."""
        return self.executor == "auto" and self.backend == "auto" and self.chunks == "auto"

    def chunks_of(self, num_bytes: int) -> int:
        """Return the number of chunks for ``num_bytes``. "auto" counts as ``DEFAULT_CHUNKS``."""
        chunks = DEFAULT_CHUNKS if isinstance(self.chunks, str) else self.chunks
        return min(chunks, max(1, num_bytes // self.chunk_bytes))


DEFAULT = Overlap()
