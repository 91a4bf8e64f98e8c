"""Expert-parallel layers in any training loop: gradients, norms and state dicts equal to those of one process.

torch's data-parallel wrappers, optimizers and checkpoints treat each parameter as replicated, and use the values of
rank 0. Expert parameters are not replicated: each rank of the expert-parallel group holds different experts under the
same names. This package handles the difference:

    module          content
    expert_shard    tensor subclass for one rank's part: its norm covers all ranks, DCP saves all parts
    attach          installs the hooks on the experts module when a layer is built or swapped
    mark            mark_experts: the same for the experts of a user's own module
    gradients       one convention, sum or mean, for the gradients of expert and replicated parameters
    audit           compares the gradients of backward and of the optimizer, and raises if they are inconsistent
    equal_tensors   comparison of tensors between ranks, by checksums
    replicas        comparison of the weights that ranks must hold equally, check_replicas
    optimizers      optimizer hooks for expert parameters
    sync            sync_gradients, clip_grad_norm_, prepare_ddp, prepare_fsdp
    state           state_dict, load_state_dict, optimizer_state_dict, load_optimizer_state_dict, gather_gradients
"""

from __future__ import annotations

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
