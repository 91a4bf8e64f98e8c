"""When the units of FSDP gather their weights, and how many bytes that copies from the host.

weights on the device    layer 0 │ layer 1 │ layer 2         one gather ahead: experts 0, attention 1
weights on the host      layer 0 │ layer 1 │ layer 2         one layer ahead: attention 1, experts 1
copied meanwhile         [ 1 ]   │ [ 2 ]   │
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from moe_comm.train.parallel.bucket_schedule import blocks_of
from moe_comm.train.parallel.parameters import WeightsReport, master_dtype


def units_of(module: nn.Module) -> list[FSDPModule]:
    """Return the units of ``module``, itself first, in the order of their forward passes."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def prefetch(root: nn.Module, *, layer_ahead: bool) -> None:
    """Make each block of ``root`` gather its experts and the next block, before its own pass.

    Other units do not prefetch: recomputation runs their forward passes in backward, when the next block is done.

    Args:
        layer_ahead: also gather the experts of the next block, and do the same in backward. Copies of experts from the
            host take longer than their passes, and those of attention are short, so all of them are in flight during
            both. At most two layers are gathered. Without it, FSDP gathers one unit ahead in backward.
    """
    blocks = [units_of(block) for block in blocks_of(root)]
    for (block, *inner), following in itertools.pairwise([units_of(root)[:1], *blocks, []]):
        block.set_modules_to_forward_prefetch([*inner, *(following if layer_ahead else following[:1])])
    if layer_ahead:
        backward = [[block, *reversed(inner)] for block, *inner in reversed(blocks)]
        for (block, *inner), following in itertools.pairwise([units_of(root)[:1], *backward, []]):
            block.set_modules_to_backward_prefetch([*inner, *following])


def gather_by_block(root: nn.Module) -> None:
    """For interleaved micro-batches, gather and reduce all units of a block with the block.

    The hooks of ``root`` also run for ``forward_in_turns``.
    """
    for block in blocks_of(root):
        for unit in units_of(block)[1:]:
            state = unit._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
            block.register_forward_hook(state._post_forward)
        block.register_forward_pre_hook(_allow_fp32_sums)
    if hasattr(root, "forward_in_turns"):
        model: Any = root
        forward = model.forward_in_turns

        def forward_in_turns(*args: Any) -> Any:
            _allow_fp32_sums(root)
            return forward(*args)

        model.forward_in_turns = forward_in_turns
        register_fsdp_forward_method(root, "forward_in_turns")


def _allow_fp32_sums(module: nn.Module, *_: object) -> None:
    """Allow fp32 gradients on bf16 weights, to sum micro-batches in fp32. Weights that FSDP ignores have them."""
    for param in module.parameters():
        if not isinstance(param, DTensor) and master_dtype(param) not in (param.dtype, param.grad_dtype):
            param.grad_dtype = None


class WeightCopies:
    """Counts the bytes of shards on the host that units copy to the device, and of gradients that come back."""

    def __init__(self) -> None:
        self._stored = self._read = 0
        self.written = 0

    def count(self, unit: FSDPModule) -> None:
        """Count the copies of ``unit``."""
        # Custom collectives are public, but FSDP does not call them for a unit of one rank, which is copied as well.
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is None:
            return
        nbytes = sum(one.padded_sharded_param_size.numel() * one.sharded_param.itemsize for one in group.fsdp_params)
        self._stored += nbytes
        wait = group.wait_for_unshard

        def counted() -> None:
            gathered = group.is_unsharded
            wait()
            if not gathered and group.is_unsharded:
                self._read += nbytes

        group.wait_for_unshard = counted

    def take(self) -> WeightsReport:
        """Return the bytes since the last call."""
        report = WeightsReport(self._stored, self._read, self.written)
        self._read = self.written = 0
        return report
