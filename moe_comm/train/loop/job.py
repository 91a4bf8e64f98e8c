"""One whole run, from its configuration to its result.

configuration ─▶ text ─▶ model ─▶ folder ─▶ state to resume from ─▶ hooks ─▶ steps ─▶ last checkpoint ─▶ result
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

import moe_comm
from moe_comm.errors import CorruptPayload, NonFiniteLoss, PeerError, UnsettledStep
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.observe.effective import effective_time
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import FAULTS, LOADS, METRICS, FaultRecord, append
from moe_comm.plan.model.shape import ModelShape
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.runtime.persistent_memory import PersistentMemory
from moe_comm.runtime.watch import Watcher
from moe_comm.topology import ParallelMesh
from moe_comm.train import config as configuration
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, prepare_all
from moe_comm.train.hooks import StepHook
from moe_comm.train.loop.build import DTYPES, architecture_of, build
from moe_comm.train.loop.collapse import CollapseHint
from moe_comm.train.loop.ending import closing, draw_sample, export_model, how_to_export, save_end
from moe_comm.train.loop.feed import CorpusFeed, corpus_settings
from moe_comm.train.loop.nonblocking_sink import NonblockingSink
from moe_comm.train.loop.pauses import PlannedCollections
from moe_comm.train.loop.progress import Progress, make_progress
from moe_comm.train.loop.recording import Recording
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.loop.saver import RunSaver
from moe_comm.train.loop.signals import handler_put_back, stop_on_signals
from moe_comm.train.loop.trainer import Trainer, TrainState
from moe_comm.train.metrics import JsonlSink, LoadsSink, MetricsSink, TensorBoardSink
from moe_comm.train.ranks import Ranks, digest
from moe_comm.train.resilience.attempts import AttemptLog, carry_over
from moe_comm.train.resilience.peer_memory import PeerMemory
from moe_comm.train.resilience.persistent_state import kept_runs, open_kept
from moe_comm.train.resilience.resume import go_on
from moe_comm.train.resilience.watching import StepBegins, StepEnds, watch_run
from moe_comm.train.result import LAST_STEPS, RunResult

RAISED_TOGETHER = (NonFiniteLoss, UnsettledStep, CorruptPayload)
"""By all ranks of a training step, which can still save the weights that were good."""


@dataclass(frozen=True)
class _Run:
    """What every part of a run uses: its settings, what it trains, on which text, and where it writes."""

    config: TrainConfig
    state: TrainState
    corpus: Corpus
    ranks: Ranks
    folder: RunFolder
    progress: Progress


@dataclass(frozen=True)
class _Start:
    """Where a run begins: after ``step`` steps.

    source: of the state, as in ``Attempt``. passed_over: checkpoints that could not be used.
    """

    step: int
    source: str
    passed_over: tuple[FaultRecord, ...] = ()


@dataclass(frozen=True)
class _End:
    """How a run that did not fail ended.

    status: as in ``RunResult``. saved: the last checkpoint. interrupted: the user asked for the end. signal: the first
    one received; 0 for none.
    """

    status: str
    saved: Path
    interrupted: bool
    validation_loss: float | None
    signal: int


def run_config(config_path: str | Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """See ``moe_comm.train.run``."""
    config = configuration.load(config_path, overrides)
    ranks = Ranks.make()
    settings = torch.frombuffer(bytearray(configuration.dump(config).encode()), dtype=torch.uint8)
    ranks.check_equal("the configuration", digest([settings]), "start all with the same file and overrides")
    mesh = ParallelMesh(config.parallel.mapping(ranks.world), device_of_run())
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    state = build(config, architecture, mesh, peak_flops(config, mesh, ranks))
    progress = make_progress(ranks.is_first, config.run.log_every)
    kept = open_kept(ranks, progress.say) if config.checkpoint.peer_every else None
    folder = RunFolder.make(config, ranks, kept_runs(kept, ranks) if config.checkpoint.peer_every else ())
    progress.say(_opening(config, architecture, corpus, mesh, folder))
    return _train(_Run(config, state, corpus, ranks, folder, progress), kept)


def _asked_to_stop(signals: Sequence[int], ranks: Ranks) -> bool:
    """Whether any rank has been sent a signal. Collective."""
    return bool(ranks.sum(torch.tensor([float(bool(signals))])))


def device_of_run() -> str:
    """ "cuda" where the process group has NCCL, else "cpu"."""
    if dist.is_initialized() and torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        return "cuda"
    return "cpu"


def open_corpus(config: TrainConfig, ranks: Ranks) -> Corpus:
    """The text of ``config``, prepared by the first of those ranks that share a cache, and opened by all. Collective.

    Raises:
        ConfigError: on every rank, where the text or the tokenizer cannot be used.
        CorruptFile: on every rank, where a prepared file is damaged.
        RankMismatch: on every rank, where hosts that share no cache have made different tokens.
    """
    settings = corpus_settings(config.data, config.run.seed)
    cache = Path(settings.cache).expanduser()
    first = ranks.first_with(cache)

    def prepare() -> str:
        return "\n".join(path.name for path in prepare_all(settings))

    names = ranks.while_some(prepare if first == ranks.rank else None)[first].split("\n")
    opened: list[Corpus] = []

    def check() -> str:
        opened.append(Corpus.open([cache / name for name in names], settings))
        return " ".join(file.digest for file in opened[0].files)

    tokens = ranks.while_some(check)[ranks.rank]
    ranks.check_equal(
        "the prepared tokens",
        digest([torch.frombuffer(bytearray(tokens.encode()), dtype=torch.uint8)]),
        "give every host the same text, tokenizer and versions, or put data.cache where all hosts see it",
    )
    return opened[0]


def peak_flops(config: TrainConfig, mesh: ParallelMesh, ranks: Ranks) -> float:
    """FLOP/s of a plain matrix product in the model's dtype, of all ranks together and at once. Collective."""
    ranks.barrier()
    return float(ranks.sum(torch.tensor([gemm_flops(DTYPES[config.model.dtype], mesh.device)], dtype=torch.float64)))


def _train(run: _Run, kept: PersistentMemory | None) -> RunResult:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(handler_put_back(signal.SIGTERM))
        EVENTS.enabled = run.config.observe.events
        watch = watch_run(run.config, run.ranks, run.folder.path, run.progress.say)
        if watch is not None:
            stack.enter_context(watch)
        saver = _open_saver(run, kept, stack)
        start = _restore(run, saver)
        attempts = _open_attempt_log(run, start)

        def record_fault(record: FaultRecord) -> None:
            if attempts is not None:
                append(run.folder.path / FAULTS, replace(record, attempt=attempts.attempt.number))

        sinks = _open_sinks(run, start.step, record_fault)
        for sink in sinks:
            stack.callback(sink.close)
        feed = _open_feed(run)
        stack.enter_context(feed)
        hint = CollapseHint(run.config, run.state.num_experts, run.state.top_k, run.progress.say)
        hooks = _make_hooks(run, saver, start.step, watch, attempts, hint)
        for record in start.passed_over:
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
        if watch is not None:
            stack.push(watch)  # leaves first too: the others are not to wait for what ends a rank that has failed
        end = _fit(run, trainer, saver)
        _close(run.state)
        result = _result(run, trainer, end, time.monotonic() - began)
        if run.ranks.is_first:
            if not end.interrupted:
                result = replace(result, sample=draw_sample(run.config, run.corpus, run.folder))
            more: dict[str, object] = {"hint": hint.text} if hint.text else {}
            more |= {} if saver.memory is None else {"peer_memory": saver.memory.summary()}
            _report(run, result, end, more)
        if saver.memory is not None:
            saver.memory.finish()
        return result


def _open_saver(run: _Run, kept: PersistentMemory | None, stack: contextlib.ExitStack) -> RunSaver:
    """The run's checkpoints, and its state in memory where ``kept`` is given. ``stack`` closes both."""
    saver = RunSaver(run.folder.checkpoints, run.config, run.state, run.corpus, _versions())
    stack.push(saver.leave)
    if kept is not None:
        stack.callback(kept.close)
        every, timeout_s = run.config.checkpoint.peer_every, max(60.0, run.config.parallel.timeout_s)
        saver.memory = PeerMemory(
            kept, run.ranks, run.state.mesh, run.folder.path, every, saver.capture, timeout_s=timeout_s
        )
        stack.callback(saver.memory.close)
    return saver


def _restore(run: _Run, saver: RunSaver) -> _Start:
    """Load the state that the run resumes from, if there is any. Collective."""
    if run.folder.note:
        run.progress.say(run.folder.note)
    if run.folder.checkpoint is not None:
        step = saver.resume(run.folder.checkpoint)
        run.progress.say(f"goes on after step {step} from {run.folder.checkpoint}")
        return _Start(step, "checkpoint")
    passed_over: list[FaultRecord] = []
    if run.config.checkpoint.resume == "no":
        return _Start(0, "fresh")
    step, source = go_on(saver, run.folder.checkpoints, run.ranks, run.progress.say, passed_over.append)
    return _Start(step, source, tuple(passed_over))


def _open_attempt_log(run: _Run, start: _Start) -> AttemptLog | None:
    """The record of this start of the ranks, on rank 0; None on the others. Collective."""
    hosts = run.ranks.texts(socket.gethostname())
    if not run.ranks.is_first:
        return None
    begins_again = run.config.checkpoint.resume == "auto" and start.source == "fresh"
    earlier = carry_over(run.folder.path, run.config.run.name) if begins_again else None
    attempts = AttemptLog(run.folder.path, run.state.mesh, start.step, start.source, hosts, earlier)
    if start.step:
        run.folder.forget_result()
    return attempts


def _open_sinks(run: _Run, done: int, record_fault: Callable[[FaultRecord], None]) -> list[MetricsSink]:
    """What writes each step's metrics, on rank 0; none on the others. Lines of steps after ``done`` are dropped."""
    if not run.ranks.is_first:
        return []
    folder, observe = run.folder.path, run.config.observe
    run.corpus.save_tokenizer(run.folder.tokenizer)
    made: dict[str, MetricsSink] = {
        METRICS: JsonlSink(folder / METRICS, done, observe.series),
        "tensorboard": TensorBoardSink(folder / "tensorboard", done, observe.series),
    }
    if observe.every:
        made[LOADS] = LoadsSink(folder / LOADS, observe.every, done)
    return [NonblockingSink(sink, name, run.progress.say, record_fault) for name, sink in made.items()]


def _open_feed(run: _Run) -> CorpusFeed:
    config = run.config
    return CorpusFeed(run.corpus, run.state.mesh, config.parallel.context, config.data.micro_batches, config.run.steps)


def _make_hooks(
    run: _Run, saver: RunSaver, done: int, watch: Watcher | None, attempts: AttemptLog | None, hint: CollapseHint
) -> list[StepHook]:
    """What observes the steps after ``done``, in the order in which it is called."""
    config = run.config
    hooks: list[StepHook] = [] if watch is None else [StepBegins(watch)]
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
        # What injects faults is loaded only where a run asks for it.
        from moe_comm.train.resilience.inject import Injector

        hooks.append(Injector(config, run.state.stages, run.corpus, saver, run.ranks, run.folder.path))
    if watch is not None:
        hooks.append(StepEnds(watch))
    return hooks


def _fit(run: _Run, trainer: Trainer, saver: RunSaver) -> _End:
    """Train, save, evaluate and export, or record why the run failed and raise. Collective."""
    signals: list[int] = []
    try:
        with stop_on_signals(trainer.request_stop) as signals:
            status = trainer.fit()
            saved = save_end(trainer, saver)
            # Who asks to stop is not made to wait: what stands behind may kill ranks that take long to end.
            interrupted = status == "interrupted" or _asked_to_stop(signals, run.ranks)
            validation_loss = None if interrupted else trainer.evaluate()
            interrupted = interrupted or _asked_to_stop(signals, run.ranks)
            if not interrupted:
                export_model(saved, run.folder, run.ranks, run.progress)
    except BaseException as error:
        _record_failure(run, trainer, error, signals)
        if isinstance(error, RAISED_TOGETHER):
            run.progress.say(how_to_export(save_end(trainer, saver)))
            _close(run.state)
        raise
    return _End(status, saved, interrupted, validation_loss, signals[0] if signals else 0)


def _record_failure(run: _Run, trainer: Trainer, error: BaseException, signals: Sequence[int]) -> None:
    """Write the result of a run that ``error`` ends, and this rank's last events."""
    # A second Ctrl-C ends it at once; a rank that has not seen it yet sees its peers end.
    stopped = isinstance(error, KeyboardInterrupt)
    stopped = stopped or (signal.SIGINT in signals and isinstance(error, PeerError))
    what = f"{type(error).__name__}: {error}"
    if run.config.observe.events and not stopped:
        dump(run.folder.path, what)
    if run.ranks.is_first:
        ended: dict[str, object] = {"status": "interrupted", "signal": int(signal.SIGINT)}
        if not stopped:
            ended = {"status": "failed", "error": what}
        run.folder.save_result(ended | {"steps": trainer.next_step} | _versions())


def _result(run: _Run, trainer: Trainer, end: _End, seconds: float) -> RunResult:
    losses = [report.loss for report in trainer.reports] or [float("nan")]
    return RunResult(
        folder=run.folder.path,
        status=end.status,
        steps=trainer.next_step,
        first_loss=losses[0],
        last_loss=fmean(losses[-LAST_STEPS:]),
        validation_loss=end.validation_loss,
        unigram_entropy=run.corpus.statistics().unigram_entropy,
        seconds=seconds,
        signal=end.signal,
    )


def _report(run: _Run, result: RunResult, end: _End, more: Mapping[str, object]) -> None:
    """Write ``result`` and ``more`` to the run's folder, and print what the user is to know."""
    effective = effective_time(run.folder.path, time.time())
    told: dict[str, object] = {"mapping": str(run.state.mesh.config)}
    told |= {} if effective is None else {"effective_time": effective.as_dict()}
    run.folder.save_result(asdict(result) | told | dict(more) | _versions())
    run.progress.say(closing(result, run.corpus.statistics()))
    if effective is not None and effective.attempts > 1:
        run.progress.say(str(effective))
    if end.interrupted:
        run.progress.say(how_to_export(end.saved))


def _close(state: TrainState) -> None:
    """Give back the groups and memory that the ranks share. Collective."""
    for stage in state.stages:
        stage.close()  # type: ignore[operator]
    state.runner.close()


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": metadata.version("transformers")}
    return versions | {"moe_comm": moe_comm.__version__}


def _opening(
    config: TrainConfig, architecture: TransformerConfig, corpus: Corpus, mesh: ParallelMesh, folder: RunFolder
) -> str:
    shape = ModelShape.of(architecture)
    router = architecture.moe.router
    statistics = corpus.statistics()
    epochs = ", ".join(f"{config.run.steps * step:.2g}" for step in corpus.epochs)
    return (
        f"{config.model.family}: {shape.params / 1e6:.1f} M parameters ({shape.active / 1e6:.1f} M active), "
        f"{architecture.layers} layers, {router.num_experts} experts top-{router.top_k}\n"
        f"mapping: {mesh.config}, {mesh.config.world} rank(s), {config.parallel.sharding}\n"
        f"text {', '.join(config.data.sources)}: {statistics.train_tokens:,} tokens to train, "
        f"{statistics.validation_tokens:,} to validate, {statistics.bytes_per_token:.2f} bytes each; "
        f"{config.run.steps} steps take {epochs} epochs\n"
        f"run folder {folder.path}"
    )
