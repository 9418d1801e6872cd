"""Every ablation against the naive formulas: padded, packed, and cut into micro-batches."""

from __future__ import annotations

import pytest
import torch
from ablation_reference import ABLATIONS, slopes
from naive_reference import random_responses

from pnpo_megatron.algorithm import (
    loss_shares,
    make_objective,
    packed_ratio_stats,
    policy_loss,
    policy_loss_padded,
)
from pnpo_megatron.algorithm.diagnostics import add_tallies, renormalised, summarise, tally
from pnpo_megatron.errors import ConfigError

ROWS, WIDTH = 9, 26


def mini_batch(dtype=torch.float64):
    policy, old, mask = random_responses(ROWS, WIDTH, scale=0.08, seed=3, dtype=dtype)
    mask[4] = False
    policy[7] += 0.5 * mask[7]  # wholly rejected, so not among the responses of a renormalised mean
    mask[8, :] = True
    advantages = torch.randn(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return policy, old, mask, advantages


def wanted(policy, old, mask, advantages, how):
    rows = [row for row in range(ROWS) if mask[row].any()]
    batch = [((policy - old).double()[row][mask[row]].tolist(), float(advantages[row])) for row in rows]
    result = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, slope in zip(rows, slopes(batch, how), strict=True):
        result[row, mask[row]] = torch.tensor(slope, dtype=torch.float64)
    return result


@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.parametrize("soiled", [False, True])
def test_padded_gradient_and_loss_are_the_naive_ones_and_nothing_off_the_mask_matters(name, soiled):
    policy, old, mask, advantages = mini_batch()
    expected = wanted(policy, old, mask, advantages, ABLATIONS[name])
    value = float((expected * policy).sum())
    if soiled:
        policy, old = (values.masked_fill(~mask, torch.nan) for values in (policy, old))
    policy.requires_grad_()
    loss = policy_loss_padded("pnpo", policy, old, advantages, mask, **ABLATIONS[name])
    loss.backward()
    torch.testing.assert_close(policy.grad, expected, rtol=1e-8, atol=1e-12)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_packed_micro_batches_add_up_to_the_gradient_and_loss_of_the_whole(name, pieces):
    policy, old, mask, advantages = mini_batch()
    objective = make_objective("pnpo", **ABLATIONS[name])
    share = loss_shares(mask.sum(-1), objective.mean)
    policy.requires_grad_()
    tallies = []
    for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(pieces)).tensor_split(pieces):
        spread = [torch.where(mask[rows], x[rows, None], 0.0).flatten() for x in (advantages, share)]
        flat = [x[rows].flatten() for x in (policy, old, mask)]
        stats = packed_ratio_stats(*flat, torch.arange(0, len(rows) * WIDTH + 1, WIDTH))
        loss, terms = policy_loss(objective, flat[0], stats, *spread)
        loss.backward()
        zeros = torch.zeros_like(flat[0].detach())
        tallies.append(tally(loss, stats, terms, mask=flat[2], advantages=spread[0], entropy=zeros))
    total, factor = add_tallies(tallies), 1.0
    if objective.renormalise:
        factor, total = renormalised(total, objective.mean)
        assert factor > 1.05
    expected = wanted(policy.detach(), old, mask, advantages, ABLATIONS[name])
    torch.testing.assert_close(policy.grad * factor, expected, rtol=1e-8, atol=1e-12)
    assert summarise(total)["loss"] == pytest.approx(float((expected * policy.detach()).sum()), rel=1e-8)


def test_every_ablation_changes_the_gradient():
    batch = mini_batch()
    paper = wanted(*batch, ABLATIONS["flat gate"] | {"gate": "sqrt"})
    for name, how in ABLATIONS.items():
        assert (wanted(*batch, how) - paper).norm() > 0.02 * paper.norm(), name


def test_renormalising_what_rejects_nothing_changes_nothing_and_all_rejected_gives_zero():
    policy, old, mask, advantages = mini_batch(torch.float32)
    plain, renormalising = (
        policy_loss_padded("pnpo", policy, old, advantages, mask, gate="none", renormalise=on)
        for on in (False, True)
    )
    assert plain == renormalising != 0.0
    nothing = policy_loss_padded(
        "pnpo", policy + 1, old, advantages, mask, gate_low=0.1, gate_high=0.1, renormalise=True
    )
    assert nothing == 0.0


def test_tempering_ends_at_the_cumulative_ratio_and_at_pnpo():
    policy, old, mask, advantages = mini_batch()
    batch = (policy, old, advantages, mask)
    for alpha, weight in ((0.0, "cumulative"), (1.0, "prefix")):
        tempered = policy_loss_padded("pnpo", *batch, weight="tempered", alpha=alpha, gate="none")
        assert tempered == policy_loss_padded("pnpo", *batch, weight=weight, gate="none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": "tempered"}, "objective.alpha = None.*needs one"),
        ({"alpha": 0.5}, "objective.alpha = 0.5.*Here weight = 'prefix'"),
        ({"weight": "tempered", "alpha": 1.5}, "objective.alpha = 1.5"),
        ({"score": "suffix"}, "objective.score = 'suffix': expected token or prefix"),
    ],
)
def test_an_ablation_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_objective("pnpo", **settings)
