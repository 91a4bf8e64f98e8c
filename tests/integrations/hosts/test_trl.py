"""TRL: ``experts_implementation="moe_comm"`` in one process, and swapped models on 2 ranks against one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_comm
from moe_comm.integrations.hugging_face import MoETrainerMixin, swap_moe
from tests.integrations.loops import ADAM_EPSILON, launched
from tests.integrations.models import VOCAB, ep_group, load, save_model
from tests.pool import RankPool

pytest.importorskip("trl", reason="needs TRL: make adapters")

LORA: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
BATCH, STEPS, SAVED = 4, 3, 2


@dataclass(frozen=True)
class Case:
    """A run of ``SFTTrainer`` or ``DPOTrainer``.

    Attributes:
        adapters: "config": the trainer adds adapters (``peft_config``). "model": the model has them. "": full training.
        swapped: the experts are distributed.
        mixin: the class of the trainer has ``MoETrainerMixin``.
        copied: the reference model of DPO is a copy of the model, by ``create_reference_model``.
        data: folder of the data set. "": it is made in memory.
        settings: of ``SFTConfig`` or ``DPOConfig``.
    """

    folder: str
    out: str
    kind: str = "SFT"
    adapters: str = ""
    swapped: bool = True
    mixin: bool = True
    copied: bool = False
    data: str = ""
    resume: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


def rows(seed: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (BATCH * STEPS, length), generator=generator).tolist()


def dataset(kind: str) -> Any:
    from datasets import Dataset

    if kind == "SFT":
        return Dataset.from_dict({"input_ids": [row[: 9 - i % 4] for i, row in enumerate(rows(0))]})
    columns = ("prompt", 4), ("chosen", 5), ("rejected", 3)
    texts = {}
    for seed, (name, length) in enumerate(columns):
        texts[name] = [" ".join(f"w{i}" for i in row) for row in rows(seed, length)]
    return Dataset.from_dict(texts)


def make(case: Case, world: int) -> Any:
    import peft
    import trl
    from datasets import Dataset
    from trl.experimental.utils import create_reference_model

    base, config = getattr(trl, f"{case.kind}Trainer"), getattr(trl, f"{case.kind}Config")
    kind = type("Mine", (MoETrainerMixin, base), {}) if case.mixin else base
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "learning_rate": 0.02,
    }
    settings |= {"router_aux_loss_coef": 0.0, "adam_epsilon": ADAM_EPSILON, "lr_scheduler_type": "constant"}
    settings |= {"max_grad_norm": 0.05, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
    settings |= {"per_device_train_batch_size": BATCH // world, "disable_tqdm": True} | case.settings
    arguments = config(case.out, **settings)
    model = load(case.folder)
    if case.swapped:
        model = swap_moe(model, ep_group(world))
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=case.adapters != "model", **LORA)
    if case.adapters == "model":
        model = peft.get_peft_model(model, lora)
    more = {}
    if case.copied:
        copied = create_reference_model(model)
        # DPOTrainer of TRL 1.16 cannot compute log-probabilities with a PeftModel as ``ref_model``.
        more["ref_model"] = copied.get_base_model() if case.adapters else copied
    return kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.load_from_disk(case.data) if case.data else dataset(case.kind),
        processing_class=tokenizer(),
        peft_config=lora if case.adapters == "config" else None,
        **more,
    )


def run(rank: int, world: int, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss and the norm of the gradients of each step, and the parameters that were trained."""
    with launched(rank, world):
        trainer = make(case, world)
        trainer.train(resume_from_checkpoint=case.resume or None)
        trainer.save_model(f"{case.out}/final")
        trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        state = moe_comm.state_dict(trainer.model)
        log = [entry[key] for entry in trainer.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]
        return log, {name: state[name].clone() for name in trained}


def assert_same(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0][-len(got[0]) :], rel=1e-4) and got[0]
    assert got[1].keys() == want[1].keys() and got[1]
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("adapters", ["", "config", "model"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_swapped_models_train_as_in_one_process(
    kind: str, adapters: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    """With gradient checkpointing, which TRL enables. The reference model of DPO is the model without adapters, a copy
    of the adapters, or a model that TRL loads."""
    case = Case(folders[0], str(tmp_path / "two"), kind, adapters)
    one = replace(case, out=str(tmp_path / "one"), swapped=False, mixin=False)
    want = run(0, 1, one)
    for got in pool2.run(run, case):
        assert_same(got, want)
    again = replace(case, resume=f"{one.out}/checkpoint-{SAVED}")
    for got in pool2.run(run, again):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("adapters", "references"), [("", "copied and computed"), ("config", "computed"), ("model", "copied")]
)
def test_references_are_computed_in_advance_or_by_a_copy_as_in_one_process(
    adapters: str, references: str, folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    dataset("DPO").save_to_disk(tmp_path / "data")  # the ranks read what rank 0 has computed beside it
    case = Case(folders[1], str(tmp_path / "two"), "DPO", adapters, data=str(tmp_path / "data"))
    want = run(0, 1, replace(case, out=str(tmp_path / "one"), swapped=False, mixin=False))
    if "computed" in references:
        for got in pool2.run(run, replace(case, settings={"precompute_ref_log_probs": True})):
            assert_same(got, want)
    if "copied" in references:
        for got in pool2.run(run, replace(case, copied=True)):
            assert_same(got, want)


def test_auxiliary_losses_are_averaged_over_ranks_as_in_ddp(
    folders: list[str], tmp_path: Path, pool2: RankPool
) -> None:
    settings = {"router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    case = Case(folders[0], str(tmp_path / "ours"), settings=settings)
    want = pool2.run(run, replace(case, out=str(tmp_path / "ddp"), swapped=False, mixin=False))
    assert_same(pool2.run(run, case)[0], want[0])


def losses(folder: str, out: Path, implementation: str) -> list[float]:
    """Return the losses of three steps of ``SFTTrainer``, and check that its model uses ``implementation``."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments: dict[str, Any] = {"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False}
    trainer = SFTTrainer(
        model=folder,
        args=SFTConfig(
            str(out),
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-2,
            model_init_kwargs={"experts_implementation": implementation, "dtype": torch.float32},
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows(0)}),
        processing_class=tokenizer(),
    )
    assert trainer.model.config._experts_implementation == implementation
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_experts_implementation_reaches_the_model_of_a_trainer(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "model")
    eager = losses(folder, tmp_path / "eager", "eager")
    assert losses(folder, tmp_path / "ours", "moe_comm") == pytest.approx(eager, rel=1e-3) and len(eager) == 3
