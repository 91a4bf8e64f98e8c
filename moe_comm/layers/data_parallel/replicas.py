"""Compare weights that several ranks hold, and raise on all ranks if they differ.

    what                                                   compared over                  when
    all weights of a loaded model                          the group of the swap          swap_moe, swap_linears,
                                                                                          swap_attention
    replicated parameters and persistent buffers           the ranks whose gradients      prepare_fsdp; sync_gradients,
                                                           are reduced                    call 1, 2, 4, 8, ...
    experts                                                the ranks with the same ones   the same; first call under DDP
    weight of one router, one parameter of its experts     the same                       optimizer step 1, 2, 4, 8, ...
    all of them                                            a given group                  check_replicas

Each rank reads its weights once and sends 520 bytes (``equal_tensors``).

Not compared: tensors without memory (meta, fake, freed by FSDP 1), ``DTensor`` that are sharded, tensors of other
formats (sparse, subclasses that contain several tensors), parameters that tensor parallelism splits, buffers that are
not in state dicts, running statistics of batch norms, and buffers that a module lists in its attribute ``counters``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _NormBase  # no public base of the norms with running statistics

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import channel_of, group_or_default
from moe_comm.errors import MoeCommError
from moe_comm.layers.data_parallel.attach import expert_modules, expert_parameters
from moe_comm.layers.data_parallel.equal_tensors import DRIFTED, SAME_START, compare_replicas, compare_tensors

_CALLS = "_moe_comm_weight_checks"


def check_replicas(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Compare the weights of all ranks, and raise if replicated weights, or replicas of experts, differ. Collective.

    Replicated parameters and persistent buffers must have the same bits on all ranks of ``group``, and experts on the
    ranks of ``group`` with the same experts. Each rank reads its weights once. ``sync_gradients`` does the same in its
    calls 1, 2, 4, 8, ... for a model. Buffers that a module lists in its attribute ``counters`` belong to one rank and
    are not compared, as those outside of state dicts and running statistics of batch norms.

    Args:
        group: ranks that train the model together; None: the default group. Without ``torch.distributed`` nothing
            happens.

    Raises:
        RankMismatch: weights differ; on every rank. The message names the first ones and the ranks.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    group = group_or_default(group)
    if group is not None and dist.get_world_size(group) > 1:
        _check(model, group, DRIFTED)


def check_loaded(model: nn.Module, channel: Channel, fault: MoeCommError | None = None) -> None:
    """Raise RankMismatch on every rank unless the unsplit weights of ``model`` are equal on all ranks. Collective."""
    compare_tensors(dict(replicated_tensors(model)), channel, "the weights of the model", SAME_START, fault)


def check_before_training(model: nn.Module, group: ProcessGroup) -> None:
    """Call ``check_replicas``, unless ``skip_gradient_checks`` has disabled it."""
    if all(gradients.checked for _, _, gradients in expert_modules(model)):
        _check(model, group, SAME_START)


def check_if_due(model: nn.Module, group: ProcessGroup) -> None:
    """Call ``check_replicas`` in calls 1, 2, 4, 8, ... for ``model``, unless it is disabled. Collective."""
    calls = vars(model).get(_CALLS, 0) + 1
    vars(model)[_CALLS] = calls
    if calls & (calls - 1) == 0 and all(gradients.checked for _, _, gradients in expert_modules(model)):
        _check(model, group, SAME_START if calls == 1 else DRIFTED)


def _check(model: nn.Module, group: ProcessGroup, advice: str) -> None:
    compare_tensors(dict(replicated_tensors(model)), channel_of(group), "the replicated weights", advice)
    replicas: dict[ProcessGroup, dict[str, Tensor]] = {}
    for name, module, gradients in expert_modules(model):
        if (edp := gradients.edp_group(group)) is not None:
            named = {f"{name}.{key}".lstrip("."): getattr(module, key) for key in gradients.shards.shardings}
            replicas.setdefault(edp, {}).update(named)
    if replicas:  # on all ranks, or on none
        compare_replicas(replicas, channel_of(group), advice)


def replicated_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the parameters and persistent buffers of ``model`` that must be equal on all ranks, by name."""
    left_out = {id(param) for param in expert_parameters(model).values()}
    for module in model.modules():
        describe = getattr(module, "shardings", None)
        for key, sharding in describe().items() if callable(describe) else ():
            if sharding.splits:
                left_out.add(id(module.get_parameter(key)))
        own = {*getattr(module, "counters", ()), *module._non_persistent_buffers_set}
        for key, buffer in module.named_buffers(recurse=False):
            if key in own or isinstance(module, _NormBase):
                left_out.add(id(buffer))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in left_out:
            yield name, tensor
