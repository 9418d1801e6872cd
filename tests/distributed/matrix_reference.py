"""Model, objectives, metrics and gradient in float64 with plain torch, one sequence at a time.

Written from the papers and the Hugging Face tensor names alone: nothing of the product and nothing of
transformers computes here. `test_matrix` checks the model once against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Row = Mapping[str, Any]
"""One sequence: ids [n], mask [n] bool, old [n], rollout [n], advantage."""


@dataclass
class Shape:
    """Sizes of a Llama-like model, with query biases and experts or without."""

    layers: int
    heads: int
    kv_heads: int
    theta: float
    eps: float
    experts_per_token: int = 0


@dataclass
class Answer:
    """Everything one update is compared in."""

    loss: float
    scale: float
    """sum |share * coefficient * logp|: the measure of a loss difference (DECISIONS)."""
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    nearest: float
    """Smallest |expm1(log w) - bound|."""
    tokens: dict[str, list[Tensor]] = field(default_factory=dict)
    """[n] per sequence, 0 off the mask: what `--dump-tokens` writes."""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        return math.sqrt(sum(float(one.square().sum()) for one in self.gradients.values()))


class PlainModel:
    """A causal language model over a dictionary of Hugging Face tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], shape: Shape) -> None:
        self.weights = {name: one.double().clone().requires_grad_() for name, one in tensors.items()}
        self.shape = shape
        self.closest_route = math.inf
        """Smallest gap between the last expert chosen and the first one left out."""

    def logits(self, ids: Tensor) -> Tensor:
        """[n, V] float64."""
        hidden = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.shape.layers):
            name = f"model.layers.{layer}."
            hidden = hidden + self._attention(name, self._norm(name + "input_layernorm", hidden))
            hidden = hidden + self._mlp(name, self._norm(name + "post_attention_layernorm", hidden))
        tied = "lm_head.weight" not in self.weights
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return self._norm("model.norm", hidden) @ self.weights[head].T

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        scale = (hidden.square().mean(-1, keepdim=True) + self.shape.eps).rsqrt()
        return hidden * scale * self.weights[name + ".weight"]

    def _project(self, name: str, hidden: Tensor) -> Tensor:
        out = hidden @ self.weights[name + ".weight"].T
        return out + self.weights[name + ".bias"] if name + ".bias" in self.weights else out

    def _attention(self, layer: str, hidden: Tensor) -> Tensor:
        count, shape = len(hidden), self.shape
        query, key, value = (
            self._project(f"{layer}self_attn.{name}_proj", hidden).view(count, heads, -1).transpose(0, 1)
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        query, key = self._rotate(query), self._rotate(key)
        group = shape.heads // shape.kv_heads
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
        return self._project(f"{layer}self_attn.o_proj", mixed.transpose(0, 1).reshape(count, -1))

    def _rotate(self, states: Tensor) -> Tensor:
        size = states.shape[-1]
        speed = self.shape.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(states.shape[1], dtype=torch.float64), speed)
        first, second = states.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _mlp(self, layer: str, hidden: Tensor) -> Tensor:
        if not self.shape.experts_per_token:
            return self._gated(f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"), hidden)
        moe = f"{layer}block_sparse_moe."
        routing = self._project(moe + "gate", hidden).softmax(-1)
        chosen, expert = routing.topk(self.shape.experts_per_token + 1, -1)
        self.closest_route = min(self.closest_route, float((chosen[:, -2] - chosen[:, -1]).detach().min()))
        share = chosen[:, :-1] / chosen[:, :-1].sum(-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for number in range(routing.shape[1]):
            mine = (share * (expert[:, :-1] == number)).sum(-1, keepdim=True)
            out = out + mine * self._gated(f"{moe}experts.{number}.", ("w1", "w3", "w2"), hidden)
        return out

    def _gated(self, name: str, parts: tuple[str, str, str], hidden: Tensor) -> Tensor:
        gate, up, down = (name + part for part in parts)
        return self._project(down, F.silu(self._project(gate, hidden)) * self._project(up, hidden))


def log_weights(name: str, ratio: Tensor) -> Tensor:
    """[L] log w_t from the [L] log-ratios: the four definitions, spelled out."""
    length = len(ratio)
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    if name == "pnpo":
        return ratio.cumsum(0) / steps
    if name == "gspo":
        return ratio.mean().expand(length)
    if name == "minpro":
        before = [0.0, *(float(ratio[:t].min()) for t in range(1, length))]
        return ratio + torch.tensor(before, dtype=torch.float64)
    return ratio


def bounds(name: str, gate: Mapping[str, float], advantage: float, length: int) -> tuple[Tensor, Tensor]:
    """[L] smallest and largest w - 1 that is kept."""
    none = torch.full((length,), math.inf, dtype=torch.float64)
    if name == "pnpo":
        width = (length / torch.arange(1, length + 1, dtype=torch.float64)).sqrt()
        return -gate["gate_low"] * width, gate["gate_high"] * width
    if advantage > 0:
        return -none, none.clone().fill_(gate["clip_high"])
    if advantage < 0:
        ceiling = none if "dual_clip" not in gate else none.clone().fill_(gate["dual_clip"] - 1)
        return none.clone().fill_(-gate["clip_low"]), ceiling
    return -none, none


def answer(model: PlainModel, rows: Sequence[Row], name: str, gate: Mapping[str, float]) -> Answer:
    """One update's loss, gradient and metrics; the mean is per response for pnpo and gspo, else per token."""
    responses = sum(bool(row["mask"].any()) for row in rows)
    tokens = sum(int(row["mask"].sum()) for row in rows)
    for one in model.weights.values():
        one.grad = None
    seen: dict[str, list[Tensor]] = {}
    dumped: dict[str, list[Tensor]] = {name: [] for name in ("policy_logprobs", "log_weight", "keep")}
    loss, scale, nearest = 0.0, 0.0, math.inf
    for row in rows:
        mask, length = row["mask"], int(row["mask"].sum())
        for spread in dumped.values():
            spread.append(torch.zeros(len(mask), dtype=torch.float64))
        if not length:
            continue
        scores = model.logits(row["ids"])[:-1].log_softmax(-1)
        policy = scores.gather(1, row["ids"][1:, None]).squeeze(1)[mask[1:]]
        with torch.no_grad():
            ratio = policy - row["old"][mask].double()
            log_weight = log_weights(name, ratio)
            excess = log_weight.expm1()
            low, high = bounds(name, gate, row["advantage"], length)
            below, above = excess < low, excess > high
            share = 1 / (length * responses) if name in ("pnpo", "gspo") else 1 / tokens
            slope = -share * ~(below | above) * log_weight.exp() * row["advantage"]
            gap = (row["old"] - row["rollout"])[mask].double()
            parts = {
                "ratio": ratio,
                "weight": log_weight.exp(),
                "log_weight": log_weight,
                "ladder/token": ratio,
                "ladder/prefix": log_weights("pnpo", ratio),
                "ladder/sequence": log_weights("gspo", ratio),
                "ladder/minpro": log_weights("minpro", ratio),
                "ladder/cumulative": ratio.cumsum(0),
                "below": below.double(),
                "above": above.double(),
                "bin": (10 * torch.arange(length) // length).double(),
                "entropy": -(scores.exp() * scores).sum(-1)[mask[1:]],
                "gap": gap,
            }
            for key, value in parts.items():
                seen.setdefault(key, []).append(value)
            for key, value in {"policy_logprobs": policy, "keep": ~(below | above), **parts}.items():
                if key in dumped:
                    dumped[key][-1][mask] = value.double()
            nearest = min(nearest, float(torch.stack([excess - low, excess - high]).abs().min()))
        terms = slope * policy
        terms.sum().backward()
        loss, scale = loss + float(terms.sum().detach()), scale + float(terms.abs().sum().detach())
    columns = {key: torch.cat(values) for key, values in seen.items()}
    gradients = {
        key: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for key, one in model.weights.items()
    }
    found = Answer(loss, scale, metrics_of(columns), gradients, nearest, dumped)
    found.metrics |= {"loss": loss, "grad_norm": found.norm}
    found.counts = {side: int(columns[side].sum()) for side in ("below", "above")}
    return found


def metrics_of(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Every metric of an update by its definition, from [N] columns of all trained tokens."""
    rejected, gap, ratio = columns["below"] + columns["above"], columns["gap"], columns["ratio"]
    found = {
        "entropy": columns["entropy"].mean(),
        "gate/rejected_fraction": rejected.mean(),
        "gate/rejected_fraction_low": columns["below"].mean(),
        "gate/rejected_fraction_high": columns["above"].mean(),
        "weight/mean": columns["weight"].mean(),
        "weight/min": columns["weight"].min(),
        "weight/max": columns["weight"].max(),
        "log_ratio/mean": ratio.mean(),
        "log_ratio/std": ratio.std(correction=0),
    }
    kept, weight = rejected == 0, columns["weight"]
    found["weight/effective_fraction"] = weight[kept].sum() ** 2 / weight[kept].square().sum() / len(gap)
    for name in columns:
        if name.startswith("ladder/"):
            found[name] = columns[name].square().mean().sqrt()
    for level in (0.01, 0.05, 0.5, 0.95, 0.99):
        place = math.ceil(level * len(gap)) - 1
        found[f"weight/q{round(100 * level):02}"] = weight.sort().values[place]
    for number in range(10):
        here = columns["bin"] == number
        size, log_weight = max(int(here.sum()), 1), columns["log_weight"][here]
        found[f"gate/rejected_fraction_bin_{number}"] = rejected[here].sum() / size
        found[f"gate/rejected_fraction_low_bin_{number}"] = columns["below"][here].sum() / size
        found[f"weight/log_mean_bin_{number}"] = log_weight.sum() / size
        spread = (log_weight - log_weight.sum() / size).square().sum() / size
        found[f"weight/log_std_bin_{number}"] = spread.sqrt()
    named = {key: float(value) for key, value in found.items()}
    return named | {"tokens/valid": float(len(gap)), "tokens/not_finite": 0.0}
