"""Complete runs: files, output, stop requests and non-finite values."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_comm.cli import run as command
from moe_comm.cli.train import train_rank
from moe_comm.errors import ConfigError, MissingDependency, NonFiniteLoss, RankMismatch
from moe_comm.train import RunResult, run
from moe_comm.train.checkpoint import CheckpointReader, latest
from moe_comm.train.config import load
from moe_comm.train.loop import job
from moe_comm.train.loop.build import TrainState
from moe_comm.train.loop.export import continue_text, export_run, load_model
from moe_comm.train.loop.progress import Progress, make_progress
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import JsonlSink, StepReport
from tests.pool import RankPool

TOKENS = torch.arange(12).view(1, 12) + 60
FILES = {"config.resolved.toml", "metrics.jsonl", "tensorboard", "checkpoints", "tokenizer", "model", "result.json"}
FILES |= {"attempts.jsonl", "loads.jsonl", "ranks"}


@contextlib.contextmanager
def watched(after_step: Callable[[StepReport], None]) -> Iterator[None]:
    """Call ``after_step(report)`` after each step of all trainers."""
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer.train_step

        def watching(self: Trainer, number: int) -> StepReport:
            report = step(self, number)
            after_step(report)
            return report

        patch.setattr(Trainer, "train_step", watching)
        yield


@contextlib.contextmanager
def probed(logits: list[Any]) -> Iterator[None]:
    """Before the trained model is released, append its logits for ``TOKENS`` to ``logits``. Collective."""
    close = TrainState.close

    def probe(state: TrainState) -> None:
        (stage,) = state.stages
        model: Any = stage.eval()
        cp = state.mesh.size("cp")
        assert cp == 1
        with torch.no_grad():
            logits.append(model.logits(model(TOKENS)))
        close(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainState, "close", probe)
        yield


def _run_and_probe(rank: int, world: int, settings: list[str]) -> tuple[RunResult, torch.Tensor]:
    logits: list[torch.Tensor] = []
    with probed(logits):
        result = run(None, settings)
    return result, logits[0]


def export_as_printed(out: str, folder: Path) -> None:
    """Run the printed export command; the result loads in transformers, including the tokenizer."""
    (export_line,) = (line for line in out.splitlines() if "moe-comm export" in line)
    _, command, checkpoint, placeholder = export_line[export_line.index("moe-comm export") :].split(" ")
    assert (command, placeholder) == ("export", "OUT")
    export_run(Path(checkpoint), folder / "OUT")
    assert AutoModelForCausalLM.from_pretrained(folder / "OUT") is not None
    assert AutoTokenizer.from_pretrained(folder / "OUT") is not None


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_a_complete_folder(pool2: RankPool, settings: list[str]) -> None:
    settings = [*settings, "parallel.tp=2", "run.eval_every=2", "run.sample_tokens=24", "model.capacity=1.0"]
    (result, _), (other, _) = pool2.run(_run_and_probe, settings, timeout=120)
    assert (result.status, result.steps) == ("finished", 4)
    assert (other.folder, other.last_loss, other.sample) == (result.folder, result.last_loss, "")
    assert {path.name for path in result.folder.iterdir()} == FILES | {"sample.txt"}
    assert load(result.folder / "config.resolved.toml") == load(None, settings)

    lines = lines_of(result.folder)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["loss"] == result.first_loss
    for line in steps:
        assert line["grad_norm"] > 0 and line["lr"] > 0 and line["tokens_per_s"] > 0 and 0 < line["mfu"] < 2
        assert line["tokens"] == 8 * 16 and line["memory_bytes"] > 2**20
        times = line["times"]
        parts = [times[key] for key in ("compute", "communication", "data", "checkpoint")]
        assert sum(parts) + line["loop_s"] == pytest.approx(times["total"])
        assert times["communication"] > 0
        loads = line["load"]
        assert {len(values) for values in loads.values()} == {2}, "one number for each layer"
        assert all(1 <= value <= 4 for value in loads["imbalance"])
        assert all(0 < value < 1 for value in loads["dropped"])
    summaries = [line for line in lines if "loss" not in line]
    assert summaries[-1]["validation/loss"] == result.validation_loss
    assert summaries[-1]["validation/perplexity"] == pytest.approx(math.exp(summaries[-1]["validation/loss"]))

    events: Any = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([line["loss"] for line in steps])
    tags = {"train/grad_norm", "train/tokens_per_s", "train/mfu", "time/compute", "time/communication", "time/data"}
    tags |= {"time/checkpoint", "router/imbalance_max", "router/dead_experts", "router/dropped_layer_1"}
    assert tags | {"memory/gib", "validation/loss"} <= set(events.Tags()["scalars"])

    written_result = json.loads((result.folder / "result.json").read_text())
    assert (written_result["status"], written_result["mapping"]) == ("finished", "tp 2, ep 2")
    assert (result.folder / "sample.txt").read_text() == result.sample + "\n"


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "deepseek_v3"])
def test_the_saved_model_gives_the_logits_of_the_trained_one(
    pool2: RankPool, settings: list[str], tmp_path: Path, family: str
) -> None:
    settings = [*settings, f"model.family={family}", "model.tie=true", "model.kv_heads=4"]
    if family == "deepseek_v3":
        settings += ["model.first_dense=1", "model.dense_ffn=24", "model.shared_ffn=24", "model.bias_rate=0.1"]
        settings += ["model.expert_groups=2", "model.route_scale=1.5", "parallel.tp=2"]
    (result, logits), _ = pool2.run(_run_and_probe, settings, timeout=120)
    loaded: Any = AutoModelForCausalLM.from_pretrained(result.folder / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-5)
    assert loaded.config.model_type == family
    export_run(result.folder, tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), loaded.parameters(), strict=True))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        result.folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_training_starts_from_a_pretrained_model(settings: list[str]) -> None:
    first = run(None, settings)
    start = [f"model.pretrained={first.folder / 'model'}", "run.steps=1", "optimizer.warmup=0"]
    second = run(None, [*settings, *start])
    assert first.validation_loss is not None
    assert second.first_loss < first.first_loss - 0.1
    assert (first.first_step, second.first_step) == (1, 1)
    assert (second.folder / "model" / "model.safetensors").exists()


def test_the_resolved_configuration_runs_again_to_the_same_bits(settings: list[str]) -> None:
    first = run(None, settings)
    second = run(first.folder / "config.resolved.toml")
    assert second.folder != first.folder
    assert replace(second, folder=first.folder, seconds=first.seconds) == first


def test_a_tokenizer_of_bytes_is_saved_with_the_model(settings: list[str]) -> None:
    folder = run(None, [*settings, "run.steps=1"]).folder
    for part in ("model", "tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / part)
        text = "na\u00efve \u2192 \U0001f600\n\ttab  two"
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_only_rank_0_prints_and_ends_with_losses_and_entropy(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(None, [*settings, "run.log_every=2", "run.sample_tokens=24"])
    out = capsys.readouterr().out
    assert "4 steps take 0.021 epochs" in out, "4 steps of 8 x 16 of the text's 23,965 tokens"
    assert "0.0 M parameters" in out and "4 experts top-2" in out and "1 rank(s)" in out
    steps = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert steps == ["1/4", "2/4", "4/4"]
    assert all(word in out for word in ("tokens/s", "load imbalance", "MFU", " left"))
    for value in (result.first_loss, result.last_loss, result.validation_loss, result.unigram_entropy):
        assert f"{value:8.3f} nats/token" in out
    assert result.sample in out
    assert str(result.folder) in out
    assert type(make_progress(False, 1)) is Progress


def test_a_model_without_a_family_is_trained_and_only_checkpointed(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(None, [*settings, "run.steps=1", "run.sample_tokens=9", "model.parallel_block=true"])
    assert (result.status, result.sample) == ("finished", "")
    assert {path.name for path in result.folder.iterdir()} == FILES - {"model"}
    assert latest(result.folder / "checkpoints") is not None
    assert (
        "the model was not exported; use the checkpoints: no Hugging Face family has parallel blocks"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("family", "advice"), [("qwen3_moe", "model.aux_loss (now 0.01), lower"), ("deepseek_v3", "bias_rate")]
)
def test_a_collapsed_router_gets_one_hint(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, advice: str
) -> None:
    """All tokens of a one-letter text are equal, and are routed to the same experts."""
    (tmp_path / "same.txt").write_text("a" * 40_000)
    same = [f"data.source={tmp_path / 'same.txt'}", f"model.family={family}", "run.steps=45", "model.bias_rate=0"]
    result = run(None, [*settings, *same])
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: ")]
    assert len(hints) == 1 and advice in hints[0] and "(4 / 2 = 2.00)" in hints[0], hints
    assert json.loads((result.folder / "result.json").read_text())["hint"] == hints[0]


def test_an_even_router_gets_no_hint(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    result = run(None, [*settings, "run.steps=25"])
    assert "hint: " not in capsys.readouterr().out
    assert "hint" not in json.loads((result.folder / "result.json").read_text())


def _signal_at(kind: signal.Signals, step: int) -> Callable[[StepReport], None]:
    """Send a signal to this thread after the given step; two signals to the process could be merged."""

    def send(report: StepReport) -> None:
        if report.step == step:
            signal.raise_signal(kind)

    return send


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_a_complete_step_with_a_checkpoint_and_an_export_hint(
    settings: list[str], kind: signal.Signals, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with watched(_signal_at(kind, 2)):
        result = run(None, [*settings, "run.steps=1000"])
    assert (result.status, result.steps, result.validation_loss) == ("interrupted", 3, None)
    assert result.signal == kind
    assert {path.name for path in result.folder.iterdir()} == FILES - {"model"}, "no export: a launcher would kill it"
    assert [line["step"] for line in lines_of(result.folder)] == [1, 2, 3]
    assert json.loads((result.folder / "result.json").read_text())["status"] == "interrupted"
    saved = latest(result.folder / "checkpoints")
    assert saved is not None and CheckpointReader(saved).step == 3
    export_as_printed(capsys.readouterr().out, tmp_path)
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_command_with_a_single_rank_distinguishes_ctrl_c_from_sigterm(
    settings: list[str], kind: signal.Signals, code: int
) -> None:
    with watched(_signal_at(kind, 1)):
        assert command(["train", "tiny", "--ranks", "1", *settings]) == code
    assert json.loads((_one_folder(settings) / "result.json").read_text())["status"] == "interrupted"


def test_one_ctrl_c_that_arrives_twice_counts_once(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SAME_SIGNAL_S", 3600.0)
    send = _signal_at(signal.SIGINT, 2)
    with watched(lambda report: [send(report) for _ in range(2)] and None):
        assert run(None, settings).status == "interrupted"


def _one_folder(settings: list[str]) -> Path:
    (folder,) = Path(load(None, settings).run.folder).iterdir()
    return folder


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enable Ctrl-C as in a terminal: shells start background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_at_once(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SAME_SIGNAL_S", 0.0)
    send = _signal_at(signal.SIGINT, 2)
    with watched(lambda report: [send(report) for _ in range(2)] and None), pytest.raises(KeyboardInterrupt):
        run(None, settings)
    folder = _one_folder(settings)
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["signal"], "error" in result) == ("interrupted", signal.SIGINT, False)
    assert not (folder / "dumps").exists() and not (folder / "faults.jsonl").exists(), "an interrupt is not a fault"
    assert [line["step"] for line in lines_of(folder)] == [1]


def _interrupt_one_rank(rank: int, world: int, settings: list[str]) -> RunResult:
    with watched(_signal_at(signal.SIGINT, 2) if rank == 1 else lambda report: None):
        return run(None, settings)


def test_ctrl_c_on_one_rank_ends_all_ranks(pool2: RankPool, settings: list[str]) -> None:
    results = pool2.run(_interrupt_one_rank, [*settings, "run.steps=1000"], timeout=120)
    assert [(result.status, result.steps, result.signal) for result in results] == [
        ("interrupted", 3, 0),
        ("interrupted", 3, signal.SIGINT),
    ]


def _diverge(rank: int, world: int, settings: list[str]) -> str:
    """Return the output of the rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        from moe_comm.train.pipeline.runner import Accumulation

        step = Accumulation.step
        calls = []

        def diverging(self: Any, batches: Any, scale: Any = 1.0) -> torch.Tensor:
            calls.append(1)
            losses = step(self, batches, scale)
            return losses * math.nan if rank == 1 and len(calls) == 3 else losses

        patch.setattr(Accumulation, "step", diverging)
        with pytest.raises(NonFiniteLoss):
            run(None, settings)
    return printed.getvalue()


def test_a_nan_loss_leaves_a_checkpoint_of_the_last_good_weights(
    pool2: RankPool, settings: list[str], tmp_path: Path
) -> None:
    printed, other_printed = pool2.run(_diverge, settings, timeout=120)
    assert other_printed == ""
    export_as_printed(printed, tmp_path)
    folder = _one_folder(settings)
    assert not (folder / "model").exists()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert re.match("NonFiniteLoss: step 3: the loss .* NaN or infinite on rank 1", result["error"])
    saved = latest(folder / "checkpoints")
    assert saved is not None and CheckpointReader(saved).step == 2
    weights = [CheckpointReader(saved).read(name) for name in CheckpointReader(saved).names]
    assert all(bool(weight.isfinite().all()) for weight in weights)


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


def test_an_invalid_folder_or_text_is_a_config_error_on_every_rank(
    pool2: RankPool, settings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    messages = pool2.run(_run_into, [*settings, f"run.folder={tmp_path / 'file'}"])
    assert all("run.folder: cannot write to" in message for message in messages)
    messages = pool2.run(_run_into, [*settings, f"data.source={tmp_path / 'nowhere.txt'}"])
    assert all("nowhere.txt" in message for message in messages)


@pytest.mark.parametrize("start", [run, train_rank])
def test_missing_packages_are_named_with_their_extra(
    start: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    with pytest.raises(MissingDependency, match=r"tensorboard; install with: pip install '\.\[train\]'"):
        start(None)


def test_a_sample_is_reproducible_and_has_the_requested_length(settings: list[str]) -> None:
    model: Any = load_model(run(None, [*settings, "run.steps=1"]).folder / "model")
    end = model.config.eos_token_id
    # Longer than the maximum length of 16 tokens, so the context is truncated several times.
    prompt = list(b"The quick")
    texts = [continue_text(model, prompt, 60, 1.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    for text in texts:
        assert text[: len(prompt)] == prompt
        assert end not in text and len(text) <= len(prompt) + 60
    assert max(len(text) for text in texts) > 20


def test_lines_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "validation/loss": 1.0}\n{"step": 3}\n{"st')
    sink = JsonlSink(path, done=2)
    sink.summary(3, {"again": 1.0})
    sink.close()
    assert lines_of(tmp_path) == [
        {"step": 1},
        {"step": 2},
        {"step": 2, "validation/loss": 1.0},
        {"step": 3, "again": 1.0},
    ]
