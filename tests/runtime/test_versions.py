"""The errors for hosts that are absent, too old or too new."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.runtime import versions


@pytest.mark.parametrize(
    ("installed", "error", "text"),
    [
        (None, MissingDependency, r"torchtitan >= 0.3.0, < 0.4, which is not installed.*\.\[torchtitan\]"),
        ("0.2.9", MissingDependency, "0.2.9 is installed and older"),
        ("0.3.0.dev1", None, ""),
        ("0.3", None, ""),
        ("0.3.17", None, ""),
        ("0.4", ConfigError, "0.4 is installed and newer"),
        ("1.0.0+cpu", ConfigError, r"1.0.0\+cpu is installed and newer"),
    ],
)
def test_versions_are_named(
    installed: str | None, error: type[Exception] | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(versions, "version", version)  # of the installed packages
    if error is None:
        assert versions.require("torchtitan", "x") == installed
        return
    with pytest.raises(error, match=text):
        versions.require("torchtitan", "x")


@pytest.mark.parametrize(
    ("host", "package"),
    [
        ("axolotl", "axolotl"),
        ("torchtitan", "torchtitan"),
        ("megatron", "megatron-core"),
        ("deepspeed", "deepspeed"),
        ("lightning", "lightning"),
        ("sglang", "sglang"),
        ("vllm", "vllm"),
    ],
)
def test_an_adapter_without_its_host_names_the_extra(host: str, package: str) -> None:
    code = f"""
import sys
sys.modules["{host}"] = None
from importlib import metadata
real = metadata.version
def version(name):
    if name == "{package}":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
try:
    from moe_comm.integrations.{host} import *
except ImportError as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.startswith("MissingDependency") and f"pip install '.[{host}]'" in run.stdout


def test_an_old_axolotl_does_not_train_without_its_plugin(tmp_path: Path) -> None:
    """axolotl logs the ImportError of a plugin and continues. MissingDependency is an ImportError."""
    (tmp_path / "axolotl").mkdir()
    (tmp_path / "axolotl" / "__init__.py").touch()
    (tmp_path / "axolotl-0.18.0.dist-info").mkdir()
    (tmp_path / "axolotl-0.18.0.dist-info" / "METADATA").write_text("Name: axolotl\nVersion: 0.18.0\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import moe_comm.integrations.axolotl
except Exception as error:
    print(isinstance(error, ImportError), error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.startswith("False") and "axolotl >= 0.19.0, < 0.20; 0.18.0 is installed" in run.stdout


@pytest.mark.parametrize(
    ("found", "error"), [("0.15.3", MissingDependency), ("0.16.1", None), ("0.17.0rc1", ConfigError)]
)
def test_a_checkout_of_megatron_is_found_without_metadata(
    found: str, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)  # of the installed packages
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    info: Any = ModuleType("megatron.core.package_info")
    info.__version__ = found
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", info)
    with nullcontext() if error is None else pytest.raises(error, match=f"{found} is installed"):
        assert versions.require("megatron-core", "x") == found
