from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_comm.errors import ConfigError, MissingDependency, NonFiniteLoss, RankMismatch
from moe_comm.integrations.hugging_face import gather_state_dict
from moe_comm.train import RunResult, job, run
from moe_comm.train.config import load
from moe_comm.train.metrics import StepReport
from moe_comm.train.model import SpreadModel, build
from moe_comm.train.progress import Silent, make_progress
from moe_comm.train.sample import continue_text
from moe_comm.train.trainer import Trainer
from tests.pool import RankPool
from tests.train.common import TEXT, TINY


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_bytes(TEXT)
    return [*TINY, f"run.folder={tmp_path / 'runs'}", f"data.source={tmp_path / 'text.txt'}"]


Probed = tuple[RunResult, torch.Tensor, dict[str, torch.Tensor]]
TOKENS = torch.arange(12).view(1, 12) + 60


def _run_and_probe(rank: int, world: int, settings: list[str]) -> Probed:
    """A run, and the logits and the whole weights of the spread model when it was saved."""
    seen: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    save = SpreadModel.save

    def save_and_probe(self: SpreadModel, folder: Path) -> None:
        save(self, folder)
        with torch.no_grad():
            seen.append((self.logits(TOKENS), gather_state_dict(self.module)))

    SpreadModel.save = save_and_probe  # type: ignore[method-assign]
    try:
        return run(None, settings), *seen[0]
    finally:
        SpreadModel.save = save  # type: ignore[method-assign]


def test_a_run_leaves_a_folder_with_all_there_is_to_know(pool2: RankPool, settings: list[str]) -> None:
    (result, logits, weights), (other, _, _) = pool2.run(_run_and_probe, settings, timeout=120)
    assert (result.status, result.steps) == ("finished", 4)
    assert (other.folder, other.last_loss, other.sample) == (result.folder, result.last_loss, "")
    names = {path.name for path in result.folder.iterdir()}
    assert names == {"config.resolved.toml", "metrics.jsonl", "tensorboard", "model", "sample.txt", "result.json"}
    assert load(result.folder / "config.resolved.toml") == load(None, settings)

    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert {"loss", "balance", "lr", "grad_norm", "tokens_per_s", "imbalance"} <= lines[0].keys()
    assert all(len(line["imbalance"]) == 2 for line in lines[:4])
    assert lines[-1] == {"step": 4, "validation/loss": result.validation_loss}
    assert lines[0]["loss"] == result.first_loss

    events: Any = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [line["loss"] for line in lines[:4]]
    )
    assert {"router/imbalance_max", "train/tokens_per_s", "validation/loss"} <= set(events.Tags()["scalars"])

    ended = json.loads((result.folder / "result.json").read_text())
    assert (ended["status"], ended["ranks"], ended["ep"]) == ("finished", 2, 2)
    assert (result.folder / "sample.txt").read_text() == result.sample + "\n"

    config = load(None, settings)
    trained = build(config.model, config.data.seq_len, seed=1)
    trained.load_state_dict(weights)
    loaded: Any = AutoModelForCausalLM.from_pretrained(result.folder / "model")
    with torch.no_grad():
        again = loaded(input_ids=TOKENS).logits
        assert torch.equal(again, trained(input_ids=TOKENS).logits)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)


def test_the_resolved_configuration_runs_again_to_the_same_bits(settings: list[str]) -> None:
    first = run(None, settings)
    second = run(first.folder / "config.resolved.toml")
    assert second.folder != first.folder
    assert replace(second, folder=first.folder, seconds=first.seconds) == first


def test_a_tokenizer_of_bytes_is_saved_with_the_model(settings: list[str]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(run(None, [*settings, "run.steps=1"]).folder / "model")
    text = "na\u00efve \u2192 \U0001f600\n\ttab  two"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_only_rank_0_prints_and_ends_with_the_losses_beside_the_entropy(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(None, [*settings, "run.log_every=2"])
    out = capsys.readouterr().out
    steps = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert steps == ["1/4", "2/4", "4/4"]
    assert "tokens/s" in out and "load imbalance" in out and "left" in out
    for value in (result.first_loss, result.last_loss, result.validation_loss, result.unigram_entropy):
        assert f"{value:8.3f} nats/byte" in out
    assert result.sample in out
    assert str(result.folder) in out
    assert isinstance(make_progress(False, 1), Silent)


class _Signal:
    """Sends a signal to this process after the given step."""

    def __init__(self, kind: signal.Signals, step: int) -> None:
        self.kind, self.step = kind, step

    def __call__(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), self.kind)


def _watch(monkeypatch: pytest.MonkeyPatch, after_step: Any) -> None:
    """Call ``after_step(report)`` after every step."""
    step = Trainer.train_step

    def watched(self: Trainer, number: int) -> StepReport:
        report = step(self, number)
        after_step(report)
        return report

    monkeypatch.setattr(Trainer, "train_step", watched)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_after_a_whole_step_and_leaves_a_usable_folder(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    _watch(monkeypatch, _Signal(kind, 2))
    result = run(None, [*settings, "run.steps=1000"])
    assert (result.status, result.steps, result.validation_loss) == ("interrupted", 3, None)
    assert AutoModelForCausalLM.from_pretrained(result.folder / "model") is not None
    assert len((result.folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((result.folder / "result.json").read_text())["status"] == "interrupted"
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_one_press_that_arrives_twice_is_one(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SAME_PRESS_S", 3600.0)
    _watch(monkeypatch, lambda report: [_Signal(signal.SIGINT, 2)(report) for _ in range(2)])
    assert run(None, settings).status == "interrupted"


def _one_folder(settings: list[str]) -> Path:
    (folder,) = Path(load(None, settings).run.folder).iterdir()
    return folder


def test_a_second_ctrl_c_ends_at_once(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SAME_PRESS_S", 0.0)
    kill = _Signal(signal.SIGINT, 2)

    def twice(report: StepReport) -> None:
        kill(report)
        kill(report)

    _watch(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        run(None, settings)
    folder = _one_folder(settings)
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


def _interrupt_one_rank(rank: int, world: int, settings: list[str]) -> RunResult:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            _watch(patch, _Signal(signal.SIGINT, 2))
        return run(None, settings)


def test_ctrl_c_on_one_rank_ends_every_rank(pool2: RankPool, settings: list[str]) -> None:
    results = pool2.run(_interrupt_one_rank, [*settings, "run.steps=1000"], timeout=120)
    assert [(result.status, result.steps) for result in results] == [("interrupted", 3)] * 2
    assert (results[0].folder / "model" / "model.safetensors").exists()


def _diverge(rank: int, world: int, settings: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            loss = Trainer._loss
            patch.setattr(Trainer, "_loss", lambda self, batch: loss(self, batch) * float("nan"))
        with pytest.raises(NonFiniteLoss):
            run(None, settings)
    return type(NonFiniteLoss).__name__


def test_a_nan_loss_leaves_the_last_good_weights(pool2: RankPool, settings: list[str]) -> None:
    pool2.run(_diverge, settings, timeout=120)
    folder = _one_folder(settings)
    assert AutoModelForCausalLM.from_pretrained(folder / "model") is not None
    ended = json.loads((folder / "result.json").read_text())
    assert ended["status"] == "failed"
    assert ended["error"].startswith("NonFiniteLoss: step 1: the loss is NaN or infinite on rank 1")


def _run_with_own_seed(rank: int, world: int, settings: list[str]) -> None:
    with pytest.raises(RankMismatch, match="the configuration"):
        run(None, [*settings, f"run.seed={rank}"])


def test_ranks_with_different_configurations_are_refused(pool2: RankPool, settings: list[str]) -> None:
    pool2.run(_run_with_own_seed, settings)
    assert not Path(load(None, settings).run.folder).exists()


def _run_into(rank: int, world: int, settings: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        run(None, settings)
    return str(caught.value)


def test_a_folder_that_cannot_be_made_is_a_config_error_on_every_rank(
    pool2: RankPool, settings: list[str], tmp_path: Path
) -> None:
    messages = pool2.run(_run_into, [*settings, f"run.folder={tmp_path / 'text.txt'}"])
    assert all("run.folder: cannot write to" in message for message in messages)


def test_missing_packages_are_named_with_the_extra_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    with pytest.raises(MissingDependency, match=r"tensorboard; install with: pip install 'moe_comm\[train\]'"):
        run(None)


def test_a_sample_is_repeatable_printable_and_as_long_as_asked() -> None:
    config = load(None, list(TINY))
    model = build(config.model, config.data.seq_len, seed=0)
    # Longer than the 16 bytes the model was made for, so the context has to start anew several times.
    texts = [continue_text(model, b"The quick", 60, 1.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("The quick") for text in texts)
    assert all(character.isprintable() or character in "\n\t" for text in texts for character in text)
