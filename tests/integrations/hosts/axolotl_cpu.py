"""Plugins of axolotl for tests.

``CpuMesh`` allows FSDP2 on CPU ranks: accelerate uses FSDP on GPUs only, and axolotl makes meshes for "cuda". ``Seed``
makes two runs start from the same adapters, which axolotl draws without a seed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.parallelism_config import ParallelismConfig
from axolotl.integrations.base import BasePlugin

initialise, build_device_mesh = PartialState.__init__, ParallelismConfig.build_device_mesh


def initialise_as_on_gpus(state: Any, *args: Any, **settings: Any) -> None:
    initialise(state, *args, **settings)
    if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class CpuMesh(BasePlugin):  # type: ignore[misc, no-any-unimported, unused-ignore]
    def register(self, cfg: Any) -> None:
        PartialState.__init__ = initialise_as_on_gpus
        ParallelismConfig.build_device_mesh = lambda self, device_type: build_device_mesh(self, "cpu")


class Seed(BasePlugin):  # type: ignore[misc, no-any-unimported, unused-ignore]
    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(int(os.environ.get("RANK", 0)))  # DDP trains the adapters of rank 0
