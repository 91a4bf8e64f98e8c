"""The recipes that need other packages run under torchrun, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recipes import recipes, run

RECIPES = recipes()
HERE = {title: one for title, one in RECIPES.items() if one.needs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the files of the first recipe."""
    result = tmp_path_factory.mktemp("recipes")
    run(next(iter(RECIPES.values())), result, None)
    return result


@pytest.mark.parametrize("title", HERE)
def test_a_recipe_runs_and_prints_what_the_page_shows(title: str, request: pytest.FixtureRequest) -> None:
    for package in HERE[title].needs:
        pytest.importorskip(package, reason="needs make hosts")
    folder = request.getfixturevalue("folder")  # takes ten seconds, which are lost where the packages are absent
    output = run(HERE[title], folder, None)
    assert not HERE[title].missing(output), output
