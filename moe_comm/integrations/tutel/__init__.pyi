from moe_comm.integrations.tutel.layer import moe_layer as moe_layer
