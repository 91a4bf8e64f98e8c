"""Write the generated parts of the documentation from the code: commands, configuration, options, errors, API.

    python -m benchmarks.generate_docs            # write the pages
    python -m benchmarks.generate_docs --check    # exit with 1 if a page is not current; change nothing

A generated part is the text between ``<!-- generated:NAME -->`` and ``<!-- /generated -->``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from benchmarks import signatures
from moe_comm import cli, errors
from moe_comm.lazy import stub_names

ROOT = Path(__file__).parent.parent
STUDIES = ("soak", "diagnosis", "plan_validation")
OPTION_CLASSES = (
    "moe_comm.layers.MoEConfig",
    "moe_comm.layers.RouterConfig",
    "moe_comm.layers.ZeroExperts",
    "moe_comm.dispatch.slots.capacity.Capacity",
    "moe_comm.dispatch.DispatchOptions",
    "moe_comm.dispatch.WireDtypes",
    "moe_comm.dispatch.PeerToPeerOptions",
    "moe_comm.overlap.options.Overlap",
    "moe_comm.layers.AttentionConfig",
    "moe_comm.layers.RopeConfig",
    "moe_comm.layers.MLAConfig",
    "moe_comm.layers.TransformerConfig",
    "moe_comm.layers.ModelPlan",
    "moe_comm.comm.communicator.CollectiveOptions",
    "moe_comm.topology.ParallelConfig",
    "moe_comm.runtime.watch.WatchOptions",
)
API_MODULES = {
    "moe_comm": "Main names",
    "moe_comm.dispatch": "Dispatch",
    "moe_comm.layers": "Layers",
    "moe_comm.layers.data_parallel": "Data-parallel training loops",
    "moe_comm.integrations.hugging_face": "Hugging Face",
    "moe_comm.integrations.axolotl": "axolotl",
    "moe_comm.integrations.deepep": "DeepEP",
    "moe_comm.integrations.deepspeed": "DeepSpeed",
    "moe_comm.integrations.lightning": "Lightning",
    "moe_comm.integrations.megatron": "Megatron-Core",
    "moe_comm.integrations.sglang": "SGLang",
    "moe_comm.integrations.torchtitan": "torchtitan",
    "moe_comm.integrations.tutel": "Tutel",
    "moe_comm.integrations.vllm": "vLLM",
    "moe_comm.topology": "Topology",
    "moe_comm.train": "Training",
    "moe_comm.train.data": "Data",
    "moe_comm.train.checkpoint": "Checkpoints",
}
ADAPTERS = tuple(
    f"moe_comm.integrations.{name}"
    for name in ("axolotl", "deepspeed", "lightning", "megatron", "sglang", "torchtitan", "tutel", "vllm")
)
"""Packages that need another system to be imported. Their stubs name classes and functions only."""


def cell(text: str) -> str:
    """Return ``text`` on one line, with escapes for a cell of a Markdown table."""
    text = " ".join(text.replace("``", "`").split())
    return text.replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def described(doc: str | None, names: list[str]) -> dict[str, str]:
    """Return the description of each of ``names`` from a docstring with entries ``name: text`` or ``a, b: text``."""
    any_name = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    entry = re.compile(rf"(?:^|(?<=[.;:)\n] )|(?<=\n))((?:{any_name})(?:, (?:{any_name}))*)(?: \([^)]*\))?: ")
    descriptions: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")):
        text = " ".join(paragraph.split())
        marks = list(entry.finditer(text))
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            description = text[mark.end() : following.start() if following else None].strip()
            for name in mark[1].split(", "):
                descriptions.setdefault(name, description)
    return descriptions


def allowed(kind: Any) -> str:
    """Return a type in words: the values of a Literal, ``integer``, ``text``, ..."""
    names = {int: "integer", float: "number", str: "text", bool: "true, false", types.NoneType: "none"}
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{toml(value)}`" for value in get_args(kind))
    if origin in (Union, types.UnionType):
        return ", ".join(allowed(one) for one in get_args(kind))
    if origin is Annotated:
        return ", ".join(filter(None, (allowed(kind.__origin__), bounds(kind.__metadata__))))
    if hasattr(kind, "model_fields"):
        return "table"
    if origin in (list, tuple):
        inner = [one for one in get_args(kind) if one is not Ellipsis]
        return f"list of {', '.join(dict.fromkeys(allowed(one) for one in inner))}"
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def toml(value: Any) -> str:
    """Return a value in TOML notation; None is ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(one) for one in value)}]"
    return str(value)


def bounds(metadata: Sequence[Any]) -> str:
    """Return the limits of a number or a length, such as ``≥ 1, < 2147483648``."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [limit for one in metadata for limit in getattr(one, "metadata", [one])]  # those of Field(...), or one
    shown = [f"{sign} {getattr(one, name)}" for one in limits for name, sign in signs.items() if hasattr(one, name)]
    return ", ".join(shown)


def configuration() -> str:
    """Return tables of all keys of a training configuration, by section."""
    config: Any = importlib.import_module("moe_comm.train.config").TrainConfig
    parts = []
    for section, field in config.model_fields.items():
        summary = inspect.cleandoc(field.annotation.__doc__ or "").split("\n\n")[0]
        rows = keys_of(section, field.annotation)
        parts += [f"## {section}", cell(summary), table(("key", "default", "values", "meaning"), rows)]
    return "\n\n".join(parts)


def keys_of(section: str, kind: Any) -> list[tuple[str, ...]]:
    """Return a row for each key of a section, and after it those of the section that is its value."""
    rows: list[tuple[str, ...]] = []
    docs = [inspect.cleandoc(base.__doc__ or "") for base in kind.__mro__ if hasattr(base, "model_fields")]
    meanings = described("\n\n".join(docs), list(kind.model_fields))
    for name, one in kind.model_fields.items():
        values = ", ".join(filter(None, (allowed(one.annotation), bounds(one.metadata))))
        default = toml(one.get_default(call_default_factory=True))
        rows.append((f"`{section}.{name}`", f"`{default}`", cell(values), cell(meanings[name])))
        for inner in get_args(one.annotation):
            rows += keys_of(f"{section}.{name}", inner) if hasattr(inner, "model_fields") else []
    return rows


def load(path: str) -> Any:
    """Return the object with a dotted name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a dataclass field as code; empty if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return ""
    shown = f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)
    return f"`{shown}`"


def options() -> str:
    """Return tables of the fields of ``OPTION_CLASSES``."""
    parts = []
    for path in OPTION_CLASSES:
        kind = load(path)
        fields = dataclasses.fields(kind)
        meanings = described(kind.__doc__, [one.name for one in fields])
        rows = [
            (f"`{one.name}`", f"`{cell(str(one.type))}`", default_of(one), cell(meanings.get(one.name, "")))
            for one in fields
            if one.init
        ]
        summary = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        where = f"`{path.rpartition('.')[0]}`"
        parts += [f"## {kind.__name__}", f"{cell(summary)} In {where}."]
        parts.append(table(("field", "type", "default", "meaning"), rows))
    return "\n\n".join(parts)


def error_table() -> str:
    """Return a table of all error classes with their bases and meanings."""
    rows = []
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MoeCommError) and kind is not errors.MoeCommError:
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.MoeCommError)
            rows.append((f"`{name}`", bases, cell(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0])))
    return table(("error", "also a", "meaning"), rows)


def commands_of(command: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield all subcommands with their full names."""
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from commands_of(child, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", child


def parameter_row(parameter: Any) -> tuple[str, str, str, str]:
    """Return name, values, default and meaning of an argument or option."""
    is_option = hasattr(parameter, "is_flag")
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [argument_name(parameter)]
    help_text = parameter.help or ""
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if written := re.search(r"\s*\[default: ([^\]]*)\]", help_text):
        default, help_text = written[1], help_text.replace(written[0], "")
    kind = parameter.type_descriptor.annotation
    if kind is bool and isinstance(default, bool):
        default = [*parameter.opts, *parameter.secondary_opts][0 if default else -1] if parameter.secondary_opts else ""
    values = (
        "" if kind is bool else f"`{parameter.metavar}`" if parameter.metavar and is_option else option_values(kind)
    )
    limits = [f"{sign} {bound}" for sign, bound in (("≥", parameter.min), ("≤", parameter.max)) if bound is not None]
    if getattr(parameter, "multiple", False):
        limits.append("repeatable")
    shown = ", ".join(map(str, default)) if isinstance(default, list | tuple) else default
    if shown in (None, "") or callable(shown):
        text = "required" if parameter.required else ""
    else:
        text = f"`{cell(str(getattr(shown, 'value', shown)))}`"
    allowed_values = ", ".join(filter(None, (values, *limits)))
    return ", ".join(f"`{one}`" for one in names), cell(allowed_values), text, cell(help_text)


def option_values(kind: Any) -> str:
    """Return the possible values of an option."""
    if get_origin(kind) in (Union, types.UnionType, list, tuple):
        kind = next(one for one in get_args(kind) if one is not types.NoneType)
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return ", ".join(f"`{one.value}`" for one in kind)
    return allowed(kind).replace('"', "")


def argument_name(parameter: Any) -> str:
    """Return the name of an argument as in the usage line of its command."""
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def command_section(heading: str, name: str, command: Any) -> str:
    """Return the section of one command: its help, usage and options."""
    arguments = [one for one in command.params if not hasattr(one, "is_flag")]
    usage = " ".join([name, *map(argument_name, arguments)])
    rows = [parameter_row(one) for one in command.params if "--help" not in one.opts]
    help_text = inspect.cleandoc(command.help or "").split("\f")[0].strip()
    parts = [f"{heading} {name}", " ".join(help_text.split()), f"    {usage} [OPTIONS]"]
    return "\n\n".join([*parts, table(("option", "values", "default", "meaning"), rows)] if rows else parts)


def commands() -> str:
    """Return the sections of all commands of ``moe-comm``."""
    named_commands = list(commands_of(typer.main.get_command(cli.app), "moe-comm"))
    rows = []
    for name, command in named_commands:
        first = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
        rows.append((f"[`{name}`](#{name.replace(' ', '-')})", cell(first)))
    return "\n\n".join([table(("command", "function"), rows), *(command_section("##", *one) for one in named_commands)])


def studies() -> str:
    """Return the sections of the benchmarks in ``STUDIES``, which are commands with options."""
    parts = []
    for name in STUDIES:
        command = typer.main.get_command(importlib.import_module(f"benchmarks.{name}.__main__").app)
        parts.append(command_section("###", f"python -m benchmarks.{name}", command))
    return "\n\n".join(parts)


def api() -> str:
    """Return a section with the signature of each public class and function."""
    parts: list[str] = []
    seen: set[str] = set()
    for module, title in API_MODULES.items():
        names = {path: names for path, names in defined_names(module).items() if path not in seen}
        seen.update(names)
        if names:
            parts += [f"## {title}", f"Import from `{module}`.", *(signatures.entry(*one) for one in names.items())]
    return "\n\n".join(parts)


def defined_names(package: str) -> dict[str, list[str]]:
    """Return the names of each public class and function of a package, by the path of its definition."""
    found: dict[str, list[str]] = {}
    if package in ADAPTERS:
        modules = stub_names(ROOT / package.replace(".", "/") / "__init__.pyi")
        return {f"{modules[name]}.{name}": [name] for name in sorted(modules, key=str.lower)}
    loaded = importlib.import_module(package)
    for name in sorted(loaded.__all__, key=str.lower):
        value = getattr(loaded, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            found.setdefault(f"{value.__module__}.{value.__qualname__}", []).append(name)
    return found


def mesh() -> str:
    """Return the output of ``moe-comm mesh small``."""
    parallel = importlib.import_module("moe_comm.train.config").load("small").parallel
    picture = load("moe_comm.topology.picture")
    return f"```text\n{picture(parallel.mapping(parallel.ranks)).rstrip()}\n```"


BLOCKS = {
    "cli": ("docs/reference/cli.md", commands),
    "studies": ("docs/reference/cli.md", studies),
    "configuration": ("docs/reference/configuration.md", configuration),
    "options": ("docs/reference/options.md", options),
    "errors": ("docs/reference/errors.md", error_table),
    "api": ("docs/reference/api.md", api),
    "mesh": ("docs/parallelism.md", mesh),
}


def current(page: str, name: str, text: str) -> str:
    """Return the text ``page`` with the content of the block ``name`` replaced."""
    written, count = re.subn(
        rf"(<!-- generated:{name} -->\n).*?(<!-- /generated -->)",
        lambda match: f"{match[1]}\n{text}\n\n{match[2]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"a page has {count} blocks generated:{name}; expected 1")
    return written


def pages() -> dict[Path, str]:
    """Return the current text of every page with generated parts, by path."""
    texts: dict[Path, str] = {}
    for name, (page, block) in BLOCKS.items():
        path = ROOT / page
        texts[path] = current(texts.get(path, path.read_text()), name, block())
    return texts


def main() -> None:
    """Write the pages, or compare them if ``--check`` is given."""
    stale = [path for path, text in pages().items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            raise SystemExit(f"not current: {names}; run python -m benchmarks.generate_docs")
        return
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
