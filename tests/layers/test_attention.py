"""Attention over tp, cp and both: output and all gradients equal those of one process with an explicit mask."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import ConfigError, InputError, RankMismatch
from moe_comm.layers.attention import context
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig, Yarn
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.attention.sequence import Documents, shard_sequence, unshard_sequence
from moe_comm.layers.parallel import linear
from moe_comm.layers.parallel.recompute import selective_recompute
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from tests.pool import RankPool, on_ranks

BATCH, LENGTH, HIDDEN = 2, 16, 12


@dataclass(frozen=True)
class Case:
    """A layer, its inputs, and its mapping."""

    config: AttentionConfig
    tp: int = 1
    cp: int = 1
    context: str = "ulysses"
    documents: tuple[tuple[int, ...], ...] | None = None
    restart: bool = False
    sequence_parallel: bool = True
    recompute: bool = False
    overlap: Overlap | None = None
    dtype: torch.dtype = torch.float64
    seed: int = field(default=0)


def gqa(**changes: Any) -> AttentionConfig:
    return replace(AttentionConfig(hidden=HIDDEN, heads=8, kv_heads=4, head_dim=6), **changes)


LATENT = gqa(
    mla=MLAConfig(q_rank=10, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=4),
    rope=RopeConfig(interleaved=True, yarn=Yarn(4.0, 8, mscale=1.0, mscale_all_dim=1.0)),
    kv_heads=8,
)
PACKED = ((3, 1, 7, 5), (16,))

VARIANTS = {
    "grouped": gqa(),
    "one_kv_head": gqa(kv_heads=2),
    "head_norm": gqa(qk_norm="head", bias=True, out_bias=True),
    "full_norm_clipped": gqa(qk_norm="full", clip_qkv=0.3),
    "window": gqa(window=5),
    "latent": LATENT,
    "latent_direct_queries": replace(LATENT, mla=MLAConfig(None, 6, 4, 2, v_dim=4), bias=True),
}


def weights(config: AttentionConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights of the full layer. Norm weights are near 1, but not equal to it."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4 + ("norm" in name)).to(dtype)
        for name, p in Attention(config).named_parameters()
    }


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return x, the gradient of the output, document ids and positions of the full sequence."""
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.documents is None:
        return x, grad, None, None
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in case.documents])
    return x, grad, ids, Documents(ids).positions_BS if case.restart else None


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Run plain float64 attention with an explicit mask. It shares only RoPE with the layer."""
    config = case.config
    w = {name: value.double().requires_grad_() for name, value in weights(config, case.dtype).items()}
    x, grad, ids, positions = inputs(case)
    x.requires_grad_()
    layer = Attention(config)
    table = layer.rope.table(torch.arange(LENGTH)[None] if positions is None else positions, torch.float64)

    def linear(name: str, value: Tensor) -> Tensor:
        return nn.functional.linear(value, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name: str, value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]

    mla = config.mla
    if mla is not None:
        q = linear("q", x) if mla.q_rank is None else linear("q_b", norm("q_a_norm", linear("q_a", x)))
        q = q.unflatten(-1, (config.heads, -1))
        latent, key = linear("kv_a", x).split([mla.kv_rank, mla.rope_dim], -1)
        kv = linear("kv_b", norm("kv_a_norm", latent)).unflatten(-1, (config.heads, -1))
        key = layer.rope.rotate(key.unsqueeze(2), table).expand(-1, -1, config.heads, -1)
        q = torch.cat([q[..., : mla.nope_dim], layer.rope.rotate(q[..., mla.nope_dim :], table)], -1)
        k, v = torch.cat([kv[..., : mla.nope_dim], key], -1), kv[..., mla.nope_dim :]
    else:
        q, k, v = (linear(name, x) for name in "qkv")
        if config.qk_norm == "full":
            q, k = norm("q_norm", q), norm("k_norm", k)
        if config.clip_qkv is not None:
            q, k, v = (t.clamp(-config.clip_qkv, config.clip_qkv) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
        if config.qk_norm == "head":
            q, k = norm("q_norm", q), norm("k_norm", k)
        q, k = layer.rope.rotate(q, table), layer.rope.rotate(k, table)
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, 2) for t in (k, v))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    allowed = (distance >= 0) & (distance < (config.window or LENGTH))
    if ids is not None:
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * layer.spec.scale
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)
    y = linear("o", out.flatten(2))
    y.backward(grad)
    grads = {name: value.grad for name, value in w.items()}
    return y.detach(), {"x": x.grad, **grads}  # type: ignore[dict-item]


def shardings(layer: Attention) -> dict[str, Sharding]:
    by_name = {name: Sharding(tuple(p.shape)) for name, p in layer.named_parameters()}
    for prefix, module in layer.named_modules():
        if hasattr(module, "shardings"):
            by_name.update({f"{prefix}.{name}": sharding for name, sharding in module.shardings().items()})
    return by_name


def run(rank: int, world: int, cases: list[Case]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [run_one(case, ParallelMesh(ParallelConfig(tp=case.tp, cp=case.cp))) for case in cases]


def run_one(case: Case, mesh: ParallelMesh) -> tuple[Tensor, dict[str, Tensor]]:
    """Assemble the full output and gradients from the ranks' parts by the layer's shardings."""
    tp_group, cp_group = mesh.group("tp"), mesh.group("cp")
    tp, cp = mesh.place["tp"], mesh.place["cp"]
    layer = Attention(
        case.config,
        tp_group,
        cp_group,
        context=case.context,  # type: ignore[arg-type]
        sequence_parallel=case.sequence_parallel,
        overlap=case.overlap,
        dtype=case.dtype,
    )
    layer_shardings = shardings(layer)
    full_weights = weights(case.config, case.dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(layer_shardings[name].take(full_weights[name], mesh.place, mesh.sizes))

    def own(t: Tensor) -> Tensor:
        t = shard_sequence(t, case.cp, cp, case.context)  # type: ignore[arg-type]
        return t.chunk(case.tp, 1)[tp] if case.sequence_parallel else t

    full_x, grad, ids, positions = inputs(case)
    x = own(full_x).to(case.dtype).requires_grad_()
    local_ids, local_positions = (
        None if t is None else shard_sequence(t, case.cp, cp, case.context)  # type: ignore[arg-type]
        for t in (ids, positions)
    )
    documents = None if local_ids is None else Documents.of(local_ids, cp_group, case.context)  # type: ignore[arg-type]
    if case.recompute:
        y = checkpoint(layer, x, local_positions, documents, use_reentrant=False)
    else:
        y = layer(x, local_positions, documents)
    y.backward(own(grad).to(case.dtype))
    parts: list[Any] = [None] * (case.tp * case.cp)
    own_result = (y.detach(), {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    if case.tp * case.cp == 1:
        parts = [own_result]
    else:
        dist.all_gather_object(parts, own_result)
    return full_sequence([p[0] for p in parts], case), gather_grads([p[1] for p in parts], case, layer_shardings, mesh)


def full_sequence(parts: list[Tensor], case: Case) -> Tensor:
    """Return the full sequence from the ranks' parts, tp fastest."""
    rows = [parts[at : at + case.tp] for at in range(0, len(parts), case.tp)]
    if not case.sequence_parallel:
        assert all(torch.equal(row[0], part) for row in rows for part in row)
    local = [torch.cat(row, 1) if case.sequence_parallel else row[0] for row in rows]
    return unshard_sequence(local, case.context)  # type: ignore[arg-type]


def gather_grads(
    parts: list[dict[str, Tensor]], case: Case, layer_shardings: dict[str, Sharding], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Sum gradients over the ranks, except over tp with replicated tokens, where they are complete."""
    grads = {"x": full_sequence([part["x"] for part in parts], case)}
    for name, sharding in layer_shardings.items():
        total = torch.zeros(sharding.shape, dtype=parts[0][name].dtype)
        replicated = not case.sequence_parallel and not sharding.splits
        for rank, part in enumerate(parts):
            place = mesh.config.place(rank)
            if replicated and place["tp"]:
                first_tp_rank = parts[rank - place["tp"]][name]
                torch.testing.assert_close(part[name], first_tp_rank, rtol=0, atol=0)
                continue
            for box in sharding.boxes(place, mesh.sizes):
                total[box.full] += part[name][box.local]
        grads[name] = total
    return grads


def check(results: list[Any], cases: list[Case], rtol: float = 1e-9) -> None:
    for index, case in enumerate(cases):
        y, grads = reference(case)
        actual_y, actual_grads = results[index]
        assert actual_grads.keys() == grads.keys()
        for name, expected in {"y": y, **grads}.items():
            actual = actual_y if name == "y" else actual_grads[name]
            error = float((actual - expected).abs().max() / expected.abs().max())
            assert error < rtol, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_equals_the_plain_reference(variant: str) -> None:
    mesh = ParallelMesh(ParallelConfig())
    cases = [Case(VARIANTS[variant]), Case(VARIANTS[variant], documents=PACKED, restart=True)]
    check([run_one(case, mesh) for case in cases], cases)


OVERLAP = Overlap(chunks=3, chunk_bytes=1)


def plain_and_packed(variant: str, **options: Any) -> list[Case]:
    config = VARIANTS[variant]
    return [Case(config, **options), Case(config, documents=PACKED, restart=variant == "latent", **options)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_the_plain_reference(variant: str, pool2: RankPool) -> None:
    cases = [
        *plain_and_packed(variant, tp=2),
        Case(VARIANTS[variant], tp=2, sequence_parallel=False),
        *plain_and_packed(variant, cp=2),
        *plain_and_packed(variant, cp=2, context="ring"),
        *plain_and_packed(variant, cp=2, context="token_ring"),
        *plain_and_packed(variant, tp=2, overlap=OVERLAP),
        *plain_and_packed(variant, cp=2, overlap=OVERLAP),
        Case(VARIANTS[variant], cp=2, overlap=OVERLAP, documents=PACKED, restart=True),
        Case(VARIANTS[variant], cp=2, overlap=Overlap(2, 1, deterministic=False)),
    ]
    check(pool2.run(run, cases)[0], cases)


@pytest.mark.parametrize("variant", VARIANTS)
def test_four_ranks_equal_the_plain_reference(variant: str, pool4: RankPool) -> None:
    """Each combination of axes, context and overlap with documents; without them on two ranks."""
    config, packed = VARIANTS[variant], {"documents": PACKED, "restart": variant == "latent"}
    cases = [
        Case(config, tp=2, cp=2, overlap=OVERLAP, **packed),
        Case(config, tp=2, cp=2, context="ring", **packed),
        Case(config, cp=4, overlap=OVERLAP, recompute=True, **packed),
    ]
    if variant in ("one_kv_head", "full_norm_clipped", "latent"):
        cases += [
            Case(config, tp=2, cp=2, **packed),
            Case(config, cp=4, context="ring", **packed),
            Case(config, tp=2, cp=2, context="token_ring", recompute=True),
            Case(config, cp=4, context="token_ring", **packed),
            Case(config, tp=2, cp=2, context="ring", sequence_parallel=False),
            Case(config, tp=2, cp=2, overlap=OVERLAP, sequence_parallel=False, **packed),
        ]
    check(pool4.run(run, cases)[0], cases)


def compare_transports(rank: int, world: int, case: Case) -> None:
    """Compare bits for several numbers of chunks, both transports, and with and without recomputation."""
    results = []
    mesh = ParallelMesh(ParallelConfig(tp=case.tp, cp=case.cp))
    try:
        for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False, checked=True)):
            configure_collectives(options)
            for chunks in (1, 2):
                results.append(run_one(replace(case, overlap=Overlap(chunks, 1)), mesh))
            with selective_recompute():
                results.append(run_one(replace(case, overlap=Overlap(2, 1)), mesh))
    finally:
        configure_collectives(CollectiveOptions())
    for y, grads in results[1:]:
        assert torch.equal(y, results[0][0])
        assert all(torch.equal(grads[name], value) for name, value in results[0][1].items())


@pytest.mark.parametrize("variant", ["head_norm", "latent"])
def test_the_number_of_chunks_the_transport_and_recomputation_change_no_bit(variant: str, pool2: RankPool) -> None:
    for sizes in ({"cp": 2}, {"tp": 2}):
        case = Case(VARIANTS[variant], documents=PACKED, restart=True, dtype=torch.float32, **sizes)  # type: ignore[arg-type]
        pool2.run(compare_transports, case)


def count_operators(rank: int, world: int, cases: list[Case]) -> list[dict[str, int]]:
    """Count how often each operator runs in a forward pass, by case."""
    counts_by_case = []
    for case in cases:
        counts = dict.fromkeys(("gather_matmul", "matmul_scatter", "matmul_swap", "swap_matmul"), 0)

        def counting(name: str, operator: Any, counts: dict[str, int] = counts) -> Any:
            def count(*args: Any) -> Tensor:
                counts[name] += 1
                result: Tensor = operator(*args)
                return result

            return count

        with pytest.MonkeyPatch.context() as patch:
            for name in counts:
                module: Any = linear if hasattr(linear, name) else context
                patch.setattr(module, name, counting(name, getattr(module, name)))
            run_one(case, ParallelMesh(ParallelConfig(tp=case.tp, cp=case.cp)))
        counts_by_case.append(counts)
    return counts_by_case


def test_projections_use_the_overlapped_operators(pool2: RankPool) -> None:
    cases, expected = [], []
    for variant, gathers in (("grouped", 1), ("latent", 2), ("full_norm_clipped", 1)):
        swaps_in = 0 if variant == "full_norm_clipped" else gathers
        cases += [
            Case(VARIANTS[variant], tp=2, overlap=OVERLAP),
            Case(VARIANTS[variant], cp=2, overlap=OVERLAP),
            Case(VARIANTS[variant], cp=2, overlap=OVERLAP, context="ring"),
        ]
        expected += [(gathers, 1, 0, 0), (0, 0, swaps_in, 1), (0, 0, 0, 0)]
    assert [tuple(counts.values()) for counts in pool2.run(count_operators, cases)[0]] == expected


@on_ranks(2)
def test_bad_input_to_overlapped_ulysses_is_an_error_on_every_rank(rank: int) -> None:
    x = torch.ones(1, 8, HIDDEN)
    layer = Attention(VARIANTS["grouped"], cp_group=dist.group.WORLD, overlap=Overlap(2 + rank, 1))
    with pytest.raises(RankMismatch):
        layer(torch.ones(1, 64, HIDDEN))
    layer = Attention(VARIANTS["grouped"], cp_group=dist.group.WORLD, overlap=OVERLAP)
    with pytest.raises(InputError, match="the full sequences have shape"):
        layer(x, None, Documents(torch.zeros(1, 8, dtype=torch.long)))
    with pytest.raises(ConfigError, match="cp 2 does not divide the 3 heads of a rank"):
        Attention(gqa(heads=3, kv_heads=3), cp_group=dist.group.WORLD, overlap=OVERLAP)


def test_bf16_stays_close_to_float64(pool4: RankPool) -> None:
    cases = [
        Case(VARIANTS[variant], tp=2, cp=2, context=context, dtype=torch.bfloat16)
        for variant, context in (("grouped", "ulysses"), ("latent", "ring"), ("window", "token_ring"))
    ]
    cases += [Case(VARIANTS["grouped"], cp=4, overlap=OVERLAP, dtype=torch.bfloat16)]
    results = pool4.run(run, cases)[0]
    assert all(y.dtype == torch.bfloat16 for y, _ in results)
    check(results, cases, rtol=0.08)


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_runs_in_bf16_also_in_blocks(variant: str) -> None:
    layer = Attention(VARIANTS[variant])
    with torch.no_grad():
        for name, value in weights(VARIANTS[variant], torch.float32).items():
            layer.get_parameter(name).copy_(value)
    x, _, ids, _ = inputs(Case(VARIANTS[variant], documents=PACKED))
    x = x.float().requires_grad_()
    expected = layer(x, None, ids)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, None, ids)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert float((y - expected).detach().abs().max() / expected.detach().abs().max()) < 0.08
