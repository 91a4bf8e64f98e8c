"""Settings of ``moe-comm bench train``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from moe_comm.bench.common.settings import (
    TRAIN_PEERS,
    LinkGbit,
    Rounds,
    Seed,
    Warmup,
    check_choice,
    check_sizes,
    peers_option,
)
from moe_comm.errors import ConfigError

if TYPE_CHECKING:
    from moe_comm.train.config import TrainConfig

OWN = "moe_comm"
"""Name of the training loop of this library with the settings of the benchmark, to which all others are compared."""
RIVALS = ("hf_ep_fsdp2", "hf_fsdp2", "deepspeed_autoep")
"""Peers that distribute experts or shard weights over ranks. ``speedup`` is relative to the fastest of them, and
``speedup_over_all`` to the fastest of all peers, including those that need the full model on each rank."""

FREE_KEYS = ("parallel", "placement", "payload", "data.micro_batches", "model.recompute", "model.recompute_experts")
"""Sections and keys of a ``TrainConfig`` that do not change the trained function, so that losses stay comparable."""


@dataclass(frozen=True)
class Variant:
    """Another configuration of this library, which is a contestant of its own.

    Attributes:
        name: name of the contestant.
        overrides: overrides of the ``TrainConfig``, after those of the benchmark. An override of a whole section
            (``parallel=...``) replaces the earlier overrides of its keys.
    """

    name: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``NAME:KEY=VALUE,KEY=VALUE``. A comma inside a value is allowed if no ``KEY=`` follows it."""
        name, _, rest = text.partition(":")
        overrides = tuple(re.split(r",(?=[\w.]+=)", rest))
        if not re.fullmatch(r"[\w.-]+", name) or not all(re.match(r"[\w.]+=", override) for override in overrides):
            raise ConfigError(f"a variant is NAME:KEY=VALUE,KEY=VALUE, such as ep1:parallel.ep=1; got {text!r}")
        return cls(name, overrides)


@dataclass(frozen=True)
class TrainBench:
    """One Qwen3-MoE model in fp32 and one global batch for all contestants.

    Args:
        ranks: processes over all hosts, each with its own cores. This library distributes batch and experts over them.
        hidden, layers, heads, kv_heads, experts, top_k, ffn, vocab: sizes of the model; ffn is the width of an expert.
        batch: sequences per rank and step.
        settings: overrides of the ``TrainConfig`` of this library. They must be under ``FREE_KEYS``.
        variants: further configurations of this library, which start from ``settings``.
    """

    ranks: int = 2
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 128
    top_k: int = 8
    ffn: int = 64
    vocab: int = 2048
    seq_len: int = 256
    batch: int = 8
    sharding: Annotated[str, typer.Option(help="Sharding in moe_comm: replicate, zero1 or fsdp.")] = "replicate"
    warmup: Warmup = 2
    steps: Rounds = 7
    seed: Seed = 0
    peers: Annotated[tuple[str, ...], peers_option(TRAIN_PEERS)] = TRAIN_PEERS
    hosts: int = 1
    link_gbit: LinkGbit = 1.0
    settings: Annotated[
        tuple[str, ...],
        typer.Option("--set", metavar="KEY=VALUE", help="Override for moe_comm, such as parallel.ep=1; repeatable."),
    ] = ()
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self)
        check_choice("sharding", self.sharding, ("replicate", "zero1", "fsdp"))
        for peer in self.peers:
            check_choice("peer", peer, TRAIN_PEERS)
        if self.vocab < 257:
            raise ConfigError(f"vocab must be at least 257 (256 bytes and the end of text); got {self.vocab}")
        if self.experts % self.ranks:
            raise ConfigError(
                f"experts must be divisible by ranks for the peers; got {self.experts} experts, {self.ranks} ranks"
            )
        if self.ranks % self.hosts:
            raise ConfigError(f"ranks must be divisible by hosts; got {self.ranks} ranks, {self.hosts} hosts")
        names = [OWN, *TRAIN_PEERS, *(variant.name for variant in self.variants)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"a variant needs a name that no other contestant has; got {', '.join(repeated)}")
        for name in self.own_names:
            self.config(name)

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the configurations of this library."""
        return (OWN, *(variant.name for variant in self.variants))

    def config(self, name: str | None = None) -> TrainConfig:
        """Return the configuration with one of ``own_names``, or that of the peers for None."""
        from moe_comm.train import config as configuration  # imports torch

        if name is None:
            return configuration.load(None, self.overrides)
        extra = self.settings + next((variant.overrides for variant in self.variants if variant.name == name), ())
        kept: list[str] = []
        for override in (*self.overrides, *extra):
            key = override.partition("=")[0].strip()
            kept = [*(earlier for earlier in kept if not earlier.startswith(f"{key}.")), override]
        try:
            config = configuration.load(None, kept)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        for key in (override.partition("=")[0].strip() for override in extra):
            if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS):
                raise ConfigError(f"{name}: {key} is the same for all contestants; known: {', '.join(FREE_KEYS)}")
        return config

    @property
    def steps_per_round(self) -> int:
        """Number of steps of a contestant in each round. Only the last one is measured.

        Between hosts, transfers of a step may be in flight when it ends. Therefore an unmeasured step runs first: the
        measured step then waits for as many earlier transfers as it leaves in flight.
        """
        return 2 if self.hosts > 1 else 1

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.ranks * self.batch * self.seq_len

    @property
    def overrides(self) -> list[str]:
        """Overrides of a ``TrainConfig`` for ``train.config.load``, the same for all contestants.

        The auxiliary loss is 0, because that of Hugging Face is a different function of the routing.
        """
        return [
            f"run.seed={self.seed}",
            f"run.steps={self.steps_per_round * (self.warmup + self.steps)}",
            "data.source=pydoc",
            f"data.seq_len={self.seq_len}",
            f"data.batch={self.ranks * self.batch}",
            "model.family=qwen3_moe",
            *(f"model.{key}={getattr(self, key)}" for key in MODEL_KEYS),
            "model.aux_loss=0.0",
            f"optimizer.lr={LR}",
            "optimizer.warmup=0",
            "optimizer.schedule=constant",
            "optimizer.clip=0.0",
            f"optimizer.betas=[{BETAS[0]}, {BETAS[1]}]",
            f"optimizer.weight_decay={WEIGHT_DECAY}",
            f"parallel.sharding={self.sharding}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values. Those of hosts and variants are left out if they have their defaults."""
        optional = ("hosts", "link_gbit", "settings", "variants")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value for name, value in values.items() if name not in optional}
        if self.hosts > 1:
            values |= {"hosts": self.hosts, "ranks_per_host": self.ranks_per_host, "link_gbit": self.link_gbit}
        if self.settings:
            values["settings"] = list(self.settings)
        if self.variants:
            values["variants"] = {variant.name: list(variant.overrides) for variant in self.variants}
        return values | {"peers": list(self.peers), "dtype": "float32"}


MODEL_KEYS = ("hidden", "layers", "heads", "kv_heads", "experts", "top_k", "ffn", "vocab")
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
"""AdamW settings of all contestants: weight decay on matrices only, no warm-up, no clipping."""

TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "comm": {"hidden": 256, "heads": 4, "kv_heads": 2, "experts": 32, "top_k": 8, "ffn": 128, "batch": 8},
    "compute": {"hidden": 512, "heads": 8, "kv_heads": 4, "experts": 8, "top_k": 2, "ffn": 1024, "batch": 4},
}
"""Communication-heavy: many small experts, 8 per token. Compute-heavy: few wide experts, as in Mixtral. A step takes
one to two seconds on a core with 75 GFLOP/s."""
