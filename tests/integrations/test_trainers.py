"""PNPO inside verl's and TRL's own code; `make test-integrations` runs it where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("bench", "examples/integrations", "tests/unit/algorithm", "tests/e2e")


@pytest.fixture(autouse=True, scope="module")
def _paths():
    pytest.importorskip("trl", reason="needs the bench environment: make test-integrations")
    pytest.importorskip("tensordict", reason="needs the bench environment: make test-integrations")
    sys.path[:0] = [str(ROOT / path) for path in PATHS]
    yield
    del sys.path[: len(PATHS)]


@pytest.fixture(scope="module")
def verl():
    """verl's registered loss, and the configuration it is called with."""
    import peer_losses

    core = peer_losses._verl_losses()
    import verl_pnpo  # noqa: F401  (importing it registers the loss, as verl's external_lib does)

    return core.get_policy_loss_fn("pnpo"), peer_losses._ActorConfig


def batch(seed):
    from naive_reference import random_responses

    policy, old, mask = random_responses(12, 25, scale=0.03, seed=seed, dtype=torch.float32)
    mask[3] = False
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    return policy.requires_grad_(), old, mask, advantages


@pytest.mark.parametrize("seed", range(5))
def test_verls_loss_in_micro_batches_is_ours_and_has_the_papers_gradient(verl, seed):
    from naive_reference import naive_pnpo_coefficients

    from pnpo_megatron.algorithm import policy_loss_padded

    loss, actor_config = verl
    policy, old, mask, advantages = batch(seed)
    config = actor_config(0.01, 0.013)
    config.global_batch_info.update(dp_size=1, global_batch_size=11)
    spread = (advantages[:, None] * mask).float()
    total, rejected = 0.0, 0.0
    for rows in torch.arange(12).split(5):
        arrays = (old[rows], policy[rows], spread[rows], mask[rows].float())
        part, metrics = loss(*arrays, loss_agg_mode="seq-mean-token-mean", config=config)
        part.backward()
        total, rejected = (
            total + float(part.detach()),
            rejected + metrics["actor/pg_clipfrac"] * float(mask[rows].sum()),
        )
    gradient = policy.grad.clone()

    ours = policy_loss_padded("pnpo", policy.detach(), old, advantages, mask, gate_low=0.01, gate_high=0.013)
    assert total == pytest.approx(float(ours), rel=1e-5, abs=1e-8)
    kept = 0
    for row in range(12):
        if mask[row].any():
            ratios = (policy.detach()[row] - old[row])[mask[row]].double().tolist()
            wanted = torch.tensor(naive_pnpo_coefficients(ratios, 0.01, 0.013), dtype=torch.float64)
            kept += int((wanted > 0).sum())
            wanted *= -float(advantages[row]) / 11
            torch.testing.assert_close(gradient[row][mask[row]].double(), wanted, rtol=1e-5, atol=1e-9)
    assert 0 < kept < int(mask.sum())
    assert round(rejected) == int(mask.sum()) - kept


def test_verls_loss_refuses_what_it_would_get_wrong(verl):
    loss, actor_config = verl
    policy, old, mask, advantages = batch(0)
    config = actor_config(0.01, 0.013)
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        loss(old, policy, advantages[:, None] * mask, mask, loss_agg_mode="token-mean", config=config)
    with pytest.raises(ValueError, match="one number a response"):
        loss(old, policy, torch.randn(12, 25), mask, config=config)


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_a_tiny_model_and_its_gate_rejects_only_reused_tokens(tmp_path, monkeypatch):
    from datasets import Dataset
    from tiny_task import make_task
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig
    from trl_pnpo import PNPOTrainer

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    folder = make_task(tmp_path) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = [one.detach().clone() for one in model.parameters()]
    prompts = [{"prompt": f"{number}+1="} for number in range(8)]

    def even_digits(completions, **_):
        return [sum(text.count(digit) for digit in "02468") / 12 for text in completions]

    args = GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=16, num_generations=4, num_iterations=3,
        max_completion_length=12, max_steps=6, learning_rate=5e-4, beta=0.0, logging_steps=1,
        report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = PNPOTrainer(
        model=model, reward_funcs=even_digits, args=args, train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        gate_low=0.02, gate_high=0.02,
    )  # fmt: skip
    trainer.train()
    rejected = [
        row["gate/rejected_fraction"] for row in trainer.state.log_history if "gate/rejected_fraction" in row
    ]
    assert len(rejected) == 6
    assert rejected[0] == rejected[3] == 0.0, "the first epoch of a batch is on-policy"
    assert all(0.0 < rejected[index] < 1.0 for index in (1, 2, 4, 5))
    moved = [
        float((old - new.detach()).abs().max()) for old, new in zip(before, model.parameters(), strict=True)
    ]
    assert all(0.0 < one < 0.1 for one in moved)
