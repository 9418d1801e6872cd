"""Whole runs on real parts: Megatron-Core trains, vLLM samples, checkpoints resume, exports load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_task import (
    EPOCHS,
    STEPS,
    UPDATES_PER_EPOCH,
    finish,
    make_task,
    read_metrics,
    start_training,
    stop_after_step,
    without_times,
    write_config,
)
from transformers import AutoModelForCausalLM

from pnpo_megatron.config import load_config

pytestmark = pytest.mark.timeout(900)
DUMPED = 2


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task: Path) -> Path:
    """The run that nobody stops; it dumps the tokens of one batch, which must not change it."""
    folder = task / "whole"
    code, output = finish(start_training(write_config(task, folder), "--dump-tokens", str(DUMPED)))
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def updates(whole: Path) -> list[dict]:
    return [row for row in read_metrics(whole) if row["kind"] == "update"]


def test_updates_are_steps_times_epochs_times_mini_batches(whole, updates):
    assert [row["update"] for row in updates] == list(range(1, STEPS * EPOCHS * UPDATES_PER_EPOCH + 1))
    evaluated = [row["step"] for row in read_metrics(whole) if row["kind"] == "eval"]
    assert evaluated == list(range(STEPS + 1)), "before training, and after every step"
    assert (whole / "exit_code").read_text() == "0\n"


def test_h14_every_weight_is_exactly_one_at_the_first_update_of_a_batch_and_not_at_the_next(updates):
    assert not any(row["update/skipped"] for row in updates), (
        "the reward must give every update something to learn"
    )
    for step in range(1, STEPS + 1):
        first, second = [row for row in updates if row["step"] == step][:2]
        assert (first["weight/min"], first["weight/max"], first["gate/rejected_fraction"]) == (1.0, 1.0, 0.0)
        assert second["weight/min"] < 1.0 < second["weight/max"]


def test_rejected_fraction_and_weight_quantiles_are_a_float64_recomputation_from_the_dumped_tokens(
    whole, updates
):
    settings = load_config(whole / "config.toml").objective
    rows = [row for row in updates if row["step"] == DUMPED]
    assert len(rows) == EPOCHS * UPDATES_PER_EPOCH
    for row in rows:
        name = f"step_{DUMPED:06d}_epoch_{row['epoch']}_update_{row['update']}.safetensors"
        tokens = load_file(whole / "tokens" / name)
        ratio = tokens["policy_logprobs"].double() - tokens["old_logprobs"].double()
        t, length = tokens["position"].double(), tokens["length"].double()
        means = [ratio[tokens["row"] == one].cumsum(0) for one in tokens["row"].unique()]  # in order of rows
        weight = torch.exp(torch.cat(means) / t)
        reach = torch.sqrt(length / t)
        kept = (weight >= 1 - settings.gate_low * reach) & (weight <= 1 + settings.gate_high * reach)
        assert row["gate/rejected_fraction"] == pytest.approx(1 - float(kept.double().mean()), abs=1e-6)
        ordered = weight.sort().values
        for percent in (1, 5, 50, 95, 99):
            place = math.ceil(percent * len(ordered) / 100) - 1
            assert row[f"weight/q{percent:02d}"] == pytest.approx(float(ordered[place]), abs=1e-6)
    assert rows[0]["gate/rejected_fraction"] == 0.0 < rows[-1]["gate/rejected_fraction"]


def test_learner_and_engine_score_alike_in_float32(updates):
    gaps = [row["mismatch/max_abs"] for row in updates if "mismatch/max_abs" in row]
    assert len(gaps) == STEPS and 0.0 < max(gaps) < 1e-4


def test_an_exported_folder_gives_the_log_probs_that_the_learner_had(whole):
    """Old log-probs of step 3 are those of the weights exported after step 2."""
    model = AutoModelForCausalLM.from_pretrained(whole / "hf" / "step_000002", dtype=torch.float32).eval()
    stored = load_file(whole / "rollouts" / "step_000003.safetensors")
    lengths = stored["lengths"].tolist()
    columns = [stored[name].split(lengths) for name in ("ids", "response_mask", "old_logprobs")]
    worst = 0.0
    for ids, mask, old in zip(*columns, strict=True):
        with torch.no_grad():
            logits = model(ids[None].long()).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, ids[1:, None].long())[:, 0]
        worst = max(worst, float((expected - old[1:])[mask[1:].bool()].abs().max()))
    assert worst < 1e-5


def test_a_run_stopped_by_a_signal_resumes_to_the_same_numbers(task, whole):
    folder = task / "stopped"
    config = write_config(task, folder)
    process = start_training(config)
    stop_after_step(process, folder, step=1)
    code, output = finish(process)
    assert code == 75, output
    assert (folder / "exit_code").read_text() == "75\n"
    made = sum(row["kind"] == "update" for row in read_metrics(folder))
    assert made < STEPS * EPOCHS * UPDATES_PER_EPOCH

    code, output = finish(start_training(config))
    assert code == 0 and "resuming after" in output, output
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))
    for step in range(1, STEPS + 1):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (folder / name).read_text() == (whole / name).read_text()
    ours, theirs = (load_file(run / "hf/step_000003/model.safetensors") for run in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    code, output = finish(start_training(config))
    assert code == 0 and "complete" in output


def test_two_data_parallel_ranks_replay_to_the_same_loss_and_gradient(task, whole, updates):
    folder = task / "replayed"
    flags = (f"--rollout.replay={whole}", "--eval.benchmarks=[]")
    code, output = finish(start_training(write_config(task, folder), *flags, ranks=2))
    assert code == 0, output
    replayed = [row for row in read_metrics(folder) if row["kind"] == "update"]
    assert len(replayed) == len(updates)
    for ours, theirs in zip(replayed, updates, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["gate/rejected_fraction"] == theirs["gate/rejected_fraction"]


def test_a_run_begun_from_a_checkpoint_is_one_begun_from_the_folder_exported_beside_it(task, whole):
    """The same first weights, so the same rows, with a loss that also pulls back to them."""
    name = f"step_{STEPS:06d}"
    rows = {}
    for case, flags in {
        "folder": [f"--model.hf={whole / 'hf' / name}"],
        "checkpoint": [f"--model.init={whole / 'checkpoints' / name}"],
    }.items():
        config = write_config(task, task / case, steps=2)
        code, output = finish(
            start_training(
                config, *flags, f"--rollout.replay={whole}", "--eval.benchmarks=[]",
                "--objective.kl_coef=0.1", "--objective.entropy_coef=0.01", "--rollout.max_mismatch=10",
            )
        )  # fmt: skip
        assert code == 0, output
        rows[case] = without_times(read_metrics(task / case))
    assert rows["checkpoint"] == rows["folder"]
    pulled = [row["kl/reference"] for row in rows["folder"] if "kl/reference" in row]
    assert pulled[0] == 0.0 < pulled[1], "nothing has moved before the first batch's updates"


def test_two_data_parallel_ranks_sample_and_learn_as_one_does(task, whole, updates):
    """The first batch: the same weights, prompts and seeds, so the same rollouts; then the same gradients."""
    folder = task / "two_ranks"
    code, output = finish(start_training(write_config(task, folder, steps=1), ranks=2))
    assert code == 0, output
    first = "rollouts/step_000001.jsonl"
    assert (folder / first).read_text() == (whole / first).read_text()
    ours = [row for row in read_metrics(folder) if row["kind"] == "update"]
    theirs = updates[: len(ours)]
    assert len(ours) == EPOCHS * UPDATES_PER_EPOCH
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-5)


def test_replaying_a_step_that_was_never_stored_is_named(task, whole):
    config = write_config(task, task / "beyond")
    flags = (f"--rollout.replay={whole}", "--steps=4", "--eval.benchmarks=[]")
    code, output = finish(start_training(config, *flags))
    assert code == 2 and "step_000004" in output.splitlines()[-1], output


def test_rollout_rows_hold_what_a_person_needs(whole):
    rows = [json.loads(line) for line in (whole / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert set(rows[0]) == {
        "prompt_id", "group", "sample", "seed", "version", "finish_reason", "reward", "advantage",
        "truncated", "text",
    }  # fmt: skip
    assert len(rows) == 16 and {row["version"] for row in rows} == {0}
    assert len({row["seed"] for row in rows}) == 16
