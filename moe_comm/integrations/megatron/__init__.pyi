from moe_comm.integrations.megatron.dispatcher import MoeCommTokenDispatcher as MoeCommTokenDispatcher
from moe_comm.integrations.megatron.layer import (
    MoeCommMoELayer as MoeCommMoELayer,
    replace_dispatchers as replace_dispatchers,
)
