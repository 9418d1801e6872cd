"""One rank: the learner against float64 formulas for every cut; what is frozen, what is skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import (
    GATES,
    gradients_of,
    make_learner,
    random_sequences,
    share,
    with_old,
    worst_gradient,
)
from torch import Tensor

from pnpo_megatron.algorithm.presets import make_objective
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.types import TrainSequence

# About one, two and all sequences a micro-batch; packed or padded; in order or reversed.
CUTS = [(32, False, 1), (32, True, 1), (64, False, 1), (64, True, -1), (4096, False, -1), (4096, True, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from reference_policy import write_model

    return write_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Any:
    from reference_policy import ReferencePolicy

    return ReferencePolicy(folder)


@pytest.fixture(scope="module")
def drifted(policy: Any) -> list[TrainSequence]:
    return policy.drifted(random_sequences(12, seed=1), 0.05, seed=2)


def losses_and_gradients(folder: Path, sequences: list[TrainSequence]) -> list[tuple[str, Any, dict]]:
    found = []
    learner = make_learner(folder)  # its rate is 0, so no update changes the next one
    for name, gate in GATES.items():
        objective = make_objective(name, **gate)
        for max_tokens, padded, order in CUTS:
            rows = sequences if order > 0 else sequences[::-1]
            learner.settings = replace(learner.settings, max_tokens=max_tokens, padded=padded)
            metrics = learner.update(share(rows, objective.mean), objective, step=1)
            found.append((name, metrics, gradients_of(learner)))
    return found


def test_h09_loss_and_gradient_are_the_formulas_for_every_micro_batch_padding_and_order(
    spawn: Any, folder: Path, policy: Any, drifted: list[TrainSequence]
) -> None:
    """TRAPS H09: global denominators; 5e-6 by the measures of DECISIONS against transformers in float64."""
    references = {name: policy.update(drifted, name) for name in GATES}
    for name, reference in references.items():
        assert reference.rejected > 0, f"{name}: the gate must be at work"
        assert reference.nearest > 1e-6, f"{name}: too near a bound to tell"
    [found] = spawn(losses_and_gradients, 1, folder, drifted)
    assert len(found) == 18
    for name, metrics, gradients in found:
        reference = references[name]
        assert abs(metrics["loss"] - reference.loss) / reference.scale < 5e-6
        assert worst_gradient(gradients, reference.gradients) < 5e-6
        assert metrics["gate/rejected_fraction"] * metrics["tokens/valid"] == pytest.approx(
            reference.rejected, abs=1e-9
        )
        norm = math.sqrt(sum(float(value.square().sum()) for value in reference.gradients.values()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-6)


def scores(folder: Path, sequences: list[TrainSequence], temperature: float) -> tuple[list[Tensor], Any]:
    learner = make_learner(folder, max_tokens=64, temperature=temperature)
    old = learner.log_probs(share(sequences, "response"))
    metrics = learner.update(share(with_old(sequences, old), "response"), make_objective("pnpo"), step=1)
    return old, metrics


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_h12_all_log_probs_are_of_logits_over_the_temperature(
    spawn: Any, folder: Path, policy: Any, temperature: float
) -> None:
    """TRAPS H12: log_softmax(logits / T) in float64; before the first step every ratio is exactly 1."""
    sequences = random_sequences(6, seed=4)
    [(old, metrics)] = spawn(scores, 1, folder, sequences, temperature)
    for one, found in zip(sequences, old, strict=True):
        with torch.no_grad():
            logits = policy.model(one.ids[None]).logits[0, :-1] / temperature
        wanted = logits.log_softmax(-1).gather(1, one.ids[1:, None]).squeeze(1)
        torch.testing.assert_close(
            found[1:].double(), torch.where(one.response_mask[1:], wanted, 0.0), rtol=0, atol=5e-6
        )
        assert not found[~one.response_mask].any()
    assert metrics["weight/min"] == metrics["weight/max"] == 1.0
    assert metrics["gate/rejected_fraction"] == 0.0


def refuse_temperature_zero() -> str:
    from pnpo_megatron.policy.learner import LearnerSettings

    with pytest.raises(ConfigError) as refused:
        LearnerSettings(temperature=0.0)
    return str(refused.value)


def test_a_temperature_of_zero_is_refused_with_the_key(spawn: Any) -> None:
    assert "rollout.temperature = 0.0" in spawn(refuse_temperature_zero, 1)[0]


def packed_and_alone(folder: Path, pair: list[TrainSequence], other: TrainSequence) -> dict[str, Any]:
    learner = make_learner(folder, max_tokens=256)
    first, second = pair
    objective = make_objective("grpo")
    found: dict[str, Any] = {"together": learner.log_probs(share(pair, "response"))}
    found["alone"] = [learner.log_probs(share([one], "response"))[0] for one in pair]
    found["changed"] = learner.log_probs(share([first, other], "response"))
    for name, rows in (("gradient", [first, second]), ("gradient_changed", [first, other])):
        learner.update(share(rows, "response"), objective, step=1)
        found[name] = gradients_of(learner)
    return found


def test_h13_a_packed_sequence_does_not_see_its_neighbour(spawn: Any, folder: Path, policy: Any) -> None:
    """TRAPS H13: packed equals one by one, and another neighbour of the same length changes nothing."""
    first, second = policy.drifted(random_sequences(2, seed=8), 0.01, seed=9)
    second = replace(second, advantage=0.0)  # so that only the first one has a gradient
    ids = torch.where(second.response_mask, (second.ids + 17) % 100 + 3, second.ids)
    [found] = spawn(packed_and_alone, 1, folder, [first, second], replace(second, ids=ids))
    for together, alone in zip(found["together"], found["alone"], strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert torch.equal(found["together"][0], found["changed"][0])
    assert not torch.equal(found["together"][1], found["changed"][1])
    for name, gradient in found["gradient"].items():
        torch.testing.assert_close(found["gradient_changed"][name], gradient, rtol=0, atol=1e-7)


def three_epochs(folder: Path, sequences: list[TrainSequence]) -> list[Any]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(folder, max_tokens=64, optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0))
    sequences = with_old(sequences, learner.log_probs(share(sequences, "response")))
    frozen = [one.old_logprobs.clone() for one in sequences]
    rows = []
    for _ in range(3):
        metrics = learner.update(share(sequences, "response"), make_objective("pnpo", gate="none"), step=1)
        kept = all(torch.equal(a, b.old_logprobs) for a, b in zip(frozen, sequences, strict=True))
        rows.append((kept, metrics, [group["step"] for group in learner.optimizer.param_groups]))
    return rows


def test_h14_the_first_of_three_epochs_alone_sees_weights_of_exactly_one(spawn: Any, folder: Path) -> None:
    """TRAPS H14: old log-probs stay bitwise the same, weights do not."""
    [rows] = spawn(three_epochs, 1, folder, random_sequences(8, seed=5))
    assert all(kept for kept, _, _ in rows)
    assert [steps for _, _, steps in rows] == [[1, 1], [2, 2], [3, 3]]
    spread = [max(metrics["weight/max"] - 1.0, 1.0 - metrics["weight/min"]) for _, metrics, _ in rows]
    assert spread[0] == 0.0
    assert spread[1] > 1e-3 and spread[2] > 1e-3


def skipped_updates(folder: Path, sequences: list[TrainSequence]) -> dict[str, Any]:
    from pnpo_megatron.policy.learner import SKIP_REASONS
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(folder, max_tokens=64, optimizer=OptimizerSettings(lr=1e-3, warmup_steps=0))
    objective = make_objective("pnpo", gate_low=0.02, gate_high=0.02)
    kept = with_old(sequences, learner.log_probs(share(sequences, "response")))
    learner.update(share(kept, "response"), objective, step=1)  # so that there is momentum to move by

    def state() -> list[Tensor]:
        moments = [moment for one in learner.optimizer.optimizer.state.values() for moment in one.values()]
        return [tensor.detach().clone() for tensor in [*learner.chunks[0].parameters(), *moments]]

    def spoiled(one: TrainSequence) -> TrainSequence:
        old = one.old_logprobs.clone()
        old[one.response_mask.nonzero()[-1]] = torch.nan
        return replace(one, old_logprobs=old)

    cases = {
        "no valid token": [replace(one, response_mask=one.response_mask & False) for one in kept],
        "every advantage is 0": [replace(one, advantage=0.0) for one in kept],
        "every token with an advantage is rejected": [
            replace(one, old_logprobs=one.old_logprobs - 9) for one in kept
        ],
        "loss is not finite": [spoiled(kept[0]), *kept[1:]],
        "gradient is not finite": [replace(one, advantage=1e36 * one.advantage) for one in kept],
    }
    found = {}
    before = state()
    for reason, rows in cases.items():
        metrics = learner.update(share(rows, "response"), objective, step=1)
        moved = any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        found[reason] = (SKIP_REASONS[int(metrics["update/skip_reason"])], metrics, moved)
    learner.update(share(kept, "response"), objective, step=1)
    found["after"] = any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    return found


def test_an_update_with_nothing_to_learn_or_not_finite_moves_no_weight_and_no_moment(
    spawn: Any, folder: Path
) -> None:
    [found] = spawn(skipped_updates, 1, folder, [*random_sequences(3, seed=6), *random_sequences(3, seed=7)])
    assert found.pop("after"), "the update after them must move, or this test cannot fail"
    for wanted, (reason, metrics, moved) in found.items():
        assert reason == wanted
        assert not moved, wanted
        assert metrics["update/skipped"] == 1.0
        assert metrics["update/not_finite"] == float("not finite" in wanted)


def trained(folder: Path, sequences: list[TrainSequence], settings: dict[str, Any]) -> dict[str, Tensor]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    learner = make_learner(folder, max_tokens=64, optimizer=OptimizerSettings(**settings))
    for step in (1, 2):
        learner.update(share(sequences, "response"), make_objective("pnpo", **GATES["pnpo"]), step=step)
    return {name: tensor.clone() for name, tensor in learner.export_hf()}


@pytest.mark.parametrize("distributed", [False, True])
def test_two_updates_are_those_of_torch_adamw_with_clipping_warm_up_and_decay_of_matrices_only(
    spawn: Any, folder: Path, drifted: list[TrainSequence], distributed: bool
) -> None:
    from reference_policy import ReferencePolicy

    lr, decay, clip = 1e-3, 0.4, 0.25
    policy = ReferencePolicy(folder)
    weights = dict(policy.model.named_parameters())
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    parts = [
        {"params": [one for one in weights.values() if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in weights.values() if one.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(parts, lr=lr, betas=(0.9, 0.98), eps=1e-3)
    for step in (1, 2):
        policy.update(drifted, "pnpo")
        assert torch.nn.utils.clip_grad_norm_(weights.values(), clip) > clip
        for group in adamw.param_groups:
            group["lr"] = lr * step / 4
        adamw.step()
    settings = {
        "lr": lr, "warmup_steps": 4, "weight_decay": decay, "clip_grad": clip,
        "betas": (0.9, 0.98), "eps": 1e-3, "distributed": distributed,
    }  # fmt: skip
    [found] = spawn(trained, 1, folder, drifted, settings)
    for name, weight in weights.items():
        moved = weight.detach() - start[name]
        assert moved.norm() > 0
        stored = 2 * 2.0**-24 * weight.detach().norm()  # float32 parameters round once a step
        assert (found[name].double() - weight.detach()).norm() < 1e-4 * moved.norm() + stored, name


def updated_without_sending(folder: Path, sequences: list[TrainSequence]) -> float:
    from megatron.core.distributed import param_and_grad_buffer

    from pnpo_megatron.policy.optimizer import OptimizerSettings

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("one rank sends itself its gradients or weights")

    vars(param_and_grad_buffer).update(dist_reduce_scatter_func=refused, dist_all_gather_func=refused)
    learner = make_learner(folder, optimizer=OptimizerSettings(distributed=True))
    objective = make_objective("pnpo", **GATES["pnpo"])
    return learner.update(share(sequences, "response"), objective, step=1)["update/skipped"]


def test_a_rank_alone_sends_itself_no_gradients_and_no_weights(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    assert spawn(updated_without_sending, 1, folder, drifted) == [0.0]


def rates() -> dict[str, list[float]]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings, learning_rate

    shapes = {name: OptimizerSettings(lr=1e-6, warmup_steps=10, schedule=name, total_steps=30) for name in
              ("constant", "linear", "cosine")}  # fmt: skip
    return {name: [learning_rate(one, step) for step in range(1, 31)] for name, one in shapes.items()}


def test_h29_the_rate_depends_on_the_step_alone_and_is_never_zero(spawn: Any) -> None:
    """TRAPS H29: ten warm-up steps to 1e-6; step 1 has 1e-7, step 7 has 7e-7."""
    [found] = spawn(rates, 1)
    for name, values in found.items():
        assert values[0] == pytest.approx(1e-7, rel=1e-12), name
        assert values[6] == pytest.approx(7e-7, rel=1e-12), name
        assert values[9] == pytest.approx(1e-6, rel=1e-12), name
        assert min(values) > 0.0
    assert found["constant"][29] == pytest.approx(1e-6, rel=1e-12)
    assert found["linear"][19] == pytest.approx(1e-6 * 11 / 21, rel=1e-12)
    assert found["linear"][29] == pytest.approx(1e-6 / 21, rel=1e-12)
    assert found["cosine"][19] == pytest.approx(1e-6 * 0.5 * (1 + math.cos(math.pi * 10 / 21)), rel=1e-12)


def dumped(folder: Path, sequences: list[TrainSequence]) -> tuple[Any, Any, int]:
    learner = make_learner(folder, max_tokens=32)
    seen: list[Any] = []
    learner.token_dump = lambda mini_batch, values: seen.append((mini_batch.indices, dict(values)))
    logprobs = learner.log_probs(share(sequences, "response"))
    learner.update(share(sequences, "response"), make_objective("pnpo", **GATES["pnpo"]), step=1)
    return logprobs, seen[0], len(seen)


def test_the_token_dump_shows_every_log_weight_and_gate(
    spawn: Any, folder: Path, drifted: list[TrainSequence]
) -> None:
    [(logprobs, (indices, values), updates)] = spawn(dumped, 1, folder, drifted)
    assert updates == 1 and indices == tuple(range(len(drifted)))
    for row, one in enumerate(drifted):
        mask, length = one.response_mask, one.length
        assert torch.equal(values["policy_logprobs"][row], logprobs[row])
        ratio = (logprobs[row] - one.old_logprobs)[mask].double()
        t = torch.arange(1, length + 1)
        log_weight = ratio.cumsum(0) / t
        torch.testing.assert_close(values["log_weight"][row][mask].double(), log_weight, rtol=0, atol=1e-7)
        h = (length / t).sqrt()
        keep = (log_weight.expm1() >= -0.011 * h) & (log_weight.expm1() <= 0.023 * h)
        assert torch.equal(values["keep"][row][mask].bool(), keep)


def bfloat16_run(folder: Path, sequences: list[TrainSequence], distributed: bool) -> dict[str, Any]:
    from pnpo_megatron.policy.optimizer import OptimizerSettings

    optimizer = OptimizerSettings(lr=2e-5, warmup_steps=0, weight_decay=0.0, distributed=distributed)
    learner = make_learner(folder, dtype=torch.bfloat16, optimizer=optimizer, max_tokens=64)
    objective = make_objective("grpo", gate="none", dual_clip=None, clip_low=None, clip_high=None)
    mini_batch = share(with_old(sequences, learner.log_probs(share(sequences, "token"))), "token")
    weights = [weight for weight in learner.chunks[0].parameters() if weight.dim() > 1]
    start = [weight.detach().clone() for weight in weights]
    rows, moved = [], []
    for _ in range(30):
        rows.append(learner.update(mini_batch, objective, step=1))
        same = sum(int((a == b).sum()) for a, b in zip(start, weights, strict=True))
        moved.append(1 - same / sum(one.numel() for one in start))
    return {"rows": rows, "moved": moved, "dtype": weights[0].dtype}


@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_weights_start_at_ratio_one_and_gather_steps_below_their_resolution(
    spawn: Any, folder: Path, distributed: bool
) -> None:
    """Steps of 2e-5 on weights near 0.1, where bfloat16 resolves 5e-4: a float32 copy must add them up."""
    sequences = random_sequences(6, seed=4)
    [found] = spawn(bfloat16_run, 1, folder, sequences, distributed)
    assert found["dtype"] == torch.bfloat16
    first = found["rows"][0]
    assert first["weight/min"] == first["weight/max"] == 1.0
    assert found["moved"][0] < 0.2
    assert found["moved"][-1] > 0.5


def test_the_gradient_norm_of_many_numbers_is_exact():
    """float32 loses a thousandth of it on CPUs, and with it clips by another number in every layout."""
    from types import SimpleNamespace

    from pnpo_megatron.policy.optimizer import gradient_norm
    from pnpo_megatron.policy.process_groups import start_distributed

    start_distributed()
    gradients = [torch.full((3, 3_000_000), 0.1), torch.tensor([7.0, 24.0])]
    part = SimpleNamespace(
        get_main_grads_for_grad_norm=lambda: gradients, get_grad_stats_parallel_group=lambda: None
    )
    optimizer: Any = SimpleNamespace(prepare_grads=lambda: None, chained_optimizers=[part])
    tenth = float(torch.tensor(0.1))  # as float32 has it
    expected = math.sqrt(9_000_000 * tenth**2 + 7.0**2 + 24.0**2)
    assert gradient_norm(optimizer) == pytest.approx(expected, rel=1e-12)
