"""Inputs of ``moe-comm plan``: budgets of memory, recorded loads of experts, and lengths of documents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from moe_comm.cli.options import load
from moe_comm.errors import ConfigError
from moe_comm.runtime.untrusted import byte_count

if TYPE_CHECKING:
    from moe_plan.model.lending import Lending
    from moe_plan.model.lengths import DocumentLengths
    from moe_plan.model.load import ExpertLoads, LoadPlacement
    from moe_plan.model.memory import MemoryPolicy

OFFLOAD_RATE = 1.0
"""Default of ``--offload-rate``, GB/s."""


def memory_policy(budgets: dict[str, str | None], weights: bool, rate: float | None) -> MemoryPolicy:
    """Return the memory policy with the budgets of offloaded state and activations, and a rate of ``rate`` GB/s."""
    from moe_plan.model.memory import MemoryPolicy

    if not any(budgets.values()) and not weights:
        if rate is not None:
            raise ConfigError("--offload-rate needs --offload-budget, --offload-activations or --offload-weights")
        return MemoryPolicy()
    rate = OFFLOAD_RATE if rate is None else rate
    if not 0 < rate < math.inf:
        raise ConfigError(f"--offload-rate must be a finite number above 0; got {rate}")
    sizes: list[int | None] = []
    for name, budget in budgets.items():
        try:
            sizes.append(None if budget is None else byte_count(budget))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    return MemoryPolicy(offload=sizes[0], activations=sizes[1], weights=weights, offload_rate=rate * 1e9)


def recorded_loads(run: Path, placement: LoadPlacement | None, lending: Lending) -> ExpertLoads:
    """Return the recorded loads of a run with a placement. lending: its costs."""
    from moe_plan.model.load import ExpertLoads
    from moe_plan.whatif.placement import read_loads, real_experts

    return ExpertLoads.of(read_loads(run), placement or "fixed", real_experts(run), lending)


def document_lengths(text: str, seq_len: int, global_batch: int) -> DocumentLengths:
    """Return the documents of a histogram (.json), a folder of prepared text, or a configuration of train."""
    from moe_plan.model.lengths import DocumentLengths, read_histogram, sample_size

    count, path = sample_size(global_batch), Path(text)
    if path.suffix == ".json" and not path.is_dir():
        return DocumentLengths.drawn(read_histogram(path), seq_len, count)
    sequences = load("moe_comm.train.plan_config", "train").lengths_of(text, seq_len, global_batch, count)
    return DocumentLengths(sequences)
