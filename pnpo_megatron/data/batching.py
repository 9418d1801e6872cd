"""A rollout batch to mini-batches of whole groups, with each trained token's share of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import MiniBatch, RolloutBatch, TrainSequence


def mini_batches(
    batch: RolloutBatch, groups_per_update: int, *, mean: str, seed: tuple[int | str, ...]
) -> list[MiniBatch]:
    """Cut a rollout batch into updates of whole groups, in an order drawn from `seed`.

    Args:
        batch: the frozen rollout batch; `batch.groups` says which sequences belong together.
        groups_per_update: groups per mini-batch; must divide the number of groups.
        mean: "response" or "token", see `loss_shares`.
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
        updates.append(MiniBatch(sequences, loss_shares(sequences, mean), tuple(rows)))
    return updates


def loss_shares(sequences: Sequence[TrainSequence], mean: str) -> tuple[float, ...]:
    """Each sequence's weight per trained token, so that the mean over the mini-batch is a plain sum.

    Args:
        sequences: all sequences of the mini-batch, over all ranks.
        mean: "response": 1 / (L * B'), B' = sequences with a trained token. "token": 1 / (trained tokens).

    Returns:
        One share a sequence, 0 where nothing is trained; shares times lengths add up to 1.

    Raises:
        ConfigError: another `mean`.
    """
    lengths = [sequence.length for sequence in sequences]
    if mean == "response":
        responses = sum(length > 0 for length in lengths)
        return tuple(1.0 / (length * responses) if length else 0.0 for length in lengths)
    if mean == "token":
        tokens = sum(lengths)
        return tuple(1.0 / tokens if length else 0.0 for length in lengths)
    raise ConfigError(f'objective.mean = "{mean}": use "response" or "token"')
