"""TRL's side of `bench/peers.py`, in .venv-bench: GRPOTrainer, num_iterations = 4, the arithmetic example."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = re.compile(r"Answer: (-?\d+)\s*$")


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a last line "Answer: N" with the right N."""
    found = [ANSWER.search(text) for text in completions]
    return [float(one is not None and one[1] == wanted) for one, wanted in zip(found, answer, strict=True)]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with two clocks: sampling, and all before a loss (sampling, rewards, scoring)."""

    sampling, preparing = 0.0, 0.0

    def _generate(self, *args: Any) -> Any:
        begin = time.perf_counter()
        found = super()._generate(*args)
        self.sampling += time.perf_counter() - begin
        return found

    def _prepare_inputs(self, *args: Any) -> Any:
        begin = time.perf_counter()
        found = super()._prepare_inputs(*args)
        self.preparing += time.perf_counter() - begin
        return found


class Clock(TrainerCallback):
    """Wall time of the training loop."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.begin = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.begin


def main() -> None:
    """peers_trl.py EXAMPLE OUT STEPS: the settings of the example's config.toml, with grpo's objective."""
    example, out, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rows = [json.loads(line) for line in (example / "data" / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["problem"], "answer": str(row["answer"])} for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(example / "base")
    clock = Clock()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(example / "base", dtype=torch.float32),
        reward_funcs=correct,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(out / "trainer"),
            per_device_train_batch_size=256,  # 32 groups of 8 an update
            steps_per_generation=2,  # 64 prompts a rollout batch
            num_iterations=4,
            num_generations=8,
            max_steps=steps * 8,
            max_completion_length=24,
            temperature=1.0,
            top_k=0,
            learning_rate=1.5e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=16,
            weight_decay=0.1,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            seed=42,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=8,
        ),
    )
    trainer.train()
    trainer.model.save_pretrained(out / "hf")
    tokenizer.save_pretrained(out / "hf")
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    lengths = sum(row["completions/mean_length"] for row in logged) / len(logged)
    result = {
        "seconds": clock.seconds,
        "sampling": trainer.sampling,
        "updating": clock.seconds - trainer.preparing,
        "updates": steps * 8,
        "generated": lengths * 512 * steps,
    }
    (out / "result.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
