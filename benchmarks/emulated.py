"""A Python for another machine: Debian's packages in a folder, run by the user emulation of qemu.

    folder ─┬─ apt         package lists and packages, separate from those of this machine
            ├─ root        the contents of the packages: C library, Python
            └─ env ─┬─ bin/python    a script that starts the emulator
                    └─ lib           packages of ``install``

Python takes the script for its executable, so the processes that it starts are emulated too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEBIAN = {"aarch64": "arm64"}
"""Debian's names of the machines that can be emulated."""
CPU = {"aarch64": "neoverse-n1"}
CORE = {
    "aarch64": """processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
}
"""An entry of /proc/cpuinfo. torch reads that file, and would find this machine's own cores there."""
PACKAGES = ("python3", "libstdc++6")


@dataclass(frozen=True)
class Guest:
    """An emulated Python.

    Attributes:
        python: path of the script that runs it.
        version: such as "3.11".
    """

    machine: str
    python: Path
    version: str

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        return self.python.parent.parent / "lib" / f"python{self.version}" / "site-packages"

    @property
    def pip_options(self) -> list[str]:
        """Options of pip that select wheels for this Python, whichever Python runs pip."""
        platforms = [f"manylinux_2_{minor}_{self.machine}" for minor in range(28, 16, -1)]
        return [
            "--only-binary=:all:",
            f"--python-version={self.version}",
            "--implementation=cp",
            *(f"--platform={platform}" for platform in (*platforms, f"manylinux2014_{self.machine}")),
        ]


def lacking(machine: str) -> str:
    """Return why ``machine`` cannot be emulated here; "" if it can."""
    if machine not in DEBIAN:
        return f"{machine} is not emulated"
    tools = {f"qemu-{machine}": "qemu-user", "apt-get": "apt", "dpkg": "dpkg"}
    missing = [f"{name} is missing (Debian: {package})" for name, package in tools.items() if not shutil.which(name)]
    return "; ".join(missing)


def apt_options(machine: str, folder: Path) -> list[str]:
    """Return options for apt-get that keep the packages of ``machine`` in ``folder``, and this machine as it is."""
    settings = {
        "APT::Architecture": DEBIAN[machine],
        "APT::Architectures::": DEBIAN[machine],
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "1",
        "Dir::Cache": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": "/dev/null",  # nothing is installed, so all dependencies are loaded
    }
    return [option for name, value in settings.items() for option in ("-o", f"{name}={value}")]


def make(machine: str, folder: Path) -> Guest:
    """Make a Python for ``machine`` in ``folder``, whose contents are replaced.

    The packages come from the Debian release that apt is configured for; its Python is the only version.

    Raises:
        OSError: a command failed. The message is the end of its output.
    """
    shutil.rmtree(folder, ignore_errors=True)
    apt, root, binaries = folder / "apt", folder / "root", folder / "env" / "bin"
    for path in (apt / "lists" / "partial", apt / "archives" / "partial", root / "proc", binaries):
        path.mkdir(parents=True)
    options = apt_options(machine, apt)
    _run(["apt-get", *options, "update"])
    _run(["apt-get", *options, "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES])
    for package in sorted((apt / "archives").glob("*.deb")):
        _run(["dpkg", "-x", package, root])
    cores = range(os.cpu_count() or 1)
    (root / "proc" / "cpuinfo").write_text("".join(CORE[machine].format(number=number) for number in cores))
    python = binaries / "python"
    emulator = f"{shutil.which(f'qemu-{machine}')} -cpu {CPU[machine]} -L '{root}'"
    python.write_text(f'#!/bin/sh\nexec {emulator} -0 "$0" \'{root}/usr/bin/python3\' "$@"\n')
    python.chmod(0o755)
    (folder / "env" / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\ninclude-system-site-packages = false\n")
    version = _run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()
    return Guest(machine, python, version)


def _run(command: Sequence[str | Path]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        said = (process.stdout + process.stderr).strip()[-2000:]
        raise OSError(f"{' '.join(map(str, command))}: exit status {process.returncode}\n{said}")
    return process.stdout
