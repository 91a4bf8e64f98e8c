"""Fuzz the parsers, or replay the corpus: the cases that earlier fuzzing found.

    python -m tests.fuzz list                     names of the targets
    python -m tests.fuzz replay                   seeds and corpus, with limits on time and memory
    python -m tests.fuzz NAME [SECONDS]           coverage-guided with atheris; a failing case is written to corpus/NAME

``replay`` needs no atheris. The tests run it in a subprocess, so that a crash fails one test and does not end pytest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import resource
import signal
import sys
from pathlib import Path

SECONDS_EACH = 20
MORE_BYTES = 1 << 30
"""Memory in bytes that one input may use."""


def replay() -> None:
    """Check that every seed is read, and that every corpus case ends within the limits on time and memory."""
    import torch

    from tests.fuzz.rooms import READ
    from tests.fuzz.targets import TARGETS

    torch.set_num_threads(1)
    usable = [target for target in TARGETS.values() if not target.needs or importlib.util.find_spec(target.needs)]
    num_cases = 0
    for target in usable:
        for seed in target.seeds():
            assert target.run(seed) == READ, f"{target.name}: a seed is refused"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for target in usable:
        for path in target.corpus_files:
            print(f"{target.name}/{path.name}", end=" ", flush=True)
            signal.alarm(SECONDS_EACH)
            print(target.run(path.read_bytes()), flush=True)
            signal.alarm(0)
            num_cases += 1
    print(f"{num_cases} cases")


def fuzz(name: str, seconds: int) -> None:
    """Run atheris. It ends the process."""
    import atheris

    with atheris.instrument_imports(include=["moe_comm.train", "moe_comm.runtime", "moe_comm.observe"]):
        from tests.fuzz.targets import CORPUS, TARGETS
    target = TARGETS[name]
    new_inputs = Path("build/fuzz") / name
    corpus = CORPUS / name
    new_inputs.mkdir(parents=True, exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (new_inputs / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        mutated = target.mutate(data, rng) if rng.random() < 0.7 else atheris.Mutate(data, longest)
        return bytes(mutated[:longest])

    options = [f"-max_total_time={seconds}", f"-timeout={SECONDS_EACH}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    arguments = [sys.argv[0], *options, f"-artifact_prefix={corpus}/", str(new_inputs), str(corpus)]
    atheris.Setup(arguments, lambda data: target.run(data) and None, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    if sys.argv[1] == "replay":
        replay()
        return
    if sys.argv[1] == "list":
        from tests.fuzz.targets import TARGETS

        with contextlib.suppress(BrokenPipeError):
            print(*TARGETS, sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fuzz(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)


if __name__ == "__main__":
    main()
