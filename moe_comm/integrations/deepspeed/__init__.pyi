from moe_comm.integrations.deepspeed.transport import swap_transport as swap_transport
