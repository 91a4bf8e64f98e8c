"""Sequence layouts, documents, and attention in blocks: results, costs and transfers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import ConfigError, InputError, PeerDied, PeerRaised, RankMismatch
from moe_comm.layers.attention import attention_blocks, sequence
from moe_comm.layers.attention.config import AttentionConfig, Context, MLAConfig
from moe_comm.layers.attention.context import (
    ContextSpec,
    check_heads,
    context_attention,
    local_attention,
    ring_attention,
    token_ring_attention,
)
from moe_comm.layers.attention.key_exchange import KeyRanges
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.attention.placed import DocumentPlacement
from moe_comm.layers.attention.sequence import (
    Documents,
    SequenceChunk,
    local_positions,
    shard_sequence,
    unshard_sequence,
)
from tests.pool import RankPool, on_ranks

CONTEXTS: tuple[Context, ...] = ("ulysses", "ring", "token_ring")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks and groups, so that short sequences have many of them."""
    monkeypatch.setattr(sequence, "GROUP_TOKENS", 6)
    monkeypatch.setattr(attention_blocks, "BLOCK_MIN", 4)


# --- layouts ---


def test_zigzag_gives_each_rank_a_chunk_from_each_end() -> None:
    assert [local_positions(8, 2, rank, "ring").tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert local_positions(3, 1, 0, "ring").tolist() == [0, 1, 2]


@settings(max_examples=30, deadline=None)
@given(cp=st.integers(1, 5), chunk=st.integers(1, 3), context=st.sampled_from(CONTEXTS), dim=st.integers(0, 2))
def test_sharding_a_sequence_has_an_inverse_and_follows_the_positions(
    cp: int, chunk: int, context: Any, dim: int
) -> None:
    length = 2 * cp * chunk
    whole = torch.arange(3 * length * 2).view(3, length, 2).movedim(1, dim)
    parts = [shard_sequence(whole, cp, rank, context, dim) for rank in range(cp)]
    assert torch.equal(unshard_sequence(parts, context, dim), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, local_positions(length, cp, rank, context)))


def test_sequences_that_cannot_be_split_raise_with_both_numbers() -> None:
    with pytest.raises(InputError, match="10 tokens cannot be split into 4 equal chunks"):
        local_positions(10, 2, 0, "ring")
    with pytest.raises(InputError, match="9 tokens cannot be split into 2 equal chunks"):
        local_positions(9, 2, 0, "ulysses")
    with pytest.raises(ConfigError, match="cp 4 does not divide the 6 heads of a rank"):
        check_heads(6, 4, "ulysses")
    check_heads(6, 4, "ring")
    check_heads(6, 4, "token_ring")
    with pytest.raises(ConfigError, match="ulysses, ring, token_ring"):
        check_heads(6, 2, "rings")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 2 is outside"):
        local_positions(8, 2, 2, "ring")


def test_documents_are_runs_of_equal_ids(small_blocks: None) -> None:
    documents = Documents(torch.tensor([[5, 5, 5, 5, 5, 5, 5, 2, 2, 5], [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]]))
    assert documents.runs_BS[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert documents.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 0], [0, 1, 0, 1, 2, 0, 0, 1, 2, 3]]
    row0, row1 = slice(0, 1), slice(1, 2)
    # A long document is a group without a mask. Short documents share a group of up to 6 tokens.
    assert documents.groups == [(row0, 0, 7, False), (row0, 7, 10, True), (row1, 0, 6, True), (row1, 6, 10, False)]


def test_invalid_documents_and_positions_raise() -> None:
    with pytest.raises(InputError, match="must be integers"):
        Documents.of(torch.zeros(2, 3))
    layer = Attention(AttentionConfig(8, 2, 2, 4))
    x = torch.zeros(2, 6, 8)
    with pytest.raises(InputError, match="the full sequences have shape"):
        layer(x, None, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(InputError, match=r"positions must be \[2 or 1, 6\]"):
        layer(x, torch.arange(5)[None])
    with pytest.raises(InputError, match=r"expects \[B, S, 8\]"):
        layer(x[..., :4])
    with pytest.raises(ConfigError, match="qk_norm"):
        AttentionConfig(8, 2, 2, 4, qk_norm="head", mla=MLAConfig(None, 4, 4, 2, 4))
    with pytest.raises(ConfigError, match="widths"):
        MLAConfig(0, 4, 4, 2, 4)


# --- blocks ---


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, documents: Documents | None) -> Tensor:
    """Run attention with an S x S mask."""
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    mask = (distance >= 0) & (distance < (window or q.shape[1]))
    if documents is not None:
        mask = mask & (documents.ids_BS[:, :, None] == documents.ids_BS[:, None])[:, None]
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def draw(length: int, heads: tuple[int, int], v_width: int, packed: bool) -> tuple[list[Tensor], Tensor, Any]:
    generator = torch.Generator().manual_seed(length + v_width)
    shapes = ((heads[0], 8), (heads[1], 8), (heads[1], v_width), (heads[0], v_width))
    q, k, v, grad = (torch.randn(2, length, *s, dtype=torch.float64, generator=generator) for s in shapes)
    ids = (torch.rand(2, length, generator=generator) < 0.2).long().cumsum(1)
    return [t.requires_grad_() for t in (q, k, v)], grad, Documents(ids) if packed else None


def assert_same(actual: Tensor, expected: Tensor, qkv: list[Tensor], grad: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(actual, qkv, grad), torch.autograd.grad(expected, qkv, grad), strict=True
    ):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kernel", ["cpu flash", "plain"])
@pytest.mark.parametrize("v_width", [4, 8, 12])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_blocks_merge_to_attention_with_a_mask(
    window: int | None,
    packed: bool,
    v_width: int,
    kernel: str,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_blocks, "_kernel", lambda *_: kernel)
    for heads in ((4, 2), (3, 3)):
        qkv, grad, documents = draw(24, heads, v_width, packed)
        actual = local_attention(qkv[0], qkv[1], qkv[2], ContextSpec(None, "ulysses", 0.3, window, documents))
        assert_same(actual, dense(qkv[0], qkv[1], qkv[2], 0.3, window, documents), qkv, grad)


def test_plain_causal_attention_uses_the_flash_kernel_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        out = original(*args, **kwargs)
        calls[-1]["by"] = type(out.grad_fn).__name__
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for heads, v_width in (((4, 2), 8), ((3, 3), 4)):
        qkv, _, _ = draw(16, heads, v_width, False)
        local_attention(qkv[0], qkv[1], qkv[2], ContextSpec(None, "ulysses", 0.3))
        assert "FlashAttention" in calls[-1]["by"]
        assert calls[-1]["is_causal"] and calls[-1].get("attn_mask") is None


def area(blocks: list[attention_blocks.ScoreBlock]) -> int:
    def size(s: slice) -> int:
        return int(s.stop - s.start)

    return sum(size(p.rows) * size(p.queries) * size(p.keys) for p in blocks)


def test_windows_and_documents_compute_only_attended_blocks() -> None:
    length = 8192
    q = torch.empty(1, 1, length, 8, device="meta")
    windowed = ContextSpec(None, "ring", 1.0, window=256).blocks(q, 0)
    assert area(windowed) <= 2 * 256 * length
    masks = {id(p.mask_BQK): p.mask_BQK for p in windowed if p.mask_BQK is not None}
    assert sum(mask.numel() for mask in masks.values()) <= 4 * 512 * 256  # one mask for all blocks except the first
    ids = (torch.arange(length) // 1024)[None]
    packed = ContextSpec(None, "ring", 1.0, documents=Documents(ids)).blocks(q, 0)
    assert area(packed) == 8 * 1024 * 1024 and all(p.mask_BQK is None for p in packed)


def test_all_ranks_of_a_ring_have_the_same_work_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cp, chunk = 4, 3
    q = torch.empty(2, 1, 2 * chunk, 8)
    monkeypatch.setattr("moe_comm.layers.attention.context.group_size", lambda group: cp)
    work = []
    for rank in range(cp):
        monkeypatch.setattr("moe_comm.layers.attention.context.group_rank", lambda group, rank=rank: rank)
        work.append([area(ContextSpec(None, "ring", 1.0).blocks(q, (rank - step) % cp)) for step in range(cp)])
    assert work == [[2 * 3 * chunk**2] + [2 * 2 * chunk**2] * (cp - 1)] * cp


# --- keys that ranks send ---


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 3), min_size=54, max_size=54),
    window=st.sampled_from([None, 1, 2, 5]),
)
def test_ranks_send_exactly_the_keys_that_are_attended_to(
    lengths: list[int], cuts: list[int], window: int | None
) -> None:
    """Give each run of positions with equal numbers in ``cuts`` to a rank, and compare with all pairs of tokens."""
    total, ranks = sum(lengths), 4
    owner = cuts[:total]
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    chunks: list[list[SequenceChunk]] = [[] for _ in range(ranks)]
    place = [0] * total
    held = [0] * ranks
    for at in range(total):
        rank = owner[at]
        place[at] = held[rank]
        if at and owner[at - 1] == rank:
            chunks[rank][-1] = chunks[rank][-1]._replace(size=chunks[rank][-1].size + 1)
        else:
            chunks[rank].append(SequenceChunk(at, held[rank], 1))
        held[rank] += 1
    starts = [document.index(d) for d in document]
    ranges = KeyRanges(chunks, lambda query: max(starts[query], query - (window or total) + 1))
    for query_rank in range(ranks):
        for key_rank in range(ranks):
            expected = {
                key
                for query in range(total)
                for key in range(query + 1)
                if (owner[query], owner[key]) == (query_rank, key_rank) != (key_rank, key_rank)
                and document[query] == document[key]
                and query - key < (window or total)
            }
            sent = ranges.of(query_rank, key_rank)
            keys = [start + i for start, _, size in sent for i in range(size)]
            assert keys == sorted(expected) and [local + i for _, local, n in sent for i in range(n)] == [
                place[key] for key in keys
            ]
            assert ranges.tokens(query_rank, key_rank) == len(expected)
            assert not expected or query_rank ^ key_rank in ranges.steps


# --- over ranks ---


def ring_spec(window: int | None = None, documents: Documents | None = None) -> ContextSpec:
    group: Any = dist.group
    return ContextSpec(group.WORLD, "ring", 0.3, window, documents)


def both_rings(rank: int, world: int, dtype: torch.dtype) -> None:
    """Run both rings over both transports. Bits must not depend on the transport; the rings agree up to rounding."""
    sequence.GROUP_TOKENS, attention_blocks.BLOCK_MIN = 6, 4
    group: Any = dist.group
    for window, packed, heads, v_width in ((None, False, (4, 4), 8), (3, True, (4, 2), 4), (None, True, (3, 3), 12)):
        qkv, grad, documents = draw(32, heads, v_width, packed)
        if documents is not None:
            ids = shard_sequence(documents.ids_BS, world, rank, "ring")
            documents = Documents.of(ids, group.WORLD, "ring")
        results_by_ring: dict[Any, list[list[Tensor]]] = {ring_attention: [], token_ring_attention: []}
        for attend, results in results_by_ring.items():
            for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False, checked=True)):
                configure_collectives(options)
                own = [shard_sequence(t.detach(), world, rank, "ring").to(dtype).transpose(1, 2) for t in qkv]
                for t in own:
                    t.requires_grad_()
                out = attend(*own, ring_spec(window, documents))
                out.backward(shard_sequence(grad, world, rank, "ring").to(dtype).transpose(1, 2))
                results.append([out.detach(), *(t.grad for t in own if t.grad is not None)])
            configure_collectives(CollectiveOptions())
            assert all(t.dtype == dtype for t in results[0])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        scale = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        for ring, token_ring in zip(
            results_by_ring[ring_attention][0], results_by_ring[token_ring_attention][0], strict=True
        ):
            largest = float(ring.abs().max())
            torch.testing.assert_close(token_ring, ring, rtol=0, atol=scale * largest)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float64)], ids=str)
def test_the_token_ring_equals_the_ring_up_to_rounding_and_both_are_deterministic(
    world: int, dtype: torch.dtype, pools: dict[int, RankPool]
) -> None:
    pools[world].run(both_rings, dtype)


def record(rank: int, world: int, name: str) -> tuple[list[str], list[str], list[int], list[int]]:
    """Record sends, receives and computations in order, with the distance to the destination, forward and backward."""
    events: list[str] = []
    steps: list[int] = []
    send_receive, add_scores, add_gradients = (
        Channel.send_receive,
        attention_blocks.AttentionState.add,
        attention_blocks.AttentionGradients.add,
    )
    kinds = {"values": "keys", "queries": "queries", "outputs": "back", "gradients of": "back"}

    def record_send(
        channel: Any, tensor: Tensor, to_rank: int, from_rank: int, received: int, description: str
    ) -> PendingTensor:
        tensor_kind = next(kinds[key] for key in ("gradients of", "values", "outputs", "queries") if key in description)
        events.append(f"send {tensor_kind}")
        steps.append((to_rank - rank) % world if name == "token_ring" else to_rank ^ rank)
        pending = send_receive(channel, tensor, to_rank, from_rank, received, description)

        def record_arrival(tensor: Tensor) -> Tensor:
            events.append(f"take {tensor_kind}")
            return tensor

        return pending.then(record_arrival)

    def record_add(self: Any, *args: Any) -> None:
        events.append("attend")
        (add_scores if isinstance(self, attention_blocks.AttentionState) else add_gradients)(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send_receive", record_send)
        patch.setattr(attention_blocks.AttentionState, "add", record_add)
        patch.setattr(attention_blocks.AttentionGradients, "add", record_add)
        q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
        run: Any = ring_attention if name == "ring" else token_ring_attention
        out = run(q, k, v, ring_spec())
        forward = list(events), list(steps)
        events.clear()
        steps.clear()
        out.sum().backward()
        return forward[0], list(events), forward[1], list(steps)


def test_transfers_of_keys_and_gradients_overlap_with_computation(
    pool4: RankPool,
) -> None:
    for forward, backward, *steps in pool4.run(record, "ring"):
        step = ["send keys", "attend", "take keys"]
        assert forward == [*step, *step, *step, "attend"]
        assert backward == [
            *("send keys", "attend", "take keys"),
            *("send keys", "attend", "send back", "take keys"),
            *("send keys", "attend", "take back", "send back", "take keys"),
            *("attend", "take back", "send back"),
            *("attend", "take back"),  # the second half of the own blocks overlaps with the return of gradients
        ]
        assert steps == [[1, 2, 3], [1, 2, 1, 3, 2, 3]]


def count_bytes(rank: int, world: int, name: str) -> list[tuple[int, int]]:
    """Return (transfers, bytes) that this rank sends of: one document; documents that end at the ends of chunks; short
    documents; a window. Forward and backward in fp32, 2 key heads of width 4."""
    sent: list[int] = []
    send_receive = Channel.send_receive

    def count(channel: Any, tensor: Tensor, *args: Any) -> PendingTensor:
        sent.append(tensor.nbytes)
        return send_receive(channel, tensor, *args)

    results = []
    group: Any = dist.group
    q, k, v = (torch.randn(1, 2, 16, 4, requires_grad=True) for _ in range(3))
    positions = torch.arange(16 * world)[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send_receive", count)
        for window, ids_BS in ((None, None), (None, positions // 8), (None, (positions + 2) // 8), (3, None)):
            documents = None
            if ids_BS is not None:
                documents = Documents.of(shard_sequence(ids_BS, world, rank, "ring"), group.WORLD, "ring")
            sent.clear()
            attend: Any = ring_attention if name == "ring" else token_ring_attention
            attend(q, k, v, ring_spec(window, documents)).sum().backward()
            results.append((len(sent), sum(sent)))
    return results


def test_the_bytes_of_the_ring_are_those_of_the_keys_that_other_ranks_attend_to(pool4: RankPool) -> None:
    key_bytes, cp, chunk = 2 * 2 * 4 * 4, 4, 8
    for rank, (whole, aligned, cut, window) in enumerate(pool4.run(count_bytes, "ring")):
        # Keys and values are sent forward and backward, and their gradients return. All ranks need the first chunk;
        # only lower ranks have queries after the second one. Gradients return for the keys that were received.
        sent = (cp - 1) * chunk + rank * chunk
        returned = sum(chunk + (other > rank) * chunk for other in range(cp) if other != rank)
        assert whole == (3 * (cp - 1), (2 * sent + returned) * key_bytes)
        assert aligned == (0, 0)
        # At each of the 7 cuts between chunks, the queries after it need 2 keys before it: those of their document, or
        # of their window. The cut in the middle of the sequence is within rank 3.
        neighbours = 1 if rank in (0, 3) else 2
        assert cut == window == (3 * 2, 3 * neighbours * 2 * key_bytes)


@on_ranks(4)
def test_documents_on_one_rank_send_nothing_and_others_their_keys(rank: int, world: int) -> None:
    """A document of 16 tokens on ranks 0 and 1, in chunks of 4: rank 1 needs chunk 0, and rank 0 chunks 1 and 2."""
    group: Any = dist.group
    key_bytes, sent = 2 * 2 * 4 * 4, list[int]()
    send_receive = Channel.send_receive

    def count(channel: Any, tensor: Tensor, *args: Any) -> PendingTensor:
        sent.append(tensor.nbytes)
        return send_receive(channel, tensor, *args)

    alone: list[tuple[int, ...]] = [(0,), (1,), (2,), (3,), (1,)]
    for lengths, ranks, expected in (
        ([9, 8, 7, 6, 1], alone, [0] * 4),
        ([9, 8, 7, 6, 1, 16], [*alone, (0, 1)], [2 * 4 + 8, 2 * 8 + 4, 0, 0]),
    ):
        documents = DocumentPlacement.of(lengths, ranks, world).documents("cpu")
        tokens = sum(chunk.size for chunk in documents.chunks[rank])
        q, k, v = (torch.randn(1, 2, tokens, 4, requires_grad=True) for _ in range(3))
        sent.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send_receive", count)
            ring_attention(q, k, v, ContextSpec(group.WORLD, "ring", 0.5, None, documents)).sum().backward()
        assert sum(sent) == expected[rank] * key_bytes  # keys forward and backward, and the received ones' gradients
        assert bool(sent) == any(expected)


def test_the_token_ring_skips_ranks_whose_keys_no_query_needs(pool4: RankPool) -> None:
    for whole, aligned, cut, window in pool4.run(count_bytes, "token_ring"):
        assert (whole[0], aligned[0]) == (2 * (3 + 3), 0)
        assert cut == window and cut[0] == 2 * (2 + 2)  # to the next rank and, in one hop from there, to the previous
        assert 3 * cut[1] == 2 * whole[1]


def test_transfers_of_queries_and_results_overlap_with_computation(pool4: RankPool) -> None:
    for forward, backward, *steps in pool4.run(record, "token_ring"):
        assert forward == [
            *("send queries", "attend", "take queries"),
            *("send queries", "attend", "send back", "take queries"),
            *("send queries", "attend", "take back", "send back", "take queries"),
            *("attend", "take back", "send back"),
            *("attend", "take back"),
        ]
        assert backward == forward
        assert steps == [[1, 1, 3, 1, 2, 1]] * 2


@on_ranks(2)
def test_a_mismatch_between_ranks_of_a_ring_raises_on_all_and_the_next_call_works(rank: int) -> None:
    def draw_heads(length: int, width: int = 4) -> list[Tensor]:
        return [torch.ones(1, 2, length, width).requires_grad_() for _ in range(3)]

    attends: tuple[Any, ...] = (ring_attention, token_ring_attention)
    try:
        for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False, checked=True)):
            configure_collectives(options)
            for attend in attends:
                with pytest.raises(RankMismatch):
                    attend(*draw_heads(4 + 4 * rank), ring_spec())
                with pytest.raises(RankMismatch):
                    attend(*draw_heads(4), ring_spec(window=3 + rank))
            with pytest.raises(RankMismatch):
                attends[rank](*draw_heads(4), ring_spec())
            with pytest.raises(InputError, match="cannot be split into 4 equal chunks"):
                attends[0](*draw_heads(3), ring_spec())
            attends[1](*draw_heads(4), ring_spec()).sum().backward()
    finally:
        configure_collectives(CollectiveOptions())


@on_ranks(4)
def test_four_ranks_with_many_blocks_equal_attention_with_a_mask(rank: int, world: int) -> None:
    sequence.GROUP_TOKENS, attention_blocks.BLOCK_MIN = 6, 4
    group: Any = dist.group
    for context in CONTEXTS:
        for window in (None, 3):
            for packed in (False, True):
                for heads in ((4, 2), (12, 6)):
                    qkv, grad, documents = draw(32, heads, 4, packed)
                    own = [shard_sequence(t, world, rank, context).detach().requires_grad_() for t in qkv]
                    if documents is not None:
                        ids = shard_sequence(documents.ids_BS, world, rank, context)
                        documents = Documents.of(ids, group.WORLD, context)
                    expected = dense(qkv[0], qkv[1], qkv[2], 0.3, window, documents)
                    spec = ContextSpec(group.WORLD, context, 0.3, window, documents)
                    out = context_attention(own[0], own[1], own[2], spec)
                    out.backward(shard_sequence(grad, world, rank, context))
                    all_expected = [expected, *torch.autograd.grad(expected, qkv, grad)]
                    for actual, whole in zip([out, *(t.grad for t in own)], all_expected, strict=True):
                        part = shard_sequence(whole, world, rank, context)
                        torch.testing.assert_close(actual, part, rtol=0, atol=1e-11)


@on_ranks(4)
def test_documents_placed_on_single_ranks_equal_attention_with_a_mask(rank: int, world: int) -> None:
    """Documents on 1, 2 and 4 ranks with uneven chunks, more ranks than tokens, and a rank without documents."""
    sequence.GROUP_TOKENS, attention_blocks.BLOCK_MIN = 6, 4
    group: Any = dist.group
    cases: list[tuple[list[int], list[tuple[int, ...]]]] = [
        ([13, 2, 7, 1, 9, 3, 4], [(0, 1, 2, 3), (0,), (2, 3), (0,), (3, 2), (1,), (0,)]),
        ([5, 3, 9], [(0, 1, 2, 3), (2,), (0, 1)]),
        ([4, 1, 2], [(0,), (0,), (2,)]),
    ]
    for lengths, ranks in cases:
        for window, heads in ((None, (4, 2)), (3, (3, 3))):
            placement = DocumentPlacement.of(lengths, ranks, world, multiple=2)
            assert all(
                sum(piece.size for piece in own) % 2 == pad % 2
                for own, pad in zip(placement.pieces, placement.padding, strict=True)
            )
            documents = placement.documents("cpu")
            total = documents.ids_BS.shape[1]
            generator = torch.Generator().manual_seed(total)
            shapes = ((heads[0], 8), (heads[1], 8), (heads[1], 4), (heads[0], 4))
            *qkv, grad = (torch.randn(1, total, *s, dtype=torch.float64, generator=generator) for s in shapes)
            qkv = [t.requires_grad_() for t in qkv]
            expected = dense(qkv[0], qkv[1], qkv[2], 0.3, window, documents)
            wanted = [expected, *torch.autograd.grad(expected, qkv, grad)]

            def shard(full: Tensor, chunks: Any = placement.chunks[rank]) -> Tensor:
                return torch.cat([full[:, start : start + size] for start, _, size in chunks], 1)

            own = [shard(t).detach().requires_grad_() for t in qkv]
            out = context_attention(own[0], own[1], own[2], ContextSpec(group.WORLD, "ring", 0.3, window, documents))
            out.backward(shard(grad))
            for actual, whole in zip([out, *(t.grad for t in own)], wanted, strict=True):
                torch.testing.assert_close(actual, shard(whole), rtol=0, atol=1e-11)
    with pytest.raises(InputError, match='with context "ring" only'):
        context_attention(own[0], own[1], own[2], ContextSpec(group.WORLD, "token_ring", 0.3, None, documents))
    q = own[0][:, 1:] if rank == 1 else own[0]
    with pytest.raises(InputError if rank == 1 else PeerRaised, match="but rank 1 of 4"):
        context_attention(q, own[1], own[2], ContextSpec(group.WORLD, "ring", 0.3, None, documents))


@on_ranks(4)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_split_backward_gives_the_same_gradients(rank: int, context: Any) -> None:
    """Run the two parts of backward that zero-bubble schedules separate."""
    group: Any = dist.group
    torch.manual_seed(0)
    config = AttentionConfig(8, 4, 4, 4, qk_norm="head", window=5)
    layer = Attention(config, cp_group=group.WORLD, context=context, dtype=torch.float64)
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    ids = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]])
    y = layer(x * 1.0, None, ids)
    y.backward(torch.ones_like(y))
    expected = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    x.grad = None
    layer.zero_grad()
    y = layer(x * 1.0, None, ids)
    (dx,), groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(layer.parameters()))
    torch.testing.assert_close(dx, expected["x"], rtol=0, atol=1e-12)
    stage_backward_weight(iter(layer.parameters()), groups)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=0, atol=1e-12)


def lose_a_rank(rank: int, world: int, context: Any) -> str:
    group: Any = dist.group
    layer = Attention(AttentionConfig(8, 4, 4, 4), cp_group=group.WORLD, context=context)
    y = layer(torch.ones(1, 4, 8))
    if rank == 2:
        os._exit(1)
    with pytest.raises(PeerDied) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("context", ["ring", "token_ring"])
def test_a_rank_that_exits_in_the_ring_raises_on_all_others(context: str, pool4: RankPool) -> None:
    messages = pool4.run(lose_a_rank, context, expect_dead={2})
    operation = f"{context.replace('_', ' ')} attention backward"
    assert all(operation in message for rank, message in enumerate(messages) if rank != 2)
