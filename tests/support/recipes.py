"""The recipes of docs/recipes.md: their files, commands and output, and how to run them on a pool of two ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.pool import RankPool

ROOT = Path(__file__).parent.parent.parent
STARTS = {"torchrun --nproc-per-node 2 ": 2, "python ": 1}
"""Start of the command of a script: the number of ranks."""
MODULES = {"torchrun": "-m torch.distributed.run --standalone", "python": ""}
SMALL = {
    "train": ["run.sample_tokens=8", "run.eval_batches=1"],
    "bench": ["--tokens", "64", "--hidden", "64", "--iterations", "2", "--warmup", "1", "--peer", "torch_gloo"],
}
"""Arguments that are added to the commands of moe-comm, so that they take seconds."""


@dataclass(frozen=True)
class Recipe:
    """One section of the page.

    Attributes:
        files: text of each block of Python, by the file name in its first line.
    """

    title: str
    files: dict[str, str]
    commands: list[str]
    shown: list[str]

    @property
    def needs(self) -> list[str]:
        """Return the packages that only ``make hosts`` has."""
        return [name for name in ("peft", "trl") if re.search(rf"^(from|import) {name}\b", str(self), re.MULTILINE)]

    def __str__(self) -> str:
        return "\n".join(self.files.values())

    def missing(self, output: str) -> list[str]:
        """Return the lines that the page shows and ``output`` does not have. Numbers may differ."""
        return [line for line in self.shown if not re.search(_pattern(line), output)]


def recipes() -> dict[str, Recipe]:
    """Return the recipes by title, in the order of the page."""
    found = {}
    for section in (ROOT / "docs/recipes.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        files = {re.match(r"# (\w+\.py)\n", text)[1]: text for kind, text in blocks if kind == "python"}  # type: ignore[index]
        lines = {kind: "".join(text for other, text in blocks if other == kind).splitlines() for kind in ("sh", "text")}
        found[title] = Recipe(title, files, lines["sh"], lines["text"])
    return found


def lines_of_code(text: str) -> int:
    """Return the number of lines that are neither empty nor comments."""
    return sum(bool(line.strip()) and not line.startswith("#") for line in text.splitlines())


def run(recipe: Recipe, folder: Path, pool: RankPool | None) -> str:
    """Run the commands of a recipe in ``folder``, with fewer steps than on the page, and return what they print.

    pool: two ranks that run scripts. None: processes of their own do.
    """
    if not (folder / "docs").exists():
        (folder / "docs").symlink_to(ROOT / "docs")
    for name, text in recipe.files.items():
        (folder / name).write_text(text)
    return "\n".join(_run(command, folder, pool) for command in recipe.commands)


def _run(command: str, folder: Path, pool: RankPool | None) -> str:
    for start, ranks in STARTS.items():
        if command.startswith(start) and pool is not None:
            return "\n".join(pool.run(run_script, (str(folder), command.removeprefix(start), ranks), timeout=120))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "COLUMNS": "160"}
    command = re.sub(r"run\.steps=(\d+)", lambda steps: f"run.steps={int(steps[1]) // 25}", command)
    program, *words = command.split()
    if program == "moe-comm":
        program, words = f"{sys.executable} -m moe_comm", [*words, *SMALL[words[0]]]
    elif program in MODULES:
        program = f"{sys.executable} {MODULES[program]}"
    process = subprocess.run(
        " ".join([program, *words]),
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr + process.stdout
    return process.stdout + process.stderr


def run_script(rank: int, world: int, arg: tuple[str, str, int]) -> str:
    """Run a script as torchrun would, in the process group of the pool, and return what it prints."""
    folder, script, ranks = arg
    if rank >= ranks:
        return ""
    before, modules, output = Path.cwd(), set(sys.modules), io.StringIO()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        with (
            mock.patch.object(dist, "init_process_group", _joined),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            runpy.run_path(script, run_name="__main__")
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        for name in set(sys.modules) - modules:
            if Path(folder) in Path(str(getattr(sys.modules[name], "__file__", ""))).parents:
                del sys.modules[name]
    return output.getvalue()


def _joined(backend: str) -> None:
    """Stand in for ``init_process_group``: the ranks of the pool have a group."""


def _pattern(line: str) -> str:
    parts = [re.sub(r"\d[\d.,]*", r"[\\d.,]+", re.escape(part)) for part in line.rstrip().split("...")]
    return ".*".join(parts)
