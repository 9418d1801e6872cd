"""Compare an HF folder with a Megatron checkpoint: every tensor, logits and log-probs of a sample."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pnpo_megatron.convert.hf_folder import HfFolder
from pnpo_megatron.errors import UserError
from pnpo_megatron.policy.conversion import largest_differences, load_model, one_process, sequence_logits

DENSE_BOUND, EXPERTS_BOUND = 1e-5, 1e-4
EXAMPLE = "example: python tools/checkpoint_convert/verify.py --hf models/Qwen2.5-1.5B --megatron ckpt/qwen"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    made.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    made.add_argument("--megatron", type=Path, required=True, help="checkpoint folder")
    made.add_argument("--tokens", type=int, default=2000, help="length of the sample; even (default 2000)")
    return made


def sample(vocab: int, tokens: int) -> Tensor:
    """[tokens] ids, the same on every machine."""
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))


def verify(hf: HfFolder, megatron: Path, tokens: int) -> bool:
    """Print the differences; whether all are within bounds. Both sides compute in float32."""
    arch = hf.architecture
    hf.check_complete()
    tokens = min(tokens, arch.max_positions) // 2 * 2
    ids = sample(arch.vocab, tokens)
    with one_process() as groups:
        (model,) = load_model(megatron, torch.float32, groups)
        gaps = largest_differences(model, hf, groups)
        wrong = [(name, gap) for name, gap in gaps if gap != 0.0]  # a NaN is a difference
        ours = sequence_logits(model, ids)
    reference = AutoModelForCausalLM.from_pretrained(
        hf.path, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        theirs = reference(ids[None]).logits[0].float()
    for name, gap in wrong:
        print(f"tensor      {name} differs by up to {gap:g}")
    bound = EXPERTS_BOUND if arch.experts else DENSE_BOUND
    logits_gap = float((ours - theirs).abs().max())
    target = ids[1:, None]
    spread = (ours.log_softmax(-1) - theirs.log_softmax(-1))[:-1].gather(1, target).abs()
    print(f"tensors     {len(wrong)} differ")
    print(f"logits      differ by up to {logits_gap:.2g} over {tokens} tokens (bound {bound:g})")
    print(f"log-probs   differ by up to {float(spread.max()):.2g}, {float(spread.mean()):.2g} on average")
    return not wrong and logits_gap <= bound


def main(argv: Sequence[str] | None = None) -> int:
    """0 the same, 1 different, 2 the input is wrong."""
    args = parser().parse_args(argv)
    try:
        return 0 if verify(HfFolder(args.hf), args.megatron, args.tokens) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
