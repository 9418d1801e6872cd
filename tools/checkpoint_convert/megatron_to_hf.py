"""Megatron distributed checkpoint to HF folder."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# torch reads it once. Tensors on huge pages save a fifth of the time, in page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # noqa: E402

from pnpo_megatron.convert.hf_folder import HfFolder  # noqa: E402
from pnpo_megatron.convert.quantise import Quantisation, plan_quantisation, quantise  # noqa: E402
from pnpo_megatron.errors import ConversionError, UserError  # noqa: E402
from pnpo_megatron.policy.conversion import Plan, megatron_to_hf, plan_megatron_to_hf  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXAMPLE = (
    "example: python tools/checkpoint_convert/megatron_to_hf.py --megatron "
    "runs/pnpo/checkpoints/step_000150 --out hf/out"
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    made.add_argument(
        "--megatron", type=Path, required=True, help="checkpoint folder, of a run or of hf_to_megatron.py"
    )
    made.add_argument(
        "--out", type=Path, required=True, help="HF folder to write, with config and tokenizer files"
    )
    made.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    made.add_argument("--dry-run", action="store_true", help="read headers only and show the plan")
    made.add_argument("--overwrite", action="store_true", help="replace an existing target")
    made.add_argument(
        "--quantize", metavar="FORMAT", help="fp8 or nvfp4, for evaluation with vLLM; needs nvidia-modelopt"
    )
    made.add_argument(
        "--calibration", type=Path, metavar="FILE.jsonl", help="prompts that set the scales of --quantize"
    )
    return made


def quantised(plan: Plan, args: argparse.Namespace, how: Quantisation) -> None:
    """The HF folder of a plan, by way of a plain one that is removed again."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}.plain-", dir=args.out.parent) as folder:
        plain = Path(folder) / "hf"
        megatron_to_hf(replace(plan, out=plain), args.megatron, overwrite=False)
        quantise(HfFolder(plain), args.out, how, overwrite=args.overwrite)


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 2 the input is wrong, 1 anything else."""
    args = parser().parse_args(argv)
    try:
        if args.quantize and args.dtype:
            raise ConversionError("--quantize leaves the other tensors in bfloat16; drop --dtype")
        dtype = torch.bfloat16 if args.quantize else DTYPES.get(args.dtype)
        plan = plan_megatron_to_hf(args.megatron, args.out, dtype, overwrite=args.overwrite)
        how = plan_quantisation(args.quantize, args.calibration, plan.source) if args.quantize else None
        print(plan.summary(), *([how.summary()] if how else []), sep="\n")
        if args.dry_run:
            return 0
        if how:
            quantised(plan, args, how)
        else:
            megatron_to_hf(plan, args.megatron, overwrite=args.overwrite)
    except (UserError, OSError) as error:  # OSError: a full disk, say; no traceback helps
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
