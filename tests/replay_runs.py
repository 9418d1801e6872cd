"""K epochs of a tiny mixture of experts with and without router replay, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_learner, random_sequences, share, with_old


@dataclass(frozen=True)
class ReplayRun:
    """What K epochs over one batch did."""

    first_rejected: float
    """Share of tokens rejected at update 1: 0, since every weight is 1 there."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rejected: tuple[float, ...]
    flipped: float
    """Share of (token, layer) whose set of experts differs after the last update, chosen freely."""
    spread: dict[str, float]
    """Log-ratios at the last weights, routed freely and as the old log-probs were: nothing else differs."""
    load: float


def set_replay(routing: Any, on: bool) -> None:
    """Switch replay of a live learner; a router left alone chooses freely."""
    routing.replay = on
    for router in (one for chunk in routing.routers for one in chunk):
        router.router_replay.clear_router_replay_action()


def run_epochs(
    folder: Path, *, replayed: bool, rate: float, epochs: int = 4, seed: int = 1, parallel: Any = None
) -> ReplayRun:
    """`epochs` passes over one batch, in another order each time, from the same start."""
    from pnpo_megatron.algorithm.presets import make_objective
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(
        folder,
        parallel,
        optimizer=OptimizerSettings(lr=rate, warmup_steps=0, weight_decay=0.0, clip_grad=0.0),
        megatron={"moe_enable_routing_replay": True},
        max_tokens=96,
    )
    sequences = random_sequences(12, seed=seed)
    routing = learner.routing
    sequences = with_old(sequences, learner.log_probs(share(sequences, "response")))
    before = [routing._known[id(one.ids)][1] for one in sequences]
    set_replay(routing, replayed)
    objective = make_objective("pnpo", gate_low=0.02, gate_high=0.027)
    rows = []
    for epoch in range(epochs):
        turned = sequences[epoch:] + sequences[:epoch]
        rows.append(learner.update(share(turned, "response"), objective, step=1))
    learner.optimizer_settings = replace(learner.optimizer_settings, lr=0.0)
    spread = {}
    for name, kept in (("free", False), ("kept", True)):
        set_replay(routing, kept)
        row = learner.update(share(sequences, "response"), objective, step=1)
        spread |= {f"{name} std": row["log_ratio/std"], f"{name} rejected": row["gate/rejected_fraction"]}
    learner.log_probs(share(sequences, "response"))
    after = [routing._known[id(one.ids)][1] for one in sequences]
    pairs = [
        (a.sort(-1).values != b.sort(-1).values).any(-1).float() for a, b in zip(before, after, strict=True)
    ]
    return ReplayRun(
        first_rejected=rows[0]["gate/rejected_fraction"],
        losses=tuple(row["loss"] for row in rows),
        norms=tuple(row["grad_norm"] for row in rows),
        rejected=tuple(row["gate/rejected_fraction"] for row in rows),
        flipped=float(torch.cat([pair.flatten() for pair in pairs]).mean()),
        spread=spread,
        load=rows[-1]["moe/max_load"],
    )
