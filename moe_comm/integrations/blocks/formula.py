"""What the experts of a block compute, and how their weights map to the stacked ones of ``EPExperts``.

    gate_up_proj [E, G, D]   the first layers of all experts: gate and up, or one layer; rows are outputs
    down_proj    [E, D, F]   the last layers

    expert e of a list        w1.weight [F, D]  ─┬▶ gate_up_proj[e, :F]
                              w3.weight [F, D]  ─┴▶ gate_up_proj[e, F:]       w2.weight [D, F] ─▶ down_proj[e]
    stacked in one module     w13 [E, D, 2F]    ──▶ gate_up_proj, transposed

``recognise`` tries each assignment of the matrices of an expert, and each activation, and returns the one that is
nearest to what the expert computes on random rows in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.integrations.hugging_face.families import ExpertsLayout
from moe_comm.kernels.activations import Activation, activation_of, glu

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


@dataclass(frozen=True)
class Part:
    """Outputs of a layer of an expert.

    path: the parameter in the expert, or in the module with the stacked parameters of all experts.
    begin, end, step: which outputs of the layer; all by default.
    """

    path: str
    begin: int = 0
    end: int | None = None
    step: int = 1

    def __str__(self) -> str:
        return self.path if self == Part(self.path) else f"{self.path}[{self.begin}:{self.end or ''}:{self.step}]"


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter of the block that are rows of an expert's part of a stacked parameter.

    name: of the parameter in the block. index: of the elements in it. transposed: they are [inputs, outputs] there.
    rows: in the expert's part [G, D], [D, F], [G] or [D].
    """

    name: str
    index: tuple[int | slice, ...]
    transposed: bool
    rows: slice

    def of(self, value: Tensor) -> Tensor:
        """Return the view of these elements of the parameter with outputs first."""
        view = value[self.index]
        return view.t() if self.transposed else view


@dataclass(frozen=True, eq=False)
class ExpertFormula:
    """The layers of each expert, and the names of their parameters in the block.

    parts: of each stacked parameter, by its name in ``ExpertsLayout``. Paths contain "{}" for the number of the expert,
        or name a parameter [E, ...] of all experts.
    shapes: of one expert's parameters, by path.
    transposed: matrices are [inputs, outputs], as in ``x @ w``; else [outputs, inputs], as in ``nn.Linear``.
    """

    layout: ExpertsLayout
    parts: Mapping[str, tuple[Part, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    transposed: bool

    def __str__(self) -> str:
        names = {key: " and ".join(str(part) for part in parts) for key, parts in self.parts.items()}
        return (
            f"{self.layout.num_experts} experts of hidden size {self.layout.hidden} and width {self.layout.ffn}, "
            f"activation {self.layout.activation.name}, first layer {names['gate_up_proj']}, last layer "
            f"{names['down_proj']}" + (", transposed" if self.transposed else "")
        )

    @property
    def names(self) -> list[str]:
        """The names of all experts' parameters in the block."""
        return [name for path in self.shapes for name in self.names_of(path)]

    def names_of(self, path: str) -> list[str]:
        """Return the names in the block of a parameter of all experts."""
        return [path.format(e) for e in range(self.layout.num_experts)] if "{}" in path else [path]

    def pieces(self, key: str, expert: int) -> Iterator[Piece]:
        """Iterate over the elements of an expert's part of the stacked parameter ``key``."""
        first = 0
        for part in self.parts[key]:
            shape = self.shapes[part.path]
            rows = slice(part.begin, part.end, part.step)
            transposed = self.transposed and len(shape) == 2
            outputs = shape[1 if transposed else 0]
            index: tuple[int | slice, ...] = (slice(None), rows) if transposed else (rows,)
            if "{}" not in part.path:
                index = (expert, *index)
            count = len(range(*rows.indices(outputs)))
            yield Piece(part.path.format(expert), index, transposed, slice(first, first + count))
            first += count

    @torch.no_grad()
    def stack(self, key: str, tensors: Mapping[str, Tensor], experts: Iterable[int] | None = None) -> Tensor:
        """Return the stacked parameter ``key``. tensors: by name in the block. experts: None for all."""
        ids = list(range(self.layout.num_experts) if experts is None else experts)
        example = tensors[next(self.pieces(key, ids[0] if ids else 0)).name]
        result = example.new_empty(len(ids), *self.layout.parameters[key][1:])
        for target, expert in zip(result, ids, strict=True):
            for piece in self.pieces(key, expert):
                target[piece.rows] = piece.of(tensors[piece.name])
        return result

    def of_expert(self, key: str, tensors: Mapping[str, Tensor], expert: int) -> Tensor:
        """Return an expert's part of the stacked parameter ``key``."""
        return torch.cat([piece.of(tensors[piece.name]) for piece in self.pieces(key, expert)])

    @torch.no_grad()
    def split(self, stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in the block, from the stacked ones of all experts."""
        example, experts = next(iter(stacks.values())), range(self.layout.num_experts)
        result = {}
        for path, shape in self.shapes.items():
            for name in self.names_of(path):
                result[name] = example.new_empty(shape if "{}" in path else (len(experts), *shape))
        for key, value in stacks.items():
            for expert in experts:
                for piece in self.pieces(key, expert):
                    piece.of(result[piece.name]).copy_(value[expert, piece.rows])
        return result

    def slices(self) -> Iterator[tuple[str, tuple[int, ...], list[HubSlice]]]:
        """Yield each parameter in the block, its shape, and the slices of the stacked parameters that it holds."""
        for path, shape in self.shapes.items():
            stacked = "{}" not in path
            whole: tuple[slice, ...] = (slice(None),) if stacked else ()
            for expert, name in enumerate(self.names_of(path)):
                found = []
                for key, parts in self.parts.items():
                    for piece in self.pieces(key, expert) if path in [part.path for part in parts] else ():
                        if piece.name == name:
                            dims = (2, 1) if piece.transposed else (1, 2)[: len(shape)]
                            region = (*whole, *(index for index in piece.index if isinstance(index, slice)))
                            place = (*(whole or (expert,)), piece.rows)
                            found.append(HubSlice(name, place, key, region, (0, *dims) if stacked else dims))
                yield name, (self.layout.num_experts, *shape) if stacked else shape, found

    def narrowed(self, width: int) -> tuple[ExpertFormula, dict[str, tuple[int, list[int]]]]:
        """Return the formula of experts with the first ``width`` activations only, and what remains of the parameters.

        Returns:
            The formula; and the dimension of one expert's parameter that shrinks, with the remaining indices, by path.
        """
        kept: dict[str, tuple[int, list[int]]] = {}
        for key in ("gate_up_proj", "gate_up_proj_bias"):
            for part in self.parts.get(key, ()):
                shape = self.shapes[part.path]
                dim = 1 if self.transposed and len(shape) == 2 else 0
                first = list(range(*slice(part.begin, part.end, part.step).indices(shape[dim])))[:width]
                kept[part.path] = dim, sorted({*first, *kept.get(part.path, (dim, []))[1]})
        for part in self.parts["down_proj"]:
            kept[part.path] = 0 if self.transposed else 1, list(range(width))
        shapes = dict(self.shapes)
        for path, (dim, indices) in kept.items():
            shapes[path] = tuple(len(indices) if d == dim else size for d, size in enumerate(shapes[path]))

        def moved(part: Part) -> Part:
            if part.path not in kept or part.step > 1:
                return part
            begin = kept[part.path][1].index(part.begin)
            return replace(part, begin=begin, end=None if part.end is None else begin + width)

        parts = {key: tuple(map(moved, of)) if key.startswith("gate_up_proj") else of for key, of in self.parts.items()}
        layout = replace(self.layout, ffn=width)
        return ExpertFormula(layout, parts, shapes, self.transposed), kept


def recognise(
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


def _error(formula: ExpertFormula, tensors: Mapping[str, Tensor], x_RD: Tensor, y_RD: Tensor) -> float:
    of = {key: formula.of_expert(key, tensors, 0) for key in formula.parts}
    h_RG = F.linear(x_RD, of["gate_up_proj"], of.get("gate_up_proj_bias"))
    act_RF = _plain(formula.layout.activation)(h_RG)
    return float((F.linear(act_RF, of["down_proj"], of.get("down_proj_bias")) - y_RD).abs().max())


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
