from moe_comm.integrations.megatron.dispatcher import (
    MoeCommMoELayer as MoeCommMoELayer,
    MoeCommTokenDispatcher as MoeCommTokenDispatcher,
    replace_dispatchers as replace_dispatchers,
)
