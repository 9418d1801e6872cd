"""Tables and intervals of a study, from finished runs and from the stored results alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from synthetic_run import write_synthetic_run

from pnpo_megatron.analysis.compare import (
    build_page,
    difference,
    final,
    grouped,
    headings,
    interval,
    joined,
    macro,
    markdown,
    peak,
    problem_scores,
    rows_of,
    run_result,
    summary,
    write_results,
)
from pnpo_megatron.errors import DataError

PROBLEMS, K = 40, 4


def write_run(folder: Path, *, seed: int, gain: float, epochs: int = 2) -> Path:
    """A run of 10 steps with evaluations of 40 problems after steps 5 and 10."""
    write_synthetic_run(folder, steps=10, epochs=epochs, seed=seed, dumps=False)
    draw = torch.Generator().manual_seed(seed)
    ease = torch.rand(PROBLEMS, generator=torch.Generator().manual_seed(9))
    (folder / "eval").mkdir()
    for step in (5, 10):
        chance = (0.5 * ease + gain * step / 10).clamp(0, 1)[:, None].expand(PROBLEMS, K)
        right = torch.bernoulli(chance, generator=draw).int().tolist()
        correct = {f"p{index}": row for index, row in enumerate(right)}
        one = {"k": K, "problems": PROBLEMS, "correct": correct}
        text = json.dumps({"step": step, "benchmarks": {"sums": one}})
        (folder / "eval" / f"step_{step:06d}.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("study"), []
    for setting, gain, seeds in (("grpo", 0.2, 4), ("pnpo", 0.35, 3)):
        for seed in range(seeds):
            run = write_run(folder / f"{setting}{seed}", seed=10 * seed + len(setting), gain=gain)
            runs.append(run_result(run, setting, seed))
    settings = ["grpo", "pnpo", "gspo"]
    head = {"name": "s", "baseline": "grpo", "settings": settings, "seeds": [0, 1, 2, 3]}
    return head | joined(runs)


def test_runs_of_other_problems_do_not_get_into_one_table(results):
    runs = [run | {"problems": {"sums": [f"p{index}"]}} for index, run in enumerate(results["runs"])]
    with pytest.raises(DataError, match="different problems"):
        joined(runs)


def test_a_result_holds_what_the_run_folder_says(results, tmp_path):
    folder = write_run(tmp_path / "run", seed=7, gain=0.3)
    found = run_result(folder, "pnpo", 7)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    assert (found["updates"], found["responses"]) == (len(updates), 10 * 16 * 8)
    assert [one["update"] for one in found["evaluations"]] == [20, 40]
    last = json.loads((folder / "eval/step_000010.json").read_text())["benchmarks"]["sums"]["correct"]
    assert macro(final(found)) == pytest.approx(sum(map(sum, last.values())) / PROBLEMS / K)
    second = [row["gate/rejected_fraction"] for row in updates if row["epoch"] == 2]
    assert found["rejected_by_epoch"][1] == pytest.approx(sum(second) / len(second), abs=1e-6)
    assert macro(peak(found)) == max(macro(one) for one in found["evaluations"])


def test_the_interval_of_many_seeds_and_problems_is_that_of_independent_effects():
    draw = torch.Generator().manual_seed(4)
    seeds, problems = 60, 80
    table = 0.3 * torch.randn(seeds, 1, generator=draw) + 0.5 * torch.randn(1, problems, generator=draw)
    table = (table + 0.01 * torch.randn(seeds, problems, generator=draw)).double()
    mean, low, high = interval([[row] for row in table])
    assert mean == pytest.approx(float(table.mean()))
    by_seed, by_problem = table.mean(1).var(correction=0), table.mean(0).var(correction=0)
    half = 1.96 * math.sqrt(float(by_seed) / seeds + float(by_problem) / problems)
    assert (high - low) / 2 == pytest.approx(half, rel=0.04)


def test_benchmarks_weigh_alike_whatever_their_size():
    mean, low, high = interval(
        [[torch.zeros(30, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]] * 2
    )
    assert (mean, low, high) == (0.5, 0.5, 0.5)


def test_differences_are_paired_by_seed_and_problem(results):
    grpo, pnpo = ([run for run in results["runs"] if run["setting"] == name] for name in ("grpo", "pnpo"))
    count, (mean, low, high) = difference(pnpo, grpo)
    pairs = [
        problem_scores(final(a))[0].mean() - problem_scores(final(b))[0].mean()
        for a, b in zip(pnpo, grpo[:3], strict=True)
    ]
    assert count == 3 and mean == pytest.approx(float(sum(pairs) / 3))
    assert low < mean < high
    assert difference(grpo, grpo) == (4, (0.0, 0.0, 0.0))
    assert difference(pnpo, [run | {"seed": 99} for run in grpo]) is None


def test_the_table_states_n_and_an_unfinished_setting_is_there_all_the_same(results):
    table = {row[0]: row for row in rows_of(results)}
    assert [table[name][1] for name in results["settings"]] == ["4 of 4", "3 of 4", "0 of 4"]
    assert table["grpo"][4] is None and table["pnpo"][4].endswith("n = 3")
    assert table["gspo"][2:] == [None] * 5
    scores = [macro(final(run)) for run in results["runs"] if run["setting"] == "pnpo"]
    assert table["pnpo"][2].startswith(f"{100 * sum(scores) / 3:.1f} [")


def test_the_stored_results_alone_give_the_same_table_and_page(results, tmp_path):
    write_results(results, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert summary(stored) == summary(results)
    assert build_page(stored) == (tmp_path / "report.html").read_text() == build_page(results)
    text = (tmp_path / "results.md").read_text()
    assert text.startswith(markdown(headings(results), rows_of(results)))
    assert "| pnpo | +" in text and text.count("n = 3 |") == 3, "the table's own, and both ways round"


def test_the_page_fetches_nothing_and_names_what_failed(results):
    text = build_page(results | {"failed": {"pnpo, seed 3": "engine died"}})
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert "pnpo, seed 3: engine died" in text and text.count("<figure>") == 2


@pytest.mark.parametrize("study", ["arithmetic", "totals", "ablations"])
def test_the_evidence_page_holds_the_tables_of_the_stored_results(study):
    docs = Path(__file__).resolve().parents[3] / "docs"
    stored = json.loads((docs / "results" / f"{study}.json").read_text(encoding="utf-8"))
    page = (docs / "EVIDENCE.md").read_text(encoding="utf-8")
    assert markdown(headings(stored), rows_of(stored)) in page
    assert all(len(runs) == len(stored["seeds"]) for runs in grouped(stored).values())
