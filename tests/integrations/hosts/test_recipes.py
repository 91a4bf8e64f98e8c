"""The recipes that need other packages run on two ranks, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import RankPool
from tests.support.recipes import recipes, run

RECIPES = recipes()
HERE = {title: one for title, one in RECIPES.items() if one.needs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all recipes run."""
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("title", HERE)
def test_a_recipe_runs_and_prints_what_the_page_shows(title: str, folder: Path, pool2: RankPool) -> None:
    for package in HERE[title].needs:
        pytest.importorskip(package, reason="needs make hosts")
    if not (folder / "batches.pt").exists():
        run(next(iter(RECIPES.values())), folder, pool2)
    launched = "trl" in HERE[title].needs  # accelerate reads the environment that torchrun sets
    output = run(HERE[title], folder, None if launched else pool2)
    assert not HERE[title].missing(output), output
