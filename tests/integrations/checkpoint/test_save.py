"""``save_checkpoint`` writes the files that ``save_pretrained`` of the unswapped model writes, from all ranks."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import GptOssForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Interleave, WeightConverter

import moe_comm
from moe_comm.errors import CheckpointError, ConfigError, RankMismatch, UnsupportedModel
from moe_comm.integrations.checkpoint import save
from tests.integrations.blocks.styles import STYLES, Model
from tests.integrations.checkpoint.test_load import sharded as shard
from tests.integrations.models import SMALL, batch, ep_group, load, new_model, randomise
from tests.pool import on_ranks

UNEVEN = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unswapped(family: str) -> Any:
    """Return a model with 7 experts."""
    changes = {"tie_word_embeddings": True} if family == "olmoe" else {}
    if family == "deepseek_v3":
        changes |= {"n_group": 1, "topk_group": 1}
    torch.manual_seed(0)
    model = new_model(family, **{UNEVEN.get(family, "num_experts"): 7}, **changes)
    randomise(model, 3)
    return model


def check_files(rank: int, family: str, group: Any, out: Path) -> None:
    """Compare the files with those of ``save_pretrained``. It divides tensors among several files by their storages."""
    model = unswapped(family)
    if rank == 0:
        model.save_pretrained(out / "expected")
    moe_comm.swap_moe(model, group)
    moe_comm.save_checkpoint(model, out / "one")
    moe_comm.save_checkpoint(model, out / "several", max_shard_size="40KB")
    if rank > 0:
        return
    assert content(out / "one") == content(out / "expected")
    files = [*(out / "several").glob("*.safetensors")]
    assert len(files) > 2 and max(path.stat().st_size for path in files) < 50_000
    loaded = {name: value for path in files for name, value in load_file(path).items()}
    expected = load_file(out / "expected" / "model.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    index = json.loads((out / "several" / "model.safetensors.index.json").read_text())
    assert {name: loaded_from for path in files for name in load_file(path) for loaded_from in [path.name]} == index[
        "weight_map"
    ]
    assert index["metadata"] == {
        "total_parameters": unswapped(family).num_parameters(),
        "total_size": sum(value.nbytes for value in expected.values()),
    }
    again = load(str(out / "several")).state_dict()
    assert all(torch.equal(again[name], value) for name, value in unswapped(family).state_dict().items())


@on_ranks(2, 4)
@pytest.mark.parametrize("family", SMALL)
def test_files_are_those_of_save_pretrained(rank: int, world: int, family: str, tmp_path: Path) -> None:
    check_files(rank, family, dist.group.WORLD, tmp_path)


def test_files_of_one_process_are_those_of_save_pretrained(tmp_path: Path) -> None:
    check_files(0, "mixtral", None, tmp_path)


def tensor_parallel(model: Any) -> Any:
    """Swap experts, attention and linears over 2 x 2 ranks."""
    tp = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    ep = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    return moe_comm.swap_linears(moe_comm.swap_attention(moe_comm.swap_moe(model, ep), tp), tp)


def sharded(model: Any) -> Any:
    """Shard with FSDP2. A forward pass has gathered parameters in bf16, and left them so."""
    model = shard(moe_comm.swap_moe(model, ep_group(2)))
    with torch.no_grad():
        model(batch()[dist.get_rank()])
    return model


def replicated(model: Any) -> Any:
    """Replicate experts with copies: each of 2 ranks has room for 2 copies, and there are 2 such groups."""
    placement = moe_comm.Placement(((1,), (0, 1), (1, 0), (0,), (0, 1), (1,), (0,)), 2, 3)
    return DistributedDataParallel(moe_comm.swap_moe(model, ep_group(2), placement=placement))


def several_groups(model: Any) -> Any:
    return moe_comm.swap_moe(model, ep_group(1))


@on_ranks(4)
@pytest.mark.parametrize("distribute", [tensor_parallel, sharded, replicated, several_groups])
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_any_distribution_is_written_as_one_process_writes(
    rank: int, family: str, distribute: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = unswapped(family)
    if rank == 0:
        model.save_pretrained(tmp_path / "expected")
    moe_comm.save_checkpoint(distribute(model), tmp_path / "got")
    if rank == 0:
        assert content(tmp_path / "got") == content(tmp_path / "expected")


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_blocks_of_users_are_written_with_their_own_names(rank: int, style: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(style)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moe_comm.save_checkpoint(moe_comm.swap_moe(model, dist.group.WORLD), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


@on_ranks(4)
@pytest.mark.parametrize("kind", ["hub", "own"])
def test_a_checkpoint_goes_from_4_to_2_to_1_ranks(rank: int, kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return unswapped("deepseek_v3") if kind == "hub" else Model(STYLES[5])

    model = make()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moe_comm.save_checkpoint(moe_comm.swap_moe(model, ep_group(4)), tmp_path / "4")
    for before, ranks in ((4, 2), (2, 1)):
        model = moe_comm.swap_moe(make(), ep_group(ranks))
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        moe_comm.load_checkpoint(model, tmp_path / str(before))
        moe_comm.save_checkpoint(model, tmp_path / str(ranks))
        state = moe_comm.gather_state_dict(model)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    if rank == 0:
        first, *others = (content(tmp_path / str(ranks)) for ranks in (4, 2, 1))
        assert all(one == first for one in others)


@on_ranks(2)
def test_dtype_converts_floating_point_tensors(rank: int, tmp_path: Path) -> None:
    model = unswapped("deepseek_v3")
    expected = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    moe_comm.save_checkpoint(moe_comm.swap_moe(model, dist.group.WORLD), tmp_path, dtype=torch.bfloat16)
    again = load(str(tmp_path), dtype="auto")
    assert again.dtype == torch.bfloat16 and model.dtype == torch.float32
    for name, value in again.state_dict().items():
        assert torch.equal(value.to(torch.bfloat16), expected[name]), name


class Interleaved(GptOssForCausalLM):
    """The hub has the rows of its queries in another order, which slices cannot express."""


def test_families_with_unsupported_layouts_are_written_as_in_memory(tmp_path: Path) -> None:
    converter = WeightConverter("attn.wq", "attn.q_proj.weight", operations=[Interleave(dim=0)])
    register_checkpoint_conversion_mapping("Interleaved", [converter], overwrite=True)
    model = Interleaved(unswapped("gpt_oss").config)
    randomise(model, 3)
    model.save_pretrained(tmp_path / "hub")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moe_comm.save_checkpoint(moe_comm.swap_moe(model), tmp_path / "ours")
    for path in (tmp_path / "hub", tmp_path / "ours"):
        again = Interleaved.from_pretrained(path).state_dict()
        assert all(torch.equal(again[name], value) for name, value in expected.items())
    randomise(model, 4)
    with pytest.raises(UnsupportedModel, match="wq"):
        moe_comm.load_checkpoint(model, tmp_path / "hub")
    moe_comm.load_checkpoint(model, tmp_path / "ours")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@on_ranks(2)
def test_an_older_checkpoint_is_replaced(rank: int, tmp_path: Path) -> None:
    model = moe_comm.swap_moe(unswapped("mixtral"), dist.group.WORLD)
    names: list[set[str]] = []
    for limit in ("40KB", "5GB", "60KB", "40KB"):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        moe_comm.save_checkpoint(model, tmp_path, max_shard_size=limit)
        assert torch.equal(load(str(tmp_path)).lm_head.weight, model.lm_head.weight)
        names.append({path.name for path in tmp_path.iterdir()})
        dist.barrier()
    assert names[1] == {"config.json", "generation_config.json", "model.safetensors"}
    assert names[0] == names[3] != names[2]


@on_ranks(3)
def test_faults_are_raised_on_every_rank_and_leave_nothing(rank: int, tmp_path: Path) -> None:
    group = dist.group.WORLD
    model = moe_comm.swap_moe(unswapped("mixtral"), group)
    moe_comm.save_checkpoint(model, tmp_path / "run")
    before = content(tmp_path / "run")

    # A rank cannot write: its files have a limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            moe_comm.save_checkpoint(model, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    dist.barrier()  # rank 0 has removed its files
    assert content(tmp_path / "run") == before

    # Private constant: the time that a network file system needs, which no test should wait for.
    save.VISIBLE_S = 0.1
    try:
        with pytest.raises(CheckpointError, match="shared"):
            moe_comm.save_checkpoint(model, tmp_path / f"rank{rank}")
    finally:
        save.VISIBLE_S = 10.0
    with pytest.raises(CheckpointError, match="directory"):
        moe_comm.save_checkpoint(model, tmp_path / "run" / "config.json" / "below")
    with pytest.raises(RankMismatch, match="max_shard_size"):
        moe_comm.save_checkpoint(model, tmp_path / "other", max_shard_size=1000 if rank else 2000)
    with pytest.raises(ConfigError, match="5GB"):
        moe_comm.save_checkpoint(model, tmp_path / "other", max_shard_size="5 gigs" if rank == 1 else "5GB")
    model.peft_config = {}
    with pytest.raises(UnsupportedModel, match="adapters"):
        moe_comm.save_checkpoint(model, tmp_path / "other")
    del model.peft_config
    if rank < 2:  # without a rank that has experts
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        with pytest.raises(CheckpointError, match="elements of"):
            moe_comm.save_checkpoint(model, tmp_path / "other", group=pair)
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"run"} and content(tmp_path / "run") == before
    moe_comm.save_checkpoint(model, tmp_path / "run", group=group)
    dist.barrier()
    assert content(tmp_path / "run") == before


def test_an_error_while_files_are_moved_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unswapped("mixtral")
    moe_comm.save_checkpoint(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "model.safetensors":
            raise OSError(errno.EIO, "the disk is gone")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(CheckpointError, match="complete files are in"):
            moe_comm.save_checkpoint(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    (kept,) = tmp_path.glob(".saving-*")
    assert torch.equal(load_file(kept / "model.safetensors")["lm_head.weight"], model.lm_head.weight)
