"""The values that flow through one rollout batch, and the two protocols the loop talks to.

Token arrays come in two alignments. *Response-aligned* arrays have one entry per response token.
*Label-aligned* arrays belong to packed micro-batches: slot j describes the token that slot j predicts,
so labels and masks are shifted once, on the whole sequence, before anything is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pnpo_megatron.reward_types import RewardInput as RewardInput  # defined there, without torch
from pnpo_megatron.reward_types import RewardResult as RewardResult

if TYPE_CHECKING:
    from pnpo_megatron.algorithm.objective import Objective


@dataclass(frozen=True)
class Prompt:
    """One problem, tokenised once; the same ids are sampled from, trained on and evaluated."""

    id: str
    token_ids: tuple[int, ...]
    answer: str
    text: str = ""
    """The rendered prompt, for people to read."""
    problem: str = ""
    """The last message as the file has it, before any template."""
    reasoning_open: bool = False
    """The template already opened ``<think>``: a response without ``</think>`` never reached an answer."""
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Every sampling value the engine may not fill in by itself (TRAPS H34)."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One response and its sampling record."""

    response_ids: Tensor
    """[L] int64; the stop token, if one was sampled, is the last entry."""
    rollout_logprobs: Tensor
    """[L] float32, nats, of the distribution sampled from (after temperature)."""
    finish_reason: str
    """``"stop"`` or ``"length"``."""
    sample: int
    """Index inside its group, 0..G-1."""
    seed: int
    version: int
    """Step of the weights that sampled it."""
    text: str = ""
    trained: Tensor | None = None
    """[L] bool, False on tokens that the policy did not write (a tool's answer in a conversation of several
    turns): they are read, but neither trained nor counted in t and L. None: all are the policy's."""
    routes: Tensor | None = None
    """[n - 1, layers, k] uint8 or int16: experts of every token of prompt and response but the last, which
    the engine never read; None if it did not tell."""

    @property
    def truncated(self) -> bool:
        """Cut off by the length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class RolloutGroup:
    """The G responses to one prompt; never split over mini-batches."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    def reward_inputs(self) -> list[RewardInput]:
        """What the reward of each response looks at."""
        prompt = self.prompt
        return [
            RewardInput(
                prompt.text, prompt.answer, one.text, one.finish_reason, prompt.reasoning_open, prompt.meta
            )
            for one in self.rollouts
        ]


Grade = Callable[[Sequence[RewardInput]], Callable[[], list[RewardResult]]]
"""Starts grading some responses and returns a function that waits for the results, in order."""


@dataclass(frozen=True)
class TrainSequence:
    """One response as the learner sees it: prompt and response joined. All [n], token-aligned."""

    ids: Tensor
    """[n] int64, prompt then response."""
    response_mask: Tensor
    """[n] bool, True on trained tokens; entry 0 is always False (nothing predicts it)."""
    rollout_logprobs: Tensor
    """[n] float32, 0 off the mask."""
    advantage: float
    old_logprobs: Tensor | None = None
    """[n] float32, 0 off the mask; set once, then frozen for all K epochs."""
    reference_logprobs: Tensor | None = None
    """[n] float32, of the run's first weights; None unless the loss looks at them."""
    correction: Tensor | None = None
    """[n] float32 factors of the loss (`Correction.factors`); None: all are 1."""
    routes: Tensor | None = None
    """[n, layers, k] uint8 or int16: experts that the sampler sent each token to, the learner does too."""

    @property
    def length(self) -> int:
        """L: tokens trained."""
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class SequenceRecord:
    """What a rollout file tells a person about one response."""

    prompt_id: str
    group: int
    sample: int
    seed: int
    version: int
    finish_reason: str
    reward: float | None
    truncated: bool
    text: str


@dataclass(frozen=True)
class RolloutBatch:
    """P groups sampled together, flat in group order; frozen once old log-probs are set."""

    step: int
    sequences: tuple[TrainSequence, ...]
    records: tuple[SequenceRecord, ...]
    groups: tuple[int, ...]
    """Group index of each sequence, 0..P-1: from ids, never from reshaping or prompt text (TRAPS H05)."""

    def with_old_logprobs(self, old_logprobs: Sequence[Tensor]) -> RolloutBatch:
        """The same batch with the ratio's denominators filled in, one [n] tensor a sequence."""
        pairs = zip(self.sequences, old_logprobs, strict=True)
        return replace(self, sequences=tuple(replace(one, old_logprobs=column) for one, column in pairs))

    def with_reference_logprobs(self, reference_logprobs: Sequence[Tensor]) -> RolloutBatch:
        """The same batch with what the run's first weights say, one [n] tensor a sequence."""
        pairs = zip(self.sequences, reference_logprobs, strict=True)
        return replace(
            self, sequences=tuple(replace(one, reference_logprobs=column) for one, column in pairs)
        )

    def with_routes(self, routes: Sequence[Tensor | None]) -> RolloutBatch:
        """The same batch with, or without, what the sampler said about experts."""
        pairs = zip(self.sequences, routes, strict=True)
        return replace(self, sequences=tuple(replace(one, routes=chosen) for one, chosen in pairs))


@dataclass(frozen=True)
class Counts:
    """Where a run stands between two updates, in numbers."""

    step: int = 0
    """Finished rollout batches."""
    update: int = 0
    """Updates made, taken or skipped: steps x K x M at the end."""
    made: int = 0
    """Those of them on the batch in work, or on the last one."""
    lag: int = 0
    """Those of `made` that were taken."""
    behind: int = 0
    """Updates taken on the batch before, if this one was sampled ahead of them."""
    not_finite: int = 0
    """Updates in a row, up to the last, whose loss or gradient was not finite."""

    def counts(self) -> dict[str, Any]:
        """These numbers alone, of what has more."""
        return {field.name: getattr(self, field.name) for field in fields(Counts)}


@dataclass(frozen=True)
class MiniBatch:
    """Whole groups for one optimizer update. Every rank holds the same one."""

    sequences: tuple[TrainSequence, ...]
    loss_share: tuple[float, ...]
    """Per sequence, of each of its trained tokens: 1/(L*B') or 1/(valid tokens); 0 where L is 0."""
    indices: tuple[int, ...]
    """Position of each sequence in the rollout batch."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on one context-parallel rank. [T] arrays are label-aligned and local to the rank:
    for each sequence chunk r, then chunk 2C-1-r (for C = 1 that is the natural order)."""

    tokens: Tensor
    """[T] int64."""
    labels: Tensor
    """[T] int64, the next token of the same sequence; 0 where there is none."""
    position_ids: Tensor
    """[T] int64, 0-based inside the sequence (rotary position)."""
    response_mask: Tensor
    """[T] bool: the label is a trained token."""
    position: Tensor
    """[T] int64: t of the label, 1..L, counted over trained tokens; 1 off the mask."""
    length: Tensor
    """[T] int64: L; 1 off the mask."""
    old_logprobs: Tensor
    """[T] float32; 0 off the mask, and 0 while old log-probs are being computed."""
    advantages: Tensor
    """[T] float32, times the correction; 0 off the mask."""
    loss_share: Tensor
    """[T] float32; 0 off the mask."""
    cu_seqlens: Tensor
    """[S+1] int32: cumulative padded lengths of the whole sequences, not divided by C."""
    chunk_lengths: Tensor
    """[S] int64: tokens of one zigzag chunk, padded length / (2C)."""
    max_seqlen: int
    """Longest padded whole sequence."""
    rows: tuple[int, ...]
    """[S] row in the mini-batch of each sequence; -1 for a dummy that keeps collectives in step."""


class Learner(Protocol):
    """The trained policy. Collective: every rank calls every method in the same order."""

    def log_probs(self, mini_batch: MiniBatch) -> list[Tensor]:
        """[n] float32 per sequence, token-aligned, complete on every rank, in the packing of `update`."""
        ...

    def reference_log_probs(self, mini_batch: MiniBatch) -> list[Tensor]:
        """The same of the weights that the run began with."""
        ...

    def update(self, mini_batch: MiniBatch, objective: Objective, *, step: int) -> dict[str, float]:
        """One optimizer step; its metrics, the same on every rank."""
        ...

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Full HF-named tensors, one by one, in layer order."""
        ...


class Sampler(Protocol):
    """Generates responses with the weights it was last sent."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, check the manifest, drop every cache. `version` is the step they belong to."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int | str, ...]
    ) -> Iterator[RolloutGroup]:
        """Finished groups as they finish, in any order; sample i of a prompt draws with
        ``derive_seed(*seed, prompt.id, i)``."""
        ...

    def close(self) -> None:
        """End the engine and everything it started."""
        ...


def token_aligned(values: Tensor, mask: Tensor) -> Tensor:
    """Spread [L] response-aligned values over the True entries of an [n] mask, 0 elsewhere."""
    spread = torch.zeros(mask.shape, dtype=values.dtype)
    spread[mask] = values
    return spread
