"""Run parts one after the other, each with a deadline, and store every result at once.

    results.jsonl    one line per event of an operation, flushed (``record.py``)
    parts.json       result of each part, and the hash of the source files that it ran (``sources.py``)
    NAME.log         output of a part
    README.md        tables of all results
    ARCHIVE          all of these files; replaced after every part, and within seconds after every result

The result of a part is ``passed``, ``failed: …``, ``hung in OPERATION``, ``took longer than …`` or ``skipped: …``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tarfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.cache import TRITON_CACHE
from benchmarks.gpu.parts import Family, Part
from benchmarks.gpu.record import FATAL, read, unfinished
from benchmarks.gpu.report import report
from benchmarks.gpu.sources import ROOT, files_of, hash_of, native_files

BUILT = ROOT / "moe_comm" / "_C.built"
"""Source hash and architecture of the native core (``_built_from``). To keep a build, keep this file with the core."""
ARCHIVE_EVERY_S = 2.0
NOT_STARTED = 127
"""Exit code of a command that does not exist, as in a shell."""
ESSENTIAL = ("probe", "peer_to_peer, bf16", "bulk, bf16", "triton, operators", "layer, forward and backward")
"""Smoke checks that the later parts of their family require."""
ATTEMPTS = 4
"""Maximum number of starts of a part. It starts again after an operation that makes the CUDA context unusable."""


def files_hash(part: Part, results: Path) -> str:
    """Return a hash of the files that ``part`` runs, of its arguments and of its environment."""
    words = [word for word in part.command[1:] if word != str(results)]
    return hash_of(files_of(part.command), more=json.dumps([words, dict(part.env)]))


@dataclass
class Outcome:
    """Result of a part, hash of its source files, UTC date and seconds."""

    result: str
    tree: str
    date: str
    seconds: float


class Driver:
    """Runs parts and keeps their outcomes in ``out``.

    Args:
        out: folder of the results; created.
        archive: the archive of the folder.
        deadline_s: seconds for all parts together.
        command: the command line, for README.md.
    """

    def __init__(self, out: Path, archive: Path, deadline_s: float, command: str) -> None:
        self.out, self.archive, self.command = out, archive, command
        self.results = out / "results.jsonl"
        self.began, self.deadline_s = time.monotonic(), deadline_s
        self.broken: dict[Family, str] = {}
        self._trees: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)
        archive.parent.mkdir(parents=True, exist_ok=True)
        path = out / "parts.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        self.outcomes: dict[str, Outcome] = {name: Outcome(**values) for name, values in known.items()}

    def run(self, parts: Sequence[Part], again: bool = False, listed: Sequence[Part] = ()) -> int:
        """Run the parts. Return the exit code: 1 if any failed, timed out, was skipped or had no time.

        Args:
            again: also run parts that have passed with the same source files.
            listed: parts in README.md; those that run are listed if this is empty.
        """
        failed = False
        for part in parts:
            if not (again or part.always) and self._has_passed(part):
                print(f"== {part.name}: has passed with these files", flush=True)
                continue
            result = self._run(part)
            failed |= result != "passed"
            self._report(listed or parts)
        self._report(listed or parts)
        return int(failed)

    def _has_passed(self, part: Part) -> bool:
        if part.kind == "build":  # the native core can exist without results, and results without the native core
            return BUILT.exists() and BUILT.read_text() == _built_from(part) and _native_core_imports(part.command[0])
        known = self.outcomes.get(part.name)
        return known is not None and known.result == "passed" and known.tree == self._tree(part)

    def _tree(self, part: Part) -> str:
        if part.name not in self._trees:
            self._trees[part.name] = files_hash(part, self.results)
        return self._trees[part.name]

    def _run(self, part: Part) -> str:
        left_s = self.deadline_s - (time.monotonic() - self.began)
        reason = self.broken.get("") or self.broken.get(part.family)
        started = time.monotonic()
        if reason is not None:
            result = f"skipped: {reason}"
        elif left_s < 10:
            result = "skipped: no time left; run the same command again"
        else:
            limit_s = min(part.limit_s, left_s)
            print(f"== {part.name} (at most {limit_s:.0f} s): {' '.join(part.command)}", flush=True)
            result = self._attempts(part, limit_s)
            self._judge(part, result)
        print(f"== {part.name}: {result}", flush=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.outcomes[part.name] = Outcome(result, self._tree(part), now, round(time.monotonic() - started, 1))
        return result

    def _judge(self, part: Part, result: str) -> None:
        """Record the families whose later parts must be skipped."""
        if part.kind == "build" and result == "passed":
            BUILT.write_text(_built_from(part))
        elif result == "passed":
            return
        elif part.kind == "build":
            self.broken[""] = "the build failed"
        elif part.kind == "smoke":
            lines = [line for line in read(self.results) if line.get("attempt") == self._attempt(part)]
            failed = {line["operation"] for line in lines if line["event"] == "failed"}
            # Dispatch does not depend on the other checks of peer_to_peer, such as low latency.
            names = {name.split(",")[0] for name in failed if name in ESSENTIAL}
            if (hung := unfinished(self.results, part.name, self._attempt(part))) is not None:
                names = {"probe"} if hung == "probe" else names | {hung.split(",")[0]}
            for family in names - {"probe"}:
                self.broken[family] = f"the smoke check of {family} failed"
            if "probe" in names or not failed | names:
                self.broken[""] = "the smoke check failed"
        elif result.startswith("hung") and part.family:
            self.broken[part.family] = f"{part.name} hung"

    def _attempt(self, part: Part) -> str:
        return f"{part.name} {self.began:.3f}"

    def _attempts(self, part: Part, limit_s: float) -> str:
        """Run the command, restart it after ``FATAL``, and return the result."""
        end = time.monotonic() + limit_s
        log = self.out / f"{part.name}.log"
        log.unlink(missing_ok=True)
        fatal = 0
        while True:
            code = self._execute(part, log, end)
            if code != FATAL or fatal + 1 == ATTEMPTS:
                break
            fatal += 1
        if code == 0 and fatal:
            return f"failed: {fatal} operations left the CUDA context unusable"
        if code == 0:
            if part.kind == "tests" and not re.search(r"(^|\D)[1-9]\d* passed", log.read_text(errors="replace")):
                return "failed: no test passed"
            return "passed"
        operation = unfinished(self.results, part.name, self._attempt(part))
        inside = f" in {operation!r}" if operation else ""
        if _was_stopped(log):
            return f"hung{inside}"
        if code is None:
            # A measurement starts no operation shortly before its end, so the running operation took too long.
            hung = part.kind in ("measurement", "smoke") and operation is not None
            return f"hung{inside}" if hung else f"took longer than {limit_s:.0f} s"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}{inside}"
        return f"failed: exit code {code}{inside}"

    def _execute(self, part: Part, log: Path, end: float) -> int | None:
        """Run the command, and kill it at ``end``. Return its exit code, or None if it was killed."""
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        env |= {"MOE_COMM_GPU_ATTEMPT": self._attempt(part), "MOE_COMM_GPU_END": str(end)}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(TRITON_CACHE)}
        # torch's deterministic mode, which the contract suite uses, requires it.
        env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **part.env}
        with log.open("ab") as file:
            try:
                process = subprocess.Popen(
                    part.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, process_group=0
                )
            except OSError as error:  # such as a profiler that is not installed
                file.write(f"{error}\n".encode())
                return NOT_STARTED
        packed = 0
        try:
            while (left := end - time.monotonic()) > 0:
                try:
                    return process.wait(min(left, ARCHIVE_EVERY_S))
                except subprocess.TimeoutExpired:
                    size = self.results.stat().st_size if self.results.exists() else 0
                    if size != packed:
                        self.pack()
                        packed = size
            return None
        finally:
            _kill_group(process)
            process.wait()

    def _report(self, parts: Sequence[Part]) -> None:
        (self.out / "parts.json").write_text(
            json.dumps({name: asdict(outcome) for name, outcome in self.outcomes.items()}, indent=1) + "\n"
        )
        try:
            trees = {part.name: self._tree(part) for part in parts}
            text = report(self.out, trees, self.command)
        except Exception:  # a table that fails must not stop the remaining parts
            text = f"the report failed:\n\n{traceback.format_exc()}"
        (self.out / "README.md").write_text(text)
        self.pack()

    def pack(self) -> None:
        """Replace the archive. If that fails, print the reason."""
        fresh = self.archive.with_name(self.archive.name + ".new")
        try:
            with tarfile.open(fresh, "w:gz", compresslevel=3) as archive:
                for path in sorted(self.out.iterdir()):
                    if path.is_file() and path not in (self.archive, fresh):
                        archive.add(path, f"{self.out.name}/{path.name}")
            fresh.replace(self.archive)
        except OSError as error:
            print(f"gpu.sh: could not write {self.archive}: {error}", flush=True)


def _built_from(part: Part) -> str:
    """Return a hash of the sources of the native core, and the architecture that ``part`` compiles them for."""
    return f"{hash_of(native_files())} {part.env.get('MOE_COMM_CUDA_ARCHS', '')}\n"


def _native_core_imports(python: str) -> bool:
    return (
        subprocess.run([python, "-c", "import moe_comm._C"], cwd=ROOT, capture_output=True, check=False).returncode == 0
    )


def _was_stopped(log: Path) -> bool:
    """Return whether ``faulthandler`` printed the stacks at the limit of an operation or of a test."""
    return re.search(r"^Timeout \(\d+:\d\d:\d\d", log.read_text(errors="replace"), re.MULTILINE) is not None


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
