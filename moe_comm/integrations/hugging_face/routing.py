"""Record which experts the tokens of a Hugging Face model choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import InputError
from moe_comm.integrations.hugging_face.families import find_experts
from moe_comm.integrations.hugging_face.padding import PaddingMask
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.layers.parallel.recompute import recomputing


class RoutingRecord:
    """The routing of all tokens of this rank since the record began, without padding (2-D ``attention_mask``)."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def append(self, name: str, ids_TK: Tensor) -> None:
        """Add a call of the block ``name``."""
        self._parts.setdefault(name, []).append(ids_TK.detach().to("cpu", torch.int64))

    @property
    def layers(self) -> dict[str, Tensor]:
        """[T, K] int64 expert ids of each MoE block by module name."""
        return {name: torch.cat(parts) for name, parts in self._parts.items()}

    @property
    def ids(self) -> Tensor:
        """The ids of all blocks, one after the other. A placement for all blocks needs the tokens of each.

        Raises:
            InputError: no block has run.
        """
        if not self._parts:
            raise InputError("no routing has been recorded; run the model inside the context of record_routing")
        return torch.cat(list(self.layers.values()))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the routing of a model, swapped or not, while the context is open. Each token counts once in each layer.

    Forward passes that activation checkpointing repeats in backward are not recorded.

        with record_routing(model) as routing:
            model(input_ids)
        placement = placement_from_routing(routing.ids.numpy(), experts=64, world=8, ranks_per_host=4)
        model = swap_moe(model, group, placement=placement)

    Raises:
        UnsupportedModel: the model has no MoE block of a supported kind.
    """
    modules: dict[str, nn.Module] = dict(swapped_experts(model))
    if not modules:  # a module that several layers share is recorded once
        found = find_experts(model)
        modules = {name: module for name, module in model.named_modules() if name in found}
    record = RoutingRecord()
    padding, hooks = PaddingMask.of(model, modules)
    hooks += [
        module.register_forward_pre_hook(partial(_append, record, padding, name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _append(
    record: RoutingRecord,
    padding: PaddingMask,
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if recomputing():
        return
    ids_TK = args[1] if len(args) > 1 else kwargs["top_k_index"]
    real = padding.real_tokens(ids_TK.shape[0])
    record.append(name, ids_TK if real is None else real.take(ids_TK))
