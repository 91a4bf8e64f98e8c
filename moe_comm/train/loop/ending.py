"""The end of a run: stop signals, last checkpoint, exported model, text sample and summary."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from moe_comm.errors import MoeCommError, UnsupportedModel
from moe_comm.runtime.launch import SAME_SIGNAL_S
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, Statistics
from moe_comm.train.loop.progress import Progress
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.loop.saver import RunSaver
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.ranks import Ranks
from moe_comm.train.result import LAST_STEPS, RunResult


@contextlib.contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[list[int]]:
    """Stop training after the current step on SIGINT or SIGTERM; a second signal ends the process at once.

    A rank that exits in the middle of a step would block its peers and leave the weights partly updated. The terminal
    and a launcher can both deliver one Ctrl-C, so signals shortly after the first one count as the same.

    After an exception the SIGTERM handler stays installed until ``restored_handler``: the agent sends SIGTERM to a
    failed rank, which must still write its records.

    Args:
        request: requests the stop; called at each signal.

    Yields:
        The received signals.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    times: list[float] = []

    def stop(kind: int, frame: FrameType | None) -> None:
        times.append(time.monotonic())
        received.append(int(kind))
        request()
        if len(times) > 1 and times[-1] - times[0] >= SAME_SIGNAL_S:
            signal.signal(kind, handlers[signal.Signals(kind)])
            signal.raise_signal(kind)

    for kind in handlers:
        signal.signal(kind, stop)
    try:
        yield received
    except BaseException:
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])
        raise
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


@contextlib.contextmanager
def restored_handler(kind: signal.Signals) -> Iterator[None]:
    """Restore the current handler of ``kind`` on exit."""
    handler = signal.getsignal(kind)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(kind, handler)


def save_last_checkpoint(trainer: Trainer, saver: RunSaver) -> Path:
    """Return the checkpoint of the last step, and save it first if needed. Collective."""
    latest = saver.latest()
    if latest is None or latest.name != f"step-{trainer.next_step:08d}":
        saver.save(trainer.next_step)
        saver.finish()
        latest = saver.latest()
    assert latest is not None, "a successful save leaves a checkpoint"
    return latest


def export_model(checkpoint: Path, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
    """Export ``checkpoint`` as a Hugging Face model to the run folder, if its family supports it. Collective."""

    def export() -> str:
        # Imports transformers, which takes a second; only rank 0 needs it.
        from moe_comm.train.loop.export import export_checkpoint

        try:
            folder.save_model(lambda path: export_checkpoint(checkpoint, path))
        except UnsupportedModel as error:
            progress.log(f"the model was not exported; use the checkpoints: {error}")
        except MoeCommError as error:
            return str(error)
        return ""

    if message := ranks.run_on_first(export):
        raise MoeCommError(f"the model could not be exported: {message}")


def export_hint(checkpoint: Path) -> str:
    return f"saved {checkpoint}; to export it, run: moe-comm export {shlex.quote(str(checkpoint))} OUT"


def draw_sample(config: TrainConfig, corpus: Corpus, folder: RunFolder) -> str:
    """Generate a text sample with the exported model; return "" if there is none."""
    if not config.run.sample_tokens or not folder.model.exists():
        return ""
    # Imports transformers, which takes a second.
    from moe_comm.train.loop.export import continue_text, load_model, without_controls

    model = load_model(folder.model)
    ids = continue_text(model, corpus.prompt(32), config.run.sample_tokens, config.run.temperature, config.run.seed)
    text = without_controls(corpus.tokenizer().decode(ids))
    folder.save_sample(text)
    return text


def summary_text(result: RunResult, statistics: Statistics) -> str:
    """Return the summary that is printed at the end of a run."""
    first = "loss, first step" if result.first_step == 1 else f"loss, step {result.first_step} (resumed)"
    rows = [
        (first, result.first_loss),
        (f"loss, last {min(LAST_STEPS, result.steps)} steps", result.last_loss),
        *([] if result.validation_loss is None else [("loss, validation text", result.validation_loss)]),
        ("unigram entropy of the text", result.unigram_entropy),
    ]
    table = "\n".join(
        f"  {name:<30}{value:8.3f} nats/token{value / statistics.bytes_per_token:8.3f} nats/byte"
        for name, value in rows
    )
    sample = f"sample:\n{result.sample}\n\n" if result.sample else ""
    return (
        f"\n{sample}{result.status} after {result.steps} steps, {result.seconds:.0f} s\n{table}\n"
        f"run folder {result.folder}"
    )
