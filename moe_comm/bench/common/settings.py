"""What a benchmark measures. Frozen, checked when made, and written into every result."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from moe_comm.dispatch.factory import BACKENDS
from moe_comm.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
SMALL_TOKENS = 64
"""Batches up to this many tokens a rank are short enough for hundreds of iterations."""


def _at_least(settings: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < low:
            raise ConfigError(f"{name} must be at least {low}; got {value}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class Shape:
    """The part that both benchmarks share.

    ranks: processes on this host, each with its own cores; with more ranks than cores they share.
    tokens: T, tokens of each rank. hidden: D. experts: E, over all ranks. top_k: K distinct experts a token.
    warmup, iterations: rounds thrown away, and rounds whose median is reported; 0 iterations: chosen by size.
    seed: of tokens, routing (uniform, random) and weights.
    """

    ranks: int = 2
    tokens: int = 4096
    hidden: int = 1024
    experts: int = 64
    top_k: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    warmup: int = 2
    iterations: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "ranks", "hidden", "experts", "top_k")
        _at_least(self, 0, "tokens", "warmup", "iterations", "seed")
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("device", self.device, DEVICES)
        if self.top_k > self.experts:
            raise ConfigError(f"top_k must not exceed experts ({self.experts}); got {self.top_k}")
        if self.ranks > self.experts:
            raise ConfigError(f"every rank needs an expert: {self.ranks} ranks but {self.experts} experts")
        if self.device == "cuda" and self.ranks > 1:
            raise ConfigError(f"on cuda one rank is measured; got ranks={self.ranks}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        tidy: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**tidy)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


DISPATCH_PEERS = ("torch_gloo", "torch_gloo_tuned", "torch_mpich", "torch_mpich_tuned")


@dataclass(frozen=True)
class DispatchBench(Shape):
    """``moe-comm bench dispatch``.

    backend: ours; see ``moe_comm.dispatch.factory.BACKENDS``.
    backward: measure the two backward passes too.
    peers: whom to compare with. ``_tuned`` reuses its buffers and sums with ``embedding_bag``; the plain one
        allocates every time, as Hugging Face and torchtitan do.
    in_a_row: calls of a phase in one measurement, whose mean counts. One call after a barrier finds cold caches, as
        after a long computation; several in a row show what each costs by itself. Needs ``backward`` off.
    """

    backend: str = "auto"
    backward: bool = True
    peers: tuple[str, ...] = DISPATCH_PEERS
    in_a_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("backend", self.backend, BACKENDS)
        for peer in self.peers:
            _one_of("peer", peer, DISPATCH_PEERS)
        _at_least(self, 1, "in_a_row")
        if self.in_a_row > 1 and self.backward:
            raise ConfigError(f"in_a_row={self.in_a_row} needs backward off: a graph can be walked back only once")

    @property
    def rounds(self) -> int:
        """Iterations to measure."""
        return self.iterations or (300 if self.tokens <= SMALL_TOKENS else 15)


LAYER_PEERS = ("hf_grouped_mm", "hf_all_to_all", "torchtitan", "sonic_moe")


@dataclass(frozen=True)
class LayerBench(Shape):
    """``moe-comm bench layer``: forward and backward of a whole MoE layer, router included.

    ffn: F, width of each expert.
    backend: ours, for the expert-parallel contestant.
    peers: whom to compare with; one that is not installed is skipped and said so.
    memory: also run each contestant alone in fresh processes and report how much memory it takes at its peak.
    """

    ffn: int = 512
    backend: str = "auto"
    peers: tuple[str, ...] = LAYER_PEERS
    memory: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 1, "ffn")
        _one_of("backend", self.backend, BACKENDS)
        for peer in self.peers:
            _one_of("peer", peer, LAYER_PEERS)
        if self.experts % self.ranks:
            raise ConfigError(
                f"experts must divide by ranks, as the peers need it; got {self.experts} experts, {self.ranks} ranks"
            )

    @property
    def rounds(self) -> int:
        """Iterations to measure."""
        return self.iterations or 5

    @property
    def flops(self) -> float:
        """Multiplications and additions of the experts' GEMMs in one rank's forward and backward.

        Three D x F matrices an expert; two FLOPs a weight and row forward, four backward.
        """
        return 18.0 * self.tokens * self.top_k * self.hidden * self.ffn


LAYER_PRESETS: dict[str, dict[str, Any]] = {
    "comm": {"tokens": 4096, "hidden": 1024, "ffn": 512, "experts": 64, "top_k": 8},
    "compute": {"tokens": 4096, "hidden": 1024, "ffn": 4096, "experts": 8, "top_k": 2},
}
"""Communication-heavy (many small experts) and compute-heavy (few wide ones)."""
