"""The commands of README.md and docs/ run, and print what the page shows.

Every line of a ``sh`` block runs in this process, unless ``NOT_RUN`` gives a reason. Commands that read a run get a
synthetic one. ``python no-run`` blocks are the exceptions of ``python`` blocks, which tests/test_docs.py runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_comm import cli
from tests.pool import RankPool
from tests.support.synthetic import SyntheticRun, write_run
from tests.test_docs import PAGES, ROOT, blocks, name_of

TRAINS = "trains for a minute or more; tests/train runs presets with fewer steps"
MINUTES = "measures for {}; the tests of the command use small sizes"
NOT_RUN = {
    r"make (train|test|wheels)\b": "installs packages; CI runs it before and beside the tests",
    r"(MOE_COMM_CUDA=on )?pip install ": "installs packages; tests/test_packaging.py builds and installs",
    r"bash benchmarks/gpu.sh layer$": "needs a GPU; tests/benchmarks/test_gpu_script.py runs it with emulated kernels",
    r"(swift|OVERRIDES=|MOE_COMM_SGLANG=1 python|MOE_COMM_VLLM=1 vllm|torchrun .* -m torchtitan.train)": "make hosts",
    r"(torchrun --nproc-per-node 2|python) \w+\.py|(cat|cp -r) '?(docs|runs)/": "tests/test_recipes.py runs them",
    r"torchrun .* examples/own_loop.py": "tests/test_examples.py runs its loop",
    r"torchrun .* -m moe_comm train": TRAINS,
    r"moe-comm train (?!.*--dry-run)": TRAINS,
    r"moe-comm train deepseek-v3 --dry-run": "takes 10 s; tests/train/test_dry_run.py runs it",
    r"moe-comm train small parallel=auto parallel.machine=h100 --dry-run": "takes 10 s; see tests/train/auto",
    r"(moe-comm serve|curl) ": "serves until a signal; tests/integrations/test_serve_command.py runs both",
    r"moe-comm export ": "needs a checkpoint; tests/train/loop/test_run.py exports one",
    r"moe-comm data ": "tokenizes for 10 s; tests/train/data prepares smaller text",
    r"moe-comm bench .*--hosts ": "needs root to simulate hosts, and takes minutes",
    r"moe-comm bench ": MINUTES.format("20 s to 10 minutes"),
    r"moe-comm check-grads ": MINUTES.format("10 s"),
    r"moe-comm parity ": MINUTES.format("1 to 10 minutes"),
    r"moe-comm plan --calibrate": MINUTES.format("half a minute"),
    r"moe-comm plan .*mixtral-8x22b .*--json": "searches for 10 s; tests/reports/test_plan_order.py tries a part",
    r"moe-comm plan .*--measured ": "needs a result of bench serve; tests/plan/serving/test_measured.py makes one",
    r"python -m benchmarks.soak ": MINUTES.format("hours"),
}
"""Start of a command: why it is not run here."""
NOT_RUN_PYTHON = {
    "docs/adapters.md": "needs other systems or several ranks; tests/integrations and make hosts run these calls",
    "docs/gpus.md": "needs the tensors of a caller; tests/integrations and tests/overlap/triton run these calls",
    "docs/measure.md": "needs root; tests/bench/test_hosts.py runs it",
    "docs/reference/api.md": "signatures, which benchmarks/signatures.py writes",
    "docs/reliability.md": "an own loop of 1000 steps; tests/runtime/watch runs it",
    "docs/own-loop.md": "needs several ranks; tests/training_loops runs these calls",
    "docs/serve.md": "needs several ranks; tests/integrations/test_serving.py runs these calls",
}
"""Page with ``python no-run`` blocks: why they are not run."""
PRINTED = ("moe-comm mesh small",)
"""Commands whose output is the next ``text`` block of their page."""
RUN = "runs/train-20260101-120000"


def lines(page: Path) -> Iterator[str]:
    """Yield the commands of the ``sh`` blocks of a page without comments."""
    for _, text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield shlex.join(words)


COMMANDS = {line: name_of(page) for page in reversed(PAGES) for line in lines(page)}
"""Command: the first page that has it."""
RUNS = sorted((page, line) for line, page in COMMANDS.items() if not any(re.match(start, line) for start in NOT_RUN))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs and the histogram that the pages name."""
    result = tmp_path_factory.mktemp("docs")
    synthetic = SyntheticRun(
        ranks=4, steps=60, ranks_per_host=4, layers=2, experts=8, load_every=1, span_steps=(20, 40), ep=4
    )
    for name in ("runs/a", "runs/b", RUN):
        write_run(result / name, synthetic)
    (result / "lengths.json").write_text('{"512": 900, "32768": 3}')
    return result


@pytest.mark.parametrize(("page", "line"), RUNS, ids=[f"{page}: {line}" for page, line in RUNS])
def test_a_command_of_the_docs_runs(
    page: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    pytest.importorskip("plotly", reason="needs the observe extra")
    pytest.importorskip("perfetto", reason="needs the observe extra")
    monkeypatch.chdir(folder)
    program, *words = shlex.split(line)
    assert program == "moe-comm", "run it here, or add it to NOT_RUN with a reason"
    if "this-machine" in words:
        _describe_this_machine(folder, monkeypatch)
    code = cli.run(words)
    output = capsys.readouterr()
    assert code == 0, output.err
    if line in PRINTED:
        text = (ROOT / page).read_text().partition(line)[2]
        shown = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert shown and matches(shown[1], output.out), output.out


def _describe_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the description of a machine where ``moe-comm plan --calibrate`` would have written it."""
    from moe_plan.machine.hardware_file import save
    from moe_plan.machine.hardware_table import cluster_named

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "moe_comm").mkdir(exist_ok=True)
    save(cluster_named("h100", 4), folder / "moe_comm" / "hardware.json")


def matches(shown: str, output: str) -> bool:
    """Return whether a page shows ``output``. Three dots stand for any text; final spaces do not count."""
    return len(shown.splitlines()) == len(output.rstrip().splitlines()) and all(
        re.fullmatch(re.escape(one.rstrip()).replace(r"\.\.\.", ".*"), other.rstrip())
        for one, other in zip(shown.splitlines(), output.splitlines(), strict=False)
    )


def test_every_exception_is_needed() -> None:
    for start in NOT_RUN:
        assert any(re.match(start, line) for line in COMMANDS), f"no page has {start}"
    for reason in [*NOT_RUN.values(), *NOT_RUN_PYTHON.values()]:
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w./]*\w", reason)), reason
    assert NOT_RUN_PYTHON.keys() == {name_of(page) for page in PAGES if any(blocks(page, "python no-run"))}


def explained(rank: int, world: int, arg: object) -> str:
    import torch.distributed as dist

    from moe_comm.dispatch import Traffic, explain_choice

    return str(explain_choice(dist.group.WORLD, traffic=Traffic(top_k=8, hidden=1024, item_bytes=4)))


def test_the_choice_of_a_backend_is_printed_as_on_the_page(pool2: RankPool) -> None:
    (shown,) = re.findall(
        r"^On two CPU ranks of one host:\n\n```text\n(.*?)^```$",
        (ROOT / "docs/layers.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    output = pool2.run(explained)[0]
    assert matches(shown, output), output
