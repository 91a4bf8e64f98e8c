"""``experts_impl="moe_comm"`` through the model loader and the training command of ms-swift, in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integrations.models import VOCAB, gradients, save_model

pytest.importorskip("swift", reason="needs ms-swift: make adapters")


def step(folder: str, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of a model that ms-swift has loaded with ``--experts_impl``."""
    from swift.model.register import get_model_processor

    model, _ = get_model_processor(
        folder, model_type="qwen3_moe", torch_dtype=torch.float32, device_map="cpu", experts_impl=implementation
    )
    assert model.config._experts_implementation == implementation
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), gradients(model)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return the folder of a small Qwen3-MoE and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = save_model("qwen3_moe", tmp_path / "model")
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w3")), pad_token="w0", eos_token="w2"
    ).save_pretrained(folder)
    return folder


def test_experts_impl_reaches_the_model(folder: str) -> None:
    import moe_comm  # noqa: F401  registers the name

    logits, grads = step(folder, "eager")
    got, got_grads = step(folder, "moe_comm")
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
    assert got_grads.keys() == grads.keys() and len(grads) > 10
    for name, value in grads.items():
        torch.testing.assert_close(got_grads[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")


COMMAND = """
import sys
from swift.pipelines.train.sft import SwiftSft
for name in ("eager", "moe_comm"):
    # parses the command line, imports the plugins and loads the model
    run = SwiftSft([argument.replace("EXPERTS_IMPL", name) for argument in sys.argv[1:]])
    log = run.main()["log_history"]
    print("USED", run.model.config._experts_implementation, *(entry["loss"] for entry in log if "loss" in entry))
"""


def sft(folder: str, root: Path) -> list[tuple[str, list[float]]]:
    """Return the implementation and the losses of two steps of ``swift sft``, of two runs in a process of their own."""
    options = f"""
        --model {folder} --model_type qwen3_moe --template dummy --torch_dtype float32 --tuner_type full --bf16 false
        --experts_impl EXPERTS_IMPL --external_plugins {root / "plugin.py"} --dataset {root / "chat.jsonl"}
        --output_dir {root / "EXPERTS_IMPL"} --max_steps 2 --per_device_train_batch_size 4 --learning_rate 0.01
        --gradient_accumulation_steps 1 --gradient_checkpointing false --split_dataset_ratio 0 --dataset_num_proc 1
        --dataloader_num_workers 0 --logging_steps 1 --save_strategy no --eval_strategy no --use_cpu true
        --report_to none --check_model false
    """
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *options.split()], capture_output=True, text=True, timeout=200
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("USED ")]
    assert done.returncode == 0 and len(lines) == 2, done.stdout[-2000:] + done.stderr[-4000:]
    return [(name, [float(loss) for loss in losses]) for _, name, *losses in lines]


def test_the_training_command_uses_experts_impl(folder: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("import moe_comm\n")
    texts = [" ".join(f"w{3 + (7 * row + word) % 90}" for word in range(6)) for row in range(8)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (eager, expected), (ours, losses) = sft(folder, tmp_path)
    assert (eager, ours) == ("eager", "moe_comm") and len(expected) == 2
    assert losses == pytest.approx(expected, rel=1e-4)
