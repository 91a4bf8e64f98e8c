"""What ``moe-comm bench train`` trains, and whom it compares with."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from moe_comm.errors import ConfigError

Sharding = Literal["replicate", "zero1", "fsdp"]
TRAIN_PEERS = ("hf_ep_fsdp2", "hf_fsdp2", "hf_ddp", "deepspeed_autoep", "one_process", "hf_one_process")
RIVALS = ("hf_ep_fsdp2", "hf_fsdp2", "deepspeed_autoep")
"""Those that spread experts over ranks, or their weights: ``speedup`` is over the best of these. A model that fits
whole into every rank needs neither them nor us; ``speedup_over_all`` counts those ways too."""


@dataclass(frozen=True)
class TrainBench:
    """One model of Qwen3-MoE's architecture in fp32, and one global batch, for all contestants.

    ranks: processes on this host, each with its own cores. Ours spreads batch and experts over all of them.
    hidden, layers, heads, kv_heads, experts, top_k, ffn, vocab: of the model; ffn is the width of one expert.
    seq_len, batch: tokens of a sequence, and sequences of one rank in a step.
    sharding: of ours; see ``train.sections.ParallelSection``.
    warmup, steps: rounds thrown away, and rounds whose median is reported.
    peers: whom to compare with; one that is not installed is skipped and said so.
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
        for name, value, known in (("sharding", self.sharding, get_args(Sharding)),):
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")
        for peer in self.peers:
            if peer not in TRAIN_PEERS:
                raise ConfigError(f"unknown peer {peer!r}; known: {', '.join(TRAIN_PEERS)}")
        if self.vocab < 257:
            raise ConfigError(f"vocab must be at least 257, the bytes and the end of a text; got {self.vocab}")
        if self.experts % self.ranks:
            raise ConfigError(
                f"experts must divide by ranks, as the peers need it; got {self.experts} experts, {self.ranks} ranks"
            )

    @property
    def tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.ranks * self.batch * self.seq_len

    @property
    def overrides(self) -> list[str]:
        """The part of a ``TrainConfig`` that these settings say, as ``train.config.load`` takes it.

        No auxiliary loss: Hugging Face's is another function of the routing, so contestants could not be compared.
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
        """Plain values, for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"peers": list(self.peers), "dtype": "float32"}


MODEL_KEYS = ("hidden", "layers", "heads", "kv_heads", "experts", "top_k", "ffn", "vocab")
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
"""AdamW, the same for all: decay on matrices, no warm-up, no clipping."""

TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "comm": {"hidden": 256, "heads": 4, "kv_heads": 2, "experts": 32, "top_k": 8, "ffn": 128, "batch": 8},
    "compute": {"hidden": 512, "heads": 8, "kv_heads": 4, "experts": 8, "top_k": 2, "ffn": 1024, "batch": 4},
}
"""Communication-heavy: eight of many small experts a token, which travels to all of them. Compute-heavy: few wide
experts, as in Mixtral. One to two seconds a step on a core of 75 GFLOP/s."""
