"""``moe-comm plan``: terminal output, JSON output, and errors."""

from __future__ import annotations

import io
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moe_comm import cli
from moe_comm.observe.records import LOADS, LoadLine, append
from moe_plan.model.load import DROPLESS

OPTIONS = {
    "--model": "mixtral-8x22b",
    "--gpus": "128",
    "--hardware": "h100",
    "--seq-len": "4096",
    "--global-batch": "256",
}
MAPPING = {"--mapping": "tp=2,cp=1,pp=8,vpp=1,ep=8,etp=1"}
KEYS = {"mapping", "step_s", "tokens_per_s", "mfu", "memory_gb", "bytes", "breakdown", "fits", "would_fit"}


def command_line(*flags: str, **changed: str | None) -> list[str]:
    """Return the command with the options of ``OPTIONS`` and changed ones. _ stands for -, None removes an option."""
    options: dict[str, str | None] = {
        **OPTIONS,
        **{"--" + name.replace("_", "-"): one for name, one in changed.items()},
    }
    return ["plan", *(word for name, one in options.items() if one is not None for word in (name, one)), *flags]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("moe-comm: error: "), lines
    assert not captured.out
    return lines[0].removeprefix("moe-comm: error: ")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, **changed: str | None) -> dict[str, Any]:
    """Return the JSON object on standard output, which must contain nothing else."""
    assert cli.run(command_line("--json", "-", *arguments, **changed)) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "mixtral-8x23b"}, "did you mean 'mixtral-8x22b'?"),
        ({"model": "no/such/config.json"}, "no/such/config.json"),
        ({"hardware": "h1000"}, "unknown hardware 'h1000'"),
        ({"hardware": "no/such.json"}, "no/such.json"),
        ({"gpus": "100", "mapping": "tp=2,pp=8,ep=8"}, "100 ranks"),
        ({"gpus": "0"}, "--gpus"),
        ({"gpus": "1000000000000000000000"}, "--gpus"),
        ({"global_batch": "4", "mapping": "tp=2,pp=8,ep=8"}, "a batch of 4 sequences cannot be divided"),
        ({"global_batch": "8", "mapping": "tp=2,pp=8,ep=8"}, "needs at least 8 micro-batches"),
        ({"mapping": "tp=2,xp=8"}, "xp=8"),
        ({"mapping": "ep=16"}, "ep exceeds the number of experts"),
        ({"mapping": "tp=32"}, "heads are not divisible"),
        ({"mapping": "tp=2", "dispatcher": "all_gather"}, "every rank has all experts"),
        ({"dispatcher": "nccl"}, "--dispatcher"),
        ({"mapping": "tp=2,ep=8", "top": "5"}, "--top applies to a search"),
        ({"mapping": "tp=2,ep=8", "slow": "3"}, "RANK=FACTOR"),
        ({"mapping": "tp=2,ep=8", "slow": "128=2"}, "from 0 to 127"),
        ({"ranks": "2"}, "--ranks applies to --calibrate"),
        ({"seq_len": "0"}, "--seq-len"),
        ({"capacity_factor": "nan"}, "--capacity-factor"),
        ({"imbalance": "inf"}, "--imbalance"),
        ({"offload_rate": "2"}, "--offload-rate needs --offload-budget, --offload-activations or --offload-weights"),
        ({"offload_activations": "x"}, "--offload-activations: "),
        ({"offload_budget": "4GB"}, "--offload-budget: budget must be"),
        ({"offload_budget": "4GiB", "offload_rate": "0"}, "--offload-rate must be a finite number"),
        ({"hardware": "a100", "dtype": "fp8", "mapping": "tp=2,ep=8"}, "does not support products in 'fp8'"),
        ({"dtype": "int8"}, "--dtype"),
        ({"overlap": "some"}, "--overlap"),
        ({"model": None}, "missing option --model"),
        ({"gpus": None}, "missing option --gpus"),
        ({"hardware": None}, "missing option --hardware"),
        ({"seq_len": None}, "missing option --seq-len"),
        ({"global_batch": None}, "missing option --global-batch"),
        ({"hardware_file": "mine.json"}, "--hardware-file applies to this-machine"),
        ({"json": "/"}, "Is a directory"),
    ],
    ids=str,
)
def test_an_invalid_request_is_one_line_and_exit_code_2(
    changed: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(command_line(**changed)) == 2
    assert message in error_line(capsys)


HUGGING_FACE = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 257,
}
SECTION = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "experts": 4, "top_k": 2, "vocab": 257}


@pytest.mark.parametrize(
    ("model", "files", "name"),
    [
        ("olmoe-1b-7b", {}, "olmoe-1b-7b"),
        ("OLMoE-1B-7B", {}, "olmoe-1b-7b"),
        ("tiny", {}, "tiny"),
        ("small", {}, "small"),
        ("my.toml", {"my.toml": "".join(["[model]\n", *(f"{key} = {one}\n" for key, one in SECTION.items())])}, "my"),
        ("my.json", {"my.json": json.dumps({"model": SECTION})}, "my"),
        ("mine", {"mine/config.json": json.dumps(HUGGING_FACE)}, "mine"),
        ("mine/config.json", {"mine/config.json": json.dumps(HUGGING_FACE)}, "mine"),
        ("other.json", {"other.json": json.dumps(HUGGING_FACE)}, "other"),
        ("tiny", {"tiny/config.json": json.dumps(HUGGING_FACE)}, "tiny"),
    ],
    ids=["name", "upper case", "tiny", "small", "toml", "json", "folder", "config.json", "any name", "preset first"],
)
def test_each_kind_of_model_is_accepted(
    model: str,
    files: dict[str, str],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    monkeypatch.chdir(tmp_path)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    shown = run_json(capsys, model=model, gpus="2", global_batch="8", seq_len="64", mapping="ep=2")["model"]
    assert shown["name"] == name and shown["params"] > 0


def test_an_unknown_model_may_be_a_misspelled_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command_line(model="tinny")) == 2
    assert "did you mean 'tiny'?" in error_line(capsys)


def test_a_training_configuration_without_its_packages_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moe_comm.train.config", None)
    assert cli.run(command_line(model="tiny")) == 2
    assert "pip install '.[train]'" in error_line(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a valid JSON file"),
        ("[]", "is not a valid JSON file"),
        ('{"model_type": "mixtral"}', "key 'num_hidden_layers' is missing"),
        ('{"model_type": "mixtral", "num_hidden_layers": "many"}', "num_hidden_layers must be an integer"),
    ],
)
def test_a_malformed_model_is_reported_with_its_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.run(command_line(model=str(tmp_path))) == 2
    line = error_line(capsys)
    assert message in line and "config.json" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "--gpus", "8"], "--calibrate cannot be combined with --gpus"),
        (["--calibrate", "--mapping", "tp=2"], "--calibrate cannot be combined with --mapping"),
        (["--calibrate", "--model", "olmoe-1b-7b"], "--calibrate cannot be combined with --model"),
        (["--ranks", "2"], "--ranks applies to --calibrate"),
    ],
)
def test_modes_exclude_each_other(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", *arguments]) == 2
    assert message in error_line(capsys)


def test_slow_ranks_are_replayed_with_the_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--slow", "3=1.5", "--slow", "70=1.2", mapping=MAPPING["--mapping"])
    assert result["slow"]["slowdown"] == pytest.approx(result["slow"]["step_s"] / result["step_s"])
    assert 1.05 < result["slow"]["slowdown"] < 1.5
    assert cli.run(command_line("--slow", "3=1", mapping=MAPPING["--mapping"])) == 0
    assert "with 3=1: " in capsys.readouterr().out


@pytest.mark.parametrize("sharding", ["replicate", "zero1", "fsdp"])
def test_offloaded_state_frees_memory_and_costs_its_transfers(
    sharding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "plan.toml"
    fixed: dict[str, str | None] = {**SMALL, "mapping": "ep=8", "sharding": sharding, "recompute": "full"}
    resident = run_json(capsys, **fixed)
    tier = {"offload_budget": "1GiB", "offload_rate": "4"}
    stored = run_json(capsys, "--config", str(config), **fixed, **tier)
    freed = resident["memory"]["optimizer_gb"] - stored["memory"]["optimizer_gb"]
    assert freed > 1
    assert stored["breakdown"]["optimizer"] == pytest.approx(2 * freed / 4, rel=0.01)
    others = [
        {key: value for key, value in one["breakdown"].items() if key != "optimizer"} for one in (resident, stored)
    ]
    assert others[0] == others[1]
    assert tomllib.loads(config.read_text())["offload"] == {"optimizer": "file", "budget": 1 << 30, "path": "."}
    ample = run_json(capsys, **fixed, offload_budget="1TiB")
    assert (ample["memory"], ample["step_s"]) == (resident["memory"], resident["step_s"])


def test_offloaded_activations_free_memory_and_cost_what_their_transfers_exceed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "plan.toml"
    fixed: dict[str, str | None] = {**SMALL, "mapping": "ep=8", "recompute": "none", "micro_batch": "1"}
    fixed |= {"dispatcher": "all_to_all", "sharding": "zero1", "overlap": "none"}
    resident = run_json(capsys, **fixed)
    slow, fast = (
        run_json(capsys, "--config", str(config), **fixed, offload_activations="1GiB", offload_rate=rate)
        for rate in ("1", "1000000")
    )
    assert resident["memory"]["activations_gb"] - slow["memory"]["activations_gb"] > 1
    assert fast["step_s"] == resident["step_s"]
    exposed = slow["breakdown"].pop("offloaded activations")
    assert exposed == pytest.approx(slow["step_s"] - resident["step_s"]) and exposed > 0
    assert slow["breakdown"] == resident["breakdown"]
    expected = {"activations": "file", "activation_budget": 1 << 30, "path": "."}
    assert tomllib.loads(config.read_text())["offload"] == expected


def test_offloaded_weights_free_the_device_and_cost_their_copies_and_the_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "plan.toml"
    fixed: dict[str, str | None] = {**SMALL, "mapping": "ep=4", "recompute": "full", "micro_batch": "1"}
    fixed |= {"dispatcher": "all_to_all", "overlap": "none"}
    resident = run_json(capsys, **fixed, sharding="fsdp")
    slow, fast, alone = (
        run_json(capsys, "--config", str(config), "--offload-weights", **fixed | changes)
        for changes in (
            {"offload_rate": "1"},
            {"offload_rate": "1000000"},
            {"offload_rate": "1000000", "mapping": "ep=8"},
        )
    )
    memory, before = slow["memory"], resident["memory"]
    assert memory["optimizer_gb"] == 0 and memory["weights_gb"] == before["weights_gb"] and before["host_gb"] == 0
    assert memory["host_gb"] > before["optimizer_gb"] > 1  # gradients are there, too
    assert fast["step_s"] < resident["step_s"] < slow["step_s"]
    assert slow["breakdown"]["optimizer"] == pytest.approx(1e6 * fast["breakdown"]["optimizer"])
    assert "offloaded weights" in slow["breakdown"] and "offloaded weights" not in fast["breakdown"]
    # An expert is on one rank then, and FSDP does not prefetch units of one rank.
    assert alone["breakdown"]["offloaded weights"] > 0
    written = tomllib.loads(config.read_text())
    assert written["offload"] == {"weights": "host"} and written["parallel"]["sharding"] == "fsdp"
    # A search considers fsdp only.
    found = run_json(capsys, "--offload-weights", top="3", **fixed | {"mapping": None})
    assert (found["mapping"]["sharding"], found["mapping"]["replicas"]) == ("fsdp", 1)
    assert cli.run(command_line("--offload-weights", mapping="ep=8", sharding="zero1")) == 2
    assert "--offload-weights needs --sharding fsdp" in capsys.readouterr().err


def test_the_imbalance_has_a_default_and_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, mapping=MAPPING["--mapping"])
    assert result["load"]["imbalance"] == DROPLESS
    result = run_json(capsys, mapping=MAPPING["--mapping"], capacity_factor="1")
    assert result["load"]["imbalance"] == 1.0
    result = run_json(capsys, mapping=MAPPING["--mapping"], imbalance="1.1")
    assert result["load"]["imbalance"] == 1.1


def test_the_prediction_of_a_mapping_has_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, mapping=MAPPING["--mapping"])
    assert result.keys() >= KEYS and "candidates" not in result
    mapping = result["mapping"]
    assert [mapping[key] for key in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp")] == [2, 1, 8, 8, 1, 8, 1, 2]
    assert mapping["micro_batch"] * mapping["micro_batches"] * mapping["dp"] == 256
    assert result["fits"] is True and result["would_fit"] == [] and result["memory"]["missing_gb"] == 0
    assert sum(result["breakdown"].values()) == pytest.approx(result["step_s"], rel=1e-9)
    assert result["tokens_per_s"] == pytest.approx(256 * 4096 / result["step_s"])
    assert 0.3 < result["mfu"] < 0.7
    memory = result["memory"]
    terms = sum(memory[f"{name}_gb"] for name in ("weights", "gradients", "optimizer", "activations", "buffers"))
    assert result["memory_gb"] == pytest.approx(terms) and result["memory_gb"] < memory["available_gb"]
    assert set(result["bytes"]) == {"inside", "between", "across"} and result["bytes"]["inside"]["dispatch"] > 0
    assert 0 < result["bubble_share"] < 1 and 0 < result["exposed_share"] < 1


def test_unspecified_settings_of_a_mapping_are_the_fastest_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    free = run_json(capsys, mapping=MAPPING["--mapping"])
    same = {key: free["mapping"][key] for key in ("micro_batch", "recompute")}
    for changed in ({"micro_batch": "2"}, {"recompute": "full"}, {"micro_batch": "4", "recompute": "selective"}):
        other = run_json(capsys, mapping=MAPPING["--mapping"], **changed)
        assert str(other["mapping"][next(iter(changed))]) == next(iter(changed.values()))
        assert other["step_s"] >= free["step_s"] or not other["fits"], same


def test_the_dispatcher_is_the_fastest_unless_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "model": "deepseek-v3",
        "hardware": "h800",
        "gpus": "512",
        "mapping": "pp=8,ep=64",
        "global_batch": "512",
    }
    result = {name: run_json(capsys, **options, dispatcher=name) for name in ("auto", "all_to_all", "hierarchical")}
    assert {name: one["mapping"]["dispatcher"] for name, one in result.items()} == {
        "auto": "hierarchical",
        "all_to_all": "all_to_all",
        "hierarchical": "hierarchical",
    }
    assert result["auto"] == result["hierarchical"]
    assert result["auto"]["step_s"] < result["all_to_all"]["step_s"]
    inter_host_bytes = {name: one["bytes"]["between"]["dispatch"] for name, one in result.items()}
    assert inter_host_bytes["auto"] < inter_host_bytes["all_to_all"] / 2
    assert cli.run(command_line(**options)) == 0
    assert "dispatcher hierarchical" in " ".join(capsys.readouterr().out.split())


def test_the_printed_mapping_option_gives_the_same_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_json(capsys, mapping="tp=2,pp=8,ep=4,etp=2")
    assert run_json(capsys, mapping=first["mapping"]["option"])["step_s"] == first["step_s"]


def test_the_schedule_option_selects_the_pipeline_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    default = run_json(capsys, mapping="tp=2,pp=8,ep=8")
    assert default["mapping"]["schedule"] == "1f1b"
    result = run_json(capsys, mapping="tp=2,pp=8,ep=8", schedule="zbv")
    assert (result["mapping"]["schedule"], result["mapping"]["vpp"]) == ("zbv", 2)
    assert result["bubble_share"] < default["bubble_share"] / 2
    assert cli.run(command_line(mapping="tp=2,pp=8,ep=8", schedule="zbv")) == 0
    assert "vpp 2 (zbv)" in " ".join(capsys.readouterr().out.split())
    assert cli.run(command_line(mapping="tp=2,ep=8", schedule="zbv")) == 2
    assert "schedule = zbv needs a pipeline, but pp is 1" in capsys.readouterr().err
    assert run_json(capsys, mapping="tp=2,ep=8")["mapping"]["schedule"] is None


def test_coupled_experts_are_inside_data_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "--coupled", mapping="tp=2,pp=8,ep=4")
    assert (result["mapping"]["etp"], result["mapping"]["edp"]) == (2, 2)
    assert cli.run(command_line("--coupled", mapping="tp=2,pp=8,ep=4,etp=1")) == 2
    assert "without folding, etp must equal tp" in error_line(capsys)


def test_a_mapping_that_does_not_fit_is_predicted_with_changes_that_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = {"mapping": "tp=1,pp=8,ep=8", "micro_batch": "2", "recompute": "none"}
    result = run_json(capsys, **changed)
    assert result["fits"] is False and result["step_s"] > 0
    missing = result["memory_gb"] - result["memory"]["available_gb"]
    assert result["memory"]["missing_gb"] == pytest.approx(missing) and missing > 0
    assert result["would_fit"]
    for change in result["would_fit"]:
        assert change["change"] and change["memory_gb"] <= result["memory"]["available_gb"]
    assert cli.run(command_line(**changed)) == 0
    output = capsys.readouterr().out
    assert "does not fit" in output and f"would fit with {result['would_fit'][0]['change']}" in output


def test_a_mapping_is_printed_with_time_memory_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command_line(mapping=MAPPING["--mapping"])) == 0
    output = capsys.readouterr().out
    for message in ("mixtral-8x22b (140.6 B parameters", "128 h100", "experts etp 1, ep 8, edp 2", "MFU", "products"):
        assert message in output
    assert "dispatch" in output and "between hosts" in output


def test_json_is_written_to_a_file_and_text_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "out.json"
    assert cli.run(command_line(mapping=MAPPING["--mapping"], json=str(out))) == 0
    assert "MFU" in capsys.readouterr().out
    assert json.loads(out.read_text()).keys() >= KEYS


def test_the_host_size_changes_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    default, small = (run_json(capsys, mapping="tp=2,pp=8,ep=8", host_size=size) for size in (None, "4"))
    assert small["hardware"]["host_size"] == 4 and small["bytes"]["between"]["dispatch"] > 0
    assert "dispatch" not in default["bytes"]["between"] and small["step_s"] > default["step_s"]


def test_imbalance_lengthens_a_step_up_to_the_capacity_factor(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {"mapping": "tp=2,pp=8,ep=8,vpp=1", "micro_batch": "1"}
    even, uneven, capped = (
        run_json(capsys, **fixed, **more)["step_s"]
        for more in ({"capacity_factor": "1"}, {"imbalance": "1.5"}, {"imbalance": "1.5", "capacity_factor": "1"})
    )
    assert capped == pytest.approx(even) and uneven > even


SMALL = {"model": "olmoe-1b-7b", "gpus": "8", "global_batch": "64"}


@pytest.fixture(scope="module")
def search_output() -> Any:
    """Return the JSON object and the text of a small search."""
    from typer.testing import CliRunner

    completed = CliRunner().invoke(cli.app, command_line("--json", "-", **SMALL))
    assert completed.exit_code == 0, completed.output
    return json.loads(completed.stdout), completed.stderr


def test_a_search_reports_ten_candidates_and_why_they_are_slower(search_output: tuple[dict[str, Any], str]) -> None:
    result, output = search_output
    best = result["candidates"]
    assert len(best) == 10 and best[0]["mapping"] == result["mapping"] and result.keys() >= KEYS
    order = [(not one["equal"], one["equal"] and one["memory_share"] > 0.95, one["step_s"]) for one in best]
    assert order == sorted(order)
    assert all(one["fits"] for one in best)
    assert best[0]["why_slower"] is None and all(isinstance(one["why_slower"], str) for one in best[1:])
    assert len({json.dumps(one["mapping"]) for one in best}) == 10
    search = result["search"]
    assert search["tried"] == search["replayed"] + sum(search["pruned"].values()) and search["complete"]
    for name in (
        "mapping",
        "step s",
        "tokens/s",
        "MFU",
        "GB",
        "bubble",
        "exposed",
        "why it is slower",
        "mappings tried in",
    ):
        assert name in output


def test_on_a_narrow_terminal_reasons_are_printed_below_the_table() -> None:
    from rich.console import Console

    from moe_comm.cli.plan_text import search_parts
    from moe_plan.machine.hardware_table import cluster_named
    from moe_plan.model.files import model_named
    from moe_plan.model.load import Workload
    from moe_plan.search.request import PlanRequest
    from moe_plan.search.search import search
    from moe_plan.search.space import SearchSpace

    request = PlanRequest(model_named("olmoe-1b-7b"), cluster_named("h100", 8), Workload(4096), 64)
    result = search(request, SearchSpace.of(micro_batch=1, recompute="none", sharding="zero1"), keep=3)
    console = Console(width=80, file=io.StringIO(), record=True)
    for part in search_parts(request, result, 80):
        console.print(part)
    lines = console.export_text().splitlines()
    assert "why it is slower" not in " ".join(lines) and all(len(line) <= 80 for line in lines)
    assert [line[:5].strip() for line in lines if line.startswith((" 2  +", " 3  +"))] == ["2  +", "3  +"], lines


def test_the_best_mapping_of_a_search_has_the_same_prediction_on_its_own(
    search_output: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    best = search_output[0]["mapping"]
    keys = ("micro_batch", "recompute", "sharding", "overlap", "schedule", "dispatcher")
    fixed = {key: str(best[key]) for key in keys if best[key] is not None}
    again = run_json(capsys, mapping=best["option"], **fixed, **SMALL)
    assert again["step_s"] == pytest.approx(search_output[0]["step_s"], rel=1e-12) and again["mapping"] == best


def test_a_search_respects_fixed_settings(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {
        "micro_batch": "2",
        "recompute": "full",
        "sharding": "fsdp",
        "overlap": "inter",
        "dispatcher": "all_gather",
    }
    result = run_json(capsys, "--coupled", top="3", **fixed, **SMALL)
    assert len(result["candidates"]) == 3
    for one in result["candidates"]:
        assert {key: str(one["mapping"][key]) for key in fixed} == fixed
        assert one["mapping"]["etp"] == one["mapping"]["tp"]


@pytest.mark.slow
def test_a_search_without_a_fitting_mapping_exits_with_1_and_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = {"gpus": "8", "global_batch": "8", "json": str(out)}
    assert cli.run(command_line(**options)) == 1
    line = error_line(capsys)
    assert "mappings of mixtral-8x22b fits 8 h100" in line and "GiB too much" in line
    result = json.loads(out.read_text())
    assert result.keys() >= KEYS and result["fits"] is False and result["candidates"] == []
    gpus_that_fit = result["search"]["gpus_that_fit"]  # None if the time limit was reached first
    assert gpus_that_fit is None or (gpus_that_fit > 8 and f"fits {gpus_that_fit:,} of them" in line)


def test_a_search_without_a_valid_mapping_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(command_line(model="olmoe-1b-7b", gpus="17", global_batch="3")) == 2
    assert "no mapping of olmoe-1b-7b can run on 17 accelerators" in error_line(capsys)


def test_the_mapping_is_written_as_a_training_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = pytest.importorskip("moe_comm.train.config")
    out = tmp_path / "out.toml"
    result = run_json(capsys, config=str(out), mapping="tp=2,pp=2,ep=2", **SMALL)
    loaded = config.load(str(out))
    assert loaded.parallel.ranks == 8
    p = loaded.parallel.mapping(8)
    assert (p.tp, p.pp, p.ep, p.dp) == tuple(result["mapping"][axis] for axis in ("tp", "pp", "ep", "dp"))


def test_a_trace_and_a_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, page = tmp_path / "step.perfetto-trace", tmp_path / "step.html"
    options = {"mapping": "tp=2,pp=2,ep=2", "trace": str(trace), "page": str(page)}
    assert cli.run(command_line(**options, **SMALL)) == 0
    output = capsys.readouterr().out
    assert f"wrote {trace}" in output and f"wrote {page}" in output
    assert trace.stat().st_size > 1000
    text = page.read_text()
    assert "olmoe-1b-7b" in text and "http://" not in text.partition("</head>")[0]


def test_calibrate_saves_the_description_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_comm.bench.calibrate import machine as calibrate
    from moe_plan.machine.hardware_table import cluster_named

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = SMALL | {"hardware": "this-machine", "mapping": "ep=8"}
    assert cli.run(command_line(**options)) == 2
    assert "has not been measured; run: moe-comm plan --calibrate" in error_line(capsys)
    monkeypatch.setattr(calibrate, "calibrate", lambda ranks, say: cluster_named("h20", ranks))
    assert cli.run(["plan", "--calibrate", "--ranks", "4"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out and (tmp_path / "moe_comm" / "hardware.json").is_file()
    measured, named = run_json(capsys, **options), run_json(capsys, **options | {"hardware": "h20"})
    assert measured == named

    elsewhere = tmp_path / "mine.json"
    assert cli.run(["plan", "--calibrate", "--hardware-file", str(elsewhere), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(elsewhere.read_text())
    assert json.loads(elsewhere.read_text())["cluster"]["gpus"] == 2
    assert run_json(capsys, hardware_file=str(elsewhere), **options) == measured


def recorded(folder: Path, loads: list[int], experts: int | None = None) -> str:
    """Write a run with the loads of two layers in three steps, and return its folder."""
    for step in (1, 2, 3):
        for layer in ("a", "b"):
            append(folder / LOADS, LoadLine(step, layer, loads))
    if experts is not None:
        (folder / "config.resolved.toml").write_text(f"[model]\nexperts = {experts}\n")
    return str(folder)


EP4 = {"mapping": "tp=2,pp=8,ep=4"}


def test_loads_of_a_run_replace_the_imbalance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The last one is a zero-computation expert.
    run = recorded(tmp_path, [4000, 4000, 1000, 1000, 1000, 1000, 1000, 3000, 9999], experts=8)
    fixed = run_json(capsys, loads=run, **EP4)
    assert fixed["placement"]["kind"] == "fixed" and fixed["placement"]["ratio"] == 2.0
    assert fixed["load"]["imbalance"] == 1.0 and "loads" not in fixed["load"]
    assert fixed["step_s"] == run_json(capsys, imbalance="2", **EP4)["step_s"]
    assert cli.run(command_line(loads=run, placement="relocate", offload_budget="1GiB", imbalance=None, **EP4)) == 2
    assert "needs --placement fixed" in error_line(capsys)
    moved = run_json(capsys, loads=run, placement="relocate", **EP4)
    assert moved["placement"]["kind"] == "relocate" and moved["placement"]["before"] == 2.0
    assert moved["placement"]["ratio"] == 1.25
    assert moved["step_s"] < fixed["step_s"]
    assert sum(sent["expert moves"] for sent in moved["bytes"].values() if "expert moves" in sent) > 0
    slow = run_json(capsys, "--slow", "0=1.5", loads=run, placement="relocate", **EP4)["slow"]
    assert slow["step_s"] > moved["step_s"]


def test_lent_experts_even_the_recorded_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path, [80000, 1000, 1000, 1000, 1000, 1000, 1000, 3000])
    out = tmp_path / "out.toml"
    fixed, moved, lent = (
        run_json(capsys, loads=run, placement=placement, config=str(out), **EP4)
        for placement in ("fixed", "relocate", "balance")
    )
    # Moves cannot divide an expert.
    assert moved["placement"]["ratio"] > 3.5 > 1.2 > lent["placement"]["ratio"]
    assert lent["placement"]["kind"] == "balance" and 3 <= lent["placement"]["copies"] <= 6
    assert lent["step_s"] < moved["step_s"] and lent["step_s"] < fixed["step_s"]
    assert sum(sent.get("expert lending", 0) for sent in lent["bytes"].values()) > 0
    assert lent["memory"]["weights_gb"] > fixed["memory"]["weights_gb"]
    config = pytest.importorskip("moe_comm.train.config").load(str(out))
    assert config.placement.balance.rows == 1.125 and config.placement.balance.flops > 1e14


@pytest.mark.parametrize("placement", ["fixed", "relocate", "balance"])
def test_uniform_loads_answer_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str], placement: str) -> None:
    result = run_json(capsys, loads=recorded(tmp_path, [1000] * 8), placement=placement, **EP4)
    assert result["placement"]["kind"] == "fixed" and result["placement"]["ratio"] == 1.0
    assert result["step_s"] == run_json(capsys, imbalance="1", **EP4)["step_s"]


def test_the_placement_is_printed_and_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path, [4000, 4000, 1000, 1000, 1000, 1000, 1000, 3000])
    assert cli.run(command_line(loads=run, placement="relocate", gpus="32", global_batch="32", top="3")) == 0
    printed = capsys.readouterr().out
    assert "recorded loads of experts" in printed and "times the mean" in printed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"placement": "relocate"}, "--loads RUN"),
        ({"loads": "RUN", "imbalance": "2"}, "--loads replaces --imbalance"),
        ({"loads": "RUN", "placement": "replicate"}, "--placement"),
        ({"loads": "RUN", "model": "deepseek-v3"}, "the loads are of 8 experts, but deepseek-v3 has 256"),
        ({"loads": "/nonexistent"}, "is not a run folder"),
    ],
)
def test_wrong_loads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], message: str
) -> None:
    run = recorded(tmp_path, [1000] * 8)
    changed = {name: run if value == "RUN" else value for name, value in changed.items()}
    assert cli.run(command_line(**changed)) == 2
    assert message in error_line(capsys)
