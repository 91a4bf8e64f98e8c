from moe_comm.integrations.torchtitan.overrides import (
    MoeCommSelectiveAC as MoeCommSelectiveAC,
    MoeCommTokenDispatcher as MoeCommTokenDispatcher,
)
