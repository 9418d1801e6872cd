"""What the ranks of the matrix do: run a layout's updates and measure how far they are from the answers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from learner_parts import make_learner, share
from matrix_cases import OBJECTIVES, TOLERANCE, Case, Fixture
from matrix_reference import Answer
from torch import Tensor

from pnpo_megatron.algorithm.presets import make_objective

MACHINE = {"lr", "time/update_s", "tokens/per_second", "memory/peak_bytes"}
SKIPS = {"update/skipped", "update/skip_reason", "update/not_finite"}
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Run:
    """One update of a layout."""

    objective: str
    padded: bool
    sequences: float
    """Longest sequences that fit a micro-batch: 1, 2 or all."""


ALL = 1000.0
FULL = [Run(name, padded, size) for padded in (False, True) for size in (1, 2, ALL) for name in OBJECTIVES]
FAST = [run for run in FULL if run.sequences == (1 if run.padded else 2) or run.objective == "pnpo"]
FEW = [Run("pnpo", False, 1), Run("pnpo", True, 2), Run("minpro", False, ALL)]


@dataclass
class Update:
    """What one update gave."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    """Whole, under Hugging Face names."""
    tokens: dict[str, list[Tensor]]
    """What `--dump-tokens` writes, [n] per sequence."""
    micro_batches: int
    """On this rank."""


@dataclass
class Difference:
    """How far one update is from the answer, by the measures of DECISIONS."""

    loss: float
    """|difference| / sum |share * coefficient * logp|"""
    norm: float
    """Relative."""
    gradients: dict[str, float]
    """Norm of difference / norm of reference, by tensor."""
    metrics: dict[str, float]
    """|difference| / max(1, |reference|)"""
    tokens: dict[str, float]
    """The same of every token: log-prob, log-weight, gate."""
    between: float = 0.0
    """Of gradients, to the same layout's first update of this objective."""
    micro_batches: int = 0

    @property
    def gradient(self) -> float:
        return max(self.gradients.values())

    def red(self, tolerance: float = TOLERANCE) -> list[str]:
        """What is out of tolerance; a NaN is."""
        parts = {"loss": self.loss, "grad_norm": self.norm, "between sizes": self.between}
        return [
            name
            for name, value in {**parts, **self.metrics, **self.tokens, **self.gradients}.items()
            if not value < tolerance
        ]


@dataclass
class Outcome:
    """All updates of one layout on one rank."""

    differences: dict[Run, Difference] = field(default_factory=dict)
    seconds: float = 0.0

    def red(self) -> dict[Run, list[str]]:
        return {run: names for run, one in self.differences.items() if (names := one.red())}


def learner_of(case: Case, fixture: Fixture, **settings: Any) -> Any:
    from pnpo_megatron.policy.optimizer import OptimizerSettings
    from pnpo_megatron.policy.process_groups import ParallelSettings

    optimizer = {"lr": 0.0, "warmup_steps": 0, "clip_grad": 0.0, "distributed": False, **case.optimizer}
    return make_learner(
        fixture.folder,
        ParallelSettings(**case.sizes),
        optimizer=OptimizerSettings(**optimizer),
        recompute=case.recompute,
        megatron=case.megatron,
        max_tokens=1,
        **settings,
    )


def run_cases(cases: Mapping[str, Case], stored: bytes, runs: list[Run]) -> dict[str, Outcome]:
    """Layout after layout on the same processes; `stored` is the pickled fixtures by model."""
    fixtures: dict[str, Fixture] = pickle.loads(stored)
    return {name: run_case(case, fixtures[case.model], runs) for name, case in cases.items()}


def run_case(case: Case, fixture: Fixture, runs: list[Run]) -> Outcome:
    begin, outcome = perf_counter(), Outcome()
    learner = learner_of(case, fixture)
    idle_update(learner, fixture)  # skipped, so it must leave nothing behind
    first: dict[str, dict[str, Tensor]] = {}
    for run in runs:
        update, answer = one_update(learner, fixture, run), fixture.answers[run.objective]
        difference = difference_of(update, answer)
        earlier = first.setdefault(run.objective, update.gradients)
        difference.between = max(distances(update.gradients, earlier, answer).values())
        outcome.differences[run] = difference
    outcome.seconds = perf_counter() - begin
    return outcome


def one_update(learner: Any, fixture: Fixture, run: Run) -> Update:
    """One update, which moves nothing: the rate is 0."""
    objective = make_objective(run.objective, **OBJECTIVES[run.objective])
    longest = max(len(one.ids) for one in fixture.sequences)
    fits = learner.layout.pad(longest) // learner.groups.cp_size
    learner.settings = replace(learner.settings, padded=run.padded, max_tokens=int(run.sequences * fits))
    mini_batch = share(fixture.sequences, objective.mean)
    tokens: dict[str, list[Tensor]] = {}
    learner.token_dump = lambda _, dumped: tokens.update(dumped)
    metrics = learner.update(mini_batch, objective, step=1)
    return Update(metrics, whole_gradients(learner), tokens, micro_batches(learner, fixture))


def idle_update(learner: Any, fixture: Fixture) -> None:
    """An update without any advantage."""
    sequences = [replace(one, advantage=0.0) for one in fixture.sequences]
    learner.settings = replace(learner.settings, max_tokens=1000)
    metrics = learner.update(share(sequences, "response"), make_objective("pnpo"), step=1)
    if metrics["update/skipped"] != 1.0:
        raise AssertionError("an update without any advantage was not skipped")


def micro_batches(learner: Any, fixture: Fixture) -> int:
    from pnpo_megatron.data.partition import plan_micro_batches

    return len(plan_micro_batches([len(one.ids) for one in fixture.sequences], learner.layout)[0])


def whole_gradients(learner: Any) -> dict[str, Tensor]:
    """Summed gradients under Hugging Face names, gathered by sending them where weights would be sent.

    A tied model's second table, which is not exported, is looked at on the rank that has it.
    """
    from megatron.core import parallel_state

    from pnpo_megatron.convert.stream import tied_copy

    if learner.optimizer_settings.distributed:
        gather_shards(learner)
    parameters = [one for chunk in learner.chunks for one in chunk.parameters()]
    weights = [one.detach().clone() for one in parameters]
    for one in parameters:
        one.data.copy_(one.main_grad)
    found = {name: tensor.clone() for name, tensor in learner.export_hf()}
    for one, weight in zip(parameters, weights, strict=True):
        one.data.copy_(weight)
    copy = tied_copy(learner.chunks, learner.arch)
    if copy is not None:
        parts = [torch.empty_like(copy.main_grad) for _ in range(learner.groups.tp_size)]
        dist.all_gather(
            parts, copy.main_grad.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
        )
        found[f"{EMBEDDING} copy"] = torch.cat(parts)[: learner.arch.vocab]
    return found


def gather_shards(learner: Any) -> None:
    """Fill up the gradient buffers, of which the distributed optimizer has reduced only a rank's own part."""
    for buffer in buffers(learner):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
            dist.all_gather_single(bucket.grad_data, shard, group=group)


def buffers(learner: Any) -> Iterator[Any]:
    for chunk in learner.chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def distances(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], answer: Answer) -> dict[str, float]:
    """Norm of difference / norm of the reference, by tensor."""
    extra = f"{EMBEDDING} copy"
    names = found.keys() - {extra}
    if names != answer.gradients.keys():
        raise AssertionError(f"other tensors: {sorted(names ^ answer.gradients.keys())}")
    return {
        name: float((one.double() - wanted[name.removesuffix(" copy")].double()).norm())
        / float(answer.gradients[name.removesuffix(" copy")].norm())
        for name, one in found.items()
    }


def difference_of(update: Update, answer: Answer) -> Difference:
    # Loads of experts are compared in test_routing.py.
    metrics = {name: value for name, value in update.metrics.items() if not name.startswith("moe/")}
    expected = answer.metrics | dict.fromkeys(SKIPS, 0.0)
    if metrics.keys() - MACHINE != expected.keys():
        raise AssertionError(f"other metrics: {sorted((metrics.keys() - MACHINE) ^ expected.keys())}")
    others = expected.keys() - {"loss", "grad_norm"}
    return Difference(
        loss=abs(metrics["loss"] - answer.loss) / answer.scale,
        norm=abs(metrics["grad_norm"] - answer.norm) / answer.norm,
        gradients=distances(update.gradients, answer.gradients, answer),
        metrics={
            name: abs(metrics[name] - expected[name]) / max(1.0, abs(expected[name])) for name in others
        },
        tokens={name: _furthest(update.tokens[name], wanted) for name, wanted in answer.tokens.items()},
        micro_batches=update.micro_batches,
    )


def _furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    here, there = torch.cat(found).double(), torch.cat(wanted)
    return float(((here - there).abs() / there.abs().clamp(min=1.0)).max())
