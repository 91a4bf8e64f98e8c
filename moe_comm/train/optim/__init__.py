"""Optimizers on sharded parameters, and learning rate schedules."""

from moe_comm.train.optim.base import Optimizer, OptimizerOptions
from moe_comm.train.optim.elementwise import SGD, AdamW
from moe_comm.train.optim.factory import make_optimizer
from moe_comm.train.optim.lamb import LAMB
from moe_comm.train.optim.muon import Muon, newton_schulz
from moe_comm.train.optim.schedule import LRSchedule, learning_rate

__all__ = [
    "LAMB",
    "SGD",
    "AdamW",
    "LRSchedule",
    "Muon",
    "Optimizer",
    "OptimizerOptions",
    "learning_rate",
    "make_optimizer",
    "newton_schulz",
]
