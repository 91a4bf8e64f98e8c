"""What README.md and docs/ show is so: snippets run, commands parse, links lead somewhere, tables are complete.

A fenced ``python`` block runs, all blocks of a page in one namespace and in order; ``python no-run`` is only compiled.
An HTML comment that starts with ``run:`` is a block that the reader does not see.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moe_comm import cli, errors

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$|^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PLACEHOLDERS = {"CONFIG": "examples/pydoc.toml", "KEY=VALUE": "run.steps=200", "N": "2", "RUN": "runs/a", "OUT": "out"}
TRAINING = (ROOT / "docs/training.md").read_text()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, kind: str) -> Iterator[tuple[int, str]]:
    """Line number and text of the fenced blocks of one kind; hidden ones count as ``python``."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if (found["kind"] if found["hidden"] is None else "python") == kind:
            start = found.start("text" if found["hidden"] is None else "hidden")
            yield text.count("\n", 0, start), found["text"] if found["hidden"] is None else found["hidden"]


def compiled(page: Path, kind: str) -> list[Any]:
    """Code objects whose tracebacks point into the page."""
    return [compile("\n" * line + text, str(page), "exec") for line, text in blocks(page, kind)]


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page, "python"))], ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in page.read_text() and page.stem in ("README", "hugging_face"):
        pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    if "moe_comm.train" in "".join(text for _, text in blocks(page, "python")):
        pytest.importorskip("pydantic", reason="needs the train extra")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for code in compiled(page, "python"):
        exec(code, namespace)


@pytest.mark.parametrize(("name", "call"), [("README.md", "MoELayer.build("), ("docs/dispatch.md", "make_dispatcher(")])
def test_snippets_are_distributed_under_torchrun(name: str, call: str, tmp_path: Path) -> None:
    snippet = next(text for _, text in blocks(ROOT / name, "python") if call in text)
    (tmp_path / "script.py").write_text(
        snippet.replace("dispatcher.close()\n", "")
        + "found = layer.dispatcher if 'layer' in vars() else dispatcher\n"
        + "print(f'rank {found.rank} holds {len(found.local_experts)}\\n', end='', flush=True)\n"
        + "dist.destroy_process_group()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"rank 0 holds 4", "rank 1 holds 4"} <= set(done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_that_are_not_run_are_python(page: Path) -> None:
    compiled(page, "python no-run")


def command_lines(page: Path, start: str) -> set[str]:
    """Every command that begins with the pattern ``start``, on a line of its own or in an inline span."""
    text = page.read_text()
    inline = re.findall(rf"`({start}[^`…]*)`", text)
    lines = re.findall(rf"^(?:    )?({start}[^\n`]*)$", text, re.MULTILINE)
    return {line.strip() for line in [*inline, *lines]}


def commands(start: str) -> list[tuple[str, str]]:
    return sorted({(name_of(page), line) for page in PAGES for line in command_lines(page, start)})


COMMANDS = commands("moe-comm ")
STUDIES = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py"))
"""Packages of ``benchmarks`` that are commands with options of typer."""


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` name, and the arguments after it."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_commands_parse(page: str, line: str) -> None:
    words = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", line), comments=True)[1:]
    command, arguments = find([PLACEHOLDERS.get(word, word) for word in words])
    if not arguments:  # named in the text
        return
    given = command.make_context(command.name, arguments).params
    if "config" in given:
        config = pytest.importorskip("moe_comm.train.config")
        file = ROOT / given["config"]
        found = config.load(
            file if file.suffix else given["config"], [*(given["overrides"] or []), *(given["settings"] or [])]
        )
        found.parallel.mapping(given.get("ranks") or found.parallel.ranks)
    if given.get("mappings"):
        pytest.importorskip("moe_comm.bench.parity.compare").chosen(given["mappings"])


def study(name: str) -> Any:
    pytest.importorskip("pydantic", reason="needs the train extra")
    return typer.main.get_command(importlib.import_module(f"benchmarks.{name}.__main__").app)


@pytest.mark.parametrize(("page", "line"), commands(r"python -m benchmarks\.[a-z]\w+"))
def test_studies_exist_and_parse(page: str, line: str) -> None:
    module, *words = shlex.split(line, comments=True)[2:]
    name = module.removeprefix("benchmarks.")
    if name in STUDIES:
        study(name).make_context(name, [PLACEHOLDERS.get(word, word) for word in words])
    else:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()


def shell_lines(page: Path) -> Iterator[str]:
    for _, text in blocks(page, "sh"):
        yield from (line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_lines_name_what_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    text = page.read_text()
    for target in re.findall(r"^make ([a-z]+)", "\n".join(shell_lines(page)), re.MULTILINE):
        assert target in targets
    for target in re.findall(r"`make ([a-z]+)", text):
        assert target in targets
    for named in re.findall(r"moe_comm\[([a-z0-9,]+)\]", text):
        assert set(named.split(",")) <= extras
    for line in shell_lines(page):
        for path in re.findall(r"(?:examples|benchmarks|tests)/[\w./-]+", line):
            assert (ROOT / path).exists(), f"{line}: no {path}"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(BLOCK, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(re.sub(BLOCK, "", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: no {path}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)}: {path} has no heading {anchor!r}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {name_of(page) for page in PAGES[1:]} <= linked


def names_of_commands(command: Any, prefix: str = "") -> Iterator[str]:
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from names_of_commands(child, f"{prefix}{name} ")
        else:
            yield prefix + name


@pytest.mark.parametrize("command", list(names_of_commands(typer.main.get_command(cli.app))))
def test_every_option_of_a_command_is_in_its_table(command: str) -> None:
    assert options_in_section("docs/cli.md", f"## moe-comm {command}") == options_of(find(command.split())[0])


@pytest.mark.parametrize("name", STUDIES)
def test_every_option_of_a_study_is_in_its_table(name: str) -> None:
    assert options_in_section("docs/benchmarks.md", f"### python -m benchmarks.{name}") == options_of(study(name))


def options_in_section(page: str, heading: str) -> set[str]:
    """Options in the first column of the tables below ``heading``."""
    section = re.split(rf"^{re.escape(heading)}$", (ROOT / page).read_text(), flags=re.MULTILINE)[1]
    rows = [row for row in re.split(r"^##+ ", section, flags=re.MULTILINE)[0].splitlines() if row.startswith("| `")]
    return {option for row in rows for option in re.findall(r"`(--[\w-]+)`", row.split(" | ")[0])}


def options_of(command: Any) -> set[str]:
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    return {name for name in options if name.startswith("--")} - {"--help"}


def test_every_configuration_key_is_in_the_table_with_its_default() -> None:
    config = pytest.importorskip("moe_comm.train.config")
    section = TRAINING.partition("## Configuration")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+\.\w+)` \|([^|]*)\|", section, re.MULTILINE)
    shown = {key: default.strip().strip("`") for key, default in rows}
    defaults = config.TrainConfig().model_dump(mode="json")
    actual = {f"{section}.{key}": value for section, keys in defaults.items() for key, value in keys.items()}
    assert shown.keys() == actual.keys()
    for key, value in actual.items():
        written = None if shown[key] == "none" else tomllib.loads(f"value = {shown[key]}")["value"]
        assert written == value, key


def test_every_ready_configuration_is_in_the_table_with_its_mapping() -> None:
    config = pytest.importorskip("moe_comm.train.config")
    build = pytest.importorskip("moe_comm.train.loop.build")
    from moe_comm.plan.model.shape import ModelShape

    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([^|]*) \| ([\d.]+) ([MB]) \|", TRAINING, re.MULTILINE)
    assert {row[0] for row in rows} == config.ready_configs().keys()
    for name, ranks, mapping, params, unit in rows:
        found = config.load(name)
        assert (found.parallel.ranks, str(found.parallel.mapping(int(ranks)))) == (int(ranks), mapping), name
        counted = ModelShape.of(build.architecture_of(found, None if found.model.vocab else 257)).params
        assert f"{counted / {'M': 1e6, 'B': 1e9}[unit]:.1f}" == params, name


def test_the_picture_of_a_mapping_is_what_the_command_prints() -> None:
    config = pytest.importorskip("moe_comm.train.config")
    from moe_comm.topology import picture

    text = (ROOT / "docs/parallel.md").read_text()
    shown = re.findall(r"^<!-- mesh: ([\w-]+) -->\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown
    for name, drawn in shown:
        parallel = config.load(name).parallel
        assert drawn == picture(parallel.mapping(parallel.ranks)), name


def test_every_schedule_is_in_the_table_of_pipelines() -> None:
    schedules = pytest.importorskip("moe_comm.plan.pipeline.schedules").SCHEDULES
    section = (ROOT / "docs/parallel.md").read_text().partition("## Pipelines")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d)(?: (or more))? \| ([\w, ]+) \|", section, re.MULTILINE)
    shown = {name: (int(least), bool(more), backward != "whole") for name, least, more, backward in rows}
    assert shown == {name: (s.least, s.most is None, s.splits_backward) for name, s in schedules.items()}


def test_every_error_is_in_the_table_with_what_it_derives_from() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MoeCommError) and kind is not errors.MoeCommError:
            row = re.search(rf"^\| `{name}` \|([^|]*)\|", text, re.MULTILINE)
            assert row is not None, name
            bases = {base.__name__ for base in kind.__bases__} - {"MoeCommError"}
            assert set(re.findall(r"\w+", row[1])) == bases, name
