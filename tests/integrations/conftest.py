"""One pool of four ranks for all of this folder, as every rank imports transformers; nothing touches the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")

from tests.integrations.models import save_model
from tests.pool import RankPool


@pytest.fixture(scope="package")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of the saved random model of a family, written on first use."""
    folders: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in folders:
            path: Path = tmp_path_factory.mktemp(family)
            folders[family] = save_model(family, path)
        return folders[family]

    return folder


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Saved models to train: experts that divide by 2 and 4 ranks, and experts that do not."""
    shape: dict[str, int] = {"num_hidden_layers": 1, "hidden_size": 16}
    return [
        save_model("qwen3_moe", tmp_path_factory.mktemp("even"), **shape),
        save_model("mixtral", tmp_path_factory.mktemp("uneven"), num_local_experts=5, **shape),
    ]
