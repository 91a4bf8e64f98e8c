"""Versions of the systems that adapters are written for, and the one way in which an adapter requires its system."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moe_comm.errors import ConfigError, MissingDependency, pip_install
from moe_comm.lazy import attach_stub

SUPPORTED: dict[str, tuple[str, str, str]] = {
    "transformers": ("5.16.1", "6", "hf"),
    "peft": ("0.20.0", "0.21", "peft"),
    "axolotl": ("0.19.0", "0.20", "axolotl"),
    "torchtitan": ("0.3.0", "0.4", "torchtitan"),
    "megatron-core": ("0.16.0", "0.17", "megatron"),
    "lightning": ("2.6.0", "2.7", "lightning"),
    "deepspeed": ("0.19.8", "0.20", "deepspeed"),
    "sglang": ("0.5.23", "0.5.24", "sglang"),
    "vllm": ("0.32.0", "0.33", "vllm"),
}
"""Package: lowest supported version, first unsupported version, and the extra that installs it."""
LOWEST_TORCH = "2.11"
"""As in pyproject.toml."""
MODULES = {"megatron-core": "megatron.core.package_info", "vllm": "vllm"}
"""Package that people also use from a checkout or install under another name: the module with its ``__version__``."""


def require(package: str, purpose: str) -> str:
    """Return the installed version of ``package``.

    Args:
        purpose: what needs it, for the message.
    """
    lowest, above, extra = SUPPORTED[package]
    wanted = f"{purpose} needs {package} >= {lowest}, < {above}"
    try:
        installed = _version(package)
    except ImportError as error:
        raise MissingDependency(f"{wanted}, which is not installed; run: {pip_install(extra)}") from error
    if _numbers(installed) < _numbers(lowest):
        raise MissingDependency(f"{wanted}; {installed} is installed and older; run: {pip_install(extra)}")
    if _numbers(installed) >= _numbers(above):
        raise ConfigError(f"{wanted}; {installed} is installed and newer; run: {pip_install(extra)}")
    return installed


def require_torch() -> None:
    """Check the version of torch without importing it."""
    installed = getattr(sys.modules.get("torch"), "__version__", None)
    if not isinstance(installed, str):
        try:
            installed = version("torch")
        except PackageNotFoundError:  # or installed without metadata
            return
    if _numbers(installed) < _numbers(LOWEST_TORCH):
        raise MissingDependency(
            f"moe_comm needs torch >= {LOWEST_TORCH}, but torch {installed} is installed; run: "
            f"pip install 'torch>={LOWEST_TORCH}'"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        if package not in MODULES:
            raise
        found: str = import_module(MODULES[package]).__version__
        return found


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, without trailing zeros: (5, 16) for 5.16.0.dev3."""
    release = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def attach_adapter(
    adapter: str, file: str, package: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return what ``attach_stub`` returns for an adapter, which requires ``package`` when it is imported.

    The system itself imports an adapter that has a name ``plugin``, in any case, so such an adapter requires
    ``package`` only when another name is used.
    """
    load, list_names, names = attach_stub(adapter, file)
    if "plugin" not in names:
        require(package, adapter)
        return load, list_names, names

    def load_checked(name: str) -> Any:
        if name in names and name != "plugin":
            require(package, f"{adapter}.{name}")
        return load(name)

    return load_checked, list_names, names
