"""The contestants of ``bench serve``: the same model on all ranks, with its experts in different places.

disaggregated   rank 0: attention, requests        rank 1: experts
colocated       both: attention, requests, half of the experts
replicas        both: the whole model, requests, with the experts of ``swap_moe``
hugging_face    both: the whole model, requests, as transformers loads it
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from moe_comm.bench.serve.settings import HEAD_DIM, ServeBench, tokens_of
from moe_comm.integrations.hugging_face.families import find_experts
from moe_comm.integrations.pretrained import from_pretrained
from moe_comm.integrations.serve_ranks import separate_experts
from moe_comm.integrations.serving import serving
from moe_comm.runtime.safe_files import open_new
from moe_plan.serving.trace import TraceRequest

VOCABULARY = 1024
HUGGING_FACE = "hugging_face"
SEPARATE = ("disaggregated", "micro_batches")
"""Contestants with experts on ranks of their own."""
_OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}


@contextmanager
def model_folder(bench: ServeBench, requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Yield the folder of the model: that of the settings, or a temporary one with random weights."""
    if bench.model is not None:
        yield bench.model
        return
    logging.disable_progress_bar()
    with TemporaryDirectory(prefix="moe_comm-bench-") as folder:
        torch.manual_seed(bench.seed)
        random_model(bench, max(map(tokens_of, requests))).save_pretrained(folder)
        yield folder


def random_model(bench: ServeBench, positions: int) -> Any:
    """Return a Qwen3-MoE with random weights, large enough that routers and logits have few near ties."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": bench.hidden,
        "intermediate_size": bench.ffn,
        "moe_intermediate_size": bench.ffn,
        "num_hidden_layers": bench.layers,
        "num_attention_heads": bench.hidden // HEAD_DIM,
        "num_key_value_heads": max(1, bench.hidden // HEAD_DIM // 2),
        "head_dim": HEAD_DIM,
        "num_experts": bench.experts,
        "num_experts_per_tok": bench.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": positions,
        "initializer_range": bench.hidden**-0.5,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))


def vocabulary(folder: str) -> int:
    """Return the number of tokens that prompts are drawn from."""
    return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)


@dataclass(eq=False)
class ServeContestant:
    """A model on this rank, and the requests that the rank takes.

    Attributes:
        takers: ranks that take requests, in turn.
        local: whether a rank serves without the others.
        micro_batches: forward passes that run at the same time on a rank.
    """

    name: str
    model: Any
    takers: tuple[int, ...]
    local: bool
    micro_batches: int = 1

    def serving(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs. Collective."""
        return nullcontext() if self.name == HUGGING_FACE else serving(self.model, micro_batches=self.micro_batches)

    @property
    def calibrates(self) -> bool:
        """Whether the planner can be calibrated by its steps: one rank runs the model, and others have the experts."""
        return self.name == "disaggregated" and len(self.takers) == 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters on this rank."""
        return sum(one.nbytes for one in self.model.parameters() if not one.is_meta)


def needed_bytes(name: str, bench: ServeBench, folder: str) -> int:
    """Return the bytes of weights on the rank that has the most; those of ``hugging_face`` are in a file."""
    if name == HUGGING_FACE:
        return 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    whole: int = sum(one.nbytes for one in model.parameters())
    of_experts: int = sum(one.nbytes for experts, _ in find_experts(model).values() for one in experts.parameters())
    if name in SEPARATE:
        return max(whole - of_experts, of_experts // (bench.ranks - bench.attention))
    return whole - of_experts + of_experts // (bench.ranks if name == "colocated" else 1)


def mapped_model(folder: str, file: Path) -> Any:
    """Return the unswapped model with its weights in a new file, of which nothing is in memory yet."""
    model = AutoModelForCausalLM.from_pretrained(folder, **_OPTIONS).eval()
    parameters, at = [], 0
    with open_new(file) as opened:
        for one in model.parameters():
            parameters.append((one, at // one.element_size()))
            at += opened.write(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    storage: Any = torch.UntypedStorage.from_file(str(file), False, at)
    for one, offset in parameters:
        one.data = torch.empty(0, dtype=one.dtype, device="cpu").set_(storage, offset, one.shape, one.stride())
    return model


def build(name: str, bench: ServeBench, folder: str, together: ProcessGroup, mapped: Any = None) -> ServeContestant:
    """Load a contestant. Collective.

    Args:
        together: all ranks; not the default group, over which the benchmark communicates while models run.
        mapped: ``mapped_model``, if memory is limited.
    """
    logging.disable_progress_bar()
    rank, everyone = dist.get_rank(), tuple(range(bench.ranks))
    if name == HUGGING_FACE:
        model = mapped or AutoModelForCausalLM.from_pretrained(folder, **_OPTIONS).eval()
        return ServeContestant(name, model, everyone, local=True)
    group, placement, takers = together, None, everyone
    if name == "replicas":
        group = dist.new_group([rank], use_local_synchronization=True)
    if name in SEPARATE:
        takers = everyone[: bench.attention]
        placement = separate_experts(folder, bench.attention, bench.ranks - bench.attention)
    model = from_pretrained(folder, group, placement=placement, device="cpu", **_OPTIONS)
    count = bench.micro_batches if name == "micro_batches" else 1
    return ServeContestant(name, model, takers, local=name == "replicas", micro_batches=count)
