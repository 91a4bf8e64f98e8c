"""What ``moe-comm bench plan`` trains, and with which mappings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from moe_comm.errors import ConfigError
from moe_comm.plan.model.mapping import Mapping, Sharding

MODEL_KEYS = ("hidden", "layers", "heads", "kv_heads", "experts", "top_k", "ffn", "vocab")


@dataclass(frozen=True)
class Case:
    """A mapping to measure. hosts: that its ranks are spread over; more than one: joined by a shaped link.

    mapping: as ``Mapping.parse`` takes it. micro_batch: sequences that a data-parallel rank takes at a time.
    """

    ranks: int
    mapping: str
    micro_batch: int = 1
    sharding: Sharding = "replicate"
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ConfigError(f"{self.ranks} ranks cannot be spread evenly over {self.hosts} hosts")
        self.parsed()

    def parsed(self) -> Mapping:
        """Raises ConfigError where the degrees do not fit the ranks."""
        return Mapping.parse(self.mapping, self.ranks, micro_batch=self.micro_batch, sharding=self.sharding)

    def __str__(self) -> str:
        """Degrees above 1, as a person would say them."""
        parallel = self.parsed().parallel
        degrees = [
            f"{axis}{size}" for axis in ("tp", "cp", "dp", "pp", "ep", "etp") if (size := parallel.sizes[axis]) > 1
        ]
        more = [] if self.sharding == "replicate" else [self.sharding]
        return " ".join([*(degrees or ["one"]), f"mb{self.micro_batch}", *more])


CASES = (
    Case(2, "dp=2,ep=1", 2),
    Case(2, "dp=2,ep=2", 1),
    Case(2, "dp=2,ep=2", 4),
    Case(2, "tp=2,ep=2", 2),
    Case(2, "tp=2,ep=1,etp=2", 2),
    Case(2, "cp=2,ep=2", 2),
    Case(2, "pp=2,ep=1", 1),
    Case(2, "pp=2,ep=1", 2),
    Case(2, "dp=2,ep=2", 2, "zero1"),
    Case(4, "dp=4,ep=4", 2),
    Case(4, "dp=4,ep=2", 1),
    Case(4, "dp=4,ep=1", 2),
    Case(4, "tp=2,dp=2,ep=4", 2),
    Case(4, "tp=4,ep=4", 4),
    Case(4, "pp=2,dp=2,ep=2", 1),
    Case(4, "pp=4,ep=1", 1),
    Case(8, "dp=8,ep=8", 1),
    Case(8, "dp=8,ep=2", 1),
    Case(8, "tp=2,dp=4,ep=8", 2),
    Case(8, "pp=2,dp=4,ep=4", 1),
    Case(8, "pp=4,dp=2,ep=2", 1),
    Case(8, "tp=2,pp=2,dp=2,ep=4", 1),
    Case(2, "dp=2,ep=2", 4, hosts=2),
    Case(2, "dp=2,ep=1", 4, hosts=2),
    Case(2, "tp=2,ep=2", 2, hosts=2),
    Case(2, "pp=2,ep=1", 1, hosts=2),
)
"""Expert, tensor, data and pipeline parallelism, and several of them, on 2, 4 and 8 ranks and over a link."""


@dataclass(frozen=True)
class PlanBench:
    """One model of Qwen3-MoE's architecture in fp32, one global batch, and mappings to spread both by.

    batch: sequences of a step, over all ranks. link_gbit: rate of each host's link, for cases of several hosts.
    warmup, steps: rounds thrown away, and rounds whose median is reported.
    """

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    experts: int = 8
    top_k: int = 2
    ffn: int = 256
    vocab: int = 512
    seq_len: int = 256
    batch: int = 8
    link_gbit: float = 1.0
    warmup: int = 1
    steps: int = 9
    seed: int = 0
    cases: tuple[Case, ...] = CASES

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < (0 if field.name in ("seed", "warmup") else 1):
                raise ConfigError(f"{field.name} must be larger; got {value}")
        if not self.cases:
            raise ConfigError("there is no mapping to measure")

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.batch * self.seq_len

    def overrides(self, case: Case) -> list[str]:
        """A ``TrainConfig`` for ``case``, as ``train.config.load`` takes it.

        Weights start wide and hardly move, so that routers spread tokens over experts, and go on to.
        """
        mapping = case.parsed()
        degrees = mapping.parallel.sizes
        return [
            f"run.seed={self.seed}",
            f"run.steps={self.warmup + self.steps}",
            "data.source=pydoc",
            f"data.seq_len={self.seq_len}",
            f"data.batch={self.batch}",
            f"data.micro_batches={mapping.micro_batches(self.batch)}",
            "model.family=qwen3_moe",
            *(f"model.{key}={getattr(self, key)}" for key in MODEL_KEYS),
            "model.init_std=0.1",
            "optimizer.warmup=0",
            "optimizer.lr=1e-6",
            f"parallel.ranks={case.ranks}",
            *(f"parallel.{axis}={degrees[axis]}" for axis in ("tp", "cp", "dp", "pp", "ep", "etp")),
            f"parallel.sharding={case.sharding}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without the cases."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cases"} | {"dtype": "float32"}
