"""The configuration of a training run: TOML or JSON, strict, with dotted overrides.

    config = load("examples/pydoc.toml", ["run.steps=200", "optimizer.lr=1e-3"])
    config = load("small")                                    # a ready one, see ready_configs

An unknown key, a wrong type, a NaN, a number out of range or a file that cannot be read is a ``ConfigError`` of one
line per fault, which names the key and, for an unknown one, the nearest known key.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator

from moe_comm.errors import ConfigError
from moe_comm.runtime.untrusted import DEEPEST, abridged, parse_object, read_bounded, shown
from moe_comm.train.sections import (
    CheckpointSection,
    DataSection,
    FaultsSection,
    GuardSection,
    ModelSection,
    ObserveSection,
    OptimizerSection,
    ParallelSection,
    PayloadSection,
    RunSection,
    Section,
    WatchSection,
)

Tree = dict[str, Any]
FILE_BYTES = 1 << 20
"""A configuration is never longer."""
MOST_FAULTS = 20
"""As many are named at once."""


class TrainConfig(Section):
    """Everything a run is made from."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    payload: PayloadSection = PayloadSection()
    checkpoint: CheckpointSection = CheckpointSection()
    watch: WatchSection = WatchSection()
    guard: GuardSection = GuardSection()
    observe: ObserveSection = ObserveSection()
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _can_interleave(self) -> Self:
        parallel, micro_batches = self.parallel, self.data.micro_batches
        if not parallel.interleave:
            return self
        faults = {
            f"data.micro_batches ({micro_batches}) must be even": micro_batches % 2,
            f"parallel.pp ({parallel.pp}) must be 1, for a pipeline has an order of its own": parallel.pp > 1,
            "parallel.overlap_chunks must not be 0, or nothing is under way": not parallel.overlap_chunks,
            'parallel.sharding must not be "fsdp", which gathers a layer for one pass': parallel.sharding == "fsdp",
            'model.recompute must not be "full", which runs a layer in one go': self.model.recompute == "full",
        }
        found = [text for text, wrong in faults.items() if wrong]
        if found:
            raise ValueError(f"parallel.interleave lets micro-batches take turns two by two: {'; '.join(found)}")
        return self


def ready_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path`` (``.toml`` or ``.json``, or the name of a ready configuration; None: the defaults), apply
    ``key=value`` overrides, and check.

    Override keys are dotted (``model.experts=16``); values are written as in TOML, and a bare word is a string.

    Raises:
        ConfigError: unreadable or malformed file, unknown key, value of the wrong type or out of range.
    """
    where = "the overrides" if path is None else str(path)
    tree: Tree = {} if path is None else _read(Path(path))
    for text in overrides:
        _override(tree, text)
    _check_values(tree, where)
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        given = error.errors()
        faults = [_explain(one["loc"], one["type"], one["msg"], one.get("input")) for one in given[:MOST_FAULTS]]
        more = f"; and {len(given) - MOST_FAULTS} more" if len(given) > MOST_FAULTS else ""
        raise ConfigError(f"{where}: " + "; ".join(faults) + more) from None


def dump(config: TrainConfig) -> str:
    """``config`` as TOML, every setting written out; ``load`` gives it back unchanged. None is left out."""
    lines: list[str] = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        lines += [
            f"[{name}]",
            *(f"{key} = {_toml(value)}" for key, value in section.items()),
            "",
        ]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """JSON is TOML but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> Tree:
    ready = ready_configs()
    path = ready.get(str(path), path)
    if not path.suffix:
        raise ConfigError(f"no configuration named {str(path)!r}; ready ones: {', '.join(ready)}")
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a configuration is a .toml or .json file; got suffix {path.suffix!r}")
    try:
        text = read_bounded(path, FILE_BYTES).decode()
        return tomllib.loads(text) if path.suffix == ".toml" else parse_object(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # malformed TOML or JSON, or not UTF-8
        raise ConfigError(f"{path} is not a valid {path.suffix[1:].upper()} file: {error}") from error


def _override(tree: Tree, text: str) -> None:
    key, equals, raw = text.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not parents or not last:
        raise ConfigError(f"an override is section.key=value, such as run.steps=200; got {shown(text)}")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(text)}: {shown(name)} is a value, not a section")
    node[last] = _value(raw.strip())


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits, or lists in lists in lists
        return raw


def _check_values(tree: Tree, where: str) -> None:
    """What ``dump`` could not write: TOML's whole numbers have 64 bits and its text is UTF-8, but its reader takes any
    number, and the command line any bytes."""
    level: list[tuple[str, object]] = list(tree.items())
    for _ in range(DEEPEST):
        for key, value in level:
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ConfigError(f"{where}: {abridged(key)}: a number that does not fit 64 bits")
            if not _is_utf8(key) or (isinstance(value, str) and not _is_utf8(value)):
                raise ConfigError(f"{where}: {abridged(key)}: text that is not UTF-8: {shown(value)}")
        level = [
            (f"{key}.{inner}", one)
            for key, value in level
            if isinstance(value, dict | list)
            for inner, one in (value.items() if isinstance(value, dict) else enumerate(value))
        ]
        if not level:
            return
    raise ConfigError(f"{where}: {abridged(level[0][0])}: nested more than {DEEPEST} deep")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _explain(loc: tuple[int | str, ...], kind: str, message: str, given: object) -> str:
    key = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return f"unknown key {shown(key)}" + _suggest(loc)
    message = message.removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = "" if isinstance(given, dict | BaseModel) else f"; got {shown(given)}"
    return f"{key}: {message}{got}" if key else message


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
