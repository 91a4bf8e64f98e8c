"""Read and write the state of an optimizer in the files of ``torch.save``, each rank its part.

    optimizer.pt    data.pkl | data/0 | data/1 | ...    a zip: the state dict, and the values of each tensor

torch writes the state dict of tensors without memory, and leaves room for their values. From such a file, and from one
of a single process, it returns where the values of each tensor are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from moe_comm.errors import CorruptFile, UnsupportedModel
from moe_comm.integrations.checkpoint.files import HubFolder, StoredTensor
from moe_comm.integrations.checkpoint.layout import CheckpointTensor, HeldTensor, held_tensors, unwrapped
from moe_comm.integrations.checkpoint.load import agree_in
from moe_comm.integrations.checkpoint.plan import STORED, Described, FilePlan
from moe_comm.integrations.checkpoint.save import Plan, nothing, write_plan
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.integrations.checkpoint.write import Part
from moe_comm.layers.data_parallel.attach import expert_modules
from moe_comm.layers.data_parallel.expert_shard import is_dtensor, like_dtensor
from moe_comm.layers.data_parallel.optimizers import params_of
from moe_comm.layers.data_parallel.state import load_optimizer_state_dict, optimizer_state_dict, torch_optimizer
from moe_comm.runtime.safe_files import open_new
from moe_comm.topology import Sharding


def save_optimizer(model: nn.Module, optimizer: Optimizer, path: Path, group: ProcessGroup | None) -> None:
    """Write the full state of ``optimizer`` as ``torch.save`` of one process, each rank its part. Collective.

    Args:
        model: the model, or a list of models, with the parameters.
        group: all ranks that hold parts of the model.

    Raises:
        UnsupportedModel: see ``optimizer_state_dict``, or a tensor is complex.
        OSError: this rank could not write. The other ranks raise CheckpointError.
    """
    write_plan(lambda: _OptimizerPlan.of_optimizer(model, optimizer, path.name), path.parent, group)


def load_optimizer(model: nn.Module, optimizer: Optimizer, path: Path, group: ProcessGroup | None) -> None:
    """Load this rank's part of the full state in a file of ``torch.save``, without reading the rest. Collective.

    Args:
        model, group: as for ``save_optimizer``.

    Raises:
        UnsupportedModel: the state of a distributed parameter has another shape.
        RankMismatch: the ranks read different files.
        CorruptFile, CheckpointError: a file is damaged, or cannot be read. All errors are raised on every rank.
    """
    fault: Exception | None = None
    digest = ""
    try:
        digest = _load(model, optimizer, path)
    except Exception as error:  # the other ranks wait
        fault = error
    agree_in([] if group is None else [group], fault, f"loading {path}", digest)


class _Parameters:
    """The parameters of an optimizer that ranks hold parts of."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if listed := next((name for name, _, gradients in expert_modules(model) if gradients.shards.listed), None):
            raise UnsupportedModel(
                f"{listed} is in a list of experts, of which ranks have different ones, and optimizers number "
                'parameters. Save one file per rank with moe_comm.optimizer_state_dict(..., form="local")'
            )
        held = {id(one.tensor): one for one in held_tensors(unwrapped(model)).values()}
        params = enumerate(params_of(torch_optimizer(optimizer)))
        self._held = {index: held[id(param)] for index, param in params if id(param) in held}

    def of(self, path: Any, value: Tensor, shape: Callable[[HeldTensor], Sequence[int]]) -> HeldTensor | None:
        """Return the parameter that ``value``, at ``path`` of the state dict, is distributed like. None: it is whole.

        Args:
            shape: returns the shape of such values.

        Raises:
            UnsupportedModel: a rank holds a part of the parameter, and the state has another shape.
        """
        held = self._held.get(path[1].key) if path[0].key == "state" and value.dim() else None
        if held is None:
            return None
        if tuple(value.shape) == tuple(shape(held)):
            return held
        if held.sharding.splits or is_dtensor(held.tensor):
            raise UnsupportedModel(
                f"{keystr(path)} of the optimizer has shape {tuple(value.shape)}, and {held.names[0]} "
                f"{tuple(shape(held))}; the state of parameters that are distributed over ranks must have their shape"
            )
        return None


@dataclass(frozen=True)
class _OptimizerPlan(Plan):
    """state: the state dict, with a ``HeldTensor`` in place of each tensor."""

    state: Any

    @classmethod
    def of_optimizer(cls, model: nn.Module, optimizer: Optimizer, name: str) -> _OptimizerPlan:
        parameters = _Parameters(model, optimizer)
        held: dict[str, HeldTensor] = {}
        whole: set[str] = set()

        def describe(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                # Schedulers put NumPy scalars into lr, which torch.load(weights_only=True) refuses.
                scalar = type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0)
                return value.item() if scalar else value
            key, of_param = keystr(path), parameters.of(path, value, lambda one: one.tensor.shape)
            if value.dtype not in STORED:
                raise UnsupportedModel(
                    f"{key} of the optimizer has dtype {value.dtype}, which cannot be written in parts"
                )
            if of_param is None:
                held[key] = HeldTensor((key,), value, Sharding(tuple(value.shape)))
                whole.add(key)
            else:
                held[key] = replace(of_param, names=(key,), tensor=value)
            return held[key]

        state = tree_map_with_path(describe, optimizer_state_dict(model, optimizer, form="local"))
        layout = {
            key: CheckpointTensor(key, one.sharding.shape, one.tensor.dtype, (HubSlice(key, parameter=key),))
            for key, one in held.items()
        }
        return cls(
            layout,
            {key: entry.dtype for key, entry in layout.items()},
            [FilePlan(name, b"", {}, 0)],
            # Steps are those of the first rank, as in torch: a rank without experts may not count them.
            {key: Described(one.sharding.shape, one.tensor.element_size(), key in whole) for key, one in held.items()},
            {key: Part.of(one) for key, one in held.items()},
            nothing,
            {},
            name,
            state,
        )

    def create(self, folder: Path) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        def without_memory(one: Any) -> Any:
            if not isinstance(one, HeldTensor):
                return one
            return torch.empty(one.sharding.shape, dtype=one.tensor.dtype, device="cpu")

        with FakeTensorMode():
            empty = tree_map(without_memory, self.state)
        with torch.serialization.skip_data(materialize_fake_tensors=True), open_new(folder / self.single) as file:
            torch.save(empty, file)

    def offsets(self, folder: Path, planned: FilePlan) -> Mapping[str, int]:
        tensors = _Stored(folder / planned.name).tensors or {}
        return {key: tensors[key].offset for key in self.layout}


class _Stored:
    """The state dict in a file of ``torch.save``, on "meta", and where the values of its tensors are.

    Attributes:
        tensors: by path in the state dict; None if the values of some cannot be read one by one.

    Raises:
        CorruptFile: the file is damaged.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.state = torch.load(path, map_location="meta", weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError, KeyError) as error:
            raise CorruptFile(f"{path} is damaged or not a file of torch.save: {error}") from error
        if not isinstance(self.state, dict) or "state" not in self.state:
            raise CorruptFile(f"{path} is not the state dict of an optimizer")
        self._file = path.name
        found = [self._find(*leaf) for leaf in tree_flatten_with_path(self.state)[0] if isinstance(leaf[1], Tensor)]
        tensors = {one.name: one for one in found if one is not None}
        self.tensors = tensors if len(tensors) == len(found) else None

    def _find(self, path: Any, value: Tensor) -> StoredTensor | None:
        offset = getattr(value.untyped_storage(), "_checkpoint_offset", None)  # not of files of old releases
        if offset is None or value.dtype not in STORED or not value.is_contiguous():
            return None
        first = offset + value.storage_offset() * value.element_size()
        return StoredTensor(keystr(path), self._file, tuple(value.shape), STORED[value.dtype], first)


def _load(model: nn.Module, optimizer: Optimizer, path: Path) -> str:
    """Load this rank's part. Return a checksum of the file."""
    stored = _Stored(path)
    if stored.tensors is None:
        load_optimizer_state_dict(model, optimizer, torch.load(path, map_location="cpu", weights_only=True))
        return ""
    hub, parameters = HubFolder(path, stored.tensors), _Parameters(model, optimizer)

    def read(key_path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        entry = hub.stored(keystr(key_path))
        held = parameters.of(key_path, value, lambda one: one.sharding.shape)
        if held is None:
            whole = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            hub.read_into(entry, [slice(None)] * value.dim(), whole)
            return whole
        local = torch.empty_like(held.local, dtype=value.dtype)
        for box in held.boxes():
            hub.read_into(entry, box.full, local[box.local])
        return like_dtensor(local, held.tensor) if is_dtensor(held.tensor) else local

    load_optimizer_state_dict(model, optimizer, tree_map_with_path(read, stored.state))
    return hub.digest()
