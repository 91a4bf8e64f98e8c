"""Every mapping loads the checkpoint of every other mapping bit for bit. Each part is written once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import CheckpointError
from moe_comm.topology import Box, ParallelConfig, Sharding, ShardSlice, Split
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, load, read_tensor
from moe_comm.train.checkpoint.planner import EntryPlanner, Stager
from tests.pool import RankPool, on_ranks
from tests.train.checkpoint.common import Mapping_, entries_of, same_bits, wholes

MAPPINGS = [
    Mapping_(ParallelConfig(), "replicate"),
    Mapping_(ParallelConfig(tp=2, etp=2), "replicate"),
    Mapping_(ParallelConfig(dp=2, ep=2), "zero1"),
    Mapping_(ParallelConfig(pp=2), "replicate"),
    Mapping_(ParallelConfig(tp=2, dp=2, ep=2, etp=2), "zero1"),
    Mapping_(ParallelConfig(tp=4, ep=4), "fsdp"),
    Mapping_(ParallelConfig(dp=2, cp=2, ep=2), "replicate"),
    Mapping_(ParallelConfig(pp=2, dp=2, ep=2), "fsdp"),
]
WORLDS = (2, 4)
STATE = {"sampler": {"epoch": 3, "position": 2**40}, "loss": 0.1, "text": 'a = "b"\n'}


@pytest.fixture(scope="module")
def saved(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoints by the mapping that saved them."""
    root = tmp_path_factory.mktemp("checkpoints")
    for world in WORLDS:
        pools[world].run(save_all, (root, [m for m in MAPPINGS if m.config.world == world]))
    save_all(0, 1, (root, [m for m in MAPPINGS if m.config.world == 1]))
    return {str(mapping): root / str(mapping) / "step-00000100" for mapping in MAPPINGS}


def save_all(rank: int, world: int, arg: tuple[Path, list[Mapping_]]) -> None:
    root, mappings = arg
    for mapping in mappings:
        with Checkpointer(root / str(mapping)) as checkpointer:
            checkpointer.save(100, entries_of(mapping, rank), STATE, {"rank": rank})


def load_all(rank: int, world: int, arg: tuple[dict[str, Path], list[Mapping_]]) -> list[str]:
    saved, mappings = arg
    wrong = []
    with Checkpointer("/nowhere") as checkpointer:
        for mapping in mappings:
            for source, path in saved.items():
                expected, entries = entries_of(mapping, rank), entries_of(mapping, rank, fill=False)
                loaded = checkpointer.load(path, entries)
                assert (loaded.step, loaded.state) == (100, STATE)
                for name, entry in entries.items():
                    if not same_bits(entry.tensor, expected[name].tensor):
                        wrong.append(f"{source} -> {mapping}: {name} on rank {rank}")
    return wrong


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_every_mapping_loads_the_checkpoint_of_every_other_bit_for_bit(
    pools: dict[int, RankPool], saved: dict[str, Path], world: int
) -> None:
    arg = (saved, [mapping for mapping in MAPPINGS if mapping.config.world == world])
    results = pools[world].run(load_all, arg, timeout=120) if world > 1 else [load_all(0, 1, arg)]
    assert [text for texts in results for text in texts] == []


def test_one_process_reads_whole_tensors_from_any_mapping(saved: dict[str, Path]) -> None:
    expected = wholes(ParallelConfig())
    for path in saved.values():
        reader = CheckpointReader(path)
        assert reader.names == tuple(sorted(expected))
        for name in reader.names:
            assert reader.shape(name) == tuple(expected[name].shape)
            assert reader.dtype(name) == expected[name].dtype
            assert same_bits(reader.read(name), expected[name])
        assert reader.state == STATE
    assert same_bits(read_tensor(path, "model/embed.weight"), expected["model/embed.weight"])


def test_rank_states_are_saved_by_rank(saved: dict[str, Path]) -> None:
    for mapping in MAPPINGS:
        ranks = CheckpointReader(saved[str(mapping)]).ranks
        assert ranks == tuple({"rank": rank} for rank in range(mapping.config.world))


def test_data_files_are_safetensors_and_hold_every_element_once(saved: dict[str, Path]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    expected = sum(tensor.nbytes for tensor in wholes(ParallelConfig()).values())
    for path in saved.values():
        num_bytes = 0
        for file in path.glob("*.safetensors"):
            num_bytes += sum(tensor.nbytes for tensor in safetensors.load_file(file).values())
        assert num_bytes == expected
        names = {file.name for file in path.iterdir()} - {file.name for file in path.glob("*.safetensors")}
        assert names == {"metadata.json", "manifest.json", "COMPLETE"}


def test_replicated_tensors_are_written_by_different_ranks(saved: dict[str, Path]) -> None:
    mapping = next(m for m in MAPPINGS if m.config.world == 4 and m.style == "replicate")
    sizes = [file.stat().st_size for file in saved[str(mapping)].glob("*.safetensors")]
    largest = max(tensor.nbytes for tensor in wholes(ParallelConfig()).values())
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < largest


def test_boxes_are_assigned_by_their_bytes_and_not_by_those_of_the_whole_tensor() -> None:
    plans = []
    for start, stop in ((0, 190), (190, 200)):
        planner = EntryPlanner(Stager())
        sharded = Entry(torch.zeros(stop - start), (200,), (Box((slice(0, stop - start),), (slice(start, stop),)),))
        planner.set_up_planner({"sharded": sharded, "replica": Entry.whole(torch.zeros(100))})
        plans.append(planner.create_local_plan())
    assigned, _ = planner.create_global_plan(plans)
    assert [[item.index.fqn for item in plan.items] for plan in assigned] == [["sharded"], ["sharded", "replica"]]


@on_ranks(2)
def test_a_second_save_with_more_tensors_in_the_same_dict_is_correct(rank: int, world: int, tmp_path: Path) -> None:
    """Plans are cached. Saves after a change on one rank, and after no change, must both be correct."""
    config = ParallelConfig(tp=2)
    place, sizes = config.place(rank), config.sizes
    sharded = torch.arange(4.0) + 4 * rank
    replica = torch.ones(3)
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        entries = {"a": Entry.of(sharded, Sharding((8,), (Split(0, "tp"),)), place, sizes), "b": Entry.whole(replica)}
        checkpointer.save(1, entries)
        checkpointer.wait_staged()
        sharded += 100
        if rank == 1:
            entries["c"] = Entry.whole(torch.full((2,), 5.0))
        checkpointer.save(2, entries)
        checkpointer.wait_staged()
        sharded += 100
        checkpointer.save(3, entries)
        checkpointer.wait()
        checkpointer.latest()  # collective: afterwards, every rank has finished its saves
    a = torch.arange(8.0)
    for step, expected in ((1, a), (2, a + 100), (3, a + 200)):
        reader = CheckpointReader(tmp_path / f"step-{step:08d}")
        assert torch.equal(reader.read("a"), expected)
        assert torch.equal(reader.read("b"), replica)
        assert reader.names == (("a", "b") if step == 1 else ("a", "b", "c"))


def entry_a(shape: tuple[int, ...] = (4, 2), dtype: torch.dtype = torch.float32) -> dict[str, Entry]:
    return {"a": Entry.whole(torch.ones(shape, dtype=dtype))}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, entry_a() | {"b": Entry.whole(torch.tensor(2.5))})
    return tmp_path / "step-00000001"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (entry_a() | {"x": Entry.whole(torch.ones(1)), "y": Entry.whole(torch.ones(1))}, "lacks .*: x, y"),
        (entry_a(), "that no rank requests: b"),
        (entry_a((2, 4)) | {"b": Entry.whole(torch.tensor(0.0))}, r"a has shape \(4, 2\) .* expected \(2, 4\)"),
        (entry_a(dtype=torch.bfloat16) | {"b": Entry.whole(torch.tensor(0.0))}, "a has dtype torch.float32 .*bfloat16"),
    ],
)
def test_missing_unused_and_mismatched_tensors_are_named(small: Path, entries: dict[str, Entry], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(small, entries)


def test_some_tensors_of_a_checkpoint_can_be_loaded_with_a_cast(small: Path) -> None:
    entries = {"b": Entry.whole(torch.tensor(0.0, dtype=torch.bfloat16))}
    load(small, entries, cast=True, allow_unused=True)
    assert entries["b"].tensor.item() == 2.5
    with pytest.raises(CheckpointError, match="cast is not set"):
        load(small, {"b": Entry.whole(torch.tensor(0))}, cast=True, allow_unused=True)


def test_rows_of_a_sharded_dimension_and_large_rows_are_read_in_blocks(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_comm.train.checkpoint import files

    whole = torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 4, 5)
    with Checkpointer(small.parent / "b") as checkpointer:
        checkpointer.save(1, {"a": Entry.whole(whole)})
    for block in (1, 16, 100, 1 << 20):
        monkeypatch.setattr(files, "BLOCK", block)
        target = torch.zeros(2, 2, 3)
        box = Box(tuple(slice(0, n) for n in (2, 2, 3)), (slice(1, 3), slice(1, 3), slice(2, 5)))
        load(small.parent / "b/step-00000001", {"a": Entry(target, (3, 4, 5), (box,))})
        assert torch.equal(target, whole[1:3, 1:3, 2:5])


def test_a_tensor_of_another_shape_than_its_sharding_is_rejected() -> None:
    config = ParallelConfig(tp=2)
    sharding = Sharding((8, 2), (Split(0, "tp"),))
    with pytest.raises(CheckpointError, match=r"has shape \(8, 2\); this rank's shard .* has shape \(4, 2\)"):
        Entry.of(torch.ones(8, 2), sharding, config.place(0), config.sizes)
    with pytest.raises(CheckpointError, match=r"\(rows 1..2 of dimension 1\).* has shape \(4, 1\)"):
        Entry.of(torch.ones(4, 2), sharding, config.place(0), config.sizes, ShardSlice(1, range(1, 2)))


def box(start: int, stop: int) -> Box:
    return Box((slice(0, stop - start),), (slice(start, stop),))


def part(start: int, stop: int, shape: int = 8, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(torch.ones(stop - start, dtype=dtype), (shape,), (box(start, stop),))


BAD = {
    "hole": ((part(0, 4), part(5, 8)), "the ranks have 7 of the 8 elements of a (8,)"),
    "overlap": ((part(0, 5), part(4, 8)), "parts of a overlap without being equal: [0..5] and [4..8]"),
    "shape": ((part(0, 4), part(4, 8, 9)), "ranks disagree on a: rank 0 has (8,)"),
    "dtype": ((part(0, 4), part(4, 8, dtype=torch.float64)), "rank 1 has (8,) torch.float64"),
}


@on_ranks(2)
def test_ranks_that_disagree_raise_the_same_error_and_can_continue(rank: int, world: int, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:

        def error_of_save(step: int, entries: dict[str, Entry], state: dict[str, Any] | None = None) -> str:
            checkpointer.save(step, entries, state)
            with pytest.raises(CheckpointError) as caught:
                checkpointer.wait()
            texts: list[Any] = [None] * world
            dist.all_gather_object(texts, str(caught.value))
            assert texts[0].partition(": ")[2] == texts[1].partition(": ")[2]  # the step may differ
            return str(caught.value)

        for parts, message in BAD.values():
            assert message in error_of_save(1, {"a": parts[rank]})
        assert "disagree on the step to save: [2, 3]" in error_of_save(2 + rank, entry_a())
        assert re.search("rank 1: .*JSON", error_of_save(2, entry_a(), {"bad": torch.ones(1)} if rank == 1 else {}))
        assert "JSON" in error_of_save(2, entry_a(), {"bad": float("nan")})
        checkpointer.save(7, entry_a())
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    json.loads((tmp_path / "step-00000007/metadata.json").read_text())
