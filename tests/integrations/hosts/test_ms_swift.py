"""``experts_impl="moe_comm"`` through the model loader of ms-swift, in one process."""

from __future__ import annotations

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


def test_experts_impl_reaches_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    import moe_comm  # noqa: F401  registers the name

    folder = save_model("qwen3_moe", tmp_path / "model")
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w3")), pad_token="w0", eos_token="w2"
    ).save_pretrained(folder)
    logits, grads = step(folder, "eager")
    got, got_grads = step(folder, "moe_comm")
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
    assert got_grads.keys() == grads.keys() and len(grads) > 10
    for name, value in grads.items():
        torch.testing.assert_close(got_grads[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")
