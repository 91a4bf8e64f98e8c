"""Every recipe of docs/recipes.md is short, runs on two ranks and prints what the page shows.

Those that need PEFT or TRL are in tests/integrations/hosts/test_recipes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import RankPool
from tests.support.recipes import lines_of_code, recipes, run

RECIPES = recipes()
FIRST, *OTHERS = [title for title, one in RECIPES.items() if not one.needs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all recipes run, one after the other."""
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    pytest.importorskip("pydantic", reason="needs the train extra")
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("title", [FIRST, *OTHERS])
def test_a_recipe_runs_and_prints_what_the_page_shows(title: str, folder: Path, pool2: RankPool) -> None:
    if title != FIRST and not (folder / "batches.pt").exists():
        run(RECIPES[FIRST], folder, pool2)
    output = run(RECIPES[title], folder, pool2)
    assert RECIPES[title].shown
    assert not RECIPES[title].missing(output), output


def test_recipes_are_few_and_short() -> None:
    assert len(RECIPES) <= 10
    long = {name: n for one in RECIPES.values() for name, text in one.files.items() if (n := lines_of_code(text)) > 15}
    assert not long
