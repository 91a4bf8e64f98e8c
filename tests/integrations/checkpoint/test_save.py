"""``save_checkpoint`` writes the files that ``save_pretrained`` of the unswapped model writes, from all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import moe_comm
from tests.integrations.models import SMALL, load, new_model, randomise
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
