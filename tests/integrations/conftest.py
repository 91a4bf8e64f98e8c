"""One pool of four ranks for this folder, because every rank imports transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.16.1", reason="needs the hf extra")

from tests.integrations.models import save_model
from tests.pool import RankPool


@pytest.fixture(scope="package")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of the random model of a family, which is written on first use."""
    folders: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in folders:
            path: Path = tmp_path_factory.mktemp(family)
            folders[family] = save_model(family, path)
        return folders[family]

    return folder


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return saved models: one whose number of experts is divisible by 2 and 4 ranks, and one where it is not."""
    shape: dict[str, int] = {"num_hidden_layers": 1, "hidden_size": 16}
    return [
        save_model("qwen3_moe", tmp_path_factory.mktemp("even"), **shape),
        save_model("mixtral", tmp_path_factory.mktemp("uneven"), num_local_experts=5, **shape),
    ]
