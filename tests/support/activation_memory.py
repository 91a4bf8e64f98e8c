"""The memory that a forward pass stores for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _StorageRecorder(TorchDispatchMode):
    """Records the memory of each tensor that operators read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                # By address, as views created by native code are different storages of the same memory.
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out


def activation_bytes(forward: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Return the number of bytes that ``forward`` stores for backward.

    This is measured: the memory that operators touched, that was allocated during ``forward``, and that is alive after
    it, including its result.

    Args:
        forward: runs with autograd and returns the tensor that holds the graph (loss or hidden states).
        exclude: tensors that are not counted: parameters, buffers, inputs.
    """
    excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
    with _StorageRecorder() as recorder:
        result = forward()
    storages = recorder.storages.items()
    num_bytes: int = sum(size for address, (ref, size) in storages if address not in excluded and not ref.expired())
    del result
    return num_bytes
