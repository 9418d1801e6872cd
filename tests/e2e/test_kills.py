"""SIGKILL at seeded moments, again and again, and the run goes on each time: final weights bitwise those of a
run that nobody killed, the same metrics, and no rollout paid for twice but those in flight.

``-s`` prints the table of docs/resume.md.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from quick_runs import REPLAYED, Kill, Launch, run, same_run, write_rollouts
from tiny_task import make_task, write_config

pytestmark = pytest.mark.timeout(3600)
SAVE = "pnpo_megatron.policy.checkpoint_save"
PLACES = {
    "updating": "pnpo_megatron.policy.learner:MegatronLearner.update",
    "planning a save": f"{SAVE}:plan_save",
    "writing a checkpoint": f"{SAVE}:_write_bucket",
    "publishing a checkpoint": f"{SAVE}:write_manifest",
    "naming it the newest": "pnpo_megatron.checkpoints:publish",
    "exporting": "pnpo_megatron.run.training:export_step",
    "scoring old log-probs": "pnpo_megatron.policy.learner:MegatronLearner.log_probs",
}
ENGINE_PLACES = {
    "generating": "pnpo_megatron.run.batches:collect",
    "syncing": "pnpo_megatron.rollout.vllm_sampler:VllmSampler._send_weights",
    "evaluating": "pnpo_megatron.run.training:evaluate_step",
}
ON_RANK_ZERO = ("publishing", "naming", "exporting", *ENGINE_PLACES)
SAVING = ("--checkpoint.within_batch=1", "--checkpoint.every=1", "--checkpoint.keep=2")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("task"))
    write_rollouts(folder / "stored")
    return folder


def draw(seed: int, places: dict[str, str], ranks: int) -> list[tuple[str, Kill]]:
    """Moments: every place in turn, at its first or second time, at once or up to a quarter second later."""
    generator = random.Random(seed)
    names = [name for _ in range(8) for name in generator.sample(sorted(places), len(places))]
    kills = []
    for name in names:
        rank = 0 if name.startswith(ON_RANK_ZERO) else generator.randrange(ranks)
        delay = generator.choice([0.0, generator.uniform(0.0, 0.25)])
        kills.append((name, Kill(places[name], generator.choice([1, 2]), delay, rank)))
    return kills


def survive(
    context, task: Path, name: str, flags: tuple[str, ...], *, seed: int, kills: int, ranks: int = 1,
    places: dict[str, str] = PLACES,
) -> list[str]:  # fmt: skip
    """Kill a run `kills` times and compare it with one that was not; the rows of the table."""
    whole, folder, rows = task / f"{name}-whole", task / name, []
    codes, output = run(context, write_config(task, whole), *flags, ranks=ranks, patch="count_sampling:arm")
    assert codes == [0] * ranks, output
    config, landed = write_config(task, folder), 0
    for place, kill in draw(seed, places, ranks):
        launch = Launch(context, config, *flags, *SAVING, ranks=ranks, kill=kill, patch="count_sampling:arm")
        codes = launch.wait()
        if (
            codes == [0] * ranks
        ):  # it was done before its turn came: a fresh one for the moments that are left
            check(folder, whole, launch.output)
            shutil.rmtree(folder)
            continue
        assert codes[kill.rank] == -9 and all(code != 0 for code in codes), launch.output
        assert launch.spread_s < 30.0, f"{launch.spread_s} s until the last rank ended\n{launch.output}"
        landed += 1
        from_ = re.findall(r"resuming after (.*)", launch.output)
        begun = from_[0] if from_ else "the start"
        rows.append(f"| {name} | {place} | {kill.delay_s:.2f} s | {kill.rank} of {ranks} | {begun} |")
        if landed == kills:
            break
    assert landed == kills
    codes, output = run(context, config, *flags, *SAVING, ranks=ranks, patch="count_sampling:arm")
    assert codes == [0] * ranks, output
    check(folder, whole, output)
    sampled = (
        Counter((folder / "sampled").read_text().split()) if (folder / "sampled").exists() else Counter()
    )
    in_flight = sum(place in row for row in rows for place in ("generating", "scoring"))
    assert sum(sampled.values()) - len(sampled) <= in_flight, sampled
    print("", *rows, sep="\n")
    return rows


def check(folder: Path, whole: Path, output: str) -> None:
    same_run(folder, whole)
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.suffix]
    assert not left, f"{left} left behind\n{output}"
    for path in (whole / "rollouts").glob("*.jsonl"):
        assert (folder / "rollouts" / path.name).read_text() == path.read_text()


def replayed(task: Path) -> tuple[str, ...]:
    return (*REPLAYED, f"--rollout.replay={task / 'stored'}")


def test_h29_h30_six_kills(task, process_server):
    survive(process_server, task, "six", replayed(task), seed=1, kills=6)


@pytest.mark.slow
def test_sixteen_kills(task, process_server):
    survive(process_server, task, "one rank", replayed(task), seed=2, kills=16)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["data", "context"])
def test_eight_kills_of_one_of_two_ranks(task, process_server, split):
    flags = (*replayed(task), "--parallel.context=2") if split == "context" else replayed(task)
    name = {"data": "DP2", "context": "CP2"}[split]
    survive(process_server, task, name, flags, seed=3, kills=8, ranks=2)


@pytest.mark.slow
def test_eight_kills_with_the_engine(task, process_server):
    flags = ("--eval.every=2",)
    survive(process_server, task, "engine", flags, seed=4, kills=8, places=ENGINE_PLACES | PLACES)
