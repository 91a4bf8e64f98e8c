"""The configuration of a training run: TOML or JSON, strict, with dotted overrides.

    config = load("examples/pydoc.toml", ["run.steps=200", "optimizer.lr=1e-3"])

An unknown key, a wrong type, a NaN, a number out of range or a file that cannot be read is a ``ConfigError`` of one
line per fault, which names the key and, for an unknown one, the nearest known key.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_comm.errors import ConfigError

Tree = dict[str, Any]


class Section(BaseModel):
    """A group of settings: unknown keys, wrong types and NaN are refused, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """What to run, for how long, and where its folder goes (``folder/name-date``).

    time_limit_s: training stops cleanly at the first step past it; None: no limit.
    eval_batches: batches of validation text measured at the end.
    sample_bytes: length of the text sample, 0 for none. temperature: of its sampling.
    log_every: steps between lines where the output is not a terminal.
    """

    name: str = Field(default="train", min_length=1, pattern=r"^[\w.-]+$")
    folder: str = Field(default="runs", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=300, ge=1)
    time_limit_s: float | None = Field(default=None, gt=0)
    eval_batches: int = Field(default=8, ge=1)
    sample_bytes: int = Field(default=400, ge=0)
    temperature: float = Field(default=0.7, gt=0)
    log_every: int = Field(default=20, ge=1)


class DataSection(Section):
    """The text. ``source``: "pydoc" (the language reference inside every Python) or the path of a text file.

    batch: sequences of ``seq_len`` bytes in one step, over all ranks together.
    validation: the fraction at the end of the text that training never sees.
    """

    source: str = Field(default="pydoc", min_length=1)
    seq_len: int = Field(default=256, ge=2)
    batch: int = Field(default=16, ge=1)
    validation: float = Field(default=0.1, gt=0, lt=1)


class ModelSection(Section):
    """Shape of the model, built as a Hugging Face configuration of ``family``.

    kv_heads: None: as many as ``heads``. ffn: width of one expert. tie: the output layer shares the embedding.
    aux_loss: coefficient of the load-balancing loss. init_std: standard deviation of the initial weights.
    """

    family: Literal["qwen3_moe", "olmoe"] = "qwen3_moe"
    hidden: int = Field(default=128, ge=2)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    experts: int = Field(default=8, ge=1)
    top_k: int = Field(default=2, ge=1)
    ffn: int = Field(default=256, ge=1)
    tie: bool = False
    aux_loss: float = Field(default=0.01, ge=0)
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of 2 x heads ({self.heads})")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed experts ({self.experts})")
        return self


class OptimizerSection(Section):
    """AdamW or plain SGD; linear warmup over ``warmup`` steps, then a cosine down to ``final_lr`` x lr.

    betas, eps: AdamW only. weight_decay: on matrices only. clip: largest global gradient norm, 0 for any.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=3e-3, gt=0)
    warmup: int = Field(default=20, ge=0)
    final_lr: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1); got {list(self.betas)}")
        return self


class ParallelSection(Section):
    """How the work is spread.

    ranks: processes the command line starts; under torchrun its own number counts.
    ep: ranks that share one set of experts; None: all of them. It must divide the number of ranks.
    backend: dispatcher; see ``moe_comm.dispatch.BACKENDS``.
    """

    ranks: int = Field(default=2, ge=1)
    ep: int | None = Field(default=None, ge=1)
    backend: Literal["auto", "local", "shared_memory", "all_to_all", "all_gather"] = "auto"
    timeout_s: float = Field(default=300.0, gt=0)


class TrainConfig(Section):
    """Everything a run is made from."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path`` (``.toml`` or ``.json``; None: the defaults), apply ``key=value`` overrides, and check.

    Override keys are dotted (``model.experts=16``); values are written as in TOML, and a bare word is a string.

    Raises:
        ConfigError: unreadable or malformed file, unknown key, value of the wrong type or out of range.
    """
    where = "the overrides" if path is None else str(path)
    tree: Tree = {} if path is None else _read(Path(path))
    for text in overrides:
        _override(tree, text)
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(fault["loc"], fault["type"], fault["msg"], fault.get("input")) for fault in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(faults)) from None


def dump(config: TrainConfig) -> str:
    """``config`` as TOML, every setting written out; ``load`` gives it back unchanged. None is left out."""
    lines: list[str] = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()),
            "",
        ]
    return "\n".join(lines)


def _read(path: Path) -> Tree:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a configuration is a .toml or .json file; got suffix {path.suffix!r}")
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except ValueError as error:  # malformed TOML or JSON, or not UTF-8
        raise ConfigError(f"{path} is not a valid {path.suffix[1:].upper()} file: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object with sections {', '.join(TrainConfig.model_fields)}")
    return tree


def _override(tree: Tree, text: str) -> None:
    key, equals, raw = text.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not parents or not last:
        raise ConfigError(f"an override is section.key=value, such as run.steps=200; got {text!r}")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {text!r}: {name} is a value, not a section")
    node[last] = _value(raw.strip())


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _explain(loc: tuple[int | str, ...], kind: str, message: str, given: object) -> str:
    key = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return f"unknown key {key!r}" + _suggest(loc)
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if isinstance(given, dict | BaseModel) else f"; got {given!r}"
    return f"{key}: {message}{shown}"


def _known(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key below ``model``."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += _known(section, f"{prefix}{name}.")
    return keys


def _suggest(loc: tuple[int | str, ...]) -> str:
    key = ".".join(str(part) for part in loc)
    known = [k for k in _known(TrainConfig) if k.count(".") == key.count(".")]
    # The same last name in another section is the likeliest slip, then a misspelling.
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == str(loc[-1])]
    near = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if near:
        return f" (did you mean {near[0]!r}?)"
    siblings = [k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]]
    return f" (known: {', '.join(siblings or known)})"
