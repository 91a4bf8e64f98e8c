"""Files of a run that others may have written are read in bounded time and memory, and printed without effect."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_comm.cli import run as command
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.observe import records
from moe_comm.observe.diagnose import culprits
from moe_comm.observe.effective import effective_time
from moe_comm.observe.faults import fault_outcomes, next_attempt
from moe_comm.observe.report import panels, read_run
from moe_comm.runtime.untrusted import lines_of, make_console, parse_toml, printable, printable_line
from moe_comm.topology.rebalance import DecisionSettings
from moe_comm.train.config import load as load_config
from moe_plan.machine import hardware_file
from moe_plan.whatif import placement
from moe_plan.whatif.run_trace import read_run_trace
from tests.security.test_files import STRANGE
from tests.support.synthetic import SyntheticRun, write_run

DEADLINE_S = 100
ESCAPES = "\x1b]0;title\x07\x9b31m\r\u202e[/x]</script><script>alert(1)"


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End a test that blocks on a pipe or reads a hole."""

    def fail(*_: object) -> None:
        raise AssertionError(f"a reader took {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run"
    write_run(path, SyntheticRun(ranks=2, steps=8, span_steps=(2, 4)))
    for name in ("faults.jsonl", "injected.jsonl", "progress.jsonl", "placements.jsonl"):
        (path / name).touch()
    for name in ("result.json", "config.resolved.toml"):
        (path / name).write_text("{}" if name.endswith("json") else "")
    return path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


READERS: dict[str, Callable[[Path], Any]] = {
    "report": lambda run: panels(read_run(run)),
    "diagnose": culprits,
    "what if": read_run_trace,
    "placement": lambda run: placement.study(run, [DecisionSettings()]),
    "experts": placement.real_experts,
    "effective time": effective_time,
    "outcomes": fault_outcomes,
    "attempt": next_attempt,
    "result": records.read_result,
}
FILES = (
    *("metrics.jsonl", "loads.jsonl", "placements.jsonl", "attempts.jsonl", "faults.jsonl", "injected.jsonl"),
    *("progress.jsonl", "result.json", "config.resolved.toml", "ranks/rank-00000.jsonl", "spans/rank-00000.jsonl"),
)


@pytest.mark.parametrize("make", STRANGE)
def test_no_reader_of_a_run_blocks_on_a_pipe_or_reads_a_hole(make: Callable[[Path], None], run: Path) -> None:
    for name in FILES:
        if (run / name).exists():
            shutil.copy(run / name, run / "kept")
            make(run / name)
            for read in READERS.values():
                with contextlib.suppress(MoeCommError, OSError):
                    read(run)
            if (run / name).is_dir() and not (run / name).is_symlink():
                (run / name).rmdir()
            else:
                (run / name).unlink()
            (run / "kept").rename(run / name)


def test_lines_after_a_hole_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.seek(1 << 40)
        file.write(b"\nlast\ncut")
    lines = [line.strip(b"\0") for line in lines_of(path, 1 << 20)]
    assert lines[0] == b"first\n" and lines[-2:] == [b"last\n", b"cut"] and len(lines) <= 4


@pytest.mark.parametrize("make", STRANGE)
def test_a_hardware_description_that_is_not_regular_or_too_large_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    make(path)
    with pytest.raises(ConfigError, match="cannot read the hardware description"):
        hardware_file.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "model = 1",
        "model = [1]\nparallel = 'x'\ndata = 1979-05-27",
        "[model]\nexperts = 'many'\nhidden = true\nffn = [1]",
        "[model]\nexperts = 99999999999999999999\nhidden = -1\nffn = 0",
        "[model]\nhidden = 8\nffn = 8\n[optimizer]\nkind = {}",
        "[model]\nhidden = 8\nffn = 8\n[placement]\nevery = 'x'\n[data]\nmicro_batches = 'x'",
        "[parallel]\nep = 'two'\ntp = 1e9\npp = inf",
        "a = " + "[" * 5000,
        "\ufeff = ",
    ],
)
def test_values_of_any_type_in_the_settings_of_a_run_are_no_crash(text: str, run: Path) -> None:
    (run / "config.resolved.toml").write_text(text)
    for read in READERS.values():
        with contextlib.suppress(MoeCommError):
            read(run)


def test_nested_toml_is_refused() -> None:
    assert parse_toml(b"[a]\nb = [[1]]") == {"a": {"b": [[1]]}}
    for text in (b"a = " + b"[" * 70 + b"]" * 70, b"a = " + b"[" * 9000, b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            parse_toml(text)


def test_control_characters_are_printed_as_escape_sequences() -> None:
    assert printable("a\tb\n") == "a\tb\n" and printable("é日本 😀") == "é日本 😀"
    assert printable("\x1b[31m\x9b\r\x7f\u202e\u2066\ud800") == r"\x1b[31m\x9b\x0d\x7f\u202e\u2066\ud800"
    assert printable_line("a\nb\tc") == r"a\nb\tc"


def test_a_console_prints_names_with_invalid_markup_and_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table(title="[/title]")
    table.add_column("[/column]")
    table.add_row(ESCAPES)
    make_console(width=100).print(table, "[bold]x[/]")
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and r"\x1b]0;title\x07" in out
    assert "[/title]" in out and "[/column]" in out and "[/x]" in out and "[bold]" not in out


def hostile(run: Path) -> Path:
    """Rename a run and the names in its records."""
    for path in run.rglob("*.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            values = json.loads(line)
            for key in ("host", "name", "layer", "source", "what", "reason", "action"):
                if isinstance(values.get(key), str) and (key != "name" or len(lines) % 3 == 0):
                    values[key] += ESCAPES
            lines.append(json.dumps(values))
        path.write_text("".join(f"{line}\n" for line in lines))
    (run / "result.json").write_text(json.dumps({"status": ESCAPES}))
    fault = records.FaultRecord(1.0, 3, "stuck", [1], "restart" + ESCAPES, "waits" + ESCAPES)
    records.append(run / "faults.jsonl", fault)
    renamed = run.with_name(f"run{ESCAPES.replace('/', '')}")
    run.rename(renamed)
    return renamed


COMMANDS = [
    ["report", "RUN"],
    ["diagnose", "RUN"],
    ["whatif", "RUN"],
    ["trace", "RUN", "OUT/\x1bt"],
    ["export", "RUN", "OUT/\x1be"],
    ["plan", "--model", "\x1b[31m", "--gpus", "8", "--hardware", "h100", "--seq-len", "8", "--global-batch", "8"],
    ["train", "\x1b[31m.toml"],
]


def test_no_command_prints_control_characters_of_a_run(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    path = hostile(run)
    for arguments in COMMANDS:
        values = [value.replace("RUN", str(path)).replace("OUT", str(tmp_path)) for value in arguments]
        with contextlib.suppress(SystemExit):
            command(values)
        captured = capfd.readouterr()
        text = captured.out + captured.err
        assert text and not set("\x1b\x07\x9b\r\u202e") & set(text), arguments
    page = (path / "report.html").read_text()
    assert "[/x]" in page and "[/x]</script>" not in page and "<script>alert" not in page


LIMITED = """
import resource, sys
from pathlib import Path
{imports}
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""


def limited(imports: str, call: str, path: Path) -> str:
    """Run ``call`` in a process that can allocate 1 GiB, and return the name of its error and the message."""
    code = LIMITED.format(imports=imports, call=call)
    process = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return process.stdout


def test_a_small_parquet_file_with_millions_of_equal_rows_is_refused_in_little_memory(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = 1 << 20
    names = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc", "mb_id")
    zeros = pyarrow.nulls(rows, pyarrow.int64()).fill_null(0)
    columns: dict[str, Any] = dict.fromkeys(names, zeros)
    columns |= dict.fromkeys(("start_ts", "duration"), zeros.cast(pyarrow.float64()))
    types = pyarrow.nulls(rows, pyarrow.int8()).fill_null(0)
    columns["optype"] = pyarrow.DictionaryArray.from_arrays(types, ["forward-compute"])
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.table(columns), path, compression="zstd", row_group_size=rows)
    assert path.stat().st_size < rows // 16
    imports = "import pyarrow.parquet\nfrom moe_plan.whatif.straggler_trace import read_straggler_trace"
    assert "CorruptFile" in (said := limited(imports, "read_straggler_trace(Path(sys.argv[1]))", path)), said


def test_a_small_tokenizer_with_a_huge_id_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 2_000_000_000}, "merges": []}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    imports = "import tokenizers\nfrom moe_comm.train.data.tokenizer import load_tokenizer"
    said = limited(imports, "load_tokenizer(sys.argv[1])", path)
    assert said.startswith("ConfigError") and "ids up to" in said, said


@pytest.mark.parametrize(
    "override",
    [
        *("model.layers=1000000000", "model.first_dense=1000000000", "model.experts=1000000000"),
        *("parallel.ranks=1000000000", "parallel.pp=1000000000", "parallel.virtual=1000000000"),
        *("data.micro_batches=1000000000", "data.workers=1000000000", "data.vocab=1000000000"),
        *("placement.window=1000000000", "guard.window=1000000000", "parallel.overlap_chunks=1000000000"),
    ],
)
def test_values_that_no_run_can_have_are_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config("tiny", [override])


def test_a_model_with_a_billion_layers_is_refused_before_transformers_reads_it(tmp_path: Path) -> None:
    read_config = pytest.importorskip("moe_comm.integrations.hugging_face.architecture").read_config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", "num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="num_hidden_layers can be at most"):
        read_config(tmp_path)
