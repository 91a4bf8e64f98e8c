from moe_comm.integrations.sglang.dispatcher import MoeCommDispatcher as MoeCommDispatcher
from moe_comm.integrations.sglang.hooks import plugin as plugin
