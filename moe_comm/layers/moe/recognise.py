"""Recognise what the experts of a block compute, from what one of them computes on random rows.

Each assignment of the matrices of an expert, and each activation, is tried. The result is the formula that is nearest
to the outputs of the expert in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel
from moe_comm.kernels.activations import Activation, activation_of, glu
from moe_comm.layers.moe.formula import ExpertFormula, ExpertsLayout, Part
from moe_comm.layers.moe.trial import materialized

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""The function of the gate in each gated activation of ``kernels.activations``."""
TOLERANCE = 1e-5
"""Largest difference of a formula, relative to the largest output. Experts may compute parts in fp32."""


def recognise_experts(
    experts: Any, num_experts: int, device: torch.device, *, stacked: bool, prefix: str = ""
) -> tuple[ExpertFormula, int]:
    """Recognise what experts compute, by the outputs of the first one for random rows.

    Args:
        experts: a list or ``ModuleDict`` of modules, or a module with parameters [E, ...], which are ``stacked``.
        device: on which a copy of the first expert runs.
        prefix: of the experts' names in the paths of the formula.

    Returns:
        The formula; and -1, or for experts that return a tuple of their output and Nones, the number of Nones.

    Raises:
        UnsupportedModel: the experts cannot be run, or no formula computes what they do.
    """
    keys = tuple(experts) if isinstance(experts, nn.ModuleDict) else ()
    first = keys[0] if keys else 0
    expert = copy_of_expert(experts, first, num_experts, device, torch.float64, stacked=stacked)
    prefix = prefix if stacked else f"{prefix}{{}}."
    shapes = {prefix + n: tuple(p.shape[1:] if stacked else p.shape) for n, p in expert.named_parameters()}
    tensors = {f"{prefix}{n}".format(0): param for n, param in expert.named_parameters()}
    inner = [
        module
        for module in expert.modules()
        if module is not expert and not list(module.parameters()) and not isinstance(module, nn.Dropout | nn.Identity)
    ]
    problem: Exception | None = None
    for hidden in sorted({size for shape in shapes.values() if len(shape) == 2 for size in shape}):
        # Large enough that activations differ.
        rows_RD = 4 * torch.randn(8, hidden, dtype=torch.float64, device=device)
        try:
            y_RD, nones = output_of(run_stacked(expert, rows_RD, num_experts) if stacked else expert(rows_RD))
            if y_RD is None or y_RD.shape != rows_RD.shape:
                continue
            formula = _recognise(shapes, tensors, inner, rows_RD, y_RD, num_experts)
            return replace(formula, keys=keys), nones
        except UnsupportedModel as error:
            problem = error
        except Exception as error:  # of the user's code
            problem = problem or UnsupportedModel(f"an expert cannot run on rows [R, {hidden}] ({error})")
    raise problem or UnsupportedModel(f"an expert with the parameters {shapes} does not map rows [R, D] to [R, D]")


def copy_of_expert(
    experts: Any, expert: int | str, num_experts: int, device: torch.device, dtype: torch.dtype, *, stacked: bool
) -> nn.Module:
    """Return a copy of one expert, given its number or key; of stacked experts, one in which all have its weights."""
    if not stacked:
        return materialized(experts[expert], device, dtype)
    assert isinstance(expert, int)
    one = {name: (0, [expert]) for name, _ in experts.named_parameters()}
    copied = materialized(experts, device, dtype, one)
    for param in copied.parameters():
        param.data = param.data.expand(num_experts, *param.shape[1:])
    return copied


def output_of(result: Any) -> tuple[Tensor | None, int]:
    """Return the output of an expert, and the number of Nones after it; -1 if it is no tuple."""
    if isinstance(result, Tensor):
        return result, -1
    if isinstance(result, tuple) and isinstance(result[0], Tensor) and all(other is None for other in result[1:]):
        return result[0], len(result) - 1
    return None, -1


def run_stacked(experts: nn.Module, rows_RD: Tensor, count: int) -> Any:
    """Return the result of one expert of a module with stacked parameters, all of which are equal.

    Modules are called with [E, R, D], with rows [R, D] and their counts [E], or with rows, ids [R, 1] and weights.
    """
    counts_E = torch.zeros(count, dtype=torch.int64, device=rows_RD.device)
    counts_E[0] = len(rows_RD)
    ids_R1 = counts_E.new_zeros(len(rows_RD), 1)
    try:
        batches = experts(rows_RD.expand(count, -1, -1))
        return batches[0]
    except Exception:
        try:
            return experts(rows_RD, counts_E)
        except Exception:
            return experts(rows_RD, ids_R1, rows_RD.new_ones(len(rows_RD), 1))


def _recognise(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    inner: Sequence[nn.Module],
    x_RD: Tensor,
    y_RD: Tensor,
    num_experts: int,
) -> ExpertFormula:
    """Return the formula that maps ``x_RD`` to ``y_RD`` with the weights of the first expert.

    Args:
        shapes: shapes of one expert's parameters, by path in the block.
        tensors: the block's parameters in float64.
        inner: modules that may be the activation.
        x_RD, y_RD: inputs and outputs of the expert in float64.

    Raises:
        UnsupportedModel: no formula does.
    """
    errors = {
        formula: _error(formula, tensors, x_RD, y_RD)
        for formula in _formulas(shapes, inner, x_RD.shape[1], num_experts)
    }
    best = min(errors, key=errors.__getitem__, default=None)
    if best is not None and errors[best] <= TOLERANCE * float(y_RD.abs().max()):
        return best
    raise UnsupportedModel(
        f"no known formula (two or three linear layers, with {', '.join([*_GATED, *_FUNCTIONS])} or an activation "
        f"module of the expert) computes what an expert with the parameters {dict(shapes)} computes"
    )


def check_expert(formula: ExpertFormula, expert: nn.Module, number: int, device: torch.device) -> None:
    """Raise UnsupportedModel if the expert with this number in a list does not compute ``formula``."""
    copied = materialized(expert, device, torch.float64)
    params = dict(copied.named_parameters())
    tensors = {formula.name_of(path, number): params[path.partition("{}.")[2]] for path in formula.shapes}
    rows_RD = 4 * torch.randn(8, formula.layout.hidden, dtype=torch.float64, device=device)
    y_RD, _ = output_of(copied(rows_RD))
    if y_RD is None or y_RD.shape != rows_RD.shape:
        raise UnsupportedModel(f"expert {number} does not map rows [R, D] to [R, D]")
    largest = float(y_RD.abs().max())
    if (error := _error(formula, tensors, rows_RD, y_RD, number)) > TOLERANCE * largest:
        raise UnsupportedModel(
            f"its experts differ: expert 0 was recognised as {formula}, from which expert {number} differs by "
            f"{error:.2g}, of at most {largest:.2g}"
        )


def _error(formula: ExpertFormula, tensors: Mapping[str, Tensor], x_RD: Tensor, y_RD: Tensor, number: int = 0) -> float:
    got_RD = formula.run(x_RD, tensors, number, _plain(formula.layout.activation))
    return float((got_RD - y_RD).abs().max())


def _formulas(
    shapes: Mapping[str, tuple[int, ...]], inner: Sequence[nn.Module], hidden: int, experts: int
) -> Iterator[ExpertFormula]:
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    biases = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
    if len(matrices) not in (2, 3) or len(biases) not in (0, len(matrices)):
        return
    for transposed in (False, True):
        size = {name: shapes[name][::-1] if transposed else shapes[name] for name in matrices}
        for *first, last in permutations(matrices):
            outputs, width = size[last]
            if outputs != hidden or any(size[name][1] != hidden for name in first):
                continue
            sizes = [size[name][0] for name in first]
            if sizes == [width, width]:
                choices = [(True, tuple(Part(name) for name in first))]
            elif sizes == [width]:
                choices = [(False, (Part(first[0]),))]
            elif sizes == [2 * width]:
                halves = Part(first[0], 0, width), Part(first[0], width)
                alternate = Part(first[0], 0, None, 2), Part(first[0], 1, None, 2)
                choices = [(True, pair) for pair in (halves, halves[::-1], alternate, alternate[::-1])]
            else:
                continue
            for gated, parts in choices:
                of_matrix = _biases(biases, [*first, last], size) if biases else {}
                if of_matrix is None:
                    continue
                named = {"gate_up_proj": parts, "down_proj": (Part(last),)}
                if of_matrix:
                    named["gate_up_proj_bias"] = tuple(replace(part, path=of_matrix[part.path]) for part in parts)
                    named["down_proj_bias"] = (Part(of_matrix[last]),)
                for activation in _activations(gated, inner):
                    layout = ExpertsLayout(experts, hidden, width, activation, bias=bool(of_matrix))
                    yield ExpertFormula(layout, named, shapes, transposed)


def _biases(
    biases: Mapping[str, int], matrices: Sequence[str], size: Mapping[str, tuple[int, ...]]
) -> dict[str, str] | None:
    """Return the bias of each matrix: of the same module, else by order; None if the lengths do not fit."""
    same = {name: f"{name.removesuffix('weight')}bias" for name in matrices}
    if not all(bias in biases for bias in same.values()):
        same = dict(zip(sorted(matrices), sorted(biases), strict=True))
    return same if all(biases[bias] == size[name][0] for name, bias in same.items()) else None


def _activations(gated: bool, inner: Sequence[nn.Module]) -> Iterator[Activation]:
    yield from (activation_of(name) for name in (_GATED if gated else _FUNCTIONS))
    for module in inner:
        yield Activation(type(module).__name__, glu(module) if gated else module, gated)


def _plain(activation: Activation) -> Callable[[Tensor], Tensor]:
    if activation.name in _GATED:
        return glu(_FUNCTIONS[_GATED[activation.name]])
    return _FUNCTIONS.get(activation.name, activation.fn)
