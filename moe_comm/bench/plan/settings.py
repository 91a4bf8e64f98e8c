"""Settings of ``moe-comm bench plan``: the model and the mappings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from moe_comm.bench.common.settings import LinkGbit, Rounds, Seed, Warmup, check_sizes
from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ShardingMode

if TYPE_CHECKING:
    from moe_plan.model.mapping import Mapping

MODEL_KEYS = ("hidden", "layers", "heads", "kv_heads", "experts", "top_k", "ffn", "vocab")


@dataclass(frozen=True)
class PlanCase:
    """A mapping to measure.

    Args:
        mapping: argument of ``Mapping.parse``.
        micro_batch: sequences per data-parallel rank in a micro-batch.
        hosts: number of hosts over which the ranks are distributed. Several hosts are connected by a shaped link.
    """

    ranks: int
    mapping: str
    micro_batch: int = 1
    sharding: ShardingMode = "replicate"
    hosts: int = 1

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ConfigError(f"ranks must be a multiple of hosts; got {self.ranks} ranks and {self.hosts} hosts")

    def parsed(self) -> Mapping:
        """Return the parsed mapping. Raises ``ConfigError`` if the degrees do not match the number of ranks."""
        from moe_plan.model.mapping import Mapping  # imports numpy, which every command would load

        return Mapping.parse(self.mapping, self.ranks, micro_batch=self.micro_batch, sharding=self.sharding)

    def __str__(self) -> str:
        """Return a short name with the degrees above 1."""
        parallel = self.parsed().parallel
        degrees = [
            f"{axis}{size}" for axis in ("tp", "cp", "dp", "pp", "ep", "etp") if (size := parallel.sizes[axis]) > 1
        ]
        sharding = [] if self.sharding == "replicate" else [self.sharding]
        return " ".join([*(degrees or ["one"]), f"mb{self.micro_batch}", *sharding])


CASES = (
    PlanCase(2, "dp=2,ep=1", 2),
    PlanCase(2, "dp=2,ep=2", 1),
    PlanCase(2, "dp=2,ep=2", 4),
    PlanCase(2, "tp=2,ep=2", 2),
    PlanCase(2, "tp=2,ep=1,etp=2", 2),
    PlanCase(2, "cp=2,ep=2", 2),
    PlanCase(2, "pp=2,ep=1", 1),
    PlanCase(2, "pp=2,ep=1", 2),
    PlanCase(2, "dp=2,ep=2", 2, "zero1"),
    PlanCase(4, "dp=4,ep=4", 2),
    PlanCase(4, "dp=4,ep=2", 1),
    PlanCase(4, "dp=4,ep=1", 2),
    PlanCase(4, "tp=2,dp=2,ep=4", 2),
    PlanCase(4, "tp=4,ep=4", 4),
    PlanCase(4, "pp=2,dp=2,ep=2", 1),
    PlanCase(4, "pp=4,ep=1", 1),
    PlanCase(8, "dp=8,ep=8", 1),
    PlanCase(8, "dp=8,ep=2", 1),
    PlanCase(8, "tp=2,dp=4,ep=8", 2),
    PlanCase(8, "pp=2,dp=4,ep=4", 1),
    PlanCase(8, "pp=4,dp=2,ep=2", 1),
    PlanCase(8, "tp=2,pp=2,dp=2,ep=4", 1),
    PlanCase(2, "dp=2,ep=2", 4, hosts=2),
    PlanCase(2, "dp=2,ep=1", 4, hosts=2),
    PlanCase(2, "tp=2,ep=2", 2, hosts=2),
    PlanCase(2, "pp=2,ep=1", 1, hosts=2),
)
"""Expert, tensor, data and pipeline parallelism and combinations of them, on 2, 4 and 8 ranks and over a link."""


@dataclass(frozen=True)
class PlanBench:
    """One Qwen3-MoE model in fp32, one global batch (sequences per step, over all ranks), and the mappings."""

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
    link_gbit: LinkGbit = 1.0
    warmup: Warmup = 1
    steps: Rounds = 5
    seed: Seed = 0
    cases: tuple[PlanCase, ...] = CASES

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.cases:
            raise ConfigError("cases must not be empty")
        for case in self.cases:
            case.parsed()

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.batch * self.seq_len

    def overrides(self, case: PlanCase) -> list[str]:
        """Return the overrides of a ``TrainConfig`` for ``case``, for ``train.config.load``.

        A large initial standard deviation and a small learning rate keep the tokens distributed over all experts.
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
        """Return the settings as JSON values, without the cases."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cases"} | {"dtype": "float32"}
