"""Replace the experts of a loaded Hugging Face model by expert-parallel ones.

What is replaced is the *experts* module and not the whole MoE block. Since transformers 5 every family calls it as
``experts(x_TD, ids_TK, weights_TK)``, so the router, its losses and hooks (``output_router_logits`` records the
router's output), shared experts and their gates, and gradient checkpointing stay transformers' own code and cannot
drift from it; one module serves every family, and parameter names do not change.

    before, on every rank           block: router ─▶ ids, weights ─▶ experts 0..7 ─▶ y

    after, 2 ranks      rank 0      block: router ─▶ ids, weights ─▶ dispatch ─╮╭▶ experts 0..3 ─╮╭▶ combine ─▶ y
                        rank 1      block: router ─▶ ids, weights ─▶ dispatch ─╯╰▶ experts 4..7 ─╯╰▶ combine ─▶ y
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic, make_dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.hugging_face.compute import expert_input, expert_layer, run_experts
from moe_comm.integrations.hugging_face.families import ExpertsLayout, find_experts
from moe_comm.integrations.hugging_face.guards import guard_libraries
from moe_comm.layers.data_parallel import ExpertShard, ExpertShards, attach_experts, expert_modules, prepare_ddp
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class EPExperts(nn.Module):
    """This rank's experts of one MoE block, with the call of transformers' own experts modules.

    Parameters keep transformers' names, layouts and order of experts; dimension 0 is cut to this rank's experts
    (``dispatcher.local_experts``). Their gradients are complete: dispatch brings the rows of every rank, so nothing
    is left to sum over the expert-parallel group.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        experts: nn.Module,
        layout: ExpertsLayout,
        dispatcher: Dispatcher,
        label: str,
        overlap: Overlap | None = None,
        replicated: Callable[[], nn.Parameter | None] = lambda: None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.dispatcher = dispatcher
        self.label, self.overlap = label, overlap
        self.num_experts = layout.num_experts
        for name in layout.parameters:
            self.register_parameter(name, _local_slice(getattr(experts, name), dispatcher.local_experts))
        for hooks in _HOOKS:
            getattr(self, hooks).update(getattr(experts, hooks))
        self._is_full_backward_hook = experts._is_full_backward_hook
        self.training = experts.training
        if dispatcher.group is not None and dispatcher.world > 1:
            counts = dispatcher.placement.experts_per_rank
            over_ep = Split(0, "ep", sizes=None if len(set(counts)) == 1 else counts)
            shardings = {name: Sharding(shape, (over_ep,), expert=True) for name, shape in layout.parameters.items()}
            place, sizes = {"ep": dispatcher.rank, "etp": 0}, {"ep": dispatcher.world, "etp": 1}
            shards = ExpertShards(dispatcher.group, shardings, place, sizes)
            attach_experts(self, shards, replicated, label)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Every token's weighted sum over its experts, wherever they are. Collective.

        Args:
            hidden_states: [T, D]; T may differ between ranks and may be zero.
            top_k_index: [T, K] global expert ids.
            top_k_weights: [T, K] routing weights, any floating dtype.

        Returns:
            [T, D] in the dtype of ``hidden_states``.

        Raises:
            RoutingError: on every rank, if on any rank a token's weights are NaN or infinite, or ids are out of range.
        """
        x_TD = expert_input(hidden_states, self.gate_up_proj)
        y_TD = expert_layer(
            self.dispatcher,
            x_TD,
            top_k_index,
            top_k_weights,
            partial(run_experts, self.layout, self),
            self.overlap,
            width=self.layout.ffn,
            label=self.label,
        )
        return y_TD.to(hidden_states.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> EPExperts:
        # A copy holds its own weights but makes its calls over the same ranks.
        memo[id(self.dispatcher)] = self.dispatcher
        copied = EPExperts.__new__(EPExperts)
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        vars(copied).update({key: deepcopy(value, memo) for key, value in vars(self).items()})
        return copied

    def extra_repr(self) -> str:
        own = self.dispatcher.local_experts
        held = f"experts {own.start}..{own.stop - 1}" if len(own) else "no experts"
        return (
            f"{held} of {self.num_experts}, hidden={self.layout.hidden}, ffn={self.layout.ffn}, "
            f"dispatcher={self.dispatcher.name}, rank {self.dispatcher.rank} of {self.dispatcher.world}"
        )


def _local_slice(full: nn.Parameter, own: range) -> nn.Parameter:
    if len(own) == full.shape[0]:
        return full
    # A clone, as a view would keep every expert's memory alive.
    return nn.Parameter(full.detach()[own.start : own.stop].clone(), requires_grad=full.requires_grad)


def swap_moe(
    model: nn.Module,
    ep_group: ProcessGroup | None = None,
    *,
    backend: str = "auto",
    options: DispatchOptions | None = None,
    overlap: Overlap | Literal["auto"] | None = None,
) -> Any:
    """Make the MoE blocks of a loaded transformers model expert-parallel over ``ep_group``. Collective.

        model = AutoModelForCausalLM.from_pretrained(folder)
        model = moe_comm.swap_moe(model, dist.group.WORLD)      # this rank now holds its share of the experts
        loss = model(input_ids, labels=input_ids).loss          # each rank its own batch

    Every rank must hold the same weights before, and feeds its own batch after. Experts are spread in contiguous
    ranges, as evenly as they go (7 experts on 2 ranks: 4 and 3). Experts that went elsewhere are freed here as soon
    as nothing else holds them, so build the optimizer afterwards.

    Gradients: in a loop of your own, divide the loss by the number of tokens of all ranks and call
    ``moe_comm.sync_gradients(model)`` after ``backward``. ``DistributedDataParallel(model)`` works as it is: it takes
    means, and so do the experts then. Before ``fully_shard`` call ``moe_comm.prepare_fsdp(model)``.

    Generation: ranks must run the same number of forward passes: ``model.generate(..., synced_gpus=True)``.

    Args:
        model: a ``PreTrainedModel``, or any module that contains one's MoE blocks; changed in place.
        ep_group: ranks to spread the experts over; None keeps all of them on this rank.
        backend: how rows move, see ``moe_comm.make_dispatcher``. All blocks share one dispatcher.
        options: timeouts and checks.
        overlap: which executor runs dispatch, experts and combine, see ``MoELayer``; same numbers. None: one after the
            other.

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: no MoE block, one of unknown kind, or already distributed by something else; nothing changed.
        ConfigError: already swapped, or unknown backend.
    """
    overlap = Overlap.of(overlap)
    already = swapped_experts(model)
    if already:
        name, first = next(iter(already.items()))
        raise ConfigError(
            f"{type(model).__name__} is already swapped ({name} is spread over {first.dispatcher.world} ranks). "
            "Swap a freshly loaded model; gather_state_dict gives the full weights of this one."
        )
    found = find_experts(model)
    _refuse_conflicts(model, found)
    device = next(iter(found.values()))[0].get_parameter("down_proj").device
    given = options or DispatchOptions()
    traffic = Traffic(deterministic=given.deterministic, wire_dtypes=given.wire_dtypes, overlap=overlap is not None)
    dispatchers = {
        count: make_dispatcher(count, ep_group, backend, options=options, traffic=traffic, device=device)
        for count in sorted({layout.num_experts for _, layout in found.values()})
    }
    for name in list(found):
        experts, layout = found.pop(name)
        parent, _, child = name.rpartition(".")
        block = model.get_submodule(parent)
        swapped = EPExperts(experts, layout, dispatchers[layout.num_experts], name, overlap, _router_of(block, child))
        setattr(block, child, swapped)
        del experts  # one block at a time, or all full weights stay until the end
    prepare_ddp(model)
    if max(dispatcher.world for dispatcher in dispatchers.values()) > 1:
        guard_libraries()
        if hasattr(model, "save_pretrained"):
            spread: Any = model
            spread.save_pretrained = MethodType(_save_pretrained, model)
    return model


def _router_of(block: nn.Module, experts: str) -> Callable[[], nn.Parameter | None]:
    """Gives the first parameter of an MoE block that is not an expert's: its router's, which all ranks hold."""
    names = (name for name, _ in block.named_parameters() if not name.startswith(f"{experts}."))
    path, _, name = next(names, "").rpartition(".")
    return partial(getattr, block.get_submodule(path), name, None) if name else lambda: None


def swapped_experts(model: nn.Module) -> dict[str, EPExperts]:
    """The swapped experts of ``model`` by module name; empty before ``swap_moe``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EPExperts)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a swapped model's experts by name; over several ranks, those that differ between ranks."""
    return {
        f"{name}.{key}": parameter
        for name, experts in swapped_experts(model).items()
        for key, parameter in experts.named_parameters()
    }


def _refuse_conflicts(model: nn.Module, found: dict[str, tuple[nn.Module, ExpertsLayout]]) -> None:
    if "" in found:
        raise UnsupportedModel(f"{type(model).__name__} is an experts module itself; swap the model that contains it")
    for name, (experts, _) in found.items():
        if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
            raise UnsupportedModel(
                f"{name} is already distributed (its parameters are DTensors). Load the model without "
                "distributed_config and swap it, or load it with DistributedConfig(ep_implementation='moe_comm')."
            )
        if "forward" in vars(experts):
            raise UnsupportedModel(
                f"{name} has its forward replaced, by device_map offloading or a kernel; load the model without them"
            )
    if getattr(model, "use_kernels", False):
        raise UnsupportedModel(
            f"{type(model).__name__} was loaded with use_kernels=True, which may replace whole MoE blocks; "
            "load it without"
        )


def _save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
) -> None:
    """``save_pretrained`` of a spread model: only of a given state dict that has all experts.

    Raises:
        ConfigError: this rank's experts would be written as if they were all.
    """
    if state_dict is None or (is_main_process and not _has_all_experts(model, state_dict)):
        raise ConfigError(
            f"save_pretrained of this {type(model).__name__} would write this rank's experts only. "
            "Call moe_comm.integrations.hugging_face.save_swapped(model, folder) on every rank instead."
        )
    if is_main_process:
        type(model).save_pretrained(model, save_directory, state_dict=state_dict, **kwargs)


def _has_all_experts(model: nn.Module, state: Any) -> bool:
    for name, _, gradients in expert_modules(model):
        for key, sharding in gradients.shards.shardings.items():
            value = state.get(f"{name}.{key}")
            if value is None or isinstance(value, ExpertShard) or tuple(value.shape) != tuple(sharding.shape):
                return False
    return True
