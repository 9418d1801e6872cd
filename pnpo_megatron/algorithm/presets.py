"""From settings to an Objective: a name is a preset, single keys override it (DESIGN section 7)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from pnpo_megatron.algorithm.gates import Gate, flat_band, no_gate, ppo_clip, sqrt_band
from pnpo_megatron.algorithm.objective import Objective
from pnpo_megatron.algorithm.weights import resolve_weight
from pnpo_megatron.errors import ConfigError

_GRPO_GATE = {"gate": "clip", "mean": "token", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}

PRESETS: dict[str, dict[str, Any]] = {
    "pnpo": {"weight": "prefix", "gate": "sqrt", "mean": "response", "gate_low": 7e-4, "gate_high": 9.5e-4},
    "gspo": {"weight": "sequence", "gate": "clip", "mean": "response", "clip_low": 3e-4, "clip_high": 4e-4},
    "grpo": _GRPO_GATE | {"weight": "token"},
    "cumulative": _GRPO_GATE | {"weight": "cumulative"},
    "minpro": _GRPO_GATE | {"weight": "minpro"},
}

GATE_KEYS = {
    "sqrt": ("gate_low", "gate_high", "gate_reference_length"),
    "flat": ("gate_low", "gate_high"),
    "clip": ("clip_low", "clip_high", "dual_clip"),
    "none": (),
}
_REQUIRED = ("gate_low", "gate_high", "clip_low", "clip_high")
_TOLERANCE_KEYS = tuple(dict.fromkeys(key for keys in GATE_KEYS.values() for key in keys))
OBJECTIVE_KEYS = ("weight", "alpha", "gate", "mean", "score", "renormalise", *_TOLERANCE_KEYS)
"""What a preset fills in and a setting overrides."""


def objective_settings(name: str = "pnpo", **overrides: Any) -> dict[str, Any]:
    """All settings of the objective, resolved: the preset `name` with overrides; None means "not given".

    Keys: weight ("token" ... or "module:function"), alpha (of weight "tempered"), gate ("sqrt", "flat",
    "clip", "none"), mean ("response", "token"), score ("token", "prefix"), renormalise (bool), gate_low,
    gate_high, gate_reference_length, clip_low, clip_high, dual_clip. The two that no preset sets stand for
    the paper's choice when absent: score "token", no renormalising.

    Raises:
        ConfigError: an unknown name, key or value; a tolerance that the gate does not read, or lacks.
    """
    if name not in PRESETS:
        hint = f'; a weight of your own is weight = "{name}" beside one of these names' if ":" in name else ""
        raise ConfigError(f"objective.name = {name!r}: expected one of {', '.join(PRESETS)}{hint}")
    for key in overrides:
        if key not in OBJECTIVE_KEYS:
            raise ConfigError(
                f"objective.{key}: no such setting; expected one of {', '.join(OBJECTIVE_KEYS)}"
            )
    given = {key: value for key, value in overrides.items() if value is not None}
    settings = PRESETS[name] | given
    gate, mean = settings["gate"], settings["mean"]
    if gate not in GATE_KEYS:
        raise ConfigError(f"objective.gate = {gate!r}: expected one of {', '.join(GATE_KEYS)}")
    if mean not in ("response", "token"):
        raise ConfigError(f"objective.mean = {mean!r}: expected response or token")
    if settings.get("score", "token") not in ("token", "prefix"):
        raise ConfigError(f"objective.score = {settings['score']!r}: expected token or prefix")
    _check_tolerances(name, gate, given, settings)
    unread = set(_TOLERANCE_KEYS) - set(GATE_KEYS[gate])
    return {"name": name} | {key: value for key, value in settings.items() if key not in unread}


def make_objective(name: str = "pnpo", **overrides: Any) -> Objective:
    """The objective of a preset with single keys overridden; see `objective_settings` for keys and errors.

    Here `weight` may also be the function itself.
    """
    settings = objective_settings(name, **overrides)
    return Objective(
        name=name,
        weight=resolve_weight(settings["weight"], settings.get("alpha")),
        gate=_make_gate(settings),
        mean=settings["mean"],
        score=settings.get("score", "token"),
        renormalise=settings.get("renormalise", False),
    )


def _make_gate(settings: Mapping[str, Any]) -> Gate:
    """The gate function with its tolerances bound."""
    if settings["gate"] == "none":
        return no_gate
    if settings["gate"] == "clip":
        bounds = {"low": settings["clip_low"], "high": settings["clip_high"]}
        return partial(ppo_clip, **bounds, dual_clip=settings.get("dual_clip"))
    bounds = {"low": settings["gate_low"], "high": settings["gate_high"]}
    if settings["gate"] == "flat":
        return partial(flat_band, **bounds)
    return partial(sqrt_band, **bounds, reference_length=settings.get("gate_reference_length"))


def _check_tolerances(name: str, gate: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Every tolerance given is read by the gate, every one read is there, and each is in range."""
    for key in _TOLERANCE_KEYS:
        readers = [other for other, keys in GATE_KEYS.items() if key in keys]
        if gate not in readers:
            if key in given:
                raise ConfigError(
                    f'objective.{key} = {given[key]} is not read by gate = "{gate}" (name = "{name}"): '
                    f"remove it, or set gate to {' or '.join(readers)}"
                )
        elif key in settings:
            _check_range(key, settings[key])
        elif key in _REQUIRED:
            raise ConfigError(f'objective.gate = "{gate}" needs objective.{key}; "{name}" has none: set it')


def _check_range(key: str, value: Any) -> None:
    """Tolerances are finite and positive; dual_clip lies beyond 1."""
    floor = 1.0 if key == "dual_clip" else 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= floor:
        raise ConfigError(f"objective.{key} = {value!r}: expected a finite number above {floor:g}")
