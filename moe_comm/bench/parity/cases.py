"""The mappings that ``moe-comm parity`` compares with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

PIPELINES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class ParityCase:
    """One mapping.

    Attributes:
        settings: overrides of the common configuration.
        mode: "dropless", "capacity (batch)" (capacity over the micro-batch) or "capacity (rank)" (capacity per rank).
            The last one has no parity, because it depends on the distribution of the tokens.
        common: overrides that also apply to the reference process.
        hosts: number of hosts (network namespaces) that the ranks are distributed over.
    """

    name: str
    ranks: int
    settings: tuple[str, ...] = ()
    mode: str = "dropless"
    common: tuple[str, ...] = ()
    hosts: int = 1

    @property
    def has_parity(self) -> bool:
        return self.mode != "capacity (rank)"

    @property
    def overrides(self) -> list[str]:
        """Overrides for ``train.config.load``."""
        scope = {"capacity (batch)": "batch", "capacity (rank)": "rank"}.get(self.mode)
        drops = [] if scope is None else ["model.capacity=1.0", f"model.capacity_scope={scope}"]
        return [f"parallel.ranks={self.ranks}", *self.settings, *self.common, *drops]


def _case(
    name: str,
    ranks: int,
    mode: str = "dropless",
    common: Sequence[str] = (),
    placement: Sequence[str] = (),
    **parallel: Any,
) -> ParityCase:
    settings = (*(f"parallel.{key}={value}" for key, value in parallel.items()), *placement)
    return ParityCase(name, ranks, settings, mode, tuple(common))


TIED = ("model.tie=true",)
DENSE_START = ("model.first_dense=2", "model.dense_ffn=96")
"""The first stage of two has no experts."""
INTERLEAVED: dict[str, Any] = {"interleave": "true", "overlap_chunks": 2, "backend": "all_to_all"}
DECISIONS = ("placement.every=4", "placement.window=4", "placement.threshold=0.0")


CASES: tuple[ParityCase, ...] = (
    _case("tp 2", 2, tp=2, ep=1),
    _case("tp 2, overlapped", 2, common=DENSE_START, tp=2, ep=1, overlap_chunks=2),
    _case("cp 2, ulysses", 2, cp=2, ep=1),
    _case("cp 2, ring", 2, cp=2, ep=1, context="ring"),
    _case("cp 2, token ring", 2, cp=2, ep=1, context="token_ring"),
    _case("dp 2", 2, ep=1),
    _case("dp 2, zero1", 2, ep=1, sharding="zero1"),
    _case("dp 2, zero1, overlapped gradients", 2, ep=1, sharding="zero1", overlap_gradients="on"),
    _case("dp 2, fsdp", 2, ep=1, sharding="fsdp"),
    _case("ep 2", 2, ep=2),
    _case("ep 2, interleaved micro-batches", 2, ep=2, interleave="true", overlap_chunks=2),
    _case("ep 2, all-to-all in chunks", 2, ep=2, backend="all_to_all", overlap_chunks=2),
    _case("etp 2", 2, ep=1, etp=2),
    _case("ep 2, fsdp", 2, ep=2, sharding="fsdp"),
    _case("ep 2, experts that move", 2, ep=2, placement=("placement.kind=relocate", *DECISIONS)),
    *(_case(f"pp 2, {schedule}", 2, pp=2, schedule=schedule) for schedule in PIPELINES),
    _case("pp 2, 1f1b, tied embedding", 2, common=TIED, pp=2),
    _case("pp 2, zbv, tied embedding", 2, common=TIED, pp=2, schedule="zbv"),
    _case("pp 2, uneven stages", 2, pp=2, schedule="interleaved_1f1b", stage_layers=[1, 0, 2, 1]),
    _case("pp 2, a stage without experts", 2, common=DENSE_START, pp=2),
    _case("ep 2, capacity", 2, "capacity (batch)", ep=2),
    _case("tp 2, ep 2, capacity", 2, "capacity (batch)", tp=2, ep=2),
    _case("cp 2, ring, ep 2, capacity", 2, "capacity (batch)", cp=2, context="ring", ep=2),
    _case("ep 2, capacity by rank", 2, "capacity (rank)", ep=2),
    _case("ep 4", 4, ep=4),
    _case("ep 2, edp 2, fsdp", 4, ep=2, sharding="fsdp"),
    _case("dp 4, fsdp in 2 blocks", 4, ep=1, sharding="fsdp", dp_replicate=2, overlap_gradients="on"),
    _case("tp 2, dp 2 | ep 4", 4, tp=2, ep=4),
    _case("tp 2, cp 2 ring | etp 2, ep 2", 4, tp=2, cp=2, context="ring", etp=2, ep=2),
    _case("cp 4, ring | ep 4", 4, cp=4, context="ring", ep=4),
    _case("cp 4, ulysses | ep 2, zero1", 4, cp=4, ep=2, sharding="zero1"),
    _case("pp 2, dp 2 | ep 2, 1f1b, fsdp", 4, pp=2, dp=2, ep=2, sharding="fsdp"),
    _case("ep 2, edp 2, fsdp, interleaved", 4, ep=2, sharding="fsdp", **INTERLEAVED),
    _case("pp 2, dp 2 | ep 2, zero_bubble, interleaved", 4, pp=2, ep=2, schedule="zero_bubble", **INTERLEAVED),
    _case("pp 2, dp 2 | ep 2, zbv, zero1", 4, pp=2, dp=2, ep=2, schedule="zbv", sharding="zero1"),
    _case("pp 2, dp 2 | ep 2, zbv, overlapped gradients", 4, pp=2, dp=2, ep=2, schedule="zbv", overlap_gradients="on"),
    _case("pp 2, tp 2 | ep 2, dualpipev", 4, pp=2, tp=2, ep=2, schedule="dualpipev"),
    _case(
        "pp 2, tp 2 | ep 2, dualpipev, interleaved",
        4,
        common=("data.micro_batches=8",),
        pp=2,
        tp=2,
        ep=2,
        schedule="dualpipev",
        **INTERLEAVED,
    ),
    _case("pp 2, dp 2 | ep 2, zero1, tied", 4, common=TIED, pp=2, dp=2, ep=2, sharding="zero1"),
    _case("pp 2, cp 2 token ring | ep 2", 4, pp=2, cp=2, ep=2, context="token_ring"),
    _case("pp 2, cp 2 ring | etp 2", 4, pp=2, cp=2, ep=1, etp=2, context="ring"),
    _case("pp 2, tp 2 | etp 2, zbv", 4, pp=2, tp=2, ep=1, etp=2, schedule="zbv"),
    _case("pp 4, 1f1b", 4, pp=4),
    replace(_case("ep 4, hierarchical, 2 hosts", 4, ep=4, backend="hierarchical"), hosts=2),
    _case("tp 2, dp 2 | ep 4, capacity", 4, "capacity (batch)", tp=2, ep=4),
    _case("tp 2, cp 2, dp 2 | ep 8", 8, tp=2, cp=2, dp=2, ep=8),
    _case("tp 2, cp 2 ring, dp 2 | ep 8, fsdp", 8, tp=2, cp=2, dp=2, ep=8, context="ring", sharding="fsdp"),
    _case("tp 4, dp 2 | etp 2, ep 4", 8, tp=4, dp=2, etp=2, ep=4),
    _case("pp 2, tp 2, dp 2 | ep 4", 8, pp=2, tp=2, dp=2, ep=4),
    _case("pp 2, tp 2, dp 2 | ep 4, zbv, zero1", 8, pp=2, tp=2, dp=2, ep=4, schedule="zbv", sharding="zero1"),
)
"""Each kind of parallelism, then combinations on 4 and 8 ranks."""

QUICK = (
    "tp 2",
    "tp 2, overlapped",
    "cp 2, ulysses",
    "cp 2, ring",
    "dp 2, fsdp",
    "ep 2",
    "ep 2, interleaved micro-batches",
    "cp 2, token ring",
    "etp 2",
    "pp 2, 1f1b",
    "pp 2, zbv",
    "pp 2, 1f1b, tied embedding",
    "pp 2, uneven stages",
    "ep 2, capacity",
    "tp 2, dp 2 | ep 4",
    "tp 2, cp 2 ring | etp 2, ep 2",
)
"""Names of the cases for a test run."""
