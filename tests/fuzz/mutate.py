"""Mutations that keep most of the structure of a file, so that they get past the first check of a parser.

All random choices come from the ``Random`` argument: the same seed makes the same mutation.
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
    """Replace, delete, duplicate or move a few nodes of a JSON tree. Mutate the bytes of other content."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return mutate_bytes(content, random)
    if random.random() < 0.15:
        return _insert_invalid_text(content, random)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        nodes = list(_nodes(tree))
        if not nodes:
            return mutate_bytes(content, random)
        container, key = random.choice(nodes)
        action = random.randrange(5)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, list):
            container.insert(key, container[key])
        elif action == 2:
            source, source_key = random.choice(nodes)
            # Copy the node: a tree that contains itself cannot be serialized.
            container[key] = json.loads(json.dumps(source[source_key]))
        elif action == 3 and isinstance(container[key], int):
            container[key] += random.choice((-1, 1, 8, 1 << 40))
        else:
            container[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return json.dumps(tree).encode()


def mutate_json_lines(content: bytes, random: Random) -> bytes:
    """Apply ``mutate_json`` to one line, or sometimes ``mutate_bytes`` to all lines."""
    lines = content.splitlines(keepends=True)
    if not lines or random.random() < 0.15:
        return mutate_bytes(content, random)
    index = random.randrange(len(lines))
    lines[index] = mutate_json(lines[index].rstrip(b"\n"), random) + b"\n" * lines[index].endswith(b"\n")
    return b"".join(lines)


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """Flip, delete, duplicate and insert a few bytes."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        start = random.randrange(len(changed) + 1)
        end = min(len(changed), start + random.choice((1, 1, 4, 40)))
        action = random.randrange(5)
        if action == 0 and start < len(changed):
            changed[start] ^= 1 << random.randrange(8)
        elif action == 1:
            del changed[start:end]
        elif action == 2:
            changed[start:start] = changed[start:end]
        elif action == 3:
            changed[start:start] = random.choice(ODD_TEXT)
        else:
            changed[start:start] = random.randbytes(random.choice((1, 2, 8)))
    return bytes(changed)


def _insert_invalid_text(content: bytes, random: Random) -> bytes:
    """Insert text that no JSON tree can hold: a duplicate key, NaN, a number with thousands of digits."""
    action = random.randrange(3)
    start = content.find(b"{") + 1
    if action == 0 and start:
        end = content.find(b",", start)
        return content[:start] + content[start : end + 1] + content[start:]
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    if action == 1 and digits:
        position = random.choice(digits)
        return content[:position] + random.choice(ODD_TEXT) + content[position + 1 :]
    return mutate_bytes(content, random)


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Return the (container, key) of every node of a tree."""
    nodes: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        container = stack.pop()
        if isinstance(container, dict | list):
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            nodes += [(container, key) for key in keys]
            stack += [container[key] for key in keys]
    return nodes
