from moe_comm.train.parallel.compress import GradientTraffic as GradientTraffic
from moe_comm.train.parallel.norm import (
    clip_ as clip_,
    global_norm as global_norm,
)
from moe_comm.train.parallel.parameters import (
    LocalParameter as LocalParameter,
    OwnedParameter as OwnedParameter,
    local_parameters as local_parameters,
)
from moe_comm.train.parallel.strategy import DataParallel as DataParallel
from moe_comm.train.sections import (
    DataParallelOptions as DataParallelOptions,
    GradientOverlap as GradientOverlap,
)
