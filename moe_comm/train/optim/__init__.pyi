from moe_comm.train.optim.optimizers import (
    LAMB as LAMB,
    SGD as SGD,
    AdamW as AdamW,
    Muon as Muon,
    Optimizer as Optimizer,
    learning_rate as learning_rate,
    make_optimizer as make_optimizer,
    newton_schulz as newton_schulz,
)
from moe_comm.train.sections import OptimizerOptions as OptimizerOptions
