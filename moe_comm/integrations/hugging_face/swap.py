"""Replace the experts of a loaded Hugging Face model by expert-parallel ones.

Only the *experts* module is replaced, not the whole MoE block. Since transformers 5 every family calls this module as
``experts(x_TD, ids_TK, weights_TK)``. The router, its losses and hooks (``output_router_logits``), shared experts and
gradient checkpointing remain transformers' own code. One class works for every family, and parameter names do not
change.

    before, on every rank           block: router ─▶ ids, weights ─▶ experts 0..7 ─▶ y

    after, 2 ranks      rank 0      block: router ─▶ ids, weights ─▶ dispatch ─╮╭▶ experts 0..3 ─╮╭▶ combine ─▶ y
                        rank 1      block: router ─▶ ids, weights ─▶ dispatch ─╯╰▶ experts 4..7 ─╯╰▶ combine ─▶ y
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_comm.dispatch import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.errors import ConfigError, InputError, MoeCommError, UnsupportedModel
from moe_comm.integrations.hugging_face.compute import expert_input, expert_mlp, mark_invalid, on_device, oriented
from moe_comm.integrations.hugging_face.padding import PaddingMask
from moe_comm.integrations.offload.streamed import OffloadedLayer
from moe_comm.kernels.activations import SwiGLU
from moe_comm.kernels.autograd import without_autocast
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.kernels.low_rank import LowRank, with_adapters
from moe_comm.layers.data_parallel import ExpertShard, expert_modules, expert_parameters as sharded_parameters
from moe_comm.layers.data_parallel.copies import ExpertCopies
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.layers.moe.expert_parallel import ExpertParallel
from moe_comm.layers.moe.formula import ExpertsLayout
from moe_comm.layers.moe.padding import RealTokens
from moe_comm.layers.parallel.hooks import CALL_HOOKS, refuse_hooks, take_call_hooks
from moe_comm.layers.parallel.module import state_key
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.memory import as_tensors
from moe_comm.topology import Placement, Sharding, Split

_log = logging.getLogger(__name__)
_NOTHING = nullcontext()
T = TypeVar("T")


class ExpertRounds(Protocol):
    """Calls of experts in which all ranks take part; see ``integrations/micro_batches.py``.

    number: of the micro-batch of this thread.
    count: number of micro-batches.
    """

    ended: bool
    count: int

    @property
    def number(self) -> int: ...

    def computing(self, call: ExpertCall) -> AbstractContextManager[Any]: ...

    def call(self, experts: EPExperts, run: Callable[..., T], arguments: tuple[Tensor, Tensor, Tensor]) -> T: ...


class EPExperts(ExpertParallel):
    """The local experts of one MoE block, with the forward signature of transformers' experts modules.

    Parameters keep transformers' names and layouts. Dimension 0 holds only the experts whose home is this rank, in the
    order of the placement; ``local_experts`` are these, then copies of other ranks' experts. Their gradients already
    contain the rows of every rank of the expert-parallel group and need no reduction over it. With copies they do so
    after ``moe_comm.sync_gradients``.

    Attributes:
        adapters: the active low-rank adapters by parameter, which the caller sets during a call in its thread; see
            ``lora.py``.
        dispatchers: for each micro-batch of a ``serving`` context, else one.
        can_be_adapted: whether PEFT may adapt the parameters, which requires their names in the original model.
        rounds: in which the experts are called in a ``serving`` context; else None.
        only_part: whether this rank has no other parameters of the model.
        offloaded: where the weights are, if the parameters are on "meta" and have none; see ``offload_experts``.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gemm_dtype: GemmDtype = "same"
    copies: ExpertCopies | None = None
    padding: PaddingMask | None = None
    rounds: ExpertRounds | None = None
    offloaded: OffloadedLayer | None = None
    dispatchers: Sequence[Dispatcher]
    only_part = False
    can_be_adapted = True

    def __init__(
        self,
        experts: nn.Module,
        layout: ExpertsLayout,
        dispatcher: Dispatcher,
        label: str,
        overlap: Overlap | None = None,
        replicated: Callable[[], nn.Parameter | None] = lambda: None,
    ) -> None:
        super().__init__(dispatcher, overlap, label)
        self.layout, self._replicated = layout, replicated
        self._adapters: dict[int, Mapping[str, Sequence[LowRank]]] = {}  # by thread
        self.num_experts = layout.num_experts
        homes = self.placement.homes_of(dispatcher.rank)
        for name in layout.parameters:
            self.register_parameter(name, self._local_parameter(experts, name, homes))
        take_call_hooks(self, experts)
        self.training = experts.training
        self._distribute()

    def _distribute(self) -> None:
        """Install the hooks of the distributed parameters."""
        over_ep = Split.of_experts(self.placement)
        shardings = {name: Sharding(shape, (over_ep,), expert=True) for name, shape in self.layout.parameters.items()}
        self._attach(self, shardings, self._replicated)

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the micro-batch of this thread."""
        return self.dispatchers[0 if len(self.dispatchers) == 1 or self.rounds is None else self.rounds.number]

    @dispatcher.setter
    def dispatcher(self, value: Dispatcher) -> None:
        self.dispatchers = [value]

    def redistribute(self, dispatchers: Sequence[Dispatcher], values: Mapping[str, Tensor]) -> None:
        """Use another placement, or other ranks, with ``values`` as the parameters of this rank's experts."""
        self.dispatcher = dispatcher = dispatchers[0]
        self.place, self.sizes = {"ep": dispatcher.rank, "etp": 0}, {"ep": dispatcher.world, "etp": 1}
        self._use_placement(dispatcher.expert_placement or Placement.of_layout(dispatcher.placement))
        self.copies = None
        for name, value in values.items():
            old: nn.Parameter = getattr(self, name)
            new = nn.Parameter(value, requires_grad=old.requires_grad)
            mark_replaced(old, new, f"{self.label}.{name}", "a change of the placement")
            self.register_parameter(name, new)
        self._distribute()
        self.dispatchers = dispatchers

    def _local_parameter(self, experts: Any, name: str, homes: Sequence[int]) -> nn.Parameter:
        return _local_slice(getattr(experts, name), homes, self.dispatcher.world)

    @property
    def device(self) -> torch.device:
        """The device on which the experts are computed."""
        return self.down_proj.device if self.offloaded is None else self.offloaded.cache.device

    @property
    def adapters(self) -> Mapping[str, Sequence[LowRank]]:
        """The active low-rank adapters of this thread, by parameter."""
        return self._adapters.get(_this_thread(), {})

    @adapters.setter
    def adapters(self, value: Mapping[str, Sequence[LowRank]]) -> None:
        if value:
            self._adapters[_this_thread()] = value
        else:  # the thread may have ended
            self._adapters.pop(_this_thread(), None)

    @property
    def is_transposed(self) -> bool:
        """Whether weights are [E, in, out]. PEFT reads it."""
        return self.layout.transposed

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the expert outputs of each token. Collective.

        Args:
            hidden_states: [T, D]. T may differ between ranks and may be zero.
            top_k_index: [T, K] global expert ids.
            top_k_weights: [T, K] routing weights, any floating dtype.

        Returns:
            [T, D] in the dtype of ``hidden_states``; zeros for padding.

        Raises:
            RoutingError: weights are NaN or infinite, or ids are out of range, on any rank. Raised on every rank.
        """
        if self.is_traced():
            from moe_comm.layers.moe.compiled import call_layer  # few programs compile

            mask = None if self.padding is None else self.padding.traced
            return call_layer(self, (hidden_states, top_k_index, top_k_weights, mask), hidden_states.dtype)
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def is_traced(self) -> bool:
        return super().is_traced() and self.rounds is None and self.offloaded is None and not self._adapters

    def _eager(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, mask: Tensor | None) -> Tensor:
        real = None if mask is None or mask.numel() != hidden_states.shape[0] else RealTokens.of(mask != 0)
        return self._run(hidden_states, top_k_index, top_k_weights, real)

    @torch._disable_dynamo  # one graph break, as in MoELayer: collectives and varying row counts cannot be traced
    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.rounds is None:
            return self._run(hidden_states, top_k_index, top_k_weights)
        return self.rounds.call(self, self._run, (hidden_states, top_k_index, top_k_weights))

    def _run(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, real: RealTokens | None = None
    ) -> Tensor:
        y_TD = self._run_at_once(hidden_states, top_k_index, top_k_weights) if real is None else None
        if y_TD is not None:
            return y_TD
        self._agree_on_executor(hidden_states)
        fault = self._publish_if_due(self)
        (hidden_states, top_k_index, top_k_weights), unreadable = as_tensors(
            hidden_states=hidden_states, top_k_index=top_k_index, top_k_weights=top_k_weights
        )
        fault = fault or unreadable
        if self.offloaded is not None:
            fault = fault or self.offloaded.fault(hidden_states, top_k_weights)
        if fault is not None:
            self._refuse(self, fault)
        fp8 = self.gemm_dtype == "fp8"
        try:
            if real is None and self.padding is not None:
                real = self.padding.real_tokens(hidden_states.shape[0])
            if real is not None:
                top_k_index, top_k_weights = real.take(top_k_index), real.take(top_k_weights)
            x_TD = expert_input(hidden_states if real is None else real.take(hidden_states), self.gate_up_proj)
            top_k_index = mark_invalid(top_k_index, top_k_weights)
        except InputError as error:  # raised on every rank
            self._refuse(self, error)
        except Exception as error:  # the other ranks would wait in dispatch
            self._abort(self, error)
            raise
        in_place = not self.adapters
        plain = in_place and not fp8 and self.copies is None and self.offloaded is None
        device = on_device(self.layout, self, x_TD) if plain else ""
        if device and (self.rounds is None or self.rounds.count == 1):
            from moe_comm.layers.moe.whole_call import given_call  # only on a GPU

            dtype = x_TD.dtype
            run = given_call(
                self, self, x_TD, top_k_index, top_k_weights, device, lambda _: expert_mlp(self.layout, self, dtype)
            )
            if run is not None:
                y_TD = run()[0].to(hidden_states.dtype)
                return y_TD if real is None else real.spread(y_TD)
        call = self._start_call(
            self, x_TD, top_k_index, top_k_weights, width=self.layout.ffn, fp8=fp8, in_place=in_place, on_device=device,
            stacked=in_place and self.offloaded is None,
        )  # fmt: skip
        try:
            with self._computing(call), without_autocast(x_TD):
                rows_per_expert = self._prepare_experts(self, call)
                lent, dtype = call.lent, call.rows.dtype
                weights: Any = self
                if lent is not None:
                    weights = SimpleNamespace(**lent.entered())
                elif self.copies is not None:
                    weights = SimpleNamespace(**self.copies.stacked())
                mlp = expert_mlp(self.layout, weights, dtype, self.gemm_dtype)
                if lent is not None:
                    cast = partial(expert_mlp, self.layout, dtype=dtype)
                    orient = partial(oriented, self.layout)
                    mlp = lent.experts(mlp, lambda one: cast(SimpleNamespace(**one)).tensors, orient)
                if self.offloaded is not None:
                    mlp = self.offloaded.mlp(mlp)
                elif self.adapters:
                    adapters = self.adapters
                    if lent is not None and lent.adapters:
                        lent.receive_adapters()
                        adapters = lent.adapters
                    mlp = with_adapters(mlp, *(adapters.get(name, ()) for name in ("gate_up_proj", "down_proj")))
                out_RD = call.compute(call.rows, rows_per_expert, mlp)
                self._follow_backward(self, call, out_RD)
        except Exception as error:  # the other ranks would wait in combine
            call.abort(error)
            raise
        y_TD = call.combine(out_RD).to(hidden_states.dtype)
        return y_TD if real is None else real.spread(y_TD)

    def _run_at_once(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
        """Run a call without autograd by ``Dispatcher.run_layer``; return None if it needs the separate calls.

        The kernels are the same. In decode, with few tokens, the separate calls take longer than their kernels.
        """
        parameters, padding = self._parameters, self.padding
        w13, w2 = parameters.get("gate_up_proj"), parameters.get("down_proj")  # parametrizations remove them
        biases = parameters.get("gate_up_proj_bias"), parameters.get("down_proj_bias")
        if (
            torch.is_grad_enabled()
            or self._adapters
            or self._modules
            or self.copies is not None
            or self.offloaded is not None
            or self.slots is not None
            or self.overlap is not None
            or self.in_flight_hook is not None
            or self.gemm_dtype != "same"
            or not isinstance(self.layout.activation, SwiGLU)
            or (self.rounds is not None and self.rounds.count > 1)  # its micro-batches compute one at a time
            or not all(isinstance(one, Tensor) for one in (hidden_states, top_k_index, top_k_weights))
            or w13 is None
            or w2 is None
            or not hidden_states.dtype == w13.dtype == w2.dtype
            or any(bias is not None and bias.dtype != w13.dtype for bias in biases)  # the separate calls cast them
            or (padding is not None and padding.real_tokens(hidden_states.shape[0]) is not None)
        ):
            return None
        dispatcher = self.dispatchers[0]
        dispatcher.trained = dispatcher.plan_digest = 0
        run = dispatcher.run_layer(
            (hidden_states, top_k_index, top_k_weights), (w13, w2, *biases), self.layout.transposed, self.label
        )
        return None if run is None else run[0]

    def _computing(self, call: ExpertCall) -> AbstractContextManager[Any]:
        """Return the context of the computation of this rank's rows."""
        return _NOTHING if self.rounds is None else self.rounds.computing(call)

    def check_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError on every rank if the block that contains these experts is given no tokens on this one.

        A hook of the block, whose router would raise on this rank alone.
        """
        if torch.compiler.is_compiling() or not (args or "hidden_states" in kwargs):
            return
        (x,), fault = as_tensors(hidden_states=args[0] if args else kwargs["hidden_states"])
        if fault is None and not (x.dim() and x.is_floating_point()):
            fault = InputError(f"hidden_states must be floating-point tokens [..., D]; got {x.dtype} {tuple(x.shape)}")
        if fault is not None and self.rounds is not None and not self.rounds.ended:
            raise fault  # the other ranks may be in no call
        if fault is not None:
            self._agree_on_executor(x)  # as the other ranks do before they dispatch
            self._publish_if_due(self)
            self._refuse(self, fault)

    def _publish_if_due(self, experts: nn.Module) -> MoeCommError | None:
        if self.rounds is None or self.rounds.ended or self.copies is None or not self.copies.changed:
            return super()._publish_if_due(experts)
        # Ranks change them between different calls, so they cannot publish them together.
        return ConfigError(
            f"the weights of the experts of {self.label} have changed in a serving context, but not their copies on "
            "other ranks. Change weights between two contexts"
        )

    def publish_copies(self) -> int:
        """Send the weights of experts to the ranks that hold copies; see ``MoELayer.publish_copies``. Collective."""
        return 0 if self.copies is None else self.copies.publish()

    def extra_repr(self) -> str:
        local = self.local_experts
        experts = f"experts {local[0]}..{local[-1]}" if local else "no experts"
        if list(local) != list(range(local[0], local[0] + len(local)) if local else ()):
            experts = f"experts {' '.join(map(str, local))}"
        return (
            f"{experts} of {self.num_experts}, hidden={self.layout.hidden}, ffn={self.layout.ffn}, "
            f"dispatcher={self.dispatcher.name}, rank {self.dispatcher.rank} of {self.dispatcher.world}"
        )


@torch._disable_dynamo
def _this_thread() -> int:
    return threading.get_ident()


def _local_slice(full: nn.Parameter, experts: Sequence[int], world: int) -> nn.Parameter:
    if list(experts) == list(range(full.shape[0])):
        # With several ranks the parameter is replaced on all of them, so that an older optimizer raises on all.
        return full if world == 1 else nn.Parameter(full.detach(), requires_grad=full.requires_grad)
    # Indexing with a list copies: a view would keep the memory of all experts alive.
    return nn.Parameter(full.detach()[list(experts)], requires_grad=full.requires_grad)


def swap_experts(
    model: nn.Module,
    blocks: dict[str, tuple[nn.Module, ExpertsLayout]],
    sharing: Sequence[Sequence[str]],
    dispatchers: Mapping[int, Dispatcher],
    overlap: Overlap | None,
) -> None:
    """Replace the experts modules of a model by those of this rank.

    Args:
        blocks: experts modules by name, from ``find_experts``. Emptied, so that the full weights of a block are freed
            before the next one is swapped.
        sharing: the names of modules that share their weights, from ``names_by_weights``.
        dispatchers: dispatchers by number of experts.
    """
    padding = PaddingMask.of(model, blocks)[0] if blocks else None
    for names in sharing:
        experts, layout = blocks.pop(names[0])
        label = unwrapped_name(names[0])
        swapped = EPExperts(experts, layout, dispatchers[layout.num_experts], label, overlap, _router(model, label))
        swapped.padding = padding
        for key in layout.parameters:
            mark_replaced(getattr(experts, key), getattr(swapped, key), f"{label}.{key}", "swap_moe")
        for name in names:
            blocks.pop(name, None)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped)
            if swapped.dispatcher.world > 1:
                block = model.get_submodule(unwrapped_name(name).rpartition(".")[0])
                block.register_forward_pre_hook(swapped.check_block, with_kwargs=True)
        del experts


def unwrapped_name(name: str) -> str:
    """Return the name of an experts module in the model without adapters."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


def _router(model: nn.Module, name: str) -> Callable[[], nn.Parameter | None]:
    """Return a getter of the first parameter of an MoE block outside its experts: the router's, which is replicated."""
    parent, _, experts = name.rpartition(".")
    block = model.get_submodule(parent)
    names = (key for key, _ in block.named_parameters() if not key.startswith(f"{experts}."))
    path, _, parameter = next(names, "").rpartition(".")
    return partial(replicated_parameter, block.get_submodule(path), parameter) if parameter else lambda: None


def names_by_weights(model: nn.Module, blocks: dict[str, tuple[nn.Module, ExpertsLayout]]) -> list[list[str]]:
    """Return the names of each experts module, and of modules that share all its parameters, as layers may.

    Raises:
        UnsupportedModel: experts share parameters in another way.
    """
    names: dict[tuple[int, ...], list[str]] = {}
    inside: dict[str, tuple[int, ...]] = {}
    for name, (experts, layout) in blocks.items():
        params = tuple(id(getattr(experts, key)) for key in layout.parameters)
        first, *_ = names.setdefault(params, [])[:1] or [name]
        names[params].append(name)
        inside |= {f"{name}.{key}": params for key in layout.parameters}
        if experts is not blocks[first][0] and _settings(*blocks[first]) != _settings(experts, layout):
            raise UnsupportedModel(f"{first} and {name} share their weights, but not their class, activation and hooks")
    owners: dict[int, tuple[str, tuple[int, ...] | None]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        plain = type(param) is nn.Parameter and not param.is_meta and param.numel()
        memory, owner = param.data_ptr() if plain else id(param), inside.get(name)
        other, other_owner = owners.setdefault(memory, (name, owner))
        if owner != other_owner:
            raise UnsupportedModel(
                f"{other} and {name} are one parameter, but only some weights of the two modules are shared. Each rank "
                "keeps some of the experts only, so layers must share all weights of their experts, or none"
            )
    return list(names.values())


def _settings(experts: nn.Module, layout: ExpertsLayout) -> list[Any]:
    """Return the properties in which experts modules with the same weights must agree, because one module replaces
    them."""
    custom = layout.activation.name == f"{type(experts).__name__}._apply_gate"
    hooks = [list(getattr(experts, name).values()) for name in CALL_HOOKS]
    return [type(experts), layout.activation.fn if custom else layout.activation.name, experts.training, *hooks]


def swapped_experts(model: nn.Module) -> dict[str, EPExperts]:
    """Return the swapped experts modules of ``model`` by module name. Empty before ``swap_moe``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EPExperts)}


def keep_experts_only(model: nn.Module) -> None:
    """Free the parameters of ``model`` outside its experts, which are then on "meta", and let calls raise."""
    kept = {id(parameter) for parameter in expert_parameters(model).values()}  # with those of adapters
    freed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                new = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = freed.setdefault(id(parameter), new)  # ties remain
    for experts in swapped_experts(model).values():
        experts.only_part = True
    model.register_forward_pre_hook(_refuse_call, prepend=True)


def _refuse_call(model: nn.Module, _: Any) -> None:
    raise ConfigError(
        f"this rank has only experts of {type(model).__name__}, and computes them for the ranks without experts: call "
        "moe_comm.serve_experts(model) here, and run the model on those"
    )


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the expert parameters of a swapped model by name. With several ranks they differ between ranks.

    With several ranks these include A and B of adapters of experts.
    """
    experts = {
        f"{name}.{key}": parameter
        for name, experts in swapped_experts(model).items()
        for key, parameter in experts.named_parameters()
    }
    return experts | sharded_parameters(model)


def refuse_conflicts(model: nn.Module, blocks: dict[str, tuple[nn.Module, ExpertsLayout]], world: int) -> None:
    """Raise UnsupportedModel if the experts of ``model`` cannot be replaced by those of a rank of ``world``."""
    if "" in blocks:
        raise UnsupportedModel(f"{type(model).__name__} is an experts module; pass the model that contains it")
    for name, (experts, _) in blocks.items():
        if any(isinstance(parameter, DTensor) for parameter in experts.parameters()):
            raise UnsupportedModel(
                f"{name} is already distributed (its parameters are DTensors). Load the model without "
                "distributed_config and swap it, or load it with DistributedConfig(ep_implementation='moe_comm')."
            )
        if "forward" in vars(experts):
            raise UnsupportedModel(
                f"the forward of {name} was replaced, by device_map offloading or a kernel; load the model without them"
            )
        replaced = experts.named_parameters(name) if world > 1 else ()  # else the parameters are kept
        refuse_hooks("swap_moe", experts.named_modules(prefix=name), replaced, calls=False)
    if getattr(model, "use_kernels", False):
        raise UnsupportedModel(
            f"{type(model).__name__} was loaded with use_kernels=True, which may replace whole MoE blocks; "
            "load it with use_kernels=False"
        )


def save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
) -> None:
    """Replace ``save_pretrained`` of a swapped model: require a ``state_dict`` that has all experts.

    Raises:
        ConfigError: the files would contain only the experts of this rank.
    """
    wrong = ["it got no state_dict"] if state_dict is None else []
    if state_dict is not None and is_main_process:
        wrong = _incomplete_experts(model, state_dict)
    if wrong:
        more = f", and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise ConfigError(
            f"save_pretrained of this {type(model).__name__} would write this rank's experts only: {wrong[0]}{more}. "
            "Call moe_comm.integrations.hugging_face.save_swapped(model, folder) on every rank instead."
        )
    if is_main_process:
        type(model).save_pretrained(model, save_directory, state_dict=state_dict, **kwargs)


def load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``load_adapter`` of a swapped model of transformers, which cannot load adapters of experts.

    Raises:
        UnsupportedModel: it failed, and there are adapters of experts.
    """
    try:
        return type(model).load_adapter(model, *args, **kwargs)
    except RuntimeError as error:
        if any(not isinstance(module, EPExperts) for _, module, _ in expert_modules(model)):
            raise UnsupportedModel(
                f"load_adapter of this {type(model).__name__} cannot load adapters of experts that are distributed. "
                "Load them with peft.PeftModel.from_pretrained(model, folder), after moe_comm.swap_moe(model)"
            ) from error
        raise


def _incomplete_experts(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the tensors of experts that ``state`` does not have in full, of those that ``save_pretrained`` writes."""
    adapters_only = getattr(model, "_hf_peft_config_loaded", False)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module, gradients in expert_modules(model):
        prefix = f"{state_key(path)}.".lstrip(".")
        if adapters_only and isinstance(module, EPExperts):
            continue
        describe = getattr(module, "checkpoint_slices", None)  # of blocks with their own names
        if describe is not None:
            shapes |= {name: shape for name, shape, _ in describe(prefix)}
        else:
            shapes |= {prefix + key: sharding.shape for key, sharding in gradients.shards.shardings.items()}
    wrong = []
    for name, shape in shapes.items():
        value = state.get(name)
        if value is None:
            wrong.append(f"{name} is missing in the state_dict")
        elif isinstance(value, ExpertShard) or tuple(value.shape) != shape:
            wrong.append(f"{name} has shape {tuple(value.shape)}, and that of all experts is {shape}")
    return wrong


# Rank 0 alone writes the files of Trainer and accelerate, so an error raised there would leave the other ranks waiting.
# The checks below therefore wrap methods that all ranks call. They ignore models whose experts are not distributed, and
# trainers and accelerators that support such experts.
_HERE = "moe_comm.integrations.hugging_face"
_ACCELERATOR = f"Write\n    {_HERE}.prepare_accelerator(accelerator)\nbefore accelerator.prepare."
_TRAINER = f"Use {_HERE}.MoETrainer, or put {_HERE}.MoETrainerMixin before your Trainer class."


def guard_libraries() -> None:
    """Wrap the methods of the classes that are already imported. Repeated calls have no effect."""
    accelerate, trainer = sys.modules.get("accelerate.accelerator"), sys.modules.get("transformers.trainer")
    if accelerate is not None:
        for name, check in (
            ("prepare", _before_prepare),
            ("get_state_dict", _before_get_state_dict),  # save_state and save_model call it, too
            ("load_state", _before_load_state),
        ):
            _guard(accelerate.Accelerator, name, check)
    if trainer is not None:
        _guard(trainer.Trainer, "train", _before_train)
        _guard(trainer.Trainer, "save_model", _before_save_model)


def _guard(cls: Any, name: str, check: Callable[..., None]) -> None:
    original = getattr(cls, name)
    if hasattr(original, "guarded_by_moe_comm"):
        return

    @wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "handles_experts", False):
            check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    guarded.guarded_by_moe_comm = True  # type: ignore[attr-defined]
    setattr(cls, name, guarded)


def _any_distributed(models: Any) -> bool:
    return any(next(expert_modules(model), None) is not None for model in models if isinstance(model, nn.Module))


def _before_prepare(accelerator: Any, *args: Any, **_: Any) -> None:
    guard_libraries()  # Trainer may have been imported after swap_moe
    kind = accelerator.distributed_type
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and _any_distributed(args):
        raise ConfigError(
            f"{kind.value} would treat experts as replicated, but each rank has different ones. {_ACCELERATOR}"
        )


def _before_get_state_dict(accelerator: Any, model: Any, *_: Any, **__: Any) -> None:
    if _any_distributed([model]):
        raise ConfigError(f"accelerate would save the experts of rank 0 only. {_ACCELERATOR}")


def _before_load_state(accelerator: Any, *_: Any, **__: Any) -> None:
    if _any_distributed(accelerator._models):
        raise ConfigError(f"accelerate would load the optimizer state of all experts on each rank. {_ACCELERATOR}")


def _before_train(trainer: Any, resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> None:
    if (resume_from_checkpoint or trainer.args.save_strategy != "no") and _any_distributed([trainer.model]):
        raise ConfigError(
            f"checkpoints of Trainer would have the experts of rank 0 only. {_TRAINER} "
            'With save_strategy="no" this trainer is correct under DDP.'
        )


def _before_save_model(trainer: Any, *_: Any, **__: Any) -> None:
    if _any_distributed([trainer.model]):
        raise ConfigError(f"save_model would write the experts of rank 0 only. {_TRAINER}")
