"""One whole run: configuration, text, model, folder, training, evaluation, saved model, sample, what is printed."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

import moe_comm
from moe_comm.errors import CorruptPayload, MoeCommError, NonFiniteLoss, PeerError, UnsettledStep, UnsupportedModel
from moe_comm.layers.config import TransformerConfig
from moe_comm.observe.effective import effective_time
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import FAULTS, LOADS, METRICS, FaultRecord, append
from moe_comm.plan.model.shape import ModelShape
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.runtime.persistent_memory import KeptMemory
from moe_comm.topology import FoldedMesh
from moe_comm.train import config as configuration
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, Statistics, prepare_all
from moe_comm.train.hooks import StepHook
from moe_comm.train.loop.build import DTYPES, architecture_of, build
from moe_comm.train.loop.collapse import CollapseHint
from moe_comm.train.loop.feed import CorpusFeed, corpus_settings
from moe_comm.train.loop.nonblocking_sink import PatientSink
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


def run_config(config_path: str | Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """See ``moe_comm.train.run``."""
    config = configuration.load(config_path, overrides)
    ranks = Ranks.make()
    settings = torch.frombuffer(bytearray(configuration.dump(config).encode()), dtype=torch.uint8)
    ranks.check_equal("the configuration", digest([settings]), "start all with the same file and overrides")
    mesh = FoldedMesh(config.parallel.mapping(ranks.world), device_of_run())
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    machinery = build(config, architecture, mesh, peak_flops(config, mesh, ranks))
    progress = make_progress(ranks.is_first, config.run.log_every)
    kept = open_kept(ranks, progress.say) if config.checkpoint.peer_every else None
    folder = RunFolder.make(config, ranks, kept_runs(kept, ranks) if config.checkpoint.peer_every else ())
    progress.say(_opening(config, architecture, corpus, mesh, folder))
    return _train(config, machinery, corpus, ranks, folder, progress, kept)


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


def peak_flops(config: TrainConfig, mesh: FoldedMesh, ranks: Ranks) -> float:
    """FLOP/s of a plain matrix product in the model's dtype, of all ranks together and at once. Collective."""
    ranks.barrier()
    return float(ranks.sum(torch.tensor([gemm_flops(DTYPES[config.model.dtype], mesh.device)], dtype=torch.float64)))


def _train(
    config: TrainConfig,
    machinery: TrainState,
    corpus: Corpus,
    ranks: Ranks,
    folder: RunFolder,
    progress: Progress,
    kept: KeptMemory | None,
) -> RunResult:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(handler_put_back(signal.SIGTERM))
        sinks: list[MetricsSink] = []
        EVENTS.enabled = config.observe.events
        watch = watch_run(config, ranks, folder.path, progress.say)
        if watch is not None:
            stack.enter_context(watch)
        saver = RunSaver(folder.checkpoints, config, machinery, corpus, _versions())
        stack.push(saver.leave)
        if kept is not None:
            stack.callback(kept.close)
            every, timeout_s = config.checkpoint.peer_every, max(60.0, config.parallel.timeout_s)
            saver.memory = PeerMemory(
                kept, ranks, machinery.mesh, folder.path, every, saver.capture, timeout_s=timeout_s
            )
            stack.callback(saver.memory.close)
        passed_over: list[FaultRecord] = []
        first_step, source = 0, "fresh"
        if folder.note:
            progress.say(folder.note)
        if folder.checkpoint is not None:
            first_step, source = saver.resume(folder.checkpoint), "checkpoint"
            progress.say(f"goes on after step {first_step} from {folder.checkpoint}")
        elif config.checkpoint.resume != "no":
            first_step, source = go_on(saver, folder.checkpoints, ranks, progress.say, passed_over.append)
        hosts = ranks.texts(socket.gethostname())
        attempts = None
        if ranks.is_first:
            begins_again = config.checkpoint.resume == "auto" and source == "fresh"
            earlier = carry_over(folder.path, config.run.name) if begins_again else None
            attempts = AttemptLog(folder.path, machinery.mesh, first_step, source, hosts, earlier)
            if first_step:
                folder.forget_result()

        def noticed(record: FaultRecord) -> None:
            if attempts is not None:
                append(folder.path / FAULTS, replace(record, attempt=attempts.attempt.number))

        if ranks.is_first:
            corpus.save_tokenizer(folder.tokenizer)
            series, every = config.observe.series, config.observe.every
            made: dict[str, MetricsSink] = {
                METRICS: JsonlSink(folder.path / METRICS, first_step, series),
                "tensorboard": TensorBoardSink(folder.path / "tensorboard", first_step, series),
            }
            if every:
                made[LOADS] = LoadsSink(folder.path / LOADS, every, first_step)
            sinks += [PatientSink(sink, name, progress.say, noticed) for name, sink in made.items()]
        for sink in sinks:
            stack.callback(sink.close)
        feed = CorpusFeed(corpus, machinery.mesh, config.parallel.context, config.data.micro_batches, config.run.steps)
        stack.enter_context(feed)
        hooks: list[StepHook] = [] if watch is None else [StepBegins(watch)]
        if config.observe.events:
            hooks.append(Recording(folder.path, ranks, config.observe, first_step, machinery.mesh.device))
        if saver.memory is not None:
            hooks.append(saver.memory)
        if attempts is not None:
            hooks.append(attempts)
        hint = CollapseHint(config, machinery.num_experts, machinery.top_k, progress.say)
        hooks.append(hint)
        if config.run.gc_every:
            hooks.append(PlannedCollections(config.run.gc_every))
        if config.faults.plan:
            from moe_comm.train.resilience.inject import Injector  # what does harm is not even loaded otherwise

            hooks.append(Injector(config, machinery.stages, corpus, saver, ranks, folder.path))
        if watch is not None:
            hooks.append(StepEnds(watch))

        for record in passed_over:
            noticed(record)
        trainer = Trainer(
            config,
            machinery,
            feed,
            ranks,
            saver=saver,
            sinks=sinks,
            hooks=hooks,
            progress=progress,
            on_fault=noticed,
            first_step=first_step,
        )
        for hook in hooks:
            stack.callback(hook.close)
        if watch is not None:
            stack.push(watch)  # leaves first too: the others are not to wait for what ends a rank that has failed
        signals: list[int] = []
        try:
            with stop_on_signals(trainer.request_stop) as signals:
                status = trainer.fit()
                saved = _save_end(trainer, saver)
                # Who asks to stop is not made to wait: what stands behind may kill ranks that take long to end.
                interrupted = status == "interrupted" or _asked_to_stop(signals, ranks)
                validation_loss = None if interrupted else trainer.evaluate()
                interrupted = interrupted or _asked_to_stop(signals, ranks)
                if not interrupted:
                    _export(saved, folder, ranks, progress)
        except BaseException as error:
            # A second Ctrl-C ends it at once; a rank that has not seen it yet sees its peers end.
            stopped = isinstance(error, KeyboardInterrupt)
            stopped = stopped or (signal.SIGINT in signals and isinstance(error, PeerError))
            if config.observe.events and not stopped:
                dump(folder.path, f"{type(error).__name__}: {error}")
            if ranks.is_first:
                ended: dict[str, object] = {"status": "interrupted", "signal": int(signal.SIGINT)}
                if not stopped:
                    ended = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                folder.save_result(ended | {"steps": trainer.next_step} | _versions())
            if isinstance(error, RAISED_TOGETHER):
                progress.say(_how_to_export(_save_end(trainer, saver)))
                _close(machinery)
            raise
        _close(machinery)
        losses = [report.loss for report in trainer.reports] or [float("nan")]
        statistics = corpus.statistics()
        result = RunResult(
            folder=folder.path,
            status=status,
            steps=trainer.next_step,
            first_loss=losses[0],
            last_loss=fmean(losses[-LAST_STEPS:]),
            validation_loss=validation_loss,
            unigram_entropy=statistics.unigram_entropy,
            seconds=time.monotonic() - began,
            signal=signals[0] if signals else 0,
        )
        if ranks.is_first:
            if not interrupted:
                result = replace(result, sample=_sample(config, corpus, folder))
            effective = effective_time(folder.path, time.time())
            told: dict[str, object] = {"mapping": str(machinery.mesh.config)}
            told |= {} if effective is None else {"effective_time": effective.as_dict()}
            told |= {"hint": hint.text} if hint.text else {}
            told |= {} if saver.memory is None else {"peer_memory": saver.memory.summary()}
            folder.save_result(asdict(result) | told | _versions())
            progress.say(_closing(result, statistics))
            if effective is not None and effective.attempts > 1:
                progress.say(str(effective))
            if interrupted:
                progress.say(_how_to_export(saved))
        if saver.memory is not None:
            saver.memory.finish()
        return result


def _close(machinery: TrainState) -> None:
    """Give back the groups and memory that the ranks share. Collective."""
    for stage in machinery.stages:
        stage.close()  # type: ignore[operator]
    machinery.runner.close()


def _save_end(trainer: Trainer, saver: RunSaver) -> Path:
    """The run's last checkpoint, on the disk; made here unless the loop has just made it. Collective."""
    latest = saver.latest()
    if latest is None or latest.name != f"step-{trainer.next_step:08d}":
        saver.save(trainer.next_step)
        saver.finish()
        latest = saver.latest()
    assert latest is not None, "a save that did not fail left a checkpoint"
    return latest


def _export(checkpoint: Path, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
    """From ``checkpoint`` the model for others to load, however long that takes. Collective.

    A model that no Hugging Face family has is in the checkpoint alone.
    """

    def export() -> str:
        # It loads transformers, which takes a second that other ranks need not spend.
        from moe_comm.train.loop.export import export_checkpoint

        try:
            folder.save_model(lambda fresh: export_checkpoint(checkpoint, fresh))
        except UnsupportedModel as error:
            progress.say(f"no model folder, only checkpoints: {error}")
        except MoeCommError as error:
            return str(error)
        return ""

    if fault := ranks.while_first(export):
        raise MoeCommError(f"the model could not be written: {fault}")


def _how_to_export(checkpoint: Path) -> str:
    return f"saved {checkpoint}; as a Hugging Face folder: moe-comm export {shlex.quote(str(checkpoint))} OUT"


def _sample(config: TrainConfig, corpus: Corpus, folder: RunFolder) -> str:
    """Load the saved model as anyone would, and draw a text from it; "" where there is none."""
    if not config.run.sample_tokens or not folder.model.exists():
        return ""
    from moe_comm.train.loop import sample

    model = sample.load_model(folder.model)
    ids = sample.continue_text(
        model, corpus.prompt(32), config.run.sample_tokens, config.run.temperature, config.run.seed
    )
    text = sample.shown(corpus.tokenizer().decode(ids))
    folder.save_sample(text)
    return text


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": metadata.version("transformers")}
    return versions | {"moe_comm": moe_comm.__version__}


def _opening(
    config: TrainConfig, architecture: TransformerConfig, corpus: Corpus, mesh: FoldedMesh, folder: RunFolder
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


def _closing(result: RunResult, statistics: Statistics) -> str:
    rows = [
        ("loss, first step", result.first_loss),
        (f"loss, last {min(LAST_STEPS, result.steps)} steps", result.last_loss),
        *([] if result.validation_loss is None else [("loss, validation text", result.validation_loss)]),
        ("unigram entropy of the text", result.unigram_entropy),
    ]
    table = "\n".join(
        f"  {name:<30}{value:8.3f} nats/token{value / statistics.bytes_per_token:8.3f} nats/byte"
        for name, value in rows
    )
    drawn = f"sample:\n{result.sample}\n\n" if result.sample else ""
    return (
        f"\n{drawn}{result.status} after {result.steps} steps, {result.seconds:.0f} s\n{table}\n"
        f"run folder {result.folder}"
    )
