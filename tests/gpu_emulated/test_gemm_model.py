"""The GEMMs of csrc/cuda/gemm, in a model of Hopper's instructions on a CPU, have the results of float64, and
ThreadSanitizer finds no access to memory that their barriers do not order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_comm.kernels import tensor_cores
from tests.support.gemm_model import COMPILER, CSRC, compiled, model_gemm

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
THREAD = ("-fsanitize=thread", "-g")
WRONG_RESULTS = {
    "scale of the next 128 columns": ("rows_fp8.h", "column / kFp8Inner *", "(column / kFp8Inner + 1) *"),
    "scales of another row": ("rows_fp8.h", "i % 2 * 8 + i / 2 * 64", "i % 2 * 8 + i / 2 * 32"),
    "order of blocks": (
        "rows_fp8.h",
        "__fmaf_rn(sum[i], scale[i / 2 % 2], total[part][i])",
        "sum[i] * scale[i / 2 % 2] + total[part][i]",
    ),
    "strides of MN-major tiles": (
        "weights.h",
        "descriptor(bt + i * 2048, kGradBox)",
        "descriptor(bt + i * 2048, 4096)",
    ),
    "rows of the next expert": ("weights.h", "if (live % 16 != 0)", "if (false)"),
    "copies of rows that wgmma does not see": ("take.h", "    fence_async();\n", ""),
    "copies of rows that are not waited for": ("take.h", "copies_wait<kTakeLag>();", ""),
    "columns beyond the rows": ("take.h", "inside ? live : 0", "live"),
    "another token's row": ("take.h", " / taken.top_k", ""),
    "map that is not encoded": ("rows.h", "if (!kTaken) prefetch_map(&a.rows)", "prefetch_map(&a.rows)"),
    "pairs of another lane": ("rows.h", "(lane * 2 & 3)", "(lane & 2)"),
    "gate and up of other columns": ("gradient.h", "(lane_ % 4 / 2)", "(lane_ % 2)"),
    "gate above the limit": ("swiglu.h", "gate > of.limit ? 0.0f :", "false ? 0.0f :"),
    "biases of another expert": ("rows.h", "expert * bias.stride", "(expert ^ 1) * bias.stride"),
    "tile that is computed without its rows": (
        "listed.h",
        "if (late < 0 || failed) {",
        "if (late < 0 || failed || item[3] != item[4]) {",
    ),
    "own rows of another rank": ("listed.h", "if (own) row -= static_cast<int32_t>(a_.own_row);", ""),
    "results of a linear layer at their own rank": (
        "listed.h",
        "[tile.first_source] + args",
        "[args.list.rank] + args",
    ),
    "rows that have not been received": ("listed.h", "d[i] = __uint_as_float(0x7fc00000)", "d[i] += 0"),
    "order of a dot product": (
        "gradient.h",
        "__fadd_rn(__fadd_rn(v[0], v[4]), __fadd_rn(v[2], v[6]))",
        "__fadd_rn(__fadd_rn(v[0], v[2]), __fadd_rn(v[4], v[6]))",
    ),
    "weights of other slots": ("gradient.h", "if (args_.slots_at != 0) slot =", "if (false) slot ="),
    "gates of the next columns": ("gradient.h", "next_box_ * 64, row", "(next_box_ + 1) * 64, row"),
    "arrivals of a barrier": ("rows.h", "barrier_init(empty + s * 8, 8);", "barrier_init(empty + s * 8, 9);"),
}
"""Changes of the kernels that the model must find: file, text, new text."""
RACES = {
    "fp8 stage released between its halves": (
        "rows_fp8.h",
        "if (part == 1 && lane == 0)",
        "if (part == 0 && lane == 0)",
    ),
    "fp8 rows read before they are loaded": (
        "rows_fp8.h",
        "      barrier_wait(full + ring.stage * 8, ring.phase);",
        "",
    ),
    "stage read after its release": ("tile.h", "products_wait<1>();", ""),
    "stage loaded before its release": ("rows.h", "barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);", ""),
    "rows read before they are loaded": ("tile.h", "barrier_wait(stages.full + ring.stage * 8, ring.phase);", ""),
    "buffer overwritten before its store": ("tile.h", "if (lane_ == 0) wait_stores_read<kBuffers - 1>();", ""),
    "buffer stored before it is written": ("tile.h", "fence_async();\n  __syncwarp();", "fence_async();"),
    "rows copied over a stage that is read": (
        "take.h",
        "barrier_wait(stages.empty + ring.stage * 8, ring.phase ^ 1);",
        "",
    ),
    "gates overwritten before their store": ("gradient.h", "wait_stores_read<0>();  // the", "// the"),
    "gates read before they are loaded": ("gradient.h", "barrier_wait(loaded_ + ring_.stage * 8, ring_.phase);", ""),
    "gates loaded while they are read": ("gradient.h", "wait_stores_read<0>();  // the", "load();  // the"),
    "rows read before they are zero": ("weights.h", "        fence_async();\n        group_sync(group);", ""),
    "results reported before they are written": ("listed.h", "if (lane == 0) wait_stores<0>();", ""),
    "flag of a tile before all of its warps": ("listed.h", "+ 1 != 8) return;", "+ 1 != 1) return;"),
    "tile read before it is handed over": ("listed.h", "barrier_wait(handed + hand.stage * 8, hand.phase);", ""),
    "sums added before they are loaded": ("weights.h", "barrier_wait(loaded_ + ring_.stage * 8, ring_.phase);", ""),
}
"""Orders whose absence ThreadSanitizer must find."""


def result(
    sources: Path, folder: Path, *options: str, seed: int = 1, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    program = compiled("main.cpp", folder, sources, *options)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    command = [*launcher, str(program), str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def changed(folder: Path, name: str, text: str, new: str) -> Path:
    """Copy the sources to a folder, with ``new`` for ``text`` in a file, and return their new path."""
    shutil.copytree(CSRC, folder / "csrc")
    path = folder / "csrc/cuda/gemm" / name
    source = path.read_text()
    assert text in source
    path.write_text(source.replace(text, new))
    return folder / "csrc"


@pytest.fixture(scope="module")
def fixed_addresses() -> tuple[str, ...]:
    """Start a program without random addresses, for which ThreadSanitizer may have no room."""
    command = ("setarch", "-R")
    works = (
        shutil.which("setarch") and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )
    return command if works else ()


def test_kernels_have_the_results_of_float64(tmp_path: Path) -> None:
    run = result(CSRC, tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout == "0 failures\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG_RESULTS)
def test_the_model_finds_faults(fault: str, tmp_path: Path) -> None:
    assert result(changed(tmp_path, *WRONG_RESULTS[fault]), tmp_path).returncode == 1


@pytest.mark.slow
def test_barriers_order_all_accesses(fixed_addresses: tuple[str, ...], tmp_path: Path) -> None:
    run = result(CSRC, tmp_path, *THREAD, seed=2, launcher=fixed_addresses)
    assert (run.returncode, run.stdout) == (0, "0 failures\n"), run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
def test_a_missing_barrier_is_a_data_race(race: str, fixed_addresses: tuple[str, ...], tmp_path: Path) -> None:
    run = result(changed(tmp_path, *RACES[race]), tmp_path, *THREAD, seed=0, launcher=fixed_addresses)
    assert run.returncode and "ThreadSanitizer: data race" in run.stderr, run.stdout + run.stderr


@pytest.mark.slow
def test_the_check_at_first_use_accepts_the_kernels() -> None:
    names = [*tensor_cores.KERNELS]
    assert tensor_cores.wrong_kernels(model_gemm(), torch.device("cpu"), names) == []


def test_blocks_of_one_source_have_room() -> None:
    """As ``LowLatencyHandle.receive_scaled`` returns them in a group of one rank."""
    model, room, counts = model_gemm(), 8, [[3], [0], [5]]
    experts, inner, columns = len(counts), 128, 16
    values, scale = torch.randn(experts * room, inner).to(torch.float8_e4m3fn), torch.rand(experts * room, 1)
    w, w_scale = torch.randn(experts, columns, inner).to(torch.float8_e4m3fn), torch.rand(experts, 1, 1)
    out = torch.full((experts * room, columns), 3.0, dtype=torch.bfloat16)
    model.rows_fp8((values, scale), (w, w_scale), torch.tensor(counts), out, 0)
    for e, (count,) in enumerate(counts):
        block = slice(e * room, e * room + count)
        exact = (values[block].double() * scale[block].double()) @ (w[e].double() * w_scale[e].double()).T
        torch.testing.assert_close(out[block].double(), exact, rtol=2.0**-7, atol=2.0**-7)
        assert (out[block.stop : (e + 1) * room] == 3).all()
