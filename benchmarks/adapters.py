"""Compare dispatch and combine through adapters with the native calls of the dispatcher that they use.

    PYTHONPATH=build/hosts python -m benchmarks.adapters --json benchmarks/results/adapters.json

Forward only, without experts. The native call sends the same rows: one for each (token, expert), or for DeepEP, one for
each (token, rank). Adapter and native call alternate, and the slowest rank of each call counts. ``ratio`` is the median
over pairs. Adapters of DeepSpeed, axolotl, Lightning and Hugging Face are layers or trainers without such calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bench.common import report
from moe_comm.bench.common.inputs import RankInputs, make_inputs
from moe_comm.bench.common.interleave import measure_pairs
from moe_comm.bench.common.machine import machine_info, versions
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.common.settings import BatchShape
from moe_comm.dispatch import DROPPED
from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.errors import MissingDependency

CPU = torch.device("cpu")
Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""The native call and the call through the adapter."""


def native(experts: int, inputs: RankInputs) -> Callable[[], Any]:
    """Return dispatch and combine of the dispatcher."""
    dispatcher = shared_dispatcher(experts, dist.group.WORLD, CPU)

    def call() -> torch.Tensor:
        sent = dispatcher.dispatch(inputs.x_TD, inputs.ids_TK)
        return dispatcher.combine(sent.rows_RD, inputs.weights_TK, sent.handle)

    return call


def deepep(shape: BatchShape, inputs: RankInputs) -> Calls:
    """``deep_ep.Buffer``. The native call has one expert on each rank."""
    from moe_comm.integrations.deepep import Buffer

    owners_TK = inputs.ids_TK // (shape.experts // shape.ranks)
    chosen_TW = torch.zeros(shape.tokens, shape.ranks, dtype=torch.bool).scatter_(1, owners_TK, True)
    owners_TW = torch.where(chosen_TW, torch.arange(shape.ranks), DROPPED)
    buffer: Any = Buffer(dist.group.WORLD)

    def call() -> torch.Tensor:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.ids_TK, shape.experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            inputs.x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            topk_idx=inputs.ids_TK,
            topk_weights=inputs.weights_TK,
        )
        y_TD: torch.Tensor = buffer.combine(rows, handle)[0]
        return y_TD

    return native(shape.ranks, replace(inputs, ids_TK=owners_TW, weights_TK=chosen_TW.float())), call


def torchtitan(shape: BatchShape, inputs: RankInputs) -> Calls:
    """``MoeCommTokenDispatcher`` of torchtitan."""
    from moe_comm.integrations.torchtitan import MoeCommTokenDispatcher
    from moe_comm.topology.mesh import expert_mesh

    dispatcher = MoeCommTokenDispatcher(MoeCommTokenDispatcher.Config(num_experts=shape.experts, top_k=shape.top_k))
    mesh = expert_mesh()
    dispatcher.wire_meshes(ep_mesh=None if mesh is None else mesh["ep"])
    counts_E = inputs.ids_TK.flatten().bincount(minlength=shape.experts)

    def call() -> Any:
        rows_RD, _, metadata = dispatcher.dispatch(inputs.x_TD, inputs.weights_TK, inputs.ids_TK, counts_E)
        return dispatcher.combine(rows_RD, metadata, inputs.x_TD)

    return native(shape.experts, inputs), call


def megatron(shape: BatchShape, inputs: RankInputs) -> Calls:
    """``MoeCommTokenDispatcher`` of Megatron-Core."""
    from moe_comm.integrations.megatron import MoeCommTokenDispatcher  # checks the version
    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    alone, _ = dist.new_subgroups(group_size=1)
    world, local = dist.group.WORLD, shape.experts // shape.ranks
    own = range(dist.get_rank() * local, (dist.get_rank() + 1) * local)
    groups = SimpleNamespace(ep=world, expt_tp=alone, tp_ep=world)
    dispatcher = MoeCommTokenDispatcher(local, own, config, groups)
    x = inputs.x_TD.unsqueeze(1)
    probs_TE = torch.zeros(shape.tokens, shape.experts).scatter_(1, inputs.ids_TK, inputs.weights_TK)
    routing_map = probs_TE > 0

    def call() -> Any:
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs_TE))
        rows_RD, _, _ = dispatcher.dispatch_postprocess(*sent)
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(rows_RD))
        return dispatcher.combine_postprocess(combined)

    return native(shape.experts, replace(inputs, weights_TK=torch.ones_like(inputs.weights_TK))), call  # sums only


def measure(argument: tuple[BatchShape, int, float], threads: int) -> dict[str, Any]:
    """Return the ratios. Collective, the same on every rank."""
    shape, rounds, seconds = argument
    inputs = make_inputs(shape, dist.get_rank())
    ratios: dict[str, Any] = {}
    for make in (deepep, torchtitan, megatron):
        try:
            with torch.no_grad():
                first, second = make(shape, inputs)
                torch.testing.assert_close(second().view(shape.tokens, -1), first())
                ratios[make.__name__] = asdict(measure_pairs(first, second, 3, rounds, seconds=seconds))
        except MissingDependency as error:
            ratios[make.__name__] = {"skipped": str(error)}
    return {"shape": shape.to_dict(), "threads": threads, "adapters": ratios}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=20.0, help="add pairs while they fit into this time")
    parser.add_argument("--json")
    args = parser.parse_args()
    report.check_writable(args.json)
    shape = BatchShape(ranks=args.ranks, tokens=args.tokens, hidden=args.hidden)
    result = on_ranks(measure, (shape, args.rounds, args.seconds), args.ranks, "cpu")
    if result is None:
        return
    result |= {"machine": machine_info("cpu"), "versions": versions(("torch", "torchtitan", "megatron-core"))}
    for name, found in result["adapters"].items():
        print(name, found.get("skipped") or f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
