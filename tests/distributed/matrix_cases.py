"""The layouts, models, sequences and objectives of the matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matrix_reference import Answer, PlainModel, Shape, answer
from torch import Tensor

from pnpo_megatron.types import TrainSequence

OBJECTIVES: dict[str, dict[str, float]] = {
    "pnpo": {"gate_low": 0.011, "gate_high": 0.023},  # short responses: both bounds have work to do
    "gspo": {"clip_low": 0.006, "clip_high": 0.0015},
    "grpo": {"clip_low": 0.05, "clip_high": 0.07, "dual_clip": 1.1},
    "minpro": {"clip_low": 0.07, "clip_high": 0.03, "dual_clip": 1.02},
}
TOLERANCE = 5e-6


@dataclass(frozen=True)
class Case:
    """One layout."""

    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    """ParallelSettings; data parallelism takes the rest."""
    model: str = "dense"
    optimizer: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""


SP2 = {"tensor": 2, "sequence": True}
MATRIX: dict[str, Case] = {
    "TP2": Case(2, {"tensor": 2}),
    "TP2+SP": Case(2, SP2),
    "PP2": Case(2, {"pipeline": 2}),
    "PP2xVPP2": Case(2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": Case(2, {"context": 2}),
    "DP2": Case(2),
    "DP2+distopt": Case(2, optimizer={"distributed": True}),
    "EP2": Case(2, {"expert": 2}, "experts"),
    "PP4": Case(4, {"pipeline": 4}),
    "CP4": Case(4, {"context": 4}),
    "DP2xPP2 tied": Case(4, {"pipeline": 2}, "tied"),
    "EP2xCP2": Case(4, {"expert": 2, "context": 2}, "experts"),
    "TP2+SPxCP2xPP2": Case(8, {**SP2, "context": 2, "pipeline": 2}),
}
VPP = {"pipeline": 2, "virtual_pipeline": 2}
SHARDED = {"distributed": True}
EARLY = {"overlap_grad_reduce": True}
OVERLAP = {**SHARDED, **EARLY, "overlap_param_gather": True}
MORE: dict[str, Case] = {
    "TP2+SP recompute full": Case(2, SP2, recompute="full"),
    "TP2+SP recompute selective": Case(2, SP2, recompute="selective"),
    "CP2 recompute full": Case(2, {"context": 2}, recompute="full"),
    "CP2 recompute selective": Case(2, {"context": 2}, recompute="selective"),
    "PP2 recompute full": Case(2, {"pipeline": 2}, recompute="full"),
    "PP2xVPP2 recompute full": Case(2, VPP, recompute="full"),
    "PP2xVPP2 recompute selective": Case(2, VPP, recompute="selective"),
    "EP2 recompute full": Case(2, {"expert": 2}, "experts", recompute="full"),
    "EP2 recompute selective": Case(2, {"expert": 2}, "experts", recompute="selective"),
    "DP2 early reduction": Case(2, optimizer=EARLY),
    "CP2 early reduction": Case(2, {"context": 2}, optimizer=EARLY),
    "DP2 overlap": Case(2, optimizer=OVERLAP),
    "CP2 overlap": Case(2, {"context": 2}, optimizer=OVERLAP),
    "PP2 overlap": Case(2, {"pipeline": 2}, optimizer=OVERLAP),
    "PP2xVPP2 overlap": Case(2, VPP, optimizer=OVERLAP),
    "TP2+SP overlap": Case(2, SP2, optimizer=OVERLAP),
    "EP2 overlap": Case(2, {"expert": 2}, "experts", OVERLAP),
    "TP2 tied": Case(2, {"tensor": 2}, "tied"),
    "TP2+SP tied": Case(2, SP2, "tied"),
    "PP2xVPP2 tied": Case(2, VPP, "tied"),
    "PP2 uneven": Case(2, {"pipeline": 2}, "uneven"),
    "PP2xVPP2 uneven": Case(2, VPP, "uneven"),
    "TP2+SP experts": Case(2, SP2, "experts"),
    "TP2+SPxEP2": Case(2, {**SP2, "expert": 2}, "experts"),
    "CP2 experts": Case(2, {"context": 2}, "experts"),
    "CP2 with EP2 inside": Case(2, {"context": 2, "expert": 2}, "experts"),
    "PP2xVPP2 experts": Case(2, VPP, "experts"),
    "DP2xPP2xVPP2 tied": Case(4, VPP, "tied"),
    "DP2xPP2xVPP2 overlap": Case(4, VPP, optimizer=OVERLAP),
    "DP2xPP2xVPP2 early reduction": Case(4, VPP, optimizer=EARLY),
    "DP2xPP2 tied overlap": Case(4, {"pipeline": 2}, "tied", OVERLAP),
    "DP2xCP2 overlap": Case(4, {"context": 2}, optimizer=OVERLAP),
    "DP2xTP2+SP tied overlap": Case(4, SP2, "tied", OVERLAP),
    "PP4 tied": Case(4, {"pipeline": 4}, "tied"),
    "CP2xPP2xVPP2 recompute full": Case(4, {**VPP, "context": 2}, recompute="full"),
    "TP2+SPxPP2xVPP2 tied": Case(4, {**VPP, **SP2}, "tied"),
    "EP2xPP2": Case(4, {"expert": 2, "pipeline": 2}, "experts"),
    "EP2xPP2xVPP2 overlap": Case(4, {"expert": 2, **VPP}, "experts", OVERLAP),
    "EP4xCP2": Case(4, {"expert": 4, "context": 2}, "experts"),
    "EP2xDP2 sharded": Case(4, {"expert": 2}, "experts", SHARDED),
    "EP2xDP2 overlap": Case(4, {"expert": 2}, "experts", OVERLAP),
    "TP2+SPxEP2xDP2": Case(4, {**SP2, "expert": 2}, "experts"),
    "TP2+SPxDP2 experts": Case(4, SP2, "experts"),
    "TP2+SPxEP4xDP2 sharded": Case(4, {**SP2, "expert": 4}, "experts", SHARDED),
    "TP2+SPxCP2xPP2xVPP2 tied overlap": Case(8, {**SP2, **VPP, "context": 2}, "tied", OVERLAP),
    "TP2+SPxCP2xPP2xEP2": Case(8, {**SP2, "context": 2, "pipeline": 2, "expert": 2}, "experts"),
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {"tie_word_embeddings": False}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "uneven": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "experts": ("mixtral", {"intermediate_size": 24}),
}
# Without fast rotation a key bias shifts all scores of a query alike, and its gradient cancels to rounding.
THETA = 30.0
SIZES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# (prompt, response) tokens: responses of 1, 2 and 3 tokens, one of a single zigzag chunk, one without any.
LENGTHS = [(3, 21), (6, 1), (4, 2), (1, 3), (2, 14), (9, 0), (5, 30)]
ADVANTAGES = [0.9, -1.1, 1.3, -0.7, -1.6, 0.4, 0.6]


@dataclass
class Fixture:
    """One model on disk, its mini-batch and the answers to it."""

    folder: Path
    sequences: list[TrainSequence]
    answers: dict[str, Answer]
    closest_route: float


def make_fixture(folder: Path, model: str, *, spread: float = 0.05) -> Fixture:
    """A model as transformers writes it, sequences at a random distance from it, and float64 answers."""
    from hf_models import make_hf_model, save_hf_model

    family, changes = MODELS[model]
    save_hf_model(make_hf_model(family, **{**SIZES, **changes}), folder)
    policy = plain_model(folder, model)
    draw = torch.Generator().manual_seed(16)
    rows = []
    for number, ((prompt, response), advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        count = prompt + response
        mask = torch.arange(count) >= prompt
        if number in (0, 6):
            mask[prompt + 5 : prompt + 9] = False  # what a tool wrote
        ids = torch.randint(3, 131, (count,), generator=draw)
        old = spread * torch.randn(count, generator=draw)
        with torch.no_grad():
            scores = policy.logits(ids)[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        old[1:] += scores
        old = torch.where(mask, old, 0.0)
        rollout = torch.where(mask, old + 0.02 * torch.randn(count, generator=draw), 0.0)
        rows.append({"ids": ids, "mask": mask, "old": old, "rollout": rollout, "advantage": advantage})
    answers = {name: answer(policy, rows, name, gate) for name, gate in OBJECTIVES.items()}
    sequences = [
        TrainSequence(row["ids"], row["mask"], row["rollout"], row["advantage"], row["old"]) for row in rows
    ]
    return Fixture(folder, sequences, answers, policy.closest_route)


def plain_model(folder: Path, model: str) -> PlainModel:
    """The reference on a folder's tensors."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    layers = sum(name.endswith("input_layernorm.weight") for name in tensors)
    shape = Shape(layers, heads=4, kv_heads=2, theta=THETA, eps=1e-5)
    shape.experts_per_token = 2 if model == "experts" else 0
    return PlainModel(tensors, shape)
