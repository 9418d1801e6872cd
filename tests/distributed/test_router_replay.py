"""Routes of old log-probs kept over the K epochs: the same under expert parallelism, and no jumps at ties."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import ReplayRun, run_epochs

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP1": {},
    "EP2": {"expert": 2},
    "TP2+SP+EP2": {"tensor": 2, "sequence": True, "expert": 2},
    "CP2": {"context": 2},
    "PP2": {"pipeline": 2},
}


def run_layouts(
    folder: Path, layouts: dict[str, dict[str, Any]], rate: float
) -> dict[tuple[str, bool], ReplayRun]:
    from pnpo_megatron.parallel.settings import ParallelSettings

    return {
        (name, replay): run_epochs(
            folder, replayed=replay, rate=rate, epochs=3, parallel=ParallelSettings(**layout)
        )
        for name, layout in layouts.items()
        for replay in (False, True)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_replays_the_same_routes(spawn: Any, folder: Path) -> None:
    """Small steps: no token crosses a tie, so layouts agree with replay on and off, and both agree."""
    [alone] = spawn(run_layouts, 1, folder, {"EP1": {}}, 1e-4, timeout_s=800)
    found = spawn(run_layouts, 2, folder, LAYOUTS, 1e-4, timeout_s=800)
    for (name, replay), run in found[0].items():
        wanted = alone["EP1", replay]
        assert run.losses == pytest.approx(wanted.losses, rel=1e-4, abs=1e-7), (name, replay)
        assert run.norms == pytest.approx(wanted.norms, rel=1e-4), (name, replay)
        assert run.first_rejected == 0.0


def run_sampled_routes(folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Random routes, as an engine might tell them: old log-probs, and log-ratios of the update after."""
    from learner_parts import make_learner, random_sequences, share, with_old

    from pnpo_megatron.algorithm.presets import make_objective
    from pnpo_megatron.parallel.settings import ParallelSettings

    found = {}
    for name, layout in layouts.items():
        replay = {"moe_enable_routing_replay": True}
        learner = make_learner(folder, ParallelSettings(**layout), megatron=replay, max_tokens=96)
        routed = with_routes(random_sequences(12, seed=2), layers=2, experts=4, k=2)
        scored = with_old(routed, learner.log_probs(share(routed, "response")))
        row = learner.update(share(scored, "response"), make_objective("pnpo"), step=1)
        found[name] = {"old": [one.old_logprobs for one in scored], "row": row}
    return found


def with_routes(sequences: list[Any], *, layers: int, experts: int, k: int) -> list[Any]:
    draw = torch.Generator().manual_seed(5)
    shuffled = [torch.rand(len(one.ids), layers, experts, generator=draw).argsort(-1) for one in sequences]
    return [replace(one, routes=s[..., :k].short()) for one, s in zip(sequences, shuffled, strict=True)]


def forced_logprobs(folder: Path, sequences: list[Any]) -> list[torch.Tensor]:
    """transformers in float64, each router made to choose the sequence's routes."""
    from reference_policy import ReferencePolicy

    policy = ReferencePolicy(folder)
    gates = [one for name, one in policy.model.named_modules() if name.endswith("mlp.gate")]
    chosen: list[torch.Tensor] = []

    def forced(
        layer: int, gate: Any, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = logits.softmax(-1).gather(1, chosen[layer])
        return logits, scores / scores.sum(-1, keepdim=True), chosen[layer]

    for layer, gate in enumerate(gates):
        gate.register_forward_hook(lambda gate, _, output, layer=layer: forced(layer, gate, output[0]))
    result = []
    with torch.no_grad():
        for one in sequences:
            chosen[:] = one.routes.long().unbind(1)
            result.append(torch.where(one.response_mask, policy.logprobs(one.ids), 0.0))
    return result


@pytest.mark.timeout(300)
def test_the_sampler_s_routes_are_taken_by_old_log_probs_and_updates_alike(spawn: Any, folder: Path) -> None:
    from learner_parts import random_sequences

    routed = with_routes(random_sequences(12, seed=2), layers=2, experts=4, k=2)
    wanted = forced_logprobs(folder, routed)
    for name, run in spawn(run_sampled_routes, 2, folder, LAYOUTS, timeout_s=250)[0].items():
        for ours, theirs in zip(run["old"], wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5, msg=name)
        assert run["row"]["weight/min"] == run["row"]["weight/max"] == 1.0, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replay_takes_away_what_routing_flips_add_to_log_ratios(spawn: Any, tmp_path: Path) -> None:
    """The same weights, scored with free and with kept routes: 1 to 3 % of flips widen log-ratios."""
    from reference_policy import write_model

    [found] = spawn(run_layouts, 1, write_model(tmp_path / "hf", "mixtral"), {"EP1": {}}, 3e-5, timeout_s=800)
    free = found["EP1", False]
    assert 0.005 < free.flipped < 0.05
    assert free.spread["kept std"] < 0.9 * free.spread["free std"]
