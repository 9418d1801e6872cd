"""HF folder to Megatron distributed checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# torch reads it once. Tensors on huge pages save a fifth of the time, in page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch  # noqa: E402

from pnpo_megatron.errors import UserError  # noqa: E402
from pnpo_megatron.policy.conversion import hf_to_megatron, plan_hf_to_megatron  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXAMPLE = (
    "example: python tools/checkpoint_convert/hf_to_megatron.py --hf models/Qwen2.5-1.5B --out "
    "ckpt/qwen --dry-run"
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    made.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    made.add_argument(
        "--out", type=Path, required=True, help="checkpoint folder to write; loads under any layout"
    )
    made.add_argument("--dtype", choices=sorted(DTYPES), help="default: as stored")
    made.add_argument("--dry-run", action="store_true", help="read headers only and show the plan")
    made.add_argument("--overwrite", action="store_true", help="replace an existing target")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 2 the input is wrong, 1 anything else."""
    args = parser().parse_args(argv)
    try:
        plan = plan_hf_to_megatron(args.hf, args.out, DTYPES.get(args.dtype), overwrite=args.overwrite)
        print(plan.summary())
        if not args.dry_run:
            hf_to_megatron(plan, overwrite=args.overwrite)
    except (UserError, OSError) as error:  # OSError: a full disk, say; no traceback helps
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
