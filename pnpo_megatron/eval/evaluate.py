"""Score the sampler's current weights on benchmarks: Avg@k, with every problem graded exactly k times."""

from collections.abc import Sequence
from time import perf_counter

from pnpo_megatron.errors import ConfigError, RewardFaultError, RolloutError
from pnpo_megatron.eval.benchmarks import Benchmark
from pnpo_megatron.eval.progress import Progress
from pnpo_megatron.eval.results import BenchmarkResult, EvalResult, SampleResult
from pnpo_megatron.types import Grade, Prompt, RewardResult, Rollout, RolloutGroup, Sampler, Sampling

RIGHT_ABOVE = 0.5
"""A sample counts as right when its reward is above this; the maths grader gives 0 or 1."""


def evaluate(
    sampler: Sampler,
    benchmarks: Sequence[Benchmark],
    *,
    samples: int,
    sampling: Sampling,
    grade: Grade,
    seed: int,
    progress: Progress | None = None,
) -> EvalResult:
    """Sample every problem k times and grade while the rest still generates. Runs on one rank.

    Sample i of a problem draws with a seed made of (seed, benchmark, problem, i) alone (TRAPS H35): the same
    in every evaluation of a run, so that two checkpoints are compared on common random numbers.

    Args:
        samples: k, responses per problem.
        sampling: the evaluation's own values; training's temperature never enters.
        grade: `RewardPool.start`.
        progress: keeps responses as they come, and brings those of an attempt that was killed.

    Raises:
        ConfigError: no benchmark, two with one name, or k > 1 samples at temperature 0.
        RolloutError: the sampler did not return exactly k different draws of a problem (TRAPS H36).
        RewardFaultError: a sample could not be graded, twice.
    """
    check_request(benchmarks, samples, sampling)
    start = perf_counter()
    results = tuple(
        _run(sampler, benchmark, samples, sampling, grade, seed, progress) for benchmark in benchmarks
    )
    return EvalResult(results, seconds=perf_counter() - start)


def check_request(benchmarks: Sequence[Benchmark], samples: int, sampling: Sampling) -> None:
    """Refuse an evaluation that cannot mean anything, before an engine is started.

    Raises:
        ConfigError: naming the setting.
    """
    names = [benchmark.name for benchmark in benchmarks]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"eval.benchmarks = {names}: name at least one file, each with another file name")
    if samples < 1 or (samples > 1 and sampling.temperature <= 0):
        raise ConfigError(
            f"eval.samples = {samples} at eval.temperature = {sampling.temperature}: equal samples tell "
            "nothing; use samples = 1, or a temperature such as 0.7"
        )


def _run(
    sampler: Sampler,
    benchmark: Benchmark,
    k: int,
    sampling: Sampling,
    grade: Grade,
    seed: int,
    progress: Progress | None,
) -> BenchmarkResult:
    groups = progress.groups(benchmark) if progress is not None else {}
    waiting = {problem: grade(group.reward_inputs()) for problem, group in groups.items()}
    left = [problem for problem in benchmark.problems if problem.id not in groups]
    for group in sampler.generate(left, k, sampling, (seed, "eval", benchmark.name)) if left else ():
        _check_group(benchmark, group, k)
        if progress is not None:
            progress.add(benchmark.name, group)
        groups[group.prompt.id] = group
        waiting[group.prompt.id] = grade(group.reward_inputs())
    missing = [problem.id for problem in benchmark.problems if problem.id not in groups]
    if missing:
        raise RolloutError(
            f"{benchmark.name}: no responses came back for {len(missing)} of {len(benchmark.problems)} "
            f"problems, first {missing[0]!r}; the engine's log says why"
        )
    rows, faults = [], 0
    for problem in benchmark.problems:
        graded, repeated = _without_faults(benchmark, groups[problem.id], waiting[problem.id](), grade)
        faults += repeated
        ordered = sorted(
            zip(groups[problem.id].rollouts, graded, strict=True), key=lambda pair: pair[0].sample
        )
        rows.append(tuple(_sample(problem, rollout, result) for rollout, result in ordered))
    return BenchmarkResult(benchmark.name, k, tuple(rows), faults)


def _check_group(benchmark: Benchmark, group: RolloutGroup, k: int) -> None:
    indices = sorted(rollout.sample for rollout in group.rollouts)
    seeds = {rollout.seed for rollout in group.rollouts}
    if indices != list(range(k)) or len(seeds) != k:
        raise RolloutError(
            f"{benchmark.name}: problem {group.prompt.id!r} came back with samples {indices} from "
            f"{len(seeds)} different seeds; expected {k} of each. The engine lost or repeated requests: "
            "start it again"
        )


def _without_faults(
    benchmark: Benchmark, group: RolloutGroup, results: list[RewardResult], grade: Grade
) -> tuple[list[RewardResult], int]:
    """Faulted grades repeated once; a second fault ends the evaluation, since k - 1 grades are no Avg@k."""
    failed = [index for index, result in enumerate(results) if result.value is None]
    if not failed:
        return results, 0
    inputs = group.reward_inputs()
    for index, again in zip(failed, grade([inputs[index] for index in failed])(), strict=True):
        if again.value is None:
            raise RewardFaultError(
                f"{benchmark.name}: sample {group.rollouts[index].sample} of problem {group.prompt.id!r} "
                f"could not be graded, twice: {again.fault}"
            )
        results[index] = again
    return results, len(failed)


def _sample(problem: Prompt, rollout: Rollout, result: RewardResult) -> SampleResult:
    assert result.value is not None  # faults are gone by now
    return SampleResult(
        problem=problem.id,
        sample=rollout.sample,
        seed=rollout.seed,
        version=rollout.version,
        correct=result.value > RIGHT_ABOVE,
        reward=result.value,
        answer=result.answer,
        finish_reason=rollout.finish_reason,
        ids=tuple(rollout.response_ids.tolist()),
        timed_out=result.timed_out,
        text=rollout.text,
    )
