"""Golden numbers are those of the executed listing in the implementer's notes (reuse_econ.py)."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from pnpo_megatron.analysis.plan_reuse import (
    Budget,
    main,
    measured_cost,
    parse_step_seconds,
    print_plan,
)
from pnpo_megatron.analysis.reuse import ReuseTax, StepCost, recommend, regime, split_step_cost
from pnpo_megatron.analysis.reuse_tax import reuse_taxes
from pnpo_megatron.analysis.run_folder import read_run
from pnpo_megatron.errors import ConfigError, DataError, UserError

PAPER = split_step_cost({1: 283.0, 4: 510.0})
BUDGET = {"updates": 2400, "updates_per_epoch": 4, "responses": 2048}


def test_the_papers_two_step_times_give_the_notes_split():
    assert PAPER.generation_s == pytest.approx(283 - (510 - 283) / 3, abs=1e-9)
    assert PAPER.update_s == pytest.approx((510 - 283) / 3, abs=1e-9)
    assert (round(PAPER.generation_s, 1), round(PAPER.update_s, 1)) == (207.3, 75.7)


def test_matched_budget_hours_responses_and_shares_of_the_paper():
    one, four = regime(PAPER, 1, **BUDGET), regime(PAPER, 4, **BUDGET)
    assert (round(one.hours, 2), round(four.hours, 2)) == (47.17, 21.25)
    assert (one.steps, four.steps) == (600, 150)
    assert (one.responses, four.responses) == (1_228_800, 307_200)
    assert (round(one.generation_share, 3), round(four.generation_share, 3)) == (0.733, 0.407)
    assert (round(one.fleet_ratio, 2), round(four.fleet_ratio, 2)) == (2.74, 0.69)


def test_speedups_and_ceiling_of_the_paper():
    assert [round(PAPER.speedup(k), 2) for k in (1, 2, 4, 8, 16, 64)] == [1.0, 1.58, 2.22, 2.79, 3.19, 3.59]
    assert round(PAPER.ceiling, 2) == 3.74
    assert PAPER.speedup(10**9) == pytest.approx(PAPER.ceiling, rel=1e-6)


def test_more_points_are_fitted_by_least_squares_and_leave_residuals():
    # By hand: K = 1, 2, 3 with 10, 13, 14 s: slope (14 - 10) / 2 = 2, intercept 37/3 - 2*2 = 25/3.
    cost = split_step_cost({1: 10.0, 2: 13.0, 3: 14.0})
    assert (cost.update_s, cost.generation_s) == (pytest.approx(2.0), pytest.approx(25 / 3))
    assert [round(value, 9) for value in cost.residuals.values()] == [-0.333333333, 0.666666667, -0.333333333]
    assert sum(cost.residuals.values()) == pytest.approx(0.0, abs=1e-12)


def test_an_overlapped_step_takes_the_longer_of_the_two():
    cost = StepCost(generation_s=100.0, update_s=30.0, overlapped=True)
    assert [cost.step_s(k) for k in (1, 2, 4, 8)] == [100, 100, 120, 240]
    assert cost.speedup(4) == pytest.approx(4 * 100 / 120)
    assert cost.ceiling == pytest.approx(100 / 30) == pytest.approx(cost.speedup(64))


@pytest.mark.parametrize(
    ("generation_s", "update_s", "epochs"),
    [
        (207.3, 75.7, 4),
        (0.0, 1.0, 1),
        (1.0, 1.0, 1),
        (1.01, 1.0, 2),
        (4.0, 1.0, 4),
        (4.01, 1.0, 8),
    ],
)
def test_recommended_epochs_are_the_smallest_power_of_two_covering_generation(generation_s, update_s, epochs):
    assert recommend(StepCost(generation_s, update_s)).epochs == epochs


def test_a_tax_beyond_its_standard_error_lowers_the_recommendation():
    tax = {4: ReuseTax(2.2, 0.5), 2: ReuseTax(0.3, 0.5)}
    assert recommend(PAPER, tax).epochs == 2
    assert "K = 4 exceeds" in recommend(PAPER, tax).reason
    assert recommend(PAPER, {4: ReuseTax(2.2, 0.5), 2: ReuseTax(1.0, 0.5)}).epochs == 1
    assert recommend(PAPER, {4: ReuseTax(0.5, 0.5)}).epochs == 4
    assert "tax of K = 2 was not measured" in recommend(PAPER, {4: ReuseTax(2.2, 0.5)}).reason


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({1: 510.0, 4: 283.0}, "optimizer time is -75.67 s"),
        ({1: 283.0, 2: 283.0}, "optimizer time is 0 s"),
        ({1: 10.0, 4: 50.0}, "generation time is -3.333 s"),
        ({1: 283.0}, "two or more"),
    ],
)
def test_times_that_no_split_explains_are_refused(points, words):
    with pytest.raises(ConfigError, match=words):
        split_step_cost(points)


def test_steps_proportional_to_epochs_mean_no_generation_time():
    assert split_step_cost({1: 0.1, 3: 0.3}).generation_s == 0.0


@pytest.mark.parametrize(
    "items", [["1"], ["x=3"], ["1=3", "1=4"], ["0=3", "2=5"], ["1=-3"], ["1=nan"], ["1.5=3"]]
)
def test_step_seconds_that_cannot_be_read_name_themselves(items):
    with pytest.raises(ConfigError, match=items[0] if items[0] == "0=3" else items[-1]):
        parse_step_seconds(items)


def test_the_command_prints_the_notes_numbers(capsys):
    main(["--step-seconds", "1=283", "4=510"])
    printed = capsys.readouterr().out
    for expected in (
        "207.3 s",
        "75.7 s",
        "47.17",
        "21.25",
        "2.22x",
        "3.74x",
        "73.3 %",
        "40.7 %",
        "1,228,800",
        "recommended K = 4",
    ):
        assert expected in printed, expected


def write_run(folder, rows, **config):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        "steps = 3",
        "[rollout]",
        "prompts = 4",
        "group_size = 8",
        "[objective]",
        "mini_batch = 2",
        f"epochs = {config.get('epochs', 2)}",
    ]
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    return read_run(folder)


def update_rows(steps=3, epochs=2, update_s=3.0):
    """M = 2 updates an epoch; the first step is slow everywhere, as a warm-up is."""
    rows = []
    for step in range(1, steps + 1):
        for index in range(2 * epochs):
            row = {
                "kind": "update",
                "step": step,
                "epoch": 1 + index // 2,
                "update": len(rows) + 1,
                "time/update_s": 50.0 if step == 1 else update_s,
                "update/skipped": 0,
            }
            if index == 0:
                slow = 100.0 if step == 1 else 1.0
                row |= {
                    "time/generate_s": 10 * slow,
                    "time/reward_s": 2 * slow,
                    "time/logprobs_s": 3 * slow,
                    "time/sync_s": 1 * slow,
                }
            rows.append(row)
    return rows


def test_a_runs_own_timers_give_the_split_without_the_warm_up_step(tmp_path):
    cost = measured_cost(write_run(tmp_path / "run", update_rows()))
    assert cost.generation_s == pytest.approx(10 + 2 + 3 + 1)
    assert cost.update_s == pytest.approx(2 * 3.0)
    assert cost.parts == {"generate": 10, "reward": 2, "logprobs": 3, "sync": 1}


def test_epochs_stopped_early_do_not_make_an_epoch_cheaper(tmp_path):
    rows = [row for row in update_rows() if (row["step"], row["epoch"]) != (2, 2)][:-1]
    assert measured_cost(write_run(tmp_path / "run", rows)).update_s == pytest.approx(6.0)


def test_a_run_with_only_its_first_step_uses_it(tmp_path):
    assert measured_cost(write_run(tmp_path / "run", update_rows(steps=1))).generation_s == pytest.approx(
        1600
    )


def test_a_missing_timer_is_named(tmp_path):
    rows = update_rows()
    del rows[4]["time/sync_s"]
    with pytest.raises(ConfigError, match="update 5 has no time/sync_s"):
        measured_cost(write_run(tmp_path / "run", rows))


def test_a_line_still_being_written_is_left_out_and_a_broken_one_is_named(tmp_path):
    run = write_run(tmp_path / "run", update_rows())
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    assert len(read_run(run.path).updates) == len(run.updates)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="line 13"):
        read_run(run.path)


@pytest.mark.parametrize(
    "words", [[], ["no/such/run"], ["--step-seconds", "1=283", "4=510", "--updates", "0"]]
)
def test_unusable_input_is_the_users_error(words):
    with pytest.raises(UserError):
        main(words)


def evaluated(run, correct, update=None):
    """Write the file and the row of an evaluation after the last update."""
    last = run.updates[-1]
    row = {"kind": "eval", "step": last["step"], "update": last["update"] if update is None else update}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (run.path / "eval").mkdir()
    benchmarks = {
        name: {"k": len(next(iter(problems.values()))), "correct": problems}
        for name, problems in correct.items()
    }
    (run.path / "eval" / f"step_{last['step']:06d}.json").write_text(json.dumps({"benchmarks": benchmarks}))
    return read_run(run.path)


def test_the_reuse_tax_is_a_paired_difference_of_final_scores_at_a_matched_budget(tmp_path):
    one = write_run(tmp_path / "one", update_rows(steps=6, epochs=1), epochs=1)
    two = write_run(tmp_path / "two", update_rows(), epochs=2)
    one = evaluated(one, {"sums": {"a": [1, 1], "b": [0, 1], "c": [0, 0]}, "more": {"x": [1], "y": [1]}})
    two = evaluated(two, {"more": {"y": [1], "x": [0]}, "sums": {"b": [0, 0], "a": [1, 1], "c": [0, 1]}})
    taxes, remarks = reuse_taxes([two, one])
    assert remarks == []
    # sums: differences 0, .5, -.5, mean 0, sd .5; more: 1, 0, mean .5, sd sqrt(.5)
    assert taxes[2].points == pytest.approx(100 * (0 + 0.5) / 2)
    assert taxes[2].stderr == pytest.approx(100 * (0.5**2 / 3 + 0.5 / 2) ** 0.5 / 2)


def test_no_tax_is_made_up_from_runs_that_cannot_be_compared(tmp_path):
    problems = {"sums": {"a": [1], "b": [0]}}
    one = evaluated(write_run(tmp_path / "one", update_rows(steps=6, epochs=1), epochs=1), problems)
    short = evaluated(write_run(tmp_path / "short", update_rows(steps=5, epochs=1), epochs=1), problems)
    late = evaluated(
        write_run(tmp_path / "late", update_rows(steps=6, epochs=1), epochs=1), problems, update=3
    )
    two = evaluated(write_run(tmp_path / "two", update_rows(), epochs=2), problems)
    other = evaluated(write_run(tmp_path / "other", update_rows(), epochs=2), {"sums": {"a": [1], "z": [0]}})
    bare = write_run(tmp_path / "bare", update_rows(), epochs=2)
    remark = "no reuse tax of K = 2: short took 10 updates and two 12; the budgets must match"
    assert reuse_taxes([short, two]) == ({}, [remark])
    assert "late was not evaluated after its last update" in reuse_taxes([late, two])[1][0]
    assert "bare was not evaluated" in reuse_taxes([one, bare])[1][0]
    assert "different problems" in reuse_taxes([one, other])[1][0]
    assert "objective.epochs = 1" in reuse_taxes([two, two])[1][0]
    (two.path / "eval" / "step_000003.json").unlink()
    assert "two has no eval/step_000003.json" in reuse_taxes([one, two])[1][0]


def test_residuals_are_printed_when_there_are_more_points_than_unknowns():
    console = Console(file=io.StringIO(), width=200)
    print_plan(split_step_cost({1: 10.0, 2: 13.0, 3: 14.0}), Budget(), {}, [], console)
    assert "least squares over 3 points" in console.file.getvalue()
    assert "K=2 +0.7 s" in console.file.getvalue()
