"""Files are written under new names and renamed, and deletions stay inside their folder: no link is followed."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.observe import faults, rank_log, records
from moe_comm.runtime import safe_files
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, latest
from moe_comm.train.data.tokenizer import copy_tokenizer, saved_files
from moe_plan.machine import hardware_file, hardware_table
from tests.pool import on_ranks
from tests.security.test_source import PACKAGE, PLANNER, ROOT, dotted

WRITING = {
    *("open", "io.open", "os.fdopen", "os.replace", "os.rename", "os.remove", "os.unlink", "os.truncate"),
    *("torch.save", "save_file", "np.save", "numpy.save", "tempfile.mkstemp"),
    *(f"shutil.{name}" for name in ("rmtree", "copyfile", "copy", "copy2", "copytree", "move")),
}
METHODS = {"write_text", "write_bytes", "unlink", "rename", "replace", "open", "touch", "savefig", "tofile"}
"""Methods of paths and of others that write or delete files."""
OWNERS = re.compile(
    r"(os|shutil|ChunkedDispatch|SharedDispatch|Corpus|self|self\._steps|self\._spans|writer|parameter|.*\.heap)"
)
"""Objects that have methods of these names, and are no paths."""
ALLOWED = {
    "bench/common/machine.py": "files of the kernel",
    "bench/common/ranks.py": "files of the kernel",
    "bench/hosts/ranks.py": "descriptors that ranks inherit",
    "bench/overlap/timeline.py": "a picture, to a file of safe_files",
    "gpu/nvrtc.py": "a new file in the cache of compiled kernels, which is renamed",
    "integrations/checkpoint/optimizer.py": "torch.save to a file of safe_files",
    "integrations/hugging_face/trainer.py": "torch.save to a file of safe_files",
    "integrations/hugging_face/weights.py": "a new folder",
    "runtime/launch/agent.py": "the launcher's own temporary folder",
    "runtime/launch/launcher.py": "the launcher's own temporary folder",
    "runtime/launch/rank_main.py": "the launcher's own temporary folder",
    "train/checkpoint/folder.py": "names in the folder of checkpoints",
    "train/data/tokenfile.py": "names in the cache",
    "train/loop/run_folder.py": "names in the run folder",
    "train/ranks.py": "a new file with a random name",
    "train/resilience/inject.py": "a fault on purpose",
}
"""Files with other calls, and why these follow no link."""


def writes(source: str) -> list[str]:
    """Return the calls that write or delete files other than through ``safe_files``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        owner, _, method = name.rpartition(".")
        values = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        modes = [value for value in values if isinstance(value, str) and re.fullmatch("[rwxabt+]+", value)]
        reads = not any(set("wxa+") & set(mode) for mode in modes)
        # str.replace and dataclasses.replace have other numbers of arguments than Path.replace.
        renames = method not in ("replace", "rename") or len(node.args) + len(node.keywords) == 1
        is_method = method in METHODS and owner and renames and not OWNERS.fullmatch(owner)
        if (name in WRITING or is_method) and not (method in ("open", "fdopen") and reads):
            found.append(name)
    return found


def test_files_are_only_written_and_deleted_by_the_shared_module() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    files |= {str(path.relative_to(ROOT)): path for path in PLANNER.rglob("*.py")}
    found = {name: writes(path.read_text()) for name, path in files.items()}
    del found["runtime/safe_files.py"]
    assert {file: names for file, names in found.items() if names and file not in ALLOWED} == {}
    assert all(found[file] for file in ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "open(p, 'w', encoding='utf-8')",
        "p.open('ab')",
        "p.write_text(x)",
        "shutil.rmtree(p)",
        "os.replace(a, b)",
        "p.unlink()",
        "torch.save(x, p)",
    ],
)
def test_writes_are_found(source: str) -> None:
    assert writes(source)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of the folder that is written to."""
    path = tmp_path / "victim"
    path.write_text("precious\n")
    return path


def hardware(path: Path) -> None:
    hardware_file.save(hardware_table.cluster_named("h100", 8), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: safe_files.write_file(path, "new"),
    "hardware": hardware,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_link_is_replaced_and_not_written_through(write: Callable[[Path], Any], victim: Path) -> None:
    out = victim.parent / "folder" / "out"
    out.parent.mkdir()
    for name in ("out", "out.partial", "out.part"):
        (out.parent / name).symlink_to(victim)
    write(out)
    assert victim.read_text() == "precious\n"
    assert out.is_file() and not out.is_symlink()
    assert not [path for path in out.parent.iterdir() if not path.is_symlink() and path != out], "a file was left"


def test_a_device_or_a_link_to_standard_output_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    for path in (tmp_path / "pipe", tmp_path / "stdout", tmp_path):
        with pytest.raises(OSError, match=r"Not a regular file|Is a directory"):
            safe_files.write_file(path, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "stdout"]


def test_records_are_not_appended_to_links_pipes_or_through_linked_folders(victim: Path) -> None:
    run = victim.parent / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(victim)
    os.mkfifo(run / "pipe.jsonl")
    for name in ("metrics.jsonl", "pipe.jsonl"):
        with pytest.raises(OSError, match=r".+"):
            records.LineWriter(run / name)
        with pytest.raises(OSError, match=r".+"):
            records.cut_after(run / name, 3)
        with pytest.raises(OSError, match=r".+"):
            faults.write_injection(run / name, faults.Injection(0.0, "", "", 0, 0, 0, ""))
    other = victim.parent / "other"
    (other / "ranks").mkdir(parents=True)
    (other / "ranks/rank-00000.jsonl").write_text('{"step":5}\n')
    (run / "ranks").symlink_to(other / "ranks")
    with pytest.raises(OSError, match=r".+"):
        rank_log.RankLog(run, 0)
    assert (other / "ranks/rank-00000.jsonl").read_text() == '{"step":5}\n'
    assert victim.read_text() == "precious\n"


def one(value: float = 1.0) -> dict[str, Entry]:
    return {"a": Entry.whole(torch.full((2,), value))}


def save(folder: Path, *steps: int, keep: int = 2) -> None:
    with Checkpointer(folder, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, one(step))


def test_pruning_deletes_links_and_not_the_checkpoints_they_lead_to(tmp_path: Path) -> None:
    """So does a save of a step whose folder, or whose leftover of a crash, is a link."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    save(theirs, 1, 2)
    ours.mkdir()
    for name in ("step-00000001", "step-00000002", "step-00000003.partial", "step-00000004.partial"):
        (ours / name).symlink_to(theirs / "step-00000001")
    (ours / "step-00000002.replaced").symlink_to(theirs / "step-00000002")
    (ours / "step-00000005").symlink_to(tmp_path / "nowhere")
    save(ours, 2, 3, 5, keep=1)
    for step in (1, 2):
        CheckpointReader(theirs / f"step-{step:08d}").verify()
    assert sorted(path.name for path in theirs.iterdir()) == ["step-00000001", "step-00000002"]
    assert [path.name for path in ours.iterdir()] == ["step-00000005"]
    assert not (ours / "step-00000005").is_symlink()


def test_a_folder_is_deleted_without_following_links_in_it(victim: Path) -> None:
    folder = victim.parent / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/link").symlink_to(victim.parent)
    safe_files.remove(folder)
    safe_files.remove(folder)
    assert victim.exists() and not folder.exists()


def tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")


def test_only_the_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    source, out = tmp_path / "tokenizer", tmp_path / "out"
    tokenizer(source)
    out.mkdir()
    others = ("model.safetensors", "config.json", "modeling.py", "generation_config.json")
    for name in others:
        (source / name).write_text("theirs")
        (out / name).write_text("ours")
    os.mkfifo(source / "pipe")
    (source / "link").symlink_to("/etc/passwd")
    copy_tokenizer(source, out)
    assert sorted(path.name for path in out.iterdir()) == sorted((*others, "tokenizer.json", "tokenizer_config.json"))
    assert all((out / name).read_text() == "ours" for name in others)


def make_link(path: Path) -> None:
    shutil.move(path, path.with_name("moved"))
    path.symlink_to("moved")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [make_link, make_pipe, make_huge])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_with_a_link_a_pipe_or_a_hole_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    tokenizer(tmp_path / "tokenizer")
    make(tmp_path / "tokenizer" / name)
    with pytest.raises(ConfigError, match="tokenizer"):
        saved_files(tmp_path / "tokenizer")


def test_a_linked_tokenizer_folder_is_refused(tmp_path: Path) -> None:
    tokenizer(tmp_path / "tokenizer")
    tokenizer(tmp_path / "theirs")
    (tmp_path / "linked").symlink_to("theirs")
    with pytest.raises(OSError, match="linked"):
        copy_tokenizer(tmp_path / "tokenizer", tmp_path / "linked")
    make_link(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="tokenizer"):
        copy_tokenizer(tmp_path / "tokenizer", tmp_path / "out")


UNLOADABLE: dict[str, tuple[Any, dict[Any, Any], dict[Any, Any]]] = {
    "surrogate in a name": (2, {"a\ud800": Entry.whole(torch.ones(1))}, {}),
    "name that is not a string": (2, {1: Entry.whole(torch.ones(1)), "1": Entry.whole(torch.ones(1))}, {}),
    "step beyond 64 bits": (1 << 63, one(), {}),
    "step with thousands of digits": (10**5000, one(), {}),
    "step that is text": ("2", one(), {}),
    "surrogate in a key": (2, one(), {"\ud800": 1}),
    "keys that collide": (2, one(), {True: 1, "true": 2}),
    "NaN as a key": (2, one(), {float("nan"): 1}),
    "number with thousands of digits": (2, one(), {"n": 10**5000}),
    "shape of no tensor": (2, {"a": Entry(torch.ones(0), (0, 1 << 62, 4), ())}, {}),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_could_never_be_loaded_is_not_saved_and_no_checkpoint_is_deleted(case: str, tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    step, entries, state = UNLOADABLE[case]
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(step, entries, state=state)
        with pytest.raises(CheckpointError, match="could not be saved"):
            checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    CheckpointReader(tmp_path / "step-00000001").verify()


@on_ranks(2)
def test_a_bad_name_on_one_rank_is_the_same_error_on_all(rank: int, tmp_path: Path) -> None:
    name = "a\ud800" if rank == 1 else "a"
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, one())
        checkpointer.wait()
        checkpointer.save(2, {name: Entry.whole(torch.ones(1))})
        with pytest.raises(CheckpointError, match="valid Unicode"):
            checkpointer.wait()
    assert latest(tmp_path) == tmp_path / "step-00000001"


@pytest.mark.parametrize("suffix", ["", ".replaced"])
def test_a_checkpoint_of_a_newer_format_is_never_replaced(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"step-00000002{suffix}"
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(path)
    marker = path / "COMPLETE"
    marker.write_text(marker.read_text().replace('"version":1', '"version":2'))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(2, one())
        with pytest.raises(CheckpointError, match=r"version 2.*update it"):
            checkpointer.wait()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    CheckpointReader(tmp_path / "step-00000001").verify()
