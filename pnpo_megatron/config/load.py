"""Reads settings from a TOML file and flags; whatever is wrong with them becomes one line."""

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import CliSettingsSource, SettingsError, TomlConfigSettingsSource

from pnpo_megatron.config.whole import Config, known_keys
from pnpo_megatron.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without: Collection[str] = ()) -> Config:
    """Read a TOML file, leaving out the ``section.key`` in `without`, and ``--section.key=value`` overrides.

    Raises:
        ConfigError: one line with the key, what was found and what would work.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"{path}: no such file; give the path of a TOML configuration, e.g. "
            "examples/arithmetic_cpu/config.toml"
        )

    try:
        flags = CliSettingsSource[Any](Config, cli_parse_args=list(overrides), cli_exit_on_error=False)
        table = TomlConfigSettingsSource(Config, path)()
        for section, _, key in (one.partition(".") for one in without):
            table.get(section, {}).pop(key, None)
        return Config.model_validate(_merged(table, flags()))
    except TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except SettingsError as error:
        raise ConfigError(_flag_message(str(error))) from error
    except ValidationError as error:
        raise ConfigError("; ".join(_message(detail) for detail in error.errors())) from error


def _message(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key)
    if detail["type"] == "missing":
        return f"{key}: missing; set it in the file or with --{key}=VALUE"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    default = known_keys().get(".".join(str(part) for part in detail["loc"][:2]))
    works = "" if default in (..., None, "", []) else f"; {default} works"
    return f"{key} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}{works}"


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(Config.model_fields)}"
    return f"{key}: unknown setting; {hint}"


def _flag_message(text: str) -> str:
    unknown = text.rpartition("unrecognized arguments: ")[2].split()
    if "unrecognized arguments" in text and unknown:
        key = unknown[0].lstrip("-").partition("=")[0]
        return (
            _unknown_key(key)
            if unknown[0].startswith("--")
            else f"{unknown[0]}: expected --section.key=value"
        )
    return text


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested tables joined; where both have a value, `over` wins."""
    joined = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(joined.get(key), dict)
        joined[key] = _merged(joined[key], value) if both else value
    return joined
