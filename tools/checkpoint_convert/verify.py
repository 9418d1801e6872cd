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
from pnpo_megatron.convert.stream import export_hf
from pnpo_megatron.errors import UserError
from pnpo_megatron.parallel.settings import ParallelSettings
from pnpo_megatron.policy.checkpoint import load_checkpoint
from pnpo_megatron.policy.conversion import one_process, stored_hf_files
from pnpo_megatron.policy.model import PolicyModel, build_model, output_weight, packed_seq_params

DENSE_BOUND, EXPERTS_BOUND = 1e-5, 1e-4
EXAMPLE = "example: python tools/checkpoint_convert/verify.py --hf models/Qwen2.5-1.5B --megatron ckpt/qwen"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE)
    made.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    made.add_argument("--megatron", type=Path, required=True, help="checkpoint folder")
    made.add_argument("--tokens", type=int, default=2000, help="length of the sample; even (default 2000)")
    made.add_argument(
        "--bound",
        type=float,
        help=f"largest difference allowed (default {DENSE_BOUND:g}, with experts {EXPERTS_BOUND:g}); a large "
        "model's own float32 rounding can lie above that",
    )
    return made


def sample(vocab: int, tokens: int) -> Tensor:
    """[tokens] ids, the same on every machine."""
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))


def hidden_of(model: PolicyModel, ids: Tensor) -> Tensor:
    """[n, hidden] what the output layer sees of one sequence [n], n even."""
    packed = packed_seq_params(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
    positions = torch.arange(len(ids))
    with torch.no_grad():
        hidden: Tensor = model(ids[None], positions[None], attention_mask=None, packed_seq_params=packed)[0]
        return hidden


def difference(ours: Tensor, wanted: Tensor) -> float:
    """The largest absolute one; NaN where they differ in NaNs."""
    wanted = wanted.to(ours.dtype)
    return 0.0 if torch.equal(ours, wanted) else float((ours.double() - wanted.double()).abs().max())


def verify(hf: HfFolder, megatron: Path, tokens: int, bound: float | None) -> bool:
    """Print the differences; whether all are within bounds. Both sides compute in float32, one at a time."""
    arch = hf.architecture
    hf.check_complete()
    ids = sample(arch.vocab, min(tokens, arch.max_positions) // 2 * 2)
    with one_process() as groups:
        stored = stored_hf_files(megatron).architecture
        (model,) = build_model(stored, ParallelSettings(), dtype=torch.float32)
        load_checkpoint(megatron, [model], None, groups)
        gaps = {name: difference(one, hf.tensor(name)) for name, one in export_hf([model], arch, groups)}
        hidden, head = hidden_of(model, ids), output_weight(model)[: arch.vocab].detach()
        del model
    wrong = {name: gap for name, gap in gaps.items() if gap != 0.0}  # a NaN is a difference
    for name, gap in wrong.items():
        print(f"tensor      {name} differs by up to {gap:g}")
    if bound is None:
        bound = EXPERTS_BOUND if arch.experts else DENSE_BOUND
    logits, logprobs, noise = compare(hidden, head, hf.path, ids, bound)
    print(f"tensors     {len(wrong)} differ")
    print(f"logits      differ by up to {logits:.2g} over {len(ids)} tokens (bound {bound:g})")
    print(f"log-probs   differ by up to {float(logprobs.max()):.2g}, {float(logprobs.mean()):.2g} on average")
    if noise is not None:
        print(
            f"noise       two attention kernels of transformers differ by up to {noise:.2g} on this model: "
            "float32 rounding, which --bound can allow for where no tensor differs"
        )
    return not wrong and logits <= bound and float(logprobs.max()) <= bound


@torch.no_grad()
def compare(
    hidden: Tensor, head: Tensor, folder: Path, ids: Tensor, bound: float
) -> tuple[float, Tensor, float | None]:
    """Against transformers: the largest difference of logits, [n - 1] those of the tokens' log-probs, and,
    above ``bound``, how far transformers is from itself."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    ).eval()
    theirs = model.base_model(ids[None]).last_hidden_state[0]
    output = model.get_output_embeddings()
    gap, logprobs = torch.tensor(0.0), []
    for rows in torch.arange(len(ids)).split(256):  # whole logits of a large vocabulary would not fit
        ours, wanted = hidden[rows] @ head.T, output(theirs[rows])
        gap = torch.maximum(gap, (ours - wanted).abs().max())  # keeps a NaN
        change = (ours.log_softmax(-1) - wanted.log_softmax(-1)).abs()
        logprobs.append(change.gather(1, ids.roll(-1)[rows, None])[:, 0])
    noise = None
    if not gap <= bound:
        model.set_attn_implementation("eager")
        again = model.base_model(ids[None]).last_hidden_state[0]
        noise = max(float((output(again[i]) - output(theirs[i])).abs().max()) for i in range(len(ids)))
    return float(gap), torch.cat(logprobs)[:-1], noise


def main(argv: Sequence[str] | None = None) -> int:
    """0 the same, 1 different, 2 the input is wrong."""
    args = parser().parse_args(argv)
    try:
        return 0 if verify(HfFolder(args.hf), args.megatron, args.tokens, args.bound) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
