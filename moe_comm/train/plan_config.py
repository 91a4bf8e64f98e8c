"""The trainer's configurations for the planner: the model that one describes, and a mapping as one that trains.

``train_config`` writes the model as ``[model]`` describes models, and reads it back. A model that comes back with
another shape than the planned one is an error: the trainer has no such model. What the trainer does otherwise than the
plan assumes (``differences``) is written as comments at the head.

The planner runs without the packages of the extra "train", so functions import the modules that need these.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping as Table
from dataclasses import fields
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.plan.model import files
from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.model.routing import sends_sums
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.search.question import Candidate, Question

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FAMILIES = {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}
"""By how queries and keys are normed, of models without latent attention."""
_LR = 3e-4
_UNKNOWN = (
    "What a plan does not know is left as it is by default: text, tokenizer, learning rate, rope_theta. Give your own.",
)


def model_named(text: str) -> ModelShape:
    """As ``moe_comm.plan.model.files.model_named``; ``text`` may also be a ``.toml`` or ``.json`` configuration of
    ``moe-comm train``, or the name of a ready one.

    Raises:
        ConfigError: no such model; a file that cannot be read, or lacks a key or contradicts itself: names the key.
    """
    name = text.strip()
    if name.lower() in files.MODELS:
        return files.MODELS[name.lower()]
    path = Path(name)
    if path.suffix == ".toml" and not path.is_dir():
        return _shape_of(name)
    if path.suffix == ".json" and not path.is_dir():
        tree = files.read_json(path)
        if isinstance(tree.get("model"), dict) and "model_type" not in tree:
            return _shape_of(name)
    try:
        from moe_comm.train.config import ready_configs  # pydantic, of an optional extra

        ready = set(ready_configs())
    except ImportError:
        ready = set()
    return _shape_of(name) if name in ready else files.model_named(name, ready)


def _shape_of(path: str) -> ModelShape:
    """Of the model that a configuration of the trainer describes."""
    from moe_comm.train.architecture import transformer_config  # pydantic, of an optional extra
    from moe_comm.train.config import load  # pydantic
    from moe_comm.train.data.tokenizer import ByteTokenizer  # of an optional extra

    config = load(path)
    section = config.model
    if section.pretrained is not None:
        pretrained = Path(section.pretrained) / "config.json"
        return files.shape_of_hugging_face(files.read_json(pretrained), str(pretrained))
    vocab = section.vocab
    if vocab is None:
        if config.data.tokenizer != "bytes":
            raise ConfigError(f"{path}: model.vocab must be set, for its tokenizer is not read here")
        vocab = ByteTokenizer.vocab_size
    return ModelShape.of(transformer_config(section, vocab, config.data.seq_len), Path(path).stem)


def train_config(question: Question, candidate: Candidate) -> str:
    """TOML that ``moe_comm.train.config.load`` reads: ``candidate``'s mapping, and the model, batch and dtype of
    ``question``. It runs as it is, on text that every Python has.

    Raises:
        ConfigError: the trainer cannot build the model, or compute in the dtype: says what it lacks.
    """
    from moe_comm.train.config import TrainConfig  # pydantic, of an optional extra

    mapping = candidate.mapping
    sections: dict[str, Table[str, object]] = {
        "run": {"name": re.sub(r"[^\w.-]+", "-", question.shape.name) or "plan", "sample_tokens": 0},
        "data": {
            "source": "pydoc",
            "tokenizer": "bytes",
            "seq_len": question.load.seq_len,
            "batch": question.global_batch,
            "micro_batches": mapping.micro_batches(question.global_batch),
        },
        "model": _model(question) | {"recompute": mapping.recompute},
        "optimizer": {"kind": question.policy.optimizer, "lr": _LR},
        "parallel": _parallel(question, mapping),
    }
    step, fit = candidate.step, candidate.fit
    told = [
        f"{question.shape.name} on {mapping.parallel.world} {question.cluster.accelerator.name}, {mapping}.",
        f"Planned: {step.seconds:.4g} s a step, {step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.1%}; {fit}.",
        *(f"Otherwise than planned: {text}." for text in differences(question, candidate)),
        *_UNKNOWN,
    ]
    lines = [f"# {' '.join(text.split())}" for text in told]  # a model's name is its folder's, whatever that is
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
    text = "\n".join(lines) + "\n"
    _check_model(question, TrainConfig.model_validate(tomllib.loads(text)).model)
    return text


def differences(question: Question, candidate: Candidate) -> tuple[str, ...]:
    """What ``moe-comm train`` does otherwise than the plan assumes, so that steps take longer or memory is less."""
    mapping, policy, found = candidate.mapping, question.policy, []
    if mapping.overlap != "none" and mapping.sharding != "fsdp":
        found.append("gradients are summed and weights gathered behind the last pass, not beside passes")
    if mapping.fuses and not _interleaves(question, mapping):
        found.append(
            "transfers hide behind the products next to them, in chunks, but not beside other operators: that takes "
            "two micro-batches in turns, an even number of them, no pipeline, no fsdp and no full recomputing"
        )
    if mapping.overlap == "all" and mapping.dispatcher != "all_to_all":
        found.append(f"{mapping.dispatcher} moves rows before and after the experts' products, and not inside them")
    if mapping.overlap == "all" and mapping.dispatcher == "hierarchical":
        found.append("rows of other hosts are passed on when all have come")
    if mapping.parallel.etp > 1 and mapping.dispatcher != "all_gather":
        found.append("each row is sent to all parts of its expert at once, not to one that the others gather it from")
    if policy.reshard and mapping.sharding == "fsdp":
        found.append("fsdp keeps gradients, and weights of a pipeline's stages, until the end of a step")
    if policy.cut_shared and question.shape.shared_ffn and mapping.parallel.tp > 1:
        found.append("each tensor-parallel rank has all of the shared experts")
    return tuple(found)


def _parallel(question: Question, mapping: Mapping) -> Table[str, object]:
    p = mapping.parallel
    found: dict[str, object] = {"ranks": p.world}
    found |= {axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    if p.pp > 1:
        found |= {"schedule": mapping.schedule, "virtual": mapping.virtual}
    found["sharding"] = mapping.sharding
    if mapping.dispatcher != "all_to_all":
        found["backend"] = mapping.dispatcher
        # As the plan has it: the library's default is to send each row back.
        if sends_sums(mapping.dispatcher, question.shape, p.ep, question.load.size):
            found["deterministic"] = False
    if mapping.fuses:
        found |= {"overlap_chunks": "auto", "interleave": _interleaves(question, mapping)}
    return found


def _interleaves(question: Question, mapping: Mapping) -> bool:
    """Whether micro-batches can take turns, which is how the trainer computes beside transfers."""
    even = mapping.micro_batches(question.global_batch) % 2 == 0
    return even and mapping.parallel.pp == 1 and mapping.sharding != "fsdp" and mapping.recompute != "full"


def _model(question: Question) -> dict[str, object]:
    shape, load = question.shape, question.load
    if load.dtype not in DTYPES:
        raise ConfigError(
            f"moe-comm train computes in {' or '.join(DTYPES)}, not in {load.dtype}: plan with one of them"
        )
    found: dict[str, object] = {
        "family": FAMILIES[shape.qk_norm] if shape.latent is None else "deepseek_v3",
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "heads": shape.heads,
    }
    if shape.latent is None:
        found |= {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    else:
        widths = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
        found |= {name: getattr(shape.latent, name) for name in widths if getattr(shape.latent, name) is not None}
        found["head_dim"] = shape.score_dim + shape.score_dim % 2  # of no use here, but what is left out must divide
    if shape.moe_layers:
        found |= {"experts": shape.experts, "top_k": shape.top_k, "ffn": shape.ffn}
        if shape.groups > 1:
            found |= {"expert_groups": shape.groups, "top_groups": shape.top_groups}
    for name, value in {
        "shared_ffn": shape.shared_ffn,
        "first_dense": shape.dense_layers,
        "dense_ffn": shape.dense_ffn,
        "window": shape.window or 0,
        "tie": shape.tie,
        "parallel_block": shape.parallel_block,
        "shortcut": shape.shortcut,
    }.items():
        found |= {name: value} if value else {}
    if load.capacity is not None:
        found["capacity"] = float(load.capacity)
    return found | {"dtype": DTYPES[load.dtype]}


def _check_model(question: Question, section: object) -> None:
    """Raises ConfigError if ``section`` builds a model of another shape, or one that no tokenizer is for."""
    from moe_comm.train.architecture import transformer_config  # pydantic, of an optional extra
    from moe_comm.train.data.tokenizer import ByteTokenizer  # of an optional extra

    shape = question.shape
    built = ModelShape.of(transformer_config(section, shape.vocab, question.load.seq_len))  # type: ignore[arg-type]
    ignored = {"name"} | ({"kv_heads", "head_dim"} if shape.latent is not None else set())
    ignored |= set() if shape.moe_layers else {"experts", "top_k", "ffn"}
    lacks = [
        f"{field.name} = {getattr(shape, field.name)!r}"
        for field in fields(shape)
        if field.name not in ignored and getattr(built, field.name) != getattr(shape, field.name)
    ]
    if lacks:
        raise ConfigError(f"moe-comm train cannot build {shape.name}: it has no model with {', '.join(lacks)}")
    if shape.vocab < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"moe-comm train cannot run {shape.name}: its vocabulary of {shape.vocab} is smaller than the smallest "
            f"tokenizer's, {ByteTokenizer.vocab_size}"
        )


def _toml(value: object) -> str:
    """Numbers, truth values and text are the same in JSON."""
    return json.dumps(value, ensure_ascii=False)
