"""How a run ends: its last checkpoint, the exported model, a sample of text, and what is printed."""

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


def save_end(trainer: Trainer, saver: RunSaver) -> Path:
    """The run's last checkpoint, on the disk; made here unless the loop has just made it. Collective."""
    latest = saver.latest()
    if latest is None or latest.name != f"step-{trainer.next_step:08d}":
        saver.save(trainer.next_step)
        saver.finish()
        latest = saver.latest()
    assert latest is not None, "a save that did not fail left a checkpoint"
    return latest


def export_model(checkpoint: Path, folder: RunFolder, ranks: Ranks, progress: Progress) -> None:
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


def how_to_export(checkpoint: Path) -> str:
    return f"saved {checkpoint}; as a Hugging Face folder: moe-comm export {shlex.quote(str(checkpoint))} OUT"


def draw_sample(config: TrainConfig, corpus: Corpus, folder: RunFolder) -> str:
    """Load the saved model as anyone would, and draw a text from it; "" where there is none."""
    if not config.run.sample_tokens or not folder.model.exists():
        return ""
    # It loads transformers, as above.
    from moe_comm.train.loop import sample

    model = sample.load_model(folder.model)
    ids = sample.continue_text(
        model, corpus.prompt(32), config.run.sample_tokens, config.run.temperature, config.run.seed
    )
    text = sample.shown(corpus.tokenizer().decode(ids))
    folder.save_sample(text)
    return text


def closing(result: RunResult, statistics: Statistics) -> str:
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
