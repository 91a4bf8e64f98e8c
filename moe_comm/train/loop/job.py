"""Run training from a configuration to a result.

configuration ─▶ text ─▶ mapping ─▶ model ─▶ folder ─▶ state to resume from ─▶ hooks ─▶ steps ─▶ checkpoint ─▶ result
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from statistics import fmean
from types import FrameType

import torch
import torch.distributed as dist

import moe_comm
from moe_comm.errors import CorruptPayload, NonFiniteLoss, PeerError, UnsettledStep
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.observe.effective import effective_time
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import FAULTS, LOADS, METRICS, PLACEMENTS, FaultRecord, append
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.runtime.launch import SAME_SIGNAL_S
from moe_comm.runtime.persistent_memory import PersistentMemory
from moe_comm.runtime.watch import Watcher
from moe_comm.topology import ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.auto.choose import resolve_parallel
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, Statistics, prepare_all
from moe_comm.train.hooks import CollapseHint, PlannedCollections, StepHook
from moe_comm.train.lengths.feed import open_feed
from moe_comm.train.lengths.predict import predict_lengths
from moe_comm.train.loop.build import DTYPES, TrainState, architecture_of, build
from moe_comm.train.loop.export import draw_sample, export_model
from moe_comm.train.loop.progress import Progress, make_progress
from moe_comm.train.loop.recording import NonblockingSink, Recording
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.loop.saver import RunSaver
from moe_comm.train.loop.trainer import Trainer, trial_seconds
from moe_comm.train.metrics import JsonlSink, LoadsSink, MetricsSink, PlacementsSink, TensorBoardSink
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.attempts import AttemptLog, WatchStepBegin, WatchStepEnd, carry_over, watch_run
from moe_comm.train.resilience.peer_memory import PeerSnapshots
from moe_comm.train.resilience.persistent_state import open_host_memory, runs_in_memory
from moe_comm.train.result import LAST_STEPS, RunResult

COLLECTIVE_ERRORS = (NonFiniteLoss, UnsettledStep, CorruptPayload)
"""Errors that all ranks raise in the same step, so that they can still save the last good weights."""


@dataclass(frozen=True)
class _Run:
    """Configuration, train state, data and output of a run."""

    config: TrainConfig
    state: TrainState
    corpus: Corpus
    ranks: Ranks
    folder: RunFolder
    progress: Progress
    architecture: TransformerConfig


@dataclass(frozen=True)
class _Start:
    """The state that a run starts from.

    step: completed steps. source: as in ``Attempt``. skipped: records of unusable checkpoints.
    """

    step: int
    source: str
    skipped: tuple[FaultRecord, ...] = ()


def run_config(config: TrainConfig) -> RunResult:
    """Implement ``moe_comm.train.run``."""
    ranks = Ranks.make()
    ranks.check_equal("the configuration", configuration.dump(config), "start all ranks with the same configuration")
    progress = make_progress(ranks.is_first, config.run.log_every)
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    host_memory = open_host_memory(ranks, progress.log) if config.checkpoint.peer_every else None
    snapshots = runs_in_memory(host_memory, ranks) if config.checkpoint.peer_every else ()
    if config.parallel.auto:
        earlier = partial(RunFolder.resumed_config, config, snapshots)
        device = device_of_run()
        trial = partial(trial_seconds, architecture=architecture, corpus=corpus, ranks=ranks, device=device)
        config, text = resolve_parallel(config, ModelShape.of(architecture), ranks, device, earlier, trial)
        progress.log(text)
    # Under torchrun, the resolved configuration must not contain the default number of ranks.
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": ranks.world})})
    mesh = ParallelMesh(config.parallel.mapping(ranks.world), device_of_run())
    state = build(config, architecture, mesh, peak_flops(config, mesh, ranks))
    folder = RunFolder.make(config, ranks, snapshots)
    progress.log(_start_text(config, architecture, corpus, mesh, folder))
    return _train(_Run(config, state, corpus, ranks, folder, progress, architecture), host_memory)


def device_of_run() -> str:
    """Return "cuda" if the process group has NCCL, else "cpu"."""
    if dist.is_initialized() and torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        return "cuda"
    return "cpu"


def open_corpus(config: TrainConfig, ranks: Ranks) -> Corpus:
    """Open the text of ``config``. The first of the ranks that share a cache prepares it. Collective."""
    settings = config.data
    cache = Path(settings.cache).expanduser()
    first = ranks.first_with_folder(cache)

    def prepare() -> str:
        return "\n".join(path.name for path in prepare_all(settings))

    names = ranks.run_on_some(prepare if first == ranks.rank else None)[first].split("\n")
    opened: list[Corpus] = []

    def check() -> str:
        opened.append(Corpus.open([cache / name for name in names], settings, config.run.seed))
        return " ".join(file.digest for file in opened[0].files)

    tokens = ranks.run_on_some(check)[ranks.rank]
    ranks.check_equal(
        "the prepared tokens",
        tokens,
        "use the same text, tokenizer and versions on all hosts, or put data.cache on a shared file system",
    )
    return opened[0]


def peak_flops(config: TrainConfig, mesh: ParallelMesh, ranks: Ranks) -> float:
    """Measure matrix-product FLOP/s in the model's dtype, summed over all ranks, which measure together. Collective.

    Later runs of a process on as many ranks reuse its measurement.
    """
    ranks.barrier()
    measured = _measured_flops(DTYPES[config.model.dtype], mesh.device, ranks.world, torch.get_num_threads())
    return float(ranks.sum(torch.tensor([measured], dtype=torch.float64, device="cpu")))


@cache
def _measured_flops(dtype: torch.dtype, device: str, ranks: int, threads: int) -> float:
    return gemm_flops(dtype, device)


def _train(run: _Run, host_memory: PersistentMemory | None) -> RunResult:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored_handler(signal.SIGTERM))
        EVENTS.enabled = run.config.observe.events
        watcher = watch_run(run.config, run.ranks, run.folder.path, run.progress.log)
        if watcher is not None:
            stack.enter_context(watcher)
        saver = _open_saver(run, host_memory, stack)
        start = _restore(run, saver)
        attempts = _open_attempt_log(run, start)

        def record_fault(record: FaultRecord) -> None:
            if attempts is not None:
                append(run.folder.path / FAULTS, replace(record, attempt=attempts.attempt.number))

        sinks = _open_sinks(run, start.step, record_fault)
        for sink in sinks:
            stack.callback(sink.close)
        feed = open_feed(run.config, run.corpus, run.state.mesh, run.architecture, run.config.run.steps)
        stack.enter_context(feed)
        hint = CollapseHint(run.config, run.state.num_experts, run.state.top_k, run.progress.log)
        hooks = _make_hooks(run, saver, start.step, watcher, attempts, hint)
        for record in start.skipped:
            record_fault(record)
        trainer = Trainer(
            run.config,
            run.state,
            feed,
            run.ranks,
            saver=saver,
            sinks=sinks,
            hooks=hooks,
            progress=run.progress,
            on_fault=record_fault,
            first_step=start.step,
        )
        for hook in hooks:
            stack.callback(hook.close)
        if watcher is not None:
            stack.push(watcher)  # exits before the cleanup: the peers of a failed rank must not wait for it
        result, not_exported = _fit(run, trainer, saver, began)
        run.state.close()
        if run.ranks.is_first:
            if not_exported is None:
                result = replace(result, sample=draw_sample(run.config, run.corpus, run.folder))
            extra: dict[str, object] = {"hint": hint.text} if hint.text else {}
            extra |= {} if saver.memory is None else {"peer_memory": saver.memory.summary()}
            _report(run, result, extra)
            if not_exported is not None:
                run.progress.log(export_hint(not_exported))
        if saver.memory is not None:
            saver.memory.finish()
        return result


def _open_saver(run: _Run, host_memory: PersistentMemory | None, stack: contextlib.ExitStack) -> RunSaver:
    """Open checkpoints, and snapshots in memory if ``host_memory`` is given. ``stack`` closes both."""
    saver = RunSaver(run.folder.checkpoints, run.config, run.state, run.corpus, _versions())
    stack.push(saver.leave)
    if host_memory is not None:
        stack.callback(host_memory.close)
        every, timeout_s = run.config.checkpoint.peer_every, max(60.0, run.config.parallel.timeout_s)
        saver.memory = PeerSnapshots(
            host_memory,
            run.ranks,
            run.state.mesh,
            run.folder.path,
            every,
            saver.capture,
            timeout_s=timeout_s,
            growth=run.state.placements.most_state_bytes,
        )
        stack.callback(saver.memory.close)
    return saver


def _restore(run: _Run, saver: RunSaver) -> _Start:
    """Load the state that the run resumes from, if any. Collective."""
    if run.folder.note:
        run.progress.log(run.folder.note)
    if run.folder.checkpoint is not None:
        step = saver.resume(run.folder.checkpoint)
        run.progress.log(f"resumes after step {step} from {run.folder.checkpoint}")
        return _Start(step, "checkpoint")
    skipped: list[FaultRecord] = []
    if run.config.checkpoint.resume == "no":
        return _Start(0, "fresh")
    step, source = saver.resume_newest(run.ranks, run.progress.log, skipped.append)
    return _Start(step, source, tuple(skipped))


def _open_attempt_log(run: _Run, start: _Start) -> AttemptLog | None:
    """Record this start of the ranks in the attempt log on rank 0; return None on the others. Collective."""
    hosts = run.ranks.gather_texts(socket.gethostname())
    if not run.ranks.is_first:
        return None
    starts_over = run.config.checkpoint.resume == "auto" and start.source == "fresh"
    earlier = carry_over(run.folder.path, run.config.run.name) if starts_over else None
    attempts = AttemptLog(run.folder.path, run.state.mesh, start.step, start.source, hosts, earlier)
    if start.step:
        run.folder.delete_result()
    return attempts


def _open_sinks(run: _Run, done: int, record_fault: Callable[[FaultRecord], None]) -> list[MetricsSink]:
    """Open the metrics sinks on rank 0; none on the others. Lines of steps after ``done`` are removed."""
    if not run.ranks.is_first:
        return []
    folder, observe = run.folder.path, run.config.observe
    run.corpus.save_tokenizer(run.folder.tokenizer)
    sinks: dict[str, MetricsSink] = {
        METRICS: JsonlSink(folder / METRICS, done, observe.series),
        "tensorboard": TensorBoardSink(folder / "tensorboard", done, observe.series),
    }
    if observe.loads or observe.every:
        sinks[LOADS] = LoadsSink(folder / LOADS, observe.loads or observe.every, done)
    if run.state.placements.active:
        sinks[PLACEMENTS] = PlacementsSink(folder / PLACEMENTS, done)
    return [NonblockingSink(sink, name, run.progress.log, record_fault) for name, sink in sinks.items()]


def _make_hooks(
    run: _Run, saver: RunSaver, done: int, watcher: Watcher | None, attempts: AttemptLog | None, hint: CollapseHint
) -> list[StepHook]:
    """Return the hooks of the steps after ``done``, in call order."""
    config = run.config
    hooks: list[StepHook] = [] if watcher is None else [WatchStepBegin(watcher)]
    if config.observe.events:
        hooks.append(Recording(run.folder.path, run.ranks, config.observe, done, run.state.mesh.device))
    if saver.memory is not None:
        hooks.append(saver.memory)
    if attempts is not None:
        hooks.append(attempts)
    hooks.append(hint)
    if config.run.gc_every:
        hooks.append(PlannedCollections(config.run.gc_every))
    if config.faults.plan:
        # Imported only in runs with fault injection.
        from moe_comm.train.resilience.inject import Injector

        hooks.append(Injector(config, run.state.stages, run.corpus, saver.finish, run.ranks, run.folder.path))
    if watcher is not None:
        hooks.append(WatchStepEnd(watcher))
    return hooks


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


def _fit(run: _Run, trainer: Trainer, saver: RunSaver, began: float) -> tuple[RunResult, Path | None]:
    """Train, save, evaluate and export. On failure, record the error and raise. Collective.

    Returns:
        The result, and the last checkpoint if it was not exported because the user stopped the run.
    """
    signals: list[int] = []

    def stop_requested() -> bool:
        return bool(run.ranks.sum(torch.tensor([float(bool(signals))], dtype=torch.float32, device="cpu")))

    try:
        with stop_on_signals(trainer.request_stop) as signals:
            status = trainer.fit()
            saved = save_last_checkpoint(trainer, saver)
            # Skip evaluation and export after a stop request: a scheduler may kill ranks that take long to exit.
            interrupted = status == "interrupted" or stop_requested()
            validation_loss = None if interrupted else trainer.evaluate()
            interrupted = interrupted or stop_requested()
            if not interrupted:
                export_model(saved, run.folder, run.ranks, run.progress)
    except BaseException as error:
        _record_failure(run, trainer, error, signals)
        if isinstance(error, COLLECTIVE_ERRORS):
            run.progress.log(export_hint(save_last_checkpoint(trainer, saver)))
            run.state.close()
        else:
            run.state.data_parallel.close()  # its thread may wait for a peer
        raise
    losses = [report.loss for report in trainer.reports] or [float("nan")]
    result = RunResult(
        folder=run.folder.path,
        status=status,
        steps=trainer.next_step,
        first_loss=losses[0],
        last_loss=fmean(losses[-LAST_STEPS:]),
        validation_loss=validation_loss,
        unigram_entropy=run.corpus.statistics().unigram_entropy,
        seconds=time.monotonic() - began,
        signal=signals[0] if signals else 0,
        first_step=trainer.reports[0].step if trainer.reports else trainer.next_step + 1,
    )
    return result, saved if interrupted else None


def _record_failure(run: _Run, trainer: Trainer, error: BaseException, signals: Sequence[int]) -> None:
    """Write the result of a run that ``error`` ends, and this rank's last spans."""
    # A second Ctrl-C ends a rank at once; a rank that has not received it yet sees its peers fail.
    stopped = isinstance(error, KeyboardInterrupt)
    stopped = stopped or (signal.SIGINT in signals and isinstance(error, PeerError))
    what = f"{type(error).__name__}: {error}"
    if run.config.observe.events and not stopped:
        dump(run.folder.path, what)
    if run.ranks.is_first:
        outcome: dict[str, object] = {"status": "interrupted", "signal": int(signal.SIGINT)}
        if not stopped:
            outcome = {"status": "failed", "error": what}
        run.folder.save_result(outcome | {"steps": trainer.next_step, "ended_s": time.time()} | _versions())


def _report(run: _Run, result: RunResult, extra: Mapping[str, object]) -> None:
    """Write ``result`` and ``extra`` to the run folder, and print a summary."""
    ended_s = time.time()
    effective = effective_time(run.folder.path, ended_s)
    values: dict[str, object] = {"mapping": str(run.state.mesh.config), "ended_s": ended_s}
    values |= {} if effective is None else {"effective_time": effective.as_dict()}
    run.folder.save_result(asdict(result) | values | dict(extra) | _versions())
    run.progress.log(summary_text(result, run.corpus.statistics()))
    if effective is not None and effective.attempts > 1:
        run.progress.log(str(effective))


def export_hint(checkpoint: Path) -> str:
    return f"saved {checkpoint}; to export it, run: moe-comm export {shlex.quote(str(checkpoint))} OUT"


def summary_text(result: RunResult, statistics: Statistics) -> str:
    """Return the summary that is printed at the end of a run."""
    first = "loss, first step" if result.first_step == 1 else f"loss, step {result.first_step} (resumed)"
    rows = [
        (first, result.first_loss),
        (f"loss, last {min(LAST_STEPS, result.steps - result.first_step + 1)} steps", result.last_loss),
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


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": metadata.version("transformers")}
    return versions | {"moe_comm": moe_comm.__version__}


def _start_text(
    config: TrainConfig, architecture: TransformerConfig, corpus: Corpus, mesh: ParallelMesh, folder: RunFolder
) -> str:
    shape = ModelShape.of(architecture)
    router = architecture.moe.router
    statistics = corpus.statistics()
    epochs = ", ".join(f"{config.run.steps * epochs_per_step:.2g}" for epochs_per_step in corpus.epochs)
    lengths = predict_lengths(config, corpus, mesh.config, architecture)
    return (
        f"{config.model.family}: {shape.params / 1e6:.1f} M parameters ({shape.active / 1e6:.1f} M active), "
        f"{architecture.layers} layers, {router.num_experts} experts top-{router.top_k}\n"
        f"mapping: {mesh.config}, {mesh.config.world} rank(s), {config.parallel.sharding}\n"
        f"text {', '.join(config.data.paths)}: {statistics.train_tokens:,} training tokens, "
        f"{statistics.validation_tokens:,} validation tokens, {statistics.bytes_per_token:.2f} bytes per token; "
        f"{config.run.steps} steps take {epochs} epochs\n"
        + ("" if lengths is None else f"{lengths}\n")
        + f"run folder {folder.path}"
    )
