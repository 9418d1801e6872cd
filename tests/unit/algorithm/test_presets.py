import pytest

from pnpo_megatron.algorithm import make_objective, objective_settings
from pnpo_megatron.algorithm.weights import WEIGHTS
from pnpo_megatron.errors import ConfigError


def test_presets_are_those_of_the_paper():
    assert objective_settings("pnpo") == {
        "name": "pnpo", "weight": "prefix", "gate": "sqrt", "mean": "response",
        "gate_low": 7e-4, "gate_high": 9.5e-4,
    }  # fmt: skip
    assert objective_settings("gspo") == {
        "name": "gspo", "weight": "sequence", "gate": "clip", "mean": "response",
        "clip_low": 3e-4, "clip_high": 4e-4,
    }  # fmt: skip
    grpo = {"gate": "clip", "mean": "token", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    assert objective_settings("grpo") == {"name": "grpo", "weight": "token", **grpo}
    assert objective_settings("cumulative") == {"name": "cumulative", "weight": "cumulative", **grpo}
    assert objective_settings("minpro") == {"name": "minpro", "weight": "minpro", **grpo}
    assert objective_settings() == objective_settings("pnpo")


def test_a_single_key_overrides_the_preset_and_none_means_not_given():
    changed = objective_settings("pnpo", weight="sequence", gate_high=0.5, gate_low=None, mean="token")
    assert changed == objective_settings("pnpo") | {"weight": "sequence", "gate_high": 0.5, "mean": "token"}
    assert objective_settings("pnpo", gate_reference_length=100)["gate_reference_length"] == 100


def test_another_gate_drops_the_tolerances_of_the_preset_gate():
    assert objective_settings("grpo", gate="sqrt", gate_low=0.1, gate_high=0.2) == {
        "name": "grpo", "weight": "token", "gate": "sqrt", "mean": "token", "gate_low": 0.1, "gate_high": 0.2,
    }  # fmt: skip
    assert objective_settings("pnpo", gate="none") == {
        "name": "pnpo", "weight": "prefix", "gate": "none", "mean": "response",
    }  # fmt: skip


def test_an_objective_is_built_from_the_resolved_settings():
    objective = make_objective("minpro")
    assert (objective.name, objective.weight, objective.mean) == ("minpro", WEIGHTS["minpro"], "token")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ppo", {}, "objective.name = 'ppo': expected one of pnpo, gspo, grpo, cumulative, minpro"),
        ("mine:weight", {}, 'weight = "mine:weight" beside one of these names'),
        ("pnpo", {"epsilon": 1}, "objective.epsilon: no such setting.*gate_low"),
        ("pnpo", {"gate": "soft"}, "objective.gate = 'soft': expected one of sqrt, flat, clip, none"),
        ("pnpo", {"mean": "batch"}, "objective.mean = 'batch': expected response or token"),
        ("grpo", {"gate_low": 0.1}, 'gate_low = 0.1 is not read by gate = "clip".*set gate to sqrt or flat'),
        ("gspo", {"gate_reference_length": 9}, 'gate_reference_length = 9 is not read by gate = "clip"'),
        ("pnpo", {"clip_high": 0.2}, 'clip_high = 0.2 is not read by gate = "sqrt".*set gate to clip'),
        ("pnpo", {"dual_clip": 10.0}, "dual_clip = 10.0 is not read"),
        ("pnpo", {"gate": "flat", "gate_reference_length": 9}, "set gate to sqrt"),
        ("pnpo", {"gate": "none", "gate_low": 0.1}, "gate_low = 0.1 is not read"),
        ("pnpo", {"gate": "clip"}, 'gate = "clip" needs objective.clip_low'),
        ("grpo", {"gate": "sqrt", "gate_low": 0.1}, 'gate = "sqrt" needs objective.gate_high'),
        ("pnpo", {"gate_low": 0.0}, "gate_low = 0.0: expected a finite number above 0"),
        ("pnpo", {"gate_high": float("nan")}, "gate_high = nan"),
        ("pnpo", {"gate_low": "7e-4"}, "gate_low = '7e-4': expected a finite number"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip = 1.0: expected a finite number above 1"),
        ("pnpo", {"gate_reference_length": 0}, "gate_reference_length = 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_way_out(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(name, **settings)
