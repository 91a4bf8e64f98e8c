"""Training loops of other libraries: Hugging Face transformers in several forms, and DeepSpeed's AutoEP.

    hf_ep_fsdp2       transformers' expert parallelism over all ranks (all-to-all), FSDP2 for other parameters
    hf_fsdp2          FSDP2 for all parameters, including experts: weights are sent, tokens are not
    hf_ddp            full model on each rank, DistributedDataParallel
    deepspeed_autoep  DeepSpeed's AutoEP over all ranks
    deepspeed_zero1   full model on each rank, DeepSpeed's ZeRO-1: optimizer state sharded
    deepspeed_zero2   full model on each rank, DeepSpeed's ZeRO-2: optimizer state and gradients sharded
    hf_one_process    one process, no communication

Each rank trains on its own sequences of the global batch (``ep_size == fsdp_size`` in transformers, no tensor
parallelism), so all contestants process the same tokens in a step. All of them average gradients over the ranks, so the
loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module, util
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_comm.bench.common.ranks import SingleRankMesh
from moe_comm.bench.train.contestant import ContestantInputs, TrainContestant
from moe_comm.bench.train.settings import BETAS, EPS, LR, WEIGHT_DECAY, TrainBench
from moe_comm.errors import pip_install
from moe_comm.topology import ParallelMesh
from moe_comm.train.pipeline.batch import MicroBatch


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Group parameters by device mesh, as the fused AdamW requires, and by weight decay (matrices only)."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault((getattr(param, "device_mesh", None), param.dim() >= 2), []).append(param)
    return [
        {"params": params, "weight_decay": WEIGHT_DECAY if matrix else 0.0} for (_, matrix), params in groups.items()
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contestants use."""
    return torch.optim.AdamW(parameter_groups(model), lr=LR, betas=BETAS, eps=EPS, fused=True)


class HuggingFaceTraining(TrainContestant):
    """A plain training step of transformers' Qwen3-MoE. Subclasses distribute it over ranks.

    It uses ``experts_implementation="grouped_mm"``, which is the default and the fastest on the CPU.

    Attributes:
        ranks_in_mean: number of ranks over which gradients are averaged.
    """

    ranks_in_mean: int

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        if util.find_spec("transformers") is None:
            return f"not installed: {pip_install('hf')}"
        return super().unavailable_reason(bench)

    def __init__(self, inputs: ContestantInputs) -> None:
        bench = inputs.bench
        self.ranks_in_mean = 1 if self.single_process else bench.ranks
        mesh = SingleRankMesh() if self.single_process else ParallelMesh(inputs.config.parallel.mapping(bench.ranks))
        self._stack = ExitStack()
        self._feed = self._stack.enter_context(inputs.feed(mesh))
        self.model = self.build(inputs)
        self.model.train()
        self.optimizer = self.make_optimizer()

    def load(self, inputs: ContestantInputs, **distributed: Any) -> nn.Module:
        """Load the model with the initial weights."""
        transformers = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {}
        if distributed:
            config = import_module("transformers.distributed").DistributedConfig(**distributed)
            options["distributed_config"] = config
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            inputs.weights,
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
            **options,
        )
        return model

    def build(self, inputs: ContestantInputs) -> nn.Module:
        return self.load(inputs)

    def make_optimizer(self) -> Any:
        return adamw(self.model)

    def prepare(self, step: int) -> None:
        batch = self._feed.train(step)
        (self._batch,), self._targets = batch.micro, batch.num_targets

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return this rank's contribution to the mean loss over the global batch."""
        output = self.model(
            input_ids=batch.ids_BS,
            labels=batch.targets_BS,
            shift_labels=batch.targets_BS,
            num_items_in_batch=self._targets,
            use_cache=False,
        )
        loss: Tensor = output.loss
        return loss

    def step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self._batch)
        (loss * self.ranks_in_mean).backward()
        self.optimizer.step()
        self._loss = loss.detach()

    def loss(self) -> float:
        return float(self._loss)

    def close(self) -> None:
        self._stack.close()


class HuggingFaceOneProcess(HuggingFaceTraining):
    """One process with all cores."""

    name = "hf_one_process"
    single_process = True


class HuggingFaceEPTraining(HuggingFaceTraining):
    """transformers' own expert parallelism and FSDP2."""

    name = "hf_ep_fsdp2"

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        reason = super().unavailable_reason(bench)
        if reason is None and util.find_spec("transformers.distributed.expert_parallel") is None:
            reason = "the installed transformers has no expert parallelism; install 5.23 or later"
        return reason

    def build(self, inputs: ContestantInputs) -> nn.Module:
        ranks = inputs.bench.ranks
        return self.load(inputs, fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")


class HuggingFaceFSDPTraining(HuggingFaceTraining):
    """FSDP2 for all parameters, applied by transformers."""

    name = "hf_fsdp2"

    def build(self, inputs: ContestantInputs) -> nn.Module:
        return self.load(inputs, fsdp_size=inputs.bench.ranks)


class HuggingFaceDDPTraining(HuggingFaceTraining):
    """torch's DistributedDataParallel."""

    name = "hf_ddp"

    def build(self, inputs: ContestantInputs) -> nn.Module:
        return DistributedDataParallel(self.load(inputs), gradient_as_bucket_view=True)

    def without_communication(self) -> AbstractContextManager[object]:
        return self.model.no_sync()  # type: ignore[no-any-return,operator]


class DeepSpeedTraining(HuggingFaceTraining):
    """A model of transformers in an engine of DeepSpeed. Subclasses distribute it over ranks.

    Attributes:
        module: the module of DeepSpeed that it needs.
    """

    module: ClassVar[str]

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        if util.find_spec("deepspeed") is None:
            return "not installed: pip install deepspeed"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            import_module(cls.module)
        except Exception as fault:  # building extensions and probing devices can raise any exception
            return f"{cls.module} cannot be imported: {fault}"
        return super().unavailable_reason(bench)

    @abstractmethod
    def ds_config(self, bench: TrainBench) -> dict[str, Any]:
        """Return the part of DeepSpeed's configuration that distributes the model."""

    def build(self, inputs: ContestantInputs) -> nn.Module:
        deepspeed: Any = import_module("deepspeed")
        deepspeed.utils.logger.setLevel(logging.ERROR)
        # DeepSpeed would compile an all-reduce through shared memory. Between hosts it could not be used.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        model = self.load(inputs)
        _patch_registry_for_deepspeed()
        config = {
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "train_micro_batch_size_per_gpu": inputs.bench.batch,
        } | self.ds_config(inputs.bench)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        return self._engine  # type: ignore[no-any-return]

    def make_optimizer(self) -> Any:
        return self._engine.optimizer

    def step(self, step: int) -> None:
        loss = self.forward(self._batch)
        self._engine.backward(loss * self.ranks_in_mean)
        self._engine.step()
        self._loss = loss.detach()


class DeepSpeedAutoEP(DeepSpeedTraining):
    """DeepSpeed's own MoE blocks, expert-parallel over all ranks, without ZeRO."""

    name = "deepspeed_autoep"
    module = "deepspeed.module_inject.auto_ep"

    def ds_config(self, bench: TrainBench) -> dict[str, Any]:
        return {
            "expert_parallel": {"enabled": True, "autoep_size": bench.ranks, "preset_model": "qwen3_moe"},
            "zero_optimization": {"stage": 0},
        }


class DeepSpeedZero1(DeepSpeedTraining):
    """ZeRO-1 with the full model on each rank."""

    name = "deepspeed_zero1"
    module = "deepspeed.runtime.zero.stage_1_and_2"
    stage: ClassVar[int] = 1

    def ds_config(self, bench: TrainBench) -> dict[str, Any]:
        return {"zero_optimization": {"stage": self.stage}}


class DeepSpeedZero2(DeepSpeedZero1):
    """ZeRO-2 with the full model on each rank."""

    name = "deepspeed_zero2"
    stage = 2


def _patch_registry_for_deepspeed() -> None:
    """Let DeepSpeed 0.19.8 look up a private dict of transformers by class name, as before transformers 5.23."""
    capturing = import_module("transformers.utils.output_capturing")
    registry: Any = getattr(capturing, "_CAN_RECORD_REGISTRY", None)
    if registry is None or type(registry) is dict:
        return

    def key_of(model: Any) -> str:
        return model if isinstance(model, str) else str(model.__class__)

    class ByName(type(registry)):  # type: ignore[misc]
        def __setitem__(self, model: Any, value: Any) -> None:
            dict.__setitem__(self, key_of(model), value)

        def get(self, model: Any, default: Any = None) -> Any:
            value = dict.get(self, key_of(model), default)
            return value if isinstance(model, str) else value or {}

    registry.__class__ = ByName


PEERS: dict[str, type[TrainContestant]] = {
    kind.name: kind
    for kind in (
        HuggingFaceEPTraining,
        HuggingFaceFSDPTraining,
        HuggingFaceDDPTraining,
        DeepSpeedAutoEP,
        DeepSpeedZero1,
        DeepSpeedZero2,
        HuggingFaceOneProcess,
    )
}
