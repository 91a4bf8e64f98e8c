from moe_comm.integrations.torchtitan.dispatcher import (
    MoeCommSelectiveAC as MoeCommSelectiveAC,
    MoeCommTokenDispatcher as MoeCommTokenDispatcher,
)
