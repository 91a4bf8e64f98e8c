"""Start ranks on this host, or join those that torchrun started."""

from __future__ import annotations

from moe_comm.runtime.launch.agent import Interrupted, RankFailed, error_class
from moe_comm.runtime.launch.launcher import (
    AGENT_STORE_VARIABLE,
    MAX_RANKS,
    SAME_SIGNAL_S,
    STORE_VARIABLE,
    LocalRanks,
    available_cores,
    init_ranks,
    launch,
    ranks_to_use,
    under_torchrun,
    within_quota,
)
from moe_comm.runtime.launch.rank_main import RESTARTS_VARIABLE

__all__ = [
    "AGENT_STORE_VARIABLE",
    "MAX_RANKS",
    "RESTARTS_VARIABLE",
    "SAME_SIGNAL_S",
    "STORE_VARIABLE",
    "Interrupted",
    "LocalRanks",
    "RankFailed",
    "available_cores",
    "error_class",
    "init_ranks",
    "launch",
    "ranks_to_use",
    "under_torchrun",
    "within_quota",
]
