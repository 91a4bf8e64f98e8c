"""Settings of ``moe-comm bench train``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from moe_comm.bench.common.settings import check_choice
from moe_comm.errors import ConfigError

Sharding = Literal["replicate", "zero1", "fsdp"]
TRAIN_PEERS = ("hf_ep_fsdp2", "hf_fsdp2", "hf_ddp", "deepspeed_autoep", "one_process", "hf_one_process")
RIVALS = ("hf_ep_fsdp2", "hf_fsdp2", "deepspeed_autoep")
"""Peers that distribute experts or shard weights over ranks. ``speedup`` is relative to the fastest of them, and
``speedup_over_all`` to the fastest of all peers, including those that need the full model on each rank."""


@dataclass(frozen=True)
class TrainBench:
    """One Qwen3-MoE model in fp32 and one global batch for all contestants.

    Args:
        ranks: processes on this host, each with its own cores. This library distributes batch and experts over them.
        hidden, layers, heads, kv_heads, experts, top_k, ffn, vocab: sizes of the model; ffn is the width of an expert.
        seq_len: tokens per sequence.
        batch: sequences per rank and step.
        sharding: data-parallel sharding of this library, see ``train.sections.ParallelSection``.
        warmup: number of discarded steps.
        steps: number of steps whose median is reported.
        peers: training loops to compare with. Those that are not installed are skipped and reported.
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
    sharding: Sharding = "replicate"
    warmup: int = 2
    steps: int = 7
    seed: int = 0
    peers: tuple[str, ...] = TRAIN_PEERS

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in ("seed", "warmup") else 1
            if field.type == "int" and value < low:
                raise ConfigError(f"{field.name} must be at least {low}; got {value}")
        check_choice("sharding", self.sharding, get_args(Sharding))
        for peer in self.peers:
            check_choice("peer", peer, TRAIN_PEERS)
        if self.vocab < 257:
            raise ConfigError(f"vocab must be at least 257 (256 bytes and the end of text); got {self.vocab}")
        if self.experts % self.ranks:
            raise ConfigError(
                f"experts must be divisible by ranks for the peers; got {self.experts} experts, {self.ranks} ranks"
            )

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.ranks * self.batch * self.seq_len

    @property
    def overrides(self) -> list[str]:
        """Overrides of a ``TrainConfig`` for ``train.config.load``.

        The auxiliary loss is 0, because that of Hugging Face is a different function of the routing.
        """
        return [
            f"run.seed={self.seed}",
            f"run.steps={self.warmup + self.steps}",
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
        """Return the settings as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
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
