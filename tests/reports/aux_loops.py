"""A model whose router is trained mostly by auxiliary losses, and loops of several libraries that train it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers.modeling_outputs import CausalLMOutput

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig

VOCAB, LENGTH, BATCH = 16, 6, 2
Grads = dict[str, Tensor]


class Model(nn.Module):
    """Embedding, an MoE layer with large auxiliary losses, and a head. The loss is a mean, or scaled by Trainer."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 8)
        router = RouterConfig(num_experts=4, top_k=2, balance_loss=0.5, z_loss=0.1)
        self.moe = MoELayer.build(MoEConfig(hidden=8, ffn=8, router=router), group, seed=1)
        self.head = nn.Linear(8, VOCAB)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        logits = self.head(self.moe(self.embedding(input_ids)))
        labels = input_ids if labels is None else labels
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return CausalLMOutput(loss=loss / (labels.numel() if num_items_in_batch is None else num_items_in_batch))


class MeanModel(Model):
    """``Model`` for which Trainer divides the loss itself."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        return super().forward(input_ids, labels)


def examples(count: int) -> list[Tensor]:
    return list(torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(5)))


def micro_batches(count: int) -> list[Tensor]:
    """Return ``count`` micro-batches [B, S] of all ranks."""
    return list(torch.stack(examples(count * BATCH)).split(BATCH))


def expected(batches: Sequence[Tensor]) -> Grads:
    """Return the gradients of the mean over micro-batches of loss + auxiliary losses, which autograd adds here."""
    model = Model()
    model.moe.aux_scale = 0.0
    aux: list[Tensor] = []
    model.moe.router.register_forward_hook(lambda module, args, routing: aux.append(routing.aux_loss))
    total = sum(model(ids).loss for ids in batches) + sum(aux)
    (total / len(batches)).backward()
    return gradients(model)


def gradients(model: Any) -> Grads:
    """Return copies of all gradients, of all experts."""
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def part(ids: Tensor, rank: int, world: int) -> Tensor:
    return ids.chunk(world)[rank]


def own_loop(batches: Sequence[Tensor], scale: float = 2.0**16) -> Grads:
    """Run the documented loop with a loss scaler."""
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for ids in batches:
        loss = moe_comm.scale_aux_like(model(ids).loss)
        scaler.scale(loss / len(batches)).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


def accelerate_loop(rank: int, world: int, batches: Sequence[Tensor], prepared: bool, scaler: bool = False) -> Grads:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from moe_comm.integrations.hugging_face import prepare_accelerator

    plugin = GradientAccumulationPlugin(num_steps=len(batches), sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, cpu=True)
    accelerator = prepare_accelerator(accelerator) if prepared else accelerator
    if scaler:  # accelerate has fp16 on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu")
    group = torch.distributed.group.WORLD if world > 1 else None
    model = Model(group)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    for ids in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(part(ids, rank, world)).loss)
    if scaler:
        accelerator.scaler.unscale_(optimizer.optimizer)
    return gradients(accelerator.unwrap_model(model))


def trainer_loop(
    rank: int, world: int, batches: Sequence[Tensor], kind: Any, model: Any, accumulate: int
) -> list[Grads]:
    """Return the gradients before each step of a trainer."""
    from transformers import TrainerCallback, TrainingArguments

    seen: list[Grads] = []

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    class Record(TrainerCallback):  # type: ignore[misc, no-any-unimported, unused-ignore]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen.append(gradients(getattr(model, "module", model)))

    data = [{"input_ids": row, "labels": row} for ids in batches for row in ids]
    arguments = TrainingArguments(
        output_dir=f"{tempfile.gettempdir()}/unused",
        per_device_train_batch_size=BATCH // world,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        learning_rate=0.0,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    InOrder(model, arguments, train_dataset=data, callbacks=[Record()]).train()
    return seen


def loader(batches: Sequence[Tensor], rank: int = 0, world: int = 1) -> Any:
    return DataLoader([row for ids in batches for row in part(ids, rank, world)], batch_size=BATCH // world)  # type: ignore[arg-type]


def assert_equal(got: Grads, want: Grads) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
