"""MegatronLearner: scores, updates and exports the policy, whatever the split."""

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config
from torch import Tensor

from pnpo_megatron.algorithm.diagnostics import Tally, renormalised, skip_reason, summarise, tally
from pnpo_megatron.algorithm.objective import Objective, policy_loss
from pnpo_megatron.algorithm.regularise import regulariser
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.stream import export_hf
from pnpo_megatron.data.partition import Layout
from pnpo_megatron.errors import ConfigError, TrainingFaultError
from pnpo_megatron.parallel.gather import gather_first_dim
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.prefix_scan import ratio_stats
from pnpo_megatron.parallel.reduce import max_over
from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs
from pnpo_megatron.policy.first_weights import FirstWeights
from pnpo_megatron.policy.forward import MicroBatch, Work, cut, layout_of, run_schedule
from pnpo_megatron.policy.gradient_memory import FirstEpochGradient
from pnpo_megatron.policy.loss_scale import loss_scale
from pnpo_megatron.policy.model import output_weight
from pnpo_megatron.policy.optimizer import (
    OptimizerSettings,
    apply_gradient,
    gradient_norm,
    make_optimizer,
    set_learning_rate,
    wrap_data_parallel,
)
from pnpo_megatron.policy.results import weight_quantiles, whole_sequences, whole_tally
from pnpo_megatron.policy.routing import Routing
from pnpo_megatron.types import MiniBatch

SKIP_REASONS = (
    "",
    "no valid token",
    "every advantage is 0",
    "every token with an advantage is rejected",
    "loss is not finite",
    "gradient is not finite",
)
"""`update/skip_reason` is an index into it (DECISIONS: an update is skipped)."""
_NOT_FINITE = (4, 5)

DUMPED = ("policy_logprobs", "log_weight", "keep")
TokenDump = Callable[[MiniBatch, Mapping[str, list[Tensor]]], None]
"""Receives `DUMPED`, float32, per sequence, [n], token-aligned; keep is 0 or 1."""


@dataclass(frozen=True)
class LearnerSettings:
    """How micro-batches are made and scored."""

    temperature: float = 1.0
    """What the rollouts were sampled with: all log-probs are of logits / temperature (TRAPS H12)."""
    max_tokens: int = 16384
    padded: bool = False
    logprob_chunk: int = 1024
    """Tokens that go through the output layer at once."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    """Both of `regulariser`."""
    moe_bias_rate: float = 0.0
    """Of `Routing.balance`, after every update that is taken."""
    gradient_cosine: bool = False
    """Compare later epochs' gradients with the first's; holds one more gradient."""

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigError(
                f"rollout.temperature = {self.temperature}: ratios need a distribution; use a value above 0"
            )


class MegatronLearner:
    """The trained policy on Megatron-Core. Collective: every rank calls every method in the same order."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        arch: Architecture,
        groups: ParallelGroups,
        optimizer: OptimizerSettings,
        settings: LearnerSettings,
    ) -> None:
        """Wrap loaded model chunks (one per virtual pipeline stage) for training."""
        self.arch, self.groups, self.settings, self.optimizer_settings = arch, groups, settings, optimizer
        self.chunks: list[DistributedDataParallel] = wrap_data_parallel(chunks, optimizer)
        self.optimizer: MegatronOptimizer = make_optimizer(self.chunks, optimizer)
        self.config: Any = get_model_config(self.chunks[0])
        self.device: torch.device = next(self.chunks[0].parameters()).device
        self.first_epoch = FirstEpochGradient(self.optimizer) if settings.gradient_cosine else None
        self.first_weights = FirstWeights(self.chunks) if settings.kl_coef else None
        self.token_dump: TokenDump | None = None
        """Set it to see every token of the updates that follow."""
        self.routing = Routing(
            self.chunks,
            groups,
            layers=arch.layers,
            experts=arch.experts,
            split=self.config.sequence_parallel,
            replay=self.config.moe_enable_routing_replay,
        )
        for chunk in self.chunks:
            chunk.train()

    @property
    def layout(self) -> Layout:
        """The packing of every mini-batch, for scoring and for training."""
        settings = self.settings
        return layout_of(
            self.groups,
            max_tokens=settings.max_tokens,
            padded=settings.padded,
            virtual_stages=len(self.chunks),
        )

    def log_probs(self, mini_batch: MiniBatch) -> list[Tensor]:
        """Log-probs of the policy now, at temperature T, in exactly the packing and modules of `update`.

        Returns:
            [n] float32 per sequence on the host, token-aligned, 0 off the mask, complete on every rank.
            Communication: one all-reduce of all tokens over data x context ranks, one over pipeline stages.
        """
        work = cut(mini_batch, self.layout, self.groups, self.device)
        self.routing.record(mini_batch)
        found = self._scored(work)
        self.routing.keep(mini_batch, work.flat)
        return found

    def reference_log_probs(self, mini_batch: MiniBatch) -> list[Tensor]:
        """`log_probs` of the weights that the run began with, whose routers choose freely."""
        assert self.first_weights is not None, "kl_coef is 0"
        self.finish_parameter_gather()
        with self.first_weights.in_force():
            return self._scored(cut(mini_batch, self.layout, self.groups, self.device))

    def update(self, mini_batch: MiniBatch, objective: Objective, *, step: int) -> dict[str, float]:
        """One optimizer step on Eq. 11, or none if there is nothing to learn from (DECISIONS).

        Args:
            mini_batch: with old log-probs set; every rank holds the same one.
            objective: weight and gate are computed anew here.
            step: rollout batch, from 1; sets the learning rate.

        Returns:
            Metrics, the same on every rank. `update/skip_reason` indexes `SKIP_REASONS`.
        """
        begin = perf_counter()
        work = cut(mini_batch, self.layout, self.groups, self.device)
        rate = set_learning_rate(self.optimizer, self.optimizer_settings, step)
        idle = _nothing_to_learn(mini_batch)
        total, spread = self._forward_backward(work, mini_batch, objective, forward_only=idle)
        norm = 0.0 if idle else gradient_norm(self.optimizer)
        cosine = self.first_epoch.compare(mini_batch.indices, step, norm) if self.first_epoch else {}
        reason = self._agree(skip_reason(total), norm)
        if not reason:
            apply_gradient(self.optimizer, self.optimizer_settings.clip_grad, norm)
            self.routing.balance(self.settings.moe_bias_rate)
        seconds = perf_counter() - begin
        return {
            **summarise(total),
            **spread,
            **self.routing.metrics(),
            "grad_norm": norm,
            **cosine,
            "lr": rate,
            "update/skipped": float(reason != 0),
            "update/skip_reason": float(reason),
            "update/not_finite": float(reason in _NOT_FINITE),
            "time/update_s": seconds,
            "tokens/per_second": len(work.flat.ids) / seconds,
            "memory/peak_bytes": float(_peak_bytes()),
        }

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Full HF-named tensors, one by one, in layer order; every rank must read to the end."""
        self.finish_parameter_gather()
        return export_hf(self.chunks, self.arch, self.groups)

    def finish_parameter_gather(self) -> None:
        """Wait for what `overlap_param_gather` still has on the way; call it before reading parameters."""
        if self.optimizer_settings.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _scored(self, work: Work) -> list[Tensor]:
        def last_stage(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            logprobs, _ = self._score(hidden, micro_batch)
            return logprobs.new_zeros(()), torch.zeros((), dtype=torch.int), (micro_batch, logprobs)

        results = run_schedule(self.chunks, work, self.groups, last_stage, self.routing, forward_only=True)
        return whole_sequences(work, results, self.groups, self.device)

    def _score(self, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy, [n] float32, of a micro-batch's trained tokens, on the last stage."""
        states = hidden.squeeze(0)
        sequence_parallel = self.config.sequence_parallel
        if sequence_parallel:
            states = gather_first_dim(states, self.groups.tp)
        return chunked_logprobs(
            states.index_select(0, micro_batch.slots),
            output_weight(self.chunks[-1]),
            micro_batch.packed.labels.index_select(0, micro_batch.slots),
            temperature=self.settings.temperature,
            vocab_size=self.arch.vocab,
            tp_group=self.groups.tp,
            chunk_tokens=self.settings.logprob_chunk,
            partial_hidden_grad=sequence_parallel,
        )

    def _forward_backward(
        self, work: Work, mini_batch: MiniBatch, objective: Objective, *, forward_only: bool
    ) -> tuple[Tally, dict[str, float]]:
        """Leaves summed gradients in Megatron's buffers.

        Returns:
            The tally of the whole mini-batch, on the host, and quantiles of its weights.
        """
        scale = loss_scale(self.config, list(work.all_tokens), cp_rank=self.groups.cp_rank)
        dumped: dict[str, list[tuple[MicroBatch, Tensor]]] = {name: [] for name in DUMPED}
        reference = _reference(mini_batch).to(self.device) if self.settings.kl_coef else None

        def last_stage(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            packed = micro_batch.packed
            logprobs, entropy = self._score(hidden, micro_batch)
            policy = micro_batch.spread(logprobs)
            stats = ratio_stats(
                policy,
                packed.old_logprobs,
                packed.response_mask,
                packed.position,
                packed.length,
                packed.chunk_lengths,
                self.groups.cp,
            )
            loss, terms = policy_loss(objective, policy, stats, packed.advantages, packed.loss_share)
            if self.settings.kl_coef or self.settings.entropy_coef:
                loss = loss + self._regulariser(logprobs, entropy, micro_batch, reference)
            if self.token_dump is not None:
                at = micro_batch.slots
                columns = logprobs.detach(), terms.log_weight[at], terms.keep[at]
                for name, column in zip(DUMPED, columns, strict=True):
                    dumped[name].append((micro_batch, column))
            counted = tally(
                loss,
                stats,
                terms,
                mask=packed.response_mask,
                advantages=packed.advantages,
                entropy=entropy,
            )
            log_weights = terms.log_weight.index_select(0, micro_batch.slots)
            return *scale(loss, len(packed.tokens)), (counted, log_weights)

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.routing.use(mini_batch)
        results = run_schedule(
            self.chunks, work, self.groups, last_stage, self.routing, forward_only=forward_only
        )
        self.routing.release()
        if self.token_dump is not None:
            whole = {
                name: whole_sequences(work, parts, self.groups, self.device) for name, parts in dumped.items()
            }
            self.token_dump(mini_batch, whole)
        spread = weight_quantiles([weights for _, weights in results], self.groups, self.device)
        total = whole_tally([counted for counted, _ in results], self.groups, self.device)
        if objective.renormalise:
            factor, total = renormalised(total, objective.mean)
            for chunk in self.chunks:
                chunk.scale_gradients(factor)
        return total, spread

    def _regulariser(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: MicroBatch, reference: Tensor | None
    ) -> Tensor:
        return regulariser(
            logprobs,
            entropy,
            None if reference is None else reference[micro_batch.places],
            micro_batch.packed.loss_share[micro_batch.slots],
            kl_coef=self.settings.kl_coef,
            entropy_coef=self.settings.entropy_coef,
        )

    def _agree(self, reason: str, norm: float) -> int:
        """Index of the reason to skip, 0 to step; the same on every rank (GPU.md 13)."""
        code = SKIP_REASONS.index(reason)
        if not (code or math.isfinite(norm)):
            code = SKIP_REASONS.index("gradient is not finite")
        agreed = torch.tensor(code, dtype=torch.int64, device=self.device)
        return int(max_over(agreed, self.groups.world))


def _nothing_to_learn(mini_batch: MiniBatch) -> bool:
    """Whether no trained token has an advantage: known beforehand, so no backward pass is needed."""
    pairs = zip(mini_batch.sequences, mini_batch.loss_share, strict=True)
    return not any(one.advantage != 0.0 and share > 0.0 for one, share in pairs)


def _reference(mini_batch: MiniBatch) -> Tensor:
    """[N] log-probs of the first weights, the sequences end to end as in `FlatTokens`."""
    found = [one.reference_logprobs for one in mini_batch.sequences if one.reference_logprobs is not None]
    if len(found) < len(mini_batch.sequences):
        raise TrainingFaultError(
            "objective.kl_coef: this batch was scored without the first weights; go on from a checkpoint "
            "between two batches (--from), or with kl_coef = 0"
        )
    return torch.cat(found)


def _peak_bytes() -> int:
    """Most memory ever held: by tensors on the GPU, or by the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
