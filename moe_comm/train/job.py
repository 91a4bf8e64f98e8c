"""One whole run: configuration, folder, training, evaluation, saved model, sample, and what is printed at the end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean
from types import FrameType

import torch

from moe_comm.errors import NonFiniteLoss
from moe_comm.train import config as configuration
from moe_comm.train import data, sample
from moe_comm.train import model as models
from moe_comm.train.config import TrainConfig
from moe_comm.train.folder import RunFolder
from moe_comm.train.metrics import JsonlSink, MetricsSink, TensorBoardSink
from moe_comm.train.progress import Progress, make_progress
from moe_comm.train.ranks import Ranks, digest
from moe_comm.train.result import LAST_STEPS, RunResult
from moe_comm.train.trainer import Trainer

SAME_PRESS_S = 1.0


def run_config(config_path: str | Path | None, overrides: Sequence[str] = ()) -> RunResult:
    """See ``moe_comm.train.run``."""
    config = configuration.load(config_path, overrides)
    text = data.read_text(config.data.source)
    corpus = data.Corpus(text, config.data, config.run.seed)
    ranks = Ranks.make(config.parallel.ep)
    settings = torch.frombuffer(bytearray(configuration.dump(config).encode() + text), dtype=torch.uint8)
    ranks.check_equal("the configuration or the text", digest([settings]), "start all with the same file and overrides")
    torch.manual_seed(config.run.seed)
    whole = models.build(config.model, config.data.seq_len, config.run.seed)
    ranks.check_equal("the initial weights", digest(whole.parameters()), "use one version of torch and transformers")
    folder = RunFolder.make(config, ranks)
    progress = make_progress(ranks.is_first, config.run.log_every)
    progress.say(_opening(config, corpus, ranks, sum(p.numel() for p in whole.parameters()), folder))
    return _train(config, models.spread(whole, ranks, config.parallel), corpus, ranks, folder, progress)


def _train(
    config: TrainConfig,
    model: models.SpreadModel,
    corpus: data.Corpus,
    ranks: Ranks,
    folder: RunFolder,
    progress: Progress,
) -> RunResult:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        sinks: list[MetricsSink] = []
        if ranks.is_first:
            sinks = [JsonlSink(folder.path / "metrics.jsonl"), TensorBoardSink(folder.path / "tensorboard")]
        for sink in sinks:
            stack.callback(sink.close)
        trainer = Trainer(config, model, corpus, ranks, sinks, progress)
        try:
            with _stop_on_signals(trainer):
                status = trainer.fit()
                trainer.check_replicas()
                folder.save_model(model, ranks)
                interrupted = status == "interrupted"  # who asked to stop is not made to wait
                validation_loss = None if interrupted else trainer.evaluate()
        except BaseException as error:
            if ranks.is_first:
                ended = {"status": "failed", "error": f"{type(error).__name__}: {error}", "steps": len(trainer.reports)}
                folder.save_result(ended | _versions(ranks))
            if isinstance(error, NonFiniteLoss):  # raised by all ranks together: they can still gather the experts
                folder.save_model(model, ranks)
            raise
        model.close()
        losses = [report.loss for report in trainer.reports]
        result = RunResult(
            folder=folder.path,
            status=status,
            steps=len(losses),
            first_loss=losses[0],
            last_loss=fmean(losses[-LAST_STEPS:]),
            validation_loss=validation_loss,
            unigram_entropy=corpus.entropy,
            seconds=time.monotonic() - began,
        )
        if ranks.is_first:
            if not interrupted:
                result = replace(result, sample=_sample(config, corpus, folder))
            folder.save_result(asdict(result) | _versions(ranks))
            progress.say(_closing(result))
        return result


def _sample(config: TrainConfig, corpus: data.Corpus, folder: RunFolder) -> str:
    """Load the saved model as anyone would, and draw a text from it."""
    if not config.run.sample_bytes:
        return ""
    model = models.load(folder.model)
    text = sample.continue_text(
        model, corpus.prompt(32), config.run.sample_bytes, config.run.temperature, config.run.seed
    )
    folder.save_sample(text)
    return text


@contextlib.contextmanager
def _stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM end training after the step in progress, on all ranks together; a second one ends it at once.

    A rank that left in the middle of a step would leave its peers waiting, and the weights half updated. A terminal
    and a launcher may both pass on one press, so signals right after the first are taken for the same one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    presses: list[float] = []

    def stop(kind: int, frame: FrameType | None) -> None:
        presses.append(time.monotonic())
        trainer.request_stop()
        if len(presses) > 1 and presses[-1] - presses[0] >= SAME_PRESS_S:
            signal.signal(kind, before[signal.Signals(kind)])
            signal.raise_signal(kind)

    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


def _versions(ranks: Ranks) -> dict[str, object]:
    try:
        installed = metadata.version("moe_comm")
    except metadata.PackageNotFoundError:  # run from a source tree
        installed = "unknown"
    return {
        "ranks": ranks.world,
        "ep": ranks.ep,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "moe_comm": installed,
    }


def _opening(config: TrainConfig, corpus: data.Corpus, ranks: Ranks, num_params: int, folder: RunFolder) -> str:
    model = config.model
    return (
        f"{model.family}: {num_params / 1e6:.1f} M parameters, {model.layers} layers, "
        f"{model.experts} experts top-{model.top_k}, over {ranks.world} rank(s), {ranks.ep} per set of experts\n"
        f"text {config.data.source}: {corpus.train_bytes:,} bytes to train, {corpus.validation_bytes:,} to validate\n"
        f"run folder {folder.path}"
    )


def _closing(result: RunResult) -> str:
    rows = [
        ("loss, first step", result.first_loss),
        (f"loss, last {min(LAST_STEPS, result.steps)} steps", result.last_loss),
        *([] if result.validation_loss is None else [("loss, validation text", result.validation_loss)]),
        ("unigram entropy of the text", result.unigram_entropy),
    ]
    table = "\n".join(f"  {name:<30}{value:8.3f} nats/byte" for name, value in rows)
    drawn = f"sample:\n{result.sample}\n\n" if result.sample else ""
    return (
        f"\n{drawn}{result.status} after {result.steps} steps, {result.seconds:.0f} s\n{table}\n"
        f"run folder {result.folder}"
    )
