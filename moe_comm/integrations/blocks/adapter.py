"""Descriptions of MoE blocks whose forward pass ``swap_moe`` cannot run with probes.

@moe_comm.block_adapter(MyMoE)
def describe(block):
    return moe_comm.MoEBlock(
        first=("w_gate", "w_up"), last="w_down", activation="swiglu", route=MyMoE.route
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.kernels.activations import Activation, activation_of
from moe_comm.layers.moe.formula import ExpertFormula, ExpertsLayout, Part

Route = Callable[[Any, Tensor], tuple[Any, ...]]
Output = Callable[[Any, Tensor, Tensor, Any], Any]


@dataclass(frozen=True)
class MoEBlock:
    """What an MoE block of a user's model computes, for ``block_adapter``.

    Attributes:
        first: names of the parameters of the experts' first layers in the block: gate and up, or one layer, or one for
            both with gate first. "{}" stands for the number of the expert, or its key in a ``ModuleDict``; a name
            without it is a parameter [E, ...] of all experts.
        last: name of the last layers' parameters.
        activation: a name in ``ACTIVATIONS``, or an ``Activation``.
        transposed: matrices are [inputs, outputs], as in ``x @ w``; else [outputs, inputs], as in ``nn.Linear``.
        first_bias, last_bias: names of the biases; both or neither.
        route: ``route(block, x_TD)`` returns expert ids [T, K], int64, -1 for none, and weights [T, K]; optionally
            further values for ``output``. None: the forward pass of the block is run with probes.
        output: ``output(block, x, y, extra)`` returns the result of the block. x: its tokens [..., D]. y: the sums of
            the experts' outputs, in the shape of x. extra: the further values of ``route``, a tuple. None: y.
    """

    first: str | tuple[str, ...]
    last: str
    activation: str | Activation = "swiglu"
    transposed: bool = False
    first_bias: str | tuple[str, ...] = ()
    last_bias: str | None = None
    route: Route | None = None
    output: Output | None = None

    def formula(self, block: nn.Module) -> ExpertFormula:
        """Return the formula of the experts.

        Raises:
            UnsupportedModel: the block has no such parameters, or their shapes do not fit.
        """
        params = {name: tuple(param.shape) for name, param in block.named_parameters()}
        first, biases = _names(self.first), _names(self.first_bias)
        paths = [*first, self.last, *biases, *([self.last_bias] if self.last_bias else [])]
        keys = _keys(block, self.last, params)
        experts = _count(self.last, params, keys)
        if missing := [path for path in paths if _count(path, params, keys) != experts]:
            raise UnsupportedModel(f"its parameters {missing[0]} are not those of {experts} experts ({self.last})")
        shapes = {
            path: params[path.format(keys[0] if keys else 0)] if "{}" in path else params[path][1:] for path in paths
        }
        if wrong := [path for path in (*first, self.last) if len(shapes[path]) != 2]:
            raise UnsupportedModel(f"its parameter {wrong[0]} has no matrix for each expert")
        activation = activation_of(self.activation)
        hidden, width = shapes[self.last][::-1] if self.transposed else shapes[self.last]
        outputs = sum(shapes[path][1 if self.transposed else 0] for path in first)
        if outputs != (2 if activation.gated else 1) * width:
            raise UnsupportedModel(f"activation {activation.name} does not map {outputs} outputs of {first} to {width}")
        if bool(biases) != bool(self.last_bias):
            raise UnsupportedModel("first_bias and last_bias must both be given, or neither")
        parts = {"gate_up_proj": tuple(map(Part, first)), "down_proj": (Part(self.last),)}
        if self.last_bias:
            parts |= {"gate_up_proj_bias": tuple(map(Part, biases)), "down_proj_bias": (Part(self.last_bias),)}
        layout = ExpertsLayout(experts, hidden, width, activation, bias=bool(self.last_bias))
        return ExpertFormula(layout, parts, shapes, self.transposed, keys)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _keys(block: nn.Module, path: str, params: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the keys of the experts whose parameters ``path`` names; () if they are numbers."""
    experts = dict(block.named_modules()).get(path.partition("{}")[0].removesuffix("."))
    return tuple(experts) if isinstance(experts, nn.ModuleDict) and path.format(0) not in params else ()


def _count(path: str, params: dict[str, tuple[int, ...]], keys: tuple[str, ...]) -> int:
    """Return the number of experts that have a parameter."""
    if "{}" not in path:
        return params[path][0] if path in params and len(params[path]) > 1 else 0
    if keys:
        return len(keys) if all(path.format(key) in params for key in keys) else 0
    experts = 0
    while path.format(experts) in params:
        experts += 1
    return experts


_adapters: dict[type, Callable[[Any], MoEBlock | None]] = {}


def block_adapter(
    kind: type[nn.Module],
) -> Callable[[Callable[[Any], MoEBlock | None]], Callable[[Any], MoEBlock | None]]:
    """Decorator: ``swap_moe`` swaps modules of class ``kind`` as the decorated function describes them.

    The function gets a block and returns a ``MoEBlock``, or None to leave the module unchanged with all that is in it.
    ``swap_moe`` compares each kind of block with a swapped copy of it before it changes the model.

    Raises:
        ConfigError: ``kind`` is no class of modules.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"block_adapter takes a class of modules; got {kind!r}")

    def register(describe: Callable[[Any], MoEBlock | None]) -> Callable[[Any], MoEBlock | None]:
        _adapters[kind] = describe
        return describe

    return register


def adapted_blocks(model: nn.Module) -> dict[str, MoEBlock | None]:
    """Return the result of the adapter of each module of ``model`` that has one, outside others of them.

    Raises:
        UnsupportedModel: an adapter raised, or returned something else.
    """
    results: dict[str, MoEBlock | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        describe = next((_adapters[base] for base in type(module).__mro__ if base in _adapters), None)
        if describe is None or is_inside(name, results):
            continue
        title = f"the adapter of {type(module).__name__}"
        try:
            results[name] = result = describe(module)
        except Exception as error:  # of the user's code: the other ranks wait
            raise UnsupportedModel(f"{title} raised {type(error).__name__}: {error}") from error
        if not (result is None or isinstance(result, MoEBlock)):
            raise UnsupportedModel(f"{title} must return a MoEBlock or None; got {type(result).__name__}")
    return results


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether the module ``name`` is one of ``modules``, or in one."""
    return any(f"{name}.".startswith(f"{module}.".lstrip(".")) for module in modules)
