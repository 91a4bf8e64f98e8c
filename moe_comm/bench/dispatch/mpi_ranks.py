"""MPICH as a peer. ``mpiexec`` starts its ranks in separate processes:

    mpiexec -n RANKS python -m moe_comm.bench.dispatch.mpi_ranks TASK.json RESULT.json

They use the same inputs, pinning, clock and checks as the other contestants, and ``Alltoallv`` on numpy views.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.bench.common.clock import Clock, Summary, summarize
from moe_comm.bench.common.inputs import make_inputs
from moe_comm.bench.common.ranks import pinned
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.bench.dispatch.contestants import Exchange, TorchPeer, measure
from moe_comm.runtime.safe_files import write_file

MPI_PEERS = {"torch_mpich": False, "torch_mpich_tuned": True}
WHEN = "after moe_comm, by ranks of mpiexec"
TIMEOUT_S = 1800.0


def mpiexec() -> Path | None:
    """Return the launcher that the ``mpich`` package installs in the folder of this Python."""
    path = Path(sys.executable).with_name("mpiexec")
    return path if path.exists() else None


def unavailable_reason() -> str | None:
    """Return the reason why MPICH cannot be measured, or None."""
    if util.find_spec("mpi4py") is None or mpiexec() is None:
        return "not installed: pip install mpich mpi4py (both are in the [bench] extra)"
    return None


class MpiExchange(Exchange):
    """``MPI_Alltoallv`` of bytes, because MPI has no bfloat16."""

    def __init__(self, mpi: Any) -> None:
        self.mpi, self.comm = mpi, mpi.COMM_WORLD

    def counts(self, send_E: Tensor, send_splits: list[int], recv: Tensor, recv_splits: list[int]) -> None:
        self._exchange(send_E, send_splits, recv, recv_splits, 8)

    def rows(self, send_RD: Tensor, send_splits: list[int], recv_RD: Tensor, recv_splits: list[int]) -> None:
        self._exchange(send_RD, send_splits, recv_RD, recv_splits, send_RD.shape[1] * send_RD.element_size())

    def _exchange(
        self, send: Tensor, send_splits: list[int], recv: Tensor, recv_splits: list[int], row_bytes: int
    ) -> None:
        self.comm.Alltoallv(
            [_bytes(send), [rows * row_bytes for rows in send_splits], self.mpi.BYTE],
            [_bytes(recv), [rows * row_bytes for rows in recv_splits], self.mpi.BYTE],
        )


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def run_mpi(settings: list[DispatchBench], threads: int) -> list[Summary]:
    """Run the MPI ranks and return their statistics, one summary for each of ``settings``."""
    with tempfile.TemporaryDirectory(prefix="moe_comm_bench_") as folder:
        task, result = Path(folder, "task.json"), Path(folder, "result.json")
        write_file(task, json.dumps([case.to_dict() for case in settings]))
        command = [str(mpiexec()), "-n", str(settings[0].ranks), "-hosts", "localhost", "-iface", "lo"]
        command += [sys.executable, "-m", __name__, str(task), str(result)]
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"mpiexec did not exit within {TIMEOUT_S:g} s") from None
        if done.returncode or not result.exists():
            raise RuntimeError(f"mpiexec exited with code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
        return [{(name, phase): stats for name, phase, stats in case} for case in json.loads(result.read_text())]


def run_rank(settings: DispatchBench, mpi: Any) -> Summary:
    """Measure the MPI peers on this rank."""
    comm = mpi.COMM_WORLD
    inputs = make_inputs(settings, comm.rank)
    exchange = MpiExchange(mpi)
    peers = [
        TorchPeer(name, exchange, settings, comm.rank, inputs, tuned=MPI_PEERS[name])
        for name in settings.peers
        if name in MPI_PEERS
    ]
    for peer in peers:
        peer.check()
    clock = Clock(sync=lambda value: int(comm.allreduce(value, op=mpi.MAX)))
    measure(peers, clock, settings)
    return summarize(comm.allgather(dict(clock.times)))


def main(task: str, result: str) -> None:
    """Run one MPI rank."""
    mpi = import_module("mpi4py.MPI")
    rank, ranks = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    try:
        settings = [DispatchBench.from_dict(case) for case in json.loads(Path(task).read_text())]
        with pinned(rank, ranks):
            summaries = [run_rank(case, mpi) for case in settings]
    except BaseException:
        # The other ranks would wait forever in a collective.
        traceback.print_exc()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)
        raise
    if rank == 0:
        flat = [[(name, phase, stats) for (name, phase), stats in case.items()] for case in summaries]
        write_file(Path(result), json.dumps(flat))


if __name__ == "__main__":
    main(*sys.argv[1:])
