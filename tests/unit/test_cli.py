"""Every command is listed with what it does, and its module is there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from pnpo_megatron.cli import COMMANDS, main


def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    listed = " ".join(capsys.readouterr().out.split())
    described = {name: words for name, (_, words) in COMMANDS.items()}
    for name, words in {"train": "train; resumes", "eval": "Avg@k", **described}.items():
        assert f"{name} {words % ()}" in listed


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_every_command_has_a_module_with_a_main(module: str) -> None:
    spec = importlib.util.find_spec(f"pnpo_megatron.{module}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert [node.args.args[0].arg for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "main"] == ["words"]  # fmt: skip
