"""Changes to text that keep most of its form, so that a parser is reached behind its first check.

Everything is drawn from the ``Random`` that is given: the same one makes the same change.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**62,
    2**63,
    10**30,
    10**400,
    -(2**63),
    1.5,
    1e308,
    "",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "nan",
    "\0",
    "\x7f",
    "\ud800",
    "é\U0001f600",
    "O",
    "F64",
    "x" * 1000,
    [],
    {},
    [[]],
    [0, 2**62],
    {"": {}},
)
ODD_TEXT = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"0x" + b"F" * 4000, b"[" * 2000, b'{"a":' * 2000, b"\xff\xfe")


def mutate_json(content: bytes, random: Random) -> bytes:
    """Replace, delete, double or move a few nodes of a JSON object; of anything else, bytes."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return mutate_bytes(content, random)
    if random.random() < 0.15:
        return _spoil_text(content, random)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return mutate_bytes(content, random)
        holder, key = random.choice(places)
        how = random.randrange(5)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif how == 2:
            other, from_ = random.choice(places)
            # A copy: what is put into itself could not be written.
            holder[key] = json.loads(json.dumps(other[from_]))
        elif how == 3 and isinstance(holder[key], int):
            holder[key] += random.choice((-1, 1, 8, 1 << 40))
        else:
            holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return json.dumps(tree).encode()


def mutate_json_lines(content: bytes, random: Random) -> bytes:
    """``mutate_json`` one line of many, now and then bytes of any."""
    lines = content.splitlines(keepends=True)
    if not lines or random.random() < 0.15:
        return mutate_bytes(content, random)
    at = random.randrange(len(lines))
    lines[at] = mutate_json(lines[at].rstrip(b"\n"), random) + b"\n" * lines[at].endswith(b"\n")
    return b"".join(lines)


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """Flip, cut, double and insert a few bytes."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        end = min(len(changed), at + random.choice((1, 1, 4, 40)))
        how = random.randrange(5)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif how == 1:
            del changed[at:end]
        elif how == 2:
            changed[at:at] = changed[at:end]
        elif how == 3:
            changed[at:at] = random.choice(ODD_TEXT)
        else:
            changed[at:at] = random.randbytes(random.choice((1, 2, 8)))
    return bytes(changed)


def _spoil_text(content: bytes, random: Random) -> bytes:
    """Put in what no tree can hold: a key twice, no number, a number of thousands of digits."""
    how = random.randrange(3)
    at = content.find(b"{") + 1
    if how == 0 and at:
        end = content.find(b",", at)
        return content[:at] + content[at : end + 1] + content[at:]
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if how == 1 and digits:
        place = random.choice(digits)
        return content[:place] + random.choice(ODD_TEXT) + content[place + 1 :]
    return mutate_bytes(content, random)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) of a tree."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))
            found += [(one, key) for key in keys]
            left += [one[key] for key in keys]
    return found
