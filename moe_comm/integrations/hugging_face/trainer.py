"""``transformers.Trainer`` for models whose experts differ between ranks.

Training uses the trainer's ``Accelerator`` after ``prepare_accelerator``. Checkpoints contain all experts, in the files
and formats that ``Trainer`` writes for one process. Any number of ranks can resume from them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from moe_comm.errors import CheckpointError, UnsupportedModel
from moe_comm.integrations.checkpoint.files import INDEX, SINGLE
from moe_comm.integrations.checkpoint.load import agree_in, load_checkpoint
from moe_comm.integrations.checkpoint.optimizer import load_optimizer, save_optimizer
from moe_comm.integrations.checkpoint.save import Settings, is_shared, write_checkpoint
from moe_comm.integrations.hugging_face.accelerator import (
    has_distributed_experts,
    prepare_accelerator,
    with_mixin,
    write_on,
)
from moe_comm.integrations.hugging_face.state import gather_for_saving, has_adapters
from moe_comm.layers.data_parallel import optimizer_state_dict, state_dict
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.lazy import after_import
from moe_comm.runtime.safe_files import replacing

ADAPTERS = "adapter_model.*"
"""Files in which PEFT saves adapters."""


class MoETrainerMixin:
    """Mixin for subclasses of ``Trainer``: ``class MyTrainer(MoETrainerMixin, Seq2SeqTrainer)``.

    The model may be swapped by ``swap_moe`` or not. DDP and FSDP2 are supported. The mixin also restores experts when
    a model on one rank resumes: ``Trainer`` of transformers 5.23 saves experts under their hub names, does not find
    these names when it resumes, and only logs a warning.
    """

    handles_experts = True

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Create the accelerator and prepare it for expert parallelism."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare_accelerator(self.accelerator)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Run a micro-batch. The auxiliary losses of transformers (``output_router_logits``) are averaged over a step.

        ``Trainer`` divides the main loss by the number of targets of the step, but each micro-batch, and with
        ``average_tokens_across_devices`` each rank, adds its auxiliary loss in full.
        """
        step = super().training_step  # type: ignore[misc]
        # Otherwise Trainer divides the sum of both losses, or the trainer (of TRL) averages the auxiliary loss.
        added = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        if not added or hasattr(self, "aux_loss_enabled"):
            return step(model, inputs, num_items_in_batch)
        parts = self.current_gradient_accumulation_steps
        if self.args.average_tokens_across_devices:
            parts *= self.accelerator.num_processes // self.get_tp_size()
        hook = self.accelerator.unwrap_model(model).register_forward_hook(partial(_divide_auxiliary_loss, parts))
        try:
            return step(model, inputs, num_items_in_batch)
        finally:
            hook.remove()

    def _has_mixed_mesh_grads(self: Any, model: Any) -> bool:
        # The accelerator's clip_grad_norm_ supports parameters on different meshes.
        return not has_distributed_experts(model) and super()._has_mixed_mesh_grads(model)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full model for ``from_pretrained``; each rank writes its part. Collective."""
        if not has_distributed_experts(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        if has_adapters(self.model) or self._gathers(folder):
            state = gather_for_saving(self.model, rank0_only=not self.args.save_on_each_node)
            write_on(self.args.should_save, partial(self._save, folder, state_dict=state), folder)
        else:
            write_on(self.args.should_save, partial(self._save_without_weights, folder), folder)
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            limit: Any = "50GB" if isinstance(model, PreTrainedModel) else sys.maxsize  # as ``Trainer._save``
            write_checkpoint(model, Path(folder), dist.group.WORLD, Settings(limit))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _gathers(self: Any, folder: str) -> bool:
        """Whether ranks gather what they write to ``folder``, because they do not share files. Collective."""
        return self.args.save_on_each_node or not is_shared(Path(folder), dist.group.WORLD)

    def _save_without_weights(self: Any, folder: str) -> None:
        """Write what ``Trainer`` writes besides the configuration and the weights of a model of transformers."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        before = vars(model).get("save_pretrained")
        model.save_pretrained = _nothing
        try:
            self._save(folder, state_dict={})
        finally:
            del model.save_pretrained
            if before is not None:
                model.save_pretrained = before

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not has_distributed_experts(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        optimizer_path, path = (os.path.join(output_dir, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if self._gathers(output_dir):
            rank0_only = not self.args.save_on_each_node
            state = optimizer_state_dict(self.model, self.optimizer, rank0_only=rank0_only, cpu=True)
            write_on(self.args.should_save, partial(_save, state, optimizer_path), optimizer_path)
        else:
            save_optimizer(self.model, self.optimizer, Path(optimizer_path), dist.group.WORLD)
        write_on(self.args.should_save, partial(_save, self.lr_scheduler.state_dict(), path), path)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        if has_adapters(model):
            fault = _adapter_fault(resume_from_checkpoint)
            if (world := dist.group.WORLD) is not None and has_distributed_experts(model):
                agree_in([world], fault, f"loading {resume_from_checkpoint}")
            elif fault is not None:
                raise fault
        if not self._load_weights(resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        best = self.state.best_model_checkpoint
        if self._load_weights(best, self.model):
            return
        if self.is_fsdp_enabled and has_adapters(self.model) and has_distributed_experts(self.model):
            super()._load_from_checkpoint(best, self.model)  # type: ignore[misc]  # else it reads files of FSDP
            return
        super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self: Any, folder: str, model: Any) -> bool:
        """Load the files of ``save_model``. Return False if ``Trainer`` must load them. Collective."""
        if has_adapters(model):
            return False
        distributed = has_distributed_experts(model)
        if not distributed:
            found = any(os.path.isfile(os.path.join(folder, name)) for name in (SINGLE, INDEX))
            if not found or self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
                return False
        fault: Exception | None = None
        try:
            load_checkpoint(model, folder)
        except UnsupportedModel as error:
            if not distributed:  # nothing was read
                return False
            fault = error
        except Exception as error:
            fault = error
        if distributed and (world := dist.group.WORLD) is not None:
            agree_in([world], fault, f"loading {folder}")  # there may be several expert-parallel groups
        elif fault is not None:
            raise fault
        return True

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        paths = [os.path.join(str(checkpoint), name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if not has_distributed_experts(self.model) or not _all_see(self.model, paths):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load_optimizer(self.model, self.optimizer, Path(paths[0]), dist.group.WORLD)
        self.lr_scheduler.load_state_dict(torch.load(paths[1], map_location="cpu", weights_only=True))


def _adapter_fault(folder: str) -> CheckpointError | None:
    """Return the error if ``folder`` contains a full model and no adapters.

    ``Trainer`` loads no weights then, logs a warning, and fails later if there is a state of the optimizer.
    """
    adapters = [found for pattern in (ADAPTERS, f"*/{ADAPTERS}") for found in Path(folder).glob(pattern)]
    if adapters or not any(Path(folder, name).is_file() for name in (SINGLE, INDEX)):
        return None
    return CheckpointError(
        f"{folder} contains a full model, and the model of this trainer has adapters (LoRA). Resume from a checkpoint "
        "of a run with adapters. To train adapters of the saved model, load it with from_pretrained before "
        "get_peft_model, and do not resume"
    )


def _all_see(model: Any, paths: list[str]) -> bool:
    """Return whether all files exist. Collective.

    Raises:
        CheckpointError: they exist for some ranks only, which would wait for the others in ``load_optimizer``.
    """
    sees = torch.tensor([all(map(os.path.isfile, paths))], dtype=torch.bool, device=next(model.parameters()).device)
    seen = gather_values(sees, dist.group.WORLD, "looking for the optimizer's files").flatten().tolist()
    if any(seen) and not all(seen):
        without = [rank for rank, found in enumerate(seen) if not found]
        raise CheckpointError(f"ranks {without} do not find {' or '.join(paths)}, which other ranks find")
    return all(seen)


def _divide_auxiliary_loss(parts: int, module: Any, args: Any, output: Any) -> None:
    """Divide the gradient of the auxiliary loss that a model of transformers has added to its loss."""
    aux_loss = getattr(output, "aux_loss", None)
    if isinstance(aux_loss, Tensor) and aux_loss.requires_grad:
        aux_loss.register_hook(lambda grad: grad / parts)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write nothing."""


def _save(values: object, path: str) -> None:
    with replacing(Path(path)) as file:
        torch.save(values, file)


class MoETrainer(MoETrainerMixin, Trainer):
    """``transformers.Trainer`` that trains, saves and resumes models swapped by ``swap_moe``.

    model = moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), dist.group.WORLD)
    MoETrainer(model, TrainingArguments(...), train_dataset=data).train()
    """


def prepare_trainer(trainer: Any) -> Any:
    """Add ``MoETrainerMixin`` to a trainer that another program has created.

    Args:
        trainer: a ``Trainer`` that has not prepared its model yet. Changed in place: its class is replaced by a
            subclass.

    Returns:
        ``trainer``.
    """
    prepare_accelerator(trainer.accelerator)
    return with_mixin(trainer, MoETrainerMixin)


def _follow_trl(name: str) -> None:
    """Let a trainer of TRL hash the parts of all ranks, to find stored log-probabilities of a reference model.

    TRL hashes ``state_dict()``, which has the experts of one rank.
    """
    trl = sys.modules[name]
    original = getattr(trl, "hash_module", None)
    if original is None:
        return

    @wraps(original)
    def hash_module(model: Any) -> str:
        if not has_distributed_experts(model):
            return str(original(model))
        local = original(SimpleNamespace(state_dict=partial(state_dict, model, form="local")))
        device = next(model.parameters()).device
        digest = torch.tensor([*local.encode()], dtype=torch.uint8, device=device)
        digests = gather_values(digest, dist.group.WORLD, "hashing the reference model")
        return hashlib.sha256(digests.cpu().numpy().tobytes()).hexdigest()

    trl.hash_module = hash_module  # type: ignore[attr-defined]


for _name in ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"):
    after_import([_name], partial(_follow_trl, _name))
