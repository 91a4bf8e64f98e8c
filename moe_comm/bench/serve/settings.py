"""Settings of ``moe-comm bench serve``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from moe_comm.bench.common.settings import Experts, Ffn, Hidden, Seed, TopK, check_choice, check_ranges
from moe_comm.errors import ConfigError
from moe_plan.serving.trace import TraceRequest, read_trace

CONTESTANTS = ("disaggregated", "micro_batches", "colocated", "replicas", "hugging_face")
PAGE = 64
"""Tokens of a page of the KV cache."""
MOST_KV_TOKENS, MOST_MICRO_BATCHES = 1 << 16, 4
FOR_WEIGHTS = 0.8
"""Share of limited memory that weights may take."""
TRACE = "poisson:rate=16,count=16,prompt=48,output=16"


@dataclass(frozen=True)
class ServeBench:
    """Settings of ``moe-comm bench serve``. Weights and tokens are fp32, on CPU ranks."""

    trace: Annotated[
        str,
        typer.Option(
            metavar="TRACE",
            help="Requests: JSON lines, or poisson:rate=R,count=N,prompt=N,output=N,seed=N, as for plan --serve.",
        ),
    ] = TRACE
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A folder with safetensors, or a name on the hub.  [default: Qwen3-MoE with random weights]",
        ),
    ] = None
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start; under torchrun, the number of its ranks.")] = 2
    attention: Annotated[int, typer.Option(min=1, help="Ranks that run the model if the others have the experts.")] = 1
    micro_batches: Annotated[
        int,
        typer.Option(
            min=2, max=MOST_MICRO_BATCHES, help="Forward passes at the same time of contestant micro_batches."
        ),
    ] = 2
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4
    hidden: Hidden = 256
    ffn: Ffn = 256
    experts: Experts = 16
    top_k: TopK = 2
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens in the KV cache of a rank; 0: for all requests, at most 65,536.")
    ] = 0
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a rank in a forward pass.")] = 512
    memory_mib: Annotated[
        float,
        typer.Option(
            min=0,
            help="Memory of a rank for weights, KV cache, activations and pages of files, limited by a cgroup (root). "
            "hugging_face then has its weights in a file. 0: no limit.",
        ),
    ] = 0.0
    contestants: Annotated[
        tuple[str, ...],
        typer.Option("--contestant", help=f"How to serve: {', '.join(CONTESTANTS)}; repeatable.  [default: all]"),
    ] = CONTESTANTS
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured runs of each contestant.")] = 6
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.contestants:
            check_choice("contestant", name, CONTESTANTS)
        if len(set(self.contestants)) < len(self.contestants) or not self.contestants:
            raise ConfigError(f"contestants must be different names, at least one; got {self.contestants}")
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise ConfigError(f"micro_batches must be at most {MOST_MICRO_BATCHES}; got {self.micro_batches}")
        if not self.attention < self.ranks:
            raise ConfigError(f"attention must be less than the {self.ranks} ranks; got {self.attention}")
        if self.model is None and not max(self.top_k, self.ranks) <= self.experts:
            raise ConfigError(f"experts must be at least top_k and ranks; got {self.experts}")
        if self.hidden % HEAD_DIM:
            raise ConfigError(f"hidden must be a multiple of {HEAD_DIM}; got {self.hidden}")

    def requests(self) -> list[TraceRequest]:
        """Return the requests by arrival.

        Raises:
            ConfigError: the trace is invalid, or a request does not fit the KV cache.
            OSError: the file cannot be read.
        """
        requests = read_trace(self.trace)
        longest, kv_tokens = max(map(tokens_of, requests)), self.pages(requests) * PAGE
        if longest > kv_tokens:
            raise ConfigError(f"a request has {longest:,} tokens, but the KV cache of a rank {kv_tokens:,}")
        return requests

    def pages(self, requests: list[TraceRequest]) -> int:
        """Return the pages of the KV cache of a rank."""
        if self.kv_tokens:
            return -(-self.kv_tokens // PAGE)
        return min(sum(-(-tokens_of(one) // PAGE) + 1 for one in requests), MOST_KV_TOKENS // PAGE)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self) | {"contestants": list(self.contestants)}


HEAD_DIM = 32
"""Of the random model."""


def tokens_of(request: TraceRequest) -> int:
    """Return the tokens of a request in the KV cache."""
    return request.prompt_tokens + request.output_tokens
