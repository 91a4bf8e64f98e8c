"""Construct an optimizer from options."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.topology import ParallelMesh
from moe_comm.train.optim.base import Optimizer
from moe_comm.train.optim.elementwise import SGD, AdamW
from moe_comm.train.optim.lamb import LAMB
from moe_comm.train.optim.muon import Muon
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_comm.train.sections import OptimizerOptions

_KINDS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "lamb": LAMB, "muon": Muon}


def make_optimizer(owned: Sequence[OwnedParameter], mesh: ParallelMesh, options: OptimizerOptions) -> Optimizer:
    """Return an optimizer of the shards ``DataParallel.owned()``. ``options`` must be equal on all ranks."""
    return _KINDS[options.kind](owned, mesh, options)
