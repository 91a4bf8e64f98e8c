"""Settings of the benchmarks. Their fields are also the options of the commands; loading this does not load torch.

A field with a ``typer.Option`` is an option of the command, with its name, help text and range. The settings are
validated on construction and written into every result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from moe_comm.errors import ConfigError, suggestion
from moe_comm.overlap.options import Overlap

if TYPE_CHECKING:
    import torch

DISPATCH_PEERS = ("torch_gloo", "torch_gloo_tuned", "torch_mpich", "torch_mpich_tuned")
LAYER_PEERS = ("hf_grouped_mm", "hf_all_to_all", "torchtitan", "sonic_moe")
TRAIN_PEERS = (
    "hf_ep_fsdp2",
    "hf_fsdp2",
    "hf_ddp",
    "deepspeed_autoep",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "one_process",
    "hf_one_process",
)


Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
SMALL_TOKENS = 64
"""Batches of at most this many tokens per rank are measured for hundreds of iterations."""
OPERATORS = ("gather_matmul", "matmul_scatter", "dispatch_matmul", "matmul_combine")
EXPERTS_PER_RANK = 8

Ranks = Annotated[int, typer.Option(min=1, help="Ranks to start; under torchrun, the number of its ranks.")]
AnyHosts = Annotated[
    int, typer.Option(min=1, max=64, help="Number of hosts; several are network namespaces, which need root.")
]
Hosts = Annotated[int, typer.Option(min=2, max=64, help="Number of hosts, each a network namespace.")]
LinkGbit = Annotated[float, typer.Option(min=0.001, help="Rate of each host's link, Gbit/s.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens per rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size.")]
Ffn = Annotated[int, typer.Option(min=1, help="Width of each expert.")]
Experts = Annotated[int, typer.Option(min=1, help="Total number of experts.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Experts per token.")]
DtypeOf = Annotated[Dtype, typer.Option(help="Dtype of the rows.")]
DeviceOf = Annotated[Device, typer.Option(help="Device of the tensors.")]
Backend = Annotated[
    str, typer.Option(help="auto, local, shared_memory, all_to_all, all_gather, hierarchical, or peer_to_peer on CUDA.")
]
Iterations = Annotated[int, typer.Option(min=0, help="Number of measured rounds; 0: chosen by size.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measured rounds; the median is reported.")]
Warmup = Annotated[int, typer.Option(min=0, help="Number of discarded rounds at the start.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of tokens, routing and weights.")]


def peers_option(names: Sequence[str]) -> Any:
    """Return the option that selects some of ``names``."""
    return typer.Option(
        "--peer", help=f"Implementation to compare with: {', '.join(names)}; repeatable. [default: all]"
    )


def options_of(settings: type) -> dict[str, tuple[Any, OptionInfo]]:
    """Return the type and the option of each field of a settings class that is an option."""
    hints = get_type_hints(settings, include_extras=True)
    annotated = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {name: (hint, option) for name, (hint, *extra) in annotated.items() for option in extra}


def check_ranges(settings: Any) -> None:
    """Raise ``ConfigError`` if a value is out of the range of its option, or not in its ``Literal``."""
    for name, (hint, option) in options_of(type(settings)).items():
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else (value,):
            if option.min is not None and number is not None and number < option.min:
                raise ConfigError(f"{name} must be at least {option.min}; got {number}")
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))


def check_sizes(settings: Any) -> None:
    """Raise ``ConfigError`` if a value is out of the range of its option, or an int without an option is below 1."""
    check_ranges(settings)
    for field in fields(settings):
        value = getattr(settings, field.name)
        if type(value) is int and field.name not in options_of(type(settings)) and value < 1:
            raise ConfigError(f"{field.name} must be at least 1; got {value}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``ConfigError`` if ``value`` is not in ``choices``."""
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}{suggestion(value, choices)}; known: {', '.join(choices)}")


def check_backend(backend: str) -> None:
    """Raise ``ConfigError`` unless ``backend`` is a dispatch backend."""
    from moe_comm.dispatch.selection.factory import BACKENDS  # imports torch

    check_choice("backend", backend, BACKENDS)


def check_cores_per_rank(cores: float | None, ranks: int) -> None:
    """Raise ``ConfigError`` if this process may use fewer than ``ranks * cores`` cores."""
    available = len(os.sched_getaffinity(0))
    if cores is not None and not 0.01 <= cores <= available / ranks:
        raise ConfigError(
            f"cores_per_rank must be from 0.01 to {available / ranks:g}, as {ranks} ranks have {available} cores; got "
            f"{cores:g}"
        )


@dataclass(frozen=True)
class BatchShape:
    """Batch and routing of a benchmark. Experts and tokens are uniformly distributed."""

    ranks: Ranks = 2
    tokens: Tokens = 4096
    hidden: Hidden = 1024
    experts: Experts = 64
    top_k: TopK = 8
    dtype: DtypeOf = "float32"
    device: DeviceOf = "cpu"
    warmup: Warmup = 2
    iterations: Iterations = 0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_k > self.experts:
            raise ConfigError(f"top_k must not exceed experts ({self.experts}); got {self.top_k}")
        if self.ranks > self.experts:
            raise ConfigError(f"ranks must not exceed experts ({self.experts}); got {self.ranks}")
        if self.device == "cuda" and self.ranks > 1:
            raise ConfigError(f"device=cuda supports one rank; got ranks={self.ranks}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the settings of a ``to_dict`` result."""
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**arguments)


def torch_dtype(name: Dtype) -> torch.dtype:
    """Return the torch dtype of a name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class DispatchBench(BatchShape):
    """Settings of ``moe-comm bench dispatch``.

    ``_tuned`` peers reuse their buffers and sum with ``embedding_bag``. The others allocate in each call, as Hugging
    Face and torchtitan do.

    Args:
        in_a_row: number of consecutive calls in one measurement; their mean is reported. A single call after a barrier
            runs with cold caches, consecutive calls run with warm ones. Values above 1 require ``backward=False``.
    """

    backend: Backend = "auto"
    backward: Annotated[bool, typer.Option(help="Also measure both backward passes.")] = True
    cold: Annotated[
        bool,
        typer.Option(
            help="Run other work before each call, so that code and data are not in the caches, as in decode."
        ),
    ] = False
    peers: Annotated[tuple[str, ...], peers_option(DISPATCH_PEERS)] = DISPATCH_PEERS
    in_a_row: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backend(self.backend)
        for peer in self.peers:
            check_choice("peer", peer, DISPATCH_PEERS)
        if self.in_a_row < 1:
            raise ConfigError(f"in_a_row must be at least 1; got {self.in_a_row}")
        if self.in_a_row > 1 and self.backward:
            raise ConfigError(f"in_a_row={self.in_a_row} requires backward=False: each graph has one backward pass")
        if self.in_a_row > 1 and self.cold:
            raise ConfigError(f"in_a_row={self.in_a_row} requires cold=False: the second call would not be cold")

    @property
    def rounds(self) -> int:
        """Number of measured iterations."""
        return self.iterations or (300 if self.tokens <= SMALL_TOKENS else 15)


@dataclass(frozen=True)
class LayerBench(BatchShape):
    """Settings of ``moe-comm bench layer``: forward and backward of an MoE layer, including the router."""

    ffn: Ffn = 512
    backend: Backend = "auto"
    memory: Annotated[bool, typer.Option(help="Also measure the peak memory of each implementation.")] = True
    peers: Annotated[tuple[str, ...], peers_option(LAYER_PEERS)] = LAYER_PEERS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backend(self.backend)
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


@dataclass(frozen=True)
class HierarchicalBench:
    """Settings of ``moe-comm bench hierarchical``. Rows are fp32."""

    hosts: Hosts = 2
    ranks_per_host: Annotated[int, typer.Option(min=2, help="Ranks per host.")] = 2
    link_gbit: LinkGbit = 1.0
    tokens: Tokens = 1024
    hidden: Hidden = 1024
    experts: Experts = 64
    top_k: TopK = 8
    warmup: Warmup = 2
    rounds: Rounds = 7
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        _ = self.shape

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def shape(self) -> BatchShape:
        """Shape of the seeded inputs."""
        return BatchShape(
            self.world, self.tokens, self.hidden, self.experts, self.top_k, warmup=self.warmup, seed=self.seed
        )


@dataclass(frozen=True)
class OverlapBench:
    """Settings of ``moe-comm bench overlap``. All tensors are float32. ``experts`` = 0: ``EXPERTS_PER_RANK`` per rank.

    Args:
        ratios: set by the width that is not transferred.
        ffn: widths of the experts. Empty: one width at which transfers take about as long as the experts.
    """

    hosts: Hosts = 2
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host.")] = 1
    link_gbit: LinkGbit = 1.0
    operators: Annotated[tuple[str, ...], typer.Option("--op", help="Operator to measure; repeatable. [all four]")] = (
        OPERATORS
    )
    rows: Annotated[tuple[int, ...], typer.Option(min=1, help="Rows (tokens) per rank; repeatable. [2048]")] = (2048,)
    width: Annotated[int, typer.Option(min=1, help="Columns of the transferred rows.")] = 512
    ratios: Annotated[
        tuple[float, ...],
        typer.Option("--ratio", min=0.01, help="Ratio of communication to computation; repeatable. [0.5, 1, 2]"),
    ] = (0.5, 1.0, 2.0)
    chunks: int | Literal["auto"] = 8
    deterministic: Annotated[
        bool, typer.Option(help="Compute weight gradients with equal bits for any number of chunks.")
    ] = True
    layer: Annotated[bool, typer.Option(help="Also measure complete MoE layers.")] = True
    peers: Annotated[bool, typer.Option("--hf/--no-hf", help="Also measure Hugging Face's expert parallelism.")] = True
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank in the layer.")] = 2048
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size of the layer.")] = 512
    ffn: Annotated[
        tuple[int, ...], typer.Option(min=1, help="Width of its experts; repeatable. [chosen for the link]")
    ] = ()
    experts: Annotated[int, typer.Option(min=0, help="Total number of experts; 0: 8 per rank.")] = 0
    top_k: TopK = 2
    warmup: Warmup = 2
    rounds: Rounds = 7
    seconds: Annotated[float, typer.Option(min=0, help="Add rounds for up to this many seconds.")] = 2.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if unknown := set(self.operators) - set(OPERATORS):
            raise ConfigError(f"unknown operators {sorted(unknown)}; known: {', '.join(OPERATORS)}")
        if not self.operators and not self.layer:
            raise ConfigError("nothing to measure: set operators or layer")
        if not self.rows or not self.ratios:
            raise ConfigError(f"rows and ratios must not be empty; got {self}")
        if self.num_experts % self.world or self.top_k > self.num_experts:
            raise ConfigError(
                f"experts must be a multiple of the {self.world} ranks and >= top_k {self.top_k}; got {self.experts}"
            )
        _ = self.overlap

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def num_experts(self) -> int:
        return self.experts or EXPERTS_PER_RANK * self.world

    @property
    def overlap(self) -> Overlap:
        return Overlap(self.chunks, deterministic=self.deterministic)


@dataclass(frozen=True)
class Tune:
    """Settings of ``moe-comm tune``. Several hosts are network namespaces with links of ``link_gbit`` Gbit/s.

    ``device`` "cuda" takes one GPU per rank.
    """

    hosts: Annotated[
        int, typer.Option(min=1, max=64, help="1: this host; more: number of network namespaces, each a host.")
    ] = 1
    ranks_per_host: int = 2
    link_gbit: LinkGbit = 1.0
    operators: Annotated[
        tuple[str, ...], typer.Option("--operator", help="Operator to measure; repeatable. [default: all]")
    ] = OPERATORS
    rows: Annotated[
        tuple[int, ...], typer.Option(min=1, help="Rows per rank; repeatable. [1, 16, 64, 256, 1024, 4096]")
    ] = (1, 16, 64, 256, 1024, 4096)
    sent: Annotated[int, typer.Option(min=1, help="Columns of the transferred rows.")] = 512
    other: Annotated[int, typer.Option(min=1, help="The other width of the layer, which is not transferred.")] = 512
    dtype: DtypeOf = "float32"
    device: DeviceOf = "cpu"
    warmup: Warmup = 2
    rounds: Rounds = 7
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        for operator in self.operators:
            check_choice("operator", operator, OPERATORS)
        if self.device == "cuda" and self.hosts > 1:
            raise ConfigError("device=cuda requires hosts=1; start ranks on several real hosts with torchrun")
        if not self.operators or not self.rows:
            raise ConfigError("tune needs at least one operator and one number of rows")

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host
