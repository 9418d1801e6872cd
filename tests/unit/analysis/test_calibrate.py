"""Calibration on noise of known kind, against acceptance counted response by response from the definition."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from synthetic import counted_acceptance, dumped_by_hand, flat_arrays, noisy_mini_batch, noisy_responses

from pnpo_megatron.algorithm.weights import WEIGHTS, prefix_ratio
from pnpo_megatron.analysis.calibrate import Tokens, calibrate, excess, weighted_quantiles
from pnpo_megatron.analysis.calibrate_gate import (
    epoch_tokens,
    main,
    run_gate,
    step_dumps,
)
from pnpo_megatron.analysis.gate_model import acceptance_by_position, gate_width_in_sigmas
from pnpo_megatron.analysis.run_folder import read_run
from pnpo_megatron.analysis.token_dump import TokenDump, read_tokens, token_arrays, write_tokens
from pnpo_megatron.errors import ConfigError, DataError

LENGTHS = [40 + 20 * index for index in range(24)]
PNPO = {"weight": "prefix", "gate": "sqrt"}


def make_run(folder, *, sigma=0.05, centred=False, epochs=2, updates=2, lengths=LENGTHS, objective=""):
    """A run folder with token dumps whose noise grows with the epoch."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        json.dumps({"kind": "update", "step": 3, "epoch": 1, "update": 9}) + "\n"
    )
    (folder / "config.toml").write_text(f'[objective]\nname = "pnpo"\n{objective}')
    generator = torch.Generator().manual_seed(0)
    for update in range(epochs * updates):
        epoch = 1 + update // updates
        made = noisy_mini_batch(lengths, sigma=sigma * epoch / epochs, centred=centred, generator=generator)
        arrays = token_arrays(made[0], dumped_by_hand(*made, 7e-4, 9.5e-4))
        write_tokens(folder, step=3, epoch=epoch, update=9 + update, arrays=arrays)


def calibrated(groups, acceptance):
    dump = TokenDump(step=1, epoch=4, update=16, arrays=flat_arrays(groups))
    return calibrate(epoch_tokens([dump], PNPO)[0], acceptance)


def noise(count, lengths, sigma, centred, seed):
    generator = torch.Generator().manual_seed(seed)
    return [noisy_responses(count, n, sigma=sigma, centred=centred, generator=generator) for n in lengths]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("acceptance", [0.5, 0.95])
def test_the_wanted_acceptance_is_reached_within_a_point_whatever_the_mean_of_the_noise(centred, acceptance):
    lengths = (8, 16, 48)
    measured = noise(12_000, lengths, 0.3, centred, seed=0)
    found = calibrated(measured, acceptance)
    assert found.usable
    assert counted_acceptance(measured, found.gate_low, found.gate_high) == pytest.approx(
        acceptance, abs=1e-4
    )
    fresh = noise(12_000, lengths, 0.3, centred, seed=1)
    assert counted_acceptance(fresh, found.gate_low, found.gate_high) == pytest.approx(acceptance, abs=0.01)


def test_long_responses_with_unit_mean_ratios_reach_the_acceptance_that_a_sigma_rule_misses():
    # At L = 15,360 and sigma = 0.05 the drift of -sigma^2/2 is 3.1 spreads of the prefix mean.
    measured = noise(40, (15_360,), 0.05, False, seed=0)
    found = calibrated(measured, 0.95)
    assert counted_acceptance(measured, found.gate_low, found.gate_high) == pytest.approx(0.95, abs=1e-4)
    assert counted_acceptance(measured, 7e-4, 9.5e-4) < 0.6
    assert found.gate_low > 2 * 7e-4


def test_weights_recomputed_from_a_dump_are_those_of_each_response_alone():
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 7, 3, 20]
    made = noisy_mini_batch(lengths, sigma=0.3, centred=True, generator=generator)
    dump = TokenDump(1, 1, 1, token_arrays(made[0], dumped_by_hand(*made, 1.0, 1.0)))
    expected: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    for response in dump.log_ratio.split(lengths):
        ratios = response.tolist()
        for t, ratio in enumerate(ratios, start=1):
            prefix = math.fsum(ratios[:t])
            expected["token"].append(ratio)
            expected["cumulative"].append(prefix)
            expected["prefix"].append(prefix / t)
            expected["sequence"].append(math.fsum(ratios) / len(ratios))
            expected["minpro"].append(ratio + min(ratios[: t - 1], default=0.0))
    for name, weight in WEIGHTS.items():
        assert dump.recomputed(weight).tolist() == pytest.approx(expected[name], abs=1e-9), name
    torch.testing.assert_close(dump.log_weight, dump.recomputed(prefix_ratio), rtol=1e-6, atol=1e-9)


def test_quantiles_weigh_every_response_alike():
    # One response of 4 tokens with u = 1..4 and one of 1 token with u = 10: half of the weight lies at 10.
    values = torch.tensor([3.0, 1.0, 10.0, 4.0, 2.0], dtype=torch.float64)
    weights = torch.tensor([0.25, 0.25, 1.0, 0.25, 0.25], dtype=torch.float64)
    assert weighted_quantiles(values, weights, (0.1, 0.25, 0.5, 0.51, 1.0)) == [1.0, 2.0, 4.0, 10.0, 10.0]


def tokens_of(u, length=1):
    u = torch.as_tensor(u, dtype=torch.float64)
    ones = torch.full((len(u),), length)
    return Tokens(epoch=1, log_ratio=u, excess=u, position=ones, length=ones, advantages=u)


def test_a_side_that_is_not_positive_is_not_usable():
    found = calibrate(tokens_of(torch.linspace(-0.3, -0.1, 101)), 0.9)
    assert found.gate_high < 0 < found.gate_low
    assert not found.usable


def test_nan_weights_and_no_tokens_are_named():
    with pytest.raises(DataError, match="2 weights are NaN"):
        calibrate(tokens_of([0.1, math.nan, math.nan]), 0.9)
    with pytest.raises(DataError, match="no trained token"):
        calibrate(tokens_of([]), 0.9)


def test_the_gates_scale_follows_the_reference_length_and_the_flat_gate():
    log_weight, position = torch.tensor([0.1, 0.1]), torch.tensor([1, 4])
    expected = math.expm1(float(torch.tensor(0.1)))
    assert excess(log_weight, position, 4).tolist() == pytest.approx([expected / 2, expected])
    assert excess(log_weight, position, 16).tolist() == pytest.approx([expected / 4, expected / 2])
    assert excess(log_weight, position, 4, flat=True).tolist() == pytest.approx([expected, expected])


def test_a_run_with_a_clip_gate_is_calibrated_for_pnpos_weight(tmp_path):
    make_run(tmp_path / "run", epochs=1, updates=1)
    run = read_run(tmp_path / "run")
    pnpo = epoch_tokens(step_dumps(run, None), run_gate(run))
    (run.path / "config.toml").write_text('[objective]\nname = "grpo"\nclip_low = 0.1\n')
    assert run_gate(read_run(run.path)) == PNPO
    grpo = epoch_tokens(step_dumps(run, None), PNPO)
    assert calibrate(grpo[0], 0.9) == calibrate(pnpo[0], 0.9)


def run_command(run, *words):
    main([str(run), *words])


def test_the_command_prints_every_epoch_and_recommends_the_last(tmp_path, capsys):
    make_run(tmp_path / "run")
    run_command(tmp_path / "run", "--acceptance", "0.9")
    printed = capsys.readouterr().out
    run = read_run(tmp_path / "run")
    first, last = (calibrate(one, 0.9) for one in epoch_tokens(step_dumps(run, 3), run_gate(run)))
    assert first.gate_low < last.gate_low  # noise grows with the epoch
    assert f"gate_low = {last.gate_low:.4g}\ngate_high = {last.gate_high:.4g}" in printed
    for words in (f"{first.gate_low:.3e}", "0.9-1.0", "64-127", "A > 0", "A = 0", "A < 0"):
        assert words in printed


def test_the_command_says_when_no_positive_tolerance_exists(tmp_path, capsys):
    make_run(tmp_path / "run", epochs=1, updates=1, lengths=[4], sigma=0.0)
    run_command(tmp_path / "run")
    printed = capsys.readouterr().out
    assert "no positive tolerance reaches 0.95: gate_low would be" in printed
    assert "[objective]" not in printed


def test_the_printed_acceptance_of_the_runs_own_gate_equals_the_dumped_decisions(tmp_path, capsys):
    make_run(tmp_path / "run", epochs=1, updates=1)
    run_command(tmp_path / "run")
    arrays = read_tokens(tmp_path / "run")[0].arrays
    share = 1.0 / arrays["length"].double()
    kept = float((share * arrays["keep"]).sum() / share.sum())
    assert re.search(rf"^ +1 .* {100 * kept:.1f} %", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("words", "error", "match"), [
    (("--acceptance", "1.0"), ConfigError, "between 0 and 1"),
    (("--acceptance", "95"), ConfigError, "between 0 and 1"),
    (("--step", "4"), ConfigError, "there are 3"),
])  # fmt: skip
def test_unusable_arguments_are_named(tmp_path, words, error, match):
    make_run(tmp_path / "run", epochs=1, updates=1, lengths=[4])
    with pytest.raises(error, match=match):
        run_command(tmp_path / "run", *words)


def test_a_run_without_dumps_says_how_to_make_them(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="--dump-tokens STEP"):
        run_command(tmp_path)


def test_a_dump_of_another_version_is_refused(tmp_path):
    made = noisy_mini_batch([4, 2], sigma=0.1, centred=True, generator=torch.Generator().manual_seed(0))
    arrays = token_arrays(made[0], dumped_by_hand(*made, 1.0, 1.0))
    assert arrays["row"].tolist() == [0, 0, 0, 0, 1, 1]
    assert arrays["advantages"].tolist() == [1, 1, 1, 1, -1, -1]
    del arrays["row"]
    write_tokens(tmp_path, step=1, epoch=1, update=1, arrays=arrays)
    with pytest.raises(DataError, match="no array row"):
        read_tokens(tmp_path)


def test_the_model_of_the_gate_has_the_figures_of_a_unit_mean_ratio():
    paper = {"gate_low": 7e-4, "gate_high": 9.5e-4, "length": 15_360}
    kept = acceptance_by_position(**paper, sigma=0.05)
    assert kept[-1].item() == pytest.approx(0.086, abs=0.001)
    assert acceptance_by_position(**paper, sigma=0.0374)[-1].item() == pytest.approx(0.5, abs=0.002)
    assert acceptance_by_position(**paper, sigma=0.05, centred=True)[-1].item() == pytest.approx(
        0.949, abs=0.001
    )
    noise = -(0.05**2) / 2 + 0.05 * torch.randn(2000, 400, generator=torch.Generator().manual_seed(1))
    t = torch.arange(1, 401)
    weight, scale = (noise.double().cumsum(1) / t).exp(), (400 / t).sqrt()
    drawn = ((weight >= 1 - 5e-3 * scale) & (weight <= 1 + 6e-3 * scale)).double().mean(0)
    model = acceptance_by_position(gate_low=5e-3, gate_high=6e-3, length=400, sigma=0.05)
    assert (drawn - model).abs().max() < 5 * 0.5 / 2000**0.5


def test_the_gates_width_is_stated_in_spreads_of_the_prefix_mean():
    line = gate_width_in_sigmas(gate_low=7e-4, gate_high=9.5e-4, length=15_360)
    assert "1.74 / 2.35 spreads" in line  # 7e-4 * sqrt(15360) / 0.05
    assert "3.10 spreads" in line  # 0.05^2 / 2 * sqrt(15360) / 0.05
    assert "8.6 % at the end" in line
    assert "0.06 / 0.08 spreads" in gate_width_in_sigmas(gate_low=7e-4, gate_high=9.5e-4, length=16)
    shorter = gate_width_in_sigmas(gate_low=7e-4, gate_high=9.5e-4, length=16, reference_length=15_360)
    assert "1.74 / 2.35 spreads" in shorter
