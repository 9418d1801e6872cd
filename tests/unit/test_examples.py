"""The examples' own parts: disjoint problems, right workings, a lossless tokenizer, an honest summary."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from pnpo_megatron.config import load_config
from pnpo_megatron.reward.math_answer import grade
from pnpo_megatron.study import read_study

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STUDIES = {  # cells, updates, updates between evaluations
    "arithmetic_cpu/study.toml": (50, 48, 16),
    "running_totals/study.toml": (18, 32, 16),
    "running_totals/ablations.toml": (42, 32, 16),
}
CONFIGS = sorted(
    path for path in EXAMPLES.glob("*/*.toml") if f"{path.parent.name}/{path.name}" not in STUDIES
)


def load(path: str):
    """Import an example's script with its own folder first on the path, as `python script.py` does."""
    file = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(f"example_{file.parent.name}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


@pytest.fixture(scope="module")
def sums():
    return load("arithmetic_cpu/sums.py")


@pytest.fixture(scope="module")
def totals():
    return load("running_totals/totals.py")


@pytest.fixture(scope="module")
def make_base():
    return load("arithmetic_cpu/make_base.py")


@pytest.fixture(scope="module")
def summary():
    return load("summary.py")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_example_config_is_valid(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    config = load_config(path.name)
    updates = config.steps * config.objective.epochs * config.rollout.prompts // config.objective.mini_batch
    assert updates > 0


@pytest.mark.parametrize("path", STUDIES)
def test_every_example_study_meets_its_budget_in_every_setting(path, monkeypatch):
    monkeypatch.chdir((EXAMPLES / path).parent)
    count, *budget = STUDIES[path]
    cells = read_study(Path(Path(path).name)).cells
    assert len(cells) == count
    for cell in cells:
        objective, prompts = cell.config.objective, cell.config.rollout.prompts
        per_step = objective.epochs * prompts // objective.mini_batch
        assert [cell.config.steps * per_step, cell.config.eval.every * per_step] == budget


def test_held_out_sums_are_in_neither_training_set_in_any_order(sums):
    split = sums.split(seed=42)
    sets = (split.base, split.prompts, split.heldout)
    base, prompts, heldout = ({frozenset(pair) for pair in part} for part in sets)
    assert not (base & prompts or base & heldout or prompts & heldout)
    assert len(base | prompts | heldout) == 90 * 91 // 2
    assert len(split.heldout) == len(heldout) >= 200


def test_a_working_without_slips_is_right_for_every_sum_and_graded_so(sums):
    rng = random.Random(0)
    for a in range(10, 100):
        for b in range(10, 100):
            text = sums.worked(a, b, sums.NO_SLIPS, rng)
            assert text.endswith(f"\nAnswer: {a + b}")
    assert sums.worked(37, 48, sums.NO_SLIPS, rng) == "7+8=15,3+4+1=8\nAnswer: 85"
    assert grade(sums.worked(57, 68, sums.NO_SLIPS, rng), "125").correct


@pytest.mark.parametrize("slip", ["units", "carry", "tens"])
def test_any_single_slip_makes_the_answer_wrong(sums, slip):
    always = sums.Slips(**{"units": 0.0, "carry": 0.0, "tens": 0.0, slip: 1.0})
    text = sums.worked(37, 48, always, random.Random(0))
    assert not grade(text, "85").correct


def test_slips_leave_between_30_and_50_percent_right(sums):
    rng, pairs = random.Random(0), sums.split(seed=42).heldout
    right = [grade(sums.worked(a, b, sums.Slips(), rng), str(a + b)).correct for a, b in 4 * pairs]
    assert 0.35 < sum(right) / len(right) < 0.45


def test_a_running_total_without_slips_is_right_and_no_prompt_is_in_two_sets(totals):
    split, rng = totals.split(seed=42), random.Random(0)
    sets = [set(part) for part in (split.base, split.prompts, split.heldout)]
    assert len(set.union(*sets)) == sum(map(len, sets)) == len(split.base) + len(split.prompts) + 256
    text = totals.worked(*range(1, 10), 1, 2, 3, 4, slips=totals.NO_SLIPS, rng=rng)
    assert text.startswith("b2+1=3,c3+3=6,") and text.endswith(",m4+51=55\nAnswer: 55")
    for numbers in split.heldout:
        assert grade(totals.worked(*numbers, slips=totals.NO_SLIPS, rng=rng), str(sum(numbers))).correct


@pytest.mark.parametrize("slip", ["total", "number"])
def test_slips_of_either_kind_spoil_running_totals_and_leave_room_to_learn(totals, slip):
    rng, heldout = random.Random(0), totals.split(seed=42).heldout

    def right(slips) -> float:
        texts = [(totals.worked(*numbers, slips=slips, rng=rng), str(sum(numbers))) for numbers in heldout]
        return sum(grade(*text).correct for text in texts) / len(texts)

    assert right(totals.Slips(**{"total": 0.0, "number": 0.0, slip: 0.5})) < 0.25
    assert 0.3 < right(totals.CARELESS) < 0.6


def test_the_tokenizer_gives_back_every_character_one_token_each(make_base, sums):
    tokenizer = make_base.make_tokenizer()
    text = sums.prompt(37, 48) + sums.worked(37, 48, sums.NO_SLIPS, random.Random(0))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text) - len(sums.ANSWER) + 1
    assert tokenizer.unk_token_id not in ids
    assert tokenizer(make_base.EOS)["input_ids"] == [tokenizer.eos_token_id]


def test_the_base_is_trained_on_the_working_and_its_end_only(make_base):
    tokenizer = make_base.make_tokenizer()
    ids, labels = make_base.encode_examples(tokenizer, [(37, 48), (11, 12)], random.Random(0))
    assert (labels[:, :6] == -100).all()
    for row, label in zip(ids, labels, strict=True):
        end = (row == tokenizer.eos_token_id).nonzero().item()
        assert (label[6 : end + 1] == row[6 : end + 1]).all()
        assert (label[end + 1 :] == -100).all()


def test_smollm2_problems_are_disjoint_and_not_the_worked_ones():
    training, held = load("smollm2_cpu/make_prompts.py").make_problems(heldout=24, seed=42)
    unordered = [{"".join(sorted(row["id"])) for row in rows} for rows in (training, held)]
    assert unordered[0].isdisjoint(unordered[1])
    template = (EXAMPLES / "smollm2_cpu" / "worked_turns.jinja").read_text("utf-8")
    for row in training + held:
        assert row["problem"] not in template
        assert int(row["answer"]) == eval(row["id"])


@pytest.fixture
def run_folder(tmp_path):
    """Two steps of two epochs with two updates each, and two evaluations of three problems."""
    rows, update = [], 0
    for step in (1, 2):
        for epoch in (1, 2):
            for _ in range(2):
                update += 1
                row = {
                    "kind": "update",
                    "step": step,
                    "epoch": epoch,
                    "update": update,
                    "time/update_s": 2.0,
                    "gate/rejected_fraction": 0.1 * (epoch - 1),
                    "update/skipped": 0,
                }
                if not any(earlier["step"] == step for earlier in rows):
                    row |= {"reward/mean": 0.25 * step, "time/generate_s": 5.0, "time/sync_s": 1.0}
                rows.append(row)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval").mkdir()
    for step, correct in ((0, [[1, 0], [0, 0], [0, 1]]), (2, [[1, 1], [0, 1], [1, 1]])):
        means = [sum(problem) / 2 for problem in correct]
        score = {
            "k": 2,
            "problems": 3,
            "avg_at_k": sum(means) / 3,
            "stderr": 0.1,
            "pass_at_k": 1.0,
            "correct": {str(index): problem for index, problem in enumerate(correct)},
        }
        evaluation = json.dumps({"step": step, "benchmarks": {"sums": score}})
        (tmp_path / "eval" / f"step_{step:06d}.json").write_text(evaluation)
    (tmp_path / "hf" / "step_000002").mkdir(parents=True)
    return tmp_path


def test_the_summary_reports_gain_rejections_and_seconds(summary, run_folder, capsys):
    assert summary.main([str(run_folder)]) == 0
    printed = capsys.readouterr().out
    assert "paired gain      +50.0    ± 0.0" in printed  # every problem gained one of its two samples
    assert "epoch 1 0.0 %, epoch 2 10.0 %" in printed
    assert "generate 10, reward 0, logprobs 0, sync 2, update 16" in printed
    assert "8 in 2 rollout batches, 0 skipped" in printed
    assert str(run_folder / "hf" / "step_000002") in printed
    assert (run_folder / "plots" / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_of_a_folder_that_is_no_run_is_one_clear_line(summary, tmp_path, capsys):
    assert summary.main([str(tmp_path)]) == 2
    message = f"error: {tmp_path}/metrics.jsonl: no such file; give the folder of a training run\n"
    assert capsys.readouterr().err == message
