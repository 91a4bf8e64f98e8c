"""From options to an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer, OptimizerOptions
from moe_comm.train.optim.elementwise import SGD, AdamW
from moe_comm.train.optim.lamb import LAMB
from moe_comm.train.optim.muon import Muon
from moe_comm.train.parallel.owned import Owned

_KINDS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "lamb": LAMB, "muon": Muon}


def make_optimizer(owned: Sequence[Owned], mesh: ParallelMesh, options: OptimizerOptions) -> Optimizer:
    """The optimizer of what this rank owns (``DataParallel.owned``), alike on every rank."""
    return _KINDS[options.kind](owned, mesh, options)
