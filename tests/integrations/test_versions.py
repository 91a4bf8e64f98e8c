"""The errors for hosts that are absent, too old or too new."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.integrations import versions


@pytest.mark.parametrize(
    ("installed", "error", "text"),
    [
        (None, MissingDependency, r"torchtitan >= 0.3.0, < 0.4, which is not installed.*moe_comm\[torchtitan\]"),
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


def test_an_adapter_without_its_host_names_the_extra() -> None:
    code = """
import sys
sys.modules["torchtitan"] = None
from importlib import metadata
real = metadata.version
def version(name):
    if name == "torchtitan":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
try:
    import moe_comm.integrations.torchtitan
except ImportError as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.startswith("MissingDependency") and "pip install 'moe_comm[torchtitan]'" in run.stdout
