"""vLLM's engine and its MoE kernel with the rows moved by moe_comm, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_comm.errors import ConfigError, MissingDependency, RoutingError
from moe_comm.runtime import versions
from tests.integrations.hosts.vllm_engine import prompts_of
from tests.integrations.models import save_model
from tests.pool import RankFailure, RankPool

pytest.importorskip("vllm", reason="needs vLLM for CPUs: make adapters")
ROOT = Path(__file__).parents[3]
HIDDEN, WIDTH, TOP_K = 64, 32, 3


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. one: all tokens prefer one expert. dropped: some slots have the id -1."""

    name: str
    tokens: tuple[int, ...] = (9, 9, 9, 9)
    experts: int = 8
    one: bool = False
    dropped: bool = False
    dtype: torch.dtype = torch.float32


CASES = (
    Case("even"),
    Case("uneven tokens, bfloat16", tokens=(3, 17, 1, 6), dtype=torch.bfloat16),
    Case("zero tokens on some ranks", tokens=(0, 7, 0, 2)),
    Case("zero tokens on all ranks", tokens=(0, 0, 0, 0)),
    Case("all tokens to one expert", one=True),
    Case("uneven experts", tokens=(5, 0, 8, 2), experts=7),
    Case("fewer experts than ranks", experts=3),
    Case("dropped slots", tokens=(5, 4, 3, 2), dropped=True),
)


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [T, D], weights [T, K] and ids [T, K] of a rank."""
    g = torch.Generator().manual_seed(50 + rank)
    tokens = case.tokens[rank]
    x_TD = torch.randn(tokens, HIDDEN, generator=g).to(case.dtype)
    scores_TE = torch.rand(tokens, case.experts, generator=g)
    if case.one:
        scores_TE[:, 5] = 2
    weights_TK, ids_TK = scores_TE.topk(1 if case.one else TOP_K)
    if case.dropped:
        ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=g) < 0.4, -1)
    return x_TD, weights_TK, ids_TK.int()


def weights(case: Case) -> tuple[Tensor, Tensor]:
    """Return the weights of all experts, [E, 2F, D] and [E, D, F]."""
    g = torch.Generator().manual_seed(1)
    w13 = 0.2 * torch.randn(case.experts, 2 * WIDTH, HIDDEN, generator=g)
    return w13.to(case.dtype), (0.2 * torch.randn(case.experts, HIDDEN, WIDTH, generator=g)).to(case.dtype)


def expert(x_RD: Tensor, w13_FD: Tensor, w2_DF: Tensor) -> Tensor:
    gate, up = F.linear(x_RD, w13_FD).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2_DF)


def expected(case: Case, rank: int) -> Tensor:
    """Return [T, D] in float64, from one process."""
    x_TD, weights_TK, ids_TK = inputs(case, rank)
    w13, w2 = (w.double() for w in weights(case))
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, ids in enumerate(ids_TK.tolist()):
        for slot, e in enumerate(ids):
            if e >= 0:
                y_TD[token] += weights_TK[token, slot] * expert(x_TD[token].double(), w13[e], w2[e])
    return y_TD


@cache
def group_of(size: int) -> Any:
    """Return the group of the first ``size`` ranks. Collective of all ranks."""
    return dist.group.WORLD if size == dist.get_world_size() else dist.new_group(range(size))


def configuration(case: Case, world: int, rank: int) -> Any:
    """Return vLLM's configuration of a layer with data parallelism."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    layout = FusedMoEParallelConfig(1, 1, world, world, 0, 0, rank, rank, 1, True, "allgather_reducescatter", False)
    with set_current_vllm_config(VllmConfig()):
        return FusedMoEConfig(
            num_experts=case.experts,
            experts_per_token=TOP_K,
            hidden_dim=HIDDEN,
            intermediate_size=WIDTH,
            num_local_experts=case.experts // world,
            num_logical_experts=case.experts,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=layout,
            in_dtype=case.dtype,
        )


def reference_experts(config: Any, quant_config: Any) -> Any:
    """Return experts in plain torch that skip the ids of other ranks, as vLLM's kernels for GPUs. They do not weigh."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    class WeighAndAdd(mk.TopKWeightAndReduce):  # type: ignore[misc]
        def apply(self, output: Any, rows_RKD: Tensor, weights_RK: Tensor, ids: Tensor, on_input: bool) -> Tensor:
            assert output is None and rows_RKD.shape[:2] == ids.shape
            return (rows_RKD if on_input else rows_RKD * weights_RK.unsqueeze(2)).sum(1).to(rows_RKD.dtype)

    class Experts(CPUUnquantizedExperts):  # type: ignore[misc]
        def workspace_shapes(self, m: int, n: int, k: int, top_k: int, *others: Any) -> Any:
            return (0,), (0,), (m, top_k, k)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return WeighAndAdd()

        def apply(
            self, *, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_ids: Any, expert_map: Any, **rest: Any
        ) -> None:
            for row, slots in enumerate(expert_map[topk_ids.long()].tolist()):
                for slot, e in enumerate(slots):
                    output[row, slot] = expert(hidden_states[row], w1[e], w2[e]) if e >= 0 else 0.0

    return Experts(config, quant_config)


def run_layer(rank: int, world: int, arg: tuple[Case, bool, int]) -> dict[str, Any] | None:
    """Run vLLM's kernel on the first ranks, twice, and return what ``prepare`` gave it and the output."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    from moe_comm.integrations.vllm import MoeCommPrepareAndFinalize

    case, per_rank, size = arg
    group = group_of(size)
    if rank >= size:
        return None
    steps = MoeCommPrepareAndFinalize(group, per_rank=per_rank, timeout_s=60)
    received: list[Any] = []
    prepare = steps.prepare

    def kept(*args: Any, **kwargs: Any) -> Any:
        received.append(prepare(*args, **kwargs))
        return received[-1]

    steps.prepare = kept
    config, quant_config = configuration(case, size, rank), FusedMoEQuantConfig.make()
    local, expert_map, _ = determine_expert_map(size, rank, case.experts)
    assert expert_map is not None
    layer = nn.Module()
    for name, whole in zip(("w13_weight", "w2_weight"), weights(case), strict=True):
        layer.register_parameter(name, nn.Parameter(whole[expert_map >= 0].contiguous(), requires_grad=False))
    experts = reference_experts(config, quant_config) if per_rank else CPUUnquantizedExperts(config, quant_config)
    if not per_rank and local:
        experts.process_weights_after_loading(layer)  # packs the weights
    kernel = FusedMoEKernel(steps, experts)
    x_TD, weights_TK, ids_TK = inputs(case, rank)
    w13, w2 = layer.w13_weight, layer.w2_weight
    with torch.inference_mode():
        found = [
            kernel.apply(x_TD, w13, w2, weights_TK, ids_TK, MoEActivation.SILU, case.experts, expert_map, False)
            for _ in range(2)
        ]
    assert torch.equal(*found) and torch.equal(received[0][0], received[1][0])
    rows, scales, counts, ids, row_weights = received[0]
    assert scales is None and torch.equal(counts.expert_num_tokens, counts.expert_num_tokens_cpu)
    return {
        "y": found[0].clone(),
        "rows": rows.clone(),
        "counts": counts.expert_num_tokens.clone(),
        "ids": ids.clone(),
        "weights": row_weights.clone(),
        "map": expert_map,
        "is": (steps.topk_indices_dtype(), steps.num_dispatchers(), steps.output_is_reduced(), experts.num_dispatchers),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("per_rank", [False, True], ids=["slots", "per rank"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_equals_one_process(case: Case, per_rank: bool, world: int, pool4: RankPool) -> None:
    results = pool4.run(run_layer, (case, per_rank, world))[:world]
    tolerance = 2e-2 if case.dtype is torch.bfloat16 else 1e-5
    all_ids = [inputs(case, rank)[2] for rank in range(world)]
    for rank, got in enumerate(results):
        want = expected(case, rank)
        assert got["y"].dtype is case.dtype and got["rows"].dtype is case.dtype
        torch.testing.assert_close(got["y"].double(), want, rtol=tolerance, atol=tolerance * 10)
        assert got["is"] == (torch.int32, world, True, None)
        local_E, ids, counts = got["map"], got["ids"], got["counts"]
        assert ids.dtype is torch.int32 and got["weights"].dtype is torch.float32 and counts.dtype is torch.int32
        own = [local_E[chosen[chosen >= 0].long()] for chosen in all_ids]
        own_slots = torch.cat(own)[torch.cat(own) >= 0]
        assert counts.tolist() == torch.bincount(own_slots, minlength=len(counts)).tolist()
        if per_rank:  # each token once, and slots of other ranks' experts are skipped
            tokens = sum(int((local_E[chosen.long()].where(chosen >= 0, -1) >= 0).any(1).sum()) for chosen in all_ids)
            assert len(got["rows"]) == tokens and ids.shape == (tokens, all_ids[0].shape[1])
            skipped = local_E[ids.long()] < 0
            assert int((~skipped).sum()) == len(own_slots) and not got["weights"][skipped].any()
        else:
            assert ids.flatten().tolist() == torch.arange(len(counts)).repeat_interleave(counts).tolist()
            assert len(got["rows"]) == len(own_slots) and ids.shape == got["weights"].shape == (len(own_slots), 1)


def in_place(rank: int, world: int, per_rank: bool) -> None:
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    from moe_comm.integrations.vllm import MoeCommPrepareAndFinalize

    steps, case = MoeCommPrepareAndFinalize(dist.group.WORLD, per_rank=per_rank, timeout_s=60), Case("even")
    x_TD, weights_TK, ids_TK = inputs(case, rank)
    output = torch.full((len(x_TD), 2 * HIDDEN), 7.0)
    with pytest.raises(ConfigError, match="prepare"):
        steps.finalize(output, x_TD, weights_TK, ids_TK, False, TopKWeightAndReduceNoOP())
    with pytest.raises(ConfigError, match="top-k 1; got 3"):
        steps.prepare(x_TD, weights_TK, ids_TK, 8, None, True, None)
    # The router's weight multiplies the tokens, and experts that change nothing return them.
    rows, _, _, ids, row_weights = steps.prepare(x_TD, weights_TK[:, :1], ids_TK[:, :1], 8, None, True, None)
    left = output[:, :HIDDEN]
    assert steps.finalize(left, rows, row_weights, ids, True, TopKWeightAndReduceNoOP()) is None
    torch.testing.assert_close(left, x_TD * weights_TK[:, :1])
    assert (output[:, HIDDEN:] == 7).all()


def bad_id(rank: int, world: int, per_rank: bool) -> None:
    from moe_comm.integrations.vllm import MoeCommPrepareAndFinalize

    steps = MoeCommPrepareAndFinalize(dist.group.WORLD, per_rank=per_rank, timeout_s=60)
    x_TD, weights_TK, ids_TK = inputs(Case("even"), rank)
    ids_TK[2, 1] = 8 if rank == 1 else 0
    steps.prepare(x_TD, weights_TK, ids_TK, 8, None, False, None)


@pytest.mark.parametrize("per_rank", [False, True], ids=["slots", "per rank"])
def test_finalize_writes_in_place(per_rank: bool, pool4: RankPool) -> None:
    pool4.run(in_place, per_rank)


@pytest.mark.parametrize("per_rank", [False, True], ids=["slots", "per rank"])
def test_a_bad_id_of_one_rank_raises_on_every_rank(per_rank: bool, pool4: RankPool) -> None:
    with pytest.raises(RankFailure, match="expert id 8") as failure:
        pool4.run(bad_id, per_rank)
    assert {kind for kind, _ in failure.value.errors.values()} == {RoutingError.__name__}
    assert len(failure.value.errors) == 4


# --- the entry point ---


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace vLLM's choice for one test, and return the module with it."""
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    def original(moe: Any, quant_config: Any, *args: Any, **kwargs: Any) -> str:
        return "vLLM's own"

    for module in (all2all_utils, unquantized):
        monkeypatch.setattr(module, "maybe_make_prepare_finalize", original)
    monkeypatch.setenv("MOE_COMM_VLLM", "1")
    return unquantized


def test_the_entry_point_changes_nothing_unless_asked(chooser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_comm.integrations.vllm import plugin

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["moe_comm"].split(":")
    assert getattr(import_module(module), name) is plugin
    before = chooser.maybe_make_prepare_finalize
    for value in ("0", None):
        monkeypatch.delenv("MOE_COMM_VLLM")
        if value is not None:
            monkeypatch.setenv("MOE_COMM_VLLM", value)
        plugin()
        assert chooser.maybe_make_prepare_finalize is before
        monkeypatch.setenv("MOE_COMM_VLLM", "yes")
    with pytest.raises(ConfigError, match="MOE_COMM_VLLM must be 0 or 1; got 'yes'"):
        plugin()


def test_the_plugin_twice_changes_nothing_more(chooser: Any) -> None:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    from moe_comm.integrations.vllm import plugin

    before = chooser.maybe_make_prepare_finalize
    plugin()
    once = chooser.maybe_make_prepare_finalize
    plugin()
    assert before is not once is all2all_utils.maybe_make_prepare_finalize is chooser.maybe_make_prepare_finalize


@pytest.mark.parametrize(("installed", "error"), [("0.31.4", MissingDependency), ("0.33.0", ConfigError)])
def test_other_versions_are_named(
    installed: str, error: type[Exception], chooser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_comm.integrations.vllm import plugin

    before = chooser.maybe_make_prepare_finalize
    monkeypatch.setattr(versions, "version", lambda package: installed)
    with pytest.raises(error, match=rf"vllm >= 0.32.0, < 0.33; {installed} is installed"):
        plugin()
    assert chooser.maybe_make_prepare_finalize is before


def test_layers_that_cannot_be_served_stay_with_vllm(
    chooser: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, fp8_w8a8_moe_quant_config

    from moe_comm.integrations.vllm import plugin

    monkeypatch.setattr(init_logger("vllm"), "propagate", True)
    plugin()

    def choice(quant_config: Any = None, settings: Any = None, **changes: Any) -> Any:
        moe = configuration(Case("even"), 2, 0)
        for name, value in changes.items():
            setattr(moe if name in vars(moe) else moe.moe_parallel_config, name, value)
        options = {"allow_new_interface": True} | (settings or {})
        with set_current_vllm_config(VllmConfig()):
            return chooser.maybe_make_prepare_finalize(moe, quant_config or FusedMoEQuantConfig.make(), **options)

    scale = torch.ones(8)
    for reason, found in {
        "data_parallel_size": {"use_ep": False},
        "deepep_low_latency": {"all2all_backend": "deepep_low_latency"},
        "tensor-parallel": {"ep_size": 4},
        "quantized": {"quant_config": fp8_w8a8_moe_quant_config(scale, scale)},
        "routes": {"settings": {"use_monolithic": True}},
        "LoRA": {"is_lora_enabled": True},
        "enable_eplb": {"enable_eplb": True},
    }.items():
        caplog.clear()
        assert choice(**found) == "vLLM's own"
        assert reason in caplog.text, reason
    with pytest.raises(ConfigError, match="a compiled model cannot contain; use enforce_eager=True"):
        choice()  # the default of vLLM's configuration


# --- the engine ---


@pytest.mark.timeout(900)  # importing vLLM three times takes minutes on a busy machine
def test_tokens_of_the_engine_are_those_of_one_process(tmp_path: Path) -> None:
    """vLLM's own transport for data parallelism needs ``all_gatherv``, which its CPU communicator does not have."""
    model = save_model(
        "qwen3_moe", tmp_path / "model", vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_experts=7,
        num_experts_per_tok=TOP_K, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    installed = tmp_path / "moe_comm-0.1.0.dist-info"  # the entry point of this checkout, as pip installs it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: moe_comm\nVersion: 0.1.0\n")
    entry = "moe_comm = moe_comm.integrations.vllm:plugin"
    (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    ranks = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    environments = [common] + [
        common | ranks | {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "MOE_COMM_VLLM": "1"} for rank in "01"
    ]
    runs = []
    for number, environment in enumerate(environments):
        command = [
            sys.executable,
            "-m",
            "tests.integrations.hosts.vllm_engine",
            model,
            str(tmp_path / f"{number}.json"),
        ]
        with open(tmp_path / f"{number}.log", "w") as log:
            runs.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    try:
        for number, run in enumerate(runs):
            code = run.wait(timeout=600)
            assert code == 0, (tmp_path / f"{number}.log").read_text()[-4000:]
    finally:
        for run in runs:
            run.kill()
    one, *both = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3))
    for rank, got in enumerate(both):
        for ids, tokens, logprobs in zip(prompts_of(rank), got["tokens"], got["logprobs"], strict=True):
            number = prompts_of(0).index(ids)
            assert tokens == one["tokens"][number][: len(tokens)] and len(tokens) > 3
            expected = torch.tensor(one["logprobs"][number][: len(tokens)])
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
    assert one["calls"] == 0 and both[0]["calls"] == both[1]["calls"] >= 2 * len(both[0]["tokens"][0])
    assert sum(got["rows"] for got in both) == TOP_K * sum(got["tokens_moved"] for got in both)
    assert all(got["rows"] for got in both)
