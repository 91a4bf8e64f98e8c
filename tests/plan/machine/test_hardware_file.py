"""Named machines and description files: round trips and strict checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile, Pod
from moe_plan.machine.hardware_file import from_json, load, save, to_json
from moe_plan.machine.hardware_table import MACHINES, cluster_named

NAMES = ("a100", "h100", "h200", "h800", "h20", "b200", "mi300x", "l20", "l40s")
MEASURED = Cluster(
    Accelerator(
        "this-machine",
        flops={"fp32": 0.13e12, "bf16": 0.8e12},
        efficiency={"fp32": 0.9, "bf16": 0.7},
        memory_bytes=8 * 2**30,
        memory_bytes_per_s=20e9,
        units=1,
        tiles=(GemmTile(64, 32), GemmTile(16, 16, 0.5)),
    ),
    gpus=4,
    host_size=2,
    inside=Link("shared memory", 9.5e9, 2e-5, 0.95),
    between=Link("shaped", 0.125e9, 1e-4, 1.0),
    direct=True,
)
HOLMES = replace(
    MEASURED,
    pods=(Pod(1, Link("ib", 25e9, 4e-6, 0.9)), Pod(1, Link("roce", 12.5e9, 5e-6, 0.8))),
    across=Link("ethernet", 3e9, 3e-5, 0.9),
)


@pytest.mark.parametrize("name", NAMES)
def test_named_machines_are_one_host_by_default(name: str) -> None:
    one = cluster_named(name)
    assert one.accelerator.name == name and one.gpus == one.host_size == 8
    many = cluster_named(name.upper(), 100_000)
    assert (many.gpus, many.hosts) == (100_000, 12_500)
    assert cluster_named(name, 8, host_size=4).hosts == 2
    assert from_json(json.loads(json.dumps(to_json(many)))) == many


def test_named_machines_have_unidirectional_rates_and_dense_flops() -> None:
    assert tuple(MACHINES) == NAMES
    assert MACHINES["h100"].accelerator.flops == {"fp32": 67e12, "bf16": 989.4e12, "fp8": 1978.9e12}
    assert MACHINES["h100"].inside.bytes_per_s == 450e9
    assert MACHINES["h800"].inside.bytes_per_s == 200e9
    assert MACHINES["h800"].accelerator == replace(MACHINES["h100"].accelerator, name="h800", grouped=0.66)
    slower_inside = [name for name, machine in MACHINES.items() if machine.inside.rate <= machine.between.rate]
    assert slower_inside == ["l40s"]  # a ring over PCIe, through two CPUs


@pytest.mark.parametrize("machine", [MEASURED, HOLMES], ids=["measured", "pods"])
def test_a_description_is_unchanged_after_save_and_load(machine: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machine.json"
    save(machine, path)
    assert load(path) == machine == cluster_named(str(path))
    assert hash(load(path).accelerator) == hash(machine.accelerator)
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"], "no temporary file remains"


def test_a_measured_machine_can_be_resized_unless_it_has_pods(tmp_path: Path) -> None:
    save(MEASURED, tmp_path / "one.json")
    save(HOLMES, tmp_path / "pods.json")
    assert cluster_named(str(tmp_path / "one.json"), 8, 4) == replace(MEASURED, gpus=8, host_size=4)
    assert cluster_named(str(tmp_path / "pods.json"), 4) == HOLMES
    with pytest.raises(ConfigError, match="describes pods of 4 accelerators"):
        cluster_named(str(tmp_path / "pods.json"), 8)


def test_unknown_names_are_rejected_with_a_list_of_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown hardware 'h300': expected a100, h100, h200"):
        cluster_named("h300")
    with pytest.raises(ConfigError, match="--calibrate"):
        cluster_named("this-machine")
    with pytest.raises(ConfigError, match="cannot read the hardware description"):
        cluster_named("missing.json")


def changed_description(place: str, value: Any) -> Any:
    """Return a description with one value set, or removed if ``value`` is Ellipsis."""
    data = json.loads(json.dumps(to_json(HOLMES)))
    target = data
    *keys, last = place.split(".")
    for step in keys:
        target = target[int(step) if step.isdigit() else step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", "other", "not a hardware description"),
        ("version", 2, "unknown version 2"),
        ("more", 1, "unknown key 'more'"),
        ("cluster", ..., r"cluster: expected an object, got NoneType"),
        ("cluster.gpus", ..., "cluster: 'gpus' is missing"),
        ("cluster.gpus", 0, "gpus must be an integer of at least 1; got 0"),
        ("cluster.gpus", True, "expected a number, got True"),
        ("cluster.direct", 1, "expected true or false, got 1"),
        ("cluster.gpus", 6, r"pods have \[1, 1\] hosts, which do not add up to the cluster's 3"),
        ("cluster.pods", [], "needs at least two pods"),
        ("cluster.pods", 3, "cluster.pods: expected a list"),
        ("cluster.pods.1.link.reach", 1.5, r"cluster.pods\[1\].link: .*reach must be a share"),
        ("cluster.inside.speed", 1, "cluster.inside: unknown key 'speed'"),
        ("cluster.inside.bytes_per_s", 0, "bytes_per_s must be a finite number above 0"),
        ("cluster.inside.bytes_per_s", float("inf"), "bytes_per_s: expected a number that hardware has"),
        ("cluster.inside.bytes_per_s", 1e-320, "bytes_per_s: expected a number that hardware has"),
        ("cluster.inside.latency_s", 1e300, "latency_s: expected a number that hardware has"),
        ("cluster.accelerator.flops.bf16", float("nan"), "bf16: expected a number that hardware has"),
        ("cluster.inside.bytes_per_s", 10**400, "a number that hardware has"),
        ("cluster.inside.latency_s", -1e-6, "latency_s must be finite and not negative"),
        ("cluster.between.latency_s", "fast", "between.latency_s: expected a number, got 'fast'"),
        ("cluster.between.name", "", "expected a printable string"),
        ("cluster.accelerator.name", "h100\n[run]", "expected a printable string"),
        ("cluster.across", [], "cluster.across: expected an object"),
        ("cluster.accelerator.flops.int4", 1.0, "unknown dtype 'int4'"),
        ("cluster.accelerator.flops.bf16", ..., "have the same dtypes"),
        ("cluster.accelerator.flops", [], "expected numbers by dtype"),
        ("cluster.accelerator.efficiency.bf16", 0, "efficiency of bf16 must be a finite number above 0"),
        ("cluster.accelerator.units", 1.5, "units must be an integer of at least 1"),
        ("cluster.accelerator.tiles", [], "tiles must not be empty"),
        ("cluster.accelerator.tiles.0.rows", 0, r"tiles\[0\]: .*rows must be an integer"),
    ],
)
def test_the_error_names_the_invalid_key_of_a_description(place: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(changed_description(place, value))


@pytest.mark.parametrize("text", ["", "[", "[]", "[" * 100_000, "\udcff", " " * 2**21], ids=str.__len__)
def test_invalid_files_are_rejected_with_their_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load(path)
