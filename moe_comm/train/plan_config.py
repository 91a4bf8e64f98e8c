"""Conversion between the planner's models and mappings and the trainer's configurations.

``train_config`` writes a planned model and mapping as a training configuration, and checks that the trainer would build
a model of the same shape. Where the trainer deviates from the plan (``differences``), the file has a comment.

The planner runs without the packages of the extra "train", so functions import the modules that require them. Models
and settings that the trainer does not support raise ``ConfigError``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping as Table
from dataclasses import fields
from pathlib import Path

from moe_comm.errors import ConfigError, MissingDependency, pip_install
from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.model import files
from moe_plan.model.mapping import Mapping, sends_sums
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.search.space import can_run

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FAMILIES = {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}
"""Families of models without latent attention, by the normalization of queries and keys."""
_LR = 3e-4
_NOTE = "A plan does not determine text, tokenizer, learning rate and rope_theta. These are defaults; set your own."


def model_named(text: str) -> ModelShape:
    """Return the model called ``text``, as ``moe_plan.model.files.model_named``.

    ``text`` may also be a ``.toml`` or ``.json`` configuration of ``moe-comm train``, or the name of a preset.
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
    presets = {preset.stem for preset in (Path(__file__).parent / "presets").glob("*.toml")}
    return _shape_of(name) if name in presets else files.model_named(name, presets)


def _shape_of(path: str) -> ModelShape:
    """Return the shape of the model in a training configuration."""
    try:
        from moe_comm.train.architecture import transformer_config
        from moe_comm.train.config import load
        from moe_comm.train.data.tokenizer import ByteTokenizer
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{path} is a configuration of moe-comm train, which needs {error.name}; run: {pip_install('train')}"
        ) from error

    config = load(path)
    section = config.model
    if section.pretrained is not None:
        pretrained = Path(section.pretrained) / "config.json"
        return files.shape_of_hugging_face(files.read_json(pretrained), str(pretrained))
    vocab = section.vocab
    if vocab is None:
        if config.data.tokenizer != "bytes":
            raise ConfigError(f"{path}: set model.vocab; the planner does not read the tokenizer")
        vocab = ByteTokenizer.vocab_size
    return ModelShape.of(transformer_config(section, vocab, config.data.seq_len), Path(path).stem)


def lengths_of(text: str, seq_len: int, batch: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each document of the first ``count`` sequences of a run.

    Args:
        text: a training configuration, or a folder of prepared text.
        batch: sequences per step, which with several sources determine their order.

    Raises:
        ConfigError: the text is not prepared, or too short.
        CorruptFile: a file of prepared text is altered.
    """
    from moe_comm.train.data.sequences import TrainingSequences, open_files
    from moe_comm.train.data.settings import CorpusSettings

    changes = {"seq_len": seq_len, "batch": batch, "micro_batches": 1, "documents": "separate"}
    if Path(text).is_dir():
        settings, seed = CorpusSettings.model_validate(changes | {"source": text}), 0
        folders: list[Path] | None = [Path(text)]
    else:
        from moe_comm.train.config import load  # imports torch
        from moe_comm.train.data.preparation import prepared

        config = load(text)
        settings, seed = config.data.model_copy(update=changes), config.run.seed
        folders = prepared(settings)
    if folders is None:
        raise ConfigError(f"the text of {text} is not prepared; run: moe-comm data {text}")
    return tuple(TrainingSequences(open_files(folders, settings), settings, seed).first_lengths(count))


def train_config(request: PlanRequest, candidate: PlanCandidate) -> str:
    """Return the training configuration of a plan as TOML: ``candidate``'s mapping, ``request``'s model and batch.

    The configuration can be trained unchanged; it uses text that is shipped with Python.
    """
    from moe_comm.train.config import TrainConfig  # imports pydantic, which the planner does not need

    mapping = candidate.mapping
    sections: dict[str, Table[str, object]] = {
        "run": {"name": re.sub(r"[^\w.-]+", "-", request.shape.name) or "plan", "sample_tokens": 0},
        "data": {
            "source": "pydoc",
            "tokenizer": "bytes",
            "seq_len": request.load.seq_len,
            "batch": request.global_batch,
            "micro_batches": mapping.micro_batches(request.global_batch),
        },
        "model": _model(request) | {"recompute": mapping.recompute},
        "optimizer": {"kind": request.policy.optimizer, "lr": _LR},
        "parallel": parallel_settings(request, mapping),
    }
    if request.load.lengths is not None:
        sections["data"] = {**sections["data"], "documents": "separate"}
        if mapping.lengths == "balanced" and request.shape.latent is not None:
            sections["model"] = {**sections["model"], "aux_loss": 0.0}
    offload: dict[str, object] = {}
    if request.policy.offload is not None:
        offload |= {"optimizer": "file", "budget": request.policy.offload}
    if request.policy.activations is not None:
        offload |= {"activations": "file", "activation_budget": request.policy.activations}
    if offload:
        offload["path"] = "."
    if request.policy.weights:
        offload["weights"] = "host"
    if offload:
        sections["offload"] = offload
    loads = request.load.loads
    if loads is not None and loads.placed(mapping.parallel.ep).kind != "fixed":
        if loads.lending is None:
            sections["placement"] = {"kind": "relocate", "every": loads.every}
        else:
            balance = loads.lending.balance(mapping.parallel.ep)
            names = ("rows", "flops", "bytes_per_s")
            sections["placement.balance"] = {name: getattr(balance, name) for name in names}
    step, fit = candidate.step, candidate.fit
    comments = [
        f"{request.shape.name} on {mapping.parallel.world} {request.cluster.accelerator.name}, {mapping}.",
        f"Planned: {step.seconds:.4g} s a step, {step.tokens_per_s:,.0f} tokens/s, MFU {step.mfu:.1%}; {fit}.",
        *(f"Deviation from the plan: {text}." for text in differences(request, candidate)),
        _NOTE,
    ]
    lines = [f"# {' '.join(text.split())}" for text in comments]  # the model's name may contain line breaks
    for name, section in sections.items():
        settings = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]
        lines += ["", f"[{name}]", *settings]
    text = "\n".join(lines) + "\n"
    _check_model(request, TrainConfig.model_validate(tomllib.loads(text)).model)
    return text


def differences(request: PlanRequest, candidate: PlanCandidate) -> tuple[str, ...]:
    """Return the deviations of ``moe-comm train`` from the plan that affect step time or memory."""
    mapping, policy, deviations = candidate.mapping, request.policy, []
    one_host = request.cluster.direct and request.cluster.hosts == 1
    if mapping.overlap not in ("none", "chunks") and mapping.sharding != "fsdp" and one_host:
        deviations.append("CPU ranks of one host sum gradients and gather weights after the last backward pass")
    if mapping.fuses and not _interleaves(request, mapping):
        deviations.append(
            "communication overlaps in chunks with the adjacent matrix products, but not with other operators; that "
            "requires interleaved micro-batches: an even number, and half of it must fit the schedule"
        )
    elif mapping.fuses and mapping.parallel.pp > 1:
        deviations.append(
            "two interleaved micro-batches are one pass of a stage, so the pipeline's bubble and activations are those "
            "of half as many micro-batches of twice the size"
        )
    if mapping.overlap == "all" and mapping.dispatcher != "all_to_all":
        deviations.append(f"{mapping.dispatcher} does not overlap dispatch and combine with the expert MLPs")
    if mapping.overlap == "all" and mapping.dispatcher == "hierarchical":
        deviations.append("rows from other hosts are forwarded after all of them have arrived")
    if mapping.parallel.etp > 1 and mapping.dispatcher != "all_gather":
        deviations.append("each row is sent to all ETP ranks of its expert, not sent to one and gathered by the others")
    if mapping.lengths == "balanced" and request.shape.latent is not None:
        deviations.append("there is no balance loss of each sequence, because balanced lengths do not keep them whole")
    if policy.reshard and mapping.sharding == "fsdp":
        deviations.append("fsdp keeps gradients, and the weights of pipeline stages, until the end of a step")
    if policy.cut_shared and request.shape.shared_ffn and mapping.parallel.tp > 1:
        deviations.append("each tensor-parallel rank has all of the shared experts")
    return tuple(deviations)


def parallel_settings(request: PlanRequest, mapping: Mapping) -> dict[str, object]:
    """Return the keys of [parallel] with which the trainer runs ``mapping``. Missing keys are defaults."""
    p = mapping.parallel
    settings: dict[str, object] = {"ranks": p.world}
    settings |= {axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
    if p.pp > 1:
        settings |= {"schedule": mapping.schedule, "virtual": mapping.virtual}
    settings["sharding"] = mapping.sharding
    settings |= {"dp_replicate": mapping.replicas} if mapping.replicas > 1 else {}
    if request.load.lengths is not None:
        settings |= {"context": "ring", "lengths": mapping.lengths}
    if mapping.dispatcher != "all_to_all":
        settings["backend"] = mapping.dispatcher
        # The plan assumes that combine sends partial sums; by default the library sends each expert output row.
        if sends_sums(
            mapping.dispatcher, request.shape, p.ep, request.load.size, deterministic=request.load.deterministic
        ):
            settings["deterministic"] = False
    if mapping.fuses:
        settings |= {"overlap_chunks": "auto", "interleave": _interleaves(request, mapping)}
    elif mapping.overlap == "chunks":
        settings["overlap_chunks"] = "auto"
    return settings


def _interleaves(request: PlanRequest, mapping: Mapping) -> bool:
    """Return whether the trainer can interleave micro-batches."""
    return can_run(mapping.schedule, mapping.parallel.pp, mapping.micro_batches(request.global_batch), interleave=True)


def _model(request: PlanRequest) -> dict[str, object]:
    shape, load = request.shape, request.load
    if load.dtype not in DTYPES:
        raise ConfigError(
            f"moe-comm train computes in {' or '.join(DTYPES)}, not in {load.dtype}; plan with one of them"
        )
    settings: dict[str, object] = {
        "family": FAMILIES[shape.qk_norm] if shape.latent is None else "deepseek_v3",
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "heads": shape.heads,
    }
    if shape.latent is None:
        settings |= {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    else:
        widths = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
        settings |= {name: getattr(shape.latent, name) for name in widths if getattr(shape.latent, name) is not None}
        settings["head_dim"] = shape.score_dim + shape.score_dim % 2  # unused, but the default must divide hidden
    if shape.moe_layers:
        settings |= {"experts": shape.experts, "top_k": shape.top_k, "ffn": shape.ffn}
        if shape.groups > 1:
            settings |= {"expert_groups": shape.groups, "top_groups": shape.top_groups}
    for name, value in {
        "shared_ffn": shape.shared_ffn,
        "first_dense": shape.dense_layers,
        "dense_ffn": shape.dense_ffn,
        "window": shape.window or 0,
        "tie": shape.tie,
        "parallel_block": shape.parallel_block,
        "shortcut": shape.shortcut,
    }.items():
        settings |= {name: value} if value else {}
    if load.capacity is not None:
        settings["capacity"] = float(load.capacity)
    return settings | {"dtype": DTYPES[load.dtype]}


def _check_model(request: PlanRequest, section: object) -> None:
    """Raise ``ConfigError`` if ``section`` builds a model of another shape, or with too few ids for any tokenizer."""
    from moe_comm.train.architecture import transformer_config  # imports pydantic
    from moe_comm.train.data.tokenizer import ByteTokenizer  # the package tokenizers, which is in an optional extra

    shape = request.shape
    built = ModelShape.of(transformer_config(section, shape.vocab, request.load.seq_len))  # type: ignore[arg-type]
    ignored = {"name"} | ({"kv_heads", "head_dim"} if shape.latent is not None else set())
    ignored |= set() if shape.moe_layers else {"experts", "top_k", "ffn"}
    differing = [
        f"{field.name} = {getattr(shape, field.name)!r}"
        for field in fields(shape)
        if field.name not in ignored and getattr(built, field.name) != getattr(shape, field.name)
    ]
    if differing:
        raise ConfigError(f"moe-comm train cannot build {shape.name}: it does not support {', '.join(differing)}")
    if shape.vocab < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"moe-comm train cannot train {shape.name}: its vocabulary has {shape.vocab} ids, but the smallest "
            f"tokenizer has {ByteTokenizer.vocab_size}"
        )
