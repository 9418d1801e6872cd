"""Who may import what. A module not named here may import every layer, but neither Megatron nor vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "pnpo_megatron"

BASE = ("types", "reward_types", "errors", "seeds", "manifest", "durable")
PURE = (*BASE, "algorithm", "convert.layouts", "eval.avg_at_k")
INPUTS = (*PURE, "data", "reward")
SHARDED = (*INPUTS, "parallel", "convert", "eval")


@dataclass(frozen=True)
class Layer:
    """What the modules under one prefix may import: parts of this package, and libraries beyond torch."""

    internal: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    distributed: bool = True
    """May import torch.distributed."""


ANYTHING = Layer(internal=("",), libraries=("*",))
LAYERS: dict[str, Layer] = {
    "": ANYTHING,
    **{name: Layer(PURE, distributed=False) for name in PURE},
    "data": Layer(INPUTS, ("jinja2", "pyarrow", "tokenizers", "transformers"), distributed=False),
    "reward": Layer(INPUTS, ("math_verify", "sympy"), distributed=False),
    "loop": Layer(INPUTS, distributed=False),
    "parallel": Layer(SHARDED),
    "convert": Layer(SHARDED, ("safetensors", "transformers")),
    "convert.progress": Layer(SHARDED, ("rich",)),
    "convert.quantise": Layer(SHARDED, ("modelopt", "transformers")),
    "eval": Layer(SHARDED, ("rich", "transformers")),
    "policy": Layer((*SHARDED, "policy"), ("megatron.core", "numpy", "safetensors", "transformer_engine")),
    "rollout": Layer((*SHARDED, "rollout"), ("safetensors", "transformers", "numpy")),
    "rollout.server_client": Layer((*SHARDED, "rollout"), ("httpx", "numpy", "pydantic_core")),
    "rollout.server_fleet": Layer((*SHARDED, "rollout"), ("httpx",)),
    "rollout.vllm_transfer": Layer((*SHARDED, "rollout"), ("vllm",)),
    "rollout.vllm_worker": Layer((*SHARDED, "rollout"), ("vllm", "safetensors", "transformers", "numpy")),
    "config": Layer(
        (*PURE, "config"), ("pydantic", "pydantic_core", "pydantic_settings", "tomli_w"), distributed=False
    ),
    "analysis": Layer((*PURE, "analysis"), ("rich", "safetensors"), distributed=False),
    "analysis.plots": Layer((*PURE, "analysis"), ("matplotlib",), distributed=False),
    "planning": Layer((*SHARDED, "planning", "config"), ("rich",), distributed=False),
    "monitor": Layer(PURE, ("rich", "tensorboard"), distributed=False),
    "tracking": Layer((*PURE, "config"), ("wandb", "mlflow"), distributed=False),
    "resume": Layer(PURE, ("safetensors",), distributed=False),
}
ENGINES = {"megatron": ("policy",), "vllm": ("rollout.vllm_worker", "rollout.vllm_transfer")}


def matches(module: str, prefix: str) -> bool:
    """``prefix`` names the module itself or a package around it; the empty prefix matches everything."""
    return prefix in ("", module) or module.startswith(prefix + ".")


def layer_of(module: str) -> Layer:
    """The entry with the longest matching prefix."""
    return LAYERS[max((prefix for prefix in LAYERS if matches(module, prefix)), key=len)]


def is_type_checking(node: ast.AST) -> bool:
    """An ``if TYPE_CHECKING:`` block: annotations are not a dependency."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(source: str, module: str, *, is_package: bool) -> set[str]:
    """Dotted names imported anywhere in a module; ``from a import b`` counts as both a and a.b."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and is_type_checking(node):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            up = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*up, *([node.module] if node.module else [])])
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def forbidden(imported: str, module: str) -> bool:
    """Whether ``module`` (relative to the package) may not import ``imported`` (absolute)."""
    top = imported.split(".")[0]
    layer = layer_of(module)
    if not any(matches(module, prefix) for prefix in ENGINES.get(top, ("",))):
        return True
    if top == PACKAGE:
        inner = imported.removeprefix(PACKAGE).lstrip(".")
        # `from ..types import Prompt` lists types.Prompt too; the bare package holds the version only.
        return bool(inner) and not any(
            matches(inner, prefix) or prefix.startswith(inner + ".") for prefix in (*layer.internal, module)
        )
    if top in sys.stdlib_module_names or top == "__future__":
        return False
    if top == "torch":
        return not layer.distributed and matches(imported, "torch.distributed")
    if top == "megatron" and imported != "megatron":
        return not matches(imported, "megatron.core")
    return "*" not in layer.libraries and not any(
        matches(imported, name) or matches(name, imported) for name in layer.libraries
    )


def violations(root: Path) -> list[str]:
    """``module imports name`` for every forbidden import under the package folder."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root).with_suffix("")
        is_package = relative.name == "__init__"
        parts = relative.parts[:-1] if is_package else relative.parts
        names = imports(path.read_text(encoding="utf-8"), ".".join(parts), is_package=is_package)
        module = ".".join(parts[1:])
        found += [f"{'.'.join(parts)} imports {name}" for name in sorted(names) if forbidden(name, module)]
    return found


def test_every_import_respects_the_layers():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("algorithm/planted.py", "import torch.distributed as dist", "torch.distributed"),
        ("algorithm/planted.py", "from torch import distributed", "torch.distributed"),
        ("algorithm/planted.py", "import numpy as np", "numpy"),
        ("algorithm/planted.py", "from ..config import Config", "pnpo_megatron.config"),
        ("algorithm/planted.py", "def f():\n    import pnpo_megatron.parallel", "pnpo_megatron.parallel"),
        ("convert/layouts.py", "import pnpo_megatron.convert.qwen2", "pnpo_megatron.convert.qwen2"),
        ("convert/planted.py", "from megatron.core import parallel_state", "megatron.core"),
        ("policy/planted.py", "from megatron.training import get_args", "megatron.training"),
        ("policy/planted.py", "from pnpo_megatron.rollout import vllm_sampler", "pnpo_megatron.rollout"),
        ("rollout/vllm_sampler.py", "import vllm", "vllm"),
        ("loop.py", "from pnpo_megatron import config", "pnpo_megatron.config"),
        (
            "loop.py",
            "from pnpo_megatron.policy.learner import MegatronLearner",
            "pnpo_megatron.policy.learner",
        ),
        ("build.py", "import megatron.core", "megatron.core"),
        ("a_new_module.py", "import vllm", "vllm"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, line, name):
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n", encoding="utf-8")
    module = f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}"
    assert f"{module} imports {name}" in violations(tmp_path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("algorithm/planted.py", "import math\nfrom torch import Tensor\nfrom .ratios import RatioStats"),
        (
            "algorithm/__init__.py",
            "from .objective import policy_loss\nfrom pnpo_megatron.types import Prompt",
        ),
        ("types.py", "if TYPE_CHECKING:\n    from pnpo_megatron.parallel.groups import ParallelGroups"),
        ("parallel/planted.py", "from torch.distributed import ProcessGroup"),
        ("eval/planted.py", "from pnpo_megatron.eval.avg_at_k import avg_at_k"),
        ("policy/planted.py", "from megatron.core import parallel_state\nfrom . import loss_scale"),
        ("rollout/vllm_worker.py", "from vllm import LLM"),
        ("build.py", "from pnpo_megatron.policy.learner import MegatronLearner\nimport rich"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path, file, line):
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n", encoding="utf-8")
    assert violations(tmp_path) == []


ONLY_TORCH = textwrap.dedent("""
    import importlib.abc, sys
    BLOCKED = set(sys.argv[2].split(","))

    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in BLOCKED:
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocker())
    exec(sys.argv[1])
    print(*sorted(name for name in ("megatron", "vllm", "transformers") if name in sys.modules))
""")
EVERYTHING_ELSE = (
    "jinja2",
    "math_verify",
    "matplotlib",
    "megatron",
    "pyarrow",
    "pydantic",
    "pydantic_settings",
    "psutil",
    "rich",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "tomli_w",
    "transformers",
    "vllm",
)


def run_blocked(statement: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a statement in a new process where the named libraries cannot be imported."""
    command = [sys.executable, "-c", ONLY_TORCH, statement, ",".join(blocked)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)


@pytest.mark.parametrize("statement", [f"import {PACKAGE}", f"import {PACKAGE}.algorithm"])
def test_the_package_and_its_algorithm_need_only_torch(statement):
    result = run_blocked(statement, EVERYTHING_ELSE)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_the_blocker_blocks():
    result = run_blocked("import pydantic", EVERYTHING_ELSE)
    assert result.returncode != 0
    assert "pydantic is blocked" in result.stderr


def test_the_loop_loads_neither_megatron_nor_vllm():
    result = run_blocked(f"import {PACKAGE}.loop", ("megatron", "vllm"))
    if "No module named" in result.stderr:
        pytest.skip("loop.py is not written yet")
    assert (result.returncode, result.stderr) == (0, "")
