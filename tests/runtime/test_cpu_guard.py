"""The guard acts only on a CPU with the AMX trap: AMX is advertised without the CPUID leaf that describes it."""

from __future__ import annotations

import pytest

from moe_comm.runtime import cpu_guard


def cpuinfo(flags: str, *levels: int) -> str:
    """Return text like that of /proc/cpuinfo, with one processor for each CPUID level."""
    return "\n".join(f"processor\t: {i}\ncpuid level\t: {n}\nflags\t\t: fpu {flags}\n" for i, n in enumerate(levels))


@pytest.mark.parametrize(
    ("text", "trapped"),
    [
        (cpuinfo("avx512f amx_bf16 amx_tile", 28, 28), True),
        (cpuinfo("avx512f amx_bf16 amx_tile", 29, 29), False),
        (cpuinfo("avx512f amx_bf16 amx_tile", 32, 28), True),
        (cpuinfo("avx512f avx512_bf16", 28), False),
        (cpuinfo("amx_tile_like", 28), False),
        ("flags\t: amx_tile\n", False),
        ("Features\t: asimd sve\n", False),
        ("", False),
    ],
    ids=["hidden", "shown", "hidden on one core", "no tiles", "other flag", "no level", "aarch64", "no file"],
)
def test_a_cpu_with_amx_tiles_but_without_their_cpuid_leaf_has_the_trap(text: str, trapped: bool) -> None:
    assert cpu_guard.has_amx_trap(text) is trapped


TRAP = cpuinfo("amx_tile", 28)


def test_apply_sets_the_variable_once_and_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    environ: dict[str, str] = {}
    assert cpu_guard.apply(environ, TRAP) is True
    assert environ == {cpu_guard.VARIABLE: cpu_guard.SAFE_ISA}
    assert capsys.readouterr().err.splitlines() == [cpu_guard.NOTICE]
    assert cpu_guard.apply(environ, TRAP) is False
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_apply_keeps_a_value_that_the_user_has_set(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {name: "AVX2"}
    assert cpu_guard.apply(environ, TRAP) is False
    assert environ == {name: "AVX2"}
    assert capsys.readouterr().err == ""


def test_apply_changes_nothing_without_the_trap(capsys: pytest.CaptureFixture[str]) -> None:
    environ: dict[str, str] = {}
    assert cpu_guard.apply(environ, cpuinfo("amx_tile", 30)) is False
    assert not environ
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_of_a_host_prints_the_notice(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"LOCAL_RANK": "1"}
    assert cpu_guard.apply(environ, TRAP) is True
    assert environ[cpu_guard.VARIABLE] == cpu_guard.SAFE_ISA
    assert capsys.readouterr().err == ""
