"""A rollout batch to mini-batches of whole groups, with each trained token's share of the loss."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from pnpo_megatron.algorithm.correction import Correction
from pnpo_megatron.algorithm.objective import Mean, loss_shares
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import MiniBatch, RolloutBatch, TrainSequence


def mini_batches(
    batch: RolloutBatch, groups_per_update: int, *, mean: Mean, seed: tuple[int | str, ...]
) -> list[MiniBatch]:
    """Cut a rollout batch into updates of whole groups, in an order drawn from `seed`.

    Args:
        batch: the frozen rollout batch; `batch.groups` says which sequences belong together.
        groups_per_update: groups per mini-batch; must divide the number of groups.
        mean: "response" or "token", of the objective; see `loss_shares`.
        seed: (seed, step, epoch); the same parts give the same order on every rank and on resume.

    Returns:
        Mini-batches; inside one, sequences stand in the drawn order of groups, and in a group in batch order.

    Raises:
        ConfigError: `groups_per_update` does not divide the number of groups.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.groups):
        members.setdefault(group, []).append(row)
    if groups_per_update < 1 or len(members) % groups_per_update:
        raise ConfigError(
            f"objective.mini_batch = {groups_per_update} does not divide the batch's {len(members)} groups; "
            f"use a divisor of {len(members)}"
        )
    generator = torch.Generator().manual_seed(derive_seed(*seed))
    names = sorted(members)
    order = [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]
    updates = []
    for start in range(0, len(order), groups_per_update):
        rows = [row for group in order[start : start + groups_per_update] for row in members[group]]
        sequences = tuple(batch.sequences[row] for row in rows)
        updates.append(MiniBatch(sequences, shares_of(sequences, mean), tuple(rows)))
    return updates


def corrected(batch: RolloutBatch, correction: Correction | None) -> RolloutBatch:
    """A scored batch with the factors that multiply its loss; as it is, without a correction."""
    if correction is None:
        return batch
    sequences = tuple(
        replace(one, correction=correction.factors(one.old_logprobs, one.rollout_logprobs, one.response_mask))
        for one in batch.sequences
        if one.old_logprobs is not None
    )
    return replace(batch, sequences=sequences)


def shares_of(sequences: Sequence[TrainSequence], mean: Mean) -> tuple[float, ...]:
    """Each sequence's `loss_shares`, from the mask that is trained on (TRAPS H15)."""
    lengths = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int64)
    return tuple(loss_shares(lengths, mean).tolist())
