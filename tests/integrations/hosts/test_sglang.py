"""SGLang's own MoE layer, plugin loader and DeepEP dispatcher on CPU ranks, without its engine and its kernels."""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="needs SGLang: make adapters")

from tests.integrations.hosts.sglang_cpu import HIDDEN, WIDTH, load_experts, moe_layer, start

# isort: split
# SGLang can be imported after sglang_cpu only.
from sglang.srt import plugins
from sglang.srt.eplb import expert_distribution
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import fused_moe_triton, moe_runner
from sglang.srt.layers.moe.token_dispatcher import deepep, standard
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend, get_deepep_mode
from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_flags, get_parallel
from sglang.test.test_deepep_utils import per_token_cast_to_fp8
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from moe_comm.integrations.deepep import install
from moe_comm.integrations.sglang import MoeCommDispatcher, dispatcher as dispatcher_module, hooks, plugin
from moe_comm.runtime import versions
from tests.pool import RankPool

EXPERTS = 8


@dataclass(frozen=True)
class Case:
    """tokens: of the even and odd ranks. one: all tokens choose expert 0. dropped: every second token has an id -1."""

    name: str
    tokens: tuple[int, int] = (6, 5)
    top_k: int = 2
    one: bool = False
    dropped: bool = False
    dtype: torch.dtype = torch.float32


CASES = (
    Case("uneven"),
    Case("zero tokens on some ranks", tokens=(0, 7), top_k=3),
    Case("no tokens", tokens=(0, 0)),
    Case("all tokens to one expert", top_k=1, one=True),
    Case("more slots than local experts", top_k=5),
    Case("dropped slots", dropped=True, top_k=3),
    Case("bf16", dtype=torch.bfloat16),
)


def routed(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [T, H], ids [T, K] as int32 like those of SGLang's routers, and weights [T, K] of one rank."""
    g = torch.Generator().manual_seed(20 + rank)
    tokens = case.tokens[rank % 2]
    x_TD = torch.randn(tokens, HIDDEN, generator=g).to(case.dtype)
    weights_TK, ids_TK = torch.randn(tokens, EXPERTS, generator=g).softmax(-1).topk(case.top_k)
    if case.one:
        ids_TK = torch.zeros_like(ids_TK)
    if case.dropped:
        ids_TK[::2, 1] = -1
    return x_TD, ids_TK.int(), weights_TK


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights of all experts."""
    g = torch.Generator().manual_seed(3)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    w13_EFD, w2_EDF = (torch.randn(*shape, generator=g) / 4 for shape in shapes)
    return w13_EFD.to(dtype), w2_EDF.to(dtype)


def expected(case: Case, rank: int) -> Tensor:
    """Return the output of the layer for the tokens of one rank, in float64 and in plain torch."""
    x_TD, ids_TK, weights_TK = routed(case, rank)
    w13_EFD, w2_EDF = (w.double() for w in matrices(case.dtype))
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, (x_D, ids_K, weights_K) in enumerate(zip(x_TD.double(), ids_TK, weights_TK.double(), strict=True)):
        for expert, weight in zip(ids_K.tolist(), weights_K, strict=True):
            if expert >= 0:
                gate, up = (w13_EFD[expert] @ x_D).chunk(2)
                y_TD[token] += weight * (w2_EDF[expert] @ (torch.nn.functional.silu(gate) * up))
    return y_TD


def received(case: Case, rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, local ids and weights of a rank: one row for each token with an expert there."""
    local = EXPERTS // world
    parts: tuple[list[Tensor], ...] = [], [], []
    for source in range(world):
        x_TD, ids_TK, weights_TK = routed(case, source)
        is_own_TK = (ids_TK >= 0) & (ids_TK // local == rank)
        has_own_T = is_own_TK.any(1)
        local_TK = (ids_TK - rank * local).where(is_own_TK, -1)
        for part, values in zip(parts, (x_TD, local_TK, weights_TK.where(is_own_TK, 0)), strict=True):
            part.append(values[has_own_T])
    rows_RD, ids_RK, weights_RK = map(torch.cat, parts)
    return rows_RD, ids_RK, weights_RK


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the metadata that an installation of this package has."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "moe_comm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moe_comm\nVersion: 0.1.0\n")
    root = Path(__file__).parents[3]
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (metadata / "entry_points.txt").write_text("".join(lines))
    return str(folder)


def load_plugins(folder: str) -> None:
    """Call SGLang's plugin loader, as each of its processes does when it starts."""
    os.environ["MOE_COMM_SGLANG"] = "1"
    if folder not in sys.path:
        sys.path.insert(0, folder)
    plugins.load_plugins()


def run_layers(rank: int, world: int, folder: str) -> list[tuple[Case, Tensor, str, str]]:
    """Return the output of SGLang's layer for each case, and the names of its class and of that of its dispatcher."""
    load_plugins(folder)
    start(rank, world)
    results = []
    for case in CASES:
        layer = moe_layer(EXPERTS, case.top_k, *matrices(case.dtype))
        x_TD, ids_TK, weights_TK = routed(case, rank)
        y_TD = layer(x_TD, StandardTopKOutput(weights_TK, ids_TK, x_TD))
        results.append((case, y_TD, type(layer).__name__, type(layer.dispatcher).__name__))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_sglangs_layer_computes_what_one_process_does(world: int, entry_point: str, pools: dict[int, RankPool]) -> None:
    start(0, 1, moe_a2a_backend="none")
    for rank, results in enumerate(pools[world].run(run_layers, entry_point)):
        for case, y_TD, layer, dispatcher in results:
            assert (layer, dispatcher) == ("DeepEPMoE", "MoeCommDispatcher")
            x_TD, ids_TK, weights_TK = routed(case, rank)
            whole = moe_layer(EXPERTS, case.top_k, *matrices(case.dtype))
            assert isinstance(whole.dispatcher, standard.StandardDispatcher)
            topk = StandardTopKOutput(weights_TK.where(ids_TK >= 0, 0), ids_TK, x_TD)
            theirs = whole.dispatcher.combine(whole.run_moe_core(whole.dispatcher.dispatch(x_TD, topk)))
            tolerance = 3e-2 if case.dtype == torch.bfloat16 else 1e-5
            assert y_TD.dtype == case.dtype
            for want in (theirs, expected(case, rank)):
                torch.testing.assert_close(y_TD.double(), want.double(), rtol=tolerance, atol=tolerance, msg=case.name)


def whole_block() -> Any:
    """Return the MoE block of a Qwen3-MoE model of transformers."""
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, experts_implementation="eager"))
    generator = torch.Generator().manual_seed(4)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return block.requires_grad_(False)


def run_block(rank: int, world: int, folder: str) -> list[Tensor]:
    """Return the output of SGLang's Qwen3-MoE block, with its router, for some tokens and for none on even ranks."""
    load_plugins(folder)
    start(rank, world)
    whole = whole_block()
    block = Qwen3MoeSparseMoeBlock(0, whole.experts.config)
    block.gate.weight.data.copy_(whole.gate.weight)
    load_experts(block.experts, whole.experts.gate_up_proj, whole.experts.down_proj)
    return [block(routed(case, rank)[0], None) for case in CASES[:2]]


@pytest.mark.parametrize("world", [2, 4])
def test_a_block_of_qwen3_moe_equals_that_of_transformers(
    world: int, entry_point: str, pools: dict[int, RankPool]
) -> None:
    whole = whole_block()
    for rank, outputs in enumerate(pools[world].run(run_block, entry_point)):
        for case, y_TD in zip(CASES[:2], outputs, strict=True):
            x_TD = routed(case, rank)[0]
            want = whole(x_TD.unsqueeze(0)).view_as(x_TD) if len(x_TD) else x_TD
            torch.testing.assert_close(y_TD, want, rtol=1e-4, atol=1e-5)


def config(runner: MoeRunnerBackend | None, world: int) -> Any:
    """Return SGLang's configuration of a layer for a MoE runner."""
    return moe_runner.MoeRunnerConfig(
        num_experts=EXPERTS, num_local_experts=EXPERTS // world, hidden_size=HIDDEN, layer_id=3, runner_backend=runner
    )


def dispatched(rank: int, world: int, runner: MoeRunnerBackend) -> list[tuple[Case, str, Any, Tensor]]:
    """Return format and fields of the dispatch of each case, and the sums if each row is its own output."""
    start(rank, world, deepep_dispatcher_output_dtype="bf16")
    dispatcher = MoeCommDispatcher(config(runner, world))
    results = []
    for case in CASES:
        x_TD, ids_TK, weights_TK = routed(case, rank)
        sent = dispatcher.dispatch(hidden_states=x_TD, topk_output=StandardTopKOutput(weights_TK, ids_TK, x_TD))
        rows_RD = sent.hidden_states
        if runner.is_triton():
            fields = (rows_RD, sent.hidden_states_scale, sent.topk_output.topk_ids, sent.topk_output.topk_weights, None)
            returned: Any = standard.StandardCombineInput(rows_RD)
        else:
            fields = tuple(sent)
            returned = deepep.DeepEPNormalCombineInput(rows_RD, sent.topk_ids, sent.topk_weights)
        results.append((case, sent.format.value, fields, dispatcher.combine(combine_input=returned)))
    return results


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("runner", [MoeRunnerBackend.TRITON, MoeRunnerBackend.DEEP_GEMM])
def test_formats_have_one_row_for_each_token_and_rank(
    runner: MoeRunnerBackend, world: int, pools: dict[int, RankPool]
) -> None:
    is_standard = runner.is_triton()
    for rank, results in enumerate(pools[world].run(dispatched, runner)):
        for case, name, (rows_RD, scales, ids_RK, weights_RK, counts), y_TD in results:
            assert name == ("standard" if is_standard else "deepep_normal")
            assert scales is None
            want_rows, want_ids, want_weights = received(case, rank, world)
            assert (rows_RD.dtype, weights_RK.dtype) == (case.dtype, torch.float32)
            assert ids_RK.dtype == (torch.int32 if is_standard else torch.int64)
            if is_standard and not len(want_rows):
                assert not rows_RD.any() and (ids_RK == -1).all() and not weights_RK.any() and len(rows_RD) == 1
            else:
                assert torch.equal(rows_RD, want_rows) and torch.equal(weights_RK, want_weights), case.name
                assert torch.equal(ids_RK.long(), want_ids.long()), case.name
            if not is_standard:
                found = torch.bincount(want_ids[want_ids >= 0].long(), minlength=EXPERTS // world)
                assert counts == [-(-n // 128) * 128 for n in found.tolist()]
                assert all(type(n) is int for n in counts)
            x_TD, ids_TK, _ = routed(case, rank)
            owners_TW = torch.stack(
                [((ids_TK >= 0) & (ids_TK // (EXPERTS // world) == r)).any(1) for r in range(world)], 1
            )
            assert torch.equal(y_TD, (x_TD.float() * owners_TW.sum(1, keepdim=True)).to(case.dtype)), case.name


def beside_deepep(rank: int, world: int, mode: str) -> list[tuple[Any, ...]]:
    """Return the results of SGLang's DeepEPDispatcher over the deep_ep module of moe_comm, and of MoeCommDispatcher.

    SGLang asks for the CUDA device before it makes a buffer, and its normal mode needs DeepGEMM; both are set here. It
    looks for deep_ep when it is imported.
    """
    module = install()
    start(rank, world, deepep_mode=mode, deepep_dispatcher_output_dtype="bf16")
    deepep.Buffer, deepep.Config, deepep.use_deepep = module.Buffer, module.Config, True
    group = get_parallel().tp_group.device_group
    deepep.DeepEPBuffer._state().buffer = module.Buffer(group, low_latency_mode=mode == "low_latency")
    theirs = deepep.DeepEPDispatcher(
        group, 2, True, EXPERTS, EXPERTS // world, HIDDEN, torch.float32, get_deepep_mode(), True, True
    )
    ours = MoeCommDispatcher(config(MoeRunnerBackend.DEEP_GEMM, world))
    scale_L = torch.arange(EXPERTS // world) + 1.0 + rank * (EXPERTS // world)  # expert e computes x * (e + 1)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", mode == "normal")
        for case in CASES[:-1]:
            x_TD, ids_TK, weights_TK = routed(case, rank)
            topk = StandardTopKOutput(weights_TK, ids_TK, x_TD)
            got = []
            for dispatcher in (ours, theirs):
                sent = dispatcher.dispatch(hidden_states=x_TD, topk_output=topk)
                if isinstance(sent, deepep.DeepEPLLDispatchOutput):
                    rows = sent.hidden_states * scale_L[:, None, None]
                    returned: Any = deepep.DeepEPLLCombineInput(rows, sent.topk_ids, sent.topk_weights)
                    fields: tuple[Any, ...] = (sent.masked_m,)
                else:
                    sums_R1 = (scale_L[sent.topk_ids] * sent.topk_weights).sum(1, keepdim=True)
                    returned = deepep.DeepEPNormalCombineInput(sent.hidden_states * sums_R1, *sent[2:4])
                    fields = tuple(sent)
                got.append((type(sent).__name__, fields, dispatcher.combine(combine_input=returned)))
            results.append((case, *got))
    return results


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_sglangs_deepep_dispatcher_runs_over_the_deep_ep_module(
    mode: str, world: int, pools: dict[int, RankPool]
) -> None:
    for rank, results in enumerate(pools[world].run(beside_deepep, mode)):
        for case, (_, ours, our_y), (name, theirs, their_y) in results:
            x_TD, ids_TK, weights_TK = routed(case, rank)
            want = x_TD * ((ids_TK + 1) * weights_TK).sum(1, keepdim=True)  # an id -1 adds 0
            for y_TD in (our_y, their_y):
                torch.testing.assert_close(y_TD, want, rtol=1e-5, atol=1e-5, msg=case.name)
            if mode == "low_latency":
                assert name == "DeepEPLLDispatchOutput"
                local = received(case, rank, world)[1]
                assert theirs[0].tolist() == torch.bincount(local[local >= 0], minlength=EXPERTS // world).tolist()
                continue
            assert name == "DeepEPNormalDispatchOutput" and torch.equal(our_y, their_y)
            for mine, their in zip(ours, theirs, strict=True):
                same = torch.equal(mine, their) if isinstance(mine, Tensor) else mine == their
                assert same, case.name


def fp8_rows(rank: int, world: int, _: None) -> tuple[Any, ...]:
    """Return the rows that DeepGEMM gets in fp8. SGLang's kernel for them needs CUDA; its test utility does not."""
    start(rank, world, deepep_dispatcher_output_dtype="fp8")
    dispatcher = MoeCommDispatcher(config(MoeRunnerBackend.DEEP_GEMM, world))
    x_TD = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
    ids_TK, weights_TK = torch.arange(4).unsqueeze(1) * (EXPERTS // 4), torch.ones(4, 1)
    quantize = "sglang_per_token_group_quant_fp8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_module, quantize, lambda x, size, **_: per_token_cast_to_fp8(x))
        sent = dispatcher.dispatch(x_TD, StandardTopKOutput(weights_TK, ids_TK, x_TD))
    out_RD = torch.ones(sent.hidden_states.shape, dtype=torch.bfloat16)
    y_TD = dispatcher.combine(deepep.DeepEPNormalCombineInput(out_RD, sent.topk_ids, sent.topk_weights))
    assert sent.hidden_states.dtype == torch.float8_e4m3fn  # which torch cannot pickle
    return sent.hidden_states.view(torch.uint8), sent.hidden_states_scale, x_TD, y_TD


def test_deep_gemm_gets_fp8_rows_with_scales(pools: dict[int, RankPool]) -> None:
    results = pools[2].run(fp8_rows)
    for rank, (values_RD, scales, _, y_TD) in enumerate(results):
        mine = slice(2 * rank, 2 * rank + 2)  # tokens 0 and 1 choose experts of rank 0
        want = [per_token_cast_to_fp8(x_TD[mine]) for _, _, x_TD, _ in results]
        assert torch.equal(values_RD, torch.cat([v.view(torch.uint8) for v, _ in want]))
        assert torch.equal(scales, torch.cat([s for _, s in want]))
        assert torch.equal(y_TD, torch.ones(4, 256).bfloat16())


def refusals(rank: int, world: int, folder: str) -> dict[str, str]:
    """Return the error of each mistake. Rank 1 alone makes those in ids and rows."""
    load_plugins(folder)
    found: dict[str, str] = {}

    def attempt(name: str, action: Any, **options: Any) -> None:
        start(rank, world, **options)
        try:
            action()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def layer() -> Any:
        return moe_layer(EXPERTS, 2, *matrices(torch.float32))

    triton, deep_gemm = MoeRunnerBackend.TRITON, MoeRunnerBackend.DEEP_GEMM
    attempt("none", layer, moe_a2a_backend="none")
    attempt("mode", layer, deepep_mode="auto")
    attempt("runner", lambda: MoeCommDispatcher(config(MoeRunnerBackend.MARLIN, world)))
    attempt("no runner", lambda: MoeCommDispatcher(config(None, world)))
    attempt("dtype", lambda: MoeCommDispatcher(config(triton, world)), deepep_dispatcher_output_dtype="fp8")
    attempt("nvfp4", lambda: MoeCommDispatcher(config(deep_gemm, world)), deepep_dispatcher_output_dtype="nvfp4")
    attempt("overlap", lambda: MoeCommDispatcher(config(triton, world)), enable_two_batch_overlap=True)
    start(rank, world)
    dispatcher = MoeCommDispatcher(config(triton, world))
    x_TD, ids_TK, weights_TK = routed(CASES[0], rank)
    wrong_TK = ids_TK + EXPERTS if rank == 1 else ids_TK
    attempt("ids", lambda: dispatcher.dispatch(x_TD, StandardTopKOutput(weights_TK, wrong_TK, x_TD)))
    attempt("topk", lambda: dispatcher.dispatch(x_TD, SimpleNamespace(topk_ids=ids_TK)))
    attempt("combine first", lambda: dispatcher.combine(standard.StandardCombineInput(x_TD)))
    sent = dispatcher.dispatch(x_TD, StandardTopKOutput(weights_TK, ids_TK, x_TD))
    rows_RD = sent.hidden_states[1:] if rank == 1 else sent.hidden_states
    attempt("rows", lambda: dispatcher.combine(standard.StandardCombineInput(rows_RD)))
    return found


def test_what_is_not_supported_raises_on_every_rank(entry_point: str, pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(refusals, entry_point):
        kinds = {name: error.partition(":")[0] for name, error in found.items()}
        of_options = "none", "mode", "runner", "no runner", "dtype", "nvfp4", "overlap", "topk"
        of_tensors = "ids", "combine first", "rows"
        assert kinds == dict.fromkeys(of_options, "ConfigError") | dict.fromkeys(of_tensors, "InputError")
        assert "--moe-a2a-backend deepep --deepep-mode normal; got none and normal" in found["none"]
        assert "got deepep and auto" in found["mode"]
        assert "layer 3 has marlin" in found["runner"]


class Recorder:
    """Stands in for SGLang's recorder of the distribution over experts, which needs a model."""

    recording = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_deepep_dispatch_normal(
        self, counts: list[int], *, num_tokens_per_rank: Any, num_tokens_per_rdma_rank: Any, num_tokens_per_expert: Any
    ) -> None:
        self.calls.append((counts, num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert))


def recorded(rank: int, world: int, _: None) -> tuple[Any, ...]:
    """Return what the recorder got, and what SGLang's hooks of a dispatcher saw."""
    start(rank, world)
    recorder, before = Recorder(), expert_distribution.get_global_expert_distribution_recorder()
    expert_distribution.set_global_expert_distribution_recorder(recorder)
    dispatcher, seen = MoeCommDispatcher(config(MoeRunnerBackend.TRITON, world)), []
    dispatcher.register_post_dispatch_hook(lambda _, sent: seen.append(type(sent).__name__))
    dispatcher.register_pre_combine_hook(lambda _, given: seen.append(type(given).__name__))
    x_TD, ids_TK, weights_TK = routed(CASES[0], rank)
    sent = dispatcher.dispatch(hidden_states=x_TD, topk_output=StandardTopKOutput(weights_TK, ids_TK, x_TD))
    dispatcher.combine(combine_input=standard.StandardCombineInput(sent.hidden_states))
    expert_distribution.set_global_expert_distribution_recorder(before)
    return recorder.calls, seen


def test_sglangs_recorder_and_hooks_are_called(pools: dict[int, RankPool]) -> None:
    for rank, (calls, seen) in enumerate(pools[2].run(recorded)):
        assert seen == ["StandardDispatchOutput", "StandardCombineInput"]
        ((counts, per_rank, per_rdma_rank, per_expert),) = calls
        ids_TK, local = routed(CASES[0], rank)[1], received(CASES[0], rank, 2)[1]
        assert counts == torch.bincount(local[local >= 0], minlength=4).tolist() and per_rdma_rank is None
        assert per_rank.tolist() == [int((ids_TK // 4 == r).any(1).sum()) for r in range(2)]
        assert per_expert.tolist() == torch.bincount(ids_TK.flatten(), minlength=EXPERTS).tolist()


def plugin_twice(rank: int, world: int, folder: str) -> list[Any]:
    """Return whether a second call of the plugin changes anything in SGLang."""
    load_plugins(folder)
    before = fused_moe_triton.layer.create_moe_dispatcher
    hooks = {target: len(known) for target, known in HookRegistry._hooks.items()}
    plugin()
    HookRegistry.apply_hooks()
    after = {target: len(known) for target, known in HookRegistry._hooks.items()}
    return [fused_moe_triton.layer.create_moe_dispatcher is before, hooks == after, sorted(hooks.values())]


def test_the_plugin_changes_nothing_the_second_time(entry_point: str, pools: dict[int, RankPool]) -> None:
    assert pools[2].run(plugin_twice, entry_point) == [[True, True, [1, 1]]] * 2


def draft_model(rank: int, world: int, folder: str) -> tuple[str, list[str]]:
    """Return the dispatcher of a layer of a draft model without all-to-all, and the warnings."""
    load_plugins(folder)
    start(rank, world, moe_a2a_backend="none")
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch, get_flags().moe.override(in_speculative_scope=True):
        patch.setattr(dispatcher_module.logger, "warning", lambda message, *args: messages.append(message % args))
        layer = moe_layer(EXPERTS, 2, *matrices(torch.float32))
    return type(layer.dispatcher).__name__, messages


def test_a_draft_model_without_all_to_all_keeps_its_dispatcher(entry_point: str, pools: dict[int, RankPool]) -> None:
    warning = "moe_comm does not dispatch the draft model, which has the a2a backend none"
    assert pools[2].run(draft_model, entry_point) == [("StandardDispatcher", [warning])] * 2


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_plugin_does_nothing_unless_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_COMM_SGLANG", raising=False)
    if value is not None:
        monkeypatch.setenv("MOE_COMM_SGLANG", value)
    monkeypatch.setattr(versions, "version", lambda name: "0.5.22")  # of the installed packages
    before = fused_moe_triton.layer.create_moe_dispatcher
    plugin()
    HookRegistry.apply_hooks()
    assert fused_moe_triton.layer.create_moe_dispatcher is before


@pytest.mark.parametrize(
    ("value", "installed", "message"),
    [
        ("yes", "0.5.23", "MOE_COMM_SGLANG=yes: it must be 1 or 0"),
        ("1", "0.5.22", r"needs sglang >= 0\.5\.23, < 0\.5\.24; 0\.5\.22 is installed and older"),
        ("1", "0.6.1", r"needs sglang >= 0\.5\.23, < 0\.5\.24; 0\.6\.1 is installed and newer"),
    ],
)
def test_sglang_does_not_start_without_the_plugin_that_was_asked_for(
    value: str, installed: str, message: str, entry_point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMM_SGLANG", value)
    monkeypatch.syspath_prepend(entry_point)
    monkeypatch.setattr(versions, "version", lambda name: installed)  # of the installed packages
    monkeypatch.setattr(plugins, "_plugins_loaded", False)  # SGLang loads plugins once per process
    with pytest.raises(SystemExit, match=message):
        plugins.load_plugins()


def test_the_plugin_is_not_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMM_SGLANG", "1")
    monkeypatch.setattr(HookRegistry, "_patched", {hooks.FACTORY})  # SGLang applies the hooks of a function once
    with pytest.raises(SystemExit, match=r"call plugin\(\) before load_plugins\(\)"):
        plugin()
