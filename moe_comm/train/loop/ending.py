"""End of a run: last checkpoint, exported model, text sample and summary."""

from __future__ import annotations

import shlex
from pathlib import Path

from moe_comm.errors import MoeCommError, UnsupportedModel
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus, Statistics
from moe_comm.train.loop.progress import Progress
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.loop.saver import RunSaver
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.ranks import Ranks
from moe_comm.train.result import LAST_STEPS, RunResult


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
    from moe_comm.train.loop import sample

    model = sample.load_model(folder.model)
    ids = sample.continue_text(
        model, corpus.prompt(32), config.run.sample_tokens, config.run.temperature, config.run.seed
    )
    text = sample.shown(corpus.tokenizer().decode(ids))
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
