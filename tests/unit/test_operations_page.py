"""docs/operations.md and the code keep step: every message has a row, every row is a message that exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from pnpo_megatron import cli, errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SOURCES = [*(ROOT / "pnpo_megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
SCRIPTS = list((ROOT / "scripts" / "slurm").glob("*"))
CLASSES = {name for name, _ in inspect.getmembers(errors, inspect.isclass)} | {"PeerError"}
HELPERS = ("_failure", "_dead")
"""Methods that make an error of a message. Keys of config.json (`refuse`) have one row for all."""


def rendered(node: ast.AST) -> str:
    """The text of a string expression, with … where a value comes in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return rendered(node.left) + rendered(node.right)
    return "…"


def one_line(text: str) -> str:
    return re.sub(r"(…\s*)+…|…", "…", " ".join(text.split()))


def messages() -> dict[str, str]:
    """Every message of an error that a person may meet, and where it is raised."""
    found = {}
    for path in SOURCES:
        in_config = path.parent.name == "config"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in CLASSES and name not in HELPERS and not (in_config and name == "ValueError"):
                continue
            text = one_line(rendered(node.args[0]))
            if len(re.findall(r"\w+", text)) > 1:
                found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    for path in SCRIPTS:
        for text in re.findall(r'fail "([^"]*)"', in_shell(path)):
            found[text] = path.name
    return found


def in_shell(path: Path) -> str:
    """A script on one line, with … for its variables."""
    return one_line(re.sub(r"\\\n|\$\{?\w+(:[-+][^}]*)?\}?", "…", path.read_text(encoding="utf-8")))


def rows() -> list[str]:
    """Quoted messages: what stands in backquotes in the first column of a table whose head says `message`."""
    quoted, inside = [], False
    for line in PAGE.splitlines():
        inside = line.startswith("|") and (inside or line.startswith("| message"))
        if inside and not line.startswith(("| message", "|--")):
            quoted += map(one_line, re.findall(r"`([^`]+)`", line.split("|")[1]))
    return quoted


def holds(text: str, fragment: str) -> bool:
    """The pieces of a fragment stand in the text, in this order."""
    at = 0
    for piece in fragment.split("…"):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def test_every_message_of_the_code_has_a_row():
    quoted = rows()
    bare = {text: where for text, where in messages().items() if not any(holds(text, one) for one in quoted)}
    wanted = "\n".join(f"| `{text}` | cause | what to type |     ({where})" for text, where in bare.items())
    assert not bare, (
        f"docs/operations.md has no row for {len(bare)} messages; add, in the right table:\n{wanted}"
    )


def test_every_row_is_a_message_of_the_code():
    texts = {
        one_line(rendered(node))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    }
    texts |= {in_shell(path) for path in SCRIPTS}
    stale = [fragment for fragment in rows() if not any(holds(text, fragment) for text in texts)]
    assert not stale, f"no code says this any more: {stale}"


def test_every_class_of_errors_and_every_exit_code_is_explained():
    for name in CLASSES:
        assert f"`{name}`" in PAGE, name
    for code in (cli.DONE, cli.FAILED, cli.WRONG_INPUT, cli.STOPPED_EARLY):
        assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE), code
