"""Check that everything in a file of requirements is imported in its version. Then no test of this folder is skipped.

PYTHONPATH=build/hosts python -m tests.integrations.hosts.installed requirements.txt
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def fault_of(requirement: str) -> str | None:
    """Return why ``name==version`` is not what Python imports, or None."""
    name, wanted = requirement.split("==")
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return f"{requirement} is not installed"
    if found.version != wanted:
        return f"{requirement} is needed, and {name} {found.version} is found in {found.locate_file('')}"
    packages = {file.parts[0] for file in found.files or () if file.name == "__init__.py" and len(file.parts) == 2}
    for package in sorted(packages):
        try:
            module = importlib.import_module(package)
        except Exception as error:
            return f"{requirement}: import {package} raises {type(error).__name__}: {error}"
        folder = Path(str(found.locate_file(package))).resolve()
        if module.__file__ is None or not Path(module.__file__).resolve().is_relative_to(folder):
            return f"{requirement}: import {package} finds {module.__file__} and not {folder}"
    return None


def main() -> None:
    """Print one line for each fault. The exit code is 1 if there is one."""
    requirements = Path(__file__).with_name(sys.argv[1])
    lines = [line.split("#")[0].strip() for line in requirements.read_text().splitlines()]
    faults = [fault for line in lines if line and (fault := fault_of(line))]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{sum(map(bool, lines))} packages of {requirements.name} are installed")


if __name__ == "__main__":
    main()
