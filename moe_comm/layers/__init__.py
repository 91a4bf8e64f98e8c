"""Router, experts, shared experts, and the MoE layer that joins them with a dispatcher."""

from moe_comm.kernels.activations import ACTIVATIONS, Activation, clamped_swiglu, glu
from moe_comm.layers.experts import Experts
from moe_comm.layers.grad_check import CheckGradsConfig, GradReport, check_grads, run_check_grads
from moe_comm.layers.grouped_mlp import grouped_mlp
from moe_comm.layers.losses import attach_loss
from moe_comm.layers.moe import MoEConfig, MoELayer, ZeroExperts
from moe_comm.layers.router import Router, RouterConfig, Routing
from moe_comm.layers.shared import SharedExpert
from moe_comm.layers.state import gather_state_dict, load_full_state_dict, single_rank_copy

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "CheckGradsConfig",
    "Experts",
    "GradReport",
    "MoEConfig",
    "MoELayer",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedExpert",
    "ZeroExperts",
    "attach_loss",
    "check_grads",
    "clamped_swiglu",
    "gather_state_dict",
    "glu",
    "grouped_mlp",
    "load_full_state_dict",
    "run_check_grads",
    "single_rank_copy",
]
