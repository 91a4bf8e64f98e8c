"""``save_checkpoint``: each rank writes the bytes of its part of a model into shared safetensors files.

1. plan      files, headers and offsets, the same on all ranks; the parts that each rank writes
2. create    rank 0: the files in their final size, in a temporary folder inside the folder
3. write     all ranks: their byte ranges, then fsync
4. commit    rank 0: moves the files, the index or the only file last. Before several files are moved, the file or index
             of an older checkpoint is removed

After each step all ranks raise the first error. Rank 0 then removes the temporary folder, unless the commit failed: it
keeps the complete files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import (
    WRITE_TIMEOUT_S,
    communicator_of,
    group_or_default,
    group_rank,
    group_size,
)
from moe_comm.errors import CheckpointError, MoeCommError, RankMismatch, UnsupportedModel
from moe_comm.integrations.checkpoint.files import SINGLE
from moe_comm.integrations.checkpoint.layout import (
    CheckpointTensor,
    HeldTensor,
    checkpoint_layout,
    held_tensors,
    pretrained_class,
    unwrapped,
)
from moe_comm.integrations.checkpoint.plan import (
    Described,
    FilePlan,
    Region,
    assign,
    index_name,
    index_text,
    parse_size,
    plan_files,
)
from moe_comm.integrations.checkpoint.write import Part, Target, create, nbytes, values_of, write_values
from moe_comm.runtime.safe_files import check_replaceable, move_file, remove, sync_to_disk, write_file

_log = logging.getLogger(__name__)
T = TypeVar("T")
VISIBLE_S = 10.0
"""Time that ranks wait until they see a file that rank 0 has created. Network file systems cache missing names."""
_TEMPORARY = ".saving-"


def save_checkpoint(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    group: ProcessGroup | None = None,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the unswapped model as safetensors, in parallel from all ranks. Collective.

        moe_comm.save_checkpoint(model, "trained")                      # every rank calls it
        again = AutoModelForCausalLM.from_pretrained("trained")         # or moe_comm.from_pretrained, on any ranks

    Each rank writes the experts, heads and rows that it holds, and its share of what all ranks hold. No rank gathers
    anything: besides the model, a rank needs 16 MiB, and for blocks that store gate and up alternately one expert. The
    names, files and values are those that ``save_pretrained`` of the unswapped model writes. Models that are not of
    transformers have the names of their state dict, for ``moe_comm.load_checkpoint`` or
    ``load_state_dict(safetensors.torch.load_file(...))``, and so have families of transformers whose layout on the hub
    is not supported; ``from_pretrained`` loads them, too.

    The files replace an older checkpoint in ``folder`` when they are complete. If the process is killed, the folder has
    either the older checkpoint or, with several files, none that ``from_pretrained`` accepts.

    Args:
        model: a swapped model, or one with ``MoELayer``, also under DDP or FSDP2, or any other module that all ranks
            hold with equal weights.
        folder: on a file system that all ranks share.
        group: the ranks that hold the model; all of them call this function. None: the default group.
        max_shard_size: maximum size of a file, in bytes, or text such as "5GB". A larger tensor gets a separate file.
        dtype: of the floating-point tensors in the files. None: that of the model.

    Raises:
        ConfigError: ``max_shard_size`` is invalid, or a tensor has a dtype that safetensors do not have.
        UnsupportedModel: the model has adapters, or parts that cannot be written.
        RankMismatch: ranks pass different models or settings.
        CheckpointError: the file system is not shared, a rank could not write, or no rank holds a part of the model.
            All errors are raised on every rank.
    """
    try:
        write_checkpoint(model, Path(folder), group, Settings(max_shard_size, dtype))
    except OSError as error:
        raise CheckpointError(f"could not write the model to {folder}: {error}") from error


@dataclass(frozen=True)
class Settings:
    """Settings of ``write_checkpoint``.

    Attributes:
        max_shard_size, dtype: see ``save_checkpoint``.
        single: name of the file if there is one.
        failure: class of the error on other ranks if one cannot write.
        hub_layout: write a model of transformers in the layout of the hub, else in that of its state dict.
        state_only: write all of the state dict, tensors with several names once, and no configuration.
    """

    max_shard_size: int | str = "5GB"
    dtype: torch.dtype | None = None
    single: str = SINGLE
    failure: type[MoeCommError] = CheckpointError
    hub_layout: bool = True
    state_only: bool = False


def write_checkpoint(model: nn.Module, folder: Path, group: ProcessGroup | None, settings: Settings) -> None:
    """Write a checkpoint; see ``save_checkpoint``. Collective.

    Raises:
        OSError: this rank could not write. The other ranks raise ``settings.failure``.
        MoeCommError: see ``save_checkpoint``.
    """
    write_plan(lambda: Plan.of(model, settings), folder, group, settings.failure)


def write_plan(
    make: Callable[[], Plan], folder: Path, group: ProcessGroup | None, failure: type[MoeCommError] = CheckpointError
) -> None:
    """Write what the plans of all ranks describe; see ``write_checkpoint``. Collective."""
    ranks = _Ranks(group_or_default(group), folder, failure)
    plan, _ = ranks.attempt(make)
    mine = assign(plan.described, ranks.exchange(plan))[ranks.rank]
    committing = False
    temporary, existed = folder / f"{_TEMPORARY}{secrets.token_hex(6)}", folder.exists()
    try:
        _, names = ranks.attempt(lambda: _create(folder, temporary, plan) if ranks.rank == 0 else None, temporary.name)
        shared = folder / names[0]
        ranks.attempt(lambda: _wait_for(shared / plan.files[0].name))
        ranks.attempt(lambda: plan.write(shared, mine))
        committing = True
        ranks.attempt(lambda: _commit(folder, shared, plan) if ranks.rank == 0 else None)
        committing = False
    finally:
        if ranks.rank == 0 and not committing:  # else the files there are complete
            with suppress(OSError):
                remove(temporary)
                if not existed:
                    folder.rmdir()  # if it is empty


def is_shared(folder: Path, group: ProcessGroup | None) -> bool:
    """Create ``folder``, and return whether all ranks see what rank 0 writes there. Collective.

    Raises:
        OSError: rank 0 could not write. The other ranks raise CheckpointError.
    """
    ranks, probe = _Ranks(group_or_default(group), folder, CheckpointError), f"{_TEMPORARY}{secrets.token_hex(6)}"
    _, names = ranks.attempt(lambda: (folder / probe).mkdir(parents=True) if ranks.rank == 0 else None, probe)
    try:
        ranks.attempt(lambda: _wait_for(folder / names[0]))
    except (CheckpointError, OSError):  # an OSError on the rank that cannot read the folder
        return False
    finally:
        if ranks.rank == 0:
            remove(folder / probe)
    return True


class _Ranks:
    """The ranks that write a checkpoint."""

    def __init__(self, group: ProcessGroup | None, folder: Path, failure: type[MoeCommError]) -> None:
        self.rank = group_rank(group)
        self._folder, self._failure = folder, failure
        self._channel: Channel | None = None
        if group is not None and group_size(group) > 1:
            # Ranks wait longer than in other collectives, because writing a model can take many minutes.
            self._channel = Channel(communicator_of(group), WRITE_TIMEOUT_S)

    def attempt(self, action: Callable[[], T], text: str = "") -> tuple[T, list[str]]:
        """Return the result of ``action`` and the text of each rank. Collective.

        If the action raises on a rank, all ranks raise.
        """
        result: T | None = None
        outcome: str | Exception = text
        try:
            result = action()
        except Exception as error:
            outcome = error
        texts = agree(outcome, self._gather, self._failure, f"could not write the model to {self._folder}: ")
        return result, texts  # type: ignore[return-value]

    def exchange(self, plan: Plan) -> list[dict[str, list[Region]]]:
        """Return the regions that each rank holds, by tensor. Collective.

        Raises:
            RankMismatch: the plans of the ranks differ.
        """
        raw = zlib.compress(json.dumps(plan.regions).encode())
        _, texts = self.attempt(lambda: None, f"{plan.digest} {len(raw)}")
        digests, lengths = zip(*(map(int, text.split()) for text in texts), strict=True)
        if len({*digests}) > 1:
            differing = next(rank for rank, one in enumerate(digests) if one != digests[0])
            raise RankMismatch(
                f"ranks 0 and {differing} would write different checkpoints. All ranks must pass the same model, "
                "max_shard_size and dtype"
            )
        if self._channel is None:
            return [plan.regions]
        padded = torch.frombuffer(bytearray(raw.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        rows = (
            self._channel.all_gather(padded.to(self._channel.control_device), f"writing {self._folder}").cpu().numpy()
        )
        parts = (json.loads(zlib.decompress(row[:n].tobytes())) for row, n in zip(rows, lengths, strict=True))
        return [
            {name: [tuple(map(tuple, region)) for region in regions] for name, regions in part.items()}
            for part in parts
        ]

    def _gather(self, text: str) -> list[str]:
        if self._channel is None:
            return [text]
        return gather_texts(self._channel, f"writing the model to {self._folder}", text)


@dataclass(frozen=True)
class Plan:
    """What all ranks write, and what this rank holds.

    Attributes:
        layout: the tensors of the checkpoint.
        dtypes: in the files.
        files: the files of the checkpoint.
        described: parameters and buffers by name.
        parts: those of this rank.
        extras: writes the other files of the checkpoint into a folder.
        metadata: of the index.
        single: name of the file if there is one.
    """

    layout: Mapping[str, CheckpointTensor]
    dtypes: Mapping[str, torch.dtype]
    files: Sequence[FilePlan]
    described: Mapping[str, Described]
    parts: Mapping[str, Part]
    extras: Callable[[Path], None]
    metadata: Mapping[str, int]
    single: str

    @classmethod
    def of(cls, model: nn.Module, settings: Settings) -> Plan:
        model = unwrapped(model)
        if settings.hub_layout:
            _refuse_adapters(model)
        _refuse_other_state(model)
        held = held_tensors(model)
        if not settings.state_only:
            held = _saved(model, held)
        layout_of = partial(checkpoint_layout, model, held, aliases=not settings.state_only)
        try:
            layout = layout_of(hub=settings.hub_layout)
        except UnsupportedModel as error:  # transformers also loads state dicts
            _log.warning("%s; the tensors are written as they are in memory", error)
            layout = layout_of(hub=False)
        dtypes = {
            name: entry.dtype if settings.dtype is None or not entry.dtype.is_floating_point else settings.dtype
            for name, entry in layout.items()
        }
        tensors = {name: (entry.shape, dtypes[name]) for name, entry in layout.items()}
        described = {
            name: Described(one.sharding.shape, one.tensor.element_size(), not isinstance(one.tensor, nn.Parameter))
            for name, one in held.items()
        }
        metadata = {"total_size": sum(nbytes(*of_tensor) for of_tensor in tensors.values())}
        extras: Callable[[Path], None] = nothing
        if isinstance(model, pretrained_class()):
            if not settings.state_only:
                extras = partial(_write_config, model, settings.dtype)
            total = sum(nbytes(one.shape) for one in described.values() if not one.is_buffer)
            metadata = {"total_parameters": total} | metadata
        return cls(
            layout,
            dtypes,
            plan_files(tensors, parse_size(settings.max_shard_size), settings.single),
            described,
            {name: Part.of(one) for name, one in held.items()},
            extras,
            metadata,
            settings.single,
        )

    @property
    def regions(self) -> dict[str, list[Region]]:
        """The regions that this rank holds of each parameter."""
        return {
            name: [tuple((s.start, s.stop) for s in box.full) for box in part.boxes if part.tensor.numel()]
            for name, part in self.parts.items()
        }

    @property
    def digest(self) -> int:
        """A checksum of what must be equal on all ranks."""
        slices = [(one.name, one.slices) for one in self.layout.values()]
        return zlib.crc32(repr([self.files, self.described, slices]).encode())

    @property
    def mark(self) -> str:
        """The name of the file without which a folder is no checkpoint."""
        return self.single if len(self.files) == 1 else index_name(self.single)

    def create(self, folder: Path) -> None:
        """Create all files in ``folder``: those of values in their final size, the others complete."""
        self.extras(folder)
        if len(self.files) > 1:
            write_file(folder / index_name(self.single), index_text(self.files, self.metadata))
        for name in os.listdir(folder):
            if os.path.isfile(folder / name):
                sync_to_disk(folder / name)
        for planned in self.files:
            create(folder / planned.name, planned)

    def offsets(self, folder: Path, planned: FilePlan) -> Mapping[str, int]:
        """Return the first byte of each tensor in a file of ``folder``."""
        return planned.offsets

    @torch.no_grad()
    def write(self, folder: Path, mine: Mapping[str, Sequence[Region]]) -> None:
        """Write this rank's bytes. mine: the regions of parameters."""
        boxes = {name: [self.parts[name].box(region) for region in regions] for name, regions in mine.items()}
        for planned in self.files:
            handle: int | None = None
            try:
                for name, offset in self.offsets(folder, planned).items():
                    for hub, values in values_of(self.layout[name], self.described, self.parts, boxes):
                        if handle is None:
                            handle = os.open(folder / planned.name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                        write_values(Target(handle, offset, self.layout[name].shape, self.dtypes[name]), hub, values)
                if handle is not None:
                    os.fsync(handle)
            finally:
                if handle is not None:
                    os.close(handle)


def nothing(folder: Path) -> None:
    """Write no other files."""


def _refuse_adapters(model: nn.Module) -> None:
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise UnsupportedModel(
            f"this {type(model).__name__} has adapters, and save_checkpoint writes models without them. Merge the "
            "adapters first (merge_and_unload), or save the adapters alone"
        )


def _refuse_other_state(model: nn.Module) -> None:
    """Raise UnsupportedModel if a state dict has more than parameters and buffers, as of quantized layers."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind._save_to_state_dict is nn.Module._save_to_state_dict and (
            kind.get_extra_state is nn.Module.get_extra_state
        ):
            continue
        state: dict[str, Any] = {}
        module._save_to_state_dict(state, "", True)
        if other := next((key for key in state if key not in (*module._parameters, *module._buffers)), None):
            raise UnsupportedModel(
                f"{name} ({kind.__name__}) has {other} in its state dict, which is no parameter or buffer, so it would "
                "be lost. If the layer is quantized, dequantize the model first; adapters alone can be saved"
            )


def _saved(model: Any, held: Mapping[str, HeldTensor]) -> dict[str, HeldTensor]:
    """Return the tensors with the names that are written: as transformers, not those that its models tie."""
    if not isinstance(model, pretrained_class()):
        return dict(held)
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    tied = [
        f"{prefix}.{key}".lstrip(".")
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    result = {}
    for one in held.values():
        names = [name for name in one.names if name not in ignored]
        if len(names) > 1:
            untied = [name for name in names if not any(re.search(pattern, name) for pattern in tied)]
            names = untied or [max(names)]
        if names:
            result[names[0]] = replace(one, names=tuple(names))
    return result


def _write_config(model: Any, dtype: torch.dtype | None, folder: Path) -> None:
    """Write the configurations of a transformers model, and its code if that is not in transformers."""
    type(model).save_pretrained(model, folder, state_dict={})
    if dtype is not None:
        before, model.config.dtype = model.config.dtype, str(dtype).removeprefix("torch.")
        try:
            model.config.save_pretrained(folder)
        finally:
            model.config.dtype = before


def _create(folder: Path, temporary: Path, plan: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):  # of a process that was killed
            remove(folder / name)
    temporary.mkdir()
    plan.create(temporary)
    for path in temporary.iterdir():
        check_replaceable(folder / path.name)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"the file {path}, which rank 0 has created, does not exist here. All ranks must write to one shared "
                "file system; pass a folder on one"
            )
        time.sleep(0.05)


def _commit(folder: Path, temporary: Path, plan: Plan) -> None:
    """Move the complete files into ``folder``, and keep them in ``temporary`` after an error."""
    try:
        _move(folder, temporary, plan)
    except OSError as error:
        kept = f"{error.strerror}; the complete files are in {temporary} until the next save, as far as not moved"
        raise OSError(error.errno, kept, error.filename) from error


def _move(folder: Path, temporary: Path, plan: Plan) -> None:
    """Move the files: first none that makes the folder a checkpoint, that one last."""
    index = folder / index_name(plan.single)
    if plan.mark != plan.single:  # else one file replaces the older one, and is preferred to an older index
        remove(folder / plan.single)
        remove(index)
        sync_to_disk(folder)
    names = [name for name in sorted(os.listdir(temporary)) if name != plan.mark]
    for name in (*names, plan.mark):
        if name == plan.mark:
            sync_to_disk(folder)
        move_file(temporary / name, folder / name)
    if plan.mark == plan.single:
        sync_to_disk(folder)
        remove(index)
    stem, _, suffix = plan.single.rpartition(".")
    shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.{suffix}")
    for old in os.listdir(folder):
        if shard.fullmatch(old) and old not in names:
            remove(folder / old)
    temporary.rmdir()
    sync_to_disk(folder)
