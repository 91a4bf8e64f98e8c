from moe_comm.integrations.axolotl.plugin import MoeCommArgs as MoeCommArgs, MoeCommPlugin as MoeCommPlugin
