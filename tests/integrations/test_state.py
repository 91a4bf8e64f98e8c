"""Gathered and saved weights of a swapped model are bit-identical to those of the unswapped model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.integrations.hugging_face import expert_parameters, gather_state_dict, save_swapped, swap_moe
from tests.integrations.models import SMALL, batch, ep_group, load, randomise, save_model
from tests.pool import RankPool


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def gather(rank: int, world: int, arg: tuple[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    folder, ep = arg
    model = swap_moe(load(folder), ep_group(ep))
    return gather_state_dict(model), gather_state_dict(model, rank0_only=True)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_gathered_state_dict_loads_into_the_unswapped_model_bit_for_bit(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    expected = load(saved(family)).state_dict()
    target = load(saved(family))
    for ep in (2, 4):
        for rank, (gathered, gathered_on_rank0) in enumerate(pool4.run(gather, (saved(family), ep))):
            assert_same(gathered, expected)
            assert_same(gathered_on_rank0, expected if rank % ep == 0 else {})
        randomise(target, seed=5)
        target.load_state_dict(gathered)
        assert_same(target.state_dict(), expected)


def test_uneven_and_missing_experts_are_gathered(tmp_path: Path, pool4: RankPool) -> None:
    folder = save_model("mixtral", tmp_path, num_local_experts=3)
    expected = load(folder).state_dict()
    for rank, (gathered, gathered_on_rank0) in enumerate(pool4.run(gather, (folder, 4))):
        assert_same(gathered, expected)
        assert_same(gathered_on_rank0, expected if rank == 0 else {})


def change_and_save(rank: int, world: int, arg: tuple[str, str, torch.dtype]) -> dict[str, Tensor]:
    """Save changed weights. Every rank reads the folder when ``save_swapped`` returns."""
    folder, out, dtype = arg
    model = swap_moe(load(folder, dtype=dtype), ep_group(4))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.25)
    save_swapped(model, out)
    loaded = load(out).state_dict()
    assert_same(loaded, gather_state_dict(model))
    return loaded  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", SMALL)
def test_saved_model_is_loaded_by_from_pretrained(
    family: str, saved: Callable[[str], str], tmp_path: Path, pool4: RankPool
) -> None:
    dtype = torch.bfloat16 if family == "gpt_oss" else torch.float32
    expected = {name: value.clone() for name, value in load(saved(family), dtype=dtype).state_dict().items()}
    for name, _ in load(saved(family)).named_parameters():
        expected[name].mul_(1.25)
    results = pool4.run(change_and_save, (saved(family), str(tmp_path / "out"), dtype))
    for loaded in results:
        assert_same(loaded, expected)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}


def save_as_transformers(rank: int, world: int, arg: tuple[str, Path]) -> None:
    """Save with settings of ``save_pretrained``, and upload to a hub that rank 0 has."""
    folder, out = arg
    model = swap_moe(load(folder), ep_group(4))
    for name, settings in SETTINGS.items():
        save_swapped(model, out / name, **settings)
    commits: list[Any] = []
    hub = SimpleNamespace(
        create_repo=lambda name, **_: SimpleNamespace(repo_id=name),
        create_commit=lambda **settings: commits.append(settings),
    )
    card = SimpleNamespace(save=lambda path: Path(path).write_text("card"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.hub.hf_api", lambda: hub)
        patch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: card)
        save_swapped(model, out / "variant", push_to_hub=True, repo_id="me/it", commit_message="New")
        if rank == 0:
            (commit,) = commits
            assert (commit["repo_id"], commit["commit_message"]) == ("me/it", "New")
            files = {operation.path_in_repo for operation in commit["operations"]}
            assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
        del hub.create_repo
        with pytest.raises(AttributeError if rank == 0 else ConfigError, match="create_repo"):
            save_swapped(model, out / "refused", push_to_hub=True)
    with pytest.raises(ConfigError, match="variant"):
        save_swapped(model, out / "refused", varient="fp16")


SETTINGS: dict[str, dict[str, Any]] = {
    "variant": {"variant": "fp16"},
    "memory": {"save_original_format": False, "is_main_process": True},
}


def test_settings_of_save_pretrained_give_its_files(
    saved: Callable[[str], str], tmp_path: Path, pool4: RankPool
) -> None:
    folder = saved("mixtral")
    for name, settings in SETTINGS.items():
        load(folder).save_pretrained(tmp_path / "expected" / name, **settings)
    pool4.run(save_as_transformers, (folder, tmp_path))
    for name in SETTINGS:
        for path in (tmp_path / "expected" / name).iterdir():
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "refused").exists()


def save_wrongly(rank: int, world: int, arg: tuple[str, str]) -> tuple[str, str]:
    """Return the errors of a failed save, and of a save of one rank's experts."""
    folder, out = arg
    model = swap_moe(load(folder), ep_group(4))
    with pytest.raises((ConfigError, OSError)) as failed:
        save_swapped(model, out)
    with pytest.raises(ConfigError) as partial:
        model.save_pretrained(f"{folder}/part")
    return type(failed.value).__name__, str(partial.value)


def test_saves_that_fail_or_have_one_ranks_experts_raise_on_every_rank(
    saved: Callable[[str], str], tmp_path: Path, pool4: RankPool
) -> None:
    blocked, folder = tmp_path / "file", saved("mixtral")
    blocked.write_text("")
    failed, partial = zip(*pool4.run(save_wrongly, (folder, str(blocked / "below"))), strict=True)
    assert failed == ("NotADirectoryError", "ConfigError", "ConfigError", "ConfigError")
    assert all("save_swapped" in message for message in partial) and not (Path(folder) / "part").exists()


def load_full(rank: int, world: int, folder: str) -> bool:
    model = swap_moe(load(folder), ep_group(4))
    expected = {name: p.detach().clone() for name, p in expert_parameters(model).items()}
    full = load(folder).state_dict()
    randomise(model, seed=6)
    model.load_state_dict(full)
    return all(torch.equal(p, expected[name]) for name, p in expert_parameters(model).items())


def test_a_full_state_dict_loads_into_a_swapped_model_and_each_rank_takes_its_experts(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    assert all(pool4.run(load_full, saved("gpt_oss")))


def test_save_pretrained_of_a_model_swapped_on_one_rank_saves_all_weights(
    saved: Callable[[str], str], tmp_path: Path
) -> None:
    model = swap_moe(load(saved("olmoe")))
    model.save_pretrained(tmp_path)
    ids = batch()[0]
    assert torch.equal(load(str(tmp_path))(ids).logits, load(saved("olmoe"))(ids).logits)


def test_saving_an_unswapped_model_is_an_error(saved: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="not swapped"):
        save_swapped(load(saved("mixtral")), "unused")
