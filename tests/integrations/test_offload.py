"""Experts in a file: the outputs of experts in memory, within a budget, and errors on every rank."""

from __future__ import annotations

import errno
import gc
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_comm
from moe_comm import ExpertOffload
from moe_comm.errors import ConfigError, CorruptFile, MoeCommError, StoreIOError, UnsupportedModel
from moe_comm.integrations.hugging_face import swapped_experts
from moe_comm.integrations.offload.cache import ExpertCache, LayerShape
from moe_comm.runtime.offload import files
from tests.integrations.blocks.styles import D, Mixtral as OwnBlock
from tests.integrations.models import load, save_model
from tests.pool import RankPool

PROMPTS = torch.tensor([[3, 7, 11, 5], [2, 9, 4, 8]])
CHUNKS = {torch.float32: 12288, torch.bfloat16: 8192}
"""Bytes of an expert of the small models, in multiples of 4096."""


def generated(model: Any, prompts: Tensor = PROMPTS) -> tuple[Tensor, Tensor]:
    """Return tokens and the logits of each."""
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=6,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("mixtral", torch.float32), ("gpt_oss", torch.float32), ("qwen3_moe", torch.bfloat16)],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_outputs_are_those_of_experts_in_memory(family: str, dtype: torch.dtype, lazy: bool, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "model")
    expected = generated(moe_comm.swap_moe(load(folder, dtype=dtype)))
    offload = ExpertOffload(4 * CHUNKS[dtype], str(tmp_path))
    if lazy:
        model = moe_comm.from_pretrained(folder, dtype=dtype, offload=offload)
        assert model.load_report.kept < 0.8 * model.load_report.whole
        with pytest.raises(ConfigError, match="offloaded for cpu, and are to be loaded for cuda"):
            moe_comm.load_checkpoint(model, folder, device="cuda")
    else:
        model = moe_comm.offload_experts(moe_comm.swap_moe(load(folder, dtype=dtype)), offload)
    for _ in range(2):
        tokens, logits = generated(model)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(logits, expected[1])
    report = moe_comm.offload_report(model)
    assert report.stored == 4 * report.budget == 16 * CHUNKS[dtype]
    assert report.peak <= report.budget
    assert 0 < report.hits < report.used
    assert report.read > 0
    assert sorted(os.listdir(tmp_path)) == ["model"]
    assert all(p.is_meta for one in swapped_experts(model).values() for p in one.parameters())
    gc.collect()  # models of other tests
    threads = set(threading.enumerate())
    del model
    gc.collect()
    assert len([one for one in threads - set(threading.enumerate()) if one.name.startswith("moe_comm offload")]) == 2


def swapped_block() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    block = OwnBlock()
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return moe_comm.swap_moe(nn.Sequential(block)), torch.randn(9, D, generator=generator)


def test_blocks_of_users_and_what_is_refused(tmp_path: Path) -> None:
    model, x_TD = swapped_block()
    with pytest.raises(ConfigError, match="are in memory"):
        moe_comm.offload_report(model)
    size = 36 << 10  # three experts
    for wrong, message in (
        (ExpertOffload("much", str(tmp_path)), "must be a number of bytes or a text"),
        (ExpertOffload(size, str(tmp_path), in_flight=0), "in_flight must be at least 1"),
        (ExpertOffload(size - 1, str(tmp_path)), "36863 bytes, and at least 36864 are needed: 3 experts"),
        (ExpertOffload(size), "pass path"),
        (ExpertOffload(size, "/dev/shm"), "tmpfs, which is memory"),
    ):
        with pytest.raises((ConfigError, StoreIOError), match=message):
            moe_comm.offload_experts(model, wrong)
    with torch.no_grad():
        expected = model(x_TD)
        assert moe_comm.offload_experts(model, ExpertOffload(size, str(tmp_path))) is model
        assert torch.equal(model(x_TD), expected)
        assert torch.equal(model(x_TD[:0]), expected[:0])
    with pytest.raises(ConfigError, match="compute no gradients"):
        model(x_TD.requires_grad_())
    with pytest.raises(ConfigError, match="already offloaded"):
        moe_comm.offload_experts(model, ExpertOffload(size, str(tmp_path)))
    with pytest.raises(UnsupportedModel, match="cannot be saved by state dicts"):
        model.state_dict()
    with pytest.raises(UnsupportedModel, match="cannot be loaded by state dicts"):
        model.load_state_dict({}, strict=False)
    with pytest.raises(ConfigError, match="no experts of swap_moe"):
        moe_comm.offload_experts(OwnBlock(), ExpertOffload(size, str(tmp_path)))


def test_inference_mode_and_an_error_while_an_expert_is_written_leave_the_cache_usable(tmp_path: Path) -> None:
    model, x_TD = swapped_block()
    with torch.inference_mode():
        expected = model(x_TD).clone()
        moe_comm.offload_experts(model, ExpertOffload("36KiB", str(tmp_path), deadline_s=1))
    cache: Any = next(iter(swapped_experts(model).values())).offloaded.cache  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), cache.filling(0, 0) as values:
        _ = values, 1 // 0
    with torch.no_grad():
        assert torch.equal(model(x_TD), expected)


def test_a_damaged_file_and_a_disk_error_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(file: int, view: memoryview, offset: int) -> int:
        count = os.preadv(file, [view], offset)
        view[0] ^= 1
        return count

    def failing(file: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for fault, expected in ((flipped, CorruptFile), (failing, StoreIOError)):
        model, x_TD = swapped_block()
        moe_comm.offload_experts(model, ExpertOffload("36KiB", str(tmp_path)))
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(files, "read_block", fault)
            with pytest.raises(expected):
                model(x_TD)


def on_rank(rank: int, world: int, arg: tuple[str, str]) -> tuple[bool, str, bool]:
    """Return whether the outputs are those of experts in memory, and the error of a rank whose disk fails."""
    folder, path = arg
    plain = moe_comm.swap_moe(load(folder))
    offload = ExpertOffload(3 * CHUNKS[torch.float32], path)
    model = moe_comm.from_pretrained(folder, offload=offload)
    overlapped = moe_comm.from_pretrained(folder, offload=offload, overlap=moe_comm.Overlap(executor="pipelined"))
    prompts = PROMPTS + rank
    same = []
    for one, micro_batches in ((plain, 1), (model, 1), (model, 2), (overlapped, 1)):
        with moe_comm.serving(one, micro_batches=micro_batches):
            same.append(generated(one, prompts))
    equal = all(all(map(torch.equal, same[0], other)) for other in same[1:])
    with (
        pytest.raises(UnsupportedModel, match="offloaded experts cannot be moved"),
        moe_comm.serving(model, checkpoint=folder),
    ):
        pass
    local = sum(len(experts.down_proj) for experts in swapped_experts(model).values())
    equal = equal and moe_comm.offload_report(model).stored == local * CHUNKS[torch.float32] == 8 * 12288
    error = ""
    if rank == 1:
        files.read_block = lambda *_: 0  # the end of the file
    with torch.no_grad():
        for _ in range(3):  # at least one call reads
            try:
                model(prompts)
            except MoeCommError as caught:
                error = f"{type(caught).__name__}: {caught}"
                break
    dist.barrier()
    return equal, error, not [name for name in os.listdir(path) if name != "model"]


def test_ranks_have_their_experts_in_files_and_raise_together(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "model")
    with RankPool(2) as pool:
        results = pool.run(on_rank, (folder, str(tmp_path)), timeout=60)
    assert all(equal and empty for equal, _, empty in results)
    assert results[1][1].startswith("CorruptFile"), results
    assert results[0][1].startswith("PeerRaised: rank 1: raised CorruptFile"), results


LAYERS, EXPERTS = 4, 16


def hit_rate(tmp_path: Path, calls: list[list[list[int]]], slots: int, predict: bool = True) -> tuple[int, int]:
    """Return the experts that were used, and those read, for the experts of each layer by token."""
    shape = LayerShape(EXPERTS, {"w": (files.BLOCK,)}, {"w": torch.uint8})
    offload = ExpertOffload(slots * files.BLOCK, str(tmp_path), predict=predict)
    cache = ExpertCache([shape] * LAYERS, offload, torch.device("cpu"))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            with cache.filling(layer, expert) as values:
                values["w"].fill_(layer * EXPERTS + expert)
    cache.statistics()
    cache.flush()
    for call in calls:
        for layer, used in enumerate(call):
            for expert in cache.visit(layer, [int(expert in used) for expert in range(EXPERTS)]):
                with cache.lease(layer, expert) as values:
                    assert values["w"].eq(layer * EXPERTS + expert).all()
            cache.flush()  # time for what is read ahead
    report = replace(cache.statistics())
    cache.close()
    return report.used, report.used - report.hits


def least_recently_used(calls: list[list[list[int]]], slots: int) -> int:
    """Return the experts that a cache would read that replaces the least recently used ones."""
    held: dict[tuple[int, int], None] = {}
    reads = 0
    for call in calls:
        for layer, used in enumerate(call):
            for key in ((layer, expert) for expert in used):
                if key in held:
                    del held[key]
                else:
                    reads += 1
                    if len(held) == slots:
                        del held[next(iter(held))]
                held[key] = None
    return reads


def test_experts_that_are_used_again_first_stay(tmp_path: Path) -> None:
    """All experts in each pass, as in prefill; and a skewed choice with a related one in the next layer."""
    everything = [[list(range(EXPERTS)) for _ in range(LAYERS)] for _ in range(6)]
    slots = LAYERS * EXPERTS // 4
    used, reads = hit_rate(tmp_path, everything, slots, predict=False)
    assert used == least_recently_used(everything, slots) == 6 * LAYERS * EXPERTS
    assert reads < 0.9 * used
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, EXPERTS + 1).double()
    related = []
    for _ in range(60):
        first = torch.multinomial(weights, 2, generator=generator).tolist()
        related.append([[(5 * layer + 3 * expert) % EXPERTS for expert in first] for layer in range(LAYERS)])
    used, reads = hit_rate(tmp_path, related, slots)
    _, unpredicted = hit_rate(tmp_path, related, slots, predict=False)
    print(reads, unpredicted, least_recently_used(related, slots), used)
    assert reads < unpredicted < least_recently_used(related, slots)
