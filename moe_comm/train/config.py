"""Load, check and write the configuration of a training run: TOML or JSON, with dotted overrides.

    config = load("examples/pydoc.toml", ["run.steps=200", "optimizer.lr=1e-3"])
    config = load("small")                                    # a preset; ready_configs lists them

An unknown key, a wrong type, a NaN, a number out of range or an unreadable file raises ``ConfigError``. The message
names each invalid key and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from moe_comm.errors import ConfigError, suggestion
from moe_comm.runtime.untrusted import DEEPEST, abridged, parse_object, read_bounded, shown
from moe_comm.topology.pipeline import check_micro_batches
from moe_comm.train.data.settings import CorpusSettings
from moe_comm.train.offload.settings import OffloadSection
from moe_comm.train.section_base import MOST, Section
from moe_comm.train.sections import (
    CheckpointSection,
    FaultsSection,
    GuardSection,
    ModelSection,
    ObserveSection,
    OptimizerOptions,
    ParallelSection,
    PayloadSection,
    PlacementSection,
    RunSection,
    WatchSection,
)

Tree = dict[str, Any]
FILE_BYTES = 1 << 20
"""Maximum size of a configuration file."""
AUTO = "auto"
"""Value of the key ``parallel`` that lets the planner choose."""
CHOSEN = (
    *("tp", "cp", "dp", "pp", "ep", "etp"),
    *("schedule", "virtual", "sharding", "dp_replicate", "overlap_chunks", "backend"),
)
"""Keys of [parallel] that the planner chooses."""


class PeerToPeerSection(Section):
    """Memory of ``backend = "peer_to_peer"``; see ``moe_comm.PeerToPeerOptions``.

    Attributes:
        heap_bytes: bytes of each rank's device memory for rows. None: 2 GiB.
        capacity_rows: rows for which each layer has room on each rank. The host then does not wait for row counts and
            headers. "memory": the bound of ``placement.balance.memory``, for the tokens of a rank in a micro-batch.
            None: as many as a pass has.
    """

    heap_bytes: int | None = Field(default=None, ge=1, le=1 << 40)
    capacity_rows: Annotated[int, Field(ge=1, le=MOST)] | Literal["memory"] | None = None


class TrainConfig(Section):
    """All settings of a training run."""

    run: RunSection = RunSection()
    data: CorpusSettings = CorpusSettings()
    model: ModelSection = ModelSection()
    optimizer: OptimizerOptions = OptimizerOptions()
    parallel: ParallelSection = ParallelSection()
    placement: PlacementSection = PlacementSection()
    payload: PayloadSection = PayloadSection()
    peer_to_peer: PeerToPeerSection = PeerToPeerSection()
    offload: OffloadSection = OffloadSection()
    checkpoint: CheckpointSection = CheckpointSection()
    watch: WatchSection = WatchSection()
    guard: GuardSection = GuardSection()
    observe: ObserveSection = ObserveSection()
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.optimizer.schedule == "wsd" and self.optimizer.decay > self.run.steps:
            decay, steps = self.optimizer.decay, self.run.steps
            raise ValueError(f"optimizer.decay ({decay} steps) must not be longer than the run ({steps} steps)")
        if not self.data.validation:
            raise ValueError("data.validation must be greater than 0; a run evaluates at its end")
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.placement.kind != "fixed" and self.parallel.dp_replicate > 1:
            raise ValueError(f'placement.kind = "{self.placement.kind}" requires parallel.dp_replicate = 1')
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload.weights == "host" and self.parallel.sharding != "fsdp":
            raise ValueError(
                'offload.weights = "host" requires parallel.sharding = "fsdp", which copies the weights of a layer to '
                f'the device before they are used; got "{self.parallel.sharding}"'
            )
        if self.offload.weights == "host" and self.placement.balance is not None:
            raise ValueError(
                'offload.weights = "host" does not support placement.balance: FSDP does not shard the experts'
            )
        for key in ("optimizer", "activations", "weights"):
            if (tier := getattr(self.offload, key)) != "none" and self.placement.kind != "fixed":
                raise ValueError(
                    f'offload.{key} = "{tier}" requires placement.kind = "fixed": experts with stored state cannot move'
                )
        return self

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.peer_to_peer.capacity_rows == "memory":
            if self.placement.balance is None or self.placement.balance.memory is None:
                raise ValueError('peer_to_peer.capacity_rows = "memory" requires placement.balance.memory')
            if self.parallel.lengths == "balanced":
                raise ValueError(
                    'with parallel.lengths = "balanced", ranks have different numbers of tokens: set '
                    "peer_to_peer.capacity_rows to a number"
                )
        return self

    @model_validator(mode="after")
    def _check_interleave(self) -> Self:
        parallel, micro_batches = self.parallel, self.data.micro_batches
        if not parallel.interleave:
            return self
        messages = [] if parallel.overlap_chunks else ["parallel.overlap_chunks must be set, and not 0"]
        try:
            check_micro_batches(parallel.schedule, parallel.pp, micro_batches, interleave=True)
        except ConfigError as error:
            messages.append(f"data.micro_batches: {error}")
        if messages:
            raise ValueError(f"parallel.interleave runs two micro-batches at a time: {'; '.join(messages)}")
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        parallel = self.parallel
        if parallel.lengths == "static":
            return self
        required = (
            (parallel.context == "ring", 'parallel.context = "ring"'),
            (self.data.documents == "separate", 'data.documents = "separate"'),
            (parallel.pp == 1 and (not parallel.auto or "pp" in parallel.model_fields_set), "parallel.pp = 1"),
            (not parallel.interleave, "parallel.interleave = false"),
            (self.model.capacity is None, "no model.capacity"),
        )
        if missing := [setting for fits, setting in required if not fits]:
            raise ValueError(f'parallel.lengths = "balanced" requires {", ".join(missing)}')
        return self


def ready_configs() -> dict[str, Path]:
    """Return the path of each preset configuration of the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a configuration.

    Args:
        path: a ``.toml`` or ``.json`` file, or the name of a preset. None: the defaults.
        overrides: assignments such as ``model.experts=16``. Values have TOML syntax; a bare word is a string.
            ``parallel=auto`` sets ``parallel.auto`` and removes the keys that the planner chooses from the file; other
            overrides of these keys remain.

    Raises:
        ConfigError: unreadable or malformed file, unknown key, value of the wrong type or out of range.
    """
    source = "the overrides" if path is None else str(path)
    tree: Tree = {} if path is None else _read(Path(path))
    # First, so that the keys of other overrides are constraints.
    if any(_is_auto(text) for text in overrides):
        section = tree.get("parallel")
        given = section if isinstance(section, dict) else {}
        tree["parallel"] = {"auto": True} | {key: value for key, value in given.items() if key not in CHOSEN}
    elif tree.get("parallel") == AUTO:
        tree["parallel"] = {"auto": True}
    for text in overrides:
        if not _is_auto(text):
            _override(tree, text)
    _check_values(tree, source)
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {TrainConfig.explain(error)}") from None


def dump(config: TrainConfig) -> str:
    """Return ``config`` as TOML with all settings that are not None; ``load`` restores it unchanged."""
    lines: list[str] = []
    tree = config.model_dump(mode="json", exclude_none=True)
    if config.parallel.auto:  # a key that is set would be a constraint of the planner
        tree["parallel"] = config.parallel.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for name, section in tree.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items()), ""]
    return "\n".join(lines)


def _toml(value: object) -> str:
    """Return ``value`` as JSON, which is also TOML if DEL is escaped, and a section in a section as an inline table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> Tree:
    presets = ready_configs()
    path = presets.get(str(path), path)
    if not path.suffix:
        near = suggestion(str(path), presets)
        raise ConfigError(f"no configuration named {str(path)!r}{near}; presets: {', '.join(presets)}")
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a configuration is a .toml or .json file; got suffix {path.suffix!r}")
    try:
        text = read_bounded(path, FILE_BYTES).decode()
        return tomllib.loads(text) if path.suffix == ".toml" else parse_object(text)
    except OSError as error:
        near = f" (did you mean the preset {path.stem!r}?)" if path.stem in presets else ""
        raise ConfigError(f"cannot read the configuration {path}{near}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # malformed TOML or JSON, or not UTF-8
        raise ConfigError(f"{path} is not a valid {path.suffix[1:].upper()} file: {error}") from error


def _is_auto(text: str) -> bool:
    """Return whether an override is ``parallel=auto``."""
    key, _, value = text.partition("=")
    return key.strip() == "parallel" and _value(value.strip()) == AUTO


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
    except (ValueError, RecursionError):  # not TOML, too many digits, or nested too deeply
        return raw


def _check_values(tree: Tree, where: str) -> None:
    """Reject integers beyond 64 bits and text that is not UTF-8: Python's TOML reader accepts them, TOML does not."""
    level: list[tuple[str, object]] = list(tree.items())
    for _ in range(DEEPEST):
        for key, value in level:
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ConfigError(f"{where}: {abridged(key)}: the number does not fit into 64 bits")
            if any(0xD800 <= ord(c) <= 0xDFFF for c in f"{key}{value if isinstance(value, str) else ''}"):
                raise ConfigError(f"{where}: {abridged(key)}: the text is not valid UTF-8: {shown(value)}")
        level = [
            (f"{key}.{name}", child)
            for key, value in level
            if isinstance(value, dict | list)
            for name, child in (value.items() if isinstance(value, dict) else enumerate(value))
        ]
        if not level:
            return
    raise ConfigError(f"{where}: {abridged(level[0][0])}: nested more than {DEEPEST} levels deep")
