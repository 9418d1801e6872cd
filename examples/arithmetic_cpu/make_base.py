"""Makes what the example needs: a small Qwen2 base model that adds carelessly, prompts and held-out sums.

    python make_base.py            # about a minute on two cores; writes base/ and data/ beside this file

The base model is trained on worked sums with slips (sums.py), on sums that are in neither data/prompts.jsonl
(the prompts of reinforcement learning) nor data/heldout.jsonl (evaluation). One seed gives one model on one
kind of CPU. Another task is another module with SYMBOLS, TOKENS, POSITIONS, STEPS, CARELESS,
split, prompt and worked; the answer to numbers is their sum (examples/running_totals).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import sums
import torch
from sums import ANSWER
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WANTED = (0.30, 0.50)
"""Sampled accuracy at temperature 1: room to gain 25 points, and groups with right and wrong answers."""


def make_tokenizer(task: ModuleType = sums) -> PreTrainedTokenizerFast:
    """Characters as tokens; the start of the answer line is one token too."""
    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, UNK, *task.SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{ANSWER}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK,
                                   clean_up_tokenization_spaces=False, model_max_length=task.POSITIONS)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, positions: int) -> Qwen2ForCausalLM:
    """A random Qwen2 of 0.3 million parameters in float32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        tie_word_embeddings=False, dtype=torch.float32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def encode_examples(tokenizer: PreTrainedTokenizerFast, items: Sequence[tuple[int, ...]], rng: random.Random,
                    task: ModuleType = sums) -> tuple[Tensor, Tensor]:
    """([B, n] ids, [B, n] labels), one freshly worked example an item; label -100 on prompt and padding."""
    texts = [task.prompt(*item) + task.worked(*item, slips=task.CARELESS, rng=rng) + EOS for item in items]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    labels[:, : len(task.prompt(*items[0]))] = -100  # every prompt of a task has as many tokens
    return ids, labels


@torch.inference_mode()
def accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, items: Sequence[tuple[int, ...]],
             task: ModuleType, *, sample: bool) -> float:
    """Share of items whose answer line is right, one response each, sampled at temperature 1 or greedy."""
    ids = tokenizer([task.prompt(*item) for item in items], return_tensors="pt")["input_ids"]
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.TOKENS, **settings)
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    right = sum(text.partition(ANSWER)[2] == str(sum(item)) for text, item in zip(texts, items, strict=True))
    return float(right / len(items))


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, items: list[tuple[int, ...]],
          task: ModuleType, *, seed: int, steps: int, batch: int = 64, lr: float = 3e-3) -> None:
    """Supervised training on freshly worked sums; the learning rate warms up, then falls to 0 in a line."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, (steps - step) / (steps - 50)))
    started = time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = encode_examples(tokenizer, rng.sample(items, batch), rng, task)
        logits = model(input_ids=ids).logits  # causal, padded on the right: no mask is needed
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"base: step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def write_problems(path: Path, items: Sequence[tuple[int, ...]], task: ModuleType) -> None:
    """JSON Lines ``{"id", "problem", "answer"}``."""
    rows = [{"id": f"{path.stem}-{'+'.join(map(str, item))}", "problem": task.prompt(*item),
             "answer": str(sum(item))} for item in items]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: Sequence[str] | None = None, *, task: ModuleType = sums, folder: Path = HERE) -> int:
    """Command line; 1 when the trained model adds too well or too badly to be of use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=folder, help="folder that gets base/ and data/")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=task.STEPS)
    parser.add_argument("--force", action="store_true", help="make it again although it is there")
    args = parser.parse_args(argv)
    done = args.out / "base" / "made.json"
    if done.exists() and not args.force:
        print(f"base: {done.parent} is there already (--force makes it again)")
        return 0

    torch.set_num_threads(1)  # too small to split, and the result must not depend on the number of cores
    split = task.split(args.seed)
    write_problems(args.out / "data" / "prompts.jsonl", split.prompts, task)
    write_problems(args.out / "data" / "heldout.jsonl", split.heldout, task)
    tokenizer = make_tokenizer(task)
    model = make_model(tokenizer, args.seed, task.POSITIONS)
    print(f"base: {model.num_parameters():,} parameters, {len(split.base)} sums to learn from, "
          f"{len(split.prompts)} prompts for RL, {len(split.heldout)} held out")
    train(model, tokenizer, split.base, task, seed=args.seed, steps=args.steps)

    model.eval()
    check = split.prompts[:1024]  # new to the base model; the held-out sums stay unseen until the evaluation
    sampled, greedy = (accuracy(model, tokenizer, check, task, sample=sample) for sample in (True, False))
    print(f"base: {100 * sampled:.1f} % right when sampled at temperature 1, {100 * greedy:.1f} % greedy")
    if not WANTED[0] <= sampled <= WANTED[1]:
        print(f"error: sampled accuracy {sampled:.2f} is outside {WANTED}; try other --steps or --seed",
              file=sys.stderr)
        return 1
    model.save_pretrained(done.parent)
    tokenizer.save_pretrained(done.parent)
    made = {"seed": args.seed, "steps": args.steps, "sampled": sampled, "greedy": greedy}
    done.write_text(json.dumps(made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
