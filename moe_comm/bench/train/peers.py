"""Other loops that train the same model: Hugging Face transformers in several ways, and DeepSpeed's AutoEP.

    hf_ep_fsdp2       transformers' expert parallelism over all ranks (all-to-all), FSDP2 over the rest
    hf_fsdp2          FSDP2 over everything, experts too: no tokens travel, all weights do
    hf_ddp            every rank holds everything; gradients are averaged by DistributedDataParallel
    deepspeed_autoep  DeepSpeed's AutoEP over all ranks
    hf_one_process    one process, no communication

Each rank has its own sequences of the global batch in all of them (transformers' ``ep_size == fsdp_size``, no tensor
parallelism), so a step is the same tokens for everyone. All but DeepSpeed's average gradients over ranks, as it does:
hence the loss is multiplied by their number.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from importlib import import_module, util
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_comm.bench.train.contestant import AloneMesh, Setting, TrainContestant
from moe_comm.bench.train.settings import BETAS, EPS, LR, WEIGHT_DECAY, TrainBench
from moe_comm.topology import ParallelMesh
from moe_comm.train.pipeline.batch import MicroBatch


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay and vectors without, apart by the mesh they lie on, for torch's fused AdamW."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault((getattr(param, "device_mesh", None), param.dim() >= 2), []).append(param)
    return [
        {"params": params, "weight_decay": WEIGHT_DECAY if matrix else 0.0} for (_, matrix), params in groups.items()
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The same optimizer that ours is."""
    return torch.optim.AdamW(parameter_groups(model), lr=LR, betas=BETAS, eps=EPS, fused=True)


class HuggingFace(TrainContestant):
    """A plain training step of transformers' Qwen3-MoE; subclasses spread it over ranks.

    Its experts run by ``experts_implementation="grouped_mm"``, its default and the fastest of them on the CPU.
    """

    ranks_in_mean: int
    """Over how many ranks gradients are averaged."""

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        if util.find_spec("transformers") is None:
            return "not installed: pip install 'moe_comm[hf]'"
        return super().why_not(bench)

    def __init__(self, setting: Setting) -> None:
        bench = setting.bench
        self.ranks_in_mean = 1 if self.alone else bench.ranks
        mesh = AloneMesh() if self.alone else ParallelMesh(setting.config.parallel.mapping(bench.ranks))
        self._stack = ExitStack()
        self._feed = self._stack.enter_context(setting.feed(mesh))
        self.model = self.build(setting)
        self.model.train()
        self.optimizer = self.make_optimizer()

    def load(self, setting: Setting, **distributed: Any) -> nn.Module:
        """The model with ours' first weights."""
        transformers = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {}
        if distributed:
            config = import_module("transformers.distributed").DistributedConfig(**distributed)
            options["distributed_config"] = config
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            setting.weights,
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
            **options,
        )
        return model

    def build(self, setting: Setting) -> nn.Module:
        return self.load(setting)

    def make_optimizer(self) -> Any:
        return adamw(self.model)

    def prepare(self, step: int) -> None:
        batch = self._feed.train(step)
        (self._batch,), self._targets = batch.micro, batch.num_targets

    def forward(self, batch: MicroBatch) -> Tensor:
        """This rank's part of the mean loss over the global batch."""
        found = self.model(
            input_ids=batch.ids_BS,
            labels=batch.targets_BS,
            shift_labels=batch.targets_BS,
            num_items_in_batch=self._targets,
            use_cache=False,
        )
        loss: Tensor = found.loss
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


class HuggingFaceAlone(HuggingFace):
    """On one process with all cores."""

    name = "hf_one_process"
    alone = True


class HuggingFaceEP(HuggingFace):
    """transformers' own expert parallelism and FSDP2."""

    name = "hf_ep_fsdp2"

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        reason = super().why_not(bench)
        if reason is None and util.find_spec("transformers.distributed.expert_parallel") is None:
            reason = "this transformers has no expert parallelism; 5.23 has"
        return reason

    def build(self, setting: Setting) -> nn.Module:
        ranks = setting.bench.ranks
        return self.load(setting, fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")


class HuggingFaceFSDP(HuggingFace):
    """FSDP2 over everything, wrapped by transformers."""

    name = "hf_fsdp2"

    def build(self, setting: Setting) -> nn.Module:
        return self.load(setting, fsdp_size=setting.bench.ranks)


class HuggingFaceDDP(HuggingFace):
    """torch's DistributedDataParallel."""

    name = "hf_ddp"

    def build(self, setting: Setting) -> nn.Module:
        return DistributedDataParallel(self.load(setting), gradient_as_bucket_view=True)


class DeepSpeedAutoEP(HuggingFace):
    """DeepSpeed replaces transformers' MoE blocks by its own, expert-parallel over all ranks; no ZeRO."""

    name = "deepspeed_autoep"
    ds_config: ClassVar[dict[str, Any]] = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        if util.find_spec("deepspeed") is None:
            return "not installed: pip install deepspeed"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            import_module("deepspeed.module_inject.auto_ep")
        except Exception as fault:  # building and probing of devices go wrong in many ways
            return f"deepspeed.module_inject.auto_ep does not import: {fault}"
        return super().why_not(bench)

    def build(self, setting: Setting) -> nn.Module:
        deepspeed: Any = import_module("deepspeed")
        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        ranks = setting.bench.ranks
        model = self.load(setting)
        _let_deepspeed_read_the_registry()
        config = self.ds_config | {
            "train_micro_batch_size_per_gpu": setting.bench.batch,
            "expert_parallel": {"enabled": True, "autoep_size": ranks, "preset_model": "qwen3_moe"},
            "zero_optimization": {"stage": 0},
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        return self._engine  # type: ignore[no-any-return]

    def make_optimizer(self) -> Any:
        return self._engine.optimizer

    def step(self, step: int) -> None:
        loss = self.forward(self._batch)
        self._engine.backward(loss * self.ranks_in_mean)
        self._engine.step()
        self._loss = loss.detach()


def _let_deepspeed_read_the_registry() -> None:
    """DeepSpeed 0.19.8 uses a private dict of transformers by class name, as it was before transformers 5.23."""
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
            found = dict.get(self, key_of(model), default)
            return found if isinstance(model, str) else found or {}

    registry.__class__ = ByName


PEERS: dict[str, type[TrainContestant]] = {
    kind.name: kind for kind in (HuggingFaceEP, HuggingFaceFSDP, HuggingFaceDDP, DeepSpeedAutoEP, HuggingFaceAlone)
}
