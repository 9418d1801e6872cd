"""Plans depend on lengths only and fill ranks evenly; packed tensors keep every token in its sequence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from train_rows import sequence

from pnpo_megatron.data.packing import FlatTokens, flatten, label_index, pack
from pnpo_megatron.data.partition import Layout, plan_micro_batches
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.types import MiniBatch, PackedBatch, TrainSequence


def natural(chunk_lengths: Tensor) -> Tensor:
    return torch.arange(2 * int(chunk_lengths.sum()))


def zigzag(context_size: int, rank: int):
    """Slow and obvious: chunk r, then chunk 2C-1-r, of each sequence."""

    def slots(chunk_lengths: Tensor) -> Tensor:
        here, start = [], 0
        for chunk in chunk_lengths.tolist():
            for number in (rank, 2 * context_size - 1 - rank):
                here += range(start + number * chunk, start + (number + 1) * chunk)
            start += 2 * context_size * chunk
        return torch.tensor(here)

    return slots


def mini_batch(sequences: list[TrainSequence]) -> MiniBatch:
    shares = tuple(0.01 * (row + 1) for row in range(len(sequences)))
    return MiniBatch(tuple(sequences), shares, tuple(range(len(sequences))))


MASKS = [
    sequence(3, [True] * 4, seed=1, advantage=0.5),
    sequence(1, [True, False, True], seed=2, advantage=-2.0),  # a hole: a tool's output, say
    sequence(5, [True], seed=3, advantage=0.0),
    sequence(2, [False] * 3, seed=4),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_h37_every_rank_gets_as_many_micro_batches_within_budget_and_each_row_once(data_size, padded):
    """TRAPS H37: also with five long rows against five short ones, and with fewer rows than ranks."""
    draw = random.Random(0)
    cases = [[95] * 5 + [20] * 5, [7], [], [draw.randint(1, 100) for _ in range(97)], [51] * 40]
    for lengths in cases:
        layout = Layout(max_tokens=100, data_size=data_size, padded=padded)
        plan = plan_micro_batches(lengths, layout)
        assert len(plan) == data_size and len({len(rank) for rank in plan}) == 1
        assert sorted(row for rank in plan for rows in rank for row in rows) == list(range(len(lengths)))
        for rows in (rows for rank in plan for rows in rank if rows):
            sizes = [layout.pad(lengths[row]) for row in rows]
            assert (max(sizes) * len(sizes) if padded else sum(sizes)) <= 100


def test_packs_are_balanced_over_ranks_and_close_to_the_fewest_possible():
    draw = random.Random(1)
    lengths = [draw.randint(100, 8000) for _ in range(512)]
    layout = Layout(max_tokens=16384, data_size=8)
    plan = plan_micro_batches(lengths, layout)
    tokens = [sum(lengths[row] for rows in rank for row in rows) for rank in plan]
    assert max(tokens) / min(tokens) < 1.01
    fewest = -(-sum(lengths) // (8 * 16384))
    assert len(plan[0]) <= fewest + 1


def test_the_plan_depends_on_lengths_only_and_counts_round_up_for_virtual_pipelines():
    lengths = [5, 9, 30, 2, 17]
    layout = Layout(max_tokens=40, data_size=2, count_multiple=4)
    assert plan_micro_batches(lengths, layout) == plan_micro_batches(list(lengths), layout)
    assert len(plan_micro_batches(lengths, layout)[0]) == 4


def test_a_context_parallel_group_packs_c_times_the_budget_and_too_long_names_the_value_needed():
    assert len(plan_micro_batches([64] * 4, Layout(max_tokens=128, context_size=2))[0]) == 1
    with pytest.raises(ConfigError, match=r"max_tokens = 16 .* 61 tokens .*max_tokens = 32 or more"):
        plan_micro_batches([61, 3], Layout(max_tokens=16, context_size=2, tensor_size=2))


def read_back(packed: PackedBatch, flat: FlatTokens) -> list[tuple[int, ...]]:
    """Every trained slot as (row, place of its label, label, t, L), found without the packer's own index."""
    found, start = [], 0
    for row, chunk in zip(packed.rows, packed.chunk_lengths.tolist(), strict=True):
        for slot in range(start, start + 2 * chunk):
            if packed.response_mask[slot]:
                place = int(packed.position_ids[slot]) + 1
                numbers = packed.labels[slot], packed.position[slot], packed.length[slot]
                found.append((row, place, *map(int, numbers)))
                assert packed.tokens[slot] == flat.ids[flat.starts[row] + place - 1]
        start += 2 * chunk
    return found


@pytest.mark.parametrize("context_size", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_h13_labels_positions_and_lengths_are_those_of_each_sequence_alone(context_size, padded):
    """TRAPS H13: shifted on the whole sequence before the zigzag split; t and L count trained tokens."""
    batch = mini_batch(MASKS)
    flat = flatten(batch)
    layout = Layout(max_tokens=64, context_size=context_size, padded=padded)
    found: list[tuple[int, ...]] = []
    for rank in range(context_size):
        packed = pack(flat, (3, 0, 2, 1), layout, zigzag(context_size, rank))
        assert packed.chunk_lengths.sum() * 2 == len(packed.tokens)
        assert torch.equal(packed.cu_seqlens.diff(), (packed.chunk_lengths * 2 * context_size).int())
        found += read_back(packed, flat)
    wanted = []
    for row, one in enumerate(MASKS):
        places = one.response_mask.nonzero().flatten().tolist()
        wanted += [(row, place, int(one.ids[place]), t + 1, len(places)) for t, place in enumerate(places)]
    assert sorted(found) == sorted(wanted)


def test_values_sit_where_the_label_is_and_are_zero_elsewhere():
    batch = mini_batch(MASKS)
    flat = flatten(batch)
    packed = pack(flat, (0, 1, 2, 3), Layout(max_tokens=64), natural)
    index = label_index(packed, flat)[packed.response_mask]
    joined = torch.cat([one.old_logprobs for one in MASKS])
    assert torch.equal(packed.old_logprobs[packed.response_mask], joined[index])
    assert packed.advantages[packed.response_mask].tolist() == [0.5] * 4 + [-2.0] * 2 + [0.0]
    assert packed.loss_share[packed.response_mask].tolist() == pytest.approx([0.01] * 4 + [0.02] * 2 + [0.03])
    off = ~packed.response_mask
    for name in ("old_logprobs", "advantages", "loss_share"):
        assert not getattr(packed, name)[off].any()


def test_h10_nan_off_the_mask_never_reaches_a_micro_batch_and_nan_on_it_stays():
    """TRAPS H10."""
    old = MASKS[1].old_logprobs.clone()
    old[~MASKS[1].response_mask] = torch.nan
    old[-1] = torch.nan
    one = replace(MASKS[1], old_logprobs=old)
    packed = pack(flatten(mini_batch([one])), (0,), Layout(max_tokens=64), natural)
    assert MASKS[1].response_mask[-1] and packed.old_logprobs.isnan().sum() == 1


def test_a_rank_without_rows_gets_one_short_dummy_that_trains_nothing():
    packed = pack(flatten(mini_batch(MASKS)), (), Layout(max_tokens=64, context_size=2), zigzag(2, 0))
    assert packed.rows == (-1,) and packed.max_seqlen == 4 and len(packed.tokens) == 2
    assert not packed.response_mask.any() and not packed.loss_share.any()


def test_a_correction_reaches_its_token_whatever_the_split():
    """Advantage times factor over context-parallel ranks and packings: the same numbers as in the batch."""
    rows = [sequence(n, [True] * (3 * n), seed=n, advantage=n - 2.5) for n in (1, 2, 3)]
    rows = [replace(one, correction=1.0 + torch.arange(len(one.ids)) / 7) for one in rows]
    flat = flatten(mini_batch(rows))
    wanted = [one.advantage * float(factor) for one in rows for factor in one.correction[one.response_mask]]
    for context in (1, 2):
        for packing in ([[0, 1, 2]], [[1], [2, 0]]):
            found = []
            for part in packing:
                for rank in range(context):
                    packed = pack(flat, part, Layout(10**4, context_size=context), zigzag(context, rank))
                    found += packed.advantages[packed.response_mask].tolist()
            assert sorted(found) == pytest.approx(sorted(wanted))


def test_padding_and_waiting_stay_under_three_percent_on_a_heavy_tail():
    """512 log-normal lengths up to 15,360 (bench/packing.py has the table), over several splits."""
    draw = random.Random(1)
    lengths = [150 + min(15_360, max(16, round(draw.lognormvariate(7.8, 1.2)))) for _ in range(512)]
    for data, context, tensor in ((32, 1, 1), (16, 2, 1), (8, 2, 2), (4, 8, 1)):
        layout = Layout(16_384 // context, data, context, tensor)
        plan = plan_micro_batches(lengths, layout)
        loads = [[sum(layout.pad(lengths[row]) for row in rows) for rows in rank] for rank in plan]
        assert max(map(max, loads)) <= layout.capacity
        padded, fullest = sum(map(sum, loads)), max(map(sum, loads))
        assert 1 - sum(lengths) / padded < 0.03
        assert 1 - padded / (fullest * data) < 0.03
