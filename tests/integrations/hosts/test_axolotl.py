"""``plugins: [moe_comm.integrations.axolotl.MoeCommPlugin]``: axolotl's command on 2 ranks against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from moe_comm.errors import ConfigError
from tests.integrations.models import VOCAB, save_model

pytest.importorskip("axolotl", reason="needs axolotl: make adapters")

PLUGIN = "moe_comm.integrations.axolotl.MoeCommPlugin"
SEED = "tests.integrations.hosts.axolotl_cpu.Seed"
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]}
EXPERTS = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
Run = Callable[..., Path]


def log(folder: Path) -> Tensor:
    """Return loss and norm of gradients of each step [2, 2]."""
    state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    return torch.tensor([(entry["loss"], entry["grad_norm"]) for entry in state["log_history"] if "loss" in entry])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that trains two steps with batches of 8 sequences and returns the output folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("axolotl")
    model = save_model("qwen3_moe", root / "model", num_experts=7)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3")),
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
    ).save_pretrained(model)
    rows = torch.randint(3, VOCAB, (16, 12), generator=torch.Generator().manual_seed(0)).tolist()
    for name, shorter in (("equal", 1), ("unequal", 5)):  # sequences have equal or different lengths
        parts = [row[: 12 - number % shorter] for number, row in enumerate(rows)]
        data = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in parts]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, data)))
    common: dict[str, Any] = {
        "base_model": model,
        "dataset_prepared_path": str(root / "prepared"),
        "plugins": [PLUGIN],
        "sequence_len": 32,
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.01,
        "optimizer": "adamw_torch",
        "adam_epsilon": 1e-3,  # with 1e-8, Adam turns the rounding of the smallest gradients into whole steps
        "lr_scheduler": "constant",
        "max_grad_norm": 0.1,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "val_set_size": 0,
        "attn_implementation": "eager",
        **dict.fromkeys(("bf16", "fp16", "tf32", "gradient_checkpointing"), False),
    }
    settings = {"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

    (root / "wandb.py").write_text("")  # axolotl imports it, also where it is not used

    def train(world: int, lengths: str, *, shell: bool = False, **options: Any) -> Path:
        out = root / f"run{len(list(root.iterdir()))}"
        data = {"path": str(root / f"{lengths}.jsonl"), "ds_type": "json", "type": None}
        config = common | {"output_dir": str(out), "micro_batch_size": 8 // world, "datasets": [data]} | options
        (root / "config.yml").write_text(json.dumps(config))
        command = ["-m", "tests.integrations.hosts.axolotl_train", str(root / "config.yml")]
        if world > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *command]
        environment = os.environ | settings
        if shell:
            launcher = ["--launcher", "torchrun", "--", "--standalone", "--nproc-per-node", str(world)]
            command = ["-m", "axolotl.cli.main", "train", str(root / "config.yml"), *launcher]
            paths = os.environ["PYTHONPATH"], str(root)
            environment |= {
                "PYTHONPATH": os.pathsep.join(paths),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return out

    return train


def assert_same(got: Path, expected: Path, name: str, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    from safetensors.torch import load_file

    torch.testing.assert_close(log(got), log(expected), rtol=rtol / 10, atol=0.0)
    for folder in ("", "checkpoint-2"):
        ours, theirs = load_file(got / folder / name), load_file(expected / folder / name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k} {m}")


def test_two_ranks_train_and_save_as_one_process(run: Run) -> None:
    expected = run(1, "equal", plugins=None)
    assert log(expected).shape == (2, 2) and log(expected)[:, 1].min() > 0.1  # clipped
    assert_same(run(2, "equal"), expected, "model.safetensors")
    resumed = run(2, "equal", resume_from_checkpoint=str(expected / "checkpoint-1"))
    assert_same(resumed, expected, "model.safetensors")


def test_ranks_with_different_numbers_of_tokens_train_as_in_axolotls_ddp(run: Run) -> None:
    expected = run(2, "unequal", plugins=None)
    overlapped = run(2, "unequal", moe_comm_overlap=True, moe_comm_backend="all_to_all")
    assert_same(overlapped, expected, "model.safetensors")


@pytest.mark.parametrize("targets", [{}, EXPERTS], ids=["attention", "attention and experts"])
def test_adapters_train_as_in_axolotls_ddp_and_are_saved_for_peft(targets: dict[str, Any], run: Run) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    options = LORA | targets
    expected = run(2, "unequal", plugins=[SEED], **options)
    got = run(2, "unequal", plugins=[PLUGIN, SEED], **options)
    assert_same(got, expected, "adapter_model.safetensors", 1e-4, 1e-6)
    base = json.loads((got / "adapter_config.json").read_text())["base_model_name_or_path"]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(got)).state_dict()
    saved = load_file(got / "adapter_model.safetensors")
    assert len(saved) == (12 if targets else 4)
    for name, value in saved.items():
        assert loaded[name.replace(".weight", ".default.weight")].equal(value)
    if targets:
        resumed = run(2, "unequal", resume_from_checkpoint=str(expected / "checkpoint-1"), **options)
        assert_same(resumed, expected, "adapter_model.safetensors", 1e-4, 1e-6)


FSDP2 = {
    "plugins": [PLUGIN, "tests.integrations.hosts.axolotl_cpu.CpuMesh"],
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen3MoeDecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": False,
    },
}


def test_the_shell_command_trains_with_fsdp2_as_one_process(run: Run) -> None:
    """``axolotl train config.yml --launcher torchrun``."""
    expected = run(1, "equal", plugins=None)
    assert_same(run(2, "equal", shell=True, **FSDP2), expected, "model.safetensors")


def test_options_join_axolotls_schema() -> None:
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args

    manager = PluginManager.get_instance()
    manager.register(PLUGIN)
    _, schema = merge_input_args()
    given = {"base_model": "m", "datasets": [{"path": "d", "type": "alpaca"}], "learning_rate": 0.1}
    given |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
    found = schema(**given, moe_comm_overlap="auto", moe_comm_ep_size=2)
    assert (found.moe_comm_overlap, found.moe_comm_ep_size, found.moe_comm_backend) == ("auto", 2, "auto")
    for option, value in (("moe_comm_ep_size", 0), ("moe_comm_overlap", "always"), ("moe_comm_timeout_s", -1)):
        with pytest.raises(ValidationError, match=option):
            schema(**given, **{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"deepspeed": "ds.json"},
        {"tensor_parallel_size": 2},
        {"fsdp_config": {"offload_params": False}},
        {"fsdp_version": 1, "fsdp_config": {"offload_params": False}},
        {"adapter": "lora"} | FSDP2,
    ],
    ids=lambda options: " ".join(options),
)
def test_options_that_would_train_wrongly_raise_before_loading(options: dict[str, Any]) -> None:
    from axolotl.cli.config import prepare_plugins
    from axolotl.utils.dict import DictDefault

    with pytest.raises(ConfigError, match="fsdp_config" if "fsdp_config" in options else next(iter(options))):
        prepare_plugins(DictDefault(options | {"plugins": [PLUGIN]}))
