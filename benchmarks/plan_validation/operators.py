"""Published fused operators, predicted with ``moe_plan.machine.fused``."""

from __future__ import annotations

from dataclasses import replace

from moe_plan.machine.collectives import GroupSpan
from moe_plan.machine.fused import COPIES, STORES, CollectiveKind, FusedCost, Gemm, Transport, fused
from moe_plan.machine.hardware import Cluster, item_bytes

# Stores that accumulate in the peer's memory. Fitted on one row of ParallelKittens' table 3: GEMM+RS at K = 512.
ADDS = Transport("adds", 0.667)
# Dedicated thread blocks, which gather and reduce a token's rows. Rate of a block: COMET's code uses 28 blocks for the
# 158 GB/s of an H800.
UNITS = Transport("units", 0.76, 5.6e9)
TRANSPORTS = {transport.name: transport for transport in (COPIES, STORES, ADDS, UNITS)}


def gather_gemm(cluster: Cluster, span: GroupSpan, gemm: Gemm, transport: Transport = COPIES) -> FusedCost:
    """All-gather the rows ``[m, k]`` of all ranks, and multiply them on each rank (AG+GEMM of Flux)."""
    return fused(cluster, span, gemm, "gather", gemm.m * gemm.k * item_bytes(gemm.dtype), transport)


def gemm_scatter(cluster: Cluster, span: GroupSpan, gemm: Gemm, transport: Transport = STORES) -> FusedCost:
    """Sum the outputs ``[m, n]`` of all ranks and scatter them by rows (GEMM+RS).

    Unless the transport accumulates, contributions of other ranks are stored separately and summed at the end.
    """
    num_bytes = gemm.m * gemm.n * item_bytes(gemm.dtype)
    tail = 0.0 if transport is ADDS else num_bytes * (1 + 1 / span.ranks)
    return fused(cluster, span, gemm, "scatter", num_bytes, transport, tail_bytes=tail)


def dispatch_gemm(
    cluster: Cluster,
    span: GroupSpan,
    gemm: Gemm,
    num_bytes: float,
    collective: CollectiveKind,
    transport: Transport = COPIES,
) -> FusedCost:
    """Dispatch tokens to their experts ("exchange"), or all tokens to all ranks ("gather"), fused with the experts."""
    return fused(cluster, span, replace(gemm, gathered=True), collective, num_bytes, transport)


def gemm_combine(
    cluster: Cluster,
    span: GroupSpan,
    gemm: Gemm,
    num_bytes: float,
    collective: CollectiveKind,
    transport: Transport = UNITS,
) -> FusedCost:
    """Return the experts' rows ("exchange"), or sum them by token and scatter them ("scatter").

    Before a scatter, the rank reduces the rows of each token. Contributions of other ranks are summed at the end.
    """
    rows = gemm.groups * gemm.m * gemm.n * item_bytes(gemm.dtype)
    memory_bytes = rows if collective == "scatter" else 0.0
    tail = num_bytes * (1 + 1 / span.ranks)
    return fused(
        cluster,
        span,
        replace(gemm, gathered=True),
        collective,
        num_bytes,
        transport,
        cut=gemm.n,  # every expert computes its first columns first (COMET)
        memory_bytes=memory_bytes,
        tail_bytes=tail,
    )
