"""Quantised HF folders for evaluation, through NVIDIA's modelopt: the one file that imports it."""

import contextlib
import hashlib
import json
import shutil
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.convert.hf_writer import published_whole
from pnpo_megatron.data.prompts import load_prompts
from pnpo_megatron.data.templates import load_tokenizer
from pnpo_megatron.errors import ConversionError

CONFIGS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
"""modelopt's recipes: weights and activations with static scales, the output layer left alone."""
_BLOCK = 16  # weights that share one scale in nvfp4
_MOST_PROMPTS, _MOST_TOKENS = 512, 2048


@dataclass(frozen=True)
class Quantisation:
    """A format and the prompts that set the scales of activations."""

    kind: str
    file: Path
    prompts: tuple[tuple[int, ...], ...]

    def summary(self) -> str:
        """One line for the plan."""
        return f"quantise    {self.kind}, calibrated on {len(self.prompts)} prompts of {self.file}"


def plan_quantisation(kind: str, calibration: Path | None, source: HfFolder) -> Quantisation:
    """Check everything that can be checked before a byte is written.

    Args:
        calibration: prompt file, as for training.
        source: folder with config and tokenizer files.

    Raises:
        ConversionError: a format that cannot be made or read, no calibration file, or modelopt is absent.
        DataError, ConfigError: the prompts or the tokenizer cannot be used.
    """
    if kind == "int8":
        raise ConversionError("--quantize int8: vLLM does not read modelopt's int8 folders; use fp8 or nvfp4")
    if kind not in CONFIGS:
        raise ConversionError(f"--quantize {kind}: use {' or '.join(CONFIGS)}")
    if kind == "nvfp4":
        _check_blocks(source.architecture)
    if calibration is None:
        raise ConversionError(
            f"--quantize {kind} needs --calibration FILE.jsonl: prompts that set the scales of activations"
        )
    try:
        version("nvidia-modelopt")
    except PackageNotFoundError:
        raise ConversionError(
            f"--quantize {kind} needs nvidia-modelopt: pip install -r requirements/convert.txt"
        ) from None
    tokenizer = load_tokenizer(source.path)
    template = "chat" if getattr(tokenizer, "chat_template", None) else "raw"
    loaded = load_prompts(calibration, tokenizer, template=template, conflicts="drop")
    prompts = tuple(prompt.token_ids[:_MOST_TOKENS] for prompt in loaded.prompts[:_MOST_PROMPTS])
    return Quantisation(kind, calibration, prompts)


def _check_blocks(arch: Architecture) -> None:
    for name, shape in _matrices(arch).items():
        if shape[-1] % _BLOCK:
            raise ConversionError(
                f"--quantize nvfp4: {name} is {list(shape)}, and rows must be a multiple of {_BLOCK}; use fp8"
            )


def _matrices(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The weights that are quantised: every projection."""
    left = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    shapes = hf_shapes(arch).items()
    return {name: shape for name, shape in shapes if len(shape) == 2 and not name.endswith(left)}


def quantise(plain: HfFolder, out: Path, plan: Quantisation, *, overwrite: bool = False) -> None:
    """Write the quantised copy of a bfloat16 folder, whole or not at all. Holds the model in memory.

    Raises:
        ConversionError: modelopt left out a tensor or a scale (TRAPS H27), or the target exists.
    """
    with published_whole(out, overwrite=overwrite) as folder:
        _export(plain.path, folder, plan)
        _check_written(folder, plain.architecture, plan.kind)
        made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for path in plain.other_files():
            shutil.copyfile(path, folder / path.name)
        config = {**plain.config, "quantization_config": made["quantization_config"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if (folder / "README.md").exists():
            (folder / "README.md").rename(folder / "README.source.md")
        (folder / "README.md").write_text(_card(out.name, plain.architecture, plan), encoding="utf-8")


def _export(plain: Path, folder: Path, plan: Quantisation) -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # about versions and kernels that nothing here needs
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, local_files_only=True)

        def calibrate(quantised: Any) -> None:
            quantised.eval()
            with torch.no_grad():
                for prompt in plan.prompts:
                    quantised(torch.tensor([prompt], device=quantised.device))

        mtq.quantize(model, getattr(mtq, CONFIGS[plan.kind]), calibrate)
        export_hf_checkpoint(model, export_dir=str(folder))


def _check_written(folder: Path, arch: Architecture, kind: str) -> None:
    written, matrices = HfFolder(folder).headers, _matrices(arch)
    scales = ("weight_scale", "input_scale") + (("weight_scale_2",) if kind == "nvfp4" else ())
    for name, shape in hf_shapes(arch).items():
        packed = (shape[0], shape[1] // 2) if kind == "nvfp4" and name in matrices else shape
        if name not in written or written[name].shape != packed:
            raise ConversionError(f"modelopt wrote no {name} of {list(packed)}; nothing was published")
    for name in matrices:
        missing = [scale for scale in scales if name.removesuffix("weight") + scale not in written]
        if missing:
            raise ConversionError(f"modelopt wrote {name} without {missing[0]}; nothing was published")


def _card(name: str, arch: Architecture, plan: Quantisation) -> str:
    card = Path(__file__).parent / "quantised_card.md"
    return card.read_text(encoding="utf-8").format(
        name=name,
        kind=plan.kind,
        recipe=CONFIGS[plan.kind],
        file=plan.file.name,
        modelopt=version("nvidia-modelopt"),
        count=len(_matrices(arch)),
        prompts=len(plan.prompts),
        tokens=sum(len(prompt) for prompt in plan.prompts),
        digest=hashlib.sha256(plan.file.read_bytes()).hexdigest(),
    )
