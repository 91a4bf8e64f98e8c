"""MoE blocks in the styles of well-known code bases: what users have in models of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, WIDTH, EXPERTS, TOP_K = 24, 40, 7, 2


class TwoLayers(nn.Module):
    def __init__(self, activation: type[nn.Module] = nn.GELU, width: int = WIDTH) -> None:
        super().__init__()
        self.c_fc, self.act, self.c_proj = nn.Linear(D, width), activation(), nn.Linear(width, D)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return y


class ThreeLayers(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, width, bias=False), nn.Linear(width, D, bias=False)
        self.w3 = nn.Linear(D, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class NoisyTopK(nn.Module):
    """nanoGPT with experts: noise in training, a softmax over the selected logits, masks of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.noise = nn.Linear(D, EXPERTS), nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(TwoLayers() for _ in range(EXPERTS))
        self.top_k = TOP_K

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, ids = logits.topk(self.top_k, -1)
        gates = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, ids, top), -1).view(-1, EXPERTS)
        flat, y = x.view(-1, D), torch.zeros_like(x).view(-1, D)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).any(-1).view(-1)
            if chosen.any():
                y[chosen] = y[chosen] + expert(flat[chosen]) * gates[chosen, number].unsqueeze(1)
        return y.view_as(x)


class Mixtral(nn.Module):
    """Mixtral's reference: a softmax over the selected logits in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(ThreeLayers() for _ in range(EXPERTS))
        self.gate = nn.Linear(D, EXPERTS, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, D)
        weights, selected = torch.topk(self.gate(flat), TOP_K)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(inputs)
        results = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(selected == number)
            results[token] += weights[token, slot, None] * expert(flat[token])
        return results.view_as(inputs)


class FlatTokens(Mixtral):
    """Takes a list of tokens only."""

    def forward(self, inputs: Tensor) -> Tensor:
        tokens, hidden = inputs.shape
        return super().forward(inputs.view(tokens, hidden))


class SigmoidGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(EXPERTS, D) * 0.3), nn.Parameter(torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        ids = (scores + self.bias).topk(TOP_K, -1).indices
        weights = scores.gather(1, ids)
        return 2.5 * weights / weights.sum(-1, keepdim=True), ids


class DeepSeek(nn.Module):
    """DeepSeek-V3's inference code: sigmoid, a bias for the selection, scaled weights, shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_experts = SigmoidGate(), ThreeLayers(2 * WIDTH)
        self.experts = nn.ModuleList(ThreeLayers() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.size(), x.view(-1, D)
        weights, ids = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        for number in range(EXPERTS):
            if counts[number]:
                token, slot = torch.where(ids == number)
                y[token] += self.experts[number](x[token]) * weights[token, slot, None]
        return (y + self.shared_experts(x)).view(shape)


class Olmoe(nn.Module):
    """OLMoE: weights that are not normalized, one-hot masks, router logits as a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(ThreeLayers() for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, _ = hidden.shape
        hidden = hidden.view(-1, D)
        logits = self.gate(hidden)
        weights, selected = F.softmax(logits, dim=1, dtype=torch.float).topk(TOP_K, dim=-1)
        y, masks = torch.zeros_like(hidden), F.one_hot(selected, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            slot, token = torch.where(masks[number])
            rows = self.experts[number](hidden[None, token].reshape(-1, D)) * weights[token, slot, None]
            y.index_add_(0, token, rows.to(hidden.dtype))
        return y.view(batch, length, D), logits


class StackedBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, D, WIDTH) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, D) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ecf,efd->ecd", F.gelu(torch.einsum("ecd,edf->ecf", x, self.w1)), self.w2)


class StMoE(nn.Module):
    """ST-MoE: dispatch and combine tensors [T, E, capacity], batched experts, balance and z losses."""

    def __init__(self) -> None:
        super().__init__()
        self.to_gates, self.experts = nn.Linear(D, EXPERTS, bias=False), StackedBatches()

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape, x = x.shape, x.reshape(-1, D)
        tokens = x.shape[0]
        capacity = max(tokens * TOP_K // EXPERTS, 1)
        logits = self.to_gates(x)
        gates = logits.softmax(-1)
        weights, ids = gates.topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        full, combine_TEC = torch.zeros(EXPERTS, dtype=torch.int64), x.new_zeros(tokens, EXPERTS, capacity)
        for slot in range(TOP_K):
            chosen_TE = F.one_hot(ids[:, slot], EXPERTS)
            position_T = ((chosen_TE.cumsum(0) - 1 + full) * chosen_TE).sum(-1)
            full = full + chosen_TE.sum(0)
            kept_T = weights[:, slot] * (position_T < capacity)
            place_TC = F.one_hot(position_T.clamp(max=capacity - 1), capacity)
            combine_TEC = combine_TEC + (chosen_TE * kept_T[:, None])[:, :, None] * place_TC[:, None, :]
        y_ECD = self.experts(torch.einsum("tec,td->ecd", (combine_TEC > 0).to(x.dtype), x))
        first_E = F.one_hot(ids[:, 0], EXPERTS).to(gates.dtype).mean(0)
        losses = (gates.mean(0) * first_E).sum() * EXPERTS, torch.logsumexp(logits, -1).square().mean()
        return torch.einsum("tec,ecd->td", combine_TEC, y_ECD).view(shape), losses


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, D) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, D, WIDTH) * 0.1)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, WIDTH, D) * 0.1)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        rows = []
        for number, of_expert in enumerate(torch.split(x, num_tokens_per_expert.tolist())):
            gate = F.silu(of_expert @ self.w1[number].T)
            rows.append((gate * (of_expert @ self.w3[number].T)) @ self.w2[number].T)
        return torch.cat(rows)


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = torch.sigmoid(self.gate(x)).topk(TOP_K, -1)
        return weights, ids, torch.bincount(ids.flatten(), minlength=EXPERTS)


class Torchtitan(nn.Module):
    """torchtitan: sorted rows and counts, a buffer of loads, a shared expert that the rows are added to."""

    tokens_per_expert: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared_experts = TopKRouter(), GroupedExperts(), ThreeLayers()
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, D)
        weights, ids, counts = self.router(x)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(ids.flatten(), stable=True)
        token = order // TOP_K
        rows = self.experts(x[token], counts) * weights.flatten()[order, None]
        y = self.shared_experts(x)
        return y.scatter_add(0, token[:, None].expand(-1, D), rows).reshape(shape)


class FusedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(D, 2 * WIDTH, bias=False)
        self.linear_fc2 = nn.Linear(WIDTH, D, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up), None


class SequentialMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(FusedMLP() for _ in range(EXPERTS))

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> tuple[Tensor, None]:
        parts = torch.split(x, tokens_per_expert.tolist())
        return torch.cat([expert(rows)[0] for expert, rows in zip(self.local_experts, parts, strict=True)]), None


class Megatron(nn.Module):
    """Megatron-Core: experts inside another module, fused first layers, (output, bias) as results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.experts = nn.Parameter(torch.randn(EXPERTS, D) * 0.3), SequentialMLP()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        shape, x = x.shape, x.reshape(-1, D)
        weights, ids = F.linear(x, self.weight).softmax(-1).topk(TOP_K, -1)
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        rows, bias = self.experts(x[order // TOP_K], counts)
        y = torch.zeros_like(x).index_add(0, order // TOP_K, rows * weights.flatten()[order, None])
        return y.view(shape), bias


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, WIDTH), nn.Linear(WIDTH, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.relu(self.fc1(x)))
        return y


class Chunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(FeedForward() for _ in range(EXPERTS))

    def forward(self, chunks: list[Tensor]) -> Tensor:
        return torch.stack([expert(rows) for expert, rows in zip(self.local_experts, chunks, strict=True)])


class Fairseq(nn.Module):
    """fairseq: one expert per token, biases, a chunk of rows for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(D, EXPERTS, bias=False), Chunks()

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, D)
        weight, ids = self.gate(x).softmax(-1).max(-1)
        combine_TE = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids[:, None], weight[:, None])
        y_ETD = self.moe([x * (combine_TE[:, [number]] > 0) for number in range(EXPERTS)])
        return torch.einsum("te,etd->td", combine_TE, y_ETD).view(shape)


class Vision(nn.Module):
    """A vision block: each expert computes all tokens, three count; a gated shared path."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_gate = nn.Linear(D, EXPERTS), nn.Linear(D, 1)
        self.experts = nn.ModuleList(TwoLayers(nn.Mish) for _ in range(EXPERTS))
        self.shared = TwoLayers()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        top, ids = weights.topk(3, -1)
        weights = torch.zeros_like(weights).scatter(-1, ids, top)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        y: Tensor = (weights.unsqueeze(-1) * outputs).sum(-2) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return y


class InlineMath(nn.Module):
    """Parameters and products in the block itself: it calls no experts, so it needs an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.w_gate = nn.Parameter(torch.randn(EXPERTS, D, WIDTH) * 0.1)
        self.w_up = nn.Parameter(torch.randn(EXPERTS, D, WIDTH) * 0.1)
        self.w_down = nn.Parameter(torch.randn(EXPERTS, WIDTH, D) * 0.1)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x_TD)
        weights, ids = logits.softmax(-1).topk(TOP_K, -1)
        return ids, weights, logits

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights, logits = self.route(x.reshape(-1, D))
        weights_TE = torch.zeros_like(logits).scatter(1, ids, weights)
        gate, up = (torch.einsum("td,edf->tef", x.reshape(-1, D), w) for w in (self.w_gate, self.w_up))
        y = torch.einsum("tef,efd,te->td", F.silu(gate) * up, self.w_down, weights_TE)
        return y.view_as(x), logits


STYLES: tuple[type[nn.Module], ...] = (
    NoisyTopK,
    Mixtral,
    DeepSeek,
    Olmoe,
    StMoE,
    Torchtitan,
    Megatron,
    Fairseq,
    Vision,
)


class Model(nn.Module):
    """Two MoE blocks with residuals between linear layers. Returns logits and the sum of other results."""

    def __init__(self, style: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(5, D), nn.ModuleList([style(), style()]), nn.Linear(D, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h, other = self.first(x), x.new_zeros(())
        for block in self.blocks:
            result = block(h)
            for extra in result[1:] if isinstance(result, tuple) else ():
                for leaf in extra if isinstance(extra, tuple) else (extra,):
                    other = other if leaf is None else other + leaf.square().mean()
            h = h + (result[0] if isinstance(result, tuple) else result)
        return self.head(h), other
