"""SGLang on CPU ranks. It imports torchvision for its vision models; PyPI has torchvision for torch with CUDA only."""

from __future__ import annotations

import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers.image_utils import is_torchvision_available


class Empty(ModuleType):
    """A module each of whose names is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyTorchvision(MetaPathFinder, Loader):
    """Finds an empty module in place of torchvision and of each of its modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


assert not is_torchvision_available(), "it would be hidden"  # and transformers will not look again
sys.meta_path.insert(0, EmptyTorchvision())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about kernels that need CUDA
    from sglang.srt.distributed import init_distributed_environment
    from sglang.srt.distributed.parallel_state import initialize_model_parallel, model_parallel_is_initialized
    from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

HIDDEN, WIDTH = 32, 24


def start(rank: int, world: int, **options: Any) -> None:
    """Set SGLang's options and build its process groups of ``world`` ranks, as its scheduler does."""
    args: dict[str, Any] = {"moe_a2a_backend": "deepep", "deepep_mode": "normal", **options}
    server = ServerArgs(model_path="dummy", device="cpu", tp_size=world, ep_size=world, **args)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    initialize_moe_config()
    if dist.is_initialized() and not model_parallel_is_initialized():
        init_distributed_environment(world_size=world, rank=rank, local_rank=rank, backend="gloo")
        initialize_model_parallel(backend="gloo")


def moe_layer(num_experts: int, top_k: int, w13_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> Any:
    """Return SGLang's layer with its own experts of these weights."""
    sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    layer = get_moe_impl_class(None)(**sizes, layer_id=0, params_dtype=w13_EFD.dtype)
    load_experts(layer, w13_EFD, w2_EDF)
    return layer


def load_experts(layer: Any, w13_EFD: torch.Tensor, w2_EDF: torch.Tensor) -> None:
    """Copy the weights of a layer's own experts, and make SGLang compute them in plain torch, with ids -1."""
    own = slice(layer.moe_ep_rank * layer.num_local_experts, (layer.moe_ep_rank + 1) * layer.num_local_experts)
    layer.w13_weight.data.copy_(w13_EFD[own])
    layer.w2_weight.data.copy_(w2_EDF[own])
    layer.quant_method.enter_torch_compile(num_tokens=1)  # SGLang's other computation on CPUs accepts no id -1
