"""An MoE block of a user's model whose experts are distributed over ranks.

The forward of the block remains the user's code: router, noise, losses, shared experts. It computes the routing weights
too, and in any form, because the experts that it calls are probes. The probe of expert e returns the unit vector e for
each row, so the block returns the weight of each expert where it would return its output:

    y[t] = sum over e of  weight[t, e] * expert_e(x[t])              the block, with its experts
    W[t] = sum over e of  weight[t, e] * unit vector e               the block, with probes: W[t, e] = weight[t, e]

The tokens are then dispatched with these weights, and y replaces W in what the block returns. Gradients of the weights
flow back through the block's own operators. The block runs several times, with the same random numbers, if

- it adds the outputs of a module (shared experts): with probes that return zeros, and with unit vectors while the
  module returns zeros;
- it adds something else, r (its tokens): with zeros, and with vectors so large that W is not rounded in the sum:
  W = ((r + SCALE * W) - r) / SCALE;
- there are more experts than a token has values, D: for each D of them, while the others return zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moe_comm.errors import ConfigError, InputError
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.integrations.hugging_face.swap import EPExperts
from moe_comm.layers.data_parallel.expert_shard import distribute_like
from moe_comm.layers.moe.formula import ExpertFormula, MoEBlock

Probe = Literal["zeros"] | int
"""What experts return: zeros; or in pass n the vectors of experts nD, nD + 1, ..., and zeros for the others."""
SCALE = 2.0**48
"""Size of the vectors in a block that adds something which no module returns. A power of two, so that dividing by it is
exact; small enough for gradients that are as many times smaller."""
Convention = Literal["list", "batches", "counts", "adapter"]
"""How the block calls its experts: each module of a list or dict with rows [..., D]; one module with [E, ..., D]; or a
module with rows [R, D] in the order of the experts, and their counts [E]. With the ``route`` of an adapter, it does
not."""


@dataclass(frozen=True)
class BlockPlan:
    """How to run a block.

    path: name of the experts in the block.
    shape: of tokens, without the hidden size, with which the block is tried.
    output: index of the leaf of the block's result that holds the tokens' outputs.
    added: names of the modules whose outputs the block adds to those of the experts.
    rest: what else the block adds, in words, if not ``added``; "" for nothing.
    top_k: largest number of experts of a token; all experts if it differs between tokens.
    nones: an expert returns a tuple of its output and this many Nones; -1: its output.
    adapter: the description of the block, if its forward pass is not run.
    narrow: the block runs with narrow experts (``Trial``).
    keys: the number of the expert of each key, in the order of a ``ModuleDict`` of experts.
    """

    path: str
    formula: ExpertFormula
    convention: Convention
    shape: tuple[int, ...]
    output: int = 0
    added: tuple[str, ...] = ()
    rest: str = ""
    top_k: int = 0
    nones: int = -1
    adapter: MoEBlock | None = None
    narrow: bool = False
    keys: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.adapter is not None:
            return f"{self.path}: {self.formula}; routed by its adapter"
        added = "".join(f", plus {what}" for what in (*self.added, self.rest) if what)
        return f"{self.path}: {self.formula}; at most {self.top_k} experts per token{added}"

    @property
    def passes(self) -> int:
        """Number of passes in which the experts return vectors."""
        return -(-self.formula.layout.num_experts // self.formula.layout.hidden)

    @property
    def unit(self) -> float:
        """The size of these vectors."""
        return SCALE if self.rest else 1.0


class Probes:
    """What the forward pass of a block calls in place of its experts: as a list, or as one module."""

    num_experts: int
    probe: Probe | None = None
    plan: BlockPlan

    def __len__(self) -> int:
        return self.num_experts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan.keys or self.values())

    def __getitem__(self, key: int | str) -> Callable[..., Any]:
        expert = self.plan.keys[key] if isinstance(key, str) else range(self.num_experts)[key]
        return lambda x, *_, **__: self._result(self._probed(x, expert))

    def __contains__(self, key: object) -> bool:
        return key in self.plan.keys

    def __getattr__(self, name: str) -> Any:
        if vars(self).get("probe") is not None and name in self.plan.keys:  # PEFT's layers may have this name
            return self[name]
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if "plan" in vars(self) and name in self.plan.keys:
                return self[name]
            raise

    def keys(self) -> Iterable[str]:
        return self.plan.keys.keys()

    def values(self) -> list[Callable[..., Any]]:
        return [self[key] for key in self.plan.keys or range(self.num_experts)]

    def items(self) -> Iterable[tuple[str, Callable[..., Any]]]:
        return zip(self.keys(), self.values(), strict=True)

    def probed(self, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of all experts for the arguments of one call."""
        if self.plan.convention == "batches":
            return self._result(torch.stack([self._probed(rows_D, expert) for expert, rows_D in enumerate(rows)]))
        counts_E = torch.as_tensor(next(v for v in (*args, *kwargs.values()) if _counts(v, self.num_experts)))
        self._refuse_half(rows.dtype)
        units_ED = rows.new_zeros(self.num_experts, rows.shape[-1])
        if isinstance(self.probe, int):
            units_ED[self.probe * rows.shape[-1] :].fill_diagonal_(self.plan.unit)
        counts_E = counts_E.to(rows.device).long()
        return self._result(units_ED.repeat_interleave(counts_E, 0, output_size=rows.shape[0]))

    def _result(self, y: Tensor) -> Any:
        return y if self.plan.nones < 0 else (y, *[None] * self.plan.nones)

    def _probed(self, x: Tensor, expert: int) -> Tensor:
        if self.probe is None:
            raise ConfigError("the experts of a swapped block run in the block's forward pass only")
        autocast = torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64
        y = torch.zeros_like(x, dtype=torch.get_autocast_dtype(x.device.type) if autocast else x.dtype)
        self._refuse_half(y.dtype)
        if isinstance(self.probe, int) and 0 <= (column := expert - self.probe * x.shape[-1]) < x.shape[-1]:
            y[..., column] = self.plan.unit
        return y

    def _refuse_half(self, dtype: torch.dtype) -> None:
        if self.plan.rest and dtype is torch.float16:
            raise InputError(
                f"the block adds {self.plan.rest} to the outputs of its experts, which cannot be separated in float16; "
                "run it in bfloat16 or float32, or describe it with route and output of a MoEBlock"
            )


class BlockSource(nn.Module):
    """The parameters of a block, from which ``BlockExperts`` takes those of this rank."""

    def __init__(self, block: nn.Module, formula: ExpertFormula, was_transposed: bool = False) -> None:
        super().__init__()
        self.formula, self.named = formula, {name: param.detach() for name, param in block.named_parameters()}
        trained = {name: param.requires_grad for name, param in block.named_parameters()}
        self.trained = {key: trained[formula.name_of(parts[0].path, 0)] for key, parts in formula.parts.items()}
        self.linears = tuple(path for path in formula.shapes if _of_linear(block, formula, path))
        self.was_transposed = was_transposed


def _of_linear(block: nn.Module, formula: ExpertFormula, path: str) -> bool:
    """Return whether the parameter ``path`` of each expert is the weight of an ``nn.Linear``."""
    owner, _, key = formula.name_of(path, 0).rpartition(".")
    linear = "{}" in path and key == "weight" and not formula.transposed
    return linear and isinstance(block.get_submodule(owner), nn.Linear)


class BlockExperts(Probes, EPExperts):
    """The experts of a user's block: probes for the block's own forward pass, and the experts of this rank.

    State dicts of the whole model, and those that are loaded, have the names and shapes of the unswapped block.

    Attributes:
        linears: names in the experts of the linear layers of each expert, with "{}" for its number; see ``lora.py``.
        stacked: names of the matrices [E, ...] that the experts module of the unswapped block has, in its order.
    """

    can_be_adapted = False
    linears: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    _was_transposed = False

    def use(self, plan: BlockPlan, source: BlockSource) -> None:
        """Set the plan, and convert the names in state dicts of one process."""
        self.plan, shapes = plan, plan.formula.shapes
        inside = [path.removeprefix(f"{plan.path}.").removesuffix(".weight") for path in source.linears]
        self.linears = tuple(name for name in inside if name.startswith("{}."))
        owned = [name.rpartition(".") for name in source.named if len(shapes.get(name, ())) == 2]
        self.stacked = tuple(key for owner, _, key in owned if owner == plan.path)
        self._was_transposed = source.was_transposed
        self.register_state_dict_post_hook(_after_state_dict)

    @property
    def is_transposed(self) -> bool:
        return self._was_transposed  # PEFT reads it

    def current_name(self, name: str, depth: int = 0) -> str:
        """Return the present name of a parameter of the unswapped block: PEFT wraps the layers that it adapts.

        depth: number of PEFT's wrappers around this module.
        """
        owner, _, key = name.rpartition(".")
        if owner == self.plan.path:
            return ".".join([owner, *["base_layer"] * depth, key])
        layer = child_of(self, owner.removeprefix(f"{self.plan.path}."))
        return f"{owner}.base_layer.{key}" if layer is not None and "base_layer" in layer._modules else name

    def _of_block(self, prefix: str) -> tuple[str, int]:
        """Return the prefix of the block's keys, and the number of wrappers, from the prefix of this module's."""
        outside = prefix
        while outside.endswith(".base_layer."):
            outside = outside.removesuffix("base_layer.")
        return outside.removesuffix(f"{self.plan.path}."), (len(prefix) - len(outside)) // len("base_layer.")

    def _local_parameter(self, experts: BlockSource, name: str, homes: Sequence[int]) -> nn.Parameter:
        return nn.Parameter(experts.formula.stack(name, experts.named, homes), requires_grad=experts.trained[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts as ``EPExperts``, or probe them."""
        return super().forward(*args, **kwargs) if self.probe is None else self.probed(*args, **kwargs)

    def restore_names(self, state: dict[str, Any], prefix: str) -> None:
        """Replace the parameters of all experts in ``state`` by those of the unswapped block.

        prefix: of this module's keys. Nothing changes if ``state`` has this rank's experts only.
        """
        stacks = {key: state.get(prefix + key) for key in self.layout.parameters}
        if any(type(stack) is not Tensor or len(stack) != self.num_experts for stack in stacks.values()):
            return
        for key in stacks:
            del state[prefix + key]
        of_block, depth = self._of_block(prefix)
        originals = self.plan.formula.split(stacks)  # type: ignore[arg-type]
        state |= {of_block + self.current_name(name, depth): value for name, value in originals.items()}

    def checkpoint_slices(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...], list[HubSlice]]]:
        """Yield the name, shape and slices of each parameter of the experts of the unswapped block.

        prefix: of this module's keys.
        """
        of_block, depth = self._of_block(prefix)
        for name, shape, slices in _slices(self.plan.formula):
            current = of_block + self.current_name(name, depth)
            named = [replace(one, name=current, parameter=prefix + one.parameter) for one in slices]
            yield current, shape, named


def _slices(formula: ExpertFormula) -> Iterator[tuple[str, tuple[int, ...], list[HubSlice]]]:
    """Yield each parameter in the block, its shape, and the slices of the stacked parameters that it holds."""
    for path, shape in formula.shapes.items():
        stacked = "{}" not in path
        whole: tuple[slice, ...] = (slice(None),) if stacked else ()
        for expert, name in enumerate(formula.names_of(path)):
            found = []
            for key, parts in formula.parts.items():
                for piece in formula.pieces(key, expert) if path in [part.path for part in parts] else ():
                    if piece.name == name:
                        dims = (2, 1) if piece.transposed else (1, 2)[: len(shape)]
                        region = (*whole, *(index for index in piece.index if isinstance(index, slice)))
                        place = (*(whole or (expert,)), piece.rows)
                        found.append(HubSlice(name, place, key, region, (0, *dims) if stacked else dims))
            yield name, (formula.layout.num_experts, *shape) if stacked else shape, found


def experts_of(block: nn.Module, plan: BlockPlan) -> tuple[Any, int]:
    """Return the experts of a swapped block, and the number of PEFT's wrappers around them."""
    module: Any = block.get_submodule(plan.path)
    depth = 0
    while not isinstance(module, Probes):
        module, depth = module.base_layer, depth + 1
    return module, depth


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """Return a submodule, or None if there is none of this name."""
    child: nn.Module | None = module
    for part in name.split("."):
        child = None if child is None else child._modules.get(part)
    return child


def _after_state_dict(experts: BlockExperts, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    experts.restore_names(state, prefix)


def before_load(block: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of a block: take this rank's experts from the parameters of an unswapped block."""
    plan: Any = block.block_plan
    experts, depth = experts_of(block, plan)
    inside = f"{prefix}{plan.path}.{'base_layer.' * depth}"
    current = {name: prefix + experts.current_name(name, depth) for name in plan.formula.names}
    named = {name: state[key] for name, key in current.items() if key in state}
    if len(named) < len(plan.formula.names):
        return  # torch reports missing and unexpected keys
    for key in current.values():
        del state[key]
    homes = experts.placement.homes_of(experts.dispatcher.rank)
    for key in experts.layout.parameters:
        part = plan.formula.stack(key, named, homes)
        state[inside + key] = distribute_like(part, getattr(experts, key))
    if experts.copies is not None:
        experts.copies.weights_changed()


def _counts(value: Any, num_experts: int) -> bool:
    if isinstance(value, Tensor):
        return value.shape == (num_experts,) and not value.is_floating_point()
    return isinstance(value, list | tuple) and len(value) == num_experts


@cache
def swapped_class(kind: Any) -> Any:
    """Return the class of a swapped block: ``kind``, with a forward pass that dispatches."""

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_block(self, self.block_plan, lambda: kind.forward(self, *args, **kwargs), (args, kwargs))

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle cannot find this class by name, but the original. So it reaches the experts, which refuse.
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or reduced[1][:1] != (swapped,):
            return reduced
        make, (_, *args), *state = reduced
        return _new, (make, kind, *args), *state

    # A graph break, as in MoELayer: collectives and varying row counts cannot be traced.
    members = {"forward": torch._disable_dynamo(forward), "__reduce_ex__": reduce}
    swapped = type(f"Swapped{kind.__name__}", (kind,), members)
    return swapped


def _new(make: Callable[..., Any], kind: type, *args: Any) -> Any:
    return make(swapped_class(kind), *args)


def run_block(block: nn.Module, plan: BlockPlan, forward: Callable[[], Any], inputs: Any) -> Any:
    """Return the result of a swapped block. Collective."""
    experts, _ = experts_of(block, plan)
    adapter = plan.adapter
    try:
        x = tokens_of(inputs, plan.formula.layout.hidden)
        x_TD = x.reshape(-1, x.shape[-1])
        if adapter is not None:
            assert adapter.route is not None
            ids_TK, weights_TK, *extra = adapter.route(block, x_TD)
        else:
            weights, leaves, spec = weights_of(block, plan, forward, x.device)
            ids_TK, weights_TK = chosen(weights.reshape(len(x_TD), plan.passes * x.shape[-1]), plan)
            if not weights_TK.requires_grad and torch.is_grad_enabled() and not bool((ids_TK >= 0).any()):
                # No expert is called here. Dispatch compares with the ranks where weights have gradients.
                trained = (
                    p.requires_grad for name, p in block.named_parameters() if not name.startswith(f"{plan.path}.")
                )
                weights_TK = weights_TK.detach().requires_grad_(x.requires_grad or any(trained))
    except InputError as error:
        experts._refuse(experts, error)
    except Exception as error:  # the other ranks would wait in dispatch
        experts._abort(experts, error)
        raise
    y_TD = block.get_submodule(plan.path)(x_TD, ids_TK, weights_TK)  # with the adapters around it
    if adapter is not None:
        y = y_TD.view(x.shape)
        return y if adapter.output is None else adapter.output(block, x, y, tuple(extra))
    y = y_TD.view(leaves[plan.output].shape).to(weights.dtype)
    leaves[plan.output] = leaves[plan.output] + y if plan.added or plan.rest else y
    return tree_unflatten(leaves, spec)


def weights_of(
    block: nn.Module, plan: BlockPlan, forward: Callable[[], Any], device: torch.device
) -> tuple[Tensor, list[Any], Any]:
    """Return the weights of all experts, and the leaves of the block's result, and their structure, without experts.

    The weights have the shape of the tokens, with ``plan.passes`` times as many values.
    """

    def again(probe: Probe) -> Tensor:
        with replayed(block, device):
            value: Tensor = outputs_of(block, plan, forward, probe, plan.added)[0][plan.output]
        return value

    if plan.added or plan.rest:
        passes = [again(number) for number in range(plan.passes)]
        leaves, spec = outputs_of(block, plan, forward, "zeros")
        if plan.rest:
            passes = [_apart(value, leaves[plan.output]) for value in passes]
    else:
        passes = [again(number) for number in range(plan.passes - 1)]
        leaves, spec = outputs_of(block, plan, forward, plan.passes - 1)
        passes.append(leaves[plan.output])
    return passes[0] if len(passes) == 1 else torch.cat(passes, -1), leaves, spec


def _apart(value: Tensor, rest: Tensor) -> Tensor:
    """Return W of ``value`` = rest + SCALE * W."""
    scaled = value - rest
    # Where ``rest`` was rounded in another way. True weights of this size have no effect beside it.
    noise = scaled.detach().abs() <= rest.detach().abs() / 16
    return scaled.masked_fill(noise, 0) / SCALE


def tokens_of(inputs: Any, hidden: int) -> Tensor:
    """Return the first tensor [..., hidden] of a block's arguments.

    Raises:
        InputError: there is none.
    """
    for leaf in tree_flatten(inputs)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] == hidden and leaf.is_floating_point():
            return leaf
    raise InputError(f"the block needs tokens [..., {hidden}]")


def chosen(weights_TD: Tensor, plan: BlockPlan) -> tuple[Tensor, Tensor]:
    """Return the experts of each token with nonzero weights, and these weights.

    weights_TD: of all passes; zero from E on.

    Raises:
        InputError: they are not, or the block chose more experts for a token than when it was swapped.
    """
    count = plan.formula.layout.num_experts
    weights_TE = weights_TD[:, :count]
    with torch.no_grad():
        size_TE = weights_TE.abs().nan_to_num(nan=torch.inf)
        ids_TK = size_TE.topk(plan.top_k, dim=1).indices
        if len(size_TE):
            used_TD = (weights_TD != 0) & weights_TD.isfinite()  # dispatch raises for others
            most, others = torch.stack([used_TD[:, :count].sum(1).max(), used_TD[:, count:].sum()]).tolist()
            if most > plan.top_k or others:
                raise InputError(
                    f"the block added something to the outputs of its experts, or chose {most} experts for a token; "
                    f"when it was swapped, it added nothing and chose at most {plan.top_k}"
                )
        dropped_TK = size_TE.gather(1, ids_TK) == 0
    return ids_TK.masked_fill(dropped_TK, -1), weights_TE.gather(1, ids_TK)


def call_block(block: nn.Module, x: Tensor) -> Any:
    """Run a block on tokens, which it may take by keyword only."""
    first = next(iter(signature(block.forward).parameters.values()), None)
    return block(**{first.name: x}) if first is not None and first.kind is first.KEYWORD_ONLY else block(x)


def outputs_of(
    block: nn.Module, plan: BlockPlan, forward: Callable[[], Any], probe: Probe, silent: tuple[str, ...] = ()
) -> tuple[list[Any], Any]:
    """Return the leaves of the block's result, and their structure, with probes. silent: modules that return zeros."""
    experts, _ = experts_of(block, plan)
    experts.probe = probe
    try:
        with ExitStack() as silenced:
            for name in silent:
                silenced.enter_context(_silenced(block.get_submodule(name)))
            return tree_flatten(forward())
    finally:
        experts.probe = None


@contextmanager
def _silenced(module: nn.Module) -> Iterator[None]:
    """Context in which ``module`` returns zeros in the shape of its input, or of its output if it draws random numbers.

    A module with dropout is run nevertheless, so that a router after it draws the same noise.
    """
    if any(isinstance(part, nn.Dropout) and part.p for part in module.modules()):
        hook = module.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
        try:
            yield
        finally:
            hook.remove()
        return
    before = vars(module).get("forward")
    vars(module)["forward"] = lambda x, *_, **__: torch.zeros_like(x)
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


@contextmanager
def replayed(module: nn.Module, device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Context of a forward pass that is repeated: random numbers and buffers are afterwards those of before.

    seed: of the random numbers inside; None: they continue.
    """
    replaced = [(owner, owner._buffers) for owner in module.modules() if owner._buffers]
    copies: dict[Tensor | None, Tensor | None] = {None: None}
    devices = [] if device.type == "cpu" else [device]
    try:
        # Copies, because autograd may have saved the buffers: nothing may be written to them.
        for owner, buffers in replaced:
            for buffer in buffers.values():
                copies.setdefault(buffer, None if buffer is None else buffer.clone())
            owner._buffers = {name: copies[buffer] for name, buffer in buffers.items()}
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        for owner, buffers in replaced:
            owner._buffers = buffers
