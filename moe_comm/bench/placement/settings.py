"""Settings and synthetic routing of ``moe-comm bench placement``. Every rank generates the routing of all ranks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from moe_comm.bench.common.settings import (
    AnyHosts,
    BatchShape,
    Experts,
    Ffn,
    Hidden,
    LinkGbit,
    Ranks,
    Tokens,
    TopK,
    Warmup,
    check_cores_per_rank,
)
from moe_comm.errors import ConfigError
from moe_comm.topology.balance import Balance
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import DecisionSettings

if TYPE_CHECKING:
    from torch import Tensor


HOT = 4
"""Number of experts of rank 0 that get the share ``PlacementBench.hot``."""


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of a row, and of moving an expert."""

    per_row: float
    to_move: float


@dataclass(frozen=True)
class PlacementBench(BatchShape):
    """Settings of the benchmark. ``iterations`` is the number of measured steps, 0: 30.

    Args:
        hot: share of the (token, slot) pairs whose experts are the first ``HOT``; the others are uniform. 0: ``zipf``.
        zipf: exponent s of Zipf's law: the n-th most popular expert is chosen in proportion to n ** -s. 0: uniform.
        window: number of steps of an interval that a decision uses, at most ``every``. A decision uses this interval
            and the one before, or up to 8 intervals after wrong switches.
    """

    ranks: Ranks = 4
    tokens: Tokens = 512
    hidden: Hidden = 256
    ffn: Ffn = 512
    experts: Experts = 32
    top_k: TopK = 4
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the popularity of experts; 0: uniform.")] = 1.0
    hot: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the slots of tokens for 4 experts of rank 0; 0: Zipf's law.")
    ] = 0.0
    drift: Annotated[
        int, typer.Option(min=0, help="Steps after which two experts exchange their popularity; 0: never.")
    ] = 0
    every: Annotated[int, typer.Option(min=1, help="Steps between decisions.")] = 10
    window: int = 5
    threshold: Annotated[float, typer.Option(min=0, help="Minimum share of the busiest rank's rows to save.")] = 0.05
    slots: Annotated[
        int,
        typer.Option(
            min=0, help="More slots of each rank for EPLB's replicas, whose rows are counted but not run; 0: none."
        ),
    ] = 1
    balance: Annotated[
        float | None,
        typer.Option(help="Also lend experts within a step: most rows of a rank, as a multiple of the mean."),
    ] = None
    hosts: AnyHosts = 1
    link_gbit: LinkGbit = 1.0
    cores_per_rank: Annotated[
        float | None,
        typer.Option(help="Processor time of each rank in cores, so that ranks that wait leave it idle; needs root."),
    ] = None
    warmup: Warmup = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.tokens, self.window) < 1:
            raise ConfigError(f"tokens and window must be at least 1; got {self.tokens} and {self.window}")
        if self.window > self.every:
            raise ConfigError(f"window {self.window} must be at most every {self.every}: a decision sees no more steps")
        if not 0 <= self.zipf <= 10 or not 0 <= self.threshold < 1 or not 0 <= self.hot <= 1:
            raise ConfigError(
                "zipf must be from 0 to 10, threshold from 0 to below 1, and hot from 0 to 1; "
                f"got {self.zipf}, {self.threshold}, {self.hot}"
            )
        if self.experts % self.ranks or self.ranks < 2:
            raise ConfigError(f"ranks must be at least 2 and divide {self.experts} experts; got {self.ranks}")
        if self.hot and not (self.top_k <= HOT <= self.experts // self.ranks and self.top_k <= self.experts - HOT):
            raise ConfigError(
                f"hot needs at most {HOT} experts per token, and at least {HOT} of each rank; got top_k {self.top_k}, "
                f"{self.experts} experts on {self.ranks} ranks"
            )
        check_cores_per_rank(self.cores_per_rank, self.ranks)
        if self.ranks % self.hosts:
            raise ConfigError(f"ranks must be divisible by hosts; got {self.ranks} ranks, {self.hosts} hosts")
        if self.balance is not None:
            Balance(self.balance)  # raises ConfigError
        most = self.experts - self.experts // self.ranks
        if not 0 <= self.slots <= most:
            raise ConfigError(f"slots must be from 0 to the {most} experts of other ranks; got {self.slots}")

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return self.iterations or 30

    def decisions(self, costs: Costs) -> DecisionSettings:
        """Return the settings of the decisions."""
        return DecisionSettings(
            every=self.every,
            threshold=self.threshold,
            window=self.window,
            seconds_per_row=costs.per_row,
            seconds_to_move=costs.to_move,
        )

    def popularity(self, step: int) -> list[float]:
        """Return the weight of each expert in a step."""
        rng = random.Random(self.seed)
        weights = [(index + 1) ** -self.zipf for index in range(self.experts)]
        rng.shuffle(weights)
        for _ in range(step // self.drift if self.drift else 0):
            a, b = rng.sample(range(self.experts), 2) if self.experts > 1 else (0, 0)
            weights[a], weights[b] = weights[b], weights[a]
        return weights

    def ids(self, step: int, rank: int) -> Tensor:
        """Return K distinct experts of each token of a rank, [T, K] int64, drawn by popularity."""
        import torch

        generator = torch.Generator().manual_seed((self.seed * 4096 + rank) * (1 << 20) + step)
        noise_TE = torch.rand(self.tokens, self.experts, generator=generator, dtype=torch.float64, device="cpu")
        if self.hot:
            hot_TK, cold_TK = noise_TE[:, :HOT].argsort(1), HOT + noise_TE[:, HOT:].argsort(1)
            slot_K = torch.arange(self.top_k, dtype=torch.int64, device="cpu")
            is_hot_TK = torch.rand(self.tokens, self.top_k, generator=generator, dtype=torch.float64, device="cpu")
            hot_T1 = (is_hot_TK < self.hot).sum(1, keepdim=True)
            ids_TK = cold_TK.gather(1, (slot_K - hot_T1).clamp(min=0))
            return torch.where(slot_K < hot_T1, hot_TK[:, : self.top_k], ids_TK)
        # The largest sums of log weights and Gumbel noise are a sample without replacement.
        keys_TE = torch.tensor(self.popularity(step), dtype=torch.float64, device="cpu").log() - (-noise_TE.log()).log()
        return keys_TE.topk(self.top_k, dim=1).indices

    def loads(self, step: int) -> list[int]:
        """Return the rows of each expert in a step, over all ranks."""
        import torch

        ids = torch.cat([self.ids(step, rank).flatten() for rank in range(self.ranks)])
        loads: list[int] = torch.bincount(ids, minlength=self.experts).tolist()
        return loads


def eplb(loads_E: list[int], current: Placement) -> Placement:
    """Return the placement of EPLB (DeepSeek) without replicas: its balanced packing of experts into ranks.

    The homes in ``current`` do not matter, so most experts move.
    """
    homes = [0] * len(loads_E)
    for rank, experts in enumerate(eplb_replicas(loads_E, current.world, 0)):
        for expert in experts:
            homes[expert] = rank
    return current.with_owners([(home,) for home in homes])


def eplb_replicas(loads_E: list[int], world: int, slots: int) -> list[list[int]]:
    """Return the experts of each rank's replicas by EPLB, with ``slots`` more on each rank than its share of experts.

    Each spare slot goes to the expert with the most rows per replica. Replicas by descending rows then go to the rank
    with the least rows that has a free slot. An expert can be on a rank twice, and no replica is its home.
    """
    counts = [1] * len(loads_E)
    for _ in range(slots * world):
        counts[max(range(len(loads_E)), key=lambda expert: loads_E[expert] / counts[expert])] += 1
    free, totals = [len(loads_E) // world + slots] * world, [0.0] * world
    packed: list[list[int]] = [[] for _ in range(world)]
    replicas = [(load / count, expert) for expert, (load, count) in enumerate(zip(loads_E, counts, strict=True))]
    for rows, expert in sorted(replicas, key=lambda replica: -replica[0]):
        for _ in range(counts[expert]):
            rank = min((rank for rank in range(world) if free[rank]), key=totals.__getitem__)
            packed[rank].append(expert)
            totals[rank] += rows
            free[rank] -= 1
    return packed


def rows_of_replicas(loads_E: list[int], packed: list[list[int]]) -> list[float]:
    """Return the rows of each rank, if the rows of each expert are divided evenly over its replicas."""
    counts = Counter(chain(*packed))
    return [sum(loads_E[expert] / counts[expert] for expert in experts) for experts in packed]
