"""Training loops of ``Trainer`` and accelerate on the ranks of a pool, and the reference loop of one process."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.integrations.hugging_face import prepare_accelerator, swap_moe
from tests.integrations.models import VOCAB, ep_group, load
from tests.pool import RankPool, Work

GLOBAL_BATCH, STEPS, LENGTH = 8, 5, 9
OWN = "own GPT"
"""Used in place of a folder: ``OwnGPT``."""
LEARNING_RATE = 0.02
ADAM_EPSILON = 1e-3
"""Large, because otherwise the rounding error of a gradient close to zero would become a full step."""


@dataclass(frozen=True)
class TrainingCase:
    """One training run.

    Attributes:
        folder: folder of the saved model, or ``OWN``.
        ep: expert-parallel size.
        clip: maximum gradient norm; 0: no clipping.
        accumulate: micro-batches per step.
        out: folder for checkpoints.
        resume: checkpoint to resume from.
        stop: step after which a run of accelerate ends and is saved.
    """

    folder: str
    wrapper: str = "ddp"
    ep: int = 2
    optimizer: str = "adamw"
    clip: float = 0.05
    accumulate: int = 2
    bf16: bool = False
    out: str = ""
    resume: str = ""
    stop: int = STEPS

    def __str__(self) -> str:
        return f"{self.wrapper}-ep{self.ep}-{self.optimizer}-clip{self.clip}-accumulate{self.accumulate}"


class OwnBlock(nn.Module):
    def __init__(self, group: Any, layer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        config = MoEConfig(hidden=16, ffn=24, router=RouterConfig(num_experts=5, top_k=2))
        self.moe = MoELayer.build(config, group, seed=layer, label=f"blocks.{layer}")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class OwnGPT(nn.Module):
    """A custom model with uneven experts that computes its loss like transformers."""

    _no_split_modules = ("OwnBlock",)
    loss_type = "ForCausalLM"  # with it, Trainer assumes that labels are shifted

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(OwnBlock(group, layer) for layer in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **settings: Any) -> CausalLMOutput:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if labels is None else ForCausalLMLoss(logits, labels, VOCAB, **settings)
        return CausalLMOutput(loss=loss, logits=logits)


def whole_model(case: TrainingCase) -> Any:
    """Build the model on one process."""
    return OwnGPT(None) if case.folder == OWN else load(case.folder)


def spread_model(case: TrainingCase) -> Any:
    """Build the model with its experts over ``case.ep`` ranks."""
    return OwnGPT(ep_group(case.ep)) if case.folder == OWN else swap_moe(load(case.folder), ep_group(case.ep))


def examples() -> list[dict[str, Tensor]]:
    """Return sequences with different numbers of targets, so that these numbers differ between ranks, too."""
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for i in range(GLOBAL_BATCH * STEPS):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: i % (LENGTH - 2)] = -100
        sequences.append({"input_ids": ids, "labels": labels})
    return sequences


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def summed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum")


def targets(batch: dict[str, Tensor]) -> Tensor:
    return batch["labels"][:, 1:].ne(-100).sum()


def make_optimizer(model: Any, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE, eps=ADAM_EPSILON, weight_decay=0.0)


def one_process(case: TrainingCase) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters and loss of each step of one process on the global batch, with torch only."""
    settings = {"optimizer": case.optimizer, "clip": case.clip, "bf16": case.bf16, "stop": case.stop}
    return _one_process(TrainingCase(case.folder, **settings))  # type: ignore[arg-type]


@cache
def _one_process(case: TrainingCase) -> tuple[dict[str, Tensor], list[float]]:
    model = whole_model(case).train()
    optimizer = make_optimizer(model, case.optimizer)
    data, losses = examples(), []
    for step in range(case.stop):
        batch = stacked(data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = summed_loss(model, batch) / targets(batch)
        loss.backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: value.detach() for name, value in model.state_dict().items()}, losses


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Set the environment of torchrun and ``accelerate launch --cpu``, and reset the state of accelerate."""
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ |= before


def let_fsdp_run_on_the_cpu() -> None:
    """Enable the FSDP plugin of accelerate on the CPU, where accelerate ignores it."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def make_accelerator(case: TrainingCase, **settings: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradientAccumulationPlugin

    plugin = None
    if case.wrapper == "fsdp2":
        let_fsdp_run_on_the_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT", **settings
        )
    # The loop fetches all batches of a step first, so it sees the end of the data one batch too early.
    accumulation = GradientAccumulationPlugin(num_steps=case.accumulate, sync_with_dataloader=False)
    precision = "bf16" if case.bf16 else "no"
    return Accelerator(
        gradient_accumulation_plugin=accumulation, fsdp_plugin=plugin, cpu=True, mixed_precision=precision
    )


def with_accelerate(
    case: TrainingCase, world: int, prepare: Any = prepare_accelerator, make_model: Any = spread_model
) -> tuple[Any, Any, list[float]]:
    """Run the loop of accelerate's documentation. Return accelerator, model and the losses of all ranks."""
    accelerator = prepare(make_accelerator(case))
    model = make_model(case).train()
    data = DataLoader(examples(), batch_size=GLOBAL_BATCH // world // case.accumulate, collate_fn=stacked)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, make_optimizer(model, case.optimizer), data)
    start = 0
    if case.resume:
        accelerator.load_state(case.resume)
        start = int(case.resume.rsplit("-", 1)[1])
    batches = iter(accelerator.skip_first_batches(data, start * case.accumulate))
    losses = []
    for _ in range(start, case.stop):
        step = [next(batches) for _ in range(case.accumulate)]
        num_targets = accelerator.gather(sum(targets(batch) for batch in step)).sum()
        total = 0.0
        for batch in step:
            with accelerator.accumulate(model):
                loss = summed_loss(model, batch) / num_targets
                total += loss.item()
                # accelerate divides by the number of micro-batches, DDP and FSDP by the number of ranks.
                accelerator.backward(loss * case.accumulate * accelerator.num_processes)
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(accelerator.gather(torch.tensor(total)).sum()))
    if case.out:
        accelerator.save_state(f"{case.out}-{case.stop}")
    return accelerator, model, losses


def make_trainer(case: TrainingCase, world: int, model: Any, kind: Any = None, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from moe_comm.integrations.hugging_face import MoETrainer

    class InOrder(MoETrainer if kind is None else kind):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    assert issubclass(InOrder, Trainer)
    settings = {"save_strategy": "no", "max_steps": STEPS} | settings
    if case.wrapper == "fsdp2":
        settings |= {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    arguments = TrainingArguments(
        output_dir=case.out or f"{tempfile.gettempdir()}/unused",
        per_device_train_batch_size=GLOBAL_BATCH // world // case.accumulate,
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=case.clip,
        optim="sgd" if case.optimizer == "sgd" else "adamw_torch",
        adam_epsilon=ADAM_EPSILON,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=case.bf16,
        **settings,
    )
    if case.wrapper == "fsdp2":
        let_fsdp_run_on_the_cpu()
    return InOrder(model, arguments, train_dataset=examples(), eval_dataset=examples()[:GLOBAL_BATCH])


def matrix(folders: list[str], world: int) -> list[TrainingCase]:
    """Return cases with both wrappers of all models, and every other setting at least once."""
    cases = [TrainingCase(folder, wrapper) for folder in (*folders, OWN) for wrapper in ("ddp", "fsdp2")]
    if world == 2:
        return [
            *(replace(case, optimizer=("adamw", "sgd")[i // 2 % 2]) for i, case in enumerate(cases)),
            replace(cases[0], clip=0.0, accumulate=1),
            replace(cases[3], clip=0.0, accumulate=1),
        ]
    return [replace(case, ep=(2, world)[(i + i // 2) % 2]) for i, case in enumerate(cases)]


def before_resume(folders: list[str], out: Path, **settings: Any) -> list[TrainingCase]:
    """Return a case of each model, with a folder for checkpoints."""
    wrappers = ("fsdp2", "ddp", "fsdp2")
    return [
        TrainingCase(folder, wrapper, out=str(out / str(i)), **settings)
        for i, (folder, wrapper) in enumerate(zip((*folders, OWN), wrappers, strict=True))
    ]


def resumed(case: TrainingCase, checkpoint: str, world: int, **settings: Any) -> TrainingCase:
    """Return the case that resumes with the other wrapper on ``world`` ranks; one rank has DDP."""
    wrapper = "fsdp2" if case.wrapper == "ddp" and world > 1 else "ddp"
    return replace(case, resume=f"{case.out}{checkpoint}", wrapper=wrapper, **settings)


def product(folders: list[str], world: int) -> list[TrainingCase]:
    """Return all combinations of the settings of ``TrainingCase``."""
    choices = itertools.product(
        (*folders, OWN), ("ddp", "fsdp2"), sorted({2, world}), ("sgd", "adamw"), (0.0, 0.05), (1, 2)
    )
    return [TrainingCase(*choice) for choice in choices]


def assert_equals_one_process(case: TrainingCase, params: dict[str, Tensor], losses: list[float]) -> None:
    expected, expected_losses = one_process(case)
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{case} {n}: {m}")
    assert losses == pytest.approx(expected_losses[case.stop - len(losses) :], rel=1e-5), str(case)


def check_against_one_process(train: Work, pool: RankPool, cases: list[TrainingCase]) -> None:
    """Run ``train`` on the ranks of ``pool``. Rank 0 returns parameters and losses of each case."""
    for start in range(0, len(cases), 8):
        batch = cases[start : start + 8]
        for case, (params, losses) in zip(batch, pool.run(train, batch, timeout=90)[0], strict=True):
            assert_equals_one_process(case, params, losses)


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return type and message of the exception of ``call``."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
