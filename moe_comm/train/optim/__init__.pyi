from moe_comm.train.optim.base import (
    Optimizer as Optimizer,
    learning_rate as learning_rate,
)
from moe_comm.train.optim.elementwise import (
    SGD as SGD,
    AdamW as AdamW,
)
from moe_comm.train.optim.factory import make_optimizer as make_optimizer
from moe_comm.train.optim.lamb import LAMB as LAMB
from moe_comm.train.optim.muon import (
    Muon as Muon,
    newton_schulz as newton_schulz,
)
from moe_comm.train.sections import OptimizerOptions as OptimizerOptions
