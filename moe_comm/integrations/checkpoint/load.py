"""``load_checkpoint``: fill the part of a model that this rank holds from safetensors, and nothing else.

1. match     names of the files ─▶ slices of parameters ─▶ what this rank reads     every tensor is accounted for
2. agree     all ranks raise the first error, before anything is read
3. read      file ─▶ parameter, a few at a time
4. agree     all ranks raise the first error of reading
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import WRITE_TIMEOUT_S, communicator_of, group_size
from moe_comm.dispatch.selection.factory import connect
from moe_comm.errors import CheckpointError, ConfigError, InputError, RankMismatch, UnsupportedModel
from moe_comm.integrations.checkpoint.files import (
    BUFFER_BYTES,
    DTYPES,
    FLOATS,
    FP8,
    QUANTIZED_BLOCK,
    SCALE,
    HubFolder,
    StoredTensor,
)
from moe_comm.integrations.checkpoint.layout import (
    CheckpointTensor,
    HeldTensor,
    checkpoint_layout,
    held_tensors,
    pretrained_class,
    unwrapped,
)
from moe_comm.integrations.checkpoint.slices import HubSlice, Overlap
from moe_comm.layers.data_parallel.expert_shard import is_dtensor
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import Router
from moe_comm.topology import Box

_log = logging.getLogger(__name__)
THREADS = 4
"""Parameters that are read at the same time, as in transformers."""
NAMED = 5
"""Maximum number of tensors that an error names."""


@dataclass(frozen=True)
class LoadReport:
    """Memory of this rank for loading a checkpoint. It is known, and logged, before anything is read.

    Attributes:
        kept: bytes of the parameters and persistent buffers of this rank.
        transient: maximum number of bytes that loading allocates besides them.
        whole: bytes of all parameters and buffers of the unswapped model.
    """

    kept: int
    transient: int
    whole: int

    def __str__(self) -> str:
        kept, transient, whole = (f"{size / (1 << 20):.1f} MiB" for size in (self.kept, self.transient, self.whole))
        return f"this rank keeps {kept} of {whole}, and loading needs at most {transient} besides"


def load_checkpoint(
    model: nn.Module, path: str | PathLike[str], *, device: torch.device | str | None = None
) -> LoadReport:
    """Load the part of a checkpoint that this rank holds into ``model``, with little memory. Collective.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)     # or a model of your own
        model = moe_comm.swap_moe(model)
        moe_comm.load_checkpoint(model, folder)

    The checkpoint is one of the unswapped model, in safetensors: of transformers in the layout of the hub or as in
    memory, or the state dict of another model. Values are read from the files directly into the parameters, or through
    a buffer of a few MiB if they have another dtype or order. Weights in fp8 with scales per block ("_scale_inv") are
    dequantized. No rank reads or allocates the whole model.

    Parameters and buffers on "meta" are allocated and replaced, so build the optimizer afterwards. Others are
    overwritten in place. The ranks that share the experts, the heads or the linears of ``model``, or that DDP or FSDP2
    connects, must all call it.

    Args:
        model: a model of any origin, before or after ``swap_moe``, ``swap_attention`` and ``swap_linears``, also on
            "meta", or one in memory under DDP or FSDP2.
        path: a safetensors file, or a folder with model.safetensors or with an index of several files.
        device: device of the tensors that are on "meta". None: the device of the model's other tensors, or the default
            device.

    Returns:
        The memory of this rank; it is logged before anything is read.

    Raises:
        ConfigError: ``path`` has no safetensors or cannot be read, a buffer that is not in checkpoints is on "meta", or
            experts were offloaded for another device.
        InputError: names or shapes do not match. The message names tensors that are in the checkpoint only, or in the
            model only.
        UnsupportedModel: a tensor is quantized in another way, the checkpoint layout of the family is unknown, or FSDP2
            shards a model on "meta".
        RankMismatch: the ranks read files with different contents.
        CorruptFile, CheckpointError: a file is damaged, or cannot be read. Errors are raised on every rank, all but
            the last before anything is read; after an error of reading, the model has undefined values.
    """
    wrapped, model = model, unwrapped(model)
    groups = groups_of(wrapped)
    loading: _Loading | None = None
    fault: Exception | None = None
    digest = ""
    try:
        hub = HubFolder(Path(path))
        loading = _match(model, hub, None if device is None else torch.device(device))
        digest = hub.digest()
    except Exception as error:  # the other ranks wait
        fault = error
    agree_in(groups, fault, f"load_checkpoint({path})", digest)
    assert loading is not None
    _log.info("load_checkpoint: %s", loading.report)
    try:
        _read(model, loading)
    except Exception as error:
        fault = error
    agree_in(groups, fault, f"load_checkpoint({path})")
    for module in model.modules():
        if isinstance(module, MoELayer):  # on "meta" it was built without communication
            module.dispatcher = connect(module.dispatcher, module.router.weight.device)
    return loading.report


def load_parts(model: nn.Module, path: str | PathLike[str], parts: Mapping[int, Sequence[Box]]) -> None:
    """Load parts of some parameters of ``model`` from a checkpoint as of ``load_checkpoint``. Not collective.

    Args:
        parts: by ``id`` of a parameter, where the elements to load are in it and in the full parameter.

    Raises:
        as ``load_checkpoint``.
    """
    if parts:
        _read(model, _match(model, HubFolder(Path(path)), None, parts))


def groups_of(model: nn.Module) -> list[ProcessGroup]:
    """Return the groups of several ranks over which modules of ``model`` communicate."""
    found: dict[ProcessGroup, None] = {}
    for module in model.modules():
        held = (module, getattr(module, "dispatcher", None))
        keys = ("group", "tp_group", "cp_group", "process_group")  # the last one of DDP
        groups = [getattr(one, key, None) for one in held for key in keys]
        for parameter in module.parameters(recurse=False):
            if is_dtensor(parameter):
                groups += parameter.device_mesh.get_all_groups()
        for group in groups:
            if isinstance(group, ProcessGroup) and group_size(group) > 1:
                found[group] = None
    return list(found)


def agree_in(groups: Iterable[ProcessGroup], fault: Exception | None, what: str, digest: str = "") -> None:
    """Raise on every rank of ``groups`` if a rank has a fault, or if ranks have different digests of files. Collective.

    The ranks wait longer for each other than in other collectives, because reading a model can take many minutes.
    """
    for group in groups:
        channel = Channel(communicator_of(group), WRITE_TIMEOUT_S)
        try:
            digests = agree(fault or digest, partial(gather_texts, channel, what), CheckpointError)
            if len(set(digests)) > 1:
                raise RankMismatch(f"{what}: the ranks read files with different contents (checksums {digests})")
        except Exception as error:  # also tell the next group
            fault = fault or error
    if fault is not None:
        raise fault


@dataclass(frozen=True)
class _Reading:
    """Values of a parameter in a checkpoint tensor.

    scales: of a weight in fp8.
    compared: the parameter has these values already, from another checkpoint tensor.
    """

    stored: StoredTensor
    overlap: Overlap
    scales: StoredTensor | None = None
    compared: bool = False

    def into(self, hub: HubFolder, local: Tensor) -> None:
        target = self.overlap.of(local)
        if self.compared:
            hub.read_into(self.stored, self.overlap.hub, target, self._compare)
        elif self.scales is not None:
            hub.read_dequantized(self.stored, self.scales, self.overlap.hub, target)
        else:
            hub.read_into(self.stored, self.overlap.hub, target)

    def _compare(self, target: Tensor, values: Tensor) -> None:
        if not torch.equal(target, values.to(target)):
            raise InputError(
                f"the checkpoint has two tensors with different values for a parameter of the model, one of them "
                f"{self.stored.name}. Do not tie these weights: set tie_word_embeddings=False"
            )

    @property
    def transient(self) -> int:
        """Upper limit of the bytes that are allocated for reading."""
        if self.scales is not None:
            return 2 * BUFFER_BYTES + 4 * prod(self.scales.shape)
        return BUFFER_BYTES


@dataclass
class _Loading:
    """What this rank reads: per tensor of the model, the values in checkpoint tensors.

    freed: tensors that this rank does not have in memory, which are removed from ``readings``.
    offloaded: readings of experts that are not in memory: the caches' layer, the number of the expert, and the name of
        the tensor with each of its readings.
    """

    hub: HubFolder
    held: dict[str, HeldTensor]
    readings: dict[str, list[_Reading]]
    devices: dict[str, torch.device]
    freed: set[str]
    offloaded: dict[tuple[Any, int], list[tuple[str, _Reading]]] = field(default_factory=dict)
    report: LoadReport = field(init=False)

    def __post_init__(self) -> None:
        kept = whole = transient = 0
        for name, readings in self.readings.items():
            tensor = self.held[name]
            whole += prod(tensor.sharding.shape) * tensor.tensor.element_size()
            if name in self.freed:
                continue
            kept += tensor.local.nbytes
            for reading in readings:
                transient = max(transient, reading.transient)
        for layer in {id(layer.cache): layer for layer, _ in self.offloaded}.values():
            kept += layer.cache.report.budget
        transient = max([transient, *(one.transient for found in self.offloaded.values() for _, one in found)])
        self.report = LoadReport(kept, THREADS * transient, whole)
        self.readings = {name: found for name, found in self.readings.items() if name not in self.freed}


def _match(
    model: nn.Module, hub: HubFolder, device: torch.device | None, parts: Mapping[int, Sequence[Box]] | None = None
) -> _Loading:
    """Match the tensors of the files and of the model, and return what this rank reads.

    parts: see ``load_parts``. None: all that this rank holds.
    """
    held = held_tensors(model)
    for name, one in held.items():
        if is_dtensor(one.tensor) and one.tensor.is_meta:
            raise UnsupportedModel(
                f'{name} is sharded by FSDP2 and on "meta". Call load_checkpoint before fully_shard, or after '
                "model.to_empty(device=...)"
            )
    for module in model.modules():
        offloaded_to = getattr(module, "offloaded", None)
        if device is not None and offloaded_to is not None and offloaded_to.cache.device.type != device.type:
            raise ConfigError(
                f"the experts were offloaded for {offloaded_to.cache.device.type}, and are to be loaded for "
                f'{device.type}; call offload_experts in the context of torch.device("{device.type}")'
            )
    device = device or _device_of(model)
    _check_buffers(model, device)
    try:
        layout = checkpoint_layout(model, held)
    except UnsupportedModel:
        layout = checkpoint_layout(model, held, hub=False)
        if not all(name in layout for name in hub):
            raise
    matched = _by_key(model, hub, held, layout)
    covered: dict[str, dict[object, str]] = {name: {} for name in held}
    readings: dict[str, list[_Reading]] = {name: [] for name in held}
    layers = {
        id(parameter): (module.offloaded, name)
        for module in model.modules()
        if getattr(module, "offloaded", None) is not None
        for name, parameter in module.named_parameters(recurse=False)
    }
    offloaded: dict[tuple[Any, int], list[tuple[str, _Reading]]] = {}
    problems: list[str] = []
    for key, entry in matched.items():
        stored = hub.stored(key)
        scales = hub.stored(key + SCALE) if stored.dtype in FP8 and key + SCALE in hub else None
        if (problem := _mismatch(entry, stored, scales)) is not None:
            problems.append(problem)
            continue
        for piece in entry.slices:
            one = held[piece.parameter]
            given = covered[piece.parameter].setdefault(piece.indices(one.sharding.shape), key)
            if id(one.tensor) in layers and parts is None:
                layer, name = layers[id(one.tensor)]
                for expert, box in _by_expert(one.boxes()):
                    if (overlap := piece.overlap(one.sharding.shape, box)) is not None:
                        reading = _Reading(stored, overlap, scales, given != key)
                        offloaded.setdefault((layer, expert), []).append((name, reading))
                continue
            for box in one.boxes() if parts is None else parts.get(id(one.tensor), ()):
                if (overlap := piece.overlap(one.sharding.shape, box)) is not None:
                    readings[piece.parameter].append(_Reading(stored, overlap, scales, given != key))
    if problems:
        raise InputError(f"{hub.folder} does not fit this {type(model).__name__}: {_listed(problems)}")
    _check_complete(model, hub, held, layout, covered)
    devices = {name: device if one.tensor.is_meta else one.tensor.device for name, one in held.items()}
    freed: set[str] = set()
    if any(getattr(module, "only_part", False) for module in model.modules()):
        freed = {name for name, one in held.items() if one.tensor.is_meta and not one.sharding.expert}
    if parts is not None:
        freed = {name for name, found in readings.items() if not found}
    freed |= {name for name, one in held.items() if id(one.tensor) in layers}
    readings = {name: found for name, found in readings.items() if covered[name]}
    return _Loading(hub, held, readings, devices, freed, offloaded)


def _by_expert(boxes: Sequence[Box]) -> Iterator[tuple[int, Box]]:
    """Yield each expert of boxes of a parameter [E, ...], and its box in a local tensor [1, ...]."""
    for box in boxes:
        (first, *local), (full, *inner) = box.local, box.full
        for number in range(first.stop - first.start):
            begin = full.start + number
            yield first.start + number, Box((slice(0, 1), *local), (slice(begin, begin + 1), *inner))


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.get_default_device())


def _check_buffers(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if buffers that are not in checkpoints have no values."""
    if isinstance(model, pretrained_class()):
        initialize_buffers(model, device)
    for module in model.modules():
        if isinstance(module, MoELayer | Router):  # their other buffers are counters
            for key in module._non_persistent_buffers_set:
                if (counter := module._buffers[key]) is not None and counter.is_meta:
                    module._buffers[key] = torch.zeros_like(counter, device=device)
    missing = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(key)) is not None and buffer.is_meta
    ]
    if missing:
        raise ConfigError(
            f"{_listed(missing)} of this {type(model).__name__} are on meta, and are not in checkpoints. Build the "
            "model with its buffers in memory, for example under accelerate.init_empty_weights(include_buffers=False), "
            "or set them before load_checkpoint"
        )


@torch.no_grad()
def initialize_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers of a transformers model that are on "meta" and not in checkpoints, as ``from_pretrained``."""
    missing = [
        (module, key)
        for module in model.modules()
        for key in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(key)) is not None and buffer.is_meta
    ]
    if not missing:
        return
    others = [*model.parameters(), *model.buffers()]
    for module, key in missing:
        module._buffers[key] = torch.empty_like(module._buffers[key], device=device)
    for tensor in others:
        tensor._is_hf_initialized = True  # not to be initialized
    model.initialize_weights()


def _by_key(
    model: nn.Module, hub: HubFolder, held: Mapping[str, HeldTensor], layout: Mapping[str, CheckpointTensor]
) -> dict[str, CheckpointTensor]:
    """Return what each tensor of the files is in the model: those of first names first.

    Raises:
        InputError: the model has no such tensor.
    """
    own = {
        name: CheckpointTensor(name, one.sharding.shape, one.tensor.dtype, (HubSlice(name, parameter=first),))
        for first, one in held.items()
        for name in one.names
    }
    shared = any(len(one.names) > 1 for one in held.values())
    aliases = checkpoint_layout(model, held, aliases=True) if shared else {}
    rename = _renaming(model, {*layout, *own})
    found: dict[str, CheckpointTensor] = {}
    others: dict[str, CheckpointTensor] = {}
    unknown: list[str] = []
    for key in hub:
        name = key if key in layout or key in own or key in aliases else rename(key)
        weight = key.removesuffix(SCALE)
        if weight != key and weight in hub and hub.stored(weight).dtype in FP8:
            continue
        if name in layout:
            found[key] = layout[name]
        elif name in own and name in held:
            found[key] = own[name]
        elif name in aliases or name in own:
            others[key] = aliases.get(name) or own[name]
        else:
            unknown.append(key)
    unknown = _without(unknown, _ignored(model, "unexpected"))
    if unknown:
        raise InputError(
            f"{hub.folder} has {len(unknown)} tensors that this {type(model).__name__} does not have: "
            f"{_listed(unknown)}. {_advice(model)}"
        )
    return found | others


def _advice(model: nn.Module) -> str:
    if hasattr(model, "peft_config"):
        return "The model has adapters: load the checkpoint of the unadapted model before you add them"
    return "Check that the checkpoint is of this model, with the same number of layers"


def _renaming(model: Any, names: set[str]) -> Callable[[str], str]:
    """Return a function that maps names of older checkpoints of transformers, or with another prefix, to ``names``."""
    if not isinstance(model, pretrained_class()):
        return lambda key: key
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    prefix = f"{model.base_model_prefix}."

    def rename(key: str) -> str:
        renamed = key
        for one in conversions:
            renamed = one.rename_source_key(renamed)[0]
        for name in (key, renamed):
            for variant in (name, prefix + name, name.removeprefix(prefix)):
                if variant in names:
                    return variant
        return key

    return rename


def _mismatch(entry: CheckpointTensor, stored: StoredTensor, scales: StoredTensor | None) -> str | None:
    """Return why a tensor cannot be loaded. UnsupportedModel: it is quantized."""
    if stored.shape != entry.shape:
        return f"{stored.name} has shape {list(stored.shape)}; the model requires {list(entry.shape)}"
    if scales is not None and entry.dtype.is_floating_point:
        blocks = tuple(ceil(size / QUANTIZED_BLOCK) for size in stored.shape)
        if len(blocks) != 2 or scales.shape != blocks or scales.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{scales.name} has shape {list(scales.shape)} and dtype {scales.dtype}; supported are floating-point "
                f"scales {list(blocks)}, one for each block of {QUANTIZED_BLOCK} x {QUANTIZED_BLOCK} values"
            )
        return None
    if (stored.dtype in FLOATS and entry.dtype.is_floating_point) or DTYPES.get(stored.dtype) == entry.dtype:
        return None
    raise UnsupportedModel(
        f"{stored.name} has dtype {stored.dtype}, and the model {entry.dtype}; supported are {', '.join(FLOATS)}, and "
        f"F8_E4M3 with scales ({stored.name}{SCALE}). Dequantize the checkpoint first"
    )


def _check_complete(
    model: nn.Module,
    hub: HubFolder,
    held: Mapping[str, HeldTensor],
    layout: Mapping[str, CheckpointTensor],
    covered: Mapping[str, Mapping[Any, str]],
) -> None:
    """Raise InputError unless the files have each element of the model's tensors once."""
    counts = {name: sum(prod(map(len, place)) for place in places) for name, places in covered.items()}
    short = {name for name, count in counts.items() if count < prod(held[name].sharding.shape)}
    missing = [key for key, entry in layout.items() if key not in hub and {s.parameter for s in entry.slices} & short]
    missing = _without(missing, _ignored(model, "missing"))
    if missing:
        raise InputError(
            f"{hub.folder} does not have {len(missing)} tensors of this {type(model).__name__}: {_listed(missing)}"
        )
    if meta := [name for name in short if held[name].tensor.is_meta]:
        raise InputError(
            f"{hub.folder} does not have {_listed(meta)}, which transformers would initialize. Load these models with "
            "transformers"
        )
    if twice := [name for name, count in counts.items() if count > prod(held[name].sharding.shape)]:
        keys = sorted({*covered[twice[0]].values()})
        raise InputError(f"{hub.folder} has two versions of {twice[0]}: {_listed(keys)}")


def _ignored(model: Any, kind: str) -> list[str]:
    """Return patterns of the names that transformers ignores if they are missing or unexpected in checkpoints."""
    patterns = [*(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())]
    if kind == "unexpected" and isinstance(model, pretrained_class()):
        patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]  # buffers of older versions
    return patterns


def _without(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _read(model: nn.Module, loading: _Loading) -> None:
    """Read and allocate the tensors of this rank."""
    names = sorted(loading.readings, key=lambda name: _position(loading.readings[name]))

    def read(name: str) -> None:
        tensor = loading.held[name].local
        if tensor.is_meta:
            tensor = torch.empty_like(tensor, device=loading.devices[name])
        for reading in sorted(loading.readings[name], key=lambda one: one.compared):
            reading.into(loading.hub, tensor)
        values[name] = tensor

    values: dict[str, Tensor] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(read, names):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for (layer, expert), found in sorted(
        loading.offloaded.items(), key=lambda item: _position([reading for _, reading in item[1]])
    ):
        with layer.cache.filling(layer.number, expert) as tensors:
            for key, reading in sorted(found, key=lambda item: item[1].compared):
                reading.into(loading.hub, tensors[key])
    for layer, _ in loading.offloaded:
        layer.cache.flush()
    replaced = {
        id(one.tensor): _replacement(one, values[name])
        for name, one in loading.held.items()
        if name in values and one.tensor.is_meta
    }
    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for key, tensor in members.items():
                if tensor is not None and id(tensor) in replaced:
                    members[key] = replaced[id(tensor)]
        if (copies := getattr(module, "copies", None)) is not None and hasattr(copies, "weights_changed"):
            copies.weights_changed()


def _position(readings: Sequence[_Reading]) -> tuple[str, int]:
    """Return the first place in the files, so that they are read in order."""
    return min(((one.stored.file, one.stored.offset) for one in readings), default=("", 0))


def _replacement(held: HeldTensor, value: Tensor) -> Any:
    """Return the parameter or buffer in place of one on "meta", with its attributes."""
    old = held.tensor
    if not isinstance(old, nn.Parameter):
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    mark_replaced(old, new, held.names[0], "load_checkpoint")
    return new
