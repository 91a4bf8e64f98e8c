"""``experts_implementation="moe_comm"`` through TRL's ``model_init_kwargs``, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.models import save_model

pytest.importorskip("trl", reason="needs TRL: make adapters")


def losses(folder: str, out: Path, implementation: str) -> list[float]:
    """Return the losses of three steps of ``SFTTrainer``, and check that its model uses ``implementation``."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocabulary = {f"w{i}": i for i in range(96)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w3")), pad_token="w0", eos_token="w2"
    )
    rows = torch.randint(3, 96, (12, 9), generator=torch.Generator().manual_seed(0)).tolist()
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
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )
    assert trainer.model.config._experts_implementation == implementation
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_experts_implementation_reaches_the_model_of_a_trainer(tmp_path: Path) -> None:
    import moe_comm  # noqa: F401  registers the name

    folder = save_model("qwen3_moe", tmp_path / "model")
    eager = losses(folder, tmp_path / "eager", "eager")
    assert losses(folder, tmp_path / "ours", "moe_comm") == pytest.approx(eager, rel=1e-3) and len(eager) == 3
