from moe_comm.integrations.axolotl.args import MoeCommArgs as MoeCommArgs
from moe_comm.integrations.axolotl.plugin import MoeCommPlugin as MoeCommPlugin
