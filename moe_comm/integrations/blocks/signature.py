"""Texts that are equal for MoE blocks whose code does the same, so that one of them is tried for all.

A text has the classes of all modules, their structure, the shapes and dtypes of their parameters, and the values of all
other attributes: numbers such as a temperature, configuration objects, functions with their closures, buffers. It does
not have the values of parameters. What cannot be compared by value is compared by identity, so two blocks may have
different texts although they do the same, but not equal ones although they do not.

Layers often have their number as an attribute. A number of a module that a run of one block does not read has no effect
on that run, so blocks that differ in such numbers only are equal too (``numbers_read``). This holds for modules that
are always called, not for the experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.integrations.blocks.block import BlockPlan, call_block, replayed
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.layers.moe.trial import Trial, materialized

Number = tuple[str, str]
"""A module in a block, and an attribute of it."""

DEPTH = 16
"""Levels of a configuration object that are compared by value."""
VALUES = 50_000
"""Number of values of a block that are compared. A block with more of them equals no other one."""
BUFFER = 1 << 16
"""Number of elements of a tensor that are compared."""
_TENSORS = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, type(None), type(...))


class Signatures:
    """Texts of blocks, which may be compared while this object exists."""

    def __init__(self) -> None:
        self._alive: list[Any] = []  # an identity may be reused after its object

    def of(self, found: FoundBlock, numbers: Collection[Number] | None = None) -> str:
        """Return the text of a block.

        numbers: those of its modules outside its experts that it has; None for all.
        """
        text = self.of_module(found.block, numbers, found.path, found.adapter)
        return f"{found.path} {found.num_experts} {found.device} {text}"

    def of_module(
        self, block: nn.Module, numbers: Collection[Number] | None = None, path: str | None = None, other: Any = None
    ) -> str:
        """Return the text of a module and another value. path: of modules whose numbers it has in any case."""
        settings = _Settings(self._alive)
        modules = {id(module): number for number, module in enumerate(block.modules())}
        for module in block.modules():
            settings.number(module)
        tensors: dict[int, int] = {}
        try:
            lines = [settings.text(other)]
            for name, module in block.named_modules(remove_duplicate=False):
                lines.append(f"{name} {modules[id(module)]}")
            for name, module in block.named_modules():
                all_numbers = numbers is None or (path is not None and is_inside(name, [path]))
                kind = f"{type(module).__qualname__} {id(type(module))} {module._non_persistent_buffers_set}"
                params = [
                    f"{key} {tensors.setdefault(id(param), len(tensors))} {tuple(param.shape)} {param.dtype} "
                    f"{param.device} {param.requires_grad} {id(type(param))}"
                    for key, param in module.named_parameters(recurse=False)
                ]
                values = {
                    key: value
                    for key, value in vars(module).items()
                    if key not in _TENSORS
                    and not (type(value) is OrderedDict and not value)  # hooks
                    and (all_numbers or type(value) is not int or (name, key) in (numbers or ()))
                }
                buffers = {key: settings.text(value) for key, value in module._buffers.items()}
                lines.append(f"{kind} {params} {buffers} {settings.text(values)}")
        except _TooMany:
            return f"{id(block)}"
        return sha256("\n".join(lines).encode()).hexdigest()


def numbers_read(found: FoundBlock, plan: BlockPlan) -> set[Number] | None:
    """Return the attributes that a run of a copy of a block reads; None if that is not known."""
    if found.adapter is not None:
        return None  # its functions read attributes too
    copy = Trial.of(found.block, plan.formula, found.device, plan.narrow).copy()
    with torch.autocast(found.device.type, enabled=False), replayed(found.block, found.device, seed=0):
        return _read(copy, (*plan.shape, plan.formula.layout.hidden))


def different_experts(found: FoundBlock, hidden: int) -> list[int]:
    """Return the numbers of the experts of a list or dict whose settings are not those of the first one."""
    experts = list(found.experts.children())
    signatures = Signatures()

    def different(numbers: Collection[Number] | None) -> list[int]:
        texts = [signatures.of_module(expert, numbers) for expert in experts]
        return [number for number, text in enumerate(texts) if text != texts[0]]

    numbers = different(None)
    if numbers and (read := _read(materialized(experts[0], found.device, torch.float32), (8, hidden))) is not None:
        return different(read)
    return numbers


def _read(copy: nn.Module, shape: tuple[int, ...]) -> set[Number] | None:
    """Return the attributes that a module reads for random tokens of a shape; None if that is not known."""
    read: set[Number] = set()
    try:
        device = next(copy.parameters()).device
        for name, module in copy.requires_grad_().named_modules():
            module.__class__ = _recording(type(module), name, read)
        for training in (True, False):
            x = torch.randn(shape, dtype=torch.float32, device=device)
            results = tree_flatten(call_block(copy.train(training), x.requires_grad_()))[0]
            sums = [leaf.sum() for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
            torch.stack(sums).sum().backward()
    except Exception:  # of the user's code, as it has another class here
        return None
    return read


def _recording(kind: Any, name: str, read: set[Number]) -> Any:
    """Return a subclass of ``kind`` that adds the attributes which are read to ``read``."""

    def getattribute(self: Any, key: str) -> Any:
        read.add((name, key))
        return kind.__getattribute__(self, key)

    return type(kind.__name__, (kind,), {"__getattribute__": getattribute})


class _TooMany(Exception):
    pass


class _Settings:
    """Texts of the attributes of one block. alive: gets the objects that were compared."""

    def __init__(self, alive: list[Any]) -> None:
        self._alive = alive
        self._seen: dict[int, int] = {}
        self._left = VALUES

    def number(self, value: Any) -> None:
        """Let further texts name ``value`` by its number."""
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)

    def text(self, value: Any, depth: int = 0) -> str:
        """Return a text that is equal for equal values."""
        self._left -= 1
        if self._left < 0:
            raise _TooMany
        kind = type(value)
        if kind in _PLAIN:
            return f"{value!r}"
        if isinstance(value, type):
            return f"{value!r} {id(value)}"
        if kind in (dict, set, list, tuple) and not value:
            return f"{value!r}"
        if (number := self._seen.get(id(value))) is not None:
            return f"<{number}>"
        self.number(value)
        parts = self._parts(value) if depth < DEPTH else None
        if parts is None:
            return f"{kind.__qualname__} at {id(value)}"
        texts = [self.text(part, depth + 1) for part in parts]
        return f"{kind.__qualname__} {id(kind)} ({', '.join(sorted(texts) if kind in (set, frozenset) else texts)})"

    def _parts(self, value: Any) -> list[Any] | None:
        """Return what determines ``value``, or None if only its identity does."""
        kind = type(value)
        if kind is dict:
            return [part for pair in value.items() for part in pair]
        if kind in (list, tuple, set, frozenset):
            return list(value)
        if kind is bytes:
            return [sha256(value).hexdigest()]
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, FunctionType):
            cells = [_cell(cell) for cell in value.__closure__ or ()]
            code, names = id(value.__code__), id(value.__globals__)
            return [code, names, value.__defaults__, value.__kwdefaults__, vars(value), cells]
        if isinstance(value, nn.Module):
            return None
        try:
            reduced = value.__reduce_ex__(2)
            if isinstance(reduced, str):
                return None  # an object of a module
            return [list(part) if index in (3, 4) and part is not None else part for index, part in enumerate(reduced)]
        except Exception:  # it cannot be pickled, and the code may be the user's
            return None


def _tensor(value: Tensor) -> list[Any] | None:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return None
    described = [tuple(value.shape), value.dtype, value.device, value.requires_grad]
    if value.is_meta:
        return described
    if value.numel() > BUFFER:
        return None
    raw = value.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    return [*described, raw.numpy().tobytes()]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
