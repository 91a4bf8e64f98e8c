"""Settings of the dispatch and layer benchmarks. They are validated on construction and written into every result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from moe_comm.bench.common.peer_names import DISPATCH_PEERS, LAYER_PEERS
from moe_comm.dispatch.selection.factory import BACKENDS
from moe_comm.errors import ConfigError, suggestion

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
SMALL_TOKENS = 64
"""Batches of at most this many tokens per rank are measured for hundreds of iterations."""


def check_at_least(settings: Any, low: int, *names: str) -> None:
    """Raise ``ConfigError`` if one of the named attributes is less than ``low``."""
    for name in names:
        value = getattr(settings, name)
        if value < low:
            raise ConfigError(f"{name} must be at least {low}; got {value}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``ConfigError`` if ``value`` is not in ``choices``."""
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}{suggestion(value, choices)}; known: {', '.join(choices)}")


def check_cores_per_rank(cores: float | None, ranks: int) -> None:
    """Raise ``ConfigError`` unless the cores that this process may use give each of ``ranks`` so many ``cores``."""
    available = len(os.sched_getaffinity(0))
    if cores is not None and not 0.01 <= cores <= available / ranks:
        raise ConfigError(
            f"cores_per_rank must be from 0.01 to {available / ranks:g}, as {ranks} ranks have {available} cores; got "
            f"{cores:g}"
        )


@dataclass(frozen=True)
class BatchShape:
    """Batch and routing of a benchmark.

    Args:
        ranks: processes on this host. Each is pinned to its own cores; more ranks than cores share cores.
        tokens: T, tokens per rank.
        hidden: D.
        experts: E, over all ranks.
        top_k: K, distinct experts per token.
        warmup: number of discarded iterations.
        iterations: number of iterations whose median is reported. 0: chosen by size.
        seed: seed of tokens, routing (uniform) and weights.
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
        check_at_least(self, 1, "ranks", "hidden", "experts", "top_k")
        check_at_least(self, 0, "tokens", "warmup", "iterations", "seed")
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("device", self.device, DEVICES)
        if self.top_k > self.experts:
            raise ConfigError(f"top_k must not exceed experts ({self.experts}); got {self.top_k}")
        if self.ranks > self.experts:
            raise ConfigError(f"ranks must not exceed experts ({self.experts}); got {self.ranks}")
        if self.device == "cuda" and self.ranks > 1:
            raise ConfigError(f"device=cuda supports one rank; got ranks={self.ranks}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the settings of a ``to_dict`` result."""
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**arguments)


@dataclass(frozen=True)
class DispatchBench(BatchShape):
    """Settings of ``moe-comm bench dispatch``.

    Args:
        backend: dispatch backend of this library, see ``moe_comm.dispatch.selection.factory.BACKENDS``.
        backward: also measure both backward passes.
        peers: implementations to compare with. ``_tuned`` peers reuse their buffers and sum with ``embedding_bag``.
            The others allocate in each call, as Hugging Face and torchtitan do.
        in_a_row: number of consecutive calls in one measurement; their mean is reported. A single call after a barrier
            runs with cold caches, consecutive calls run with warm ones. Values above 1 require ``backward=False``.
    """

    backend: str = "auto"
    backward: bool = True
    peers: tuple[str, ...] = DISPATCH_PEERS
    in_a_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backend", self.backend, BACKENDS)
        for peer in self.peers:
            check_choice("peer", peer, DISPATCH_PEERS)
        check_at_least(self, 1, "in_a_row")
        if self.in_a_row > 1 and self.backward:
            raise ConfigError(f"in_a_row={self.in_a_row} requires backward=False: each graph has one backward pass")

    @property
    def rounds(self) -> int:
        """Number of measured iterations."""
        return self.iterations or (300 if self.tokens <= SMALL_TOKENS else 15)


@dataclass(frozen=True)
class LayerBench(BatchShape):
    """Settings of ``moe-comm bench layer``: forward and backward of an MoE layer, including the router.

    Args:
        ffn: F, width of each expert.
        backend: dispatch backend of this library's expert-parallel layer.
        peers: layers to compare with. Those that are not installed are skipped and reported.
        memory: also measure the peak memory of each layer in separate processes.
    """

    ffn: int = 512
    backend: str = "auto"
    peers: tuple[str, ...] = LAYER_PEERS
    memory: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "ffn")
        check_choice("backend", self.backend, BACKENDS)
        for peer in self.peers:
            check_choice("peer", peer, LAYER_PEERS)
        if self.experts % self.ranks:
            raise ConfigError(
                f"experts must be divisible by ranks for the peers; got {self.experts} experts, {self.ranks} ranks"
            )

    @property
    def rounds(self) -> int:
        """Number of measured iterations."""
        return self.iterations or 5

    @property
    def flops(self) -> float:
        """FLOPs of the expert GEMMs in the forward and backward pass of one rank.

        An expert has three D x F matrices. Each weight takes 2 FLOPs per row in forward and 4 in backward.
        """
        return 18.0 * self.tokens * self.top_k * self.hidden * self.ffn


LAYER_PRESETS: dict[str, dict[str, Any]] = {
    "comm": {"tokens": 4096, "hidden": 1024, "ffn": 512, "experts": 64, "top_k": 8},
    "compute": {"tokens": 4096, "hidden": 1024, "ffn": 4096, "experts": 8, "top_k": 2},
}
"""Communication-heavy (many small experts) and compute-heavy (few wide experts)."""
