"""What the experts of a block compute, and how their weights map to stacked ones.

gate_up_proj [E, G, D]   the first layers of all experts: gate and up, or one layer; rows are outputs
down_proj    [E, D, F]   the last layers

expert e of a list        w1.weight [F, D]  ─┬▶ gate_up_proj[e, :F]
                          w3.weight [F, D]  ─┴▶ gate_up_proj[e, F:]       w2.weight [D, F] ─▶ down_proj[e]
stacked in one module     w13 [E, D, 2F]    ──▶ gate_up_proj, transposed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel
from moe_comm.kernels.activations import Activation, activation_of


@dataclass(frozen=True)
class ExpertsLayout:
    """Parameter shapes and activation of one experts module.

    Attributes:
        num_experts: number of experts in the module, E.
        hidden, ffn: D and F.
        activation: activation between the two GEMMs; includes whether gate and up are interleaved.
        transposed: whether weights are [E, in, out] instead of [E, out, in].
        bias: whether the module has ``gate_up_proj_bias`` [E, 2F] and ``down_proj_bias`` [E, D].
    """

    num_experts: int
    hidden: int
    ffn: int
    activation: Activation
    transposed: bool = False
    bias: bool = False

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its name in transformers."""
        width = 2 * self.ffn if self.activation.gated else self.ffn
        up, down = (width, self.hidden), (self.hidden, self.ffn)
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (self.num_experts, *(up[::-1] if self.transposed else up)),
            "down_proj": (self.num_experts, *(down[::-1] if self.transposed else down)),
        }
        if self.bias:
            shapes["gate_up_proj_bias"] = (self.num_experts, width)
            shapes["down_proj_bias"] = (self.num_experts, self.hidden)
        return shapes


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

    parts: of each stacked parameter, by its name in ``ExpertsLayout``. Paths contain "{}" for the key of the expert, or
        name a parameter [E, ...] of all experts.
    shapes: of one expert's parameters, by path.
    transposed: matrices are [inputs, outputs], as in ``x @ w``; else [outputs, inputs], as in ``nn.Linear``.
    keys: of the experts, for paths with "{}"; by default their numbers.
    """

    layout: ExpertsLayout
    parts: Mapping[str, tuple[Part, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    transposed: bool
    keys: tuple[str, ...] = ()

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
        return [self.name_of(path, e) for e in range(self.layout.num_experts)] if "{}" in path else [path]

    def name_of(self, path: str, expert: int) -> str:
        """Return the name in the block of a parameter of one expert, or of all."""
        return path.format(self.keys[expert] if self.keys else expert)

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
            yield Piece(self.name_of(part.path, expert), index, transposed, slice(first, first + count))
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

    def run(
        self,
        x_RD: Tensor,
        tensors: Mapping[str, Tensor],
        expert: int,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return an expert's outputs [R, D]. activation: None for that of the layout."""
        of = {key: self.of_expert(key, tensors, expert) for key in self.parts}
        h_RG = F.linear(x_RD, of["gate_up_proj"], of.get("gate_up_proj_bias"))
        act_RF = (activation or self.layout.activation)(h_RG)
        return F.linear(act_RF, of["down_proj"], of.get("down_proj_bias"))

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
        return ExpertFormula(layout, parts, shapes, self.transposed, self.keys), kept


Route = Callable[[Any, Tensor], tuple[Any, ...]]
Output = Callable[[Any, Tensor, Tensor, Any], Any]


@dataclass(frozen=True)
class MoEBlock:
    """What an MoE block of a user's model computes, for ``block_adapter`` and ``MoELayer.from_modules``.

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
