"""Agreement between ranks: an error of one rank is raised on every rank, and settings are compared.

All ranks exchange a text of fixed size, whatever they disagree on, so no rank waits for one that has failed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from moe_comm import errors
from moe_comm.errors import MoeCommError, RankMismatch

if TYPE_CHECKING:
    from moe_comm.comm.channel import Channel

T = TypeVar("T")
TEXT_BYTES = 4096
"""Size of the text that ``gather_texts`` exchanges for each rank. Longer texts are cut."""
VALUE_CHARS = 200
"""Length limit of the text of a setting."""


def agree(
    outcome: str | BaseException,
    gather: Callable[[str], list[str]],
    otherwise: type[MoeCommError] = MoeCommError,
    prefix: str = "",
) -> list[str]:
    """Return the outcome of each rank, or raise on every rank if the outcome of a rank is an error. Collective.

    A rank with an error raises it. The other ranks raise the error of the first such rank: with the same class if it is
    an error of this library, else with the class ``otherwise``.

    Args:
        gather: returns the text of each rank. Collective.
        prefix: of the message of an error of another rank.
    """
    error = outcome if isinstance(outcome, BaseException) else None
    texts = gather(f"{'' if error is None else type(error).__name__}\n{outcome}")
    if error is not None:
        raise error
    outcomes = [text.partition("\n") for text in texts]
    for rank, (name, _, message) in enumerate(outcomes):
        if name:
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, MoeCommError):
                raise kind(f"{prefix}rank {rank}: {message}")
            raise otherwise(f"{prefix}rank {rank}: {name}: {message}")
    return [message for _, _, message in outcomes]


def attempt(action: Callable[[], T], gather: Callable[[str], list[str]]) -> T:
    """Return the result of ``action``, or raise on every rank if it raises an error of this library. Collective."""
    outcome: str | MoeCommError = ""
    try:
        result = action()
    except MoeCommError as error:
        outcome = error
    agree(outcome, gather)
    return result


def gather_texts(channel: Channel, description: str, text: str) -> list[str]:
    """Return each rank's ``text``. Collective."""
    raw = bytearray(text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
    sent = torch.frombuffer(raw, dtype=torch.uint8).to(channel.control_device)
    rows = channel.all_gather(sent, description).cpu().numpy()
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


def digest(*values: object) -> int:
    """Return a checksum for comparing values of any type between ranks."""
    return zlib.crc32(repr(values).encode())


def compare(
    channel: Channel,
    what: str,
    same: Mapping[str, object],
    facts: Mapping[str, int] | None = None,
    fault: MoeCommError | None = None,
) -> dict[str, list[int]]:
    """Exchange and compare settings. Every rank of the group must call this, whatever its settings are.

    Args:
        channel: a channel of the group.
        what: the object being built, for messages.
        same: settings of any type that must be equal on all ranks. The error names the fields of a dataclass that
            differ.
        facts: integers that may differ.
        fault: an error in this rank's settings. It is raised here, and with its text on every other rank.

    Returns:
        The values of ``same`` (integers or checksums) and ``facts``, by name and rank.

    Raises:
        RankMismatch: a setting differs.
        The class of the fault: the settings of a rank are invalid.
    """
    numbers = {name: value if isinstance(value, int) else digest(value) for name, value in same.items()}
    lines = [f"{field}\t{text[:VALUE_CHARS]}" for name, value in same.items() for field, text in _as_text(name, value)]
    # If the text is too long, the texts of the last settings are cut, and not the numbers.
    outcome = fault if fault is not None else "\n".join((json.dumps([numbers, facts or {}]), *lines))
    texts = agree(outcome, lambda text: gather_texts(channel, f"building {what}", text))
    same_W, facts_W = zip(*(json.loads(text.partition("\n")[0]) for text in texts), strict=True)
    same_by_rank = _by_rank(same_W)
    if differing := [name for name, values in same_by_rank.items() if len(set(values)) > 1]:
        names = ", ".join(differing)
        shown = differences([text.partition("\n")[2] for text in texts])
        raise RankMismatch(
            f"ranks disagree on {names} when building {what}: "
            f"{shown.removeprefix(f'{names}: ') or 'their values are too long to show'}. "
            "All ranks of a group must use the same settings."
        )
    return same_by_rank | _by_rank(facts_W)


def _by_rank(numbers_W: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return the numbers by name and rank; -1 where a rank does not have the name."""
    return {name: [numbers.get(name, -1) for numbers in numbers_W] for of_rank in numbers_W for name in of_rank}


def differences(texts: list[str]) -> str:
    """Return the differences between the texts of ranks, which have lines of a name, a tab and a value."""
    by_rank = [dict(line.partition("\t")[::2] for line in text.split("\n")) for text in texts]
    values_of = {name: [values.get(name, "not given") for values in by_rank] for values in by_rank for name in values}
    return "; ".join(
        f"{name}: " + ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        for name, values in values_of.items()
        if len(set(values)) > 1
    )


def _as_text(name: str, value: object) -> list[tuple[str, str]]:
    """Return names and texts of ``value``, or of the fields of a dataclass and the entries of a mapping."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, Mapping):
        return [(name, " ".join(repr(value).split()))]
    return [
        (key if key == inner else f"{key}.{inner}", text)
        for key, item in value.items()
        for inner, text in _as_text(str(key), item)
    ]
