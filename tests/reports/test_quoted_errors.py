"""The messages that docs/reference/errors.md quotes are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/errors.md"
LEAST, RUN = 2, 3
"""Words of a string constant that is taken for a part of a message; words in a row that one constant has, where a
quote is cut short."""
VALUES = {
    *(
        "LlamaForCausalLM",
        "Embedding",
        "Linear",
        "LlamaAttention",
        "Mixtral",
        "MixtralExperts",
        "pydantic",
        "tensorboard",
    ),
    *("ZeroDivisionError", "no such expert.", "None", "Errno", "No space left on device", "Cannot allocate memory."),
}
"""Texts in the quotes that messages take from elsewhere: names of classes, and messages of others."""


def _strings() -> Iterator[tuple[str, ...]]:
    """Yield each string constant of the packages, and each f-string as its constant parts."""
    for path in (*(ROOT / "moe_comm").rglob("*.py"), *(ROOT / "moe_plan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [""]
                for value in node.values:
                    parts = (
                        [*parts[:-1], parts[-1] + str(value.value)] if isinstance(value, ast.Constant) else [*parts, ""]
                    )
                yield tuple(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A template of str.format has fields, too.
                yield tuple(re.split(r"\{\w+\}", node.value))
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".cpp", ".h"):
            joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
            yield from ((text,) for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined))


@cache
def strings() -> list[tuple[str, ...]]:
    return sorted(set(_strings()))


@cache
def messages() -> list[tuple[str, ...]]:
    """Return the constant parts of each string with enough words."""
    result = set()
    for parts in strings():
        plain = tuple(re.sub(r"\s+", " ", part) for part in parts)
        plain = (plain[0].lstrip(), *plain[1:])
        plain = (*plain[:-1], plain[-1].rstrip())
        words = re.findall(r"[A-Za-z]+", " ".join(plain))
        if len(words) >= LEAST or (len(plain) == 1 and re.fullmatch(r"[a-z-]{4,}", plain[0])):
            result.add(plain)
    return list(result)


@cache
def all_text() -> str:
    """Return all strings, one a line."""
    return "\n".join(re.sub(r"\s+", " ", part) for parts in strings() for part in parts)


def quotes() -> list[str]:
    """Return the messages of the page. A line that is indented further continues the line before it."""
    text = PAGE.read_text().partition("## Messages")[2]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    result: list[str] = []
    for line in re.findall(r"^    ( *\S.*)$", text, re.MULTILINE):
        if line.startswith((" ", "State of each rank")):
            result[-1] += " " + line.strip()
        else:
            result.append(line)
    return result


def words_not_in_the_source(quote: str) -> list[str]:
    """Return the words of four letters or more that no string of the source has there."""
    covered = [False] * len(quote)
    spans = [match.span() for text in VALUES for match in re.finditer(re.escape(text), quote)]
    for parts in messages():
        if all(part in quote for part in parts):
            for match in re.finditer(".*?".join(f"({re.escape(part)})" for part in parts), quote):
                spans += [match.span(group + 1) for group in range(len(parts))]
    words = list(re.finditer(r"\S+", quote))
    for first, last in zip(words, words[RUN - 1 :], strict=False):
        if quote[first.start() : last.end()].strip("…") in all_text():
            spans.append((first.start(), last.end()))
    for start, end in spans:
        covered[start:end] = [True] * (end - start)
    found = re.finditer(r"[^\s,;:()…]+", quote)
    left = [one[0] for one in found if not all(covered[one.start() : one.end() - one[0].endswith(".")])]
    return [word for word in left if re.fullmatch(r"[A-Za-z]{4,}\.?|[a-z_.]+\(.*", word)]


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote[:60])
def test_each_word_of_a_quoted_message_is_in_the_source(quote: str) -> None:
    assert words_not_in_the_source(quote) == []


@pytest.mark.parametrize(
    ("quote", "words"),
    [
        ("unknown key 'run.step' (did you mean 'run.steps'?)", []),
        ("unknown key 'run.step' (perhaps you wanted 'run.steps'?)", ["perhaps", "wanted"]),
    ],
)
def test_another_wording_is_found(quote: str, words: list[str]) -> None:
    assert words_not_in_the_source(quote) == words
