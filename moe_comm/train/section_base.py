"""Base class of the sections of a configuration, which are also the options of the code that reads them."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from moe_comm.errors import ConfigError
from moe_comm.runtime.untrusted import shown

MOST = 1 << 30
"""Largest accepted width or count."""
MAX_ERRORS = 20
"""Maximum number of invalid keys in one error message."""


class Section(BaseModel):
    """Base class of all sections: frozen; rejects unknown keys, wrong types and NaN.

    Raises:
        ConfigError: a value is invalid. The message names each invalid key and, for an unknown key, the nearest one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {self.explain(error)}") from None

    # pydantic then validates nested sections without ``__init__``, and reports the errors of all of them at once.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def explain(cls, error: ValidationError) -> str:
        """Return the errors in one line that names the keys."""
        errors = error.errors()
        texts = [cls._explain(e["loc"], e["type"], e["msg"], e.get("input")) for e in errors[:MAX_ERRORS]]
        more = f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        return "; ".join(texts) + more

    @classmethod
    def _explain(cls, loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
        key = ".".join(str(part) for part in loc)
        if kind == "extra_forbidden":
            return f"unknown key {shown(key)}" + cls._suggest(loc)
        message = message.removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        got = "" if isinstance(value, dict | BaseModel) else f"; got {shown(value)}"
        return f"{key}: {message}{got}" if key else message

    @classmethod
    def _suggest(cls, loc: tuple[int | str, ...]) -> str:
        key = ".".join(str(part) for part in loc)
        keys = [k for k in cls._dotted_keys() if k.count(".") == key.count(".")]
        siblings = [k for k in keys if k.rpartition(".")[0] == key.rpartition(".")[0]]
        # The most likely mistake is the same name in another section, then a misspelling.
        name = str(loc[-1])
        near = [k for k in keys if k.rsplit(".", 1)[-1] == name]
        near = near or [k for k in siblings if difflib.get_close_matches(name, [k.rsplit(".", 1)[-1]], cutoff=0.7)]
        if near:
            return f" (did you mean {near[0]!r}?)"
        return f" (known: {', '.join(siblings or keys)})"

    @classmethod
    def _dotted_keys(cls, prefix: str = "") -> list[str]:
        keys: list[str] = []
        for name, info in cls.model_fields.items():
            keys.append(prefix + name)
            for section in get_args(info.annotation) or (info.annotation,):  # ``BalanceSection | None``
                if isinstance(section, type) and issubclass(section, Section):
                    keys += section._dotted_keys(f"{prefix}{name}.")
        return keys
