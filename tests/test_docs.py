"""README.md and docs/ agree with the code: snippets run, commands parse, links exist, tables are complete.

A fenced ``python`` block runs, all blocks of a page in one namespace and in order; ``python no-run`` is only compiled.
An HTML comment that starts with ``run:`` is a block that the reader does not see. A comment ``# -> text`` is printed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moe_comm import cli
from tests.pool import RankPool
from tests.support.recipes import run_script

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$|^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PLACEHOLDERS = {
    "CONFIG": "examples/pydoc.toml",
    "KEY=VALUE": "run.steps=200",
    "N": "2",
    "RUN": "runs/a",
    "OTHER": "runs/b",
    "OUT": "out",
}
TRAINING = (ROOT / "docs/training.md").read_text()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, kind: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the fenced blocks of one kind. Hidden blocks count as ``python``."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if (match["kind"] if match["hidden"] is None else "python") == kind:
            start = match.start("text" if match["hidden"] is None else "hidden")
            yield text.count("\n", 0, start), match["text"] if match["hidden"] is None else match["hidden"]


def compiled(page: Path, kind: str) -> list[Any]:
    """Return code objects whose tracebacks point into the page."""
    return [compile("\n" * line + text, str(page), "exec") for line, text in blocks(page, kind)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "recipes" and list(blocks(page, "python"))], ids=name_of
)  # tests/test_recipes.py runs recipes on two ranks
def test_snippets_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.stem in ("README", "swap", "parallelism"):
        pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    if "moe_comm.train" in "".join(text for _, text in blocks(page, "python")):
        pytest.importorskip("pydantic", reason="needs the train extra")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for code, (_, text) in zip(compiled(page, "python"), blocks(page, "python"), strict=True):
        exec(code, namespace)
        shown, printed = re.findall(r"# -> (.*)$", text, re.MULTILINE), capsys.readouterr().out.splitlines()
        assert [line for line in printed if line in shown] == shown, printed


def test_the_first_programs_of_the_readme_and_the_index_run_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool2: RankPool
) -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    readme = ROOT / "README.md"
    (_, model), (_, diff), (_, shown) = (next(blocks(readme, kind)) for kind in ("python", "diff", "text"))
    assert sum(line.startswith("+") for line in diff.splitlines()) == 4
    monkeypatch.chdir(tmp_path)
    exec(model, {"__name__": "snippet"})
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(before, {"__name__": "snippet"})
    assert f"`{printed.getvalue().strip()}`" in readme.read_text()
    snippet = next(text for _, text in blocks(ROOT / "docs/index.md", "python") if "MoELayer.build(" in text)
    program = [*(line[1:] for line in diff.splitlines()), snippet, "dispatcher = layer.dispatcher"]
    program.append("print(f'rank {dispatcher.rank} holds {len(dispatcher.local_experts)}')")
    (tmp_path / "script.py").write_text("\n".join(program))
    output = "\n".join(pool2.run(run_script, (str(tmp_path), "script.py", 2), timeout=120))
    assert sum(output.count(line) for line in set(shown.splitlines())) == len(shown.splitlines()), output
    assert "rank 0 holds 4" in output and "rank 1 holds 4" in output, output


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_that_are_not_run_are_python(page: Path) -> None:
    compiled(page, "python no-run")


def command_lines(page: Path, start: str) -> set[str]:
    """Return every command that begins with the pattern ``start``, on a line of its own or in an inline span."""
    text = re.sub(r"\\\n *", "", page.read_text())
    inline = re.findall(rf"`({start}[^`…]*)`", text)
    lines = re.findall(rf"^(?:    )?({start}[^\n`]*)$", text, re.MULTILINE)
    return {line.strip() for line in [*inline, *lines]}


def commands(start: str) -> list[tuple[str, str]]:
    return sorted({(name_of(page), line) for page in PAGES for line in command_lines(page, start)})


COMMANDS = commands("moe-comm ")
STUDIES = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py"))
"""Packages of ``benchmarks`` that are commands with options of typer."""


def find(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that ``words`` name, and the arguments after it."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_commands_parse(page: str, line: str) -> None:
    words = shlex.split(re.sub(r"\[OPTIONS\]|[\[\]]|\.\.\.", "", line), comments=True)[1:]
    if words == ["--version"]:
        return
    command, arguments = find([PLACEHOLDERS.get(word, word) for word in words])
    if not arguments:  # the page only names the command
        return
    params = command.make_context(command.name, arguments).params
    if "config" in params:
        config = pytest.importorskip("moe_comm.train.config")
        file = ROOT / params["config"]
        loaded = config.load(
            file if file.suffix else params["config"], [*(params["overrides"] or []), *(params["settings"] or [])]
        )
        if not loaded.parallel.auto:
            loaded.parallel.mapping(params.get("ranks") or loaded.parallel.ranks)
    if params.get("mappings"):
        pytest.importorskip("moe_comm.bench.parity.compare").chosen(params["mappings"])


def study(name: str) -> Any:
    pytest.importorskip("pydantic", reason="needs the train extra")
    return typer.main.get_command(importlib.import_module(f"benchmarks.{name}.__main__").app)


@pytest.mark.parametrize(("page", "line"), commands(r"python -m benchmarks\.[a-z]\w+"))
def test_studies_exist_and_parse(page: str, line: str) -> None:
    module, *words = shlex.split(line.replace("[OPTIONS]", ""), comments=True)[2:]
    name = module.removeprefix("benchmarks.")
    if name in STUDIES:
        study(name).make_context(name, [PLACEHOLDERS.get(word, word) for word in words])
    else:
        assert (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file()


def shell_lines(page: Path) -> Iterator[str]:
    for _, text in blocks(page, "sh"):
        yield from (line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_lines_use_existing_commands(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    text = page.read_text()
    for target in re.findall(r"^make ([a-z-]+)", "\n".join(shell_lines(page)), re.MULTILINE):
        assert target in targets
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets
    assert "moe_comm[" not in text, "nothing is published: pip install '.[EXTRA]' in the checkout"
    for named in re.findall(r"'\.\[([a-z0-9,]+)\]'", text):
        assert set(named.split(",")) <= extras
    for line in shell_lines(page):
        for path in re.findall(r"(?:examples|benchmarks|tests)/[\w./-]+", line):
            assert (ROOT / path).exists(), f"{line}: no {path}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub builds them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(BLOCK, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_are_valid(page: Path) -> None:
    for link in LINK.findall(re.sub(BLOCK, "", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: no {path}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {path} has no heading {anchor!r}"


def test_every_page_and_tutorial_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {name_of(page) for page in [*PAGES[1:], *sorted((ROOT / "docs/tutorials").glob("*.ipynb"))]} <= linked


def test_the_site_has_every_page() -> None:
    named = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    tutorials = {f"tutorials/{path.stem}.md" for path in (ROOT / "docs/tutorials").glob("*.ipynb")}
    assert named == pages | tutorials


def test_the_readme_is_short_and_the_pages_are_few() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    assert len(list((ROOT / "docs").glob("*.md"))) <= 16


def test_generated_parts_are_current() -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    from benchmarks.generate_docs import pages

    stale = [name_of(path) for path, text in pages().items() if path.read_text() != text]
    assert not stale, f"run python -m benchmarks.generate_docs: {stale}"


def test_every_study_is_in_the_reference() -> None:
    from benchmarks.generate_docs import STUDIES as GENERATED

    assert set(GENERATED) == set(STUDIES)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/tutorials").glob("*.ipynb")), ids=name_of)
def test_tutorials_have_the_outputs_of_their_code(path: Path) -> None:
    from benchmarks.run_notebooks import KEY, code_hash

    notebook = json.loads(path.read_text())
    assert notebook["metadata"].get(KEY) == code_hash(notebook["cells"]), "run make notebooks"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert code[-1]["outputs"] and "Traceback" not in outputs
    assert not re.search(r"/(tmp|home|root|work)/", outputs), "a path of one machine"
    assert path.stat().st_size < 150_000


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("moe_comm"):
                continue
            # An adapter without its system.
            source = ROOT.joinpath(*parts[:-1]).with_suffix(".py")
            if not source.is_file():
                return ROOT.joinpath(*parts).is_dir()
            return parts[-1] in {
                node.name
                for node in ast.parse(source.read_text()).body
                if isinstance(node, ast.ClassDef | ast.FunctionDef)
            }
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_dotted_names_and_files_exist(page: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    text = re.sub(BLOCK, "", page.read_text())
    for name in sorted(set(re.findall(r"`(moe_comm(?:\.\w+)+)[`(]|^<!-- api: ([\w.]+) -->$", text, re.MULTILINE))):
        assert resolves(name[0] or name[1]), name
    for path in set(re.findall(r"`((?:benchmarks|csrc|examples|moe_comm|tests)/[\w./-]+\w/?)`", text)):
        assert (ROOT / path).exists(), path


def test_every_ready_configuration_is_in_the_table_with_its_mapping() -> None:
    config = pytest.importorskip("moe_comm.train.config")
    build = pytest.importorskip("moe_comm.train.loop.build")
    from moe_comm.layers.transformer.shape import ModelShape

    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([^|]*) \| ([\d.]+) ([MB]) \|", TRAINING, re.MULTILINE)
    assert {row[0] for row in rows} == config.ready_configs().keys()
    for name, ranks, mapping, params, unit in rows:
        loaded = config.load(name)
        assert (loaded.parallel.ranks, str(loaded.parallel.mapping(int(ranks)))) == (int(ranks), mapping), name
        counted = ModelShape.of(build.architecture_of(loaded, None if loaded.model.vocab else 257)).params
        assert f"{counted / {'M': 1e6, 'B': 1e9}[unit]:.1f}" == params, name


def test_every_schedule_is_in_the_table_of_pipelines() -> None:
    schedules = pytest.importorskip("moe_comm.topology.pipeline").SCHEDULES
    section = (ROOT / "docs/parallelism.md").read_text().partition("## Pipelines")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d)(?: (or more))? \| ([\w, ]+) \|", section, re.MULTILINE)
    shown = {name: (int(least), bool(more), backward != "whole") for name, least, more, backward in rows}
    assert shown == {name: (s.least, s.most is None, s.splits_backward) for name, s in schedules.items()}
